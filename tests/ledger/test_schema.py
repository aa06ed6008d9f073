"""The schema is what all migrations lead to, on both databases, and ledgers of earlier schemas still verify."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from postgres_server import PostgresServer

import odograph as odo
from odograph import Checkpoint
from odograph.errors import LedgerCorrupt, LedgerError
from odograph.ledger.stores.base import SCHEMA, migrations, queries, schema
from odograph.ledger.stores.postgres import PostgresStore
from odograph.ledger.stores.sqlite import SqliteStore

FIXTURES = Path(__file__).parents[1] / "fixtures"
KEPT = sorted(FIXTURES.glob("ledger-schema-*.db"))


def sqlite_objects(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
    return [(*row[:3], " ".join(str(row[3]).split())) for row in rows]


def test_in_sqlite_the_schema_is_what_the_migrations_lead_to(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "new.db").create()
    with closing(sqlite3.connect(tmp_path / "new.db")) as migrated, closing(sqlite3.connect(":memory:")) as written:
        written.executescript(schema("sqlite"))
        assert sqlite_objects(migrated) == sqlite_objects(written)
        written.execute("CREATE INDEX one_more ON entries (time)")
        assert sqlite_objects(migrated) != sqlite_objects(written)  # the comparison sees an index


def test_in_postgresql_the_schema_is_what_the_migrations_lead_to(postgres: PostgresServer) -> None:
    def dumped(name: str, scripts: list[str]) -> list[str]:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        url = urlsplit(postgres.url)._replace(path=f"/{name}").geturl()
        with psycopg.connect(url, autocommit=True) as connection:
            for script in scripts:
                connection.execute(script.encode())
        command = [str(postgres.bin("pg_dump")), "--schema-only", "--no-owner", url]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
        # pg_dump guards its scripts with a random word of its own.
        return [line for line in dump.splitlines() if not line.startswith(("\\restrict", "\\unrestrict"))]

    migrated = dumped("migrated", migrations("postgres"))
    assert migrated == dumped("written", [schema("postgres")])
    assert migrated != dumped("more", [schema("postgres"), "CREATE INDEX ON odograph.entries (time)"])
    assert sum("CREATE TABLE" in line for line in migrated) == 8


def test_the_dialects_have_the_same_tables_and_columns() -> None:
    def columns(dialect: str) -> list[list[str]]:
        text = schema(dialect).replace("odograph.", "")
        tables = [part.partition(");")[0] for part in text.split("CREATE TABLE ")[1:]]
        names = [[line.split()[0] for line in table.splitlines()[1:] if line.startswith("    ")] for table in tables]
        return [sorted(names) for names in names if names]

    assert columns("sqlite") == columns("postgres")
    assert len(columns("sqlite")) == 7


def test_every_query_is_used() -> None:
    source = Path(odo.__file__).parent / "ledger" / "stores"
    for dialect in ("sqlite", "postgres"):
        code = "".join(path.read_text() for path in source.glob(f"{dialect}*.py"))
        assert [name for name in queries(dialect) if f'"{name}"' not in code] == []


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
def test_a_ledger_of_every_schema_still_verifies(kept: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(kept, path)
    checkpoint = Checkpoint.from_dict(json.loads(kept.with_suffix(".checkpoint.json").read_text()))
    with odo.connect(f"sqlite:///{path}") as ledger:
        found = ledger.verify(checkpoint=checkpoint)
        assert (found.notes_erased, found.principals_erased) == (1, 1)
        assert [account.name for account in ledger.accounts()] == [
            "curves",
            "everyone",
            "exact",
            "feb",
            "jan",
            "sums",
        ]
        assert len(ledger.account("feb").pending) == 1
        assert ledger.account("jan").spend(odo.PureDP(0.01)).lines[0].sequence == ledger.account("jan").size - 1
        ledger.verify(checkpoint=checkpoint)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.stem)
@pytest.mark.parametrize("change", [lambda text: text, lambda text: text.replace("question 3", "question 4")])
def test_an_export_of_every_schema_is_still_read(kept: Path, change: Callable[[str], str], tmp_path: Path) -> None:
    text = kept.with_suffix(".jsonl").read_text()
    changed = tmp_path / "copy.jsonl"
    changed.write_text(change(text))
    with odo.connect("memory://") as ledger, changed.open() as file:
        if changed.read_text() == text:
            assert ledger.import_(file).entries > 30
        else:
            with pytest.raises(LedgerCorrupt, match="note"):
                ledger.import_(file)


def test_there_is_a_kept_ledger_of_the_current_schema() -> None:
    assert FIXTURES / f"ledger-schema-{SCHEMA}.db" in KEPT


def test_a_file_that_a_later_release_upgrades_meanwhile_is_refused_and_stays_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.db"
    shutil.copy(FIXTURES / "ledger-schema-2.db", path)
    set_mode = SqliteStore._set_journal_mode  # noqa: SLF001  the last step before the transaction

    def upgraded_meanwhile(self: SqliteStore, connection: sqlite3.Connection) -> None:
        set_mode(self, connection)
        with closing(sqlite3.connect(path)) as later:
            later.execute(f"PRAGMA user_version = {SCHEMA + 1}")

    monkeypatch.setattr(SqliteStore, "_set_journal_mode", upgraded_meanwhile)
    with odo.connect(f"sqlite:///{path}") as ledger, pytest.raises(LedgerError, match=f"has schema {SCHEMA + 1}"):
        ledger.accounts()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (SCHEMA + 1,)


def test_a_database_that_a_later_release_upgrades_meanwhile_is_refused(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate = PostgresStore._migrate  # noqa: SLF001  as above

    def upgraded_meanwhile(self: PostgresStore, connection: psycopg.Connection) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as later:
            later.execute("UPDATE odograph.schema_version SET version = %s", (SCHEMA + 1,))
        migrate(self, connection)

    with psycopg.connect(postgres_url, autocommit=True) as first:
        for script in migrations("postgres")[:2]:
            first.execute(script.encode())
        first.execute("INSERT INTO odograph.schema_version VALUES (2)")
    monkeypatch.setattr(PostgresStore, "_migrate", upgraded_meanwhile)
    with odo.connect(postgres_url) as ledger, pytest.raises(LedgerError, match=f"has schema {SCHEMA + 1}"):
        ledger.accounts()
    with psycopg.connect(postgres_url) as look:
        assert look.execute("SELECT version FROM odograph.schema_version").fetchone() == (SCHEMA + 1,)
