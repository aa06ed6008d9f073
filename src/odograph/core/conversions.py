"""Proven conversions between guarantees, one scalar function each.

A *bound* is never below the true value and a *budget* never above it: every result is padded outward after
the last operation, by more than the rounding of the formula and the half unit between a float and the decimal
it was written as. Where a formula cancels, the pad is a multiple of the terms that cancel, not of the result.

Arguments are validated elsewhere: floats, nonnegative and finite; orders are at least 1; delta = 0 gives the
infinite epsilon that is true.

The conversions of Canonne, Kamath and Steinke (Prop. 12) are written in t = order - 1, where their constant
is `log((1/a) (1 - 1/a)^(a-1)) = -log(1+t) - t log(1+1/t)`. Every t > 0 gives a valid bound and the best t is
a stationary point, so an error in t costs its square and never the guarantee.

Of Gaussian differential privacy: with a = epsilon/mu - mu/2 and b = epsilon/mu + mu/2 the textbook formula
`Phi(-a) - e^epsilon Phi(-b)` is `phi(a) (M(a) - M(b))`, M the Mills ratio. The difference cancels for small mu, so it
is computed as the integral of `e^(-a s - s^2/2) (1 - e^(-mu s))` over s > 0, in which nothing does.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import Final

import numpy as np

from odograph.core.fixed_point import ULP, above, down, last_holding, up

__all__ = [
    "LARGEST_HALF",
    "dp_to_probdp_delta",
    "dp_to_probdp_delta_one_sided",
    "filter_time",
    "gdp_to_dp_delta",
    "gdp_to_dp_epsilon",
    "gdp_to_rdp",
    "intrinsic_to_pure",
    "laplace_to_zcdp",
    "largest_mu",
    "largest_rdp",
    "largest_rho",
    "probdp_drift",
    "pure_to_gdp",
    "pure_to_intrinsic",
    "pure_to_rdp",
    "pure_to_zcdp",
    "response_divergence",
    "zcdp_to_dp_epsilon",
    "zcdp_to_dp_epsilon_standard",
    "zcdp_to_dp_log_delta",
    "zcdp_to_rdp",
]

_LOG_T_WIDTH: Final = 2.0**-34  # its square is below half a unit of rounding
_LOG_T_MOST: Final = 350.0  # beyond it t * t overflows; a smaller t is still a valid choice
LARGEST_HALF: Final = 300.0  # (order - 1) epsilon/2; beyond it the hyperbolic functions would soon overflow
_DECIMAL: Final = Context(prec=40)
_HALF_LOG_TWO_PI: Final = 0.5 * math.log(2.0 * math.pi)

# The trapezoidal rule in log s. The integrand is analytic in a strip of half-width pi/4, so a step of 0.1
# errs by exp(-pi^2/(2*0.1)), below 1e-21; the ends cut off less than 1e-17 of the mass.
_STEP: Final = 0.1
_NODES: Final = np.exp(np.arange(-400, 40) * _STEP)


def pure_to_zcdp(epsilon: float) -> float:
    """Return a rho, `epsilon tanh(epsilon/2)`, for which every epsilon-DP step is rho-zCDP.

    Theorem: intrinsic time of a pure step; randomized response is the worst case and its Rényi slope is largest at
        order 1.
    Assumes: the step is epsilon-DP with delta = 0.
    """
    return above(epsilon * math.tanh(0.5 * epsilon)) if epsilon else 0.0


def pure_to_intrinsic(epsilon: float) -> float:
    """Return the intrinsic time of an epsilon-DP step, `2 epsilon tanh(epsilon/2)`.

    Theorem: intrinsic time of a pure step.
    Assumes: the step is epsilon-DP with delta = 0.
    """
    return above(2.0 * epsilon * math.tanh(0.5 * epsilon)) if epsilon else 0.0


def intrinsic_to_pure(v: float) -> float:
    """Return the largest epsilon, rounded down, whose `pure_to_intrinsic` is at most `v`.

    Theorem: by calculation: with r = v/2 the root of 2e tanh(e/2) = v lies in [max(r, sqrt(2r)), r + sqrt(2r)].
    Assumes: the request that follows is tested forward; what is returned passes that test.
    """
    half = 0.5 * v
    root = math.sqrt(v)
    # Half the lower end of the bracket: the padded forward test may refuse the end itself.
    return last_holding(lambda e: pure_to_intrinsic(e) <= v, 0.5 * max(half, root), up(half + root))


def laplace_to_zcdp(epsilon: float) -> float:
    """Return a rho, `epsilon + e^-epsilon - 1`, for the epsilon-DP Laplace mechanism itself.

    Theorem: Harrison and Manurangsi (2025), spot-checked here.
    Assumes: the step adds Laplace noise of scale sensitivity/epsilon; epsilon-DP alone is not enough.
    """
    if not epsilon:
        return 0.0
    if epsilon > 1.0:
        return above(epsilon + math.expm1(-epsilon))
    # e^-x times the sum of (k-1) x^k / k! over k >= 2: the same number, all of whose terms are positive.
    term = 0.5 * epsilon * epsilon
    total = 0.0
    for k in range(2, 22):
        total += (k - 1) * term
        term *= epsilon / (k + 1)
    return above(math.exp(-epsilon) * total)


def zcdp_to_dp_epsilon_standard(rho: float, delta: float) -> float:
    """Return an epsilon, `rho + 2 sqrt(rho log(1/delta))`, for which rho-zCDP gives (epsilon, delta)-DP.

    Theorem: Bun and Steinke (2016), Proposition 1.3.
    Assumes: rho was fixed before the first step.
    """
    if not rho or delta >= 1.0:
        return 0.0
    if not delta:
        return math.inf
    ell = -math.log(delta)
    return up(rho + 2.0 * math.sqrt(rho) * math.sqrt(ell), 16.0 + 1.0 / ell)


def zcdp_to_dp_epsilon(rho: float, delta: float) -> float:
    """Return the least epsilon for which the optimal conversion of rho-zCDP gives (epsilon, delta)-DP.

    Theorem: Canonne, Kamath and Steinke (2020), Proposition 12; the best t solves t^2 rho + log(1+t) = log(1/delta).
    Assumes: rho was fixed before the first step.
    """
    if not rho or delta >= 1.0:
        return 0.0
    if not delta:
        return math.inf
    ell = -math.log(delta)
    low = math.log(2.0 * ell / (1.0 + math.sqrt(1.0 + 4.0 * rho * ell)))  # from log(1+t) <= t
    high = min(_log_odds(ell), 0.5 * (math.log(ell) - math.log(rho)), _LOG_T_MOST)
    x = last_holding(lambda x: math.exp(2.0 * x) * rho + _log1p_exp(x) <= ell, low, high, _LOG_T_WIDTH)
    t = math.exp(x)
    return _rdp_epsilon(t, x, (1.0 + t) * rho, ell)


def zcdp_to_dp_log_delta(rho: float, epsilon: float) -> float:
    """Return the natural log of the least delta for which rho-zCDP gives (epsilon, delta)-DP.

    Theorem: Canonne, Kamath and Steinke (2020), Proposition 12; the best t solves (1+2t) rho = epsilon + log(1+1/t).
    Assumes: epsilon was fixed before the first step.
    """
    if not rho:
        return -math.inf
    value, error = _zcdp_log_delta(rho, epsilon)
    return min(0.0, up(value + error, 1.0))


def largest_rho(epsilon: float, delta: float) -> float:
    """Return the largest rho, rounded down, for which rho-zCDP gives (epsilon, delta)-DP.

    Theorem: Canonne, Kamath and Steinke (2020), Proposition 12; for each t the rho it allows is explicit.
    Assumes: epsilon and delta were fixed before the first step.
    """
    if not delta:
        return 0.0
    if delta >= 1.0:
        return math.inf
    ell = -math.log(delta)

    def too_far(x: float) -> bool:
        # On the curve of this delta, rho = (ell - log(1+t))/t^2 falls in t, and epsilon falls with it.
        t = math.exp(x)
        return (1.0 + 2.0 * t) / t * ((ell - _log1p_exp(x)) / t) - _log1p_exp(-x) <= epsilon

    high = min(_log_odds(ell), _LOG_T_MOST)
    step = 1.0
    while too_far(high - step):
        step *= 2.0
    x = last_holding(too_far, high, high - step, _LOG_T_WIDTH)
    t = math.exp(x)
    tail, head = _log1p_exp(-x), _log1p_exp(x)
    value = epsilon + tail - (ell - head) / t
    error = 4.0 * epsilon + 8.0 * tail + 8.0 * (ell + 1.0 + head) / t
    return max(0.0, down((value - error * ULP) / (1.0 + t), 4.0))


def pure_to_rdp(epsilon: float, order: float) -> float:
    """Return the Rényi divergence of randomized response: a bound at `order` for every epsilon-DP step.

    Theorem: intrinsic time of a pure step; at order 1 it is the Kullback-Leibler divergence epsilon tanh(epsilon/2).
    Assumes: the step is epsilon-DP with delta = 0, and order >= 1.
    """
    t = order - 1.0
    if not t or not epsilon:
        return pure_to_zcdp(epsilon)
    h = 0.5 * t * epsilon
    if h > LARGEST_HALF:  # log cosh is its argument less log 2 there, beyond any rounding
        return above(epsilon - math.log1p(math.exp(-epsilon)) / t)
    return above(response_divergence(h, math.tanh(0.5 * epsilon), t), 24.0)


def response_divergence(h: float, bias: float, t: float) -> float:
    """Return the Rényi divergence of randomized response at the order 1 + t, not padded; h = t epsilon/2.

    The bias is tanh(epsilon/2), which all orders have in common; h is positive and at most `LARGEST_HALF`.

    Theorem: as `pure_to_rdp`.
    Assumes: as `pure_to_rdp`, which has the other cases.
    """
    # cosh((l-1/2)e)/cosh(e/2) - 1 = 2 sinh(h) (sinh(h) + cosh(h) tanh(e/2)): positive terms, small arguments.
    s = math.sinh(h)
    return math.log1p(2.0 * s * (s + math.cosh(h) * bias)) / t


def zcdp_to_rdp(rho: float, order: float) -> float:
    """Return the Rényi divergence at `order` that rho-zCDP allows, `order rho`.

    Theorem: the definition of zCDP, Bun and Steinke (2016).
    Assumes: the step is rho-zCDP, and order >= 1.
    """
    return above(order * rho) if rho else 0.0


def gdp_to_rdp(mu: float, order: float) -> float:
    """Return the Rényi divergence at `order` that mu-GDP allows, `order mu^2/2`.

    Theorem: by calculation: the divergence of N(mu, 1) from N(0, 1), and post-processing.
    Assumes: the step is mu-GDP, and order >= 1.
    """
    return above(0.5 * order * mu * mu) if mu else 0.0


def largest_rdp(order: float, epsilon: float, delta: float) -> float:
    """Return the largest divergence at `order`, rounded down, that gives (epsilon, delta)-DP.

    Theorem: Canonne, Kamath and Steinke (2020), Proposition 12; below zero the order is broken from the start.
    Assumes: the order, epsilon and delta were fixed before the first step.
    """
    if delta >= 1.0:
        return math.inf
    t = order - 1.0
    if not delta or not t:
        return -math.inf
    ell = -math.log(delta)
    tail, head = math.log1p(1.0 / t), math.log1p(t)
    error = 4.0 * epsilon + 8.0 * tail + 8.0 * (ell + 1.0 + head) / t
    return down(epsilon + tail - (ell - head) / t - error * ULP, 1.0)


def dp_to_probdp_delta(epsilon: float, delta: float, t: float) -> float:
    """Return a bound on `P(abs(loss) > t)`, both tails, for an (epsilon, delta)-DP step.

    Theorem: `delta (1 + e^-t)/(1 - e^(epsilon-t))`, which is tight; the printed lemma (erratum E3) is false.
    Assumes: the step is (epsilon, delta)-DP for both orders of the neighbors; t was fixed beforehand.
    """
    return _exceedance(epsilon, delta * (1.0 + math.exp(-t)), t)


def dp_to_probdp_delta_one_sided(epsilon: float, delta: float, t: float) -> float:
    """Return a bound on `P(loss > t)`, one tail, for an (epsilon, delta)-DP step.

    Theorem: `delta/(1 - e^(epsilon-t))`, which is tight; the printed lemma (erratum E3) is false.
    Assumes: the step is (epsilon, delta)-DP; t was fixed beforehand.
    """
    return _exceedance(epsilon, delta, t)


def probdp_drift(epsilon: float, delta: float) -> float:
    """Return what an (epsilon, delta)-pDP step adds to an odometer reading, `delta epsilon/sinh(epsilon)`.

    Theorem: the indicator-weighted supermartingale that repairs errata E4 and E5.
    Assumes: `P(abs(loss) > epsilon) <= delta` for both orders of the neighbors.
    """
    if not epsilon or not delta:
        return delta
    ratio = 2.0 * epsilon * math.exp(-epsilon) / -math.expm1(-2.0 * epsilon)
    return min(delta, above(delta * ratio, 16.0 + 2.0 * epsilon))


def filter_time(epsilon: float, delta: float) -> float:
    """Return y*, rounded down: the most intrinsic time with `sqrt(2 log(1/delta) v) + v/2 <= epsilon`.

    Theorem: the paper's filter, Whitehouse et al. (2023), with the corrected root (E1); its line meets epsilon there.
    Assumes: epsilon and delta were fixed before the first step.
    """
    # Decimal arithmetic, once per policy: the limit is then within three units of y*, however close it gets.
    reach = _DECIMAL.multiply(2, _least(epsilon))
    twice_ell = _DECIMAL.multiply(-2, _DECIMAL.ln(_least(delta)))
    slope = _DECIMAL.add(_DECIMAL.sqrt(twice_ell), _DECIMAL.sqrt(_DECIMAL.add(twice_ell, reach)))
    root = _DECIMAL.divide(reach, slope)
    time = _DECIMAL.multiply(root, root)
    near = float(time)
    return near if Fraction(near) < Fraction(time) else down(near, 0.0)


def gdp_to_dp_delta(mu: float, epsilon: float) -> float:
    """Return the delta for which mu-GDP gives (epsilon, delta)-DP, and no smaller delta does.

    Theorem: Dong, Roth and Su (2022), Corollary 2.13; Balle and Wang (2018), Theorem 8.
    Assumes: the guarantee is mu-GDP.
    """
    if not mu:
        return 0.0
    return min(1.0, above(math.exp(_log_delta(mu, epsilon)), 8.0))


def gdp_to_dp_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon for which mu-GDP gives (epsilon, delta)-DP, and no smaller epsilon does.

    Theorem: Dong, Roth and Su (2022), Corollary 2.13; delta falls in epsilon.
    Assumes: the guarantee is mu-GDP.
    """
    if not mu or delta >= 1.0:
        return 0.0
    if not delta:
        return math.inf
    limit = math.log(delta)
    if _log_delta(mu, 0.0) <= limit:
        return 0.0
    # mu-GDP is (mu^2/2)-zCDP, whose standard conversion is an epsilon that is enough with a factor to spare.
    enough = up(0.5 * mu * mu + mu * math.sqrt(-2.0 * limit), 64.0)
    return last_holding(lambda epsilon: _log_delta(mu, epsilon) <= limit, enough, 0.0)


