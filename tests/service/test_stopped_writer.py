"""A process that should write and does not, a ledger that cannot be written: callers are told, and charged once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attacks
import httpx
import psycopg
import pytest
from service_process import Service, has_ended, held, wait_until
from service_server import ServiceThread
from syscalls import build_shim, preload

import odograph as odo
from odograph.service import writer as writer_module
from odograph.service.settings import Settings
from odograph.service.state import AppState
from odograph.service.writer import LENGTH, PROBE, READY, Answers, Wait, decode_messages, encode_batch

SMALL = attacks.pure("0.00001")
PATH = "/v1/accounts/a/spends"
OTHERS = b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


@contextmanager
def asking(service: Service) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {service.token()}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=30) as client:
        attacks.open_account(client, "a")
        yield client


@contextmanager
def stopped(service: Service) -> Iterator[int]:
    """Stop the process that writes; let it go on at the end, if it is still there."""
    (writer,) = service.writers
    os.kill(writer, signal.SIGSTOP)
    try:
        yield writer
    finally:
        if not has_ended(writer):
            os.kill(writer, signal.SIGCONT)


def readiness(service: Service | ServiceThread) -> tuple[int, str]:
    answer = httpx.get(f"{service.url}/readyz", timeout=30)
    return answer.status_code, answer.json()["status"]


def depth(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("odograph_queue_depth "))


def spent(url: str) -> list[str]:
    with odo.connect(url) as ledger:
        ledger.verify()
        return [past.entry.key for past in ledger.account("a").history(0, 10**6) if past.entry.verb == "spend"]


def batch(client: httpx.Client, keys: list[str]) -> list[dict[str, Any]]:
    items = [{"key": key, "costs": {"a": SMALL}} for key in keys]
    results: list[dict[str, Any]] = attacks.post(client, "/v1/batches", {"spends": items}).json()["results"]
    return results


def test_while_the_writer_is_stopped_nobody_waits_without_end_and_a_retry_charges_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    keys = [f"b{i}" for i in range(1000)]
    with (
        Service(url, tmp_path, defect="prompt") as service,
        asking(service) as client,
        ThreadPoolExecutor(2) as others,
    ):
        with stopped(service):
            begun = time.monotonic()
            sent = others.submit(attacks.post, client, PATH, {"cost": SMALL}, key="sent")
            time.sleep(0.2)
            waiting = others.submit(batch, client, keys)
            time.sleep(0.3)
            assert depth(client) == 1 + len(keys)
            wait_until(lambda: readiness(service)[0] == 503, timeout=10)
            answer, results = sent.result(), waiting.result()
            assert time.monotonic() - begun < 20
        assert (answer.status_code, answer.json()["code"]) == (504, "OutcomeUnknown")
        assert answer.json()["retryable"]
        assert "ask again with the same key" in answer.json()["detail"]
        codes = [result["problem"]["code"] for result in results]
        assert {*codes} == {"OutcomeUnknown", "LedgerBusy"}  # those that were sent, and those that were not
        wait_until(lambda: readiness(service) == (200, "ok"))
        charged = {*spent(url)}
        assert not charged & {key for key, code in zip(keys, codes, strict=True) if code == "LedgerBusy"}
        assert attacks.post(client, PATH, {"cost": SMALL}, key="sent").status_code in (200, 201)
        assert {result["status"] for result in batch(client, keys)} <= {200, 201}
        assert depth(client) == 0
    assert sorted(spent(url)) == sorted([*keys, "sent"])


def test_a_writer_that_stays_stopped_is_replaced(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Service(url, tmp_path, defect="prompt") as service, asking(service) as client, stopped(service) as writer:
        assert attacks.post(client, PATH, {"cost": SMALL}, key="k").status_code == 504
        wait_until(lambda: has_ended(writer))
        wait_until(lambda: readiness(service) == (200, "ok"))
        assert attacks.post(client, PATH, {"cost": SMALL}, key="k").status_code == 201
    assert spent(url) == ["k"]


def test_a_ledger_that_cannot_be_written_is_not_ready(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with (
        ServiceThread(postgres_url) as service,
        attacks.owner_of(service) as owner,
        psycopg.connect(postgres_url, autocommit=True) as database,
    ):
        attacks.open_account(owner, "a")
        assert readiness(service) == (200, "ok")
        database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
        database.execute(OTHERS, [name])
        wait_until(lambda: readiness(service) == (503, "the ledger cannot be written"), timeout=20)
        database.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only".encode())
        database.execute(OTHERS, [name])
        wait_until(lambda: readiness(service) == (200, "ok"), timeout=20)


def test_readiness_that_only_asks_whether_a_process_is_there_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: without the probe nothing is noticed of a ledger that is held."""

    async def careless(_: AppState) -> str:
        return ""

    url = f"sqlite:///{tmp_path}/ledger.db"
    with ServiceThread(url, timeout=0.5) as service:
        with monkeypatch.context() as patch:
            patch.setattr(AppState, "readiness", careless)
            with held_elsewhere(url):
                assert readiness(service) == (200, "ok")
        with held_elsewhere(url):
            assert readiness(service) == (503, "the ledger cannot be written")


