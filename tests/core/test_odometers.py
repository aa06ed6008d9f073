from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from crossings import clock, crossing
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph.core import odometers
from odograph.core.conversions import filter_time, largest_mu, probdp_drift
from odograph.core.filters import FILTERS, Exact, ExactMeter, Gdp, Renyi, Zcdp
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.odometers import (
    BestOf,
    DiscreteMixture,
    FilterOdometer,
    Mixture,
    Odometer,
    PaperMixture,
    PaperStitched,
    Reading,
    RenyiOdometer,
    Rogers,
    Spent,
    Stitched,
    odometer_from_dict,
    odometer_to_dict,
    standard_odometer,
)
from odograph.core.theory import dp_not_probdp
from odograph.errors import InvalidArgument

EVERY: list[Odometer] = [
    FilterOdometer(1.0),
    Mixture(0.01),
    PaperMixture(0.01),
    Stitched(0.001),
    PaperStitched(0.001),
    DiscreteMixture(1e-6, 1.0),
    Rogers(1e6),
    RenyiOdometer((2.0, 8.0, 32.0), (0.2, 0.4, 0.4)),
    BestOf(((0.5, FilterOdometer(1.0)), (0.5, RenyiOdometer((4.0,), (1.0,))))),
]


def spend(policy: odo.Policy, *costs: odo.Guarantee) -> Reading:
    compiled = odo.compile_policy(policy)
    totals = compiled.start
    for cost in costs:
        decision = odo.planning.ask(odo.planning.AccountState("", compiled, totals), cost)
        assert decision.admitted, str(decision)
        totals = decision.totals_after
    return compiled.reading(totals)


@pytest.mark.parametrize("odometer", EVERY, ids=lambda o: o.kind)
def test_stored_form_round_trips(odometer: Odometer) -> None:
    form = json.loads(json.dumps(odometer_to_dict(odometer)))
    assert odometer_from_dict(form) == odometer
    with pytest.raises(odo.errors.InvalidPolicy):
        odometer_from_dict({**form, "kind": "nonsense"})
    with pytest.raises(odo.errors.InvalidPolicy):
        odometer_from_dict({"kind": odometer.kind, "tuning": 1})


@pytest.mark.parametrize("odometer", EVERY, ids=lambda o: o.kind)
@given(steps=st.lists(st.sampled_from([0.01, 0.05, 0.2]), min_size=1, max_size=6))
def test_readings_never_fall_and_never_pass_the_sum(odometer: Odometer, steps: list[float]) -> None:
    compiled = odo.compile_policy(odo.Policy(3, 1e-6, filter="zcdp", odometer=odometer))
    totals, last = compiled.start, 0.0
    for step in steps:
        totals = odo.planning.ask(odo.planning.AccountState("", compiled, totals), odo.PureDP(step)).totals_after
        now = compiled.reading(totals).loss
        assert last <= now * (1 + 1e-9)
        last = now
    assert last <= math.fsum(steps) * (1 + 1e-12)


def by_hand(v: float, delta: float, time: float) -> mp.mpf:
    """The default's reading at intrinsic time v, tuned at `time`, from its two formulas in 30 digits."""
    with mp.workdps(30):
        ell, x = -mp.log(mp.mpf(delta) / 2), mp.mpf(v)
        line = mp.sqrt(2 * ell * time) * (1 + x / time) / 2
        slopes = [mp.sqrt(2 * ell / (mp.mpf(time) / 400 * mp.mpf(200) ** (mp.mpf(k) / 7))) for k in range(8)]

        def mixed(s: mp.mpf) -> mp.mpf:
            return mp.log(mp.fsum(mp.exp(c * s - c * c * x / 2) for c in slopes) / 8) - ell

        return min(line, mp.findroot(mixed, (0, line * 3), solver="anderson", tol=1e-25)) + x / 2


