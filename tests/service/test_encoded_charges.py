"""A charge is priced by the writer process or, if that may take long, by the worker: the responses are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import attacks
import httpx
import pytest
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.commands import Ask, Outcome
from odograph.service import writer as writer_module
from odograph.service.routes import charges
from odograph.service.state import AppState
from odograph.service.writer import Answer, Charged

SMALL, LARGE = attacks.pure("0.001"), attacks.pure("7")
ZCDP: Final = {"kind": "zcdp", "rho": "0.0001"}
ZCDP_POLICY: Final = {"epsilon": "1", "delta": "1e-6", "filter": "zcdp"}
# What differs between any two ledgers: times, seals, and the number of a request.
TIMES_AND_SEALS: Final = re.compile(rb'\d{4}-\d\d-\d\dT[\d:.]+\+00:00|[0-9a-f]{64}|"request_id":"[^"]*"')


class Asked(NamedTuple):
    """A request: by whom, where, what, and under which key."""

    who: str
    path: str
    form: dict[str, Any]
    key: str = ""


def open_tree(owner: httpx.Client) -> None:
    """Open accounts with parents, with successors, closed ones, and one under another rule."""
    attacks.open_account(owner, "top")
    attacks.open_account(owner, "a", parent="top")
    attacks.open_account(owner, "b", parent="top")
    attacks.open_account(owner, "first")
    attacks.open_account(owner, "second", successor_of="first")
    attacks.open_account(owner, "z", ZCDP_POLICY)
    attacks.open_account(owner, "shut")
    attacks.open_account(owner, "below", parent="shut")
    assert attacks.post(owner, "/v1/accounts/shut/close", {}).status_code == 200


def everything() -> Iterator[Asked]:
    """Ask for every kind of charge, by everybody, and again: repeats, conflicts, refusals, reservations, batches."""
    numbers = count()
    for who in ("owner", "bound to a and second", "bound to a and first and second"):
        used = []
        for name in ("a", "b", "second", "z", "below", "shut", "nothing"):
            for verb in ("spends", "reservations"):
                for cost in (SMALL, LARGE, ZCDP):
                    used.append(f"k-{next(numbers)}")
                    form = {"cost": cost, "note": "why"}
                    yield from 2 * [Asked(who, f"/v1/accounts/{name}/{verb}", form, used[-1])]
        for costs in (
            {"a": SMALL, "second": SMALL},
            {"b": SMALL, "a": SMALL, "z": ZCDP},
            {"a": SMALL, "second": LARGE},
            {"first": SMALL, "second": SMALL},
            {"a": SMALL, "nothing": SMALL},
        ):
            for verb in ("spends", "reservations"):
                used.append(f"k-{next(numbers)}")
                expires = {"expires": 1000} if verb == "reservations" else {}
                yield from 2 * [Asked(who, f"/v1/{verb}", {"costs": costs, **expires}, used[-1])]
        for key in used:  # a conflict, or free
            yield Asked(who, "/v1/accounts/a/spends", {"cost": attacks.pure("0.0001")}, key)
        items = [{"key": f"{who}{key}", "costs": {"a": SMALL, "second": SMALL}} for key in used[:3]]
        items += [{"key": key, "costs": {"a": cost}} for key in used[:8] for cost in (SMALL, LARGE)]
        yield from 2 * [Asked(who, "/v1/batches", {"spends": items})]


def void_and_ask_again(reach: dict[str, httpx.Client]) -> Iterator[httpx.Response]:
    """Reserve, void, and reserve again under the same key."""
    client = reach["owner"]
    for cost in (SMALL, SMALL):
        yield (made := attacks.post(client, "/v1/accounts/a/reservations", {"cost": cost}, key="void"))
        place = "a%23" + str(made.json().get("id", "#")).partition("#")[2]
        yield attacks.post(client, f"/v1/reservations/{place}/void", {"reason": "not run"})


def answers_of(folder: Path) -> list[tuple[int, str, bytes]]:
    """Ask a service over a new ledger for everything, and return what it says but for times and seals."""
    folder.mkdir()
    with ServiceThread(f"sqlite:///{folder}/ledger.db") as service, ExitStack() as stack:
        tokens = {
            "owner": service.token("olga"),
            "bound to a and second": service.token("ana", "analyst", "a", "second"),
            "bound to a and first and second": service.token("ben", "analyst", "a", "first", "second"),
        }
        reach = {who: stack.enter_context(attacks.reach(service, token)) for who, token in tokens.items()}
        open_tree(reach["owner"])
        answers = [attacks.post(reach[one.who], one.path, one.form, key=one.key) for one in everything()]
        answers += void_and_ask_again(reach)
    return [
        (answer.status_code, answer.headers["content-type"], TIMES_AND_SEALS.sub(b"...", answer.content))
        for answer in answers
    ]


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that everything is answered alike, byte for byte, wherever it is priced."""
    quick = answers_of(folder / "quick")
    monkeypatch.setattr(charges, "encode_quick_charge", lambda _: None)  # everything is priced by the worker
    slow = answers_of(folder / "slow")
    for asked, one, other in zip([*everything(), *4 * [None]], quick, slow, strict=True):
        assert one == other, asked
    seen = {status for status, _, _ in quick}
    assert seen == {200, 201, 404, 409, 422}
    text = b"".join(content for _, _, content in quick)
    for code in (b"BudgetExceeded", b"IdempotencyConflict", b"AccountClosed", b"UnprovenComposition", b"Resolved"):
        assert code in text
    for field in (b'"lifetimes":[{', b'"repeated":true', b'"expires":"'):
        assert field in text


def test_charges_priced_by_the_writer_are_answered_as_those_priced_by_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(tmp_path, monkeypatch)


def test_a_writer_that_writes_its_receipts_in_another_way_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = writer_module._answer  # noqa: SLF001  broken on purpose

    def reversed_answer(outcome: Outcome, asks: tuple[Ask, ...]) -> Answer:
        found = answer(outcome, asks)
        if isinstance(found, Charged):
            found.entries.reverse()
        return found

    monkeypatch.setattr(writer_module, "_answer", reversed_answer)
    with pytest.raises(AssertionError):
        compare(tmp_path, monkeypatch)


def erase_and_spend(service: ServiceThread) -> None:
    """Erase somebody's name; spending again, it is somebody else, and whose the entries before are nobody knows."""
    token = service.token("ana", "analyst")
    with attacks.owner_of(service) as owner, attacks.reach(service, token) as ana:
        attacks.open_account(owner, "a")
        form = {"cost": SMALL}
        before = [attacks.post(ana, "/v1/accounts/a/spends", form, key=key) for key in ("k", "l")]
        with odo.connect(service.url, token=service.token("olga")) as ledger:
            assert ledger.erase_principal("ana")
        after = [attacks.post(ana, "/v1/accounts/a/spends", form, key=key) for key in ("k", "m", "n")]
        assert [answer.status_code for answer in (*before, *after)] == [201, 201, 422, 201, 201]
    with odo.connect(service.settings.url) as ledger:
        pasts = ledger.account("a").history(1, 10)
    assert [past.principal for past in pasts] == ["erased", "erased", "ana", "ana"]
    one, two, three, four = [past.entry.principal for past in pasts]
    assert (one, three) == (two, four)
    assert one != three


def test_a_principal_whose_name_was_erased_spends_again_under_a_new_identity(service: ServiceThread) -> None:
    erase_and_spend(service)


def test_a_worker_that_does_not_forget_an_erased_identity_is_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AppState, "forget_principals", lambda _: None)
    with pytest.raises(AssertionError):
        erase_and_spend(service)
