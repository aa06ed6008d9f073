"""Compiled policies: each clock has a price for what its theorem covers, and none for anything else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Mechanism, Policy, Price, PureDP, compile_policy, parallel
from odograph.core.menu import LossDistribution
from odograph.core.meters import CLOCKS, Meter
from odograph.errors import InvalidPolicy, UnprovenComposition

EXACT_POLICY = Policy(1, 1e-6)
CURVE = RDP((2, 8, 32), ("0.01", "0.04", "0.16"))


def priced(policy: Policy, cost: Guarantee) -> set[str]:
    """The alternatives on which a cost has a price."""
    compiled = compile_policy(policy, solve=False)
    amounts = odo.price(compiled, cost).amounts
    pairs = zip(compiled.meters, amounts, strict=True)
    return {m.clock for m, amount in pairs if m.limit is not None and m.clock != "delta" and amount is not None}


@pytest.mark.parametrize(
    ("rules", "cost", "clocks"),
    [
        (("paper", "zcdp"), PureDP("0.1"), {"epsilon", "paper", "intrinsic"}),
        (("paper", "zcdp"), ZCDP("0.01"), {"intrinsic"}),
        (("gdp", "zcdp"), GDP("0.1"), {"gdp", "intrinsic"}),
        (("gdp", "zcdp"), ApproxDP("0.1", "1e-9"), {"epsilon", "intrinsic"}),
        (("gdp", "renyi"), CURVE, {"renyi"}),
        (("exact", "zcdp"), GDP("0.1"), {"exact", "intrinsic"}),
        (("exact", "zcdp"), ZCDP("0.01"), {"intrinsic"}),
    ],
)
def test_a_cost_has_a_price_where_a_theorem_covers_it(
    rules: tuple[str, str], cost: Guarantee, clocks: set[str]
) -> None:
    policy = Policy(1, 1e-6, rule=dict.fromkeys(rules, 0.5), delta_steps="1e-8")
    assert priced(policy, cost) == clocks


def test_a_gaussian_has_no_price_on_an_exact_budget_for_pure_steps() -> None:
    policy = Policy(1, 1e-6, rule={"exact": 0.5, "gdp": 0.5}, takes=("pure",))
    assert priced(policy, GDP("0.1")) == {"gdp"}
    assert priced(policy, PureDP("0.1")) == {"epsilon", "exact", "gdp"}


@pytest.mark.parametrize("cost", [PureDP(10**6 + 1), GDP(10**6 + 1)], ids=repr)
def test_what_is_no_privacy_at_all_has_no_price_on_an_exact_budget(cost: Guarantee) -> None:
    assert priced(EXACT_POLICY, cost).isdisjoint({"epsilon", "exact"})
    compiled = compile_policy(EXACT_POLICY, solve=False)
    assert not odo.ask(compiled, compiled.start, cost).admitted


METERS = {
    "epsilon": Meter("epsilon", "epsilon", 1),
    "exact": next(m for m in compile_policy(EXACT_POLICY).meters if m.clock == "exact"),
    "gdp": Meter("gdp", "gdp", 1),
    "intrinsic": Meter("zcdp", "intrinsic", 1),
    "paper": Meter("paper", "paper", 1),
    "renyi": next(m for m in compile_policy(Policy(1, 1e-6, rule="renyi")).meters if m.clock == "renyi"),
}


@pytest.mark.parametrize("clock", METERS)
def test_no_clock_has_a_price_for_parts_which_compose_before_they_are_priced(clock: str) -> None:
    assert CLOCKS[clock](METERS[clock], PureDP("0.1")) is not None
    assert CLOCKS[clock](METERS[clock], parallel([PureDP("0.1")])) is None


@pytest.mark.parametrize(("clock", "lacks"), [("renyi", "order"), ("exact", "unit")])
def test_a_meter_without_what_its_clock_needs_prices_nothing(clock: str, lacks: str) -> None:
    without: Any = {lacks: None}
    with pytest.raises(InvalidPolicy, match=f"needs an? {lacks}"):
        CLOCKS[clock](replace(METERS[clock], **without), PureDP("0.1"))


def test_a_price_is_never_negative() -> None:
    with pytest.raises(InvalidPolicy, match="never negative"):
        Price((0, None, -1))


def item(neighbours: str) -> odo.MenuItem:
    """Randomized response at about 0.1, as a menu item."""
    ways = tuple(LossDistribution(-1, np.array([low, 0.0, 1 - low]), 0.0) for low in (0.475, 0.475))
    return odo.MenuItem("response", 1, 0.1, ways, neighbours=neighbours)


def test_the_curve_of_a_listed_mechanism_has_no_price_for_neighbours_that_it_is_not_for() -> None:
    """A curve that comes with a mechanism is for people who are added or removed."""
    cost = Mechanism("response", 1, CURVE)
    for neighbours, clocks in (("add-remove", {"exact", "renyi"}), ("replace-one", {"exact"})):
        policy = Policy(
            1, "0.02", rule={"exact": 0.5, "renyi": 0.5}, takes=(), menu=[item(neighbours)], neighbours=neighbours
        )
        compiled = compile_policy(policy)
        amounts = zip(compiled.meters, odo.price(compiled, cost).amounts, strict=True)
        assert {m.clock for m, amount in amounts if m.limit is not None and amount} == clocks


def test_a_listed_mechanism_is_not_covered_by_a_rule_that_reads_no_menu_and_the_message_says_so() -> None:
    policy = Policy(1, 1e-6, rule="zcdp", menu=[item("add-remove")])
    for cost in (Mechanism("response"), Mechanism("response", 1, CURVE)):
        with pytest.raises(UnprovenComposition) as caught:
            odo.price(compile_policy(policy), cost)
        message = str(caught.value)
        assert "the policy's menu lists it, and only rule='exact', or a share of it, reads a menu" in message
        assert "renyi" not in message


def test_a_stored_policy_with_the_alternatives_of_another_rule_is_refused() -> None:
    form = compile_policy(Policy(1, 1e-6, rule="zcdp")).to_dict()
    other = compile_policy(Policy(1, 1e-6, rule="gdp")).to_dict()
    assert odo.compiled_from_dict(form)
    form["meters"][3] = other["meters"][3]
    with pytest.raises(InvalidPolicy, match="must be those of its rules"):
        odo.compiled_from_dict(form)


def test_a_policy_names_each_rule_once_and_tells_its_share() -> None:
    assert Policy(1, 1e-6, rule={"zcdp": "1/4", "exact": "3/4"}).rule_text == "exact 0.75, zcdp 0.25"
    with pytest.raises(InvalidPolicy, match="names something twice"):
        Policy(1, 1e-6, rule=[("exact", "3/4"), ("exact", "1/4")])
