"""What people are asked for: sizes are rounded up a little, each by itself, and priced as everywhere else."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from population_helpers import RULES, compiled_for

from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Prices, ProbDP, PureDP
from odograph.core.guarantees import DiscreteGaussian, exact_of
from odograph.errors import InvalidArgument, InvalidGuarantee, UnprovenComposition
from odograph.population.gate import SPENT, gate_of
from odograph.population.prices import price_table

KINDS: tuple[type[Guarantee], ...] = (PureDP, ZCDP, GDP)
MARK = 7731.0177311  # a value of somebody's, to be found in a message


def sizes() -> st.SearchStrategy[float]:
    return st.one_of(
        st.floats(0, 1e300),
        st.floats(0, 1),
        st.sampled_from([0.0, 5e-324, 1.5e-323, 2.2250738585072014e-308, 1e-300, 0.1, 0.5, 1.0, 2.0**-40, 2047.5]),
        st.integers(1, 2**20).map(lambda whole: whole / 2**18),
    )


def size_of(guarantee: Guarantee) -> float:
    return float(getattr(guarantee, guarantee.__match_args__[0]))


def asked_of(prices: Prices) -> list[float]:
    """The size that each person is asked for."""
    return [size_of(prices.guarantees[place]) for place in prices.which.tolist()]


def check_rounding(prices: Prices, values: list[float], bits: int) -> None:
    """Nobody is asked for less than their own size, nor for much more."""
    for size, value in zip(asked_of(prices), values, strict=True):
        assert Fraction(size) >= Fraction(value)
        assert Fraction(size) <= Fraction(value) * (1 + Fraction(1, 2 ** (bits - 1)))
        assert exact_of(size) >= exact_of(value)  # as a float is read


@given(st.sampled_from(KINDS), st.lists(sizes()), st.sampled_from([1, 4, 12, 20]))
def test_a_size_is_never_rounded_down_and_hardly_up(kind: type[Guarantee], values: list[float], bits: int) -> None:
    prices = Prices.of(kind, values, bits=bits)
    assert all(isinstance(guarantee, kind) for guarantee in prices.guarantees)
    check_rounding(prices, values, bits)


@given(st.lists(sizes()))
def test_without_a_word_sizes_have_twelve_digits(values: list[float]) -> None:
    check_rounding(Prices.of(GDP, values), values, 12)
    assert asked_of(Prices.of(GDP, values)) == asked_of(Prices.of(GDP, values, bits=12))


def test_rounding_to_the_nearest_is_caught() -> None:
    """Negative control."""
    values = [float(value) for value in np.random.default_rng(1).random(50)]
    mantissas, exponents = np.frexp(values)
    nearest = np.ldexp(np.round(np.ldexp(mantissas, 12)), exponents - 12)
    prices = Prices([PureDP(float(size)) for size in nearest], np.arange(50))
    with pytest.raises(AssertionError):
        check_rounding(prices, values, 12)


@given(st.lists(sizes(), min_size=1), st.lists(sizes()), st.data())
def test_what_somebody_is_asked_for_does_not_depend_on_the_others(
    values: list[float], others: list[float], data: st.DataObject
) -> None:
    together = asked_of(Prices.of(PureDP, values + others))
    assert together[: len(values)] == asked_of(Prices.of(PureDP, values))
    one = data.draw(st.integers(0, len(values) - 1))
    assert together[one : one + 1] == asked_of(Prices.of(PureDP, [values[one]]))


def test_sizes_far_apart_and_many_of_them_are_rounded_by_the_same_rule() -> None:
    """However far apart, and whichever way is taken to find the different ones."""
    rng = np.random.default_rng(3)
    near, far = rng.random(5000), np.ldexp(rng.random(5000), rng.integers(-1000, 900, 5000))
    for bits in (12, 20):
        alone = asked_of(Prices.of(GDP, near, bits=bits))
        assert asked_of(Prices.of(GDP, np.concatenate([near, far]), bits=bits))[:5000] == alone
        check_rounding(Prices.of(GDP, far, bits=bits), far.tolist(), bits)


def test_few_different_sizes_are_few_guarantees() -> None:
    prices = Prices.of(PureDP, np.linspace(1, 2, 100_001))
    assert len(prices.guarantees) <= 2**11 + 2
    assert asked_of(Prices.of(PureDP, [0.25, 0.0, 0.25])) == [0.25, 0.0, 0.25]
    assert len(Prices.of(PureDP, [0.25, 0.0, 0.25]).guarantees) == 2


@pytest.mark.parametrize(
    "values",
    [
        np.array([0.1, 0.3], dtype=np.float32),
        np.array([0.1, 0.3], dtype=np.float16),
        np.array([1, 3, 2**53 + 1]),
        [2**53 + 1],
        [Decimal("0.5000000000000000000000001")],
        [Fraction(1, 3), Fraction(10**40 + 1, 2 * 10**40)],
        np.array([np.nextafter(np.longdouble("0.5"), np.longdouble(1))]),
    ],
)
def test_numbers_of_any_type_are_rounded_up_or_refused(values: Any) -> None:  # noqa: ANN401  any numbers
    try:
        found = asked_of(Prices.of(PureDP, values))
    except InvalidGuarantee:
        return
    exact = [Fraction(value) if isinstance(value, Decimal | Fraction) else _fraction(value) for value in values]
    for size, value in zip(found, exact, strict=True):
        assert Fraction(size) >= value


def _fraction(value: Any) -> Fraction:  # noqa: ANN401  a number of NumPy's or Python's
    return Fraction(*value.as_integer_ratio())


@pytest.mark.parametrize("rule", RULES)
def test_amounts_are_those_of_the_scalar_price(rule: str) -> None:
    compiled = compiled_for(rule)
    gate = gate_of(compiled)
    kinds: tuple[type[Guarantee], ...] = (PureDP,) if rule == "basic" else (PureDP, GDP)
    for kind in kinds:
        found = price_table(compiled, gate, Prices.of(kind, [0.0, 0.013, 0.1, 0.77, 31.0]))
        guarantees = Prices.of(kind, [0.0, 0.013, 0.1, 0.77, 31.0]).guarantees
        for row, guarantee in zip(found.amounts.tolist(), guarantees, strict=True):
            scalar = compiled.price(guarantee)
            expected = [scalar.amounts[place] for place in gate.meters]
            assert row == [SPENT if amount is None else min(amount, SPENT) for amount in expected]
        assert found.dearest == tuple(found.amounts.max(axis=0).tolist())
        assert not found.same
    one = price_table(compiled, gate, PureDP("0.1"))
    assert one.same
    assert one.amounts.tolist() == [[*gate.amounts(compiled.price(PureDP("0.1")))]]


def test_what_no_rule_takes_is_refused_by_name() -> None:
    compiled = compiled_for("basic")
    with pytest.raises(UnprovenComposition):
        price_table(compiled, gate_of(compiled), Prices([PureDP(1), GDP(1)], [0, 0]))


WRONG: list[tuple[Any, str]] = [
    (lambda: Prices.of(PureDP, [0.1, -MARK]), "values"),
    (lambda: Prices.of(PureDP, [MARK, float("nan")]), "values"),
    (lambda: Prices.of(PureDP, [MARK, float("inf")]), "values"),
    (lambda: Prices.of(PureDP, [[MARK]]), "values"),
    (lambda: Prices.of(PureDP, MARK), "values"),
    (lambda: Prices.of(PureDP, [True, False]), "values"),
    (lambda: Prices.of(PureDP, [f"of {MARK}"]), "values"),
    (lambda: Prices.of(PureDP, [None, MARK]), "values"),  # type: ignore[arg-type]
    (lambda: Prices.of(PureDP, [[MARK], [MARK, MARK]]), "values"),
    (lambda: Prices.of(PureDP, [MARK + 1j]), "values"),
    (lambda: Prices.of(PureDP, [1.7976931348623157e308]), "values"),
    (lambda: Prices.of(ApproxDP, [MARK]), "kind"),
    (lambda: Prices.of(ProbDP, [MARK]), "kind"),
    (lambda: Prices.of(RDP, [MARK]), "kind"),
    (lambda: Prices.of(DiscreteGaussian, [MARK]), "kind"),  # a sigma that is rounded up would cost less
    (lambda: Prices.of(float, [MARK]), "kind"),  # type: ignore[arg-type]
    (lambda: Prices.of(PureDP(1), [MARK]), "kind"),  # type: ignore[arg-type]
    (lambda: Prices.of(PureDP, [MARK], bits=0), "bits"),
    (lambda: Prices.of(PureDP, [MARK], bits=21), "bits"),
    (lambda: Prices.of(PureDP, [MARK], bits=2.5), "bits"),  # type: ignore[arg-type]
    (lambda: Prices.of(PureDP, [0.1, 0.2], ids=[7731]), "ids"),
    (lambda: Prices([], [7731]), "guarantees"),
    (lambda: Prices([0.1], [7731]), "guarantees"),  # type: ignore[list-item]
    (lambda: Prices(PureDP(1), [7731]), "guarantees"),  # type: ignore[arg-type]
    (lambda: Prices([PureDP(1)], [7731]), "which"),
    (lambda: Prices([PureDP(1)], [-7731]), "which"),
    (lambda: Prices([PureDP(1)], [0.5]), "which"),
    (lambda: Prices([PureDP(1)], [True]), "which"),
    (lambda: Prices([PureDP(1)], ["7731"]), "which"),
    (lambda: Prices([PureDP(1)], [[0], [7731]]), "which"),
    (lambda: Prices([PureDP(1)], [[0], [0, 7731]]), "which"),
    (lambda: Prices([PureDP(1)]), "which"),
    (lambda: Prices([PureDP(1)], [0], table="7731"), "table"),
    (lambda: Prices([PureDP(1)], ids=[7731], table="7731"), "table"),
    (lambda: Prices([PureDP(1)], [0], ids=[7731, 7732]), "ids"),
    (lambda: Prices([PureDP(1)], [0], ids=7731), "ids"),
    (lambda: Prices([PureDP(1)], [0, 0], ids=[[7731], [7731, 1]]), "ids"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_refused_by_its_name_and_without_anybodys_value(number: int) -> None:
    make, field = WRONG[number]
    with pytest.raises(InvalidArgument, match=field) as caught:
        make()
    if field in {"bits", "ids", "table", "which"}:
        assert not isinstance(caught.value, InvalidGuarantee)
    assert caught.value.charged is False
    assert "7731" not in str(caught.value)


def test_prices_say_nothing_about_anybody() -> None:
    text = repr(Prices.of(PureDP, [0.25, 0.5], ids=[7731, 77310]))
    assert "7731" not in text
    assert "0.25" not in text
    assert "2" not in text  # not even how many they are, if everybody's size is another
