"""The numbers behind every picture: one function per panel, pure, with the parameters of the paper's captions.

Odometers are drawn as the paper prints them (two-sided mixture, rounded stitching constants), with its errata
corrected: y* (E1) and the second branch of Rogers et al. (E6). The clock of these panels is the paper's, V = sum
of epsilon^2, and all steps are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.budgets import compile_policy
from odograph.core import boundaries
from odograph.core.compiled import Compiled
from odograph.core.composition import kov_steps
from odograph.core.guarantees import PureDP
from odograph.core.offers import how_many
from odograph.core.policy import Policy

__all__ = [
    "PANELS",
    "Curve",
    "Panel",
    "filter_odometers",
    "lower_order_terms",
    "mixture_odometers",
    "original_and_new",
    "pointwise",
    "steps_at_one_size",
    "steps_by_size",
    "stitched_odometers",
    "windows",
]

_Array: TypeAlias = NDArray[np.float64]

DELTA: Final = 1e-6  # delta' of every odometer, and delta of the policy whose steps are counted
EPSILON: Final = 1.0  # of that policy
PEOPLE: Final = 1e6  # the size of the data set in the odometer of Rogers et al.
STEP: Final = 0.01  # of the bars

_CLOCK: Final = "intrinsic time V, the sum of squared epsilons (nats²)"
_LEVEL: Final = "δ' = 10⁻⁶"
_LOSS: Final = "bound on the privacy loss (nats)"
_STEP_SIZE: Final = "epsilon of one step (nats)"
_RULES: Final = MappingProxyType(
    {
        "basic": "basic composition",
        "paper": "the paper's filter",
        "renyi": "Rényi filter",
        "zcdp": "zCDP filter",
        "exact": "exact filter",
    }
)
_OPTIMUM: Final = "non-adaptive optimum"


@dataclass(frozen=True, slots=True)
class Curve:
    """One line or bar: a value for each x of its panel, infinite where there is no bound."""

    label: str
    values: tuple[float, ...]
    hue: str = ""  # curves of the same hue have the same colour in all panels; "" for the next free one
    warning: str = ""  # why the curve is no guarantee; such a curve is dashed


@dataclass(frozen=True, slots=True)
class Panel:
    """What a picture shows, in numbers. With one x it is a bar chart, with more a plot of curves."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    curves: tuple[Curve, ...]
    note: str = ""  # what a reader should know, under the picture
    log_axes: str = ""  # "x", "xy" or none
    top: float | None = None  # of the y axis
    percent: bool = False  # y is a share of 1


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
    return Panel("fig1b-odometers", title, _CLOCK, _LOSS, _floats(x), (_rogers(x), *_new_odometers(x)))


def filter_odometers() -> Panel:
    """Figure 2a: filter odometers, each tightest where its filter would stop."""
    x = _grid(1.0)
    curves = tuple(Curve(f"ε = {epsilon:g}", _filter(x, epsilon)) for epsilon in (1.0, 2.0, 4.0, 8.0))
    return Panel("fig2a-filter-odometers", f"Filter odometers, {_LEVEL}", _CLOCK, _LOSS, _floats(x), curves, top=9.0)


def mixture_odometers() -> Panel:
    """Figure 2b: mixture odometers."""
    x = _grid(1.0)
    curves = tuple(Curve(f"γ = {gamma:g}", _mixture(x, gamma)) for gamma in (0.001, 0.01, 0.1, 1.0))
    return Panel(
        "fig2b-mixture-odometers", f"Mixture odometers, {_LEVEL}", _CLOCK, _LOSS, _floats(x), curves, top=9.0
    )


def stitched_odometers() -> Panel:
    """Figure 2c: stitched odometers, infinite before their start v0."""
    starts = (0.005, 0.05, 0.2, 0.5)
    x = _grid(1.0, *starts)
    curves = tuple(Curve(f"v₀ = {start:g}", _stitched(x, start)) for start in starts)
    title = f"Stitched odometers, each from its v₀ on, {_LEVEL}"
    return Panel("fig2c-stitched-odometers", title, _CLOCK, _LOSS, _floats(x), curves, top=9.0)


def windows() -> Panel:
    """Figure 3a: the odometers of Figure 1b over four decades: none is the tightest everywhere."""
    x = np.unique([*np.geomspace(1e-3, 10.0, 401), 0.005, 1.0, math.nextafter(1.0, 2.0)])
    title = f"New odometers and the original, {_LEVEL}"
    note = "The stitched odometer has no bound before its v₀; that of Rogers et al. changes its formula at V = 1."
    curves = (_rogers(x), *_new_odometers(x))
    return Panel("fig3a-new-and-original", title, _CLOCK, _LOSS, _floats(x), curves, note, log_axes="xy")


