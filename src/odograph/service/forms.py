"""What callers send. Reading is strict: an unknown field, a wrong type, a text that is too long is refused at once.

What numbers mean is not decided here: a guarantee checks its own. The OpenAPI description is made from these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

__all__ = [
    "MOST_ACCOUNTS",
    "MOST_IN_BATCH",
    "MOST_QUOTED",
    "MOST_TERMS",
    "Approx",
    "BatchForm",
    "BatchItem",
    "CloseForm",
    "CommitForm",
    "CostAskedForm",
    "CostForm",
    "CostsForm",
    "Disjoint",
    "Gdp",
    "Known",
    "LargestForm",
    "MakeKeyForm",
    "OpenForm",
    "PolicyForm",
    "Prob",
    "Pure",
    "QuoteForm",
    "Rdp",
    "ReserveAllForm",
    "ReserveForm",
    "SpendAllForm",
    "SpendForm",
    "VerifyForm",
    "VoidForm",
    "Zcdp",
    "decoder",
    "terms_of",
]

MOST_IN_BATCH: Final = 1000
MOST_ACCOUNTS: Final = 100  # that one request may charge together
MOST_QUOTED: Final = 1000
MOST_TERMS: Final = 2000  # guarantees, and points of curves, that one request may have priced; equal parts count once

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100, description="An account's name.")]
Key: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200, description="An idempotency key.")]
Note: TypeAlias = Annotated[str, Meta(max_length=10_000, description="Kept beside the entry; it can be erased.")]
Reason: TypeAlias = Annotated[
    str, Meta(min_length=1, max_length=10_000, description="Why the mechanism was not run: somebody will ask.")
]
Number: TypeAlias = Annotated[
    str | int | float,
    Meta(
        description="A number, or its exact text such as '0.05' or '1/3'.", extra_json_schema={"examples": ["0.05"]}
    ),
]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Times: TypeAlias = Annotated[int, Meta(ge=1, le=10**9, description="How many equal requests are to fit.")]


# Guarantees, frozen, so that what was priced before is recognised. `form` is the version of the written form; it may
# be left out.


class Pure(Struct, tag_field="kind", tag="pure", frozen=True, forbid_unknown_fields=True):
    """epsilon-DP."""

    epsilon: Number
    form: Literal[1] = 1


class Approx(Struct, tag_field="kind", tag="approx", frozen=True, forbid_unknown_fields=True):
    """(epsilon, delta)-DP."""

    epsilon: Number
    delta: Number
    form: Literal[1] = 1


class Prob(Struct, tag_field="kind", tag="prob", frozen=True, forbid_unknown_fields=True):
    """(epsilon, delta)-probabilistic DP."""

    epsilon: Number
    delta: Number
    form: Literal[1] = 1


class Zcdp(Struct, tag_field="kind", tag="zcdp", frozen=True, forbid_unknown_fields=True):
    """delta-approximate rho-zCDP."""

    rho: Number
    delta: Number = 0
    form: Literal[1] = 1


class Gdp(Struct, tag_field="kind", tag="gdp", frozen=True, forbid_unknown_fields=True):
    """mu-Gaussian DP."""

    mu: Number
    form: Literal[1] = 1


class Rdp(Struct, tag_field="kind", tag="rdp", frozen=True, forbid_unknown_fields=True):
    """delta-approximate Rényi DP: a value at each of some orders."""

    orders: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=1000)]
    values: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=1000)]
    delta: Number = 0
    form: Literal[1] = 1


class Known(Struct, tag_field="kind", tag="mechanism", frozen=True, forbid_unknown_fields=True):
    """Steps of a mechanism on the policy's menu."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    steps: Annotated[int, Meta(ge=1, le=10**12)] = 1
    curve: Rdp | None = None
    form: Literal[1] = 1


Simple: TypeAlias = Pure | Approx | Prob | Zcdp | Gdp | Rdp | Known


class Disjoint(Struct, tag_field="kind", tag="parallel", frozen=True, forbid_unknown_fields=True):
    """One step of several mechanisms on disjoint parts of the data."""

    parts: Annotated[tuple[Simple, ...], Meta(min_length=1, max_length=10_000)]
    form: Literal[1] = 1


CostForm: TypeAlias = Pure | Approx | Prob | Zcdp | Gdp | Rdp | Known | Disjoint
Costs: TypeAlias = Annotated[
    dict[str, CostForm],
    Meta(min_length=1, max_length=MOST_ACCOUNTS, description="What is asked of each account, by name."),
]


