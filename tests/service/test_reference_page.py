"""The reference of the API as a page: complete, open to everybody, and with examples that the service takes."""

from __future__ import annotations

import json
import shlex

import httpx
import pytest
from page_client import Visitor, visitor_of, words_of
from service_server import ServiceThread

from odograph.service.auth import PERMISSIONS
from odograph.service.endpoint import Route
from odograph.service.openapi import Operation, describe_operations
from odograph.service.routes import ROUTES

NOT_UNDERSTOOD = {400, 405, 415, 422}


def unlisted(page: str, routes: tuple[Route, ...]) -> list[Route]:
    """Return the routes that a page does not show, with their roles."""
    words = words_of(page)
    found = []
    for route in routes:
        place = words.find(f"{route.method} {route.path} ")
        roles = words[place:].partition("Roles: ")[2].partition(".")[0].partition(";")[0].split(", ")
        if place < 0 or {*roles} != {*PERMISSIONS[route.verb]}:
            found.append(route)
    return found


def test_every_route_is_on_the_page_with_the_roles_that_may(service: ServiceThread) -> None:
    page = Visitor(service).get("/docs").text
    assert unlisted(page, ROUTES) == []
    first, *others = ROUTES
    assert unlisted(page.replace(first.path, "/v1/gone"), ROUTES)[0] == first
    assert unlisted(page, (Route("PUT", "/v1/unheard", first.handler, "read", first.response), *others))


def test_the_page_is_open_to_everybody_and_holds_no_data(service: ServiceThread) -> None:
    before = Visitor(service).get("/docs")
    assert before.status_code == 200
    visitor = visitor_of(service)
    form = {"name": "hush-hush", "epsilon": "1", "delta": "0", "filter": "basic", "privacy_unit": "person"}
    visitor.send("/open", form | {"csrf": visitor.csrf, "neighbors": "add-remove"})
    assert visitor.get("/accounts/hush-hush").status_code == 200
    assert Visitor(service).get("/docs").text == before.text
    assert "Sign out" in visitor.get("/docs").text
    for path in ("/sign-in", "/docs"):
        assert 'href="/docs"' in Visitor(service).get(path).text
    assert 'href="/docs"' in visitor.get("/").text


def test_its_json_representation_is_the_document_for_programs(service: ServiceThread) -> None:
    visitor = Visitor(service)
    assert visitor.get("/docs", format="json").json() == visitor.get("/v1/openapi.json").json()


def test_every_field_that_is_sent_is_on_the_page_with_its_limits(service: ServiceThread) -> None:
    words = words_of(Visitor(service).get("/docs").text)
    for route in ROUTES:
        for form in (route.form, route.query):
            assert all(field in words for field in getattr(form, "__struct_fields__", ()))
    for limit in ("from 1 to 200 characters", "from 1 to 1,000 items", "above 0", 'default "person"'):
        assert limit in words, limit


def sent(http: httpx.Client, example: str, token: str) -> httpx.Response:
    """Send what an example's command would."""
    _, *words = shlex.split(
        example.replace("$ODOGRAPH_TOKEN", token).replace("$ODOGRAPH_URL", "").replace("\\\n", "")
    )
    method, path, headers, body = "GET", "", {}, b""
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word in {"-d", "--data-binary"}:
            body = words.pop(0).encode()
        else:
            path = word
    return http.request(method, path, headers=headers, content=body)


def every_operation() -> list[Operation]:
    """Return the operations in an order in which they can be carried out: opened first, closed last."""
    found = [one for listed in describe_operations(ROUTES).values() for one in listed if one.id != "import"]
    return sorted(found, key=lambda one: (one.id != "open_account", one.id == "close"))


def test_every_example_is_understood_by_the_service(service: ServiceThread) -> None:
    token, http = service.token(), Visitor(service).http
    examples = {one.id: one.example.replace("q-17", one.id) for one in every_operation()}  # each under its own key
    answers = {name: sent(http, example, token) for name, example in examples.items()}
    wrong = {name: answer.text for name, answer in answers.items() if answer.status_code in NOT_UNDERSTOOD}
    assert wrong == {}
    done = {name for name, answer in answers.items() if answer.status_code < 300}
    assert {"open_account", "spend", "decide", "largest", "quote", "verify", "make_key", "close", "metrics"} <= done


@pytest.mark.parametrize("broken", ["policy", "name"])
def test_an_example_that_lacks_a_field_would_be_caught(service: ServiceThread, broken: str) -> None:
    (opening,) = [one for one in every_operation() if one.id == "open_account"]
    command, body = opening.example.rsplit("'", 2)[:2]
    form = json.loads(body)
    del form[broken]
    answer = sent(Visitor(service).http, f"{command}'{json.dumps(form)}'", service.token())
    assert answer.status_code in NOT_UNDERSTOOD
