"""The history of an account's readings as numbers, as a Bokeh chart, and as an SVG for pages without JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import Any, Final, NamedTuple

from bokeh.embed import json_item
from bokeh.models import BasicTickFormatter, ColumnDataSource, DatetimeTickFormatter, HoverTool, Range1d
from bokeh.models.annotations import BoxAnnotation, Label, Span
from bokeh.models.labeling import NoOverlap
from bokeh.plotting import figure

from odograph.core.gate import Totals, decide
from odograph.core.guarantees import GDP, Guarantee, PureDP
from odograph.core.odometers import Odometer
from odograph.core.planning import AccountState, Kind, largest
from odograph.core.policy import Compiled, other_odometers
from odograph.core.theory import least_reading_at_one_moment
from odograph.errors import InvalidArgument, UnprovenComposition
from odograph.ledger.ledger import Ledger, LedgerAccount, State, states
from odograph.service import visibility
from odograph.service.auth import Caller

__all__ = [
    "MAX_ENTRIES",
    "MAX_POINTS",
    "LimitReading",
    "ReadingHistory",
    "ReadingLine",
    "account_history",
    "bokeh_chart",
    "odometer_label",
    "reading_at_limit",
    "reading_history",
    "svg_chart",
]

MAX_POINTS: Final = 400  # of a line; more would not be visible
MAX_ENTRIES: Final = 20_000  # read back from the newest; the page tells if older ones are left out


# Numbers


class ReadingLine(NamedTuple):
    """The readings of one odometer; None where it has no finite bound."""

    name: str
    covered: bool  # by the guarantee: true for the policy's odometer only
    losses: tuple[float | None, ...]


class LimitReading(NamedTuple):
    """What readings come to when a whole budget is spent in many small steps."""

    usual: float  # of the policy's odometer
    least: float | None  # of any odometer: Gaussian noise really loses this much, with the reading's delta


_SMALL_STEPS: Final = 1000  # into which a whole budget is divided
_ABOVE: Final = 1.001  # times the promise; what is less above it cannot be seen in a chart


@lru_cache(maxsize=256)
def reading_at_limit(compiled: Compiled) -> LimitReading | None:
    """Return what readings come to at the limit of a policy; None if that is not above the promised epsilon.

    A promise of (epsilon, delta) allows losses above epsilon, weighed by how far above. A reading is a level that the
    loss exceeds with probability delta at most, at all times at once. So near the limit it is larger than epsilon.

    Theorem: by calculation: the privacy loss of Gaussian noise of mu-GDP has the law N(mu^2/2, mu^2), and no reading
        is below its
    quantile.
    Assumes: nothing is decided by the result; it is shown beside the chart.
    """
    policy = compiled.policy
    for kind in (GDP, PureDP):
        spent = _spent_at_limit(compiled, kind)
        if policy.epsilon is None or spent is None:
            continue
        step, totals = spent
        reading = compiled.reading(totals)
        if not float(policy.epsilon) * _ABOVE < reading.loss < math.inf:
            return None
        least = None
        if isinstance(step, GDP) and 0.0 < reading.delta < 1.0:
            least = least_reading_at_one_moment(_SMALL_STEPS * float(step.mu) ** 2, reading.delta)
        return LimitReading(reading.loss, least)
    return None


def _spent_at_limit(compiled: Compiled, kind: Kind[Guarantee]) -> tuple[Guarantee, Totals] | None:
    """Return the largest guarantee of a kind that fits many times, and the totals after as many."""
    try:
        step = largest([AccountState("", compiled, compiled.start)], kind, _SMALL_STEPS)
    except (InvalidArgument, UnprovenComposition):
        return None
    if step is None:
        return None
    return step, decide(compiled.meters, compiled.start, compiled.price(step).times(_SMALL_STEPS)).totals_after


class ReadingHistory(NamedTuple):
    """Readings after each charge that was not voided, oldest first; the policy's odometer is the first line."""

    account: str
    promise: float | None  # the promised epsilon
    limit: LimitReading | None  # what readings come to when the budget is used up, if that is above the promise
    steps: tuple[int, ...]
    times: tuple[int, ...]  # milliseconds since 1970
    lines: tuple[ReadingLine, ...]
    left_out: int  # how many older entries are not included


