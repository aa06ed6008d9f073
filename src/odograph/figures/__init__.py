"""Pictures of one account: an HTML card for notebooks, and a plot of its reading.

The figures of the paper are in `odograph.figures.paper`. Matplotlib is imported only when something is drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from odograph.core.compiled import Compiled, other_odometers
from odograph.core.fixed_point import SCALE
from odograph.core.gate import Totals
from odograph.core.guarantees import Guarantee
from odograph.core.meters import IntrinsicMeter
from odograph.core.odometers import Odometer
from odograph.core.planning import standing, used
from odograph.extras import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["account_card", "blank_axes", "draw_account", "gauge"]

_SIZE: Final = (7.0, 4.2)  # inches
_MAX_POINTS: Final = 200  # of a curve; more would not be visible
_POLICY_COLOR: Final = "#0072B2"
_OTHER_COLORS: Final = ("#E69F00", "#009E73", "#56B4E9", "#CC79A7")
_ENOUGH, _LOW, _OUT = "#009E73", "#E69F00", "#D55E00"  # gauge colors, distinguishable with any color vision
_CELL: Final = "padding:1px 12px 1px 0;text-align:left;border:0;background:none;font-variant-numeric:tabular-nums"


def account_card(
    name: str, compiled: Compiled, totals: Totals, largest: Guarantee | None, last: Sequence[tuple[str, str]]
) -> str:
    """Return an account as HTML for a notebook: promise, gauge, meters, reading and last spends, latest first.

    The card is plain HTML and SVG: no script, no style sheet and no external resources.
    """
    policy = compiled.policy
    title = html.escape(name) if name else "Accountant"
    promise = f"{policy.target} for each {html.escape(policy.privacy_unit)}"
    offer = f"; the largest like the last that fits: {html.escape(str(largest))}" if largest else ""
    rows = "".join(
        f'<tr><td style="{_CELL}">{html.escape(cost)}</td><td style="{_CELL}">{html.escape(note)}</td></tr>'
        for cost, note in last
    )
    spends = f'<table style="{_CELL}"><tr><th style="{_CELL}">last spends</th></tr>{rows}</table>' if last else ""
    return (
        '<div style="display:flex;gap:24px;align-items:flex-start;flex-wrap:wrap">'
        f"<div>{gauge(used(compiled, totals))}</div>"
        f"<div><b>{title}</b>: {promise}<br>{totals.steps} steps{offer}"
        f'<table style="{_CELL}">{_meter_rows(compiled, totals)}</table>'
        f'<div style="max-width:36em">{html.escape(str(compiled.reading(totals)))}</div></div>{spends}</div>'
    )


def gauge(part: float) -> str:
    """Return an SVG half circle, filled in proportion to the part of the budget that is spent."""
    angle = math.pi * (1.0 - min(max(part, 0.0), 1.0))
    x, y = 60.0 + 50.0 * math.cos(angle), 60.0 - 50.0 * math.sin(angle)
    color = _ENOUGH if part < 0.75 else _LOW if part < 0.95 else _OUT
    arc = f'<path d="M 10 60 A 50 50 0 0 1 {x:.2f} {y:.2f}" stroke="{color}"/>' if part > 0.0 else ""
    return (
        f'<svg width="120" height="78" viewBox="0 0 120 78" role="img" aria-label="{part:.1%} of the budget spent">'
        '<g fill="none" stroke-width="12"><path d="M 10 60 A 50 50 0 0 1 110 60" stroke="#8888" opacity=".35"/>'
        f'{arc}</g><text x="60" y="56" text-anchor="middle" font-size="19" fill="currentColor">{part:.0%}</text>'
        '<text x="60" y="74" text-anchor="middle" font-size="11" fill="currentColor">spent</text></svg>'
    )


def _meter_rows(compiled: Compiled, totals: Totals) -> str:
    now = standing(compiled, totals)
    head = "".join(f'<th style="{_CELL}">{word}</th>' for word in ("meter", "spent", "left"))
    rows = [f"<tr>{head}</tr>"]
    for meter, unpriced in zip(compiled.meters, totals.unpriced, strict=True):
        if meter.limit is None or (meter.counts_delta and not meter.limit):
            continue
        # After a step without a price on this meter, the meter admits nothing more; the other alternatives may.
        left = "out: a step has no price here" if unpriced else f"{now.left[meter.name]:.6g}"
        cells = (meter.name, f"{now.spent[meter.name]:.6g}", left)
        rows.append("<tr>" + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in cells) + "</tr>")
    return "".join(rows)


def blank_axes() -> Axes:
    """Return Matplotlib axes for a file: pyplot does not know their figure, so no display backend is chosen."""
    axes: Axes = load("matplotlib.figure").Figure(figsize=_SIZE, layout="constrained").subplots()
    return axes


def draw_account(compiled: Compiled, history: Sequence[Totals], ax: Any = None) -> Axes:  # noqa: ANN401  Matplotlib's axes
    """Plot an account's readings and its budget on Matplotlib axes and return the axes.

    `history` holds the totals after each charge, oldest first. The horizontal axis is intrinsic time, or the number
    of steps if a step has no intrinsic time (Rényi curves, mechanisms of a menu).
    """
    policy = compiled.policy
    # Through pyplot, so that a notebook shows the plot.
    axes: Axes = load("matplotlib.pyplot").subplots(figsize=_SIZE, layout="constrained")[1] if ax is None else ax
    states = _thin(history)
    time = compiled.index(IntrinsicMeter)
    timed = not history[-1].unpriced[time]
    times = [state.amounts[time] / SCALE if timed else float(state.steps) for state in states]
    for other, color in zip(other_odometers(policy), _OTHER_COLORS, strict=False):
        label = f"{_label(other)} (informational)"
        _plot_curve(axes, times, _losses(compiled, states, other), label, color=color, ls=":")
    own = "sum of epsilons" if policy.is_basic else _label(policy.odometer)
    losses = _losses(compiled, states, None)
    _plot_curve(axes, times, losses, f"{own} (policy's odometer)", color=_POLICY_COLOR, lw=2.2)
    axes.axhline(float(policy.epsilon), color="#222222", lw=1.2, ls="--")
    axes.annotate(
        f"promise: epsilon {float(policy.epsilon):g}",
        (0.01, float(policy.epsilon)),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        va="bottom",
        fontsize="small",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )
    axes.set_xlabel("intrinsic time" if timed else "steps")
    axes.set_ylabel("loss at most")
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    axes.legend(loc="lower right", frameon=False, fontsize="small")
    return axes


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
