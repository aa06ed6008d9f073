from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
from charge_history import charges

import odograph as odo
from odograph.core.conversions import gdp_to_dp_epsilon
from odograph.core.guarantees import exact_of
from odograph.core.mechanisms import ORDERS

dpa = pytest.importorskip("dp_accounting")
from dp_accounting import dp_event as dpe  # noqa: E402  after the skip
from dp_accounting import privacy_accountant_test, rdp  # noqa: E402  after the skip
from dp_accounting.pld import PLDAccountant  # noqa: E402  after the skip

from odograph.errors import InvalidArgument  # noqa: E402  after the skip
from odograph.integrations.dp_accounting import PrivacyAccountant, cost_of  # noqa: E402  after the skip

ADD, REPLACE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE, dpa.NeighboringRelation.REPLACE_ONE
GAUSS = dpe.GaussianDpEvent(4.0)
LAPLACE = dpe.LaplaceDpEvent(8.0)
SAMPLED = dpe.PoissonSampledDpEvent(0.01, dpe.GaussianDpEvent(1.0))
WITHOUT = dpe.SampledWithoutReplacementDpEvent(1000, 100, dpe.GaussianDpEvent(4.0))


def repeated(event: Any, count: int) -> Any:  # noqa: ANN401  untyped library
    return dpe.SelfComposedDpEvent(event, count)


def both(*events: Any) -> Any:  # noqa: ANN401  untyped library
    return dpe.ComposedDpEvent([*events])


# Events to guarantees; the numbers are closed forms.


@pytest.mark.parametrize(
    ("event", "added", "replaced"),
    [
        (dpe.NoOpDpEvent(), odo.PureDP(0), odo.PureDP(0)),
        (both(), odo.PureDP(0), odo.PureDP(0)),
        (GAUSS, odo.GDP(0.25), odo.GDP(0.5)),
        (dpe.GaussianDpEvent(4), odo.GDP(0.25), odo.GDP(0.5)),
        (LAPLACE, odo.PureDP(0.125), odo.PureDP(0.25)),
        (dpe.DiscreteLaplaceDpEvent(0.25, 2), odo.PureDP(0.5), odo.PureDP(1)),
        (dpe.ZCDpEvent(0.125), odo.ZCDP(0.125), odo.ZCDP(0.125)),
        (dpe.PoissonSampledDpEvent(1.0, GAUSS), odo.GDP(0.25), odo.GDP(0.5)),
        (repeated(GAUSS, 4), odo.GDP(0.5), odo.GDP(1)),
        (repeated(both(GAUSS, GAUSS), 2), odo.GDP(0.5), odo.GDP(1)),
        (both(repeated(LAPLACE, 3), dpe.NoOpDpEvent(), LAPLACE), odo.PureDP(0.5), odo.PureDP(1)),
        (repeated(dpe.ZCDpEvent(0.125), 3), odo.ZCDP(0.375), odo.ZCDP(0.375)),
        (both(GAUSS, dpe.ZCDpEvent(0.125)), odo.ZCDP("0.15625"), odo.ZCDP(0.25)),
    ],
)
def test_simple_events(event: Any, added: odo.Guarantee, replaced: odo.Guarantee) -> None:  # noqa: ANN401
    assert cost_of(event) == added
    assert cost_of(event, neighbors="replace-one") == replaced


def test_an_irrational_root_is_rounded_up() -> None:
    for count in (2, 3, 5, 7, 10**6 + 3):
        cost = cost_of(repeated(GAUSS, count))
        assert isinstance(cost, odo.GDP)
        assert 0 <= exact_of(cost.mu) ** 2 * 16 - count < Fraction(count, 10**13)


