"""The smooth filter: with a small reserve of a certified budget, a step costs its variance, in real numbers.

The exact filter charges integer units of a certified pair (quantum u, N units). Set k >= 4 of them aside. They pay
for a lognormal factor W, log W ~ N(-w/2, w) with w = k u, that multiplies the likelihood ratio in the analysis only:
no mechanism adds noise. G_s below is the lognormal ratio of a Gaussian with mu^2 = s.

The reserve theorem: a step with ratio Z may be charged the real number s of intrinsic time if
`E(t - Z W)^+ <= E(t - G_s W)^+` for every t > 0, in both directions of the pair of neighbors (the *put order*). It
may be charged m units and s if the same holds with Z_m G_s W on the right, Z_m a ratio that m units buy. Charges may
then total (N - k - 4) u: real charges live in buckets of four units, the smallest Gaussian that a table has.

Every price here assumes of its account: the budget was certified with the family "gaussian"; a price is fixed before
its step runs; the step's own delta is counted on the delta meter; the account prices with its own quantum, reserve
and order. A larger reserve makes prices fall, so a price belongs to one (quantum, reserve), never to a guarantee
alone. Interactive mechanisms may be charged where there is a dominating pair: pure, Gaussian, discrete Gaussian and
menu steps, but not zCDP and Rényi steps (`SmoothMeter.price_interactive`).

A `smooth_price_*` is an integer in units of 1e-15, rounded up, or None where there is no finite price; a
`smooth_time_*` is the same before it is rounded to units. Arguments are validated elsewhere.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Final, NamedTuple

from odograph.core.conversions import intrinsic_to_pure, pure_to_intrinsic
from odograph.core.filters.exact import (
    Exact,
    ExactMeter,
    Need,
    is_refuted,
    read_charges,
    read_items,
    read_quantum,
    started_units,
)
from odograph.core.fixed_point import (
    CEILING,
    MOST_PRICED,
    PADDED,
    SCALE,
    Number,
    above,
    ceil_sure,
    down,
    exact_of,
    exactly,
    float_above,
    float_below,
    padded_scale,
    read,
    units_computed,
    units_squared,
    units_written,
    up,
)
from odograph.core.guarantees import GDP, RDP, ZCDP, DiscreteGaussian, Guarantee, Mechanism, number_of
from odograph.core.mechanisms import MenuItem
from odograph.core.meters import WITH_EPSILON, Meter, PureStep, Target
from odograph.core.value_iteration import FAMILIES, LEAST_GAUSSIAN, Budget, Reserve, solve_with_values
from odograph.display import Progress
from odograph.errors import InvalidPolicy

__all__ = [
    "RESERVES",
    "Smooth",
    "SmoothMeter",
    "effective_reserve",
    "set_aside",
    "smooth_limit_units",
    "smooth_limit_with_order",
    "smooth_price_discrete_gaussian",
    "smooth_price_gaussian",
    "smooth_price_pure",
    "smooth_price_renyi",
    "smooth_price_zcdp",
    "smooth_price_zcdp_scanned",
    "smooth_time_pure",
    "smooth_time_renyi",
    "smooth_time_zcdp",
    "solve_reserve",
]

# Of the closed form, relative: its rounding is below 5e-15 up to the largest angle, and two of them are subtracted.
_PAD: Final = 2.0**-44
_TIME_UNITS: Final = padded_scale(16.0)  # as `above` pads
_LARGEST_ANGLE: Final = 1.5  # epsilon / sqrt(w); the theorem ends at pi/2, where the price is infinite
_LARGEST_EPSILON: Final = 600.0  # beyond it the hyperbolic sine overflows
_LARGEST_EXPONENT: Final = 700.0  # of a Rényi moment; such a step has no price by any order
_LARGEST_RENYI_PRICE: Final = 1.0
_LARGEST_ZCDP_RESERVE: Final = 6  # w; the proof ends there
_LEAST_SCANNED_SHARE: Final = Fraction(1, 500)  # rho/w; the scan begins there
_LARGEST_OSCILLATION: Final = 1e-3
_LARGEST_RATIO: Final = 20.0  # of w to twice the square of the tail's length; beyond it the tail hardly helps
_STEEPEST: Final = Fraction(100)  # times 2 pi^2, of an oscillation: e to the minus that is below every float
_ROW_PAD: Final = 1.0 + 2.0**-30  # of a sum over rows: far more than the rounding of its terms


def effective_reserve(quantum: Fraction, reserve: int, order: Fraction | None = None) -> float:
    """Return a w for which the log-density of the reserve curves by at most 1/w, rounded down; at least that of G_w.

    Theorem: a reserve with a tail: the density of log W in symmetric form is q(y) = E_T phi_(w+T)(y) with T
        exponential of rate l^2/2, l = a - 1/2. Given y, T has a density in proportion to e^(-l^2 T/2 - y^2/(2 (w+T)))
        (w+T)^(-1/2), so -(log q)'' = E(1/(w+T) | y) - y^2 Var(1/(w+T) | y) <= E(1/(w+T) | y), which falls as y^2
        grows, because larger T become likelier. At y = 0 it is l^2 (e^-r/(sqrt(pi r) erfc(sqrt r)) - 1), r = w l^2/2.
        So q'' >= -q times that, which is all that randomized response asks of W, and steps known by their moments ask
        of it beside tails of e^(-l |y|).
    Assumes: `order` is the one that the account's limit was computed with (`smooth_limit_with_order`).
    """
    w = down(float(reserve * quantum))  # a smaller reserve prices higher
    if order is None:
        return w
    decay = float_below(order - Fraction(1, 2))
    ratio = 0.5 * w * decay * decay
    if ratio > _LARGEST_RATIO:
        return w
    root = math.sqrt(ratio)
    excess = math.exp(-ratio) / (math.sqrt(math.pi) * root * math.erfc(root)) - 1.0
    # The difference is at least a fortieth, so what its terms are off by grows by at most forty.
    return max(w, down(1.0 / (up(decay, 64) ** 2 * excess), 2048.0))


@dataclass(frozen=True, eq=False, slots=True)
class _Pricing:
    """What all prices of one quantum, reserve and order have in common. Compared by identity, as a key of caches."""

    top: int  # of the quantum
    bottom: int
    unit: float
    units_in_one: float
    root: float  # sqrt(w)
    slope: float  # 2/(1/4 + 1/w)
    pure_certified: bool


@lru_cache(maxsize=1024)
def _pricing(quantum: Fraction, reserve: int, order: Fraction | None, *, pure_certified: bool) -> _Pricing:
    w = effective_reserve(quantum, reserve, order)
    top, bottom = quantum.as_integer_ratio()
    return _Pricing(
        top, bottom, float(quantum), float(1 / quantum), math.sqrt(w), 2.0 / (0.25 + 1.0 / w), pure_certified
    )


def smooth_price_pure(
    epsilon: Number,
    quantum: Fraction,
    reserve: int,
    *,
    order: Fraction | None = None,
    pure_certified: bool = True,
) -> int | None:
    """Return the units of 1e-15 that an epsilon-DP step costs: at most what whole units of the quantum would cost.

    The price grows with epsilon and is never below its intrinsic time c(epsilon) = 2 epsilon tanh(epsilon/2).

    Theorem: randomized response under a reserve (whose q'' >= -q/w), and its composite form: for any e_m
        <= epsilon that m units buy, m u + s(epsilon) - s(e_m) dominates the step in put order. w is the
        `effective_reserve`.
    Assumes: the step is (epsilon, delta)-DP; the budget was certified with "pure" too, or `pure_certified` is False:
        then neither whole units nor composites with m >= 1 are proven, and only s(epsilon) itself is charged.
    """
    if epsilon > MOST_PRICED:
        return None
    pricing = _pricing(quantum, reserve, order, pure_certified=pure_certified)
    near = float(epsilon)
    return _pure_units(near, pure_to_intrinsic(near), pricing) if epsilon else 0


def smooth_time_pure(
    epsilon: Number,
    quantum: Fraction,
    reserve: int,
    *,
    order: Fraction | None = None,
    pure_certified: bool = True,
) -> float | None:
    """Return the intrinsic time that `smooth_price_pure` rounds up to units.

    Theorem: as `smooth_price_pure`.
    Assumes: as `smooth_price_pure`.
    """
    if epsilon > MOST_PRICED:
        return None
    pricing = _pricing(quantum, reserve, order, pure_certified=pure_certified)
    near = float(epsilon)
    return _pure_time(near, pure_to_intrinsic(near), pricing) if epsilon else 0.0


def _pure_time(epsilon: float, time: float, pricing: _Pricing) -> float | None:
    """Return the price of a positive epsilon of that intrinsic time c(epsilon), not rounded to units."""
    whole_time, _, composite = _pure_prices(epsilon, time, pricing)
    found = min(whole_time, above(composite))
    return None if found == math.inf else found


def _pure_units(epsilon: float, time: float, pricing: _Pricing) -> int | None:
    """Return the price of a positive epsilon of that intrinsic time c(epsilon), in units."""
    _, whole, composite = _pure_prices(epsilon, time, pricing)
    if composite == math.inf:
        return whole
    sure = ceil_sure(composite * _TIME_UNITS, PADDED)
    units = units_computed(above(composite), epsilon) if sure is None else sure
    return units if whole is None or units < whole else whole


def _pure_prices(epsilon: float, time: float, pricing: _Pricing) -> tuple[float, int | None, float]:
    """Return what whole units cost, as time and in units of 1e-15, and the composite form, not yet padded.

    It is infinite where it is not proven.
    """
    smooth = _reserved_pure(epsilon, pricing) * (1.0 + _PAD)
    if not pricing.pure_certified:
        return math.inf, None, smooth
    sure = ceil_sure(time * pricing.units_in_one, 4.0)
    units = max(1, math.ceil(exactly(time) * pricing.bottom / pricing.top)) if sure is None else sure
    whole_time, whole, rest = _bought(units, pricing)
    return whole_time, whole, rest + smooth if smooth < math.inf else smooth


@lru_cache(maxsize=65536)
def _bought(units: int, pricing: _Pricing) -> tuple[float, int, float]:
    """Return what whole units cost, as intrinsic time and in units of 1e-15, and m u - s(e_m) for one unit less.

    One unit less, m, is the largest number of units that is below the intrinsic time of a step that they pay for, and
    e_m the largest epsilon, rounded down, that they buy. The difference is at most 0.
    """
    whole = -(-units * pricing.top * SCALE // pricing.bottom)
    less = units - 1
    rest = (
        less * pricing.unit - _reserved_pure(intrinsic_to_pure(down(less * pricing.unit)), pricing) if less else 0.0
    )
    return up(units * pricing.unit), whole, rest


def _reserved_pure(epsilon: float, pricing: _Pricing) -> float:
    """Return s(epsilon) = 2 (log cosh(epsilon/2) - log cos(epsilon/sqrt(w)))/(1/4 + 1/w), not padded."""
    angle = epsilon / pricing.root
    if angle > _LARGEST_ANGLE or epsilon > _LARGEST_EPSILON:
        return math.inf
    # One logarithm of a ratio whose terms are positive: cosh = 1 + 2 sinh^2 and cos = 1 - 2 sin^2 of half the angle.
    # Every operation is monotone (sin, sinh and log1p of the C library too, as tested), so the price never falls.
    rise, fall = math.sinh(0.25 * epsilon), math.sin(0.5 * angle)
    lost = 2.0 * fall * fall
    return pricing.slope * math.log1p((2.0 * rise * rise + lost) / (1.0 - lost))


def smooth_price_gaussian(mu: Number) -> int | None:
    """Return the units of 1e-15 that a mu-GDP step costs: its mu^2, exactly.

    Theorem: the reserve theorem with equality: the ratio of the step is G_s of s = mu^2, or a post-processing of it.
    Assumes: the step is mu-GDP.
    """
    return units_squared(mu)


def smooth_price_zcdp(rho: Number, quantum: Fraction, reserve: int) -> int | None:
    """Return the units of 1e-15 that a rho-zCDP step costs, `2 rho/(1 - 2 rho/w)`; None unless 4 rho <= w <= 6.

    Theorem: steps known by their moments: zCDP, with the constant that is proven by hand.
    Assumes: the step is rho-zCDP in both directions, all of it released at once (not interactive).
    """
    time = smooth_time_zcdp(rho, quantum, reserve)
    return None if time is None else units_written(time)


def smooth_time_zcdp(rho: Number, quantum: Fraction, reserve: int) -> Fraction | None:
    """Return the intrinsic time that `smooth_price_zcdp` rounds up to units, exactly.

    Theorem: as `smooth_price_zcdp`.
    Assumes: as `smooth_price_zcdp`.
    """
    twice, w = 2 * exact_of(rho), reserve * quantum
    if not twice:
        return Fraction(0)
    return twice * w / (w - twice) if 2 * twice <= w <= _LARGEST_ZCDP_RESERVE else None


def smooth_price_zcdp_scanned(rho: Number, quantum: Fraction, reserve: int) -> int | None:
    """Return the units of 1e-15 that a rho-zCDP step costs, `2 rho (1 + 0.34 x - 0.1 x^2 + rho/7)` with x = rho/w.

    The constants come from a scan, not from a proof by hand. w counts as at most 1, x as at least 1/500, and where
    x > 1 the price is None. Randomized response alone needs `2 rho (1 + x/3 + rho/12)` to second order.

    Theorem: zCDP by a scan: duality at each strike e^y. With c = y/w the put of the step rises by q(y) times the
        mean, with masses e^(z/2) P(dz), of psi(z), the integral of 2 sinh((z - u)/2) e^(c u - u^2/(2w)) over u in [0,
        z]. Where psi(z) <= A cosh(z/2) + D sinh(z/2) + the sum of b_i f_i(z), b_i >= 0, f_i the same integral with
        e^(c_i u), the mean is at most A + the sum of b_i times the integral of e^((c_i^2 - 1/4) r) over r in [0, rho]
        (rho itself for |c_i| < 1/2). That of G_s is half the integral of e^(-r/8 + c^2 r/(2 (1 + r/w)))/sqrt(1 + r/w)
        over [0, s]. A dual holds at every rho, and a mixture of the duals of two strikes at all between them, as psi
        is convex in c. `tests/core/test_zcdp_price.py` covers x in [1/500, 1] and w in (0, 1] by some 240 cells and
        16,000 duals, each at or above psi at 4,500 points, in the gaps between them and beyond. Within a cell all
        strikes are covered, five sizes and three reserves are sampled; at the points of a table the duals leave at
        least 1.9% of what is charged above 2 rho. Cells end at B = c^2 rho/(1 + t)^2 - rho/4 = 12, t = 2 rho/w.
        Beyond, f of c/(1 + t) alone is enough: up to 2 rho the Gaussian lacks at most t e^B (1/(2B) + (2B +
        rho/2)/B^3), and up to s = 2 rho X it gains (X - 1) e^B (1 + t X)^(-1/2) e^(-rho t (X - 1)^2/4). Below x =
        1/500 and above w = 1 only a part of the reserve is used: the rest keeps the put order.
    Assumes: as `smooth_price_zcdp`.
    """
    exact, w = exact_of(rho), min(Fraction(1), reserve * quantum)
    if exact > w:
        return None
    share = max(exact / w, _LEAST_SCANNED_SHARE) if exact else Fraction(0)
    return units_written(2 * exact * (1 + share * (Fraction(17, 50) - share / 10) + exact / 7))


def smooth_price_renyi(divergence: Number, order: Fraction, quantum: Fraction, reserve: int) -> int | None:
    """Return the units of 1e-15 that a step costs of which one Rényi divergence is known; None above 1.

    For the divergence D at the order a it is the least s with `s >= 2 R + R^2/w`, where
    `R = e^(s/8) (e^((a-1) D) - 1)/(a (a-1))`.

    Theorem: steps known by their moments: one Rényi order, for a reserve whose log-density falls like e^(-(a - 1/2)
        |y|).
    Assumes: the divergence bounds both directions; `order` > 1 is the one that the account's limit was computed with
        (`smooth_limit_with_order`); all of the step is released at once (not interactive).
    """
    time = smooth_time_renyi(divergence, order, quantum, reserve)
    return None if time is None else units_computed(time, divergence)


def smooth_time_renyi(divergence: Number, order: Fraction, quantum: Fraction, reserve: int) -> float | None:
    """Return the intrinsic time that `smooth_price_renyi` rounds up to units.

    Theorem: as `smooth_price_renyi`.
    Assumes: as `smooth_price_renyi`.
    """
    return _renyi_time(divergence, order, down(float(reserve * quantum)))


def _renyi_time(divergence: Number, order: Fraction, w: float) -> float | None:
    """Return the intrinsic time of a step under a reserve whose log-density curves by at most 1/w."""
    if not divergence:
        return 0.0
    moment = (order - 1) * exact_of(divergence)
    if moment > _LARGEST_EXPONENT:
        return None
    ratio = above(math.expm1(float_above(moment)) / float((order - 1) * order), 8.0)
    price = 2.0 * ratio
    while price <= _LARGEST_RENYI_PRICE:
        moved = ratio * math.exp(0.125 * price)
        following = 2.0 * moved + moved * moved / w
        if following <= price:
            # The map has slope at most price/4 <= 1/4: what is added here outweighs its rounding, and stays above it.
            return above(price, 64.0)
        price = following
    return None


def smooth_price_discrete_gaussian(
    sigma: Number, sensitivity: Number, dimension: int, quantum: Fraction, reserve: int
) -> int | None:
    """Return the units of 1e-15 that discrete Gaussian noise costs: D^2/sigma^2 and a small correction.

    The correction is 2.2 A (min(d, floor(D^2)) w + D^2/sigma^2) for the amplitude A = 2 exp(-2 pi^2 sigma^4 w /
    (D^2 + sigma^2 w)). None where w + D^2/sigma^2 > 1 or A > 1e-3.

    Theorem: discrete Gaussian noise, by Poisson summation: smoothed by the reserve, the lattice of losses is a
        Gaussian of v = w + D^2/sigma^2 times 1 + an oscillation of amplitude A. With q the density of the Gaussian,
        the puts of the oscillation are at most 1.09 A v q for v <= 1, and 2.2 A v more of a Gaussian adds 1.098 A v q
        for A <= 1e-3. Coordinates add.
    Assumes: integer-valued queries of L2 sensitivity D in d coordinates, with integer noise of parameter sigma.
    """
    if sensitivity == 0:
        return 0
    w, variance = reserve * quantum, exact_of(sigma) ** 2
    square = exact_of(sensitivity) ** 2
    if variance == 0 or w + square / variance > 1:
        return None
    # On a lattice as fine as that of floats the exponent would be above every float; a smaller one prices higher.
    steepness = min(variance * variance * w / (square + variance * w), _STEEPEST)
    exponent = down(2.0 * math.pi**2 * float(steepness))
    # The rounding of a large exponent is that of the amplitude, relative.
    amplitude = above(2.0 * math.exp(-exponent), 16.0 + 16.0 * exponent)
    if amplitude > _LARGEST_OSCILLATION:
        return None
    changed = min(dimension, math.floor(square))  # coordinates, each by at least 1
    correction = Fraction(11, 5) * exactly(amplitude) * (changed * w + square / variance)
    return units_written(square / variance + correction)


def smooth_limit_units(units: int, reserve: int) -> int:
    """Return how many units of a certified budget are left for charges, `N - k - 4`; 0 where there are none.

    Theorem: the corollary of the reserve theorem: a reserve of k units costs k units, and the last bucket up to 4.
    Assumes: the budget of N units was certified with "gaussian". A reserve of fewer than 4 units is not proven.
    """
    return max(0, units - reserve - LEAST_GAUSSIAN) if reserve >= LEAST_GAUSSIAN else 0


def smooth_limit_with_order(
    values: Sequence[float], reserve: int, order: Fraction, quantum: Fraction, delta: Fraction
) -> int:
    """Return how many units are left for charges if the reserve has the tails that `smooth_price_renyi` needs.

    `values[n]` is an upper bound of Phi(1, n), from n = 0 on; about 1.8 times as many as the budget has units.

    Theorem: the corollary of the reserve theorem for W = G_(w + T), T exponential of mean 2/(a (a-1)): given T the
        reserve is a Gaussian of k + ceil(T/u) units, and beyond the last row Phi counts as 1.
    Assumes: the values were computed with "gaussian"; the order was fixed before the first step.
    """
    if reserve < LEAST_GAUSSIAN:
        return 0
    bounds = [min(value, 1.0) for value in accumulate(values, max)]
    rate = float_below(quantum * order * (order - 1) / 2)  # u over the mean, rounded down: longer tails
    share = -math.expm1(-rate)
    weights = [math.exp(-rate * j) * share for j in range(len(bounds))]
    least = math.fsum(weights[:LEAST_GAUSSIAN])

    def divergence(n: int) -> Fraction:
        """Return an upper bound of E Phi(1, n + k + max(4, ceil(T/u)))."""
        first = n + reserve + LEAST_GAUSSIAN
        if first >= len(bounds):
            return Fraction(1)
        tail = math.fsum(map(mul, weights[LEAST_GAUSSIAN:], bounds[first + 1 :]))
        beyond = math.exp(-rate * (len(bounds) - 1 - n - reserve))
        return exactly((least * bounds[first] + tail + beyond) * _ROW_PAD)

    fitting = bisect_right(range(len(bounds)), delta, key=divergence) - 1
    # One unit less than the rows allow, and the last bucket up to 4.
    return max(0, fitting - 1 - LEAST_GAUSSIAN)


class _Choice(NamedTuple):
    """How a reserve is chosen: its Gaussian part w, and the mean of its exponential tail, as shares of the budget."""

    gives: str
    gaussian: Fraction
    tail: Fraction | None = None  # None: no tail, and no price for steps that are known by a Rényi curve alone
    longest: Fraction | None = None  # mean of a tail, if it ends there: then larger budgets set a smaller share aside

    @property
    def has_order(self) -> bool:
        """Whether steps with a Rényi curve have a price."""
        return self.tail is not None

    def rows(self, delta: Fraction) -> float:
        """Return how many rows its limit is computed from, as a multiple of the budget's units."""
        if self.tail is None:
            return 1.0
        # The tail beyond the last row is counted as a reveal: here it is a few thousandths of delta.
        return 1.0 + float(self.gaussian) + float(self.tail) * (6.0 - math.log(delta))


