"""Accountant: one account in memory, a thin shell over the gate."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakSet

from odograph.compile import Certification, certification, compile_policy
from odograph.core.compiled import Compiled, check_compiled
from odograph.core.gate import Decision, Price, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.planning import AccountState, G, Quote, ask, largest, quote, used, with_offer
from odograph.core.policy import Policy
from odograph.document import (
    Entry,
    check_replay,
    digest_of,
    entry_from_dict,
    entry_to_dict,
    totals_from_dict,
    totals_to_dict,
)
from odograph.errors import (
    AccountClosed,
    AccountExists,
    BudgetExceeded,
    InvalidGuarantee,
    InvalidPolicy,
    LedgerBusy,
    LedgerCorrupt,
    UnprovenComposition,
)
from odograph.figures import account_card, draw_account

__all__ = ["Accountant"]

_FORM: Final = 1
_REMEMBERED: Final = 1024  # prices of guarantees that were spent before
_SHOWN: Final = 5  # last entries on a card
_COPIED: Final = (
    "this accountant is a copy (a pickle, or a forked process), and a copy must not be a second budget: it can be"
    " read, and spends only after resume(), which promises that the original spends no more"
)


class _Tree:
    """What an account shares with its sub-budgets: one lock, and whether this is a copy that must not spend."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.copied = False
        _TREES.add(self)

    def refuse_reentry(self) -> None:
        """Raise where a signal handler or a finaliser interrupts a spend of its own thread: one would be lost."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise LedgerBusy("a spend of this thread is under way; nothing was charged. Try again when it is done")


_TREES: WeakSet[_Tree] = WeakSet()


def _after_fork() -> None:
    for tree in _TREES:
        tree.lock = threading.RLock()  # another thread of the parent process may have held it
        tree.copied = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Accountant:
    """An account in memory: it admits a request if its own limit and every ancestor's hold, and charges them all.

    `policy` may be compiled already: a target that is not in the shipped table takes seconds to solve, and
    `compile_policy(policy, progress=progress_bar)` shows how far it is. `parent` makes this a sub-budget: its promise
    is about its own answers, the parent's about everyone's. `keep` is how many of the last entries to keep: all
    (None), or none (0: totals only); an entry keeps about 80 bytes, or 290 if no other entry has the same guarantee.
    Safe to use from several threads. A copy is the same object; a pickle is read-only until `resume()`.
    """

    def __init__(
        self,
        policy: Policy | Compiled,
        *,
        name: str = "",
        parent: Accountant | None = None,
        keep: int | None = None,
    ) -> None:
        if not isinstance(policy, Policy | Compiled):
            raise InvalidPolicy(f"an accountant needs a policy, such as Policy(1, 1e-6), not {policy!r}")
        if not isinstance(name, str) or (parent is not None and not name):
            raise InvalidPolicy(f"name must be a text, and a sub-budget needs one; {name!r} is not")
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 0):
            raise InvalidPolicy(f"keep must be None (all entries) or a whole number from 0, and {keep!r} is not")
        if parent is not None and not isinstance(parent, Accountant):
            raise InvalidPolicy(f"parent must be an Accountant or None, and {parent!r} is not")
        if isinstance(policy, Policy):
            policy = compile_policy(policy)
        else:
            check_compiled(policy)
        self._compiled = policy
        self._name = name
        self._parent = parent
        self._children: dict[str, Accountant] = {}
        self._totals = self._compiled.start
        self._entries: deque[tuple[Guarantee, Price, str, str]] = deque(maxlen=keep)  # an Entry's fields
        self._prices: dict[int, tuple[Guarantee, Price]] = {}
        self._tree: _Tree = _Tree() if parent is None else parent._tree
        self._chain: tuple[Accountant, ...] = (self,) if parent is None else (*parent._chain, self)
        if parent is not None:
            parent._adopt(self)

    @property
    def policy(self) -> Policy:
        """The policy, fixed when the account was opened."""
        return self._compiled.policy

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, compiled once."""
        return self._compiled

    @property
    def certification(self) -> Certification:
        """How this installation knows that the limits keep the promise, or that it does not."""
        return certification(self._compiled)

    @property
    def name(self) -> str:
        """The name, empty if it was given none."""
        return self._name

    @property
    def parent(self) -> Accountant | None:
        """The account of which this is a sub-budget."""
        return self._parent

    @property
    def children(self) -> Mapping[str, Accountant]:
        """The sub-budgets, by name."""
        return MappingProxyType(self._children)

    @property
    def totals(self) -> Totals:
        """What was spent, in whole units."""
        return self._totals

    @property
    def history(self) -> tuple[Entry, ...]:
        """The kept entries, oldest first; `totals.steps` counts all that there were."""
        kept = tuple(self._entries)  # at one moment: the entries may grow while they are given their names
        return tuple(map(Entry._make, kept))

    def spend(self, cost: Guarantee, *, note: str = "") -> Decision:
        """Charge the cost here and to every ancestor, or raise `BudgetExceeded` and charge nobody."""
        if not isinstance(note, str):
            raise InvalidGuarantee(f"note must be a text, and {note!r} is not; nothing was charged")
        tree = self._tree
        tree.refuse_reentry()
        with tree.lock:
            if tree.copied:
                raise AccountClosed(_COPIED)
            charges = []
            for account in self._chain:
                decision = decide(account._compiled.meters, account._totals, account._price(cost), cost)
                if not decision.admitted:
                    break
                charges.append((account, decision))
            else:
                # Totals before entries, the top first: an interrupt in between leaves too much charged.
                for account, decision in charges:
                    account._totals = decision.totals_after
                    account._entries.append((cost, decision.price, note, self._name))
                return decision
            path = self._path()
        for other in self._chain:
            other._price(cost)  # an account with no theorem for the cost says so first, as in `decide`
        raise BudgetExceeded(with_offer(path, decision, path[len(charges)].name))

    @contextmanager
    def spending(self, cost: Guarantee, *, note: str = "") -> Iterator[Decision]:
        """Charge at entry, before anything inside runs; the charge stands however the block ends."""
        yield self.spend(cost, note=note)

    def decide(self, cost: Guarantee) -> Decision:
        """Say whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""
        return ask(self._path(), cost)

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return quote(self._path(), costs)

    def largest(self, kind: type[G] | G, times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        return largest(self._path(), kind, times)

    def reading(self) -> Reading:
        """Read the policy's odometer: valid at all times at once, and the only one that the guarantee covers."""
        return self._compiled.reading(self._totals)

    def compare(self) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        return self._compiled.compare(self._totals)

    def plot(self, ax: Any = None) -> Any:  # noqa: ANN401  Matplotlib's axes
        """Draw the reading over time with the budget line, and other odometers, not covered by the guarantee."""
        stood = [self._totals]
        for entry in reversed(self.history):
            stood.append(stood[-1].without(entry.price))
        return draw_account(self._compiled, stood[::-1], ax=ax)

    def resume(self) -> None:
        """Let a copy spend (a pickle, or a forked process): whoever calls this says that the original is gone."""
        self._tree.copied = False

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned document that `from_dict` reads: compiled policy, totals, entries, sub-budgets."""
        if self._parent is not None:
            raise InvalidPolicy(f"{self._name!r} is a sub-budget; write the account at the top, which holds it")
        self._tree.refuse_reentry()
        with self._tree.lock:
            form = {"form": _FORM, **self._written()}
        return form | {"digest": digest_of(form)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Accountant:
        """Read what `to_dict` wrote and replay its entries; anything damaged raises `LedgerCorrupt`."""
        if not isinstance(form, Mapping) or form.get("form") != _FORM:
            raise LedgerCorrupt(f"not an accountant's document of form {_FORM}")
        try:
            if form.get("digest") != digest_of({name: value for name, value in form.items() if name != "digest"}):
                raise LedgerCorrupt("the document's digest does not fit its content: it was damaged or changed")
            return _restored(form, None)
        except (AttributeError, LookupError, TypeError, ValueError, UnprovenComposition) as problem:
            raise LedgerCorrupt(f"the document's content contradicts itself: {problem}") from problem

    def __copy__(self) -> Accountant:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Accountant:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._parent is not None:
            return _child, (self._parent, self._name)
        return _unpickled, (self.to_dict(),)

    def __repr__(self) -> str:
        policy, steps = self.policy, self._totals.steps
        name = f"{self._name!r}, " if self._name else ""
        part = f"{used(self._compiled, self._totals):.1%} spent in {steps} step{'s' * (steps != 1)}"
        copied = ", read-only copy" if self._tree.copied else ""
        unsure = ", limits not certified here" if self.certification is Certification.NONE else ""
        return f"<Accountant {name}epsilon={policy.epsilon}, delta={policy.delta}: {part}{copied}{unsure}>"

    def _repr_html_(self) -> str:
        last = [Entry._make(entry) for entry in tuple(self._entries)[: -_SHOWN - 1 : -1]]
        # The offer is of the kind spent last: a policy need not take every kind.
        offer = self.largest(last[0].guarantee) if last else None
        rows = [(str(entry.guarantee), entry.note or entry.account) for entry in last]
        return account_card(self._name, self._compiled, self._totals, offer, rows)

    def _adopt(self, child: Accountant) -> None:
        own, other = self.policy, child.policy
        if (own.privacy_unit, own.neighbors) != (other.privacy_unit, other.neighbors):
            raise InvalidPolicy(
                "a sub-budget protects the same privacy unit and neighbors as its parent:"
                f" {own.privacy_unit!r}, {own.neighbors!r}, not {other.privacy_unit!r}, {other.neighbors!r}"
            )
        if self._children.setdefault(child.name, child) is not child:
            raise AccountExists(f"there is a sub-budget {child.name!r} already; a new policy needs a new name")

    def _price(self, cost: Guarantee) -> Price:
        """Return the price, remembered for the same object: pricing is most of the work of a spend."""
        known = self._prices.get(id(cost))
        if known is not None and known[0] is cost:
            return known[1]
        fresh = self._compiled.price(cost)
        if len(self._prices) >= _REMEMBERED:
            self._prices.clear()
        self._prices[id(cost)] = (cost, fresh)  # holding the object keeps its identity from being used again
        return fresh

    def _path(self) -> list[AccountState]:
        return [
            AccountState(
                account._name or ("" if account is self else "the account above"), account._compiled, account._totals
            )
            for account in self._chain
        ]

    def _written(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "keep": self._entries.maxlen,
            "compiled": self._compiled.to_dict(),
            "totals": totals_to_dict(self._totals),
            "entries": [entry_to_dict(entry) for entry in self.history],
            "children": [child._written() for child in self._children.values()],
        }


def _restored(form: Mapping[str, Any], parent: Accountant | None) -> Accountant:
    account = Accountant(Compiled.from_dict(form["compiled"]), name=form["name"], parent=parent, keep=form["keep"])
    totals = totals_from_dict(form["totals"], len(account._compiled.meters))
    entries = [entry_from_dict(entry, account._compiled) for entry in form["entries"]]
    check_replay(account._compiled, totals, entries)
    account._totals = totals
    account._entries.extend(entries)
    children = [_restored(child, account) for child in form["children"]]
    if sum(child._totals.steps for child in children) > totals.steps:
        raise ValueError("the sub-budgets took more steps than the account above them")
    return account


def _unpickled(form: Mapping[str, Any]) -> Accountant:
    account = Accountant.from_dict(form)
    account._tree.copied = True
    return account


def _child(parent: Accountant, name: str) -> Accountant:
    return parent.children[name]