def test_randomized_response_is_for_changed_answers() -> None:
    event = dpe.RandomizedResponseDpEvent(0.5, 4)  # truth 5/8, each other answer 1/8
    cost = cost_of(event, neighbors="replace-one")
    assert isinstance(cost, odo.PureDP)
    assert math.log(5) <= cost.epsilon <= math.log(5) * (1 + 1e-14)  # type: ignore[operator]
    assert cost_of(dpe.RandomizedResponseDpEvent(1, 4), neighbors="replace-one") == odo.PureDP(0)
    assert cost_of(dpe.RandomizedResponseDpEvent(0.5, 1), neighbors="replace-one") == odo.PureDP(0)
    tiny = cost_of(dpe.RandomizedResponseDpEvent(1e-320, 2), neighbors="replace-one")
    assert isinstance(tiny, odo.PureDP)
    assert math.log(2) + 320 * math.log(10) <= tiny.epsilon < 738  # type: ignore[operator]
    with pytest.raises(odo.UnprovenComposition, match="replace-one"):
        cost_of(event)


def test_a_poisson_sampled_gaussian_is_a_mechanism() -> None:
    assert cost_of(SAMPLED) == odo.subsampled_gaussian(0.01, 1.0)
    many = cost_of(both(repeated(SAMPLED, 30), SAMPLED))
    assert isinstance(many, odo.guarantees.Mechanism)
    assert (many.steps, many.name) == (31, odo.subsampled_gaussian(0.01, 1.0).name)
    assert covers(many.curve, both(repeated(SAMPLED, 30), SAMPLED))


# Curves. What they must cover is RdpAccountant's own curve for the noise that the neighbours see.


def covers(curve: odo.RDP | None, event: Any, relation: Any = ADD) -> bool:  # noqa: ANN401  untyped library
    """Whether a curve is dp-accounting's at integer orders; between them its series is off by as much as a fifth."""
    assert curve is not None
    orders = [order for order in ORDERS if float(order).is_integer()]
    values = rdp.RdpAccountant(orders, neighboring_relation=relation).compose(event).rdp
    own = [curve.at(Fraction(order)) for order in orders]
    return all(
        bound is not None and bound >= Fraction(float(theirs)) and bound <= theirs * (1 + 1e-6) + 1e-11
        for bound, theirs in zip(own, values, strict=True)
    )


def curve_of(event: Any) -> odo.RDP:  # noqa: ANN401  untyped library
    cost = cost_of(event)
    curve = cost.curve if isinstance(cost, odo.guarantees.Mechanism) else cost
    assert isinstance(curve, odo.RDP)
    return curve


@pytest.mark.parametrize(
    "event",
    [
        both(GAUSS, LAPLACE),
        both(SAMPLED, GAUSS, repeated(LAPLACE, 5)),
        both(SAMPLED, dpe.PoissonSampledDpEvent(0.02, dpe.GaussianDpEvent(1.0))),
        both(SAMPLED, dpe.ZCDpEvent(0.125, 0.5), dpe.ZCDpEvent(0.25)),
        dpe.PoissonSampledDpEvent(0.01, repeated(dpe.GaussianDpEvent(2.0), 3)),
        dpe.RepeatAndSelectDpEvent(GAUSS, 10.0, 1.0),
        dpe.RepeatAndSelectDpEvent(SAMPLED, 4.0, math.inf),
    ],
)
def test_other_events_have_the_curve_of_the_renyi_accountant(event: Any) -> None:  # noqa: ANN401  untyped library
    curve = curve_of(event)
    assert covers(curve, event)
    assert not covers(odo.RDP(curve.orders, tuple(exact_of(v) * Fraction("0.999") for v in curve.values)), event)


def test_curves_are_padded_over_roundings() -> None:
    """At order 32 dp-accounting's own value is a little below the sum that it stands for."""
    rate, sigma, order = mpmath.mpf(1e-6), 4, 32
    with mpmath.workdps(60):
        terms = (
            mpmath.binomial(order, i) * rate**i * (1 - rate) ** (order - i) * mpmath.exp(mpmath.mpf(i * i - i) / 32)
            for i in range(order + 1)
        )
        truth = Fraction(str(mpmath.log(mpmath.fsum(terms)) / (order - 1)))
    event = dpe.PoissonSampledDpEvent(1e-6, both(dpe.GaussianDpEvent(float(sigma))))
    assert (curve_of(event).at(Fraction(order)) or 0) >= truth
    assert Fraction(float(rdp.RdpAccountant([order]).compose(event).rdp[0])) < truth


