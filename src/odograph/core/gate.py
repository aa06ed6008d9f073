"""The gate: the only place where a request is admitted. Integer addition and comparison, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from odograph.core.fixed_point import CEILING
from odograph.core.guarantees import MOST_DIFFERENT, MOST_POINTS, Mechanism, Parallel
from odograph.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from odograph.core.guarantees import Guarantee
    from odograph.core.meters import Meter

__all__ = ["Decision", "Price", "Totals", "decide"]


@dataclass(frozen=True, slots=True)
class Price:
    """What a request costs: units on each meter, in the meters' order; None where it has no price."""

    amounts: tuple[int | None, ...]

    def __post_init__(self) -> None:
        for amount in self.amounts:
            if amount is not None and amount < 0:
                raise InvalidArgument(f"amounts must not be negative (got {self.amounts})")

    def times(self, count: int) -> Price:
        """Return the price of `count` equal requests."""
        return Price(tuple(None if amount is None else amount * count for amount in self.amounts))

    def to_text(self) -> str:
        """Return the stored form: `12 0 - 7`."""
        return " ".join(["-" if amount is None else str(amount) for amount in self.amounts])


# Totals and decisions are made at every spend: a tuple with names is made four times as fast as a frozen dataclass.
class Totals(NamedTuple):
    """What was spent: units on each meter, and how many admitted steps had no price on it."""

    amounts: tuple[int, ...]
    unpriced: tuple[int, ...]
    steps: int = 0

    @classmethod
    def zero(cls, meters: Sequence[Meter]) -> Totals:
        """Return the totals of an account that has spent nothing."""
        return cls((0,) * len(meters), (0,) * len(meters))

    def to_text(self) -> str:
        """Return the stored form: steps, amounts, unpriced."""
        return f"{self.steps};{' '.join(map(str, self.amounts))};{' '.join(map(str, self.unpriced))}"

    def without(self, price: Price) -> Totals:
        """Return the totals as they were before a price was charged; exact, because a price is kept as charged."""
        return Totals(
            tuple(total - (asked or 0) for total, asked in zip(self.amounts, price.amounts, strict=True)),
            tuple(count - (asked is None) for count, asked in zip(self.unpriced, price.amounts, strict=True)),
            self.steps - 1,
        )


