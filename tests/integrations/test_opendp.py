from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from charge_history import charges
from hypothesis import given, settings
from hypothesis import strategies as st

import odograph as odo
from odograph.core.conversions import gdp_to_dp_delta
from odograph.core.guarantees import DiscreteGaussian, exact_of
from odograph.core.mechanisms import ORDERS
from odograph.errors import InvalidArgument
from odograph.integrations import is_interactive
from odograph.integrations.opendp import _profile, cost_of

dp = pytest.importorskip("opendp.prelude")
dp.enable_features("contrib", "honest-but-curious")

ROWS = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
COUNT = dp.atom_domain(T=int), dp.absolute_distance(T=int)
VECTOR = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
NOISE = odo.mechanisms.discrete_gaussian
DATA = [3, 5, 20]
FULL = os.environ.get("ODOGRAPH_FULL") == "1"


def clamped_sum(scale: float) -> Any:  # noqa: ANN401  untyped library
    return ROWS >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_laplace(scale=scale)


def custom(measure: Any, loss: Callable[[Any], Any], answer: Callable[[Any], Any] = len, space: Any = ROWS) -> Any:  # noqa: ANN401
    return dp.m.make_user_measurement(*space, measure, answer, loss)


def hidden_queryable() -> Any:  # noqa: ANN401  untyped library
    """A compositor that no constructor tells: only its answer shows what it is."""
    compositor = dp.c.make_adaptive_composition(*ROWS, dp.max_divergence(), d_in=1, d_mids=[0.1])
    return compositor >> (lambda queryable: queryable)


# What each output measure becomes, with numbers from closed forms.


def test_max_divergence_is_pure() -> None:
    assert cost_of(dp.m.make_laplace(*COUNT, scale=4.0), d_in=1) == odo.PureDP(0.25)
    assert cost_of(clamped_sum(20.0)) == odo.PureDP(0.5)  # sensitivity 10 over scale 20


def test_concentrated_is_zcdp_or_discrete_noise_and_never_gdp() -> None:
    assert cost_of(custom(dp.zero_concentrated_divergence(), lambda d: 0.125 * d)) == odo.ZCDP(0.125)
    assert cost_of(dp.m.make_gaussian(*COUNT, scale=2.0), d_in=1) == NOISE(2)
    assert cost_of(dp.m.make_gaussian(*VECTOR, scale=2.0), d_in=1.0) == NOISE(2)
    approximate = dp.c.make_approximate(dp.m.make_gaussian(*COUNT, scale=2.0))
    assert cost_of(approximate, d_in=1) == odo.ZCDP(0.125, 0)
    assert cost_of(custom(dp.approximate(dp.zero_concentrated_divergence()), lambda d: (0.25 * d, 2.0**-20))) == (
        odo.ZCDP("0.25", Fraction(1, 2**20))
    )


def test_a_discrete_gaussian_is_no_gaussian() -> None:
    """The reason for a kind of its own: at some epsilon it leaks more than the Gaussian of the same scale."""
    sigma = 0.5
    weights = {x: math.exp(-x * x / (2 * sigma**2)) for x in range(-40, 41)}
    total = math.fsum(weights.values())
    deltas = {
        epsilon: math.fsum(max(0.0, w - math.exp(epsilon) * weights.get(x - 1, 0.0)) for x, w in weights.items())
        / total
        for epsilon in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    }
    leaks = {epsilon: delta / gdp_to_dp_delta(1 / sigma, epsilon) for epsilon, delta in deltas.items()}
    assert max(leaks.values()) > 1.05
    cost = cost_of(dp.m.make_gaussian(*COUNT, scale=sigma), d_in=1)
    assert isinstance(cost, DiscreteGaussian)
    assert cost.implies() == (odo.ZCDP(2),)
    # No filter takes it for a Gaussian: the exact one has no theorem, and the others no price.
    with pytest.raises(odo.UnprovenComposition):
        odo.Accountant(odo.Policy(8, 1e-3, filter="exact")).spend(cost)
    for rule in ("gdp", "smooth"):
        with pytest.raises(odo.BudgetExceeded):
            odo.Accountant(odo.Policy(1, 1e-6, filter=rule)).spend(cost)


# Gaussians whose noise is known.


def test_noise_over_integers_is_discrete() -> None:
    assert cost_of(dp.m.make_gaussian(*COUNT, scale=20.0), d_in=3) == NOISE(20, 3)
    assert cost_of(dp.m.make_gaussian(*COUNT, scale=20.0, k=0), d_in=3) == NOISE(20, 3)
    assert cost_of(dp.m.make_gaussian(*COUNT, scale=0.1), d_in=1) == NOISE(Fraction(0.1))  # the binary number
    for kind in ("i64", "u32", "u64"):
        space = dp.atom_domain(T=kind), dp.absolute_distance(T=kind)
        assert cost_of(dp.m.make_gaussian(*space, scale=20.0), d_in=3) == NOISE(20, 3)
    # At most nine counts differ if the sum of their squared changes is at most nine; else as many as there are.
    assert cost_of(dp.m.make_gaussian(*VECTOR, scale=20.0), d_in=3.0) == NOISE(20, 3, 9)
    five = dp.vector_domain(dp.atom_domain(T=int), size=5), dp.l2_distance(T=float)
    assert cost_of(dp.m.make_gaussian(*five, scale=20.0), d_in=3.0) == NOISE(20, 3, 5)


