"""Accountants against a plain model of them, and their documents against damage."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from charge_history import charges
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import odograph as odo
from odograph import (
    GDP,
    ZCDP,
    Accountant,
    ApproxDP,
    BudgetExceeded,
    Decision,
    Guarantee,
    Policy,
    PureDP,
    Receipt,
    UnprovenComposition,
    compile_policy,
)
from odograph.core.gate import Price, Totals
from odograph.core.guarantees import exact_of
from odograph.core.policy import Compiled
from odograph.errors import AccountClosed, LedgerCorrupt

RULES = ("basic", "paper", "zcdp", "gdp", "renyi", "exact")
MOST_ACCOUNTS = 6


@cache
def at(name: str, epsilon: str = "1") -> Compiled:
    """A policy whose exact rule is in the shipped table, with as much of delta again for the steps."""
    if name == "basic":
        return compile_policy(Policy(epsilon, "2e-6", filter=name))
    return compile_policy(Policy(epsilon, "2e-6", delta_steps="1e-6", filter=name))


sizes = st.one_of(st.floats(0, 1.2), st.floats(1e-4, 0.1), st.sampled_from([0.0, 5e-324, 1e-16, 0.1, 0.5, 1.0]))
costs: st.SearchStrategy[Guarantee] = st.one_of(
    st.builds(PureDP, sizes),
    st.builds(ApproxDP, sizes, st.sampled_from(["0", "1e-9", "4e-7"])),
    st.builds(GDP, sizes),
    st.builds(ZCDP, sizes),
    st.lists(st.builds(PureDP, sizes), min_size=1, max_size=3).map(odo.parallel),
)


# A tree of accounts against a model that knows only `price` and `decide`.


@dataclass
class Node:
    """An account in the model."""

    name: str
    compiled: Compiled
    parent: Node | None
    totals: Totals
    entries: list[tuple[Guarantee, Price, str, str]] = field(default_factory=list)

    def way_up(self) -> list[Node]:
        return [self, *(self.parent.way_up() if self.parent else [])]

    def ask(self, cost: Guarantee) -> list[tuple[Node, Decision]]:
        """What each account on the way up says; raises what `price` raises."""
        return [
            (node, odo.gate.decide(node.compiled.meters, node.totals, node.compiled.price(cost)))
            for node in self.way_up()
        ]

    def spend(self, cost: Guarantee, note: str = "") -> bool:
        """Charge all or nothing, and say which."""
        asked = self.ask(cost)
        if not all(decision.admitted for _, decision in asked):
            return False
        for node, decision in asked:
            node.totals = decision.totals_after
            node.entries.append((cost, decision.price, note, self.name))
        return True


class Tree(RuleBasedStateMachine):
    """Every account of the tree decides, charges and writes down what the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.accounts: list[Accountant] = []

    @initialize(name=st.sampled_from(RULES))
    def open_top(self, name: str) -> None:
        self.nodes = [Node("top", at(name), None, at(name).start)]
        self.accounts = [Accountant(at(name), name="top")]

    def pick(self, index: int) -> tuple[Node, Accountant]:
        return self.nodes[index % len(self.nodes)], self.accounts[index % len(self.nodes)]

    @precondition(lambda self: len(self.nodes) < MOST_ACCOUNTS)
    @rule(index=st.integers(0, 9), name=st.sampled_from(RULES), epsilon=st.sampled_from(["0.5", "1", "3"]))
    def open_child(self, index: int, name: str, epsilon: str) -> None:
        node, account = self.pick(index)
        compiled = at(name, epsilon)
        child = f"account {len(self.nodes)}"
        self.nodes.append(Node(child, compiled, node, compiled.start))
        self.accounts.append(Accountant(compiled, name=child, parent=account))

    @rule(index=st.integers(0, 9), cost=costs, note=st.text(max_size=3))
    def spend(self, index: int, cost: Guarantee, note: str) -> None:
        node, account = self.pick(index)
        asked = outcome(account.decide, cost)
        spent = outcome(lambda g: account.spend(g, note=note), cost)
        assert spent == (None if asked is None or asked.is_unproven else asked)
        try:
            refusing = [one.name for one, decision in node.ask(cost) if not decision.admitted]
        except UnprovenComposition:
            assert spent is None
            return
        assert spent is not None
        assert spent.admitted == node.spend(cost, note)
        if refusing:
            assert spent.account in refusing
            self.offer_fits(account, spent)

    def offer_fits(self, account: Accountant, refusal: Decision) -> None:
        if refusal.largest is not None:
            assert account.decide(refusal.largest).admitted

    @rule(index=st.integers(0, 9), batch=st.lists(costs, max_size=5))
    def quote_then_spend(self, index: int, batch: list[Guarantee]) -> None:
        """A quote says what the spends then do, and a batch that does not fit is not spent."""
        node, account = self.pick(index)
        taken = [cost for cost in batch if not account.decide(cost).is_unproven]
        quoted = account.quote(taken)
        if quoted.admitted:
            for cost, expected in zip(taken, quoted.decisions, strict=True):
                assert account.spend(cost).decision == expected
                assert node.spend(cost)
            assert account.totals == quoted.totals_after
        else:
            assert not quoted.decisions[-1].admitted
            assert all(decision.admitted for decision in quoted.decisions[:-1])
            assert quoted.totals_after == account.totals

    @rule(index=st.integers(0, 9), kind=st.sampled_from([PureDP, GDP, ZCDP]), times=st.integers(1, 12))
    def spend_the_largest(self, index: int, kind: type[Guarantee], times: int) -> None:
        node, account = self.pick(index)
        try:
            offer = account.largest(kind, times=times)
        except UnprovenComposition:
            return
        for _ in range(times if offer else 0):
            assert offer is not None
            assert account.spend(offer)
            assert node.spend(offer)

    @rule(way=st.sampled_from(["dict", "json", "pickle", "pickle of a child", "copy"]))
    def replace_by_a_round_trip(self, way: str) -> None:
        if way == "copy":
            top = copy.deepcopy(self.accounts[0])
            assert top is self.accounts[0]
        elif way.startswith("pickle"):
            again = pickle.loads(pickle.dumps(self.accounts if way == "pickle" else self.accounts[::-1]))  # noqa: S301
            top = again[0] if way == "pickle" else again[-1]
            with pytest.raises(AccountClosed):
                again[0].spend(PureDP(0))
            again[0].resume()
        else:
            form = self.accounts[0].to_dict()
            top = Accountant.from_dict(json.loads(json.dumps(form)) if way == "json" else form)
        found = [top]
        for node in self.nodes[1:]:
            assert node.parent is not None
            found.append(found[self.nodes.index(node.parent)].children[node.name])
        self.accounts = found

    @invariant()
    def every_account_has_spent_what_the_model_has(self) -> None:
        for node, account in zip(self.nodes, self.accounts, strict=True):
            assert account.totals == node.totals
            found = [(entry.cost, entry.price, entry.note, entry.account) for entry in charges(account)]
            assert found == node.entries
            assert len(account.children) == sum(one.parent is node for one in self.nodes)


