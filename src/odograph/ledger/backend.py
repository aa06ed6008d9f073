"""Backend: what `Ledger`, `LedgerAccount` and `Reservation` stand on, whether the ledger is here or behind a service.

Behind those three is one `Backend` per principal: `LocalBackend` over a store, or `RemoteBackend` over HTTP. So the
verbs are the same wherever a ledger is kept. A local backend reads accounts, prices what is asked for, submits
commands to the engine and makes receipts of the results.
"""

from __future__ import annotations

import getpass
import heapq
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

from odograph.compile import Certification, certification, compile_policy
from odograph.core.gate import Decision, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.core.planning import (
    MOST_FALLS,
    AccountState,
    Calibration,
    CalibrationQuestion,
    G,
    Kind,
    Quote,
    calibrate,
    how_many,
    largest,
    notes_on,
    quote,
    watched,
    with_offer,
)
from odograph.core.policy import Compiled, Policy
from odograph.display import Progress
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    BudgetExceeded,
    EntryNotFound,
    InvalidArgument,
    InvalidGuarantee,
    InvalidPolicy,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    OutcomeUnknown,
    ReservationNotFound,
    ReservationResolved,
    UnprovenComposition,
)
from odograph.ledger import transfer
from odograph.ledger.audit import audit
from odograph.ledger.commands import (
    Ask,
    Author,
    Charge,
    ChargeTarget,
    Close,
    Command,
    Open,
    Refused,
    Repeated,
    Resolve,
    Result,
    read_opening,
    read_population,
)
from odograph.ledger.engine import LedgerEngine
from odograph.ledger.entries import (
    Entry,
    Leg,
    check_key,
    check_name,
    check_note,
    legs_from_text,
    parse_entry_id,
    price_to_text,
    shown,
    text_of,
)
from odograph.ledger.epochs import Epoch, Renew, Renewal, RenewalStep, next_step, read_renewal
from odograph.ledger.results import (
    NOW,
    Checkpoint,
    Events,
    HistoryEntry,
    Lifetime,
    Line,
    Receipt,
    Verification,
    cursor_from_text,
    cursor_to_text,
    history_entry,
    linked,
    together,
)
from odograph.ledger.stores.base import (
    EVERY,
    Balance,
    Changes,
    Head,
    IdempotencyRecord,
    Note,
    State,
    Store,
    Wants,
)
from odograph.ledger.stores.memory import MemoryStore

__all__ = [
    "Backend",
    "Engine",
    "LocalBackend",
    "Opened",
    "check_costs",
    "check_reason",
    "notes_of",
    "with_counter_offer",
]

_MAX_REMEMBERED: Final = 1024  # priced requests per account
_MAX_REMEMBERED_LENGTH: Final = 16384  # characters of a guarantee that is remembered: longer ones fill the memory
_ERASED: Final = "erased"
_MAX_RENEWALS: Final = 4  # attempts at one renewal, if other programs renew at the same time
_MAX_TOGETHER: Final = 100  # accounts whose events are read at once
_MAX_EVENTS_LENGTH: Final = 1 << 19  # characters of costs and notes of events that are read at once
# Every charge makes a receipt, and a named tuple's own constructor takes twice as long as the tuple's.
_named: Final = tuple.__new__


