"""What a worker and its scribe tell each other: frames of orders one way, frames of answers the other.

A frame is four bytes of length and that many of MessagePack. The first frame of a scribe is empty: it is ready.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec

from odograph.ledger.commands import Author, Outcome
from odograph.service.request_schemas import CostForm

__all__ = [
    "HEAD",
    "PROBE",
    "READY",
    "Answer",
    "Answers",
    "Asked",
    "Order",
    "Packed",
    "answers_in",
    "costs_in",
    "framed",
    "order_in",
    "orders_in",
    "outcome_in",
    "packed",
]

HEAD: Final = struct.Struct("!I")
READY: Final = HEAD.pack(0)
PROBE: Final = msgspec.Raw(msgspec.msgpack.encode("probe"))  # an order to write and change nothing

# A receipt as it is sent to the caller; or a pickled outcome of which more must be said than that, and whether to
# send the order again, because another client of the database holds its account.
Answer: TypeAlias = bytes | tuple[bytes, bool]


class Order(msgspec.Struct, array_like=True):
    """A charge that somebody wants, as it was sent: it is priced where it is written."""

    author: Author
    verb: str
    costs: Mapping[str, CostForm]
    expires: int | None


class Asked(msgspec.Struct, array_like=True):
    """An order as the scribe reads it: most ask for the same as one before, and such costs are read once."""

    author: Author
    verb: str
    costs: msgspec.Raw
    expires: int | None


class Packed(NamedTuple):
    """An order as it is sent, and whose turn it takes."""

    client: str
    order: msgspec.Raw


class Answers(msgspec.Struct, array_like=True):
    """What became of the orders of a frame, in their order, and how long that took."""

    seconds: float
    answers: list[Answer]


_ENCODER: Final = msgspec.msgpack.Encoder()
_ORDERS: Final = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ORDER: Final = msgspec.msgpack.Decoder(Asked)
_COSTS: Final = msgspec.msgpack.Decoder(dict[str, CostForm])
_ANSWERS: Final = msgspec.msgpack.Decoder(Answers)


def packed(order: Order) -> Packed | None:
    """Return an order as it is sent; None if MessagePack has no form for it, such as for a number of 70 bits."""
    try:
        return Packed(order.author.principal, msgspec.Raw(_ENCODER.encode(order)))
    except (OverflowError, ValueError):
        return None


def framed(content: Answers | Sequence[msgspec.Raw]) -> bytes:
    """Return a frame."""
    frame = _ENCODER.encode(content)
    return HEAD.pack(len(frame)) + frame


def orders_in(frame: bytes) -> list[msgspec.Raw]:
    """Return the orders of a frame, each to be read by itself."""
    return _ORDERS.decode(frame)


def order_in(one: msgspec.Raw) -> Asked:
    """Read one order."""
    return _ORDER.decode(one)


def costs_in(costs: bytes) -> dict[str, CostForm]:
    """Read the costs of an order."""
    return _COSTS.decode(costs)


def answers_in(frame: bytes) -> Answers:
    """Read the answers to a frame."""
    return _ANSWERS.decode(frame)


def outcome_in(answer: tuple[bytes, bool]) -> Outcome:
    """Unpack an outcome. It may hold a refusal with all of its meters, so this is not for the event loop."""
    outcome: Outcome = pickle.loads(answer[0])  # noqa: S301  from our own process
    return outcome
