"""Charges to several accounts, all or nothing; and the same integers as an account in memory."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from account_tree import TENTH, family, record, spent, totals_of

import odograph as odo
from odograph import (
    GDP,
    ZCDP,
    Accountant,
    BudgetExceeded,
    Decision,
    Guarantee,
    Ledger,
    LedgerAccount,
    Policy,
    PureDP,
    UnprovenComposition,
)
from odograph.errors import AccountNotFound, InvalidGuarantee


def test_several_accounts_are_charged_together(ledger: Ledger) -> None:
    family(ledger)
    costs: dict[str, Guarantee] = {"ana-maps": PureDP("0.1"), "ben": PureDP("0.2")}
    assert ledger.decide(costs).admitted
    assert totals_of(ledger) == {one.name: one.compiled.start for one in ledger.accounts()}
    receipt = ledger.spend(costs)
    assert [(line.account, line.cost) for line in receipt.lines] == list(costs.items())
    assert [spent(ledger, name) * 10 for name in ("ana-maps", "ana", "ben", "top")] == [1, 1, 2, 3]
    for name in ("ana-maps", "ana", "ben", "top"):
        legs = {past.entry.legs for past in ledger.account(name).history()[1:]}
        assert len(legs) == 1
        assert all(one in next(iter(legs)) for one in ("ana-maps#", "ben#", "top#"))


@pytest.mark.parametrize(
    ("costs", "which"),
    [
        ({"ana": "0.2", "ben": "0.8"}, {"ben"}),
        ({"ben": "0.8", "ana": "0.2"}, {"ben"}),
        ({"ana": "0.5", "ben": "0.6"}, {"top"}),
        ({"ana": "0.5", "top": "0.6"}, {"top"}),
        ({"ana": "0.3", "ana-maps": "0.25"}, {"ana"}),
        ({"ana-maps": "0.2", "ben": "0.6", "top": "0.3"}, {"top"}),
    ],
)
@pytest.mark.parametrize("verb", ["spend", "reserve", "decide"])
def test_all_or_nothing_with_which_ran_out_and_what_fits(
    ledger: Ledger, costs: dict[str, str], which: set[str], verb: str
) -> None:
    family(ledger)
    before = totals_of(ledger)
    asked: dict[str, Guarantee] = {name: PureDP(epsilon) for name, epsilon in costs.items()}
    refusal = refused(ledger, verb, asked)
    assert totals_of(ledger) == before
    assert refusal.account in which
    offer = refusal.largest
    assert offer is not None
    # The offer is for the leg that was refused, the others staying as they are.
    legs = [name for name, cost in asked.items() if cost == refusal.request]
    assert any(ledger.decide({**asked, name: offer}).admitted for name in legs)


def refused(ledger: Ledger, verb: str, costs: dict[str, Guarantee]) -> Decision:
    if verb == "decide":
        decision = ledger.decide(costs)
        assert not decision.admitted
        return decision
    with pytest.raises(BudgetExceeded) as caught:
        (ledger.spend if verb == "spend" else ledger.reserve)(costs)
    return caught.value.decision


def test_a_shared_parent_is_charged_once_per_leg(ledger: Ledger) -> None:
    family(ledger)
    ledger.spend({"ana": TENTH, "ben": TENTH, "top": TENTH})
    assert spent(ledger, "top") == Fraction(3, 10)
    assert ledger.account("top").totals.steps == 3


def test_wrong_requests_change_nothing(ledger: Ledger) -> None:
    family(ledger)
    before = record(ledger)
    wrong: list[tuple[Any, type[Exception]]] = [
        ({}, odo.errors.InvalidArgument),
        ({"ana": 0.1}, InvalidGuarantee),
        ({"ana": None}, InvalidGuarantee),
        ({"ana": TENTH, "nobody": TENTH}, AccountNotFound),
        ({"ana": TENTH, "ben": GDP(0.1)}, UnprovenComposition),
        ({3: TENTH}, odo.OdographError),
        ({"": TENTH}, odo.OdographError),
    ]
    for costs, error in wrong:
        for verb in (ledger.spend, ledger.reserve, ledger.decide):
            if verb == ledger.decide and error is UnprovenComposition:
                assert verb(costs).is_unproven
                continue
            with pytest.raises(error):
                verb(costs)
    assert record(ledger) == before


def test_a_refusal_that_no_offer_for_one_account_would_change_makes_none(ledger: Ledger) -> None:
    family(ledger)
    refusal = refused(ledger, "spend", {"ana-maps": PureDP("0.4"), "ben": PureDP("0.8")})
    assert refusal.largest is None
    assert ledger.decide({"ana-maps": PureDP("0.3"), "ben": PureDP("0.7")}).admitted


def test_prices_that_are_remembered_or_not_are_the_same() -> None:
    """More different guarantees than are remembered, and one too long to be."""
    sizes = [PureDP(f"{size}e-9") for size in range(1, 1100)]
    parts = odo.parallel(sizes)
    assert len(str(parts.to_dict())) > 16384
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", Policy(1, "1e-6", filter="zcdp"))
        totals = [account.decide(cost).totals_after for cost in sizes]
        for _ in range(2):
            assert account.decide(sizes[0]).totals_after == totals[0]
            assert account.decide(parts).totals_after == totals[-1]


# The same integers as an account in memory.


@pytest.mark.parametrize("rule", ["basic", "paper", "zcdp", "gdp", "renyi", "exact"])
def test_the_totals_are_those_of_an_accountant_that_got_the_same_requests(ledger: Ledger, rule: str) -> None:
    delta_steps = None if rule == "basic" else "1e-6"
    policy = Policy(1, "2e-6", filter=rule, delta_steps=delta_steps)
    top = Accountant(policy, name="top")
    low = Accountant(Policy("0.6", "2e-6", filter="basic"), name="low", parent=top)
    ledger.open_account("top", policy)
    ledger.open_account("low", low.policy, parent="top")
    sizes: list[float | str] = ["0.3", "0.123456789012345678", 1 / 3, 5e-324, 0, "0.07", 1, "0.2", "1e-17", "0.3"]
    kinds: list[Callable[[float | str], Guarantee]] = [PureDP, GDP, ZCDP, lambda x: odo.ApproxDP(x, "1e-7")]
    for i, size in enumerate(sizes * 4):
        cost = kinds[i // len(sizes)](size)
        for memory, durable in ((top, ledger.account("top")), (low, ledger.account("low"))):
            assert outcome(memory, cost) == outcome(durable, cost), cost
            assert ledger.account("top").totals == top.totals
            assert ledger.account("low").totals == low.totals
    assert top.totals.steps > 10
    top_account = ledger.account("top")
    assert top_account.reading() == top.reading()
    assert top_account.compare() == top.compare()
    assert top_account.largest(PureDP, times=3) == top.largest(PureDP, times=3)
    assert top_account.decide(TENTH).left == top.decide(TENTH).left
    assert top_account.quote([TENTH, TENTH]).admitted == top.quote([TENTH, TENTH]).admitted
    ledger.verify()


def outcome(account: Accountant | LedgerAccount, cost: Guarantee) -> object:
    """What came of a spend: nothing, or the refusal with its offer."""
    try:
        account.spend(cost)
    except BudgetExceeded as refusal:
        return refusal.decision.account, refusal.decision.largest, refusal.decision.totals_after
    except UnprovenComposition as problem:
        return str(problem)
    return None