class Opened:
    """What an account was opened with. It never changes, so it is read once per process."""

    __slots__ = ("_asks", "_certified", "compiled", "head", "origin", "path", "population", "renewal")

    def __init__(  # noqa: PLR0913  what the first entry says
        self,
        head: Head,
        compiled: Compiled,
        origin: str,
        above: tuple[Opened, ...],
        population: Mapping[str, Any] | None = None,
        *,
        renewal: Renewal | None = None,
    ) -> None:
        self.head = head
        self.origin = origin
        self.compiled = compiled
        self.path: tuple[Opened, ...] = (*above, self)  # from the account at the top down to this one
        self.population = population  # where the filters of its people are, if it is one
        self.renewal = renewal  # the schedule of which it is an epoch, if it is one; not known over HTTP
        self._asks: dict[int, Ask] = {}
        self._certified: bool | None = None

    @property
    def certified(self) -> bool:
        """Whether this installation knew, when it was first asked, that the limits keep the promise."""
        if self._certified is None:
            self._certified = certification(self.compiled) is not Certification.NONE
        return self._certified

    @property
    def names(self) -> tuple[str, ...]:
        """The names on the path."""
        return tuple(one.head.name for one in self.path)

    def ask(self, cost: Guarantee) -> Ask:
        """Price a guarantee on the whole path; remembered for the same object, as pricing is most of the work."""
        known = self._asks.get(id(cost))
        if known is not None and known.cost is cost:
            return known
        if not isinstance(cost, Guarantee):
            raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got {cost!r})")
        self.require_own()
        targets = []
        for one in self.path:
            price = one.compiled.price(cost)
            noted = watched(one.compiled, cost, price)
            targets.append(ChargeTarget(one.head.name, one.compiled, price, price_to_text(price), one.origin, noted))
        text = text_of(cost.to_dict())
        made = Ask((self.head.name, text), cost, tuple(targets), frozenset(self.names), self.certified)
        if len(text) > _MAX_REMEMBERED_LENGTH:
            return made
        if len(self._asks) >= _MAX_REMEMBERED:
            self._asks.clear()
        self._asks[id(cost)] = made  # holding the object keeps its identity from being used again
        return made

    def require_own(self) -> None:
        """Raise unless the account is charged as a whole: in a population each person has a filter of their own."""
        if self.population is not None:
            raise UnprovenComposition(
                f"{self.head.name!r} is a population: each person in it has a filter of their own, whose balance is"
                f" secret. It is charged by Population.open({self.head.name!r}, ...).charge(...)"
            )

    def states(self, balances: Mapping[str, Balance]) -> list[AccountState]:
        """Return the path with what was read of it, if it is still the path that was opened."""
        self.require_own()
        for one in self.path:
            balance = balances.get(one.head.name)
            if balance is None or balance.origin != one.origin:
                raise LedgerError(f"{one.head.name!r} is no longer the account that was opened; connect again")
        return [AccountState(one.head.name, one.compiled, balances[one.head.name].totals) for one in self.path]


def check_costs(costs: object) -> None:
    """Raise unless costs are a mapping from at least one account to what is asked of it."""
    if not isinstance(costs, Mapping) or not costs:
        raise InvalidArgument(f"costs must name at least one account, as in {{'jan': PureDP(0.1)}} (got {costs!r})")


