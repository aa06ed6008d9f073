"""Keys and reservations of an account in memory: interrupts, threads, copies and documents.

What every account does is in tests/ledger/test_account_contract.py.
"""

# ruff: noqa: SLF001  the broken versions reach into the account

from __future__ import annotations

import gc
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import odograph as odo
from odograph import Accountant, BudgetExceeded, IdempotencyConflict, Policy, PureDP, Reservation
from odograph import accountant as accountant_module
from odograph.errors import AccountClosed, LedgerBusy, LedgerCorrupt, ReservationResolved

SOURCE = accountant_module.__file__
UNIT = 10**15
TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")
FORM_1 = Path(__file__).parents[1] / "fixtures/accountant-form-1.json"


def family() -> tuple[Accountant, Accountant, Accountant]:
    top = Accountant(BASIC, name="top")
    ana = Accountant(BASIC, name="ana", parent=top)
    return top, ana, Accountant(BASIC, name="eve", parent=ana)


def spent(account: Accountant) -> Fraction:
    return Fraction(account.totals.amounts[1], UNIT)


# Interrupts.


class _Interrupted(KeyboardInterrupt):
    pass


def refund_then_mark(charge: Any, verb: str, reservation: str, note: str) -> object:  # noqa: ANN401, ARG001
    """The bug: what is taken back is marked as resolved afterwards."""
    if charge.resolution is not None:
        raise ReservationResolved("resolved before")
    for one, price in zip(charge.account._chain, charge.prices, strict=True):
        one._totals = one._totals.without(price)
    charge.resolution = charge.receipt._replace(verb=verb)
    return charge.resolution


@contextmanager
def interrupted_at(at: int) -> Iterator[list[bool]]:
    """Interrupt at a line of the accountant's file or of the bug; the list says whether there were so many lines."""
    lines, reached, text = count(1), [False], Path(SOURCE).read_text().splitlines()

    def line(frame: FrameType, event: str, _: object) -> object:
        if event == "line" and next(lines) == at:
            reached[0] = True
            # Tracing also stops between the last line of a `with` block and its end; Python's own interrupts do not.
            if frame.f_code.co_filename != SOURCE or not text[frame.f_lineno - 1].lstrip().startswith("with "):
                raise _Interrupted
        return line

    def trace(frame: FrameType, *_: object) -> object:
        watched = frame.f_code.co_filename == SOURCE or frame.f_code is refund_then_mark.__code__
        return line if watched else None

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        with suppress(_Interrupted):
            yield reached
    finally:
        sys.settrace(before)


def steps_after_interrupted_voids() -> list[tuple[list[int], list[int]]]:
    """How many steps each account has after a void that is interrupted at each line, and after it is tried again."""
    found = []
    for at in count(1):
        top, ana, eve = family()
        eve.spend(TENTH)
        held = eve.reserve(TENTH)
        with interrupted_at(at) as reached:
            held.void("not run")
        first = [one.totals.steps for one in (top, ana, eve)]
        with suppress(ReservationResolved):
            held.void("again")
        found.append((first, [one.totals.steps for one in (top, ana, eve)]))
        Accountant.from_dict(top.to_dict())
        if not reached[0]:
            return found
    raise AssertionError


def test_an_interrupt_at_any_line_of_a_void_takes_nothing_back_twice() -> None:
    found = steps_after_interrupted_voids()
    assert found[-1] == ([1, 1, 1], [1, 1, 1])
    for first, again in found:
        assert first == sorted(first, reverse=True)  # what is above has at least what is below
        assert set(first) | set(again) <= {1, 2}
    assert len(found) > 15


