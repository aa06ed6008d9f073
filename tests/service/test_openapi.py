"""The service against its own description: schemathesis makes requests from it, right ones and wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import attacks
import httpx
import pytest
from service_server import ServiceThread

from odograph.service import endpoint, state
from odograph.service.auth import Caller
from odograph.service.routes import ROUTES
from odograph.service.solver import Solver

FULL: Final = os.environ.get("ODOGRAPH_FULL") == "1"
PROGRAM: Final = Path(sys.executable).with_name("schemathesis")
NAMES: Final = ["census", "income", "nothing"]
# Which numbers a guarantee or a policy can have is not in the description: the mathematics says so, one by one.
LEFT_OUT: Final = "positive_data_acceptance"
# A body may also be too large to be looked at.
CONFIGURATION: Final = '[checks.negative_data_rejection]\nexpected-statuses = ["4xx"]\n'
# It reads what no description can describe line by line; test_parsers.py does that.
UPLOAD: Final = "/v1/import"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceThread]:
    """A service that solves for no promise longer than a second, or not at all: most made up would take minutes."""
    monkeypatch.setattr(state, "Solver", partial(Solver, seconds=1 if FULL else 0, timeout=60.0))
    with ServiceThread(f"sqlite:///{tmp_path}/served.db") as running:
        yield running


@pytest.fixture
def owner(served: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(served) as client:
        for name in ("census", "income"):
            attacks.open_account(client, name)
        for key in ("r-1", "r-2"):
            form = {"cost": attacks.pure("0.01")}
            assert attacks.post(client, "/v1/accounts/census/reservations", form, key=key).status_code == 201
        yield client


def aimed(owner: httpx.Client) -> dict[str, Any]:
    """Return the description with names that are there, so that not all is spent on accounts that are not."""
    found: dict[str, Any] = owner.get("/v1/openapi.json").json()
    places = {"name": NAMES, "reservation": ["census#1", "census#2", "nothing#1"], "entry": ["census#0", "income#1"]}
    for operations in found["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] in places:
                    parameter["schema"] = {"enum": places[parameter["name"]]}
    schemas = found["components"]["schemas"]
    for name in ("SpendAllForm", "ReserveAllForm", "CostsForm", "BatchItem"):
        schemas[name]["properties"]["costs"]["propertyNames"] = {"enum": NAMES}
    return found


def schemathesis(service: ServiceThread, description: Any, folder: Path, *options: str) -> tuple[bool, str]:  # noqa: ANN401  JSON
    """Say whether everything was as it should be, and what schemathesis reports."""
    (folder / "schemathesis.toml").write_text(CONFIGURATION, encoding="utf-8")
    written = folder / "openapi.json"
    written.write_text(json.dumps(description), encoding="utf-8")
    command = [str(PROGRAM), "run", str(written), "--url", service.url, "--seed", "1", "--request-timeout", "60"]
    command += ["--header", f"Authorization: Bearer {service.token('fuzz')}", "--generation-database", "none"]
    command += ["--checks", "all", "--exclude-checks", LEFT_OUT, "--exclude-path", UPLOAD, "--no-color", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)  # noqa: S603  our own
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_service_keeps_to_its_description_and_never_fails(
    served: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    phases = "examples,coverage,fuzzing,stateful" if FULL else "examples,fuzzing"
    options = ["--phases", phases, "--max-examples", "200" if FULL else "2", "--continue-on-failure"]
    # A key that it makes and revokes is its own business; its own key it must keep.
    description = aimed(owner)
    fine, report = schemathesis(served, description, tmp_path, *options, "--exclude-operation-id", "revoke_key")
    listed = sum(map(len, description["paths"].values()))
    assert f"Operations:       {listed - 2} selected / {listed} total" in report, report
    assert fine, report
    assert attacks.post(owner, "/v1/verify", {}).status_code == 200


QUICK: Final = ("--phases", "coverage,fuzzing", "--max-examples", "3", "--include-path", "/v1/me")


def test_the_check_itself_finds_nothing_wrong_with_one_route(
    served: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    fine, report = schemathesis(served, aimed(owner), tmp_path, *QUICK)
    assert fine, report


@pytest.mark.parametrize("broken", ["type", "failure", "open"])
def test_a_service_that_does_not_keep_to_its_description_would_be_caught(
    served: ServiceThread, owner: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    description = aimed(owner)
    if broken == "type":
        monkeypatch.setattr(Caller, "to_dict", lambda _: {"principal": 5})
    if broken == "failure":
        monkeypatch.setattr(Caller, "to_dict", lambda _: 1 // 0)
    if broken == "open":
        admitted = endpoint.Endpoint._authenticate  # noqa: SLF001  what is broken on purpose

        async def careless(self: endpoint.Endpoint, scope: Any, _: Any) -> Any:  # noqa: ANN401
            return await admitted(self, scope, {b"authorization": owner.headers["Authorization"].encode()})

        monkeypatch.setattr(endpoint.Endpoint, "_authenticate", careless)
    fine, report = schemathesis(served, description, tmp_path, *QUICK)
    assert not fine, report


def test_the_description_has_every_route_and_nothing_secret(owner: httpx.Client) -> None:
    answer = owner.get("/v1/openapi.json")
    described = {(method.upper(), path) for path, methods in answer.json()["paths"].items() for method in methods}
    assert described >= {(route.method, route.path) for route in ROUTES}
    assert "odo_" not in answer.text
    assert "sqlite" not in answer.text
