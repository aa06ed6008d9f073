from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Solved budgets go to a folder of this run: no test depends on what a machine solved before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ODOGRAPH_CACHE", str(tmp_path_factory.mktemp("budgets")))
        yield


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new, empty ledger can be: every test that asks for this runs on every store."""
    return {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/ledger.db"}[request.param]
