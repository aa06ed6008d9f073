"""When the database is away: a caller gets a code, the log gets the reason, once; and the service waits for it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attacks
import httpx
import psycopg
import pytest
from postgres_server import PostgresServer
from service_process import Service, wait_until
from service_server import ServiceThread

import odograph as odo
from odograph.service import state, visibility
from odograph.service.auth import new_token

SMALL = attacks.pure("0.00001")
REQUESTS = 40
AWAY = {"LedgerBusy", "LedgerUnreachable"}  # as the connection is lost, and when there is none


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this file's own: its tests kill it."""
    with PostgresServer() as running:
        yield running


@pytest.fixture
def killable_server(server: PostgresServer) -> PostgresServer:
    """The server, running."""
    server.restart()
    return server


@pytest.fixture
def database(killable_server: PostgresServer) -> str:
    """The URL of a new, empty database in it."""
    name = f"ledger_{secrets.token_hex(8)}"
    with psycopg.connect(killable_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return killable_server.url.removesuffix("postgres") + name


def lines(service: Service, *events: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in service.said.splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] in events]


def telltale(server: PostgresServer) -> list[str]:
    """What an answer to a stranger must not hold: the database's host, port, user and what its library says."""
    where = urlsplit(server.url)
    return [
        str(where.port),
        str(where.hostname),
        "connection to server",
        "Connection refused",
        "psycopg",
        "libpq",
        "postgresql",
    ]


def strangers(service: Service, count: int) -> list[httpx.Response]:
    """Ask as somebody who has made a key up."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        return [client.get("/v1/me", headers={"Authorization": f"Bearer {new_token()}"}) for _ in range(count)]


def test_of_a_database_that_is_away_strangers_are_told_a_code_and_the_log_the_reason_once(
    killable_server: PostgresServer, database: str, tmp_path: Path
) -> None:
    options = ("--accept-fsync-off", "--log-level", "info")
    with Service(database, tmp_path, *options) as service:
        owner = httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.token()}"}, timeout=60)
        attacks.open_account(owner, "a")
        killable_server.kill()
        answers = strangers(service, REQUESTS)
        answers += [attacks.post(owner, "/v1/accounts/a/spends", {"cost": SMALL}, key="k"), owner.get("/v1/accounts")]
        for answer in answers:
            problem = answer.json()
            assert (answer.status_code, problem["retryable"]) == (503, True)
            assert problem["code"] in AWAY
            assert answer.headers["retry-after"] == "1"
            assert not [word for word in telltale(killable_server) if word in answer.text], answer.text
        away = lines(service, "unusable")
        assert len(away) == 1
        assert away[0]["level"] == "error"
        assert str(urlsplit(killable_server.url).port) in away[0]["message"]
        time.sleep(0.5)  # lines are written together
        asked = [line for line in lines(service, "request") if line.get("status") == 503]
        assert len(asked) == REQUESTS + 2
        assert {line["error"] for line in asked} <= AWAY
        killable_server.restart()
        wait_until(lambda: len(lines(service, "usable")) == 1, timeout=30)
        assert lines(service, "usable")[0]["level"] == "warning"
        assert attacks.post(owner, "/v1/accounts/a/spends", {"cost": SMALL}, key="k").status_code == 201
        assert len(lines(service, "unusable")) == 1
        owner.close()


def test_a_problem_that_is_told_as_it_is_would_be_caught(
    killable_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killable_server.kill()
    with (
        odo.connect(killable_server.url, timeout=2, accept_fsync_off=True) as ledger,
        pytest.raises(odo.OdographError) as found,
    ):
        ledger.accounts()
    assert not [word for word in telltale(killable_server) if word in visibility.problem_of(found.value, None).detail]
    monkeypatch.setattr(visibility, "is_unusable", lambda _: False)
    assert [word for word in telltale(killable_server) if word in visibility.problem_of(found.value, None).detail]


def test_a_service_that_starts_while_the_database_is_away_says_so_and_waits(
    killable_server: PostgresServer, database: str, tmp_path: Path
) -> None:
    killable_server.kill()
    service = Service(database, tmp_path, "--accept-fsync-off")
    process = service.launch()
    try:
        wait_until(lambda: len(lines(service, "waiting")) >= 2, timeout=30)
        assert process.poll() is None
        assert all(line["level"] == "warning" for line in lines(service, "waiting"))
        assert not service.is_ready()
        killable_server.restart()
        wait_until(service.is_ready, timeout=60)
        with odo.connect(service.url, token=service.token()) as ledger:
            ledger.open_account("a", odo.Policy(1, 1e-6, filter="basic")).spend(odo.PureDP(0.1))
    finally:
        service.kill()


def test_a_service_waits_for_the_database_no_longer_than_it_is_told_to(
    killable_server: PostgresServer, database: str, tmp_path: Path
) -> None:
    killable_server.kill()
    service = Service(database, tmp_path, "--accept-fsync-off", "--start-timeout", "1")
    begun = time.monotonic()
    assert service.launch().wait(60) != 0
    assert time.monotonic() - begun < 40
    assert "cannot be reached" in service.said
    service.kill()


def test_the_state_of_the_ledger_is_looked_at_often_enough() -> None:
    assert state._RECOVERY_INTERVAL <= 5  # noqa: SLF001  how late the log may be


@pytest.mark.parametrize("where", ["privacy.db", "link/privacy.db", "../{folder}/privacy.db", "{whole}/privacy.db"])
def test_a_stranger_is_not_told_where_the_ledger_is_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = tmp_path / "secret-folder"
    folder.mkdir()
    (folder / "link").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(folder)
    with ServiceThread(f"sqlite:///{where.format(folder=folder.name, whole=folder)}") as service:
        with attacks.owner_of(service) as owner:
            assert owner.get("/v1/me").status_code == 200
        (folder / "privacy.db-access").rename(folder / "elsewhere")
        with attacks.reach(service, new_token()) as stranger:
            answer = stranger.get("/v1/me")
    assert answer.status_code == 500
    assert "the ledger cannot be used" in answer.json()["detail"]
    assert folder.name not in answer.text
    assert "privacy.db" not in answer.text
