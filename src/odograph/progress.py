"""A progress bar that needs nothing: for terminals and notebooks alike."""

from __future__ import annotations

import sys

__all__ = ["progress_bar"]

_WIDTH = 40


def progress_bar(done: int, expected: int) -> None:
    """Draw how far a long computation has come, on standard error: pass it as `progress=progress_bar`."""
    part = min(done, expected) / max(1, expected)
    filled = int(_WIDTH * part)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {part:4.0%} ")
    sys.stderr.flush()
