"""Disjoint parts as one step: what they cost, and by enumeration that it is enough."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import pytest
from charge_history import charges

import odograph as odo
from odograph import (
    GDP,
    ZCDP,
    Accountant,
    ApproxDP,
    BudgetExceeded,
    Guarantee,
    Policy,
    PureDP,
    UnprovenComposition,
    compile_policy,
    parallel,
)
from odograph.core.guarantees import Parallel, guarantee_from_dict
from odograph.core.policy import Compiled
from odograph.errors import InvalidGuarantee

BOTH = ("add-remove", "replace-one")


def compiled(neighbors: str = "add-remove", rule: str = "basic") -> Compiled:
    aside = {} if rule == "basic" else {"delta_steps": "1e-2"}
    return compile_policy(Policy(3, "2e-2", filter=rule, neighbors=neighbors, **aside), solve=False)  # type: ignore[arg-type]


def costs(policy: Compiled, guarantee: Guarantee) -> dict[str, int | None]:
    amounts = policy.price(guarantee).amounts
    return {meter.name: amount for meter, amount in zip(policy.meters, amounts, strict=True)}


# Prices.


def test_with_people_added_or_removed_the_dearest_part_is_the_price_on_each_meter() -> None:
    cost = costs(compiled(), parallel([ApproxDP(0.5, "1e-9"), ApproxDP(0.1, "1e-7"), PureDP(0.2)]))
    assert cost["epsilon"] == 500_000_000_000_000
    assert cost["delta"] == 100_000_000_000


def test_with_people_replaced_the_dearest_two_compose_on_each_meter() -> None:
    cost = costs(compiled("replace-one"), parallel([ApproxDP(0.5, "1e-9"), ApproxDP(0.1, "1e-7"), PureDP(0.2)]))
    assert cost["epsilon"] == 700_000_000_000_000
    assert cost["delta"] == 101_000_000_000


@pytest.mark.parametrize("neighbors", BOTH)
@pytest.mark.parametrize("rule", ["basic", "zcdp", "renyi", "paper", "exact"])
def test_each_meter_takes_the_dearest_parts(neighbors: str, rule: str) -> None:
    policy = compiled(neighbors, rule)
    parts: list[Guarantee] = [PureDP(0.1), ApproxDP(0.05, "1e-6"), PureDP(0.15), PureDP(0)]
    alone = [policy.price(part).amounts for part in parts]
    count = 1 if neighbors == "add-remove" else 2
    for column, together in zip(zip(*alone, strict=True), policy.price(parallel(parts)).amounts, strict=True):
        known = [amount for amount in column if amount is not None]
        assert together == (sum(sorted(known)[-count:]) if len(known) == len(column) else None)


@pytest.mark.parametrize("neighbors", BOTH)
def test_one_part_costs_what_it_costs_alone(neighbors: str) -> None:
    for rule, part in (("basic", PureDP(0.3)), ("exact", GDP(0.1)), ("zcdp", ZCDP(0.01, "1e-6"))):
        policy = compiled(neighbors, rule)
        assert policy.price(parallel([part])) == policy.price(part)


def test_names_and_order_do_not_matter() -> None:
    parts = {"north": PureDP(0.1), "south": PureDP(0.3), "west": PureDP(0.2)}
    policy = compiled("replace-one")
    assert policy.price(parallel(parts)) == policy.price(parallel([*parts.values()]))
    assert policy.price(parallel(parts)) == policy.price(parallel([*reversed(parts.values())]))


def test_a_part_without_a_price_on_a_meter_leaves_the_step_without_one() -> None:
    """A Gaussian has no epsilon: the maximum of what is known would be too low."""
    policy = compile_policy(Policy(1, "1e-6", filter="exact"))
    cost = costs(policy, parallel([PureDP(0.1), GDP(0.001)]))
    assert cost["epsilon"] is None
    alone = policy.price(PureDP(0.1)).amounts[3]
    assert cost["exact"] == alone


def test_a_part_that_no_theorem_covers_is_refused() -> None:
    with pytest.raises(UnprovenComposition):
        compiled().price(parallel([PureDP(0.1), ZCDP(0.01)]))


# What is no parallel step.


@pytest.mark.parametrize("data", ["changing", "adaptive", "", "STATIC", None, True])
def test_data_that_are_not_static_are_not_proven(data: str) -> None:
    with pytest.raises(UnprovenComposition):
        parallel([PureDP(0.1), PureDP(0.1)], data=data)


@pytest.mark.parametrize(
    "parts",
    [[], {}, PureDP(0.1), "ab", [0.1], [PureDP], {"a": None}, [parallel([PureDP(0.1)])], (PureDP(0.1) for _ in "ab")],
    ids=lambda parts: type(parts).__name__,
)
def test_what_are_no_parts_are_refused(parts: Sequence[Guarantee]) -> None:
    with pytest.raises(InvalidGuarantee):
        parallel(parts)


# In an account.


def test_an_account_charges_a_parallel_step_once() -> None:
    account = Accountant(Policy(1, 0, filter="basic"))
    step = parallel(dict.fromkeys("abcdefghij", PureDP(0.4)))
    account.spend(step)
    account.spend(step)
    with pytest.raises(BudgetExceeded) as caught:
        account.spend(step)
    assert caught.value.decision.largest == odo.parallel([PureDP(0.2)] * 10)
    assert account.totals.amounts[1] == 8 * 10**14
    again = Accountant.from_dict(json.loads(json.dumps(account.to_dict())))
    assert charges(again) == charges(account)
    assert guarantee_from_dict(step.to_dict()) == step


def test_replaced_people_pay_for_two_parts_in_an_account() -> None:
    account = Accountant(Policy(1, 0, filter="basic", neighbors="replace-one"))
    account.spend(parallel([PureDP(0.4), PureDP(0.3), PureDP(0.2)]))
    assert account.totals.amounts[1] == 7 * 10**14


def test_a_session_runs_a_parallel_step() -> None:
    account = Accountant(Policy(1, 0, filter="basic"))
    with odo.session(account) as s:
        assert s.run(lambda *parts: [*map(len, parts)], "a", "bc", cost=parallel([PureDP(0.1)] * 2)) == [1, 2]
    assert account.totals.amounts[1] == 10**14


# Validity, by enumeration: randomized response on "somebody in this part says yes", for all small data sets.


class Record(NamedTuple):
    """A person: in one part, with one answer."""

    part: int
    yes: bool


Data = tuple[Record, ...]
Law = dict[tuple[object, ...], float]
PARTS = (ApproxDP(0.9, "0.001"), ApproxDP(0.5, "0.002"), ApproxDP(0.2, 0))
PURE = (PureDP(0.9), PureDP(0.5), PureDP(0.2))
PEOPLE = [Record(part, yes) for part in range(3) for yes in (False, True)]


def answers(cost: PureDP | ApproxDP, *, yes: bool) -> dict[object, float]:
    """The law of one part's answer: the truth openly with probability delta, else randomized response."""
    epsilon, delta = float(cost.epsilon), float(getattr(cost, "delta", 0))
    truth = (1 - delta) / (1 + math.exp(-epsilon))
    law: dict[object, float] = {yes: truth, (not yes): 1 - delta - truth}
    return {**law, ("open", yes): delta} if delta else law


