"""Pictures of an account's readings: a Bokeh chart, and a plain SVG for a page that runs no script."""

from __future__ import annotations

import math
from html import escape
from typing import Any, Final, NamedTuple

from bokeh.embed import json_item
from bokeh.models import BasicTickFormatter, ColumnDataSource, DatetimeTickFormatter, HoverTool, Range1d
from bokeh.models.annotations import Label, Span
from bokeh.plotting import figure

from odograph.service.dashboard.series import Line, Series

__all__ = ["chart", "picture"]

_WIDTH, _HEIGHT = 720, 300  # of the plain picture
_TALL: Final = 340  # pixels of the chart; the style sheet keeps as many free
_FEW: Final = 60  # points are marked while they can be told apart
_TOOLTIP: Final = (
    '<div style="color: #22272e; font: 13px system-ui, sans-serif">After step @step{0,0}: loss at most'
    " <b>@loss{0.0000}</b><br>@time{%F %T} UTC</div>"
)
_FONT, _SIZE = "system-ui, sans-serif", "13px"


class _Palette(NamedTuple):
    ink: str
    faint: str
    grid: str
    own: str
    others: tuple[str, ...]


_LIGHT: Final = _Palette("#22272e", "#57606a", "#e3e6ea", "#0067a5", ("#a15c00", "#00785a", "#8a4a7d", "#b0203a"))
_DARK: Final = _Palette("#e6e9ee", "#a3acb8", "#30363f", "#6cbcf0", ("#e8a33d", "#4cc3a0", "#dd9bc9", "#ff9aa2"))
_DASHES: Final = ("dotted", "dotdash", "dashdot", "2 6")  # as many as there are standard odometers


def _inks(palette: _Palette) -> str:
    """Return a palette's part of the plain picture's style."""
    lines = [f".line-{i}{{stroke:{hue}}}" for i, hue in enumerate((palette.own, *palette.others))]
    return (
        f"text{{fill:{palette.ink}}}.promise{{stroke:{palette.ink}}}.floor{{stroke:{palette.faint}}}{''.join(lines)}"
    )


# The picture has no ground of its own: it lies on the page's card, light or dark. However wide it is drawn, its text
# and lines are about as large.
_INKS: Final = (
    f"svg{{color-scheme:light dark}}text{{font:14px {_FONT}}}polyline{{fill:none;stroke-width:2.5}}"
    f".promise{{stroke-dasharray:6 4}}{_inks(_LIGHT)}@media(prefers-color-scheme:dark){{{_inks(_DARK)}}}"
    "@media(max-width:500px){text{font-size:30px}polyline{stroke-width:5}.promise{stroke-width:2}}"
    "@media(min-width:900px){text{font-size:10px}polyline{stroke-width:1.7}}"
)


def chart(found: Series, *, by_time: bool, dark: bool) -> dict[str, Any]:
    """Return the chart as the document that `Bokeh.embed.embed_item` takes."""
    palette = _DARK if dark else _LIGHT
    plot = figure(
        height=_TALL + 24 * (len(found.lines) - 1),  # the legend has a row for each
        sizing_mode="stretch_width",
        x_axis_type="datetime" if by_time else "linear",
        y_range=Range1d(start=0.0, end=_top(found)),
        toolbar_location=None,
        tools="",
    )
    at = "time" if by_time else "step"
    for line, hue, dash in zip(found.lines[1:], palette.others, _DASHES, strict=False):
        source = _source(found, line)
        plot.step(
            at, "loss", source=source, mode="after", color=hue, line_dash=dash, line_width=2, legend_label=line.name
        )
    _draw_own(plot, _source(found, found.lines[0]), found.lines[0].name, at, palette.own)
    plot.add_layout(
        Span(location=found.promise, dimension="width", line_color=palette.ink, line_dash="dashed", line_width=1.5)
    )
    plot.add_layout(
        Label(
            x=8,
            y=found.promise,
            x_units="screen",
            y_offset=4,
            text=_promise(found),
            text_color=palette.ink,
            text_font=_FONT,
            text_font_size=_SIZE,
        )
    )
    _style(plot, palette, by_time=by_time)
    return {**json_item(plot)}


def _source(found: Series, line: Line) -> ColumnDataSource:
    losses = [math.nan if loss is None else loss for loss in line.losses]
    return ColumnDataSource({"step": [*found.steps], "time": [*found.times], "loss": losses})


