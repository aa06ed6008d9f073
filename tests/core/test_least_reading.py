"""What no odometer can be below: the adversary is real, and the odometers of the library are above it."""

from __future__ import annotations

import math
from functools import cache

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odograph.core.conversions import filter_time
from odograph.core.odometers import (
    DiscreteMixture,
    FilterOdometer,
    Mixture,
    Odometer,
    Rogers,
    Spent,
    Stitched,
    default_odometer,
    general_odometer,
)
from odograph.core.theory import least_reading, least_reading_at_one_moment
from odograph.errors import InvalidArgument, InvalidGuarantee

# The intrinsic time at which the exact filter stops, for (1, 1e-6), (3, 1e-6) and (0.5, 1e-8).
LIMITS = [(0.054225, 1e-6), (0.407925, 1e-6), (0.010025, 1e-8)]


def best_chance(level: float, time: float, points: int) -> float:
    """The largest probability of ever losing `level` within `time`, in steps of a share 1/`points` of it.

    A recursion over all choices, in plain intrinsic time: nothing is rounded to units.
    """
    step = level / points
    costs = {jump: 2 * jump * step * math.tanh(jump * step / 2) for jump in range(1, 2 * points)}

    @cache
    def best(missing: int, left: float) -> float:
        if missing <= 0:
            return 1.0
        chances = [0.0]
        for jump, cost in costs.items():
            if cost > left:
                break
            up = 1 / (1 + math.exp(-jump * step))
            after = round(left - cost, 12)
            chances.append(up * best(missing - jump, after) + (1 - up) * best(missing + jump, after))
        return max(chances)

    return best(points, time)


@pytest.mark.parametrize("time", [0.05, 0.1, 0.2, 0.4, 0.8, 2.0])
@pytest.mark.parametrize("delta", [0.01, 0.05, 0.1])
def test_the_level_is_reached_more_often_than_delta_by_another_recursion(time: float, delta: float) -> None:
    level = least_reading(time, delta, fineness=16)
    points = max(2, round(level * 4 / math.sqrt(time)))
    assert best_chance(level, time + 1e-9, points) > delta
    # Negative control: a tenth higher, the same analyst reaches it too seldom.
    assert best_chance(1.1 * level, time + 1e-9, points) < delta


@pytest.mark.parametrize(
    ("time", "delta", "once", "ever"),
    [(*LIMITS[0], 1.134, 1.185), (*LIMITS[1], 3.241, 3.379), (*LIMITS[2], 0.566, 0.586)],
)
def test_the_least_readings_at_the_filter_s_limit(time: float, delta: float, once: float, ever: float) -> None:
    with mpmath.workdps(30):
        quantile = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(repr(delta)))
        expected = float(mpmath.mpf(time) / 2 + mpmath.sqrt(time) * quantile)
    found = least_reading_at_one_moment(time, delta)
    assert found == pytest.approx(expected, rel=1e-9)
    assert found == pytest.approx(once, rel=2e-3)
    assert least_reading(time, delta) == pytest.approx(ever, rel=1.5e-3)


@pytest.mark.parametrize(("time", "delta"), LIMITS)
def test_an_analyst_who_adapts_the_steps_reaches_more_than_steady_noise_and_less_than_every_odometer(
    time: float, delta: float
) -> None:
    least = least_reading(time, delta, fineness=1000)
    # Steady Gaussian noise is a Brownian motion with drift 1/2: how often it ever reaches the level, by reflection.
    with mpmath.workdps(30):
        root = mpmath.sqrt(time)
        steady = mpmath.ncdf((time / 2 - least) / root) + mpmath.exp(least) * mpmath.ncdf((-time / 2 - least) / root)
    assert steady < 0.9 * delta
    stop = math.sqrt(-2 * math.log(delta) * time) + time / 2
    odometers: list[Odometer] = [
        FilterOdometer(stop),  # the tightest there is: its one line touches at this time
        Mixture(time / 30),
        Stitched(time),
        DiscreteMixture(time / 400, time, 8),
        default_odometer(time, delta),
        default_odometer(time, delta, curves=True),
        general_odometer(),
        Rogers(1e6),
    ]
    assert filter_time(stop, delta) == pytest.approx(time)
    readings = [odometer.bound(Spent(time, math.inf, 0.0, {}), delta) for odometer in odometers]
    assert min(readings) > least
    # Negative control: a bound for one moment is no odometer, and is below.
    assert least_reading_at_one_moment(time, delta) < least


@settings(max_examples=8)
@given(st.floats(0.01, 3.0), st.sampled_from([0.05, 1e-4, 1e-9]))
def test_more_time_and_a_smaller_delta_allow_more_and_a_finer_lattice_nearly_always(
    time: float, delta: float
) -> None:
    least = least_reading(time, delta, fineness=200)
    assert least_reading(1.3 * time, delta, fineness=200) > least
    assert least_reading(time, delta / 10, fineness=200) > least
    assert least_reading(time, delta, fineness=600) > 0.995 * least
    assert least < math.sqrt(-2 * math.log(delta) * time) + time / 2


def test_what_cannot_be_is_refused_with_the_field_and_the_value() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan, True):
        with pytest.raises(InvalidArgument, match=r"intrinsic.*got"):
            least_reading(wrong, 1e-6)
        with pytest.raises(InvalidArgument, match=r"intrinsic.*got"):
            least_reading_at_one_moment(wrong, 1e-6)
    for delta in (0.0, 1.0, 2.0):
        with pytest.raises(InvalidGuarantee, match=r"delta.*got"):
            least_reading(1.0, delta)
    for fineness in (15, 100.0, True):
        with pytest.raises(InvalidArgument, match=r"fineness.*got"):
            least_reading(1.0, 0.1, fineness)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"fineness must be larger .* time of 1000 \(got 32\)"):
        least_reading(1000.0, 1e-6, 32)
