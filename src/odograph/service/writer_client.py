"""The client of the writer process: charges that arrive together are sent together, and the event loop never waits.

The scribe is a process, and a process may die: what it had not answered is answered as unknown, with the advice to
ask again under the same key, and the next scribe is started. What had not been sent yet waits for that one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final, NamedTuple, TypeAlias, cast

import msgspec

from odograph.errors import LedgerBusy, LedgerCorrupt, OdographError, OutcomeUnknown
from odograph.ledger.engine import FIRST_PAUSE, LONGEST_PAUSE
from odograph.ledger.fair_queue import FairQueue
from odograph.service import logs
from odograph.service.settings import Settings
from odograph.service.writer_protocol import HEAD, PROBE, Answer, Packed, answers_in, framed, outcome_in

__all__ = ["PROGRAM", "Ended", "Start", "WriterClient", "start_process"]

_PLACES: Final = 16_384  # for orders that wait
_AHEAD: Final = 2  # frames: while one is written, the next is on its way
_PATIENCE: Final = 60.0  # seconds until a scribe that does not begin has failed
_MARGIN: Final = 5.0  # seconds for an order beyond those for which the scribe itself waits for the ledger
_OFTEN: Final = 0.25  # seconds between two looks at whose time is over
_PAUSE: Final = 1.0  # seconds between two tries to start one
_GRACE: Final = 20.0  # seconds in which a scribe that is not needed any more has ended, or is ended
# The working folder is no place to import from.
PROGRAM: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "odograph.service.writer_process")

Ended: TypeAlias = Callable[[], Awaitable[object]]
# Starts a scribe at its end of a socket, and returns how to wait until it has ended, once the other end is closed.
Start: TypeAlias = Callable[[Settings, socket.socket], Awaitable[Ended]]
# Told of every frame: how long it took, how many charges were in it, and how many orders have no answer; and now and
# then of the last alone.
Watch: TypeAlias = Callable[[float, int, int], None]


async def start_process(settings: Settings, its_end: socket.socket) -> Ended:
    """Start a scribe as a process; it ends when the other end of its socket is closed."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        str(its_end.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[its_end.fileno()],
        env=os.environ | settings.environment,
        start_new_session=True,
    )

    async def ended() -> None:
        try:
            # Not `asyncio.timeout`: before Python 3.11.4 it raises no TimeoutError in a task that is being cancelled.
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            # It is stopped, or waits for what does not answer; a charge is written whole or not at all.
            process.kill()
            await process.wait()

    return ended


class _Asked:
    """Orders of one request, and the answers that have come; none come after its time is over."""

    __slots__ = ("answers", "due", "future", "left")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, due: float) -> None:
        self.future: asyncio.Future[None] = loop.create_future()
        self.answers: list[Answer | OdographError | None] = [None] * count
        self.left = count
        self.due = due

    def answer(self, number: int, answer: Answer | OdographError) -> None:
        if self.answers[number] is not None:  # its time was over
            return
        self.answers[number] = answer
        self.left -= 1
        if not self.left and not self.future.done():  # whoever asked may have gone; what was written stays written
            self.future.set_result(None)


class _Ticket(NamedTuple):
    """One order that waits for its answer."""

    asked: _Asked
    number: int
    order: msgspec.Raw
    client: str


class _Frame(NamedTuple):
    """Orders that were sent together, and when; or since when no others are in front of them."""

    at: float
    tickets: list[_Ticket]


