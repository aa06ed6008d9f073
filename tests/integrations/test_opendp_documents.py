"""Code that OpenDP's own documentation shows, run under an account with one changed line.

The examples of the user guide are written out briefly; those in the docstrings of the installed package are run from
there, with the changed line put in. Totals are compared with OpenDP's own, where both measure the same.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

import pytest
from charge_history import charges

import odograph as odo
from odograph.core.guarantees import Interactive
from odograph.integrations import opendp as odo_opendp

dp = pytest.importorskip("opendp.prelude")
dp.enable_features("contrib")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DATA: Final = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
SPACE: Final = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
COUNT: Final = SPACE >> dp.t.then_count() >> dp.m.then_laplace(scale=1.0)
SUM: Final = SPACE >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_laplace(scale=5.0)


@pytest.fixture
def account() -> odo.Accountant:
    """A budget of plain sums, as OpenDP's own: the totals must agree."""
    return odo.Accountant(odo.Policy(8, 1e-6, filter="basic"))


def spent(account: odo.Accountant) -> float:
    return float(account.decide(odo.PureDP(0)).spent["epsilon"])


# The user guide: compositors.


def test_adaptive_composition(account: odo.Accountant) -> None:
    measurement = dp.c.make_adaptive_composition(*SPACE, dp.max_divergence(), d_in=1, d_mids=[2.0, 1.0])
    queryable = account.interact(measurement, DATA)  # was: measurement(DATA)
    assert isinstance(queryable(SUM), int)
    assert isinstance(queryable(COUNT), int)
    assert spent(account) == measurement.map(1) == 3.0


def test_fully_adaptive_composition(account: odo.Accountant) -> None:
    odometer = dp.c.make_fully_adaptive_composition(*SPACE, dp.max_divergence())
    queryable = odo_opendp.queryable(account, odometer, DATA)  # was: odometer(DATA)
    assert spent(account) == queryable.privacy_loss(1) == 0.0
    queryable(SUM), queryable(COUNT)
    assert spent(account) == queryable.privacy_loss(1) == 3.0


def test_privacy_filters(account: odo.Accountant) -> None:
    odometer = dp.c.make_fully_adaptive_composition(*SPACE, dp.max_divergence())
    measurement = dp.c.make_privacy_filter(odometer, d_in=1, d_out=2.0)
    queryable = account.interact(measurement, DATA)  # was: measurement(DATA)
    queryable(COUNT), queryable(COUNT)
    assert queryable.privacy_loss(1) == 2.0
    with pytest.raises(dp.OpenDPException, match="filter is now exhausted"):
        queryable(COUNT)
    assert spent(account) == measurement.map(1) == 2.0


def test_compositor_chaining(account: odo.Accountant) -> None:
    compositor = dp.c.make_adaptive_composition(*SPACE, dp.max_divergence(), d_in=1, d_mids=[2.0, 1.0])
    words = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
    measurement = words >> dp.t.then_cast_default(int) >> compositor
    queryable = account.interact(measurement, [str(x) for x in DATA])  # was: measurement([...])
    assert [type(queryable(SUM)), type(queryable(COUNT))] == [int, int]
    assert spent(account) == measurement.map(1) == 3.0


def test_compositor_chaining_with_a_sensitivity(account: odo.Accountant) -> None:
    total = SPACE >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum()
    compositor = dp.c.then_adaptive_composition(dp.max_divergence(), d_in=total.map(1), d_mids=[2.0, 1.0])
    measurement = total >> compositor
    queryable = account.interact(measurement, DATA)  # was: measurement(DATA)
    assert isinstance(queryable(dp.m.make_laplace(*total.output_space, scale=5.0)), int)
    assert spent(account) == measurement.map(1) == 3.0


def test_compositor_nesting(account: odo.Accountant) -> None:
    pairs = dp.approximate(dp.max_divergence())
    outer = dp.c.make_adaptive_composition(*SPACE, pairs, d_in=1, d_mids=[(2.0, 1e-6), (1.0, 0.0)])
    queryable = account.interact(outer, DATA)  # was: outer(DATA)

    def concentrated(scale: float) -> Any:  # noqa: ANN401  untyped library
        losses = [5.0 * scale, 1.0 * scale]
        inner = dp.c.make_adaptive_composition(*SPACE, dp.zero_concentrated_divergence(), d_in=1, d_mids=losses)
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(inner), delta=1e-6)

    scale = dp.binary_search_param(concentrated, d_in=1, d_out=(2.0, 1e-6), T=float)
    child = queryable(concentrated(scale))

    def noisy_sum(noise: float) -> Any:  # noqa: ANN401  untyped library
        return SPACE >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_gaussian(noise)

    def noisy_count(noise: float) -> Any:  # noqa: ANN401  untyped library
        return SPACE >> dp.t.then_count() >> dp.m.then_gaussian(noise)

    first = noisy_sum(dp.binary_search_param(noisy_sum, d_in=1, d_out=5.0 * scale))
    assert isinstance(child(first), int)
    assert isinstance(queryable(dp.c.make_approximate(COUNT)), int)
    second = noisy_count(dp.binary_search_param(noisy_count, d_in=1, d_out=scale))
    assert isinstance(child(second), int)
    for ask, query in ((queryable, dp.c.make_approximate(COUNT)), (child, first)):
        with pytest.raises(dp.OpenDPException, match="out of queries"):
            ask(query)
    (entry,) = charges(account)
    assert entry.cost == Interactive(odo.ApproxDP(*map(Fraction, outer.map(1))))


