"""An interrupt from the keyboard at each place in turn: what is stored is whole, and no program is kept waiting."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest
from broken_stores import ledger_at
from racer import ACCOUNT
from workload import COST, policy

from odograph.concurrency import FairFileLock
from odograph.errors import LedgerCorrupt
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Changes
from odograph.ledger.stores.memory import MemoryStore

STORE: Final = MemoryStore._store  # noqa: SLF001  where a part may be stored
LOCK_CODE: Final = [FairFileLock.__enter__.__code__, FairFileLock.__exit__.__code__]


def spend_interrupted(ledger: Ledger, key: str, code: Collection[CodeType], event: str, place: int) -> bool:
    """Spend, and be interrupted at some line or call of some functions; say whether there is such a place."""
    seen = 0

    def trace(frame: FrameType, kind: str, _: object) -> Any:  # noqa: ANN401  as sys.settrace has it
        nonlocal seen
        if frame.f_code not in code:
            return None
        if kind == event:
            seen += 1
            if seen == place:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            ledger.spend({ACCOUNT: COST}, key=key, note="why")
    finally:
        sys.settrace(before)
    return seen >= place


def interrupt_each_line_in_memory() -> None:
    ledger = ledger_at("memory://")
    ledger.open_account(ACCOUNT, policy(1000))
    ledger.spend({ACCOUNT: COST}, key="first")
    places = 0
    while spend_interrupted(ledger, str(places), [STORE.__code__], "line", places + 1):
        ledger.spend({ACCOUNT: COST}, key=str(places), note="why")
        ledger.verify()
        places += 1
        assert ledger.account(ACCOUNT).totals.steps == 1 + places  # each key once
    assert places > 5


def test_a_charge_in_memory_is_stored_whole_or_not_at_all() -> None:
    interrupt_each_line_in_memory()


def test_a_store_that_takes_parts_of_a_charge_in_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(self: MemoryStore, changes: Changes) -> None:
        if sys.exc_info()[0] is None:  # not a second time
            STORE(self, changes)

    monkeypatch.setattr(MemoryStore, "_store", parts)
    with pytest.raises((AssertionError, LedgerCorrupt)):
        interrupt_each_line_in_memory()


def test_an_interrupted_program_gives_its_turn_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.open_account(ACCOUNT, policy(1000))
        places = 0
        while spend_interrupted(ledger, str(places), LOCK_CODE, "call", places + 1):
            places += 1
            for name in ("next", "turn"):
                with Path(f"{path}-{name}").open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as another program does
        assert places == len(LOCK_CODE)
        ledger.verify()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_fork_leaves_no_thread_waiting(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with ledger_at(url) as first, ledger_at(url) as second:
        first.open_account(ACCOUNT, policy(1000))
        second.spend({ACCOUNT: COST}, key="before")
        last = max(first, second, key=lambda ledger: id(ledger.backend.store))  # type: ignore[attr-defined]
        with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None, check_same_thread=False)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = threading.Thread(target=last.spend, args=({ACCOUNT: COST},), kwargs={"key": "during"})
            writing.start()
            time.sleep(0.2)
            timers = [
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGALRM)),
                threading.Timer(0.6, other.execute, ("ROLLBACK",)),
            ]
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                for timer in timers:
                    timer.start()
                process = os.fork()
                if process == 0:  # pragma: no cover  in a forked process, which is not measured
                    os._exit(0)
                os.waitpid(process, 0)
            finally:
                for timer in timers:
                    timer.join()
                signal.signal(signal.SIGALRM, before)
            writing.join(20)
        for number, ledger in enumerate((first, second)):
            ledger.spend({ACCOUNT: COST}, key=f"main{number}")
            thread = threading.Thread(
                target=ledger.spend, args=({ACCOUNT: COST},), kwargs={"key": f"thread{number}"}, daemon=True
            )
            thread.start()
            thread.join(20)
            assert not thread.is_alive()
        first.verify()
        assert first.account(ACCOUNT).totals.steps == 6
