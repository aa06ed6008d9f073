from __future__ import annotations

import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from charge_history import charges

import odograph as odo
from odograph.core.guarantees import Interactive, exact_of
from odograph.errors import InvalidArgument
from odograph.integrations.tumult import cost_of, evaluate, largest_budget

REASON = "Tumult pins NumPy 1 and pandas 1: `make test-all` runs these in an environment of their own"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Tumult and Spark warn about at import is theirs
    tmlt = pytest.importorskip("tmlt.analytics", reason=REASON)
    exact_number = pytest.importorskip("tmlt.core.utils.exact_number", reason=REASON)
    noise = pytest.importorskip("tmlt.core.measurements.noise_mechanisms", reason=REASON)
    interactive = pytest.importorskip("tmlt.core.measurements.interactive_measurements", reason=REASON)
    measures = pytest.importorskip("tmlt.core.measures", reason=REASON)
    numbers = pytest.importorskip("tmlt.core.domains.numpy_domains", reason=REASON)
    metrics = pytest.importorskip("tmlt.core.metrics", reason=REASON)

TENTH = exact_number.ExactNumber(1) / 10


def account(**settings: Any) -> odo.Accountant:
    return odo.Accountant(odo.Policy(1, 1e-6, **settings))


# Budgets.


def test_budgets_are_read_exactly() -> None:
    assert cost_of(tmlt.PureDPBudget(TENTH)) == odo.PureDP("0.1")
    assert cost_of(tmlt.PureDPBudget(2)) == odo.PureDP(2)
    assert cost_of(tmlt.ApproxDPBudget(0.5, 0.125)) == odo.ApproxDP(0.5, 0.125)
    assert cost_of(tmlt.RhoZCDPBudget(0.25)) == odo.ZCDP(0.25)
    for value in (0.1, 0.7, 1 / 3):
        cost = cost_of(tmlt.PureDPBudget(value))
        assert isinstance(cost, odo.PureDP)
        assert exact_of(cost.epsilon) == Fraction(value)  # what Tumult adds noise for
    assert exact_of(odo.PureDP(0.1).epsilon) < Fraction(0.1)  # the broken twin: the float read as a decimal


def test_irrational_budgets_are_rounded_up() -> None:
    cost = cost_of(tmlt.PureDPBudget(exact_number.ExactNumber("sqrt(2)")))
    assert isinstance(cost, odo.PureDP)
    assert 2 <= exact_of(cost.epsilon) ** 2 < 2 + Fraction(1, 10**12)


@pytest.mark.parametrize(
    "budget",
    [
        tmlt.PureDPBudget(math.inf),
        tmlt.RhoZCDPBudget(math.inf),
        tmlt.ApproxDPBudget(math.inf, 0),
        tmlt.ApproxDPBudget(0.5, 1),
    ],
)
def test_infinite_budgets_are_refused(budget: Any) -> None:  # noqa: ANN401  untyped library
    assert budget.is_infinite
    with pytest.raises(odo.errors.InvalidGuarantee):
        cost_of(budget)


def test_tumult_protects_added_rows() -> None:
    with pytest.raises(odo.UnprovenComposition, match="replace-one"):
        cost_of(tmlt.PureDPBudget(1), neighbors="replace-one")


def test_the_library_finds_budgets_by_themselves() -> None:
    acc = account(filter="exact")
    acc.spend(odo.cost_of(tmlt.PureDPBudget(TENTH)))
    assert charges(acc)[0].cost == odo.PureDP(0.1)
    with pytest.raises(odo.UnprovenComposition, match="filter='zcdp'"):
        acc.spend(odo.cost_of(tmlt.RhoZCDPBudget(0.001)))
    with pytest.raises(odo.errors.InvalidGuarantee, match="AddOneRow"):
        odo.cost_of(tmlt.AddOneRow())


@pytest.mark.parametrize("times", [1, 3, 10])
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (tmlt.PureDPBudget, "basic"),
        (tmlt.PureDPBudget, "exact"),
        (tmlt.RhoZCDPBudget, "zcdp"),
        (tmlt.ApproxDPBudget(1, 1e-9), "paper"),
    ],
)
def test_the_largest_budget_is_admitted_and_no_larger_one(kind: Any, rule: str, times: int) -> None:  # noqa: ANN401
    settings = {"delta_steps": 1e-7} if rule == "paper" else {}
    acc, greedy = (account(filter=rule, **settings) for _ in range(2))
    budget = largest_budget(acc, kind, times)
    for _ in range(times):
        acc.spend(cost_of(budget))
    if isinstance(kind, type):
        bigger = budget * 1.0001
    else:
        assert budget.value[1] == kind.value[1]
        bigger = tmlt.ApproxDPBudget(budget.epsilon * 1.0001, 1e-9)
    assert not greedy.quote([cost_of(bigger)] * times).admitted


def test_nothing_left_is_no_budget() -> None:
    acc = account(filter="basic")
    acc.spend(odo.PureDP(1))
    assert largest_budget(acc, tmlt.PureDPBudget) is None
    with pytest.raises(InvalidArgument, match="delta"):
        largest_budget(acc, tmlt.ApproxDPBudget)


# Measurements of Tumult Core; these need no Spark.


def geometric(scale: int) -> Any:  # noqa: ANN401  untyped library
    return noise.AddGeometricNoise(scale)


