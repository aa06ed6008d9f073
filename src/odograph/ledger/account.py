"""LedgerAccount: one durable account. The same questions as an `Accountant`'s, and charges that survive a crash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn

from odograph.account import offers_of
from odograph.compile import Certification, certification
from odograph.core.compiled import Compiled
from odograph.core.gate import Decision, Totals
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.planning import G, Quote, standing, used
from odograph.core.policy import Policy
from odograph.errors import AccountNotFound, IdempotencyConflict, InvalidGuarantee
from odograph.figures import account_card, draw_account
from odograph.ledger.backend import Backend, Opened
from odograph.ledger.entries import CHARGES, iso_time
from odograph.ledger.lifetimes import Lifetime
from odograph.ledger.results import Past, Receipt
from odograph.ledger.stores.base import Balance
from odograph.ledger.timeline import states

__all__ = ["LedgerAccount", "Reservation", "account_summary", "microseconds"]

_PAGE: Final = 100


class Reservation:
    """A charge that is yet to be committed, or voided if the mechanism was not run."""

    def __init__(self, backend: Backend, receipt: Receipt) -> None:
        self._backend = backend
        self.receipt = receipt
        self.voided = False  # through this object

    @property
    def repeated(self) -> bool:
        """Whether its key was used before: what it pays for was begun then, and is not to be begun again."""
        return self.receipt.repeated

    @property
    def expires(self) -> datetime | None:
        """Until when it can be voided."""
        return self.receipt.expires

    @property
    def id(self) -> str:
        """What any process may resolve it by: `ledger.commit(id)`."""
        return self.receipt.id

    def commit(self, *, note: str = "") -> Receipt:
        """Say that the mechanism was run, or may have been; works after it expired, and again."""
        return self._backend.resolve("commit", self.id, note)

    def void(self, reason: str) -> Receipt:
        """Take the charge back: the mechanism was not run. Not after it was committed or has expired."""
        receipt = self._backend.resolve("void", self.id, reason)
        self.voided = True
        return receipt

    def __repr__(self) -> str:
        until = "" if self.expires is None else f", expires {self.expires:%Y-%m-%d %H:%M:%S} UTC"
        return f"<Reservation {self.id}{until}{', repeated' if self.repeated else ''}>"


class LedgerAccount:
    """One account of a ledger. Made by `Ledger.open_account` and `Ledger.account`; holds no numbers of its own."""

    def __init__(self, backend: Backend, opened: Opened) -> None:
        self._backend = backend
        self._opened = opened

    @property
    def name(self) -> str:
        """The name, unique in its ledger."""
        return self._opened.head.name

    @property
    def policy(self) -> Policy:
        """The policy, fixed when the account was opened."""
        return self._opened.compiled.policy

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, as they were compiled then."""
        return self._opened.compiled

    @property
    def certification(self) -> Certification:
        """How this installation knows that the limits keep the promise, or that it does not."""
        return certification(self._opened.compiled)

    @property
    def dataset(self) -> str:
        """The dataset of which this is a block, or nothing."""
        return self._opened.head.dataset

    @property
    def parent(self) -> LedgerAccount | None:
        """The account above this one."""
        path = self._opened.path
        return LedgerAccount(self._backend, path[-2]) if len(path) > 1 else None

    @property
    def children(self) -> tuple[LedgerAccount, ...]:
        """The accounts right below this one."""
        below = [b.head.name for b in self._backend.balances().values() if b.head.parent == self.name]
        return tuple(LedgerAccount(self._backend, self._backend.opened(name)) for name in below)

    @property
    def totals(self) -> Totals:
        """What was spent, in whole units."""
        return self._balance().totals

    @property
    def closed(self) -> bool:
        """Whether it takes no new charges."""
        return self._balance().closed

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self._balance().sequence + 1

    @property
    def lifetime(self) -> Lifetime | None:
        """What this account and those linked to it as successors promise together; None if there are none."""
        return self._backend.lifetime(self.name)

    @property
    def pending(self) -> tuple[Reservation, ...]:
        """The reservations charged here that nobody has committed or voided."""
        return tuple(Reservation(self._backend, receipt) for receipt in self._backend.pending(self.name))

    @property
    def voids(self) -> int:
        """How many reservations charged here were taken back; each is somebody's word that nothing was run."""
        return self._backend.voids(self.name)

    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """Charge the cost here and to every account above, durably, or raise `BudgetExceeded` and charge nobody.

        The same key with the same cost returns the first receipt and charges nothing more: it pays for one run.
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
        return Reservation(self._backend, receipt)

    @contextmanager
    def spending(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Iterator[Reservation]:
        """Reserve, run the block, commit; what raises inside is committed too, because its noise was drawn.

        A block that does not run the mechanism may void the reservation that it is given.
        A key that was used before is refused: its block ran, or may have, and a second run is a second answer.
        Whoever may not commit or void spends instead: that is a reservation which stands.
        """
        verb = "reserve" if self._backend.resolves else "spend"
        reservation = Reservation(self._backend, self._backend.charge(verb, {self.name: cost}, key, note))
        if reservation.repeated:
            raise IdempotencyConflict(
                f"key {key!r} was used before, so what it paid for ran, or may have ({reservation.id}); nothing was"
                " charged. Another run needs another key, and is charged"
            )
        try:
            yield reservation
        finally:
            if verb == "reserve" and not reservation.voided:
                reservation.commit()

    def decide(self, cost: Guarantee) -> Decision:
        """Say whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""
        return self._backend.decide({self.name: cost})

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return self._backend.quote(self.name, costs)

    def largest(self, kind: type[G] | G, times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        return self._backend.largest(self.name, kind, times)

    def reading(self) -> Reading:
        """Read the policy's odometer: valid at all times at once, and the only one that the guarantee covers."""
        return self.compiled.reading(self.totals)

    def compare(self) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        return self.compiled.compare(self.totals)

    def history(self, first: int = 0, count: int = _PAGE) -> tuple[Past, ...]:
        """Return a page of entries from a sequence on; a negative `first` counts from the end."""
        for field, value in (("first", first), ("count", count)):
            if isinstance(value, bool) or not isinstance(value, int) or (field == "count" and value < 1):
                raise InvalidGuarantee(f"{field} must be a whole number, count at least 1, and {value!r} is not")
        size = self.size
        first = max(0, size + first) if first < 0 else min(first, size)
        count = min(count, size - first)
        return tuple(self._backend.history(self.name, first, count)) if count else ()

    def plot(self, ax: Any = None) -> Any:  # noqa: ANN401  Matplotlib's axes
        """Draw the reading over time with the budget line, and other odometers, not covered by the guarantee."""
        balance = self._balance()  # totals and sequence of one moment
        stood = states(self, balance.totals, balance.sequence)
        return draw_account(self.compiled, [state.totals for state in stood], ax=ax)

    def close(self, *, note: str = "") -> None:
        """Take no new charges any more, here and below; reservations can still be resolved."""
        self._backend.close(self.name, note)

    def summary(self) -> dict[str, Any]:
        """Return the summary of the account in plain types; cheaper than `to_dict`, of which it is a part."""
        return account_summary(self.compiled, self._balance())

    def to_dict(self) -> dict[str, Any]:
        """Return the account in plain types, with what is spent and left, its reading and what fits next."""
        balance, compiled = self._balance(), self.compiled
        now, lifetime = standing(compiled, balance.totals), self.lifetime
        return {
            "account": account_summary(compiled, balance),
            "policy": self.policy.to_dict(),
            "source": compiled.note,
            "certification": self.certification,
            "meters": {name: {"spent": spent, "left": now.left[name]} for name, spent in now.spent.items()},
            "reading": compiled.reading(balance.totals).to_dict(),
            "largest": [] if balance.closed else [offer.to_dict() for offer in offers_of(self)],
            "children": [child.name for child in self.children],
            "lifetime": None if lifetime is None else lifetime.to_dict(),
            "pending": [reservation.receipt.to_dict() for reservation in self.pending],
            "voids": self.voids,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LedgerAccount):
            return NotImplemented
        # Two ledgers in memory have one URL; their accounts were opened by different entries.
        mine, theirs = self._opened, other._opened
        return (self.name, self._backend.url, mine.origin) == (other.name, other._backend.url, theirs.origin)

    def __hash__(self) -> int:
        return hash((self._backend.url, self.name))

    def __copy__(self) -> LedgerAccount:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LedgerAccount:
        return self

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

    def _repr_html_(self) -> str:
        last = [past for past in reversed(self.history(-20, 20)) if past.entry.verb in CHARGES][:5]
        offer = self.largest(cost) if last and (cost := last[0].entry.guarantee) is not None else None
        rows = [(f"{past.entry.verb} {past.entry.guarantee}", past.note) for past in last]
        return account_card(self.name, self.compiled, self.totals, offer, rows)

    def _balance(self) -> Balance:
        found = self._backend.balances([self.name]).get(self.name)
        if found is None or found.origin != self._opened.origin:
            raise AccountNotFound(f"{self.name!r} is no longer in {self._backend.url}; connect again")
        return found


def account_summary(compiled: Compiled, balance: Balance) -> dict[str, Any]:
    """Return the summary of an account in plain types, without a look into its history."""
    head, policy = balance.head, compiled.policy
    return {
        "name": head.name,
        "parent": head.parent,
        "successor_of": head.successor_of,
        "dataset": head.dataset,
        "privacy_unit": head.privacy_unit,
        "neighbors": head.neighbors,
        "promise": {"epsilon": float(policy.epsilon), "delta": float(policy.delta), "text": policy.promise},
        "filter": policy.filter_text,
        "spent": used(compiled, balance.totals),
        "steps": balance.totals.steps,
        "sequence": balance.sequence,
        "seal": balance.seal,
        "time": iso_time(balance.time),
        "totals": balance.totals.to_text(),
        "closed": balance.closed,
        "linked": balance.linked,
        "origin": balance.origin,
    }


def microseconds(expires: timedelta | float | None) -> int | None:
    """Read how long a reservation can be voided: a timedelta, or seconds."""
    if expires is None:
        return None
    seconds = expires.total_seconds() if isinstance(expires, timedelta) else expires
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 10**9:
        raise InvalidGuarantee(f"expires must be a timedelta or seconds, above 0, and {expires!r} is not")
    return int(seconds * 1_000_000)
