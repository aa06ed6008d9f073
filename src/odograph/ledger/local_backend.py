"""The backend of a ledger that is kept here: accounts read once, requests priced and submitted, receipts made."""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from odograph.compile import compile_policy
from odograph.core.compiled import Compiled
from odograph.core.gate import Decision, decide
from odograph.core.guarantees import Guarantee
from odograph.core.planning import AccountState, G, Quote, largest, quote
from odograph.core.policy import Policy
from odograph.errors import (
    AccountClosed,
    AccountNotFound,
    BudgetExceeded,
    EntryNotFound,
    InvalidGuarantee,
    LedgerCorrupt,
    LedgerError,
    OutcomeUnknown,
    ReservationNotFound,
    ReservationResolved,
)
from odograph.ledger import transfer
from odograph.ledger.audit import audit
from odograph.ledger.backend import Opened, check_costs, offered
from odograph.ledger.commands import Ask, Author, Charge, Made, Refused, Repeated, Request, Resolve, Settled, settled
from odograph.ledger.engine import Writer
from odograph.ledger.entries import (
    Entry,
    Leg,
    check_key,
    check_name,
    check_note,
    legs_from_text,
    parse_entry_id,
    shown,
)
from odograph.ledger.lifetimes import Lifetime, linked, together
from odograph.ledger.openings import Close, Open, opening_of
from odograph.ledger.results import Checkpoint, Line, Past, Receipt, Verification
from odograph.ledger.steps import population_of
from odograph.ledger.stores.base import Balance, Changes, Head, IdempotencyRecord, State, Store, Wants
from odograph.ledger.stores.memory import MemoryStore
from odograph.progress import Progress

__all__ = ["LocalBackend"]

_ERASED: Final = "erased"


