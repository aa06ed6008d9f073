"""Documents inside of requests that are none: checkpoints, copies, odometers. The mistake is the caller's."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import attacks
import httpx
import pytest
from service_server import ServiceThread

import odograph as odo
from odograph.core.odometers import FilterOdometer, odometer_from_dict
from odograph.errors import InvalidPolicy
from odograph.ledger import audit, transfer
from odograph.ledger.entries import note_digest
from odograph.service.routes import accounts, admin

CHECKPOINTS: Final[tuple[Any, ...]] = (
    *(
        {},
        {"form": 1},
        {"form": 2},
        {"form": 1, "accounts": [], "head": ""},
        {"form": 1, "accounts": {"a": 1}, "head": ""},
    ),
    *({"form": 1, "accounts": {}, "head": "x"}, {"form": 1, "accounts": {"a": ["9" * 5000, "x"]}, "head": "x"}),
    {"form": 1, "accounts": {"census": ["0", "0" * 64]}, "head": "0" * 64},
)


def check_checkpoints(owner: httpx.Client) -> None:
    """Assert that what is no checkpoint is told as the caller's mistake."""
    for checkpoint in CHECKPOINTS:
        attacks.check_problem(attacks.post(owner, "/v1/verify", {"checkpoint": checkpoint}), 400, 409, 422)


def test_a_checkpoint_that_is_none_is_the_callers_mistake_and_not_the_ledgers(owner: httpx.Client) -> None:
    check_checkpoints(owner)


@pytest.mark.parametrize(
    ("part", "broken", "status"),
    [("_read_checkpoint", lambda _: None, 200), ("BadDocument", odo.errors.LedgerCorrupt, 500)],
)
def test_a_checkpoint_that_is_passed_over_or_blamed_on_the_ledger_would_be_caught(
    owner: httpx.Client, monkeypatch: pytest.MonkeyPatch, part: str, broken: object, status: int
) -> None:
    monkeypatch.setattr(admin, part, broken)
    with pytest.raises(AssertionError, match=f"-> {status}"):
        check_checkpoints(owner)


COPIES: Final = (
    *(
        b"",
        b"x",
        b"\xff\xfe",
        b"[",
        b"[" * 50_000,
        b'{"against": 1}',
        b'{"against": {}}\n',
        b"{}",
        b"[]",
        b"null\n" * 3,
    ),
    *(b'{"odograph": 1}', b'{"odograph": 1}\n\xff\xff\n', b'{"odograph": 1}\n' + b"[" * 50_000),
)


@pytest.mark.parametrize("names", [(), ("census",)], ids=["empty", "not empty"])
def test_a_copy_that_is_none_is_the_callers_mistake_and_changes_nothing(
    service: ServiceThread, names: tuple[str, ...]
) -> None:
    with attacks.owner_of(service) as owner:
        for name in names:
            attacks.open_account(owner, name)
        before = owner.get("/v1/accounts").json()
        for copy in COPIES:
            attacks.check_problem(owner.post("/v1/import", content=copy), 400, 409, 422)
        assert owner.get("/v1/accounts").json() == before


NOTE: Final = "the first week"
ELSEWHERE: Final = odo.Checkpoint({"census": (9, "0" * 64)})


@cache
def exported() -> str:
    """Return a whole copy of a small ledger, as its own lines."""
    with odo.connect("memory://", principal="olga") as ledger:
        account = ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
        for week in range(3):
            account.spend(odo.PureDP("0.1"), key=f"q-{week}", note="" if week else NOTE)
        file = io.StringIO()
        ledger.export(file)
    return file.getvalue()


