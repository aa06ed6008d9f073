"""What is special to the DuckDB engine: ids of any kind, folders of any name, little memory, discreet errors."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pytest

from odograph import Policy, PureDP, compile_policy
from odograph.errors import InvalidArgument, LedgerError, OdographError
from odograph.population.engines import EngineContext
from odograph.population.engines.duckdb import DuckDBEngine
from odograph.population.gate import SPENT, gate_of
from odograph.population.prices import Prices, PriceTable, price_table
from odograph.population.version_store import Versions

COMPILED = compile_policy(Policy(1, "1e-6", filter="basic"))
GATE = gate_of(COMPILED)
NOTHING = (0,) * len(GATE.limits)  # what somebody has spent at first
DEAR = PureDP("0.6")  # fits once
SECRET = "somebody-nobody-may-know"  # noqa: S105  an id


class People:
    """A population without a ledger: each step makes a version from the last one."""

    def __init__(
        self,
        location: Path,
        ids: Any = 0,  # noqa: ANN401  what DuckDB reads
        unknown: str = "join",
        engine: DuckDBEngine | None = None,
    ) -> None:
        self.engine = engine or DuckDBEngine()
        self.context = EngineContext(Versions(location), GATE, unknown)
        self.context.versions.create()
        self.steps = 0
        self.folder = self.begin()
        self.engine.create(self.context, self.folder, ids)

    def begin(self) -> Path:
        self.steps += 1
        return self.context.versions.begin(self.steps)

    def charge(self, prices: Prices | PureDP, progress: Callable[[int, int], None] | None = None) -> set[Any]:
        after = self.begin()
        self.engine.charge(self.context, self.folder, after, asked_for(prices), progress)
        self.folder = after
        return self.took()

    def join(self, ids: Any) -> None:  # noqa: ANN401  what the engine takes
        after = self.begin()
        self.engine.join(self.context, self.folder, after, ids)
        self.folder = after

    def remove(self, ids: Any) -> None:  # noqa: ANN401  as above
        after = self.begin()
        self.engine.remove(self.context, self.folder, after, ids)
        self.folder = after

    def digest(self, asked: Any) -> str:  # noqa: ANN401  as above
        return self.engine.digest(self.context, asked_for(asked) if isinstance(asked, Prices | PureDP) else asked)

    def took(self) -> set[Any]:
        return {row[0] for row in self.engine.participants(self.context, self.folder).fetchall()}

    def totals(self) -> dict[Any, tuple[int, ...]]:
        return {row[0]: row[1:-1] for row in rows_of(self.folder / "people.parquet")}


def asked_for(prices: Prices | PureDP) -> PriceTable:
    return price_table(COMPILED, GATE, prices)


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        return connection.read_parquet(str(path), hive_partitioning=False).fetchall()


def written(path: Path, query: str, *values: Any) -> Path:
    with duckdb.connect() as connection:
        connection.sql(query, params=[*values] or None).write_parquet(str(path))
    return path


STOPPED = 100 if os.environ.get("ODOGRAPH_FULL") == "1" else 3  # times; one of some dozens hung without the setting
LISTED = "SELECT unnest($1) AS id"
# The same ids, each time in a form of its own.
FORMS: dict[str, Callable[[list[Any], Path], Any]] = {
    "list": lambda ids, _: ids,
    "array": lambda ids, _: np.array(ids),
    "frame": lambda ids, _: pd.DataFrame({"other": 0.5, "id": ids}),
    "parquet": lambda ids, folder: written(folder / "ids.parquet", LISTED, ids),
    "parquet by its name": lambda ids, folder: str(written(folder / "ids.parquet", LISTED, ids)),
    "relation": lambda ids, _: duckdb.connect().sql(LISTED, params=[ids]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [[3, 1, 2], ["c", "it's", "b; --"]], ids=["integers", "strings"])
def test_ids_come_in_any_form(form: str, ids: list[Any], tmp_path: Path) -> None:
    given = FORMS[form](ids, tmp_path)
    people = People(tmp_path / "people", given)
    assert people.totals() == dict.fromkeys(ids, NOTHING)
    assert people.digest(given) == people.digest(ids[::-1])
    people.remove(FORMS[form](ids[:1], tmp_path))
    people.join(FORMS[form](ids[:2], tmp_path))
    spent = (SPENT,) * len(GATE.limits)
    assert people.totals() == {ids[0]: spent, ids[1]: NOTHING, ids[2]: NOTHING}


@pytest.mark.parametrize("form", ["arrays", "frame", "parquet", "relation"])
def test_prices_come_in_any_form_and_their_digest_is_the_same(form: str, tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a", "b", "c"])
    guarantees, query = [DEAR, PureDP(2)], "SELECT * FROM (VALUES ('b', 1), ('a', 0)) AS t(id, which)"
    prices = {
        "arrays": lambda: Prices(guarantees, [0, 1], ids=["a", "b"]),
        "frame": lambda: Prices(guarantees, table=pd.DataFrame({"which": [1, 0], "id": ["b", "a"]})),
        "parquet": lambda: Prices(guarantees, table=written(tmp_path / "prices.parquet", query)),
        "relation": lambda: Prices(guarantees, table=duckdb.connect().sql(query)),
    }[form]()
    other = Prices(guarantees, [1, 0], ids=["a", "b"])
    assert people.digest(prices) == people.digest(Prices(guarantees, [1, 0], ids=["b", "a"])) != people.digest(other)
    assert people.charge(prices) == {"a"}


def test_a_digest_depends_on_every_row_and_on_the_secret_and_not_on_the_order(tmp_path: Path) -> None:
    people, others = People(tmp_path / "people", range(3)), People(tmp_path / "others", range(3))
    ids, which = np.arange(5000), np.arange(5000) % 2
    guarantees = [PureDP(1), PureDP(2)]
    first = people.digest(Prices(guarantees, which, ids=ids))
    order = np.random.default_rng(1).permutation(5000)
    assert people.digest(Prices(guarantees, which[order], ids=ids[order])) == first
    assert others.digest(Prices(guarantees, which, ids=ids)) != first
    swapped = which.copy()
    swapped[[10, 11]] = swapped[[11, 10]]  # the same ids, and as many of each guarantee
    assert people.digest(Prices(guarantees, swapped, ids=ids)) != first
    assert people.digest(Prices(guarantees, which[1:], ids=ids[1:])) != first
    assert people.digest(Prices(guarantees[::-1], which, ids=ids)) != first
    assert people.digest(ids) != people.digest(ids[1:])
    assert people.digest(DEAR) != people.digest(PureDP(1)) != first


@pytest.mark.parametrize("nobody", [0, [], np.zeros(0)], ids=["zero", "list", "array"])
@pytest.mark.parametrize("ids", [[7], ["a"]], ids=["integers", "strings"])
def test_whoever_comes_first_fixes_the_kind_of_the_ids(nobody: Any, ids: list[Any], tmp_path: Path) -> None:  # noqa: ANN401
    people = People(tmp_path / "people", nobody)
    other = ["x"] if isinstance(ids[0], int) else [1]
    assert people.charge(DEAR) == set()
    people.remove(other)  # who was never there fixes nothing
    assert people.charge(Prices([DEAR], [0], ids=ids)) == set(ids)
    people.join([])
    for refused in (people.join, people.remove, lambda ids: people.charge(Prices([DEAR], [0], ids=ids))):
        with pytest.raises(InvalidArgument, match="ids must"):
            refused(other)
    assert people.charge(Prices([DEAR], [], ids=[])) == set()
    assert set(people.totals()) == set(ids)


def test_people_who_are_left_out_do_not_fix_the_kind_of_the_ids(tmp_path: Path) -> None:
    people = People(tmp_path / "people", [], "leave-out")
    assert people.charge(Prices([DEAR], [0], ids=["a"])) == set()
    people.join([1])
    assert people.charge(Prices([DEAR, DEAR], [0, 1], ids=[1, 2])) == {1}
    assert set(people.totals()) == {1}


def test_numbers_keep_all_their_digits(tmp_path: Path) -> None:
    ids = [2**53 + 1, 2**63 - 1, -(2**63)]
    relation = duckdb.connect().sql(f"SELECT unnest({ids!r}::HUGEINT[]) AS id")
    assert set(People(tmp_path / "people", relation).totals()) == set(ids)


def test_ids_that_are_none_are_refused_and_not_shown(tmp_path: Path) -> None:
    people = People(tmp_path / "people", [SECRET])
    before = people.totals()
    hidden = [SECRET, "\udc80" + SECRET]
    cases = [
        [1.5],
        [True],
        [b"bytes"],
        5,
        None,
        object(),
        iter(["a"]),
        np.array([["a"]]),
        np.array([SECRET, None], dtype=object),
        np.array(hidden, dtype=object),
        np.array(hidden),
        pd.DataFrame({"name": [SECRET]}),
        duckdb.connect().sql(f"SELECT '{SECRET}'::INTEGER AS id"),
        tmp_path / "nothing.parquet",
    ]
    for ids in cases:
        with pytest.raises(OdographError) as caught:
            people.join(ids)
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert people.totals() == before
    numbers = People(tmp_path / "numbers", [1])
    with pytest.raises(InvalidArgument, match="64 bits") as caught:
        numbers.join(np.array([2**63 + 12345], dtype=np.uint64))
    assert "12345" not in str(caught.value)
    # The error that is kept back has it: that is what must not come out.
    with pytest.raises(duckdb.Error, match=SECRET):
        duckdb.connect().sql(f"SELECT '{SECRET}'::INTEGER AS id").fetchall()


@pytest.mark.parametrize("which", [[0, 2], [0, -1], [0, None], [0.0, 1.0], ["a", "b"]])
def test_which_must_be_places_in_a_table_too(which: list[Any], tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a", "b"])
    with pytest.raises(InvalidArgument, match="which must be"):
        people.charge(Prices([DEAR, DEAR], table=pd.DataFrame({"id": ["a", "b"], "which": which})))
    with pytest.raises(InvalidArgument, match="column 'which'"):
        people.charge(Prices([DEAR], table=pd.DataFrame({"id": ["a"]})))


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_nobody_is_named_twice_whether_they_are_known_or_not(unknown: str, tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a"], unknown)
    for twice in (["a", "a"], ["new", "new"]):
        with pytest.raises(InvalidArgument, match="each person once"):
            people.charge(Prices([DEAR], [0, 0], ids=twice))
    assert people.charge(Prices([DEAR], [0, 0], ids=["a", "new"])) == ({"a", "new"} if unknown == "join" else {"a"})


def test_prices_without_ids_and_masks_are_refused(tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a"])
    with pytest.raises(InvalidArgument, match="pass ids with which"):
        people.charge(Prices([DEAR], [0]))
    with pytest.raises(InvalidArgument, match="pass ids with which"):
        people.digest(Prices([DEAR], [0]))
    with pytest.raises(LedgerError, match="no mask"):
        people.engine.mask(people.context, people.folder)


@pytest.mark.parametrize("name", ['it\'s "here"; --', "a=1", "some [of] them*?", "~", "$path {id} %s"])
def test_a_population_can_be_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    # What a pattern would match as well.
    People(tmp_path / "some o them and more" / name, ["z"])
    people = People(tmp_path / name / name, ["a", "b"])
    prices = written(tmp_path / name / "prices.parquet", "SELECT 'a' AS id, 0 AS which")
    assert people.charge(Prices([DEAR], table=prices)) == {"a"}
    people.remove(written(tmp_path / name / "ids.parquet", "SELECT 'a' AS id"))
    people.join(["a", "c"])
    assert people.charge(DEAR) == {"b", "c"}
    assert [column[0] for column in described(people.folder)] == ["id", "total_0", "total_1", "took"]


def described(folder: Path) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        path = str(folder / "people.parquet")
        return connection.execute(
            "DESCRIBE SELECT * FROM read_parquet($1, hive_partitioning = false)", [path]
        ).fetchall()


def test_tombstones_are_keyed_hashes_and_no_ids(tmp_path: Path) -> None:
    people = People(tmp_path / "people", [SECRET, "other"])
    people.remove([SECRET, "never there"])
    (mark,) = (row[0] for row in rows_of(people.folder / "removed.parquet"))
    secret = people.context.versions.secret()
    assert mark == hmac.new(secret, SECRET.encode(), hashlib.sha256).digest()
    assert mark != hashlib.sha256(SECRET.encode()).digest()
    after = b"".join(path.read_bytes() for path in people.folder.iterdir())
    assert SECRET.encode() not in after
    assert b"other" in after  # so that is how an id would be found
    first = (people.folder / "removed.parquet").stat().st_ino
    people.charge(DEAR)
    people.join(["somebody"])
    assert (people.folder / "removed.parquet").stat().st_ino == first  # linked, not written again
    people.remove(["other"])
    assert len(rows_of(people.folder / "removed.parquet")) == 2
    assert people.charge(Prices([PureDP(0)], [0, 0, 0], ids=[SECRET, "other", "never there"])) == {"never there"}
    assert people.totals()[SECRET] == (SPENT,) * len(GATE.limits)


def test_those_who_take_part_are_read_where_they_are(tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a", "b", "c"])
    people.charge(Prices([DEAR], [0, 0], ids=["a", "b"]))
    events = written(tmp_path / "events.parquet", "SELECT * FROM (VALUES ('a', 1), ('c', 5), ('b', 2)) AS t(id, n)")
    active = people.engine.participants(people.context, people.folder)
    query = f"SELECT sum(n) FROM active JOIN read_parquet('{events}') USING (id)"  # noqa: S608  a file of this test
    assert active.query("active", query).fetchall() == [(3,)]
    assert sorted(active.fetchnumpy()["id"]) == ["a", "b"]


class Little(DuckDBEngine):
    """An engine with too little memory for a charge of a million people, on any machine."""

    def __init__(self) -> None:
        super().__init__(memory_limit="50MB")
        self._settings["threads"] = 2  # each of them needs some


class Cramped(Little):
    """A twin that cannot spill."""

    def _connect(self, spill: Path | str) -> Any:  # noqa: ANN401, ARG002  as in the engine
        return duckdb.connect(":memory:", config=self._settings | {"temp_directory": ""})


def million_people(folder: Path) -> tuple[People, Prices]:
    """A million people, and prices for half of them and as many others."""
    people = People(folder / "people", written(folder / "ids", "SELECT range AS id FROM range(1000000)"))
    query = "SELECT 2 * range AS id, range % 2 AS which FROM range(1000000)"
    return people, Prices([DEAR, PureDP(2)], table=written(folder / "prices", query))


def test_a_charge_that_is_larger_than_memory_spills_and_leaves_nothing_behind(tmp_path: Path) -> None:
    people, prices = million_people(tmp_path)
    location = people.context.versions.location
    people.engine = Cramped()
    with pytest.raises(LedgerError, match="pass a larger memory_limit"):
        people.charge(prices)
    assert not list(location.rglob("spill-*"))

    people.engine = Little()
    told: list[tuple[int, int]] = []
    spilled: list[Path] = []

    def progress(done: int, expected: int) -> None:
        told.append((done, expected))
        spilled.extend(location.glob("*/spill-*/*"))

    assert people.charge(prices, progress) == set(range(0, 2_000_000, 4))
    assert len(people.totals()) == 1_500_000
    assert spilled
    assert told == sorted(set(told))
    assert told[-1] == (100, 100)
    assert {expected for _, expected in told} == {100}
    assert sorted(path.name for path in people.folder.iterdir()) == ["people.parquet", "state.json"]


@pytest.mark.parametrize("limit", ["a lot", "", 4])
def test_a_memory_limit_that_is_none_is_refused(limit: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises(InvalidArgument, match="memory_limit must be a size such as '4GB'"):
        DuckDBEngine(memory_limit=limit)


def test_a_version_that_another_process_cleaned_up_is_an_error_of_the_system_too(tmp_path: Path) -> None:
    people = People(tmp_path / "people", ["a"])
    (people.folder / "people.parquet").unlink()
    for work in (lambda: people.charge(DEAR), lambda: people.join(["b"]), lambda: people.remove(["a"])):
        with pytest.raises(LedgerError) as caught:
            work()
        assert isinstance(caught.value, OSError)


def test_whoever_stops_a_charge_while_it_runs_hears_of_their_own_error(tmp_path: Path) -> None:
    ids = written(tmp_path / "ids.parquet", "SELECT 'person ' || range AS id FROM range(1000000)")
    people = People(tmp_path / "people", ids)

    def interrupt(done: int, expected: int) -> None:
        raise KeyboardInterrupt(done, expected)

    for _ in range(STOPPED):
        with pytest.raises(KeyboardInterrupt):
            people.charge(Prices([DEAR], table=pd.DataFrame({"id": ["a"], "which": [0]})), interrupt)
    assert not list(people.context.versions.location.rglob("spill-*"))
    assert people.took() == set()
