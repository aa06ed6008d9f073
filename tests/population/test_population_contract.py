"""What a population promises, the same on every engine: who takes part, once for a key, to the unit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from population_helpers import (
    PopulationFactory,
    compiled_for,
    current,
    ledger_in,
    location_of,
    read_state,
    took,
    versions_in,
)

import odograph as odo
from odograph import GDP, Population, Prices, PureDP
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    IdempotencyConflict,
    InvalidArgument,
    LedgerError,
    OdographError,
    UnprovenComposition,
)
from odograph.population.gate import SPENT
from odograph.population.version_store import Versions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

SMALL, LARGE = PureDP("0.1"), PureDP("0.7")
BASIC = compiled_for("basic")  # of which LARGE fits once


def test_a_charge_charges_everybody_whose_filter_admits_it_and_says_who(populations: PopulationFactory) -> None:
    people = populations.create(5, compiled=BASIC)
    assert took(people.charge(Prices([LARGE], [0, 0], ids=[1, 3]), key="some")) == {1, 3}
    step = people.charge(LARGE, key="all")
    assert took(step) == {0, 2, 4}
    assert (step.receipt.version, step.receipt.population, step.receipt.key) == (2, "people", "all")
    assert not step.receipt.repeated
    assert populations.state(people) == dict.fromkeys(range(5), (0, 7 * 10**14))
    assert took(people.charge(SMALL, key="small")) == {0, 1, 2, 3, 4}
    populations.ledger.verify()


def test_a_mask_is_the_same_as_the_ids_where_ids_are_dense(populations: PopulationFactory) -> None:
    people = populations.create(5, compiled=BASIC)
    step = people.charge(Prices([LARGE], [0, 0], ids=[1, 3]), key="some")
    if populations.engine == "numpy":
        assert step.mask.tolist() == [False, True, False, True, False]
    else:
        with pytest.raises(LedgerError):
            _ = step.mask


def test_who_is_asked_for_nothing_takes_no_part_and_pays_nothing(populations: PopulationFactory) -> None:
    people = populations.create(4, compiled=BASIC)
    assert took(people.charge(Prices([SMALL], [], ids=np.array([], dtype=np.int64)), key="nobody")) == set()
    assert populations.state(people) == dict.fromkeys(range(4), (0, 0))
    assert took(people.charge(Prices([SMALL, PureDP(0)], [1, 0], ids=[2, 0]), key="free")) == {0, 2}
    assert populations.state(people) == {0: (0, 10**14), 1: (0, 0), 2: (0, 0), 3: (0, 0)}


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_people_who_are_not_there_join_or_are_left_out_as_was_said_at_creation(
    populations: PopulationFactory, unknown: str
) -> None:
    people = populations.create(2, compiled=BASIC, unknown=unknown)
    joined = {1, 2} if unknown == "join" else {1}
    assert took(people.charge(Prices([SMALL], [0, 0], ids=[2, 1]), key="a")) == joined
    assert took(people.charge(PureDP("0.9"), key="b")) == {0} | joined
    assert took(people.charge(SMALL, key="c")) == {0}
    assert len(populations.state(people)) == 1 + len(joined)


def test_who_joins_has_spent_nothing_and_who_is_there_already_keeps_what_was_spent(
    populations: PopulationFactory,
) -> None:
    people = populations.create(2, compiled=BASIC)
    people.charge(LARGE, key="a")
    people.join([1, 2, 3, 3], key="join")
    assert populations.state(people) == {0: (0, 7 * 10**14), 1: (0, 7 * 10**14), 2: (0, 0), 3: (0, 0)}
    assert took(people.charge(LARGE, key="b")) == {2, 3}


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_who_was_removed_comes_back_only_as_spent(populations: PopulationFactory, unknown: str) -> None:
    people = populations.create(4, compiled=BASIC, unknown=unknown)
    people.charge(SMALL, key="a")
    people.remove([1, 2, 77], key="remove")
    assert took(people.charge(PureDP(0), key="b")) == {0, 3}
    people.join([1], key="join")
    assert took(people.charge(Prices([PureDP(0)], [0, 0, 0], ids=[0, 1, 2]), key="c")) == {0}
    people.remove([3], key="again")
    people.join([1, 2, 3], key="all of them")
    assert took(people.charge(PureDP(0), key="d")) == {0}
    assert populations.state(people) == {0: (0, 10**14)}
    spent = [totals for one, totals in read_state(current(populations.ledger, people)).items() if one != 0]
    assert {*spent} <= {(SPENT, SPENT)}


def test_a_person_who_was_never_there_can_be_removed_and_still_joins_fresh(populations: PopulationFactory) -> None:
    people = populations.create(2, compiled=BASIC)
    people.remove([2], key="remove")
    people.join([2], key="join")
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}


def test_the_same_key_charges_once_and_is_answered_the_same(populations: PopulationFactory) -> None:
    people = populations.create(4, compiled=BASIC)
    prices = Prices([LARGE, SMALL], [0, 1, 0], ids=[3, 1, 0])
    first, after = people.charge(prices, key="a"), populations.state(people)
    for again in (people, populations.open()):
        same = again.charge(Prices([LARGE, SMALL], [0, 0, 1], ids=[0, 3, 1]), key="a")  # in another order
        assert same.receipt.repeated
        assert same.receipt._replace(repeated=False) == first.receipt
        assert took(same) == took(first) == {0, 1, 3}
    assert populations.state(people) == after
    for verb in (people.join, people.remove):
        verb([1, 2], key=verb.__name__)
        found = populations.state(people)
        verb([2, 1], key=verb.__name__)
        assert populations.state(people) == found
    assert len(people.history()) == 4


def test_a_key_that_was_used_for_something_else_is_a_conflict_and_changes_nothing(
    populations: PopulationFactory,
) -> None:
    people = populations.create(3, compiled=BASIC)
    people.charge(Prices([SMALL], [0, 0], ids=[0, 1]), key="a")
    before = current(populations.ledger, people), populations.state(people)
    for other in (
        LARGE,
        SMALL,
        Prices([SMALL], [0], ids=[0]),
        Prices([SMALL], [0, 0], ids=[0, 2]),
        Prices([SMALL, LARGE], [0, 1], ids=[0, 1]),
    ):
        with pytest.raises(IdempotencyConflict):
            people.charge(other, key="a")
    for act in (people.join, people.remove):
        with pytest.raises(IdempotencyConflict):
            act([0, 1], key="a")
    assert (current(populations.ledger, people), populations.state(people)) == before


def test_who_took_part_is_told_for_the_last_two_steps_and_later_the_receipt_alone(
    populations: PopulationFactory,
) -> None:
    people = populations.create(3, compiled=BASIC)
    steps = [people.charge(SMALL, key=f"step {number}") for number in range(3)]
    assert took(people.charge(SMALL, key="step 2")) == took(people.charge(SMALL, key="step 1")) == {0, 1, 2}
    old = people.charge(SMALL, key="step 0")
    assert old.receipt.repeated
    assert old.receipt.version == 1
    for step in (old, steps[0]):
        with pytest.raises(LedgerError, match="last two rounds"):
            _ = step.ids
        with pytest.raises(LedgerError):
            _ = step.mask
    assert versions_in(location_of(people)) == {step.folder.name for step in steps[1:]}


def test_another_handle_goes_on_where_the_first_one_stopped(populations: PopulationFactory, tmp_path: Path) -> None:
    people = populations.create(3, compiled=BASIC)
    people.charge(LARGE, key="a")
    with ledger_in(tmp_path) as other:
        again = populations.open(ledger=other)
        assert again.policy == people.policy
        assert took(again.charge(LARGE, key="b")) == set()
        assert took(again.charge(SMALL, key="c")) == {0, 1, 2}
    assert populations.state(people) == dict.fromkeys(range(3), (0, 8 * 10**14))
    assert took(people.charge(PureDP("0.2"), key="d")) == {0, 1, 2}


def test_files_that_were_moved_are_found_where_they_are(populations: PopulationFactory, tmp_path: Path) -> None:
    people = populations.create(3, compiled=BASIC)
    people.charge(LARGE, key="a")
    moved = tmp_path / "a place 'of' its own"
    shutil.move(location_of(people), moved)
    with pytest.raises(LedgerError, match="there is no population in"):
        populations.open().charge(SMALL, key="b")
    again = populations.open(location=moved)
    assert took(again.charge(LARGE, key="a")) == {0, 1, 2}
    assert took(again.charge(LARGE, key="b")) == set()
    assert populations.state(again) == dict.fromkeys(range(3), (0, 7 * 10**14))


def test_a_population_that_is_closed_takes_no_steps_and_still_answers_old_keys(
    populations: PopulationFactory,
) -> None:
    people = populations.create(3, compiled=BASIC)
    people.charge(SMALL, key="a")
    people.close(note="done")
    for act in (people.join, people.remove):
        with pytest.raises(AccountClosed):
            act([1], key=act.__name__)
    with pytest.raises(AccountClosed):
        people.charge(SMALL, key="b")
    same = people.charge(SMALL, key="a")
    assert same.receipt.repeated
    assert took(same) == {0, 1, 2}
    assert populations.state(people) == dict.fromkeys(range(3), (0, 10**14))
    assert len(versions_in(location_of(people))) == 2
    populations.ledger.verify()


def at_once(*calls: Callable[[], object]) -> list[Any]:
    """Run functions in threads of their own, and give what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [running.result() for running in [pool.submit(call) for call in calls]]


