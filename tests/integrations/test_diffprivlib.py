"""The accountant for diffprivlib, under its real tools and models; its own accountant says what must be charged."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from charge_history import charges
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo

pytest.importorskip("diffprivlib", reason="diffprivlib is not installed: see `make test`")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: see `make test`")

import diffprivlib as dp
from diffprivlib import mechanisms, models, tools
from diffprivlib.mechanisms.transforms import RoundedInteger
from sklearn.base import clone

from odograph.errors import InvalidArgument
from odograph.integrations.diffprivlib import BudgetAccountant, BudgetRefused, cost_of

RNG: Final = np.random.default_rng(7)
X: Final = RNG.random((60, 3))
Y: Final = (X[:, 0] > 0.5).astype(int)
HOLES: Final = np.where(X < 0.02, np.nan, X)
EPSILON: Final = 0.3
Untyped: TypeAlias = Any  # what an untyped library takes and gives
Tool: TypeAlias = Callable[..., Any]

TOOLS: Final[dict[str, Tool]] = {
    "count_nonzero": lambda **a: tools.count_nonzero(Y, **a),
    "mean": lambda **a: tools.mean(X, bounds=(0, 1), **a),
    "mean by column": lambda **a: tools.mean(X, bounds=(0, 1), axis=0, **a),
    "mean, kept dimensions": lambda **a: tools.mean(X, bounds=(0, 1), keepdims=True, **a),
    "var": lambda **a: tools.var(X, bounds=(0, 1), **a),
    "std": lambda **a: tools.std(X, bounds=(0, 1), **a),
    "sum by row": lambda **a: tools.sum(X, bounds=(0, 1), axis=1, **a),
    "nansum": lambda **a: tools.nansum(HOLES, bounds=(0, 1), **a),
    "histogram": lambda **a: tools.histogram(X[:, 0], range=(0, 1), **a),
    "histogram, density": lambda **a: tools.histogram(X[:, 0], range=(0, 1), density=True, **a),
    "histogram2d": lambda **a: tools.histogram2d(X[:, 0], X[:, 1], bins=3, range=[(0, 1), (0, 1)], **a),
    "histogramdd": lambda **a: tools.histogramdd(X, bins=3, range=[(0, 1)] * 3, **a),
    "quantile": lambda **a: tools.quantile(X, 0.5, bounds=(0, 1), **a),
    "seven quantiles": lambda **a: tools.quantile(X, np.linspace(0.1, 0.9, 7), bounds=(0, 1), **a),
    "percentiles": lambda **a: tools.percentile(X, [25, 50, 75], bounds=(0, 1), **a),
    "median by column": lambda **a: tools.median(X, bounds=(0, 1), axis=0, **a),
}

MODELS: Final[dict[str, Tool]] = {
    "LogisticRegression": lambda **a: models.LogisticRegression(data_norm=1, fit_intercept=False, **a),
    "GaussianNB": lambda **a: models.GaussianNB(bounds=(0, 1), **a),
    "PCA": lambda **a: models.PCA(2, bounds=(0, 1), data_norm=2, **a),
    "PCA, centred": lambda **a: models.PCA(2, centered=True, data_norm=2, **a),
    "StandardScaler": lambda **a: models.StandardScaler(bounds=(0, 1), **a),
    "DecisionTreeClassifier": lambda **a: models.DecisionTreeClassifier(bounds=(0, 1), classes=[0, 1], **a),
    "RandomForestClassifier": lambda **a: models.RandomForestClassifier(4, bounds=(0, 1), classes=[0, 1], **a),
    "RandomForest, threads": lambda **a: models.RandomForestClassifier(
        4, n_jobs=2, bounds=(0, 1), classes=[0, 1], **a
    ),
}

quiet = pytest.mark.filterwarnings("ignore:.*L-BFGS-B solver are deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _no_default_left() -> None:
    dp.BudgetAccountant.pop_default()


def account(epsilon: float = 8, neighbors: str = "replace-one", **choices: Any) -> odo.Accountant:
    return odo.Accountant(odo.Policy(epsilon, 1e-6, filter="zcdp", neighbors=neighbors, **choices))


def times(name: str, neighbors: str = "replace-one") -> int:
    """How often a tool's epsilon counts: what is for an added record counts twice for a replaced one."""
    counted = ("histogram", "GaussianNB", "DecisionTree", "RandomForest")
    return 2 if neighbors == "replace-one" and name.startswith(counted) else 1


