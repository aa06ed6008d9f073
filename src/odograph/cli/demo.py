"""`odograph demo`: an adaptive private analysis whose process is killed and started again, with a durable ledger.

The analyst (`drill`) is a process of its own. This one lets it run question by question, shows what it does, kills it
after a question was charged and before it was answered, starts it again, and counts charges and answers at the end.
"""

from __future__ import annotations

import json as jsons
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from odograph.budgets import compile_policy
from odograph.cli.drill import ACCOUNT, ANSWERS, LEDGER, POLICY
from odograph.cli.options import AsJson, say
from odograph.cli.plot import save_picture
from odograph.connect import connect
from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.offers import how_many, quote
from odograph.core.policy import Policy
from odograph.errors import LedgerError, OdographError
from odograph.extras import load
from odograph.ledger.account import LedgerAccount

__all__ = ["ANALYST", "Report", "demo", "investigate", "tally"]

ANALYST: Final = (sys.executable, "-m", "odograph.cli.drill")
KILLED_AFTER: Final = 17  # the question whose charge is the last thing that the first process does
_SMALL: Final = PureDP(0.01)
_RULES: Final = ("basic", "paper", "zcdp", "exact")

Event = dict[str, Any]


@dataclass
class Report:
    """What happened, for people and programs."""

    folder: Path
    rows: list[Event] = field(default_factory=list)  # a question each, and how it was answered
    killed: str = ""  # the key of the question that was charged and not answered
    reused: int = 0  # answers that the second process found written down
    refusal: str = ""
    found: str = ""
    finished: bool = False

    def take(self, event: Event) -> None:
        """Take in what the analyst tells."""
        kind = event["event"]
        if kind == "refused":
            self.refusal = event["message"]
        elif kind == "found":
            self.found = event["answer"]
        elif kind == "charged":
            self.reused += event["answered"]
            if all(row["key"] != event["key"] for row in self.rows):
                told = {name: event[name] for name in ("key", "question", "short", "group", "epsilon")}
                self.rows.append({**told, "answer": "", "loss": None, "left": None})
        elif kind == "answered":
            row = next(row for row in self.rows if row["key"] == event["key"])
            if not row["answer"]:
                row.update(answer=event["answer"], loss=event["loss"], left=event["left"])

    def table(self, height: int) -> RenderableType:
        """Return the table: all of it once it is finished, and as many of the last rows as fit before."""
        table = Table(box=None, header_style="bold", pad_edge=False, expand=True)
        for name, width in (("", 4), ("question", 33), ("cost", 7), ("noisy answer", 0), ("reading", 7), ("left", 4)):
            # What does not fit is cut, so that a question is a line; the answer has the room that is left.
            table.add_column(name, no_wrap=True, overflow="ellipsis", width=width or None, ratio=None if width else 1)
        shown = self.rows if self.finished else self.rows[-max(3, height // 2) :]
        group = ""
        for row in shown:
            if row["group"] != group:
                group = row["group"]
                table.add_row("", f"of {group}", style="italic")
            reading = "" if row["loss"] is None else f"{row['loss']:.3f}"
            left = "" if row["left"] is None else f"{row['left']:.0%}"
            table.add_row(row["key"], f"  {row['short']}", f"{row['epsilon']:.4g}", row["answer"], reading, left)
            if row["key"] == self.killed:
                again = f"{self.reused} answers reused" if self.reused else "starting again"
                table.add_row("", "^ charged; then killed by SIGKILL", "", again, style="bold red")
        return table


def demo(
    *,
    folder: Annotated[
        Path | None, typer.Option(help="A new folder to work in; odograph-demo-1, -2, ... here if left out.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Run an adaptive private analysis on real data, kill it in the middle, and resume it.

    No charge is lost and none is made twice. The ledger, the answers and a plot stay in the folder.
    """
    for library in ("statsmodels", "opendp", "matplotlib"):  # before a folder is made; the first names them all
        load(library)
    report = Report(_new_folder(folder))
    console = Console(highlight=False, markup=False, emoji=False, quiet=json)
    console.print("Who sees a doctor most often? Asked of the RAND Health Insurance Experiment.")
    console.print(f"Promise: {POLICY.target} for each person-year, though every next question,")
    console.print("and what is spent on it, is chosen from the noisy answers so far.\n")
    if console.is_terminal:
        with Live(get_renderable=lambda: report.table(console.height), console=console) as live:
            investigate(report, live.refresh)
            report.finished = True
    else:
        investigate(report)
        report.finished = True
        console.print(report.table(console.height))
    form = _examined(report)
    say(form, _ending(form), as_json=json)
    # Not in the table, which would break the lines: they are to be copied.
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
    """Let an analyst work, kill it when a question was charged, and let another go on in the same folder."""
    with _started(analyst, report.folder) as process:
        for event in _events(process):
            report.take(event)
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
    with _started(analyst, report.folder) as process:
        for event in _events(process):
            report.take(event)
            refresh()
            if event["event"] == "charged" and not event["answered"]:
                _let_run(process)
    if process.returncode != 0:
        raise OdographError(f"the resumed analyst failed, with exit code {process.returncode}")


def tally(account: LedgerAccount, folder: Path) -> int:
    """Return how many charges there are, if each paid for one answer; else raise and say which did not."""
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
    raise LedgerError("there are a thousand folders of this demo here; remove some")


def _started(analyst: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    # In a group of its own: an interrupt from the keyboard is for this process, and its end is the other's end.
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


def _examined(report: Report) -> dict[str, Any]:
    """Look at what is in the folder now: verify the ledger, count charges and answers, draw the reading."""
    with connect(f"sqlite:///{report.folder / LEDGER}") as ledger:
        account = ledger.account(ACCOUNT)
        charges = tally(account, report.folder)
        verified = ledger.verify()
        plot = report.folder / "reading.png"
        save_picture(account, plot)
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
            "reading": str(account.reading()),
            "admitted": _elsewhere([cost for cost in spent if cost is not None]),
            "plot": str(plot),
            "verified": str(verified),
        }


def _elsewhere(asked: Sequence[Guarantee]) -> dict[str, dict[str, int]]:
    """Put the same costs in the same order to every rule; and then a small one again and again."""
    admitted = {}
    for rule in _RULES:
        other = compile_policy(Policy(POLICY.epsilon, POLICY.delta, unit=POLICY.unit, rule=rule))
        same = sum(decision.admitted for decision in quote(other, other.start, asked).decisions)
        admitted[rule] = {"these": same, "small": how_many(other, other.start, _SMALL)}
    return admitted


def _ending(form: dict[str, Any]) -> Table:
    admitted = form["admitted"]
    these = ", ".join(f"{rule} {counts['these']}" for rule, counts in admitted.items())
    small = ", ".join(f"{rule} {counts['small']}" for rule, counts in admitted.items())
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
    grid.add_row("odometer", form["reading"])
    grid.add_row("killed", killed)
    grid.add_row("each rule", f"of these {charges} questions, admitted before the first refusal: {these}")
    grid.add_row("", f"of questions at epsilon {float(_SMALL.epsilon):g}: {small}")
    grid.add_row("plot", form["plot"])
    grid.add_row("verify", form["verified"])
    return grid
