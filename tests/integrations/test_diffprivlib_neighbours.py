"""For which neighbours each tool and model of diffprivlib holds, shown on the library itself where it can be."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from charge_history import charges

import odograph as odo

pytest.importorskip("diffprivlib", reason="diffprivlib is not installed: see `make test`")
pytest.importorskip("sklearn", reason="scikit-learn is not installed: see `make test`")

import diffprivlib as dp
from diffprivlib import models, tools
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import laplace

from odograph.integrations import diffprivlib as hook
from odograph.integrations.diffprivlib import BudgetAccountant

RNG: Final = np.random.default_rng(11)
X: Final = RNG.random((40, 2))
Y: Final = (X[:, 0] > 0.5).astype(int)
NARROW: Final = (int, np.int8, np.int64, np.float16, np.float32)
ALWAYS: Final = {"classes": [0, 1], "bounds": (0, 1)}

# What is run, and how often its epsilon counts where records are added or removed, and where they are replaced.
RELATIONS: Final[list[tuple[str, Callable[..., Any], int | None, int | None]]] = [
    ("mean", lambda **a: tools.mean(X, bounds=(0, 1), **a), None, 1),
    ("var", lambda **a: tools.var(X, bounds=(0, 1), **a), None, 1),
    ("std", lambda **a: tools.std(X, bounds=(0, 1), **a), None, 1),
    ("sum", lambda **a: tools.sum(X, bounds=(0, 1), **a), None, 1),
    ("count_nonzero", lambda **a: tools.count_nonzero(Y, **a), None, 1),
    ("nansum", lambda **a: tools.nansum(X, bounds=(0, 1), **a), None, 1),
    ("nanmean", lambda **a: tools.nanmean(X, bounds=(0, 1), **a), None, None),
    ("nanvar", lambda **a: tools.nanvar(X, bounds=(0, 1), **a), None, None),
    ("nanstd", lambda **a: tools.nanstd(X, bounds=(0, 1), **a), None, None),
    ("histogram", lambda **a: tools.histogram(X[:, 0], range=(0, 1), **a), 1, 2),
    ("histogram2d", lambda **a: tools.histogram2d(*X.T, bins=3, range=[(0, 1), (0, 1)], **a), 1, 2),
    ("histogramdd", lambda **a: tools.histogramdd(X, bins=3, range=[(0, 1), (0, 1)], **a), 1, 2),
    ("quantile", lambda **a: tools.quantile(X, 0.3, bounds=(0, 1), **a), 1, 1),
    ("median", lambda **a: tools.median(X, bounds=(0, 1), **a), 1, 1),
    ("percentile", lambda **a: tools.percentile(X, 30, bounds=(0, 1), **a), 1, 1),
    ("GaussianNB", lambda **a: models.GaussianNB(bounds=(-1, 1), **a).fit(X, Y), None, 2),
    ("KMeans", lambda **a: models.KMeans(2, bounds=(0, 1), **a).fit(X), None, None),
    (
        "LinearRegression",
        lambda **a: models.LinearRegression(bounds_X=(0, 1), bounds_y=(0, 1), **a).fit(X, Y),
        None,
        None,
    ),
    (
        "LogisticRegression",
        lambda **a: models.LogisticRegression(data_norm=1, fit_intercept=False, **a).fit(X, Y),
        None,
        1,
    ),
    ("PCA", lambda **a: models.PCA(1, bounds=(0, 1), data_norm=2, **a).fit(X), None, 1),
    ("StandardScaler", lambda **a: models.StandardScaler(bounds=(0, 1), **a).fit(X), None, 1),
    ("DecisionTreeClassifier", lambda **a: models.DecisionTreeClassifier(**ALWAYS, **a).fit(X, Y), 1, 2),
    ("RandomForestClassifier", lambda **a: models.RandomForestClassifier(3, **ALWAYS, **a).fit(X, Y), None, 2),
]

quiet = pytest.mark.filterwarnings("ignore:.*L-BFGS-B solver are deprecated:DeprecationWarning")


def account(neighbors: str) -> odo.Accountant:
    return odo.Accountant(odo.Policy(8, 1e-6, filter="zcdp", neighbors=neighbors, delta_steps=1e-7))


@quiet
@pytest.mark.parametrize("neighbors", ["add-remove", "replace-one"])
@pytest.mark.parametrize(("name", "run", "added", "replaced"), RELATIONS, ids=[name for name, *_ in RELATIONS])
def test_a_tool_is_charged_for_the_policy_s_neighbours_or_refused(
    name: str, run: Callable[..., Any], added: int | None, replaced: int | None, neighbors: str
) -> None:
    own, times = account(neighbors), added if neighbors == "add-remove" else replaced
    ours = BudgetAccountant(own)
    if times is None:
        with pytest.raises(odo.UnprovenComposition, match=name.replace("nansum", "sum")) as refused:
            run(epsilon=0.25, accountant=ours)
        way_out = "accountant=diffprivlib" if replaced is None else "neighbors='replace-one'"
        assert way_out in str(refused.value) or "fill the gaps" in str(refused.value)
        assert own.totals.steps == len(ours) == 0
    else:
        run(epsilon=0.25, accountant=ours)
        assert [entry.cost for entry in charges(own)] == [odo.PureDP(0.25 * times)]
        assert ours.spent_budget == [(0.25 * times, 0)]


# The table is complete.


def public() -> set[str]:
    """The tools and models that diffprivlib offers."""
    found = {
        f"tools.{name}"
        for name, function in vars(tools).items()
        if inspect.isfunction(function) and function.__module__.startswith("diffprivlib.tools.")
    }
    kinds = {
        f"models.{name}"
        for name, kind in vars(models).items()
        if inspect.isclass(kind) and kind.__module__.startswith("diffprivlib.models.")
    }
    return found | kinds


def askers() -> set[str]:
    """The functions in diffprivlib's source that ask an accountant, by module and name."""
    root = Path(dp.__file__).parent
    return {
        f"{path.parent.name}.{path.stem}.{name}"
        for path in [*root.glob("tools/*.py"), *root.glob("models/*.py")]
        for name, function in functions(ast.parse(path.read_text()), "")
        if "accountant.check(" in ast.unparse(function)
    }


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def unknown() -> set[str]:
    listed = {name for holds in hook._TABLE.values() for name in holds.names}  # noqa: SLF001
    return (public() - listed) | (askers() - set(hook._TABLE))  # noqa: SLF001


