"""A person who asked to be forgotten: nothing that names them is left, and registering again is no fresh budget."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from population_helpers import PopulationFactory, ledger_in, took
from service_server import ServiceThread

import odograph as odo
from odograph import Population, Prices, PureDP
from odograph.population.engines import EngineContext
from odograph.population.engines.numpy import NumpyEngine

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
BASIC = odo.Policy(1, 0, filter="basic")
PERSON = "ana@example.org-5e7b19"
OTHERS = ["bo", "ca"]
SMALL = PureDP("0.001")


def files_with(root: Path, word: str) -> list[str]:
    """Return the files below a folder that hold a word."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return [path.name for path in files if word.encode() in path.read_bytes()]


class Served(NamedTuple):
    """A population behind a service, in which a person has spent something and was removed."""

    service: ServiceThread
    owner: odo.Ledger
    root: Path


@pytest.fixture
def served(service: ServiceThread) -> Iterator[Served]:
    """The service, its owner, and the folder of its populations."""
    root = service.settings.population_root
    assert root is not None
    with odo.connect(service.url, token=service.token("olga")) as owner:
        people = owner.create_population("people", BASIC, engine="duckdb")
        people.join([PERSON, *OTHERS], key="join")
        people.charge(Prices([PureDP("0.4")], [0], ids=[PERSON]), key="monday")
        assert files_with(root, PERSON), "it is not found where it is"
        people.remove([PERSON], key="request 17")
        yield Served(service, owner, root)


def check_comes_back_spent(served: Served) -> None:
    """Assert that who was removed and registers again takes part in no round that costs something."""
    people = served.owner.population("people")
    people.join([PERSON], key="registers again")
    with odo.connect(served.service.url, token=served.service.token("rob", "runner")) as runner:
        active = runner.population("people").charge(SMALL, key="tuesday")
        assert sorted(active.ids) == OTHERS, "registering again gives a fresh budget"


def test_after_the_next_round_nothing_names_a_person_who_was_removed(served: Served) -> None:
    assert files_with(served.root, PERSON), "the version before is kept until the next round"
    served.owner.population("people").join([], key="request 17, done")
    assert files_with(served.root, PERSON) == []
    export = io.StringIO()
    served.owner.export(export)
    assert PERSON not in export.getvalue()
    assert files_with(served.root.parent, PERSON) == [], "it is in the ledger, or beside it"
    check_comes_back_spent(served)
    served.owner.verify()


def test_an_engine_that_forgets_the_mark_too_would_be_caught(served: Served) -> None:
    for mark in served.root.rglob("removed.parquet"):
        mark.unlink()
    with pytest.raises(AssertionError, match="a fresh budget"):
        check_comes_back_spent(served)


def test_a_population_whose_secret_is_lost_charges_no_one(served: Served) -> None:
    """Without the secret a mark could not be recognized: everything stops, instead of starting again."""
    (secret,) = served.root.glob("*/secret")
    secret.write_bytes(secret.read_bytes()[:-1])
    people = served.owner.population("people")
    with pytest.raises(odo.errors.LedgerError, match="cannot use the files"):
        people.join([PERSON], key="registers again")


class ForgetfulEngine(NumpyEngine):
    """Removes people without a trace."""

    def remove(self, context: EngineContext, before: Path, after: Path, ids: object) -> None:
        self.join(context, before, after, np.zeros(0, dtype=np.int64))
        for path in after.glob("total-*"):
            totals = np.fromfile(path, dtype=np.int64)
            totals[np.asarray(ids, dtype=np.int64)] = 0
            path.unlink()
            totals.tofile(path)


def check_history(people: Population, acts: list[tuple[str, int]]) -> None:
    """Assert that in any history a person who was removed once never takes part again."""
    forgotten: set[int] = set()
    for number, (act, person) in enumerate(acts):
        if act == "charge":
            assert not took(people.charge(SMALL, key=f"{number}")) & forgotten, "a fresh budget"
        else:
            {"join": people.join, "remove": people.remove}[act]([person], key=f"{number}")
        forgotten |= {person} if act == "remove" else set()


ACTS = st.lists(st.tuples(st.sampled_from(["charge", "join", "remove"]), st.integers(0, 3)), max_size=8)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
@settings(max_examples=100 if FULL else 5)
@given(acts=ACTS)
def test_no_history_gives_a_person_who_was_removed_a_budget(
    tmp_path_factory: pytest.TempPathFactory, engine: str, acts: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("people")
    with ledger_in(folder) as ledger:
        check_history(PopulationFactory(engine, ledger, folder).create(4, unknown="join"), acts)
    shutil.rmtree(folder)


def test_an_engine_that_removes_without_a_trace_would_be_caught(dense: PopulationFactory) -> None:
    people = dense.create(4)
    people._engine = ForgetfulEngine()  # noqa: SLF001  the broken one
    with pytest.raises(AssertionError, match="a fresh budget"):
        check_history(people, [("charge", 0), ("remove", 1), ("join", 1), ("charge", 0)])


def test_a_backup_from_before_the_request_needs_it_again(dense: PopulationFactory, tmp_path: Path) -> None:
    """A restored copy knows the person again, and has what they had spent then: the request is repeated on it."""
    people = Population.create(
        "names", BASIC, ledger=dense.ledger, location=tmp_path / "names", ids=[PERSON, *OTHERS], engine="duckdb"
    )
    people.charge(PureDP("0.9"), key="monday")
    dense.ledger.backup(tmp_path / "backup.db")  # first the ledger, then the folder
    shutil.copytree(tmp_path / "names", tmp_path / "copy")
    people.remove([PERSON], key="request 17")
    with odo.connect(f"sqlite:///{tmp_path}/restored.db", principal="ana") as restored:
        restored.restore(tmp_path / "backup.db", checkpoint=_checkpoint(tmp_path / "backup.db"))
        again = Population.open("names", ledger=restored, location=tmp_path / "copy")
        again.remove([PERSON], key="request 17")
        again.join([PERSON], key="registers again")
        assert took(again.charge(SMALL, key="tuesday")) == {*OTHERS}
        assert files_with(tmp_path / "copy", PERSON) != []  # by its own registration


def _checkpoint(backup: Path) -> odo.Checkpoint:
    with odo.connect(f"sqlite:///{backup}") as ledger:
        return ledger.checkpoint()
