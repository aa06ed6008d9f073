"""The charges among the entries of an account's history."""

from __future__ import annotations

from odograph import Account
from odograph.ledger.results import HistoryEntry


def charges(account: Account) -> tuple[HistoryEntry, ...]:
    """Return the entries that charged, oldest first: not openings, commits, voids, refusals and closings."""
    return tuple(entry for entry in account.history() if entry.verb in {"spend", "reserve"})