def test_discrete_laplace_beside_a_gaussian_is_taken_for_any_pure_step() -> None:
    curve = curve_of(both(GAUSS, repeated(dpe.DiscreteLaplaceDpEvent(0.25, 2), 3)))
    # At order 2 randomized response of epsilon e has the divergence log(2 cosh(e) - 1).
    expected = 1 / 16 + 3 * math.log(2 * math.cosh(0.5) - 1)
    assert expected <= float(curve.at(Fraction(2)) or 0) <= expected * (1 + 1e-9)


def test_an_additive_constant_is_in_the_curve() -> None:
    cost = cost_of(dpe.ZCDpEvent(0.125, 0.5))
    assert isinstance(cost, odo.RDP)
    assert [exact_of(v) for v in cost.values] == [Fraction(1, 2) + exact_of(o) / 8 for o in cost.orders]
    assert len(cost.orders) == len(ORDERS)
    thrice = cost_of(repeated(dpe.ZCDpEvent(0.125, 0.5), 3))
    assert isinstance(thrice, odo.RDP)
    assert [exact_of(v) for v in thrice.values] == [3 * exact_of(v) for v in cost.values]


def test_whole_noise_multipliers_are_not_misread() -> None:
    """dp-accounting 0.6 itself takes 100 inner Gaussians for one if their noise multiplier is a whole number."""
    nested = {
        noise: dpe.PoissonSampledDpEvent(0.01, repeated(dpe.GaussianDpEvent(noise), 100)) for noise in (10, 10.0)
    }
    assert cost_of(nested[10]) == cost_of(nested[10.0])
    assert cost_of(nested[10]) == odo.subsampled_gaussian(0.01, 1.0)  # 100 Gaussians of 10 are one of 1


# Replaced records change a sum by twice a norm. RdpAccountant leaves that to its caller, PLDAccountant does not.


def understates(mu: Fraction | float, event: Any) -> bool:  # noqa: ANN401  untyped library
    """Whether a GDP value promises less epsilon than dp-accounting's loss distributions show for replaced records."""
    shown = float(PLDAccountant(REPLACE).compose(event).get_epsilon(1e-5))
    return gdp_to_dp_epsilon(float(mu), 1e-5) < shown - 1e-3


def test_replacing_a_record_doubles_a_gaussian() -> None:
    cost = cost_of(GAUSS, neighbors="replace-one")
    assert isinstance(cost, odo.GDP)
    assert not understates(cost.mu, GAUSS)  # type: ignore[arg-type]
    assert understates(0.25, GAUSS)  # the broken twin: the value for added records


def test_replacing_a_record_doubles_inside_curves_too() -> None:
    halved = both(dpe.GaussianDpEvent(2.0), dpe.LaplaceDpEvent(4.0))
    curve = cost_of(both(GAUSS, LAPLACE), neighbors="replace-one")
    assert isinstance(curve, odo.RDP)
    assert covers(curve, halved, REPLACE)
    added = cost_of(both(GAUSS, LAPLACE))
    assert isinstance(added, odo.RDP)
    assert not covers(added, halved, REPLACE)


def test_sampling_without_replacement_is_for_replaced_records() -> None:
    curve = cost_of(WITHOUT, neighbors="replace-one")
    assert isinstance(curve, odo.RDP)
    # Wang, Balle, Kasiviswanathan 2019 at order 2, for sampling a tenth and noise of 2 sensitivities.
    expected = math.log1p(0.01 * min(4 * math.expm1(0.25), 2 * math.exp(0.25)))
    assert expected <= float(curve.at(Fraction(2)) or 0) <= expected * (1 + 1e-6)
    with pytest.raises(odo.UnprovenComposition, match="REPLACE_ONE"):
        cost_of(WITHOUT)


