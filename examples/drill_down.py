"""Who sees a doctor most often? An adaptive drill-down into the RAND Health Insurance Experiment.

Rough questions come first, finer ones where something shows: which group to look into, and what to spend on it, is
chosen from the noisy answers so far. The strategy and the data are those of `odograph demo`; this example runs them
in memory, with a session and OpenDP's measurements: Gaussian noise where one row is in several cells, Laplace noise
elsewhere. OpenDP adds all noise. Odograph decides what is still admitted.

What is protected: one *person-year*. A row is one person in one year of the experiment, and the table does not say
which rows are the same person. People took part for up to five years, so what is (1, 1e-6)-DP for a person-year is
only (5, 8.6e-5)-DP for a person.

What is public: the attributes and their values, and that visits above 10 count as 10. Everything else about the data
is asked with noise, including the number of rows. In truth the table is public, and the constants were tuned on it.

Run it with `python examples/drill_down.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import opendp.prelude as dp

import odograph as odo
from odograph.cli.demo import CLAMP, DrillDown, Question, Rows

dp.enable_features("contrib")

EPSILON, DELTA, UNIT = 1, 1e-6, "person-year"


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
def noisy_sum(epsilon: float) -> dp.Measurement:
    """Sum visits with noise, each clamped to the public bound."""
    rows = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    return with_noise(rows >> dp.t.then_clamp((0, CLAMP)) >> dp.t.then_sum(), epsilon)


@cache
def noisy_counts(sigma: float) -> dp.Measurement:
    """Add Gaussian noise to numbers of rows; how far one row moves them is said when it is charged."""
    return dp.m.make_gaussian(dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float), sigma)


class SessionDrillDown(DrillDown):
    """A drill-down whose questions are charged and answered by a session."""

    def __init__(self, session: odo.Session, data: Rows) -> None:
        super().__init__(session.account, data)
        self.session = session
        self.refusal = ""

    def ask(self, question: Question, wanted: odo.Guarantee | None) -> tuple[list[int], float]:
        """Charge a question and answer it; if its cost is refused, charge the largest that is admitted."""
        try:
            return self._run(question, wanted)
        except odo.BudgetExceeded as refused:  # nothing was charged, and the account is as usable as before
            self.refusal = str(refused)
            return self._run(question, refused.decision.largest)

    def _run(self, question: Question, cost: odo.Guarantee | None) -> tuple[list[int], float]:
        if cost is None:
            raise TypeError("cost must be a guarantee (got None): nothing is left to ask with")
        noise, columns = question.noise(cost), question.columns(self.data)
        if not isinstance(cost, odo.PureDP):
            # The session reads from OpenDP what this costs.
            counts = [len(column) for column in columns]
            return self.session.run(noisy_counts(noise), counts, d_in=question.sensitivity, note=str(question)), noise
        epsilon = float(cost.epsilon)

        def answers() -> list[int]:
            measurement = noisy_sum(epsilon) if question.about_visits else noisy_count(epsilon)
            return [measurement(column) for column in columns]

        # A row is in at most one of the cells, so asking about all of them costs what asking about one does.
        together = odo.parallel([cost] * len(columns)) if len(columns) > 1 else cost
        return self.session.run(answers, cost=together, note=str(question)), noise


def replay(account: odo.Accountant, rule: str) -> int:
    """Return how many of the same costs, in the same order, another filter admits before its first refusal."""
    other = odo.Accountant(odo.Policy(EPSILON, DELTA, privacy_unit=UNIT, filter=rule))
    costs = [entry.cost for entry in account.history() if entry.verb == "reserve" and entry.cost is not None]
    quote = other.quote(costs)
    return sum(decision.admitted for decision in quote.decisions)


def main() -> None:
    """Drill down, and print a report."""
    account = odo.Accountant(odo.Policy(EPSILON, DELTA, privacy_unit=UNIT), name="drill-down")
    with odo.session(account) as session:
        analyst = SessionDrillDown(session, Rows.load())
        levels = analyst.run()
        for conditions, groups in enumerate(levels[1:], 1):
            print(f"most visits, groups with {conditions} condition(s):")
            print(*(f"  {group.summary()}" for group in groups), sep="\n")
        print(f"\n{account}\nten more questions of one size may cost {account.largest(odo.PureDP, times=10)} each")
        best = analyst.confirm(levels[-1][0])
    print(
        f"{analyst.refusal}\n\nthe first of them asked again, at what was offered:\n  {best.summary()}\n\n{account}"
    )
    print(f"odometer: {account.reading()}")
    admitted = ", ".join(f"{rule} {replay(account, rule)}" for rule in ("zcdp", "renyi"))
    print(f"of the same {account.totals.steps} questions other filters admit before they stop: {admitted}")


if __name__ == "__main__":
    main()
