"""Offers: what is offered is admitted, and where nothing can be offered nothing is."""

from __future__ import annotations

from typing import Any

import pytest

import odograph as odo
from odograph import GDP, RDP, ZCDP, Policy, PureDP, compile_policy, parallel
from odograph.account import offers_of
from odograph.core.guarantees import Mechanism, Parallel
from odograph.core.planning import AccountState, largest
from odograph.errors import InvalidArgument

CURVE = RDP((2, 8, 32), (1, 4, 16))
RENYI = compile_policy(Policy(1, 1e-6, filter="renyi"))


def test_a_refused_curve_has_no_one_size_to_offer_another_of() -> None:
    decision = odo.planning.ask(odo.planning.AccountState("", RENYI, RENYI.start), CURVE)
    assert not decision.admitted
    assert decision.largest is None
    assert "a curve has no single size, so no smaller one is offered" in str(decision)


@pytest.mark.parametrize("kind", [RDP, Mechanism, Parallel, CURVE, parallel([PureDP(0.1), CURVE])], ids=repr)
def test_what_has_no_one_size_has_no_largest(kind: Any) -> None:  # noqa: ANN401  a class or a guarantee
    assert largest(AccountState("", RENYI, RENYI.start), kind) is None


@pytest.mark.parametrize("kind", [int, 0.1, "pure", None], ids=repr)
def test_what_is_no_kind_of_guarantee_is_refused(kind: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises(InvalidArgument, match="kind must be a class"):
        largest(AccountState("", RENYI, RENYI.start), kind)


def test_of_a_mechanism_that_no_rule_takes_no_number_of_runs_is_offered() -> None:
    compiled = compile_policy(Policy(1, 1e-6))
    assert largest(AccountState("", compiled, compiled.start), Mechanism("not on the menu")) is None


def test_of_a_mechanism_that_is_too_dear_no_number_of_runs_is_offered() -> None:
    assert largest(AccountState("", RENYI, RENYI.start), Mechanism("noisy", 1, CURVE)) is None


def test_where_everything_is_admitted_the_offer_is_one_that_is() -> None:
    """An account whose gate is open: the search for the largest ends."""
    assert odo.core.planning.largest_that(PureDP, 1, lambda _, count: count == 1) == PureDP(2**29)


def test_an_offer_whose_last_digit_would_round_up_past_the_limit_is_made_a_little_smaller() -> None:
    # The last size that the search sees admitted, cut to twelve digits in floats, is 101.001892581.
    compiled = compile_policy(Policy("101.00189258099999", 0, filter="basic"))
    assert not odo.planning.ask(
        odo.planning.AccountState("", compiled, compiled.start), PureDP("101.001892581")
    ).admitted
    offer = largest(AccountState("", compiled, compiled.start), PureDP)
    assert offer is not None
    assert odo.planning.ask(odo.planning.AccountState("", compiled, compiled.start), offer).admitted
    assert float(offer.epsilon) == pytest.approx(101.001892581, rel=3e-11)


def test_an_account_offers_the_kinds_that_its_policy_takes_until_nothing_fits() -> None:
    account = odo.Accountant(Policy(1, 0, filter="basic"))
    assert offers_of(account) == [PureDP(1)]
    account.spend(PureDP("0.25"))
    assert offers_of(account) == [PureDP("0.75")]
    account.spend(PureDP("0.75"))
    assert offers_of(account) == []
    assert [type(offer) for offer in offers_of(odo.Accountant(Policy(1, 1e-6, filter="zcdp")))] == [PureDP, GDP, ZCDP]
