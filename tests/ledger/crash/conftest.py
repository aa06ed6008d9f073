"""Fixtures: a new ledger URL per store, and a PostgreSQL server that the tests may kill."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from syscalls import build_shim

STORES = ["sqlite", "postgres"]


@pytest.fixture(scope="session")
def killable_server() -> Iterator[PostgresServer]:
    """A server of this folder's own: its tests kill and restart it."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled system-call shim."""
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def database(killable_server: PostgresServer) -> str:
    """The URL of a new, empty database."""
    name = f"ledger_{secrets.token_hex(8)}"
    with psycopg.connect(killable_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return killable_server.url.removesuffix("postgres") + name


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty ledger that several processes can reach."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    found: str = request.getfixturevalue("database")
    return found
