"""Ways to lose a charge or to spend twice that were tried on this ledger and worked once, each kept out by a test."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

import odograph as odo
from odograph import (
    AccountClosed,
    AccountNotFound,
    Checkpoint,
    LedgerCorrupt,
    LedgerError,
    OdographError,
    Policy,
    PureDP,
    ReservationResolved,
)
from odograph.ledger.entries import Entry

BASIC = Policy(1, 0, rule="basic")
LOOSE = Policy(100, 0, rule="basic")

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


def test_the_key_of_a_voided_reservation_is_no_reservation(url: str) -> None:
    with odo.connect(url) as ledger:
        account = ledger.open_account("a", BASIC)
        first = account.reserve(PureDP(0.5), key="k")
        assert account.reserve(PureDP(0.5), key="k").id == first.id  # while it stands it is the same one
        first.void("late")
        with pytest.raises(ReservationResolved, match="voided"):
            account.reserve(PureDP(0.5), key="k")
        committed = account.reserve(PureDP(0.1), key="c")
        committed.commit()
        assert account.reserve(PureDP(0.1), key="c").receipt.repeated


def test_a_checkpoint_of_nothing_shows_nothing(url: str) -> None:
    file = io.StringIO()
    with odo.connect("memory://") as origin:
        origin.open_account("a", BASIC)
        origin.export(file)
    with odo.connect(url) as ledger, pytest.raises(LedgerError, match="names no account"):
        ledger.import_(io.StringIO(file.getvalue()), checkpoint=Checkpoint({}))


def test_a_copy_brings_its_principals_along(url: str) -> None:
    file = io.StringIO()
    with odo.connect("memory://", principal="ana") as origin:
        origin.open_account("a", BASIC).spend(PureDP(0.1), key="k")
        checkpoint = origin.export(file)
    with odo.connect(url, principal="ana") as ledger:
        with pytest.raises(OdographError):
            ledger.open_account("b", BASIC, parent="typo")
        ledger.import_(io.StringIO(file.getvalue()), checkpoint=checkpoint)
        assert ledger.account("a").spend(PureDP(0.1), key="k").repeated
        assert ledger.verify().principals_erased == 0


def test_an_account_that_cannot_be_opened_makes_no_file(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/p.db") as ledger, pytest.raises(OdographError):
        ledger.open_account("b", BASIC, parent="typo")
    assert [*tmp_path.iterdir()] == []


def resealed(lines: list[str], change: dict[int, dict[str, object]]) -> str:
    """An export of one account with some fields of its entries changed and every seal made anew."""
    seal, out, forms = "0" * 64, [], [json.loads(line) for line in lines]
    for form in forms:
        if "entry" in form:
            fields = form["entry"]
            fields |= change.get(int(fields["sequence"]), {})
            numbers = {name: int(fields[name]) for name in ("version", "sequence", "time")}
            seal = Entry(**(fields | numbers)).reseal(seal)
            fields["seal"] = seal
            last = (fields["account"], int(fields["sequence"]), seal)
        if "checkpoint" in form:
            form["checkpoint"] = Checkpoint({last[0]: last[1:]}).to_dict()
        out.append(json.dumps(form))
    return "\n".join(out) + "\n"


@pytest.mark.parametrize(
    "change",
    [
        {2: {"key": "first"}},
        {2: {"time": "9" * 18}},
        {2: {"time": "9" * 30}},
    ],
    ids=["a key twice", "after the year 9999", "a time that no store holds"],
)
def test_a_forged_copy_is_refused_on_the_way_in(url: str, change: dict[int, dict[str, object]]) -> None:
    file = io.StringIO()
    with odo.connect("memory://") as origin:
        account = origin.open_account("a", BASIC)
        account.spend(PureDP(0.1), key="first")
        account.spend(PureDP(0.1), key="second")
        origin.export(file)
    lines = file.getvalue().splitlines()
    with odo.connect(url) as ledger, pytest.raises(LedgerCorrupt):
        ledger.import_(io.StringIO(resealed(lines, change)))
    with odo.connect("memory://") as ledger:
        assert ledger.import_(io.StringIO(resealed(lines, {}))).entries == 4  # negative control: only resealed


def test_a_backup_is_not_read_as_an_export(tmp_path: Path) -> None:
    with odo.connect("memory://") as origin:
        origin.open_account("a", BASIC)
        origin.backup(tmp_path / "b.db")
    with (
        odo.connect("memory://") as ledger,
        (tmp_path / "b.db").open() as file,
        pytest.raises(LedgerCorrupt, match=r"restore|cannot be read"),
    ):
        ledger.import_(file)
    with odo.connect("memory://") as ledger, pytest.raises(LedgerCorrupt):
        ledger.import_(io.StringIO("[" * 100_000))


@pytest.mark.parametrize("action", ["commit", "reservation", "erase_note", "erase_principal"])
def test_half_a_surrogate_pair_is_no_name(url: str, action: str) -> None:
    with odo.connect(url) as ledger:
        ledger.open_account("a", BASIC)
        with pytest.raises(OdographError):
            getattr(ledger, action)("\ud800#1")


@pytest.mark.parametrize("where", ["postgresql://[bad", "sqlite:///a%00b"])
def test_a_place_that_cannot_be_is_refused(where: str) -> None:
    with pytest.raises(OdographError):
        odo.connect(where).open_account("a", BASIC)


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
