"""A signal handler or a finalizer that uses the ledger in the middle of a request of its own thread is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

PROGRAMS: Final = Path(__file__).parent / "programs"
PROCESS_TIMEOUT: Final = (
    300 if os.environ.get("ODOGRAPH_FULL") == "1" else 40
)  # seconds; a thousand signals take a minute
WRITES: Final = ("spend", "other", "reserve", "open", "close")
READS: Final = ("totals", "history", "verify", "export")


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def any_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty ledger."""
    if request.param == "postgres":
        found: str = request.getfixturevalue("database")
        return found
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/ledger.db"


def reentrant(url: str, where: str, defect: str = "", timeout: int = PROCESS_TIMEOUT) -> list[tuple[str, str]]:
    """Run the program, and return what came of each request."""
    command = [sys.executable, str(PROGRAMS / "reentrant.py"), url, defect, str(timeout), where]
    done = subprocess.run(  # noqa: S603  our own code
        command, capture_output=True, text=True, check=False, timeout=timeout + 30
    )
    assert done.returncode == 0, done.stderr[-9000:]
    return [(key, what) for key, what in map(json.loads, done.stdout.splitlines())]


def check(lines: list[tuple[str, str]]) -> dict[str, str]:
    """What was acknowledged is charged, once, and what was refused is not."""
    *asked, (last, keys) = lines
    assert last == "charged"
    charged = Counter(keys.split())
    assert set(charged.values()) == {1}
    outcomes = dict(asked)
    for key, what in outcomes.items():
        if key.startswith(("outer", "main", "thread")) and what == "done":
            assert key in charged, key
        if what == "LedgerBusy" and key.startswith("inner"):
            assert key not in charged, key
    return outcomes


def test_a_request_in_the_middle_of_another_is_busy(any_store_url: str) -> None:
    outcomes = check(reentrant(any_store_url, "inside"))
    for how in ("signal", "finalizer", "uncaught"):
        for verb in WRITES:
            assert outcomes[f"inner-{how}-{verb}"] == "LedgerBusy", (how, verb)
            assert outcomes[f"outer-{how}-{verb}"] == ("LedgerBusy" if how == "uncaught" else "done"), (how, verb)
        for verb in READS:  # whatever it needs may be free
            assert outcomes[f"inner-{how}-{verb}"] in ("LedgerBusy", "done"), (how, verb)


def test_a_request_from_a_signal_handler_never_blocks(any_store_url: str) -> None:
    outcomes = check(reentrant(any_store_url, "anywhere"))
    inner = Counter(what for key, what in outcomes.items() if key.startswith("inner"))
    assert inner["LedgerBusy"] > 0
    assert set(inner) <= {"LedgerBusy", "done", "OutcomeUnknown"}
    assert {what for key, what in outcomes.items() if not key.startswith("inner")} == {"done"}


def test_a_ledger_that_lets_them_in_is_caught(any_store_url: str) -> None:
    with pytest.raises(AssertionError, match="Timeout"):
        reentrant(any_store_url, "inside", "reentrant", 4)


def test_a_ledger_that_lets_them_in_at_some_moments_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"Timeout|within a transaction"):
        reentrant(f"sqlite:///{tmp_path}/ledger.db", "anywhere", "reentrant", 4)