def outcome(action: Callable[[Guarantee], Receipt | Decision], cost: Guarantee) -> Decision | None:
    """The decision, given or raised; None where no theorem covers the cost."""
    try:
        answer = action(cost)
        return answer.decision if isinstance(answer, Receipt) else answer
    except BudgetExceeded as refused:
        return refused.decision
    except UnprovenComposition:
        return None


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class Forgetful(Node):
    """A broken twin of the model: it charges the account that asked, and forgets its ancestors."""

    def way_up(self) -> list[Node]:
        return [self]


def test_a_model_without_ancestors_is_caught() -> None:
    """Negative control: the same comparison of totals fails for it."""
    top = Node("top", at("basic"), None, at("basic").start)
    child = Forgetful("ana", at("basic"), top, at("basic").start)
    account = Accountant(at("basic"), name="top")
    Accountant(at("basic"), name="ana", parent=account).spend(PureDP(0.1))
    child.spend(PureDP(0.1))
    assert account.totals != top.totals


# Round trips: the same decisions afterwards, bit for bit.


def any_cost(dice: random.Random, scale: float) -> Guarantee:
    size = scale * dice.uniform(0.2, 1.8)
    kind = dice.randrange(6)
    if kind == 0:
        return ApproxDP(size, 10 ** dice.uniform(-12, -9))
    if kind == 1:
        return GDP(size)
    if kind == 2:
        return ZCDP(size * size / 2)
    if kind == 3:
        return odo.parallel([PureDP(size), PureDP(size / 3)])
    return PureDP(size)