def test_every_tool_and_model_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(public()) == 23
    assert {name.partition(".")[2] for name in public()} == {name for name, *_ in RELATIONS}
    assert unknown() == set()
    monkeypatch.delitem(hook._TABLE, "tools.quantiles.quantile")  # noqa: SLF001
    assert unknown() == {"tools.quantiles.quantile", "tools.quantile", "tools.median", "tools.percentile"}


def function_of_diffprivlib(module: str, name: str) -> Callable[..., Any]:
    """A function as another release might have it."""
    scope: dict[str, Any] = {"__name__": f"diffprivlib.{module}"}
    source = f"def {name}(accountant, epsilon, delta):\n    accountant.check(epsilon, delta)\n"
    exec(compile(source, f"{module}.py", "exec"), scope)  # noqa: S102  the lines above
    made: Callable[..., Any] = scope[name]
    return made


def test_a_tool_of_another_release_is_refused_by_name() -> None:
    own = account("replace-one")
    with pytest.raises(odo.UnprovenComposition, match=r"tools\.sketches\.sketch is not among"):
        function_of_diffprivlib("tools.sketches", "sketch")(BudgetAccountant(own), 0.1, 0)
    assert own.totals.steps == 0
    BudgetAccountant(own).check(0.1, 0)  # from outside: for the policy's neighbours, on the caller's word
    assert own.totals.steps == 1


def test_a_subclass_of_the_accountant_is_not_a_way_around_the_table() -> None:
    class Watched(BudgetAccountant):
        def check(self, epsilon: float, delta: float) -> bool:
            return super().check(epsilon, delta)

    with pytest.raises(odo.UnprovenComposition, match="replace-one"):
        tools.mean(X, bounds=(0, 1), epsilon=0.1, accountant=Watched(account("add-remove")))


def test_two_steps_of_approximate_privacy_add_up_by_group_privacy() -> None:
    own = account("replace-one")
    function_of_diffprivlib("tools.histograms", "histogram")(BudgetAccountant(own), 0.5, 1e-9)
    cost = charges(own)[0].cost
    assert isinstance(cost, odo.ApproxDP)
    assert cost.epsilon == 1
    assert (1 + math.exp(0.5)) * 1e-9 <= cost.delta <= (1 + math.exp(0.5)) * 1e-9 * (1 + 1e-12)  # type: ignore[operator]


