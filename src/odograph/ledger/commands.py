"""The writing verbs as commands: each looks at the state of a transaction and moves it on, or changes nothing. Pure.

Every store applies the same commands in the order of arrival, so every store decides identically. The gate is asked
here, with totals that were read inside the transaction, and nowhere else. A command can be pickled: the process that
asks need not be the one that writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.core.policy import Compiled, Policy
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    IdempotencyConflict,
    InvalidPolicy,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    OdographError,
    ReservationResolved,
    explain,
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
    stamp,
    text_of,
)
from odograph.ledger.stores.base import ERASED, Balance, Changes, Head, IdempotencyRecord, Note, State, Wants

__all__ = [
    "POPULATION_ACTS",
    "Ask",
    "Author",
    "Charge",
    "ChargeTarget",
    "Close",
    "Command",
    "Made",
    "MovePopulation",
    "Open",
    "Outcome",
    "Pointer",
    "Refused",
    "Repeated",
    "Resolve",
    "Result",
    "check_repeated",
    "read_opening",
    "read_pointer",
    "read_population",
]

POPULATION_ACTS: Final = ("charge", "join", "remove", "retire")
_ASKED: Final = attrgetter("asked")
# Every charge makes some named tuples, and their own constructors take twice as long as the tuple's.
_named: Final = tuple.__new__
_WORDS_OF_0_1: Final = {"privacy_unit": "unit", "neighbors": "neighbours"}


class Made(NamedTuple):
    """The command was carried out: the entries of the accounts that were asked; those above them have more."""

    own: tuple[Entry, ...]
    linked: tuple[str, ...] = ()  # those of the accounts that have predecessors or successors
    decision: Decision | None = None  # of the account that was asked last, for a charge
    before: dict[str, Totals] | None = None  # what each account had spent, if there may be a note on the charge


class Repeated(NamedTuple):
    """The same request was carried out before, under the same key."""

    record: IdempotencyRecord


class Refused(NamedTuple):
    """The request did not fit: which leg, the refusal of which account, and the totals that were read."""

    leg: int
    decision: Decision
    totals: dict[str, Totals]


# What became of a command that raised no error.
Result: TypeAlias = Made | Repeated | Refused
Outcome: TypeAlias = Result | OdographError


class Author(NamedTuple):
    """Who writes, under which key, with which note: what all commands have in common."""

    principal: str
    key: str
    note: str = ""
    salt: str = ""


class Command(Protocol):
    """A writing verb with everything that it needs."""

    @property
    def author(self) -> Author:
        """The principal, its key and its note."""
        ...

    @property
    def wants(self) -> Wants:
        """What must be read and locked."""
        ...

    def apply(self, state: State, changes: Changes) -> Result:
        """Carry the command out on the state and add to the changes, or raise and leave both as they were."""
        ...


class ChargeTarget(NamedTuple):
    """One account on the path of a charge, and its price there."""

    name: str
    compiled: Compiled
    price: Price
    text: str  # the price, as it is written into an entry
    origin: str  # the account that it was priced for
    watched: tuple[int, ...] = ()  # the meters for which there may be a note


class Ask(NamedTuple):
    """What is asked of one account: the guarantee, and the targets from the top of its path down to itself."""

    asked: tuple[str, str]  # the account, and the guarantee as it is written into an entry
    cost: Guarantee
    targets: tuple[ChargeTarget, ...]
    names: frozenset[str]  # of the targets
    certified: bool  # whether this installation knows that the account's limits keep its promise


class Charge(NamedTuple):
    """Spend or reserve: charge every target of every ask, all or nothing.

    Every spend runs this between two waits for the disk, when nothing of it is in the processor's caches, so it is
    written in plain loops: a call here takes several times as long as elsewhere.

    Theorem: several accounts at once: each account on the way keeps its promise about what was charged to it.
    Assumes: each cost bounds the mechanism for one person's data in that account, and no person has data in two.
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
        nothing: frozenset[str] = frozenset()
        return _named(Wants, (names, frozenset([(author.principal, author.key)]), nothing, nothing, False))

    def apply(self, state: State, changes: Changes) -> Result:
        """Charge, or record the refusal; a refusal leaves the key free."""
        author, verb, asks, _ = self
        request = digest_of(verb, tuple(map(_ASKED, asks)))
        record = state.keys.get((author.principal, author.key))
        if record is not None:
            return check_repeated(record, author, request)
        balances, now = state.balances, state.now
        following: dict[str, int] = {}  # the sequence of each account's next entry; it gets two if it is on two paths
        ids: list[str] = []
        later: list[int] = []
        for ask in asks:
            path = ""
            for target in ask.targets:
                name = target.name
                balance = balances.get(name)
                if balance is None or balance.closed or balance.origin != target.origin:
                    raise _unable(balance, name, target.origin)
                if balance.time > now:
                    later.append(balance.time)
                following[name] = number = following.get(name, balance.sequence) + 1
                path = f"{name}#{number}/{path}" if path else f"{name}#{number}"
            ids.append(path)
        # Every account on the way, with its totals and price as charged, and what was asked with it.
        charged: list[tuple[Balance, Totals, str, tuple[str, str]]] = []
        after: dict[str, Totals] = {}
        noted = False
        for leg, ask in enumerate(asks):
            for target in ask.targets:
                name, price = target.name, target.price
                balance = balances[name]
                totals = after.get(name) or balance.totals  # an account on two paths is charged twice
                decision = decide(target.compiled.meters, totals, price, ask.cost)
                if not decision.admitted:
                    refused = Refused(leg, decision._replace(account=name), _totals(state, asks))
                    self._record_refusal(state, changes, request, name)
                    return refused
                after[name] = totals_after = decision.totals_after
                # As charged: without what would have passed the ceiling.
                text = target.text if decision.price is price else price_to_text(decision.price)
                charged.append((balance, totals_after, text, ask.asked))
                # The sentences are made later, outside of the transaction: they take milliseconds.
                for i in target.watched:
                    noted = noted or not totals.unpriced[i]
        before = _totals(state, asks) if noted else None
        # One time for all the entries of a request.
        time = stamp(now, later) if later else now
        own, linked = self._write(state, changes, request, " ".join(ids), time, charged)
        return _named(Made, (own, linked, decision, before))

    def _write(  # noqa: PLR0913, PLR0917  what the entries have in common
        self,
        state: State,
        changes: Changes,
        request: str,
        legs: str,
        time: int,
        charged: list[tuple[Balance, Totals, str, tuple[str, str]]],
    ) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        """Append the entries; return those of the accounts that were asked, and the linked ones among these."""
        author, verb, _, expires = self
        principal, key, note, _ = author
        detail = "" if expires is None else text_of({"expires": str(time + expires)})
        own: list[Entry] = []
        linked: list[str] = []
        for balance, totals, price, (account, cost) in charged:
            name = balance.head.name
            is_own = name == account
            entry = balance.append(
                time=time,
                principal=principal,
                verb=verb,
                legs=legs,
                cost=cost,
                price=price,
                key=key,
                request=request,
                note=_keep_note(changes, balance, author) if note and is_own else "",
                detail=detail,
            )
            balance.totals = totals
            changes.moved[name] = balance
            changes.entries.append(entry)
            if is_own:
                own.append(entry)
                if balance.linked:
                    linked.append(account)
        first = own[0]
        record = _named(IdempotencyRecord, (first.account, first.sequence, verb, request))
        changes.keys[principal, key] = state.keys[principal, key] = record
        return tuple(own), tuple(linked)

    def _record_refusal(self, state: State, changes: Changes, request: str, refuser: str) -> None:
        """Write the refusal into the history of each account that was asked; it costs nothing."""
        paths = [[ask.asked[0]] for ask in self.asks]
        time, legs = _time_of(state, paths), _legs(state, paths)
        detail = text_of({"refused_by": refuser, "verb": self.verb})
        for ask in self.asks:
            account, text = ask.asked
            balance = changes.moved[account] = state.balances[account]
            entry = balance.append(
                time=time,
                principal=self.author.principal,
                verb="refuse",
                legs=legs,
                cost=text,
                price=ask.targets[-1].text,
                key=self.author.key,
                request=request,
                note=_keep_note(changes, balance, self.author),
                detail=detail,
            )
            changes.entries.append(entry)


