"""Requests that no client of ours would send: each is refused in the same way, tells nothing, and changes nothing."""

from __future__ import annotations

import json
from typing import Final

import attacks
import httpx
import pytest

from odograph.service import endpoint, schemas, server
from odograph.service.routes import ROUTES, admin

LIMIT: Final = 1 << 20
GOOD: Final = b'{"cost": {"kind": "pure", "epsilon": "0.001"}}'
SPEND: Final = "/v1/accounts/census/spends"


def spend(owner: httpx.Client, body: bytes, **headers: str) -> httpx.Response:
    """Send these bytes as a spend."""
    sent = {"Content-Type": "application/json", "Idempotency-Key": "q-1"} | headers
    return owner.post(SPEND, content=body, headers=sent)


def cost(text: str) -> bytes:
    return b'{"cost": ' + text.encode() + b"}"


NUMBERS: Final = (
    *(
        "1e400",
        "-1e400",
        "-1",
        "-0.001",
        "-1e-300",
        "NaN",
        "Infinity",
        "-Infinity",
        "true",
        "false",
        "null",
        "[]",
        "{}",
    ),
    *("9" * 10_000, "1" + "0" * 400, "01", "+1", ".5", "1.", "0x10", "1_0", "1e", "--1"),
    *(
        '""',
        '"NaN"',
        '"inf"',
        '"-1"',
        '"1e9999"',
        '"1e-9999"',
        '"1e999999999"',
        '"1/0"',
        '"-1/3"',
        '"1/3/3"',
        '"0x1"',
    ),
    *('"' + "9" * 10_000 + '"', '"1/' + "9" * 10_000 + '"', '"１"', '"٣"', '"1 0"', '"1,0"', '"\\u0000"'),
)
KINDS: Final = ("pure", "zcdp", "gdp")
FIELDS: Final = {"pure": "epsilon", "zcdp": "rho", "gdp": "mu"}