def test_arguments_that_break_a_claim_are_refused() -> None:
    ours = BudgetAccountant(account("replace-one"))
    with pytest.raises(odo.UnprovenComposition, match="bounds that do"):
        tools.nansum(X, bounds=(0.5, 1), epsilon=0.1, accountant=ours)
    for neighbors in ("add-remove", "replace-one"):
        with pytest.raises(odo.UnprovenComposition, match="leave weights= out"):
            tools.histogram(X[:, 0], range=(0, 1), weights=X[:, 1], accountant=BudgetAccountant(account(neighbors)))
    for bounds in ((0.1, 1), (-1, -0.1), ([0, 0.5], [1, 1]), None):
        with pytest.raises(odo.UnprovenComposition, match="0 is within the bounds"):
            models.GaussianNB(bounds=bounds, accountant=ours).fit(X, Y)
    assert len(ours) == 0


def test_sums_in_narrow_types_are_refused() -> None:
    own = account("replace-one")
    ours = {"epsilon": 0.1, "accountant": BudgetAccountant(own)}
    single, bounds = X.astype(np.float32), (-1, 1)
    refused: list[Callable[[], Any]] = [
        *(
            lambda f=f, d=d: f(X, bounds=bounds, dtype=d, **ours)
            for f in (tools.mean, tools.var, tools.std)
            for d in NARROW
        ),
        *(lambda d=d: tools.sum(X, bounds=bounds, dtype=d, **ours) for d in NARROW if d not in (int, np.int64)),
        *(lambda f=f: f(single, bounds=bounds, **ours) for f in (tools.mean, tools.var, tools.std, tools.sum)),
        lambda: tools.mean(single, bounds=bounds, axis=0, **ours),
        lambda: models.GaussianNB(bounds=bounds, **ours).fit(single, Y),
        lambda: models.PCA(1, centered=True, data_norm=2, **ours).fit(single),
    ]
    for run in refused:
        with pytest.raises(odo.UnprovenComposition, match=r"astype\(float\)"):
            run()
    assert own.totals.steps == 0
    taken: list[Any] = [X, X.tolist(), Y, Y.astype(np.int8), Y > 0]
    for data in taken:
        for tool in (tools.mean, tools.var, tools.sum):
            tool(data, bounds=(0, 1), **ours)
    tools.mean(single, bounds=(0, 1), dtype=float, **ours)
    tools.sum(X, bounds=(0, 1), dtype=int, **ours)
    tools.count_nonzero(Y, **ours)
    models.StandardScaler(bounds=(0, 1), **ours).fit(single)  # it makes them floats
    assert own.totals.steps == 3 * len(taken) + 4


def test_bins_that_are_taken_from_the_data_are_refused() -> None:
    few, many = [1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 9.0], [0.0, 1.4, 2.9, 4.3, 5.7, 7.1, 8.6, 10.0]
    shown = [
        tools.histogram(data, bins="auto", range=(0, 10), accountant=dp.BudgetAccountant()) for data in (few, many)
    ]
    assert len(shown[0][0]) != len(shown[1][0])  # no noise is on that
    for neighbors in ("add-remove", "replace-one"):
        ours = BudgetAccountant(account(neighbors))
        with pytest.raises(odo.UnprovenComposition, match="pass a number"):
            tools.histogram(few, bins="auto", range=(0, 10), accountant=ours)
        tools.histogram(few, bins=[0, 5, 10], range=(0, 10), epsilon=0.1, accountant=ours)


# The claims themselves, on diffprivlib's own mechanisms. What is estimated is far from what it is compared with.


@pytest.fixture
def free() -> Callable[[], dict[str, Any]]:
    """Arguments of a tool: no limit, and the same draws in every run of the test."""
    draws = np.random.RandomState(5)
    return lambda: {"accountant": dp.BudgetAccountant(), "random_state": draws}


def loss(event: Callable[[], bool], other: Callable[[], bool], runs: int) -> float:
    """A lower estimate of log(P/Q), by four deviations on both sides."""
    p, q = (sum(run() for _ in range(runs)) for run in (event, other))
    low, high = p - 4 * math.sqrt(p + 1), q + 4 * math.sqrt(q + 1)
    return math.log(low / high) if low > 0 else -math.inf


def test_a_replaced_record_is_seen_twice_in_a_histogram(free: Callable[[], dict[str, Any]]) -> None:
    def seen(data: list[float]) -> bool:
        (left, right), _ = tools.histogram(data, epsilon=1, bins=2, range=(0, 1), **free())
        return bool(left >= 10 and right <= 5)

    before, after, less = [0.1] * 10 + [0.9] * 5, [0.1] * 9 + [0.9] * 6, [0.1] * 9 + [0.9] * 5
    assert 1.05 < loss(lambda: seen(before), lambda: seen(after), 4000) <= 2
    assert loss(lambda: seen(before), lambda: seen(less), 4000) <= 1  # removed: its epsilon


