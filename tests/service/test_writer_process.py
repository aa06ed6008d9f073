"""A writer process that is killed, ends, cannot start or gets a signal: every answer is true, and service goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import attacks
import httpx
import pytest
import service_server
from service_process import BLOCK_FILE, Service, end_process, has_ended, held, wait_until
from service_server import ServiceThread

import odograph as odo
from odograph.connection import store_at
from odograph.errors import LedgerBusy
from odograph.ledger.engine import FairQueue
from odograph.ledger.stores.base import Store, Wants, Work
from odograph.service.writer import WriterClient

SMALL = attacks.pure("0.00001")
SLOW = {"kind": "parallel", "parts": [SMALL, SMALL]}  # to price, perhaps: the worker does that
POLICY = odo.Policy(1, 1e-6, filter="basic")
BATCH = 256  # commands sent at once: several of them for the largest request
CLIENTS = 4
KILLS = 3


def url_in(folder: Path) -> str:
    return f"sqlite:///{folder}/ledger.db"


def charged(url: str) -> Counter[str]:
    """Return how often each key was charged; the ledger is in order."""
    with odo.connect(url) as ledger:
        ledger.verify()
        return Counter(past.entry.key for past in ledger.account("a").history(0, 10**6) if past.entry.verb == "spend")


def reach(service: Service, name: str = "") -> httpx.Client:
    """Return a client with a key of this principal, or the first owner's."""
    headers = {"Authorization": f"Bearer {service.token(name)}"}
    return httpx.Client(base_url=service.url, headers=headers, timeout=60)


def spend(client: httpx.Client, key: str, cost: object = SMALL) -> httpx.Response:
    return attacks.post(client, "/v1/accounts/a/spends", {"cost": cost}, key=key)


def batch(client: httpx.Client, keys: Iterable[str]) -> list[dict[str, Any]]:
    """Spend under many keys in one request, and return the answers."""
    items = [{"key": key, "costs": {"a": SMALL}} for key in keys]
    answer = attacks.post(client, "/v1/batches", {"spends": items})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def check_honest(status: int, problem: dict[str, Any], key: str, charges: int) -> None:
    """Assert that what was told of a key is so; what is not known may be either, and the key to ask with is named."""
    assert charges <= 1, f"{key} was charged {charges} times"
    if status in {200, 201}:
        assert charges == 1, f"{key} was told to be charged, and was not"
        return
    assert problem["retryable"]
    if problem["code"] == "OutcomeUnknown":
        assert status == 504, problem
        assert f"(key {key!r})" in problem["detail"], problem
        assert "ask again with the same key" in problem["detail"], problem
    else:
        assert (status, problem["code"]) == (503, "LedgerBusy")
        assert charges == 0, f"{key} was told not to be charged, and was: {problem}"


class Mortal:
    """A store whose writer ends when it writes, once: before that, or after it and before anybody is told."""

    armed: ClassVar[str] = ""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        return getattr(self._store, name)

    def write(self, wants: Wants, work: Work) -> None:
        armed, Mortal.armed = Mortal.armed, ""
        if armed == "before":
            raise SystemExit
        self._store.write(wants, work)
        if armed == "after":
            raise SystemExit


def tell_nothing_happened(writer: WriterClient) -> None:
    """Answer what a process that has ended may have written as if it had not."""
    for request, number, *_ in chain.from_iterable(batch.pending for batch in writer._sent):  # noqa: SLF001  broken on purpose
        request.answer(number, LedgerBusy("the writer process has ended; try again"))
    writer._sent.clear()  # noqa: SLF001  as above


