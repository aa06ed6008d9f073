"""Menu items: mechanisms whose privacy-loss distribution is known, for the exact rule."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odograph.core.valuefunction import Kernel, spread
from odograph.errors import InvalidPolicy

_NEGLIGIBLE: Final = 1e-20

__all__ = ["LossDistribution", "MenuItem", "item_kernel"]


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """A discrete privacy-loss distribution: mass at the losses (lowest + i) * step, and at infinity.

    It must dominate the mechanism's true one, as a "connect the dots" discretisation does.
    """

    lowest: int
    masses: NDArray[np.float64]
    infinite: float

    def __post_init__(self) -> None:
        masses = np.asarray(self.masses, dtype=np.float64)
        total = float(masses.sum()) + self.infinite
        if masses.ndim != 1 or masses.size == 0 or not np.all(np.isfinite(masses)) or bool((masses < 0).any()):
            raise InvalidPolicy("a loss distribution needs a nonempty list of finite nonnegative masses")
        if not (0.0 <= self.infinite <= 1.0 and abs(total - 1.0) < 1e-6):
            raise InvalidPolicy(f"the masses of a loss distribution must sum to 1, and sum to {total!r}")
        masses.setflags(write=False)
        object.__setattr__(self, "masses", masses)

    @property
    def deviation(self) -> float:
        """The standard deviation of the finite losses, in steps."""
        places = np.arange(self.masses.size)
        total = float(self.masses.sum())
        mean = float(self.masses @ places) / total
        return math.sqrt(float(self.masses @ (places - mean) ** 2) / total)

    def composed(self, steps: int) -> LossDistribution:
        """Return the distribution of `steps` independent runs, by direct convolution of nonnegative terms."""
        result: LossDistribution | None = None
        power, left = self, steps
        while left:
            if left & 1:
                result = power if result is None else _convolve(result, power)
            left >>= 1
            if left:
                power = _convolve(power, power)
        if result is None:
            raise InvalidPolicy(f"a block has at least one step, not {steps}")
        return result


@dataclass(frozen=True, eq=False)
class MenuItem:
    """A mechanism the exact rule may take: its name, how many runs make a block, the block's distribution.

    `directions` holds the losses of the two orders of a pair of neighbours (remove, add), on multiples of
    `step`. An item read back from a stored policy has only its name, block and digest: enough to check and to
    price, not enough to certify a new budget.
    """

    name: str
    block: int
    step: float = 0.0
    directions: tuple[LossDistribution, ...] = ()
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise InvalidPolicy(f"a menu item needs a name and a block of at least 1 step, not {self.block!r}")
        if not self.directions:
            return
        if len(self.directions) != 2 or not (math.isfinite(self.step) and self.step > 0.0):
            raise InvalidPolicy(f"menu item {self.name!r} needs two directions on a positive step")
        text = hashlib.sha256(f"{self.name}|{self.block}|{self.step!r}".encode())
        for losses in self.directions:
            text.update(f"|{losses.lowest}|{losses.infinite!r}|".encode() + losses.masses.tobytes())
        object.__setattr__(self, "digest", text.hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MenuItem) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<MenuItem {self.name} in blocks of {self.block}, {self.digest[:8]}>"


def _convolve(one: LossDistribution, two: LossDistribution) -> LossDistribution:
    masses = np.convolve(one.masses, two.masses)
    # n products and sums, each off by a rounding: padding up keeps the result dominating.
    masses *= 1.0 + min(one.masses.size, two.masses.size) * 2.0**-52
    # The far tail of large losses counts as infinite: it is longer than it is heavy.
    tail = np.cumsum(masses[::-1])[::-1]
    last = max(1, int(np.count_nonzero(tail > _NEGLIGIBLE)))
    infinite = (one.infinite + two.infinite + float(masses[last:].sum())) * (1.0 + 2.0**-50)
    return LossDistribution(one.lowest + two.lowest, masses[:last], min(1.0, infinite))


def item_kernel(losses: LossDistribution, loss_step: float, step: float, delta: Fraction) -> Kernel:
    """Return the kernel of a loss distribution on a grid of log-ratio step `step`.

    Theorem: spreading each mass linearly in x bounds Phi's expectation from above; a tail towards x = 0 may
        be counted as a reveal (Phi <= 1), a tail towards large x at the last kept point (Phi falls with x).
    Assumes: `losses` dominates the mechanism's privacy loss, for this direction of the pair of neighbours.
    """
    masses = losses.masses
    tiny = float(delta) * 1e-9
    # Losses are ascending: the top is the tail towards x = 0, the bottom the tail towards large x.
    upper = np.cumsum(masses[::-1])[::-1]
    lower = np.cumsum(masses)
    keep = (upper > tiny * 1e-3) & (lower > tiny)
    first, last = int(np.argmax(keep)), int(masses.size - np.argmax(keep[::-1]))
    kept = masses[first:last].copy()
    kept[0] += float(masses[:first].sum())
    reveal = losses.infinite + float(masses[last:].sum())
    shifts = -loss_step * np.arange(losses.lowest + first, losses.lowest + last, dtype=np.float64)
    return replace(spread(shifts, kept, step), reveal=reveal * (1.0 + 2.0**-40))
