"""Pictures: the paper's figures and ours (numbers in `panels`, pictures in `draw`), and those of one account."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from odograph.core.compiled import Compiled
from odograph.core.decide import Totals
from odograph.extras import load
from odograph.figures.card import account_card
from odograph.figures.panels import PANELS, Curve, Panel

__all__ = ["PANELS", "Curve", "Panel", "account_card", "blank_axes", "draw_account", "draw_all"]


def draw_all(folder: Path | str, names: Iterable[str] | None = None) -> list[Path]:
    """Write the named panels, or all of them, as PNG, SVG and CSV, and return the files."""
    files: list[Path] = _drawing("odograph.figures.draw").draw_all(folder, names)
    return files


def blank_axes() -> Any:  # noqa: ANN401  Matplotlib's axes
    """Return axes to draw an account on that belong to no window and no notebook: for a file."""
    return _drawing("odograph.figures.account").blank_axes()


def draw_account(compiled: Compiled, stood: Sequence[Totals], ax: Any = None) -> Any:  # noqa: ANN401  Matplotlib's axes
    """Draw an account's reading over intrinsic time, from where it stood, oldest first, and return the axes."""
    return _drawing("odograph.figures.account").draw_account(compiled, stood, ax=ax)


def _drawing(module: str) -> Any:  # noqa: ANN401  a module
    load("matplotlib")
    return import_module(module)
