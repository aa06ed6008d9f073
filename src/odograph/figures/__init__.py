"""The figures of the paper, and one that it lacks: the numbers in `panels`, the pictures in `draw`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from odograph.errors import MissingExtra
from odograph.figures.panels import PANELS, Curve, Panel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["PANELS", "Curve", "Panel", "draw_all"]


def draw_all(folder: Path | str, names: Iterable[str] | None = None) -> list[Path]:
    """Write the named panels, or all of them, as PNG, SVG and CSV, and return the files."""
    try:
        draw = import_module("odograph.figures.draw")
    except ModuleNotFoundError as problem:
        raise MissingExtra("figures are drawn with matplotlib; pip install 'odograph[figures]'") from problem
    files: list[Path] = draw.draw_all(folder, names)
    return files
