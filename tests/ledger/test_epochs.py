"""Budgets that renew: every moment has one epoch, every epoch one account at most, and the promises add up."""

from __future__ import annotations

import re
import time
from calendar import monthrange
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import Ledger, Policy, PureDP
from odograph.compile import compile_policy
from odograph.errors import AccountClosed, AccountNotFound, InvalidArgument, InvalidPolicy, LedgerBusy, LedgerCorrupt
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Open
from odograph.ledger.epochs import (
    EVERY,
    Epoch,
    Renew,
    Renewal,
    RenewalStep,
    Schedule,
    date_in,
    next_step,
    read_renewal,
    scheduled,
)
from odograph.ledger.results import Lifetime, linked
from odograph.ledger.stores.base import Head

BASIC = Policy(1, "1e-6", filter="basic")
MONTHLY = Renewal("census", scheduled("monthly", "2026-11-01"))
DAYS = st.dates(date(1990, 1, 1), date(2100, 12, 31))
SCHEDULES = st.builds(
    lambda every, first, times, days: Schedule(
        every, first, None if days else times, first + timedelta(days) if days else None
    ),
    st.sampled_from(EVERY),
    DAYS,
    st.none() | st.integers(1, 400),
    st.none() | st.integers(1, 2000),
)


def micros(day: date, hour: int = 0) -> int:
    return int(datetime(day.year, day.month, day.day, hour, tzinfo=UTC).timestamp()) * 1_000_000


# The calendar.


@given(SCHEDULES)
def test_epochs_follow_each_other_without_gap_or_overlap(schedule: Schedule) -> None:
    epochs = list(islice(schedule.epochs(), 60))
    assert epochs[0].first == schedule.first
    assert [epoch.number for epoch in epochs] == [*range(len(epochs))]
    for one, following in pairwise(epochs):
        assert one.first < one.end == following.first
    if schedule.length is not None and schedule.length <= len(epochs):
        assert (len(epochs), epochs[-1].end) == (schedule.length, schedule.end)
    else:
        assert len(epochs) == 60


@given(SCHEDULES, st.integers(-40, 700), st.integers(0, 23))
def test_every_moment_of_a_schedule_has_exactly_one_epoch(schedule: Schedule, days: int, hour: int) -> None:
    moment = micros(schedule.first + timedelta(days), hour)
    epochs = [one for one in islice(schedule.epochs(), 701) if one.start_time <= moment < one.end_time]
    inside = days >= 0 and (schedule.end is None or moment < micros(schedule.end))
    assert len(epochs) == inside
    assert schedule.epoch_at(moment) == (epochs[0] if inside else None)
    assert schedule.is_over(moment) == (days >= 0 and not inside)


@given(st.sampled_from(EVERY), DAYS)
def test_days_weeks_and_months_begin_where_the_first_one_did(every: str, first: date) -> None:
    for epoch in islice(Schedule(every, first).epochs(), 60):
        length = (epoch.end - epoch.first).days
        if every == "monthly":
            assert epoch.first.day == min(first.day, monthrange(epoch.first.year, epoch.first.month)[1])
            assert 28 <= length <= 31
        else:
            assert length == (7 if every == "weekly" else 1)
            assert every == "daily" or epoch.first.weekday() == first.weekday()


def test_months_end_with_their_last_day_in_leap_years_too() -> None:
    def firsts(day: str) -> list[str]:
        return [str(one.first)[5:] for one in islice(scheduled("monthly", day).epochs(), 4)]

    assert firsts("2027-12-31") == ["12-31", "01-31", "02-29", "03-31"]
    assert firsts("2026-12-30") == ["12-30", "01-30", "02-28", "03-30"]

    def naive(first: date, months: int) -> date:  # Control: it goes on from the epoch before, and loses days
        for _ in range(months):
            end = first.replace(day=monthrange(first.year, first.month)[1]) + timedelta(1)
            first = end.replace(day=min(first.day, monthrange(end.year, end.month)[1]))
        return first

    assert naive(date(2027, 12, 31), 3) == date(2028, 3, 29)


def test_an_epoch_begins_at_midnight_utc() -> None:
    schedule = scheduled("daily", "2026-11-01")
    before, after = (schedule.epoch_at(micros(date(2026, 11, 2)) + one) for one in (-1, 0))
    assert before == Epoch(0, date(2026, 11, 1), date(2026, 11, 2))
    assert after is not None
    assert after.number == 1


