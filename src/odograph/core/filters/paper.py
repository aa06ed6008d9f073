"""The filter of Whitehouse et al. (2023) for (epsilon, delta)-DP steps, as corrected."""

from __future__ import annotations

from typing import ClassVar

from odograph.core.conversions import filter_time
from odograph.core.fixed_point import exact_of, float_below, limit_units, units_written
from odograph.core.guarantees import Guarantee
from odograph.core.meters import WITH_EPSILON, Filter, Meter, Target

__all__ = ["Paper", "PaperMeter"]


class PaperMeter(Meter):
    """The sum of the squared epsilons."""

    __slots__ = ()
    pricing: ClassVar[str] = "paper"

    def price(self, guarantee: Guarantee) -> int | None:
        """Sum of epsilon^2, exactly.

        Theorem: the paper's filter (Whitehouse et al. (2023)), as corrected (E7).
        Assumes: every step is (epsilon_n, delta_n)-DP, epsilon_n predictable.
        """
        if isinstance(guarantee, WITH_EPSILON):
            return units_written(exact_of(guarantee.epsilon) ** 2)
        return None


class Paper(Filter):
    """The paper's filter: the sum of the squared epsilons stays within y*."""

    __slots__ = ()
    kind: ClassVar[str] = "paper"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = WITH_EPSILON

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """The paper's filter, sum of epsilon^2 within y*.

        Theorem: the paper's filter (Whitehouse et al. (2023)), with y* and the delta split corrected (E1, E7).
        Assumes: (epsilon_n, delta_n)-DP steps, predictable.
        """
        limit = filter_time(float_below(target.epsilon), float_below(target.delta))
        return (PaperMeter("paper", limit_units(limit)),)

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return filter_time(epsilon, delta)
