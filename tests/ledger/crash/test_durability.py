"""A kill does not test durability: the operating system keeps what was written. The order of system calls does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from broken_stores import PRINCIPAL, ledger_at
from postgres_server import PostgresServer
from spender import ANSWERED, ASKED
from syscalls import SYNCS, WRITES, Call, build_shim, preload, read_calls, synced_before, traced
from workload import COST, open_round, policy

import odograph as odo
from odograph.errors import LedgerError

PROGRAMS = Path(__file__).parent / "programs"
THREADS = 8
LOG = "*.db-wal"


def spend_traced(shim: Path, folder: Path, defect: str, threads: int) -> list[Call]:
    """Run the spending program under the shim, and give the calls it made."""
    url = f"sqlite:///{folder}/ledger.db"
    with ledger_at(url) as ledger:
        open_round(ledger, "0")
    command = [sys.executable, str(PROGRAMS / "spender.py"), url, defect, "0", str(threads), "20"]
    done, calls = traced(command, shim, folder / "calls.log")
    assert done.returncode == 0, done.stderr
    return calls


def answers(calls: Sequence[Call]) -> Iterator[tuple[Call, list[Call]]]:
    """Give each answer, with what was called since it was asked for; a question without an answer was refused."""
    for thread in range(THREADS):
        asked = [call for call in calls if call.fd == ASKED + thread]
        for answer in (call for call in calls if call.fd == ANSWERED + thread):
            since = max(call.ended for call in asked if call.ended <= answer.began)
            yield answer, [call for call in calls if since < call.began]


def some_write_was_synced(calls: Sequence[Call], answer: Call) -> bool:
    """Say whether something was written to the log and synced, all before the answer: others may be writing since."""
    log = [call for call in calls if call.path.endswith("-wal") and call.ended <= answer.began]
    writes = [call.ended for call in log if call.name in WRITES]
    syncs = [call.began for call in log if call.name in SYNCS and not call.error]
    return bool(writes and syncs) and min(writes) <= max(syncs)


@pytest.mark.parametrize(("defect", "durable"), [("", True), ("unsynced", False), ("early", False)])
def test_a_charge_is_synced_between_its_last_write_and_its_answer(
    shim: Path, tmp_path: Path, defect: str, *, durable: bool
) -> None:
    calls = spend_traced(shim, tmp_path, defect, 1)
    judged = [synced_before(since, LOG, answer) for answer, since in answers(calls)]
    assert len(judged) == 20
    assert all(judged) == durable


@pytest.mark.parametrize(("defect", "durable"), [("", True), ("unsynced", False), ("early", False)])
def test_every_answer_of_a_group_comes_after_a_sync(
    shim: Path, tmp_path: Path, defect: str, *, durable: bool
) -> None:
    calls = spend_traced(shim, tmp_path, defect, THREADS)
    judged = [some_write_was_synced(since, answer) for answer, since in answers(calls)]
    assert len(judged) > 20
    assert all(judged) == durable


OPEN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from broken_stores import ledger_at
from workload import policy
if sys.argv[3] == "unsynced":
    os.fsync = lambda _: None
ledger_at(f"sqlite:///{sys.argv[2]}/new.db", sys.argv[3]).open_account("a", policy(10))
os.write(1, b"done")
"""


@pytest.mark.parametrize(("defect", "durable"), [("", True), ("unsynced", False)])
def test_the_name_of_a_new_ledger_is_synced_before_its_first_answer(
    shim: Path, tmp_path: Path, defect: str, *, durable: bool
) -> None:
    command = [sys.executable, "-c", OPEN, str(PROGRAMS), str(tmp_path), defect]
    done, calls = traced(command, shim, tmp_path / "calls.log")
    assert done.stdout == "done", done.stderr
    answer = next(call for call in calls if call.fd == 1)
    synced = [call.path for call in calls if call.name in SYNCS and not call.error and call.ended <= answer.began]
    assert (str(tmp_path) in synced) == durable
    assert synced_before(calls, LOG, answer) == durable


@contextmanager
def log_of(server: PostgresServer) -> Iterator[Path]:
    """Run the server under the shim."""
    log = server.folder / f"{time.monotonic_ns()}.log"
    server.env |= preload(build_shim(server.folder), log=log)
    try:
        server.restart()
        yield log
    finally:
        server.env.clear()
        server.restart()


@contextmanager
def without_fsync(server: PostgresServer) -> Iterator[None]:
    """Let the server leave it to the operating system when its files reach the disk."""
    set_fsync(server, "off")
    try:
        yield
    finally:
        set_fsync(server, "on")


def set_fsync(server: PostgresServer, value: str) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET fsync = {value}")
        connection.execute("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 60
        while connection.execute("SHOW fsync").fetchone() != (value,):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def durable_on_server(url: str, log: Path, *, accept_fsync_off: bool = False) -> list[bool]:
    """Spend a few times, and say of each whether the server's log was synced before the last thing it sent."""
    judged = []
    with odo.connect(url, principal=PRINCIPAL, accept_fsync_off=accept_fsync_off) as ledger:
        account = ledger.open_account("a", policy(1000))
        for _ in range(5):
            asked = time.monotonic_ns()
            account.spend(COST)
            answered = time.monotonic_ns()
            account.totals  # noqa: B018  when it is answered, the lines about the answers before it are in the log
            account.spend(COST)
            calls = [call for call in read_calls(log) if asked < call.began < answered]
            writers = {call.pid for call in calls if call.name in WRITES and "/pg_wal/" in call.path}
            answer = [call for call in calls if call.name == "send" and call.pid in writers][-1]
            judged.append(synced_before(calls, "*/pg_wal/*", answer))
    return judged


def test_the_server_syncs_its_log_before_it_answers(database: str, killable_server: PostgresServer) -> None:
    name = database.rpartition("/")[2]
    with psycopg.connect(killable_server.url, autocommit=True) as connection:
        # Whatever the database's own setting is, a charge waits for the disk.
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    with log_of(killable_server) as log:
        assert all(durable_on_server(database, log))


def test_a_server_that_does_not_sync_is_caught(database: str, killable_server: PostgresServer) -> None:
    with log_of(killable_server) as log, without_fsync(killable_server):
        assert not any(durable_on_server(database, log, accept_fsync_off=True))


def test_a_server_that_does_not_sync_is_refused(database: str, killable_server: PostgresServer) -> None:
    with ledger_at(database) as ledger:
        account = ledger.open_account("a", policy(10))
        account.spend(COST, key="before")
    with without_fsync(killable_server), odo.connect(database, principal=PRINCIPAL) as ledger:
        for ask in (lambda: ledger.open_account("b", policy(10)), lambda: ledger.account("a"), ledger.verify):
            with pytest.raises(LedgerError, match=r"fsync=off.*would lose.*accept_fsync_off=True"):
                ask()
        with odo.connect(database, principal=PRINCIPAL, accept_fsync_off=True) as accepted:
            assert accepted.account("a").spend(COST, key="before").repeated