def charged(account: odo.Accountant) -> list[tuple[float, float]]:
    """What the account was charged, read from its own entries."""
    return [
        (float(entry.cost.epsilon), float(getattr(entry.cost, "delta", 0)))  # type: ignore[union-attr]  # pairs only
        for entry in charges(account)
    ]


@pytest.mark.parametrize("name", list(TOOLS))
def test_a_tool_is_charged_what_diffprivlib_counts(name: str) -> None:
    theirs, own = dp.BudgetAccountant(), account()
    TOOLS[name](epsilon=EPSILON, accountant=theirs)
    ours = BudgetAccountant(own)
    TOOLS[name](epsilon=EPSILON, accountant=ours)
    factor = times(name)
    assert charged(own) == ours.spent_budget == [(factor * epsilon, delta) for epsilon, delta in theirs.spent_budget]
    assert len(ours) == len(theirs) == own.totals.steps
    assert ours.total()[0] == pytest.approx(factor * theirs.total()[0], rel=1e-12)
    assert ours.total()[0] == pytest.approx(factor * EPSILON, rel=1e-12)


@quiet
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_is_charged_once_for_a_fit(name: str) -> None:
    theirs, own = dp.BudgetAccountant(), account()
    MODELS[name](epsilon=EPSILON, accountant=theirs).fit(X, Y)
    model = MODELS[name](epsilon=EPSILON, accountant=BudgetAccountant(own))
    model.fit(X, Y)
    assert theirs.spent_budget == [(EPSILON, 0)]
    assert charged(own) == [(times(name) * EPSILON, 0)]
    model.fit(X, Y)
    assert charged(own) == [(times(name) * EPSILON, 0)] * 2


def test_a_partial_fit_is_a_charge() -> None:
    own = account()
    model = models.GaussianNB(epsilon=EPSILON, bounds=(0, 1), accountant=BudgetAccountant(own))
    for _ in range(3):
        model.partial_fit(X, Y, classes=[0, 1])
    assert charged(own) == [(2 * EPSILON, 0)] * 3


@quiet
def test_as_the_default_it_pays_for_what_names_no_accountant() -> None:
    own = account()
    with BudgetAccountant(own) as ours:
        assert dp.BudgetAccountant.load_default(None) is ours
        tools.mean(X, epsilon=0.1, bounds=(0, 1))
        models.LogisticRegression(epsilon=0.2, data_norm=1, fit_intercept=False).fit(X, Y)
    assert charged(own) == [(0.1, 0), (0.2, 0)]
    tools.mean(X, epsilon=0.4, bounds=(0, 1))  # outside: not ours any more
    assert BudgetAccountant(own).set_default() is dp.BudgetAccountant.load_default(None)
    tools.mean(X, epsilon=0.5, bounds=(0, 1))
    dp.BudgetAccountant.pop_default()
    tools.mean(X, epsilon=0.6, bounds=(0, 1))
    assert charged(own) == [(0.1, 0), (0.2, 0), (0.5, 0)]


def test_a_forest_whose_trees_take_the_default_is_charged_for_them_too() -> None:
    # More than needed, never less: a clone of a model cannot be told from a tree that its forest cloned.
    own = account()
    with BudgetAccountant(own):
        models.RandomForestClassifier(4, epsilon=EPSILON, bounds=(0, 1), classes=[0, 1]).fit(X, Y)
    assert charged(own) == [(2 * EPSILON, 0)] * 5


