"""Smooth prices keep the put order at 40 digits, stay within the certified budget, and broken ones are caught."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from mpmath import mp, mpf
from scipy.optimize import linprog

from odograph.core import smooth_prices, value_iteration
from odograph.core.conversions import gdp_to_dp_delta, largest_mu, pure_to_intrinsic
from odograph.core.fixed_point import SCALE
from odograph.core.smooth_prices import (
    smooth_limit_units,
    smooth_limit_with_order,
    smooth_price_discrete_gaussian,
    smooth_price_gaussian,
    smooth_price_pure,
    smooth_price_renyi,
    smooth_price_zcdp,
    smooth_time_pure,
    smooth_time_renyi,
    smooth_time_zcdp,
)
from odograph.core.value_iteration import INWARD, Grid, Kernel, Member, solve, values

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
    """Theorem A."""
    return 2 * (mp.log(mp.cosh(e / 2)) - mp.log(mp.cos(e / mp.sqrt(w)))) / (mpf(1) / 4 + 1 / w)


def intrinsic(e: mpf) -> mpf:
    return 2 * e * mp.tanh(e / 2)


def bought_by(time: mpf) -> mpf:
    """The epsilon whose intrinsic time this is."""
    return mp.findroot(lambda e: intrinsic(e) - time, mp.sqrt(time) * (1 + time / 24)) if time else mpf(0)


def reference_pure(epsilon: float, quantum: Fraction, reserve: int) -> tuple[mpf, mpf, int]:
    """The price of Theorem A and of whole units; with it c(epsilon) and the units of the composite."""
    e, u = exact(epsilon), exact(quantum)
    w, time = reserve * u, intrinsic(e)
    whole = int(mp.ceil(time / u))
    if e > mpf("1.5") * mp.sqrt(w):
        return whole * u, time, whole
    rest = closed_form(e, w) - closed_form(bought_by((whole - 1) * u), w)
    return min(whole * u, (whole - 1) * u + rest), time, whole


def sharp(e: mpf, w: mpf, bought: mpf) -> mpf:
    """Theorem A*: the least r at which the total variations agree."""

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


# Theorem A: pure steps.


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
    ratio = FINE.as_integer_ratio()
    for start in np.linspace(0.0005, 0.024, 40):
        epsilons = list(itertools.accumulate(range(100), lambda e, _: math.nextafter(e, 1.0), initial=float(start)))
        times = [smooth_prices._pure.__wrapped__(e, *ratio, RESERVE, True)[0] for e in epsilons]  # noqa: FBT003, SLF001
        assert times == sorted(times, key=lambda time: time or 0.0)


def below_reference(price: Callable[[float], float]) -> int:
    """How many of 300 prices lie below the reference at 50 digits."""
    chance = random.Random(3)  # noqa: S311  not for secrets
    sizes = [chance.uniform(0.0005, 0.024) for _ in range(300)]
    return sum(mpf(price(e)) < reference_pure(e, FINE, RESERVE)[0] for e in sizes)


def test_a_price_without_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def price(epsilon: float) -> float:
        smooth_prices._rest.cache_clear()  # noqa: SLF001
        found = smooth_prices._pure.__wrapped__(epsilon, *FINE.as_integer_ratio(), RESERVE, True)[0]  # noqa: SLF001, FBT003
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
    smooth_prices._rest.cache_clear()  # noqa: SLF001


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
