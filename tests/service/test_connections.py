"""What strangers can hold on to without a key: heads and bodies that do not end, connections without number."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import attacks
import httpx
import pytest
from service_process import Service
from service_server import ServiceThread

from odograph.service import server
from odograph.service.server import Connections

HEAD = b"POST /v1/decide HTTP/1.1\r\nHost: here\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
LATE = b"The request did not arrive in time."
QUICK = 0.4  # seconds in which a request must have arrived, here
CONNECTIONS = 1000


def address_of(service: ServiceThread | Service) -> tuple[str, int]:
    return "127.0.0.1", int(service.url.rpartition(":")[2])


@contextmanager
def quick(folder: Path, **settings: object) -> Iterator[ServiceThread]:
    with ServiceThread(f"sqlite:///{folder}/ledger.db", receive_timeout=QUICK, **settings) as service:
        yield service


def ended(line: socket.socket, timeout: float = 10.0) -> bytes | None:
    """Return what was answered before the connection was closed; None if it was not."""
    line.settimeout(timeout)
    found = b""
    try:
        while part := line.recv(1 << 16):
            found += part
    except TimeoutError:
        return None
    except ConnectionError:
        pass
    return found


def known(service: ServiceThread) -> bytes:
    """Return a head up to the body of one who has a key."""
    return HEAD + f"Authorization: Bearer {service.token()}\r\n".encode()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GE", HEAD])
def test_a_head_that_does_not_arrive_in_time_is_ended(tmp_path: Path, sent: bytes) -> None:
    with quick(tmp_path) as service, socket.create_connection(address_of(service)) as line:
        line.sendall(sent)
        answer = ended(line) or b""
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(LATE)


def test_a_body_that_does_not_arrive_in_time_is_ended(tmp_path: Path) -> None:
    with quick(tmp_path) as service:
        for head, answered in ((HEAD, b"401"), (known(service), b"408")):
            with socket.create_connection(address_of(service)) as line:
                line.sendall(head + BODY)
                answer = ended(line) or b""
            assert answer.startswith(b"HTTP/1.1 " + answered), answer
            assert answer.count(b"HTTP/1.1 ") == 1


def test_a_request_that_comes_byte_by_byte_is_ended_too(tmp_path: Path) -> None:
    with quick(tmp_path) as service:
        for begun, more in ((HEAD, b"x: y\r\n"), (HEAD + BODY, b" "), (known(service) + BODY, b" "), (b"", b"\r\n")):
            with socket.create_connection(address_of(service)) as line:
                line.sendall(begun)
                begin = time.monotonic()
                with suppress(ConnectionError):
                    while time.monotonic() < begin + 10:
                        line.sendall(more)
                        time.sleep(0.05)
                assert time.monotonic() < begin + 9, begun


def test_the_second_request_of_a_connection_has_a_deadline_too(tmp_path: Path) -> None:
    with quick(tmp_path) as service, socket.create_connection(address_of(service)) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
        line.sendall(b"GET /hea")
        assert b"408 Request Timeout" in (ended(line) or b"")


def test_what_arrives_in_time_is_answered_however_long_the_answer_takes(tmp_path: Path) -> None:
    with quick(tmp_path) as service, attacks.owner_of(service) as owner:
        attacks.open_account(owner, "a")
        for _ in range(3):
            assert owner.get("/v1/accounts/a/balance").status_code == 200
            time.sleep(1.5 * QUICK)
        with socket.create_connection(address_of(service)) as line:
            line.sendall(b"GET /healthz HTTP/1.1\r\n")
            time.sleep(QUICK / 4)
            line.sendall(b"Host: here\r\n\r\n")
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_long_body_at_a_fair_speed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MIN_BODY_RATE", 1000)

    def slowly() -> Iterator[bytes]:
        for _ in range(8):
            yield b" " * 1000
            time.sleep(QUICK / 4)
        yield b"{}"

    with quick(tmp_path) as service, attacks.owner_of(service) as owner:
        answer = owner.post("/v1/decide", content=slowly(), headers=attacks.JSON)
        assert (answer.status_code, "costs" in answer.json()["detail"]) == (422, True)


def test_a_protocol_without_deadlines_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.HttpProtocol, "_start_deadline", lambda _: None)
    with quick(tmp_path) as service, socket.create_connection(address_of(service)) as line:
        line.sendall(HEAD)
        assert ended(line, 4 * QUICK) is None


def half_sent(service: ServiceThread | Service, lines: ExitStack, count: int) -> None:
    """Begin so many requests, and end none of them."""
    for _ in range(count):
        line = lines.enter_context(socket.create_connection(address_of(service), timeout=20))
        with suppress(ConnectionError):
            line.sendall(HEAD)


@contextmanager
def files(count: int) -> Iterator[None]:
    """Allow this process so many open files, or as many as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("options", [(), ("--connections-per-address", "0", "--connections", "300")], ids=str)
def test_a_thousand_half_sent_heads_leave_the_service_answering(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Service(f"sqlite:///{tmp_path}/ledger.db", tmp_path, *options) as service, files(4 * CONNECTIONS):
        headers = {"Authorization": f"Bearer {service.token()}"}
        with ExitStack() as lines, httpx.Client(base_url=service.url, headers=headers, timeout=10) as client:
            attacks.open_account(client, "a")
            half_sent(service, lines, CONNECTIONS)
            for i in range(10):
                answer = attacks.post(client, "/v1/accounts/a/spends", {"cost": attacks.pure("0.001")}, key=f"k{i}")
                assert answer.status_code == 201, answer.text
            with httpx.Client(base_url=service.url, headers=headers, timeout=10) as new:
                assert new.get("/v1/accounts/a/balance").json()["steps"] == 10


def test_a_connection_too_many_is_refused_while_the_others_are_being_answered(tmp_path: Path) -> None:
    """Not closed are those whose requests are on their way; of an address as of all."""
    for settings in ({"connections_per_address": 2}, {"connections": 2}):
        with quick(tmp_path, **settings) as service, ExitStack() as lines:
            busy = [lines.enter_context(socket.create_connection(address_of(service))) for _ in range(2)]
            for line in busy:
                line.sendall(known(service) + BODY)
            time.sleep(QUICK / 4)
            with socket.create_connection(address_of(service)) as late:
                answer = ended(late) or b""
            assert answer.startswith(b"HTTP/1.1 503 "), answer
            assert b"retry-after: 1\r\n" in answer
            assert all(b"408" in (ended(line) or b"") for line in busy)


def test_a_worker_that_takes_any_number_of_connections_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connections, "admit", lambda *_: True)
    with quick(tmp_path, connections=2) as service, ExitStack() as lines:
        for _ in range(2):
            lines.enter_context(socket.create_connection(address_of(service))).sendall(known(service) + BODY)
        time.sleep(QUICK / 4)
        assert httpx.get(f"{service.url}/healthz").status_code == 200  # the third of two
