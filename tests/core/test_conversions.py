"""Conversions at their ends, where the true value is known without a formula."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from odograph.core.conversions import dp_to_probdp_delta, dp_to_probdp_delta_one_sided, gdp_to_dp_delta, largest_rdp
from odograph.core.odometers import mixture_one_sided


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 1e6])
def test_with_delta_one_any_divergence_is_enough(order: float) -> None:
    assert largest_rdp(order, 0.0, 1.0) == math.inf
    assert largest_rdp(order, 0.0, 0.5) < math.inf


@pytest.mark.parametrize("convert", [dp_to_probdp_delta, dp_to_probdp_delta_one_sided])
def test_the_loss_of_a_pure_step_never_passes_its_epsilon(convert: object) -> None:
    assert callable(convert)
    assert convert(1.0, 0.0, 1.0) == 1.0  # at epsilon itself nothing is said
    assert convert(1.0, 0.0, math.nextafter(1.0, 2.0)) == 0.0
    assert convert(1.0, 1e-9, 2.0) > 1e-9


@pytest.mark.parametrize("mu", [1e-300, 1e-160, 1e-10])
def test_a_gaussian_step_however_small_has_a_delta_above_zero(mu: float) -> None:
    assert gdp_to_dp_delta(mu, 1.0) == math.ulp(0.0)


def test_a_mixture_boundary_is_above_its_root_also_where_rounding_keeps_newton_from_settling() -> None:
    """Among hundreds of times there are some at which the last digits go round in circles."""
    times, gamma = np.geomspace(1e-6, 1e2, 400), 1.0
    with mpmath.workdps(40):
        for delta in (0.5, 0.9):
            for v, found in zip(times.tolist(), mixture_one_sided(times, delta, gamma=gamma).tolist(), strict=True):
                time = mpmath.mpf(v) + gamma
                goal = mpmath.log(mpmath.sqrt(time / gamma) / (2 * mpmath.mpf(delta)))

                def passes(boundary: mpmath.mpf, time: mpmath.mpf = time, goal: mpmath.mpf = goal) -> bool:
                    z = boundary / mpmath.sqrt(time)
                    return bool(z * z / 2 + mpmath.log(mpmath.ncdf(z)) >= goal)

                assert passes(mpmath.mpf(found))
                assert not passes(mpmath.mpf(found) * (1 - mpmath.mpf("1e-12")))
