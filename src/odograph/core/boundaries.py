"""Time-uniform boundaries: curves that the centred privacy loss ever crosses with probability at most delta.

S_n is the privacy loss of the first n steps less V_n/2, V_n their intrinsic time. By Lemma 1 the process
`exp(c S_n - c^2 V_n/2)` is a nonnegative supermartingale for every c >= 0, and every boundary B here has
`P(there is an n with S_n >= B(V_n)) <= delta` by Ville's inequality. The tuning of a boundary (the keyword
arguments) is fixed before the first step: the best of several tunings picked afterwards is no boundary.

`v` is a float or a float64 array, and the result has its shape. Results are padded up, delta lies strictly
between 0 and 1, and only log(1/delta) is ever formed, never 1/delta.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from odograph.core.units import down

__all__ = [
    "best_gamma",
    "best_gamma_one_sided",
    "best_start",
    "discrete_mixture",
    "filter_time",
    "line",
    "mixture",
    "mixture_one_sided",
    "mixture_one_sided_closed",
    "rogers",
    "spread_times",
    "stitched",
    "stitched_paper",
]

_Array: TypeAlias = NDArray[np.float64]
Values = TypeVar("Values", float, NDArray[np.float64])

_ULP: Final = 2.0**-53
_LOG_2: Final = math.log(2.0)
_NEWTON_STEPS: Final = 100  # convergence is quadratic and takes about ten; this only ends a two-cycle of rounding
_EXACT: Final = Context(prec=40)


def line(v: Values, delta: float, *, at: float) -> Values:
    """Return the straight boundary that is tightest at intrinsic time `at`.

    Theorem: Ville's inequality for c = sqrt(2 log(1/delta)/at); Howard et al. 2020, arXiv 1808.03204.
    Assumes: at > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    half = math.sqrt(0.5 * ell) * math.sqrt(at)
    return _padded(half + half / at * x, v, ell)


def mixture(v: Values, delta: float, *, gamma: float) -> Values:
    """Return the two-sided normal-mixture boundary, as the paper prints it.

    Theorem: Robbins 1970; Howard et al. 2021, arXiv 1810.08240.
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    return _padded(np.sqrt((x + gamma) * (2.0 * ell + np.log1p(x / gamma))), v, ell)


def mixture_one_sided(v: Values, delta: float, *, gamma: float) -> Values:
    """Return the one-sided normal-mixture boundary: the mixture runs over c >= 0 only, which is all we need.

    Theorem: `z sqrt(v+gamma)` with z^2/2 + log Phi(z) = log(sqrt(1+v/gamma)/(2 delta)); half-normal mixture.
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    goal = 0.5 * np.log1p(x / gamma) + ell
    # z^2/2 + log(2 Phi(z)) is convex and increasing, and the closed form lies above its root: Newton's
    # iterates come down to the root from above and never pass it. 2 Phi(z) - 1 = erf(z/sqrt 2) is `excess`.
    z = np.sqrt(2.0 * _log_mean_one_exp(goal))
    for _ in range(_NEWTON_STEPS):
        excess = special.erf(z * math.sqrt(0.5))
        slope = z + math.sqrt(2.0 / math.pi) * np.exp(-0.5 * z * z) / (1.0 + excess)
        step = (0.5 * z * z + np.log1p(excess) - goal) / slope
        z = z - step
        if np.all(np.abs(step) <= 2.0 * _ULP * z):
            break
    return _padded(z * np.sqrt(x + gamma), v, ell)


