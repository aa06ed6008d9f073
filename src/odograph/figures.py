"""Pictures: an account as an HTML card or a plot, and the figures of the paper as PNG, SVG and CSV.

Matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.compile import compile_policy
from odograph.core import odometers
from odograph.core.conversions import filter_time
from odograph.core.filters import ExactMeter
from odograph.core.fixed_point import SCALE
from odograph.core.gate import Totals
from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.meters import IntrinsicMeter
from odograph.core.odometers import Odometer
from odograph.core.planning import AccountState, how_many, standing, used
from odograph.core.policy import Compiled, Policy, other_odometers
from odograph.core.theory import kov_steps
from odograph.display import card, gauge, meters, paragraph, table
from odograph.errors import InvalidArgument, load_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

__all__ = [
    "PANELS",
    "Curve",
    "Mark",
    "Panel",
    "account_card",
    "blank_axes",
    "draw",
    "draw_account",
    "draw_all",
    "filter_odometers",
    "fingerprint",
    "lower_order_terms",
    "mixture_odometers",
    "original_and_new",
    "pointwise",
    "rates",
    "steps_at_one_size",
    "steps_by_size",
    "stitched_odometers",
    "windows",
    "write_csv",
]

# One account: an HTML card for notebooks, and a plot of its reading.

_SIZE: Final = (7.0, 4.2)  # inches
_MAX_POINTS: Final = 200  # of a curve; more would not be visible
_POLICY_COLOR: Final = "#0072B2"
_OTHER_COLORS: Final = ("#E69F00", "#009E73", "#56B4E9", "#CC79A7")


def account_card(  # noqa: PLR0913, PLR0917  the parts of a card
    name: str,
    compiled: Compiled,
    totals: Totals,
    largest: Guarantee | None,
    last: Sequence[tuple[str, str]],
    lifetime: str = "",
) -> str:
    """Return an account as HTML for a notebook: promise, gauge, meters, reading and last spends, latest first.

    The card is plain HTML and SVG: no script, no style sheet and no external resources.
    """
    policy = compiled.policy
    offer = f"; the largest like the last that fits: {largest.brief(offered=True)}" if largest else ""
    return card(
        name or "Accountant",
        paragraph(f"{policy.target} for each {policy.privacy_unit}"),
        *([paragraph(f"Lifetime promise: {lifetime}")] if lifetime else []),
        paragraph(f"{totals.steps:,} step{'s' * (totals.steps != 1)}{offer}"),
        meters(standing(compiled, totals).standing()),
        paragraph(compiled.reading(totals)),
        *([table(("last spends", ""), last)] if last else []),
        side=None if policy.is_unlimited else gauge(used(compiled, totals)),
    )


def blank_axes() -> Axes:
    """Return Matplotlib axes for a file: pyplot does not know their figure, so no display backend is chosen."""
    axes: Axes = load_extra("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained").subplots()
    return axes


def draw_account(compiled: Compiled, history: Sequence[Totals], ax: Any = None) -> Axes:  # noqa: ANN401  Matplotlib's axes
    """Plot an account's readings and its budget on Matplotlib axes and return the axes.

    `history` holds the totals after each charge, oldest first. The horizontal axis is intrinsic time, or the number
    of steps if a step has no intrinsic time (Rényi curves, mechanisms of a menu).
    """
    policy = compiled.policy
    # Through pyplot, so that a notebook shows the plot.
    if ax is None:
        ax = load_extra("matplotlib.pyplot").subplots(figsize=_SIZE, layout="constrained")[1]
    axes: Axes = ax
    states = _thin(history)
    time = compiled.index(IntrinsicMeter)
    timed = not history[-1].unpriced[time]
    times = [state.amounts[time] / SCALE if timed else float(state.steps) for state in states]
    for other, color in zip(other_odometers(policy), _OTHER_COLORS, strict=False):
        label = f"{_label(other)} (informational)"
        _plot_curve(axes, times, _losses(compiled, states, other), label, color=color, ls=":")
    own = _label(policy.odometer) if policy.delta_odometer else "sum of epsilons"
    losses = _losses(compiled, states, None)
    _plot_curve(axes, times, losses, f"{own} (policy's odometer)", color=_POLICY_COLOR, lw=2.2)
    if policy.epsilon is not None:
        _draw_promise(axes, float(policy.epsilon))
    axes.set_xlabel("intrinsic time" if timed else "steps")
    axes.set_ylabel("loss at most")
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    if axes.get_lines():
        axes.legend(loc="lower right", frameon=False, fontsize="small")
    return axes


def _draw_promise(axes: Axes, epsilon: float) -> None:
    """Draw the promised epsilon, which a reading may exceed, as a dashed line."""
    axes.axhline(epsilon, color="#222222", lw=1.2, ls="--")
    axes.annotate(
        f"promise: epsilon {epsilon:g}",
        (0.01, epsilon),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        va="bottom",
        fontsize="small",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )


def _thin(states: Sequence[Totals]) -> list[Totals]:
    stride = math.ceil(len(states) / _MAX_POINTS)
    return [*states[:-1:stride], states[-1]]


def _losses(compiled: Compiled, states: Sequence[Totals], odometer: Odometer | None) -> list[float]:
    return [compiled.reading(state, odometer).loss if state.steps else 0.0 for state in states]


def _plot_curve(axes: Axes, times: Sequence[float], losses: Sequence[float], label: str, **style: Any) -> None:
    """Plot the finite readings; skip a curve that ends without a finite one."""
    if math.isfinite(losses[-1]):
        finite = [(time, loss) for time, loss in zip(times, losses, strict=True) if math.isfinite(loss)]
        axes.plot([time for time, _ in finite], [loss for _, loss in finite], label=label, **style)


def _label(odometer: Odometer) -> str:
    return odometer.kind.replace("-", " ")


# The figures of the paper, and three of our own. The numbers come from one pure function per panel; docs/figures.md
# says which parameters the paper gives. Odometers are drawn as the paper prints them (two-sided mixture, rounded
# stitching constants), with its errata corrected: y* (E1) and the second branch of Rogers et al. (E6). Intrinsic time
# in these panels is the paper's, V = sum of epsilon^2, and all steps are pure.

_Array: TypeAlias = NDArray[np.float64]

_PANEL_SIZE: Final = (7.0, 4.8)  # inches
_LEGEND: Final[dict[str, Any]] = {"ncols": 2, "fontsize": 9.0, "handlelength": 3.4, "columnspacing": 1.5}
_LEGEND_BELOW: Final = 0.47  # inches below the x axis: under its numbers and its label

DELTA: Final = 1e-6  # delta' of every odometer, and delta of the policy whose steps are counted
EPSILON: Final = 1.0  # of that policy
PEOPLE: Final = 1e6  # the size of the data set in the odometer of Rogers et al.
STEP: Final = 0.01  # of the bars

_TIME: Final = "intrinsic time V, the sum of squared epsilons (nats²)"
_LEVEL: Final = "δ' = 10⁻⁶"
_LOSS: Final = "bound on the privacy loss (nats)"
_STEP_SIZE: Final = "epsilon of one step (nats)"
_FILTERS: Final = MappingProxyType(
    {
        "basic": "basic composition",
        "paper": "the paper's filter",
        "renyi": "Rényi filter",
        "zcdp": "zCDP filter",
        "exact": "exact filter",
    }
)
_OPTIMUM: Final = "non-adaptive optimum"

# The palette of Okabe and Ito, distinguishable with any color vision.
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

# Curves differ by their dashes too, so that they can be told apart without color.
_SOLID, _DASHED, _SHORT, _DOTTED = "solid", (0, (7.0, 2.0)), (0, (2.4, 1.4)), (0, (1.1, 1.6))
_DASH_DOT, _DASH_DOT_DOT = (0, (6.0, 1.6, 1.2, 1.6)), (0, (6.0, 1.5, 1.2, 1.5, 1.2, 1.5))
_MANY_DECADES: Final = 4.0  # of a logarithmic axis
_Dashes: TypeAlias = str | tuple[int, tuple[float, ...]]
_DASHES: Final[dict[str, _Dashes]] = {
    "filter": _SOLID,
    "mixture": _DASHED,
    "stitched": _DASH_DOT,
    "rogers": _SHORT,
    "pointwise": _DOTTED,
    "basic": _DASH_DOT_DOT,
    "paper": _DASHED,
    "renyi": _SHORT,
    "zcdp": _DASH_DOT,
    "exact": _SOLID,
}
_FREE_DASHES: Final = (_DASH_DOT_DOT, _DASHED, _DASH_DOT, _SOLID)

_STYLE: Final[dict[Any, Any]] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 12.0,
    "axes.titlesize": 12.0,
    "font.family": "DejaVu Sans",  # ships with Matplotlib, so that figures are the same everywhere
    "font.size": 10.0,
    "grid.color": "#E4E4E4",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
    "svg.hashsalt": "odograph",  # a fixed salt, so that identifiers are the same in every run
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One line or bar: a value for each x of its panel, infinite where there is no bound."""

    label: str
    values: tuple[float, ...]
    hue: str = ""  # curves of the same hue have the same color and dashes in all panels; "" takes the next free ones
    warning: str = ""  # why the curve is not a guarantee