# By name, with the share of the optimum that steps of up to epsilon/100 get at the targets of the shipped table.
RESERVES: Final[dict[str, _Choice]] = {
    "mixed": _Choice(
        "every kind of small step; pure and Gaussian ones get 90 to 97% of the optimum",
        Fraction(13, 1000),
        Fraction(11, 1000),
        Fraction(1, 200),  # an order of 20, at which subsampled Gaussians with a noise multiplier of 2 have a price
    ),
    "pure": _Choice(
        "pure, Gaussian and zCDP steps, 91 to 98% of the optimum; no Rényi curves",
        Fraction(9, 1000),
    ),
    "training": _Choice(
        "also training with little noise; pure and Gaussian steps get 83 to 91% of the optimum",
        Fraction(10, 1000),
        Fraction(40, 1000),
    ),
}
_ORDER_DIGITS: Final = 3  # of a Rényi order; any order is valid, and a short one can be read


def solve_reserve(need: Need, fineness: int | None, progress: Progress | None = None) -> Budget:
    """Return the certified budget for a target, with its reserve.

    Theorem: the corollary of the reserve theorem, with or without an order.
    Assumes: the reserve and its order are fixed before the first step; the budget takes Gaussian steps.
    """
    budget, values = solve_with_values(
        need.epsilon,
        need.delta,
        takes=need.takes,
        menu=need.menu,
        fineness=fineness,
        progress=progress,
        beyond=RESERVES[need.reserve].rows(need.delta),
    )
    return set_aside(budget, need.reserve, values)


