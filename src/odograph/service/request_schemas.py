"""Schemas of requests, and guarantees made from them. An unknown field, wrong type or too long string is refused.

The schema of a guarantee is built from its class, which also checks what its numbers mean. The OpenAPI description is
made from these schemas.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, Union, get_type_hints

import msgspec
from msgspec import Meta, Struct

from odograph.core.fixed_point import Numeric
from odograph.core.guarantees import RDP, REGISTRY, SIZED, Guarantee, Parallel

__all__ = [
    "MAX_ACCOUNTS",
    "MAX_IN_BATCH",
    "MAX_QUOTED",
    "MAX_TERMS",
    "QUICK",
    "BatchForm",
    "BatchItem",
    "CloseForm",
    "CommitForm",
    "CostAskedForm",
    "CostForm",
    "CostsForm",
    "FilterForm",
    "LargestForm",
    "MakeKeyForm",
    "OpenForm",
    "PolicyForm",
    "QuoteForm",
    "ReserveAllForm",
    "ReserveForm",
    "SpendAllForm",
    "SpendForm",
    "VerifyForm",
    "VoidForm",
    "costs_of",
    "count_terms",
    "decoder",
    "guarantee_of",
]

MAX_IN_BATCH: Final = 1000  # spends
MAX_ACCOUNTS: Final = 100  # that one request may charge together
MAX_QUOTED: Final = 1000  # costs
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
}
_SCHEMAS: Final[dict[type[Guarantee], type[Struct]]] = {}  # of the kinds that may be parts of a `Parallel`
for _cls in REGISTRY.values():  # one by one: the schema of a `Mechanism` needs that of an `RDP`
    if _cls is not Parallel:
        _SCHEMAS[_cls] = _schema_of(_cls)
_KINDS: Final = {schema: cls for cls, schema in (_SCHEMAS | {Parallel: _schema_of(Parallel)}).items()}
QUICK: Final = tuple(schema for schema, cls in _KINDS.items() if cls.size)  # to price; others may take a while

if TYPE_CHECKING:
    _Cost: TypeAlias = Struct
    _SizedKind: TypeAlias = str
else:
    _Cost = Union[tuple(_KINDS)]  # noqa: UP007  of as many as there are
    _SizedKind = Literal[tuple(SIZED)]
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
    if isinstance(form, BatchForm):
        return sum(_count(cost) for item in form.spends for cost in item.costs.values())
    if isinstance(form, QuoteForm):
        return sum(map(_count, form.costs))
    if isinstance(form, SpendAllForm | ReserveAllForm | CostsForm):
        return sum(map(_count, form.costs.values()))
    if isinstance(form, SpendForm | ReserveForm | CostAskedForm):
        return _count(form.cost)
    return _count(form.like) if isinstance(form, LargestForm) and form.like is not None else 0


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
    orders: Annotated[list[tuple[Number, Number]], Meta(max_length=100)] = []
    menu: Annotated[list[Any], Meta(max_length=0)] = []


class PolicyForm(Struct, forbid_unknown_fields=True):
    """A policy. The defaults are those of the library."""

    epsilon: Number
    delta: Number
    delta_steps: Number | None = None
    filter: str | list[tuple[str, Number] | FilterForm] = "exact"
    odometer: dict[str, Any] | None = None
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
    """Decide a cost for one account."""

    cost: CostForm


class CostsForm(Struct, forbid_unknown_fields=True):
    """Decide costs for several accounts together."""

    costs: Costs


class LargestForm(Struct, forbid_unknown_fields=True):
    """Find the largest guarantee that fits: of a kind, or like a guarantee whose other fields it keeps."""

    kind: _SizedKind | None = None
    like: CostForm | None = None
    times: Times = 1


class QuoteForm(Struct, forbid_unknown_fields=True):
    """Decide several costs in order, all or nothing, spending nothing."""

    costs: Annotated[list[CostForm], Meta(max_length=MAX_QUOTED)]


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
