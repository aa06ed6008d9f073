"""A fair lock on a file for several processes.

SQLite gives its write lock to the first process that asks after a commit, which is mostly the one that has just
committed: in a trial one of eight processes got a single transaction in three seconds. So a process queues with locks
on two files beside the database: it waits for the `-next` lock, and holding that, for the `-turn` lock of the process
that writes. A process that has just written finds `-next` taken, and cannot overtake. The locks end with their
process.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from odograph.errors import LedgerBusy

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows: SQLite's own lock is as safe, only less fair
    fcntl = None  # type: ignore[assignment]

__all__ = ["FairFileLock"]

_NEXT_POLL_INTERVAL: Final = 0.00005  # seconds between two attempts of the process that is next
_QUEUE_POLL_INTERVAL: Final = 0.001  # seconds, for the processes behind it


class FairFileLock:
    """A lock on a file, held by one process at a time. Threads of one process must exclude each other themselves."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._timeout = timeout
        self._files: list[int] = []
        for name in ("next", "turn") if fcntl else ():
            self._files.append(_open_lock_file(path.with_name(f"{path.name}-{name}"), path.stat()))

    def __enter__(self) -> None:
        """Queue for the lock and take it, or raise `LedgerBusy` after the timeout."""
        if not self._files:  # pragma: no cover  Windows
            return
        following, own = self._files
        deadline = time.monotonic() + self._timeout
        try:
            _wait(following, _QUEUE_POLL_INTERVAL, deadline)
            _wait(own, _NEXT_POLL_INTERVAL, deadline)
            fcntl.flock(following, fcntl.LOCK_UN)
        except BaseException:  # an interrupt may have come between any two of these
            fcntl.flock(own, fcntl.LOCK_UN)
            fcntl.flock(following, fcntl.LOCK_UN)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.release()

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._files:
            fcntl.flock(self._files[1], fcntl.LOCK_UN)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the lock files, which are not removed."""
        while self._files:
            os.close(self._files.pop())


def _open_lock_file(path: Path, database: os.stat_result) -> int:
    """Open a lock file with the owner and the permissions of the database, as SQLite does with its log."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, database.st_mode & 0o666)
    found = os.fstat(file)
    if (found.st_uid, found.st_gid) != (database.st_uid, database.st_gid):
        with suppress(OSError):  # another user owns it, and has set this
            os.fchown(file, database.st_uid if os.geteuid() == 0 else -1, database.st_gid)
    with suppress(OSError):
        if (found.st_mode ^ database.st_mode) & 0o666:  # because of the umask, or an earlier version
            os.fchmod(file, database.st_mode & 0o666)
    return file


def _wait(file: int, interval: float, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerBusy(
                    "another process has been writing to this ledger for too long; nothing was charged. Try again"
                ) from None
            time.sleep(interval)
        else:
            return
