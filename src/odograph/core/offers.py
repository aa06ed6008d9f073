"""Ask the gate in a guarantee's own terms: decide with a counter-offer, the largest that fits, a quote."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from odograph.core.compiled import Compiled, price
from odograph.core.decide import Decision, Price, Totals, decide
from odograph.core.guarantees import (
    GDP,
    KINDS,
    MOST_DIFFERENT,
    MOST_POINTS,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    Parallel,
    ProbDP,
    PureDP,
    exact_of,
)
from odograph.core.units import Numeric
from odograph.errors import InvalidGuarantee, UnprovenComposition

if TYPE_CHECKING:
    from odograph.core.account import Account

__all__ = [
    "G",
    "Quote",
    "ask",
    "how_many",
    "largest",
    "largest_that",
    "listed",
    "offers_of",
    "quote",
    "standing",
    "used",
]

# What an offer is of: a class, or a guarantee whose other fields (delta, name) the offer keeps.
G = TypeVar("G", bound=Guarantee)

# The field that says how large a guarantee is.
_SIZES: Final = {"pure": "epsilon", "approx": "epsilon", "prob": "epsilon", "zcdp": "rho", "gdp": "mu"}

_NEARLY_ONE = 1 - Fraction(1, 10**18)
_DIGITS = 12  # of an offer: more would promise an accuracy that nobody needs, and be hard to read


@dataclass(frozen=True, slots=True)
class Quote:
    """The answer to several requests in order: whether all fit, one decision per request up to the first refusal."""

    admitted: bool
    decisions: tuple[Decision, ...]
    totals_after: Totals  # after all of them if they fit, else unchanged

    def __bool__(self) -> bool:
        return self.admitted

    def __str__(self) -> str:
        if not self.decisions:
            return "admitted: nothing was asked for"
        if self.admitted:
            return f"all {len(self.decisions)} admitted; the last is {self.decisions[-1]}"
        return f"number {len(self.decisions)} is {self.decisions[-1]}"


def ask(compiled: Compiled, totals: Totals, request: Guarantee) -> Decision:
    """Decide a request; a refusal carries the largest request of its kind that would be admitted instead."""
    decision = decide(compiled.meters, totals, price(compiled, request), request)
    return decision if decision.admitted else decision._replace(largest=largest(compiled, totals, request))


def quote(compiled: Compiled, totals: Totals, requests: Iterable[Guarantee]) -> Quote:
    """Decide several costs in order, all or nothing, spending nothing."""
    decisions: list[Decision] = []
    now = totals
    for request in listed(requests, "requests", "ask"):
        decision = ask(compiled, now, request)
        decisions.append(decision)
        if not decision.admitted:
            return Quote(admitted=False, decisions=tuple(decisions), totals_after=totals)
        now = decision.totals_after
    return Quote(admitted=True, decisions=tuple(decisions), totals_after=now)


def listed(costs: Iterable[Guarantee], field: str = "costs", single: str = "decide") -> Iterable[Guarantee]:
    """Return several costs as they are, or say what to call for one."""
    if not isinstance(costs, Iterable):
        raise InvalidGuarantee(
            f"{field} must be a list, such as [PureDP(0.1)], and {costs!r} is not; for one cost use {single}"
        )
    return costs


def how_many(compiled: Compiled, totals: Totals, request: Guarantee) -> int:
    """Return how many requests equal to this one are admitted in a row, at most 10^12."""
    cost = price(compiled, request)

    def refused(count: int) -> bool:
        return not decide(compiled.meters, totals, cost.times(count)).admitted

    # Totals only grow, so once refused is refused for ever, and bisection finds the first refusal.
    return bisect_left(range(10**12), x=True, lo=1, key=refused) - 1


def largest(compiled: Compiled, totals: Totals, kind: type[G] | G, times: int = 1) -> G | None:
    """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

    What is offered is always admitted when asked: the offer is rounded down and run through the gate.
    """
    return largest_that(
        kind, times, lambda g, count: decide(compiled.meters, totals, price(compiled, g).times(count)).admitted
    )


def largest_that(kind: type[G] | G, times: int, admitted: Callable[[Guarantee, int], bool]) -> G | None:
    """Return the largest guarantee of a kind of which `times` equal requests pass every gate in the way."""
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise InvalidGuarantee(f"times must be a whole number from 1, and {times!r} is not")
    make = _maker(kind)
    if make is None:
        return None

    def fits(size: float) -> bool:
        return admitted(make(size), times)

    size = _largest_steps(kind.steps, fits) if isinstance(kind, Mechanism) else _largest_number(fits)
    if size is None:
        return None
    whole = _scaled(kind, whole=True) if isinstance(kind, Parallel) else make
    return None if whole is None else cast("G", whole(size))


def offers_of(account: Account) -> list[Guarantee]:
    """Return the largest next request of each kind that the policy takes, of pure, Gaussian and zCDP ones."""
    found: list[Guarantee] = []
    for kind in (PureDP, GDP, ZCDP):
        try:
            offer = account.largest(kind)
        except UnprovenComposition:
            continue
        if offer is not None:
            found.append(offer)
    return found


def standing(compiled: Compiled, totals: Totals) -> Decision:
    """Ask for nothing, to be told what is spent and left on every meter."""
    return decide(compiled.meters, totals, Price((0,) * len(compiled.meters)))


def used(compiled: Compiled, totals: Totals) -> float:
    """Return the part of the budget that is spent, from 0 to 1: of the alternative with the most room left."""
    parts = [
        1.0 if skipped or not meter.limit else min(1.0, float(Fraction(total, meter.limit)))
        for meter, total, skipped in zip(compiled.meters, totals.amounts, totals.unpriced, strict=True)
        if meter.limit is not None and meter.clock != "delta"
    ]
    return min(parts) if totals.steps else 0.0


def _maker(kind: object) -> Callable[[Numeric], Guarantee] | None:
    """Return how to make a guarantee of the kind from its size; None where it has no one size, or is long to price.

    A search prices some fifty requests, and a request may come from a stranger: so parts and points are bounded.
    """
    if isinstance(kind, type):
        if kind in (RDP, Mechanism, Parallel):
            return None
        kind = kind(1, 0) if kind in (ApproxDP, ProbDP) else kind(1) if kind in (PureDP, ZCDP, GDP) else kind
    if not isinstance(kind, KINDS):
        raise InvalidGuarantee(f"{kind!r} is no kind of guarantee; pass PureDP, ZCDP, GDP, or a guarantee")
    if isinstance(kind, Mechanism):
        long = kind.curve is not None and len(kind.curve.orders) > MOST_POINTS
        return None if long else partial(_fewer_steps, kind)
    if isinstance(kind, Parallel):
        return _scaled(kind)
    return _resized(kind, _SIZES[kind.kind]) if kind.kind in _SIZES else None


def _resized(kind: Guarantee, field: str) -> Callable[[Numeric], Guarantee]:
    return lambda size: replace(kind, **{field: size})  # type: ignore[arg-type]


def _scaled(kind: Parallel, *, whole: bool = False) -> Callable[[Numeric], Guarantee] | None:
    """Return how to make all the parts smaller together, by the size of the largest; None where that is not offered.

    Without `whole` equal parts are made twice at most, which costs the same: a price reads no more of them. A
    histogram has thousands of equal parts, and the search prices it dozens of times.
    """
    different = kind.different
    if len(different) > MOST_DIFFERENT or any(part.kind not in _SIZES for part in different):
        return None
    sizes = {part: exact_of(getattr(part, _SIZES[part.kind])) for part in different}
    most = max(sizes.values())
    parts = kind.parts if whole else [part for part, count in different.items() for _ in range(min(count, 2))]
    objects = {id(part): part for part in parts}

    def make(size: Numeric) -> Guarantee:
        factor = exact_of(size) / most
        smaller = {
            part: _resized(part, _SIZES[part.kind])(_float_within(own * factor)) for part, own in sizes.items()
        }
        made = {key: smaller[part] for key, part in objects.items()}
        return Parallel(tuple([made[id(part)] for part in parts]))

    return make if most else None


def _float_within(exact: Fraction) -> float:
    """Return a float that is no larger: the product itself may be too long to be kept exactly."""
    near = float(exact)
    return near if exact_of(near) <= exact else math.nextafter(near, 0.0)


def _fewer_steps(kind: Mechanism, steps: Numeric) -> Mechanism:
    """Return another number of runs of the same mechanism; its curve and delta grow with the runs."""
    curve, count = kind.curve, int(steps)
    if curve is not None:
        more = Fraction(count, kind.steps)
        values = tuple(exact_of(value) * more for value in curve.values)
        # Fewer runs have no more delta than all of them; more have in proportion, and at 1 there is none to offer.
        delta = exact_of(curve.delta) * max(more, Fraction(1))
        curve = RDP(curve.orders, values, min(delta, _NEARLY_ONE))
    return Mechanism(kind.name, count, curve)


def _largest_number(fits: Callable[[float], bool]) -> float | None:
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2.0 * high
        if high > 1e9:  # a policy so loose that nothing is refused: any number is an honest offer
            return low
    while high - low > high * 10.0**-_DIGITS:
        middle = 0.5 * (low + high)
        if middle < 1e-18:  # under the smallest unit of every clock
            return None
        low, high = (middle, high) if fits(middle) else (low, middle)
    offer = _rounded_down(low)
    short = float(f"{low:.{_DIGITS - 2}g}")  # 0.4 rather than 0.399999999999, where it fits
    if short > offer and fits(short):
        return short
    # Prices are padded floats, so fitting is monotone up to the last digits; the gate has the last word.
    while not fits(offer):
        offer = _rounded_down(offer * (1.0 - 10.0 ** (1 - _DIGITS)))
    return offer


def _largest_steps(asked: int, fits: Callable[[float], bool]) -> int | None:
    """Return how many runs fit, at most 10^12; the search begins at the number that was asked for."""
    try:
        if not fits(1):
            return None
    except UnprovenComposition:
        return None
    low, high = 1, max(2, asked)
    while fits(high) and high < 10**12:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rounded_down(value: float) -> float:
    """Return a positive value cut to `_DIGITS` significant digits."""
    scale = _DIGITS - 1 - math.floor(math.log10(value))
    return float(f"{math.floor(value * 10.0**scale)}e{-scale}")