def test_numbers_that_are_no_numbers_are_refused_and_change_nothing(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for number in NUMBERS:
        for kind in KINDS:
            answer = spend(owner, cost(f'{{"kind": "{kind}", "{FIELDS[kind]}": {number}}}'))
            attacks.check_problem(answer, 400, 422)
        for field in ("epsilon", "delta", "slack", "delta_steps"):
            policy = {"epsilon": "1", "delta": "1e-6", "filter": "basic", field: "?"}
            body = json.dumps({"name": "new", "policy": policy}).replace('"?"', number)
            if number == "null" and field in ("slack", "delta_steps"):
                continue  # as if it were left out
            answer = owner.post("/v1/accounts", content=body, headers=attacks.JSON | {"Idempotency-Key": "o-1"})
            attacks.check_problem(answer, 400, 422)
    assert attacks.state(owner) == before


def test_a_number_too_large_to_fit_is_refused_as_any_other_and_costs_nothing(owner: httpx.Client) -> None:
    for number in ("1e308", "18446744073709551616", '"1e300"'):
        attacks.check_problem(spend(owner, cost(f'{{"kind": "pure", "epsilon": {number}}}')), 409)
    assert owner.get("/v1/accounts/census/balance").json()["steps"] == 0


BAD_BODIES: Final = (
    *(
        b"",
        b" ",
        b"{",
        b"}",
        b"[]",
        b"1",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"\xef\xbb\xbf" + GOOD,
        GOOD + b"x",
        GOOD * 2,
    ),
    *(GOOD.decode().encode("utf-16"), GOOD[:-1], GOOD[:-1] + b",}", GOOD.replace(b'"', b"'"), b"/**/" + GOOD),
    *(b"[" * 100_000, b'{"cost":' * 100_000, b'{"cost":' + b"[" * 300_000, b'{"a":' * 900 + b"1" + b"}" * 900),
    *(b'{"cost": {"kind": "pure"}}', b'{"cost": {"epsilon": 1}}', b'{"cost": {"kind": "new", "epsilon": 1}}'),
    *(b'{"cost": {"kind": ["pure"], "epsilon": 1}}', b'{"cost": {"kind": "pure", "epsilon": 1, "delta": 0}}'),
    *(GOOD[:-1] + b', "Note": ""}', GOOD[:-1] + b', "note": 1}', GOOD[:-1] + b', "key": "x"}'),
    GOOD[:-1] + b', "note": "' + b"x" * 10_001 + b'"}',
    *(
        GOOD[:-1] + b', "note": "' + odd + b'"}'
        for odd in (b"\\u0000", b"\\ud800", b"\\udc00\\ud800", b"\x00", b"\xc0\xaf")
    ),
    *(cost(f'{{"kind": "pure", "epsilon": 1, "form": {form}}}') for form in ("2", '"1"', "1.5", "null", "true")),
    *(cost(f'{{"kind": "mechanism", "name": "m", "steps": {steps}}}') for steps in ("0", "-1", "1e30", "1.5", '"1"')),
    cost('{"kind": "' + "x" * 6000 + '"}'),
    GOOD[:-1] + b', "' + b"x" * 6000 + b'": 1}',
    cost('{"kind": "rdp", "orders": [], "values": []}'),
    cost('{"kind": "rdp", "orders": [2, 2], "values": [1]}'),
    cost('{"kind": "rdp", "orders": [0.5], "values": [1]}'),
    cost('{"kind": "rdp", "orders": [' + "2," * 1000 + '2], "values": [' + "1," * 1000 + "1]}"),
    cost('{"kind": "parallel", "parts": []}'),
    cost('{"kind": "parallel", "parts": [' + '{"kind": "parallel", "parts": [' * 3000 + "]}" * 3000 + "]}"),
)


def test_bodies_that_cannot_be_read_are_refused_and_change_nothing(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for body in BAD_BODIES:
        attacks.check_problem(spend(owner, body), 400, 422)
    assert attacks.state(owner) == before


def test_an_error_that_nobody_expected_would_be_caught(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HttpProblem", ZeroDivisionError)
    with pytest.raises(AssertionError, match="-> 500"):
        attacks.check_problem(spend(owner, b"{"))


def test_the_text_of_an_exception_would_be_caught(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_explain", lambda _: "'NoneType' object is not subscriptable")
    with pytest.raises(AssertionError):
        attacks.check_problem(spend(owner, b"{"))


def test_a_field_that_is_there_twice_is_charged_once_and_as_the_answer_says(owner: httpx.Client) -> None:
    twice = b'{"cost": {"kind": "pure", "epsilon": "0.1"}, "cost": {"kind": "pure", "epsilon": "0.2"}}'
    answer = spend(owner, twice)
    if answer.status_code == 201:
        (line,) = answer.json()["accounts"]
        entries = owner.get("/v1/accounts/census/entries?first=1").json()["entries"]
        assert [entry["cost"] for entry in entries] == [line["cost"]]
    else:
        attacks.check_problem(answer, 400, 422)
        assert owner.get("/v1/accounts/census/balance").json()["steps"] == 0


def test_only_json_is_read_and_it_must_say_so(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for kind in (
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "json",
        "*/*",
    ):
        attacks.check_problem(spend(owner, GOOD, **{"Content-Type": kind}), 415)
    headers = [(b"Content-Type", b"text/plain"), (b"Content-Type", b"application/json"), (b"Idempotency-Key", b"q")]
    attacks.check_problem(owner.post(SPEND, content=GOOD, headers=headers), 400)
    assert attacks.state(owner) == before
    assert spend(owner, GOOD, **{"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 201


def padded(size: int) -> bytes:
    return GOOD + b" " * (size - len(GOOD))


def check_size(owner: httpx.Client) -> None:
    """Assert that a body at the limit is read, and one byte more is not, with or without a length."""
    assert spend(owner, padded(LIMIT)).status_code in {200, 201}
    attacks.check_problem(spend(owner, padded(LIMIT + 1)), 413)
    for size, statuses in ((LIMIT, {200, 201}), (LIMIT + 1, {413}), (3 * LIMIT, {413})):
        body = padded(size)
        parts = (body[start : start + 50_000] for start in range(0, size, 50_000))
        try:
            answer = owner.post(SPEND, content=parts, headers=attacks.JSON | {"Idempotency-Key": "q-1"})
        except httpx.WriteError:  # it was not even read to the end
            assert statuses == {413}
            continue
        assert answer.status_code in statuses, f"{size} -> {answer.status_code}"


def test_a_body_beyond_the_limit_is_not_read_whether_it_says_its_length_or_not(owner: httpx.Client) -> None:
    check_size(owner)
    assert owner.get("/v1/accounts/census/balance").json()["steps"] == 1


def test_a_service_without_a_limit_would_be_caught(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_too_large", lambda _: None)
    with pytest.raises(AssertionError):
        check_size(owner)


NAMES: Final = (
    *("%2e%2e", "%2e", "..%2f..%2fetc%2fpasswd", "census%2f", "census%2Fx", "%2Fcensus", "census%00", "%00", "%0a"),
    *(
        "census%0d%0aSet-Cookie:%20a=b",
        "census%252F",
        "%2563ensus",
        "census%20",
        "%20census",
        "census;a=b",
        "census%3F",
    ),
    *(
        "%EF%BD%83ensus",
        "CENSUS",
        "cen%C2%ADsus",
        "%E2%80%AEcensus",
        "census%E2%80%8B",
        "ce%6e%CC%80sus",
        "%ED%A0%80",
    ),
    *(
        "%FF",
        "%C0%AF",
        "%zz",
        "%",
        "a" * 101,
        "a" * 5000,
        "census%23",
        "-census",
        "%3Cscript%3E",
        "'%20OR%20'1'='1",
        "*",
    ),
)


def test_no_trick_with_a_name_reaches_an_account_or_anything_else(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for name in NAMES:
        for route in ROUTES:
            if "{" not in route.path or route.path.startswith("/v1/principals"):
                continue
            path = route.path.replace("{name}", name).replace("{reservation}", f"{name}%230")
            path = path.replace("{entry}", f"{name}%230").replace("{key}", name).replace("{round}", name)
            content = GOOD if route.form is schemas.SpendForm else b"{}"
            answer = owner.request(
                route.method, path, content=content, headers=attacks.JSON | {"Idempotency-Key": "q"}
            )
            if route.handler is admin.erase_note and answer.status_code == 200:
                assert answer.json() == {"erased": False}
                continue
            not_for_owners = [403] if route.verb == "see-participants" else []
            attacks.check_problem(answer, 400, 404, 405, 422, *not_for_owners)
    assert attacks.state(owner) == before


QUERIES: Final = (
    *("x=1", "count=1&count=2", "count=", "count", "count=0", "count=-1", "count=1001", "count=1e99", "count=NaN"),
    *(
        "first=" + "9" * 5000,
        "first=1.5",
        "first=0x1",
        "first=true",
        "first=%00",
        "first=%FF",
        "First=1",
        "first[]=1",
    ),
    *(
        "__proto__=1",
        "first=1;count=2",
        "first=9999999999999999999",
        "first=-9999999999999999999",
        "token=x",
        "a" * 50_000,
    ),
)


def test_queries_that_cannot_be_read_are_refused(owner: httpx.Client) -> None:
    for query in QUERIES:
        attacks.check_problem(owner.get(f"/v1/accounts/census/entries?{query}"), 400)
    for route in ROUTES:
        if route.query is None:
            answer = owner.request(
                route.method, attacks.path_of(route) + "?x=1", content=b"", headers={"Idempotency-Key": "q"}
            )
            attacks.check_problem(answer, 403 if route.verb == "see-participants" else 400)


def check_methods(owner: httpx.Client) -> None:
    """Assert that a method that a path does not take is told so, with those that it takes."""
    for path in {route.path for route in ROUTES}:
        takes = {route.method for route in ROUTES if route.path == path} | {"OPTIONS"}
        takes |= {"HEAD"} if "GET" in takes else set()
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE", "TRACE"} - takes:
            answer = owner.request(
                method, path.format(name="a", reservation="a", entry="a", principal="a", key="a", round="a")
            )
            attacks.check_problem(answer, 405)
            assert {*answer.headers["allow"].split(", ")} == takes


def test_a_method_that_a_path_does_not_take_is_told_with_those_that_it_takes(owner: httpx.Client) -> None:
    check_methods(owner)


def test_a_path_that_takes_any_method_would_be_caught(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(self: server.PathMethods, *args: object) -> None:
        await next(iter(self._methods.values()))(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(server.PathMethods, "__call__", careless)
    with pytest.raises(AssertionError):
        check_methods(owner)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/openapi.json"])
def test_what_is_open_to_all_is_there_to_be_read_only(owner: httpx.Client, path: str) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        answer = owner.request(method, path)
        attacks.check_problem(answer, 405)
        assert "GET" in answer.headers["allow"]


def test_a_path_that_is_nowhere_is_told_so(owner: httpx.Client) -> None:
    for path in (
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v2/accounts",
        "/v1/accounts/",
        "//v1/accounts",
        "/metrics/",
        "/v1/spends/1",
    ):
        attacks.check_problem(owner.get(path), 404)
