"""The errata of the paper: what is false as printed is shown to fail, and what is implemented to hold.

What is printed and true (E11 to E13) is shown to be loose, and the conjecture (E15) to be true.

The probabilities here are exact up to rounding: pairs of laws with rational masses, or a forward recursion
over all outcomes of equal randomized-response steps. Nothing is simulated.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from crossings import clock, crossing, response_crossing
from scipy.special import zeta

from odograph import ZCDP, Accountant, ApproxDP, Policy, PureDP, compile_policy
from odograph.core import odometers
from odograph.core.conversions import (
    dp_to_probdp_delta,
    dp_to_probdp_delta_one_sided,
    filter_time,
    probdp_drift,
    pure_to_zcdp,
)
from odograph.core.planning import AccountState, how_many, quote
from odograph.core.theory import (
    FinitePair,
    conditional_randomized_response,
    dp_not_probdp,
    kov_delta,
    leaky_step,
    tight_dp_to_probdp,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def pointwise(v: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Return the boundary of advanced composition, which holds at one time only."""
    return np.asarray(np.sqrt(-2 * math.log(delta) * v))


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
def test_e1_the_printed_time_of_the_filter_solves_for_half_of_epsilon(epsilon: float, delta: float) -> None:
    ell = -math.log(delta)

    def reading(y: float) -> float:
        return math.sqrt(2 * ell * y) + y / 2

    # The printed root, with the difference of square roots written as a quotient.
    printed = (epsilon / (math.sqrt(2 * ell) + math.sqrt(2 * ell + epsilon))) ** 2
    assert reading(printed) == pytest.approx(epsilon / 2, rel=1e-12)
    corrected = filter_time(epsilon, delta)
    assert reading(corrected) == pytest.approx(epsilon, rel=1e-12)
    assert odometers.line(corrected, delta, at=corrected) + corrected / 2 == pytest.approx(epsilon, rel=1e-12)


def test_e2_the_line_is_crossed_more_often_than_the_printed_exponent_says() -> None:
    delta, epsilon, at = 0.05, 0.05, 1.0
    b = math.sqrt(-2 * math.log(delta) * at)
    printed, corrected = math.exp(-b * b / at), math.exp(-b * b / (2 * at))
    v = clock(epsilon, 1600)
    probability = response_crossing(epsilon, odometers.line(v, delta, at=at) + v / 2)
    assert corrected == pytest.approx(delta, rel=1e-12)
    assert printed < probability <= corrected


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 3.0])
def test_e3_dp_does_not_give_the_printed_probabilistic_dp(epsilon: float) -> None:
    delta = Fraction(1, 10**9)
    printed = 2 * float(delta) / (epsilon * math.exp(epsilon))
    pair = tight_dp_to_probdp(epsilon, delta, 2 * epsilon * (1 + 1e-6))
    assert pair.is_dp(epsilon, delta)
    assert not pair.is_probdp(2 * epsilon, printed)
    assert pair.is_probdp(2 * epsilon, dp_to_probdp_delta(epsilon, float(delta), 2 * epsilon))


@pytest.mark.parametrize(("epsilon", "t"), [(1e-3, 2e-3), (0.1, 0.2), (1.0, 1.5), (3.0, 9.0)])
def test_e3_the_corrected_conversion_is_attained(epsilon: float, t: float) -> None:
    delta = Fraction(1, 10**6)
    pair = tight_dp_to_probdp(epsilon, delta, t)
    upper, lower = pair.tail(t, closed=True), pair.swapped.tail(t, closed=True)
    one_sided = dp_to_probdp_delta_one_sided(epsilon, float(delta), t)
    two_sided = dp_to_probdp_delta(epsilon, float(delta), t)
    assert pair.hockey_stick(epsilon) == delta
    assert upper == lower  # under the other law the roles of S and S' are exchanged
    assert one_sided == pytest.approx(float(upper), rel=1e-11)
    assert two_sided == pytest.approx(float(upper) * (1 + math.exp(-t)), rel=1e-11)


