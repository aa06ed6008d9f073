"""OpenDP's queryables, odometers, contexts and frames under an account: charged first, and charged for all of it."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
from charge_history import charges
from hypothesis import given, settings
from hypothesis import strategies as st

import odograph as odo
from odograph.core.guarantees import Interactive
from odograph.errors import InvalidArgument
from odograph.integrations import is_interactive
from odograph.integrations import opendp as odo_opendp
from odograph.integrations.opendp import cost_of

dp = pytest.importorskip("opendp.prelude")
dp.enable_features("contrib", "honest-but-curious")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS: Final = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
WORDS: Final = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
DATA: Final = [3, 5, 20]
PURE, RHO = dp.max_divergence(), dp.zero_concentrated_divergence()
PAIR = dp.approximate(PURE)
ONE: Final = dp.unit_of(contributions=1)
ODOMETER: Final = dp.c.make_fully_adaptive_composition(*ROWS, PURE)


def count(scale: float, space: tuple[Any, Any] = ROWS) -> Any:  # noqa: ANN401  untyped library
    return space >> dp.t.then_count() >> dp.m.then_laplace(scale=scale)


def gaussian(scale: float) -> Any:  # noqa: ANN401  untyped library
    return ROWS >> dp.t.then_count() >> dp.m.then_gaussian(scale=scale)


def compositor(*losses: Any, measure: Any = PURE, space: tuple[Any, Any] = ROWS) -> Any:  # noqa: ANN401
    return dp.c.make_adaptive_composition(*space, measure, d_in=1, d_mids=[*losses])


def account_of(epsilon: float = 1, delta: float = 1e-6, **settings: Any) -> odo.Accountant:
    return odo.Accountant(odo.Policy(epsilon, delta, **settings))


def costs(account: odo.Account) -> list[odo.Guarantee | None]:
    return [entry.cost for entry in charges(account)]


# What interactive measurements cost.


def test_every_measure_is_read_as_interactive() -> None:
    quarter = Fraction(1, 4)
    assert cost_of(compositor(0.25)) == Interactive(odo.PureDP(quarter))
    assert cost_of(compositor(0.25, measure=RHO)) == Interactive(odo.ZCDP(quarter))
    assert cost_of(compositor((0.25, 2.0**-20), measure=PAIR)) == Interactive(
        odo.ApproxDP(quarter, Fraction(1, 2**20))
    )
    approximate_zcdp = compositor((0.25, 2.0**-20), measure=dp.approximate(RHO))
    assert cost_of(approximate_zcdp) == Interactive(odo.ZCDP(quarter, Fraction(1, 2**20)))
    for inner in (compositor(0.25), dp.c.make_privacy_filter(ODOMETER, d_in=1, d_out=0.25)):
        chained = WORDS >> dp.t.then_cast_default(TOA=int) >> inner
        assert cost_of(chained) == Interactive(odo.PureDP(quarter))
        assert cost_of(dp.c.make_approximate(inner)) == Interactive(odo.ApproxDP(quarter, 0))
        assert cost_of(dp.c.make_pureDP_to_zCDP(inner)) == Interactive(odo.ZCDP(Fraction(1, 32)))


def test_a_list_of_queryables_is_refused_uncharged() -> None:
    account = account_of()
    listed = dp.c.make_composition([count(8.0), compositor(0.125)])
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    refusals: list[Callable[[], Any]] = [lambda: account.interact(listed, DATA), lambda: asked(listed)]
    for refused in refusals:
        with pytest.raises(odo.UnprovenComposition, match="one by one"):
            refused()
    assert not charges(account)


def test_a_map_ends_at_the_distance_of_the_compositor() -> None:
    with pytest.raises(odo.errors.InvalidGuarantee, match="no cost for d_in=2"):
        cost_of(compositor(0.25), neighbors="replace-one")
    two = dp.c.make_adaptive_composition(*ROWS, PURE, d_in=2, d_mids=[0.25])
    assert cost_of(two, neighbors="replace-one") == Interactive(odo.PureDP(0.25))
    sized = dp.vector_domain(dp.atom_domain(T=int), size=3), ROWS[1]
    with pytest.raises(odo.UnprovenComposition, match="number of records is public"):
        cost_of(compositor(0.25, space=sized))


def test_approximate_zcdp_is_refused_and_its_conversion_taken() -> None:
    """Concurrent composition is not proven for it; as (epsilon, delta)-DP it is."""
    account = account_of(4, 1e-6, delta_steps=5e-7)
    measurement = compositor((0.01, 1e-8), measure=dp.approximate(RHO))
    with pytest.raises(odo.UnprovenComposition, match="not known to compose"):
        account.interact(measurement, DATA)
    assert not charges(account)
    converted = dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(measurement), 1e-7)
    with account.interact(converted, DATA) as ask:
        assert isinstance(ask(dp.c.make_approximate(gaussian(10.0))), int)
    assert costs(account) == [Interactive(odo.ApproxDP(*map(Fraction, converted.map(1))))]


# Under account.interact.


def test_a_compositor_is_charged_whole_before_its_first_query() -> None:
    account = account_of()
    with account.interact(compositor(0.25, 0.25), DATA) as ask:
        assert costs(account) == [Interactive(odo.PureDP(0.5))]
        assert isinstance(ask(count(4.0)), int)
        with odo.session(account) as s:  # other questions in between
            s.run(count(16.0), DATA)
        assert isinstance(ask(count(4.0)), int)
        with pytest.raises(dp.OpenDPException, match="out of queries"):
            ask(count(4.0))
    assert costs(account) == [Interactive(odo.PureDP(0.5)), odo.PureDP(0.0625)]


def test_what_does_not_fit_is_not_opened() -> None:
    account = account_of()
    with pytest.raises(odo.BudgetExceeded):
        account.interact(compositor(2.0), DATA)
    assert not charges(account)


def test_queryables_inside_queryables_are_under_the_same_charge() -> None:
    account = account_of()
    outer = compositor(0.25, 0.25, 0.25)
    with account.interact(outer, DATA) as ask:
        inner = ask(compositor(0.125, 0.125))
        deeper = ask(dp.c.make_privacy_filter(ODOMETER, d_in=1, d_out=0.25))
        answers = [inner(count(8.0)), deeper(count(8.0)), ask(count(4.0)), inner(count(8.0)), deeper(count(8.0))]
        assert deeper.privacy_loss(1) == 0.25
    assert all(isinstance(answer, int) for answer in answers)
    assert costs(account) == [Interactive(odo.PureDP(0.75))]
    with pytest.raises(odo.errors.AccountClosed):
        inner(count(8.0))


def test_a_projection_answers_any_number_of_keys() -> None:
    space = (
        dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T=int)),
        dp.l01inf_distance(dp.absolute_distance(T=int)),
    )
    projection = dp.m.make_alp_queryable(*space, scale=0.5, total_limit=100, value_limit=50)
    account = account_of()
    with account.interact(projection, {"a": 30, "b": 40}, d_in=(1, 1, 1)) as ask:
        assert all(isinstance(ask(key), float) for key in ["a", "b", "c"] * 50)
    assert costs(account) == [Interactive(odo.PureDP(0.5))]


# Queries are checked: a compositor believes their maps.


def too_cheap() -> dict[str, tuple[Any, Any, Any]]:
    """Queries whose map says less than they leak: the space, the measure, and the query."""
    by_word = WORDS >> dp.t.then_count_by()
    threshold = by_word >> dp.m.then_laplace_threshold(scale=1.0, threshold=6)
    sized = dp.vector_domain(dp.atom_domain(T=int), size=3), dp.symmetric_distance()
    loud = sized >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_laplace(scale=4.0)
    amplified = dp.c.make_population_amplification(loud, population_size=300)
    return {
        "threshold": (WORDS, PAIR, threshold),
        "chained threshold": (WORDS, PAIR, threshold >> len),
        "amplified": (sized, PURE, amplified),
    }


@pytest.mark.parametrize("kind", [*too_cheap()])
def test_a_query_that_leaks_more_than_its_map_is_refused(kind: str) -> None:
    space, measure, query = too_cheap()[kind]
    data = ["a", "b", "b"] if space is WORDS else DATA
    measurement = dp.c.make_adaptive_composition(*space, measure, d_in=2, d_mids=[query.map(2)])
    assert measurement(data)(query) is not None  # the negative control: OpenDP alone answers it
    account = account_of(8, 1e-2, neighbors="replace-one", filter="basic")
    with account.interact(measurement, data) as ask, pytest.raises(odo.UnprovenComposition):
        ask(query)
    asked = odo_opendp.queryable(account, dp.c.make_fully_adaptive_composition(*space, measure), data)
    with pytest.raises(odo.UnprovenComposition):
        asked(query)
    assert len(charges(account)) == 1


def test_an_odometer_is_no_query() -> None:
    """OpenDP 0.16 ends the process: shown in a process of its own, and refused here."""
    code = """
