"""Code that runs beside other code, or in the middle of it: forks, signal handlers, threads, and locks on files.

A forked process is a copy with one thread. A lock that another thread held stays locked in it, and a connection is
shared with the parent process. An object that holds either registers itself here; it can still be garbage-collected.

A signal handler or a finalizer runs in the middle of what its own thread is doing. If that is a request to the same
ledger, it can neither wait for that request, which cannot go on before the handler is done, nor go in between, as one
of the two would be lost. So it is refused.

Processes that write to one file take turns by a fair lock. SQLite gives its write lock to the first process that asks
after a commit, which is mostly the one that has just committed: in a trial one of eight processes got a single
transaction in three seconds. So a process queues with locks on two files beside the database: it waits for the
`-next` lock, and holding that, for the `-turn` lock of the process that writes. A process that has just written finds
`-next` taken, and cannot overtake. The locks end with their process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

from odograph.errors import LedgerBusy

try:
    import fcntl
except ImportError:  # pragma: no cover  Windows: SQLite's own lock is as safe, only less fair
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "FairFileLock",
    "RenewedAfterFork",
    "SuspendedByFork",
    "is_reentry",
    "leave_to_parent",
    "pace",
    "reentry_error",
    "refuse_reentry",
    "renew_after_fork",
    "suspend_for_forks",
]


class RenewedAfterFork(Protocol):
    """An object with locks or connections that a forked process must not share with its parent."""

    def after_fork(self) -> None:
        """Replace them; called in the forked process only, before it does anything else."""
        ...


class SuspendedByFork(Protocol):
    """An object whose connections must be closed before a fork, as SQLite's: their locks would be wrong after it."""

    def forking(self) -> Generator[None]:
        """Close the connections, and let no thread make new ones until the generator is closed, in both processes."""
        ...


_RENEWED: Final[WeakSet[RenewedAfterFork]] = WeakSet()
_SUSPENDED: Final[WeakSet[SuspendedByFork]] = WeakSet()
_FORKING: Final[list[Generator[None]]] = []
_OF_THE_PARENT: Final[list[object]] = []


def renew_after_fork(holder: RenewedAfterFork) -> None:
    """Call `holder.after_fork()` in every process that is forked from this one."""
    _RENEWED.add(holder)


def suspend_for_forks(holder: SuspendedByFork) -> None:
    """Run `holder.forking()` around every fork of this process."""
    _SUSPENDED.add(holder)


def leave_to_parent(*connections: object) -> None:
    """Keep connections of the parent process from being collected here, which would end the parent's session."""
    _OF_THE_PARENT.extend(connections)


def _before() -> None:
    """Wait for all holders, even after an interrupt: Python forks all the same, and reports the interrupt."""
    interrupt: BaseException | None = None
    for holder in sorted(_SUSPENDED, key=id):
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


def _in_parent() -> None:
    while _FORKING:
        _FORKING.pop().close()


def _in_child() -> None:  # pragma: no cover  in a forked process, which is not measured
    for holder in _RENEWED:
        holder.after_fork()
    _in_parent()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


_REENTRY: Final = (
    "a signal handler or finalizer asked for something in the middle of a request of its own thread, and nothing was"
    " charged for it. Try again when that request is done"
)


def refuse_reentry(lock: threading.RLock) -> None:
    """Raise `LedgerBusy` if this thread holds the lock already; before waiting for it."""
    if lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  as threading.Condition asks
        raise reentry_error()


def reentry_error() -> LedgerBusy:
    """Return the error for a request from a signal handler or a finalizer."""
    return LedgerBusy(_REENTRY)


def is_reentry(error: BaseException) -> bool:
    """Return whether an error is this refusal: a handler that does not catch it raises it where it interrupted.

    There it says nothing of the request that was interrupted, which may have been written or not.
    """
    return isinstance(error, LedgerBusy) and error.args == (_REENTRY,)


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


T = TypeVar("T")

_SLICE: Final = 0.0005  # seconds of work between two checks whether other threads are at work
_SLEEP_RATIO: Final = 2.0  # how long to sleep if they are, relative to the time worked
_MAX_SLEEP: Final = 0.1  # seconds; an item may have taken long because a disk or a reader was slow
_BUSY: Final = 0.1  # the part of a processor from which other threads count as at work


def pace(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, with pauses while other threads of this process are at work.

    A Python thread computes for five milliseconds at a time, and a thread that has waited for the disk must wait for
    the end of them: without pauses, a replay would make every charge of its process several times slower.
    """
    begun, used = time.perf_counter(), _used_by_others()
    for item in items:
        yield item
        took = time.perf_counter() - begun
        if took > _SLICE:
            time.sleep(0)
            if _used_by_others() - used > _BUSY * took:
                time.sleep(min(_SLEEP_RATIO * took, _MAX_SLEEP))
            begun, used = time.perf_counter(), _used_by_others()


def _used_by_others() -> float:
    """Return the processor time that the other threads of this process have used, in seconds."""
    return time.process_time() - time.thread_time()
