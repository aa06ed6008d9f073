from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph.core import boundaries
from odograph.core.odometers import (
    BestOf,
    DiscreteMixture,
    Filter,
    Mixture,
    Odometer,
    PaperMixture,
    PaperStitched,
    Renyi,
    Rogers,
    Spent,
    Stitched,
    odometer_from_dict,
    odometer_to_dict,
)

EVERY: list[Odometer] = [
    Filter(1.0),
    Mixture(0.01),
    PaperMixture(0.01),
    Stitched(0.001),
    PaperStitched(0.001),
    DiscreteMixture(1e-6, 1.0),
    Rogers(1e6),
    Renyi((2.0, 8.0, 32.0), (0.2, 0.4, 0.4)),
    BestOf(((0.5, Filter(1.0)), (0.5, Renyi((4.0,), (1.0,))))),
]


def spend(policy: odo.Policy, *costs: odo.Guarantee) -> odo.Reading:
    compiled = odo.compile_policy(policy)
    totals = compiled.start
    for cost in costs:
        decision = odo.ask(compiled, totals, cost)
        assert decision.admitted, str(decision)
        totals = decision.totals_after
    return odo.reading(compiled, totals)


@pytest.mark.parametrize("odometer", EVERY, ids=lambda o: o.kind)
def test_stored_form_round_trips(odometer: Odometer) -> None:
    form = json.loads(json.dumps(odometer_to_dict(odometer)))
    assert odometer_from_dict(form) == odometer
    with pytest.raises(odo.InvalidPolicy):
        odometer_from_dict({**form, "kind": "nonsense"})
    with pytest.raises(odo.InvalidPolicy):
        odometer_from_dict({"kind": odometer.kind, "tuning": 1})


@pytest.mark.parametrize("odometer", EVERY, ids=lambda o: o.kind)
@given(steps=st.lists(st.sampled_from([0.01, 0.05, 0.2]), min_size=1, max_size=6))
def test_readings_never_fall_and_never_pass_the_sum(odometer: Odometer, steps: list[float]) -> None:
    compiled = odo.compile_policy(odo.Policy(3, 1e-6, rule="zcdp", odometer=odometer))
    totals, last = compiled.start, 0.0
    for step in steps:
        totals = odo.ask(compiled, totals, odo.PureDP(step)).totals_after
        now = odo.reading(compiled, totals).loss
        assert last <= now * (1 + 1e-9)
        last = now
    assert last <= math.fsum(steps) * (1 + 1e-12)


def test_reading_is_boundary_plus_drift() -> None:
    """A step of 0.3-DP, many times: the reading against the formula of the default odometer."""
    policy = odo.Policy(8, 1e-6)
    steps = 12
    loss = spend(policy, *[odo.PureDP(0.3)] * steps).loss
    v = steps * 2 * 0.3 * math.tanh(0.15)
    assert isinstance(policy.odometer, DiscreteMixture)
    times, weights = boundaries.spread_times(policy.odometer.low, policy.odometer.high, policy.odometer.points)
    expected = boundaries.discrete_mixture(v, 1e-6, times=times, weights=weights) + v / 2
    assert loss == pytest.approx(min(expected, 0.3 * steps), rel=1e-9)


def test_probabilistic_steps_add_their_drift() -> None:
    """Erratum E4: the printed odometers forget the drift; 1e4 leaky steps lose .01 surely."""
    policy = odo.Policy(1, "0.0101", delta_steps="0.01", odometer=Filter(0.01))
    compiled = odo.compile_policy(policy, solve=False)
    step = odo.ProbDP("1e-6", "1e-6")  # log(1/(1-1e-6)) is a hair above 1e-6; its epsilon is rounded for the test
    totals = compiled.start
    for _ in range(1000):
        totals = odo.ask(compiled, totals, step).totals_after
    reading = odo.reading(compiled, totals).loss
    lost_surely = -1000 * math.log1p(-1e-6)
    assert reading >= lost_surely
    v = 1000 * 1e-12
    printed = boundaries.line(v, 1e-4, at=boundaries.filter_time(0.01, 1e-4)) + v / 2
    assert reading == pytest.approx(printed + 1e-3, rel=1e-6)


def test_dp_steps_need_a_slack() -> None:
    """Erratum E15 and Theorem 6."""
    step = odo.ApproxDP(0.1, "1e-8")
    policy = odo.Policy(1, 1e-6, rule="zcdp", delta_steps="1e-7")
    reading = spend(policy, step)
    assert math.isinf(reading.loss)
    assert "slack" in reading.licence
    slack = odo.Policy(1, 1e-6, rule="zcdp", delta_steps="1e-7", slack=0.05)
    reading = spend(slack, step)
    assert 0.15 <= reading.loss <= 0.1501
    assert reading.delta == pytest.approx(1e-6 / (1 - math.exp(-0.05)), rel=1e-9)


def test_curves_need_a_renyi_odometer() -> None:
    curve = odo.RDP((2, 4, 8), (0.01, 0.02, 0.04))
    assert math.isinf(spend(odo.Policy(3, 1e-6, rule="renyi"), curve).loss)
    orders = Renyi((2.0, 4.0, 8.0), (0.2, 0.4, 0.4))
    reading = spend(odo.Policy(3, 1e-6, rule="renyi", odometer=orders), curve, curve)
    mp.mp.dps = 30
    root = mp.findroot(
        lambda x: (
            sum(
                w * mp.exp((a - 1) * (x - 2 * r))
                for a, w, r in ((2, 0.2, mp.mpf("0.01")), (4, 0.4, mp.mpf("0.02")), (8, 0.4, mp.mpf("0.04")))
            )
            - 10**6
        ),
        2,
    )
    assert root <= reading.loss <= root * (1 + mp.mpf("1e-9"))


