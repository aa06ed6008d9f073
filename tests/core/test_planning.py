"""Offers: what is offered is admitted, and where nothing can be offered nothing is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

import odograph as odo
from odograph import GDP, RDP, ZCDP, Policy, PureDP, compile_policy, parallel
from odograph.account import offers_of
from odograph.core.guarantees import Guarantee, Mechanism, Parallel
from odograph.core.mechanisms import NOISES
from odograph.core.planning import (
    AccountState,
    Calibration,
    CalibrationQuestion,
    ask,
    calibrate,
    calibration_question,
    largest,
)
from odograph.errors import InvalidArgument, UnprovenComposition

CURVE = RDP((2, 8, 32), (1, 4, 16))
RENYI = compile_policy(Policy(1, 1e-6, filter="renyi"))


def test_a_refused_curve_has_no_one_size_to_offer_another_of() -> None:
    decision = odo.planning.ask(odo.planning.AccountState("", RENYI, RENYI.start), CURVE)
    assert not decision.admitted
    assert decision.largest is None
    assert "A curve has no single size, so no smaller one is offered" in str(decision)


@pytest.mark.parametrize("kind", [RDP, Mechanism, Parallel, CURVE, parallel([PureDP(0.1), CURVE])], ids=repr)
def test_what_has_no_one_size_has_no_largest(kind: Any) -> None:  # noqa: ANN401  a class or a guarantee
    assert largest(AccountState("", RENYI, RENYI.start), kind) is None


@pytest.mark.parametrize("kind", [int, 0.1, "pure", None], ids=repr)
def test_what_is_no_kind_of_guarantee_is_refused(kind: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises(InvalidArgument, match="kind must be a class"):
        largest(AccountState("", RENYI, RENYI.start), kind)


def test_of_a_mechanism_that_no_rule_takes_no_number_of_runs_is_offered() -> None:
    compiled = compile_policy(Policy(1, 1e-6))
    assert largest(AccountState("", compiled, compiled.start), Mechanism("not on the menu")) is None


def test_of_a_mechanism_that_is_too_dear_no_number_of_runs_is_offered() -> None:
    assert largest(AccountState("", RENYI, RENYI.start), Mechanism("noisy", 1, CURVE)) is None


def test_where_everything_is_admitted_the_offer_is_one_that_is() -> None:
    """An account whose gate is open: the search for the largest ends."""
    assert odo.core.planning.largest_that(PureDP, 1, lambda _, count: count == 1) == PureDP(2**29)


def test_an_offer_whose_last_digit_would_round_up_past_the_limit_is_made_a_little_smaller() -> None:
    # The last size that the search sees admitted, cut to twelve digits in floats, is 101.001892581.
    compiled = compile_policy(Policy("101.00189258099999", 0, filter="basic"))
    assert not odo.planning.ask(
        odo.planning.AccountState("", compiled, compiled.start), PureDP("101.001892581")
    ).admitted
    offer = largest(AccountState("", compiled, compiled.start), PureDP)
    assert offer is not None
    assert odo.planning.ask(odo.planning.AccountState("", compiled, compiled.start), offer).admitted
    assert float(offer.epsilon) == pytest.approx(101.001892581, rel=3e-11)


def test_an_account_offers_the_kinds_that_its_policy_takes_until_nothing_fits() -> None:
    account = odo.Accountant(Policy(1, 0, filter="basic"))
    assert offers_of(account) == [PureDP(1)]
    account.spend(PureDP("0.25"))
    assert offers_of(account) == [PureDP("0.75")]
    account.spend(PureDP("0.75"))
    assert offers_of(account) == []
    assert [type(offer) for offer in offers_of(odo.Accountant(Policy(1, 1e-6, filter="zcdp")))] == [PureDP, GDP, ZCDP]


# Calibration. What is checked is worked out here in decimals, not by the search.

POLICIES: Final = [
    compile_policy(policy)
    for policy in (
        Policy(1, 0, filter="basic"),
        Policy("0.7", 1e-6, filter="zcdp"),
        Policy(2, 1e-9, filter="gdp"),
        Policy(1, 1e-6, filter="renyi"),
        Policy(1, 1e-6),
    )
]
CHEAP: Final = sorted(NOISES.keys() - {"subsampled_gaussian"})  # whose price is quick to compute
Paths = tuple[AccountState, ...]


@st.composite
def paths(draw: st.DrawFn) -> Paths:
    """One account, or two of which the upper has spent more."""
    spent = draw(st.lists(st.integers(0, 400), min_size=1, max_size=2))
    compiled = draw(st.sampled_from(POLICIES))
    states = []
    for thousandths in spent:
        state = AccountState("", compiled, compiled.start)
        decision = ask(state, PureDP(Fraction(thousandths, 1000)))
        assert decision.admitted
        states.append(state._replace(totals=decision.totals_after))
    return tuple(states)


@st.composite
def questions(draw: st.DrawFn) -> CalibrationQuestion:
    noise = NOISES[draw(st.sampled_from(CHEAP))]
    values = {
        "sensitivity": st.integers(1, 10**6) | st.fractions("1/1000", 1000) | st.sampled_from(["1e-30", 3, "1e30"]),
        "categories": st.integers(2, 1000),
        "dimension": st.integers(1, 1000),
        "grid": st.sampled_from([1, "0.01", "1/3"]),
    }
    settings = {name: draw(values[name]) for name in noise.settings if draw(st.booleans())}
    return calibration_question(noise.mechanism, draw(st.integers(1, 30) | st.integers(1, 10**7)), settings)


def unit_of(found: Calibration) -> Decimal:
    """One unit of the fourth digit: of the value, or of its distance from the one that reveals nothing."""
    distance = Decimal(repr(found.value))
    if found.parameter == "truth":
        distance -= 1 / Decimal(dict(found.settings).get("categories", 2))
    return Decimal(10) ** (math.floor(distance.log10()) - 3)


def with_less_noise(found: Calibration) -> odo.Guarantee | None:
    """The guarantee with a unit less noise; None if there is none."""
    grows = found.parameter in {"scale", "sigma"}
    unit, value = unit_of(found), Decimal(repr(found.value))
    if grows and value == 1000 * unit:
        unit /= 10  # below a power of ten the fourth digit is a tenth
    value += -unit if grows else unit
    if found.parameter == "truth" and value >= 1:
        return None
    cost: odo.Guarantee = NOISES[found.mechanism].mechanism(**found.arguments | {found.parameter: value})
    return cost


def check_calibration(found: Calibration, path: Paths) -> None:
    """Assert that it has four digits, is admitted as often as it says, and that less noise would not be."""
    typed_back = eval(repr(found), vars(odo.mechanisms))  # noqa: S307  the repr is code
    assert typed_back == found.guarantee
    assert all(state.admits(typed_back, found.times) for state in path)
    assert Decimal(repr(found.value)) % unit_of(found) == 0
    less = with_less_noise(found)
    assert less is None or not all(state.admits(less, found.times) for state in path)


def answer(path: Paths, question: CalibrationQuestion) -> Calibration | None:
    """None also where no theorem covers the mechanism."""
    try:
        return calibrate(path, question)
    except UnprovenComposition:
        return None


@given(paths(), questions())
def test_calibrated_noise_is_admitted_when_typed_back_and_a_unit_less_is_not(
    path: Paths, question: CalibrationQuestion
) -> None:
    found = answer(path, question)
    if found is not None:
        check_calibration(found, path)
        assert (found.mechanism, found.times) == (question.noise.name, question.times)
        assert found.arguments == {found.parameter: found.value, **question.settings}
        assert odo.planning.how_many(path, found.guarantee) >= found.times


@given(paths(), questions())
def test_where_nothing_is_found_much_more_noise_is_refused_too(path: Paths, question: CalibrationQuestion) -> None:
    try:
        if calibrate(path, question) is not None:
            return
    except UnprovenComposition:
        return
    # Where a random answer reveals nothing is a setting's matter; the others reveal next to nothing at these.
    settings = {name: Fraction(value) for name, value in question.settings.items()}
    quiet_values = {
        "epsilon": Fraction(1, 10**15),
        "truth": 1 / settings.get("categories", Fraction(2)) + Fraction(1, 10**11),
    }
    noisy = settings.get("sensitivity", Fraction(1)) * 10**15
    parameter = question.noise.parameter
    quiet = question.noise.mechanism(**{parameter: quiet_values.get(parameter, noisy)}, **question.settings)
    assert not all(state.admits(quiet, question.times) for state in path)


def rounded(found: Calibration, path: Paths, digits: Callable[[Decimal, Decimal], Decimal]) -> Calibration:
    """The calibration of a search that rounds what the largest guarantee comes to."""
    offer = largest(path, NOISES[found.mechanism].mechanism, found.times)
    assert offer is not None
    value = float(digits(Decimal(1) / Decimal(repr(float(getattr(offer, offer.size)))), unit_of(found)))
    return replace(found, value=value, guarantee=NOISES[found.mechanism].mechanism(value))


ROUNDINGS: Final[dict[str, Callable[[Decimal, Decimal], Decimal]]] = {
    "to the nearest": lambda value, unit: round(value / unit) * unit,
    "a unit too far": lambda value, unit: (math.ceil(value / unit) + 1) * unit,
    "not at all": lambda value, _: value,
}


@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("mechanism", [odo.laplace, odo.gaussian])
def test_another_rounding_is_caught(name: str, mechanism: Callable[..., odo.Guarantee]) -> None:
    """Negative controls: too little noise, too much, and more digits than a person wants to type."""
    compiled, caught = POLICIES[1], 0
    path = (AccountState("", compiled, compiled.start),)
    for times in range(1, 40):
        found = calibrate(path, calibration_question(mechanism, times, {}))
        assert found is not None
        check_calibration(found, path)
        try:
            check_calibration(rounded(found, path, ROUNDINGS[name]), path)
        except AssertionError:
            caught += 1
    assert caught >= 10


def test_the_noise_of_one_gaussian_is_the_analytic_one() -> None:
    """Balle and Wang 2018, Theorem 8: delta as a function of epsilon and sigma, computed by another library."""

    def delta(sigma: float, epsilon: float = 2.0) -> float:
        below, above = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
        return float(norm.cdf(below) - math.exp(epsilon) * norm.cdf(above))

    compiled = compile_policy(Policy(2, "1.000001e-9", filter="gdp", delta_steps="1e-15"))
    found = calibrate(AccountState("", compiled, compiled.start), calibration_question(odo.gaussian, 1, {}))
    assert found is not None
    least = math.sqrt(0.99)  # one percent of mu^2 is the filter's reserve
    assert delta(found.value * least) <= 1e-9 < delta((found.value - 0.001) * least)


def test_a_subsampled_gaussian_is_calibrated_by_its_curve() -> None:
    state = AccountState("", RENYI, RENYI.start)
    found = calibrate(state, calibration_question(odo.subsampled_gaussian, 1000, {"sampling_rate": "0.01"}))
    assert found is not None
    assert repr(found).startswith("subsampled_gaussian(noise_multiplier=")
    assert repr(found).endswith(", sampling_rate=0.01)")
    assert odo.planning.how_many(state, odo.subsampled_gaussian(0.01, found.value)) >= 1000
    less = float(Decimal(repr(found.value)) - unit_of(found))
    assert odo.planning.how_many(state, odo.subsampled_gaussian(0.01, less)) < 1000


@pytest.mark.parametrize("name", NOISES)
def test_the_largest_of_a_mechanism_is_the_largest_of_its_guarantee(name: str) -> None:
    state, noise = AccountState("", RENYI, RENYI.start), NOISES[name]
    if noise.kind is Mechanism:
        with pytest.raises(InvalidArgument, match="kind must have a guarantee of one size"):
            largest(state, noise.mechanism)
    else:
        assert largest(state, noise.mechanism, 7) == largest(state, noise.kind, 7) is not None


def test_a_policy_that_refuses_nothing_has_an_answer_too() -> None:
    for name in CHEAP:
        question = calibration_question(NOISES[name].mechanism, 1, {})
        found = odo.planning.calibrate_that(question, lambda _: True)
        assert found is not None
        assert found.value < 1e-15 or found.value > 1e15 or found.value == 0.9999
        assert odo.planning.calibrate_that(question, lambda _: False) is None


@pytest.mark.parametrize("sensitivity", ["1.7976931348623157e-100", "9.876543210987654e99", f"1.{'7' * 70}", "1e100"])
def test_long_and_large_settings_have_an_answer(sensitivity: str) -> None:
    for name in CHEAP:
        if "sensitivity" in NOISES[name].settings:
            question = calibration_question(NOISES[name].mechanism, 10**6, {"sensitivity": sensitivity})
            found = calibrate(AccountState("", RENYI, RENYI.start), question)
            assert found is not None
            check_calibration(found, (AccountState("", RENYI, RENYI.start),))


def test_an_outlook_counts_each_request_alone_and_none_without_a_theorem() -> None:
    zcdp = compile_policy(Policy(1, 1e-6, filter="zcdp"))
    counts = odo.planning.outlook({"renyi": RENYI, "zcdp": zcdp}, [PureDP(0.1), CURVE, ZCDP(0.01)])
    assert counts[CURVE] == {"renyi": odo.Accountant(RENYI.policy).how_many(CURVE), "zcdp": 0}
    for cost in (PureDP(0.1), ZCDP(0.01)):
        assert counts[cost] == {
            name: odo.Accountant(Policy(1, 1e-6, filter=name)).how_many(cost) for name in counts[cost]
        }


@given(st.lists(st.tuples(st.sampled_from([PureDP("0.01"), PureDP("0.2"), ZCDP("0.001"), CURVE]), st.integers(1, 9))))
def test_prices_on_the_roomiest_alternative_add_up_to_what_is_used(asked: list[tuple[Guarantee, int]]) -> None:
    state, prices = AccountState("", RENYI, RENYI.start), []
    for cost, times in asked:
        for _ in range(times):
            decision = odo.planning.ask(state, cost)
            if decision.admitted:
                prices.append(RENYI.price(cost))
                state = AccountState("", RENYI, decision.totals_after)
    i = odo.planning.roomiest(RENYI, state.totals)
    assert i is not None
    limit = RENYI.meters[i].limit
    assert limit
    total = sum(price.amounts[i] or 0 for price in prices)
    assert total / limit == pytest.approx(odo.planning.used(RENYI, state.totals))


def test_without_a_limit_no_alternative_is_the_roomiest() -> None:
    compiled = compile_policy(Policy(None, 1e-6))
    assert odo.planning.roomiest(compiled, compiled.start) is None


@pytest.mark.parametrize(
    "asked",
    [
        odo.PureDP(3),
        odo.GDP("2.3456789"),
        odo.ApproxDP(3, Fraction(1, 3 * 10**8)),
        odo.ProbDP(3, Fraction(1, 3 * 10**8)),
        odo.ZCDP(5, Fraction(1, 3 * 10**8)),
        odo.parallel([odo.PureDP(3)] * 4 + [odo.GDP(2), odo.PureDP("0.7")]),
        odo.guarantees.Interactive(odo.parallel([odo.PureDP(3), odo.GDP(2)])),
        odo.guarantees.DiscreteGaussian("0.3"),
        odo.subsampled_gaussian(0.01, 2, 10**5),
    ],
    ids=lambda asked: asked.brief(),
)
def test_an_offer_fits_when_it_is_typed_back_and_has_four_digits(asked: odo.Guarantee) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    account.spend(odo.PureDP("0.0123456789"))
    names = {**vars(odo.guarantees), "parallel": odo.parallel, "subsampled_gaussian": odo.subsampled_gaussian}
    text = str(account.decide(asked)).partition("The largest that fits is ")[2]
    assert account.decide(eval(text, names))  # noqa: S307  as a person types it
    for number in re.findall(r"(?<![\w.])\d[\d.]*(?:e-?\d+)?", text):
        assert len(re.sub(r"e.*|\.", "", number).strip("0")) <= 4, text


def test_the_last_crumbs_of_a_budget_are_told_without_rows_of_zeros() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    largest = account.largest(odo.PureDP)
    assert largest is not None
    account.spend(largest)
    assert "less than 0.01% of the budget is left; PureDP(0.1) needs 10%." in str(account.decide(odo.PureDP(0.1)))
    assert "less than 0.01% of the budget is left; PureDP(1e-06) needs more." in str(account.decide(odo.PureDP(1e-6)))


def test_a_promise_is_told_by_four_digits_rounded_up() -> None:
    policy = odo.Policy(0.1 + 0.2, Fraction(1, 3 * 10**6), filter="basic")
    assert policy.target == "(0.3, 3.334e-07)-DP"
    assert repr(odo.Accountant(policy)).startswith("<Accountant epsilon=0.3, delta=3.334e-07: ")
    assert odo.Policy(rho=Fraction(1, 3)).target == "0.3334-zCDP"
    assert odo.Policy(mu=Fraction(2, 3)).target == "0.6667-GDP"
