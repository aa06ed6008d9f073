"""Documents inside of requests that are none: checkpoints, copies, odometers. The mistake is the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import attacks
import httpx
import msgspec
import pytest
from service_server import ServiceThread

from odograph.errors import ERROR_TABLE
from odograph.service import problems


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(service) as client:
        attacks.open_account(client, "census")
        yield client


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


def test_a_checkpoint_that_is_none_is_the_callers_mistake_and_not_the_ledgers(owner: httpx.Client) -> None:
    for checkpoint in CHECKPOINTS:
        attacks.check_problem(attacks.post(owner, "/v1/verify", {"checkpoint": checkpoint}), 400, 409, 422)


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


def test_an_odometer_that_is_none_is_refused_in_our_own_words(owner: httpx.Client) -> None:
    for odometer in ODOMETERS:
        form = {"name": "new", "policy": attacks.POLICY | {"odometer": odometer}}
        attacks.check_problem(attacks.post(owner, "/v1/accounts", form, key="o-1"), 422)


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


def test_every_problem_has_a_code_of_the_table_and_fits_its_description() -> None:
    for error, row in ERROR_TABLE.items():
        made = error.__new__(error)
        Exception.__init__(made, "text")
        if error.__name__ == "BudgetExceeded":
            continue  # it comes with a decision
        problem = problems.problem_of(made, None, "r")
        assert (problem.code, problem.status, problem.retryable) == (error.__name__, row.status, row.retryable)
        assert msgspec.json.decode(msgspec.json.encode(problem), type=type(problem)) == problem
