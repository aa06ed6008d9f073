"""Ledgers that are broken on purpose, each in one way: what the tests of this folder must catch."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from odograph.connect import store_at
from odograph.ledger import memory, postgres, sqlite, sqlite_files
from odograph.ledger.ledger import Ledger
from odograph.ledger.local import LocalBooks
from odograph.ledger.sqlite_files import open_file
from odograph.ledger.sqlite_guard import Connection
from odograph.ledger.store import Changes, State, Store, Wants, Work
from odograph.ledger.turn import Turn
from odograph.ledger.writer import _Inside

PRINCIPAL = "tester"


class Over:
    """A store on top of another: what a twin does not break is passed on."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        return getattr(self.store, name)


class AnswersEarly(Over):
    """Answers when it has decided, and commits a moment later."""

    def write(self, wants: Wants, work: Work) -> None:
        decided = threading.Event()

        def late(state: State) -> Changes:
            changes = work(state)
            decided.set()
            time.sleep(0.01)
            return changes

        threading.Thread(target=self.store.write, args=(wants, late)).start()
        decided.wait()


class DecidesOutside(Over):
    """Decides on totals that it read before the transaction."""

    def write(self, wants: Wants, work: Work) -> None:
        before = self.store.balances(wants.accounts)

        def outside(state: State) -> Changes:
            for name in before.keys() & state.balances.keys():
                state.balances[name].totals = before[name].totals
            return work(state)

        self.store.write(wants, outside)


class ForgetsKeys(Over):
    """Charges, and does not remember for which key."""

    def write(self, wants: Wants, work: Work) -> None:
        def forgetful(state: State) -> Changes:
            state.keys.clear()
            changes = work(state)
            changes.keys.clear()
            return changes

        self.store.write(wants, forgetful)


def open_unsynced(path: Path, timeout: float, *, guarded: bool = False) -> Connection:
    """Leave it to the operating system when a file reaches the disk."""
    connection = open_file(path, timeout, guarded=guarded)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def barge(turn: Turn) -> None:
    """Nobody stands behind the one that writes, so it goes again before those who wait have looked."""
    while True:
        try:
            fcntl.flock(turn._files[1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: SLF001  the twin breaks it
        except BlockingIOError:
            time.sleep(0.5)
        else:
            return


def no_mount(path: Path) -> str:
    """Say nothing of mounts, as an operating system without them."""
    raise LookupError(path)


def ledger_at(url: str, twin: str = "") -> Ledger:
    """Connect to a ledger, whole or broken in the way that is named."""
    return Ledger(books_at(url, twin))


def books_at(url: str, twin: str = "") -> LocalBooks:
    """Return what such a ledger stands on."""
    store = store_at(url, timeout=30.0)
    if twin == "unsynced":
        sqlite.open_file = open_unsynced  # type: ignore[attr-defined]
    if twin == "unfair":
        Turn.__enter__ = barge  # type: ignore[method-assign]
    if twin == "names":
        sqlite.refuse_second_name = lambda _: None  # type: ignore[attr-defined, assignment]
    if twin in ("unguarded", "posix"):
        Connection.guard = lambda *_: None  # type: ignore[method-assign]
    if twin == "posix":
        sqlite.identity = lambda _: (1, 1)  # type: ignore[attr-defined, assignment]
    if twin == "reentrant":
        for module in (memory, sqlite, postgres):
            module.refuse_reentry = lambda _: None  # type: ignore[attr-defined]
        _Inside.lock = property(lambda _: threading.Lock(), lambda *_: None)  # type: ignore[assignment]
    if twin == "mounts":
        sqlite_files._mount_of = no_mount  # noqa: SLF001  the twin breaks it
    if twin in ("", "mounts", "names", "posix", "reentrant", "unfair", "unguarded", "unsynced"):
        return LocalBooks(store, PRINCIPAL)
    broken: dict[str, Callable[[Store], Over]] = {
        "early": AnswersEarly,
        "outside": DecidesOutside,
        "forgets": ForgetsKeys,
    }
    return LocalBooks(cast("Store", broken[twin](store)), PRINCIPAL)
