"""Schemas of requests, and guarantees made from them. An unknown field, wrong type or too long string is refused.

The schema of a guarantee is built from its class, which also checks what its numbers mean. The OpenAPI description is
made from these schemas.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, Union, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from odograph.core.fixed_point import Numeric
from odograph.core.guarantees import RDP, REGISTRY, SIZED, Guarantee, Interactive, Parallel
from odograph.core.mechanisms import NOISES

__all__ = [
    "MAX_ACCOUNTS",
    "MAX_IN_BATCH",
    "MAX_PEOPLE",
    "MAX_QUOTED",
    "MAX_TERMS",
    "QUICK",
    "AccountForm",
    "AccountRow",
    "AccountsForm",
    "AccountsQuery",
    "BatchForm",
    "BatchItem",
    "BatchResult",
    "BatchResults",
    "CalibrateForm",
    "CalibratedForm",
    "CalibrationForm",
    "CheckpointForm",
    "CloseForm",
    "ClosedForm",
    "CommitForm",
    "CostAskedForm",
    "CostForm",
    "CostsForm",
    "CountActiveForm",
    "CreatePopulationForm",
    "DecisionForm",
    "EntriesForm",
    "EntriesQuery",
    "EntryForm",
    "ErasedForm",
    "EventForm",
    "EventsForm",
    "EventsQuery",
    "FilterForm",
    "HealthForm",
    "HowManyForm",
    "KeyForm",
    "KeysForm",
    "KeysQuery",
    "LargestForm",
    "LifetimeForm",
    "LifetimesForm",
    "LineForm",
    "MakeKeyForm",
    "MeterForm",
    "NewKeyForm",
    "NoisyCountForm",
    "OfferForm",
    "OpenForm",
    "OpenedForm",
    "PeopleForm",
    "PolicyForm",
    "PopulationForm",
    "PopulationRow",
    "PopulationsForm",
    "Problem",
    "PromiseForm",
    "QuoteForm",
    "QuotedForm",
    "ReadingForm",
    "ReadingsForm",
    "ReceiptForm",
    "ReservationsForm",
    "ReservationsQuery",
    "ReserveAllForm",
    "ReserveForm",
    "RotateKeyForm",
    "RoundForm",
    "RoundReceiptForm",
    "RoundRow",
    "RoundsForm",
    "SpendAllForm",
    "SpendForm",
    "VerificationForm",
    "VerifyForm",
    "VoidForm",
    "WhoForm",
    "costs_of",
    "count_terms",
    "decoder",
    "guarantee_of",
]

MAX_IN_BATCH: Final = 1000  # spends
MAX_ACCOUNTS: Final = 100  # that one request may charge together
MAX_QUOTED: Final = 1000  # costs
MAX_PEOPLE: Final = 20_000_000  # in one request, which is held in memory: about 50 bytes a person
MAX_TERMS: Final = 2000  # guarantees and points of curves in one request; equal parts count once

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, description="An account's name.")]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, description="An idempotency key.")]
Note: TypeAlias = Annotated[str, Meta(max_length=10_000, description="Stored beside the entry; it can be erased.")]
Reason: TypeAlias = Annotated[
    str,
    Meta(min_length=1, max_length=10_000, description="Why the mechanism was not run; it is stored with the entry."),
]
Number: TypeAlias = Annotated[
    str | int | float,
    Meta(
        description="A number, or a string with its exact value, such as '0.05' or '1/3'.",
        extra_json_schema={"examples": ["0.05"]},
    ),
]
PersonId: TypeAlias = int | Annotated[str, Meta(max_length=1000)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Times: TypeAlias = Annotated[int, Meta(ge=1, le=10**9, description="How many equal requests must fit.")]


# Guarantees. A schema is frozen, so that equal costs are recognized. `form` is the version of the stored form and may
# be left out.


def _schema_of(cls: type[Guarantee]) -> type[Struct]:
    """Return the schema of a kind: its fields by their types, with their defaults."""
    hints = get_type_hints(cls)
    columns: list[Any] = []
    for one in fields(cls):
        schema = _FIELD_SCHEMAS[hints[one.name]]()
        columns.append((one.name, schema) if one.default is MISSING else (one.name, schema, one.default))
    return msgspec.defstruct(
        cls.__name__,
        [*columns, ("form", Literal[1], 1)],
        tag_field="kind",
        tag=cls.kind,
        frozen=True,
        forbid_unknown_fields=True,
        module=__name__,
        namespace={"__doc__": inspect.getdoc(cls)},
    )


def _parts_schema() -> Any:  # noqa: ANN401  a type for msgspec
    return Annotated[tuple[_union(_SCHEMAS), ...], Meta(min_length=1, max_length=10_000)]  # type: ignore[misc]


def _union(schemas: Mapping[type[Guarantee], type[Struct]]) -> Any:  # noqa: ANN401  a type for msgspec
    return Union[tuple(schemas.values())]  # noqa: UP007  of as many as there are


# The schema of a field, by its type in the class of the guarantee.
_FIELD_SCHEMAS: Final[dict[Any, Callable[[], Any]]] = {
    Numeric: lambda: Number,
    tuple[Numeric, ...]: lambda: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=1000)],
    str: lambda: Annotated[str, Meta(min_length=1, max_length=200)],
    int: lambda: Annotated[int, Meta(ge=1, le=10**12)],
    RDP | None: lambda: _SCHEMAS[RDP] | None,
    tuple[Guarantee, ...]: _parts_schema,
    Guarantee: lambda: _union(_SCHEMAS),
}
_SCHEMAS: Final[dict[type[Guarantee], type[Struct]]] = {}
# One by one: the schema of a kind needs those of the kinds that it is made of.
for _cls in [*(cls for cls in REGISTRY.values() if cls not in (Parallel, Interactive)), Parallel, Interactive]:
    _SCHEMAS[_cls] = _schema_of(_cls)
_KINDS: Final = {schema: cls for cls, schema in _SCHEMAS.items()}
QUICK: Final = tuple(schema for schema, cls in _KINDS.items() if cls.size)  # to price; others may take a while

if TYPE_CHECKING:
    _Cost: TypeAlias = Struct
    _SizedKind: TypeAlias = str
    _NoiseName: TypeAlias = str
else:
    _Cost = Union[tuple(_KINDS)]  # noqa: UP007  of as many as there are
    _SizedKind = Literal[tuple(SIZED)]
    _NoiseName = Literal[tuple(NOISES)]
CostForm: TypeAlias = _Cost
Costs: TypeAlias = Annotated[
    dict[str, CostForm],
    Meta(min_length=1, max_length=MAX_ACCOUNTS, description="The cost for each account, by name."),
]


def costs_of(costs: Mapping[str, CostForm]) -> dict[str, Guarantee]:
    """Return the guarantee for each account."""
    return {name: guarantee_of(form) for name, form in costs.items()}


def guarantee_of(form: CostForm) -> Guarantee:
    """Return the guarantee of a request; for equal small ones the same object, so that it is priced once."""
    return _cached_guarantee(form) if isinstance(form, QUICK) else _new_guarantee(form)


def _new_guarantee(form: CostForm) -> Guarantee:
    cls = _KINDS[type(form)]
    return cls(*[_field_value(getattr(form, name)) for name in cls.__match_args__])


_cached_guarantee: Final = lru_cache(maxsize=4096)(_new_guarantee)  # not for curves: they would fill the memory


def _field_value(value: object) -> object:
    if isinstance(value, Struct):
        return guarantee_of(value)
    if isinstance(value, tuple) and isinstance(value[0], Struct):
        made = {part: guarantee_of(part) for part in dict.fromkeys(value)}  # equal parts are the same object
        return tuple([made[part] for part in value])
    return value


def count_terms(form: object) -> int:
    """Return how many guarantees and points of curves a request has: the work of pricing it grows with them."""
    return sum(map(_count, _costs_in(form)))


def _costs_in(form: object) -> Iterable[CostForm]:
    """Return the costs of a request."""
    if isinstance(form, BatchForm):
        return (cost for item in form.spends for cost in item.costs.values())
    if isinstance(form, SpendAllForm | ReserveAllForm | CostsForm):
        return form.costs.values()
    if isinstance(form, QuoteForm | RoundForm):
        return form.costs if isinstance(form, QuoteForm) else form.guarantees
    one = getattr(form, "cost", None), getattr(form, "like", None), getattr(form, "probe", None)
    return filter(None, one)


def _count(value: object) -> int:
    if isinstance(value, Struct):
        return max(_count(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, tuple):
        return sum(map(_count, set(value))) if isinstance(value[0], Struct) else len(value)
    return 1


# Requests.


class FilterForm(Struct, forbid_unknown_fields=True):
    """A filter with its options and its share of delta; what is left out is chosen as the library does."""

    kind: str
    share: Number = 1
    takes: list[str] | None = None
    reserve: str | None = None
    orders: Annotated[list[tuple[Number, Number]], Meta(max_length=100)] = []
    rho: Number | None = None
    mu: Number | None = None
    menu: Annotated[list[Any], Meta(max_length=0)] = []


class PolicyForm(Struct, forbid_unknown_fields=True):
    """A policy. The defaults are those of the library.

    It promises one of epsilon (with delta), rho and mu; an epsilon of "none" promises no limit, only readings.
    """

    epsilon: Number | UnsetType | None = UNSET
    delta: Number | None = None
    rho: Number | None = None
    mu: Number | None = None
    delta_steps: Number | None = None
    filter: str | list[tuple[str, Number] | FilterForm] | None = None
    reserve: str | None = None
    odometer: str | dict[str, Any] | None = None
    slack: Number | None = None
    privacy_unit: Annotated[str, Meta(min_length=1, max_length=100)] = "person"
    neighbors: Literal["add-remove", "replace-one"] = "add-remove"
    form: Literal[2] = 2


class OpenForm(Struct, forbid_unknown_fields=True):
    """Open an account with a policy, or with one compiled elsewhere (required for a policy with a menu)."""

    name: Name
    policy: PolicyForm | None = None
    compiled: dict[str, Any] | None = None
    parent: Annotated[str, Meta(max_length=100)] = ""
    successor_of: Annotated[str, Meta(max_length=100)] = ""
    dataset: Annotated[str, Meta(max_length=100)] = ""
    note: Note = ""


class CloseForm(Struct, forbid_unknown_fields=True):
    """Close an account and all accounts below it."""

    note: Note = ""


class SpendForm(Struct, forbid_unknown_fields=True):
    """Charge one account."""

    cost: CostForm
    note: Note = ""


class ReserveForm(Struct, forbid_unknown_fields=True):
    """Charge one account now, and commit or void later."""

    cost: CostForm
    expires: Seconds | None = None
    note: Note = ""


class SpendAllForm(Struct, forbid_unknown_fields=True):
    """Charge several accounts, all or nothing."""

    costs: Costs
    note: Note = ""


class ReserveAllForm(Struct, forbid_unknown_fields=True):
    """Charge several accounts now, all or nothing, and commit or void later."""

    costs: Costs
    expires: Seconds | None = None
    note: Note = ""


class BatchItem(Struct, forbid_unknown_fields=True):
    """One spend of a batch, with an idempotency key of its own."""

    key: Key
    costs: Costs
    note: Note = ""


class BatchForm(Struct, forbid_unknown_fields=True):
    """Many independent spends; the response has one result for each, in order."""

    spends: Annotated[list[BatchItem], Meta(min_length=1, max_length=MAX_IN_BATCH)]


class CommitForm(Struct, forbid_unknown_fields=True):
    """Commit a reservation: the mechanism was run, or may have been."""

    note: Note = ""


class VoidForm(Struct, forbid_unknown_fields=True):
    """Void a reservation: the mechanism was not run."""

    reason: Reason


class CostAskedForm(Struct, forbid_unknown_fields=True):
    """A cost for one account, which is not charged."""

    cost: CostForm


class CostsForm(Struct, forbid_unknown_fields=True):
    """Decide costs for several accounts together."""

    costs: Costs


class LargestForm(Struct, forbid_unknown_fields=True):
    """Find the largest guarantee that fits: of a kind, or like a guarantee whose other fields it keeps."""

    kind: _SizedKind | None = None
    like: CostForm | None = None
    times: Times = 1


class CalibrateForm(Struct, forbid_unknown_fields=True):
    """Find the least noise of a mechanism with which `times` equal requests fit."""

    mechanism: _NoiseName
    settings: Annotated[
        dict[str, Number],
        Meta(max_length=10, description="The mechanism's other arguments by name, such as its sensitivity."),
    ] = {}
    times: Times = 1


class QuoteForm(Struct, forbid_unknown_fields=True):
    """Decide several costs in order, all or nothing, spending nothing."""

    costs: Annotated[list[CostForm], Meta(max_length=MAX_QUOTED)]


class CreatePopulationForm(Struct, forbid_unknown_fields=True):
    """Create a population without people: a policy that is promised to each person, and where people are kept.

    The engine numpy takes the ids 0, 1, 2, ...; duckdb takes any integers, or any strings. `unknown` decides what
    happens to people in a charge who are not in the population.
    """

    name: Name
    policy: PolicyForm | None = None
    compiled: dict[str, Any] | None = None
    engine: Literal["numpy", "duckdb"] = "numpy"
    unknown: Literal["join", "leave-out"] = "leave-out"
    note: Note = ""


class RoundForm(Struct, forbid_unknown_fields=True):
    """Charge people: everyone the same guarantee, or each person one of several.

    `which` is an index into `guarantees` for each person: for those in `ids`, or for everyone in id order. With
    `records` the round is refused unless there are as many people as records.
    """

    guarantees: Annotated[list[CostForm], Meta(min_length=1, max_length=MAX_TERMS)]
    which: list[Annotated[int, Meta(ge=0)]] | None = None
    ids: list[PersonId] | None = None
    records: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    note: Note = ""


class PeopleForm(Struct, forbid_unknown_fields=True):
    """People by their ids, or the ids 0, 1, 2, ... up to a count."""

    ids: list[PersonId] | None = None
    count: Annotated[int, Meta(ge=0, le=MAX_PEOPLE)] | None = None
    note: Note = ""


class CountActiveForm(Struct, forbid_unknown_fields=True):
    """Count, with noise, who could take part in a round of `probe`. Everyone is charged `cost`: a pure guarantee."""

    probe: CostForm
    cost: CostForm
    note: Note = ""


class VerifyForm(Struct, forbid_unknown_fields=True):
    """Verify, optionally against a checkpoint that was stored elsewhere."""

    checkpoint: dict[str, Any] | None = None


class MakeKeyForm(Struct, forbid_unknown_fields=True):
    """Make an API key for a principal."""

    principal: Annotated[str, Meta(min_length=1, max_length=200)]
    role: Literal["owner", "analyst", "runner", "auditor"]
    accounts: Annotated[list[Name], Meta(max_length=1000)] = []
    every_account: bool = False
    expires: Seconds | None = None


class RotateKeyForm(Struct, forbid_unknown_fields=True):
    """Make another key in place of an API key, which is valid for `overlap` more seconds: by default none."""

    overlap: Annotated[float, Meta(ge=0, le=1_000_000_000)] = 0.0


# Queries: what a page begins with, how long it is, and which entries are wanted.

First: TypeAlias = Annotated[int, Meta(ge=-(10**18), le=10**18, description="Counts from the end if negative.")]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1000)]
# Not a datetime, for which a number in a query would be seconds since 1970.
Moment: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})$",
        description="As in 2030-01-15T09:30:00Z; the + of another time zone is written %2B.",
    ),
]
EntryVerb: TypeAlias = Literal["open", "spend", "reserve", "commit", "void", "refuse", "close"]


class AccountsQuery(Struct, forbid_unknown_fields=True):
    """Which accounts to list: at most `limit`, those after a name."""

    after: Annotated[str, Meta(max_length=100)] = ""
    limit: Count = 100


class EntriesQuery(Struct, forbid_unknown_fields=True):
    """Which entries: `count` of them from the sequence `first`; and of these the wanted ones."""

    first: First = 0
    count: Count = 100
    since: Moment | UnsetType = UNSET
    until: Moment | UnsetType = UNSET  # the first moment that is not wanted
    principal: Annotated[str, Meta(max_length=200)] = ""
    verb: EntryVerb | UnsetType = UNSET  # not None: `verb=null` would be read as no filter
    text: Annotated[str, Meta(max_length=200, description="Contained in the note or the key, in either case.")] = ""

    @property
    def filters(self) -> bool:
        """Whether some entries may not be wanted."""
        return any((self.since, self.until, self.principal, self.verb, self.text))


class ReservationsQuery(Struct, forbid_unknown_fields=True):
    """Which reservations: `count` of them, charged at the sequence `first` or later."""

    first: Annotated[int, Meta(ge=0, le=10**18)] = 0
    count: Count = 1000


class KeysQuery(Struct, forbid_unknown_fields=True):
    """Which keys: `count` of them, made before the key with the id `after`."""

    after: Annotated[str, Meta(pattern="^([0-9a-f]{12})?$")] = ""
    count: Count = 100


class EventsQuery(Struct, forbid_unknown_fields=True):
    """Which events: `count` of them, after a cursor; `wait` is how many seconds to wait for the first one."""

    after: Annotated[
        str, Meta(max_length=60_000, description="A cursor that was returned, or `now`; empty for the first entry.")
    ] = ""
    count: Count = 100
    wait: Annotated[float, Meta(ge=0, le=20)] = 0
    account: Annotated[str, Meta(max_length=100, description="Only the events of this account.")] = ""


# A number with fewer digits and an exponent of at most two digits is its float's shortest decimal.
_LONG_NUMBER: Final = re.compile(rb"[0-9.]{16}|[eE][+-]?[0-9]{3}")


def decoder(form: type) -> Callable[[bytes], Any]:
    """Return a function that decodes a body with this schema.

    A JSON number that no float represents is passed on as a string, so that it is read exactly, or refused where only
    a float is possible: 0.10000000000000000001 must not be charged as 0.1, nor 1e-400 as nothing.
    """
    plain: Callable[[bytes], Any] = msgspec.json.Decoder(form).decode

    def decode(body: bytes) -> Any:  # noqa: ANN401  of the schema's type
        value = plain(body)
        if _LONG_NUMBER.search(body) is None:
            return value
        long: list[str] = []

        def exact(text: str) -> float | str:
            near = float(text)
            if Decimal(text) == Decimal(repr(near)):
                return near
            long.append(text)
            return text

        tree = json.loads(body, parse_float=exact)
        return msgspec.convert(tree, form) if long else value

    return decode


class PromiseForm(Struct):
    """What an account promises; epsilon is null under a promise of rho or mu, or of none but readings."""

    epsilon: float | None
    delta: float
    text: str
    rho: float | UnsetType = UNSET
    mu: float | UnsetType = UNSET


class LifetimeForm(Struct):
    """The promise of linked accounts together; exact numbers as strings."""

    accounts: list[str]
    epsilon: str | None  # null where an account promises none
    delta: str
    schedule: str = ""  # what the schedule that opens them promises in all, in words, if there is one


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
    notes: list[str] = []  # what the charge changes for later requests; not on a repeated receipt
    principal: str = ""  # who charged; empty where it is the caller, who has just done so


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
    notes: list[str] = []  # what an admission would change for later requests


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
    """What is spent and left on a meter that has a limit; it no longer counts once a step had no price on it."""

    spent: float
    left: float
    counts: bool


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


class CalibrationForm(Struct):
    """The arguments of a mechanism, the guarantee that it then has, and how often that fits."""

    mechanism: str
    parameter: str
    value: float
    settings: dict[str, int | float | str]
    times: int
    guarantee: dict[str, Any]
    text: str


class CalibratedForm(Struct):
    """The least noise that fits; null if no amount of noise does."""

    account: str
    calibration: CalibrationForm | None


class HowManyForm(Struct):
    """How many requests of one cost are admitted in a row, at most 10^12."""

    account: str
    how_many: int


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
    next: int | None  # pass it as `first` for the next page


class EventForm(EntryForm):
    """An entry of one of the accounts."""

    account: str


class EventsForm(Struct):
    """Entries of many accounts that follow a cursor, without a gap in any account."""

    events: list[EventForm]
    after: str  # the cursor that follows them
    more: bool  # whether there are more already


class ReservationsForm(Struct):
    """The pending reservations of an account."""

    account: str
    reservations: list[ReceiptForm]
    next: int | None  # pass it as `first` for the next page


class PopulationRow(Struct):
    """The summary of a population. How many people it has, and what they have spent, is private."""

    name: str
    promise: PromiseForm  # to each person
    privacy_unit: str
    neighbors: str
    filter: str
    engine: str
    unknown: str
    rounds: int
    time: str
    closed: bool


class PopulationsForm(Struct):
    """A page of populations, by name."""

    populations: list[PopulationRow]
    next: str | None  # pass it as `after` for the next page


class PopulationForm(Struct):
    """A population, with the policy that it was created with, which never changes."""

    population: PopulationRow
    compiled: dict[str, Any]
    certification: str
    lifetime: LifetimeForm | None = None  # of all epochs, if it renews


class RoundRow(Struct):
    """A round. `cost` is what everyone was asked for; null for individual prices, which are private."""

    version: int
    time: str
    act: str
    cost: dict[str, Any] | None
    principal: str
    key: str
    note: str
    seal: str


class RoundsForm(Struct):
    """A page of rounds, oldest first."""

    population: str
    size: int
    rounds: list[RoundRow]


class RoundReceiptForm(Struct):
    """A round that is on disk. Who takes part is a separate request, which only a runner may make."""

    population: str
    version: int
    key: str
    time: str
    seal: str
    repeated: bool


class NoisyCountForm(Struct):
    """How many people could take part, with noise."""

    population: str
    count: int


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
    """A page of API keys, newest first."""

    keys: list[KeyForm]
    next: str | None  # pass it as `after` for the next page


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