def law_of(data: Data, parts: Sequence[PureDP | ApproxDP], belongs: Callable[[Record, int], bool]) -> Law:
    """The law of all the parts' answers together."""
    each = [answers(cost, yes=any(one.yes for one in data if belongs(one, part))) for part, cost in enumerate(parts)]
    return {
        outcome: math.prod(law[answer] for law, answer in zip(each, outcome, strict=True))
        for outcome in product(*each)
    }


def in_its_part(record: Record, part: int) -> bool:
    return record.part == part


def in_every_part(record: Record, part: int) -> bool:
    """What the theorem forbids: a record that several parts see."""
    return part >= 0 and record.yes


def pairs(neighbors: str) -> Iterator[tuple[Data, Data]]:
    """All neighbours among data sets of up to three people, in both orders."""
    for size in range(3):
        for rest in combinations_with_replacement(PEOPLE, size):
            for one in PEOPLE:
                if neighbors == "add-remove":
                    yield rest, (*rest, one)
                    yield (*rest, one), rest
                else:
                    yield from (((*rest, one), (*rest, other)) for other in PEOPLE if other != one)


def worst(
    measure: Callable[[Law, Law], float],
    parts: Sequence[PureDP | ApproxDP],
    neighbors: str,
    belongs: Callable[[Record, int], bool] = in_its_part,
) -> float:
    known: dict[Data, Law] = {}

    def law(data: Data) -> Law:
        key = tuple(sorted(data))
        if key not in known:
            known[key] = law_of(key, parts, belongs)
        return known[key]

    return max(measure(law(one), law(other)) for one, other in pairs(neighbors))