@pytest.mark.parametrize("steps", [1, 12, 24])
def test_reading_is_boundary_plus_drift(steps: int) -> None:
    """Steps of 0.3-DP: the reading against the formulas of the default odometer."""
    policy = odo.Policy(8, 1e-6)
    loss = spend(policy, *[odo.PureDP(0.3)] * steps).loss
    v = steps * 2 * 0.3 * math.tanh(0.15)
    expected = float(by_hand(v, 1e-6, largest_mu(8.0, 1e-6) ** 2))
    assert loss == pytest.approx(min(expected, 0.3 * steps), rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "delta", "before"), [(1.0, 1e-6, "1.366"), (3.0, 1e-6, "3.883"), (0.5, 1e-8, "0.657")]
)
def test_the_default_is_tuned_where_the_exact_rule_stops(epsilon: float, delta: float, before: str) -> None:
    compiled = odo.compile_policy(odo.Policy(epsilon, delta, filter="exact"))
    exact = next(meter for meter in compiled.meters if isinstance(meter, ExactMeter))
    time = float(exact.quantum * (exact.limit or 0))
    spent = Spent(time, math.inf, 0.0, {})
    general = standard_odometer(epsilon, delta).bound(spent, delta)
    assert f"{general:.3f}" == before
    now = compiled.policy.odometer.bound(spent, delta)
    assert 0.935 <= now / general <= 0.955
    # Its best tuning with hindsight, at the limit itself, would read less by one part in a thousand at most.
    assert float(by_hand(time, delta, time)) >= 0.999 * now


@pytest.mark.parametrize("rule", ["zcdp", "gdp", "paper"])
def test_a_rule_s_reach_is_its_limit_where_that_is_a_closed_form(rule: str) -> None:
    for target in ((1.0, 1e-6), (8.0, 1e-9)):
        meters = odo.compile_policy(odo.Policy(*target, filter=rule)).meters
        meter = next(meter for meter in meters if meter.name == rule)
        limit = float((meter.limit or 0) / meter.scale + getattr(meter, "reserve", 0))
        assert FILTERS[rule]().reach(*target) == pytest.approx(limit, rel=2e-5)
    assert Renyi().reach(1.0, 1e-6) == Zcdp().reach(1.0, 1e-6)
    assert Exact().reach(1.0, 1e-6) == Gdp().reach(1.0, 1e-6)


def test_the_default_of_the_papers_rule_is_its_own_line() -> None:
    policy = odo.Policy(1, 1e-6, filter="paper")
    assert policy.odometer == FilterOdometer(1.0)
    assert spend(policy, *[odo.PureDP(0.01)] * 349).loss == pytest.approx(0.9994, abs=5e-5)


@pytest.mark.parametrize("rule", ["exact", "gdp", "zcdp", "renyi", "paper", {"exact": "0.9", "zcdp": "0.1"}])
@pytest.mark.parametrize("target", [(1e-9, 1e-299), (1000, 0.5), (0.1, 1 - 2**-53), (20, 1e-12)])
def test_every_policy_has_a_default(rule: str | dict[str, str], target: tuple[float, float]) -> None:
    policy = odo.Policy(*target, filter=rule)
    spent = Spent(1e-9, math.inf, 0.0, {})
    assert 0.0 < policy.odometer.bound(spent, float(policy.delta_filter)) < math.inf
    assert odo.Policy.from_dict(json.loads(json.dumps(policy.to_dict()))).odometer == policy.odometer


def test_probabilistic_steps_add_their_drift() -> None:
    """Erratum E4: the printed odometers forget the drift; 1e4 leaky steps lose .01 surely."""
    policy = odo.Policy(1, "0.0101", delta_steps="0.01", odometer=FilterOdometer(0.01))
    compiled = odo.compile_policy(policy, solve=False)
    step = odo.ProbDP("1.0000006e-6", "1e-6")  # log(1/(1-1e-6)) is 1.0000005e-6
    totals = compiled.start
    for _ in range(1000):
        totals = odo.planning.ask(odo.planning.AccountState("", compiled, totals), step).totals_after
    reading = compiled.reading(totals)
    lost_surely = -1000 * math.log1p(-1e-6)
    assert reading.loss >= lost_surely
    v = 1000 * 1.0000006e-6**2
    printed = odometers.line(v, 1e-4, at=filter_time(0.01, 1e-4)) + v / 2
    drift = totals.amounts[-1] / 10**15
    assert drift == pytest.approx(1e-3, rel=1e-6)
    assert FilterOdometer(0.01).bound(Spent(v, math.inf, drift, {}), 1e-4) == pytest.approx(printed + 1e-3, rel=1e-6)


