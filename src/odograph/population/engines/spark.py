"""The Spark engine: people have ids of any kind, and a version is a table in Parquet files on a shared path.

The table is split by a hash of the id into a fixed number of partitions: the session's `spark.sql.shuffle.partitions`
when the population is made. Each partition is one file, named by its number, and Spark knows this partitioning: a
round moves prices to the people, and never moves the people. Every row is checked to be in its own partition when it
is written, because joins would not find it in another.

Private JVM classes: `_read_partitioned` tells Spark the partitioning of a folder through the classes behind
`DataFrame`. In the public API only tables of a catalog have a known partitioning (`bucketBy` with `saveAsTable`), and
a catalog may be shared with other programs and outlives the round.

No data about a person reaches the driver, or a query plan, which Spark would display: executors read the secret of
the population from its file, and lists are passed to them as files. The driver, which names the files and brings them
to the disk, and the executors must see the same folder, as the same user: on one machine, or on a network file system
with close-to-open consistency.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import uuid4

import numpy as np

from odograph.display import Progress
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError, load_extra, type_text
from odograph.population.engines import EngineContext
from odograph.population.gate import SPENT
from odograph.population.input_tables import (
    array_of,
    arrow_column,
    check_names,
    column_of,
    columns_of,
    id_bytes,
    is_column,
    is_table,
    parquet_files,
    write_parquet,
)
from odograph.population.prices import PriceTable
from odograph.population.version_store import link_or_copy, make_file, make_folder, restrict, write_file

__all__ = ["SparkEngine"]

_pyspark = load_extra("pyspark")
_sql = load_extra("pyspark.sql")
_errors = load_extra("pyspark.errors")
_F = load_extra("pyspark.sql.functions")
_py4j = load_extra("py4j.protocol")

_SparkTable: TypeAlias = Any  # a DataFrame: the library may be missing
_Session: TypeAlias = Any

_PEOPLE: Final = "people"
_REMOVED: Final = "removed"
_INPUT: Final = "input"
_STATE: Final = "state.json"
_ID_TYPES: Final = {
    "tinyint": "bigint",
    "smallint": "bigint",
    "int": "bigint",
    "bigint": "bigint",
    "string": "string",
    "binary": "uuid",  # of 16 bytes
}
_TYPE_NAMES: Final = {"bigint": "integers of 64 bits", "string": "strings", "uuid": "UUIDs"}
_KINDS: Final = "integers of 64 bits, strings or UUIDs"
_ARROW_TYPES: Final = {"integer": "bigint", "string": "string", "uuid": "uuid"}
# UUIDs are kept as text, in lower case with dashes. Python's uuid.UUID takes the same spellings.
_DIGITS: Final = {"string": "regexp_replace(lower(id), '^urn:uuid:|[{}-]', '')", "binary": "lower(hex(id))"}
_UUID: Final = (
    "IF({digits} RLIKE '^[0-9a-f]{{32}}$',"
    " regexp_replace({digits}, '^(.{{8}})(.{{4}})(.{{4}})(.{{4}})(.{{12}})$', '$1-$2-$3-$4-$5'), NULL)"
)
# Settings of the engine's own session: Spark must not merge, split or skip partitions.
_SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.sources.bucketing.enabled": "true",
    "spark.sql.sources.bucketing.autoBucketedScan.enabled": "false",
}
_WRITE: Final = {"maxRecordsPerFile": "0", "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}
_READ: Final = {
    "__globPaths__": "false",  # names are taken literally
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}
_PATTERN: Final = re.compile(r"[*?\[\]{}^\\]")  # what Hadoop reads as a pattern, unless a backslash is before it
_POLL_INTERVAL: Final = 0.1  # seconds
# Errors that an executor may find, and reports by name.
_REFUSALS: Final = {
    "misplaced": LedgerError("Spark would have written people into the wrong partition; nothing was changed"),
    "nameless": InvalidArgument(
        "ids must not be null, and in a population of UUIDs each must be one: look for rows without an id in the"
        " column 'id', and correct them or leave them out"
    ),
    "nowhere": InvalidArgument(
        "which must be an index into guarantees, counted from 0, in every row: look at the column 'which'"
    ),
    "twice": InvalidArgument(
        "ids must name each person once: look for repeated values in the column 'id', and leave all but one out"
    ),
}


class _Unreachable(LedgerError, OSError):
    """The previous version is gone: another process may have removed it after writing the next one."""


class _State(NamedTuple):
    """The description of a version, stored in its state.json."""

    ids: str | None  # their type; None if it was always empty
    partitions: int
    people: Sequence[str]  # files
    removed: Sequence[str]


class SparkEngine:
    """An engine on Spark, with totals in Parquet files.

    Ids are integers of 64 bits, strings or UUIDs: the first ids decide which. UUIDs are objects, or columns of UUIDs
    or of 16 bytes each; in a population of UUIDs, text is read as one, and that is how they are returned.

    Ids are passed as a DataFrame of the session's context with a column `id`, as a path of Parquet files that the
    executors can read, or, if the driver's memory holds them, as a list, an array, a series, a data frame or an Arrow
    table. A table of prices also has a column `which`. A DataFrame is computed more than once, and must have the same
    rows each time.
    """

    ordered = False

    def __init__(self, session: Any) -> None:  # noqa: ANN401  the library is loaded only here
        if not isinstance(session, _sql.SparkSession):
            raise InvalidArgument(
                f"session must be a SparkSession (got {type_text(session)}): pass"
                " session=SparkSession.builder.getOrCreate()"
            )
        self._session = session
        with _hide_errors():
            # A session of the same context with its own settings: those of the caller's session do not change.
            self._own = session.newSession()
            for name, value in _SETTINGS.items():
                self._own.conf.set(name, value)

    def create(self, context: EngineContext, after: Path, ids: Any) -> None:  # noqa: ANN401  a count, a list, a DataFrame
        """Write zeros for each id; a number of people means the ids 0, 1, 2, ..."""
        with _hide_errors():
            partitions = int(self._session.conf.get("spark.sql.shuffle.partitions"))
            writer = _VersionWriter(self._own, context, after, _State(None, partitions, [], []))
            given = writer.read_input(self._own.range(ids) if isinstance(ids, int) and ids > 0 else ids)
            zeros = [f"0L AS {total}" for total in _total_columns(context)]
            writer.write(writer.group_by_id(given).selectExpr("id", *zeros, "false AS took"))

    def digest(self, context: EngineContext, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of prices or ids: for a DataFrame, of the XOR of keyed hashes of its rows."""
        parts, rows, columns = [b"ids"], asked, ["id"]
        if isinstance(asked, PriceTable):
            amounts = np.ascontiguousarray(asked.amounts)
            parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
            rows, columns = _asked_rows(asked), ["id", "which"]
        if rows is None:
            return context.versions.digest(*parts)
        rows = _read_files(self._own, rows, "ids" if columns == ["id"] else "table")
        if not isinstance(rows, _sql.DataFrame):
            kind, found = _local_columns(rows, columns)
            return context.versions.digest(*parts, *id_bytes(kind, found["id"], found.get("which")))
        _id_type(rows, columns)
        text = _id_text(dict(rows.dtypes)["id"])
        # Values derived from the secret may appear in a plan, which Spark displays; the secret itself must not.
        seeds = [int(context.versions.digest(lane)[:15], 16) for lane in (b"first", b"second")]
        codes = [
            f"bit_xor(xxhash64({seed}L, {', '.join(f'CAST({name} AS string)' for name in columns)}))"
            for seed in seeds
        ]
        with _hide_errors():
            taken = rows.selectExpr(f"{text} AS id", *columns[1:])
            taken = taken if "which" in columns else taken.distinct()
            return context.versions.digest(*parts, str(tuple(taken.selectExpr("count(*)", *codes).first())).encode())

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        """Charge people in their partitions, without a join if everyone is asked for the same."""
        rows = _asked_rows(prices)
        with _hide_errors(before):
            writer = _VersionWriter(self._own, context, after, _read_state(before), before)
            if rows is None:
                amounts = [f"{amount}L AS amount_{i}" for i, amount in enumerate(prices.amounts[0])]
                writer.write(_charge(context, writer.people().selectExpr("*", *amounts)), progress)
                return
            asked = writer.add_amounts(writer.group_by_id(writer.read_input(rows, "which")), prices)
            writer.write(
                _charge(context, writer.join_people(asked, "full" if context.unknown == "join" else "left")), progress
            )

    def join(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Add the people who are not there yet."""
        with _hide_errors(before):
            writer = _VersionWriter(self._own, context, after, _read_state(before), before)
            joined = writer.join_people(writer.group_by_id(writer.read_input(ids)), "full")
            writer.write(joined.selectExpr("id", *_total_columns(context), "false AS took"))

    def remove(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Drop people from the table, and keep keyed hashes of their ids."""
        with _hide_errors(before):
            writer = _VersionWriter(self._own, context, after, _read_state(before), before)
            named = writer.group_by_id(writer.read_input(ids))
            writer.write_marks(named)
            left = writer.join_people(named, "left").where("times IS NULL")
            writer.write(left.selectExpr("id", *_total_columns(context), "false AS took"))

    def renew(self, context: EngineContext, before: Path, after: Path) -> None:
        """Set everyone to zero who was not removed and joined again; the marks of removed people stay."""
        with _hide_errors(before):
            writer = _VersionWriter(self._own, context, after, _read_state(before), before)
            start = f"IF(total_0 = {SPENT}L, {SPENT}L, 0L)"
            fresh = [f"{start} AS {total}" for total in _total_columns(context)]
            writer.write(writer.people().selectExpr("id", *fresh, "false AS took"))

    def participants(self, context: EngineContext, folder: Path) -> _SparkTable:
        """Return the participants as a DataFrame with a column `id`, which is evaluated when it is used.

        Join with it inside Spark: the ids need not be collected. It can be used while its version is kept.
        """
        with _hide_errors(folder):
            table = self._session.read.options(**_READ).schema(_schema(context, _read_state(folder).ids))
            return table.parquet(_uri(folder / _PEOPLE)).where("took").select("id")

    def mask(self, context: EngineContext, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Raise `LedgerError`: only dense ids have a mask."""
        raise LedgerError("there is no mask for this engine, where people are in no order: use ids")

    def count(self, context: EngineContext, folder: Path, amounts: Sequence[int]) -> int:
        """Count inside Spark."""
        asked = [f"{amount}L" for amount in amounts]
        with _hide_errors(folder):
            table = self._session.read.options(**_READ).schema(_schema(context, _read_state(folder).ids))
            found = table.parquet(_uri(folder / _PEOPLE)).where("took").where(_fits_condition(context, asked))
            return int(found.count())

    def accept(self, records: Any) -> _SparkTable:  # noqa: ANN401  a DataFrame, or a path
        """Return the records, if they are a Spark DataFrame or a path of Parquet files."""
        with _hide_errors():
            records = _read_files(self._session, records, "records")
        if not isinstance(records, _sql.DataFrame):
            raise InvalidArgument(
                f"records must be a Spark DataFrame with the column id (got {type_text(records)}). Make one"
                " with session.createDataFrame"
            )
        return records

    def form(self, records: _SparkTable) -> Hashable:
        """Return the names and types of the columns."""
        return str(records.schema.simpleString())

    def check(self, context: EngineContext, folder: Path, records: _SparkTable) -> None:  # noqa: ARG002  as engines have it
        """Raise unless records have ids of the population's type."""
        own, found = _read_state(folder).ids, _id_type(records, ["id"])
        if own and found != own and (own, found) != ("uuid", "string"):
            raise InvalidArgument(f"records must be a DataFrame whose ids are {_TYPE_NAMES[own]}")

    def empty(self, records: _SparkTable) -> _SparkTable:
        """Return the DataFrame without rows."""
        return records.limit(0)

    def records(self, context: EngineContext, folder: Path, records: _SparkTable) -> _SparkTable:
        """Return the participants' rows, which are evaluated when they are used."""
        active = self.participants(context, folder)
        with _hide_errors(folder):
            if _read_state(folder).ids != "uuid":
                return records.join(active, "id", "left_semi")
            active = active.withColumnRenamed("id", "id of a participant")
            own = _F.expr(_cast_id(dict(records.dtypes)["id"], "uuid"))
            return records.join(active, own == active["id of a participant"], "left_semi")


class _VersionWriter:
    """Writes a version from the previous one, if there is one."""

    def __init__(
        self, session: _Session, context: EngineContext, after: Path, state: _State, before: Path | None = None
    ) -> None:
        self._session = session
        self._context = context
        self._after = after
        self._state = state
        self._before = before or after
        for folder in (_PEOPLE, _REMOVED, _INPUT):
            make_folder(after / folder)  # executors would make it readable by other users

    def people(self) -> _SparkTable:
        """Return the table of the previous version."""
        schema = _schema(self._context, self._state.ids)
        return _read_partitioned(self._session, self._before / _PEOPLE, schema, self._state.partitions)

    def read_input(self, asked: Any, *others: str) -> _SparkTable:  # noqa: ANN401  what engines are passed
        """Return the input as a DataFrame with ids of the population's type, which its first ids decide."""
        columns, asked = ["id", *others], _read_files(self._session, asked, "table" if others else "ids")
        if not isinstance(asked, _sql.DataFrame):
            kind, found = _local_columns(asked, columns)
            asked = self._write_input("given", found)
            own = kind if len(found["id"]) else None
        else:
            own = _id_type(asked, columns)
        ids = self._state.ids or own or "bigint"
        if own not in (ids, None) and (ids, own) != ("uuid", "string"):
            raise InvalidArgument(f"ids must be {_TYPE_NAMES[ids]} for this population (got {_TYPE_NAMES[own]})")
        self._state = self._state._replace(ids=self._state.ids or own)
        cast = _cast_id(dict(asked.dtypes)["id"], ids)
        return asked.selectExpr(f"coalesce({cast}, {_raise_refusal('nameless')}) AS id", *others)

    def group_by_id(self, given: _SparkTable) -> _SparkTable:
        """Return one row per id in its partition: how often it is named, and whether it was removed before."""
        columns = given.columns
        gone = "false AS gone"
        if self._state.removed:
            marks = self._read_marks().selectExpr("mark", "true AS found")
            given, gone = self._with_marks(given).join(marks, "mark", "left"), "found IS NOT NULL AS gone"
        partitioned = given.selectExpr(*columns, gone).repartition(self._state.partitions, "id")
        one = [_F.max(column).alias(column) for column in (*columns[1:], "gone")]
        return partitioned.groupBy("id").agg(_F.count("*").alias("times"), *one)

    def add_amounts(self, named: _SparkTable, prices: PriceTable) -> _SparkTable:
        """Add the amounts for each total to the ids, each of which must be named once."""
        columns = {f"amount_{i}": column for i, column in enumerate(prices.amounts.T)}
        which = np.arange(len(prices.amounts), dtype=np.int32)
        amounts = self._write_input("amounts", {"which": which, **columns})
        first = (
            f"IF(times > 1, {_raise_refusal('twice')}, coalesce(amount_0, {_raise_refusal('nowhere')})) AS amount_0"
        )
        return named.join(_F.broadcast(amounts), "which", "left").selectExpr("id", "gone", first, *[*columns][1:])

    def join_people(self, named: _SparkTable, how: str) -> _SparkTable:
        """Join all people with the named ids; with "full", new people are added.

        New people have spent nothing, or everything if they were removed before. Only the named rows are moved; those
        of one partition must fit in memory.
        """
        everybody = self.people().drop("took").join(named.hint("shuffle_hash"), "id", how)
        new = _F.expr(f"IF(gone, {SPENT}L, 0L)")
        return everybody.withColumns({total: _F.coalesce(total, new) for total in _total_columns(self._context)})

    def write(self, people: _SparkTable, progress: Progress | None = None) -> None:
        """Write the version, with every row in its own partition."""
        partitions = self._state.partitions
        in_partition = f"IF(pmod(hash(id), {partitions}) = spark_partition_id(), took, {_raise_refusal('misplaced')})"
        people = people.withColumn("took", _F.expr(in_partition))
        _run_with_progress(self._session, lambda: self._write(people, _PEOPLE), partitions, progress)
        shutil.rmtree(self._after / _INPUT)
        if not any((self._after / _REMOVED).iterdir()):
            for name in self._state.removed:
                link_or_copy(self._before / _REMOVED / name, self._after / _REMOVED / name)
        files = {part: sorted(path.name for path in (self._after / part).iterdir()) for part in (_PEOPLE, _REMOVED)}
        write_file(self._after / _STATE, json.dumps({"form": 1, **self._state._asdict(), **files}).encode())

    def write_marks(self, named: _SparkTable) -> None:
        """Write keyed hashes of the named ids that exist, together with those of the previous version."""
        marks = self._with_marks(self.people().select("id").join(named, "id", "left_semi")).select("mark")
        if self._state.removed:
            marks = marks.union(self._read_marks())
        self._write(marks.repartition(self._state.partitions, "mark").distinct(), _REMOVED)

    def _read_marks(self) -> _SparkTable:
        table = self._session.read.options(**_READ).schema("mark binary")
        return table.parquet(_uri(self._before / _REMOVED))

    def _with_marks(self, people: _SparkTable) -> _SparkTable:
        """Add a keyed hash of each id."""
        inner = _F.unhex(_F.sha2(_F.concat("secret", _F.col("id").cast("string").cast("binary")), 256))
        mark = _F.unhex(_F.sha2(_F.concat("secret", inner), 256))
        return _read_secret(self._session, self._context).crossJoin(people).withColumn("mark", mark).drop("secret")

    def _write_input(self, name: str, columns: Mapping[str, Any]) -> _SparkTable:
        """Pass columns to the executors in a file, which is removed with the end of the update."""
        path = self._after / _INPUT / name
        with make_file(path) as file:
            write_parquet(columns, file)
        return self._session.read.options(**_READ).parquet(_uri(path))

    def _write(self, rows: _SparkTable, part: str) -> None:
        """Write a table, a file for each partition that has rows."""
        folder = self._after / part
        rows.write.mode("append").options(**_WRITE).parquet(_uri(folder))
        for path in folder.iterdir():
            _, _, rest = path.name.partition("part-")
            if path.name.startswith("part-"):
                path.rename(folder / f"part_{rest[: rest.index('-')]}.parquet")  # as Spark reads the number from it
            else:
                path.unlink()  # checksums of the former name
        restrict(folder)


def _charge(context: EngineContext, asked: _SparkTable) -> _SparkTable:
    """Return the totals after a charge, and who takes part."""
    totals = _total_columns(context)
    # For people who are not asked the condition is null: they do not take part.
    took = f"coalesce({_fits_condition(context, [f'amount_{i}' for i in range(len(totals))])}, false)"
    after = [f"IF(took, least({total} + amount_{i}, {SPENT}L), {total}) AS {total}" for i, total in enumerate(totals)]
    return asked.withColumn("took", _F.expr(took)).selectExpr("id", *after, "took")


def _fits_condition(context: EngineContext, amounts: Sequence[str]) -> str:
    """Return the condition under which a person admits amounts."""
    within, *alternatives = [
        f"{total} + {amount} <= {limit}L"
        for total, amount, limit in zip(_total_columns(context), amounts, context.gate.limits, strict=True)
    ]
    return f"{within} AND ({' OR '.join(alternatives)})"


def _asked_rows(prices: PriceTable) -> Any:  # noqa: ANN401  a DataFrame, or columns
    """Return who is asked for what; None if everyone is asked for the same."""
    if prices.same:
        return None
    if prices.table is not None:
        if not isinstance(prices.table, _sql.DataFrame) and not is_table(prices.table):
            raise InvalidArgument(
                "table must be a Spark DataFrame, another table with the columns id and which, or a path of Parquet"
                f" files (got a {type(prices.table).__name__})"
            )
        return prices.table
    if prices.ids is None:
        raise InvalidArgument("pass ids with which: people of this engine are in no order")
    return {"id": prices.ids, "which": prices.which}


def _read_files(session: _Session, asked: Any, field: str) -> Any:  # noqa: ANN401  what engines are passed
    """Return a DataFrame of Parquet files, or anything else as it is."""
    if not isinstance(asked, str | Path):
        return asked
    # With several paths that are taken literally, Spark 3.5 reads each as often as there are paths.
    names = [_PATTERN.sub(r"\\\g<0>", str(Path(file).absolute())) for file in parquet_files(asked, field)]
    return session.read.options(**_READ | {"__globPaths__": "true"}).parquet(*[f"file://{name}" for name in names])


def _local_columns(asked: Any, columns: Sequence[str]) -> tuple[str, dict[str, Any]]:  # noqa: ANN401  as above
    """Return columns that are in the driver's memory, and the type of the ids; 0 means no ids."""
    if is_table(asked):
        found = columns_of(asked, columns)
    elif is_column(asked) or (isinstance(asked, int) and asked == 0):
        found = {"id": column_of([] if isinstance(asked, int) else asked, "ids")}
    else:
        raise InvalidArgument(f"ids must be a list, an array, a series or a table (got {type_text(asked)})")
    if getattr(found["id"], "ndim", 1) != 1:
        raise InvalidArgument("ids must be a list, or a table with the column id")
    kind, ids = arrow_column(found["id"], "ids")
    which = {"which": array_of(found["which"], "which").astype(np.int32)} if "which" in found else {}
    return _ARROW_TYPES[kind], {"id": ids, **which}


def _cast_id(form: str, kind: str) -> str:
    """Return the expression for an id of a type, from the type that it is stored in; null if it is none."""
    if kind != "uuid":
        return f"CAST(id AS {kind})"
    return _UUID.format(digits=_DIGITS.get(form, "CAST(id AS string)"))


def _id_text(form: str) -> str:
    """Return the expression for an id in which equal ids are equal: text that spells a UUID is spelled in one way."""
    return f"coalesce({_cast_id(form, 'uuid')}, CAST(id AS string))" if form in _DIGITS else "id"


def _id_type(frame: _SparkTable, columns: Sequence[str]) -> str:
    """Return the type of the ids of a DataFrame, or raise if its columns are wrong."""
    types = dict(frame.dtypes)
    check_names([*types], columns, "a DataFrame")
    if _ID_TYPES.get(types.get("which", "int")) != "bigint":
        raise InvalidArgument("which must be integers, indices into guarantees")
    if types["id"] not in _ID_TYPES:
        raise InvalidArgument(f"ids must be {_KINDS} (got a column 'id' of {types['id']})")
    return _ID_TYPES[types["id"]]


def _read_state(folder: Path) -> _State:
    """Return the description of a version, after checking that all its files exist."""
    try:
        form = json.loads((folder / _STATE).read_text())
        state = _State(form["ids"], form["partitions"], form["people"], form["removed"])
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / _STATE} is damaged; restore the population from a backup") from None
    for part, names in ((_PEOPLE, state.people), (_REMOVED, state.removed)):
        if {path.name for path in (folder / part).iterdir()} != set(names):
            raise LedgerCorrupt(f"files of {folder} are missing, or others were added; restore them from a backup")
    return state


def _schema(context: EngineContext, ids: str | None) -> str:
    totals = [f"{total} bigint" for total in _total_columns(context)]
    kind = "string" if ids == "uuid" else ids or "bigint"
    return ", ".join([f"id {kind}", *totals, "took boolean"])


def _total_columns(context: EngineContext) -> list[str]:
    return [f"total_{i}" for i in range(len(context.gate.limits))]


# Calls into Spark: partitioned tables, the secret, progress, and errors.


def _read_partitioned(session: _Session, folder: Path, schema: str, partitions: int) -> _SparkTable:
    """Return a table whose partitioning Spark knows; the head of this file says why this needs private classes."""
    jvm, own = session._jvm, session._jsparkSession  # noqa: SLF001  as the head of the file says
    seq, some = jvm.PythonUtils.toSeq, jvm.scala.Option.apply
    buckets = jvm.org.apache.spark.sql.catalyst.catalog.BucketSpec(partitions, seq(["id"]), seq([]))
    source = jvm.org.apache.spark.sql.execution.datasources.DataSource(
        own,
        "parquet",
        seq([_uri(folder)]),
        some(jvm.org.apache.spark.sql.types.StructType.fromDDL(schema)),
        seq([]),
        some(buckets),
        jvm.PythonUtils.toScalaMap(_READ),
        jvm.scala.Option.empty(),
    )
    return _sql.DataFrame(own.baseRelationToDataFrame(source.resolveRelation(True)), session)  # noqa: FBT003


def _read_secret(session: _Session, context: EngineContext) -> _SparkTable:
    """Return one row with the secret, whose value does not appear in any plan."""
    file = session.read.format("binaryFile").options(**_READ).load(_uri(context.versions.location / "secret"))
    return _F.broadcast(file.select(_F.col("content").alias("secret")))


def _run_with_progress(session: _Session, work: Callable[[], None], tasks: int, progress: Progress | None) -> None:
    """Run the work, and report progress in percent."""
    if progress is None:
        work()
        return
    own, group, last = session.sparkContext, str(uuid4()), 0

    def run_in_group() -> None:
        own.setJobGroup(group, "an update of a population")
        work()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_pyspark.inheritable_thread_target(run_in_group))
        try:
            while not wait([running], _POLL_INTERVAL).done:
                percent = _percent_done(own.statusTracker(), group, tasks)
                if percent > last:
                    last = percent
                    progress(last, 100)
        except BaseException:
            own.cancelJobGroup(group)
            raise
    running.result()
    progress(100, 100)


