"""Open and close: the verbs that change which accounts there are. Pure steps, as those of `requests`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from odograph.core.compiled import Compiled
from odograph.core.policy import Policy
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    InvalidPolicy,
    LedgerCorrupt,
    OdographError,
    explain,
)
from odograph.ledger.commands import Author, Made, Outcome, keep_note, remember, repeated, time_of
from odograph.ledger.entries import START, Entry, digest_of, text_of
from odograph.ledger.stores.base import Balance, Changes, Head, IdempotencyRecord, State, Wants

__all__ = ["Close", "Open", "opening_of"]

_WORDS_OF_0_1: Final = {"privacy_unit": "unit", "neighbors": "neighbours"}


def opening_of(entry: Entry) -> tuple[Head, Compiled]:
    """Read what `Open` wrote: an account's place and its policy, or raise `LedgerCorrupt`."""
    try:
        form = entry.details
        words = _WORDS_OF_0_1 if form["compiled"].get("form") == 1 else {}
        return Head(*(form[words.get(name, name)] for name in Head._fields)), Compiled.from_dict(form["compiled"])
    except (OdographError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise LedgerCorrupt(f"entry {entry.place}: its policy cannot be read ({explain(problem)})") from problem


class Open(NamedTuple):
    """Open an account: the compiled policy is its first entry."""

    author: Author
    head: Head
    compiled: Compiled
    population: Mapping[str, Any] | None = None  # where the filters of its people are, if it is one

    @property
    def detail(self) -> str:
        """The document that the account is read from for ever after."""
        form = {**self.head._asdict(), "compiled": self.compiled.to_dict()}
        return text_of(form if self.population is None else form | {"population": {**self.population}})

    @property
    def digest(self) -> str:
        """The policy as it was asked for, not as it was compiled: a later version may compile it otherwise."""
        return self._digest(self.compiled.policy)

    def _digest(self, policy: Policy) -> str:
        # In the words of 0.1.0, so that a key that was used then finds the same request.
        head = {_WORDS_OF_0_1.get(name, name): value for name, value in self.head._asdict().items()}
        asked = text_of({**head, "policy": policy.to_form_1()})
        return digest_of("open", ((self.head.name, asked),))

    def _same_in_0_1(self, hit: IdempotencyRecord) -> bool:
        """Say whether the key was used for the same request in 0.1.0, which had another default odometer."""
        policy = self.compiled.policy.with_first_default()
        return policy is not None and hit.request == self._digest(policy)

    @property
    def wants(self) -> Wants:
        """The account itself, its relatives, and a block of the same dataset."""
        head = self.head
        names = frozenset(filter(None, (head.name, head.parent, head.successor_of)))
        datasets = frozenset(filter(None, [head.dataset]))
        keys = frozenset([(self.author.principal, self.author.key)])
        return Wants(names, keys, datasets=datasets, opens=True)

    def step(self, state: State, changes: Changes) -> Outcome:
        """Open the account, if its name is free and its relatives protect the same."""
        head, request = self.head, self.digest
        hit = state.keys.get((self.author.principal, self.author.key))
        if hit is not None:
            asked = hit.request if hit.request != request and self._same_in_0_1(hit) else request
            return repeated(hit, self.author, asked, "open" if self.population is None else "")
        if head.name in state.balances:
            raise AccountExists(
                f"there is an account {head.name!r} already: use ledger.account({head.name!r}). A new policy is a new"
                f" account, opened with successor_of={head.name!r}"
            )
        for relative in filter(None, (head.parent, head.successor_of)):
            if relative not in state.balances:
                raise AccountNotFound(f"there is no account {relative!r}, so {head.name!r} was not opened")
        if head.parent and state.balances[head.parent].closed:
            raise AccountClosed(f"{head.parent!r} is closed, so nothing can be opened below it")
        for other in state.balances.values():
            same_dataset = head.dataset and other.head.dataset == head.dataset
            if same_dataset or other.head.name in {head.parent, head.successor_of}:
                _check_unit(head, other.head)
        balance = Balance(head, -1, START, 0, self.compiled.start, closed=False, linked=bool(head.successor_of))
        if head.successor_of:
            before = changes.moved[head.successor_of] = state.balances[head.successor_of]
            before.linked = True
        author = self.author
        note = keep_note(changes, balance, author)
        place = f"{head.name}#0"
        fields = ("open", place, "", "", author.key, request, note, self.detail)
        entry = balance.write(state.now, author.principal, fields)
        balance.origin = entry.seal
        state.balances[head.name] = balance
        changes.opened.append(balance)
        changes.entries.append(entry)
        remember(state, changes, author.principal, author.key, IdempotencyRecord(head.name, 0, "open", request))
        return Made((entry,))


class Close(NamedTuple):
    """Close an account and everything below it; closing what is closed changes nothing."""

    author: Author
    name: str

    @property
    def wants(self) -> Wants:
        """The account and everything below it."""
        return Wants(trees=frozenset([self.name]), opens=True)

    def step(self, state: State, changes: Changes) -> Outcome:
        """Close from the top down; reservations stay as they are."""
        if self.name not in state.balances:
            raise AccountNotFound(f"there is no account {self.name!r} in this ledger")
        below = [self.name]
        for name in below:
            below += sorted(b.head.name for b in state.balances.values() if b.head.parent == name)
        request = digest_of("close", ((self.name, ""),))
        written: list[Entry] = []
        author = self.author
        for balance in (state.balances[name] for name in below):
            if balance.closed:
                continue
            time = time_of(state, [[balance.head.name]])
            note = keep_note(changes, balance, author) if balance.head.name == self.name else ""
            place = f"{balance.head.name}#{balance.sequence + 1}"
            fields = ("close", place, "", "", "", request, note, "")
            written.append(balance.write(time, author.principal, fields))
            balance.closed = True
            changes.moved[balance.head.name] = balance
        changes.entries += written
        return Made(tuple(written))


def _check_unit(own: Head, other: Head) -> None:
    if (own.privacy_unit, own.neighbors) != (other.privacy_unit, other.neighbors):
        raise InvalidPolicy(
            f"{own.name!r} must protect the same privacy unit and neighbors as {other.name!r}:"
            f" {other.privacy_unit!r}, {other.neighbors!r}, not {own.privacy_unit!r}, {own.neighbors!r}; it"
            " was not opened"
        )
