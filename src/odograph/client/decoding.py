"""Responses of a service, decoded into the values that a ledger returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from odograph.core.fixed_point import read
from odograph.core.gate import Decision
from odograph.core.guarantees import guarantee_from_dict
from odograph.core.meters import Meter
from odograph.core.planning import Quote
from odograph.errors import OdographError, RemoteError
from odograph.ledger.entries import VERSION, Entry, price_from_text, text_of, totals_from_text
from odograph.ledger.lifetimes import Lifetime
from odograph.ledger.results import Checkpoint, HistoryEntry, Line, Receipt, Verification, history_entry
from odograph.ledger.stores.base import Balance, Head

__all__ = [
    "balance_of",
    "decision_of",
    "history_entry_of",
    "lifetime_of",
    "maybe_of",
    "part_of",
    "quote_of",
    "receipt_of",
    "understood",
    "verification_of",
]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NUMBERS: Final = ("version", "sequence", "time")

Form = Mapping[str, Any]
Meters = Callable[[str], tuple[Meter, ...]]  # of an account, by its name
_P = ParamSpec("_P")
_T = TypeVar("_T")


def understood(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Raise `RemoteError` where a response cannot be read."""

    @wraps(read)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return read(*args, **kwargs)
        except RemoteError:
            raise
        except (OdographError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            raise RemoteError("the response is not one of this version of Odograph; is it Odograph?") from problem

    return checked


@understood
def part_of(form: Form, name: str, kind: type[_T]) -> _T:
    """Return a field of a response, if it is there and of its type."""
    part = form[name]
    if not isinstance(part, kind):
        raise TypeError(name)
    return part


@understood
def maybe_of(form: Form, name: str, kind: type[_T]) -> _T | None:
    """Return a field of a response that may be null."""
    return None if form[name] is None else part_of(form, name, kind)


@understood
def balance_of(row: Form) -> Balance:
    """Read an account in brief."""
    head = Head(
        row["name"], row["parent"], row["successor_of"], row["dataset"], row["privacy_unit"], row["neighbors"]
    )
    return Balance(
        head,
        row["sequence"],
        row["seal"],
        _time(row["time"]),
        totals_from_text(row["totals"]),
        row["closed"],
        row["linked"],
        row["origin"],
    )


@understood
def receipt_of(form: Form) -> Receipt:
    """Read a receipt."""
    lines = tuple(
        Line(line["account"], line["sequence"], guarantee_from_dict(line["cost"]), line["seal"])
        for line in form["accounts"]
    )
    lifetimes = tuple(filter(None, map(lifetime_of, form["lifetimes"])))
    expires = None if form["expires"] is None else _time(form["expires"])
    unsure = tuple(form.get("uncertified", ()))  # a service of version 0.1 does not send it
    time, again = _time(form["time"]), form["repeated"]
    return Receipt(form["verb"], form["key"], time, lines, expires, lifetimes, again, unsure)


@understood
def lifetime_of(form: Form | None) -> Lifetime | None:
    """Read what linked accounts promise together."""
    if form is None:
        return None
    return Lifetime(tuple(form["accounts"]), read(form["epsilon"], "epsilon"), read(form["delta"], "delta"))


@understood
def decision_of(form: Form, meters: Meters, asked: str = "") -> Decision:
    """Read a decision; `meters` finds those of the account that decided: `asked`, if it names none."""
    return Decision(
        admitted=form["admitted"],
        meters=meters(form["account"] or asked),
        totals=totals_from_text(form["totals"]),
        totals_after=totals_from_text(form["totals_after"]),
        price=price_from_text(form["price"]),
        request=None if form["request"] is None else guarantee_from_dict(form["request"]),
        largest=None if form["largest"] is None else guarantee_from_dict(form["largest"]),
        account=form["account"],
    )


@understood
def quote_of(form: Form, meters: Meters, asked: str) -> Quote:
    """Read the answer to a batch."""
    decisions = tuple(decision_of(one, meters, asked) for one in form["decisions"])
    return Quote(form["admitted"], decisions, totals_from_text(form["totals_after"]))


@understood
def history_entry_of(account: str, form: Form) -> HistoryEntry:
    """Read an entry; one that names accounts that the caller may not see comes without them."""
    if form["sealed"] is not None:
        fields = form["sealed"] | {name: int(form["sealed"][name]) for name in _NUMBERS}
        return history_entry(Entry(**fields), form["principal"], form["note"])
    expires = {} if form["expires"] is None else {"expires": str(_time(form["expires"]))}
    entry = Entry(
        version=VERSION,
        account=account,
        sequence=form["sequence"],
        time=_time(form["time"]),
        principal="",
        verb=form["verb"],
        legs=f"{account}#{form['sequence']}",
        cost="" if form["cost"] is None else text_of(form["cost"]),
        price=form["price"],
        key=form["key"],
        request="",
        note="",
        detail=json.dumps(expires) if expires else "",
        seal=form["seal"],
    )
    return history_entry(entry, form["principal"], form["note"])


@understood
def verification_of(form: Form) -> Verification:
    """Read what a replay found."""
    checkpoint = Checkpoint.from_dict(form["checkpoint"])
    return Verification(
        checkpoint,
        form["entries"],
        form["notes_erased"],
        form["principals_erased"],
        uncertified=tuple(form.get("uncertified", ())),  # a service of version 0.1 sends neither
        set_back=tuple(form.get("set_back", ())),
    )


def _time(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // _MICROSECOND
