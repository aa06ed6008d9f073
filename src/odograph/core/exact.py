"""The exact filter: the budget is computed as a control problem instead of bounded by an inequality.

Any adaptively chosen (epsilon_n, delta_n)-DP steps reduce to conditional randomized response, so the worst
case over all adaptive analysts is the value function of a control problem in one real state, which is solved
here on a grid, rounded so that every number is an upper bound.

A budget is a **pair** (unit, units), never their product: the same product with finer steps is refuted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Final

import numpy as np
from scipy.special import expit

from odograph.core.conversions import intrinsic_to_pure
from odograph.core.gaussian import largest_mu
from odograph.core.menu import MenuItem, item_kernel
from odograph.core.units import exactly, up
from odograph.core.valuefunction import OUTWARD, Grid, Kernel, Member, spread, values
from odograph.errors import InvalidPolicy
from odograph.progress import Progress

__all__ = [
    "COARSE",
    "FAMILIES",
    "FINE",
    "LEAST_GAUSSIAN",
    "MOST_BLOCKS",
    "VERSION",
    "Budget",
    "blocks_alone",
    "family_unit",
    "solve",
]

VERSION: Final = 1  # of the solver: a stored budget says which one certified it

# How many units a step of epsilon/100 is charged. COARSE is solved on request in seconds; FINE is what the
# shipped table holds: rounding a charge up then costs at most 4% at epsilon/100 and 1% at epsilon/50.
COARSE: Final = 4
FINE: Final = 25

# The two families of steps that need no menu: any (epsilon, delta)-DP step, any Gaussian.
FAMILIES: Final = ("gaussian", "pure")

# Blocks of one item that are certified at most, alone: a mechanism that costs nothing would get any number.
MOST_BLOCKS: Final = 20_000

# A Gaussian is charged at least this many units. Any whole number from here on is a sum of numbers below twice
# this, and Gaussians add, so those few kernels cover every Gaussian; a single unit would be too narrow for
# the grid and cost half a percent.
LEAST_GAUSSIAN: Final = 4

_ROWS_PER_FINENESS: Final = 1500  # keeps a coarse solve to 6,000 rows, and a fine one to 37,500
_POINTS_PER_UNIT: Final = 5  # the unit step is then exact, and 2, 3, 5 units fall close to grid points
_SLACK: Final = 0.03  # see _bands
_LEAST_SLACK: Final = 4e-4  # keeps a solve short where delta is large, at some cost in the budget
_CELLS_PER_BLOCK: Final = 8  # of a menu item: grid cells in one standard deviation of its loss
_TRUNCATE: Final = 10.0  # standard deviations of a Gaussian kernel that are kept


@dataclass(frozen=True, slots=True)
class Budget:
    """A certified budget: charges of whole units may total `units`, for this target and these steps only."""

    epsilon: Fraction
    delta: Fraction
    takes: tuple[str, ...]
    unit: Fraction
    units: int
    fineness: int
    charges: tuple[tuple[str, int, int], ...] = ()
    version: int = VERSION

    @property
    def intrinsic(self) -> float:
        """The intrinsic time unit * units, for comparing budgets; it is not itself a budget."""
        return float(self.unit * self.units)


def family_unit(epsilon: Fraction, delta: Fraction, fineness: int) -> Fraction:
    """Return the unit of intrinsic time at which a step of epsilon/100 is charged `fineness` units.

    Rounded up by a part in 10^12, so that the padded price of that step is still `fineness` whole units. Where
    delta is so large that there would be too many units to solve for (0.1, 0.01), the unit is as large as needed.
    """
    aligned = (epsilon / 100) ** 2 / fineness * (1 + Fraction(1, 10**12))
    coarsest = Fraction(largest_mu(float(epsilon), float(delta)) ** 2) / (_ROWS_PER_FINENESS * fineness)
    exact = max(aligned, coarsest)
    scale = 10 ** max(0, 24 - math.floor(math.log10(float(exact))))
    return Fraction(math.ceil(exact * scale), scale)


def solve(  # noqa: PLR0913  the arguments are the certificate
    epsilon: Fraction,
    delta: Fraction,
    *,
    takes: Sequence[str] = FAMILIES,
    menu: Sequence[MenuItem] = (),
    fineness: int = COARSE,
    progress: Progress | None = None,
) -> Budget:
    """Return the certified budget for the target, for the families in `takes` and the items on the menu.

    Theorem: any fully adaptive sequence whose charges total at most `units` has hockey-stick divergence at
        most `delta` at `epsilon`; steps with delta_n > 0 add the sum of their delta_n (docs/theorems.md).
    Assumes: charges are predictable, fixed before their step runs; each step is of a family in `takes`
        (a pure step charged ceil(2 e tanh(e/2) / unit), a Gaussian max(4, ceil(mu^2 / unit))) or on the menu.
    """
    families = tuple(sorted(set(takes)))
    if set(families) - set(FAMILIES):
        raise InvalidPolicy(f"the exact rule knows the families {FAMILIES}, not {families!r}")
    if not families and not menu:
        raise InvalidPolicy("the exact rule needs something to take: a family or an item on the menu")
    if families:
        return _solve_families(epsilon, delta, families, menu, fineness=fineness, progress=progress)
    return _solve_menu(epsilon, delta, menu, progress)


def _solve_families(  # noqa: PLR0913  as solve
    epsilon: Fraction,
    delta: Fraction,
    families: tuple[str, ...],
    menu: Sequence[MenuItem],
    *,
    fineness: int,
    progress: Progress | None,
) -> Budget:
    unit = family_unit(epsilon, delta, fineness)
    spread_of_loss = largest_mu(float(epsilon), float(delta))
    # Twice what a Gaussian alone would get. Charges up to here are covered, so no budget beyond is claimed.
    longest = 2 * math.ceil(spread_of_loss**2 / float(unit))
    slack = max(_LEAST_SLACK, _SLACK * math.sqrt(unit) * float(epsilon) / spread_of_loss**2)
    step = _pure_epsilon(unit) / _POINTS_PER_UNIT
    grid = _grid(float(epsilon), spread_of_loss, step)
    members: list[Member] = []
    if "pure" in families:
        members += [
            Member(low, _pure_kernel(_pure_epsilon(high * unit), step), coarse=coarse, stride=stride)
            for low, high, coarse, stride in _bands(longest, slack)
        ]
    if "gaussian" in families:
        members += [
            Member(m, _gaussian_kernel(m * float(unit), step)) for m in range(LEAST_GAUSSIAN, 2 * LEAST_GAUSSIAN)
        ]
    charges: tuple[tuple[str, int, int], ...] = ()
    directions = [members]
    if menu:
        # An item alone is plain composition of its privacy-loss distribution: k blocks. It is charged so that
        # k blocks use up what the families alone are certified for; rounding down would cost the families.
        alone = _largest(values(grid, float(epsilon), members, OUTWARD), delta, longest, progress)
        blocks = [max(1, blocks_alone(epsilon, delta, item)) for item in menu]
        charges = tuple(
            (item.name, item.block, max(1, math.ceil(alone / k - 0.05))) for item, k in zip(menu, blocks, strict=True)
        )
        directions = [members + extra for extra in _menu_members(menu, charges, step, delta)]
    units = min(_largest(values(grid, float(epsilon), d, OUTWARD), delta, longest, progress) for d in directions)
    return Budget(epsilon, delta, families, unit, units, fineness, charges)


def _solve_menu(epsilon: Fraction, delta: Fraction, menu: Sequence[MenuItem], progress: Progress | None) -> Budget:
    grid = _menu_grid(epsilon, delta, menu)
    blocks = [max(1, blocks_alone(epsilon, delta, item)) for item in menu]
    most = max(blocks)
    # The least whole charges whose ratios are within about a percent of those of the blocks admitted alone.
    scale = min(range(1, 17), key=lambda s: (_imbalance(s, most, blocks) > 0.01, _imbalance(s, most, blocks) * s))
    charges = tuple(
        (item.name, item.block, max(1, round(scale * most / k))) for item, k in zip(menu, blocks, strict=True)
    )
    units = min(
        _largest(values(grid, float(epsilon), members, OUTWARD), delta, 2 * scale * most, progress)
        for members in _menu_members(menu, charges, grid.step, delta)
    )
    return Budget(epsilon, delta, (), Fraction(0), units, 0, charges)


def _imbalance(scale: int, most: int, blocks: Sequence[int]) -> float:
    ratios = [max(1, round(scale * most / k)) * k / (scale * most) for k in blocks]
    return max(ratios) / min(ratios) - 1.0


def blocks_alone(epsilon: Fraction, delta: Fraction, item: MenuItem) -> int:
    """Return how many blocks of one item alone fit the target: plain composition of its loss distribution.

    Theorem: as `solve`, for a menu of one item charged one unit.
    Assumes: as `solve`.
    """
    grid = _menu_grid(epsilon, delta, [item])
    found = MOST_BLOCKS
    for members in _menu_members([item], [(item.name, item.block, 1)], grid.step, delta):
        found = _largest(values(grid, float(epsilon), members, OUTWARD), delta, found)
    return found


def _menu_grid(epsilon: Fraction, delta: Fraction, menu: Sequence[MenuItem]) -> Grid:
    # A block's loss spans several cells; finer than its own discretisation would be wasted.
    step = min(max(item.step, item.step * d.deviation / _CELLS_PER_BLOCK) for item in menu for d in item.directions)
    return _grid(float(epsilon), 2 * largest_mu(float(epsilon), float(delta)), step)


def _menu_members(
    menu: Sequence[MenuItem], charges: Iterable[tuple[str, int, int]], step: float, delta: Fraction
) -> list[list[Member]]:
    """One list of members per direction of the pair of neighbours; what can be turned is in both, both ways."""
    return [
        [
            Member(charge, item_kernel(item.directions[turn], item.step, step, delta))
            for item, (_, _, charge) in zip(menu, charges, strict=True)
            for turn in ((way,) if item.oriented else (0, 1))
        ]
        for way in ((0, 1) if any(item.oriented for item in menu) else (0,))
    ]


def _largest(rows: Iterable[float], delta: Fraction, most: int, progress: Progress | None = None) -> int:
    """Return the largest n up to `most` with Phi(1, n) <= delta."""
    for n, value in enumerate(islice(rows, most), 1):
        if exactly(value) > delta:
            return n - 1
        if progress is not None and n % 64 == 0:
            progress(n, most // 2)  # `most` is twice what a Gaussian alone would get
    return most


def _grid(epsilon: float, spread_of_loss: float, step: float) -> Grid:
    """Cover what matters: from beyond the kink of h at -epsilon to beyond the start at 0.

    A wider grid changes the answer by less than a unit (tested); the edges are upper bounds in any case.
    """
    margin = max(1.5 * spread_of_loss, 6.0 * spread_of_loss - epsilon)
    low = math.ceil((epsilon + margin) / step)
    high = math.ceil(margin / step) + 1
    return Grid(step, -low, high + -(low + high) % 4)


def _bands(longest: int, slack: float) -> list[tuple[int, int, bool, int]]:
    """Cover every charge m = 1 .. longest by bands (low, high, coarse, stride).

    A band is available at `low` units with the step that `high` units buy, is worked out coarsely, and is looked
    up every `stride` rows: each an advantage to the analyst of at most about slack * sqrt(m) of the charge. A
    randomized-response step of size e is worse than smaller ones by about e epsilon / V of its charge, more than
    that, so it costs next to nothing.
    """
    bands: list[tuple[int, int, bool, int]] = []
    low = 1
    while low <= longest:
        width = max(1, int(slack * low**1.5))
        stride = 1 << max(0, (width // 2).bit_length() - 1)
        # Interpolating over 4 cells adds a variance of at most 4 cells squared, 4/25 of a unit.
        coarse = slack * low**1.5 >= 2.0 * (4.0 / _POINTS_PER_UNIT**2)
        bands.append((low, low + width - 1, coarse, stride))
        low += width
    return bands


def _pure_epsilon(intrinsic: Fraction) -> float:
    """The largest epsilon whose charge is `intrinsic`, rounded up: its step dominates every smaller one."""
    return up(intrinsic_to_pure(up(float(intrinsic))), 64)


def _pure_kernel(epsilon: float, step: float) -> Kernel:
    """Randomized response: the ratio falls by e^-epsilon with probability e^epsilon/(1+e^epsilon), else rises."""
    falls, rises = (
        spread(np.array([shift]), np.array([max(expit(-shift), 1e-300)]), step) for shift in (-epsilon, epsilon)
    )
    return Kernel(points=falls.points + rises.points)


def _gaussian_kernel(variance: float, step: float) -> Kernel:
    """A Gaussian of mu^2 = variance: the log ratio moves by N(-variance/2, variance)."""
    variance = up(variance)
    deviation = math.sqrt(variance)
    lowest = math.floor((-variance / 2.0 - _TRUNCATE * deviation) / step)
    highest = math.ceil((-variance / 2.0 + _TRUNCATE * deviation) / step)
    nodes, weights = np.polynomial.legendre.leggauss(16)
    inside = (nodes + 1.0) * (step / 2.0)
    left = step * np.arange(lowest, highest)[:, None]
    z = (left + inside + variance / 2.0) / deviation
    mass = np.exp(-0.5 * z * z) * weights * (step / (2.0 * deviation * math.sqrt(2.0 * math.pi)))
    upper = np.expm1(inside) / math.expm1(step)
    taps = np.zeros(highest - lowest + 1)
    taps[:-1] += (mass * (1.0 - upper)).sum(axis=1)
    taps[1:] += (mass * upper).sum(axis=1)
    # The tail towards small x counts as Phi = 1, the tail towards large x as the last kept value.
    tail = up(0.5 * math.erfc(_TRUNCATE / math.sqrt(2.0)))
    taps[-1] += tail
    return Kernel(run=(lowest, taps * (1.0 + 2.0**-48)), reveal=tail)