def test_a_core_measurement_runs_in_a_session() -> None:
    acc = account()
    with odo.session(acc) as s:
        answer = s.run(geometric(10), 1000, d_in=1)
    assert abs(answer - 1000) < 1000
    assert charges(acc)[0].cost == odo.PureDP("0.1")
    gaussian = noise.AddDiscreteGaussianNoise(sigma_squared=4)
    assert cost_of(gaussian, d_in=1) == odo.ZCDP(0.125)
    with pytest.raises(InvalidArgument, match="d_in must be given"):
        cost_of(geometric(10))
    with pytest.raises(InvalidArgument, match="at least one neighbor"):
        cost_of(geometric(10), d_in=0)
    with pytest.raises(odo.errors.InvalidGuarantee, match="no privacy"):
        cost_of(geometric(0), d_in=1)


def test_an_interactive_measurement_is_charged_whole_and_asked() -> None:
    composition = interactive.SequentialComposition(
        input_domain=numbers.NumpyIntegerDomain(),
        input_metric=metrics.AbsoluteDifference(),
        output_measure=measures.PureDP(),
        d_in=1,
        privacy_budget=TENTH,
    )
    acc = account()
    with odo.session(acc) as s, pytest.raises(odo.UnprovenComposition, match=r"account\.interact"):
        s.run(composition, 1000, d_in=1)
    assert acc.totals == acc.compiled.start
    with acc.interact(composition, 1000, d_in=1) as q:
        query = interactive.MeasurementQuery(interactive.MakeInteractive(geometric(20)))
        for _ in range(2):  # an answer of Tumult's can be asked itself, under the same charge
            assert abs(q(query)(None) - 1000) < 1000
        with pytest.raises(Exception, match=r"(?i)budget"):
            q(query)
    with pytest.raises(odo.errors.AccountClosed):
        q(query)
    assert [entry.cost for entry in charges(acc)] == [Interactive(odo.PureDP("0.1"))]


# The hook, with a real Tumult session on Spark.


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        spark_session = pytest.importorskip("pyspark.sql").SparkSession
        folder = str(tmp_path_factory.mktemp("warehouse"))
        options = {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": folder,
            "spark.ui.enabled": "false",
        }
        builder = spark_session.builder.master("local[1]")
        for name, value in options.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        yield spark.createDataFrame([(i,) for i in range(200)], ["A"])
        spark.stop()


class Watched:
    """A Tumult session, and what its account had been charged when each query came."""

    def __init__(self, session: Any, acc: odo.Accountant) -> None:  # noqa: ANN401  untyped library
        self.session, self.account = session, acc
        self.seen: list[int] = []
        self.answer: Any = None

    def evaluate(self, query: Any, budget: Any) -> Any:  # noqa: ANN401  untyped library
        self.seen.append(self.account.totals.steps)
        self.answer = self.session.evaluate(query, budget)
        return self.answer


def charged_first(run: Callable[..., Any], session: Watched, budget: Any) -> bool:  # noqa: ANN401  untyped library
    before, seen = session.account.totals.steps, len(session.seen)
    try:
        run(session.account, session, tmlt.QueryBuilder("rows").count(), budget)
    except odo.BudgetExceeded:
        return len(session.seen) == seen and session.account.totals.steps == before
    return session.seen[seen:] == [before + 1]


@pytest.mark.filterwarnings("ignore")  # Spark's and Tumult's own
def test_queries_are_charged_before_tumult_sees_them(rows: Any) -> None:  # noqa: ANN401  untyped library
    acc = account()
    session = tmlt.Session.from_dataframe(
        tmlt.PureDPBudget(math.inf), "rows", rows, protected_change=tmlt.AddOneRow()
    )
    watched = Watched(session, acc)

    def run_first(acc: odo.Accountant, session: Any, query: Any, budget: Any) -> Any:  # noqa: ANN401  untyped library
        answer = session.evaluate(query, budget)
        acc.spend(cost_of(budget))
        return answer

    assert charged_first(evaluate, watched, tmlt.PureDPBudget(0.25))
    assert abs(watched.answer.collect()[0]["count"] - 200) < 200
    assert charges(acc)[0].cost == odo.PureDP(0.25)
    assert charged_first(evaluate, watched, tmlt.PureDPBudget(5))  # refused: Tumult never sees it
    assert not charged_first(run_first, watched, tmlt.PureDPBudget(5))
    with pytest.raises(odo.errors.InvalidGuarantee):
        evaluate(acc, session, tmlt.QueryBuilder("rows").count(), tmlt.PureDPBudget(math.inf))
    assert acc.totals.steps == 1


@pytest.mark.filterwarnings("ignore")  # Spark's and Tumult's own
@pytest.mark.parametrize(
    ("budget", "rule"), [(tmlt.PureDPBudget(TENTH), "exact"), (tmlt.RhoZCDPBudget(TENTH / 100), "zcdp")]
)
def test_a_session_is_charged_whole_and_divides_its_budget_itself(rows: Any, budget: Any, rule: str) -> None:  # noqa: ANN401  untyped library
    session = tmlt.Session.from_dataframe(budget, "rows", rows, protected_change=tmlt.AddOneRow())
    acc = account(filter=rule)
    query = tmlt.QueryBuilder("rows").count()
    with acc.interact(session, note="Tumult") as q:
        for _ in range(2):
            assert q.evaluate(query, budget / 2).count() == 1
        assert str(q.remaining_privacy_budget) != str(budget)
        with pytest.raises(Exception, match=r"(?i)budget"):
            q.evaluate(query, budget / 2)
    assert [entry.cost for entry in charges(acc)] == [Interactive(cost_of(budget))]
    with pytest.raises(odo.errors.AccountClosed):
        q.evaluate(query, budget / 2)
