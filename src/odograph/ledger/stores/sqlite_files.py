"""Files of SQLite: opened so that commits are durable, created complete or not at all, and locked with their log.

The log needs locks of its own. SQLite uses POSIX record locks, and a process loses all it has on a file when it
closes any descriptor of that file. After a program has copied the ledger that it has open, as with `shutil.copy`, the
next process that finishes believes that it is the last one, and deletes the write-ahead log into which the program
still writes. So a connection also holds open-file-description locks, which end with their own descriptor only: on the
bytes of the database that show SQLite that the file is open, and on the byte of the `-shm` file that shows that this
index of the log is in use. Deleting the log, or creating its index anew, needs exclusive locks on them.

Only Linux has such locks. Elsewhere the store notices that its log was replaced, and stops.

This file has four parts: opening and creating files, names of files, locks on the log, and SQLite's errors.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from odograph.concurrency import renew_after_fork
from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows: a lock there ends with its own handle
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "NOTHING",
    "NO_FILE",
    "Connection",
    "FileName",
    "application_of",
    "code_of",
    "error_of",
    "exclusive",
    "identity",
    "lost_log_error",
    "make_file",
    "open_file",
    "refuse_second_name",
    "sync",
    "translate_errors",
]

NO_FILE: Final = (0, 0, 0)  # the identity of nothing
NOTHING: Final = (0, *NO_FILE)
_NEW: Final = re.compile(r"\.[0-9a-f]{16}")  # the end of the name of a file that is being created
_PRAGMAS: Final = (
    "synchronous = FULL",
    "fullfsync = ON",
    "foreign_keys = ON",
    "secure_delete = ON",
    # In pages, 16 MB: every group writes the last pages again, and a checkpoint copies them once for many groups.
    "wal_autocheckpoint = 4000",
)

# The bytes that SQLite locks, by its file format: the first one, and how many.
_OPEN: Final = (0x4000_0002, 510)  # of the database: shared for as long as it is open with a write-ahead log
_IN_USE: Final = (128, 1)  # of the -shm file: shared by all processes that have it mapped
_HAS_FILE_LOCKS: Final = sys.platform.startswith("linux")
_POLL_INTERVAL: Final = 0.001  # seconds between two attempts to lock


def open_file(path: Path, timeout: float, *, guarded: bool = False) -> Connection:
    """Open an existing file; commits are synced, and deleted content is overwritten.

    While a `guarded` connection is open, no process can delete its log or change the journal mode, whatever else this
    process does with the file.
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
        real = os.path.realpath(path)  # SQLite keeps the log beside it
        if guarded:
            connection.guard(real, timeout)
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        if guarded:
            connection.execute("PRAGMA schema_version")
            connection.guard_index(real, timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def application_of(path: Path) -> int | None:
    """Return the application id of a file, read without its log, which may be the wrong one.

    None if that is impossible: a part of the file may be in the log only, while the log is being copied into the
    file, or after that was cut short by a kill or a full disk.
    """
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw&immutable=1", uri=True)) as connection:
            return int(connection.execute("PRAGMA application_id").fetchone()[0])
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return None


def refuse_second_name(path: Path) -> None:
    """Raise if the file has a second name, in its own folder or in another.

    SQLite names the log after the database. Two programs that use two names have two logs, and neither sees what the
    other wrote. Symbolic links do not count, and a folder may be mounted anywhere.
    """
    path = path.resolve()
    if not path.is_file():  # SQLite reports what is wrong with it
        return
    if path.stat().st_nlink > 1:
        _remove_remains(path)
    names = path.stat().st_nlink
    if names > 1:
        raise LedgerError(
            f"a ledger must have one name, but {path} has {names} (hard links): programs that use different names"
            " do not see each other's charges. Find the others with find -samefile and remove them; make copies with"
            " backup"
        )
    if _mounted_alone(path):
        raise LedgerError(
            f"{path} is mounted without its folder, as by docker run -v ./privacy.db:/app/privacy.db. Programs"
            " outside then use another log, and charges would be lost. Mount the folder instead: -v ./folder:/folder"
        )


def _remove_remains(path: Path) -> None:
    """Remove the temporary name of this file, if the program that created it was killed before it could do so."""
    for other in path.parent.iterdir():
        if other.name.startswith(f".{path.name}.") and _NEW.fullmatch(other.name.removeprefix(f".{path.name}")):
            try:
                if other.samefile(path):
                    other.unlink()
            except FileNotFoundError:  # pragma: no cover  that program is alive, and has just removed it
                continue


def _mounted_alone(path: Path) -> bool:
    """Return whether a file is a mount of its own."""
    try:
        return _mount_of(path) != _mount_of(path.parent)
    except (AttributeError, LookupError, OSError, ValueError):  # not Linux, or /proc is missing
        return path.stat().st_dev != path.parent.stat().st_dev


def _mount_of(path: Path) -> str:
    # With O_PATH the file is not opened: closing any other descriptor would release SQLite's locks.
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{file}").read_text(encoding="ascii").splitlines()
    finally:
        os.close(file)
    return dict(line.split(":\t", 1) for line in lines)["mnt_id"]


def make_file(path: Path, fill: Callable[[Path], None]) -> bool:
    """Create a file complete or not at all, and never over another; return whether this call created it.

    `fill` gets the path of an empty file under a temporary name, which only its owner can read.
    """
    for left in (path.with_name(f"{path.name}-{name}") for name in ("wal", "shm", "journal")):
        if left.exists():
            if path.exists():  # another process created it, and already uses it
                return False
            raise LedgerError(
                f"{left} is left over from a file that was moved or deleted, and may contain a part of it; a new file"
                " would take it over. Move it away together with its file"
            )
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            fill(new)
            os.link(new, path)
            sync(path.parent)  # the name must be as durable as the content
        finally:
            for name in (new.name, f"{new.name}-wal", f"{new.name}-shm"):
                new.with_name(name).unlink(missing_ok=True)
    except FileExistsError:
        return False
    return True


# Names of files.


class FileName:
    """The name of a file, to see whether it still leads to the same one. For one thread at a time.

    A name is looked up in every transaction, also right after the commit, when nothing is in the processor's caches.
    So everything that the system call needs is made once.
    """

    __slots__ = ("_call", "_found", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self._found = _Buffer()
        name = ctypes.c_char_p(os.fsencode(path))
        self._call = partial(_STATX_CALL, _WORKING_DIRECTORY, name, _NO_FLAGS, _WANTED, self._found)

    def look_up(self) -> tuple[int, int, int, int]:
        """Return the number of names of the file, its inode and its device; `NOTHING` if there is none.

        Linux is not asked for times. Since version 6.13, a write to a file notes its exact time if the time of the
        last one was asked for. Then the next commit syncs the inode too, and takes a third longer.
        """
        if self._call():
            return _stat(self.path)  # which says why there is nothing to be found
        found: tuple[int, int, int, int] = _STATX.unpack(self._found)
        return found


def identity(path: str) -> tuple[int, int, int]:
    """Return the inode and the device of the file at a path, which change if another file replaces it."""
    return FileName(path).look_up()[1:]


def _stat(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116  called in every transaction where there is no better call
    except FileNotFoundError:
        return NOTHING
    device = (os.major(found.st_dev), os.minor(found.st_dev)) if _HAS_FILE_LOCKS else (found.st_dev, 0)
    return found.st_nlink, found.st_ino, *device


# Linux's struct statx: the number of names, the inode and the device, with the bytes between them.
_STATX: Final = struct.Struct("=16x I 12x Q 96x I I 112x")
_NAMES, _INODE = 0x0004, 0x0100
_WANTED: Final = ctypes.c_uint(_INODE | _NAMES)
_WORKING_DIRECTORY: Final = ctypes.c_int(-100)
_NO_FLAGS: Final = ctypes.c_int(0)
_Buffer: Final = ctypes.c_char * _STATX.size


def _load_statx() -> Callable[..., int]:
    """Return the C library's function, or one that always fails where it is missing or forbidden.

    Old container engines forbid it.
    """
    try:
        call: Callable[..., int] = ctypes.CDLL(None).statx
    except (AttributeError, OSError, TypeError):
        return _fail
    return _fail if call(_WORKING_DIRECTORY, ctypes.c_char_p(b"/"), _NO_FLAGS, _WANTED, _Buffer()) else call


def _fail(*_: object) -> int:
    return -1


_STATX_CALL: Final = _load_statx()


def sync(path: Path) -> None:
    """Write a file or a folder through to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# Locks on the log.


def lost_log_error(path: str) -> LedgerError:
    """Return the error for a log, or an index of it, that is no longer the file that this process has open."""
    return LedgerError(
        f"{path} was deleted or replaced while in use; nothing was charged. Close every program that uses the ledger,"
        " then connect again"
    )


@contextmanager
def exclusive(timeout: float) -> Iterator[None]:
    """Let no other thread of this process lock or unlock a database; raise `LedgerBusy` after the timeout.

    This is for making a connection. A connection without these locks would lose SQLite's own when another thread
    unlocks the same file, and two threads that open the file must not block each other's change of its journal mode.
    """
    lock = _GUARDS.lock
    if not lock.acquire(timeout=timeout):
        raise LedgerBusy("another thread is opening or closing a ledger; try again")
    try:
        yield
    finally:
        lock.release()


class Connection(sqlite3.Connection):
    """A connection that can keep other processes from deleting its log, until it is closed or collected."""

    _guard: _Guard | None = None
    _key = (0, 0)  # of the guard: device and inode

    def guard(self, path: str, timeout: float) -> None:
        """Lock the database; called before the first statement, when there is no log to lose yet."""
        if not _HAS_FILE_LOCKS:  # pragma: no cover  not Linux
            return
        with _GUARDS.lock, suppress(OSError):  # some file systems have no locks
            found = os.stat(path)  # noqa: PTH116  as above
            key = found.st_dev, found.st_ino
            guard = _GUARDS.by_file.get(key) or _Guard()
            guard.holders.add(id(self))  # from here on a finalizer or signal handler does not unlock it
            self._guard = _GUARDS.by_file[key] = guard
            self._key = key
            guard.lock(path, *_OPEN, timeout)

    def guard_index(self, path: str, timeout: float) -> None:
        """Lock the log's index too, which exists after the first statement."""
        with _GUARDS.lock, suppress(OSError):
            if self._guard is not None:
                self._guard.lock(f"{path}-shm", *_IN_USE, timeout)

    def close(self) -> None:
        """Close the connection. The last one of the process unlocks the log, which SQLite deletes if it is unused."""
        with _GUARDS.lock:
            guard, self._guard = self._guard, None
            if guard is not None:
                guard.holders.discard(id(self))
            if guard is None or guard.holders:
                super().close()
                return
            _GUARDS.by_file.pop(self._key, None)  # a connection made in a signal handler gets a new one
            # If the log was replaced, this one ends before that of the other processes, and must not be kept.
            if not guard.replaced_files():
                guard.unlock()
            super().close()
            guard.forget()  # only now: closing its descriptors releases SQLite's own locks

    def __del__(self) -> None:
        if self._guard is not None:  # otherwise SQLite closes it by itself
            self.close()


class _Guard:
    """The locks of all the connections of this process to one file."""

    def __init__(self) -> None:
        self.holders: set[int] = set()  # ids of the connections
        self._files: dict[str, tuple[int, int, int]] = {}  # descriptor, first byte, length

    def lock(self, path: str, start: int, length: int, timeout: float) -> None:
        """Lock some bytes of a file against exclusive locks of others."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), start, length
        file = self._files[path][0]
        _wait(file, start, length, time.monotonic() + timeout)
        for replaced in self.replaced_files():
            raise lost_log_error(replaced)

    def replaced_files(self) -> list[str]:
        """Return the paths at which there is another file now."""
        found = []
        for path, (file, *_) in self._files.items():
            with suppress(FileNotFoundError):
                if not os.path.samestat(os.fstat(file), os.stat(path)):  # noqa: PTH116  as above
                    found.append(path)
        return found

    def unlock(self) -> None:
        """Release the locks."""
        for file, start, length in self._files.values():
            with suppress(OSError):  # some file systems have no locks
                _set_lock(file, fcntl.F_UNLCK, start, length)

    def forget(self) -> None:
        """Close the descriptors."""
        while self._files:
            os.close(self._files.popitem()[1][0])


def _wait(file: int, start: int, length: int, deadline: float) -> None:
    while not _set_lock(file, fcntl.F_RDLCK, start, length):
        if time.monotonic() > deadline:
            raise _busy_error()
        time.sleep(_POLL_INTERVAL)


def _set_lock(file: int, kind: int, start: int, length: int) -> bool:
    """Set an open-file-description lock; return False if another one is in the way."""
    ask = struct.pack("hhqqi0q", kind, os.SEEK_SET, start, length, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, ask)
    except (BlockingIOError, PermissionError):
        return False
    return True


class _Guards:
    """The guards of this process by device and inode, and the lock for changing them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_file: dict[tuple[int, int], _Guard] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:  # pragma: no cover  in a forked process, which is not measured
        """Forget the guards, whose locks belong to the parent process, and replace the lock."""
        self.lock = threading.RLock()
        while self.by_file:
            self.by_file.popitem()[1].forget()


_GUARDS: Final = _Guards()


# SQLite's errors.


def error_of(problem: sqlite3.Error | UnicodeDecodeError, path: str) -> LedgerError:
    """Return the error of Odograph for an error of SQLite with the file at a path."""
    if isinstance(problem, UnicodeDecodeError):
        return _damage_error("SQLite's message is not UTF-8")
    if code_of(problem) in _UNWRITABLE:
        return LedgerError(
            f"{path} cannot be written ({problem}): a ledger is a file that you may write, not a folder"
        )
    return _TRANSLATIONS.get(code_of(problem), _unexpected_error)(problem)


@contextmanager
def translate_errors(path: str) -> Iterator[None]:
    """Raise SQLite's errors as errors of Odograph."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as problem:
        raise error_of(problem, path) from problem


def code_of(problem: sqlite3.Error) -> int:
    """Return SQLite's primary code for an error."""
    return getattr(problem, "sqlite_errorcode", 0) & 0xFF


def _busy_error(_: object = None) -> LedgerError:
    return LedgerBusy("another program holds the ledger's file; nothing was charged. Try again")


def _full_error(_: object) -> LedgerError:
    return LedgerBusy("the disk is full; nothing was charged. Make room and try again")


def _damage_error(problem: sqlite3.Error | str) -> LedgerError:
    return LedgerCorrupt(
        f"the ledger's file is damaged ({problem}); restore a backup, with the latest checkpoint that you kept"
    )


def _contradiction_error(problem: sqlite3.Error) -> LedgerError:
    return LedgerCorrupt(f"the changes contradict what is stored ({problem}); nothing was stored")


def _unexpected_error(problem: sqlite3.Error) -> LedgerError:
    return LedgerError(f"the ledger's file could not be used ({problem})")


_UNWRITABLE: Final = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_TRANSLATIONS: Final[dict[int, Callable[[sqlite3.Error], LedgerError]]] = {
    sqlite3.SQLITE_BUSY: _busy_error,
    sqlite3.SQLITE_LOCKED: _busy_error,
    sqlite3.SQLITE_FULL: _full_error,
    sqlite3.SQLITE_CORRUPT: _damage_error,
    sqlite3.SQLITE_NOTADB: _damage_error,
    sqlite3.SQLITE_CONSTRAINT: _contradiction_error,
}
