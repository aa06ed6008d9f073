"""Compile policies. An exact budget comes from the shipped table, this machine's cache, or the solver."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from odograph.core.filters import ExactMeter, SmoothMeter
from odograph.core.filters.smooth import RESERVES, set_aside, solve_reserve
from odograph.core.fixed_point import SCALE
from odograph.core.policy import Compiled, Need, Policy, compile_meters
from odograph.core.value_iteration import (
    FAMILIES,
    VERSION,
    Budget,
    Reserve,
    family_quantum,
    solve,
    usual_fineness,
)
from odograph.display import SlowNotice
from odograph.errors import InvalidArgument, InvalidPolicy, with_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from odograph.display import Progress

__all__ = [
    "Certification",
    "ExactTable",
    "TableRow",
    "cache_folder",
    "certification",
    "compile_at_hand",
    "compile_policy",
    "exact_tables",
    "find_budget",
]

_FINENESSES: Final = range(1, 101)
_TABLE_FILE: Final = Path(__file__).with_name("exact_table.json")
_solved_here: dict[str, Budget] = {}  # by key; the cache folder may not be writable


class TableRow(NamedTuple):
    """A certified budget for pure and Gaussian steps of any size together, and what its reserves leave of it."""

    epsilon: Fraction
    delta: Fraction
    fineness: int  # the quantum is `family_quantum` of the target at this
    units: int
    reserves: Mapping[str, Reserve]  # those with an order; others follow from the units

    def budget(self, table: ExactTable) -> Budget:
        """Return the row as a budget."""
        quantum = family_quantum(self.epsilon, self.delta, self.fineness)
        return Budget(self.epsilon, self.delta, FAMILIES, quantum, self.units, self.fineness, version=table.solver)

    def budget_for(self, need: Need, table: ExactTable) -> Budget | None:
        """Return the row as a budget with the reserve that is needed; None if the table does not have it."""
        budget = self.budget(table)
        if not need.reserve:
            return budget
        if not RESERVES[need.reserve].has_order:
            return set_aside(budget, need.reserve)
        reserve = self.reserves.get(need.reserve)
        return None if reserve is None else replace(budget, reserve=reserve)


class ExactTable(NamedTuple):
    """The budgets that one version of the solver certified."""

    solver: int
    rows: tuple[TableRow, ...]


@cache
def exact_tables() -> tuple[ExactTable, ...]:
    """Return the shipped tables: the present one, which tools/build_table.py writes, and that of 0.1.0.

    Accounts of 0.1.0 are certified by its table; new ones are compiled with the present one.
    """
    form = json.loads(_TABLE_FILE.read_text(encoding="utf-8"))
    return tuple(ExactTable(table["solver"], tuple(map(_table_row, table["rows"]))) for table in form["tables"])


def _table_row(row: Sequence[Any]) -> TableRow:
    epsilon, delta, fineness, units, *reserves = row
    found = {name: Reserve(aside, Fraction(order), left) for name, aside, order, left in reserves}
    return TableRow(Fraction(epsilon), Fraction(delta), fineness, units, found)


class Certification(StrEnum):
    """How this installation knows that the limits of a compiled policy keep its promise."""

    CLOSED_FORM = "closed form"
    TABLE = "shipped table"
    SOLVED = "solved here"
    NONE = "not certified here"

    @property
    def warning(self) -> str:
        """The warning that belongs to limits that are not certified here; empty for others."""
        if self is not Certification.NONE:
            return ""
        return (
            "limits not certified here: they were computed elsewhere, and this installation has not checked that they"
            " keep the promise; compile_policy with the same policy and menu does"
        )


def certification(compiled: Compiled) -> Certification:
    """Return how this installation knows the limits: by a closed form, the table, or a budget that was solved here.

    What a document states about its budget is not trusted. Nothing is solved; a cached budget is read in
    milliseconds. Limits that are known to be too large were refused when the document was read.
    """
    need = compiled.need
    if need is None:
        return Certification.CLOSED_FORM  # `check_compiled` has compared them
    meter = compiled.meter(SmoothMeter) if need.reserve else compiled.meter(ExactMeter)
    if not need.menu and any(_covers(row, need, meter) for row in _stricter_rows(need, meter.quantum)):
        return Certification.TABLE
    # The usual one of an extreme target is beyond those that may be asked for.
    for fineness in {usual_fineness(need.epsilon, need.delta), *_FINENESSES}:
        key = _key(need, fineness)
        budget = _solved_here.get(key) or _read_cached(cache_folder() / f"{key}.json", need)
        if budget is not None and _covers(budget, need, meter):
            return Certification.SOLVED
    return Certification.NONE


def _covers(budget: Budget, need: Need, meter: ExactMeter | SmoothMeter) -> bool:
    """Return whether a certified budget is for this target or a stricter one, for these steps, and large enough."""
    target = budget.epsilon <= need.epsilon and budget.delta <= need.delta
    steps = (budget.quantum, budget.charges) == (meter.quantum, meter.charges) and {*meter.takes} <= {*budget.takes}
    if not target or not steps:
        return False
    if isinstance(meter, ExactMeter):
        return meter.certified_units <= budget.units
    aside = budget.reserve
    same = aside is not None and (aside.units, aside.order) == (meter.reserve, meter.order)
    return same and aside is not None and (meter.limit or 0) <= aside.left * budget.quantum * SCALE


def _stricter_rows(need: Need, quantum: Fraction) -> Iterator[Budget]:
    """Yield the budgets of the tables for this target or a stricter one, if they have this quantum."""
    for table in exact_tables():
        for row in table.rows:
            near = (row.epsilon / 100) ** 2 / row.fineness
            alike = abs(quantum / near - 1) < Fraction(1, 10**6)
            if row.epsilon <= need.epsilon and row.delta <= need.delta and alike:
                budget = row.budget_for(need, table)
                if budget is not None:
                    yield budget


@with_usage("it takes a policy, such as compile_policy(Policy(1, 1e-6))")
def compile_policy(
    policy: Policy, *, solve: bool = True, fineness: int | None = None, progress: Progress | None = None
) -> Compiled:
    """Compile a policy to its meters, once; every account keeps what it was opened with.

    Targets in the shipped table are instant. Any other is solved in two or three seconds and cached on this machine;
    a solve of more than a second reports its progress on standard error, or to `progress`. A `fineness` of 25, units
    in a step of epsilon/100, gains less than half a percent, in a minute or two. With `solve=False` the nearest
    stricter target of the table is used instead, and the note says so.
    """
    if not isinstance(policy, Policy):
        raise InvalidPolicy(f"policy must be a policy, such as Policy(1, 1e-6) (got {policy!r})")
    need = policy.need
    if need is None:
        return compile_meters(policy)
    what = f"solving the budget of {policy.target}, once on this machine; it takes some seconds"
    with SlowNotice(what) as notice:
        budget, note = find_budget(need, solve=solve, fineness=fineness, progress=progress or notice)
    return compile_meters(policy, budget, note)


def compile_at_hand(policy: Policy) -> Compiled | None:
    """Compile a policy without solving; None if that needs a budget that is neither in the table nor cached."""
    need = policy.need
    if need is None:
        return compile_meters(policy)
    found = _at_hand(need, None)
    return None if found is None else compile_meters(policy, *found)


def find_budget(
    need: Need, *, solve: bool = True, fineness: int | None = None, progress: Progress | None = None
) -> tuple[Budget, str]:
    """Return the budget that a policy needs, and a note on where it came from."""
    if fineness is not None and (type(fineness) is not int or fineness not in _FINENESSES):
        raise InvalidArgument(f"fineness must be an integer from 1 to 100 (got {fineness!r})")
    if not solve:
        return _table_budget(need, fineness) or _stricter_budget(need)
    found = _at_hand(need, fineness)
    if found is not None:
        return found
    budget = _solve(need, fineness, progress)
    _solved_here[_key(need, fineness)] = budget
    _write_cached(_path(need, fineness), budget)
    return budget, "budget solved for this policy"


def _at_hand(need: Need, fineness: int | None) -> tuple[Budget, str] | None:
    """Return a budget of the table, or one that was solved on this machine before."""
    listed = _table_budget(need, fineness)
    if listed is not None:
        return listed
    budget = _read_cached(_path(need, fineness), need)
    return None if budget is None else (budget, "budget solved on this machine before")


def _table_budget(need: Need, fineness: int | None) -> tuple[Budget, str] | None:
    table = exact_tables()[0]
    if need.takes == FAMILIES and not need.menu:
        for row in table.rows:
            if (row.epsilon, row.delta) == (need.epsilon, need.delta) and (fineness or 0) <= row.fineness:
                budget = row.budget_for(need, table)
                return None if budget is None else (budget, "budget from the shipped table")
    return None


def _path(need: Need, fineness: int | None) -> Path:
    return cache_folder() / f"{_key(need, fineness)}.json"


def cache_folder() -> Path:
    """Return the folder of solved budgets: $ODOGRAPH_CACHE, else the user's cache folder."""
    chosen = os.environ.get("ODOGRAPH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odograph"


def _solve(need: Need, fineness: int | None, progress: Progress | None) -> Budget:
    if any(not item.directions for item in need.menu):
        raise InvalidPolicy(
            "the items of a stored menu have no loss distributions, which solving needs; build them again"
        )
    if need.reserve:
        return solve_reserve(need, fineness, progress)
    return solve(need.epsilon, need.delta, takes=need.takes, menu=need.menu, fineness=fineness, progress=progress)


def _stricter_budget(need: Need) -> tuple[Budget, str]:
    """Return the best budget of a stricter target of the table: budgets grow with epsilon and with delta."""
    table = exact_tables()[0]
    stricter = [
        row.budget_for(need, table)
        for row in table.rows
        if row.epsilon <= need.epsilon and row.delta <= need.delta and not need.menu
    ]
    known = [budget for budget in stricter if budget is not None]
    if not known or not need.takes or set(need.takes) - set(FAMILIES):
        raise InvalidPolicy(
            "solve=False needs a target of the shipped table, or a stricter one that takes the same steps; pass"
            " solve=True"
        )
    # A budget for both families is one for either.
    best = replace(max(known, key=lambda budget: budget.intrinsic), takes=need.takes)
    note = f"budget of the stricter target ({float(best.epsilon):g}, {float(best.delta):g}) from the shipped table"
    return best, note


def _key(need: Need, fineness: int | None) -> str:
    fineness = usual_fineness(need.epsilon, need.delta) if fineness is None else fineness
    menu = [(item.name, item.block, item.digest) for item in need.menu]
    parts = [VERSION, str(need.epsilon), str(need.delta), need.takes, menu, fineness]
    if need.reserve:
        parts.append([need.reserve, *map(str, RESERVES[need.reserve][1:])])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_cached(path: Path, need: Need) -> Budget | None:
    """Return the cached budget; None if there is none, or it is damaged or for another need."""
    try:
        form: dict[str, Any] = json.loads(path.read_text())
        budget = Budget(
            Fraction(form["epsilon"]),
            Fraction(form["delta"]),
            tuple(form["takes"]),
            Fraction(form["unit"]),
            int(form["units"]),
            int(form["fineness"]),
            tuple((str(n), int(b), int(c)) for n, b, c in form["charges"]),
            int(form["version"]),
            _reserve_from_dict(form["reserve"]) if "reserve" in form else None,
        )
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    same = (budget.epsilon, budget.delta, budget.takes, budget.version) == (*_target(need), VERSION)
    same = same and (budget.reserve is not None) == bool(need.reserve)
    return budget if same and form.get("digest") == _digest(budget) else None


def _target(need: Need) -> tuple[Fraction, Fraction, tuple[str, ...]]:
    return need.epsilon, need.delta, need.takes


def _reserve_from_dict(form: Mapping[str, Any]) -> Reserve:
    order = None if form["order"] is None else Fraction(form["order"])
    return Reserve(int(form["units"]), order, int(form["left"]))


def _budget_to_dict(budget: Budget) -> dict[str, Any]:
    aside = budget.reserve
    order = None if aside is None or aside.order is None else str(aside.order)
    reserve = {} if aside is None else {"reserve": {"units": aside.units, "order": order, "left": aside.left}}
    return reserve | {
        "epsilon": str(budget.epsilon),
        "delta": str(budget.delta),
        "takes": budget.takes,
        "unit": str(budget.quantum),
        "units": budget.units,
        "fineness": budget.fineness,
        "charges": budget.charges,
        "version": budget.version,
    }


def _digest(budget: Budget) -> str:
    """Return a check against damage, not against the owner of the folder."""
    return hashlib.sha256(json.dumps(_budget_to_dict(budget)).encode()).hexdigest()


def _write_cached(path: Path, budget: Budget) -> None:
    import tempfile  # noqa: PLC0415  slow to import, and seldom needed

    # A cache that cannot be written only costs another solve.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump({**_budget_to_dict(budget), "digest": _digest(budget)}, file)
                file.flush()
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)
