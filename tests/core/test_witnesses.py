from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odograph.core.theory import (
    FinitePair,
    conditional_randomized_response,
    dp_not_probdp,
    dp_not_probdp_loss,
    leaky_step,
    tight_dp_to_probdp,
)
from odograph.errors import InvalidArgument, InvalidGuarantee

EPSILONS = st.floats(1e-6, 5.0)
DELTAS = st.fractions(Fraction(1, 10**12), Fraction(1, 2))


@given(EPSILONS, DELTAS)
def test_randomized_response_is_exactly_as_private_as_it_says(epsilon: float, delta: Fraction) -> None:
    pair = conditional_randomized_response(epsilon, delta)
    assert pair.hockey_stick(epsilon) == pair.swapped.hockey_stick(epsilon) == delta
    assert pair.is_dp(epsilon, delta)
    assert pair.is_probdp(epsilon, delta)
    assert not pair.is_dp(epsilon, delta * Fraction(999, 1000))
    assert not pair.is_probdp(epsilon, delta * Fraction(999, 1000))
    assert pair.losses == pytest.approx((-epsilon, epsilon, math.inf, -math.inf), rel=1e-9)


@given(EPSILONS, DELTAS)
def test_merging_the_reveals_keeps_dp_and_loses_pdp(epsilon: float, delta: Fraction) -> None:
    pair = dp_not_probdp(epsilon, delta)
    assert pair.hockey_stick(epsilon) == delta
    assert pair.is_dp(epsilon, delta)
    assert not pair.is_probdp(epsilon, delta)
    assert pair.losses[1] == pytest.approx(dp_not_probdp_loss(epsilon, float(delta)), rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-3, 0.1, 2.0, 40.0, 700.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 1e-6, 0.5, 0.9])
def test_the_loss_of_the_merged_response_against_mpmath(epsilon: float, delta: float) -> None:
    with mpmath.workdps(800):
        eps, reveal = mpmath.mpf(repr(epsilon)), mpmath.mpf(repr(delta))
        truth = mpmath.log((reveal + mpmath.exp(eps)) / (1 - reveal))
        value = mpmath.mpf(dp_not_probdp_loss(epsilon, delta))
        assert truth <= value <= truth * (1 + mpmath.mpf("1e-12"))


def test_the_loss_of_a_certain_reveal_is_infinite() -> None:
    assert dp_not_probdp_loss(1.0, 1.0) == math.inf


@given(EPSILONS, st.fractions(Fraction(1, 10**12), Fraction(1, 100)), st.floats(1.2, 4.0))
def test_the_tight_mechanism_meets_the_conversion_with_equality(
    epsilon: float, delta: Fraction, factor: float
) -> None:
    t = epsilon + factor / 4
    pair = tight_dp_to_probdp(epsilon, delta, t)
    drop = Fraction(math.exp(epsilon)) / Fraction(math.exp(t))
    assert pair.hockey_stick(epsilon) == pair.swapped.hockey_stick(epsilon) == delta
    assert pair.tail(t, closed=True) == delta / (1 - drop)
    assert pair.tail(t) == 0
    assert pair.losses == pytest.approx((t, -t, 0.0), rel=1e-9)


def test_the_tight_mechanism_needs_room() -> None:
    with pytest.raises(InvalidArgument, match="above epsilon"):
        tight_dp_to_probdp(1.0, 1e-6, 1.0)
    with pytest.raises(InvalidGuarantee, match="delta"):
        tight_dp_to_probdp(1.0, 0.5, 1.1)


def test_the_leaky_step_loses_surely() -> None:
    pair = leaky_step(1e-6)
    assert pair.is_dp(0.0, 1e-6)
    assert not pair.is_dp(0.0, 9e-7)
    assert pair.losses == pytest.approx((-math.log1p(-1e-6), -math.inf), rel=1e-15)
    assert pair.is_probdp(pair.losses[0], 1e-6)
    assert not pair.is_probdp(0.0, 1e-6)


def test_composition_merges_equal_ratios_and_keeps_the_law_of_the_loss() -> None:
    step = conditional_randomized_response(0.5, 0)
    four = step.power(4)
    assert len(four.p) == 5
    assert sum(four.p) == sum(four.q) == 1
    assert sorted(four.losses) == pytest.approx([-2.0, -1.0, 0.0, 1.0, 2.0])
    assert four.tail(0.9) == step.then(step).then(step.then(step)).tail(0.9)
    assert step.power(0) == FinitePair((Fraction(1),), (Fraction(1),))


def test_floats_are_taken_as_they_are() -> None:
    pair = FinitePair((0.5, 0.5), (0.25, 0.75))
    assert pair.hockey_stick(0.0) == Fraction(1, 4)
    assert pair.losses == pytest.approx((math.log(2), math.log(2 / 3)), rel=1e-15)


def test_what_is_no_pair_of_laws_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="same length"):
        FinitePair((1.0,), (0.5, 0.5))
    with pytest.raises(InvalidArgument, match="sum to 1"):
        FinitePair((0.5, 0.6), (0.5, 0.5))
    with pytest.raises(InvalidArgument, match="sum to 1"):
        FinitePair((1.5, -0.5), (0.5, 0.5))
    with pytest.raises(InvalidGuarantee, match="at most 1"):
        leaky_step(1.5)