import opendp.prelude as dp
dp.enable_features("contrib")
rows = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
odometer = dp.c.make_fully_adaptive_composition(*rows, dp.max_divergence())
odometer([1])(odometer)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)  # noqa: S603  our own code
    assert ended.returncode < 0
    account = account_of()
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    with pytest.raises(odo.UnprovenComposition, match="odometer"):
        asked(ODOMETER)
    with account.interact(compositor(0.25), DATA) as ask, pytest.raises(odo.UnprovenComposition, match="odometer"):
        ask(ODOMETER)


# Odometers: charged query by query.


def test_an_odometer_has_no_cost_of_its_own() -> None:
    account = account_of()
    for refused in (lambda: cost_of(ODOMETER), lambda: account.interact(ODOMETER, DATA)):
        with pytest.raises(odo.UnprovenComposition, match=r"opendp\.queryable"):
            refused()
    with pytest.raises(InvalidArgument, match=r"account\.interact"):
        odo_opendp.queryable(account, compositor(0.25), DATA)
    with pytest.raises(InvalidArgument, match="needs an account"):
        odo_opendp.queryable(None, ODOMETER, DATA)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="at least one neighbor"):
        odo_opendp.queryable(account_of(neighbors="replace-one"), ODOMETER, DATA, d_in=1)
    assert not charges(account)