def test_a_clone_of_a_model_spends_from_the_same_account() -> None:
    def after_two_fits(accountant: Untyped) -> Untyped:
        model = models.StandardScaler(epsilon=EPSILON, bounds=(0, 1), accountant=accountant)
        model.fit(X)
        clone(model).fit(X)
        return accountant.total()[0]

    assert after_two_fits(BudgetAccountant(account())) == 2 * EPSILON
    assert after_two_fits(dp.BudgetAccountant()) == EPSILON  # theirs forgets what a grid search spends


def test_a_copy_is_the_same_budget_and_a_pickle_cannot_spend() -> None:
    ours = BudgetAccountant(account())
    ours.spend(0.1, 0)
    assert copy.copy(ours) is ours
    assert copy.deepcopy(ours) is ours
    again = pickle.loads(pickle.dumps(ours))  # noqa: S301  our own bytes
    assert again.spent_budget == [(0.1, 0)]
    with pytest.raises(odo.errors.AccountClosed):
        again.spend(0.1, 0)
    double = pickle.loads(pickle.dumps(dp.BudgetAccountant(0.1, 0)))  # noqa: S301  our own bytes
    double.spend(0.1, 0)  # theirs: every worker process gets the whole budget


@quiet
def test_a_refusal_is_a_budget_error_with_a_decision_and_leaves_everything_usable() -> None:
    own = account(1)
    ours = BudgetAccountant(own)
    model = models.LogisticRegression(epsilon=1.5, data_norm=1, fit_intercept=False, accountant=ours)
    with pytest.raises(dp.utils.BudgetError) as caught:
        model.fit(X, Y)
    assert isinstance(caught.value, BudgetRefused)
    assert isinstance(caught.value, odo.BudgetExceeded)
    assert isinstance(caught.value.decision.largest, odo.PureDP)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), BudgetRefused)  # noqa: S301  our own bytes
    assert not hasattr(model, "coef_")
    assert own.totals.steps == len(ours) == 0
    model.set_params(epsilon=float(caught.value.decision.largest.epsilon)).fit(X, Y)
    assert own.totals.steps == 1


class Raises:
    """Data that raises when it is looked at: a check came before, no spend comes after."""

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        raise RuntimeError("the data broke")


def test_what_raises_halfway_stays_charged() -> None:
    def charged_after_a_failure(accountant: Untyped) -> Untyped:
        with pytest.raises(RuntimeError):
            tools.mean(Raises(), epsilon=0.1, bounds=(0, 1), accountant=accountant)
        return accountant.spent_budget

    assert charged_after_a_failure(BudgetAccountant(account())) == [(0.1, 0)]
    assert charged_after_a_failure(dp.BudgetAccountant()) == []


class PairsByAmount(BudgetAccountant):
    """A broken twin: any earlier check of the same amount is taken for the one to confirm."""

    def __init__(self, account: odo.Accountant) -> None:
        super().__init__(account)
        self.waiting: list[tuple[float, float]] = []

    def check(self, epsilon: float, delta: float) -> bool:
        super().check(epsilon, delta)
        self.waiting.append((epsilon, delta))
        return True

    def spend(self, epsilon: float, delta: float) -> BudgetAccountant:
        if (epsilon, delta) in self.waiting:
            self.waiting.remove((epsilon, delta))
            return self
        return super().spend(epsilon, delta)


def test_a_check_that_got_no_spend_does_not_pay_for_another() -> None:
    def charged(ours: BudgetAccountant) -> int:
        nothing = tools.quantile([0.1, math.nan], 0.5, epsilon=0.1, bounds=(0, 1), accountant=ours)
        assert math.isnan(nothing)  # it said that there is a NaN in the data, and never calls spend
        with pytest.raises(RuntimeError):
            tools.mean(Raises(), epsilon=0.1, bounds=(0, 1), accountant=ours)
        ours.spend(0.1, 0)  # somebody's own mechanism, of the same price
        tools.mean(X, epsilon=0.1, bounds=(0, 1), accountant=ours)
        return len(ours)

    assert charged(BudgetAccountant(account())) == 4
    assert charged(PairsByAmount(account())) < 4


