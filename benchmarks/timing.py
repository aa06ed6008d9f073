"""What the benchmarks share: processor time, and ratios with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["ratio", "seconds"]


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the median of a/b over the rounds, with the least and the largest."""
    ratios = sorted(a / b for a, b in pairs)
    return f"{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
