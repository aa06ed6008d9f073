"""The paper's definitions, lemmas and remarks, item by item: `docs/the-paper.md` says which test shows which.

Laws are rational and probabilities exact, or come from a recursion over all outcomes. Every check has a negative
control: the same statement with one condition dropped, which the check finds false.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import mpmath
import numpy as np
import pytest
from crossings import response_crossing
from numpy.typing import NDArray
from scipy.optimize import linprog

from odograph import Accountant, ApproxDP, Policy, PureDP, compile_policy
from odograph.core import odometers
from odograph.core.conversions import (
    filter_time,
    largest_rho,
    pure_to_intrinsic,
    pure_to_rdp,
    pure_to_zcdp,
    zcdp_to_dp_epsilon,
    zcdp_to_dp_epsilon_standard,
)
from odograph.core.filters import ExactMeter, Renyi, RenyiMeter
from odograph.core.fixed_point import DELTA_SCALE
from odograph.core.gate import Totals, decide
from odograph.core.meters import DeltaMeter, Meter
from odograph.core.odometers import Mixture, Spent
from odograph.core.planning import AccountState, how_many
from odograph.core.policy import Compiled
from odograph.core.theory import FinitePair, conditional_randomized_response, dp_not_probdp
from odograph.figures import PANELS

Floats: TypeAlias = NDArray[np.float64]

DELTA: Final = 1e-6
ORDERS: Final = (1.0, 1.0001, 1.5, 2.0, 7.3, 64.0)


def law(random: np.random.Generator, outcomes: int) -> tuple[Fraction, ...]:
    weights = random.integers(1, 60, outcomes).tolist()
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def pairs(count: int, outcomes: int = 4) -> list[FinitePair]:
    random = np.random.default_rng(7)
    return [FinitePair(law(random, outcomes), law(random, outcomes)) for _ in range(count)]


def renyi(pair: FinitePair, order: float) -> mpmath.mpf:
    """The Rényi divergence by its definition, in 40 digits; at order 1 the limit, Kullback and Leibler's."""
    with mpmath.workdps(40):
        rows = [
            (mpmath.mpf(p.numerator) / p.denominator, mpmath.mpf(q.numerator) / q.denominator)
            for p, q in rows_of(pair)
        ]
        if order == 1.0:
            return mpmath.fsum(p * mpmath.log(p / q) for p, q in rows)
        a = mpmath.mpf(order)
        return mpmath.log(mpmath.fsum(p * (p / q) ** (a - 1) for p, q in rows)) / (a - 1)


def rows_of(pair: FinitePair) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(p), Fraction(q)) for p, q in zip(pair.p, pair.q, strict=True) if p or q]


def response_divergence(epsilon: float, order: float) -> mpmath.mpf:
    """The Rényi divergence of randomized response by the definition, in 40 digits."""
    with mpmath.workdps(40):
        odds, a = mpmath.exp(mpmath.mpf(epsilon)), mpmath.mpf(order)
        rows = [(odds / (1 + odds), mpmath.mpf(epsilon)), (1 / (1 + odds), -mpmath.mpf(epsilon))]
        if order == 1.0:  # the limit, Kullback and Leibler's
            return mpmath.fsum(p * loss for p, loss in rows)
        return mpmath.log(mpmath.fsum(p * mpmath.exp((a - 1) * loss) for p, loss in rows)) / (a - 1)


# Definitions.


@pytest.mark.parametrize("order", ORDERS)
def test_the_renyi_divergence_of_randomized_response_is_that_of_the_definition(order: float) -> None:
    for epsilon in (0.01, 0.3, 1.0, 4.0):
        true = response_divergence(epsilon, order)
        found = mpmath.mpf(pure_to_rdp(epsilon, order))
        assert true <= found <= true * (1 + mpmath.mpf("1e-11"))
        # Negative control: the divergence of a step one part in a hundred smaller is too low.
        assert mpmath.mpf(pure_to_rdp(0.99 * epsilon, order)) < true * mpmath.mpf("0.999")


