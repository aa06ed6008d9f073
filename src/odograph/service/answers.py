"""What callers are answered. An exact number is a text, a number for people is a float.

The OpenAPI description is made from these.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw, Struct, UnsetType

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
    """What linked accounts promise together; exact numbers as text."""

    accounts: list[str]
    epsilon: str
    delta: str


class LifetimesForm(Struct):
    """An account's lifetime promise; null if it is linked to no other."""

    account: str
    lifetime: LifetimeForm | None


class LineForm(Struct):
    """One account's part of a receipt."""

    account: str
    sequence: int
    cost: dict[str, Any] | Raw
    seal: str


class ReceiptForm(Struct):
    """A durable charge, or what became of a reservation."""

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
    """The answer to a request; a refusal says what would fit."""

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
    """What went wrong, as RFC 9457 has it."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"
    retryable: bool = False
    request_id: str = ""
    decision: DecisionForm | None = None


class BatchResult(Struct, omit_defaults=True):
    """The answer to one spend of a batch."""

    status: int
    receipt: ReceiptForm | None = None
    problem: Problem | None = None


class BatchResults(Struct):
    """The answers to a batch, in its order."""

    results: list[BatchResult]


class MeterForm(Struct):
    """What is spent and left on a meter that has a limit."""

    spent: float
    left: float


class ReadingForm(Struct):
    """A reading of an odometer, and what it allows to be said."""

    loss: float | None  # null where the odometer has no finite bound
    delta: float
    odometer: str
    licensed: bool
    licence: str


class ReadingsForm(Struct, omit_defaults=True):
    """The policy's reading; others beside it only where a comparison was asked for, marked as not licensed."""

    account: str
    promise: PromiseForm
    reading: ReadingForm
    compare: list[ReadingForm] | UnsetType = UNSET


class AccountRow(Struct):
    """An account in brief: where it stands among the others, and how far it has gone."""

    name: str
    parent: str
    successor_of: str
    dataset: str
    unit: str
    neighbours: str
    promise: PromiseForm
    rule: str
    spent: float  # the part of the budget, on the alternative that has most left
    steps: int
    sequence: int
    seal: str
    time: str
    totals: str
    closed: bool
    linked: bool
    origin: str


class AccountsForm(Struct):
    """A page of accounts, in the order of their names."""

    accounts: list[AccountRow]
    next: str | None  # pass it as `after` for the next page


class AccountForm(Struct):
    """An account with everything that its page shows."""

    account: AccountRow
    policy: dict[str, Any]
    source: str  # what the document says of its budget
    certification: str  # what this service knows of it: "not certified here", or how it is certified
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
    """The answer to a batch that was only asked about."""

    admitted: bool
    decisions: list[DecisionForm]
    totals_after: str


class EntryForm(Struct):
    """An entry as people read it. `sealed` are the exact texts under the seal, if the caller may see all of them."""

    sequence: int
    time: str
    verb: str
    cost: dict[str, Any] | None
    price: str  # whole units on each meter
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
    """The reservations of an account that nobody has committed or voided."""

    account: str
    reservations: list[ReceiptForm]


class CheckpointForm(Struct):
    """Where every account stands: keep it elsewhere, and verify against it."""

    form: int
    head: str
    accounts: dict[str, tuple[str, str]]


class VerificationForm(Struct):
    """What a whole replay found in order."""

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
    """The API keys, the newest first."""

    keys: list[KeyForm]


class NewKeyForm(Struct):
    """A new API key. The token is shown this once; only its digest is kept."""

    token: str
    key: KeyForm


class WhoForm(Struct):
    """Who asks, and what the key allows."""

    principal: str
    role: str
    key: str
    accounts: list[str] | None  # null if it may see all of them
    expires: str | None


class HealthForm(Struct):
    """Whether the service can do its work."""

    status: str
    version: str
