"""The protocol between a worker and its writer process: batches of commands one way, batches of answers the other.

A batch is four bytes of length and that many bytes of MessagePack. The writer's first batch is empty: it is ready.
Most charges are sent unpriced and are priced by the writer, which remembers the prices of costs that it has seen; all
other commands are pickled.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec

from odograph.ledger.commands import Author, Command, Outcome
from odograph.service.request_schemas import QUICK, CostForm

__all__ = [
    "LENGTH",
    "LOCKED",
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
]

LENGTH: Final = struct.Struct("!I")
READY: Final = LENGTH.pack(0)
PROBE: Final = msgspec.Raw(msgspec.msgpack.encode("probe"))  # have something written that changes nothing
_MAX_QUICK_ACCOUNTS: Final = 8  # a batch of charges for a hundred accounts each would take seconds

Message: TypeAlias = msgspec.Raw  # a command, encoded
# The JSON of a receipt; or another outcome, pickled, and what has to be done about it.
Answer: TypeAlias = bytes | tuple[bytes, str]
LOCKED: Final = "locked"  # send the command again: another client of the database holds its account
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