def set_aside(budget: Budget, name: str, values: Sequence[Sequence[float]] = ()) -> Budget:
    """Return a budget with a reserve; one with an order needs the values of `solve_with_values`.

    Theorem: as `solve_reserve`.
    Assumes: as `solve_reserve`.
    """
    choice = RESERVES[name]
    units = max(LEAST_GAUSSIAN, round(choice.gaussian * budget.units))
    started = math.ceil(started_units(budget.charges))
    if choice.tail is None:
        left = max(0, smooth_limit_units(budget.units, units) - started)
        return replace(budget, reserve=Reserve(units, None, left))
    share = choice.tail * budget.units * budget.quantum
    mean = float(share if choice.longest is None else min(share, choice.longest))  # 2/(a (a-1)) for the order a
    order = Fraction(round(0.5 + math.sqrt(0.25 + 2.0 / mean), _ORDER_DIGITS)).limit_denominator(10**_ORDER_DIGITS)
    left = min(smooth_limit_with_order(row, units, order, budget.quantum, budget.delta) for row in values)
    return replace(budget, reserve=Reserve(units, order, max(0, left - started)))


def _read_order(value: object) -> Fraction | None:
    return None if value is None else read(value, "order", InvalidPolicy)


@dataclass(frozen=True, slots=True)
class SmoothMeter(Meter):
    """Intrinsic time within a certified budget of `units` multiples of `quantum`, of which `reserve` are set aside.

    `order` is the Rényi order of the reserve; without one, steps known by a Rényi curve alone have no price. `takes`
    and `charges` are what the budget was certified for, as those of an `ExactMeter`.
    """

    pricing: ClassVar[str] = "smooth"
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "quantum": read_quantum,
        "units": int,
        "reserve": int,
        "order": _read_order,
        "takes": read_items,
        "charges": read_charges,
    }

    quantum: Fraction
    units: int
    reserve: int
    order: Fraction | None
    takes: tuple[str, ...]
    charges: tuple[tuple[str, int, int], ...] = ()
    pure: _Pricing | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.quantum and self.reserve > 0:
            pure = "pure" in self.takes
            found = _pricing(self.quantum, self.reserve, self.order, pure_certified=pure)
            object.__setattr__(self, "pure", found)

    @property
    def has_sound_options(self) -> bool:
        """Whether a budget can have been certified with these options, and the limit leaves the reserve out."""
        certified = ExactMeter("exact", self.units, self.quantum, self.takes, self.charges)
        if not certified.has_sound_options:
            return False
        most = (smooth_limit_units(self.units, self.reserve) - started_units(self.charges)) * self.quantum * SCALE
        within = self.limit == 0 or (self.limit or 0) <= most
        return within and "gaussian" in self.takes and (self.order is None or self.order > 1)

    def price(self, guarantee: Guarantee) -> int | None:
        """Return the intrinsic time that a step is charged under the reserve.

        Theorem: the reserve theorem: any adaptive sequence whose charges total at most the limit is within target.
        Assumes: the step is of a family the budget was certified with, on its menu, or known by its Rényi moments;
            charges predictable; a step's own delta is counted on the delta meter.
        """
        if isinstance(guarantee, WITH_EPSILON):
            return self._price_epsilon(guarantee)
        if isinstance(guarantee, GDP):
            return smooth_price_gaussian(number_of(guarantee.mu))
        if isinstance(guarantee, ZCDP):
            return self._price_zcdp(number_of(guarantee.rho))
        if isinstance(guarantee, Mechanism):
            return self._price_mechanism(guarantee)
        return self._price_curve(guarantee) if isinstance(guarantee, RDP) else self._price_noise(guarantee)

    def price_interactive(self, guarantee: Guarantee) -> int | None:
        """Return what an interactive mechanism costs, where its price is that of a dominating pair.

        Theorem: as `Meter.price_interactive`, for pure, approximate, Gaussian, discrete Gaussian and menu steps.
        Assumes: zCDP and Rényi guarantees have no price: it would be one of moments of the whole ratio, and what an
            interactive mechanism reveals in between other steps need not come from one pair with these moments.
        """
        return self.price(guarantee) if _has_pair(guarantee, [name for name, _, _ in self.charges]) else None

    def price_pure(self, step: PureStep) -> int | None:
        """Return the price of randomized response under the reserve, as `price` does."""
        if not step.written or self.pure is None:
            return None if step.written else 0
        return _pure_units(step.epsilon, step.time, self.pure)

    def _price_noise(self, noise: Guarantee) -> int | None:
        if not isinstance(noise, DiscreteGaussian):
            return None
        grid = exact_of(noise.grid)  # the theorem is for integers: multiples of the grid, counted
        sigma, sensitivity = exact_of(noise.sigma) / grid, exact_of(noise.sensitivity) / grid
        return smooth_price_discrete_gaussian(sigma, sensitivity, noise.dimension, self.quantum, self.reserve)

    def _price_mechanism(self, guarantee: Mechanism) -> int | None:
        """Return what a mechanism's runs cost by the menu, a part of a batch each, or by their curve."""
        for name, batch, units in self.charges:
            if name == guarantee.name:
                return math.ceil(Fraction(guarantee.steps * units, batch) * self.quantum * SCALE)
        return None if guarantee.curve is None else self._price_curve(guarantee.curve)

    def _price_zcdp(self, rho: Number) -> int | None:
        """Return the least of the prices for zCDP: by hand, by the scan of duals, and by one Rényi order."""
        prices = [price(rho, self.quantum, self.reserve) for price in (smooth_price_zcdp, smooth_price_zcdp_scanned)]
        if self.order is not None:
            prices.append(self._price_divergence(self.order * exact_of(rho)))
        return min((price for price in prices if price is not None), default=None)

    def _price_curve(self, curve: RDP) -> int | None:
        divergence = None if self.order is None else curve.at(self.order)
        return None if divergence is None else self._price_divergence(divergence)

    def _price_divergence(self, divergence: Fraction) -> int | None:
        assert self.order is not None  # noqa: S101  callers ask
        time = _renyi_time(divergence, self.order, effective_reserve(self.quantum, self.reserve, self.order))
        return None if time is None else units_computed(time, divergence)


