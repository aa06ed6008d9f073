"""Known mechanisms and their costs, as guarantees.

The Poisson-subsampled Gaussian, for private training with adaptive settings, has a Rényi curve and a menu of items.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from odograph.core.conversions import laplace_to_zcdp, largest_mu
from odograph.core.fixed_point import Numeric, read, tidy, up
from odograph.core.guarantees import GDP, RDP, ZCDP, DiscreteGaussian, Guarantee, Mechanism, Parallel, PureDP
from odograph.core.value_iteration import Kernel, blocks_alone, spread
from odograph.errors import InvalidArgument, InvalidGuarantee, InvalidPolicy, UnprovenComposition, with_usage

__all__ = [
    "NOISES",
    "ORDERS",
    "LossDistribution",
    "MenuItem",
    "Noise",
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
    "subsampled_gaussian_losses",
    "subsampled_gaussian_menu",
    "subsampled_gaussian_name",
]

_NEGLIGIBLE: Final = 1e-20  # mass beyond which a loss counts as infinite
_TAIL: Final = 10.0  # standard deviations that the quadrature covers


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """A discrete privacy-loss distribution: mass at the losses (lowest + i) * step, and at infinity.

    It must dominate the mechanism's true one, as a "connect the dots" discretization does.
    """

    lowest: int
    masses: NDArray[np.float64]
    infinite: float

    def __post_init__(self) -> None:
        masses = np.array(self.masses, dtype=np.float64)
        total = float(masses.sum()) + self.infinite
        if masses.ndim != 1 or masses.size == 0 or not np.all(np.isfinite(masses)) or bool((masses < 0).any()):
            raise InvalidArgument("masses must be a nonempty list of finite nonnegative numbers")
        if not (0.0 <= self.infinite <= 1.0 and abs(total - 1.0) < 1e-6):
            raise InvalidArgument(f"masses and infinite must sum to 1 (got {total!r})")
        masses.setflags(write=False)
        object.__setattr__(self, "masses", masses)
        # Mass that is missing could be anywhere: it counts as a reveal.
        object.__setattr__(self, "infinite", min(1.0, self.infinite + max(0.0, 1.0 - total)))

    @classmethod
    def of(
        cls, losses: NDArray[np.float64], masses: NDArray[np.float64], step: float, infinite: float = 0.0
    ) -> LossDistribution:
        """Return the distribution of finitely many losses, each mass spread on the two multiples of `step` around it.

        Theorem: as `spread`: connecting the dots dominates.
        Assumes: the masses are those of the losses under P, and `infinite` is the mass where Q has none.
        """
        kernel = spread(-np.asarray(losses, dtype=np.float64), np.asarray(masses, dtype=np.float64), step)
        low, taps = kernel.run or (kernel.points[0][0], np.array([weight for _, weight in kernel.points]))
        return cls(-(low + taps.size - 1), taps[::-1].copy(), infinite)

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite losses, in steps."""
        places = np.arange(self.masses.size)
        total = float(self.masses.sum())
        mean = float(self.masses @ places) / total
        return math.sqrt(float(self.masses @ (places - mean) ** 2) / total)

    def kernel(self, loss_step: float, step: float, delta: Fraction) -> Kernel:
        """Return the kernel of the losses, on multiples of `loss_step`, on a grid of log-ratio step `step`.

        Theorem: the exact filter, on a grid: spreading each mass linearly in x bounds Phi's expectation from above; a
            tail towards x = 0 may be counted as a reveal (Phi <= 1), a tail towards large x at the last kept point
            (Phi falls with x).
        Assumes: the losses dominate the mechanism's privacy loss, for this direction of the pair of neighbors.
        """
        kept = _cut_tails(self, float(delta) * 1e-9, float(delta) * 1e-12)
        shifts = -loss_step * np.arange(kept.lowest, kept.lowest + kept.masses.size, dtype=np.float64)
        return replace(spread(shifts, kept.masses, step), reveal=kept.infinite)

    def compose(self, steps: int) -> LossDistribution:
        """Return the distribution of `steps` independent runs in the same direction, by direct convolution."""
        result: LossDistribution | None = None
        power, left = self, steps
        while left:
            if left & 1:
                result = power if result is None else _convolve(result, power)
            left >>= 1
            if left:
                power = _convolve(power, power)
        if result is None:
            raise InvalidArgument(f"steps must be an integer from 1 (got {steps!r})")
        return result