def test_every_order_of_checks_and_spends_is_charged_for_each_answer() -> None:
    ours = BudgetAccountant(account())
    ours.check(0.1, 0)
    ours.spend(0.1, 0)
    assert len(ours) == 1  # confirmed
    ours.spend(0.1, 0)
    assert len(ours) == 2  # a second answer for one check
    ours.check(0.1, 0)
    ours.spend(0.2, 0)
    assert ours.spent_budget[2:] == [(0.1, 0), (0.2, 0)]  # not what was checked
    ours.check(0.1, 0)
    ours.check(0.1, 0)
    ours.spend(0.1, 0)
    assert len(ours) == 6

    def half(verb: Callable[[float, float], object]) -> None:
        verb(0.3, 0)  # one function, in two threads

    half(ours.check)
    other = threading.Thread(target=half, args=(ours.spend,))
    other.start()
    other.join()
    assert ours.spent_budget[6:] == [(0.3, 0)] * 2  # another thread's answer is another answer


class Waits:
    """Data that is handed out only when all threads stand between their check and their spend, or after a while."""

    shape = X.shape

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def __len__(self) -> int:
        return len(X)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray[Any, Any]:
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(timeout=0.3)
        return X


def answers_of_two_threads(accountant: Untyped) -> int:
    """Fit two models at once, each for 0.6, and count those that have an answer to show."""
    barrier = threading.Barrier(2)
    fitted = [models.StandardScaler(epsilon=0.6, bounds=(0, 1), accountant=accountant) for _ in range(2)]

    def fit(model: Untyped) -> None:
        with suppress(dp.utils.BudgetError):
            model.fit(Waits(barrier))

    threads = [threading.Thread(target=fit, args=(model,)) for model in fitted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(hasattr(model, "mean_") for model in fitted)


def test_two_threads_cannot_spend_the_same_budget() -> None:
    assert (
        answers_of_two_threads(
            BudgetAccountant(odo.Accountant(odo.Policy(1, 0, filter="basic", neighbors="replace-one")))
        )
        == 1
    )
    assert answers_of_two_threads(dp.BudgetAccountant(1, 0)) == 2  # 1.2 of 1: both checks pass before either spend


class Slow(dp.BudgetAccountant):  # type: ignore[misc]  # the library is untyped
    """diffprivlib's accountant on a machine that changes threads between its check and its append."""

    barrier = threading.Barrier(2)

    def check(self, epsilon: float, delta: float) -> bool:
        fits = bool(super().check(epsilon, delta))
        self.barrier.wait(timeout=5)
        return fits


def test_a_check_then_append_race_cannot_overspend() -> None:
    def spent(accountant: Untyped) -> Untyped:
        def spend() -> None:
            with suppress(dp.utils.BudgetError):
                accountant.spend(0.6, 0)

        threads = [threading.Thread(target=spend) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return accountant.total()[0]

    assert spent(BudgetAccountant(odo.Accountant(odo.Policy(1, 0, filter="basic", neighbors="replace-one")))) == 0.6
    assert spent(Slow(1, 0)) == 1.2


def spendable(accountant: Untyped, k: int) -> bool:
    epsilon, delta = accountant.remaining(k)
    try:
        for _ in range(k):
            accountant.spend(epsilon, delta)
    except dp.utils.BudgetError:
        return False
    return True


@given(
    epsilon=st.floats(0.01, 8),
    k=st.integers(1, 12),
    spent=st.lists(st.floats(1e-4, 0.3), max_size=4),
    aside=st.sampled_from([0, 1e-7, 3.3333333333333e-7, 9e-7]),
    rule=st.sampled_from(["zcdp", "paper", "basic"]),
)
def test_what_remains_can_be_spent(epsilon: float, k: int, spent: list[float], aside: float, rule: str) -> None:
    own = odo.Accountant(odo.Policy(epsilon, 1e-6, filter=rule, delta_steps=1e-6 if rule == "basic" else aside))
    ours = BudgetAccountant(own)
    for part in spent:
        if own.decide(odo.ApproxDP(part * epsilon, aside / 7)).admitted:
            ours.spend(part * epsilon, aside / 7)
    before = ours.remaining(k)
    assert before[0] > 0 or sum(part for part in spent) > 0.5
    assert before == (0, 0) or spendable(ours, k)
    assert before[1] <= 1e-6 / k


def test_what_remains_in_diffprivlib_cannot_always_be_spent() -> None:
    failures = [
        (budget, k)
        for budget in (0.1, 0.3, 0.7, 1.0, 1.3)
        for k in (2, 3, 5, 7, 11)
        if not spendable(dp.BudgetAccountant(budget, 0.01, 0.001), k)
    ]
    assert failures
    assert all(spendable(BudgetAccountant(account(budget)), k) for budget, k in failures)


def test_remaining_takes_whole_numbers_and_says_nothing_is_left() -> None:
    ours = BudgetAccountant(odo.Accountant(odo.Policy(1, 0, filter="basic", neighbors="replace-one")))
    assert ours.remaining(4) == (0.25, 0)
    for _ in range(10):
        ours.spend(0.1, 0)  # ten tenths are one
    assert ours.total() == (1, 0)
    assert ours.remaining() == (0, 0)
    with pytest.raises(TypeError):
        ours.remaining(1.5)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InvalidArgument, match="from 1"):
        ours.remaining(0)


def test_the_slack_cannot_be_changed_after_answers_were_seen() -> None:
    ours = BudgetAccountant(odo.Accountant(odo.Policy(1, 1e-6, filter="zcdp", delta_steps=1e-7)))
    assert (ours.epsilon, ours.delta, ours.slack) == (1, 1e-6, 9e-7)
    with pytest.raises(InvalidArgument):
        ours.slack = 1e-8
    with pytest.raises(InvalidArgument):
        ours.total(slack=1e-8)
    theirs = dp.BudgetAccountant(1, 0.5, spent_budget=[(0.1, 0)] * 9)
    theirs.slack = 0.4  # theirs can


def crossing_rate(bounds: dict[int, float], epsilon: float) -> float:
    """Return the exact chance that the loss of randomized response is above a bound at some of the looks."""
    gain, last = 1 / (1 + math.exp(-epsilon)), max(bounds)
    losses = np.arange(-last, last + 1) * epsilon
    law, crossed = np.zeros(2 * last + 1), 0.0
    law[last] = 1.0
    for step in range(1, last + 1):
        law = gain * np.roll(law, 1) + (1 - gain) * np.roll(law, -1)
        if step in bounds:
            over = losses > bounds[step]
            crossed += float(law[over].sum())
            law[over] = 0.0
    return crossed


def test_a_total_for_fixed_parameters_is_no_reading_at_all_times() -> None:
    slack, step, looks = 0.05, 0.02, [2**j for j in range(4, 11)]
    theirs = {n: float(dp.BudgetAccountant(slack=slack, spent_budget=[(step, 0)] * n).total()[0]) for n in looks}
    own = odo.Accountant(odo.Policy(200, slack, filter="zcdp"))
    ours = BudgetAccountant(own)
    readings = {}
    for n in range(1, max(looks) + 1):
        ours.spend(step, 0)
        if n in looks:
            readings[n] = own.reading().loss
    assert crossing_rate(readings, step) <= slack
    assert crossing_rate(theirs, step) > 2 * slack


@pytest.mark.parametrize(
    ("epsilon", "delta", "error"),
    [
        (0, 0, ValueError),
        (-0.1, 0, ValueError),
        (math.nan, 0, ValueError),
        (math.inf, 0, ValueError),
        (0.1, -0.1, ValueError),
        (0.1, math.nan, ValueError),
        (0.1, 1, ValueError),
        (True, 0, ValueError),
        ("0.1", 0, TypeError),
        (None, 0, TypeError),
    ],
)
def test_what_is_no_budget_is_refused_and_charges_nothing(
    epsilon: Untyped, delta: Untyped, error: type[Exception]
) -> None:
    ours = BudgetAccountant(account())
    for verb in (ours.check, ours.spend):
        with pytest.raises(error):
            verb(epsilon, delta)
    assert len(ours) == 0
    assert ours.account.decide(odo.PureDP(0)).totals.steps == 0


def test_a_delta_is_charged_to_what_the_policy_sets_aside() -> None:
    own = odo.Accountant(odo.Policy(1, 1e-6, filter="zcdp", delta_steps=1e-7))
    ours = BudgetAccountant(own)
    ours.spend(0.1, 6e-8)
    assert charges(own)[0].cost == odo.ApproxDP(0.1, 6e-8)
    with pytest.raises(BudgetRefused):
        ours.check(0.1, 6e-8)
    assert ours.total() == (0.1, 6e-8)
    assert ours.remaining(2)[1] == 2e-8


def test_a_parent_with_less_delta_left_gets_pure_offers() -> None:
    parent = odo.Accountant(odo.Policy(1, 1e-6, filter="zcdp"))
    child = odo.Accountant(odo.Policy(1, 1e-6, filter="zcdp", delta_steps=1e-7), name="analyst", parent=parent)
    ours = BudgetAccountant(child)
    assert ours.remaining(3)[1] == 0
    assert spendable(ours, 3)


@pytest.mark.parametrize(
    ("mechanism", "cost"),
    [
        (mechanisms.Laplace(epsilon=0.1, sensitivity=1), odo.PureDP(0.1)),
        (mechanisms.Laplace(epsilon=0.1, delta=1e-3, sensitivity=1), odo.ApproxDP(0.1, 1e-3)),
        (mechanisms.LaplaceTruncated(epsilon=0.1, sensitivity=1, lower=0, upper=1), odo.PureDP(0.1)),
        (mechanisms.LaplaceBoundedDomain(epsilon=0.1, sensitivity=1, lower=0, upper=1), odo.PureDP(0.1)),
        (mechanisms.LaplaceBoundedNoise(epsilon=0.1, delta=1e-3, sensitivity=1), odo.ApproxDP(0.1, 1e-3)),
        (mechanisms.Geometric(epsilon=0.1, sensitivity=1), odo.PureDP(0.1)),
        (mechanisms.GeometricTruncated(epsilon=0.1, sensitivity=1, lower=0, upper=9), odo.PureDP(0.1)),
        (mechanisms.Gaussian(epsilon=0.1, delta=1e-3, sensitivity=1), odo.ApproxDP(0.1, 1e-3)),
        (mechanisms.GaussianAnalytic(epsilon=2, delta=1e-3, sensitivity=1), odo.ApproxDP(2, 1e-3)),
        (mechanisms.GaussianDiscrete(epsilon=0.1, delta=1e-3), odo.ApproxDP(0.1, 1e-3)),
        (mechanisms.Exponential(epsilon=0.1, sensitivity=1, utility=[1, 2]), odo.PureDP(0.1)),
        (mechanisms.PermuteAndFlip(epsilon=0.1, sensitivity=1, utility=[1, 2]), odo.PureDP(0.1)),
        (mechanisms.Binary(epsilon=0.1, value0="a", value1="b"), odo.PureDP(0.1)),
        (mechanisms.Staircase(epsilon=0.1, sensitivity=1, gamma=0.5), odo.PureDP(0.1)),
        (mechanisms.Snapping(epsilon=0.1, sensitivity=1, lower=0, upper=1), odo.PureDP(0.1)),
        (mechanisms.Uniform(delta=0.1, sensitivity=1), odo.ApproxDP(0, 0.1)),
        (RoundedInteger(mechanisms.Laplace(epsilon=0.1, sensitivity=1)), odo.PureDP(0.1)),
    ],
)
def test_a_mechanism_costs_what_it_was_made_for(mechanism: Untyped, cost: odo.Guarantee) -> None:
    assert cost_of(mechanism) == cost


class Inherited(mechanisms.Laplace):  # type: ignore[misc]  # untyped library
    pass


@pytest.mark.parametrize("kind", [mechanisms.Laplace, Inherited])
def test_a_mechanism_that_runs_in_a_session_costs_no_less_than_it_was_made_for(kind: type) -> None:
    mechanism = kind(epsilon=0.5, sensitivity=1)
    account = odo.Accountant(odo.Policy(1, 0, filter="basic"))
    with odo.session(account) as s:
        for run in (mechanism.randomise, functools.partial(mechanism.randomise)):
            with pytest.raises(odo.errors.InvalidGuarantee, match="is less"):
                s.run(run, 3.0, cost=odo.PureDP(0.001))
        s.run(mechanism.randomise, 3.0)
    assert [entry.cost for entry in charges(account)] == [odo.PureDP(0.5)]


def test_what_is_no_mechanism_has_no_cost() -> None:
    with pytest.raises(odo.errors.InvalidGuarantee):
        cost_of(models.KMeans())
    with pytest.raises(odo.errors.InvalidGuarantee):
        cost_of(mechanisms.Laplace(epsilon=math.inf, sensitivity=1))


def test_linear_regression_uses_more_than_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit that the module names, shown in the library itself: the parts that it splits its epsilon into.
    module = models.linear_regression
    parts: list[float] = []
    mean, objective = module.mean, module._construct_regression_obj  # noqa: SLF001  what is watched

    def watched(function: Tool) -> Tool:
        def run(*args: Any, epsilon: float, **kwargs: Any) -> Untyped:
            parts.append(epsilon)
            return function(*args, epsilon=epsilon, **kwargs)

        return run

    monkeypatch.setattr(module, "mean", watched(mean))
    monkeypatch.setattr(module, "_construct_regression_obj", watched(objective))
    models.LinearRegression(epsilon=1, bounds_X=(0, 1), bounds_y=(0, 1)).fit(X, Y)
    assert sum(parts) == pytest.approx(1 + 1 / (X.shape[1] + 1))


@pytest.mark.parametrize(
    "thing", [None, odo.Policy(1, "1e-6"), dp.BudgetAccountant(1, 0)], ids=lambda value: type(value).__name__
)
def test_what_is_no_account_is_refused_at_once(thing: Untyped) -> None:
    with pytest.raises(odo.errors.InvalidArgument, match=r"needs an account, such as Accountant\(policy\)") as caught:
        BudgetAccountant(thing)
    assert str(caught.value).endswith(f"(got {odo.errors.type_text(thing)})")


def test_a_policy_without_an_epsilon_has_none_to_tell() -> None:
    free = BudgetAccountant(odo.Accountant(odo.Policy(None, 1e-6)))
    assert (free.epsilon, tuple(free.remaining(3))) == (math.inf, (math.inf, 0.0))
    kept = BudgetAccountant(odo.Accountant(odo.Policy(rho=0.5)))
    with pytest.raises(odo.UnprovenComposition, match="must promise an epsilon"):
        _ = kept.epsilon
    most = kept.remaining(1)[0]
    assert most * math.tanh(most / 2) == pytest.approx(0.5)