@dataclass(frozen=True, slots=True)
class Mark:
    """A point of a panel that is marked with a dot, and with a text below it."""

    x: float
    y: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """The numbers of one figure: a bar chart if there is one x, otherwise a plot of curves."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    curves: tuple[Curve, ...]
    note: str = ""  # printed below the figure
    log_axes: str = ""  # "x", "xy" or none
    top: float | None = None  # of the y axis
    percent: bool = False  # y is a share of 1
    marks: tuple[Mark, ...] = ()


def lower_order_terms() -> Panel:
    """Figure 1a: what one step adds below the leading square root."""
    x = np.linspace(0.0, 3.0, 301)
    curves = (
        Curve("the paper's filter: ε²/2", _floats(x * x / 2.0), "filter"),
        Curve("advanced composition: ε tanh(ε/2)", _floats(x * np.tanh(x / 2.0)), "pointwise"),
    )
    title = "Lower-order terms of the filter and of advanced composition"
    return Panel(
        "fig1a-lower-order-terms", title, _STEP_SIZE, "lower-order term of one step (nats)", _floats(x), curves
    )


def original_and_new() -> Panel:
    """Figure 1b: the odometer of Rogers et al. and the paper's three, up to V = 1."""
    x = _grid(1.0)
    title = f"The odometer of Rogers et al. and the paper's, {_LEVEL}"
    return Panel("fig1b-odometers", title, _TIME, _LOSS, _floats(x), (_rogers(x), *_new_odometers(x)))