def test_the_losses_of_dependent_answers_add_up_given_the_past_and_not_otherwise() -> None:
    """The decomposition of the loss by Bayes' rule: two answers, the second chosen by the first."""
    random = np.random.default_rng(3)
    for _ in range(20):
        joint = FinitePair(law(random, 6), law(random, 6))  # outcome 2 i + j: i of three first, j of two second
        assert joint.losses == pytest.approx([math.log(p) - math.log(q) for p, q in rows_of(joint)], abs=1e-12)
        first = FinitePair(*(tuple(side[2 * i] + side[2 * i + 1] for i in range(3)) for side in rational(joint)))
        alone = FinitePair(*(tuple(sum(side[j::2], Fraction(0)) for j in range(2)) for side in rational(joint)))
        apart = []
        for place in range(6):
            i, j = divmod(place, 2)
            given = FinitePair(
                *(
                    tuple(side[2 * i + k] / whole[i] for k in range(2))
                    for side, whole in zip(rational(joint), rational(first), strict=True)
                )
            )
            assert joint.losses[place] == pytest.approx(first.losses[i] + given.losses[j], abs=1e-12)
            apart.append(abs(joint.losses[place] - first.losses[i] - alone.losses[j]))
        assert max(apart) > 0.01


def rational(pair: FinitePair) -> tuple[tuple[Fraction, ...], tuple[Fraction, ...]]:
    return tuple(Fraction(mass) for mass in pair.p), tuple(Fraction(mass) for mass in pair.q)


def least_probdp(pair: FinitePair, epsilon: float) -> Fraction:
    """The least delta of probabilistic DP at an epsilon: the larger mass of losses beyond it, of the two laws."""
    wide = [(p, q) for p, q in rows_of(pair) if abs(math.log(p / q)) > epsilon]
    return max(sum((p for p, _ in wide), Fraction(0)), sum((q for _, q in wide), Fraction(0)))


def test_probabilistic_dp_implies_dp_and_the_converse_fails() -> None:
    failures = 0
    for pair in pairs(60):
        for epsilon in (0.1, 0.5, 1.5):
            delta = least_probdp(pair, epsilon)
            assert pair.is_probdp(epsilon, delta)
            assert delta == 0 or not pair.is_probdp(epsilon, delta * Fraction(999, 1000))
            assert pair.is_dp(epsilon, delta)
            divergence = max(pair.hockey_stick(epsilon), pair.swapped.hockey_stick(epsilon))
            failures += divergence > 0 and not pair.is_probdp(epsilon, divergence)
    assert failures > 20


# Approximate zCDP: two definitions, the conversions, the filter.


def conditioned(pair: FinitePair, kept: Sequence[int]) -> FinitePair:
    """Both laws given that the outcome is one of those kept."""
    p, q = rational(pair)
    wholes = sum(p[i] for i in kept), sum(q[i] for i in kept)
    return FinitePair(tuple(p[i] / wholes[0] for i in kept), tuple(q[i] / wholes[1] for i in kept))


def complement(masses: Sequence[Fraction], kept: Sequence[int], delta: Fraction) -> list[Fraction]:
    """The other part of a mixture whose first part is the law given an event, by the proof of the equivalence."""
    event = sum(masses[i] for i in kept)
    return [
        ((Fraction(0) if i in kept else mass) + (mass / event if i in kept else 0) * (event - (1 - delta))) / delta
        for i, mass in enumerate(masses)
    ]


@pytest.mark.parametrize("delta", [Fraction(1, 10), Fraction(1, 4)])
def test_approximate_zcdp_by_events_is_approximate_zcdp_by_mixtures(delta: Fraction) -> None:
    """Both definitions, for a response that reveals with probability 1/10: less than delta is enough, more is not."""
    epsilon, kept = 0.4, (0, 1)
    pair = conditional_randomized_response(epsilon, Fraction(1, 10))
    good = conditioned(pair, kept)
    for order in ORDERS[1:]:
        for one in (good, good.swapped):
            assert renyi(one, order) <= mpmath.mpf(pure_to_zcdp(epsilon)) * mpmath.mpf(order)
    for masses, part in zip(rational(pair), rational(good), strict=True):
        rest = complement(masses, kept, delta)
        assert min(rest) >= 0
        assert sum(rest) == 1
        mixed = [(1 - delta) * (part[i] if i in kept else 0) + delta * rest[i] for i in range(4)]
        assert mixed == list(masses)
        # And back: the event that the first part of the mixture was drawn has probability 1 - delta.
        assert sum((1 - delta) * part[i] for i in range(2)) == 1 - delta
        # Negative control: where the events are too rare there is no such mixture.
        assert min(complement(masses, kept, Fraction(1, 20))) < 0


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.7, 2.0, 6.0])
def test_the_printed_price_of_a_pure_step_holds_and_the_one_in_use_is_smaller_and_the_least(epsilon: float) -> None:
    for price in (mpmath.mpf(pure_to_zcdp(epsilon)), mpmath.mpf(pure_to_intrinsic(epsilon)) / 2):
        assert price < mpmath.mpf(epsilon) ** 2 / 2
        for order in ORDERS:
            assert response_divergence(epsilon, order) <= price * mpmath.mpf(order)
        # Negative control: one part in a thousand less does not hold at order 1.
        assert response_divergence(epsilon, 1.0) > price * mpmath.mpf("0.999")


