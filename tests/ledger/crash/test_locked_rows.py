"""A row of PostgreSQL that another client holds: only those who need it wait; nothing is lost or charged twice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, TypeAlias, cast
from urllib.parse import quote

import httpx
import psycopg
import pytest
from service_server import ServiceThread
from workload import COST, charges, policy

import odograph as odo
from odograph.errors import LedgerBusy, OdographError
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Command, Result
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores import postgres
from odograph.ledger.stores.base import OPENING, RowLocked, queries
from odograph.service.writer import WriterClient

TIMEOUT = 1.0  # seconds until a spend on the locked row gives up
SUBMIT = WriterClient.submit
QUIET = 0.8  # seconds of spending without, and
LOCKED = 2.0  # with a lock
FREE = ("b", "c", "d", "z")  # names before and after that of the locked row: locks are taken in their order


Spend: TypeAlias = Callable[[str, str], object]  # an account and a key


class Spending:
    """Threads that spend from accounts, one each, until they are stopped."""

    running: ClassVar[list[Spending]] = []

    def __init__(self, spend: Spend, accounts: Sequence[str], run: str) -> None:
        self.running.append(self)
        self.run = run
        self.acknowledged: list[str] = []
        self.busy: list[float] = []  # how long those had waited that were told to try again
        self.errors: list[OdographError] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._spend, args=(spend, account, f"{run}-{number}"), daemon=True)
            for number, account in enumerate(accounts)
        ]
        for thread in self._threads:
            thread.start()

    def _spend(self, spend: Spend, account: str, thread: str) -> None:
        number = 0
        while not self._stop.is_set():
            key = f"{thread}-{number}"
            begun = time.monotonic()
            try:
                spend(account, key)
            except LedgerBusy:
                self.busy.append(time.monotonic() - begun)
            except OdographError as error:
                self.errors.append(error)
            else:
                self.acknowledged.append(key)
                number += 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def row_locked(url: str, name: str) -> Iterator[None]:
    """Hold a row as any client of the database can, psql or a report."""
    with psycopg.connect(url) as locker:
        locker.execute("SELECT 1 FROM odograph.accounts WHERE name = %s FOR UPDATE", (name,))
        yield
        locker.rollback()


@pytest.fixture
def direct(postgres_url: str) -> Iterator[Ledger]:
    """A ledger with the accounts of these tests."""
    with odo.connect(postgres_url, principal="ana", timeout=TIMEOUT) as ledger:
        for name in (*FREE, "m"):
            ledger.open_account(name, policy(10**6))
        ledger.open_account("child", policy(10**6), parent="m")
        yield ledger
        while Spending.running:
            Spending.running.pop().end()


def spend_from(ledger: Ledger) -> Spend:
    """Spend through the writer that all the threads share."""
    return lambda account, key: ledger.spend({account: COST}, key=key)


@pytest.fixture(params=["direct", "service"])
def spend(request: pytest.FixtureRequest, direct: Ledger, postgres_url: str) -> Iterator[Spend]:
    """Ways to spend: here, or through a service that writes for its callers in frames. None tries again by itself."""
    if request.param == "direct":
        yield spend_from(direct)
        return
    with ServiceThread(postgres_url, timeout=TIMEOUT) as service:
        head = {"Authorization": f"Bearer {service.token('ana')}"}
        with httpx.Client(base_url=service.url, headers=head, timeout=20) as client:

            def post(account: str, key: str) -> None:
                body = {"costs": {account: COST.to_dict()}}
                answer = client.post("/v1/spends", json=body, headers={"Idempotency-Key": key})
                if answer.status_code == 503:
                    raise LedgerBusy(answer.text)
                assert answer.status_code == 201, answer.text

            yield post


def share_kept(spend: Spend, url: str, round_: int) -> float:
    """Return which part of their rate the others keep while the row of `m` is locked."""
    quiet = Spending(spend, FREE * 2, f"quiet{round_}")
    time.sleep(QUIET)
    quiet.end()
    with row_locked(url, "m"):
        waiting = Spending(spend, ("m", "child"), f"waiting{round_}")
        free = Spending(spend, FREE * 2, f"free{round_}")
        time.sleep(LOCKED)
        done = len(free.acknowledged)
        assert not waiting.acknowledged
        assert min(waiting.busy) >= 0.9 * TIMEOUT  # they waited, and were told that nothing was charged
        free.end()
    deadline = time.monotonic() + 10
    while (threads := {key.split("-")[1] for key in waiting.acknowledged}) != {"0", "1"}:  # the row is free again
        assert time.monotonic() < deadline, threads
        time.sleep(0.01)
    waiting.end()
    return (done / LOCKED) / (len(quiet.acknowledged) / QUIET)


def check_charged(ledger: Ledger) -> None:
    """Every acknowledged key was charged, once in each account on its way, and no other key was."""
    acknowledged = Counter(key for spending in Spending.running for key in spending.acknowledged)
    charged = charges(ledger)
    assert charged.keys() == acknowledged.keys()
    assert {*acknowledged.values()} == {1}
    for names in charged.values():
        assert names in ({"m": 1, "child": 1}, *({name: 1} for name in (*FREE, "m")))
    assert not [error for spending in Spending.running for error in spending.errors]
    ledger.verify()


def test_a_locked_row_holds_up_only_those_who_need_it(direct: Ledger, spend: Spend, postgres_url: str) -> None:
    best = 0.0  # of few rounds: other work on the machine slows some of them
    for round_ in range(4):
        best = max(best, share_kept(spend, postgres_url, round_))
        if best >= 0.5:
            break
    assert best >= 0.5
    assert not [busy for spending in Spending.running if spending.run.startswith("free") for busy in spending.busy]
    check_charged(direct)


def test_a_group_that_waits_for_all_its_rows_is_caught(
    direct: Ledger, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_LOCK_WAIT", TIMEOUT)
    monkeypatch.setattr(postgres, "_SKIP_TIME", 0.0)
    assert share_kept(spend_from(direct), postgres_url, 0) < 0.5
    check_charged(direct)


def test_opening_and_closing_wait_only_for_their_own_accounts(direct: Ledger, postgres_url: str) -> None:
    with row_locked(postgres_url, "child"):
        with pytest.raises(LedgerBusy, match=r"^another client of the database holds the accounts; try again"):
            direct.account("m").close()
        with pytest.raises(LedgerBusy, match="'child'"):
            direct.open_account("grandchild", policy(1), parent="child")
        direct.open_account("other", policy(1), parent="m")
        direct.account("b").close()
    assert {one.name for one in direct.accounts() if one.closed} == {"b"}
    direct.account("m").close()
    assert {one.name for one in direct.accounts() if one.closed} == {"b", "m", "child", "other"}
    direct.verify()


def test_who_opens_waits_for_another_that_opens_and_who_spends_does_not(direct: Ledger, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as locker:
        locker.execute(queries("postgres")["one_at_a_time"].encode())
        with pytest.raises(LedgerBusy, match=r"(?i)try again"):
            direct.open_account("other", policy(1))
        with pytest.raises(LedgerBusy, match=r"(?i)try again"):
            direct.account("c").close()
        begun = time.monotonic()
        direct.spend({"b": COST}, key="meanwhile")
        assert time.monotonic() - begun < TIMEOUT
        # Who closes next does not make the others wait again so soon.
        assert OPENING in cast("LocalBackend", direct.backend).store._skipped  # type: ignore[attr-defined]  # noqa: SLF001
    direct.open_account("other", policy(1))


def test_a_locked_table_is_waited_for_until_the_timeout(direct: Ledger, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as locker:
        locker.execute("LOCK TABLE odograph.accounts")
        with pytest.raises(LedgerBusy, match=r"(?i)try again"):
            direct.spend({"b": COST}, key="early")
    direct.spend({"b": COST}, key="late")
    assert charges(direct).keys() == {"late"}


def longest_wait(direct: Ledger, url: str, others: Sequence[str]) -> float:
    """Return how long callers wait who need nothing of a locked row, while many want to resolve what is on it."""
    timeout = 8.0
    held = [direct.account("m").reserve(COST, key=f"held-{number}") for number in range(8)]
    with ServiceThread(url, timeout=timeout) as service:
        head = {"Authorization": f"Bearer {service.token('ana')}"}
        with httpx.Client(base_url=service.url, headers=head, timeout=30) as client:
            assert client.get("/readyz").status_code == 200
            answers: list[int] = []

            def commit(number: int) -> None:
                path = f"/v1/reservations/{quote(held[number].id)}/commit"
                answers.append(client.post(path, json={}).status_code)

            threads = [threading.Thread(target=commit, args=(number,)) for number in range(len(held))]
            with row_locked(url, "m"):
                for thread in threads:
                    thread.start()
                time.sleep(1.5)  # until all of them wait, and readiness is asked for again
                longest = 0.0
                for path in others:
                    begun = time.monotonic()
                    client.get(path)
                    longest = max(longest, time.monotonic() - begun)
                assert not answers
            for thread in threads:
                thread.join(30)
            assert answers == [200] * len(held)  # the row is free again
            assert not direct.account("m").pending
    direct.verify()
    return longest


def test_those_who_wait_for_a_locked_row_leave_the_threads_of_the_service_to_others(
    direct: Ledger, postgres_url: str
) -> None:
    assert longest_wait(direct, postgres_url, ("/v1/accounts/b/entries", "/readyz")) < 2


def submit_patiently(writer: WriterClient, command: Command) -> Result:
    """Keep the thread of the caller until the row is free."""
    deadline = time.monotonic() + writer._settings.timeout  # noqa: SLF001  as the engine in a process waits
    while True:
        try:
            return SUBMIT(writer, command)
        except RowLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_service_whose_threads_wait_for_a_locked_row_is_caught(
    direct: Ledger, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriterClient, "submit", submit_patiently)
    assert longest_wait(direct, postgres_url, ("/readyz",)) >= 2


def test_a_probe_does_not_wait_for_a_row_that_another_client_holds(direct: Ledger, postgres_url: str) -> None:
    probed = cast("LocalBackend", direct.backend).store
    with psycopg.connect(postgres_url) as locker:  # as a service that was stopped in the middle of its own probe
        locker.execute("SELECT 1 FROM odograph.schema_version FOR UPDATE")
        begun = time.monotonic()
        probed.probe()
        assert time.monotonic() - begun < TIMEOUT / 2
    with psycopg.connect(postgres_url) as locker:
        locker.execute("LOCK TABLE odograph.schema_version")
        begun = time.monotonic()
        with pytest.raises(LedgerBusy):
            probed.probe()
        assert time.monotonic() - begun < 0.9 * TIMEOUT  # the charges behind it wait as long
    probed.probe()


def test_a_probe_connects_again_as_a_charge_does(direct: Ledger, postgres_url: str) -> None:
    direct.spend({"b": COST}, key="before")
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'odograph' AND datname = current_database()"
        )
    cast("LocalBackend", direct.backend).store.probe()