def largest_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu, rounded down, for which mu-GDP gives (epsilon, delta)-DP.

    Theorem: Dong, Roth and Su (2022), Corollary 2.13; delta grows in mu.
    Assumes: epsilon and delta were fixed before the first step.
    """
    if not delta:
        return 0.0
    if delta >= 1.0:
        return math.inf
    limit = math.log(delta)

    def fits(mu: float) -> bool:
        return _log_delta(mu, epsilon) <= limit

    low = high = 1.0
    while fits(high):
        low, high = high, 2.0 * high
    while not fits(low):
        low, high = 0.5 * low, low
    return last_holding(fits, low, high)


def pure_to_gdp(epsilon: float) -> float:
    """Return the mu, `2 Phi^-1(e^epsilon/(1 + e^epsilon))`, for which every epsilon-DP step is mu-GDP.

    Theorem: totals of rho and of mu: randomized response is the worst step, and its trade-off curve lies above mu's.
    Assumes: the step is epsilon-DP with delta = 0.
    """
    if not epsilon:
        return 0.0
    from scipy import special  # noqa: PLC0415  loaded where it is used

    if epsilon < 1.0:  # the probability less one half is tanh(epsilon/2)/2
        mu = 2.0 * math.sqrt(2.0) * float(special.erfinv(math.tanh(0.5 * epsilon)))
    else:
        mu = -2.0 * float(special.ndtri_exp(-epsilon - math.log1p(math.exp(-epsilon))))
    return above(mu, 1024.0)  # SciPy's inverses are good to some tens of units


def _log1p_exp(x: float) -> float:
    """Return log(1 + e^x), which is log(1+t) at x = log t and log(1+1/t) at x = -log t."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _log_odds(ell: float) -> float:
    """Return log((1-delta)/delta), the log of the t at which log(1+t) alone uses up log(1/delta)."""
    return ell + math.log(-math.expm1(-ell))


