"""Code that runs in the middle of other code: forked processes, signal handlers and finalizers.

A forked process is a copy with one thread. A lock that another thread held stays locked in it, and a connection is
shared with the parent process. An object that holds either registers itself here; it can still be garbage-collected.

A signal handler or a finalizer runs in the middle of what its own thread is doing. If that is a request to the same
ledger, it can neither wait for that request, which cannot go on before the handler is done, nor go in between, as one
of the two would be lost. So it is refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from typing import Final, Protocol
from weakref import WeakSet

from odograph.errors import LedgerBusy

__all__ = [
    "RenewedAfterFork",
    "SuspendedByFork",
    "is_reentry",
    "leave_to_parent",
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