def lies() -> dict[str, list[dict[str, Any]]]:
    """Return copies that can be read, and claim something that is not so."""

    def told(change: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = [json.loads(line) for line in exported().splitlines()]
        change(lines)
        return lines

    def lost(lines: list[dict[str, Any]]) -> None:
        del lines[2]
        lines[-1]["entries"] = str(int(lines[-1]["entries"]) - 1)

    def later(lines: list[dict[str, Any]]) -> None:
        entry = next(line["entry"] for line in reversed(lines) if "entry" in line)
        entry["time"] = str(int(entry["time"]) + 1)

    def noted(lines: list[dict[str, Any]]) -> None:
        next(line["note"] for line in lines if "note" in line)["text"] = "another"

    return {
        "form": told(lambda lines: lines[0].update(form=2)),
        "count": told(lambda lines: lines[-1].update(entries="9")),
        "lost": told(lost),
        "time": told(later),
        "note": told(noted),
        "end": told(lambda lines: lines[-1].update(checkpoint=ELSEWHERE.to_dict())),
        "against": told(lambda lines: lines.insert(0, {"against": ELSEWHERE.to_dict()})),
    }


def check_claims(service: ServiceThread, *names: str) -> None:
    """Assert that no copy is taken in that claims what is not so."""
    with attacks.owner_of(service) as owner:
        for name in names:
            content = "".join(json.dumps(line) + "\n" for line in lies()[name])
            attacks.check_problem(owner.post("/v1/import", content=content.encode()), 400, 409, 422)
        assert owner.get("/v1/accounts").json()["accounts"] == []


def test_a_copy_that_claims_what_is_not_so_is_not_taken_in_and_one_that_does_not_is(service: ServiceThread) -> None:
    check_claims(service, *lies())
    with attacks.owner_of(service) as owner:
        assert owner.post("/v1/import", content=exported().encode()).status_code == 200
        assert [row["name"] for row in owner.get("/v1/accounts").json()["accounts"]] == ["census"]


@pytest.mark.parametrize(
    ("lie", "place", "part", "believing"),
    [
        ("time", audit, "_check_follows", lambda *_: None),
        ("note", transfer, "note_digest", lambda salt, _: note_digest(salt, NOTE)),
        ("end", transfer._Intake, "_checkpoint", lambda _: ELSEWHERE),  # noqa: SLF001  what is broken on purpose
        ("against", admin, "_read_checkpoint", lambda _: None),
    ],
)
def test_a_take_in_that_believes_what_a_copy_claims_would_be_caught(  # noqa: PLR0913, PLR0917  fixtures and cases
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, lie: str, place: object, part: str, believing: object
) -> None:
    monkeypatch.setattr(place, part, believing)
    with pytest.raises(AssertionError, match="-> 200"):
        check_claims(service, lie)


ODOMETERS: Final[tuple[Any, ...]] = (
    *(
        {},
        {"kind": "new"},
        {"kind": []},
        {"kind": "filter"},
        {"kind": "filter", "epsilon": "x"},
        {"kind": "filter", "x": 1},
    ),
    *({"kind": "best-of", "parts": 1}, {"kind": "best-of", "parts": [[1, None]]}),
)


def check_odometers(owner: httpx.Client) -> None:
    """Assert that what is no odometer opens no account."""
    for odometer in ODOMETERS:
        form = {"name": "new", "policy": attacks.POLICY | {"odometer": odometer}}
        attacks.check_problem(attacks.post(owner, "/v1/accounts", form, key="o-1"), 422)


def test_an_odometer_that_is_none_is_refused_in_our_own_words(owner: httpx.Client) -> None:
    check_odometers(owner)


def test_an_odometer_that_is_taken_for_a_usual_one_would_be_caught(
    owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "odometer_from_dict", lambda _: FilterOdometer(1.0))
    with pytest.raises(AssertionError, match="-> 201"):
        check_odometers(owner)


def test_nesting_of_every_depth_is_answered(owner: httpx.Client) -> None:
    for depth in (10, 100, 300, 500, 700, 900, 950, 1000, 5000, 100_000):
        inner: bytes = b"[" * depth + b"]" * depth
        for field in (b'"compiled"', b'"policy": {"epsilon": 1, "delta": 1e-6, "odometer"'):
            body = b'{"name": "new", ' + field + b': {"kind": ' + inner + (b"}}}" if b"policy" in field else b"}}")
            answer = owner.post("/v1/accounts", content=body, headers=attacks.JSON | {"Idempotency-Key": "o-1"})
            attacks.check_problem(answer, 400, 422)
        parts = b'{"kind": "best-of", "parts": [[1, ' * depth + b"1" + b"]]}" * depth
        body = b'{"name": "new", "policy": {"epsilon": 1, "delta": 1e-6, "odometer": ' + parts + b"}}"
        answer = owner.post("/v1/accounts", content=body, headers=attacks.JSON | {"Idempotency-Key": "o-1"})
        attacks.check_problem(answer, 400, 413, 422)
        kept = b'{"checkpoint": {"form": 1, "head": "", "accounts": {"a": ' + inner + b"}}}"
        attacks.check_problem(owner.post("/v1/verify", content=kept, headers=attacks.JSON), 400, 409, 422)


@pytest.mark.parametrize("form", [{"kind": "mixture", "gamma": -1}, {"kind": "abacus"}, {"kind": "best-of"}])
def test_an_odometer_that_is_none_is_refused_with_what_is_wrong_with_it(
    owner: httpx.Client, form: dict[str, Any]
) -> None:
    with pytest.raises(InvalidPolicy) as raised:
        odometer_from_dict(form)
    policy = attacks.POLICY | {"odometer": form}
    answer = attacks.post(owner, "/v1/accounts", {"name": "new", "policy": policy}, key="o-1")
    attacks.check_problem(answer, 422)
    assert answer.json()["detail"] == str(raised.value)
