"""Certified budgets of the exact rule for common targets, at fine resolution.

Written by tools/build_table.py. Each row: epsilon, delta, the units N; the unit follows from epsilon
(`exact.family_unit` at `FINENESS`). For pure and Gaussian steps of any size together.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FINENESS", "ROWS", "SOLVER"]

SOLVER: Final = 1
FINENESS: Final = 25

ROWS: Final[tuple[tuple[str, str, int], ...]] = (
    ("0.1", "1e-6", 18202),
    ("0.2", "1e-6", 16680),
    ("0.5", "1e-6", 14872),
    ("0.5", "1e-5", 19301),
    ("1", "1e-6", 13562),
    ("1", "1e-5", 17215),
    ("2", "1e-6", 12196),
    ("2", "1e-5", 15134),
    ("3", "1e-6", 11336),
    ("3", "1e-5", 13862),
    ("4", "1e-6", 10661),
    ("5", "1e-6", 10132),
    ("8", "1e-6", 8939),
    ("10", "1e-6", 8341),
    ("20", "1e-6", 6414),
)
