"""`odograph demo`: an adaptive private analysis in memory. Every next question is chosen from the answers so far.

A year of clinic visits holds an outbreak. Rough weekly counts find the weeks, finer daily counts the days, and
finer ones still the district. Each question is charged first and answered by OpenDP's noise second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from odograph.accountant import Accountant
from odograph.budgets import compile_policy
from odograph.core.decide import Decision
from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.offers import how_many, quote, used
from odograph.core.policy import Policy
from odograph.errors import InvalidGuarantee
from odograph.extras import load
from odograph.session import Session, session

__all__ = ["Clinic", "Desk", "demo"]

PEOPLE: Final = 20_000
WEEKS: Final = 52
DISTRICTS: Final = ("Abbey", "Bridge", "Castle", "Docks", "Elms", "Ford", "Grove", "Hill")
_SICK_DAYS: Final = slice(31 * 7 + 2, 32 * 7 + 3)  # Wednesday of week 31 to Wednesday of week 32
_SICK_DISTRICT: Final = DISTRICTS.index("Docks")
ROUGH, FINER, FINEST = PureDP(0.01), PureDP(0.04), PureDP(0.05)


@dataclass(frozen=True, slots=True)
class Clinic:
    """Who came on which day, and who lives where."""

    came: NDArray[np.bool_]  # a row per person, a column per day
    district: NDArray[np.int64]

    @classmethod
    def made_up(cls) -> Clinic:
        """Return the same invented people every time."""
        made = np.random.default_rng(2203)
        district = made.integers(len(DISTRICTS), size=PEOPLE)
        chance = np.full((PEOPLE, WEEKS * 7), 0.015)
        chance[district == _SICK_DISTRICT, _SICK_DAYS] += 0.12
        return cls(made.random(chance.shape) < chance, district)

    def in_week(self, week: int) -> int:
        """How many people came in the week. One person more or less changes it by at most 1."""
        return int(self.came[:, 7 * week : 7 * week + 7].any(axis=1).sum())

    def on_day(self, day: int) -> int:
        """How many people came on the day: sensitivity 1."""
        return int(self.came[:, day].sum())

    def by_district(self, day: int) -> list[int]:
        """How many came on the day, by district. One person is in one district: L1 sensitivity 1."""
        counts = np.bincount(self.district[self.came[:, day]], minlength=len(DISTRICTS))
        return [int(count) for count in counts]

    def ill(self, district: int, days: Sequence[int]) -> int:
        """How many people of the district came on any of the days: sensitivity 1."""
        return int(self.came[self.district == district][:, list(days)].any(axis=1).sum())


@dataclass(frozen=True, slots=True)
class Desk:
    """Where questions are asked: every answer is a run of the session, with OpenDP's noise."""

    account: Accountant
    session: Session
    opendp: Any

    def count(self, truth: int, cost: PureDP) -> int:
        """Answer a count of sensitivity 1."""
        noise = self._laplace(self.opendp.atom_domain(T=int), self.opendp.absolute_distance(T=int), cost)
        return int(self.session.run(noise, truth, cost=cost))

    def histogram(self, truth: list[int], cost: PureDP) -> list[int]:
        """Answer counts that together have L1 sensitivity 1."""
        domain = self.opendp.vector_domain(self.opendp.atom_domain(T=int))
        return list(self.session.run(self._laplace(domain, self.opendp.l1_distance(T=int), cost), truth, cost=cost))

    def left(self) -> str:
        """What is left of the budget."""
        return f"{1 - used(self.account.compiled, self.account.totals):.0%}"

    def _laplace(self, domain: object, metric: object, cost: PureDP) -> Any:  # noqa: ANN401  OpenDP has no types
        # A little more noise than 1/epsilon, so that OpenDP's own bound, rounded up, is still within the cost.
        epsilon = float(cost.epsilon)
        mechanism = self.opendp.m.make_laplace(domain, metric, scale=(1 + 2**-40) / epsilon)
        if mechanism.map(d_in=1) > epsilon:
            raise InvalidGuarantee(f"the mechanism costs {mechanism.map(d_in=1)!r}, more than its {cost!r}")
        return mechanism


