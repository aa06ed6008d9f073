"""How often adversarial adaptive rules take the loss past each odometer, against the promised delta.

Losses are simulated under P exactly: a step of epsilon loses +epsilon with probability
e^epsilon/(1 + e^epsilon), else -epsilon; a Gaussian step loses N(mu^2/2, mu^2). The rule picks each step from
the past loss. All steps cost whole units of intrinsic time, so every odometer is a table over units, computed
once and looked up.

The checker is one-sided: it rejects an odometer only if the crossing rate is above delta beyond chance, and
it must reject pointwise advanced composition. A least rate is asserted too, because an adversary that never
crosses anything would pass every odometer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import pytest
from scipy.stats import beta

from odograph.core import odometers
from odograph.core.odometers import DiscreteMixture, Odometer, default_odometer

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float64]"
Units: TypeAlias = "NDArray[np.int64]"
Boundary: TypeAlias = Callable[[Floats], Floats]
Rule: TypeAlias = Callable[[Floats, Units], Units]  # (odometer less loss, units spent) -> units of the next step
Losses: TypeAlias = Callable[[np.random.Generator, Units], Floats]

DELTA: Final = 0.05
HORIZON: Final = 2**18  # units; five decades of intrinsic time, up to V = 1
UNIT: Final = 1.0 / HORIZON
TARGET: Final = 1 / 256  # the intrinsic time for which boundaries with one tuning parameter are tuned
BATCH: Final = 20_000  # paths simulated at once: their arrays stay in cache
BATCHES: Final = 20 if os.environ.get("ODOGRAPH_FULL") == "1" else 1
PATHS: Final = BATCH * BATCHES
CHANCE: Final = 1e-6  # of a false alarm in one check


class Case(NamedTuple):
    boundary: Boundary
    least: float  # a crossing rate that the best adversary below must reach


def default_boundary(v: Floats) -> Floats:
    """Return the least of the default odometer's boundaries, each at its share of delta."""
    return least([(share * DELTA, part) for share, part in default_odometer(TARGET, DELTA).parts], v)


def unshared(v: Floats) -> Floats:
    """Return the least of the default's lines, each at the whole delta: not a valid odometer."""
    times, _ = odometers.spread_times(TARGET / 400, TARGET / 2, 8)
    return least([(DELTA, DiscreteMixture(time, time, 1)) for time in (*times, TARGET)], v)


def least(parts: Sequence[tuple[float, Odometer]], v: Floats) -> Floats:
    return np.asarray(np.min([part.boundary(v, level) for level, part in parts], axis=0))  # type: ignore[union-attr, arg-type]


TIMES, WEIGHTS = odometers.spread_times(UNIT, 1.0, 16)
CASES: Final = {
    "line": Case(lambda v: odometers.line(v, DELTA, at=TARGET), 0.026),
    "mixture": Case(lambda v: odometers.mixture(v, DELTA, gamma=TARGET), 0.010),
    "mixture_one_sided": Case(lambda v: odometers.mixture_one_sided(v, DELTA, gamma=TARGET), 0.022),
    "mixture_one_sided_closed": Case(lambda v: odometers.mixture_one_sided_closed(v, DELTA, gamma=TARGET), 0.022),
    "stitched": Case(lambda v: odometers.stitched(v, DELTA, start=TARGET), 0.001),
    "stitched_paper": Case(lambda v: odometers.stitched_paper(v, DELTA, start=TARGET), 0.001),
    "discrete_mixture": Case(lambda v: odometers.discrete_mixture(v, DELTA, times=TIMES, weights=WEIGHTS), 0.020),
    "rogers": Case(lambda v: odometers.rogers(v, DELTA, people=1000), 0.0),
    "default": Case(default_boundary, 0.020),
}


def pointwise(v: Floats) -> Floats:
    """Return the boundary of advanced composition, tuned at every time afterwards: not a valid odometer."""
    return np.asarray(np.sqrt(-2 * math.log(DELTA) * v))