@pytest.mark.parametrize(("rho", "delta"), [(0.01, 1e-6), (0.4, 1e-6), (3.0, 1e-9)])
def test_the_printed_conversion_of_zcdp_holds_and_the_one_in_use_is_smaller(rho: float, delta: float) -> None:
    printed, used = zcdp_to_dp_epsilon_standard(rho, delta), zcdp_to_dp_epsilon(rho, delta)
    assert used < printed
    with mpmath.workdps(40):
        mu = mpmath.sqrt(2 * mpmath.mpf(rho))  # a Gaussian that is rho-zCDP

        def divergence(epsilon: float) -> mpmath.mpf:
            e = mpmath.mpf(epsilon)
            return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)

        assert divergence(printed) < divergence(used) <= delta
        assert divergence(0.9 * used) > delta  # negative control


@pytest.mark.parametrize(("order", "part"), [(16, "1"), (24, "1"), (40, "1"), (24, "1/2"), (24, "1/10")])
def test_a_renyi_filter_at_one_order_admits_what_its_conversion_allows_and_no_more(order: int, part: str) -> None:
    """The approximate Rényi filter: the divergences of all steps together, by the definition, against the limit."""
    step = 0.01
    compiled = compile_policy(Policy(1, DELTA, filter=Renyi(orders={order: part})))
    with mpmath.workdps(40):
        a, tolerance = mpmath.mpf(order), mpmath.mpf(10) ** -10  # the plain sum has this share of delta
        # Canonne, Kamath and Steinke 2020, Proposition 12, solved for the divergence.
        share = mpmath.log((mpmath.mpf(DELTA) - tolerance) * Fraction(part).numerator / Fraction(part).denominator)
        limit = 1 + (share + mpmath.log(a) - (a - 1) * mpmath.log(1 - 1 / a)) / (a - 1)
        each = response_divergence(step, float(order))

    def admitted(meters: tuple[Meter, ...]) -> int:
        allowed = replace(compiled, meters=meters)
        return how_many(AccountState("", allowed, allowed.start), PureDP(step))

    steps = admitted(compiled.meters)
    assert steps * step > 1  # not by the plain sum
    assert steps * each <= limit * (1 + mpmath.mpf("1e-9")) < (steps + 2) * each
    # Negative control: a limit that is 2% higher admits more than the conversion allows.
    raised = [
        replace(meter, limit=int(1.02 * (meter.limit or 0))) if isinstance(meter, RenyiMeter) else meter
        for meter in compiled.meters
    ]
    assert admitted(tuple(raised)) * each > limit * (1 + mpmath.mpf("1e-9"))


@pytest.mark.parametrize("rule", ["paper", "zcdp", "renyi", "gdp", "exact", "smooth"])
def test_a_dp_step_is_priced_as_it_is_and_as_a_probabilistic_one_it_would_cost_more(rule: str) -> None:
    """No filter needs the lossy conversion: a step's delta is counted beside its epsilon and lifts no other price."""
    compiled = compile_policy(Policy(1, DELTA, delta_steps="5e-7", filter=rule))
    cost = ApproxDP(0.1, 1e-9)
    limited = [i for i, meter in enumerate(compiled.meters) if meter.limit is not None]
    own, pure, converted = (
        [compiled.price(step).amounts[i] for i in limited] for step in (cost, PureDP(0.1), cost.as_probdp(0.11))
    )
    delta = [compiled.meters[i].counts_delta for i in limited].index(True)
    assert own[delta] == int(Fraction("1e-9") * DELTA_SCALE)
    assert [*own[:delta], *own[delta + 1 :]] == [*pure[:delta], *pure[delta + 1 :]]
    # Negative control: the probabilistic guarantee that follows costs more on every meter that prices it.
    assert all(b is None or (a is not None and a < b) for a, b in zip(own, converted, strict=True))


class Run(NamedTuple):
    """The probabilities of a run under both laws, P and Q, and those of the same steps without reveals, P' and Q'."""

    p: Fraction
    q: Fraction
    good_p: Fraction  # 0 if there was a reveal
    good_q: Fraction


