"""Entries: what they carry, that they never change, how they are chained, and what can be erased beside them."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime

import psycopg
import pytest

import odograph as odo
from odograph import BudgetExceeded, Ledger, LedgerAccount, Policy, PureDP
from odograph.core.guarantees import guarantee_from_dict
from odograph.errors import EntryNotFound
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import Entry, price_from_text, text_of
from odograph.ledger.stores.memory import MemoryStore

TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")


@pytest.fixture
def busy(ledger: Ledger) -> Ledger:
    """Every verb once, with a note each; the multi-account charge has the note `both`."""
    ledger.open_account("top", BASIC, note="cap")
    ana = ledger.open_account("ana", BASIC, parent="top", note="hers")
    ledger.open_account("ben", BASIC, parent="top")
    ana.spend(TENTH, key="q", note="one")
    ledger.spend({"ana": TENTH, "ben": PureDP("0.2")}, note="both")
    ana.reserve(TENTH, note="held").void("not run")
    ana.reserve(TENTH).commit(note="done")
    with pytest.raises(BudgetExceeded):
        ana.spend(PureDP(7), note="too much")
    ledger.acting_as("zoe").account("ben").spend(TENTH, note="hers too")
    ledger.account("ben").close(note="over")
    return ledger


def entries(account: LedgerAccount) -> list[Entry]:
    return [past.entry for past in account.history()]


def test_an_entry_carries_all_that_was_asked(busy: Ledger) -> None:
    ana = busy.account("ana")
    spend = entries(ana)[1]
    assert (spend.version, spend.account, spend.sequence, spend.verb, spend.key) == (1, "ana", 1, "spend", "q")
    assert spend.guarantee == guarantee_from_dict(TENTH.to_dict()) == TENTH
    assert price_from_text(spend.price) == ana.compiled.price(TENTH)
    assert spend.legs == "ana#1/top#1"
    assert len(spend.principal) > 0
    assert spend.principal != "ana"
    assert "one" not in spend
    assert [one.verb for one in entries(ana)] == [
        "open",
        "spend",
        "spend",
        "reserve",
        "void",
        "reserve",
        "commit",
        "refuse",
    ]
    assert [one.verb for one in entries(busy.account("ben"))] == ["open", "spend", "spend", "close"]
    assert entries(busy.account("ben"))[-2].principal != spend.principal


def test_an_entry_in_plain_types_is_what_people_read(busy: Ledger) -> None:
    opened, *_, last = [past.to_dict() for past in busy.account("ana").history()]
    assert opened["cost"] is None
    assert json.loads(opened["sealed"]["detail"])["name"] == "ana"
    assert opened["principal"] == "ana"
    assert datetime.fromisoformat(opened["time"]) <= datetime.fromisoformat(last["time"])
    charge = next(past for past in busy.account("ana").history() if past.entry.verb == "spend")
    assert charge.entry.guarantee is not None
    assert charge.to_dict()["cost"] == charge.entry.guarantee.to_dict()
    assert charge.to_dict() == json.loads(json.dumps(charge.to_dict()))


def test_an_entry_for_several_accounts_names_all_its_legs(busy: Ledger) -> None:
    written = [one for account in busy.accounts() for one in entries(account) if one.legs.startswith("ana#2")]
    assert {one.legs for one in written} == {"ana#2/top#2 ben#1/top#3"}
    assert [one.id for one in written] == ["ana#2", "ben#1", "top#2", "top#3"]
    assert len({one.time for one in written}) == len({one.request for one in written}) == 1


def test_the_chain_can_be_checked_with_any_sha256(busy: Ledger) -> None:
    for account in busy.accounts():
        seal = "0" * 64
        for i, entry in enumerate(entries(account)):
            text = "\n".join([seal, *(str(field) for field in entry[:-1])])
            seal = hashlib.sha256(text.encode()).hexdigest()
            assert (entry.seal, entry.sequence) == (seal, i)
    heads = "\n".join(f"{one.name} {one.size - 1} {entries(one)[-1].seal}" for one in busy.accounts())
    assert busy.checkpoint().head == hashlib.sha256(heads.encode()).hexdigest()


def test_balances_are_derived_from_entries(busy: Ledger) -> None:
    for account in busy.accounts():
        amounts, steps = [0] * len(account.compiled.meters), 0
        for entry in entries(account):
            sign = {"spend": 1, "reserve": 1, "void": -1}.get(entry.verb, 0)
            steps += sign
            for i, amount in enumerate(price_from_text(entry.price).amounts if sign else ()):
                amounts[i] += sign * (amount or 0)
        assert (account.totals.amounts, account.totals.steps) == (tuple(amounts), steps)


TABLES = {
    "entries": ["verb = 'spend'", "cost = ''", "note = ''", "sequence = sequence + 100", "seal = seal"],
    "keys": ["key = 'x'", "sequence = 0", "owner = owner"],
    "accounts": [
        "name = 'x'",
        "parent = NULL",
        "dataset = 'x'",
        "unit = 'x'",
        "neighbours = 'x'",
        "successor_of = 'ana'",
    ],
}
CHANGES = [f"UPDATE {table} SET {change}" for table, changes in TABLES.items() for change in changes]  # noqa: S608
CHANGES += [f"DELETE FROM {table}" for table in TABLES]  # noqa: S608  our own names
CHANGES += ["DELETE FROM entries WHERE account = 'ana' AND sequence = 7"]


def rewritten(where: str, statement: str) -> None:
    """Run a statement as somebody would who has the store's own tools."""
    if where.startswith("postgresql"):
        with psycopg.connect(where) as server:
            server.execute("SET search_path TO odograph")
            server.execute(statement.encode())
        return
    with closing(sqlite3.connect(where.removeprefix("sqlite:///"))) as file, file:
        file.execute(statement)


