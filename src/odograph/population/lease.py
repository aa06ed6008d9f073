"""A lease on a population: its processes step one after the other, because waiting costs less than trying in vain.

Nothing rests on it. The ledger accepts a step only if the entry that it began from is still the last one: a step
without the lease may be in vain, but is never lost or charged twice. So a process goes on without where files cannot
be locked, and once the process in front has been at the same step for too long, as one that was stopped is.

Files are locked in the population's folder, which everything that charges it reaches, wherever the ledger is: on one
machine, and on a network file system that locks files for all its machines. The locks end with their process. As in
front of a ledger, there are two places in a row, so that whoever has just made a step cannot overtake the others.

A version is pinned in the same way while a mechanism runs on it, so that others do not remove it meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

try:
    import fcntl
except ImportError:  # Windows: everything goes on without
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCKS", "is_pinned", "leased", "pinned"]

LOCKS: Final = ("next.lock", "step.lock")
PATIENCE: Final = 600.0  # seconds for one step of another process
WITHIN: Final = 1.0  # the same, within a step of another population: its process may be waiting for that one
_PAUSE: Final = 0.002  # seconds between two looks

_THREAD: Final = threading.local()


@contextmanager
def leased(folder: Path, patience: float | None = None) -> Iterator[bool]:
    """Hold the lease of a folder, or go on without if it is not to be had; say whether another process was first.

    A thread that has it already, as in a signal handler or where a step says how far it has come, does not wait for
    itself. One that has another lease waits only briefly: whoever is in front may be waiting for that one.
    """
    held: set[Path] = _THREAD.__dict__.setdefault("held", set())
    folder = Path(os.path.realpath(folder))  # it may have another name, through a link
    with ExitStack() as stack:
        waited = False
        if fcntl is not None and folder not in held:
            patience = PATIENCE if patience is None else patience
            if held:
                patience = min(patience, WITHIN)
            held.add(folder)
            stack.callback(held.discard, folder)
            with suppress(OSError):
                waited = _acquire(stack, folder, patience)
        yield waited


@contextmanager
def pinned(folder: Path) -> Iterator[None]:
    """Let others see that a folder is in use, while this process lives; where files have no locks, they do not."""
    with ExitStack() as stack:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(_opened(stack, folder, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_pinned(folder: Path) -> bool:
    """Say whether a folder is in use, by this process or another one."""
    with ExitStack() as stack:
        if fcntl is not None:
            try:
                fcntl.flock(_opened(stack, folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:
                return False
        return False


def _acquire(stack: ExitStack, folder: Path, patience: float) -> bool:
    """Lock both files, then let the next process have the first of them; raise `OSError` if files have no locks."""
    following, own = (_opened(stack, folder / name) for name in LOCKS)
    waits = [_wait(following, own, patience)]
    if waits[0] is not None:
        waits.append(_wait(own, own, patience))
        if waits[1] is not None:
            now = time.time_ns()
            os.utime(own, ns=(now, now))  # those who wait see that it is another step
        fcntl.flock(following, fcntl.LOCK_UN)
    return waits != [False, False]


def _opened(stack: ExitStack, path: Path, how: int = os.O_CREAT | os.O_RDWR) -> int:
    file = os.open(path, how | os.O_NOFOLLOW, 0o600)
    stack.callback(_close, file)
    return file


def _close(file: int) -> None:
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
    os.close(file)


def _wait(file: int, step: int, patience: float) -> bool | None:
    """Lock a file, and say whether it was locked; None after too long a wait for one and the same step."""
    began, since = -1, time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found, now = os.fstat(step).st_mtime_ns, time.monotonic()
            if found != began:
                began, since = found, now
            elif now - since >= patience:
                return None
            time.sleep(_PAUSE)
        else:
            return began >= 0
