"""A service that is killed again and again while clients charge near the limit: nothing is lost, nothing is doubled."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from processes import PATIENCE, Service, end_process

import odograph as odo
from odograph.errors import BudgetExceeded, LedgerBusy, LedgerCorrupt, ServiceUnavailable
from odograph.ledger.ledger import Ledger

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
SECONDS = 300 if FULL else 30
CLIENTS = 4
CONTROLS = 10  # kills until a broken twin must have been caught
COST = odo.PureDP(0.001)
NARROW = 60  # requests that a narrow account admits
WIDE = "wide"

T = TypeVar("T")


def policy(requests: float) -> odo.Policy:
    """A policy that admits so many requests."""
    return odo.Policy(requests / 1000, 1e-6, rule="basic")


class Analyst:
    """A client in a thread of its own: it charges under keys of its own, and keeps what it was told.

    What is not answered is asked again under the same key until there is an answer; so at the end it knows them all.
    """

    def __init__(self, url: str, token: str, name: str, narrow: str) -> None:
        self.ledger = odo.connect(url, token=token)
        self.name = name
        self.narrow = narrow  # the account that is running out; changed from outside
        self.charged: dict[str, tuple[dict[str, odo.PureDP], str]] = {}  # by key: what was asked, and the receipt
        self.resolved: dict[str, str] = {}  # by the reservation's id: the verb
        self.refused: set[str] = set()
        self.found_again = 0  # answers that were lost on the way and asked for again
        self.failure: BaseException | None = None
        self._asked = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let it finish what it has begun."""
        self._done.set()
        self._thread.join(2 * PATIENCE)
        assert not self._thread.is_alive()
        self.ledger.close()
        if self.failure is not None:
            raise self.failure

    def _work(self) -> None:
        try:
            while not self._done.is_set():
                self._ask()
        except BaseException as failure:  # noqa: BLE001  raised again where it is seen
            self.failure = failure

    def _ask(self) -> None:
        """Spend or reserve; most reservations are voided, so that an account stays near its limit for a while."""
        self._asked += 1
        key = f"{self.name}-{self._asked}"
        names = random.choice(((self.narrow,), (self.narrow,), (WIDE,), (WIDE, self.narrow)))  # noqa: S311
        verb = random.choice(("spend", "commit", "void", "void", "void", "void"))  # noqa: S311  any will do
        costs = dict.fromkeys(names, COST)
        try:
            if verb == "spend":
                receipt = insist(lambda: self.ledger.spend(costs, key=key))
            else:
                reservation = insist(lambda: self.ledger.reserve(costs, key=key))
                receipt = reservation.receipt
        except BudgetExceeded:
            self.refused.add(key)
            return
        self.charged[key] = costs, receipt.id
        self.found_again += receipt.repeated
        if verb == "commit":
            self.resolved[insist(reservation.commit).key] = verb
        elif verb == "void":
            self.resolved[insist(lambda: reservation.void("not run")).key] = verb