def test_each_query_of_an_odometer_is_charged_before_it_runs() -> None:
    account = account_of(1, 0, filter="basic")
    seen: list[int] = []

    def answer(data: list[int]) -> int:
        seen.append(account.totals.steps)
        return len(data)

    watched = dp.m.make_user_measurement(*ROWS, PURE, answer, lambda d: 0.25 * d)
    greedy = dp.m.make_user_measurement(*ROWS, PURE, answer, lambda d: 2.0 * d)
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    assert is_interactive(asked)
    for _ in range(3):
        asked(watched)
    with pytest.raises(odo.BudgetExceeded):
        asked(greedy)
    assert asked.invoke(watched) == 3  # a refusal leaves it as it was, where OpenDP's filter is exhausted
    assert seen == [1, 2, 3, 4]
    assert asked.privacy_loss(1) == 1.0
    assert costs(account) == [odo.PureDP(0.25)] * 4
    # Negative control: without the hook the data is seen and nothing is charged.
    ODOMETER(DATA)(watched)
    assert seen[-1] == account.totals.steps == 4


def test_a_filter_inside_an_odometer_is_one_charge() -> None:
    account = account_of(1, 0, filter="basic")
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    inner = asked(dp.c.make_privacy_filter(ODOMETER, d_in=1, d_out=0.5))
    asked(count(8.0))
    assert [inner(count(4.0)), inner(count(4.0))]
    with pytest.raises(dp.OpenDPException, match="exhausted"):
        inner(count(4.0))
    assert costs(account) == [Interactive(odo.PureDP(0.5)), odo.PureDP(0.125)]
    assert asked.privacy_loss(1) == 0.625


def test_a_hidden_queryable_is_charged_and_not_released() -> None:
    account = account_of()
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    hidden = compositor(0.25) >> (lambda queryable: queryable)
    with pytest.raises(odo.UnprovenComposition, match="answers later"):
        asked(hidden)
    assert costs(account) == [odo.PureDP(0.25)]


def test_nothing_is_asked_inside_a_running_mechanism() -> None:
    account = account_of()
    asked = odo_opendp.queryable(account, ODOMETER, DATA)
    with odo.session(account) as s, pytest.raises(odo.UnprovenComposition, match="inside"):
        s.run(lambda: asked(count(4.0)), cost=odo.PureDP(0.1))