def terms_of(form: object) -> int:
    """Return how much a request has to be priced: what it asks the service to compute grows with it."""
    if isinstance(form, BatchForm):
        return sum(_terms(cost) for item in form.spends for cost in item.costs.values())
    if isinstance(form, QuoteForm):
        return sum(map(_terms, form.costs))
    if isinstance(form, SpendAllForm | ReserveAllForm | CostsForm):
        return sum(map(_terms, form.costs.values()))
    if isinstance(form, SpendForm | ReserveForm | CostAskedForm):
        return _terms(form.cost)
    return _terms(form.like) if isinstance(form, LargestForm) and form.like is not None else 0


def _terms(cost: CostForm) -> int:
    if isinstance(cost, Disjoint):
        return sum(map(_terms, set(cost.parts)))
    if isinstance(cost, Known):
        return 1 if cost.curve is None else len(cost.curve.orders)
    return len(cost.orders) if isinstance(cost, Rdp) else 1


# Requests.


class PolicyForm(Struct, forbid_unknown_fields=True):
    """A promise, and the choices that keep it. What is left out is chosen as the library does."""

    epsilon: Number
    delta: Number
    delta_steps: Number | None = None
    rule: str | list[tuple[str, Number]] = "exact"
    takes: list[str] | None = None
    orders: Annotated[list[tuple[Number, Number]], Meta(max_length=100)] = []
    odometer: dict[str, Any] | None = None
    slack: Number | None = None
    unit: Annotated[str, Meta(min_length=1, max_length=100)] = "person"
    neighbours: Literal["add-remove", "replace-one"] = "add-remove"
    menu: Annotated[list[Any], Meta(max_length=0)] = []
    form: Literal[1] = 1


class OpenForm(Struct, forbid_unknown_fields=True):
    """Open an account: by its policy, or by a policy compiled elsewhere (one with a menu needs that)."""

    name: Name
    policy: PolicyForm | None = None
    compiled: dict[str, Any] | None = None
    parent: Annotated[str, Meta(max_length=100)] = ""
    successor_of: Annotated[str, Meta(max_length=100)] = ""
    dataset: Annotated[str, Meta(max_length=100)] = ""
    note: Note = ""


class CloseForm(Struct, forbid_unknown_fields=True):
    """Close an account, and everything below it."""

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
    """One spend of a batch, under its own key."""

    key: Key
    costs: Costs
    note: Note = ""


class BatchForm(Struct, forbid_unknown_fields=True):
    """Many independent spends, answered one by one in their order."""

    spends: Annotated[list[BatchItem], Meta(min_length=1, max_length=MOST_IN_BATCH)]


class CommitForm(Struct, forbid_unknown_fields=True):
    """Say that the mechanism was run, or may have been."""

    note: Note = ""


class VoidForm(Struct, forbid_unknown_fields=True):
    """Take a reservation back: the mechanism was not run."""

    reason: Reason


class CostAskedForm(Struct, forbid_unknown_fields=True):
    """What an account would be asked for."""

    cost: CostForm


class CostsForm(Struct, forbid_unknown_fields=True):
    """What several accounts would be asked for together."""

    costs: Costs


class LargestForm(Struct, forbid_unknown_fields=True):
    """Ask for the largest request that fits: of a kind, or like a guarantee whose other fields it keeps."""

    kind: Literal["pure", "approx", "prob", "zcdp", "gdp"] | None = None
    like: CostForm | None = None
    times: Times = 1


class QuoteForm(Struct, forbid_unknown_fields=True):
    """Ask for a batch in order, all or nothing, spending nothing."""

    costs: Annotated[list[CostForm], Meta(max_length=MOST_QUOTED)]


class VerifyForm(Struct, forbid_unknown_fields=True):
    """Verify, perhaps against a checkpoint that was kept elsewhere."""

    checkpoint: dict[str, Any] | None = None


class MakeKeyForm(Struct, forbid_unknown_fields=True):
    """Make an API key for a principal."""

    principal: Annotated[str, Meta(min_length=1, max_length=200)]
    role: Literal["owner", "analyst", "runner", "auditor"]
    accounts: Annotated[list[Name], Meta(max_length=1000)] = []
    every_account: bool = False
    expires: Seconds | None = None


# Fewer digits than these, and an exponent of two digits, and the number is its float's shortest decimal.
_LONG: Final = re.compile(rb"[0-9.]{16}|[eE][+-]?[0-9]{3}")


def decoder(form: type) -> Callable[[bytes], Any]:
    """Return a function that reads a body of this form.

    A JSON number with more digits than a float keeps is handed on as its text, so that it is read exactly, or
    refused where only a float will do: 0.10000000000000000001 must not be charged as 0.1, nor 1e-400 as nothing.
    """
    plain: Callable[[bytes], Any] = msgspec.json.Decoder(form).decode

    def decode(body: bytes) -> Any:  # noqa: ANN401  whatever the form is
        value = plain(body)
        if _LONG.search(body) is None:
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