class WriterClient:
    """One per worker, made in its event loop."""

    def __init__(self, settings: Settings, watch: Watch, start: Start = start_process) -> None:
        self._settings = settings
        self._watch = watch
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[_Ticket] = FairQueue(_PLACES)
        self._sent: deque[_Frame] = deque()  # without an answer
        self._called = False
        self._held_up = 0  # orders that wait for what another client of the database holds
        self._time = settings.timeout + _MARGIN
        self._asked: deque[_Asked] = deque()  # in the order in which their time is over
        self._look: asyncio.TimerHandle | None = None
        self._link: _Link | None = None
        self._keeper = self._loop.create_task(self._keep())

    @property
    def ready(self) -> bool:
        """Whether there is a scribe; whether it writes, `probe` asks."""
        return self._link is not None

    @property
    def waiting(self) -> int:
        """How many orders have no answer, sent or not."""
        return len(self._queue) + self._held_up + sum(len(frame.tickets) for frame in self._sent)

    async def probe(self) -> None:
        """Have the scribe write something that changes nothing, after all that waits; or raise why it could not."""
        (answer,) = await self.write((Packed("", PROBE),))
        if isinstance(answer, OdographError):
            raise answer
        if not isinstance(answer, bytes):
            outcome = outcome_in(answer)
            raise outcome if isinstance(outcome, OdographError) else LedgerCorrupt("a probe has charged something")

    async def write(self, orders: Sequence[Packed]) -> list[Answer | OdographError]:
        """Carry independent orders out durably: a receipt as it is sent to the caller, or what else became of it.

        An order that has no answer in time is answered by an error: if it was not sent to the scribe, nothing was
        charged; else that is not known.
        """
        if not orders:
            return []
        deadline = self._loop.time() + self._settings.timeout
        answers = await self._write(orders)
        pause = FIRST_PAUSE
        # Those whose account another client holds are sent again, and no others wait for them.
        while held := [number for number, one in enumerate(answers) if isinstance(one, tuple) and one[1]]:
            left = deadline - self._loop.time()
            if left <= 0:
                break
            self._held_up += len(held)
            try:
                await asyncio.sleep(min(left, max(pause, FIRST_PAUSE * self._held_up)))
            finally:
                self._held_up -= len(held)
            pause = min(2 * pause, LONGEST_PAUSE)
            for number, one in zip(held, await self._write([orders[number] for number in held]), strict=True):
                answers[number] = one
        return answers

    async def _write(self, orders: Sequence[Packed]) -> list[Answer | OdographError]:
        asked = _Asked(self._loop, len(orders), self._loop.time() + self._time)
        self._asked.append(asked)
        if self._look is None:
            self._look = self._loop.call_later(_OFTEN, self._look_at_time)
        for number, (client, order) in enumerate(orders):
            try:
                self._queue.add(client, _Ticket(asked, number, order, client))
            except LedgerBusy as busy:
                asked.answer(number, busy)
        if not self._called:
            self._called = True
            self._loop.call_soon(self._send)  # when the loop has read all that is there
        await asked.future
        return cast("list[Answer | OdographError]", asked.answers)

    def take_in(self, frame: bytes) -> None:
        """Hand out the answers to the first frame that has none."""
        found = answers_in(frame)
        group = self._sent.popleft().tickets
        if self._sent:
            self._sent[0] = self._sent[0]._replace(at=self._loop.time())  # it is begun now
        for (asked, number, *_), answer in zip(group, found.answers, strict=True):
            asked.answer(number, answer)
        self._watch(found.seconds, sum(ticket.order is not PROBE for ticket in group), self.waiting)
        self._send()

    async def close(self) -> None:
        """End the scribe after what it has begun. Nobody asks any more."""
        if self._look is not None:
            self._look.cancel()
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper

    def _send(self) -> None:
        self._called = False
        while self._link is not None and self._queue and len(self._sent) < _AHEAD:
            group: list[_Ticket] = []
            self._queue.take(group)
            self._sent.append(_Frame(self._loop.time(), group))
            self._link.send(framed([ticket.order for ticket in group]))

    def _look_at_time(self) -> None:
        """Answer those whose time is over, and give up a scribe that has not answered a frame for twice as long."""
        now, over = self._loop.time(), False
        asked = self._asked
        while asked and (not asked[0].left or asked[0].due <= now):
            if asked[0].left:
                self._give_up(asked[0])
                over = True
            asked.popleft()
        if over:
            self._forget_answered()
        self._watch(0.0, 0, self.waiting)
        if self._link is not None and self._sent and self._sent[0].at + 2 * self._time <= now:
            self._link.give_up()
        self._look = self._loop.call_later(_OFTEN, self._look_at_time) if asked or self._sent else None

    def _give_up(self, asked: _Asked) -> None:
        sent = {ticket.number for frame in self._sent for ticket in frame.tickets if ticket.asked is asked}
        for number, answer in enumerate(asked.answers):
            if answer is None and number in sent:
                unknown = "the process that writes does not answer; ask again with the same key to know the outcome"
                asked.answer(number, OutcomeUnknown(unknown))
            elif answer is None:
                busy = "the process that writes has not come to this in time; nothing was charged. Try again"
                asked.answer(number, LedgerBusy(busy))

    def _forget_answered(self) -> None:
        """Take those out of the queue that were given up: they were answered that nothing is charged for them."""
        waiting: list[_Ticket] = []
        self._queue.take(waiting, len(self._queue))
        for ticket in waiting:
            if ticket.asked.left:
                self._queue.add(ticket.client, ticket)

    async def _keep(self) -> None:
        """Keep a scribe at work: start one, and the next when that has ended."""
        while True:
            try:
                link, ended = await self._begin()
            except OSError as problem:
                logs.failure(problem)
                self._turn_away()
                await asyncio.sleep(_PAUSE)
                continue
            self._link = link
            try:
                self._send()
                await link.lost
                logs.failure(ConnectionError("the scribe has ended"))
            finally:
                self._link = None
                link.close()
                self._tell_unknown()
                await ended()

    async def _begin(self) -> tuple[_Link, Ended]:
        """Start a scribe and wait until it is ready, or raise `OSError`."""
        ours, its_end = socket.socketpair()
        link = _Link(self.take_in)
        ended: Ended | None = None
        try:
            with its_end:
                ended = await self._start(self._settings, its_end)
            await self._loop.create_connection(lambda: link, sock=ours)
            async with asyncio.timeout(_PATIENCE):
                await link.ready
        except BaseException:
            if not link.close():
                ours.close()
            if ended is not None:
                await ended()
            raise
        return link, ended

    def _tell_unknown(self) -> None:
        """Answer what was sent to a scribe that is gone."""
        sent, self._sent = self._sent, deque()
        for asked, number, *_ in chain.from_iterable(frame.tickets for frame in sent):
            unknown = "the process that was writing has ended; ask again with the same key to know the outcome"
            asked.answer(number, OutcomeUnknown(unknown))

    def _turn_away(self) -> None:
        """Answer those who wait: nobody writes for them."""
        group: list[_Ticket] = []
        self._queue.take(group, len(self._queue))
        for asked, number, *_ in group:
            asked.answer(
                number, LedgerBusy("no process could be started to write this; nothing was charged. Try again")
            )


class _Link(asyncio.Protocol):
    """The worker's end of the socket; every frame after the first goes to `take_in`."""

    def __init__(self, take_in: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._take_in = take_in
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  it is gone, however that was
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("the scribe ended before it was ready"))
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= HEAD.size:
            (size,) = HEAD.unpack_from(received)
            end = HEAD.size + size
            if len(received) < end:
                return
            frame = bytes(received[HEAD.size : end])
            del received[:end]
            if self.ready.done():
                self._take_in(frame)
            else:
                self.ready.set_result(None)

    def send(self, frame: bytes) -> None:
        if self._transport is not None:
            self._transport.write(frame)

    def give_up(self) -> None:
        """Take the scribe for lost: it is ended, and another is started."""
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> bool:
        """Close the socket, and say whether it was this one's to close."""
        if self._transport is None:
            return False
        self._transport.close()
        return True
