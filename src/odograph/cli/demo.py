"""`odograph demo`: an adaptive private analysis whose process is killed and started again, with a durable ledger.

The analyst is a process of its own (`python -m odograph.cli.demo FOLDER`) that asks who sees a doctor most often. The
demo lets it run question by question, kills it after a question was charged and before it was answered, starts it
again, and counts charges and answers at the end. The two talk in JSON Lines: the analyst reports each event on
standard output, and waits for a line on standard input before it runs a mechanism.

A row is one person in one year of the RAND Health Insurance Experiment, and one row is what is protected. The
attributes, their values, and that visits above 10 count as 10 are public; everything else is asked with noise,
including the number of rows. (In truth the table is public.)

The numbers of rows by all attributes are asked at once, with Gaussian noise: a row is in one cell of each attribute,
which is dear for Laplace noise and cheap for this one. All else is asked with Laplace noise.
"""

from __future__ import annotations

import json as jsons
import math
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from odograph.account import Account
from odograph.cli.options import AsJson, print_result
from odograph.compile import compile_policy
from odograph.connection import connect
from odograph.core.conversions import gdp_to_dp_epsilon
from odograph.core.guarantees import DiscreteGaussian, Guarantee, PureDP
from odograph.core.mechanisms import discrete_gaussian
from odograph.core.planning import AccountState, how_many, quote, used
from odograph.core.policy import Policy
from odograph.errors import (
    AccountExists,
    BudgetExceeded,
    InvalidGuarantee,
    LedgerCorrupt,
    LedgerError,
    OdographError,
    load_extra,
)
from odograph.figures import blank_axes
from odograph.integrations.opendp import noisy, noisy_gaussian
from odograph.ledger.ledger import LedgerAccount

__all__ = [
    "ACCOUNT",
    "ANALYST",
    "ANSWERS",
    "ATTRIBUTES",
    "CLAMP",
    "DEPTH",
    "LEDGER",
    "POLICY",
    "WIDTH",
    "DrillDown",
    "DurableDrillDown",
    "Group",
    "Question",
    "Report",
    "Rows",
    "analyze",
    "demo",
    "draw",
    "investigate",
    "read_answers",
    "summary_table",
    "tally",
]

ACCOUNT: Final = "drill-down"
LEDGER: Final = "privacy.db"
ANSWERS: Final = "answers.jsonl"
POLICY: Final = Policy(1, "1e-6", privacy_unit="person-year")
ANALYST: Final = (sys.executable, "-m", "odograph.cli.demo")
KILLED_AFTER: Final = 17  # questions: the first process is killed right after the charge of this one
_SMALL_COST: Final = PureDP(0.01)
_COMPARED_FILTERS: Final = {"basic": "basic", "paper": "paper", "zcdp": "zcdp", "default": None}
_BLUE, _GREY = "#0072B2", "#666666"
_EPSILON: Final = 1.0  # what a plain sum of epsilons would stop at
_SHARE: Final = 1e-8  # of delta, for each Gaussian in the plain sum: there are fewer than 100

Event = dict[str, Any]