def mixture_one_sided_closed(v: Values, delta: float, *, gamma: float) -> Values:
    """Return a closed form slightly above the one-sided mixture boundary (4e-8 relative at delta = 1e-6).

    Theorem: Phi(-z) <= e^(-z^2/2)/2 puts `sqrt(2 log(K + 1/2))` above z, K = sqrt(1+v/gamma)/(2 delta).
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    goal = 0.5 * np.log1p(x / gamma) + ell
    return _padded(np.sqrt(2.0 * (x + gamma) * _log_mean_one_exp(goal)), v, ell)


def stitched_paper(v: Values, delta: float, *, start: float) -> Values:
    """Return the stitched boundary with the paper's rounded constants, infinite before `start`.

    Theorem: Howard et al. 2021, arXiv 1810.08240, Theorem 1 with eta = 2, s = 1.4, constants rounded up.
    Assumes: start > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    late = np.maximum(x, start)
    rate = np.log(_LOG_2 + np.log(late / start)) + 0.72 * (math.log(5.2) + ell)
    return _padded(np.where(x < start, math.inf, 1.7 * np.sqrt(late * rate)), v, ell)


def stitched(v: Values, delta: float, *, start: float, eta: float = 2.0, s: float = 1.4) -> Values:
    """Return the stitched boundary with exact constants, constant before `start`: log log growth.

    Theorem: Howard et al. 2021, arXiv 1810.08240, Theorem 1; `max(v, start)` is free because B is increasing.
    Assumes: start > 0, eta > 1 and s > 1 were fixed before the first step.
    """
    x, ell = _read(v, delta)
    late = np.maximum(x, start)
    # s log log(eta w) - s log log(eta) written as one logarithm, so that every term is nonnegative.
    epochs = s * np.log1p(np.log(late / start) / math.log(eta))
    rate = epochs + math.log1p(float(special.zetac(s))) + ell
    return _padded((eta**0.25 + eta**-0.25) * np.sqrt(0.5 * late * rate), v, ell, 32.0)


def discrete_mixture(v: Values, delta: float, *, times: tuple[float, ...], weights: tuple[float, ...]) -> Values:
    """Return the boundary of a weighted mixture of lines, each tightest at one of `times`.

    Theorem: Ville's inequality for sum_k w_k exp(c_k S - c_k^2 V/2), c_k = sqrt(2 log(1/delta)/v_k).
    Assumes: times > 0 and weights > 0 with sum at most 1 were fixed before the first step.
    """
    x, ell = _read(v, delta)
    c = np.sqrt(2.0 * ell) / np.sqrt(np.asarray(times, dtype=np.float64))
    loss = 0.5 * c * c * x[..., np.newaxis] - np.log(np.asarray(weights, dtype=np.float64))
    # Each term alone reaches 1/delta at its own line, so the lowest line is above the root; the log of the
    # sum is convex and increasing in s, and Newton's iterates come down to the root from above.
    at = np.min((ell + loss) / c, axis=-1)
    for _ in range(_NEWTON_STEPS):
        exponents = c * at[..., np.newaxis] - loss
        peak = np.max(exponents, axis=-1)
        terms = np.exp(exponents - peak[..., np.newaxis])
        total = np.sum(terms, axis=-1)
        step = (peak + np.log(total) - ell) * total / np.sum(c * terms, axis=-1)
        at = at - step
        if np.all(np.abs(step) <= 2.0 * _ULP * at):
            break
    return _padded(at, v, ell, 32.0)


def rogers(v: Values, delta: float, *, people: float) -> Values:
    """Return the odometer of Rogers et al. 2016 as a boundary, with its second branch corrected (E6).

    Theorem: Rogers, Roth, Ullman and Vadhan 2016, arXiv 1605.08294, with `log(4 log2(n)/delta)`.
    Assumes: people >= 2 is a public constant, and delta <= 1/e.
    """
    x, ell = _read(v, delta)
    floor = 1.0 / (people * people)
    log_n = math.log(people)
    inner = x * (1.0 + math.log(110.0) + 2.0 * (math.log(log_n) + ell))
    spread = (floor + x) * (1.0 + 0.5 * np.log1p(x / floor))
    outer = spread * (math.log(4.0 * log_n / _LOG_2) + ell)
    return _padded(np.sqrt(2.0 * np.where((floor <= x) & (x <= 1.0), inner, outer)), v, ell)