def test_approximate_laplace_projection(account: odo.Accountant) -> None:
    names = {"Michael": 750, "James": 500, "Sharon": 50}
    domain = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T=int))
    metric = dp.l01inf_distance(dp.absolute_distance(T=int))
    measurement = dp.binary_search_chain(
        lambda s: dp.m.make_alp_queryable(domain, metric, scale=s, total_limit=50_000, value_limit=1000),
        d_in=(1, 1, 1),
        d_out=1.0,
    )
    queryable = account.interact(measurement, names, d_in=(1, 1, 1))  # was: measurement(names)
    assert [type(queryable(name)) for name in (*names, "Lancelot")] == [float] * 4
    assert math.isclose(spent(account), measurement.map((1, 1, 1)))


# The user guide: contexts.


def test_context(account: odo.Accountant) -> None:
    context = odo_opendp.context(  # was: dp.Context.compositor(
        account,
        data=[5] * 100,
        privacy_unit=dp.unit_of(contributions=1),
        privacy_loss=dp.loss_of(epsilon=1.0),
        split_evenly_over=1,
    )
    assert isinstance(context.query().clamp((1, 10)).sum().laplace().release(), int)
    assert math.isclose(spent(account), 1.0)


def test_context_with_a_parameter_to_find(account: odo.Accountant) -> None:
    context = odo_opendp.context(  # was: dp.Context.compositor(
        account,
        data=DATA,
        privacy_unit=dp.unit_of(contributions=1),
        privacy_loss=dp.loss_of(epsilon=1.0),
        split_evenly_over=3,
    )
    query = context.query().count().laplace()
    assert math.isclose(query.param(), 3.0)
    size = max(query.release(), 1)
    mean = (
        context.query()
        .cast_default(float)
        .impute_constant(5.0)
        .clamp((0.0, 10.0))
        .resize(size=size, constant=5.0)
        .mean()
        .laplace()
    )
    assert isinstance(mean.release(), float)
    assert [*map(float, context.current_privacy_loss())] == pytest.approx([1 / 3, 1 / 3])
    assert math.isclose(spent(account), 1.0)


def test_context_as_a_filter(account: odo.Accountant) -> None:
    context = odo_opendp.context(  # was: dp.Context.compositor(
        account, data=DATA, privacy_unit=dp.unit_of(contributions=1), privacy_loss=dp.loss_of(epsilon=1.0)
    )
    context.query(epsilon=0.5).count().laplace().release()
    nested = context.query(epsilon=0.5).compositor(split_evenly_over=2).release()
    nested.query().count().laplace().release()
    assert math.isclose(context.current_privacy_loss(), 1.0)
    with pytest.raises(dp.OpenDPException, match="exhausted"):
        context.query(epsilon=0.5).count().laplace().release()
    assert math.isclose(spent(account), 1.0)


def test_context_with_a_mechanism_for_concentrated_privacy() -> None:
    account = odo.Accountant(odo.Policy(8, 1e-6, filter="zcdp"))
    context = odo_opendp.context(  # was: dp.Context.compositor(
        account,
        data=DATA,
        privacy_unit=dp.unit_of(contributions=1),
        privacy_loss=dp.loss_of(rho=0.25),
        split_by_weights=[1.0, 3.0],
    )
    for _ in range(2):
        assert isinstance(context.query().count().gaussian().release(), int)
    assert sum(context.current_privacy_loss()) == pytest.approx(0.25)
    assert float(account.decide(odo.PureDP(0)).spent["zcdp"]) / 2 == pytest.approx(0.25)  # the meter counts 2 rho


# Docstrings of the installed package.

CHANGED: Final = {
    "dp.Context.compositor(": "odo_opendp.context(account, ",
    "odometer(data)": "odo_opendp.queryable(account, odometer, data)",
}
MODULES: Final = ("opendp.mod", "opendp.context", "opendp.extras.polars")


def examples() -> Iterator[doctest.DocTest]:
    """Yield the docstrings that make a context or open an odometer, each with its lines changed."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in MODULES:
        for found in finder.find(importlib.import_module(module)):
            lines = [example for example in found.examples if any(old in example.source for old in CHANGED)]
            for example in lines:
                for old, new in CHANGED.items():
                    example.source = example.source.replace(old, new)
            if len(lines) == 1:
                yield found


EXAMPLES: Final = {found.name: found for found in examples()}


def test_there_are_examples_to_run() -> None:
    assert "opendp.mod.Odometer" in EXAMPLES
    assert {"opendp.extras.polars.dp_len", "opendp.extras.polars.DPExpr.sum"} <= EXAMPLES.keys()
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring(name: str) -> None:
    if ".polars." in name:
        pytest.importorskip("polars")
    response = name == "opendp.mod.Odometer"  # randomized response is about a replaced value
    policy = odo.Policy(8, 1e-6, filter="basic", neighbors="replace-one" if response else "add-remove")
    account = odo.Accountant(policy)
    found = EXAMPLES[name]
    names = {"dp": dp, "odo_opendp": odo_opendp, "account": account}
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with contextlib.redirect_stderr(io.StringIO()):
        found.globs = dict(names)
        failures, run = runner.run(found, out=report.write, clear_globs=False)
    assert failures == 0, report.getvalue()
    assert run > 0
    assert spent(account) > 0
    if response:
        assert math.isclose(spent(account), found.globs["qbl_comp"].privacy_loss(1))
    else:
        assert math.isclose(spent(account), 1.0)  # the privacy_loss of these examples
