"""Locks that keep a database's write-ahead log where it is, whatever this process does with the file.

SQLite locks by POSIX record locks, and a process loses all it has on a file when it closes any descriptor of it.
After `shutil.copy` of the ledger by the program that has it open, the next process that finishes takes itself for
the last one, and deletes the log into which this one writes. So a connection also holds open-file-description locks,
which end with their own descriptor only: on the bytes of the database by which SQLite knows that the file is open,
and on the byte of the `-shm` by which it knows that this index of the log is in use. Deleting the log, or making its
index anew, needs them exclusively.

Linux has such locks. Elsewhere the store notices that the log is another one, and stops.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from odograph.errors import LedgerBusy, LedgerError

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows: a lock there ends with its own handle
    fcntl = None  # type: ignore[assignment]

__all__ = ["Connection", "alone", "lost"]

# Where SQLite locks, as its file format says: first byte and how many.
_OPEN: Final = (0x4000_0002, 510)  # of the database: shared for as long as it is open with a write-ahead log
_IN_USE: Final = (128, 1)  # of the -shm: shared by all that have it mapped
_POSSIBLE: Final = sys.platform.startswith("linux")
_PAUSE: Final = 0.001  # seconds between two tries


def lost(path: str) -> LedgerError:
    """Return the error of a log or an index that is not the one which this process has open."""
    return LedgerError(
        f"{path} was deleted or replaced while in use; nothing was charged. Close every program that uses the ledger,"
        " and connect again"
    )


@contextmanager
def alone(timeout: float) -> Iterator[None]:
    """Let no other thread of this process lock or unlock a database, or raise `LedgerBusy` after the timeout.

    While a connection is made: one without these locks would lose SQLite's own when another thread unlocks the same
    file, and those that only look at the file must not keep each other from changing its journal mode.
    """
    lock = _LOCK
    if not lock.acquire(timeout=timeout):
        raise LedgerBusy("another thread is opening or closing a ledger; nothing was charged. Try again")
    try:
        yield
    finally:
        lock.release()


class Connection(sqlite3.Connection):
    """A connection that can keep others from deleting its log, until it is closed or dropped."""

    _guard: _Guard | None = None
    _key = (0, 0)  # of the guard: device and inode

    def guard(self, path: str, timeout: float) -> None:
        """Lock the database; before the first statement, when there is no log to lose yet."""
        if not _POSSIBLE:  # pragma: no cover  not Linux
            return
        with _LOCK, suppress(OSError):  # some file systems have none
            found = os.stat(path)  # noqa: PTH116  as for every transaction
            key = found.st_dev, found.st_ino
            guard = _GUARDS.get(key) or _Guard()
            guard.holders.add(id(self))  # from here on a finaliser or signal handler does not unlock it
            self._guard = _GUARDS[key] = guard
            self._key = key
            guard.lock(path, *_OPEN, timeout)

    def guard_index(self, path: str, timeout: float) -> None:
        """Lock the log's index too, which is there after the first statement."""
        with _LOCK, suppress(OSError):
            if self._guard is not None:
                self._guard.lock(f"{path}-shm", *_IN_USE, timeout)

    def close(self) -> None:
        """Close it; the last one of the process unlocks the log first, and deletes it if no other process has it."""
        with _LOCK:
            guard, self._guard = self._guard, None
            if guard is not None:
                guard.holders.discard(id(self))
            if guard is None or guard.holders:
                super().close()
                return
            _GUARDS.pop(self._key, None)  # who connects in a signal handler gets a new one
            if (
                not guard.replaced()
            ):  # else this one's log ends before that of the others, and must not be the one kept
                guard.unlock()
            super().close()
            guard.forget()  # only now: closing its descriptors takes SQLite's own locks away

    def __del__(self) -> None:
        if self._guard is not None:  # else SQLite closes it by itself
            self.close()


class _Guard:
    """The locks of all the connections of this process to one file."""

    def __init__(self) -> None:
        self.holders: set[int] = set()  # which connections
        self._files: dict[str, tuple[int, int, int]] = {}  # descriptor, first byte, length

    def lock(self, path: str, start: int, length: int, timeout: float) -> None:
        """Lock some bytes of a file against those who want them alone."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), start, length
        file = self._files[path][0]
        _wait(file, start, length, time.monotonic() + timeout)
        for replaced in self.replaced():
            raise lost(replaced)

    def replaced(self) -> list[str]:
        """Return in whose place another file has come."""
        found = []
        for path, (file, *_) in self._files.items():
            with suppress(FileNotFoundError):
                if not os.path.samestat(os.fstat(file), os.stat(path)):  # noqa: PTH116  as above
                    found.append(path)
        return found

    def unlock(self) -> None:
        """Let others have the files alone."""
        for file, start, length in self._files.values():
            with suppress(OSError):  # some file systems have none
                _locked(file, fcntl.F_UNLCK, start, length)

    def forget(self) -> None:
        """Close the descriptors."""
        while self._files:
            os.close(self._files.popitem()[1][0])


def _wait(file: int, start: int, length: int, deadline: float) -> None:
    while not _locked(file, fcntl.F_RDLCK, start, length):
        if time.monotonic() > deadline:
            raise LedgerBusy("another program holds the ledger's file; nothing was charged. Try again")
        time.sleep(_PAUSE)


def _locked(file: int, kind: int, start: int, length: int) -> bool:
    """Set a lock of an open file description; say whether no other one is in the way."""
    ask = struct.pack("hhqqi0q", kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, ask)
    except (BlockingIOError, PermissionError):
        return False
    return True


_LOCK = threading.RLock()
_GUARDS: dict[tuple[int, int], _Guard] = {}


def _after_fork() -> None:  # pragma: no cover  in a forked process, which is not measured
    """Hold nothing of the parent's: the locks are its own, and another of its threads may have had the lock above."""
    global _LOCK  # noqa: PLW0603  there is one
    _LOCK = threading.RLock()
    while _GUARDS:
        _GUARDS.popitem()[1].forget()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)
