"""A reserve with an exponential tail: how much its log-density curves, and the put order of what it prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import mpmath
import pytest
from mpmath import mp, mpf

from odograph.core.conversions import pure_to_rdp
from odograph.core.filters.smooth import effective_reserve, smooth_price_pure, smooth_time_renyi
from odograph.core.fixed_point import SCALE

QUANTUM = Fraction(1, 40_000)
# Reserves in units, with orders: the shapes of "mixed" and "training" at (1, 1e-6), a long tail and a short one.
SHAPES = [(28, Fraction(58)), (22, Fraction(31)), (8, Fraction(50)), (100, Fraction(120))]


@pytest.fixture(scope="module", autouse=True)
def _digits() -> Iterator[None]:
    with mp.workdps(25):
        yield


def mean_of_tail(order: Fraction) -> mpf:
    return 2 / (mpf(order.numerator) / order.denominator * (mpf(order.numerator) / order.denominator - 1))


def put(y: mpf, variance: mpf) -> mpf:
    """e^(-y/2) E(e^y - G_v)^+ for a lognormal factor of one variance."""
    root = mpmath.sqrt(variance)
    low, high = ((y + sign * variance / 2) / root for sign in (-1, 1))
    return mpmath.exp(y / 2) * mpmath.ncdf(high) - mpmath.exp(-y / 2) * mpmath.ncdf(low)


def over_tail(function: Callable[[mpf], mpf], order: Fraction) -> mpf:
    """The expectation over T, exponential."""
    mean = mean_of_tail(order)
    ends = [mean * part for part in (0, mpf("0.05"), mpf("0.3"), 1, 3, 8, 20, 60)]
    return mpmath.quad(lambda t: function(t) * mpmath.exp(-t / mean) / mean, ends)


def missing(y: mpf, epsilon: mpf, price: mpf, reserve: int, order: Fraction) -> mpf:
    """Return how much more of a put a coin of size epsilon needs than a Gaussian of the price; at most 0 if sound."""
    w = mpf(reserve) * QUANTUM.numerator / QUANTUM.denominator
    coin = 1 / (2 * mpmath.cosh(epsilon / 2))

    def difference(t: mpf) -> mpf:
        variance = w + t
        return coin * (put(y - epsilon, variance) + put(y + epsilon, variance)) - put(y, variance + price)

    return over_tail(difference, order)


def strikes(reserve: int, order: Fraction) -> list[mpf]:
    spread = mpmath.sqrt(mpf(reserve) * QUANTUM.numerator / QUANTUM.denominator + mean_of_tail(order))
    return [spread * mpf(part) for part in ("0", "0.3", "1", "2", "4")]


@pytest.mark.parametrize(("reserve", "order"), SHAPES)
def test_the_log_density_curves_by_at_most_the_inverse_of_the_effective_reserve(
    reserve: int, order: Fraction
) -> None:
    w = mpf(reserve) * QUANTUM.numerator / QUANTUM.denominator
    found = effective_reserve(QUANTUM, reserve, order)

    def density(y: mpf) -> mpf:
        return over_tail(lambda t: mpmath.exp(-(w + t) / 8 - y * y / (2 * (w + t))) / mpmath.sqrt(w + t), order)

    spread = mpmath.sqrt(w + mean_of_tail(order))
    for part in (mpf(0), mpf("0.5"), mpf(1), mpf(2), mpf(5)):
        curvature = -mpmath.diff(lambda y: mpmath.log(density(y)), part * spread, 2, h=spread / 10**6)
        assert curvature <= 1 / mpf(found)
        if part == 0:
            assert curvature * mpf(found) == pytest.approx(1, rel=1e-6)  # it is sharp there
    assert float(w) < found < float(w + mean_of_tail(order))


@pytest.mark.parametrize(("reserve", "order"), SHAPES[::2])
@pytest.mark.parametrize("part", ["0.1", "0.4", "1"])
def test_a_pure_price_keeps_the_put_order_and_one_by_a_larger_reserve_does_not(
    reserve: int, order: Fraction, part: str
) -> None:
    w = effective_reserve(QUANTUM, reserve, order)
    epsilon = float(part) * math.sqrt(w)
    price = smooth_price_pure(epsilon, QUANTUM, reserve, order=order, pure_certified=False)
    assert price is not None
    time = mpf(price) / SCALE
    for y in strikes(reserve, order):
        assert missing(y, mpf(epsilon), time, reserve, order) <= 0
    if part == "1":
        return  # the theorem is not sharp for coins as large as the reserve
    # Negative control: the price of a reserve that is a quarter larger in effect.
    careless = 2 * (mpmath.log(mpmath.cosh(epsilon / 2)) - mpmath.log(mpmath.cos(epsilon / mpmath.sqrt(1.25 * w))))
    careless /= mpf("0.25") + 1 / mpf(1.25 * w)
    assert missing(mpf(0), mpf(epsilon), careless, reserve, order) > 0


@pytest.mark.parametrize(("reserve", "order"), SHAPES[::2])
def test_the_price_of_a_coin_by_one_order_keeps_the_put_order(reserve: int, order: Fraction) -> None:
    w = effective_reserve(QUANTUM, reserve, order)
    units = math.ceil(w / QUANTUM)  # a reserve without a tail that is at least as large
    for part in (0.05, 0.3):
        epsilon = part * math.sqrt(w)
        divergence = Fraction(pure_to_rdp(epsilon, float(order)))
        time = smooth_time_renyi(divergence, order, QUANTUM, units)
        assert time is not None
        for y in strikes(reserve, order):
            assert missing(y, mpf(epsilon), mpf(time), reserve, order) <= 0
        if part < 0.1:  # negative control, where one order is nearly sharp
            assert missing(mpf(0), mpf(epsilon), mpf(time) * mpf("0.97"), reserve, order) > 0


def test_a_reserve_without_a_tail_or_with_a_short_one_is_what_it_is() -> None:
    w = float(28 * QUANTUM)
    assert effective_reserve(QUANTUM, 28) == pytest.approx(w, rel=1e-14)
    assert effective_reserve(QUANTUM, 28, Fraction(10**6)) == pytest.approx(w, rel=1e-14)
    assert effective_reserve(QUANTUM, 28) < w