def test_a_sum_shows_how_many_records_there_are(free: Callable[[], dict[str, Any]]) -> None:
    def seen(count: int) -> bool:
        total = tools.sum([1.0] * count, epsilon=0.1, bounds=(0, 1), **free())
        return bool(total > 2.5)

    assert loss(lambda: seen(3), lambda: seen(2), 400) > 1  # infinite: the output ends at the number of records


def test_the_noise_of_a_mean_shows_how_many_records_there_are(free: Callable[[], dict[str, Any]]) -> None:
    def seen(data: list[float]) -> bool:
        value = tools.mean(data, epsilon=0.1, bounds=(0, 1), **free())
        return bool(0.25 < value < 0.75)

    assert loss(lambda: seen([0.0, 1.0]), lambda: seen([0.0]), 8000) > 0.1


def test_a_mean_of_whole_numbers_and_a_narrow_sum_show_one_record(free: Callable[[], dict[str, Any]]) -> None:
    ones = np.ones(128)
    other = np.append(ones[1:], 0.0)
    mean = [[tools.mean(x, bounds=(0, 1), dtype=int, **free()) for _ in range(50)] for x in (ones, other)]
    assert min(mean[0]) > max(mean[1])  # 127/128, made whole, is 0
    narrow = [[tools.sum(x, bounds=(0, 1), dtype=np.int8, **free()) for _ in range(50)] for x in (ones, other)]
    assert max(narrow[0]) < min(narrow[1])  # 128 is -128
    years = np.full(100_000, 1001, np.float32)
    years_moved = [np.append(years[k:], np.full(k, 1000, np.float32)).sum() for k in range(12)]
    assert max(a - b for a, b in pairwise(years_moved)) == 8  # where one record moves the sum by 1


def test_a_mean_of_what_is_not_nan_has_the_noise_of_all(free: Callable[[], dict[str, Any]]) -> None:
    def seen(value: float) -> bool:
        data = np.array([value] + [np.nan] * 99)
        return bool(tools.nanmean(data, epsilon=0.5, bounds=(0, 1), **free()) > 0.9)

    assert loss(lambda: seen(1.0), lambda: seen(0.0), 300) > 1


def test_a_sum_of_what_is_not_nan_has_the_noise_of_its_bounds(free: Callable[[], dict[str, Any]]) -> None:
    def seen(value: float) -> bool:
        data = np.array([value, 100.0])
        return bool(tools.nansum(data, epsilon=0.5, bounds=(99, 100), **free()) > 198.5)

    assert loss(lambda: seen(100.0), lambda: seen(math.nan), 300) > 1


def test_linear_regression_adds_no_noise_to_squares_of_features_from_zero() -> None:
    model = models.LinearRegression(
        epsilon=0.01, bounds_X=(0, 1), bounds_y=(0, 1), fit_intercept=False, accountant=dp.BudgetAccountant()
    ).fit(X, Y)
    assert np.diag(model._obj_coefs[2]) == pytest.approx((X**2).sum(axis=0), rel=1e-12)  # noqa: SLF001


def test_k_means_shows_that_a_cluster_has_no_records() -> None:
    others = np.full((2000, 2), 1.0)

    def moved(last: list[float], seed: int) -> bool:
        model = models.KMeans(2, epsilon=1, bounds=(-1, 1), random_state=seed, accountant=dp.BudgetAccountant())
        model.fit(np.vstack([others, last]))
        twin = models.KMeans(2, epsilon=1, bounds=(-1, 1), accountant=dp.BudgetAccountant())
        twin.bounds = twin._check_bounds((-1, 1), 2)  # noqa: SLF001
        first = twin._init_centers(2, np.random.RandomState(seed))  # noqa: SLF001  what it draws
        return not np.any(np.all(model.cluster_centers_ == first, axis=1))

    assert sum(moved([1.0, 1.0], seed) for seed in range(40)) == 0
    assert sum(moved([-1.0, -1.0], seed) for seed in range(40)) > 10


def test_a_changed_label_is_seen_in_the_sums_of_naive_bayes_unless_zero_is_within_the_bounds(
    free: Callable[[], dict[str, Any]],
) -> None:
    labels = np.array([0] * 10 + [1] * 10)

    def seen(changed: int) -> bool:
        data, target = np.full((20, 1), 100.5), labels.copy()
        target[0] = changed
        model = models.GaussianNB(epsilon=1, bounds=(100, 101), **free()).fit(data, target)
        return bool(model.class_count_[0] == 10 and 100 < model.theta_[0, 0] < 101)

    assert loss(lambda: seen(0), lambda: seen(1), 1000) > 2


