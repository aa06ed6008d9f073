"""The DuckDB engine: people have ids of any kind, and a version is a table in a Parquet file.

A round is one statement that reads the table of the previous version and writes the next. What does not fit in memory
spills into the new version's own folder, which is cleaned up after a crash. Rows have no order.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from odograph.display import Progress
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError, load_extra, type_text
from odograph.population.engines import EngineContext
from odograph.population.gate import SPENT
from odograph.population.input_tables import (
    Column,
    arrow_table,
    check_names,
    column_of,
    is_column,
    is_table,
    parquet_files,
)
from odograph.population.prices import PriceTable
from odograph.population.version_store import link_or_copy, make_file, make_folder, write_file

__all__ = ["DuckDBEngine", "UploadedTable", "write_upload"]

_duckdb = load_extra("duckdb")

_PEOPLE: Final = "people.parquet"
_REMOVED: Final = "removed.parquet"
_STATE: Final = "state.json"
# Version 2 packs integers by their differences: half the bytes, and as fast to write.
# Without a temporary file, DuckDB writes into the existing file, which only its owner can read.
_FORMAT: Final = "(FORMAT parquet, PARQUET_VERSION v2, COMPRESSION snappy, USE_TMP_FILE false)"
_SIZES: Final = ("tinyint", "smallint", "integer", "bigint", "hugeint")
_ID_TYPES: Final = {
    **{f"{sign}{size}": "BIGINT" for sign in ("", "u") for size in _SIZES},
    "enum": "VARCHAR",
    "varchar": "VARCHAR",
    "uuid": "UUID",
    "blob": "UUID",  # of 16 bytes
}
_TYPE_NAMES: Final = {"BIGINT": "integers of 64 bits", "VARCHAR": "strings", "UUID": "UUIDs"}
_KINDS: Final = "integers of 64 bits, strings or UUIDs"
# A UUID from the text or the bytes in a column: Python's uuid.UUID takes the same spellings.
_UUID: Final = {
    "VARCHAR": "TRY_CAST(regexp_replace(id::VARCHAR, '^urn:uuid:', '', 'i') AS UUID)",
    "BLOB": "TRY_CAST(hex(id) AS UUID)",
    "UUID": "id",
}
# Equal ids have equal texts: one that spells a UUID is spelled in one way.
_TEXT: Final = {
    "BIGINT": "TRY_CAST(id AS BIGINT)",
    "VARCHAR": f"CASE WHEN length(id::VARCHAR) < 32 THEN id ELSE coalesce({_UUID['VARCHAR']}::VARCHAR, id) END",
    "BLOB": f"{_UUID['BLOB']}::VARCHAR",
    "UUID": "id::VARCHAR",
}
_LENGTH: Final = {"VARCHAR": "strlen(id::VARCHAR)", "BLOB": "octet_length(id)"}
_MAX_ID_BYTES: Final = 1 << 36  # of the ids in a file that is sent: 10^9 UUIDs as text have half of that
_POLL_INTERVAL: Final = 0.1  # seconds
_NO_KEYS: Final[Mapping[str, bytes]] = {}
_INTERRUPTED: Final = "Query interrupted"  # how DuckDB reports Ctrl-C
_SHA256_BLOCK: Final = 64  # bytes
# HMAC-SHA256 of an id, from the padded keys of the inner and the outer hash.
_MARK: Final = "unhex(sha256($outer::BLOB || unhex(sha256($inner::BLOB || encode({id}::VARCHAR)))))"


class _Unreachable(LedgerError, OSError):
    """A file could not be read or written; another process may have removed it after writing the next version."""


class DuckDBEngine:
    """An engine on DuckDB, with totals in one Parquet file.

    Ids are integers of 64 bits, strings or UUIDs: the first ids decide which. UUIDs are objects, or columns of UUIDs
    or of 16 bytes each; in a population of UUIDs, text is read as one.

    Ids are passed as a list, an array or a series, as a path of Parquet files with a column `id`, or as anything with
    that column that DuckDB reads: an Arrow table, a data frame, a relation. A table of prices also has a column
    `which`. Input is read more than once. Without a `memory_limit`, such as "4GB", DuckDB chooses one.
    """

    ordered = False

    def __init__(self, memory_limit: str | None = None) -> None:
        self._settings: dict[str, Any] = {
            # A COPY that is stopped or fails while it writes in the background can hang in DuckDB 2.0.
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
                raise InvalidArgument(f"memory_limit must be a size such as '4GB' (got {memory_limit!r})") from None

    def create(self, context: EngineContext, after: Path, ids: Any) -> None:  # noqa: ANN401  what DuckDB reads
        """Write zeros for each id; 0 or an empty list makes an empty population."""
        with self._open(after) as connection:
            kind = connection.take(ids, None)
            zeros = [f"0::BIGINT AS {total}" for total in _total_columns(context)]
            everybody = _select(["id", *zeros, "FALSE AS took"], "(SELECT DISTINCT id FROM given)")
            connection.write(everybody, after / _PEOPLE)
        _write_state(after, kind)

    def digest(self, context: EngineContext, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of prices or ids: of the sum of a hash of each row, whatever their order.

        The hash is DuckDB's, and may change with its release: a key repeated after such a change is refused as a
        different request, and nothing is charged.
        """
        parts, rows, columns = [b"ids"], asked, ["id"]
        if isinstance(asked, PriceTable):
            amounts = np.ascontiguousarray(asked.amounts)
            parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
            rows, columns = _asked_rows(asked), ["id", "which"]
            if rows is None:
                return context.versions.digest(*parts)
        with self._open() as connection:
            found = connection.relation(rows)
            # Equal ids hash equally whatever type a table stores them in.
            cast = ", ".join([_TEXT[_check_columns(found, columns)[1]], "TRY_CAST(which AS BIGINT)"][: len(columns)])
            sums = found.aggregate(f"count(*), sum(hash({cast})), sum(hash(1, {cast}))")
            return context.versions.digest(*parts, str(sums.fetchall()).encode())

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        """Charge people in one pass, without a join if everyone is asked for the same."""
        kind, rows, keys, amounts = _id_type(before), _asked_rows(prices), _NO_KEYS, prices.amounts[0].tolist()
        with self._open(after) as connection:
            if rows is None:
                connection.view("people", before / _PEOPLE)
                source, asked = _select(["id", *_total_columns(context)], "people"), "TRUE"
            else:
                given = connection.take(rows, kind, len(prices.amounts))
                beside, asking = ["which"], "given"
                if len(prices.amounts) > 1:  # a single amount is part of the query: three fewer columns to join
                    amounts = beside = [f"amount_{i}" for i in range(len(amounts))]
                    columns = dict(zip(beside, np.asfortranarray(prices.amounts).T, strict=True))
                    connection.register("amounts", {"which": np.arange(len(prices.amounts)), **columns})
                    asking = "given JOIN amounts USING (which)"
                asking, asked = _select(["id", *beside], asking), f"{beside[0]} IS NOT NULL"
                connection.people(before, given)
                if context.unknown == "join":
                    kind = given
                    source, keys = connection.join_query(context, before, asking, beside)
                else:
                    source = _select(
                        ["id", *_total_columns(context), *beside], f"people LEFT JOIN ({asking}) USING (id)"
                    )
            connection.write(_charge_query(context, source, asked, amounts), after / _PEOPLE, keys, progress)
        _write_state(after, kind, before)

    def join(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Add the people who are not there yet."""
        with self._open(after) as connection:
            kind = connection.take(ids, _id_type(before))
            connection.people(before, kind)
            source, keys = connection.join_query(context, before, "SELECT DISTINCT id FROM given", ["FALSE AS took"])
            connection.write(source, after / _PEOPLE, keys)
        _write_state(after, kind, before)

    def remove(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Drop people from the table, and keep keyed hashes of their ids."""
        kind = _id_type(before)
        with self._open(after) as connection:
            connection.people(before, connection.take(ids, kind))
            left = _select(["id", *_total_columns(context), "FALSE AS took"], "people ANTI JOIN given USING (id)")
            connection.write(left, after / _PEOPLE)
            marks = _select([f"{_MARK.format(id='id')} AS mark"], "people SEMI JOIN given USING (id)")
            if (before / _REMOVED).exists():
                connection.view("removed", before / _REMOVED)
                marks += " UNION SELECT mark FROM removed"
            connection.write(marks, after / _REMOVED, _hmac_keys(context))
        _write_state(after, kind)

    def renew(self, context: EngineContext, before: Path, after: Path) -> None:
        """Set everyone to zero who was not removed and joined again; the marks of removed people stay."""
        kind = _id_type(before)
        with self._open(after) as connection:
            connection.people(before, kind)
            start = f"CASE WHEN total_0 = {SPENT} THEN {SPENT} ELSE 0 END::BIGINT"
            fresh = [f"{start} AS {total}" for total in _total_columns(context)]
            connection.write(_select(["id", *fresh, "FALSE AS took"], "people"), after / _PEOPLE)
        _write_state(after, kind, before)

    def participants(self, context: EngineContext, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Return the participants as a DuckDB relation with a column `id`, which is evaluated when it is used.

        They need not fit in memory: join inside DuckDB, as in `ids.query("active", "SELECT sum(amount) FROM active
        JOIN read_parquet('events.parquet') USING (id)")`. The relation can be used while its version is kept.
        """
        with _hide_errors():
            connection = self._connect(_spill_folder(folder))
            people = connection.read_parquet(str(folder / _PEOPLE), hive_partitioning=False)
            return people.filter("took").project("id")

    def mask(self, context: EngineContext, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Raise `LedgerError`: only dense ids have a mask."""
        raise LedgerError("there is no mask for this engine, where people are in no order: use ids")

    def count(self, context: EngineContext, folder: Path, amounts: Sequence[int]) -> int:
        """Count in one pass."""
        with self._open() as connection:
            connection.view("people", folder / _PEOPLE)
            return connection.count("people", f"took AND {_fits_condition(context, amounts)}")

    def accept(self, records: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return the records, if DuckDB reads them as a table."""
        try:
            if is_table(records):
                with self._open() as connection:
                    connection.relation(records)
                return records
        except (LedgerError, RuntimeError):
            if isinstance(records, str | Path):  # a file that is not Parquet
                raise
        raise InvalidArgument(
            "records must be a table with the column id: a data frame, a relation or a path of Parquet files (got a"
            f" {type(records).__name__})"
        ) from None

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  as above
        """Return the names and types of the columns."""
        with self._open() as connection:
            found = connection.relation(records)
            return tuple(found.columns), tuple(map(str, found.types))

    def empty(self, records: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return a relation without rows."""
        with _hide_errors():
            return _Connection(_duckdb.connect(":memory:", config=self._settings)).relation(records).limit(0)

    def check(self, context: EngineContext, folder: Path, records: Any) -> None:  # noqa: ANN401, ARG002  as above
        """Raise unless records have ids of the population's type: DuckDB's own message would contain an id."""
        with self._open() as connection:
            found, kind = connection.relation(records), _id_type(folder)
            own, form = _check_columns(found, ["id"])
            if kind is not None and kind != own and (kind, own) != ("UUID", "VARCHAR"):
                raise InvalidArgument(f"ids of records must be {_TYPE_NAMES[kind]} for this population")
            connection.check_ids(found, _cast_id(form, kind or own), kind or own, "of records")

    def records(self, context: EngineContext, folder: Path, records: Any) -> Any:  # noqa: ANN401, ARG002  as above
        """Return the participants' records as a DuckDB relation, which is evaluated when it is used."""
        with _hide_errors():
            found = _Connection(self._connect(_spill_folder(folder))).relation(records)
            people = str(folder / _PEOPLE).replace("'", "''")
            active = _select(["id AS person"], f"read_parquet('{people}', hive_partitioning = false) WHERE took")
            own, form = _check_columns(found, ["id"])
            kind = _id_type(folder) or own
            return found.query(
                "records", _select(["*"], f"records SEMI JOIN ({active}) ON {_cast_id(form, kind)} = person::{kind}")
            )

    def _connect(self, spill: Path | str) -> Any:  # noqa: ANN401  untyped library
        return _duckdb.connect(":memory:", config=self._settings | {"temp_directory": str(spill)})

    @contextmanager
    def _open(self, after: Path | None = None) -> Iterator[_Connection]:
        """Open DuckDB and replace its errors by our own; it may spill into the folder of the new version."""
        spill = None if after is None else _spill_folder(after)
        if spill is not None:
            make_folder(spill)  # DuckDB would make it readable by other users
        try:
            with _hide_errors():
                connection = self._connect(spill or "")
                try:
                    yield _Connection(connection, spill)
                finally:
                    connection.close()
        finally:
            if spill is not None:
                shutil.rmtree(spill, ignore_errors=True)


class _Connection:
    """A DuckDB connection for one update, with a folder of temporary files."""

    def __init__(self, connection: Any, spill: Path | None = None) -> None:  # noqa: ANN401  untyped library
        self._connection = connection
        self._spill = spill
        self.register = connection.register

    def view(self, name: str, path: Path) -> None:
        """Make a view of a file of a version."""
        self._read(path).create_view(name)

    def people(self, before: Path, kind: str | None) -> None:
        """Make the view `people` of the table of a version; `kind` is None if it was always empty."""
        self._read(before / _PEOPLE).project(f"* REPLACE (id::{kind or 'BIGINT'} AS id)").create_view("people")

    def _read(self, path: str | Path) -> Any:  # noqa: ANN401  untyped library
        # Otherwise a folder whose name contains = would be read as a column.
        return self._connection.read_parquet(str(path), hive_partitioning=False)

    def relation(self, asked: Any) -> Any:  # noqa: ANN401  what DuckDB reads
        """Return the input as a relation."""
        if isinstance(asked, _duckdb.DuckDBPyRelation):
            return asked
        if isinstance(asked, str | Path):
            return self._connection.read_parquet(parquet_files(asked, "a table"), hive_partitioning=False)
        if hasattr(asked, "read_next_batch") or hasattr(asked, "__next__"):
            raise InvalidArgument(f"a table must be readable more than once (got {type_text(asked)}, a stream)")
        if not is_table(asked):
            asked = {"id": _id_column(asked)}
        self._connection.register("passed", _table_of(asked) if isinstance(asked, Mapping) else asked)
        return self._connection.view("passed")

    def check_ids(self, found: Any, cast: str, kind: str, field: str) -> None:  # noqa: ANN401  a relation
        """Raise unless every row has an id of a type, with the number of the first row that has not."""
        without = f"{cast} IS NULL"
        if found.filter(without).limit(1).fetchall():
            raise InvalidArgument(
                f"ids {field} must all be {_TYPE_NAMES[kind]} (row {self._first_row(found, without)}, counted from"
                " 0, has none, or one of another kind): correct it, or leave the row out"
            )

    def _first_row(self, found: Any, condition: str) -> int:  # noqa: ANN401  a relation
        """Return the number of the first row for which a condition holds; there is one."""
        self._connection.execute("SET threads = 1; SET preserve_insertion_order = true")
        numbered = _select(["*", "row_number() OVER () - 1 AS row_number"], "asked")
        times = _select(["*", "count(*) OVER (PARTITION BY id) AS times"], f"({numbered})")
        first = _select(["min(row_number)"], f"({times}) WHERE {condition}")
        row = found.query("asked", first).fetchall()[0][0]
        if row is None:
            raise InvalidArgument(
                "a table must have one content (got rows that contradict the statistics of their file): write"
                " the file again"
            )
        return int(row)

    def take(self, asked: Any, kind: str | None, guarantees: int | None = None) -> str | None:  # noqa: ANN401
        """Make the input the view `given`, with ids of the population's type; return that type."""
        found = self.relation(asked)
        own, form = _check_columns(found, ["id"] if guarantees is None else ["id", "which"])
        columns, checks = [f"{_cast_id(form, kind or own)} AS id"], ["count(*)", "count(id)"]
        if guarantees is not None:
            columns += ["TRY_CAST(which AS BIGINT) AS which"]
            checks += ["count(which)", "count(DISTINCT id)", "min(which)", "max(which)"]
        found = found.project(", ".join(columns))
        if isinstance(asked, _duckdb.DuckDBPyRelation) and self._spill is not None:
            # It belongs to another connection, and can be read from this one only through a file.
            copy = self._spill / "given.parquet"
            found.write_parquet(str(copy))
            found = self._read(copy)
        rows, whole, *others = found.aggregate(", ".join(checks)).fetchall()[0]
        if rows and kind not in (None, own) and (kind, own) != ("UUID", "VARCHAR"):
            raise InvalidArgument(
                f"ids must all be {_TYPE_NAMES[str(kind)]} for this population (got {_TYPE_NAMES[own]})"
            )
        if whole != rows:
            self.check_ids(found, "id", kind or own, "in the column 'id'")
        if rows and guarantees is not None:
            self._check_prices(found, (rows, *others), guarantees)
        kind = kind or (own if rows else None)
        if not rows:  # an empty list has no type of its own
            found = found.limit(0).project(f"* REPLACE (NULL::{kind or 'BIGINT'} AS id)")
        found.create_view("given")
        return kind

    def _check_prices(self, found: Any, counts: Sequence[int], guarantees: int) -> None:  # noqa: ANN401  a relation
        """Raise unless each row has an index into guarantees, and each person has one row."""
        rows, placed, different, least, most = counts
        if placed != rows or least < 0 or most >= guarantees:
            row = self._first_row(found, f"which IS NULL OR which NOT BETWEEN 0 AND {guarantees - 1}")
            raise InvalidArgument(
                f"which must be from 0 to {guarantees - 1}, indices into guarantees (row {row}, counted from 0, has"
                " another value, or none)"
            )
        if different != rows:
            row = self._first_row(found, "times > 1")
            raise InvalidArgument(
                f"ids must name each person once (row {row}, counted from 0, has an id that another row has, too):"
                " leave one of them out"
            )

    def count(self, table: str, condition: str) -> int:
        """Count rows."""
        return int(self._connection.view(table).filter(condition).aggregate("count(*)").fetchall()[0][0])

    def join_query(
        self, context: EngineContext, before: Path, asked: str, columns: Sequence[str]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return the query that joins all people with what they are asked for, and the HMAC keys that it needs."""
        start, source, keys = "0", f"people FULL JOIN ({asked}) AS asked ON people.id = asked.id", _NO_KEYS
        if (before / _REMOVED).exists():
            self.view("removed", before / _REMOVED)
            start, keys = f"CASE WHEN mark IS NULL THEN 0 ELSE {SPENT} END", _hmac_keys(context)
            mark = _MARK.format(id="asked.id")
            source += f" LEFT JOIN removed ON mark = CASE WHEN people.id IS NULL THEN {mark} END"
        totals = [f"coalesce({total}, {start})::BIGINT AS {total}" for total in _total_columns(context)]
        return _select(["coalesce(people.id, asked.id) AS id", *totals, *columns], source), keys

    def write(
        self, source: str, path: Path, keys: Mapping[str, bytes] = _NO_KEYS, progress: Progress | None = None
    ) -> None:
        """Write the result of a query to a file, and report progress."""
        make_file(path).close()
        statement, values = f"COPY ({source}) TO $path {_FORMAT}", {"path": str(path), **keys}
        if progress is None:
            self._connection.execute(statement, values)
            return
        for setting in ("enable_progress_bar = true", "enable_progress_bar_print = false", "progress_bar_time = 0"):
            self._connection.execute(f"SET {setting}")
        reported = 0
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._connection.execute, statement, values)
            try:
                while not wait([running], _POLL_INTERVAL).done:
                    percent = min(99, int(self._connection.query_progress()))
                    if percent > reported:
                        reported = percent
                        progress(reported, 100)
            except BaseException:
                self._connection.interrupt()
                raise
        running.result()
        progress(100, 100)


@contextmanager
def _hide_errors() -> Iterator[None]:
    """Replace DuckDB's errors by our own: its messages may contain ids or totals."""
    try:
        yield
    except RuntimeError as problem:
        if str(problem) != _INTERRUPTED:
            raise
        raise KeyboardInterrupt from None
    except _duckdb.OutOfMemoryException:
        raise LedgerError(
            "this update needs more memory, or more disk space to spill, than DuckDB may use; nothing was changed:"
            " pass a larger memory_limit"
        ) from None
    except _duckdb.IOException:
        raise _Unreachable(
            "DuckDB could not read or write a file; nothing was changed. Check that it exists, that it is Parquet and"
            " that the disk has space"
        ) from None
    except _duckdb.Error:
        raise LedgerError(
            "DuckDB could not read the input, or a file of the population; nothing was changed. Pass ids as a list or"
            " as a table with the column id; prices also need the column which"
        ) from None


def _asked_rows(prices: PriceTable) -> Any:  # noqa: ANN401  what DuckDB reads
    """Return who is asked for what; None if everyone is asked for the same."""
    if prices.same:
        return None
    if prices.table is not None:
        return prices.table
    if prices.ids is None:
        raise InvalidArgument("pass ids with which: people of this engine are in no order")
    return {"id": _id_column(prices.ids), "which": prices.which}


def _table_of(columns: Mapping[str, Any]) -> Any:  # noqa: ANN401  what DuckDB reads
    """Return columns as arrays of NumPy, or all of them as an Arrow table."""
    plain = all(isinstance(column, np.ndarray) for column in columns.values())
    return columns if plain else arrow_table(columns, "a table")


def _id_column(ids: Any) -> Column:  # noqa: ANN401  a column of anything
    if not is_column(ids) and not (isinstance(ids, int) and ids == 0):
        raise InvalidArgument(
            f"ids must be a list, an array, a series, or a table with the column id (got {type_text(ids)})"
        )
    found = column_of([] if isinstance(ids, int) else ids, "ids")
    if getattr(found, "ndim", 1) != 1:
        raise InvalidArgument("ids must be a list, or a table with the column id")
    # DuckDB would turn an array of NumPy strings into an enum type that contains each of them.
    text = isinstance(found, np.ndarray) and found.dtype.kind in "UT"
    return found.astype(object) if text else found


def _check_columns(found: Any, columns: Sequence[str]) -> tuple[str, str]:  # noqa: ANN401  untyped library
    """Check that columns exist, and return the type of the ids, and the one that they are stored in."""
    types = {name.lower(): kind.id for name, kind in zip(found.columns, found.types, strict=True)}
    check_names([*types], columns, "a table")
    if "which" in columns and _ID_TYPES.get(types["which"]) != "BIGINT":
        raise InvalidArgument("which must be integers, indices into guarantees")
    own = _ID_TYPES.get(types["id"])
    if own is None:
        if not found.limit(1).fetchall():
            return "BIGINT", "BIGINT"  # a column without rows has no type of its own
        other = "; a column with missing values may have become one of floats" if types["id"] == "double" else ""
        raise InvalidArgument(f"ids must be {_KINDS} (got a column 'id' of {types['id']}{other})")
    return own, "BLOB" if types["id"] == "blob" else own


def _cast_id(form: str, kind: str) -> str:
    """Return the expression for an id of a type, from the type that it is stored in; null if it is none."""
    return _UUID[form] if kind == "UUID" and form in _UUID else f"TRY_CAST(id AS {kind})"


def _spill_folder(folder: Path) -> Path:
    return folder / f"spill-{secrets.token_hex(8)}"


def _id_type(folder: Path) -> str | None:
    """Return the type of the ids of a version; None if it was always empty."""
    try:
        kind = json.loads((folder / _STATE).read_text())["ids"]
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / _STATE} is damaged; restore the population from a backup") from None
    return None if kind is None else str(kind)


def _write_state(after: Path, kind: str | None, before: Path | None = None) -> None:
    """Write the description of a version, and carry over the marks of removed people."""
    if before is not None and (before / _REMOVED).exists():
        link_or_copy(before / _REMOVED, after / _REMOVED)
    write_file(after / _STATE, json.dumps({"form": 1, "ids": kind}).encode())


# The SQL of a version. No part of it is user input.


def _charge_query(context: EngineContext, source: str, asked: str, amounts: Sequence[int | str]) -> str:
    """Return the query for the totals after a charge and for who takes part: people who are asked and admit it.

    Amounts are numbers, or the names of columns of the source.
    """
    took = f"CASE WHEN {asked} THEN {_fits_condition(context, amounts)} ELSE FALSE END AS took"
    after = [
        f"CASE WHEN took THEN least({total} + {amount}, {SPENT}) ELSE {total} END AS {total}"
        for total, amount in zip(_total_columns(context), amounts, strict=True)
    ]
    return _select(["id", *after, "took"], f"({_select(['*', took], f'({source})')})")


def _fits_condition(context: EngineContext, amounts: Sequence[int | str]) -> str:
    """Return the condition under which a person admits amounts."""
    within, *alternatives = [
        f"{total} + {amount} <= {limit}"
        for total, amount, limit in zip(_total_columns(context), amounts, context.gate.limits, strict=True)
    ]
    return f"{within} AND ({' OR '.join(alternatives)})"


def _select(columns: Sequence[str], source: str) -> str:
    return f"SELECT {', '.join(columns)} FROM {source}"  # noqa: S608  no part of it is user input


def _total_columns(context: EngineContext) -> list[str]:

    return [f"total_{i}" for i in range(len(context.gate.limits))]


def _hmac_keys(context: EngineContext) -> dict[str, bytes]:
    """Return the secret as the padded keys of HMAC-SHA256."""
    padded = context.versions.secret().ljust(_SHA256_BLOCK, b"\0")
    return {"inner": bytes(byte ^ 0x36 for byte in padded), "outer": bytes(byte ^ 0x5C for byte in padded)}


# Files that are sent to a service: people, or people with prices, as Parquet. What is not a row is in the metadata.


@contextmanager
def _as_bad_file(message: str) -> Iterator[None]:
    """Replace errors that the content of a file leads to."""
    try:
        yield
    except (_duckdb.Error, RuntimeError, UnicodeError) as problem:
        if isinstance(problem, RuntimeError) and str(problem) == _INTERRUPTED:
            raise KeyboardInterrupt from None
        raise InvalidArgument(message) from None


class UploadedTable(NamedTuple):
    """A Parquet file that was sent, with its metadata; its rows have not been read."""

    path: str
    rows: int
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str) -> UploadedTable:
        """Read the file's description, or raise `InvalidArgument`."""
        with (
            _as_bad_file("the body must be a Parquet file, with its metadata in UTF-8"),
            _duckdb.connect(":memory:") as connection,
        ):
            # What is read are the row groups; the count for the whole file is another number, which may be wrong.
            query = (
                "SELECT coalesce(sum(abs(size)), 0)::BIGINT FROM"
                " (SELECT DISTINCT row_group_id, row_group_num_rows AS size FROM parquet_metadata($path))"
            )
            ((rows,),) = connection.execute(query, {"path": path}).fetchall()
            pairs = "SELECT decode(key), decode(value) FROM parquet_kv_metadata($path)"
            return cls(path, rows, dict(connection.execute(pairs, {"path": path}).fetchall()))

    def rewrite(self, path: str, memory_limit: str) -> None:
        """Write the columns `id` and `which`, if it is there, into another file, or raise `InvalidArgument`.

        An engine could not tell a damaged file from one of its own, and DuckDB believes the statistics in a file,
        which may hide rows from one query and not from the next. Those of the other file are DuckDB's own.
        """
        settings = {"memory_limit": memory_limit, "preserve_insertion_order": False}
        with (
            _as_bad_file("the file cannot be read, because its pages are damaged: write it again"),
            _duckdb.connect(":memory:", config=settings) as connection,
        ):
            found = connection.read_parquet(self.path, hive_partitioning=False)
            own = ["id", *[name for name in found.columns if name.lower() == "which"]]
            _, form = _check_columns(found, [name.lower() for name in own])  # a row may be a list of any length
            if form in _LENGTH:  # a kilobyte of a file may be a terabyte of ids
                ((length,),) = found.aggregate(f"coalesce(sum({_LENGTH[form]}), 0)").fetchall()
                if length > _MAX_ID_BYTES:
                    raise InvalidArgument(f"ids must have at most {_MAX_ID_BYTES:,} bytes in all (got {length:,})")
            found.project(", ".join(own)).create_view("given")
            copied = "COPY (SELECT * FROM given) TO $path"
            connection.execute(f"{copied} {_FORMAT}", {"path": path})

    def columns(self, memory_limit: str) -> dict[str, NDArray[np.int64]]:
        """Return the columns `id` and `which`, as far as they are there, in the order of the file."""
        with (
            _as_bad_file("the columns id and which must be integers of 64 bits"),
            _duckdb.connect(":memory:", config={"memory_limit": memory_limit}) as connection,
        ):
            found = connection.read_parquet(self.path, hive_partitioning=False)
            types = dict(zip(found.columns, found.types, strict=True))
            own = [name for name in ("id", "which") if name in types]
            if len(own) < len(types):  # a column ID that is overlooked would charge people in id order instead
                raise InvalidArgument("the file must have the columns id and which, in lower case, and no others")
            if not own or any(_ID_TYPES.get(types[name].id) != "BIGINT" for name in own):
                raise InvalidArgument("the columns id and which must be integers for this population")
            exact = ", ".join(f"{name}::BIGINT AS {name}" for name in own)
            arrays = found.project(exact).fetchnumpy()
        if any(isinstance(column, np.ma.MaskedArray) and column.mask.any() for column in arrays.values()):
            raise InvalidArgument("the columns id and which must have a value in every row")
        return {name: np.asarray(column, dtype=np.int64) for name, column in arrays.items()}


def write_upload(columns: Mapping[str, Any] | Path, metadata: Mapping[str, str], path: Path) -> None:
    """Write columns, or those of a Parquet file, into a new Parquet file, which only its owner can read."""
    make_file(path).close()
    pairs = ", ".join(f"{name}: ${name}" for name in metadata)
    copied = "COPY (SELECT * FROM given) TO $path"
    with _hide_errors(), _duckdb.connect(":memory:") as connection:
        if isinstance(columns, Path):
            connection.read_parquet(str(columns), hive_partitioning=False).create_view("given")
        else:
            connection.register("given", _table_of({name: _id_column(column) for name, column in columns.items()}))
        connection.execute(
            f"{copied} (FORMAT parquet, USE_TMP_FILE false, KV_METADATA {{{pairs}}})",
            {"path": str(path), **metadata},
        )
