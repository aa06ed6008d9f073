"""Faults beside the writer process: what was charged is never reported as not charged, and nothing is left over."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import attacks
import pytest
from service_process import Service, end_process, has_ended
from service_server import ServiceThread

import odograph as odo
from odograph.connection import store_at
from odograph.errors import LedgerBusy
from odograph.ledger.backend import LocalBackend
from odograph.service import writer as writer_module
from odograph.service.routes import charges

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
SMALL = attacks.pure("0.00001")
SLOW = {"kind": "parallel", "parts": [SMALL, SMALL]}
POLICY = odo.Policy(1, 1e-6, filter="basic")


def charged(url: str, name: str) -> list[str]:
    with odo.connect(url) as ledger:
        ledger.verify()
        return [past.entry.key for past in ledger.account(name).history(0, 10**6) if past.entry.verb == "spend"]


def test_a_charge_whose_receipt_cannot_be_looked_up_is_not_told_as_one_that_was_not_made(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise LedgerBusy("the ledger cannot be reached; nothing was charged")

    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "before")
        attacks.open_account(owner, "after", successor_of="before")  # its lifetime is looked up
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "lifetime", busy)
            answer = attacks.post(owner, "/v1/accounts/after/spends", {"cost": SMALL}, key="k")
        assert charged(service.settings.url, "after") == ["k"]
        assert (answer.status_code, answer.json()["code"]) == (504, "OutcomeUnknown"), answer.text
        assert answer.json()["charged"] is True
        assert "(key 'k')" in answer.json()["detail"]
        assert attacks.post(owner, "/v1/accounts/after/spends", {"cost": SMALL}, key="k").status_code == 200


def test_an_order_of_a_batch_that_finds_no_thread_is_told_so_by_itself(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise LedgerBusy("the service has as much to do as it can hold; try again")

    monkeypatch.setattr(charges, "_encode_slow_charge", full)
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "a")
        items = [{"key": "quick", "costs": {"a": SMALL}}, {"key": "slow", "costs": {"a": SLOW}}]
        answer = attacks.post(owner, "/v1/batches", {"spends": items})
        assert answer.status_code == 200, answer.text
        assert [one["status"] for one in answer.json()["results"]] == [201, 503]
        assert attacks.post(owner, "/v1/accounts/a/spends", {"cost": SLOW}, key="slow").status_code == 503
    assert charged(service.settings.url, "a") == ["quick"]


def test_a_name_that_one_worker_erased_is_forgotten_by_the_others_and_a_key_is_charged_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with ServiceThread(url) as one, ServiceThread(url) as other, attacks.owner_of(one) as owner:
        attacks.open_account(owner, "a")
        token, form = one.token("ana", "analyst"), {"cost": SMALL}
        with attacks.reach(one, token) as here, attacks.reach(other, token) as there:
            for client, key in ((here, "k"), (there, "l")):
                assert attacks.post(client, "/v1/accounts/a/spends", form, key=key).status_code == 201
            with odo.connect(one.url, token=one.token("olga")) as ledger:
                assert ledger.erase_principal("ana")
            time.sleep(1.5)  # as for a key that was revoked
            there.get("/v1/me")
            answers = [attacks.post(client, "/v1/accounts/a/spends", form, key="m") for client in (here, there)]
    assert [answer.status_code for answer in answers] == [201, 200]
    with odo.connect(url) as ledger:
        assert [past.principal for past in ledger.account("a").history(1, 10)] == ["erased", "erased", "ana"]


@pytest.mark.parametrize("part", [b"\0\0", writer_module.LENGTH.pack(1000) + b"\x93"])
def test_a_writer_whose_worker_ended_in_the_middle_of_a_batch_ends_without_a_word(
    tmp_path: Path, part: bytes
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        ledger.open_account("a", POLICY)
    ours, its_end = socket.socketpair()
    thread = threading.Thread(target=writer_module.serve_worker, args=(its_end, store_at(url)))
    thread.start()
    with ours:
        assert ours.recv(100) == writer_module.READY
        ours.sendall(part)
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.long
def test_a_writer_that_is_stopped_does_not_keep_the_service_from_ending(tmp_path: Path) -> None:
    defect = "" if FULL else "impatient"  # which waits a second for it and not twenty
    with Service(f"sqlite:///{tmp_path}/ledger.db", tmp_path, defect=defect) as service:
        (stopped,) = service.writers
        os.kill(stopped, signal.SIGSTOP)
        assert service.end(timeout=50) == 0
    assert has_ended(stopped)


def test_a_service_that_ends_while_a_writer_starts_leaves_none(tmp_path: Path) -> None:
    with Service(f"sqlite:///{tmp_path}/ledger.db", tmp_path) as service:
        end_process(*service.writers)
        while not (writers := service.writers):
            time.sleep(0.001)
        assert service.end() == 0
        assert all(map(has_ended, writers))
        assert '"error":"ConnectionError"' in service.said
