"""Idempotency: the same key and request is the first receipt, another request a conflict; a refusal frees its key."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import odograph as odo
from odograph import ApproxDP, BudgetExceeded, Guarantee, IdempotencyConflict, Ledger, Policy, PureDP, Receipt

UNIT = 10**15
TENTH = PureDP(0.1)
BASIC = Policy(1, "1e-6", filter="basic")


@pytest.fixture(autouse=True)
def _accounts(ledger: Ledger) -> None:
    for name in ("jan", "feb"):
        ledger.open_account(name, BASIC)


def spent(ledger: Ledger, name: str = "jan") -> Fraction:
    return Fraction(ledger.account(name).totals.amounts[1], UNIT)


def plain(receipt: Receipt) -> dict[str, Any]:
    """The receipt without the word on whether it was asked for before."""
    return {name: value for name, value in receipt.to_dict().items() if name != "repeated"}


def test_the_same_key_and_request_is_the_first_receipt(ledger: Ledger, again: Callable[[], Ledger]) -> None:
    first = ledger.account("jan").spend(TENTH, key="q", note="first")
    before = ledger.checkpoint()
    ledger.account("feb").spend(TENTH)
    for other in (ledger, again(), ledger.acting_as("ana")):
        repeated = other.account("jan").spend(TENTH, key="q", note="another note")
        assert repeated.repeated
        assert plain(repeated) == plain(first)
        assert other.spend({"jan": TENTH}, key="q").repeated
    assert not first.repeated
    assert ledger.checkpoint().accounts["jan"] == before.accounts["jan"]
    assert spent(ledger) == Fraction(1, 10)


def test_a_receipt_equals_itself_asked_for_again_and_no_other(ledger: Ledger) -> None:
    first = ledger.account("jan").spend(TENTH, key="q")
    ledger.open_account("next", BASIC, successor_of="jan")
    again = ledger.account("jan").spend(TENTH, key="q")
    assert first.lifetimes != again.lifetimes
    assert first == again
    assert not first != again  # noqa: SIM202  the operator is what is tested
    assert hash(first) == hash(again)
    assert first != ledger.account("jan").spend(TENTH, key="r")
    assert first != tuple(first)


@pytest.mark.parametrize(
    "same",
    [PureDP("0.1"), PureDP("1/10"), PureDP("0.10"), PureDP("1e-1"), PureDP(Fraction(1, 10))],
    ids=["decimal", "fraction", "zeros", "exponent", "exact"],
)
def test_a_guarantee_is_the_same_however_it_is_written(ledger: Ledger, same: Guarantee) -> None:
    ledger.account("jan").spend(PureDP("0.1"), key="q")
    assert ledger.account("jan").spend(same, key="q").repeated
    assert spent(ledger) == Fraction(1, 10)


def test_the_order_of_a_mapping_is_not_part_of_the_request(ledger: Ledger) -> None:
    first = ledger.spend({"jan": TENTH, "feb": PureDP(0.2)}, key="q")
    again = ledger.spend({"feb": PureDP(0.2), "jan": TENTH}, key="q")
    assert again.repeated
    assert plain(again) == plain(first)


OTHERS: dict[str, Callable[[Ledger], object]] = {
    "another cost": lambda one: one.account("jan").spend(PureDP("0.2"), key="q"),
    "a cost of another kind": lambda one: one.account("jan").spend(ApproxDP(0.1, 0), key="q"),
    "another account": lambda one: one.account("feb").spend(TENTH, key="q"),
    "another verb": lambda one: one.account("jan").reserve(TENTH, key="q"),
    "one account more": lambda one: one.spend({"jan": TENTH, "feb": TENTH}, key="q"),
    "an opening": lambda one: one.open_account("mar", BASIC, key="q"),
    "a block": lambda one: one.account("jan").spending(TENTH, key="q").__enter__(),
    "what would be refused": lambda one: one.account("jan").spend(PureDP(9), key="q"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_request_is_a_conflict(
    ledger: Ledger, again: Callable[[], Ledger], other: Callable[[Ledger], object]
) -> None:
    ledger.account("jan").spend(TENTH, key="q")
    before = ledger.checkpoint()
    for one in (ledger, again()):
        with pytest.raises(IdempotencyConflict, match="'q'"):
            other(one)
    assert ledger.checkpoint() == before


def test_a_key_that_opened_an_account_opens_no_other(ledger: Ledger) -> None:
    ledger.open_account("mar", BASIC, key="q")
    before = ledger.checkpoint()
    others: list[Callable[[], object]] = [
        lambda: ledger.open_account("mar", Policy(2, "1e-6", filter="basic"), key="q"),
        lambda: ledger.open_account("mar", BASIC, key="q", parent="jan"),
        lambda: ledger.open_account("mar", BASIC, key="q", successor_of="jan"),
        lambda: ledger.open_account("mar", BASIC, key="q", dataset="rivers"),
        lambda: ledger.open_account("apr", BASIC, key="q"),
    ]
    for other in others:
        with pytest.raises(IdempotencyConflict, match=r"'q' opened 'mar' before, with another") as caught:
            other()
        assert "Use ledger.account('mar'), or another name and key" in str(caught.value)
    assert ledger.checkpoint() == before


def test_a_key_of_another_verb_is_told_in_general_words(ledger: Ledger) -> None:
    ledger.open_account("mar", BASIC, key="q")
    ledger.account("jan").spend(TENTH, key="r")
    others: list[Callable[[], object]] = [
        lambda: ledger.account("mar").spend(TENTH, key="q"),
        lambda: ledger.open_account("apr", BASIC, key="r"),
    ]
    for other in others:
        with pytest.raises(IdempotencyConflict, match="same verb, accounts and guarantees"):
            other()


def test_opening_again_is_the_same_account(ledger: Ledger) -> None:
    ledger.open_account("mar", BASIC, key="q", dataset="rivers")
    ledger.account("mar").spend(TENTH)
    before = ledger.checkpoint()
    assert ledger.open_account("mar", BASIC, key="q", dataset="rivers").size == 2
    for policy, dataset in ((Policy(2, "1e-6", filter="basic"), "rivers"), (BASIC, "lakes")):
        with pytest.raises(IdempotencyConflict):
            ledger.open_account("mar", policy, key="q", dataset=dataset)
    assert ledger.checkpoint() == before


@pytest.mark.parametrize("rule", ["basic", "exact", "renyi"])
def test_an_account_opened_with_the_first_default_odometer_is_found_again(ledger: Ledger, rule: str) -> None:
    policy = Policy(1, "1e-6", filter=rule)
    first = Policy(1, "1e-6", filter=rule, odometer=odo.odometers.standard_odometer(1.0, 1e-6))
    ledger.open_account("old", first, key="open old")
    assert ledger.open_account("old", policy, key="open old").policy == first  # as it was opened
    for other in (
        Policy(1, "2e-6", filter=rule),
        Policy(1, "1e-6", filter=rule, odometer=odo.odometers.Mixture(0.5)),
    ):
        with pytest.raises(IdempotencyConflict):
            ledger.open_account("old", other, key="open old")


def test_keys_of_principals_are_their_own(ledger: Ledger) -> None:
    ledger.account("jan").spend(TENTH, key="q")
    ben = ledger.acting_as("ben")
    assert not ben.account("jan").spend(PureDP("0.2"), key="q").repeated
    assert ben.account("jan").spend(PureDP("0.2"), key="q").repeated
    assert ledger.account("jan").spend(TENTH, key="q").repeated
    assert spent(ledger) == Fraction(3, 10)


def test_keys_of_one_principal_are_the_whole_ledger_s(ledger: Ledger) -> None:
    ledger.account("jan").spend(TENTH, key="q")
    with pytest.raises(IdempotencyConflict):
        ledger.account("feb").spend(TENTH, key="q")
    assert spent(ledger, "feb") == 0


def test_without_a_key_every_request_is_new(ledger: Ledger) -> None:
    receipts = [ledger.account("jan").spend(TENTH) for _ in range(3)]
    assert len({one.key for one in receipts}) == 3
    assert all(one.key for one in receipts)
    assert ledger.account("jan").spend(TENTH, key=receipts[0].key).repeated  # the key it was given
    assert spent(ledger) == Fraction(3, 10)


def test_a_key_that_looks_like_a_reservation_is_just_a_key(ledger: Ledger) -> None:
    held = ledger.account("jan").reserve(TENTH)
    ledger.account("jan").spend(TENTH, key=held.id)
    held.void("not run")
    assert ledger.account("jan").spend(TENTH, key=held.id).repeated
    assert spent(ledger) == Fraction(1, 10)
    other = ledger.account("jan").reserve(TENTH)
    other.commit()
    assert not ledger.account("jan").spend(TENTH, key=other.id).repeated
    ledger.verify()


def test_a_refusal_is_recorded_costs_nothing_and_frees_its_key(ledger: Ledger) -> None:
    account = ledger.account("jan")
    totals = account.totals
    for cost in (PureDP(2), PureDP(3), PureDP(2)):
        with pytest.raises(BudgetExceeded) as caught:
            account.spend(cost, key="q", note="too much")
    entries = [past.entry for past in account.history()[1:]]
    assert [(one.verb, one.key) for one in entries] == [("refuse", "q")] * 3
    assert account.history(-1, 1)[0].note == "too much"
    assert account.totals == totals
    offer = caught.value.decision.largest
    assert offer is not None
    receipt = account.spend(offer, key="q")  # a counter-offer may use the key again
    assert not receipt.repeated
    assert account.spend(offer, key="q").repeated
    with pytest.raises(IdempotencyConflict):
        account.spend(PureDP(2), key="q")
    ledger.verify()


def test_a_refusal_of_several_accounts_frees_its_key(ledger: Ledger) -> None:
    with pytest.raises(BudgetExceeded):
        ledger.spend({"jan": TENTH, "feb": PureDP(2)}, key="q")
    assert ledger.account("jan").totals == ledger.account("feb").totals
    assert not ledger.spend({"jan": TENTH, "feb": TENTH}, key="q").repeated
    ledger.verify()


def test_an_error_uses_no_key(ledger: Ledger) -> None:
    with pytest.raises(odo.UnprovenComposition):
        ledger.account("jan").spend(odo.GDP(0.1), key="q")
    with pytest.raises(odo.errors.AccountNotFound):
        ledger.spend({"jan": TENTH, "nobody": TENTH}, key="q")
    assert not ledger.account("jan").spend(TENTH, key="q").repeated


# The keys of a principal whose name was erased.


def refused(ledger: Ledger, key: str) -> None:
    """Every verb that takes a key finds it used, and changes nothing."""
    before = ledger.checkpoint()
    asks: list[Callable[[], object]] = [
        lambda: ledger.account("jan").spend(TENTH, key=key),
        lambda: ledger.account("jan").spend(PureDP("0.2"), key=key),
        lambda: ledger.spend({"jan": TENTH, "feb": TENTH}, key=key),
        lambda: ledger.account("jan").reserve(TENTH, key=key),
        lambda: ledger.open_account("mar", BASIC, key=key),
        lambda: ledger.account("jan").spending(TENTH, key=key).__enter__(),
    ]
    for ask in asks:
        with pytest.raises(
            IdempotencyConflict, match=f"'{key}' was used before, by a principal whose name was erased"
        ):
            ask()
    assert ledger.checkpoint() == before


@pytest.fixture
def erased(ledger: Ledger) -> Ledger:
    """A ledger from which a principal was erased after she had used each verb, and been refused."""
    zoe = ledger.acting_as("zoe")
    zoe.account("jan").spend(TENTH, key="spent")
    zoe.account("feb").reserve(TENTH, key="reserved").commit()
    zoe.open_account("apr", BASIC, key="opened")
    with pytest.raises(BudgetExceeded):
        zoe.account("jan").spend(PureDP(9), key="refused")
    ledger.account("jan").spend(TENTH, key="spent")  # somebody else's key of the same text
    assert ledger.erase_principal("zoe")
    return ledger


def test_a_retry_of_an_erased_principal_is_not_charged_again(erased: Ledger, again: Callable[[], Ledger]) -> None:
    for one in (erased, again()):
        for who in ("zoe", "ben"):
            for key in ("spent", "reserved", "opened"):
                refused(one.acting_as(who), key)
    assert erased.account("jan").spend(TENTH, key="spent").repeated  # one's own
    ben = erased.acting_as("ben").account("jan")
    assert not ben.spend(TENTH, key="refused").repeated  # a refusal had left it free
    assert not ben.spend(TENTH, key="new").repeated
    assert ben.spend(TENTH, key="new").repeated
    assert spent(erased) == Fraction(4, 10)
    erased.verify()


def test_a_program_that_goes_on_as_an_erased_principal_charges_no_key_of_another_twice(
    ledger: Ledger, again: Callable[[], Ledger]
) -> None:
    before = ledger.acting_as("zoe").account("jan")
    before.spend(TENTH, key="first")  # its identity is known to this program from here on
    assert again().erase_principal("zoe")
    assert not again().acting_as("zoe").account("jan").spend(TENTH, key="second").repeated
    for key in ("first", "second"):
        try:
            assert before.spend(TENTH, key=key).repeated  # as whoever used it: a service knows the new identity too
        except IdempotencyConflict as conflict:
            assert "name was erased" in str(conflict)  # noqa: PT017  either is right
    assert spent(ledger) == Fraction(2, 10)
    ledger.verify()


def test_an_erased_principal_can_be_erased_again_under_the_same_name(erased: Ledger) -> None:
    erased.acting_as("zoe").account("jan").spend(TENTH, key="second")
    assert erased.erase_principal("zoe")
    assert not erased.erase_principal("zoe")
    for key in ("spent", "second"):
        refused(erased.acting_as("zoe"), key)
    assert erased.verify().principals_erased >= 2


def test_a_copy_keeps_the_keys_of_erased_principals_and_not_their_names(erased: Ledger, tmp_path: Path) -> None:
    last = erased.backup(tmp_path / "copy.db")
    file = io.StringIO()
    erased.export(file)
    assert "zoe" not in file.getvalue()
    for number, url in enumerate(("memory://", f"sqlite:///{tmp_path}/1.db", f"sqlite:///{tmp_path}/2.db")):
        with odo.connect(url, principal="ana") as copy:
            if number == 1:
                copy.restore(tmp_path / "copy.db", checkpoint=last)
            else:
                copy.import_(io.StringIO(file.getvalue()), checkpoint=last)
            refused(copy.acting_as("zoe"), "spent")
            assert copy.account("jan").spend(TENTH, key="spent").repeated
            assert "zoe" not in {past.principal for past in copy.account("jan").history()}
            copy.verify()


def test_an_erased_name_is_in_no_file_of_a_ledger_in_use(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/erased.db", principal="ana") as ledger:
        ledger.open_account("jan", BASIC)
        for number in range(50):
            ledger.acting_as(f"zoe-the-{number}th").account("jan").spend(PureDP("0.001"), key=f"{number}")
        for number in range(10, 40):
            assert ledger.erase_principal(f"zoe-the-{number}th")
        found = b"".join(file.read_bytes() for file in tmp_path.glob("erased.db*"))
        for number in range(50):
            assert (f"zoe-the-{number}th".encode() in found) is not (10 <= number < 40), number
        refused_key = ledger.acting_as("zoe-the-20th").account("jan")
        with pytest.raises(IdempotencyConflict, match="name was erased"):
            refused_key.spend(PureDP("0.001"), key="20")


def test_a_name_that_an_earlier_version_erased_keeps_its_keys_from_the_next_erasure_on(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/earlier.db", principal="ana") as ledger:
        ledger.open_account("jan", BASIC)
        ledger.open_account("feb", BASIC)
        for key in ("spent", "retried"):
            ledger.acting_as("zoe").account("jan").spend(TENTH, key=key)
        with closing(sqlite3.connect(tmp_path / "earlier.db", isolation_level=None)) as earlier:
            earlier.execute("DELETE FROM principals WHERE name = 'zoe'")
        assert not ledger.acting_as("zoe").account("jan").spend(TENTH, key="retried").repeated  # the control: the bug
        assert not ledger.erase_principal("nobody")
        refused(ledger.acting_as("zoe"), "spent")