def test_only_the_policys_odometer_is_licensed() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6))
    own = odo.reading(compiled, compiled.start)
    other = odo.reading(compiled, compiled.start, Mixture(0.01))
    assert own.licensed
    assert "at all times" not in other.licence
    assert not other.licensed


def _renyi_crossings(delta: float, paths: int) -> float:
    """How often Gaussian steps of adaptive size ever pass the Rényi reading, by simulation."""
    orders = (2.0, 4.0, 8.0, 16.0)
    rng = np.random.default_rng(11)
    odometer = Renyi(orders, (0.25,) * 4)
    # Tabulate the reading as a function of V: for Gaussians R(a) = a V / 2.
    grid = np.linspace(0.0, 4.0, 2001)
    table = np.array(
        [odometer.bound(Spent(v, math.inf, 0.0, {Fraction(a): a * v / 2 for a in orders}), delta) for v in grid]
    )
    loss, v = np.zeros(paths), np.zeros(paths)
    crossed = np.zeros(paths, dtype=bool)
    for _ in range(400):
        near = loss > np.interp(v, grid, table) - 0.5  # small steps where a crossing is close
        step = np.where(v < 3.9, np.where(near, 0.004, 0.02), 0.0)
        loss += step / 2 + np.sqrt(step) * rng.standard_normal(paths)
        v += step
        crossed |= loss > np.interp(v, grid, table)
    return float(crossed.mean())


def test_renyi_readings_hold_at_all_times() -> None:
    paths = 20_000
    slack = 3 * math.sqrt(0.05 / paths)
    assert 0.005 <= _renyi_crossings(0.05, paths) <= 0.05 + slack
    # Negative control: a reading at ten times the level does not hold at the level.
    assert _renyi_crossings(0.5, paths) > 0.05 + slack


def names_of(policy: odo.Policy) -> list[str]:
    return [meter.name for meter in odo.compile_policy(policy).meters if "@" in meter.name]


def test_orders_that_differ_in_late_digits_have_meters_of_different_names() -> None:
    near = (20.00001, 20.00002)
    rule = odo.Policy(3, 1e-6, rule="renyi", orders=[(order, 0.3) for order in (*near, 8)])
    assert names_of(rule) == ["renyi@8", "renyi@20.00001", "renyi@20.00002"]
    compiled = odo.compile_policy(rule)
    decision = odo.ask(compiled, compiled.start, odo.ZCDP(0.001))
    assert len(decision.spent) == sum(meter.limit is not None for meter in compiled.meters)  # none hides another
    alone = odo.Policy(3, 1e-6, rule="zcdp", odometer=Renyi((*near, 4.0), (0.3, 0.3, 0.4)))
    assert names_of(alone) == ["moment@20.00001", "moment@20.00002", "moment@4"]
    parts = BestOf(tuple((0.5, Renyi((order,), (1.0,))) for order in near))
    assert names_of(odo.Policy(3, 1e-6, rule="zcdp", odometer=parts)) == ["moment@20.00001", "moment@20.00002"]


def test_an_order_that_stands_alone_keeps_its_short_name() -> None:
    own = Renyi((20.00001, 2.5), (0.5, 0.5))
    assert names_of(odo.Policy(3, 1e-6, rule="zcdp", odometer=own)) == ["moment@20", "moment@2.5"]
    twice = BestOf(tuple((0.5, Renyi((20.00001,), (1.0,))) for _ in range(2)))
    assert names_of(odo.Policy(3, 1e-6, rule="zcdp", odometer=twice)) == ["moment@20"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Filter(0), "Filter.epsilon must be above 0"),
        (lambda: Mixture(0.0), "Mixture.gamma must be above 0"),
        (lambda: Stitched(0.001, eta=1), "Stitched.eta must be above 1"),
        (lambda: DiscreteMixture(1.0, 0.5), "low <= high"),
        (lambda: Renyi((1.0,), (1.0,)), "orders above 1"),
        (lambda: BestOf(((1.0, "filter"),)), "BestOf takes pairs of a share and an odometer"),  # type: ignore[arg-type]
        (lambda: odo.Policy(1, 1e-6, odometer="filter"), "odometer must be one of"),  # type: ignore[arg-type]
        (lambda: odo.Policy(1, 1e-6, rule="renyi", orders={1: 0.5}), "orders must be above 1"),
        (lambda: odo.Policy(1, 1e-6, rule="renyi", orders={2: 0.7, 3: 0.4}), "shares of at most 1 in all"),
    ],
    ids=range(9),
)
def test_a_tuning_that_no_theorem_covers_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(odo.InvalidPolicy, match=said):
        make()


def test_a_renyi_odometer_whose_moments_were_not_counted_reads_nothing() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6))
    totals = odo.ask(compiled, compiled.start, odo.PureDP(0.1)).totals_after
    other = odo.reading(compiled, totals, Renyi((2.0,), (1.0,)))
    assert (other.loss, other.licensed) == (math.inf, False)
    assert math.isfinite(odo.reading(compiled, totals).loss)
