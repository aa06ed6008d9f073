"""What the Spark engine asks of Spark: partitioned tables, the secret, how far a job has come, and its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

from odograph.errors import InvalidGuarantee, LedgerError
from odograph.extras import load
from odograph.population.engines import Site
from odograph.progress import Progress

__all__ = ["READ", "Frame", "Session", "carried_out", "partitioned", "private", "refusal", "secret_of", "uri"]

_pyspark = load("pyspark")
_sql = load("pyspark.sql")
_errors = load("pyspark.errors")
_F = load("pyspark.sql.functions")
_py4j = load("py4j.protocol")

Frame: TypeAlias = Any  # a DataFrame: the library need not be there
Session: TypeAlias = Any

READ: Final = {
    "__globPaths__": "false",  # a name is a name, whatever is in it
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
}
_POLL: Final = 0.1  # seconds
# What an executor may find, and says by its name.
_REFUSALS: Final = {
    "misplaced": LedgerError("Spark would have written people where nobody looks for them; nothing was changed"),
    "nameless": InvalidGuarantee("ids must be there in every row; nothing was changed"),
    "nowhere": InvalidGuarantee(
        "which must be places in guarantees, counted from 0, in every row; nothing was charged"
    ),
    "twice": InvalidGuarantee("ids must name each person once; nothing was charged"),
}


class _Unreachable(LedgerError, OSError):
    """The version before is gone: another process may have moved on, and cleaned up behind itself."""


def partitioned(session: Session, folder: Path, schema: str, partitions: int) -> Frame:
    """Return a table, and let Spark know how it is partitioned.

    Only tables of a catalog can say so in the public interface, and a catalog may be shared and outlive the step.
    """
    jvm, own = session._jvm, session._jsparkSession  # noqa: SLF001  as the docstring says
    seq, some = jvm.PythonUtils.toSeq, jvm.scala.Option.apply
    buckets = jvm.org.apache.spark.sql.catalyst.catalog.BucketSpec(partitions, seq(["id"]), seq([]))
    source = jvm.org.apache.spark.sql.execution.datasources.DataSource(
        own,
        "parquet",
        seq([uri(folder)]),
        some(jvm.org.apache.spark.sql.types.StructType.fromDDL(schema)),
        seq([]),
        some(buckets),
        jvm.PythonUtils.toScalaMap(READ),
        jvm.scala.Option.empty(),
    )
    return _sql.DataFrame(own.baseRelationToDataFrame(source.resolveRelation(True)), session)  # noqa: FBT003


def secret_of(session: Session, site: Site) -> Frame:
    """Return one row with the secret: its value is in no plan."""
    file = session.read.format("binaryFile").options(**READ).load(uri(site.versions.location / "secret"))
    return _F.broadcast(file.select(_F.col("content").alias("secret")))


def carried_out(session: Session, work: Callable[[], None], tasks: int, progress: Progress | None) -> None:
    """Do the work, and say how far it has come."""
    if progress is None:
        work()
        return
    context, group, last = session.sparkContext, str(uuid4()), 0

    def grouped() -> None:
        context.setJobGroup(group, "a step of a population")
        work()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(_pyspark.inheritable_thread_target(grouped))
        try:
            while not wait([running], _POLL).done:
                percent = _percent(context.statusTracker(), group, tasks)
                if percent > last:
                    last = percent
                    progress(last, 100)
        except BaseException:
            context.cancelJobGroup(group)
            raise
    running.result()
    progress(100, 100)


def _percent(tracker: Any, group: str, tasks: int) -> int:  # noqa: ANN401  untyped library
    """Return how much of the jobs of a group is done, of those that have begun."""
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    done = sum(int(stage.numCompletedTasks) for stage in stages if stage)
    return min(99, 100 * done // max(tasks, sum(int(stage.numTasks) for stage in stages if stage)))


@contextmanager
def private(before: Path | None = None) -> Iterator[None]:
    """Say in our own words what went wrong: Spark's may have somebody's id or total in them."""
    try:
        yield
    except (_errors.PySparkException, _py4j.Py4JError, ConnectionError) as problem:
        text = str(problem)
        for name, error in _REFUSALS.items():
            if _marker(name) in text:
                raise type(error)(*error.args) from None
        if before is not None and not before.is_dir():
            raise _Unreachable("the version that this step began from is gone; nothing was changed") from None
        raise LedgerError(
            "Spark could not do this step, and nothing was changed; its own log says why. See that the session runs,"
            " that all its workers reach the population's folder, and what is passed can be computed"
        ) from None


def refusal(name: str) -> str:
    """Return an expression that ends the job, and makes `private` raise the refusal of that name."""
    return f"raise_error('{_marker(name)}')"


def _marker(name: str) -> str:
    return f"odograph-refusal-{name}."


def uri(path: Path) -> str:
    """Return a path of this machine's file system, whatever Spark takes a path for otherwise."""
    return f"file://{path}"
