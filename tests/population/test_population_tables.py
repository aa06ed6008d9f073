"""Prices, ids and records come from arrays and tables of any library, and mean the same on every engine."""

from __future__ import annotations

import tracemalloc
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from population_helpers import PopulationFactory, compiled_for, took

import odograph as odo
from odograph import Prices, PureDP
from odograph.errors import InvalidArgument, InvalidGuarantee
from odograph.population.input_tables import columns_of

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

BASIC = compiled_for("basic")
SMALL, LARGE = PureDP("0.1"), PureDP("0.7")
Columns = dict[str, Any]


def parquet(columns: Columns, folder: Path, parts: int) -> Path:
    """Write columns as Parquet files of a folder, with other files beside them."""
    target = folder / f"{uuid.uuid4().hex} [a=1]"
    target.mkdir()
    table = pa.table(columns)
    for part in range(parts):
        rows = np.array_split(np.arange(len(table)), parts)[part]
        pq.write_table(table.take(rows), target / f"part-{part}.parquet")
    (target / "_SUCCESS").write_text("")
    (target / ".part-0.parquet.crc").write_text("a checksum")
    return target


class Capsule:
    """A table of a library that nothing is known of: it exports Arrow's C data interface."""

    def __init__(self, columns: Columns) -> None:
        self._table = pa.table(columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "array": np.array,
    "arrow": pa.array,
    "chunks": lambda values: pa.chunked_array([values[:1], values[1:]]),
    "pandas": pd.Series,
    "pandas on arrow": lambda values: pd.Series(pd.array(values, dtype=pd.ArrowDtype(pa.array(values).type))),
    "polars": pl.Series,
}
TABLES: dict[str, Callable[[Columns, Path], Any]] = {
    "arrow": lambda columns, _: pa.table(columns),
    "batch": lambda columns, _: pa.record_batch(columns),
    "pandas": lambda columns, _: pd.DataFrame(columns),
    "polars": lambda columns, _: pl.DataFrame(columns),
    "lazy": lambda columns, _: pl.LazyFrame(columns),
    "capsule": lambda columns, _: Capsule(columns),
    "file": lambda columns, folder: next(parquet(columns, folder, 1).glob("*.parquet")),
    "folder": lambda columns, folder: parquet(columns, folder, 3),
    "pattern": lambda columns, folder: f"{str(parquet(columns, folder, 2)).replace('[', '[[]')}/part-*.parquet",
}
SPARK_TABLES = ("folder",)  # of Spark, whose rounds take longer


def names_for(populations: PopulationFactory) -> Callable[[Sequence[int]], list[Any]]:
    """Ids as the engine has them: numbers from 0, or names."""
    if populations.engine == "numpy":
        return lambda numbers: [*numbers]
    return lambda numbers: [f"person {number}" for number in numbers]


def test_ids_and_prices_come_as_columns_of_any_library(populations: PopulationFactory) -> None:
    names = names_for(populations)
    people = populations.create(names(range(4)), compiled=BASIC)
    for form in COLUMNS if populations.session is None else ("polars",):
        make = COLUMNS[form]
        people.join(make(names([4, 5])), key="join")
        prices = Prices.of(PureDP, make([0.0625, 0.0, 0.25]), ids=make(names([5, 1, 0])))
        step = people.charge(prices, key="charge")
        assert took(step) == set(names([5, 1, 0]))
        which = Prices([LARGE, SMALL], make([1, 0]), ids=make(names([2, 3])))
        assert took(people.charge(which, key="which")) == set(names([2, 3]))
    assert len(people.history()) == 4, "the same request in another form was charged again"
    state = populations.state(people)
    spent = dict(zip(names(range(6)), (25, 0, 10, 70, 0, 6.25), strict=True))
    assert {one: state[one][1] for one in spent} == {one: amount * 10**13 for one, amount in spent.items()}


