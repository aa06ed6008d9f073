"""Whose turn it is: a fair way for several processes to wait for one file.

SQLite lets whoever asks first after a commit go next, and that is mostly the process that has just committed: in a
trial one of eight processes got a single transaction in three seconds. So a process stands in two places in a row, by
locks on two files beside the database: it waits for the place behind the one that writes, then for that one to be
done. Whoever has just written finds the place behind taken, and cannot overtake. The locks end with their process.
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

_OFTEN: Final = 0.00005  # seconds between two looks, for the one that is next
_SELDOM: Final = 0.001  # for those behind it


class FairFileLock:
    """A place in front of a file, one process at a time. Within a process the caller sees to it."""

    def __init__(self, path: Path, timeout: float) -> None:
        self._timeout = timeout
        self._files: list[int] = []
        for name in ("next", "turn") if fcntl else ():
            self._files.append(_opened(path.with_name(f"{path.name}-{name}"), path.stat()))

    def __enter__(self) -> None:
        """Wait for the turn and hold it, or raise `LedgerBusy` after the timeout."""
        if not self._files:  # pragma: no cover  Windows
            return
        following, own = self._files
        deadline = time.monotonic() + self._timeout
        try:
            _wait(following, _SELDOM, deadline)
            _wait(own, _OFTEN, deadline)
            fcntl.flock(following, fcntl.LOCK_UN)
        except BaseException:  # an interrupt may have come between any two of these
            fcntl.flock(own, fcntl.LOCK_UN)
            fcntl.flock(following, fcntl.LOCK_UN)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next one write."""
        self.give_back()

    def give_back(self) -> None:
        """Let the next one write, if it is this one's turn."""
        if self._files:
            fcntl.flock(self._files[1], fcntl.LOCK_UN)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; they stay where they are."""
        while self._files:
            os.close(self._files.pop())


def _opened(path: Path, database: os.stat_result) -> int:
    """Open a file, and let all write it who may write the database, as SQLite does with its log."""
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, database.st_mode & 0o666)
    found = os.fstat(file)
    if (found.st_uid, found.st_gid) != (database.st_uid, database.st_gid):
        with suppress(OSError):  # it is another user's, and was made so by that one
            os.fchown(file, database.st_uid if os.geteuid() == 0 else -1, database.st_gid)
    with suppress(OSError):
        if (found.st_mode ^ database.st_mode) & 0o666:  # the user's mask, or an earlier version
            os.fchmod(file, database.st_mode & 0o666)
    return file


def _wait(file: int, pause: float, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LedgerBusy(
                    "another process has been writing to this ledger for too long; nothing was charged. Try again"
                ) from None
            time.sleep(pause)
        else:
            return