def test_two_handles_at_once_both_charge_once(populations: PopulationFactory, tmp_path: Path) -> None:
    """One is first, and the other goes on from there."""
    people = populations.create(50, compiled=BASIC)

    def charge(name: str) -> None:
        with ledger_in(tmp_path) as own:
            mine = populations.open(ledger=own)
            for number in range(3):
                mine.charge(PureDP("0.01"), key=f"{name} {number}")

    at_once(lambda: charge("a"), lambda: charge("b"))
    assert populations.state(people) == dict.fromkeys(range(50), (0, 6 * 10**13))
    people.charge(PureDP(0), key="clean")
    assert len(versions_in(location_of(people))) == 2
    populations.ledger.verify()


def test_two_handles_with_one_key_charge_once(populations: PopulationFactory, tmp_path: Path) -> None:
    people = populations.create(50, compiled=BASIC)

    def charge() -> tuple[bool, set[Any]]:
        with ledger_in(tmp_path) as own:
            step = populations.open(ledger=own).charge(SMALL, key="one")
            return step.receipt.repeated, took(step)

    assert sorted(at_once(charge, charge), key=itemgetter(0)) == [(False, {*range(50)}), (True, {*range(50)})]
    assert populations.state(people) == dict.fromkeys(range(50), (0, 10**14))