@dataclass(frozen=True, eq=False)
class MenuItem:
    """A mechanism the exact filter may take: its name, how many runs make a block, the block's distribution.

    `directions` holds the losses of the two orders of a pair of neighbors (remove, add), on multiples of
    `step`. An item is `oriented` if for one pair of neighbors its direction is the same at every step, as for a
    subsampled Gaussian when a person is added or removed; else an analyst may change its direction from step to
    step, and both directions are certified together, one step at a time. An item read from a stored policy has no
    directions: it can be checked and priced, but no new budget can be certified for it.
    """

    name: str
    block: int
    step: float = 0.0
    directions: tuple[LossDistribution, ...] = ()
    neighbors: str = "add-remove"
    oriented: bool = False
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise InvalidArgument(
                f"MenuItem must have a name, and a block of at least 1 step (got {self.name!r} and {self.block!r})"
            )
        if self.oriented and self.neighbors != "add-remove":
            raise InvalidArgument(
                f"MenuItem.oriented must be false for neighbors={self.neighbors!r}, which have no direction (got true"
                f" for {self.name!r})"
            )
        if self.block > 1 and not self.oriented:
            raise InvalidArgument(
                f"MenuItem.block must be 1 for an item that is not oriented (got {self.block} for {self.name!r}): an"
                " analyst may change its direction from step to step"
            )
        if not self.directions:
            return
        if len(self.directions) != 2 or not (math.isfinite(self.step) and self.step > 0.0):
            raise InvalidArgument(
                f"MenuItem.directions must be two distributions, on a positive step (got {len(self.directions)} on"
                f" {self.step!r} for {self.name!r})"
            )
        text = hashlib.sha256(f"{self.name}|{self.block}|{self.step!r}|{self.neighbors}|{self.oriented}".encode())
        for losses in self.directions:
            text.update(f"|{losses.lowest}|{losses.infinite!r}|".encode() + losses.masses.tobytes())
        object.__setattr__(self, "digest", text.hexdigest())

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: everything but the distributions, which the digest stands for."""
        return {
            "name": self.name,
            "block": self.block,
            "neighbors": self.neighbors,
            "oriented": self.oriented,
            "digest": self.digest,
        }

    def runs(self, steps: int) -> Mechanism:
        """Return the cost of `steps` runs of this mechanism."""
        return Mechanism(self.name, steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MenuItem) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<MenuItem {self.name} in blocks of {self.block}, {self.digest[:8]}>"


def subsampled_gaussian_losses(rate: float, noise: float, step: float) -> tuple[LossDistribution, LossDistribution]:
    """Return the loss distributions (remove, add) of a Poisson-subsampled Gaussian, on multiples of `step`.

    Theorem: the pair (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2) dominates (Zhu, Dong and Wang (2022)); masses
        spread linearly in x dominate it in turn (Doroshenko et al. (2022)).
    Assumes: Poisson sampling at `rate`, noise of `noise` times the clipping norm, add/remove neighbors.
    """
    # Panels end where the loss is a multiple of the step, so that what is spread on a cell is smooth on a panel,
    # and are narrow enough for 8 nodes to be exact.
    reach = _TAIL * noise
    lowest, highest = _log_mixture(rate, np.array([-reach - 0.5, reach + 0.5]) / noise**2).tolist()
    levels = step * np.arange(math.floor(lowest / step) + 1, math.ceil(highest / step))
    inner = np.expm1(levels) + rate  # e^level - (1 - rate)
    cells = 0.5 + noise**2 * np.log(np.maximum(inner, 1e-300) / rate)
    even = np.linspace(-reach, 1.0 + reach, math.ceil((1.0 + 2.0 * reach) * 8.0 / noise))
    edges = np.unique(np.concatenate([even, cells[(cells > -reach) & (cells < 1.0 + reach)]]))
    width = np.diff(edges)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    places = (edges[:-1, None] + (nodes + 1.0) * (width[:, None] / 2.0)).ravel()
    share = (width[:, None] * weights).ravel() / (2.0 * noise * math.sqrt(2.0 * math.pi))
    base = np.exp(-0.5 * (places / noise) ** 2) * share
    ahead = np.exp(-0.5 * ((places - 1.0) / noise) ** 2) * share
    tilt = (places - 0.5) / noise**2
    loss = _log_mixture(rate, tilt)
    remove = _spread_losses(-loss, (1.0 - rate) * base + rate * ahead, step)
    return remove, _spread_losses(loss, base, step)


def _log_mixture(rate: float, tilt: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(1 - rate + rate e^tilt), accurate where it is small and without overflow where it is not."""
    rest = math.log1p(-rate) if rate < 1.0 else -math.inf
    small = np.abs(tilt) < 0.5
    return np.where(
        small, np.log1p(rate * np.expm1(np.where(small, tilt, 0.0))), np.logaddexp(rest, math.log(rate) + tilt)
    )


