"""Threads for blocking work. Callers are served round-robin, and one of them may use at most half of the queue."""

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

# The principal whose request this task answers; empty until it is known.
CLIENT: Final[ContextVar[str]] = ContextVar("client", default="")


class Threads:
    """A few threads of one event loop, and at most `max_queued` queued calls, each for at most `timeout` seconds."""

    def __init__(self, name: str, threads: int, *, max_queued: int = 256, timeout: float = 15.0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"odograph-{name}")
        self._idle = threads
        self._timeout = timeout
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(max_queued)

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a blocking function in a thread; raise `LedgerBusy` if the queue is full, or none is free in time."""
        loop = asyncio.get_running_loop()
        if self._idle:
            self._idle -= 1
        else:
            await self._wait_for_thread(loop.create_future())
        try:
            return await loop.run_in_executor(self._pool, partial(function, *args, **kwargs))
        finally:
            self._release_thread()

    def shutdown(self) -> None:
        """Wait for the running calls, and end the threads."""
        self._pool.shutdown(wait=True)

    async def _wait_for_thread(self, thread_free: asyncio.Future[None]) -> None:
        """Wait until another call releases its thread to this one."""
        client = CLIENT.get()
        try:
            self._queue.add(client, thread_free)
        except LedgerBusy:
            raise _busy() from None
        try:
            done, _ = await asyncio.wait({thread_free}, timeout=self._timeout)
        except asyncio.CancelledError:
            if thread_free.done():  # the thread was released to a call that was canceled
                self._release_thread()
            else:
                self._queue.remove(client, thread_free)
            raise
        if not done:
            self._queue.remove(client, thread_free)
            raise _busy()

    def _release_thread(self) -> None:
        """Pass the thread on to the next queued call, or mark it idle."""
        group: list[asyncio.Future[None]] = []
        self._queue.take(group, 1)
        if group:
            group[0].set_result(None)
        else:
            self._idle += 1


def _busy() -> LedgerBusy:
    return LedgerBusy("the service has as many requests as it can hold; try again")
