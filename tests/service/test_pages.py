"""The dashboard's pages over HTTP: their content as HTML and JSON, their headers, and that none can spend."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from page_client import Visitor, visitor_of, words_of
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.ledger import Ledger
from odograph.population.population import Population
from odograph.service.dashboard import pages, routes
from odograph.service.dashboard.pages import COOKIE, static_url
from odograph.service.key_store import connect_keys
from odograph.service.state import AppState

PLAIN = odo.Policy(1, 0, filter="basic")
MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
PAGES = (
    "/",
    "/accounts/census",
    "/accounts/census/chart",
    "/accounts/census/plan?size=0.1",
    "/audit",
    "/open",
    "/docs",
)
OWNER_PAGES = (
    "/spending",
    "/entries",
    "/principal?name=bot",
    "/pending",
    "/keys",
    "/populations",
    "/accounts/census/close",
    "/accounts/census/entries.csv",
)


@pytest.fixture
def census(remote: Ledger) -> odo.LedgerAccount:
    account = remote.open_account("census", PLAIN, note="the first")
    account.spend(odo.PureDP("0.25"), key="q-1", note="weekly count")
    return account


# Every page has a JSON representation with the same content.


def page_and_json(visitor: Visitor, path: str) -> tuple[str, Any]:
    """Return what a page says, in words and as JSON."""
    page, as_json = visitor.get(path), visitor.get(f"{path}{'&' if '?' in path else '?'}format=json")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert as_json.headers["content-type"] == "application/json"
    assert page.status_code == as_json.status_code
    return words_of(page.text), as_json.json()


def told(words: str, *values: object) -> bool:
    return all(str(value) in words for value in values)


def test_the_overview_and_its_json_representation_name_the_same_accounts(
    service: ServiceThread, remote: Ledger
) -> None:
    for name, spent in (("full", "1"), ("most", "0.95"), ("half", "0.5"), ("gone", "0.1")):
        remote.open_account(name, PLAIN).spend(odo.PureDP(spent))
    remote.account("gone").close()
    words, as_json = page_and_json(visitor_of(service), "/")
    assert [(line["row"]["name"], line["state"]) for line in as_json["lines"]] == [
        ("most", "near"),
        ("half", "open"),
        ("full", "used up"),
        ("gone", "closed"),
    ]
    assert words.index("most") < words.index("half") < words.index("full") < words.index("gone")
    assert told(words, "4 accounts", "1 near the limit", "1 used up", "1 closed", "100%", "95%", "50%", "10%")
    assert as_json["lines"][1]["row"]["spent"] == 0.5
    assert not told(words, "25%")


def test_an_account_and_its_json_representation_say_the_same(
    service: ServiceThread, remote: Ledger, census: object
) -> None:
    assert census
    remote.open_account("other", PLAIN).spend(odo.PureDP("0.125"), note="elsewhere")
    visitor = visitor_of(service)
    path = "/accounts/census?kind=pure&size=0.5&times=2&compare=1&verb=spend"
    words, as_json = page_and_json(visitor, path)
    form, plan, listing = as_json["account"], as_json["plan"], as_json["listing"]
    assert told(words, as_json["promise"], form["reading"]["statement"], form["account"]["promise"]["text"])
    assert (form["account"]["spent"], form["voids"], form["account"]["steps"]) == (0.25, 0, 1)
    assert told(words, "spent 25% steps 1 voids 0 pending 0")
    assert (plan["admitted"], plan["fits"], plan["largest"]) == (False, 1, odo.PureDP("0.375").to_dict())
    assert told(words, "Does not fit: 2 × PureDP(0.5)", "1 such question fits", "PureDP(0.375)")
    (entry,) = listing["entries"]
    assert told(words, entry["sequence"], entry["verb"], entry["principal"], entry["note"], entry["seal"][:10])
    assert all(
        told(words, *(citation[part] for part in ("title", "theorem", "assumes")))
        for citation in as_json["citations"]
    )
    other, _ = page_and_json(visitor, "/accounts/other")
    assert not told(other, entry["note"])
    assert not told(other, entry["seal"][:10])


def test_the_planner_says_what_the_first_question_ends(service: ServiceThread, remote: Ledger) -> None:
    account = remote.open_account("mixed", odo.Policy(1, 1e-6))
    path = "/accounts/mixed/plan?kind=gaussian&size=25"
    words, as_json = page_and_json(visitor_of(service), path)
    assert as_json["notes"] == [*account.decide(odo.GDP("0.04")).notes]
    assert told(words, f"Note: {as_json['notes'][0]}.", "falls from 1 to 0.5166.")
    account.spend(odo.GDP("0.04"))
    words, as_json = page_and_json(visitor_of(service), path)
    assert (as_json["notes"], told(words, "Note:")) == ([], False)


def test_the_other_pages_and_their_json_representations_say_the_same(service: ServiceThread, census: object) -> None:
    assert census
    visitor = visitor_of(service)
    words, as_json = page_and_json(visitor, "/audit")
    assert told(
        words,
        as_json["checkpoint"],
        *(text for place in as_json["accounts"].items() for text in (place[0], *place[1])),
    )
    verified = visitor.send("/audit?format=json", {"csrf": visitor.csrf}).json()["verification"]
    assert verified["verified"] is True
    assert told(words_of(visitor.send("/audit", {"csrf": visitor.csrf}).text), "Verified", verified["message"])
    words, as_json = page_and_json(visitor, "/open")
    assert told(words, *as_json["filters"])
    words, as_json = page_and_json(visitor, "/accounts/nowhere")
    assert as_json["status"] == 404
    assert told(words, as_json["detail"])
    words, as_json = page_and_json(visitor, "/accounts/census/plan?size=0.5")
    assert (as_json["admitted"], told(words, "✓ Fits")) == (True, True)
    numbers = visitor.get("/accounts/census/chart", format="json").json()
    assert (numbers["steps"], numbers["lines"][0]["losses"]) == ([0, 1], [0.0, pytest.approx(0.25)])
    assert Visitor(service).get("/sign-in", format="json").json() == {"signed_in": False, "message": ""}
    refused = Visitor(service).get("/", format="json")
    assert (refused.status_code, refused.json()["code"]) == (401, "NotAuthenticated")


# Headers.


def unsafe(headers: Any) -> list[str]:  # noqa: ANN401  of httpx, or of a test
    """Say which headers are missing that every answer has."""
    policy = headers.get("content-security-policy", "")
    wanted = {
        "scripts": "script-src 'self';" in policy,
        "elsewhere": policy.startswith("default-src 'none';"),
        "frames": "frame-ancestors 'none'" in policy,
        "forms": "form-action 'self'" in policy,
        "type": headers.get("x-content-type-options") == "nosniff",
        "referrer": headers.get("referrer-policy") == "same-origin",
        "caching": bool(headers.get("cache-control")),
    }
    return [name for name, there in wanted.items() if not there]


def test_every_answer_has_the_headers_that_keep_browsers_safe(service: ServiceThread, census: object) -> None:
    assert census
    visitor, stranger = visitor_of(service), Visitor(service)
    css, answers = static_url("style.css"), []
    for path in (
        *PAGES,
        *OWNER_PAGES,
        "/sign-in",
        "/data-version",
        "/accounts/nowhere",
        "/accounts/census?before=x",
        "/nothing",
    ):
        answers += [who.http.get(path, headers={"Accept": "text/html"}) for who in (visitor, stranger)]
    answers += [
        visitor.http.request(method, path) for method in ("PUT", "DELETE") for path in ("/", "/sign-out", css)
    ]
    answers += [visitor.get(path) for path in (css, static_url("live.js"), "/favicon.ico", "/static/0/style.css")]
    answers += [visitor.send("/open", {}), visitor.send("/audit", {}, Origin="http://evil.test")]
    answers += [visitor.http.post("/open", content=b"x" * 70_000), visitor.http.post("/open", json={})]
    for answer in answers:
        assert unsafe(answer.headers) == [], (answer.request.method, answer.request.url, answer.headers)
    assert {answer.status_code for answer in answers} >= {200, 303, 400, 401, 403, 404, 405, 415}
    assert unsafe({}) == ["scripts", "elsewhere", "frames", "forms", "type", "referrer", "caching"]


def test_pages_are_never_kept_and_files_for_as_long_as_they_do_not_change(
    service: ServiceThread, census: object
) -> None:
    assert census
    visitor = visitor_of(service)
    for path in (*PAGES, *OWNER_PAGES, "/data-version", "/accounts/nowhere", "/static/0/style.css"):
        assert visitor.get(path).headers["cache-control"] == "no-store", path
    for name in ("style.css", "live.js", "favicon.svg", "bokeh.min.js"):
        answer = visitor.get(static_url(name))
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert COOKIE not in answer.headers.get("set-cookie", "")


# What people typed comes out as text.


def raw(service: ServiceThread, remote: Ledger) -> list[str]:
    """Put markup wherever a text can be; return the pages on which it is markup still."""
    token = service.token(MARKUP)
    with odo.connect(service.url, token=token) as ledger:
        account = ledger.open_account(
            "census", odo.Policy(1, 0, filter="basic", privacy_unit="<script>alert(3)</script>")
        )
        account.spend(odo.PureDP("0.1"), note=MARKUP, key=MARKUP)
        account.reserve(odo.PureDP("0.1"), key=f"{MARKUP}2", note=MARKUP)
    assert remote.account("census").history(1, 1)[0].note == MARKUP
    visitor, found = visitor_of(service, token), []
    ways = [
        {},
        *({field: MARKUP} for field in ("q", "verb", "principal", "text", "before", "kind", "size", "times", "by")),
    ]
    for path in (*PAGES, f"/accounts/{MARKUP}", f"/sign-in?then={MARKUP}", f"/{MARKUP}"):
        for query in ways:
            answer = (
                visitor.http.get(path, params=query, headers={"Accept": "text/html"}) if query else visitor.get(path)
            )
            kind = answer.headers.get("content-type", "")
            if kind.startswith("text/html") and any(
                part in answer.text for part in ("<script>", "<img src=x", "\"'>")
            ):
                found.append(path)
    typed = visitor.send(
        "/open", {"csrf": visitor.csrf, "name": MARKUP, "note": MARKUP, "privacy_unit": MARKUP, "key": MARKUP}
    )
    assert typed.status_code == 422
    return found + (["/open"] if "<script>" in typed.text else [])


def test_what_people_typed_is_never_markup(service: ServiceThread, remote: Ledger) -> None:
    assert raw(service, remote) == []


def test_pages_that_do_not_escape_would_be_caught(
    service: ServiceThread, remote: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = pages._ENVIRONMENT  # noqa: SLF001  what is broken on purpose
    monkeypatch.setattr(environment, "autoescape", False)
    environment.cache = {}
    try:
        assert {"/", "/accounts/census", "/open"} <= {*raw(service, remote)}
    finally:
        environment.cache = {}


# No cookie spends.


async def routes_of(service: ServiceThread) -> list[tuple[str, str]]:
    """Return every method and path of the dashboard."""
    state = AppState(service.settings)
    found = [(method, route.path) for route in routes.routes(state) for method in sorted(route.methods or ())]
    await state.close()
    return found


def test_no_page_of_whatever_method_charges_an_account(
    service: ServiceThread, remote: Ledger, census: odo.LedgerAccount
) -> None:
    census.reserve(odo.PureDP("0.0625"))
    other = remote.open_account("other", PLAIN)
    own = service.token()
    visitor, size, before = visitor_of(service, own), census.size, census.totals
    csrf = visitor.csrf
    with connect_keys(service.settings.url) as keys:
        target = keys.make("zoe", "analyst", every_account=True, made_by="test")[1].id
    cost = json.dumps({"kind": "pure", "epsilon": "0.1"})
    form = {
        "name": "census",
        "account": "census",
        "cost": cost,
        "kind": "pure",
        "size": "0.1",
        "times": "1",
        "principal": "carl",
        "role": "runner",
        "every_account": "1",
        "id.census#2": "1",
        "confirmed": "1",
        "token": own,
    }
    routes = asyncio.run(routes_of(service))
    assert ("GET", "/accounts/{name}/plan") in routes
    for method, path in sorted(routes, key=lambda route: route[1] == "/sign-out"):
        for verb in ("spend", "reserve", "commit") if method == "POST" else ("commit",):
            sent = form | {
                "verb": verb,
                "key": f"{path} {verb}",
                "csrf": csrf,
                "epsilon": "1",
                "delta": "0",
                "filter": "basic",
                "privacy_unit": "person",
            }
            where = path.format(name="census", version="0", key=target)
            answer = (
                visitor.http.request(method, where, data=sent) if method == "POST" else visitor.get(where, **form)
            )
            assert answer.status_code < 500, (method, path)
    done = [entry.verb for entry in census.history(size)]
    assert sorted(done) == ["close", "commit"]  # what the forms did, and none of it charges
    assert census.totals == before
    assert other.size == 1
    other.spend(odo.PureDP("0.1"))
    assert [entry.verb for entry in other.history(1)] == ["spend"]


def test_the_audit_page_links_to_every_account_that_has_a_page_and_to_no_population(
    service: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    assert owner.get("/v1/me").status_code == 200
    with odo.connect(service.settings.url) as ledger:
        Population.create("people", PLAIN, ledger=ledger, location=tmp_path / "people", ids=3)
    visitor = visitor_of(service)
    page = visitor.get("/audit").text
    links = re.findall(r'href="(/accounts/[^"]+)"', page)
    assert links == ["/accounts/census"]
    assert '<th scope="row">people</th>' in page
    assert visitor.get("/accounts/census").status_code == 200
    assert visitor.get("/accounts/people").status_code == 422