def started(name: str, dice: random.Random, keep: int | None) -> Accountant:
    top = Accountant(at(name), name="top", keep=keep)
    child = Accountant(at("zcdp", "0.5"), name="ana", parent=top, keep=keep)
    for _ in range(dice.randrange(40)):
        outcome(dice.choice([top, child]).spend, any_cost(dice, 0.01))
    return top


def unpickled(account: Accountant) -> Accountant:
    twin: Accountant = pickle.loads(pickle.dumps(account))  # noqa: S301  our own bytes
    twin.resume()
    return twin


TRIPS: dict[str, Callable[[Accountant], Accountant]] = {
    "dict": lambda account: Accountant.from_dict(account.to_dict()),
    "json": lambda account: Accountant.from_dict(json.loads(json.dumps(account.to_dict()))),
    "pickle": unpickled,
}


def answers_of(account: Accountant, seed: int, scale: float) -> list[Decision | None]:
    dice = random.Random(seed)  # noqa: S311  to draw requests
    accounts = [account, *account.children.values()]
    return [outcome(dice.choice(accounts).spend, any_cost(dice, scale)) for _ in range(1000)]


@settings(max_examples=2, deadline=None)
@given(st.sampled_from(RULES), st.integers(0, 2**32), st.sampled_from([None, 0, 5]))
def test_after_a_round_trip_the_next_thousand_decisions_are_the_same(name: str, seed: int, keep: int | None) -> None:
    account = started(name, random.Random(seed), keep)  # noqa: S311  to draw requests
    # Of this size most of a thousand fit and the last do not.
    offer = account.largest(PureDP, times=900)
    assert isinstance(offer, PureDP)
    twins = {way: trip(account) for way, trip in TRIPS.items()}
    expected = answers_of(account, seed, float(offer.epsilon))
    for way, twin in twins.items():
        assert answers_of(twin, seed, float(offer.epsilon)) == expected, way
        assert timeless(twin.to_dict()) == timeless(account.to_dict())


def timeless(form: Any) -> Any:  # noqa: ANN401  a document of plain values
    """A document without its times, and without the digest over them."""
    if isinstance(form, dict):
        return {name: timeless(part) for name, part in form.items() if name not in {"time", "digest"}}
    return [timeless(part) for part in form] if isinstance(form, list) else form


def test_a_round_trip_through_floats_is_caught() -> None:
    """Negative control: totals that pass through floats gain a unit, and what would fill the rest is refused."""
    account = Accountant(compile_policy(Policy(1000, 0, filter="basic")))
    account.spend(PureDP("999.999999999999999"))
    rest = PureDP("0.000000000000001")
    rounded = account.totals._replace(amounts=tuple(int(float(str(n))) for n in account.totals.amounts))
    compiled = Compiled.from_dict(account.to_dict()["compiled"])
    assert not odo.planning.ask(odo.planning.AccountState("", compiled, rounded), rest).admitted
    assert Accountant.from_dict(account.to_dict()).decide(rest).admitted


# Damage.


def document(keep: int | None = None) -> dict[str, Any]:
    top = Accountant(at("exact"), name="top", keep=keep)
    ana = Accountant(at("zcdp"), name="ana", parent=top, keep=keep)
    eve = Accountant(at("basic"), name="eve", parent=ana, keep=keep)
    top.spend(GDP(0.01), note="first")
    ana.spend(PureDP(0.1))
    eve.spend(ApproxDP("1/30", "1e-9"), note="third")
    top.spend(odo.parallel([PureDP(0.05), PureDP(0.01)]))
    ana.spend(PureDP(0.01), key="once")
    ana.reserve(PureDP(0.02)).void("not run")
    ana.reserve(PureDP(0.02), key="done").commit()
    eve.reserve(PureDP(0.03), key="held", expires=3600)
    form: dict[str, Any] = json.loads(json.dumps(top.to_dict()))
    return form


