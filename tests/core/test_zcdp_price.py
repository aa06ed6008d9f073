"""The scanned zCDP price lies above a certified bound of every zCDP law, and broken prices and bounds are caught.

Everything is scaled by the reserve: a loss is sqrt(w) t, a moment's exponent C/sqrt(w), a strike e^(sqrt(w) Y), rho
= x w and a price S w. The rise of the put under a law, divided by w q(y), is the mean of `rise_of_reserve`. A dual is
a combination of functions whose means are known or bounded for every rho-zCDP law, and lies above it everywhere.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.optimize import brentq, linprog, minimize_scalar

from odograph.core.filters.smooth import smooth_price_zcdp, smooth_price_zcdp_scanned
from odograph.core.fixed_point import SCALE

FULL: Final = os.environ.get("ODOGRAPH_FULL") == "1"
LEAST: Final = 1 / 500  # of x: below it a price counts it as this
SMALL: Final = 1e-4  # a w at which the limit w -> 0 is reached: what is needed changes by w/12
BEYOND: Final = 12.5  # of A = Y^2 x/(1 + 2x)^2: from there one exponential is enough, by hand

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _digits() -> Iterator[None]:
    with mp.workdps(40):
        yield


def factor(x: float, w: float) -> float:
    """What 2 rho is multiplied by, as documented."""
    return 1.0 + 0.34 * x - 0.1 * x * x + x * w / 7.0


def price_at(x: float, w: float) -> float:
    """The price of the code under test, in units of w."""
    quantum = Fraction(repr(w)) / 100
    price = smooth_price_zcdp_scanned(Fraction(repr(x)) * 100 * quantum, quantum, 100)
    assert price is not None
    return price / SCALE / w


# The two sides.

NODES: Final = np.polynomial.legendre.leggauss(48)


def rise_of_gaussian(price: float, strike: float, w: float) -> float:
    """How much the put rises under the Gaussian that is charged."""
    r = 0.5 * price * (NODES[0] + 1.0)
    values = np.exp(-w * r / 8.0 + 0.5 * strike**2 * r / (1.0 + r)) / np.sqrt(1.0 + r)
    return float(0.25 * price * np.dot(NODES[1], values))


def kernel(t: Array, w: float) -> Array:
    return np.sinh(0.5 * math.sqrt(w) * t) * 2.0 / math.sqrt(w)


def level(t: Array, w: float) -> Array:
    return np.cosh(0.5 * math.sqrt(w) * t)


def moment(orders: Array, t: Array, w: float) -> tuple[Array, Array]:
    """What has a bounded mean, (e^(Ct) - cosh - 2C/h sinh)/(C^2 - h^2/4) for h = sqrt(w), and its derivative."""
    half = 0.5 * math.sqrt(w)

    def grown(rate: Array) -> Array:
        """The integral of e^(rate v) over v in [0, t]; a large one is understated, which is safe."""
        rate = np.where(rate == 0.0, 1e-30, rate)
        integral: Array = np.expm1(np.minimum(rate * t[:, None], 600.0)) / rate
        return integral

    rising = grown(orders - half) * np.exp(half * t[:, None])
    falling = grown(orders + half) * np.exp(-half * t[:, None])
    return (rising - falling) / (2.0 * half), 0.5 * (rising + falling)


def bound(orders: Array, x: float, w: float) -> Array:
    """Its largest mean: the moments of a rho-zCDP law, and for |C| <= h/2 its two KL divergences."""
    squares = np.maximum(orders**2 - 0.25 * w, 1e-12)
    return np.expm1(squares * x) / squares


def rise_of_reserve(t: Array, strike: float, w: float) -> tuple[Array, Array]:
    """psi(t), the integral of kernel(t - v) e^(Yv - v^2/2) over v in [0, t], and its derivative, t away from 0."""
    nodes, weights = np.polynomial.legendre.leggauss(6)
    widths = np.diff(t)
    v = t[:-1, None] + 0.5 * widths[:, None] * (nodes + 1.0)
    mass = np.exp(strike * v - 0.5 * v * v) * 0.5 * weights * widths[:, None]
    whole, first = (
        np.concatenate([[0.0], np.cumsum((mass * part).sum(axis=1))]) for part in (level(v, w), kernel(v, w))
    )
    value = kernel(t, w) * whole - level(t, w) * first
    return np.maximum(value, 0.0), level(t, w) * whole - 0.25 * w * kernel(t, w) * first


# Duals.


@dataclass(frozen=True)
class Dual:
    """A cosh + D sinh + a mixture of moments, at or above the rise of the reserve at one strike."""

    strike: float
    w: float
    height: float
    slope: float
    orders: Array
    weights: Array

    def value(self, x: float) -> float:
        """A bound of the rise of the put for every law that is rho-zCDP, at this or any other rho."""
        return self.height + float(self.weights @ bound(self.orders, x, self.w))

    @property
    def is_exponential(self) -> bool:
        """Whether it is one exponential that lies above for every w: Yv - v^2/2 <= Cv + (Y - C)^2/2."""
        least = np.exp(0.5 * (self.strike - self.orders) ** 2)
        return self.height == self.slope == 0.0 and len(self.orders) == 1 and bool(self.weights[0] >= least[0])

    def at(self, w: float, x: float) -> Dual:
        """The same weights for another reserve, raised as far as it needs; x is only where the grid is centered."""
        if self.is_exponential:
            return replace(self, w=w)
        moved = Side.of(x, self.strike, w).padded(replace(self, w=w))
        assert moved is not None
        return moved


def one_exponential(x: float, strike: float, w: float) -> Dual:
    """The best dual that is one exponential."""
    low = 0.5 * math.sqrt(w)

    def size(order: float) -> float:
        return 0.5 * (strike - order) ** 2 + math.log(float(bound(np.array([order]), x, w)[0]))

    best = minimize_scalar(size, bounds=(low, strike), method="bounded").x if strike > low else low
    weight = math.exp(0.5 * (strike - best) ** 2) * (1.0 + 1e-12)  # above it, whatever the rounding
    return Dual(strike, w, 0.0, 0.0, np.array([best]), np.array([weight]))


@dataclass(frozen=True)
class Side:
    """A fine grid of losses, both sides of 0, with what a dual must be above."""

    strike: float
    w: float
    t: Array
    rise: Array
    ends: tuple[float, float]  # the derivatives of the rise

    @classmethod
    def of(cls, x: float, strike: float, w: float, count: int = 3000) -> Side:
        reach = 9.0 * math.sqrt(2.0 * x) + 0.5
        right = np.linspace(0.0, reach + min(4.0 * x, 1.0) * strike, count + 1)
        left = np.linspace(0.0, -reach, count // 2 + 1)
        (rises, slopes), (falls, drops) = (rise_of_reserve(side, strike, w) for side in (right, left))
        grid, rise = np.concatenate([left[:0:-1], right]), np.concatenate([falls[:0:-1], rises])
        return cls(strike, w, grid, rise, (float(drops[-1]), float(slopes[-1])))

    def padded(self, dual: Dual) -> Dual | None:
        """The dual raised until it is at or above the rise everywhere; None if its tails are not.

        g = dual - rise has g'' = w g/4 + r, where r, the mixture of e^(Ct) less e^(Yt - t^2/2), is negative in one
        interval at most: between grid points g is above the chord less an eighth of the square of the distance times
        g''. Beyond the grid r >= 0, so that g stays nonnegative if it is so at the end and does not point down there.
        """
        t, w = self.t, self.w
        values, slopes = moment(dual.orders, t, w)
        gap = dual.height * level(t, w) + dual.slope * kernel(t, w) + values @ dual.weights - self.rise
        mixture = np.exp(np.minimum(np.outer(t, dual.orders), 600.0)) @ dual.weights
        density = np.exp(self.strike * t - 0.5 * t * t)
        bend = np.maximum(mixture[1:], mixture[:-1]) - np.minimum(density[1:], density[:-1])
        bend = np.maximum(bend, 0.0) + 0.25 * w * np.maximum(0.0, np.maximum(gap[1:], gap[:-1]))
        low = np.minimum(gap[1:], gap[:-1]) - np.diff(t) ** 2 / 8.0 * bend
        lift = max(0.0, float(np.max(-low / np.minimum(level(t[1:], w), level(t[:-1], w)))))
        left, right = self._directions(dual, slopes)
        # Where r is negative must be within the grid: then it is nonnegative beyond both ends.
        if not np.any(mixture < density) or min(mixture[0] - density[0], mixture[-1] - density[-1], -left, right) < 0:
            return None
        return replace(dual, height=dual.height + lift)

    def low_points(self, dual: Dual) -> Array:
        """Where the dual comes closest to the rise, with neighbors."""
        values, _ = moment(dual.orders, self.t, self.w)
        gap = dual.height + dual.slope * kernel(self.t, self.w) / level(self.t, self.w)
        gap += (values @ dual.weights - self.rise) / level(self.t, self.w)
        low = np.nonzero((gap[1:-1] <= gap[:-2]) & (gap[1:-1] <= gap[2:]))[0] + 1
        return np.concatenate([low - 1, low, low + 1])

    def _directions(self, dual: Dual, slopes: Array) -> tuple[float, float]:
        """The derivatives of the gap at the two ends."""
        ends = self.t[[0, -1]]
        flat = 0.25 * self.w * dual.height * kernel(ends, self.w) + dual.slope * level(ends, self.w)
        left, right = flat + slopes[[0, -1]] @ dual.weights - np.array(self.ends)
        return float(left), float(right)

    def program(self, rows: Array, orders: Array, x: float) -> tuple[Dual, Array] | None:
        """The least dual with these orders at these grid points, and the law that it is the bound of."""
        unit = rise_of_gaussian(2.0 * x * factor(x, self.w), self.strike, self.w)
        t, rise = self.t[rows], self.rise[rows] / unit
        most = bound(orders, x, self.w)
        values, _ = moment(orders, t, self.w)
        ends, (_, slopes) = self.t[[0, -1]], moment(orders, self.t[[0, -1]], self.w)
        scale = 1.0 / (rise + 1e-3)
        table = np.column_stack([level(t, self.w), kernel(t, self.w), values / most]) * scale[:, None]
        flat = [0.25 * self.w * kernel(ends, self.w), level(ends, self.w)]
        sign = np.array([-1.0, 1.0])
        tops = sign * np.array(self.ends) / unit
        heights = 1.0 / (np.abs(tops) + 1e-3)
        last = np.column_stack([*flat, slopes / most]) * (sign * heights)[:, None]
        # A large coefficient is understated, which is safe: weights are not negative.
        matrix = np.vstack([table, last])
        matrix[:, 2:] = np.minimum(matrix[:, 2:], 1e7)
        for method in ("highs", "highs-ipm"):  # the first gives up now and then
            found = linprog(
                np.array([1.0, 0.0, *np.ones(len(orders))]),
                A_ub=-matrix,
                b_ub=-np.concatenate([rise * scale, tops * heights]),
                bounds=[(0, None), (None, None), *[(0, None)] * len(orders)],
                method=method,
            )
            if not found.status:
                break
        else:
            return None
        weights = found.x[2:] * unit / most
        used = found.x[2:] > 1e-13
        dual = Dual(self.strike, self.w, found.x[0] * unit, found.x[1] * unit, orders[used], weights[used])
        return dual, -found.ineqlin.marginals[:-2] * scale


def best_dual(x: float, strike: float, w: float) -> Dual:
    """The best dual that a few linear programs find, each with more orders and losses where the last was short."""
    fallback = one_exponential(x, strike, w)
    if strike**2 * x > 6.0 * (1.0 + 2.0 * x) ** 2:
        return fallback
    side, half, size = Side.of(x, strike, w), 0.5 * math.sqrt(w), math.sqrt(2.0 * x)
    choice = np.concatenate([np.linspace(half, 1.3 * strike + 5.0 / size, 900), -np.linspace(half, 5.0 / size, 300)])
    step = choice[1] - choice[0]
    orders = np.concatenate([choice[::36], [-half, max(half, strike / (1.0 + 2.0 * x))]])
    rows = np.linspace(0, len(side.t) - 1, 150).astype(int)
    best = fallback
    for turn in range(5):
        found = side.program(rows, np.unique(orders), x)
        if found is None:
            break
        dual, law = found
        raised = side.padded(dual)
        if raised is not None and raised.value(x) < best.value(x):
            best = raised
        # The orders that this law breaks most, and neighbors of those in use.
        values, _ = moment(choice, side.t[rows], w)
        broken = np.argsort(-(law @ values) / bound(choice, x, w))[:20]
        near = np.concatenate([dual.orders + sign * step / 4.0 ** max(0, turn - 1) for sign in (-1.0, 1.0)])
        orders = np.concatenate([dual.orders, choice[broken], near[np.abs(near) >= half], [half, -half]])
        rows = np.unique(np.concatenate([rows, side.low_points(dual)]))
    return best


# The cover: cells of (x, w, Y), each with the duals at its two strikes. Rises are convex in Y (e^(Yv) is), so that
# between two strikes the chord of two duals is a dual; a dual holds at every x; it is raised for each w.

Cell = tuple[float, float]
Price = Callable[[float, float], float]
ENOUGH: Final = 1e-4  # of what is charged above 2 rho: far more than all rounding
DEEPEST: Final = 6


def slack(low: Dual, high: Dual, sizes: Array, price: Price) -> float:
    """The least of what the price adds above the chord of two duals, relative to what is charged above 2 rho."""
    least = math.inf
    for x, part in itertools.product(sizes, np.linspace(0.0, 1.0, 6)):
        most = (1.0 - part) * low.value(x) + part * high.value(x)
        charged = price(x, low.w)
        added = rise_of_gaussian(charged, low.strike + part * (high.strike - low.strike), low.w)
        least = min(least, (added / most - 1.0) / (charged / (2.0 * x) - 1.0))
    return float(least)


def holds_at_all_strikes(sizes: Cell, reserves: Cell, price: Price) -> bool:
    """Whether duals show that the price holds in a cell: strikes are added where the chord is too high."""
    x, w = math.sqrt(sizes[0] * sizes[1]), 0.5 * sum(reserves)
    inside = np.geomspace(*sizes, 5)
    half, last = 0.5 * math.sqrt(w), max(math.sqrt(BEYOND / size) * (1.0 + 2.0 * size) for size in sizes)

    @cache
    def duals(strike: float) -> list[Dual]:
        best = best_dual(x, strike, w)
        return [best.at(other, x) for other in (*reserves, w)]

    strikes = sorted({*np.linspace(0.0, last, 16).tolist(), 0.5 * half, half, 2.0 * half})
    cells = [(low, high, 0) for low, high in itertools.pairwise(strikes)]
    while cells:
        low, high, depth = cells.pop()
        if all(slack(*pair, inside, price) >= ENOUGH for pair in zip(duals(low), duals(high), strict=True)):
            continue
        if depth == DEEPEST:
            return False
        middle = 0.5 * (low + high)
        cells += [(low, middle, depth + 1), (middle, high, depth + 1)]
    return True


def holds(sizes: Cell, reserves: Cell, price: Price, splits: int = 3) -> bool:
    """Whether duals show that the price holds in a cell, or in both of its halves in x and in w."""
    if holds_at_all_strikes(sizes, reserves, price):
        return True
    middle, between = math.sqrt(sizes[0] * sizes[1]), 0.5 * sum(reserves)
    parts = itertools.product(
        ((sizes[0], middle), (middle, sizes[1])), ((reserves[0], between), (between, reserves[1]))
    )
    return splits > 0 and all(holds(size, reserve, price, splits - 1) for size, reserve in parts)


def documented(x: float, w: float) -> float:
    return 2.0 * x * factor(x, w)


SIZES: Final = list(itertools.pairwise(np.geomspace(LEAST, 1.0, 46).tolist()))
SHARES: Final = list(itertools.pairwise([SMALL, 0.1, 0.25, 0.5, 0.75, 1.0]))


@pytest.mark.long
@pytest.mark.parametrize("reserves", SHARES, ids=str)
def test_duals_show_that_the_price_holds_for_every_size_reserve_and_strike(reserves: Cell) -> None:
    for sizes in SIZES if FULL else SIZES[20::12]:
        assert holds(sizes, reserves, documented)


def test_the_scan_does_not_confirm_a_price_that_is_too_low() -> None:
    # Negative control: 0.33 in place of 0.34.
    assert holds(SIZES[22], SHARES[0], documented, splits=0)
    assert not holds(SIZES[22], SHARES[0], lambda x, w: documented(x, w) - 0.02 * x * x, splits=0)


@pytest.mark.parametrize("x", [1e-6, 0.002, 0.01, 0.1, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("w", [1e-6, 0.01, 0.3, 1.0])
def test_beyond_the_last_strike_one_exponential_is_enough(x: float, w: float) -> None:
    t, rho = 2.0 * x, x * w
    above = factor(x, w) - 1.0
    gained = above * math.exp(-rho * t * above**2 / 4.0) / math.sqrt(1.0 + t * (1.0 + above))
    # What the Gaussian lacks falls as B grows, so that the last strike decides.
    assert t * (1.0 / 24.0 + (24.0 + rho / 2.0) / 12.0**3) <= gained
    assert 12.0 + rho / 4.0 <= BEYOND
    for size in (12.5, 20.0, 60.0):
        strike = math.sqrt(size / x) * (1.0 + t)
        if strike < 200.0:
            assert one_exponential(x, strike, w).value(x) <= rise_of_gaussian(documented(x, w), strike, w)


# Duals at 40 digits, by the definition.


def exact_gap(dual: Dual, t: mpf) -> mpf:
    """How far the dual lies above the rise of the reserve."""
    half = mp.sqrt(mpf(dual.w)) / 2

    def inner(v: mpf) -> mpf:
        mixture = mp.fsum(mpf(b) * mp.exp(mpf(c) * v) for c, b in zip(dual.orders, dual.weights, strict=True))
        return mp.sinh(half * (t - v)) / half * (mixture - mp.exp(mpf(dual.strike) * v - v * v / 2))

    with mp.workdps(20):
        between = mp.quad(inner, mp.linspace(0, t, 5))
        return mpf(dual.height) * mp.cosh(half * t) + mpf(dual.slope) * mp.sinh(half * t) / half + between


def exact_value(dual: Dual, x: float) -> mpf:
    assert min(dual.weights) >= 0.0
    total = mpf(dual.height)
    for order, weight in zip(dual.orders, dual.weights, strict=True):
        square = mpf(order) ** 2 - mpf(dual.w) / 4
        total += mpf(weight) * (mp.expm1(square * mpf(x)) / square if square > 0 else mpf(x))
    return total


def exact_rise_of_gaussian(price: mpf, strike: float, w: float) -> mpf:
    def inner(r: mpf) -> mpf:
        return mp.exp(-mpf(w) * r / 8 + mpf(strike) ** 2 * r / (1 + r) / 2) / mp.sqrt(1 + r)

    with mp.workdps(20):
        return mp.quad(inner, mp.linspace(0, price, 3)) / 2


def losses(x: float, strike: float) -> list[mpf]:
    """Losses all over the grid of a dual, near 0 and beyond its ends."""
    size = math.sqrt(2.0 * x)
    reach = 9.0 * size + 0.5
    points = [
        *np.linspace(-reach, reach + min(4.0 * x, 1.0) * strike, 13),
        *(size * f for f in (-1, 1, 0.03, -0.03, 3)),
    ]
    return [mpf(float(point)) for point in (*points, -1.5 * reach, 1.5 * reach + strike)]


SAMPLE: Final = [
    (x, strike, w)
    for x, w in [(0.002, 0.01), (0.05, 0.2), (0.1, SMALL), (0.2, 0.5), (0.4, 0.05), (0.6, 0.8), (1.0, 1.0)]
    for strike in (0.0, 0.3, 1.0, 2.5, 6.0, 12.0)
]


@pytest.mark.parametrize(("x", "strike", "w"), SAMPLE if FULL else SAMPLE[::2], ids=str)
def test_a_dual_lies_above_at_high_precision_and_its_value_below_the_price(x: float, strike: float, w: float) -> None:
    dual = best_dual(x, strike, w)
    assert min(exact_gap(dual, t) for t in losses(x, strike)) >= -mpf("1e-17")
    assert exact_value(dual, x) <= exact_rise_of_gaussian(mpf(price_at(x, w)), strike, w)


@pytest.mark.parametrize(("x", "strike", "w"), [(0.1, 1.0, 0.2), (0.4, 2.5, SMALL)])
def test_a_broken_dual_is_caught(x: float, strike: float, w: float) -> None:
    dual = best_dual(x, strike, w)
    assert dual.height > 0.0
    assert dual.slope > 0.0
    broken = [
        replace(dual, slope=-dual.slope),
        replace(dual, height=-dual.height),
        replace(dual, height=0.0),
        replace(dual, weights=0.99 * dual.weights),
        replace(dual, orders=-dual.orders),
        replace(dual, strike=1.1 * strike),
    ]
    for wrong in broken:
        assert min(exact_gap(wrong, t) for t in losses(x, strike)) < -mpf("1e-9")


# The two sides are what the put order asks for.


def put(y: mpf, variance: mpf) -> mpf:
    """e^(-y/2) E(e^y - W)^+ for the lognormal W of a Gaussian with mu^2 = variance."""
    root = mp.sqrt(variance)
    return mp.exp(y / 2) * mp.ncdf(y / root + root / 2) - mp.exp(-y / 2) * mp.ncdf(y / root - root / 2)


@pytest.mark.parametrize(("strike", "w"), [(0.0, 0.5), (1.5, 0.01), (-2.0, 0.2)])
def test_the_scaled_rises_are_those_of_the_put(strike: float, w: float) -> None:
    root, price = mp.sqrt(mpf(w)), mpf("0.3")
    y = strike * root
    unit = w * mp.exp(-mpf(w) / 8 - mpf(strike) ** 2 / 2) / (root * mp.sqrt(2 * mp.pi))  # w q(y)
    risen = (put(y, w * (1 + price)) - put(y, mpf(w))) / unit
    assert abs(exact_rise_of_gaussian(price, strike, w) / risen - 1) < mpf("1e-14")
    assert rise_of_gaussian(0.3, strike, w) == pytest.approx(float(risen), rel=1e-12)
    # Randomized response: masses 1/(2 cosh(e/2)) at +-e.
    e = mpf("0.7") * root
    found = (put(y - e, mpf(w)) + put(y + e, mpf(w))) / (2 * mp.cosh(e / 2)) - put(y, mpf(w))
    nothing = Dual(strike, w, 0.0, 0.0, np.array([0.0]), np.array([0.0]))
    rises = [-exact_gap(nothing, mpf(t)) for t in ("0.7", "-0.7")]
    assert abs(mp.fsum(rises) / (2 * mp.cosh(e / 2)) / (found / unit) - 1) < mpf("1e-14")
    for sign, rise in zip((1.0, -1.0), rises, strict=True):
        values, _ = rise_of_reserve(np.linspace(0.0, 0.7 * sign, 200), strike, w)
        assert values[-1] == pytest.approx(float(rise), rel=1e-10)


@pytest.mark.parametrize("w", [SMALL, 0.05, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("x", [0.002, 0.05, 0.2, 0.4, 0.6, 1.0])
def test_randomized_response_is_covered_and_breaks_a_smaller_constant(x: float, w: float) -> None:
    rho = x * w
    e = mpf(brentq(lambda size: size * math.tanh(0.5 * size) - rho * (1.0 - 1e-12), 1e-9, 4.0, xtol=1e-15))
    risen = put(e, mpf(w)) + put(-e, mpf(w))  # at the strike 1, where it is worst
    risen = risen / (2 * mp.cosh(e / 2))
    assert put(mpf(0), mpf(w) * (1 + mpf(price_at(x, w)))) >= risen
    # Negative controls: 0.30 in place of 0.34, or 2 rho alone; at larger w also without rho/7.
    curve = mpf("0.30") * x - mpf("0.1") * x * x
    assert put(mpf(0), w + 2 * rho * (1 + curve + (rho / 7 if w < 0.1 else 0))) < risen
    assert put(mpf(0), mpf(w) + 2 * rho) < risen


# The formula.


@given(
    st.floats(1e-12, 1.5),
    st.one_of(
        st.floats(1e-9, 0.1).map(lambda u: Fraction(repr(u))), st.fractions(Fraction(1, 10**8), Fraction(1, 10))
    ),
    st.integers(4, 5000),
)
def test_the_price_is_the_formula_rounded_up_and_grows_with_rho(rho: float, quantum: Fraction, reserve: int) -> None:
    size, w = Fraction(repr(rho)), min(reserve * quantum, Fraction(1))
    price = smooth_price_zcdp_scanned(rho, quantum, reserve)
    assert (price is None) == (size > w)
    if price is None:
        return
    x = max(size / w, Fraction(1, 500))
    assert price == math.ceil(size * (2 + Fraction(68, 100) * x - x * x / 5 + 2 * size / 7) * SCALE)
    assert (smooth_price_zcdp_scanned(size * Fraction(999, 1000), quantum, reserve) or 0) <= price
    later = smooth_price_zcdp_scanned(rho, quantum, reserve + 1)
    assert later is not None
    assert later <= price
    proven = smooth_price_zcdp(rho, quantum, reserve)
    if proven is not None and size >= w / 500 and reserve * quantum <= 1:
        assert price <= proven


def test_a_hundred_equal_steps_with_a_small_reserve_cost_an_eighth_more() -> None:
    quantum = Fraction(1, 10**5)
    price = smooth_price_zcdp_scanned(Fraction(5, 10**4), quantum, 120)  # a hundredth of 0.1, and 1.2% of it
    assert price is not None
    assert price / SCALE * 100 / 0.1 == pytest.approx(1.1244, abs=1e-4)
