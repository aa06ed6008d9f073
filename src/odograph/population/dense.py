"""The NumPy engine: people are numbered from 0, and their totals are arrays in files, one per meter.

A charge reads the arrays of the version before a block at a time, and writes those of the next; a meter on which
nobody is charged is linked, not copied. Memory is bounded by the block, and by a byte for each person where somebody
asks who took part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odograph.errors import InvalidGuarantee, InvalidPolicy, LedgerCorrupt
from odograph.population.engines import Site
from odograph.population.files import keep_file, make_file, write_file
from odograph.population.kernel import SPENT, Amounts, Column, Mask, admit, admit_some, admitting
from odograph.population.prices import Priced
from odograph.progress import Progress

__all__ = ["Dense"]

_BLOCK: Final = 1 << 20  # people at a time; a multiple of 8, as a byte tells who of eight took part
_MOST: Final = 1 << 40  # people
_GAP: Final = 1 << 20  # numbers that may be left out between those who are here and those who join

Rows = NDArray[np.int64]


class _State(NamedTuple):
    """What a version says about itself."""

    people: int
    most: tuple[int, ...]  # that anybody can have on each meter


class Dense:
    """See the module."""

    in_order = True

    def create(self, site: Site, after: Path, ids: ArrayLike | int) -> None:
        """Write zeros for the ids 0, 1, 2, ...: pass how many they are, or all of them."""
        people = ids if isinstance(ids, int) else _highest(_rows(ids)) + 1
        if isinstance(ids, bool) or not 0 <= people <= _MOST:
            raise InvalidPolicy(f"ids must be a count from 0 to {_MOST}, or the numbers themselves")
        if not isinstance(ids, int) and people != len(np.unique(_rows(ids))):
            raise InvalidPolicy("ids must be 0, 1, 2, ... without a gap for this engine; 'duckdb' takes any")
        self._write(site, after, _State(people, (0,) * len(site.gate.limits)), lambda _: None)

    def digest(self, site: Site, asked: Priced | ArrayLike) -> str:
        """Return a keyed digest of prices, or of ids."""
        if not isinstance(asked, Priced):
            return site.versions.digest(b"ids", np.unique(_rows(asked)).tobytes())
        amounts = np.ascontiguousarray(asked.amounts)
        parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
        which = asked.which.astype("<u4", copy=False)
        if asked.ids is None:
            return site.versions.digest(*parts, which.tobytes())
        rows = _rows(asked.ids)
        order = np.argsort(rows, kind="stable")
        return site.versions.digest(*parts, rows[order].tobytes(), which[order].tobytes())

    def charge(self, site: Site, before: Path, after: Path, prices: Priced, progress: Progress | None) -> None:
        """Charge a block of people at a time."""
        if prices.table is not None:
            raise InvalidGuarantee("this engine takes which and ids as arrays, not a table; nothing was charged")
        state = _read(before)
        most = tuple([min(SPENT, a + b) for a, b in zip(state.most, prices.dearest, strict=True)])
        if prices.ids is not None:
            self._charge_some(site, before, after, prices, _State(state.people, most), progress)
            return
        if not prices.same and len(prices.which) != state.people:
            raise InvalidGuarantee("which must have one entry for each person, in the order of their ids")
        uniform = [int(amount) for amount in prices.amounts[0]]

        def work(block: _Block) -> None:
            asked: Amounts = uniform
            if not prices.same:
                own = prices.which[block.first : block.first + block.size]
                asked = [column[own] for column in prices.amounts.T]
            block.took = admit(site.gate, block.totals, asked, most)

        self._write(site, after, _State(state.people, most), work, before, prices.dearest, progress)

    def _charge_some(  # noqa: PLR0913, PLR0917  a version, from the one before it
        self, site: Site, before: Path, after: Path, prices: Priced, state: _State, progress: Progress | None
    ) -> None:
        rows, which = _rows(prices.ids), prices.which
        order = np.argsort(rows, kind="stable")
        rows, which = rows[order], which[order]
        if rows.size and bool((rows[1:] == rows[:-1]).any()):
            raise InvalidGuarantee("ids must name each person once; nothing was charged")
        if site.unknown == "join":
            state = state._replace(people=_joined(state.people, rows))

        def work(block: _Block) -> None:
            first, last = np.searchsorted(rows, [block.first, block.first + block.size])
            own, asked = rows[first:last] - block.first, which[first:last]
            block.took[:] = False
            amounts = [column[asked] for column in prices.amounts.T]
            block.took[own] = admit_some(site.gate, block.totals, own, amounts, state.most)

        self._write(site, after, state, work, before, prices.dearest, progress)

    def join(self, site: Site, before: Path, after: Path, ids: ArrayLike) -> None:
        """Grow to the highest id; who was removed is still there, as spent."""
        state = _read(before)
        state = state._replace(people=_joined(state.people, _rows(ids)))
        self._write(site, after, state, lambda _: None, before, (0,) * len(state.most))

    def remove(self, site: Site, before: Path, after: Path, ids: ArrayLike) -> None:
        """Set people to spent on every meter: a number is all that there is of them here."""
        rows = np.unique(_rows(ids))
        spent = (SPENT,) * len(site.gate.limits)

        def work(block: _Block) -> None:
            first, last = np.searchsorted(rows, [block.first, block.first + block.size])
            for column in block.totals:
                column[rows[first:last] - block.first] = SPENT

        self._write(site, after, _State(_read(before).people, spent), work, before, spent)

    def taking_part(self, site: Site, folder: Path) -> Rows:
        """Return the ids of those who took part."""
        return np.flatnonzero(self.mask(site, folder))

    def mask(self, site: Site, folder: Path) -> Mask:  # noqa: ARG002  as engines have it
        """Return who took part."""
        path, people = folder / "took", _read(folder).people
        _check_size(path, -(-people // 8))
        return np.unpackbits(np.fromfile(path, dtype=np.uint8), count=people).view(np.bool_)

    def count(self, site: Site, folder: Path, amounts: Sequence[int]) -> int:
        """Count a block at a time."""
        state, took = _read(folder), self.mask(site, folder)
        olds = [_Old.of(folder / _name(i), state.people) for i in range(len(amounts))]
        found = 0
        for block in _blocks(state.people, olds):
            own = took[block.first : block.first + block.size]
            found += int(np.count_nonzero(admitting(site.gate, block.totals, amounts) & own))
        return found

    def accept(self, records: Any) -> Any:  # noqa: ANN401  an array, a series, or a sequence
        """Return an array or a list: a pandas Series is an array, if its labels are the ids in their order."""
        pandas = sys.modules.get("pandas")  # or it is no Series
        if pandas is not None and isinstance(records, pandas.Series):
            if not records.index.equals(pandas.RangeIndex(len(records))):
                raise InvalidGuarantee(
                    "records must be in the order of ids, and the labels of this Series are not 0, 1, 2, ...: sort it"
                    " by id, or pass records.to_numpy() if it is in that order; nothing was charged"
                )
            return records.to_numpy()
        if isinstance(records, np.ndarray) and records.ndim:
            return records
        if isinstance(records, Sequence) and not isinstance(records, str | bytes | bytearray | memoryview):
            return records if isinstance(records, list) else [*records]
        raise InvalidGuarantee(
            "records must be an array, a list or a pandas Series, with one record for each person in the order of ids"
            f" (got a {type(records).__name__}); nothing was charged. Pass the rows of a table as table.to_numpy();"
            " populations of the engine 'duckdb' take tables with the column id"
        )

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  an array, or a list
        """Return the type of an array and of what is in a row of it; an empty list says nothing of its items."""
        return (type(records), records.dtype, records.shape[1:]) if isinstance(records, np.ndarray) else list

    def nobody(self, records: Any) -> Any:  # noqa: ANN401  an array, or a list
        """Return an empty array or list."""
        return records[:0]

    def check(self, site: Site, folder: Path, records: Any) -> None:  # noqa: ANN401, ARG002  as engines have it
        """Raise unless there is a record for each person."""
        if len(records) != _read(folder).people:
            # How many there are says how many people there are, which is nobody's to see.
            raise InvalidGuarantee(
                "records must be one for each person who is or was here, in the order of ids, and these are more, or"
                " fewer; nothing was charged"
            )

    def records(self, site: Site, folder: Path, records: Any) -> Any:  # noqa: ANN401  an array, or a list
        """Return the rows of an array, or the items of a list, in the order of the ids."""
        mask = self.mask(site, folder)
        return records[mask] if isinstance(records, np.ndarray) else [*compress(records, mask)]

    def _write(  # noqa: PLR0913, PLR0917  a version, from the one before it
        self,
        site: Site,
        after: Path,
        state: _State,
        work: Callable[[_Block], None],
        before: Path | None = None,
        charged: Sequence[int] = (),
        progress: Progress | None = None,
    ) -> None:
        """Write a version: the totals of the one before, zero for those who join, after the work on each block."""
        count = len(site.gate.limits)
        people = 0 if before is None else _read(before).people
        olds = [_Old.of((before or after) / _name(i), people) for i in range(count)]
        linked = [before is not None and people == state.people and not charged[i] for i in range(count)]
        with ExitStack() as stack:
            files = [None if linked[i] else stack.enter_context(make_file(after / _name(i))) for i in range(count)]
            took = stack.enter_context(make_file(after / "took"))
            for block in _blocks(state.people, olds):
                work(block)
                for file, column in zip(files, block.totals, strict=True):
                    if file is not None:
                        file.write(column.data)
                took.write(np.packbits(block.took).data)
                if progress is not None:
                    progress(100 * (block.first + block.size) // state.people, 100)
        for i in range(count):
            if before is not None and linked[i]:
                keep_file(before / _name(i), after / _name(i))
        form = {"form": 1, "people": state.people, "most": state.most}
        write_file(after / "state.json", json.dumps(form).encode())


class _Block:
    """Some people in a row: their totals, to be changed in place, and who took part."""

    def __init__(self, first: int, totals: list[Column]) -> None:
        self.first = first
        self.size = len(totals[0])
        self.totals = totals
        self.took: Mask = np.zeros(self.size, dtype=np.bool_)


class _Old(NamedTuple):
    """An array of a version, as it lies in its file."""

    path: Path
    people: int

    @classmethod
    def of(cls, path: Path, people: int) -> _Old:
        if people:
            _check_size(path, 8 * people)
        return cls(path, people)

    def part(self, first: int, size: int) -> Column:
        """Read some people's totals; zero for those who are new."""
        known = max(0, min(size, self.people - first))
        found = np.fromfile(self.path, np.int64, known, offset=8 * first) if known else np.zeros(0, np.int64)
        return found if known == size else np.concatenate([found, np.zeros(size - known, np.int64)])