class Resolve(NamedTuple):
    """Commit or void a reservation: void takes back what was charged, and means that the mechanism was not run.

    Theorem: reservations: a step that never happened costs nothing, so its price may be taken back exactly.
    Assumes: the mechanism of a voided reservation was not run.
    """

    author: Author  # its key is the reservation's id
    verb: str
    reserved: tuple[Entry, ...]  # every entry of the reservation, in the order in which they were written
    legs: tuple[Leg, ...]

    @property
    def wants(self) -> Wants:
        """Every account that the reservation charged, and whether it was resolved."""
        return Wants(frozenset(entry.account for entry in self.reserved), frozenset([("", self.author.key)]))

    def apply(self, state: State, changes: Changes) -> Result:
        """Resolve the reservation once; the same again is the same, the other way round is an error."""
        author, verb = self.author, self.verb
        request = digest_of(verb, ((author.key, ""),))
        record = state.keys.get(("", author.key))
        if record is not None:
            return self._check_resolved(record)
        paths = [[name for name, _ in reversed(leg.entries)] for leg in self.legs]
        time = _time_of(state, paths)
        self._require_voidable(state, time)
        legs = _legs(state, paths)
        asked = {leg.own for leg in self.legs}
        own: list[Entry] = []
        for before in self.reserved:
            balance = state.balances[before.account]
            if verb == "void":
                balance.totals = balance.totals.without(price_from_text(before.price))
            is_own = (before.account, before.sequence) in asked
            entry = balance.append(
                time=time,
                principal=author.principal,
                verb=verb,
                legs=legs,
                cost=before.cost,
                price=before.price,
                key=author.key,
                request=request,
                note=_keep_note(changes, balance, author) if is_own else "",
            )
            changes.entries.append(entry)
            changes.moved[before.account] = balance
            if is_own:
                own.append(entry)
        _use_key(state, changes, "", author.key, IdempotencyRecord(own[0].account, own[0].sequence, verb, request))
        return Made(tuple(own), tuple(name for name, _ in asked if state.balances[name].linked))

    def _check_resolved(self, record: IdempotencyRecord) -> Repeated:
        if record.verb == self.verb:
            return Repeated(record)
        done = "committed" if record.verb == "commit" else "voided"
        raise ReservationResolved(
            f"reservation {self.author.key} was {done} before, by {record.account}#{record.sequence}"
        )

    def _require_voidable(self, state: State, time: int) -> None:
        """Raise if a reservation that is to be voided has expired: its mechanism may have run by then."""
        expires = self.reserved[0].expires
        # By the latest of the times, even if the clock has been set back since.
        latest = max(time, *[state.balances[entry.account].time for entry in self.reserved])
        if self.verb == "void" and expires is not None and latest > expires:
            raise ReservationResolved(
                f"reservation {self.author.key} expired at {moment(expires):%Y-%m-%d %H:%M:%S} UTC: its"
                " mechanism may have run, so it can be committed and no longer voided"
            )


