"""The smooth filter: what it takes, its limit, its stored form, and that nothing admitted exceeds the target."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Policy, ProbDP, PureDP, compile_policy, filters
from odograph.compile import Certification, certification
from odograph.core.conversions import gdp_to_dp_delta, largest_mu
from odograph.core.filters.smooth import RESERVES, Smooth, SmoothMeter
from odograph.core.fixed_point import SCALE
from odograph.core.guarantees import Mechanism
from odograph.core.mechanisms import subsampled_gaussian, subsampled_gaussian_menu
from odograph.core.planning import AccountState, how_many
from odograph.core.policy import Compiled
from odograph.core.theory import kov_delta
from odograph.core.value_iteration import FAMILIES, FINE, family_quantum
from odograph.errors import InvalidPolicy, UnprovenComposition

TARGET = (1, 1e-6)
PURE = compile_policy(Policy(*TARGET, filter=Smooth(reserve="pure")))
CURVE = RDP((2, 64), ("0.000002", "0.00007"))


def mixed() -> Compiled:
    return compile_policy(Policy(*TARGET, filter=Smooth(reserve="mixed")), fineness=1)


def meter_of(compiled: Compiled) -> SmoothMeter:
    return compiled.meter(SmoothMeter)


def steps(compiled: Compiled, cost: Guarantee) -> int:
    return how_many(AccountState("", compiled, compiled.start), cost)


# Counted with another program, for a budget of N = 13562 units, the fine quantum and k = 68.
@pytest.mark.parametrize(
    ("cost", "count"),
    [
        (PureDP("0.0001"), 5_395_966),
        (PureDP("0.001"), 53_926),
        (PureDP("0.005"), 2_155),
        (PureDP("0.01"), 539),
        (GDP("0.001"), 53_960),
    ],
    ids=str,
)
def test_small_steps_are_charged_their_variance(cost: Guarantee, count: int) -> None:
    quantum = family_quantum(Fraction(1), Fraction(1, 10**6), FINE)
    limit = int((13562 - 68 - 4) * quantum * SCALE)
    meter = SmoothMeter("smooth", limit, quantum, 13562, 68, None, FAMILIES)
    assert limit // (meter.price(cost) or 0) == count
    # The shipped table has a coarser quantum, and gives nearly as many.
    assert 0.995 * count <= steps(PURE, cost) <= count


@pytest.mark.parametrize("reserve", sorted(RESERVES))
@pytest.mark.parametrize("epsilon", [Fraction(1, 1000), Fraction(1, 100), Fraction(1, 30)], ids=str)
def test_equal_pure_steps_that_are_admitted_are_within_the_target_by_optimal_composition(
    reserve: str, epsilon: Fraction
) -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve=reserve)), fineness=1)
    count = steps(compiled, PureDP(epsilon))
    assert kov_delta(count, float(epsilon), 0.0, Fraction(1)) <= 1e-6
    # Little is wasted either: a quarter more would exceed it, at these coarse budgets.
    assert kov_delta(round(count * 1.25) + 2, float(epsilon), 0.0, Fraction(1)) > 1e-6


@given(st.floats(0.0005, 0.2))
def test_equal_gaussians_that_are_admitted_are_within_the_target(mu: float) -> None:
    count = steps(PURE, GDP(mu))
    assert gdp_to_dp_delta(mu * count**0.5, 1.0) <= 1e-6


def test_a_meter_without_a_reserve_is_caught_by_gaussians() -> None:
    """Negative control: the whole product of quantum and units is more than Gaussians may have."""
    meter = meter_of(PURE)
    most = largest_mu(1.0, 1e-6) ** 2
    assert (meter.limit or 0) / SCALE < most
    careless = replace(meter, limit=int(most * 1.01 * SCALE))
    assert not careless.has_sound_options
    count = (careless.limit or 0) // (meter.price(GDP("0.01")) or 1)
    assert gdp_to_dp_delta(0.01 * count**0.5, 1.0) > 1e-6


@pytest.mark.parametrize(
    "cost",
    [PureDP("0.01"), ApproxDP("0.01", "1e-9"), ProbDP("0.01", "1e-9"), GDP("0.01"), ZCDP("0.00001"), CURVE],
    ids=lambda cost: cost.kind,
)
def test_every_kind_of_small_step_has_a_price_on_the_one_meter(cost: Guarantee) -> None:
    compiled = mixed()
    index = compiled.index(SmoothMeter)
    price = compiled.price(cost).amounts[index]
    assert price is not None
    assert price > 0


def test_a_curve_needs_a_reserve_with_an_order() -> None:
    assert mixed().price(subsampled_gaussian(0.01, 3)).amounts[mixed().index(SmoothMeter)] is not None
    for cost in (CURVE, subsampled_gaussian(0.01, 3)):
        with pytest.raises(UnprovenComposition):
            PURE.price(cost)


def test_a_step_without_a_price_ends_the_meter_and_is_not_admitted_by_it() -> None:
    account = odo.Accountant(mixed())
    with pytest.raises(odo.BudgetExceeded):
        account.spend(ZCDP("0.5"))  # too large for the reserve, and it has no epsilon
    account.spend(GDP("0.05"))


def test_a_run_of_an_item_is_charged_its_part_of_a_batch() -> None:
    menu = subsampled_gaussian_menu(1, 1e-6, [(0.01, 1.5)])
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(menu=menu)), fineness=1)
    (name, batch, units) = meter_of(compiled).charges[0]
    index = compiled.index(SmoothMeter)
    for runs in (1, batch, batch + 1):
        exact = Fraction(runs * units, batch) * meter_of(compiled).quantum * SCALE
        price = compiled.price(Mechanism(name, runs)).amounts[index]
        assert price is not None
        assert exact <= price < exact + 1


@pytest.mark.parametrize("reserve", sorted(RESERVES))
def test_a_compiled_policy_is_stored_and_read_back(reserve: str) -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve=reserve)), fineness=1)
    again = Compiled.from_dict(json.loads(json.dumps(compiled.to_dict())))
    assert again == compiled
    assert again.price(PureDP("0.01")) == compiled.price(PureDP("0.01"))


def changed(**options: Any) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(json.dumps(PURE.to_dict()))
    place = next(i for i, meter in enumerate(form["meters"]) if meter["pricing"] == "smooth")
    form["meters"][place] |= options
    return form


# A larger reserve makes prices fall, and a larger limit or budget admits more.
@pytest.mark.parametrize(
    "options",
    [
        {"limit": str((meter_of(PURE).limit or 0) + 10**9)},
        {"reserve": 13_000},
        {"reserve": 3},
        {"units": 20_000},
        {"units": 20_000, "limit": str(10**14)},
        {"order": "48"},
        {"takes": ["pure"]},
        {"quantum": "0"},
    ],
    ids=str,
)
def test_a_stored_limit_that_is_known_to_be_too_large_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy):
        Compiled.from_dict(changed(**options))


def test_limits_are_certified_by_the_table_or_by_a_solve_and_not_by_a_document() -> None:
    assert certification(PURE) is Certification.TABLE
    assert certification(mixed()) is Certification.SOLVED
    smaller = Compiled.from_dict(changed(limit=str((meter_of(PURE).limit or 0) // 2)))
    assert certification(smaller) is Certification.TABLE
    third = {"quantum": str(meter_of(PURE).quantum / 3), "limit": str((meter_of(PURE).limit or 0) // 3)}
    elsewhere = Compiled.from_dict(changed(**third))
    assert certification(elsewhere) is Certification.NONE


def test_wrong_options_are_named() -> None:
    with pytest.raises(InvalidPolicy, match="reserve must be one of"):
        Smooth(reserve="large")
    with pytest.raises(InvalidPolicy, match="'gaussian'"):
        Smooth(takes=("pure",))
    assert filters.FILTERS["smooth"] is Smooth