def test_e4_the_printed_odometers_are_below_a_sure_loss() -> None:
    delta0, steps, delta_prime = 1e-6, 10_000, 1e-6
    step = leaky_step(delta0)
    loss = step.losses[0]
    assert step.is_probdp(loss, delta0)  # so the printed theorem takes it, with sum delta = delta'' = .01
    v = steps * loss**2
    printed = [
        odometers.line(v, delta_prime, at=v) + v / 2,
        odometers.mixture(v, delta_prime, gamma=odometers.best_gamma(v, delta_prime)) + v / 2,
        odometers.stitched_paper(v, delta_prime, start=v) + v / 2,
    ]
    assert steps * loss == pytest.approx(0.0100, rel=1e-3)
    assert 0.0005 < min(printed) < max(printed) < 0.00065
    drift = steps * probdp_drift(loss, delta0)
    assert all(reading + drift > steps * loss for reading in printed)


def test_e4_the_drift_is_at_most_delta() -> None:
    for epsilon in (0.0, 1e-9, 0.1, 2.0, 30.0):
        assert probdp_drift(epsilon, 1e-6) <= 1e-6
    assert probdp_drift(2.0, 1e-6) == pytest.approx(2e-6 / math.sinh(2.0), rel=1e-12)


@pytest.mark.parametrize("delta0", [1e-4, 0.01, 0.3])
def test_e5_given_that_no_step_exceeds_its_epsilon_the_mean_loss_is_larger_than_in_the_proof(delta0: float) -> None:
    step = leaky_step(delta0)
    loss = step.losses[0]
    epsilon = loss * (1 + 1e-12)
    assert step.is_probdp(epsilon, Fraction(str(delta0)))
    # Under P no loss exceeds epsilon, so conditioning on that event changes nothing: the mean is the loss.
    assert step.tail(epsilon) == 0
    mean = float(step.p[0]) * loss
    assert mean > 5 * epsilon**2 / 2
    assert mean <= pure_to_zcdp(epsilon) + probdp_drift(epsilon, delta0)


@pytest.mark.parametrize(("people", "factor"), [(2, 1000), (5, 200), (10, 37)])
def test_e6_the_second_branch_of_rogers_et_al_is_crossed_too_often(people: int, factor: float) -> None:
    delta, epsilon = 1e-6, 0.05
    v = clock(epsilon, 800)  # the second branch begins at V > 1 and is watched up to V = 2
    floor = 1 / people**2
    rate = math.log(math.log(4 / delta * math.log2(people)))
    second = np.sqrt(2 * (floor + v) * (1 + np.log1p(v / floor) / 2) * rate)
    printed = np.where((floor <= v) & (v <= 1), np.inf, second) + v / 2
    assert response_crossing(epsilon, printed) > factor * delta
    assert response_crossing(epsilon, odometers.rogers(v, delta, people=people) + v / 2) <= delta


def test_e7_the_first_filter_theorem_spends_delta_twice() -> None:
    # One step that reveals its input with probability delta and nothing else, then pure steps that fill rho.
    delta, step, steps = 0.05, 0.05, 4000
    rho = steps * step**2 / 2
    promised = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    spent = 1 - (1 - delta) * (1 - kov_delta(steps, step, 0.0, promised))
    assert spent > 1.05 * delta

    share = delta / 2
    promised = rho + 2 * math.sqrt(rho * math.log(1 / share))
    spent = share + (1 - share) * kov_delta(steps, step, 0.0, promised)
    assert spent <= share + (1 - share) * share < delta


def test_e8_the_informal_filter_never_ends_a_run_of_reveals() -> None:
    # Steps of epsilon 0 that reveal with probability .01 leave the printed sum at 0, whatever delta is promised.
    reveals = conditional_randomized_response(0.0, Fraction("0.01"))
    policy = Policy(1, "0.05", delta_steps="0.03", filter="paper")
    compiled = compile_policy(policy)
    admitted = how_many(AccountState("", compiled, compiled.start), ApproxDP(0, "0.01"))
    assert admitted == 3
    assert reveals.power(admitted).hockey_stick(1.0) <= Fraction("0.03")
    assert reveals.power(100).hockey_stick(1.0) > Fraction("0.6")


def test_e9_a_reading_without_the_last_step_is_exceeded_by_it() -> None:
    policy = Policy(8, 1e-6, filter="paper")
    account = Accountant(policy)
    before = policy.odometer.bound(odometers.Spent(0.0, math.inf, 0.0, {}), float(policy.delta_filter))
    account.spend(PureDP(7))
    step = conditional_randomized_response(7.0, 0)
    assert float(step.tail(before)) > 0.99
    assert step.tail(account.reading().loss) == 0