def _rdp_epsilon(t: float, log_t: float, value: float, ell: float) -> float:
    tail, head = _log1p_exp(-log_t), _log1p_exp(log_t)
    error = 4.0 * value + 8.0 * tail + 8.0 * (ell + 1.0 + head) / t
    return max(0.0, up(value + (ell - head) / t - tail + error * ULP, 1.0))


def _zcdp_log_delta(rho: float, epsilon: float) -> tuple[float, float]:
    """Return log delta at the best t, and a bound on the rounding error in it, for rho > 0."""
    gap = rho - epsilon
    root = math.sqrt(gap * gap + 8.0 * rho)
    # log(1+1/t) <= 1/t makes the root `most` of 2 rho t^2 + gap t = 1 an upper end of the bracket; there
    # gap + 2 rho t = 1/t, so the best t is at least 1/expm1(1/most).
    most = min(2.0 / (gap + root) if gap > 0.0 else (root - gap) / (4.0 * rho), math.exp(_LOG_T_MOST))
    low = -1.0 / most - math.log(-math.expm1(-1.0 / most))
    x = last_holding(lambda x: gap + 2.0 * rho * math.exp(x) <= _log1p_exp(-x), low, math.log(most), _LOG_T_WIDTH)
    t = math.exp(x)
    tail, head = t * _log1p_exp(-x), _log1p_exp(x)
    # The first term is the reading of rho and epsilon as decimals, the others the rounding of each operation.
    slope = gap + t * rho
    error = t * (rho + epsilon + abs(gap) + t * rho + 2.0 * abs(slope)) + 8.0 * (tail + head)
    return t * slope - tail - head, error * ULP