class Open(NamedTuple):
    """Open an account: the compiled policy is its first entry."""

    author: Author
    head: Head
    compiled: Compiled
    population: Mapping[str, Any] | None = None  # where the filters of its people are, if it is one
    renewal: Mapping[str, str] | None = None  # the schedule of which it is an epoch, if it is one

    @property
    def detail(self) -> str:
        """The document from which the account is read ever after."""
        form = {**self.head._asdict(), "compiled": self.compiled.to_dict()}
        more = {"population": self.population, "renewal": self.renewal}
        return text_of(form | {name: {**value} for name, value in more.items() if value is not None})

    @property
    def digest(self) -> str:
        """The digest of the policy as it was asked for: a later version may compile it otherwise."""
        return self._digest(self.compiled.policy)

    def _digest(self, policy: Policy) -> str:
        # In the words of 0.1.0, so that a key that was used then finds the same request.
        head = {_WORDS_OF_0_1.get(name, name): value for name, value in self.head._asdict().items()}
        asked = text_of({**head, "policy": policy.to_form_1()})
        return digest_of("open", ((self.head.name, asked),))

    def _same_in_0_1(self, record: IdempotencyRecord) -> bool:
        """Whether the key was used for the same request in 0.1.0, which had another default odometer."""
        policy = self.compiled.policy.with_first_default()
        return policy is not None and record.request == self._digest(policy)

    @property
    def wants(self) -> Wants:
        """The account itself, its relatives, and a block of the same dataset."""
        head = self.head
        names = frozenset(filter(None, (head.name, head.parent, head.successor_of)))
        datasets = frozenset(filter(None, [head.dataset]))
        keys = frozenset([(self.author.principal, self.author.key)])
        return Wants(names, keys, datasets=datasets, opens=True)

    def apply(self, state: State, changes: Changes) -> Result:
        """Open the account, if its name is free and its relatives protect the same."""
        head, author, request = self.head, self.author, self.digest
        record = state.keys.get((author.principal, author.key))
        if record is not None:
            asked = record.request if record.request != request and self._same_in_0_1(record) else request
            return check_repeated(record, author, asked, "open" if self.population is None else "")
        self._require_relatives(state)
        linked = bool(head.successor_of) or self.renewal is not None
        balance = Balance(head, -1, START, 0, self.compiled.start, closed=False, linked=linked)
        if head.successor_of:
            before = changes.moved[head.successor_of] = state.balances[head.successor_of]
            before.linked = True
        entry = balance.append(
            time=state.now,
            principal=author.principal,
            verb="open",
            legs=f"{head.name}#0",
            key=author.key,
            request=request,
            note=_keep_note(changes, balance, author),
            detail=self.detail,
        )
        balance.origin = entry.seal
        state.balances[head.name] = balance
        changes.opened.append(balance)
        changes.entries.append(entry)
        _use_key(state, changes, author.principal, author.key, IdempotencyRecord(head.name, 0, "open", request))
        return Made((entry,))

    def _require_relatives(self, state: State) -> None:
        """Raise if the name is taken, or a relative is missing, closed or protects something else."""
        head = self.head
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


