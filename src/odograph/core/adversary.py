"""The lattice adversary: an analyst that really exists, and so bounds every filter from the other side.

It takes randomized-response steps of epsilon = j * step only. They move the log-likelihood ratio along a
lattice, so nothing is interpolated and the divergence it reaches is reached.
"""

from __future__ import annotations

import math
from fractions import Fraction

from odograph.core.conversions import pure_to_intrinsic
from odograph.core.gaussian import largest_mu
from odograph.core.units import exactly
from odograph.core.valuefunction import INWARD, Grid, Kernel, Member, values

__all__ = ["refuted_intrinsic"]


def refuted_intrinsic(epsilon: Fraction, delta: Fraction, step: float) -> Fraction:
    """Return an intrinsic time that no filter for the target may admit, whatever its unit.

    Theorem: the adversary that plays the value function on the lattice spends at most the returned intrinsic
        time (sum of 2 e tanh(e/2)) and reaches a hockey-stick divergence above `delta` at `epsilon`.
    Assumes: the filter charges a step of epsilon e at most its intrinsic time, in total.
    """
    unit = pure_to_intrinsic(step)
    spread_of_loss = largest_mu(float(epsilon), float(delta))
    longest = math.ceil(2.0 * spread_of_loss**2 / unit)
    low = math.ceil((float(epsilon) + 3.0 * spread_of_loss) / step)
    grid = Grid(step, -low, math.ceil(3.0 * spread_of_loss / step) + 1)
    members: list[Member] = []
    for jump in range(1, low):
        charge = math.ceil(pure_to_intrinsic(jump * step) / unit)
        if charge > longest:
            break
        falls = 1.0 / (1.0 + math.exp(-jump * step))
        rises = 1.0 / (1.0 + math.exp(jump * step))
        members.append(Member(charge, Kernel(points=((-jump, falls), (jump, rises)))))
    for n, value in enumerate(values(grid, float(epsilon), members, INWARD), 1):
        if exactly(value) > delta:
            return n * exactly(unit)
    raise AssertionError  # pragma: no cover  the rows do not end
