"""The analyst of the demo, a process of its own, who asks who sees a doctor most often.

Rough questions first, finer ones where something shows: the next question, and what to spend on it, are chosen from
the noisy answers so far. It may be killed at any moment and started again. Every question has a key, so what was
charged stays charged once; every answer is written down before anybody sees it, so what was answered is not drawn
again.

A row is one person in one year of the RAND Health Insurance Experiment, and one row is what is protected. The
attributes, their values, and that visits above 10 count as 10 are public; everything else is asked with noise, the
number of rows too. (The table is public in truth.)

It tells what it does as JSON Lines on standard output, and waits for a line on standard input before it runs a
mechanism: `python -m odograph.cli.drill FOLDER`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.connect import connect
from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.offers import used
from odograph.core.policy import Policy
from odograph.errors import AccountExists, BudgetExceeded, InvalidGuarantee, LedgerCorrupt
from odograph.extras import load
from odograph.integrations.opendp import noisy
from odograph.ledger.account import LedgerAccount

__all__ = ["ACCOUNT", "ANSWERS", "LEDGER", "POLICY", "Desk", "Group", "Rows", "drill", "main", "released"]

ACCOUNT: Final = "drill-down"
LEDGER: Final = "privacy.db"
ANSWERS: Final = "answers.jsonl"
POLICY: Final = Policy(1, "1e-6", unit="person-year")
ATTRIBUTES: Final = {
    "health": ("excellent", "good", "fair", "poor"),
    "diseases": ("few", "some", "many"),
    "limited": ("no", "yes", "unknown"),
    "pays": ("nothing", "a quarter", "half", "all"),
    "deductible": ("no", "yes"),
}
MOST_VISITS: Final = 10  # a row with more counts as this many
DEPTH, WIDTH = 3, 2  # how many conditions a group may have; how many groups are looked into at a time
COUNTING: Final = PureDP(0.02)  # for a question about numbers of rows
LEAST, MOST = 0.01, 0.04  # the epsilon of a question about visits
ACCURACY: Final = 0.05  # in visits: how well the mean of a cell of average size is to be known
WIDEST: Final = 1.3  # in visits: a cell whose margin is wider has too few rows to say anything about

Column: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The private data: a row per person-year."""

    visits: Column
    attributes: dict[str, Column]

    @classmethod
    def load(cls) -> Rows:
        """Read the table that ships with statsmodels."""
        raw = load("statsmodels.datasets.randhie").load_pandas().data
        percent = np.expm1(raw.lncoins)  # of each bill that the person pays
        tests = {
            "health": [raw.hlthg + raw.hlthf + raw.hlthp == 0, raw.hlthg == 1, raw.hlthf == 1],
            "diseases": [raw.disea < 5, raw.disea < 15],
            "limited": [raw.physlm == 0, raw.physlm == 1],
            "pays": [percent < 1, percent < 30, percent < 60],
            "deductible": [raw.idp == 0],
        }
        named = {name: np.select(tests[name], values[:-1], values[-1]) for name, values in ATTRIBUTES.items()}
        return cls(np.minimum(raw.mdvis.to_numpy(np.int64), MOST_VISITS), named)


@dataclass(frozen=True)
class Group:
    """Some conditions, the rows that meet them, which are private, and what noisy answers said of them."""

    conditions: dict[str, str]
    rows: Column = field(repr=False)  # true or false for every row
    count: int = 0
    mean: float = 0.0
    margin: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{attribute}: {value}" for attribute, value in self.conditions.items()) or "everyone"

    def told(self, count: int, visits: int, epsilons: tuple[float, float]) -> Group:
        """Return the group with its mean, from noisy rows and visits; the margin is three times their noise."""
        count = max(1, count)
        mean = visits / count
        margin = 3 * math.hypot(mean / epsilons[0], MOST_VISITS / epsilons[1]) / count
        return replace(self, count=count, mean=mean, margin=margin)


class Desk:
    """Where questions are asked: charged by key, answered by OpenDP's noise, written down before they are told."""

    def __init__(self, account: LedgerAccount, answers: Path) -> None:
        self.account = account
        self._answers = answers
        self._known = released(answers)
        # What an earlier process chose to spend on each question: the ledger remembers it.
        entries = (past.entry for past in account.history(0, 1000))
        self._chosen = {entry.key: entry.guarantee for entry in entries if entry.verb == "spend"}
        self._asked = 0
        self._key = ""

    def next_key(self) -> str:
        """Return the key of the next question: the same in every process, because answers choose the questions."""
        self._asked += 1
        return f"q-{self._asked:02}"

    def ask(
        self, about: tuple[str, Group], truths: Sequence[int], sensitivity: int, wanted: Guarantee | None
    ) -> tuple[list[int], float]:
        """Charge a question about a group and answer it, or find the answer released before; return its epsilon too.

        The truths are of disjoint cells: a row is in one of them at most and moves it by at most `sensitivity`.
        """
        key = self._key = self.next_key()
        question = f"{about[0]} of {about[1]}"
        cost = self._chosen.get(key) or wanted
        try:
            epsilon, repeated = self._charge(key, question, cost)
        except BudgetExceeded as refused:  # nothing was charged; take what is offered
            _tell("refused", question=question, message=str(refused))
            epsilon, repeated = self._charge(key, question, refused.decision.largest)
        told = {"key": key, "question": question, "epsilon": epsilon}
        _tell("charged", **told, short=about[0], group=str(about[1]), repeated=repeated, answered=key in self._known)
        if key not in self._known:
            # What was not written down was seen by nobody, so the charge still pays for it.
            if not sys.stdin.readline():
                sys.exit(1)  # whoever watched is gone
            self._release(told | {"answer": noisy(truths, sensitivity, epsilon)})
        return self._known[key]["answer"], epsilon

    def tell(self, answer: str) -> None:
        """Tell what the last question was answered, and where the account stands."""
        spent = used(self.account.compiled, self.account.totals)
        _tell("answered", key=self._key, answer=answer, loss=self.account.reading().loss, left=1 - spent)

    def _charge(self, key: str, question: str, cost: Guarantee | None) -> tuple[float, bool]:
        if not isinstance(cost, PureDP):
            raise InvalidGuarantee(f"nothing is left to ask with: {cost}")
        receipt = self.account.spend(cost, key=key, note=question)
        return float(cost.epsilon), receipt.repeated

    def _release(self, line: dict[str, Any]) -> None:
        with self._answers.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._known[line["key"]] = line