def filter_time(epsilon: float, delta: float) -> float:
    """Return y*, rounded down: the most intrinsic time with `sqrt(2 log(1/delta) v) + v/2 <= epsilon`.

    Theorem: Whitehouse et al. 2023, with the corrected root (E1); the line at y* meets epsilon there.
    Assumes: epsilon and delta were fixed before the first step.
    """
    # Decimal arithmetic, once per policy: the limit is then within three units of y*, however close it gets.
    reach = _EXACT.multiply(2, _least(epsilon))
    twice_ell = _EXACT.multiply(-2, _EXACT.ln(_least(delta)))
    slope = _EXACT.add(_EXACT.sqrt(twice_ell), _EXACT.sqrt(_EXACT.add(twice_ell, reach)))
    root = _EXACT.divide(reach, slope)
    time = _EXACT.multiply(root, root)
    near = float(time)
    return near if Fraction(near) < Fraction(time) else down(near, 0.0)


def best_gamma(v: float, delta: float) -> float:
    """Return the gamma that makes the two-sided `mixture` smallest at intrinsic time `v`.

    Theorem: v/(x-1), x the root above 1 of x = 1 + 2 log(1/delta) + log x; any gamma is valid.
    Assumes: v > 0 is a target named beforehand, not the intrinsic time that was reached.
    """
    return _gamma(v, -math.log(delta))


def best_gamma_one_sided(v: float, delta: float) -> float:
    """Return a gamma that makes `mixture_one_sided` nearly smallest at intrinsic time `v`.

    Theorem: the two-sided optimum with (1 + 1/delta)/2, as in the closed form, for 1/delta; any is valid.
    Assumes: v > 0 is a target named beforehand, not the intrinsic time that was reached.
    """
    return _gamma(v, float(_log_mean_one_exp(np.asarray(-math.log(delta)))))


def best_start(v: float) -> float:
    """Return the start that makes `stitched` smallest at intrinsic time `v`, which is `v` itself.

    Theorem: at or after start the boundary grows in v/start, and before it the boundary grows in start.
    Assumes: v > 0 is a target named beforehand, not the intrinsic time that was reached.
    """
    return v


def spread_times(low: float, high: float, points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return geometric times from `low` to `high` and equal weights, for `discrete_mixture`.

    Theorem: none is needed: any times are valid with weights that sum to at most 1.
    Assumes: 0 < low <= high and points >= 1 were fixed before the first step.
    """
    times = np.geomspace(low, high, points) if points > 1 else np.asarray([math.sqrt(low) * math.sqrt(high)])
    return tuple(times.tolist()), (down(1.0 / points, 1.0),) * points


def _read(v: float | _Array, delta: float) -> tuple[_Array, float]:
    return np.asarray(v, dtype=np.float64), -math.log(delta)


def _shaped(value: _Array, like: Values) -> Values:
    return value if isinstance(like, np.ndarray) else float(value)


def _padded(value: _Array, like: Values, ell: float, ulps: float = 16.0) -> Values:
    # Near delta = 1 the half unit in which delta was read is 1/ell units of log(1/delta).
    return _shaped(np.nextafter(value * (1.0 + (ulps + 1.0 / ell) * _ULP), math.inf), like)


def _log_mean_one_exp(x: _Array) -> _Array:
    """Return log((1 + e^x)/2) for x >= 0, accurate near 0 and without overflow."""
    small = np.log1p(0.5 * np.expm1(np.minimum(x, 1.0)))
    return np.where(x < 1.0, small, np.logaddexp(0.0, x) - _LOG_2)


def _least(value: float) -> Decimal:
    """Return the smaller reading of a float: the binary number it is, or the decimal it was written as."""
    return min(Decimal(value), Decimal(repr(value)))


def _gamma(v: float, ell: float) -> float:
    # y - log(1+y) = 2 ell with y = x - 1: convex and increasing, started above its root.
    y = 2.0 * ell + 2.0 * math.sqrt(ell)
    for _ in range(_NEWTON_STEPS):
        step = (y - math.log1p(y) - 2.0 * ell) * (1.0 + y) / y
        y -= step
        if abs(step) <= 2.0 * _ULP * y:
            break
    return v / y
