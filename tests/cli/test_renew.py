"""`odograph renew` and schedules in the file of `odograph apply`: what is declared, opened, compared and printed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from service_process import PROGRAM
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app

FILE = """\
accounts:
  census:
    epsilon: 1
    delta: 1e-6
    filter: basic
    parent: whole
    dataset: people
    renew: monthly
    from: 2026-11-01
    times: 12
  whole:
    epsilon: 8
    delta: 1e-5
    filter: basic
"""
PROMISE = (
    "census: lifetime promise: at most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP,"
    " monthly from 2026-11-01 to 2027-11-01"
)


def at(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    """Set the clock of SQLite's store."""
    now = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: now)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty ledger in SQLite, on a day of November."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("ODOGRAPH_URL", f"sqlite:///{tmp_path}/ledger.db")
    at(monkeypatch, "2026-11-10")
    return f"sqlite:///{tmp_path}/ledger.db"


def run(*arguments: str, typed: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def done(*arguments: str, text: str = FILE) -> list[str]:
    code, output, errors = run(*arguments, typed=text)
    assert (code, errors) == (0, "")
    return output.splitlines()


def names() -> dict[str, bool]:
    """Return every account, and whether it is closed."""
    return {row["name"]: row["closed"] for row in json.loads(done("accounts", "--json")[0])["accounts"]}


def test_apply_opens_the_current_epoch_and_prints_the_lifetime_promise(url: str) -> None:
    lines = done("apply", "-", "--dry-run")
    kept = "below whole as a block of people: (1, 1e-06)-DP for each person (add-remove), by the filter basic"
    assert lines[1:3] == [f"census@2026-11-01: would be opened {kept}", PROMISE]
    assert not Path("ledger.db").exists()
    assert done("apply", "-")[1:3] == [f"census@2026-11-01: opened {kept}", PROMISE]
    assert names() == {"census@2026-11-01": False, "whole": False}
    assert done("apply", "-") == [
        "census: nothing to do: census@2026-11-01 is there until 2026-12-01",
        PROMISE,
        "1 account there already: whole",
        f"{url} is as the file says",
    ]
    assert "at most (12, 1.2e-05)-DP" in "\n".join(done("show", "census@2026-11-01"))
    assert "at most (12, 1.2e-05)-DP" in "\n".join(done("spend", "census@2026-11-01", "--pure", "0.1"))


@pytest.mark.usefixtures("url")
def test_renew_opens_the_next_epoch_and_closes_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    done("apply", "-")
    at(monkeypatch, "2026-12-01")
    dry = done("renew", "-", "--dry-run")
    assert dry[0].startswith("census@2026-12-01: would be opened below whole after census@2026-11-01 as a block")
    assert dry[1:3] == ["census@2026-11-01: would be closed: its epoch is over", PROMISE]
    assert names()["census@2026-11-01"] is False
    lines = done("renew", "-")
    assert lines[0].startswith("census@2026-12-01: opened below whole after census@2026-11-01 as a block of people")
    assert lines[1:] == ["census@2026-11-01: closed: its epoch is over", PROMISE]
    assert names() == {"census@2026-11-01": True, "census@2026-12-01": False, "whole": False}
    (form,) = map(json.loads, done("renew", "-", "--json"))
    assert form["renewed"] == [
        {
            "account": "census",
            "opened": "",
            "closed": [],
            "current": "census@2026-12-01",
            "lifetime_promise": PROMISE.removeprefix("census: lifetime promise: "),
        }
    ]
    at(monkeypatch, "2026-11-10")
    assert done("renew", "-")[0] == (
        "census: nothing to do: there is census@2026-12-01, which is later than the clock, so census@2026-11-01 is"
        " not opened any more"
    )
    at(monkeypatch, "2027-11-01")
    assert done("renew", "-")[0] == "census@2026-12-01: closed: its epoch is over"
    assert done("renew", "-")[0] == (
        "census: nothing to do: it is not between the first and the last day of the schedule, monthly from"
        " 2026-11-01, 12 times"
    )


@pytest.mark.usefixtures("url")
def test_declare_writes_the_schedule_and_apply_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done("apply", "-")
    at(monkeypatch, "2026-12-01")
    done("renew", "-")
    written = "\n".join(done("declare"))
    assert "  census:\n    epsilon: 1\n    delta: 1e-06\n    filter: basic\n    parent: whole\n" in written
    assert "    renew: monthly\n    from: 2026-11-01\n    times: 12" in written
    assert "@" not in written
    before = done("checkpoint", "--json")
    assert done("apply", "-", text=written)[0].startswith("census: nothing to do")
    assert done("checkpoint", "--json") == before


@pytest.mark.usefixtures("url")
def test_a_schedule_that_would_change_a_promise_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done("apply", "-")
    at(monkeypatch, "2026-12-01")
    schedule = "renew: the ledger has monthly from 2026-11-01, 12 times, the file says monthly from 2026-11-01"
    for old, new, difference in (
        ("times: 12", "times: 13", f"{schedule}, 13 times"),
        ("    times: 12\n", "", f"{schedule}. The promise of a schedule never changes"),
        ("epsilon: 1", "epsilon: 2", "epsilon: the ledger has 1, the file says 2"),
        ("dataset: people", "dataset: others", "dataset: the ledger has people, the file says others"),
    ):
        code, output, errors = run("renew", "-", typed=FILE.replace(old, new))
        assert (code, errors) == (5, "")
        assert f"census@2026-11-01: {difference}" in output
    assert run("apply", "-", typed=FILE.replace("times: 12", "times: 13"))[0] == 5
    assert list(names()) == ["census@2026-11-01", "whole"]


@pytest.mark.usefixtures("url")
def test_names_that_a_schedule_needs_must_be_free() -> None:
    whole = FILE.partition("  whole:")[2]
    done("open", "census@2026-11-01", "--epsilon", "1", "--delta", "0", "--filter", "basic")
    done("open", "census", "--epsilon", "1", "--delta", "0", "--filter", "basic")
    code, output, _ = run("apply", "-", typed=FILE)
    assert code == 5
    assert "census@2026-11-01: renew: the ledger has an account that does not renew" in output
    assert "census: renew: the ledger has an account that does not renew" in output
    code, _, errors = run("apply", "-", typed=f"{FILE}  census@2027-01-01:{whole}")
    assert code == 2
    assert "accounts.census@2027-01-01 has a name that the schedule of 'census' gives" in errors
    code, output, _ = run("apply", "-", typed=FILE.replace("census:", "other:").replace("whole:", "top:"))
    assert code == 5
    assert "other: parent: the ledger has no such account, the file says whole" in output


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("renew: monthly", "renew: yearly", "line 8: accounts.census.renew cannot be read: renew must be one of"),
        ("from: 2026-11-01", "from: soon", "line 9: accounts.census.from cannot be read: from must be a date"),
        ("    from: 2026-11-01\n", "", "accounts.census cannot be read: from must be a date such as 2026-11-01"),
        ("times: 12", "times: 0", "line 10: accounts.census.times cannot be read: times must be an integer from 1"),
        ("times: 12", "times: 1\n    until: 2027-01-01", "times ('1') and until ('2027-01-01') exclude each other"),
        ("    renew: monthly\n", "", "line 8: accounts.census.from needs renew: daily, weekly or monthly"),
        ("times: 12", "closed: true", "line 10: accounts.census.closed cannot be given with renew: the schedule"),
        ("  census:", f"  {'c' * 95}:", "cannot be read: name must be 1 to 100 letters"),
    ],
)
def test_a_wrong_schedule_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    code, output, errors = run("apply", "-", typed=FILE.replace(old, new))
    assert (code, output) == (2, "")
    assert message in errors
    assert not Path("ledger.db").exists()


