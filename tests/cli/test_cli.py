from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from odograph import Accountant, PureDP, cli
from odograph.cli import accounts, options
from odograph.cli.app import app, exit_code
from odograph.compile import _write_cached, find_budget
from odograph.core.filters.smooth import RESERVES
from odograph.core.guarantees import guarantee_from_dict
from odograph.core.planning import usual_requests
from odograph.core.policy import Policy
from odograph.errors import (
    ERROR_TABLE,
    AccountNotFound,
    BudgetExceeded,
    OdographError,
    OutcomeUnknown,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODOGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def row(output: str, name: str) -> str:
    return next(line.removeprefix(name).strip() for line in output.splitlines() if line.startswith(name))


def test_the_budget_of_a_listed_target_comes_from_the_table() -> None:
    code, output, _ = run("budget", "--epsilon", "1", "--delta", "1e-6")
    assert code == 0
    assert row(output, "units") == "2177"
    assert row(output, "quantum x units").startswith("0.054425 ")
    assert row(output, "the paper's y*") == "0.0349378"
    assert row(output, "ratio").startswith("1.558")
    assert row(output, "source") == "budget from the shipped table"
    assert "refuted" not in output


def test_the_adversary_refutes_little_more_than_is_certified() -> None:
    code, output, _ = run("budget", "--epsilon", "1", "--delta", "1e-6", "--adversary")
    assert code == 0
    assert row(output, "refuted").startswith("0.0546")


def test_a_plan_counts_what_new_accounts_admit() -> None:
    code, output, _ = run("plan", "--epsilon", "1", "--delta", "1e-6", "--pure", "0.01")
    assert code == 0
    counts = [Accountant(Policy(1, 1e-6, reserve=name)).how_many(PureDP(0.01)) for name in RESERVES]
    assert row(output, "PureDP(0.01)").split() == [str(count) for count in counts]
    code, output, _ = run("plan", "--epsilon", "1", "--delta", "1e-6", "--json")
    form = json.loads(output)
    assert code == 0
    assert [guarantee_from_dict(one["cost"]) for one in form["requests"]] == [*usual_requests(1)]
    assert [*form["reserves"]] == [*RESERVES]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--cost", "jan=pure:0.1"), "exactly one cost"), (("--pure", "1", "--gdp", "1"), "(got --pure and --gdp)")],
)
def test_a_plan_takes_one_cost_or_none(arguments: tuple[str, ...], words: str) -> None:
    code, output, errors = run("plan", "--epsilon", "1", "--delta", "1e-6", *arguments)
    assert (code, output) == (2, "")
    assert words in errors


def test_another_target_is_solved_once_and_then_remembered() -> None:
    arguments = ("budget", "--epsilon", "4", "--delta", "1e-5", "--pure-only")
    code, solved, _ = run(*arguments)
    assert code == 0
    assert "for pure steps" in row(solved, "target")
    assert row(solved, "source") == "budget solved for this policy"
    _, again, _ = run(*arguments)
    assert row(again, "source") == "budget solved on this machine before"
    assert row(again, "units") == row(solved, "units")


def test_a_budget_that_cannot_be_remembered_leaves_no_file_behind(tmp_path: Path) -> None:
    policy = Policy(1, 1e-6)
    need = policy.need
    assert need is not None
    budget, _ = find_budget(need)
    taken = tmp_path / "budget.json"
    (taken / "by another").mkdir(parents=True)  # no file takes the place of a folder with something in it
    _write_cached(taken, budget)
    assert [path.name for path in tmp_path.iterdir()] == ["budget.json"]
    _write_cached(tmp_path / "free.json", budget)  # and where it can be written, it is
    assert sorted(path.name for path in tmp_path.iterdir()) == ["budget.json", "free.json"]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (("--epsilon", "much", "--delta", "1e-6"), "Policy.epsilon", "'much'"),
        (("--epsilon", "1", "--delta", "2"), "Policy.delta", "2"),
        (("--epsilon", "1", "--delta", "-1e-6"), "Policy.delta", "'-1e-6'"),
        (("--epsilon", "nan", "--delta", "1e-6"), "Policy.epsilon", "'nan'"),
    ],
)
def test_wrong_input_is_one_line_with_field_and_value(arguments: tuple[str, ...], field: str, value: str) -> None:
    code, output, errors = run("budget", *arguments)
    assert code == 2
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("odograph: ")
    assert field in line
    assert value in line


def test_figures_are_written_where_they_are_wanted(tmp_path: Path) -> None:
    code, output, _ = run("figures", "--out", str(tmp_path / "out"), "steps-admitted")
    assert code == 0
    assert output.split() == [str(tmp_path / "out" / f"steps-admitted.{end}") for end in ("png", "svg", "csv")]
    assert all(Path(name).stat().st_size > 0 for name in output.split())


