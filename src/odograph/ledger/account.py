"""LedgerAccount: one durable account of a ledger, which is kept here or behind a service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from odograph.account import Account, check_page, microseconds
from odograph.core.fixed_point import Numeric
from odograph.core.gate import Decision, Totals
from odograph.core.guarantees import Guarantee
from odograph.core.planning import Calibration, G, Kind, Quote, calibration_question, used
from odograph.core.policy import Compiled
from odograph.errors import AccountNotFound
from odograph.ledger.backend import Backend, Opened
from odograph.ledger.entries import CHARGES, price_from_text
from odograph.ledger.results import HistoryEntry, Lifetime, Receipt, Reservation
from odograph.ledger.stores.base import Balance

__all__ = ["LedgerAccount", "State", "states"]


class LedgerAccount(Account):
    """One account of a ledger. Made by `Ledger.open_account` and `Ledger.account`; holds no numbers of its own."""

    def __init__(self, backend: Backend, opened: Opened) -> None:
        self._backend = backend
        self._opened = opened

    @property
    def name(self) -> str:
        """The name, unique in its ledger."""
        return self._opened.head.name

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, as they were compiled when the account was opened."""
        return self._opened.compiled

    @property
    def dataset(self) -> str:
        """The dataset of which this account is a block; empty if it is not one."""
        return self._opened.head.dataset

    @property
    def parent(self) -> LedgerAccount | None:
        """The account above this one, which is charged with it."""
        path = self._opened.path
        return LedgerAccount(self._backend, path[-2]) if len(path) > 1 else None

    @property
    def children(self) -> Mapping[str, LedgerAccount]:
        """The accounts directly below this one, by name; read-only."""
        below = [b.head.name for b in self._backend.balances().values() if b.head.parent == self.name]
        return MappingProxyType({name: LedgerAccount(self._backend, self._backend.opened(name)) for name in below})

    @property
    def lifetime(self) -> Lifetime | None:
        """What this account and those linked to it as successors promise together; None if there are none."""
        return self._backend.lifetime(self.name)

    @property
    def pending(self) -> tuple[Reservation, ...]:
        """The reservations charged here that were neither committed nor voided."""
        return tuple(Reservation(self._backend.resolve, receipt) for receipt in self._backend.pending(self.name))

    @property
    def voids(self) -> int:
        """How many reservations charged here were voided; each is an assurance that nothing was run."""
        return self._backend.voids(self.name)

    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """Charge the cost here and to every account above, durably, or raise `BudgetExceeded` and charge none.

        The same key with the same cost returns the first receipt, `repeated`, and charges nothing more: it pays for
        one run. A refusal leaves the key free.
        """
        return self._backend.charge("spend", {self._opened.head.name: cost}, key, note)

    def reserve(
        self,
        cost: Guarantee,
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> Reservation:
        """Charge now, and commit or void later; once it has expired (`expires` from now) it cannot be voided.

        A key that was used before gives the same reservation, `repeated`, also once it was committed.
        """
        receipt = self._backend.charge("reserve", {self.name: cost}, key, note, microseconds(expires))
        return Reservation(self._backend.resolve, receipt)

    def _begin(self, cost: Guarantee, key: str | None, note: str) -> Reservation:
        verb = "reserve" if self._backend.resolves else "spend"
        return Reservation(self._backend.resolve, self._backend.charge(verb, {self.name: cost}, key, note))

    def decide(self, cost: Guarantee) -> Decision:
        """Return whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""
        return self._backend.decide({self.name: cost})

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return self._backend.quote(self.name, costs)

    def largest(self, kind: Kind[G], times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

        The kind is a class, a guarantee whose other fields are kept, or a mechanism such as `odograph.gaussian`.
        """
        return self._backend.largest(self.name, kind, times)

    def calibrate(
        self, mechanism: Callable[..., Guarantee], /, *, times: int = 1, **settings: Numeric
    ) -> Calibration | None:
        """Return the least noise with which `times` equal requests of a mechanism are admitted, or None.

        `mechanism` is a function such as `odograph.laplace`, and the settings are its arguments beside the noise. The
        scale, sigma, epsilon or other parameter has four digits, and a value with less noise is refused.
        """
        return self._backend.calibrate(self.name, calibration_question(mechanism, times, settings))

    def how_many(self, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row, at most 10^12; of a closed account, 0."""
        return self._backend.how_many(self.name, cost)

    def history(self, first: int = 0, count: int | None = None) -> tuple[HistoryEntry, ...]:
        """Return entries from a sequence on, at most `count`; a negative `first` counts from the end.

        Refusals are among them.
        """
        check_page(first, count)
        size = self.size
        first = max(0, size + first) if first < 0 else min(first, size)
        count = size - first if count is None else min(count, size - first)
        return tuple(self._backend.history(self.name, first, count)) if count else ()

    def close(self, *, note: str = "") -> None:
        """Take no new charges from now on, here and below; reservations can still be resolved."""
        self._backend.close(self.name, note)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LedgerAccount):
            return NotImplemented
        # Two ledgers in memory have one URL; their accounts were opened by different entries.
        mine, theirs = self._opened, other._opened
        return (self.name, self._backend.url, mine.origin) == (other.name, other._backend.url, theirs.origin)

    def __hash__(self) -> int:
        return hash((self._backend.url, self.name))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an account of a ledger is not sent to another process: there, use odograph.connect(...).account("
            f"{self.name!r})"
        )

    def __repr__(self) -> str:
        policy, balance = self.policy, self._balance()
        steps = balance.totals.steps
        part = f"{used(self.compiled, balance.totals):.1%} spent in {steps} step{'s' * (steps != 1)}"
        closed = ", closed" if balance.closed else ""
        return f"<LedgerAccount {self.name!r}, epsilon={policy.epsilon}, delta={policy.delta}: {part}{closed}>"

    def _balance(self) -> Balance:
        found = self._backend.balances([self.name]).get(self.name)
        if found is None or found.origin != self._opened.origin:
            raise AccountNotFound(f"{self.name!r} is no longer in {self._backend.url}; connect again")
        return found

    def _totals_over_time(self) -> list[Totals]:
        balance = self._balance()  # totals and sequence of one moment
        return [state.totals for state in states(self, balance.totals, balance.sequence)]


_PAGE: Final = 2000


class State(NamedTuple):
    """The totals after a charge, or when the account was opened."""

    time: int  # microseconds since 1970
    totals: Totals


def states(account: LedgerAccount, totals: Totals, sequence: int, most: int | None = None) -> tuple[State, ...]:
    """Return the totals after each charge that stands, oldest first; voided charges are left out.

    `totals` are those after the entry of that `sequence`. At most `most` entries are read, or all of them.
    """
    found: list[State] = []
    voided: set[str] = set()
    stop = 0 if most is None else max(0, sequence + 1 - most)
    for end in range(sequence + 1, stop, -_PAGE):
        first = max(stop, end - _PAGE)
        for entry in (past.entry for past in reversed(account.history(first, end - first))):
            if entry.verb == "void":  # it comes after what it takes back, so it is met first
                voided.add(entry.key)
            elif entry.verb in CHARGES and entry.request_id not in voided:
                found.append(State(entry.time, totals))
                totals = totals.without(price_from_text(entry.price))
            elif entry.verb == "open":
                found.append(State(entry.time, totals))
    return tuple(reversed(found))