def filter_odometers() -> Panel:
    """Figure 2a: filter odometers, each tangent to the pointwise bound where its filter would stop."""
    targets = (1.0, 2.0, 4.0, 8.0)
    x = _grid(2.5)
    curves = (*(Curve(f"ε = {epsilon:g}", _filter(x, epsilon)) for epsilon in targets), _pointwise(x))
    marks = tuple(Mark(filter_time(epsilon, DELTA), epsilon) for epsilon in targets)
    title = f"Filter odometers, {_LEVEL}"
    note = "A dot marks where a line touches the pointwise bound: there its filter would stop, at its ε."
    return Panel("fig2a-filter-odometers", title, _TIME, _LOSS, _floats(x), curves, note, top=14.0, marks=marks)


def mixture_odometers() -> Panel:
    """Figure 2b: mixture odometers, each tightest around a time of its own."""
    gammas = (0.001, 0.01, 0.1, 1.0)
    x = np.unique([*np.geomspace(1e-4, 100.0, 401), 1.0])
    curves = (*(Curve(f"γ = {gamma:g}", _mixture(x, gamma)) for gamma in gammas), _pointwise(x))
    # The time for which a gamma is the best grows in proportion to it.
    times = np.asarray(gammas) / odometers.best_gamma(1.0, DELTA)
    marks = tuple(
        Mark(time, _mixture(times, gamma)[i])
        for i, (time, gamma) in enumerate(zip(_floats(times), gammas, strict=True))
    )
    title = f"Mixture odometers, {_LEVEL}"
    note = "A dot marks the time for which a γ is the best: about 31 γ."
    return Panel("fig2b-mixture-odometers", title, _TIME, _LOSS, _floats(x), curves, note, log_axes="xy", marks=marks)


def stitched_odometers() -> Panel:
    """Figure 2c: stitched odometers, infinite before their start v0."""
    starts = (0.005, 0.05, 0.2, 0.5)
    x = _grid(1.0, *starts)
    curves = tuple(Curve(f"v₀ = {start:g}", _stitched(x, start)) for start in starts)
    title = f"Stitched odometers, each from its v₀ on, {_LEVEL}"
    return Panel("fig2c-stitched-odometers", title, _TIME, _LOSS, _floats(x), curves, top=9.0)


