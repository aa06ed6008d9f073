"""Change the history in a SQLite file as its owner can: without triggers, with new seals and balances."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import odograph as odo
from odograph import BudgetExceeded, Checkpoint, Ledger, Policy, PureDP
from odograph.core.gate import Totals
from odograph.ledger.entries import START, Entry, totals_to_text

TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")
Rows = dict[str, list[Entry]]
INSERT = "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


def tamper(file: Path, *statements: str | tuple[str, tuple[object, ...]]) -> None:
    """Change the file as its owner can: without triggers and foreign keys."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        triggers = connection.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            connection.execute(*([statement] if isinstance(statement, str) else statement))
        for _, sql in triggers:
            connection.execute(sql)
        connection.execute("COMMIT")


def read(file: Path) -> Rows:
    found: Rows = {}
    with closing(sqlite3.connect(file)) as connection:
        for row in connection.execute("SELECT * FROM entries ORDER BY account, sequence"):
            found.setdefault(row[1], []).append(Entry(*row))
    return found


def write(file: Path, rows: Rows) -> None:
    every = [(INSERT, tuple(one)) for chain in rows.values() for one in chain]
    tamper(file, "DELETE FROM entries", *every)


def read_loosely(price: str) -> list[int | None]:
    """A price in any form that Python reads as numbers."""
    return [None if amount == "-" else int(amount) for amount in price.split(" ")]


def replayed(chain: list[Entry]) -> Totals:
    """Return the sum of a chain, for a forged balance."""
    size = len(chain[0].details["compiled"]["meters"])
    amounts, unpriced, steps = [0] * size, [0] * size, 0
    for entry in chain:
        sign = {"spend": 1, "reserve": 1, "void": -1}.get(entry.verb, 0) if entry.price else 0
        steps += sign
        for i, amount in enumerate(read_loosely(entry.price) if sign else ()):
            amounts[i] += sign * (amount or 0)
            unpriced[i] += sign * (amount is None)
    return Totals(tuple(amounts), tuple(unpriced), steps)


def forge(file: Path, rows: Rows) -> None:
    """Write rows with new seals and balances: all that can be done without the checkpoint."""
    balances = []
    for name, chain in rows.items():
        seal = START
        for i, entry in enumerate(chain):
            seal = entry.reseal(seal)
            chain[i] = entry._replace(seal=seal)
        balance = (chain[-1].sequence, seal, chain[-1].time, totals_to_text(replayed(chain)), name)
        balances.append(("UPDATE accounts SET sequence = ?, seal = ?, time = ?, totals = ? WHERE name = ?", balance))
    write(file, rows)
    tamper(file, *balances)


def put(file: Path, entry: Entry) -> None:
    gone = ("DELETE FROM entries WHERE account = ? AND sequence = ?", (entry.account, entry.sequence))
    tamper(file, gone, (INSERT, tuple(entry)))


def fill(ledger: Ledger) -> None:
    ledger.open_account("top", Policy(1, "1e-6", filter="zcdp"))
    ledger.open_account("ana", BASIC, parent="top")
    ledger.open_account("ben", BASIC, parent="top")
    ledger.open_account("lone", BASIC)
    ledger.account("ana").spend(TENTH, key="q", note="first")
    ledger.spend({"ana": TENTH, "ben": PureDP("0.2")}, key="r")
    ledger.account("ana").reserve(TENTH, expires=3600).void("not run")
    ledger.account("ben").reserve(TENTH).commit()
    with pytest.raises(BudgetExceeded):
        ledger.account("ana").spend(PureDP(7))
    ledger.account("ana").spend(PureDP("0.05"))
    for i in range(4):
        ledger.account("lone").spend(PureDP("0.2"), key=f"l{i}")
    ledger.account("ben").close()


def verified(file: Path, checkpoint: Checkpoint | None = None) -> Checkpoint:
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        return ledger.verify(checkpoint=checkpoint).checkpoint
