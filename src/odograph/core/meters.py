"""Meters: what a policy counts, each in whole units, and what a guarantee costs on each.

A meter has a *clock*, the theorem that says what one step adds to it. A price is a whole number of units,
rounded up once, or None where the clock has no finite price for the guarantee (a Gaussian has no epsilon).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from odograph.core.conversions import (
    gdp_to_rdp,
    probdp_drift,
    pure_to_intrinsic,
    pure_to_rdp,
    zcdp_to_rdp,
)
from odograph.core.exact import FAMILIES, LEAST_GAUSSIAN
from odograph.core.gaussian import pure_to_gdp
from odograph.core.guarantees import (
    GDP,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    ProbDP,
    PureDP,
    delta_of,
    exact_of,
    stored,
)
from odograph.core.units import (
    CEILING,
    DELTA_SCALE,
    SCALE,
    Number,
    Numeric,
    ceil_computed,
    ceil_sure,
    ceil_written,
    exactly,
    read,
    up,
)
from odograph.errors import InvalidPolicy, told

__all__ = ["CLOCKS", "Meter"]

_PURE: Final = (PureDP, ApproxDP, ProbDP)  # what has an epsilon

# Above this a number is no privacy at all, and floating point would soon overflow: it has no finite price.
_HUGE: Final = 10**6


@dataclass(frozen=True, slots=True)
class Meter:
    """One count: its name, its clock, and its limit in units (None: counted for an odometer, never a limit).

    `order` belongs to the Rényi clock; `unit`, `takes` and `charges` (name, block, units) to the exact one;
    `latent` to the clocks of an odometer with a slack (Theorem 6), which read the steps without their deltas.
    """

    name: str
    clock: str
    limit: int | None
    order: Fraction | None = None
    unit: Fraction | None = None
    takes: tuple[str, ...] = ()
    charges: tuple[tuple[str, int, int], ...] = ()
    latent: bool = False
    units_in_one: float = field(default=0.0, init=False, repr=False, compare=False)  # of the exact clock, nearly

    def __post_init__(self) -> None:
        if self.unit:
            object.__setattr__(self, "units_in_one", float(1 / self.unit))

    @property
    def scale(self) -> Fraction:
        """Units per 1 of what the meter counts, for showing totals to people."""
        if self.clock == "exact":
            return 1 / self.unit if self.unit else Fraction(1)
        return Fraction(DELTA_SCALE if self.clock == "delta" else SCALE)

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form; integers are text, because JSON numbers lose digits."""
        form: dict[str, Any] = {"name": self.name, "clock": self.clock}
        form["limit"] = None if self.limit is None else str(self.limit)
        if self.order is not None:
            form["order"] = str(self.order)
        if self.clock == "exact":
            form |= {"unit": str(self.unit), "takes": [*self.takes], "charges": [[*c] for c in self.charges]}
        if self.latent:
            form["latent"] = True
        return form

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Meter:
        """Read what `to_dict` wrote."""
        try:
            meter = cls(
                str(form["name"]),
                str(form["clock"]),
                None if form["limit"] is None else _digits(form["limit"]),
                order=read(form["order"], "order", InvalidPolicy) if "order" in form else None,
                unit=read(form["unit"], "unit", InvalidPolicy) if "unit" in form else None,
                takes=tuple(form.get("takes", ())),
                charges=tuple((str(n), int(b), int(c)) for n, b, c in form.get("charges", ())),
                latent=form.get("latent", False) is True,
            )
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
            raise InvalidPolicy(f"not a meter: {form!r:.120} ({told(problem)})") from problem
        meter._check()
        return meter

    def _check(self) -> None:
        """Raise where the clock lacks what it needs: a stored document may be damaged."""
        wrong = self.clock not in CLOCKS or (self.limit is not None and self.limit > CEILING)
        wrong = wrong or (self.clock in {"renyi", "moment"}) != (self.order is not None and self.order > 1)
        wrong = wrong or (
            self.clock in {"intrinsic", "moment", "drift"} and self.name != "zcdp" and self.limit is not None
        )
        if self.clock == "exact":
            # Only a menu alone counts in blocks, which have no unit.
            counts = self.unit is not None and (self.unit > 0 or (self.unit == 0 and not self.takes))
            known = set(self.takes) <= set(FAMILIES) and bool(self.takes or self.charges)
            wrong = wrong or not counts or not known or any(min(b, c) < 1 for _, b, c in self.charges)
        if wrong:
            raise InvalidPolicy(f"not a meter that a policy compiles to: {self!r}")


