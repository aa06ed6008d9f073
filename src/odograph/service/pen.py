"""Pen: an event loop writes through the ledger's group-commit writer, without waiting in the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeAlias

from odograph.errors import OdographError
from odograph.ledger.requests import Outcome, Request
from odograph.ledger.writer import Writer

__all__ = ["Pen"]

_TOGETHER: Final = 64  # of a batch in one transaction at least: more would let others wait for it

Outcomes: TypeAlias = Sequence[Outcome]


class Pen:
    """Posts requests to the writer; outcomes come back to the loop in as few calls as they came in groups."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._gathered: list[tuple[asyncio.Future[Outcomes], Sequence[Request]]] = []
        self._finished: deque[tuple[asyncio.Future[Outcomes], Outcomes]] = deque()
        self._called = False

    async def write(self, request: Request) -> Outcome:
        """Carry a request out durably and return its outcome."""
        return (await self._post((request,)))[0]

    async def write_all(self, requests: Sequence[Request]) -> list[Outcome]:
        """Carry independent requests of one principal out durably, and return their outcomes in order."""
        starts = range(0, len(requests), _TOGETHER)
        futures = [self._post(requests[start : start + _TOGETHER]) for start in starts]
        return [outcome for future in futures for outcome in await future]

    def _post(self, requests: Sequence[Request]) -> asyncio.Future[Outcomes]:
        """Gather requests until the loop has read all that is there: they are written together then."""
        future: asyncio.Future[Outcomes] = self._loop.create_future()
        if not self._gathered:
            self._loop.call_soon(self._hand_over)
        self._gathered.append((future, requests))
        return future

    def _hand_over(self) -> None:
        """Post what was gathered. A full queue is an outcome too: `LedgerBusy`."""
        gathered, self._gathered = self._gathered, []
        for future, requests in gathered:
            try:
                self._writer.post(requests, partial(self._done, future))
            except OdographError as error:
                future.set_result([error] * len(requests))

    def _done(self, future: asyncio.Future[Outcomes], outcomes: Outcomes) -> None:
        # On the writer's thread. The loop clears the mark before it empties the queue, so nothing is left behind.
        self._finished.append((future, outcomes))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._called = False
        while self._finished:
            future, outcomes = self._finished.popleft()
            if not future.done():  # whoever asked may have gone away; what was written stays written
                future.set_result(outcomes)
