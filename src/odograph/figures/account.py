"""One account as a picture: its reading over intrinsic time, the budget, other odometers beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from odograph.core.compiled import Compiled, other_odometers, reading
from odograph.core.decide import Totals
from odograph.core.odometers import Odometer
from odograph.core.units import SCALE

__all__ = ["blank_axes", "draw_account"]

_SIZE: Final = (7.0, 4.2)
_POINTS: Final = 200  # of a curve: more would not be seen
_OTHERS: Final = ("#E69F00", "#009E73", "#56B4E9", "#CC79A7")


def blank_axes() -> Axes:
    """Return axes of a figure that pyplot does not know of: nothing has to be chosen to show it with."""
    return Figure(figsize=_SIZE, layout="constrained").subplots()


def draw_account(compiled: Compiled, stood: Sequence[Totals], ax: Axes | None = None) -> Axes:
    """Draw the reading as it went, from where the account stood, oldest first, with the budget as a line.

    The horizontal axis is intrinsic time; steps, where a step had none (Rényi curves, mechanisms of a menu).
    """
    policy = compiled.policy
    if ax is None:
        # By pyplot, so that a notebook shows the picture.
        ax = plt.subplots(figsize=_SIZE, layout="constrained")[1]
    states = _thinned(stood)
    clock = next(i for i, meter in enumerate(compiled.meters) if meter.clock == "intrinsic")
    timed = not stood[-1].unpriced[clock]
    times = [state.amounts[clock] / SCALE if timed else float(state.steps) for state in states]
    for other, hue in zip(other_odometers(policy), _OTHERS, strict=False):
        _curve(ax, times, _readings(compiled, states, other), f"{_name(other)}, for looking only", color=hue, ls=":")
    own = "sum of epsilons" if policy.rule == "basic" else _name(policy.odometer)
    _curve(ax, times, _readings(compiled, states, None), f"{own}, the policy's", color="#0072B2", lw=2.2)
    ax.axhline(float(policy.epsilon), color="#222222", lw=1.2, ls="--")
    ax.annotate(
        f"promise: epsilon {float(policy.epsilon):g}",
        (0.01, float(policy.epsilon)),
        xycoords=ax.get_yaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        va="bottom",
        fontsize="small",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )
    ax.set_xlabel("intrinsic time" if timed else "steps")
    ax.set_ylabel("loss at most")
    ax.set_ylim(bottom=0.0)
    ax.set_xlim(left=0.0)
    ax.legend(loc="lower right", frameon=False, fontsize="small")
    return ax


def _thinned(states: Sequence[Totals]) -> list[Totals]:
    stride = math.ceil(len(states) / _POINTS)
    return [*states[:-1:stride], states[-1]]


def _readings(compiled: Compiled, states: Sequence[Totals], odometer: Odometer | None) -> list[float]:
    return [reading(compiled, state, odometer).loss if state.steps else 0.0 for state in states]


def _curve(ax: Axes, times: Sequence[float], losses: Sequence[float], label: str, **style: Any) -> None:
    # A curve that ends without a finite reading has nothing to say, and would only crowd the legend.
    if math.isfinite(losses[-1]):
        known = [(time, loss) for time, loss in zip(times, losses, strict=True) if math.isfinite(loss)]
        ax.plot([time for time, _ in known], [loss for _, loss in known], label=label, **style)


def _name(odometer: Odometer) -> str:
    return odometer.kind.replace("-", " ")
