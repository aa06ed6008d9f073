"""A service killed again and again while clients charge near the limit: nothing is lost, nothing charged twice."""

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
from postgres_server import PostgresServer
from service_process import PROCESS_TIMEOUT, Service, end_process, wait_until
from tls_proxy import TlsProxy

import odograph as odo
from odograph.errors import BudgetExceeded, LedgerBusy, LedgerCorrupt, OutcomeUnknown, ServiceUnavailable
from odograph.ledger.ledger import Ledger

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
SECONDS = 150 if FULL else 4  # on each of the two stores
CLIENTS = 4
TLS_SECONDS = 300 if FULL else 4
READ_EVERY = 5  # requests of a client
CONTROLS = 10  # kills until a broken store must have been caught
COST = odo.PureDP(0.001)
NARROW = 12  # requests that a narrow account admits
WIDE = "wide"
VERBS = ("spend", "commit", "void", "void", "void", "void")  # an account stays near its limit for a while

T = TypeVar("T")


def policy(requests: float) -> odo.Policy:
    """A policy that admits so many requests."""
    return odo.Policy(requests / 1000, 1e-6, filter="basic")


class Analyst:
    """A client in a thread of its own: it charges under keys of its own, and keeps what it was told.

    What is not answered is asked again under the same key until there is an answer; so at the end it knows them all.
    """

    def __init__(self, service: Service, name: str, verbs: tuple[str, ...], url: str) -> None:
        self.ledger = odo.connect(url, token=service.token(name))
        self.name = name
        self.narrow = "narrow-0"  # the account that is running out; changed from outside
        self.charged: dict[str, tuple[dict[str, odo.PureDP], str]] = {}  # by key: what was asked, and the receipt
        self.resolved: dict[str, str] = {}  # by the reservation's id: the verb
        self.refused: set[str] = set()
        self.found_again = 0  # answers that were lost on the way and asked for again
        self.failure: BaseException | None = None
        self._verbs = verbs
        self._asked = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Let it finish what it has begun."""
        self._done.set()
        self._thread.join(2 * PROCESS_TIMEOUT)
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
        """Charge one account or both, and commit or void what was reserved."""
        self._asked += 1
        if self._asked % READ_EVERY == 0:
            self._read()
        key = f"{self.name}-{self._asked}"
        names = random.choice(((self.narrow,), (self.narrow,), (WIDE,), (WIDE, self.narrow)))  # noqa: S311
        verb = random.choice(self._verbs)  # noqa: S311  any will do
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

    def _read(self) -> None:
        """Ask what changes nothing; what was acknowledged to this client is there."""
        account = insist(lambda: self.ledger.account(self.narrow))
        assert insist(lambda: account.decide(COST)).request == COST
        assert insist(lambda: account.quote([COST, COST])).decisions
        assert insist(lambda: account.how_many(COST)) <= NARROW
        if self.charged:
            costs, receipt = self.charged[next(reversed(self.charged))]
            name, _, sequence = receipt.partition("#")
            found = insist(lambda: self.ledger.account(name).history(int(sequence), 1))
            assert found, f"{receipt} was acknowledged, and is gone"
            (entry,) = found
            assert entry.cost == costs[name]


def insist(ask: Callable[[], T]) -> T:
    """Ask until there is an answer."""
    end = time.monotonic() + PROCESS_TIMEOUT
    while True:
        try:
            return ask()
        except (LedgerBusy, OutcomeUnknown, ServiceUnavailable):
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def analysts_of(service: Service, verbs: tuple[str, ...] = VERBS, url: str = "") -> list[Analyst]:
    """Open the first accounts and let the clients begin; `url` is that of a proxy, if there is one."""
    with odo.connect(service.ledger_url) as ledger:
        ledger.open_account("all", policy(10**6))
        ledger.open_account(WIDE, policy(10**6), parent="all")
        ledger.open_account("narrow-0", policy(NARROW), parent="all")
    analysts = [Analyst(service, f"analyst-{number}", verbs, url or service.url) for number in range(CLIENTS)]
    for analyst in analysts:
        analyst.start()
    return analysts


def wait_for_a_charge(analysts: list[Analyst]) -> None:
    """Wait until somebody was told of one more charge."""
    before, end = sum(len(analyst.charged) for analyst in analysts), time.monotonic() + PROCESS_TIMEOUT
    while sum(len(analyst.charged) for analyst in analysts) == before:
        for analyst in analysts:
            assert analyst.failure is None, analyst.failure
        assert time.monotonic() < end, f"nobody was charged in {PROCESS_TIMEOUT} s"
        time.sleep(0.001)


def soak(service: Service, strike: Callable[[], None], url: str = "", seconds: float = SECONDS) -> list[Analyst]:
    """Strike the service again and again, opening a new narrow account each time."""
    analysts, number, end = analysts_of(service, url=url), 0, time.monotonic() + seconds
    with odo.connect(url or service.url, token=service.token()) as owner:
        while time.monotonic() < end:
            number += 1
            wait_for_a_charge(analysts)
            time.sleep(random.uniform(0, 0.5))  # noqa: S311  any moment will do
            strike()
            name = f"narrow-{number}"
            insist(lambda name=name: owner.open_account(name, policy(NARROW), parent="all", key=name))  # type: ignore[misc]
            for analyst in analysts:
                analyst.narrow = name
    for analyst in analysts:
        analyst.finish()
    return analysts


def charges(ledger: Ledger) -> dict[str, Counter[str]]:
    """Count the charges under each key, by account."""
    found: dict[str, Counter[str]] = {}
    for account in ledger.accounts():
        for past in account.history(0, 10**6):
            if past.entry.verb in ("spend", "reserve"):
                found.setdefault(past.entry.key, Counter())[account.name] += 1
    return found


def gone(ledger: Ledger, analysts: list[Analyst]) -> set[str]:
    """Return the keys that were acknowledged and are not there."""
    told = {key for analyst in analysts for key in list(analyst.charged)}
    return told - charges(ledger).keys()


def judge(ledger: Ledger, analysts: list[Analyst]) -> None:
    """What was acknowledged is there, once; what is there was acknowledged; limits hold, to the last request."""
    told = {key: costs for analyst in analysts for key, (costs, _) in analyst.charged.items()}
    assert not gone(ledger, analysts)
    assert charges(ledger) == {
        key: Counter({**dict.fromkeys(costs, 1), "all": len(costs)}) for key, costs in told.items()
    }
    ledger.verify()
    resolved = {place: verb for analyst in analysts for place, verb in analyst.resolved.items()}
    for account in ledger.accounts():
        totals: Counter[str] = Counter()
        for past in account.history(0, 10**6):
            totals[past.entry.verb] += 1
            if past.entry.verb in ("commit", "void"):
                assert resolved[past.entry.key] == past.entry.verb
        steps = totals["spend"] + totals["reserve"] - totals["void"]
        assert account.totals.steps == steps
        if account.name == "all":
            assert totals["commit"] + totals["void"] >= len(resolved)  # an entry for each account that it charged
        if account.name.startswith("narrow"):
            assert steps <= NARROW
            for _ in range(NARROW - steps):
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


def report(what: str, struck: Counter[str], analysts: list[Analyst]) -> None:
    charges, refusals = (sum(map(len, of)) for of in zip(*((a.charged, a.refused) for a in analysts), strict=True))
    again = sum(analyst.found_again for analyst in analysts)
    kills = ", ".join(f"{count} kills of a {name}" for name, count in sorted(struck.items()))
    print(f"{what}: {kills}, {charges} charges, {refusals} refusals, {again} lost answers asked for again")  # noqa: T201


@pytest.mark.long
def test_a_service_or_its_writer_killed_again_and_again_loses_nothing_and_charges_nothing_twice(
    tmp_path: Path,
) -> None:
    url, struck = f"sqlite:///{tmp_path}/ledger.db", Counter[str]()
    with Service(url, tmp_path) as service:

        def strike() -> None:
            writers = service.writers
            if writers and random.random() < 0.5:  # noqa: S311  either
                end_process(writers[0])
                struck["writer"] += 1
            else:
                service.kill()
                service.start()
                struck["service"] += 1

        analysts = soak(service, strike)
        ask_again(service, analysts)
    with odo.connect(url) as ledger:
        judge(ledger, analysts)
    report("SQLite", struck, analysts)


@pytest.mark.long
def test_workers_and_writers_killed_again_and_again_lose_nothing_and_charge_nothing_twice(
    postgres_url: str, tmp_path: Path
) -> None:
    struck = Counter[str]()
    with Service(postgres_url, tmp_path, "--workers", "2") as service:

        def strike() -> None:
            found = {"worker": service.workers, "writer": service.writers}
            what = random.choice([name for name in found if found[name]])  # noqa: S311  either
            end_process(random.choice(found[what]))  # noqa: S311  any
            struck[what] += 1

        analysts = soak(service, strike)
        ask_again(service, analysts)
    with odo.connect(postgres_url) as ledger:
        judge(ledger, analysts)
    report("PostgreSQL", struck, analysts)


@pytest.mark.long
def test_kills_of_everything_behind_a_tls_proxy_and_of_the_proxy_lose_nothing_and_charge_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = Counter[str]()
    options = ("--workers", "2", "--plain-http", "--connections-per-address", "0")
    with (
        PostgresServer() as postgres,
        Service(postgres.url, tmp_path, *options) as service,
        TlsProxy(tmp_path, service.port) as proxy,
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(proxy.authority))

        def strike() -> None:
            found = {"worker": service.workers, "writer": service.writers, "proxy": [], "PostgreSQL": []}
            what = random.choice([name for name in found if found[name] or name in ("proxy", "PostgreSQL")])  # noqa: S311  any
            if found[what]:
                end_process(random.choice(found[what]))  # noqa: S311  any
            else:
                server = proxy if what == "proxy" else postgres
                server.kill()
                time.sleep(random.uniform(0, 0.2))  # noqa: S311  requests meet a server that is down
                server.start() if server is proxy else postgres.restart()
            struck[what] += 1

        analysts = soak(service, strike, proxy.url, TLS_SECONDS)
        assert proxy.url.startswith("https://")
        ask_again(service, analysts)
        with odo.connect(postgres.url) as ledger:
            judge(ledger, analysts)
    report("PostgreSQL behind TLS", struck, analysts)


def test_a_writer_that_answers_before_its_commit_is_caught(tmp_path: Path) -> None:
    url, caught = f"sqlite:///{tmp_path}/ledger.db", False
    with Service(url, tmp_path, defect="early") as service, odo.connect(url) as ledger:
        analysts = analysts_of(service, verbs=("spend",))
        for _ in range(CONTROLS):
            wait_until(lambda: len(service.writers) == 1)
            (writer,) = service.writers  # found before the charge: its commit comes soon
            wait_for_a_charge(analysts)
            end_process(writer)
            caught = bool(gone(ledger, analysts))
            if caught:
                break
        for analyst in analysts:
            try:
                analyst.finish()
            except AssertionError as problem:  # it looked for its charge before this test did
                caught = caught or "is gone" in str(problem)
    assert caught


def race(url: str, folder: Path, defect: str = "") -> None:
    """Let clients race through two workers for one account: as many are admitted as fit, and not one more."""
    limit = 150.5
    admitted: list[str] = []
    with Service(url, folder, "--workers", "2", defect=defect) as service:
        with odo.connect(service.url, token=service.token()) as owner:
            owner.open_account("narrow", policy(limit))
        wait_until(lambda: len(service.writers) == 2)  # a worker that starts late would leave all to the other
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
        assert ledger.account("narrow").totals.steps == len(admitted) == math.floor(limit)


def test_two_workers_keep_the_limit_of_one_account_exactly(postgres_url: str, tmp_path: Path) -> None:
    race(postgres_url, tmp_path)


def test_two_workers_that_decide_outside_the_transaction_are_caught(postgres_url: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, LedgerCorrupt)):
        race(postgres_url, tmp_path, "outside")