def windows() -> Panel:
    """Figure 3a: the odometers of Figure 1b over eight decades: none is the tightest everywhere."""
    x = np.unique([*np.geomspace(1e-3, 1e5, 401), 0.005, 1.0, math.nextafter(1.0, 2.0)])
    note = (
        "Dots mark where the lowest odometer changes. The stitched odometer has no bound before its v₀; that of "
        "Rogers\net al. changes its formula at V = 1."
    )
    return Panel(
        "fig3a-new-and-original",
        f"New odometers and the original, {_LEVEL}",
        _TIME,
        _LOSS,
        _floats(x),
        (_rogers(x), *_new_odometers(x)),
        note,
        log_axes="xy",
        marks=_changes(1e-3, 1e5),
    )


def rates() -> Panel:
    """Not in the paper: what the odometers of Figure 3a add to V/2, over what pointwise composition adds."""
    x = np.unique([*np.geomspace(1e-3, 1e8, 401), 0.005, 1.0, math.nextafter(1.0, 2.0)])
    floor = np.sqrt(-2.0 * math.log(DELTA) * x)
    curves = tuple(
        replace(curve, values=_floats((np.asarray(curve.values) - x / 2.0) / floor))
        for curve in (_rogers(x), *_new_odometers(x))
    )
    marks = tuple(
        replace(mark, y=(mark.y - mark.x / 2.0) / math.sqrt(-2.0 * math.log(DELTA) * mark.x))
        for mark in _changes(1e-3, 1e8)
    )
    return Panel(
        "fig3a-rates",
        f"Figure 3a without V/2, over the pointwise bound, {_LEVEL}",
        _TIME,
        "(bound - V/2) / √(2 V log 1/δ')",
        _floats(x),
        curves,
        "Dots mark where the lowest odometer changes.",
        log_axes="x",
        top=6.0,
        marks=marks,
    )


def pointwise() -> Panel:
    """Figure 3b: the new odometers, and advanced composition evaluated at each time as if fixed in advance."""
    x = _grid(2.5, 0.005)
    title = f"The price of holding at all times at once, {_LEVEL}"
    curves = (*_new_odometers(x), _pointwise(x))
    marks = (Mark(filter_time(8.0, DELTA), 8.0),)
    note = "The dot marks where the filter odometer touches the pointwise bound."
    return Panel("fig3b-pointwise", title, _TIME, _LOSS, _floats(x), curves, note, marks=marks)


def steps_by_size() -> Panel:
    """Not in the paper: equal steps that each filter admits, as a share of the non-adaptive optimum."""
    sizes = _step_sizes()
    best = [kov_steps(EPSILON, DELTA, size) for size in sizes]
    curves = []
    for name, label in _FILTERS.items():
        compiled = _compile(name)
        counts = [how_many(AccountState("", compiled, compiled.start), PureDP(size)) for size in sizes]
        curves.append(Curve(label, tuple(count / most for count, most in zip(counts, best, strict=True)), name))
    return Panel(
        "steps-by-size",
        f"Steps that each filter admits within ({EPSILON:g}, 10⁻⁶)-DP",
        _STEP_SIZE,
        "share of the optimum (KOV)",
        sizes,
        tuple(curves),
        "The optimum needs all sizes, and their number, fixed in advance; the filters let the answers choose them.\n"
        "Every filter also admits what basic composition does. The exact filter charges whole units: one is a step "
        f"of {_unit_step():.3g}.",
        log_axes="x",
        top=1.04,
        percent=True,
    )


def steps_at_one_size() -> Panel:
    """Not in the paper: how many steps of 0.01 each filter admits."""
    filters = {name: _compile(name) for name in _FILTERS}
    counts = {
        name: how_many(AccountState("", compiled, compiled.start), PureDP(STEP)) for name, compiled in filters.items()
    }
    curves = [Curve(_FILTERS[name], (float(count),), name) for name, count in counts.items()]
    curves.append(Curve(_OPTIMUM, (float(kov_steps(EPSILON, DELTA, STEP)),), "optimum"))
    title = f"How many {STEP:g}-DP questions fit into ({EPSILON:g}, 10⁻⁶)-DP?"
    note = "The filters let the answers so far choose every question and its cost; the optimum does not."
    return Panel("steps-admitted", title, _STEP_SIZE, "questions admitted", (STEP,), tuple(curves), note)


PANELS: Final[Mapping[str, Callable[[], Panel]]] = MappingProxyType(
    {
        "fig1a-lower-order-terms": lower_order_terms,
        "fig1b-odometers": original_and_new,
        "fig2a-filter-odometers": filter_odometers,
        "fig2b-mixture-odometers": mixture_odometers,
        "fig2c-stitched-odometers": stitched_odometers,
        "fig3a-new-and-original": windows,
        "fig3a-rates": rates,
        "fig3b-pointwise": pointwise,
        "steps-by-size": steps_by_size,
        "steps-admitted": steps_at_one_size,
    }
)


