"""The table of pending reservations: the same as what the entries say, on every store, upgraded and tampered with."""

from __future__ import annotations

import io
import itertools
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import odograph as odo
from odograph.errors import LedgerCorrupt
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Author, Charge, Command, Made, Resolve
from odograph.ledger.engine import carry_out
from odograph.ledger.entries import RESOLUTIONS
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Pending, migrations
from odograph.ledger.stores.sqlite import SQL, SqliteStore

FIXTURES = Path(__file__).parents[1] / "fixtures"
BASIC = odo.Policy(1000, 0, filter="basic")
COST = odo.PureDP("0.01")
NAMES = ("top", "low", "other")
TIMEOUT = 60.0  # seconds


def local(ledger: Ledger) -> LocalBackend:
    assert isinstance(ledger.backend, LocalBackend)
    return ledger.backend


def open_accounts(ledger: Ledger) -> None:
    for name, parent in (("top", ""), ("low", "top"), ("other", "")):
        ledger.open_account(name, BASIC, parent=parent)


def listed(ledger: Ledger, size: int = 100) -> set[Pending]:
    """What the store lists, page by page."""
    found = set()
    for name in NAMES:
        first = 0
        while page := local(ledger).store.pending(name, first, size):
            assert len(page) <= size
            assert [entry.sequence for entry in page] == sorted(entry.sequence for entry in page)
            found |= {Pending(name, entry.request_id, entry.sequence) for entry in page}
            first = page[-1].sequence + 1
        assert local(ledger).store.pending_count(name) == sum(one.account == name for one in found)
    return found


def replayed(ledger: Ledger) -> set[Pending]:
    """What the entries say, read from the first on."""
    found: dict[tuple[str, str], int] = {}
    for name in NAMES:
        for entry in (past.entry for past in ledger.account(name).history()):
            if entry.verb == "reserve":
                found.setdefault((name, entry.request_id), entry.sequence)
            elif entry.verb in RESOLUTIONS:
                found.pop((name, entry.key), None)
    return {Pending(*key, sequence) for key, sequence in found.items()}


def work(ledger: Ledger, steps: Sequence[tuple[str, int]]) -> None:
    """Reserve of one account or of several, spend, commit or void as the steps say."""
    held: list[odo.Reservation] = []
    for verb, which in steps:
        if verb == "reserve":
            some = [{"top": COST}, {"low": COST}, {"low": COST, "top": COST}, {"low": COST, "other": COST}][which % 4]
            held.append(ledger.reserve(some))
        elif verb == "spend":
            ledger.account(NAMES[which % 3]).spend(COST)
        elif held:
            one = held.pop(which % len(held))
            one.commit() if verb == "commit" else one.void("not run")


STEPS = st.lists(
    st.tuples(st.sampled_from(["reserve", "reserve", "spend", "commit", "void"]), st.integers(0, 9)), max_size=25
)
# Every kind of request once, and every way to resolve one.
ALL_STEPS = [("reserve", i) for i in range(8)] + [
    ("commit", 1),
    ("void", 2),
    ("spend", 0),
    ("void", 0),
    ("commit", 3),
]


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, size=st.integers(1, 4))
def test_in_memory_the_pages_are_what_the_entries_say(steps: list[tuple[str, int]], size: int) -> None:
    with odo.connect("memory://") as ledger:
        open_accounts(ledger)
        work(ledger, steps)
        assert listed(ledger, size) == replayed(ledger)
        ledger.verify()


