"""The DuckDB engine: people have ids of any kind, and a version is a table in a Parquet file.

A step is one statement that reads the table of the version before and writes the next. What does not fit in memory is
spilled into the new version's own folder, so that a crash leaves nothing that is not cleaned up. Rows have no order.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from odograph.errors import InvalidGuarantee, InvalidPolicy, LedgerCorrupt, LedgerError
from odograph.extras import load
from odograph.population.duck_sql import MARK, charged, fits, keys_of, select, totals_of
from odograph.population.engines import Site
from odograph.population.files import keep_file, make_file, make_folder, write_file
from odograph.population.kernel import SPENT
from odograph.population.prices import Priced
from odograph.progress import Progress

__all__ = ["Duck"]

_duckdb = load("duckdb")

_PEOPLE: Final = "people.parquet"
_REMOVED: Final = "removed.parquet"
_STATE: Final = "state.json"
# Version 2 packs whole numbers by their differences: half the bytes, and as fast to write.
# Without a temporary file, DuckDB writes into the one that is there, which only its owner can read.
_FORMAT: Final = "(FORMAT parquet, PARQUET_VERSION v2, COMPRESSION snappy, USE_TMP_FILE false)"
_SIZES: Final = ("tinyint", "smallint", "integer", "bigint", "hugeint")
_KINDS: Final = {
    **{f"{sign}{size}": "BIGINT" for sign in ("", "u") for size in _SIZES},
    "enum": "VARCHAR",
    "varchar": "VARCHAR",
}
_WORDS: Final = {"BIGINT": "whole numbers of 64 bits", "VARCHAR": "strings"}
_POLL: Final = 0.1  # seconds
_NO_KEYS: Final[Mapping[str, bytes]] = {}


class _Unreachable(LedgerError, OSError):
    """A file could not be read or written; another process may have moved on and cleaned up behind itself."""


class Duck:
    """See the module.

    Ids are whole numbers of 64 bits or strings, whichever come first. They are passed as a list or an array, as the
    path of a Parquet file with a column `id`, or as anything with that column that DuckDB reads: an Arrow table, a
    data frame, a relation. A table of prices has a column `which` beside it. What is passed is read more than once.
    `memory_limit`, such as "4GB", is DuckDB's own choice if it is left out.
    """

    in_order = False

    def __init__(self, memory_limit: str | None = None) -> None:
        self._settings: dict[str, Any] = {
            # A COPY that is stopped, or fails, while it writes in the background can hang in DuckDB 2.0.
            "async_threads": 0,
            "autoinstall_known_extensions": False,
            "preserve_insertion_order": False,
            "python_enable_replacements": False,
        }
        if memory_limit is not None:
            self._settings["memory_limit"] = memory_limit
            try:
                _duckdb.connect(":memory:", config=self._settings).close()
            except (_duckdb.Error, TypeError):
                raise InvalidPolicy(f"memory_limit must be such as '4GB', and {memory_limit!r} is not") from None

    def create(self, site: Site, after: Path, ids: Any) -> None:  # noqa: ANN401  what DuckDB reads
        """Write zeros for each id; 0 or an empty list is nobody."""
        with self._opened(after) as work:
            kind = work.take(ids, None)
            zeros = [f"0::BIGINT AS {total}" for total in totals_of(site)]
            everybody = select(["id", *zeros, "FALSE AS took"], "(SELECT DISTINCT id FROM given)")
            work.write(everybody, after / _PEOPLE)
        _finish(after, kind)

    def digest(self, site: Site, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of prices, or of ids: of the sum of a hash of each row, in whichever order they come.

        The hash is DuckDB's, and may be another in another release of it: a key that is asked again after that is
        refused as another request, and nothing is charged.
        """
        parts, rows, columns = [b"ids"], asked, ["id"]
        if isinstance(asked, Priced):
            amounts = np.ascontiguousarray(asked.amounts)
            parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
            rows, columns = _rows(asked), ["id", "which"]
            if rows is None:
                return site.versions.digest(*parts)
        with self._opened() as work:
            found = work.relation(rows)
            # The same number, or the same text, is the same whatever type a table keeps it in.
            kinds = [_check(found, columns) or "BIGINT", "BIGINT"]
            cast = ", ".join(f"TRY_CAST({name} AS {kind})" for name, kind in zip(columns, kinds, strict=False))
            sums = found.aggregate(f"count(*), sum(hash({cast})), sum(hash(1, {cast}))")
            return site.versions.digest(*parts, str(sums.fetchall()).encode())

    def charge(self, site: Site, before: Path, after: Path, prices: Priced, progress: Progress | None) -> None:
        """Charge people in one pass; if everybody is asked for the same there is nothing to join."""
        kind, rows, keys, amounts = _kind(before), _rows(prices), _NO_KEYS, prices.amounts[0].tolist()
        with self._opened(after) as work:
            if rows is None:
                work.view("people", before / _PEOPLE)
                source, asked = select(["id", *totals_of(site)], "people"), "TRUE"
            else:
                given = work.take(rows, kind, len(prices.amounts))
                beside, asking = ["which"], "given"
                if len(prices.amounts) > 1:  # one amount is written into the query: three columns less to join
                    amounts = beside = [f"amount_{i}" for i in range(len(amounts))]
                    columns = dict(zip(beside, np.asfortranarray(prices.amounts).T, strict=True))
                    work.register("amounts", {"which": np.arange(len(prices.amounts)), **columns})
                    asking = "given JOIN amounts USING (which)"
                asking, asked = select(["id", *beside], asking), f"{beside[0]} IS NOT NULL"
                work.people(before, given)
                if site.unknown == "join":
                    kind = given
                    source, keys = work.joined(site, before, asking, beside)
                else:
                    source = select(["id", *totals_of(site), *beside], f"people LEFT JOIN ({asking}) USING (id)")
            work.write(charged(site, source, asked, amounts), after / _PEOPLE, keys, progress)
        _finish(after, kind, before)

    def join(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Add those who are not there yet."""
        with self._opened(after) as work:
            kind = work.take(ids, _kind(before))
            work.people(before, kind)
            source, keys = work.joined(site, before, "SELECT DISTINCT id FROM given", ["FALSE AS took"])
            work.write(source, after / _PEOPLE, keys)
        _finish(after, kind, before)

    def remove(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Drop people from the table, and keep keyed hashes of their ids."""
        kind = _kind(before)
        with self._opened(after) as work:
            work.people(before, work.take(ids, kind))
            left = select(["id", *totals_of(site), "FALSE AS took"], "people ANTI JOIN given USING (id)")
            work.write(left, after / _PEOPLE)
            marks = select([f"{MARK.format(id='id')} AS mark"], "people SEMI JOIN given USING (id)")
            if (before / _REMOVED).exists():
                work.view("removed", before / _REMOVED)
                marks += " UNION SELECT mark FROM removed"
            work.write(marks, after / _REMOVED, keys_of(site))
        _finish(after, kind)

    def taking_part(self, site: Site, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Return those who took part as a DuckDB relation with a column `id`, which is read when it is used.

        They need not fit in memory: join them where they are, as in `ids.query("active", "SELECT sum(amount) FROM
        active JOIN read_parquet('events.parquet') USING (id)")`. It can be used while its version is kept.
        """
        with _private():
            connection = self._connected(_spill(folder))
            people = connection.read_parquet(str(folder / _PEOPLE), hive_partitioning=False)
            return people.filter("took").project("id")

    def mask(self, site: Site, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Raise `LedgerError`: only dense ids have a mask."""
        raise LedgerError("people of this engine are in no order, so there is no mask of them: use their ids")

    def count(self, site: Site, folder: Path, amounts: Sequence[int]) -> int:
        """Count in one pass."""
        with self._opened() as work:
            work.view("people", folder / _PEOPLE)
            return work.count("people", f"took AND {fits(site, amounts)}")

    def accept(self, records: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return what was passed, if DuckDB reads it as a table."""
        try:
            with self._opened() as work:
                work.relation(records)
        except (LedgerError, RuntimeError):
            if isinstance(records, str | Path):  # a file that is not there, or not Parquet
                raise
            raise InvalidGuarantee(
                "records must be a table with the column id: a data frame, a relation or the path of a Parquet file"
                f" (got a {type(records).__name__}); nothing was charged"
            ) from None
        return records

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  as above
        """Return the names and types of the columns."""
        with self._opened() as work:
            found = work.relation(records)
            return tuple(found.columns), tuple(map(str, found.types))

    def nobody(self, records: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return a relation without rows."""
        with _private():
            return _Work(_duckdb.connect(":memory:", config=self._settings)).relation(records).limit(0)

    def check(self, site: Site, folder: Path, records: Any) -> None:  # noqa: ANN401, ARG002  as above
        """Raise unless records have ids of the population's kind: DuckDB would say so with somebody's id in it."""
        with self._opened() as work:
            own, kind = _check(work.relation(records), ["id"]), _kind(folder)
        if kind is not None and own != kind:
            raise InvalidGuarantee(f"ids of records must be {_WORDS[kind]} for this population; nothing was charged")

    def records(self, site: Site, folder: Path, records: Any) -> Any:  # noqa: ANN401, ARG002  as above
        """Return a DuckDB relation of the records whose `id` took part, which is read when it is used."""
        with _private():
            found = _Work(self._connected(_spill(folder))).relation(records)
            people = str(folder / _PEOPLE).replace("'", "''")
            active = select(["id"], f"read_parquet('{people}', hive_partitioning = false) WHERE took")
            return found.query("records", select(["*"], f"records SEMI JOIN ({active}) USING (id)"))

    def _connected(self, spill: Path | str) -> Any:  # noqa: ANN401  untyped library
        return _duckdb.connect(":memory:", config=self._settings | {"temp_directory": str(spill)})

    @contextmanager
    def _opened(self, after: Path | None = None) -> Iterator[_Work]:
        """Open DuckDB, and let none of its own errors out; a step may spill into the folder that it writes."""
        spill = None if after is None else _spill(after)
        if spill is not None:
            make_folder(spill)  # or DuckDB would, and let others in
        try:
            with _private():
                connection = self._connected(spill or "")
                try:
                    yield _Work(connection, spill)
                finally:
                    connection.close()
        finally:
            if spill is not None:
                shutil.rmtree(spill, ignore_errors=True)


class _Work:
    """One step: a connection, and a folder for what is removed when it is over."""

    def __init__(self, connection: Any, spill: Path | None = None) -> None:  # noqa: ANN401  untyped library
        self._connection = connection
        self._spill = spill
        self.register = connection.register

    def view(self, name: str, path: Path) -> None:
        """Name a file of a version."""
        self._read(path).create_view(name)

    def people(self, before: Path, kind: str | None) -> None:
        """Name the table of a version, whose ids have no kind yet if there was never anybody."""
        self._read(before / _PEOPLE).project(f"* REPLACE (id::{kind or 'BIGINT'} AS id)").create_view("people")

    def _read(self, path: str | Path) -> Any:  # noqa: ANN401  untyped library
        # A folder whose name has a = in it is not a column.
        return self._connection.read_parquet(str(path), hive_partitioning=False)

    def relation(self, asked: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return what was passed as something with columns."""
        if isinstance(asked, _duckdb.DuckDBPyRelation):
            return asked
        if isinstance(asked, str | Path):
            return self._read(asked)
        if hasattr(asked, "read_next_batch") or hasattr(asked, "__next__"):
            raise InvalidGuarantee("pass a table, not a stream: it is read more than once. Nothing was changed")
        if asked is None or isinstance(asked, int | Sequence | np.ndarray):
            asked = {"id": _array(asked)}
        self._connection.register("passed", asked)
        return self._connection.view("passed")

    def take(self, asked: Any, kind: str | None, guarantees: int | None = None) -> str | None:  # noqa: ANN401
        """Make what was passed the view `given`, with ids of the population's kind; return that kind."""
        found = self.relation(asked)
        own = _check(found, ["id"] if guarantees is None else ["id", "which"])
        columns = [f"TRY_CAST(id AS {own or kind or 'BIGINT'}) AS id"]
        checks = ["count(*)", "count(id)"]
        if guarantees is not None:
            columns += ["TRY_CAST(which AS BIGINT) AS which"]
            checks += ["count(which)", "count(DISTINCT id)", "min(which)", "max(which)"]
        found = found.project(", ".join(columns))
        if isinstance(asked, _duckdb.DuckDBPyRelation) and self._spill is not None:
            # It is of another connection, and can be read from this one only as a file.
            copy = self._spill / "given.parquet"
            found.write_parquet(str(copy))
            found = self._read(copy)
        rows, whole, *others = found.aggregate(", ".join(checks)).fetchall()[0]
        if rows and (own is None or own != (kind or own) or whole != rows):
            raise InvalidGuarantee(
                f"ids must be {_WORDS[kind] if kind else ' or '.join(_WORDS.values())} for this population, every one"
                " of them; nothing was changed"
            )
        if rows and guarantees is not None:
            placed, different, least, most = others
            if placed != rows or least < 0 or most >= guarantees:
                raise InvalidGuarantee(
                    f"which must be from 0 to {guarantees - 1}, places in guarantees; nothing was charged"
                )
            if different != rows:
                raise InvalidGuarantee("ids must name each person once; nothing was charged")
        kind = kind or (own if rows else None)
        if not rows:  # of any type: a list that is empty has none of its own
            found = found.limit(0).project(f"* REPLACE (NULL::{kind or 'BIGINT'} AS id)")
        found.create_view("given")
        return kind

    def count(self, table: str, condition: str) -> int:
        """Count rows."""
        return int(self._connection.view(table).filter(condition).aggregate("count(*)").fetchall()[0][0])

    def joined(self, site: Site, before: Path, asked: str, columns: Sequence[str]) -> tuple[str, Mapping[str, bytes]]:
        """Return everybody's totals beside what they are asked for, and the keys that this needs."""
        start, source, keys = "0", f"people FULL JOIN ({asked}) AS asked ON people.id = asked.id", _NO_KEYS
        if (before / _REMOVED).exists():
            self.view("removed", before / _REMOVED)
            start, keys = f"CASE WHEN mark IS NULL THEN 0 ELSE {SPENT} END", keys_of(site)
            mark = MARK.format(id="asked.id")
            source += f" LEFT JOIN removed ON mark = CASE WHEN people.id IS NULL THEN {mark} END"
        totals = [f"coalesce({total}, {start})::BIGINT AS {total}" for total in totals_of(site)]
        return select(["coalesce(people.id, asked.id) AS id", *totals, *columns], source), keys

    def write(
        self, source: str, path: Path, keys: Mapping[str, bytes] = _NO_KEYS, progress: Progress | None = None
    ) -> None:
        """Write what a query finds to a file, and say how far it has come."""
        make_file(path).close()
        statement, values = f"COPY ({source}) TO $path {_FORMAT}", {"path": str(path), **keys}
        if progress is None:
            self._connection.execute(statement, values)
            return
        for setting in ("enable_progress_bar = true", "enable_progress_bar_print = false", "progress_bar_time = 0"):
            self._connection.execute(f"SET {setting}")
        told = 0
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._connection.execute, statement, values)
            try:
                while not wait([running], _POLL).done:
                    percent = min(99, int(self._connection.query_progress()))
                    if percent > told:
                        told = percent
                        progress(told, 100)
            except BaseException:
                self._connection.interrupt()
                raise
        running.result()
        progress(100, 100)


@contextmanager
def _private() -> Iterator[None]:
    """Say in our own words what went wrong: DuckDB's may have somebody's id or total in them."""
    try:
        yield
    except RuntimeError as problem:
        if str(problem) != "Query interrupted":  # so DuckDB says that somebody pressed Ctrl-C
            raise
        raise KeyboardInterrupt from None
    except _duckdb.OutOfMemoryException:
        raise LedgerError(
            "this step needs more memory or room to spill than DuckDB may use; nothing was changed:"
            " pass a larger memory_limit"
        ) from None
    except _duckdb.IOException:
        raise _Unreachable(
            "DuckDB could not read or write a file: see that it is there, is Parquet and that the disk has room;"
            " nothing was changed"
        ) from None
    except _duckdb.Error:
        raise LedgerError(
            "DuckDB could not read what was passed, or a file of the population; nothing was changed. Pass ids as a"
            " list, or a table with the column id, and which beside it for prices"
        ) from None


def _rows(prices: Priced) -> Any:  # noqa: ANN401  what DuckDB reads
    """Return who is asked for what; None if everybody is asked for the same."""
    if prices.same:
        return None
    if prices.table is not None:
        return prices.table
    if prices.ids is None:
        raise InvalidGuarantee("pass ids beside which: people of this engine are in no order. Nothing was charged")
    return {"id": _array(prices.ids), "which": prices.which}


def _array(ids: Any) -> Any:  # noqa: ANN401  an array of anything
    found = np.asarray([] if isinstance(ids, int) and ids == 0 else ids)
    if found.ndim != 1:
        raise InvalidGuarantee("ids must be a list, or a table with the column id; nothing was changed")
    # DuckDB would make a type of its own of an array of strings, with each of them in it.
    return found.astype(object) if found.dtype.kind in "UT" else found


def _check(found: Any, columns: Sequence[str]) -> str | None:  # noqa: ANN401  untyped library
    """Check that columns are there, and return the kind of the ids, if they can be ids."""
    types = {name.lower(): kind.id for name, kind in zip(found.columns, found.types, strict=True)}
    missing = [name for name in columns if name not in types]
    if missing:
        raise InvalidGuarantee(f"a table must have the column {missing[0]!r}; nothing was changed")
    if "which" in columns and _KINDS.get(types["which"]) != "BIGINT":
        raise InvalidGuarantee("which must be whole numbers: places in guarantees; nothing was charged")
    return _KINDS.get(types["id"])


def _spill(folder: Path) -> Path:
    return folder / f"spill-{secrets.token_hex(8)}"


def _kind(folder: Path) -> str | None:
    """Return the type of the ids of a version; None if there was never anybody."""
    try:
        kind = json.loads((folder / _STATE).read_text())["ids"]
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / _STATE} is damaged; restore the population from a copy") from None
    return None if kind is None else str(kind)


def _finish(after: Path, kind: str | None, before: Path | None = None) -> None:
    """Write what a version says of itself, and keep who was removed."""
    if before is not None and (before / _REMOVED).exists():
        keep_file(before / _REMOVED, after / _REMOVED)
    write_file(after / _STATE, json.dumps({"form": 1, "ids": kind}).encode())
