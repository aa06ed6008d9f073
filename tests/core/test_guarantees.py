from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, ProbDP, PureDP
from odograph.core.guarantees import DiscreteGaussian, Mechanism, exact_of, guarantee_from_dict
from odograph.core.theory import tight_dp_to_probdp
from odograph.errors import InvalidArgument, InvalidGuarantee


@pytest.fixture(scope="module", autouse=True)
def _digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


CURVE = RDP((2, "2.5", 32), (0.1, "1/3", 1))
SAMPLES: list[Guarantee] = [
    PureDP(0.1),
    PureDP(0),
    PureDP("1/3"),
    ApproxDP(0.5, 1e-9),
    ApproxDP(0.5, 0),
    ProbDP("1/7", "1e-12"),
    ZCDP(0.05),
    ZCDP(0.05, 1e-9),
    ZCDP(0, 0),
    GDP(0.04),
    DiscreteGaussian(10),
    DiscreteGaussian("1/3", 0.25, 7, "0.01"),
    CURVE,
    RDP((2,), (0.1,), 1e-9),
    Mechanism("a name with 'quotes' and \u00e9"),
    Mechanism("m", 7),
    Mechanism("m", 7, CURVE),
]


def numbers(most: int | None = None) -> st.SearchStrategy[Any]:
    """Numbers in every notation that a caller may use."""
    limit = {} if most is None else {"max_value": most}
    floats = st.floats(0, most, allow_nan=False, allow_infinity=False, exclude_max=most is not None)
    fractions = st.fractions(0, **limit).filter(lambda x: most is None or x < most)
    return st.one_of(floats, fractions, floats.map(repr), fractions.map(str), floats.map(lambda x: Decimal(repr(x))))


def positive(most: int) -> st.SearchStrategy[Any]:
    return numbers(most).filter(lambda value: Fraction(value) > 0)


GUARANTEES: st.SearchStrategy[Guarantee] = st.one_of(
    st.builds(PureDP, numbers()),
    st.builds(ApproxDP, numbers(), positive(1)),
    st.builds(ProbDP, numbers(), positive(1)),
    st.builds(ZCDP, numbers(), numbers(1)),
    st.builds(GDP, numbers()),
    st.builds(
        DiscreteGaussian,
        positive(10**9).filter(lambda sigma: Fraction(sigma) > Fraction(1, 10**100)),
        numbers(10**9),
        st.integers(1, 10**20),
        positive(10**9),
    ),
    st.builds(RDP, st.just((2, 3)), st.tuples(numbers(), numbers()), numbers(1)),
    st.builds(Mechanism, st.text(min_size=1, max_size=20), st.integers(1, 10**20), st.sampled_from([None, CURVE])),
)


@given(GUARANTEES)
def test_printed_and_stored_forms_give_the_same_guarantee(guarantee: Guarantee) -> None:
    assert eval(repr(guarantee), vars(odo.guarantees)) == guarantee  # noqa: S307  the text is our own repr
    form = json.loads(json.dumps(guarantee.to_dict()))
    again = guarantee_from_dict(form)
    assert again == guarantee
    assert type(again) is type(guarantee)
    assert hash(again) == hash(guarantee)
    assert again.to_dict() == guarantee.to_dict()


@pytest.mark.parametrize("guarantee", [ApproxDP(0.5, 0), ProbDP(0.5, 0)], ids=["approx", "prob"])
def test_a_delta_of_zero_is_printed_where_it_has_no_default(guarantee: Guarantee) -> None:
    assert eval(repr(guarantee), vars(odo.guarantees)) == guarantee  # noqa: S307  the text is our own repr


def test_a_guarantee_that_stores_floats_is_caught() -> None:
    """Negative control: one third written as a float does not come back."""
    guarantee = PureDP("1/3")
    lossy = {"form": 1, "kind": "pure", "epsilon": float(Fraction(1, 3))}
    assert guarantee_from_dict(json.loads(json.dumps(lossy))) != guarantee


