"""Ledger: durable accounts, and the verbs that concern several of them or all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, Final, NamedTuple, NoReturn, Self

from odograph.account import (
    USAGES,
    Account,
    budget_text,
    check_page,
    microseconds,
    spent_text,
    warn_of_large_delta,
)
from odograph.core.fixed_point import Numeric
from odograph.core.gate import Decision, Totals
from odograph.core.guarantees import Guarantee
from odograph.core.planning import Calibration, G, Kind, Quote, calibration_question
from odograph.core.policy import Compiled, Policy
from odograph.display import Progress, badge, card, paragraph, table
from odograph.errors import (
    AccountNotFound,
    EntryNotFound,
    InvalidArgument,
    InvalidPolicy,
    LedgerError,
    ReservationNotFound,
    did_you_mean,
    with_usages,
)
from odograph.ledger.backend import Backend, Opened
from odograph.ledger.entries import CHARGES, check_name, price_from_text
from odograph.ledger.epochs import Schedule, current_account
from odograph.ledger.results import Checkpoint, Events, History, Lifetime, Receipt, Reservation, Verification
from odograph.ledger.stores.base import Balance, Head
from odograph.ledger.transfer import check_file

__all__ = [
    "LEDGER_USAGES",
    "Ledger",
    "LedgerAccount",
    "State",
    "balance_in",
    "head_for",
    "name_error",
    "page_of",
    "states",
]

# What is added to Python's message about arguments that do not fit.
LEDGER_USAGES: Final = {
    "account": "it takes a name, such as account('census')",
    "accounts": "it takes nothing; one account is ledger.account('census')",
    "open_account": "an account is opened like open_account('census', Policy(1, 1e-6), parent='country')",
    "spend": "a ledger charges accounts by name, such as spend({'census': PureDP(0.1)}, key='q-1'); one account is"
    " charged by ledger.account('census').spend(PureDP(0.1))",
    "reserve": "a ledger charges accounts by name, such as reserve({'census': PureDP(0.1)}, expires=60); one account"
    " is charged by ledger.account('census').reserve(PureDP(0.1))",
    "decide": "a ledger decides by name, such as decide({'census': PureDP(0.1)}); one account decides by"
    " ledger.account('census').decide(PureDP(0.1))",
    "commit": "it takes the id of a reservation, such as commit('census#17')",
    "void": "it takes the id of a reservation and why nothing was run, such as void('census#17', 'the query failed')",
    "verify": "it takes a checkpoint by its name, such as verify(checkpoint=checkpoint)",
}


@with_usages(USAGES)
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

    def history(self, first: int = 0, count: int | None = None) -> History:
        """Return entries from a sequence on, at most `count`; a negative `first` counts from the end.

        Refusals are among them.
        """
        check_page(first, count)
        first, count = page_of(self.size, first, count)
        return History(self._backend.history(self.name, first, count) if count else ())

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
        balance = self._balance()
        part = spent_text(self.compiled, balance.totals)
        closed = ", closed" if balance.closed else ""
        return f"<LedgerAccount {self.name!r}, {budget_text(self.policy)}: {part}{closed}>"

    def _balance(self) -> Balance:
        return balance_in(self._backend.balances([self.name]), self._opened, self._backend.url)

    def _totals_over_time(self) -> list[Totals]:
        balance = self._balance()  # totals and sequence of one moment
        return [state.totals for state in states(self, balance.totals, balance.sequence)]


def balance_in(balances: Mapping[str, Balance], opened: Opened, url: str) -> Balance:
    """Return an account's balance, if it is still the account that was opened."""
    found = balances.get(opened.head.name)
    if found is None or found.origin != opened.origin:
        raise AccountNotFound(f"{opened.head.name!r} is no longer in {url}; connect again")
    return found


def name_error(problem: AccountNotFound, asked: Iterable[str], names: Collection[str]) -> AccountNotFound:
    """Return the error for an account that is not there, with the nearest name of those that the caller may see."""
    missing = next((name for name in asked if name and name not in names), "")
    got = (
        "" if not missing or repr(missing) in str(problem) else f" (got {missing!r})"
    )  # a service does not repeat it
    return AccountNotFound(f"{problem}{got}{did_you_mean(missing, names)}")


def page_of(size: int, first: int, count: int | None) -> tuple[int, int]:
    """Return the part of a history of some size that was asked for: its first sequence, and how many entries."""
    first = max(0, size + first) if first < 0 else min(first, size)
    return first, size - first if count is None else min(count, size - first)


def head_for(name: str, policy: Policy | Compiled, parent: str, successor_of: str, dataset: str) -> Head:
    """Return what a new account is opened as; its policy must be one that a ledger can keep."""
    check_name(name)
    if dataset != "":
        check_name(dataset, "dataset")
    if not isinstance(policy, Policy | Compiled):
        raise InvalidPolicy(f"an account needs a policy, such as Policy(1, 1e-6) (got {policy!r})")
    promised = policy.policy if isinstance(policy, Compiled) else policy
    unit, neighbors = promised.privacy_unit, promised.neighbors
    if not unit.isprintable():
        raise InvalidPolicy(f"in a ledger Policy.privacy_unit must be printable (got {unit!r})")
    return Head(name, parent, successor_of, dataset, unit, neighbors)


