"""Promises other than (epsilon, delta): a total of rho, a total of mu, and none but readings.

What is promised is checked against exact adversaries: small mechanisms, chosen adaptively among all that the gate
admits, by backward induction over the account's own totals. A twin with one broken limit or price is caught by each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf

import odograph as odo
from odograph import GDP, RDP, ZCDP, Accountant, ApproxDP, Guarantee, Policy, ProbDP, PureDP, compile_policy
from odograph.core.filters import Basic, GdpMeter, GdpTotal, RhoMeter, Unlimited, UnlimitedMeter, ZcdpTotal
from odograph.core.fixed_point import CEILING, SCALE
from odograph.core.gate import Price, Totals, decide
from odograph.core.guarantees import DiscreteGaussian, Mechanism, Parallel
from odograph.core.meters import EpsilonMeter, Meter, PureStep
from odograph.core.odometers import BestOf, DiscreteMixture, FilterOdometer, Odometer, RenyiOdometer
from odograph.core.planning import AccountState, ask, calibrate, calibration_question, how_many, largest, quote
from odograph.core.policy import Compiled, check_compiled
from odograph.core.theory import FinitePair, conditional_randomized_response
from odograph.errors import BudgetExceeded, InvalidArgument, InvalidPolicy, UnprovenComposition
from odograph.population.gate import gate_of

POLICIES: Final = {
    "rho": Policy(rho="0.5"),
    "rho with delta": Policy(rho="1/3", delta=1e-6),
    "mu": Policy(mu=1),
    "mu with delta": Policy(mu=0.7, delta=1e-5),
    "no limit": Policy(None, 1e-6),
    "no limit, slack": Policy(None, 1e-6, slack=0.1),
}


# Exact adversaries.


@dataclass(frozen=True)
class Step:
    """A mechanism on few outcomes, and the guarantee that it is asked for by."""

    guarantee: Guarantee
    pair: FinitePair

    @property
    def rows(self) -> list[tuple[float, float]]:
        return [(float(p), float(q)) for p, q in zip(self.pair.p, self.pair.q, strict=True)]


def response(epsilon: str, delta: str = "0") -> Step:
    cost: Guarantee = PureDP(epsilon) if delta == "0" else ApproxDP(epsilon, delta)
    return Step(cost, conditional_randomized_response(float(epsilon), Fraction(delta)))


def renyi_divergence(pair: FinitePair, order: float) -> float:
    rows = [(p, q) for p, q in zip(pair.p, pair.q, strict=True) if p or q]
    return math.log(sum(float(p) ** order * float(q) ** (1 - order) for p, q in rows)) / (order - 1)


def best_gain(compiled: Compiled, steps: Sequence[Step], factor: Callable[[Step], float]) -> float:
    """The largest product of factors over all that an analyst can be admitted, whatever the outcomes were."""
    prices = [(compiled.price(step.guarantee), factor(step)) for step in steps]

    @cache
    def best(totals: Totals) -> float:
        made = [(decide(compiled.meters, totals, price), gain) for price, gain in prices]
        return max([1.0, *(gain * best(d.totals_after._replace(steps=0)) for d, gain in made if d.admitted)])

    return best(compiled.start)


def largest_rho_needed(compiled: Compiled, steps: Sequence[Step], orders: Sequence[float]) -> float:
    """The largest D_a/a of everything together; at one order the moments of the steps multiply, on every path."""
    found = 0.0
    for order in orders:
        moments = {step: math.exp((order - 1) * renyi_divergence(step.pair, order)) for step in steps}
        gain = best_gain(compiled, steps, moments.__getitem__)
        found = max(found, math.log(gain) / (order - 1) / order)
    return found


def worst_divergence(compiled: Compiled, steps: Sequence[Step], epsilon: float) -> float:
    """The largest hockey-stick divergence over all adaptive analysts: backward induction over ratio and totals."""
    prices = [(step, compiled.price(step.guarantee)) for step in steps]
    odds = math.exp(epsilon)

    @cache
    def best(ratio: float, totals: Totals) -> float:
        values = [max(0.0, 1.0 - odds * ratio)]
        for step, price in prices:
            decision = decide(compiled.meters, totals, price)
            if decision.admitted:
                after = decision.totals_after._replace(steps=0)
                # An outcome that only the first law has is a reveal: it counts in full.
                values.append(sum(p * best(round(ratio * q / p, 12), after) if q else p for p, q in step.rows if p))
        return max(values)

    return best(1.0, compiled.start)


def gaussian_divergence(mu: float, epsilon: float) -> float:
    """The divergence of mu-GDP, by the textbook formula."""
    return float(mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu))


def with_meter(compiled: Compiled, meter: Meter) -> Compiled:
    """A twin with another meter in the place of the one of the same name."""
    return replace(compiled, meters=tuple(meter if one.name == meter.name else one for one in compiled.meters))


# rho.

ORDERS: Final = (1.05, 1.5, 2.0, 4.0, 9.0, 30.0)
SKEWED: Final = FinitePair(
    (Fraction(6, 10), Fraction(3, 10), Fraction(1, 10)), (Fraction(4, 10), Fraction(4, 10), Fraction(2, 10))
)


def skewed_step() -> Step:
    """A mechanism that is no randomized response, with the least rho that holds at the orders of the test."""
    both = (SKEWED, SKEWED.swapped)
    rho = max(renyi_divergence(pair, order) / order for pair in both for order in ORDERS)
    return Step(ZCDP(math.ceil(rho * 1e6) / 1e6), SKEWED)


STEPS_RHO: Final = [response("0.3"), response("0.5"), response("1"), response("2.75"), skewed_step()]


@pytest.mark.parametrize("rho", [0.125, 0.4])
def test_no_adaptive_analyst_exceeds_a_promised_rho(rho: float) -> None:
    compiled = compile_policy(Policy(rho=rho))
    assert 0.8 * rho < largest_rho_needed(compiled, STEPS_RHO, ORDERS) <= rho * (1 + 1e-12)


def test_the_plain_sum_of_epsilons_beside_a_promised_rho_is_caught() -> None:
    """Negative control: the epsilon that 0.125-zCDP implies at delta 1e-6, as an alternative, exceeds the rho."""
    rho = 0.125
    epsilon = rho + 2 * math.sqrt(rho * math.log(1e6))
    twin = with_meter(compile_policy(Policy(rho=rho)), EpsilonMeter("epsilon", int(epsilon * SCALE)))
    assert largest_rho_needed(twin, STEPS_RHO, ORDERS) > 5 * rho


def test_a_price_that_is_too_low_for_rho_is_caught() -> None:
    """Negative control: half the intrinsic time, as if epsilon^2/4 were the price of a pure step."""

    class Half(RhoMeter):
        def price(self, guarantee: Guarantee) -> int | None:
            price = super().price(guarantee)
            return None if price is None else price // 2

        def price_pure(self, step: PureStep) -> int:
            return super().price_pure(step) // 2

    compiled = compile_policy(Policy(rho=0.4))
    twin = with_meter(compiled, Half("rho", compiled.meter(RhoMeter).limit))
    assert largest_rho_needed(twin, STEPS_RHO, ORDERS) > 1.5 * 0.4


def test_steps_with_deltas_take_a_share_of_the_approximation_and_no_more() -> None:
    """Without the reveals the divergence is within rho, and the reveals together have at most delta."""
    compiled = compile_policy(Policy(rho=0.4, delta="0.01"))
    steps = [response("0.5", "0.004"), response("0.3", "0.003"), response("0.5")]
    latent = [Step(step.guarantee, response(str(step.guarantee.epsilon)).pair) for step in steps]  # type: ignore[attr-defined]
    assert largest_rho_needed(compiled, latent, ORDERS) <= 0.4 * (1 + 1e-12)
    kept = {step: 1 / (1 - float(getattr(step.guarantee, "delta", 0))) for step in steps}
    assert 0.99 <= 1 / best_gain(compiled, steps, kept.__getitem__) < 0.994
    # Negative control: deltas that are not counted reveal more than was promised.
    free = [Step(PureDP(step.guarantee.epsilon), step.pair) for step in steps]  # type: ignore[attr-defined]
    gains = {one: kept[step] for one, step in zip(free, steps, strict=True)}
    assert 1 / best_gain(compiled, free, gains.__getitem__) < 0.99


@pytest.mark.parametrize(("parts", "fits"), [(10, 10), (8, 8), (1000, 1000), (3, 2)])
def test_equal_parts_of_rho_fit_where_they_are_decimals(parts: int, fits: int) -> None:
    account = Accountant(Policy(rho="0.5"))
    assert account.how_many(ZCDP(Fraction(1, 2 * parts))) == fits
    assert Accountant(Policy(mu=2)).how_many(GDP("0.2")) == 100


# mu.

STEPS_MU: Final = [response("0.25"), response("0.5"), response("1")]
EPSILONS: Final = (-1.0, -0.25, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


@pytest.mark.parametrize("mu", [0.6, 1.0])
def test_no_adaptive_analyst_is_below_the_trade_off_of_a_promised_mu(mu: float) -> None:
    compiled = compile_policy(Policy(mu=mu))
    found = {e: worst_divergence(compiled, STEPS_MU, e) for e in EPSILONS}
    assert all(found[e] <= gaussian_divergence(mu, e) * (1 + 1e-9) for e in EPSILONS), found
    assert found[0.0] > 0.75 * gaussian_divergence(mu, 0.0)


@pytest.mark.parametrize("broken", [lambda e: 2 * e * math.tanh(e / 2), lambda e: e * e], ids=["intrinsic", "square"])
def test_a_pure_step_at_its_variance_is_caught_under_a_promised_mu(broken: Callable[[float], float]) -> None:
    """Negative control: the price that a reserve would pay for, without one."""

    class Cheap(GdpMeter):
        def price(self, guarantee: Guarantee) -> int | None:
            return math.ceil(broken(float(guarantee.epsilon)) * SCALE)  # type: ignore[attr-defined]

    compiled = compile_policy(Policy(mu=1))
    twin = with_meter(compiled, Cheap("mu^2", compiled.meter(GdpMeter).limit))
    assert any(worst_divergence(twin, STEPS_MU, e) > gaussian_divergence(1.0, e) * 1.005 for e in EPSILONS)


def test_reveals_under_a_promised_mu_are_a_mixture_with_its_delta() -> None:
    mu, delta = 0.8, 0.02
    compiled = compile_policy(Policy(mu=mu, delta=delta))
    steps = [response("0.5", "0.006"), response("0.25", "0.01"), response("0.5")]
    for e in EPSILONS:
        most = delta + (1 - delta) * gaussian_divergence(mu, e)
        assert worst_divergence(compiled, steps, e) <= most * (1 + 1e-9)
    assert worst_divergence(compiled, steps, 2.0) > gaussian_divergence(mu, 2.0) * 2
    with pytest.raises(BudgetExceeded, match="delta_steps is 0"):
        Accountant(Policy(mu=mu)).spend(steps[0].guarantee)


@given(
    mu=st.sampled_from([0.6, 0.9, 1.3]),
    plan=st.lists(st.sampled_from(["0.1", "0.3", "0.5", "0.8", "1.2"]), min_size=64, max_size=64),
)
def test_the_trade_off_of_any_adaptive_run_lies_above_that_of_mu(mu: float, plan: list[str]) -> None:
    """Each history has its own next request; refused ones are passed over. All outcomes are enumerated."""
    compiled = compile_policy(Policy(mu=mu))
    leaves: list[tuple[float, float]] = []

    def run(node: int, depth: int, totals: Totals, p: float, q: float) -> None:
        if depth == 6:
            leaves.append((p, q))
            return
        step = response(plan[node % len(plan)])
        decision = decide(compiled.meters, totals, compiled.price(step.guarantee))
        if not decision.admitted:
            run(2 * node + 1, depth + 1, totals, p, q)
            return
        for i, (up, down) in enumerate(row for row in step.rows if row != (0.0, 0.0)):
            run(2 * node + 1 + i, depth + 1, decision.totals_after, p * up, q * down)

    run(0, 0, compiled.start, 1.0, 1.0)
    # The vertices of the trade-off function: reject where the ratio is largest first.
    type_1, type_2 = 0.0, 1.0
    for p, q in sorted(leaves, key=lambda leaf: leaf[1] / leaf[0], reverse=True):
        type_1, type_2 = type_1 + p, type_2 - q
        if 0.0 < type_1 < 1.0 - 1e-12:
            assert type_2 >= float(mp.ncdf(-mp.sqrt(2) * mp.erfinv(2 * mpf(type_1) - 1) - mu)) - 1e-9


def exact_mu(epsilon: str) -> mpf:
    """2 Phi^-1(e^epsilon/(1 + e^epsilon)), by bisection on the tail, where nothing cancels."""
    with mp.workdps(60):
        low, high = mpf(0), mp.sqrt(2 * mpf(epsilon)) + 2
        tail = 1 / (1 + mp.exp(mpf(epsilon)))
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if mp.ncdf(-middle) > tail else (low, middle)
        return 2 * high


SIZES: Final = ["1e-9", "1e-6", "0.001", "0.03", "0.5", "0.999", "1", "1.001", "3", "12", "80", "500"]


@pytest.mark.parametrize("epsilon", SIZES)
def test_the_price_of_a_pure_step_is_the_mu_that_it_implies_rounded_up(epsilon: str) -> None:
    price = GdpMeter("mu^2", 0).price(PureDP(epsilon)) or 0
    with mp.workdps(60):
        exact = exact_mu(epsilon) ** 2 * SCALE
        assert exact <= price <= exact * (1 + mpf(10) ** -12) + 1
        # Negative control: its variance is less, up to epsilon 1e-6, where both are one unit.
        if float(epsilon) > 1e-6:
            assert 2 * mpf(epsilon) * mp.tanh(mpf(epsilon) / 2) * SCALE < exact


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 2.0])
def test_every_point_of_a_pure_trade_off_lies_above_that_of_its_mu(epsilon: float) -> None:
    mu = float(exact_mu(repr(epsilon)))

    def gap(scale: float) -> float:
        alphas = [i / 400 for i in range(1, 400)]
        pure = [max(1 - math.exp(epsilon) * a, math.exp(-epsilon) * (1 - a)) for a in alphas]
        kink = 1 / (1 + math.exp(epsilon))
        points = [*zip(alphas, pure, strict=True), (kink, kink)]
        return min(f - float(mp.ncdf(-mp.sqrt(2) * mp.erfinv(2 * mpf(a) - 1) - scale * mu)) for a, f in points)

    assert gap(1.0) >= -1e-12
    assert gap(0.99) < 0  # negative control


@pytest.mark.parametrize(
    "cost",
    [ZCDP(0.001), RDP((2, 8), (0.001, 0.002)), DiscreteGaussian(100), Parallel((ZCDP(0.001),))],
    ids=str,
)
def test_what_implies_no_mu_is_refused_with_a_line_that_works(cost: Guarantee) -> None:
    with pytest.raises(UnprovenComposition, match="no mu follows from it") as caught:
        Accountant(Policy(mu=1, delta=1e-6)).spend(cost)
    if "rho" in str(caught.value):
        assert Accountant(Policy(rho=1)).spend(cost)


def test_a_discrete_gaussian_is_charged_by_its_zcdp_under_rho() -> None:
    account = Accountant(Policy(rho=1))
    account.spend(DiscreteGaussian(10))
    assert account.decide(PureDP(0)).spent["rho"] == 0.005
    with pytest.raises(UnprovenComposition, match="no rho follows from it"):
        account.spend(RDP((2, 8), (0.001, 0.002)))


# No limit.

STEPS: Final = [
    PureDP(0.1),
    PureDP(3),
    GDP(0.2),
    ZCDP(0.01),
    ProbDP(0.2, 1e-10),
    RDP((2, 8, 64, 300), (0.01, 0.04, 0.4, 2)),
    DiscreteGaussian(20),
    Parallel((PureDP(0.5), GDP(0.5))),
]
ODOMETERS: Final[list[Odometer]] = [
    Policy(None, 1e-6).odometer,
    DiscreteMixture(1e-4, 10),
    FilterOdometer(1),
    RenyiOdometer((2, 8, 64), (0.2, 0.4, 0.4)),
    BestOf(((0.5, DiscreteMixture(1e-4, 10)), (0.5, RenyiOdometer((4,), (1,))))),
]


@given(
    odometer=st.sampled_from(ODOMETERS),
    slack=st.sampled_from([None, 0.1]),
    costs=st.lists(st.sampled_from([*STEPS, ApproxDP(0.1, 1e-10), ZCDP(0.01, 1e-10)]), max_size=12),
)
def test_without_a_limit_every_admitted_step_is_read_as_under_an_epsilon(
    odometer: Odometer, slack: float | None, costs: list[Guarantee]
) -> None:
    options: dict[str, Any] = {"odometer": odometer, "slack": slack, "delta_steps": 1e-8}
    free = compile_policy(Policy(None, 1e-6, **options))
    # A limit that is never reached, under a filter that takes every kind.
    other = compile_policy(Policy(1000, 1e-6, filter={"renyi": 0.5, "zcdp": 0.5}, **options))
    own, kept = free.start, other.start
    for cost in costs:
        try:
            price = free.price(cost)
        except UnprovenComposition:
            assert math.isinf(other.reading(charged(other, kept, cost)).loss)
            continue
        decision = decide(free.meters, own, price)
        after = charged(other, kept, cost)
        assert decision.admitted == math.isfinite(other.reading(after).loss)
        if decision.admitted:
            own, kept = decision.totals_after, after
            assert free.reading(own).loss == other.reading(kept).loss
            assert free.reading(own).delta == other.reading(kept).delta


def charged(compiled: Compiled, totals: Totals, cost: Guarantee) -> Totals:
    """Totals with a charge, whatever the gate would say of it."""
    price = compiled.price(cost)
    pairs = zip(totals.amounts, totals.unpriced, price.amounts, strict=True)
    sums = [(amount + (asked or 0), count + (asked is None)) for amount, count, asked in pairs]
    return Totals(tuple(amount for amount, _ in sums), tuple(count for _, count in sums), totals.steps + 1)


@pytest.mark.parametrize("cost", [PureDP(5), GDP(3), ZCDP(9), DiscreteGaussian("0.1")], ids=str)
def test_what_the_odometer_reads_is_admitted_any_number_of_times(cost: Guarantee) -> None:
    account = Accountant(Policy(None, 1e-6))
    assert account.how_many(cost) == 10**12
    losses = []
    for _ in range(8):
        account.spend(cost)
        losses.append(account.reading().loss)
    assert losses == sorted(losses)
    assert (account.spent, account.remaining) == (0.0, 1.0)
    assert math.isfinite(losses[-1])


def test_deltas_beyond_those_set_aside_are_refused_without_a_limit() -> None:
    account = Accountant(Policy(None, 1e-6))
    assert account.policy.delta_steps == 1e-8
    assert account.how_many(ProbDP(0.1, 1e-9)) == 10
    for _ in range(10):
        account.spend(ProbDP(0.1, 1e-9))
    with pytest.raises(BudgetExceeded, match="needs a delta of 1e-09, and 0 is left for steps"):
        account.spend(ProbDP(0.1, 1e-9))
    assert math.isfinite(account.reading().loss)
    account.spend(PureDP(1))


def test_a_step_that_would_leave_no_reading_is_refused_and_the_first_says_so() -> None:
    account = Accountant(Policy(None, 1e-6))
    receipt = account.spend(ProbDP(0.1, 1e-9))
    assert receipt.notes == (
        "this request has no price under the odometer's part for Rényi curves, which no longer counts",
    )
    with pytest.raises(BudgetExceeded, match=r"no part of the odometer reads .* and every step before it"):
        account.spend(RDP((2, 300), (0.1, 1)))
    assert math.isfinite(account.reading().loss)
    # Negative control: without the alternatives it would be admitted, and nothing could be read any more.
    compiled = account.compiled
    blind = tuple(replace(m, order=None) if isinstance(m, UnlimitedMeter) else m for m in compiled.meters)
    price = Price(tuple(0 if isinstance(m, UnlimitedMeter) else m.price(RDP((2, 300), (0.1, 1))) for m in blind))
    assert math.isinf(compiled.reading(decide(blind, account.totals, price).totals_after).loss)


@pytest.mark.parametrize(
    ("options", "cost", "cure"),
    [
        ({}, ApproxDP(0.1, 1e-9), r"slack, as in Policy\(None, 1e-06, slack=0.1\)"),
        ({}, ZCDP(0.1, 1e-9), "slack"),
        ({}, Mechanism("sgd"), "pass the curve"),
        ({"odometer": "lines"}, RDP((2, 3), (0.1, 0.2)), "Rényi part"),
        ({"odometer": RenyiOdometer((4,), (1,))}, RDP((2, 3), (0.1, 0.2)), "an order that the curve has"),
        ({"odometer": RenyiOdometer((4,), (1,))}, ProbDP(0.1, 1e-9), "slack"),
        ({}, PureDP(10**7), "no finite price"),
    ],
)
def test_what_the_odometer_cannot_read_is_refused_with_a_cure(
    options: dict[str, Any], cost: Guarantee, cure: str
) -> None:
    account = Accountant(Policy(None, 1e-6, **options))
    with pytest.raises(UnprovenComposition, match=f"has no reading for .*{cure}"):
        account.spend(cost)
    assert account.totals == account.compiled.start


def test_beyond_what_is_counted_the_reading_is_infinite_and_says_why() -> None:
    account = Accountant(Policy(None, 1e-6))
    account.spend(GDP(30))
    assert math.isfinite(account.reading().loss)
    for _ in range(3):
        account.spend(GDP(30))
    assert (
        account.reading().statement
        == f"No finite reading: the sums are above what is counted, {CEILING / SCALE:.0f}."
    )


def test_without_a_limit_there_is_no_largest_and_nothing_to_calibrate() -> None:
    free = Policy(None, 1e-6)
    top = Accountant(free, name="top")
    below = Accountant(free, name="below", parent=top)
    for account in (top, below):
        with pytest.raises(InvalidArgument, match="must have a limit"):
            account.largest(PureDP)
        with pytest.raises(InvalidArgument, match="must have a limit"):
            account.calibrate(odo.laplace, sensitivity=1)
        assert account.describe()["largest"] == []
    kept = Accountant(Policy(1, 0, filter="basic"), name="kept", parent=top)
    assert kept.largest(PureDP) == PureDP(1)
    assert str(kept.calibrate(odo.laplace, sensitivity=1)) == "laplace(scale=1.0, sensitivity=1)"


@pytest.mark.parametrize("above", [True, False])
def test_a_path_with_an_unlimited_account_in_it_is_limited_by_the_others(above: bool) -> None:  # noqa: FBT001
    free, basic = compile_policy(Policy(None, 1e-6)), compile_policy(Policy(1, 0, filter="basic"))
    states = [AccountState("free", free, free.start), AccountState("kept", basic, basic.start)]
    path = states if above else states[::-1]
    assert ask(path, PureDP(0.4)).admitted
    assert largest(path, PureDP) == PureDP(1)
    assert how_many(path, PureDP(0.3)) == 3
    refusal = ask(path, PureDP(2))
    assert (refusal.account, refusal.largest) == ("kept", PureDP(1))
    assert [d.admitted for d in quote(path, [PureDP(0.5)] * 3).decisions] == [True, True, False]
    found = calibrate(path, calibration_question(odo.laplace, 2, {"sensitivity": 1}))
    assert found is not None
    assert found.value == 2.0


# Policies.


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_and_what_it_compiles_to_are_read_back(name: str) -> None:
    policy = POLICIES[name]
    compiled = compile_policy(policy)
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert Compiled.from_dict(json.loads(json.dumps(compiled.to_dict()))) == compiled
    assert policy.epsilon is None
    assert policy.with_first_default() is None
    assert policy.tolerance == 0
    assert compiled.meter(EpsilonMeter).limit is None
    assert "filter" in policy.to_form_1()
    account = Accountant(policy)
    account.spend(PureDP(0.1), key="a")
    restored = Accountant.from_dict(json.loads(json.dumps(account.to_dict())))
    assert (restored.totals, restored.policy) == (account.totals, policy)


def test_promises_in_words_and_numbers() -> None:
    assert {name: policy.promise for name, policy in POLICIES.items()} == {
        "rho": "0.5-zCDP for each person (add-remove)",
        "rho with delta": "1e-06-approximate 0.3334-zCDP for each person (add-remove)",
        "mu": "1-GDP for each person (add-remove)",
        "mu with delta": "1e-05-approximate 0.7-GDP for each person (add-remove)",
        "no limit": "no limit; readings hold with probability at least 1 - 1e-06 for each person (add-remove)",
        "no limit, slack": (
            "no limit; readings hold with probability at least 1 - 1.051e-05 for each person (add-remove)"
        ),
    }
    assert POLICIES["rho"].promise_to_dict()["rho"] == 0.5
    assert POLICIES["mu with delta"].promise_to_dict() | {"text": ""} == {
        "epsilon": None,
        "delta": 1e-5,
        "text": "",
        "mu": 0.7,
    }
    assert {*Policy(1, 1e-6).promise_to_dict()} == {"epsilon", "delta", "text"}
    assert repr(Accountant(Policy(mu=1))) == "<Accountant mu=1.0, delta=0.0: 0.0% spent in 0 steps>"
    assert repr(Accountant(Policy(None, 1e-6))) == "<Accountant no limit, delta=1e-06: 0 steps, no limit>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"one promise.*\(got none of them\)"),
        ({"delta": 1e-6}, r"one promise.*\(got none of them\)"),
        ({"epsilon": 1}, "delta must be given"),
        ({"epsilon": None}, "delta must be given"),
        ({"epsilon": 1, "delta": 1e-6, "rho": 1}, r"\(got epsilon and rho\)"),
        ({"epsilon": None, "delta": 1e-6, "mu": 1}, r"\(got epsilon and mu\)"),
        ({"rho": 1, "mu": 1}, r"\(got rho and mu\)"),
        ({"epsilon": None, "delta": 0}, "delta must be positive without a limit"),
        ({"epsilon": None, "delta": 1e-6, "filter": "zcdp"}, "filter must be left out"),
        ({"epsilon": None, "delta": 1e-6, "reserve": "pure"}, "reserve must be left out"),
        ({"rho": 1, "filter": "zcdp"}, "filter must be left out"),
        ({"rho": 1, "filter": ZcdpTotal(1)}, "filter must be left out"),
        ({"rho": 1, "delta": 1e-6, "delta_steps": 0}, "delta_steps must be the whole delta"),
        ({"epsilon": 1, "delta": 1e-6, "filter": ZcdpTotal(1)}, "to keep an epsilon"),
        ({"epsilon": 1, "delta": 1e-6, "filter": "unlimited"}, "filter must be one of"),
        ({"epsilon": None, "delta": 1e-6, "filter": [(Unlimited(), 0.5), (Basic(), 0.5)]}, "must not combine"),
        ({"rho": 0}, "rho must be from 1e-06 to 1000"),
        ({"rho": 1001}, "rho must be from"),
        ({"mu": 41}, "mu must be from 1e-06 to 40"),
        ({"mu": "big"}, r"Policy\.mu must be a finite number"),
        ({"rho": 1, "delta": 1}, "delta must be below 1"),
    ],
)
def test_a_promise_that_is_not_one_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPolicy, match=message):
        Policy(**arguments)


@pytest.mark.parametrize("name", ["rho", "mu"])
@pytest.mark.parametrize("change", ["one more unit", "an epsilon", "another meter"])
def test_a_stored_limit_above_the_promise_is_refused(name: str, change: str) -> None:
    compiled = compile_policy(POLICIES[name])
    own = next(m for m in compiled.meters if m.name in {"rho", "mu^2"})
    if change == "one more unit":
        damaged = with_meter(compiled, replace(own, limit=(own.limit or 0) + 1))
    elif change == "an epsilon":
        damaged = with_meter(compiled, EpsilonMeter("epsilon", 1))
    else:
        damaged = replace(compiled, meters=compiled.meters[:3] + compiled.meters[4:])
    check_compiled(compiled)
    with pytest.raises(InvalidPolicy):
        check_compiled(damaged)
    with pytest.raises(InvalidPolicy):
        Compiled.from_dict(damaged.to_dict())


def test_the_limits_are_the_promised_totals_to_the_last_unit() -> None:
    assert compile_policy(Policy(rho="0.1")).meter(RhoMeter).limit == 2 * SCALE // 10
    assert compile_policy(Policy(mu="0.1")).meter(GdpMeter).limit == SCALE // 100
    assert isinstance(Policy(mu=1).filters[0][0], GdpTotal)


# Readings under a promise of rho or mu.


def test_the_boundary_has_a_level_of_its_own_beside_a_promised_total() -> None:
    account = Accountant(Policy(mu=1, delta=1e-6))
    account.spend(GDP(0.5))
    reading = account.reading()
    assert reading.delta == 2e-6
    exact = account.policy.odometer.bound(odo.odometers.Spent(0.25, math.inf, 0.0, {}), 1e-6)
    assert exact <= reading.loss <= up(exact)
    # Where the filter stops it is nearly the loss of that Gaussian at that level.
    full = Accountant(Policy(mu=1, delta=1e-6))
    full.spend(GDP(1))
    pointwise = math.sqrt(2 * math.log(1e6)) + 0.5
    assert pointwise < full.reading().loss < 1.06 * pointwise


def test_without_a_delta_the_reading_is_the_sum_of_the_epsilons() -> None:
    account = Accountant(Policy(rho=1))
    account.spend(PureDP(0.25))
    account.spend(PureDP(0.5))
    reading = account.reading()
    assert 0.75 <= reading.loss <= up(0.75)
    assert (reading.delta, reading.method) == (0, "sum of epsilons")
    assert len(account.compare()) == 1
    account.spend(GDP(0.1))
    assert "without a delta in the policy" in account.reading().statement


@pytest.mark.parametrize("name", ["lines", "filter", "mixture", "stitched"])
@pytest.mark.parametrize("policy", [{"rho": 0.5, "delta": 1e-6}, {"mu": 1}, {"epsilon": None, "delta": 1e-6}])
def test_odometers_by_name_are_tuned_to_where_the_filter_stops(name: str, policy: dict[str, Any]) -> None:
    account = Accountant(Policy(**policy, odometer=name))
    account.spend(PureDP(0.2))
    assert account.reading().loss <= up(0.2)
    if name == "filter" and "epsilon" not in policy:
        odometer = account.policy.odometer
        assert isinstance(odometer, FilterOdometer)
        assert odometer.epsilon == pytest.approx(math.sqrt(2 * math.log(1e6)) + 0.5)


def up(value: float) -> float:
    return value * (1 + 1e-12)


def test_a_population_keeps_a_total_for_each_person_and_needs_a_limit() -> None:
    assert gate_of(compile_policy(Policy(rho=1))).limits == (0, 2 * SCALE)
    with pytest.raises(InvalidPolicy, match="needs a limit"):
        gate_of(compile_policy(Policy(None, 1e-6)))
