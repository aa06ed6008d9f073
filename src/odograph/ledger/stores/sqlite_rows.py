"""Rows of a SQLite ledger: what a group of requests reads and stores, in few statements."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from odograph.ledger.stores.base import Balance, Changes, IdempotencyRecord, State, Wants
from odograph.ledger.stores.sql import queries

__all__ = ["SQL", "many", "read_state", "store_changes"]

SQL: Final = queries("sqlite")
_VALUES: Final = re.compile(r"VALUES (\((?:[^()]|\([^()]*\))*\))")
_TOGETHER: Final = 64  # rows in one statement at most


def read_state(connection: sqlite3.Connection, wants: Wants) -> State:
    """Read what a group of requests wants, inside its transaction."""
    rows = many(connection, "some_accounts", [*zip(wants.accounts, strict=True)])
    for query, names in (("tree", wants.trees), ("block", wants.datasets)) if wants.opens else ():
        rows += [row for name in names for row in connection.execute(SQL[query], (name,))]
    state = State(time.time_ns() // 1000, {}, {})
    for row in rows:
        state.balances[row[0]] = Balance.read(row)
    for row in many(connection, "keys", [*wants.keys]):
        state.keys[row[0], row[1]] = IdempotencyRecord._make(row[2:])
    return state


def store_changes(connection: sqlite3.Connection, changes: Changes) -> None:
    """Store what a group of requests changed, inside its transaction."""
    many(connection, "open_accounts", [(*b.head, *b.moved, b.origin) for b in changes.opened])
    many(connection, "append_entries", changes.entries)
    for name, balance in changes.moved.items():
        connection.execute(SQL["move_account"], (*balance.moved, name))
    many(connection, "remember_keys", [(*key, hit.account, hit.sequence) for key, hit in changes.keys.items()])
    many(connection, "keep_notes", changes.notes)


def many(connection: sqlite3.Connection, query: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Execute a query for many rows, in few statements.

    A statement lets the other threads of the process run, and they keep the one that writes waiting: a statement per
    row would make a group as slow as its requests one by one.
    """
    if len(rows) == 1:
        return connection.execute(SQL[query], rows[0]).fetchall()
    found: list[tuple[Any, ...]] = []
    done = 0
    while done < len(rows):
        size = min(_TOGETHER, 1 << (len(rows) - done).bit_length() - 1)  # few different statements, all remembered
        values = [value for row in rows[done : done + size] for value in row]
        found += connection.execute(_repeated(query, size), values).fetchall()
        done += size
    return found


@cache
def _repeated(query: str, size: int) -> str:
    return _VALUES.sub(lambda found: f"VALUES {', '.join([found[1]] * size)}", SQL[query])