FLOAT = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
FLOATS = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
FOUR = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=4), dp.l2_distance(T=float)
SINGLE = dp.atom_domain(T="f32", nan=False), dp.absolute_distance(T="f32")


def test_noise_over_floats_is_discrete_on_its_grid() -> None:
    smallest = Fraction(1, 2**1074)
    assert Fraction(math.ulp(0.0)) == smallest
    plain = cost_of(dp.m.make_gaussian(*FLOAT, scale=20.0), d_in=0.25)
    assert plain == NOISE(20, "0.25", 1, smallest)
    assert odo.guarantees.guarantee_from_dict(plain.to_dict()) == plain
    assert str(plain) == "DiscreteGaussian(20.0, 0.25, 1, 4.94065645841e-324)"
    assert cost_of(dp.m.make_gaussian(*SINGLE, scale=20.0), d_in=0.25) == NOISE(20, "0.25", 1, Fraction(1, 2**149))
    assert cost_of(dp.m.make_gaussian(*FOUR, scale=20.0), d_in=0.25) == NOISE(20, "0.25", 4, smallest)
    # Almost as fine a grid: the sensitivity is rounded up to a float.
    nearly = cost_of(dp.m.make_gaussian(*FLOAT, scale=20.0, k=-1073), d_in=0.25)
    assert nearly == NOISE(20, Fraction(math.nextafter(0.25, 1)), 1, 2 * smallest)
    # Of a vector of unknown length nothing bounds the number of coordinates that differ.
    assert isinstance(cost_of(dp.m.make_gaussian(*FLOATS, scale=20.0), d_in=0.25), odo.ZCDP)


@pytest.mark.parametrize("k", [-50, -10, -1, 0, 2, 5])
def test_rounding_to_the_grid_is_part_of_the_sensitivity(k: int) -> None:
    """Two numbers at a distance d are, once rounded, at most d and the grid apart; in four coordinates twice that."""
    grid = Fraction(2) ** k
    assert cost_of(dp.m.make_gaussian(*FLOAT, scale=20.0, k=k), d_in=0.25) == NOISE(
        20, grid + Fraction(1, 4), 1, grid
    )
    found = cost_of(dp.m.make_gaussian(*FOUR, scale=20.0, k=k), d_in=0.25)
    assert found == NOISE(20, 2 * grid + Fraction(1, 4), 4, grid)


@given(
    scale=st.floats(1e-3, 1e6),
    d_in=st.floats(1e-6, 1e6),
    k=st.one_of(st.none(), st.integers(-1074, 10)),
    size=st.integers(1, 40),
)
def test_noise_that_is_known_has_the_rho_of_the_map(scale: float, d_in: float, k: int | None, size: int) -> None:
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=size), dp.l2_distance(T=float)
    measurement = dp.m.make_gaussian(*space, scale=scale, k=k)
    cost, stated = cost_of(measurement, d_in=Fraction(d_in)), Fraction(measurement.map(d_in))
    if isinstance(cost, DiscreteGaussian):
        rho = cost.mu**2 / 2
        assert stated / (1 + Fraction(1, 10**6)) <= rho <= stated * (1 + Fraction(1, 10**9))
    else:
        assert cost == odo.ZCDP(stated)


