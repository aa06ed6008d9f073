"""The NumPy engine's files: chunks, growth, damage, and file systems that are poorer than most."""

from __future__ import annotations

import errno
import os
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import odograph as odo
from odograph.errors import InvalidArgument, LedgerCorrupt
from odograph.population.engines.numpy import _distinct

POLICY = odo.Policy(1, "1e-6", filter="zcdp")
COST = odo.PureDP("0.5")


def created(folder: Path, ledger: odo.Ledger, people: int, unknown: str = "leave-out") -> odo.Population:
    return odo.Population.create("p", POLICY, ledger=ledger, location=folder, ids=people, unknown=unknown)


def totals(folder: Path) -> list[NDArray[np.int64]]:
    """Return everybody's totals, read from the newest files without the engine."""
    return [np.fromfile(path, dtype=np.int64) for path in sorted(max(folder.glob("0*")).glob("total-*"))]


@settings(max_examples=30, deadline=None)
@given(people=st.integers(0, 70), more=st.integers(0, 30), data=st.data())
def test_chunks_of_any_size_make_the_same_files(
    people: int, more: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    highest = people + more
    some = data.draw(st.lists(st.integers(0, highest), unique=True))
    found = []
    for chunk in (8, 16, 1 << 20):
        folder = tmp_path_factory.mktemp("people") / "p"
        with pytest.MonkeyPatch.context() as patch, odo.connect("memory://") as ledger:
            patch.setattr("odograph.population.engines.numpy._CHUNK_SIZE", chunk)
            population = created(folder, ledger, people, "join")
            population.charge(COST, key="all")
            took = population.charge(odo.Prices([COST], [0] * len(some), ids=some), key="some").mask.tolist()
            population.join([highest], key="more")
            population.remove(some[:3], key="fewer")
            found.append((took, [column.tolist() for column in totals(folder)]))
    assert found[0] == found[1] == found[2]


@given(rows=st.lists(st.integers(0, 50), max_size=30))
def test_ids_are_taken_once_in_order(rows: list[int]) -> None:
    found = _distinct(np.array(rows, dtype=np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(rows))


def test_ids_are_taken_once_in_about_the_time_of_sorting_them() -> None:
    """A request of twenty bytes joins 2 * 10^7 people: `np.unique` takes a minute for them, and other rounds wait."""
    rows = np.random.default_rng(1).permutation(1_000_000)

    def fastest(function: Callable[[NDArray[np.int64]], object]) -> float:
        return min(timeit.repeat(lambda: function(rows), number=1, repeat=5))

    assert fastest(_distinct) < 10 * fastest(np.sort)


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    with odo.connect("memory://") as ledger:
        population = created(tmp_path / "p", ledger, 20)
        monkeypatch.setattr(os, "link", refuse)
        population.charge(COST, key="a")
        delta, *others = totals(tmp_path / "p")
        assert delta.tolist() == [0] * 20
        assert all(column.min() > 0 for column in others)


def test_a_file_that_was_cut_is_damage_and_not_nobody(tmp_path: Path) -> None:
    with odo.connect("memory://") as ledger:
        population = created(tmp_path / "p", ledger, 100)
        step = population.charge(COST, key="a")
        os.truncate(step.folder / "took", 8)
        with pytest.raises(LedgerCorrupt, match="took is damaged; restore"):
            assert step.ids is None
        os.truncate(step.folder / "total-1", 8)
        with pytest.raises(LedgerCorrupt, match="total-1 is damaged; restore"):
            population.charge(COST, key="b")


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_a_number_far_from_all_others_makes_no_room_for_those_between(tmp_path: Path, unknown: str) -> None:
    far = odo.Prices([COST], [0], ids=[10**11])
    with odo.connect("memory://") as ledger:
        population = created(tmp_path / "p", ledger, 100, unknown)
        with pytest.raises(InvalidArgument, match="'duckdb' takes any"):
            population.join([10**11], key="far")
        if unknown == "join":
            with pytest.raises(InvalidArgument, match="'duckdb' takes any"):
                population.charge(far, key="a")
        else:
            assert population.charge(far, key="a").ids.tolist() == []
        assert sum(len(column) for column in totals(tmp_path / "p")) == 300


def test_a_truth_value_is_no_count_of_people(tmp_path: Path) -> None:
    with odo.connect("memory://") as ledger, pytest.raises(InvalidArgument, match="ids must be a count"):
        created(tmp_path / "p", ledger, people=True)


def test_only_duckdb_takes_a_memory_limit(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with odo.connect("memory://") as ledger:
        with pytest.raises(InvalidArgument, match="memory_limit must be left out for any engine but 'duckdb'"):
            odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "p", memory_limit="1GB")
        with pytest.raises(InvalidArgument, match="memory_limit must be a size such as '4GB'"):
            odo.Population.create(
                "p", POLICY, ledger=ledger, location=tmp_path / "p", engine="duckdb", memory_limit="much"
            )
        population = odo.Population.create(
            "p", POLICY, ledger=ledger, location=tmp_path / "p", ids=range(100), engine="duckdb", memory_limit="1GB"
        )
        assert len(population.charge(COST, key="a").ids) == 100
