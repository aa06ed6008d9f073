"""The ledger against a plain model of it, on every store: totals are the sum of the prices of what stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import odograph as odo
from odograph import (
    ApproxDP,
    BudgetExceeded,
    Guarantee,
    IdempotencyConflict,
    Ledger,
    OdographError,
    Policy,
    PureDP,
    compile_policy,
)
from odograph.core.gate import Totals
from odograph.core.policy import Compiled
from odograph.errors import AccountClosed, AccountExists, ReservationResolved
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import price_from_text
from odograph.ledger.stores.base import Changes, State, Wants, Work
from odograph.ledger.stores.memory import MemoryStore

NAMES = ("a", "b", "c", "d", "e")
Costs = dict[str, Guarantee]


@cache
def at(rule_name: str, epsilon: str) -> Compiled:
    """A policy with some delta for the steps."""
    delta_steps = None if rule_name == "basic" else "1e-6"
    return compile_policy(Policy(epsilon, "2e-6", filter=rule_name, delta_steps=delta_steps))


def added(totals: Totals, compiled: Compiled, cost: Guarantee) -> Totals:
    prices = compiled.price(cost).amounts
    amounts = tuple(a + (b or 0) for a, b in zip(totals.amounts, prices, strict=True))
    unpriced = tuple(a + (b is None) for a, b in zip(totals.unpriced, prices, strict=True))
    return Totals(amounts, unpriced, totals.steps + 1)


@dataclass
class Model:
    """Accounts with their parents, charges that stand or not, and keys with what they were used for."""

    policies: dict[str, Compiled] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    charges: dict[str, Costs] = field(default_factory=dict)  # what stands, by the first receipt's id
    resolved: dict[str, str] = field(default_factory=dict)  # reservations: "", "commit" or "void"
    keys: dict[tuple[str, str], tuple[object, str]] = field(default_factory=dict)

    def way_up(self, name: str) -> list[str]:
        return [name, *(self.way_up(self.parents[name]) if self.parents[name] else [])]

    def totals(self, more: Costs | None = None) -> dict[str, Totals]:
        """What every account has spent, with a request that may come on top."""
        found = {name: compiled.start for name, compiled in self.policies.items()}
        for costs in [*self.charges.values(), more or {}]:
            for name, cost in costs.items():
                for one in self.way_up(name):
                    found[one] = added(found[one], self.policies[one], cost)
        return found

    def opening(self, name: str, parent: str) -> type[OdographError] | None:
        if name in self.policies:
            return AccountExists
        return AccountClosed if parent in self.closed else None

    def repeating(self, used: tuple[object, str], request: object) -> type[OdographError] | None:
        """The same request again is answered again, unless nothing is charged for it any more."""
        if used[0] != request:
            return IdempotencyConflict
        return ReservationResolved if self.resolved.get(used[1]) == "void" else None

    def charging(self, costs: Costs) -> type[OdographError] | None:
        if any(one in self.closed for name in costs for one in self.way_up(name)):
            return AccountClosed
        return None if self.fits(costs) else BudgetExceeded

    def fits(self, costs: Costs) -> bool:
        """Whether every account is within its limits afterwards: totals only grow, so its end decides a request."""
        after, nothing = self.totals(costs), PureDP(0)
        charged = {one for name in costs for one in self.way_up(name)}
        return all(
            odo.gate.decide(self.policies[one].meters, after[one], self.policies[one].price(nothing)).admitted
            for one in charged
        )


sizes = st.sampled_from(["0", "1e-15", "0.1", "0.1", "0.25", "0.4", "0.75", "2"])
costs = st.one_of(
    st.builds(PureDP, sizes),
    st.builds(PureDP, sizes),
    st.builds(ApproxDP, sizes, st.sampled_from(["1e-9", "5e-7"])),
)
requests = st.dictionaries(st.integers(0, 9), costs, min_size=1, max_size=3)
principals = st.sampled_from(["ana", "ben"])
keys = st.sampled_from([None, None, "k0", "k1", "k2"])


class LedgerMachine(RuleBasedStateMachine):
    """Every verb of the ledger does what the model does."""

    def __init__(self, url: str, make: Callable[[str], Ledger]) -> None:
        super().__init__()
        self.url, self.make = url, make
        empty(url)
        self.ledger = make(url)
        self.model = Model()

    def teardown(self) -> None:
        try:
            if self.model.policies:
                self.ledger.verify()
        finally:
            self.ledger.close()

    def named(self, request: dict[int, Guarantee]) -> Costs:
        known = sorted(self.model.policies)
        return dict(sorted({known[i % len(known)]: cost for i, cost in request.items()}.items()))

    @precondition(lambda self: len(self.model.policies) < len(NAMES))
    @rule(
        name=st.sampled_from(NAMES),
        below=st.integers(0, 9),
        policy=st.sampled_from([("basic", "1"), ("basic", "0.5"), ("zcdp", "1"), ("exact", "1")]),
        key=keys,
    )
    def open(self, name: str, below: int, policy: tuple[str, str], key: str | None) -> None:
        model, known = self.model, sorted(self.model.policies)
        parent = known[below % len(known)] if known and below < 6 else ""
        request, used = ("open", name, policy, parent), model.keys.get(("ana", key or ""))
        expected = (None if used[0] == request else IdempotencyConflict) if used else model.opening(name, parent)
        with raising(expected):
            self.ledger.open_account(name, at(*policy), parent=parent, key=key)
        if expected is None and not used:
            model.policies[name], model.parents[name] = at(*policy), parent
            if key:
                model.keys["ana", key] = request, name

    @precondition(lambda self: self.model.policies)
    @rule(request=requests, key=keys, who=principals, verb=st.sampled_from(["spend", "reserve"]))
    def charge(self, request: dict[int, Guarantee], key: str | None, who: str, verb: str) -> None:
        model, asked = self.model, self.named(request)
        used = model.keys.get((who, key or ""))
        expected = model.repeating(used, (verb, asked)) if used else model.charging(asked)
        ledger = self.ledger.acting_as(who)
        with raising(expected) as refusal:
            receipt = ledger.spend(asked, key=key) if verb == "spend" else ledger.reserve(asked, key=key).receipt
            assert receipt.repeated == bool(used)
            if used:
                assert receipt.id == used[1]
                return
            model.charges[receipt.id] = asked
            if verb == "reserve":
                model.resolved[receipt.id] = ""
            model.keys[who, receipt.key] = (verb, asked), receipt.id
        if refusal:
            self.offer_fits(asked, refusal[0])

    def offer_fits(self, asked: Costs, refusal: OdographError) -> None:
        if isinstance(refusal, BudgetExceeded) and refusal.decision.largest is not None:
            decision, offer = refusal.decision, refusal.decision.largest
            legs = [name for name, cost in asked.items() if cost == decision.request]
            assert any(self.model.fits({**asked, name: offer}) for name in legs)

    @precondition(lambda self: self.model.policies)
    @rule(request=requests)
    def decide(self, request: dict[int, Guarantee]) -> None:
        asked = self.named(request)
        expected = self.model.charging(asked)
        with raising(AccountClosed if expected is AccountClosed else None):
            assert self.ledger.decide(asked).admitted == (expected is None)

    @precondition(lambda self: self.model.resolved)
    @rule(index=st.integers(0, 99), verb=st.sampled_from(["commit", "void", "void"]), who=principals)
    def resolve(self, index: int, verb: str, who: str) -> None:
        held = sorted(self.model.resolved)[index % len(self.model.resolved)]
        before = self.model.resolved[held]
        ledger = self.ledger.acting_as(who)
        with raising(None if before in ("", verb) else ReservationResolved):
            receipt = ledger.commit(held) if verb == "commit" else ledger.void(held, "not run")
            assert receipt.repeated == bool(before)
            self.model.resolved[held] = verb
            if verb == "void":
                self.model.charges.pop(held, None)

    @precondition(lambda self: self.model.policies)
    @rule(index=st.integers(0, 9), sure=st.integers(0, 3))
    def close(self, index: int, sure: int) -> None:
        name = sorted(self.model.policies)[index % len(self.model.policies)]
        if sure == 0:  # not too often: a closed tree has nothing more to show
            self.ledger.account(name).close()
            self.model.closed |= {one for one in self.model.policies if name in self.model.way_up(one)}

    @precondition(lambda self: self.model.policies)
    @rule()
    def reconnect(self) -> None:
        if not self.url.startswith("memory"):
            self.ledger.close()
            self.ledger = self.make(self.url)
        self.ledger.verify()

    @precondition(lambda self: self.model.policies)
    @rule(sure=st.integers(0, 3))
    def round_trip(self, sure: int) -> None:
        """Go on in a copy; without a checkpoint, not too often, every account of it is closed."""
        trust, file = sure > 0, io.StringIO()
        checkpoint = self.ledger.export(file)
        self.ledger.close()
        empty(self.url)
        self.ledger = self.make(self.url)
        file.seek(0)
        self.ledger.import_(file, checkpoint=checkpoint if trust else None)
        if not trust:
            self.model.closed |= set(self.model.policies)

    @invariant()
    def every_account_has_spent_what_the_model_has(self) -> None:
        if self.model.policies:
            accounts = self.ledger.accounts()
            assert {one.name: one.totals for one in accounts} == self.model.totals()
            assert {one.name for one in accounts if one.closed} == self.model.closed
            held = {one.id for account in accounts for one in account.pending}
            assert held == {name for name, how in self.model.resolved.items() if not how}


class raising:  # noqa: N801  reads as a function
    """A block that must raise this, or nothing; as what it gives, the list of what was raised."""

    def __init__(self, expected: type[OdographError] | None) -> None:
        self.expected = expected
        self.raised: list[OdographError] = []

    def __enter__(self) -> list[OdographError]:
        return self.raised

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if kind is not None and not isinstance(error, OdographError):
            return False
        assert kind is self.expected, error
        self.raised += [error] if isinstance(error, OdographError) else []
        return True


def empty(url: str) -> None:
    """Remove what is at a URL, so that the next ledger there is new."""
    if url.startswith("sqlite"):
        file = Path(url.removeprefix("sqlite:///"))
        for one in file.parent.glob(file.name + "*"):
            one.unlink()
    elif url.startswith("postgresql"):
        with psycopg.connect(url, autocommit=True) as server:
            server.execute("DROP SCHEMA IF EXISTS odograph CASCADE")


EXAMPLES = {"memory": 100, "sqlite": 40, "postgresql": 6}


def run(machine: Callable[[], LedgerMachine], examples: int, *phases: Phase) -> None:
    # Hypothesis asks for a class and calls it: a function that makes one will do.
    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            phases=phases or tuple(Phase),
            report_multiple_bugs=not phases,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_ledger_does_what_the_model_does(url: str) -> None:
    run(lambda: LedgerMachine(url, partial(odo.connect, principal="ana")), EXAMPLES[url.split(":", maxsplit=1)[0]])


# Negative controls: stores that are wrong in one way each.


def less(changes: Changes, account: str, price: str) -> None:
    """Take a price off a balance."""
    balance = changes.moved[account]
    prices = price_from_text(price).amounts
    amounts = tuple(a - (b or 0) for a, b in zip(balance.totals.amounts, prices, strict=True))
    balance.totals = balance.totals._replace(amounts=amounts, steps=balance.totals.steps - 1)


def void_refunds_twice(changes: Changes) -> Changes:
    for entry in changes.entries:
        if entry.verb == "void":
            less(changes, entry.account, entry.price)
    return changes


def ancestors_go_free(changes: Changes) -> Changes:
    for entry in changes.entries:
        if entry.verb in ("spend", "reserve") and f"/{entry.account}#" in entry.legs:
            less(changes, entry.account, entry.price)
    return changes


def keys_are_forgotten(changes: Changes) -> Changes:
    changes.keys.clear()
    return changes


def nothing_is_kept(changes: Changes) -> Changes:
    return changes if changes.opened else Changes()


def closing_is_forgotten(changes: Changes) -> Changes:
    for balance in changes.moved.values():
        balance.closed = False
    return changes


class BrokenStore(MemoryStore):
    """Dictionaries behind one lock, and a bug before they are stored."""

    def __init__(self, bug: Callable[[Changes], Changes]) -> None:
        super().__init__()
        self.bug = bug

    def write(self, wants: Wants, work: Work) -> None:
        def broken(state: State) -> Changes:
            return self.bug(work(state))

        super().write(wants, broken)


BUGS = [void_refunds_twice, ancestors_go_free, keys_are_forgotten, nothing_is_kept, closing_is_forgotten]


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_store_is_caught(bug: Callable[[Changes], Changes]) -> None:
    def broken(_: str) -> Ledger:
        return Ledger(LocalBackend(BrokenStore(bug), "ana"))

    with pytest.raises((AssertionError, OdographError)):
        run(lambda: LedgerMachine("memory://", broken), 300, Phase.generate)


def test_the_controls_run_what_the_real_store_runs() -> None:
    """A store without a bug passes the same run that the broken ones fail."""

    def whole(_: str) -> Ledger:
        return Ledger(LocalBackend(BrokenStore(lambda changes: changes), "ana"))

    run(lambda: LedgerMachine("memory://", whole), 30, Phase.generate)
