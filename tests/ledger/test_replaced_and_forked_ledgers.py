"""A ledger that was replaced by another, or that a forked process inherits, is not a second budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

import odograph as odo
from odograph import Policy, PureDP
from odograph.errors import AccountClosed, AccountNotFound, LedgerError

BASIC = Policy(1, 0, filter="basic")
LOOSE = Policy(100, 0, filter="basic")

KILLED = """
import os, signal, sys
import odograph as odo
account = odo.connect(sys.argv[1]).account("a")
for _ in range(3):
    account.spend(odo.PureDP(0.01))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_new_ledger_does_not_take_over_the_log_of_an_old_one(tmp_path: Path) -> None:
    url, good = f"sqlite:///{tmp_path}/p.db", tmp_path / "good.db"
    with odo.connect(url) as ledger:
        ledger.open_account("a", BASIC)
    done = subprocess.run([sys.executable, "-c", KILLED, url], check=False)  # noqa: S603  our own code
    assert done.returncode == -signal.SIGKILL
    with odo.connect("memory://") as other:
        other.open_account("a", BASIC).spend(PureDP(0.5))
        checkpoint = other.backup(good)
    assert (tmp_path / "p.db-wal").exists()
    (tmp_path / "p.db").unlink()
    with odo.connect(url) as ledger:
        for action in (lambda: ledger.restore(good, checkpoint=checkpoint), lambda: ledger.open_account("b", BASIC)):
            with pytest.raises(LedgerError, match="-wal is left over"):
                action()
        assert not (tmp_path / "p.db").exists()
        for left in ("p.db-wal", "p.db-shm"):
            (tmp_path / left).unlink()
        ledger.restore(good, checkpoint=checkpoint)
        assert ledger.verify(checkpoint=checkpoint).entries == 2


def test_a_handle_does_not_outlive_its_ledger_in_a_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/p.db"
    with odo.connect(url) as old:
        account = old.open_account("a", LOOSE)
        account.spend(PureDP(0.1))
        old.close()
        for file in tmp_path.iterdir():
            file.unlink()
        with odo.connect(url) as new:
            fresh = new.open_account("a", BASIC)
            for action in (lambda: account.spend(PureDP(50)), lambda: account.decide(PureDP(50)), account.reading):
                with pytest.raises(LedgerError):
                    action()
            assert fresh.totals.steps == 0
            new.verify()


def test_a_handle_does_not_outlive_its_ledger_in_a_database(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger, odo.connect(postgres_url) as other:
        account = ledger.open_account("a", LOOSE)
        account.spend(PureDP(0.1))
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA odograph CASCADE")
        fresh = other.open_account("a", BASIC)
        with pytest.raises(LedgerError, match="no longer"):
            account.spend(PureDP(50))
        assert fresh.totals.steps == 0
        other.verify()


def test_nothing_is_opened_below_charged_to_or_closed_in_a_ledger_that_is_another_by_now(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger, odo.connect(postgres_url) as other:
        account = ledger.open_account("a", LOOSE)
        account.spend(PureDP(0.1))
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA odograph CASCADE")
        other.open_account("b", BASIC)
        for action in (
            lambda: ledger.open_account("c", BASIC, parent="a"),
            lambda: account.spend(PureDP(0.1)),
            account.close,
        ):
            with pytest.raises(AccountNotFound, match="there is no account 'a'"):
                action()
        assert [one.name for one in other.accounts()] == ["b"]
        other.verify()


def test_a_ledger_in_memory_can_be_read_after_a_fork() -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", BASIC)
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                account.decide(PureDP(0.1))

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            for _ in range(10):
                pid = os.fork()
                if not pid:
                    signal.alarm(20)
                    os._exit(account.totals.steps)
                assert os.waitpid(pid, 0)[1] == 0
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("verb", ["spend", "close"])
def test_a_ledger_in_memory_is_no_second_budget_in_a_forked_process(verb: str) -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", BASIC)
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            try:
                account.spend(PureDP(0.5)) if verb == "spend" else account.close()
            except AccountClosed:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        account.spend(PureDP(0.5))


def test_a_forked_process_that_closes_its_ledger_does_not_close_its_parent_s(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger:
        account = ledger.open_account("a", BASIC)
        account.spend(PureDP(0.1))
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            ledger.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with psycopg.connect(postgres_url) as owner:
            before = owner.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'odograph'")
            assert before.fetchone() == (2,)
        account.spend(PureDP(0.1))
        assert account.totals.steps == 2