def test_a_pdp_step_reads_no_more_than_the_sum_of_epsilons() -> None:
    policy = odo.Policy(3, "2e-6", delta_steps="1e-6", filter="zcdp")
    reading = spend(policy, odo.ProbDP(0.5, 1e-9))
    assert reading.loss == pytest.approx(0.5, rel=1e-12)
    assert reading.method == "sum of epsilons"
    many = spend(policy, *[odo.ProbDP("0.01", "1e-9")] * 900)
    assert many.loss < 9 * 0.5
    assert many.method == "BestOf"


def check_only_dp(rule: str) -> None:
    """Assert that (0, d)-DP steps have no reading: a(x) = a; a(x') = a, or b with probability d (erratum E15)."""
    aside = None if rule == "basic" else "1e-3"
    policy = odo.Policy(1, "2e-3", delta_steps=aside, filter=rule)
    step, lost_surely = odo.ApproxDP(0, "1e-6"), -math.log1p(-1e-6)
    assert spend(policy, step).loss > lost_surely
    for beside in (odo.ProbDP("0.1", "1e-9"), odo.PureDP("1e-9")):
        assert math.isinf(spend(policy, step, beside).loss)
        assert math.isinf(spend(policy, beside, step).loss)


@pytest.mark.parametrize("rule", ["zcdp", "renyi", "paper", "basic"])
def test_the_sum_of_epsilons_is_no_reading_of_a_step_that_is_only_dp(rule: str) -> None:
    check_only_dp(rule)


def test_a_minimum_with_the_sum_that_forgets_the_drift_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = FilterOdometer.bound

    def careless(self: FilterOdometer, spent: Spent, delta: float) -> float:
        return min(sound(self, spent, delta), spent.epsilon)

    monkeypatch.setattr(FilterOdometer, "bound", careless)
    with pytest.raises(AssertionError):
        check_only_dp("paper")


def test_deltas_beyond_what_was_set_aside_have_no_reading() -> None:
    compiled = odo.compile_policy(odo.Policy(1, "2e-6", delta_steps="1e-6", filter="zcdp", slack=0.1))
    totals = odo.planning.ask(
        odo.planning.AccountState("", compiled, compiled.start), odo.ProbDP("0.1", "1e-6")
    ).totals_after
    assert compiled.reading(totals).loss == pytest.approx(0.2)
    forced = totals._replace(amounts=(totals.amounts[0] + 1, *totals.amounts[1:]))  # as no gate admits
    assert math.isinf(compiled.reading(forced).loss)
    assert "above the policy's delta_steps" in compiled.reading(forced).statement


def test_a_reading_that_is_the_plain_sum_says_so() -> None:
    policy = odo.Policy(1, 1e-6)
    few, many = spend(policy, odo.PureDP(0.1)), spend(policy, *[odo.PureDP(0.01)] * 400)
    assert few.loss == pytest.approx(0.1)
    assert few.method == "sum of epsilons"
    assert str(few).startswith("loss at most 0.1 (sum of epsilons).")
    assert many.method == "BestOf"
    assert many.loss < 4.0
    assert spend(policy).method == "BestOf"  # nothing was spent, and nothing is a sum
    assert spend(policy, odo.GDP(0.01)).method == "BestOf"
    assert spend(odo.Policy(1, 0, filter="basic"), odo.PureDP(0.1)).method == "sum of epsilons"


