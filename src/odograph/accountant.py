"""Accountant: an account in memory, and the document that restores it."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from odograph.account import (
    USAGES,
    Account,
    budget_text,
    check_page,
    microseconds,
    spent_text,
    warn_of_large_delta,
)
from odograph.compile import Certification, compile_policy
from odograph.concurrency import reentry_error, renew_after_fork
from odograph.core.fixed_point import Numeric
from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import Guarantee, guarantee_from_dict
from odograph.core.planning import (
    AccountState,
    Calibration,
    G,
    Kind,
    Quote,
    ask,
    calibrate,
    calibration_question,
    how_many,
    largest,
    notes_on,
    quote,
    watched,
    with_offer,
)
from odograph.core.policy import Compiled, Policy, check_compiled, too_low
from odograph.errors import (
    AccountClosed,
    AccountExists,
    BudgetExceeded,
    IdempotencyConflict,
    InvalidArgument,
    InvalidPolicy,
    LedgerCorrupt,
    ReservationResolved,
    UnprovenComposition,
    with_usage,
    with_usages,
)
from odograph.ledger.entries import CHARGES, check_key, moment, stamp, text_of
from odograph.ledger.results import History, HistoryEntry, Line, Receipt, Reservation, Stated
from odograph.ledger.stores.base import Balance, Head
from odograph.sessions import running

__all__ = ["Accountant", "document_digest"]

_FORM: Final = 2
_FORMS: Final = (1, _FORM)  # 1: of 0.1.0, without keys, reservations and times
_REMEMBERED: Final = 1024  # prices of guarantees that were charged before
_COPIED: Final = (
    "this accountant is a copy (a pickle, or a forked process), and a copy must not be a second budget: it can be"
    " read, and spends only after resume(), which promises that the original spends no more"
)
# A receipt is made at every spend, and a named tuple's own constructor takes twice as long as the tuple's.
_named = tuple.__new__


class _Tree:
    """What an account shares with its sub-budgets: one lock, the keys, and whether this is a copy."""

    def __init__(self) -> None:
        self.after_fork()
        self.copied = False
        self.time = 0  # of the last entry, in microseconds since 1970
        self.reservations = 0  # how many were made
        self.keys: dict[str, _Charge] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Make a lock that no thread holds, and a copy of this: a forked process is not a second budget."""
        self.lock = threading.RLock()
        self.is_locked_here: Callable[[], bool] = self.lock._is_owned  # type: ignore[attr-defined]  # for Condition
        self.copied = True

    def refuse_reentry(self) -> None:
        """Raise where a signal handler or a finalizer interrupts a spend of its own thread: one would be lost."""
        if self.is_locked_here():
            raise reentry_error()

    def now(self) -> int:
        """Return the time of the next entry, which is never earlier than the last one; see `stamp`."""
        now = time.time_ns() // 1000
        return now if now >= self.time else stamp(now, (self.time,))


class _Entry(NamedTuple):
    """An entry as it is kept; its sequence follows from its position."""

    written: int
    verb: str
    cost: Guarantee | None
    price: Price | None
    account: str  # that was asked
    key: str
    note: str
    voidable_until: int | None
    reservation: int  # the number of the reservation in its tree, for reserve, commit and void


