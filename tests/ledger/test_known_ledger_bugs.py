"""Bugs that other privacy ledgers had, each kept out of this one by a test that is named for it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path

import psycopg
import pytest

import odograph as odo
from odograph import (
    BudgetExceeded,
    Ledger,
    Policy,
    PureDP,
)
from odograph.errors import LedgerCorrupt, ReservationNotFound, ReservationResolved
from odograph.ledger.backend import LocalBackend
from odograph.ledger.stores.base import Changes, State, Wants, Work
from odograph.ledger.stores.memory import MemoryStore

UNIT = 10**15
TENTH = PureDP(0.1)


def basic(epsilon: float = 1) -> Policy:
    return Policy(epsilon, 0, filter="basic")


def spent(ledger: Ledger, name: str = "a") -> Fraction:
    return Fraction(ledger.account(name).totals.amounts[1], UNIT)


class Broken(MemoryStore):
    """A store with the bug itself, which is a way to change what was read or what is to be stored."""

    def __init__(self, before: Callable[[State], object] = id, after: Callable[[Changes], object] = id) -> None:
        super().__init__()
        self.before, self.after = before, after

    def write(self, wants: Wants, work: Work) -> None:
        def broken(state: State) -> Changes:
            self.before(state)
            changes = work(state)
            self.after(changes)
            return changes

        super().write(wants, broken)


def at_once(actions: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_replay_of_a_processed_id_charges_again(url: str) -> None:
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("a", basic())
        at_once([lambda: ledger.account("a").spend(TENTH, key="q") for _ in range(8)])
        with ledger.account("a").spending(TENTH, key="r") as held:
            pass
        for _ in range(2):
            ledger.commit(held.id)
            ledger.account("a").reserve(TENTH, key="r")
        assert spent(ledger) == Fraction(2, 10)
        ledger.verify()
    if not url.startswith("memory"):
        with odo.connect(url, principal="ana") as ledger:
            assert ledger.account("a").spend(TENTH, key="q").repeated
            assert spent(ledger) == Fraction(2, 10)
    with Ledger(LocalBackend(Broken(after=lambda changes: changes.keys.clear()), "ana")) as twin:
        twin.open_account("a", basic())
        for _ in range(2):
            twin.account("a").spend(TENTH, key="q")
        assert spent(twin) == Fraction(2, 10)  # negative control: the bug


class TwoTransactions(MemoryStore):
    """The bug itself: what is read in one transaction is stored in another."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], object] = lambda: None

    def write(self, wants: Wants, work: Work) -> None:
        read: list[State] = []

        def look(state: State) -> Changes:
            read.append(state)
            return Changes()

        super().write(wants, look)
        changes = work(read[0])
        self.between()
        super().write(wants, lambda _: changes)


def test_transactions_silently_off_lose_an_update(url: str) -> None:
    with odo.connect(url, principal="ana") as one:
        one.open_account("a", basic(2))
        # Where there can be a second connection, it is no part of the first one's queue.
        with odo.connect(url, principal="ben") if not url.startswith("memory") else one.acting_as("ben") as other:
            for _ in range(5):
                at_once([lambda: one.account("a").spend(TENTH), lambda: other.account("a").spend(TENTH)])
            assert spent(one) == spent(other) == 1
            assert one.account("a").size == 11
            at_once([lambda: limited(one), lambda: limited(other)])
            assert spent(one) == 2
        one.verify()
    store = TwoTransactions()
    with Ledger(LocalBackend(store, "ana")) as one, Ledger(LocalBackend(store, "ben")) as other:
        one.open_account("a", basic(2))
        other.account("a").spend(PureDP(0))
        one.account("a").spend(PureDP(0))
        store.between = threading.Barrier(2, timeout=10).wait
        at_once([lambda: one.account("a").spend(TENTH), lambda: other.account("a").spend(TENTH)])
        assert spent(one) == Fraction(1, 10)  # negative control: the bug
        with pytest.raises(LedgerCorrupt):
            one.verify()


def limited(ledger: Ledger) -> None:
    """Spend until the limit says no."""
    with suppress(BudgetExceeded):
        for _ in range(30):
            ledger.account("a").spend(TENTH)


