"""The Store protocol and its contract.

A store keeps entries, balances, keys and the erasable side tables. It makes no decisions: `write` passes what it read
inside one transaction to a function, and stores the changes that the function returns.

1. **One transaction.** `write(wants, work)` locks the wanted accounts, reads their balances and keys under those
   locks, calls `work(state)` (again from the start if another process won a race), stores the changes, and returns
   only when they are durable. If it raises, nothing was stored, with one exception:
2. **Unknown outcomes.** If the store was lost during the commit, it raises `OutcomeUnknown`. The same request with
   the same key then tells whether it was stored.
3. **No cache.** Nothing is kept from one transaction to the next, except entries, which never change.
4. **Uniqueness.** An account's name is unique, and so is a key with its owner. If two processes try at once, the
   second one sees what the first one stored.
5. **No waiting for locks of others.** Accounts that another client holds for longer than a moment are named in
   `State.held`. The work leaves out the requests that want them; they are tried again until `timeout`.
6. **Time** comes from the store, and is read after the locks are held.
7. **Snapshots.** `balances` and `records` show the ledger at one moment, between transactions.
8. Entries and keys are never updated or deleted; side tables are.
9. **Erased names.** When a principal's name is erased, it is no longer known who used its keys, so they count as used
   by every principal: for a wanted key that its owner has not used, but such a principal has, `State.keys` has a
   record whose request is `ERASED`. If the owner's own name was erased, this holds for a key that any principal has
   used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from odograph.core.gate import Totals
from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError
from odograph.ledger.entries import VERSION, Entry, sealed, totals_from_text, totals_to_text

__all__ = [
    "ERASED",
    "EVERY",
    "OPENING",
    "SCHEMA",
    "Balance",
    "Changes",
    "Head",
    "IdempotencyRecord",
    "Note",
    "Pending",
    "Record",
    "RowLocked",
    "Snapshot",
    "State",
    "Store",
    "Wants",
    "Work",
    "closed_error",
    "keep_records",
    "migrations",
    "queries",
    "schema",
    "together",
]


class Wants(NamedTuple):
    """What a group of requests needs to read before it can be decided."""

    accounts: frozenset[str] = frozenset()
    keys: frozenset[tuple[str, str]] = frozenset()  # owner and key
    trees: frozenset[str] = frozenset()  # accounts wanted with everything below them
    datasets: frozenset[str] = frozenset()  # datasets of which any one block is wanted
    opens: bool = False  # whether accounts are opened or closed: such groups run one at a time


def together(wants: Sequence[Wants]) -> Wants:
    """Return the union of what several requests want."""
    accounts, keys, trees, datasets, opens = zip(*wants, strict=True)
    nothing: frozenset[str] = frozenset()
    return Wants(
        nothing.union(*accounts),
        frozenset[tuple[str, str]]().union(*keys),
        nothing.union(*trees),
        nothing.union(*datasets),
        any(opens),
    )


OPENING: Final = ""  # in place of an account's name: the lock for opening and closing accounts


class RowLocked(LedgerBusy):
    """Another client holds a wanted account; the engine tries the request again until the timeout."""


class Head(NamedTuple):
    """The part of an account that never changes: its relatives, and whom it protects."""

    name: str
    parent: str
    successor_of: str
    dataset: str
    privacy_unit: str
    neighbors: str


@dataclass(slots=True)
class Balance:
    """The part of an account that changes. It follows from the account's entries, and `verify` checks that."""

    head: Head
    sequence: int  # of the last entry
    seal: str
    time: int
    totals: Totals
    closed: bool
    linked: bool = False  # whether it has a predecessor or successors, or is an epoch of a schedule
    origin: str = ""  # the seal of the first entry, which tells accounts of the same name in two ledgers apart

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
        head = _named(Head, (name, parent or "", successor_of or "", dataset, unit, neighbors))
        try:
            return cls(head, sequence, seal, time, totals_from_text(totals), bool(closed), bool(linked), origin)
        except (TypeError, ValueError) as problem:
            raise LedgerCorrupt(f"the stored totals of {name!r} cannot be read: {totals!r}") from problem

    @property
    def columns(self) -> tuple[int, str, int, str, int, int]:
        """The values of the columns of the accounts table that change: sqlite3 takes a bool in twice the time."""
        return self.sequence, self.seal, self.time, totals_to_text(self.totals), int(self.closed), int(self.linked)

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


# Every charge makes them, and a named tuple's own constructor takes twice as long as the tuple's.
_named: Final = tuple.__new__


ERASED: Final = ""  # in place of a request, if its principal's name was erased


class IdempotencyRecord(NamedTuple):
    """Where a key was used, and for which request."""

    account: str
    sequence: int
    verb: str
    request: str


class Note(NamedTuple):
    """The text of a note, and the salt of its digest: once both are erased, the digest reveals nothing."""

    account: str
    sequence: int
    salt: str
    text: str


@dataclass(slots=True)
class State:
    """What a transaction has read: balances by name, known keys, and the time. Each request of a group updates it."""

    now: int
    balances: dict[str, Balance]
    keys: dict[tuple[str, str], IdempotencyRecord]
    held: frozenset[str] = frozenset()  # wanted accounts that another client has locked; OPENING if it opens some