def test_dp_steps_need_a_slack() -> None:
    """Erratum E15, and readings with a slack."""
    step = odo.ApproxDP(0.1, "1e-8")
    policy = odo.Policy(1, 1e-6, filter="zcdp", delta_steps="1e-7")
    reading = spend(policy, step)
    assert math.isinf(reading.loss)
    assert "slack" in reading.statement
    slack = odo.Policy(1, 1e-6, filter="zcdp", delta_steps="1e-7", slack=0.05)
    reading = spend(slack, step)
    assert 0.15 <= reading.loss <= 0.1501
    assert reading.delta == pytest.approx(1e-6 / (1 - math.exp(-0.05)), rel=1e-9)


CURVE = odo.RDP((2, 4, 8, 16, 64), ("0.001", "0.002", "0.004", "0.008", "0.032"))


def test_the_default_reads_curves_where_they_are_taken() -> None:
    policy = odo.Policy(3, 1e-6, filter="renyi")
    alone = spend(policy, CURVE)
    assert alone.loss < 1.0
    # A part that meets a step without a price is unbounded from then on, and the others stay what they were.
    for step in (odo.PureDP(0.1), odo.ZCDP("0.001"), odo.GDP("0.05")):
        assert alone.loss < spend(policy, CURVE, step).loss < 1.5
    with_delta = odo.Policy(3, 1e-6, filter="renyi", delta_steps="1e-7")
    assert math.isfinite(spend(with_delta, odo.PureDP(0.1), odo.ProbDP(0.1, "1e-9")).loss)
    both = spend(with_delta, CURVE, odo.ProbDP(0.1, "1e-9"))
    assert (both.loss, "a slack" in both.note, "odometer fixed" in both.note) == (math.inf, True, False)


def test_the_default_of_a_menu_made_by_hand_reads_what_comes_with_a_curve() -> None:
    losses = LossDistribution.of(np.array([0.01, -0.01]), np.array([0.502499979, 0.497500021]), 0.01)
    item = MenuItem("coin", 1, 0.01, (losses, losses))
    policy = odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=(), menu=[item]))
    curve = odo.RDP((2, 16, 64), ("0.0001", "0.0008", "0.0032"))
    assert spend(policy, odo.guarantees.Mechanism("coin", 1, curve)).loss < 0.5
    bare = spend(policy, item.runs(1))
    assert math.isinf(bare.loss)
    assert "their Rényi curve" in bare.note


def test_the_advice_for_an_unbounded_reading_names_what_is_missing_and_nothing_else() -> None:
    clocked = FilterOdometer(1.0)
    approx, curve = odo.ApproxDP(0.1, "1e-9"), odo.RDP((2, 64), ("0.001", "0.032"), delta="1e-9")
    policy = odo.Policy(3, 1e-6, filter="renyi", delta_steps="1e-7", odometer=clocked)
    notes = {
        "dp": spend(policy, approx).note,
        "curve": spend(policy, CURVE).note,
        "both": spend(policy, curve).note,
    }
    wants = {name: ("a slack" in note, "Rényi odometer" in note) for name, note in notes.items()}
    assert wants == {"dp": (True, False), "curve": (False, True), "both": (True, True)}
    cured = odo.Policy(3, 1e-6, filter="renyi", delta_steps="1e-7", slack=0.05)
    assert math.isfinite(spend(cured, approx).loss)
    assert math.isfinite(spend(cured, curve).loss)


def test_curves_need_a_renyi_odometer() -> None:
    curve = odo.RDP((2, 4, 8), (0.01, 0.02, 0.04))
    assert math.isinf(spend(odo.Policy(3, 1e-6, filter="renyi", odometer=FilterOdometer(3.0)), curve).loss)
    orders = RenyiOdometer((2.0, 4.0, 8.0), (0.2, 0.4, 0.4))
    reading = spend(odo.Policy(3, 1e-6, filter="renyi", odometer=orders), curve, curve)
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
    own = compiled.reading(compiled.start)
    other = compiled.reading(compiled.start, Mixture(0.01))
    assert own.covered
    assert "at all times" not in other.statement
    assert not other.covered


