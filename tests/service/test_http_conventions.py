"""What HTTP says and programs rely on: HEAD, OPTIONS, no CORS, the fields of rate limits, quoted idempotency keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import attacks
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_server import ServiceThread

from odograph.errors import BadRequest
from odograph.service import endpoint
from odograph.service.routes import ROUTES

SPEND: Final = "/v1/accounts/census/spends"
SMALL: Final = {"cost": attacks.pure("0.001")}
PATHS: Final = sorted({route.path for route in ROUTES})
PUBLIC: Final = ("/healthz", "/readyz", "/v1/openapi.json")
CHANGING: Final = {"date", "x-request-id", "transfer-encoding"}


def headers_of(answer: httpx.Response) -> dict[str, str]:
    """Return the headers that are the same for every answer to a request; of a length, that there is one."""
    found = {name: value for name, value in answer.headers.items() if name not in CHANGING}
    return found | ({"content-length": "any"} if "content-length" in found else {})


def readable() -> list[str]:
    """Return a path of every route that reads, with things that are there and that are not."""
    paths = [attacks.path_of(route, name="census") for route in ROUTES if route.method == "GET"]
    return [*paths, *PUBLIC, "/v1/accounts/nothing"]


def test_head_has_the_headers_of_get_and_no_body(owner: httpx.Client) -> None:
    for path in readable():
        got, head = owner.get(path), owner.head(path)
        assert got.content, path
        assert (head.status_code, head.content, headers_of(head)) == (got.status_code, b"", headers_of(got)), path
    answer = owner.get("/v1/me")
    assert owner.head("/v1/me").headers["content-length"] == str(len(answer.content))


def test_head_needs_the_same_key(service: ServiceThread) -> None:
    with attacks.reach(service, None) as stranger, attacks.reach(service, service.token("a", "analyst")) as analyst:
        assert stranger.head("/v1/accounts").status_code == 401
        assert analyst.head("/v1/keys").status_code == 403


def test_options_names_the_methods_and_so_does_a_wrong_one(owner: httpx.Client) -> None:
    for path in (*PATHS, *PUBLIC):
        methods = {route.method for route in ROUTES if route.path == path} or {"GET"}
        expected = sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])})
        one = re.sub("{[^}]*}", "census", path)
        answer = owner.options(one)
        assert (answer.status_code, answer.content) == (204, b""), path
        assert answer.headers["allow"] == ", ".join(expected)
        wrong = owner.patch(one)
        attacks.check_problem(wrong, 405)
        assert wrong.headers["allow"] == ", ".join(expected)


def test_no_answer_allows_another_origin(owner: httpx.Client) -> None:
    asking = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    answers = [owner.options(SPEND, headers=asking), owner.post(SPEND, json=SMALL, headers=asking)]
    answers += [owner.get(path, headers=asking) for path in (*readable(), "/", "/docs", "/nowhere")]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")], answer.url


# The fields of a rate limit: draft-ietf-httpapi-ratelimit-headers.

STATE: Final = re.compile(r'"key";r=(\d+);t=(\d+)')


def test_every_answer_to_a_key_says_what_is_left_of_its_rate(tmp_path: Path) -> None:
    with (
        ServiceThread(f"sqlite:///{tmp_path}/limited.db", rate=0.01, burst=4) as service,
        attacks.owner_of(service) as owner,
    ):
        opening = {"name": "census", "policy": attacks.POLICY}
        made = attacks.post(owner, "/v1/accounts", opening, key="o")
        receipt = attacks.post(owner, SPEND, SMALL, key="q-1")
        stream, problem, over = owner.get("/metrics"), owner.get("/v1/accounts/nothing"), owner.get("/v1/me")
        expected = [(made, 201, 3), (receipt, 201, 2), (stream, 200, 1), (problem, 404, 0), (over, 429, 0)]
        for answer, status, left in expected:
            assert answer.status_code == status
            found = STATE.fullmatch(answer.headers["ratelimit"])
            assert found is not None
            assert int(found[1]) == left
            assert 0 < int(found[2]) <= 400
            # A receipt is kept short.
            assert ("ratelimit-policy" in answer.headers) == (answer is not receipt)
        assert over.headers["ratelimit-policy"] == '"key";q=4;w=400'
        assert int(over.headers["retry-after"]) <= 100
        with attacks.reach(service, None) as stranger:
            assert "ratelimit" not in stranger.get("/v1/me").headers


def test_without_a_limit_no_answer_has_the_fields(owner: httpx.Client) -> None:
    assert "ratelimit" not in owner.get("/v1/me").headers


# Idempotency keys: draft-ietf-httpapi-idempotency-key-header.


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1))
def test_a_quoted_key_is_read_as_it_was_written(key: str) -> None:
    sent = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert endpoint._read_idempotency_key(sent.encode()) == key  # noqa: SLF001  the function as it is


@pytest.mark.parametrize(
    "sent", ['"', '"q', '"q"x', '"q";a=1', '"q", "r"', '"a"b"', '"a\\b"', '"a\\"', '"\t"', '"é"']
)
def test_what_only_begins_as_a_quoted_key_is_refused(sent: str) -> None:
    with pytest.raises(BadRequest, match="Idempotency-Key"):
        endpoint._read_idempotency_key(sent.encode("latin-1"))  # noqa: SLF001  as above


def test_a_quoted_key_is_the_same_key_as_without_quotes(owner: httpx.Client) -> None:
    def spend(key: str, form: object = SMALL) -> httpx.Response:
        return owner.post(SPEND, json=form, headers={"Idempotency-Key": key})

    assert spend('"q-1"').status_code == 201
    for key in ('"q-1"', "q-1"):
        assert (spend(key).status_code, spend(key).json()["key"]) == (200, "q-1")
    assert spend('"50%25"').json()["key"] == "50%25", "nothing is percent-encoded within quotes"
    assert spend("50%25").json()["key"] == "50%"
    attacks.check_problem(spend('""'), 400, 422)
    attacks.check_problem(owner.post(SPEND, json=SMALL), 400)
    attacks.check_problem(spend('"q-1"', {"cost": attacks.pure("0.002")}), 422)
