"""Stores that are broken on purpose, each in one way that the tests must catch."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from odograph.concurrency import FairFileLock
from odograph.connection import store_at
from odograph.ledger.backend import LocalBackend
from odograph.ledger.engine import _ThreadState
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores import memory, postgres, sqlite, sqlite_files
from odograph.ledger.stores.base import Changes, State, Store, Wants, Work
from odograph.ledger.stores.sqlite_files import Connection, open_file

PRINCIPAL = "tester"


class StoreWrapper:
    """A store on top of another: what a subclass does not break is passed on."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        return getattr(self.store, name)


class AnswersEarly(StoreWrapper):
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


class DecidesOutside(StoreWrapper):
    """Decides on totals that it read before the transaction."""

    def write(self, wants: Wants, work: Work) -> None:
        before = self.store.balances(wants.accounts)
        time.sleep(0.002)  # on a busy machine the other process might not come in between otherwise

        def outside(state: State) -> Changes:
            for name in before.keys() & state.balances.keys():
                state.balances[name].totals = before[name].totals
            return work(state)

        self.store.write(wants, outside)


class ForgetsKeys(StoreWrapper):
    """Charges, and does not remember for which key."""

    def write(self, wants: Wants, work: Work) -> None:
        def forgetful(state: State) -> Changes:
            state.keys.clear()
            changes = work(state)
            changes.keys.clear()
            return changes

        self.store.write(wants, forgetful)


def open_unsynced(path: Path, timeout: float, *, guarded: bool = False) -> Connection:
    """Open a file without syncs: the operating system decides when it reaches the disk."""
    connection = open_file(path, timeout, guarded=guarded)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def barge(turn: FairFileLock) -> None:
    """Take the lock without queueing, so that the last writer takes it again before the others have looked."""
    while True:
        try:
            fcntl.flock(turn._files[1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # noqa: SLF001  broken on purpose
        except BlockingIOError:
            time.sleep(0.5)
        else:
            return


def no_mount(path: Path) -> str:
    """Know nothing of mounts, as an operating system without them."""
    raise LookupError(path)


def ledger_at(url: str, defect: str = "") -> Ledger:
    """Connect to a ledger, intact or with a defect."""
    return Ledger(backend_at(url, defect))


def backend_at(url: str, defect: str = "") -> LocalBackend:
    """Return the backend of such a ledger."""
    store = store_at(url, timeout=30.0)
    if defect == "unsynced":
        sqlite.open_file = open_unsynced  # type: ignore[attr-defined]
    if defect == "unfair":
        FairFileLock.__enter__ = barge  # type: ignore[method-assign]
    if defect == "names":
        sqlite.refuse_second_name = lambda _: None  # type: ignore[attr-defined, assignment]
    if defect in ("unguarded", "posix"):
        Connection.guard = lambda *_: None  # type: ignore[method-assign]
    if defect == "posix":
        sqlite.SqliteStore._require_log = lambda *_, **__: None  # type: ignore[method-assign]  # noqa: SLF001
    if defect == "reentrant":
        for module in (memory, sqlite, postgres):
            module.refuse_reentry = lambda _: None  # type: ignore[attr-defined]
        _ThreadState.lock = property(lambda _: threading.Lock(), lambda *_: None)  # type: ignore[assignment]
    if defect == "mounts":
        sqlite_files._mount_of = no_mount  # noqa: SLF001  broken on purpose
    if defect in ("", "mounts", "names", "posix", "reentrant", "unfair", "unguarded", "unsynced"):
        return LocalBackend(store, PRINCIPAL)
    broken: dict[str, Callable[[Store], StoreWrapper]] = {
        "early": AnswersEarly,
        "outside": DecidesOutside,
        "forgets": ForgetsKeys,
    }
    return LocalBackend(cast("Store", broken[defect](store)), PRINCIPAL)