def _draw_own(plot: figure, source: ColumnDataSource, name: str, at: str, hue: str) -> None:
    """Draw the policy's own line, with a tooltip at each of its points."""
    plot.varea_step(at, y1=0, y2="loss", source=source, step_mode="after", fill_color=hue, fill_alpha=0.12)
    plot.step(at, "loss", source=source, mode="after", color=hue, line_width=2.5, legend_label=name)
    if len(source.data["loss"]) <= _FEW:
        plot.scatter(at, "loss", source=source, color=hue, size=6)
    # Steps do not answer to the pointer. An unseen line does, wherever along it the pointer is.
    unseen = plot.line(at, "loss", source=source, line_alpha=0.0)
    plot.add_tools(
        HoverTool(
            renderers=[unseen],
            line_policy="nearest",
            mode="vline",
            tooltips=_TOOLTIP,
            formatters={"@time": "datetime"},
        )
    )


def _style(plot: Any, palette: _Palette, *, by_time: bool) -> None:  # noqa: ANN401  Bokeh's splattable lists have no type
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = palette.grid
    plot.xaxis.axis_label = "time (UTC)" if by_time else "steps"
    plot.yaxis.axis_label = "loss at most"
    if by_time:
        plot.xaxis.formatter = DatetimeTickFormatter(
            seconds="%H:%M:%S",
            minsec="%H:%M:%S",
            minutes="%H:%M",
            hourmin="%H:%M",
            hours="%H:%M",
            days="%d %b",
            months="%b %Y",
            years="%Y",
        )
    else:
        plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        plot.xaxis.ticker.min_interval = 1
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = palette.grid
    plot.axis.minor_tick_line_color = None
    for name in ("major_label", "axis_label"):
        setattr(plot.axis, f"{name}_text_color", palette.faint)
        setattr(plot.axis, f"{name}_text_font", _FONT)
        setattr(plot.axis, f"{name}_text_font_size", _SIZE)
    plot.axis.axis_label_text_font_style = "normal"
    plot.add_layout(plot.legend[0], "above")  # inside it would cover the lines
    plot.legend.location = "top_left"
    plot.legend.padding = plot.legend.margin = 2
    plot.legend.background_fill_alpha = plot.legend.border_line_alpha = 0.0
    plot.legend.label_text_color = palette.ink
    plot.legend.label_text_font = _FONT
    plot.legend.label_text_font_size = _SIZE


def _promise(found: Series) -> str:
    return f"promise: epsilon {found.promise:g}"


def _top(found: Series) -> float:
    finite = [loss for line in found.lines for loss in line.losses if loss is not None]
    return max([found.promise, *finite]) * 1.12


def picture(found: Series, *, by_time: bool) -> str:
    """Return the lines and the promise as a small SVG."""
    top = _top(found)
    drawn = [_polyline(found, line, i, top, by_time=by_time) for i, line in enumerate(found.lines)]
    level = _HEIGHT * (1 - found.promise / top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {_WIDTH + 16} {_HEIGHT + 16}">'
        f"<style>{_INKS}</style>"
        f'<path class="promise" d="M0 {level:.1f}H{_WIDTH}"/><text x="4" y="{level - 6:.1f}">{_promise(found)}</text>'
        f'<path class="floor" d="M0 {_HEIGHT}H{_WIDTH}"/>'
        f"{''.join(reversed(drawn))}</svg>"
    )


def _polyline(found: Series, line: Line, place: int, top: float, *, by_time: bool) -> str:
    """Draw one line in steps: a reading holds until the next charge."""
    at = found.times if by_time else found.steps
    wide = (at[-1] - at[0]) or 1 if at else 1
    corners: list[str] = []
    height = 0.0
    for x, loss in zip(at, line.losses, strict=True):
        if loss is not None:
            left, below = _WIDTH * (x - at[0]) / wide, _HEIGHT * (1 - loss / top)
            corners += [f"{left:.1f},{height:.1f}"] if corners else []
            corners.append(f"{left:.1f},{below:.1f}")
            height = below
    dash = "" if line.licensed else ' stroke-dasharray="3 4"'
    title = f"<title>{escape(line.name)}</title>"
    return f'<polyline class="line-{place}" points="{" ".join(corners)}"{dash}>{title}</polyline>'
