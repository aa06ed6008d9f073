"""The feed of events over HTTP: what a key may see, waiting for the next event, links."""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import attacks
import httpx
from service_server import ServiceThread

from odograph.ledger.results import cursor_to_text
from odograph.service import state

SMALL: Final = {"cost": attacks.pure("0.001")}


def spend(client: httpx.Client, name: str, key: str) -> httpx.Response:
    return attacks.post(client, f"/v1/accounts/{name}/spends", SMALL, key=key)


def ids(form: dict[str, Any]) -> list[str]:
    return [f"{one['account']}#{one['sequence']}" for one in form["events"]]


def test_a_key_sees_the_events_of_its_accounts_only(service: ServiceThread, owner: httpx.Client) -> None:
    attacks.open_account(owner, "census-a", parent="census")
    attacks.open_account(owner, "other")
    spend(owner, "census-a", "q-1")
    spend(owner, "other", "q-2")
    assert sorted(ids(owner.get("/v1/events").json())) == [
        "census#0",
        "census#1",
        "census-a#0",
        "census-a#1",
        "other#0",
        "other#1",
    ]
    with attacks.reach(service, service.token("a", "analyst", "census-a")) as analyst:
        answer = analyst.get("/v1/events")
        assert ids(answer.json()) == ["census-a#0", "census-a#1"]
        assert "census#" not in answer.text
        assert all(one["sealed"] is None for one in answer.json()["events"]), "they name the account above"
        attacks.check_problem(analyst.get("/v1/events?account=other"), 404)
        # A cursor that names accounts of others tells nothing about them.
        for positions in ({"other": 99}, {"nothing": 99}):
            given = analyst.get("/v1/events", params={"after": cursor_to_text(positions)})
            assert ids(given.json()) == ids(answer.json())


def test_the_events_of_one_account_have_a_short_cursor(owner: httpx.Client) -> None:
    attacks.open_account(owner, "other")
    form = owner.get("/v1/events?account=other").json()
    assert (ids(form), form["more"]) == (["other#0"], False)
    assert ids(owner.get("/v1/events", params={"after": form["after"]}).json()) == ["census#0"]


def test_pages_are_linked_and_end(owner: httpx.Client) -> None:
    for number in range(5):
        spend(owner, "census", f"q-{number}")
    found, url = [], "/v1/events?count=2"
    while url:
        answer = owner.get(url)
        found += ids(answer.json())
        assert ("next" in answer.links) == answer.json()["more"]
        url = str(answer.url.join(answer.links["next"]["url"])) if "next" in answer.links else ""
    assert found == [f"census#{number}" for number in range(6)]


def test_a_request_waits_for_the_next_event_and_no_longer(owner: httpx.Client) -> None:
    after = owner.get("/v1/events?after=now").json()["after"]
    assert ids(owner.get("/v1/events", params={"after": after, "wait": 0.1}).json()) == []
    later = threading.Timer(0.3, spend, (owner, "census", "q-1"))
    later.start()
    begun = time.monotonic()
    form = owner.get("/v1/events", params={"after": after, "wait": 20}).json()
    assert ids(form) == ["census#1"]
    assert time.monotonic() - begun < 15, "it did not wait to the end"
    later.join()
    attacks.check_problem(owner.get("/v1/events?wait=21"), 400)
    attacks.check_problem(owner.get("/v1/events?after=nonsense"), 400, 422)


def test_more_requests_than_may_wait_are_answered_at_once(owner: httpx.Client, monkeypatch: Any) -> None:  # noqa: ANN401
    monkeypatch.setattr(state, "_MAX_POLLS", 0)
    after = owner.get("/v1/events?after=now").json()["after"]
    begun = time.monotonic()
    assert ids(owner.get("/v1/events", params={"after": after, "wait": 20}).json()) == []
    assert time.monotonic() - begun < 15
