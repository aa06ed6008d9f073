"""The head of a response is sent together with its body: nothing is lost, delayed or reordered by that."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import attacks
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from service_server import ServiceThread

from odograph.service import server
from odograph.service.server import JoiningTransport

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
# A response: whether the client waits for 100 Continue, and the parts of its body.
Response: TypeAlias = tuple[bool, list[bytes]]
RESPONSES = st.lists(
    st.tuples(st.booleans(), st.lists(st.sampled_from([b"", b"part", HEAD, CONTINUE]), max_size=3)), max_size=4
)
HALF_CLOSED = b"HEAD /healthz HTTP/1.1\r\nHost: here\r\n\r\n"
TIMES = 30


class Recorder(asyncio.Transport):
    """A connection that keeps what is sent, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "this was written after the connection was closed"
        self.sent.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def send(
    responses: Iterable[Response], kind: type[JoiningTransport] = JoiningTransport, *, ended: bool = True
) -> list[bytes]:
    """Write responses as uvicorn does; check that nothing waits between two of them, or at the end."""
    recorder, written = Recorder(), b""
    transport = kind(recorder)
    for expects, parts in responses:
        if expects:
            transport.write(CONTINUE)
            written += CONTINUE
            assert b"".join(recorder.sent) == written  # the client sends nothing more before it has this
        for one in (HEAD, *parts):
            transport.write(one)
            written += one
        if ended:
            transport.end_response()
            assert b"".join(recorder.sent) == written
    transport.close()
    assert recorder.closed
    assert b"".join(recorder.sent) == written
    return recorder.sent


@given(RESPONSES)
@example([(False, [])])
@example([(True, [b"part"]), (False, [])])
def test_what_is_written_is_sent_in_order_and_nothing_waits_when_a_response_ends(responses: list[Response]) -> None:
    send(responses)


@given(RESPONSES)
def test_a_connection_that_closes_in_a_response_sends_what_waits(responses: list[Response]) -> None:
    send(responses[:1], ended=False)


class Forgetful(JoiningTransport):
    def close(self) -> None:
        self._transport.close()


class Delaying(JoiningTransport):
    def end_response(self) -> None:
        self._in_response = False


class Reversing(JoiningTransport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        head, self._head = self._head, b""
        super().write(b"".join((data, head)))


@pytest.mark.parametrize(
    ("kind", "response", "ended"),
    [(Forgetful, (False, []), False), (Delaying, (False, []), True), (Reversing, (False, [b"part"]), True)],
)
def test_a_connection_that_loses_delays_or_reorders_is_caught(
    kind: type[JoiningTransport], response: Response, *, ended: bool
) -> None:
    with pytest.raises(AssertionError):
        send([response], kind, ended=ended)


def test_head_and_body_are_one_write() -> None:
    assert send([(False, [b"part"]), (True, [b"part", b"more"])]) == [
        HEAD + b"part",
        CONTINUE,
        HEAD + b"part",
        b"more",
    ]


def test_a_connection_that_is_aborted_or_lost_sends_nothing_more() -> None:
    for lose in (JoiningTransport.abort, lambda transport: transport._transport.close()):  # noqa: SLF001  by the peer
        recorder = Recorder()
        transport = JoiningTransport(recorder)
        transport.write(HEAD)
        lose(transport)
        transport.close()
        assert recorder.sent == []


class Counting(JoiningTransport):
    """Counts what reaches the real connection."""

    writes = 0

    def __init__(self, transport: asyncio.Transport) -> None:
        class Counted:
            def __getattr__(self, name: str) -> Any:  # noqa: ANN401  of the connection
                if name == "write":
                    Counting.writes += 1
                return getattr(transport, name)

        super().__init__(Counted())  # type: ignore[arg-type]


def test_the_service_sends_each_response_at_once(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "JoiningTransport", Counting)
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "a")
        before = Counting.writes
        for number in range(20):
            form = {"cost": attacks.pure("0.001")}
            assert attacks.post(owner, "/v1/accounts/a/spends", form, key=f"k-{number}").status_code == 201
        assert Counting.writes - before == 20


def connect(service: ServiceThread) -> socket.socket:
    parts = urlsplit(service.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=10)


def answered_after_half_close(service: ServiceThread, requests: Sequence[bytes]) -> int:
    """Ask on connections whose client sends nothing more; return how many were answered."""
    found = 0
    for request in requests:
        with connect(service) as line:
            line.sendall(request)
            line.shutdown(socket.SHUT_WR)
            found += line.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return found


def test_a_client_that_has_sent_all_it_will_is_answered(service: ServiceThread) -> None:
    requests = [HALF_CLOSED, HALF_CLOSED.replace(b"HEAD", b"GET", 1)] * TIMES
    assert answered_after_half_close(service, requests) == len(requests)


def test_a_service_that_lets_a_head_wait_is_caught(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "JoiningTransport", Delaying)
    assert answered_after_half_close(service, [HALF_CLOSED] * TIMES) < TIMES


def test_connections_that_are_reset_leave_nothing_in_the_log(
    service: ServiceThread, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        for _ in range(TIMES):
            with connect(service) as line:
                line.sendall(3 * HALF_CLOSED)
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert answered_after_half_close(service, [HALF_CLOSED]) == 1
    assert caplog.records == []
