"""The totals of a ledger's account after each of its charges, for plots of its reading over time.

They are computed backward from the current totals, so the newest part of a long history can be read alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from odograph.core.gate import Totals
from odograph.ledger.entries import CHARGES, price_from_text

if TYPE_CHECKING:
    from odograph.ledger.account import LedgerAccount

__all__ = ["State", "states"]

_PAGE: Final = 2000


class State(NamedTuple):
    """The totals after a charge, or when the account was opened."""

    time: int  # microseconds since 1970
    totals: Totals


def states(account: LedgerAccount, totals: Totals, sequence: int, most: int | None = None) -> tuple[State, ...]:
    """Return the totals after each charge that stands, oldest first; voided charges are left out.

    `totals` are those after the entry of that `sequence`. At most `most` entries are read, or all of them.
    """
    found: list[State] = []
    voided: set[str] = set()
    stop = 0 if most is None else max(0, sequence + 1 - most)
    for end in range(sequence + 1, stop, -_PAGE):
        first = max(stop, end - _PAGE)
        for entry in (past.entry for past in reversed(account.history(first, end - first))):
            if entry.verb == "void":  # it comes after what it takes back, so it is met first
                voided.add(entry.key)
            elif entry.verb in CHARGES and entry.called not in voided:
                found.append(State(entry.time, totals))
                totals = totals.without(price_from_text(entry.price))
            elif entry.verb == "open":
                found.append(State(entry.time, totals))
    return tuple(reversed(found))