class LocalBackend:
    """The way of one principal into a store; the operating system's user, if nobody is named."""

    resolves = True

    def __init__(self, store: Store, principal: str | None = None, writer: Writer | None = None) -> None:
        self.store = store
        self.writer = writer or Writer(store)
        self._shared = False  # whether the store belongs to the backend that these were made from
        self.principal = check_key(_user() if principal is None else principal, "principal")
        self._identity = ""
        self._known: dict[str, Opened] = {}

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        return self.store.url

    def acting_as(self, principal: str) -> LocalBackend:
        """Return the backend of another principal, sharing the connection, the queue and what was read."""
        other = LocalBackend(self.store, principal, self.writer)
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
        self.submit(Open(self.author(key, note), head, compiled, population))

    def close(self, name: str, note: str) -> None:
        """Close an account and everything below it."""
        self.submit(Close(self.author(None, note), name))

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment."""
        return self.store.balances(names)

    def opened(self, name: str) -> Opened:
        """Return what an account was opened with, or raise `AccountNotFound`."""
        known = self._known.get(name)
        if known is None:
            check_name(name)
            found = self.store.entries(name, 0, 1)
            if not found:
                raise AccountNotFound(f"there is no account {name!r} in {self.store.url}; nothing was charged")
            head, compiled = opening_of(found[0])
            above = self.opened(head.parent).path if head.parent else ()
            known = self._known[name] = Opened(head, compiled, found[0].seal, above, population_of(found[0]))
        return known

    def author(self, key: str | None = None, note: str = "") -> Author:
        """Say who writes; a request without a key gets a random one, so that a lost answer can be asked for again."""
        key = secrets.token_hex(16) if key is None else check_key(key)
        identity = self._identity or self.identity()
        return Author(identity, key) if note == "" else Author(identity, key, check_note(note), secrets.token_hex(16))

    def identity(self) -> str:
        """Return the random identity that entries carry for this principal."""
        if not self._identity:
            self._identity = self.store.principal(self.principal)
        return self._identity

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
        request = self.request(verb, costs, key, note, expires)
        return self.charged(request, self.submit(request))

    def request(
        self,
        verb: str,
        costs: Mapping[str, Guarantee],
        key: str | None,
        note: str,
        expires: int | None = None,
    ) -> Charge:
        """Price what is asked for; nothing is charged before the request is submitted."""
        return Charge(self.author(key, note), verb, self.asks(costs), expires)

    @property
    def identified(self) -> bool:
        """Whether `author` finds the identity without reading the store."""
        return self._identity != ""

    def charged(self, request: Charge, outcome: Settled) -> Receipt:
        """Return the receipt of a charge that was carried out, or raise `BudgetExceeded` with what would fit."""
        if isinstance(outcome, Refused):
            raise BudgetExceeded(offered(request.asks, outcome))
        if request.verb == "reserve" and isinstance(outcome, Repeated):
            self._refuse_voided(request.author.key, f"{outcome.hit.account}#{outcome.hit.sequence}")
        return self.receipt(outcome, request.asks)

    def _refuse_voided(self, key: str, reservation: str) -> None:
        """Raise if the reservation that a key was used for was voided: it pays for nothing any more."""
        hit = self.found("", reservation)
        if hit is not None and hit.verb == "void":
            raise ReservationResolved(
                f"key {key!r} was used for reservation {reservation}, which was voided, so nothing is charged for it;"
                " a run needs another key"
            )

    def found(self, owner: str, key: str) -> IdempotencyRecord | None:
        """Return where a key was used; None if it is free."""
        found: dict[tuple[str, str], IdempotencyRecord] = {}

        def look(state: State) -> Changes:
            found.update(state.keys)
            return Changes()

        self.store.write(Wants(keys=frozenset([(owner, key)])), look)
        return found.get((owner, key))

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void a reservation."""
        if verb == "void" and (not isinstance(note, str) or not note.strip()):
            raise InvalidGuarantee(
                "void needs a reason: it says that the mechanism was not run, and somebody will ask; nothing changed"
            )
        reserved, legs = self.reserved(reservation)
        author = self.author(reservation, note)
        outcome = self.submit(Resolve(author, verb, reserved, legs))
        if isinstance(outcome, Refused):  # pragma: no cover  a resolution asks for nothing
            raise LedgerCorrupt("a resolution was refused")
        return self.receipt(outcome)

    def submit(self, request: Request) -> Settled:
        """Carry a request out durably."""
        return settled(request.author, self.writer.submit(request))

    def asks(self, costs: Mapping[str, Guarantee]) -> tuple[Ask, ...]:
        """Price what is asked of each account."""
        check_costs(costs)
        if len(costs) == 1:
            ((name, cost),) = costs.items()
            return (self.opened(name).ask(cost),)
        for name in costs:
            if name not in self._known:
                check_name(name, "account")
        # In the order of the names, so that the same request is the same however it was written.
        return tuple([self.opened(name).ask(costs[name]) for name in sorted(costs)])

    def receipt(self, outcome: Made | Repeated, asks: Sequence[Ask] = ()) -> Receipt:
        """Make a receipt: the same one from the entries just written and from those of the first time.

        `asks` are what was asked for, if that is known and need not be read from the entries.
        """
        again = isinstance(outcome, Repeated)
        if isinstance(outcome, Made):
            own, linked = outcome
        else:
            legs = legs_from_text(self.entry(outcome.hit.account, outcome.hit.sequence).legs)
            own = tuple([self.entry(*leg.own) for leg in legs])
            balances = self.store.balances([entry.account for entry in own])
            linked = tuple(name for name, balance in balances.items() if balance.linked)
        lines: list[Line] = []
        for i, entry in enumerate(own):
            cost = asks[i].cost if asks else _guarantee_of(entry)
            lines.append(Line(entry.account, entry.sequence, cost, entry.seal))
        first = own[0]
        try:
            lifetimes = self._lifetimes(linked) if linked else ()
            unsure = self.uncertified(own)
        except LedgerError as problem:
            if again:
                raise
            raise OutcomeUnknown(
                "this was charged, but its receipt could not be read; ask again with the same key to get it",
                key=first.key,
                charged=True,
            ) from problem
        return Receipt(first.verb, first.key, first.time, tuple(lines), first.expires, lifetimes, again, unsure)

    def uncertified(self, entries: Iterable[Entry]) -> tuple[str, ...]:
        """Return those accounts of some entries whose limits this installation does not know to keep the promise."""
        return tuple([entry.account for entry in entries if not self.opened(entry.account).certified])

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
        if not found or found[0].verb != "reserve" or found[0].called != reservation:
            raise ReservationNotFound(f"there is no reservation {shown(reservation)} in {self.store.url}")
        legs = legs_from_text(found[0].legs)
        places = [place for leg in legs for place in reversed(leg.places)]
        return tuple(self.entry(*place) for place in places), legs

    def reservation(self, reservation: str) -> Receipt:
        """Return the receipt of a reservation."""
        entries, legs = self.reserved(reservation)
        asked = {leg.own for leg in legs}
        own = [entry for entry in entries if (entry.account, entry.sequence) in asked]
        return self.receipt(Made(tuple(own)))

    def pending(self, name: str) -> list[Receipt]:
        """Return the reservations of an account that nobody has resolved."""
        ids = dict.fromkeys(entry.called for entry in self.store.pending(name))
        return [self.reservation(one) for one in ids]

    def voids(self, name: str) -> int:
        """Count the reservations charged to an account that were voided."""
        return self.store.voids(name)

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Say whether the accounts would admit their costs together, each with all above it; spend nothing."""
        asks = self.asks(costs)
        totals = {station.name: station.totals for station in self._account_states(*costs)}
        after = dict(totals)
        for i, ask in enumerate(asks):
            for name, compiled, asked, *_ in ask.stops:
                decision = decide(compiled.meters, after[name], asked, ask.cost)
                if not decision.admitted:
                    return offered(asks, Refused(i, decision._replace(account=name), totals))
                after[name] = decision.totals_after
        return decision

    def quote(self, name: str, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return quote(self._account_states(name), costs)

    def largest(self, name: str, kind: type[G] | G, times: int) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        try:
            return largest(self._account_states(name), kind, times)
        except AccountClosed:
            return None

    def _account_states(self, *names: str) -> list[AccountState]:
        """Read the paths at one moment; an account that is closed, here or above, admits nothing."""
        paths = [self.opened(name) for name in names]
        balances = self.store.balances({one for opened in paths for one in opened.names})
        stations = [station for opened in paths for station in opened.stations(balances)]
        for station in stations:
            if balances[station.name].closed:
                raise AccountClosed(f"{station.name!r} is closed and takes no new charges")
        return stations

    def lifetime(self, name: str) -> Lifetime | None:
        """Return what an account and those linked to it, before and after, promise together; None if it is alone."""
        names = linked([balance.head for balance in self.store.balances().values()], name)
        return together({one: self.opened(one).compiled.policy for one in names}) if len(names) > 1 else None

    def _lifetimes(self, names: Iterable[str]) -> tuple[Lifetime, ...]:
        found = [self.lifetime(name) for name in names]
        return tuple(dict.fromkeys(lifetime for lifetime in found if lifetime is not None))

    def history(self, name: str, first: int, count: int) -> list[Past]:
        """Return a page of entries, with the names and notes that were not erased."""
        entries = self.store.entries(name, first, count)  # before what stands beside them, which is there by then
        notes, names = self.store.notes(name, first, count), self.store.principals()
        return [
            Past(
                entry,
                names.get(entry.principal, _ERASED),
                (notes[entry.sequence].text if entry.sequence in notes else _ERASED) if entry.note else "",
            )
            for entry in entries
        ]

    def verify(self, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Replay everything, at one moment."""
        transfer.check_checkpoint(checkpoint)
        with self.store.snapshot() as snapshot:
            return audit(snapshot, checkpoint, progress)

    def checkpoint(self) -> Checkpoint:
        """Say where every account stands."""
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
        """Close files and connections; if they are another's, these backend only."""
        if self._shared:
            self.store = MemoryStore(self.store.url)  # an empty one, which is closed, in its place
            self.writer = Writer(self.store)
        self.store.close()


def _guarantee_of(entry: Entry) -> Guarantee:
    guarantee = entry.guarantee
    if guarantee is None:
        raise LedgerCorrupt(f"entry {entry.place} charges for nothing")
    return guarantee


def _user() -> str:
    """Return the name of the operating system's user, for a ledger that was not told who writes."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid-{os.getuid()}"
