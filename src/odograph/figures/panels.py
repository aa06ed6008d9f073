"""The numbers behind every picture: one function per panel, pure, with the parameters of the paper's captions.

Odometers are drawn as the paper prints them (two-sided mixture, rounded stitching constants), with its errata
corrected: y* (E1) and the second branch of Rogers et al. (E6). The clock of these panels is the paper's, V = sum
of epsilon^2, and all steps are pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.budgets import compile_policy
from odograph.core import boundaries
from odograph.core.composition import kov_steps
from odograph.core.decide import decide
from odograph.core.guarantees import PureDP
from odograph.core.policy import Compiled, Policy, price

__all__ = ["PANELS", "Curve", "Panel", "steps_admitted"]

_Array: TypeAlias = NDArray[np.float64]

DELTA: Final = 1e-6  # delta' of every odometer, and delta of the policy whose steps are counted
EPSILON: Final = 1.0  # of that policy
PEOPLE: Final = 1e6  # the size of the data set in the odometer of Rogers et al.
STEP: Final = 0.01  # of the bars

_CLOCK: Final = "intrinsic time V, the sum of squared epsilons (nats²)"
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
_OPTIMUM: Final = "optimum if nothing\nwere adaptive (KOV)"


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
    log_axes: str = ""  # "x", "xy" or none
    top: float | None = None  # of the y axis
    percent: bool = False


def lower_order_terms() -> Panel:
    """Figure 1a: what one step adds below the leading square root."""
    x = np.linspace(0.0, 3.0, 301)
    curves = (
        Curve("the paper's filter: ε²/2", _floats(x * x / 2.0), "filter"),
        Curve("advanced composition: ε (e^ε - 1)/(e^ε + 1)", _floats(x * np.tanh(x / 2.0)), "pointwise"),
    )
    title = "Lower-order terms of the filter and of advanced composition"
    return Panel("fig1a-lower-order-terms", title, _STEP_SIZE, "lower-order term of one step (nats)", _floats(x), curves)


def original_and_new() -> Panel:
    """Figure 1b: the odometer of Rogers et al. and the paper's three, up to V = 1."""
    x = _grid(1.0)
    title = "The odometer of Rogers et al. and the paper's"
    return Panel("fig1b-odometers", title, _CLOCK, _LOSS, _floats(x), (_rogers(x), *_new_odometers(x)))


def filter_odometers() -> Panel:
    """Figure 2a: filter odometers, each tightest where its filter would stop."""
    x = _grid(1.0)
    curves = tuple(Curve(f"ε = {epsilon:g}", _filter(x, epsilon)) for epsilon in (1.0, 2.0, 4.0, 8.0))
    return Panel("fig2a-filter-odometers", "Filter odometers", _CLOCK, _LOSS, _floats(x), curves, top=10.0)


def mixture_odometers() -> Panel:
    """Figure 2b: mixture odometers."""
    x = _grid(1.0)
    curves = tuple(Curve(f"γ = {gamma:g}", _mixture(x, gamma)) for gamma in (0.001, 0.01, 0.1, 1.0))
    return Panel("fig2b-mixture-odometers", "Mixture odometers", _CLOCK, _LOSS, _floats(x), curves, top=10.0)


def stitched_odometers() -> Panel:
    """Figure 2c: stitched odometers, infinite before their start v0."""
    starts = (0.005, 0.05, 0.2, 0.5)
    x = _grid(1.0, *starts)
    curves = tuple(Curve(f"v₀ = {start:g}", _stitched(x, start)) for start in starts)
    title = "Stitched odometers, each from its v₀ on"
    return Panel("fig2c-stitched-odometers", title, _CLOCK, _LOSS, _floats(x), curves, top=10.0)


def windows() -> Panel:
    """Figure 3a: the same odometers over four decades: each of the new ones is the tightest somewhere."""
    x = np.unique([*np.geomspace(1e-3, 10.0, 401), 0.005, 1.0, math.nextafter(1.0, 2.0)])
    title = "Each new odometer is the tightest somewhere"
    curves = (_rogers(x), *_new_odometers(x))
    return Panel("fig3a-new-and-original", title, _CLOCK, _LOSS, _floats(x), curves, log_axes="xy")


def pointwise() -> Panel:
    """Figure 3b: the new odometers, and advanced composition as if each time had been the one fixed in advance."""
    x = _grid(2.5, 0.005)
    value = np.sqrt(-2.0 * math.log(DELTA) * x) + x / 2.0
    curve = Curve("advanced composition, pointwise", _floats(value), "pointwise", warning="not an odometer")
    title = "The price of holding at all times at once"
    curves = (*_new_odometers(x), curve)
    return Panel("fig3b-pointwise", title, _CLOCK, _LOSS, _floats(x), curves)


def steps_by_size() -> Panel:
    """Not in the paper: equal steps that each rule admits, as a share of the optimum without adaptivity."""
    sizes = _step_sizes()
    best = [kov_steps(EPSILON, DELTA, size) for size in sizes]
    curves = [
        Curve(label, tuple(steps_admitted(_compiled(rule), PureDP(e)) / k for e, k in zip(sizes, best, strict=True)), rule)
        for rule, label in _RULES.items()
    ]
    title = f"Steps admitted at (ε, δ) = ({EPSILON:g}, 10⁻⁶), every step chosen from the answers so far"
    y_label = "share of the optimum of\nparameters fixed in advance"
    return Panel(
        "steps-by-size", title, _STEP_SIZE, y_label, sizes, tuple(curves), log_axes="x", top=1.0, percent=True
    )


def steps_at_one_size() -> Panel:
    """Not in the paper: how many steps of 0.01 each rule admits."""
    counts = {rule: steps_admitted(_compiled(rule), PureDP(STEP)) for rule in _RULES}
    curves = [Curve(_RULES[rule], (float(count),), rule) for rule, count in counts.items()]
    curves.append(Curve(_OPTIMUM, (float(kov_steps(EPSILON, DELTA, STEP)),), "optimum"))
    title = f"Questions of {STEP}-DP within ({EPSILON:g}, 10⁻⁶)-DP"
    return Panel("steps-admitted", title, _STEP_SIZE, "steps admitted", (STEP,), tuple(curves))


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


def steps_admitted(compiled: Compiled, step: PureDP) -> int:
    """Return how many equal steps are admitted; totals only grow, so bisection finds the first refusal."""
    cost = price(compiled, step)

    def refused(count: int) -> bool:
        return not decide(compiled.meters, compiled.start, cost.times(count)).admitted

    return bisect_left(range(10**12), x=True, key=refused) - 1


def _compiled(rule: str) -> Compiled:
    return compile_policy(Policy(EPSILON, DELTA, rule=rule))


def _step_sizes() -> tuple[float, ...]:
    """Sizes as people write them, two digits from 0.001 to 0.5."""
    return tuple(float(f"{digits}e{power}") for power in (-4, -3, -2) for digits in range(10, 100) if digits <= 50 or power < -2)


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
