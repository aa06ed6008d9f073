"""A PostgreSQL server that goes away, is newer, or is held by another: a clear error, and nothing lost."""

from __future__ import annotations

import random
import threading

import psycopg
import pytest
from broken_stores import PRINCIPAL, ledger_at
from postgres_proxy import AFTER, ANSWER, COMMIT, FIRST_TRIP, Proxy
from postgres_server import PostgresServer
from workload import COST, charges, policy

import odograph as odo
from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError, OutcomeUnknown
from odograph.ledger.stores.base import SCHEMA


@pytest.fixture
def charged(database: str) -> str:
    """A ledger with one charge."""
    with ledger_at(database) as ledger:
        ledger.open_account("a", policy(1000)).spend(COST, key="before")
    return database


def intact(url: str, *keys: str) -> None:
    """The charges are there, once each, and no others."""
    with ledger_at(url) as ledger:
        ledger.verify()
        found = charges(ledger)
        assert found.keys() == {"before", *keys}
        assert all(count.total() == 1 for count in found.values())
        assert all(ledger.account("a").spend(COST, key=key).repeated for key in found)


@pytest.mark.parametrize(
    ("cut", "there"), [(COMMIT, False), (ANSWER, True)], ids=["before the commit", "after it, before its answer"]
)
def test_a_connection_lost_at_the_commit_leaves_the_outcome_to_be_asked_for(
    charged: str, cut: str, *, there: bool
) -> None:
    with Proxy(charged) as proxy, ledger_at(proxy.url) as ledger:
        account = ledger.account("a")
        account.spend(COST, key="first")
        proxy.cut = cut
        with pytest.raises(OutcomeUnknown, match="ask again with the same key") as caught:
            account.spend(COST, key="cut")
        assert (caught.value.key, caught.value.charged) == ("cut", None)
        assert "nothing was charged" not in str(caught.value)
        proxy.wait()
        assert account.spend(COST, key="cut").repeated == there
        assert not account.spend(COST, key="after").repeated
    intact(charged, "first", "cut", "after")


def test_a_connection_lost_between_two_charges_is_made_again(charged: str) -> None:
    with Proxy(charged) as proxy, ledger_at(proxy.url) as ledger:
        account = ledger.account("a")
        account.spend(COST, key="first")
        for number, cut in enumerate([FIRST_TRIP, AFTER, AFTER]):
            proxy.cut = cut
            assert not account.spend(COST, key=f"{number}").repeated
            proxy.wait()
            assert account.totals.steps == 3 + number
    intact(charged, "first", "0", "1", "2")


def test_a_connection_lost_twice_in_a_row_charges_nothing_and_says_so(charged: str) -> None:
    with Proxy(charged) as proxy, ledger_at(proxy.url) as ledger:
        account = ledger.account("a")
        proxy.cut = AFTER
        account.spend(COST, key="first")
        proxy.wait()
        proxy.cut = FIRST_TRIP
        with pytest.raises(LedgerBusy, match=r"(?i)try again") as caught:
            account.spend(COST, key="cut")
        assert caught.value.charged is False
        assert not account.spend(COST, key="cut").repeated
    intact(charged, "first", "cut")


def test_a_ledger_that_took_a_lost_answer_for_a_refusal_would_be_caught(charged: str) -> None:
    # The control: whoever takes the lost answer for "nothing was charged" and asks with another key pays twice.
    with Proxy(charged) as proxy, ledger_at(proxy.url) as ledger:
        account = ledger.account("a")
        account.spend(COST, key="first")
        proxy.cut = ANSWER
        with pytest.raises(OutcomeUnknown):
            account.spend(COST, key="cut")
        account.spend(COST, key="instead")
    with pytest.raises(AssertionError):
        intact(charged, "first", "instead")


@pytest.mark.parametrize("when", ["idle", "in use"])
def test_a_connection_that_the_server_ends_loses_nothing(charged: str, when: str) -> None:
    with ledger_at(charged) as ledger, psycopg.connect(charged, autocommit=True) as admin:
        account = ledger.account("a")
        if when == "in use":
            account.spend(COST, key="first")
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'odograph'"
        ).fetchall()
        assert ended
        assert not account.spend(COST, key="after").repeated
    intact(charged, *(["first"] if when == "in use" else []), "after")


