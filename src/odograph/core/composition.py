"""Composition of parameters that were fixed in advance: baselines for comparison, never a stop rule.

Every bound here is false when the parameters, or the number of steps, depend on earlier answers. That is what
filters and odometers are for; these functions say what they could reach at best.

With fixed parameters the worst case is known exactly: any (epsilon, delta)-DP step is post-processing of
randomized response, which reveals its input with probability delta and otherwise has a loss of +epsilon or
-epsilon with odds e^epsilon to 1 (Kairouz, Oh and Viswanath 2015, "KOV"). With P the law of k such steps, L
their loss and no reveals,

    D(t) = E_P max(0, 1 - e^(t - L)),    total delta at t = 1 - (1 - delta)^k (1 - D(t)).

L lives on the knots (k - 2i) epsilon, and D is A - B e^t between two of them, so it can be inverted in closed
form. Floats are read as the decimals that a person wrote, by `kov_epsilon` as the binary numbers too; all results
are rounded up.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING, Final

import numpy as np
from scipy.special import expit, gammaln, xlogy

from odograph.core.units import Numeric, read, up
from odograph.errors import InvalidGuarantee

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

__all__ = [
    "advanced_half",
    "advanced_hoeffding",
    "advanced_kov",
    "advanced_tanh",
    "basic",
    "heterogeneous_delta_exact",
    "kov_delta",
    "kov_epsilon",
    "kov_steps",
]

_DIGITS: Final = 60  # of the decimal arithmetic, beyond the digits that the deltas use up
_PATTERNS: Final = 2**22  # sign patterns that the exact enumeration holds at once


def basic(epsilons: Iterable[float], deltas: Iterable[float]) -> tuple[float, float]:
    """Return the sums of the epsilons and of the deltas, exact and then rounded up.

    Theorem: basic composition (Dwork, McSherry, Nissim and Smith 2006; Dwork et al. 2006).
    Assumes: step n is (epsilons[n], deltas[n])-DP for every outcome of the steps before it.
    """
    epsilon = sum((read(value, "epsilons") for value in epsilons), Fraction(0))
    delta = sum((read(value, "deltas") for value in deltas), Fraction(0))
    return _float_up(epsilon), _float_up(delta)


def advanced_half(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) V) + V/2, V the sum of squares.

    Theorem: advanced composition (Dwork, Rothblum and Vadhan 2010) with the drift eps^2/2 of Bun and
        Steinke 2016.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    clock = _total(epsilons, lambda epsilon: epsilon * epsilon)
    return _advanced(delta, spread=clock, drift=clock / 2)


def advanced_tanh(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) V) + V/2, V = 2 sum eps tanh(eps/2).

    Theorem: an eps-DP step has Rényi divergence at most l eps tanh(eps/2) at every order l (a secant of
        log cosh(eps sqrt t), which is concave), then Chernoff's bound.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    clock = _total(epsilons, lambda epsilon: 2 * epsilon * math.tanh(epsilon / 2))
    return _advanced(delta, spread=clock, drift=clock / 2)


def advanced_hoeffding(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) sum eps^2) + sum eps tanh(eps/2).

    Theorem: advanced composition with the exact drift of randomized response and Hoeffding's bound
        (the third term of Kairouz, Oh and Viswanath 2015, Theorem 3.5).
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    spread, drift = _moments(epsilons)
    return _advanced(delta, spread=spread, drift=drift)


def advanced_kov(epsilons: Iterable[float], delta: float) -> float:
    """Return the least of the three epsilons that KOV's closed form offers with `delta`.

    They are the sum of the epsilons, `advanced_hoeffding`, and the same with log(e + sqrt(S)/delta) in place of
    log(1/delta), S the sum of squares: the sharper one where S is below about 1.

    Theorem: Kairouz, Oh and Viswanath 2015, Theorem 3.5 (Theorem 3.4 for equal epsilons).
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    epsilons = list(epsilons)
    spread, drift = _moments(epsilons)
    hoeffding = _advanced(delta, spread=spread, drift=drift)
    odds = math.sqrt(spread) / float(read(delta, "delta"))
    # Past the largest float the e is far below the last digit, and the two logarithms add without cancelling.
    level = math.log(math.e + odds) if math.isfinite(odds) else math.log(math.sqrt(spread)) + _log_inverse(delta)
    return min(basic(epsilons, [])[0], hoeffding, up(math.sqrt(2 * level * spread) + drift, 32))


