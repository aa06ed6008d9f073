"""A notebook that is run again from the top: with keys nothing is charged twice, and no second answer is given."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import odograph as odo
from odograph import Account, Accountant, IdempotencyConflict, Policy, PureDP, private, session
from odograph.errors import InvalidArgument

TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")

# A notebook, as a script. Its argument is the prefix of its keys, or nothing.
NOTEBOOK = """
import sys
import odograph as odo

url, keyed = sys.argv[1], sys.argv[2] == "keyed"
ledger = odo.connect(url, principal="ana")
account = ledger.open_account("ward", odo.Policy(1, 0, filter="basic"), key="open ward")

def count(rows):
    return len(rows)

answers = []
with odo.session(account) as s:
    for name, rows in (("beds", [1, 2]), ("wards", [3])):
        try:
            answers.append(s.run(count, rows, cost=odo.PureDP("0.1"), key=name if keyed else None))
        except odo.IdempotencyConflict as problem:
            assert name in str(problem)
            answers.append("given before")
print(account.totals.steps, account.totals.amounts[1], *answers)
"""


def run_notebook(file: Path, keyed: str) -> str:
    command = [sys.executable, "-c", NOTEBOOK, f"sqlite:///{file}", keyed]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def test_a_notebook_that_is_run_again_is_not_charged_again(tmp_path: Path) -> None:
    first = run_notebook(tmp_path / "ledger.db", "keyed")
    again = run_notebook(tmp_path / "ledger.db", "keyed")
    assert first == f"2 {2 * 10**14} 2 1"
    assert again == f"2 {2 * 10**14} given before given before"
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.verify()
        assert ledger.account("ward").pending == ()


def test_without_keys_it_is_charged_twice(tmp_path: Path) -> None:
    """The control: the same notebook, and the second run pays and answers again."""
    assert run_notebook(tmp_path / "ledger.db", "without") == f"2 {2 * 10**14} 2 1"
    assert run_notebook(tmp_path / "ledger.db", "without") == f"4 {4 * 10**14} 2 1"


@pytest.fixture(params=["accountant", "ledger"])
def account(request: pytest.FixtureRequest) -> Account:
    if request.param == "accountant":
        return Accountant(BASIC, name="ward")
    return odo.connect("memory://").open_account("ward", BASIC)


def double(number: int) -> int:
    return 2 * number


def test_a_key_runs_a_mechanism_once(account: Account) -> None:
    with session(account) as s:
        assert s.run(double, 3, cost=TENTH, key="q") == 6
        with pytest.raises(IdempotencyConflict) as caught:
            s.run(lambda: pytest.fail("the mechanism ran"), cost=TENTH, key="q")
        assert str(caught.value) == (
            "key 'q' was used before (ward#1): what it paid for was run, or may have been, and the answer is not"
            " stored. Another key runs it again and charges it again"
        )
        assert caught.value.charged is False
        assert s.run(double, 4, cost=TENTH, key="r") == 8
    assert account.totals.steps == 2
    assert [(entry.verb, entry.key, entry.note) for entry in account.history(1) if entry.verb == "reserve"] == [
        ("reserve", "q", "double"),
        ("reserve", "r", "double"),
    ]


def test_what_raised_under_a_key_needs_another(account: Account) -> None:
    with session(account) as s:
        with pytest.raises(ZeroDivisionError) as caught:
            s.run(lambda: 1 // 0, cost=TENTH, key="q")
        assert "Correct the mechanism and run it again under another key: that is charged again" in str(
            caught.value.__notes__
        )
        with pytest.raises(IdempotencyConflict):
            s.run(double, 1, cost=TENTH, key="q")
    assert account.totals.steps == 1


def test_a_refusal_leaves_the_key_to_a_smaller_request(account: Account) -> None:
    with session(account) as s:
        with pytest.raises(odo.BudgetExceeded):
            s.run(double, 1, cost=PureDP(2), key="q")
        assert s.run(double, 1, cost=TENTH, key="q") == 2


def test_a_declared_mechanism_is_given_its_key_by_run(account: Account) -> None:
    declared: Callable[[int], int] = private(cost=TENTH)(double)
    with session(account) as s:
        assert s.run(declared, 2, key="q") == 4
        with pytest.raises(IdempotencyConflict):
            s.run(declared, 2, key="q")
        assert declared(2) == 4  # called by itself it has no key
    assert account.totals.steps == 2


def test_a_mechanism_with_a_parameter_called_key_is_given_it_beforehand(account: Account) -> None:
    def pick(rows: dict[str, int], *, key: str, note: str = "") -> str:
        return f"{rows[key]}{note}"

    with session(account) as s:
        for _ in range(2):
            assert s.run(functools.partial(pick, key="blue", note="!"), {"blue": 7}, cost=TENTH) == "7!"
        assert s.run(functools.partial(pick, key="blue"), {"blue": 7}, cost=TENTH, key="q") == "7"
        with pytest.raises(odo.errors.InvalidGuarantee, match="does not take these arguments"):
            s.run(pick, {"blue": 7}, cost=TENTH, key="blue")
    assert account.totals.steps == 3


@pytest.mark.parametrize("key", ["", 3, "a\nb", "x" * 201, ["4111-1111"]])
def test_a_wrong_key_is_refused_before_anything_runs_and_shows_no_data(account: Account, key: str) -> None:
    with session(account) as s, pytest.raises(InvalidArgument, match="key must be a string of 1 to 200") as caught:
        s.run(lambda: pytest.fail("the mechanism ran"), cost=TENTH, key=key)
    assert "4111" not in str(caught.value)
    assert account.totals.steps == 0
