"""Ledger: durable accounts, and the verbs that concern several of them or all."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from odograph.budgets import compile_policy
from odograph.core.compiled import Compiled
from odograph.core.decide import Decision, decide
from odograph.core.guarantees import Guarantee
from odograph.core.policy import Policy
from odograph.errors import AccountClosed, InvalidPolicy
from odograph.ledger import copies
from odograph.ledger.account import LedgerAccount, Reservation, microseconds
from odograph.ledger.audit import Progress, audit
from odograph.ledger.books import Books, user
from odograph.ledger.entries import check_key, check_name, place_of
from odograph.ledger.openings import Open
from odograph.ledger.receipts import Checkpoint, Receipt, Verification
from odograph.ledger.requests import Refused
from odograph.ledger.store import Head, Store
from odograph.ledger.writer import Writer

__all__ = ["Ledger"]


class Ledger:
    """Accounts that survive crashes, races and retries. Made by `odograph.connect`; safe to use from many threads.

    `principal` is who writes: keys are unique per principal, and entries carry a random identity for the name.
    """

    def __init__(self, store: Store, *, principal: str | None = None, writer: Writer | None = None) -> None:
        self._store = store
        self._writer = writer or Writer(store)
        self._books = Books(store, self._writer, user() if principal is None else principal)

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        return self._store.url

    @property
    def principal(self) -> str:
        """Who writes through this object."""
        return self._books.principal

    def acting_as(self, principal: str) -> Ledger:
        """Return the same ledger for another principal, sharing the connection and the queue."""
        return Ledger(self._store, principal=principal, writer=self._writer)

    def open_account(  # noqa: PLR0913  each is one sentence about the account
        self,
        name: str,
        policy: Policy | Compiled,
        *,
        parent: str = "",
        successor_of: str = "",
        dataset: str = "",
        key: str | None = None,
        note: str = "",
    ) -> LedgerAccount:
        """Open an account; its compiled policy is its first entry and never changes.

        What it spends, every account above it (`parent`) spends too. A new policy for the same data is a new account,
        `successor_of` the old one: a fresh budget, and the promises add up. Accounts of one `dataset` are blocks of
        it: each holds the records of its own day or region, and a person's records are in one block.
        """
        check_name(name)
        for field, value in (("parent", parent), ("successor_of", successor_of), ("dataset", dataset)):
            if value != "":
                check_name(value, field)
        if not isinstance(policy, Policy | Compiled):
            raise InvalidPolicy(f"an account needs a policy, such as Policy(1, 1e-6), not {policy!r}")
        compiled = compile_policy(policy) if isinstance(policy, Policy) else policy
        unit, neighbours = compiled.policy.unit, compiled.policy.neighbours
        if not unit.isprintable():
            raise InvalidPolicy(f"Policy.unit must be printable text in a ledger, and {unit!r} is not")
        for relative in filter(None, (parent, successor_of)):
            self._books.opened(relative)  # or nothing is made, not even the file
        self._store.create()
        head = Head(name, parent, successor_of, dataset, unit, neighbours)
        self._books.submit(Open(self._books.author(key, note), head, compiled))
        return self.account(name)

    def account(self, name: str) -> LedgerAccount:
        """Return an account that was opened before."""
        return LedgerAccount(self._books, self._books.opened(name))

    def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return all accounts, in the order of their names."""
        return tuple(self.account(name) for name in self._store.balances())

    def spend(self, costs: Mapping[str, Guarantee], *, key: str | None = None, note: str = "") -> Receipt:
        """Charge several accounts, all or nothing; refused, it says which ran out and what would fit.

        Each cost bounds the mechanism for a person in that account's data. Accounts that share a parent charge it
        once each.
        """
        return self._books.charge("spend", self._books.asks(costs), self._books.author(key, note))

    def reserve(
        self,
        costs: Mapping[str, Guarantee],
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> Reservation:
        """Charge now, and commit or void later; once it has expired (`expires` from now) it cannot be voided."""
        asks, author = self._books.asks(costs), self._books.author(key, note)
        return Reservation(self._books, self._books.charge("reserve", asks, author, microseconds(expires)))

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Say whether several accounts would admit their costs together; spend nothing."""
        asks = self._books.asks(costs)
        read = self._store.balances({stop.name for ask in asks for stop in ask.stops})
        for name, balance in read.items():
            if balance.closed:
                raise AccountClosed(f"{name!r} is closed and takes no new charges")
        totals = {name: balance.totals for name, balance in read.items()}
        after = dict(totals)
        for i, ask in enumerate(asks):
            for name, compiled, asked, *_ in ask.stops:
                decision = decide(compiled.meters, after[name], asked, ask.cost)
                if not decision.admitted:
                    return self._books.offer(asks, Refused(i, decision._replace(account=name), totals))
                after[name] = decision.totals_after
        return decision

    def commit(self, reservation: str, *, note: str = "") -> Receipt:
        """Say that a reservation's mechanism was run, or may have been; works after it expired, and again."""
        return self._books.resolve("commit", reservation, note)

    def void(self, reservation: str, reason: str) -> Receipt:
        """Take a reservation back: the mechanism was not run. Not after it was committed or has expired."""
        return self._books.resolve("void", reservation, reason)

    def reservation(self, reservation: str) -> Reservation:
        """Return a reservation by its id, such as `census#17`: to resolve it in another process."""
        return Reservation.of(self._books, reservation)

    def verify(self, *, checkpoint: Checkpoint | None = None, progress: Progress | None = None) -> Verification:
        """Replay every entry of every account, or raise `LedgerCorrupt` and name the first bad one."""
        copies.check_checkpoint(checkpoint)
        with self._store.snapshot() as snapshot:
            return audit(snapshot, checkpoint, progress)

    def checkpoint(self) -> Checkpoint:
        """Say where every account stands, to be kept elsewhere: `verify` then sees what was removed or rewritten."""
        return Checkpoint({name: (b.sequence, b.seal) for name, b in self._store.balances().items()})

    def export(self, file: IO[str], *, progress: Progress | None = None) -> Checkpoint:
        """Write the whole ledger as JSON Lines, integers as text; return where it stood."""
        with self._store.snapshot() as snapshot:
            return copies.export(snapshot, file, progress)

    def import_(
        self, file: IO[str], *, checkpoint: Checkpoint | None = None, progress: Progress | None = None
    ) -> Verification:
        """Read what `export` wrote into this ledger, which must be empty, replaying all of it on the way.

        A copy may be older than its original, and would give spent budget back. So it is refused if it is behind the
        checkpoint, and without one every account is closed.
        """
        found = copies.take_in(self._store, copies.lines(file), self.principal, checkpoint, progress)
        self._books.forget()
        return found

    def backup(self, path: str | Path, *, progress: Progress | None = None) -> Checkpoint:
        """Copy the whole ledger, as it is now, into a new SQLite file; return where it stood."""
        with self._store.snapshot() as snapshot:
            return copies.backup(snapshot, Path(path), progress)

    def restore(
        self, path: str | Path, *, checkpoint: Checkpoint | None = None, progress: Progress | None = None
    ) -> Verification:
        """Read a backup into this ledger, which must be empty; without a checkpoint all accounts are closed."""
        found = copies.restore(self._store, Path(path), self.principal, checkpoint, progress)
        self._books.forget()
        return found

    def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry, such as `census#17`; the entry keeps its digest. Say whether there was one."""
        return self._store.erase_note(*place_of(entry))

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; entries keep the random identity. Say whether there was one."""
        erased = self._store.erase_principal(check_key(name, "principal"))
        if name == self.principal:
            self._books.forget()
        return erased

    def close(self) -> None:
        """Let go of files and connections; the accounts stay open."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ledger {self.url} as {self.principal!r}>"
