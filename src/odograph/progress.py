"""Progress of long work, and a bar to show it that needs nothing: for terminals and notebooks alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Progress", "progress_bar"]

# Told how much is done, and of about how much, 0 if that is not known: rows, entries; for people only percents.
Progress: TypeAlias = Callable[[int, int], None]

_WIDTH = 40


def progress_bar(done: int, expected: int) -> None:
    """Draw how far a long computation has come, on standard error: pass it as `progress=progress_bar`."""
    part = min(done, expected) / max(1, expected)
    filled = int(_WIDTH * part)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%} ")
    sys.stderr.flush()
