from __future__ import annotations

import math
import sys
from fractions import Fraction
from itertools import product
from typing import TypeAlias

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odograph.core import theory
from odograph.core.theory import (
    advanced_half,
    advanced_hoeffding,
    advanced_kov,
    advanced_tanh,
    basic,
    conditional_randomized_response,
    heterogeneous_delta_exact,
    kov_delta,
    kov_epsilon,
    kov_steps,
)
from odograph.errors import InvalidArgument, InvalidGuarantee, MissingExtra
from odograph.integrations.dp_accounting import heterogeneous_epsilon

Real: TypeAlias = mpmath.mpf


def true_delta(steps: int, epsilon: float | Real, delta: float | Real, target: Real) -> Real:
    """Total delta of optimal composition by the direct sum, in as many digits as mpmath is set to."""
    eps, reveal = (mpmath.mpf(repr(value)) if isinstance(value, float) else value for value in (epsilon, delta))
    odds = mpmath.exp(eps)
    mass, total = (odds / (1 + odds)) ** steps, mpmath.mpf(0)
    for lost in range(steps + 1):
        loss = (steps - 2 * lost) * eps
        if loss <= target:
            break
        total -= mass * mpmath.expm1(target - loss)
        mass *= (steps - lost) / (odds * (lost + 1))
    return 1 - (1 - reveal) ** steps * (1 - total)


def assert_tight(value: float, truth: Real, relative: float = 1e-12) -> None:
    assert mpmath.mpf(value) >= truth
    assert mpmath.mpf(value) <= truth * (1 + mpmath.mpf(relative))


CASES = [
    (1, 1e-6, 0.0, 1e-8),
    (1, 0.5, 1e-9, 0.1),
    (2, 5.0, 0.0, 0.3),
    (10, 0.1, 0.0, 1e-6),
    (10, 0.1, 1e-301, 1e-299),
    (30, 0.5, 1e-8, 1e-6),
    (101, 0.3, 0.0, 1e-300),
    (1000, 1e-3, 1e-12, 1e-8),
    (1000, 2.0, 0.0, 0.999),
    (3000, 1e-6, 0.0, 1e-5),
    (10_000, 0.01, 0.0, 1e-9),
]


@pytest.mark.parametrize(("steps", "epsilon", "delta", "delta_total"), CASES)
def test_kov_epsilon_is_the_root_of_the_direct_sum(
    steps: int, epsilon: float, delta: float, delta_total: float
) -> None:
    answer = kov_epsilon(steps, epsilon, delta, delta_total)
    with mpmath.workdps(60 if delta_total > 1e-20 else 700):
        target = mpmath.mpf(repr(delta_total))
        assert true_delta(steps, epsilon, delta, mpmath.mpf(answer)) <= target
        assert true_delta(steps, epsilon, delta, mpmath.mpf(answer) * (1 - mpmath.mpf("1e-13"))) > target


def binary_delta(steps: int, epsilon: float, delta: float, target: Real) -> Real:
    """As `true_delta`, with floats as the binary numbers that they are."""
    return true_delta(steps, mpmath.mpf(epsilon), mpmath.mpf(delta), target)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.integers(1, 60),
    epsilon=st.floats(1e-3, 2.0),
    delta=st.sampled_from([0.0, 1e-12, 1e-7]),
    delta_total=st.floats(1e-5, 0.9),
)
@example(steps=1, epsilon=0.2, delta=0.0, delta_total=1e-300)
@example(steps=7, epsilon=0.1, delta=1e-7, delta_total=0.1)
def test_kov_epsilon_holds_for_both_readings_of_its_floats(
    steps: int, epsilon: float, delta: float, delta_total: float
) -> None:
    answer = kov_epsilon(steps, epsilon, delta, delta_total)
    with mpmath.workdps(60 if delta_total > 1e-20 else 700):
        assert true_delta(steps, epsilon, delta, mpmath.mpf(answer)) <= mpmath.mpf(repr(delta_total))
        assert binary_delta(steps, epsilon, delta, mpmath.mpf(answer)) <= mpmath.mpf(delta_total)