def test_a_void_that_is_marked_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: interrupted before the mark, it takes back twice."""
    monkeypatch.setattr(accountant_module._Charge, "resolve", refund_then_mark)
    monkeypatch.setattr(Accountant, "from_dict", lambda _: None)
    assert any(0 in again for _, again in steps_after_interrupted_voids())


def receipts_after_interrupts(make: Callable[[], Accountant]) -> list[tuple[bool, int]]:
    """Whether the second try under a key was a repetition, and how many steps were charged for both."""
    found = []
    for at in count(1):
        account = make()
        with interrupted_at(at) as reached:
            account.spend(TENTH, key="q")
        found.append((account.spend(TENTH, key="q").repeated, account.totals.steps))
        if not reached[0]:
            return found
    raise AssertionError


def test_an_interrupt_at_any_line_never_leaves_a_key_without_its_charge() -> None:
    found = receipts_after_interrupts(lambda: Accountant(BASIC))
    assert found[-1] == (True, 1)
    assert all(steps >= 1 for _, steps in found)
    assert len(found) > 15


def test_an_interrupted_reservation_is_charged_or_was_never_made() -> None:
    for at in count(1):
        top, ana, eve = family()
        with interrupted_at(at) as reached:
            eve.reserve(TENTH, key="q")
        for pending in top.pending:
            pending.void("not run")
        steps = [one.totals.steps for one in (top, ana, eve)]
        assert steps == sorted(steps, reverse=True)
        assert min(steps) >= 0
        Accountant.from_dict(top.to_dict())
        if not reached[0]:
            assert steps == [0, 0, 0]
            return


def test_a_resolution_in_the_middle_of_a_spend_is_refused() -> None:
    account = Accountant(BASIC)
    held = account.reserve(TENTH)
    refused: list[str] = []

    class Nosy(PureDP):
        def implies(self) -> tuple[Any, ...]:
            for action in (held.commit, partial(held.void, "x"), account.close, partial(account.reserve, TENTH)):
                try:
                    action()
                except LedgerBusy:
                    refused.append("busy")
            return super().implies()

    with suppress(odo.OdographError):
        account.spend(Nosy(0.2))
    assert refused == ["busy"] * 4
    assert [one.id for one in account.pending] == [held.id]


# Threads.


def test_threads_that_use_one_key_are_charged_once() -> None:
    account = Accountant(BASIC)
    receipts = []
    start = threading.Barrier(8)

    def ask() -> None:
        start.wait()
        receipts.append(account.spend(TENTH, key="q"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [receipt.repeated for receipt in receipts].count(False) == 1
    assert account.totals.steps == 1


def test_threads_that_resolve_one_reservation_resolve_it_once() -> None:
    account = Accountant(BASIC)
    for _ in range(20):
        held = account.reserve(TENTH)
        outcomes: list[str] = []
        start = threading.Barrier(4)

        def act(verb: str, held: Reservation = held, outcomes: list[str] = outcomes, start: Any = start) -> None:  # noqa: ANN401
            start.wait()
            with suppress(ReservationResolved):
                receipt = held.commit() if verb == "commit" else held.void("not run")
                outcomes.append(receipt.verb)

        threads = [threading.Thread(target=act, args=(verb,)) for verb in ("commit", "void") * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(outcomes)) == 1
        if outcomes[0] == "commit":
            account = Accountant(BASIC)
        else:
            assert account.totals.steps == 0


# Time.


def test_an_expired_reservation_stays_expired_when_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    account, now = Accountant(BASIC), time.time_ns()
    held = account.reserve(TENTH, expires=60)
    monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
    account.spend(TENTH)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    with pytest.raises(ReservationResolved, match="expired"):
        held.void("not run")
    account.spend(TENTH)
    times = [entry.written for entry in account.history()]
    assert times == sorted(times)


def test_a_clock_that_jumped_ahead_once_does_not_stamp_later_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    account, now = Accountant(BASIC), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 73 * 365 * 86400 * 10**9)
    account.spend(TENTH)
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**6)
    account.spend(TENTH)
    assert account.history(-1)[0].written == now // 1000 + 1000


# Copies and documents.


def filled() -> Accountant:
    top, ana, eve = family()
    ana.spend(TENTH, key="once", note="visits")
    eve.reserve(PureDP("0.2"), key="held", expires=3600)
    eve.reserve(PureDP("0.05"), expires=7200)
    ana.reserve(TENTH, key="done").commit(note="run")
    ana.reserve(TENTH, key="gone").void("not run")
    eve.close(note="over")
    return top


def copies() -> dict[str, Callable[[Accountant], Accountant]]:
    def unpickled(account: Accountant) -> Accountant:
        copy: Accountant = pickle.loads(pickle.dumps(account))  # noqa: S301  our own bytes
        with pytest.raises(AccountClosed):
            copy.pending[0].void("not run")
        copy.resume()
        return copy

    return {
        "json": lambda account: Accountant.from_dict(json.loads(json.dumps(account.to_dict()))),
        "pickle": unpickled,
    }


@pytest.mark.parametrize("way", copies())
def test_a_restored_account_has_its_keys_and_reservations(way: str) -> None:
    top = filled()
    again = copies()[way](top)
    assert again.to_dict() == top.to_dict()
    ana, eve = again.children["ana"], again.children["ana"].children["eve"]
    for one, other in ((again, top), (ana, top.children["ana"]), (eve, top.children["ana"].children["eve"])):
        assert one.history() == other.history()
        assert (one.totals, one.voids, one.closed) == (other.totals, other.voids, other.closed)
        assert [held.receipt for held in one.pending] == [held.receipt for held in other.pending]
    assert ana.spend(TENTH, key="once").repeated
    assert ana.reserve(TENTH, key="done").repeated
    with pytest.raises(ReservationResolved, match="voided"):
        ana.reserve(TENTH, key="gone")
    with pytest.raises(IdempotencyConflict):
        ana.spend(PureDP("0.3"), key="once")
    with pytest.raises(AccountClosed):
        eve.spend(TENTH)
    assert eve.reserve(PureDP("0.2"), key="held").repeated  # a used key is answered though the account is closed
    first, second = eve.pending
    first.void("the worker died")
    second.commit()
    assert (spent(again), spent(ana), spent(eve)) == (Fraction(25, 100), Fraction(25, 100), Fraction(5, 100))
    assert Accountant.from_dict(again.to_dict()).to_dict() == again.to_dict()


def test_a_restored_account_that_forgot_its_keys_is_caught() -> None:
    """Negative control: without the charges that it remembers, the same document is charged again."""
    form = filled().to_dict()
    form["children"][0]["charges"].clear()
    del form["digest"]
    form["digest"] = accountant_module.document_digest(form)
    assert not Accountant.from_dict(form).children["ana"].spend(TENTH, key="once").repeated


def test_reservations_survive_entries_that_are_not_kept() -> None:
    account = Accountant(BASIC, keep=1)
    held = [account.reserve(TENTH) for _ in range(4)]
    held[0].void("not run")
    again = Accountant.from_dict(json.loads(json.dumps(account.to_dict())))
    assert (again.size, account.size, len(again.history(1))) == (6, 6, 1)
    for pending in again.pending:
        pending.void("not run")
    assert again.totals == again.compiled.start
    assert again.voids == 4


def test_a_document_of_version_0_1_is_read() -> None:
    form = json.loads(FORM_1.read_text())
    assert form["form"] == 1
    top = Accountant.from_dict(form)
    ana = top.children["ana"]
    assert (top.totals.steps, ana.totals.steps, top.size, ana.size) == (3, 2, 4, 3)
    entries = top.history(1)
    assert [(entry.verb, entry.note, entry.account) for entry in entries] == [
        ("spend", "first", "top"),
        ("spend", "", "ana"),
        ("spend", "third", "ana"),
    ]
    assert [entry.sequence for entry in ana.history(1)] == [2]  # it kept one
    assert not ana.spend(TENTH, key="q").repeated
    again = Accountant.from_dict(top.to_dict())
    assert again.to_dict()["form"] == 2
    assert again.children["ana"].spend(TENTH, key="q").repeated
    form["totals"]["steps"] = "2"
    with pytest.raises(LedgerCorrupt):
        Accountant.from_dict(form)


def test_a_reservation_is_not_pickled() -> None:
    held = Accountant(BASIC, name="top").reserve(TENTH)
    with pytest.raises(TypeError, match="another process"):
        pickle.dumps(held)


def test_reservations_that_were_resolved_are_forgotten() -> None:
    account = Accountant(BASIC, keep=0)
    for number in range(60):
        held = account.reserve(TENTH)
        (held.void("not run") if number % 2 else held.void("nothing to ask"))
    del held
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is accountant_module._Charge and one.account is account]


def test_a_refusal_is_not_written_down_in_memory() -> None:
    account = Accountant(BASIC)
    before = account.to_dict()
    for action in (account.spend, account.reserve):
        with pytest.raises(BudgetExceeded):
            action(PureDP(2), key="q")
    assert account.to_dict() == before
