"""Requests from a signal handler or a finaliser: they run in the middle of what their own thread is doing.

If that is a request to the same ledger, they must not wait for it, as it cannot go on before they are done, nor go in
between, as one of the two would be lost. So they are refused.
"""

from __future__ import annotations

import threading
from typing import Final

from odograph.errors import LedgerBusy

__all__ = ["is_reentry", "reentered", "refuse_reentry"]

_TEXT: Final = (
    "a signal handler or finaliser asked for something in the middle of a request of its own thread; nothing was"
    " charged for what it asked. Try again when that request is done"
)


def refuse_reentry(lock: threading.RLock) -> None:
    """Raise `LedgerBusy` if this thread holds the lock already; before waiting for it."""
    if lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001  as threading.Condition asks
        raise reentered()


def reentered() -> LedgerBusy:
    """Return the refusal."""
    return LedgerBusy(_TEXT)


def is_reentry(error: BaseException) -> bool:
    """Say whether an error is this refusal: a handler that does not catch it raises it where it interrupted.

    There it says nothing of the request that was interrupted, which may have been written or not.
    """
    return isinstance(error, LedgerBusy) and error.args == (_TEXT,)