@pytest.mark.parametrize(
    ("steps", "epsilon", "delta", "target"),
    [
        (1, 1e-6, 0.0, 5e-7),
        (2, 0.5, 1e-9, 0.1),
        (2, 0.5, 1e-9, 1.0),
        (10, 0.1, 0.0, 0.9999999),
        (40, 1.7, 1e-5, 3.0),
        (500, 0.05, 0.0, 4.0),
        (500, 0.05, 0.0, 20.0),
        (9_999, 0.004, 0.0, 0.0),
        (10_000, 0.01, 1e-30, 30.0),
    ],
)
def test_kov_delta_against_the_direct_sum(steps: int, epsilon: float, delta: float, target: float) -> None:
    with mpmath.workdps(200):
        assert_tight(
            kov_delta(steps, epsilon, delta, target),
            true_delta(steps, epsilon, delta, mpmath.mpf(repr(target))),
        )


@pytest.mark.long
@pytest.mark.parametrize(("epsilon", "target"), [(1e-3, 5.0), (1e-3, 12.0), (1e-5, 0.01), (0.01, 120.0)])
def test_kov_delta_at_a_million_steps_against_arbitrary_precision(epsilon: float, target: float) -> None:
    # Terms past 1e-40 of the largest do not matter; start from the knot next to the target and walk up.
    steps = 10**6
    with mpmath.workdps(40):
        eps, t = mpmath.mpf(repr(epsilon)), mpmath.mpf(repr(target))
        odds = mpmath.exp(eps)
        lost = math.ceil((steps - Fraction(repr(target)) / Fraction(repr(epsilon))) / 2) - 1
        log_mass = mpmath.loggamma(steps + 1) - mpmath.loggamma(lost + 1) - mpmath.loggamma(steps - lost + 1)
        mass = mpmath.exp(log_mass - lost * eps - steps * mpmath.log1p(1 / odds))
        total, largest = mpmath.mpf(0), mass
        while mass > largest * mpmath.mpf("1e-25"):
            total -= mass * mpmath.expm1(t - (steps - 2 * lost) * eps)
            mass *= lost * odds / (steps - lost + 1)
            largest, lost = max(largest, mass), lost - 1
        assert_tight(kov_delta(steps, epsilon, 0.0, target), total)


def test_kov_equals_the_exact_enumeration_of_randomized_response() -> None:
    pair = conditional_randomized_response(0.7, Fraction(1, 1000)).power(6)
    for target in (0.0, 0.3, 1.4, 2.0, 4.1):
        assert kov_delta(6, 0.7, 0.001, target) == pytest.approx(float(pair.hockey_stick(target)), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 300),
    epsilon=st.floats(1e-6, 5.0),
    delta=st.sampled_from([0.0, 1e-300, 1e-12, 1e-7]),
    delta_total=st.floats(1e-4, 0.9),
)
def test_kov_epsilon_and_kov_delta_are_inverse(steps: int, epsilon: float, delta: float, delta_total: float) -> None:
    answer = kov_epsilon(steps, epsilon, delta, delta_total)
    back = kov_delta(steps, epsilon, delta, answer)
    # Where the curve is steep, rounding epsilon by one unit is what moves delta most, down (it is rounded up) or
    # up (its shortest decimal may lie half a unit below it).
    allowed = 1e-11 * delta_total + 2 * math.ulp(answer)
    assert back <= delta_total + allowed
    assert back >= delta_total - allowed or answer == 0.0


def test_kov_limits() -> None:
    assert kov_epsilon(10, "0.1", 0, 0) == 1.0
    assert kov_epsilon(10, 0.1, 0.0, 0.0) == math.nextafter(1.0, 2.0)  # the float 0.1 is above one tenth
    assert kov_epsilon(10, 0.1, 1e-6, 1e-6) == math.inf
    assert kov_epsilon(10, "0.1", "1e-301", "1e-300") == 1.0  # attainable, by the square of 1e-301 only
    assert kov_epsilon(1, 0.1, 1e-6, 1e-6) == 0.1
    assert kov_epsilon(100, 1e-6, 0.0, 0.01) == 0.0
    assert kov_epsilon(7, 0.1, 0.0, 1.0) == 0.0
    assert kov_epsilon(7, 0.1, 1.0, 0.5) == math.inf
    assert kov_epsilon(0, 0.1, 0.5, 0.0) == 0.0
    assert kov_delta(10, 0.1, 0.0, 1.0) == 0.0
    assert kov_delta(10, 0.1, 1.0, 1.0) == 1.0
    assert kov_delta(3, 800.0, 0.0, 0.5) == 1.0
    assert kov_delta(5, 0.0, 0.0, 0.0) == 0.0
    assert 0.0 < kov_delta(10_000, 0.1, 0.0, 999.9) <= 2 * sys.float_info.min  # not rounded to nothing


