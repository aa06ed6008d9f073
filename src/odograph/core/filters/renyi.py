"""The Rényi filter: one alternative per order, for anything that has a Rényi curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from typing import Any, ClassVar, Final

from odograph.core.conversions import largest_rdp, largest_rho
from odograph.core.fixed_point import Numeric, float_below, last_holding, limit_units, read, text_of, tidy
from odograph.core.guarantees import GDP, RDP, ZCDP, Guarantee, Mechanism
from odograph.core.meters import WITH_EPSILON, Filter, Meter, OrderMeter, Target, distinguish_names
from odograph.errors import InvalidPolicy

__all__ = ["Renyi", "RenyiMeter", "best_order"]

# Orders around the one, a*, that is best for zCDP steps: factors of a* - 1. A share s of delta' costs its order
# log(1/s)/(a - 1), about log(1/s)/10 of its limit, so one order gets nearly all, and more orders would admit less. It
# is a little below a*, because the divergence of a subsampled mechanism rises steeply from some order on. The others,
# with their shares, are for steps that it has no room for.
_MAIN: Final = 0.9
_OTHERS: Final = ((0.25, "1/200"), (0.5, "1/100"), (0.7, "13/200"), (2.0, "1/200"), (16.0, "1/200"))
# What 0.1.0 had instead: its accounts keep their meters.
_SPREAD_OF_0_1: Final = ("1/4", "1/2", "2/3", "2", "4", "16", "64", "256")
_BEST_SHARE_OF_0_1: Final = Fraction(4, 5)


@dataclass(frozen=True, slots=True)
class RenyiMeter(OrderMeter):
    """The sum of Rényi divergences at one order."""

    pricing: ClassVar[str] = "renyi"

    def price(self, guarantee: Guarantee) -> int | None:
        """Sum of Rényi divergences at one order.

        Theorem: the Rényi filter at an order fixed beforehand (Feldman and Zrnic (2021); Whitehouse et al. (2023)).
        Assumes: divergences predictable and valid in both directions; a step's delta is on the delta meter.
        """
        return self.divergence(guarantee)

    price_pure = OrderMeter.price_pure


def _as_tuple(value: object) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidPolicy(f"orders must be a list of pairs (got {value!r:.80})")
    return tuple(value)


@dataclass(frozen=True, slots=True, init=False)
class Renyi(Filter):
    """The Rényi filter. `orders` are its orders with their shares of delta'; the standard ones suit Gaussians."""

    kind: ClassVar[str] = "renyi"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, ZCDP, GDP, RDP, Mechanism)
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"orders": _as_tuple}

    orders: tuple[tuple[Fraction, Fraction], ...]

    def __init__(self, orders: Mapping[Any, Numeric] | Sequence[tuple[Numeric, Numeric]] = ()) -> None:
        object.__setattr__(self, "orders", tuple(_read_orders(orders)))

    def accepts(self, guarantee: Guarantee, neighbors: str) -> bool:
        """Return whether a theorem covers the guarantee under this filter."""
        if isinstance(guarantee, Mechanism):
            # A curve does not state its neighbors; the known ones are for adding or removing a person.
            return guarantee.curve is not None and neighbors == "add-remove"
        return isinstance(guarantee, self.guarantees)

    def takes_curves(self, neighbors: str) -> bool:  # noqa: ARG002  as every filter
        """Return whether steps may come that have a Rényi curve and no intrinsic time."""
        return True

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """One alternative per order, each with its own share of delta'.

        Theorem: the Rényi filter: each order alone, and combining filters: their shares of delta' add up.
        Assumes: orders and shares fixed before the first step; "some order fits" without shares is not safe.
        """
        meters = []
        for order, share in self.orders or _standard_orders(target):
            limit = largest_rdp(float(order), float_below(target.epsilon), float_below(target.delta * share))
            if limit > 0.0:  # else the order is broken from the start, and would never admit anything
                meters.append(RenyiMeter(f"renyi@{float(order):g}", limit_units(limit), order))
        return distinguish_names(meters)

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with this filter's alternatives, or those of 0.1.0; return the others.

        Theorem: as `alternatives`: any orders whose shares add up to at most 1 keep the target.
        Assumes: the orders were fixed before the first step, as those of a stored account were.
        """
        first = Renyi()
        # Not as an argument: for some extreme targets two of these orders are the same, and valid all the same.
        object.__setattr__(first, "orders", tuple(sorted(_orders_of_0_1(target), key=itemgetter(0))))
        stored, then, now = (
            [meter.name for meter in found if isinstance(meter, RenyiMeter)]
            for found in (meters, first.alternatives(target), self.alternatives(target))
        )
        is_first = not self.orders and stored == then != now
        return Filter.check_stored(first if is_first else self, meters, target)

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return 2.0 * largest_rho(epsilon, delta)

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the options."""
        orders = [[text_of(tidy(order)), text_of(tidy(share))] for order, share in self.orders]
        return {"kind": self.kind, "orders": orders}


