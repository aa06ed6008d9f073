"""Certified budgets of the exact rule for common targets, at fine resolution. Written by tools/build_table.py.

Each row: epsilon, delta, the units N; the unit follows from epsilon (`exact.family_unit` at `FINENESS`). For
pure and Gaussian steps of any size together.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FINENESS", "ROWS", "SOLVER"]

SOLVER: Final = 1
FINENESS: Final = 25

ROWS: Final[tuple[tuple[str, str, int], ...]] = (
    ("0.1", "1e-6", 18067),
    ("0.2", "1e-6", 16587),
    ("0.5", "1e-6", 14817),
    ("1", "1e-6", 13525),
    ("2", "1e-6", 12176),
    ("3", "1e-6", 11321),
)