def runs(compiled: Compiled, deltas: Sequence[Fraction], steps: int) -> Iterator[Run]:
    """All runs of responses with reveals that a gate admits, each step chosen by the answers before it."""
    nothing = Fraction(0)

    def follow(totals: Totals, past: tuple[int, ...], run: Run) -> Iterator[Run]:
        wish = deltas[sum(past) % len(deltas)]
        odds = (Fraction(3, 2), Fraction(5, 4))[len(past) % 2]
        decision = decide(compiled.meters, totals, compiled.price(ApproxDP(math.log(odds), wish)))
        if not decision.admitted:
            wish = nothing  # without a delta the same step fits
            decision = decide(compiled.meters, totals, compiled.price(PureDP(math.log(odds))))
        if len(past) == steps or not decision.admitted:
            yield run
            return
        high, low = (1 - wish) * odds / (1 + odds), (1 - wish) / (1 + odds)
        answers = ((low, high, True), (high, low, True), (wish, nothing, False), (nothing, wish, False))
        for answer, (p, q, hidden) in enumerate(answers):
            good = (run.good_p * p / (1 - wish), run.good_q * q / (1 - wish)) if hidden else (nothing, nothing)
            now = Run(run.p * p, run.q * q, *good)
            if any(now):
                yield from follow(decision.totals_after, (*past, answer), now)

    yield from follow(compiled.start, (), Run(*[Fraction(1)] * 4))


def least_rest(compiled: Compiled, delta: Fraction) -> Fraction:
    """The least mass that the other part of the mixture gives a run: negative where it is no law."""
    found = [*runs(compiled, (Fraction(1, 50), Fraction(3, 100), Fraction(0)), 4)]
    assert [sum(masses) for masses in zip(*found, strict=True)] == [1, 1, 1, 1]
    sides = [(run.p, run.good_p) for run in found] + [(run.q, run.good_q) for run in found]
    return min((whole - (1 - delta) * good) / delta for whole, good in sides)


def test_the_limit_of_the_deltas_leaves_a_law_beside_the_runs_without_reveals() -> None:
    """The convex-combination lemma: P = (1 - delta) P' + delta P'' with P'' a law, whatever the answers were."""
    delta = Fraction(1, 20)
    compiled = compile_policy(Policy(8, "0.1", delta_steps=delta, filter="zcdp"))
    assert least_rest(compiled, delta) >= 0
    # Negative control: a delta meter with a limit half as high again.
    meters = tuple(
        replace(meter, limit=int(Fraction(3, 2) * delta * DELTA_SCALE)) if isinstance(meter, DeltaMeter) else meter
        for meter in compiled.meters
    )
    assert least_rest(replace(compiled, meters=meters), delta) < 0


# The supermartingale, and rules for stopping.

Rule = Callable[[tuple[float, ...], float], bool]  # (losses so far, the next one) -> whether the next step counts


def expected(order: float, rho: float, epsilon: float, steps: int, counts: Rule) -> float:
    """E exp((a-1)(L - a rho n)) at the end, over all runs of `steps` responses; a rule says which steps are taken."""
    high = 1 / (1 + math.exp(-epsilon))
    total = 0.0
    for signs in itertools.product((1, -1), repeat=steps):
        mass, exponent = 1.0, 0.0
        past: tuple[float, ...] = ()
        for sign in signs:
            mass *= high if sign > 0 else 1 - high
            if counts(past, sign * epsilon):
                exponent += (order - 1) * (sign * epsilon - order * rho)
                past = (*past, sign * epsilon)
        total += mass * math.exp(exponent)
    return total


@pytest.mark.parametrize("order", [1.001, 1.5, 3.0, 20.0])
def test_the_loss_less_its_price_is_a_supermartingale_at_any_rule_that_knows_the_past(order: float) -> None:
    epsilon, steps = 0.6, 7
    rho = pure_to_zcdp(epsilon)
    rules: list[Rule] = [
        lambda *_: True,
        lambda past, _: sum(past) < 1,  # until the loss is large
        lambda past, _: len(past) < 3 or past[-1] > 0,
        lambda past, _: sum(past) > -1,
    ]
    for rule in rules:
        assert expected(order, rho, epsilon, steps, rule) <= 1 + 1e-12
    # Negative controls: a smaller price, and a rule that sees the answer before it decides whether it counts.
    assert expected(1.001, 0.999 * rho, epsilon, steps, rules[0]) > 1 + 1e-12
    assert expected(1.5, rho, epsilon, steps, lambda _, loss: loss > 0) > 1