def insist(ask: Callable[[], T]) -> T:
    """Ask until there is an answer."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return ask()
        except (LedgerBusy, ServiceUnavailable):
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def a_moment(least: float, most: float) -> None:
    time.sleep(random.uniform(least, most))  # noqa: S311  any moment will do


def analysts_of(service: Service) -> list[Analyst]:
    """Open the first accounts and let the clients in."""
    with odo.connect(service.url, token=service.token()) as owner:
        owner.open_account("all", policy(10**6))
        owner.open_account(WIDE, policy(10**6), parent="all")
        owner.open_account("narrow-0", policy(NARROW), parent="all")
    names = [f"analyst-{number}" for number in range(CLIENTS)]
    return [Analyst(service.url, service.token(name), name, "narrow-0") for name in names]


def soak(service: Service, strike: Callable[[], None], stop: Callable[[int], bool]) -> list[Analyst]:
    """Strike the service again and again, opening a new narrow account each time, until it is enough."""
    analysts = analysts_of(service)
    for analyst in analysts:
        analyst.start()
    number = 0
    with odo.connect(service.url, token=service.token()) as owner:
        while not stop(number):
            number += 1
            strike()
            name = f"narrow-{number}"
            insist(lambda name=name: owner.open_account(name, policy(NARROW), parent="all", key=name))  # type: ignore[misc]
            for analyst in analysts:
                analyst.narrow = name
    for analyst in analysts:
        analyst.stop()
    return analysts


def judge(ledger: Ledger, analysts: list[Analyst]) -> None:
    """What was acknowledged is there, once; what is there was acknowledged; limits hold, to the last request."""
    charged: dict[str, Counter[str]] = {}
    resolved: dict[str, str] = {}
    totals: Counter[str] = Counter()
    for account in ledger.accounts():
        for past in account.history(0, 10**7):
            if past.entry.verb in ("spend", "reserve"):
                charged.setdefault(past.entry.key, Counter())[account.name] += 1
            elif past.entry.verb in ("commit", "void"):
                resolved[past.entry.key] = past.entry.verb
            totals[account.name] += {"spend": 1, "reserve": 1, "void": -1}.get(past.entry.verb, 0)
    told = {key: dict(asked) for analyst in analysts for key, (asked, _) in analyst.charged.items()}
    lost, unasked = told.keys() - charged.keys(), charged.keys() - told.keys()
    assert not lost, f"{len(lost)} acknowledged charges are gone: {sorted(lost)[:3]}"
    assert not unasked, f"{len(unasked)} charges were never acknowledged: {sorted(unasked)[:3]}"
    for key, costs in told.items():
        assert charged[key] == Counter({**dict.fromkeys(costs, 1), "all": len(costs)}), key
    assert resolved == {place: verb for analyst in analysts for place, verb in analyst.resolved.items()}
    ledger.verify()
    for account in ledger.accounts():
        assert account.totals.steps == totals[account.name]
        if account.name.startswith("narrow"):
            assert totals[account.name] <= NARROW
            for _ in range(NARROW - totals[account.name]):
                account.spend(COST)
            with pytest.raises(BudgetExceeded):
                account.spend(COST)


def ask_again(service: Service, analysts: list[Analyst]) -> None:
    """The latest keys of everybody give the same receipts again, and charge nothing."""
    for analyst in analysts:
        with odo.connect(service.url, token=service.token(analyst.name)) as ledger:
            spent = [key for key in analyst.charged if analyst.charged[key][1] not in analyst.resolved]
            for key in spent[-10:]:
                costs, receipt = analyst.charged[key]
                again = ledger.spend(costs, key=key)
                assert (again.repeated, again.id) == (True, receipt)


def after(seconds: float) -> Callable[[int], bool]:
    """Say when so many seconds are over."""
    end = time.monotonic() + seconds
    return lambda _: time.monotonic() > end


def report(what: str, kills: int, analysts: list[Analyst]) -> None:
    charges, refusals = (sum(map(len, of)) for of in zip(*((a.charged, a.refused) for a in analysts), strict=True))
    again = sum(analyst.found_again for analyst in analysts)
    print(f"{what}: {kills} kills, {charges} charges, {refusals} refusals, {again} lost answers asked for again")  # noqa: T201


@pytest.mark.long
def test_a_service_killed_again_and_again_loses_nothing_and_charges_nothing_twice(tmp_path: Path) -> None:
    url, kills = f"sqlite:///{tmp_path}/ledger.db", 0
    with Service(url, tmp_path) as service:

        def strike() -> None:
            nonlocal kills
            a_moment(0.1, 0.6)
            service.kill()
            service.start()
            kills += 1

        analysts = soak(service, strike, after(SECONDS))
        ask_again(service, analysts)
        with odo.connect(service.url, token=service.token()) as owner:
            owner.verify()
    with odo.connect(url) as ledger:
        judge(ledger, analysts)
    report("SQLite", kills, analysts)
    assert kills >= SECONDS / 10


@pytest.mark.long
def test_workers_killed_again_and_again_lose_nothing_and_charge_nothing_twice(
    postgres_url: str, tmp_path: Path
) -> None:
    killed: set[int] = set()
    with Service(postgres_url, tmp_path, "--workers", "2") as service:

        def strike() -> None:
            a_moment(0.2, 1.5)
            victim = random.choice(service.workers or [0])  # noqa: S311  whichever
            if victim:
                end_process(victim)
                killed.add(victim)

        analysts = soak(service, strike, after(SECONDS))
        ask_again(service, analysts)
    with odo.connect(postgres_url) as ledger:
        judge(ledger, analysts)
    report("PostgreSQL", len(killed), analysts)
    assert len(killed) >= SECONDS / 10


def test_a_service_that_answers_before_its_commit_is_caught(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Service(url, tmp_path, twin="early") as service:
        analysts = analysts_of(service)
        for analyst in analysts:
            analyst.start()
        for _ in range(CONTROLS):
            a_moment(0.3, 0.6)
            service.kill()
            service.start()
        for analyst in analysts:
            analyst.stop()
    with odo.connect(url) as ledger, pytest.raises(AssertionError, match="acknowledged charges are gone"):
        judge(ledger, analysts)


def race(url: str, folder: Path, twin: str = "") -> tuple[int, int]:
    """Let clients race through two workers for one account; say how many were admitted, and how many it admits."""
    limit = 150.5
    admitted: list[str] = []
    with Service(url, folder, "--workers", "2", twin=twin) as service:
        with odo.connect(service.url, token=service.token()) as owner:
            owner.open_account("narrow", policy(limit))
        tokens = [service.token(f"analyst-{number}", "analyst") for number in range(2 * CLIENTS)]

        def spend(token: str) -> None:
            with odo.connect(service.url, token=token) as ledger:
                account = ledger.account("narrow")
                for _ in range(math.floor(limit) * 2 // len(tokens)):
                    try:
                        admitted.append(account.spend(COST).id)
                    except BudgetExceeded:
                        continue

        threads = [threading.Thread(target=spend, args=(token,)) for token in tokens]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(admitted)) == len(admitted)
    with odo.connect(url) as ledger:
        ledger.verify()
        assert ledger.account("narrow").totals.steps == len(admitted)
    return len(admitted), math.floor(limit)


def test_two_workers_keep_the_limit_of_one_account_exactly(postgres_url: str, tmp_path: Path) -> None:
    admitted, limit = race(postgres_url, tmp_path)
    assert admitted == limit


def test_two_workers_that_decide_outside_the_transaction_are_caught(postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, LedgerCorrupt)):
        admitted, limit = race(postgres_url, tmp_path, "outside")
        assert admitted == limit