@pytest.mark.parametrize("where", ["sqlite", "postgres"], indirect=True)
def test_the_store_itself_refuses_update_and_delete(busy: Ledger, where: str) -> None:
    before = busy.verify().checkpoint
    truncate = [f"TRUNCATE {table} CASCADE" for table in TABLES] if where.startswith("postgresql") else []
    for statement in [*CHANGES, *truncate]:
        with pytest.raises((sqlite3.IntegrityError, psycopg.errors.RaiseException), match="never"):
            rewritten(where, statement)
    assert busy.verify().checkpoint == before
    control = "UPDATE accounts SET totals = '9;9 9 9 9;0 0 0 0' WHERE name = 'ana'"
    rewritten(where, control)  # negative control: what is derived can be changed, and is found
    with pytest.raises(odo.errors.LedgerCorrupt, match="ana"):
        busy.verify()


@pytest.mark.parametrize("where", ["sqlite"], indirect=True)
def test_what_gets_past_the_triggers_is_seen(busy: Ledger, where: str) -> None:
    """SQLite's REPLACE deletes without firing a delete trigger: `verify` is what finds it."""
    with pytest.raises(sqlite3.IntegrityError):
        rewritten(where, "UPDATE OR REPLACE entries SET sequence = 1 WHERE sequence = 2")
    busy.verify()
    fields = (
        "version, account, sequence, time + 1, principal, verb, legs, cost, price, key, request, note, detail, seal"
    )
    rewritten(where, f"INSERT OR REPLACE INTO entries SELECT {fields} FROM entries WHERE sequence = 1")  # noqa: S608
    with pytest.raises(odo.errors.LedgerCorrupt, match="#1"):
        busy.verify()


# What can be erased.


def test_an_erased_note_leaves_its_digest(busy: Ledger, again: Callable[[], Ledger]) -> None:
    before = busy.checkpoint()
    assert busy.verify().notes_erased == 0
    digests = [one.note for one in entries(busy.account("ana"))]
    assert busy.erase_note("ana#1")
    assert not busy.erase_note("ana#1")
    assert not busy.erase_note(f"ana#{digests.index('')}")  # it never had one
    for missing in ("ana#99", "nobody#1"):
        with pytest.raises(EntryNotFound, match=f"no entry '{missing}'|no such entry"):
            busy.erase_note(missing)
    past = again().account("ana").history(1, 1)[0]
    assert (past.note, past.entry.note) == ("erased", digests[1])
    found = again().verify(checkpoint=before)
    assert (found.notes_erased, found.principals_erased) == (1, 0)
    assert "erased" in str(found)
    assert busy.account("ana").history(2, 1)[0].note == "both"
    text = exported(busy)
    assert '"one"' not in text
    assert '"both"' in text


def test_equal_notes_have_different_digests(ledger: Ledger) -> None:
    account = ledger.open_account("ana", BASIC)
    digests = [account.history(-1, 1)[0].entry.note for _ in range(2) if account.spend(PureDP(0), note="Jane Doe")]
    assert len(set(digests)) == 2  # nobody can guess an erased note by trying names
    assert hashlib.sha256(b"Jane Doe").hexdigest() not in digests


def test_an_erased_name_leaves_its_identity(busy: Ledger, again: Callable[[], Ledger]) -> None:
    before = busy.checkpoint()
    assert busy.erase_principal("zoe")
    assert not busy.erase_principal("zoe")
    assert not busy.erase_principal("nobody")
    past = again().account("ben").history(2, 1)[0]
    assert past.principal == "erased"
    assert past.note == "hers too"
    assert again().account("ben").history(0, 1)[0].principal == "ana"
    found = again().verify(checkpoint=before)
    assert found.principals_erased >= 1
    assert "erased" in str(found)
    assert "zoe" not in exported(busy)


def test_an_erased_principal_who_comes_back_is_a_new_one(busy: Ledger) -> None:
    busy.account("ana").spend(TENTH, key="k")
    before = busy.account("ana").history(-1, 1)[0].entry.principal
    busy.erase_principal("ana")
    busy.acting_as("ana").account("ana").spend(TENTH, key="l")
    last = busy.account("ana").history(-1, 1)[0]
    assert (last.principal, last.entry.principal != before) == ("ana", True)
    busy.verify()


def test_a_note_without_text_is_none(ledger: Ledger) -> None:
    account = ledger.open_account("ana", BASIC)
    account.spend(TENTH)
    assert account.history(1, 1)[0].note == ""
    assert ledger.verify().notes_erased == 0
    assert not ledger.erase_note("ana#1")


def exported(ledger: Ledger) -> str:
    file = io.StringIO()
    ledger.export(file)
    return file.getvalue()


def test_a_document_has_one_form() -> None:
    assert text_of({"b": 1, "a": "é"}) == text_of({"a": "é", "b": 1})


def test_a_note_written_while_a_page_is_read_does_not_show_as_erased() -> None:
    store = MemoryStore()
    ledger = odo.Ledger(LocalBackend(store, "ana"))
    account = ledger.open_account("a", BASIC)
    notes = store.notes

    def late(name: str, first: int, count: int) -> object:
        found = notes(name, first, count)
        if account.totals.steps == 0:
            account.spend(odo.PureDP("0.1"), note="just now")
        return found

    store.notes = late  # type: ignore[assignment, method-assign]
    assert all(past.note != "erased" for past in ledger.backend.history("a", 0, 10))
