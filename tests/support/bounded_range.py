"""A kind of guarantee that the library does not have: bounded range, as a report-noisy-max mechanism satisfies.

Imported, it registers the kind; nothing else of the project knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from odograph.core.fixed_point import Numeric
from odograph.core.guarantees import ZCDP, Guarantee, PureDP, exact_of, read_number, register


@register
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class BoundedRange(Guarantee):
    """eta-bounded range.

    Theorem: eta-bounded range implies eta-DP and (eta^2 / 8)-zCDP (Cesar and Rogers, 2021).
    """

    kind: ClassVar[str] = "bounded_range"
    size: ClassVar[str] = "eta"
    eta: Numeric

    def __post_init__(self) -> None:
        read_number(self, "eta")

    def implies(self) -> tuple[Guarantee, ...]:
        eta = exact_of(self.eta)
        return PureDP(eta), ZCDP(eta**2 * Fraction(1, 8))
