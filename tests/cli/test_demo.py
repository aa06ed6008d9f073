"""The demo is really killed, and neither loses nor repeats a charge; broken analysts that do are caught."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.special import ndtr
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app
from odograph.cli.demo import (
    ACCOUNT,
    ANSWERS,
    CLAMP,
    LEDGER,
    DurableDrillDown,
    Group,
    Question,
    Report,
    Rows,
    investigate,
    read_answers,
    summary_table,
    tally,
)
from odograph.core.guarantees import DiscreteGaussian
from odograph.errors import InvalidGuarantee
from odograph.integrations.opendp import noisy, noisy_gaussian
from odograph.ledger.results import HistoryEntry

QUESTIONS = 36  # one count of everyone, one for each of 7 groups, one for each of 26 splits of them, two to confirm
GAUSSIANS = 7

# Broken analysts. One has new keys each time it is started, one does not charge once it was started again, one draws
# answers again that were written.
_BROKEN_ANALYST = "import secrets; from odograph.cli import demo\n{change}\ndemo.analyze()"
REPEATS = "demo.DurableDrillDown.next_key = lambda self: secrets.token_hex(8)"
LOSES = (
    "charge = demo.DurableDrillDown._charge\n"
    "demo.DurableDrillDown._charge = lambda self, key, question, cost:"
    " (cost, False) if self._chosen else charge(self, key, question, cost)"
)
REDRAWS = "demo.read_answers = lambda answers: {}"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo") / "new"
    result = CliRunner().invoke(app, ["demo", "--folder", str(folder), "--json"])
    assert result.exit_code == 0, result.stderr
    form: dict[str, Any] = json.loads(result.stdout)
    return form


@pytest.fixture(scope="module")
def data() -> Rows:
    return Rows.load().clamp()


def spends(folder: Path) -> list[HistoryEntry]:
    with odo.connect(f"sqlite:///{folder / LEDGER}") as ledger:
        return [past for past in ledger.account(ACCOUNT).history(0, 1000) if past.entry.verb == "spend"]


def investigated(folder: Path, *, change: str = "", killed_after: int = 17) -> Report:
    folder.mkdir()
    report = Report(folder)
    analyst = (sys.executable, "-c", _BROKEN_ANALYST.format(change=change))
    investigate(report, analyst=analyst, killed_after=killed_after)
    return report


def tallied(folder: Path) -> int:
    with odo.connect(f"sqlite:///{folder / LEDGER}") as ledger:
        return tally(ledger.account(ACCOUNT), folder)


def test_the_demo_is_killed_and_neither_loses_nor_repeats_a_charge(shown: dict[str, Any]) -> None:
    assert shown["killed"] == {"signal": "SIGKILL", "after": "q-17"}
    assert shown["answers_reused"] == 16
    keys = [f"q-{i:02}" for i in range(1, QUESTIONS + 1)]
    assert [row["key"] for row in shown["questions"]] == keys
    assert [past.entry.key for past in spends(Path(shown["folder"]))] == keys
    assert shown["charges"] == QUESTIONS
    assert [*read_answers(Path(shown["folder"]) / ANSWERS)] == keys


def test_the_demo_spends_its_budget_to_the_end_and_compares(shown: dict[str, Any]) -> None:
    rows = shown["questions"]
    assert all(row["answer"] and row["loss"] > 0 for row in rows)
    assert len({row["cost"] for row in rows}) > 5  # chosen from the answers
    kinds = Counter(type(past.entry.guarantee) for past in spends(Path(shown["folder"])))
    assert kinds == {odo.PureDP: QUESTIONS - GAUSSIANS, DiscreteGaussian: GAUSSIANS}
    assert rows[-1]["left"] < 0.01
    assert shown["refusal"].startswith(f"refused by '{ACCOUNT}': ")
    assert "; PureDP(0.5) needs " in shown["refusal"]
    small = {rule: counts["small"] for rule, counts in shown["admitted"].items()}
    assert small == {"basic": 100, "paper": 349, "zcdp": 487, "default": 528}
    these = {rule: counts["these"] for rule, counts in shown["admitted"].items()}
    assert these["paper"] is None  # it has no theorem for Gaussians
    assert these["basic"] < these["zcdp"] <= these["default"] == QUESTIONS
    assert "does not make the run" in shown["reading"]
    assert Path(shown["plot"]).read_bytes().startswith(b"\x89PNG")
    # The opening, every charge, the refusal.
    assert shown["verified"].startswith(f"verified: {QUESTIONS + 2} entries of 1 account")


def test_the_reading_goes_below_the_plain_sum_and_stays_there(shown: dict[str, Any]) -> None:
    rows = shown["questions"]
    total = 0.0
    for row, past in zip(rows, spends(Path(shown["folder"])), strict=True):
        cost = past.entry.guarantee
        if isinstance(cost, DiscreteGaussian):
            total += epsilon_of_gaussian(float(cost.sensitivity) / float(cost.sigma), 1e-8)
        else:
            assert isinstance(cost, odo.PureDP)
            total += float(cost.epsilon)
        assert row["sum"] == pytest.approx(total, rel=1e-6)
    below = [row["loss"] < row["sum"] for row in rows]
    assert all(below[10:])
    assert not any(below[:3])  # a bound at all times costs something while there is little to add up
    assert rows[-1]["loss"] < 0.7 * rows[-1]["sum"]
    # What the plain sum is compared with: its delta is within that of the promise.
    assert GAUSSIANS * 1e-8 < 1e-6


PREFIX = 36  # of a row of the table: its key, its question and its cost


def in_words(text: str) -> str:
    """Return a text without numbers and attributes, which the noise decides, and with single spaces."""
    return " ".join(re.sub(r"[0-9][0-9.,]*[0-9]|[0-9]|(?<=visits by )\w+", "0", text).split())


def missing(readme: str, printed: str) -> list[str]:
    """Return the lines of the demo's output in the README, other than noisy answers, that it does not print."""
    (shown,) = re.findall(r"```text\n( +question .*?)```", readme, re.DOTALL)
    lines = [
        line[:PREFIX] if line.startswith("q-") else line
        for line in shown.splitlines()
        if not line.startswith("found") and line != "..."
    ]
    return [line for line in lines if in_words(line) not in in_words(printed)]


