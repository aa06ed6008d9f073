"""Who sees a doctor most often? An adaptive drill-down into the RAND Health Insurance Experiment.

Rough questions first, finer ones where something shows: which group to look into, and what to spend on it, is chosen
from the noisy answers so far. All noise is OpenDP's. Odograph decides what is still admitted.

What is protected: one *person-year*. A row is one person in one year of the experiment, and the table does not say
which rows are the same person. People took part for up to five years, so what is (1, 1e-6)-DP for a person-year is
only (5, 8.6e-5)-DP for a person.

What is public: the attributes and their values, and that visits above 10 count as 10. Everything else about the data
is asked with noise, the number of rows too. The table is public in truth, and the constants were tried out on it.

Run it with `python examples/drill_down.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import opendp.prelude as dp
import statsmodels.api as sm

import odograph as odo

dp.enable_features("contrib")

EPSILON, DELTA, UNIT = 1, 1e-6, "person-year"
ATTRIBUTES: Final = {
    "health": ("excellent", "good", "fair", "poor"),
    "diseases": ("few", "some", "many"),
    "limited": ("no", "yes", "unknown"),
    "pays": ("nothing", "a quarter", "half", "all"),
    "deductible": ("no", "yes"),
}
MOST_VISITS: Final = 10  # a row with more counts as this many
DEPTH, WIDTH = 3, 2  # how many conditions a group may have; how many groups are looked into at a time
COUNTING: Final = 0.02  # the epsilon of a question about numbers of rows
LEAST, MOST = 0.01, 0.04  # the epsilon of a question about visits
ACCURACY: Final = 0.05  # in visits: how well the mean of a cell of average size is to be known
WIDEST: Final = 1.3  # in visits: a cell whose margin is wider has too few rows to say anything about

Column: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Question: TypeAlias = Callable[[float], dp.Measurement]  # epsilon -> what OpenDP measures


@dataclass(frozen=True)
class Table:
    """The private data: a row per person-year."""

    visits: Column
    attributes: dict[str, Column]

    @classmethod
    def load(cls) -> Table:
        """Read the table that ships with statsmodels."""
        raw = sm.datasets.randhie.load_pandas().data
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


@dataclass(frozen=True)
class Group:
    """Some conditions, the rows that meet them, which are private, and what noisy answers said of them."""

    conditions: dict[str, str]
    rows: Column = field(repr=False)  # true or false for every row
    count: int = 0
    mean: float = 0.0
    margin: float = 0.0

    def __str__(self) -> str:
        name = ", ".join(f"{attribute}: {value}" for attribute, value in self.conditions.items())
        return f"{name or 'everyone'} (about {self.count:,} rows): {self.mean:.1f} +- {self.margin:.1f} visits"

    def told(self, answers: tuple[int, int], epsilons: tuple[float, float]) -> Group:
        """Return the group with its mean, from noisy rows and visits; the margin is three times their noise."""
        count = max(1, answers[0])
        mean = answers[1] / count
        margin = 3 * math.hypot(mean / epsilons[0], MOST_VISITS / epsilons[1]) / count
        return Group(self.conditions, self.rows, count, mean, margin)


def with_noise(query: Any, epsilon: float) -> dp.Measurement:  # noqa: ANN401  OpenDP's transformation
    """Add OpenDP's Laplace noise, as little as makes the query `epsilon`-DP when a row is added or removed."""
    found: dp.Measurement = dp.binary_search_chain(lambda scale: query >> dp.m.then_laplace(scale), 1, epsilon)
    return found


@cache
def noisy_count(epsilon: float) -> dp.Measurement:
    """Count rows with noise."""
    rows = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    return with_noise(rows >> dp.t.then_count(), epsilon)


@cache
def noisy_visits(epsilon: float) -> dp.Measurement:
    """Sum visits with noise, each clamped to the public bound."""
    rows = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    return with_noise(rows >> dp.t.then_clamp((0, MOST_VISITS)) >> dp.t.then_sum(), epsilon)


def ask(s: odo.Session, question: Question, epsilon: float, cells: Sequence[Column], note: str) -> list[int]:
    """Ask the same of disjoint cells. A row is in one of them at most, so all together cost what one does."""

    def answers() -> list[int]:
        return [question(epsilon)(cell) for cell in cells]

    return s.run(answers, cost=odo.parallel([odo.PureDP(epsilon)] * len(cells)), note=note)