Path = tuple[str | int, ...]


def paths_in(form: object, path: Path = ()) -> Iterator[Path]:
    """Every place in a document: keys, list items and leaves."""
    items = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths_in(value, (*path, key))


def other_values(value: object) -> list[object]:
    """Values that a leaf or a branch might have been damaged to."""
    if isinstance(value, str):
        digits = [str(int(value) + 1), str(max(0, int(value) - 1)), "0", "-1"] if value.isdigit() else []
        return [other for other in [*digits, value + "0", value[:-1], "", None, 0, [value]] if other != value]
    if isinstance(value, int | float):
        return [value + 1, 0 if value else 2, -1, str(value), None, float("nan")]
    if value is None:
        return [0, "0", "x", []]
    return [None, "x", 0, [], {}] if value else [None, "x", 0]


def damages(form: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every document that differs from this one in one place: changed, removed, said twice, or swapped."""
    for path in paths_in(form):
        for other in other_values(at_path(form, path)):
            broken = copy.deepcopy(form)
            at_path(broken, path[:-1])[path[-1]] = other
            yield f"{path} = {other!r}", broken
        broken = copy.deepcopy(form)
        del at_path(broken, path[:-1])[path[-1]]
        yield f"{path} removed", broken
        if isinstance(path[-1], int):
            yield from reordered(form, path)


def reordered(form: dict[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    i, items = int(path[-1]), at_path(form, path[:-1])
    broken = copy.deepcopy(form)
    at_path(broken, path[:-1]).insert(i, items[i])
    yield f"{path} twice", broken
    if i and items[i - 1] != items[i]:
        broken = copy.deepcopy(form)
        at_path(broken, path[:-1])[i - 1 : i + 1] = items[i], items[i - 1]
        yield f"{path} swapped", broken


def at_path(form: Any, path: Path) -> Any:  # noqa: ANN401  a document of plain values
    for key in path:
        form = form[key]
    return form


def accepted(read: Callable[[dict[str, Any]], object], broken: Iterator[tuple[str, dict[str, Any]]]) -> list[str]:
    """The damages that the reader does not see."""
    unseen = []
    for what, form in broken:
        try:
            read(form)
        except LedgerCorrupt:
            continue
        unseen.append(what)
    return unseen


@pytest.mark.parametrize("keep", [None, 0, 2])
def test_every_single_damage_to_a_document_raises(keep: int | None) -> None:
    form = document(keep)
    Accountant.from_dict(form)
    assert accepted(Accountant.from_dict, damages(form)) == []


def totals_only(form: dict[str, Any]) -> Totals:
    """A broken twin: it reads what it needs and trusts it."""
    try:
        amounts = tuple(int(amount) for amount in form["totals"]["amounts"])
        return Totals(amounts, (0,) * len(amounts), int(form["totals"]["steps"]))
    except (KeyError, TypeError, ValueError) as problem:
        raise LedgerCorrupt(str(problem)) from problem


def test_a_reader_of_totals_alone_is_caught() -> None:
    """Negative control."""
    assert len(accepted(totals_only, damages(document()))) > 100


def signed(form: dict[str, Any]) -> dict[str, Any]:
    """The document with its digest made again: damage by a program, not by chance."""
    content = {key: value for key, value in form.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "digest": hashlib.sha256(text.encode()).hexdigest()}


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a total is lower than its entries": lambda form: form["totals"]["amounts"].__setitem__(1, "1"),
    "a total is lower by one unit": lambda form: lower(form["totals"]["amounts"], 2),
    "fewer steps than entries": lambda form: form["totals"].update(steps="3"),
    "a price is lower than its guarantee's": lambda form: lower(form["entries"][1]["price"], 1),
    "a guarantee is dearer than its price": lambda form: form["entries"][1]["guarantee"].update(epsilon="0.9"),
    "a limit is raised": lambda form: form["compiled"]["meters"][1].update(limit="9" * 16),
    "a policy is loosened": lambda form: form["compiled"]["policy"].update(epsilon="2"),
    "an entry is no guarantee": lambda form: form["entries"][0].update(guarantee={}),
    "a sub-budget protects something else": lambda form: form["children"][0]["compiled"]["policy"].update(
        privacy_unit="x"
    ),
    "a sub-budget is there twice": lambda form: form["children"].append(copy.deepcopy(form["children"][0])),
    "a sub-budget took more steps than its parent": lambda form: form["children"][0].update(_more_steps(form)),
    "a key is there twice": lambda form: form["children"][0]["charges"][1].update(key="once"),
    "a reservation is there twice": lambda form: held_in(form).append(held_in(form)[0] | {"key": "other"}),
    "a reservation was never made": lambda form: form.update(reservations="1"),
    "a reservation has another price than its entry": lambda form: lower(held_in(form)[0]["prices"][0], 1),
    "a reservation takes back more than was charged": lambda form: held_in(form)[0]["prices"][0].__setitem__(
        1, "9" * 15
    ),
    "a reservation charged fewer accounts": lambda form: held_in(form)[0]["prices"].pop(),
    "a reservation was resolved by a spend": lambda form: held_in(form)[0].update(resolution=["spend", "1", "1"]),
    "a spend was voided": lambda form: form["entries"][0].update(verb="void"),
    "a verb is unknown": lambda form: form["entries"][-1].update(verb="refund"),
    "a closed account is open in part": lambda form: form.update(closed="perhaps"),
    "a total is negative": lambda form: form["totals"]["amounts"].__setitem__(0, "-1"),
    "a total is no whole number": lambda form: form["totals"]["amounts"].__setitem__(0, "0.5"),
    "a total is past the limits": lambda form: form["totals"]["amounts"].__setitem__(0, "9" * 16),
}


def _more_steps(form: dict[str, Any]) -> dict[str, Any]:
    """A sub-budget that is a copy of its parent and took one more step, of cost 0."""
    twin = copy.deepcopy({key: form[key] for key in ("compiled", "totals", "entries")})
    twin["totals"]["steps"] = str(int(twin["totals"]["steps"]) + 1)
    return twin


def held_in(form: dict[str, Any]) -> list[dict[str, Any]]:
    """The charges that the account at the bottom remembers."""
    held: list[dict[str, Any]] = form["children"][0]["children"][0]["charges"]
    return held


def lower(amounts: list[str], index: int) -> None:
    amounts[index] = str(int(amounts[index]) - 1)


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_document_that_contradicts_itself_raises_even_with_a_fresh_digest(name: str) -> None:
    form = document()
    assert signed(form) == form
    CONTRADICTIONS[name](form)
    with pytest.raises(odo.OdographError):
        Accountant.from_dict(signed(form))


@given(st.floats(1e-9, 0.4), st.integers(1, 60), st.sampled_from(RULES))
@settings(max_examples=40, deadline=None)
def test_what_is_offered_for_many_can_be_spent_one_by_one(first: float, times: int, name: str) -> None:
    account = Accountant(at(name))
    account.spend(PureDP(first))
    offer = account.largest(PureDP, times=times)
    assert offer is not None
    for _ in range(times):
        account.spend(offer)
    assert account.totals.steps == times + 1


@given(st.lists(sizes, max_size=12))
def test_totals_are_the_exact_sum_of_the_prices(drawn: list[float]) -> None:
    account = Accountant(at("exact"))
    for size in drawn:
        outcome(account.spend, PureDP(size))
    for i, total in enumerate(account.totals.amounts):
        assert total == sum(entry.price.amounts[i] or 0 for entry in charges(account) if entry.price is not None)
    asked = [entry.cost.epsilon for entry in charges(account) if isinstance(entry.cost, PureDP)]
    exact = sum(map(exact_of, asked), Fraction())
    units = Fraction(account.totals.amounts[1], 10**15)
    assert exact <= units < exact + Fraction(len(charges(account)) + 1, 10**15)