def _spread_losses(shifts: NDArray[np.float64], masses: NDArray[np.float64], step: float) -> LossDistribution:
    # The quadrature leaves out what is beyond `_TAIL` deviations.
    tail = math.erfc(_TAIL / math.sqrt(2.0))
    return _cut_tails(LossDistribution.of(-shifts, masses * (1.0 + 2.0**-40), step, tail), _NEGLIGIBLE, _NEGLIGIBLE)


def _convolve(one: LossDistribution, two: LossDistribution) -> LossDistribution:
    masses = np.convolve(one.masses, two.masses)
    # n products and sums, each off by a rounding: padding up keeps the result dominating.
    masses *= 1.0 + min(one.masses.size, two.masses.size) * 2.0**-52
    infinite = (one.infinite + two.infinite) * (1.0 + 2.0**-50)
    return _cut_tails(LossDistribution(one.lowest + two.lowest, masses, min(1.0, infinite)), _NEGLIGIBLE, _NEGLIGIBLE)


def _cut_tails(losses: LossDistribution, below: float, above: float) -> LossDistribution:
    """Cut tails that are longer than they are heavy: large losses count as infinite, small ones as larger."""
    masses = losses.masses
    keep = (np.cumsum(masses) > below) & (np.cumsum(masses[::-1])[::-1] > above)
    if not keep.any():
        return losses
    first, last = int(np.argmax(keep)), int(masses.size - np.argmax(keep[::-1]))
    kept = masses[first:last].copy()
    kept[0] += float(masses[:first].sum())
    infinite = losses.infinite + float(masses[last:].sum())
    return LossDistribution(losses.lowest + first, kept, min(1.0, infinite * (1.0 + 2.0**-50)))


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


@with_usage(
    "the noise is given by its scale, as in laplace(scale=10, sensitivity=1); an epsilon alone is PureDP(0.1)"
)
def laplace(scale: Numeric, sensitivity: Numeric = 1) -> PureDP:
    """Return the guarantee of Laplace noise of the given scale.

    Theorem: Dwork et al. (2006a).
    Assumes: `sensitivity` bounds the L1 change of the query between neighbors.
    """
    return PureDP(_ratio(sensitivity, scale, "laplace(sensitivity)", "laplace(scale)"))


@with_usage("the noise is given by its scale, as in laplace_zcdp(scale=10, sensitivity=1)")
def laplace_zcdp(scale: Numeric, sensitivity: Numeric = 1) -> ZCDP:
    """Return the zCDP guarantee of Laplace noise, smaller than that of an arbitrary epsilon-DP mechanism.

    Theorem: the epsilon-DP Laplace mechanism is (epsilon + e^-epsilon - 1)-zCDP (Harrison and Manurangsi (2025)).
    Assumes: `sensitivity` bounds the change of a scalar query between neighbors.
    """
    epsilon = _ratio(sensitivity, scale, "laplace_zcdp(sensitivity)", "laplace_zcdp(scale)")
    # Above a thousand the two differ by 1, and the number means no privacy.
    return ZCDP(laplace_to_zcdp(float(epsilon)) if read(epsilon, "epsilon") <= 1000 else epsilon)


