"""The writer process of a worker: it carries the worker's commands out, so that neither waits for the other's GIL.

A batch of commands is priced where needed, carried out as one durable group, and answered as one batch. The process
ends when its worker does, after what it has begun; what was not answered can be asked for again with its key.

    python -m odograph.service.writer_process FILE_DESCRIPTOR
"""

from __future__ import annotations

import pickle
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import IO, Final, TypeAlias

import msgspec

from odograph.connection import store_at
from odograph.errors import OdographError, OutcomeUnknown
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Ask, Author, Charge, Command, Made, Outcome, Refused
from odograph.ledger.engine import carry_out
from odograph.ledger.stores.base import RowLocked, Store
from odograph.service import logs
from odograph.service.schemas import QUICK, CostForm, costs_of
from odograph.service.settings import Settings, tune_garbage_collector
from odograph.service.visibility import new_receipt_form

__all__ = [
    "LENGTH",
    "LOCKED",
    "NOTED",
    "PROBE",
    "READY",
    "REFUSED",
    "SETTLED",
    "Answer",
    "Answers",
    "ChargeMessage",
    "ChargeRequest",
    "Message",
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
]

LENGTH: Final = struct.Struct("!I")
READY: Final = LENGTH.pack(0)
PROBE: Final = msgspec.Raw(msgspec.msgpack.encode("probe"))  # have something written that changes nothing
_MAX_REMEMBERED: Final = 4096  # costs
_MAX_REMEMBERED_LENGTH: Final = 512  # bytes of costs that are remembered
_MAX_QUICK_ACCOUNTS: Final = 8  # a batch of charges for a hundred accounts each would take seconds

Message: TypeAlias = msgspec.Raw  # a command, encoded
# The JSON of a receipt; or another outcome, pickled, and what has to be done about it.
Answer: TypeAlias = bytes | tuple[bytes, str]
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


class Answers(msgspec.Struct, array_like=True):
    """The answers to a batch, in its order, and how many seconds it took."""

    seconds: float
    answers: list[Answer]


_ENCODER: Final = msgspec.msgpack.Encoder()
_JSON_ENCODER: Final = msgspec.json.Encoder()
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


def decode_outcome(answer: tuple[bytes, str]) -> Outcome:
    """Decode an outcome. It may hold a refusal with all of its meters, so this is not for the event loop."""
    outcome: Outcome = pickle.loads(answer[0])  # noqa: S301  from our own process
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
    decoded = [_decode(prices, message) for message in messages if message != PROBE]
    outcomes = iter(_write(prices.store, [one for one, _ in decoded if not isinstance(one, OdographError)]))
    answers = iter(
        [_answer(one if isinstance(one, OdographError) else next(outcomes), asks) for one, asks in decoded]
    )
    probed = _probe(prices.store) if len(decoded) < len(messages) else b""
    return Answers(perf_counter() - started, [probed if one == PROBE else next(answers) for one in messages])


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
    """Return the JSON of the receipt of a charge that was priced here, if nothing must be read for it.

    Everything else is answered with the pickled outcome.
    """
    if isinstance(outcome, Made) and outcome.before is not None:
        return pickle.dumps(outcome), NOTED
    if asks and isinstance(outcome, Made) and not outcome.linked:
        return _JSON_ENCODER.encode(new_receipt_form(outcome.own, asks))
    if isinstance(outcome, Refused):
        return pickle.dumps(outcome), REFUSED
    return pickle.dumps(outcome), LOCKED if isinstance(outcome, RowLocked) else SETTLED


def _probe(store: Store) -> Answer:
    """Test whether a charge could be written now: empty if so, else the error that it would have raised."""
    try:
        store.probe()
    except OdographError as error:
        return pickle.dumps(error), SETTLED
    except Exception as error:  # noqa: BLE001  as for a charge
        logs.failure(error)
        return pickle.dumps(OdographError("an unexpected error occurred while this was tried")), SETTLED
    return b""


if __name__ == "__main__":
    main()
