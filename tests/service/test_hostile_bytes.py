"""What comes over the socket and is hardly HTTP: nothing is carried out that was not sent whole, once, and alone."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attacks
import httpx
import pytest
from service_server import ServiceThread
from starlette.types import Receive

from odograph.service import endpoint

BODY: Final = b'{"cost": {"kind": "pure", "epsilon": "0.001"}}'
LENGTH: Final = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
WHOLE: Final = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def head(owner: httpx.Client, verb: bytes, *more: bytes, key: bytes = b"q-1") -> bytes:
    """Return the head of a request about the account."""
    lines = [b"POST /v1/accounts/census/" + verb + b" HTTP/1.1\r\n", b"Host: odograph\r\n"]
    lines += [b"Authorization: " + owner.headers["Authorization"].encode() + b"\r\n"]
    lines += [b"Content-Type: application/json\r\n", b"Idempotency-Key: " + key + b"\r\n", *more, b"\r\n"]
    return b"".join(lines)


def statuses(answer: bytes) -> list[int]:
    """Return the status of every answer that came back."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def test_a_request_that_is_sent_as_it_should_be_is_carried_out(service: ServiceThread, owner: httpx.Client) -> None:
    assert statuses(attacks.raw(service, head(owner, b"spends", LENGTH) + BODY)) == [201]
    assert statuses(attacks.raw(service, head(owner, b"spends", CHUNKED, key=b"q-2") + WHOLE)) == [201]


SMUGGLED: Final = b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\n\r\n"
DOUBTFUL: Final = (
    (LENGTH, LENGTH, b"", BODY),
    (LENGTH, b"Content-Length: 0\r\n", b"", BODY),
    (LENGTH, CHUNKED, b"", b"0\r\n\r\n" + SMUGGLED),
    (CHUNKED, LENGTH, b"", b"0\r\n\r\n" + SMUGGLED),
    (CHUNKED, b"Transfer-Encoding: identity\r\n", b"", WHOLE),
    (b"Transfer-Encoding: identity, chunked, identity\r\n", b"", b"", WHOLE),
    (b"Transfer-Encoding: xchunked\r\n", b"", b"", WHOLE),
    (b"Transfer-Encoding : chunked\r\n", b"", b"", WHOLE),
    (b"Transfer-Encoding:\x0bchunked\r\n", b"", b"", WHOLE),
    (b"Content-Length: +46\r\n", b"", b"", BODY),
    (b"Content-Length: -1\r\n", b"", b"", BODY),
    (b"Content-Length: 0x2e\r\n", b"", b"", BODY),
    (b"Content-Length: 46, 46\r\n", b"", b"", BODY),
    (b"Content-Length: 4 6\r\n", b"", b"", BODY),
    (b"Content-Length: 99999999999999999999999\r\n", b"", b"", BODY),
    (b"Content-Length: 1099511627776\r\n", b"", b"", BODY),
    (b"X-A: 1\r\n folded: 2\r\n", LENGTH, b"", BODY),
    (b"X-A: 1\rX-B: 2\r\n", LENGTH, b"", BODY),
    (b"X-A: 1\nX-B: 2\r\n", LENGTH, b"", BODY),
    (b"X-A: 1\0\r\n", LENGTH, b"", BODY),
    (b"X A: 1\r\n", LENGTH, b"", BODY),
    (b": 1\r\n", LENGTH, b"", BODY),
    (b"Idempotency-Key: q-2\r\n", LENGTH, b"", BODY),
    (CHUNKED, b"", b"", b"-1\r\n" + BODY),
    (CHUNKED, b"", b"", b"zz\r\n" + BODY),
    (CHUNKED, b"", b"", b"ffffffffffffffffff\r\n" + BODY),
    (CHUNKED, b"", b"", b"2e\r\n" + BODY + b"xx\r\n0\r\n\r\n"),
)


@pytest.mark.parametrize("parts", DOUBTFUL, ids=range(len(DOUBTFUL)))
def test_a_request_of_doubtful_length_or_shape_has_one_answer_and_changes_nothing(
    service: ServiceThread, owner: httpx.Client, parts: tuple[bytes, ...]
) -> None:
    before = attacks.state(owner)
    one, two, three, body = parts
    answer = attacks.raw(service, head(owner, b"spends", one, two, three) + body, end=True)
    assert len(statuses(answer)) <= 1, answer
    assert all(400 <= status < 500 for status in statuses(answer)), answer
    assert attacks.state(owner) == before


ENDS: Final = ("finish", "reset")