FAIL_IN_SQLITE = """CREATE TRIGGER full_disk BEFORE INSERT ON entries WHEN NEW.account = 'b'
BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"""
FAIL_IN_POSTGRES = """CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF NEW.account = 'b' THEN RAISE 'the disk is full'; END IF; RETURN NEW; END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON odograph.entries FOR EACH ROW EXECUTE FUNCTION full_disk()"""


@pytest.mark.parametrize("url", ["sqlite", "postgres"], indirect=True)
def test_transactions_silently_off_keep_half_of_a_charge(url: str, tmp_path: Path) -> None:
    with odo.connect(url, principal="ana") as ledger:
        for name in ("a", "b", "c"):
            ledger.open_account(name, basic())
        before = ledger.checkpoint()
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file, file:
                file.execute(FAIL_IN_SQLITE)
        else:
            with psycopg.connect(url) as server:
                server.execute(FAIL_IN_POSTGRES)
        for verb in (ledger.spend, ledger.reserve):
            with pytest.raises(odo.OdographError, match="disk is full"):
                verb({"a": TENTH, "b": TENTH, "c": TENTH}, key="q")
        assert ledger.verify().checkpoint == before
        assert not ledger.spend({"a": TENTH, "c": TENTH}, key="q").repeated  # its key was not used
        ledger.verify()
    with closing(sqlite3.connect(tmp_path / "twin.db", isolation_level=None)) as twin:
        twin.execute("CREATE TABLE entries (account)")
        twin.execute(FAIL_IN_SQLITE)
        twin.execute("INSERT INTO entries VALUES ('a')")
        with pytest.raises(sqlite3.IntegrityError):
            twin.execute("INSERT INTO entries VALUES ('b')")
        assert twin.execute("SELECT count(*) FROM entries").fetchone() == (1,)  # negative control: the bug


class RefundById:
    """The bug itself: a refund looks for nothing."""

    def __init__(self) -> None:
        self.total = Fraction(1, 2)

    def void(self, _: str, amount: Fraction) -> None:
        self.total -= amount


def test_refund_for_an_id_that_was_never_charged(url: str) -> None:
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("top", basic())
        account = ledger.open_account("a", basic(), parent="top")
        account.spend(PureDP(0.4), key="q")
        with pytest.raises(BudgetExceeded):
            account.reserve(PureDP(0.7), key="r")
        held = account.reserve(TENTH, key="s")
        held.void("not run")
        held.void("not run")
        kept = account.reserve(TENTH)
        kept.commit()
        before = ledger.checkpoint()
        for name in ("a#0", "a#1", "a#2", "a#4", "a#99", "top#1", "top#2", "q", "r", "s", "b#1", "", "a#-1"):
            with pytest.raises(ReservationNotFound):
                ledger.void(name, "not run")
        with pytest.raises(ReservationResolved):
            ledger.void(kept.id, "not run")
        assert ledger.checkpoint() == before
        assert spent(ledger) == spent(ledger, "top") == Fraction(1, 2)
        ledger.verify()
    twin = RefundById()
    twin.void("a#99", Fraction(4, 10))
    assert twin.total == Fraction(1, 10)  # negative control: the bug


def test_void_after_it_expired(url: str) -> None:
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("a", basic())
        held = ledger.account("a").reserve(TENTH, expires=timedelta(milliseconds=1))
        over(held.expires)
        for who in ("ana", "ben"):
            with pytest.raises(ReservationResolved, match="expired"):
                ledger.acting_as(who).void(held.id, "not run")
        assert spent(ledger) == Fraction(1, 10)
        held.commit()
        assert spent(ledger) == Fraction(1, 10)
        ledger.verify()

    def stopped(state: State) -> None:
        state.now = 0

    with Ledger(LocalBackend(Broken(before=stopped), "ana")) as twin:  # its clock stands still
        twin.open_account("a", basic())
        held = twin.account("a").reserve(TENTH, expires=timedelta(milliseconds=1))
        over(datetime.now(UTC) + timedelta(milliseconds=1))
        held.void("not run")
        assert spent(twin) == 0  # negative control: the bug


def over(expires: datetime | None) -> None:
    """Wait until a moment is past."""
    assert expires is not None
    while datetime.now(UTC) <= expires + timedelta(milliseconds=20):
        time.sleep(0.01)
