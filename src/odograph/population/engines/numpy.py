"""The NumPy engine: people are numbered from 0, and their totals are arrays in files, one per meter.

A charge reads the arrays of the previous version a chunk at a time and writes those of the next. The file of a meter
without any charge is linked, not copied. Memory is bounded by the chunk, plus one byte per person where the
participants are asked for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odograph.display import Progress
from odograph.errors import InvalidArgument, LedgerCorrupt, type_text
from odograph.population.engines import EngineContext
from odograph.population.gate import SPENT, Amounts, Column, Mask, admit, admit_rows, would_admit
from odograph.population.input_tables import (
    array_of,
    column_of,
    columns_of,
    is_arrow,
    is_column,
    is_loaded_table,
    is_table,
    load_table,
    repeated_rows,
    take_rows,
)
from odograph.population.prices import PriceTable, check_indices
from odograph.population.version_store import link_or_copy, make_file, write_file

__all__ = ["NumpyEngine"]

_CHUNK_SIZE: Final = 1 << 20  # people at a time; a multiple of 8, because a byte of `took` holds eight people
_MAX_PEOPLE: Final = 1 << 40
_MAX_ID_GAP: Final = 1 << 20  # unused ids that may be left between the people who are here and those who join

IdArray = NDArray[np.int64]


class _State(NamedTuple):
    """The description of a version, stored in its state.json."""

    people: int
    most: tuple[int, ...]  # an upper bound on the totals of each meter


class NumpyEngine:
    """See the module."""

    ordered = True

    def create(self, context: EngineContext, after: Path, ids: ArrayLike | int) -> None:
        """Write zeros for the ids 0, 1, 2, ...: `ids` is their number, or all of them."""
        ids = int(ids) if isinstance(ids, np.integer) else ids
        is_wrong = isinstance(ids, bool | float)
        people = -1 if is_wrong else ids if isinstance(ids, int) else _highest_id(_id_array(ids)) + 1
        if not 0 <= people <= _MAX_PEOPLE:
            raise InvalidArgument(f"ids must be a count from 0 to {_MAX_PEOPLE}, or a list of the ids (got {ids!r})")
        if not isinstance(ids, int) and people != len(_distinct(_id_array(ids))):
            raise InvalidArgument("ids must be 0, 1, 2, ... without gaps for this engine; 'duckdb' takes any")
        self._write(context, after, _State(people, (0,) * len(context.gate.limits)), lambda _: None)

    def digest(self, context: EngineContext, asked: PriceTable | ArrayLike) -> str:
        """Return a keyed digest of prices, or of ids."""
        if not isinstance(asked, PriceTable):
            return context.versions.digest(b"ids", _distinct(_id_array(asked)).tobytes())
        amounts = np.ascontiguousarray(asked.amounts)
        parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
        asked = _with_columns(asked)
        which = asked.which.astype("<u4", copy=False)
        if asked.ids is None:
            return context.versions.digest(*parts, which.tobytes())
        rows = _id_array(asked.ids)
        order = np.argsort(rows, kind="stable")
        return context.versions.digest(*parts, rows[order].tobytes(), which[order].tobytes())

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        """Charge a chunk of people at a time."""
        prices, state = _with_columns(prices), _read_state(before)
        most = tuple([min(SPENT, a + b) for a, b in zip(state.most, prices.dearest, strict=True)])
        if prices.ids is not None:
            self._charge_some(context, before, after, prices, _State(state.people, most), progress)
            return
        if not prices.same and len(prices.which) != state.people:
            raise InvalidArgument("which must have one entry for each person, in id order")
        uniform = [int(amount) for amount in prices.amounts[0]]

        def work(chunk: _Chunk) -> None:
            asked: Amounts = uniform
            if not prices.same:
                own = prices.which[chunk.first : chunk.first + chunk.size]
                asked = [column[own] for column in prices.amounts.T]
            chunk.took = admit(context.gate, chunk.totals, asked, most)

        self._write(context, after, _State(state.people, most), work, before, prices.dearest, progress)

    def _charge_some(  # noqa: PLR0913, PLR0917  a version, from the one before it
        self,
        context: EngineContext,
        before: Path,
        after: Path,
        prices: PriceTable,
        state: _State,
        progress: Progress | None,
    ) -> None:
        rows, which = _id_array(prices.ids), prices.which
        order = np.argsort(rows, kind="stable")
        _check_different(rows)
        rows, which = rows[order], which[order]
        if context.unknown == "join":
            state = state._replace(people=_count_after_join(state.people, rows))

        def work(chunk: _Chunk) -> None:
            first, last = np.searchsorted(rows, [chunk.first, chunk.first + chunk.size])
            own, asked = rows[first:last] - chunk.first, which[first:last]
            chunk.took[:] = False
            amounts = [column[asked] for column in prices.amounts.T]
            chunk.took[own] = admit_rows(context.gate, chunk.totals, own, amounts, state.most)

        self._write(context, after, state, work, before, prices.dearest, progress)

    def join(self, context: EngineContext, before: Path, after: Path, ids: ArrayLike) -> None:
        """Grow to the highest id; people who were removed are still there, as spent."""
        state = _read_state(before)
        state = state._replace(people=_count_after_join(state.people, _id_array(ids)))
        self._write(context, after, state, lambda _: None, before, (0,) * len(state.most))

    def remove(self, context: EngineContext, before: Path, after: Path, ids: ArrayLike) -> None:
        """Set people to spent on every meter: this engine keeps nothing else about them."""
        rows = _distinct(_id_array(ids))
        spent = (SPENT,) * len(context.gate.limits)

        def work(chunk: _Chunk) -> None:
            first, last = np.searchsorted(rows, [chunk.first, chunk.first + chunk.size])
            for column in chunk.totals:
                column[rows[first:last] - chunk.first] = SPENT

        self._write(context, after, _State(_read_state(before).people, spent), work, before, spent)

    def renew(self, context: EngineContext, before: Path, after: Path) -> None:
        """Set everyone to zero who was not removed; only their first total, of delta, passes every limit."""
        state = _read_state(before)
        width = len(state.most)

        def work(chunk: _Chunk) -> None:
            removed = chunk.totals[0] == SPENT
            for column in chunk.totals:
                np.multiply(removed, SPENT, out=column)

        state = state._replace(most=tuple([SPENT if SPENT in state.most else 0] * width))
        self._write(context, after, state, work, before, (SPENT,) * width)

    def participants(self, context: EngineContext, folder: Path) -> IdArray:
        """Return the ids of the participants."""
        return np.flatnonzero(self.mask(context, folder))

    def mask(self, context: EngineContext, folder: Path) -> Mask:  # noqa: ARG002  as engines have it
        """Return the mask of the participants."""
        path, people = folder / "took", _read_state(folder).people
        _check_size(path, -(-people // 8))
        return np.unpackbits(np.fromfile(path, dtype=np.uint8), count=people).view(np.bool_)

    def count(self, context: EngineContext, folder: Path, amounts: Sequence[int]) -> int:
        """Count a chunk at a time."""
        state, took = _read_state(folder), self.mask(context, folder)
        stored = [_StoredTotals.of(folder / _file_name(i), state.people) for i in range(len(amounts))]
        found = 0
        for chunk in _chunks(state.people, stored):
            own = took[chunk.first : chunk.first + chunk.size]
            found += int(np.count_nonzero(would_admit(context.gate, chunk.totals, amounts) & own))
        return found

    def accept(self, records: Any) -> Any:  # noqa: ANN401  an array, a series, a sequence, a table
        """Return an array, a list, or a table in id order; a series becomes an array.

        The labels of a pandas Series must be the ids in order. A table has a column `id`; files and columns by name
        become an Arrow table.
        """
        pandas = sys.modules.get("pandas")  # if it was never imported, there is no Series
        if pandas is not None and isinstance(records, pandas.Series):
            if not records.index.equals(pandas.RangeIndex(len(records))):
                raise InvalidArgument(
                    "records must be in id order, but the labels of this Series are not 0, 1, 2, ...: sort it by id,"
                    " or pass records.to_numpy() if it is in that order"
                )
            return records.to_numpy()
        if isinstance(records, np.ndarray) and records.ndim:
            return records
        if isinstance(records, Sequence) and not isinstance(records, str | bytes | bytearray | memoryview):
            return records if isinstance(records, list) else [*records]
        if is_column(records) and is_arrow(records):
            return array_of(records, "records")
        if is_table(records) and not isinstance(records, Mapping):
            return _in_id_order(load_table(records, "records"))
        raise InvalidArgument(
            "records must be an array, a list or a series, with one record for each person in id order, or a data"
            f" frame, an Arrow table or a path of Parquet files, with the column id (got {type_text(records)})"
        )

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  an array, a list, a table
        """Return the type of an array and of its rows, or of a table's columns; nothing about the items of a list."""
        if is_loaded_table(records):
            schema = getattr(records, "schema", None)
            return type(records), repr(schema if schema is not None else [*records.dtypes.items()])
        return (type(records), records.dtype, records.shape[1:]) if isinstance(records, np.ndarray) else list

    def empty(self, records: Any) -> Any:  # noqa: ANN401  as above
        """Return records without any rows."""
        return take_rows(records, slice(0)) if is_loaded_table(records) else records[:0]

    def check(self, context: EngineContext, folder: Path, records: Any) -> None:  # noqa: ANN401, ARG002  as engines have it
        """Raise unless there is a record for each person."""
        if len(records) != _read_state(folder).people:
            # The message has no numbers: the number of people is private.
            raise InvalidArgument(
                "records must have exactly one row per id, in id order, including people who were removed (got more,"
                " or fewer)"
            )

    def records(self, context: EngineContext, folder: Path, records: Any) -> Any:  # noqa: ANN401  as above
        """Return the participants' rows of an array or a table, or items of a list, in id order."""
        mask = self.mask(context, folder)
        if is_loaded_table(records):
            return take_rows(records, mask)
        return records[mask] if isinstance(records, np.ndarray) else [*compress(records, mask)]

    def _write(  # noqa: PLR0913, PLR0917  a version, from the one before it
        self,
        context: EngineContext,
        after: Path,
        state: _State,
        work: Callable[[_Chunk], None],
        before: Path | None = None,
        charged: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> None:
        """Write a version: the previous totals, or zeros for new people, after `work` has changed each chunk."""
        count = len(context.gate.limits)
        people = 0 if before is None else _read_state(before).people
        stored = [_StoredTotals.of((before or after) / _file_name(i), people) for i in range(count)]
        linked = [before is not None and people == state.people and not charged[i] for i in range(count)]
        with ExitStack() as stack:
            files = [
                None if linked[i] else stack.enter_context(make_file(after / _file_name(i))) for i in range(count)
            ]
            took = stack.enter_context(make_file(after / "took"))
            for chunk in _chunks(state.people, stored):
                work(chunk)
                for file, column in zip(files, chunk.totals, strict=True):
                    if file is not None:
                        file.write(column.data)
                took.write(np.packbits(chunk.took).data)
                if progress is not None:
                    progress(100 * (chunk.first + chunk.size) // state.people, 100)
        for i in range(count):
            if before is not None and linked[i]:
                link_or_copy(before / _file_name(i), after / _file_name(i))
        form = {"form": 1, "people": state.people, "most": state.most}
        write_file(after / "state.json", json.dumps(form).encode())


class _Chunk:
    """Some consecutive people: their totals, to be changed in place, and the mask of who took part."""

    def __init__(self, first: int, totals: list[Column]) -> None:
        self.first = first
        self.size = len(totals[0])
        self.totals = totals
        self.took: Mask = np.zeros(self.size, dtype=np.bool_)


class _StoredTotals(NamedTuple):
    """The totals on one meter, in the file of a version."""

    path: Path
    people: int

    @classmethod
    def of(cls, path: Path, people: int) -> _StoredTotals:
        if people:
            _check_size(path, 8 * people)
        return cls(path, people)

    def part(self, first: int, size: int) -> Column:
        """Read the totals of some people; zero for new ones."""
        known = max(0, min(size, self.people - first))
        found = np.fromfile(self.path, np.int64, known, offset=8 * first) if known else np.zeros(0, np.int64)
        return found if known == size else np.concatenate([found, np.zeros(size - known, np.int64)])


def _chunks(people: int, stored: Sequence[_StoredTotals]) -> Iterator[_Chunk]:
    """Yield all people in chunks: their stored totals, and zero for new people."""
    for first in range(0, people, _CHUNK_SIZE):
        size = min(_CHUNK_SIZE, people - first)
        yield _Chunk(first, [one.part(first, size) for one in stored])


def _file_name(meter: int) -> str:
    return f"total-{meter}"


def _check_size(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        raise LedgerCorrupt(f"{path} is damaged; restore the population from a backup")


def _count_after_join(people: int, rows: IdArray) -> int:
    """Return the number of people after some have joined."""
    after = max(people, _highest_id(rows) + 1)
    if after - people > _MAX_ID_GAP + len(rows):
        raise InvalidArgument(
            "ids must be 0, 1, 2, ... for this engine, but most numbers between the people who are here and those who"
            " join are unused; 'duckdb' takes any ids"
        )
    return after


def _read_state(folder: Path) -> _State:
    try:
        form: dict[str, Any] = json.loads((folder / "state.json").read_text())
        return _State(int(form["people"]), tuple(form["most"]))
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / 'state.json'} is damaged; restore the population from a backup") from None


def _with_columns(prices: PriceTable) -> PriceTable:
    """Return prices with the columns of their table, if they have one."""
    if prices.table is None:
        return prices
    found = columns_of(prices.table, ["id", "which"])
    which = check_indices(found["which"], len(prices.amounts))
    return prices._replace(ids=found["id"], which=which, table=None)


def _in_id_order(records: Any) -> Any:  # noqa: ANN401  a table
    """Return a table with its rows in the order of its ids, which must be 0, 1, 2, ..."""
    rows = _id_array(columns_of(records, ["id"], "records")["id"])
    _check_different(rows)
    if rows.size and int(rows.max()) >= len(rows):
        raise InvalidArgument(
            "records must have exactly one row per id, including people who were removed, but ids are missing in the"
            " column 'id'"
        )
    ordered = bool((rows[1:] > rows[:-1]).all())
    return records if ordered else take_rows(records, np.argsort(rows, kind="stable"))


def _check_different(rows: IdArray) -> None:
    same = repeated_rows(rows)
    if same is not None:
        raise InvalidArgument(
            f"ids must name each person once (rows {same[0]} and {same[1]}, counted from 0, have the same id): leave"
            " one of them out"
        )


def _id_array(ids: Any) -> IdArray:  # noqa: ANN401  a column, or a table with the column id
    found = columns_of(ids, ["id"])["id"] if is_table(ids) else column_of(() if ids is None else ids, "ids")
    if isinstance(found, np.ndarray) and not found.ndim:
        raise InvalidArgument(f"ids must be a list, an array, a series or a table (got {type_text(ids)})")
    if not len(found):
        return np.zeros(0, dtype=np.int64)
    problem = "they are no integers"
    if isinstance(found, np.ndarray) and found.ndim == 1 and np.issubdtype(found.dtype, np.integer):
        right = (found >= 0) & (found < _MAX_PEOPLE)
        if right.all():
            return found.astype(np.int64, copy=False)
        problem = f"row {int(np.argmin(right))}, counted from 0, is another number"
    elif isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind == "f":
        problem = "they are floats; a column of pandas with missing values is one"
    raise InvalidArgument(
        f"ids must be integers from 0 to {_MAX_PEOPLE - 1} for this engine ({problem}); 'duckdb' takes any ids"
    )


def _distinct(rows: IdArray) -> IdArray:
    """Return ids in order, each once, as `np.unique` does, which hashes them: that takes a hundred times as long."""
    ordered = np.sort(rows)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]  # no id is -1


def _highest_id(rows: IdArray) -> int:
    return int(rows.max()) if rows.size else -1
