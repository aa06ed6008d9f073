"""What is not defended against, shown, so that the page of threats says no more and no less."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from ledger_forgery import BASIC, TENTH, forge, read, tamper, verified

import odograph as odo
from odograph import BudgetExceeded, Checkpoint, PureDP
from odograph.errors import LedgerCorrupt


def test_a_forged_history_is_not_seen_without_a_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    history = read(file)
    history["lone"].pop()
    forge(file, history)
    tamper(
        file,
        "DELETE FROM keys WHERE (account, sequence) NOT IN (SELECT account, sequence FROM entries)",
        "DELETE FROM notes WHERE (account, sequence) NOT IN (SELECT account, sequence FROM entries)",
    )
    verified(file)
    with pytest.raises(LedgerCorrupt):
        verified(file, checkpoint)


def test_a_file_copied_with_other_tools_is_a_second_budget(tmp_path: Path) -> None:
    original, copied = tmp_path / "ledger.db", tmp_path / "copied.db"
    with odo.connect(f"sqlite:///{original}", principal="ana") as ledger:
        ledger.open_account("all", BASIC)
    shutil.copy(original, copied)
    for path in (original, copied):
        with odo.connect(f"sqlite:///{path}", principal="ana") as ledger:
            ledger.account("all").spend(PureDP(1))
            with pytest.raises(BudgetExceeded):
                ledger.account("all").spend(TENTH)


def test_the_stated_cost_of_a_plain_function_is_believed() -> None:
    account = odo.Accountant(BASIC)
    with odo.session(account) as s:
        assert s.run(sum, [1, 2, 3], cost=PureDP(0.001)) == 6


def test_a_clock_set_back_by_more_than_an_hour_revives_a_void_and_verify_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.time_ns()
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("all", BASIC)
        held = account.reserve(TENTH, expires=60)
        monkeypatch.setattr(time, "time_ns", lambda: now + 2 * 3600 * 10**9)
        account.spend(TENTH)
        monkeypatch.setattr(time, "time_ns", lambda: now + 10**9)
        account.spend(TENTH)
        held.void("after the clock was set back")
        assert ledger.verify().set_back == ("all#3",)