@pytest.mark.parametrize("tenth", [0.1, "0.1", "1e-1", "1/10", Decimal("0.10"), Fraction(1, 10), np.float64(0.1)])
def test_the_notation_of_a_number_does_not_matter(tenth: Any) -> None:  # noqa: ANN401
    makers: list[tuple[Callable[[Any], Guarantee], Guarantee]] = [
        (PureDP, PureDP(0.1)),
        (GDP, GDP(0.1)),
        (ZCDP, ZCDP(0.1)),
        (lambda x: ZCDP(0, x), ZCDP(0, 0.1)),
        (lambda x: ApproxDP(x, x), ApproxDP(0.1, 0.1)),
        (lambda x: ProbDP(x, x), ProbDP(0.1, 0.1)),
        (lambda x: RDP((2,), (x,), x), RDP([2.0], np.array([0.1]), 0.1)),  # type: ignore[arg-type]
    ]
    for make, same in makers:
        assert make(tenth) == same
        assert hash(make(tenth)) == hash(same)
        assert repr(make(tenth)) == repr(same)


def test_kinds_with_the_same_numbers_differ() -> None:
    kinds: list[Guarantee] = [PureDP(0.1), GDP(0.1), ZCDP(0.1), ApproxDP(0.1, 0), ProbDP(0.1, 0), RDP((2,), (0.1,))]
    assert len(set(kinds)) == len(kinds)
    assert PureDP(0.1) != PureDP(np.float32(0.1))  # type: ignore[arg-type]  # widened, it is another number