@pytest.mark.parametrize(("step", "steps"), [(0.001, 56032), (0.01, 562), (0.05, 26), (0.1, 10), (0.5, 2)])
def test_kov_steps(step: float, steps: int) -> None:
    assert kov_steps(1.0, 1e-6, step) == steps
    assert kov_epsilon(min(steps, 600), step, 0.0, 1e-6) <= 1.0
    assert kov_delta(steps + 1, step, 0.0, 1.0) > 1e-6


def test_kov_steps_contains_basic_composition_exactly() -> None:
    assert kov_steps(0.3, 0.0, 0.1) == 3
    assert kov_steps(0.05, 1e-9, 0.1) == 0
    with pytest.raises(InvalidGuarantee, match="step_epsilon"):
        kov_steps(1.0, 1e-6, 0.0)


def test_heterogeneous_delta_is_the_sum_over_all_sign_patterns() -> None:
    epsilons = [0.1, 0.25, 0.25, 0.6, 0.9, 0.01, 0.33]
    with mpmath.workdps(40):
        for target in (0.0, 0.5, 1.3, 2.3):
            total = mpmath.mpf(0)
            for signs in product((1, -1), repeat=len(epsilons)):
                losses = [sign * mpmath.mpf(epsilon) for sign, epsilon in zip(signs, epsilons, strict=True)]
                mass = mpmath.fprod(1 / (1 + mpmath.exp(-loss)) for loss in losses)
                total += mass * max(0, -mpmath.expm1(mpmath.mpf(target) - mpmath.fsum(losses)))
            assert_tight(heterogeneous_delta_exact(epsilons, target), total)


def test_heterogeneous_delta_of_equal_steps_is_kov() -> None:
    assert heterogeneous_delta_exact([0.1] * 100, 4.0) == pytest.approx(kov_delta(100, 0.1, 0.0, 4.0), rel=1e-11)
    assert heterogeneous_delta_exact([], 0.0) == 0.0
    with pytest.raises(InvalidArgument, match="different values"):
        heterogeneous_delta_exact([0.1 + 0.001 * n for n in range(30)], 1.0)


@pytest.mark.parametrize(("steps", "epsilon"), [(1, 0.5), (10, 0.1), (562, 0.01), (30, 0.5), (5000, 0.003)])
def test_heterogeneous_epsilon_is_within_a_thousandth_of_kov(steps: int, epsilon: float) -> None:
    exact = kov_epsilon(steps, epsilon, 0.0, 1e-6)
    assert heterogeneous_epsilon([epsilon] * steps, 1e-6) == pytest.approx(exact, rel=1e-3)


def test_heterogeneous_epsilon_agrees_with_the_enumeration() -> None:
    epsilons = np.random.default_rng(5).uniform(0.01, 0.6, 14)
    answer = heterogeneous_epsilon(epsilons, 1e-6)
    assert (
        heterogeneous_delta_exact(epsilons, answer * 0.999)
        > 1e-6
        > heterogeneous_delta_exact(epsilons, answer * 1.001)
    )
    assert heterogeneous_epsilon([0.0, 0.0], 1e-6) == 0.0
    with pytest.raises(InvalidGuarantee, match="delta"):
        heterogeneous_epsilon([0.1], 0.0)


def test_heterogeneous_epsilon_names_the_extra_when_the_library_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
    with pytest.raises(MissingExtra, match=r"odograph\[accounting\]"):
        heterogeneous_epsilon([0.1], 1e-6)


def test_basic_is_exact() -> None:
    assert basic([0.1] * 10, [0.125] * 4) == (1.0, 0.5)
    assert basic([], []) == (0.0, 0.0)
    epsilon, delta = basic([0.1, 0.2], [1e-300, 2e-300])
    assert Fraction(epsilon) >= Fraction(3, 10)
    assert Fraction(delta) >= 3 * Fraction("1e-300")


