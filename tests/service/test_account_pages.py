"""The page of one account: pending reservations, who spent below it, readings above the promise, and its messages."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import cast

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_client import PYTHON, visitor_of
from service_server import ServiceThread

import odograph as odo
from odograph.errors import BadRequest, OdographError
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import moment
from odograph.ledger.epochs import Renewal, scheduled
from odograph.ledger.ledger import Ledger
from odograph.service.auth import Caller, Role
from odograph.service.dashboard import pages, view_models
from odograph.service.dashboard.charts import reading_at_limit
from odograph.service.dashboard.pages import page_wording
from odograph.service.dashboard.view_models import (
    account_page,
    list_entries,
    list_pending,
    make_plan,
    open_account_arguments,
    policy_from_form,
)
from odograph.service.visibility import problem_of

ROOMY = odo.Policy(1000, 0, filter="basic")
COST = odo.PureDP("0.01")
OWNER = Caller("ada", Role.OWNER, "0" * 12, None)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with odo.connect("memory://", principal="ana") as made:
        yield made


def open_family(ledger: Ledger) -> None:
    for name, parent in (("all", ""), ("jan", "all"), ("feb", "all")):
        ledger.open_account(name, ROOMY, parent=parent)


def test_the_page_of_an_epoch_has_what_its_schedule_promises(service: ServiceThread) -> None:
    """The sum over the accounts so far is no promise for a lifetime: there are epochs to come."""
    with odo.connect(service.settings.url) as ledger:
        own = cast("LocalBackend", ledger.backend)
        schedule = scheduled("monthly", str(moment(own.now()).date()), "12")
        step = own.renew(Renewal("census", schedule), odo.compile_policy(ROOMY), parent="", dataset="", note="")
    page = visitor_of(service).get(f"/accounts/{step.opens}").text
    assert f"By the schedule: {schedule.promise_text(ROOMY)}." in page


def test_a_page_names_the_first_and_the_last_of_many_linked_accounts(service: ServiceThread) -> None:
    with odo.connect(service.settings.url) as ledger:
        for i in range(13):
            ledger.open_account(f"a{i:02}", ROOMY, successor_of=f"a{i - 1:02}" if i else None)
    page = visitor_of(service).get("/accounts/a05").text
    (sentence,) = re.findall(r"over <a .*<a .*13 accounts.*", page)
    assert re.findall(r">(a\d+)</a>", sentence) == ["a00", "a12"]
    assert "</a> (13 accounts). Each has its own budget" in page


# Pending reservations.


def test_pending_reservations_are_paged_oldest_first_with_who_how_long_and_until_when(ledger: Ledger) -> None:
    account = ledger.open_account("census", ROOMY)
    for i in range(60):
        ledger.acting_as(f"runner-{i % 2}").account("census").reserve(
            odo.PureDP(f"0.{i + 1:03}"), expires=3600 if i % 3 else None, note=f"run {i}"
        )
    for one in account.pending[:4]:
        one.commit()
    found = list_pending(ledger, OWNER, "census", {})
    assert (found.count, len(found.rows), found.oldest) == (56, 25, found.ages[0])
    assert [row.note for row in found.rows] == [f"run {i}" for i in range(4, 29)]
    assert [row.principal for row in found.rows[:2]] == ["runner-0", "runner-1"]
    assert found.rows[0].id == "census#5"
    assert found.rows[0].costs == [odo.PureDP("0.005").to_dict()]
    assert [row.expires is None for row in found.rows[:3]] == [False, False, True]
    assert found.expired == [False] * 25
    seen = [row.note for row in found.rows]
    while found.next is not None:
        found = list_pending(ledger, OWNER, "census", {"pending": str(found.next)})
        seen += [row.note for row in found.rows]
    assert seen == [f"run {i}" for i in range(4, 60)]
    assert found.oldest == list_pending(ledger, OWNER, "census", {}).oldest
    with pytest.raises(BadRequest, match=r"pending must be an integer \(got 'x'\)"):
        list_pending(ledger, OWNER, "census", {"pending": "x"})


@pytest.mark.parametrize(
    ("ago", "told"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3 * 3600 + 5, "3 h"), (90_000, "1 d"), (-5, "0 s")],
)
def test_an_age_has_its_largest_unit(ago: int, told: str) -> None:
    now = datetime.now(UTC)
    assert view_models.age_of((now - timedelta(seconds=ago)).isoformat(), now) == told


def test_a_reservation_that_can_no_longer_be_voided_is_marked(ledger: Ledger) -> None:
    ledger.open_account("census", ROOMY).reserve(COST, expires=0.001)
    time.sleep(0.002)
    assert list_pending(ledger, OWNER, "census", {}).expired == [True]


def test_a_reservation_of_two_children_is_one_row_of_the_account_above(ledger: Ledger) -> None:
    open_family(ledger)
    ledger.reserve({"jan": COST, "feb": odo.PureDP("0.02")})
    ledger.account("all").reserve(odo.PureDP("0.03"))
    both, own = list_pending(ledger, OWNER, "all", {}).rows
    assert both.children == ["feb", "jan"]
    assert [cost["epsilon"] for cost in both.costs] == ["0.02", "0.01"]
    assert (own.children, [cost["epsilon"] for cost in own.costs]) == ([], ["0.03"])
    assert [row.children for row in list_pending(ledger, OWNER, "jan", {}).rows] == [[]]


def test_a_bound_key_sees_its_reservation_without_the_id_and_the_other_account(ledger: Ledger) -> None:
    open_family(ledger)
    ledger.reserve({"jan": COST, "feb": COST})
    caller = Caller("bob", Role.ANALYST, "1" * 12, frozenset({"jan"}))
    (row,) = list_pending(ledger, caller, "jan", {}).rows
    assert (row.id, row.children, len(row.costs)) == ("", [], 1)
    assert "feb#" not in str(account_page(ledger, caller, "jan", {}).json_representation)
    (seen,) = list_pending(ledger, OWNER, "jan", {}).rows
    assert seen.id == "feb#1"
    with pytest.raises(odo.errors.AccountNotFound):
        list_pending(ledger, caller, "feb", {})


def test_an_account_with_many_reservations_is_read_with_no_more_reads(ledger: Ledger) -> None:
    account = ledger.open_account("census", ROOMY)
    assert isinstance(ledger.backend, LocalBackend)
    store, reads = ledger.backend.store, list[int]()
    for count in (30, 300):
        for _ in range(count):
            account.reserve(COST)
        calls = 0
        kept = {name: getattr(store, name) for name in ("entries", "notes", "balances", "pending", "principals")}

        def counted(name: str, kept: Mapping[str, object] = kept) -> object:
            def call(*arguments: object) -> object:
                nonlocal calls
                calls += 1
                return kept[name](*arguments)  # type: ignore[operator]

            return call

        for name in kept:
            setattr(store, name, counted(name))
        account_page(ledger, OWNER, "census", {})
        for name in kept:
            delattr(store, name)
        reads.append(calls)
    assert reads[0] == reads[1]
    assert reads[0] < 40


# Who spent below it.


def test_entries_show_which_child_was_asked(ledger: Ledger) -> None:
    open_family(ledger)
    ledger.account("jan").spend(COST)
    ledger.account("all").spend(COST)
    held = ledger.reserve({"feb": COST, "jan": COST})
    held.void("not run")
    found = list_entries(ledger, OWNER, "all", ledger.account("all").size, {})
    assert found.asked == {1: "jan", 3: "feb", 4: "jan", 5: "feb", 6: "jan"}
    assert list_entries(ledger, OWNER, "jan", ledger.account("jan").size, {}).asked == {}
    # A key that does not see the child is told of none.
    caller = Caller("bob", Role.ANALYST, "1" * 12, frozenset({"all", "jan"}))
    assert list_entries(ledger, caller, "all", ledger.account("all").size, {}).asked == {1: "jan"}


# Readings above the promise.


def test_what_no_odometer_can_be_below_is_the_loss_that_gaussian_noise_reaches() -> None:
    found = reading_at_limit(odo.compile_policy(odo.Policy(1, "1e-6", filter="zcdp")))
    assert found is not None
    assert found.least is not None
    # The zCDP filter at (1, 1e-6), from its definition: rho + 2 sqrt(rho log 1/delta) = 1 bounds rho from below.
    with mpmath.workdps(30):
        root = (mpmath.sqrt(4 * mpmath.log(10**6) + 4) - 2 * mpmath.sqrt(mpmath.log(10**6))) / 2
        mean = root**2
        quantile = mpmath.sqrt(2) * mpmath.erfinv(1 - mpmath.mpf(2) * mpmath.mpf(10) ** -6)
        least = mean + mpmath.sqrt(2 * mean) * quantile
    assert found.least >= float(least) * 0.99
    assert 1.0 < found.least < found.usual < 1.3
    # 1.134 is the quantile of Gaussian noise that spends the exact budget of (1, 1e-6), 0.05415 of intrinsic time.
    spent = mpmath.mpf("0.05415")
    assert float(spent / 2 + mpmath.sqrt(spent) * quantile) == pytest.approx(1.134, abs=0.002)
    default = reading_at_limit(odo.compile_policy(odo.Policy(1, "1e-6")))
    assert default is not None
    assert default.least is not None
    assert 1.1 < default.least < 1.134


@pytest.mark.parametrize(
    "policy",
    [
        odo.Policy(1, 0, filter="basic"),
        odo.Policy(1, "1e-6", filter="paper"),
        odo.Policy(rho="0.1", delta="1e-6"),
        odo.Policy(None, "1e-6"),
    ],
    ids=str,
)
def test_where_readings_stay_below_the_promise_nothing_is_explained(policy: odo.Policy) -> None:
    assert reading_at_limit(odo.compile_policy(policy)) is None


@settings(max_examples=15, deadline=None)
@given(size=st.sampled_from(["0.004", "0.01", "0.02"]), gaussian=st.booleans())
def test_small_steps_to_the_limit_read_what_is_said_to_be_usual(size: str, *, gaussian: bool) -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", odo.Policy(1, "1e-6"))
        cost: odo.Guarantee = odo.GDP(size) if gaussian else odo.PureDP(size)
        times = account.how_many(cost)
        for _ in range(min(times, 800)):
            account.spend(cost)
        found = reading_at_limit(account.compiled)
        assert found is not None
        reading = account.reading().loss
        assert reading <= found.usual * 1.02
        if times <= 800 and gaussian:
            assert found.least is not None
            assert found.least * 0.95 <= reading


def test_the_page_explains_a_reading_above_the_promise_only_where_there_can_be_one(ledger: Ledger) -> None:
    ledger.open_account("above", odo.Policy(1, "1e-6"))
    ledger.open_account("below", odo.Policy(1, "1e-6", filter="paper"))
    assert account_page(ledger, OWNER, "above", {}).context["limit_reading"] is not None
    assert account_page(ledger, OWNER, "below", {}).context["limit_reading"] is None


# Messages.


FIELDS = {
    "name": "x",
    "promise": "epsilon",
    "epsilon": "1",
    "delta": "1e-6",
    "filter": "default",
    "reserve": "mixed",
    "odometer": "default",
    "slack": "",
    "delta_steps": "",
    "privacy_unit": "person",
    "neighbors": "add-remove",
}
WRONG = {
    "name": ["", "a b", "taken"],
    "promise": ["rho", "mu", "no limit", "?"],
    "epsilon": ["", "0", "-1", "1e9", "x", "nan"],
    "delta": ["", "0", "1", "-1", "x", "2", "1e-400"],
    "filter": ["zcdp", "basic", "renyi", "?"],
    "reserve": ["pure", "?", ""],
    "odometer": ["filter", "?"],
    "slack": ["0", "-1", "x"],
    "delta_steps": ["1e-7", "1", "x", "0"],
    "privacy_unit": ["", "\n", "day"],
    "neighbors": ["?"],
    "parent": ["nowhere", "closed", "taken", "bad name", "people"],
    "successor_of": ["nowhere", "taken"],
    "dataset": ["a b", "survey"],
    "note": ["\0", "x" * 10_001],
}


def stock(ledger: Ledger) -> None:
    ledger.open_account("taken", odo.Policy(1, "1e-6"), dataset="survey", key="used")
    ledger.open_account("closed", odo.Policy(1, "1e-6")).close()
    policies = {
        "rho": odo.Policy(rho="0.1", delta="1e-6"),
        "mu": odo.Policy(mu=1, delta="1e-6"),
        "none": odo.Policy(None, "1e-6"),
        **{kind: odo.Policy(1, "1e-6", filter=kind) for kind in ("zcdp", "renyi", "paper", "exact")},
        "basic": odo.Policy(1, 0, filter="basic"),
    }
    for name, policy in policies.items():
        ledger.open_account(name, policy)


def messages(ledger: Ledger) -> set[str]:
    """Fill the forms with everything that is wrong, one and two fields at a time; return what the page says."""
    said: set[str] = set()
    one = [{field: value} for field, values in WRONG.items() for value in values]
    some = {
        field: WRONG[field] for field in ("promise", "filter", "delta", "slack", "delta_steps", "reserve", "odometer")
    }
    two = [
        {first: left, second: right}
        for first, second in itertools.combinations(some, 2)
        for left, right in itertools.product(some[first], some[second])
    ]
    for changed in [*one, *two, {"name": "other", "key": "used"}]:
        form = FIELDS | changed
        try:
            policy = policy_from_form(form)
            if changed.keys() & {"name", "parent", "successor_of", "dataset", "note", "privacy_unit", "key"}:
                ledger.open_account(policy=policy, **open_account_arguments(form))
        except OdographError as error:
            said.add(page_wording(problem_of(error, OWNER).detail))
    kinds, sizes = ("pure", "approx", "zcdp", "gdp", "gaussian", "laplace", "menu:x", "?"), ("0.1", "x", "-1", "0")
    more: list[dict[str, str]] = [{}, {"delta": "1e-9", "sensitivity": "x"}, {"times": "x"}]
    for name, kind, size, extra in itertools.product(
        ("taken", "closed", "mu", "none", "zcdp", "paper", "exact", "basic"), kinds, sizes, more
    ):
        with suppress(OdographError):
            plan = make_plan(ledger, OWNER, name, {"kind": kind, "size": size, **extra})
            assert plan is not None
            said |= {plan.problem, plan.message, *plan.notes}
    return said


def test_no_message_of_a_page_advises_in_python(ledger: Ledger) -> None:
    stock(ledger)
    said = messages(ledger)
    assert len(said) > 100
    assert [one for one in said if PYTHON.search(one)] == []
    assert {"epsilon must not be negative (got '-1')", "sigma must be a finite number, such as 0.1 (got 'x')"} <= said
    assert any("choose the filter basic" in one for one in said)
    assert any("a policy with the filter zcdp would take it" in one for one in said)


def test_messages_that_are_not_reworded_are_caught(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    stock(ledger)
    monkeypatch.setattr(pages, "_WORDING", ())
    assert sum(bool(PYTHON.search(one)) for one in messages(ledger)) > 30


def test_messages_about_what_the_caller_wrote_stay_as_they_are() -> None:
    for text in (
        "name must be 1 to 100 letters, digits and any of . _ : @ + -, starting with a letter or digit (got 'a b')",
        "refused by 'x': 10% of the budget is left; PureDP(10) needs 1,000%. The largest that fits is PureDP(0.1)",
        "key 'a(b) must' was used before for another request (spend, census#4)",
    ):
        assert page_wording(text) == text


def test_a_population_has_no_page_and_says_what_to_do_without_python() -> None:
    told = page_wording(
        "'people' is a population: each person in it has a filter of their own, whose balance is secret. It is"
        " charged by Population.open('people', ...).charge(...)"
    )
    assert not PYTHON.search(told)
    assert told.endswith("A program charges it, where its files are")
