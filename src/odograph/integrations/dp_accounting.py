"""What is taken from dp-accounting beside its events: heterogeneous optimal composition.

Its convolutions have no certified error, so they serve as a baseline and in tests; no decision rests on them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from odograph.core.orders import ORDERS
from odograph.core.units import read
from odograph.errors import InvalidGuarantee
from odograph.extras import load

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ORDERS", "heterogeneous_epsilon"]

_CELLS_PER_STEP: Final = 64  # grid cells in the smallest epsilon: keeps the added variance below .1%
_CELLS: Final = (2**15, 2**20)  # grid cells in the sum of the epsilons: at least, and at most


def heterogeneous_epsilon(epsilons: Iterable[float], delta: float) -> float:
    """Return the optimal epsilon at `delta` of pure steps with different epsilons, to about .1%.

    Theorem: optimal heterogeneous composition (Murtagh and Vadhan 2016), as a convolution of the privacy loss
        distributions of randomized response.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance: a baseline, never a stop rule.
    """
    distributions = load("dp_accounting.pld.privacy_loss_distribution")
    masses = load("dp_accounting.pld.pld_pmf")
    groups = Counter(float(read(epsilon, "epsilons")) for epsilon in epsilons)
    del groups[0.0]  # such a step reveals nothing
    level = float(read(delta, "delta"))
    if not 0 < level < 1:
        raise InvalidGuarantee(f"delta must lie strictly between 0 and 1, and {delta!r} does not")
    if not groups:
        return 0.0
    total = math.fsum(groups.elements())
    fewest, most = _CELLS
    cell = max(min(min(groups) / _CELLS_PER_STEP, total / fewest), total / most)
    composed: Any = None
    for epsilon, count in groups.items():
        group = distributions.PrivacyLossDistribution(_randomized_response(masses, epsilon, cell)).self_compose(count)
        composed = group if composed is None else composed.compose(group)
    return float(composed.get_epsilon_for_delta(level))


def _randomized_response(masses: Any, epsilon: float, cell: float) -> Any:  # noqa: ANN401 - untyped library
    """Return the loss distribution of randomized response on a grid, from above.

    The library's own constructor rounds both losses up by as much as a cell, which adds up over the steps.
    Connecting the dots of the divergence curve at the grid points around each loss keeps the mean, and adds a
    variance of at most epsilon * cell.
    """
    floor = math.floor(epsilon / cell)
    grid = np.unique([-floor - 1, -floor, floor, floor + 1])
    losses = grid * cell
    between = -np.expm1(np.minimum(losses - epsilon, 0.0)) / (1 + math.exp(-epsilon))
    divergences = np.where(losses <= -epsilon, -np.expm1(losses), between)
    return masses.create_pmf_pessimistic_connect_dots(cell, grid, divergences)