@pytest.mark.parametrize("delta", [0.05, 1e-6])
def test_the_line_is_passed_with_nearly_its_delta_and_a_lower_one_with_more(delta: float) -> None:
    """Ville's inequality, exactly: smaller steps overshoot less, and come closer to equality."""
    rates = []
    for epsilon in (0.2, 0.1, 0.05):
        v: Floats = np.arange(1.0, int(9 / epsilon**2) + 1.0) * pure_to_intrinsic(epsilon)
        line = odometers.line(v, delta, at=1.0)
        rates.append(response_crossing(epsilon, line + v / 2) / delta)
    assert rates == sorted(rates)
    assert 0.7 < rates[-1] <= 1
    assert response_crossing(epsilon, 0.9 * line + v / 2) > 1.2 * delta  # negative control


# Odometers.

VECTORS: Final = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
KINDS: Final[dict[str, Callable[[dict[str, float]], odometers.Odometer]]] = {
    "filter_odometer": lambda given: odometers.FilterOdometer(given["eps"]),
    "mixture_odometer": lambda given: odometers.PaperMixture(given["gamma"]),
    "mixture_onesided_odometer": lambda given: Mixture(given["gamma"]),
    "stitched_odometer_paper": lambda given: odometers.PaperStitched(given["v0"]),
    "stitched_odometer_exact": lambda given: odometers.Stitched(given["v0"], given["eta"], given["s"]),
    "rogers_odometer": lambda given: odometers.Rogers(given["n"]),
}


@pytest.mark.parametrize("function", KINDS)
def test_the_odometers_read_the_values_of_their_formulas(function: str) -> None:
    """Boundary plus V/2, at the level that is asked for, against values of 40 digits."""
    vectors = [v for v in VECTORS if v["function"] == function and v["inputs"]["delta_prime"] <= math.exp(-1)]
    assert len(vectors) > 5
    differ = 0
    for vector in vectors:
        given, true = vector["inputs"], math.inf if vector["value"] is None else float(vector["value"])
        odometer = KINDS[function](given)
        assert not isinstance(odometer, odometers.RenyiOdometer)
        reading = odometer.bound(Spent(given["V"], math.inf, 0.0, {}), given["delta_prime"])
        assert true * (1 - 1e-15) <= reading <= true * (1 + 1e-12)
        # Negative control: half of delta' is another level, and reads more, unless V/2 is nearly all of the reading.
        half = odometer.bound(Spent(given["V"], math.inf, 0.0, {}), given["delta_prime"] / 2)
        differ += half > true * (1 + 1e-6)
    assert differ >= len(vectors) / 2


def test_the_readings_of_an_account_are_passed_less_often_than_delta_and_without_the_drift_more_often() -> None:
    delta, step, steps = 0.05, 0.2, 225
    account = Accountant(Policy(None, delta, odometer=odometers.FilterOdometer(2)))
    readings = []
    for _ in range(steps):
        account.spend(PureDP(step))
        readings.append(account.reading().loss)
    assert 0.3 * delta < response_crossing(step, np.array(readings)) <= delta
    # Negative control: the boundary alone, without V/2.
    v = np.arange(1.0, steps + 1.0) * pure_to_intrinsic(step)
    assert response_crossing(step, np.array(readings) - v / 2) > 5 * delta


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_the_filter_odometer_touches_pointwise_composition_once(epsilon: float) -> None:
    at = filter_time(epsilon, DELTA)

    def excess(v: float) -> float:
        return odometers.line(v, DELTA, at=at) - math.sqrt(-2 * math.log(DELTA) * v)

    assert odometers.line(at, DELTA, at=at) + at / 2 == pytest.approx(epsilon, rel=1e-12)
    assert 0 <= excess(at) < 1e-12 * epsilon
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert excess(factor * at) > 1e-4 * epsilon
    # Negative control: the line of half of epsilon is not tangent here.
    assert odometers.line(at, DELTA, at=filter_time(epsilon / 2, DELTA)) > 1.01 * odometers.line(at, DELTA, at=at)


def test_larger_starts_make_the_stitched_odometer_tighter_and_later() -> None:
    starts, v = (0.005, 0.05, 0.5), 0.7
    readings = [odometers.stitched_paper(v, DELTA, start=start) for start in starts]
    assert readings == sorted(readings, reverse=True)
    assert readings[0] > 1.05 * readings[-1]
    assert math.isinf(odometers.stitched_paper(0.4, DELTA, start=0.5))
    assert math.isfinite(odometers.stitched_paper(0.4, DELTA, start=0.05))


