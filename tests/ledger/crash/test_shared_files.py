"""Two programs and one SQLite file: by two names, or while one of them reads the file as any file is read.

SQLite names the log after the database, and locks it by locks that a process loses when it closes the file anywhere.
So there are ways to two logs, of which each side sees one: more is acknowledged than the limit, and half of it is
gone afterwards. A program either sees all that the others wrote, or is refused before it has written anything.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from broken_stores import ledger_at, no_mount
from racer import ACCOUNT
from scripted import LIMIT, Program, check, new_ledger
from workload import COST

import odograph as odo
from odograph.errors import LedgerBusy, LedgerError, OutcomeUnknown
from odograph.ledger.stores import sqlite
from odograph.ledger.stores.sqlite_files import refuse_second_name

ROUNDS: Final = 20


class Programs:
    """Programs that are started once for all tests."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Program] = {}

    def __call__(self, defect: str = "", *, alone: bool = False) -> tuple[Program, Program]:
        """Return two programs; the second one has mounts of its own, if it is alone."""
        return self._one(defect, "first"), self._one(defect, "alone" if alone else "second")

    def _one(self, defect: str, which: str) -> Program:
        if (defect, which) not in self._running:
            self._running[defect, which] = Program(defect, alone=which == "alone")
        return self._running[defect, which]

    def end(self) -> None:
        """Let all of them end."""
        for program in self._running.values():
            program.end()


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    """Two programs, whole or broken in the way that is named."""
    found = Programs()
    yield found
    found.end()


@cache
def may_mount() -> bool:
    """Whether a process may have mounts of its own here."""
    if not sys.platform.startswith("linux") or os.getuid() != 0:
        return False
    return subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0  # noqa: S607


def spend(program: Program, keys: str, count: int, acknowledged: set[str], answers: list[str]) -> None:
    """Spend under so many keys."""
    for number in range(count):
        key = f"{keys}-{number}"
        answers.append(program("spend", key))
        if answers[-1] == "done":
            acknowledged.add(key)


# Two names.


def linked(path: Path, _: Program) -> Path:
    """Another name in the same folder."""
    other = path.with_name("other.db")
    other.hardlink_to(path)
    return other


def linked_elsewhere(path: Path, _: Program) -> Path:
    """The same name in another folder."""
    other = path.parent / "folder" / path.name
    other.parent.mkdir()
    other.hardlink_to(path)
    return other


def mounted(path: Path, program: Program) -> Path:
    """The file alone mounted, on the same device."""
    other = path.parent / "folder" / path.name
    other.parent.mkdir()
    assert program("mount", str(path), str(other)) == "done"
    return other


def mounted_elsewhere(path: Path, program: Program) -> Path:
    """The file alone mounted into a folder on another device, as in a container."""
    (path.parent / "folder").mkdir()
    assert program("mount", "", str(path.parent / "folder")) == "done"
    other = path.parent / "folder" / path.name
    assert program("mount", str(path), str(other)) == "done"
    return other


NAMES: Final[dict[str, tuple[Callable[[Path, Program], Path], bool]]] = {
    "hard link": (linked, False),
    "hard link in another folder": (linked_elsewhere, False),
    "mounted file": (mounted, True),
    "mounted file of another device": (mounted_elsewhere, True),
}
names = pytest.mark.parametrize("how", NAMES)


def by_two_names(programs: Programs, folder: Path, how: str, defect: str) -> list[str]:
    """Spend by both names; return what came of it, by the second."""
    name, mounts = NAMES[how]
    if mounts and not may_mount():
        pytest.skip("mounting a file needs Linux and root")
    answers: list[str] = []
    first, second = programs(defect, alone=mounts)
    for number in range(ROUNDS):
        path = new_ledger(folder, number)
        acknowledged: set[str] = set()
        other = name(path, second)
        first("connect", f"sqlite:///{path}")
        second("connect", f"sqlite:///{other}")
        spend(first, "first", 3, acknowledged, [])
        spend(second, "second", 3, acknowledged, answers)
        spend(first, "third", 2, acknowledged, [])
        second("close")
        first("close")
        if not mounts:
            other.unlink()
        check(path, acknowledged)
    return answers


@names
def test_a_file_by_two_names_takes_no_charges_by_the_second(programs: Programs, tmp_path: Path, how: str) -> None:
    answers = by_two_names(programs, tmp_path, how, "")
    assert len(answers) == 3 * ROUNDS
    says = "has 2 (hard links)" if how.startswith("hard link") else "Mount the folder instead"
    assert all(answer.startswith("LedgerError") and says in answer for answer in answers), answers[0]


@names
def test_a_store_that_does_not_ask_for_other_names_is_caught(programs: Programs, tmp_path: Path, how: str) -> None:
    with pytest.raises((AssertionError, LedgerError), match=r"were acknowledged|are gone|does not follow|is damaged"):
        by_two_names(programs, tmp_path, how, "names")


