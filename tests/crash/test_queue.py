"""The queue of group commit: when it is full, when one who waits is interrupted, when the thread that writes dies."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import pytest
from twins import PRINCIPAL, Over, ledger_at
from workload import COST, charges, policy

from odograph.errors import LedgerBusy
from odograph.ledger.ledger import Ledger
from odograph.ledger.local import LocalBooks
from odograph.ledger.sqlite import SqliteStore
from odograph.ledger.store import Store, Wants, Work
from odograph.ledger.writer import Writer

HERE = Path(__file__).parent
FULL = os.environ.get("ODOGRAPH_FULL") == "1"
PATIENCE = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with one account."""
    path = tmp_path / "ledger.db"
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.open_account("a", policy(10**6))
    return path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Let nobody write while the block runs."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


class Asking:
    """Charges from threads of their own, and what came of each."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self._threads: list[threading.Thread] = []

    def ask(self, ledger: Ledger, key: str) -> None:
        thread = threading.Thread(target=self._ask, args=(ledger, key), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, ledger: Ledger, key: str) -> None:
        try:
            ledger.spend({"a": COST}, key=key)
        except BaseException as error:  # noqa: BLE001  it is the outcome
            self.outcomes[key] = type(error).__name__
        else:
            self.outcomes[key] = "charged"

    def end(self) -> dict[str, str]:
        """Wait for all of them; whoever is blocked for ever has no outcome."""
        for thread in self._threads:
            thread.join(PATIENCE)
        return self.outcomes


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(("waiting", "full"), [(4, True), (100, False)])
def test_a_full_queue_is_busy_and_one_client_cannot_fill_it(path: Path, waiting: int, *, full: bool) -> None:
    store = SqliteStore(path)
    writer = Writer(store, places=waiting)
    one = Ledger(LocalBooks(store, PRINCIPAL, writer))
    other, third = one.acting_as("another"), one.acting_as("a third")
    for ledger in (one, other, third):
        ledger.spend({"a": COST})  # connected, and known by name
    asking = Asking()
    with held(path):
        asking.ask(one, "writes")
        time.sleep(0.1)  # it is inside the transaction, or about to be
        for number, ledger in enumerate([one, one, other, other]):
            asking.ask(ledger, f"waits-{number}")
            wait_until(lambda number=number: writer.waiting == number + 1)  # type: ignore[misc]
            if number == 1:
                asking.ask(one, "half is enough")
                wait_until(lambda: "half is enough" in asking.outcomes or not full)
                if not full:
                    wait_until(lambda: writer.waiting == 3)
                    break
        if full:
            for ledger in (one, other, third):
                with pytest.raises(LedgerBusy, match=r"4 requests are waiting.*nothing was charged\. Try again"):
                    ledger.spend({"a": COST}, key="too many")
    outcomes = asking.end()
    busy = {key for key, outcome in outcomes.items() if outcome == "LedgerBusy"}
    assert busy == ({"half is enough"} if full else set())
    assert {*outcomes.values()} == ({"charged", "LedgerBusy"} if full else {"charged"})
    one.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interrupted program."""
    command = [sys.executable, str(HERE / "interrupted.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)  # noqa: S603  our own code


def test_an_interrupted_waiter_takes_its_request_back_and_blocks_nobody(path: Path) -> None:
    done = run(f"sqlite:///{path}", "waiting")
    assert (done.stdout, done.stderr) == ("interrupted, 2 still wait\n", "")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert charges(ledger).keys() == {"first", "0", "1", "2", "last"}


def test_an_interrupt_while_another_program_holds_the_file_leaves_nothing_held(path: Path) -> None:
    done = run(f"sqlite:///{path}", "locked")
    assert (done.stdout, done.stderr) == ("interrupted\nnobody holds it\n", "")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert charges(ledger).keys() >= {"first", "last"}


@pytest.mark.parametrize("threads", ["0", "3"])
def test_interrupts_at_any_moment_leave_the_ledger_usable(path: Path, threads: str) -> None:
    # Not for PostgreSQL: psycopg itself may wait for ever when it is interrupted in the middle of a pipeline.
    url = f"sqlite:///{path}"
    done = run(url, "anywhere", threads, "2000" if FULL else "300")
    assert done.returncode == 0, done.stderr[-3000:]
    acknowledged = {*done.stdout.split()}
    with ledger_at(url) as ledger:
        ledger.verify()
        found = charges(ledger)
        assert acknowledged <= found.keys()
        assert all(count.total() == 1 for count in found.values())


class Dies(Over):
    """A store in which the thread that writes is ended, once, before or after the transaction."""

    def __init__(self, store: Store, *, after: bool) -> None:
        super().__init__(store)
        self.armed = False
        self._after = after

    def write(self, wants: Wants, work: Work) -> None:
        if not self.armed:
            return self.store.write(wants, work)
        self.armed = False
        time.sleep(0.1)
        if self._after:
            self.store.write(wants, work)
        raise SystemExit


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_writer_that_dies_blocks_nobody_and_its_outcome_can_be_asked_for(
    path: Path, *, after: bool, alone: bool
) -> None:
    store = Dies(SqliteStore(path), after=after)
    writer = Writer(cast("Store", store))
    ledger = Ledger(LocalBooks(cast("Store", store), PRINCIPAL, writer))
    ledger.spend({"a": COST}, key="first")
    asking = Asking()
    if alone:
        store.armed = True
        asking.ask(ledger, "0")
        wait_until(lambda: not store.armed)
    else:
        with held(path):
            asking.ask(ledger, "writes")
            time.sleep(0.1)  # it is inside the transaction, or about to be
            time.sleep(0.05)
            store.armed = True
            for number in range(4):
                asking.ask(ledger, f"{number}")
            wait_until(lambda: writer.waiting == 4)
    if alone:
        for number in range(1, 4):
            asking.ask(ledger, f"{number}")
    outcomes = asking.end()
    dead = [key for key, outcome in outcomes.items() if outcome == "SystemExit"]
    assert len(dead) == 1
    told = {key for key, outcome in outcomes.items() if outcome == "ServiceUnavailable"}
    assert len(told) == (0 if alone else 3)
    assert len(outcomes) == (4 if alone else 5)  # nobody is blocked
    for key in {*dead, *told}:
        assert ledger.spend({"a": COST}, key=key).repeated == after
    ledger.verify()
    assert {"first", "0", "1", "2", "3"} <= charges(ledger).keys()
    ledger.close()
