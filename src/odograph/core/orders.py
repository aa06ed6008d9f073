"""Rényi orders: those at which a curve is known, and the names of meters that differ in their order alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from odograph.core.meters import Meter
from odograph.core.units import text_of, tidy

__all__ = ["ORDERS", "named_apart"]

# Sixteenths below 4 and eighths below 11, where targets above epsilon 1 have their best order and a curve bends most;
# then integers. They are as dense as dp-accounting's own, so that a plan made at one of these gets the steps that it
# counts, and each is a float exactly, so that a curve is never asked for at a slightly smaller order.
ORDERS: Final = (
    *(1 + sixteenths / 16 for sixteenths in range(1, 48)),
    *(4 + eighths / 8 for eighths in range(56)),
    *map(float, range(11, 65)),
    *(80.0, 96.0, 128.0, 256.0, 512.0, 1024.0),
)


def named_apart(meters: Iterable[Meter]) -> tuple[Meter, ...]:
    """Return the meters; where different ones share a name, it says the whole order instead of six digits of it."""
    found = tuple(meters)
    # Names are stored with an account, so an order that six digits tell apart keeps its short name.
    count = Counter(meter.name for meter in set(found))
    return tuple(
        meter
        if count[meter.name] == 1 or meter.order is None
        else replace(meter, name=f"{meter.clock}@{text_of(tidy(meter.order))}")
        for meter in found
    )