BAD = [-1, -5e-324, True, None, float("nan"), float("inf"), "abc", "", "1_0", 1j, [0.1], np.array([0.1])]
FIELDS: list[tuple[str, Callable[[Any], Guarantee]]] = [
    ("PureDP.epsilon", PureDP),
    ("ApproxDP.epsilon", lambda x: ApproxDP(x, 0)),
    ("ApproxDP.delta", lambda x: ApproxDP(1, x)),
    ("ProbDP.epsilon", lambda x: ProbDP(x, 0)),
    ("ProbDP.delta", lambda x: ProbDP(1, x)),
    ("ZCDP.rho", ZCDP),
    ("ZCDP.delta", lambda x: ZCDP(1, x)),
    ("GDP.mu", GDP),
    ("DiscreteGaussian.sigma", DiscreteGaussian),
    ("DiscreteGaussian.sensitivity", lambda x: DiscreteGaussian(1, x)),
    ("DiscreteGaussian.dimension", lambda x: DiscreteGaussian(1, 1, x)),
    ("DiscreteGaussian.grid", lambda x: DiscreteGaussian(1, 1, 1, x)),
    ("RDP.orders[0]", lambda x: RDP((x,), (1,))),
    ("RDP.values[1]", lambda x: RDP((2, 3), (1, x))),
    ("RDP.delta", lambda x: RDP((2,), (1,), x)),
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
@pytest.mark.parametrize(("field", "make"), FIELDS, ids=[name for name, _ in FIELDS])
def test_a_bad_number_is_refused_with_its_field(
    field: str,
    make: Callable[[Any], Guarantee],
    bad: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(InvalidGuarantee) as caught:
        make(bad)
    assert field in str(caught.value)


@pytest.mark.parametrize("delta", [1, 1.0, "1", 2, "1e300"])
@pytest.mark.parametrize("make", [ApproxDP, ProbDP, ZCDP, lambda x, d: RDP((2,), (x,), d)])
def test_delta_is_a_probability_below_one(make: Callable[[Any, Any], Guarantee], delta: object) -> None:
    with pytest.raises(InvalidGuarantee, match="delta must be below 1"):
        make(0.1, delta)


@pytest.mark.parametrize(
    ("orders", "values"),
    [((), ()), ((2, 3), (1,)), ((2,), (1, 2)), ((1,), (1,)), ((0.5,), (1,)), ((3, 2), (1, 2)), ((2, 2), (1, 2))],
)
def test_a_curve_has_ascending_orders_above_one_and_as_many_values(orders: Any, values: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidGuarantee, match="RDP"):
        RDP(orders, values)


@pytest.mark.parametrize(
    ("name", "steps", "curve"),
    [
        *[(name, 1, None) for name in ("", 5, "n" * 201)],
        *[("m", steps, None) for steps in (0, -1, True, 1.0, "1")],
        *[("m", 1, curve) for curve in (PureDP(1), "curve")],
    ],
)
def test_a_mechanism_is_a_name_and_whole_steps(name: Any, steps: Any, curve: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidGuarantee, match="Mechanism"):
        Mechanism(name, steps, curve)


@pytest.mark.parametrize("dimension", [0, 1.5, "2/3", "0"])
def test_a_query_has_whole_coordinates(dimension: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidGuarantee, match="dimension must be an integer from 1"):
        DiscreteGaussian(1, 1, dimension)
    assert DiscreteGaussian(1, 1, "3") == DiscreteGaussian(1, 1, 3.0)  # type: ignore[arg-type]  # as options are typed


def test_discrete_noise_is_above_nothing() -> None:
    for zero in (0, 0.0, "0"):
        with pytest.raises(InvalidGuarantee, match="without noise there is no privacy"):
            DiscreteGaussian(zero)
        with pytest.raises(InvalidGuarantee, match="grid must be above 0"):
            DiscreteGaussian(1, 1, 1, zero)
    with pytest.raises(InvalidGuarantee, match="at least 1e-150 of the sensitivity"):
        DiscreteGaussian("1e-60", "1e91")
    assert DiscreteGaussian("1e-60", "1e90").mu == 10**150


def test_discrete_noise_implies_the_zcdp_of_its_theorem() -> None:
    """Canonne, Kamath, Steinke 2020: sensitivity^2 over twice sigma^2, exactly; grid and dimension do not matter."""
    assert DiscreteGaussian(10, 2).implies() == (ZCDP("0.02"),)
    assert DiscreteGaussian(3, "1/7", 5, "0.01").implies() == (ZCDP(Fraction(1, 882)),)
    # Numbers whose squares are too long to be kept: rounded up, by less than the last digit of a float.
    long = DiscreteGaussian("1." + "3" * 190, "0." + "7" * 190)
    (implied,) = long.implies()
    assert isinstance(implied, ZCDP)
    assert isinstance(implied.rho, float)
    assert long.mu**2 / 2 <= exact_of(implied.rho) <= long.mu**2 / 2 * (1 + Fraction(1, 2**52))


def test_another_size_of_discrete_noise_is_another_sigma_rounded_up() -> None:
    assert DiscreteGaussian.with_size("0.1") == DiscreteGaussian(10)
    assert DiscreteGaussian(1, 3, 4, "0.5").resize("0.3") == DiscreteGaussian(10, 3, 4, "0.5")
    third = DiscreteGaussian(1, 2).resize(3)
    assert third == DiscreteGaussian("0.666666666667", 2)
    assert third.mu <= 3
    assert DiscreteGaussian(5, 0).resize(3) == DiscreteGaussian(5, 0)  # reveals nothing, whatever its noise
    with pytest.raises(InvalidGuarantee, match="mu must be above 0"):
        DiscreteGaussian(1).resize(0)


@pytest.mark.parametrize("guarantee", SAMPLES, ids=lambda g: repr(g)[:40])
def test_guarantees_cannot_be_changed(guarantee: Guarantee) -> None:
    field = guarantee.__match_args__[0]
    with pytest.raises(AttributeError):
        setattr(guarantee, field, 0)


NO_NUMBERS: list[Any] = [None, True, "x", "-1", float("nan"), {}, [[]], [None], ["x"]]
MISCOUNTS: list[Any] = [None, True, "1", 0, 1.5, -1]
MISNOMERS: list[Any] = [None, True, "", 5, []]
NO_CURVES: list[Any] = ["x", 5, {}, [], PureDP(1).to_dict()]


def damaged(form: dict[str, Any]) -> list[Any]:
    """Ways in which a stored guarantee gets damaged."""
    forms: list[Any] = [{}, None, [], "text", 5, {**form, "form": 2}, {**form, "form": None}]
    forms += [{**form, "kind": kind} for kind in ("nothing", None, 5)]
    forms += [{**form, "more": 1}]
    forms += [{k: v for k, v in form.items() if k != name} for name in form]
    for name in form:
        if name not in ("form", "kind", "name", "curve", "steps"):
            forms += [{**form, name: value} for value in NO_NUMBERS]
    if form["kind"] == "mechanism":
        forms += [{**form, "steps": steps} for steps in MISCOUNTS]
        forms += [{**form, "name": name} for name in MISNOMERS]
        forms += [{**form, "curve": curve} for curve in NO_CURVES]
    return forms


@pytest.mark.parametrize("guarantee", SAMPLES, ids=lambda g: repr(g)[:40])
def test_damaged_forms_are_refused(guarantee: Guarantee) -> None:
    for form in damaged(guarantee.to_dict()):
        with pytest.raises(InvalidGuarantee):
            guarantee_from_dict(form)


def test_a_kind_that_is_a_list_is_refused() -> None:
    with pytest.raises(InvalidGuarantee):
        guarantee_from_dict({"form": 1, "kind": [], "epsilon": "1"})


def response_divergence(epsilon: mpmath.mpf, order: mpmath.mpf) -> mpmath.mpf:
    """Randomized response, straight from the definition of the Rényi divergence."""
    odds = mpmath.exp(epsilon)
    p, q = odds / (1 + odds), 1 / (1 + odds)
    return mpmath.log(p**order * q ** (1 - order) + q**order * p ** (1 - order)) / (order - 1)


def gaussian_divergence(mu: mpmath.mpf, order: mpmath.mpf) -> mpmath.mpf:
    return order * mu**2 / 2


Divergence = Callable[[mpmath.mpf, mpmath.mpf], mpmath.mpf]
CURVES = [(response_divergence, "0.3"), (response_divergence, "3"), (gaussian_divergence, "0.7")]
ORDERS = (Fraction(3, 2), Fraction(2), Fraction(7, 2), Fraction(8), Fraction(32))


def big(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def sampled(true: Divergence, size: str) -> RDP:
    """The true curve at a few orders, rounded up at the thirtieth digit."""
    values = [true(mpmath.mpf(size), big(order)) * (1 + mpmath.mpf("1e-30")) for order in ORDERS]
    return RDP(ORDERS, tuple(Fraction(mpmath.nstr(value, 40)) for value in values))


def too_low(at: Callable[[RDP, Fraction], Fraction | None], true: Divergence, size: str, order: Fraction) -> bool:
    """The checker: whether a way to read a curve between its orders gives less than the truth."""
    value = at(sampled(true, size), order)
    return value is not None and big(value) < true(mpmath.mpf(size), big(order))


@pytest.mark.parametrize(("true", "size"), CURVES)
@given(order=st.fractions(Fraction(1001, 1000), 40))
def test_a_curve_is_never_read_below_the_truth(true: Divergence, size: str, order: Fraction) -> None:
    assert not too_low(RDP.at, true, size, order)
    value = sampled(true, size).at(order)
    assert (value is None) == (order > 32)
    if value is not None and order >= ORDERS[0]:
        # A chord between orders is not far above either.
        assert big(value) <= true(mpmath.mpf(size), mpmath.mpf(32)) * (1 + mpmath.mpf("1e-20"))


@pytest.mark.parametrize(("true", "size"), CURVES)
def test_at_its_own_orders_a_curve_is_as_given(true: Divergence, size: str) -> None:
    curve = sampled(true, size)
    for order, value in zip(ORDERS, curve.values, strict=True):
        assert curve.at(order) == value


@pytest.mark.parametrize(("true", "size"), CURVES)
def test_reading_the_nearest_lower_order_or_the_largest_for_all_is_caught(true: Divergence, size: str) -> None:
    """Negative controls: the value of a smaller order is too low, and so is the last one beyond its order."""

    def nearest_below(curve: RDP, order: Fraction) -> Fraction:
        return max(v for o, v in zip(ORDERS, map(exact_of, curve.values), strict=True) if o <= order)

    assert too_low(nearest_below, true, size, Fraction(3))
    assert too_low(nearest_below, true, size, Fraction(33))


def test_curves_of_different_orders_are_not_composed_at_the_larger_one() -> None:
    """A known bug elsewhere: the value at order 2 was added to one at order 32 as if it held there."""
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="renyi"))
    small = compiled.price(RDP((2,), ("0.01",)))
    large = compiled.price(RDP((1000,), ("0.01",)))
    for meter, a, b in zip(compiled.meters, small.amounts, large.amounts, strict=True):
        if isinstance(meter, odo.filters.RenyiMeter):
            assert (a is None) == (meter.order > 2)
            assert (b is None) == (meter.order > 1000)
            # Only (a-1) D_a is known at 1000: at a lower order the chord from (1, 0) has the slope of the last value.
            assert b is None or b == 10**13


@given(st.floats(1e-9, 1e3), st.floats(0, 0.9e-9))
def test_a_cost_in_brief_is_rounded_up_but_for_the_last_digits_of_a_library(size: float, more: float) -> None:
    shown = Fraction(odo.PureDP(size).brief().removeprefix("PureDP(").removesuffix(")"))
    assert Fraction(repr(size)) * (1 - Fraction(1, 10**9)) <= shown <= Fraction(repr(size)) * Fraction(1001, 1000)
    short = float(f"{size:.4g}")
    assert odo.PureDP(short * (1 + more)).brief() == odo.PureDP(short).brief()


# From (epsilon, delta)-DP to probabilistic DP at t (erratum E3).

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())


