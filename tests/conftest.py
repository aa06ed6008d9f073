from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psycopg
import pytest
from hypothesis import settings
from postgres_server import PostgresServer

if TYPE_CHECKING:
    from service_server import ServiceThread

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Solved budgets go to a folder of this run: no test depends on what a machine solved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODOGRAPH_CACHE", str(tmp_path_factory.mktemp("budgets")))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, for the whole run."""
    with PostgresServer() as server:
        yield server
        server.kill()  # an orderly end would write out every database, and nobody wants them any more


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A new, empty database."""
    name = f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return urlsplit(postgres.url)._replace(path=f"/{name}").geturl()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceThread]:
    """A service over a new, empty SQLite file, on a free port of this machine."""
    from service_server import ServiceThread  # noqa: PLC0415  Tumult's tests run where there is no service

    with ServiceThread(f"sqlite:///{tmp_path}/served.db") as running:
        yield running


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new, empty ledger can be: every test that asks for this runs on every store."""
    if request.param == "postgres":
        where: str = request.getfixturevalue("postgres_url")
        return where
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"