@with_usage("the noise is given by its standard deviation, as in gaussian(sigma=25, sensitivity=1)")
def gaussian(sigma: Numeric, sensitivity: Numeric = 1) -> GDP:
    """Return the guarantee of Gaussian noise of standard deviation `sigma`.

    Theorem: Dong, Roth and Su (2022): exactly (sensitivity/sigma)-GDP.
    Assumes: `sensitivity` bounds the L2 change of the query between neighbors.
    """
    return GDP(_ratio(sensitivity, sigma, "gaussian(sensitivity)", "gaussian(sigma)"))


@with_usage("the noise is given by its sigma, as in discrete_gaussian(sigma=25, sensitivity=1)")
def discrete_gaussian(
    sigma: Numeric, sensitivity: Numeric = 1, dimension: int = 1, grid: Numeric = 1
) -> DiscreteGaussian:
    """Return the guarantee of discrete Gaussian noise; it is not a Gaussian, so no GDP value.

    The smooth filter charges about (sensitivity / sigma)^2 of intrinsic time where the noise is a few times the grid;
    other filters charge by zCDP. `grid` is the distance of neighboring values, such as 0.01 for money in cents.

    Theorem: Canonne, Kamath and Steinke (2020), Theorem 14: (sensitivity^2 / (2 sigma^2))-zCDP.
    Assumes: a query of `dimension` coordinates whose values are multiples of `grid`, as the noise is, and whose L2
        change between neighbors is at most `sensitivity`.
    """
    return DiscreteGaussian(sigma, sensitivity, dimension, grid)


@with_usage("it is given by its epsilon, as in exponential(epsilon=0.1)")
def exponential(epsilon: Numeric) -> PureDP:
    """Return the guarantee of an exponential mechanism run at `epsilon`.

    Theorem: McSherry and Talwar (2007).
    Assumes: scores weighted by exp(epsilon * score / (2 sensitivity)).
    """
    return PureDP(epsilon)


@with_usage("it is given by its epsilon, as in exponential_zcdp(epsilon=0.1)")
def exponential_zcdp(epsilon: Numeric) -> ZCDP:
    """Return the zCDP guarantee of an exponential mechanism, a quarter of what epsilon-DP alone would give.

    Theorem: epsilon-bounded range implies (epsilon^2/8)-zCDP (Cesar and Rogers (2021)).
    Assumes: as `exponential`: such a mechanism has range bounded by epsilon.
    """
    return ZCDP(tidy(read(epsilon, "exponential_zcdp(epsilon)") ** 2 / 8))


@with_usage("it takes one list or dictionary, as in parallel([PureDP(0.1), PureDP(0.2)])")
def parallel(parts: Mapping[str, Guarantee] | Sequence[Guarantee], *, data: str = "static") -> Parallel:
    """Return the guarantee of one mechanism on each of several disjoint parts of the data, as one step.

    `parts` holds a guarantee for each part. With people added or removed the step is priced at the dearest part,
    meter by meter; with people replaced, at the dearest two.

    Theorem: parallel composition (McSherry (2009)): neighbors differ in one part, or in two if a person moves.
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


@with_usage("it is given by how often it tells the truth, as in randomized_response(truth=0.75)")
def randomized_response(truth: Numeric, categories: int = 2) -> PureDP:
    """Return the guarantee of answering truthfully with probability `truth`, else another answer uniformly.

    Theorem: Warner (1965): epsilon = log(truth (categories - 1) / (1 - truth)).
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


