"""A disk that is full or fails, a file that cannot be written or is held by another: a clear error, nothing lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from broken_stores import PRINCIPAL, ledger_at
from syscalls import traced
from workload import COST, charges, policy

import odograph as odo
from odograph.errors import LedgerBusy, LedgerError

PROGRAMS = Path(__file__).parent / "programs"


def faulty(shim: Path, folder: Path, setting: str) -> tuple[Path, list[list[str]]]:
    """Run the program with the fault, and give its file and what came of each charge."""
    path = folder / "ledger.db"
    command = [sys.executable, str(PROGRAMS / "disk_fault.py"), str(path), setting]
    done, _ = traced(command, shim, folder / "calls.log")
    assert done.returncode == 0, done.stderr
    lines: list[list[str]] = json.loads(done.stdout)
    return path, lines


def all_there(path: Path, lines: list[list[str]]) -> None:
    """Every key that was acknowledged is charged once, no other is, and the ledger verifies."""
    acknowledged = {line[0] for line in lines if len(line) == 2}
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        charged = charges(ledger)
        assert charged.keys() == acknowledged
        assert all(count == Counter({"a": 1}) for count in charged.values())
        assert all(ledger.account("a").spend(COST, key=key).repeated for key in acknowledged)


@pytest.mark.parametrize("room", [0, 24, 30, 4000, 4200, 9000])
def test_a_full_disk_charges_nothing_and_says_so(shim: Path, tmp_path: Path, room: int) -> None:
    path, lines = faulty(shim, tmp_path, f"SHIM_FULL={room}:*.db*")
    errors = [line for line in lines if len(line) == 3]
    assert errors
    assert all(name == "LedgerBusy" for _, name, _ in errors)
    assert all("disk is full; nothing was charged. Make room and try again" in text for _, _, text in errors)
    assert all([key, "made"] in lines for key, _, _ in errors)  # it had said the truth
    all_there(path, lines)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_sync_that_fails_leaves_the_outcome_to_be_asked_for(shim: Path, tmp_path: Path, failing: int) -> None:
    path, lines = faulty(shim, tmp_path, f"SHIM_EIO={failing}:*.db-wal")
    ((key, name, text),) = [line for line in lines if len(line) == 3]
    assert key == f"during-{failing - 1}"
    assert name == "OutcomeUnknown"
    assert "ask again with the same key" in text
    assert "nothing was charged" not in text
    all_there(path, lines)


def test_a_disk_without_faults_is_found_without_faults(shim: Path, tmp_path: Path) -> None:
    # The control of the two tests above: a setting that matches nothing.
    path, lines = faulty(shim, tmp_path, "SHIM_FULL=0:*.other")
    assert len(lines) == 9
    assert all(how == "made" for _, how in lines)
    all_there(path, lines)


OPEN = """
import os, sys
sys.path.insert(0, sys.argv[1])
from broken_stores import ledger_at
from workload import COST, policy
from odograph.errors import LedgerError
ledger = ledger_at(f"sqlite:///{sys.argv[2]}")
try:
    ledger.open_account("a", policy(10))
except LedgerError as error:
    print(error)
os.environ.pop("SHIM_FULL")
print(ledger.open_account("a", policy(10)).spend(COST).id)
"""


@pytest.mark.parametrize("room", [0, 100, 5000, 20000])
def test_a_disk_that_is_full_when_a_ledger_is_made(shim: Path, tmp_path: Path, room: int) -> None:
    path = tmp_path / "ledger.db"
    env = {"SHIM_FULL": f"{room}:{tmp_path}/*.db*"}
    done, _ = traced([sys.executable, "-c", OPEN, str(PROGRAMS), str(path)], shim, tmp_path / "calls.log", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the disk is full; nothing was charged. Make room and try again\na#1\n"


@pytest.fixture
def path() -> Iterator[Path]:
    """A ledger with one charge, where other users of the machine can come."""
    with TemporaryDirectory(prefix="odograph-") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "folder" / "ledger.db"
        path.parent.mkdir()
        with ledger_at(f"sqlite:///{path}") as ledger:
            ledger.open_account("a", policy(100)).spend(COST, key="before")
        yield path


def intact(path: Path, *charged: str) -> None:
    """The charges are there, and no others."""
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert charges(ledger).keys() == {"before", *charged}
        assert ledger.account("a").spend(COST, key="before").repeated


READ_ONLY = """
import os, sys
sys.path.insert(0, sys.argv[1])
from broken_stores import ledger_at
from workload import COST, policy
from odograph.errors import OdographError
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
for what in ("read", "spend", "spend", "open", "verify"):
    ledger = ledger_at(f"sqlite:///{sys.argv[2]}")
    try:
        if what == "read": ledger.account("a").totals
        if what == "spend": ledger.account("a").spend(COST, key="during")
        if what == "open": ledger.open_account("b", policy(10))
        if what == "verify": ledger.verify()
    except OdographError as error:
        print(what, type(error).__name__, error)
    else:
        print(what, "done")
