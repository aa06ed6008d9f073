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
from odograph.core.value_iteration import COARSE, FAMILIES, VERSION, Budget, Reserve, family_quantum, solve
from odograph.errors import InvalidArgument, InvalidPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from odograph.progress import Progress

__all__ = [
    "Certification",
    "ExactTable",
    "cache_folder",
    "certification",
    "compile_at_hand",
    "compile_policy",
    "exact_table",
    "find_budget",
]

_FINENESSES: Final = range(1, 101)
_TABLE_FILE: Final = Path(__file__).with_name("exact_table.json")
_solved_here: dict[str, Budget] = {}  # by key; the cache folder may not be writable


class ExactTable(NamedTuple):
    """Certified budgets for pure and Gaussian steps of any size together: rows of epsilon, delta and the units."""

    solver: int  # the version of the solver
    fineness: int  # the quantum of a row is `family_quantum` of its target at this
    rows: tuple[tuple[str, str, int], ...]


@cache
def exact_table() -> ExactTable:
    """Return the shipped table of budgets for common targets, which tools/build_table.py writes."""
    form = json.loads(_TABLE_FILE.read_text(encoding="utf-8"))
    return ExactTable(form["solver"], form["fineness"], tuple((e, d, units) for e, d, units in form["rows"]))


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
    need = compiled.policy.need
    if need is None:
        return Certification.CLOSED_FORM  # `check_compiled` has compared them
    meter = compiled.meter(SmoothMeter) if need.reserve else compiled.meter(ExactMeter)
    if (
        not need.menu
        and not _needs_values(need)
        and any(_covers(row, need, meter) for row in _stricter_rows(need, meter.quantum))
    ):
        return Certification.TABLE
    for fineness in _FINENESSES:
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
        return (meter.limit or 0) <= budget.units
    aside = budget.reserve
    same = aside is not None and (aside.units, aside.order) == (meter.reserve, meter.order)
    return same and aside is not None and (meter.limit or 0) <= aside.left * budget.quantum * SCALE


def _stricter_rows(need: Need, quantum: Fraction) -> Iterator[Budget]:
    """Yield the budgets of the table for this target or a stricter one, if they have this quantum."""
    for row in exact_table().rows:
        epsilon, delta = Fraction(row[0]), Fraction(row[1])
        near = (epsilon / 100) ** 2 / exact_table().fineness
        if epsilon <= need.epsilon and delta <= need.delta and abs(quantum / near - 1) < Fraction(1, 10**6):
            yield _with_reserve(_budget_of_row(row), need)


def compile_policy(
    policy: Policy, *, solve: bool = True, fineness: int = COARSE, progress: Progress | None = None
) -> Compiled:
    """Compile a policy to its meters, once; every account keeps what it was opened with.

    Targets in the shipped table are instant. Any other is solved in seconds and cached on this machine;
    `fineness=25` makes charges as fine as the table's, in a minute or two, and `progress=odo.progress_bar` shows
    the progress. With `solve=False` the nearest stricter target of the table is used instead, and the note says so.
    """
    need = policy.need
    if need is None:
        return compile_meters(policy)
    budget, note = find_budget(need, solve=solve, fineness=fineness, progress=progress)
    return compile_meters(policy, budget, note)


def compile_at_hand(policy: Policy) -> Compiled | None:
    """Compile a policy without solving; None if that needs a budget that is neither in the table nor cached."""
    need = policy.need
    if need is None:
        return compile_meters(policy)
    found = _at_hand(need, COARSE)
    return None if found is None else compile_meters(policy, *found)


def find_budget(
    need: Need, *, solve: bool = True, fineness: int = COARSE, progress: Progress | None = None
) -> tuple[Budget, str]:
    """Return the budget that a policy needs, and a note on where it came from."""
    if isinstance(fineness, bool) or not isinstance(fineness, int) or fineness not in _FINENESSES:
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


def _at_hand(need: Need, fineness: int) -> tuple[Budget, str] | None:
    """Return a budget of the table, or one that was solved on this machine before."""
    listed = _table_budget(need, fineness)
    if listed is not None:
        return listed
    budget = _read_cached(_path(need, fineness), need)
    return None if budget is None else (budget, "budget solved on this machine before")


def _table_budget(need: Need, fineness: int) -> tuple[Budget, str] | None:
    if need.takes == FAMILIES and not need.menu and not _needs_values(need) and fineness <= exact_table().fineness:
        for row in exact_table().rows:
            if (Fraction(row[0]), Fraction(row[1])) == (need.epsilon, need.delta):
                return _with_reserve(_budget_of_row(row), need), "budget from the shipped table"
    return None


def _needs_values(need: Need) -> bool:
    """Return whether a reserve is computed from more than the units of a budget, which is all that the table has."""
    return bool(need.reserve) and RESERVES[need.reserve].has_order


def _with_reserve(budget: Budget, need: Need) -> Budget:
    return set_aside(budget, need.reserve) if need.reserve else budget


def _path(need: Need, fineness: int) -> Path:
    return cache_folder() / f"{_key(need, fineness)}.json"


def cache_folder() -> Path:
    """Return the folder of solved budgets: $ODOGRAPH_CACHE, else the user's cache folder."""
    chosen = os.environ.get("ODOGRAPH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "odograph"


def _solve(need: Need, fineness: int, progress: Progress | None) -> Budget:
    if any(not item.directions for item in need.menu):
        raise InvalidPolicy(
            "the items of a stored menu have no loss distributions, which solving needs; build them again"
        )
    if need.reserve:
        return solve_reserve(need, fineness, progress)
    return solve(need.epsilon, need.delta, takes=need.takes, menu=need.menu, fineness=fineness, progress=progress)


def _budget_of_row(row: tuple[str, str, int]) -> Budget:
    epsilon, delta = Fraction(row[0]), Fraction(row[1])
    quantum = family_quantum(epsilon, delta, exact_table().fineness)
    return Budget(epsilon, delta, FAMILIES, quantum, row[2], exact_table().fineness, version=exact_table().solver)


def _stricter_budget(need: Need) -> tuple[Budget, str]:
    """Return the best budget of a stricter target of the table: budgets grow with epsilon and with delta."""
    stricter = [
        _budget_of_row(row)
        for row in exact_table().rows
        if Fraction(row[0]) <= need.epsilon and Fraction(row[1]) <= need.delta and not need.menu
    ]
    if not stricter or not need.takes or set(need.takes) - set(FAMILIES) or _needs_values(need):
        raise InvalidPolicy(
            "solve=False needs a target of the shipped table, or a stricter one that takes the same steps; pass"
            " solve=True"
        )
    # A budget for both families is one for either.
    best = _with_reserve(replace(max(stricter, key=lambda budget: budget.intrinsic), takes=need.takes), need)
    note = f"budget of the stricter target ({float(best.epsilon):g}, {float(best.delta):g}) from the shipped table"
    return best, note


def _key(need: Need, fineness: int) -> str:
    menu = [(item.name, item.block, item.digest) for item in need.menu]
    parts = [VERSION, str(need.epsilon), str(need.delta), need.takes, menu, fineness]
    if need.reserve:
        parts.append(need.reserve)
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
