"""Errors as problems: every row of the error table, what became of the charge, and what a caller may not see."""

from __future__ import annotations

import inspect

import msgspec
import pytest

import odograph as odo
from odograph import errors
from odograph.errors import ERROR_TABLE, BudgetExceeded, OdographError, OutcomeUnknown
from odograph.service import visibility
from odograph.service.auth import Caller, Role
from odograph.service.schemas import Problem
from odograph.service.visibility import operator_message, problem_of, unexpected_problem

SECRET = "of /srv/ledger.db, account payroll"  # noqa: S105  what messages of the library may contain
BOUND = Caller("ana", Role.ANALYST, "0" * 12, frozenset({"census"}))


def make(cls: type[OdographError]) -> OdographError:
    if cls is BudgetExceeded:
        account = odo.Accountant(odo.Policy(1, 1e-6, filter="basic"), name="census")
        return BudgetExceeded(account.decide(odo.PureDP(2)))
    return OutcomeUnknown(SECRET, key="q-17") if cls is OutcomeUnknown else cls(SECRET)


@pytest.mark.parametrize("cls", ERROR_TABLE, ids=lambda cls: cls.__name__)
def test_every_row_of_the_table_is_reached(cls: type[OdographError]) -> None:
    row = ERROR_TABLE[cls]
    for caller in (None, BOUND):
        problem = problem_of(make(cls), caller, "r")
        assert (problem.code, problem.status, problem.retryable) == (cls.__name__, row.status, row.retryable)
        assert problem.charged is (None if cls is OutcomeUnknown else False)
        assert (problem.decision is None) is (cls is not BudgetExceeded)
        assert problem.request_id == "r"
        body = msgspec.json.encode(problem)
        assert "charged" in msgspec.json.decode(body)  # false too
        assert msgspec.json.decode(body, type=Problem) == problem


def test_a_class_that_the_table_does_not_list_is_told_as_its_base() -> None:
    class Newer(errors.AccountClosed):
        pass

    assert problem_of(Newer("x"), None).code == "AccountClosed"


@pytest.mark.parametrize("charged", [False, True, None])
def test_what_became_of_the_charge_comes_from_the_error(charged: bool | None) -> None:  # noqa: FBT001  a field
    problem = problem_of(OutcomeUnknown("lost", key="q-17", charged=charged), None)
    assert problem.charged is charged
    assert problem.detail.endswith("ask again with the same key to know the outcome (key 'q-17')")
    assert problem_of(OutcomeUnknown("lost"), None).detail.endswith("to know the outcome")


def test_after_an_unexpected_exception_the_charge_may_have_been_made() -> None:
    assert unexpected_problem("r").charged is None


def leaks(caller: Caller | None) -> set[str]:
    """Return the errors whose message a caller reads as the library wrote it."""
    return {cls.__name__ for cls in ERROR_TABLE if SECRET in problem_of(make(cls), caller).detail}


def test_what_a_caller_may_not_see_is_not_in_the_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"LedgerNotFound", "AccountNotFound", "EntryNotFound", "ReservationNotFound"}
    hidden |= {"LedgerBusy", "LedgerError", "OutcomeUnknown", "ServiceUnavailable"}
    assert not leaks(None) & hidden
    bound = {"AccountClosed", "IdempotencyConflict", "LedgerCorrupt", "UnprovenComposition"}
    assert leaks(None) >= bound
    assert not leaks(BOUND) & (hidden | bound)
    monkeypatch.setattr(visibility, "LEDGER_MESSAGES", {})  # the broken version passes messages on
    assert leaks(BOUND) & hidden == {"LedgerBusy", "LedgerError", "OutcomeUnknown", "ServiceUnavailable"}


def test_the_log_does_not_get_the_key() -> None:
    assert operator_message(OutcomeUnknown("the disk is gone", key="q-17")) == "the disk is gone"
    assert operator_message(errors.LedgerBusy("a lock")) == "a lock"


def test_no_text_repeats_what_the_field_tells() -> None:
    assert "nothing was" not in inspect.getsource(visibility)
