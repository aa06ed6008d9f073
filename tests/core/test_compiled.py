"""Compiled policies: each meter has a price for what its theorem covers, and none for anything else."""

from __future__ import annotations

import numpy as np
import pytest

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Policy, PureDP, compile_policy, parallel
from odograph.core.filters import Exact, GdpMeter, PaperMeter, ZcdpMeter, meter_from_dict
from odograph.core.gate import Price
from odograph.core.guarantees import Mechanism
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.meters import EpsilonMeter, IntrinsicMeter, Meter
from odograph.core.policy import Compiled
from odograph.errors import InvalidArgument, InvalidPolicy

EXACT_POLICY = Policy(1, 1e-6, filter="exact")
CURVE = RDP((2, 8, 32), ("0.01", "0.04", "0.16"))


def priced(policy: Policy, cost: Guarantee) -> set[str]:
    """The alternatives on which a cost has a price."""
    compiled = compile_policy(policy, solve=False)
    amounts = compiled.price(cost).amounts
    pairs = zip(compiled.meters, amounts, strict=True)
    return {m.pricing for m, amount in pairs if m.limit is not None and not m.counts_delta and amount is not None}


@pytest.mark.parametrize(
    ("rules", "cost", "pricings"),
    [
        (("paper", "zcdp"), PureDP("0.1"), {"epsilon", "paper", "zcdp"}),
        (("paper", "zcdp"), ZCDP("0.01"), {"zcdp"}),
        (("gdp", "zcdp"), GDP("0.1"), {"gdp", "zcdp"}),
        (("gdp", "zcdp"), ApproxDP("0.1", "1e-9"), {"epsilon", "gdp", "zcdp"}),
        (("gdp", "zcdp"), ZCDP("0.00001"), {"gdp", "zcdp"}),
        (("gdp", "zcdp"), ZCDP("0.01"), {"zcdp"}),
        (("gdp", "renyi"), CURVE, {"renyi"}),
        (("exact", "zcdp"), GDP("0.1"), {"exact", "zcdp"}),
        (("exact", "zcdp"), ZCDP("0.01"), {"zcdp"}),
    ],
)
def test_a_cost_has_a_price_where_a_theorem_covers_it(
    rules: tuple[str, str], cost: Guarantee, pricings: set[str]
) -> None:
    policy = Policy(1, 1e-6, filter=dict.fromkeys(rules, 0.5), delta_steps="1e-8")
    assert priced(policy, cost) == pricings


def test_a_gaussian_has_no_price_on_an_exact_budget_for_pure_steps() -> None:
    policy = Policy(1, 1e-6, filter=[(Exact(takes=("pure",)), 0.5), ("gdp", 0.5)])
    assert priced(policy, GDP("0.1")) == {"gdp"}
    assert priced(policy, PureDP("0.1")) == {"epsilon", "exact", "gdp"}


@pytest.mark.parametrize("cost", [PureDP(10**6 + 1), GDP(10**6 + 1)], ids=repr)
def test_what_is_no_privacy_at_all_has_no_price_on_an_exact_budget(cost: Guarantee) -> None:
    assert priced(EXACT_POLICY, cost).isdisjoint({"epsilon", "exact"})
    compiled = compile_policy(EXACT_POLICY, solve=False)
    assert not odo.planning.ask(odo.planning.AccountState("", compiled, compiled.start), cost).admitted


METERS: dict[str, Meter] = {
    "epsilon": EpsilonMeter("epsilon", 1),
    "exact": next(m for m in compile_policy(EXACT_POLICY).meters if m.pricing == "exact"),
    "gdp": GdpMeter("gdp", 1),
    "intrinsic": IntrinsicMeter("intrinsic", None),
    "zcdp": ZcdpMeter("zcdp", 1),
    "paper": PaperMeter("paper", 1),
    "renyi": next(m for m in compile_policy(Policy(1, 1e-6, filter="renyi")).meters if m.pricing == "renyi"),
}


@pytest.mark.parametrize("pricing", METERS)
def test_no_meter_has_a_price_for_parts_which_compose_before_they_are_priced(pricing: str) -> None:
    assert METERS[pricing].price(PureDP("0.1")) is not None
    assert METERS[pricing].price(parallel([PureDP("0.1")])) is None


def test_a_price_is_never_negative() -> None:
    with pytest.raises(InvalidArgument, match="must not be negative"):
        Price((0, None, -1))


def item(neighbors: str) -> MenuItem:
    """Randomized response at about 0.1, as a menu item."""
    ways = tuple(LossDistribution(-1, np.array([low, 0.0, 1 - low]), 0.0) for low in (0.475, 0.475))
    return MenuItem("response", 1, 0.1, ways, neighbors=neighbors)


def test_the_curve_of_a_listed_mechanism_has_no_price_for_neighbours_that_it_is_not_for() -> None:
    """A curve that comes with a mechanism is for people who are added or removed."""
    cost = Mechanism("response", 1, CURVE)
    for neighbors, pricings in (("add-remove", {"exact", "renyi"}), ("replace-one", {"exact"})):
        policy = Policy(
            1, "0.02", filter=[(Exact(takes=(), menu=[item(neighbors)]), 0.5), ("renyi", 0.5)], neighbors=neighbors
        )
        compiled = compile_policy(policy)
        amounts = zip(compiled.meters, compiled.price(cost).amounts, strict=True)
        assert {m.pricing for m, amount in amounts if m.limit is not None and amount} == pricings


def test_a_stored_policy_with_the_alternatives_of_another_rule_is_refused() -> None:
    form = compile_policy(Policy(1, 1e-6, filter="zcdp")).to_dict()
    other = compile_policy(Policy(1, 1e-6, filter="gdp")).to_dict()
    assert Compiled.from_dict(form)
    form["meters"][3] = other["meters"][3]
    with pytest.raises(InvalidPolicy, match="must be those of its filter"):
        Compiled.from_dict(form)


def test_a_policy_names_each_rule_once_and_tells_its_share() -> None:
    assert Policy(1, 1e-6, filter={"zcdp": "1/4", "exact": "3/4"}).filter_text == "exact 0.75, zcdp 0.25"
    with pytest.raises(InvalidPolicy, match="one filter of each kind"):
        Policy(1, 1e-6, filter=[("exact", "3/4"), ("exact", "1/4")])


def test_a_number_of_a_stored_meter_that_would_fill_the_memory_is_refused_at_once() -> None:
    form = {"name": "renyi@2", "clock": "renyi", "limit": "1", "order": "1e3000000"}
    with pytest.raises(InvalidPolicy, match="order"):
        meter_from_dict(form, 1)
