"""Pen: an event loop writes through the ledger's group-commit writer, without waiting in the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial

from odograph.errors import OdographError
from odograph.ledger.requests import Outcome, Request
from odograph.ledger.writer import Writer

__all__ = ["Pen"]


class Pen:
    """Posts requests to the writer; outcomes come back to the loop in as few calls as they came in groups."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._finished: deque[tuple[asyncio.Future[Outcome], Outcome]] = deque()
        self._called = False

    def post(self, request: Request) -> asyncio.Future[Outcome]:
        """Begin to carry a request out; its outcome is durable. A full queue is an outcome too: `LedgerBusy`."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        try:
            self._writer.post(request, partial(self._done, future))
        except OdographError as error:
            future.set_result(error)
        return future

    async def write(self, request: Request) -> Outcome:
        """Carry a request out durably and return its outcome."""
        return await self.post(request)

    async def write_all(self, requests: Sequence[Request]) -> list[Outcome]:
        """Carry independent requests out durably, and return their outcomes in order."""
        futures = [self.post(request) for request in requests]
        return [await future for future in futures]

    def _done(self, future: asyncio.Future[Outcome], outcome: Outcome) -> None:
        # On the writer's thread. The loop clears the mark before it empties the queue, so nothing is left behind.
        self._finished.append((future, outcome))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._called = False
        while self._finished:
            future, outcome = self._finished.popleft()
            if not future.done():  # whoever asked may have gone away; what was written stays written
                future.set_result(outcome)