def cut_off(service: ServiceThread, data: bytes, end: str) -> None:
    """Send the beginning of a request and go away."""
    where = urlsplit(service.url)
    with socket.create_connection((where.hostname, where.port), timeout=10) as line:
        line.sendall(data)
        time.sleep(0.1)
        if end == "reset":
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    time.sleep(0.3)


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_was_cut_off_is_not_carried_out(service: ServiceThread, owner: httpx.Client, end: str) -> None:
    made = attacks.post(owner, "/v1/accounts/census/reservations", {"cost": attacks.pure("0.01")}, key="held")
    assert made.status_code == 201
    before = attacks.state(owner)
    held = head(owner, b"close", LENGTH).replace(b"/v1/accounts/census/close", b"/v1/reservations/census%231/commit")
    cut_off(service, head(owner, b"spends", b"Content-Length: 100\r\n") + BODY, end)
    cut_off(service, head(owner, b"spends", CHUNKED) + WHOLE.removesuffix(b"0\r\n\r\n"), end)
    cut_off(service, head(owner, b"close", LENGTH), end)
    cut_off(service, head(owner, b"close", CHUNKED), end)
    cut_off(service, held, end)
    assert attacks.state(owner) == before, "what was never sent to its end was carried out"


def test_an_endpoint_that_takes_the_end_of_the_line_for_the_end_of_the_body_would_be_caught(
    service: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def careless(_: endpoint.Endpoint, receive: Receive, _headers: object) -> bytes:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), bool(message.get("more_body"))
        return body

    monkeypatch.setattr(endpoint.Endpoint, "_read_body", careless)
    before = attacks.state(owner)
    cut_off(service, head(owner, b"close", LENGTH), "finish")
    assert attacks.state(owner) != before


def test_the_body_of_a_request_that_was_refused_is_not_taken_for_the_next_one(
    service: ServiceThread, owner: httpx.Client
) -> None:
    inner = b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\nAuthorization: " + owner.headers["Authorization"].encode()
    inner += b"\r\n\r\n"
    length = b"Content-Length: %d\r\n" % len(inner)
    for outer in (
        b"POST /v1/accounts/census/spends HTTP/1.1\r\nHost: odograph\r\n" + length + b"\r\n",
        b"POST /v1/nothing HTTP/1.1\r\nHost: odograph\r\n" + length + b"\r\n",
        b"PUT /v1/me HTTP/1.1\r\nHost: odograph\r\n" + length + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: odograph\r\n" + length + b"\r\n",
        head(owner, b"spends", length, b"Idempotency-Key: twice\r\n"),
    ):
        answer = attacks.raw(service, outer + inner)
        assert len(statuses(answer)) == 1, answer
        assert b"olga" not in answer, answer


def test_requests_one_behind_the_other_are_answered_in_their_order_and_each_for_itself(
    service: ServiceThread, owner: httpx.Client
) -> None:
    anonymous = b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\n\r\n"
    known = anonymous[:-2] + b"Authorization: " + owner.headers["Authorization"].encode() + b"\r\n\r\n"
    assert statuses(attacks.raw(service, known + anonymous + known + anonymous)) == [200, 401, 200, 401]


def test_what_is_not_http_at_all_is_refused_and_the_service_goes_on(
    service: ServiceThread, owner: httpx.Client
) -> None:
    for noise in (
        *(
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\0" * 1000,
            b"GET\r\n\r\n",
            b"\r\n" * 1000,
        ),
        *(b"GET /v1/me HTTP/9.9\r\n\r\n", b"CONNECT evil:443 HTTP/1.1\r\n\r\n", b"BREW /v1/me HTTP/1.1\r\n\r\n"),
        *(b"GET /\xff HTTP/1.1\r\n\r\n", b"GET /v1/" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n"),
        b"GET /v1/me HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ):
        answer = attacks.raw(service, noise, end=True)
        assert all(400 <= status < 500 for status in statuses(answer)), (noise[:50], answer)
        assert b"Traceback" not in answer
    assert owner.get("/v1/me").status_code == 200


def resident() -> int:
    """Return the memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_a_head_without_end_does_not_fill_the_memory(service: ServiceThread) -> None:
    where = urlsplit(service.url)
    before, sent, part = resident(), 0, b"a" * (1 << 20)
    with socket.create_connection((where.hostname, where.port), timeout=10) as line:
        line.sendall(b"GET /v1/me HTTP/1.1\r\nHost: odograph\r\nX-A: ")
        try:
            while sent < 64 << 20:
                line.sendall(part)
                sent += len(part)
        except OSError:  # the server had enough: as it should
            pass
        time.sleep(0.2)
        grown = resident() - before
    assert grown < 16 << 20, f"{sent >> 20} MB of a header are kept: {grown >> 20} MB"
