"""Account: one set of members for accounts in memory, in a file, in a database and behind a service."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from fractions import Fraction
from typing import Any, Final, Self

from odograph.compile import Certification, certification
from odograph.core.fixed_point import Number, Numeric, brief_above, exact_of
from odograph.core.gate import Decision, Totals
from odograph.core.guarantees import GDP, ZCDP, Guarantee, PureDP
from odograph.core.odometers import Reading
from odograph.core.planning import Calibration, G, Kind, Quote, standing, used
from odograph.core.policy import Compiled, Policy
from odograph.errors import InvalidArgument, LargeDeltaWarning, UnprovenComposition, with_usages
from odograph.figures import account_card, draw_account
from odograph.ledger.entries import CHARGES, iso_time
from odograph.ledger.results import History, Lifetime, Receipt, Reservation
from odograph.ledger.stores.base import Balance
from odograph.sessions import Cost, Interaction, Running, begin, interact

__all__ = [
    "USAGES",
    "Account",
    "account_summary",
    "budget_text",
    "caution_of_delta",
    "check_page",
    "microseconds",
    "offers_of",
    "spent_text",
    "warn_of_large_delta",
]

# What is added to Python's message about arguments that do not fit.
USAGES: Final = {
    "spend": "a spend takes a guarantee, such as spend(PureDP(epsilon=0.1), key='q-1', note='ages')",
    "reserve": "a reservation takes a guarantee, such as reserve(PureDP(epsilon=0.1), key='q-1', expires=3600)",
    "spending": "a block takes a guarantee, such as `with account.spending(PureDP(epsilon=0.1), key='q-1'):`",
    "decide": "a decision takes a guarantee, such as decide(PureDP(epsilon=0.1))",
    "quote": "a quote takes a list, such as quote([PureDP(0.1), GDP(0.05)])",
    "largest": "it takes a kind, such as largest(PureDP) or largest(gaussian, times=10)",
    "calibrate": "it takes a mechanism and its settings by name, such as calibrate(laplace, sensitivity=3, times=20)",
    "how_many": "it takes a guarantee, such as how_many(PureDP(epsilon=0.1))",
    "history": "it takes the first entry and how many, such as history(-10) or history(first=100, count=50)",
    "close": "it takes a note by its name, such as close(note='the study has ended')",
}

_LARGE_DELTA: Final = 1e-3
_LONGEST: Final = 10**9  # seconds until a reservation expires
_SHOWN: Final = 5  # last charges on a card
_LOOKED_AT: Final = 20  # last entries among which they are looked for


@with_usages(USAGES)
class Account(ABC):
    """A privacy budget: `Accountant` keeps one in memory, `LedgerAccount` in a ledger, here or behind a service.

    Both have the members below with the same signatures, and the same tests run on both.
    """

    _opened_in: Running | None = None  # the mechanism during which it was opened, which it then is a part of

    @property
    @abstractmethod
    def name(self) -> str:
        """The name; an account at the top of an `Accountant` tree may have none."""

    @property
    @abstractmethod
    def compiled(self) -> Compiled:
        """The policy's meters and limits, compiled once, when the account was opened."""

    @property
    def policy(self) -> Policy:
        """The policy, fixed when the account was opened."""
        return self.compiled.policy

    @property
    def certification(self) -> Certification:
        """How this installation knows that the limits keep the promise, or that it does not."""
        return certification(self.compiled)

    @property
    def dataset(self) -> str:
        """The dataset of which this account is a block; empty if it is not one."""
        return self._balance().head.dataset

    @property
    @abstractmethod
    def parent(self) -> Account | None:
        """The account above this one, which is charged with it."""

    @property
    @abstractmethod
    def children(self) -> Mapping[str, Account]:
        """The accounts directly below this one, by name; read-only."""

    @property
    def totals(self) -> Totals:
        """What was spent, in integer units."""
        return self._balance().totals

    @property
    def spent(self) -> float:
        """The part of the budget that is spent, from 0 to 1; 0 without a limit."""
        return used(self.compiled, self.totals)

    @property
    def remaining(self) -> float:
        """The part of the budget that is left, from 0 to 1: what `spent` leaves of 1; 1 without a limit."""
        return 1.0 - self.spent

    @property
    def closed(self) -> bool:
        """Whether it takes no new charges."""
        return self._balance().closed

    @property
    def size(self) -> int:
        """How many entries were written, the opening included."""
        return self._balance().sequence + 1

    @property
    def lifetime(self) -> Lifetime | None:
        """What this account and those linked to it as successors promise together; None if there are none."""
        return None

    @property
    @abstractmethod
    def pending(self) -> tuple[Reservation, ...]:
        """The reservations charged here that were neither committed nor voided."""

    @property
    @abstractmethod
    def voids(self) -> int:
        """How many reservations charged here were voided; each is an assurance that nothing was run."""

    @abstractmethod
    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """Charge the cost here and to every account above, or raise `BudgetExceeded` and charge none of them.

        The same key with the same cost returns the first receipt, `repeated`, and charges nothing more: it pays for
        one run. A refusal leaves the key free.
        """

    @abstractmethod
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

    @contextmanager
    def spending(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Iterator[Reservation]:
        """Reserve, run the block, commit; what raises inside is committed too, because its noise was drawn.

        A block that does not run the mechanism may void the reservation that it is given. A key that was used before
        is refused with `IdempotencyConflict`: its block ran, or may have, and a second run is a second answer. An API
        key that may not commit or void spends instead, which is a reservation that stands.
        """
        reservation = begin(self, cost, key, note)
        try:
            yield reservation
        finally:
            if reservation.receipt.verb == "reserve" and not reservation.voided:
                reservation.commit()

    def interact(
        self,
        mechanism: Any,  # noqa: ANN401  a function, a generator, or a library's queryable
        /,
        *args: Any,
        key: str | None = None,
        note: str = "",
        cost: Cost | None = None,
        trust_cost: bool = False,
        **kwargs: Any,
    ) -> Interaction:
        """Charge an interactive mechanism whole, open it, and return what can be asked: `with a.interact(...) as q`.

        `mechanism(*args, **kwargs)` returns what answers queries: a function, a generator, an object with methods.
        The cost is that of all its answers, whatever is asked and when. It is charged as `Interactive(cost)` before
        the mechanism sees the data, and committed before the first answer is computed, whatever happens then; if
        nothing was asked and opening revealed nothing, `void` takes it back. The other arguments are those of
        `Session.run`. A key that was used before is refused with `IdempotencyConflict`: something was begun under it.
        """
        return interact(self, mechanism, args, kwargs, cost=cost, key=key, note=note, trust_cost=trust_cost)

    @abstractmethod
    def decide(self, cost: Guarantee) -> Decision:
        """Return whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""

    @abstractmethod
    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""

    @abstractmethod
    def largest(self, kind: Kind[G], times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

        The kind is a class, a guarantee whose other fields are kept, or a mechanism such as `odograph.gaussian`.
        Where neither the account nor one above it has a limit, `InvalidArgument` is raised, as by `calibrate`.
        """

    @abstractmethod
    def calibrate(
        self, mechanism: Callable[..., Guarantee], /, *, times: int = 1, **settings: Numeric
    ) -> Calibration | None:
        """Return the least noise with which `times` equal requests of a mechanism are admitted, or None.

        `mechanism` is a function such as `odograph.laplace`, and the settings are its arguments beside the noise. The
        scale, sigma, epsilon or other parameter has four digits, and a value with less noise is refused.
        """

    @abstractmethod
    def how_many(self, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row, at most 10^12; of a closed account, 0."""

    def reading(self) -> Reading:
        """Read the policy's odometer: valid at all times at once, and the only one that the guarantee covers."""
        return self.compiled.reading(self.totals)

    def compare(self) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        return self.compiled.compare(self.totals)

    @abstractmethod
    def history(self, first: int = 0, count: int | None = None) -> History:
        """Return entries from a sequence on, at most `count`; a negative `first` counts from the end."""

    def plot(self, ax: Any = None) -> Any:  # noqa: ANN401  Matplotlib's axes
        """Draw the reading over time with the budget line, and other odometers, not covered by the guarantee."""
        return draw_account(self.compiled, self._totals_over_time(), ax=ax)

    @abstractmethod
    def close(self, *, note: str = "") -> None:
        """Take no new charges from now on, here and below; reservations can still be resolved."""

    def summary(self) -> dict[str, Any]:
        """Return the summary of the account in plain types: the part `account` of `describe`, and cheaper."""
        return account_summary(self.compiled, self._balance())

    def describe(self, *, pending: bool = True) -> dict[str, Any]:
        """Return the account in plain types, with what is spent and left, its reading and what fits next.

        This is the JSON of the API and of `odograph show --json`. It does not restore an account. Without its
        `pending` reservations it takes no longer where there are many.
        """
        balance, compiled, lifetime = self._balance(), self.compiled, self.lifetime
        now = standing(compiled, balance.totals)
        return {
            "account": account_summary(compiled, balance),
            "policy": self.policy.to_dict(),
            "source": compiled.note,
            "certification": self.certification,
            "meters": now.standing(),
            "reading": compiled.reading(balance.totals).to_dict(),
            "largest": [] if balance.closed else [offer.to_dict() for offer in offers_of(self)],
            "children": [*self.children],
            "lifetime": None if lifetime is None else lifetime.to_dict(),
            "pending": [one.receipt.to_dict() for one in self.pending] if pending else [],
            "voids": self.voids,
        }

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def _repr_html_(self) -> str:
        last = [entry for entry in reversed(self.history(-_LOOKED_AT)) if entry.verb in CHARGES][:_SHOWN]
        # The offer is of the kind charged last: a policy need not take every kind.
        offer = _offer(self, cost) if last and (cost := last[0].cost) is not None else None
        rows = [("" if entry.cost is None else entry.cost.brief(), entry.note or entry.account) for entry in last]
        balance = self._balance()
        name = f"{self.name or 'Accountant'} (closed)" if balance.closed else self.name
        lifetime = self.lifetime if balance.linked else None
        return account_card(name, self.compiled, balance.totals, offer, rows, str(lifetime or ""))

    def _begin(self, cost: Guarantee, key: str | None, note: str) -> Reservation:
        """Charge for a block that is about to run."""
        return self.reserve(cost, key=key, note=note)

    @abstractmethod
    def _balance(self) -> Balance:
        """Return the current state of the account, read at one moment."""

    @abstractmethod
    def _totals_over_time(self) -> Sequence[Totals]:
        """Return the totals after each charge that stands, oldest first."""


def account_summary(compiled: Compiled, balance: Balance) -> dict[str, Any]:
    """Return the summary of an account in plain types, without reading its history."""
    head, policy = balance.head, compiled.policy
    return {
        "name": head.name,
        "parent": head.parent,
        "successor_of": head.successor_of,
        "dataset": head.dataset,
        "privacy_unit": head.privacy_unit,
        "neighbors": head.neighbors,
        "promise": policy.promise_to_dict(),
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


def check_page(first: object, count: object) -> None:
    """Raise unless these select a part of a history."""
    if isinstance(first, bool) or not isinstance(first, int):
        raise InvalidArgument(f"first must be an integer (got {first!r})")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise InvalidArgument(f"count must be a positive integer (got {count!r})")


def warn_of_large_delta(policy: Policy | Compiled, *, above: int = 3) -> None:
    """Warn who opens an account with a policy of a large delta; one that is compiled was looked at before.

    The caller's line is `above` calls up, of which one is a wrapper by `with_usage`.
    """
    if isinstance(policy, Policy) and (text := caution_of_delta(policy.delta)):
        warnings.warn(text, LargeDeltaWarning, stacklevel=above + 1)


def caution_of_delta(delta: Fraction | float) -> str:
    """Return what is wrong with a large delta; nothing if it is not large."""
    if delta <= _LARGE_DELTA:
        return ""
    return (
        f"delta is {float(delta):g}: with that probability the promise says nothing, so it should be far below one"
        " over the number of people, such as 1e-6"
    )


def microseconds(expires: timedelta | float | None) -> int | None:
    """Return how long a reservation can be voided, given as a timedelta or in seconds."""
    if expires is None:
        return None
    seconds = expires.total_seconds() if isinstance(expires, timedelta) else expires
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST:
        raise InvalidArgument(
            f"expires must be a timedelta or seconds, above 0 and at most {_LONGEST:,} (got {expires!r})"
        )
    return int(seconds * 1_000_000)


def offers_of(account: Account) -> list[Guarantee]:
    """Return the largest next request of each kind that the policy takes, of pure, Gaussian and zCDP ones.

    There is none where no limit is fixed.
    """
    kinds: tuple[Kind[Guarantee], ...] = (PureDP, GDP, ZCDP)
    return [offer for kind in kinds if (offer := _offer(account, kind)) is not None]


def _offer(account: Account, kind: Kind[Guarantee]) -> Guarantee | None:
    """Return the largest request of a kind; None if there is none, no theorem for the kind, or no limit."""
    try:
        return account.largest(kind)
    except (InvalidArgument, UnprovenComposition):
        return None


def budget_text(policy: Policy) -> str:
    """Return the numbers of a promise: epsilon=1.0, delta=1e-06."""
    promised = {"epsilon": policy.epsilon, "rho": policy.rho, "mu": policy.mu}
    named = [f"{name}={_promised(value)}" for name, value in promised.items() if value is not None] or [policy.target]
    return ", ".join([*named, f"delta={_promised(policy.delta)}"])


def _promised(value: Number) -> str:
    short = brief_above(value)
    return str(value) if exact_of(value) == exact_of(float(short)) else short


def spent_text(compiled: Compiled, totals: Totals, of: str = "") -> str:
    """Return what is spent in words: 12.5% spent in 3 steps; without a limit, the steps."""
    steps = f"{totals.steps} step{'s' * (totals.steps != 1)}"
    return (
        f"{steps}, no limit" if compiled.policy.is_unlimited else f"{used(compiled, totals):.1%}{of} spent in {steps}"
    )