def _percent_done(tracker: Any, group: str, tasks: int) -> int:  # noqa: ANN401  untyped library
    """Return the finished part of the jobs of a group that have begun."""
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    done = sum(int(stage.numCompletedTasks) for stage in stages if stage)
    return min(99, 100 * done // max(tasks, sum(int(stage.numTasks) for stage in stages if stage)))


@contextmanager
def _hide_errors(before: Path | None = None) -> Iterator[None]:
    """Replace Spark's errors by our own: its messages may contain ids or totals."""
    try:
        yield
    except (_errors.PySparkException, _py4j.Py4JError, ConnectionError) as problem:
        text = str(problem)
        for name, error in _REFUSALS.items():
            if _marker(name) in text:
                raise type(error)(*error.args) from None
        if before is not None and not before.is_dir():
            raise _Unreachable("the version that this update began from is gone; nothing was changed") from None
        raise LedgerError(
            "Spark could not finish this update; nothing was changed. Spark's log says why: check that the session is"
            " running, that all its workers reach the population's folder, and that the input can be computed"
        ) from None


def _raise_refusal(name: str) -> str:
    """Return an expression that ends the job and makes `_hide_errors` raise the error of that name."""
    return f"raise_error('{_marker(name)}')"


def _marker(name: str) -> str:
    return f"odograph-refusal-{name}."


def _uri(path: Path) -> str:
    """Return the URI of a path on this machine's file system, whatever Spark's default file system is."""
    return f"file://{path}"
