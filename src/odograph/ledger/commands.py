"""The writing verbs as pure steps: each looks at the state of a transaction and moves it on, or changes nothing.

Every store runs the same steps in the order of arrival, so every store decides identically. The gate is asked here,
with totals that were read inside the transaction, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeAlias

from odograph.core.compiled import Compiled
from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.errors import (
    AccountClosed,
    AccountNotFound,
    IdempotencyConflict,
    LedgerError,
    OdographError,
    OutcomeUnknown,
    ReservationResolved,
)
from odograph.ledger.entries import (
    Entry,
    Leg,
    digest_of,
    moment,
    note_digest,
    price_from_text,
    price_to_text,
    stamp,
    text_of,
)
from odograph.ledger.stores.base import ERASED, Balance, Changes, IdempotencyRecord, Note, State, Wants

__all__ = [
    "Ask",
    "Author",
    "Charge",
    "Made",
    "Outcome",
    "Refused",
    "Repeated",
    "Request",
    "Resolve",
    "Settled",
    "Stop",
    "keep_note",
    "remember",
    "repeated",
    "settled",
    "time_of",
]


_ASKED: Final = attrgetter("asked")


class Made(NamedTuple):
    """The request was carried out: the entries of the accounts that were asked; those above them have more."""

    own: tuple[Entry, ...]
    linked: tuple[str, ...] = ()  # those of the accounts that have predecessors or successors


class Repeated(NamedTuple):
    """The same request was carried out before, under the same key."""

    hit: IdempotencyRecord


class Refused(NamedTuple):
    """The request did not fit: which leg, the refusal of which account, and the totals that were read."""

    leg: int
    decision: Decision
    totals: dict[str, Totals]


# What became of a request, if that was no error.
Settled: TypeAlias = Made | Repeated | Refused
Outcome: TypeAlias = Settled | OdographError


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
    origin: str  # the account that it was priced for


class Ask(NamedTuple):
    """What is asked of one account: the guarantee, and the stops from the top down to the account."""

    asked: tuple[str, str]  # the account, and the guarantee as it is written
    cost: Guarantee
    stops: tuple[Stop, ...]
    names: frozenset[str]  # of the stops


class Charge(NamedTuple):
    """Spend or reserve: charge every stop of every leg, all or nothing.

    This is what every spend runs, between waiting for the disk and waiting for it again, when nothing of it is in the
    processor's caches. So it is written in plain loops: a call here takes several times as long as elsewhere.

    Theorem: several accounts at once: each account on the way keeps its promise about what was charged to it.
    Assumes: each cost bounds the mechanism for one person's data in that account, and nobody's are in two of them.
    """

    author: Author
    verb: str
    asks: tuple[Ask, ...]
    expires: int | None = None  # microseconds from now

    @property
    def wants(self) -> Wants:
        """Every account on the way, and the key."""
        asks, author = self.asks, self.author
        names = asks[0].names if len(asks) == 1 else frozenset[str]().union(*[ask.names for ask in asks])
        return Wants(names, frozenset([(author.principal, author.key)]))

    def step(self, state: State, changes: Changes) -> Outcome:
        """Charge, or record the refusal; a refusal leaves the key free."""
        author, verb, asks, _ = self
        request = digest_of(verb, tuple(map(_ASKED, asks)))
        hit = state.keys.get((author.principal, author.key))
        if hit is not None:
            return repeated(hit, author, request)
        balances = state.balances
        after: dict[str, Totals] = {}
        prices: list[str] = []
        for ask in asks:
            for stop in ask.stops:
                balance = balances.get(stop.name)
                if balance is None or balance.closed or balance.origin != stop.origin:
                    raise _unable(balance, stop)
        for i, ask in enumerate(asks):
            for name, compiled, price, text, _ in ask.stops:
                totals = after[name] if name in after else balances[name].totals
                decision = decide(compiled.meters, totals, price, ask.cost)
                if not decision.admitted:
                    refused = Refused(i, decision._replace(account=name), _totals(state, asks))
                    self._record(state, changes, request, name)
                    return refused
                after[name] = decision.totals_after
                # As charged: without what would have passed the ceiling.
                prices.append(text if decision.price is price else price_to_text(decision.price))
        for name, totals in after.items():
            balances[name].totals = totals
        return self._write(state, changes, request, prices)

    def _write(self, state: State, changes: Changes, request: str, prices: list[str]) -> Made:
        author, verb, asks, expires = self
        balances, time = state.balances, state.now
        later: list[int] = []
        following: dict[str, int] = {}
        places: list[str] = []
        for ask in asks:
            leg: list[str] = []
            for stop in ask.stops:
                name, balance = stop.name, balances[stop.name]
                if balance.time > time:
                    later.append(balance.time)
                following[name] = number = following.get(name, balance.sequence) + 1
                leg.append(f"{name}#{number}")
            leg.reverse()
            places.append("/".join(leg))
        legs = " ".join(places)
        if later:
            time = stamp(time, later)  # one time for all the entries of a request
        detail = "" if expires is None else text_of({"expires": str(time + expires)})
        own: list[Entry] = []
        linked: list[str] = []
        written = iter(prices)
        for ask in asks:
            account, text = ask.asked
            for stop in ask.stops:
                balance = changes.moved[stop.name] = balances[stop.name]
                note = keep_note(changes, balance, author) if author.note and stop.name == account else ""
                fields = (verb, legs, text, next(written), author.key, request, note, detail)
                entry = balance.write(time, author.principal, fields)
                changes.entries.append(entry)
            own.append(entry)
            if balance.linked:
                linked.append(account)
        used = (author.principal, author.key)
        changes.keys[used] = state.keys[used] = IdempotencyRecord(own[0].account, own[0].sequence, verb, request)
        return Made(tuple(own), tuple(linked))

    def _record(self, state: State, changes: Changes, request: str, refuser: str) -> None:
        """Write the refusal into the history of each account that was asked; it costs nothing."""
        paths = [[ask.asked[0]] for ask in self.asks]
        time, legs = time_of(state, paths), _legs(state, paths)
        detail = text_of({"refused_by": refuser, "verb": self.verb})
        for ask in self.asks:
            account, text = ask.asked
            balance = changes.moved[account] = state.balances[account]
            note = keep_note(changes, balance, self.author)
            fields = ("refuse", legs, text, ask.stops[-1].text, self.author.key, request, note, detail)
            changes.entries.append(balance.write(time, self.author.principal, fields))


class Resolve(NamedTuple):
    """Commit or void a reservation: void takes back what was charged, and means that the mechanism was not run.

    Theorem: reservations: a step that never happened costs nothing, so its price may be taken back exactly.
    Assumes: whoever voids did not run the mechanism.
    """

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
        time = time_of(state, paths)
        expires = self.reserved[0].expires
        # By the latest of the times, even if the clock has been set back since: it may have run by then.
        latest = max(time, *[state.balances[entry.account].time for entry in self.reserved])
        if self.verb == "void" and expires is not None and latest > expires:
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
            note = keep_note(changes, balance, author) if is_own else ""
            fields = (self.verb, legs, before.cost, before.price, author.key, request, note, "")
            entry = balance.write(time, author.principal, fields)
            changes.entries.append(entry)
            changes.moved[before.account] = balance
            if is_own:
                own.append(entry)
        remember(
            state, changes, "", author.key, IdempotencyRecord(own[0].account, own[0].sequence, self.verb, request)
        )
        return Made(tuple(own), tuple(name for name, _ in asked if state.balances[name].linked))


def settled(author: Author, outcome: Outcome) -> Settled:
    """Return what became of a request, or raise its error; an unknown outcome names the key to ask again with."""
    if isinstance(outcome, OutcomeUnknown):
        raise OutcomeUnknown(outcome.message, key=author.key, charged=outcome.charged) from outcome
    if isinstance(outcome, OdographError):
        raise outcome
    return outcome


def repeated(hit: IdempotencyRecord, author: Author, request: str, verb: str = "") -> Repeated:
    """Answer a key that was used before, or raise `IdempotencyConflict` if that was for another request."""
    if hit.request == ERASED:
        raise IdempotencyConflict(
            f"key {author.key!r} was used before, by a principal whose name was erased, or since yours was"
            f" ({hit.verb}, {hit.account}#{hit.sequence}); nothing was charged. If that was this request, it is"
            " written there; another one needs another key"
        )
    if hit.request != request:
        if hit.verb == verb == "open":
            raise IdempotencyConflict(
                f"key {author.key!r} opened {hit.account!r} before, with another name, policy, parent, successor_of"
                f" or dataset; nothing was opened. Use ledger.account({hit.account!r}), or another name and key"
            )
        raise IdempotencyConflict(
            f"key {author.key!r} was used before for another request ({hit.verb}, {hit.account}#{hit.sequence});"
            " nothing was charged. The same key must come with the same verb, accounts and guarantees"
        )
    return Repeated(hit)


def _unable(balance: Balance | None, stop: Stop) -> OdographError:
    if balance is None:
        return AccountNotFound(f"there is no account {stop.name!r} in this ledger; nothing was charged")
    if balance.origin != stop.origin:
        return LedgerError(
            f"{stop.name!r} is no longer the account that was opened; connect again. Nothing was charged"
        )
    return AccountClosed(f"{stop.name!r} is closed and takes no new charges; nothing was charged")


def _totals(state: State, asks: Sequence[Ask]) -> dict[str, Totals]:
    return {stop.name: state.balances[stop.name].totals for ask in asks for stop in ask.stops}


def time_of(state: State, paths: Sequence[Sequence[str]]) -> int:
    """Return one time for all the entries of a request: the store's, or the last entry's where that is later."""
    return stamp(state.now, [state.balances[name].time for path in paths for name in path])


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


def keep_note(changes: Changes, balance: Balance, author: Author) -> str:
    """Keep the note beside the entry that the account will write next; return what the entry says of it."""
    if not author.note:
        return ""
    changes.notes.append(Note(balance.head.name, balance.sequence + 1, author.salt, author.note))
    return note_digest(author.salt, author.note)


def remember(state: State, changes: Changes, owner: str, key: str, hit: IdempotencyRecord) -> None:
    """Use a key up, for the requests behind this one and for ever."""
    state.keys[owner, key] = hit
    changes.keys[owner, key] = hit