def test_connections_ended_at_any_moment_never_make_it_say_that_nothing_was_charged_when_it_was(charged: str) -> None:
    done = threading.Event()

    def end_connections() -> None:
        with psycopg.connect(charged, autocommit=True) as admin:
            while not done.wait(random.uniform(0, 0.02)):  # noqa: S311  any moment will do
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'odograph'"
                )

    acknowledged, denied, unknown = set(), set(), set()
    with ledger_at(charged) as ledger:
        account = ledger.account("a")
        account.spend(COST, key="first")
        ender = threading.Thread(target=end_connections)
        ender.start()
        for key in map(str, range(300)):
            try:
                account.spend(COST, key=key)
                acknowledged.add(key)
            except LedgerBusy:  # which says that nothing was charged
                denied.add(key)
            except OutcomeUnknown:
                unknown.add(key)
        done.set()
        ender.join()
    with ledger_at(charged) as ledger:
        ledger.verify()
        found = charges(ledger).keys() - {"before", "first"}
    assert acknowledged <= found <= acknowledged | unknown
    assert denied  # the control: connections were ended in the middle


def test_a_stopped_server_is_busy_and_everything_is_there_when_it_is_back(
    charged: str, killable_server: PostgresServer
) -> None:
    with (
        odo.connect(charged, principal=PRINCIPAL, timeout=2) as used,
        odo.connect(charged, principal=PRINCIPAL, timeout=2) as new,
    ):
        account = used.account("a")
        account.spend(COST, key="first")
        killable_server.kill()
        try:
            for _ in range(2):
                with pytest.raises(LedgerBusy, match="cannot be reached") as caught:
                    account.spend(COST, key="during")
                assert caught.value.charged is False
                for ask in (lambda: account.totals, used.verify, lambda: new.account("a"), new.checkpoint):
                    with pytest.raises(LedgerBusy):
                        ask()
        finally:
            killable_server.restart()
        assert not account.spend(COST, key="during").repeated
        assert not new.account("a").spend(COST, key="after").repeated
    intact(charged, "first", "during", "after")


def test_an_account_that_another_holds_is_busy(charged: str) -> None:
    with (
        odo.connect(charged, principal=PRINCIPAL, timeout=0.3) as ledger,
        psycopg.connect(charged) as other,
    ):
        account = ledger.account("a")
        other.execute("SELECT * FROM odograph.accounts FOR UPDATE")
        with pytest.raises(LedgerBusy, match=r"(?i)try again"):
            account.spend(COST, key="during")
        assert account.totals.steps == 1
        other.rollback()
        assert not account.spend(COST, key="during").repeated
    intact(charged, "during")


def test_a_newer_schema_is_left_alone(charged: str) -> None:
    with psycopg.connect(charged, autocommit=True) as admin:
        admin.execute("UPDATE odograph.schema_version SET version = %s", (SCHEMA + 1,))
        with ledger_at(charged) as ledger:
            for ask in (
                lambda: ledger.account("a"),
                lambda: ledger.spend({"a": COST}),
                lambda: ledger.open_account("b", policy(10)),
                ledger.verify,
                ledger.checkpoint,
            ):
                with pytest.raises(LedgerError, match=f"has schema {SCHEMA + 1}.*reads {SCHEMA}; upgrade Odograph"):
                    ask()
        admin.execute("UPDATE odograph.schema_version SET version = %s", (SCHEMA,))
    intact(charged)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE odograph.entries SET cost = replace(cost, '0.001', '0.0001')",
        "DELETE FROM odograph.keys WHERE key = 'before'",
        "UPDATE odograph.accounts SET totals = replace(totals, '1', '0')",
    ],
)
def test_a_rewritten_history_is_refused_by_triggers_or_found(charged: str, statement: str) -> None:
    with psycopg.connect(charged, autocommit=True) as admin, ledger_at(charged) as ledger:
        if "totals" not in statement:  # balances change with every charge
            with pytest.raises(psycopg.errors.RaiseException, match="never"):
                admin.execute(statement)
        ledger.verify()  # the control
        for table in ("entries", "keys", "accounts"):
            admin.execute(f"ALTER TABLE odograph.{table} DISABLE TRIGGER ALL")
        admin.execute(statement)
        with pytest.raises(LedgerCorrupt):
            ledger.verify()
