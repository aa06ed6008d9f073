"""An account's readings as they went, as numbers. What charts are drawn from, and their twin for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from odograph.core.compiled import other_odometers, reading
from odograph.core.decide import Totals
from odograph.core.odometers import Odometer
from odograph.ledger.account import LedgerAccount
from odograph.ledger.states import State, states

__all__ = ["MOST_ENTRIES", "MOST_POINTS", "Line", "Series", "series"]

MOST_POINTS: Final = 400  # of a line: more would not be seen
MOST_ENTRIES: Final = 20_000  # walked back through; older ones are left out, and the page says so


class Line(NamedTuple):
    """One odometer's readings; None where it had no finite bound."""

    name: str
    licensed: bool
    losses: tuple[float | None, ...]


class Series(NamedTuple):
    """Readings after the charges that stand, oldest first; the policy's odometer is the first line."""

    account: str
    promise: float
    steps: tuple[int, ...]
    times: tuple[int, ...]  # milliseconds since 1970
    lines: tuple[Line, ...]
    left_out: int  # how many older entries the series does not go back to


def series(account: LedgerAccount, totals: Totals, sequence: int, *, compare: bool) -> Series:
    """Return the readings of the policy's odometer as they went, and of others beside it if they are asked for."""
    policy = account.policy
    shown = _thinned(states(account, totals, sequence, MOST_ENTRIES))
    name = "sum of epsilons" if policy.rule == "basic" else _name(policy.odometer)
    lines = [Line(f"{name}, the policy's", licensed=True, losses=_losses(account, shown, None))]
    for other in other_odometers(policy) if compare else ():
        losses = _losses(account, shown, other)
        if losses and losses[-1] is not None:  # one without a finite reading has nothing to show
            lines.append(Line(f"{_name(other)}, for looking only", licensed=False, losses=losses))
    return Series(
        account.name,
        float(policy.epsilon),
        tuple(state.totals.steps for state in shown),
        tuple(state.time // 1000 for state in shown),
        tuple(lines),
        max(0, sequence + 1 - MOST_ENTRIES),
    )


def _thinned(found: Sequence[State]) -> list[State]:
    """Return at most `MOST_POINTS` of the states, evenly, with the first and the last."""
    if len(found) <= MOST_POINTS:
        return [*found]
    last = len(found) - 1
    return [found[i * last // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


def _losses(account: LedgerAccount, shown: Sequence[State], odometer: Odometer | None) -> tuple[float | None, ...]:
    losses = [
        reading(account.compiled, state.totals, odometer).loss if state.totals.steps else 0.0 for state in shown
    ]
    return tuple(loss if math.isfinite(loss) else None for loss in losses)


def _name(odometer: Odometer) -> str:
    return odometer.kind.replace("-", " ")
