"""Compiled policies that are sent to the service: limits are refused, certified, or marked as not certified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attacks
import httpx
import pytest
from page_client import visitor_of, words_of
from service_server import ServiceThread

import odograph as odo
from odograph.core.mechanisms import MenuItem

MENU = MenuItem("training", 1, digest="0" * 64)  # as a document has it: without its losses


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(service) as client:
        yield client


def menu_only(limit: int) -> dict[str, Any]:
    """Return a document that claims room for so many runs of a mechanism."""
    policy = odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=(), menu=[MENU]))
    form = odo.compile_policy(odo.Policy(1, 1e-6, filter="exact", odometer=policy.odometer)).to_dict()
    exact = next(meter for meter in form["meters"] if meter["pricing"] == "exact")
    exact.update({"limit": str(limit), "quantum": "0", "takes": [], "charges": [["training", 1, 1]]})
    return form | {"policy": policy.to_dict()}


def opened(owner: httpx.Client, name: str, form: dict[str, Any]) -> httpx.Response:
    return attacks.post(owner, "/v1/accounts", {"name": name, "compiled": form}, key=f"open {name}")


def test_a_budget_that_no_solver_certifies_is_refused(owner: httpx.Client) -> None:
    answer = opened(owner, "absurd", menu_only(2_000_000))
    attacks.check_problem(answer, 422)
    assert "must be one certified for this policy" in answer.json()["detail"]


def test_a_budget_that_nothing_here_certifies_is_marked_wherever_it_is_shown(
    service: ServiceThread, owner: httpx.Client
) -> None:
    assert opened(owner, "claim", menu_only(30_000)).status_code == 201
    sound = odo.compile_policy(odo.Policy(1, 1e-6)).to_dict()
    assert opened(owner, "sound", sound).status_code == 201
    training, count = {"kind": "mechanism", "name": "training"}, attacks.pure("0.01")
    receipts = {
        name: attacks.post(owner, f"/v1/accounts/{name}/spends", {"cost": cost}, key=f"q {name}").json()
        for name, cost in (("claim", training), ("sound", count))
    }
    assert {name: receipt["uncertified"] for name, receipt in receipts.items()} == {"claim": ["claim"], "sound": []}
    both = {"costs": {"claim": training, "sound": count}}
    assert attacks.post(owner, "/v1/spends", both, key="q both").json()["uncertified"] == ["claim"]
    shown = {name: owner.get(f"/v1/accounts/{name}").json()["certification"] for name in receipts}
    assert shown == {"claim": "not certified here", "sound": "shipped table"}
    assert attacks.post(owner, "/v1/verify", {}).json()["uncertified"] == ["claim"]
    visitor = visitor_of(service)
    pages = {name: words_of(visitor.get(f"/accounts/{name}").text) for name in receipts}
    assert "Limits not certified here" in pages["claim"]
    assert "not certified" not in pages["sound"]
    with odo.connect(service.url, token=service.token("owner")) as remote:
        assert remote.verify().uncertified == ("claim",)
        assert remote.account("claim").spend(odo.guarantees.Mechanism("training"), key="q remote").uncertified == (
            "claim",
        )
