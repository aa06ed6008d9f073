"""Files of SQLite: opened so that commits are durable, made complete or not at all, kept out of forked processes."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from odograph.errors import LedgerError

__all__ = ["NO_FILE", "Forked", "identity", "keep_from_forks", "make_file", "open_file", "sync"]

NO_FILE: Final = (0, 0)
_PRAGMAS: Final = (
    "synchronous = FULL",
    "fullfsync = ON",
    "foreign_keys = ON",
    "secure_delete = ON",
    "wal_autocheckpoint = 4000",  # pages, 16 MB: the last pages are written by every group, and copied once for many
)


def open_file(path: Path, timeout: float) -> sqlite3.Connection:
    """Open a file that is there; what is committed is synced, and what is deleted is overwritten."""
    connection = sqlite3.connect(
        f"{path.as_uri()}?mode=rw",
        uri=True,
        timeout=timeout,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


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
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        try:
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
    try:
        found = os.stat(path)  # noqa: PTH116  at every transaction, and Path.stat takes twice as long
    except FileNotFoundError:
        return NO_FILE
    return found.st_dev, found.st_ino


class Forked(Protocol):
    """Who holds connections of SQLite, which must not get into a forked process: their locks would be wrong there."""

    def before_fork(self) -> None:
        """Close the connections, and let nobody make new ones."""
        ...

    def after_fork(self) -> None:
        """Go on, in both processes; each makes its own connections."""
        ...


_HOLDERS: WeakSet[Forked] = WeakSet()
_FORKING: list[Forked] = []


def keep_from_forks(holder: Forked) -> None:
    """Close a holder's connections before every fork of this process."""
    _HOLDERS.add(holder)


def _before_fork() -> None:
    _FORKING[:] = sorted(_HOLDERS, key=id)
    for holder in _FORKING:
        holder.before_fork()


def _after_fork() -> None:
    while _FORKING:
        _FORKING.pop().after_fork()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