def slopes(values: Floats, of: Floats) -> Floats:
    return np.asarray(np.diff(values) / np.diff(of))


def test_the_boundaries_grow_as_log_log_log_and_linearly() -> None:
    """B^2/V of stitched grows with log log V, of the mixtures and of Rogers et al. with log V; the line with V."""
    v = np.geomspace(1e20, 1e290, 28)
    square = {
        "stitched": odometers.stitched(v, DELTA, start=1.0) ** 2 / v,
        "two-sided": odometers.mixture(v, DELTA, gamma=1.0) ** 2 / v,
        "one-sided": odometers.mixture_one_sided(v, DELTA, gamma=1.0) ** 2 / v,
        "rogers": odometers.rogers(v, DELTA, people=1e6) ** 2 / v,
    }
    log, loglog = np.log(v), np.log(np.log(2 * v))
    k1 = (2**0.25 + 2**-0.25) / math.sqrt(2)
    assert slopes(square["stitched"], loglog) == pytest.approx(1.4 * k1**2, rel=1e-9)
    assert slopes(square["two-sided"], log) == pytest.approx(1.0, rel=1e-9)
    assert slopes(square["one-sided"], log) == pytest.approx(1.0, rel=1e-6)
    assert slopes(square["rogers"], log) == pytest.approx(math.log(4 * math.log2(1e6) / DELTA), rel=1e-9)
    assert slopes(odometers.line(v, DELTA, at=1.0), v) == pytest.approx(math.sqrt(-math.log(DELTA) / 2), rel=1e-9)
    # Negative control: in log log V a mixture is no straight line.
    assert np.ptp(slopes(square["two-sided"], loglog)) > 100


def windows() -> list[tuple[float, str]]:
    """Where another curve of Figure 3a becomes the lowest: the first x, and the first word of its label."""
    curves: dict[str, Callable[[Floats], Floats]] = {
        "Rogers": lambda v: odometers.rogers(v, DELTA, people=1e6),
        "filter": lambda v: odometers.line(v, DELTA, at=filter_time(8.0, DELTA)),
        "mixture": lambda v: odometers.mixture(v, DELTA, gamma=0.01),
        "stitched": lambda v: odometers.stitched_paper(v, DELTA, start=0.005),
    }
    panel = PANELS["fig3a-new-and-original"]()  # the figure draws these
    x = np.array(panel.x)
    for curve in panel.curves:
        assert curve.values == pytest.approx((curves[curve.label.split()[0]](x) + x / 2).tolist(), rel=1e-14)
    v = np.unique([*np.geomspace(1e-3, 1e4, 20001), 0.005])
    names = [*curves]
    lowest = [names[i] for i in np.argmin([curves[name](v) for name in names], axis=0)]
    return [(float(x), name) for x, name, before in zip(v, lowest, ["", *lowest], strict=False) if name != before]


def test_the_windows_in_which_each_odometer_is_the_lowest() -> None:
    found = windows()
    assert [name for _, name in found] == ["Rogers", "stitched", "mixture", "filter", "mixture", "stitched"]
    assert [x for x, _ in found] == pytest.approx([0.001, 0.005, 0.0497, 0.8084, 4.542, 1721], rel=2e-3)
    jump = [odometers.rogers(x, DELTA, people=1e6) for x in (1.0, math.nextafter(1.0, 2.0))]
    assert jump[1] > 2.5 * jump[0]


def least_reading(time: float, delta: float, step: float) -> float:
    """A reading at `time` that an analyst exceeds with more than `delta`, by coins of multiples of `step`.

    Backward induction over loss and time left, for the payoff of having a loss of at least that reading.
    """
    unit = pure_to_intrinsic(step)
    units = int(time / unit)
    sizes = range(1, units)
    coins = [(j, math.ceil(pure_to_intrinsic(j * step) / unit)) for j in sizes if j * j * 0.9 <= units]
    reach = int(7 * math.sqrt(time) / step) + len(coins)
    loss = np.arange(-reach, reach + 1)

    def passed(reading: int) -> float:
        rows = [(loss >= reading).astype(float)]
        for left in range(1, units + 1):
            best = rows[-1]
            for j, price in coins:
                if price <= left:
                    row, high = rows[left - price], 1 / (1 + math.exp(-j * step))
                    rises, falls = np.append(row[j:], np.full(j, row[-1])), np.append(np.zeros(j), row[:-j])
                    best = np.maximum(best, high * rises + (1 - high) * falls)
            rows.append(best)
        return float(rows[-1][reach])

    low, high = 1, reach
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passed(middle) > delta else (low, middle)
    return low * step


