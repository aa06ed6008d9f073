"""How often the loss of steps with two outcomes ever exceeds a limit: exact up to rounding, by recursion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def crossing(gain: float, loss: float, p_gain: float, limits: Sequence[float] | NDArray[np.float64]) -> float:
    """Return P(exists n: L_n > limits[n-1]) for independent steps: `gain` with p_gain, else `loss`."""
    alive, crossed = np.ones(1), 0.0  # alive[i]: i gains so far and no crossing yet
    for n, limit in enumerate(limits, start=1):
        alive = np.append(alive, 0.0) * (1 - p_gain) + np.insert(alive, 0, 0.0) * p_gain
        gains = np.arange(n + 1)
        over = gains * gain + (n - gains) * loss > limit
        crossed += math.fsum(alive[over])
        alive[over] = 0.0
    return crossed


def response_crossing(epsilon: float, limits: Sequence[float] | NDArray[np.float64]) -> float:
    """Return `crossing` for equal randomized responses."""
    return crossing(epsilon, -epsilon, 1 / (1 + math.exp(-epsilon)), limits)


def clock(epsilon: float, steps: int) -> NDArray[np.float64]:
    """Return the intrinsic times, on the paper's clock, of 1 to `steps` equal steps."""
    return np.arange(1, steps + 1, dtype=np.float64) * epsilon**2
