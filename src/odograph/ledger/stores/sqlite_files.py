"""Files of SQLite: opened so that commits are durable, made complete or not at all, kept out of forked processes."""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from odograph.errors import LedgerError
from odograph.ledger.stores.sqlite_guard import Connection

__all__ = [
    "NOTHING",
    "NO_FILE",
    "Forked",
    "application_of",
    "file_at",
    "identity",
    "keep_from_forks",
    "make_file",
    "open_file",
    "refuse_second_name",
    "sync",
]

NO_FILE: Final = (0, 0)
NOTHING: Final = (*NO_FILE, 0)
_NEW: Final = re.compile(r"\.[0-9a-f]{16}")  # what ends the name of a file that is being made
_PRAGMAS: Final = (
    "synchronous = FULL",
    "fullfsync = ON",
    "foreign_keys = ON",
    "secure_delete = ON",
    "wal_autocheckpoint = 4000",  # pages, 16 MB: the last pages are written by every group, and copied once for many
)


def open_file(path: Path, timeout: float, *, guarded: bool = False) -> Connection:
    """Open a file that is there; what is committed is synced, and what is deleted is overwritten.

    If it is guarded, its log cannot be deleted, whatever else this process does with the file, and its journal mode
    cannot be changed.
    """
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
        factory=Connection,
    )
    try:
        place = os.path.realpath(path)  # where SQLite has the log
        if guarded:
            connection.guard(place, timeout)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if guarded:
            connection.execute("PRAGMA schema_version")
            connection.guard_index(place, timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def application_of(path: Path) -> int | None:
    """Return what a file says that it is, without its log: that may be the wrong one.

    None if it cannot be read so: while a log is being copied into the file, and after the program that did so was
    killed or the disk was full, the rest is in the log only.
    """
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw&immutable=1", uri=True)) as connection:
            return int(connection.execute("PRAGMA application_id").fetchone()[0])
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return None


def refuse_second_name(path: Path) -> None:
    """Raise if the file can be reached by a name in another folder, or by another name in its own.

    SQLite names the log after the database, so that two programs that use two names have two logs, and neither sees
    what the other wrote. Symbolic links are not names in this sense, and a folder may be mounted anywhere.
    """
    path = path.resolve()
    if not path.is_file():  # SQLite says what is wrong with it
        return
    if path.stat().st_nlink > 1:
        _remove_remains(path)
    names = path.stat().st_nlink
    if names > 1:
        raise LedgerError(
            f"{path} has {names} names (hard links), and a ledger must have one: programs that use different names do"
            " not see each other's charges. Nothing was charged. Find the others with find -samefile and remove them;"
            " make copies with backup"
        )
    if _mounted_alone(path):
        raise LedgerError(
            f"{path} is mounted without its folder, as by docker run -v ./privacy.db:/app/privacy.db. The log beside"
            " it is then not the one that programs outside see, and charges would be lost. Nothing was charged. Mount"
            " the folder instead: -v ./folder:/folder"
        )


def _remove_remains(path: Path) -> None:
    """Remove the first name of a file that was made by a program that was killed before it could do so itself."""
    for other in path.parent.iterdir():
        if other.name.startswith(f".{path.name}.") and _NEW.fullmatch(other.name.removeprefix(f".{path.name}")):
            try:
                if other.samefile(path):
                    other.unlink()
            except FileNotFoundError:  # pragma: no cover  that program was not killed, and has just removed it
                continue


def _mounted_alone(path: Path) -> bool:
    """Say whether a file is a mount of its own."""
    try:
        return _mount_of(path) != _mount_of(path.parent)
    except (AttributeError, LookupError, OSError, ValueError):  # not Linux, or a part of it only
        return path.stat().st_dev != path.parent.stat().st_dev


def _mount_of(path: Path) -> str:
    # A descriptor that names a file without opening it: closing any other one would take SQLite's locks away.
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{file}").read_text(encoding="ascii").splitlines()
    finally:
        os.close(file)
    return dict(line.split(":\t", 1) for line in lines)["mnt_id"]


def make_file(path: Path, fill: Callable[[Path], None]) -> bool:
    """Make a file complete or not at all, and never in place of another; say whether it is this one.

    `fill` is given an empty file with another name, which only its user can read.
    """
    for left in (path.with_name(f"{path.name}-{name}") for name in ("wal", "shm", "journal")):
        if left.exists():
            if path.exists():  # another process made it, and uses it already
                return False
            raise LedgerError(
                f"{left} is left over from a file that was moved or deleted, and may hold some of it; a new file"
                " would take it over. Move it away together with its file"
            )
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            fill(new)
            os.link(new, path)
            sync(path.parent)  # the name must be as durable as what is in the file
        finally:
            for name in (new.name, f"{new.name}-wal", f"{new.name}-shm"):
                new.with_name(name).unlink(missing_ok=True)
    except FileExistsError:
        return False
    return True


def identity(path: str) -> tuple[int, int]:
    """Return which file is at a path now: another one there is not the one that was opened."""
    return file_at(path)[:2]


def file_at(path: str) -> tuple[int, int, int]:
    """Return which file is at a path now, and how many names it has."""
    try:
        found = os.stat(path)  # noqa: PTH116  at every transaction, and Path.stat takes twice as long
    except FileNotFoundError:
        return NOTHING
    return found.st_dev, found.st_ino, found.st_nlink


class Forked(Protocol):
    """Who holds connections of SQLite, which must not get into a forked process: their locks would be wrong there."""

    def forking(self) -> Generator[None]:
        """Close the connections, and let no thread make new ones until the generator is closed, in both processes."""
        ...


_HOLDERS: WeakSet[Forked] = WeakSet()
_FORKING: list[Generator[None]] = []


def keep_from_forks(holder: Forked) -> None:
    """Close a holder's connections before every fork of this process."""
    _HOLDERS.add(holder)


def _before_fork() -> None:
    """Wait for all holders, through an interrupt too: Python forks all the same, and then says that it came."""
    interrupt: BaseException | None = None
    for holder in sorted(_HOLDERS, key=id):
        while True:
            held = holder.forking()
            _FORKING.append(held)  # before it holds anything, so that an interrupt cannot come between the two
            try:
                next(held)
            except BaseException as problem:  # noqa: BLE001  raised again below
                if isinstance(problem, Exception):
                    break
                interrupt = problem
            else:
                break
    if interrupt is not None:
        raise interrupt


def _after_fork() -> None:
    while _FORKING:
        _FORKING.pop().close()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