def test_ids_prices_and_records_come_as_tables_of_any_library(populations: PopulationFactory, tmp_path: Path) -> None:
    names, few = names_for(populations), populations.session is not None
    people = populations.create(names(range(4)), compiled=BASIC)
    seen: list[Any] = []
    for number, form in enumerate(SPARK_TABLES if few else TABLES):
        make = TABLES[form]
        people.join(make({"other": ["x", "y"], "id": names([4, 5])}, tmp_path), key="join")
        which = make({"which": [1, 0], "id": names([2, 3]), "other": [0.5, 0.5]}, tmp_path)
        step = people.charge(Prices([LARGE, SMALL], table=which), key="which")
        assert step.receipt.repeated or took(step) == set(names([2, 3]))
        sized = make({"person": names([5, 1, 0]), "size": [0.0625, 0.0, 0.25]}, tmp_path)
        prices = Prices.of(PureDP, "size", ids="person", table=sized)
        step = people.charge(prices, key="charge")
        assert step.receipt.repeated or took(step) == set(names([5, 1, 0]))
        if not few:
            records = make({"value": [5, 3, 1, 4, 2, 0], "id": names([5, 3, 1, 4, 2, 0])}, tmp_path)
            seen.append(people.run(values_of, records, PureDP("0.02") if number == 0 else PureDP(0), key=form))
    assert len(people.history()) == 4 + len(seen)
    assert all(found == [0, 1, 2, 3, 4, 5] for found in seen)
    state = populations.state(people)
    spent = dict(zip(names(range(6)), (25, 0, 10, 70, 0, 6.25), strict=True))
    extra = 0 if few else 2
    assert {one: state[one][1] for one in spent} == {one: (amount + extra) * 10**13 for one, amount in spent.items()}


def values_of(records: Any) -> list[int]:  # noqa: ANN401  a table
    """A mechanism that reads a column of whichever table it gets."""
    if hasattr(records, "fetchall"):
        return sorted(row[0] for row in records.project("value").fetchall())
    column = records["value"]
    return [*(column.to_list() if hasattr(column, "to_list") else column.to_pylist())]


@given(
    sizes=st.lists(st.floats(0, 4), min_size=1, max_size=20),
    form=st.sampled_from(["arrow", "batch", "pandas", "polars", "lazy", "capsule"]),
    data=st.data(),
)
def test_prices_of_a_table_are_those_of_its_lists(sizes: list[float], form: str, data: st.DataObject) -> None:
    ids = data.draw(st.permutations(range(len(sizes))))
    expected = Prices.of(PureDP, sizes, ids=ids)
    found = Prices.of(PureDP, "size", ids="id", table=TABLES[form]({"id": ids, "size": sizes}, Path()))
    assert found.guarantees == expected.guarantees
    assert found.which.tolist() == expected.which.tolist()
    assert np.asarray(found.ids).tolist() == [*ids]


@pytest.mark.parametrize("form", ["arrow", "batch", "pandas", "polars"])
def test_records_of_a_table_reach_prices_and_mechanism_in_the_type_that_they_came_in(
    dense: PopulationFactory, form: str, tmp_path: Path
) -> None:
    """Each row is its own person's, whatever the order is, and those who are left out are not there."""
    people = dense.create(4, compiled=BASIC)
    people.charge(Prices([PureDP(1)], [0], ids=[2]), key="spent")
    records = TABLES[form]({"id": [3, 0, 2, 1], "size": [0.5, 0.0, 0.25, 0.125]}, tmp_path)
    seen: list[Any] = []

    def mechanism(rows: Any) -> int:  # noqa: ANN401  a table
        seen.append(rows)
        return len(rows)

    price = odo.vectorized_price(PureDP)(lambda rows, _: np.asarray(rows["size"]) / 2)
    assert people.run(mechanism, records, price, key="a") == 3
    nobody, rows = seen
    assert type(nobody) is type(rows) is type(records)
    assert len(nobody) == 0
    assert np.asarray(rows["id"]).tolist() == [0, 1, 3]
    assert np.asarray(rows["size"]).tolist() == [0.0, 0.125, 0.5]
    assert dense.state(people) == {0: (0, 0), 1: (0, 625 * 10**11), 2: (0, 10**15), 3: (0, 25 * 10**13)}
    with pytest.raises(InvalidGuarantee, match="vectorized_price"):
        people.run(mechanism, records, lambda _, __: SMALL, key="b")