def pointwise() -> Panel:
    """Figure 3b: the new odometers, and advanced composition as if each time had been the one fixed in advance."""
    x = _grid(2.5, 0.005)
    value = np.sqrt(-2.0 * math.log(DELTA) * x) + x / 2.0
    curve = Curve("advanced composition, pointwise", _floats(value), "pointwise", warning="not an odometer")
    title = f"The price of holding at all times at once, {_LEVEL}"
    curves = (*_new_odometers(x), curve)
    return Panel("fig3b-pointwise", title, _CLOCK, _LOSS, _floats(x), curves)


def steps_by_size() -> Panel:
    """Not in the paper: equal steps that each rule admits, as a share of the optimum without adaptivity."""
    sizes = _step_sizes()
    best = [kov_steps(EPSILON, DELTA, size) for size in sizes]
    curves = []
    for rule, label in _RULES.items():
        compiled = _compiled(rule)
        counts = [how_many(compiled, compiled.start, PureDP(size)) for size in sizes]
        curves.append(Curve(label, tuple(count / most for count, most in zip(counts, best, strict=True)), rule))
    return Panel(
        "steps-by-size",
        f"Steps that each rule admits within ({EPSILON:g}, 10⁻⁶)-DP",
        _STEP_SIZE,
        "share of the optimum (KOV)",
        sizes,
        tuple(curves),
        "The optimum needs all sizes, and their number, fixed in advance; the rules let the answers choose them.\n"
        "Every rule also admits what basic composition does. The exact filter charges whole units: one is a step of "
        f"{_unit_step():.3g}.",
        log_axes="x",
        top=1.04,
        percent=True,
    )


def steps_at_one_size() -> Panel:
    """Not in the paper: how many steps of 0.01 each rule admits."""
    filters = {rule: _compiled(rule) for rule in _RULES}
    counts = {rule: how_many(compiled, compiled.start, PureDP(STEP)) for rule, compiled in filters.items()}
    curves = [Curve(_RULES[rule], (float(count),), rule) for rule, count in counts.items()]
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
        "fig3b-pointwise": pointwise,
        "steps-by-size": steps_by_size,
        "steps-admitted": steps_at_one_size,
    }
)


def _compiled(rule: str) -> Compiled:
    return compile_policy(Policy(EPSILON, DELTA, rule=rule))


def _step_sizes() -> tuple[float, ...]:
    """Sizes from 0.001 to 0.5, with those after which a count drops: a whole unit more, or one basic step less."""
    units = [_unit_step() * math.sqrt(count) for count in range(1, 26)]
    drops = [*units, *(EPSILON / count for count in range(3, 21))]
    sizes = [*np.geomspace(0.001, 0.5, 180).tolist(), *drops, *(1.001 * size for size in drops)]
    return tuple(sorted({math.floor(size * 1e6) / 1e6 for size in sizes}))


def _unit_step() -> float:
    """The size of a step that the exact filter charges one unit, nearly."""
    exact = next(meter for meter in _compiled("exact").meters if meter.clock == "exact")
    return math.sqrt(1 / exact.scale)


def _new_odometers(x: _Array) -> tuple[Curve, Curve, Curve]:
    """The paper's three odometers at the parameters of its Figure 3."""
    return (
        Curve("filter odometer, ε = 8", _filter(x, 8.0), "filter"),
        Curve("mixture odometer, γ = 0.01", _mixture(x, 0.01), "mixture"),
        Curve("stitched odometer, v₀ = 0.005", _stitched(x, 0.005), "stitched"),
    )


def _rogers(x: _Array) -> Curve:
    values = _floats(boundaries.rogers(x, DELTA, people=PEOPLE) + x / 2.0)
    return Curve("Rogers et al. 2016, n = 10⁶", values, "rogers")


def _filter(x: _Array, epsilon: float) -> tuple[float, ...]:
    return _floats(boundaries.line(x, DELTA, at=boundaries.filter_time(epsilon, DELTA)) + x / 2.0)


def _mixture(x: _Array, gamma: float) -> tuple[float, ...]:
    return _floats(boundaries.mixture(x, DELTA, gamma=gamma) + x / 2.0)


def _stitched(x: _Array, start: float) -> tuple[float, ...]:
    return _floats(boundaries.stitched_paper(x, DELTA, start=start) + x / 2.0)


def _grid(end: float, *knots: float) -> _Array:
    """Return evenly spaced times from 0 to `end`, and the times at which a curve begins."""
    return np.unique([*np.round(np.linspace(0.0, end, 401), 12), *knots])


def _floats(values: _Array) -> tuple[float, ...]:
    return tuple(values.tolist())