def test_transformations_and_postprocessing_keep_the_noise() -> None:
    total = ROWS >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_gaussian(scale=50.0)
    assert cost_of(total) == NOISE(50, 10)
    assert cost_of(total, neighbors="replace-one") == NOISE(50, 20)
    assert cost_of(total, d_in=3) == NOISE(50, 30)
    assert cost_of(total >> (lambda answer: answer // 2)) == NOISE(50, 10)
    clamped = ROWS >> dp.t.then_clamp((0, 10))
    apart = dp.t.make_sum(*clamped.output_space) >> dp.m.then_gaussian(scale=50.0)
    assert cost_of(clamped >> apart) == NOISE(50, 10)
    counts = ROWS >> dp.t.then_count_by_categories([1, 2, 3], MO="L2Distance<f64>") >> dp.m.then_gaussian(scale=5.0)
    assert cost_of(counts) == NOISE(5)
    assert cost_of(counts, neighbors="replace-one") == NOISE(5, 2, 4)


def test_what_is_not_known_stays_what_the_map_says() -> None:
    count = ROWS >> dp.t.then_count() >> dp.m.then_gaussian(scale=5.0)
    generic = ROWS >> dp.t.then_count() >> dp.m.make_noise(*COUNT, dp.zero_concentrated_divergence(), scale=5.0)
    for other in (dp.c.make_composition([count]), dp.c.make_approximate(count), generic):
        assert cost_of(other) == odo.ZCDP(cost_of(dp.c.make_composition([count])).rho)  # type: ignore[attr-defined]
    assert not isinstance(cost_of(dp.c.make_zCDP_to_approxDP(count), delta=1e-6), DiscreteGaussian)


@pytest.mark.parametrize("scale", [2.0, 4.999, 5.001, 50.0])
def test_a_record_that_does_not_lead_to_the_rho_of_the_map_is_not_believed(scale: float) -> None:
    count = dp.m.make_gaussian(*COUNT, scale=5.0)
    assert isinstance(cost_of(count, d_in=1), DiscreteGaussian)
    count.__opendp_dict__["__kwargs__"]["scale"] = scale
    assert cost_of(count, d_in=1) == odo.ZCDP(Fraction(count.map(1)))


def rounded_divergence(scale: float, k: int, d_in: float, steps: int, epsilon: float) -> float:
    """The hockey-stick divergence of steps of a Gaussian over floats: the worst of the inputs at that distance.

    Inputs are rounded to multiples of 2^k: what can differ is a whole number of them.
    """
    sigma, most = scale / 2.0**k, math.ceil(d_in / 2.0**k)
    reach = math.ceil(12 * sigma)
    points = np.arange(-reach, reach + 1)
    one = np.exp(-(points**2) / (2 * sigma**2))
    law = functools.reduce(np.convolve, [one / one.sum()] * steps)
    sums = np.arange(-reach * steps, reach * steps + 1)
    losses = most * (steps * most - 2.0 * sums) / (2 * sigma**2)
    return float(np.sum(law * np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - losses)))))


@pytest.mark.parametrize(
    ("scale", "k", "d_in"), [(10.0, 0, 1), (8.0, 0, 0.25), (0.75, -4, 0.01), (40.0, 1, 1.5), (9.0, None, 1)]
)
def test_what_a_smooth_budget_admits_is_within_the_target(scale: float, k: int | None, d_in: float) -> None:
    space = COUNT if k is None else FLOAT
    measurement = dp.m.make_gaussian(*space, scale=scale, k=k)
    account = odo.Accountant(odo.Policy(1, 1e-6, filter="smooth"))
    count = account.how_many(cost_of(measurement, d_in=d_in))
    assert count > 0
    with odo.session(account) as s:
        for _ in range(count):
            s.run(measurement, 17 if k is None else 0.5, d_in=d_in)
        with pytest.raises(odo.BudgetExceeded, match="DiscreteGaussian"):
            s.run(measurement, 17 if k is None else 0.5, d_in=d_in)
    assert rounded_divergence(scale, k or 0, d_in, count, 1.0) <= 1e-6
    # Negative control: at half the price the account would have gone on to more than twice as many of the largest.
    grid = 2.0 ** (k or 0)
    change = d_in if k is None else d_in + grid
    largest = math.ceil(d_in / grid) * grid
    twice = math.ceil(2 * count * (change / largest) ** 2) + 2
    assert rounded_divergence(scale, k or 0, d_in, twice, 1.0) > 1e-6


def test_fixed_deltas_are_approximate() -> None:
    fixed = dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*COUNT, scale=2.0)), 1e-6)
    cost = cost_of(fixed, d_in=1)
    assert isinstance(cost, odo.ApproxDP)
    assert exact_of(cost.delta) == Fraction(1e-6)
    # No better than the Gaussian's own curve, no worse than the textbook rho + 2 sqrt(rho log(1/delta)).
    assert gdp_to_dp_delta(0.5, float(cost.epsilon)) < 1e-6
    assert float(cost.epsilon) < 0.125 + 2 * math.sqrt(0.125 * math.log(1e6))
    pair = custom(dp.fixed_smoothed_max_divergence(), lambda d: (0.5 * d, 2.0**-30))
    assert cost_of(pair) == odo.ApproxDP(0.5, Fraction(1, 2**30))


def test_a_profile_is_read_at_the_given_delta() -> None:
    profile = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*COUNT, scale=2.0))
    cost = cost_of(profile, d_in=1, delta="1e-6")
    assert isinstance(cost, odo.ApproxDP)
    assert exact_of(cost.delta) == Fraction(1, 10**6)
    assert exact_of(cost.epsilon) == Fraction(profile.map(1).epsilon(1e-6))
    # 1e-8 as a float is above the decimal, where this profile has no epsilon yet; just below it has 5.
    assert Fraction(1e-8) > Fraction(1, 10**8)
    stairs = dp.new_privacy_profile(lambda epsilon: 1e-8 if epsilon < 5 else 0.0)
    assert stairs.epsilon(1e-8) < 5
    assert _profile(stairs, "1e-8").epsilon >= 5  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match="delta must be given"):
        cost_of(profile, d_in=1)
    with pytest.raises(odo.errors.InvalidGuarantee, match="no privacy"):
        cost_of(profile, d_in=1, delta=0)
    with pytest.raises(InvalidArgument, match="privacy profiles"):
        cost_of(clamped_sum(20.0), delta=1e-6)


