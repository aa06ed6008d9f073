"""A tree of four accounts, and what tests read of a ledger."""

from __future__ import annotations

from fractions import Fraction

from odograph import Ledger, Policy, PureDP

UNIT = 10**15
TENTH = PureDP(0.1)


def basic(epsilon: float | str = 1, delta: float | str = 0) -> Policy:
    return Policy(epsilon, delta, filter="basic")


def spent(ledger: Ledger, name: str) -> Fraction:
    return Fraction(ledger.account(name).totals.amounts[1], UNIT)


def record(ledger: Ledger) -> dict[str, tuple[int, str]]:
    return dict(ledger.checkpoint().accounts)


def family(ledger: Ledger) -> None:
    """Open a top account, two below it, and one below the first of these."""
    ledger.open_account("top", basic())
    ledger.open_account("ana", basic("0.5"), parent="top")
    ledger.open_account("ben", basic("0.7"), parent="top")
    ledger.open_account("ana-maps", basic("0.3"), parent="ana")


def totals_of(ledger: Ledger) -> dict[str, object]:
    return {one.name: one.totals for one in ledger.accounts()}
