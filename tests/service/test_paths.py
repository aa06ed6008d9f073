"""A path has one spelling: encoded letters and slashes are not another way to a route or a page."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import attacks
import httpx
import pytest
from service_server import ServiceThread

import odograph as odo
from odograph.service.routes import ROUTES

PAGES = (
    "/",
    "/audit",
    "/open",
    "/docs",
    "/sign-in",
    "/data-version",
    "/accounts/a",
    "/accounts/a/plan",
    "/healthz",
    "/readyz",
)


def spellings(path: str) -> Iterator[str]:
    """Encode the first letter of a part, or a slash that does not follow a name: there it would belong to it."""
    for i in range(1, len(path)):
        before, sign = path[i - 1], path[i]
        if (before == "/" and sign.isalnum()) or (sign == "/" and before != "}"):
            yield f"{path[:i]}%{ord(sign):02X}{path[i + 1 :]}"


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_an_encoded_path_is_no_other_way_to_a_route(service: ServiceThread, path: str) -> None:
    methods = {route.method for route in ROUTES if route.path == path}
    with attacks.owner_of(service) as owner:
        for spelling in spellings(path):
            names = {"name": "a", "reservation": "a%230", "entry": "a%230", "principal": "p", "key": "0" * 12}
            names["round"] = "q"
            for method in methods:
                answer = owner.request(method, spelling.format(**names))
                assert answer.status_code == 404, (method, spelling)
                assert "no such path" in answer.json()["detail"]


def test_an_encoded_path_is_no_other_way_to_a_page(service: ServiceThread) -> None:
    with attacks.reach(service, None) as client:
        for path in PAGES:
            assert client.get(path).status_code in {200, 303, 401}
            for spelling in spellings(path):
                assert client.get(spelling).status_code == 404, spelling


@pytest.mark.parametrize("name", ["a", "census-2030", "a.b_c", "Zensus"])
def test_names_are_still_read_decoded(service: ServiceThread, name: str) -> None:
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, name)
        for spelling in (quote(name, safe=""), "".join(f"%{ord(sign):02x}" for sign in name)):
            assert owner.get(f"/v1/accounts/{spelling}/balance").json()["name"] == name


def test_a_principal_with_a_slash_in_its_name_can_be_erased_over_http(
    service: ServiceThread, owner: httpx.Client
) -> None:
    with odo.connect(service.url, token=service.token("team/ana")) as ledger:
        ledger.account("census").spend(odo.PureDP("0.1"), key="q-1")
    shown = [entry["principal"] for entry in owner.get("/v1/accounts/census/entries").json()["entries"]]
    assert shown[-1] == "team/ana"
    assert owner.delete("/v1/principals/team%2Fana").json() == {"erased": True}
    shown = [entry["principal"] for entry in owner.get("/v1/accounts/census/entries").json()["entries"]]
    assert shown[-1] != "team/ana"
    # Control: without the encoding it is another path, where nothing is.
    attacks.check_problem(owner.delete("/v1/principals/team/ana"), 404)


def test_a_note_is_erased_once_and_an_entry_that_does_not_exist_is_not_found(
    service: ServiceThread, owner: httpx.Client
) -> None:
    with odo.connect(service.url, token=service.token("ana")) as ledger:
        number = ledger.account("census").spend(odo.PureDP("0.1"), key="noted", note="a name").lines[0].sequence
    answers = [owner.delete(f"/v1/notes/census%23{number}").json() for _ in range(2)]
    assert answers == [{"erased": True}, {"erased": False}]
    for missing in (f"census%23{number + 99}", "nobody%231"):
        answer = owner.delete(f"/v1/notes/{missing}")
        attacks.check_problem(answer, 404)
        assert answer.json()["code"] == "EntryNotFound"


def test_an_encoded_slash_does_not_part_a_path(owner: httpx.Client) -> None:
    assert owner.get("/v1/accounts").status_code == 200
    assert owner.get("/v1/%61ccounts").status_code == 404  # a path has one spelling
    for path in (
        "/v1%2Faccounts",
        "/v1/accounts%2Fcensus",
        "/v1/accounts/census%2Fbalance",
        "/v1/accounts/a%2F..%2Fb",
    ):
        attacks.check_problem(owner.get(path), 404, 422)