@pytest.mark.parametrize("epsilons", [[1e-12], [0.01] * 50, [0.5, 1.0, 1e-6], [100.0]])
@pytest.mark.parametrize("delta", [1e-307, 1e-300, 1e-6, 0.9, 0.9999999999])
def test_advanced_composition_against_mpmath(epsilons: list[float], delta: float) -> None:
    with mpmath.workdps(50):
        exact = [mpmath.mpf(repr(epsilon)) for epsilon in epsilons]
        ell = -mpmath.log(mpmath.mpf(repr(delta)))
        squares = mpmath.fsum(epsilon**2 for epsilon in exact)
        drift = mpmath.fsum(epsilon * mpmath.tanh(epsilon / 2) for epsilon in exact)
        assert_tight(advanced_half(epsilons, delta), mpmath.sqrt(2 * ell * squares) + squares / 2)
        assert_tight(advanced_tanh(epsilons, delta), mpmath.sqrt(4 * ell * drift) + drift)
        hoeffding = mpmath.sqrt(2 * ell * squares) + drift
        assert_tight(advanced_hoeffding(epsilons, delta), hoeffding)
        # Kairouz, Oh and Viswanath 2015, Theorem 3.5: the least of three terms.
        sharper = (
            mpmath.sqrt(2 * squares * mpmath.log(mpmath.e + mpmath.sqrt(squares) / mpmath.mpf(repr(delta)))) + drift
        )
        assert_tight(advanced_kov(epsilons, delta), min(mpmath.fsum(exact), sharper, hoeffding))


def test_kov_s_closed_form_has_its_sharper_term() -> None:
    # 100 steps of 0.005 at 1e-8: log(e + sqrt(.0025)/1e-8) = 15.4249, and 1/4 of a hundredth is the drift.
    assert advanced_kov([0.005] * 100, 1e-8) == pytest.approx(0.05 * math.sqrt(2 * 15.4249485) + 0.00125, rel=1e-6)
    assert advanced_kov([0.005] * 100, 1e-8) < 0.92 * advanced_hoeffding([0.005] * 100, 1e-8)


@settings(max_examples=60, deadline=None)
@given(steps=st.integers(1, 200), epsilon=st.floats(1e-4, 2.0), delta=st.floats(1e-12, 0.5))
def test_kov_s_closed_form_is_a_bound(steps: int, epsilon: float, delta: float) -> None:
    with mpmath.workdps(50):
        claimed = mpmath.mpf(advanced_kov([epsilon] * steps, delta))
        assert true_delta(steps, epsilon, 0.0, claimed) <= mpmath.mpf(repr(delta)) * (1 + mpmath.mpf("1e-12"))


def test_a_closed_form_below_kov_s_is_caught() -> None:
    # The same check on a twin that divides by 100 under the logarithm: no bound any more.
    with mpmath.workdps(50):
        squares, drift = mpmath.mpf("0.0025"), 100 * mpmath.mpf("0.005") * mpmath.tanh(mpmath.mpf("0.0025"))
        twin = (
            mpmath.sqrt(2 * squares * mpmath.log(mpmath.e + mpmath.sqrt(squares) / 100 / mpmath.mpf("1e-8"))) + drift
        )
        assert true_delta(100, 0.005, 0.0, twin) > mpmath.mpf("1e-8")


def test_the_baselines_are_ordered() -> None:
    epsilons, delta = [0.3] * 60, 1e-6
    optimal = kov_epsilon(60, 0.3, 0.0, delta)
    bounds = [bound(epsilons, delta) for bound in (advanced_tanh, advanced_kov, advanced_half)]
    assert optimal < bounds[0] < bounds[1] < bounds[2]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, True])
def test_what_is_no_number_is_refused(bad: float) -> None:
    for call in (
        lambda: basic([bad], [0.0]),
        lambda: advanced_half([bad], 1e-6),
        lambda: kov_epsilon(3, bad, 0.0, 1e-6),
        lambda: kov_delta(3, 0.1, bad, 1.0),
        lambda: heterogeneous_delta_exact([bad], 1.0),
    ):
        with pytest.raises(InvalidGuarantee):
            call()


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="steps"):
        kov_epsilon(-1, 0.1, 0.0, 1e-6)
    with pytest.raises(InvalidGuarantee, match="at most 1"):
        kov_epsilon(1, 0.1, 0.0, 1.5)
    with pytest.raises(InvalidGuarantee, match="above 0 and below 1"):
        advanced_kov([0.1], 0.0)


def test_every_public_function_states_its_theorem_and_its_assumption() -> None:
    for name in theory.__all__:
        if isinstance(getattr(theory, name), type):
            continue
        lines = [line.strip() for line in (getattr(theory, name).__doc__ or "").splitlines()]
        assert any(line.startswith("Theorem: ") for line in lines), name
        assert any(line.startswith("Assumes: ") for line in lines), name
