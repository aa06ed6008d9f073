"""Gaussian differential privacy: what a mu-GDP guarantee means in (epsilon, delta), and back.

With a = epsilon/mu - mu/2 and b = epsilon/mu + mu/2 the textbook formula `Phi(-a) - e^epsilon Phi(-b)` is
`phi(a) (M(a) - M(b))`, M the Mills ratio. The difference cancels for small mu, so it is computed as the
integral of `e^(-a s - s^2/2) (1 - e^(-mu s))` over s > 0, in which nothing does.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from scipy import special

from odograph.core.roots import last_holding
from odograph.core.units import up

__all__ = ["gdp_to_dp_delta", "gdp_to_dp_epsilon", "largest_mu", "pure_to_gdp"]

_ULP: Final = 2.0**-53
_LEAST: Final = math.ulp(0.0)
_HALF_LOG_TWO_PI: Final = 0.5 * math.log(2.0 * math.pi)

# The trapezoidal rule in log s. The integrand is analytic in a strip of half-width pi/4, so a step of 0.1
# errs by exp(-pi^2/(2*0.1)), below 1e-21; the ends cut off less than 1e-17 of the mass.
_STEP: Final = 0.1
_NODES: Final = np.exp(np.arange(-400, 40) * _STEP)


def gdp_to_dp_delta(mu: float, epsilon: float) -> float:
    """Return the delta for which mu-GDP gives (epsilon, delta)-DP, and no smaller delta does.

    Theorem: Dong, Roth and Su 2022, arXiv 1905.02383, Cor. 2.13; Balle and Wang 2018.
    Assumes: the guarantee is mu-GDP.
    """
    if not mu:
        return 0.0
    return min(1.0, max(up(math.exp(_log_delta(mu, epsilon)), 8.0), _LEAST))


def gdp_to_dp_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon for which mu-GDP gives (epsilon, delta)-DP, and no smaller epsilon does.

    Theorem: Dong, Roth and Su 2022, arXiv 1905.02383, Cor. 2.13; delta falls in epsilon.
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

    Theorem: Dong, Roth and Su 2022, arXiv 1905.02383, Cor. 2.13; delta grows in mu.
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

    Theorem: randomized response is the worst step, and its trade-off curve lies above that of mu.
    Assumes: the step is epsilon-DP with delta = 0.
    """
    if not epsilon:
        return 0.0
    if epsilon < 1.0:  # the probability less one half is tanh(epsilon/2)/2
        mu = 2.0 * math.sqrt(2.0) * float(special.erfinv(math.tanh(0.5 * epsilon)))
    else:
        mu = -2.0 * float(special.ndtri_exp(-epsilon - math.log1p(math.exp(-epsilon))))
    return max(up(mu, 1024.0), _LEAST)  # SciPy's inverses are good to some tens of units


def _log_delta(mu: float, epsilon: float) -> float:
    """Return log delta, padded up."""
    ratio = epsilon / mu
    a = ratio - 0.5 * mu
    b = ratio + 0.5 * mu
    if a < -1.0:  # delta is above 0.6, and no digit is lost
        value = math.log(special.ndtr(-a) - 0.5 * math.exp(-0.5 * a * a) * special.erfcx(b * math.sqrt(0.5)))
    elif a > 1e150:  # a * a would overflow; delta is zero for every purpose
        return -math.inf
    else:
        scale = 1.0 / max(a, 1.0)
        s = scale * _NODES
        mills = _STEP * float(np.sum(s * np.exp(-s * (a + 0.5 * s)) * -np.expm1(-mu * s)))
        value = math.log(mills) - 0.5 * a * a - _HALF_LOG_TWO_PI
    # An error of b units in a moves log delta by at most (1 + a) times as much.
    return value + (16.0 + 4.0 * (1.0 + max(a, 0.0)) * b + 2.0 * abs(value)) * _ULP
