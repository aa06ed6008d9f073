"""The engine of a service, in another process: `WriterClient`, and the writer process that it sends commands to.

A worker's commands are carried out by a process of its own, so that neither waits for the other's GIL. Commands that
arrive together are sent together: a batch is priced where needed, carried out as one durable group, and answered as
one batch. The event loop never waits for the ledger.

A writer process may die: a command that it had not answered has an unknown outcome and can be asked for again with
its key, and the next process is started. Commands that had not been sent yet wait for that one. The process ends when
its worker does, after what it has begun.

    python -m odograph.service.writer FILE_DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import IO, Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from odograph.connection import store_at
from odograph.errors import LedgerBusy, LedgerCorrupt, OdographError, OutcomeUnknown
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Ask, Author, Charge, Command, Made, Outcome, Refused, Result
from odograph.ledger.engine import FIRST_RETRY_DELAY, LONGEST_RETRY_DELAY, FairQueue, carry_out, result_of
from odograph.ledger.stores.base import RowLocked, Store
from odograph.service import logs
from odograph.service.schemas import QUICK, CostForm, costs_of
from odograph.service.settings import Settings, tune_garbage_collector

__all__ = [
    "LENGTH",
    "LOCKED",
    "NOTED",
    "PROBE",
    "PROGRAM",
    "READY",
    "REFUSED",
    "SETTLED",
    "Answer",
    "Answers",
    "ChargeMessage",
    "ChargeRequest",
    "Charged",
    "Message",
    "Pickled",
    "RetryingEngine",
    "Start",
    "Wait",
    "WriterClient",
    "decode_answers",
    "decode_costs",
    "decode_message",
    "decode_messages",
    "decode_outcome",
    "encode_batch",
    "encode_command",
    "encode_quick_charge",
    "main",
    "serve_worker",
    "start_process",
]

LENGTH: Final = struct.Struct("!I")
READY: Final = LENGTH.pack(0)
PROBE: Final = msgspec.Raw(msgspec.msgpack.encode("probe"))  # have something written that changes nothing
_MAX_REMEMBERED: Final = 4096  # costs
_MAX_REMEMBERED_LENGTH: Final = 512  # bytes of costs that are remembered
_MAX_QUICK_ACCOUNTS: Final = 8  # a batch of charges for a hundred accounts each would take seconds

Message: TypeAlias = msgspec.Raw  # a command, encoded
LOCKED: Final = "locked"  # send the command again: another client of the database holds its account
NOTED: Final = "noted"  # say what the charge changes for later requests
REFUSED: Final = "refused"  # search for a smaller request that would be admitted
SETTLED: Final = "settled"  # nothing


class ChargeRequest(msgspec.Struct, array_like=True):
    """A charge as it was asked for, without prices."""

    author: Author
    verb: str
    costs: Mapping[str, CostForm]
    expires: int | None


class ChargeMessage(msgspec.Struct, array_like=True):
    """A charge as the writer reads it: costs that came before, byte for byte, need not be decoded again."""

    author: Author
    verb: str
    costs: msgspec.Raw
    expires: int | None


class Charged(msgspec.Struct, array_like=True, tag=0):
    """What the receipt of a charge says and its request does not. The worker, which has more time, encodes it."""

    time: int
    entries: list[tuple[str, int, str, str]]  # account, sequence, cost as JSON, seal
    expires: int | None
    uncertified: list[str]


class Pickled(msgspec.Struct, array_like=True, tag=1):
    """Any other outcome of a command, and what has to be done about it."""

    outcome: bytes
    follow_up: str


Answer: TypeAlias = Charged | Pickled | bytes  # bytes, and empty, for a probe that was written


class Answers(msgspec.Struct, array_like=True):
    """The answers to a batch, in its order, and how many seconds it took."""

    seconds: float
    answers: list[Answer]


_ENCODER: Final = msgspec.msgpack.Encoder()
encode_batch: Final = _ENCODER.encode
decode_messages: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
decode_message: Final = msgspec.msgpack.Decoder(ChargeMessage | bytes).decode
decode_costs: Final = msgspec.msgpack.Decoder(dict[str, CostForm]).decode
decode_answers: Final = msgspec.msgpack.Decoder(Answers).decode


def encode_quick_charge(request: ChargeRequest) -> Message | None:
    """Encode a charge that the writer prices; None if that could take long, or MessagePack cannot hold a number."""
    if len(request.costs) > _MAX_QUICK_ACCOUNTS:
        return None
    for cost in request.costs.values():
        if not isinstance(cost, QUICK):
            return None
    try:
        return msgspec.Raw(_ENCODER.encode(request))
    except (OverflowError, ValueError):  # such as a number of 70 bits
        return None


def encode_command(command: Command) -> Message:
    """Encode any command."""
    return msgspec.Raw(_ENCODER.encode(pickle.dumps(command)))


def decode_outcome(answer: Pickled) -> Outcome:
    """Decode an outcome. It may hold a refusal with all of its meters, so this is not for the event loop."""
    outcome: Outcome = pickle.loads(answer.outcome)  # noqa: S301  from our own process
    return outcome


def main() -> None:
    """Serve the worker at the other end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for the worker: this process ends when the worker has
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.from_environment()
    logs.configure(settings.log_level)
    store = store_at(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
    tune_garbage_collector()
    serve_worker(socket.socket(fileno=int(sys.argv[1])), store)


def serve_worker(worker: socket.socket, store: Store) -> None:
    """Carry out batches until the worker closes the socket."""
    prices = _Prices(LocalBackend(store, "writer"))  # commands carry the identities of their own principals
    with worker, worker.makefile("rb") as batches:
        try:
            worker.sendall(READY)
            while (batch := _read_batch(batches)) is not None:
                content = encode_batch(_carry_out_batch(prices, decode_messages(batch)))
                worker.sendall(LENGTH.pack(len(content)) + content)
        except OSError:  # the worker has ended
            return
        finally:
            store.close()


def _read_batch(batches: IO[bytes]) -> bytes | None:
    """Read a batch; None if the worker has ended, perhaps in the middle of one."""
    head = batches.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    batch = batches.read(size)
    return batch if len(batch) == size else None


class _Prices:
    """The prices of costs that came before, by their bytes: an account's prices never change."""

    def __init__(self, backend: LocalBackend) -> None:
        self.store = backend.store
        self._backend = backend
        self._known: dict[bytes, tuple[Ask, ...]] = {}

    def price(self, costs: bytes) -> tuple[Ask, ...]:
        """Return what is asked of each account, priced."""
        asks = self._known.get(costs)
        if asks is None:
            asks = self._backend.price(costs_of(decode_costs(costs)))
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            if len(costs) <= _MAX_REMEMBERED_LENGTH:
                self._known[costs] = asks
        return asks


def _carry_out_batch(prices: _Prices, messages: Sequence[Message]) -> Answers:
    """Carry a batch out; a message that cannot be read, or an error of one command, concerns no other."""
    started = perf_counter()
    probed = PROBE in messages
    commands = [one for one in messages if one != PROBE] if probed else messages
    decoded = [_decode(prices, one) for one in commands]
    outcomes = iter(_write(prices.store, [one for one, _ in decoded if not isinstance(one, OdographError)]))
    answers = [_answer(one if isinstance(one, OdographError) else next(outcomes), asks) for one, asks in decoded]
    if probed:
        others, probe = iter(answers), _probe(prices.store)
        answers = [probe if one == PROBE else next(others) for one in messages]
    return Answers(perf_counter() - started, answers)


def _decode(prices: _Prices, message: Message) -> tuple[Command | OdographError, tuple[Ask, ...]]:
    """Return the command of a message, or the error that is its outcome; and what a charge was priced to here."""
    try:
        read = decode_message(message)
        if isinstance(read, bytes):
            command: Command = pickle.loads(read)  # noqa: S301  from our own worker
            return command, ()
        asks = prices.price(bytes(read.costs))
        return Charge(read.author, read.verb, asks, read.expires), asks
    except OdographError as error:
        return error, ()
    except Exception as error:  # noqa: BLE001  it must not end the other commands
        logs.failure(error)
        return OdographError("an unexpected error occurred while this was priced"), ()


def _write(store: Store, commands: Sequence[Command]) -> Sequence[Outcome]:
    """Write a group; what is raised for all of it is the outcome of each."""
    try:
        return carry_out(store, commands) if commands else ()
    except OdographError as error:
        return [error] * len(commands)
    except Exception as error:  # noqa: BLE001  it may have been written
        logs.failure(error)
        unknown = OutcomeUnknown("an unexpected error occurred while this was written; ask again with the same key")
        return [unknown] * len(commands)


def _answer(outcome: Outcome, asks: tuple[Ask, ...]) -> Answer:
    """Return what the receipt of a charge says, if it was priced here and nothing must be read for its receipt.

    Everything else is answered with the pickled outcome.
    """
    if isinstance(outcome, Made) and outcome.before is not None:
        return Pickled(pickle.dumps(outcome), NOTED)
    if asks and isinstance(outcome, Made) and not outcome.linked:
        first = outcome.own[0]
        entries = [(one.account, one.sequence, one.cost, one.seal) for one in outcome.own]
        uncertified = [ask.asked[0] for ask in asks if not ask.certified]
        # This runs for every charge, and few have a detail.
        return Charged(first.time, entries, first.expires if first.detail else None, uncertified)
    if isinstance(outcome, Refused):
        return Pickled(pickle.dumps(outcome), REFUSED)
    return Pickled(pickle.dumps(outcome), LOCKED if isinstance(outcome, RowLocked) else SETTLED)


def _probe(store: Store) -> Answer:
    """Test whether a charge could be written now: empty if so, else the error that it would have raised."""
    try:
        store.probe()
    except OdographError as error:
        return Pickled(pickle.dumps(error), SETTLED)
    except Exception as error:  # noqa: BLE001  as for a charge
        logs.failure(error)
        return Pickled(pickle.dumps(OdographError("an unexpected error occurred while this was tried")), SETTLED)
    return b""


_CAPACITY: Final = 16_384  # commands that may be queued
_BATCHES_AHEAD: Final = 2  # while one is written, the next is on its way
_START_TIMEOUT: Final = 60.0  # seconds until a process that is not ready has failed
_ANSWER_MARGIN: Final = 5.0  # seconds for a command beyond those for which the process waits for the ledger
_CHECK_INTERVAL: Final = 0.25  # seconds between two checks of deadlines
_RESTART_DELAY: Final = 1.0  # seconds between two attempts to start a process
_SHUTDOWN_TIMEOUT: Final = 20.0  # seconds after which a process that should have ended is killed
# The working folder must not be imported from.
PROGRAM: Final[tuple[str, ...]] = (sys.executable, "-P", "-m", "odograph.service.writer")

Wait: TypeAlias = Callable[[], Awaitable[object]]
# Starts a process at its end of a socket, and returns how to wait until it has ended, once the other end is closed.
Start: TypeAlias = Callable[[Settings, socket.socket], Awaitable[Wait]]
# Called after every batch with its seconds and the number of commands in it.
Observer: TypeAlias = Callable[[float, int], None]
# Called now and then with the number of commands that have no answer.
DepthObserver: TypeAlias = Callable[[int], None]


_Write: TypeAlias = Callable[[str, Sequence[Message]], Coroutine[Any, Any, list[Answer | OdographError]]]


async def start_process(settings: Settings, its_end: socket.socket) -> Wait:
    """Start a writer process; it ends when the other end of its socket is closed."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        str(its_end.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[its_end.fileno()],
        env=os.environ | settings.environment,
        start_new_session=True,
    )

    async def wait() -> None:
        try:
            # Not `asyncio.timeout`: before Python 3.11.4 it raises no TimeoutError in a task that is being cancelled.
            await asyncio.wait_for(process.wait(), _SHUTDOWN_TIMEOUT)
        except TimeoutError:
            # It is stopped, or waits for something that does not answer; a charge is written whole or not at all.
            process.kill()
            await process.wait()

    return wait


class _Request:
    """The commands of one call and the answers so far; after its deadline no more are accepted."""

    __slots__ = ("answers", "deadline", "done", "unanswered")

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, deadline: float) -> None:
        self.done: asyncio.Future[None] = loop.create_future()
        self.answers: list[Answer | OdographError | None] = [None] * count
        self.unanswered = count
        self.deadline = deadline

    def answer(self, number: int, answer: Answer | OdographError) -> None:
        if self.answers[number] is not None:  # the deadline has passed
            return
        self.answers[number] = answer
        self.unanswered -= 1
        if not self.unanswered and not self.done.done():  # the caller may have gone; what was written stays written
            self.done.set_result(None)


class _Pending(NamedTuple):
    """One command without an answer."""

    request: _Request
    number: int  # in its request
    message: Message
    client: str


class _Batch(NamedTuple):
    """Commands that were sent together, and when, or since when no other batch is in front of them."""

    since: float
    pending: list[_Pending]


class WriterClient:
    """One per worker, made in its event loop."""

    def __init__(
        self, settings: Settings, observer: Observer, depth_observer: DepthObserver, start: Start = start_process
    ) -> None:
        self._settings = settings
        self._observer = observer
        self._depth_observer = depth_observer
        self._start = start
        self.on_restart: Callable[[], None] = lambda: None  # called when a process has ended or did not start
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[_Pending] = FairQueue(_CAPACITY)
        self._sent: deque[_Batch] = deque()  # without an answer
        self._send_scheduled = False
        self._retrying = 0  # commands that wait for an account that another client of the database holds
        self._time_limit = settings.timeout + _ANSWER_MARGIN
        self._requests: deque[_Request] = deque()  # in the order of their deadlines
        self._timer: asyncio.TimerHandle | None = None
        self._connection: _Connection | None = None
        self._supervisor = self._loop.create_task(self._supervise())

    @property
    def ready(self) -> bool:
        """Whether there is a process; `probe` tests whether it writes."""
        return self._connection is not None

    @property
    def unanswered(self) -> int:
        """How many commands have no answer, sent or not."""
        return len(self._queue) + self._retrying + sum(len(batch.pending) for batch in self._sent)

    def submit(self, command: Command) -> Result:
        """Carry a command out durably, for a thread, which waits; raises as the engine does.

        Raises `RowLocked` at once if another client holds the account, so that the wait need not take the thread.
        """
        return self._submit(command, self._write)

    def submit_with_retries(self, command: Command) -> Result:
        """Do the same for a thread that may wait until another client has released the account."""
        return self._submit(command, self.write)

    def _submit(self, command: Command, write: _Write) -> Result:
        writing = write(command.author.principal, (encode_command(command),))
        (answer,) = asyncio.run_coroutine_threadsafe(writing, self._loop).result()
        return result_of(_outcome_of(answer), command.author.key)

    async def probe(self) -> None:
        """Have something written that changes nothing, after all that is queued; or raise why it could not."""
        (answer,) = await self.write("", (PROBE,))
        if answer == b"":
            return
        outcome = _outcome_of(answer)
        raise outcome if isinstance(outcome, OdographError) else LedgerCorrupt("a probe has charged something")

    async def write(self, client: str, messages: Sequence[Message]) -> list[Answer | OdographError]:
        """Carry independent commands of a client out durably; return the answer to each, or an error.

        A command without an answer before its deadline has an error: if it was not sent to the process, nothing was
        charged; else the outcome is unknown.
        """
        deadline = self._loop.time() + self._settings.timeout
        answers = await self._write(client, messages)
        delay = FIRST_RETRY_DELAY
        # Those whose account another client of the database holds are sent again; no others wait for them.
        while held := [i for i, one in enumerate(answers) if isinstance(one, Pickled) and one.follow_up == LOCKED]:
            left = deadline - self._loop.time()
            if left <= 0:
                for number in held:
                    answers[number] = LedgerBusy(str(_outcome_of(answers[number])))
                break
            self._retrying += len(held)
            try:
                await asyncio.sleep(min(left, max(delay, FIRST_RETRY_DELAY * self._retrying)))
            finally:
                self._retrying -= len(held)
            delay = min(2 * delay, LONGEST_RETRY_DELAY)
            again = await self._write(client, [messages[number] for number in held])
            for number, one in zip(held, again, strict=True):
                answers[number] = one
        return answers

    async def _write(self, client: str, messages: Sequence[Message]) -> list[Answer | OdographError]:
        if not messages:
            return []
        request = _Request(self._loop, len(messages), self._loop.time() + self._time_limit)
        self._requests.append(request)
        if self._timer is None:
            self._timer = self._loop.call_later(_CHECK_INTERVAL, self._check_deadlines)
        for number, message in enumerate(messages):
            try:
                self._queue.add(client, _Pending(request, number, message, client))
            except LedgerBusy as busy:
                request.answer(number, busy)
        if not self._send_scheduled:
            self._send_scheduled = True
            self._loop.call_soon(self._send)  # when the loop has read all that has arrived
        await request.done
        return cast("list[Answer | OdographError]", request.answers)

    def receive(self, content: bytes) -> None:
        """Hand out the answers to the first batch that has none."""
        found = decode_answers(content)
        batch = self._sent.popleft().pending
        if self._sent:
            self._sent[0] = self._sent[0]._replace(since=self._loop.time())  # the process begins it now
        for (request, number, *_), answer in zip(batch, found.answers, strict=True):
            request.answer(number, answer)
        self._observer(found.seconds, len(batch))
        self._send()

    async def close(self) -> None:
        """End the process after what it has begun. No more commands come."""
        if self._timer is not None:
            self._timer.cancel()
        self._supervisor.cancel()
        with suppress(asyncio.CancelledError):
            await self._supervisor

    def _send(self) -> None:
        self._send_scheduled = False
        while self._connection is not None and self._queue.clients and len(self._sent) < _BATCHES_AHEAD:
            batch: list[_Pending] = []
            self._queue.take(batch)
            self._sent.append(_Batch(self._loop.time(), batch))
            self._connection.send(encode_batch([pending.message for pending in batch]))

    def _check_deadlines(self) -> None:
        """Answer the requests whose deadline has passed, and give up a process that has not answered for long."""
        now, expired = self._loop.time(), False
        requests = self._requests
        while requests and (not requests[0].unanswered or requests[0].deadline <= now):
            if requests[0].unanswered:
                self._expire(requests[0])
                expired = True
            requests.popleft()
        if expired:
            self._drop_expired()
        self._depth_observer(self.unanswered)
        # A batch may take as long as its commands may wait, twice: it may have been sent while another was written.
        if self._connection is not None and self._sent and self._sent[0].since + 2 * self._time_limit <= now:
            self._connection.give_up()
        active = requests or self._sent
        self._timer = self._loop.call_later(_CHECK_INTERVAL, self._check_deadlines) if active else None

    def _expire(self, request: _Request) -> None:
        sent = {one.number for batch in self._sent for one in batch.pending if one.request is request}
        for number, answer in enumerate(request.answers):
            if answer is None and number in sent:
                unknown = "the writer process does not answer; ask again with the same key to know the outcome"
                request.answer(number, OutcomeUnknown(unknown))
            elif answer is None:
                request.answer(number, LedgerBusy("the writer process did not reach this in time; try again"))

    def _drop_expired(self) -> None:
        """Remove from the queue what was answered that nothing is charged for it."""
        queued: list[_Pending] = []
        self._queue.take(queued, len(self._queue))
        for pending in queued:
            if pending.request.unanswered:
                self._queue.add(pending.client, pending)

    async def _supervise(self) -> None:
        """Keep a process running: start one, and the next when that has ended."""
        while True:
            try:
                connection, wait = await self._connect()
            except OSError as problem:
                logs.failure(problem)
                self.on_restart()
                self._refuse_queued()
                await asyncio.sleep(_RESTART_DELAY)
                continue
            self._connection = connection
            try:
                self._send()
                await connection.lost
                logs.failure(ConnectionError("the writer process has ended"))
                self.on_restart()
            finally:
                self._connection = None
                connection.close()
                self._answer_unknown()
                await wait()

    async def _connect(self) -> tuple[_Connection, Wait]:
        """Start a process and wait until it is ready, or raise `OSError`."""
        ours, its_end = socket.socketpair()
        connection = _Connection(self.receive)
        wait: Wait | None = None
        try:
            with its_end:
                wait = await self._start(self._settings, its_end)
            await self._loop.create_connection(lambda: connection, sock=ours)
            async with asyncio.timeout(_START_TIMEOUT):
                await connection.ready
        except BaseException:
            if not connection.close():
                ours.close()
            if wait is not None:
                await wait()
            raise
        return connection, wait

    def _answer_unknown(self) -> None:
        """Answer what was sent to a process that has ended."""
        sent, self._sent = self._sent, deque()
        for request, number, *_ in chain.from_iterable(batch.pending for batch in sent):
            unknown = "the writer process has ended; ask again with the same key to know the outcome"
            request.answer(number, OutcomeUnknown(unknown))

    def _refuse_queued(self) -> None:
        """Answer what is queued when no process can be started."""
        queued: list[_Pending] = []
        self._queue.take(queued, len(self._queue))
        for request, number, *_ in queued:
            request.answer(number, LedgerBusy("no writer process could be started; try again"))


class RetryingEngine(NamedTuple):
    """The writer process as the engine of a thread that may wait: what it commits took long to compute."""

    writer: WriterClient

    def submit(self, command: Command) -> Result:
        """Carry a command out durably; wait while another client of the database holds the account."""
        return self.writer.submit_with_retries(command)


def _outcome_of(answer: Answer | OdographError) -> Outcome:
    """Return the outcome of a command that was sent pickled, or the error of one that was not answered."""
    if isinstance(answer, OdographError):
        return answer
    if not isinstance(answer, Pickled):
        raise LedgerCorrupt("the writer process answered with a receipt where an outcome was expected")
    return decode_outcome(answer)


class _Connection(asyncio.Protocol):
    """The worker's end of the socket; every batch after the first is passed to `receive`."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._receive = receive
        self._received = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  it has ended, with or without an error
        if not self.ready.done():
            self.ready.set_exception(ConnectionError("the writer process ended before it was ready"))
        if not self.lost.done():
            self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(received)
            end = LENGTH.size + size
            if len(received) < end:
                return
            content = bytes(received[LENGTH.size : end])
            del received[:end]
            if self.ready.done():
                self._receive(content)
            else:
                self.ready.set_result(None)

    def send(self, content: bytes) -> None:
        """Send a batch."""
        if self._transport is not None:
            self._transport.write(LENGTH.pack(len(content)) + content)

    def give_up(self) -> None:
        """Treat the process as lost: it is ended, and another is started."""
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> bool:
        """Close the socket; return whether this object had it."""
        if self._transport is None:
            return False
        self._transport.close()
        return True


if __name__ == "__main__":
    main()
