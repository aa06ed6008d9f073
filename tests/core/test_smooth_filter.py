"""The smooth filter: what it takes, its limit, its stored form, and that nothing admitted exceeds the target."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Policy, ProbDP, PureDP, compile_policy, filters
from odograph.compile import Certification, certification
from odograph.core.conversions import gdp_to_dp_delta, largest_mu
from odograph.core.filters.smooth import RESERVES, Smooth, SmoothMeter, set_aside
from odograph.core.fixed_point import SCALE
from odograph.core.guarantees import DiscreteGaussian, Mechanism, Parallel, exact_of
from odograph.core.mechanisms import subsampled_gaussian, subsampled_gaussian_menu
from odograph.core.planning import AccountState, how_many
from odograph.core.policy import Compiled
from odograph.core.theory import kov_delta
from odograph.core.value_iteration import FAMILIES, FINE, Budget, family_quantum
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
    assert 0.985 * count <= steps(PURE, cost) <= count


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


# Discrete Gaussian noise: composed exactly, by convolving what a sequence of answers is under one neighbor.


def noise_sum(sigma: int, steps: int) -> tuple[int, np.ndarray[Any, Any]]:
    """The law of the sum of so many values of noise: its smallest value, and the masses from there."""
    points = np.arange(-14 * sigma, 14 * sigma + 1)
    one = np.exp(-(points**2) / (2.0 * sigma**2))
    law = functools.reduce(np.convolve, [one / one.sum()] * steps, np.ones(1))
    return -14 * sigma * steps, law


def discrete_divergence(counts: dict[int, int], epsilon: float) -> float:
    """The hockey-stick divergence of runs of discrete Gaussian noise, by sigma, on counts that differ by one.

    The loss of a value x is (1 - 2 x)/(2 sigma^2), so that of all of them follows from the sum for each sigma.
    """
    losses, masses = np.zeros(1), np.ones(1)
    for sigma, steps in counts.items():
        first, law = noise_sum(sigma, steps)
        kept = law > 1e-20  # the rest is far below any delta here
        own = (steps - 2.0 * (first + np.arange(law.size)[kept])) / (2.0 * sigma**2)
        losses = np.add.outer(losses, own).ravel()
        masses = np.multiply.outer(masses, law[kept]).ravel()
    return float(np.sum(masses * np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - losses)))))


def test_the_exact_composition_is_that_of_the_definition() -> None:
    """One answer, and two, by enumeration with many digits."""
    with mpmath.workdps(40):
        weights = {x: mpmath.exp(-mpmath.mpf(x * x) / 18) for x in range(-60, 61)}
        total = mpmath.fsum(weights.values())
        law = {x: w / total for x, w in weights.items()}
        bound = mpmath.exp("0.4")
        one = mpmath.fsum(max(0, p - bound * law.get(x - 1, 0)) for x, p in law.items())
        two = mpmath.fsum(
            max(0, p * q - bound * law.get(x - 1, 0) * law.get(y - 1, 0))
            for x, p in law.items()
            for y, q in law.items()
        )
    assert discrete_divergence({3: 1}, 0.4) == pytest.approx(float(one), rel=1e-9)
    assert discrete_divergence({3: 2}, 0.4) == pytest.approx(float(two), rel=1e-9)


@pytest.mark.parametrize("sigma", [7, 8, 10, 20, 30])
def test_equal_discrete_gaussians_that_are_admitted_are_within_the_target(sigma: int) -> None:
    noise = odo.mechanisms.discrete_gaussian(sigma)
    price = PURE.price(noise).amounts[PURE.index(SmoothMeter)]
    assert price is not None
    # Its variance, and a correction that is small where the noise is a few times the grid.
    assert Fraction(SCALE, sigma**2) < price < Fraction(SCALE, sigma**2) * (1 + Fraction(1, 1000))
    count = steps(PURE, noise)
    assert discrete_divergence({sigma: count}, 1.0) <= 1e-6
    # Negative control: at half the price there would be twice as many.
    assert discrete_divergence({sigma: 2 * count + 1}, 1.0) > 1e-6


def test_discrete_gaussians_of_several_sizes_are_within_the_target() -> None:
    account = odo.Accountant(PURE)
    counts = {8: 0, 20: 0}
    for sigma in (8, 20, 20, 8, *[20] * 100):
        if account.decide(odo.mechanisms.discrete_gaussian(sigma)).admitted:
            account.spend(odo.mechanisms.discrete_gaussian(sigma))
            counts[sigma] += 1
    assert min(counts.values()) > 0
    assert discrete_divergence(counts, 1.0) <= 1e-6
    assert discrete_divergence({sigma: 2 * count for sigma, count in counts.items()}, 1.0) > 1e-6


def test_a_vector_costs_what_its_coordinates_do() -> None:
    """Three counts that change by one each are three steps, and a sensitivity of the square root of three."""
    together = odo.mechanisms.discrete_gaussian(20, "1.7320508075688773", 3)
    count = steps(PURE, together)
    assert steps(PURE, odo.mechanisms.discrete_gaussian(20)) == 3 * count
    assert discrete_divergence({20: 3 * count}, 1.0) <= 1e-6


def test_a_grid_is_a_unit() -> None:
    cents = odo.mechanisms.discrete_gaussian("0.07", "0.02", 3, "0.01")
    assert PURE.price(cents) == PURE.price(odo.mechanisms.discrete_gaussian(7, 2, 3))
    # On the integers that noise would be far too little.
    assert PURE.price(replace(cents, grid=1)).amounts[PURE.index(SmoothMeter)] is None
    # On the grid of all floats there is nothing to correct, whatever the number of coordinates.
    floats = odo.mechanisms.discrete_gaussian(3, "0.01", 10**12, Fraction(1, 2**1074))
    price = PURE.price(floats).amounts[PURE.index(SmoothMeter)]
    assert price is not None
    assert Fraction(SCALE, 90_000) < price <= Fraction(SCALE, 90_000) + 2


def test_each_meter_charges_discrete_noise_by_itself_or_by_its_zcdp() -> None:
    index, noise = PURE.index(SmoothMeter), odo.mechanisms.discrete_gaussian
    own, implied = (PURE.price(cost).amounts for cost in (noise(20), ZCDP(Fraction(1, 800))))
    assert implied[index] is None  # too large for the reserve as zCDP
    assert own[:index] == implied[:index]
    assert own[index + 1 :] == implied[index + 1 :]
    # Noise below the grid has no price of its own, and that of zCDP.
    assert meter_of(PURE).price(noise("0.4", "0.004")) is None
    assert PURE.price(noise("0.4", "0.004")) == PURE.price(ZCDP("0.00005"))
    for rule in ("zcdp", "renyi"):
        compiled = compile_policy(Policy(*TARGET, filter=rule))
        assert compiled.price(noise(20)) == compiled.price(ZCDP(Fraction(1, 800)))
    for rule in ("exact", "paper", "basic"):
        with pytest.raises(UnprovenComposition):
            compile_policy(Policy(*TARGET, filter=rule)).price(noise(20))


def test_a_refusal_offers_more_discrete_noise() -> None:
    account = odo.Accountant(PURE)
    asked = odo.mechanisms.discrete_gaussian(5, 2, 3)
    decision = account.decide(asked)
    assert not decision.admitted
    offer = decision.largest
    assert isinstance(offer, DiscreteGaussian)
    assert (offer.sensitivity, offer.dimension, offer.grid) == (2, 3, 1)
    assert account.decide(offer).admitted
    # A little less noise than offered is refused.
    assert not account.decide(replace(offer, sigma=exact_of(offer.sigma) * (1 - Fraction(1, 10**9)))).admitted
    least = account.largest(DiscreteGaussian)
    assert least == account.largest(odo.mechanisms.discrete_gaussian)
    assert isinstance(least, DiscreteGaussian)
    calibrated = account.calibrate(odo.mechanisms.discrete_gaussian)
    assert calibrated is not None
    assert float(least.sigma) <= calibrated.value <= float(least.sigma) * 1.001
    two = odo.parallel([asked, odo.mechanisms.discrete_gaussian(4)])
    halves = account.largest(two)
    assert isinstance(halves, Parallel)
    assert account.decide(halves).admitted


@pytest.mark.parametrize("reserve", sorted(RESERVES))
def test_a_policy_prints_what_its_reserve_gives(reserve: str) -> None:
    assert f"reserve {reserve!r}: {RESERVES[reserve].gives}" in repr(Policy(*TARGET, reserve=reserve))


def orders_of_default(epsilon: int) -> Fraction:
    order = meter_of(compile_policy(Policy(epsilon, 1e-6))).order
    assert order is not None
    return order


@pytest.mark.parametrize(
    ("intrinsic", "mean"), [(0.1, 0.0011), (0.4, 0.0044), (0.5, 0.005), (2.0, 0.005), (9.0, 0.005)]
)
def test_a_tail_is_a_share_of_the_budget_up_to_a_longest_one(intrinsic: float, mean: float) -> None:
    quantum = Fraction(1, 1000)
    budget = Budget(Fraction(1), Fraction("1e-6"), FAMILIES, quantum, round(intrinsic / quantum), 4)
    reserve = set_aside(budget, "mixed", [[0.0] * (2 * budget.units)]).reserve
    assert reserve is not None
    assert reserve.order is not None
    assert float(2 / (reserve.order * (reserve.order - 1))) == pytest.approx(mean, rel=1e-3)


def test_the_tail_of_the_default_reserve_is_no_longer_than_an_order_of_twenty_needs() -> None:
    assert orders_of_default(1) > orders_of_default(2) > 20  # a share of the budget
    assert Fraction(20) < orders_of_default(4) == orders_of_default(8) == orders_of_default(20) < 21
    noisy = subsampled_gaussian(0.01, 2)
    assert all(odo.Accountant(Policy(epsilon, 1e-6)).how_many(noisy) > 1000 for epsilon in (4, 8, 20))
