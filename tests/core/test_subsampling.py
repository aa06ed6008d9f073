"""Rényi curves of Poisson-subsampled Gaussians: against quadrature with 30 digits, and dp-accounting's counts."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product

import mpmath
import pytest

import odograph as odo
from odograph.core.conversions import largest_rdp
from odograph.core.mechanisms import ORDERS, subsampled_gaussian_divergence

FULL = os.environ.get("ODOGRAPH_FULL") == "1"

TARGETS = [(1, 1e-6), (4, 1e-5)]
SETTINGS = [*product((0.001, 0.005, 0.02, 0.1), (0.5, 0.7, 1.0, 2.0, 5.0), TARGETS)]


def truth(order: float, rate: float, noise: float) -> mpmath.mpf:
    """The divergence by quadrature of the definition, both peaks and the bend between them resolved."""
    with mpmath.workdps(30):
        a, q, s = mpmath.mpf(order), mpmath.mpf(rate), mpmath.mpf(noise)

        def integrand(z: mpmath.mpf) -> mpmath.mpf:
            ratio = 1 - q + q * mpmath.exp((2 * z - 1) / (2 * s * s))
            return mpmath.npdf(z, 0, s) * (ratio**a - 1 - a * (ratio - 1))

        bend = s * s * mpmath.log(1 / q - 1) + 0.5
        ends = -20 * s, a + 20 * s
        points = {*ends, -5 * s, mpmath.mpf(0), a, a / 2, a + 5 * s, bend}
        moment = mpmath.quad(integrand, sorted(p for p in points if ends[0] <= p <= ends[1]))
        return mpmath.log1p(moment) / (a - 1)


def settings(count: int, seed: int) -> list[tuple[float, float, float]]:
    draw = random.Random(seed)  # noqa: S311  settings of a test
    orders = [1.1, 1.25, 1.5, 2.0, 2.5, 3.6, 7.9, 10.9, 11.0, 33.0]
    return [(draw.choice(orders), 10 ** draw.uniform(-6, -0.02), 10 ** draw.uniform(-1, 1.5)) for _ in range(count)]


def is_close_above(divergence: Callable[[float, float, float], float], at: tuple[float, float, float]) -> bool:
    """Whether a value is at least the divergence, and by no more than two parts in a billion."""
    expected = truth(*at)
    return bool(0 <= mpmath.mpf(divergence(*at)) - expected <= 2e-9 * expected)


@pytest.mark.parametrize("at", settings(200 if FULL else 12, seed=1))
def test_divergences_are_rounded_up_and_hardly(at: tuple[float, float, float]) -> None:
    assert is_close_above(subsampled_gaussian_divergence, at)


def test_the_check_finds_a_value_that_is_a_little_off() -> None:
    at = (3.6, 0.001, 0.5)
    assert is_close_above(subsampled_gaussian_divergence, at)
    for factor in (1 - 2e-9, 1 + 2e-9):
        assert not is_close_above(lambda *at, by=factor: subsampled_gaussian_divergence(*at) * by, at)


@pytest.mark.parametrize(
    ("rate", "noise"), [(5e-324, 1.0), (1e-300, 0.06), (1 - 2**-53, 1.0), (0.5, 1e100), (0.01, 1e-100), (1e-9, 0.01)]
)
def test_extreme_settings_cost_something_and_more_at_larger_orders(rate: float, noise: float) -> None:
    curve = odo.subsampled_gaussian(rate, noise).curve
    assert curve is not None
    values = [float(value) for value in curve.values]
    assert values[0] > 0
    assert all(low <= high * (1 + 1e-8) for low, high in pairwise(values))
    assert set(map(float, curve.orders)) >= set(map(float, range(2, 65)))


def test_sampling_everything_is_a_gaussian() -> None:
    curve = odo.subsampled_gaussian(1, 2).curve
    assert curve is not None
    for order in ORDERS:
        bound = curve.at(Fraction(repr(order)))
        assert bound is not None
        assert Fraction(repr(order)) / 8 <= bound <= Fraction(repr(order)) / 8 * (1 + Fraction(1, 10**7))


@pytest.mark.parametrize("noise", [1e-200, 1e200])
def test_noise_whose_square_is_no_float_is_refused(noise: float) -> None:
    with pytest.raises(odo.errors.InvalidGuarantee, match="from 1e-100 to 1e100"):
        odo.subsampled_gaussian(0.01, noise)


# dp-accounting's count: the largest whose epsilon, at its own orders, is within the target.


def counted(rate: float, noise: float, epsilon: float, delta: float) -> int:
    dpa = pytest.importorskip("dp_accounting")
    from dp_accounting.rdp import rdp_privacy_accountant as rdp  # noqa: PLC0415  an optional library

    one = rdp.RdpAccountant().compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise)))

    def fits(steps: int) -> bool:
        return bool(rdp.compute_epsilon(one.orders, one.rdp * steps, delta)[0] <= epsilon)

    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def steps_of_plan(rate: float, noise: float, epsilon: float, delta: float) -> int:
    plan = odo.dpsgd_policy(epsilon, delta, sample_rates=[rate], noise_multipliers=[noise], filter="renyi")
    return plan.steps[rate, noise]


def steps_at_integers(rate: float, noise: float, epsilon: float, delta: float) -> int:
    """The broken twin: the best of the whole numbers from 2 to 16."""
    return max(
        math.floor(max(0.0, largest_rdp(o, epsilon, delta)) / subsampled_gaussian_divergence(o, rate, noise))
        for o in range(2, 17)
    )


def keep_up(
    steps: Callable[[float, float, float, float], int], chosen: list[tuple[float, float, float, float]]
) -> int:
    """Return for how many settings there are at least 98% of dp-accounting's steps."""
    return sum(steps(*setting) >= 0.98 * counted(*setting) for setting in chosen)


def test_plans_have_as_many_steps_as_dp_accounting_counts() -> None:
    chosen: list[tuple[float, float, float, float]] = [(0.001, 0.5, 4, 1e-5), (0.02, 0.5, 8, 1e-5)]
    chosen += [(rate, noise, *target) for rate, noise, target in (SETTINGS if FULL else SETTINGS[1::4])]
    assert sum(counted(*setting) > 0 for setting in chosen) > len(chosen) // 2
    assert keep_up(steps_of_plan, chosen) == len(chosen)
    assert keep_up(steps_at_integers, chosen[:2]) == 0
