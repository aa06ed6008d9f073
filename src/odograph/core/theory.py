"""Baselines and counterexamples, on which no admission relies: fixed composition, and small exact pairs of laws.

Every bound on composition here is false when the parameters, or the number of steps, depend on earlier answers.
Filters and odometers are for those; these functions are what they could reach at best.

With fixed parameters the worst case is known exactly: any (epsilon, delta)-DP step is post-processing of
randomized response, which reveals its input with probability delta and otherwise has a loss of +epsilon or
-epsilon with odds e^epsilon to 1 (Kairouz, Oh and Viswanath (2015), "KOV"). With P the law of k such steps, L
their loss and no reveals,

    D(t) = E_P max(0, 1 - e^(t - L)),    total delta at t = 1 - (1 - delta)^k (1 - D(t)).

L lives on the knots (k - 2i) epsilon, and D is A - B e^t between two of them, so it can be inverted in closed
form. Floats are read as the decimals that they print as, by `kov_epsilon` as binary numbers too; all bounds that
hold are rounded up, and the losses that are really reached, `least_reading`, are rounded down.

A theorem about two neighbors is a statement about a pair (P, Q). On finitely many outcomes with rational
probabilities the divergence, the loss and their compositions are exact, so a false bound can be refuted by an
equation instead of an experiment. Where a witness contains e^epsilon, it takes the float64 next to it as a
rational number, and so do `hockey_stick` and `tail`: identities between them hold with `==`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odograph.core.fixed_point import Number, Numeric, float_above, read, up
from odograph.errors import InvalidArgument, InvalidGuarantee

__all__ = [
    "FinitePair",
    "advanced_half",
    "advanced_hoeffding",
    "advanced_kov",
    "advanced_tanh",
    "basic",
    "conditional_randomized_response",
    "dp_not_probdp",
    "dp_not_probdp_loss",
    "heterogeneous_delta_exact",
    "kov_delta",
    "kov_epsilon",
    "kov_steps",
    "leaky_step",
    "least_reading",
    "least_reading_at_one_moment",
    "tight_dp_to_probdp",
]

_DIGITS: Final = 60  # of the decimal arithmetic, beyond the digits that the deltas use up
_PATTERNS: Final = 2**22  # sign patterns that the exact enumeration holds at once
_LEAST_FINENESS: Final = 16
_COARSE: Final = 250  # a fineness that is enough to come close
_LEVEL_STEP: Final = 1e-4  # relative: how much lower a level is tried that is reached too seldom
_ROUNDING: Final = 1e-9  # relative, of chances, times and levels: far above what their sums lose


def basic(epsilons: Iterable[float], deltas: Iterable[float]) -> tuple[float, float]:
    """Return the sums of the epsilons and of the deltas, exact and then rounded up.

    Theorem: basic composition (Dwork et al. (2006a); Dwork et al. (2006b)).
    Assumes: step n is (epsilons[n], deltas[n])-DP for every outcome of the steps before it.
    """
    epsilon = sum((read(value, "epsilons") for value in epsilons), Fraction(0))
    delta = sum((read(value, "deltas") for value in deltas), Fraction(0))
    return float_above(epsilon), float_above(delta)


def advanced_half(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) V) + V/2, V the sum of squares.

    Theorem: advanced composition (Dwork, Rothblum and Vadhan (2010)) with the drift eps^2/2 of Bun and
        Steinke (2016).
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    intrinsic = _total(epsilons, lambda epsilon: epsilon * epsilon)
    return _advanced(delta, spread=intrinsic, drift=intrinsic / 2)


def advanced_tanh(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) V) + V/2, V = 2 sum eps tanh(eps/2).

    Theorem: intrinsic time of a pure step: it has Rényi divergence at most l eps tanh(eps/2) at every order l (a
        secant of log cosh(eps sqrt t), which is concave), then Chernoff's bound.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    intrinsic = _total(epsilons, lambda epsilon: 2 * epsilon * math.tanh(epsilon / 2))
    return _advanced(delta, spread=intrinsic, drift=intrinsic / 2)


def advanced_hoeffding(epsilons: Iterable[float], delta: float) -> float:
    """Return an epsilon that holds with `delta`: sqrt(2 log(1/delta) sum eps^2) + sum eps tanh(eps/2).

    Theorem: advanced composition with the exact drift of randomized response and Hoeffding's bound
        (the third term of Kairouz, Oh and Viswanath (2015), Theorem 3.5).
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance.
    """
    spread, drift = _moments(epsilons)
    return _advanced(delta, spread=spread, drift=drift)


def advanced_kov(epsilons: Iterable[float], delta: float) -> float:
    """Return the least of the three epsilons that KOV's closed form offers with `delta`.

    They are the sum of the epsilons, `advanced_hoeffding`, and the same with log(e + sqrt(S)/delta) in place of
    log(1/delta), S the sum of squares: the sharper one where S is below about 1.

    Theorem: Kairouz, Oh and Viswanath (2015), Theorem 3.5 (Theorem 3.4 for equal epsilons).
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

    Theorem: optimal composition (Kairouz, Oh and Viswanath (2015), Theorem 3.3).
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

    Theorem: optimal composition (Kairouz, Oh and Viswanath (2015), Theorem 3.3).
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

    Theorem: optimal composition (Kairouz, Oh and Viswanath (2015)); its delta grows with the number of steps, so
        bisection finds the last one.
    Assumes: the number of steps was fixed in advance, and every step is step_epsilon-DP.
    """
    limit, step = _delta(delta_total, "delta_total"), read(step_epsilon, "step_epsilon")
    if not step or limit >= 1:
        raise InvalidGuarantee(
            f"step_epsilon must be positive and delta_total below 1 (got {step_epsilon!r} and {delta_total!r});"
            " otherwise any number of steps fits"
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

    Theorem: optimal heterogeneous composition (Murtagh and Vadhan (2016), Theorem 1.5).
    Assumes: step n is epsilons[n]-DP for every outcome of the steps before it, and the epsilons are fixed.
    """
    groups = Counter(_read_epsilons(epsilons))
    if math.prod(count + 1 for count in groups.values()) > _PATTERNS:
        raise InvalidArgument(
            f"epsilons must have fewer different values, for at most {_PATTERNS} losses (got {len(groups)}); use a"
            " privacy loss distribution"
        )
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


