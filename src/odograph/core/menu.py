"""Menu items: mechanisms whose privacy-loss distribution is known, for the exact filter.

A distribution may come from any source that dominates the true one; `subsampled_gaussian_losses` computes that
of a Poisson-subsampled Gaussian by quadrature, with nonnegative terms only.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from odograph.core.guarantees import Mechanism
from odograph.core.value_iteration import Kernel, spread
from odograph.errors import InvalidArgument

__all__ = ["LossDistribution", "MenuItem", "subsampled_gaussian_losses"]

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

        Theorem: spreading each mass linearly in x bounds Phi's expectation from above; a tail towards x = 0 may
            be counted as a reveal (Phi <= 1), a tail towards large x at the last kept point (Phi falls with x).
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
        """Return the cost of `steps` runs of this mechanism; blocks are charged whole."""
        return Mechanism(self.name, steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MenuItem) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<MenuItem {self.name} in blocks of {self.block}, {self.digest[:8]}>"


def subsampled_gaussian_losses(rate: float, noise: float, step: float) -> tuple[LossDistribution, LossDistribution]:
    """Return the loss distributions (remove, add) of a Poisson-subsampled Gaussian, on multiples of `step`.

    Theorem: the pair (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2) dominates (Zhu, Dong, Wang 2022); masses
        spread linearly in x dominate it in turn ("connect the dots").
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
