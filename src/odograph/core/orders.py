"""Names of meters that differ in their Rényi order alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from odograph.core.meters import Meter
from odograph.core.units import text_of, tidy

__all__ = ["named_apart"]


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