"""


@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "in_use"),
    [
        (0o444, 0o555, False),
        (0o444, 0o555, True),
        (0o444, 0o777, False),
        (0o444, 0o777, True),
        (0o666, 0o555, False),
        (0o000, 0o777, False),
        (0o666, 0o666, False),
    ],
)
def test_a_file_that_cannot_be_written_says_so(path: Path, file_mode: int, folder_mode: int, *, in_use: bool) -> None:
    with ledger_at(f"sqlite:///{path}") as ledger:
        if in_use:
            ledger.account("a").spend(COST, key="before")
        for file in path.parent.iterdir():
            file.chmod(file_mode)
        path.parent.chmod(folder_mode)
        command = [sys.executable, "-c", READ_ONLY, str(PROGRAMS), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own code
    path.parent.chmod(0o700)
    for file in path.parent.iterdir():
        file.chmod(0o600)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        what, how, *_ = line.split()
        if how == "done":
            assert what in ("read", "verify")
        else:
            assert how == "LedgerError", line
            assert "cannot be" in line
    intact(path)


def test_a_locked_database_is_busy_and_can_be_read(path: Path) -> None:
    with (
        odo.connect(f"sqlite:///{path}", principal=PRINCIPAL, timeout=0.2) as ledger,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        account = ledger.account("a")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerBusy, match=r"nothing was charged\. Try again") as caught:
            account.spend(COST, key="during")
        assert caught.value.charged is False
        assert account.totals.steps == 1
        ledger.verify()
        other.execute("ROLLBACK")
        assert not account.spend(COST, key="during").repeated
    intact(path, "during")


@pytest.mark.parametrize("name", ["next", "turn"])
def test_a_process_that_keeps_its_turn_is_not_waited_for_for_ever(path: Path, name: str) -> None:
    with (
        odo.connect(f"sqlite:///{path}", principal=PRINCIPAL, timeout=0.2) as ledger,
        path.with_name(f"{path.name}-{name}").open() as held,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LedgerBusy, match=r"nothing was charged\. Try again"):
            ledger.account("a").spend(COST, key="during")
        fcntl.flock(held, fcntl.LOCK_UN)
        assert not ledger.account("a").spend(COST, key="during").repeated
    intact(path, "during")


def files(path: Path) -> list[Path]:
    """The database and its log: what a copy must have."""
    return [one for one in path.parent.iterdir() if one.name.endswith((".db", "-wal", "-shm"))]


def test_a_file_moved_away_while_in_use_takes_no_charge(path: Path) -> None:
    with ledger_at(f"sqlite:///{path}") as ledger:
        account = ledger.account("a")
        account.spend(COST, key="before")
        aside = path.parent.with_name("aside")
        aside.mkdir()
        for file in files(path):
            file.rename(aside / file.name)
        for _ in range(2):
            with pytest.raises(LedgerError, match="moved or replaced while in use") as caught:
                account.spend(COST, key="during")
            assert caught.value.charged is False
            with pytest.raises(LedgerError, match="moved or replaced while in use"):
                account.totals  # noqa: B018  it is read
        for file in aside.iterdir():
            file.rename(path.with_name(file.name))
        assert not account.spend(COST, key="during").repeated
    intact(path, "during")


def test_a_store_that_does_not_look_where_its_file_is_is_caught(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odograph.ledger.stores.sqlite_files.FileName.look_up", lambda _: (1, 1, 1, 1))
    with ledger_at(f"sqlite:///{path}") as ledger:
        account = ledger.account("a")
        account.spend(COST, key="before")
        for file in files(path):
            file.rename(file.with_name(f"aside-{file.name}"))
        assert account.spend(COST, key="during").key == "during"  # acknowledged, and nowhere to be found
        assert not path.exists()


def test_a_file_replaced_while_in_use_is_not_judged_by_the_policy_of_the_one_before(path: Path) -> None:
    other = path.parent.with_name("other.db")
    with ledger_at(f"sqlite:///{other}") as narrow:
        narrow.open_account("a", policy(2))
    with ledger_at(f"sqlite:///{path}") as ledger:
        account = ledger.account("a")
        account.spend(COST, key="before")
        for file in files(path):
            file.unlink()
        shutil.move(other, path)
        acknowledged = set()
        for number in range(4):
            with suppress(LedgerError):
                acknowledged.add(account.spend(COST, key=f"during-{number}").key)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert acknowledged <= charges(ledger).keys()  # and not in the file that is gone
        assert ledger.account("a").totals.steps <= 2
        ledger.account("a").spend(COST, key="after")


def test_a_child_of_a_killed_process_does_not_keep_its_turn(path: Path) -> None:
    # The child is forked while its parent writes, and sleeps; it holds nothing.
    program = (
        "import os, signal, sys, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from odograph import Ledger\n"
        "from broken_stores import backend_at\n"
        "backend = backend_at(f'sqlite:///{sys.argv[2]}')\n"
        "ledger = Ledger(backend)\n"
        "ledger.account('a').spend(__import__('workload').COST, key='parent')\n"
        "def work(state):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    print(pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "from odograph.ledger.stores.base import Wants\n"
        "backend.store.write(Wants(), work)\n"
    )
    command = [sys.executable, "-c", program, str(PROGRAMS), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:  # noqa: S603  our own code
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.wait()
        try:
            with odo.connect(f"sqlite:///{path}", principal=PRINCIPAL, timeout=2) as ledger:
                assert not ledger.account("a").spend(COST, key="during").repeated
        finally:
            os.kill(child, 9)
    intact(path, "parent", "during")