def kov_epsilon(steps: int, epsilon: Numeric, delta: Numeric, delta_total: Numeric) -> float:
    """Return the smallest t such that `steps` (epsilon, delta)-DP steps are (t, delta_total)-DP.

    Infinite where no t will do: `delta_total` is below the probability 1 - (1 - delta)^steps of a reveal. It holds
    for both readings of floats, the decimals that were written and the binary numbers that they are.

    Theorem: optimal composition (Kairouz, Oh and Viswanath 2015, Theorem 3.3).
    Assumes: every step is (epsilon, delta)-DP for every outcome of the steps before it; all three are fixed.
    """
    written = read(epsilon, "epsilon"), _delta(delta, "delta"), _delta(delta_total, "delta_total")
    given = zip((epsilon, delta, delta_total), written, strict=True)
    binary = tuple(_binary(value, exact) for value, exact in given)
    count = _count(steps)
    return max(_optimal_epsilon(count, *readings) for readings in {written, binary})


def kov_delta(steps: int, epsilon: Numeric, delta: Numeric, epsilon_total: Numeric) -> float:
    """Return the smallest d such that `steps` (epsilon, delta)-DP steps are (epsilon_total, d)-DP.

    It is rounded up, within 1e-12 relative where it is above 1e-290, and takes time of order sqrt(steps).

    Theorem: optimal composition (Kairouz, Oh and Viswanath 2015, Theorem 3.3).
    Assumes: every step is (epsilon, delta)-DP for every outcome of the steps before it; all three are fixed.
    """
    eps, dlt, target = read(epsilon, "epsilon"), _delta(delta, "delta"), read(epsilon_total, "epsilon_total")
    count = _count(steps)
    if dlt >= 1 and count:
        return 1.0
    latent = _latent_delta(count, eps, target)
    if latent >= 1:
        return 1.0
    return min(1.0, up(-math.expm1(count * math.log1p(-float(dlt)) + math.log1p(-latent))))


def kov_steps(epsilon: float, delta_total: float, step_epsilon: float) -> int:
    """Return how many `step_epsilon`-DP steps are (epsilon, delta_total)-DP by optimal composition.

    Theorem: optimal composition; its delta grows with the number of steps, so bisection finds the last one.
    Assumes: the number of steps was fixed in advance, and every step is step_epsilon-DP.
    """
    limit, step = _delta(delta_total, "delta_total"), read(step_epsilon, "step_epsilon")
    if not step or limit >= 1:
        raise InvalidGuarantee(
            f"step_epsilon ({step_epsilon!r}) must be positive and delta_total ({delta_total!r}) below 1;"
            " else any number of steps fits"
        )
    fits = math.floor(read(epsilon, "epsilon") / step)  # basic composition, exactly
    fails = 2 * fits + 1
    while kov_delta(fails, step_epsilon, 0.0, epsilon) <= limit:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if kov_delta(middle, step_epsilon, 0.0, epsilon) <= limit:
            fits = middle
        else:
            fails = middle
    return fits