def test_a_renyi_curve_keeps_the_orders_that_are_finite() -> None:
    curve = custom(dp.renyi_divergence(), lambda d: lambda order: 0.125 * d * order if order < 20 else math.inf)
    cost = cost_of(curve)
    assert isinstance(cost, odo.RDP)
    assert cost.orders == tuple(float(order) for order in ORDERS if order < 20)
    assert all(exact_of(v) == exact_of(o) / 8 for o, v in zip(cost.orders, cost.values, strict=True))
    endless = custom(dp.renyi_divergence(), lambda _: lambda _: math.inf)
    unknown = custom(dp.renyi_divergence(), lambda d: lambda order: 0.125 * d * order if order < 20 else math.nan)
    for broken in (endless, unknown):
        with pytest.raises(odo.errors.InvalidGuarantee, match="no privacy"):
            cost_of(broken)


@pytest.mark.parametrize("loss", [math.inf, math.nan, -1.0])
def test_what_is_no_finite_loss_is_refused(loss: float) -> None:
    with pytest.raises(odo.errors.InvalidGuarantee):
        cost_of(custom(dp.max_divergence(), lambda _: loss))
    with pytest.raises(odo.errors.InvalidGuarantee):
        cost_of(custom(dp.approximate(dp.max_divergence()), lambda _: (0.1, loss)))


def test_no_noise_has_no_price() -> None:
    with pytest.raises(odo.errors.InvalidGuarantee, match="no privacy"):
        cost_of(dp.m.make_laplace(*COUNT, scale=0.0), d_in=1)


def test_other_measures_and_things_are_refused() -> None:
    with pytest.raises(odo.UnprovenComposition, match="ExtrinsicDivergence"):
        cost_of(custom(dp.user_divergence("total variation"), lambda d: 0.1 * d))
    with pytest.raises(odo.errors.InvalidGuarantee, match="Transformation"):
        cost_of(ROWS >> dp.t.then_count())


def test_floats_are_read_as_the_binary_numbers_they_are() -> None:
    loss = 0.3 + 2**-54  # its shortest decimal, 0.30000000000000004, is less than it
    cost = cost_of(custom(dp.max_divergence(), lambda _: loss))
    assert isinstance(cost, odo.PureDP)
    assert exact_of(cost.epsilon) == Fraction(loss)
    assert exact_of(odo.PureDP(loss).epsilon) < Fraction(loss)  # the broken twin: the float read as a decimal
    for scale in range(1, 200):
        priced = cost_of(dp.m.make_laplace(*COUNT, scale=float(scale)), d_in=1)
        assert isinstance(priced, odo.PureDP)
        assert exact_of(priced.epsilon) >= Fraction(1, scale)


# Which neighbours a distance is for.


@pytest.mark.parametrize("metric", [dp.symmetric_distance(), dp.insert_delete_distance()], ids=str)
def test_replacing_a_record_is_a_removal_and_an_addition(metric: Any) -> None:  # noqa: ANN401  untyped library
    measurement = custom(dp.max_divergence(), lambda d: 0.25 * d, space=(ROWS[0], metric))
    assert cost_of(measurement) == odo.PureDP(0.25)
    assert cost_of(measurement, neighbors="replace-one") == odo.PureDP(0.5)
    assert cost_of(measurement, d_in=3) == odo.PureDP(0.75)
    with pytest.raises(InvalidArgument, match="at least one neighbor"):
        cost_of(measurement, neighbors="replace-one", d_in=1)


@pytest.mark.parametrize("metric", [dp.change_one_distance(), dp.hamming_distance()], ids=str)
def test_changed_records_say_nothing_of_added_ones(metric: Any) -> None:  # noqa: ANN401  untyped library
    measurement = custom(dp.max_divergence(), lambda d: 0.25 * d, space=(ROWS[0], metric))
    assert cost_of(measurement, neighbors="replace-one") == odo.PureDP(0.25)
    for d_in in (None, 1, 2):
        with pytest.raises(odo.UnprovenComposition, match="cannot express that a record is added"):
            cost_of(measurement, d_in=d_in)