def test_no_curve_for_added_records_serves_replaced_ones() -> None:
    for event in (SAMPLED, both(SAMPLED, GAUSS), dpe.RepeatAndSelectDpEvent(SAMPLED, 4.0, 1.0)):
        with pytest.raises(odo.UnprovenComposition, match="replace-one"):
            cost_of(event, neighbors="replace-one")


@pytest.mark.parametrize(
    "event",
    [
        dpe.NonPrivateDpEvent(),
        dpe.GaussianDpEvent(0.0),
        dpe.LaplaceDpEvent(0),
        dpe.DiscreteLaplaceDpEvent(0.0, 1),
        dpe.GaussianDpEvent(-1.0),
        dpe.GaussianDpEvent(math.nan),
        dpe.GaussianDpEvent(math.inf),
        dpe.ZCDpEvent(-1.0),
        dpe.ZCDpEvent(1.0, -1.0),
        dpe.RandomizedResponseDpEvent(0.0, 2),
        dpe.RandomizedResponseDpEvent(1.5, 2),
        dpe.PoissonSampledDpEvent(0.1, dpe.NonPrivateDpEvent()),
        dpe.PoissonSampledDpEvent(0.1, dpe.GaussianDpEvent(0.0)),
        dpe.PoissonSampledDpEvent(0.1, both(dpe.GaussianDpEvent(0.0))),
        dpe.PoissonSampledDpEvent(0.1, both()),
        dpe.PoissonSampledDpEvent(2.0, both(GAUSS)),
        dpe.RepeatAndSelectDpEvent(dpe.NonPrivateDpEvent(), 4.0, 1.0),
        dpe.RepeatAndSelectDpEvent(GAUSS, 0.5, 1.0),
        dpe.SampledWithoutReplacementDpEvent(10, 100, GAUSS),
        repeated(GAUSS, 0),
        repeated(GAUSS, -1),
        repeated(GAUSS, 1.5),  # type: ignore[arg-type]
        "GaussianDpEvent(1)",
    ],
)
def test_what_has_no_price_is_refused(event: Any) -> None:  # noqa: ANN401  untyped library
    for wrapped in (event, both(GAUSS, event)) if not isinstance(event, str) else (event,):
        with pytest.raises(odo.errors.InvalidGuarantee):
            cost_of(
                wrapped,
                neighbors="replace-one"
                if "Replacement" in repr(event) or "Randomized" in repr(event)
                else "add-remove",
            )


@pytest.mark.parametrize(
    "event",
    [
        dpe.UnsupportedDpEvent(),
        dpe.PoissonSampledDpEvent(0.1, LAPLACE),
        dpe.SingleEpochTreeAggregationDpEvent(1.0, 3),
        dpe.MixtureOfGaussiansDpEvent(1.0, [1.0], [1.0]),
        dpe.SampledWithReplacementDpEvent(100, 10, GAUSS),
        dpe.DpEvent(),
        dpe.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 200, 1.0),
        dpe.RepeatAndSelectDpEvent(dpe.DiscreteLaplaceDpEvent(0.25, 2), 4.0, 1.0),
    ],
)
def test_what_dp_accounting_has_no_curve_for_is_unproven(event: Any) -> None:  # noqa: ANN401  untyped library
    with pytest.raises(odo.UnprovenComposition):
        cost_of(event)


def test_the_library_finds_the_events_by_themselves() -> None:
    assert odo.cost_of(GAUSS) == odo.GDP(0.25)
    assert odo.cost_of(GAUSS, neighbors="replace-one") == odo.GDP(0.5)


# The hook.


def account(**settings: Any) -> odo.Accountant:
    return odo.Accountant(odo.Policy(1, 1e-6, **settings))


def test_compose_spends_and_returns_itself() -> None:
    acc = account()
    accountant = PrivacyAccountant(acc)
    assert accountant.compose(LAPLACE).compose(dpe.GaussianDpEvent(40.0), 4) is accountant
    assert [entry.cost for entry in charges(acc)] == [odo.PureDP(0.125), odo.GDP(0.05)]
    assert accountant.ledger == both(LAPLACE, repeated(dpe.GaussianDpEvent(40.0), 4))
    assert accountant.neighboring_relation is ADD
    replaced = account(neighbors="replace-one")
    assert PrivacyAccountant(replaced).compose(dpe.GaussianDpEvent(40.0)).neighboring_relation is REPLACE
    assert charges(replaced)[0].cost == odo.GDP(0.05)