@pytest.mark.parametrize("unknown", ["join", "leave-out"])
def test_a_population_of_nobody_answers_every_step(populations: PopulationFactory, unknown: str) -> None:
    people = populations.create(0, compiled=BASIC, unknown=unknown)
    assert took(people.charge(SMALL, key="a")) == set()
    people.remove([0], key="remove")
    assert took(people.charge(Prices([SMALL], [0], ids=[0]), key="b")) == ({0} if unknown == "join" else set())
    people.join([0, 1], key="join")
    assert took(people.charge(SMALL, key="c")) == {0, 1}


def test_a_step_answers_when_everybody_is_spent(populations: PopulationFactory) -> None:
    people = populations.create(3, compiled=BASIC)
    people.charge(PureDP(1), key="all")
    for number in range(3):
        step = people.charge(PureDP("1e-9"), key=f"{number}")
        assert took(step) == set()
        assert not step.receipt.repeated
    assert took(people.charge(PureDP(0), key="free")) == {0, 1, 2}


def test_a_person_who_is_named_twice_is_refused_and_nobody_is_charged(populations: PopulationFactory) -> None:
    people = populations.create(3, compiled=BASIC)
    before = versions_in(location_of(people))
    with pytest.raises(InvalidArgument, match="ids must name each person once"):
        people.charge(Prices([SMALL], [0, 0, 0], ids=[1, 2, 1]), key="a")
    assert versions_in(location_of(people)) == before
    assert took(people.charge(Prices([SMALL], [0], ids=[1]), key="a")) == {1}


def test_what_no_rule_takes_is_refused_and_nobody_is_charged(populations: PopulationFactory) -> None:
    people = populations.create(3, compiled=BASIC)
    with pytest.raises(UnprovenComposition):
        people.charge(GDP(1), key="a")
    with pytest.raises(UnprovenComposition):
        people.charge(Prices([SMALL, GDP(1)], [0, 0], ids=[0, 1]), key="a")
    assert len(people.history()) == 1
    assert populations.state(people) == dict.fromkeys(range(3), (0, 0))


def test_a_place_and_a_name_are_taken_once(populations: PopulationFactory, tmp_path: Path) -> None:
    people = populations.create(3)
    with pytest.raises(InvalidArgument, match="which holds a population"):
        populations.create(3, name="other", location=location_of(people))
    with pytest.raises(AccountExists):
        populations.create(3, location=tmp_path / "elsewhere")
    with pytest.raises(AccountNotFound):
        populations.open("nobody")
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}


def test_files_that_are_gone_are_missed_in_our_own_words(populations: PopulationFactory) -> None:
    people, other = populations.create(3), populations.create(3, name="other")
    with pytest.raises(OdographError):
        populations.open(location=location_of(other)).charge(SMALL, key="a")
    shutil.rmtree(current(populations.ledger, people))
    with pytest.raises(OdographError):
        people.charge(SMALL, key="a")
    assert took(other.charge(SMALL, key="b")) == {0, 1, 2}
    assert len(people.history()) == 1