@contextmanager
def held_elsewhere(url: str) -> Iterator[None]:
    """Have another thread hold the ledger, as a program that does not let go of it."""
    time.sleep(1.1)  # what was found is believed for a second
    with held(url):
        yield


def test_a_full_disk_is_told_as_something_to_try_again_and_is_not_ready(tmp_path: Path) -> None:
    shim = build_shim(tmp_path)
    url = f"sqlite:///{tmp_path}/ledger.db"
    with Service(url, tmp_path, **preload(shim, full=(60_000, "*.db-wal"))) as service, asking(service) as client:
        answers = []
        for i in range(60):
            answers.append(attacks.post(client, PATH, {"cost": SMALL}, key=f"k{i}"))
            if answers[-1].status_code != 201:
                break
        problem = answers[-1].json()
        assert (problem["status"], problem["code"], problem["retryable"]) == (503, "LedgerBusy", True), problem
        assert answers[-1].headers["retry-after"] == "1"
        assert str(tmp_path) not in answers[-1].text
        assert "ledger.db" not in answers[-1].text
        wait_until(lambda: readiness(service) == (503, "the ledger cannot be written"))
        assert len(spent(url)) == len(answers) - 1


def test_many_readiness_checks_at_once_are_one_write(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "a")
        log = Path(service.settings.url.removeprefix("sqlite:///") + "-wal")
        time.sleep(1.1)
        before = log.stat().st_size
        found: list[tuple[int, str]] = []
        threads = [threading.Thread(target=lambda: found.append(readiness(service))) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [(200, "ok")] * 20
    assert log.stat().st_size - before <= 2 * (4096 + 24)


def test_a_writer_that_is_slow_and_answers_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that was sent ahead waits for the one before it; that is not the time in which it has no answer."""
    monkeypatch.setattr(writer_module, "_ANSWER_MARGIN", 0.4)
    monkeypatch.setattr(writer_module, "_CHECK_INTERVAL", 0.02)
    settings = Settings(url="memory://", timeout=0.1)  # given up after a second without an answer
    started: list[threading.Thread] = []

    def answer_slowly(its_end: socket.socket) -> None:
        with its_end, its_end.makefile("rb") as batches:
            its_end.sendall(READY)
            while head := batches.read(LENGTH.size):
                count = len(decode_messages(batches.read(LENGTH.unpack(head)[0])))
                time.sleep(0.7)
                content = encode_batch(Answers(0.7, [b""] * count))
                its_end.sendall(LENGTH.pack(len(content)) + content)

    async def start(_: Settings, its_end: socket.socket) -> Wait:
        started.append(threading.Thread(target=answer_slowly, args=(its_end.dup(),), daemon=True))
        started[-1].start()
        return partial(asyncio.to_thread, started[-1].join)

    async def write(writer: writer_module.WriterClient, after: float) -> None:
        await asyncio.sleep(after)
        await writer.write("", (PROBE,))

    async def ask() -> None:
        writer = writer_module.WriterClient(settings, lambda *_: None, lambda _: None, start)
        try:
            await asyncio.gather(*(write(writer, after) for after in (0.1, 0.2)), asyncio.sleep(2.5))
            assert not writer.unanswered
        finally:
            await writer.close()

    asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(started) == 1
