"""Prices are the exact ceilings, though most are found without exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from odograph import GDP, Policy, PureDP, compile_policy, price
from odograph.core.conversions import pure_to_intrinsic
from odograph.core.units import SCALE

COMPILED = compile_policy(Policy(1, 1e-6))
EXACT = next(meter for meter in COMPILED.meters if meter.clock == "exact")
UNIT = EXACT.unit or Fraction(1)

SIZES = st.one_of(
    st.floats(1e-9, 100),
    st.integers(1, 10**6).map(lambda n: n / 1000),
    st.integers(1, 20_000).map(lambda units: math.sqrt(units * UNIT)),  # next to whole units
)


def amounts(guarantee: PureDP | GDP) -> dict[str, int | None]:
    return dict(zip((meter.name for meter in COMPILED.meters), price(COMPILED, guarantee).amounts, strict=True))


@given(SIZES)
@example(0.002)  # its square is one unit, nearly
def test_a_gaussian_costs_its_square_rounded_up(mu: float) -> None:
    square = Fraction(repr(mu)) ** 2
    found = amounts(GDP(mu))
    assert found["intrinsic"] == math.ceil(square * SCALE)
    assert found["exact"] == max(4, math.ceil(square / UNIT))


@given(SIZES)
def test_a_pure_step_costs_its_epsilon_and_its_intrinsic_time_rounded_up(epsilon: float) -> None:
    time = Fraction(pure_to_intrinsic(epsilon))
    found = amounts(PureDP(epsilon))
    assert found["epsilon"] == math.ceil(Fraction(repr(epsilon)) * SCALE)
    assert found["intrinsic"] == max(1, math.ceil(time * SCALE))
    assert found["exact"] == max(1, math.ceil(time / UNIT))


def test_a_price_rounded_in_floats_would_be_caught() -> None:
    wrong = [mu for mu in (math.sqrt(n * UNIT) for n in range(1, 2000)) if math.ceil(mu * mu / UNIT) > 4]
    naive = [math.ceil(mu * mu * float(1 / UNIT)) for mu in wrong]
    assert naive != [math.ceil(Fraction(repr(mu)) ** 2 / UNIT) for mu in wrong]