def test_no_odometer_reads_much_less_at_the_limit_than_those_here() -> None:
    """At the exact filter's limit at (1, 1e-6): what every reading by intrinsic time must be, and what ours are."""
    compiled = compile_policy(Policy(1, DELTA, filter="exact"))
    exact = compiled.meter(ExactMeter)
    assert exact.limit is not None
    time = exact.limit / float(exact.scale)
    unavoidable = least_reading(time, DELTA, 0.02)
    moment = time / 2 + 4.753424 * math.sqrt(time)  # of a Gaussian at that one time: 4.7534 is its quantile
    line = odometers.line(time, DELTA, at=time) + time / 2
    default = compiled.policy.odometer.bound(Spent(time, math.inf, 0.0, {}), DELTA)
    assert moment < unavoidable < line < default < 1.11 * unavoidable
    # Negative control: a reading of one moment is no odometer.
    assert unavoidable > 1.02 * moment


# The reduction to randomized response.


def is_postprocessing(pair: FinitePair, epsilon: float, delta: Fraction) -> bool:
    """Whether one transition kernel maps randomized response to both laws of a pair: a linear program."""
    response = conditional_randomized_response(epsilon, delta)
    outcomes, answers = len(pair.p), len(response.p)
    conditions, values = [], []
    for source, target in ((response.p, pair.p), (response.q, pair.q)):
        for outcome in range(outcomes):
            row = np.zeros((answers, outcomes))
            row[:, outcome] = [float(mass) for mass in source]
            conditions.append(row.ravel())
            values.append(float(target[outcome]))
    for answer in range(answers):
        row = np.zeros((answers, outcomes))
        row[answer] = 1.0
        conditions.append(row.ravel())
        values.append(1.0)
    found = linprog(
        np.zeros(answers * outcomes), A_eq=np.array(conditions), b_eq=values, bounds=(0, 1), method="highs"
    )
    return bool(found.status == 0)


def test_a_pair_is_a_postprocessing_of_the_randomized_response_of_its_guarantee_and_of_no_weaker_one() -> None:
    tried = 0
    for pair in pairs(12):
        for epsilon in (0.2, 0.8):
            delta = max(pair.hockey_stick(epsilon), pair.swapped.hockey_stick(epsilon))
            if delta > Fraction(1, 1000):
                tried += 1
                assert is_postprocessing(pair, epsilon, delta * Fraction(1000001, 1000000))
                assert not is_postprocessing(pair, epsilon, delta * Fraction(98, 100))
    assert tried > 15
    merged = dp_not_probdp(0.5, Fraction(1, 10))
    assert is_postprocessing(merged, 0.5, Fraction(1000001, 10000000))


def test_given_the_past_each_step_is_a_postprocessing_and_the_run_leaks_no_more_than_its_responses() -> None:
    """The conditional reduction: the second step, and its guarantee, are chosen by the first answer."""
    first = FinitePair((Fraction(3, 5), Fraction(2, 5)), (Fraction(2, 5), Fraction(3, 5)))
    seconds = [pairs(4, 3)[k] for k in (1, 3)]
    epsilons = (0.3, 0.6)
    deltas = [max(s.hockey_stick(e), s.swapped.hockey_stick(e)) for s, e in zip(seconds, epsilons, strict=True)]
    size = math.log(1.5) + 1e-12
    assert is_postprocessing(first, size, Fraction(1, 10**9))
    responses = [conditional_randomized_response(e, d) for e, d in zip(epsilons, deltas, strict=True)]
    for second, epsilon, delta in zip(seconds, epsilons, deltas, strict=True):
        assert is_postprocessing(second, epsilon, delta * Fraction(1000001, 1000000))

    def together(start: FinitePair, followers: Sequence[FinitePair]) -> FinitePair:
        p, q = [], []
        for (a, b), follower in zip(rows_of(start), followers, strict=True):
            p += [a * x for x in rational(follower)[0]]
            q += [b * y for y in rational(follower)[1]]
        return FinitePair(tuple(p), tuple(q))

    run, bound = together(first, seconds), together(conditional_pure(size), responses)
    for epsilon in np.linspace(0.0, 2.0, 41):
        for one, other in ((run, bound), (run.swapped, bound.swapped)):
            assert one.hockey_stick(float(epsilon)) <= other.hockey_stick(float(epsilon)) + Fraction(1, 10**9)
    # Negative control: responses with half the deltas do not bound it.
    halves = [conditional_randomized_response(e, d / 2) for e, d in zip(epsilons, deltas, strict=True)]
    wrong = together(conditional_pure(size), halves)
    assert any(run.hockey_stick(float(e)) > wrong.hockey_stick(float(e)) for e in np.linspace(0.0, 2.0, 41))