@dataclass(slots=True)
class Changes:
    """What a transaction has to store. `moved` are balances of the state that have new entries."""

    entries: list[Entry] = field(default_factory=list)
    opened: list[Balance] = field(default_factory=list)
    moved: dict[str, Balance] = field(default_factory=dict)
    keys: dict[tuple[str, str], IdempotencyRecord] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)


Work = Callable[[State], Changes]


def keep_records(records: dict[tuple[str, str], IdempotencyRecord], rows: Iterable[Sequence[Any]]) -> bool:
    """Keep the rows of used keys by owner and key, and return whether one said that names were erased.

    Every charge looks up its keys. Few ledgers have erased names, so the keys of erased principals have a query of
    their own.
    """
    are_erased = False
    for owner, key, account, *rest in rows:
        if account:
            records[owner, key] = IdempotencyRecord(account, *rest)
        else:
            are_erased = True
    return are_erased


EVERY: Final = 10**18  # a count that no account reaches

# An entry, and the account and sequence that its key is stored with: None if the key is not stored.
Record: TypeAlias = tuple[Entry, tuple[str, int] | None]


class Pending(NamedTuple):
    """A reservation that is neither committed nor voided, in one of the accounts that it charged."""

    account: str
    reservation: str  # its id
    sequence: int  # of its first entry in the account


class Snapshot(Protocol):
    """A complete ledger at one moment."""

    @property
    def balances(self) -> Sequence[Balance]:
        """Every account, in the order of their names."""
        ...

    @property
    def size(self) -> int:
        """The number of entries."""
        ...

    @property
    def keys(self) -> int:
        """The number of keys."""
        ...

    def records(self) -> Iterator[Record]:
        """Yield every entry, account by account in the order of their names, by sequence."""
        ...

    def notes(self) -> Iterator[Note]:
        """Yield every note that was not erased."""
        ...

    def principals(self) -> dict[str, str]:
        """Return the names that were not erased, by identity."""
        ...

    @property
    def pending(self) -> Collection[Pending]:
        """The pending reservations, as the store lists them."""
        ...

    @property
    def voids(self) -> Mapping[str, int]:
        """How many reservations were voided, as the store counts them, of each account that has any."""
        ...


class Store(Protocol):
    """Where a ledger is kept."""

    url: str  # without a password, for messages and pages
    timeout: float  # seconds to wait for locks of others

    def create(self) -> None:
        """Create the file or tables of a ledger if there are none. Only this and `load` do."""
        ...

    def write(self, wants: Wants, work: Work) -> None:
        """Run one durable transaction, as the contract says; raise `RowLocked` if others hold everything wanted."""
        ...

    def probe(self) -> None:
        """Write durably without changing anything; raise the error that a charge would raise now."""
        ...

    def settings(self) -> dict[str, str]:
        """Return the settings of the database that durability depends on, and its clock, for an operator."""
        ...

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one durable transaction, in an empty ledger, which is created if there is none."""
        ...

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment: of all accounts, or of the named ones that exist."""
        ...

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read at most `count` entries of an account, from sequence `first` on."""
        ...

    def openings(self, accounts: Iterable[str]) -> dict[str, Entry]:
        """Read the first entries of the named accounts that exist."""
        ...

    def pending(self, account: str, first: int, count: int) -> list[Entry]:
        """Read the reservations that named this account and are neither committed nor voided, oldest first.

        Each by its first entry in the account: at most `count`, from sequence `first` on.
        """
        ...

    def pending_count(self, account: str) -> int:
        """Count the pending reservations of an account."""
        ...

    def pending_counts(self) -> dict[str, int]:
        """Count the pending reservations of every account that has any."""
        ...

    def voids(self, account: str) -> int:
        """Count the reservations charged to this account that were voided."""
        ...

    def notes(self, account: str, first: int, count: int) -> dict[int, Note]:
        """Read the notes of some entries that were not erased, by sequence."""
        ...

    def principal(self, name: str) -> str:
        """Return the identity of a principal; a new name gets a random one."""
        ...

    def principals(self) -> dict[str, str]:
        """Read the names that were not erased, by identity."""
        ...

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note's text and salt; return whether there was one."""
        ...

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; return whether there was one. Entries keep its identity; its keys stay used."""
        ...

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        """Read the complete ledger at one moment."""
        ...

    def close(self) -> None:
        """Close files and connections; every later call raises the error of `closed_error`."""
        ...


def closed_error(url: str) -> LedgerError:
    """Return the error for a store that is used after it was closed."""
    return LedgerError(f"{url} was closed in this program; connect again to use it")


# The SQL is in files: a schema, its migrations and named queries for each dialect.

SCHEMA: Final = 3  # the version that this code reads and writes, and the number of migrations

_NAMED: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def queries(dialect: str, package: str = __package__) -> dict[str, str]:
    """Return the queries of a dialect by name: the ledger's, or those of a package with the same layout."""
    parts = _NAMED.split(_text(package, dialect, "queries.sql"))[1:]
    return {name: text.strip().removesuffix(";") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def migrations(dialect: str) -> list[str]:
    """Return the scripts that create the current schema, in order."""
    return [_text(__package__, dialect, "migrations", f"{number:04}.sql") for number in range(1, SCHEMA + 1)]


def schema(dialect: str, package: str = __package__) -> str:
    """Return the current schema as one script; a test shows that the migrations lead to the same one."""
    return _text(package, dialect, "schema.sql")


def _text(package: str, *path: str) -> str:
    return files(package).joinpath("sql", *path).read_text(encoding="utf-8")