def beyond(epsilon: Fraction, delta: Fraction, t: Fraction) -> mpmath.mpf:
    """The most that (epsilon, delta)-DP lets the absolute loss exceed t, in 60 digits."""
    e, d, level = (mpmath.mpf(x.numerator) / x.denominator for x in (epsilon, delta, t))
    return d * (1 + mpmath.exp(-level)) / -mpmath.expm1(e - level)


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["function"] == "dp_to_pdp_delta_twosided"], ids=str)
def test_the_probabilistic_dp_of_a_guarantee_is_the_reference_value(vector: dict[str, Any]) -> None:
    given_, true = vector["inputs"], Fraction(vector["value"])
    found = ApproxDP(given_["eps"], given_["delta"]).as_probdp(given_["t"])
    assert found.epsilon == given_["t"]
    assert true <= exact_of(found.delta) <= true * (1 + Fraction(1, 10**12))


@given(
    st.fractions(0, 20, max_denominator=10**9),
    st.fractions(Fraction(1, 10**15), Fraction(1, 100), max_denominator=10**18),
    st.fractions(Fraction(1, 10**3), 10, max_denominator=10**9),
)
def test_the_probability_beyond_t_is_rounded_up_and_hardly(epsilon: Fraction, delta: Fraction, gap: Fraction) -> None:
    true = beyond(epsilon, delta, epsilon + gap)
    if true < 1:
        found = exact_of(ApproxDP(epsilon, delta).as_probdp(epsilon + gap).delta)
        near = mpmath.mpf(found.numerator) / found.denominator
        assert true <= near <= true * (1 + mpmath.mpf("1e-11"))


