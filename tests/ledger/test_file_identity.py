"""Which file is at a path: what a store compares before and after every transaction."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import odograph as odo
from odograph.errors import LedgerError
from odograph.ledger.stores import sqlite_files
from odograph.ledger.stores.sqlite_files import NOTHING, FileName, identity


def look_up(path: str) -> tuple[int, int, int, int]:
    return FileName(path).look_up()


LOOK_UPS = [sqlite_files._stat, look_up]  # noqa: SLF001  the usual call, and this system's


def write(path: Path) -> Path:
    path.write_text("content")
    return path


def hard_link(path: Path) -> Path:
    os.link(write(path.with_name("first")), path)
    return path


def symbolic_link(path: Path) -> Path:
    path.symlink_to(hard_link(path.with_name("second")))
    return path


def strange_name(path: Path) -> Path:
    return write(path.with_name("żółć \udcff.db"))  # a byte that is not UTF-8


@pytest.mark.parametrize("make", [write, hard_link, symbolic_link, strange_name, lambda _: Path("/dev/null")])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_a_file_is_what_the_system_says(
    tmp_path: Path, look_up: Callable[[str], tuple[int, int, int, int]], make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / "a.db")
    found = path.stat()
    names, *file = look_up(str(path))
    assert (names, *file) == (found.st_nlink, found.st_ino, os.major(found.st_dev), os.minor(found.st_dev))
    assert identity(str(path)) == tuple(file)


@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_errors_are_those_of_the_system(tmp_path: Path, look_up: Callable[[str], tuple[int, int, int, int]]) -> None:
    path = str(write(tmp_path / "a.db"))
    with pytest.raises(NotADirectoryError, match=r"a\.db"):
        look_up(f"{path}/below")
    assert look_up(f"{path}-wal") == NOTHING


def test_a_name_that_is_kept_sees_every_change(tmp_path: Path) -> None:
    """The same object is asked in every transaction: what it found before must not be found again."""
    path = tmp_path / "a.db"
    name = FileName(str(path))
    assert name.look_up() == NOTHING
    write(path)
    first = name.look_up()
    assert first[0] == 1
    os.link(path, tmp_path / "second")
    assert name.look_up() == (2, *first[1:])
    write(tmp_path / "b.db").replace(path)
    assert name.look_up()[0] == 1
    assert name.look_up()[1:] != first[1:]
    path.unlink()
    assert name.look_up() == NOTHING


def test_a_path_that_no_file_can_have_is_an_error_with_a_reason() -> None:
    with (
        odo.connect("sqlite:////nowhere/\ud800.db") as ledger,
        pytest.raises(LedgerError, match=r"cannot be reached|there is no ledger"),
    ):
        ledger.accounts()


def test_another_file_at_the_same_path_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.db")
    before = identity(str(path))
    write(tmp_path / "b.db").replace(path)
    assert identity(str(path)) != before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this call")
def test_a_system_without_the_call_is_asked_in_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write(tmp_path / "a.db"))
    found = look_up(path)
    monkeypatch.setattr(sqlite_files, "_stat", lambda _: NOTHING)
    assert look_up(path) == found  # by the call
    monkeypatch.undo()

    class Refusing:
        def __call__(self, *_: object) -> int:
            return -1

    class Library:
        statx = Refusing()

    for library in (Library(), object()):
        monkeypatch.setattr(ctypes, "CDLL", lambda *_args, library=library, **_names: library)
        monkeypatch.setattr(sqlite_files, "_STATX_CALL", sqlite_files._load_statx())  # noqa: SLF001
        assert look_up(path) == found
        assert look_up(f"{path}-wal") == NOTHING
