"""The exact filter: integer units within a budget that was certified by value iteration, not by an inequality.

Its steps are those of two families (any (epsilon, delta)-DP step, any Gaussian) and of a menu of mechanisms whose
privacy-loss distributions are known. `odograph.core.value_iteration` certifies budgets; here they become a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Final

from odograph.core.conversions import intrinsic_to_pure, largest_mu
from odograph.core.fixed_point import (
    CEILING,
    MOST_PRICED,
    ceil_sure,
    down,
    exact_of,
    exactly,
    level,
    read,
)
from odograph.core.guarantees import GDP, Guarantee, Mechanism, number_of
from odograph.core.mechanisms import MenuItem
from odograph.core.meters import WITH_EPSILON, Filter, Meter, PureStep, Target
from odograph.core.theory import kov_delta
from odograph.core.value_iteration import FAMILIES, LEAST_GAUSSIAN, MOST_BLOCKS
from odograph.errors import InvalidPolicy

__all__ = [
    "Exact",
    "ExactMeter",
    "Need",
    "is_refuted",
    "read_charges",
    "read_items",
    "read_quantum",
    "started_units",
]

_MOST_PARTS: Final = 10**9  # of a unit
_MOST_STEPS: Final = 10**6  # that a refutation composes: its work grows as their square root


def started_units(charges: Sequence[tuple[str, int, int]]) -> Fraction:
    """Return the units by which blocks that are begun can exceed what their runs are charged.

    Theorem: runs of a menu's mechanism: n runs of an item whose blocks of b cost m units use ceil(n/b) m <= n m/b + m
        (1 - 1/b) units. A block is drawn from its dominating pair when its first run starts; runs that come later, in
        between other steps, are revealed from it (interactive postprocessing).
    Assumes: each run is dominated by the item's pair whatever was released before it, as for a menu at all.
    """
    return sum((units * Fraction(block - 1, block) for _, block, units in charges), Fraction(0))


def read_quantum(value: object) -> Fraction:
    """Read the quantum of a stored meter."""
    return read(value, "quantum", InvalidPolicy)


def read_charges(value: object) -> tuple[tuple[str, int, int], ...]:
    """Read the charges of a menu in a stored meter."""
    return tuple((str(name), int(block), int(units)) for name, block, units in read_items(value))


def read_items(value: object) -> tuple[Any, ...]:
    """Read a list of a stored meter or policy."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"the option must be a list (got {value!r:.80})")
    return tuple(value)


def _menu(value: object) -> tuple[MenuItem, ...]:
    return tuple(MenuItem(**item) for item in read_items(value))