_PAGE: Final = 2000
_SHOWN: Final = 20  # accounts of a ledger in a notebook


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


@with_usages(LEDGER_USAGES)
class Ledger:
    """Accounts that survive crashes, races and retries. Made by `odograph.connect`; safe to use from many threads.

    `principal` is who writes: keys are unique per principal, and entries carry a random identity for the name.
    """

    def __init__(self, backend: Backend, *, suggest_names: bool = False) -> None:
        self.backend = backend  # for code that builds on a ledger, such as the service
        self._suggest_names = suggest_names  # in errors: not in a service, whose callers may not see them all

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        return self.backend.url

    @property
    def principal(self) -> str:
        """Who writes through this object."""
        return self.backend.principal

    def acting_as(self, principal: str) -> Ledger:
        """Return the same ledger for another principal, sharing the connection and the queue."""
        return Ledger(self.backend.acting_as(principal), suggest_names=self._suggest_names)

    def open_account(  # noqa: PLR0913  each is one sentence about the account
        self,
        name: str,
        policy: Policy | Compiled,
        *,
        parent: LedgerAccount | str | None = None,
        successor_of: LedgerAccount | str | None = None,
        dataset: str = "",
        key: str | None = None,
        note: str = "",
    ) -> LedgerAccount:
        """Open an account; its compiled policy is its first entry and never changes.

        What it spends, every account above it (`parent`) spends too. A new policy for the same data is a new account,
        `successor_of` the old one: a fresh budget, and the promises add up. Both are given as accounts of this ledger
        or by name. Accounts of one `dataset` are blocks of it: each holds the records of its own day or region, and a
        person's records are in one block.
        """
        above, before = self._name_of(parent, "parent"), self._name_of(successor_of, "successor_of")
        head = head_for(name, policy, above, before, dataset)
        warn_of_large_delta(policy)
        with self._suggesting((above, before)):
            self.backend.open(head, policy, key, note)
        return self.account(name)

    def _name_of(self, account: LedgerAccount | str | None, field: str) -> str:
        """Return the name of a relative that was given as an account of this ledger or by its name."""
        if isinstance(account, LedgerAccount):
            if self.account(account.name) != account:
                raise LedgerError(f"{field} must be an account of {self.url} (got one of another ledger)")
            return account.name
        return "" if account is None or account == "" else check_name(account, field)

    @contextmanager
    def _suggesting(self, names: Iterable[str]) -> Iterator[None]:
        """Complete an error about an account that is not there by the name that was probably meant."""
        try:
            yield
        except AccountNotFound as problem:
            if not self._suggest_names:
                raise
            raise name_error(problem, names, self.backend.balances()) from None

    def account(self, name: str) -> LedgerAccount:
        """Return an account that was opened before."""
        with self._suggesting([name]):
            opened = self.backend.opened(name)
        opened.require_own()
        return LedgerAccount(self.backend, opened)

    def current(self, name: str) -> LedgerAccount:
        """Return the newest account of a budget that renews: `current("census")` may be census@2026-11-01.

        It raises `AccountClosed` if that one is closed; an older one is never current. Opening the next one is the
        task of `odograph renew`: until that has run, the account of an epoch that is over stays current.
        """
        return self.account(
            current_account(name, {one: balance.closed for one, balance in self.backend.balances().items()})
        )

    def accounts(self) -> tuple[LedgerAccount, ...]:
        """Return all accounts, in the order of their names; populations are not among them."""
        opened = [self.backend.opened(name) for name in self.backend.balances()]
        return tuple(LedgerAccount(self.backend, one) for one in opened if one.population is None)

    def population(self, name: str, *, location: str | Path | None = None) -> Any:  # noqa: ANN401  of a higher layer
        """Return a population: a `Population`, or a `RemotePopulation` with the same verbs for a service.

        Pass the location of its files if they were moved; a service has folders of its own.
        """
        return self.backend.population(self, check_name(name), location)

    def create_population(  # noqa: PLR0913  the choices that are made once
        self,
        name: str,
        policy: Policy | Compiled,
        *,
        location: str | Path | None = None,
        engine: str = "numpy",
        unknown: str = "leave-out",
        renew: Schedule | None = None,
        key: str | None = None,
        note: str = "",
    ) -> Any:  # noqa: ANN401  as above
        """Create a population without people; they come by `join`. A service keeps its files in its own folder.

        With a schedule it is the population of the current epoch, such as visits@2026-11-01.
        """
        choices = {"engine": engine, "unknown": unknown, "renew": renew}
        return self.backend.create_population(
            self, check_name(name), policy, location=location, key=key, note=note, **choices
        )

    def spend(self, costs: Mapping[str, Guarantee], *, key: str | None = None, note: str = "") -> Receipt:
        """Charge several accounts, all or nothing; refused, it says which ran out and what would fit.

        Each cost bounds the mechanism for a person in that account's data. Accounts that share a parent charge it
        once each.
        """
        with self._suggesting(costs):
            return self.backend.charge("spend", costs, key, note)

    def reserve(
        self,
        costs: Mapping[str, Guarantee],
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> Reservation:
        """Charge now, and commit or void later; once it has expired (`expires` from now) it cannot be voided."""
        with self._suggesting(costs):
            receipt = self.backend.charge("reserve", costs, key, note, microseconds(expires))
        return Reservation(self.backend.resolve, receipt)

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Return whether several accounts would admit their costs together; spend nothing."""
        with self._suggesting(costs):
            return self.backend.decide(costs)

    def commit(self, reservation: str, *, note: str = "") -> Receipt:
        """Confirm a reservation: its mechanism was run, or may have been. Works after it expired, and again."""
        return self.backend.resolve("commit", reservation, note)

    def void(self, reservation: str, reason: str) -> Receipt:
        """Take a reservation back: the mechanism was not run. Not after it was committed or has expired."""
        return self.backend.resolve("void", reservation, reason)

    def reservation(self, reservation: str) -> Reservation:
        """Return a reservation by its id, such as `census#17`: to resolve it in another process."""
        return Reservation(self.backend.resolve, self.backend.reservation(reservation))

    def events(self, *, after: str = "", count: int = 1000) -> Events:
        """Return entries of all accounts that follow a cursor, at most `count`, and the cursor that follows them.

        Begin without a cursor, or with "now" to leave out what there is, and go on with the `after` that was
        returned: so each entry is read once, also where many processes write. `more` tells whether to ask at once.
        """
        check_page(0, count)
        if not isinstance(after, str):
            raise InvalidArgument(f"after must be a cursor that was returned with earlier events (got {after!r})")
        return self.backend.events(after, count)

    def verify(self, *, checkpoint: Checkpoint | None = None, progress: Progress | None = None) -> Verification:
        """Replay every entry of every account, or raise `LedgerCorrupt` and name the first bad one."""
        return self.backend.verify(checkpoint, progress)

    def checkpoint(self) -> Checkpoint:
        """Return the last seal of every account: kept elsewhere, it lets `verify` detect removals and rewrites."""
        return self.backend.checkpoint()

    def export(self, file: IO[str], *, progress: Progress | None = None) -> Checkpoint:
        """Write the whole ledger as JSON Lines, integers as strings; return its checkpoint."""
        check_file(file, "export", "w")
        return self.backend.export(file, progress)

    def import_(
        self, file: IO[str], *, checkpoint: Checkpoint | None = None, progress: Progress | None = None
    ) -> Verification:
        """Read what `export` wrote into this ledger, which must be empty, replaying all of it on the way.

        A copy may be older than its original, and would give spent budget back. So it is refused if it is behind the
        checkpoint, and without one every account is closed.
        """
        check_file(file, "import_", "r")
        return self.backend.import_(file, checkpoint, progress)

    def backup(self, path: str | Path, *, progress: Progress | None = None) -> Checkpoint:
        """Copy the whole ledger, as it is now, into a new SQLite file, for reading; return its checkpoint."""
        return self.backend.backup(Path(path), progress)

    def restore(
        self, path: str | Path, *, checkpoint: Checkpoint | None = None, progress: Progress | None = None
    ) -> Verification:
        """Read a backup into this ledger, which must be empty; without a checkpoint all accounts are closed."""
        return self.backend.restore(Path(path), checkpoint, progress)

    def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry, such as `census#17`; its digest stays. Return whether there was one."""
        try:
            return self.backend.erase_note(entry)
        except ReservationNotFound as problem:
            raise EntryNotFound(str(problem)) from problem

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; entries keep the random identity. Return whether there was one.

        The keys that it used stay used, for every principal: a retry under one of them is not charged a second time.
        """
        return self.backend.erase_principal(name)

    def close(self) -> None:
        """Close files and connections; the accounts stay open. Every later call raises `LedgerError`.

        What `acting_as` returned is closed with this ledger; closing that closes nothing else.
        """
        self.backend.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ledger {self.url} as {self.principal!r}>"

    def _repr_html_(self) -> str:
        balances = self.backend.balances()
        rows = []
        for name in sorted(balances)[:_SHOWN]:
            compiled, balance = self.backend.opened(name), balances[name]
            rows.append(_summary_row(compiled, balance))
        more = len(balances) - len(rows)
        accounts = table(("account", "promise", "spent", "below", ""), rows) if rows else paragraph("no accounts yet")
        rest = [paragraph(f"and {more:,} more")] if more else []
        return card(f"Ledger {self.url}", accounts, *rest, label=badge(f"as {self.principal}"))


def _summary_row(opened: Opened, balance: Balance) -> tuple[object, ...]:
    head, policy = balance.head, opened.compiled.policy
    people = opened.population is not None
    spent = "a population" if people else spent_text(opened.compiled, balance.totals)
    return head.name, policy.target, spent, head.parent, badge("closed") if balance.closed else ""