@pytest.mark.parametrize("typo", [True, False])
def test_a_location_without_the_files_is_refused_when_a_population_is_opened(
    populations: PopulationFactory, tmp_path: Path, *, typo: bool
) -> None:
    people, other = populations.create(3), populations.create(3, name="other")
    people.charge(SMALL, key="a")
    place = tmp_path / "typo" if typo else location_of(other)
    before = versions_in(location_of(other))
    with pytest.raises(LedgerError) as caught:
        populations.open(location=place)
    message = str(caught.value)
    assert f"there is no version 1 of 'people' in {place}" in message
    assert "pass the location where it was created" in message
    assert caught.value.charged is False
    assert versions_in(location_of(other)) == before
    assert took(populations.open(location=location_of(people)).charge(SMALL, key="b")) == {0, 1, 2}


def test_a_version_that_is_gone_is_missed_by_its_number_and_nobody_is_charged(dense: PopulationFactory) -> None:
    people = dense.create(3)
    shutil.rmtree(current(dense.ledger, people))
    asked: list[Callable[[], object]] = [
        lambda: people.charge(SMALL, key="a"),
        lambda: people.run(len, [1, 2, 3], SMALL, key="a"),
    ]
    for ask in asked:
        with pytest.raises(LedgerError, match=r"there is no version 0 of 'people' in ") as caught:
            ask()
        assert caught.value.charged is False
    people.close()
    assert len(dense.open(location=location_of(people)).history()) == 2


def test_a_version_that_another_process_has_left_behind_is_not_missed(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    people, other, found = dense.create(3), dense.open(), Versions.folder

    def slowly(own: Versions, state: str) -> Path:
        monkeypatch.setattr(Versions, "folder", found)
        for key in ("a", "b"):
            other.charge(SMALL, key=key)
        return found(own, state)

    monkeypatch.setattr(Versions, "folder", slowly)
    again = dense.open(location=location_of(people))
    assert took(again.charge(SMALL, key="c")) == {0, 1, 2}
    assert len(people.history()) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [("sqlite:///x.db", "'sqlite:///x.db'"), ("postgresql://ana:hunter2@db/x", "a str"), (None, "None")],
)
def test_a_ledger_that_is_none_is_refused_by_name_and_without_a_password(
    tmp_path: Path,
    wrong: Any,  # noqa: ANN401  no ledger
    said: str,
) -> None:
    asked: list[Callable[[], object]] = [
        lambda: Population.create("people", BASIC, ledger=wrong, location=tmp_path / "people", ids=3),
        lambda: Population.open("people", ledger=wrong),
    ]
    for ask in asked:
        with pytest.raises(InvalidArgument) as caught:
            ask()
        assert str(caught.value) == f"ledger must be a Ledger, such as odograph.connect(...) returns (got {said})"
    assert [*tmp_path.iterdir()] == []


def test_a_population_that_could_not_be_made_leaves_its_place_free(dense: PopulationFactory, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="ids"):
        dense.create([0, 2])
    people = dense.create(3)
    with pytest.raises(AccountExists):
        dense.create(3, location=tmp_path / "elsewhere")
    dense.create(3, name="other", location=tmp_path / "elsewhere")
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}


def test_a_step_tells_how_far_it_has_come_in_percent(populations: PopulationFactory) -> None:
    told: list[tuple[int, int]] = []
    people = populations.create(70_000 if populations.engine == "numpy" else 100)
    people.charge(SMALL, key="a", progress=lambda done, whole: told.append((done, whole)))
    assert told[-1] == (100, 100)
    assert {whole for _, whole in told} == {100}
    assert sorted(told) == told


def test_a_charge_is_the_same_on_every_store(url: str, tmp_path: Path) -> None:
    with odo.connect(url, principal="ana") as ledger:
        people = Population.create("people", BASIC, ledger=ledger, location=tmp_path / "people", ids=3)
        assert took(people.charge(LARGE, key="a")) == {0, 1, 2}
        assert people.charge(LARGE, key="a").receipt.repeated
        assert took(Population.open("people", ledger=ledger).charge(LARGE, key="b")) == set()
        ledger.verify()


def test_choices_that_are_none_are_refused_with_their_name(dense: PopulationFactory, tmp_path: Path) -> None:
    for wrong, said in (({"engine": "abacus"}, "engine"), ({"unknown": "ask"}, "unknown"), ({"ids": [0, 2]}, "ids")):
        choices: dict[str, Any] = {"ledger": dense.ledger, "location": tmp_path / "people", "ids": 3} | wrong
        with pytest.raises(InvalidArgument, match=said):
            Population.create("people", BASIC, **choices)
    people = dense.create(3, location=tmp_path / "elsewhere")
    with pytest.raises(InvalidArgument, match="which"):
        people.charge(Prices([SMALL], [0, 0]), key="a")
    with pytest.raises(InvalidArgument, match="ids"):
        people.charge(Prices([SMALL], [0], ids=["ana"]), key="a")
    with pytest.raises(InvalidArgument, match="ids"):
        people.join([-1], key="a")
