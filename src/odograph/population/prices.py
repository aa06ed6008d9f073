"""What people are asked for: a few guarantees, and which of them each person is asked for.

A guarantee is priced once, by the same scalar function as everywhere, however many people it is asked of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odograph.core.compiled import Compiled, price
from odograph.core.guarantees import KINDS, SIZED, Guarantee
from odograph.errors import InvalidGuarantee
from odograph.population.kernel import Gate

__all__ = ["Priced", "Prices", "priced"]

_BITS: Final = 12
_MOST_BITS: Final = 20  # a million guarantees for every power of two
_HUGE: Final = 2.0**1023  # so that it can be rounded up
_MOST: Final = 1 << 22  # guarantees in one step


class Prices:
    """Which of some guarantees each person is asked for.

    `which` is a place in `guarantees` for each person, in the order of the ids. With `ids`, only those people are
    asked, each named once; the others are left as they are and take no part. `table` is the same for an engine that
    reads tables: anything with the columns `id` and `which`.

    A price may depend on one's own record and on past outputs, and on nothing else.
    """

    def __init__(
        self,
        guarantees: Sequence[Guarantee],
        which: ArrayLike | None = None,
        *,
        ids: ArrayLike | None = None,
        table: Any = None,  # noqa: ANN401  whatever the engine reads
    ) -> None:
        self.guarantees = tuple(guarantees) if isinstance(guarantees, Sequence) else ()
        self.table = table
        self.ids = None if ids is None else _array(ids, "ids")
        self.which = np.zeros(0, dtype=np.uint32)
        if not self.guarantees or not all(isinstance(one, KINDS) for one in self.guarantees):
            raise InvalidGuarantee("guarantees must be one or more, such as [PureDP(0.1)]; nothing was charged")
        if (which is None) == (table is None) or (table is not None and ids is not None):
            raise InvalidGuarantee("pass either which, perhaps with ids, or a table; nothing was charged")
        if which is not None:
            self.which = _places(which, len(self.guarantees))
        if self.ids is not None and (self.ids.ndim != 1 or len(self.ids) != len(self.which)):
            raise InvalidGuarantee("ids must be a list with one entry for each of which; nothing was charged")

    @classmethod
    def of(cls, kind: type[Guarantee], values: ArrayLike, *, ids: ArrayLike | None = None, bits: int = _BITS) -> Self:
        """Ask each person for a guarantee of one kind and of a size of their own, such as `Prices.of(GDP, mus)`.

        A size is rounded up to `bits` binary digits, by itself, so that there are few different ones to price: with
        12 of them nobody is charged for more than one part in two thousand too much.
        """
        if kind not in SIZED.values() or kind.kind in ("approx", "prob"):
            raise InvalidGuarantee(f"kind must be PureDP, ZCDP or GDP, which have one size, and {kind!r} is not")
        if not isinstance(bits, int) or not 1 <= bits <= _MOST_BITS:
            raise InvalidGuarantee(f"bits must be from 1 to {_MOST_BITS}, and {bits!r} is not")
        sizes, which = _rounded(_floats(values), bits)
        make = cast("Any", kind)
        return cls([make(size) for size in sizes], which, ids=ids)

    def __repr__(self) -> str:
        return "Prices(...)"  # how many there are may be how many people there are


class Priced(NamedTuple):
    """Prices on the columns of a gate: a row of amounts for each guarantee."""

    amounts: NDArray[np.int64]
    which: NDArray[np.unsignedinteger[Any]]
    ids: NDArray[Any] | None
    table: Any
    same: bool  # one guarantee for everybody there is

    @property
    def dearest(self) -> tuple[int, ...]:
        """The most that any of them adds to each column."""
        return tuple(int(amount) for amount in self.amounts.max(axis=0))


def priced(compiled: Compiled, gate: Gate, asked: Prices | Guarantee) -> Priced:
    """Price what is asked for, or raise what `price` raises."""
    if not isinstance(asked, (Prices, *KINDS)):
        raise InvalidGuarantee(
            "prices must be a guarantee, such as PureDP(0.1), or Prices (`run` takes functions too), and a"
            f" {type(asked).__name__} is not; nothing was charged"
        )
    same = not isinstance(asked, Prices)
    prices = Prices([asked], []) if not isinstance(asked, Prices) else asked
    rows = [gate.amounts(price(compiled, guarantee)) for guarantee in prices.guarantees]
    return Priced(np.array(rows, dtype=np.int64), prices.which, prices.ids, prices.table, same)


def _array(values: ArrayLike, field: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError):  # whose text may have values in it
        raise InvalidGuarantee(f"{field} must be a list; nothing was charged") from None


def _floats(values: ArrayLike) -> NDArray[np.float64]:
    """Return numbers as floats that are exactly the same, or refuse them."""
    found = _array(values, "values")
    if not found.size:
        return np.zeros(found.shape)
    exact = found.dtype.kind == "f" and found.dtype.itemsize <= 8
    if found.dtype.kind in "iu":
        exact = int(found.min()) >= -(2**53) and int(found.max()) <= 2**53
    if not exact:
        raise InvalidGuarantee("values must be floats of at most 64 bits, or whole numbers; nothing was charged")
    return found.astype(np.float64, copy=False)


def _places(which: ArrayLike, count: int) -> NDArray[np.unsignedinteger[Any]]:
    found = _array(which, "which")
    if found.size == 0:
        return np.zeros(0, dtype=np.uint32)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InvalidGuarantee("which must be a list of whole numbers: places in guarantees; nothing was charged")
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise InvalidGuarantee(f"which must be from 0 to {count - 1}, places in guarantees; nothing was charged")
    small = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32
    return found.astype(small, copy=False)


def _rounded(values: NDArray[np.float64], bits: int) -> tuple[list[float], NDArray[np.uint32]]:
    """Return the different sizes, each rounded up to some bits, and which one each value has."""
    if values.ndim != 1 or not np.all((values >= 0) & (values < _HUGE)):
        raise InvalidGuarantee(
            "values must be a list of numbers that are finite and not negative; nothing was charged"
        )
    if not values.size:
        return [0.0], np.zeros(0, dtype=np.uint32)
    mantissas, exponents = np.frexp(values)
    # From 2^(bits-1) to 2^bits: what is rounded up to 2^bits is the least of the next power.
    steps = np.ceil(np.ldexp(mantissas, bits)).astype(np.int64)
    codes = exponents.astype(np.int64) * (1 << bits) + steps
    codes[values == 0] = least = int(codes.min()) - 1
    codes -= least
    if int(codes.max()) >= _MOST:
        kinds, which = np.unique(codes, return_inverse=True)
    else:
        there = np.zeros(int(codes.max()) + 1, dtype=np.bool_)
        there[codes] = True
        kinds = np.flatnonzero(there)
        which = (np.cumsum(there) - 1)[codes]
    first = np.zeros(len(kinds), dtype=np.int64)
    first[which] = np.arange(len(values))
    sizes = np.ldexp(steps[first].astype(np.float64), exponents[first].astype(np.int64) - bits)
    return [float(size) for size in sizes], which.astype(np.uint32)
