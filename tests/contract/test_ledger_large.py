"""Ledgers of more entries than are read, replayed or stored at a time."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

import odograph as odo
from odograph import Checkpoint, Ledger, LedgerCorrupt, Policy, PureDP
from odograph.ledger.entries import Entry

CHARGES = 5001


@pytest.fixture(scope="module")
def large() -> Iterator[Ledger]:
    """One account, and so many charges that no two are alike."""
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("a", Policy(1, 0, rule="basic"))
        for number in range(1, CHARGES + 1):
            account.spend(PureDP(f"{number}e-8"), key=f"{number}")
        yield ledger


@pytest.fixture(scope="module")
def text(large: Ledger) -> str:
    file = io.StringIO()
    large.export(file)
    return file.getvalue()


def test_a_long_history_is_replayed_copied_and_told_how_far(large: Ledger, text: str) -> None:
    told: list[tuple[int, int]] = []
    file = io.StringIO()
    assert large.verify(progress=lambda *how_far: told.append(how_far)).entries == CHARGES + 1
    large.export(file, progress=lambda *how_far: told.append(how_far))
    assert file.getvalue() == text
    with odo.connect("memory://", principal="ana") as copy:
        copy.import_(io.StringIO(text), checkpoint=large.checkpoint(), progress=lambda *how_far: told.append(how_far))
        assert copy.account("a").totals == large.account("a").totals
        assert copy.account("a").totals.amounts[1] == sum(range(1, CHARGES + 1)) * 10**7
        assert copy.verify() == large.verify()
        assert copy.account("a").spend(PureDP("1e-8"), key="1").repeated
    assert told == [(5000, CHARGES + 1), (5000, CHARGES + 1), (5000, 0)]


def with_a_key_twice(text: str) -> str:
    """The last charge under the key of the first, with all that is sealed over it made anew."""
    *lines, last, principal, end = text.splitlines()
    fields = json.loads(last)["entry"] | {"key": "1"}
    before = json.loads(lines[-1])["entry"]["seal"]
    numbers = {name: int(fields[name]) for name in ("version", "sequence", "time")}
    fields["seal"] = Entry(**(fields | numbers)).reseal(before)
    end = json.loads(end) | {"checkpoint": Checkpoint({"a": (CHARGES, fields["seal"])}).to_dict()}
    return "\n".join([*lines, json.dumps({"entry": fields}), principal, json.dumps(end)])


def test_a_key_used_again_much_later_is_refused_on_the_way_in(text: str, url: str) -> None:
    with odo.connect(url) as copy:
        with pytest.raises(LedgerCorrupt, match=r"used twice|contradicts"):
            copy.import_(io.StringIO(with_a_key_twice(text)))
        with pytest.raises(odo.OdographError):
            copy.account("a")