def test_an_unknown_figure_is_wrong_input(tmp_path: Path) -> None:
    code, _, errors = run("figures", "--out", str(tmp_path), "fig9")
    assert code == 2
    assert "'fig9'" in errors


def test_an_unknown_command_is_wrong_input() -> None:
    code, _, errors = run("spned")
    assert code == 2
    assert errors == "odograph: No such command 'spned'. Did you mean 'spend'? See odograph --help\n"


def test_the_version() -> None:
    assert run("--version") == (0, f"odograph {version('odograph')}\n", "")


def test_the_commands_without_a_ledger_print_json_too(tmp_path: Path) -> None:
    _, budget, _ = run("budget", "--epsilon", "1", "--delta", "1e-6", "--json")
    assert json.loads(budget)["units"] == 2177
    _, figures, _ = run("figures", "--out", str(tmp_path), "steps-admitted", "--json")
    assert len(json.loads(figures)["files"]) == 3


def make(cls: type[OdographError], charged: bool | None) -> OdographError:  # noqa: FBT001  a field of the error
    """Return an error of a class; what became of the charge is a field of the class but for an unknown outcome."""
    if cls is BudgetExceeded:
        decision = Accountant(Policy(1, 1e-6, filter="basic"), name="census").decide(PureDP(2))
        return BudgetExceeded(decision)
    return OutcomeUnknown("no answer", key="k", charged=charged) if cls is OutcomeUnknown else cls("no answer")


def failing(monkeypatch: pytest.MonkeyPatch, error: OdographError, *arguments: str) -> tuple[int, str]:
    """Run a command whose ledger raises an error; return the exit code and what was printed."""

    def connect(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(options, "connect", connect)
    code, output, errors = run(*arguments)
    assert output == ""
    return code, errors


def test_every_error_leaves_with_the_exit_code_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, row_of in ERROR_TABLE.items():
        for verb in (("spend", "census", "--pure", "0.1"), ("show", "census")):
            code, errors = failing(monkeypatch, make(cls, None), *verb, "--json")
            form = json.loads(errors)["error"]
            assert (code, form["code"]) == (row_of.exit_code, cls.__name__)
            assert form["charged"] is (None if cls is OutcomeUnknown else False)
            assert (form["decision"] is None) is (cls is not BudgetExceeded)


def test_a_class_that_the_table_does_not_list_leaves_as_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(AccountNotFound):
        pass

    assert exit_code(Newer()) == ERROR_TABLE[AccountNotFound].exit_code
    assert failing(monkeypatch, Newer("gone"), "show", "census") == (5, "odograph: gone\n")


@pytest.mark.parametrize(
    ("charged", "sentence"),
    [(False, "Nothing was charged"), (True, "The charge was made"), (None, "It may have been charged: the same")],
)
def test_what_became_of_a_charge_is_said_once_where_one_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    charged: bool | None,  # noqa: FBT001  a field of the error
    sentence: str,
) -> None:
    error = make(OutcomeUnknown, charged)
    for verb in ("spend", "reserve"):
        _, line = failing(monkeypatch, error, verb, "census", "--pure", "0.1")
        assert line.startswith(f"odograph: no answer (key 'k'). {sentence}")
        assert line.count("charged") + line.count("charge was") == 1
    _, line = failing(monkeypatch, error, "show", "census")
    assert line == "odograph: no answer (key 'k')\n"  # nothing was to be charged


def test_a_receipt_that_cannot_be_printed_is_no_proof_that_nothing_was_charged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("open", "census", "--epsilon", "1", "--delta", "1e-6", "--filter", "basic")[0] == 0

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(accounts, "print_result", full)
    code, _, errors = run("spend", "census", "--pure", "0.1", "--json")
    assert (code, json.loads(errors)["error"]["charged"]) == (2, None)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("show", "census", "--json")[1])["account"]["steps"] == 1


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_install_line_is_printed(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from odograph.cli import main; main()"
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "odograph: the command line is not installed: pip install 'odograph[cli]', or 'odograph[demo]'\n"
    )


def test_without_opendp_the_demo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp", None)
    code, _, errors = run("demo", "--folder", str(tmp_path / "demo"))
    assert code == 2
    assert not (tmp_path / "demo").exists()
    assert errors == "odograph: OpenDP is not installed: pip install 'odograph[mechanisms]'\n"


def test_main_leaves_with_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["odograph", "budget", "--epsilon", "0", "--delta", "1e-6"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "Policy.epsilon" in capsys.readouterr().err
