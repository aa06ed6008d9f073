"""Steps of a population: everybody's filters are kept in files, and an entry says which of them are the current ones.

A population is an account that takes no charges of its own. Its first entry says where its files are and which folder
holds the first version; every step after that names the next. Whoever asks twice is answered by the key, and of two
who began from the same version one is first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from odograph.errors import AccountClosed, AccountNotFound, LedgerBusy, LedgerCorrupt, LedgerError
from odograph.ledger.commands import Author, Made, Outcome, keep_note, remember, repeated
from odograph.ledger.entries import Entry, stamp, text_of
from odograph.ledger.stores.base import Changes, IdempotencyRecord, State, Wants

__all__ = ["ACTS", "Pointer", "Step", "pointer_of", "population_of"]

ACTS: Final = ("charge", "join", "remove")


class Pointer(NamedTuple):
    """Which files are current: how many steps there were, and the folder's name."""

    version: int
    state: str


def population_of(entry: Entry) -> Mapping[str, Any] | None:
    """Return what an account's first entry says of its population; None if it is not one."""
    form = entry.details.get("population")
    if form is None:
        return None
    if not isinstance(form, dict) or not isinstance(form.get("state"), str):
        raise LedgerCorrupt(f"entry {entry.place}: its population cannot be read")
    return form


def pointer_of(entry: Entry) -> Pointer:
    """Return where the entry that opened a population, or a step of it, points to."""
    form = population_of(entry) if entry.verb == "open" else entry.details
    form = {} if form is None else form
    version, state = form.get("version", 0), form.get("state")
    if entry.verb not in ("open", "step") or not isinstance(version, int) or not isinstance(state, str):
        raise LedgerCorrupt(f"entry {entry.place} points to no version of a population")
    return Pointer(version, state)


class Step(NamedTuple):
    """Move a population on: what it was asked for was done in files that are on the disk already."""

    author: Author
    name: str
    origin: str  # of the account that was read
    before: int  # the sequence of the entry whose version the step began from
    request: str  # a digest that says nothing without the population's secret
    cost: str  # the guarantee as text, if everybody was asked for the same
    act: str
    pointer: Pointer

    @property
    def wants(self) -> Wants:
        """The population and the key."""
        return Wants(frozenset([self.name]), frozenset([(self.author.principal, self.author.key)]))

    def step(self, state: State, changes: Changes) -> Outcome:
        """Write the step if nobody else was first."""
        author, name = self.author, self.name
        hit = state.keys.get((author.principal, author.key))
        if hit is not None:
            return repeated(hit, author, self.request)
        balance = state.balances.get(name)
        if balance is None:
            raise AccountNotFound(f"there is no population {name!r} in this ledger; nothing was charged")
        if balance.origin != self.origin:
            raise LedgerError(f"{name!r} is no longer the population that was opened; open it again")
        if balance.closed:
            raise AccountClosed(f"{name!r} is closed and takes no new steps; nothing was charged")
        if balance.sequence != self.before:
            raise LedgerBusy(f"{name!r} was moved on by somebody else meanwhile; nothing was charged. Try again")
        detail = text_of({"act": self.act, **self.pointer._asdict()})
        note = keep_note(changes, balance, author)
        place = f"{name}#{balance.sequence + 1}"
        fields = ("step", place, self.cost, "", author.key, self.request, note, detail)
        entry = balance.write(stamp(state.now, [balance.time]), author.principal, fields)
        balance.totals = balance.totals._replace(steps=self.pointer.version)
        changes.moved[name] = balance
        changes.entries.append(entry)
        remember(
            state,
            changes,
            author.principal,
            author.key,
            IdempotencyRecord(name, entry.sequence, "step", self.request),
        )
        return Made((entry,))