@pytest.mark.parametrize(("epsilon", "t"), [("0.001", "0.002"), ("0.1", "0.2"), ("1", "2"), ("3", "6")])
def test_what_follows_holds_for_the_worst_pair_and_neither_a_part_less_nor_the_printed_lemma_does(
    epsilon: str, t: str
) -> None:
    delta = Fraction(1, 10**9)
    cost = ApproxDP(epsilon, delta).as_probdp(t)
    worst = tight_dp_to_probdp(float(epsilon), delta, float(t) * (1 + 1e-12))  # its large losses are just above t
    assert worst.is_dp(float(epsilon), delta)
    assert worst.is_probdp(float(t), exact_of(cost.delta))
    assert not worst.is_probdp(float(t), exact_of(cost.delta) * (1 - Fraction(1, 10**6)))
    printed = 2e-9 / (float(epsilon) * math.exp(float(epsilon)))  # at t = 2 epsilon
    assert not worst.is_probdp(float(t), printed)


def test_without_a_delta_the_loss_never_exceeds_epsilon() -> None:
    assert ApproxDP("1/3", 0).as_probdp("1/3") == ProbDP("1/3", 0)
    assert ApproxDP("1/3", 0).as_probdp(2) == ProbDP(2, 0)


@pytest.mark.parametrize(
    ("cost", "t", "said"),
    [
        (ApproxDP(0.1, 1e-9), 0.1, "above 0.1001: .* (got 0.1)"),
        (ApproxDP(0.1, 1e-9), "0.05", "above 0.1001: .* (got '0.05')"),
        (ApproxDP(1, "0.9"), 3.58, "above 3.589: .* (got 3.58)"),
        (ApproxDP(1, 0), 0.5, "at least 1: .* (got 0.5)"),
        (ApproxDP(1, 1e-9), 2e6, "at most 1,000,000, .* (got 2000000.0)"),
        (ApproxDP(1, 1e-9), -1, "t must not be negative"),
        (ApproxDP(1, 1e-9), True, "t must be a finite number"),
    ],
    ids=str,
)
def test_where_nothing_follows_the_least_t_is_named(cost: ApproxDP, t: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgument, match=said.replace("(", r"\(").replace(")", r"\)")):
        cost.as_probdp(t)


def test_the_least_t_that_is_named_is_the_least() -> None:
    assert exact_of(ApproxDP(1, "0.9").as_probdp(3.589).delta) < 1
    assert beyond(Fraction(1), Fraction(9, 10), Fraction("3.588")) > 1