def test_on_every_store_the_pages_are_what_the_entries_say(url: str) -> None:
    with odo.connect(url) as ledger:
        open_accounts(ledger)
        for done in range(1, len(ALL_STEPS) + 1, 4):
            work(ledger, ALL_STEPS[:done])
        found = listed(ledger, 2)
        assert found == replayed(ledger)
        assert {one.account for one in found} == {*NAMES}
        assert [len(ledger.account(name).pending) for name in NAMES] == [
            sum(one.account == name for one in found) for name in NAMES
        ]
        voided = [
            len({past.entry.id for past in ledger.account(name).history() if past.verb == "void"}) for name in NAMES
        ]
        assert [ledger.account(name).voids for name in NAMES] == voided
        assert sum(voided) > 2
        ledger.verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("DELETE FROM pending WHERE account = 'low'", "is pending and is not listed, in account 'low'"),
        ("INSERT INTO pending VALUES ('other', 'other#9', 9)", "is listed as pending and is not, in account 'other'"),
        ("UPDATE pending SET sequence = sequence + 100 WHERE account = 'top'", "in account 'top'"),
        ("DELETE FROM voids WHERE account = 'low'", r"\d+ voids are counted, but there are \d+"),
        ("INSERT INTO voids VALUES ('other', 0)", r"\d+ voids are counted, but there are \d+"),
    ],
)
def test_a_table_that_contradicts_the_entries_is_found_by_verify(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "ledger.db"
    with odo.connect(f"sqlite:///{path}") as ledger:
        open_accounts(ledger)
        work(ledger, ALL_STEPS)
        ledger.verify()
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute(change)
    with odo.connect(f"sqlite:///{path}") as ledger, pytest.raises(LedgerCorrupt, match=message):
        ledger.verify()


def commit_one(ledger: Ledger) -> None:
    ledger.account("low").pending[0].commit()


def void_one(ledger: Ledger) -> None:
    ledger.account("low").pending[0].void("not run")


def reserve_one(ledger: Ledger) -> None:
    work(ledger, [("reserve", 1)])


@pytest.mark.parametrize(
    ("then", "message"),
    [
        (commit_one, "is listed as pending and is not"),
        (void_one, r"\d+ voids are counted, but there are \d+|is listed as pending and is not"),
        (reserve_one, "is pending and is not listed"),
    ],
)
def test_a_file_without_its_trigger_is_found_by_verify(
    tmp_path: Path, then: Callable[[Ledger], None], message: str
) -> None:
    path = tmp_path / "ledger.db"
    with odo.connect(f"sqlite:///{path}") as ledger:
        open_accounts(ledger)
        work(ledger, ALL_STEPS)
        then(ledger)
        ledger.verify()
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("DROP TRIGGER accounts_pend")
    with odo.connect(f"sqlite:///{path}") as ledger:
        then(ledger)
        with pytest.raises(LedgerCorrupt, match=message):
            ledger.verify()


def test_one_transaction_may_reserve_spend_and_resolve(url: str) -> None:
    """A group of many requests is one transaction, which moves each account's row once."""
    with odo.connect(url) as ledger:
        open_accounts(ledger)
        work(ledger, [("reserve", i) for i in range(4)])
        backend = local(ledger)
        shared, low = backend.price({"low": COST, "other": COST}), backend.price({"low": COST})
        commands: list[Command] = []
        for i, reservation in enumerate(ledger.account("low").pending):
            entries, legs = backend.reserved(reservation.id)
            author = Author(backend.identity(), reservation.id)
            commands += [
                Charge(backend.author(f"spend {i}"), "spend", low),
                Resolve(author, "void" if i % 2 else "commit", entries, legs),
                Charge(backend.author(f"reserve {i}"), "reserve", shared),
            ]
        outcomes = carry_out(backend.store, commands)
        assert all(isinstance(outcome, Made) for outcome in outcomes)
        assert len(outcomes) == 9
        assert listed(ledger, 2) == replayed(ledger)
        assert ledger.account("low").voids == 1
        ledger.verify()


# Those that a file had which a development version of schema 3 made.
FORMER_TRIGGERS = (
    "DROP TRIGGER accounts_pend",
    (
        "CREATE TRIGGER entries_pend AFTER INSERT ON entries WHEN NEW.verb = 'reserve' BEGIN INSERT INTO pending"
        " VALUES (NEW.account, substr(NEW.legs, 1, min(instr(NEW.legs || ' ', ' '), instr(NEW.legs || '/', '/'))"
        " - 1), NEW.sequence) ON CONFLICT (account, reservation) DO NOTHING; END"
    ),
    (
        "CREATE TRIGGER entries_resolve AFTER INSERT ON entries WHEN NEW.verb IN ('commit', 'void') BEGIN DELETE FROM"
        " pending WHERE account = NEW.account AND reservation = NEW.key; END"
    ),
    (
        "CREATE TRIGGER entries_void AFTER INSERT ON entries WHEN NEW.verb = 'void' BEGIN INSERT INTO voids VALUES"
        " (NEW.account, NEW.sequence); END"
    ),
)


def import_copy(folder: Path, *changes: str) -> None:
    """Import a copy into a new file, changed before that; check its tables, go on, and check them again."""
    copy, path = io.StringIO(), folder / "imported.db"
    with odo.connect(f"sqlite:///{folder}/original.db") as ledger:
        open_accounts(ledger)
        work(ledger, ALL_STEPS)
        checkpoint = ledger.export(copy)
    SqliteStore(path).create()
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        for change in changes:
            file.execute(change)
    copy.seek(0)
    with odo.connect(f"sqlite:///{path}") as ledger:
        ledger.import_(copy, checkpoint=checkpoint)
        assert listed(ledger) == replayed(ledger)
        ledger.verify()
        for then in (commit_one, void_one, reserve_one):
            then(ledger)
        assert listed(ledger) == replayed(ledger)
        ledger.verify()


@pytest.mark.parametrize("changes", [(), FORMER_TRIGGERS])
def test_a_copy_that_is_imported_lists_what_is_pending(tmp_path: Path, changes: tuple[str, ...]) -> None:
    import_copy(tmp_path, *changes)


@pytest.mark.parametrize("query", ["fill_pending", "fill_voids"])
def test_an_import_that_lists_nothing_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    monkeypatch.setitem(SQL, query, "SELECT 1")
    with pytest.raises((AssertionError, LedgerCorrupt)):
        import_copy(tmp_path)


@pytest.mark.parametrize("schema", [1, 2])
def test_an_old_file_lists_what_was_pending_when_it_is_upgraded(tmp_path: Path, schema: int) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(FIXTURES / f"ledger-schema-{schema}.db", path)
    with odo.connect(f"sqlite:///{path}") as ledger:
        (reservation,) = ledger.account("feb").pending
        assert [one.id for one in ledger.account("everyone").pending] == [reservation.id]
        assert (ledger.account("feb").voids, ledger.account("everyone").voids, ledger.account("jan").voids) == (
            1,
            1,
            0,
        )
        ledger.verify()
        reservation.commit()
        assert ledger.account("everyone").pending == ()
        ledger.verify()


def test_an_upgrade_that_lists_too_much_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(FIXTURES / "ledger-schema-2.db", path)
    first, second, third = migrations("sqlite")
    broken = third.replace("keys.owner = ''", "keys.owner = 'ana'")
    assert broken != third
    monkeypatch.setattr("odograph.ledger.stores.sqlite.migrations", lambda _: [first, second, broken])
    with odo.connect(f"sqlite:///{path}") as ledger, pytest.raises(LedgerCorrupt, match="is listed as pending"):
        ledger.verify()


def test_an_old_database_is_upgraded_and_its_readers_may_read_the_new_table(postgres_url: str) -> None:
    with (
        closing(sqlite3.connect(FIXTURES / "ledger-schema-2.db")) as old,
        psycopg.connect(postgres_url, autocommit=True) as connection,
    ):
        for script in migrations("postgres")[:2]:
            connection.execute(script.encode())
        connection.execute("INSERT INTO odograph.schema_version VALUES (2)")
        connection.execute("DROP ROLE IF EXISTS auditing_reader")
        connection.execute("CREATE ROLE auditing_reader")
        connection.execute("GRANT SELECT ON odograph.entries TO auditing_reader")
        with connection.transaction():
            connection.execute("SET CONSTRAINTS ALL DEFERRED")
            for table in ("accounts", "entries", "keys", "notes", "principals"):
                names = [row[1] for row in old.execute(f"PRAGMA table_info({table})")]
                flags = [name in {"closed", "linked"} for name in names]
                rows = [
                    [bool(value) if flag else value for value, flag in zip(row, flags, strict=True)]
                    for row in old.execute(f"SELECT * FROM {table}")  # noqa: S608  a name from above
                ]
                marks = ", ".join(["%s"] * len(names))
                query = f"INSERT INTO odograph.{table} ({', '.join(names)}) VALUES ({marks})"  # noqa: S608
                connection.cursor().executemany(query.encode(), rows)
    with odo.connect(postgres_url) as ledger:
        (reservation,) = ledger.account("feb").pending
        assert (ledger.account("feb").voids, ledger.account("everyone").voids) == (1, 1)
        ledger.verify()
        reservation.commit()
        assert ledger.account("feb").pending == ()
        ledger.verify()
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("GRANT USAGE ON SCHEMA odograph TO auditing_reader")
        connection.execute("SET ROLE auditing_reader")
        assert connection.execute("SELECT count(*) FROM odograph.pending, odograph.voids").fetchone() == (0,)
        connection.execute("RESET ROLE")
        connection.execute("DROP OWNED BY auditing_reader")
        connection.execute("DROP ROLE auditing_reader")


def upgrade_beside_a_program(url: str) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Upgrade from schema 2 while another program has written a reservation and has not committed it yet.

    Returns what is listed as pending after that, and what the entries say.
    """
    with psycopg.connect(url, autocommit=True) as look, psycopg.connect(url) as program:
        for script in migrations("postgres")[:2]:
            look.execute(script.encode())
        look.execute("INSERT INTO odograph.schema_version VALUES (2)")
        names = "name, parent, successor_of, dataset, unit, neighbours, sequence, seal, time, totals, closed, linked"
        program.execute(
            f"INSERT INTO odograph.accounts ({names}, origin)"  # noqa: S608  as above
            " VALUES ('low', NULL, NULL, '', 'person', 'add-remove', 1, '', 0, '0;0;0', false, false, '')"
        )
        program.execute(
            "INSERT INTO odograph.entries"
            " VALUES (1, 'low', 1, 0, '', 'reserve', 'low#1', '', '', 'k', '', '', '', '')"
        )
        with ThreadPoolExecutor(1) as pool, odo.connect(url) as ledger:
            upgrade = pool.submit(local(ledger).store.balances)
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            end = time.monotonic() + TIMEOUT
            while look.execute(waits).fetchone() == (0,):
                assert time.monotonic() < end, "the upgrade did not wait for the program"
            program.commit()
            assert [*upgrade.result(TIMEOUT)] == ["low"]
        listed = look.execute("SELECT account, reservation FROM odograph.pending").fetchall()
        entries = look.execute("SELECT account, legs FROM odograph.entries WHERE verb = 'reserve'").fetchall()
        return {*listed}, {*entries}


def test_an_upgrade_lists_what_a_program_of_the_release_before_is_writing(postgres_url: str) -> None:
    listed, entries = upgrade_beside_a_program(postgres_url)
    assert listed == entries == {("low", "low#1")}


def test_an_upgrade_that_waits_after_it_has_read_is_caught(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = migrations("postgres")
    broken = third.replace("LOCK TABLE odograph.entries IN ACCESS EXCLUSIVE MODE;", "")
    assert broken != third
    monkeypatch.setattr("odograph.ledger.stores.postgres.migrations", lambda _: [first, second, broken])
    listed, entries = upgrade_beside_a_program(postgres_url)
    assert listed < entries


def steps_to_show(store: SqliteStore, name: str) -> int:
    """Count the instructions of SQLite's machine that reading the first page of pending reservations takes."""
    taken = itertools.count()
    with store._reading() as connection:  # noqa: SLF001  to count what it does
        connection.set_progress_handler(lambda: next(taken) and None, 1)
        try:
            connection.execute(SQL["pending"], (name, 0, 25)).fetchall()
            connection.execute(SQL["pending_count"], (name,)).fetchall()
        finally:
            connection.set_progress_handler(None, 1)
    return next(taken)


def test_showing_what_is_pending_takes_no_longer_for_what_was_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        store = local(ledger).store
        assert isinstance(store, SqliteStore)
        open_accounts(ledger)
        work(ledger, [("reserve", 0)])
        before = steps_to_show(store, "top")
        work(ledger, [step for _ in range(60) for step in (("reserve", 0), ("commit", 0))])
        assert steps_to_show(store, "top") == before
        # As it was before schema 3: every reservation ever made is looked up.
        searched = (
            "SELECT sequence FROM entries WHERE account = ? AND verb = 'reserve' AND sequence >= ? AND NOT EXISTS"
            " (SELECT 1 FROM keys WHERE keys.owner = '' AND keys.key = entries.legs) LIMIT ?"
        )
        monkeypatch.setitem(SQL, "pending", searched)
        assert steps_to_show(store, "top") > before + 60


def test_a_role_that_may_only_append_keeps_the_table_and_cannot_change_it(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger:
        open_accounts(ledger)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS appending_job")
        connection.execute("CREATE ROLE appending_job")
        for grant in (  # as docs/how-to/postgresql.md has them
            "USAGE ON SCHEMA odograph",
            "SELECT ON ALL TABLES IN SCHEMA odograph",
            "INSERT ON odograph.accounts, odograph.entries, odograph.keys, odograph.notes, odograph.principals",
            "UPDATE (sequence, seal, time, totals, closed, linked) ON odograph.accounts",
        ):
            connection.execute(f"GRANT {grant} TO appending_job".encode())
    as_job = f"{postgres_url}{'&' if '?' in postgres_url else '?'}options=-crole%3Dappending_job"
    with odo.connect(as_job) as ledger:
        work(ledger, ALL_STEPS)
        assert listed(ledger) == replayed(ledger) != set()
        ledger.verify()
    with psycopg.connect(as_job) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("DELETE FROM odograph.pending")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY appending_job")
        connection.execute("DROP ROLE appending_job")


def test_a_reservation_says_who_made_it_of_how_much_and_until_when() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        open_accounts(ledger)
        mine = ledger.account("top").reserve(odo.PureDP("0.123456"), expires=3600)
        theirs = ledger.acting_as("ben").account("top").reserve(COST)
        assert [one.receipt.principal for one in ledger.account("top").pending] == ["ana", "ben"]
        assert ledger.reservation(theirs.id).receipt.principal == "ben"
        assert repr(mine).startswith(f"<Reservation {mine.id}: PureDP(0.1235) of top by ana, made ")
        assert f"voidable until {mine.expires:%Y-%m-%d %H:%M:%S} UTC>" in repr(mine)
        shown = theirs._repr_html_()
        for text in (theirs.id, "PureDP(0.01) of top", ">by<", ">ben<", ">made<", ">can be voided until<"):
            assert text in shown
        ledger.erase_principal("ben")
        assert ledger.reservation(theirs.id).receipt.principal == "erased"