def test_threads_ask_one_at_a_time() -> None:
    account = account_of(100, 0, filter="basic")
    asked = odo_opendp.queryable(account, ODOMETER, [*range(1000)])
    inner = asked(compositor(*[0.25] * 40))
    answers: list[int] = []

    def ask(which: Callable[[Any], int]) -> None:
        answers.extend(which(count(4.0)) for _ in range(20))

    threads = [threading.Thread(target=ask, args=(which,)) for which in (asked, inner) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 80
    assert account.totals.steps == 41


@settings(max_examples=40, deadline=None)
@given(scales=st.lists(st.floats(0.5, 200), min_size=1, max_size=8), noise=st.sampled_from(["pure", "zcdp"]))
def test_the_account_and_opendp_count_the_same(scales: list[float], noise: str) -> None:
    """Sums of epsilons under the basic filter and of rhos under the zCDP filter, but for the rounding of floats."""
    measure, make = (PURE, count) if noise == "pure" else (RHO, gaussian)
    account = account_of(1000, 0.5, filter="basic" if noise == "pure" else "zcdp")
    asked = odo_opendp.queryable(account, dp.c.make_fully_adaptive_composition(*ROWS, measure), DATA)
    for scale in scales:
        asked(make(scale))
    spent = account.decide(odo.PureDP(0)).spent
    ours = float(spent["epsilon"]) if noise == "pure" else float(spent["zcdp"]) / 2  # the meter counts 2 rho
    assert math.isclose(ours, asked.privacy_loss(1), rel_tol=1e-9)


def test_an_account_of_a_ledger_pays_as_well(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/opendp.db") as ledger:
        account = ledger.open_account("ward", odo.Policy(4, 0, filter="basic"), key="open")
        asked = odo_opendp.queryable(account, ODOMETER, DATA)
        context = odo_opendp.context(account, data=DATA, privacy_unit=ONE, domain=ROWS[0])
        with account.interact(compositor(0.25), DATA, key="compositor") as ask:
            asked(count(4.0)), ask(count(4.0)), context.query(epsilon=0.25).count().laplace().release()
        with pytest.raises(odo.errors.IdempotencyConflict):
            account.interact(compositor(0.25), DATA, key="compositor")
        assert costs(account) == [Interactive(odo.PureDP(0.25)), odo.PureDP(0.25), odo.PureDP(0.25)]
        assert not account.pending
        ledger.verify()  # raises if an entry does not follow


# Contexts.


def test_a_context_charges_each_release_by_its_own_map() -> None:
    account = account_of(8, 1e-6)
    context = odo_opendp.context(account, data=DATA, privacy_unit=ONE, domain=ROWS[0])
    assert isinstance(context.query(epsilon=0.25).count().laplace().release(), int)
    assert isinstance(context.query().count().laplace(scale=4.0).release(), int)
    assert isinstance(context.query(rho=0.125).count().gaussian().release(), int)
    assert isinstance(context.query().count().gaussian(scale=2.0).release(), int)
    assert isinstance(context(count(8.0)), int)
    first, second, third, fourth, fifth = costs(account)
    assert first == second == odo.PureDP(0.25)
    assert third == fourth == odo.mechanisms.discrete_gaussian(2)
    assert fifth == odo.PureDP(0.125)
    assert context.current_privacy_loss() == {"MaxDivergence": 0.625, "ZeroConcentratedDivergence": 0.25}


def test_a_refused_release_runs_nothing_and_changes_nothing() -> None:
    account = account_of(1, 0, filter="basic")
    context = odo_opendp.context(account, data=DATA, privacy_unit=ONE, domain=ROWS[0])
    with pytest.raises(odo.BudgetExceeded):
        context.query(epsilon=2.0).count().laplace().release()
    assert context.current_privacy_loss() == {}
    assert not charges(account)
    context.query(epsilon=1.0).count().laplace().release()


def test_a_query_of_a_context_may_be_a_compositor() -> None:
    account = account_of()
    context = odo_opendp.context(account, data=DATA, privacy_unit=ONE, domain=ROWS[0])
    inner = context.query(epsilon=0.5).compositor(split_evenly_over=2).release()
    for _ in range(2):
        assert isinstance(inner.query().count().laplace().release(), int)
    with pytest.raises(ValueError, match="exhausted"):
        inner.query()
    assert costs(account) == [Interactive(odo.PureDP(0.5))]


def test_the_unit_of_a_context_is_what_the_policy_protects() -> None:
    account = account_of(4)
    many = odo_opendp.context(account, data=DATA, privacy_unit=dp.unit_of(contributions=3), domain=ROWS[0])
    many.query().count().laplace(scale=12.0).release()
    assert costs(account) == [odo.PureDP(0.25)]
    with pytest.raises(odo.UnprovenComposition, match="cannot express that a record is added"):
        odo_opendp.context(account, data=DATA, privacy_unit=dp.unit_of(changes=1), domain=ROWS[0])
    replacing = account_of(neighbors="replace-one")
    for count in (1, 2, 3):  # a person's k records are replaced: 2k records differ
        with pytest.raises(InvalidArgument, match="must count changed records"):
            odo_opendp.context(replacing, data=DATA, privacy_unit=dp.unit_of(contributions=count), domain=ROWS[0])
        with pytest.raises(InvalidArgument, match="must count changed records"):
            odo_opendp.context(
                replacing,
                data=DATA,
                privacy_unit=dp.unit_of(contributions=count, ordered=True),
                privacy_loss=dp.loss_of(epsilon=0.5),
                domain=ROWS[0],
            )
    assert not charges(replacing)
    sized = dp.vector_domain(dp.atom_domain(T=int), size=3)
    with pytest.raises(odo.UnprovenComposition, match="number of records is public"):
        odo_opendp.context(account, data=DATA, privacy_unit=ONE, domain=sized)


def test_a_split_needs_a_loss() -> None:
    with pytest.raises(InvalidArgument, match="split_evenly_over divides a privacy_loss"):
        odo_opendp.context(account_of(), data=DATA, privacy_unit=ONE, split_evenly_over=2)
    with pytest.raises(InvalidArgument, match="needs an account"):
        odo_opendp.context(None, data=DATA, privacy_unit=ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [{"split_evenly_over": 2}, {"split_by_weights": [1, 3]}, {}])
def test_a_context_with_a_loss_is_charged_whole(split: dict[str, Any]) -> None:
    account = account_of()
    context = odo_opendp.context(
        account, data=DATA, privacy_unit=ONE, privacy_loss=dp.loss_of(epsilon=0.5), domain=ROWS[0], **split
    )
    (cost,) = costs(account)
    assert isinstance(cost, Interactive)
    assert isinstance(cost.cost, odo.PureDP)
    assert math.isclose(float(cost.cost.epsilon), 0.5)
    loss = {} if split else {"epsilon": 0.25}
    for _ in range(2):
        assert isinstance(context.query(**loss).count().laplace().release(), int)
    assert costs(account) == [cost]
    # What is left and what was used is told by OpenDP as without an account.
    alone = dp.Context.compositor(
        data=DATA, privacy_unit=ONE, privacy_loss=dp.loss_of(epsilon=0.5), domain=ROWS[0], **split
    )
    for _ in range(2):
        alone.query(**loss).count().laplace().release()
    assert context.current_privacy_loss() == alone.current_privacy_loss()
    assert context.remaining_privacy_loss() == alone.remaining_privacy_loss()


def test_a_loss_without_end_is_an_odometer() -> None:
    account = account_of()
    context = odo_opendp.context(
        account, data=DATA, privacy_unit=ONE, privacy_loss=dp.loss_of(epsilon=math.inf), domain=ROWS[0]
    )
    assert not charges(account)
    context.query(epsilon=0.25).count().laplace().release()
    assert costs(account) == [odo.PureDP(0.25)]
    assert context.current_privacy_loss() == 0.25


def test_queries_of_a_context_are_checked() -> None:
    account = account_of(4, 1e-2, filter="basic")
    context = odo_opendp.context(
        account, data=["a", "b"], privacy_unit=ONE, privacy_loss=dp.loss_of(epsilon=2.0, delta=5e-3), domain=WORDS[0]
    )
    query = context.query(epsilon=1.0, delta=2e-3).count_by().laplace_threshold(scale=1.0, threshold=6)
    with pytest.raises(odo.UnprovenComposition, match="threshold one lower"):
        query.release()


# Polars frames.


def table() -> tuple[Any, Any]:
    pl = pytest.importorskip("polars")
    data = pl.LazyFrame({"A": [1, 2, 3] * 50, "B": ["x", "y", "z"] * 50}, schema_overrides={"A": pl.Int32})
    return pl, {"data": data, "privacy_unit": ONE, "margins": [dp.polars.Margin(by=[], max_length=1000)]}


def test_frames_are_released_by_their_own_cost() -> None:
    pl, given_data = table()
    account = account_of(4, 1e-6)
    context = odo_opendp.context(account, **given_data)
    total = context.query(epsilon=0.5).select(pl.col("A").fill_null(0).dp.sum((0, 10)), dp.len(signed=True))
    frame = total.release()
    assert frame.collect().shape == (1, 2)
    assert frame.collect() is frame.collect()
    assert context.query(rho=0.125).select(dp.len(signed=True)).release().collect().shape == (1, 1)
    pure, zcdp = costs(account)
    assert isinstance(pure, odo.PureDP)
    assert math.isclose(float(pure.epsilon), 0.5)
    assert isinstance(zcdp, odo.ZCDP)  # it answers once, so it is not charged as interactive
    assert math.isclose(float(zcdp.rho), 0.125)
    with pytest.raises(InvalidArgument, match="needs a loss"):
        context.query()


def test_frames_of_a_compositor_answer_once() -> None:
    _, given_data = table()
    account = account_of(4, 1e-6)
    context = odo_opendp.context(account, **given_data, privacy_loss=dp.loss_of(epsilon=1.0), split_evenly_over=2)
    frame = context.query().select(dp.len(signed=True)).release()
    with pytest.raises(odo.UnprovenComposition, match="many times"):
        frame.lazy()
    assert frame.collect().shape == (1, 1)
    with pytest.raises(dp.OpenDPException, match="exhausted"):
        frame.collect()
    (cost,) = costs(account)
    assert isinstance(cost, Interactive)


def test_a_frame_can_be_opened() -> None:
    _, given_data = table()
    made = dp.Context.compositor(**given_data, privacy_loss=dp.loss_of(epsilon=1.0), split_evenly_over=1)
    measurement = made.query().select(dp.len(signed=True)).resolve()
    account = account_of(4, 1e-6)
    with account.interact(measurement, given_data["data"]) as frame:
        with pytest.raises(odo.UnprovenComposition, match="many times"):
            frame.lazy()
        assert frame.collect().shape == (1, 1)
    assert costs(account) == [Interactive(odo.PureDP(Fraction(measurement.map(1))))]


def test_the_threshold_of_a_frame_is_not_shown() -> None:
    """Unlike the refused thresholds on integers: a group at the threshold stays hidden, as the delta assumes."""
    pl, given_data = table()
    made = dp.Context.compositor(**given_data, privacy_loss=dp.loss_of(epsilon=2.0, delta=1e-2))
    query = made.query(epsilon=0.5, delta=5e-3).group_by("B").agg(dp.len(signed=True))
    measurement = query.resolve()
    arguments = measurement.__opendp_dict__["__kwargs__"]
    scale, threshold = arguments["global_scale"], arguments["threshold"]
    epsilon, delta = measurement.map(1)
    rate = math.exp(-1 / scale)
    above, reached = (rate**x / (1 + rate) for x in (threshold, threshold - 1))  # of noise on a count of one
    assert math.isclose(epsilon, 1 / scale)
    assert above * (1 - 1e-9) <= delta < above * (1 + 1e-6) < reached
    small = pl.LazyFrame({"A": [1] * threshold, "B": ["x"] * threshold}, schema_overrides={"A": pl.Int32})
    shown = [value for _ in range(150) for value in measurement(small).collect()["len"].to_list()]
    assert len(shown) > 20
    assert min(shown) > threshold


def test_an_expression_alone_is_refused() -> None:
    """It is a part of a frame's plan, and its distance is between groups of rows, not between datasets."""
    pytest.importorskip("polars")
    columns = [dp.series_domain("A", dp.atom_domain(T="i32"))]
    domain = dp.wild_expr_domain(columns, margin=dp.polars.Margin(max_length=10))
    metric = dp.l01inf_distance(dp.symmetric_distance())
    measurement = dp.m.make_private_expr(domain, metric, PURE, dp.len(scale=1.0, signed=True))
    with pytest.raises(odo.UnprovenComposition, match="not known here"):
        cost_of(measurement, d_in=(1, 1, 1))
