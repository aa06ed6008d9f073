"""Keys, batches and limits as a caller sees them: the same key is charged once, and a batch answers one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attacks
import httpx
import pytest
from service_server import ServiceThread

import odograph as odo
from odograph.ledger import commands
from odograph.ledger.entries import totals_from_text
from odograph.ledger.stores.base import IdempotencyRecord
from odograph.service.auth import RateLimit

SMALL = attacks.pure("0.001")


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(service) as client:
        for name in ("census", "income", "shut"):
            attacks.open_account(client, name)
        assert attacks.post(client, "/v1/accounts/shut/close", {}).status_code == 200
        yield client


def steps(owner: httpx.Client, name: str = "census") -> int:
    return int(owner.get(f"/v1/accounts/{name}/balance").json()["steps"])


def check_repeats(owner: httpx.Client) -> None:
    """Assert that the same key and request is one charge, and the same key with anything else a conflict."""
    path, form = "/v1/accounts/census/spends", {"cost": SMALL}
    first = attacks.post(owner, path, form, key="q-1")
    again = attacks.post(owner, path, form, key="q-1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json() | {"repeated": True}
    for other_path, other in (
        (path, {"cost": attacks.pure("0.002")}),
        (path, {"cost": {"kind": "approx", "epsilon": "0.001", "delta": "0"}}),
        ("/v1/accounts/census/reservations", {"cost": SMALL}),
        ("/v1/accounts/income/spends", {"cost": SMALL}),
        ("/v1/spends", {"costs": {"census": SMALL, "income": SMALL}}),
    ):
        answer = attacks.post(owner, other_path, other, key="q-1")
        attacks.check_problem(answer, 422)
        assert answer.json()["code"] == "IdempotencyConflict"
    assert (steps(owner), steps(owner, "income")) == (1, 0)


def test_the_same_key_and_request_is_one_charge_and_anything_else_under_it_a_conflict(owner: httpx.Client) -> None:
    check_repeats(owner)


def test_a_ledger_that_does_not_compare_requests_would_be_caught(
    owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(hit: IdempotencyRecord, *_: object) -> commands.Repeated:
        return commands.Repeated(hit)

    monkeypatch.setattr(commands, "check_repeated", careless)
    with pytest.raises(AssertionError):
        check_repeats(owner)


def test_a_request_is_the_same_however_its_numbers_and_its_key_are_written(owner: httpx.Client) -> None:
    path = "/v1/accounts/census/spends"
    for epsilon in ("0.5", 0.5, "1/2", "5e-1", "0.500"):
        form = {"cost": {"kind": "pure", "epsilon": epsilon}, "note": f"written {epsilon}"}
        for key in ("q%2F1 ä".replace("ä", "%C3%A4"), "q/1 %c3%a4"):
            answer = owner.post(path, json=form, headers={"Idempotency-Key": key.replace(" ", "%20")})
            assert answer.status_code in {200, 201}, answer.text
    assert steps(owner) == 1


def charged_for(owner: httpx.Client, written: str, key: str) -> int:
    """Spend what is written as a JSON number; return what the epsilon meter was charged, in units of 1e-15."""

    def total() -> int:
        return totals_from_text(owner.get("/v1/accounts/census/balance").json()["totals"]).amounts[1]

    before = total()
    body = f'{{"cost": {{"kind": "pure", "epsilon": {written}}}}}'
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    assert owner.post("/v1/accounts/census/spends", content=body, headers=headers).status_code == 201
    return total() - before


def test_a_json_number_with_more_digits_than_a_float_is_read_exactly(owner: httpx.Client) -> None:
    # Each is above the float that is nearest to it, so a reader of floats, as here, charges a unit too few.
    assert json.loads("0.10000000000000000001") == 0.1
    assert charged_for(owner, "0.1", "q-1") == 10**14
    assert charged_for(owner, "0.10000000000000000001", "q-2") == 10**14 + 1
    assert charged_for(owner, "0.100000000000000001e0", "q-3") == 10**14 + 1
    body = '{"cost": {"kind": "pure", "epsilon": 1e-400}}'  # nearest to the float 0, which costs nothing
    headers = {"Idempotency-Key": "q-4", "Content-Type": "application/json"}
    attacks.check_problem(owner.post("/v1/accounts/census/spends", content=body, headers=headers), 422)


def test_a_key_belongs_to_its_principal_and_stays_when_the_tokens_change(
    service: ServiceThread, owner: httpx.Client
) -> None:
    form, path = {"cost": SMALL}, "/v1/accounts/census/spends"
    answers = []
    for principal in ("ana", "ana", "ben"):
        with attacks.reach(service, service.token(principal, "analyst", "census")) as client:
            answers.append(attacks.post(client, path, form, key="q-1").status_code)
    assert answers == [201, 200, 201]
    assert steps(owner) == 2


def item(key: str, **costs: dict[str, Any]) -> dict[str, Any]:
    return {"key": key, "costs": costs}


def check_batch(owner: httpx.Client, client: httpx.Client) -> None:
    """Assert that every spend of a batch has its own answer, whatever became of the others."""
    asked = [
        (item("b-1", census=SMALL), 201, ""),
        (item("b-1", census=SMALL), 200, ""),
        (item("b-1", census=attacks.pure("0.002")), 422, "IdempotencyConflict"),
        (item("b-2", census=attacks.pure("7")), 409, "BudgetExceeded"),
        (item("b-3", nothing=SMALL), 404, "AccountNotFound"),
        (item("b-4", shut=SMALL), 409, "AccountClosed"),
        (item("b-5", census=SMALL, income=SMALL), 201, ""),
        (item("b-6", census=SMALL, nothing=SMALL), 404, "AccountNotFound"),
        (item("b-7", census={"kind": "gdp", "mu": "0.1"}), 422, "UnprovenComposition"),
        (item("b-8", census=attacks.pure("-1")), 422, "InvalidGuarantee"),
        (item("b\n9", census=SMALL), 422, "InvalidArgument"),
        (item("b-2", census=SMALL), 201, ""),  # a refusal leaves the key free
    ]
    answer = attacks.post(client, "/v1/batches", {"spends": [one for one, *_ in asked]})
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    told = [(one["status"], one.get("problem", {}).get("code", "")) for one in results]
    assert told == [(status, code) for _, status, code in asked]
    assert results[1]["receipt"] == results[0]["receipt"] | {"repeated": True}
    assert results[3]["problem"]["decision"]["largest"]["epsilon"] == "0.999"
    assert (steps(owner), steps(owner, "income")) == (3, 1)


def test_every_spend_of_a_batch_has_its_own_answer_and_the_others_do_not_matter(
    service: ServiceThread, owner: httpx.Client
) -> None:
    with attacks.reach(service, service.token("ana", "analyst", "census", "income", "shut")) as analyst:
        check_batch(owner, analyst)


def test_a_batch_of_too_many_or_of_none_is_refused_as_a_whole(owner: httpx.Client) -> None:
    before = attacks.state(owner)
    for spends in ([], [item(f"b-{i}", census=SMALL) for i in range(1001)]):
        attacks.check_problem(attacks.post(owner, "/v1/batches", {"spends": spends}), 422)
    costs = {f"a{i}": SMALL for i in range(101)}
    attacks.check_problem(attacks.post(owner, "/v1/spends", {"costs": costs}, key="k"), 422)
    assert attacks.state(owner) == before


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[ServiceThread]:
    """A service that takes one request in a hundred seconds from each key, after the first eight."""
    with ServiceThread(f"sqlite:///{tmp_path}/slow.db", rate=0.01, burst=8) as running:
        yield running


def check_limit(slow: ServiceThread) -> None:
    """Assert that spends in batches are counted one by one, that a key's use is its own, and when to come again."""
    with attacks.owner_of(slow) as owner:
        attacks.open_account(owner, "census")
    with attacks.reach(slow, slow.token("ana", "analyst")) as client:
        first = attacks.post(client, "/v1/batches", {"spends": [item(f"b-{i}", census=SMALL) for i in range(5)]})
        assert [one["status"] for one in first.json()["results"]] == [201] * 5
        second = attacks.post(client, "/v1/batches", {"spends": [item(f"c-{i}", census=SMALL) for i in range(5)]})
        attacks.check_problem(second, 429)
        assert second.json()["code"] == "RateLimited"
        assert second.json()["retryable"]
        assert 1 <= int(second.headers["retry-after"]) <= 300
        statuses = [client.get("/v1/me").status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429], "one of them was taken at the door of the batch"
    with attacks.reach(slow, slow.token("ben", "analyst")) as other:
        assert other.get("/v1/me").status_code == 200
        assert steps(other) == 5


