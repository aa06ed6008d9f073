"""The verbs of the command line do what the library's do, and leave with the exit code of the error table."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import odograph as odo
from odograph import LedgerAccount
from odograph.cli import options, records
from odograph.cli.app import app
from odograph.cli.records import chart
from odograph.core.guarantees import Interactive
from odograph.ledger.results import History

URL = "sqlite:///privacy.db"
MORE_DIGITS_THAN_A_FLOAT = "0.05000000000000000001"
THREE = odo.parallel([odo.PureDP(0.01)] * 3)


def nested(depth: int) -> str:
    return '{"form": 1, "kind": "interactive", "cost": ' * depth + "0" + "}" * depth


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ODOGRAPH_URL", "ODOGRAPH_PRINCIPAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "300")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def done(*arguments: str) -> str:
    code, output, errors = run(*arguments)
    assert (code, errors) == (0, ""), errors
    return output


def document(*arguments: str) -> dict[str, Any]:
    (line,) = done(*arguments, "--json").splitlines()
    form = json.loads(line)
    assert isinstance(form, dict)
    return form


def failed(expected: int, *arguments: str) -> str:
    code, output, errors = run(*arguments)
    assert (code, output) == (expected, ""), (code, output, errors)
    (line,) = errors.splitlines()
    assert line.startswith("odograph: ")
    return line


def opened(name: str = "census", *more: str) -> None:
    done("open", name, "--epsilon", "1", "--delta", "1e-6", *more)


def test_spending_is_what_the_library_reads() -> None:
    opened()
    assert "spent: PureDP(0.05) of census; entry census#1, key q-17" in done(
        "spend", "census", "--pure", "0.05", "--key", "q-17", "--note", "rows", "--principal", "ana"
    )
    with odo.connect(URL) as ledger:
        (past,) = ledger.account("census").history(1)
        assert (past.entry.verb, past.entry.guarantee) == ("spend", odo.PureDP("0.05"))
        assert (past.entry.key, past.principal, past.note) == ("q-17", "ana", "rows")


def test_the_same_key_charges_once() -> None:
    opened()
    ask = ("spend", "census", "--pure", "0.05", "--key", "q-17")
    first, again = document(*ask), document(*ask)
    assert (first["repeated"], again["repeated"]) == (False, True)
    assert first["id"] == again["id"] == "census#1"
    assert document("show", "census")["account"]["steps"] == 1
    assert "used before for another request" in failed(5, "spend", "census", "--pure", "0.06", "--key", "q-17")


@pytest.mark.parametrize(
    ("cost", "guarantee"),
    [
        (["--pure", "0.05"], odo.PureDP("0.05")),
        (["--pure", "1/30"], odo.PureDP("1/30")),
        (["--approx", "0.05,1e-9"], odo.ApproxDP("0.05", "1e-9")),
        (["--prob", "0.05, 1e-9"], odo.ProbDP("0.05", "1e-9")),
        (["--zcdp", "0.001"], odo.ZCDP("0.001")),
        (["--zcdp", "0.001,1e-9"], odo.ZCDP("0.001", "1e-9")),
        (["--gdp", "0.04"], odo.GDP("0.04")),
        (["--gaussian-sigma", "25"], odo.gaussian(25)),
        (["--gaussian-sigma", "25", "--sensitivity", "2"], odo.gaussian(25, 2)),
        (["--laplace-scale", "30", "--sensitivity", "0.5"], odo.laplace(30, "0.5")),
        (["--discrete-gaussian", "25"], odo.mechanisms.discrete_gaussian(25)),
        (["--discrete-gaussian", "25,2,3,0.5"], odo.mechanisms.discrete_gaussian(25, 2, 3, "0.5")),
        (["--discrete-gaussian", "25", "--sensitivity", "2"], odo.mechanisms.discrete_gaussian(25, 2)),
        (["--json-cost", json.dumps(THREE.to_dict())], THREE),
        (["--json-cost", json.dumps(Interactive(THREE).to_dict())], Interactive(THREE)),
        (
            ["--json-cost", '{"form": 1, "kind": "pure", "epsilon": 0.05000000000000000001}'],
            odo.PureDP(MORE_DIGITS_THAN_A_FLOAT),
        ),
    ],
)
def test_every_kind_of_cost_is_read_exactly(cost: list[str], guarantee: odo.Guarantee) -> None:
    opened("census", "--filter", "zcdp", "--delta-steps", "1e-7")
    receipt = document("spend", "census", *cost)
    assert odo.guarantees.guarantee_from_dict(receipt["accounts"][0]["cost"]) == guarantee


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ([], "pass exactly one cost, such as --pure 0.1: --pure"),
        (["--pure", "0.1", "--gdp", "0.1"], "(got --pure and --gdp)"),
        (["--pure", "much"], "(got 'much')"),
        (["--pure", "-1"], "must not be negative"),
        (["--pure", "0.1,0.2"], "--pure must be EPSILON (got '0.1,0.2')"),
        (["--approx", "0.1"], "--approx must be EPSILON,DELTA"),
        (["--pure", "0.1", "--sensitivity", "2"], "--sensitivity is for --gaussian-sigma, --laplace-scale and"),
        (["--discrete-gaussian", "25,2", "--sensitivity", "3"], "with one number (got --discrete-gaussian 25,2)"),
        (["--discrete-gaussian", "25,2,1.5"], "dimension must be an integer from 1"),
        (["--json-cost", "{"], "--json-cost must be JSON"),
        (["--json-cost", nested(500)], "must not be nested"),
        (["--json-cost", nested(3000)], "must not be nested"),
        (["--json-cost", "{}"], "a guarantee must be a document with the field form=1"),
        (["--cost", "census=pure:0.1"], "--cost names its account"),
        (["--nonsense"], "No such option"),
    ],
)
def test_a_wrong_cost_is_one_line_and_charges_nothing(cost: list[str], message: str) -> None:
    opened()
    assert message in failed(2, "spend", "census", *cost)
    assert document("show", "census")["account"]["sequence"] == 0


def test_several_accounts_are_charged_together_or_not_at_all() -> None:
    for name in ("jan", "feb"):
        opened(name)
    done("spend", "jan", "feb", "--pure", "0.1")
    done("spend", "--cost", "jan=pure:0.2", "--cost", "feb=approx:0.3,0")
    assert "refused by 'feb'" in failed(3, "spend", "--cost", "jan=pure:0.1", "--cost", "feb=pure:0.9")
    assert "with its whole cost (got 'jan' twice)" in failed(2, "spend", "jan", "feb", "jan", "--pure", "0.1")
    assert "ACCOUNT=KIND:NUMBERS" in failed(2, "spend", "--cost", "jan:0.1")
    assert "name at least one account" in failed(2, "spend", "--pure", "0.1")
    spent = {name: document("show", name)["meters"]["epsilon"]["spent"] for name in ("jan", "feb")}
    assert spent == pytest.approx({"jan": 0.3, "feb": 0.4})


def test_what_a_charge_ends_is_printed_once() -> None:
    opened()
    assert "no longer counts" not in done("spend", "census", "--pure", "0.1")
    before = done("largest", "census")
    receipt = document("spend", "census", "--gaussian-sigma", "25", "--key", "g")
    after = done("largest", "census")
    assert (before, after) == ("PureDP(0.9)\n", "PureDP(0.4393)\n")
    (note,) = receipt["notes"]
    assert note == (
        "this request has no epsilon, so the plain sum of epsilons no longer counts: the largest single pure request"
        " falls from 0.9 to 0.4393"
    )
    assert document("spend", "census", "--gaussian-sigma", "25", "--key", "g")["notes"] == []
    assert document("spend", "census", "--gaussian-sigma", "25")["notes"] == []
    opened("other")
    lines = done("reserve", "other", "--gaussian-sigma", "25").splitlines()
    assert lines[0].endswith("; " + note.replace("0.9 to 0.4393", "1 to 0.5166"))


def test_a_refusal_says_what_would_fit_and_that_fits() -> None:
    opened()
    code, output, errors = run("spend", "census", "--pure", "1.5", "--json")
    assert (code, output) == (3, "")
    error = json.loads(errors)["error"]
    assert error["code"] == "BudgetExceeded"
    assert error["message"].startswith(
        "refused by 'census': 100% of the budget is left; PureDP(1.5) needs 150%. The largest"
    )
    assert error["decision"]["largest"] == odo.PureDP(1).to_dict()
    done("spend", "census", "--json-cost", json.dumps(error["decision"]["largest"]))
    assert "refuse" in done("history", "census")


def test_decide_spends_nothing_and_leaves_as_a_refusal_does() -> None:
    opened()
    ends = (
        "this request has no epsilon, so the plain sum of epsilons no longer counts: the largest single pure request"
    )
    found = done("decide", "census", "--gaussian-sigma", "25")
    assert found.startswith("admitted: GDP(0.04); 96% of the budget is left")
    assert f"; {ends} falls from 1 to 0.5166\n" in found
    code, output, errors = run("decide", "census", "--pure", "1.5", "--json")
    assert (code, errors) == (3, "")
    assert json.loads(output)["admitted"] is False
    opened("other")
    assert done("decide", "census", "other", "--pure", "0.1") == (
        "admitted: PureDP(0.1) of census, PureDP(0.1) of other\n"
    )
    assert done("decide", "census", "other", "--gaussian-sigma", "25") == (
        "admitted: GDP(0.04) of census, GDP(0.04) of other;"
        f" for 'census': {ends} falls from 1 to 0.5166; for 'other': {ends} falls from 1 to 0.5166\n"
    )
    assert document("show", "census")["account"]["sequence"] == 0


def test_largest() -> None:
    opened()
    assert done("largest", "census") == "PureDP(1.0)\n"
    with odo.connect(URL) as ledger:
        account = ledger.account("census")
        ten = account.largest(odo.PureDP, times=10)
        like = account.largest(odo.parallel([odo.PureDP(1), odo.PureDP(2)]))
    assert ten is not None
    assert document("largest", "census", "--times", "10")["largest"] == ten.to_dict()
    cost = json.dumps(odo.parallel([odo.PureDP(1), odo.PureDP(2)]).to_dict())
    assert like is not None
    assert done("largest", "census", "--json-cost", cost) == f"{like.brief(offered=True)}\n"
    assert done("largest", "census", "--kind", "approx", "--delta", "1e-6").startswith("none")
    assert done("largest", "census", "--kind", "approx", "--delta", "1e-9") == "ApproxDP(1.0, 1e-09)\n"
    assert "(got 'pur')" in failed(2, "largest", "census", "--kind", "pur")
    assert "--delta is for the kinds" in failed(2, "largest", "census", "--delta", "1e-9")


def test_calibrate() -> None:
    opened()
    assert done("calibrate", "census", "laplace", "--sensitivity", "3") == "laplace(scale=3.0, sensitivity=3)\n"
    with odo.connect(URL) as ledger:
        account = ledger.account("census")
        twenty = account.calibrate(odo.laplace, sensitivity=3, times=20)
        three = account.calibrate(odo.randomized_response, categories=3)
    assert twenty is not None
    asked = ("calibrate", "census", "laplace", "--sensitivity", "3", "--times", "20")
    assert done(*asked) == f"{twenty}\n"
    assert document(*asked) == {"account": "census", "calibration": twenty.to_dict()}
    assert done("calibrate", "census", "randomized_response", "--categories", "3") == f"{three}\n"
    assert "(got 'laplas')" in failed(2, "calibrate", "census", "laplas")
    assert "laplace has the settings sensitivity (got 'steps')" in failed(
        2, "calibrate", "census", "laplace", "--steps", "3"
    )
    assert "must be a finite number" in failed(2, "calibrate", "census", "laplace", "--sensitivity", "much")
    assert "times must be an integer from 1" in failed(2, "calibrate", "census", "laplace", "--times", "0")
    assert "needs sampling_rate" in failed(2, "calibrate", "census", "subsampled_gaussian")
    assert done("calibrate", "census", "discrete_gaussian").startswith("discrete_gaussian(sigma=")
    assert document("show", "census")["account"]["sequence"] == 0
    done("close", "census")
    assert done("calibrate", "census", "laplace") == "none: no amount of noise is admitted\n"
    assert document("calibrate", "census", "laplace") == {"account": "census", "calibration": None}


def test_a_subsampled_gaussian_is_calibrated_too() -> None:
    opened("training", "--filter", "renyi")
    text = done("calibrate", "training", "subsampled_gaussian", "--sampling-rate", "0.01", "--steps", "100")
    assert text.startswith("subsampled_gaussian(noise_multiplier=1.32, sampling_rate=0.01, steps=100)")


def test_how_many() -> None:
    opened()
    assert done("how-many", "census", "--pure", "0.3") == "3\n"
    assert done("how-many", "census", "--laplace-scale", "10", "--sensitivity", "3") == "3\n"
    assert document("how-many", "census", "--pure", "1.5") == {"account": "census", "how_many": 0}
    with odo.connect(URL) as ledger:
        count = ledger.account("census").how_many(odo.GDP("0.01"))
    assert document("how-many", "census", "--gdp", "0.01")["how_many"] == count
    assert "pass exactly one cost" in failed(2, "how-many", "census")
    assert "PureDP.epsilon must be a finite number" in failed(2, "how-many", "census", "--pure", "much")
    assert document("show", "census")["account"]["sequence"] == 0


def test_reservations_are_committed_or_voided_once() -> None:
    opened()
    text = done("reserve", "census", "--pure", "0.1", "--expires", "3600")
    assert "odograph commit census#1" in text
    assert "odograph void census#1 --reason WHY" in text
    assert document("reserve", "census", "--pure", "0.2")["id"] == "census#2"
    assert [pending["id"] for pending in document("show", "census")["pending"]] == ["census#1", "census#2"]
    assert "committed: PureDP(0.1)" in done("commit", "census#1")
    assert "before, nothing was charged now" in done("commit", "census#1")
    assert "was committed before" in failed(5, "void", "census#1", "--reason", "no")
    assert "'--reason'" in failed(2, "void", "census#2")
    assert "reason must be a non-empty string" in failed(2, "void", "census#2", "--reason", " ")
    assert "voided: PureDP(0.2)" in done("void", "census#2", "--reason", "the query was withdrawn")
    assert "there is no reservation" in failed(5, "commit", "census#7")
    shown = document("show", "census")
    assert (shown["pending"], shown["account"]["steps"]) == ([], 1)


def test_the_card_says_it_all() -> None:
    opened("top")
    opened("census", "--parent", "top", "--dataset", "people")
    opened("later", "--successor-of", "census")
    done("reserve", "census", "--pure", "0.1", "--expires", "3600")
    card = done("show", "census")
    for part in (
        "(1, 1e-06)-DP for each person (add-remove)",
        "renyi 0.01, smooth 0.99; budget from the shipped table",
        "lifetime promise",
        "(2, 2e-06)-DP over census, later",
        "of the budget in 1 step",
        "epsilon: 0.1 spent, 0.9 left",
        "loss at most 0.1",
        "it does not make the run (0.1, 1e-06)-DP",
        "PureDP(0.9), GDP(",
        "census#1: PureDP(0.1) of census, voidable until",
        "parent            top",
        "dataset           people",
    ):
        assert part in card
    form = document("show", "top")
    assert form["children"] == ["census"]
    assert [row["name"] for row in document("accounts")["accounts"]] == ["census", "later", "top"]
    assert "below" in done("accounts")


def test_what_is_closed_takes_no_charge() -> None:
    opened("top")
    opened("census", "--parent", "top")
    done("reserve", "census", "--pure", "0.1")
    assert done("close", "top", "--note", "the year is over") == "closed top and every account below it\n"
    assert done("close", "top") == "top was closed before\n"
    for verb in ("spend", "reserve", "decide"):
        assert "is closed" in failed(5, verb, "census", "--pure", "0.1")
    assert done("largest", "census").startswith("none")
    assert "none: the account is closed" in done("show", "census")
    done("commit", "census#1")


def test_history_comes_in_pages_and_prints_notes_as_they_are() -> None:
    opened()
    for i in range(5):
        done("spend", "census", "--pure", "0.01", "--key", f"q-{i}", "--note", f"[red]note {i}\x1b[2J")
    page = done("history", "census", "--count", "2")
    assert "q-4" in page
    assert "q-2" not in page
    assert "entries 4 to 5 of 6" in page
    assert "[red]note 4 [2J" in page
    assert "\x1b" not in page
    sequences = [
        entry["sequence"] for entry in document("history", "census", "--first", "1", "--count", "3")["entries"]
    ]
    assert sequences == [1, 2, 3]
    assert "no entries from 99 on" in done("history", "census", "--first", "99")
    assert "count must be a positive integer" in failed(2, "history", "census", "--count", "0")


def test_history_is_written_as_csv_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    opened()
    for i in range(10):
        done("spend", "census", "--pure", "0.01", "--key", f"q-{i}", "--note", f"=note {i}")
    with odo.connect(URL) as ledger:
        expected = io.StringIO()
        whole = ledger.account("census").history()
        whole.to_csv(expected)
    pages: list[int] = []
    read = LedgerAccount.history

    def counted(account: LedgerAccount, first: int = 0, count: int | None = None) -> History:
        pages.append(count or 0)
        return read(account, first, count)

    monkeypatch.setattr(LedgerAccount, "history", counted)
    monkeypatch.setattr(records, "_CSV_PAGE", 3)
    assert done("history", "census", "--csv") == expected.getvalue()
    assert pages == [3, 3, 3, 2]
    header, *rows = done("history", "census", "--csv", "--first", "-4", "--count", "2").splitlines()
    assert rows == expected.getvalue().splitlines()[8:10]
    assert done("history", "census", "--csv", "--first", "99").splitlines() == [header]
    assert "wrote census.csv: 11 entries of census" in done("history", "census", "--csv", "--out", "census.csv")
    assert Path("census.csv").read_text("utf-8") == expected.getvalue()
    assert document("history", "census", "--csv", "--out", "other.csv")["entries"] == 11
    assert "census.csv" in failed(2, "history", "census", "--csv", "--out", "census.csv")  # never overwritten


def test_what_csv_cannot_be_is_refused() -> None:
    opened()
    assert "--out is for --csv" in failed(2, "history", "census", "--out", "census.csv")
    code, output, errors = run("history", "census", "--csv", "--json")
    assert (code, output) == (2, "")
    assert "--json needs --out FILE" in errors
    for option, value in (("--count", "0"), ("--count", "-1")):
        assert "count must be a positive integer" in failed(2, "history", "census", "--csv", option, value)
    assert not Path("census.csv").exists()


def test_erased_texts_are_gone_and_the_ledger_still_verifies() -> None:
    opened()
    done("spend", "census", "--pure", "0.01", "--note", "about Bob", "--principal", "ana")
    assert done("erase", "note", "census#1") == "erased the note census#1\n"
    assert "there is no note 'census#1' in" in failed(5, "erase", "note", "census#1")
    assert "there is no entry 'census#99'" in failed(5, "erase", "note", "census#99")
    done("erase", "principal", "ana")
    assert "nobody" in failed(5, "erase", "principal", "nobody")
    assert "'note', 'principal'" in failed(2, "erase", "entry", "census#1")
    assert "1 note erased, 1 principal name erased" in done("verify")
    assert "Bob" not in done("history", "census")


def test_the_reading_is_drawn_in_the_terminal_and_as_a_picture() -> None:
    opened()
    assert done("plot", "census") == "census has spent nothing yet\n"
    for cost in ("0.1", "0.2"):
        done("spend", "census", "--pure", cost)
    voided = document("reserve", "census", "--pure", "0.3")["id"]
    done("void", voided, "--reason", "not run")
    text = done("plot", "census")
    assert "promise" in text
    assert "█" in text
    assert document("plot", "census")["losses"] == pytest.approx([0.1, 0.3])
    assert done("plot", "census", "--out", "reading.png") == "wrote reading.png\n"
    assert Path("reading.png").read_bytes().startswith(b"\x89PNG")
    assert ".png, .svg, .pdf" in failed(2, "plot", "census", "--out", "reading.doc")


def test_a_chart_fits_its_width_and_shows_the_last_loss() -> None:
    lines = chart([i / 100 for i in range(1, 101)], 2.0, 40, plain=True)
    assert max(map(len, lines)) <= 40 + 10 + len(" promise")
    assert all(line.isascii() for line in lines)
    # The promise is twice the last loss: the last column is filled half way up, the first hardly.
    filled = [line[10:50] for line in lines]
    assert sum(row.endswith("#") for row in filled) in (5, 6)
    assert sum(row.startswith("#") for row in filled) == 0
    assert [len(line) for line in chart([float("inf")], 1.0, 40)]


def test_the_url_and_the_principal_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODOGRAPH_URL", "sqlite:///elsewhere.db")
    monkeypatch.setenv("ODOGRAPH_PRINCIPAL", "ana")
    opened()
    assert Path("elsewhere.db").exists()
    assert not Path("privacy.db").exists()
    assert document("history", "census")["entries"][0]["principal"] == "ana"


def test_a_typo_in_a_path_makes_no_file() -> None:
    reading = [
        ("show", "census"),
        ("accounts",),
        ("history", "census"),
        ("verify",),
        ("checkpoint",),
        ("checkpoint", "--out", "kept.json"),
        ("plot", "census"),
        ("plot", "census", "--out", "reading.png"),
        ("export",),
        ("export", "--out", "copy.jsonl"),
        ("backup", "copy.db"),
        ("erase", "note", "census#1"),
        ("close", "census"),
        ("commit", "census#1"),
        ("void", "census#1", "--reason", "no"),
        ("largest", "census"),
        ("calibrate", "census", "laplace"),
        ("how-many", "census", "--pure", "0.1"),
        ("spend", "census", "--pure", "0.1"),
        ("reserve", "census", "--pure", "0.1"),
        ("decide", "census", "--pure", "0.1"),
    ]
    for command in reading:
        assert "there is no ledger at" in failed(5, *command, "--url", "sqlite:///typo.db")
        assert os.listdir() == [], command  # noqa: PTH208  names are enough
    for command in (("import", "typo.jsonl"), ("verify", "--checkpoint", "typo.json")):
        assert "typo.json" in failed(2, *command)
        assert os.listdir() == []  # noqa: PTH208  as above
    assert "FILE must be a backup (got 'typo.db')" in failed(5, "restore", "typo.db")
    assert os.listdir() == []  # noqa: PTH208  as above
    opened()  # which is the one that makes a file, and is seen to
    assert "privacy.db" in os.listdir()  # noqa: PTH208  as above


def test_a_ledger_that_would_end_with_the_command_is_refused() -> None:
    assert "would end with this command" in failed(
        2, "open", "x", "--epsilon", "1", "--delta", "1e-6", "--url", "memory://"
    )
    assert "url must be memory://, sqlite:///file.db" in failed(2, "accounts", "--url", "privacy.db")


def test_every_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    opened()
    failed(2, "open", "other", "--epsilon", "much", "--delta", "0")
    failed(2, "open", "other", "--epsilon", "1", "--delta", "1e-6", "--filter", "exact=0.5,zcdp")
    failed(3, "spend", "census", "--pure", "2")
    done("open", "old", "--epsilon", "1", "--delta", "1e-6", "--filter", "exact")
    assert "filter='zcdp'" in failed(4, "spend", "old", "--zcdp", "0.1")
    failed(5, "open", "census", "--epsilon", "1", "--delta", "1e-6")
    failed(5, "show", "nobody")
    monkeypatch.setattr(options, "connect", partial(odo.connect, timeout=0.05))
    other = sqlite3.connect("privacy.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert "Try again" in failed(6, "spend", "census", "--pure", "0.1")
    finally:
        other.close()
    done("spend", "census", "--pure", "0.1")


@pytest.mark.parametrize(
    ("arguments", "code", "name"),
    [
        (("show", "nobody"), 5, "LedgerNotFound"),
        (("spend", "nobody", "--pure", "x"), 2, "InvalidGuarantee"),
        (("show",), 2, "Usage"),
        (("shwo",), 2, "Usage"),
        (("verify", "--checkpoint", "nowhere"), 2, "FileNotFoundError"),
        (("export",), 2, "InvalidArgument"),
    ],
)
def test_with_json_an_error_is_a_document_on_standard_error(arguments: tuple[str, ...], code: int, name: str) -> None:
    left, output, errors = run(*arguments, "--json")
    assert (left, output) == (code, "")
    error = json.loads(errors)["error"]
    assert error["code"] == name
    assert error["message"]
    assert error["decision"] is None


def test_a_name_that_is_taken_is_refused_with_advice_for_the_command_line() -> None:
    opened()
    line = failed(5, "open", "census", "--epsilon", "1", "--delta", "1e-6")
    assert "the account 'census' exists already: see odograph show census." in line
    assert "with another name and --successor-of census" in line
    assert "ledger." not in line
    opened("later", "--successor-of", "census")
    assert document("show", "census")["account"]["sequence"] == 0


def test_account_names_are_completed_from_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jan", "june", "feb"):
        opened(name)

    def completed(words: str, position: int) -> list[str]:
        environment = {
            "COMP_WORDS": words,
            "COMP_CWORD": str(position),
            "_ODOGRAPH_COMPLETE": "complete_bash",
        }
        return CliRunner().invoke(app, [], prog_name="odograph", env=environment).stdout.split()

    assert completed("odograph show ju", 2) == ["june"]
    assert completed("odograph spend jan j", 3) == ["jan", "june"]
    monkeypatch.setenv("ODOGRAPH_URL", "sqlite:///typo.db")
    assert completed("odograph show ju", 2) == []
    assert not Path("typo.db").exists()


# Promises other than (epsilon, delta).


def test_an_account_is_opened_with_rho_mu_or_no_limit() -> None:
    done("open", "rho", "--url", URL, "--rho", "0.5")
    done("open", "mu", "--url", URL, "--mu", "1", "--delta", "1e-6")
    assert "no limit" in done("open", "free", "--url", URL, "--epsilon", "none", "--delta", "1e-6")
    for name in ("rho", "mu", "free"):
        text = done("spend", name, "--pure", "0.25", "--url", URL)
        assert ("1 step, no limit" if name == "free" else "of the budget spent in 1 step") in text
    promises = {row["name"]: row["promise"] for row in document("accounts", "--url", URL)["accounts"]}
    assert [promises[name]["epsilon"] for name in ("rho", "mu", "free")] == [None] * 3
    assert (promises["rho"]["rho"], promises["mu"]["mu"], promises["free"]["delta"]) == (0.5, 1.0, 1e-6)
    shown = done("show", "free", "--url", URL)
    assert "1 step; no budget is fixed" in shown
    assert "any: no limit is fixed here" in shown
    assert "0.5-zCDP" in done("accounts", "--url", URL)
    assert "rho: 0.0310" in done("show", "rho", "--url", URL)
    assert document("plot", "free", "--url", URL)["promise"] is None
    assert "promise" not in done("plot", "free", "--url", URL)
    done("plot", "mu", "--url", URL, "--out", "mu.svg")
    assert "promise: epsilon" not in Path("mu.svg").read_text()
    assert document("how-many", "free", "--pure", "1", "--url", URL)["how_many"] == 10**12
    done("verify", "--url", URL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--delta", "1e-6"], "one promise"),
        (["--epsilon", "1"], "delta must be given"),
        (["--rho", "1", "--mu", "1"], "got rho and mu"),
        (["--epsilon", "none", "--delta", "0"], "delta must be positive"),
    ],
)
def test_an_account_with_no_promise_or_two_is_not_opened(options: list[str], message: str) -> None:
    assert message in failed(2, "open", "census", "--url", URL, *options)


# The feed of events.


def test_events_are_shown_once_and_continue_after_the_cursor(tmp_path: Path) -> None:
    with odo.connect(URL, principal="ana") as ledger:
        for name in ("jan", "feb"):
            ledger.open_account(name, odo.Policy(1, 0, filter="basic"))
        ledger.account("jan").spend(odo.PureDP("0.1"), key="q-1")
    line = done("events").splitlines()[-1]
    assert line.endswith("jan#1 spend PureDP(0.1) by ana")
    follow = ("events", "--json", "--cursor", "audit.cursor")
    first = [json.loads(line) for line in done(*follow).splitlines()]
    assert sorted((form["account"], form["sequence"]) for form in first) == [("feb", 0), ("jan", 0), ("jan", 1)]
    assert done(*follow) == ""
    with odo.connect(URL, principal="ana") as ledger:
        ledger.account("feb").spend(odo.PureDP("0.1"), key="q-2")
    (form,) = [json.loads(line) for line in done(*follow).splitlines()]
    assert (form["account"], form["key"]) == ("feb", "q-2")
    assert [*tmp_path.glob("audit*")] == [tmp_path / "audit.cursor"]
    Path("audit.cursor").write_text("no cursor", encoding="ascii")
    assert "after must be a cursor" in failed(2, *follow[:1], "--cursor", "audit.cursor")


def test_a_follower_that_is_killed_misses_nothing(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("odograph"))
    command = [program, "events", "--follow", "--json", "--cursor", "audit.cursor"]
    found: list[int] = []
    with odo.connect(f"sqlite:///{tmp_path}/privacy.db", principal="ana") as ledger:
        account = ledger.open_account("jan", odo.Policy(1, 0, filter="basic"))
        for number in range(1, 4):
            account.spend(odo.PureDP("0.1"), key=f"q-{number}")
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:  # noqa: S603  our own
                assert follower.stdout is not None
                while not found or found[-1] < number:
                    found.append(json.loads(follower.stdout.readline())["sequence"])
                follower.kill()
    assert sorted({*found}) == [0, 1, 2, 3]