def heterogeneous_delta_exact(epsilons: Iterable[float], epsilon_total: float) -> float:
    """Return D(epsilon_total) of pure steps with different epsilons, by enumeration of all their losses.

    Equal epsilons are grouped, so any number of steps with few distinct values is cheap; distinct values
    double the work each, and more than 2^22 losses are refused.

    Theorem: optimal heterogeneous composition (Murtagh and Vadhan 2016, Theorem 1.5).
    Assumes: step n is epsilons[n]-DP for every outcome of the steps before it, and the epsilons are fixed.
    """
    groups = Counter(_checked(epsilons))
    if math.prod(count + 1 for count in groups.values()) > _PATTERNS:
        raise InvalidGuarantee("epsilons has too many distinct values to enumerate; use a privacy loss distribution")
    loss, log_mass = np.zeros(1), np.zeros(1)
    for epsilon, count in groups.items():
        lost = np.arange(count + 1)  # how many of the group's steps had the loss -epsilon
        weight = _log_binomials(count, Fraction(epsilon), lost)
        loss = np.add.outer(loss, (count - 2 * lost) * epsilon).ravel()
        log_mass = np.add.outer(log_mass, weight).ravel()
    # A loss is off by a few roundings of the largest loss: lower the target by as much, so that the sum can
    # only grow.
    rounding = (len(groups) + 1) * 2.0**-52 * sum(epsilon * count for epsilon, count in groups.items())
    excess = loss - (float(read(epsilon_total, "epsilon_total")) - rounding)
    above = excess > 0
    return min(1.0, up(math.fsum(-np.expm1(-excess[above]) * np.exp(log_mass[above])), 2048))


def _advanced(delta: float, *, spread: float, drift: float) -> float:
    return up(math.sqrt(2 * _log_inverse(delta) * spread) + drift)


def _moments(epsilons: Iterable[float]) -> tuple[float, float]:
    """Return the sum of the squares, and the sum of the means eps tanh(eps/2) of randomized response's losses."""
    epsilons = list(epsilons)
    spread = _total(epsilons, lambda epsilon: epsilon * epsilon)
    return spread, _total(epsilons, lambda epsilon: epsilon * math.tanh(epsilon / 2))


def _log_inverse(delta: float) -> float:
    level = _delta(delta, "delta")
    if not 0 < level < 1:
        raise InvalidGuarantee(f"delta must lie strictly between 0 and 1, and {delta!r} does not")
    # Near 1 the exact complement is what determines the logarithm.
    return -math.log(level) if level < Fraction(1, 2) else -math.log1p(-float(1 - level))


def _optimal_epsilon(steps: int, epsilon: Fraction, delta: Fraction, total: Fraction) -> float:
    if total >= 1:
        return 0.0
    if delta >= 1 and steps:
        return math.inf
    with localcontext(Context(prec=_precision(delta, total), Emin=MIN_EMIN, Emax=MAX_EMAX)):
        # What is left for D after the reveals. Exactly 0 leaves the largest loss, steps * epsilon.
        target = 1 - (1 - _decimal(total)) / (1 - _decimal(delta)) ** steps
        if target < 0:
            return math.inf
        if target == 0:
            return _float_up(steps * epsilon)
        inverse = _invert(steps, _decimal(epsilon), target)
        return _float_up(min(Fraction(inverse), steps * epsilon))