class _Silent(np.random.RandomState):
    """No noise, and the scale of what would have been drawn."""

    scale = 0.0

    def gamma(self, _shape: Any, scale: Any = 1.0, size: Any = None) -> Any:  # noqa: ANN401  as the parent's
        self.scale = float(scale)
        return np.zeros(size)


def coefficient(
    x: float, norm: float, epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float, float], float]:
    """The exact probability that the one coefficient of a logistic regression is in an interval.

    The coefficient w is where the gradient of the objective is that of the noise, b(w) = -n gradient(w), which falls
    in w; with one coefficient the noise is a Laplace variable.
    """
    module, draws, found = models.logistic_regression, _Silent(1), list[Callable[[float], float]]()

    def solver(objective: Any, start: Any, *, args: Any, **_: Any) -> Any:  # noqa: ANN401  as SciPy's
        found.append(lambda w: -2 * float(objective(np.array([w]), *args)[1][0]))
        return start, 0.0, {"warnflag": 0, "nit": 0}

    monkeypatch.setattr(module.optimize, "fmin_l_bfgs_b", solver)
    model = models.LogisticRegression(
        data_norm=norm, epsilon=epsilon, fit_intercept=False, random_state=draws, accountant=dp.BudgetAccountant()
    )
    model.fit([[x], [0.0]], [1, 0])
    noise = laplace(scale=draws.scale)
    return lambda low, high: float(noise.cdf(found[0](low)) - noise.cdf(found[0](high)))


def worst_loss(norm: float, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest log ratio over small intervals, where one record of norm 0 becomes one of the largest norm."""
    here, there = (coefficient(x, norm, epsilon, monkeypatch) for x in (norm, 0.0))
    edges = np.linspace(-8, 8, 81) / norm
    pairs = [(here(a, b), there(a, b)) for a, b in pairwise(edges)]
    return max(abs(math.log(p / q)) for p, q in pairs if max(p, q) > 1e-6)  # below, the digits of a cdf are lost


def test_logistic_regression_holds_for_norms_up_to_one_and_no_intercept(monkeypatch: pytest.MonkeyPatch) -> None:
    for epsilon in (0.1, 0.5, 1.0, 2.0, 5.0):
        for norm in (0.1, 0.5, 1.0):
            assert worst_loss(norm, epsilon, monkeypatch) <= epsilon  # as large a norm as is taken
    assert worst_loss(10.0, 1.0, monkeypatch) > 1.2
    assert worst_loss(100.0, 1.0, monkeypatch) > 3
    assert worst_loss(100.0, 0.1, monkeypatch) > 1.2
    own = account("replace-one")
    ours = {"epsilon": 0.1, "accountant": BudgetAccountant(own)}
    for wrong in ({"data_norm": 1.01}, {"fit_intercept": True}, {"data_norm": None}):
        with pytest.raises(odo.UnprovenComposition, match="data_norm=1, fit_intercept=False"):
            models.LogisticRegression(**{"data_norm": 1, "fit_intercept": False} | wrong, **ours).fit(X, Y)
    assert own.totals.steps == 0


def density(data: list[float], quant: float, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """The density of a quantile's answer: the intervals' probabilities, each over its length."""
    made = []

    class Watched(dp.mechanisms.Exponential):  # type: ignore[misc]  # untyped library
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            made.append(np.diff(self._probabilities, prepend=0))

    with monkeypatch.context() as patch:
        patch.setattr(tools.quantiles, "Exponential", Watched)
        tools.quantile(data, quant, epsilon=1, bounds=(0, 1), accountant=dp.BudgetAccountant())
    edges = np.sort(np.append(np.clip(data, 0, 1), [0, 1]))

    def at(x: float) -> float:
        place = int(np.searchsorted(edges, x)) - 1
        return float(made[0][place] / (edges[place + 1] - edges[place]))

    return at


values = st.integers(0, 100).map(lambda percent: percent / 100)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, min_size=1, max_size=6), values, values, st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_quantiles_hold_for_both_kinds_of_neighbours(
    data: list[float], added: float, other: float, quant: float
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        one, more, replaced = (
            density(these, quant, monkeypatch) for these in (data, [*data, added], [*data[:-1], other])
        )
        points = np.arange(0.005, 1, 0.01)
        for neighbour in (more, replaced):
            assert max(abs(math.log(neighbour(x) / one(x))) for x in points) <= 1 + 1e-9


def test_the_check_of_quantiles_finds_half_of_their_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    one, replaced = (density([0.5, 0.5, 0.5, last], 0.25, monkeypatch) for last in (0.01, 0.99))
    assert max(abs(math.log(replaced(x) / one(x))) for x in np.arange(0.005, 1, 0.01)) > 0.5
