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

# What `make quick` leaves out: what needs a server, a browser, another engine or program, simulations, and the checks
# of prices at many digits.
SLOW_FOLDERS = {"crash", "deploy", "docs", "integrations", "release", "service", "support"}
SLOW_FILES = {
    "test_crossings.py",
    "test_demo.py",
    "test_duckdb_engine.py",
    "test_figures.py",
    "test_individual_filters.py",
    "test_ledger_large.py",
    "test_population_crash.py",
    "test_population_lease.py",
    "test_population_objects.py",
    "test_population_service.py",
    "test_reserve_with_tail.py",
    "test_smooth_prices.py",
    "test_spark_engine.py",
    "test_training.py",
    "test_zcdp_price.py",
}
SLOW_FIXTURES = {"postgres", "service"}
SLOW_PARAMETERS = {"async service", "duckdb", "postgres", "service", "spark"}

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def is_quick(item: pytest.Item) -> bool:
    """Whether a test is short, and needs nothing but this process and at most a SQLite file."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("long"):
        return False
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return not (
        (SLOW_FOLDERS | SLOW_FILES) & {*item.path.parts}
        or SLOW_FIXTURES & {*item.fixturenames}
        or any(isinstance(one, str) and one in SLOW_PARAMETERS for one in parameters)
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the fast lane."""
    for item in items:
        if is_quick(item):
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep solved budgets in a folder of this run: no test depends on what was solved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODOGRAPH_CACHE", str(tmp_path_factory.mktemp("budgets")))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL server, for the whole run."""
    with PostgresServer() as server:
        yield server
        server.kill()  # an orderly end would write out every database


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

    with ServiceThread(f"sqlite:///{tmp_path}/served.db", population_root=tmp_path / "populations") as running:
        yield running


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty ledger; a test that uses this runs on every store."""
    if request.param == "postgres":
        where: str = request.getfixturevalue("postgres_url")
        return where
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"
