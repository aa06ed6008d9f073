"""Panels to pictures: PNG and SVG, and beside them the same numbers as CSV."""

from __future__ import annotations

import csv
import math
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from odograph.errors import InvalidPolicy
from odograph.figures.panels import PANELS, Curve, Panel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["draw", "draw_all", "write_csv"]

# Okabe and Ito's palette, which people with any colour vision tell apart.
_BLUE, _RED, _GREEN, _ORANGE, _PINK, _SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
_BLACK, _GREY = "#222222", "#8A8A8A"
_HUES: Final = {
    "filter": _BLUE,
    "mixture": _ORANGE,
    "stitched": _GREEN,
    "rogers": _RED,
    "pointwise": _BLACK,
    "basic": _GREY,
    "paper": _ORANGE,
    "renyi": _PINK,
    "zcdp": _SKY,
    "exact": _BLUE,
    "optimum": _BLACK,
}
_FREE: Final = (_SKY, _ORANGE, _GREEN, _BLUE)

_STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 12.0,
    "axes.titlesize": 12.0,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so that pictures are the same everywhere
    "font.size": 10.0,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
    "svg.hashsalt": "odograph",  # without a fixed salt the same picture has new identifiers every time
}


def draw_all(folder: Path | str, names: Iterable[str] | None = None) -> list[Path]:
    """Write the named panels, or all of them, as PNG, SVG and CSV, and return the files."""
    chosen = list(PANELS) if names is None else list(names)
    for name in chosen:
        if name not in PANELS:
            raise InvalidPolicy(f"there is no figure {name!r}; there are {', '.join(PANELS)}")
    return [file for name in chosen for file in draw(PANELS[name](), Path(folder))]


def draw(panel: Panel, folder: Path) -> list[Path]:
    """Write one panel as PNG, SVG and CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, table = (folder / f"{panel.name}.{ending}" for ending in ("png", "svg", "csv"))
    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(panel.title)
        if panel.note:
            figure.supxlabel(panel.note, x=0.01, ha="left", fontsize=8.5, color="#555555")
        if len(panel.x) == 1:
            _bars(axes, panel)
        else:
            _curves(axes, panel)
        # No date and no version: the same numbers give the same file.
        figure.savefig(png, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    write_csv(panel, table)
    return [png, svg, table]


def write_csv(panel: Panel, path: Path) -> None:
    """Write the numbers of a panel: a row per x, a column per curve, every digit."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([panel.x_label, *(_one_line(curve) for curve in panel.curves)])
        writer.writerows(zip(panel.x, *(curve.values for curve in panel.curves), strict=True))


def _one_line(curve: Curve) -> str:
    label = " ".join(curve.label.split())
    return f"{label} ({curve.warning})" if curve.warning else label


def _curves(axes: Axes, panel: Panel) -> None:
    free = cycle(_FREE)
    for curve in panel.curves:
        colour = _HUES[curve.hue] if curve.hue else next(free)
        style = "--" if curve.warning else "-"
        axes.plot(panel.x, curve.values, label=_one_line(curve), color=colour, linestyle=style)
        if math.isinf(curve.values[0]):  # a dot where the bound begins
            begin = next(i for i, value in enumerate(curve.values) if math.isfinite(value))
            axes.plot(panel.x[begin], curve.values[begin], marker="o", markersize=4.5, color=colour)
    if "x" in panel.log_axes:
        _log(axes.set_xscale, axes.xaxis)
    if "y" in panel.log_axes:
        _log(axes.set_yscale, axes.yaxis)
    else:
        axes.set_ylim(0.0, panel.top)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(panel.x[0], panel.x[-1])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend()


def _log(set_scale: Callable[[str], object], axis: Axis) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5."""
    set_scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _bars(axes: Axes, panel: Panel) -> None:
    labels = [curve.label for curve in panel.curves]
    values = [curve.values[0] for curve in panel.curves]
    bars = axes.barh(labels, values, color=[_HUES[curve.hue] for curve in panel.curves], height=0.68)
    axes.bar_label(bars, fmt="%d", padding=4)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(panel.y_label)