class Close(NamedTuple):
    """Close an account and everything below it; closing what is closed changes nothing."""

    author: Author
    name: str

    @property
    def wants(self) -> Wants:
        """The account and everything below it."""
        return Wants(trees=frozenset([self.name]), opens=True)

    def apply(self, state: State, changes: Changes) -> Result:
        """Close from the top down; reservations stay as they are."""
        if self.name not in state.balances:
            raise AccountNotFound(f"there is no account {self.name!r} in this ledger")
        below = [self.name]
        for name in below:
            below += sorted(b.head.name for b in state.balances.values() if b.head.parent == name)
        request = digest_of("close", ((self.name, ""),))
        written: list[Entry] = []
        for balance in (state.balances[name] for name in below):
            if balance.closed:
                continue
            name = balance.head.name
            entry = balance.append(
                time=_time_of(state, [[name]]),
                principal=self.author.principal,
                verb="close",
                legs=f"{name}#{balance.sequence + 1}",
                request=request,
                note=_keep_note(changes, balance, self.author) if name == self.name else "",
            )
            written.append(entry)
            balance.closed = True
            changes.moved[name] = balance
        changes.entries += written
        return Made(tuple(written))


class Pointer(NamedTuple):
    """Which files of a population are current: how many rounds there were, and the folder's name."""

    version: int
    state: str


class MovePopulation(NamedTuple):
    """Point a population to its next version, whose files are on the disk already.

    A population is an account that takes no charges of its own: the filters of its people are kept in files. Its
    first entry says where those are and which folder holds the first version; every round after that names the next.
    """

    author: Author
    name: str
    origin: str  # of the account that was read
    before: int  # the sequence of the entry whose version the round began from
    request: str  # a digest that says nothing without the population's secret
    cost: str  # the guarantee as text, if everyone was asked for the same
    act: str
    pointer: Pointer
    retired: str = ""  # the epoch that is retired, if one is

    @property
    def wants(self) -> Wants:
        """The population and the key."""
        return Wants(frozenset([self.name]), frozenset([(self.author.principal, self.author.key)]))

    def apply(self, state: State, changes: Changes) -> Result:
        """Write the entry, unless another process has moved the population meanwhile."""
        author, name = self.author, self.name
        record = state.keys.get((author.principal, author.key))
        if record is not None:
            return check_repeated(record, author, self.request)
        balance = state.balances.get(name)
        if balance is None:
            raise AccountNotFound(f"there is no population {name!r} in this ledger")
        if balance.origin != self.origin:
            raise LedgerError(f"{name!r} is no longer the population that was opened; open it again")
        if balance.closed:
            raise AccountClosed(f"{name!r} is closed and takes no new rounds")
        if balance.sequence != self.before:
            raise LedgerBusy(f"another process has moved {name!r} on meanwhile; try again")
        detail = {"act": self.act, **self.pointer._asdict()}
        if self.retired:
            detail["retired"] = self.retired
        entry = balance.append(
            time=stamp(state.now, [balance.time]),
            principal=author.principal,
            verb="step",
            legs=f"{name}#{balance.sequence + 1}",
            cost=self.cost,
            key=author.key,
            request=self.request,
            note=_keep_note(changes, balance, author),
            detail=text_of(detail),
        )
        balance.totals = balance.totals._replace(steps=self.pointer.version)
        changes.moved[name] = balance
        changes.entries.append(entry)
        record = IdempotencyRecord(name, entry.sequence, "step", self.request)
        _use_key(state, changes, author.principal, author.key, record)
        return Made((entry,))


