"""The Gaussian filter with its reserve: its limit and prices, what it admits, and accounts of 0.1.0 without one."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Policy, ProbDP, PureDP, compile_policy
from odograph.core.conversions import gdp_to_dp_delta, largest_mu
from odograph.core.filters import GdpMeter
from odograph.core.fixed_point import SCALE
from odograph.core.policy import Compiled
from odograph.core.theory import kov_delta, kov_steps
from odograph.core.value_iteration import INWARD, Grid, Kernel, Member, values
from odograph.errors import BudgetExceeded, InvalidPolicy

TARGETS: Final[list[tuple[float, float]]] = [(1, 1e-6), (0.3, 1e-7), (3, 1e-6), (8, 1e-5)]


@lru_cache
def meter_for(epsilon: float = 1, delta: float = 1e-6) -> GdpMeter:
    return compile_policy(Policy(epsilon, delta, filter="gdp")).meter(GdpMeter)


METER: Final = meter_for()
LIMIT: Final = METER.limit or 0
RESERVE: Final = METER.reserve or Fraction(0)
FIRST: Final = GdpMeter("gdp", 56028963825260)  # as 0.1.0 made it for the same target


def steps(meter: GdpMeter, cost: Guarantee) -> int:
    """How many equal steps the meter admits; basic composition, which every policy has beside it, may admit more."""
    return (meter.limit or 0) // (meter.price(cost) or 1)


def exact(number: Fraction | float) -> mpf:
    """A float as the decimal that it was written as."""
    ratio = Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
    return mpf(ratio.numerator) / ratio.denominator


def gaussian_delta(variance: mpf, epsilon: mpf) -> mpf:
    """The divergence of a Gaussian, by the textbook formula."""
    mu = mp.sqrt(variance)
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def intrinsic(epsilon: mpf) -> mpf:
    return 2 * epsilon * mp.tanh(epsilon / 2)


def as_a_gaussian(epsilon: mpf) -> mpf:
    """The mu^2 of the Gaussian that randomized response is a post-processing of."""
    return 8 * mp.erfinv(mp.tanh(epsilon / 2)) ** 2


def closed_form(epsilon: mpf, w: mpf) -> mpf:
    angle = epsilon / mp.sqrt(w)
    if angle >= mpf("1.5"):
        return mp.inf
    return 2 * (mp.log(mp.cosh(epsilon / 2)) - mp.log(mp.cos(angle))) / (mpf(1) / 4 + 1 / w)


def sharp(epsilon: mpf, w: mpf) -> mpf:
    """The Gaussian whose total variation is that of randomized response and the reserve, less the reserve."""
    odds = mp.exp(epsilon)
    distance = odds / (1 + odds) * gaussian_delta(w, -epsilon) + gaussian_delta(w, epsilon) / (1 + odds)
    return 8 * mp.erfinv(distance) ** 2 - w


# Shares of the optimum from SMOOTH.md, section 2, computed there by another program.
@pytest.mark.parametrize(
    ("fraction", "share"), [(3000, 0.990), (500, 0.989), (200, 0.981), (100, 0.959), (50, 0.880), (20, 0.615)]
)
def test_pure_steps_get_their_share_of_the_optimum(fraction: int, share: float) -> None:
    optimum = kov_steps(1.0, 1e-6, 1 / fraction)
    assert steps(METER, PureDP(Fraction(1, fraction))) / optimum == pytest.approx(share, abs=0.001)
    if fraction >= 50:
        assert steps(FIRST, PureDP(Fraction(1, fraction))) / optimum < 0.64  # as before


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_limit_and_the_reserve_are_together_what_gaussians_may_have(target: tuple[float, float]) -> None:
    meter = meter_for(*target)
    assert meter.reserve is not None
    with mp.workdps(40):
        whole = mpf(meter.limit) / SCALE + exact(meter.reserve)
        epsilon, delta = exact(float(target[0])), exact(target[1])
        assert gaussian_delta(whole, epsilon) <= delta < gaussian_delta(whole * (1 + mpf("1e-6")), epsilon)
        assert float(exact(meter.reserve) / whole) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("fraction", [1000, 300, 100, 40, 10, 3])
def test_equal_steps_that_are_admitted_are_within_the_target_by_exact_composition(
    target: tuple[float, float], fraction: int
) -> None:
    epsilon, delta = target
    meter, size = meter_for(*target), epsilon / fraction
    assert kov_delta(steps(meter, PureDP(size)), size, 0.0, epsilon) <= delta
    assert gdp_to_dp_delta(size * steps(meter, GDP(size)) ** 0.5, epsilon) <= delta


def test_a_raised_limit_is_caught_by_exact_composition() -> None:
    careless = replace(METER, limit=LIMIT * 102 // 100)
    size = 0.001
    assert gdp_to_dp_delta(size * steps(careless, GDP(size)) ** 0.5, 1.0) > 1e-6
    assert kov_delta(steps(careless, PureDP(size)), size, 0.0, 1) > 1e-6


@lru_cache
def reached(price: Callable[[float], int | None], limit: int, parts: int) -> float:
    """The divergence at epsilon = 1 of an adversary who chooses coins of j/parts by what happened so far."""
    spacing, grains = 1 / parts, 10 * parts * parts  # in a unit of intrinsic time
    reach = 3.0 * largest_mu(1.0, 1e-6)
    low, high = math.ceil((1.0 + reach) / spacing), math.ceil(reach / spacing) + 1
    total = limit * grains // SCALE
    # Rounded up: this adversary exists.
    charges = ((j, math.ceil(Fraction(price(j * spacing) or SCALE, SCALE) * grains)) for j in range(1, low))
    members = [
        Member(charge, Kernel(points=((-j, 1 / (1 + math.exp(-j * spacing))), (j, 1 / (1 + math.exp(j * spacing))))))
        for j, charge in charges
        if charge <= total
    ]
    return next(itertools.islice(values(Grid(spacing, -low, high), 1.0, members, INWARD), total - 1, None))


def pure_price(meter: GdpMeter) -> Callable[[float], int | None]:
    return lambda epsilon: meter.price(PureDP(epsilon))


def test_an_adversary_who_adapts_stays_below_delta() -> None:
    assert 0.2e-6 < reached(pure_price(METER), LIMIT, 100) <= 1e-6


def test_an_adversary_who_is_charged_by_a_reserve_that_was_not_set_aside_exceeds_delta() -> None:
    """Negative controls: a reserve without end makes prices fall nearly to intrinsic time; intrinsic time itself."""
    assert reached(pure_price(replace(METER, reserve=10**4 * RESERVE)), LIMIT, 100) > 1e-6
    with mp.workdps(30):
        assert reached(lambda epsilon: int(intrinsic(exact(epsilon)) * SCALE) + 1, LIMIT, 100) > 1e-6


SIZES: Final = st.floats(1e-7, 30)
METERS: Final = st.sampled_from([meter_for(*target) for target in TARGETS])


@given(METERS, st.floats(1e-7, 5))
def test_a_pure_step_costs_the_least_of_three_prices_rounded_up(meter: GdpMeter, epsilon: float) -> None:
    price = meter.price(PureDP(epsilon))
    with mp.workdps(60):
        e, w = exact(epsilon), exact(meter.reserve or Fraction(0))
        least = min(sharp(e, w), closed_form(e, w), as_a_gaussian(e)) * SCALE
        assert price is not None
        assert least <= price <= least * (1 + mpf("1e-9")) + 1


@given(METERS, SIZES)
def test_a_pure_step_costs_at_least_its_intrinsic_time_and_at_most_its_gaussian(
    meter: GdpMeter, epsilon: float
) -> None:
    price = meter.price(PureDP(epsilon))
    with mp.workdps(60):
        e = exact(epsilon)
        assert price is not None
        assert intrinsic(e) * SCALE <= price <= as_a_gaussian(e) * SCALE * (1 + mpf("1e-12")) + 1


@given(METERS, SIZES, st.floats(1e-9, 1))
def test_a_price_grows_with_epsilon(meter: GdpMeter, epsilon: float, more: float) -> None:
    below, above = meter.price(PureDP(epsilon)), meter.price(PureDP(epsilon * (1 + more)))
    assert below is not None
    assert above is not None
    assert below <= above


def test_a_price_without_its_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    from odograph.core.filters import gdp  # noqa: PLC0415  the module, to break it

    monkeypatch.setattr(gdp, "up", lambda value, *_: value * (1 - 1e-12))
    gdp._pure_units.cache_clear()  # noqa: SLF001  computed with padding
    below = 0
    with mp.workdps(60):
        for j in range(1, 40):
            epsilon = j / 200
            price = METER.price(PureDP(epsilon)) or 0
            below += price < min(sharp(exact(epsilon), exact(RESERVE)), as_a_gaussian(exact(epsilon))) * SCALE
    gdp._pure_units.cache_clear()  # noqa: SLF001
    assert below > 5


def test_steps_with_a_delta_cost_what_pure_ones_do_and_their_delta_elsewhere() -> None:
    compiled = compile_policy(Policy(1, "2e-6", delta_steps="1e-6", filter="gdp"))
    pure = compiled.price(PureDP("0.01")).amounts
    for cost in (ApproxDP("0.01", "1e-9"), ProbDP("0.01", "1e-9")):
        found = compiled.price(cost).amounts
        place = compiled.index(GdpMeter)
        assert found[place] == pure[place]
        assert found[0] == 10**9


def test_a_zcdp_step_costs_more_than_the_gaussian_of_its_size_and_a_large_one_has_no_price() -> None:
    rho = RESERVE / 40
    assert METER.price(ZCDP(rho)) == math.ceil(2 * rho / (1 - 2 * rho / RESERVE) * SCALE)
    assert METER.price(ZCDP(RESERVE / 4)) is not None
    assert METER.price(ZCDP(RESERVE * Fraction(26, 100))) is None
    assert METER.price(RDP((2, 4), (0.001, 0.002))) is None


def test_what_is_no_privacy_at_all_has_no_price_and_nothing_costs_nothing() -> None:
    for meter in (METER, FIRST):
        assert meter.price(PureDP(10**6)) is not None
        assert meter.price(PureDP(10**6 + 1)) is None
        assert meter.price(PureDP(0)) == 0
        assert meter.price(PureDP(Fraction(1, 10**350))) == 1


# An account of 0.1.0, as that version wrote it.
OLD_POLICY: Final[dict[str, Any]] = {
    "form": 1,
    "epsilon": "1",
    "delta": "1/500000",
    "delta_steps": "1/1000000",
    "rule": "gdp",
    "takes": ["gaussian", "pure"],
    "menu": [],
    "orders": [],
    "odometer": {"kind": "discrete-mixture", "low": 2.79502476305974e-07, "high": 0.279502476305974, "points": 16},
    "slack": None,
    "unit": "person",
    "neighbours": "add-remove",
}
OLD: Final[dict[str, Any]] = {
    "form": 1,
    "name": "old",
    "keep": None,
    "compiled": {
        "form": 1,
        "policy": OLD_POLICY,
        "meters": [
            {"name": "delta", "clock": "delta", "limit": "1000000000000"},
            {"name": "epsilon", "clock": "epsilon", "limit": "1000000000000000"},
            {"name": "intrinsic", "clock": "intrinsic", "limit": None},
            {"name": "gdp", "clock": "gdp", "limit": "56028963825260"},
            {"name": "drift", "clock": "drift", "limit": None},
        ],
        "note": "",
    },
    "totals": {
        "amounts": ["0", "10000000000000", "10099999166676", "10157079070857", "0"],
        "unpriced": ["0", "1", "0", "0", "0"],
        "steps": "2",
    },
    "entries": [
        {
            "guarantee": {"form": 1, "kind": "pure", "epsilon": "0.01"},
            "price": ["0", "10000000000000", "99999166676", "157079070857", "0"],
            "note": "",
            "account": "old",
        },
        {
            "guarantee": {"form": 1, "kind": "gdp", "mu": "0.1"},
            "price": ["0", None, "10000000000000", "10000000000000", "0"],
            "note": "",
            "account": "old",
        },
    ],
    "children": [],
    "digest": "390edd3217c383009c6b67703f750aa33121f5d152fbdd40e3db2f804078c3e6",
}


def test_an_account_of_0_1_0_goes_on_to_the_unit_at_the_prices_that_it_had() -> None:
    account = odo.Accountant.from_dict(OLD)
    compiled = account.compiled
    place = compiled.index(GdpMeter)
    assert compiled.meters[place] == FIRST
    assert compiled.price(PureDP("0.01")).amounts[place] == 157079070857
    # The meter has 45871884754403 left, and 56028963825260 in all: what is set aside today is not taken from it.
    account.spend(GDP(Fraction(math.isqrt(45871884754403 * 10**15), 10**15)))
    assert 0 <= 56028963825260 - account.totals.amounts[place] <= 1
    with pytest.raises(BudgetExceeded):
        account.spend(GDP("0.0001"))


@pytest.mark.parametrize("form", [1, 2])
def test_a_stored_meter_without_a_reserve_is_read_and_written_and_takes_what_it_took(form: int) -> None:
    compiled = Compiled.from_dict(OLD["compiled"])
    if form == 2:
        document = json.loads(json.dumps(compiled.to_dict()))
        del document["meters"][3]["reserve"]  # as it was written before there were reserves
        compiled = Compiled.from_dict(document)
    assert compiled.meter(GdpMeter) == FIRST
    assert Compiled.from_dict(json.loads(json.dumps(compiled.to_dict()))) == compiled
    assert compiled.price(ZCDP("0.00001")).amounts[3] is None
    # Steps with a delta cost what a pure step did: the reveal is counted on the delta meter.
    pure = compiled.price(PureDP("0.01")).amounts[3]
    for cost in (ApproxDP("0.01", "1e-9"), ProbDP("0.01", "1e-9")):
        assert compiled.price(cost).amounts[3] == pure


def test_a_policy_that_is_made_today_has_a_reserve_and_is_the_same_policy() -> None:
    old = Compiled.from_dict(OLD["compiled"])
    today = compile_policy(Policy.from_dict(OLD_POLICY))
    assert today.policy == old.policy
    assert today.meter(GdpMeter) == METER
    assert Compiled.from_dict(json.loads(json.dumps(today.to_dict()))) == today


def changed(**options: object) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(json.dumps(compile_policy(Policy(1, 1e-6, filter="gdp")).to_dict()))
    assert form["meters"][3]["pricing"] == "gdp"
    form["meters"][3] |= options
    return form


# A larger reserve makes prices fall, so it has to be taken from the limit.
@pytest.mark.parametrize(
    "options",
    [
        {"limit": str(LIMIT + 1000)},
        {"limit": FIRST.limit and str(FIRST.limit)},
        {"reserve": str(10 * RESERVE)},
        {"reserve": "0"},
        {"reserve": "-1"},
        {"reserve": None, "limit": str((FIRST.limit or 0) + 1000)},
        {"name": "another"},
        {"quantum": "1"},
    ],
    ids=str,
)
def test_a_stored_limit_that_is_known_to_be_too_large_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy):
        Compiled.from_dict(changed(**options))


def test_any_reserve_that_was_taken_from_the_limit_is_accepted() -> None:
    whole = LIMIT + RESERVE * SCALE
    for reserve in (RESERVE / 2, 5 * RESERVE):
        form = changed(reserve=str(reserve), limit=str(math.floor(whole - reserve * SCALE)))
        assert Compiled.from_dict(form).meter(GdpMeter).reserve == reserve
    assert Compiled.from_dict(changed(limit=str(LIMIT // 2)))


def test_a_compiled_policy_without_its_meter_is_refused() -> None:
    form = changed()
    del form["meters"][3]
    with pytest.raises(InvalidPolicy, match="must be those of its filter 'gdp'"):
        Compiled.from_dict(form)


def test_an_interactive_mechanism_has_a_price_unless_it_is_known_by_its_moments() -> None:
    for cost in (PureDP("0.01"), ApproxDP("0.01", "1e-9"), GDP("0.01")):
        assert METER.price_interactive(cost) == METER.price(cost) is not None
    assert METER.price(ZCDP("1e-6")) is not None
    assert METER.price_interactive(ZCDP("1e-6")) is None