@with_usage("a run is given as in subsampled_gaussian(sampling_rate=0.01, noise_multiplier=1.1, steps=100)")
def subsampled_gaussian(sampling_rate: Numeric, noise_multiplier: Numeric, steps: int = 1) -> Mechanism:
    """Return `steps` runs of a Poisson-subsampled Gaussian: priced by its name on a menu, or by its Rényi curve.

    Theorem: Mironov, Talwar and Zhang (2019) (the curve; it bounds both directions), and RDP composition.
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


@dataclass(frozen=True, slots=True)
class Noise:
    """The one argument of a mechanism that sets its noise; its other arguments are settings, known beforehand."""

    mechanism: Callable[..., Guarantee]
    parameter: str
    # The value at which nothing is revealed, from the settings; None where more of the parameter reveals less.
    silent: Callable[..., Fraction] | None = None

    @classmethod
    def of(cls, mechanism: object, field: str = "mechanism") -> Noise:
        """Return the noise of a mechanism function, or raise `InvalidArgument` if it is not one that has it."""
        found = NOISES.get(getattr(mechanism, "__name__", ""))
        if found is None or found.mechanism is not mechanism:
            raise InvalidArgument(
                f"{field} must be a function of odograph.mechanisms: {', '.join(NOISES)} (got {mechanism!r:.80})"
            )
        return found

    @property
    def name(self) -> str:
        """The name of the mechanism."""
        return self.mechanism.__name__

    @property
    def kind(self) -> type[Guarantee]:
        """The class of guarantee that the mechanism has."""
        kind: type[Guarantee] = inspect.signature(self.mechanism, eval_str=True).return_annotation
        return kind

    @property
    def settings(self) -> dict[str, bool]:
        """The arguments beside the noise, and whether each must be given."""
        arguments = inspect.signature(self.mechanism).parameters.values()
        return {one.name: one.default is one.empty for one in arguments if one.name != self.parameter}

    def read_settings(self, given: Mapping[str, object]) -> dict[str, int | float | str]:
        """Return the settings as they print, in the order of the mechanism; one that is wrong raises."""
        known = self.settings
        for name in given:
            if name == self.parameter:
                raise InvalidArgument(
                    f"{name} must not be given (got {given[name]!r:.80}): it is what is searched for"
                )
            if name not in known:
                has = f"has the settings {', '.join(known)}" if known else "has no settings"
                raise InvalidArgument(f"{self.name} {has} (got {name!r:.80})")
        for name, needed in known.items():
            if needed and name not in given:
                raise InvalidArgument(f"{self.name} needs {name}, such as {name}=0.01 (got {sorted(given)})")
        settings = {name: self._read_setting(name, given[name]) for name in known if name in given}
        self.mechanism(**{self.parameter: 0.5}, **settings)  # raises if a setting is not usable
        return settings

    def _read_setting(self, name: str, value: object) -> int | float | str:
        exact = read(value, f"{self.name}({name})", InvalidArgument)
        if not _SETTINGS[0] <= exact <= _SETTINGS[1]:
            raise InvalidArgument(f"{self.name}({name}) must be from 1e-100 to 1e100 (got {value!r:.80})")
        if exact.numerator.bit_length() + exact.denominator.bit_length() > _SETTING_BITS:
            raise InvalidArgument(f"{self.name}({name}) must be a number of fewer digits (got {value!r:.80})")
        if exact.denominator == 1:
            return int(exact)
        number = tidy(exact)
        return number if isinstance(number, float) else str(number)


_SETTINGS: Final = (Fraction(1, 10**100), Fraction(10**100))
_SETTING_BITS: Final = 500  # any float in that range, and the square of its ratio to any noise is kept exactly

NOISES: Final = {
    noise.name: noise
    for noise in (
        Noise(laplace, "scale"),
        Noise(laplace_zcdp, "scale"),
        Noise(gaussian, "sigma"),
        Noise(discrete_gaussian, "sigma"),
        Noise(exponential, "epsilon", lambda: Fraction(0)),
        Noise(exponential_zcdp, "epsilon", lambda: Fraction(0)),
        Noise(randomized_response, "truth", lambda categories=2: Fraction(1, categories)),
        Noise(subsampled_gaussian, "noise_multiplier"),
    )
}


def subsampled_gaussian_divergence(order: float, rate: float, noise: float) -> float:
    """Return the Rényi divergence of a Poisson-subsampled Gaussian at an order, rounded up; infinite if not known.

    The moment less 1 is `E g(x)` with `g(x) = x^order - 1 - order (x - 1) >= 0`, where x is the ratio of the
    densities. It has no cancellation: for an integer order it is a finite sum of positive terms, for others a smooth
    integral.

    Theorem: Mironov, Talwar and Zhang (2019): the divergence of the mixture from the Gaussian is the larger
        direction.
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
