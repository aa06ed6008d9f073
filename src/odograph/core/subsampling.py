"""A menu of Poisson-subsampled Gaussians, for private training with adaptive settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from odograph.core.exact import blocks_alone
from odograph.core.gaussian import largest_mu
from odograph.core.menu import MenuItem, subsampled_gaussian_losses
from odograph.core.units import Numeric, read
from odograph.errors import InvalidGuarantee, InvalidPolicy

__all__ = ["sampling_settings", "subsampled_gaussian_menu", "subsampled_gaussian_name"]

_BLOCKS: Final = range(400, 1101)  # how many blocks an item should get alone: enough to adapt, few to solve
_STEP_PARTS: Final = 16  # grid cells in one step's share of the loss's deviation: costs .1% of the steps


def subsampled_gaussian_name(rate: float, noise: float) -> str:
    """Return the name under which a menu lists the mechanism."""
    return f"subsampled_gaussian(sampling_rate={rate!r}, noise_multiplier={noise!r})"


def sampling_settings(sampling_rate: Numeric, noise_multiplier: Numeric) -> tuple[float, float]:
    """Return the settings as floats; a rate outside (0, 1] or no noise raises."""
    rate = read(sampling_rate, "sampling_rate")
    noise = read(noise_multiplier, "noise_multiplier")
    if not 0 < rate <= 1:
        raise InvalidGuarantee(f"sampling_rate must be above 0 and at most 1, and {sampling_rate!r} is not")
    if noise == 0:
        raise InvalidGuarantee("noise_multiplier must be above 0: without noise there is no privacy, at any price")
    return float(rate), float(noise)


def subsampled_gaussian_menu(
    epsilon: Numeric, delta: Numeric, settings: Iterable[tuple[Numeric, Numeric]]
) -> tuple[MenuItem, ...]:
    """Return menu items for the given (sampling rate, noise multiplier) settings, in blocks of balanced size.

    Each item alone would get between 400 and 1100 blocks at the target, about as many as every other; where a
    target has room for fewer steps than that, a block is a single step.

    Theorem: as `subsampled_gaussian_losses`; how steps are grouped into blocks does not matter for validity.
    Assumes: Poisson sampling, add/remove neighbours; the settings are fixed when the policy is made.
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
    directions = (remove.composed(block), add.composed(block))
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
    """How unlike the items' numbers of blocks are, if each gets about `count`."""
    blocks = [alone / max(1, round(alone / count)) for alone in steps]
    return max(blocks) / min(blocks)
