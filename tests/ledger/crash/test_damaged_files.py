"""Files that are damaged, foreign or rewritten: an error, or all as before; never a silently different total."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from broken_stores import ledger_at
from workload import COST, policy

import odograph as odo
from odograph.errors import LedgerCorrupt, LedgerError, LedgerNotFound, OdographError
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import SCHEMA

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
FLIPS = 4000 if FULL else 250
KEYS = [f"key-{number}" for number in range(40)]


def charge(ledger: Ledger, key: str) -> odo.Receipt:
    """Charge left, right or both of them, by the key's number."""
    number = int(key.rpartition("-")[2])
    names = (["left"], ["right"], ["left", "right"])[number % 3]
    return ledger.spend(dict.fromkeys(names, COST), key=key, note=f"question {number}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of every kind of entry, closed in good order: all of it is in one file."""
    path = tmp_path_factory.mktemp("whole") / "ledger.db"
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.open_account("all", policy(1000))
        ledger.open_account("left", policy(1000), parent="all", dataset="days")
        ledger.open_account("right", policy(1000), parent="all", dataset="days")
        for key in KEYS:
            charge(ledger, key)
        for key in ("pending", "committed", "voided"):
            ledger.reserve({"left": COST}, key=key)
        ledger.commit(ledger.account("left").pending[1].id)
        ledger.void(ledger.account("left").pending[1].id, "not run")
        with pytest.raises(odo.BudgetExceeded):
            ledger.spend({"right": odo.PureDP(100)})
        ledger.open_account("closed", policy(10)).close()
    assert not path.with_name("ledger.db-wal").exists()
    return path


def seen(path: Path) -> dict[str, Any]:
    """Verify a ledger, and give all that decides what it admits: totals, entries, what is pending, known keys."""
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        accounts = ledger.accounts()
        found: dict[str, Any] = {
            account.name: (
                account.totals,
                account.closed,
                [past.entry for past in account.history(0, 1000)],
                [reservation.id for reservation in account.pending],
                [*account.children],
            )
            for account in accounts
        }
        found["keys"] = [(receipt.id, receipt.repeated) for receipt in (charge(ledger, key) for key in KEYS)]
        ledger.verify()
    return found


def damage(whole: Path, folder: Path, data: bytes) -> Path:
    """Put damaged bytes where no other ledger was."""
    path = folder / whole.name
    for file in folder.iterdir():
        file.unlink()
    path.write_bytes(data)
    return path


def wrong(path: Path, expected: dict[str, Any]) -> str:
    """Say what is wrong with how a damaged ledger answers: it verifies and is not what it was, or fails unclearly."""
    try:
        return "" if seen(path) == expected else "silently different"
    except OdographError:
        return ""
    except Exception as error:  # noqa: BLE001  any other error is what is looked for
        return repr(error)


def flipped(data: bytes, position: int, bit: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def test_a_flipped_bit_is_found_or_changes_nothing(whole: Path, tmp_path: Path) -> None:
    data, expected = whole.read_bytes(), seen(whole)
    ends = {
        end - back for end in range(4096, len(data) + 1, 4096) for back in range(1, 60, 4)
    }  # rows grow from there
    bad = {}
    for position in sorted({*range(100), *range(0, len(data), len(data) // FLIPS), *ends}):
        path = damage(whole, tmp_path, flipped(data, position, position % 8))
        if found := wrong(path, expected):
            bad[position] = found
    assert not bad


def test_a_total_that_changed_without_an_error_would_be_seen(whole: Path, tmp_path: Path) -> None:
    # The control: a ledger that verifies, with one charge more.
    path = damage(whole, tmp_path, whole.read_bytes())
    expected = seen(path)
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.spend({"left": COST})
    assert wrong(path, expected) == "silently different"


@pytest.mark.parametrize("length", [0, 1, 50, 100, 512, 1024, 4096, 4097, 8192, -1, -100, -512, -4096, -4097, -8192])
def test_a_truncated_file_is_found(whole: Path, tmp_path: Path, length: int) -> None:
    data = whole.read_bytes()
    path = damage(whole, tmp_path, data[:length])
    with pytest.raises(LedgerError):
        seen(path)
    path.write_bytes(data)  # the rest of the file is back, and whatever the attempts left beside it stays
    assert seen(path) == seen(whole)


def make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")


def make_foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE accounts (name)")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (make_newer, f"has schema {SCHEMA + 1}.*reads {SCHEMA}; upgrade Odograph.*not changed"),
        (make_foreign, "is not a ledger of Odograph; it was not changed"),
        (lambda path: path.write_text("a shopping list\n" * 400), "is damaged|is not a ledger"),
        (lambda path: path.write_text("short"), "is damaged|is not a ledger"),
        (lambda path: path.write_bytes(b""), "is not a ledger of Odograph.*it was not changed"),
    ],
)
def test_a_file_that_is_no_ledger_of_ours_is_left_alone(
    whole: Path, tmp_path: Path, change: Callable[[Path], None], says: str
) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(whole, path)
    change(path)
    before = path.read_bytes()
    with ledger_at(f"sqlite:///{path}") as ledger:
        for ask in (
            lambda: ledger.account("left"),
            lambda: ledger.spend({"left": COST}),
            lambda: ledger.open_account("new", policy(10)),
            ledger.verify,
            ledger.checkpoint,
        ):
            with pytest.raises(LedgerError, match=says):
                ask()
    assert path.read_bytes() == before


def test_a_folder_or_nothing_in_place_of_a_ledger(tmp_path: Path) -> None:
    with ledger_at(f"sqlite:///{tmp_path}") as ledger:
        with pytest.raises(LedgerError):
            ledger.verify()
        with pytest.raises(LedgerError):
            ledger.open_account("a", policy(10))
    with ledger_at(f"sqlite:///{tmp_path}/missing/ledger.db") as ledger:
        with pytest.raises(LedgerNotFound, match="there is no ledger at"):
            ledger.verify()
        with pytest.raises(LedgerError, match="no ledger can be created at"):
            ledger.open_account("a", policy(10))


# Histories that somebody rewrote, with the triggers out of the way.

REWRITES = {
    "a lower cost": ["UPDATE entries SET cost = replace(cost, '0.001', '0.0001')"],
    "a lower price": ["UPDATE entries SET price = '0 1 0 0' WHERE account = 'left' AND sequence = 5"],
    "another verb": ["UPDATE entries SET verb = 'refuse' WHERE account = 'left' AND sequence = 5"],
    "lower totals": ["UPDATE accounts SET totals = (SELECT totals FROM accounts WHERE name = 'closed')"],
    "a key that is free again": ["DELETE FROM keys WHERE key = 'key-3'"],
    "a key moved": ["UPDATE keys SET sequence = sequence + 1 WHERE key = 'key-3'"],
    "an entry gone": ["DELETE FROM keys WHERE key = 'key-3'", "DELETE FROM entries WHERE key = 'key-3'"],
    "a last entry gone": ["DELETE FROM entries WHERE account = 'closed' AND verb = 'close'"],
    "an account open again": ["UPDATE accounts SET closed = 0 WHERE name = 'closed'"],
    "an account gone": ["DELETE FROM keys WHERE account = 'closed'", "DELETE FROM entries WHERE account = 'closed'"],
    "a note rewritten": ["UPDATE notes SET text = 'another' WHERE account = 'left' AND sequence = 1"],
}


def rewrite(path: Path, statements: Iterable[str]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for (trigger,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement


@pytest.mark.parametrize("statements", REWRITES.values(), ids=REWRITES.keys())
def test_a_rewritten_history_does_not_verify(whole: Path, tmp_path: Path, statements: list[str]) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(whole, path)
    rewrite(path, [])
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()  # the control: without its triggers, and otherwise as it was
    rewrite(path, statements)
    with ledger_at(f"sqlite:///{path}") as ledger, pytest.raises(LedgerCorrupt):
        ledger.verify()


def test_the_triggers_refuse_to_rewrite(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(whole, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in (
            "UPDATE entries SET cost = ''",
            "DELETE FROM entries",
            "UPDATE keys SET sequence = 0",
            "DELETE FROM keys",
            "DELETE FROM accounts",
            "UPDATE accounts SET parent = NULL",
        ):
            with pytest.raises(sqlite3.IntegrityError, match="never"):
                connection.execute(statement)


def test_a_history_that_is_whole_but_another_is_found_by_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    with ledger_at(f"sqlite:///{whole}") as ledger:
        kept = ledger.checkpoint()
        assert ledger.verify(checkpoint=kept).checkpoint == kept
    with ledger_at(f"sqlite:///{tmp_path}/forged.db") as forged:
        for name in ("all", "left", "right", "closed"):
            forged.open_account(name, policy(1000))
        for number in range(200):
            forged.spend({"left": COST, "right": COST, "all": COST, "closed": COST}, key=f"key-{number}")
        forged.verify()  # by itself there is nothing wrong with it
        with pytest.raises(LedgerCorrupt, match="the history was rewritten"):
            forged.verify(checkpoint=kept)


def test_a_log_that_lost_its_end_is_found_by_a_checkpoint(tmp_path: Path) -> None:
    # SQLite takes a damaged end of its log for the place where a crash cut it off: only a checkpoint can tell.
    with ledger_at(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        account = ledger.open_account("a", policy(100))
        for number in range(10):
            account.spend(COST, key=f"{number}")
        kept = ledger.checkpoint()
        data, log = [(tmp_path / name).read_bytes() for name in ("ledger.db", "ledger.db-wal")]
    middle, end = len(log) // 2, len(log)

    def verify(folder: str, log: bytes) -> None:
        path = tmp_path / folder / "ledger.db"
        path.parent.mkdir()
        path.write_bytes(data)
        path.with_name("ledger.db-wal").write_bytes(log)
        with ledger_at(f"sqlite:///{path}") as copy:
            copy.verify(checkpoint=kept)

    verify("whole", log)  # the control
    for number, cut in enumerate([b"", log[:middle], log[:-1], flipped(log, middle, 0), flipped(log, end - 100, 0)]):
        with pytest.raises(LedgerCorrupt, match="behind its checkpoint"):
            verify(str(number), cut)
