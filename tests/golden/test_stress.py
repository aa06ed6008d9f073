"""Every conversion and boundary against its definition, at 100 digits, over extreme log-uniform inputs.

The reference side uses the formulas in their textbook form, in the order `a` and with plain minimisation, so it
shares no algebra with the code. Each result must be on the safe side exactly, and within the tolerance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pytest
from mpmath import mp, mpf

from odograph.core import conversions, odometers

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAWS: Final = 200
TOLERANCE: Final = mpf("1e-12")
GAUSSIAN: Final = mpf("1e-10")
# Where the terms of a sum cancel to less than this part of the largest, the tolerance counts from there: the
# inputs themselves are not known any better.
CANCELLED: Final = mpf("0.01")

TIMES, WEIGHTS = odometers.spread_times(1e-6, 1.0, 16)


@pytest.fixture(autouse=True)
def _hundred_digits() -> Iterator[None]:
    with mp.workdps(100):
        yield


def between(low: float, high: float) -> Callable[[random.Random], float]:
    return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))


def delta(rng: random.Random) -> float:
    return between(1e-300, 0.99)(rng) if rng.random() < 0.7 else rng.uniform(0.01, 0.99)


def order(rng: random.Random) -> float:
    return 1.0 + between(1e-9, 1e6)(rng)


def at_root(rising: Callable[[mpf], mpf], low: float = -800.0, high: float = 800.0) -> mpf:
    """Return the t at which an increasing function of t passes zero, to 60 digits: bisection in log t."""
    lower, upper = mpf(low), mpf(high)
    for _ in range(210):
        middle = (lower + upper) / 2
        if rising(mp.exp(middle)) < 0:
            lower = middle
        else:
            upper = middle
    return mp.exp((lower + upper) / 2)


# --- reference formulas: the terms whose sum is the true value


def rr_curve(epsilon: mpf, a: mpf) -> list[mpf]:
    if a == 1:
        return [epsilon * mp.tanh(epsilon / 2)]
    with mp.extradps(40):
        return [mp.log(mp.cosh((a - mpf(1) / 2) * epsilon) / mp.cosh(epsilon / 2)) / (a - 1)]


def rdp_epsilon(a: mpf, value: mpf, target: mpf) -> list[mpf]:
    return [value, -mp.log(target) / (a - 1), -mp.log(a) / (a - 1), mp.log(1 - 1 / a)]


def rdp_log_delta(a: mpf, value: mpf, epsilon: mpf) -> list[mpf]:
    return [(a - 1) * value, -(a - 1) * epsilon, -mp.log(a), (a - 1) * mp.log(1 - 1 / a)]


def zcdp_log_delta(rho: mpf, epsilon: mpf) -> mpf:
    t = at_root(lambda t: (2 * t + 1) * rho - epsilon + mp.log(t / (1 + t)), -1e5)
    return sum(rdp_log_delta(1 + t, (1 + t) * rho, epsilon))


def zcdp_epsilon(rho: mpf, target: mpf) -> list[mpf]:
    t = at_root(lambda t: t * t * rho + mp.log(1 + t) + mp.log(target))
    return rdp_epsilon(1 + t, (1 + t) * rho, target)


def largest_rdp(a: mpf, epsilon: mpf, target: mpf) -> list[mpf]:
    _, *rest = rdp_epsilon(a, mpf(0), target)
    return [epsilon, *(-term for term in rest)]


def gdp_delta(mu: mpf, epsilon: mpf) -> mpf:
    return mp.ncdf(mu / 2 - epsilon / mu) - mp.exp(epsilon) * mp.ncdf(-mu / 2 - epsilon / mu)


def ell(target: mpf) -> mpf:
    return -mp.log(target)


def line(v: mpf, target: mpf, at: mpf) -> list[mpf]:
    b = mp.sqrt(2 * ell(target) * at)
    return [b / 2, b * v / (2 * at)]


def stitched_paper(v: mpf, target: mpf, start: mpf) -> list[mpf]:
    if v < start:
        return [mp.inf]
    rate = mp.log(mp.log(2 * v / start)) + mpf("0.72") * mp.log(mpf("5.2") / target)
    return [mpf("1.7") * mp.sqrt(v * rate)]


def stitched(v: mpf, target: mpf, start: mpf, eta: mpf, s: mpf) -> list[mpf]:
    w = max(v, start)
    k = (eta ** (mpf(1) / 4) + eta ** (-mpf(1) / 4)) / mp.sqrt(2)
    rate = s * mp.log(mp.log(eta * w / start)) + mp.log(mp.zeta(s)) - s * mp.log(mp.log(eta)) + ell(target)
    return [k * mp.sqrt(w * rate)]


def rogers(v: mpf, target: mpf, people: mpf) -> list[mpf]:
    if 1 / people**2 <= v <= 1:
        return [mp.sqrt(2 * v * (mp.log(110 * mp.e) + 2 * mp.log(mp.log(people) / target)))]
    spread = (1 / people**2 + v) * (1 + mp.log(1 + people**2 * v) / 2)
    return [mp.sqrt(2 * spread * mp.log(4 * mp.log(people, 2) / target))]


def closed(v: mpf, target: mpf, gamma: mpf) -> list[mpf]:
    k = mp.sqrt((v + gamma) / gamma) / (2 * target)
    return [mp.sqrt(2 * (v + gamma) * mp.log(k + mpf(1) / 2))]


def capped(terms: list[mpf], least: float = -math.inf, most: float = math.inf) -> list[mpf]:
    return terms if least <= sum(terms) <= most else [mpf(least if sum(terms) < least else most)]


# --- draws

EPSILON = between(1e-12, 1e3)
RHO = between(1e-24, 1e4)
TIME = between(1e-24, 1e12)
TUNING = between(1e-12, 1e6)


def crossing(rng: random.Random) -> tuple[float, ...]:
    epsilon = EPSILON(rng)
    return epsilon, delta(rng), epsilon * (1.0 + between(1e-2, 1e3)(rng))


def gaussian_pair(rng: random.Random) -> tuple[float, ...]:
    """Draw mu, and an epsilon at which delta is not below 1e-300."""
    mu = between(1e-12, 60.0)(rng)
    a = rng.uniform(-6.0, 36.0)
    return mu, max(mu * (a + 0.5 * mu), 0.0 if rng.random() < 0.1 else mu * mu * 1e-6)


def drift_pair(rng: random.Random) -> tuple[float, ...]:
    return between(1e-12, 600.0)(rng), between(1e-40, 0.99)(rng)


def zcdp_pair(rng: random.Random) -> tuple[float, ...]:
    """Draw rho and an epsilon around it: a delta between about 1e-290 and 1 - 1e-6."""
    rho = RHO(rng)
    return rho, max(0.0, rho * rng.uniform(0.999, 1.0) + 2.0 * math.sqrt(rho) * rng.uniform(0.0, 25.0))


def draws(*parts: Callable[[random.Random], float]) -> Callable[[random.Random], tuple[float, ...]]:
    return lambda rng: tuple(part(rng) for part in parts)


def named(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    return lambda v, target, *tuning: function(v, target, **dict(zip(names, tuning, strict=True)))


def half(x: mpf) -> mpf:
    return mpf(x) / 2


Case: TypeAlias = tuple[Callable[..., Any], Callable[[random.Random], tuple[float, ...]], Callable[..., Any], int]

VALUES: Final[dict[str, Case]] = {
    "pure_to_zcdp": (conversions.pure_to_zcdp, draws(EPSILON), lambda e: [e * mp.tanh(half(e))], 1),
    "pure_to_intrinsic": (
        conversions.pure_to_intrinsic,
        draws(EPSILON),
        lambda e: [2 * e * mp.tanh(half(e))],
        1,
    ),
    "laplace_to_zcdp": (conversions.laplace_to_zcdp, draws(EPSILON), lambda e: [e + mp.exp(-e) - 1], 1),
    "zcdp_to_dp_epsilon_standard": (
        conversions.zcdp_to_dp_epsilon_standard,
        draws(RHO, delta),
        lambda rho, d: [rho + 2 * mp.sqrt(rho * ell(d))],
        1,
    ),
    "zcdp_to_dp_epsilon": (
        conversions.zcdp_to_dp_epsilon,
        draws(RHO, delta),
        lambda rho, d: capped(zcdp_epsilon(rho, d), 0.0),
        1,
    ),
    "zcdp_to_dp_log_delta": (
        conversions.zcdp_to_dp_log_delta,
        draws(between(1e-24, 1e2), EPSILON),
        lambda rho, e: [zcdp_log_delta(rho, e)],
        1,
    ),
    "zcdp_to_dp_log_delta_near": (
        conversions.zcdp_to_dp_log_delta,
        zcdp_pair,
        lambda rho, e: [zcdp_log_delta(rho, e)],
        1,
    ),
    "pure_to_rdp": (conversions.pure_to_rdp, draws(EPSILON, order), rr_curve, 1),
    "zcdp_to_rdp": (conversions.zcdp_to_rdp, draws(RHO, order), lambda rho, a: [a * rho], 1),
    "gdp_to_rdp": (conversions.gdp_to_rdp, draws(EPSILON, order), lambda mu, a: [a * mu * mu / 2], 1),
    "largest_rdp": (conversions.largest_rdp, draws(order, EPSILON, delta), largest_rdp, -1),
    "dp_to_probdp_delta": (
        conversions.dp_to_probdp_delta,
        crossing,
        lambda e, d, t: capped([d * (1 + mp.exp(-t)) / (1 - mp.exp(e - t))], most=1.0),
        1,
    ),
    "dp_to_probdp_delta_one_sided": (
        conversions.dp_to_probdp_delta_one_sided,
        crossing,
        lambda e, d, t: capped([d / (1 - mp.exp(e - t))], most=1.0),
        1,
    ),
    "probdp_drift": (conversions.probdp_drift, drift_pair, lambda e, d: [d * e / mp.sinh(e)], 1),
    "line": (named(odometers.line, "at"), draws(TIME, delta, TUNING), line, 1),
    "mixture": (
        named(odometers.mixture, "gamma"),
        draws(TIME, delta, TUNING),
        lambda v, d, g: [mp.sqrt((v + g) * (2 * ell(d) + mp.log(1 + v / g)))],
        1,
    ),
    "mixture_one_sided_closed": (
        named(odometers.mixture_one_sided_closed, "gamma"),
        draws(TIME, delta, TUNING),
        closed,
        1,
    ),
    "stitched_paper": (
        named(odometers.stitched_paper, "start"),
        draws(TIME, delta, TUNING),
        stitched_paper,
        1,
    ),
    "stitched": (
        named(odometers.stitched, "start", "eta", "s"),
        draws(TIME, delta, TUNING, between(1.01, 50.0), between(1.01, 20.0)),
        stitched,
        1,
    ),
    "rogers": (
        named(odometers.rogers, "people"),
        draws(TIME, between(1e-300, 0.36), between(2.0, 1e12)),
        rogers,
        1,
    ),
    "conversions.filter_time": (
        conversions.filter_time,
        draws(EPSILON, delta),
        lambda e, d: [(2 * e / (mp.sqrt(2 * ell(d)) + mp.sqrt(2 * ell(d) + 2 * e))) ** 2],
        -1,
    ),
    "gdp_to_dp_delta": (conversions.gdp_to_dp_delta, gaussian_pair, lambda mu, e: [gdp_delta(mu, e)], 1),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    function, draw, reference, side = VALUES[name]
    rng = random.Random(name)  # noqa: S311
    tolerance = GAUSSIAN if name == "gdp_to_dp_delta" else TOLERANCE
    for _ in range(DRAWS):
        arguments = draw(rng)
        found = mpf(function(*arguments))
        terms = reference(*map(mpf, arguments))
        truth = sum(terms)
        if truth == found:
            continue
        assert side * (found - truth) >= 0, (name, arguments)
        scale = max(abs(truth), CANCELLED * max(map(abs, terms)), mpf(5e-324) / tolerance)
        assert abs(found - truth) <= tolerance * scale, (name, arguments)


# --- results that are defined by an equation: the true value is where `reached` turns true


def gdp_pair_by_epsilon(rng: random.Random) -> tuple[float, ...]:
    return between(1e-12, 50.0)(rng), delta(rng)


def one_sided(boundary: mpf, v: mpf, target: mpf, gamma: mpf) -> bool:
    z = boundary / mp.sqrt(v + gamma)
    left = z * z / 2 + mp.log(mp.ncdf(z))
    return bool(left >= mp.log(mp.sqrt((v + gamma) / gamma) / (2 * target)))


def discrete(boundary: mpf, v: mpf, target: mpf) -> bool:
    total = mpf(0)
    for time, weight in zip(TIMES, WEIGHTS, strict=True):
        c = mp.sqrt(2 * ell(target) / mpf(time))
        total += mpf(weight) * mp.exp(c * boundary - c * c * v / 2)
    return bool(total * target >= 1)


def best_gamma(gamma: mpf, v: mpf, target: mpf) -> bool:
    x = 1 + v / gamma
    return bool(x <= 1 + 2 * ell(target) + mp.log(x))


EQUATIONS: Final[dict[str, Case]] = {
    "intrinsic_to_pure": (
        conversions.intrinsic_to_pure,
        draws(between(1e-24, 1e6)),
        lambda e, v: 2 * e * mp.tanh(e / 2) > v,
        -1,
    ),
    "largest_rho": (
        conversions.largest_rho,
        draws(EPSILON, delta),
        lambda rho, e, d: zcdp_log_delta(rho, e) > mp.log(d),
        -1,
    ),
    "gdp_to_dp_epsilon": (
        conversions.gdp_to_dp_epsilon,
        gdp_pair_by_epsilon,
        lambda e, mu, d: gdp_delta(mu, e) <= d,
        1,
    ),
    "largest_mu": (conversions.largest_mu, draws(EPSILON, delta), lambda mu, e, d: gdp_delta(mu, e) > d, -1),
    "pure_to_gdp": (
        conversions.pure_to_gdp,
        draws(EPSILON),
        lambda mu, e: mp.ncdf(-mu / 2) <= 1 / (1 + mp.exp(e)),
        1,
    ),
    "mixture_one_sided": (
        named(odometers.mixture_one_sided, "gamma"),
        draws(TIME, delta, TUNING),
        one_sided,
        1,
    ),
    "discrete_mixture": (
        lambda v, d: odometers.discrete_mixture(v, d, times=TIMES, weights=WEIGHTS),
        draws(between(1e-12, 1e12), delta),
        discrete,
        1,
    ),
    "best_gamma": (odometers.best_gamma, draws(TIME, delta), best_gamma, 0),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_roots(name: str) -> None:
    function, draw, reached, side = EQUATIONS[name]
    rng = random.Random(name)  # noqa: S311
    tolerance = GAUSSIAN if name in {"gdp_to_dp_epsilon", "largest_mu", "pure_to_gdp"} else TOLERANCE
    for _ in range(DRAWS):
        arguments = draw(rng)
        found = mpf(function(*arguments))
        exact = tuple(map(mpf, arguments))
        if found == 0:
            assert side == 1, (name, arguments)
            assert reached(mpf("1e-300"), *exact), (name, arguments)
            continue
        low = found if side < 0 else found * (1 - tolerance)
        high = found if side > 0 else found * (1 + tolerance)
        assert not reached(low, *exact), (name, arguments)
        assert reached(high, *exact), (name, arguments)


# --- arrays, shares and edges


@pytest.mark.parametrize(
    "curve",
    [
        lambda v: odometers.line(v, 1e-6, at=0.3),
        lambda v: odometers.mixture(v, 1e-6, gamma=0.3),
        lambda v: odometers.mixture_one_sided(v, 1e-6, gamma=0.3),
        lambda v: odometers.mixture_one_sided_closed(v, 1e-6, gamma=0.3),
        lambda v: odometers.stitched_paper(v, 1e-6, start=0.3),
        lambda v: odometers.stitched(v, 1e-6, start=0.3),
        lambda v: odometers.discrete_mixture(v, 1e-6, times=TIMES, weights=WEIGHTS),
        lambda v: odometers.rogers(v, 1e-6, people=1e6),
    ],
)
def test_an_array_gives_what_its_entries_give(curve: Callable[[Any], Any]) -> None:
    times = np.asarray([[0.0, 1e-13, 1e-3], [0.3, 1.0, 1e5]])
    values = curve(times)
    assert values.shape == times.shape
    for time, value in zip(times.flat, values.flat, strict=True):
        single = curve(float(time))
        assert isinstance(single, float)
        assert single == pytest.approx(float(value), rel=1e-14)


@pytest.mark.parametrize("target", [1e-300, 1e-6, 0.05])
def test_tunings_are_best_where_they_say(target: float) -> None:
    v = 0.4
    gamma = odometers.best_gamma(v, target)
    near = odometers.best_gamma_one_sided(v, target)
    for factor in (0.5, 2.0):
        assert odometers.mixture(v, target, gamma=gamma) < odometers.mixture(v, target, gamma=factor * gamma)
        assert odometers.mixture_one_sided(v, target, gamma=near) < odometers.mixture_one_sided(
            v, target, gamma=factor * near
        )
        assert odometers.stitched(v, target, start=v) < odometers.stitched(v, target, start=factor * v)


def test_weights_never_sum_to_more_than_one() -> None:
    for points in range(1, 200):
        times, weights = odometers.spread_times(1e-3, 10.0, points)
        assert len(times) == len(weights) == points
        assert sum(map(mpf, weights)) <= 1


def test_what_is_offered_is_admitted() -> None:
    rng = random.Random(1)  # noqa: S311
    for _ in range(DRAWS):
        v = between(1e-24, 1e6)(rng)
        assert conversions.pure_to_intrinsic(conversions.intrinsic_to_pure(v)) <= v


def test_nothing_costs_nothing_and_certainty_costs_everything() -> None:
    free = (
        conversions.pure_to_zcdp(0.0),
        conversions.pure_to_intrinsic(0.0),
        conversions.intrinsic_to_pure(0.0),
        conversions.laplace_to_zcdp(0.0),
        conversions.pure_to_rdp(0.0, 2.0),
        conversions.zcdp_to_dp_epsilon(0.0, 1e-6),
        conversions.zcdp_to_dp_epsilon_standard(0.0, 1e-6),
        conversions.largest_rho(1.0, 0.0),
        conversions.probdp_drift(1.0, 0.0),
        conversions.gdp_to_dp_delta(0.0, 0.0),
        conversions.gdp_to_dp_epsilon(0.0, 1e-6),
        conversions.largest_mu(1.0, 0.0),
        conversions.pure_to_gdp(0.0),
        conversions.filter_time(0.0, 1e-6),
    )
    assert free == (0.0,) * len(free)
    assert conversions.zcdp_to_dp_log_delta(0.0, 1.0) == -math.inf
    assert conversions.zcdp_to_dp_epsilon(1.0, 0.0) == math.inf
    assert conversions.zcdp_to_dp_epsilon_standard(1.0, 0.0) == math.inf
    assert conversions.largest_rdp(1.0, 1.0, 1e-6) == -math.inf
    assert conversions.largest_rho(1.0, 1.0) == math.inf
    assert conversions.dp_to_probdp_delta(1.0, 1e-6, 1.0) == 1.0
    assert conversions.dp_to_probdp_delta_one_sided(1.0, 0.9, 1.001) == 1.0
    assert conversions.probdp_drift(0.0, 1e-6) == 1e-6
    assert conversions.gdp_to_dp_epsilon(1.0, 0.0) == math.inf
    assert conversions.largest_mu(1.0, 1.0) == math.inf


def test_a_cost_too_small_for_a_float_is_not_zero() -> None:
    assert conversions.pure_to_zcdp(1e-200) > 0.0
    assert conversions.probdp_drift(1e3, 1e-6) > 0.0
    assert conversions.gdp_to_dp_delta(1e-3, 10.0) > 0.0
