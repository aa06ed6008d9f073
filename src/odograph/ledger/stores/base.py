"""The Store protocol, and its contract in words.

A store keeps entries, balances, keys and the erasable side tables. It decides nothing: `write` hands what was read
inside one transaction to a function and stores what that returns, or nothing.

1. **One transaction.** `write(wants, work)` locks the wanted accounts, reads their balances and keys under those
   locks, calls `work(state)` once or more (again from the start if another process won a race), stores the changes,
   and returns only when they are durable. If it raises, nothing was stored, with one exception:
2. **Unknown outcomes.** If the store was lost at the very moment of committing, `ServiceUnavailable` is raised, and
   the same key asked again tells what happened.
3. **Nothing is cached** from one transaction to the next, except what never changes: entries.
4. **Unique.** No two accounts have a name in common, and no two keys an owner and a text. Of two processes that try
   at once, one is told what the other did.
5. **Nothing waits for another's lock.** Accounts that another client holds for longer than a moment are named in
   `State.held`, and the work leaves out the requests that want them; they are asked for again until `timeout`.
6. **Time** is the store's, read after the locks are held.
7. **Snapshots.** `balances` and `records` see one moment, between transactions.
8. Entries and keys are never updated or deleted; side tables are.
9. **Erased names.** The keys of a principal whose name was erased stay used, for every principal, as it is not known
   any more who that was: a wanted key that its owner has not used, and such a principal has, leads to a hit whose
   request is `ERASED`. So does a key that any principal has used, if the owner's own name was erased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from odograph.core.gate import Totals
from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError
from odograph.ledger.entries import VERSION, Entry, sealed, totals_from_text, totals_to_text

__all__ = [
    "ERASED",
    "OPENING",
    "Balance",
    "Changes",
    "Head",
    "IdempotencyRecord",
    "Note",
    "Record",
    "RowLocked",
    "Snapshot",
    "State",
    "Store",
    "Wants",
    "Work",
    "closed",
    "together",
]


class Wants(NamedTuple):
    """What a group of requests needs to read before it can be decided."""

    accounts: frozenset[str] = frozenset()
    keys: frozenset[tuple[str, str]] = frozenset()  # owner and key
    trees: frozenset[str] = frozenset()  # accounts wanted with everything below them
    datasets: frozenset[str] = frozenset()  # datasets of which any one block is wanted
    opens: bool = False  # whether accounts are opened or closed: such groups come one at a time


def together(wants: Sequence[Wants]) -> Wants:
    """Return what all of them want."""
    accounts, keys, trees, datasets, opens = zip(*wants, strict=True)
    nothing: frozenset[str] = frozenset()
    return Wants(
        nothing.union(*accounts),
        frozenset[tuple[str, str]]().union(*keys),
        nothing.union(*trees),
        nothing.union(*datasets),
        any(opens),
    )


OPENING: Final = ""  # among the names of accounts: the lock that is taken to open or close any of them


class RowLocked(LedgerBusy):
    """Another client holds an account that is wanted. Nothing was charged, and the request is to be tried again."""


class Head(NamedTuple):
    """What never changes about an account: where it stands among the others, and whom it protects."""

    name: str
    parent: str
    successor_of: str
    dataset: str
    privacy_unit: str
    neighbors: str


@dataclass(slots=True)
class Balance:
    """What changes about an account. Derived from its entries, which is what `verify` checks."""

    head: Head
    sequence: int  # of the last entry
    seal: str
    time: int
    totals: Totals
    closed: bool
    linked: bool = False  # whether it has a predecessor or successors
    origin: str = ""  # the seal of the first entry: an account of the same name in another ledger has another

    @classmethod
    def read(cls, row: Sequence[Any]) -> Balance:
        """Read a row of the accounts table."""
        (
            name,
            parent,
            successor_of,
            dataset,
            unit,
            neighbors,
            sequence,
            seal,
            time,
            totals,
            closed,
            linked,
            origin,
        ) = row
        head = Head(name, parent or "", successor_of or "", dataset, unit, neighbors)
        try:
            return cls(head, sequence, seal, time, totals_from_text(totals), bool(closed), bool(linked), origin)
        except (TypeError, ValueError) as problem:
            raise LedgerCorrupt(f"the stored totals of {name!r} are not totals: {totals!r}") from problem

    @property
    def moved(self) -> tuple[int, str, int, str, bool, bool]:
        """The columns of the accounts table that change."""
        return self.sequence, self.seal, self.time, totals_to_text(self.totals), self.closed, self.linked

    def append(  # noqa: PLR0913  the fields of an entry, each by its name
        self,
        *,
        time: int,
        principal: str,
        verb: str,
        legs: str,
        request: str,
        cost: str = "",
        price: str = "",
        key: str = "",
        note: str = "",
        detail: str = "",
    ) -> Entry:
        """Make the next entry of the account, sealed over the one before it, and move on to it."""
        self.sequence = sequence = self.sequence + 1
        self.time = time
        body = (
            VERSION,
            self.head.name,
            sequence,
            time,
            principal,
            verb,
            legs,
            cost,
            price,
            key,
            request,
            note,
            detail,
        )
        self.seal = seal = sealed(self.seal, body)
        return _named(Entry, (*body, seal))


# One is made at every charge, and a named tuple's own constructor takes twice as long as the tuple's.
_named: Final = tuple.__new__


ERASED: Final = ""  # in place of a request: that of a principal whose name was erased


class IdempotencyRecord(NamedTuple):
    """Where a key was used, and for which request."""

    account: str
    sequence: int
    verb: str
    request: str


class Note(NamedTuple):
    """The text of a note, with the salt that makes its digest say nothing once both are erased."""

    account: str
    sequence: int
    salt: str
    text: str


@dataclass(slots=True)
class State:
    """What a transaction read: balances by name, known keys, and the time. Requests move it on, one by one."""

    now: int
    balances: dict[str, Balance]
    keys: dict[tuple[str, str], IdempotencyRecord]
    held: frozenset[str] = frozenset()  # wanted accounts that another client has locked; OPENING if it opens some


@dataclass(slots=True)
class Changes:
    """What a transaction is to store; balances are those of the state, as far as the entries moved them."""

    entries: list[Entry] = field(default_factory=list)
    opened: list[Balance] = field(default_factory=list)
    moved: dict[str, Balance] = field(default_factory=dict)
    keys: dict[tuple[str, str], IdempotencyRecord] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


Work = Callable[[State], Changes]


# An entry, and where its key leads: None if the key is not known.
Record: TypeAlias = tuple[Entry, tuple[str, int] | None]


class Snapshot(Protocol):
    """A whole ledger at one moment."""

    @property
    def balances(self) -> Sequence[Balance]:
        """Every account, in the order of their names."""
        ...

    @property
    def size(self) -> int:
        """How many entries there are."""
        ...

    @property
    def keys(self) -> int:
        """How many keys there are."""
        ...

    def records(self) -> Iterator[Record]:
        """Every entry, account by account in the order of their names, each from its first."""
        ...

    def notes(self) -> Iterator[Note]:
        """Every note that was not erased."""
        ...

    def principals(self) -> dict[str, str]:
        """The names that were not erased, by identity."""
        ...


class Store(Protocol):
    """Where a ledger is kept."""

    url: str  # without a password: what messages and pages may show
    timeout: float  # seconds to wait for what others hold

    def create(self) -> None:
        """Make the place for a ledger if there is none; nothing else does."""
        ...

    def write(self, wants: Wants, work: Work) -> None:
        """Run one durable transaction, as the contract says; raise `RowLocked` if others hold all of it."""
        ...

    def probe(self) -> None:
        """Write durably and change nothing: raise what would keep a charge from being stored now."""
        ...

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one durable transaction, making the place if need be; the ledger must be empty."""
        ...

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment: of the named accounts that there are, or of all."""
        ...

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some entries of an account, from a sequence on."""
        ...

    def pending(self, account: str) -> list[Entry]:
        """Read the reservations that this account was asked for and that nobody has resolved."""
        ...

    def voids(self, account: str) -> int:
        """Count the reservations charged to this account that were voided."""
        ...

    def notes(self, account: str, first: int, count: int) -> dict[int, Note]:
        """Read the notes of some entries, by sequence, as far as they were not erased."""
        ...

    def principal(self, name: str) -> str:
        """Return the identity of a principal, a new random one if the name is new."""
        ...

    def principals(self) -> dict[str, str]:
        """Read the names that were not erased, by identity."""
        ...

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note's text and salt; say whether there was one."""
        ...

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; say whether there was one. The identity in the entries stays, and its keys."""
        ...

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Look at the whole ledger at one moment."""
        ...

    def close(self) -> None:
        """Close files and connections; every later call raises what `closed` returns."""
        ...


def closed(url: str) -> LedgerError:
    """Return the error of a store that is used after it was closed."""
    return LedgerError(f"{url} was closed in this program; nothing was charged. Connect again to use it")