@pytest.mark.parametrize("form", COLUMNS)
def test_a_column_of_numbers_reaches_the_mechanism_as_an_array(dense: PopulationFactory, form: str) -> None:
    people = dense.create(3, compiled=BASIC)
    people.charge(Prices([PureDP(1)], [0], ids=[1]), key="spent")
    seen: list[Any] = []
    people.run(seen.append, COLUMNS[form]([1.5, 2.5, 4.0]), SMALL, key="a")
    assert [list(records) for records in seen] == [[], [1.5, 4.0]]
    assert type(seen[1]) is (list if form == "list" else np.ndarray)
    with pytest.raises(InvalidArgument, match=r"records must have no null .row 1"):
        people.run(seen.append, pa.array([1, None, 2]), SMALL, key="b")


def test_a_price_that_depends_on_other_rows_of_a_table_is_refused(dense: PopulationFactory) -> None:
    people = dense.create(50, compiled=BASIC)
    records = pl.DataFrame({"id": range(50), "size": np.linspace(0.1, 0.5, 50)})
    price = odo.vectorized_price(PureDP)(lambda rows, _: rows["size"] / rows["size"].sum())
    with pytest.raises(InvalidGuarantee, match="depends on other people's records"):
        people.run(len, records, price, key="a")
    assert len(people.history()) == 1


