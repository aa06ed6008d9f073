"""`odograph population`: the same commands on a ledger with files of this machine, and on a service."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app
from odograph.population.engines.duckdb import write_upload


@pytest.fixture(params=["local", "service"])
def create(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options with which a population is created, where the environment leads to a ledger or a service."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    if request.param == "service":
        service: ServiceThread = request.getfixturevalue("service")
        monkeypatch.setenv("ODOGRAPH_URL", service.url)
        monkeypatch.setenv("ODOGRAPH_TOKEN", service.token("ana"))
        return []
    monkeypatch.setenv("ODOGRAPH_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setenv("ODOGRAPH_PRINCIPAL", "ana")
    return ["--location", "people"]


def run(*arguments: str, code: int = 0) -> str:
    """Run a command and return what it prints."""
    done = CliRunner().invoke(app, ["population", *arguments])
    assert done.exit_code == code, done.output
    return done.output


def ids_of(text: str) -> list[Any]:
    return sorted(json.loads(line) for line in text.splitlines())


def test_a_population_from_its_creation_to_its_rounds(
    create: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    engine = "numpy" if create else "duckdb"
    promise = ("--epsilon", "1", "--delta", "1e-6", "--filter", "basic")
    made = run("create", "people", *promise, "--engine", engine, *create)
    assert "(1, 1e-06)-DP for each person" in made
    assert "joined now: round 1 of people" in run("join", "people", "--count", "6", "--key", "join")
    if not create:  # rounds are charged by a runner's key, who alone sees who takes part
        run("charge", "people", "--pure", "0.0001", "--key", "by the owner")
        assert "may not see-participants" in run("participants", "people", "by the owner", code=4)
        service: ServiceThread = request.getfixturevalue("service")
        monkeypatch.setenv("ODOGRAPH_TOKEN", service.token("ana", "runner", "people"))
    assert "charged now" in run("charge", "people", "--pure", "0.3", "--key", "monday", "--note", "weekly")
    assert "charged before" in run("charge", "people", "--pure", "0.3", "--key", "monday")
    write_upload(
        {"id": [1, 4], "which": [0, 1]}, {"guarantees": _guarantees("0.5", "0.8")}, tmp_path / "asked.parquet"
    )
    form = json.loads(run("charge", "people", "--prices", "asked.parquet", "--key", "tuesday", "--json"))
    assert (form["key"], form["repeated"]) == ("tuesday", False)
    assert ids_of(run("participants", "people", "monday")) == [0, 1, 2, 3, 4, 5]
    run("participants", "people", "tuesday", "--out", "took.txt")
    assert ids_of(Path("took.txt").read_text()) == [1]
    assert Path("took.txt").stat().st_mode & 0o077 == 0
    assert "removed now" in run("remove", "people", "--ids", "took.txt", "--key", "forget")
    shown = run("show", "people")
    assert "(1, 1e-06)-DP for each person" in shown
    assert all(word in shown for word in ("monday", "weekly", "PureDP(0.3)", "individual", "remove"))
    rounds = json.loads(run("rounds", "people", "--first", "-3", "--json"))["rounds"]
    assert [(one["act"], one["key"]) for one in rounds] == [
        ("charge", "monday"),
        ("charge", "tuesday"),
        ("remove", "forget"),
    ]
    assert rounds[1]["cost"] is None


def test_wrong_options_say_what_to_pass(create: list[str]) -> None:
    promise = ("--epsilon", "1", "--delta", "1e-6")
    if create:
        assert "location must be the path of a new folder" in run("create", "people", *promise, code=2)
    else:
        assert "location must be left out for a service" in run("create", "p", *promise, "--location", "x", code=2)
    run("create", "people", *promise, *create)
    assert "pass --ids FILE" in run("join", "people", "--key", "q", code=2)
    assert "not both" in run("charge", "people", "--pure", "1", "--prices", "x", "--key", "q", code=2)
    assert "exactly one cost" in run("charge", "people", "--key", "q", code=2)
    run("rounds", "nothing", code=5)


def test_a_wrong_file_of_people_is_refused_with_its_line_and_without_the_id(
    create: list[str], tmp_path: Path
) -> None:
    run("create", "people", "--epsilon", "1", "--delta", "1e-6", *create)
    for content, line in ((b"0\nana\n", 2), (b"id\n0\n", 1), (b"[" * 100_000, 1), (b"\xff", 1)):
        (tmp_path / "ids.txt").write_bytes(content)
        for command in ("join", "remove"):
            said = " ".join(run(command, "people", "--ids", "ids.txt", "--key", "q", code=2).split())
            assert "--ids ids.txt must be Parquet, or have an id on each line: a number, or a string in" in said
            assert f"(line {line} has none)" in said
            assert "ana" not in said
    write_upload({"which": [0]}, {}, tmp_path / "ids.parquet")
    assert "must have the column id" in run("join", "people", "--ids", "ids.parquet", "--key", "q", code=2)
    run("join", "people", "--ids", "nothing.txt", "--key", "q", code=2)
    assert len(json.loads(run("rounds", "people", "--json"))["rounds"]) == 1


RENEWS = ("--renew", "monthly", "--from", "2026-11-01", "--times", "12")


def test_a_population_renews_and_an_epoch_is_retired(create: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    promise = ("--epsilon", "1", "--delta", "1e-6", "--filter", "basic")
    assert "need --renew: daily" in run("create", "visits", *promise, *create, "--times", "2", code=2)
    if not create:  # where the database and the files are
        assert "renew must be left out for a service" in run("create", "visits", *promise, *RENEWS, code=2)
        for command in (("renew", "visits"), ("retire", "visits@2026-12-01", "2026-11-01", "--key", "a")):
            assert "--url must be the database of the ledger" in run(*command, code=2)
        return
    now = [datetime(2026, 11, 10, tzinfo=UTC)]
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0].timestamp()) * 10**9)
    made = run("create", "visits", *promise, *RENEWS, *create)
    schedule = "at most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP, monthly from 2026-11-01 to 2027-11-01"
    assert "created the population visits@2026-11-01" in made
    assert schedule in made
    run("join", "visits@2026-11-01", "--count", "3", "--key", "join")
    run("charge", "visits@2026-11-01", "--pure", "0.7", "--key", "monday")
    assert "there is no population 'visit' that renews" in run("renew", "visit", code=5)
    now[0] = datetime(2026, 12, 1, tzinfo=UTC)
    renewed = json.loads(run("renew", "visits", "--json"))
    assert (renewed["population"], renewed["lifetime"]["schedule"]) == ("visits@2026-12-01", schedule)
    assert run("renew", "visits").startswith("current: visits@2026-12-01")
    run("charge", "visits@2026-12-01", "--pure", "0.7", "--key", "tuesday")
    assert ids_of(run("participants", "visits@2026-12-01", "tuesday")) == [0, 1, 2]
    retired = run("retire", "visits@2026-12-01", "2026-11-01", "--key", "retire")
    assert "retired 2026-11-01 now: round 5 of visits@2026-12-01" in retired
    assert "(got 2026-12-01)" in run("retire", "visits@2026-12-01", "2026-12-01", "--key", "retire", code=2)
    shown = run("show", "visits@2026-12-01")
    assert schedule in shown
    assert [one["act"] for one in json.loads(run("rounds", "visits@2026-12-01", "--json"))["rounds"]] == [
        "renew",
        "charge",
        "retire",
    ]


def _guarantees(*epsilons: str) -> str:
    return json.dumps([odo.PureDP(epsilon).to_dict() for epsilon in epsilons])