def _compile(name: str) -> Compiled:
    return compile_policy(Policy(EPSILON, DELTA, filter=name))


def _step_sizes() -> tuple[float, ...]:
    """Return sizes from 0.001 to 0.5, with those at which a count drops: one unit more, or one basic step less."""
    units = [_unit_step() * math.sqrt(count) for count in range(1, 26)]
    drops = [*units, *(EPSILON / count for count in range(3, 21))]
    sizes = [*np.geomspace(0.001, 0.5, 180).tolist(), *drops, *(1.001 * size for size in drops)]
    return tuple(sorted({math.floor(size * 1e6) / 1e6 for size in sizes}))


def _unit_step() -> float:
    """Return approximately the size of a step for which the exact filter charges one unit."""
    exact = _compile("exact").meter(ExactMeter)
    return math.sqrt(1 / exact.scale)


def _new_odometers(x: _Array) -> tuple[Curve, Curve, Curve]:
    """Return the paper's three odometers at the parameters of its Figure 3."""
    return (
        Curve("filter odometer, ε = 8", _filter(x, 8.0), "filter"),
        Curve("mixture odometer, γ = 0.01", _mixture(x, 0.01), "mixture"),
        Curve("stitched odometer, v₀ = 0.005", _stitched(x, 0.005), "stitched"),
    )


def _changes(start: float, end: float) -> tuple[Mark, ...]:
    """Return the points between two times at which another of the odometers of Figure 3a becomes the lowest."""

    def lowest(x: _Array) -> tuple[NDArray[np.intp], _Array]:
        bounds = np.asarray([curve.values for curve in (_rogers(x), *_new_odometers(x))])
        return bounds.argmin(axis=0), bounds.min(axis=0)

    marks = []
    x = np.geomspace(start, end, 1001)
    which, _ = lowest(x)
    for before in np.flatnonzero(np.diff(which)):
        low, high = float(x[before]), float(x[before + 1])
        while high > low * (1.0 + 1e-9):  # bisection
            middle = math.sqrt(low * high)
            index, _ = lowest(np.asarray([middle]))
            low, high = (middle, high) if index[0] == which[before] else (low, middle)
        _, value = lowest(np.asarray([high]))
        marks.append(Mark(high, float(value[0]), f"{high:,.0f}" if high > 100.0 else f"{high:.3g}"))
    return tuple(marks)


def _pointwise(x: _Array) -> Curve:
    value = np.sqrt(-2.0 * math.log(DELTA) * x) + x / 2.0
    return Curve("pointwise composition", _floats(value), "pointwise", warning="not an odometer")


def _rogers(x: _Array) -> Curve:
    values = _floats(odometers.rogers(x, DELTA, people=PEOPLE) + x / 2.0)
    return Curve("Rogers et al. 2016, n = 10⁶", values, "rogers")


def _filter(x: _Array, epsilon: float) -> tuple[float, ...]:
    return _floats(odometers.line(x, DELTA, at=filter_time(epsilon, DELTA)) + x / 2.0)


def _mixture(x: _Array, gamma: float) -> tuple[float, ...]:
    return _floats(odometers.mixture(x, DELTA, gamma=gamma) + x / 2.0)


def _stitched(x: _Array, start: float) -> tuple[float, ...]:
    return _floats(odometers.stitched_paper(x, DELTA, start=start) + x / 2.0)


def _grid(end: float, *knots: float) -> _Array:
    """Return evenly spaced times from 0 to `end`, and the times at which a curve begins."""
    return np.unique([*np.round(np.linspace(0.0, end, 401), 12), *knots])


def _floats(values: _Array) -> tuple[float, ...]:
    return tuple(values.tolist())


def draw_all(folder: Path | str, names: Iterable[str] | None = None) -> list[Path]:
    """Write the named panels, or all of them, as PNG, SVG and CSV, and return the files."""
    chosen = list(PANELS) if names is None else list(names)
    for name in chosen:
        if name not in PANELS:
            raise InvalidArgument(f"name must be one of {', '.join(PANELS)} (got {name!r})")
    return [file for name in chosen for file in draw(PANELS[name](), Path(folder))]


