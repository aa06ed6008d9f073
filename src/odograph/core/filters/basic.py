"""Basic composition: the sum of the epsilons and the sum of the deltas."""

from __future__ import annotations

from typing import ClassVar

from odograph.core.conversions import filter_time
from odograph.core.guarantees import Guarantee
from odograph.core.meters import WITH_EPSILON, Filter, Meter, Target

__all__ = ["Basic"]


class Basic(Filter):
    """Basic composition alone. It is an alternative of every other policy too, because it costs no delta'."""

    __slots__ = ()
    kind: ClassVar[str] = "basic"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = WITH_EPSILON

    def alternatives(self, target: Target) -> tuple[Meter, ...]:  # noqa: ARG002  as every filter
        """No alternative of its own: the epsilon meter is one of every policy.

        Theorem: basic composition: sum of epsilon and sum of delta.
        Assumes: (epsilon_n, delta_n)-DP steps, predictable.
        """
        return ()

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return filter_time(epsilon, delta)