@pytest.mark.usefixtures("url")
def test_renew_needs_a_schedule() -> None:
    code, _, errors = run("renew", "-", typed=FILE.partition("    renew:")[0])
    assert code == 2
    assert "must have an account with `renew`, such as `renew: monthly` (got none)" in errors


def test_over_http_the_current_account_is_found_and_nothing_is_renewed(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODOGRAPH_TOKEN", service.token())
    code, output, errors = run("apply", "-", "--url", service.url, typed=FILE)
    assert (code, output) == (2, "")
    assert "--url must be the database of the ledger, SQLite or PostgreSQL, where budgets renew" in errors
    policy = odo.Policy(1, 0, filter="basic")
    with odo.connect(service.url, token=service.token("ana")) as ledger:
        for name in ("census@2026-11-01", "census@2026-12-01"):
            ledger.open_account(name, policy)
        assert ledger.current("census").name == "census@2026-12-01"

    async def newest() -> str:
        async with odo.aconnect(service.url, token=service.token("ana")) as ledger:
            return (await ledger.current("census")).name

    assert asyncio.run(newest()) == "census@2026-12-01"


def test_two_programs_that_renew_at_once_open_one_account(postgres_url: str, tmp_path: Path) -> None:
    file = tmp_path / "accounts.yaml"
    file.write_text(FILE.replace("times: 12", "").replace("monthly", "daily"))
    whole = odo.Policy(8, "1e-5", filter="basic")
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("whole", whole)
        command = [str(PROGRAM), "renew", str(file), "--url", postgres_url, "--json"]
        programs = [
            subprocess.Popen([*command, "--principal", name], stdout=subprocess.PIPE)  # noqa: S603  the program itself
            for name in ("ana", "ben")
        ]
        outputs = [one.communicate(timeout=60)[0] for one in programs]
        assert [one.returncode for one in programs] == [0, 0]
        forms: list[dict[str, Any]] = [json.loads(one)["renewed"][0] for one in outputs]
        accounts = [one.name for one in ledger.accounts() if one.name != "whole"]
        assert {form["current"] for form in forms} == {accounts[-1]}
        assert sorted(bool(form["opened"]) for form in forms)[1]
        assert len(accounts) - 1 == sum(one.closed for one in ledger.accounts())
        ledger.verify()
