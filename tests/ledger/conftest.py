"""Fixtures: a new ledger on every store and behind a service, and a filled SQLite file to tamper with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ledger_forgery import fill, verified
from service_server import ServiceThread

import odograph as odo
from odograph import Checkpoint, Ledger


@pytest.fixture(params=["memory", "sqlite", "postgres", "service"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty ledger on every store, and of a service, which has the same verbs."""
    if request.param == "service":
        service: ServiceThread = request.getfixturevalue("service")
        return service.url
    if request.param == "postgres":
        database: str = request.getfixturevalue("postgres_url")
        return database
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def token(request: pytest.FixtureRequest, where: str) -> str | None:
    """The API key, if the ledger is behind a service."""
    if not where.startswith("http"):
        return None
    service: ServiceThread = request.getfixturevalue("service")
    return service.token("ana")


def reach_at(where: str, token: str | None) -> Ledger:
    """Connect as ana."""
    return odo.connect(where, token=token) if token else odo.connect(where, principal="ana")


@pytest.fixture
def ledger(where: str, token: str | None) -> Iterator[Ledger]:
    """A new, empty ledger, on every store and behind a service."""
    with reach_at(where, token) as found:
        yield found


@pytest.fixture
def again(ledger: Ledger, where: str, token: str | None) -> Iterator[Callable[[], Ledger]]:
    """Return a function that connects to the same ledger anew; in memory there is only the one."""
    with ExitStack() as stack:

        def reach() -> Ledger:
            if where == "memory://":
                return ledger.acting_as("ana")
            return stack.enter_context(reach_at(where, token))

        yield reach


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite file with every verb in it, to tamper with."""
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db", principal="ana") as ledger:
        fill(ledger)
    return tmp_path / "ledger.db"


@pytest.fixture
def checkpoint(file: Path) -> Checkpoint:
    """The checkpoint of that file."""
    return verified(file)
