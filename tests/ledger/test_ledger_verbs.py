"""The verbs of a ledger, beyond the contract of an account: other principals, several accounts, the clock."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import (
    Accountant,
    BudgetExceeded,
    Guarantee,
    Ledger,
    LedgerAccount,
    Policy,
    PureDP,
    Reservation,
    session,
)
from odograph.errors import AccountClosed, EntryNotFound, InvalidGuarantee, ReservationNotFound, ReservationResolved
from odograph.ledger import commands
from odograph.ledger.entries import stamp
from odograph.ledger.results import HistoryEntry

UNIT = 10**15
TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")


@pytest.fixture
def account(ledger: Ledger) -> LedgerAccount:
    ledger.open_account("top", BASIC)
    return ledger.open_account("ana", BASIC, parent="top")


def spent(account: LedgerAccount) -> Fraction:
    return Fraction(account.totals.amounts[1], UNIT)


def tenths(account: LedgerAccount) -> tuple[Fraction | int, Fraction | int]:
    """What the account and the one above it have spent."""
    assert account.parent is not None
    return spent(account) * 10, spent(account.parent) * 10


def expired(account: LedgerAccount, cost: Guarantee = TENTH) -> Reservation:
    """A reservation whose time is over, by a clock that the store cannot be behind of for long."""
    reservation = account.reserve(cost, expires=timedelta(milliseconds=1))
    assert reservation.expires is not None
    while datetime.now(UTC) <= reservation.expires + timedelta(milliseconds=20):
        time.sleep(0.01)
    return reservation


def test_a_reservation_is_resolved_once(ledger: Ledger, account: LedgerAccount) -> None:
    kept, taken_back = account.reserve(TENTH), account.reserve(TENTH)
    first, void = kept.commit(), taken_back.void("not run")
    before = ledger.checkpoint()
    assert (kept.commit().lines, ledger.commit(kept.id).time) == (first.lines, first.time)
    assert (taken_back.void("for another reason").lines, void.repeated) == (void.lines, False)
    assert kept.commit().repeated
    with pytest.raises(ReservationResolved):
        kept.void("not run")
    with pytest.raises(ReservationResolved):
        taken_back.commit()
    assert ledger.checkpoint() == before
    assert tenths(account) == (1, 1)


def test_any_principal_and_process_may_resolve(
    ledger: Ledger, account: LedgerAccount, again: Callable[[], Ledger]
) -> None:
    first, second = account.reserve(TENTH), account.reserve(TENTH)
    other = again().acting_as("operations")
    assert other.reservation(first.id).expires == first.expires
    other.void(first.id, "the worker died before it read any data")
    other.commit(second.id)
    assert tenths(account) == (1, 1)
    with pytest.raises(ReservationResolved):
        first.commit()
    second.commit()
    ledger.verify()


@pytest.mark.parametrize("name", ["ana#1", "ana#2", "ana#99", "bob#1", "top#1", "ana", "#1", "ana#", "", "ana#1#1"])
def test_what_is_no_reservation_cannot_be_resolved(ledger: Ledger, account: LedgerAccount, name: str) -> None:
    account.spend(TENTH, key="q")
    with pytest.raises(BudgetExceeded):
        account.reserve(PureDP(2))
    before = ledger.checkpoint()
    for action in (ledger.commit, lambda one: ledger.void(one, "x"), ledger.reservation):
        with pytest.raises(ReservationNotFound):
            action(name)
    assert ledger.checkpoint() == before


@pytest.mark.parametrize("name", ["ana#-1", "ana#+1", "ana#01", "ana#١", "ana#1 "])
def test_a_number_written_oddly_is_no_reservation(ledger: Ledger, account: LedgerAccount, name: str) -> None:
    account.reserve(TENTH)
    with pytest.raises(ReservationNotFound):
        ledger.void(name, "x")
    with pytest.raises(ReservationNotFound):
        ledger.reservation(name)
    assert tenths(account) == (1, 1)


@pytest.mark.parametrize("number", [2**63, 10**40])
def test_a_number_beyond_every_entry_is_no_reservation(ledger: Ledger, account: LedgerAccount, number: int) -> None:
    account.reserve(TENTH)
    with pytest.raises(ReservationNotFound):
        ledger.void(f"ana#{number}", "x")
    with pytest.raises((EntryNotFound, ReservationNotFound)):
        ledger.erase_note(f"ana#{number}")
    assert tenths(account) == (1, 1)


def test_expiry_writes_nothing_and_only_forbids_void(ledger: Ledger, account: LedgerAccount) -> None:
    reservation = account.reserve(TENTH, expires=3600)
    reservation.void("in time")
    assert tenths(account) == (0, 0)
    late = expired(account)
    before = ledger.checkpoint()
    with pytest.raises(ReservationResolved, match="expire"):
        late.void("too late")
    assert ledger.checkpoint() == before
    assert tenths(account) == (1, 1)
    assert late.commit().verb == "commit"
    assert tenths(account) == (1, 1)
    ledger.verify()


def test_a_reservation_that_expired_unresolved_stays_charged(ledger: Ledger, account: LedgerAccount) -> None:
    late = expired(account, PureDP(1))
    with pytest.raises(BudgetExceeded):
        account.spend(PureDP("1e-15"))
    assert [one.id for one in account.pending] == [late.id]
    ledger.verify()


def test_a_reservation_over_several_accounts_is_resolved_as_one(ledger: Ledger, account: LedgerAccount) -> None:
    ben = ledger.open_account("ben", BASIC, parent="top")
    held = ledger.reserve({"ana": TENTH, "ben": PureDP(0.2)})
    assert [one.id for one in ben.pending] == [one.id for one in account.pending] == [held.id]
    assert (tenths(account), tenths(ben)) == ((1, 3), (2, 3))
    held.void("not run")
    assert (tenths(account), tenths(ben)) == ((0, 0), (0, 0))
    assert ben.pending == account.pending == ()
    assert ledger.account("top").totals.steps == 0
    ledger.verify()


# Spending as a block.


def test_a_block_reserves_and_commits(ledger: Ledger, account: LedgerAccount) -> None:
    with account.spending(TENTH, key="q") as reservation:
        assert tenths(account) == (1, 1)
        assert [one.id for one in account.pending] == [reservation.id]
    assert account.pending == ()
    assert [past.entry.verb for past in account.history()[1:]] == ["reserve", "commit"]
    with pytest.raises(ReservationResolved):
        ledger.void(reservation.id, "x")


# Asking.


def test_asking_writes_nothing(ledger: Ledger, account: LedgerAccount) -> None:
    account.spend(TENTH)
    before = ledger.checkpoint()
    twin = Accountant(BASIC)
    twin.spend(TENTH)
    assert account.decide(PureDP("0.9")).admitted
    refusal = account.decide(PureDP("0.91"))
    assert (refusal.admitted, refusal.largest) == (False, PureDP("0.9"))
    assert account.largest(PureDP) == twin.largest(PureDP) == PureDP("0.9")
    assert account.largest(PureDP, times=9) == PureDP("0.1")
    assert account.quote([PureDP("0.4"), PureDP("0.5")]).admitted
    assert not account.quote([PureDP("0.4"), PureDP("0.51")]).admitted
    assert account.reading() == twin.reading()
    assert account.compare() == twin.compare()
    repr(account), account.children, account.lifetime
    ledger.verify()
    assert ledger.checkpoint() == before


def test_a_closed_account_admits_nothing_when_asked_either(ledger: Ledger, account: LedgerAccount) -> None:
    ledger.account("top").close()
    for ask in (account.decide, lambda cost: account.quote([cost]), lambda cost: ledger.decide({"ana": cost})):
        with pytest.raises(AccountClosed):
            ask(PureDP(0))
    assert account.largest(PureDP) is None


# Time.


def test_time_is_the_store_s_and_never_earlier_than_the_last_entry(
    ledger: Ledger, account: LedgerAccount, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where.startswith("postgresql"):
        pytest.skip("PostgreSQL has its server's clock, and a test cannot set that")
    before = account.spend(TENTH).time
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 3600 * 10**9)  # the clock was set back by an hour
    receipt = account.spend(TENTH)
    other = ledger.open_account("other", BASIC)
    assert before <= receipt.time <= other.history()[0].entry.moment + timedelta(hours=1)
    ledger.spend({"other": TENTH, "ana": TENTH})
    account.reserve(TENTH, expires=60).void("in time")  # its time counts from the entry, not from the clock
    held = account.reserve(TENTH, expires=60)
    assert held.expires is not None
    assert held.expires >= receipt.time + timedelta(seconds=60)
    account.close()
    for one in ledger.accounts():
        times = [past.entry.time for past in one.history()]
        assert times == sorted(times), one.name
    ledger.verify()
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    ledger.verify()  # needs no clock


def test_an_expired_reservation_stays_expired_when_the_clock_is_set_back(
    ledger: Ledger, account: LedgerAccount, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where.startswith("postgresql"):
        pytest.skip("PostgreSQL has its server's clock, and a test cannot set that")
    now = time.time_ns()
    held = account.reserve(TENTH, expires=60)
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
    account.spend(TENTH)  # the account has seen the later time
    monkeypatch.setattr(time, "time_ns", lambda: now)
    with pytest.raises(ReservationResolved):
        held.void("not run")
    assert tenths(account) == (2, 2)
    ledger.verify()


def test_voids_are_counted_in_every_account_that_was_charged(ledger: Ledger, account: LedgerAccount) -> None:
    account.spend(PureDP("0.01"))
    for number in range(4):
        reservation = account.reserve(PureDP("0.01"))
        (reservation.commit if number == 1 else lambda one=reservation: one.void("not run"))()
    account.reserve(PureDP("0.01"))
    assert (account.voids, ledger.account("top").voids) == (3, 3)


def test_a_cost_that_was_trusted_is_in_the_history_and_under_the_seal(account: LedgerAccount, ledger: Ledger) -> None:
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    rows = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    count = rows >> dp.t.then_count() >> dp.m.then_laplace(scale=4.0)
    with session(account) as s:
        with pytest.raises(InvalidGuarantee, match="is less"):
            s.run(count, [1, 2], cost=TENTH)
        assert tenths(account) == (0, 0)
        s.run(count, [1, 2], cost=TENTH, note="visits", trust_cost=True)
    assert tenths(account) == (1, 1)
    reserved = next(past for past in account.history() if past.entry.verb == "reserve")
    assert reserved.note.startswith("visits; trust_cost=True: cost=PureDP(0.1) is less")
    assert "PureDP(0.25)" in reserved.note
    assert reserved.entry.note  # the note's digest, which the seal covers
    assert ledger.verify()


def test_an_entry_names_its_principal_and_is_sealed(account: LedgerAccount) -> None:
    receipt = account.spend(TENTH, note="visits")
    opened, entry = account.history()
    assert {opened.principal, entry.principal} == {"ana"}
    assert (entry.seal, entry.entry.id, entry.entry.verb) == (receipt.lines[0].seal, receipt.id, "spend")
    assert entry.entry.reseal(opened.seal) == entry.seal
    assert entry.to_dict()["sealed"]["cost"] == entry.entry.cost


def test_a_receipt_has_the_decision_that_admitted_it_only_when_it_is_new(account: LedgerAccount, where: str) -> None:
    receipt, again = account.spend(TENTH, key="q"), account.spend(TENTH, key="q")
    assert again.decision is None
    held = account.reserve(TENTH)
    assert held.commit().decision is None
    if where.startswith("http"):
        assert receipt.decision is held.receipt.decision is None  # it would make every receipt longer
        return
    assert receipt.decision is not None
    assert held.receipt.decision is not None
    assert receipt.decision.totals_after.amounts[1] == UNIT // 10
    assert held.receipt.decision.totals_after == account.totals
    assert held.receipt.decision.left == {"delta": 0.0, "epsilon": 0.8}


def test_a_parent_is_given_as_an_account_or_by_name(ledger: Ledger, account: LedgerAccount) -> None:
    top = account.parent
    assert top is not None
    ben = ledger.open_account("ben", BASIC, parent=top)
    assert ben.parent == top
    assert [*top.children] == ["ana", "ben"]
    later = ledger.open_account("later", BASIC, successor_of=ben)
    assert later.lifetime is not None
    assert later.lifetime.accounts == ("ben", "later")
    with odo.connect("memory://") as other:
        stranger = other.open_account("top", BASIC)
        with pytest.raises(odo.errors.LedgerError, match="another ledger"):
            ledger.open_account("eve", BASIC, parent=stranger)
    assert [*top.children] == ["ana", "ben"]


def test_a_mechanism_that_raises_names_its_entry(account: LedgerAccount) -> None:
    with session(account) as s, pytest.raises(ZeroDivisionError) as caught:
        s.run(lambda: 1 / 0, cost=TENTH)
    entry = next(past.entry for past in account.history() if past.entry.verb == "reserve")
    (note,) = caught.value.__notes__
    assert f"charged to 'ana' (entry {entry.id}, key {entry.key}) before" in note


def days_ahead(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> float:
    """Let the clock jump ahead once, then use every verb; return by how many days the later entries are ahead."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 73 * 365 * 86400 * 10**9)
    ledger.spend({"ana": TENTH}, key="ahead")
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**6)
    other = ledger.open_account("other", BASIC, dataset="")
    ledger.spend({"other": TENTH, "ana": TENTH})
    account = ledger.account("ana")
    account.reserve(TENTH, expires=60).void("in time")
    account.reserve(TENTH, expires=60).commit()
    with pytest.raises(BudgetExceeded):
        account.spend(PureDP(7))
    account.close()
    later: list[HistoryEntry] = [*account.history(2), *other.history()]
    assert {past.entry.verb for past in later} == {"open", "spend", "reserve", "void", "commit", "refuse", "close"}
    return max(past.entry.time - now // 1000 for past in later) / 86400e6


@pytest.fixture
def jumping(where: str, account: LedgerAccount, ledger: Ledger) -> Ledger:
    if where.startswith("postgresql"):
        pytest.skip("PostgreSQL has its server's clock, and a test cannot set that")
    assert account.name == "ana"
    return ledger


def test_a_clock_that_jumped_ahead_once_does_not_stamp_later_entries(
    jumping: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert days_ahead(jumping, monkeypatch) < 1 / 24
    found = jumping.verify()
    assert found.set_back == ("ana#2", "top#2")
    assert "the clock was set back before ana#2 and 1 more: times before or after it are wrong" in str(found)
    file = io.StringIO()
    jumping.export(file)
    with odo.connect("memory://") as copy:
        assert copy.import_(io.StringIO(file.getvalue()), checkpoint=found.checkpoint).set_back == ("ana#2", "top#2")
        assert copy.verify() == found


def test_a_ledger_whose_time_never_goes_back_is_caught(jumping: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "stamp", lambda now, before: max([now, *before]))
    assert days_ahead(jumping, monkeypatch) > 365


def test_a_reservation_that_expired_cannot_be_voided_by_setting_the_clock_back(
    jumping: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, now = jumping.account("ana"), time.time_ns()
    held = account.reserve(TENTH, expires=60)
    monkeypatch.setattr(time, "time_ns", lambda: now + 2 * 3600 * 10**9)
    account.spend(TENTH)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    with pytest.raises(ReservationResolved, match="expired"):
        held.void("too late")


@given(now=st.integers(0, 10**17), before=st.lists(st.integers(0, 10**17), max_size=6))
def test_the_time_of_an_entry_is_bounded_and_goes_back_by_more_than_an_hour_or_not_at_all(
    now: int, before: list[int]
) -> None:
    time_ = stamp(now, before)
    assert now <= time_ <= now + 3_600_000_000 * len(before)
    assert all(last <= time_ or last - time_ > 3_600_000_000 for last in before)


@given(st.integers(0, 10**17), st.lists(st.integers(0, 3_600_000_000), max_size=6))
def test_the_time_of_an_entry_is_the_last_one_s_after_a_small_correction(now: int, ahead: list[int]) -> None:
    assert stamp(now, [now + one for one in ahead]) == max([now, *(now + one for one in ahead)])
