"""The errata of the paper: each printed form is shown to fail, and what is implemented to hold.

The probabilities here are exact up to rounding: pairs of laws with rational masses, or a forward recursion
over all outcomes of equal randomized-response steps. Nothing is simulated.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
from scipy.special import zeta

from odograph.core import odometers
from odograph.core.conversions import dp_to_probdp_delta, dp_to_probdp_delta_one_sided, filter_time, probdp_drift
from odograph.core.theory import dp_not_probdp, kov_delta, leaky_step, tight_dp_to_probdp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def crossing(gain: float, loss: float, p_gain: float, limits: Sequence[float] | NDArray[np.float64]) -> float:
    """Return P(exists n: L_n > limits[n-1]) for independent steps: `gain` with p_gain, else `loss`."""
    alive, crossed = np.ones(1), 0.0  # alive[i]: i gains so far and no crossing yet
    for n, limit in enumerate(limits, start=1):
        alive = np.append(alive, 0.0) * (1 - p_gain) + np.insert(alive, 0, 0.0) * p_gain
        gains = np.arange(n + 1)
        over = gains * gain + (n - gains) * loss > limit
        crossed += math.fsum(alive[over])
        alive[over] = 0.0
    return crossed


def response_crossing(epsilon: float, limits: Sequence[float] | NDArray[np.float64]) -> float:
    return crossing(epsilon, -epsilon, 1 / (1 + math.exp(-epsilon)), limits)


def clock(epsilon: float, steps: int) -> NDArray[np.float64]:
    """Return the intrinsic times, on the paper's clock, of 1 to `steps` equal steps."""
    return np.arange(1, steps + 1, dtype=np.float64) * epsilon**2


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


def test_e15_dp_steps_break_the_odometers_and_theorem_6_holds() -> None:
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
def test_e15_theorem_6_for_responses_that_hide_their_reveals(t: float) -> None:
    epsilon, delta_step, delta_prime, steps = 0.1, 2e-4, 0.05, 400
    pair = dp_not_probdp(epsilon, delta_step)
    v = clock(epsilon, steps)
    limits = odometers.line(v, delta_prime, at=2.0) + v / 2 + t
    probability = crossing(pair.losses[1], pair.losses[0], float(pair.p[1]), limits)
    assert 0 < probability <= (delta_prime + steps * delta_step) / -math.expm1(-t)