MIXED: Any = [1, "a"]
# What is wrong with the ids and indices of a table, and what the refusal names.
WRONG: dict[str, tuple[Columns, str]] = {
    "no column": ({"id": [0, 1], "index": [0, 0]}, "column 'which'.*it has 'id', 'index'"),
    "a null id": ({"id": pa.array([0, 1, None]), "which": [0, 0, 0]}, "'id'.*row 2"),
    "a null index": ({"id": [0, 1, 2], "which": pa.array([0, None, 1])}, "which.*row 1"),
    "nan": ({"id": [0.0, float("nan")], "which": [0, 0]}, "ids must be .*floats|ids must be .*double"),
    "twice": ({"id": [7, 0, 7], "which": [0, 0, 0]}, "ids must name each person once .*row.*0"),
    "no index": ({"id": [0, 1], "which": [0, 2]}, "which must be from 0 to 1"),
    "too large": ({"id": pa.array([0, 2**63 + 7], pa.uint64()), "which": [0, 0]}, "ids .*must.*row 1"),
}


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_a_table_is_refused_with_its_column_and_row(
    populations: PopulationFactory, wrong: str
) -> None:
    columns, said = WRONG[wrong]
    people = populations.create(3, compiled=BASIC)
    with pytest.raises(InvalidArgument, match=said) as caught:
        people.charge(Prices([SMALL, LARGE], table=pa.table(columns)), key="a")
    assert caught.value.charged is False
    assert "9223372036854775815" not in str(caught.value)
    assert len(people.history()) == 1
    assert took(people.charge(Prices([SMALL, LARGE], table=pa.table({"id": [1], "which": [0]})), key="a")) == {1}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Prices.of(PureDP, "mu", table=pl.DataFrame({"size": [1.0]})), "column 'mu' .it has 'size'"),
        (lambda: Prices.of(PureDP, "size", table=pl.DataFrame({"size": [1.0, None]})), "'size'.*row 1.*fill it"),
        (lambda: Prices.of(PureDP, "size", table=pl.DataFrame({"size": [1.0, 2.0, float("nan")]})), "row 2.*NaN"),
        (lambda: Prices.of(PureDP, pd.Series([0.5, None])), "row 1.*NaN"),
        (lambda: Prices.of(PureDP, pa.array(["0.5"])), "values must be numbers"),
        (lambda: Prices.of(PureDP, [0.5], table=pl.DataFrame({"size": [1.0]})), "names of columns"),
        (lambda: Prices.of(PureDP, "size", ids=[1], table=pl.DataFrame({"size": [1.0]})), "names of columns"),
        (lambda: Prices.of(PureDP, "size", table={"size": [1.0], "id": [1, 2]}, ids="id"), "same length"),
        (lambda: Prices.of(PureDP, "size", table=3.5), "got a float"),
        (lambda: Prices.of(PureDP, "s", table=pa.table([[1.0], [2.0]], names=["s", "s"])), "'s' once"),
        (lambda: Prices.of(PureDP, "s", table=pd.DataFrame([[1, 2]], columns=["s", "s"])), "'s' once"),
        (lambda: Prices.of(PureDP, "size", table="/nowhere/*.parquet"), "found none at '/nowhere/.*pass a file"),
        (lambda: Prices.of(PureDP, "size", table=__file__), "must be Parquet files"),
        (lambda: Prices([SMALL], [0, 0], ids=MIXED), "one kind .row 0 is a int"),
        (lambda: Prices([SMALL], pa.array([0, None])), "which .*row 1"),
    ],
)
def test_what_is_wrong_in_a_column_is_refused_with_its_row(make: Callable[[], Prices], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        make()


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_records_without_usable_ids_are_refused_before_anybody_is_charged(populations: PopulationFactory) -> None:
    people = populations.create(3, compiled=BASIC)
    wrong = {
        "column 'id'": pl.DataFrame({"person": [0, 1, 2]}),
        "row 1": pl.DataFrame({"id": [0, None, 2]}),
    }
    if populations.engine == "numpy":
        wrong["rows 0 and 2"] = pl.DataFrame({"id": [1, 0, 1]})
        wrong["ids are missing"] = pl.DataFrame({"id": [0, 1, 3]})
        wrong["got more, or fewer"] = pl.DataFrame({"id": [0, 1]})
    for said, records in wrong.items():
        with pytest.raises(InvalidArgument, match=said):
            people.run(lambda _: 0, records, SMALL, key="a")
    assert len(people.history()) == 1


# UUIDs.

SOME = [uuid.UUID(int=(0xA0EEBC999C0B4EF8BB6D6BB9BD380A11 + one) % 2**128) for one in range(4)]
SPELLINGS: dict[str, Callable[[list[uuid.UUID]], Any]] = {
    "objects": list,
    "array of objects": lambda ids: np.array(ids, dtype=object),
    "text": lambda ids: [str(one) for one in ids],
    "capitals": lambda ids: pa.array([str(one).upper() for one in ids]),
    "no dashes": lambda ids: pl.Series([one.hex for one in ids]),
    "braces": lambda ids: [f"{{{one}}}" for one in ids],
    "urn": lambda ids: pd.Series([one.urn for one in ids]),
    "arrow": lambda ids: pa.array([one.bytes for one in ids], pa.uuid()),
    "16 bytes": lambda ids: pa.array([one.bytes for one in ids], pa.binary(16)),
}


def text_of(step: Any) -> set[str]:  # noqa: ANN401  participants
    return {str(one) for one in took(step)}


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_a_uuid_is_one_id_however_it_is_spelled(populations: PopulationFactory) -> None:
    people = populations.create(SOME[:3], compiled=BASIC)
    everybody = [str(one) for one in SOME]
    spellings = SPELLINGS if populations.session is None else [*SPELLINGS][::2]
    for name in spellings:
        spell = SPELLINGS[name]
        step = people.charge(Prices([SMALL, LARGE], [1, 0], ids=spell([SOME[1], SOME[0]])), key="once")
        assert text_of(step) == {*everybody[:2]}
    assert len(people.history()) == 2, "a UUID in another spelling was taken for another id"
    people.remove([str(SOME[0]).upper()], key="remove")
    people.join([SOME[0].hex, SOME[3].urn], key="join")
    assert text_of(people.charge(SMALL, key="all")) == {*everybody[1:]}, "a person came back under another spelling"
    with pytest.raises(InvalidArgument, match="ids must"):
        people.join([7], key="numbers")
    with pytest.raises(InvalidArgument, match="ids"):
        people.join(["no uuid"], key="words")
    records = pd.DataFrame({"id": [str(one).upper() for one in SOME], "value": range(4)})
    given: Any = (
        records
        if populations.session is None
        else populations.session.createDataFrame(
            [(str(one).upper(), value) for value, one in enumerate(SOME)], "id string, value int"
        )
    )
    assert people.run(count_rows, given, PureDP(0), key="run") == 3


def count_rows(records: Any) -> int:  # noqa: ANN401  a relation or a DataFrame
    return len(records.collect() if hasattr(records, "collect") else records.fetchall())


def test_text_that_is_taken_as_it_is_makes_two_people_of_one(populations: PopulationFactory) -> None:
    """Negative control of the test above: in a population of strings, spelling counts; and it takes no UUIDs."""
    if populations.engine == "numpy":
        return
    people = populations.create([str(SOME[0])], compiled=BASIC)
    people.charge(SMALL, key="a")
    people.join([str(SOME[0]).upper()], key="join")
    assert len(populations.state(people)) == 2
    with pytest.raises(InvalidArgument, match="be strings"):
        people.join([SOME[0]], key="uuid")


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_a_table_without_rows_names_nobody(populations: PopulationFactory) -> None:
    people = populations.create(2, compiled=BASIC)
    for number, table in enumerate((pl.DataFrame({"id": [], "size": []}), pd.DataFrame({"id": [], "size": []}))):
        prices = Prices.of(PureDP, "size", ids="id", table=table)
        assert took(people.charge(prices, key=f"{number}")) == set()
    assert took(people.charge(SMALL, key="all")) == {0, 1}


def test_integers_beyond_64_bits_are_refused(populations: PopulationFactory) -> None:
    people = populations.create([0], compiled=BASIC)
    for wrong in ([2**63], [2**70], [-(2**63) - 1], np.array([2**63 + 5], dtype=np.uint64)):
        with pytest.raises(InvalidArgument, match="ids"):
            people.join(wrong, key="a")
        with pytest.raises(InvalidArgument, match="ids"):
            people.charge(Prices([SMALL], [0], ids=wrong), key="b")
    assert len(people.history()) == 1


# Memory.

ROWS = 50_000
SIZE = 16 * ROWS  # bytes: an id and a size


def peak(work: Callable[[], object]) -> float:
    """The most memory of Python and NumPy that some work takes, relative to the data."""
    work()  # libraries are loaded
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / SIZE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["arrow", "batch", "pandas", "polars"])
def test_columns_of_a_table_are_read_without_a_copy(form: str) -> None:
    columns = {"id": np.arange(ROWS), "size": np.linspace(0, 1, ROWS)}
    table = TABLES[form](columns, Path())
    assert peak(lambda: columns_of(table, ["id", "size"])) < 0.05
    lists = pa.table(columns)
    # Negative control: with lists in between.
    assert peak(lambda: [np.array(lists[name].to_pylist()) for name in columns]) > 2


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_no_list_is_made_of_the_rows_of_a_table(populations: PopulationFactory) -> None:
    names = np.arange(ROWS) if populations.engine == "numpy" else pa.array([f"person {i}" for i in range(ROWS)])
    table = pa.table({"id": names, "size": np.arange(ROWS) % 4 / 16})
    people, keys = populations.create(table), iter("abcdefgh")

    def charge(ids: Any) -> None:  # noqa: ANN401  a column, or a list
        sizes = table["size"] if not isinstance(ids, list) else table["size"].to_pylist()
        people.charge(Prices.of(PureDP, sizes, ids=ids), key=next(keys))

    assert peak(lambda: charge(table["id"])) < peak(lambda: charge(table["id"].to_pylist())) - 2