def test_the_rate_limit_counts_the_spends_of_a_batch_and_says_when_to_come_again(slow: ServiceThread) -> None:
    check_limit(slow)


def test_a_limit_that_counts_a_batch_as_one_would_be_caught(
    slow: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = RateLimit.take
    monkeypatch.setattr(RateLimit, "take", lambda self, key, count=1: take(self, key, min(count, 1)))
    with pytest.raises(AssertionError):
        check_limit(slow)


def test_a_batch_that_is_larger_than_the_limit_ever_allows_is_told_so(slow: ServiceThread) -> None:
    with attacks.owner_of(slow) as owner:
        attacks.open_account(owner, "census")
        spends = [item(f"b-{i}", census=SMALL) for i in range(20)]
        attacks.check_problem(attacks.post(owner, "/v1/batches", {"spends": spends}), 413, 422, 429)
        assert steps(owner) == 0


def test_a_wrong_key_is_not_counted_against_anybody(slow: ServiceThread) -> None:
    with attacks.reach(slow, "odo_" + "A" * 43) as stranger:
        for _ in range(20):
            attacks.check_problem(stranger.get("/v1/me"), 401)
    with attacks.owner_of(slow) as owner:
        assert owner.get("/v1/me").status_code == 200


def test_after_an_import_a_principal_writes_under_the_identity_that_the_copy_brought(
    service: ServiceThread, tmp_path: Path
) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/original.db", principal="ana") as original:
        original.open_account("census", odo.Policy(1, 0, filter="basic")).spend(odo.PureDP("0.1"))
        with (tmp_path / "copy").open("w+", encoding="utf-8") as file:
            checkpoint = original.export(file)
    with (
        odo.connect(service.url, token=service.token("ana")) as ledger,
        odo.connect(service.url, token=service.token("olga")) as owner,
    ):
        with pytest.raises(odo.errors.AccountNotFound):
            ledger.spend({"census": odo.PureDP("0.1")})
        with (tmp_path / "copy").open(encoding="utf-8") as file:
            owner.import_(file, checkpoint=checkpoint)
        account = ledger.account("census")
        account.spend(odo.PureDP("0.2"))
        assert [past.principal for past in account.history()] == ["ana"] * 3
