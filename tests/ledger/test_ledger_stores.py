"""What only one kind of store can meet: errors of its database, older schemas, a file that another process makes."""

from __future__ import annotations

import io
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest

import odograph as odo
from odograph import Ledger, OdographError, Policy, PureDP
from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError, OutcomeUnknown
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Author, Charge, Made, Outcome
from odograph.ledger.engine import carry_out
from odograph.ledger.stores import postgres
from odograph.ledger.stores.base import SCHEMA, Balance, Changes, State, Store, Wants, migrations
from odograph.ledger.stores.memory import MemoryStore
from odograph.ledger.stores.postgres import PostgresStore
from odograph.ledger.stores.sqlite_files import error_of, make_file

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
BASIC = Policy(1, 0, filter="basic")
TENTH = PureDP("0.1")

# Of a file of SQLite: the size of a page, and where the number of pages is written.
_PAGE, _PAGES_AT = 4096, 28


def exported(ledger: Ledger) -> str:
    file = io.StringIO()
    ledger.export(file)
    return file.getvalue()


def test_a_copy_of_nothing_makes_a_ledger_of_nothing_and_a_used_one_takes_no_copy(url: str) -> None:
    with odo.connect("memory://") as origin:
        empty = exported(origin)
        origin.open_account("a", BASIC)
        copy = exported(origin)
    with odo.connect(url) as ledger:
        assert ledger.import_(io.StringIO(empty)).entries == 0
        assert ledger.accounts() == ()
        ledger.open_account("b", BASIC)
        for text in (empty, copy):
            with pytest.raises(LedgerError, match="not empty"):
                ledger.import_(io.StringIO(text))
        assert [account.name for account in ledger.accounts()] == ["b"]
        ledger.verify()


def test_pending_reservations_are_counted_once_for_every_account_that_they_charge(url: str) -> None:
    with odo.connect(url) as ledger:
        for name, parent in (("top", ""), ("low", "top"), ("other", ""), ("idle", "")):
            ledger.open_account(name, BASIC, parent=parent)
        assert isinstance(ledger.backend, LocalBackend)
        count = ledger.backend.store.pending_counts
        assert count() == {}
        both = ledger.reserve({"low": PureDP("0.01"), "top": PureDP("0.01")})  # two entries of top
        held = [ledger.account(name).reserve(PureDP("0.01")) for name in ("low", "low", "other")]
        ledger.account("idle").spend(PureDP("0.01"))
        assert count() == {"top": 3, "low": 3, "other": 1}
        held[0].commit()
        held[2].void("not run")
        assert count() == {"top": 2, "low": 2}
        assert count() == {one.name: len(one.pending) for one in ledger.accounts() if one.pending}
        both.commit()
        held[1].commit()
        assert count() == {}


def test_accounts_that_are_read_at_once_are_what_each_is_by_itself(url: str) -> None:
    with odo.connect(url) as ledger:
        # Children before those above them, in the order of names.
        for name, parent in (("top", ""), ("low", "top"), ("a", "low"), ("other", "")):
            ledger.open_account(name, BASIC, parent=parent)
        assert isinstance(ledger.backend, LocalBackend)
        store = ledger.backend.store
        assert store.openings([]) == {}
        assert store.openings(["low", "nowhere"]) == {"low": store.entries("low", 0, 1)[0]}
        at_once, one_by_one = LocalBackend(store, "ana"), LocalBackend(store, "ana")
        at_once.learn(["a", "low", "nowhere", "other", "top"])
        for name in ("a", "low", "other", "top"):
            found, alone = at_once.opened(name), one_by_one.opened(name)
            assert (found.head, found.compiled, found.origin) == (alone.head, alone.compiled, alone.origin)
            assert found.names == alone.names
        assert at_once.opened("a").path[:2] == at_once.opened("low").path
        at_once.learn(["a"])


def test_a_store_shows_the_settings_that_durability_depends_on(url: str) -> None:
    with odo.connect(url) as ledger:
        ledger.open_account("a", BASIC)
        assert isinstance(ledger.backend, LocalBackend)
        found = ledger.backend.store.settings()
    if url.startswith("sqlite"):
        assert found == {"journal_mode": "wal", "synchronous": "2", "foreign_keys": "1"}
    elif url.startswith("postgresql"):
        assert (found["fsync"], found["full_page_writes"], found["in_recovery"]) == ("on", "on", "false")
        assert abs(int(found["clock"]) / 1e6 - time.time()) < 60
    else:
        assert found == {}


