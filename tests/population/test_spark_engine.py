"""The Spark engine: what is special to it. What all engines promise is in the contract."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import spark_cluster
from spark_cluster import SparkCluster, environment, session

import odograph as odo
from odograph import Population, Prices, PureDP
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError
from odograph.population.engines.spark import SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

POLICY = odo.Policy(epsilon=1, delta="1e-6", filter="zcdp")
CHEAP, DEAR = PureDP("0.3"), PureDP("0.9")
SECRET = 987_654_321  # an id that must be nowhere


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with session("local[2]", tmp_path_factory.mktemp("spark")) as running:
        yield running


@pytest.fixture
def made(spark: SparkSession, tmp_path: Path) -> Callable[..., Population]:
    """Make populations on Spark, in a folder with a difficult name."""

    def make(ids: Any, name: str = "people", **choices: Any) -> Population:  # noqa: ANN401  what engines take
        ledger = odo.connect(f"sqlite:///{tmp_path}/ledger.db")
        where = tmp_path / f"a=1 [b] {{c}} 'd' %20 * {name}"
        return Population.create(
            name, POLICY, ledger=ledger, location=where, ids=ids, engine="spark", session=spark, **choices
        )

    return make


def took(step: Any) -> set[Any]:  # noqa: ANN401  an array or a DataFrame
    ids = step.ids
    return set(ids.tolist()) if hasattr(ids, "tolist") else {row.id for row in ids.collect()}


def current(population: Population) -> Path:
    return max(population._context.versions.location.glob("0*"))  # noqa: SLF001  a look into the files


def scenario(population: Population) -> list[list[int]]:
    """Charge everybody, and some; let people join, also with a charge, and remove some, who come back as spent."""
    name = population.name
    steps = [population.charge(CHEAP, key=f"{name}-1")]
    steps.append(population.charge(Prices([CHEAP, DEAR], [0, 1, 1, 0], ids=[10, 2, 11, 4]), key=f"{name}-2"))
    population.remove([4, 5], key=f"{name}-3")
    population.join([4, 5, 12], key=f"{name}-4")
    steps.append(population.charge(CHEAP, key=f"{name}-5"))
    steps.append(population.charge(Prices([CHEAP], [0, 0, 0], ids=[12, 4, 13]), key=f"{name}-6"))
    return [sorted(took(step)) for step in steps[-2:]]


def run(master: str, folder: Path) -> list[list[list[int]]]:
    """The same on Spark and on NumPy."""
    with (
        session(master, folder, spark_sql_shuffle_partitions=2) as spark,
        odo.connect(f"sqlite:///{folder}/ledger.db") as ledger,
    ):
        found = []
        for engine, own in (("numpy", None), ("spark", spark)):
            population = Population.create(
                engine, POLICY, ledger=ledger, location=folder / engine, ids=10, engine=engine, session=own,
                unknown="join",
            )  # fmt: skip
            found.append(scenario(population))
        return found


def test_a_cluster_of_two_worker_processes_decides_as_numpy_does(tmp_path: Path) -> None:
    with SparkCluster(tmp_path) as cluster:
        # In a process of its own: one has one session at a time, and this one's may be in use.
        command = [sys.executable, __file__, cluster.url, str(tmp_path)]
        paths = {"PYTHONPATH": str(Path(spark_cluster.__file__).parent)}
        done = subprocess.run(command, capture_output=True, check=False, timeout=300, env=os.environ | paths)  # noqa: S603
        assert done.returncode == 0, done.stderr[-2000:]
        used = {path.parents[1].name for path in tmp_path.glob("worker-*/app-*/*")}
    numpy, spark = json.loads((tmp_path / "found.json").read_text())
    assert numpy == spark
    assert spark[0] == [0, 1, 2, 3, 6, 7, 8, 9, 10, 12]
    assert spark[1] == [12, 13]
    assert used == {"worker-0", "worker-1"}  # an executor on each, and maybe one that took another's place


def test_strings_and_data_frames_are_charged_where_they_are(
    spark: SparkSession, made: Callable[..., Population]
) -> None:
    people = spark.range(1000).selectExpr("concat('person ', id) AS id")
    population = made(people)
    table = spark.range(0, 3000, 3).selectExpr("concat('person ', id) AS id", "CAST(id % 2 AS int) AS which")
    told: list[int] = []
    step = population.charge(Prices([CHEAP, DEAR], table=table), key="k", progress=lambda done, _: told.append(done))
    assert took(step) == {f"person {i}" for i in range(0, 1000, 3)}
    assert told == sorted(set(told))
    assert told[-1] == 100
    again = population.charge(Prices([CHEAP, DEAR], table=table.orderBy("which", "id").repartition(3)), key="k")
    assert again.receipt.repeated
    with pytest.raises(odo.IdempotencyConflict):
        population.charge(Prices([CHEAP, DEAR], table=table.where("id != 'person 3'")), key="k")
    with pytest.raises(odo.IdempotencyConflict):
        population.charge(Prices([CHEAP, DEAR], table=table.selectExpr("id", "1 - which AS which")), key="k")
    second = population.charge(Prices([CHEAP, DEAR], table=table), key="k2")
    assert took(second) == {f"person {i}" for i in range(0, 1000, 6)}
    files = {path.name for path in current(population).rglob("*") if path.is_file()}
    assert files == {"state.json", *[f"part_0000{number}.parquet" for number in range(4)]}


def test_the_people_of_a_step_are_never_moved_between_partitions(
    spark: SparkSession, made: Callable[..., Population], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[str] = []
    write = type(spark.range(1).write).parquet

    def seen(self: Any, path: str, *others: Any, **options: Any) -> None:  # noqa: ANN401  as it is called
        plans.append(self._df._jdf.queryExecution().executedPlan().toString())  # noqa: SLF001  the plan
        write(self, path, *others, **options)

    population = made(100, unknown="join")
    population.remove([SECRET, 1], key="remove")
    monkeypatch.setattr(type(spark.range(1).write), "parquet", seen)
    population.charge(CHEAP, key="all")
    population.charge(Prices([CHEAP], [0, 0], ids=[1, SECRET]), key="some")
    uniform, some = plans
    assert "Exchange" not in uniform
    assert re.findall(r"Exchange (\w+)\(id", some) == ["hashpartitioning"]
    assert some.count("hashpartitioning") == 1  # negative control below: a table that does not say how it is cut
    plain = spark.read.parquet(str(current(population) / "people").translate({ord(c): f"\\{c}" for c in "[]{}*"}))
    joined = plain.join(spark.range(5).repartition(4, "id").hint("shuffle_hash"), "id", "full")
    assert joined._jdf.queryExecution().executedPlan().toString().count("hashpartitioning") == 2  # noqa: SLF001
    hidden = [str(SECRET), current(population).parent.joinpath("secret").read_bytes().hex()]
    assert not any(word in plan.lower() for word in hidden for plan in plans)


def test_who_would_be_written_in_another_place_is_an_error_and_not_a_loss(made: Callable[..., Population]) -> None:
    population = made(100)
    population.charge(CHEAP, key="1")
    first, second = [current(population) / "people" / f"part_0000{number}.parquet" for number in (0, 1)]
    kept, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(kept)
    with pytest.raises(LedgerError, match="nothing was changed"):
        population.charge(CHEAP, key="2")
    second.unlink()
    with pytest.raises(LedgerCorrupt, match="missing"):
        population.charge(CHEAP, key="2")
    first.write_bytes(kept)
    second.write_bytes(other)
    assert took(population.charge(CHEAP, key="2")) == set(range(100))


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_rows_that_cannot_be_charged_are_refused_and_nothing_is_left(
    spark: SparkSession, made: Callable[..., Population], unknown: str
) -> None:
    population = made([3], unknown=unknown)  # three of four partitions are empty
    before = current(population)
    tables = {
        "once": "VALUES (3L, 0), (3L, 1) AS t(id, which)",
        "name each person once": f"VALUES ({SECRET}L, 0), ({SECRET}L, 0) AS t(id, which)",
        "every row": f"VALUES ({SECRET}L, 2) AS t(id, which)",
        "in every row": f"VALUES ({SECRET}L, CAST(NULL AS int)) AS t(id, which)",
        "must not be null": "VALUES (CAST(NULL AS bigint), 0), (3L, 1) AS t(id, which)",
        "integers of 64 bits": "VALUES ('3', 0) AS t(id, which)",
        "column 'which'": "VALUES (3L, 0) AS t(id, what)",
        "which must be integers": "VALUES (3L, 0.5) AS t(id, which)",
    }
    for text, rows in tables.items():
        with pytest.raises(InvalidArgument, match=text) as refused:
            population.charge(Prices([CHEAP, DEAR], table=spark.sql(f"SELECT * FROM {rows}")), key="k")  # noqa: S608
        assert str(SECRET) not in str(refused.value)
    with pytest.raises(InvalidArgument, match="in no order"):
        population.charge(Prices([CHEAP], [0]), key="k")
    with pytest.raises(InvalidArgument, match="Spark DataFrame"):
        population.charge(Prices([CHEAP], table=[(3, 0)]), key="k")
    for ids in ([1.5], ["\ud800"], [True], [[1]], 3, "3"):
        with pytest.raises(InvalidArgument, match="ids must be"):
            population.join(ids, key="k")
    assert list(before.parent.glob("0*")) == [before]
    with pytest.raises(LedgerError, match="in no order"):
        _ = population.charge(CHEAP, key="k").mask
    assert took(population.charge(Prices([CHEAP, DEAR], [1], ids=[3]), key="l")) == set()


def test_errors_of_spark_do_not_say_whose_row_it_was(spark: SparkSession, made: Callable[..., Population]) -> None:
    population = made(10)
    broken = f"id, IF(id = 3, CAST(raise_error('{SECRET} is in it') AS int), 0) AS which"
    table = spark.range(10).selectExpr(*broken.split(", ", 1))
    with pytest.raises(Exception, match=str(SECRET)):
        table.collect()  # negative control: Spark says it
    with pytest.raises(LedgerError, match="nothing was changed") as refused:
        population.charge(Prices([CHEAP], table=table), key="k")
    assert str(SECRET) not in str(refused.value)
    assert refused.value.__suppress_context__
    assert took(population.charge(CHEAP, key="k")) == set(range(10))


def test_who_was_removed_leaves_a_keyed_hash_and_comes_back_as_spent(made: Callable[..., Population]) -> None:
    population = made([SECRET, 1, 2], unknown="join")
    assert any(SECRET.to_bytes(8, "little") in path.read_bytes() for path in current(population).rglob("part*"))
    for number in range(2):  # a second time after they came back
        population.remove([SECRET, 99], key=f"remove {number}")
        files = [path.read_bytes() for path in current(population).rglob("*") if path.is_file()]
        assert not any(SECRET.to_bytes(8, "little") in file or str(SECRET).encode() in file for file in files)
        step = population.charge(Prices([CHEAP], [0, 0, 0], ids=[SECRET, 99, 1]), key=f"charge {number}")
        assert took(step) == ({99, 1} if number == 0 else {1})


def test_nobody_at_first_and_the_first_to_come_choose_the_kind_of_ids(made: Callable[..., Population]) -> None:
    population = made(0, unknown="join")
    assert took(population.charge(CHEAP, key="0")) == set()
    population.join([], key="1")
    assert took(population.charge(Prices([CHEAP, DEAR], [0, 1], ids=["é", "a\nb\"'"]), key="2")) == {"é", "a\nb\"'"}
    with pytest.raises(InvalidArgument, match="strings"):
        population.join([1], key="3")


def test_a_session_is_needed_and_its_settings_stay(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="session"):
        SparkEngine(None)
    before = spark.conf.get("spark.sql.adaptive.enabled")
    SparkEngine(spark)
    assert spark.conf.get("spark.sql.adaptive.enabled") == before == "true"
    assert environment()["JAVA_HOME"]
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    where = Path(sys.argv[2])
    own = Path(tempfile.mkdtemp(dir=where))
    (where / "found.json").write_text(json.dumps(run(sys.argv[1], own)))
