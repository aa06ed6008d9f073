"""The files of a SQLite ledger: deleted, left by a killed program, dropped, upgraded by many at once."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest
from broken_stores import ledger_at
from racer import ACCOUNT
from scripted import LIMIT, Program, check, new_ledger
from workload import COST, policy

import odograph as odo
from odograph.errors import LedgerError
from odograph.ledger.stores.sqlite import SqliteStore

PROGRAMS: Final = Path(__file__).parent / "programs"
OLD: Final = Path(__file__).parents[2] / "fixtures" / "ledger-schema-1.db"
DELETED: Final = "was deleted or replaced while in use; nothing was charged"
linux: Final = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has these locks")


def spend(program: Program, keys: str, acknowledged: set[str]) -> str:
    """Spend all that fits in one program, and return its last answer."""
    for number in range(LIMIT + 1):
        answer = program("spend", f"{keys}{number}")
        if answer == "done":
            acknowledged.add(f"{keys}{number}")
    return answer


@contextmanager
def ending(program: Program) -> Iterator[Program]:
    """End a program however the block ends."""
    try:
        yield program
    finally:
        program.end()


@linux
@pytest.mark.parametrize("before", ["spend", "read"])
def test_an_index_of_the_log_deleted_while_in_use_takes_no_charge(tmp_path: Path, before: str) -> None:
    path = new_ledger(tmp_path, 0)
    acknowledged: set[str] = set()
    with ledger_at(f"sqlite:///{path}") as ledger, ending(Program("")) as other:
        if before == "spend":
            ledger.spend({ACCOUNT: COST}, key="before")
            acknowledged.add("before")
        else:
            ledger.account(ACCOUNT)  # the connection that writes is made later, and shares this one's index
        Path(f"{path}-shm").unlink()
        other("connect", f"sqlite:///{path}")
        spend(other, "b", acknowledged)
        with pytest.raises(LedgerError, match=f"-shm {DELETED}"):
            ledger.spend({ACCOUNT: COST}, key="after")
    assert len(acknowledged) == LIMIT
    check(path, acknowledged)


@linux
def test_a_store_that_does_not_look_for_its_index_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "_require_log", lambda *_, **__: None)
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        test_an_index_of_the_log_deleted_while_in_use_takes_no_charge(tmp_path, "spend")


@linux
def test_a_ledger_that_is_dropped_and_not_closed_leaves_nothing_open(tmp_path: Path) -> None:
    def use(number: int) -> Path:
        path = new_ledger(tmp_path, number)
        ledger = ledger_at(f"sqlite:///{path}")
        ledger.spend({ACCOUNT: COST}, key="dropped")
        return path

    use(0)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  numbers, not paths
    for number in range(1, 6):
        path = use(number)
        gc.collect()
        assert not Path(f"{path}-wal").exists()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  as above


def killed_in_the_middle(path: Path) -> None:
    """Let a program of SQLite alone be killed with half a transaction in the file, and the rest in its journal."""
    script = (
        "import os, sqlite3, sys\n"
        "file = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "file.execute('PRAGMA journal_mode = DELETE')\n"
        "file.execute('PRAGMA cache_size = 1')\n"
        "file.execute('BEGIN EXCLUSIVE')\n"
        "file.execute('CREATE TABLE half (bytes)')\n"
        "for _ in range(100):\n"
        "    file.execute('INSERT INTO half VALUES (zeroblob(4000))')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], check=False)  # noqa: S603
    assert done.returncode == -signal.SIGKILL
    assert Path(f"{path}-journal").stat().st_size > 0


def test_a_transaction_that_another_tool_left_half_done_is_undone(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="before")
    killed_in_the_middle(path)
    with odo.connect(f"sqlite:///{path}", timeout=1) as ledger:
        ledger.spend({ACCOUNT: COST}, key="after")
    check(path, {"before", "after"})
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_programs_with_many_threads_bring_an_old_ledger_up_to_date_together(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "upgrader.py")]
    programs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        for _ in range(3)
    ]
    for number in range(6):
        path = tmp_path / f"{number}.db"
        shutil.copy(OLD, path)
        for program in programs:
            assert program.stdin is not None
            program.stdin.write(f"{path}\n")
            program.stdin.flush()
        answers = [program.stdout.readline() for program in programs if program.stdout is not None]
        assert answers == ["done\n"] * 3
        with closing(sqlite3.connect(path)) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        with odo.connect(f"sqlite:///{path}") as ledger:
            ledger.verify()
    for program in programs:
        program.communicate(timeout=60)


def test_a_program_killed_while_it_copies_the_log_into_the_file_leaves_a_ledger(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    log = Path(f"{path}-wal")
    size = path.stat().st_size
    with ledger_at(f"sqlite:///{path}") as ledger:
        for number in range(20):
            ledger.open_account(f"account{number}", policy(LIMIT))  # so that the file grows
        ledger.spend({ACCOUNT: COST}, key="before")
        logged = log.read_bytes()
    assert path.stat().st_size > size
    os.truncate(path, size)  # the first page says how long the file is to be, and the rest is in the log only
    log.write_bytes(logged)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="after")
    check(path, {"before", "after"})
