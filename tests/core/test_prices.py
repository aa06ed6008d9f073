"""Prices are the exact ceilings, though most are found without exact arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import mpmath
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from odograph import GDP, ZCDP, Guarantee, Policy, PureDP, compile_policy, parallel
from odograph.core.conversions import largest_mu, largest_rho, pure_to_intrinsic, pure_to_rdp
from odograph.core.filters import ExactMeter, Gdp, GdpMeter, PaperMeter, RhoMeter, SmoothMeter, Zcdp, ZcdpMeter
from odograph.core.filters.smooth import smooth_time_pure
from odograph.core.fixed_point import MOST_PRICED, SCALE, Number, exact_of, up
from odograph.core.guarantees import Parallel, number_of
from odograph.core.meters import DeltaMeter, DriftMeter, EpsilonMeter, IntrinsicMeter, Meter, OrderMeter, PureStep
from odograph.core.planning import AccountState, largest, quote

COMPILED = compile_policy(Policy(1, 1e-6, filter="exact"))
EXACT = COMPILED.meter(ExactMeter)
UNIT = EXACT.quantum

SIZES = st.one_of(
    st.floats(1e-9, 100),
    st.integers(1, 10**6).map(lambda n: n / 1000),
    st.integers(1, 20_000).map(lambda units: math.sqrt(units * UNIT)),  # next to whole units
)


def amounts(guarantee: PureDP | GDP) -> dict[str, int | None]:
    return dict(zip((meter.name for meter in COMPILED.meters), COMPILED.price(guarantee).amounts, strict=True))


@given(SIZES)
@example(0.002)  # its square is one unit, nearly
def test_a_gaussian_costs_its_square_rounded_up(mu: float) -> None:
    square = Fraction(repr(mu)) ** 2
    found = amounts(GDP(mu))
    assert found["intrinsic"] == math.ceil(square * SCALE)
    assert found["exact"] == max(4, math.ceil(square / UNIT))


@given(SIZES)
def test_a_pure_step_costs_its_epsilon_and_its_intrinsic_time_rounded_up(epsilon: float) -> None:
    time = Fraction(pure_to_intrinsic(epsilon))
    found = amounts(PureDP(epsilon))
    assert found["epsilon"] == math.ceil(Fraction(repr(epsilon)) * SCALE)
    assert found["intrinsic"] == max(1, math.ceil(time * SCALE))
    assert found["exact"] == max(1, math.ceil(time / UNIT))


POLICIES = {
    "default": Policy(1, 1e-6),
    "pure": Policy(1, 1e-6, reserve="pure"),
    "training": Policy(1, 1e-6, reserve="training"),
    **{name: Policy(1, 1e-6, filter=name) for name in ("basic", "exact", "gdp", "paper", "renyi", "zcdp")},
    "unlimited": Policy(None, 1e-6),
    "rho": Policy(rho="0.5", delta=1e-6),
    "mu": Policy(mu=1, delta=1e-6),
}
STEPS = st.one_of(SIZES, st.floats(0, 1e6), st.floats(0, 0.05), st.fractions(0, 10**6, max_denominator=10**6))


def by_conversion(meter: Meter, epsilon: Number) -> int | None:
    """The price of a pure step on a meter: each padded by itself, and rounded by exact arithmetic."""
    near = float(epsilon)
    time = Fraction(pure_to_intrinsic(near))
    match meter:
        case DeltaMeter() | DriftMeter():
            return 0
        case EpsilonMeter():
            units = exact_of(epsilon) * SCALE
        case PaperMeter():
            units = exact_of(epsilon) ** 2 * SCALE
            if units > MOST_PRICED * SCALE:
                return None
        case IntrinsicMeter() | ZcdpMeter() | RhoMeter():
            units = time * SCALE
        case ExactMeter():
            units = time / meter.quantum
        case OrderMeter():
            units = Fraction(up(pure_to_rdp(near, meter.near), 64)) * SCALE
        case SmoothMeter():
            smooth = smooth_time_pure(near, meter.quantum, meter.reserve, order=meter.order)
            assert smooth is not None
            units = min(Fraction(smooth), math.ceil(time / meter.quantum) * meter.quantum) * SCALE
        case _:
            raise LookupError(meter)
    return max(int(epsilon > 0), math.ceil(units))


@pytest.mark.parametrize("name", POLICIES)
@given(STEPS)
@example(0.0)
@example(5e-324)
@example(1e-160)  # its square is below every float
@example(Fraction(1, 10**330))  # it is itself
@example(Fraction(10**320))  # it is above every float
@example(6.3)  # the hyperbolic functions at the largest order are near the end of their range
@example(2000.0)
def test_what_meters_share_of_a_pure_step_changes_no_price(name: str, epsilon: Fraction | float) -> None:
    compiled, step = compile_policy(POLICIES[name]), PureDP(epsilon)
    if name == "unlimited" and epsilon > MOST_PRICED:
        return  # no part of the odometer reads it
    assert compiled.price(step).amounts == tuple(meter.price(step) for meter in compiled.meters)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"gdp", "mu", "unlimited"}))
@given(STEPS)
@example(1e-160)
def test_a_pure_step_costs_its_conversions_padded_and_rounded_one_by_one(
    name: str, epsilon: Fraction | float
) -> None:
    compiled, step = compile_policy(POLICIES[name]), PureDP(epsilon)
    found = tuple(by_conversion(meter, number_of(step.epsilon)) for meter in compiled.meters)
    assert compiled.price(step).amounts == found


def test_a_meter_with_a_price_of_its_own_does_not_charge_pure_steps_by_that_of_its_base() -> None:
    with pytest.raises(TypeError, match="Double must have a price_pure of its own"):

        class Double(IntrinsicMeter):
            def price(self, guarantee: Guarantee) -> int | None:
                price = super().price(guarantee)
                return None if price is None else 2 * price

    class Dearer(GdpMeter):  # whose price of pure steps is its price
        def price(self, guarantee: Guarantee) -> int | None:
            price = super().price(guarantee)
            return None if price is None else 2 * price

    step = PureDP("0.1")
    assert Dearer("gdp", 1).price_pure(PureStep(step)) == Dearer("gdp", 1).price(step)


def test_a_price_rounded_in_floats_would_be_caught() -> None:
    wrong = [mu for mu in (math.sqrt(n * UNIT) for n in range(1, 2000)) if math.ceil(mu * mu / UNIT) > 4]
    naive = [math.ceil(mu * mu * float(1 / UNIT)) for mu in wrong]
    assert naive != [math.ceil(Fraction(repr(mu)) ** 2 / UNIT) for mu in wrong]


PARTS = st.lists(st.sampled_from([PureDP(0.1), PureDP(0.25), GDP(0.2), GDP(0.05)]), min_size=1, max_size=6)
REPLACED = compile_policy(Policy(1, 1e-6, neighbors="replace-one"))


@given(PARTS, st.booleans())
def test_parts_cost_the_dearest_or_the_dearest_two_also_if_they_are_the_same_object(
    parts: list[PureDP | GDP],
    again: bool,  # noqa: FBT001  drawn
) -> None:
    made = [replace(part) for part in parts] if again else parts
    for compiled, affected in ((COMPILED, 1), (REPLACED, 2)):
        rows = zip(*(compiled.price(part).amounts for part in parts), strict=True)
        expected = tuple(
            None if None in row else sum(sorted(amount or 0 for amount in row)[-affected:]) for row in rows
        )
        assert compiled.price(parallel(made)).amounts == expected


@given(PARTS, st.integers(1, 5))
def test_an_offer_for_parts_keeps_their_proportions_and_is_admitted(parts: list[PureDP | GDP], times: int) -> None:
    offer = largest(AccountState("", COMPILED, COMPILED.start), parallel(parts), times)
    assert isinstance(offer, Parallel)
    assert [type(part) for part in offer.parts] == [type(part) for part in parts]
    sizes = [float(part.epsilon if isinstance(part, PureDP) else part.mu) for part in parts]
    offered = [float(getattr(part, "epsilon", 0) or getattr(part, "mu", 0)) for part in offer.parts]
    assert offered == pytest.approx([offered[0] / sizes[0] * size for size in sizes])
    assert quote(AccountState("", COMPILED, COMPILED.start), [offer] * times).admitted
    more = Parallel(tuple(PureDP(9) if isinstance(part, PureDP) else GDP(9) for part in offer.parts))
    assert not quote(AccountState("", COMPILED, COMPILED.start), [more] * times).admitted


def test_an_offer_for_parts_of_very_different_sizes_is_made_too() -> None:
    parts = parallel([PureDP(5e-324), PureDP(Fraction(3**200 + 2, 3**199)), GDP(1 / 3)])
    offer = largest(AccountState("", COMPILED, COMPILED.start), parts)
    assert isinstance(offer, Parallel)
    assert quote(AccountState("", COMPILED, COMPILED.start), [offer]).admitted


@pytest.mark.parametrize("epsilon", ["0.001", "0.1", "1", "5"])
def test_a_pure_step_costs_its_gaussian_equivalent_or_its_square(epsilon: str) -> None:
    paper = compile_policy(Policy(1, 1e-6, filter="paper"))
    with mpmath.workdps(40):
        odds = mpmath.exp(mpmath.mpf(epsilon))
        quantile = mpmath.sqrt(2) * mpmath.erfinv(2 * odds / (1 + odds) - 1)
        exact = 4 * quantile**2 * SCALE
        price = GdpMeter("gdp", 1).price(PureDP(epsilon))  # without a reserve
        assert price is not None
        assert exact <= price <= exact * (1 + mpmath.mpf(10) ** -12) + 1
    assert paper.price(PureDP(epsilon)).amounts[paper.index(PaperMeter)] == Fraction(epsilon) ** 2 * SCALE
    assert GdpMeter("gdp", 1).price(ZCDP("0.1")) is None
    assert PaperMeter("paper", 1).price(GDP("0.1")) is None
    assert GdpMeter("gdp", 1).price(PureDP(10**6)) is not None
    assert GdpMeter("gdp", 1).price(PureDP(10**6 + 1)) is None


def test_how_far_a_filter_reaches_is_its_limit() -> None:
    assert Zcdp().reach(1.0, 1e-6) == pytest.approx(2 * largest_rho(1.0, 1e-6))
    assert Gdp().reach(1.0, 1e-6) == pytest.approx(largest_mu(1.0, 1e-6) ** 2)
