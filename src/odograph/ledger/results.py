"""What the verbs answer: receipts, history as people read it, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from odograph.core.guarantees import Guarantee
from odograph.errors import LedgerCorrupt, explain
from odograph.ledger.entries import Entry, checkpoint_of, iso_time, moment
from odograph.ledger.lifetimes import Lifetime

__all__ = ["Checkpoint", "Line", "Past", "Receipt", "Verification"]

_FORM = 1


class Line(NamedTuple):
    """One account's part of a receipt."""

    account: str
    sequence: int
    cost: Guarantee
    seal: str


# One is made at every spend, hence a tuple with names: a frozen dataclass takes four times as long.
class Receipt(NamedTuple):
    """A durable charge. It pays for one run of the mechanism, whoever shows it and how often.

    `repeated` says that the same key was used before: this is the first receipt again, and nothing was charged now.
    `uncertified` names the accounts whose limits the installation that wrote it has not certified.
    """

    verb: str
    key: str
    written: int  # microseconds since 1970, by the store's clock
    lines: tuple[Line, ...]
    voidable_until: int | None  # the same, for a reservation that expires
    lifetimes: tuple[Lifetime, ...]
    repeated: bool
    uncertified: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """What the ledger calls it: `account#sequence` of the first account."""
        return f"{self.lines[0].account}#{self.lines[0].sequence}"

    @property
    def time(self) -> datetime:
        """When it was written, by the store's clock."""
        return moment(self.written)

    @property
    def expires(self) -> datetime | None:
        """Until when a reservation can be voided; None if always, or if this is no reservation."""
        return None if self.voidable_until is None else moment(self.voidable_until)

    def __eq__(self, other: object) -> bool:
        # The first receipt again is equal to the first, though a successor may have been opened since.
        return isinstance(other, Receipt) and self[:5] == other[:5]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:5])

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt in plain types."""
        return {
            "id": self.id,
            "verb": self.verb,
            "key": self.key,
            "time": iso_time(self.written),
            "accounts": [
                {"account": line.account, "sequence": line.sequence, "cost": line.cost.to_dict(), "seal": line.seal}
                for line in self.lines
            ],
            "expires": None if self.voidable_until is None else iso_time(self.voidable_until),
            "lifetimes": [lifetime.to_dict() for lifetime in self.lifetimes],
            "repeated": self.repeated,
            "uncertified": [*self.uncertified],
        }

    def __str__(self) -> str:
        done = {"spend": "spent", "reserve": "reserved", "commit": "committed", "void": "voided"}[self.verb]
        costs = ", ".join(f"{line.cost} of {line.account}" for line in self.lines)
        again = " before, nothing was charged now" if self.repeated else ""
        promise = "".join(f"; lifetime promise {lifetime}" for lifetime in self.lifetimes)
        unsure = f"; limits not certified here: {', '.join(self.uncertified)}" if self.uncertified else ""
        return f"{done}{again}: {costs}; entry {self.id}, key {self.key}{promise}{unsure}"


class Past(NamedTuple):
    """An entry as people read it: with the principal's name and the note, or `erased` in their place."""

    entry: Entry
    principal: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in plain types; `sealed` has the exact strings under its seal."""
        entry = self.entry
        return {
            "sequence": entry.sequence,
            "time": iso_time(entry.time),
            "verb": entry.verb,
            "cost": json.loads(entry.cost) if entry.cost else None,
            "price": entry.price,
            "principal": self.principal,
            "key": entry.key,
            "note": self.note,
            "expires": None if entry.expires is None else iso_time(entry.expires),
            "seal": entry.seal,
            "sealed": {field: str(value) for field, value in entry._asdict().items()},
        }


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where every account stood: kept elsewhere, it shows that nothing was removed or rewritten since.

    `head` is one hash over all of it: enough to keep on paper, and to check this document by.
    """

    accounts: Mapping[str, tuple[int, str]]  # the last sequence and its seal, by name

    @property
    def head(self) -> str:
        """One hash over every account's name, sequence and seal."""
        return checkpoint_of((name, *place) for name, place in self.accounts.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `from_dict` reads."""
        places = {name: [str(sequence), seal] for name, (sequence, seal) in sorted(self.accounts.items())}
        return {"form": _FORM, "head": self.head, "accounts": places}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Checkpoint:
        """Read what `to_dict` wrote; anything else raises `LedgerCorrupt`."""
        try:
            if form["form"] != _FORM:
                raise LedgerCorrupt(f"not a checkpoint of form {_FORM}")
            found = cls({str(name): (int(number), str(seal)) for name, (number, seal) in form["accounts"].items()})
            intact = found.head == form["head"]
        except (AttributeError, LookupError, TypeError, ValueError) as problem:
            raise LedgerCorrupt(f"not a checkpoint of form {_FORM}: {explain(problem)}") from problem
        if not intact:
            raise LedgerCorrupt("the checkpoint's own hash does not fit its content: it was damaged or changed")
        return found

    def __str__(self) -> str:
        return self.head


@dataclass(frozen=True, slots=True)
class Verification:
    """What a whole replay found in order.

    `uncertified` names the accounts whose limits this installation has not certified: their entries follow from each
    other, and whether the limits keep the promise is not known here.
    """

    checkpoint: Checkpoint
    entries: int
    notes_erased: int
    principals_erased: int
    uncertified: tuple[str, ...] = ()  # accounts whose limits nothing in this installation certifies
    set_back: tuple[str, ...] = ()  # entries whose time is over an hour before that of the entry before them

    def to_dict(self) -> dict[str, Any]:
        """Return what the replay found, in plain types."""
        return {
            "verified": True,
            "entries": self.entries,
            "accounts": len(self.checkpoint.accounts),
            "notes_erased": self.notes_erased,
            "principals_erased": self.principals_erased,
            "set_back": [*self.set_back],
            "checkpoint": self.checkpoint.to_dict(),
            "uncertified": [*self.uncertified],
        }

    def __str__(self) -> str:
        erased = [
            f"{count} {what}{'s' * (count != 1)} erased"
            for count, what in ((self.notes_erased, "note"), (self.principals_erased, "principal name"))
            if count
        ]
        accounts = len(self.checkpoint.accounts)
        counts = (
            f"{self.entries} entr{'ies' if self.entries != 1 else 'y'} of {accounts} account{'s' * (accounts != 1)}"
        )
        found = [f"verified: {counts} follow from each other and add up", *erased]
        if self.uncertified:
            found.append(f"limits not certified here: {', '.join(self.uncertified)}")
        if self.set_back:
            found.append(
                f"the clock was set back before {self.set_back[0]}"
                + (f" and {len(self.set_back) - 1} more" if len(self.set_back) > 1 else "")
                + ": times before or after it are wrong"
            )
        return ", ".join(found)
