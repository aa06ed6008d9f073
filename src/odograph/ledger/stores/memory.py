"""A ledger in memory, for notebooks and tests. It ends with its process."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from odograph.concurrency import refuse_reentry, renew_after_fork
from odograph.errors import AccountClosed, LedgerCorrupt, LedgerError
from odograph.ledger.entries import RESOLUTIONS, Entry, key_owner
from odograph.ledger.stores.base import (
    ERASED,
    Balance,
    Changes,
    IdempotencyRecord,
    Note,
    Pending,
    Record,
    State,
    Wants,
    Work,
    closed_error,
)

__all__ = ["MemorySnapshot", "MemoryStore"]


class MemoryStore:
    """Dictionaries behind one lock."""

    timeout = 0.0

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._forked = False
        self._lock = threading.RLock()
        self._closed = False
        self._balances: dict[str, Balance] = {}
        self._entries: dict[str, list[Entry]] = {}
        self._keys: dict[tuple[str, str], IdempotencyRecord] = {}
        self._notes: dict[tuple[str, int], Note] = {}
        self._principals: dict[str, str] = {}  # by identity
        self._erased: set[str] = set()  # identities whose names are gone
        # By account: the open reservations, oldest first, each with the sequence of its first entry there.
        self._pending: dict[str, dict[str, int]] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:  # pragma: no cover  in a forked process, which is not measured
        """Replace the lock, which another thread of the parent process may have held, and take no more charges."""
        self._lock = threading.RLock()
        self._forked = True

    def create(self) -> None:
        """Do nothing."""

    def write(self, wants: Wants, work: Work) -> None:
        """Pass copies to the work, and store its changes under the same lock."""
        if self._forked:  # pragma: no cover  in a forked process, which is not measured
            raise AccountClosed(
                "a ledger in memory takes no charges in a forked process: its copy there would be a second budget"
            )
        with self._free():
            names = {*wants.accounts}
            below = [*wants.trees]
            for name in below:
                below += [balance.head.name for balance in self._balances.values() if balance.head.parent == name]
            names |= {*below}
            for balance in self._balances.values():
                if balance.head.dataset in wants.datasets:
                    names.add(balance.head.name)
            keys = {key: self._keys[key] for key in wants.keys if key in self._keys}
            for owner, key in wants.keys - keys.keys():
                others = (
                    {*self._principals, *self._erased} if owner in self._erased else self._erased if owner else ()
                )
                for other in others:
                    if (other, key) in self._keys:
                        keys[owner, key] = self._keys[other, key]._replace(request=ERASED)
            changes = work(State(time.time_ns() // 1000, self._copies(names), keys))
            try:
                self._store(changes)
            except BaseException:  # an interrupt came when a part was stored
                self._store(changes)
                raise

    def probe(self) -> None:
        """Do nothing: memory can always be written."""

    def settings(self) -> dict[str, str]:
        """Return nothing: a process has no settings."""
        return {}

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store all the parts, or none."""
        with self._free():
            if self._balances:
                raise LedgerError("the ledger is not empty: a copy can only be read into a new one")
            staged = MemoryStore()
            for part in parts:
                if staged._keys.keys() & part.keys.keys():
                    raise LedgerCorrupt("a key was used twice in the copy; nothing was imported")
                staged._store(part)
            self._balances, self._entries, self._pending = staged._balances, staged._entries, staged._pending
            self._keys, self._notes = staged._keys, staged._notes
            self._principals = {**principals}
            self._erased = {owner for owner, _ in self._keys if owner} - principals.keys()

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Copy balances at one moment."""
        with self._free():
            return self._copies(sorted(self._balances) if names is None else names)

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some entries of an account."""
        with self._free():
            return self._entries.get(account, [])[first : first + count]

    def openings(self, accounts: Iterable[str]) -> dict[str, Entry]:
        """Read the first entries of some accounts."""
        with self._free():
            return {account: self._entries[account][0] for account in accounts if account in self._entries}

    def pending(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some open reservations of an account."""
        with self._free():
            found = self._pending.get(account, {}).values()
            return [self._entries[account][sequence] for sequence in found if sequence >= first][:count]

    def pending_count(self, account: str) -> int:
        """Count the open reservations of an account."""
        with self._free():
            return len(self._pending.get(account, {}))

    def pending_counts(self) -> dict[str, int]:
        """Count the open reservations of every account."""
        with self._free():
            return {account: len(found) for account, found in self._pending.items() if found}

    def voids(self, account: str) -> int:
        """Count the reservations of an account that were voided."""
        with self._free():
            return sum(entry.verb == "void" for entry in self._entries.get(account, []))

    def notes(self, account: str, first: int, count: int) -> dict[int, Note]:
        """Read the notes of some entries."""
        with self._free():
            found = (self._notes.get((account, sequence)) for sequence in range(first, first + count))
            return {note.sequence: note for note in found if note is not None}

    def principal(self, name: str) -> str:
        """Return the identity of a principal."""
        with self._free():
            for identity, known in self._principals.items():
                if known == name:
                    return identity
            identity = secrets.token_hex(16)
            self._principals[identity] = name
            return identity

    def principals(self) -> dict[str, str]:
        """Read the names, by identity."""
        with self._free():
            return {**self._principals}

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note."""
        with self._free():
            return self._notes.pop((account, sequence), None) is not None

    def erase_principal(self, name: str) -> bool:
        """Erase a name."""
        with self._free():
            found = [identity for identity, known in self._principals.items() if known == name]
            for identity in found:
                del self._principals[identity]
                self._erased.add(identity)
            return bool(found)

    @contextmanager
    def snapshot(self) -> Iterator[MemorySnapshot]:
        """Yield a copy."""
        with self._free():
            copies = [*self._copies(sorted(self._balances)).values()]
            entries = {name: (*found,) for name, found in self._entries.items()}
            pending = {Pending(account, *one) for account, found in self._pending.items() for one in found.items()}
            seen = MemorySnapshot(
                copies, entries, {**self._keys}, [*self._notes.values()], {**self._principals}, pending
            )
        yield seen

    def close(self) -> None:
        """Refuse all later calls."""
        refuse_reentry(self._lock)
        with self._lock:
            self._closed = True

    def _free(self) -> threading.RLock:
        """Return the lock, or raise if this thread holds it already or the store was closed."""
        refuse_reentry(self._lock)
        if self._closed:
            raise closed_error(self.url)
        return self._lock

    def _copies(self, names: Iterable[str]) -> dict[str, Balance]:
        return {name: replace(self._balances[name]) for name in names if name in self._balances}

    def _store(self, changes: Changes) -> None:
        """Store changes, of which a part may be stored already."""
        for balance in (*changes.opened, *changes.moved.values()):
            self._balances[balance.head.name] = replace(balance)
        for entry in changes.entries:
            own = self._entries.setdefault(entry.account, [])
            if len(own) <= entry.sequence:
                own.append(entry)
            pending = self._pending.setdefault(entry.account, {})
            if entry.verb == "reserve":
                pending.setdefault(entry.request_id, entry.sequence)
            elif entry.verb in RESOLUTIONS:
                pending.pop(entry.key, None)
        self._keys |= changes.keys
        self._notes |= {(note.account, note.sequence): note for note in changes.notes}


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """A copy of a ledger."""

    balances: Sequence[Balance]
    _entries: dict[str, tuple[Entry, ...]]
    _keys: dict[tuple[str, str], IdempotencyRecord]
    _notes: Sequence[Note]
    _principals: dict[str, str]
    pending: Collection[Pending]

    @property
    def voids(self) -> dict[str, int]:
        """How many reservations were voided, of each account that has any."""
        return Counter(name for name, found in self._entries.items() for entry in found if entry.verb == "void")

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum(map(len, self._entries.values()))

    @property
    def keys(self) -> int:
        """The number of keys."""
        return len(self._keys)

    def records(self) -> Iterator[Record]:
        """Yield every entry, account by account."""
        for balance in self.balances:
            for entry in self._entries.get(balance.head.name, ()):
                used = self._keys.get((key_owner(entry.verb, entry.principal), entry.key))
                yield entry, None if used is None else (used.account, used.sequence)

    def notes(self) -> Iterator[Note]:
        """Yield every note that was not erased."""
        return iter(self._notes)

    def principals(self) -> dict[str, str]:
        """Return the names that were not erased, by identity."""
        return self._principals
