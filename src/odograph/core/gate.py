"""The gate: the only place where a request is admitted. Integer addition and comparison, nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from odograph.core.fixed_point import CEILING, brief_above, brief_below
from odograph.core.guarantees import MOST_DIFFERENT, MOST_POINTS, Mechanism, Parallel, one_shot
from odograph.display import badge, card, meters, one_line, paragraph
from odograph.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from odograph.core.guarantees import Guarantee
    from odograph.core.meters import Meter

__all__ = ["Decision", "Price", "Totals", "decide"]

_LITTLE = Fraction(1, 10_000)  # of a budget
_MUCH = 2  # times nearer: then a refusal is told by that alternative


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


@cache
def _form(amounts: int, unpriced: int) -> str:
    """Return the stored form of totals with so many amounts: at every spend it is filled in, in half the time."""
    return f"%s;{' '.join(['%s'] * amounts)};{' '.join(['%s'] * unpriced)}"


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
        return _form(len(self.amounts), len(self.unpriced)) % (self.steps, *self.amounts, *self.unpriced)

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
    notes: tuple[
        str, ...
    ] = ()  # what an admission changes for later requests, or why no theorem covers a refused one

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
        return {m.name: 0.0 if after.unpriced[i] else float(m.left(after.amounts[i])) for i, m in self._with_limit()}

    def standing(self) -> dict[str, dict[str, Any]]:
        """Return what is spent and left, per meter that has a limit, and whether it counts: had no unpriced step."""
        spent, left, unpriced = self.spent, self.left, self.totals_after.unpriced
        return {
            m.name: {"spent": spent[m.name], "left": left[m.name], "counts": not unpriced[i]}
            for i, m in self._with_limit()
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

    @property
    def is_unproven(self) -> bool:
        """Whether it was refused because no theorem covers the request; `notes` say so."""
        return not self.admitted and all(amount is None for amount in self.price.amounts)

    @property
    def part_left(self) -> float:
        """The part of the budget that is left after the decision, from 0 to 1: of the alternative with most room."""
        return float(max((1 - part for _, part in self._parts(self.totals_after)), default=0))

    @property
    def left_text(self) -> str:
        """The same in words, rounded down."""
        spent = [part for _, part in self._parts(self.totals_after)]
        return _left(1 - min(spent, default=Fraction(1))) if self._has_budget else "no limit"

    def explain(self) -> str:
        """Return the decision, and a line for each meter that has a limit: what was spent, what is asked and left."""
        meters = self._with_limit()
        width = max(len(meter.name) for _, meter in meters)
        return "\n".join([str(self), *(f"  {meter.name:{width}}  {self._line(i, meter)}" for i, meter in meters)])

    def _line(self, i: int, meter: Meter) -> str:
        spent, asked, limit = self.totals.amounts[i], self.price.amounts[i], meter.limit or 0
        if self.totals.unpriced[i]:
            return "no longer counts: an earlier step has no price here"
        before, most = brief_above(spent / meter.scale), brief_below(limit / meter.scale)
        if asked is None:
            return (
                f"{before} of {most} spent; this request has no price here"
                + ", so it no longer counts" * self.admitted
            )
        after = limit - spent - asked
        rest = (
            f"{brief_below(meter.left(spent + asked))} left"
            if after >= 0
            else f"{brief_above(-after / meter.scale)} too much"
        )
        return f"{before} of {most} spent, {brief_above(asked / meter.scale)} asked, {rest}"

    @property
    def _verdict(self) -> str:
        """Whether it was admitted, or by which account it was refused."""
        by = f" by {self.account!r}" if self.account else ""
        return "admitted" if self.admitted else f"refused{by}"

    def __str__(self) -> str:
        return f"{self._verdict}: {self._reason()}"

    def __repr__(self) -> str:
        return one_line("Decision", str(self))

    def _repr_html_(self) -> str:
        label = badge(self._verdict, "good" if self.admitted else "bad")
        return card("Decision", paragraph(self._reason()), meters(self.standing(), self.asked), label=label)

    def _reason(self) -> str:
        """Return what is left, and of a refusal what is missing and what would fit."""
        request = "the request" if self.request is None else self.request.brief()
        if self.admitted:
            return "; ".join([request, self.left_text, *self.notes])
        if self.is_unproven and self.notes:
            return "; ".join(self.notes)
        if self.largest is not None:
            offer = f"The largest that fits is {self.largest.brief(offered=True)}"
        elif not self.searched:
            offer = "A smaller request was not searched for"
        else:
            offer = _no_offer(self.request)
            offer += " any more" * (offer.endswith("fits") and self.totals.steps > 0)
        return f"{self._shortage(request)}. {offer}"

    def _shortage(self, request: str) -> str:
        """Return what there is too little of: delta for the steps, or budget."""
        delta = [self._delta_shortage(request, i, m) for i, m in self._with_limit() if m.counts_delta]
        short = [*filter(None, delta)]
        if not self._has_budget:
            return "; ".join(short) or f"no part of the odometer reads {request} and every step before it"
        parts, asked = [*self._parts(self.totals)], self.price.amounts
        needs = [
            (part, Fraction(amount, self.meters[i].limit or 1))
            for i, part in parts
            if (amount := asked[i]) is not None
        ]
        if not any(part + need <= 1 for part, need in needs):
            short.append(_budget_shortage(request, needs, none_left=not parts))
        return "; ".join(short)

    def _delta_shortage(self, request: str, i: int, meter: Meter) -> str:
        asked, limit = self.price.amounts[i], meter.limit or 0
        left = limit - self.totals.amounts[i]
        if asked is None or asked <= left:
            return ""
        needs = f"{request} needs a delta of {_brief(asked / meter.scale, ROUND_CEILING)}"
        if limit == 0:
            return f"{needs}, and the policy sets none aside for steps (delta_steps is 0)"
        return f"{needs}, and {_brief(left / meter.scale, ROUND_FLOOR)} is left for steps (delta_steps)"

    def _parts(self, totals: Totals) -> Iterator[tuple[int, Fraction]]:
        """Yield the alternatives that still count, each with the part of it that is spent."""
        for i, meter in self._with_limit():
            if meter.limit and not meter.counts_delta and not totals.unpriced[i]:
                yield i, min(Fraction(1), Fraction(totals.amounts[i], meter.limit))

    @property
    def _has_budget(self) -> bool:
        """Whether there is any alternative of a limited size."""
        return any(not meter.counts_delta for _, meter in self._with_limit())

    def _with_limit(self) -> list[tuple[int, Meter]]:
        return [(i, m) for i, m in enumerate(self.meters) if m.limit is not None and m.counted]


def _budget_shortage(request: str, needs: Sequence[tuple[Fraction, Fraction]], *, none_left: bool) -> str:
    """Return what is left and what a request needs, by one alternative that has a price for it.

    What is left is what the account says of itself: by the alternative with most room. Where another comes much
    nearer to admitting the request, what it needs is a part of that one, since the offer is then one that fits there.
    """
    if none_left:
        return _left(Fraction(0))
    if not needs:
        return f"{request} has no price on what still counts of the policy"
    roomiest = chosen = min(needs)
    if roomiest[0] < 1:
        nearest = min([one for one in needs if one[0] < 1], key=_excess)
        chosen = nearest if _MUCH * _excess(nearest) < _excess(roomiest) else roomiest
    left, there = (_percent(1 - part, ROUND_FLOOR) for part, _ in (roomiest, chosen))
    aside = f" ({there} by the meter that comes nearest)" if left != there else ""
    need = _percent(chosen[1], ROUND_CEILING) if chosen[1] >= _LITTLE else "more"
    return f"{_left(1 - roomiest[0])}{aside}; {request} needs {need}"


def _excess(one: tuple[Fraction, Fraction]) -> Fraction:
    """Return how many times what is left a request needs."""
    part, need = one
    return need / (1 - part)


def _left(part: Fraction) -> str:
    return f"{_percent(part, ROUND_FLOOR) if part else 'none'} of the budget is left"


def _percent(part: Fraction, rounding: str) -> str:
    """Write a part by two significant digits of a percent; the last crumbs of a budget have too many zeros."""
    if 0 < part < _LITTLE:
        return "less than 0.01%"
    whole = Context(prec=2, rounding=rounding).divide(100 * part.numerator, part.denominator)
    return f"{whole:,f}%"


def _brief(value: Fraction, rounding: str) -> str:
    """Write a number by four significant digits."""
    return f"{float(Context(prec=4, rounding=rounding).divide(value.numerator, value.denominator)):.4g}"


def _no_offer(request: Guarantee | None) -> str:
    """Return why a refusal has no offer."""
    request = None if request is None else one_shot(request)
    if request is not None and request.kind == "rdp":
        return "A curve has no single size, so no smaller one is offered"
    if isinstance(request, Mechanism) and request.curve and len(request.curve.orders) > MOST_POINTS:
        return f"With a curve of more than {MOST_POINTS} orders a smaller request is not searched for"
    if isinstance(request, Parallel):
        if len(request.different) > MOST_DIFFERENT:
            return f"With more than {MOST_DIFFERENT} different parts a smaller request is not searched for"
        if any(part.kind in ("rdp", "mechanism") for part in request.different):
            return "Parts that are curves or mechanisms have no single size, so no smaller request is offered"
    return "No request of this kind fits"


def decide(meters: tuple[Meter, ...], totals: Totals, price: Price, request: Guarantee | None = None) -> Decision:
    """Return whether the price may be added to the totals, and the totals after it.

    Admitted if the delta meter stays within its limit, and at least one alternative (every other
    meter with a limit) has had no unpriced step and stays within its own. Every admission charges every meter.
    `request` is what the price is of; the decision shows it.

    Theorem: combining filters: admitting while at least one filter holds costs the sum of the filters' shares of
        delta'.
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
