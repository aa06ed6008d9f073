"""Fixtures: a new ledger on every store, and a filled file for whoever tampers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forging import fill, verified

import odograph as odo
from odograph import Checkpoint, Ledger


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A new, empty ledger, on every store."""
    with odo.connect(url, principal="ana") as found:
        yield found


@pytest.fixture
def again(ledger: Ledger, url: str) -> Iterator[Callable[[], Ledger]]:
    """Reach the same ledger anew: over a connection of its own, except in memory, where there is one only."""
    with ExitStack() as stack:

        def reach() -> Ledger:
            if url == "memory://":
                return ledger.acting_as("ana")
            return stack.enter_context(odo.connect(url, principal="ana"))

        yield reach


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite file with every verb in it, for whoever tampers."""
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db", principal="ana") as ledger:
        fill(ledger)
    return tmp_path / "ledger.db"


@pytest.fixture
def checkpoint(file: Path) -> Checkpoint:
    """Where that file stood before."""
    return verified(file)
