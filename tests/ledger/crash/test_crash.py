"""Programs and servers killed at random moments: what was acknowledged is there, once, and everything verifies."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from broken_stores import ledger_at
from postgres_server import PostgresServer
from workload import COST, answers, ask_again, check, costs_of, open_round, policy

from odograph.errors import AccountExists, BudgetExceeded, LedgerCorrupt, LedgerError
from odograph.ledger.stores.sqlite_files import make_file

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
ROUNDS = 20 if FULL else 8  # in one ledger
RESTARTS = 5 if FULL else 3
ledgers = pytest.mark.parametrize("ledger_number", range(10 if FULL else 1))
CONTROLS = 30  # rounds until a broken store must have been caught
THREADS = 6
PROCESS_TIMEOUT = 60.0  # seconds to wait for a program that has something to do
PROGRAMS = Path(__file__).parent / "programs"


@contextmanager
def spending(url: str, defect: str, prefix: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the spending program until the block ends, and then kill it."""
    command = [sys.executable, str(PROGRAMS / "spender.py"), url, defect, prefix, str(THREADS), str(10**9)]
    with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
        program = subprocess.Popen(command, stdout=out, stderr=log)  # noqa: S603  our own code
    try:
        yield program
    finally:
        program.kill()
        program.wait()


def wait_for_answers(program: subprocess.Popen[bytes], output: Path, more_than: int = 0) -> None:
    """Wait until the program has written more than so many bytes."""
    deadline = time.monotonic() + PROCESS_TIMEOUT
    while output.stat().st_size <= more_than:
        assert program.poll() is None, output.with_suffix(".log").read_text()[-4000:]
        assert time.monotonic() < deadline, f"no answer in {PROCESS_TIMEOUT} s"
        time.sleep(0.005)


def a_moment() -> None:
    time.sleep(random.uniform(0, 0.1))  # noqa: S311  any moment will do


def killed(url: str, folder: Path, number: int, defect: str = "") -> dict[str, str]:
    """Run one round: spend, be killed, and give what had been acknowledged."""
    with ledger_at(url) as ledger:
        open_round(ledger, f"{number}")
    output = folder / f"{number}.out"
    with spending(url, defect, f"{number}", output) as program:
        wait_for_answers(program, output)
        a_moment()
    return answers(output.read_text())


def finish(url: str, log: Path) -> None:
    """Ask again for what the program had begun: it is charged, once, or does not fit."""
    with ledger_at(url) as ledger:
        last = {key.rpartition("-")[0]: key for key in log.read_text().split()}  # of each thread
        for key in last.values():
            with suppress(BudgetExceeded):
                ledger.spend(costs_of(key), key=key)


def survive_kills(url: str, folder: Path, rounds: int, defect: str = "") -> None:
    """Run so many rounds on one ledger, looking at it after each."""
    acknowledged: dict[str, str] = {}
    for number in range(rounds):
        latest = killed(url, folder, number, defect)
        acknowledged |= latest
        with ledger_at(url) as ledger:
            check(ledger, acknowledged)
            ask_again(ledger, latest)
        finish(url, folder / f"{number}.log")
    with ledger_at(url) as ledger:
        check(ledger, acknowledged)


@pytest.mark.long
@ledgers
def test_a_killed_program_loses_nothing_that_it_acknowledged(
    store_url: str, tmp_path: Path, ledger_number: int
) -> None:
    del ledger_number
    survive_kills(store_url, tmp_path, ROUNDS)


@pytest.mark.parametrize(
    ("defect", "says"), [("early", "acknowledged charges are gone"), ("forgets", "is stored with another request")]
)
def test_a_store_that_answers_early_or_forgets_keys_is_caught(
    store_url: str, tmp_path: Path, defect: str, says: str
) -> None:
    with pytest.raises((AssertionError, LedgerCorrupt), match=says):
        survive_kills(store_url, tmp_path, CONTROLS, defect)


def server_killed(url: str, server: PostgresServer, folder: Path, number: int, defect: str) -> dict[str, str]:
    """Run one round: the server is killed while a program spends; the program goes on when it is back."""
    with ledger_at(url) as ledger:
        open_round(ledger, f"{number}")
    output = folder / f"{number}.out"
    with spending(url, defect, f"{number}", output) as program:
        wait_for_answers(program, output)
        a_moment()
        server.kill()
        seen = output.stat().st_size
        server.restart()
        if not defect:
            wait_for_answers(program, output, more_than=seen)
    return answers(output.read_text())


def survive_restarts(url: str, server: PostgresServer, folder: Path, rounds: int, defect: str = "") -> None:
    """Run so many rounds on one ledger, looking at it after each."""
    acknowledged: dict[str, str] = {}
    for number in range(rounds):
        latest = server_killed(url, server, folder, number, defect)
        acknowledged |= latest
        with ledger_at(url) as ledger:
            check(ledger, acknowledged)
            ask_again(ledger, latest)


@pytest.mark.long
@ledgers
def test_a_killed_server_loses_nothing_that_it_acknowledged(
    database: str, killable_server: PostgresServer, tmp_path: Path, ledger_number: int
) -> None:
    del ledger_number
    survive_restarts(database, killable_server, tmp_path, RESTARTS)


def test_a_server_whose_client_answers_early_is_caught(
    database: str, killable_server: PostgresServer, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="acknowledged charges are gone"):
        survive_restarts(database, killable_server, tmp_path, CONTROLS, "early")


def open_first(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAMS / "opener.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own code


def test_a_program_killed_while_it_makes_a_ledger_leaves_one_that_can_be_opened(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{number}.db" for number in range(200 if FULL else 40)]
    assert open_first("killed", *urls).returncode == 0
    for url in urls:
        with ledger_at(url) as ledger:
            with suppress(AccountExists):
                ledger.open_account("first", policy(1))
            ledger.account("first").spend(COST)
            ledger.verify()


def test_programs_that_make_a_ledger_together_all_open_their_accounts(store_url: str) -> None:
    done = open_first("together", store_url, "8")
    assert done.returncode == 0, done.stderr
    with ledger_at(store_url) as ledger:
        assert len(ledger.accounts()) == 8
        ledger.verify()


def test_a_file_that_another_program_made_a_moment_ago_and_writes_to_is_no_remains(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.touch()
    Path(f"{path}-wal").touch()
    assert not make_file(path, lambda _: None)
    path.unlink()  # and without it, it is
    with pytest.raises(LedgerError, match="left over"):
        make_file(path, lambda _: None)