def _read_orders(orders: object) -> list[tuple[Fraction, Fraction]]:
    """Return the orders and their shares of delta', ascending; raise `InvalidPolicy` if they are not usable."""
    items = [*orders.items()] if isinstance(orders, Mapping) else orders
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise InvalidPolicy(
            f"orders must be a mapping of orders to shares, such as {{4: '1/2', 64: '1/2'}} (got {orders!r})"
        )
    pairs = []
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidPolicy(f"orders must be pairs of an order and its share of delta' (got {item!r})")
        order, share = item
        pairs.append((read(order, "orders", InvalidPolicy), read(share, f"orders[{order!r}]", InvalidPolicy)))
    if len({order for order, _ in pairs}) < len(pairs):
        raise InvalidPolicy(f"orders must be different from each other (got {orders!r})")
    if any(order <= 1 or share == 0 for order, share in pairs) or sum(share for _, share in pairs) > 1:
        raise InvalidPolicy(f"orders must be above 1, with positive shares of at most 1 in all (got {orders!r})")
    return sorted(pairs)


def _standard_orders(target: Target) -> list[tuple[Fraction, Fraction]]:
    epsilon, delta = float_below(target.epsilon), float_below(target.delta)
    excess = best_order(epsilon, delta) - 1.0

    def order(factor: float) -> Fraction:
        return Fraction(round(1.0 + excess * factor, 6))  # any order is valid; a short one can be read

    others = [(order(factor), Fraction(share)) for factor, share in _OTHERS]
    # An order that its share cannot pay for would waste it.
    others = [(at, share) for at, share in others if largest_rdp(float(at), epsilon, delta * float(share)) > 0.0]
    rest = 1 - sum((share for _, share in others), Fraction(0))
    return sorted([(order(_MAIN), rest), *others])


def _orders_of_0_1(target: Target) -> list[tuple[Fraction, Fraction]]:
    epsilon, delta = float_below(target.epsilon), float_below(target.delta)
    best = Fraction(round(best_order(epsilon, delta), 6))
    others = [1 + (best - 1) * Fraction(factor) for factor in _SPREAD_OF_0_1]
    # An order that even all of delta' cannot pay for would waste its share.
    others = [Fraction(round(float(o), 6)) for o in others if largest_rdp(float(o), epsilon, delta) > 0.0]
    rest = 1 - _BEST_SHARE_OF_0_1
    return [(best, _BEST_SHARE_OF_0_1), *((order, rest / len(others)) for order in others)]


def best_order(epsilon: float, delta: float) -> float:
    """Return the order at which rho*-zCDP meets the target: the root of (2a-1) rho = epsilon - log(1-1/a)."""
    rho = largest_rho(epsilon, delta)

    def below(excess: float) -> bool:
        return (1.0 + 2.0 * excess) * rho <= epsilon + math.log1p(1.0 / excess)

    return 1.0 + last_holding(below, 1e-6, 1e12, 1e-6)
