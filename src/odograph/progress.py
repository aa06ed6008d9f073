"""A progress bar that needs nothing: for terminals and notebooks alike."""

from __future__ import annotations

import sys

__all__ = ["progress_bar"]

_WIDTH = 40


def progress_bar(done: int, expected: int) -> None:
    """Draw how far a solve has come, on standard error: pass it as `compile_policy(..., progress=progress_bar)`."""
    filled = _WIDTH * min(done, expected) // max(1, expected)
    sys.stderr.write(f"\rsolving [{'#' * filled}{'.' * (_WIDTH - filled)}] {done} of about {expected} rows ")
    sys.stderr.flush()
