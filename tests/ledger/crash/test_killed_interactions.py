"""A program killed with interactive mechanisms open: the charges stand, and the keys tell that they were begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import odograph as odo
from odograph.core.guarantees import Interactive
from odograph.errors import IdempotencyConflict

PROGRAM = Path(__file__).parent / "programs" / "interacting.py"
COUNT = 5
TENTH = odo.PureDP("0.1")


def test_charges_of_open_mechanisms_survive_a_kill(store_url: str) -> None:
    with odo.connect(store_url, principal="ana") as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    command = [sys.executable, str(PROGRAM), store_url, str(COUNT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:  # noqa: S603  our own code
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "open\n"
        finally:
            program.kill()
    with odo.connect(store_url, principal="ana") as ledger:
        account = ledger.account("census")
        before = account.totals
        assert (before.steps, before.amounts[1]) == (COUNT, COUNT * 10**14)
        # What was asked is committed; what was opened only is still to be resolved, by whoever knows.
        pending = {one.receipt.key for one in account.pending}
        assert pending == {f"key-{i}" for i in range(COUNT) if i % 2}
        for i in range(COUNT):
            with pytest.raises(IdempotencyConflict, match="was used before"):
                account.interact(lambda: pytest.fail("it was opened twice"), cost=TENTH, key=f"key-{i}")
            again = account.reserve(Interactive(TENTH), key=f"key-{i}")
            assert again.repeated
        assert account.totals == before
        for one in account.pending:
            one.commit(note="it may have been asked")
        assert (account.totals, account.pending) == (before, ())
        ledger.verify()