def test_a_sensitivity_must_be_given() -> None:
    laplace = dp.m.make_laplace(*COUNT, scale=4.0)
    with pytest.raises(InvalidArgument, match="d_in must be given"):
        cost_of(laplace)
    for wrong in (0, -1, math.nan, True, "one", math.inf, (1, 2)):
        with pytest.raises(InvalidArgument, match="d_in"):
            cost_of(laplace, d_in=wrong)
    with pytest.raises(InvalidArgument, match="neighbors"):
        cost_of(laplace, d_in=1, neighbors="either")
    assert cost_of(laplace, d_in=1.5) == odo.PureDP(0.5)  # whole numbers: rounded up
    floats = dp.m.make_laplace(dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float), scale=4.0)
    third = cost_of(floats, d_in="1/3")
    assert isinstance(third, odo.PureDP)
    assert exact_of(third.epsilon) >= Fraction(1, 12)


# The hook: sessions.


class Recorder:
    """A mechanism that notes when it sees the data, and what its account had been charged by then."""

    def __init__(self, account: odo.Accountant, epsilon: float) -> None:
        self.account = account
        self.seen: list[int] = []
        self.measurement = custom(dp.max_divergence(), lambda d: epsilon * d, self.answer)

    def answer(self, data: list[int]) -> int:
        self.seen.append(self.account.totals.steps)
        return len(data)


def charged_first(run: Callable[[Any, list[int]], int], recorder: Recorder) -> bool:
    before = recorder.account.totals.steps
    try:
        run(recorder.measurement, DATA)
    except odo.BudgetExceeded:
        return recorder.seen == [] and recorder.account.totals.steps == before
    return recorder.seen == [before + 1]


def test_a_session_charges_before_opendp_sees_the_data() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))

    def run_first(measurement: Any, data: list[int]) -> int:  # noqa: ANN401  untyped library
        answer: int = measurement(data)
        account.spend(odo.cost_of(measurement))
        return answer

    with odo.session(account) as s:
        assert charged_first(s.run, Recorder(account, 0.125))
        assert charged_first(s.run, Recorder(account, 5.0))  # refused: nothing is released
        assert not charged_first(run_first, Recorder(account, 0.125))
        assert not charged_first(run_first, Recorder(account, 5.0))
    assert [entry.cost for entry in charges(account)] == [odo.PureDP(0.125)] * 2


def test_a_whole_pipeline_runs_until_the_budget_is_spent() -> None:
    account = odo.Accountant(odo.Policy(1, 0, filter="basic"))
    with odo.session(account) as s:
        answers = [s.run(clamped_sum(40.0), DATA) for _ in range(4)]  # 0.25 each
        with pytest.raises(odo.BudgetExceeded):
            s.run(clamped_sum(40.0), DATA)
    assert all(isinstance(answer, int) for answer in answers)
    assert account.totals.steps == 4


def test_settings_of_the_cost_are_not_passed_on() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6, delta_steps=5e-7))
    profile = dp.c.make_zCDP_to_approxDP(dp.m.make_gaussian(*COUNT, scale=50.0))
    with odo.session(account) as s:
        assert isinstance(s.run(dp.m.make_laplace(*COUNT, scale=40.0), 17, d_in=1), int)
        assert isinstance(s.run(profile, 17, d_in=1, delta=1e-8), int)
    assert charges(account)[0].cost == cost_of(dp.m.make_laplace(*COUNT, scale=40.0), d_in=1)
    assert charges(account)[1].cost == cost_of(profile, d_in=1, delta=1e-8)


def test_a_session_takes_its_neighbours_from_the_policy() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6, neighbors="replace-one"))
    with odo.session(account) as s:
        s.run(clamped_sum(80.0), DATA)
    assert charges(account)[0].cost == odo.PureDP(0.25)  # 0.125 for one record added


def test_zcdp_needs_a_rule_that_takes_it() -> None:
    gaussian = dp.m.make_gaussian(*COUNT, scale=20.0)
    exact, concentrated = (odo.Accountant(odo.Policy(1, 1e-6, filter=rule)) for rule in ("exact", "zcdp"))
    with odo.session(exact) as s, pytest.raises(odo.UnprovenComposition, match="filter='zcdp'"):
        s.run(gaussian, 17, d_in=1)
    assert exact.totals == exact.compiled.start
    with odo.session(concentrated) as s:
        assert isinstance(s.run(gaussian, 17, d_in=1), int)
    assert charges(concentrated)[0].cost == cost_of(gaussian, d_in=1)


# Interactive measurements.


def interactive() -> dict[str, Any]:
    odometer = dp.c.make_fully_adaptive_composition(*ROWS, dp.max_divergence())
    compositor = dp.c.make_adaptive_composition(*ROWS, dp.max_divergence(), d_in=1, d_mids=[0.1])
    return {
        "compositor": compositor,
        "odometer": odometer,
        "filter": dp.c.make_privacy_filter(odometer, d_in=1, d_out=0.1),
        "chained": dp.t.make_identity(*ROWS) >> compositor,
        "composed": dp.c.make_composition([clamped_sum(100.0), compositor]),
        "approximate": dp.c.make_approximate(compositor),
    }