def _digits(text: object) -> int:
    """Read a whole number that was written as text."""
    if not isinstance(text, str) or not text.isdigit():
        raise ValueError(f"a limit is written in digits, not as {text!r}")
    return int(text)


def _units(cost: float, source: Number) -> int:
    """Round a padded cost up to whole units; a positive source costs at least one, however small."""
    return max(int(source > 0), ceil_computed(cost, SCALE))


def _written(value: Number, scale: int = SCALE) -> int | None:
    """Round a number that is the cost itself up to whole units; None where it is too large to have a price."""
    return ceil_written(value, scale) if value <= _HUGE else None


def _squared(value: Number) -> int | None:
    """Round the square of a number up to whole units."""
    # Twice the decimal's distance from the float, the square and the product.
    sure = ceil_sure(value * value * SCALE, 8) if isinstance(value, float) else None
    return _written(exact_of(value) ** 2) if sure is None else sure


def _delta(_meter: Meter, guarantee: Guarantee) -> int | None:
    delta = delta_of(guarantee)
    return _written(delta, DELTA_SCALE) if delta else 0


def _epsilon(_meter: Meter, guarantee: Guarantee) -> int | None:
    """Sum of epsilon.

    Theorem: basic composition; with reveals set aside the loss is at most the sum of the epsilons, surely.
    Assumes: every step is (epsilon_n, delta_n)-DP, epsilon_n predictable.
    """
    return _written(stored(guarantee.epsilon)) if isinstance(guarantee, _PURE) else None


def _paper(_meter: Meter, guarantee: Guarantee) -> int | None:
    """Sum of epsilon^2, exactly.

    Theorem: Whitehouse et al., Theorem on (epsilon, delta)-DP filters, as corrected (E7).
    Assumes: every step is (epsilon_n, delta_n)-DP, epsilon_n predictable.
    """
    if isinstance(guarantee, _PURE):
        return _written(exact_of(guarantee.epsilon) ** 2)
    return None


def _intrinsic(_meter: Meter, guarantee: Guarantee) -> int | None:
    """Intrinsic time V: twice the zCDP parameter of the step.

    Theorem: Lemma 1: an epsilon-DP step is (epsilon tanh(epsilon/2))-zCDP; a mu-GDP step is (mu^2/2)-zCDP.
    Assumes: parameters predictable; a step's own delta is counted on the delta meter.
    """
    if isinstance(guarantee, _PURE):
        epsilon = stored(guarantee.epsilon)
        return _units(pure_to_intrinsic(float(epsilon)), epsilon) if epsilon <= _HUGE else None
    if isinstance(guarantee, ZCDP):
        return _written(2 * exact_of(guarantee.rho))
    if isinstance(guarantee, GDP):
        return _squared(stored(guarantee.mu))
    return None


def _gdp(_meter: Meter, guarantee: Guarantee) -> int | None:
    """Sum of mu^2.

    Theorem: GDP filter (Smith and Thakurta; Koskela et al.); epsilon-DP is mu-GDP, mu = 2 Phi^-1(e/(1+e)).
    Assumes: Gaussian or pure steps, mu_n predictable.
    """
    if isinstance(guarantee, GDP):
        return _squared(stored(guarantee.mu))
    if isinstance(guarantee, PureDP):
        epsilon = stored(guarantee.epsilon)
        return _units(up(pure_to_gdp(float(epsilon)) ** 2), epsilon) if epsilon <= _HUGE else None
    return None