class Decision(NamedTuple):
    """The decision on one request. A refusal changes nothing, and may offer the largest request that fits."""

    admitted: bool
    meters: tuple[Meter, ...]
    totals: Totals
    totals_after: Totals  # the same as `totals` if refused
    price: Price  # as charged: None where a total would have passed the ceiling
    request: Guarantee | None = None
    largest: Guarantee | None = None
    account: str = ""  # the name of the account that decided, where accounts have names
    searched: bool = True  # whether an offer was searched for, if there is none
    notes: tuple[str, ...] = ()  # what an admission changes for later requests: `planning.notes_on`

    def __bool__(self) -> bool:
        return self.admitted  # else `if account.decide(cost):` would be true of a refusal

    @property
    def spent(self) -> dict[str, float]:
        """What was spent before the request, per meter that has a limit."""
        return {m.name: float(self.totals.amounts[i] / m.scale) for i, m in self._with_limit()}

    @property
    def asked(self) -> dict[str, float | None]:
        """What the request costs, per meter that has a limit; None where it has no price there."""
        amounts = self.price.amounts
        return {m.name: None if (a := amounts[i]) is None else float(a / m.scale) for i, m in self._with_limit()}

    @property
    def left(self) -> dict[str, float]:
        """What is left after the decision, per meter that has a limit; 0 once a step was unpriced there."""
        after = self.totals_after
        return {
            m.name: 0.0 if after.unpriced[i] else max(0.0, float((limit - after.amounts[i]) / m.scale))
            for i, m in self._with_limit()
            if (limit := m.limit) is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the decision in plain types; the totals and the price, exact, in their stored form."""
        return {
            "admitted": self.admitted,
            "account": self.account,
            "request": None if self.request is None else self.request.to_dict(),
            "largest": None if self.largest is None else self.largest.to_dict(),
            "spent": self.spent,
            "asked": self.asked,
            "left": self.left,
            "message": str(self),
            "totals": self.totals.to_text(),
            "totals_after": self.totals_after.to_text(),
            "price": self.price.to_text(),
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        if self.admitted:
            left = ", ".join(
                f"{m.name} {self.left[m.name]:.4g}"
                for i, m in self._with_limit()
                if not m.counts_delta and not self.totals_after.unpriced[i]
            )
            room = f"left: {left}" if left else "no limit"
            return "; ".join([f"admitted: {self.request or 'the request'}; {room}", *self.notes])
        needs = [self._excess(i, m) for i, m in self._with_limit()]
        short = ", ".join(filter(None, needs)) or self._unmet
        if self.largest is not None:
            offer = f"the largest request of this kind still admitted is {self.largest}"
        elif not self.searched:
            offer = "a smaller request was not searched for"
        else:
            offer = _no_offer(self.request)
        by = f" by {self.account!r}" if self.account else ""
        return f"refused{by}: {self.request or 'the request'} needs {short}; {offer}"

    def _excess(self, i: int, meter: Meter) -> str:
        """Return by how much the request exceeds one meter; an empty string where it does not, or has no price."""
        asked, limit = self.price.amounts[i], meter.limit
        if asked is None or limit is None or self.totals.unpriced[i] or asked <= limit - self.totals.amounts[i]:
            return ""
        if meter.counts_delta and limit == 0:
            return f"delta {float(asked / meter.scale):.6g}, of which the policy sets none aside (delta_steps is 0)"
        total = self.totals.amounts[i] + asked
        after, most = (f"{float(amount / meter.scale):.6g}" for amount in (total, limit))
        over = f" (over by {float((total - limit) / meter.scale):.3g})" if after == most else ""
        return f"{meter.name} {after} of {most}{over}"

    @property
    def _unmet(self) -> str:
        """What a refused request needs that exceeds no meter."""
        if any(meter.limit is not None and meter.counted and not meter.counts_delta for meter in self.meters):
            return "more than is left"
        return "a part of the odometer that reads it and every step before it, and there is none"

    def _with_limit(self) -> list[tuple[int, Meter]]:
        return [(i, m) for i, m in enumerate(self.meters) if m.limit is not None and m.counted]


def _no_offer(request: Guarantee | None) -> str:
    """Return why a refusal has no offer."""
    if request is not None and request.kind == "rdp":
        return "a curve has no single size, so no smaller one is offered"
    if isinstance(request, Mechanism) and request.curve and len(request.curve.orders) > MOST_POINTS:
        return f"with a curve of more than {MOST_POINTS} orders a smaller request is not searched for"
    if isinstance(request, Parallel):
        if len(request.different) > MOST_DIFFERENT:
            return f"with more than {MOST_DIFFERENT} different parts a smaller request is not searched for"
        if any(part.kind in ("rdp", "mechanism") for part in request.different):
            return "parts that are curves or mechanisms have no single size, so no smaller request is offered"
    return "no request of this kind fits any more"


def decide(meters: tuple[Meter, ...], totals: Totals, price: Price, request: Guarantee | None = None) -> Decision:
    """Return whether the price may be added to the totals, and the totals after it.

    Admitted if the delta meter stays within its limit, and at least one alternative (every other
    meter with a limit) has had no unpriced step and stays within its own. Every admission charges every meter.
    `request` is what the price is of; the decision shows it.

    Theorem: Lemma 3: admitting while at least one filter holds costs the sum of the filters' shares of delta'.
    Assumes: each alternative's limit was compiled for its own share; the price was fixed before the step runs.
    """
    amounts: list[int] = []
    unpriced: list[int] = []
    within = alternative = capped = False
    for meter, total, skipped, asked in zip(meters, totals.amounts, totals.unpriced, price.amounts, strict=True):
        if asked is None or (after := total + asked) > CEILING:
            # A total never passes the ceiling: such a step counts as unpriced, and a void reverses it exactly.
            capped = capped or asked is not None
            amounts.append(total)
            unpriced.append(skipped + 1)
            continue
        amounts.append(after)
        unpriced.append(skipped)
        limit = meter.limit
        if limit is not None and after <= limit and not skipped:
            if meter.counts_delta:
                within = True
            else:
                alternative = True
    if capped:
        price = _as_charged(totals, price)
    if not (within and alternative):
        return Decision(False, meters, totals, totals, price, request)  # noqa: FBT003  the first field
    after_it = _named(Totals, (tuple(amounts), tuple(unpriced), totals.steps + 1))
    return _named(Decision, (True, meters, totals, after_it, price, request, None, "", True, ()))


# Both are made at every spend, and a named tuple's own constructor takes twice as long as the tuple's.
_named = tuple.__new__


def _as_charged(totals: Totals, price: Price) -> Price:
    """Return the price with None where its total would pass the ceiling."""
    pairs = zip(totals.amounts, price.amounts, strict=True)
    return Price(tuple(None if asked is None or asked > CEILING - total else asked for total, asked in pairs))
