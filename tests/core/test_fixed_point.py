from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odograph import PureDP
from odograph.core.fixed_point import (
    CEILING,
    DELTA_SCALE,
    MOST_PRICED,
    PADDED,
    SCALE,
    ULP,
    brief_above,
    brief_below,
    ceil_computed,
    ceil_sure,
    ceil_written,
    decimal_above,
    down,
    exact_of,
    exactly,
    float_above,
    float_below,
    floor_units,
    kept_above,
    last_holding,
    level,
    padded_scale,
    read,
    text_of,
    tidy,
    units_computed,
    units_squared,
    units_written,
    up,
    written_above,
    written_below,
)
from odograph.errors import InvalidGuarantee, InvalidPolicy

TENTH = Fraction(1, 10)
# One tenth in single precision is this binary number; its float64 prints as 0.10000000149011612.
WIDENED = Fraction("0.10000000149011612")


@pytest.mark.parametrize(
    ("value", "exact"),
    [
        (0, Fraction(0)),
        (-0.0, Fraction(0)),
        (0.1, TENTH),
        (1e-6, Fraction(1, 10**6)),
        (5e-324, Fraction(5, 10**324)),
        (1.7976931348623157e308, Fraction(17976931348623157 * 10**292)),
        (np.float64(0.1), TENTH),
        (np.float32(0.1), WIDENED),
        (np.float16(0.1), Fraction("0.0999755859375")),
        (np.longdouble("0.5"), Fraction(1, 2)),
        (np.int64(3), Fraction(3)),
        (np.uint8(200), Fraction(200)),
        (7, Fraction(7)),
        (2**70 + 1, Fraction(2**70 + 1)),
        (Decimal("0.1"), TENTH),
        (Decimal("1E-30"), Fraction(1, 10**30)),
        (Decimal("1E-300"), Fraction(1, 10**300)),
        (Fraction(1, 3), Fraction(1, 3)),
        ("0.1", TENTH),
        ("1e-6", Fraction(1, 10**6)),
        ("1E+3", Fraction(1000)),
        (" .5 ", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("+2", Fraction(2)),
        ("1/3", Fraction(1, 3)),
    ],
)
def test_a_number_is_read_exactly(value: object, exact: Fraction) -> None:
    assert read(value, "epsilon") == exact


NO_NUMBERS = [
    True,
    False,
    np.bool_(1),
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    np.float64("inf"),
    Decimal("NaN"),
    Decimal("Infinity"),
    Decimal("1e100000"),
    Decimal("1e-100000"),
    "abc",
    "",
    " ",
    "1_000",
    "nan",
    "inf",
    "0x10",
    "1/0",
    "1/00",
    "1 / 3",
    "1e99999",
    "1e-99999",
    "9" * 401,
    "\u0661",  # a digit of another script
    None,
    1 + 0j,
    np.complex128(1),
    b"1",
    [0.1],
    (0.1,),
    {"a": 1},
    np.array(0.1),
    np.array([0.1, 0.2]),
    object(),
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda value: repr(value)[:20])
def test_what_is_no_number_is_refused_with_the_field_and_the_value(value: object) -> None:
    with pytest.raises(InvalidGuarantee) as caught:
        read(value, "PureDP.epsilon")
    assert "PureDP.epsilon" in str(caught.value)
    assert repr(value)[:70] in str(caught.value)


@pytest.mark.parametrize("value", [-1, -1e-300, -5e-324, "-0.1", Decimal("-1e-9"), Fraction(-1, 3), np.float32(-1)])
def test_negative_numbers_are_refused_with_the_field_and_the_value(value: object) -> None:
    with pytest.raises(InvalidPolicy, match=r"Policy\.delta must not be negative") as caught:
        read(value, "Policy.delta", InvalidPolicy)
    assert repr(value) in str(caught.value)


def test_a_unit_is_what_stored_accounts_were_counted_in() -> None:
    assert (SCALE, DELTA_SCALE) == (1_000_000_000_000_000, 1_000_000_000_000_000_000)
    assert CEILING == 2_305_843_009_213_693_952  # two of these fit in 64 bits with a sign


@pytest.mark.parametrize(
    ("longest", "longer"),
    [
        ("0" * 400, "0" * 401),
        (2**1298, 2**1299),
        (Fraction(1, 2**1298), Fraction(1, 2**1299)),
        (Fraction(2**650, 2**649 - 1), Fraction(2**650, 2**650 - 1)),
    ],
    ids=["digits", "large", "small", "both"],
)
def test_a_number_may_be_as_long_as_that_and_no_longer(
    longest: str | int | Fraction, longer: str | int | Fraction
) -> None:
    assert read(longest, "epsilon") == Fraction(longest)
    with pytest.raises(InvalidGuarantee):
        read(longer, "epsilon")


@pytest.mark.parametrize("sign", ["", "-"])
def test_a_decimal_with_thousands_of_zeros_is_refused_before_it_is_written_out(sign: str) -> None:
    with pytest.raises(InvalidGuarantee, match="that can be kept exactly"):
        read(Decimal(f"1e{sign}9999"), "epsilon")
    with pytest.raises(InvalidGuarantee, match="must be a finite number"):
        read(Decimal(f"1e{sign}10000"), "epsilon")


def test_a_message_shows_eighty_characters_of_a_value_and_no_more() -> None:
    for length, shown in ((78, f"'{'x' * 78}'"), (79, f"'{'x' * 76}...")):
        with pytest.raises(InvalidGuarantee) as caught:
            read("x" * length, "epsilon")
        assert f"(got {shown})" in str(caught.value)


def test_a_checker_that_trusts_isfinite_would_let_booleans_and_text_pass() -> None:
    """Negative control: the usual check takes these for numbers."""

    def usual(value: object) -> bool:
        return math.isfinite(float(value)) and float(value) >= 0  # type: ignore[arg-type]

    taken = [value for value in (True, "1_000", " 1 ", np.array(0.1), "\u0661") if usual(value)]
    assert len(taken) == 5


@given(st.fractions(min_value=0, max_value=10**6), st.sampled_from([1, 10**3, SCALE, 10**18]))
def test_a_limit_is_rounded_down_exactly(value: Fraction, scale: int) -> None:
    assert floor_units(value, scale) == math.floor(value * scale)


def under_rounded(price: Callable[[float], int], draws: int = 7000) -> int:
    """How many of `draws` random epsilons are priced below their exact cost."""
    rng = random.Random(7)  # noqa: S311  draws, not secrets
    epsilons = [float(f"{rng.uniform(0, 8):.17g}") for _ in range(draws)]
    return sum(price(epsilon) < Fraction(repr(epsilon)) * SCALE for epsilon in epsilons)


def test_no_cost_is_rounded_down() -> None:
    assert under_rounded(lambda epsilon: ceil_written(epsilon, SCALE)) == 0


def test_rounding_in_floats_is_caught() -> None:
    """Negative control: `ceil(epsilon * 1e15)` in floats loses part of a unit on some percent of the draws."""
    assert under_rounded(lambda epsilon: math.ceil(epsilon * 1e15)) > 100


@given(st.fractions(min_value=0))
def test_what_is_stored_is_read_back(value: Fraction) -> None:
    stored = tidy(value)
    assert read(stored, "x") == value
    assert read(text_of(stored), "x") == value


def test_a_float_is_stored_only_where_its_decimal_is_the_number() -> None:
    assert isinstance(tidy(TENTH), float)
    assert isinstance(tidy(Fraction(1, 3)), Fraction)
    assert isinstance(tidy(Fraction(10) ** 400), Fraction)
    assert isinstance(tidy(Fraction(2) ** -53 + 1), Fraction)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_padding_goes_outward_and_not_far(value: float) -> None:
    exact = Fraction(value)
    assert exactly(down(value)) < exact * (1 - 16 * Fraction(1, 2**53))
    assert exactly(up(value)) > exact * (1 + 16 * Fraction(1, 2**53))
    assert exactly(up(value)) < exact * (1 + Fraction(1, 2**47))
    assert exactly(down(value)) > exact * (1 - Fraction(1, 2**47))
    assert up(0.0) == down(0.0) == 0.0


@pytest.mark.parametrize("text", ["1e9999", "1e-9999", "1e-450", "1e401"])
def test_any_number_that_is_read_can_be_written_and_read_back(text: str) -> None:
    try:
        guarantee = PureDP(text)
    except InvalidGuarantee:
        return  # refused at the door: the other good answer
    assert read(text_of(guarantee.epsilon), "epsilon") == Fraction(text)  # type: ignore[arg-type]
    assert repr(guarantee)


@pytest.mark.parametrize("value", [-(10**5000), Fraction(-1, 10**5000)], ids=["large", "small"])
def test_a_number_too_long_to_print_is_refused_like_any_other(value: object) -> None:
    with pytest.raises(InvalidGuarantee):
        read(value, "epsilon")


# Floats as people write them, as programs compute them, next to whole numbers of units, and very small ones.
SIZES = st.one_of(
    st.floats(0, 2, allow_subnormal=True),
    st.integers(0, 10**16).map(lambda n: n / 1e15),
    st.tuples(st.integers(1, 999), st.integers(1, 20)).map(lambda pair: float(f"{pair[0]}e-{pair[1]}")),
    st.floats(-40, 3).map(lambda power: 10.0**power),
    st.tuples(st.integers(1, 10**15), st.integers(-3, 3)).map(lambda p: _stepped(p[0] / 1e15, p[1])),
)


def _stepped(value: float, steps: int) -> float:
    for _ in range(abs(steps)):
        value = math.nextafter(value, math.inf if steps > 0 else 0.0)
    return value


def rounds_up_exactly(
    written: Callable[[float, int], int], computed: Callable[[float, int], int], value: float
) -> bool:
    return all(
        written(value, scale) == math.ceil(Fraction(repr(value)) * scale)
        and computed(value, scale) == math.ceil(Fraction(value) * scale)
        for scale in (SCALE, DELTA_SCALE)
    )


@given(SIZES)
def test_rounding_up_without_exact_arithmetic_gives_the_exact_ceiling(value: float) -> None:
    assert rounds_up_exactly(ceil_written, ceil_computed, value)


def test_rounding_up_in_floats_alone_is_caught() -> None:
    draws = random.Random(1)  # noqa: S311  not cryptography
    values = [draws.random() for _ in range(1000)] + [n / 1e15 for n in range(1, 1000)]

    def in_floats(value: float, scale: int) -> int:
        return math.ceil(value * scale)

    assert not all(rounds_up_exactly(in_floats, in_floats, value) for value in values)
    assert all(rounds_up_exactly(ceil_written, ceil_computed, value) for value in values)


# Floats of any size, and the nearest to whole numbers.
NEAR = st.one_of(
    st.floats(0, 1e16),
    st.tuples(st.integers(1, 10**15), st.integers(-80, 80)).map(lambda pair: _stepped(float(pair[0]), pair[1])),
    st.tuples(st.integers(1, 2**20), st.integers(-80, 80)).map(lambda pair: _stepped(float(pair[0]), pair[1])),
)


@given(NEAR, st.integers(0, 64), st.one_of(st.sampled_from([-1.0, 1.0]), st.floats(-1, 1)))
def test_a_sure_ceiling_is_that_of_every_number_that_near(near: float, ulps: int, part: float) -> None:
    sure = ceil_sure(near, ulps)
    true = Fraction(near) * (1 + Fraction(part) * ulps / 2**53)
    assert sure is None or sure == math.ceil(true)
    # And it is found wherever no whole number is nearly that near: exact arithmetic is for the few.
    away, reach = abs(Fraction(near) - round(near)), Fraction(near) * ulps / 2**53
    assert sure is not None or near >= 1e15 or away <= reach * Fraction(101, 100)


def padded_and_rounded(value: float, ulps: Sequence[float]) -> int:
    """What a number costs in units, padded before it is rounded up by exact arithmetic."""
    for one in ulps:
        value = up(value, one)
    return math.ceil(Fraction(value) * SCALE)


@given(NEAR.map(lambda units: units / SCALE), st.lists(st.integers(0, 1000), min_size=1, max_size=2))
def test_a_padded_scale_pads_as_one_padding_after_the_other(value: float, ulps: list[float]) -> None:
    sure = ceil_sure(value * padded_scale(*ulps), PADDED)
    assert sure is None or sure == padded_and_rounded(value, ulps)


def test_a_padded_scale_that_is_taken_to_be_more_precise_is_caught() -> None:
    near = [_stepped(n / SCALE / (1 + 91 * ULP), step) for n in range(10**13, 10**13 + 300) for step in range(-9, 10)]

    def wrong(error: float) -> int:
        found = [(ceil_sure(value * padded_scale(24, 64), error), value) for value in near]
        return sum(units not in (None, padded_and_rounded(value, (24, 64))) for units, value in found)

    assert wrong(PADDED) == 0
    assert wrong(1.0) > 0


def test_a_positive_source_costs_at_least_a_unit_and_nothing_costs_nothing() -> None:
    assert units_computed(0.0, Fraction(0)) == 0
    assert units_computed(0.0, Fraction(1, 2)) == 1  # a cost that underflowed
    assert units_computed(2.0, 1.0) == 2 * SCALE


def test_what_is_too_large_has_no_price() -> None:
    assert MOST_PRICED == 10**6
    assert units_written(Fraction(10**6)) == 10**6 * SCALE
    assert units_written(Fraction(10**6) + Fraction(1, 10**9)) is None
    assert units_squared(Fraction(1, 3)) == math.ceil(Fraction(SCALE, 9))


@pytest.mark.parametrize(
    "value", [Fraction(1, 2), Fraction(1, 10), Fraction(1, 3), Fraction(2, 3), Fraction(10**17 + 1)]
)
def test_a_number_becomes_the_nearest_float_on_its_side(value: Fraction) -> None:
    for below, above_it, reading in (
        (float_below, float_above, Fraction),
        (written_below, written_above, lambda one: Fraction(repr(one))),
    ):
        low, high = below(value), above_it(value)
        assert reading(low) <= value <= reading(high)
        assert high in (low, math.nextafter(low, math.inf))
        if reading(float(value)) == value:  # a float that is the number stays itself
            assert low == high == float(value)


@given(st.fractions(min_value=Fraction(1, 10**30), max_value=10**30), st.integers(1, 20))
def test_a_number_is_rounded_up_to_a_few_digits(value: Fraction, digits: int) -> None:
    found = decimal_above(value, digits)
    unit = Fraction(10) ** (len(str(int(found * 10**60))) - 60 - digits)
    assert value <= found < value + unit
    assert (found / unit).denominator == 1


def test_a_number_is_kept_exactly_as_long_as_it_can_be() -> None:
    assert kept_above(Fraction(1, 4)) == 0.25
    last = Fraction(1, 2**1298)
    assert kept_above(last) == last  # 1300 bits with its numerator
    assert exact_of(kept_above(last)) == last
    longer = Fraction(2**1300 + 1, 2**1299)
    near = kept_above(longer)
    assert isinstance(near, float)
    assert longer <= exact_of(near) <= longer * (1 + Fraction(1, 2**52))


def test_a_delta_below_one_is_a_float_below_one() -> None:
    assert level(1 - Fraction(1, 10**30)) < 1.0
    assert level(Fraction(1, 4)) == 0.25


def test_the_last_float_is_found_on_either_side_and_within_a_width() -> None:
    assert last_holding(lambda x: x <= 0.5, -1.0, 1.0) == 0.5
    assert last_holding(lambda x: x >= 0.5, 1.0, -1.0) == 0.5
    assert last_holding(lambda x: x <= 0.3, 0.0, 1.0, 0.5) == 0.0  # the ends are within the width after one step
    assert last_holding(lambda x: x <= 0.3, 0.0, 1.0, 0.4) == 0.25


SIZES = st.fractions(min_value=Fraction(1, 10**18), max_value=10**6)


def to_the_nearest(value: Fraction) -> str:
    """The broken one: half of the numbers are rounded to the wrong side."""
    return f"{float(value):.4g}"


def check_brief(value: Fraction, above: Callable[[Fraction], str], below: Callable[[Fraction], str]) -> None:
    low, high = below(value), above(value)
    assert Fraction(low) <= value < Fraction(low) * Fraction(1001, 1000)
    # The last digits of a float, a billionth of the value, are not shown.
    assert value * (1 - Fraction(1, 10**9)) <= Fraction(high) < value * Fraction(1001, 1000)
    assert all(len(Decimal(text).normalize().as_tuple().digits) <= 4 for text in (low, high))


@given(SIZES)
def test_a_number_for_people_has_four_digits_on_the_safe_side(value: Fraction) -> None:
    check_brief(value, brief_above, brief_below)


@pytest.mark.parametrize(("above", "below"), [(brief_above, to_the_nearest), (to_the_nearest, brief_below)])
def test_rounding_to_the_nearest_is_caught(
    above: Callable[[Fraction], str], below: Callable[[Fraction], str]
) -> None:
    with pytest.raises(AssertionError):
        check_brief(Fraction("0.123449" if above is to_the_nearest else "0.123451"), above, below)


def test_what_a_float_adds_in_its_last_digits_is_not_shown() -> None:
    assert [brief_above(one) for one in (0.1 + 0.2, 0.1000000000000005, 0.00080000000000000004)] == [
        "0.3",
        "0.1",
        "0.0008",
    ]
    assert (brief_above(0), brief_below(0), brief_below(Fraction("0.750000000001"))) == ("0", "0", "0.75")
    assert (brief_above(Fraction(10) ** 320), brief_below(Fraction(10) ** 309 - 1)) == ("1.000e+320", "9.999e+308")


def test_a_billionth_is_not_shown_and_more_is() -> None:
    assert brief_above(Fraction("0.10000000009")) == "0.1"
    assert brief_above(Fraction("0.10000000011")) == "0.1001"