def test_e10_less_the_means_given_all_but_the_last_step_the_loss_is_no_martingale() -> None:
    step = conditional_randomized_response(1.0, 0)
    outcomes = [(float(p), loss) for p, loss in zip(step.p, step.losses, strict=True) if p]
    mean = math.fsum(p * loss for p, loss in outcomes)
    assert mean == pytest.approx(pure_to_zcdp(1.0), rel=1e-12)
    for _, first in outcomes:
        # Given the first step its own loss is known, and the printed process subtracts it: what is left is the last.
        printed = math.fsum(p * (first + second - (first + mean)) for p, second in outcomes)
        corrected = math.fsum(p * (first + second - 2 * mean) for p, second in outcomes)
        assert corrected == pytest.approx(first - mean, rel=1e-12)
        assert printed == pytest.approx(0.0, abs=1e-12)
        assert abs(first - mean) > 0.5


def test_e11_the_one_sided_mixture_is_lower_and_still_holds() -> None:
    delta, epsilon = 0.05, 0.05
    v = clock(epsilon, 1600)
    two_sided = odometers.mixture(v, delta, gamma=1.0)
    one_sided = odometers.mixture_one_sided(v, delta, gamma=1.0)
    assert np.all(one_sided < two_sided)
    assert response_crossing(epsilon, two_sided + v / 2) < response_crossing(epsilon, one_sided + v / 2) <= delta
    assert response_crossing(epsilon, pointwise(v, delta) + v / 2) > 2 * delta


def test_e12_the_printed_constants_are_the_exact_ones_rounded_up() -> None:
    k1 = (2**0.25 + 2**-0.25) / math.sqrt(2)
    exact = (k1 * math.sqrt(1.4), 1 / 1.4, zeta(1.4) / math.log(2) ** 1.4)
    assert exact == pytest.approx((1.6985, 0.71429, 5.1878), rel=1e-4)
    assert all(value < rounded for value, rounded in zip(exact, (1.7, 0.72, 5.2), strict=True))
    v = np.geomspace(1.0, 1e6, 200)
    ratio = odometers.stitched_paper(v, 1e-6, start=1.0) / odometers.stitched(v, 1e-6, start=1.0)
    assert 1.003 < np.min(ratio) < np.max(ratio) < 1.006


def test_e13_below_its_start_the_stitched_boundary_may_stay_constant() -> None:
    delta, epsilon = 0.05, 0.05
    v = clock(epsilon, 1600)
    exact = odometers.stitched(v, delta, start=1.0)
    early = v < 1
    assert np.all(np.isinf(odometers.stitched_paper(v, delta, start=1.0)[early]))
    assert np.all(exact[early] == odometers.stitched(1.0, delta, start=1.0))
    assert response_crossing(epsilon, exact + v / 2) <= delta
    # Continuing the formula below the start instead would not be free: pointwise growth is crossed.
    assert response_crossing(epsilon, pointwise(v, delta) + v / 2) > 2 * delta


def test_e14_a_filter_that_runs_at_least_one_step_breaks_the_promise() -> None:
    # With n from 1 on the first step runs, whatever it costs; here it would have delta .27 instead of a millionth.
    account = Accountant(Policy(1, 1e-6, filter="paper"))
    assert kov_delta(1, 1.5, 0.0, 1.0) > 0.2
    assert not account.decide(PureDP("1.5")).admitted
    assert account.decide(PureDP(1)).admitted


def test_e15_dp_steps_break_the_odometers_and_readings_with_a_slack_hold() -> None:
    delta0, steps, delta_prime = 1e-6, 10_000, 1e-6
    step = leaky_step(delta0)
    assert step.is_dp(0.0, delta0)  # so the intrinsic time is 0 and sum delta = delta'' = .01
    loss = steps * step.losses[0]
    readings = [
        odometers.line(0.0, delta_prime, at=1e-8),
        odometers.mixture_one_sided(0.0, delta_prime, gamma=1e-8),
    ]
    assert max(readings) < loss
    for reading in [0.0, *readings]:
        for t in np.geomspace(1e-4, 1.0, 200):
            allowed = (delta_prime + steps * delta0) / -math.expm1(-t)
            assert float(loss > reading + t) <= allowed


@pytest.mark.parametrize("t", [0.02, 0.1, 0.5, 2.0])
def test_e15_readings_with_a_slack_hold_for_responses_that_hide_their_reveals(t: float) -> None:
    epsilon, delta_step, delta_prime, steps = 0.1, 2e-4, 0.05, 400
    pair = dp_not_probdp(epsilon, delta_step)
    v = clock(epsilon, steps)
    limits = odometers.line(v, delta_prime, at=2.0) + v / 2 + t
    probability = crossing(pair.losses[1], pair.losses[0], float(pair.p[1]), limits)
    assert 0 < probability <= (delta_prime + steps * delta_step) / -math.expm1(-t)