def conditional_pure(epsilon: float) -> FinitePair:
    """Randomized response on two outcomes, the truth first."""
    response = conditional_randomized_response(epsilon, 0)
    return FinitePair((response.p[1], response.p[0]), (response.q[1], response.q[0]))


def test_a_probabilistic_guarantee_survives_postprocessing_that_is_released_beside_it_and_not_instead() -> None:
    epsilon, delta = 0.7, Fraction(1, 20)
    answer = conditional_randomized_response(epsilon, delta)
    random = np.random.default_rng(5)
    kernel = [law(random, 3) for _ in answer.p]
    both = FinitePair(
        *(tuple(mass * k for mass, row in zip(side, kernel, strict=True) for k in row) for side in rational(answer))
    )
    assert both.is_probdp(epsilon, delta)
    for p, q in rows_of(both):
        assert any(p * b == q * a for a, b in rows_of(answer))  # the losses are those of the answer alone
    # Negative control: the merged answer alone keeps DP and loses probabilistic DP.
    merged = dp_not_probdp(epsilon, delta)
    assert merged.is_dp(epsilon, delta)
    assert not merged.is_probdp(epsilon, delta)


# The mean loss, and the filter for probabilistic steps.


def test_the_mean_loss_is_at_most_that_of_randomized_response() -> None:
    for pair in pairs(60):
        epsilon = max(map(abs, pair.losses)) * (1 + 1e-12)
        for one in (pair, pair.swapped):
            mean = math.fsum(float(p) * loss for p, loss in zip(one.p, one.losses, strict=True))
            assert mean <= pure_to_zcdp(epsilon) <= epsilon**2 / 2
    response = conditional_randomized_response(0.7, 0)
    mean = math.fsum(float(p) * loss for p, loss in zip(response.p, response.losses, strict=True) if p)
    assert mean == pytest.approx(pure_to_zcdp(0.7), rel=1e-12)
    assert mean > pure_to_zcdp(0.7 * 0.999)  # negative control: a smaller mean does not hold


def test_under_the_papers_filter_the_loss_itself_stays_within_epsilon_and_under_the_zcdp_filter_it_does_not() -> None:
    epsilon, delta, step = 1, 0.05, 0.02

    def exceeded(kind: str) -> float:
        compiled = compile_policy(Policy(epsilon, delta, filter=kind))
        steps = how_many(AccountState("", compiled, compiled.start), PureDP(step))
        assert steps * step > epsilon  # not by the plain sum
        return response_crossing(step, np.full(steps, float(epsilon)))

    assert 0.001 < exceeded("paper") <= delta
    # Negative control: the zCDP filter proves (1, 0.05)-DP and no more; its runs lose 1 far more often.
    assert exceeded("zcdp") > 3 * delta


@pytest.mark.parametrize("rule", ["zcdp", "paper"])
def test_a_filter_matches_advanced_composition_and_no_more_is_admitted_than_is_best(rule: str) -> None:
    """Equal small steps up to the limit: the filter admits what advanced composition with fixed parameters would."""
    compiled = compile_policy(Policy(1, DELTA, filter=rule))
    step = 0.002
    admitted = how_many(AccountState("", compiled, compiled.start), PureDP(step))
    v = step**2 * (admitted + 1)
    assert math.sqrt(-2 * math.log(DELTA) * v) + v / 2 > 1
    if rule == "paper":
        v = step**2 * admitted
        assert math.sqrt(-2 * math.log(DELTA) * v) + v / 2 <= 1
    else:
        assert admitted == int(2 * largest_rho(1.0, DELTA) / pure_to_intrinsic(step))


def test_a_mixture_tuned_at_a_time_is_below_the_others_there() -> None:
    time = filter_time(1.0, DELTA)
    tuned = Mixture.at(time, DELTA).boundary(time, DELTA)
    assert tuned < 0.97 * Mixture(0.01).boundary(time, DELTA)
    assert tuned < 0.97 * odometers.mixture(time, DELTA, gamma=0.01)
