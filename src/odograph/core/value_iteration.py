"""The engine of the exact filter: the value function of the worst adaptive analyst, and the budgets it certifies.

Any adaptively chosen (epsilon_n, delta_n)-DP steps reduce to conditional randomized response, so the worst case over
all adaptive analysts is the value function of a control problem in one real state, which is solved here on a grid,
rounded so that every number is an upper bound.

State: `x`, the likelihood ratio Q/P of the outputs so far, and `n`, the units still to spend. `Phi(x, n)` is
the largest hockey-stick divergence that any adaptive choice of members can still reach:

    Phi(x, 0) = h(x)
    Phi(x, n) = max( Phi(x, n-1), max over members j of E[Phi(x Z_j, n - charge_j)] )

The grid is uniform in log x, so the expectation under one member is the same short weighted sum at every grid
point: a `Kernel`. With `OUTWARD` edges a row bounds Phi from above, with `INWARD` edges from below; nothing
else differs between certifying a budget (`solve`) and refuting one (`refuted_intrinsic`).

A budget is a **pair** (quantum, units), never their product: the same product with finer steps is refuted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count, islice
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from odograph.core.conversions import intrinsic_to_pure, largest_mu, pure_to_intrinsic
from odograph.core.fixed_point import ULP, exactly, up
from odograph.display import Progress
from odograph.errors import InvalidPolicy

if TYPE_CHECKING:
    from odograph.core.mechanisms import MenuItem

__all__ = [
    "FAMILIES",
    "FINE",
    "INWARD",
    "LEAST_GAUSSIAN",
    "MOST_BLOCKS",
    "OUTWARD",
    "VERSION",
    "Budget",
    "Edges",
    "Grid",
    "Kernel",
    "Member",
    "Reserve",
    "Row",
    "blocks_alone",
    "family_quantum",
    "hockey_stick",
    "refuted_intrinsic",
    "solve",
    "solve_with_values",
    "spread",
    "usual_fineness",
    "values",
]

Row: TypeAlias = NDArray[np.float64]

_THIN: Final = 4  # a coarse step is worked out at every fourth point
_BATCH: Final = 64  # members that are computed at once: the rows they read should stay in the processor's cache

VERSION: Final = 3  # of the solver: a stored budget says which one certified it

# How many units a step of epsilon/100 is charged, where more than `usual_fineness` are wanted. This takes a minute or
# two, and with a reserve, under which charges need not be whole units, it gains less than half a percent.
FINE: Final = 25

# The two families of steps that need no menu: any (epsilon, delta)-DP step, any Gaussian.
FAMILIES: Final = ("gaussian", "pure")

# Blocks of one item that are certified at most, alone: a mechanism that costs nothing would get any number.
MOST_BLOCKS: Final = 20_000

# A Gaussian is charged at least this many units. Any integer from here on is a sum of numbers below twice
# this, and Gaussians add, so those few kernels cover every Gaussian; a single unit would be too narrow for
# the grid and cost half a percent.
LEAST_GAUSSIAN: Final = 4

_USUAL_UNITS: Final = 2450  # of a budget: solved in two or three seconds, and the last bucket is a sixth of a percent
_POINTS_PER_UNIT: Final = 5  # the unit step is then exact, and 2, 3, 5 units fall close to grid points
_SLACK: Final = 0.0075  # see _bands
_LEAST_SLACK: Final = 1e-4  # keeps a solve short where delta is large, at some cost in the budget
_CELLS_PER_BLOCK: Final = 8  # of a menu item: grid cells in one standard deviation of its loss
_TRUNCATE: Final = 10.0  # standard deviations of a Gaussian kernel that are kept


@dataclass(frozen=True, slots=True)
class Grid:
    """The points x = exp(i * step) for i = low .. high; x = 1 is one of them.

    Coarse members need high - low to be a multiple of 4.
    """

    step: float
    low: int
    high: int

    @property
    def size(self) -> int:
        """The number of points."""
        return self.high - self.low + 1

    @property
    def origin(self) -> int:
        """The index of x = 1."""
        return -self.low


@dataclass(frozen=True, slots=True)
class Kernel:
    """The law of one step's ratio, in grid steps: a few single points, or one long run of weights; and a reveal.

    `E[Phi(x Z)]` at grid point i is the sum of `weight * Phi[i + offset]` over the points or the run, plus
    `reveal` (where Phi counts as 1).
    """

    points: tuple[tuple[int, float], ...] = ()
    run: tuple[int, Row] | None = None
    reveal: float = 0.0

    @property
    def reach(self) -> tuple[int, int]:
        """How many points the kernel looks to the left and to the right."""
        offsets = [offset for offset, _ in self.points]
        if self.run is not None:
            offsets += [self.run[0], self.run[0] + len(self.run[1]) - 1]
        return max(0, -min(offsets)), max(0, *offsets)

    @property
    def size(self) -> int:
        """The number of weights, for the rounding error of their sum."""
        return len(self.points) + (0 if self.run is None else len(self.run[1]))


@dataclass(frozen=True, slots=True)
class Member:
    """A step the analyst may take: what it does to the ratio, and how many units it is charged.

    A `coarse` step is worked out at every fourth grid point and interpolated in x, an upper bound like `spread`;
    it is for steps that span many grid points. `stride` > 1 (coarse only) also lets the solver look the step up
    once for `stride` rows, at the latest row that any of them could use. Phi grows with n, so that bounds from
    above; it is for steps that are charged far more than `stride` units.
    """

    charge: int
    kernel: Kernel
    coarse: bool = False
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Edges:
    """What is beyond the grid, and which way a row is rounded."""

    extend: Callable[[Row, Grid, float, int, int], Row]
    sign: float


def hockey_stick(grid: Grid, epsilon: float, sign: float) -> Row:
    """Return h(x) = max(0, 1 - e^epsilon x) on the grid, rounded up (sign 1) or down (sign -1)."""
    points = grid.step * np.arange(grid.low, grid.high + 1, dtype=np.float64)
    # Near its kink h is a small difference of the exponents, so their rounding is taken care of here.
    exponents = epsilon + points - sign * 2.0**-51 * (epsilon + np.abs(points))
    value: Row = np.maximum(0.0, -np.expm1(np.minimum(exponents, 1.0)))
    return value


def spread(shifts: Row, masses: Row, step: float) -> Kernel:
    """Put a mass at each log-shift on the two grid points around it, linearly in x.

    Theorem: the exact filter, on a grid: Phi(., n) is convex in x, so its chord between two grid points lies above
        it; the kernel's expectation is an upper bound (Doroshenko et al. (2022)).
    Assumes: Phi convex in x, which h is, and which expectations and maxima keep.
    """
    # Phi falls with x: rounding a shift down covers the rounding of the weights.
    shifts = shifts - np.abs(shifts) * 2.0**-50
    cells = np.floor(shifts / step).astype(np.int64)
    weights = np.clip(np.expm1(shifts - cells * step) / math.expm1(step), 0.0, 1.0)
    low = int(cells.min())
    taps = np.zeros(int(cells.max()) - low + 2)
    np.add.at(taps, cells - low, masses * (1.0 - weights))
    np.add.at(taps, cells - low + 1, masses * weights)
    if masses.size == 1:
        return Kernel(points=tuple(enumerate(taps.tolist(), low)))
    return Kernel(run=(low, taps))


def _extend_outward(row: Row, grid: Grid, _epsilon: float, left: int, right: int) -> Row:
    # Below the grid: the chord to (x, Phi) = (0, 1). Above it: the last value, because Phi falls with x.
    below = 1.0 - (1.0 - row[0]) * np.exp(-grid.step * np.arange(left, 0, -1))
    return np.concatenate([below, row, np.full(right, row[-1])])


def _extend_inward(row: Row, grid: Grid, epsilon: float, left: int, right: int) -> Row:
    # Phi >= h everywhere, and h = 0 is a lower bound on the right.
    below = -np.expm1(np.minimum(1.0, epsilon + grid.step * np.arange(grid.low - left, grid.low)))
    return np.concatenate([np.maximum(0.0, below), row, np.zeros(right)])


OUTWARD: Final = Edges(_extend_outward, 1.0)
INWARD: Final = Edges(_extend_inward, -1.0)


def values(grid: Grid, epsilon: float, members: Sequence[Member], edges: Edges) -> Iterator[float]:
    """Yield Phi(1, 1), Phi(1, 2), ...: certified from above or from below, as `edges` says.

    Theorem: the exact filter: with OUTWARD edges every yielded value is at least the divergence at epsilon of any
        adaptive sequence of members whose charges total at most n; with INWARD edges some sequence reaches it.
    Assumes: OUTWARD: kernels made by `spread` or dominated by it. INWARD: kernels that land on grid points.
    """
    left = max(m.kernel.reach[0] for m in members)
    right = max(m.kernel.reach[1] for m in members)
    right += -(left + grid.size + right) % _THIN
    # A sum of t nonnegative products is off by at most t+1 roundings, relatively; a few more for the edges.
    pad = 1.0 + edges.sign * ULP * (40 + max(m.kernel.size for m in members))

    runs = [m for m in members if m.kernel.run is not None]
    groups = [
        _MemberGroup([m for m in members if m.kernel.run is None and (m.coarse, m.stride) == kind], grid, left, right)
        for kind in sorted({(m.coarse, m.stride) for m in members if m.kernel.run is None})
    ]
    fine, coarse = ([group for group in groups if (group.thin > 1) is thin] for thin in (False, True))
    between = [math.expm1(p * grid.step) / math.expm1(_THIN * grid.step) for p in range(1, _THIN)]
    recent: deque[Row] = deque(maxlen=max((m.charge for m in runs), default=0))  # the latest row comes first

    row = hockey_stick(grid, epsilon, edges.sign) * pad
    for n in count():
        if n:
            row = row.copy()
            for member in runs:
                if member.charge <= n:
                    np.maximum(row, _expectation(member.kernel, recent[member.charge - 1], left, grid.size), out=row)
            for group in fine:
                np.maximum(row, group.best(n), out=row)
            if coarse:
                _raise_interpolated(row, np.maximum.reduce([group.best(n) for group in coarse]), between)
            row = np.minimum(row * pad, 1.0)
            yield float(row[grid.origin])
        extended = edges.extend(row, grid, epsilon, left, right)
        recent.appendleft(extended)
        for group in groups:
            group.keep(n, extended)


def _expectation(kernel: Kernel, extended: Row, left: int, size: int) -> Row:
    """Return E[row] under a kernel with a run, at every grid point."""
    assert kernel.run is not None  # noqa: S101  callers ask
    offset, taps = kernel.run
    start = left + offset
    found: Row = np.correlate(extended[start : start + size + len(taps) - 1], taps, "valid") + kernel.reveal
    return found


def _raise_interpolated(row: Row, thin: Row, between: Sequence[float]) -> None:
    """Set row = max(row, the chords of thin between every fourth point), in place."""
    np.maximum(row[::_THIN], thin, out=row[::_THIN])
    for p, weight in enumerate(between, 1):
        np.maximum(row[p::_THIN], thin[:-1] * (1.0 - weight) + thin[1:] * weight, out=row[p::_THIN])


class _MemberGroup:
    """Members of single points that share a stride, and the rows that they look back to.

    Rows are kept in a ring buffer, each split by position modulo `thin`, so that what one point of a kernel reads of
    a row is contiguous. Members are computed in batches: one NumPy call for each would cost more than its arithmetic.
    """

    def __init__(self, members: Sequence[Member], grid: Grid, left: int, right: int) -> None:
        members = sorted(members, key=lambda member: member.charge)
        self.thin = _THIN if members[0].coarse else 1
        self._stride = members[0].stride
        self._charges = np.array([member.charge for member in members])
        assert self._charges[0] >= self._stride  # noqa: S101  else it would look up a row that is not known yet
        width = left + grid.size + right
        points = max(len(member.kernel.points) for member in members)
        padded = [[*m.kernel.points, *[(0, 0.0)] * (points - len(m.kernel.points))] for m in members]
        starts, phases = np.divmod(left + np.array([[offset for offset, _ in one] for one in padded]), self.thin)
        self._places = phases * (width // self.thin) + starts
        self._weights = np.array([[weight for _, weight in one] for one in padded])
        self._reveals = np.array([[member.kernel.reveal] for member in members])
        # A member is first looked up at the row of its own charge, rounded up to a multiple of the stride.
        self._rows = np.zeros((self._charges[-1] // self._stride, self.thin, width // self.thin))
        self._pieces = sliding_window_view(self._rows.reshape(-1), (grid.size - 1) // self.thin + 1)
        self._best: Row = np.zeros(self._pieces.shape[1])

    def keep(self, n: int, extended: Row) -> None:
        """Keep row n, if a member can look it up."""
        place, rest = divmod(n, self._stride)
        if not rest:
            self._rows[place % len(self._rows)] = extended.reshape(-1, self.thin).T

    def best(self, n: int) -> Row:
        """Return the largest expectation of a member for row n, at every point or every fourth."""
        if (n - 1) % self._stride == 0:
            self._best = self._compute(n - 1 + self._stride)
        return self._best

    def _compute(self, end: int) -> Row:
        """Return the best of the members for the rows from end-stride+1 to end."""
        best = np.zeros(self._pieces.shape[1])
        affordable = int(np.searchsorted(self._charges, end, side="right"))
        rows = -((self._charges[:affordable] - end) // self._stride) % len(self._rows)
        for first in range(0, affordable, _BATCH):
            some = slice(first, min(first + _BATCH, affordable))
            pieces = self._pieces[self._places[some] + rows[some, None] * self._rows[0].size]
            # Not `@`: BLAS ends the process when it cannot allocate, and the service's solver has a memory limit.
            sums = np.einsum("mt,mtx->mx", self._weights[some], pieces) + self._reveals[some]
            np.maximum(best, sums.max(axis=0), out=best)
        return best


# Certifying a budget


@dataclass(frozen=True, slots=True)
class Reserve:
    """The part of a certified budget that is set aside once, so that small steps may be charged real numbers."""

    units: int
    order: Fraction | None  # the Rényi order by which steps with a curve are priced; None: they have no price
    left: int  # units that remain for charges


@dataclass(frozen=True, slots=True)
class Budget:
    """A certified budget: charges in integer units may total `units`, for this target and these steps only."""

    epsilon: Fraction
    delta: Fraction
    takes: tuple[str, ...]
    quantum: Fraction
    units: int
    fineness: int
    charges: tuple[tuple[str, int, int], ...] = ()
    version: int = VERSION
    reserve: Reserve | None = None  # what of it is set aside, for the smooth filter

    @property
    def intrinsic(self) -> float:
        """The intrinsic time quantum * units, for comparing budgets; it is not itself a budget."""
        return float(self.quantum * self.units)


def usual_fineness(epsilon: Fraction, delta: Fraction) -> int:
    """Return the fineness at which the budget for a target has about 2,450 units."""
    return max(1, round(_USUAL_UNITS * float(epsilon / 100) ** 2 / largest_mu(float(epsilon), float(delta)) ** 2))


def family_quantum(epsilon: Fraction, delta: Fraction, fineness: int) -> Fraction:
    """Return the unit of intrinsic time at which a step of epsilon/100 is charged `fineness` units.

    Rounded up by a part in 10^12, so that the padded price of that step is still `fineness` units. Where
    delta is so large that there would be too many units to solve for (0.1, 0.01), the unit is as large as needed.
    """
    aligned = (epsilon / 100) ** 2 / fineness * (1 + Fraction(1, 10**12))
    coarsest = Fraction(largest_mu(float(epsilon), float(delta)) ** 2) / (_USUAL_UNITS * fineness)
    exact = max(aligned, coarsest)
    scale = 10 ** max(0, 24 - math.floor(math.log10(float(exact))))
    return Fraction(math.ceil(exact * scale), scale)


def solve(  # noqa: PLR0913  the arguments are the certificate
    epsilon: Fraction,
    delta: Fraction,
    *,
    takes: Sequence[str] = FAMILIES,
    menu: Sequence[MenuItem] = (),
    fineness: int | None = None,
    progress: Progress | None = None,
) -> Budget:
    """Return the certified budget for the target, for the families in `takes` and the items on the menu.

    Theorem: the exact filter: any fully adaptive sequence whose charges total at most `units` has hockey-stick
        divergence at most `delta` at `epsilon`; steps with delta_n > 0 add the sum of their delta_n.
    Assumes: charges are predictable, fixed before their step runs; each step is of a family in `takes`
        (a pure step charged ceil(2 e tanh(e/2) / unit), a Gaussian max(4, ceil(mu^2 / unit))) or on the menu.
    """
    families = tuple(sorted(set(takes)))
    if set(families) - set(FAMILIES):
        raise InvalidPolicy(f"takes must list families of {FAMILIES} (got {families!r})")
    if not families and not menu:
        raise InvalidPolicy("the exact filter must take a family or an item on the menu (got neither)")
    if families:
        return _solve_families(epsilon, delta, families, menu, fineness=fineness, progress=progress)[0]
    return _solve_menu(epsilon, delta, menu, progress)


def solve_with_values(  # noqa: PLR0913  as solve
    epsilon: Fraction,
    delta: Fraction,
    *,
    takes: Sequence[str] = FAMILIES,
    menu: Sequence[MenuItem] = (),
    fineness: int | None = None,
    progress: Progress | None = None,
    beyond: float,
) -> tuple[Budget, list[list[float]]]:
    """Return the certified budget, and upper bounds of Phi(1, n) for n up to `beyond` times its units.

    There is a list of values for each direction in which the menu was solved, or one.

    Theorem: as `solve`.
    Assumes: as `solve`; at least one family is taken.
    """
    families = tuple(sorted(set(takes)))
    return _solve_families(epsilon, delta, families, menu, fineness=fineness, progress=progress, beyond=beyond)


def _solve_families(  # noqa: PLR0913  as solve
    epsilon: Fraction,
    delta: Fraction,
    families: tuple[str, ...],
    menu: Sequence[MenuItem],
    *,
    fineness: int | None,
    progress: Progress | None,
    beyond: float = 1.0,
) -> tuple[Budget, list[list[float]]]:
    fineness = usual_fineness(epsilon, delta) if fineness is None else fineness
    unit = family_quantum(epsilon, delta, fineness)
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
    found = [_rows(values(grid, float(epsilon), d, OUTWARD), delta, longest, beyond, progress) for d in directions]
    units = min(sum(value <= delta for value in rows) - 1 for rows in found)
    return Budget(epsilon, delta, families, unit, units, fineness, charges), found


def _solve_menu(epsilon: Fraction, delta: Fraction, menu: Sequence[MenuItem], progress: Progress | None) -> Budget:
    grid = _menu_grid(epsilon, delta, menu)
    blocks = [max(1, blocks_alone(epsilon, delta, item)) for item in menu]
    most = max(blocks)
    # The least integer charges whose ratios are within about a percent of those of the blocks admitted alone.
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
    # A block's loss spans several cells; a grid finer than its own discretization gains nothing.
    step = min(max(item.step, item.step * d.deviation / _CELLS_PER_BLOCK) for item in menu for d in item.directions)
    return _grid(float(epsilon), 2 * largest_mu(float(epsilon), float(delta)), step)


def _menu_members(
    menu: Sequence[MenuItem], charges: Iterable[tuple[str, int, int]], step: float, delta: Fraction
) -> list[list[Member]]:
    """Return one list of members per direction of the pair of neighbors; items that are not oriented are in both."""
    return [
        [
            Member(charge, item.directions[turn].kernel(item.step, step, delta))
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


def _rows(rows: Iterable[float], delta: Fraction, most: int, beyond: float, progress: Progress | None) -> list[float]:
    """Return Phi(1, 0), Phi(1, 1), ... up to the last n with Phi(1, n) <= delta, or to `beyond` times that.

    At most `most` of them are below delta: charges beyond are not covered by the members.
    """
    found, units = [0.0], most
    for n, value in enumerate(islice(rows, math.ceil(beyond * most)), 1):
        if units == most and (exactly(value) > delta or n > most):
            units = n - 1
        if n > beyond * units:
            break
        found.append(value if n <= most else 1.0)
        if progress is not None and n % 64 == 0:
            progress(n, int(beyond * most / 2))  # `most` is twice what a Gaussian alone would get
    return found


def _grid(epsilon: float, spread_of_loss: float, step: float) -> Grid:
    """Return a grid from beyond the kink of h at -epsilon to beyond the start at 0.

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
    randomized-response step of size e is worse than smaller ones by about e epsilon / V of its charge, far more than
    that. What is left of the advantage costs less than a tenth of a percent of the budget.
    """
    bands: list[tuple[int, int, bool, int]] = []
    low = 1
    while low <= longest:
        width = max(1, int(slack * low**1.5))
        stride = 1 << width.bit_length() - 1
        # Interpolating over 4 cells adds a variance of at most 4 cells squared, 4/25 of a unit. At up to twice the
        # slack it does not change the budget.
        coarse = slack * low**1.5 >= 2.0 / _POINTS_PER_UNIT**2
        bands.append((low, low + width - 1, coarse, stride))
        low += width
    return bands


def _pure_epsilon(intrinsic: Fraction) -> float:
    """The largest epsilon whose charge is `intrinsic`, rounded up: its step dominates every smaller one."""
    return up(intrinsic_to_pure(up(float(intrinsic))), 64)


def _pure_kernel(epsilon: float, step: float) -> Kernel:
    """Randomized response: the ratio falls by e^-epsilon with probability e^epsilon/(1+e^epsilon), else rises."""
    from scipy.special import expit  # noqa: PLC0415  loaded where it is used

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


# Refuting a budget


def refuted_intrinsic(epsilon: Fraction, delta: Fraction, step: float) -> Fraction:
    """Return an intrinsic time that no filter for the target may admit, whatever its unit.

    Theorem: the exact filter, from the other side: the adversary that plays the value function on the lattice spends
        at most the returned intrinsic time (sum of 2 e tanh(e/2)) and reaches a hockey-stick divergence above `delta`
        at `epsilon`.
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