class _Charge:
    """A charge that is remembered: it has a key, or it is a reservation that is yet to be resolved."""

    __slots__ = ("account", "number", "prices", "receipt", "resolution")

    def __init__(self, account: Accountant, receipt: Receipt, number: int, prices: tuple[Price, ...]) -> None:
        self.account = account
        self.receipt = receipt._replace(decision=None, notes=())  # what would be read back later
        self.number = number  # of the reservation in its tree; 0 for a spend
        self.prices = prices  # of a reservation, as charged, from the top of the tree down to the account
        self.resolution: Receipt | None = None

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void the reservation once; the same again is the same, the opposite is an error.

        Theorem: reservations: a step that never happened costs nothing, so its price may be taken back exactly.
        Assumes: a reservation is voided only if its mechanism was not run.
        """
        if verb == "void" and not (isinstance(note, str) and note.strip()):
            raise InvalidArgument(f"reason must be a non-empty string that says why nothing was run (got {note!r})")
        if not isinstance(note, str):
            raise InvalidArgument(f"note must be a string (got {note!r})")
        account, tree = self.account, self.account._tree
        tree.refuse_reentry()
        with tree.lock:
            if tree.copied:
                raise AccountClosed(_COPIED)
            if self.resolution is not None:
                if self.resolution.verb == verb:
                    return self.resolution._replace(repeated=True)
                done = "committed" if self.resolution.verb == "commit" else "voided"
                raise ReservationResolved(f"reservation {reservation} was {done} before, by {self.resolution.id}")
            now, until = tree.now(), self.receipt.voidable_until
            # By the latest of the times, even if the clock has been set back since: it may have run by then.
            if verb == "void" and until is not None and max(now, tree.time) > until:
                raise ReservationResolved(
                    f"reservation {reservation} expired at {moment(until):%Y-%m-%d %H:%M:%S} UTC: its mechanism may"
                    " have run, so it can be committed and no longer voided"
                )
            tree.time = now
            cost = self.receipt.lines[0].cost
            line = Line(account.name, account.size, cost, "")
            unsure = self.receipt.uncertified
            # Resolved before anything is taken back: an interrupt in between leaves too much charged. The account
            # itself before those above it, so that these never have less than it.
            self.resolution = Receipt(verb, reservation, now, (line,), None, (), repeated=False, uncertified=unsure)
            for one, price in zip(reversed(account._chain), reversed(self.prices), strict=True):
                one._append(_Entry(now, verb, cost, price, account.name, reservation, note, None, self.number))
                if verb == "void":
                    one._totals = one._totals.without(price)
                    one._voids += 1
                one._reserved.pop(self.number, None)
            return self.resolution


@with_usages(USAGES)
class Accountant(Account):
    """An account in memory: it admits a request if its own limit and every ancestor's hold, and charges them all.

    `policy` may be compiled already: a target that is not in the shipped table takes seconds to solve, and
    `compile_policy(policy, progress=progress_bar)` shows the progress. `parent` makes this a sub-budget: its promise
    is about its own answers, the parent's about those of all its sub-budgets. `keep` is how many of the last entries
    to keep: all (None), or none (0: totals only); an entry takes about 160 bytes, or 310 if no other entry has the
    same guarantee. Keys are remembered for all accounts of a tree together; a charge without one is not remembered.
    Safe to use from several threads. A copy is the same object; a pickle is read-only until `resume()`.
    """

    @with_usage("an accountant takes a policy, such as Accountant(Policy(epsilon=1, delta=1e-6), name='census')")
    def __init__(
        self,
        policy: Policy | Compiled,
        *,
        name: str = "",
        parent: Accountant | None = None,
        keep: int | None = None,
    ) -> None:
        if not isinstance(policy, Policy | Compiled):
            raise InvalidPolicy(f"an accountant needs a policy, such as Policy(1, 1e-6) (got {policy!r})")
        warn_of_large_delta(policy)
        if parent is not None and not isinstance(parent, Accountant):
            raise InvalidArgument(f"parent must be an Accountant or None (got {parent!r})")
        if not isinstance(name, str) or (parent is not None and not name):
            raise InvalidArgument(f"name must be a string, and that of a sub-budget must not be empty (got {name!r})")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise InvalidArgument(f"keep must be None (all entries) or an integer from 0 (got {keep!r})")
        if isinstance(policy, Policy):
            policy = compile_policy(policy)
        else:
            check_compiled(policy)
        self._compiled = policy
        self._name = name
        self._parent = parent
        self._children: dict[str, Accountant] = {}
        self._totals = self._compiled.start
        self._keep = keep
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=keep)  # the fields of an _Entry
        self._dropped = 0  # entries that are no longer kept
        self._reserved: dict[int, _Charge] = {}  # charged here and unresolved, by number
        self._voids = 0
        self._closed = False
        self._prices: dict[int, tuple[Guarantee, Price, tuple[int, ...]]] = {}
        self._unsure: tuple[str, ...] | None = None  # this name, if its limits are not certified here
        self._tree: _Tree = _Tree() if parent is None else parent._tree
        self._chain: tuple[Accountant, ...] = (self,) if parent is None else (*parent._chain, self)
        self._opened = self._tree.now()
        self._opened_in = running()
        if parent is not None:
            parent._adopt(self)

    @property
    def name(self) -> str:
        """The name; empty if none was given."""
        return self._name

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, compiled once, when the account was opened."""
        return self._compiled

    @property
    def parent(self) -> Accountant | None:
        """The account above this one, which is charged with it."""
        return self._parent

    @property
    def children(self) -> Mapping[str, Accountant]:
        """The accounts directly below this one, by name; read-only."""
        return MappingProxyType(self._children)

    @property
    def totals(self) -> Totals:
        """What was spent, in integer units."""
        return self._totals

    @property
    def pending(self) -> tuple[Reservation, ...]:
        """The reservations charged here that were neither committed nor voided."""
        with self._tree.lock:
            unresolved = [charge for charge in self._reserved.values() if charge.resolution is None]
        return tuple(Reservation(charge.resolve, charge.receipt) for charge in unresolved)

    @property
    def voids(self) -> int:
        """How many reservations charged here were voided; each is an assurance that nothing was run."""
        return self._voids

    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """Charge the cost here and to every account above, or raise `BudgetExceeded` and charge none of them.

        The same key with the same cost returns the first receipt, `repeated`, and charges nothing more: it pays for
        one run. A refusal leaves the key free.
        """
        return self._charge("spend", cost, key, note, None)[0]

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
        receipt, charge = self._charge("reserve", cost, key, note, microseconds(expires))
        assert charge is not None  # noqa: S101  a reservation is remembered
        return Reservation(charge.resolve, receipt)

    def _charge(  # noqa: C901, PLR0912, PLR0915  one function: each call would add a twentieth to a spend
        self, verb: str, cost: Guarantee, key: str | None, note: str, expires: int | None
    ) -> tuple[Receipt, _Charge | None]:
        """Charge every account from the top down, or none; return what is remembered of it beside the receipt."""
        if not isinstance(note, str):
            raise InvalidArgument(f"note must be a string (got {note!r})")
        tree = self._tree
        if tree.is_locked_here():
            tree.refuse_reentry()
        with tree.lock:
            if key is not None and check_key(key) in tree.keys:
                return self._repeat(tree.keys[key], verb, cost)
            if tree.copied or self._closed:
                raise AccountClosed(_COPIED if tree.copied else self._closed_message())
            charges = []
            noted = False
            for account in self._chain:
                _, price, watch = account._price(cost)
                decision = decide(account._compiled.meters, account._totals, price, cost)
                if not decision.admitted:
                    break
                charges.append((account, decision))
                for i in watch:
                    if not decision.totals.unpriced[i]:
                        noted = True
            else:
                if noted:
                    charges[-1] = self, decision._replace(notes=notes_on(self._path(), decision))
                now = time.time_ns() // 1000
                now = tree.time = now if now >= tree.time else tree.now()
                until = None if expires is None else now + expires
                number = 0
                if verb == "reserve":
                    number = tree.reservations = tree.reservations + 1
                # Totals before entries, the top first: an interrupt in between leaves too much charged.
                for account, decision in charges:
                    entries = account._entries
                    kept = len(entries)
                    sequence = account._dropped + kept + 1
                    account._totals = decision.totals_after
                    entries.append((now, verb, cost, decision.price, self._name, key or "", note, until, number))
                    if kept == account._keep:
                        account._dropped = sequence - kept
                unsure = self._uncertified() if self._unsure is None else self._unsure
                line = _named(Line, (self._name, sequence, cost, ""))
                receipt = _named(
                    Receipt, (verb, key or "", now, (line,), until, (), False, unsure, decision, decision.notes, "")
                )
                if number or key is not None:
                    return receipt, self._remember(key, receipt, number, charges)
                return receipt, None
            path = self._path()
        for other in self._chain:
            other._price(cost)  # an account with no theorem for the cost raises first, as in `decide`
        raise BudgetExceeded(with_offer(path, decision, path[len(charges)].name))

    def _remember(
        self, key: str | None, receipt: Receipt, number: int, charges: Sequence[tuple[Accountant, Decision]]
    ) -> _Charge:
        prices = tuple(decision.price for _, decision in charges) if number else ()
        charge = _Charge(self, receipt, number, prices)
        if number:
            for account, _ in charges:
                account._reserved[number] = charge
        if key is not None:
            self._tree.keys[key] = charge
        return charge

    def _repeat(self, charge: _Charge, verb: str, cost: Guarantee) -> tuple[Receipt, _Charge]:
        """Return the first receipt of a key, or raise if the key was used for another request."""
        for account in self._chain:
            account._price(cost)  # what is not a guarantee, or has no theorem, raises as without a key
        first = charge.receipt
        same = charge.account is self and first.verb == verb
        if not same or text_of(first.lines[0].cost.to_dict()) != text_of(cost.to_dict()):
            raise IdempotencyConflict(
                f"key {first.key!r} was used before for another request ({first.verb}, {first.id}); nothing was"
                " charged. All accounts of a tree share their keys: the same key must come with the same verb,"
                " account and guarantee, and another request needs another key"
            )
        if charge.resolution is not None and charge.resolution.verb == "void":
            raise ReservationResolved(
                f"key {first.key!r} was used for reservation {first.id}, which was voided, so nothing is charged for"
                " it; a run needs another key"
            )
        return first._replace(repeated=True), charge

    def decide(self, cost: Guarantee) -> Decision:
        """Return whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""
        return ask(self._open_path(), cost)

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return quote(self._open_path(), costs)

    def largest(self, kind: Kind[G], times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

        The kind is a class, a guarantee whose other fields are kept, or a mechanism such as `odograph.gaussian`.
        """
        return None if self._closed else largest(self._path(), kind, times)

    def calibrate(
        self, mechanism: Callable[..., Guarantee], /, *, times: int = 1, **settings: Numeric
    ) -> Calibration | None:
        """Return the least noise with which `times` equal requests of a mechanism are admitted, or None.

        `mechanism` is a function such as `odograph.laplace`, and the settings are its arguments beside the noise. The
        scale, sigma, epsilon or other parameter has four digits, and a value with less noise is refused.
        """
        question = calibration_question(mechanism, times, settings)
        return None if self._closed else calibrate(self._path(), question)

    def how_many(self, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row, at most 10^12; of a closed account, 0."""
        return 0 if self._closed else how_many(self._path(), cost)

    def history(self, first: int = 0, count: int | None = None) -> History:
        """Return entries from a sequence on, at most `count`; a negative `first` counts from the end.

        The opening and the entries that are kept; refusals are not recorded.
        """
        check_page(first, count)
        with self._tree.lock:
            dropped, kept = self._dropped, tuple(self._entries)
        size = dropped + len(kept) + 1
        first = max(0, size + first) if first < 0 else first
        last = size if count is None else min(size, first + count)
        found = [_history_entry(n, _Entry._make(kept[n - dropped - 1])) for n in range(max(first, dropped + 1), last)]
        if first == 0:
            found.insert(0, HistoryEntry(0, self._opened, "open", "", "", stated=Stated(None, None, self._name)))
        return History(found)

    def close(self, *, note: str = "") -> None:
        """Take no new charges from now on, here and below; reservations can still be resolved."""
        if not isinstance(note, str):
            raise InvalidArgument(f"note must be a string (got {note!r})")
        self._tree.refuse_reentry()
        with self._tree.lock:
            if self._tree.copied:
                raise AccountClosed(_COPIED)
            now = self._tree.time = self._tree.now()
            # From the bottom up: an interrupt in between leaves no account open below a closed one.
            for account in reversed([*self._with_descendants()]):
                if not account._closed:
                    account._closed = True
                    own = note if account is self else ""
                    account._append(_Entry(now, "close", None, None, account._name, "", own, None, 0))

    def resume(self) -> None:
        """Let a copy spend (a pickle, or a forked process): the caller promises that the original spends no more."""
        self._tree.copied = False

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned document that `from_dict` reads: policies, totals, entries, keys, reservations."""
        if self._parent is not None:
            raise InvalidArgument(f"{self._name!r} is a sub-budget; write the account at the top, which holds it")
        tree = self._tree
        tree.refuse_reentry()
        with tree.lock:
            remembered = {id(charge): charge for charge in tree.keys.values()}
            for account in self._with_descendants():
                open_here = [charge for charge in account._reserved.values() if charge.resolution is None]
                remembered |= {id(charge): charge for charge in open_here}
            form = {
                "form": _FORM,
                "time": str(tree.time),
                "reservations": str(tree.reservations),
                **_account_to_dict(self, [*remembered.values()]),
            }
        return form | {"digest": document_digest(form)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Accountant:
        """Read what `to_dict` wrote, now or in 0.1.0, and replay its entries; damage raises `LedgerCorrupt`."""
        if not isinstance(form, Mapping) or form.get("form") not in _FORMS:
            raise LedgerCorrupt(f"not an accountant's document of form {_FORM}, or of form 1")
        try:
            content = {name: value for name, value in form.items() if name != "digest"}
            if form.get("digest") != document_digest(content):
                raise LedgerCorrupt("the document's digest does not fit its content: it was damaged or changed")
            return _restored(form)
        except (AttributeError, LookupError, TypeError, ValueError, UnprovenComposition) as problem:
            raise LedgerCorrupt(f"the document's content contradicts itself: {problem}") from problem

    def __reduce__(self) -> tuple[Any, ...]:
        if self._parent is not None:
            return _child, (self._parent, self._name)
        return _unpickled, (self.to_dict(),)

    def __repr__(self) -> str:
        policy = self.policy
        name = f"{self._name!r}, " if self._name else ""
        part = spent_text(self._compiled, self._totals)
        closed = ", closed" if self._closed else ""
        copied = ", read-only copy" if self._tree.copied else ""
        unsure = ", limits not certified here" if self.certification is Certification.NONE else ""
        return f"<Accountant {name}{budget_text(policy)}: {part}{closed}{copied}{unsure}>"

    def _adopt(self, child: Accountant) -> None:
        own, other = self.policy, child.policy
        if (own.privacy_unit, own.neighbors) != (other.privacy_unit, other.neighbors):
            raise InvalidPolicy(
                "a sub-budget protects the same privacy unit and neighbors as its parent:"
                f" {own.privacy_unit!r}, {own.neighbors!r}, not {other.privacy_unit!r}, {other.neighbors!r}"
            )
        if self._closed:
            raise AccountClosed(self._closed_message())
        if self._children.setdefault(child.name, child) is not child:
            raise AccountExists(f"there is a sub-budget {child.name!r} already; a new policy needs a new name")

    def _closed_message(self) -> str:
        return f"{self._name!r} is closed" if self._name else "this account is closed"

    def _price(self, cost: Guarantee) -> tuple[Guarantee, Price, tuple[int, ...]]:
        """Return the price and what is `watched`, remembered for the same object: it is most of a spend's work."""
        known = self._prices.get(id(cost))
        if known is not None and known[0] is cost:
            return known
        price = self._compiled.price(cost)
        if len(self._prices) >= _REMEMBERED:
            self._prices.clear()
        # Holding the object keeps its identity from being used again.
        known = self._prices[id(cost)] = (cost, price, watched(self._compiled, cost, price))
        return known

    def _uncertified(self) -> tuple[str, ...]:
        certified = self.certification is not Certification.NONE
        self._unsure = () if certified else (self._name or "the account",)
        return self._unsure

    def _append(self, entry: _Entry) -> None:
        kept = len(self._entries)
        self._entries.append(tuple(entry))
        if kept == self._keep:
            self._dropped += 1

    def _with_descendants(self) -> Iterator[Accountant]:
        """Yield this account and all below it, parents before children."""
        yield self
        for child in self._children.values():
            yield from child._with_descendants()

    def _path(self) -> list[AccountState]:
        return [
            AccountState(
                account._name or ("" if account is self else "the account above"), account._compiled, account._totals
            )
            for account in self._chain
        ]

    def _open_path(self) -> list[AccountState]:
        if self._closed:
            raise AccountClosed(self._closed_message())
        return self._path()

    def _balance(self) -> Balance:
        with self._tree.lock:
            last = self._entries[-1][0] if self._entries else self._opened
            parent = "" if self._parent is None else self._parent._name
            head = Head(self._name, parent, "", "", self.policy.privacy_unit, self.policy.neighbors)
            return Balance(head, self._dropped + len(self._entries), "", last, self._totals, self._closed)

    def _totals_over_time(self) -> list[Totals]:
        with self._tree.lock:
            stood, kept = [self._totals], [_Entry._make(entry) for entry in self._entries]
        voided = {entry.reservation for entry in kept if entry.verb == "void"}
        for entry in reversed(kept):
            if entry.price is not None and entry.verb in CHARGES and entry.reservation not in voided:
                stood.append(stood[-1].without(entry.price))
        return stood[::-1]


def _history_entry(sequence: int, entry: _Entry) -> HistoryEntry:
    stated = Stated(entry.cost, entry.price, entry.account)
    until = entry.voidable_until
    return HistoryEntry(sequence, entry.written, entry.verb, entry.key, entry.note, until, stated=stated)


# The document. Integers are strings, because JSON numbers lose digits.


def document_digest(form: Mapping[str, Any]) -> str:
    """Return a digest that detects damage and careless edits; it does not detect deliberate ones."""
    return hashlib.sha256(text_of(form).encode()).hexdigest()


def _account_to_dict(account: Accountant, remembered: Sequence[_Charge]) -> dict[str, Any]:
    return {
        "name": account._name,
        "keep": account._keep,
        "compiled": account._compiled.to_dict(),
        "totals": _totals_to_dict(account._totals),
        "opened": str(account._opened),
        "closed": account._closed,
        "dropped": str(account._dropped),
        "voids": str(account._voids),
        "entries": [_entry_to_dict(_Entry._make(entry)) for entry in account._entries],
        "charges": [_charge_to_dict(charge) for charge in remembered if charge.account is account],
        "children": [_account_to_dict(child, remembered) for child in account._children.values()],
    }


def _entry_to_dict(entry: _Entry) -> dict[str, Any]:
    return {
        "time": str(entry.written),
        "verb": entry.verb,
        "guarantee": None if entry.cost is None else entry.cost.to_dict(),
        "price": None if entry.price is None else _price_to_list(entry.price),
        "account": entry.account,
        "key": entry.key,
        "note": entry.note,
        "expires": None if entry.voidable_until is None else str(entry.voidable_until),
        "reservation": str(entry.reservation),
    }


def _charge_to_dict(charge: _Charge) -> dict[str, Any]:
    receipt, done = charge.receipt, charge.resolution
    until = receipt.voidable_until
    return {
        "verb": receipt.verb,
        "key": receipt.key,
        "time": str(receipt.written),
        "sequence": str(receipt.lines[0].sequence),
        "guarantee": receipt.lines[0].cost.to_dict(),
        "expires": None if until is None else str(until),
        "reservation": str(charge.number),
        "prices": [_price_to_list(price) for price in charge.prices],
        "resolution": None if done is None else [done.verb, str(done.written), str(done.lines[0].sequence)],
    }


def _price_to_list(price: Price) -> list[str | None]:
    return [None if amount is None else str(amount) for amount in price.amounts]


def _totals_to_dict(totals: Totals) -> dict[str, Any]:
    return {
        "amounts": [str(amount) for amount in totals.amounts],
        "unpriced": [str(count) for count in totals.unpriced],
        "steps": str(totals.steps),
    }


def _restored(form: Mapping[str, Any]) -> Accountant:
    account = _restored_account(form, None, form["form"])
    tree = account._tree
    if form["form"] != 1:
        tree.time, tree.reservations = _integer(form["time"]), _integer(form["reservations"])
    for one in account._with_descendants():
        _check_reserved(one)
    return account


def _check_reserved(account: Accountant) -> None:
    """Raise unless the unresolved reservations can be taken back: each is as charged, and all are in the totals."""
    kept = [_Entry._make(entry) for entry in account._entries]
    charged = {entry.reservation: entry.price for entry in kept if entry.verb == "reserve"}
    rest = account._totals
    for number, charge in account._reserved.items():
        price = charge.prices[len(account._chain) - 1]
        rest = _without(rest, price)
        if number > account._tree.reservations or charged.get(number, price) != price:
            raise ValueError(f"reservation {charge.receipt.id} was not made, or not at this price")


def _restored_account(form: Mapping[str, Any], parent: Accountant | None, version: int) -> Accountant:
    account = Accountant(Compiled.from_dict(form["compiled"]), name=form["name"], parent=parent, keep=form["keep"])
    compiled = account._compiled
    totals = _totals_from_dict(form["totals"], len(compiled.meters))
    entries = [_entry_from_dict(entry, compiled, version) for entry in form["entries"]]
    _check_replay(compiled, totals, entries)
    account._totals = totals
    account._entries.extend(map(tuple, entries))
    if version == 1:
        account._opened, account._dropped = 0, totals.steps - len(entries)
    else:
        account._opened, account._dropped = _integer(form["opened"]), _integer(form["dropped"])
        account._voids = _integer(form["voids"])
        for charge in form["charges"]:
            _restore_charge(account, charge)
    children = [_restored_account(child, account, version) for child in form["children"]]
    if sum(child._totals.steps for child in children) > totals.steps:
        raise ValueError("the sub-budgets took more steps than the account above them")
    account._closed = version != 1 and _boolean(form["closed"])
    return account


def _restore_charge(account: Accountant, form: Mapping[str, Any]) -> None:
    cost, key, until = guarantee_from_dict(form["guarantee"]), form["key"], form["expires"]
    line = Line(account._name, _integer(form["sequence"]), cost, "")
    until = None if until is None else _integer(until)
    written, number = _integer(form["time"]), _integer(form["reservation"])
    receipt = Receipt(form["verb"], key, written, (line,), until, (), False, account._uncertified())  # noqa: FBT003
    prices = tuple(
        _price_from_list(price, cost, one._compiled)
        for one, price in zip(account._chain, form["prices"], strict=False)
    )
    if form["verb"] not in CHARGES or len(prices) != (len(account._chain) if number else 0):
        raise ValueError(f"{receipt.id} is neither a spend nor a reservation")
    charge = _Charge(account, receipt, number, prices)
    if form["resolution"] is not None:
        verb, time_of_it, sequence = form["resolution"]
        resolved = Line(account._name, _integer(sequence), cost, "")
        charge.resolution = Receipt(verb, receipt.id, _integer(time_of_it), (resolved,), None, (), repeated=False)
        if verb not in {"commit", "void"}:
            raise ValueError(f"{receipt.id} was resolved by {verb!r}")
    elif number:
        for one in account._chain:
            if one._reserved.setdefault(number, charge) is not charge:
                raise ValueError(f"there are two reservations {number}")
    if key and account._tree.keys.setdefault(check_key(key), charge) is not charge:
        raise ValueError(f"key {key!r} was used twice")


def _totals_from_dict(form: Mapping[str, Any], meters: int) -> Totals:
    totals = Totals(
        tuple(_integer(amount) for amount in form["amounts"]),
        tuple(_integer(count) for count in form["unpriced"]),
        _integer(form["steps"]),
    )
    if not len(totals.amounts) == len(totals.unpriced) == meters:
        raise ValueError("the totals are of other meters than the policy's")
    return totals


def _entry_from_dict(form: Mapping[str, Any], compiled: Compiled, version: int) -> _Entry:
    if version == 1:
        form = {"time": "0", "verb": "spend", "key": "", "expires": None, "reservation": "0", **form}
    verb, until, number = str(form["verb"]), form["expires"], _integer(form["reservation"])
    if (verb in {"reserve", "commit", "void"}) != (number > 0):
        raise ValueError(f"an entry {verb!r} is of reservation {number}")
    cost = None if verb == "close" else guarantee_from_dict(form["guarantee"])
    return _Entry(
        _integer(form["time"]),
        verb,
        cost,
        None if cost is None else _price_from_list(form["price"], cost, compiled),
        str(form["account"]),
        str(form["key"]),
        str(form["note"]),
        None if until is None else _integer(until),
        number,
    )


def _price_from_list(form: Sequence[str | None], cost: Guarantee, compiled: Compiled) -> Price:
    price = Price(tuple(None if amount is None else _integer(amount) for amount in form))
    if too_low(price, compiled.price(cost)):
        raise ValueError(f"{cost} is written with a lower price than it has")
    return price


def _check_replay(compiled: Compiled, totals: Totals, entries: Sequence[_Entry]) -> None:
    """Raise unless the entries add up to the totals, or, where only some were kept, could be the last of them."""
    reserved = {entry.reservation for entry in entries if entry.verb == "reserve"}
    voided = {entry.reservation for entry in entries if entry.verb == "void"} & reserved
    # A reservation that is here with its void adds nothing.
    rest = [entry for entry in entries if entry.verb not in {"reserve", "void"} or entry.reservation not in voided]
    charges = [entry.price for entry in rest if entry.price is not None and entry.verb in CHARGES]
    voids = [entry.price for entry in rest if entry.price is not None and entry.verb == "void"]
    missing = totals.steps - len(charges) + len(voids)
    if missing < 0:
        raise ValueError("there are more entries than steps")
    replayed = _totals_before(totals, charges, voids, missing) if missing else compiled.start
    for entry in rest:
        if entry.verb == "void" and entry.price is not None:
            replayed = _without(replayed, entry.price)
        elif entry.verb in CHARGES and entry.price is not None:
            decision = decide(compiled.meters, replayed, entry.price)
            if not decision.admitted or decision.price != entry.price:
                raise ValueError(f"{entry.cost} would not have been admitted")
            replayed = decision.totals_after
        elif entry.verb not in {"commit", "close"}:
            raise ValueError(f"{entry.verb!r} is not a verb of an entry")
    if replayed != totals:
        raise ValueError("the entries do not add up to the totals")
    free = Price((0,) * len(compiled.meters))
    if totals.steps and not decide(compiled.meters, totals, free).admitted:
        raise ValueError("the totals are past the limits")


def _totals_before(totals: Totals, charges: Sequence[Price], voids: Sequence[Price], steps: int) -> Totals:
    """Return the totals of the steps before some charges and voids, which are not written down themselves."""
    amounts, unpriced = list(totals.amounts), list(totals.unpriced)
    for sign, prices in ((-1, charges), (1, voids)):
        for price in prices:
            for i, amount in enumerate(price.amounts):
                amounts[i] += sign * (amount or 0)
                unpriced[i] += sign * (amount is None)
    if min(*amounts, *unpriced) < 0:
        raise ValueError("the entries add up to more than the totals")
    return Totals(tuple(amounts), tuple(unpriced), steps)


def _without(totals: Totals, price: Price) -> Totals:
    rest = totals.without(price)
    if min(*rest.amounts, *rest.unpriced, rest.steps) < 0:
        raise ValueError("more is taken back than was charged")
    return rest


def _integer(text: object) -> int:
    if not isinstance(text, str) or not text.isdecimal():
        raise ValueError(f"an integer is written in digits (got {text!r})")
    return int(text)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"closed is true or false (got {value!r})")
    return value


def _unpickled(form: Mapping[str, Any]) -> Accountant:
    account = Accountant.from_dict(form)
    account._tree.copied = True
    return account


def _child(parent: Accountant, name: str) -> Accountant:
    return parent.children[name]
