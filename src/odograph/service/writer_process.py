"""Scribe: the process beside a worker that writes its charges, so that neither waits for the other's interpreter.

A frame of orders is priced, carried out as one durable group, and answered as one frame. It ends when the worker
does, after what it has begun; what was not answered can be asked for again under its key.

    python -m odograph.service.writer_process FILE_DESCRIPTOR
"""

from __future__ import annotations

import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import IO, Final

import msgspec

from odograph.connect import store_at
from odograph.errors import OdographError, OutcomeUnknown
from odograph.ledger.commands import Ask, Charge, Made, Outcome
from odograph.ledger.engine import carry_out
from odograph.ledger.local_backend import LocalBackend
from odograph.ledger.stores.base import RowLocked, Store
from odograph.service import logs
from odograph.service.request_schemas import costs_of
from odograph.service.settings import Settings, tune_garbage_collector
from odograph.service.visibility import new_receipt_form
from odograph.service.writer_protocol import (
    HEAD,
    PROBE,
    READY,
    Answer,
    Answers,
    costs_in,
    framed,
    order_in,
    orders_in,
)

__all__ = ["main", "write_for"]

_ENCODER: Final = msgspec.json.Encoder()
_REMEMBERED: Final = 4096  # costs
_SHORT: Final = 512  # bytes of costs that are remembered


def main() -> None:
    """Write for the worker at the other end of the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the worker's business: it ends when that has
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.from_environment()
    logs.configure(settings.log_level)
    store = store_at(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
    tune_garbage_collector()
    write_for(socket.socket(fileno=int(sys.argv[1])), store)


def write_for(worker: socket.socket, store: Store) -> None:
    """Carry out what comes until nothing comes any more."""
    prices = _Prices(LocalBackend(store, "scribe"))  # it writes under the identities that the orders have
    with worker, worker.makefile("rb") as orders:
        try:
            worker.sendall(READY)
            while (frame := _frame(orders)) is not None:
                worker.sendall(framed(_carried_out(prices, orders_in(frame))))
        except OSError:  # the worker is gone
            return
        finally:
            store.close()


def _frame(orders: IO[bytes]) -> bytes | None:
    """Read a frame; None if the worker has ended, perhaps in the middle of one."""
    head = orders.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    frame = orders.read(size)
    return frame if len(frame) == size else None


class _Prices:
    """What was asked for before, and its price, by the bytes in which it came: an account's prices never change."""

    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend
        self._known: dict[bytes, tuple[Ask, ...]] = {}
        self.store = backend.store

    def of(self, costs: bytes) -> tuple[Ask, ...]:
        """Return what is asked of each account, priced."""
        asks = self._known.get(costs)
        if asks is None:
            asks = self.backend.asks(costs_of(costs_in(costs)))
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            if len(costs) <= _SHORT:
                self._known[costs] = asks
        return asks


def _carried_out(prices: _Prices, orders: Sequence[msgspec.Raw]) -> Answers:
    begun = perf_counter()
    requests = [_priced(prices, order) for order in orders if order != PROBE]
    outcomes = iter(_written(prices.store, [one for one in requests if isinstance(one, Charge)]))
    answers = iter([_answer(prices.backend, next(outcomes) if isinstance(one, Charge) else one) for one in requests])
    probed = _probed(prices.store) if len(requests) < len(orders) else b""
    return Answers(perf_counter() - begun, [probed if order == PROBE else next(answers) for order in orders])


def _probed(store: Store) -> Answer:
    """Try whether a charge could be written now: nothing if so, else the error that it would have met."""
    try:
        store.probe()
    except OdographError as error:
        return pickle.dumps(error), False
    except Exception as error:  # noqa: BLE001  as for a charge
        logs.failure(error)
        return pickle.dumps(OutcomeUnknown("something went wrong while this was tried")), False
    return b""


def _priced(prices: _Prices, order: msgspec.Raw) -> Charge | OdographError:
    """Return the request that an order asks for, or why there is none: that is its outcome."""
    try:
        read = order_in(order)
        return Charge(read.author, read.verb, prices.of(bytes(read.costs)), read.expires)
    except OdographError as error:
        return error
    except Exception as error:  # noqa: BLE001  one order is not to end the others
        logs.failure(error)
        return OdographError("something went wrong while this was priced; nothing was charged")


def _written(store: Store, charges: Sequence[Charge]) -> Sequence[Outcome]:
    """Write a group; what is raised for all of it is the outcome of each."""
    try:
        return carry_out(store, charges) if charges else ()
    except OdographError as error:
        return [error] * len(charges)
    except Exception as error:  # noqa: BLE001  what was written is in the store, and nobody here knows it
        logs.failure(error)
        unknown = OutcomeUnknown("something went wrong while this was written; ask again with the same key")
        return [unknown] * len(charges)


def _answer(backend: LocalBackend, outcome: Outcome) -> Answer:
    """Return the receipt of a charge, if nothing needs to be looked up for it; else its outcome."""
    if isinstance(outcome, Made) and not outcome.linked:
        with suppress(OdographError):  # an account that was forgotten here is read again, and that may fail
            return _ENCODER.encode(new_receipt_form(outcome.own, backend.uncertified(outcome.own)))
    return pickle.dumps(outcome), isinstance(outcome, RowLocked)


if __name__ == "__main__":
    main()