def symbolic(path: Path, _: Program) -> Path:
    """A link to the file, with another name, in another folder."""
    other = path.parent / "folder" / "other.db"
    other.parent.mkdir()
    other.symlink_to(path)
    return other


def by_linked_folder(path: Path, _: Program) -> Path:
    """A link to the folder."""
    (folder := path.parent.with_name(f"{path.parent.name}-linked")).symlink_to(path.parent)
    return folder / path.name


def relative(path: Path, _: Program) -> Path:
    """A way from the working folder."""
    return Path(os.path.relpath(path))


def by_mounted_folder(path: Path, program: Program) -> Path:
    """The folder mounted elsewhere, as in a container."""
    (folder := path.parent.with_name(f"{path.parent.name}-mounted")).mkdir()
    assert program("mount", str(path.parent), str(folder)) == "done"
    return folder / path.name


WAYS: Final[dict[str, tuple[Callable[[Path, Program], Path], bool]]] = {
    "symbolic link": (symbolic, False),
    "linked folder": (by_linked_folder, False),
    "relative": (relative, False),
    "mounted folder": (by_mounted_folder, True),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_file_reached_by_two_ways_has_one_budget(programs: Programs, tmp_path: Path, how: str) -> None:
    way, mounts = WAYS[how]
    if mounts and not may_mount():
        pytest.skip("mounting a file needs Linux and root")
    path = new_ledger(tmp_path, 0)
    acknowledged: set[str] = set()
    first, second = programs(alone=mounts)
    other = way(path, second)
    first("connect", f"sqlite:///{path}")
    second("connect", f"sqlite:///{other}")
    for number in range(LIMIT):  # in turn, each seeing the other's
        spend(first, f"first-{number}", 1, acknowledged, [])
        spend(second, f"second-{number}", 1, acknowledged, [])
    check(path, acknowledged)
    assert acknowledged == {f"{who}-{number}-0" for who in ("first", "second") for number in (0, 1)}


def test_a_file_that_gets_a_second_name_while_in_use_takes_charges_again_without_it(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    with ledger_at(f"sqlite:///{path}") as ledger:
        account = ledger.account(ACCOUNT)
        account.spend(COST, key="before")
        other = path.with_name("other.db")
        other.hardlink_to(path)
        with pytest.raises(LedgerError, match=r"must have one name, but .* has 2 \(hard links\)") as caught:
            account.spend(COST, key="during")
        assert caught.value.charged is False
        with pytest.raises(LedgerError, match=r"has 2 \(hard links\)"):
            account.totals  # noqa: B018  it is read
        other.unlink()
        account.spend(COST, key="after")
    check(path, {"before", "after"})


@pytest.mark.parametrize("in_use", [False, True])
def test_the_first_name_of_a_file_whose_maker_was_killed_is_removed(tmp_path: Path, *, in_use: bool) -> None:
    path = new_ledger(tmp_path, 0)
    left = path.with_name(f".{path.name}.{'0123456789abcdef'}")
    with ledger_at(f"sqlite:///{path}") as ledger:
        if in_use:
            ledger.account(ACCOUNT).spend(COST, key="before")
        left.hardlink_to(path)
        (unrelated := path.with_name(f".{path.name}.{'f' * 16}")).touch()
        ledger.account(ACCOUNT).spend(COST, key="after")
        assert (left.exists(), unrelated.exists()) == (False, True)


def test_a_backup_may_have_several_names(tmp_path: Path) -> None:
    # It takes no charges, and programs that keep many backups link those that are equal.
    path = new_ledger(tmp_path, 0)
    with ledger_at(f"sqlite:///{path}") as ledger:
        last = ledger.backup(tmp_path / "copy.db")
    (tmp_path / "linked.db").hardlink_to(tmp_path / "copy.db")
    with ledger_at(f"sqlite:///{tmp_path}/restored.db") as ledger:
        ledger.restore(tmp_path / "linked.db", checkpoint=last)
        ledger.account(ACCOUNT).spend(COST)


def test_where_mounts_have_no_numbers_the_device_tells_them_apart(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_ledger(tmp_path, 99)
    monkeypatch.setattr("odograph.ledger.stores.sqlite_files._mount_of", no_mount)
    refuse_second_name(path)
    answers = by_two_names(programs, tmp_path, "mounted file of another device", "mounts")
    assert all("Mount the folder instead" in answer for answer in answers)


# The file read by the program that has it open.


def read_while_open(programs: Programs, folder: Path, files: list[str], defect: str) -> None:
    """Let the first program read files of the ledger's between charges, and a second one come and go."""
    first, second = programs(defect)
    for number in range(ROUNDS):
        path = new_ledger(folder, number)
        acknowledged: set[str] = set()
        first("connect", f"sqlite:///{path}")
        spend(first, "a", 1, acknowledged, [])
        for name in files:
            first("read", f"{path}{name}")
        second("connect", f"sqlite:///{path}")
        spend(second, "b", 1, acknowledged, [])
        second("close")
        spend(first, "c", 1, acknowledged, [])
        for name in files:
            first("read", f"{path}{name}")
        second("connect", f"sqlite:///{path}")
        spend(second, "d", 3, acknowledged, [])
        second("close")
        spend(first, "e", 3, acknowledged, [])
        first("close")
        assert not Path(f"{path}-wal").exists()  # nothing is left locked
        check(path, acknowledged)
        assert len(acknowledged) == LIMIT


READ: Final = {"the database": [""], "the whole folder": ["", "-wal", "-shm", "-turn", "-next"]}
read = pytest.mark.parametrize("files", READ.values(), ids=READ)


@read
def test_a_program_may_read_the_files_of_a_ledger_that_it_has_open(
    programs: Programs, tmp_path: Path, files: list[str]
) -> None:
    read_while_open(programs, tmp_path, files, "")


@read
def test_a_store_with_no_locks_but_sqlite_s_is_caught(programs: Programs, tmp_path: Path, files: list[str]) -> None:
    with pytest.raises((AssertionError, LedgerError), match=r"were acknowledged|are gone|does not follow|is damaged"):
        read_while_open(programs, tmp_path, files, "posix")


def test_one_ledger_of_a_program_closed_leaves_the_others_locked(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    other = Program("")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="before")
        with ledger_at(f"sqlite:///{path}") as second:
            second.spend({ACCOUNT: COST}, key="second")
            second.verify()
        path.read_bytes()
        other("connect", f"sqlite:///{path}")
        assert other("spend", "other") == "done"
        other.end()
        assert Path(f"{path}-wal").exists()
        ledger.spend({ACCOUNT: COST}, key="after")
        check(path, {"before", "second", "other", "after"})
    assert not Path(f"{path}-wal").exists()


def test_a_log_deleted_while_in_use_takes_no_charge(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    log = Path(f"{path}-wal")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="before")
        log.unlink()
        with pytest.raises(LedgerError, match="was deleted or replaced while in use; nothing was charged"):
            ledger.spend({ACCOUNT: COST}, key="during")
    check(path, {"before"})


def test_a_log_deleted_in_the_middle_of_a_commit_leaves_the_outcome_to_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = new_ledger(tmp_path, 0)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="before")
        commit = sqlite._commit  # noqa: SLF001  the moment that is tested

        def committed(connection: sqlite3.Connection) -> None:
            commit(connection)
            Path(f"{path}-wal").unlink()

        monkeypatch.setattr(sqlite, "_commit", committed)
        with pytest.raises(OutcomeUnknown, match=r"during a commit.* ask again .*'during'") as caught:
            ledger.spend({ACCOUNT: COST}, key="during")
        assert (caught.value.key, caught.value.charged) == ("during", None)
    monkeypatch.undo()
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({ACCOUNT: COST}, key="during")
        assert ledger.account(ACCOUNT).totals.steps == 2
    check(path, {"before", "during"})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux has these locks")
def test_a_file_that_another_program_has_alone_is_busy(tmp_path: Path) -> None:
    path = new_ledger(tmp_path, 0)
    with path.open("r+b") as file:
        alone = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0x4000_0002, 510, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, alone)
        with (
            odo.connect(f"sqlite:///{path}", timeout=0.2) as ledger,
            pytest.raises(LedgerBusy, match=r"another program holds the ledger's file; nothing was charged"),
        ):
            ledger.account(ACCOUNT)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.account(ACCOUNT)


@read
def test_a_store_without_these_locks_notices_that_its_log_is_gone(
    programs: Programs, tmp_path: Path, files: list[str]
) -> None:
    # As where the operating system has no such locks.
    path = new_ledger(tmp_path, 0)
    acknowledged: set[str] = set()
    answers: list[str] = []
    first, second = programs("unguarded")
    first("connect", f"sqlite:///{path}")
    spend(first, "a", 1, acknowledged, answers)
    for name in files:
        first("read", f"{path}{name}")
    second("connect", f"sqlite:///{path}")
    spend(second, "b", 1, acknowledged, answers)
    second("close")
    assert not Path(f"{path}-wal").exists()
    spend(first, "c", 1, acknowledged, answers)
    assert "ledger.db-wal was deleted or replaced while in use; nothing was charged" in answers[-1]
    first("close")
    first("connect", f"sqlite:///{path}")
    spend(first, "d", 2, acknowledged, answers)
    check(path, acknowledged)
    assert acknowledged == {"a-0", "b-0", "d-0", "d-1"}
