"""Prices of a round: a few guarantees, and which of them each person is asked for.

A guarantee is priced once, by the scalar function that all accounts use, however many people are asked for it.

A price may depend on one's own record and past outputs only. `prices_for` therefore hands a pricing function one
record at a time; a `vectorized_price` function gets all records at once, and a sample of its prices is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import Any, Final, NamedTuple, Self, TypeAlias, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odograph.core.guarantees import SIZED, Guarantee, PureDP
from odograph.core.policy import Compiled
from odograph.errors import InvalidArgument, InvalidGuarantee, type_text
from odograph.population.gate import Gate
from odograph.population.input_tables import Column, array_of, column_of, columns_of, is_loaded_table, take_rows

__all__ = [
    "PriceTable",
    "Prices",
    "Pricing",
    "VectorizedPrice",
    "check_indices",
    "price_table",
    "prices_for",
    "vectorized_price",
]

_BITS: Final = 12
_MAX_BITS: Final = 20  # a million guarantees for every power of two
_SIZE_LIMIT: Final = 2.0**1023  # sizes below it can be rounded up
_MAX_CODES: Final = 1 << 22  # guarantees in one round that are counted in an array; above, they are sorted
# Records whose price is checked alone. If one price in five depends on others, one round in a thousand misses it.
_SAMPLE_SIZE: Final = 32
_SAMPLE_TOLERANCE: Final = 1e-9  # relative: sums of floats depend on how they are grouped

# A guarantee from one record and the past outputs.
Pricing: TypeAlias = Callable[[Any, Sequence[Any]], Guarantee]


class Prices:
    """Which of some guarantees each person is asked for.

    `which` is an index into `guarantees` for each person, in id order. With `ids`, only those people are asked, each
    named once; the others are not charged and take no part. Both are columns: a list, an array, a series of pandas or
    Polars. `table` is both in one: a data frame, an Arrow table or the path of Parquet files, with the columns `id`
    and `which`; the engine 'duckdb' also takes relations, and 'spark' its DataFrames.

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
        self.ids = None if ids is None else column_of(ids, "ids")
        self.which = np.zeros(0, dtype=np.uint32)
        if not self.guarantees or not all(isinstance(one, Guarantee) for one in self.guarantees):
            raise InvalidGuarantee("guarantees must be a list of at least one guarantee, such as [PureDP(0.1)]")
        if (which is None) == (table is None) or (table is not None and ids is not None):
            raise InvalidArgument("pass either which, with or without ids, or a table")
        if which is not None:
            self.which = check_indices(which, len(self.guarantees))
        if self.ids is not None and (getattr(self.ids, "ndim", 1) != 1 or len(self.ids) != len(self.which)):
            raise InvalidArgument("ids must be a list with one id for each entry of which")

    @classmethod
    def of(
        cls,
        kind: type[Guarantee],
        values: ArrayLike | str,
        *,
        ids: ArrayLike | str | None = None,
        table: Any = None,  # noqa: ANN401  a data frame, an Arrow table, the path of Parquet files
        bits: int = _BITS,
    ) -> Self:
        """Ask each person for a guarantee of one kind with a size of their own, such as `Prices.of(GDP, mus)`.

        With a `table`, `values` and `ids` are the names of its columns. Without ids, people are in id order.

        Each size is rounded up to `bits` binary digits, so that there are few distinct guarantees to price. With 12
        bits a charge is at most one part in two thousand too large.
        """
        if table is not None:
            values, ids = _named_columns(table, values, ids)
        # A size that is no field is not what the class takes first: a larger sigma would cost less.
        sized = kind in SIZED.values() and kind.size in kind.__match_args__
        if not sized or kind.kind in ("approx", "prob"):
            raise InvalidGuarantee(f"kind must be PureDP, ZCDP or GDP, which have one size (got {kind!r})")
        if not isinstance(bits, int) or not 1 <= bits <= _MAX_BITS:
            raise InvalidArgument(f"bits must be from 1 to {_MAX_BITS} (got {bits!r})")
        sizes, which = _round_up(_floats(values), bits)
        make = cast("Any", kind)
        return cls([make(size) for size in sizes], which, ids=ids)

    def __repr__(self) -> str:
        return "Prices(...)"  # their number may be the number of people


class PriceTable(NamedTuple):
    """Prices on the columns of a gate: a row of amounts for each guarantee."""

    amounts: NDArray[np.int64]
    which: NDArray[np.unsignedinteger[Any]]
    ids: Column | None
    table: Any
    same: bool  # one guarantee for everyone

    @property
    def dearest(self) -> tuple[int, ...]:
        """The largest amount that any of them adds to each column."""
        return tuple(int(amount) for amount in self.amounts.max(axis=0))


def price_table(compiled: Compiled, gate: Gate, asked: Prices | Guarantee) -> PriceTable:
    """Price each guarantee, or raise what `price` raises."""
    if not isinstance(asked, (Prices, Guarantee)):
        raise InvalidGuarantee(
            "prices must be a guarantee, such as PureDP(0.1), or Prices; `run` also takes functions (got a"
            f" {type(asked).__name__})"
        )
    same = not isinstance(asked, Prices)
    prices = Prices([asked], []) if not isinstance(asked, Prices) else asked
    rows = [gate.amounts(compiled.price(guarantee)) for guarantee in prices.guarantees]
    return PriceTable(np.array(rows, dtype=np.int64), prices.which, prices.ids, prices.table, same)