@dataclass
class Report:
    """What happened in the demo."""

    folder: Path
    rows: list[Event] = field(default_factory=list)  # one per question, with its answer
    plain_sum: float = 0.0  # of the epsilons of the questions so far
    killed: str = ""  # the key of the question that was charged but not answered
    reused: int = 0  # answers that the second process found in the file
    refusal: str = ""
    found: str = ""
    finished: bool = False

    def record(self, event: Event) -> None:
        """Record an event of the analyst."""
        kind = event["event"]
        if kind == "refused":
            self.refusal = event["message"]
        elif kind == "found":
            self.found = event["answer"]
        elif kind == "charged":
            self.reused += event["answered"]
            if all(row["key"] != event["key"] for row in self.rows):
                shown = {name: event[name] for name in ("key", "question", "short", "group", "cost", "epsilon")}
                self.plain_sum += event["epsilon"]
                self.rows.append({**shown, "answer": "", "sum": self.plain_sum, "loss": None, "left": None})
        elif kind == "answered":
            row = next(row for row in self.rows if row["key"] == event["key"])
            if not row["answer"]:
                row.update(answer=event["answer"], loss=event["loss"], left=event["left"])

    def table(self, height: int) -> RenderableType:
        """Return the table: all rows when the demo has finished, before that the last ones that fit."""
        table = Table(box=None, header_style="bold", pad_edge=False, expand=True, padding=(0, 1, 0, 0))
        columns = {"": 4, "question": 22, "cost": 8, "noisy answer": 0, "sum": 5, "reading": 7, "left": 4}
        for name, width in columns.items():
            # Long text is cut, so that a question is one line; the answer gets the remaining width.
            table.add_column(name, no_wrap=True, overflow="ellipsis", width=width or None, ratio=None if width else 1)
        shown = self.rows if self.finished else self.rows[-max(3, height // 2) :]
        group = ""
        for row in shown:
            if row["group"] != group:
                group = row["group"]
                table.add_row("", "among", "", group, style="italic")
            reading = "" if row["loss"] is None else f"{row['loss']:.3f}"
            left = "" if row["left"] is None else f"{math.floor(100 * row['left'])}%"  # down, as a refusal says it
            total = f"{row['sum']:.3f}"
            table.add_row(row["key"], row["short"], row["cost"], row["answer"], total, reading, left)
            if row["key"] == self.killed:
                again = f"{self.reused} answers reused" if self.reused else "starting again"
                table.add_row("", "charged, then SIGKILL", "", again, style="bold red")
        return table


def demo(
    *,
    folder: Annotated[
        Path | None, typer.Option(help="A new folder to work in; by default odograph-demo-1, odograph-demo-2, ...")
    ] = None,
    json: AsJson = False,
) -> None:
    """Run an adaptive private analysis on real data, kill it in the middle, and resume it.

    No charge is lost and none is made twice. The ledger, the answers and a plot remain in the folder.
    """
    for library in ("statsmodels", "opendp", "matplotlib"):  # fail before a folder is made
        load_extra(library)
    report = Report(_new_folder(folder))
    console = Console(highlight=False, markup=False, emoji=False, quiet=json)
    console.print("Who sees a doctor most often? Asked of the RAND Health Insurance Experiment.")
    console.print(f"Promise: {POLICY.target} for each person-year, although each question and its cost")
    console.print("are chosen from the noisy answers so far.\n")
    if console.is_terminal:
        with Live(get_renderable=lambda: report.table(console.height), console=console) as live:
            investigate(report, live.refresh)
            report.finished = True
    else:
        investigate(report)
        report.finished = True
        console.print(report.table(console.height))
    form = _summarize(report)
    print_result(form, summary_table(form), as_json=json)
    # Printed outside the table, which would wrap these lines: users copy them.
    console.print(
        f"\nexport ODOGRAPH_URL={form['url']}\nodograph show {ACCOUNT}\nodograph history {ACCOUNT}", soft_wrap=True
    )


def investigate(
    report: Report,
    refresh: Callable[[], object] = lambda: None,
    *,
    analyst: Sequence[str] = ANALYST,
    killed_after: int = KILLED_AFTER,
) -> None:
    """Run an analyst, kill it right after a charge, and let another one continue in the same folder."""
    with _start(analyst, report.folder) as process:
        for event in _events(process):
            report.record(event)
            refresh()
            if event["event"] == "charged":
                if len(report.rows) == killed_after:
                    report.killed = event["key"]
                    process.send_signal(signal.SIGKILL)
                    break
                _let_run(process)
    if process.returncode != -signal.SIGKILL:
        raise OdographError(f"the analyst ended before it was killed, with exit code {process.returncode}")
    refresh()
    with _start(analyst, report.folder) as process:
        for event in _events(process):
            report.record(event)
            refresh()
            if event["event"] == "charged" and not event["answered"]:
                _let_run(process)
    if process.returncode != 0:
        raise OdographError(f"the resumed analyst failed, with exit code {process.returncode}")


def tally(account: LedgerAccount, folder: Path) -> int:
    """Return the number of charges, or raise if one of them did not pay for exactly one answer."""
    charged = Counter(past.note for past in account.history(0, 1000) if past.entry.verb == "spend")
    lines = (folder / ANSWERS).read_text(encoding="utf-8").splitlines()
    answered = Counter(jsons.loads(line)["question"] for line in lines)
    for question in [*charged, *answered]:
        if (charged[question], answered[question]) != (1, 1):
            raise LedgerError(
                f"{question!r} was charged {charged[question]} times and answered {answered[question]} times"
            )
    return charged.total()


def _new_folder(folder: Path | None) -> Path:
    if folder is not None:
        folder.mkdir(parents=True)
        return folder
    for number in range(1, 1000):
        made = Path(f"odograph-demo-{number}")
        try:
            made.mkdir()
        except FileExistsError:
            continue
        return made
    raise LedgerError("all folders from odograph-demo-1 to odograph-demo-999 exist; remove some, or pass --folder")


def _start(analyst: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    # In a process group of its own: Ctrl-C reaches this process only, and the analyst ends when its input closes.
    return subprocess.Popen(  # noqa: S603  our own code
        [*analyst, str(folder)], stdin=pipe, stdout=pipe, text=True, encoding="utf-8", process_group=0
    )


def _events(process: subprocess.Popen[str]) -> Iterator[Event]:
    for line in process.stdout or ():
        yield jsons.loads(line)


def _let_run(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.write("run\n")
        process.stdin.flush()


def _summarize(report: Report) -> dict[str, Any]:
    """Verify the ledger in the folder, count charges and answers, and plot the reading."""
    with connect(f"sqlite:///{report.folder / LEDGER}") as ledger:
        account = ledger.account(ACCOUNT)
        charges = tally(account, report.folder)
        verified = ledger.verify()
        plot = report.folder / "reading.png"
        draw(report.rows, plot)
        spent = [past.entry.guarantee for past in account.history(0, 1000) if past.entry.verb == "spend"]
        return {
            "folder": str(report.folder),
            "url": ledger.url,
            "questions": report.rows,
            "killed": {"signal": "SIGKILL", "after": report.killed},
            "answers_reused": report.reused,
            "charges": charges,
            "refusal": report.refusal,
            "found": report.found,
            "plain_sum": report.plain_sum,
            "reading": str(account.reading()),
            "admitted": _compare_filters(report.rows, [cost for cost in spent if cost is not None]),
            "plot": str(plot),
            "verified": str(verified),
        }


def draw(rows: Sequence[Event], path: Path) -> None:
    """Draw the plain sum and the reading after each question, and write the picture."""
    axes: Any = blank_axes()
    axes.figure.set_size_inches(8, 3.8)
    sums, readings = ([row[name] for row in rows] for name in ("sum", "loss"))
    asked = range(1, len(rows) + 1)
    axes.step(asked, sums, where="mid", color=_GREY)
    axes.step(asked, readings, where="mid", color=_BLUE, linewidth=2.5)
    axes.axhline(_EPSILON, color="black", linestyle="--", linewidth=1)
    last = asked[-1]
    stopped = sum(total <= _EPSILON for total in sums)
    for text, x, y, color in (
        (f"plain sum of epsilons: {sums[-1]:.2f}", last, sums[-1], _GREY),
        (f"odometer's reading: {readings[-1]:.2f}", last, readings[-1], _BLUE),
    ):
        axes.annotate(text, (x, y), (-8, 8), textcoords="offset points", ha="right", color=color, weight="bold")
    axes.annotate("promised epsilon: 1", (1, _EPSILON), (0, 5), textcoords="offset points")
    axes.plot([stopped], [sums[stopped - 1]], "o", color=_GREY)
    axes.annotate(
        f"adding up stops here,\nafter {stopped} questions",
        (stopped, sums[stopped - 1]),
        (-10, 28),
        textcoords="offset points",
        ha="right",
        color=_GREY,
    )
    axes.plot([last], [readings[-1]], "o", color=_BLUE)
    axes.annotate(
        f"Odograph's filter stops here,\nafter {last} questions",
        (last, readings[-1]),
        (4, -80),
        textcoords="offset points",
        ha="right",
        color=_BLUE,
    )
    axes.set(
        xlabel="questions, each chosen from the answers before it", ylabel="privacy loss", ylim=(0, 1.1 * max(sums))
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.savefig(path, bbox_inches="tight", dpi=150)


def _compare_filters(rows: Sequence[Event], asked: Sequence[Guarantee]) -> dict[str, dict[str, int | None]]:
    """Count the admitted questions under each filter: of the same costs in the same order, and of small ones.

    None where a filter has no theorem for one of these costs.
    """
    admitted: dict[str, dict[str, int | None]] = {}
    for name, chosen in _COMPARED_FILTERS.items():
        other = compile_policy(Policy(POLICY.epsilon, POLICY.delta, privacy_unit=POLICY.privacy_unit, filter=chosen))
        state = AccountState("", other, other.start)
        decisions = quote(state, asked).decisions
        unproven = any(decision.is_unproven for decision in decisions)
        same = None if unproven else sum(decision.admitted for decision in decisions)
        admitted[name] = {"these": same, "small": how_many(state, _SMALL_COST)}
    admitted["basic"]["these"] = sum(row["sum"] <= _EPSILON for row in rows)
    return admitted


def summary_table(form: dict[str, Any]) -> Table:
    """Return what is shown at the end."""
    admitted = form["admitted"]
    these, small = (
        ", ".join(f"{name} {counts[which]}" for name, counts in admitted.items() if counts[which] is not None)
        for which in ("these", "small")
    )
    charges, reused = form["charges"], form["answers_reused"]
    killed = (
        f"after {form['killed']['after']} was charged and before it was answered. The resumed process asked the same"
        f" keys, got the same receipts, and reused {reused} released answers: {charges} questions, {charges} charges,"
        " none lost, none made twice"
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_row()
    grid.add_row("found", form["found"])
    grid.add_row("refused", form["refusal"])
    grid.add_row("killed", killed)
    grid.add_row("odometer", form["reading"])
    grid.add_row("plain sum", f"{form['plain_sum']:.3f}, with each Gaussian at its epsilon for delta {_SHARE:g}")
    grid.add_row("filters", f"of these {charges} questions, admitted before the first refusal: {these}")
    grid.add_row("", f"of questions at epsilon {float(_SMALL_COST.epsilon):g}: {small}")
    grid.add_row("plot", form["plot"])
    grid.add_row("verify", form["verified"])
    return grid


# The analyst.

ATTRIBUTES: Final = {
    "health": ("excellent", "good", "fair", "poor"),
    "diseases": ("few", "some", "many"),
    "limited": ("no", "yes", "unknown"),
    "pays": ("nothing", "a quarter", "half", "all"),
    "deductible": ("no", "yes"),
}
CLAMP: Final = 10  # visits: a row with more counts as this many
DEPTH: Final = 3  # conditions that a group may have
WIDTH: Final = 3  # groups that are split at each level
COUNT_COST: Final = PureDP(0.02)  # of the number of all rows
COUNT_NOISE: Final = 60  # sigma of a question about numbers of rows by all attributes
MIN_EPSILON, MAX_EPSILON = 0.01, 0.035  # of a question about visits
ACCURACY: Final = 0.05  # visits: the wanted error of the mean of a cell of average size
MAX_MARGIN: Final = 1.3  # visits: a cell with a wider margin has too few rows to say anything about it

Column: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The private data: a row per person-year."""

    visits: Column
    attributes: dict[str, Column]

    @classmethod
    def load(cls) -> Rows:
        """Read the table that ships with statsmodels."""
        raw = load_extra("statsmodels.datasets.randhie").load_pandas().data
        percent = np.expm1(raw.lncoins)  # of each bill that the person pays
        tests = {
            "health": [raw.hlthg + raw.hlthf + raw.hlthp == 0, raw.hlthg == 1, raw.hlthf == 1],
            "diseases": [raw.disea < 5, raw.disea < 15],
            "limited": [raw.physlm == 0, raw.physlm == 1],
            "pays": [percent < 1, percent < 30, percent < 60],
            "deductible": [raw.idp == 0],
        }
        named = {name: np.select(tests[name], values[:-1], values[-1]) for name, values in ATTRIBUTES.items()}
        return cls(raw.mdvis.to_numpy(np.int32), named)

    def clamp(self) -> Rows:
        """Return the data with visits limited to the public bound."""
        return replace(self, visits=np.minimum(self.visits.astype(np.int64), CLAMP))


@dataclass(frozen=True)
class Group:
    """Some conditions, the rows that meet them (which are private), and the noisy answers about them."""

    conditions: dict[str, str]
    rows: Column = field(repr=False)  # true or false for every row
    count: int = 0
    mean: float = 0.0
    margin: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{attribute}: {value}" for attribute, value in self.conditions.items()) or "everyone"

    @property
    def last(self) -> tuple[str, str]:
        """The attribute and the value of the condition that was added last."""
        return [*self.conditions.items()][-1]

    def summary(self) -> str:
        """Return the conditions and the noisy answers as text."""
        return f"{self} (about {self.count:,} rows): {self.mean:.1f} +- {self.margin:.1f} visits"

    def with_answers(self, count: int, visits: int, noise: tuple[float, float]) -> Group:
        """Return the group with its mean, from noisy rows and visits; the margin is three times their noise."""
        count = max(1, count)
        mean = visits / count
        margin = 3 * math.hypot(mean * noise[0], noise[1]) / count
        return replace(self, count=count, mean=mean, margin=margin)


@dataclass(frozen=True)
class Question:
    """A question about cells of a group: their numbers of rows, or of visits."""

    text: str
    group: Group
    cells: Sequence[Group]
    about_visits: bool = False
    overlap: int = 1  # how many of the cells a row may be in

    def __str__(self) -> str:
        return f"{self.text} of {self.group}"

    @property
    def sensitivity(self) -> float:
        """How far one row can move the true answers, as a Euclidean distance, rounded up to a 1024th."""
        return (CLAMP if self.about_visits else 1) * math.ceil(1024 * math.sqrt(self.overlap)) / 1024

    def with_gaussian(self, sigma: float) -> DiscreteGaussian:
        """Return what it costs with Gaussian noise, of one parameter for all cells."""
        return discrete_gaussian(sigma, self.sensitivity, self.overlap)

    def noise(self, cost: Guarantee) -> float:
        """Return the scale of the Laplace noise, or the sigma of the Gaussian noise, that a cost pays for."""
        match cost:
            case PureDP() if self.overlap == 1:
                return self.sensitivity / float(cost.epsilon)
            case DiscreteGaussian() if cost == self.with_gaussian(float(cost.sigma)):
                return float(cost.sigma)
        raise InvalidGuarantee(f"cost must be one that {self} can be asked for (got {cost})")

    def columns(self, data: Rows) -> list[Column]:
        """Return the visits of the rows of each cell."""
        return [data.visits[cell.rows] for cell in self.cells]

    def true_answers(self, data: Rows) -> list[int]:
        """Return the true answers, which are private."""
        return [int(column.sum()) if self.about_visits else len(column) for column in self.columns(data)]


class DrillDown(ABC):
    """Splits the most promising groups again and again; a subclass charges and answers the questions.

    The next question, and what to spend on it, depends on the noisy answers so far.
    """

    def __init__(self, account: Account, data: Rows) -> None:
        self.account = account
        self.data = data

    @abstractmethod
    def ask(self, question: Question, wanted: Guarantee | None) -> tuple[list[int], float]:
        """Charge a question and answer it with noise; return the answers and the size of the noise.

        If the wanted cost is refused, the largest admitted one is charged instead.
        """

    def show(self, answer: str) -> None:  # noqa: B027  optional
        """Show the answer to the last question."""

    def run(self) -> list[list[Group]]:
        """Drill down, and return the groups kept at each level."""
        everyone = Group({}, np.ones(len(self.data.visits), dtype=np.bool_))
        (count,), _ = self.ask(Question("rows", everyone, [everyone]), COUNT_COST)
        self.show(f"{count:,}")
        levels = [[replace(everyone, count=max(1, count))]]
        for _ in range(DEPTH):
            found: dict[frozenset[tuple[str, str]], Group] = {}  # a cell may be reached in two ways
            for group in levels[-1]:
                for cells, noise in self._count(group):
                    split = self._split(group, cells, noise)
                    found |= {frozenset(cell.conditions.items()): cell for cell in split}
            # By the lower end of the margin: otherwise a small cell would win by its noise.
            best = sorted(found.values(), key=lambda cell: cell.mean - cell.margin, reverse=True)
            if not best:
                break
            levels.append(best[:WIDTH])
        return levels

    def confirm(self, group: Group) -> Group:
        """Ask about a group again with all that is left: fresh noise is independent of how the group was chosen."""
        quarter = self.account.largest(PureDP, times=4)
        (count,), counting = self.ask(Question("rows again", group, [group]), quarter)
        self.show(f"{count:,}")
        (visits,), noise = self.ask(Question("visits again", group, [group], about_visits=True), PureDP(0.5))
        found = group.with_answers(count, visits, (counting, noise))
        self.show(f"{found.mean:.1f} +- {found.margin:.1f} each")
        return found

    def _count(self, group: Group) -> list[tuple[list[Group], float]]:
        """Ask for the rows of the cells of a group by every attribute; return the cells of each, and the noise."""
        splits = [
            [
                Group(group.conditions | {attribute: value}, group.rows & (self.data.attributes[attribute] == value))
                for value in values
            ]
            for attribute, values in ATTRIBUTES.items()
            if attribute not in group.conditions
        ]
        question = Question("rows by all attributes", group, [*chain(*splits)], overlap=len(splits))
        counts, noise = self.ask(question, question.with_gaussian(COUNT_NOISE))
        numbers = iter(counts)
        counted = [[replace(cell, count=max(1, next(numbers))) for cell in cells] for cells in splits]
        largest = (max(cells, key=lambda cell: cell.count) for cells in counted)
        self.show(", ".join(f"{' '.join(cell.last)} {cell.count:,}" for cell in largest))
        return [(cells, noise) for cells in counted]

    def _split(self, group: Group, cells: Sequence[Group], counting: float) -> list[Group]:
        """Ask for the visits of the cells of a group by one attribute, whose rows have been counted."""
        attribute, _ = cells[0].last
        # The fewer rows the noisy count shows, the more is spent on them.
        wanted = round(min(max(CLAMP * len(cells) / (ACCURACY * group.count), MIN_EPSILON), MAX_EPSILON), 4)
        question = Question(f"visits by {attribute}", group, cells, about_visits=True)
        sums, noise = self.ask(question, PureDP(wanted))
        answers = zip(cells, sums, strict=True)
        found = [cell.with_answers(cell.count, visits, (counting, noise)) for cell, visits in answers]
        kept = sorted((cell for cell in found if cell.margin < MAX_MARGIN), key=lambda cell: cell.mean, reverse=True)
        self.show(", ".join(f"{cell.last[1]} {cell.mean:.1f}" for cell in kept) or "too few rows")
        return kept


class DurableDrillDown(DrillDown):
    """A drill-down that can be killed at any moment and started again.

    Every question has an idempotency key, so it is charged once. Every answer is written to a file before it is
    shown, so it is not drawn again.
    """

    def __init__(self, account: LedgerAccount, answers: Path, data: Rows) -> None:
        super().__init__(account, data)
        self._ledger_account = account
        self._answers = answers
        self._known = read_answers(answers)
        # The costs that an earlier process chose are in the ledger.
        entries = (past.entry for past in account.history(0, 1000))
        self._chosen = {entry.key: entry.guarantee for entry in entries if entry.verb == "spend"}
        self._asked = 0
        self._key = ""

    def next_key(self) -> str:
        """Return the key of the next question: the same in every process, because the answers are the same."""
        self._asked += 1
        return f"q-{self._asked:02}"

    def ask(self, question: Question, wanted: Guarantee | None) -> tuple[list[int], float]:
        """Charge a question and answer it, or return the answer that was written before."""
        key = self._key = self.next_key()
        cost = self._chosen.get(key) or wanted
        try:
            paid, repeated = self._charge(key, question, cost)
        except BudgetExceeded as refused:
            _send("refused", question=str(question), message=str(refused))
            paid, repeated = self._charge(key, question, refused.decision.largest)
        group, answered = str(question.group), key in self._known
        cost_of = {"cost": _brief(paid), "epsilon": _epsilon(paid)}
        names = {"key": key, "question": str(question), "short": question.text, "group": group}
        _send("charged", **names, **cost_of, repeated=repeated, answered=answered)
        if not answered:
            # An answer that was not written was never shown, so the charge still pays for it.
            if not sys.stdin.readline():
                sys.exit(1)  # the demo has ended
            self._write({"key": key, "question": str(question), **cost_of, "answer": self._noisy(question, paid)})
        return self._known[key]["answer"], question.noise(paid)

    def show(self, answer: str) -> None:
        """Send the answer to the last question, and the state of the account."""
        account = self._ledger_account
        spent = used(account.compiled, account.totals)
        _send("answered", key=self._key, answer=answer, loss=account.reading().loss, left=1 - spent)

    def _charge(self, key: str, question: Question, cost: Guarantee | None) -> tuple[Guarantee, bool]:
        if cost is None:
            raise InvalidGuarantee("cost must be a guarantee (got None): nothing is left to ask with")
        question.noise(cost)  # raises for a cost that this question cannot be asked for
        receipt = self._ledger_account.spend(cost, key=key, note=str(question))
        return cost, receipt.repeated

    def _noisy(self, question: Question, paid: Guarantee) -> list[int]:
        truths = question.true_answers(self.data)
        if isinstance(paid, DiscreteGaussian):
            return noisy_gaussian(truths, paid)
        return noisy(truths, int(question.sensitivity), _epsilon(paid))

    def _write(self, line: dict[str, Any]) -> None:
        with self._answers.open("a", encoding="utf-8") as file:
            file.write(jsons.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._known[line["key"]] = line


def read_answers(answers: Path) -> dict[str, dict[str, Any]]:
    """Return the written answers by key; an incomplete last line was never shown, and is removed."""
    if not answers.exists():
        return {}
    text = answers.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        os.truncate(answers, len(whole.encode()))
    lines = [jsons.loads(line) for line in whole.splitlines()]
    return {line["key"]: line for line in lines}


def _epsilon(cost: Guarantee) -> float:
    """Return what a cost adds to the plain sum of epsilons: of a Gaussian, at its share of delta."""
    if isinstance(cost, DiscreteGaussian):
        return gdp_to_dp_epsilon(float(cost.mu), _SHARE)
    return float(getattr(cost, "epsilon", math.inf))


def _brief(cost: Guarantee) -> str:
    """Return a cost in a few characters."""
    return f"mu {float(cost.mu):.3f}" if isinstance(cost, DiscreteGaussian) else f"{_epsilon(cost):.3g}"


def _send(event: str, **more: object) -> None:
    sys.stdout.write(jsons.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


def analyze() -> None:
    """Open the ledger of a folder, or continue with it, and drill down: the main function of the analyst."""
    folder = Path(sys.argv[1])
    with connect(f"sqlite:///{folder / LEDGER}", principal="analyst") as ledger:
        try:
            account = ledger.open_account(ACCOUNT, POLICY, key="open")
        except AccountExists as problem:  # the same key opens it again; this account was opened otherwise
            raise LedgerCorrupt(f"{folder} is not a folder of the demo") from problem
        analyst = DurableDrillDown(account, folder / ANSWERS, Rows.load().clamp())
        best = analyst.confirm(analyst.run()[-1][0])
    _send("found", answer=f"{best.summary()} a year")


if __name__ == "__main__":
    analyze()
