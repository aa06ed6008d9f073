"""Fixtures: populations on every engine, each test with a ledger and a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from population_helpers import ENGINES, PopulationFactory, ledger_in, small_session


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session; of a module, because a process has one at a time, and other modules have theirs."""
    with small_session(tmp_path_factory.mktemp("spark")) as running:
        yield running


@pytest.fixture
def populations(request: pytest.FixtureRequest, engine: str, tmp_path: Path) -> Iterator[PopulationFactory]:
    """Populations on every engine."""
    running = request.getfixturevalue("spark") if engine == "spark" else None
    with ledger_in(tmp_path) as ledger:
        yield PopulationFactory(engine, ledger, tmp_path, running)


@pytest.fixture
def dense(tmp_path: Path) -> Iterator[PopulationFactory]:
    """Populations of the NumPy engine, for what is the same on all."""
    with ledger_in(tmp_path) as ledger:
        yield PopulationFactory("numpy", ledger, tmp_path)