@pytest.mark.parametrize("kind", [*interactive()])
def test_interactive_measurements_are_not_run_and_not_charged(kind: str) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    instead = {"odometer": "opendp.queryable", "composed": "one by one"}.get(kind, "account.interact")
    with odo.session(account) as s, pytest.raises(odo.UnprovenComposition, match=instead):
        s.run(interactive()[kind], DATA)
    assert account.totals == account.compiled.start


def one_shot() -> dict[str, Any]:
    """Measurements that answer once, built from spaces that belong to something interactive."""
    space = interactive()["compositor"].input_space
    context = dp.Context.compositor(
        data=DATA,
        privacy_unit=dp.unit_of(contributions=1),
        privacy_loss=dp.loss_of(epsilon=0.25),
        split_evenly_over=2,
        domain=ROWS[0],
    )
    return {
        "input_space": space >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_laplace(scale=80.0),
        "odometer's": interactive()["odometer"].input_space >> dp.t.then_count() >> dp.m.then_laplace(scale=8.0),
        "domain": dp.m.make_user_measurement(*space, dp.max_divergence(), len, lambda d: 0.125 * d),
        "query": context.query().clamp((0, 10)).sum().laplace(80.0).resolve(),
        "composed": dp.c.make_composition([space >> dp.t.then_count() >> dp.m.then_laplace(scale=8.0)]),
    }


@pytest.mark.parametrize("kind", [*one_shot()])
def test_what_answers_once_is_taken_wherever_its_space_is_from(kind: str) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    with odo.session(account) as s:
        s.run(one_shot()[kind], DATA)
    assert charges(account)[0].cost == odo.PureDP(0.125)


def test_an_interactive_query_of_a_context_is_interactive() -> None:
    context = dp.Context.compositor(
        data=DATA, privacy_unit=dp.unit_of(contributions=1), privacy_loss=dp.loss_of(epsilon=0.25), domain=ROWS[0]
    )
    nested = context.query().compositor(split_evenly_over=2, d_out=0.25).resolve()
    assert cost_of(nested) == odo.guarantees.Interactive(odo.PureDP(0.25))


def test_a_query_that_is_not_resolved_is_not_charged_and_says_how() -> None:
    context = dp.Context.compositor(
        data=DATA, privacy_unit=dp.unit_of(contributions=1), privacy_loss=dp.loss_of(epsilon=0.25), domain=ROWS[0]
    )
    account = odo.Accountant(odo.Policy(1, 1e-6))
    with (
        odo.session(account) as s,
        pytest.raises(odo.errors.InvalidGuarantee, match=r"charged. Pass what its .resolve\(\)"),
    ):
        s.run(context.query().count().laplace(4.0), DATA)
    assert account.totals.steps == 0


def test_a_hidden_queryable_is_charged_and_not_released() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    with odo.session(account) as s:
        with pytest.raises(odo.UnprovenComposition, match="answers later"):
            s.run(hidden_queryable(), DATA)
        with pytest.raises(odo.UnprovenComposition, match="answers later"):
            s.run(interactive()["odometer"], DATA, cost=odo.PureDP(0.1), trust_cost=True)
    assert account.totals.steps == 2


def test_queryables_are_recognised_and_numbers_are_not() -> None:
    assert is_interactive(hidden_queryable()(DATA))
    assert is_interactive(interactive()["odometer"](DATA))
    assert is_interactive(interactive()["filter"](DATA))
    assert not is_interactive(clamped_sum(1.0)(DATA))


def test_a_compositor_that_finishes_inside_is_one_answer() -> None:
    compositor = dp.c.make_adaptive_composition(*ROWS, dp.max_divergence(), d_in=1, d_mids=[0.125, 0.125])
    twice = compositor >> (lambda ask: [ask(clamped_sum(80.0)), ask(clamped_sum(80.0))])
    account = odo.Accountant(odo.Policy(1, 1e-6))
    with odo.session(account) as s:
        assert len(s.run(twice, DATA)) == 2
    assert charges(account)[0].cost == odo.PureDP(0.25)


def test_a_queryable_inside_an_answer_is_seen() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    inside = hidden_queryable() >> (lambda queryable: {"later": [queryable]})
    with odo.session(account) as s, pytest.raises(odo.UnprovenComposition, match="answers later"):
        s.run(inside, DATA)
    assert account.totals.steps == 1


# A cost that is given beside what the measurement states.


def policy_of(rule: str, epsilon: float = 1, delta: float = 1e-6) -> odo.Policy:
    """A policy with room for a step's own delta, but not under the exact rule, where that has to be solved for."""
    aside = None if rule in {"basic", "exact"} else delta / 2
    return odo.Policy(epsilon, delta, filter=rule, delta_steps=aside)


RULES = ("basic", "exact", "gdp", "paper", "renyi", "zcdp")