class VectorizedPrice:
    """A function from many records to as many sizes, each of which depends on its own record alone."""

    def __init__(self, kind: type[Guarantee], function: Callable[[Any, Sequence[Any]], Any]) -> None:
        self._kind = kind
        self._function = function

    def prices(self, records: Any, outputs: Sequence[Any]) -> Prices:  # noqa: ANN401  an array
        """Return each person's price, after checking a random sample of them with their record alone."""
        sizes = self._sizes(records, outputs)
        if sizes.shape != (len(records),):
            raise InvalidGuarantee("prices must be one size for each record")
        wrong = sizes[~np.isfinite(sizes)]
        if wrong.size:
            raise InvalidGuarantee(
                f"prices must be finite (got {wrong[0]}): look for such a number in the records, or in the function"
                " that prices them"
            )
        for i in SystemRandom().sample(range(len(sizes)), min(_SAMPLE_SIZE, len(sizes))):
            one = slice(i, i + 1)
            (alone,) = self._sizes(take_rows(records, one) if is_loaded_table(records) else records[one], outputs)
            if not abs(alone - sizes[i]) <= _SAMPLE_TOLERANCE * abs(sizes[i]):
                raise InvalidGuarantee(
                    "prices must be computed from one record and past outputs, but a record priced alone got another"
                    " price: it depends on other people's records"
                )
        return Prices.of(self._kind, sizes)

    def _sizes(self, records: Any, outputs: Sequence[Any]) -> NDArray[np.float64]:  # noqa: ANN401  as above
        return np.asarray(self._function(records, outputs), dtype=np.float64)


def vectorized_price(kind: type[Guarantee]) -> Callable[[Callable[[Any, Sequence[Any]], Any]], VectorizedPrice]:
    """Mark a function that prices an array of records at once, each by itself: it returns sizes of one kind."""
    return lambda function: VectorizedPrice(kind, function)


def prices_for(
    pricing: Guarantee | Pricing | VectorizedPrice,
    records: Any,  # noqa: ANN401  a sequence or an array
    outputs: Sequence[Any],
) -> Guarantee | Prices:
    """Return what each person is asked for, from their own record and the past outputs."""
    if isinstance(pricing, VectorizedPrice):
        return pricing.prices(records, outputs)
    if not callable(pricing):
        return pricing
    if is_loaded_table(records):
        raise InvalidGuarantee(
            "prices of the rows of a table must be computed from many rows at once: decorate the function with"
            " @odograph.vectorized_price(PureDP), or pass Prices"
        )
    indices: dict[Guarantee, int] = {}
    which = []
    for record in records:
        found = pricing(record, outputs)
        if not isinstance(found, Guarantee):
            raise InvalidGuarantee(
                "prices must be a guarantee, Prices, a function that returns a guarantee for one record, or one that"
                " is decorated with @odograph.vectorized_price(PureDP); this function is not decorated, and for a"
                f" record it returned {type_text(found)}"
            )
        which.append(indices.setdefault(found, len(indices)))
    return Prices([*indices] or [PureDP(0)], which)


def _named_columns(table: Any, values: object, ids: object) -> tuple[Column, Column | None]:  # noqa: ANN401  any table
    if not isinstance(values, str) or not isinstance(ids, str | None):
        raise InvalidArgument("values and ids must be names of columns if a table is passed, such as values='mu'")
    names = [values] if ids is None else [values, ids]
    found = columns_of(table, names)
    return found[values], None if ids is None else found[ids]


def _floats(values: ArrayLike | str) -> NDArray[np.float64]:
    """Return numbers as exactly equal floats, or refuse them."""
    found = array_of(values, "values")
    if not found.size:
        return np.zeros(found.shape)
    exact = found.dtype.kind == "f" and found.dtype.itemsize <= 8
    if found.dtype.kind in "iu":
        exact = int(found.min()) >= -(2**53) and int(found.max()) <= 2**53
    if not exact:
        raise InvalidGuarantee("values must be floats of at most 64 bits, or integers")
    return found.astype(np.float64, copy=False)


def check_indices(which: ArrayLike, count: int) -> NDArray[np.unsignedinteger[Any]]:
    """Return indices into guarantees as small integers, or raise `InvalidArgument`."""
    found = array_of(which, "which")
    if found.size == 0:
        return np.zeros(0, dtype=np.uint32)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InvalidArgument("which must be a list of integers, indices into guarantees")
    if int(found.min()) < 0 or int(found.max()) >= count:
        raise InvalidArgument(f"which must be from 0 to {count - 1}, indices into guarantees")
    small = np.uint8 if count <= 1 << 8 else np.uint16 if count <= 1 << 16 else np.uint32
    return found.astype(small, copy=False)


def _round_up(values: NDArray[np.float64], bits: int) -> tuple[list[float], NDArray[np.uint32]]:
    """Return the distinct sizes, each rounded up to some bits, and the index of each value's size."""
    if values.ndim != 1:
        raise InvalidGuarantee("values must be a list of finite numbers, none negative")
    right = (values >= 0) & (values < _SIZE_LIMIT)
    if not right.all():
        row = int(np.argmin(right))
        what = "NaN" if np.isnan(values[row]) else "negative" if values[row] < 0 else "too large"
        raise InvalidGuarantee(
            f"values must be finite numbers, none negative (row {row}, counted from 0, is {what}): correct it, or"
            " leave the person out by passing ids"
        )
    if not values.size:
        return [0.0], np.zeros(0, dtype=np.uint32)
    mantissas, exponents = np.frexp(values)
    # From 2^(bits-1) to 2^bits: a value rounded up to 2^bits is the least of the next power.
    steps = np.ceil(np.ldexp(mantissas, bits)).astype(np.int64)
    codes = exponents.astype(np.int64) * (1 << bits) + steps
    codes[values == 0] = least = int(codes.min()) - 1
    codes -= least
    if int(codes.max()) >= _MAX_CODES:
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
