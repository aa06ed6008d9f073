"""Smooth prices keep the put order at 40 digits, stay within the certified budget, and broken ones are caught."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.optimize import linprog

from odograph.core import value_iteration
from odograph.core.conversions import gdp_to_dp_delta, largest_mu, pure_to_intrinsic, pure_to_rdp
from odograph.core.filters import smooth as smooth_prices
from odograph.core.filters.smooth import (
    smooth_limit_units,
    smooth_limit_with_order,
    smooth_price_discrete_gaussian,
    smooth_price_gaussian,
    smooth_price_pure,
    smooth_price_renyi,
    smooth_price_zcdp,
    smooth_price_zcdp_scanned,
    smooth_time_pure,
    smooth_time_renyi,
)
from odograph.core.fixed_point import SCALE
from odograph.core.value_iteration import INWARD, Grid, Kernel, Member, solve, solve_with_values, values

FULL: Final = os.environ.get("ODOGRAPH_FULL") == "1"
FINE: Final = Fraction("4.000000000004e-6")  # the quantum of the shipped table at (1, 1e-6), which has N = 13562
RESERVE: Final = 68
STRIKES: Final = 50


@pytest.fixture(autouse=True)
def _digits() -> Iterator[None]:
    with mp.workdps(50):
        yield


def exact(value: Fraction | float) -> mpf:
    """A number at full precision; a float is the decimal that it was written as."""
    ratio = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    return mpf(ratio.numerator) / ratio.denominator


def in_time(units: int | None) -> mpf:
    assert units is not None
    return mpf(units) / SCALE


# The put order, in the symmetric form. A law is a list of (z, mass), the masses those of e^(z/2) P(dz).

Law = list[tuple[Any, Any]]


def put(y: mpf, variance: mpf) -> mpf:
    """e^(-y/2) E(e^y - W)^+ for the lognormal W of a Gaussian with mu^2 = variance."""
    root = mp.sqrt(variance)
    upper, lower = mp.ncdf(y / root + root / 2), mp.ncdf(y / root - root / 2)
    return mp.exp(y / 2) * upper - mp.exp(-y / 2) * lower


def expectation(function: Callable[[mpf], mpf], law: Law, y: mpf) -> mpf:
    return mp.fsum(mass * function(y - z) for z, mass in law)


def response(e: mpf) -> Law:
    """Randomized response."""
    mass = 1 / (2 * mp.cosh(e / 2))
    return [(e, mass), (-e, mass)] if e else [(mpf(0), mpf(1))]


def margin(y: mpf, law: Law, w: mpf, price: mpf, bought: mpf) -> mpf:
    """D(y): how far the put of what is charged lies above the put of the step, at the strike e^y."""
    charged = expectation(lambda at: put(at, w + price), response(bought), y)
    return charged - expectation(lambda at: put(at, w), law, y)


def strikes(w: mpf, price: mpf, count: int = STRIKES, deviations: int = 8) -> list[mpf]:
    """Strikes down to -8 standard deviations: D is even for laws that are, and small strikes lose no digits."""
    return [-deviations * mp.sqrt(w + price) * i / (count - 1) for i in range(count)]


def least_margin(law: Law, w: mpf, price: mpf, bought: mpf, *, both: bool = False) -> mpf:
    points = strikes(w, price)
    points += [-y for y in points] if both else []
    return min(margin(y, law, w, price, bought) for y in points)


ROUNDING: Final = mpf(10) ** -40


# The reference values, at the working precision.


def closed_form(e: mpf, w: mpf) -> mpf:
    """The price of randomized response under a reserve."""
    return 2 * (mp.log(mp.cosh(e / 2)) - mp.log(mp.cos(e / mp.sqrt(w)))) / (mpf(1) / 4 + 1 / w)


def intrinsic(e: mpf) -> mpf:
    return 2 * e * mp.tanh(e / 2)


def bought_by(time: mpf) -> mpf:
    """The epsilon whose intrinsic time this is."""
    return mp.findroot(lambda e: intrinsic(e) - time, mp.sqrt(time) * (1 + time / 24)) if time else mpf(0)


def reference_pure(epsilon: float, quantum: Fraction, reserve: int) -> tuple[mpf, mpf, int]:
    """The price of a pure step and of whole units; with it c(epsilon) and the units of the composite."""
    e, u = exact(epsilon), exact(quantum)
    w, time = reserve * u, intrinsic(e)
    whole = int(mp.ceil(time / u))
    if e > mpf("1.5") * mp.sqrt(w):
        return whole * u, time, whole
    rest = closed_form(e, w) - closed_form(bought_by((whole - 1) * u), w)
    return min(whole * u, (whole - 1) * u + rest), time, whole


def sharp(e: mpf, w: mpf, bought: mpf) -> mpf:
    """The least price under a Gaussian reserve: the least r at which the total variations agree."""

    def variation(size: mpf, variance: mpf) -> mpf:
        return expectation(lambda at: put(at, variance), response(size), mpf(0))

    distance = variation(e, w)
    if not bought:
        return 8 * mp.erfinv(distance) ** 2 - w
    start = closed_form(e, w) - closed_form(bought, w)
    return mp.findroot(lambda r: (variation(bought, w + r) - distance) / distance, (start, start * mpf("0.999")))


def reference_renyi(divergence: float, order: Fraction, quantum: Fraction, reserve: int) -> mpf:
    a, w = exact(order), reserve * exact(quantum)
    ratio = mp.expm1((a - 1) * exact(divergence)) / (a * (a - 1))
    s = 2 * ratio
    for _ in range(200):
        moved = ratio * mp.exp(s / 8)
        s = 2 * moved + moved**2 / w
    return s


def pure_cases(count: int, seed: int) -> list[tuple[float, Fraction, int]]:
    """Random (epsilon, quantum, reserve) where the closed form applies, reserves from tiny to large."""
    chance = random.Random(seed)  # noqa: S311  not for secrets
    cases = []
    for _ in range(count):
        quantum = Fraction(repr(10 ** chance.uniform(-6.5, -2)))
        reserve = round(10 ** chance.uniform(math.log10(4), 2.5))
        angle = chance.choice([chance.uniform(0.01, 0.3), chance.uniform(0.3, 1.49)])
        cases.append((angle * math.sqrt(reserve * quantum), quantum, reserve))
    return cases


# Randomized response under a reserve: pure steps.


@pytest.mark.parametrize("case", pure_cases(24, 1), ids=str)
def test_a_pure_price_keeps_the_put_order(case: tuple[float, Fraction, int]) -> None:
    epsilon, quantum, reserve = case
    e, u = exact(epsilon), exact(quantum)
    w = reserve * u
    law = response(e)
    smooth = in_time(smooth_price_pure(epsilon, quantum, reserve, pure_certified=False))
    assert least_margin(law, w, smooth, mpf(0)) >= 0
    price = in_time(smooth_price_pure(epsilon, quantum, reserve))
    *_, whole = reference_pure(epsilon, quantum, reserve)
    assert price <= min(smooth, whole * u) + mpf(2) / SCALE
    if price < whole * u:
        assert least_margin(law, w, price - (whole - 1) * u, bought_by((whole - 1) * u)) >= 0


@pytest.mark.parametrize("case", pure_cases(12, 2), ids=str)
def test_the_closed_form_is_never_below_the_sharp_price_and_the_sharp_price_is_sharp(
    case: tuple[float, Fraction, int],
) -> None:
    epsilon, quantum, reserve = case
    e, u = exact(epsilon), exact(quantum)
    w = reserve * u
    law = response(e)
    *_, whole = reference_pure(epsilon, quantum, reserve)
    for bought in {mpf(0), bought_by((whole - 1) * u), e * 2 / 3}:
        least = sharp(e, w, bought)
        assert least <= closed_form(e, w) - closed_form(bought, w)
        assert least_margin(law, w, least, bought) >= -ROUNDING
        # Negative control: a part in a thousand less, and the order fails at the strike 1.
        assert margin(mpf(0), law, w, least * mpf("0.999"), bought) < -ROUNDING


def test_the_closed_form_costs_little_more_than_the_sharp_price_where_a_reserve_helps() -> None:
    w = RESERVE * exact(FINE)
    for epsilon in ("0.0001", "0.001", "0.003", "0.005"):
        e = mpf(epsilon)
        assert closed_form(e, w) / sharp(e, w, mpf(0)) < mpf("1.006")


EPSILONS = st.one_of(st.floats(1e-9, 3.0), st.integers(1, 10**6).map(lambda n: n / 10**6))
QUANTA = st.one_of(
    st.just(FINE),
    st.floats(1e-9, 0.1).map(lambda x: Fraction(repr(x))),
    st.fractions(Fraction(1, 10**8), Fraction(1, 10), max_denominator=10**12),
)
RESERVES = st.integers(4, 5000)


@given(EPSILONS, QUANTA, RESERVES)
def test_a_pure_price_is_the_reference_rounded_up_by_at_most_a_part_in_a_trillion(
    epsilon: float, quantum: Fraction, reserve: int
) -> None:
    with mp.workdps(50):
        truth, time, whole = reference_pure(epsilon, quantum, reserve)
        # A jump of the true price: the end of the closed form.
        assume(abs(exact(epsilon) / mp.sqrt(reserve * exact(quantum)) - mpf("1.5")) > 1e-12)
        found = mpf(smooth_time_pure(epsilon, quantum, reserve))
        assert truth <= found
        if found < whole * exact(quantum) * (1 + mpf("1e-13")):  # c(epsilon) is not a whole number of units, nearly
            assert found <= truth * (1 + mpf("1e-12"))
        units = smooth_price_pure(epsilon, quantum, reserve)
        assert units is not None
        assert time * SCALE <= units
        assert truth * SCALE * (1 - ROUNDING) <= units < found * SCALE + 1
        whole_units = math.ceil(Fraction(pure_to_intrinsic(epsilon)) / quantum)
        assert units <= math.ceil(whole_units * quantum * SCALE)


@given(EPSILONS, st.one_of(EPSILONS, st.integers(1, 200)), QUANTA, RESERVES, st.booleans())
def test_a_pure_price_grows_with_epsilon_and_falls_as_the_reserve_grows(
    epsilon: float,
    other: float,
    quantum: Fraction,
    reserve: int,
    pure_certified: bool,  # noqa: FBT001  drawn
) -> None:
    if isinstance(other, int):  # so many floats above
        other = epsilon * (1 + other * 2.0**-52)
    low, high = sorted((epsilon, other))
    prices = [
        smooth_price_pure(size, quantum, held, pure_certified=pure_certified)
        for size, held in ((low, reserve), (high, reserve), (high, reserve + 1), (high, 2 * reserve))
    ]
    known = [math.inf if price is None else price for price in prices]
    assert known[0] <= known[1]
    assert known[3] <= known[2] <= known[1]
    assert not pure_certified or None not in prices


def test_from_one_float_to_the_next_a_price_never_falls() -> None:
    pricing = smooth_prices._pricing(FINE, RESERVE, None, pure_certified=True)  # noqa: SLF001
    for start in np.linspace(0.0005, 0.024, 40):
        epsilons = list(itertools.accumulate(range(100), lambda e, _: math.nextafter(e, 1.0), initial=float(start)))
        times = [smooth_prices._pure_time(e, pure_to_intrinsic(e), pricing) for e in epsilons]  # noqa: SLF001
        assert times == sorted(times, key=lambda time: time or 0.0)


def below_reference(price: Callable[[float], float]) -> int:
    """How many of 300 prices lie below the reference at 50 digits."""
    chance = random.Random(3)  # noqa: S311  not for secrets
    sizes = [chance.uniform(0.0005, 0.024) for _ in range(300)]
    return sum(mpf(price(e)) < reference_pure(e, FINE, RESERVE)[0] for e in sizes)


def test_a_price_without_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(epsilon: float) -> float:
        smooth_prices._bought.cache_clear()  # noqa: SLF001
        pricing = smooth_prices._pricing.__wrapped__(FINE, RESERVE, None, pure_certified=True)  # noqa: SLF001
        found = smooth_prices._pure_time(epsilon, pure_to_intrinsic(epsilon), pricing)  # noqa: SLF001
        assert found is not None
        return found

    assert below_reference(price) == 0
    with monkeypatch.context() as broken:
        broken.setattr(smooth_prices, "_PAD", 0.0)
        for name in ("up", "down", "above"):
            broken.setattr(smooth_prices, name, lambda value, _ulps=0.0: value)
        assert below_reference(price) > 0
    larger = FINE * (1 + Fraction(1, 10**6))
    # Negative control: the reserve rounded up by a part in a million.
    assert below_reference(lambda e: float(mpf(0) + _with_reserve(e, larger))) > 0
    smooth_prices._bought.cache_clear()  # noqa: SLF001


def _with_reserve(epsilon: float, larger: Fraction) -> mpf:
    """The price at 50 digits, but for a reserve of 68 larger units."""
    e, u = exact(epsilon), exact(FINE)
    whole = int(mp.ceil(intrinsic(e) / u))
    w = RESERVE * exact(larger)
    rest = closed_form(e, w) - closed_form(bought_by((whole - 1) * u), w)
    return min(whole * u, (whole - 1) * u + rest)


def test_without_the_family_of_pure_steps_only_the_smooth_price_itself_is_proven() -> None:
    composite, alone = (smooth_price_pure(0.01, FINE, RESERVE, pure_certified=c) for c in (True, False))
    assert composite is not None
    assert alone is not None
    assert composite < alone
    assert mpf(alone) >= closed_form(mpf("0.01"), RESERVE * exact(FINE)) * SCALE
    # Up to one unit the two agree; beyond the closed form there are only whole units.
    assert smooth_price_pure(0.001, FINE, RESERVE) == smooth_price_pure(0.001, FINE, RESERVE, pure_certified=False)
    assert smooth_price_pure(0.1, FINE, RESERVE, pure_certified=False) is None
    units = math.ceil(Fraction(pure_to_intrinsic(0.1)) / FINE)
    assert smooth_price_pure(0.1, FINE, RESERVE) == math.ceil(units * FINE * SCALE)


@pytest.mark.parametrize("epsilon", [0.0, 5e-324, 1e-200, 700.0, 1e6, 1e7, Fraction(1, 3), Fraction(10**30)])
def test_extreme_epsilons_have_a_price_or_none(epsilon: float | Fraction) -> None:
    for quantum in (FINE, Fraction(10**5)):
        price = smooth_price_pure(epsilon, quantum, RESERVE)
        time = smooth_time_pure(epsilon, quantum, RESERVE)
        if epsilon > 10**6:
            assert price is time is None
        else:
            assert price is not None
            assert time is not None
            assert (price > 0) == (epsilon > 0) == (time > 0)
            assert price >= 2 * epsilon * math.tanh(epsilon / 2) * 1e15


def test_what_steps_are_admitted_at_the_shipped_table() -> None:
    limit = smooth_limit_units(13562, RESERVE) * FINE * SCALE
    admitted = {e: int(limit // (smooth_price_pure(e, FINE, RESERVE) or 0)) for e in (0.0001, 0.001, 0.005, 0.01)}
    assert admitted == {0.0001: 5_395_966, 0.001: 53_926, 0.005: 2_155, 0.01: 539}
    assert limit // (smooth_price_gaussian(0.001) or 0) == 53_960


# Steps known by their moments.


def law_of(masses: list[mpf], ratios: list[mpf]) -> Law:
    """The law of a pair with these probabilities under P and ratios Q/P, made to have mean one."""
    total = mp.fsum(masses)
    mean = mp.fsum(p * r for p, r in zip(masses, ratios, strict=True)) / total
    return [(mp.log(r / mean), p / total * mp.sqrt(r / mean)) for p, r in zip(masses, ratios, strict=True)]


def reverse(law: Law) -> Law:
    return [(-z, mass) for z, mass in law]


def renyi(law: Law, order: mpf) -> mpf:
    """The Rényi divergence at an order above 1, the larger of both directions."""
    moments = (mp.fsum(mass * mp.exp(sign * (order - mpf(1) / 2) * z) for z, mass in law) for sign in (1, -1))
    return max(mp.log(moment) for moment in moments) / (order - 1)


def subsampled(rate: str, sigma: int) -> Law:
    """A subsampled Gaussian on a lattice of outputs: a law of its own, with about its moments."""
    points = [mpf(sigma) * i / 4 for i in range(-40, 41)]
    masses = [mp.exp(-(x**2) / (2 * sigma**2)) for x in points]
    return law_of(masses, [1 - mpf(rate) + mpf(rate) * mp.exp((2 * x - 1) / (2 * sigma**2)) for x in points])


def three_point(chance: random.Random, size: float) -> Law:
    ratios = [mp.exp(mpf(size) * chance.uniform(-3, 3)) for _ in range(3)]
    return law_of([mpf(chance.uniform(0.001, 1)) for _ in range(3)], ratios)


def tailed(y: mpf, variance: mpf, slope: mpf) -> mpf:
    """What replaces the put, negated and scaled, for a reserve with the exponential tails e^(-slope |y|)."""

    def smoothed(b: mpf) -> mpf:
        root = mp.sqrt(2 * variance)
        sides = (mp.exp(-sign * b * y) * mp.erfc((b * variance - sign * y) / root) for sign in (1, -1))
        return mp.exp(b * b * variance / 2) / (4 * b) * mp.fsum(sides)

    return smoothed(mpf(1) / 2) - smoothed(slope)


def least_tailed_margin(law: Law, w: mpf, slope: mpf, price: mpf) -> mpf:
    """The least D(y), divided by what it is a difference of."""
    least = mpf("inf")
    reach = 12 / slope + 3 * mp.sqrt(w)
    for i in range(-STRIKES // 2, STRIKES // 2 + 1):
        y = reach * i * 2 / STRIKES
        charged = mp.exp(-price / 8) * tailed(y, w + price, slope)
        found = expectation(lambda at: tailed(at, w, slope), law, y)
        least = min(least, (found - charged) / charged)
    return least


ORDER: Final = Fraction("34.4")  # 1/2 + 1.85 epsilon/(N u) at (1, 1e-6)
TAILED: Final = 109  # units: a quarter of the mean of the exponential part


def renyi_laws() -> dict[str, Law]:
    chance = random.Random(5)  # noqa: S311  not for secrets
    return {
        "response": response(mpf("0.003")),
        "large response": response(mpf("0.02")),
        "subsampled 3": subsampled("0.01", 3),
        "subsampled 2": subsampled("0.01", 2),
        **{f"three points {i}": three_point(chance, size) for i, size in enumerate((0.001, 0.003, 0.01, 0.02))},
    }


@pytest.mark.parametrize("name", list(renyi_laws()))
def test_a_price_by_one_renyi_order_keeps_the_put_order(name: str) -> None:
    law = renyi_laws()[name]
    w, slope = TAILED * exact(FINE), exact(ORDER) - mpf(1) / 2
    divergence = Fraction(math.ceil(renyi(law, exact(ORDER)) * 10**15), 10**15)
    price = in_time(smooth_price_renyi(divergence, ORDER, FINE, TAILED))
    for direction in (law, reverse(law)):
        assert least_tailed_margin(direction, w, slope, price) >= 0


@pytest.mark.parametrize("name", ["response", "subsampled 3"])
def test_a_price_by_one_renyi_order_that_is_three_percent_lower_is_caught(name: str) -> None:
    law = renyi_laws()[name]
    w, slope = TAILED * exact(FINE), exact(ORDER) - mpf(1) / 2
    price = reference_renyi(float(renyi(law, exact(ORDER))), ORDER, FINE, TAILED)
    assert least_tailed_margin(law, w, slope, price) >= 0
    assert min(least_tailed_margin(way, w, slope, price * mpf("0.97")) for way in (law, reverse(law))) < 0


def test_a_price_by_the_divergence_of_one_direction_is_caught() -> None:
    # A rare large rise of the ratio: the moments of the two directions differ widely.
    law = law_of([mpf(1), mpf("1e-4")], [mpf(1), mp.exp(mpf("0.15"))])
    w, slope, a = TAILED * exact(FINE), exact(ORDER) - mpf(1) / 2, exact(ORDER)
    one_sided = min(mp.log(mp.fsum(m * mp.exp(sign * slope * z) for z, m in law)) / (a - 1) for sign in (1, -1))
    both = in_time(smooth_price_renyi(Fraction(math.ceil(renyi(law, a) * SCALE), SCALE), ORDER, FINE, TAILED))
    one = in_time(smooth_price_renyi(Fraction(math.ceil(one_sided * SCALE), SCALE), ORDER, FINE, TAILED))
    margins = [[least_tailed_margin(way, w, slope, price) for way in (law, reverse(law))] for price in (both, one)]
    assert min(margins[0]) >= 0
    assert min(margins[1]) < 0


@given(st.floats(1e-12, 0.2), st.floats(1.0001, 300.0), QUANTA, RESERVES)
def test_a_renyi_price_is_the_reference_rounded_up_and_falls_as_the_reserve_grows(
    divergence: float, order: float, quantum: Fraction, reserve: int
) -> None:
    with mp.workdps(50):
        a = Fraction(repr(order))
        time = smooth_time_renyi(divergence, a, quantum, reserve)
        price = smooth_price_renyi(divergence, a, quantum, reserve)
        if time is None:
            assert price is None
            ratio = mp.expm1((exact(a) - 1) * exact(divergence)) / (exact(a) * (exact(a) - 1))
            moved = ratio * mp.exp(mpf(1) / 8)  # at s = 1 the price asks for more than 1
            assert 2 * moved + moved**2 / (reserve * exact(quantum)) > mpf("0.999999")
            return
        truth = reference_renyi(divergence, a, quantum, reserve)
        assert truth <= time <= truth * (1 + mpf("1e-12"))
        assert price is not None
        assert truth * SCALE <= price <= time * SCALE + 1
        assert (smooth_price_renyi(divergence, a, quantum, 2 * reserve) or 0) <= price
        assert (smooth_price_renyi(divergence / 2, a, quantum, reserve) or 0) <= price


def test_a_renyi_price_without_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(6)  # noqa: S311  not for secrets
    cases = [(chance.uniform(1e-6, 1e-3), Fraction(chance.randint(101, 4000), 100)) for _ in range(100)]

    def below() -> int:
        found = [(smooth_time_renyi(d, a, FINE, TAILED), reference_renyi(d, a, FINE, TAILED)) for d, a in cases]
        return sum(price is not None and price < truth for price, truth in found)

    assert below() == 0
    for name in ("above", "down"):
        monkeypatch.setattr(smooth_prices, name, lambda value, _ulps=0.0: value)
    assert below() > 0


def test_a_divergence_of_nothing_costs_nothing_and_a_large_one_has_no_price() -> None:
    assert smooth_price_renyi(0.0, ORDER, FINE, TAILED) == 0
    assert smooth_price_renyi(1e-300, ORDER, FINE, TAILED) == 1
    for divergence in (0.5, 50.0, 1e9, Fraction(10**40)):
        assert smooth_price_renyi(divergence, ORDER, FINE, TAILED) is None


# Zero-concentrated steps.


def excess(y: float, price: float, w: float) -> float:
    """The rise of the put under G_s at a strike, divided by q there: nothing cancels in it."""
    nodes, weights = np.polynomial.legendre.leggauss(40)
    r = 0.5 * price * (nodes + 1.0)
    grown = 1.0 + r / w
    values_at = np.exp(-r / 8.0 + 0.5 * y * y / w * (r / w) / grown) / np.sqrt(grown)
    return float(0.25 * price * np.dot(weights, values_at))


def worst_excess(y: float, rho: float, w: float) -> float:
    """The most that the put rises under laws that are rho-zCDP at many orders: a linear program over their masses.

    Some orders and a grid of losses: a law that it finds need not be rho-zCDP, so it is at least as bad as any on the
    grid that is.
    """
    size = math.sqrt(2.0 * rho)
    losses = np.array([z for z in np.linspace(-9.0, 9.0, 361) * size + y / w * rho if abs(z) > 1e-3 * size])
    nodes, weights = np.polynomial.legendre.leggauss(48)
    part = 0.5 * (nodes[:, None] + 1.0)
    u = part * losses
    kernel = losses * 2.0 * np.sinh(0.5 * losses * (1.0 - part)) * np.exp(y * u / w - u * u / (2.0 * w))
    scale = 0.5 * losses**2
    gain = 0.5 * weights @ kernel / scale
    rows, bounds = [], []
    most = max(6.0, 2.0 * abs(y) / w + 3.0 / size)
    for c in np.concatenate([np.linspace(0.55, 3.0, 8), np.linspace(3.0, most, 120)]):
        for sign in (1.0, -1.0):
            moment = np.exp(sign * c * losses) - np.cosh(0.5 * losses) - 2.0 * sign * c * np.sinh(0.5 * losses)
            rows.append(moment / (c * c - 0.25) / scale)
            bounds.append(math.expm1((c * c - 0.25) * rho) / ((c * c - 0.25) * rho))
    rows.append(rho * np.exp(0.5 * losses) / scale)  # the mass besides that of a loss of 0
    bounds.append(1.0)
    # Each constraint has the bound 1, and each mass is at most 1 by some constraint.
    table = np.array(rows) / np.array(bounds)[:, None]
    heights = table.max(axis=0)
    found = linprog(
        -gain / heights,
        A_ub=table / heights,
        b_ub=np.ones(len(table)),
        A_eq=[np.sinh(0.5 * losses) / scale * size / heights],
        b_eq=[0.0],
    )
    assert found.status == 0
    return float(-found.fun) * rho


DEVIATIONS: Final = (0, 1, 2, 3, 5, 8)


@pytest.mark.parametrize("w", [RESERVE * float(FINE), 0.01, 0.5, 6.0])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.25])
def test_a_zcdp_price_covers_the_worst_laws_that_a_linear_program_finds(w: float, share: float) -> None:
    reserve, rho = 100, share * w
    quantum = Fraction(repr(w)) / reserve
    prices = [function(rho, quantum, reserve) for function in (smooth_price_zcdp, smooth_price_zcdp_scanned)]
    assert [price is None for price in prices] == [False, rho > 1]
    for y in (sd * math.sqrt(w) for sd in DEVIATIONS):
        worst = worst_excess(y, rho, w)
        assert all(excess(y, price / SCALE, w) >= worst for price in prices if price is not None)
    # Negative control: the second-order term that such a law needs is rho/(3w).
    assert excess(0.0, 2.0 * rho * (1.0 + 0.25 * share), w) < worst_excess(0.0, rho, w)


def zcdp_of(law: Law) -> mpf:
    """The least rho of a law on finitely many losses: orders up to where the largest loss alone decides."""
    largest = max(abs(z) for z, _ in law)
    orders = [1 + mpf(10) ** (mpf(i) / 8) for i in range(-32, 8 * (2 - int(mp.log10(largest))))]
    return max(renyi(law, a) / a for a in orders) * (1 + mpf("1e-3"))


@pytest.mark.parametrize("reserve", [20, 68, 1000])
def test_a_zcdp_price_keeps_the_put_order_of_explicit_laws(reserve: int) -> None:
    w = reserve * exact(FINE)
    chance = random.Random(reserve)  # noqa: S311  not for secrets
    size = float(mp.sqrt(w))
    laws = [three_point(chance, size * share) for share in (0.05, 0.15, 0.3)]
    for law in laws:
        rho = Fraction(math.ceil(zcdp_of(law) * 10**18), 10**18)
        for function in (smooth_price_zcdp, smooth_price_zcdp_scanned):
            price = in_time(function(rho, FINE, reserve))
            for direction in (law, reverse(law)):
                assert least_margin(direction, w, price, mpf(0), both=True) >= -ROUNDING


@pytest.mark.parametrize("epsilon", ["0.001", "0.004", "0.008"])
def test_a_zcdp_price_with_a_smaller_constant_is_broken_by_randomized_response(epsilon: str) -> None:
    e, w = mpf(epsilon), RESERVE * exact(FINE)
    rho = intrinsic(e) / 2  # what randomized response is known to be
    for function in (smooth_price_zcdp, smooth_price_zcdp_scanned):
        price = in_time(function(Fraction(math.ceil(rho * 10**30), 10**30), FINE, RESERVE))
        assert least_margin(response(e), w, price, mpf(0)) >= 0
    assert margin(mpf(0), response(e), w, 2 * rho * (1 + mpf("0.3") * rho / w), mpf(0)) < 0
    # Nor is a Gaussian of that rho covered by less than 2 rho.
    assert margin(mpf(0), response(e), w, 2 * rho, mpf(0)) < 0


@given(st.floats(1e-12, 2.0), QUANTA, RESERVES)
def test_a_zcdp_price_is_the_formula_rounded_up_and_there_is_none_beyond_its_proof(
    rho: float, quantum: Fraction, reserve: int
) -> None:
    size, w = Fraction(repr(rho)), reserve * quantum
    price = smooth_price_zcdp(rho, quantum, reserve)
    assert (price is None) == (not 4 * size <= w <= 6)
    if price is not None:
        assert price == math.ceil(2 * size / (1 - 2 * size / w) * SCALE)
        later = smooth_price_zcdp(rho, quantum, reserve + 1)
        assert later is None or later <= price
        assert (smooth_price_zcdp(rho / 2, quantum, reserve) or 0) <= price


def test_a_zcdp_step_of_nothing_costs_nothing() -> None:
    for function in (smooth_price_zcdp, smooth_price_zcdp_scanned):
        assert function(0.0, FINE, RESERVE) == function(0.0, Fraction(10), RESERVE) == 0
        assert function(1e-300, FINE, RESERVE) == 1


# Gaussians.


@given(st.floats(0, 100))
def test_a_gaussian_costs_its_square(mu: float) -> None:
    assert smooth_price_gaussian(mu) == math.ceil(Fraction(repr(mu)) ** 2 * SCALE)


def test_an_enormous_gaussian_has_no_price() -> None:
    assert smooth_price_gaussian(1e4) is None
    assert smooth_price_gaussian(Fraction(10**20)) is None


def discrete_gaussian(sigma: int, shift: int) -> Law:
    """Noise on the integers with weights exp(-x^2/(2 sigma^2)), and the same moved by an integer."""
    variance = mpf(sigma) ** 2
    points = range(-16 * sigma, 16 * sigma + shift + 1)
    total = mp.fsum(mp.exp(-(mpf(x) ** 2) / (2 * variance)) for x in points)
    middle = mpf(shift) / 2
    scale = mp.exp(-(mpf(shift) ** 2) / (8 * variance)) / total
    return [(shift * (x - middle) / variance, scale * mp.exp(-((x - middle) ** 2) / (2 * variance))) for x in points]


def least_lattice_margin(law: Law, w: mpf, price: mpf) -> mpf:
    """The least D(y), divided by q(y): strikes all over several periods of the lattice."""
    spacing = law[1][0] - law[0][0]
    points = [-i * spacing / 8 for i in range(25)] + strikes(w, price, 16, 5)
    return min(margin(y, law, w, price, mpf(0)) * mp.exp(y * y / (2 * (w + price))) for y in points)


@pytest.mark.parametrize(
    ("sigma", "shift", "amplitude"),
    [(5, 1, 1e-3), (5, 2, 1e-3), (5, 1, 1e-5), (7, 1, 9e-4), (7, 3, 1e-4), (10, 1, 1e-3), (10, 4, 1e-6)],
)
def test_a_discrete_gaussian_price_keeps_the_put_order(sigma: int, shift: int, amplitude: float) -> None:
    # The reserve at which the oscillation has this amplitude.
    depth = math.log(2.0 / amplitude) / (2.0 * math.pi**2)
    quantum = Fraction(math.ceil(depth * shift**2 / (sigma**4 - depth * sigma**2) * 1e15), 10**17)
    w = 100 * exact(quantum)
    price = in_time(smooth_price_discrete_gaussian(float(sigma), float(shift), 1, quantum, 100))
    law = discrete_gaussian(sigma, shift)
    assert mpf(shift) ** 2 / sigma**2 < price < mpf(shift) ** 2 / sigma**2 + mpf("2.3") * amplitude
    assert least_lattice_margin(law, w, price) >= 0
    # Negative control: charged as if its noise were continuous, the step is not covered.
    assert least_lattice_margin(law, w, mpf(shift) ** 2 / sigma**2) < 0


def test_a_discrete_gaussian_costs_its_square_where_the_lattice_is_fine() -> None:
    price = smooth_price_discrete_gaussian(20.0, 1.0, 1, FINE, RESERVE)
    assert price == math.ceil(Fraction(1, 400) * SCALE) + 1
    # Several coordinates cost the square of the L2 sensitivity, and the correction of each that may change.
    assert (
        smooth_price_discrete_gaussian(40.0, Fraction(3, 2), 5, FINE, RESERVE)
        == math.ceil(Fraction(9, 6400) * SCALE) + 1
    )
    one, four, ten = (smooth_price_discrete_gaussian(7.0, 2.0, d, FINE, 8 * RESERVE) for d in (1, 4, 10))
    assert (one or 0) < (four or 0) == ten


def test_a_discrete_gaussian_has_no_price_where_its_proof_ends() -> None:
    assert smooth_price_discrete_gaussian(5.0, 1.0, 1, FINE, RESERVE) is None  # the oscillation is 0.07
    assert smooth_price_discrete_gaussian(7.0, 7.0, 1, FINE, 10**5) is None  # w + D^2/sigma^2 is above 1
    assert smooth_price_discrete_gaussian(0.0, 1.0, 1, FINE, RESERVE) is None
    assert smooth_price_discrete_gaussian(5.0, 0.0, 1, FINE, RESERVE) == 0


@given(st.floats(1, 40), st.integers(1, 5), st.integers(1, 30), st.integers(4, 20_000))
def test_a_discrete_gaussian_price_is_the_formula_rounded_up(sigma: float, shift: int, d: int, reserve: int) -> None:
    with mp.workdps(50):
        s, w = exact(sigma), reserve * exact(FINE)
        amplitude = 2 * mp.exp(-2 * mp.pi**2 * s**4 * w / (shift**2 + s**2 * w))
        square = shift**2 / s**2
        price = smooth_price_discrete_gaussian(sigma, float(shift), d, FINE, reserve)
        if price is None:
            assert w + square > 1 - ROUNDING or amplitude > mpf("0.000999999")
        else:
            truth = square + mpf("2.2") * amplitude * (min(d, shift**2) * w + square)
            assert truth * SCALE <= price <= truth * (1 + mpf("1e-12")) * SCALE + 1


# Limits.


def test_the_limit_leaves_the_reserve_and_the_last_bucket() -> None:
    assert smooth_limit_units(13562, 68) == 13490
    assert smooth_limit_units(10, 4) == 2
    assert smooth_limit_units(8, 4) == smooth_limit_units(3, 4) == smooth_limit_units(0, 4) == 0
    assert smooth_limit_units(1000, 3) == 0  # such a reserve is not proven


def gaussian_rows(epsilon: float, quantum: Fraction, count: int) -> list[float]:
    """Upper bounds of Phi(1, n) where all steps are Gaussians, which is known."""
    return [0.0, *(gdp_to_dp_delta(math.sqrt(n * quantum), epsilon) for n in range(1, count))]


def expected_divergence(units: float, order: Fraction, quantum: Fraction, epsilon: float) -> mpf:
    """E Phi(1, units u + T) for the exponential T, by quadrature, where all steps are Gaussians."""
    mean, start = 2 / (exact(order) * (exact(order) - 1)), mpf(units) * exact(quantum)

    def divergence(time: mpf) -> mpf:
        mu = mp.sqrt(start + time)
        return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)

    def weighted(time: mpf) -> mpf:
        return divergence(time) * mp.exp(-time / mean) / mean

    with mp.workdps(20):
        return mp.quad(weighted, [0, mean, 4 * mean, 12 * mean, 40 * mean, 100 * mean])


ROWS: Final = Fraction(1, 10**4)  # a quantum of (epsilon/100)^2 at (1, 1e-6), of which Gaussians get 560


@pytest.mark.parametrize("order", [Fraction("34.4"), Fraction(60)])
@pytest.mark.parametrize("reserve", [4, 20])
def test_the_limit_with_an_order_keeps_delta_and_wastes_little(order: Fraction, reserve: int) -> None:
    delta = Fraction(1, 10**6)
    rows = gaussian_rows(1.0, ROWS, 1100)
    limit = smooth_limit_with_order(rows, reserve, order, ROWS, delta)
    # All of the limit, the last bucket and the reserve keep delta; some units more do not.
    assert expected_divergence(limit + 4 + reserve, order, ROWS, 1.0) <= exact(delta)
    assert expected_divergence(limit + 4 + reserve + 4, order, ROWS, 1.0) > exact(delta)
    # Negative control: the limit of a reserve without tails is not one for a reserve with them.
    plain = smooth_limit_units(max(n for n, row in enumerate(rows) if row <= delta), reserve)
    assert limit < plain
    assert expected_divergence(plain + 4 + reserve, order, ROWS, 1.0) > exact(delta)


def test_the_limit_with_an_order_counts_what_is_beyond_the_last_row_as_lost() -> None:
    order, delta = Fraction("34.4"), Fraction(1, 10**6)
    limits = [
        smooth_limit_with_order(gaussian_rows(1.0, ROWS, count), 4, order, ROWS, delta)
        for count in (5, 300, 700, 900)
    ]
    assert limits == sorted(limits)
    assert limits[0] == 0 < limits[1] < limits[2]
    assert smooth_limit_with_order([], 4, order, ROWS, delta) == 0
    assert smooth_limit_with_order([0.0] * 1000, 3, order, ROWS, delta) == 0  # such a reserve is not proven
    assert smooth_limit_with_order([0.5] * 1000, 4, order, ROWS, delta) == 0
    # Rows need not be ordered: each is at least the one before.
    assert smooth_limit_with_order([0.0, 0.5, *[0.0] * 1000], 4, order, ROWS, delta) == 0


def test_the_limit_with_an_order_is_that_of_the_sum_as_written() -> None:
    order, delta, k = Fraction(20), Fraction(1, 10**4), 6
    rows = gaussian_rows(1.0, ROWS * 4, 700)
    rate = exact(ROWS * 4) * 20 * 19 / 2

    def total(n: int) -> mpf:
        terms = [
            mp.exp(-rate * j) * -mp.expm1(-rate) * mpf(rows[n + k + max(4, j + 1)])
            for j in range(len(rows) - 1 - n - k)
        ]
        return mp.fsum(terms) * (1 + mpf(2) ** -30) + mp.exp(-rate * len(terms))

    fitting = smooth_limit_with_order(rows, k, order, ROWS * 4, delta) + 4 + 1
    assert total(fitting) <= exact(delta) < total(fitting + 1)


# The certified value function: what is refuted without a reserve, and what holds with one.


@lru_cache(maxsize=64)
def reached(epsilon: float, spacing: float, charges: tuple[int, ...], total: int) -> float:
    """The divergence that an adversary really reaches: coins of j * spacing at charges[j-1], at most `total`."""
    reach = 3.0 * largest_mu(epsilon, 1e-6)
    low, high = math.ceil((epsilon + reach) / spacing), math.ceil(reach / spacing) + 1
    members = [
        Member(charge, Kernel(points=((-j, 1 / (1 + math.exp(-j * spacing))), (j, 1 / (1 + math.exp(j * spacing))))))
        for j, charge in enumerate(charges, 1)
        if j < low and charge <= total
    ]
    rows = values(Grid(spacing, -low, high), epsilon, members, INWARD)
    return next(itertools.islice(rows, total - 1, None))


def reached_by_intrinsic_time(epsilon: float, spacing: float, limit: Fraction) -> float:
    """The divergence of an adversary whose coins are charged their intrinsic time, and no more."""
    unit = Fraction(pure_to_intrinsic(spacing))
    coins = range(1, math.ceil(2.0 * epsilon / spacing))
    charges = tuple(math.ceil(Fraction(pure_to_intrinsic(j * spacing)) / unit) for j in coins)
    return reached(epsilon, spacing, charges, math.floor(limit / unit))


DELTA: Final = Fraction(1, 10**6)


def solved(monkeypatch: pytest.MonkeyPatch, quantum: Fraction, takes: tuple[str, ...]) -> value_iteration.Budget:
    """The certified budget at (1, 1e-6) for a unit that no fineness has."""
    monkeypatch.setattr(value_iteration, "family_quantum", lambda *_: quantum)
    return solve(Fraction(1), DELTA, takes=takes, fineness=1)


@pytest.mark.parametrize(
    ("parts", "units", "times_delta"), [(100, 548, 1.031), (50, 139, 1.199), (20, 24, 2.58), (10, 10, 144.4)]
)
def test_without_a_reserve_real_charges_refute_a_table_of_pure_steps(
    monkeypatch: pytest.MonkeyPatch, parts: int, units: int, times_delta: float
) -> None:
    quantum = Fraction(1, parts**2) * (1 + Fraction(1, 10**12))
    budget = solved(monkeypatch, quantum, ("pure",))
    assert budget.units == units
    found = reached_by_intrinsic_time(1.0, 1 / 200, budget.units * quantum)
    assert found / float(DELTA) == pytest.approx(times_delta, rel=1e-3)


@pytest.mark.parametrize("units", [5, 10])
def test_without_a_reserve_real_charges_refute_a_coarse_table_with_gaussians(
    monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    most = Fraction(99, 100) * Fraction(largest_mu(1.0, 1e-6)) ** 2
    budget = solved(monkeypatch, most / units, ("gaussian", "pure"))
    assert budget.units == units
    assert reached_by_intrinsic_time(1.0, 1 / 200, most) / float(DELTA) == pytest.approx(1.166, rel=1e-3)
    # With a reserve there is next to nothing left of a table so coarse.
    assert smooth_limit_units(budget.units, 4) <= 2


TARGETS: Final = [
    (Fraction(1), DELTA),
    (Fraction(3), DELTA),
    (Fraction(1, 2), Fraction(1, 10**8)),
    (Fraction(8), DELTA),
]


def reached_at(
    epsilon: Fraction, parts: int, quantum: Fraction, units: int, price: Callable[[float], int | None]
) -> Callable[[Fraction], float]:
    """What an adversary with coins of j epsilon/parts reaches within so many units, as a function of a discount."""
    spacing, grain = float(epsilon) / parts, quantum * SCALE / 8
    prices = itertools.takewhile(lambda found: found, (price(j * spacing) for j in range(1, 2 * parts)))
    amounts = [found or 0 for found in prices]

    def divergence(factor: Fraction) -> float:
        # Rounded down to an eighth of a unit: a little more than an adversary could have.
        charges = tuple(math.floor(amount * factor / grain) for amount in amounts)
        return reached(float(epsilon), spacing, charges, 8 * units)

    return divergence


@pytest.mark.long
@pytest.mark.parametrize(("fineness", "reserve", "parts"), [(1, 5, 100), (1, 11, 200), (4, 11, 200)])
@pytest.mark.parametrize(("epsilon", "delta"), TARGETS if FULL else TARGETS[:2], ids=str)
def test_an_adversary_that_is_charged_smooth_prices_up_to_the_limit_stays_below_delta(
    epsilon: Fraction, delta: Fraction, fineness: int, reserve: int, parts: int
) -> None:
    budget = solve(epsilon, delta, fineness=fineness)
    limit = smooth_limit_units(budget.units, reserve)
    divergence = reached_at(
        epsilon, parts, budget.quantum, limit, lambda e: smooth_price_pure(e, budget.quantum, reserve)
    )
    assert 0.4 * float(delta) < divergence(Fraction(1)) <= delta
    # Negative control: charged an eighth less, it passes delta.
    assert divergence(Fraction(7, 8)) > delta


@pytest.mark.parametrize("function", [smooth_price_zcdp, smooth_price_zcdp_scanned])
@pytest.mark.parametrize(("epsilon", "delta"), TARGETS if FULL else TARGETS[:1], ids=str)
def test_an_adversary_that_is_charged_as_zcdp_up_to_the_limit_stays_below_delta(
    epsilon: Fraction, delta: Fraction, function: Callable[..., int | None]
) -> None:
    budget = solve(epsilon, delta, fineness=1)
    reserve = budget.units // 50
    limit = smooth_limit_units(budget.units, reserve)

    def price(e: float) -> int | None:
        return function(Fraction(pure_to_intrinsic(e)) / 2, budget.quantum, reserve)

    divergence = reached_at(epsilon, 200, budget.quantum, limit, price)
    assert divergence(Fraction(1)) <= delta
    assert divergence(Fraction(3, 4)) > delta  # negative control


@pytest.mark.parametrize(("epsilon", "delta"), TARGETS if FULL else TARGETS[:1], ids=str)
def test_an_adversary_that_is_charged_by_one_renyi_order_up_to_its_limit_stays_below_delta(
    epsilon: Fraction, delta: Fraction
) -> None:
    budget, (rows,) = solve_with_values(epsilon, delta, fineness=1, beyond=1.8)
    quantum = budget.quantum
    order = round(Fraction(1, 2) + Fraction(37, 20) * epsilon / (budget.units * quantum), 3)
    reserve = max(4, math.ceil(1 / (2 * order * (order - 1) * quantum)))
    limit = smooth_limit_with_order(rows, reserve, order, quantum, delta)
    assert 0.93 * budget.units < limit < smooth_limit_units(budget.units, reserve)
    divergence = reached_at(
        epsilon,
        200,
        quantum,
        limit,
        lambda e: smooth_price_renyi(pure_to_rdp(e, float(order)), order, quantum, reserve),
    )
    assert divergence(Fraction(1)) <= delta
    assert divergence(Fraction(3, 4)) > delta  # negative control
