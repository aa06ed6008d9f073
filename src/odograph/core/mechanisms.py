"""Known mechanisms and their costs, as guarantees.

The Poisson-subsampled Gaussian, for private training with adaptive settings, has a Rényi curve and a menu of items.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odograph.core.conversions import laplace_to_zcdp, largest_mu
from odograph.core.fixed_point import Numeric, read, tidy, up
from odograph.core.guarantees import GDP, RDP, ZCDP, Guarantee, Mechanism, Parallel, PureDP
from odograph.core.menu import MenuItem, subsampled_gaussian_losses
from odograph.core.value_iteration import blocks_alone
from odograph.errors import InvalidGuarantee, InvalidPolicy, UnprovenComposition

__all__ = [
    "ORDERS",
    "discrete_gaussian",
    "exponential",
    "exponential_zcdp",
    "gaussian",
    "laplace",
    "laplace_zcdp",
    "parallel",
    "randomized_response",
    "sampling_settings",
    "subsampled_gaussian",
    "subsampled_gaussian_divergence",
    "subsampled_gaussian_menu",
    "subsampled_gaussian_name",
]

_Floats = NDArray[np.float64]

_DIGITS: Final = Context(prec=8, rounding=ROUND_CEILING)  # of a curve's values: they are stored with every entry
_PADDING: Final = 1e-9  # of a moment, relative: ten times what the roundings and approximations below come to
_ROUNDING: Final = 1e-14  # of the largest logarithm that a moment was computed from; absolute, in its logarithm
_REACH: Final = 12.0  # standard deviations on both sides: what lies outside is below 1e-30 of an integral
_CELLS: Final = 3.0  # of the integral's grid in one unit of its smoothness
_LEAST_NOISE: Final = 0.05  # below it a step has no price at any fractional order that a target could use
_LEAST_DIVERGENCE: Final = 1e-300
_NOISE: Final = (1e-100, 1e100)  # whose squares are floats
_SMALL: Final = 1e-3  # where the first terms of a series are closer than the difference they stand for
_LARGE: Final = 30.0  # logarithm of x^order from which on the 1 beside it does not count

_BLOCKS: Final = range(400, 1101)  # how many blocks an item should get alone: enough to adapt, few to solve
_STEP_PARTS: Final = 16  # grid cells in one step's share of the loss's deviation: costs .1% of the steps

# Sixteenths below 4 and eighths below 11, where targets above epsilon 1 have their best order and a curve bends most;
# then integers. They are as dense as dp-accounting's own, so that a plan made at one of these gets the steps that it
# counts, and each is a float exactly, so that a curve is never asked for at a slightly smaller order.
ORDERS: Final = (
    *(1 + sixteenths / 16 for sixteenths in range(1, 48)),
    *(4 + eighths / 8 for eighths in range(56)),
    *map(float, range(11, 65)),
    *(80.0, 96.0, 128.0, 256.0, 512.0, 1024.0),
)


def _ratio(top: Numeric, bottom: Numeric, top_name: str, bottom_name: str) -> Numeric:
    """Return sensitivity over noise, exactly; raise if there is no noise."""
    noise = read(bottom, bottom_name)
    if noise == 0:
        raise InvalidGuarantee(f"{bottom_name} must be above 0 (got {bottom!r}): without noise there is no privacy")
    return tidy(read(top, top_name) / noise)


def laplace(scale: Numeric, sensitivity: Numeric = 1) -> PureDP:
    """Return the guarantee of Laplace noise of the given scale.

    Theorem: Dwork, McSherry, Nissim, Smith 2006.
    Assumes: `sensitivity` bounds the L1 change of the query between neighbors.
    """
    return PureDP(_ratio(sensitivity, scale, "laplace(sensitivity)", "laplace(scale)"))


def laplace_zcdp(scale: Numeric, sensitivity: Numeric = 1) -> ZCDP:
    """Return the zCDP guarantee of Laplace noise, smaller than that of an arbitrary epsilon-DP mechanism.

    Theorem: the epsilon-DP Laplace mechanism is (epsilon + e^-epsilon - 1)-zCDP (arXiv 2510.25746).
    Assumes: `sensitivity` bounds the change of a scalar query between neighbors.
    """
    epsilon = _ratio(sensitivity, scale, "laplace_zcdp(sensitivity)", "laplace_zcdp(scale)")
    # Above a thousand the two differ by 1, and the number means no privacy.
    return ZCDP(laplace_to_zcdp(float(epsilon)) if read(epsilon, "epsilon") <= 1000 else epsilon)


def gaussian(sigma: Numeric, sensitivity: Numeric = 1) -> GDP:
    """Return the guarantee of Gaussian noise of standard deviation `sigma`.

    Theorem: Dong, Roth, Su 2022: exactly (sensitivity/sigma)-GDP.
    Assumes: `sensitivity` bounds the L2 change of the query between neighbors.
    """
    return GDP(_ratio(sensitivity, sigma, "gaussian(sensitivity)", "gaussian(sigma)"))


def discrete_gaussian(sigma: Numeric, sensitivity: Numeric = 1) -> ZCDP:
    """Return the guarantee of discrete Gaussian noise; it is not a Gaussian, so no GDP value.

    Theorem: Canonne, Kamath, Steinke 2020, Theorem 14: (sensitivity^2 / (2 sigma^2))-zCDP.
    Assumes: an integer-valued query whose change between neighbors is at most `sensitivity`.
    """
    ratio = _ratio(sensitivity, sigma, "discrete_gaussian(sensitivity)", "discrete_gaussian(sigma)")
    return ZCDP(tidy(read(ratio, "discrete_gaussian") ** 2 / 2))


def exponential(epsilon: Numeric) -> PureDP:
    """Return the guarantee of an exponential mechanism run at `epsilon`.

    Theorem: McSherry, Talwar 2007.
    Assumes: scores weighted by exp(epsilon * score / (2 sensitivity)).
    """
    return PureDP(epsilon)


def exponential_zcdp(epsilon: Numeric) -> ZCDP:
    """Return the zCDP guarantee of an exponential mechanism, a quarter of what epsilon-DP alone would give.

    Theorem: epsilon-bounded range implies (epsilon^2/8)-zCDP (Cesar, Rogers 2021).
    Assumes: as `exponential`: such a mechanism has range bounded by epsilon.
    """
    return ZCDP(tidy(read(epsilon, "exponential_zcdp(epsilon)") ** 2 / 8))


def parallel(parts: Mapping[str, Guarantee] | Sequence[Guarantee], *, data: str = "static") -> Parallel:
    """Return the guarantee of one mechanism on each of several disjoint parts of the data, as one step.

    `parts` holds a guarantee for each part. With people added or removed the step is priced at the dearest part,
    meter by meter; with people replaced, at the dearest two.

    Theorem: parallel composition (McSherry 2009): neighbors differ in one part, or in two if a person moves.
    Assumes: no record is in two parts, and its part follows from the record alone; the data do not change with the
        answers. Where records arrive or change adaptively, approximate guarantees do not compose in parallel, so
        `data="changing"` raises `UnprovenComposition`: spend the sum there.
    """
    if data != "static":
        raise UnprovenComposition(
            f"data must be 'static' for parallel composition (got {data!r}): where records change with the answers,"
            " one person can reach every part. Spend the parts one after the other"
        )
    return Parallel(tuple(parts.values()) if isinstance(parts, Mapping) else parts)  # type: ignore[arg-type]


def randomized_response(truth: Numeric, categories: int = 2) -> PureDP:
    """Return the guarantee of answering truthfully with probability `truth`, else another answer uniformly.

    Theorem: Warner 1965: epsilon = log(truth (categories - 1) / (1 - truth)).
    Assumes: one answer per person.
    """
    probability = read(truth, "randomized_response(truth)")
    if isinstance(categories, bool) or not isinstance(categories, int) or categories < 2:
        raise InvalidGuarantee(f"randomized_response(categories) must be an integer from 2 (got {categories!r})")
    if not 0 < probability < 1:
        raise InvalidGuarantee(f"randomized_response(truth) must be above 0 and below 1 (got {truth!r})")
    odds = probability * (categories - 1) / (1 - probability)
    # Near even odds the logarithm would cancel; log1p of the exact difference does not.
    return PureDP(up(math.log1p(float(max(odds, 1 / odds) - 1)), 32))


def subsampled_gaussian_name(rate: float, noise: float) -> str:
    """Return the name under which a menu lists the mechanism."""
    return f"subsampled_gaussian(sampling_rate={rate!r}, noise_multiplier={noise!r})"


def sampling_settings(sampling_rate: Numeric, noise_multiplier: Numeric) -> tuple[float, float]:
    """Return the settings as floats; a rate outside (0, 1] or no noise raises."""
    rate = read(sampling_rate, "sampling_rate")
    noise = read(noise_multiplier, "noise_multiplier")
    if not 0 < rate <= 1:
        raise InvalidGuarantee(f"sampling_rate must be above 0 and at most 1 (got {sampling_rate!r})")
    if noise == 0:
        raise InvalidGuarantee(
            f"noise_multiplier must be above 0 (got {noise_multiplier!r}): without noise there is no privacy"
        )
    if not _NOISE[0] <= float(noise) <= _NOISE[1]:
        raise InvalidGuarantee(f"noise_multiplier must be from 1e-100 to 1e100 (got {noise_multiplier!r})")
    return float(rate), float(noise)


def subsampled_gaussian(sampling_rate: Numeric, noise_multiplier: Numeric, steps: int = 1) -> Mechanism:
    """Return `steps` runs of a Poisson-subsampled Gaussian: priced by its name on a menu, or by its Rényi curve.

    Theorem: Mironov, Talwar, Zhang 2019 (the curve; it bounds both directions), and RDP composition.
    Assumes: Poisson sampling at `sampling_rate`, noise of `noise_multiplier` times the clipping norm, add/remove.
    """
    return _subsampled_gaussian(*sampling_settings(sampling_rate, noise_multiplier), steps)


@lru_cache(maxsize=256, typed=True)
def _subsampled_gaussian(rate: float, noise: float, steps: int) -> Mechanism:
    """Return the mechanism; the same object for the same settings, which an account prices once."""
    values = [(order, subsampled_gaussian_divergence(order, rate, noise)) for order in ORDERS]
    known = [(order, _DIGITS.create_decimal(up(value * steps))) for order, value in values if math.isfinite(value)]
    curve = RDP(tuple(order for order, _ in known), tuple(value for _, value in known))
    return Mechanism(subsampled_gaussian_name(rate, noise), steps, curve)


def subsampled_gaussian_divergence(order: float, rate: float, noise: float) -> float:
    """Return the Rényi divergence of a Poisson-subsampled Gaussian at an order, rounded up; infinite if not known.

    The moment less 1 is `E g(x)` with `g(x) = x^order - 1 - order (x - 1) >= 0`, where x is the ratio of the
    densities. It has no cancellation: for an integer order it is a finite sum of positive terms, for others a smooth
    integral.

    Theorem: Mironov, Talwar, Zhang 2019: the divergence of the mixture from the Gaussian is the larger direction.
    Assumes: Poisson sampling at `rate`, noise of `noise` times the clipping norm, add/remove neighbors.
    """
    if rate == 1.0:
        return up(order / (2.0 * noise * noise))
    if float(order).is_integer():
        excess = _sum_of_moment(int(order), rate, noise)
    elif noise >= _LEAST_NOISE:
        excess = _integral_of_moment(order, rate, noise)
    else:
        excess = math.inf
    # A moment that is too small for a float is not taken for none.
    return max(_LEAST_DIVERGENCE, up(float(np.logaddexp(0.0, excess)) / (order - 1.0)))


def _sum_of_moment(order: int, rate: float, noise: float) -> float:
    """Return the logarithm of the moment less 1 at an integer order, rounded up: the sum over k drawn by chance."""
    from scipy.special import gammaln, logsumexp  # noqa: PLC0415  loaded where it is used

    k = np.arange(2.0, order + 1.0)
    exponents = k * (k - 1.0) / (2.0 * noise * noise)
    counted = gammaln(order + 1.0) - gammaln(k + 1.0) - gammaln(order - k + 1.0)
    drawn = k * math.log(rate) + (order - k) * math.log1p(-rate)
    largest = float(np.max(exponents - drawn)) + float(gammaln(order + 1.0))
    return float(logsumexp(counted + drawn + _log_expm1(exponents))) + _PADDING + _ROUNDING * largest


def _log_expm1(x: _Floats) -> _Floats:
    """Return log(e^x - 1) without overflow."""
    return x + np.log(-np.expm1(-x))


def _integral_of_moment(order: float, rate: float, noise: float) -> float:
    """Return the logarithm of the moment less 1 at any order, rounded up: the trapezoidal rule over the noise.

    The integrand is analytic within pi noise^2 of the real line, where x has its zeros, and falls off as a Gaussian
    of deviation `noise`. So in a strip of three times the smaller of noise and noise^2 the rule's error is
    exp(-2 pi 3 _CELLS) of the integral of its modulus, 1e-24.
    """
    from scipy.special import logsumexp  # noqa: PLC0415  loaded where it is used

    cell = min(noise, noise * noise) / _CELLS
    first, last = -_REACH * noise, order + _REACH * noise
    z = first + cell * np.arange(math.ceil((last - first) / cell) + 1.0)
    u = (z - 0.5) / (noise * noise)
    log_x = np.logaddexp(math.log1p(-rate), math.log(rate) + u)
    y = rate * np.expm1(np.minimum(u, 700.0))  # x - 1; where it is larger, only the logarithm of x is used
    power = order * np.where(np.abs(y) < 0.5, np.log1p(np.minimum(y, 1.0)), log_x)
    # The series: 1e-11 of it is left out at order 11. The difference: y is at least a thousandth, and 1e-10 is lost.
    near = np.clip(y, -_SMALL, _SMALL)
    series = 1 + (order - 2) * near / 3 * (1 + (order - 3) * near / 4 * (1 + (order - 4) * near / 5))
    small = order * (order - 1) / 2 * near * near * series
    difference = np.expm1(np.minimum(power, _LARGE)) - order * y
    with np.errstate(divide="ignore"):  # y is 0 where u is
        logs = np.log(np.where(np.abs(y) < _SMALL, small, np.where(power > _LARGE, 1.0, difference)))
    large = power + np.log1p(-np.minimum(order * np.exp((1.0 - order) * np.maximum(log_x, 0.0)), 0.9))
    logs = np.where(power > _LARGE, large, logs) - z * z / (2.0 * noise * noise)
    scale = math.log(cell) - math.log(noise) - 0.5 * math.log(2.0 * math.pi)
    largest = float(np.max(np.abs(power))) + float(z[-1] / noise) ** 2
    return float(logsumexp(logs)) + scale + _PADDING + _ROUNDING * largest


def subsampled_gaussian_menu(
    epsilon: Numeric, delta: Numeric, settings: Iterable[tuple[Numeric, Numeric]]
) -> tuple[MenuItem, ...]:
    """Return menu items for the given (sampling rate, noise multiplier) settings, in blocks of balanced size.

    Each item alone would get between 400 and 1100 blocks at the target, about as many as every other; where a
    target has room for fewer steps than that, a block is a single step.

    Theorem: as `subsampled_gaussian_losses`; how steps are grouped into blocks does not matter for validity.
    Assumes: Poisson sampling, add/remove neighbors; the settings are fixed when the policy is made.
    """
    target = (read(epsilon, "epsilon", InvalidPolicy), read(delta, "delta", InvalidPolicy))
    checked = [sampling_settings(rate, noise) for rate, noise in settings]
    steps = [_steps_alone(rate, noise, target) for rate, noise in checked]
    count = min(_BLOCKS, key=lambda count: _unevenness(count, steps))
    return tuple(
        _item(rate, noise, alone, max(1, round(alone / count)), target)
        for (rate, noise), alone in zip(checked, steps, strict=True)
    )


def _item(rate: float, noise: float, alone: int, block: int, target: tuple[Fraction, Fraction]) -> MenuItem:
    """Make an item of which about `alone` steps fit the target; that sizes its grid, not its validity."""
    cell = largest_mu(float(target[0]), float(target[1])) / math.sqrt(alone) / _STEP_PARTS
    remove, add = subsampled_gaussian_losses(rate, noise, cell)
    directions = (remove.compose(block), add.compose(block))
    return MenuItem(subsampled_gaussian_name(rate, noise), block, cell, directions, oriented=True)


def _steps_alone(rate: float, noise: float, target: tuple[Fraction, Fraction]) -> int:
    """Find how many steps of one setting alone fit the target, to within a block."""
    # The central limit of the loss gives a first guess; it overestimates where the noise is small.
    inverse = 1.0 / (noise * noise)
    deviation = rate * math.sqrt(math.expm1(min(inverse, 100.0)))
    rough = max(1, int((largest_mu(float(target[0]), float(target[1])) / deviation) ** 2))
    while True:
        item = _item(rate, noise, rough, max(1, rough // _BLOCKS.start), target)
        blocks = blocks_alone(*target, item)
        if blocks * 4 >= _BLOCKS.start or item.block == 1:
            return max(1, blocks) * item.block
        rough = max(1, rough // 8)


def _unevenness(count: int, steps: list[int]) -> float:
    """Return how unequal the items' numbers of blocks are, if each gets about `count`."""
    blocks = [alone / max(1, round(alone / count)) for alone in steps]
    return max(blocks) / min(blocks)