def demo() -> None:
    """Run an adaptive private analysis, step by step."""
    opendp = load("opendp.prelude")
    opendp.enable_features("contrib")
    account = Accountant(Policy(epsilon=1, delta="1e-6"))
    console = Console(highlight=False)
    console.print(f"A year of clinic visits by {PEOPLE:,} people. When and where was the outbreak?")
    console.print("Promise: (1, 1e-6)-DP, though the answers choose every next question and cost.\n")
    table = Table("question", "cost", "answer", "left", box=None, pad_edge=False, header_style="bold")
    with session(account) as opened:
        refusal = _investigate(Desk(account, opened, opendp), Clinic.made_up(), table)
    console.print(table)
    console.print(f"\n[bold]The refusal, in full:[/] {refusal}")
    console.print(f"[bold]The odometer:[/] {account.reading()}")
    asked = [entry.guarantee for entry in account.history]
    console.print(f"[bold]These {len(asked)} questions elsewhere:[/] {_elsewhere(asked)}")


def _investigate(desk: Desk, clinic: Clinic, table: Table) -> Decision:
    """Narrow the outbreak down, a row of the table for each stage; return the refusal."""
    weeks = _weeks(desk, clinic, table)
    days = _days(desk, clinic, table, weeks)
    place = _district(desk, clinic, table, days)
    question = f"patients from {DISTRICTS[place]}?"
    greedy = PureDP(0.25)
    refusal = desk.account.decide(greedy)
    table.add_row(question, "0.25", "refused, with an offer", desk.left())
    if isinstance(refusal.largest, PureDP):
        offer = refusal.largest
        answer = desk.count(clinic.ill(place, range(7 * weeks[0], 7 * weeks[-1] + 7)), offer)
        table.add_row("the same, as offered", f"{float(offer.epsilon):.4f}", f"{answer} people", desk.left())
    return refusal


def _weeks(desk: Desk, clinic: Clinic, table: Table) -> list[int]:
    """Look at every week roughly; return those that stand out."""
    counts = [desk.count(clinic.in_week(week), ROUGH) for week in range(WEEKS)]
    usual = int(np.median(counts))
    highest = sorted(range(WEEKS), key=lambda week: -counts[week])[:3]
    # The noise has a scale of 100, and five of those above the usual is hardly ever noise.
    chosen = sorted(week for week in highest if week == highest[0] or counts[week] > usual + 500)
    answer = ", ".join(f"{week + 1}: {counts[week]}" for week in chosen)
    table.add_row("which weeks stand out?", f"{WEEKS} x {ROUGH.epsilon}", f"{answer} (usual {usual})", desk.left())
    return chosen


def _days(desk: Desk, clinic: Clinic, table: Table, weeks: list[int]) -> list[int]:
    """Look at the days of the chosen weeks with more budget; return the worst three."""
    days = [day for week in weeks for day in range(7 * week, 7 * week + 7)]
    counts = {day: desk.count(clinic.on_day(day), FINER) for day in days}
    worst = sorted(sorted(days, key=lambda day: -counts[day])[:3])
    answer = ", ".join(f"{day + 1}: {counts[day]}" for day in worst)
    table.add_row("which days in them?", f"{len(days)} x {FINER.epsilon}", answer, desk.left())
    return worst


def _district(desk: Desk, clinic: Clinic, table: Table, days: list[int]) -> int:
    """Look at the districts on the chosen days with more budget still; return the worst."""
    counts = np.sum([desk.histogram(clinic.by_district(day), FINEST) for day in days], axis=0)
    worst = int(counts.argmax())
    answer = f"{DISTRICTS[worst]}: {counts[worst]} (others about {int(np.median(counts))})"
    table.add_row("which district then?", f"{len(days)} x {FINEST.epsilon}", answer, desk.left())
    return worst


def _elsewhere(asked: Sequence[Guarantee]) -> str:
    """Put the same questions, in the same order, to the other filters; and then the rough one again and again."""
    filters = {
        rule: compile_policy(Policy(epsilon=1, delta="1e-6", rule=rule)) for rule in ("basic", "paper", "exact")
    }
    stops = {
        rule: sum(decision.admitted for decision in quote(other, other.start, asked).decisions)
        for rule, other in filters.items()
    }
    many = {rule: how_many(other, other.start, ROUGH) for rule, other in filters.items()}
    return (
        f"basic composition stops after {stops['basic']}, the paper's filter after {stops['paper']}.\n"
        f"[bold]Weekly counts alone:[/] basic composition admits {many['basic']}, "
        f"the paper's filter {many['paper']}, this one {many['exact']}."
    )