def draw(panel: Panel, folder: Path) -> list[Path]:
    """Write one panel as PNG, SVG and CSV, and return the files."""
    mpl = load_extra("matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    png, svg, table = (folder / f"{panel.name}.{ending}" for ending in ("png", "svg", "csv"))
    with mpl.rc_context({**mpl.rcParamsDefault, **_STYLE}):
        figure = load_extra("matplotlib.figure").Figure(figsize=_PANEL_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(panel.title)
        if panel.note:
            figure.supxlabel(panel.note, x=0.01, ha="left", fontsize=8.5, color="#555555")
        if len(panel.x) == 1:
            _draw_bars(axes, panel)
        else:
            _draw_curves(axes, panel)
            inches = load_extra("matplotlib.transforms").ScaledTranslation(
                0.0, -_LEGEND_BELOW, figure.dpi_scale_trans
            )
            below = axes.transAxes + inches  # under the labels of the x axis, where the legend hides no curve
            axes.legend(loc="upper left", bbox_to_anchor=(-0.01, 0.0), bbox_transform=below, **_LEGEND)
        # Without date and version, the same numbers give the same file.
        made_from = fingerprint(panel)
        figure.savefig(png, metadata={"Software": None, "Description": made_from})
        figure.savefig(svg, metadata={"Date": None, "Creator": None, "Description": made_from})
    write_csv(panel, table)
    return [png, svg, table]


def fingerprint(panel: Panel) -> str:
    """Return a digest of what a panel says, which is written into its pictures: they show which numbers they are of.

    Numbers count to six digits, so that the last digits of another processor's functions do not matter.
    """

    def brief(part: object) -> object:
        if isinstance(part, dict):
            return {name: brief(value) for name, value in part.items()}
        if isinstance(part, (list, tuple)):
            return [brief(value) for value in part]
        return f"{part:.6g}" if isinstance(part, float) else part

    text = json.dumps(brief(asdict(panel)), sort_keys=True)
    return f"{panel.name} {sha256(text.encode()).hexdigest()[:16]}"


def write_csv(panel: Panel, path: Path) -> None:
    """Write the numbers of a panel in full precision: a row per x, a column per curve."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([panel.x_label, *(_one_line(curve) for curve in panel.curves)])
        writer.writerows(zip(panel.x, *(curve.values for curve in panel.curves), strict=True))


def _one_line(curve: Curve) -> str:
    label = " ".join(curve.label.split())
    return f"{label} ({curve.warning})" if curve.warning else label


def _draw_curves(axes: Axes, panel: Panel) -> None:
    free = cycle(zip(_FREE, _FREE_DASHES, strict=True))
    for curve in panel.curves:
        color, dashes = (_HUES[curve.hue], _DASHES[curve.hue]) if curve.hue else next(free)
        axes.plot(panel.x, curve.values, label=_one_line(curve), color=color, linestyle=dashes)
        if math.isinf(curve.values[0]):  # a dot where the bound begins
            begin = next(i for i, value in enumerate(curve.values) if math.isfinite(value))
            axes.plot(panel.x[begin], curve.values[begin], marker="o", markersize=4.5, color=color)
    for mark in panel.marks:
        axes.plot(mark.x, mark.y, marker="o", markersize=5.0, color=_BLACK, zorder=3)
        axes.annotate(
            mark.text,
            (mark.x, mark.y),
            xytext=(0, -7),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8.5,
        )
    axes.margins(y=0.08)
    axes.set_xlim(panel.x[0], panel.x[-1])
    if "x" in panel.log_axes:
        _make_logarithmic(axes.set_xscale, axes.xaxis)
    if "y" in panel.log_axes:
        _make_logarithmic(axes.set_yscale, axes.yaxis)
    else:
        axes.set_ylim(0.0, panel.top)
    if panel.percent:
        axes.yaxis.set_major_formatter(load_extra("matplotlib.ticker").PercentFormatter(1.0))
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)


def _make_logarithmic(set_scale: Callable[[str], object], axis: Axis) -> None:
    """Make an axis logarithmic: with plain numbers at 1, 2 and 5, or where it is long at powers of 10."""
    ticker = load_extra("matplotlib.ticker")
    set_scale("log")
    low, high = axis.get_view_interval()
    if math.log10(high / low) > _MANY_DECADES:
        axis.set_major_locator(ticker.LogLocator(numticks=16))
        axis.set_major_formatter(ticker.LogFormatterMathtext())
        axis.set_minor_locator(ticker.NullLocator())
    else:
        axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _draw_bars(axes: Axes, panel: Panel) -> None:
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