@dataclass(frozen=True, slots=True)
class ExactMeter(Meter):
    """Units of a certified budget: multiples of `quantum`, for the families in `takes` and a menu's `charges`.

    A charge is a name, the runs in a block, and the units that a block costs. A menu alone counts in blocks, which
    have no quantum (0). Each unit is counted in `parts`, so that a run is charged its part of a block; accounts of
    0.1.0 have no parts, and are charged whole blocks.
    """

    pricing: ClassVar[str] = "exact"
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "quantum": read_quantum,
        "takes": read_items,
        "charges": read_charges,
        "parts": int,
    }

    quantum: Fraction
    takes: tuple[str, ...]
    charges: tuple[tuple[str, int, int], ...] = ()
    parts: int = 1
    units_in_one: float = field(default=0.0, init=False, repr=False, compare=False)  # 1/quantum, nearly

    def __post_init__(self) -> None:
        if self.quantum:
            object.__setattr__(self, "units_in_one", float(1 / self.quantum))

    @property
    def scale(self) -> Fraction:
        """Units per 1 of intrinsic time; for a menu alone, per block."""
        return self.parts / self.quantum if self.quantum else Fraction(self.parts)

    @property
    def certified_units(self) -> int:
        """The units that a budget must have been certified for, if charges may total the limit."""
        started = started_units(self.charges) if self.parts > 1 else 0
        return math.ceil(Fraction(self.limit or 0, self.parts) + started)

    @property
    def has_sound_options(self) -> bool:
        """Whether a budget can have been certified with these options."""
        counts = self.quantum > 0 or (self.quantum == 0 and not self.takes)
        known = set(self.takes) <= set(FAMILIES) and bool(self.takes or self.charges)
        return (
            counts and known and self.parts >= 1 and all(min(block, units) >= 1 for _, block, units in self.charges)
        )

    def price(self, guarantee: Guarantee) -> int | None:
        """Integer units of the certified value-function budget.

        Theorem: the exact filter: any adaptive sequence whose charges total at most the limit is within target.
        Assumes: the step is of a family the budget was certified with, or on its menu; charges predictable.
        """
        if isinstance(guarantee, Mechanism):
            return self._price_runs(guarantee)
        if isinstance(guarantee, WITH_EPSILON):
            return self._price_epsilon(guarantee)
        return self._price_gaussian(guarantee) if isinstance(guarantee, GDP) else None

    def price_pure(self, step: PureStep) -> int | None:
        """Return the units for the intrinsic time, as `price` does."""
        if "pure" not in self.takes:
            return None
        sure = ceil_sure(step.time * self.units_in_one, 4.0)
        units = max(int(step.written > 0), math.ceil(exactly(step.time) / self.quantum)) if sure is None else sure
        return units * self.parts

    def _price_runs(self, guarantee: Mechanism) -> int | None:
        charge = {name: (block, units) for name, block, units in self.charges}.get(guarantee.name)
        if charge is None:
            return None
        block, units = charge
        if self.parts == 1:
            return -(-guarantee.steps // block) * units
        return -(-guarantee.steps * units * self.parts // block)

    def _price_gaussian(self, guarantee: GDP) -> int | None:
        mu = number_of(guarantee.mu)
        if mu > MOST_PRICED or "gaussian" not in self.takes:
            return None
        # Twice the decimal's distance from the float, the square, the inverse quantum and the product.
        sure = ceil_sure(mu * mu * self.units_in_one, 12) if isinstance(mu, float) else None
        units = math.ceil(exact_of(mu) ** 2 / self.quantum) if sure is None else sure
        return max(LEAST_GAUSSIAN * (mu > 0), units) * self.parts


@dataclass(frozen=True, slots=True)
class Need:
    """The budget that an exact filter needs: a target, and the steps that it takes."""

    epsilon: Fraction
    delta: Fraction
    takes: tuple[str, ...]
    menu: tuple[MenuItem, ...]
    reserve: str = ""  # the name of a reserve, for the smooth filter


@dataclass(frozen=True, slots=True, init=False)
class Exact(Filter):
    """The exact filter: it takes the families in `takes` ("pure", "gaussian") and the mechanisms on its `menu`."""

    kind: ClassVar[str] = "exact"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, GDP, Mechanism)
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"takes": read_items, "menu": _menu}

    takes: tuple[str, ...]
    menu: tuple[MenuItem, ...]

    def __init__(self, *, takes: Sequence[str] = FAMILIES, menu: Sequence[MenuItem] = ()) -> None:
        if isinstance(takes, str) or set(takes) - set(FAMILIES):
            raise InvalidPolicy(f"takes must list families of {FAMILIES} (got {takes!r})")
        if not all(isinstance(item, MenuItem) for item in menu):
            raise InvalidPolicy(f"menu must list menu items (got {menu!r})")
        if len({item.name for item in menu}) < len(menu):
            names = sorted(item.name for item in menu)
            raise InvalidPolicy(f"menu items must have different names (got {', '.join(names)})")
        object.__setattr__(self, "takes", tuple(sorted(set(takes))))
        object.__setattr__(self, "menu", tuple(menu))

    def accepts(self, guarantee: Guarantee, neighbors: str) -> bool:  # noqa: ARG002  as every filter
        """Return whether a theorem covers the guarantee under this filter."""
        if isinstance(guarantee, Mechanism):
            return any(item.name == guarantee.name for item in self.menu)
        return self.family_of(guarantee) in self.takes

    def family_of(self, guarantee: Guarantee) -> str | None:
        """Return the family that a step belongs to, if any."""
        if isinstance(guarantee, WITH_EPSILON):
            return "pure"
        return "gaussian" if isinstance(guarantee, GDP) else None

    def takes_curves(self, neighbors: str) -> bool:
        """Return whether steps may come that have a Rényi curve and no intrinsic time."""
        return bool(self.menu) and neighbors == "add-remove"

    def check_neighbors(self, neighbors: str) -> None:
        """Raise `InvalidPolicy` if the menu was made for other neighbors."""
        if any(item.neighbors != neighbors for item in self.menu):
            raise InvalidPolicy(
                f"neighbors must be those that the menu's items were analyzed for, {self.menu[0].neighbors!r} (got"
                f" {neighbors!r})"
            )

    def need(self, target: Target) -> Need:
        """Return what a budget has to be certified for."""
        return Need(target.epsilon, target.delta, self.takes, self.menu)

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Integer units within the certified value-function budget.

        Theorem: the exact filter and its menu form.
        Assumes: steps of the families, or on the menu, that the budget was certified with.
        """
        budget = target.budget
        if budget is None or budget.epsilon > target.epsilon or budget.delta > target.delta:
            raise InvalidPolicy(
                "the exact filter needs a budget certified for this target or a stricter one; compile the policy with"
                " compile_policy"
            )
        parts = min(_MOST_PARTS, math.lcm(*(block for _, block, _ in budget.charges)))
        started = started_units(budget.charges) if parts > 1 else 0
        limit = min(CEILING, max(0, math.floor((budget.units - started) * parts)))
        return (ExactMeter("exact", limit, budget.quantum, budget.takes, budget.charges, parts),)

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with one of this filter, not known to be too large; return the others."""
        if not meters or not isinstance(meters[0], ExactMeter):
            raise InvalidPolicy("a compiled policy must have one meter for its exact filter")
        meter = meters[0]
        if not self.has_options_of(meter) or is_refuted(target.epsilon, target.delta, meter):
            raise InvalidPolicy(
                f"the budget must be one certified for this policy (got {meter.limit} units of"
                f" {float(meter.quantum):.4g} for {[*meter.takes, *(name for name, *_ in meter.charges)]}); compile"
                " the policy here with compile_policy"
            )
        return meters[1:]

    def has_options_of(self, meter: ExactMeter) -> bool:
        """Return whether a meter counts what this filter takes."""
        listed = [(item.name, item.block) for item in self.menu]
        return meter.takes == self.takes and [(name, block) for name, block, _ in meter.charges] == listed

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        # Certified budgets are 94 to 99% of it, and are not known before a policy is compiled.
        return largest_mu(epsilon, delta) ** 2

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the options."""
        return {"kind": self.kind, "takes": [*self.takes], "menu": [item.to_dict() for item in self.menu]}


@lru_cache(maxsize=1024)
def is_refuted(epsilon: Fraction, delta: Fraction, meter: ExactMeter) -> bool:
    """Return whether steps that an exact meter would admit are known to exceed the target.

    False does not certify the meter; `odograph.compile.certification` does.

    Theorem: a Gaussian that uses up the limit is mu-GDP with mu^2 = quantum * limit; equal pure steps that use it up
        have the divergence of optimal composition (Kairouz, Oh and Viswanath (2015)).
    Assumes: the steps are charged as by `solve`; what a menu's mechanisms lose is not known from a document.
    """
    limit, quantum = meter.certified_units, meter.quantum
    # Charges are rounded so that an item gets at most three times the blocks that it gets alone.
    if any(limit // charge > 4 * MOST_BLOCKS for _, _, charge in meter.charges):
        return True
    if not meter.takes:
        return False
    generous = 1 + Fraction(1, 10**9)  # the last digits of a float decide nothing
    most = exactly(largest_mu(float(epsilon), level(delta))) ** 2 * generous
    if quantum * limit > (most if "gaussian" in meter.takes and limit >= LEAST_GAUSSIAN else 2 * most):
        return True
    if "pure" not in meter.takes:
        return False
    return any(
        Fraction(kov_delta(limit // size, _pure_step(size * quantum), 0.0, epsilon)) > delta * generous
        for size in [1 << bit for bit in range(limit.bit_length())]
        if limit // size <= _MOST_STEPS
    )


def _pure_step(time: Fraction) -> float:
    """Return an epsilon whose step is charged at most this intrinsic time."""
    return down(intrinsic_to_pure(down(float(time))), 64)