def _exceedance(epsilon: float, mass: float, t: float) -> float:
    if t <= epsilon:
        return 1.0
    if not mass:
        return 0.0
    # The gap t - epsilon magnifies the half units in which its two ends were read.
    gap = t - epsilon
    return min(1.0, above(mass / -math.expm1(-gap), 16.0 + (t + epsilon) / gap))


def _log_delta(mu: float, epsilon: float) -> float:
    """Return log delta, padded up."""
    ratio = epsilon / mu
    a = ratio - 0.5 * mu
    b = ratio + 0.5 * mu
    if a < -1.0:  # delta is above 0.6, and no digit is lost
        from scipy import special  # noqa: PLC0415  loaded where it is used

        value = math.log(special.ndtr(-a) - 0.5 * math.exp(-0.5 * a * a) * special.erfcx(b * math.sqrt(0.5)))
    elif a > 1e150:  # a * a would overflow; delta is zero for every purpose
        return -math.inf
    else:
        scale = 1.0 / max(a, 1.0)
        s = scale * _NODES
        mills = _STEP * float(np.sum(s * np.exp(-s * (a + 0.5 * s)) * -np.expm1(-mu * s)))
        value = math.log(mills) - 0.5 * a * a - _HALF_LOG_TWO_PI
    # An error of b units in a moves log delta by at most (1 + a) times as much.
    return value + (16.0 + 4.0 * (1.0 + max(a, 0.0)) * b + 2.0 * abs(value)) * ULP


def _least(value: float) -> Decimal:
    """Return the smaller reading of a float: the binary number it is, or the decimal it was written as."""
    return min(Decimal(value), Decimal(repr(value)))