# PostgreSQL.

RAISES = """
CREATE FUNCTION odograph.trouble() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'trouble' USING ERRCODE = '{code}'; END$$;
CREATE TRIGGER trouble BEFORE INSERT ON odograph.entries FOR EACH ROW EXECUTE FUNCTION odograph.trouble();
"""


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        ("40001", LedgerBusy, "were first 20 times"),  # serialization failure
        ("23505", LedgerBusy, "were first 20 times"),  # unique violation
        ("57014", LedgerBusy, "another process holds"),  # cancelled
        ("53100", LedgerBusy, "Make room and try again"),  # disk full
        ("XX001", LedgerCorrupt, "is damaged"),
        ("XX002", LedgerCorrupt, "is damaged"),  # of an index
        ("22012", LedgerError, "could not be used"),  # anything else
    ],
)
def test_an_error_of_the_server_is_told_as_what_it_means_and_charges_nothing(
    postgres_url: str, code: str, error: type[LedgerError], says: str
) -> None:
    with odo.connect(postgres_url) as ledger, psycopg.connect(postgres_url, autocommit=True) as owner:
        account = ledger.open_account("a", BASIC)
        owner.execute(RAISES.format(code=code).encode())
        with pytest.raises(error, match=says):
            account.spend(TENTH, key="q")
        owner.execute("DROP TRIGGER trouble ON odograph.entries")
        assert not account.spend(TENTH, key="q").repeated
        ledger.verify()


def test_a_probe_changes_nothing_and_fails_where_a_charge_would(url: str) -> None:
    with odo.connect(url) as ledger:
        store = store_of(ledger)
        ledger.open_account("a", BASIC).spend(TENTH)
        before = exported(ledger)
        for _ in range(3):
            store.probe()
        assert exported(ledger) == before
        ledger.verify()


