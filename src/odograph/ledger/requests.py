"""The writing verbs as pure steps: each looks at the state of a transaction and moves it on, or changes nothing.

Every store runs the same steps in the order of arrival, so every store decides identically. The gate is asked here,
with totals that were read inside the transaction, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from odograph.core.compiled import Compiled
from odograph.core.decide import Decision, Price, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    IdempotencyConflict,
    InvalidPolicy,
    OdographError,
    ReservationResolved,
)
from odograph.ledger.entries import (
    START,
    Entry,
    Leg,
    digest_of,
    moment,
    note_digest,
    price_from_text,
    price_to_text,
    text_of,
)
from odograph.ledger.store import Balance, Changes, Head, Hit, Note, State, Wants

__all__ = ["Ask", "Author", "Charge", "Close", "Made", "Open", "Outcome", "Refused", "Repeated", "Request", "Resolve"]


class Made(NamedTuple):
    """The request was carried out: the entries of the accounts that were asked; those above them have more."""

    own: tuple[Entry, ...]


class Repeated(NamedTuple):
    """The same request was carried out before, under the same key."""

    hit: Hit


class Refused(NamedTuple):
    """The request did not fit: which leg, the refusal of which account, and the totals that were read."""

    leg: int
    decision: Decision
    totals: dict[str, Totals]


Outcome: TypeAlias = Made | Repeated | Refused | OdographError


class Author(NamedTuple):
    """Who writes, under which key, with which note: the part that all requests have in common."""

    principal: str
    key: str
    note: str = ""
    salt: str = ""


class Request(Protocol):
    """A writing verb with everything it needs; what it reads is wanted, what it does is one step."""

    @property
    def author(self) -> Author:
        """Who asks."""
        ...

    @property
    def wants(self) -> Wants:
        """What must be read and locked."""
        ...

    def step(self, state: State, changes: Changes) -> Outcome:
        """Carry the request out on the state and add to the changes, or raise and leave both as they were."""
        ...


class Stop(NamedTuple):
    """One account on the way of a charge, and what it is to be charged."""

    name: str
    compiled: Compiled
    price: Price
    text: str  # the price, written


class Ask(NamedTuple):
    """What is asked of one account: the guarantee, and the stops from the top down to the account."""

    name: str
    cost: Guarantee
    text: str  # the guarantee, written
    stops: tuple[Stop, ...]


class Charge(NamedTuple):
    """Spend or reserve: charge every stop of every leg, all or nothing."""

    author: Author
    verb: str
    asks: tuple[Ask, ...]
    expires: int | None = None  # microseconds from now

    @property
    def digest(self) -> str:
        """What the same key must come with."""
        return digest_of(self.verb, tuple([(ask.name, ask.text) for ask in self.asks]))

    @property
    def wants(self) -> Wants:
        """Every account on the way, and the key."""
        names = frozenset([stop.name for ask in self.asks for stop in ask.stops])
        return Wants(names, frozenset([(self.author.principal, self.author.key)]))

    def step(self, state: State, changes: Changes) -> Outcome:
        """Charge, or record the refusal; a refusal leaves the key free."""
        request = self.digest
        hit = _known(state, self.author, request)
        if hit is not None:
            return Repeated(hit)
        balances = state.balances
        for ask in self.asks:
            for stop in ask.stops:
                _check_open(balances.get(stop.name), stop.name)
        after: dict[str, Totals] = {}
        prices: list[str] = []
        for i, ask in enumerate(self.asks):
            for name, compiled, price, text in ask.stops:
                totals = after[name] if name in after else balances[name].totals
                decision = decide(compiled.meters, totals, price, ask.cost)
                if not decision.admitted:
                    refused = Refused(i, decision._replace(account=name), _totals(state, self.asks))
                    self._record(state, changes, request, name)
                    return refused
                after[name] = decision.totals_after
                # As charged: without what would have passed the ceiling.
                prices.append(text if decision.price is price else price_to_text(decision.price))
        for name, totals in after.items():
            balances[name].totals = totals
        return self._write(state, changes, request, prices)

    def _write(self, state: State, changes: Changes, request: str, prices: list[str]) -> Made:
        author, verb, balances = self.author, self.verb, state.balances
        paths = [[stop.name for stop in ask.stops] for ask in self.asks]
        time = _time(state, paths)
        legs = _legs(state, paths)
        detail = "" if self.expires is None else text_of({"expires": str(time + self.expires)})
        own: list[Entry] = []
        following = iter(prices)
        for ask, path in zip(self.asks, paths, strict=True):
            for name in path:
                balance = balances[name]
                note = _note(changes, balance, author) if author.note and name == ask.name else ""
                fields = (verb, legs, ask.text, next(following), author.key, request, note, detail)
                entry = balance.write(time, author.principal, fields)
                changes.entries.append(entry)
                changes.moved[name] = balance
            own.append(entry)
        hit = Hit(own[0].account, own[0].sequence, verb, request)
        _remember(state, changes, author.principal, author.key, hit)
        return Made(tuple(own))

    def _record(self, state: State, changes: Changes, request: str, refuser: str) -> None:
        """Write the refusal into the history of each account that was asked; it costs nothing."""
        paths = [[ask.name] for ask in self.asks]
        time, legs = _time(state, paths), _legs(state, paths)
        detail = text_of({"refused_by": refuser, "verb": self.verb})
        for ask in self.asks:
            balance = state.balances[ask.name]
            note = _note(changes, balance, self.author)
            fields = ("refuse", legs, ask.text, ask.stops[-1].text, self.author.key, request, note, detail)
            changes.entries.append(balance.write(time, self.author.principal, fields))
            changes.moved[ask.name] = balance


class Resolve(NamedTuple):
    """Commit or void a reservation: void takes back what was charged, and means that the mechanism was not run."""

    author: Author  # its key is the reservation's place
    verb: str
    reserved: tuple[Entry, ...]  # every entry of the reservation, in the order in which they were written
    legs: tuple[Leg, ...]

    @property
    def wants(self) -> Wants:
        """Every account that the reservation charged, and whether it was resolved."""
        return Wants(frozenset(entry.account for entry in self.reserved), frozenset([("", self.author.key)]))

    def step(self, state: State, changes: Changes) -> Outcome:
        """Resolve the reservation once; the same again is the same, the other way round is an error."""
        request = digest_of(self.verb, ((self.author.key, ""),))
        hit = state.keys.get(("", self.author.key))
        if hit is not None:
            if hit.verb == self.verb:
                return Repeated(hit)
            done = "committed" if hit.verb == "commit" else "voided"
            raise ReservationResolved(
                f"reservation {self.author.key} was {done} before, by {hit.account}#{hit.sequence}"
            )
        paths = [[name for name, _ in reversed(leg.places)] for leg in self.legs]
        time = _time(state, paths)
        expires = self.reserved[0].expires
        if self.verb == "void" and expires is not None and time > expires:
            raise ReservationResolved(
                f"reservation {self.author.key} expired at {moment(expires):%Y-%m-%d %H:%M:%S} UTC: its"
                " mechanism may have run, so it can be committed and no longer voided"
            )
        legs = _legs(state, paths)
        author = self.author
        asked = {leg.own for leg in self.legs}
        own: list[Entry] = []
        for before in self.reserved:
            balance = state.balances[before.account]
            if self.verb == "void":
                balance.totals = balance.totals.without(price_from_text(before.price))
            is_own = (before.account, before.sequence) in asked
            note = _note(changes, balance, author) if is_own else ""
            fields = (self.verb, legs, before.cost, before.price, author.key, request, note, "")
            entry = balance.write(time, author.principal, fields)
            changes.entries.append(entry)
            changes.moved[before.account] = balance
            if is_own:
                own.append(entry)
        _remember(state, changes, "", author.key, Hit(own[0].account, own[0].sequence, self.verb, request))
        return Made(tuple(own))


class Open(NamedTuple):
    """Open an account: the compiled policy is its first entry."""

    author: Author
    head: Head
    compiled: Compiled

    @property
    def detail(self) -> str:
        """The document that the account is read from for ever after."""
        return text_of({**self.head._asdict(), "compiled": self.compiled.to_dict()})

    @property
    def digest(self) -> str:
        """The policy as it was asked for, not as it was compiled: a later version may compile it otherwise."""
        asked = text_of({**self.head._asdict(), "policy": self.compiled.policy.to_dict()})
        return digest_of("open", ((self.head.name, asked),))

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
        hit = _known(state, self.author, request)
        if hit is not None:
            return Repeated(hit)
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
        balance = Balance(head, -1, START, 0, self.compiled.start, closed=False)
        author = self.author
        note = _note(changes, balance, author)
        place = f"{head.name}#0"
        fields = ("open", place, "", "", author.key, request, note, self.detail)
        entry = balance.write(state.now, author.principal, fields)
        state.balances[head.name] = balance
        changes.opened.append(balance)
        changes.entries.append(entry)
        _remember(state, changes, author.principal, author.key, Hit(head.name, 0, "open", request))
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
            time = _time(state, [[balance.head.name]])
            note = _note(changes, balance, author) if balance.head.name == self.name else ""
            place = f"{balance.head.name}#{balance.sequence + 1}"
            fields = ("close", place, "", "", "", request, note, "")
            written.append(balance.write(time, author.principal, fields))
            balance.closed = True
            changes.moved[balance.head.name] = balance
        changes.entries += written
        return Made(tuple(written))


def _known(state: State, author: Author, request: str) -> Hit | None:
    hit = state.keys.get((author.principal, author.key))
    if hit is not None and hit.request != request:
        raise IdempotencyConflict(
            f"key {author.key!r} was used before for another request ({hit.verb}, {hit.account}#{hit.sequence});"
            " nothing was charged. The same key must come with the same verb, accounts and guarantees"
        )
    return hit


def _check_open(balance: Balance | None, name: str) -> None:
    if balance is None:
        raise AccountNotFound(f"there is no account {name!r} in this ledger; nothing was charged")
    if balance.closed:
        raise AccountClosed(f"{name!r} is closed and takes no new charges; nothing was charged")


def _totals(state: State, asks: Sequence[Ask]) -> dict[str, Totals]:
    return {stop.name: state.balances[stop.name].totals for ask in asks for stop in ask.stops}


def _time(state: State, paths: Sequence[Sequence[str]]) -> int:
    """The store's time, or the last entry's where that is later: one time for all the entries of a request."""
    return max(state.now, *[state.balances[name].time for path in paths for name in path])


def _legs(state: State, paths: Sequence[Sequence[str]]) -> str:
    """Write where the next entries will be: an account that two legs pass gets two entries."""
    following: dict[str, int] = {}
    legs = []
    for path in paths:
        places = []
        for name in path:
            following[name] = number = following.get(name, state.balances[name].sequence) + 1
            places.append(f"{name}#{number}")
        legs.append("/".join(reversed(places)))
    return " ".join(legs)


def _note(changes: Changes, balance: Balance, author: Author) -> str:
    """Keep the note beside the entry that the account will write next; return what the entry says of it."""
    if not author.note:
        return ""
    changes.notes.append(Note(balance.head.name, balance.sequence + 1, author.salt, author.note))
    return note_digest(author.salt, author.note)


def _remember(state: State, changes: Changes, owner: str, key: str, hit: Hit) -> None:
    state.keys[owner, key] = hit
    changes.keys[owner, key] = hit


def _check_unit(own: Head, other: Head) -> None:
    if (own.unit, own.neighbours) != (other.unit, other.neighbours):
        raise InvalidPolicy(
            f"{own.name!r} must protect the same unit and neighbours as {other.name!r}: {other.unit!r},"
            f" {other.neighbours!r}, not {own.unit!r}, {own.neighbours!r}; it was not opened"
        )