def refused(policy: odo.Policy, measurement: Any, cost: odo.Guarantee, d_in: int | None = None) -> str:  # noqa: ANN401
    """Why a session takes a cost for less than the measurement states; nothing if it is taken."""
    account = odo.Accountant(policy)
    distance: dict[str, Any] = {} if d_in is None else {"d_in": d_in}
    with odo.session(account) as s:
        try:
            s.run(measurement, DATA if d_in is None else 17, cost=cost, **distance)
        except odo.BudgetExceeded:
            return ""
        except (InvalidArgument, odo.UnprovenComposition) as problem:
            assert account.totals == account.compiled.start
            return str(problem)
    return ""


def test_a_cost_below_what_the_measurement_states_is_refused() -> None:
    loud = ROWS >> dp.t.then_count() >> dp.m.then_laplace(scale=0.0625)
    for rule in RULES:
        problem = refused(policy_of(rule), loud, odo.PureDP(0.0001))
        assert "PureDP(0.0001) is less" in problem
        assert "PureDP(16.0)" in problem
        assert "trust_cost=True" in problem
    enough: list[odo.Guarantee] = [odo.PureDP(0.5), odo.PureDP(0.625), odo.ApproxDP(0.5, 1e-9), odo.PureDP(3)]
    for cost in enough:
        assert refused(policy_of("paper"), clamped_sum(20.0), cost) == ""
    less: list[odo.Guarantee] = [odo.PureDP(0.499999999), odo.ApproxDP(0.25, 1e-9), odo.ProbDP(0.25, 0)]
    for cost in less:
        assert "is less" in refused(policy_of("paper"), clamped_sum(20.0), cost)
    assert "is less" in refused(policy_of("exact"), clamped_sum(20.0), odo.GDP(0.1))


