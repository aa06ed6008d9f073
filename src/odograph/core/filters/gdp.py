"""The Gaussian filter: the sum of mu^2, for Gaussian and pure steps."""

from __future__ import annotations

from typing import ClassVar

from odograph.core.conversions import largest_mu, pure_to_gdp
from odograph.core.fixed_point import MOST_PRICED, down, float_below, limit_units, units_computed, units_squared, up
from odograph.core.guarantees import GDP, Guarantee, PureDP, number_of
from odograph.core.meters import Filter, Meter, Target

__all__ = ["Gdp", "GdpMeter"]


class GdpMeter(Meter):
    """The sum of mu^2."""

    __slots__ = ()
    pricing: ClassVar[str] = "gdp"

    def price(self, guarantee: Guarantee) -> int | None:
        """Sum of mu^2.

        Theorem: GDP filter (Smith and Thakurta; Koskela et al.); epsilon-DP is mu-GDP, mu = 2 Phi^-1(e/(1+e)).
        Assumes: Gaussian or pure steps, mu_n predictable.
        """
        if isinstance(guarantee, GDP):
            return units_squared(number_of(guarantee.mu))
        if isinstance(guarantee, PureDP):
            epsilon = number_of(guarantee.epsilon)
            if epsilon <= MOST_PRICED:
                return units_computed(up(pure_to_gdp(float(epsilon)) ** 2), epsilon)
        return None


class Gdp(Filter):
    """Sum of mu^2 within mu*^2."""

    __slots__ = ()
    kind: ClassVar[str] = "gdp"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (PureDP, GDP)

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Sum of mu^2 within mu*^2.

        Theorem: GDP filter (Smith and Thakurta; Koskela et al.).
        Assumes: Gaussian steps, or pure steps by their GDP value; mu_n predictable.
        """
        mu = largest_mu(float_below(target.epsilon), float_below(target.delta))
        return (GdpMeter("gdp", limit_units(down(mu * mu))),)

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return largest_mu(epsilon, delta) ** 2