def hockey_stick(epsilon: float) -> Callable[[Law, Law], float]:
    def measure(p: Law, q: Law) -> float:
        return math.fsum(max(0.0, p.get(x, 0.0) - math.exp(epsilon) * q.get(x, 0.0)) for x in p)

    return measure


def renyi(order: float) -> Callable[[Law, Law], float]:
    def measure(p: Law, q: Law) -> float:
        return math.log(math.fsum(p[x] ** order * q[x] ** (1 - order) for x in p)) / (order - 1)

    return measure


def promised(neighbors: str, parts: Sequence[Guarantee]) -> tuple[float, float, float]:
    """What the price says of epsilon, delta and intrinsic time."""
    cost = costs(compiled(neighbors), parallel(parts))
    return (cost["epsilon"] or 0) / 1e15, (cost["delta"] or 0) / 1e18, (cost["intrinsic"] or 0) / 1e15


@pytest.mark.parametrize("neighbors", BOTH)
def test_the_price_is_enough_for_approximate_parts(neighbors: str) -> None:
    epsilon, delta, _ = promised(neighbors, PARTS)
    assert worst(hockey_stick(epsilon), PARTS, neighbors) <= delta + 1e-15


@pytest.mark.parametrize("neighbors", BOTH)
def test_the_price_is_enough_for_pure_parts_and_not_a_bit_too_much(neighbors: str) -> None:
    epsilon, _, _ = promised(neighbors, PURE)
    assert worst(hockey_stick(epsilon), PURE, neighbors) <= 1e-15
    assert worst(hockey_stick(epsilon - 1e-6), PURE, neighbors) > 1e-9


@pytest.mark.parametrize("neighbors", BOTH)
@pytest.mark.parametrize("order", [1.01, 2.0, 8.0, 64.0])
def test_the_intrinsic_time_is_enough_at_every_order(neighbors: str, order: float) -> None:
    _, _, time = promised(neighbors, PURE)
    assert worst(renyi(order), PURE, neighbors) <= order * time / 2 + 1e-12


def test_the_maximum_alone_would_not_be_enough_for_replaced_people() -> None:
    """Negative control: the same looks refute the price of added or removed people."""
    epsilon, delta, time = promised("add-remove", PARTS)
    assert worst(hockey_stick(epsilon), PARTS, "replace-one") > 10 * delta
    _, _, time = promised("add-remove", PURE)
    assert worst(renyi(2.0), PURE, "replace-one") > time


def test_the_maximum_would_not_be_enough_for_parts_that_overlap() -> None:
    """Negative control: a person whom every part sees pays for every part."""
    epsilon, delta, _ = promised("add-remove", PARTS)
    assert worst(hockey_stick(epsilon), PARTS, "add-remove", in_every_part) > 10 * delta


def test_a_parallel_step_is_a_value() -> None:
    step = parallel({"a": PureDP(0.1), "b": PureDP("0.2")})
    assert isinstance(step, Parallel)
    assert step == parallel([PureDP("1/10"), PureDP(0.2)])
    assert hash(step) == hash(parallel((PureDP(0.1), PureDP(0.2))))