def budget(s: odo.Session, group: Group, cells: int) -> float:
    """Choose an epsilon by the group's noisy size, the more the fewer rows; if it is refused, take the offer."""
    wanted = MOST_VISITS * cells / (ACCURACY * group.count)
    cost = odo.PureDP(round(min(max(wanted, LEAST), MOST), 4))
    decision = s.account.decide(cost)  # asks, and spends nothing
    return epsilon_of(cost if decision.admitted else decision.largest)


def epsilon_of(offer: odo.Guarantee | None) -> float:
    """Return the epsilon of an offer, which is None where nothing is left."""
    if not isinstance(offer, odo.PureDP):
        raise TypeError(f"nothing is left to ask with: {offer}")
    return float(offer.epsilon)


def split(s: odo.Session, table: Table, group: Group, attribute: str) -> list[Group]:
    """Ask how many rows the cells of a group have, by one attribute, and then how many visits."""
    cells = [
        Group(group.conditions | {attribute: value}, group.rows & (table.attributes[attribute] == value))
        for value in ATTRIBUTES[attribute]
    ]
    visits = [table.visits[cell.rows] for cell in cells]
    counts = ask(s, noisy_count, COUNTING, visits, f"rows by {attribute}")
    epsilon = budget(s, group, len(cells))
    sums = ask(s, noisy_visits, epsilon, visits, f"visits by {attribute}")
    answers = zip(counts, sums, strict=True)
    found = [cell.told(both, (COUNTING, epsilon)) for cell, both in zip(cells, answers, strict=True)]
    return [cell for cell in found if cell.margin < WIDEST]


def drill(s: odo.Session, table: Table) -> list[list[Group]]:
    """Split the most promising groups again and again; return the groups kept at each level."""
    everyone = np.ones(len(table.visits), dtype=np.bool_)
    (count,) = ask(s, noisy_count, COUNTING, [table.visits], "rows")
    levels = [[Group({}, everyone, max(1, count))]]
    for _ in range(DEPTH):
        found: dict[frozenset[tuple[str, str]], Group] = {}  # the same cell may be reached in two ways
        for group in levels[-1]:
            for attribute in (name for name in ATTRIBUTES if name not in group.conditions):
                found |= {frozenset(cell.conditions.items()): cell for cell in split(s, table, group, attribute)}
        # By what the answers show at least: else a small cell would win by its noise.
        best = sorted(found.values(), key=lambda cell: cell.mean - cell.margin, reverse=True)
        if not best:
            break
        levels.append(best[:WIDTH])
    return levels


def confirm(s: odo.Session, table: Table, group: Group) -> tuple[Group, str]:
    """Ask about one group again, with all that is left: fresh noise does not know that the group was picked."""
    visits = table.visits[group.rows]
    counting = epsilon_of(s.account.largest(odo.PureDP, times=4))  # a quarter of what is left
    (count,) = ask(s, noisy_count, counting, [visits], "rows, again")
    epsilon, refusal = 0.5, ""
    try:
        total = s.run(noisy_visits(epsilon), visits, cost=odo.PureDP(epsilon), note="visits, again")
    except odo.BudgetExceeded as refused:  # nothing was charged, and the account is as usable as before
        epsilon, refusal = epsilon_of(refused.decision.largest), str(refused)
        total = s.run(noisy_visits(epsilon), visits, cost=odo.PureDP(epsilon), note="visits, again")
    return group.told((count, total), (counting, epsilon)), refusal


def replay(account: odo.Accountant, rule: str) -> int:
    """Put the same costs in the same order to another rule; return how many it admits before its first refusal."""
    other = odo.Accountant(odo.Policy(EPSILON, DELTA, unit=UNIT, rule=rule))
    quote = other.quote(entry.guarantee for entry in account.history)
    return sum(decision.admitted for decision in quote.decisions)


def main() -> None:
    """Drill down, and report."""
    table = Table.load()
    account = odo.Accountant(odo.Policy(EPSILON, DELTA, unit=UNIT), name="drill-down")
    with odo.session(account) as s:
        levels = drill(s, table)
        for conditions, groups in enumerate(levels[1:], 1):
            print(f"most visits, groups with {conditions} condition(s):")
            print(*(f"  {group}" for group in groups), sep="\n")
        print(f"\n{account}\nten more questions of one size may cost {account.largest(odo.PureDP, times=10)} each")
        best, refusal = confirm(s, table, levels[-1][0])
    print(f"{refusal}\n\nthe first of them asked again, at what was offered:\n  {best}\n\n{account}")
    print(f"odometer: {account.reading()}")
    admitted = ", ".join(f"{rule} {replay(account, rule)}" for rule in ("basic", "paper", "zcdp"))
    print(f"of the same {account.totals.steps} questions other rules admit before they stop: {admitted}")


if __name__ == "__main__":
    main()