def test_e16_a_sum_over_another_index_than_the_steps_has_no_end() -> None:
    # The sum over m of rho_l, read with l as the last step: n rho_n = rho for every n, and the steps add up to more.
    compiled = compile_policy(Policy(rho="0.5"))
    steps = [ZCDP(Fraction(1, 2 * n)) for n in range(1, 40)]
    assert all(n * Fraction(1, 2 * n) <= Fraction(1, 2) for n in range(1, 40))
    state = AccountState("", compiled, compiled.start)
    assert quote(state, steps[:1]).admitted
    assert not quote(state, steps[:2]).admitted
    assert sum(Fraction(1, 2 * n) for n in range(1, 40)) > 2


def test_e16_a_price_that_the_answer_sets_bounds_nothing() -> None:
    # Definition 3 prints rho as a function of the step's own output. Let a response cost its rho if it answers 0 and
    # nothing if it answers 1, and run until it answered 0 once: by these prices every run costs one rho.
    epsilon, rho = 1.0, pure_to_zcdp(1.0)
    truth = 1 / (1 + math.exp(-epsilon))
    runs = [(truth**ones * (1 - truth), (ones - 1) * epsilon) for ones in range(200)]
    assert math.fsum(p for p, _ in runs) == pytest.approx(1.0, rel=1e-12)
    divergence = math.fsum(p * loss for p, loss in runs)  # at order 1
    assert divergence > 3.7 * rho
    compiled = compile_policy(Policy(rho=1.01 * rho))
    assert how_many(AccountState("", compiled, compiled.start), PureDP(1)) == 1


def test_e16_events_of_the_answer_alone_are_fewer_than_mixtures() -> None:
    # Condition 1 prints P(A(x) in E). The merged response is approximately zCDP by mixtures, as every DP step is, but
    # no outcome is rare enough to be left out, and at order 1 the whole law diverges by more.
    epsilon, delta = 1.0, Fraction(1, 10)
    merged, response = dp_not_probdp(epsilon, delta), conditional_randomized_response(epsilon, 0)
    for masses, good in ((merged.p, response.p), (merged.q, response.q)):
        rest = [
            (Fraction(mass) - (1 - delta) * Fraction(part)) / delta
            for mass, part in zip(masses, good[:2], strict=True)
        ]
        assert sorted(rest) == [0, 1]  # the reveal
    rho = pure_to_zcdp(epsilon)
    assert min(*merged.p, *merged.q) > delta
    divergence = math.fsum(float(p) * loss for p, loss in zip(merged.p, merged.losses, strict=True))
    assert divergence > 1.2 * rho


def test_e16_one_direction_of_the_divergence_says_nothing_about_the_other() -> None:
    # Condition 2 prints D(P', Q') twice. This pair has D(P, Q) = log 2 at every order, and reveals with one half.
    pair = FinitePair((Fraction(1), Fraction(0)), (Fraction(1, 2), Fraction(1, 2)))
    for order in (1.5, 2.0, 30.0):
        total = math.fsum(
            float(p) ** order * float(q) ** (1 - order) for p, q in zip(pair.p, pair.q, strict=True) if p
        )
        assert math.log(total) / (order - 1) == pytest.approx(math.log(2), rel=1e-12)
    assert pair.hockey_stick(math.log(2)) == 0
    assert pair.swapped.hockey_stick(50.0) == Fraction(1, 2)
    assert not pair.is_dp(50.0, Fraction(49, 100))


def test_e16_on_the_event_of_the_inequality_the_loss_is_above_the_line_and_not_below() -> None:
    # In the proof of Theorem 4 "on such event" must be: on its complement.
    delta, epsilon, at = 0.05, 0.1, 1.0
    b = math.sqrt(-2 * math.log(delta) * at)
    v = clock(epsilon, 60)
    centered = np.arange(1, 61) * epsilon - v / 2  # every step loses epsilon
    process = np.exp(b / at * centered - (b / at) ** 2 * v / 2)
    event = process > math.exp(b * b / (2 * at))
    below = centered <= odometers.line(v, delta, at=at)
    assert np.any(event)
    assert np.all(event == ~below)