def steady(_gap: Floats, spent: Units) -> Units:
    """Take steps of the same size relative to what was spent: every scale of time gets its chance."""
    return np.maximum(spent // 32, 1)


def close_in(gap: Floats, spent: Units) -> Units:
    """Take large steps while the odometer is far, and small ones to pass it when it is near."""
    wanted = (np.minimum(gap, 1.0) / 3) ** 2 / UNIT
    return np.clip(wanted.astype(np.int64), np.maximum(spent // 128, 1), np.maximum(spent // 16, 1))


def chase(gap: Floats, spent: Units) -> Units:
    """Bet on one step that passes the odometer, if it is within reach, else wait with small steps."""
    leap = (np.minimum(gap, 1.0) * 1.02) ** 2 / UNIT
    wait = spent // 64
    return np.maximum(np.where(leap <= spent / 8, np.ceil(leap).astype(np.int64), wait), 1)


def epsilons(most: int) -> Floats:
    """Return, for 0 to `most` units, the epsilon whose clock 2 epsilon tanh(epsilon/2) is that many units."""
    v = np.arange(most + 1, dtype=np.float64) * UNIT
    epsilon = np.sqrt(v)
    for _ in range(8):  # Newton
        tanh = np.tanh(epsilon / 2)
        slope = 2 * tanh + epsilon * (1 - tanh * tanh)
        epsilon -= np.divide(2 * epsilon * tanh - v, slope, out=np.zeros_like(v), where=slope > 0)
    return epsilon * (1 - 1e-12)  # a step never costs more than it is charged


EPSILONS: Final = epsilons(HORIZON // 8)


def responses(rng: np.random.Generator, units: Units) -> Floats:
    epsilon = EPSILONS[units]
    return np.where(rng.random(len(units)) * (1 + np.exp(-epsilon)) < 1, epsilon, -epsilon)


def gaussians(rng: np.random.Generator, units: Units) -> Floats:
    variance = units * UNIT
    return np.asarray(variance / 2 + np.sqrt(variance) * rng.standard_normal(len(units)))


def table(boundary: Boundary) -> Floats:
    """Return the odometer of a boundary at every whole number of units."""
    v = np.arange(HORIZON + 1, dtype=np.float64) * UNIT
    return np.asarray(boundary(v) + v / 2)


def crossings(odometer: Floats, rule: Rule, losses: Losses, seed: int) -> int:
    """Return how many of `PATHS` paths passed the odometer before the horizon."""
    return sum(_crossings(odometer, rule, losses, np.random.default_rng((seed, batch))) for batch in range(BATCHES))


def _crossings(odometer: Floats, rule: Rule, losses: Losses, rng: np.random.Generator) -> int:
    """Count for one batch; a path stops when it passes the odometer."""
    loss, spent = np.zeros(BATCH), np.zeros(BATCH, dtype=np.int64)
    crossed = 0
    while len(loss):
        units = np.minimum(rule(odometer[spent] - loss, spent), len(EPSILONS) - 1)
        spent = spent + units
        within = spent <= HORIZON  # a step that does not fit ends the path
        loss, spent, units = loss[within], spent[within], units[within]
        loss = loss + losses(rng, units)
        over = loss > odometer[spent]
        crossed += int(np.count_nonzero(over))
        loss, spent = loss[~over], spent[~over]
    return crossed


def rejects(crossed: int) -> bool:
    """Say whether the crossing rate is above delta: the lower Clopper-Pearson limit is."""
    return crossed > 0 and float(beta.ppf(CHANCE, crossed, PATHS - crossed + 1)) > DELTA


ADVERSARIES: Final = [(steady, responses), (close_in, responses), (chase, responses), (close_in, gaussians)]


@pytest.mark.long
@pytest.mark.parametrize("name", list(CASES))
def test_no_adversary_passes_an_odometer_more_often_than_delta(name: str) -> None:
    case = CASES[name]
    odometer = table(case.boundary)
    counts = [crossings(odometer, rule, losses, seed) for seed, (rule, losses) in enumerate(ADVERSARIES)]
    assert not any(rejects(count) for count in counts)
    assert max(counts) / PATHS >= case.least


@pytest.mark.long
@pytest.mark.parametrize(("rule", "losses"), ADVERSARIES)
def test_pointwise_advanced_composition_is_caught(rule: Rule, losses: Losses) -> None:
    assert rejects(crossings(table(pointwise), rule, losses, seed=0))


@pytest.mark.long
def test_the_default_s_lines_without_shares_of_delta_are_caught() -> None:
    counts = [crossings(table(unshared), rule, losses, seed) for seed, (rule, losses) in enumerate(ADVERSARIES)]
    assert all(rejects(count) for count in counts)


def test_no_step_costs_more_than_it_is_charged() -> None:
    clock = 2 * EPSILONS * np.tanh(EPSILONS / 2)
    charged = np.arange(len(EPSILONS)) * UNIT
    assert np.all(clock <= charged)
    assert np.all(clock >= charged * (1 - 1e-11))


def test_the_checker_accepts_delta_and_rejects_a_little_more() -> None:
    assert not rejects(0)
    assert not rejects(int(DELTA * PATHS))
    assert rejects(int(1.25 * DELTA * PATHS))