def _renyi(meter: Meter, guarantee: Guarantee) -> int | None:
    """Sum of Rényi divergences at one order.

    Theorem: (approximate) RDP filter at an order fixed beforehand (Feldman and Zrnic; Whitehouse et al.).
    Assumes: divergences predictable and valid in both directions; a step's delta is on the delta meter.
    """
    if meter.order is None:
        raise InvalidPolicy(f"meter {meter.name!r} needs an order")
    if isinstance(guarantee, Mechanism):
        return None if guarantee.curve is None else _renyi(meter, guarantee.curve)
    if isinstance(guarantee, RDP):
        divergence = guarantee.at(meter.order)
        return None if divergence is None else _written(divergence)
    source: Numeric
    curve: Callable[[float, float], float]
    if isinstance(guarantee, _PURE):
        source, curve = guarantee.epsilon, pure_to_rdp
    elif isinstance(guarantee, ZCDP):
        source, curve = guarantee.rho, zcdp_to_rdp
    elif isinstance(guarantee, GDP):
        source, curve = guarantee.mu, gdp_to_rdp
    else:
        return None
    # The order is a rational read as a float: a few more units of padding cover that.
    value = stored(source)
    return _units(up(curve(float(value), float(meter.order)), 64), value) if value <= _HUGE else None


def _exact(meter: Meter, guarantee: Guarantee) -> int | None:
    """Whole units of the certified value-function budget.

    Theorem: the exact filter: any adaptive sequence whose charges total at most the limit is within target.
    Assumes: the step is of a family the budget was certified with, or on its menu; charges predictable.
    """
    if meter.unit is None:
        raise InvalidPolicy(f"meter {meter.name!r} needs a unit")
    if isinstance(guarantee, Mechanism):
        charge = {name: (block, units) for name, block, units in meter.charges}.get(guarantee.name)
        return None if charge is None else -(-guarantee.steps // charge[0]) * charge[1]
    if isinstance(guarantee, GDP) and "gaussian" in meter.takes:
        mu = stored(guarantee.mu)
        if mu > _HUGE:
            return None
        # Twice the decimal's distance from the float, the square, the inverse unit and the product.
        sure = ceil_sure(mu * mu * meter.units_in_one, 12) if isinstance(mu, float) else None
        return max(LEAST_GAUSSIAN * (mu > 0), math.ceil(exact_of(mu) ** 2 / meter.unit) if sure is None else sure)
    if isinstance(guarantee, _PURE) and "pure" in meter.takes:
        epsilon = stored(guarantee.epsilon)
        if epsilon > _HUGE:
            return None
        time = pure_to_intrinsic(float(epsilon))
        sure = ceil_sure(time * meter.units_in_one, 4)
        return max(int(epsilon > 0), math.ceil(exactly(time) / meter.unit) if sure is None else sure)
    return None


def _drift(meter: Meter, guarantee: Guarantee) -> int | None:
    """What a probabilistic guarantee's delta adds to the loss that an odometer reads.

    Theorem: each (epsilon, delta)-pDP step adds at most delta epsilon / sinh(epsilon) (erratum E4).
    Assumes: two-sided pDP. A step known only to be (epsilon, delta)-DP has no such bound (erratum E15): it
        needs a slack fixed beforehand (Theorem 6).
    """
    if delta_of(guarantee) == 0 or meter.latent:
        return 0
    if isinstance(guarantee, ProbDP):
        epsilon, delta = stored(guarantee.epsilon), stored(guarantee.delta)
        return _units(probdp_drift(float(epsilon), float(delta)), delta) if epsilon <= _HUGE else None
    return None


def _moment(meter: Meter, guarantee: Guarantee) -> int | None:
    """Rényi divergence for an odometer: as the filter's clock, but a step with its own delta needs a slack."""
    return _renyi(meter, guarantee) if delta_of(guarantee) == 0 or meter.latent else None


# What a guarantee costs on a meter of each clock: whole units rounded up, or None where it has no price.
CLOCKS: Final[dict[str, Callable[[Meter, Guarantee], int | None]]] = {
    "delta": _delta,
    "drift": _drift,
    "epsilon": _epsilon,
    "exact": _exact,
    "gdp": _gdp,
    "intrinsic": _intrinsic,
    "moment": _moment,
    "paper": _paper,
    "renyi": _renyi,
}
