"""The contract of an account, clause by clause, on an account in memory, on every store and behind a service.

A clause is a function of `Opening`, which opens accounts of one kind. Broken accounts are caught by the same clauses.
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Context
from fractions import Fraction
from typing import Any, Protocol

import pytest
from async_accounts import LoopThread, WaitedAccount
from charge_history import charges
from service_server import ServiceThread

import odograph as odo
from odograph import (
    GDP,
    RDP,
    ZCDP,
    Account,
    Accountant,
    ApproxDP,
    BudgetExceeded,
    Decision,
    Guarantee,
    IdempotencyConflict,
    Ledger,
    LedgerAccount,
    Policy,
    ProbDP,
    PureDP,
    Receipt,
    Reservation,
    UnprovenComposition,
)
from odograph.client.asynchronous import AsyncAccount, AsyncLedger
from odograph.core.filters import SmoothMeter
from odograph.core.filters.smooth import effective_reserve
from odograph.core.guarantees import Interactive
from odograph.core.policy import Compiled
from odograph.errors import (
    AccountClosed,
    AccountExists,
    InvalidArgument,
    InvalidGuarantee,
    InvalidPolicy,
    ReservationResolved,
)
from odograph.ledger.results import COLUMNS, History, HistoryEntry

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
UNIT = 10**15
TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")
EXACT = Policy(1, 1e-6)
GAUSSIAN = GDP("0.04")
COMPACT: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": False}


class Opening(Protocol):
    """Open an account of one kind, with a parent of the same kind or none."""

    def __call__(self, name: str, policy: Policy | Compiled = BASIC, parent: Account | None = None) -> Account: ...


def in_memory(kind: type[Accountant] = Accountant) -> Opening:
    def opening(name: str, policy: Policy | Compiled = BASIC, parent: Account | None = None) -> Account:
        assert parent is None or isinstance(parent, Accountant)
        return kind(policy, name=name, parent=parent)

    return opening


def in_ledger(ledger: Ledger) -> Opening:
    def opening(name: str, policy: Policy | Compiled = BASIC, parent: Account | None = None) -> Account:
        assert parent is None or isinstance(parent, LedgerAccount)
        return ledger.open_account(name, policy, parent=parent)

    return opening


@contextmanager
def in_event_loop(service: ServiceThread) -> Iterator[Opening]:
    """Open accounts with the async client."""
    with LoopThread() as run:
        ledger = odo.aconnect(service.url, token=service.token("ana"))

        def opening(name: str, policy: Policy | Compiled = BASIC, parent: Account | None = None) -> Account:
            assert parent is None or isinstance(parent, WaitedAccount)
            above = None if parent is None else parent.awaited
            return WaitedAccount(run, run(ledger.open_account(name, policy, parent=above)))

        yield opening
        if run(ledger.accounts()):
            run(ledger.verify())
        run(ledger.close())


@pytest.fixture(params=["accountant", "memory", "sqlite", "postgres", "service", "async service"])
def opening(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Opening]:  # noqa: ANN401  a path
    if request.param == "accountant":
        yield in_memory()
        return
    if request.param == "async service":
        with in_event_loop(request.getfixturevalue("service")) as found:
            yield found
        return
    token = None
    if request.param == "service":
        service = request.getfixturevalue("service")
        url, token = service.url, service.token("ana")
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
    else:
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url, token=token) if token else odo.connect(url, principal="ana") as ledger:
        yield in_ledger(ledger)
        if ledger.accounts():
            ledger.verify()


Clause = Callable[[Opening], None]
CLAUSES: dict[str, Clause] = {}


def clause(check: Clause) -> Clause:
    CLAUSES[check.__name__] = check
    return check


# What clauses look at.


def pair(opening: Opening) -> tuple[Account, Account]:
    """An account and the one above it."""
    top = opening("top")
    return opening("ana", parent=top), top


def tenths(*accounts: Account) -> tuple[Fraction | int, ...]:
    return tuple(Fraction(account.totals.amounts[1], UNIT) * 10 for account in accounts)


def state(*accounts: Account) -> list[object]:
    """Everything that a charge, a resolution or a closing would change."""
    return [(one.totals, [e for e in one.history() if e.verb != "refuse"], one.closed, one.voids) for one in accounts]


def verbs(account: Account) -> list[str]:
    return [entry.verb for entry in account.history() if entry.verb != "refuse"]


def wait_for(moment: datetime | None) -> None:
    """Wait until a time is over, by a clock that the store cannot be behind of for long."""
    assert moment is not None
    while datetime.now(UTC) <= moment + timedelta(milliseconds=20):
        time.sleep(0.01)


def four_digits(size: Any) -> str:  # noqa: ANN401  of a guarantee
    """Round a decimal down."""
    return str(Context(prec=4, rounding=ROUND_DOWN).create_decimal(repr(size)).normalize())


def ended(before: list[PureDP | None], after: list[PureDP | None]) -> tuple[str, ...]:
    """The notes on the end of the plain sum, of an account and the one above it, from what fitted and what fits."""
    falls = [
        " to ".join(four_digits(one.epsilon) for one in pair if one is not None)
        for pair in zip(before, after, strict=True)
    ]
    text = "this request has no epsilon, so the plain sum of epsilons no longer counts"
    own, above = (f"{text}: the largest single pure request falls from {one}" for one in falls)
    return own, f"for 'top': {above}"


@contextmanager
def unchanged(*accounts: Account) -> Iterator[None]:
    before = state(*accounts)
    yield
    assert state(*accounts) == before


# Spending.


@clause
def a_spend_is_charged_here_and_above(opening: Opening) -> None:
    ana, top = pair(opening)
    ben = opening("ben", parent=top)
    receipt = ana.spend(TENTH, note="visits")
    ben.spend(PureDP("0.2"))
    assert tenths(ana, ben, top) == (1, 2, 3)
    assert (receipt.verb, receipt.id, receipt.repeated, receipt.expires) == ("spend", "ana#1", False, None)
    assert [(line.account, line.sequence, line.cost) for line in receipt.lines] == [("ana", 1, TENTH)]
    assert receipt.decision is None or receipt.decision.totals_after.amounts[1] == UNIT // 10
    assert json.loads(json.dumps(receipt.to_dict()))["accounts"][0]["cost"] == TENTH.to_dict()
    assert "spent: PureDP(0.1) of ana; entry ana#1" in str(receipt)


@clause
def what_is_full_takes_nothing_more_and_offers_nothing(opening: Opening) -> None:
    ana, top = pair(opening)
    for _ in range(10):
        ana.spend(TENTH)
    with unchanged(ana, top), pytest.raises(BudgetExceeded) as caught:
        ana.spend(PureDP("1e-15"))
    assert caught.value.decision.largest is None
    assert caught.value.charged is False


@clause
def a_refusal_names_the_account_and_what_would_fit(opening: Opening) -> None:
    top = opening("top")
    ana, ben = opening("ana", Policy("0.5", 0, filter="basic"), top), opening("ben", parent=top)
    ben.spend(PureDP("0.7"))
    for cost, refused_by, fits in ((PureDP("0.6"), "top", "0.3"), (PureDP("0.35"), "top", "0.3")):
        with unchanged(top, ana, ben), pytest.raises(BudgetExceeded) as caught:
            ana.spend(cost)
        assert caught.value.decision.account in {refused_by, "ana"}
        assert caught.value.decision.largest == PureDP(fits)
    ana.spend(PureDP("0.3"))
    assert tenths(ana, ben, top) == (3, 7, 10)


@clause
def what_has_no_theorem_or_is_not_a_guarantee_is_not_charged(opening: Opening) -> None:
    ana, top = pair(opening)
    charges: list[Callable[[Any], object]] = [ana.spend, ana.reserve]
    questions: list[Callable[[Any], Decision]] = [ana.decide, lambda cost: ana.quote([cost]).decisions[-1]]
    with unchanged(ana, top):
        for charge in charges:
            with pytest.raises(UnprovenComposition) as caught:
                charge(GDP(0.1))
        for question in questions:
            decision = question(GDP(0.1))
            assert not decision
            assert decision.is_unproven
            assert str(caught.value) in str(decision)
        for attempt in (*charges, *questions):
            for wrong in (0.1, None, "PureDP(0.1)", PureDP):
                with pytest.raises(InvalidGuarantee):
                    attempt(wrong)


@clause
def a_wrong_key_note_or_expiry_is_not_charged(opening: Opening) -> None:
    ana, top = pair(opening)
    wrong: list[dict[str, Any]] = [{"key": ""}, {"key": 3}, {"key": "a\nb"}, {"key": "x" * 201}, {"note": 3}]
    with unchanged(ana, top):
        for arguments in wrong:
            for attempt in (ana.spend, ana.reserve):
                with pytest.raises(InvalidArgument, match=next(iter(arguments))):
                    attempt(TENTH, **arguments)
        for expires in (0, -1, float("nan"), float("inf"), 1e30, True, "5", timedelta(0)):
            with pytest.raises(InvalidArgument, match="expires"):
                ana.reserve(TENTH, expires=expires)  # type: ignore[arg-type]


# Keys.


@clause
def a_key_is_charged_once(opening: Opening) -> None:
    ana, top = pair(opening)
    first = ana.spend(TENTH, key="q", note="first")
    with unchanged(ana, top):
        for again in (ana.spend(TENTH, key="q"), ana.spend(PureDP("0.10"), key="q", note="again")):
            assert again == first
            assert (again.repeated, first.repeated, again.decision) == (True, False, None)
            assert again.lines == first.lines
    assert not ana.spend(TENTH, key="r").repeated
    assert tenths(ana, top) == (2, 2)


@clause
def without_a_key_every_spend_is_charged(opening: Opening) -> None:
    ana, top = pair(opening)
    receipts = [ana.spend(TENTH) for _ in range(3)]
    assert not any(receipt.repeated for receipt in receipts)
    assert len({receipt.id for receipt in receipts}) == 3
    assert tenths(ana, top) == (3, 3)


@clause
def a_key_with_another_request_is_a_conflict(opening: Opening) -> None:
    ana, top = pair(opening)
    ben = opening("ben", parent=top)
    ana.spend(TENTH, key="q")
    others: list[Callable[[], object]] = [
        lambda: ana.spend(PureDP("0.2"), key="q"),
        lambda: ana.spend(ApproxDP(0.1, 0), key="q"),
        lambda: ben.spend(TENTH, key="q"),
        lambda: ana.reserve(TENTH, key="q"),
        lambda: ana.spending(TENTH, key="q").__enter__(),
        lambda: ana.spend(PureDP(9), key="q"),
    ]
    with unchanged(ana, ben, top):
        for other in others:
            with pytest.raises(IdempotencyConflict, match="'q'"):
                other()


@clause
def a_refusal_and_an_error_leave_the_key_free(opening: Opening) -> None:
    ana, top = pair(opening)
    for cost in (PureDP(2), PureDP(3)):
        with pytest.raises(BudgetExceeded) as caught:
            ana.spend(cost, key="q")
    with pytest.raises(UnprovenComposition):
        ana.spend(GDP(0.1), key="q")
    offer = caught.value.decision.largest
    assert offer is not None
    assert not ana.spend(offer, key="q").repeated
    assert ana.spend(offer, key="q").repeated
    with pytest.raises(IdempotencyConflict):
        ana.spend(PureDP(2), key="q")
    assert tenths(ana, top) == (10, 10)


@clause
def a_used_key_is_answered_when_the_budget_is_gone_or_the_account_closed(opening: Opening) -> None:
    ana, _ = pair(opening)
    first = ana.spend(PureDP(1), key="q")
    assert ana.spend(PureDP(1), key="q") == first
    ana.close()
    assert ana.spend(PureDP(1), key="q") == first
    with pytest.raises(AccountClosed):
        ana.spend(PureDP(0), key="another")


@clause
def keys_are_told_apart_by_every_character(opening: Opening) -> None:
    ana, _ = pair(opening)
    keys = ["q", "Q", "q ", " q", "q\u0301", "\u00e9", "e\u0301", "ß", "SS", "ss", "1", "01", "ǆ", "Ǆ"]
    for key in keys:
        try:
            assert not ana.spend(PureDP(0), key=key).repeated, key
        except InvalidArgument:  # a service cannot be sent a key that begins or ends with a space
            continue
        assert ana.spend(PureDP(0), key=key).repeated


# Reservations.


@clause
def a_reservation_is_charged_when_made_and_stays_charged_when_committed(opening: Opening) -> None:
    ana, top = pair(opening)
    held = ana.reserve(TENTH)
    assert tenths(ana, top) == (1, 1)
    assert [one.id for one in ana.pending] == [one.id for one in top.pending] == [held.id] == ["ana#1"]
    assert re.fullmatch(r"<\w*Reservation ana#1: PureDP\(0\.1\) of ana( by \w+)?, made [\d-]+ [\d:]+>", repr(held))
    with pytest.raises(BudgetExceeded):
        ana.spend(PureDP("0.95"))
    receipt = held.commit(note="run")
    assert (receipt.verb, receipt.repeated, receipt.decision) == ("commit", False, None)
    assert tenths(ana, top) == (1, 1)
    assert ana.pending == top.pending == ()
    assert (ana.voids, top.voids) == (0, 0)


@clause
def a_void_restores_every_account_exactly(opening: Opening) -> None:
    ana, top = pair(opening)
    ana.spend(TENTH)
    before = (ana.totals, top.totals)
    receipt = ana.reserve(PureDP("0.3")).void("the query had a typing error")
    assert (ana.totals, top.totals) == before
    assert (receipt.verb, receipt.id, ana.history(-1)[0].sequence) == ("void", "ana#3", 3)
    assert ana.pending == top.pending == ()
    assert (ana.voids, top.voids) == (1, 1)
    ana.spend(PureDP("0.9"))


@clause
def a_reservation_is_resolved_once(opening: Opening) -> None:
    ana, top = pair(opening)
    kept, taken_back = ana.reserve(TENTH), ana.reserve(TENTH)
    first, void = kept.commit(), taken_back.void("not run")
    with unchanged(ana, top):
        assert kept.commit() == first
        assert kept.commit().repeated
        assert taken_back.void("for another reason") == void
        with pytest.raises(ReservationResolved):
            kept.void("not run")
        with pytest.raises(ReservationResolved):
            taken_back.commit()
    assert tenths(ana, top) == (1, 1)


@clause
def a_pending_reservation_can_be_resolved_from_the_account_above(opening: Opening) -> None:
    ana, top = pair(opening)
    held = ana.reserve(TENTH)
    (found,) = top.pending
    found.void("the worker died before it read any data")
    assert tenths(ana, top) == (0, 0)
    with pytest.raises(ReservationResolved):
        held.commit()


@clause
def once_expired_it_can_be_committed_and_not_voided(opening: Opening) -> None:
    ana, top = pair(opening)
    ana.reserve(TENTH, expires=3600).void("in time")
    late = ana.reserve(TENTH, expires=timedelta(milliseconds=1))
    assert late.expires is not None
    assert repr(late).endswith(f", voidable until {late.expires:%Y-%m-%d %H:%M:%S} UTC>")
    wait_for(late.expires)
    with unchanged(ana, top), pytest.raises(ReservationResolved, match="expire"):
        late.void("too late")
    assert [one.id for one in ana.pending] == [late.id]
    assert late.commit().verb == "commit"
    assert late.commit().repeated
    assert tenths(ana, top) == (1, 1)


@clause
def a_void_repeated_after_the_expiry_is_the_first_void(opening: Opening) -> None:
    ana, _ = pair(opening)
    held = ana.reserve(TENTH, expires=0.3)
    first = held.void("in time")
    wait_for(held.expires)
    assert held.void("again") == first


@clause
def a_void_needs_a_reason(opening: Opening) -> None:
    ana, top = pair(opening)
    held = ana.reserve(TENTH)
    for reason in ("", "  ", None, 3):
        with pytest.raises(InvalidArgument):
            held.void(reason)  # type: ignore[arg-type]
    assert tenths(ana, top) == (1, 1)
    held.void("the data was not there yet")
    assert ana.history(-1)[0].note == "the data was not there yet"


@clause
def a_key_gives_the_same_reservation_until_it_is_voided(opening: Opening) -> None:
    ana, top = pair(opening)
    first = ana.reserve(TENTH, key="q", expires=3600)
    again = ana.reserve(TENTH, key="q", expires=60)
    assert (again.id, again.expires, again.repeated, first.repeated) == (first.id, first.expires, True, False)
    assert ": repeated, " in repr(again)
    again.void("not run")
    with unchanged(ana, top), pytest.raises(ReservationResolved, match="voided"):
        ana.reserve(TENTH, key="q")
    other = ana.reserve(TENTH, key="r")
    other.commit()
    assert ana.reserve(TENTH, key="r").repeated
    assert tenths(ana, top) == (1, 1)


@clause
def a_key_that_looks_like_a_reservation_is_a_key(opening: Opening) -> None:
    ana, top = pair(opening)
    held = ana.reserve(TENTH)
    ana.spend(TENTH, key=held.id)
    held.void("not run")
    assert ana.spend(TENTH, key=held.id).repeated
    assert tenths(ana, top) == (1, 1)


# Blocks.


@clause
def a_block_reserves_and_commits(opening: Opening) -> None:
    ana, top = pair(opening)
    with ana.spending(TENTH, key="q", note="a block") as held:
        assert isinstance(held, Reservation)
        assert tenths(ana, top) == (1, 1)
        assert [one.id for one in ana.pending] == [held.id]
    assert ana.pending == ()
    assert verbs(ana) == ["open", "reserve", "commit"]
    with pytest.raises(ReservationResolved):
        held.void("x")


@clause
def what_raises_inside_a_block_is_committed(opening: Opening) -> None:
    ana, top = pair(opening)
    for error in (KeyError, KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(error), ana.spending(TENTH):
            raise error
    assert tenths(ana, top) == (4, 4)
    assert ana.pending == ()
    assert verbs(ana)[-1] == "commit"


@clause
def a_block_that_was_voided_inside_stays_voided(opening: Opening) -> None:
    ana, top = pair(opening)
    with ana.spending(TENTH) as held:
        held.void("nothing to ask")
    assert tenths(ana, top) == (0, 0)
    assert ana.pending == ()


@clause
def a_block_does_not_run_unpaid_or_twice(opening: Opening) -> None:
    ana, top = pair(opening)
    runs = []
    with pytest.raises(BudgetExceeded), ana.spending(PureDP(2), key="q"):
        runs.append("unpaid")
    with ana.spending(TENTH, key="q"):
        runs.append("once")
    with pytest.raises(IdempotencyConflict, match="the answer is not stored"), ana.spending(TENTH, key="q"):
        runs.append("twice")
    assert runs == ["once"]
    assert tenths(ana, top) == (1, 1)


# Asking.


@clause
def asking_changes_nothing_and_says_what_a_spend_would(opening: Opening) -> None:
    ana, top = pair(opening)
    ana.spend(TENTH)
    model = Accountant(BASIC)
    model.spend(TENTH)
    with unchanged(ana, top):
        assert ana.decide(PureDP("0.9")).admitted
        refusal = ana.decide(PureDP("0.91"))
        assert (refusal.admitted, refusal.largest) == (False, PureDP("0.9"))
        assert ana.largest(PureDP) == model.largest(PureDP) == PureDP("0.9")
        assert ana.largest(PureDP, times=9) == TENTH
        assert ana.quote([PureDP("0.4"), PureDP("0.5")]).admitted
        assert not ana.quote([PureDP("0.4"), PureDP("0.51")]).admitted
        assert ana.reading() == model.reading()
        assert ana.compare() == model.compare()
        assert ana.certification is model.certification
        repr(ana), ana._repr_html_(), ana.children, ana.describe()
        with pytest.raises(InvalidArgument, match=r"costs must be a list, such as \[PureDP\(0.1\)\].* use decide"):
            ana.quote(TENTH)  # type: ignore[arg-type]


@clause
def a_charge_that_ends_an_alternative_says_so_once(opening: Opening) -> None:
    top = opening("top", EXACT)
    ana = opening("ana", EXACT, top)
    assert ana.decide(TENTH).notes == ana.spend(TENTH).notes == ()  # negative control: it ends nothing
    before = [one.largest(PureDP) for one in (ana, top)]
    with unchanged(ana, top):
        decision, quoted = ana.decide(GAUSSIAN), ana.quote([GAUSSIAN, GAUSSIAN])
    held = ana.reserve(GAUSSIAN, key="k")
    notes = ended(before, [one.largest(PureDP) for one in (ana, top)])
    assert notes[0].endswith("falls from 0.9 to 0.4393")
    assert decision.notes == held.receipt.notes == notes
    assert [one.notes for one in quoted.decisions] == [notes, ()]
    assert str(decision).endswith(f"; {'; '.join(notes)}")
    assert str(held.receipt).endswith(f"; {'; '.join(notes)}")
    assert held.receipt.to_dict()["notes"] == decision.to_dict()["notes"] == [*notes]
    # Said once: not of the same key, nor of what is pending, nor of the next one.
    again = ana.reserve(GAUSSIAN, key="k").receipt
    assert (again, again.notes) == (held.receipt, ())
    assert [one.receipt.notes for one in ana.pending] == [()]
    assert ana.decide(GAUSSIAN).notes == ana.spend(TENTH).notes == ana.spend(GAUSSIAN).notes == ()
    assert held.commit().notes == ()


@clause
def what_a_voided_charge_ended_counts_again(opening: Opening) -> None:
    ana = opening("ana", EXACT)
    held = ana.reserve(GAUSSIAN)
    assert len(held.receipt.notes) == 1
    held.void("not run")
    assert ana.largest(PureDP) == PureDP(1)
    assert ana.spend(GAUSSIAN).notes == held.receipt.notes
    assert ana.largest(PureDP) != PureDP(1)


@clause
def a_charge_far_above_the_intrinsic_time_says_so(opening: Opening) -> None:
    ana = opening("ana", odo.compile_policy(Policy(1, 1e-6, filter=odo.filters.Smooth()), fineness=1))
    meter = ana.compiled.meter(SmoothMeter)
    assert meter.order is not None
    order, w = float(meter.order), effective_reserve(meter.quantum, meter.reserve, meter.order)
    large, small = (RDP((meter.order,), (value,)) for value in ("0.02", "0.0001"))
    charged, ratio = 0.0, math.expm1((order - 1) * 0.02) / (order * (order - 1))
    for _ in range(60):
        moved = ratio * math.exp(charged / 8)
        charged = 2 * moved + moved * moved / w
    times = charged / (2 * 0.02 / order)  # over the intrinsic time of the zCDP that has this divergence
    assert times > 1.5
    note = f"charged {times:.4g} times its intrinsic time: it is large for this policy's reserve"
    assert len(ana.spend(small).notes) == 1  # it has no epsilon
    assert ana.decide(small).notes == ana.spend(small).notes == ()
    assert ana.decide(large).notes == ana.spend(large).notes == ana.spend(large).notes == (note,)


@clause
def what_is_asked_below_knows_the_accounts_above(opening: Opening) -> None:
    ana, top = pair(opening)
    top.spend(PureDP("0.8"))
    assert ana.largest(PureDP) == PureDP("0.2")
    assert ana.largest(PureDP, times=2) == TENTH
    assert ana.decide(PureDP("0.3")).account == "top"
    assert not ana.quote([TENTH, TENTH, PureDP("1e-15")]).admitted


@clause
def how_many_are_admitted_is_counted_before_they_are_spent(opening: Opening) -> None:
    ana, top = pair(opening)
    top.spend(PureDP("0.75"))
    with unchanged(ana, top):
        assert (ana.how_many(TENTH), top.how_many(TENTH), ana.how_many(PureDP("0.2501"))) == (2, 2, 0)
        assert ana.how_many(PureDP(0)) == 10**12
        for wrong in (0.1, None, "PureDP(0.1)", PureDP):
            with pytest.raises(InvalidGuarantee):
                ana.how_many(wrong)  # type: ignore[arg-type]
        with pytest.raises(UnprovenComposition):
            ana.how_many(GDP(0.1))
    for _ in range(2):
        ana.spend(TENTH)
    with pytest.raises(BudgetExceeded):
        ana.spend(TENTH)
    assert ana.how_many(TENTH) == 0


@clause
def a_calibrated_mechanism_is_admitted_as_often_as_was_asked(opening: Opening) -> None:
    ana, top = pair(opening)
    top.spend(PureDP("0.3"))
    with unchanged(ana, top):
        found = ana.calibrate(odo.laplace, sensitivity=2, times=3)
        assert found is not None
        assert str(found) == "laplace(scale=8.572, sensitivity=2)"  # 6/0.7 is 8.5714...
        assert (found.parameter, found.value, found.times) == ("scale", 8.572, 3)
        assert found.guarantee == odo.laplace(**found.arguments)
        assert json.loads(json.dumps(found.to_dict()))["guarantee"] == found.guarantee.to_dict()
        assert repr(ana.calibrate(odo.exponential, times=3)) == "exponential(epsilon=0.2333)"
        # Its epsilon is log(truth / (1 - truth)), which is 0.7 at 0.66818...
        assert repr(ana.calibrate(odo.randomized_response)) == "randomized_response(truth=0.6681)"
        assert ana.calibrate(odo.laplace, times=10**9, sensitivity="1/3") is not None
        assert ana.largest(odo.laplace, times=7) == ana.largest(PureDP, times=7) == TENTH
        assert ana.how_many(odo.laplace(8.571, sensitivity=2)) == 2
    typed_back = eval(repr(found), vars(odo.mechanisms))  # noqa: S307  the repr is code
    for _ in range(3):
        ana.spend(typed_back)
    assert ana.calibrate(odo.laplace, sensitivity=2) is not None
    top.spend(ana.largest(PureDP))  # type: ignore[arg-type]
    assert ana.calibrate(odo.laplace, sensitivity=2) is None
    assert (ana.spent < 1, top.spent, top.remaining) == (True, 1, 0)


@clause
def a_wrong_mechanism_or_setting_is_refused(opening: Opening) -> None:
    ana, top = pair(opening)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("laplace", {}, "mechanism must be a function of odograph.mechanisms: laplace, "),
        (odo.parallel, {}, "mechanism must be a function"),
        (PureDP, {}, "mechanism must be a function"),
        (TENTH, {}, "mechanism must be a function"),
        (lambda scale: PureDP(1 / scale), {}, "mechanism must be a function"),
        (odo.laplace, {"scale": 3}, r"scale must not be given \(got 3\)"),
        (odo.laplace, {"sensitivty": 3}, r"laplace has the settings sensitivity \(got 'sensitivty'\)"),
        (odo.exponential, {"sensitivity": 3}, r"exponential has no settings \(got 'sensitivity'\)"),
        (odo.subsampled_gaussian, {}, r"subsampled_gaussian needs sampling_rate, such as"),
        (odo.laplace, {"times": 0}, r"times must be an integer from 1 \(got 0\)"),
        (odo.laplace, {"times": True}, r"times must be an integer from 1 \(got True\)"),
        (odo.randomized_response, {"categories": 2.5}, r"categories\) must be an integer from 2 \(got 2.5\)"),
        *[
            (odo.laplace, {"sensitivity": value}, r"laplace\(sensitivity\) must .* \(got ")
            for value in (0, -1, "x", None, float("nan"), True, 1e300, "1e-101", "0." + "7" * 90)
        ],
    ]
    with unchanged(ana, top):
        for mechanism, settings, message in wrong:
            with pytest.raises(InvalidArgument, match=message):
                ana.calibrate(mechanism, **settings)
        with pytest.raises(UnprovenComposition):
            ana.calibrate(odo.gaussian)
        with pytest.raises(InvalidArgument, match=r"kind must .* see calibrate\(subsampled_gaussian, sampling_rate"):
            ana.largest(odo.subsampled_gaussian)
        with pytest.raises(InvalidArgument, match=r"kind must be a function of odograph\.mechanisms"):
            ana.largest(odo.parallel)


@clause
def what_is_spent_and_what_remains_are_one_fraction_each(opening: Opening) -> None:
    ana, top = pair(opening)
    assert (ana.spent, ana.remaining) == (0, 1)
    ana.spend(PureDP("0.25"))
    held = top.reserve(PureDP("0.25"))
    assert (ana.spent, ana.remaining, top.spent, top.remaining) == (0.25, 0.75, 0.5, 0.5)
    assert ana.describe()["account"]["spent"] == ana.spent
    held.void("not run")
    top.spend(PureDP("0.75"))
    assert (top.spent, top.remaining) == (1, 0)


@clause
def the_description_is_plain_and_has_the_same_fields_everywhere(opening: Opening) -> None:
    ana, top = pair(opening)
    ana.reserve(TENTH)
    form, above = ana.describe(), top.describe()
    assert json.loads(json.dumps(form)) == form
    assert form.keys() == Accountant(BASIC).describe().keys()
    assert form["account"] == ana.summary()
    assert form["account"].keys() == Accountant(BASIC).summary().keys()
    assert (form["account"]["name"], form["account"]["parent"], form["account"]["steps"]) == ("ana", "top", 1)
    assert (above["children"], len(above["pending"]), above["voids"]) == (["ana"], 1, 0)
    assert form["largest"] == [PureDP("0.9").to_dict()]


# History.


@clause
def history_is_paged(opening: Opening) -> None:
    ana, _ = pair(opening)
    for i in range(7):
        ana.spend(PureDP(0), note=f"note {i}")
    whole = ana.history()
    assert [entry.sequence for entry in whole] == [*range(8)] == [*range(ana.size)]
    assert ana.history(2, 3) == whole[2:5]
    assert ana.history(6, 100) == ana.history(6) == whole[6:]
    assert ana.history(-2) == whole[-2:]
    assert ana.history(-3, 2) == whole[-3:-1]
    assert ana.history(8) == ana.history(1000, 5) == ana.history(10**30) == ()
    assert ana.history(0, 10**30) == ana.history(first=0, count=None) == whole
    assert [entry.note for entry in whole[1:]] == [f"note {i}" for i in range(7)]
    for first, count in ((0, 0), (0, -1), (0.5, 1), (0, 1.5), ("0", 1), (True, 1), (0, True)):
        with pytest.raises(InvalidArgument, match=r"first must be an integer|count must be a positive integer"):
            ana.history(first, count)  # type: ignore[arg-type]


@clause
def an_entry_says_what_was_charged_and_on_whose_request(opening: Opening) -> None:
    ana, top = pair(opening)
    ana.spend(PureDP("0.2"), key="q", note="visits")
    held = ana.reserve(TENTH, expires=60)
    held.void("not run")
    top.close(note="over")
    for account in (ana, top):
        entries = account.history()
        assert all(isinstance(entry, HistoryEntry) for entry in entries)
        assert [entry.verb for entry in entries] == ["open", "spend", "reserve", "void", "close"]
        assert [entry.cost for entry in entries] == [None, PureDP("0.2"), TENTH, TENTH, None]
        assert [entry.account for entry in entries[1:4]] == ["ana"] * 3
        assert entries[1].price == account.compiled.price(PureDP("0.2"))
        assert (entries[0].price, entries[1].key, entries[3].key) == (None, "q", held.id)
        assert [entry.expires for entry in entries] == [None, None, held.expires, None, None]
        times = [entry.time for entry in entries]
        assert times == sorted(times)
        assert json.loads(json.dumps([entry.to_dict() for entry in entries]))
    assert [entry.note for entry in ana.history()][:4] == ["", "visits", "", "not run"]
    assert top.history()[-1].note == "over"


@clause
def a_history_is_a_tuple_that_can_be_written_as_a_table(opening: Opening) -> None:
    account = opening("ana", EXACT)
    for cost in (PureDP("1/30"), ApproxDP("0.01", "1e-9"), GDP("0.04"), Interactive(ZCDP("0.001"))):
        account.spend(cost, key=f"={cost.kind}", note=f"-{cost.kind}, 'quoted'")
    account.reserve(TENTH, expires=60).void("@not run")
    history = account.history()
    assert isinstance(history, tuple)
    assert isinstance(history, History)
    assert history == tuple(history)
    assert isinstance(history[1:3], History)
    assert isinstance(history[0], HistoryEntry)
    rows = history.to_arrow().to_pylist()
    texts = io.StringIO()
    history.to_csv(texts)
    texts.seek(0)
    for entry, row, cells in zip(history, rows, csv.DictReader(texts), strict=True):
        assert [*row] == [*cells] == [*COLUMNS]
        assert (row["sequence"], row["time"], row["expires"]) == (entry.sequence, entry.time, entry.expires)
        assert (row["verb"], row["key"], row["note"], row["account"]) == (entry.verb, entry.key, entry.note, "ana")
        assert row["admitted"] == {"spend": True, "reserve": True}.get(entry.verb)
        assert row["cost"] == ("" if entry.cost is None else json.dumps(entry.cost.to_dict(), **COMPACT))
        assert datetime.fromisoformat(cells["time"]) == entry.time
        assert cells["note"] in {entry.note, f"'{entry.note}"}
        assert not cells["note"].startswith(("=", "-", "@"))
    sizes = [[row[name] for row in rows[1:5]] for name in ("epsilon", "delta", "mu", "rho")]
    assert sizes == [
        [pytest.approx(1 / 30), 0.01, None, None],
        [None, 1e-9, None, 0.0],
        [None, None, 0.04, None],
        [None, None, None, 0.001],
    ]
    assert Fraction(rows[1]["epsilon"]) >= Fraction(1, 30)
    frame = history.to_pandas()
    assert [*frame.columns] == [*COLUMNS]
    assert (frame["time"].tolist(), frame["note"].tolist()) == (
        [entry.time for entry in history],
        [entry.note for entry in history],
    )
    assert frame["epsilon"].sum() == pytest.approx(1 / 30 + 0.01 + 0.1 + 0.1)  # the void has a cost too
    assert str(frame["time"].dtype) == str(frame["expires"].dtype) == "datetime64[us, UTC]"


# Promises other than (epsilon, delta).


@clause
def a_total_of_rho_or_mu_is_kept_without_the_plain_sum(opening: Opening) -> None:
    cases = [
        ("rho", Policy(rho="0.5"), ZCDP("0.2"), "rho", ZCDP("0.1")),
        ("mu", Policy(mu=1), GDP("0.6"), "mu^2", GDP("0.529150262212")),
    ]
    for name, policy, cost, meter, rest in cases:
        account = opening(name, policy)
        assert account.policy == policy
        assert account.how_many(PureDP("0.4")) == {"rho": 6, "mu": 4}[name]
        for _ in range(2):
            account.spend(cost, key=f"{name}-{account.size}")
        decision = account.decide(cost)
        assert not decision.admitted
        assert decision.largest == rest
        assert {*decision.asked} == {"delta", meter}
        assert "of the budget is left" in str(decision)
        with unchanged(account), pytest.raises(BudgetExceeded):
            account.spend(ApproxDP("0.001", "1e-9"))
        form = json.loads(json.dumps(account.describe()))
        assert form["account"]["promise"]["epsilon"] is None
        assert form["account"]["promise"][name] == {"rho": 0.5, "mu": 1.0}[name]
        assert Compiled.from_dict(account.compiled.to_dict()) == account.compiled
        assert {*form["meters"]} == {"delta", meter}


@clause
def without_a_limit_everything_is_admitted_and_read(opening: Opening) -> None:
    top = opening("top", Policy(None, 1e-6))
    ana, kept = opening("ana", Policy(None, 1e-6), top), opening("kept", parent=top)
    for cost in (PureDP(2), GDP(1), RDP((2, 300), ("0.01", "1.5"))):
        receipt = ana.spend(cost)
    assert "intrinsic time" in receipt.notes[0]
    assert 3 < ana.reading().loss == top.reading().loss < 20
    assert (ana.spent, ana.remaining, ana.how_many(PureDP(1))) == (0.0, 1.0, 10**12)
    assert str(ana.decide(PureDP(1))) == "admitted: PureDP(1); no limit"
    with unchanged(ana, top), pytest.raises(BudgetExceeded, match="no part of the odometer reads"):
        ana.spend(ProbDP(1, 1e-9))
    with unchanged(ana, top), pytest.raises(UnprovenComposition, match="needs a slack"):
        ana.spend(ApproxDP(1, 1e-9))
    with pytest.raises(InvalidArgument, match="must have a limit"):
        ana.largest(PureDP)
    with pytest.raises(InvalidArgument, match="must have a limit"):
        ana.calibrate(odo.laplace)
    assert kept.largest(PureDP) == PureDP(1)
    form = json.loads(json.dumps(ana.describe()))
    assert (form["account"]["promise"]["epsilon"], form["account"]["filter"], form["largest"]) == (
        None,
        "unlimited",
        [],
    )
    assert "no limit" in ana._repr_html_()
    assert "no limit" in repr(ana)


# Sub-accounts and closing.


@clause
def accounts_form_a_tree(opening: Opening) -> None:
    ana, top = pair(opening)
    ben = opening("ben", parent=top)
    assert dict(top.children) == {"ana": ana, "ben": ben}
    assert not ana.children
    assert (ana.parent, top.parent) == (top, None)
    with pytest.raises(TypeError):
        top.children["eve"] = ana  # type: ignore[index]
    with pytest.raises(AccountExists):
        opening("ana", parent=top)
    with pytest.raises(InvalidPolicy):
        opening("eve", Policy(1, 0, filter="basic", privacy_unit="household"), top)
    assert {*top.children} == {"ana", "ben"}
    assert (ana.name, ana.policy, ana.dataset, ana.lifetime) == ("ana", BASIC, "", None)


@clause
def a_closed_account_takes_no_new_charges_here_and_below(opening: Opening) -> None:
    top = opening("top")
    ana, ben = opening("ana", parent=top), opening("ben", parent=top)
    below = opening("ana-maps", parent=ana)
    held, kept = below.reserve(TENTH), ana.reserve(TENTH)
    ana.close(note="the study is over")
    ana.close()
    assert [one.closed for one in (top, ana, below, ben)] == [False, True, True, False]
    with unchanged(top, ana, below):
        for account in (ana, below):
            attempts: list[Callable[[Guarantee], object]] = [
                account.spend,
                account.reserve,
                lambda cost, one=account: one.spending(cost).__enter__(),  # type: ignore[misc]
                account.decide,
                lambda cost, one=account: one.quote([cost]),  # type: ignore[misc]
            ]
            for attempt in attempts:
                with pytest.raises(AccountClosed):
                    attempt(PureDP(0))
            assert account.largest(PureDP) is None
            assert account.calibrate(odo.laplace) is None
            assert account.how_many(TENTH) == 0
            assert account.describe()["largest"] == []
        with pytest.raises(AccountClosed):
            opening("late", parent=ana)
    held.void("not run")
    kept.commit()
    ben.spend(TENTH)
    assert tenths(top, ana, below, ben) == (2, 1, 0, 1)
    assert verbs(ana).count("close") == verbs(below).count("close") == 1


@clause
def a_handle_is_the_account(opening: Opening) -> None:
    ana, top = pair(opening)
    assert ana == top.children["ana"]
    assert ana != top
    assert len({ana, top, top.children["ana"]}) == 2
    with pytest.raises(AttributeError):
        ana.policy = BASIC  # type: ignore[misc]
    with pytest.raises(AttributeError):
        ana.totals = top.totals  # type: ignore[misc]


@pytest.mark.parametrize("name", CLAUSES)
def test_an_account_keeps_the_contract(name: str, opening: Opening) -> None:
    CLAUSES[name](opening)


def counting(start: int) -> Callable[[int], int]:
    """An interactive mechanism."""
    asked = [start]

    def ask(value: int) -> int:
        asked.append(value)
        return sum(asked)

    return ask


@clause
def an_interactive_mechanism_is_charged_whole_before_it_is_opened(opening: Opening) -> None:
    ana, top = pair(opening)
    seen: list[tuple[object, ...]] = []

    def mechanism(start: int) -> Callable[[int], int]:
        seen.append(tenths(ana, top))
        return counting(start)

    with ana.interact(mechanism, 1, cost=TENTH, key="q", note="looks") as q:
        assert seen == [(1, 1)]
        assert [one.id for one in ana.pending] == [one.id for one in top.pending] == [q.charge.id]
        assert q(1) == 2
        assert ana.pending == top.pending == ()
        with pytest.raises(ReservationResolved):
            q.charge.void("an answer was released")
        with pytest.raises(IdempotencyConflict):
            ana.interact(mechanism, 1, cost=TENTH, key="q")
        with ana.interact(mechanism, 2, cost=PureDP("0.2")) as r, odo.session(top) as s:
            assert (r(1), q(1), s.run(counting(3), 1, cost=PureDP("0.3")), r(1)) == (3, 3, 4, 4)
    with pytest.raises(AccountClosed):
        q(1)
    assert tenths(ana, top) == (3, 6)
    stored = [(one.verb, one.cost) for one in ana.history() if one.verb == "reserve"]
    assert stored == [("reserve", Interactive(TENTH)), ("reserve", Interactive(PureDP("0.2")))]
    assert len(seen) == 2


@clause
def an_interactive_mechanism_that_was_voided_answers_nothing(opening: Opening) -> None:
    ana, top = pair(opening)
    with ana.interact(lambda: lambda: pytest.fail("it answered"), cost=TENTH) as q:
        (held,) = ana.pending
        held.void("not run")
        with pytest.raises(ReservationResolved):
            q()
    with ana.interact(counting, 1, cost=TENTH) as q:
        q.void("not asked")
        with pytest.raises(AccountClosed):
            q(1)
    assert tenths(ana, top) == (0, 0)
    with ana.interact(counting, 1, cost=TENTH):
        pass  # closed without a query: the mechanism was opened, so the charge stands
    assert tenths(ana, top) == (1, 1)
    assert (ana.pending, ana.voids) == ((), 2)


@clause
def what_no_theorem_covers_is_not_opened(opening: Opening) -> None:
    account = opening("moments", EXACT)
    with unchanged(account):
        with pytest.raises(UnprovenComposition, match=r"Interactive\(ApproxDP\("):
            account.interact(counting, 1, cost=ZCDP("0.001", "1e-9"))
        with pytest.raises(BudgetExceeded) as caught:
            account.interact(counting, 1, cost=PureDP(2))
    assert caught.value.decision.largest == Interactive(PureDP(1))
    assert account.largest(Interactive(ZCDP(1))) is not None
    assert account.how_many(Interactive(PureDP("0.25"))) == 4


ON_POSTGRES: list[Clause] = [
    a_key_is_charged_once,
    a_refusal_names_the_account_and_what_would_fit,
    a_void_restores_every_account_exactly,
    what_raises_inside_a_block_is_committed,
]


@pytest.mark.long
@pytest.mark.parametrize("name", CLAUSES if FULL else [check.__name__ for check in ON_POSTGRES])
def test_an_async_account_keeps_the_contract_behind_a_service_on_postgres(name: str, postgres_url: str) -> None:
    with ServiceThread(postgres_url) as service, in_event_loop(service) as opening:
        CLAUSES[name](opening)


# Broken accounts, and the clause that each must fail.


def charge_of(held: Reservation) -> Any:  # noqa: ANN401  what an account in memory remembers of it
    return held._resolve.__self__  # type: ignore[attr-defined]  # noqa: SLF001  to break it


class ForgetsKeys(Accountant):
    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:  # noqa: ARG002  the bug
        return super().spend(cost, note=note)


class ForgetsWhatAKeyWasUsedFor(Accountant):
    def _repeat(self, charge: Any, verb: str, cost: Guarantee) -> tuple[Receipt, Any]:  # noqa: ANN401, ARG002
        return charge.receipt._replace(repeated=True), charge


class KeepsTheKeyOfARefusal(Accountant):
    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        try:
            return super().spend(cost, key=key, note=note)
        except BudgetExceeded:
            super().spend(PureDP(0), key=key)
            raise


class RefundsWhatWasCommitted(Accountant):
    def reserve(self, cost: Guarantee, **options: Any) -> Reservation:
        held = super().reserve(cost, **options)
        charge = charge_of(held)

        def resolve(verb: str, reservation: str, note: str) -> Receipt:
            if verb == "void":
                charge.resolution = None
            return charge.resolve(verb, reservation, note)  # type: ignore[no-any-return]

        return Reservation(resolve, held.receipt)


class RefundsWhatExpired(Accountant):
    def reserve(self, cost: Guarantee, **options: Any) -> Reservation:
        held = super().reserve(cost, **options)
        charge = charge_of(held)
        charge.receipt = charge.receipt._replace(voidable_until=None)
        return held


class RefundsItselfAlone(Accountant):
    def reserve(self, cost: Guarantee, **options: Any) -> Reservation:
        held = super().reserve(cost, **options)
        charge = charge_of(held)
        free = tuple(type(price)((0,) * len(price.amounts)) for price in charge.prices[:-1])
        charge.prices = (*free, charge.prices[-1])
        return held


class RefundsWhatRaised(Accountant):
    @contextmanager
    def spending(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Iterator[Reservation]:
        held = self.reserve(cost, key=key, note=note)
        try:
            yield held
        except BaseException:
            held.void("it raised")
            raise
        if not held.voided:
            held.commit()


class ClosesItselfAlone(Accountant):
    def _with_descendants(self) -> Iterator[Accountant]:
        yield self


class ChargesInteractionsAtClose(Accountant):
    @contextmanager
    def interact(self, mechanism: Any, /, *args: Any, cost: Any = None, **options: Any) -> Iterator[Any]:  # type: ignore[override]  # noqa: ANN401, ARG002
        yield mechanism(*args)
        self.spend(Interactive(cost))


class AnswersWhatWasVoided(Accountant):
    def interact(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as an account's
        q = super().interact(*args, **options)
        q._charge.settle = lambda: None  # type: ignore[method-assign]  # noqa: SLF001  it does not ask the ledger
        return q


class ForgetsItsParent(Accountant):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._chain = (self,)


class WritesRefusalsDownAsSpends(Accountant):
    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        with suppress(BudgetExceeded):
            return super().spend(cost, key=key, note=note)
        return super().spend(PureDP(0), note=note)


class RoundsNoiseToTheNearest(Accountant):
    def calibrate(self, mechanism: Any, /, **settings: Any) -> Any:  # noqa: ANN401  as an account's
        found = super().calibrate(mechanism, **settings)
        if found is None or found.parameter != "scale":
            return found
        offer = self.largest(PureDP, settings.get("times", 1))
        scale = float(settings.get("sensitivity", 1)) / float(offer.epsilon)  # type: ignore[union-attr]
        return replace(found, value=float(f"{scale:.4g}"))


class EndsAlternativesSilently(Accountant):
    def reserve(self, cost: Guarantee, **options: Any) -> Reservation:
        held = super().reserve(cost, **options)
        held.receipt = held.receipt._replace(notes=())
        return held


class ForgetsItsParentInNotes(Accountant):
    def _path(self) -> list[Any]:
        return super()._path()[-1:]


class ReturnsAPlainTuple(Accountant):
    def history(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401  as an account's
        return tuple(super().history(*args, **options))


class ForgetsItsParentWhenCounting(Accountant):
    def how_many(self, cost: Guarantee) -> int:
        return odo.planning.how_many(odo.planning.AccountState("", self.compiled, self.totals), cost)


BROKEN: dict[type[Accountant], Clause] = {
    ForgetsKeys: a_key_is_charged_once,
    ForgetsWhatAKeyWasUsedFor: a_key_with_another_request_is_a_conflict,
    KeepsTheKeyOfARefusal: a_refusal_and_an_error_leave_the_key_free,
    RefundsWhatWasCommitted: a_reservation_is_resolved_once,
    RefundsWhatExpired: once_expired_it_can_be_committed_and_not_voided,
    RefundsItselfAlone: a_void_restores_every_account_exactly,
    ChargesInteractionsAtClose: an_interactive_mechanism_is_charged_whole_before_it_is_opened,
    AnswersWhatWasVoided: an_interactive_mechanism_that_was_voided_answers_nothing,
    RefundsWhatRaised: what_raises_inside_a_block_is_committed,
    ClosesItselfAlone: a_closed_account_takes_no_new_charges_here_and_below,
    ForgetsItsParent: a_spend_is_charged_here_and_above,
    RoundsNoiseToTheNearest: a_calibrated_mechanism_is_admitted_as_often_as_was_asked,
    EndsAlternativesSilently: a_charge_that_ends_an_alternative_says_so_once,
    ForgetsItsParentInNotes: a_charge_that_ends_an_alternative_says_so_once,
    ReturnsAPlainTuple: a_history_is_a_tuple_that_can_be_written_as_a_table,
    ForgetsItsParentWhenCounting: how_many_are_admitted_is_counted_before_they_are_spent,
    WritesRefusalsDownAsSpends: what_is_full_takes_nothing_more_and_offers_nothing,
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda kind: kind.__name__)
def test_a_broken_account_is_caught(broken: type[Accountant]) -> None:
    """Negative controls: the clause holds for an account, and fails for the broken one."""
    BROKEN[broken](in_memory())
    with pytest.raises((AssertionError, pytest.fail.Exception, odo.OdographError)):
        BROKEN[broken](in_memory(broken))


# One set of signatures.


def members(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def signature_of(member: Any) -> object:  # noqa: ANN401  a method or property
    if isinstance(member, property):
        return property
    function = inspect.unwrap(member)
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default, str(one.annotation)) for one in parameters], str(
        inspect.signature(function).return_annotation
    )


def differences(kind: type) -> list[str]:
    """The members of an account that a class lacks, or has with another signature."""
    own = members(kind)
    return [
        name
        for name, member in members(Account).items()
        if name not in own or signature_of(own[name]) != signature_of(member)
    ]


OWN = {Accountant: {"from_dict", "resume", "to_dict"}, LedgerAccount: set[str]()}
# What an async account lacks: what runs mechanisms, and what draws.
NOT_AWAITED = {"interact", "plot", "summary"}


@pytest.mark.parametrize("kind", OWN)
def test_every_account_has_the_same_members_with_the_same_signatures(kind: type[Account]) -> None:
    assert differences(kind) == []
    assert members(kind).keys() - members(Account).keys() == OWN[kind]
    assert len(members(Account)) > 20


def parameters_of(member: Any) -> list[object]:  # noqa: ANN401  a method or property
    if isinstance(member, property):
        return []
    parameters = inspect.signature(inspect.unwrap(member)).parameters.values()
    return [(one.name, one.kind, one.default) for one in parameters if one.name != "self"]


def test_an_async_account_has_the_members_of_an_account_with_the_same_parameters() -> None:
    own, expected = members(AsyncAccount), members(Account)
    assert expected.keys() - own.keys() == NOT_AWAITED
    assert own.keys() <= expected.keys()
    assert [name for name in own if parameters_of(own[name]) != parameters_of(expected[name])] == []
    assert parameters_of(own["spend"]) != parameters_of(own["reserve"])  # negative control
    ledger = members(Ledger).keys() - members(AsyncLedger).keys()
    assert ledger == {"backup", "create_population", "export", "import_", "population", "restore"}


def test_another_signature_is_found() -> None:
    assert differences(RefundsItselfAlone) == ["reserve"]


def test_in_memory_a_charge_without_a_key_is_not_remembered() -> None:
    account = Accountant(BASIC, keep=0)
    for _ in range(50):
        account.spend(PureDP("0.01"))
        with account.spending(PureDP("0.001")):
            pass
    form = account.to_dict()
    assert (form["charges"], form["entries"], charges(account)) == ([], [], ())
    account.spend(PureDP(0), key="q")
    assert [charge["key"] for charge in account.to_dict()["charges"]] == ["q"]
