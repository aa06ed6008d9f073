"""Schemas of responses. An exact number is a string; a number for people is a float.

Most describe the `to_dict` of a value of the library, and a test checks that they do. The OpenAPI description is made
from these schemas.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

__all__ = [
    "AccountForm",
    "AccountRow",
    "AccountsForm",
    "BatchResult",
    "BatchResults",
    "CheckpointForm",
    "ClosedForm",
    "DecisionForm",
    "EntriesForm",
    "EntryForm",
    "ErasedForm",
    "HealthForm",
    "KeyForm",
    "KeysForm",
    "LifetimeForm",
    "LifetimesForm",
    "LineForm",
    "MeterForm",
    "NewKeyForm",
    "OfferForm",
    "OpenedForm",
    "Problem",
    "PromiseForm",
    "QuotedForm",
    "ReadingForm",
    "ReadingsForm",
    "ReceiptForm",
    "ReservationsForm",
    "VerificationForm",
    "WhoForm",
]


class PromiseForm(Struct):
    """What an account promises."""

    epsilon: float
    delta: float
    text: str


class LifetimeForm(Struct):
    """The promise of linked accounts together; exact numbers as strings."""

    accounts: list[str]
    epsilon: str
    delta: str


class LifetimesForm(Struct):
    """An account's lifetime promise; null if it is not linked to another."""

    account: str
    lifetime: LifetimeForm | None


class LineForm(Struct):
    """One account's part of a receipt."""

    account: str
    sequence: int
    cost: dict[str, Any] | Raw
    seal: str


class ReceiptForm(Struct):
    """A durable charge, or the outcome of a reservation."""

    id: str
    verb: str
    key: str
    time: str
    accounts: list[LineForm]
    expires: str | None
    lifetimes: list[LifetimeForm]
    repeated: bool
    uncertified: list[str] = []  # accounts whose limits the service has not certified


class DecisionForm(Struct):
    """The decision on a request; a refusal states what would fit."""

    admitted: bool
    account: str
    request: dict[str, Any] | None
    largest: dict[str, Any] | None
    spent: dict[str, float]
    asked: dict[str, float | None]
    left: dict[str, float]
    message: str
    totals: str
    totals_after: str
    price: str


class Problem(Struct, omit_defaults=True):
    """A problem as in RFC 9457. `code` is the name of the error."""

    title: str
    status: int
    code: str
    detail: str
    charged: Annotated[
        bool | None,
        Meta(
            description="Whether the charge that was asked for was made; false also where none was asked for. null if"
            " that is not known: the same request with the same idempotency key tells."
        ),
    ]
    type: str = "about:blank"
    retryable: bool = False
    request_id: str = ""
    decision: DecisionForm | None = None


class BatchResult(Struct, omit_defaults=True):
    """The result of one spend of a batch."""

    status: int
    receipt: ReceiptForm | None = None
    problem: Problem | None = None


class BatchResults(Struct):
    """The results of a batch, in its order."""

    results: list[BatchResult]


class MeterForm(Struct):
    """What is spent and left on a meter that has a limit."""

    spent: float
    left: float


class ReadingForm(Struct):
    """A reading of an odometer, and what it allows to be claimed."""

    loss: float | None  # null where the odometer has no finite bound
    delta: float
    odometer: str
    covered: bool
    statement: str


class ReadingsForm(Struct, omit_defaults=True):
    """The policy's reading; others only if a comparison was requested, marked as not covered."""

    account: str
    promise: PromiseForm
    reading: ReadingForm
    compare: list[ReadingForm] | UnsetType = UNSET


class AccountRow(Struct):
    """The summary of an account."""

    name: str
    parent: str
    successor_of: str
    dataset: str
    privacy_unit: str
    neighbors: str
    promise: PromiseForm
    filter: str
    spent: float  # from 0 to 1, on the alternative that has most left
    steps: int
    sequence: int
    seal: str
    time: str
    totals: str
    closed: bool
    linked: bool
    origin: str


class AccountsForm(Struct):
    """A page of accounts, by name."""

    accounts: list[AccountRow]
    next: str | None  # pass it as `after` for the next page


class AccountForm(Struct):
    """An account with everything that its page shows."""

    account: AccountRow
    policy: dict[str, Any]
    source: str  # where the document says its budget comes from
    certification: str  # how this service knows that the limits keep the promise, or "not certified here"
    meters: dict[str, MeterForm]
    reading: ReadingForm
    largest: list[dict[str, Any]]
    children: list[str]
    lifetime: LifetimeForm | None
    pending: list[ReceiptForm]
    voids: int


class OpenedForm(Struct):
    """What an account was opened with; it never changes."""

    account: AccountRow
    compiled: dict[str, Any]


class ClosedForm(Struct):
    """An account that takes no new charges."""

    account: str
    closed: bool


class OfferForm(Struct):
    """The largest request that fits; null if none does."""

    account: str
    times: int
    largest: dict[str, Any] | None


class QuotedForm(Struct):
    """The decisions on several costs in order; nothing was spent."""

    admitted: bool
    decisions: list[DecisionForm]
    totals_after: str


class EntryForm(Struct):
    """An entry. `sealed` are the exact strings under its seal, if the caller may see every account in them."""

    sequence: int
    time: str
    verb: str
    cost: dict[str, Any] | None
    price: str  # integer units on each meter
    principal: str
    key: str
    note: str
    expires: str | None
    seal: str
    sealed: dict[str, str] | None


class EntriesForm(Struct):
    """A page of an account's entries."""

    account: str
    size: int
    entries: list[EntryForm]


class ReservationsForm(Struct):
    """The pending reservations of an account."""

    account: str
    reservations: list[ReceiptForm]


class CheckpointForm(Struct):
    """The last entry of every account; store it elsewhere, and verify against it."""

    form: int
    head: str
    accounts: dict[str, tuple[str, str]]


class VerificationForm(Struct):
    """What a replay of the whole ledger found."""

    verified: bool
    entries: int
    accounts: int
    notes_erased: int
    principals_erased: int
    set_back: list[str]
    checkpoint: CheckpointForm
    uncertified: list[str]  # accounts whose limits the service has not certified


class ErasedForm(Struct):
    """Whether there was something to erase."""

    erased: bool


class KeyForm(Struct):
    """An API key, without its secret."""

    id: str
    principal: str
    role: str
    accounts: list[str]
    every_account: bool
    made: str
    made_by: str
    expires: str | None
    revoked: str | None
    revoked_by: str


class KeysForm(Struct):
    """The API keys, newest first."""

    keys: list[KeyForm]


class NewKeyForm(Struct):
    """A new API key. The token is shown only this once; its digest is stored."""

    token: str
    key: KeyForm


class WhoForm(Struct):
    """The caller, and what its key allows."""

    principal: str
    role: str
    key: str
    accounts: list[str] | None  # null for every account
    expires: str | None


class HealthForm(Struct):
    """Whether the service can make charges."""

    status: str
    version: str
