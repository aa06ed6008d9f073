"""Threads for blocking work, shared fairly: callers take turns, and one of them may fill half of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Final, ParamSpec, TypeVar

from odograph.errors import LedgerBusy
from odograph.ledger.fair_queue import FairQueue

__all__ = ["CLIENT", "Threads"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

# The principal for whom the request of this task is answered; empty until it is known.
CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")


class Threads:
    """A few threads, and at most `places` calls that wait for one, so many seconds. For one event loop."""

    def __init__(self, name: str, threads: int, *, places: int = 256, patience: float = 15.0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"odograph-{name}")
        self._idle = threads
        self._patience = patience
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(places)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call blocking work in a thread; raise `LedgerBusy` if too much waits, or no thread is free in time."""
        loop = asyncio.get_running_loop()
        if self._idle:
            self._idle -= 1
        else:
            await self._wait(loop.create_future())
        try:
            return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))
        finally:
            self._hand_on()

    def shutdown(self) -> None:
        """Wait until what was begun is finished, and end the threads."""
        self._pool.shutdown(wait=True)

    async def _wait(self, turn: asyncio.Future[None]) -> None:
        """Wait for a thread that another call hands on."""
        client = CLIENT.get()
        try:
            self._queue.add(client, turn)
        except LedgerBusy:
            raise _busy() from None
        try:
            done, _ = await asyncio.wait({turn}, timeout=self._patience)
        except asyncio.CancelledError:
            if turn.done():  # the thread was handed to a call that has gone
                self._hand_on()
            else:
                self._queue.remove(client, turn)
            raise
        if not done:
            self._queue.remove(client, turn)
            raise _busy()

    def _hand_on(self) -> None:
        group: list[asyncio.Future[None]] = []
        self._queue.take(group, 1)
        if group:
            group[0].set_result(None)
        else:
            self._idle += 1


def _busy() -> LedgerBusy:
    return LedgerBusy("the service has as much to do as it can hold; nothing was changed. Try again")