def refuses_whole(compose: Callable[[Any, int], object], acc: odo.Accountant, event: Any, count: int) -> bool:  # noqa: ANN401
    """Whether a refusal leaves everything as it was."""
    before = acc.totals
    with pytest.raises(odo.BudgetExceeded):
        compose(event, count)
    return acc.totals == before


def test_a_refusal_charges_nothing_and_leaves_it_usable() -> None:
    acc = account(filter="basic")
    accountant = PrivacyAccountant(acc)
    accountant.compose(LAPLACE, 2)

    def one_by_one(event: Any, count: int) -> None:  # noqa: ANN401  untyped library
        for _ in range(count):
            accountant.compose(event)

    mixed = both(LAPLACE, repeated(dpe.LaplaceDpEvent(4.0), 4))
    assert refuses_whole(accountant.compose, acc, LAPLACE, 7)
    assert refuses_whole(accountant.compose, acc, mixed, 1)
    assert refuses_whole(accountant.compose, acc, dpe.LaplaceDpEvent(0.5), 1)
    assert accountant.ledger == repeated(LAPLACE, 2)
    accountant.compose(LAPLACE, 6)
    assert accountant.ledger == repeated(LAPLACE, 8)
    roomy = account(filter="basic")
    accountant = PrivacyAccountant(roomy)
    assert not refuses_whole(one_by_one, roomy, LAPLACE, 9)


def test_pure_steps_are_spent_one_by_one() -> None:
    """Fifty steps of .02 fit the exact rule and leave room; one step of their sum would take all there is."""
    apart, together = account(), account()
    PrivacyAccountant(apart).compose(dpe.LaplaceDpEvent(50.0), 50)
    together.spend(cost_of(repeated(dpe.LaplaceDpEvent(50.0), 50)))
    assert apart.totals.steps == 50
    assert apart.decide(odo.PureDP(0.02)).admitted
    assert not together.decide(odo.PureDP(0.02)).admitted


def test_mixed_events_need_no_common_curve() -> None:
    """As one step it would be a curve, which the exact rule does not take; in parts it takes both."""
    acc = account(filter="exact")
    mixed = repeated(both(dpe.LaplaceDpEvent(80.0), dpe.GaussianDpEvent(80.0)), 2)
    with pytest.raises(odo.UnprovenComposition):
        acc.spend(cost_of(mixed))
    assert PrivacyAccountant(acc).supports(mixed)
    PrivacyAccountant(acc).compose(mixed)
    assert acc.totals.steps == 3


def test_it_reports_the_promise_and_nothing_else() -> None:
    accountant = PrivacyAccountant(account())
    for _ in range(2):
        assert accountant.get_epsilon(1e-6) == 1
        assert accountant.get_epsilon(1e-3) == 1
        assert accountant.get_delta(1.0) == 1e-6
        assert accountant.get_delta(3) == 1e-6
        with pytest.raises(odo.UnprovenComposition, match="promises nothing"):
            accountant.get_epsilon(9.9e-7)
        with pytest.raises(odo.UnprovenComposition, match="promises nothing"):
            accountant.get_delta(0.999)
        with pytest.raises(InvalidArgument):
            accountant.get_epsilon(math.nan)
        accountant.compose(LAPLACE)
    third = PrivacyAccountant(odo.Accountant(odo.Policy(Fraction(1, 3), 1e-6, filter="zcdp")))
    assert Fraction(third.get_epsilon(1e-6)) >= Fraction(1, 3)


