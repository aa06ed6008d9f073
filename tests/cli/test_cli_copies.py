"""Copies and checkpoints from the command line: a copy never gives spent budget back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from odograph.cli.app import app

NEW = ("--url", "sqlite:///new.db")


@pytest.fixture(autouse=True)
def _spent_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ODOGRAPH_URL", raising=False)
    done("open", "census", "--epsilon", "1", "--delta", "1e-6")
    done("spend", "census", "--pure", "0.4", "--key", "q-1", "--note", "rows")
    done("checkpoint", "--out", "kept.json")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def done(*arguments: str) -> str:
    code, output, errors = run(*arguments)
    assert (code, errors) == (0, ""), errors
    return output


def document(*arguments: str) -> dict[str, Any]:
    form: dict[str, Any] = json.loads(done(*arguments, "--json"))
    return form


def copied(way: str) -> tuple[str, ...]:
    """Make a copy, and return the command that reads it."""
    if way == "export":
        assert done("export", "--out", "copy.jsonl").startswith("wrote copy.jsonl: 1 account, head ")
        return "import", "copy.jsonl"
    assert done("backup", "copy.db").startswith("wrote copy.db: 1 account, head ")
    return "restore", "copy.db"


@pytest.mark.parametrize("way", ["export", "backup"])
def test_a_copy_without_a_checkpoint_is_closed(way: str) -> None:
    assert "every account is closed" in done(*copied(way), *NEW)
    assert document("show", "census", *NEW)["account"]["closed"] is True
    assert run("spend", "census", "--pure", "0.1", *NEW)[0] == 5
    assert "1 account " in done("verify", *NEW)


@pytest.mark.parametrize("way", ["export", "backup"])
def test_a_current_copy_goes_on_where_the_original_stood(way: str) -> None:
    form = document(*copied(way), "--checkpoint", "kept.json", *NEW)
    assert (form["verified"], form["closed"], form["entries"]) == (True, False, 2)
    assert document("show", "census", *NEW)["meters"]["epsilon"]["spent"] == 0.4
    assert document("spend", "census", "--pure", "0.4", "--key", "q-1", *NEW)["repeated"] is True


@pytest.mark.parametrize("way", ["export", "backup"])
def test_a_copy_behind_its_checkpoint_is_refused(way: str) -> None:
    command = copied(way)
    done("spend", "census", "--pure", "0.1")
    done("checkpoint", "--out", "later.json")
    code, output, errors = run(*command, "--checkpoint", "later.json", *NEW)
    assert (code, output) == (5, "")
    assert "behind its checkpoint" in errors
    assert run("show", "census", *NEW)[0] == 5
    # With the older checkpoint the same copy is taken: it is the later one that refuses it.
    done(*command, "--checkpoint", "kept.json", "--url", "sqlite:///other.db")


def test_copies_never_write_over_a_file() -> None:
    for way in ("export", "backup"):
        copied(way)
    before = {name: Path(name).read_bytes() for name in ("copy.db", "copy.jsonl")}
    assert run("backup", "copy.db")[0] == 2
    assert run("export", "--out", "copy.jsonl")[0] == 2
    assert {name: Path(name).read_bytes() for name in before} == before
    assert Path("copy.jsonl").stat().st_mode & 0o077 == 0


def test_an_export_can_be_printed() -> None:
    copied("export")
    assert done("export") == Path("copy.jsonl").read_text()


def test_a_copy_is_only_read_into_a_new_ledger() -> None:
    code, _, errors = run(*copied("export"))
    assert code == 5
    assert "is not empty" in errors


def test_a_printed_checkpoint_is_the_written_one() -> None:
    assert json.loads(done("checkpoint")) == document("checkpoint") == json.loads(Path("kept.json").read_text())


def test_verify_with_a_checkpoint_sees_what_was_cut_off() -> None:
    earlier = Path("privacy.db").read_bytes()
    done("spend", "census", "--pure", "0.1", "--key", "q-2")
    done("checkpoint", "--out", "later.json")
    for kept in ("kept.json", "later.json"):
        assert "since the checkpoint" in done("verify", "--checkpoint", kept)
    # The broken twin: the file as it was before the last charge. By itself it is in order.
    Path("privacy.db").write_bytes(earlier)
    assert "verified: 2 entries" in done("verify")
    code, output, errors = run("verify", "--checkpoint", "later.json")
    assert (code, output) == (5, "")
    assert "behind its checkpoint: entry census#2 is missing" in errors


def test_a_file_that_is_no_checkpoint_is_said_to_be_none() -> None:
    Path("other.json").write_text("[")
    assert "wrote (got 'other.json'" in run("verify", "--checkpoint", "other.json")[2]
    Path("other.json").write_text(Path("kept.json").read_text().replace('"1"', '"0"'))
    code, _, errors = run("verify", "--checkpoint", "other.json")
    assert code == 5
    assert "damaged or changed" in errors
