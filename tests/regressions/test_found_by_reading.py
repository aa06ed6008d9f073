"""What a reader of the whole tree found: each of these went wrong once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

import odograph as odo
from odograph.core.meters import Meter
from odograph.errors import IdempotencyConflict, InvalidPolicy, LedgerBusy, LedgerError, ServiceUnavailable
from odograph.ledger.local import LocalBooks
from odograph.ledger.memory import MemoryStore
from odograph.ledger.store import Balance

POLICY = odo.Policy(1, 1e-6, rule="basic")


def test_a_budget_of_a_stricter_target_takes_what_the_policy_takes_and_can_be_read_back() -> None:
    compiled = odo.compile_policy(odo.Policy(1.1, 1e-6, takes=("pure",)), solve=False)
    assert odo.compiled_from_dict(compiled.to_dict()) == compiled
    assert pickle.loads(pickle.dumps(odo.Accountant(compiled))).compiled == compiled  # noqa: S301  our own
    with odo.connect("memory://") as ledger:
        ledger.open_account("x", compiled)
        assert [account.name for account in ledger.accounts()] == ["x"]
        ledger.verify()


def test_a_compiled_policy_that_could_not_be_read_back_is_not_written() -> None:
    compiled = odo.compile_policy(POLICY)
    more = tuple(
        meter if meter.limit is None else replace(meter, limit=100 * meter.limit) for meter in compiled.meters
    )
    with odo.connect("memory://") as ledger:
        with pytest.raises(InvalidPolicy):
            ledger.open_account("x", replace(compiled, meters=more))
        ledger.open_account("y", POLICY)
        assert [account.name for account in ledger.accounts()] == ["y"]
        ledger.verify()


class Forgetful(MemoryStore):
    """Cannot be read once it has written; or not all of it."""

    written = False
    some = False

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        if self.written and (names is None or not self.some):
            raise LedgerBusy("the database is away; nothing was charged. Try again")
        return super().balances(names)


def test_a_charge_whose_receipt_cannot_be_read_is_not_told_as_not_made() -> None:
    store = Forgetful()
    ledger = odo.Ledger(LocalBooks(store, "ana"))
    ledger.open_account("old", POLICY)
    account = ledger.open_account("new", POLICY, successor_of="old")
    store.written = True
    with pytest.raises(ServiceUnavailable, match=r"this is written, and its receipt could not be read.*'q-1'"):
        account.spend(odo.PureDP("0.1"), key="q-1")
    with pytest.raises(LedgerBusy):
        account.spend(odo.PureDP("0.1"), key="q-1")  # nothing is written by asking again
    store.some = True
    with pytest.raises(LedgerBusy):
        account.spend(odo.PureDP("0.1"), key="q-1")
    store.written = False
    assert account.spend(odo.PureDP("0.1"), key="q-1").repeated
    assert account.totals.steps == 1


def test_a_key_that_made_a_population_does_not_make_another_elsewhere(tmp_path: Path) -> None:
    with odo.connect("memory://") as ledger:
        made = odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "one", ids=5, key="k")
        with pytest.raises(IdempotencyConflict, match="'k' has made 'p' before"):
            odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "two", ids=5, key="k")
        assert not (tmp_path / "two").exists()
        assert made.charge(odo.PureDP("0.1"), key="c").mask.all()


def test_a_file_that_was_replaced_is_neither_verified_nor_copied(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/a.db") as ledger, odo.connect(f"sqlite:///{tmp_path}/b.db") as other:
        ledger.open_account("a", POLICY)
        other.open_account("b", POLICY)
        other.backup(tmp_path / "c.db")
        (tmp_path / "c.db").replace(tmp_path / "a.db")
        for work in (ledger.verify, lambda: ledger.backup(tmp_path / "d.db"), lambda: ledger.export(io.StringIO())):
            with pytest.raises(LedgerError, match="was moved or replaced"):
                work()


def test_a_number_of_a_stored_meter_that_would_fill_the_memory_is_refused_at_once() -> None:
    form = {"name": "renyi@2", "clock": "renyi", "limit": "1", "order": "1e3000000"}
    with pytest.raises(InvalidPolicy, match="order"):
        Meter.from_dict(form)


def test_a_note_written_while_a_page_is_read_does_not_show_as_erased() -> None:
    store = MemoryStore()
    ledger = odo.Ledger(LocalBooks(store, "ana"))
    account = ledger.open_account("a", POLICY)
    notes = store.notes

    def late(name: str, first: int, count: int) -> object:
        found = notes(name, first, count)
        if account.totals.steps == 0:
            account.spend(odo.PureDP("0.1"), note="just now")
        return found

    store.notes = late  # type: ignore[assignment, method-assign]
    assert all(past.note != "erased" for past in ledger.books.history("a", 0, 10))
