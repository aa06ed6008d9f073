"""The written form of an account in memory: entries and totals, checked against each other when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from odograph.core.compiled import Compiled, too_low
from odograph.core.gate import Price, Totals, decide
from odograph.core.guarantees import Guarantee, guarantee_from_dict

__all__ = [
    "Entry",
    "check_replay",
    "digest_of",
    "entry_from_dict",
    "entry_to_dict",
    "totals_from_dict",
    "totals_to_dict",
]


class Entry(NamedTuple):
    """One charge: the guarantee, its price as charged, a note, and the name of the account that asked."""

    guarantee: Guarantee
    price: Price
    note: str
    account: str


def digest_of(form: Mapping[str, Any]) -> str:
    """Return a check against damage and careless edits; it is not one against whoever can compute it again."""
    text = json.dumps(form, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def entry_to_dict(entry: Entry) -> dict[str, Any]:
    """Return the stored form of an entry."""
    amounts = [None if amount is None else str(amount) for amount in entry.price.amounts]
    return {
        "guarantee": entry.guarantee.to_dict(),
        "price": amounts,
        "note": entry.note,
        "account": entry.account,
    }


def totals_to_dict(totals: Totals) -> dict[str, Any]:
    """Return the stored form of totals; integers are text, because JSON numbers lose digits."""
    return {
        "amounts": [str(amount) for amount in totals.amounts],
        "unpriced": [str(count) for count in totals.unpriced],
        "steps": str(totals.steps),
    }


def totals_from_dict(form: Mapping[str, Any], meters: int) -> Totals:
    """Read what `totals_to_dict` wrote, or raise `ValueError`."""
    totals = Totals(
        tuple(_whole(amount) for amount in form["amounts"]),
        tuple(_whole(count) for count in form["unpriced"]),
        _whole(form["steps"]),
    )
    if not len(totals.amounts) == len(totals.unpriced) == meters:
        raise ValueError("the totals are of other meters than the policy's")
    return totals


def entry_from_dict(form: Mapping[str, Any], compiled: Compiled) -> Entry:
    """Read what `entry_to_dict` wrote, or raise `ValueError` if its price is too low."""
    guarantee = guarantee_from_dict(form["guarantee"])
    stored = Price(tuple(None if amount is None else _whole(amount) for amount in form["price"]))
    if too_low(stored, compiled.price(guarantee)):
        raise ValueError(f"{guarantee} is written with a lower price than it has")
    return Entry(guarantee, stored, str(form["note"]), str(form["account"]))


def check_replay(compiled: Compiled, totals: Totals, entries: Sequence[Entry]) -> None:
    """Raise unless the entries add up to the totals, or, where only some were kept, could be the last of them."""
    dropped = totals.steps - len(entries)
    if dropped < 0:
        raise ValueError("there are more entries than steps")
    replayed = compiled.start
    if dropped:
        replayed = Totals(
            tuple(
                total - sum(entry.price.amounts[i] or 0 for entry in entries)
                for i, total in enumerate(totals.amounts)
            ),
            tuple(
                count - sum(entry.price.amounts[i] is None for entry in entries)
                for i, count in enumerate(totals.unpriced)
            ),
            dropped,
        )
        if min(*replayed.amounts, *replayed.unpriced) < 0:
            raise ValueError("the entries add up to more than the totals")
    for entry in entries:
        decision = decide(compiled.meters, replayed, entry.price)
        if not decision.admitted or decision.price != entry.price:
            raise ValueError(f"{entry.guarantee} would not have been admitted")
        replayed = decision.totals_after
    if replayed != totals:
        raise ValueError("the entries do not add up to the totals")
    free = Price((0,) * len(compiled.meters))
    if totals.steps and not decide(compiled.meters, totals, free).admitted:
        raise ValueError("the totals are past the limits")


def _whole(text: object) -> int:
    if not isinstance(text, str) or not text.isdecimal():
        raise ValueError(f"a total is written in digits, not as {text!r}")
    return int(text)