def _invert(steps: int, epsilon: Decimal, target: Decimal) -> Decimal:
    """Return the smallest t >= 0 with D(t) <= target, for 0 < target < 1."""
    odds = epsilon.exp()
    knot, mass = odds**steps, (odds / (1 + odds)) ** steps  # e^L and P(L), from the largest loss down
    above = scaled = Decimal(0)  # A = P(L > t) and B = E_P[e^-L; L > t], over the knots passed so far
    for lost in range(steps // 2 + 1):
        above += mass
        scaled += mass / knot
        mass *= (steps - lost) / (Decimal(lost + 1) * odds)
        knot /= odds * odds
        if above - knot * scaled >= target:  # D at the next knot down
            break
    # The last visited segment holds the solution, or 0 does already. A guard digit makes the root round up.
    root = ((above - target) / scaled) * (1 + Decimal(10) ** (8 - _DIGITS))
    return root.ln() if root > 1 else Decimal(0)


def _latent_delta(steps: int, epsilon: Fraction, target: Fraction) -> float:
    """Return D(target) of `steps` pure steps, rounded up; all terms are positive."""
    if steps * epsilon <= target:
        return 0.0
    # The last knot above the target, exactly, and its distance to it; distances then grow by 2 epsilon.
    last = math.ceil((steps - target / epsilon) / 2) - 1
    gap = float((steps - 2 * last) * epsilon - target)
    # Hoeffding: outside of 20 sqrt(steps) around its mean a binomial term is below e^-800, which underflows.
    mean = steps * float(expit(-float(epsilon)))
    reach = 20 * math.isqrt(steps) + 20
    lost = np.arange(max(0, math.floor(mean) - reach), min(last, math.ceil(mean) + reach) + 1)
    factor = -np.expm1(-(gap + 2 * float(epsilon) * (last - lost)))
    total = math.fsum(factor * np.exp(_log_binomials(steps, epsilon, lost)))
    return up(total, 2048) + sys.float_info.min  # 2^-42 relative for the exponents, and what underflowed


def _log_binomials(steps: int, epsilon: Fraction, lost: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the log of the probability that `lost` of `steps` responses have the loss -epsilon.

    Loader's saddle-point form: the large parts of the factorials cancel on paper, and what is left is a
    deviance x log(x/m) - x + m from the mean m for each side. The mean is computed in decimals, because an
    error of its last float64 digit would be multiplied by the distance to it.
    """
    with localcontext(Context(prec=_DIGITS)):
        mean = steps / (1 + _decimal(epsilon).exp())
        whole = int(mean)
        away = (lost - whole).astype(float) - float(mean - whole)
        means = max(float(mean), 1e-290), float(steps - mean)
    kept = steps - lost
    exponent = _stirling(np.array([steps])) - _stirling(lost) - _stirling(kept)
    return exponent - _deviance(lost, means[0], away) - _deviance(kept, means[1], -away)


def _deviance(x: NDArray[np.int64], mean: float, away: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x log(x/mean) - x + mean, given away = x - mean.

    With v = away/(x + mean) it is away v + 2x (atanh v - v), in which nothing cancels near the mean.
    """
    v = away / (2 * mean + away)
    square = np.minimum(v * v, 0.25)
    series = np.zeros_like(v)
    for power in range(59, 1, -2):
        series = series * square + 1 / power
    close = away * v + 2 * x * v * square * series
    return np.asarray(np.where(np.abs(v) <= 0.5, close, xlogy(x, x / mean) - away))


def _stirling(x: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return log x! - (x log x - x), which is small: log(2 pi x)/2 + 1/(12 x) - ..."""
    large = np.maximum(x, 16).astype(float)
    inverse = 1 / (large * large)
    series = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680 - inverse / 1188)))) / large
    small = np.clip(x, 1, 16).astype(float)
    direct = gammaln(small + 1) - small * np.log(small) + small
    value = np.where(x < 16, direct, np.log(2 * math.pi * large) / 2 + series)
    return np.asarray(np.where(x == 0, 0.0, value))


def _total(epsilons: Iterable[float], contribution: Callable[[float], float]) -> float:
    return math.fsum(contribution(epsilon) for epsilon in _checked(epsilons))


def _checked(epsilons: Iterable[float]) -> list[float]:
    return [float(read(epsilon, "epsilons")) for epsilon in epsilons]


def _count(steps: int) -> int:
    if isinstance(steps, bool) or steps != int(steps) or steps < 0:
        raise InvalidGuarantee(f"steps must be a whole number, and {steps!r} is not")
    return int(steps)


def _delta(value: Numeric, field: str) -> Fraction:
    exact = read(value, field)
    if exact > 1:
        raise InvalidGuarantee(f"{field} is a probability, and {value!r} is above 1")
    return exact


def _binary(value: object, exact: Fraction) -> Fraction:
    """Return the binary number that a float is; any other number as it was read."""
    return Fraction(*value.as_integer_ratio()) if isinstance(value, float | np.floating) else exact


def _precision(*deltas: Fraction) -> int:
    """Return enough digits that 1 - delta, and the difference of two such powers, keep `_DIGITS` of them."""
    smallest = min((delta for delta in deltas if delta), default=Fraction(1))
    return _DIGITS + 2 * math.ceil(-math.log10(smallest))


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _float_up(value: Fraction) -> float:
    """Return the least float64 that is at least `value`."""
    near = float(value)
    return near if Fraction(near) >= value else math.nextafter(near, math.inf)
