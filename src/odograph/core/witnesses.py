"""Small exact objects for tests and documentation: pairs of laws on a few outcomes.

A theorem about two neighbours is a statement about a pair (P, Q). On finitely many outcomes with rational
probabilities the divergence, the loss and their compositions are exact, so a false bound can be refuted by an
equation instead of an experiment. Where a witness contains e^epsilon, it takes the float64 next to it as a
rational number, and so do `hockey_stick` and `tail`: identities between them hold with `==`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from odograph.core.units import read, up
from odograph.errors import InvalidGuarantee

if TYPE_CHECKING:
    from odograph.core.units import Number

__all__ = [
    "FinitePair",
    "conditional_randomized_response",
    "dp_not_probdp",
    "dp_not_probdp_loss",
    "leaky_step",
    "tight_dp_to_probdp",
]


@dataclass(frozen=True, slots=True)
class FinitePair:
    """The laws `p` and `q` of one output under two neighbours, over the same finite outcomes.

    Floats are taken as the binary numbers they are, so every method is exact in its inputs.
    """

    p: tuple[Number, ...]
    q: tuple[Number, ...]

    def __post_init__(self) -> None:
        if len(self.p) != len(self.q):
            raise InvalidGuarantee("p and q must have the same outcomes, and their lengths differ")
        for name, law in (("p", self.p), ("q", self.q)):
            total = sum((Fraction(mass) for mass in law), Fraction(0))
            if any(mass < 0 for mass in law) or abs(total - 1) > Fraction(1, 10**12):
                raise InvalidGuarantee(f"{name} must be a probability vector, and {law!r} is not")

    @property
    def swapped(self) -> FinitePair:
        """The same pair with the neighbours exchanged."""
        return FinitePair(self.q, self.p)

    @property
    def losses(self) -> tuple[float, ...]:
        """The privacy loss log(p/q) of each outcome; infinite where only one of the two is positive."""
        return tuple(_loss(p, q) for p, q in self._rows())

    def hockey_stick(self, epsilon: float) -> Fraction:
        """Return the least delta with P(E) <= e^epsilon Q(E) + delta for every event E."""
        odds = Fraction(math.exp(epsilon))
        return sum((max(p - odds * q, Fraction(0)) for p, q in self._rows()), Fraction(0))

    def tail(self, t: float, *, closed: bool = False) -> Fraction:
        """Return P(L > t), or P(L >= t) if `closed`."""
        odds = Fraction(math.exp(t))
        rows = self._rows()
        return sum((p for p, q in rows if p > odds * q or (closed and p == odds * q)), Fraction(0))

    def is_dp(self, epsilon: float, delta: Number) -> bool:
        """Say whether the pair is (epsilon, delta)-DP: the divergence in both directions is at most delta."""
        return max(self.hockey_stick(epsilon), self.swapped.hockey_stick(epsilon)) <= read(delta, "delta")

    def is_probdp(self, epsilon: float, delta: Number) -> bool:
        """Say whether the pair is (epsilon, delta)-pDP: P(abs L > epsilon) <= delta under both laws."""
        odds = Fraction(math.exp(epsilon))
        wide = [(p, q) for p, q in self._rows() if p > odds * q or q > odds * p]
        return max(sum(p for p, _ in wide), sum(q for _, q in wide)) <= read(delta, "delta")

    def then(self, other: FinitePair) -> FinitePair:
        """Return the pair of both outputs together; outcomes with the same likelihood ratio are merged.

        Merging changes nothing that depends on the laws through the loss, and it keeps n equal steps small.
        """
        merged: defaultdict[Fraction | None, list[Fraction]] = defaultdict(lambda: [Fraction(0), Fraction(0)])
        for p, q in self._rows():
            for other_p, other_q in other._rows():
                row_p, row_q = p * other_p, q * other_q
                if row_p or row_q:
                    total = merged[row_p / row_q if row_q else None]
                    total[0] += row_p
                    total[1] += row_q
        return FinitePair(tuple(p for p, _ in merged.values()), tuple(q for _, q in merged.values()))

    def power(self, steps: int) -> FinitePair:
        """Return the pair of `steps` independent outputs."""
        result = FinitePair((Fraction(1),), (Fraction(1),))
        for _ in range(steps):
            result = result.then(self)
        return result

    def _rows(self) -> list[tuple[Fraction, Fraction]]:
        return [(Fraction(p), Fraction(q)) for p, q in zip(self.p, self.q, strict=True)]


def conditional_randomized_response(epsilon: float, delta: Number) -> FinitePair:
    """Return randomized response on the outcomes (0, 1, top, bottom): P with input bit 1, Q with input bit 0.

    Theorem: every (epsilon, delta)-DP step is post-processing of it, also given the past (Kairouz, Oh and
        Viswanath 2015; Whitehouse et al., reduction to conditional randomized response). It is
        (epsilon, delta)-DP and (epsilon, delta)-pDP, with equality.
    Assumes: nothing; epsilon and delta may be the values that a past outcome chose.
    """
    odds, reveal = Fraction(math.exp(epsilon)), _probability(delta, "delta")
    keep, flip = (1 - reveal) * odds / (1 + odds), (1 - reveal) / (1 + odds)
    return FinitePair((flip, keep, reveal, Fraction(0)), (keep, flip, Fraction(0), reveal))


def dp_not_probdp(epsilon: float, delta: Number) -> FinitePair:
    """Return the response on the outcomes (0, 1) that merges top into 1 and bottom into 0.

    Theorem: it is (epsilon, delta)-DP and, for delta > 0, not (epsilon, delta)-pDP (Whitehouse et al.,
        appendix "An algorithm satisfying DP but not pDP").
    Assumes: nothing; `dp_not_probdp_loss` is its loss on the outcome 1.
    """
    zero, one, top, bottom = range(4)
    response = conditional_randomized_response(epsilon, delta)
    p, q = response.p, response.q
    return FinitePair((p[zero] + p[bottom], p[one] + p[top]), (q[zero] + q[bottom], q[one] + q[top]))


def dp_not_probdp_loss(epsilon: float, delta: float) -> float:
    """Return log((delta + e^epsilon)/(1 - delta)), the largest loss of `dp_not_probdp`, rounded up.

    Theorem: the loss exceeds epsilon with probability above delta, although the pair is (epsilon, delta)-DP.
    Assumes: 0 <= delta < 1.
    """
    eps, reveal = float(read(epsilon, "epsilon")), _probability(delta, "delta")
    if reveal == 1:
        return math.inf
    # Three nonnegative terms: nothing cancels and e^epsilon is never formed.
    return up(eps + math.log1p(float(reveal) * math.exp(-eps)) - math.log1p(-float(reveal)))


def leaky_step(delta0: Number) -> FinitePair:
    """Return the step on the outcomes (a, b) that answers a under P, and under Q answers b with `delta0`.

    Theorem: it is (0, delta0)-DP and (-log(1 - delta0), delta0)-pDP, and under P its loss is
        -log(1 - delta0) surely: losses that concentration bounds never see, because they have no variance.
    Assumes: 0 <= delta0 < 1.
    """
    leak = _probability(delta0, "delta0")
    return FinitePair((Fraction(1), Fraction(0)), (1 - leak, leak))


def tight_dp_to_probdp(epsilon: float, delta: Number, t: float) -> FinitePair:
    """Return the (epsilon, delta)-DP pair on (S, S', rest) with the most mass at loss t or more.

    Theorem: P(L >= t) = delta/(1 - e^(epsilon - t)), and P(abs L >= t) is 1 + e^-t times that: the largest
        values that (epsilon, delta)-DP allows.
    Assumes: t > epsilon, and delta small enough that the masses stay below 1.
    """
    if not t > epsilon:
        raise InvalidGuarantee(f"t must exceed epsilon, and {t!r} does not exceed {epsilon!r}")
    ratio = Fraction(math.exp(t))
    high = _probability(delta, "delta") / (1 - Fraction(math.exp(epsilon)) / ratio)
    low = high / ratio
    if high + low > 1:
        raise InvalidGuarantee(f"delta must be at most (1 - e^(epsilon - t))/(1 + e^-t), and {delta!r} is larger")
    rest = 1 - high - low
    return FinitePair((high, low, rest), (low, high, rest))


def _probability(value: Number, field: str) -> Fraction:
    exact = read(value, field)
    if exact > 1:
        raise InvalidGuarantee(f"{field} is a probability, and {value!r} is above 1")
    return exact


def _loss(p: Fraction, q: Fraction) -> float:
    if not p:
        return -math.inf
    if not q:
        return math.inf
    ratio = p / q
    if Fraction(1, 2) < ratio < 2:
        return math.log1p(float(ratio - 1))  # the exact difference keeps small losses accurate
    return math.log(ratio.numerator) - math.log(ratio.denominator)
