"""Tampering with the file itself: `verify` names the first bad entry, and with a checkpoint misses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ledger_forgery import TENTH, Rows, forge, put, read, tamper, verified, write

import odograph as odo
from odograph import Checkpoint, PureDP
from odograph.errors import LedgerCorrupt
from odograph.ledger.entries import START, Entry, note_digest


def test_forging_nothing_is_not_seen(file: Path, checkpoint: Checkpoint) -> None:
    """The control of the tools here: rows that were read and written again are as they were."""
    forge(file, read(file))
    assert verified(file, checkpoint) == checkpoint


VERBS = ("open", "spend", "reserve", "commit", "void", "refuse", "close")
OTHER: dict[str, Callable[[Entry], object]] = {
    "version": lambda one: one.version + 1,
    "time": lambda one: one.time + 1,
    "principal": lambda one: one.principal[::-1],
    "verb": lambda one: {"spend": "refuse", "void": "commit", "commit": "void", "open": "close"}.get(
        one.verb, "spend"
    ),
    "legs": lambda one: one.legs.replace("#", "#1", 1),
    "cost": lambda one: one.cost.replace("0.1", "0.01") if "0.1" in one.cost else one.cost + " ",
    "price": lambda one: one.price.replace("1", "0", 1) if "1" in one.price else "0 0 0 0",
    "key": lambda one: one.key + "x",
    "request": lambda one: one.request[::-1],
    "note": lambda one: note_digest("salt", one.id),
    "detail": lambda one: one.detail[:-1] + ',"x":1}' if one.detail else '{"x":1}',
    "seal": lambda one: one.seal[::-1],
}


def changes(rows: Rows) -> Iterator[tuple[str, Entry, Entry]]:
    for chain in rows.values():
        for entry in chain:
            for field, other in OTHER.items():
                yield field, entry, Entry(**{**entry._asdict(), field: other(entry)})


def test_a_field_that_was_changed_is_named(file: Path) -> None:
    for field, entry, changed in changes(read(file)):
        put(file, changed)
        with pytest.raises(LedgerCorrupt) as caught:
            verified(file)
        assert entry.id in str(caught.value), (field, entry.id)
        put(file, entry)
    verified(file)


def test_a_field_that_was_changed_and_sealed_again_is_named_there_or_right_after(file: Path) -> None:
    rows = read(file)
    for field, entry, changed in changes(rows):
        if field == "seal":
            continue
        chain = rows[entry.account]
        before = chain[entry.sequence - 1].seal if entry.sequence else START
        put(file, changed._replace(seal=changed.reseal(before)))
        with pytest.raises(LedgerCorrupt) as caught:
            verified(file)
        after = chain[entry.sequence + 1].id if entry is not chain[-1] else entry.account
        same = [one.id for others in rows.values() for one in others if one.request_id == entry.request_id]
        assert any(place in str(caught.value) for place in (entry.id, after, *same)), (field, entry.id)
        put(file, entry)
    verified(file)


# What contradicts the rest of the ledger however well it is sealed.
ALWAYS = ("version", "verb", "legs")
CHARGED = ("price", "key", "request")
GARBAGE = (
    "",
    " ",
    "x",
    "[]",
    "null",
    "1",
    "-1",
    "{}",
    "9" * 40,
    '{"expires":1}',
    '{"expires":"x"}',
    '"x"',
    "ana#x",
    "é",
)


def test_garbage_in_any_field_is_named_as_what_it_is(file: Path) -> None:
    """Whatever stands in a field, sealed or not, `verify` says that the ledger is corrupt and does not stumble."""
    rows = read(file)
    wrong = []
    for verb in VERBS:
        entry = next(one for chain in rows.values() for one in chain if one.verb == verb)
        before = rows[entry.account][entry.sequence - 1].seal if entry.sequence else START
        for field in ("principal", "legs", "cost", "price", "key", "request", "note", "detail"):
            for garbage in GARBAGE:
                changed = Entry(**{**entry._asdict(), field: garbage})
                put(file, changed._replace(seal=changed.reseal(before)))
                try:
                    verified(file)
                except LedgerCorrupt:
                    pass
                except Exception as problem:  # noqa: BLE001  any other is the bug
                    wrong.append((verb, field, garbage, type(problem).__name__))
                put(file, entry)
    assert wrong == []


def test_a_history_rewritten_to_the_end_is_seen_with_the_checkpoint(file: Path, checkpoint: Checkpoint) -> None:
    """Each change is made with every seal and balance anew. Most contradict something; the checkpoint sees all."""
    rows = read(file)
    seen_alone = set()
    for field, entry, changed in changes(rows):
        if field == "seal":
            continue
        forged = {name: list(chain) for name, chain in rows.items()}
        forged[entry.account][entry.sequence] = changed
        forge(file, forged)
        with pytest.raises(LedgerCorrupt):
            verified(file, checkpoint)
        try:
            verified(file)
        except LedgerCorrupt:
            seen_alone.add((field, entry.id))
    forge(file, rows)
    assert verified(file, checkpoint) == checkpoint
    every = [one for chain in rows.values() for one in chain]
    assert [one.id for one in every for field in ALWAYS if (field, one.id) not in seen_alone] == []
    charges = [one for one in every if one.verb in ("spend", "reserve", "commit", "void")]
    assert [one.id for one in charges for field in CHARGED if (field, one.id) not in seen_alone] == []


REMOVALS: dict[str, Callable[[Rows], object]] = {
    "the last entry of one": lambda rows: rows["lone"].pop(),
    "the last two of one": lambda rows: rows["lone"].__delitem__(slice(-2, None)),
    "the last of one in a tree": lambda rows: rows["ana"].pop(),
    "the closing": lambda rows: rows["ben"].pop(),
    "an account": lambda rows: rows.pop("lone"),
    "an account with its charges elsewhere": lambda rows: rows.pop("ben"),
    "an entry in the middle": lambda rows: rows["lone"].pop(2),
    "all but the opening": lambda rows: rows["lone"].__delitem__(slice(1, None)),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize("keys_too", [False, True])
def test_a_removal_is_seen(
    file: Path,
    checkpoint: Checkpoint,
    remove: Callable[[Rows], object],
    keys_too: bool,  # noqa: FBT001
) -> None:
    rows = read(file)
    remove(rows)
    write(file, rows)
    with pytest.raises(LedgerCorrupt):
        verified(file)  # only the entries are gone, and what is beside them contradicts
    tamper(file, *[("DELETE FROM accounts WHERE name = ?", (name,)) for name in ("ben", "lone") if name not in rows])
    forge(file, {name: [one._replace(sequence=i) for i, one in enumerate(chain)] for name, chain in rows.items()})
    if keys_too:
        tamper(
            file,
            "DELETE FROM keys WHERE (account, sequence) NOT IN (SELECT account, sequence FROM entries)",
            "DELETE FROM notes WHERE (account, sequence) NOT IN (SELECT account, sequence FROM entries)",
        )
    tamper(file, "UPDATE accounts SET closed = 0 WHERE name = 'ben' AND sequence < 5")
    with pytest.raises(LedgerCorrupt):
        verified(file, checkpoint)


BESIDE: dict[str, tuple[str, str]] = {
    "lower totals": ("UPDATE accounts SET totals = '0;0 0 0 0;0 0 0 0' WHERE name = 'lone'", "lone"),
    "totals that are none": ("UPDATE accounts SET totals = 'x' WHERE name = 'lone'", "[a-z]"),
    "an account opened again": ("UPDATE accounts SET closed = 0 WHERE name = 'ben'", "ben"),
    "an account closed by hand": ("UPDATE accounts SET closed = 1 WHERE name = 'lone'", "lone"),
    "a shorter account": ("UPDATE accounts SET sequence = 2 WHERE name = 'lone'", "lone"),
    "another seal": ("UPDATE accounts SET seal = 'x' WHERE name = 'lone'", "lone"),
    "an earlier time": ("UPDATE accounts SET time = time - 1 WHERE name = 'lone'", "lone"),
    "another parent": ("UPDATE accounts SET parent = 'lone' WHERE name = 'ana'", "ana"),
    "no parent": ("UPDATE accounts SET parent = NULL WHERE name = 'ana'", "ana"),
    "another dataset": ("UPDATE accounts SET dataset = 'x' WHERE name = 'ana'", "ana"),
    "another unit": ("UPDATE accounts SET unit = 'x' WHERE name = 'ana'", "ana"),
    "a successor": ("UPDATE accounts SET successor_of = 'lone' WHERE name = 'ana'", "ana"),
    "a key gone": ("DELETE FROM keys WHERE key = 'q'", "q"),
    "a key of another": ("UPDATE keys SET owner = 'x' WHERE key = 'q'", "q"),
    "a key renamed": ("UPDATE keys SET key = 'x' WHERE key = 'q'", "[a-z]"),
    "a key that leads elsewhere": ("UPDATE keys SET sequence = 2 WHERE key = 'q'", "[a-z]"),
    "a key without a request": ("INSERT INTO keys VALUES ('me', 'x', 'lone', 1)", "[a-z]"),
    "a key that leads nowhere": (
        "INSERT INTO keys VALUES ('me', 'x', 'lone', 99)",
        "keys are stored, but the entries used",
    ),
    "a void's key gone": ("DELETE FROM keys WHERE owner = '' AND account = 'ana'", "[a-z]"),
    "a note rewritten": ("UPDATE notes SET text = 'another'", "ana#1"),
    "a salt rewritten": ("UPDATE notes SET salt = 'another'", "ana#1"),
    "a note where none was": ("INSERT INTO notes VALUES ('lone', 1, 's', 't')", "lone#1"),
    "an account that is not there": (
        "DELETE FROM accounts WHERE name = 'lone'",
        "'lone' has entries but no stored balance",
    ),
    "an account without entries": (
        "INSERT INTO accounts SELECT 'n', NULL, NULL, '', '', '', 0, '', 0, totals, 0, 0, '' FROM accounts LIMIT 1",
        "'n'",
    ),
}


@pytest.mark.parametrize(("statement", "named"), BESIDE.values(), ids=BESIDE)
def test_what_stands_beside_the_entries_must_follow_from_them(file: Path, statement: str, named: str) -> None:
    verified(file)
    tamper(file, statement)
    with pytest.raises(LedgerCorrupt, match=named):
        verified(file)


def swapped(rows: Rows) -> None:
    chain = rows["lone"]
    chain[2], chain[3] = chain[3]._replace(sequence=2, legs="lone#2"), chain[2]._replace(sequence=3, legs="lone#3")


def inserted(rows: Rows) -> None:
    chain = rows["lone"]
    chain.insert(2, chain[1])
    chain[2:] = [one._replace(sequence=i, legs=f"lone#{i}") for i, one in enumerate(chain[2:], start=2)]


def appended(rows: Rows) -> None:
    last = rows["lone"][-1]
    rows["lone"].append(last._replace(sequence=5, legs="lone#5", key="free"))


ORDERS = {"swapped": swapped, "inserted": inserted, "appended": appended}


@pytest.mark.parametrize("change", ORDERS.values(), ids=ORDERS)
def test_entries_swapped_or_inserted_are_seen(
    file: Path, checkpoint: Checkpoint, change: Callable[[Rows], None]
) -> None:
    rows = read(file)
    change(rows)
    write(file, rows)
    with pytest.raises(LedgerCorrupt, match=r"lone#[235]"):
        verified(file)
    forge(file, rows)
    with pytest.raises(LedgerCorrupt):
        verified(file, checkpoint)


def test_a_tampered_ledger_says_so_before_it_spends_more(file: Path) -> None:
    tamper(file, "UPDATE accounts SET totals = 'x' WHERE name = 'lone'")
    with odo.connect(f"sqlite:///{file}") as ledger, pytest.raises(LedgerCorrupt):
        ledger.spend({"lone": TENTH})


def test_what_an_answer_needs_and_is_gone_or_unreadable_is_named(file: Path) -> None:
    costs = {"ana": TENTH, "ben": PureDP("0.2")}
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        assert ledger.spend(costs, key="r").repeated
        tamper(file, "DELETE FROM entries WHERE account = 'ben' AND sequence = 1")
        with pytest.raises(LedgerCorrupt, match="entry ben#1 is missing"):
            ledger.spend(costs, key="r")
        held = ledger.account("ana").reserve(TENTH)
        put(file, read(file)["ana"][-1]._replace(cost=""))
        with pytest.raises(LedgerCorrupt, match=f"{held.id} charges for nothing"):
            ledger.reservation(held.id)