def read_opening(entry: Entry) -> tuple[Head, Compiled]:
    """Read what `Open` wrote: an account's head and its policy, or raise `LedgerCorrupt`."""
    try:
        form = entry.details
        words = _WORDS_OF_0_1 if form["compiled"].get("form") == 1 else {}
        return Head(*(form[words.get(name, name)] for name in Head._fields)), _read_compiled(
            text_of(form["compiled"])
        )
    except (OdographError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise LedgerCorrupt(f"entry {entry.id}: its policy cannot be read ({explain(problem)})") from problem


@lru_cache(maxsize=1024)  # thousands of accounts may have one policy, and checking its limits takes a millisecond
def _read_compiled(text: str) -> Compiled:
    return Compiled.from_dict(json.loads(text))


def read_population(entry: Entry) -> Mapping[str, Any] | None:
    """Return what an account's first entry says of its population; None if it is not one."""
    form = entry.details.get("population")
    if form is None:
        return None
    if not isinstance(form, dict) or not isinstance(form.get("state"), str):
        raise LedgerCorrupt(f"entry {entry.id}: its population cannot be read")
    return form


def read_pointer(entry: Entry) -> Pointer:
    """Return the version to which the first entry of a population, or a round of it, points."""
    form = read_population(entry) if entry.verb == "open" else entry.details
    form = {} if form is None else form
    version, state = form.get("version", 0), form.get("state")
    if entry.verb not in ("open", "step") or not isinstance(version, int) or not isinstance(state, str):
        raise LedgerCorrupt(f"entry {entry.id} points to no version of a population")
    return Pointer(version, state)


def check_repeated(record: IdempotencyRecord, author: Author, request: str, verb: str = "") -> Repeated:
    """Return the outcome for a key that was used before, or raise if that was for another request."""
    used = f"{record.verb}, {record.account}#{record.sequence}"
    if record.request == ERASED:
        raise IdempotencyConflict(
            f"key {author.key!r} was used before, by a principal whose name was erased, or since yours was ({used})."
            " If that was this request, it is written there; another one needs another key"
        )
    if record.request != request:
        if record.verb == verb == "open":
            raise IdempotencyConflict(
                f"key {author.key!r} opened {record.account!r} before, with another name, policy, parent,"
                f" successor_of or dataset. Use ledger.account({record.account!r}), or another name and key"
            )
        raise IdempotencyConflict(
            f"key {author.key!r} was used before for another request ({used}). All accounts of a principal share its"
            " keys: the same key must come with the same verb, accounts and guarantees, and another request needs"
            " another key"
        )
    return Repeated(record)


def _check_unit(own: Head, other: Head) -> None:
    if (own.privacy_unit, own.neighbors) != (other.privacy_unit, other.neighbors):
        raise InvalidPolicy(
            f"{own.name!r} must protect the same privacy unit and neighbors as {other.name!r}:"
            f" {other.privacy_unit!r}, {other.neighbors!r} (got {own.privacy_unit!r}, {own.neighbors!r})"
        )


def _unable(balance: Balance | None, name: str, origin: str) -> OdographError:
    if balance is None:
        return AccountNotFound(f"there is no account {name!r} in this ledger; nothing was charged")
    if balance.origin != origin:
        return LedgerError(f"{name!r} is no longer the account that was opened; connect again. Nothing was charged")
    return AccountClosed(f"{name!r} is closed and takes no new charges; nothing was charged")


def _totals(state: State, asks: Sequence[Ask]) -> dict[str, Totals]:
    return {target.name: state.balances[target.name].totals for ask in asks for target in ask.targets}


def _time_of(state: State, paths: Sequence[Sequence[str]]) -> int:
    """Return one time for all the entries of a request: the store's, or the last entry's where that is later."""
    return stamp(state.now, [state.balances[name].time for path in paths for name in path])


def _legs(state: State, paths: Sequence[Sequence[str]]) -> str:
    """Write the ids of the next entries; an account on two paths gets two entries."""
    following: dict[str, int] = {}
    legs = []
    for path in paths:
        ids = []
        for name in path:
            following[name] = number = following.get(name, state.balances[name].sequence) + 1
            ids.append(f"{name}#{number}")
        legs.append("/".join(reversed(ids)))
    return " ".join(legs)


def _keep_note(changes: Changes, balance: Balance, author: Author) -> str:
    """Keep the note beside the next entry of the account; return the digest that goes into the entry."""
    if not author.note:
        return ""
    changes.notes.append(Note(balance.head.name, balance.sequence + 1, author.salt, author.note))
    return note_digest(author.salt, author.note)


def _use_key(state: State, changes: Changes, owner: str, key: str, record: IdempotencyRecord) -> None:
    """Use a key up: for the commands behind this one, and permanently."""
    state.keys[owner, key] = record
    changes.keys[owner, key] = record
