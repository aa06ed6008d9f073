"""The Spark engine: people have ids of any kind, and a version is a table in Parquet files on a path that all reach.

The table is cut by a hash of the id into a number of partitions that never changes: as many as the session's
`spark.sql.shuffle.partitions` when the population is made. Each is one file, named for its number, and Spark is told
so: a step moves what people are asked for to where they are, and never moves the people. Every row that is written is
checked to be in its place, because in another nobody would look for it.

Nothing about anybody comes to the driver, or into a plan, where Spark would show it: executors read the secret of the
population from its file, and lists that are passed are handed to them as files. The driver, which names the files and
brings them to the disk, and the executors must see the same folder, as one user: on one machine, or on a network file
system on which a file that was closed is seen by whoever opens it next.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from odograph.errors import InvalidGuarantee, InvalidPolicy, LedgerCorrupt, LedgerError
from odograph.extras import load
from odograph.population.engines import Site
from odograph.population.files import keep_file, make_folder, restrict, write_file
from odograph.population.kernel import SPENT
from odograph.population.prices import Priced
from odograph.population.spark_tables import (
    READ,
    Frame,
    Session,
    carried_out,
    partitioned,
    private,
    refusal,
    secret_of,
    uri,
)
from odograph.progress import Progress

__all__ = ["Spark"]

_sql = load("pyspark.sql")
_F = load("pyspark.sql.functions")

_PEOPLE: Final = "people"
_REMOVED: Final = "removed"
_HANDED: Final = "handed"
_STATE: Final = "state.json"
_KINDS: Final = {"tinyint": "bigint", "smallint": "bigint", "int": "bigint", "bigint": "bigint", "string": "string"}
_WORDS: Final = {"bigint": "whole numbers of 64 bits", "string": "strings"}
# Of the engine's own session: nothing may merge, split or leave out partitions.
_SETTINGS: Final = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.sources.bucketing.enabled": "true",
    "spark.sql.sources.bucketing.autoBucketedScan.enabled": "false",
}
_WRITE: Final = {"maxRecordsPerFile": "0", "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false"}


class _State(NamedTuple):
    """What a version says about itself."""

    ids: str | None  # their type; None if there was never anybody
    partitions: int
    people: Sequence[str]  # files
    removed: Sequence[str]


class Spark:
    """See the module.

    Ids are whole numbers of 64 bits or strings, whichever come first. They are passed as a list or an array, if they
    are few, or as a DataFrame of the session's context with a column `id`; a table of prices has a column `which`
    beside it. A DataFrame is computed more than once, and must have the same rows each time.
    """

    in_order = False

    def __init__(self, session: Any) -> None:  # noqa: ANN401  the library is loaded only here
        if not isinstance(session, _sql.SparkSession):
            raise InvalidPolicy("this engine needs a session: pass session=SparkSession.builder.getOrCreate()")
        self._session = session
        with private():
            # Of the same context, with settings of its own: those of the caller's session stay as they are.
            self._own = session.newSession()
            for name, value in _SETTINGS.items():
                self._own.conf.set(name, value)

    def create(self, site: Site, after: Path, ids: Any) -> None:  # noqa: ANN401  a count, a list, a DataFrame
        """Write zeros for each id; a count of people means 0, 1, 2, ..."""
        with private():
            partitions = int(self._session.conf.get("spark.sql.shuffle.partitions"))
            step = _Step(self._own, site, after, _State(None, partitions, [], []))
            given = step.given(self._own.range(ids) if isinstance(ids, int) and ids > 0 else ids)
            zeros = [f"0L AS {total}" for total in _totals(site)]
            step.write(step.named(given).selectExpr("id", *zeros, "false AS took"))

    def digest(self, site: Site, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of prices, or of ids: for a DataFrame, of what keyed hashes of its rows add up to."""
        parts, rows, columns = [b"ids"], asked, ["id"]
        if isinstance(asked, Priced):
            amounts = np.ascontiguousarray(asked.amounts)
            parts = [b"prices", str(amounts.shape).encode(), amounts.tobytes(), str(asked.same).encode()]
            rows, columns = _rows(asked), ["id", "which"]
        if rows is None:
            return site.versions.digest(*parts)
        if not isinstance(rows, _sql.DataFrame):
            lines = _lines(_listed(rows))
            return site.versions.digest(*parts, "".join(sorted(lines if "which" in columns else set(lines))).encode())
        _kind(rows, columns)
        # What is derived from the secret may be in a plan, where Spark would show it; the secret itself may not.
        seeds = [int(site.versions.digest(lane)[:15], 16) for lane in (b"first", b"second")]
        codes = [
            f"bit_xor(xxhash64({seed}L, {', '.join(f'CAST({name} AS string)' for name in columns)}))"
            for seed in seeds
        ]
        with private():
            found = rows.select(*columns) if "which" in columns else rows.select(*columns).distinct()
            return site.versions.digest(*parts, str(tuple(found.selectExpr("count(*)", *codes).first())).encode())

    def charge(self, site: Site, before: Path, after: Path, prices: Priced, progress: Progress | None) -> None:
        """Charge people where they are; if everybody is asked for the same there is nothing to join."""
        rows = _rows(prices)
        with private(before):
            step = _Step(self._own, site, after, _read(before), before)
            if rows is None:
                amounts = [f"{amount}L AS amount_{i}" for i, amount in enumerate(prices.amounts[0])]
                step.write(_charged(site, step.people().selectExpr("*", *amounts)), progress)
                return
            asked = step.priced(step.named(step.given(rows, "which")), prices)
            step.write(_charged(site, step.met(asked, "full" if site.unknown == "join" else "left")), progress)

    def join(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Add those who are not there yet."""
        with private(before):
            step = _Step(self._own, site, after, _read(before), before)
            met = step.met(step.named(step.given(ids)), "full")
            step.write(met.selectExpr("id", *_totals(site), "false AS took"))

    def remove(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as in `create`
        """Drop people from the table, and keep keyed hashes of their ids."""
        with private(before):
            step = _Step(self._own, site, after, _read(before), before)
            named = step.named(step.given(ids))
            step.mark(named)
            left = step.met(named, "left").where("times IS NULL")
            step.write(left.selectExpr("id", *_totals(site), "false AS took"))

    def taking_part(self, site: Site, folder: Path) -> Frame:
        """Return those who took part as a DataFrame with a column `id`, which is read when it is used.

        They stay where they are, to be joined with there. It can be used while its version is kept.
        """
        with private(folder):
            table = self._session.read.options(**READ).schema(_schema(site, _read(folder).ids))
            return table.parquet(uri(folder / _PEOPLE)).where("took").select("id")

    def mask(self, site: Site, folder: Path) -> Any:  # noqa: ANN401, ARG002  as engines have it
        """Raise `LedgerError`: only dense ids have a mask."""
        raise LedgerError("people of this engine are in no order, so there is no mask of them: use their ids")

    def count(self, site: Site, folder: Path, amounts: Sequence[int]) -> int:
        """Count where they are."""
        asked = [f"{amount}L" for amount in amounts]
        with private(folder):
            table = self._session.read.options(**READ).schema(_schema(site, _read(folder).ids))
            found = table.parquet(uri(folder / _PEOPLE)).where("took").where(_fits(site, asked))
            return int(found.count())

    def accept(self, records: Any) -> Frame:  # noqa: ANN401  a DataFrame
        """Return what was passed, if it is a DataFrame of Spark."""
        if not isinstance(records, _sql.DataFrame):
            raise InvalidGuarantee(
                f"records must be a DataFrame of Spark with the column id (got a {type(records).__name__}); nothing"
                " was charged. Make one with session.createDataFrame"
            )
        return records

    def form(self, records: Frame) -> Hashable:
        """Return the names and types of the columns."""
        return str(records.schema.simpleString())

    def check(self, site: Site, folder: Path, records: Frame) -> None:  # noqa: ARG002  as engines have it
        """Raise unless records have ids of the population's kind."""
        own = _read(folder).ids
        if _kind(records, ["id"]) != (own or _kind(records, ["id"])):
            kinds = _WORDS[own] if own else " or ".join(_WORDS.values())
            raise InvalidGuarantee(f"records must be a DataFrame whose ids are {kinds}; nothing was charged")

    def nobody(self, records: Frame) -> Frame:
        """Return no rows."""
        return records.limit(0)

    def records(self, site: Site, folder: Path, records: Frame) -> Frame:
        """Return the rows whose `id` took part, which are read when they are used."""
        with private(folder):
            return records.join(self.taking_part(site, folder), "id", "left_semi")


class _Step:
    """One step: from the version before, if there is one, to the next."""

    def __init__(self, session: Session, site: Site, after: Path, state: _State, before: Path | None = None) -> None:
        self._session = session
        self._site = site
        self._after = after
        self._state = state
        self._before = before or after
        for folder in (_PEOPLE, _REMOVED, _HANDED):
            make_folder(after / folder)  # or what executors make in it could be read by others

    def people(self) -> Frame:
        """Return the table of the version before."""
        schema = _schema(self._site, self._state.ids)
        return partitioned(self._session, self._before / _PEOPLE, schema, self._state.partitions)

    def given(self, asked: Any, *others: str) -> Frame:  # noqa: ANN401  what engines are passed
        """Return what was passed as a DataFrame with ids of the population's kind, which is that of the first."""
        columns, listed = ["id", *others], None if isinstance(asked, _sql.DataFrame) else _listed(asked)
        kind = _kind(asked, columns) if listed is None else _kind_listed(listed["id"])
        ids = self._state.ids or kind or "bigint"
        if kind not in (ids, None):
            raise InvalidGuarantee(f"ids must be {_WORDS[ids]} for this population; nothing was changed")
        if listed is not None:
            asked = self._handed("given", f"id {ids}, which int", listed)
        self._state = self._state._replace(ids=self._state.ids or kind)
        return asked.selectExpr(f"coalesce(CAST(id AS {ids}), {refusal('nameless')}) AS id", *others)

    def named(self, given: Frame) -> Frame:
        """Return each person who is named, once, where they are: how often, and if they are gone, removed before."""
        columns = given.columns
        gone = "false AS gone"
        if self._state.removed:
            marks = self._marks().selectExpr("mark", "true AS found")
            given, gone = self._marked(given).join(marks, "mark", "left"), "found IS NOT NULL AS gone"
        placed = given.selectExpr(*columns, gone).repartition(self._state.partitions, "id")
        one = [_F.max(column).alias(column) for column in (*columns[1:], "gone")]
        return placed.groupBy("id").agg(_F.count("*").alias("times"), *one)

    def priced(self, named: Frame, prices: Priced) -> Frame:
        """Return what it adds to each total of those who are named, each of whom must be so once."""
        columns = {f"amount_{i}": column for i, column in enumerate(prices.amounts.T)}
        schema = ", ".join(["which int", *[f"{name} bigint" for name in columns]])
        amounts = self._handed("amounts", schema, {"which": np.arange(len(prices.amounts)), **columns})
        first = f"IF(times > 1, {refusal('twice')}, coalesce(amount_0, {refusal('nowhere')})) AS amount_0"
        return named.join(_F.broadcast(amounts), "which", "left").selectExpr("id", "gone", first, *[*columns][1:])

    def met(self, named: Frame, how: str) -> Frame:
        """Return everybody beside what they are named for, and with "full" whoever is new.

        Those have spent nothing, and all if they are gone. The named are moved, and nobody else; those of a partition
        must fit in memory.
        """
        everybody = self.people().drop("took").join(named.hint("shuffle_hash"), "id", how)
        new = _F.expr(f"IF(gone, {SPENT}L, 0L)")
        return everybody.withColumns({total: _F.coalesce(total, new) for total in _totals(self._site)})

    def write(self, people: Frame, progress: Progress | None = None) -> None:
        """Write the version, with every row in its place."""
        partitions = self._state.partitions
        here = f"IF(pmod(hash(id), {partitions}) = spark_partition_id(), took, {refusal('misplaced')})"
        people = people.withColumn("took", _F.expr(here))
        carried_out(self._session, lambda: self._write(people, _PEOPLE), partitions, progress)
        shutil.rmtree(self._after / _HANDED)
        if not any((self._after / _REMOVED).iterdir()):
            for name in self._state.removed:
                keep_file(self._before / _REMOVED / name, self._after / _REMOVED / name)
        files = {part: sorted(path.name for path in (self._after / part).iterdir()) for part in (_PEOPLE, _REMOVED)}
        write_file(self._after / _STATE, json.dumps({"form": 1, **self._state._asdict(), **files}).encode())

    def mark(self, named: Frame) -> None:
        """Write keyed hashes of the ids of those who are named and there, beside those of the version before."""
        marks = self._marked(self.people().select("id").join(named, "id", "left_semi")).select("mark")
        if self._state.removed:
            marks = marks.union(self._marks())
        self._write(marks.repartition(self._state.partitions, "mark").distinct(), _REMOVED)

    def _marks(self) -> Frame:
        table = self._session.read.options(**READ).schema("mark binary")
        return table.parquet(uri(self._before / _REMOVED))

    def _marked(self, people: Frame) -> Frame:
        """Add a keyed hash of each id."""
        inner = _F.unhex(_F.sha2(_F.concat("secret", _F.col("id").cast("string").cast("binary")), 256))
        mark = _F.unhex(_F.sha2(_F.concat("secret", inner), 256))
        return secret_of(self._session, self._site).crossJoin(people).withColumn("mark", mark).drop("secret")

    def _handed(self, name: str, schema: str, columns: Mapping[str, Any]) -> Frame:
        """Hand columns to the executors, in a file that is gone when the step is over."""
        path = self._after / _HANDED / name
        write_file(path, "".join(_lines(columns)).encode())
        return self._session.read.options(**READ).schema(schema).json(uri(path))

    def _write(self, rows: Frame, part: str) -> None:
        """Write a table, a file for each partition that has rows."""
        folder = self._after / part
        rows.write.mode("append").options(**_WRITE).parquet(uri(folder))
        for path in folder.iterdir():
            _, _, rest = path.name.partition("part-")
            if path.name.startswith("part-"):
                path.rename(folder / f"part_{rest[: rest.index('-')]}.parquet")  # as Spark reads the number from it
            else:
                path.unlink()  # checksums, under the name that was
        restrict(folder)


def _charged(site: Site, asked: Frame) -> Frame:
    """Return the totals after a charge, and who takes part."""
    totals = _totals(site)
    # Nothing is known to fit whoever is asked for nothing: they do not take part.
    took = f"coalesce({_fits(site, [f'amount_{i}' for i in range(len(totals))])}, false)"
    after = [f"IF(took, least({total} + amount_{i}, {SPENT}L), {total}) AS {total}" for i, total in enumerate(totals)]
    return asked.withColumn("took", _F.expr(took)).selectExpr("id", *after, "took")


def _fits(site: Site, amounts: Sequence[str]) -> str:
    """Return the condition under which somebody admits amounts."""
    within, *alternatives = [
        f"{total} + {amount} <= {limit}L"
        for total, amount, limit in zip(_totals(site), amounts, site.gate.limits, strict=True)
    ]
    return f"{within} AND ({' OR '.join(alternatives)})"


def _rows(prices: Priced) -> Any:  # noqa: ANN401  a DataFrame, or columns
    """Return who is asked for what; None if everybody is asked for the same."""
    if prices.same:
        return None
    if prices.table is not None:
        if not isinstance(prices.table, _sql.DataFrame):
            raise InvalidGuarantee("table must be a DataFrame of Spark for this engine; nothing was charged")
        return prices.table
    if prices.ids is None:
        raise InvalidGuarantee("pass ids beside which: people of this engine are in no order. Nothing was charged")
    return {"id": prices.ids, "which": prices.which}


def _listed(asked: Any) -> dict[str, Any]:  # noqa: ANN401  a list, an array, columns
    """Return columns; 0 is nobody."""
    columns: dict[str, Any] = asked if isinstance(asked, dict) else {"id": asked}
    ids = np.asarray([] if isinstance(columns["id"], int) and columns["id"] == 0 else columns["id"])
    if ids.ndim != 1:
        raise InvalidGuarantee("ids must be a list, or a DataFrame with the column id; nothing was changed")
    _kind_listed(ids)
    return {**columns, "id": ids}


def _kind_listed(ids: Any) -> str | None:  # noqa: ANN401  an array
    """Return the type of ids in an array; None if there are none."""
    if not ids.size:
        return None
    if ids.dtype.kind == "i" or (ids.dtype.kind == "u" and int(ids.max()) < 1 << 63):
        return "bigint"
    try:
        "".join(ids).encode()
    except (TypeError, UnicodeEncodeError):
        raise InvalidGuarantee(f"ids must be {' or '.join(_WORDS.values())}; nothing was changed") from None
    return "string"


def _kind(frame: Frame, columns: Sequence[str]) -> str:
    """Return the type of the ids of a DataFrame, or raise what is wrong with its columns."""
    types = dict(frame.dtypes)
    missing = [column for column in columns if column not in types]
    if missing:
        raise InvalidGuarantee(f"a DataFrame must have the column {missing[0]!r}; nothing was changed")
    if _KINDS.get(types.get("which", "int")) != "bigint":
        raise InvalidGuarantee("which must be whole numbers: places in guarantees; nothing was charged")
    if types["id"] not in _KINDS:
        raise InvalidGuarantee(f"ids must be {' or '.join(_WORDS.values())}; nothing was changed")
    return _KINDS[types["id"]]


def _lines(columns: Mapping[str, Any]) -> list[str]:
    """Return a line of JSON for each row."""
    rows = zip(*[np.asarray(column).tolist() for column in columns.values()], strict=True)
    return [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]


def _read(folder: Path) -> _State:
    """Return what a version says about itself, if all its files are there."""
    try:
        form = json.loads((folder / _STATE).read_text())
        state = _State(form["ids"], form["partitions"], form["people"], form["removed"])
    except (KeyError, TypeError, ValueError):
        raise LedgerCorrupt(f"{folder / _STATE} is damaged; restore the population from a copy") from None
    for part, names in ((_PEOPLE, state.people), (_REMOVED, state.removed)):
        if {path.name for path in (folder / part).iterdir()} != set(names):
            raise LedgerCorrupt(f"files of {folder} are missing, or others were added; restore them from a copy")
    return state


def _schema(site: Site, ids: str | None) -> str:
    totals = [f"{total} bigint" for total in _totals(site)]
    return ", ".join([f"id {ids or 'bigint'}", *totals, "took boolean"])


def _totals(site: Site) -> list[str]:
    return [f"total_{i}" for i in range(len(site.gate.limits))]