def test_a_probe_of_a_backup_is_refused(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.open_account("a", BASIC)
        ledger.backup(tmp_path / "copy.db")
    with odo.connect(f"sqlite:///{tmp_path}/copy.db") as copy, pytest.raises(LedgerError, match="is a backup"):
        store_of(copy).probe()


def test_a_ledger_can_be_opened_while_its_log_is_written_back(tmp_path: Path) -> None:
    """That begins with the first page, which says how many there are; until the others follow it is too short."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        account = ledger.open_account("a", BASIC)
        for _ in range(3):
            account.spend(TENTH, note="n" * 2000)
        file = os.open(tmp_path / "ledger.db", os.O_RDWR)  # closed later: that would end SQLite's locks
        try:
            pages = os.fstat(file).st_size // _PAGE
            assert os.pread(file, 4, _PAGES_AT) == pages.to_bytes(4, "big")
            os.pwrite(file, (pages + 20).to_bytes(4, "big"), _PAGES_AT)
            with odo.connect(url) as other:
                assert other.account("a").size == 4
                other.verify()
        finally:
            os.close(file)
    with odo.connect(url) as ledger:
        ledger.verify()


def store_of(ledger: Ledger) -> Store:
    assert isinstance(ledger.backend, LocalBackend)
    return ledger.backend.store


def test_a_database_that_is_read_only_takes_no_charge(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("a", BASIC)
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with odo.connect(postgres_url) as ledger:
        assert ledger.account("a").size == 1
        with pytest.raises(LedgerError, match=r"cannot be written|could not be used"):
            ledger.account("a").spend(TENTH)
        with pytest.raises(LedgerError, match=r"cannot be written|could not be used"):
            store_of(ledger).probe()
        assert ledger.account("a").totals.steps == 0


def charge_together(url: str, cost: odo.Guarantee, count: int) -> list[Outcome]:
    """Charge the same cost so many times in one group."""
    with odo.connect(url) as ledger:
        backend = ledger.backend
        assert isinstance(backend, LocalBackend)
        asks = backend.price({"a": cost})
        return carry_out(
            backend.store, [Charge(Author(backend.identity(), f"k{i}"), "spend", asks) for i in range(count)]
        )


def test_a_group_that_is_too_large_for_one_statement_is_stored_in_several(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("a", BASIC)
    monkeypatch.setattr(postgres, "_LARGEST_JSONB", 1500)  # characters: two entries, or one that is larger
    outcomes = charge_together(postgres_url, PureDP("0.01"), 9)
    assert all(isinstance(outcome, Made) for outcome in outcomes)
    with odo.connect(postgres_url) as ledger:
        account = ledger.account("a")
        assert (account.totals.steps, account.size) == (9, 10)
        assert [past.entry.key for past in account.history(1)] == [f"k{i}" for i in range(9)]
        assert ledger.verify().entries == 10
        assert account.spend(PureDP("0.01"), key="k3").repeated


@pytest.mark.skipif(not FULL, reason="gigabytes of memory: ODOGRAPH_FULL=1 (make test-all)")
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_a_group_of_the_largest_requests_is_stored(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, *, split: bool
) -> None:
    """PostgreSQL takes 256 MB in one array; each request of a service may have a megabyte."""
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("a", Policy(20, 1e-6, filter="renyi"))
    orders = range(2, 40_002)
    curve = odo.RDP(tuple(orders), tuple(f"{1e-9 * (1 + order / 1e6):.17f}" for order in orders))
    if split:
        assert len(charge_together(postgres_url, curve, 290)) == 290
        return
    monkeypatch.setattr(postgres, "_LARGEST_JSONB", 1 << 40)  # negative control
    with pytest.raises(LedgerBusy, match="nothing was charged"):
        charge_together(postgres_url, curve, 290)


def test_an_older_schema_is_brought_to_the_current_one(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute(migrations("postgres")[0].encode())
        owner.execute("DELETE FROM odograph.schema_version")
        owner.execute("INSERT INTO odograph.schema_version (version) VALUES (1)")
        with odo.connect(postgres_url) as ledger:
            assert ledger.accounts() == ()
            assert owner.execute("SELECT version FROM odograph.schema_version").fetchall() == [(SCHEMA,)]
            ledger.open_account("a", BASIC).spend(TENTH)
            ledger.verify()


def test_an_interrupt_in_the_middle_leaves_no_transaction_open(postgres_url: str) -> None:
    def interrupted(_: State) -> NoReturn:
        raise KeyboardInterrupt

    store = PostgresStore(postgres_url)
    with odo.connect(postgres_url) as ledger:
        account = ledger.open_account("a", BASIC)
        with pytest.raises(KeyboardInterrupt):
            store.write(Wants(frozenset(["a"])), interrupted)
        account.spend(TENTH)  # the row is not locked
        seen: list[int] = []

        def look(state: State) -> Changes:
            seen.append(state.balances["a"].sequence)
            return Changes()

        store.write(Wants(frozenset(["a"])), look)
        assert seen == [1]
    store.close()


TROUBLED = """
CREATE FUNCTION odograph.trouble() RETURNS boolean LANGUAGE plpgsql AS
    $$BEGIN RAISE EXCEPTION 'trouble' USING ERRCODE = '57014'; END$$;
ALTER TABLE odograph.accounts RENAME TO kept;
CREATE VIEW odograph.accounts AS SELECT * FROM odograph.kept WHERE odograph.trouble();
"""


def test_a_read_that_is_cancelled_is_busy_and_the_connection_goes_on(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger, psycopg.connect(postgres_url, autocommit=True) as owner:
        account = ledger.open_account("a", BASIC)
        owner.execute(TROUBLED.encode())
        with pytest.raises(LedgerBusy, match="another process holds"):
            account.totals  # noqa: B018  reading it is what is tested
        owner.execute("DROP VIEW odograph.accounts; ALTER TABLE odograph.kept RENAME TO accounts")
        assert account.totals.steps == 0


class Late(Exception):
    """What the program itself raises when it has waited long enough."""


@pytest.mark.parametrize("verb", ["read", "write"])
def test_what_a_signal_handler_raises_leaves_a_connection_that_can_be_used(postgres_url: str, verb: str) -> None:
    def late(*_: object) -> NoReturn:
        raise Late

    with odo.connect(postgres_url, timeout=1) as ledger, psycopg.connect(postgres_url) as other:
        account = ledger.open_account("a", BASIC)
        account.spend(TENTH, key="before")
        other.execute("LOCK TABLE odograph.accounts IN ACCESS EXCLUSIVE MODE")
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Late):
            account.spend(TENTH, key="during") if verb == "write" else account.totals
        signal.signal(signal.SIGALRM, before)
        other.rollback()
        assert account.totals.steps == 1
        assert not account.spend(TENTH, key="during").repeated


def test_an_option_that_no_database_has_is_refused() -> None:
    with pytest.raises(LedgerError, match="cannot be used as a database"):
        odo.connect("postgresql://localhost/ledger?nonsense=1").accounts()


# SQLite.


class Meanwhile(io.StringIO):
    """A copy whose reading takes so long that another process makes a ledger."""

    def __init__(self, text: str, url: str) -> None:
        super().__init__(text)
        self.url = url

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        with odo.connect(self.url) as other:
            other.open_account("other", BASIC)
        yield from io.StringIO(self.getvalue())


def test_a_copy_does_not_take_the_place_of_a_ledger_that_was_made_meanwhile(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect("memory://") as origin:
        origin.open_account("a", BASIC)
        copy = exported(origin)
    with odo.connect(url) as ledger:
        with pytest.raises(LedgerError, match="another process has just created"):
            ledger.import_(Meanwhile(copy, url))
        assert [account.name for account in ledger.accounts()] == ["other"]
        ledger.verify()
    assert not [*tmp_path.glob(".*")]


def test_a_file_that_is_there_and_in_use_is_not_made_again(tmp_path: Path) -> None:
    def never(_: Path) -> NoReturn:
        raise AssertionError

    with odo.connect(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.open_account("a", BASIC)
        assert (tmp_path / "ledger.db-wal").exists()
        assert not make_file(tmp_path / "ledger.db", never)
        ledger.verify()


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be reached"):
        odo.connect(f"sqlite:///{tmp_path}/{'x' * 300}").open_account("a", BASIC)


def test_a_file_beside_which_nothing_can_be_locked_takes_no_charge(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        ledger.open_account("a", BASIC)
    (tmp_path / "ledger.db-turn").unlink()
    (tmp_path / "ledger.db-turn").mkdir()
    with odo.connect(url) as ledger:
        with pytest.raises(LedgerError, match="cannot be written"):
            ledger.account("a").spend(TENTH)
        assert ledger.account("a").totals.steps == 0


def test_a_principal_that_is_stored_and_not_found_is_damage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("a", BASIC)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as owner:
        owner.execute(
            "CREATE TRIGGER lost AFTER INSERT ON principals BEGIN DELETE FROM principals WHERE name = NEW.name; END"
        )
    with odo.connect(url, principal="zoe") as ledger, pytest.raises(LedgerCorrupt, match="just stored is not found"):
        ledger.account("a").spend(TENTH)


@pytest.mark.parametrize(
    ("problem", "error", "says"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), LedgerCorrupt, "is damaged"),
        (sqlite3.ProgrammingError("closed"), LedgerError, r"could not be used \(closed\)"),
    ],
)
def test_an_error_that_has_no_code_of_sqlite_is_told_too(
    problem: sqlite3.Error | UnicodeDecodeError, error: type[LedgerError], says: str
) -> None:
    with pytest.raises(error, match=says):
        raise error_of(problem, "a.db")


def test_a_ledger_where_a_folder_is_names_the_folder(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}") as ledger:
        asks: list[Callable[[], object]] = [
            ledger.accounts,
            ledger.verify,
            lambda: ledger.open_account("a", BASIC),
            lambda: ledger.spend({"a": TENTH}),
        ]
        for ask in asks:
            with pytest.raises(LedgerError, match=f"^{tmp_path} cannot be written .unable to open database file"):
                ask()
    assert [*tmp_path.iterdir()] == []


def test_an_account_that_cannot_be_opened_makes_no_file(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/p.db") as ledger, pytest.raises(OdographError):
        ledger.open_account("b", BASIC, parent="typo")
    assert [*tmp_path.iterdir()] == []


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
    ledger = odo.Ledger(LocalBackend(store, "ana"))
    ledger.open_account("old", BASIC)
    account = ledger.open_account("new", BASIC, successor_of="old")
    store.written = True
    with pytest.raises(OutcomeUnknown, match=r"this was charged, but its receipt could not be read.*'q-1'") as caught:
        account.spend(odo.PureDP("0.1"), key="q-1")
    assert (caught.value.charged, caught.value.key) == (True, "q-1")
    with pytest.raises(LedgerBusy):
        account.spend(odo.PureDP("0.1"), key="q-1")  # nothing is written by asking again
    store.some = True
    with pytest.raises(LedgerBusy):
        account.spend(odo.PureDP("0.1"), key="q-1")
    store.written = False
    assert account.spend(odo.PureDP("0.1"), key="q-1").repeated
    assert account.totals.steps == 1