def printed(shown: dict[str, Any]) -> str:
    report = Report(
        Path(shown["folder"]),
        rows=shown["questions"],
        killed=shown["killed"]["after"],
        reused=shown["answers_reused"],
        finished=True,
    )
    console = Console(file=io.StringIO(), width=112)
    console.print(report.table(100))
    console.print(summary_table(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_readme_shows_what_the_demo_prints(shown: dict[str, Any]) -> None:
    output = printed(shown)
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert missing(readme, output) == []
    for line in re.findall(r"^q-\d\d .*", readme, re.MULTILINE):
        (row,) = (each for each in shown["questions"] if each["key"] == line[:4])
        total, reading, left = (float(number.strip("%")) for number in line.split()[-3:])
        # Costs depend a little on noisy counts.
        assert total == pytest.approx(row["sum"], abs=0.02)
        assert reading == pytest.approx(row["loss"], abs=0.02)
        assert left == pytest.approx(100 * row["left"], abs=2)
    for number in ("36 questions, 36 charges", "after q-17", "reused 16", "38 entries", "default 36"):
        assert number in readme
        assert number in " ".join(output.split())


def test_a_readme_that_shows_what_the_demo_does_not_print_is_caught(shown: dict[str, Any]) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert missing(readme.replace("visits again", "visits, again"), printed(shown))
    assert missing(readme.replace("none lost", "some lost"), printed(shown))


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Return the epsilon of a Gaussian of that mu at a delta, by Balle and Wang's formula and bisection."""
    low, high = 0.0, 20.0
    while high - low > 1e-12:
        epsilon = (low + high) / 2
        found = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
        low, high = (epsilon, high) if found > delta else (low, epsilon)
    return high


@pytest.mark.parametrize("killed_after", [1, QUESTIONS])
def test_it_resumes_from_the_first_question_and_from_the_last(killed_after: int, tmp_path: Path) -> None:
    # The cost of the last one was a counter-offer, which the totals after the charge would not give again.
    report = investigated(tmp_path / "new", killed_after=killed_after)
    assert report.reused == killed_after - 1
    assert tallied(report.folder) == len(report.rows) == QUESTIONS


def test_an_analyst_that_charges_again_is_caught(tmp_path: Path) -> None:
    report = investigated(tmp_path / "new", change=REPEATS, killed_after=5)  # both fit the budget
    assert len(spends(report.folder)) > QUESTIONS
    with pytest.raises(odo.errors.LedgerError, match="'rows of everyone' was charged 2 times and answered 2 times"):
        tallied(report.folder)


def test_an_analyst_that_answers_without_a_charge_is_caught(tmp_path: Path) -> None:
    report = investigated(tmp_path / "new", change=LOSES)
    with pytest.raises(odo.errors.LedgerError, match="was charged 0 times and answered 1 times"):
        tallied(report.folder)


def test_an_analyst_that_draws_an_answer_again_is_caught(tmp_path: Path) -> None:
    report = investigated(tmp_path / "new", change=REDRAWS)
    assert len(spends(report.folder)) == QUESTIONS
    with pytest.raises(odo.errors.LedgerError, match="'rows of everyone' was charged 1 times and answered 2 times"):
        tallied(report.folder)


def test_an_analyst_that_ends_before_it_is_killed_is_not_called_killed(tmp_path: Path) -> None:
    with pytest.raises(odo.OdographError, match="ended before it was killed, with exit code 3"):
        investigated(tmp_path / "new", change="raise SystemExit(3)")


def test_a_line_that_was_cut_off_was_never_read_answers(tmp_path: Path) -> None:
    answers = tmp_path / ANSWERS
    whole = json.dumps({"key": "q-01", "answer": [20190]}) + "\n"
    answers.write_text(whole + '{"key": "q-02", "answ')
    assert [*read_answers(answers)] == ["q-01"]
    assert answers.read_text() == whole


def test_the_demo_only_works_in_a_new_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr == f"odograph: {tmp_path}: File exists\n"
    assert [*tmp_path.iterdir()] == []


def off_by(noise: list[int], scale: float) -> float:
    """Return how far the noise is from that scale, in deviations: the size of Laplace noise has it as mean, too."""
    return math.sqrt(len(noise)) * (float(np.abs(noise).mean()) / scale - 1)


def test_the_noise_is_what_is_charged_for() -> None:
    for epsilon in (0.01, 0.0371, 0.3):
        for sensitivity in (1, CLAMP):
            scale = sensitivity / epsilon
            assert abs(off_by(noisy([0] * 4000, sensitivity, epsilon), scale)) < 6
            assert off_by(noisy([0] * 4000, sensitivity, 1.5 * epsilon), scale) < -6  # noise for a higher price


def test_gaussian_noise_is_what_is_charged_for() -> None:
    cost = DiscreteGaussian(60.0, 2.5, 6)
    many = noisy_gaussian([0] * 4000, cost)
    # The variance of a discrete Gaussian of such a size is sigma^2; that of 4000 draws is off by 1/sqrt(2000) of it.
    assert abs(float(np.var(many)) / 60**2 - 1) < 6 / math.sqrt(2000)
    assert float(np.var(noisy_gaussian([0] * 4000, DiscreteGaussian(40.0, 2.5, 6)))) / 60**2 - 1 < -6 / math.sqrt(
        2000
    )


@pytest.mark.parametrize(
    "cost",
    [DiscreteGaussian(60.0, 2.5, 2), DiscreteGaussian(60.0, 2.5, 6, 2), DiscreteGaussian(60.0, 2.237, 5)],
    ids=["coordinates", "grid", "a sensitivity between two floats"],
)
def test_gaussian_noise_that_opendp_does_not_have_is_refused(cost: DiscreteGaussian) -> None:
    with pytest.raises(
        InvalidGuarantee, match=r"the cost of the noise must be at most Discrete.* \(got DiscreteGaussian"
    ):
        noisy_gaussian([0], cost)


def test_a_question_is_not_asked_for_the_price_of_another(data: Rows) -> None:
    everyone = Group({}, np.ones(len(data.visits), dtype=np.bool_))
    rows, visits = (
        Question("rows", everyone, [everyone] * 5, overlap=5),
        Question("visits", everyone, [everyone], about_visits=True),
    )
    assert rows.noise(rows.with_gaussian(60)) == 60
    assert visits.noise(odo.PureDP("0.1")) == 100
    for question, cost in ((rows, odo.PureDP(0.1)), (visits, rows.with_gaussian(60)), (visits, odo.ZCDP(0.1))):
        with pytest.raises(InvalidGuarantee, match=r"cost must be one that .* can be asked for"):
            question.noise(cost)


class Replayed(DurableDrillDown):
    """A drill-down that gets the answers of an earlier run, and records the true answers to its questions."""

    def __init__(self, folder: Path, data: Rows) -> None:
        self.ledger = odo.connect(f"sqlite:///{folder / LEDGER}")
        super().__init__(self.ledger.account(ACCOUNT), folder / ANSWERS, data)
        self.asked: list[tuple[list[int], odo.Guarantee, float]] = []
        self._lines = iter(self._known.values())

    def ask(self, question: Question, wanted: odo.Guarantee | None) -> tuple[list[int], float]:
        del wanted
        line = next(self._lines)
        assert line["question"] == str(question)
        cost = self._chosen[line["key"]]
        assert cost is not None
        self.asked.append((question.true_answers(self.data), cost, self.sensitivity(question)))
        return line["answer"], question.noise(cost)

    def sensitivity(self, question: Question) -> float:
        """Return how far one row can move the true answers."""
        return question.sensitivity

    def show(self, answer: str) -> None:
        """Show nothing."""


class Narrow(Replayed):
    """Broken: Gaussian noise for a row in one of the cells, and it is in one of each attribute."""

    def sensitivity(self, question: Question) -> float:
        return replace(question, overlap=1).sensitivity


def worst(folder: Path, data: Rows, replayed: type[Replayed] = Replayed) -> float:
    """Return the most that removing one of some rows moves an answer, in sensitivities, for the answers of a run."""
    most = 0.0
    for row in [None, *range(0, len(data.visits), 4001)]:
        kept = np.ones(len(data.visits), dtype=np.bool_)
        kept[row if row is not None else []] = False
        columns = {name: column[kept] for name, column in data.attributes.items()}
        analyst = replayed(folder, Rows(data.visits[kept], columns))
        with analyst.ledger:
            analyst.confirm(analyst.run()[-1][0])
        if row is None:
            whole = analyst.asked
            continue
        for (truths, cost, sensitivity), (without, _, _) in zip(whole, analyst.asked, strict=True):
            # Laplace noise is for the sum of the changes, Gaussian noise for the root of the sum of their squares.
            power = 2 if isinstance(cost, DiscreteGaussian) else 1
            moved = sum(abs(a - b) ** power for a, b in zip(truths, without, strict=True)) ** (1 / power)
            most = max(most, moved / sensitivity)
    return most


def test_a_row_moves_no_answer_by_more_than_its_noise_is_for(shown: dict[str, Any], data: Rows) -> None:
    assert len(data.visits) == 20_190
    assert worst(Path(shown["folder"]), data) == 1.0


def test_gaussian_noise_for_one_cell_is_caught(shown: dict[str, Any], data: Rows) -> None:
    assert worst(Path(shown["folder"]), data, Narrow) == pytest.approx(math.sqrt(5))


def test_visits_without_their_bound_are_caught(shown: dict[str, Any], data: Rows) -> None:
    # Broken: one row has more visits than the bound that the noise is for.
    visits = data.visits.copy()
    visits[4001] = CLAMP + 30
    assert worst(Path(shown["folder"]), replace(data, visits=visits)) > 1.0