def least_reading_at_one_moment(intrinsic: float, delta: float) -> float:
    """Return the loss below which no bound can be that holds with `delta` after one Gaussian step of this size.

    The loss of adding Gaussian noise of mu = sqrt(intrinsic) is N(mu^2/2, mu^2), and this is its quantile.

    Theorem: by its own proof: the privacy loss of Gaussian noise is Gaussian, and no bound on a random variable that
        fails with probability at most delta is below its quantile.
    Assumes: the bound is for steps that may be Gaussian. It says nothing about a second moment.
    """
    time, level = _reached(intrinsic, delta)
    return time / 2.0 - math.sqrt(time) * NormalDist().inv_cdf(level)


def least_reading(intrinsic: float, delta: float, fineness: int = 2000) -> float:
    """Return a loss below which no odometer at level `delta` can stay up to this intrinsic time.

    An analyst chooses each randomized response by the loss so far and the time left, so as to reach the level with
    the largest probability, and stops there. That is a control problem, solved by value iteration on a lattice whose
    steps cost about a share 1/`fineness` of the time each; a finer one allows the analyst more. The returned level is
    reached with a probability above delta, so an odometer that always reads less is passed more often than delta.

    Theorem: by its own proof: the best probability is the largest, over the next step, of its mean after that step.
    Assumes: steps may be any pure ones. It bounds the largest reading after steps of at most this intrinsic time:
        the reading at this time, where readings are a function of it that never falls.
    """
    time, delta = _reached(intrinsic, delta)
    if isinstance(fineness, bool) or not isinstance(fineness, int) or fineness < _LEAST_FINENESS:
        raise InvalidArgument(f"fineness must be an integer from {_LEAST_FINENESS} (got {fineness!r})")
    level = math.sqrt(2.0 * -math.log(delta) * time) + time / 2.0  # Ville's inequality: no probability above delta
    for each in (*[min(fineness, max(_COARSE, fineness // 8))] * 3, fineness):  # Newton's method, coarsely first
        points, chances = _chances(time, level, each)
        near = chances[points - 1 : points + 2]
        if near[-1] == 0.0:
            raise InvalidArgument(f"fineness must be larger for an intrinsic time of {time:g} (got {fineness})")
        before, at, after = np.log(near).tolist()
        level *= 1.0 + 2.0 * (math.log(delta) - at) / ((after - before) * points)
    while True:
        points, chances = _chances(time, level, fineness)
        if chances[points] > delta * (1.0 + _ROUNDING):
            return level * (1.0 - _ROUNDING)
        level *= 1.0 - _LEVEL_STEP


def _chances(time: float, level: float, fineness: int) -> tuple[int, NDArray[np.float64]]:
    """Return a number of equal steps up to a level, and the best chances of ever rising by 0, 1, 2, .. of them.

    Within the time, and with one more than that number; the analyst gives up a quarter of the level below the start.
    """
    points = max(2, round(level * math.sqrt(fineness / time)))
    step, size = level / points, points + max(2, points // 4)
    unit = 2.0 * step * math.tanh(step / 2.0)
    units = math.floor(time / unit * (1.0 - _ROUNDING))
    jumps: list[tuple[int, int, float]] = []  # steps, what they cost, and how likely they are upward
    for jump in range(1, size):
        cost = math.ceil(2.0 * jump * step * math.tanh(jump * step / 2.0) / unit)
        if cost > units:
            break
        jumps.append((jump, cost, 1.0 / (1.0 + math.exp(-jump * step))))
    # Columns are what is missing, from -size to 2 size: nothing is missing below 0, and beyond size all is lost.
    rows = np.zeros((units + 1, 3 * size))
    rows[:, : size + 1] = 1.0
    here = slice(size + 1, 2 * size)
    upward, downward = np.empty(size - 1), np.empty(size - 1)
    for n in range(1, units + 1):
        best = rows[n, here]
        best[:] = rows[n - 1, here]
        for jump, cost, odds in jumps:
            if cost > n:
                break
            after = rows[n - cost]
            np.multiply(after[here.start - jump : here.stop - jump], odds, out=upward)
            np.multiply(after[here.start + jump : here.stop + jump], 1.0 - odds, out=downward)
            upward += downward
            np.maximum(best, upward, out=best)
    return points, rows[units, size : 2 * size]


def _reached(intrinsic: float, delta: float) -> tuple[float, float]:
    time = float(read(intrinsic, "intrinsic"))
    if not 0.0 < time < math.inf:
        raise InvalidArgument(f"intrinsic must be above 0 and finite (got {intrinsic!r})")
    level = float(_delta(delta, "delta"))
    if not 0.0 < level < 1.0:
        raise InvalidGuarantee(f"delta must be above 0 and below 1 (got {delta!r})")
    return time, level


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
        raise InvalidGuarantee(f"delta must be above 0 and below 1 (got {delta!r})")
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
            return float_above(steps * epsilon)
        inverse = _invert(steps, _decimal(epsilon), target)
        return float_above(min(Fraction(inverse), steps * epsilon))


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
    from scipy.special import expit  # noqa: PLC0415  loaded where it is used

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
    from scipy.special import xlogy  # noqa: PLC0415  loaded where it is used

    v = away / (2 * mean + away)
    square = np.minimum(v * v, 0.25)
    series = np.zeros_like(v)
    for power in range(59, 1, -2):
        series = series * square + 1 / power
    close = away * v + 2 * x * v * square * series
    return np.asarray(np.where(np.abs(v) <= 0.5, close, xlogy(x, x / mean) - away))


def _stirling(x: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return log x! - (x log x - x), which is small: log(2 pi x)/2 + 1/(12 x) - ..."""
    from scipy.special import gammaln  # noqa: PLC0415  loaded where it is used

    large = np.maximum(x, 16).astype(float)
    inverse = 1 / (large * large)
    series = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse * (1 / 1680 - inverse / 1188)))) / large
    small = np.clip(x, 1, 16).astype(float)
    direct = gammaln(small + 1) - small * np.log(small) + small
    value = np.where(x < 16, direct, np.log(2 * math.pi * large) / 2 + series)
    return np.asarray(np.where(x == 0, 0.0, value))


def _total(epsilons: Iterable[float], contribution: Callable[[float], float]) -> float:
    return math.fsum(contribution(epsilon) for epsilon in _read_epsilons(epsilons))


def _read_epsilons(epsilons: Iterable[float]) -> list[float]:
    return [float(read(epsilon, "epsilons")) for epsilon in epsilons]


def _count(steps: int) -> int:
    if isinstance(steps, bool) or steps != int(steps) or steps < 0:
        raise InvalidArgument(f"steps must be an integer from 0 (got {steps!r})")
    return int(steps)


def _delta(value: Numeric, field: str) -> Fraction:
    exact = read(value, field)
    if exact > 1:
        raise InvalidGuarantee(f"{field} must be at most 1 (got {value!r})")
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


@dataclass(frozen=True, slots=True)
class FinitePair:
    """The laws `p` and `q` of one output under two neighbors, over the same finite outcomes.

    Floats are taken as the binary numbers they are, so every method is exact in its inputs.
    """

    p: tuple[Number, ...]
    q: tuple[Number, ...]

    def __post_init__(self) -> None:
        if len(self.p) != len(self.q):
            raise InvalidArgument(f"p and q must have the same length (got {len(self.p)} and {len(self.q)})")
        for name, law in (("p", self.p), ("q", self.q)):
            total = sum((Fraction(mass) for mass in law), Fraction(0))
            if any(mass < 0 for mass in law) or abs(total - 1) > Fraction(1, 10**12):
                raise InvalidArgument(f"{name} must be nonnegative and sum to 1 (got {law!r})")

    @property
    def swapped(self) -> FinitePair:
        """The same pair with the neighbors exchanged."""
        return FinitePair(self.q, self.p)

    @property
    def losses(self) -> tuple[float, ...]:
        """The privacy loss log(p/q) of each outcome; infinite where only one of the two is positive."""
        return tuple(_loss(p, q) for p, q in self._rows())

    def hockey_stick(self, epsilon: float) -> Fraction:
        """Return the least delta with P(E) <= e^epsilon Q(E) + delta for every event E."""
        odds = Fraction(math.exp(epsilon))
        return sum((max(p - odds * q, Fraction(0)) for p, q in self._rows()), Fraction(0))

    def tail(self, t: float, *, closed: bool = False) -> Fraction:
        """Return P(L > t), or P(L >= t) if `closed`."""
        odds = Fraction(math.exp(t))
        rows = self._rows()
        return sum((p for p, q in rows if p > odds * q or (closed and p == odds * q)), Fraction(0))

    def is_dp(self, epsilon: float, delta: Number) -> bool:
        """Return whether the pair is (epsilon, delta)-DP: the divergence in both directions is at most delta."""
        return max(self.hockey_stick(epsilon), self.swapped.hockey_stick(epsilon)) <= read(delta, "delta")

    def is_probdp(self, epsilon: float, delta: Number) -> bool:
        """Return whether the pair is (epsilon, delta)-pDP: P(abs L > epsilon) <= delta under both laws."""
        odds = Fraction(math.exp(epsilon))
        wide = [(p, q) for p, q in self._rows() if p > odds * q or q > odds * p]
        return max(sum(p for p, _ in wide), sum(q for _, q in wide)) <= read(delta, "delta")

    def then(self, other: FinitePair) -> FinitePair:
        """Return the pair of both outputs together; outcomes with the same likelihood ratio are merged.

        Merging changes nothing that depends on the laws through the loss, and it keeps n equal steps small.
        """
        merged: defaultdict[Fraction | None, list[Fraction]] = defaultdict(lambda: [Fraction(0), Fraction(0)])
        for p, q in self._rows():
            for other_p, other_q in other._rows():
                row_p, row_q = p * other_p, q * other_q
                if row_p or row_q:
                    total = merged[row_p / row_q if row_q else None]
                    total[0] += row_p
                    total[1] += row_q
        return FinitePair(tuple(p for p, _ in merged.values()), tuple(q for _, q in merged.values()))

    def power(self, steps: int) -> FinitePair:
        """Return the pair of `steps` independent outputs."""
        result = FinitePair((Fraction(1),), (Fraction(1),))
        for _ in range(steps):
            result = result.then(self)
        return result

    def _rows(self) -> list[tuple[Fraction, Fraction]]:
        return [(Fraction(p), Fraction(q)) for p, q in zip(self.p, self.q, strict=True)]


def conditional_randomized_response(epsilon: float, delta: Number) -> FinitePair:
    """Return randomized response on the outcomes (0, 1, top, bottom): P with input bit 1, Q with input bit 0.

    Theorem: every (epsilon, delta)-DP step is post-processing of it, also given the past (Kairouz, Oh and
        Viswanath (2015); Whitehouse et al. (2023), reduction to conditional randomized response). It is
        (epsilon, delta)-DP and (epsilon, delta)-pDP, with equality.
    Assumes: nothing; epsilon and delta may be the values that a past outcome chose.
    """
    odds, reveal = Fraction(math.exp(epsilon)), _probability(delta, "delta")
    keep, flip = (1 - reveal) * odds / (1 + odds), (1 - reveal) / (1 + odds)
    return FinitePair((flip, keep, reveal, Fraction(0)), (keep, flip, Fraction(0), reveal))


def dp_not_probdp(epsilon: float, delta: Number) -> FinitePair:
    """Return the response on the outcomes (0, 1) that merges top into 1 and bottom into 0.

    Theorem: it is (epsilon, delta)-DP and, for delta > 0, not (epsilon, delta)-pDP (Whitehouse et al. (2023),
        appendix "An algorithm satisfying DP but not pDP").
    Assumes: nothing; `dp_not_probdp_loss` is its loss on the outcome 1.
    """
    zero, one, top, bottom = range(4)
    response = conditional_randomized_response(epsilon, delta)
    p, q = response.p, response.q
    return FinitePair((p[zero] + p[bottom], p[one] + p[top]), (q[zero] + q[bottom], q[one] + q[top]))


def dp_not_probdp_loss(epsilon: float, delta: float) -> float:
    """Return log((delta + e^epsilon)/(1 - delta)), the largest loss of `dp_not_probdp`, rounded up.

    Theorem: by calculation: the loss exceeds epsilon with probability above delta, although the pair is (epsilon,
        delta)-DP.
    Assumes: 0 <= delta < 1.
    """
    eps, reveal = float(read(epsilon, "epsilon")), _probability(delta, "delta")
    if reveal == 1:
        return math.inf
    # Three nonnegative terms: nothing cancels and e^epsilon is never formed.
    return up(eps + math.log1p(float(reveal) * math.exp(-eps)) - math.log1p(-float(reveal)))


def leaky_step(delta0: Number) -> FinitePair:
    """Return the step on the outcomes (a, b) that answers a under P, and under Q answers b with `delta0`.

    Theorem: by calculation: it is (0, delta0)-DP and (-log(1 - delta0), delta0)-pDP, and under P its loss is
        -log(1 - delta0) surely: losses that concentration bounds never see, because they have no variance.
    Assumes: 0 <= delta0 < 1.
    """
    leak = _probability(delta0, "delta0")
    return FinitePair((Fraction(1), Fraction(0)), (1 - leak, leak))


def tight_dp_to_probdp(epsilon: float, delta: Number, t: float) -> FinitePair:
    """Return the (epsilon, delta)-DP pair on (S, S', rest) with the most mass at loss t or more.

    Theorem: by calculation: P(L >= t) = delta/(1 - e^(epsilon - t)), and P(abs L >= t) is 1 + e^-t times that: the
        largest values that (epsilon, delta)-DP allows.
    Assumes: t > epsilon, and delta small enough that the masses stay below 1.
    """
    if not t > epsilon:
        raise InvalidArgument(f"t must be above epsilon, {epsilon!r} (got {t!r})")
    ratio = Fraction(math.exp(t))
    high = _probability(delta, "delta") / (1 - Fraction(math.exp(epsilon)) / ratio)
    low = high / ratio
    if high + low > 1:
        raise InvalidGuarantee(f"delta must be at most (1 - e^(epsilon - t))/(1 + e^-t) (got {delta!r})")
    rest = 1 - high - low
    return FinitePair((high, low, rest), (low, high, rest))


def _probability(value: Number, field: str) -> Fraction:
    exact = read(value, field)
    if exact > 1:
        raise InvalidGuarantee(f"{field} must be at most 1 (got {value!r})")
    return exact


def _loss(p: Fraction, q: Fraction) -> float:
    if not p:
        return -math.inf
    if not q:
        return math.inf
    ratio = p / q
    if Fraction(1, 2) < ratio < 2:
        return math.log1p(float(ratio - 1))  # the exact difference keeps small losses accurate
    return math.log(ratio.numerator) - math.log(ratio.denominator)