def _renyi_crossings(delta: float, paths: int) -> float:
    """How often Gaussian steps of adaptive size ever pass the Rényi reading, by simulation."""
    orders = (2.0, 4.0, 8.0, 16.0)
    rng = np.random.default_rng(11)
    odometer = RenyiOdometer(orders, (0.25,) * 4)
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
    rule = odo.Policy(
        3, 1e-6, odometer=FilterOdometer(3.0), filter=odo.filters.Renyi([(order, 0.3) for order in (*near, 8)])
    )
    assert names_of(rule) == ["renyi@8", "renyi@20.00001", "renyi@20.00002"]
    compiled = odo.compile_policy(rule)
    decision = odo.planning.ask(odo.planning.AccountState("", compiled, compiled.start), odo.ZCDP(0.001))
    assert len(decision.spent) == sum(meter.limit is not None for meter in compiled.meters)  # none hides another
    alone = odo.Policy(3, 1e-6, filter="zcdp", odometer=RenyiOdometer((*near, 4.0), (0.3, 0.3, 0.4)))
    assert names_of(alone) == ["moment@20.00001", "moment@20.00002", "moment@4"]
    parts = BestOf(tuple((0.5, RenyiOdometer((order,), (1.0,))) for order in near))
    assert names_of(odo.Policy(3, 1e-6, filter="zcdp", odometer=parts)) == ["moment@20.00001", "moment@20.00002"]


def test_an_order_that_stands_alone_keeps_its_short_name() -> None:
    own = RenyiOdometer((20.00001, 2.5), (0.5, 0.5))
    assert names_of(odo.Policy(3, 1e-6, filter="zcdp", odometer=own)) == ["moment@20", "moment@2.5"]
    twice = BestOf(tuple((0.5, RenyiOdometer((20.00001,), (1.0,))) for _ in range(2)))
    assert names_of(odo.Policy(3, 1e-6, filter="zcdp", odometer=twice)) == ["moment@20"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FilterOdometer(0), "FilterOdometer.epsilon must be above 0"),
        (lambda: Mixture(0.0), "Mixture.gamma must be above 0"),
        (lambda: Stitched(0.001, eta=1), "Stitched.eta must be above 1"),
        (lambda: DiscreteMixture(1.0, 0.5), "low <= high"),
        (lambda: RenyiOdometer((1.0,), (1.0,)), "orders must be above 1, with one weight"),
        (lambda: BestOf(((1.0, "filter"),)), "BestOf.parts must be pairs of a share and an odometer"),  # type: ignore[arg-type]
        (lambda: odo.Policy(1, 1e-6, odometer=1), "odometer must be one of"),  # type: ignore[arg-type]
        (lambda: odo.Policy(1, 1e-6, filter=odo.filters.Renyi({1: 0.5})), "orders must be above 1"),
        (lambda: odo.Policy(1, 1e-6, filter=odo.filters.Renyi({2: 0.7, 3: 0.4})), "shares of at most 1 in all"),
    ],
    ids=range(9),
)
def test_a_tuning_that_no_theorem_covers_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make()


def test_a_renyi_odometer_whose_moments_were_not_counted_reads_nothing() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6))
    totals = odo.planning.ask(odo.planning.AccountState("", compiled, compiled.start), odo.PureDP(0.1)).totals_after
    other = compiled.reading(totals, RenyiOdometer((2.0,), (1.0,)))
    assert (other.loss, other.covered) == (math.inf, False)
    assert math.isfinite(compiled.reading(totals).loss)


def test_a_reading_says_with_which_probability_it_holds_or_that_it_allows_no_claim() -> None:
    def statement(delta: float) -> str:
        return Reading(0.5, delta, Mixture(1.0), covered=True).statement

    assert "with probability at least 1 - 1e-06 " in statement(1e-6)
    assert "surely" in statement(0.0)
    assert "1 - 0" not in statement(0.0)
    for delta in (1.0, 1.998, 5e8):
        assert statement(delta).startswith("It allows no claim")


