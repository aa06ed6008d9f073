"""Accounts: opening, successors, parents, blocks, closing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from account_tree import TENTH, basic, family, record, spent, totals_of

import odograph as odo
from odograph import (
    BudgetExceeded,
    Ledger,
    LedgerAccount,
    Policy,
    PureDP,
)
from odograph.core.policy import Compiled
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    InvalidArgument,
    InvalidPolicy,
    LedgerNotFound,
    ReservationResolved,
)
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Made, Open
from odograph.ledger.engine import carry_out
from odograph.ledger.stores.base import Head
from odograph.ledger.stores.memory import MemoryStore

# Opening.


def test_an_account_is_found_by_its_name_and_nothing_else_is(ledger: Ledger) -> None:
    opened = ledger.open_account("b", basic())
    ledger.open_account("a", basic(2))
    assert [one.name for one in ledger.accounts()] == ["a", "b"]
    assert (opened.name, opened.policy, opened.closed, opened.size) == ("b", basic(), False, 1)
    assert ledger.account("b").totals == opened.compiled.start
    with pytest.raises(AccountNotFound):
        ledger.account("c")
    with pytest.raises(AccountNotFound):
        ledger.spend({"a": TENTH, "c": TENTH})
    assert ledger.account("a").size == 1


def test_a_name_is_taken_once(ledger: Ledger) -> None:
    ledger.open_account("a", basic())
    before = record(ledger)
    for policy in (basic(), basic(9)):
        with pytest.raises(AccountExists):
            ledger.open_account("a", policy)
    assert record(ledger) == before
    assert ledger.account("a").policy == basic()


def test_only_opening_makes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    actions: list[Callable[[Ledger], object]] = [
        lambda one: one.accounts(),
        lambda one: one.account("a"),
        lambda one: one.spend({"a": TENTH}),
        lambda one: one.decide({"a": TENTH}),
        lambda one: one.commit("a#1"),
        lambda one: one.verify(),
        lambda one: one.checkpoint(),
        lambda one: one.erase_note("a#1"),
        lambda one: one.erase_principal("ana"),
    ]
    for action in actions:
        with odo.connect(f"sqlite:///{file}") as ledger, pytest.raises(LedgerNotFound) as caught:
            action(ledger)
        assert caught.value.charged is False
        assert list(tmp_path.iterdir()) == []
    with odo.connect(f"sqlite:///{file}") as ledger:
        with pytest.raises(InvalidPolicy):
            ledger.open_account("a", None)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            ledger.open_account("", basic())
        assert list(tmp_path.iterdir()) == []
        ledger.open_account("a", basic())
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_compiled_policy_is_the_first_entry_and_never_changes(
    ledger: Ledger, again: Callable[[], Ledger]
) -> None:
    account = ledger.open_account("a", Policy(1, "2e-6", delta_steps="1e-6"))
    first = account.history(0, 1)[0].entry
    assert (first.verb, first.sequence) == ("open", 0)
    assert Compiled.from_dict(first.details["compiled"]) == account.compiled
    account.spend(TENTH)
    account.close()
    assert account.history(0, 1)[0].entry == first
    assert again().account("a").compiled == account.compiled
    with pytest.raises(AttributeError):
        account.policy = basic()  # type: ignore[misc]


def test_a_handle_is_the_account_and_a_copy_of_it_no_second_budget(
    ledger: Ledger, again: Callable[[], Ledger]
) -> None:
    account = ledger.open_account("a", basic())
    other = ledger.open_account("b", basic())
    assert account == again().account("a")
    assert len({account, again().account("a"), other}) == 2
    assert account != other
    assert account != "a"
    assert copy.copy(account) is copy.deepcopy(account) is account
    with pytest.raises(TypeError, match=r"connect\(...\)\.account\('a'\)"):
        pickle.dumps(account)


def test_accounts_of_two_ledgers_in_memory_differ() -> None:
    with odo.connect("memory://") as one, odo.connect("memory://") as two:
        assert one.open_account("a", basic()) != two.open_account("a", basic())


def test_a_closed_ledger_answers_nothing_and_says_so(ledger: Ledger, again: Callable[[], Ledger]) -> None:
    account = ledger.open_account("a", basic())
    other = ledger.acting_as("ben")
    account.spend(TENTH, key="before")
    ledger.close()
    ledger.close()  # again changes nothing
    actions: list[Callable[[], object]] = [
        lambda: account.spend(TENTH, key="after"),
        lambda: account.reserve(TENTH),
        lambda: other.spend({"a": TENTH}),
        lambda: ledger.open_account("b", basic()),
        lambda: account.totals,
        account.history,
        ledger.accounts,
        ledger.verify,
        lambda: ledger.erase_note("a#1"),
    ]
    for action in actions:
        with pytest.raises(odo.errors.LedgerError, match="was closed in this program") as caught:
            action()
        assert caught.value.charged is False
    if ledger.url != "memory://":  # what was in memory is gone with it
        assert again().account("a").totals.steps == 1


def test_closing_what_acts_for_another_closes_nothing_else(ledger: Ledger) -> None:
    ledger.open_account("a", basic())
    with ledger.acting_as("ben") as ben:
        account = ben.account("a")
        account.spend(TENTH)
    for action in (lambda: account.spend(TENTH), lambda: account.totals, ben.verify):
        with pytest.raises(odo.errors.LedgerError, match="was closed in this program"):
            action()
    ledger.account("a").spend(TENTH)
    assert ledger.account("a").totals.steps == 2


def test_a_closed_ledger_makes_no_file(tmp_path: Path) -> None:
    ledger = odo.connect(f"sqlite:///{tmp_path}/ledger.db")
    ledger.close()
    with pytest.raises(odo.errors.LedgerError, match="was closed in this program"):
        ledger.open_account("a", basic())
    with odo.connect("memory://") as origin:
        origin.open_account("a", basic())
        origin.backup(tmp_path / "copy.db")
    with pytest.raises(odo.errors.LedgerError, match="was closed in this program"):
        ledger.restore(tmp_path / "copy.db")
    assert [one.name for one in tmp_path.iterdir()] == ["copy.db"]


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///:memory:",
        "sqlite://:memory:",
        "sqlite:////:memory:",
        "sqlite:///%3Amemory%3A",
        "sqlite:///file::memory:?cache=shared",
    ],
)
def test_sqlite_s_name_for_a_database_in_memory_is_no_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"^url must be memory:// for a ledger in memory"):
        odo.connect(url).open_account("a", basic())
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_says_where_it_is_and_who_writes() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        assert ledger.principal == "ana"
        assert repr(ledger) == "<Ledger memory:// as 'ana'>"


def test_a_user_without_a_name_writes_under_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # as in a container; no such user is known here
    assert odo.connect("memory://").principal == f"uid-{2**31 - 7}"


def test_accounts_that_are_opened_in_one_transaction_are_compared_with_their_relatives_only() -> None:
    store = MemoryStore()
    backend = LocalBackend(store, "ana")
    units = {"a": "person", "b": "household", "c": "person"}
    policies = {
        name: odo.compile_policy(Policy(1, 0, filter="basic", privacy_unit=unit)) for name, unit in units.items()
    }
    heads = [Head(name, "b" if name == "c" else "", "", "", unit, "add-remove") for name, unit in units.items()]
    opened = carry_out(store, [Open(backend.author(), head, policies[head.name]) for head in heads])
    assert [isinstance(outcome, Made) for outcome in opened] == [True, True, False]
    assert [one.name for one in Ledger(backend).accounts()] == ["a", "b"]


def test_a_unit_with_a_line_break_is_not_written(ledger: Ledger) -> None:
    with pytest.raises(InvalidPolicy, match="printable"):
        ledger.open_account("a", Policy(1, 0, filter="basic", privacy_unit="per\nson"))
    with pytest.raises((AccountNotFound, LedgerNotFound)):
        ledger.account("a")


# Successors: a fresh budget, and the promises add up.


def test_a_successor_has_a_fresh_budget_and_the_promises_add_up(ledger: Ledger) -> None:
    first = ledger.open_account("v1", basic("0.1", "1e-6"))
    assert first.lifetime is None
    first.spend(PureDP("0.1"))
    second = ledger.open_account("v2", basic("0.2", "2e-6"), successor_of="v1")
    assert second.totals == second.compiled.start
    third = ledger.open_account("v3", basic("0.3"), successor_of="v2")
    for account in (first, second, third):
        lifetime = account.lifetime
        assert lifetime is not None
        assert set(lifetime.accounts) == {"v1", "v2", "v3"}
        assert (lifetime.epsilon, lifetime.delta) == (Fraction(6, 10), Fraction(3, 10**6))
    receipt = third.spend(PureDP("0.3"))
    assert [(set(one.accounts), one.epsilon) for one in receipt.lifetimes] == [({"v1", "v2", "v3"}, Fraction(6, 10))]
    assert "0.6" in str(receipt)
    assert receipt.to_dict()["lifetimes"]
    with pytest.raises(BudgetExceeded):
        first.spend(PureDP("1e-15"))  # a successor gives nothing back


def test_a_receipt_and_its_account_promise_the_same_over_a_lifetime(ledger: Ledger) -> None:
    ledger.open_account("v1", basic("0.1"))
    ledger.open_account("v2", basic("0.2"), successor_of="v1")
    ledger.open_account("v3", basic("0.3"), successor_of="v1")
    for name in ("v1", "v2", "v3"):
        account = ledger.account(name)
        receipt = account.spend(PureDP("0.01"))
        assert account.lifetime is not None
        assert [one.epsilon for one in receipt.lifetimes] == [account.lifetime.epsilon], name


def test_a_receipt_over_several_accounts_tells_each_lifetime_once(ledger: Ledger) -> None:
    for name in ("jan", "feb"):
        ledger.open_account(f"{name}-1", basic("0.1"))
        ledger.open_account(f"{name}-2", basic("0.2"), successor_of=f"{name}-1")
    receipt = ledger.spend({"jan-2": TENTH, "feb-2": TENTH})
    assert {one.accounts for one in receipt.lifetimes} == {("jan-1", "jan-2"), ("feb-1", "feb-2")}


# Parents: every ancestor's limit.


def test_a_spend_is_charged_to_every_account_above(ledger: Ledger) -> None:
    family(ledger)
    ledger.account("ana-maps").spend(TENTH)
    ledger.account("ana").spend(TENTH)
    ledger.account("ben").spend(TENTH)
    assert {name: spent(ledger, name) * 10 for name in ("top", "ana", "ben", "ana-maps")} == {
        "top": 3,
        "ana": 2,
        "ben": 1,
        "ana-maps": 1,
    }
    top = ledger.account("top")
    assert [*top.children] == ["ana", "ben"]
    parent = ledger.account("ana-maps").parent
    assert parent is not None
    assert parent.name == "ana"
    assert top.parent is None


@pytest.mark.parametrize(
    ("name", "before", "cost", "which"),
    [
        ("ana-maps", {}, "0.31", "ana-maps"),
        ("ana-maps", {"ana": "0.3"}, "0.25", "ana"),
        ("ana-maps", {"ben": "0.7", "ana": "0.2"}, "0.15", "top"),
        ("ana", {"ben": "0.6"}, "0.45", "top"),
    ],
)
def test_a_refusal_on_the_way_up_charges_nobody_and_says_which(
    ledger: Ledger, name: str, before: dict[str, str], cost: str, which: str
) -> None:
    family(ledger)
    for one, epsilon in before.items():
        ledger.account(one).spend(PureDP(epsilon))
    totals = {one.name: one.totals for one in ledger.accounts()}
    with pytest.raises(BudgetExceeded, match=f"'{which}'") as caught:
        ledger.account(name).spend(PureDP(cost))
    assert {one.name: one.totals for one in ledger.accounts()} == totals
    assert caught.value.decision.account == which
    offer = caught.value.decision.largest
    assert offer is not None
    ledger.account(name).spend(offer)
    with pytest.raises(BudgetExceeded):
        ledger.account(name).spend(PureDP("1e-15"))  # the offer was the largest


HOUSEHOLDS = Policy(1, 0, filter="basic", privacy_unit="household")
REPLACED = Policy(1, 0, filter="basic", neighbors="replace-one")


@pytest.mark.parametrize("other", [HOUSEHOLDS, REPLACED], ids=["unit", "neighbors"])
@pytest.mark.parametrize("relation", ["parent", "dataset", "successor_of"])
def test_relatives_protect_the_same_unit_and_neighbours(ledger: Ledger, other: Policy, relation: str) -> None:
    ledger.open_account("a", basic(), dataset="rivers")
    before = record(ledger)
    with pytest.raises(InvalidPolicy, match="'a'"):
        open_as(ledger, "b", other, relation, "rivers" if relation == "dataset" else "a")
    assert record(ledger) == before
    assert ledger.open_account("b", other).dataset == ""  # a stranger may protect something else


def open_as(ledger: Ledger, name: str, policy: Policy, relation: str, whom: str) -> None:
    relations = {"parent": "", "dataset": "", "successor_of": "", relation: whom}
    ledger.open_account(name, policy, **relations)


def test_a_block_of_a_block_s_dataset_is_compared_with_all_of_them(ledger: Ledger) -> None:
    ledger.open_account("jan", basic(), dataset="rivers")
    ledger.open_account("feb", basic(), dataset="rivers")
    assert ledger.account("feb").dataset == "rivers"
    ledger.account("jan").close()
    with pytest.raises(InvalidPolicy):
        ledger.open_account("mar", Policy(1, 0, filter="basic", privacy_unit="trip"), dataset="rivers")


@pytest.mark.parametrize("relation", ["parent", "successor_of"])
def test_a_relative_must_be_there(ledger: Ledger, relation: str) -> None:
    ledger.open_account("a", basic())
    for name in ("nobody", "b"):
        with pytest.raises(AccountNotFound):
            open_as(ledger, "b", basic(), relation, name)
    assert [one.name for one in ledger.accounts()] == ["a"]


# Closing.


def test_a_closed_account_takes_no_new_charges(ledger: Ledger, again: Callable[[], Ledger]) -> None:
    family(ledger)
    held = ledger.account("ana-maps").reserve(TENTH, expires=3600)
    kept = ledger.account("ana").reserve(TENTH)
    ledger.account("ana").close(note="the study is over")
    assert [one.name for one in ledger.accounts() if one.closed] == ["ana", "ana-maps"]
    before = totals_of(ledger)
    for name in ("ana", "ana-maps"):
        account = again().account(name)
        tries: list[Callable[[LedgerAccount], object]] = [
            lambda one: one.spend(PureDP(0)),
            lambda one: one.reserve(PureDP(0)),
            lambda one: one.spending(PureDP(0)).__enter__(),
            lambda one: ledger.spend({"ben": TENTH, one.name: PureDP(0)}),
            lambda one: ledger.open_account("below", basic(), parent=one.name),
        ]
        for attempt in tries:
            with pytest.raises(AccountClosed):
                attempt(account)
    assert totals_of(ledger) == before
    held.void("not run")
    kept.commit()
    assert [spent(ledger, name) * 10 for name in ("ana-maps", "ana", "top")] == [0, 1, 1]
    with pytest.raises(ReservationResolved):
        kept.void("not run")
    ledger.account("ben").spend(TENTH)  # the rest of the tree goes on
    ledger.verify()


def test_closing_again_writes_nothing(ledger: Ledger) -> None:
    family(ledger)
    ledger.account("top").close()
    assert all(one.closed for one in ledger.accounts())
    before = record(ledger)
    ledger.account("top").close()
    ledger.account("ana").close()
    assert record(ledger) == before


def test_linked_accounts_with_another_promise_have_no_epsilon_together(ledger: Ledger) -> None:
    first = ledger.open_account("v1", basic("1", "0"))
    second = ledger.open_account("v2", odo.Policy(rho="0.5", delta="1e-6"), successor_of=first)
    for account in (first, second):
        lifetime = account.lifetime
        assert lifetime is not None
        assert (lifetime.accounts, lifetime.epsilon, lifetime.delta) == (("v1", "v2"), None, Fraction(1, 10**6))
        assert str(lifetime) == "not one (epsilon, delta): see what each promises of v1, v2"
    assert second.spend(PureDP(0.1)).to_dict()["lifetimes"][0]["epsilon"] is None