def _blocks(people: int, olds: Sequence[_Old]) -> Iterator[_Block]:
    """Walk over everybody: totals as they were, and zero for those who are new."""
    for first in range(0, people, _BLOCK):
        size = min(_BLOCK, people - first)
        yield _Block(first, [old.part(first, size) for old in olds])


def _name(meter: int) -> str:
    return f"total-{meter}"


def _check_size(path: Path, size: int) -> None:
    if path.stat().st_size != size:
        raise LedgerCorrupt(f"{path} is damaged; restore the population from a copy")


def _joined(people: int, rows: Rows) -> int:
    """Return how many people there are once some have joined."""
    after = max(people, _highest(rows) + 1)
    if after - people > _GAP + len(rows):
        raise InvalidGuarantee(
            "ids must be 0, 1, 2, ... for this engine: most numbers between those who are here and those who join are"
            " nobody's; 'duckdb' takes any. Nothing was charged"
        )
    return after


def _read(folder: Path) -> _State:
    try:
        form: dict[str, Any] = json.loads((folder / "state.json").read_text())
        return _State(int(form["people"]), tuple(form["most"]))
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / 'state.json'} is damaged; restore the population from a copy") from None


def _rows(ids: ArrayLike | None) -> Rows:
    found = np.asarray(ids)
    if not found.size:
        return np.zeros(0, dtype=np.int64)
    if (
        found.ndim != 1
        or not np.issubdtype(found.dtype, np.integer)
        or int(found.min()) < 0
        or int(found.max()) >= _MOST
    ):
        raise InvalidGuarantee(f"ids must be whole numbers from 0 to {_MOST - 1} for this engine; 'duckdb' takes any")
    return found.astype(np.int64, copy=False)


def _highest(rows: Rows) -> int:
    return int(rows.max()) if rows.size else -1