def released(answers: Path) -> dict[str, dict[str, Any]]:
    """Return the answers that were written down, by key; a line that was cut off was never released, and goes."""
    if not answers.exists():
        return {}
    text = answers.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        os.truncate(answers, len(whole.encode()))
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["key"]: line for line in lines}


def drill(desk: Desk, data: Rows) -> list[Group]:
    """Split the most promising groups again and again; return the last ones, and the best of them asked again."""
    everyone = Group({}, np.ones(len(data.visits), dtype=np.bool_))
    (count,), _ = desk.ask(("rows", everyone), [len(data.visits)], 1, COUNTING)
    desk.tell(f"{count:,}")
    groups = [replace(everyone, count=max(1, count))]
    for _ in range(DEPTH):
        found: dict[frozenset[tuple[str, str]], Group] = {}  # the same cell may be reached in two ways
        for group in groups:
            for attribute in (name for name in ATTRIBUTES if name not in group.conditions):
                found |= {frozenset(cell.conditions.items()): cell for cell in _split(desk, data, group, attribute)}
        # By what the answers show at least: else a small cell would win by its noise.
        best = sorted(found.values(), key=lambda cell: cell.mean - cell.margin, reverse=True)
        if not best:
            break
        groups = best[:WIDTH]
    return [*groups, _confirm(desk, data, groups[0])]


def _split(desk: Desk, data: Rows, group: Group, attribute: str) -> list[Group]:
    """Ask how many rows the cells of a group have, by one attribute, and then how many visits."""
    values = ATTRIBUTES[attribute]
    cells = [
        Group(group.conditions | {attribute: value}, group.rows & (data.attributes[attribute] == value))
        for value in values
    ]
    counts, counting = desk.ask((f"rows by {attribute}", group), [cell.rows.sum() for cell in cells], 1, COUNTING)
    most = sorted(zip(counts, values, strict=True), reverse=True)
    desk.tell(", ".join(f"{value} {count:,}" for count, value in most))
    # The fewer rows the noisy count shows, the more is spent on them.
    wanted = round(min(max(MOST_VISITS * len(cells) / (ACCURACY * group.count), LEAST), MOST), 4)
    truths = [data.visits[cell.rows].sum() for cell in cells]
    sums, epsilon = desk.ask((f"visits by {attribute}", group), truths, MOST_VISITS, PureDP(wanted))
    answers = zip(cells, counts, sums, strict=True)
    told = [cell.told(count, visits, (counting, epsilon)) for cell, count, visits in answers]
    sure = sorted((cell for cell in told if cell.margin < WIDEST), key=lambda cell: cell.mean, reverse=True)
    desk.tell(", ".join(f"{cell.conditions[attribute]} {cell.mean:.1f}" for cell in sure) or "too few rows to tell")
    return sure


def _confirm(desk: Desk, data: Rows, group: Group) -> Group:
    """Ask about one group again, with all that is left: fresh noise does not know that the group was picked."""
    quarter = desk.account.largest(PureDP, times=4)
    (count,), counting = desk.ask(("rows again", group), [group.rows.sum()], 1, quarter)
    desk.tell(f"{count:,}")
    (visits,), epsilon = desk.ask(("visits again", group), [data.visits[group.rows].sum()], MOST_VISITS, PureDP(0.5))
    told = group.told(count, visits, (counting, epsilon))
    desk.tell(f"{told.mean:.1f} +- {told.margin:.1f} each")
    return told


def _tell(event: str, **more: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **more}) + "\n")
    sys.stdout.flush()


def main(make_desk: Callable[[LedgerAccount, Path], Desk] = Desk) -> None:
    """Open the ledger of a folder, or go on with it, and drill down."""
    folder = Path(sys.argv[1])
    with connect(f"sqlite:///{folder / LEDGER}", principal="analyst") as ledger:
        try:
            account = ledger.open_account(ACCOUNT, POLICY, key="open")
        except AccountExists as problem:  # the same key opens it again; another analyst's folder is not ours
            raise LedgerCorrupt(f"{folder} is not a folder of the demo") from problem
        *_, best = drill(make_desk(account, folder / ANSWERS), Rows.load())
    text = f"{best} (about {best.count:,} rows): {best.mean:.1f} +- {best.margin:.1f} visits a year"
    _tell("found", answer=text)


if __name__ == "__main__":
    main()
