"""Running a step: prices from one record each, and a mechanism that sees only those who take part.

A person's filter keeps its promise only if the step and its prices look nowhere else: these are the conditions that
`Population.run` makes hard to break. A price is found from one record and past outputs. The mechanism is handed the
records of those who take part, and constants; never how many people there are. It is tried on nobody first, because a
step must answer even when everybody has dropped out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from odograph.core.guarantees import KINDS, Guarantee, PureDP
from odograph.errors import InvalidGuarantee
from odograph.population.prices import Prices

__all__ = ["Pricing", "RowWise", "prices_for", "rowwise"]

# Records that are priced once more, alone. If every fifth price depends on others, one run in a thousand misses it.
_TRIED: Final = 32
_SLACK: Final = 1e-9  # by how much a price alone may differ: sums of floats depend on how they are grouped

# A guarantee from one record and the past outputs.
Pricing: TypeAlias = Callable[[Any, Sequence[Any]], Guarantee]


class RowWise:
    """A function from many records to as many sizes, each of which depends on its own record alone."""

    def __init__(self, kind: type[Guarantee], function: Callable[[Any, Sequence[Any]], Any]) -> None:
        self._kind = kind
        self._function = function

    def prices(self, records: Any, outputs: Sequence[Any]) -> Prices:  # noqa: ANN401  an array
        """Return everybody's price, if a few of them are the same when their record is there alone."""
        sizes = self._sizes(records, outputs)
        if sizes.shape != (len(records),):
            raise InvalidGuarantee("prices must be one size for each record; nothing was charged")
        wrong = sizes[~np.isfinite(sizes)]
        if wrong.size:
            raise InvalidGuarantee(
                f"prices must be finite, and one is {wrong[0]}: look for such a number in the records, or in the"
                " function that prices them. Nothing was charged"
            )
        chosen = range(len(sizes))
        for i in SystemRandom().sample(chosen, min(_TRIED, len(sizes))):
            (alone,) = self._sizes(records[i : i + 1], outputs)
            if not abs(alone - sizes[i]) <= _SLACK * abs(sizes[i]):
                raise InvalidGuarantee(
                    "prices must be found from one record and past outputs, and a record that was there alone has"
                    " another price: it depends on other people's records. Nothing was charged"
                )
        return Prices.of(self._kind, sizes)

    def _sizes(self, records: Any, outputs: Sequence[Any]) -> NDArray[np.float64]:  # noqa: ANN401  as above
        return np.asarray(self._function(records, outputs), dtype=np.float64)


def rowwise(kind: type[Guarantee]) -> Callable[[Callable[[Any, Sequence[Any]], Any]], RowWise]:
    """Mark a function that prices an array of records at once, each by itself: it returns sizes of one kind."""
    return lambda function: RowWise(kind, function)


def prices_for(
    pricing: Guarantee | Pricing | RowWise,
    records: Any,  # noqa: ANN401  a sequence or an array
    outputs: Sequence[Any],
) -> Guarantee | Prices:
    """Return what each person is asked for, from their own record and the past outputs."""
    if isinstance(pricing, RowWise):
        return pricing.prices(records, outputs)
    if not callable(pricing):
        return pricing
    places: dict[Guarantee, int] = {}
    which = []
    for record in records:
        found = pricing(record, outputs)
        if not isinstance(found, KINDS):
            raise InvalidGuarantee(
                "prices must be a guarantee, Prices, a function that returns a guarantee for one record, or one"
                " that is marked with @odograph.rowwise(PureDP); this one is not marked, and for a record it returned"
                f" a {type(found).__name__}. Nothing was charged"
            )
        which.append(places.setdefault(found, len(places)))
    return Prices([*places] or [PureDP(0)], which)