def one_sided(v: float, delta: float, gamma: mp.mpf) -> mp.mpf:
    """The one-sided mixture boundary from its equation, in 30 digits."""
    goal = mp.log(mp.sqrt((v + gamma) / gamma) / (2 * mp.mpf(delta)))
    z = mp.findroot(lambda z: z * z / 2 + mp.log(mp.ncdf(z)) - goal, mp.sqrt(2 * goal + 2 * mp.log(2)))
    return z * mp.sqrt(v + gamma)


@pytest.mark.parametrize("delta", [0.1, 1e-6, 1e-12])
@pytest.mark.parametrize("v", [1e-3, 1.0, 40.0])
def test_a_mixture_at_a_time_is_the_tightest_there(v: float, delta: float) -> None:
    with mp.workdps(30):
        found = Mixture.at(v, delta)
        near = mp.mpf(found.gamma)
        here = one_sided(v, delta, near)
        others = [one_sided(v, delta, near * mp.mpf(factor)) for factor in (0.25, 0.5, 0.9, 1.1, 2, 4)]
        assert found.boundary(v, delta) == pytest.approx(float(here), rel=1e-12)
        assert here <= min(others)
        best = min(one_sided(v, delta, near * mp.mpf(1 + k / 200)) for k in range(-60, 61))
        assert here <= best * (1 + mp.mpf("2e-5"))
        # Negative control: tuned for a time four times as late, it reads more here.
        assert Mixture.at(4 * v, delta).boundary(v, delta) > 1.004 * found.boundary(v, delta)


def test_a_mixture_at_a_time_reads_numbers_as_they_are_written_and_refuses_others() -> None:
    assert Mixture.at("1/20", Fraction(1, 10**6)) == Mixture.at(0.05, 1e-6)
    for v, delta in ((0, 1e-6), (1e7, 1e-6), (1, 0), (1, 1), (1, 2)):
        with pytest.raises(InvalidArgument, match=r"v must be above 0 .* as in Mixture.at\(0.05, 1e-6\)"):
            Mixture.at(v, delta)
    with pytest.raises(InvalidArgument, match="delta must be a finite number"):
        Mixture.at(1, "small")


def test_a_dp_step_as_a_probabilistic_one_is_read_without_a_slack() -> None:
    """Erratum E15 ends the reading of a step that is only DP; the probabilistic DP that follows from it has one."""
    cost = odo.ApproxDP("0.1", "1e-9")
    policy = odo.Policy(8, 1e-6, delta_steps="5e-7", filter="zcdp")
    assert math.isinf(spend(policy, cost).loss)
    reading = spend(policy, *[cost.as_probdp("0.2")] * 20)
    assert reading.loss == pytest.approx(4.0, rel=1e-12)
    # The step that hides its reveals is (0.1, 2e-4)-DP; 60 of them, as 0.25-pDP, against the exact crossing rate.
    hiding = dp_not_probdp(0.1, 2e-4)
    step, steps, delta = odo.ApproxDP("0.1", "2e-4").as_probdp("0.25"), 60, 0.05
    v, drift = clock(0.25, steps), probdp_drift(0.25, float(step.delta))
    reading_of = [
        FilterOdometer(3.0).bound(Spent(float(x), math.inf, drift * n, {}), delta) for n, x in enumerate(v, 1)
    ]
    crossed = crossing(hiding.losses[1], hiding.losses[0], float(hiding.p[1]), reading_of)
    assert crossed <= delta + steps * float(step.delta)
    # Negative control: limits a sixth as high are passed more often.
    low = [bound / 6 for bound in reading_of]
    assert crossing(hiding.losses[1], hiding.losses[0], float(hiding.p[1]), low) > delta + steps * float(step.delta)