def _has_pair(guarantee: Guarantee, listed: Sequence[str]) -> bool:
    """Return whether one pair of distributions is known to dominate the step; `listed` are the names on a menu."""
    if isinstance(guarantee, Mechanism):
        return guarantee.name in listed
    return isinstance(guarantee, (*WITH_EPSILON, GDP, DiscreteGaussian))


@dataclass(frozen=True, slots=True, init=False)
class Smooth(Exact):
    """The exact filter with a reserve: it takes every kind of step, and charges small ones their variance.

    `reserve` is "pure", "mixed" or "training". `takes` must have "gaussian" in it.
    """

    kind: ClassVar[str] = "smooth"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, GDP, ZCDP, DiscreteGaussian, RDP, Mechanism)
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {**Exact.options, "reserve": str}

    reserve: str

    def __init__(
        self, *, takes: Sequence[str] = FAMILIES, menu: Sequence[MenuItem] = (), reserve: str = "mixed"
    ) -> None:
        Exact.__init__(self, takes=takes, menu=menu)
        if reserve not in RESERVES:
            raise InvalidPolicy(f"reserve must be one of {sorted(RESERVES)} (got {reserve!r})")
        if "gaussian" not in self.takes:
            raise InvalidPolicy(f"takes must have 'gaussian' in it under a reserve (got {takes!r})")
        object.__setattr__(self, "reserve", reserve)

    def __repr__(self) -> str:
        menu = f"menu={self.menu!r}, " if self.menu else ""
        return f"Smooth(takes={self.takes!r}, {menu}reserve={self.reserve!r}: {RESERVES[self.reserve].gives})"

    def accepts(self, guarantee: Guarantee, neighbors: str) -> bool:
        """Return whether a theorem covers the guarantee under this filter."""
        if isinstance(guarantee, Mechanism) and not Exact.accepts(self, guarantee, neighbors):
            # A curve does not state its neighbors; the known ones are for adding or removing a person.
            return guarantee.curve is not None and neighbors == "add-remove" and RESERVES[self.reserve].has_order
        if isinstance(guarantee, RDP):
            return RESERVES[self.reserve].has_order
        return isinstance(guarantee, self.guarantees)

    def accepts_interactive(self, guarantee: Guarantee, neighbors: str) -> bool:  # noqa: ARG002  as every filter
        """Return whether a theorem covers interactive mechanisms with the guarantee: those with a dominating pair."""
        return _has_pair(guarantee, [item.name for item in self.menu])

    def takes_curves(self, neighbors: str) -> bool:
        """Return whether steps may come that have a Rényi curve and no intrinsic time."""
        return RESERVES[self.reserve].has_order or Exact.takes_curves(self, neighbors)

    def need(self, target: Target) -> Need:
        """Return what a budget has to be certified for."""
        return Need(target.epsilon, target.delta, self.takes, self.menu, self.reserve)

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Intrinsic time within what a reserve leaves of the certified budget.

        Theorem: the reserve theorem.
        Assumes: as `solve_reserve`.
        """
        budget = target.budget
        if budget is None or budget.reserve is None or budget.epsilon > target.epsilon or budget.delta > target.delta:
            raise InvalidPolicy("the smooth filter needs a budget certified for this target or a stricter one")
        aside = budget.reserve
        limit = min(CEILING, math.floor(aside.left * budget.quantum * SCALE))
        options = (budget.quantum, budget.units, aside.units, aside.order, budget.takes, budget.charges)
        return (SmoothMeter("smooth", limit, *options),)

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with one of this filter, not known to be too large; return the others."""
        if not meters or not isinstance(meters[0], SmoothMeter):
            raise InvalidPolicy("a compiled policy must have one meter for its smooth filter, and only then")
        meter = meters[0]
        certified = ExactMeter("exact", meter.units, meter.quantum, meter.takes, meter.charges)
        own = self.has_options_of(certified) and (meter.order is None) != RESERVES[self.reserve].has_order
        if not own or is_refuted(target.epsilon, target.delta, certified):
            raise InvalidPolicy(
                f"the limit must be one that was certified for this policy (got {meter.units} units of"
                f" {float(meter.quantum):.4g} with a reserve of {meter.reserve}); compile the policy here with"
                " compile_policy"
            )
        return meters[1:]

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the options."""
        return Exact.to_dict(self) | {"reserve": self.reserve}
