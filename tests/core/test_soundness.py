"""Ways in which a filter or a reading could be unsound, each closed once and kept closed."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest

import odograph as odo
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.odometers import FilterOdometer, Rogers
from odograph.core.policy import Compiled
from odograph.core.value_iteration import blocks_alone, solve
from odograph.errors import InvalidArgument


def item_of(p: list[float], q: list[float], *, oriented: bool, step: float = 0.002) -> MenuItem:
    """A mechanism with finitely many outcomes, as a menu item."""
    ratio = np.log(np.array(p) / np.array(q))
    ways = (LossDistribution.of(ratio, np.array(p), step), LossDistribution.of(-ratio, np.array(q), step))
    return MenuItem("pair", 1, step, ways, oriented=oriented)


def divergence(pairs: list[tuple[list[float], list[float]]], epsilon: float) -> float:
    """The hockey-stick divergence of a fixed sequence of pairs, by enumeration."""
    total = 0.0
    for outcome in itertools.product(*(range(len(p)) for p, _ in pairs)):
        up = math.prod(p[i] for i, (p, _) in zip(outcome, pairs, strict=True))
        down = math.prod(q[i] for i, (_, q) in zip(outcome, pairs, strict=True))
        total += max(0.0, up - math.exp(epsilon) * down)
    return total


def test_a_reveal_is_never_forgotten() -> None:
    leaky = LossDistribution(0, np.array([0.999]), 0.001)
    item = MenuItem("leaky", 1, 0.01, (leaky, leaky))
    assert blocks_alone(Fraction(1), Fraction(1, 10**6), item) == 0
    assert blocks_alone(Fraction(1), Fraction(1, 100), item) == 10
    # Negative control: without its reveal the item would seem to cost nothing.
    free = LossDistribution(0, np.array([1.0]), 0.0)
    assert blocks_alone(Fraction(1), Fraction(1, 10**6), MenuItem("free", 1, 0.01, (free, free))) > 1000


def test_an_item_that_can_be_turned_is_certified_both_ways() -> None:
    p, q = [0.6806, 0.3191, 0.0003], [0.0191, 0.7172, 0.2637]
    epsilon, delta = Fraction("2.77"), Fraction(1, 2)
    turned = divergence([(p, q), (q, p)], float(epsilon))
    straight = max(divergence([(p, q)] * 2, float(epsilon)), divergence([(q, p)] * 2, float(epsilon)))
    assert straight < delta < turned
    assert blocks_alone(epsilon, delta, item_of(p, q, oriented=False)) < 2
    # Negative control: as if the direction were fixed, two runs would be certified.
    assert blocks_alone(epsilon, delta, item_of(p, q, oriented=True)) >= 2


def test_what_can_be_turned_is_charged_step_by_step_and_replacing_has_no_direction() -> None:
    ways = item_of([0.6, 0.4], [0.4, 0.6], oriented=False).directions
    with pytest.raises(InvalidArgument, match="must be 1"):
        MenuItem("pair", 2, 0.002, ways)
    with pytest.raises(InvalidArgument, match="no direction"):
        MenuItem("pair", 1, 0.002, ways, oriented=True, neighbors="replace-one")
    with pytest.raises(odo.errors.InvalidPolicy, match="were analyzed for"):
        odo.Policy(
            1, 1e-6, neighbors="replace-one", filter=odo.filters.Exact(menu=[MenuItem("pair", 1, 0.002, ways)])
        )


def test_randomized_response_on_a_menu_agrees_with_the_rule_for_pure_steps() -> None:
    """The unoriented two-point pair is randomized response: 0.1-DP steps, alone, are plain composition."""
    high = math.exp(0.1) / (1 + math.exp(0.1))
    item = item_of([high, 1 - high], [1 - high, high], oriented=False, step=0.0125)
    steps = blocks_alone(Fraction(3), Fraction(1, 10**6), item)
    from odograph.core.theory import kov_steps  # noqa: PLC0415  the independent count

    optimum = kov_steps(3.0, 1e-6, 0.1)
    assert 0.99 * optimum - 1 <= steps <= optimum


@pytest.mark.parametrize("delta", [0, "1e-12", "1e-6", 0.1])
def test_under_basic_composition_the_reading_is_the_sum(delta: str | float) -> None:
    compiled = odo.compile_policy(odo.Policy(10, delta, filter="basic", odometer=FilterOdometer(12.0)))
    totals = compiled.start
    for _ in range(1000):
        totals = odo.planning.ask(odo.planning.AccountState("", compiled, totals), odo.PureDP("0.01")).totals_after
    assert compiled.reading(totals).loss == pytest.approx(10.0, rel=1e-12)


def test_an_offer_of_more_runs_carries_their_delta() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, delta_steps="1e-7", filter="renyi"))
    run = odo.guarantees.Mechanism("noisy", 1, odo.RDP((8, 32, 128), (1e-9, 4e-9, 2e-8), "1e-8"))
    offer = odo.planning.largest(odo.planning.AccountState("", compiled, compiled.start), run)
    assert isinstance(offer, odo.guarantees.Mechanism)
    assert offer.steps == 10
    assert offer.curve is not None
    assert Fraction(str(offer.curve.delta)) == Fraction(1, 10**7)


@pytest.mark.parametrize("rule", ["exact", "zcdp", "gdp", "paper", "renyi"])
def test_a_stored_limit_that_was_raised_is_refused(rule: str) -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter=rule))
    form = json.loads(json.dumps(compiled.to_dict()))
    assert Compiled.from_dict(form) == compiled
    last = max(i for i, meter in enumerate(form["meters"]) if meter["limit"] is not None)
    meter = form["meters"][last]
    lower = json.loads(json.dumps(form))
    lower["meters"][last]["limit"] = str(int(meter["limit"]) - 5)
    assert Compiled.from_dict(lower)
    meter["limit"] = str(int(meter["limit"]) * 3)
    with pytest.raises(odo.errors.InvalidPolicy):
        Compiled.from_dict(form)


def test_a_stored_menu_that_lists_something_else_is_refused() -> None:
    item = item_of([0.55, 0.45], [0.45, 0.55], oriented=False, step=0.02)
    compiled = odo.compile_policy(odo.Policy(1, 1e-3, filter=odo.filters.Exact(takes=(), menu=[item])))
    form = json.loads(json.dumps(compiled.to_dict()))
    assert Compiled.from_dict(form).price(item.runs(3)) == compiled.price(item.runs(3))
    for charges in ([], [["pair", 2, 1]], [["another", 1, 1]], [["pair", 1, 1], ["another", 1, 1]]):
        form["meters"][3]["charges"] = charges
        with pytest.raises(odo.errors.InvalidPolicy):
            Compiled.from_dict(form)


@pytest.mark.parametrize(("rate", "noise"), [(1e-7, 100.0), (1e-3, 100.0), (0.01, 1.0), (0.5, 2.0)])
def test_subsampled_curves_are_not_underpriced(rate: float, noise: float) -> None:
    curve = odo.subsampled_gaussian(rate, noise).curve
    assert curve is not None
    for order in (2, 5, 16, 32):
        terms = (
            Fraction(math.comb(order, k))
            * Fraction(rate) ** k
            * (1 - Fraction(rate)) ** (order - k)
            * Fraction(math.expm1(min(700.0, (k * k - k) / (2 * noise**2))))
            for k in range(2, order + 1)
        )
        truth = math.log1p(float(sum(terms))) / (order - 1)
        bound = curve.at(Fraction(order))
        assert bound is not None
        assert float(bound) >= truth * (1 - 1e-12)


def test_a_rogers_odometer_needs_two_people() -> None:
    with pytest.raises(InvalidArgument, match="at least 2"):
        Rogers(1.5)
    assert math.isinf(Rogers(1000.0).boundary(0.5, 0.5))


@pytest.mark.parametrize("rule", ["paper", "zcdp", "gdp"])
def test_limits_of_fractional_targets_are_rounded_down(rule: str) -> None:
    """A target a hair below a float must not get the float's limit."""
    exact = odo.compile_policy(odo.Policy(Fraction(7001, 9), "1e-6", filter=rule)).meters[3].limit
    above = odo.compile_policy(odo.Policy(math.nextafter(7001 / 9, math.inf), "1e-6", filter=rule)).meters[3].limit
    assert exact is not None
    assert above is not None
    assert exact <= above


def test_mixed_menus_cover_both_families_and_items() -> None:
    """Families and an item together: the budget is below either alone, and the item's charge is a whole number."""
    item = item_of([0.51, 0.49], [0.49, 0.51], oriented=False, step=0.004)
    alone = solve(Fraction(2), Fraction(1, 10**5), fineness=1)
    both = solve(Fraction(2), Fraction(1, 10**5), fineness=1, menu=[item])
    assert 0 < both.units <= alone.units
    assert all(charge >= 1 for _, _, charge in both.charges)