def account_history(ledger: Ledger, caller: Caller, name: str, *, compare: bool) -> ReadingHistory:
    """Return the readings of an account that the caller may see."""
    account = visibility.visible_account(ledger, caller, name)
    balance = ledger.backend.balances([name])[name]  # totals and sequence of the same moment
    return reading_history(account, balance.totals, balance.sequence, compare=compare)


def reading_history(account: LedgerAccount, totals: Totals, sequence: int, *, compare: bool) -> ReadingHistory:
    """Return the readings of the policy's odometer up to an entry, with `compare` also those of other odometers."""
    policy = account.policy
    points = _thin(states(account, totals, sequence, MAX_ENTRIES))
    name = odometer_label(policy.odometer) if policy.delta_odometer else "sum of epsilons"
    lines = [ReadingLine(f"{name} (policy's odometer)", covered=True, losses=_losses(account, points, None))]
    for other in other_odometers(policy) if compare else ():
        losses = _losses(account, points, other)
        if losses and losses[-1] is not None:  # skip odometers without a finite reading
            lines.append(ReadingLine(f"{odometer_label(other)} (informational)", covered=False, losses=losses))
    return ReadingHistory(
        account.name,
        None if policy.epsilon is None else float(policy.epsilon),
        reading_at_limit(account.compiled),
        tuple(state.totals.steps for state in points),
        tuple(state.time // 1000 for state in points),
        tuple(lines),
        max(0, sequence + 1 - MAX_ENTRIES),
    )


def _thin(points: Sequence[State]) -> list[State]:
    """Return at most `MAX_POINTS` of the states, evenly spaced, including the first and the last."""
    if len(points) <= MAX_POINTS:
        return [*points]
    last = len(points) - 1
    return [points[i * last // (MAX_POINTS - 1)] for i in range(MAX_POINTS)]


def _losses(account: LedgerAccount, points: Sequence[State], odometer: Odometer | None) -> tuple[float | None, ...]:
    losses = [
        account.compiled.reading(state.totals, odometer).loss if state.totals.steps else 0.0 for state in points
    ]
    return tuple(loss if math.isfinite(loss) else None for loss in losses)


def odometer_label(odometer: Odometer) -> str:
    """Return the name of an odometer in words."""
    return odometer.kind.replace("-", " ")


# Drawing


_WIDTH, _HEIGHT = 720, 300  # of the SVG, in its own units
_CHART_HEIGHT: Final = 340  # pixels; the style sheet reserves as many
_MAX_MARKED_POINTS: Final = 60  # with more points, markers would overlap
_TOOLTIP: Final = (
    '<div style="color: #22272e; font: 13px system-ui, sans-serif">After step @step{0,0}: loss at most'
    " <b>@loss{0.0000}</b><br>@time{%F %T} UTC</div>"
)
_FONT, _SIZE = "system-ui, sans-serif", "13px"
_BAND: Final = 0.13  # opacity of the band between the promise and what is usual at the limit


class _Palette(NamedTuple):
    ink: str
    faint: str
    grid: str
    own: str
    others: tuple[str, ...]


_LIGHT: Final = _Palette("#22272e", "#57606a", "#e3e6ea", "#0067a5", ("#a15c00", "#00785a", "#8a4a7d", "#b0203a"))
_DARK: Final = _Palette("#e6e9ee", "#a3acb8", "#30363f", "#6cbcf0", ("#e8a33d", "#4cc3a0", "#dd9bc9", "#ff9aa2"))
_DASHES: Final = ("dotted", "dotdash", "dashdot", "2 6")  # as many as there are standard odometers


def _svg_colors(palette: _Palette) -> str:
    """Return the style rules of the SVG that depend on the palette."""
    lines = [f".line-{i}{{stroke:{color}}}" for i, color in enumerate((palette.own, *palette.others))]
    return (
        f"text{{fill:{palette.ink}}}.promise{{stroke:{palette.ink}}}.floor,.usual{{stroke:{palette.faint}}}"
        f".band{{fill:{palette.faint};fill-opacity:{_BAND}}}{''.join(lines)}"
    )


# The SVG has no background: it is shown on the page's card, light or dark. Media queries keep the size of text and
# lines about the same at every width.
_SVG_STYLE: Final = (
    f"svg{{color-scheme:light dark}}text{{font:14px {_FONT}}}polyline{{fill:none;stroke-width:2.5}}"
    f".promise{{stroke-dasharray:6 4}}.usual{{stroke-dasharray:2 4}}{_svg_colors(_LIGHT)}"
    f"@media(prefers-color-scheme:dark){{{_svg_colors(_DARK)}}}"
    "@media(max-width:500px){text{font-size:30px}polyline{stroke-width:5}.promise,.usual{stroke-width:2}}"
    "@media(min-width:900px){text{font-size:10px}polyline{stroke-width:1.7}}"
)


def bokeh_chart(history: ReadingHistory, *, by_time: bool, dark: bool) -> dict[str, Any]:
    """Return the chart as the JSON document for `Bokeh.embed.embed_item`."""
    palette = _DARK if dark else _LIGHT
    plot = figure(
        height=_CHART_HEIGHT + 24 * (len(history.lines) - 1),  # one row of the legend per line
        sizing_mode="stretch_width",
        x_axis_type="datetime" if by_time else "linear",
        y_range=Range1d(start=0.0, end=_top(history)),
        toolbar_location=None,
        tools="",
    )
    if not by_time and not history.steps[-1]:
        plot.x_range = Range1d(start=0, end=1)  # around a single point there would be steps below 0
    x = "time" if by_time else "step"
    for line, color, dash in zip(history.lines[1:], palette.others, _DASHES, strict=False):
        source = _source(history, line)
        plot.step(
            x, "loss", source=source, mode="after", color=color, line_dash=dash, line_width=2, legend_label=line.name
        )
    _draw_policy_line(plot, _source(history, history.lines[0]), history.lines[0].name, x, palette.own)
    if history.promise is not None:
        _draw_level(plot, history.promise, _promise_label(history.promise), palette, is_promise=True)
    if history.promise is not None and history.limit is not None:
        band = BoxAnnotation(bottom=history.promise, top=history.limit.usual, level="underlay", line_color=None)
        band.fill_color, band.fill_alpha = palette.faint, _BAND
        plot.add_layout(band)
        _draw_level(plot, history.limit.usual, _limit_label(history.limit), palette, is_promise=False)
    _style(plot, palette, by_time=by_time)
    return {**json_item(plot)}


def _draw_level(plot: figure, level: float, text: str, palette: _Palette, *, is_promise: bool) -> None:
    """Draw a level with its label: the promise below its line, and what is usual at the limit above its own."""
    color, dash = (palette.ink, "dashed") if is_promise else (palette.faint, "dotted")
    plot.add_layout(Span(location=level, dimension="width", line_color=color, line_dash=dash, line_width=1.5))
    label = Label(x=8, y=level, x_units="screen", y_offset=-4 if is_promise else 4, text=text)
    label.text_baseline = "top" if is_promise else "bottom"
    label.text_color, label.text_font, label.text_font_size = palette.ink, _FONT, _SIZE
    plot.add_layout(label)


def _source(history: ReadingHistory, line: ReadingLine) -> ColumnDataSource:
    losses = [math.nan if loss is None else loss for loss in line.losses]
    return ColumnDataSource({"step": [*history.steps], "time": [*history.times], "loss": losses})


def _draw_policy_line(plot: figure, source: ColumnDataSource, name: str, x: str, color: str) -> None:
    """Draw the line of the policy's odometer, with a tooltip at each of its points."""
    plot.varea_step(x, y1=0, y2="loss", source=source, step_mode="after", fill_color=color, fill_alpha=0.12)
    plot.step(x, "loss", source=source, mode="after", color=color, line_width=2.5, legend_label=name)
    if len(source.data["loss"]) <= _MAX_MARKED_POINTS:
        plot.scatter(x, "loss", source=source, color=color, size=6)
    # Bokeh's step glyph has no hover support; an invisible line does, along its whole length.
    invisible = plot.line(x, "loss", source=source, line_alpha=0.0)
    plot.add_tools(
        HoverTool(
            renderers=[invisible],
            line_policy="nearest",
            mode="vline",
            tooltips=_TOOLTIP,
            formatters={"@time": "datetime"},
        )
    )


def _style(plot: Any, palette: _Palette, *, by_time: bool) -> None:  # noqa: ANN401  Bokeh's list-like axis properties are untyped
    plot.background_fill_color = plot.border_fill_color = plot.outline_line_color = None
    plot.xgrid.grid_line_color = None
    plot.ygrid.grid_line_color = palette.grid
    plot.xaxis.axis_label = "time (UTC)" if by_time else "steps"
    plot.yaxis.axis_label = "loss at most"
    if by_time:
        plot.xaxis.formatter = DatetimeTickFormatter(
            microseconds="%H:%M:%S",
            milliseconds="%H:%M:%S",
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
    plot.xaxis.major_label_policy = NoOverlap(min_distance=8)  # on a phone there is room for few of them
    plot.axis.axis_line_color = plot.axis.major_tick_line_color = palette.grid
    plot.axis.minor_tick_line_color = None
    for name in ("major_label", "axis_label"):
        setattr(plot.axis, f"{name}_text_color", palette.faint)
        setattr(plot.axis, f"{name}_text_font", _FONT)
        setattr(plot.axis, f"{name}_text_font_size", _SIZE)
    plot.axis.axis_label_text_font_style = "normal"
    plot.add_layout(plot.legend[0], "above")  # inside the plot it would cover the lines
    plot.legend.location = "top_left"
    plot.legend.padding = plot.legend.margin = 2
    plot.legend.glyph_width = 16
    plot.legend.background_fill_alpha = plot.legend.border_line_alpha = 0.0
    plot.legend.label_text_color = palette.ink
    plot.legend.label_text_font = _FONT
    plot.legend.label_text_font_size = "12px"  # the longest fits a phone


def _promise_label(promise: float) -> str:
    return f"promise: epsilon {promise:g}"


def _limit_label(limit: LimitReading) -> str:
    return f"usual once used up: {limit.usual:.3g}"


def _top(history: ReadingHistory) -> float:
    finite = [loss for line in history.lines for loss in line.losses if loss is not None]
    levels = [history.promise or 0.0, history.limit.usual if history.limit else 0.0]
    return (max([*levels, *finite]) or 1.0) * 1.12


def svg_chart(history: ReadingHistory, *, by_time: bool) -> str:
    """Return the lines and the promised epsilon as a small SVG."""
    top = _top(history)
    polylines = [_polyline(history, line, i, top, by_time=by_time) for i, line in enumerate(history.lines)]
    levels = ""
    if history.promise is not None:
        level = _HEIGHT * (1 - history.promise / top)
        if history.limit is not None:
            usual = _HEIGHT * (1 - history.limit.usual / top)
            levels = (
                f'<path class="band" d="M0 {usual:.1f}H{_WIDTH}V{level:.1f}H0z"/>'
                f'<path class="usual" d="M0 {usual:.1f}H{_WIDTH}"/>'
                f'<text x="4" y="{usual:.1f}" dy="-.35em">{_limit_label(history.limit)}</text>'
            )
        levels += (
            f'<path class="promise" d="M0 {level:.1f}H{_WIDTH}"/>'
            f'<text x="4" y="{level:.1f}" dy="1.1em">{_promise_label(history.promise)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {_WIDTH + 16} {_HEIGHT + 16}">'
        f"<style>{_SVG_STYLE}</style>{levels}"
        f'<path class="floor" d="M0 {_HEIGHT}H{_WIDTH}"/>'
        f"{''.join(reversed(polylines))}</svg>"
    )


def _polyline(history: ReadingHistory, line: ReadingLine, index: int, top: float, *, by_time: bool) -> str:
    """Draw one line as a step function: a reading holds until the next charge."""
    xs = history.times if by_time else history.steps
    width = (xs[-1] - xs[0]) or 1 if xs else 1
    corners: list[str] = []
    height = 0.0
    for x, loss in zip(xs, line.losses, strict=True):
        if loss is not None:
            left, below = _WIDTH * (x - xs[0]) / width, _HEIGHT * (1 - loss / top)
            corners += [f"{left:.1f},{height:.1f}"] if corners else []
            corners.append(f"{left:.1f},{below:.1f}")
            height = below
    dash = "" if line.covered else ' stroke-dasharray="3 4"'
    title = f"<title>{escape(line.name)}</title>"
    return f'<polyline class="line-{index}" points="{" ".join(corners)}"{dash}>{title}</polyline>'
