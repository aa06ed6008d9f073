"""The Gaussian filter: the sum of mu^2, and a small reserve that lets small steps of other kinds cost their variance.

Phi(x, v) = E h(x G_v), with h(x) = (1 - e^epsilon x)^+, is what a Gaussian with mu^2 = v makes of the ratio x. It
takes the place of a certified table in the reserve theorem of `odograph.core.filters.smooth`: it is convex and
decreasing in x, grows with v, and `E Phi(x G_s, v - s) = Phi(x, v)`. With the reserve W = G_w,
`E Phi(x W, v) = Phi(x, v + w)`, so charges may total mu*^2 - w. No bucket of four units is lost as under a table,
which has values at whole units only: Phi(x, v) is defined for every real v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Final

from odograph.core.conversions import gdp_to_dp_delta, largest_mu, pure_to_gdp
from odograph.core.filters.smooth import smooth_price_gaussian, smooth_price_pure, smooth_price_zcdp
from odograph.core.fixed_point import (
    CEILING,
    MOST_PRICED,
    SCALE,
    down,
    exactly,
    float_below,
    floor_units,
    read,
    units_computed,
    up,
)
from odograph.core.guarantees import GDP, ZCDP, Guarantee, number_of
from odograph.core.meters import WITH_EPSILON, Filter, Meter, Target
from odograph.errors import InvalidPolicy

__all__ = ["Gdp", "GdpMeter"]

# Of mu*^2. It is lost to all steps, and a small step costs a share epsilon^2/(6 w) more than its variance: one
# percent is best for steps of about epsilon/170 at (1, 1e-6).
_SHARE: Final = 100
# The prices of the smooth filter take a reserve as a number of quanta, at least the four of a table's least Gaussian.
_QUANTA: Final = 4
# epsilon^2/w below which the padding of the sharp price is more than what it saves.
_TOO_SMALL: Final = 1e-4


def _read_reserve(value: object) -> Fraction | None:
    return None if value is None else read(value, "reserve", InvalidPolicy)


@dataclass(frozen=True, slots=True)
class GdpMeter(Meter):
    """The sum of mu^2. `reserve` is what the limit leaves out of mu*^2; None for an account of 0.1.0, without one."""

    pricing: ClassVar[str] = "gdp"
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"reserve": _read_reserve}

    reserve: Fraction | None = None

    @property
    def has_sound_options(self) -> bool:
        """Whether a reserve, if there is one, can have been set aside."""
        return self.reserve is None or self.reserve > 0

    def price(self, guarantee: Guarantee) -> int | None:
        """Sum of mu^2, and of what steps of other kinds cost under the reserve.

        Theorem: the GDP filter (for Gaussian steps Smith and Thakurta (2022)), and the reserve theorem with the
            Gaussians alone: a ratio Z may be charged s if Z W is below G_s W in put order.
        Assumes: charges predictable; a step's own delta is counted on the delta meter. Without a reserve there are
            Gaussian steps and steps with an epsilon only.
        """
        if isinstance(guarantee, GDP):
            return smooth_price_gaussian(number_of(guarantee.mu))
        if isinstance(guarantee, WITH_EPSILON):
            epsilon = number_of(guarantee.epsilon)
            if epsilon > MOST_PRICED:
                return None
            ratio = None if self.reserve is None else self.reserve.as_integer_ratio()
            return max(int(epsilon > 0), _pure_units(float(epsilon), ratio))
        if self.reserve is not None and isinstance(guarantee, ZCDP):
            return smooth_price_zcdp(number_of(guarantee.rho), self.reserve / _QUANTA, _QUANTA)
        return None

    def price_interactive(self, guarantee: Guarantee) -> int | None:
        """Return what an interactive mechanism costs; a zCDP one has no price.

        Theorem: as `Meter.price_interactive`, for Gaussian steps and steps with an epsilon.
        Assumes: a zCDP guarantee is priced by the moments of the whole ratio, not by a dominating pair.
        """
        return None if isinstance(guarantee, ZCDP) else self.price(guarantee)


# Keyed by all that a price depends on. Integers, because hashing a Fraction takes longer.
@lru_cache(maxsize=4096)
def _pure_units(epsilon: float, reserve: tuple[int, int] | None) -> int:
    """Return the units that an epsilon-DP step costs: the least of three prices, or of the first without a reserve.

    Theorem: epsilon-DP is mu-GDP, mu = 2 Phi^-1(e^epsilon/(1 + e^epsilon)), a post-processing of that Gaussian. With
        a reserve also the price of randomized response under a reserve with no whole units (others are not proven for
        Gaussians alone), and the least price under a Gaussian reserve.
    Assumes: the step is epsilon-DP but for a reveal, which is counted elsewhere.
    """
    prices = [units_computed(up(pure_to_gdp(epsilon) ** 2), epsilon)]
    if reserve is not None:
        w = Fraction(*reserve)
        closed = smooth_price_pure(epsilon, w / _QUANTA, _QUANTA, pure_certified=False)
        sharp = _sharp_time(epsilon, float_below(w))
        prices += [] if closed is None else [closed]
        prices += [] if sharp is None else [units_computed(sharp, epsilon)]
    return min(prices)


def _sharp_time(epsilon: float, w: float) -> float | None:
    """Return the least that an epsilon-DP step can be charged under a reserve; None where another price is as good.

    A price for a smaller reserve is enough for a larger one, so `w` may be rounded down.

    Theorem: the least price under a Gaussian reserve: the least s that keeps the put order is where the total
        variations of Z W and of G_s W agree, `s = 8 erfinv(tau)^2 - w` with `tau = tanh(epsilon/2) + 2 delta/(1 +
        e^epsilon)`, delta that of sqrt(w)-GDP at epsilon.
    Assumes: as `_pure_units`.
    """
    if epsilon * epsilon <= _TOO_SMALL * w:
        return None
    odds = math.exp(-epsilon)
    distance = up(math.tanh(0.5 * epsilon) + 2.0 * gdp_to_dp_delta(up(math.sqrt(w)), epsilon) * odds / (1.0 + odds))
    if distance >= 1.0:
        return None
    # 8 erfinv(tau)^2 is the mu^2 of the pure step whose total variation is tau. All is rounded up but w, a float.
    return up(up(pure_to_gdp(up(2.0 * math.atanh(distance))) ** 2) - w)


class Gdp(Filter):
    """Sum of mu^2 within mu*^2, of which one percent is a reserve for steps that are not Gaussian."""

    __slots__ = ()
    kind: ClassVar[str] = "gdp"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, GDP, ZCDP)

    def accepts_interactive(self, guarantee: Guarantee, neighbors: str) -> bool:  # noqa: ARG002  as every filter
        """Return whether a theorem covers interactive mechanisms with the guarantee: those with a dominating pair."""
        return isinstance(guarantee, (*WITH_EPSILON, GDP))

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Sum of mu^2 within mu*^2 - w, for the reserve w.

        Theorem: the GDP filter, by the reserve theorem: the divergence starts at
            E Phi(W, mu*^2 - w) = Phi(1, mu*^2) = delta'.
        Assumes: the reserve is fixed before the first step; charges predictable.
        """
        most = _most(target)
        reserve = Fraction(f"{float(most) / _SHARE:.4g}")  # any is valid; a short one can be read
        limit = min(CEILING, floor_units(most - reserve, SCALE))
        return (GdpMeter("gdp", limit, reserve),)

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with one of this filter, within the target; return the others.

        Theorem: the reserve theorem for any reserve, or none: a limit and its reserve are within mu*^2 together.
        Assumes: the last digits of a float decide nothing.
        """
        meter = meters[0] if meters else None
        if not isinstance(meter, GdpMeter) or replace(meter, limit=0, reserve=None) != GdpMeter("gdp", 0):
            return Filter.check_stored(self, meters, target)  # it names what is there instead
        reserve = meter.reserve or Fraction(0)
        limit = floor_units(_most(target), SCALE)
        if meter.limit is None or meter.limit + reserve * SCALE > limit + limit // 10**12 + 1:
            raise InvalidPolicy(
                f"the limit of 'gdp' and its reserve must be at most what the filter allows, {limit} (got"
                f" {meter.limit} and a reserve of {float(reserve):.4g})"
            )
        return meters[1:]

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return largest_mu(epsilon, delta) ** 2


def _most(target: Target) -> Fraction:
    """Return mu*^2, rounded down."""
    mu = largest_mu(float_below(target.epsilon), float_below(target.delta))
    return exactly(down(mu * mu))
