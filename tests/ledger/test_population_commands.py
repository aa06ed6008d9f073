"""Steps of a population, as the ledger sees them: one after the other, each once, and nothing else is charged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import odograph as odo
from odograph import Ledger, Policy, PureDP
from odograph.errors import (
    AccountClosed,
    AccountNotFound,
    IdempotencyConflict,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    UnprovenComposition,
)
from odograph.ledger.backend import LocalBackend, Opened
from odograph.ledger.commands import (
    Charge,
    Made,
    MovePopulation,
    Pointer,
    Repeated,
    Result,
    read_pointer,
    read_population,
)
from odograph.ledger.entries import text_of
from odograph.ledger.stores.base import Head
from odograph.ledger.stores.memory import MemoryStore

BASIC = odo.compile_policy(Policy(1, 0, filter="basic"))
TENTH = PureDP("0.1")


class People:
    """A population whose files are nowhere: the ledger does not look at them."""

    def __init__(self, population: Mapping[str, Any]) -> None:
        self.backend = LocalBackend(MemoryStore(), "ana")
        self.ledger = Ledger(self.backend)
        head = Head("people", "", "", "", "person", "add-remove")
        self.backend.open(head, BASIC, None, "", population)

    def step(self, version: int, key: str, **changes: Any) -> Result:
        """Submit a step to a version, as it should be but for the changes."""
        origin = self.backend.opened("people").origin
        step = MovePopulation(
            self.backend.author(key), "people", origin, version - 1, "digest", "", "charge", Pointer(version, "s")
        )
        return self.backend.engine.submit(step._replace(**changes))


@pytest.fixture
def people() -> Iterator[People]:
    made = People({"state": "s0"})
    assert isinstance(made.step(1, "first"), Made)
    yield made
    made.ledger.close()


def test_the_same_step_again_is_the_first_one(people: People) -> None:
    assert isinstance(people.step(1, "first"), Repeated)
    with pytest.raises(IdempotencyConflict):
        people.step(2, "first", request="another")
    assert isinstance(people.step(2, "second"), Made)
    assert people.ledger.verify().entries == 3


def test_of_two_who_began_from_the_same_version_one_is_first(people: People) -> None:
    people.step(2, "second")
    with pytest.raises(LedgerBusy, match="another process has moved"):
        people.step(2, "also second")
    assert people.ledger.verify().entries == 3


def test_a_step_is_of_the_population_that_was_opened(people: People) -> None:
    with pytest.raises(AccountNotFound, match="no population 'others'"):
        people.step(2, "second", name="others")
    with pytest.raises(LedgerError, match="no longer the population"):
        people.step(2, "second", origin="another")
    people.backend.close("people", "")
    with pytest.raises(AccountClosed, match="takes no new rounds"):
        people.step(2, "second")
    assert people.ledger.verify().entries == 3


def test_a_population_is_not_charged_as_a_whole_and_a_charge_is_found(people: People) -> None:
    opened = people.backend.opened("people")
    with pytest.raises(UnprovenComposition, match="is a population"):
        people.ledger.spend({"people": TENTH})
    asked = Opened(opened.head, opened.compiled, opened.origin, ()).ask(TENTH)  # as if it were none
    people.backend.engine.submit(Charge(people.backend.author(), "spend", (asked,)))
    with pytest.raises(LedgerCorrupt, match="people#2: a population takes no charges"):
        people.ledger.verify()


@pytest.mark.parametrize(
    "changes", [{"pointer": Pointer(3, "s")}, {"act": "give back"}], ids=["skipped", "unheard of"]
)
def test_a_step_that_is_not_the_next_is_found(people: People, changes: dict[str, Any]) -> None:
    people.step(2, "second", **changes)
    with pytest.raises(LedgerCorrupt, match="people#2: it is not a valid step 2"):
        people.ledger.verify()


def test_a_step_of_an_account_that_is_no_population_is_found(people: People) -> None:
    people.ledger.open_account("account", BASIC)
    origin = people.backend.opened("account").origin
    people.step(1, "forged", name="account", origin=origin, before=0)
    with pytest.raises(LedgerCorrupt, match="account#1: only a population"):
        people.ledger.verify()


@pytest.mark.parametrize("population", [{}, {"state": 5}, "s0", ["s0"]], ids=repr)
def test_a_first_entry_that_does_not_say_where_its_people_are_is_named(people: People, population: object) -> None:
    first = people.backend.entry("people", 0)
    assert read_pointer(first) == Pointer(0, "s0")
    forged = first._replace(detail=text_of({**first.details, "population": population}))
    with pytest.raises(LedgerCorrupt, match="people#0: its population cannot be read"):
        read_population(forged)


def test_an_entry_that_points_to_no_version_is_named(people: People) -> None:
    step = people.backend.entry("people", 1)
    assert read_pointer(step) == Pointer(1, "s")
    people.ledger.open_account("account", BASIC)
    for entry in (
        step._replace(verb="spend"),
        step._replace(detail=text_of({**step.details, "version": "1"})),
        step._replace(detail=text_of({"version": 1})),
        people.backend.entry("account", 0),
    ):
        with pytest.raises(LedgerCorrupt, match="points to no version"):
            read_pointer(entry)
