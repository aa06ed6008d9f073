from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph.core.guarantees import exact_of
from odograph.errors import InvalidGuarantee


@pytest.fixture(scope="module", autouse=True)
def _digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


EPSILONS = ["1e-9", "1e-4", "0.01", "0.5", "1", "1.5", "4", "30", "300"]


def big(value: object) -> mpmath.mpf:
    exact = exact_of(value)  # type: ignore[arg-type]
    return mpmath.mpf(exact.numerator) / exact.denominator


def assert_just_above(value: object, truth: mpmath.mpf) -> None:
    assert truth <= big(value) <= truth * (1 + mpmath.mpf("1e-12"))


def test_sensitivity_over_noise_is_exact() -> None:
    assert odo.laplace(scale=10) == odo.PureDP("0.1")
    assert odo.laplace(scale="0.3", sensitivity=1) == odo.PureDP(Fraction(10, 3))
    assert odo.gaussian(sigma=25) == odo.GDP("0.04")
    assert odo.gaussian(sigma=3, sensitivity=Decimal("0.5")) == odo.GDP(Fraction(1, 6))
    noise = odo.mechanisms.discrete_gaussian(sigma=10, sensitivity=2, dimension=4, grid="0.5")
    assert noise == odo.guarantees.DiscreteGaussian(10, 2, 4, "0.5")
    assert noise.implies() == (odo.ZCDP("0.02"),)
    assert odo.exponential("0.1") == odo.PureDP(0.1)


def laplace_renyi(epsilon: mpmath.mpf, order: mpmath.mpf) -> mpmath.mpf:
    """Mironov 2017, Table II: the Rényi divergence of two Laplace laws at distance epsilon scales."""
    odds = 2 * order - 1
    inside = order / odds * mpmath.exp((order - 1) * epsilon) + (order - 1) / odds * mpmath.exp(-order * epsilon)
    return mpmath.log(inside) / (order - 1)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_laplace_zcdp_is_the_divergence_at_order_one_and_covers_every_order(epsilon: str) -> None:
    true = mpmath.mpf(epsilon)
    rho = odo.mechanisms.laplace_zcdp(scale=1, sensitivity=epsilon).rho
    assert_just_above(rho, true + mpmath.expm1(-true))
    for order in ("1.0001", "1.1", "2", "3.7", "10", "100", "10000"):
        assert laplace_renyi(true, mpmath.mpf(order)) <= mpmath.mpf(order) * big(rho)


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_exponential_zcdp(epsilon: str) -> None:
    assert exact_of(odo.mechanisms.exponential_zcdp(epsilon).rho) == Fraction(epsilon) ** 2 / 8


def answers_epsilon(truth: mpmath.mpf, categories: int) -> mpmath.mpf:
    """The largest log-ratio of any answer's probability between two truths, by looking at them all."""
    other = (1 - truth) / (categories - 1)
    return abs(mpmath.log(truth / other))


@given(st.fractions(min_value=0, max_value=1 - Fraction(1, 10**6), max_denominator=10**9), st.integers(2, 50))
def test_randomized_response(share: Fraction, categories: int) -> None:
    truth = max(share, Fraction(1, 2 * categories))
    true = answers_epsilon(mpmath.mpf(truth.numerator) / truth.denominator, categories)
    value = big(odo.randomized_response(truth, categories).epsilon)
    assert true <= value <= true * (1 + mpmath.mpf("1e-9")) + mpmath.mpf("1e-60")


@pytest.mark.parametrize("truth", ["1e-6", "1e-12", "1e-15", "1e-16", "3e-16", "1e-20", "1e-100"])
def test_randomized_response_that_nearly_always_lies_is_not_underpriced(truth: str) -> None:
    true = answers_epsilon(mpmath.mpf(truth), 2)
    value = big(odo.randomized_response(truth).epsilon)
    assert true <= value <= true * (1 + mpmath.mpf("1e-12"))
    # The same mechanism with the answers renamed.
    assert abs(value - big(odo.randomized_response(1 - Fraction(truth)).epsilon)) <= value * mpmath.mpf("1e-9")


def test_even_odds_cost_nothing() -> None:
    assert odo.randomized_response("1/2") == odo.PureDP(0)
    assert odo.randomized_response("1/3", 3) == odo.PureDP(0)


@pytest.mark.parametrize(
    "make",
    [odo.laplace, odo.mechanisms.laplace_zcdp, odo.gaussian, odo.mechanisms.discrete_gaussian],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("noise", [0, 0.0, "0", Fraction(0), -0.0])
def test_zero_noise_is_refused_not_free(make: Callable[[object], object], noise: object) -> None:
    with pytest.raises(InvalidGuarantee, match="without noise there is no privacy"):
        make(noise)


def test_zero_noise_for_a_subsampled_gaussian_is_refused() -> None:
    with pytest.raises(InvalidGuarantee, match="without noise there is no privacy"):
        odo.subsampled_gaussian(0.01, 0)


@pytest.mark.parametrize("noise", [-1, "abc", True, None, float("nan"), float("inf")])
def test_noise_that_is_no_number_is_refused_by_name(noise: object) -> None:
    with pytest.raises(InvalidGuarantee, match=r"gaussian\(sigma\)"):
        odo.gaussian(noise)  # type: ignore[arg-type]


@pytest.mark.parametrize("truth", [1, "1", 2, 0, -0.1, "x"])
def test_randomized_response_without_randomness_is_refused(truth: object) -> None:
    with pytest.raises(InvalidGuarantee, match=r"randomized_response\(truth\)"):
        odo.randomized_response(truth)  # type: ignore[arg-type]


@pytest.mark.parametrize("categories", [1, 0, -2, 2.5, True, "3"])
def test_randomized_response_needs_two_answers(categories: object) -> None:
    with pytest.raises(InvalidGuarantee, match="categories"):
        odo.randomized_response(0.75, categories)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda: odo.mechanisms.laplace_zcdp("1e-400"),
        lambda: odo.mechanisms.exponential_zcdp("1e400"),
        lambda: odo.mechanisms.exponential_zcdp(1e200),
    ],
)
def test_a_cost_beyond_every_float_is_refused_as_a_guarantee(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidGuarantee):
        call()
