"""The value function of the worst adaptive analyst, row by row, on a grid.

State: `x`, the likelihood ratio Q/P of the outputs so far, and `n`, the units still to spend. `Phi(x, n)` is
the largest hockey-stick divergence that any adaptive choice of members can still reach:

    Phi(x, 0) = h(x)
    Phi(x, n) = max( Phi(x, n-1), max over members j of E[Phi(x Z_j, n - charge_j)] )

The grid is uniform in log x, so the expectation under one member is the same short weighted sum at every grid
point: a `Kernel`. With `OUTWARD` edges a row bounds Phi from above, with `INWARD` edges from below; nothing
else differs between certifying a budget (`exact`) and refuting one (`adversary`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "INWARD",
    "OUTWARD",
    "Edges",
    "Grid",
    "Kernel",
    "Member",
    "Row",
    "hockey_stick",
    "spread",
    "values",
]

Row: TypeAlias = NDArray[np.float64]

_ULP: Final = 2.0**-53
_THIN: Final = 4  # a coarse step is worked out at every fourth point


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

    Theorem: Phi(., n) is convex in x, so its chord between two grid points lies above it; the kernel's
        expectation is an upper bound ("connect the dots").
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

    Theorem: with OUTWARD edges every yielded value is at least the divergence at epsilon of any adaptive
        sequence of members whose charges total at most n; with INWARD edges some sequence reaches it.
    Assumes: OUTWARD: kernels made by `spread` or dominated by it. INWARD: kernels that land on grid points.
    """
    fine = _by_charge(m for m in members if not m.coarse)
    coarse = _by_charge(m for m in members if m.coarse and m.stride == 1)
    levels = sorted({m.stride for m in members if m.stride > 1})
    strided = {stride: _by_charge(m for m in members if m.stride == stride) for stride in levels}
    # How far back a row may be looked up, by the largest stride that divides its number.
    reach = {1: max((m.charge for m in (*fine, *coarse)), default=1)}
    for stride in levels:
        reach[stride] = max(*reach.values(), strided[stride][-1].charge + stride)
    left = max(m.kernel.reach[0] for m in members)
    right = max(m.kernel.reach[1] for m in members)
    # A sum of t nonnegative products is off by at most t+1 roundings, relatively; a few more for the edges.
    pad = 1.0 + edges.sign * _ULP * (40 + max(m.kernel.size for m in members))

    row = hockey_stick(grid, epsilon, edges.sign) * pad
    rows = {0: _Stored.of(edges.extend(row, grid, epsilon, left, right), left)}
    work = _Workspace(grid)
    pending: dict[int, Row] = {}
    n = 0
    while True:
        n += 1
        best = row.copy()
        for member in fine:
            if member.charge > n:
                break
            work.raise_fine(best, rows[n - member.charge], member.kernel)
        thin = np.zeros(work.thin_size)
        for member in coarse:
            if member.charge > n:
                break
            work.raise_thin(thin, rows[n - member.charge], member.kernel)
        for stride in levels:
            if (n - 1) % stride == 0:
                pending[stride] = _window(work, rows, strided[stride], n - 1 + stride, stride)
            np.maximum(thin, pending[stride], out=thin)
        if coarse or levels:
            work.raise_interpolated(best, thin)
        row = np.minimum(best * pad, 1.0)
        rows[n] = _Stored.of(edges.extend(row, grid, epsilon, left, right), left)
        _forget(rows, n, reach)
        yield float(row[grid.origin])


def _by_charge(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.charge)


def _window(work: _Workspace, rows: dict[int, _Stored], members: Sequence[Member], end: int, stride: int) -> Row:
    """Return the best of the strided members for the rows end-stride+1 .. end, at every fourth point."""
    best = np.zeros(work.thin_size)
    for member in members:
        if member.charge > end:
            break
        work.raise_thin(best, rows[-((member.charge - end) // stride) * stride], member.kernel)
    return best


def _forget(rows: dict[int, _Stored], n: int, reach: dict[int, int]) -> None:
    """Drop the rows that no later row can look up: memory stays bounded by the longest reach, thinned."""
    for stride, longest in reach.items():
        old = n - longest - 1
        if old >= 0 and max(s for s in reach if old % s == 0) == stride:
            rows.pop(old, None)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row with its edges, and the same split by position modulo 4, so that thin slices are contiguous."""

    extended: Row
    phases: Row
    left: int

    @classmethod
    def of(cls, extended: Row, left: int) -> _Stored:
        whole = np.concatenate([extended, np.zeros(-extended.size % _THIN)])
        return cls(extended, np.ascontiguousarray(whole.reshape(-1, _THIN).T), left)


class _Workspace:
    """Buffers for one solve, so that the inner loop allocates nothing."""

    def __init__(self, grid: Grid) -> None:
        self.size = grid.size
        self.thin_size = (grid.size - 1) // _THIN + 1
        self._sum, self._term = np.empty(self.size), np.empty(self.size)
        self._thin_sum, self._thin_term = np.empty(self.thin_size), np.empty(self.thin_size)
        self._between = [math.expm1(p * grid.step) / math.expm1(_THIN * grid.step) for p in range(1, _THIN)]

    def raise_fine(self, best: Row, stored: _Stored, kernel: Kernel) -> None:
        """Set best = max(best, E[row]) under the kernel, in place."""
        row, left = stored.extended, stored.left
        if kernel.run is None:
            slices = [(row[left + o : left + o + self.size], weight) for o, weight in kernel.points]
            total = _weighted(slices, self._sum, self._term)
        else:
            offset, taps = kernel.run
            total = np.correlate(row[left + offset : left + offset + self.size + len(taps) - 1], taps, "valid")
        if kernel.reveal:
            total += kernel.reveal
        np.maximum(best, total, out=best)

    def raise_thin(self, best: Row, stored: _Stored, kernel: Kernel) -> None:
        """The same at every fourth point, for kernels of single points that reveal nothing."""
        assert kernel.run is None  # noqa: S101  what this does not look at must not be there
        assert not kernel.reveal  # noqa: S101
        slices = []
        for offset, weight in kernel.points:
            start, phase = divmod(stored.left + offset, _THIN)
            slices.append((stored.phases[phase, start : start + self.thin_size], weight))
        np.maximum(best, _weighted(slices, self._thin_sum, self._thin_term), out=best)

    def raise_interpolated(self, best: Row, thin: Row) -> None:
        """Set best = max(best, the chords of thin between every fourth point), in place."""
        np.maximum(best[::_THIN], thin, out=best[::_THIN])
        for p, weight in enumerate(self._between, 1):
            chord = thin[:-1] * (1.0 - weight) + thin[1:] * weight
            np.maximum(best[p::_THIN], chord, out=best[p::_THIN])


def _weighted(slices: Sequence[tuple[Row, float]], total: Row, term: Row) -> Row:
    """Return the weighted sum of slices in `total`, allocating nothing."""
    row, weight = slices[0]
    np.multiply(row, weight, out=total)
    for row, weight in slices[1:]:
        np.multiply(row, weight, out=term)
        np.add(total, term, out=total)
    return total
