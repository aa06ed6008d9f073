"""Headers that no client of ours would send: control characters, and what comes twice. None is carried out."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

import attacks
import httpx
import pytest
from service_server import ServiceThread

from odograph.service import endpoint
from odograph.service.auth import new_token
from odograph.service.routes import ROUTES

GOOD: Final = b'{"cost": {"kind": "pure", "epsilon": "0.001"}}'
SPEND: Final = "/v1/accounts/census/spends"
CONTROLS: Final = (*range(0x20), 0x7F)


def spend(owner: httpx.Client, *headers: tuple[bytes, bytes]) -> httpx.Response:
    """Spend with these headers, and with good ones for those that are not among them."""
    named = {name.lower() for name, _ in headers}
    good = ((b"Content-Type", b"application/json"), (b"Idempotency-Key", b"q-1"))
    return owner.post(SPEND, content=GOOD, headers=[*headers, *(one for one in good if one[0].lower() not in named)])


# Idempotency keys.

KEYS: Final = (
    *(b"", b"%ff", b"%ed%a0%80", b"\xc3\xa9", b"a" * 201, b"%e2%80%a8", b"%c2%85"),
    *(b"q%%%02x1" % control for control in CONTROLS),
    *(b"%%%02x" % control for control in CONTROLS),
    b"q%0d%0aX-A: 1",
)


def check_keys(owner: httpx.Client) -> None:
    """Assert that a key that cannot be kept as a text is refused, and nothing is charged."""
    before = attacks.state(owner)
    for key in KEYS:
        attacks.check_problem(spend(owner, (b"Idempotency-Key", key)), 400, 422)
    assert attacks.state(owner) == before


def test_idempotency_keys_that_cannot_be_kept_are_refused(owner: httpx.Client) -> None:
    check_keys(owner)
    for key in (b"%", b"%F"):  # not an escape, so it stands for itself
        assert spend(owner, (b"Idempotency-Key", key)).status_code == 201


def test_an_endpoint_that_drops_what_it_cannot_read_of_a_key_would_be_caught(
    owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(value: bytes | None) -> str:
        text = unquote_to_bytes(value or b"q").decode("utf-8", "ignore")
        return "".join(one for one in text if one.isprintable())[:200] or "q"

    monkeypatch.setattr(endpoint, "_read_idempotency_key", careless)
    with pytest.raises(AssertionError, match="-> 201"):
        check_keys(owner)


def test_a_route_that_takes_a_key_is_refused_without_one(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for route in ROUTES:
        if route.needs_idempotency_key:
            path = attacks.path_of(route, name="census")
            attacks.check_problem(owner.request(route.method, path, content=GOOD, headers=attacks.JSON), 400)
    assert attacks.state(owner) == before


def raw_spend(service: ServiceThread, owner: httpx.Client, name: bytes, value: bytes) -> bytes:
    """Spend over a bare socket, with one header that is sent as it is; return the line that came back."""
    lines = {
        b"Host": b"odograph",
        b"Authorization": owner.headers["Authorization"].encode(),
        b"Content-Type": b"application/json",
        b"Content-Length": b"%d" % len(GOOD),
        b"Idempotency-Key": b"q-1",
        b"Connection": b"close",
    } | {name: value}
    head = b"".join(b"%s: %s\r\n" % line for line in lines.items())
    return attacks.raw(service, b"POST %s HTTP/1.1\r\n%s\r\n%s" % (SPEND.encode(), head, GOOD)).partition(b"\r\n")[0]


def test_control_characters_in_headers_are_refused_as_they_come(service: ServiceThread, owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for control in CONTROLS:
        answer = raw_spend(service, owner, b"Idempotency-Key", b"q-%c1" % control)
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 422 ")), (control, answer)
    assert attacks.state(owner) == before
    plain = raw_spend(service, owner, b"Idempotency-Key", b"q-1")
    assert plain.startswith(b"HTTP/1.1 201 "), "it is the character that is refused"


# Headers that come twice.


def check_doubled(owner: httpx.Client) -> None:
    """Assert that a header that comes twice is refused, whichever of the two is good, and nothing is charged."""
    before = attacks.state(owner)
    pairs = {
        b"Authorization": (owner.headers["Authorization"].encode(), b"Bearer " + new_token().encode()),
        b"Idempotency-Key": (b"q-1", b"q-2"),
        b"Content-Type": (b"application/json", b"text/plain"),
    }
    for name, (good, other) in pairs.items():
        for one, two in ((good, good), (good, other), (other, good)):
            attacks.check_problem(spend(owner, (name, one), (name.lower(), two)), 400)
    assert attacks.state(owner) == before


def test_a_header_that_comes_twice_is_refused_whichever_of_them_is_good(owner: httpx.Client) -> None:
    check_doubled(owner)
    assert spend(owner, (b"X-Other", b"1"), (b"x-other", b"2")).status_code == 201, "others may come twice"


@pytest.mark.parametrize("passed", [b"authorization", b"idempotency-key", b"content-type"])
def test_an_endpoint_that_takes_one_of_two_headers_would_be_caught(
    owner: httpx.Client, monkeypatch: pytest.MonkeyPatch, passed: bytes
) -> None:
    refuse = endpoint._refuse_repeated_headers  # noqa: SLF001  what is broken on purpose
    monkeypatch.setattr(
        endpoint,
        "_refuse_repeated_headers",
        lambda scope, *names: refuse(scope, *(name for name in names if name != passed)),
    )
    with pytest.raises(AssertionError, match=r"-> 20[01]"):
        check_doubled(owner)
