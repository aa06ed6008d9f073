"""The approximate-zCDP filter: intrinsic time within the optimal conversion's limit."""

from __future__ import annotations

from typing import ClassVar

from odograph.core.conversions import largest_rho
from odograph.core.fixed_point import float_below, limit_units, units_computed
from odograph.core.guarantees import GDP, ZCDP, Guarantee
from odograph.core.meters import WITH_EPSILON, Filter, Meter, PureStep, Target, intrinsic_units

__all__ = ["Zcdp", "ZcdpMeter"]


class ZcdpMeter(Meter):
    """Intrinsic time, with a limit."""

    __slots__ = ()
    pricing: ClassVar[str] = "zcdp"

    def price(self, guarantee: Guarantee) -> int | None:
        """Intrinsic time V: twice the zCDP parameter of the step.

        Theorem: intrinsic time of a pure step: epsilon-DP is (epsilon tanh(epsilon/2))-zCDP; mu-GDP is (mu^2/2)-zCDP.
        Assumes: parameters predictable; a step's own delta is counted on the delta meter.
        """
        return intrinsic_units(guarantee)

    def price_pure(self, step: PureStep) -> int:
        """Return the intrinsic time, as `price` does."""
        return units_computed(step.time, step.written)


class Zcdp(Filter):
    """Intrinsic time within 2 rho*."""

    __slots__ = ()
    kind: ClassVar[str] = "zcdp"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, ZCDP, GDP)

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Intrinsic time within 2 rho*, by the optimal conversion.

        Theorem: the zCDP filter: Whitehouse et al. (2023), then Canonne, Kamath and Steinke (2020), Proposition 12.
        Assumes: each step approximately rho_n-zCDP, predictable. Proves (epsilon, delta)-DP, not P(L > epsilon).
        """
        rho = largest_rho(float_below(target.epsilon), float_below(target.delta))
        return (ZcdpMeter("zcdp", limit_units(2.0 * rho)),)

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return 2.0 * largest_rho(epsilon, delta)