WAYS: dict[str, Callable[[Any], Any]] = {
    "partial": functools.partial,
    "partial with data": lambda measurement: functools.partial(functools.partial(measurement), arg=DATA),
    "method": lambda measurement: measurement.invoke,
    "call": lambda measurement: measurement.__call__,
    "partial of a method": lambda measurement: functools.partial(measurement.invoke),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_other_way_to_call_a_measurement_lowers_its_cost(way: str) -> None:
    count = ROWS >> dp.t.then_count() >> dp.m.then_laplace(scale=4.0)
    called = WAYS[way](count)
    data = () if "data" in way else (DATA,)
    account = odo.Accountant(odo.Policy(1, 0, filter="basic"))
    with odo.session(account) as s:
        with pytest.raises(odo.errors.InvalidGuarantee, match="is less"):
            s.run(called, *data, cost=odo.PureDP(0.001))
        with pytest.raises(odo.errors.InvalidGuarantee, match="is less"):
            odo.private(odo.PureDP(0.001))(called)(*data)
        assert not charges(account)
        s.run(called, *data)
    assert [entry.cost for entry in charges(account)] == [odo.PureDP(0.25)]


def test_a_discrete_gaussian_is_not_charged_as_a_gaussian() -> None:
    """Gaussian DP of the same scale is the stronger statement, and OpenDP's noise does not meet it."""
    gaussian = dp.m.make_gaussian(*COUNT, scale=50.0)
    for rule in ("exact", "gdp"):
        assert "is less" in refused(policy_of(rule), gaussian, odo.gaussian(sigma=50), d_in=1)
    # Under this rule both have the same price, so that nothing is gained by the name.
    assert refused(policy_of("zcdp"), gaussian, odo.gaussian(sigma=50), d_in=1) == ""
    assert "is less" in refused(policy_of("zcdp"), gaussian, odo.gaussian(sigma=50.01), d_in=1)
    assert "is less" in refused(policy_of("zcdp"), gaussian, odo.ZCDP("1/5001"), d_in=1)


def test_a_cost_as_opendp_prints_it_is_taken() -> None:
    """Its floats are binary, and a cost is read as a decimal: they are the same number to whoever wrote them."""
    for scale in range(1, 200):
        laplace = dp.m.make_laplace(*COUNT, scale=float(scale))
        assert refused(odo.Policy(1000, 0, filter="basic"), laplace, odo.PureDP(laplace.map(1)), d_in=1) == ""
    tenth = dp.binary_search_chain(lambda s: ROWS >> dp.t.then_count() >> dp.m.then_laplace(s), 1, 0.1)
    assert refused(odo.Policy(1, 0, filter="basic"), tenth, odo.PureDP(0.1)) == ""


def test_a_cost_that_cannot_be_compared_is_refused() -> None:
    policy = odo.Policy(1, 1e-6)
    sized = dp.vector_domain(dp.atom_domain(T=int), size=3), ROWS[1]
    exact_sum = sized >> dp.t.then_clamp((0, 10)) >> dp.t.then_sum() >> dp.m.then_laplace(scale=0.01)
    laplace = dp.m.make_laplace(*COUNT, scale=40.0)
    noiseless = ROWS >> dp.t.then_count()
    for measurement in (exact_sum, laplace, noiseless, interactive()["odometer"]):
        assert "cannot be compared" in refused(policy, measurement, odo.PureDP(0.1))
    declared = odo.private(odo.PureDP(0.0001))(clamped_sum(0.05))
    with odo.session(odo.Accountant(policy)), pytest.raises(odo.errors.InvalidGuarantee, match="is less"):
        declared(DATA)


def test_a_trusted_cost_is_charged_and_the_entry_says_so() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    with odo.session(account) as s:
        s.run(clamped_sum(20.0), DATA, cost=odo.PureDP(0.125), note="visits", trust_cost=True)
        s.run(clamped_sum(80.0), DATA, cost=odo.PureDP(0.125), note="enough", trust_cost=True)
        s.run(dp.m.make_laplace(*COUNT, scale=40.0), 17, cost=odo.PureDP(0.125), trust_cost=True)
        s.run(len, DATA, cost=odo.PureDP(0.125), trust_cost=True)  # a function states nothing
        for wrong in ("yes", 1, None):
            with pytest.raises(odo.errors.InvalidArgument, match="trust_cost"):
                s.run(clamped_sum(80.0), DATA, cost=odo.PureDP(0.125), trust_cost=wrong)  # type: ignore[arg-type]
        with pytest.raises(odo.errors.InvalidArgument, match="trust_cost"):
            s.run(clamped_sum(80.0), DATA, trust_cost=True)
    below, enough, unknown, function = (entry.note for entry in charges(account))
    assert below.startswith("visits; trust_cost=True: cost=PureDP(0.125) is less")
    assert "PureDP(0.5)" in below
    assert (enough, function) == ("enough", "len")
    assert unknown.startswith("Measurement; trust_cost=True: cost=PureDP(0.125) cannot be compared")


GIVEN = st.one_of(
    st.floats(0.001, 0.6).map(odo.PureDP),
    st.floats(0.001, 0.6).map(lambda e: odo.ApproxDP(e, 1e-9)),
    st.floats(0.001, 0.6).map(lambda e: odo.ProbDP(e, 1e-9)),
    st.floats(0.001, 0.6).map(odo.GDP),
    st.floats(0.001, 0.2).map(odo.ZCDP),
    st.floats(0.001, 0.2).map(lambda v: odo.RDP((2, 8, 32, 128), (2 * v, 8 * v, 32 * v, 128 * v))),
)


def standing(rule: str, cost: odo.Guarantee) -> list[float]:
    """Where each meter is after one step of a cost; without end where the step has no price."""
    account = odo.Accountant(policy_of(rule, 1000, 0.5))
    try:
        account.spend(cost)
    except odo.UnprovenComposition:
        return [math.inf] * len(account.compiled.meters)
    totals = account.totals
    return [math.inf if out else total for total, out in zip(totals.amounts, totals.unpriced, strict=True)]


def charges_less(rules: list[str], given: odo.Guarantee, own: odo.Guarantee) -> bool:
    return any(a < b for rule in rules for a, b in zip(standing(rule, given), standing(rule, own), strict=True))


@settings(max_examples=600 if FULL else 60, deadline=None)
@given(
    cost=GIVEN,
    scale=st.floats(0.5, 50),
    noise=st.sampled_from([dp.m.then_gaussian, dp.m.then_laplace]),
    rules=st.lists(st.sampled_from(["basic", "paper", "renyi", "zcdp"]), min_size=1, max_size=2),
)
def test_what_is_taken_charges_no_meter_less(cost: odo.Guarantee, scale: float, noise: Any, rules: list[str]) -> None:  # noqa: ANN401
    measurement = ROWS >> dp.t.then_count() >> noise(scale=scale)
    own = cost_of(measurement)
    account: odo.Accountant | None = None
    for depth, rule in enumerate(rules):
        account = odo.Accountant(policy_of(rule, 1000, 0.5), name=f"{depth}", parent=account)
    assert account is not None
    with odo.session(account) as s:
        try:
            s.run(measurement, DATA, cost=cost)
        except odo.errors.InvalidGuarantee:
            assert charges_less(rules, cost, own)  # refused for a reason
            return
        except odo.UnprovenComposition:
            return  # the policy takes no cost of this kind
        written = odo.PureDP(float(own.epsilon)) if isinstance(own, odo.PureDP) else odo.ZCDP(measurement.map(1))
        assert not charges_less(rules, cost, own) or not charges_less(rules, cost, written)
        # The negative control: what is trusted is charged, and the same check sees that it is less.
        s.run(measurement, DATA, cost=odo.PureDP(1e-9), trust_cost=True)
        assert charges_less(rules, odo.PureDP(1e-9), own)
