"""Which file is at a path: what a store compares before and after every transaction."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from odograph.ledger.stores import sqlite_files
from odograph.ledger.stores.sqlite_files import NOTHING, file_at, identity

LOOK_UPS = {sqlite_files._stat, sqlite_files._look_up}  # noqa: SLF001  the usual one, and this system's


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
    tmp_path: Path, look_up: Callable[[str], tuple[int, int, int]], make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / "a.db")
    found = path.stat()
    assert look_up(str(path)) == file_at(str(path)) == (found.st_dev, found.st_ino, found.st_nlink)


@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_errors_are_those_of_the_system(tmp_path: Path, look_up: Callable[[str], tuple[int, int, int]]) -> None:
    path = str(write(tmp_path / "a.db"))
    with pytest.raises(NotADirectoryError, match=r"a\.db"):
        look_up(f"{path}/below")
    with pytest.raises(FileNotFoundError):
        look_up(f"{path}-wal")
    assert file_at(f"{path}-wal") == NOTHING


def test_another_file_at_the_same_path_is_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.db")
    before = identity(str(path))
    write(tmp_path / "b.db").replace(path)
    assert identity(str(path)) != before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has this call")
def test_a_system_without_the_call_is_asked_in_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sqlite_files._load_statx() is not None  # noqa: SLF001

    class Refusing:
        def __call__(self, *_: object) -> int:
            return -1

    class Library:
        statx = Refusing()

    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_names: Library())
    assert sqlite_files._load_statx() is None  # noqa: SLF001
    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_names: object())
    assert sqlite_files._load_statx() is None  # noqa: SLF001
