"""`odograph doctor`: a wrong clock, a network file system and a log that grows are named; all else is in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli import records
from odograph.cli.app import app

YEAR = 365 * 86400 * 10**9
MOUNTS = """22 1 0:21 / / rw - ext4 /dev/root rw
30 22 0:40 / {folder} rw,relatime shared:7 - {kind} server:/export rw
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A ledger with one charge."""
    url = f"sqlite:///{tmp_path}/a folder/ledger.db"
    (tmp_path / "a folder").mkdir()
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic")).spend(odo.PureDP("0.1"))
        yield url


def run(command: str, url: str, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [command, "--url", url, *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not result.stderr
    return result.exit_code, result.stdout


def test_a_ledger_in_order_has_nothing_to_be_done(url: str) -> None:
    code, text = run("doctor", url)
    assert code == 0
    assert f"ledger: {url}, entries: 2, accounts: 1\nschema: " in text
    assert "\nclock: the last entry is of 20" in text
    code, text = run("doctor", url, "--json")
    assert code == 0
    assert [one["advice"] for one in json.loads(text)["findings"]] == [None] * 5


def test_a_ledger_behind_a_service_is_looked_at_too(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    token = service.token("ana")
    with odo.connect(service.url, token=token) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    monkeypatch.setenv("ODOGRAPH_TOKEN", token)
    code, text = run("doctor", service.url)
    assert code == 0
    assert [line.partition(":")[0] for line in text.splitlines()] == ["ledger", "clock"]


def test_a_clock_that_was_ahead_is_named_until_later_entries_have_the_right_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    with odo.connect(url, principal="ana") as ledger, monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now + 73 * YEAR)
        year = ledger.account("census").spend(odo.PureDP("0.1")).time.year
        assert year > 2090
    code, text = run("doctor", url)
    assert code == 5
    assert f"the last entries of census ({year}-" in text
    assert "Set the clock; later entries will have its time" in text
    code, text = run("verify", url)
    assert code == 0
    assert f"the last entries of census ({year}-" in text
    assert json.loads(run("verify", url, "--json")[1])["clock"]["advice"]
    with odo.connect(url, principal="ana") as ledger:
        ledger.account("census").spend(odo.PureDP("0.1"))
    assert run("doctor", url)[0] == 0
    code, text = run("verify", url)
    assert code == 0
    assert "the clock was set back before census#3: times before or after it are wrong" in text
    assert json.loads(run("verify", url, "--json")[1])["set_back"] == ["census#3"]


@pytest.mark.parametrize(("kind", "expected"), [("nfs4", 5), ("xfs", 0)])
def test_a_network_file_system_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: int
) -> None:
    mounts = tmp_path / "mounts"
    folder = str(tmp_path / "a folder").replace(" ", "\\040")
    mounts.write_text(MOUNTS.format(folder=folder, kind=kind), encoding="utf-8")
    monkeypatch.setattr(records, "_MOUNT_INFO", mounts)
    code, text = run("doctor", url)
    assert code == expected
    assert f"file system: {kind}" in text
    assert ("must not be used over a network" in text) == (expected == 5)


def test_a_system_that_does_not_say_what_is_mounted_is_no_fault(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOUNT_INFO", tmp_path / "nothing")
    code, text = run("doctor", url)
    assert code == 0
    assert "file system: unknown" in text


def test_a_log_that_is_kept_from_being_written_back_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_WAL_SIZE_WARNING", 0)
    code, text = run("doctor", url)
    assert code == 5
    assert "a program keeps reading" in text


def test_many_accounts_ahead_are_counted() -> None:
    with odo.connect("memory://") as ledger:
        for number in range(5):
            ledger.open_account(f"a{number}", odo.Policy(1, 0, filter="basic"))
        found = records.examine_clock(ledger.backend.balances().values(), 0)
    assert "and 2 more are later than the present time, 1970-01-01 00:00:00 UTC" in found.found
    assert records.examine_clock([], 0) == ("clock", "there are no entries", "")