class Backend(Protocol):
    """The way of one principal into a ledger. Names, keys and notes are checked here, before anything is written."""

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        ...

    @property
    def principal(self) -> str:
        """Who writes."""
        ...

    @property
    def resolves(self) -> bool:
        """Whether this principal may commit and void."""
        ...

    def acting_as(self, principal: str) -> Backend:
        """Return the backend of another principal, over the same connection."""
        ...

    def open(self, head: Head, policy: Policy | Compiled, key: str | None, note: str) -> None:
        """Open an account, solving for its policy if need be."""
        ...

    def opened(self, name: str) -> Opened:
        """Return what an account was opened with, or raise `AccountNotFound`."""
        ...

    def close(self, name: str, note: str) -> None:
        """Close an account and everything below it."""
        ...

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment: of the named accounts that there are, or of all."""
        ...

    def charge(
        self,
        verb: str,
        costs: Mapping[str, Guarantee],
        key: str | None,
        note: str,
        expires: int | None = None,
    ) -> Receipt:
        """Spend or reserve, all or nothing; `expires` is in microseconds from now."""
        ...

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void a reservation."""
        ...

    def reservation(self, reservation: str) -> Receipt:
        """Return the receipt of a reservation, or raise `ReservationNotFound`."""
        ...

    def pending(self, name: str) -> Sequence[Receipt]:
        """Return the reservations of an account that are neither committed nor voided."""
        ...

    def voids(self, name: str) -> int:
        """Count the reservations charged to an account that were voided."""
        ...

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Return whether the accounts would admit their costs together; spend nothing."""
        ...

    def quote(self, name: str, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        ...

    def largest(self, name: str, kind: Kind[G], times: int) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        ...

    def calibrate(self, name: str, question: CalibrationQuestion) -> Calibration | None:
        """Return the least noise with which the requests of a question are all admitted, or None."""
        ...

    def how_many(self, name: str, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row."""
        ...

    def lifetime(self, name: str) -> Lifetime | None:
        """Return what an account and those linked to it promise together; None if it is alone."""
        ...

    def history(self, name: str, first: int, count: int) -> Sequence[HistoryEntry]:
        """Return a page of entries, from a sequence on."""
        ...

    def events(self, after: str, count: int) -> Events:
        """Return entries of all accounts that follow a cursor, at most `count`."""
        ...

    def verify(self, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Replay everything."""
        ...

    def checkpoint(self) -> Checkpoint:
        """Return the last sequence and seal of every account."""
        ...

    def export(self, file: IO[str], progress: Progress | None) -> Checkpoint:
        """Write the whole ledger as JSON Lines."""
        ...

    def import_(self, file: IO[str], checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read what `export` wrote into this ledger, which must be empty."""
        ...

    def backup(self, path: Path, progress: Progress | None) -> Checkpoint:
        """Copy the whole ledger into a new SQLite file."""
        ...

    def restore(self, path: Path, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read a backup into this ledger, which must be empty."""
        ...

    def population(self, ledger: Any, name: str, location: Any) -> Any:  # noqa: ANN401  of a higher layer
        """Return a population of this ledger."""
        ...

    def create_population(  # noqa: PLR0913  the choices that are made once
        self,
        ledger: Any,  # noqa: ANN401  of a higher layer
        name: str,
        policy: Policy | Compiled,
        *,
        location: Any,  # noqa: ANN401  a path
        key: str | None,
        note: str,
        **choices: Any,
    ) -> Any:  # noqa: ANN401  of a higher layer
        """Create a population without people."""
        ...

    def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry; return whether there was one."""
        ...

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; return whether there was one."""
        ...

    def leave(self) -> None:
        """Close files and connections."""
        ...


class Engine(Protocol):
    """Where commands are submitted: a `LedgerEngine` in this process, or a way to one in another."""

    def submit(self, command: Command) -> Result:
        """Carry a command out durably and return its result, or raise its error."""
        ...


class LocalBackend:
    """A ledger in a store, for one principal: the operating system's user, if none is named."""

    resolves = True

    def __init__(self, store: Store, principal: str | None = None, engine: Engine | None = None) -> None:
        self.store = store
        self.engine: Engine = engine or LedgerEngine(store)
        self._shared = False  # whether the store belongs to the backend that this one was made from
        self.principal = check_key(_user() if principal is None else principal, "principal")
        self._identity = ""
        self._known: dict[str, Opened] = {}

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        return self.store.url

    def acting_as(self, principal: str) -> LocalBackend:
        """Return the backend of another principal, sharing the connection, the engine and what was read."""
        other = LocalBackend(self.store, principal, self.engine)
        other._known = self._known
        other._shared = True
        return other

    def open(
        self,
        head: Head,
        policy: Policy | Compiled,
        key: str | None,
        note: str,
        population: Mapping[str, Any] | None = None,
    ) -> None:
        """Open an account; relatives that are missing are found before anything is made, even the file."""
        for relative in filter(None, (head.parent, head.successor_of)):
            self.opened(relative).require_own()
        compiled = compile_policy(policy) if isinstance(policy, Policy) else policy
        Compiled.from_dict(compiled.to_dict())  # what cannot be read back must never be written
        self.store.create()
        self.engine.submit(Open(self.author(key, note), head, compiled, population))

    def close(self, name: str, note: str) -> None:
        """Close an account and everything below it."""
        self.engine.submit(Close(self.author(None, note), name))

    def now(self) -> int:
        """Return the time by the store's clock, in microseconds since 1970."""
        found: list[int] = []

        def look(state: State) -> Changes:
            found.append(state.now)
            return Changes()

        self.store.write(Wants(), look)
        return found[-1]

    def next_step(self, renewal: Renewal) -> RenewalStep:
        """Return what renewing would do now."""
        now = self.now()  # before the accounts: one of a later epoch is then seen, or the epoch is over when it opens
        balances = self.store.balances()
        return next_step(renewal, {name: one.closed for name, one in balances.items()}, now)

    def require_same(self, renewal: Renewal, policy: Policy, parent: str, previous: str) -> None:
        """Raise unless a schedule goes on as it was promised: with the schedule, policy and parent that it has."""
        if not previous:
            return
        opened = self.opened(previous)
        pairs = {
            "schedule": (
                "an account by itself" if opened.renewal is None else str(opened.renewal.schedule),
                str(renewal.schedule),
            ),
            "policy": (opened.compiled.policy, policy),
            "parent": (opened.head.parent, parent),
        }
        for field, (has, wanted) in pairs.items():
            if has != wanted:
                raise InvalidPolicy(
                    f"{field} must be that of {previous!r}, {has} (got {wanted}): the epochs of a schedule were"
                    f" promised beforehand. Renew another one under another name than {renewal.account!r}"
                )

    def renew(self, renewal: Renewal, compiled: Compiled, *, parent: str, dataset: str, note: str) -> RenewalStep:
        """Open the account of the current epoch and close those whose epochs are over; return what was to be done.

        Repeating it changes nothing. If another program renews at the same time, one of them does it.
        """
        policy = compiled.policy
        self.store.create()
        for _ in range(_MAX_RENEWALS):
            step = self.next_step(renewal)
            if step.previous and self.opened(step.previous).population is not None:
                raise AccountExists(
                    f"{step.previous!r} is a population, so {renewal.account!r} cannot be an account that renews:"
                    " give it another name, and renew the population by `odograph population renew`"
                )
            self.require_same(renewal, policy, parent, step.previous)
            if not step.opens or step.epoch is None:
                break
            head = Head(step.opens, parent, step.previous, dataset, policy.privacy_unit, policy.neighbors)
            author = self.author(renewal.key_of(step.epoch), note)
            opening = Open(author, head, compiled, renewal=renewal.to_dict())
            closes = step.previous if step.previous in step.closes else ""
            with suppress(AccountExists, LedgerBusy):  # another program was faster, or the epoch ended meanwhile
                self.engine.submit(Renew(opening, step.epoch, closes))
                break
        else:
            raise LedgerBusy(f"{renewal.account!r} could not be renewed: the state changed each time; renew again")
        for name in step.closes:
            self.close(name, "its epoch is over")
        return step

    def open_epoch(  # noqa: PLR0913  what an epoch is opened with
        self,
        renewal: Renewal,
        step: RenewalStep,
        compiled: Compiled,
        population: Mapping[str, Any],
        *,
        key: str | None = None,
        note: str = "",
        read: int | None = None,
    ) -> bool:
        """Open the population of an epoch and close the previous one, together; return whether it was done before."""
        policy, epoch = compiled.policy, cast("Epoch", step.epoch)
        self.require_same(renewal, policy, "", step.previous)
        Compiled.from_dict(compiled.to_dict())  # as in `open`
        head = Head(step.opens, "", step.previous, "", policy.privacy_unit, policy.neighbors)
        author = self.author(renewal.key_of(epoch) if key is None else key, note)
        opening = Open(author, head, compiled, population, renewal.to_dict())
        closes = step.previous if step.previous in step.closes else ""
        self.store.create()
        return isinstance(self.engine.submit(Renew(opening, epoch, closes, read)), Repeated)

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment."""
        return self.store.balances(names)

    def opened(self, name: str) -> Opened:
        """Return what an account was opened with, or raise `AccountNotFound`."""
        known = self._known.get(name)
        return self._learn(name, {}) if known is None else known

    def learn(self, names: Iterable[str]) -> None:
        """Read what accounts were opened with, all that this process does not know yet at once."""
        unknown = [name for name in names if name not in self._known]
        entries = self.store.openings(unknown) if unknown else {}
        for name in entries:
            if name not in self._known:
                self._learn(name, entries)

    def _learn(self, name: str, entries: Mapping[str, Entry]) -> Opened:
        """Read what an account and those above it were opened with, from the entries if they are among them."""
        entry = entries.get(name)
        if entry is None:
            check_name(name)
            found = self.store.entries(name, 0, 1)
            if not found:
                raise AccountNotFound(f"there is no account {name!r} in {self.store.url}")
            entry = found[0]
        head, compiled = read_opening(entry)
        above: tuple[Opened, ...] = ()
        if head.parent:
            above = (self._known.get(head.parent) or self._learn(head.parent, entries)).path
        population, renewal = read_population(entry), read_renewal(entry)
        known = self._known[name] = Opened(head, compiled, entry.seal, above, population, renewal=renewal)
        return known

    def author(self, key: str | None = None, note: str = "") -> Author:
        """Return who writes; without a key a random one is made, so that a lost answer can be asked for again."""
        key = secrets.token_hex(16) if key is None else check_key(key)
        identity = self._identity or self.identity()
        return Author(identity, key) if note == "" else Author(identity, key, check_note(note), secrets.token_hex(16))

    def identity(self) -> str:
        """Return the random identity that entries carry for this principal."""
        if not self._identity:
            self._identity = self.store.principal(self.principal)
        return self._identity

    @property
    def identified(self) -> bool:
        """Whether `author` knows the identity without reading the store."""
        return self._identity != ""

    def forget(self) -> None:
        """Look the identity up again: the name was erased."""
        self._identity = ""

    def charge(
        self,
        verb: str,
        costs: Mapping[str, Guarantee],
        key: str | None,
        note: str,
        expires: int | None = None,
    ) -> Receipt:
        """Charge all or nothing and return the receipt, or raise `BudgetExceeded` with what would fit."""
        author, asks = self.author(key, note), self.price(costs)
        result = self.engine.submit(Charge(author, verb, asks, expires))
        return self.receipt(result, verb, author.key, asks)

    def price(self, costs: Mapping[str, Guarantee]) -> tuple[Ask, ...]:
        """Price what is asked of each account, in the order of their names, so that a request has one form."""
        if type(costs) is not dict or not costs:
            check_costs(costs)
        known = self._known
        if len(costs) == 1:
            ((name, cost),) = costs.items()
            return ((known[name] if name in known else self.opened(name)).ask(cost),)
        for name in costs:
            if name not in known:
                check_name(name, "account")
        return tuple([self.opened(name).ask(costs[name]) for name in sorted(costs)])

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void a reservation."""
        check_reason(verb, note)
        reserved, legs = self.reserved(reservation)
        author = self.author(reservation, note)
        return self.receipt(self.engine.submit(Resolve(author, verb, reserved, legs)), verb, author.key)

    def find_key(self, owner: str, key: str) -> IdempotencyRecord | None:
        """Return where a key was used; None if it is free."""
        found: dict[tuple[str, str], IdempotencyRecord] = {}

        def look(state: State) -> Changes:
            found.update(state.keys)
            return Changes()

        self.store.write(Wants(keys=frozenset([(owner, key)])), look)
        return found.get((owner, key))

    def receipt(
        self, result: Result, verb: str, key: str, asks: tuple[Ask, ...] = (), *, search: bool = True
    ) -> Receipt:
        """Return the receipt of a command; raise `BudgetExceeded` with what would fit, if it was refused.

        `asks` are what a charge was priced to: without them they are read from its entries. A repeated request has
        the receipt of the first time, without its notes. Without `search` notes do not say what falls.
        """
        if isinstance(result, Refused):
            raise BudgetExceeded(with_counter_offer(asks, result))
        if isinstance(result, Repeated):
            return self._first_receipt(result.record, verb, key)
        own, linked, decision, before = result
        notes: tuple[str, ...] = ()
        if before is not None and decision is not None:
            notes = notes_of(asks, before, MOST_FALLS if search else 0)
            decision = decision._replace(notes=notes)
        try:
            if linked or not asks:
                return self._receipt_of(own, linked, self.principal)._replace(decision=decision, notes=notes)
        except LedgerError as problem:  # it was written all the same
            raise OutcomeUnknown(
                "this was charged, but its receipt could not be read; ask again with the same key to get it",
                key=own[0].key,
                charged=True,
            ) from problem
        first = own[0]
        lines = tuple(
            [_named(Line, (one.account, one.sequence, asks[i].cost, one.seal)) for i, one in enumerate(own)]
        )
        expires = first.expires if first.detail else None
        unsure = tuple([ask.asked[0] for ask in asks if not ask.certified])
        who = self.principal
        form = first.verb, first.key, first.time, lines, expires, (), False, unsure, decision, notes, who
        return _named(Receipt, form)

    def _receipt_of(self, own: Sequence[Entry], linked: Iterable[str], principal: str) -> Receipt:
        """Return the receipt of some entries of a principal, reading what they do not hold."""
        first = own[0]
        lines = tuple([Line(one.account, one.sequence, _guarantee_of(one), one.seal) for one in own])
        unsure = tuple([one.account for one in own if not self.opened(one.account).certified])
        lifetimes = self._lifetimes(linked)
        found = Receipt(first.verb, first.key, first.time, lines, first.expires, lifetimes, False, unsure)  # noqa: FBT003
        return found._replace(principal=principal)

    def _first_receipt(self, record: IdempotencyRecord, verb: str, key: str) -> Receipt:
        """Return the receipt of a request that was carried out before."""
        if verb == "reserve":
            self._refuse_voided(key, f"{record.account}#{record.sequence}")
        legs = legs_from_text(self.entry(record.account, record.sequence).legs)
        own = [self.entry(*leg.own) for leg in legs]
        balances = self.store.balances([entry.account for entry in own])
        linked = [name for name, balance in balances.items() if balance.linked]
        return self._receipt_of(own, linked, self.principal)._replace(repeated=True)  # keys are of one principal

    def _refuse_voided(self, key: str, reservation: str) -> None:
        """Raise if the reservation that a key was used for was voided: it pays for nothing any more."""
        record = self.find_key("", reservation)
        if record is not None and record.verb == "void":
            raise ReservationResolved(
                f"key {key!r} was used for reservation {reservation}, which was voided, so nothing is charged for it;"
                " a run needs another key"
            )

    def entry(self, account: str, sequence: int) -> Entry:
        """Read one entry that must be there."""
        found = self.store.entries(account, sequence, 1)
        if not found or found[0].sequence != sequence:
            raise LedgerCorrupt(f"entry {account}#{sequence} is missing")
        return found[0]

    def reserved(self, reservation: str) -> tuple[tuple[Entry, ...], tuple[Leg, ...]]:
        """Read every entry of a reservation, in the order in which they were written, and its legs."""
        name, sequence = parse_entry_id(reservation)
        found = self.store.entries(name, sequence, 1)
        if not found or found[0].verb != "reserve" or found[0].request_id != reservation:
            other = f": the verb of that entry is {found[0].verb!r}" if found and found[0].id == reservation else ""
            raise ReservationNotFound(f"there is no reservation {shown(reservation)} in {self.store.url}{other}")
        legs = legs_from_text(found[0].legs)
        return tuple(self.entry(*one) for leg in legs for one in reversed(leg.entries)), legs

    def reservation(self, reservation: str) -> Receipt:
        """Return the receipt of a reservation."""
        return self._reservation(reservation, self.store.principals())

    def _reservation(self, reservation: str, names: Mapping[str, str]) -> Receipt:
        entries, legs = self.reserved(reservation)
        asked = {leg.own for leg in legs}
        own = [entry for entry in entries if (entry.account, entry.sequence) in asked]
        return self._receipt_of(own, (), names.get(own[0].principal, _ERASED))

    def pending(self, name: str) -> list[Receipt]:
        """Return the reservations of an account that are neither committed nor voided."""
        return self.reservations_page(name, 0, EVERY)[0]

    def reservations_page(self, name: str, first: int, count: int) -> tuple[list[Receipt], int | None]:
        """Return pending reservations charged from a sequence on, and where the next page begins, None if nowhere."""
        found = self.store.pending(name, first, count)
        names = self.store.principals() if found else {}
        receipts = [self._reservation(entry.request_id, names) for entry in found]
        return receipts, found[-1].sequence + 1 if len(found) == count else None

    def pending_page(self, name: str, first: int, count: int) -> list[HistoryEntry]:
        """Return some pending reservations, oldest first, each by its first entry in the account."""
        entries, names = self.store.pending(name, first, count), self.store.principals()
        noted = [entry.sequence for entry in entries if entry.note]
        notes = {sequence: note for one in noted for sequence, note in self.store.notes(name, one, 1).items()}
        return [_history_entry(entry, names, notes) for entry in entries]

    def pending_count(self, name: str) -> int:
        """Count the pending reservations of an account."""
        return self.store.pending_count(name)

    def voids(self, name: str) -> int:
        """Count the reservations charged to an account that were voided."""
        return self.store.voids(name)

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Return whether the accounts would admit their costs together, each with all above it; spend nothing."""
        try:
            asks = self.price(costs)
        except UnprovenComposition:
            refusals = [self.quote(name, [cost]).decisions[0] for name, cost in costs.items()]
            return next(refusal for refusal in refusals if refusal.is_unproven)
        totals = {state.name: state.totals for state in self._account_states(*costs)}
        after = dict(totals)
        for i, ask in enumerate(asks):
            for name, compiled, price, *_ in ask.targets:
                decision = decide(compiled.meters, after[name], price, ask.cost)
                if not decision.admitted:
                    return with_counter_offer(asks, Refused(i, decision._replace(account=name), totals))
                after[name] = decision.totals_after
        return decision._replace(notes=notes_of(asks, totals))

    def quote(self, name: str, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return quote(self._account_states(name), costs)

    def largest(self, name: str, kind: Kind[G], times: int) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        try:
            return largest(self._account_states(name), kind, times)
        except AccountClosed:
            return None

    def calibrate(self, name: str, question: CalibrationQuestion) -> Calibration | None:
        """Return the least noise with which the requests of a question are all admitted, or None."""
        try:
            return calibrate(self._account_states(name), question)
        except AccountClosed:
            return None

    def how_many(self, name: str, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row."""
        try:
            return how_many(self._account_states(name), cost)
        except AccountClosed:
            return 0

    def _account_states(self, *names: str) -> list[AccountState]:
        """Read the paths at one moment; an account that is closed, here or above, admits nothing."""
        paths = [self.opened(name) for name in names]
        balances = self.store.balances({one for opened in paths for one in opened.names})
        states = [state for opened in paths for state in opened.states(balances)]
        for state in states:
            if balances[state.name].closed:
                raise AccountClosed(f"{state.name!r} is closed and takes no new charges")
        return states

    def lifetime(self, name: str) -> Lifetime | None:
        """Return what an account and those linked to it, before and after, promise together.

        It is None if the account is alone and no schedule has opened it.
        """
        names = linked([balance.head for balance in self.store.balances().values()], name)
        opened = {one: self.opened(one) for one in names}
        epoch = next((one for one in opened.values() if one.renewal is not None), None)
        if len(names) == 1 and epoch is None:
            return None
        policies = {one: about.compiled.policy for one, about in opened.items()}
        return together(policies)._replace(schedule="" if epoch is None else _schedule_text(epoch, opened))

    def _lifetimes(self, names: Iterable[str]) -> tuple[Lifetime, ...]:
        found = [self.lifetime(name) for name in names]
        return tuple(dict.fromkeys(lifetime for lifetime in found if lifetime is not None))

    def history(self, name: str, first: int, count: int) -> list[HistoryEntry]:
        """Return a page of entries, with the names and notes that were not erased."""
        entries = self.store.entries(name, first, count)  # before what stands beside them, which is there by then
        notes, names = self.store.notes(name, first, count), self.store.principals()
        return [_history_entry(entry, names, notes) for entry in entries]

    def events(self, after: str, count: int, names: Iterable[str] | None = None) -> Events:
        """Return entries of all accounts, or of the named ones, that follow a cursor, at most `count`.

        Populations have no events. Accounts that were quiet for longest come first, so a busy one keeps none waiting.
        """
        balances = self._event_balances(names)
        if after == NOW:
            return Events((), cursor_to_text({name: one.sequence + 1 for name, one in balances.items()}), more=False)
        positions = cursor_from_text(after)
        _require_behind(positions, balances, balances if names is not None else positions)
        news = [balance for name, balance in balances.items() if positions.get(name, 0) <= balance.sequence]
        news = sorted(news, key=lambda balance: (balance.time, balance.head.name))[: min(count, _MAX_TOGETHER)]
        principals, parts = self.store.principals() if news else {}, []
        for balance in news:
            name, first = balance.head.name, positions.get(balance.head.name, 0)
            share = min(max(1, count // len(news)), balance.sequence + 1 - first)
            entries = self.store.entries(name, first, share)
            notes = self.store.notes(name, first, share)
            parts.append([_history_entry(entry, principals, notes) for entry in entries])
        found: list[HistoryEntry] = []
        length = 0
        for past in heapq.merge(*parts, key=lambda past: past.written):
            if length > _MAX_EVENTS_LENGTH:
                break
            found.append(past)
            length += len(past.entry.cost) + len(past.note)
            positions[past.entry.account] = past.sequence + 1
        more = any(positions.get(name, 0) <= balance.sequence for name, balance in balances.items())
        return Events(tuple(found), cursor_to_text(positions), more)

    def _event_balances(self, names: Iterable[str] | None) -> dict[str, Balance]:
        """Return the accounts that have events, at one moment."""
        try:
            balances = self.store.balances(names)
        except LedgerNotFound:  # no account was opened yet
            return {}
        return {name: balance for name, balance in balances.items() if self.opened(name).population is None}

    def verify(self, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Replay everything, at one moment."""
        transfer.check_checkpoint(checkpoint)
        with self.store.snapshot() as snapshot:
            return audit(snapshot, checkpoint, progress)

    def checkpoint(self) -> Checkpoint:
        """Return the last sequence and seal of every account."""
        return Checkpoint({name: (b.sequence, b.seal) for name, b in self.store.balances().items()})

    def export(self, file: IO[str], progress: Progress | None) -> Checkpoint:
        """Write the whole ledger as JSON Lines."""
        with self.store.snapshot() as snapshot:
            return transfer.export(snapshot, file, progress)

    def import_(self, file: IO[str], checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read a copy in."""
        found = transfer.take_in(self.store, transfer.lines(file), self.principal, checkpoint, progress)
        self.forget()
        return found

    def backup(self, path: Path, progress: Progress | None) -> Checkpoint:
        """Copy the whole ledger into a new SQLite file."""
        with self.store.snapshot() as snapshot:
            return transfer.backup(transfer.pieces(snapshot), path, progress)

    def restore(self, path: Path, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read a backup in."""
        with transfer.open_backup(path) as snapshot:
            found = transfer.take_in(self.store, transfer.pieces(snapshot), self.principal, checkpoint, progress)
        self.forget()
        return found

    def population(self, ledger: Any, name: str, location: Any) -> Any:  # noqa: ANN401  see `_populations`
        """Open a population; its files are on this machine."""
        return _populations().open(name, ledger=ledger, location=location)

    def create_population(  # noqa: PLR0913  the choices that are made once
        self,
        ledger: Any,  # noqa: ANN401  as above
        name: str,
        policy: Policy | Compiled,
        *,
        location: Any,  # noqa: ANN401  a path
        key: str | None,
        note: str,
        **choices: Any,
    ) -> Any:  # noqa: ANN401  as above
        """Create a population without people, in a new folder of this machine."""
        if location is None:
            raise InvalidArgument("location must be the path of a new folder for the files of the population")
        made = _populations().create
        return made(name, policy, ledger=ledger, location=location, ids=0, key=key, note=note, **choices)

    def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry."""
        name, sequence = parse_entry_id(entry)
        erased = self.store.erase_note(name, sequence)
        if not erased and [one.sequence for one in self.store.entries(name, sequence, 1)] != [sequence]:
            raise EntryNotFound(f"there is no entry {shown(entry)} in this ledger")
        return erased

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; one's own is looked up again."""
        erased = self.store.erase_principal(check_key(name, "principal"))
        if name == self.principal:
            self.forget()
        return erased

    def leave(self) -> None:
        """Close files and connections; those of the backend that this one was made from stay open."""
        if self._shared:
            self.store = MemoryStore(self.store.url)  # an empty one, which is closed, in its place
            self.engine = LedgerEngine(self.store)
        self.store.close()


def _populations() -> Any:  # noqa: ANN401  a class of a higher layer
    """Return the class of populations by its public name: a ledger knows nothing else of them."""
    return import_module("odograph").Population


def _schedule_text(epoch: Opened, opened: Mapping[str, Opened]) -> str:
    """Return what a schedule promises, and what linked accounts promise beside it that it has not opened."""
    renewal, policy = cast("Renewal", epoch.renewal), epoch.compiled.policy
    others = {name: one.compiled.policy for name, one in opened.items() if one.renewal is None}
    beside = f"; beside it {together(others)}" if others else ""
    return f"{renewal.schedule.promise_text(policy)}{beside}"


def _history_entry(entry: Entry, names: Mapping[str, str], notes: Mapping[int, Note]) -> HistoryEntry:
    """Return an entry with the names and notes that were not erased."""
    note = (notes[entry.sequence].text if entry.sequence in notes else _ERASED) if entry.note else ""
    return history_entry(entry, names.get(entry.principal, _ERASED), note)


def _guarantee_of(entry: Entry) -> Guarantee:
    guarantee = entry.guarantee
    if guarantee is None:
        raise LedgerCorrupt(f"entry {entry.id} charges for nothing")
    return guarantee


def _require_behind(positions: Mapping[str, int], balances: Mapping[str, Balance], names: Iterable[str]) -> None:
    """Raise if more entries of one of these accounts were read than there are."""
    for name in names:
        read, size = positions.get(name, 0), balances[name].sequence + 1 if name in balances else 0
        if read > size:
            raise InvalidArgument(
                f"after is ahead of this ledger: {name!r} has {size} entries, and {read} were read. The ledger was"
                " restored from an older copy, or the cursor is of another one; verify it against a checkpoint, and"
                " begin without `after`"
            )


def _user() -> str:
    """Return the name of the operating system's user: the default principal."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid-{os.getuid()}"


def check_reason(verb: str, note: object) -> None:
    """Raise if a void has no reason."""
    if verb == "void" and (not isinstance(note, str) or not note.strip()):
        raise InvalidArgument(f"reason must be a non-empty string that says why nothing was run (got {note!r})")


def with_counter_offer(asks: tuple[Ask, ...], refused: Refused) -> Decision:
    """Return a refusal with the largest request that would fit there, if the others stay as they are."""
    decision = refused.decision
    totals = dict(refused.totals)
    for i, ask in enumerate(asks):
        if i == refused.leg:
            continue
        for name, compiled, price, *_ in ask.targets:
            other = decide(compiled.meters, totals[name], price)
            if not other.admitted:
                return decision  # no offer for one account makes the whole request fit
            totals[name] = other.totals_after
    path = [AccountState(target.name, target.compiled, totals[target.name]) for target in asks[refused.leg].targets]
    return with_offer(path, decision, decision.account)


def notes_of(asks: tuple[Ask, ...], totals: Mapping[str, Totals], falls: int = MOST_FALLS) -> tuple[str, ...]:
    """Return the notes on requests that are admitted together, of which the accounts had spent `totals` before."""
    after, found = dict(totals), list[str]()
    for ask in asks:
        path = [AccountState(target.name, target.compiled, after[target.name]) for target in ask.targets]
        for name, compiled, price, *_ in ask.targets:
            decision = decide(compiled.meters, after[name], price, ask.cost)
            after[name] = decision.totals_after
        found += notes_on(path, decision, max(0, falls - len(found)), named=len(asks) > 1)
    return tuple(found)