def test_support_is_the_policy_s_and_asks_for_nothing() -> None:
    exact, renyi = account(filter="exact"), account(filter="renyi")
    assert PrivacyAccountant(exact).supports(GAUSS)
    assert PrivacyAccountant(exact).supports(dpe.LaplaceDpEvent(0.1))  # too dear, and yet supported
    assert not PrivacyAccountant(exact).supports(SAMPLED)  # not on the menu
    assert PrivacyAccountant(renyi).supports(SAMPLED)
    assert not PrivacyAccountant(renyi).supports(repeated(GAUSS, 0))
    assert not PrivacyAccountant(renyi).supports(dpe.NonPrivateDpEvent())
    assert not PrivacyAccountant(account(filter="renyi", neighbors="replace-one")).supports(SAMPLED)
    with pytest.raises(dpa.UnsupportedEventError, match="filter='renyi'"):
        PrivacyAccountant(exact).compose(SAMPLED)
    with pytest.raises(TypeError):
        PrivacyAccountant(exact).compose("an event")
    with pytest.raises(ValueError, match="positive"):
        PrivacyAccountant(exact).compose(GAUSS, 0)
    with pytest.raises(dpa.UnsupportedEventError, match="at most"):
        PrivacyAccountant(exact).compose(LAPLACE, 10**12)
    assert exact.totals == exact.compiled.start
    assert renyi.totals == renyi.compiled.start


class TestLibraryContract(privacy_accountant_test.PrivacyAccountantTest):  # type: ignore[misc]  # untyped library
    """dp-accounting's own tests of unsupported events. Its other tests ask for what was spent so far."""

    test_no_events = test_no_op = None
    __unittest_skip__ = False

    def _make_test_accountants(self) -> list[Any]:
        return [PrivacyAccountant(account(filter=rule)) for rule in ("exact", "renyi")]


for name in [name for name in dir(TestLibraryContract) if name.startswith("test_non_private")]:
    setattr(TestLibraryContract, name, None)


def test_the_library_s_search_drives_it() -> None:
    """`calibrate_dp_mechanism` composes with fresh accountants and reads epsilon: what it finds keeps the promise."""
    compiled = odo.compile_policy(odo.Policy(1, 1e-6))
    steps: list[int] = []

    def fresh() -> PrivacyAccountant:
        return PrivacyAccountant(odo.Accountant(compiled))

    def event(count: int) -> Any:  # noqa: ANN401  untyped library
        steps.append(count)
        return repeated(dpe.GaussianDpEvent(50.0), count)

    def search(high: int) -> int:
        bracket = dpa.ExplicitBracketInterval(1, high)
        found: int = dpa.calibrate_dp_mechanism(fresh, event, 1.0, 1e-6, bracket, discrete=True)
        return found

    assert search(100) in range(1, 101)
    with pytest.raises(odo.BudgetExceeded):  # ten thousand do not fit: the search stops, and nothing is made up
        search(10_000)
    assert steps[-1] == 10_000


def test_noise_calibrated_elsewhere_is_then_spent_here() -> None:
    noise = dpa.calibrate_dp_mechanism(
        rdp.RdpAccountant, lambda noise: repeated(dpe.GaussianDpEvent(noise), 10), 0.9, 1e-6, tol=1e-3
    )
    acc = account(filter="gdp")
    accountant = PrivacyAccountant(acc)
    for _ in range(10):
        accountant.compose(dpe.GaussianDpEvent(noise))
    assert acc.totals.steps == 10
    assert accountant.ledger == repeated(dpe.GaussianDpEvent(noise), 10)
    assert accountant.get_epsilon(1e-6) == 1


@pytest.mark.parametrize("policy", [odo.Policy(mu=1), odo.Policy(None, 1e-6)], ids=["mu", "no limit"])
def test_a_policy_without_an_epsilon_is_charged_and_says_that_it_promises_none(policy: odo.Policy) -> None:
    account = odo.Accountant(policy)
    PrivacyAccountant(account).compose(GAUSS, 3)
    assert charges(account)
    for ask in (PrivacyAccountant(account).get_epsilon, PrivacyAccountant(account).get_delta):
        with pytest.raises(odo.UnprovenComposition, match="must promise an epsilon"):
            ask(0.5)