def let_die(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Let a writer end while it writes, ask again, and see that every answer was so and every charge made once."""
    monkeypatch.setattr(service_server, "store_at", lambda *args, **kwargs: Mortal(store_at(*args, **kwargs)))
    monkeypatch.setattr(FairQueue.take, "__defaults__", (BATCH,))
    url = url_in(folder)
    with ServiceThread(url) as service, attacks.owner_of(service) as client:
        attacks.open_account(client, "a", POLICY.to_dict())
        assert spend(client, "first").status_code == 201
        Mortal.armed = when
        answer = spend(client, "alone")
        check_honest(answer.status_code, answer.json(), "alone", charged(url)["alone"])
        assert answer.json()["code"] == "OutcomeUnknown"
        assert charged(url)["alone"] == (when == "after")
        again = spend(client, "alone")
        assert (again.status_code, charged(url)["alone"]) == (200 if when == "after" else 201, 1)
        keys = [f"k-{number}" for number in range(1000)]
        Mortal.armed = when
        results, found = batch(client, keys), charged(url)
        for key, result in zip(keys, results, strict=True):
            check_honest(result["status"], result.get("problem", {}), key, found[key])
        statuses = Counter(result["status"] for result in results)
        assert statuses == {504: 2 * BATCH, 201: 1000 - 2 * BATCH}  # what was not sent yet waits for the next writer
        assert {result["status"] for result in batch(client, keys)} <= {200, 201}
        assert charged(url) == Counter([*keys, "first", "alone"])


# A writer in a thread ends as a process does when nothing catches what ends it.
DIES = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@DIES
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_writer_had_not_answered_when_it_ended_is_told_as_unknown_and_charged_once_when_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    let_die(tmp_path, monkeypatch, when)


@DIES
def test_a_writer_client_that_says_that_nothing_was_charged_when_a_writer_ends_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WriterClient, "_answer_unknown", tell_nothing_happened)
    with pytest.raises(AssertionError, match="alone was told not to be charged, and was"):
        let_die(tmp_path, monkeypatch, "after")


def introduce(service: Service, *names: str) -> None:
    """Open the account, and let principals spend once: known by name, they wait for nothing but the writer."""
    with odo.connect(service.ledger_url) as ledger:
        ledger.open_account("a", POLICY)
    for name in names:
        with reach(service, name) as client:
            assert spend(client, name).status_code == 201


class Spender:
    """Spends under one key after another; what is not answered with a receipt is asked again under its key."""

    def __init__(self, service: Service, name: str) -> None:
        self.answers: dict[str, list[httpx.Response]] = {}
        self._client, self._name = reach(service, name), name
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        with self._client as client:
            while not self._done.is_set():
                key = f"{self._name}-{len(self.answers)}"
                told = self.answers[key] = [spend(client, key)]
                while told[-1].status_code in {503, 504}:
                    time.sleep(0.01)
                    told.append(spend(client, key))

    def finish(self) -> dict[str, list[httpx.Response]]:
        """Let it finish what it has begun, and return what it was told."""
        self._done.set()
        self._thread.join(120)
        assert not self._thread.is_alive(), "a request is never answered"
        return self.answers


def check_told(told: dict[str, list[httpx.Response]], found: Counter[str]) -> None:
    """Assert that everything is charged once, and that nobody was told that something was not charged that was."""
    assert found == Counter(told.keys())
    for key, answers in told.items():
        *before, last = answers
        for answer in before:
            check_honest(answer.status_code, answer.json(), key, 0)
        unknown = any(answer.json()["code"] == "OutcomeUnknown" for answer in before)
        assert last.status_code == 201 or (unknown and last.status_code == 200), [one.text for one in answers]


def test_a_killed_writer_loses_nothing_and_another_replaces_it(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path) as service:
        introduce(service)
        spenders = [Spender(service, f"spender-{number}") for number in range(CLIENTS)]
        seen = set()
        for kill in range(KILLS):
            wait_until(lambda: all(len(one.answers) > 5 * (kill + 1) for one in spenders))  # noqa: B023  at once
            (writer,) = service.writers
            seen.add(writer)
            end_process(writer)
            wait_until(lambda: not service.is_ready())
            wait_until(service.is_ready)
        told: dict[str, list[httpx.Response]] = {}
        for one in spenders:
            told |= one.finish()
        assert len(seen | {*service.writers}) == KILLS + 1
        assert all(not Path(f"/proc/{pid}").exists() for pid in seen)  # collected by its worker
    assert any(len(answers) > 1 for answers in told.values())
    check_told(told, charged(service.ledger_url))


def test_orders_in_the_hands_of_a_killed_writer_are_told_as_unknown_with_their_keys(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path) as service:
        names = [f"spender-{number}" for number in range(CLIENTS)]
        introduce(service, *names)
        with held(service.ledger_url):
            spenders = [Spender(service, name) for name in names]
            time.sleep(1)  # they wait for the ledger
            end_process(*service.writers)
        told: dict[str, list[httpx.Response]] = {}
        for one in spenders:
            told |= one.finish()
    first = [told[f"{name}-0"][0] for name in names]
    told_unknown = [answer.status_code == 504 for answer in first]
    assert sum(told_unknown) >= 2, "one was being written, and the next was on its way; others may have waited"
    check_told(told, charged(service.ledger_url) - Counter(names))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_writer_leaves_signals_to_its_worker(tmp_path: Path, number: signal.Signals) -> None:
    with Service(url_in(tmp_path), tmp_path) as service, reach(service) as client:
        attacks.open_account(client, "a", POLICY.to_dict())
        assert spend(client, "first").status_code == 201
        (writer,) = service.writers
        with held(service.ledger_url):
            answers: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: answers.append(spend(client, "k")), daemon=True)
            asking.start()
            time.sleep(0.5)  # it waits for the ledger
            os.kill(writer, number)
            time.sleep(0.2)
        asking.join(60)
        assert [answer.status_code for answer in answers] == [201]
        assert service.writers == [writer]


def ask_in_vain(service: Service, name: str) -> None:
    """Spend, and see the service go away."""
    with reach(service, name) as client, pytest.raises(httpx.TransportError):
        spend(client, "begun")


def test_a_writer_ends_with_its_worker_after_what_it_has_begun(tmp_path: Path) -> None:
    with Service(url_in(tmp_path), tmp_path) as service:
        introduce(service, "spender")
        (writer,) = service.writers
        with held(service.ledger_url):
            asking = threading.Thread(target=ask_in_vain, args=(service, "spender"))
            asking.start()
            time.sleep(1)  # it waits for the ledger
            end_process(service.pid)
            time.sleep(0.2)
            assert not has_ended(writer)  # it waits too
        wait_until(lambda: has_ended(writer))
        asking.join(60)
    assert charged(service.ledger_url) == {"spender": 1, "begun": 1}
    assert "Traceback" not in service.said


def test_a_writer_ends_with_its_worker_of_several_and_the_next_worker_has_its_own(
    postgres_url: str, tmp_path: Path
) -> None:
    with Service(postgres_url, tmp_path, "--workers", "2") as service:
        wait_until(lambda: len(service.writers) == 2)
        before = service.writers
        end_process(service.workers[0])
        wait_until(lambda: sum(map(has_ended, before)) == 1)
        wait_until(lambda: len(found := {*service.writers}) == 2 and not found <= {*before})


def test_while_no_writer_can_start_nothing_is_charged_and_all_else_goes_on(tmp_path: Path) -> None:
    bar = tmp_path / "bar"
    with (
        Service(url_in(tmp_path), tmp_path, defect="blocked", **{BLOCK_FILE: str(bar)}) as service,
        reach(service) as client,
    ):
        attacks.open_account(client, "a", POLICY.to_dict())
        form = {"cost": SMALL}
        reserved = attacks.post(client, "/v1/accounts/a/reservations", form, key="r").json()["id"]
        bar.touch()
        end_process(*service.writers)
        wait_until(lambda: not service.is_ready())
        for answer in (spend(client, "k"), attacks.post(client, "/v1/accounts/a/reservations", form, key="s")):
            assert (answer.status_code, answer.json()["code"]) == (503, "LedgerBusy"), answer.text
            assert answer.json()["charged"] is False
        assert [one["problem"]["code"] for one in batch(client, ["k", "l"])] == ["LedgerBusy", "LedgerBusy"]
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        assert client.get("/v1/accounts/a").status_code == 200
        commit = f"/v1/reservations/{reserved.replace('#', '%23')}/commit"
        opening = {"name": "b", "policy": POLICY.to_dict()}
        every = (
            attacks.post(client, commit, {}),
            attacks.post(client, "/v1/accounts", opening, key="open"),
            attacks.post(client, "/v1/accounts/a/close", {}),
            spend(client, "slow", SLOW),
        )
        assert [(answer.status_code, answer.json()["code"]) for answer in every] == 4 * [(503, "LedgerBusy")]
        assert not charged(service.ledger_url)
        bar.unlink()
        wait_until(service.is_ready)
        assert attacks.post(client, commit, {}).status_code == 200
        assert spend(client, "slow", SLOW).status_code == 201
        assert spend(client, "k").status_code == 201
        assert [one["status"] for one in batch(client, ["k", "l"])] == [200, 201]
    assert charged(service.ledger_url) == {"slow": 1, "k": 1, "l": 1}