def test_until_cuts_the_last_epoch() -> None:
    schedule = scheduled("monthly", "2026-11-01", until="2027-01-15")
    assert [str(one.end) for one in schedule.epochs()] == ["2026-12-01", "2027-01-01", "2027-01-15"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("yearly", "2026-11-01"), "renew must be one of daily, weekly, monthly (got 'yearly')"),
        (("daily", "20261101"), "from must be a date such as 2026-11-01 (got '20261101')"),
        (("daily", None), "from must be a date such as 2026-11-01 (got None)"),
        (("daily", "2026-02-29"), "from must be a date such as 2026-11-01 (got '2026-02-29')"),
        (("daily", "9999-01-01"), "from must be a date such as 2026-11-01 (got '9999-01-01')"),
        (("daily", "2026-11-01", "0"), "times must be an integer from 1 to 10000 (got '0')"),
        (("daily", "2026-11-01", "1.5"), "times must be an integer from 1 to 10000 (got '1.5')"),
        (("daily", "2026-11-01", "10001"), "times must be an integer from 1 to 10000 (got '10001')"),
        (("daily", "2026-11-01", None, "2026-11-01"), "until must be after from, 2026-11-01 (got 2026-11-01)"),
        (("daily", "2026-11-01", "2", "2027-11-01"), "times ('2') and until ('2027-11-01') exclude each other"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_field(fields: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        scheduled(*fields)
    assert str(refused.value).startswith(message)


def test_the_longest_schedule_has_its_dates() -> None:
    schedule = scheduled("monthly", "9000-12-31", "10000")
    assert str(schedule.end) == "9834-04-30"
    assert str(scheduled("daily", "2026-11-01", until="9000-12-31").end) == "9000-12-31"


# The promise of all epochs.


@given(SCHEDULES, st.fractions(Fraction(1, 10**6), 10))
def test_the_promise_is_the_exact_sum_over_all_epochs(schedule: Schedule, epsilon: Fraction) -> None:
    policy = Policy(epsilon, "1e-6", filter="basic")
    promise = schedule.promise(policy)
    if schedule.length is not None:
        several = sum(1 for _ in schedule.epochs())
        assert promise == (several * epsilon, several * Fraction(1, 10**6))


@given(st.sampled_from(EVERY), DAYS, st.integers(0, 3))
def test_without_an_end_no_calendar_year_promises_more(every: str, first: date, years: int) -> None:
    schedule, year = Schedule(every, first), first.year + years
    of_year = [one for one in islice(schedule.epochs(), 366 * (years + 1)) if one.first.year == year]
    epsilon, delta = schedule.promise(BASIC)
    assert epsilon is not None
    assert len(of_year) <= epsilon
    assert len(of_year) * Fraction(1, 10**6) <= delta


def test_the_promise_in_words() -> None:
    twelve, endless = scheduled("monthly", "2026-11-01", "12"), scheduled("monthly", "2026-11-01")
    assert twelve.promise_text(BASIC) == (
        "at most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP, monthly from 2026-11-01 to 2027-11-01"
    )
    assert endless.promise_text(BASIC) == (
        "no bound in total, because it renews without an end; the epochs that begin in one calendar year promise at"
        " most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP"
    )
    zcdp = Policy(rho="0.1")
    assert twelve.promise(zcdp) == (None, Fraction(0))
    assert twelve.promise_text(zcdp) == "at most 12 times 0.1-zCDP, monthly from 2026-11-01 to 2027-11-01"
    texts = [str(one) for one in (twelve, endless, scheduled("daily", "2026-11-01", until="2027-01-01"))]
    assert texts == [
        "monthly from 2026-11-01, 12 times",
        "monthly from 2026-11-01",
        "daily from 2026-11-01 until 2027-01-01",
    ]


def test_a_long_chain_is_linked_quickly_and_named_in_brief() -> None:
    heads = [Head(f"d{i:04}", "", f"d{i - 1:04}" if i else "", "", "person", "add-remove") for i in range(4000)]
    names = linked(heads, "d2000")
    assert names == [head.name for head in heads]
    text = str(Lifetime(tuple(names), Fraction(4000), Fraction(0)))
    assert text == "(4000, 0)-DP over d0000, ..., d3999 (4,000 accounts)"


# Renewing, on a store whose clock the test sets.


class Clock:
    """The store's clock: nanoseconds since 1970."""

    def __init__(self, day: str) -> None:
        self.set(day)

    def set(self, day: str) -> None:
        self.now = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 10**9

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock("2026-11-10")
    monkeypatch.setattr(time, "time_ns", found)
    return found


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"
    assert clock.now
    with odo.connect(url, principal="ana") as found:
        yield found


def backend(ledger: Ledger) -> LocalBackend:
    return cast("LocalBackend", ledger.backend)


def renew(ledger: Ledger, renewal: Renewal = MONTHLY) -> RenewalStep:
    return backend(ledger).renew(renewal, compile_policy(BASIC), parent="", dataset="", note="")


def open_accounts(ledger: Ledger) -> list[str]:
    return [one.name for one in ledger.accounts() if not one.closed]


def by_name_only(ledger: Ledger, renewal: Renewal = MONTHLY) -> str:
    """Control: open the epoch of the clock if there is no account of that name."""
    epoch = renewal.schedule.epoch_at(backend(ledger).now())
    assert epoch is not None
    name = renewal.name_of(epoch)
    return "" if name in {one.name for one in ledger.accounts()} else name


def test_each_epoch_opens_one_account_after_the_one_before_it(ledger: Ledger, clock: Clock) -> None:
    assert renew(ledger).opens == "census@2026-11-01"
    entries = backend(ledger).checkpoint()
    assert not renew(ledger).opens
    assert backend(ledger).checkpoint() == entries  # repeated, it writes nothing
    held = ledger.current("census").reserve(PureDP("0.5"), key="q-1")
    clock.set("2026-12-01")
    step = renew(ledger)
    assert (step.opens, step.closes) == ("census@2026-12-01", ("census@2026-11-01",))
    assert open_accounts(ledger) == ["census@2026-12-01"]
    assert ledger.account("census@2026-12-01").history()[0].entry.details["successor_of"] == "census@2026-11-01"
    held.commit()  # reservations of a closed account can still be resolved
    with pytest.raises(AccountClosed):
        ledger.account("census@2026-11-01").spend(PureDP("0.1"))
    receipt = ledger.current("census").spend(PureDP(1), key="q-2")
    assert (
        "lifetime promise (2, 2e-06)-DP over census@2026-11-01, census@2026-12-01; by the schedule no bound"
        in str(receipt)
    )
    assert ledger.verify().entries == 6


def test_the_first_account_of_a_schedule_has_a_lifetime_promise_too(ledger: Ledger) -> None:
    renew(ledger, Renewal("census", scheduled("monthly", "2026-11-01", "12")))
    account = ledger.current("census")
    assert str(account.lifetime) == (
        "(1, 1e-06)-DP over census@2026-11-01; by the schedule at most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP,"
        " monthly from 2026-11-01 to 2027-11-01"
    )
    assert f"Lifetime promise: {account.lifetime}" in re.sub("<[^>]*>", "", account._repr_html_())
    assert account.spend(PureDP("0.1"), key="q").lifetimes == (account.lifetime,)
    assert account.spend(PureDP("0.1"), key="q").lifetimes == (account.lifetime,)
    other = ledger.open_account("other", BASIC)
    assert other.lifetime is None
    assert "Lifetime" not in other._repr_html_()
    ledger.verify()


def test_what_is_linked_beside_a_schedule_is_added_to_its_promise(ledger: Ledger) -> None:
    """Neither the epochs to come nor the account that was opened by hand may be left out of what is printed."""
    renew(ledger, Renewal("census", scheduled("monthly", "2026-11-01", "12")))
    extra = ledger.open_account("extra", Policy(5, 1e-6, filter="basic"), successor_of="census@2026-11-01")
    text = (
        "(6, 2e-06)-DP over census@2026-11-01, extra; by the schedule at most (12, 1.2e-05)-DP, 12 times"
        " (1, 1e-06)-DP, monthly from 2026-11-01 to 2027-11-01; beside it (5, 1e-06)-DP over extra"
    )
    assert str(ledger.current("census").lifetime) == str(extra.lifetime) == text
    assert [str(one) for one in extra.spend(PureDP("0.1")).lifetimes] == [text]
    ledger.open_account("third", Policy(rho=1), successor_of="extra")
    assert str(extra.lifetime).endswith("beside it not one (epsilon, delta): see what each promises of extra, third")


def test_a_copy_keeps_the_schedule(ledger: Ledger, tmp_path: Path) -> None:
    renew(ledger)
    checkpoint = ledger.backup(tmp_path / "copy.db")
    with odo.connect(f"sqlite:///{tmp_path}/restored.db") as restored:
        restored.restore(tmp_path / "copy.db", checkpoint=checkpoint)
        restored.verify()
        assert backend(restored).opened("census@2026-11-01").renewal == MONTHLY
        assert restored.current("census").spend(PureDP("0.1")).lifetimes
        assert not renew(restored).opens


def test_missed_epochs_are_not_opened(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    clock.set("2027-05-05")
    assert renew(ledger).previous == "census@2026-11-01"
    assert [one.name for one in ledger.accounts()] == ["census@2026-11-01", "census@2027-05-01"]


def test_a_clock_that_is_set_back_opens_nothing_and_reopens_nothing(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    clock.set("2027-05-05")
    renew(ledger)
    for day in ("2026-11-20", "2026-12-20", "2027-04-30", "2027-05-02", "2020-01-01"):
        clock.set(day)
        step = renew(ledger)
        assert (step.opens, step.closes) == ("", ())
        assert open_accounts(ledger) == ["census@2027-05-01"]
    clock.set("2026-12-20")
    assert by_name_only(ledger) == "census@2026-12-01"  # Control: a second budget, for an epoch before the newest
    assert ledger.verify().entries == 3


def test_a_clock_that_jumped_ahead_keeps_the_epochs_before_it_closed(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    clock.set("2036-01-10")
    assert renew(ledger).opens == "census@2036-01-01"
    clock.set("2026-12-10")  # corrected
    assert not renew(ledger).opens
    assert by_name_only(ledger) == "census@2026-12-01"  # Control
    assert ledger.current("census").name == "census@2036-01-01"
    clock.set("2036-02-01")
    assert renew(ledger).opens == "census@2036-02-01"


def test_an_account_that_was_closed_stays_closed_until_the_next_epoch(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    ledger.current("census").close()
    assert not renew(ledger).opens
    with pytest.raises(AccountClosed, match="'census@2026-11-01' is the newest account of 'census' and is closed"):
        ledger.current("census")
    clock.set("2026-12-10")
    assert renew(ledger).opens == "census@2026-12-01"
    assert ledger.current("census").name == "census@2026-12-01"


def test_an_account_of_another_promise_is_no_epoch_whatever_its_name(ledger: Ledger, clock: Clock) -> None:
    """An owner may open an account under the name of an epoch; renewing stops there, and closes nothing for it."""
    renew(ledger)
    ledger.open_account("census@2026-12-01", Policy(10, "1e-6", filter="basic"))
    for day in ("2026-11-20", "2026-12-10", "2027-01-10"):
        clock.set(day)
        with pytest.raises(InvalidPolicy, match="schedule must be that of 'census@2026-12-01', an account by itself"):
            renew(ledger)
        assert open_accounts(ledger) == ["census@2026-11-01", "census@2026-12-01"]


def test_nothing_is_opened_before_and_after_and_the_last_account_is_closed(ledger: Ledger, clock: Clock) -> None:
    renewal = Renewal("census", scheduled("weekly", "2026-11-09", "2"))
    clock.set("2026-11-08")
    assert renew(ledger, renewal) == RenewalStep(None, "", "", ())
    for day, name in (("2026-11-09", "census@2026-11-09"), ("2026-11-22", "census@2026-11-16")):
        clock.set(day)
        assert renew(ledger, renewal).opens == name
    clock.set("2026-11-23")
    assert renew(ledger, renewal) == RenewalStep(None, "census@2026-11-16", "", ("census@2026-11-16",))
    assert open_accounts(ledger) == []
    clock.set("2026-11-20")
    assert renew(ledger, renewal).opens == ""
    ledger.verify()


def prepared(ledger: Ledger, principal: str = "ana") -> tuple[Renew, Open]:
    """What a program has prepared, from what it read, and would submit."""
    own = backend(ledger).acting_as(principal)
    step = own.next_step(MONTHLY)
    assert step.epoch is not None
    head = Head(step.opens, "", step.previous, "", "person", "add-remove")
    opening = Open(own.author(MONTHLY.key_of(step.epoch)), head, compile_policy(BASIC), renewal=MONTHLY.to_dict())
    return Renew(opening, step.epoch, step.previous if step.previous in step.closes else ""), opening


def test_a_program_that_was_held_up_does_not_open_an_epoch_that_is_over(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    clock.set("2026-12-31T23:59:59")
    late, naive = prepared(ledger)
    clock.set("2027-01-01")
    with pytest.raises(LedgerBusy, match="the epoch of 'census@2026-12-01' is not the current one"):
        backend(ledger).engine.submit(late)
    assert open_accounts(ledger) == ["census@2026-11-01"]
    backend(ledger).engine.submit(naive)  # Control: by the clock of the program, outside of the transaction
    assert "census@2026-12-01" in open_accounts(ledger)


def test_of_two_programs_with_clocks_apart_the_second_opens_nothing(ledger: Ledger, clock: Clock) -> None:
    renew(ledger)
    clock.set("2026-12-31")
    late, naive = prepared(ledger, "ben")
    clock.set("2027-01-01")
    renew(ledger)
    clock.set("2026-12-31")  # set back between the two
    with pytest.raises(LedgerBusy, match="'census@2026-11-01' was renewed or closed meanwhile"):
        backend(ledger).engine.submit(late)
    assert open_accounts(ledger) == ["census@2027-01-01"]
    backend(ledger).engine.submit(naive)  # Control: two open accounts, for an epoch before the newest
    assert open_accounts(ledger) == ["census@2026-12-01", "census@2027-01-01"]


def test_two_programs_that_renew_the_same_epoch_open_it_once(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew(ledger)
    clock.set("2026-12-10")
    submit = backend(ledger).engine.submit

    def interrupted(others: str) -> Callable[[Renew], object]:
        def submit_after(command: Renew) -> object:
            if others:
                monkeypatch.setattr(backend(ledger).engine, "submit", submit)
                renew(ledger.acting_as(others))
            return submit(command)

        return submit_after

    monkeypatch.setattr(backend(ledger).engine, "submit", interrupted("ben"))
    assert renew(ledger).opens == ""  # ben was faster
    clock.set("2027-01-10")
    monkeypatch.setattr(backend(ledger).engine, "submit", interrupted("ana"))
    assert renew(ledger).opens == "census@2027-01-01"  # the same principal and key: the same account
    assert open_accounts(ledger) == ["census@2027-01-01"]
    ledger.verify()


def test_a_state_that_changes_at_every_attempt_is_an_error(
    ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew(ledger)
    clock.set("2026-12-01")

    def always_late(_: object) -> None:
        raise LedgerBusy("the epoch is not the current one")

    monkeypatch.setattr(backend(ledger).engine, "submit", always_late)
    with pytest.raises(LedgerBusy, match="'census' could not be renewed: the state changed each time"):
        renew(ledger)


# Choosing the current account.


def test_the_current_account_is_the_newest_one_of_that_name(ledger: Ledger) -> None:
    ledger.open_account("census", BASIC)
    ledger.open_account("census@later", BASIC)
    ledger.open_account("census-2@2027-01-01", BASIC)
    with pytest.raises(AccountNotFound, match="'census' has no account of an epoch"):
        ledger.current("census")
    renew(ledger)
    assert ledger.current("census").name == "census@2026-11-01"
    with pytest.raises(InvalidArgument):
        ledger.current("")


@given(st.lists(DAYS, unique=True), DAYS)
def test_only_an_epoch_later_than_every_account_is_opened(days: list[date], now: date) -> None:
    renewal = Renewal("b", Schedule("daily", date(2000, 1, 1)))
    step = next_step(renewal, {f"b@{day}": False for day in days}, micros(now))
    later = now >= date(2000, 1, 1) and all(now > day for day in days)
    assert step.opens == (f"b@{now}" if later else "")
    kept = set() if later else {f"b@{max(days)}"} if days else set()
    assert {*step.closes} == {f"b@{day}" for day in days} - kept


def test_a_schedule_that_cannot_be_read_is_damage(ledger: Ledger) -> None:
    renew(ledger)
    entry = ledger.current("census").history()[0].entry
    assert read_renewal(entry) == MONTHLY
    broken = entry._replace(detail=entry.detail.replace('"renew":"monthly"', '"renew":"hourly"'))
    with pytest.raises(LedgerCorrupt, match="entry census@2026-11-01#0: its schedule cannot be read"):
        read_renewal(broken)
    assert date_in("2026-11-1") is None
