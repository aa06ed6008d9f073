"""Populations in the ledger: audited, copied, and never charged, asked or listed as an account."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from population_helpers import PopulationFactory, compiled_for, current, ledger_in, location_of, took, versions_in

import odograph as odo
from odograph import Ledger, Policy, Population, PureDP
from odograph.core.mechanisms import laplace
from odograph.core.planning import calibration_question
from odograph.errors import (
    AccountClosed,
    AccountExists,
    InvalidArgument,
    LedgerCorrupt,
    LedgerError,
    UnprovenComposition,
)
from odograph.ledger.backend import LocalBackend, Opened
from odograph.ledger.commands import MovePopulation, Pointer, read_pointer

BASIC = compiled_for("basic")
SMALL = PureDP("0.1")


def moved_on(dense: PopulationFactory) -> Population:
    """A population that has made every kind of step; `retire` is one of those that renew."""
    people = dense.create(5, compiled=BASIC)
    people.charge(SMALL, key="a", note="first")
    people.join([5], key="b")
    people.remove([0], key="c")
    return people


def forged(people: Population, ledger: Ledger, name: str, act: str, pointer: Pointer) -> None:
    """Write a step as the owner of the ledger could, with the right seals."""
    assert isinstance(ledger.backend, LocalBackend)
    backend = ledger.backend
    last = backend.balances([name])[name].sequence
    request = backend.entry(people.name, 1).request
    backend.engine.submit(
        MovePopulation(
            backend.author(f"forged {act}"), name, backend.opened(name).origin, last, request, "", act, pointer
        )
    )


def test_a_population_is_audited_with_everything_else(dense: PopulationFactory) -> None:
    people = moved_on(dense)
    dense.ledger.open_account("account", BASIC).spend(SMALL)
    checkpoint = dense.ledger.verify().checkpoint
    assert checkpoint.accounts["people"][0] == 3
    people.charge(SMALL, key="d")
    dense.ledger.verify(checkpoint=checkpoint)


def test_the_ledger_says_which_steps_there_were_and_under_which_keys(dense: PopulationFactory) -> None:
    people = moved_on(dense)
    history = people.history()
    assert [past.entry.verb for past in history] == ["open", "step", "step", "step"]
    assert [past.entry.key for past in history[1:]] == ["a", "b", "c"]
    assert [past.entry.details["act"] for past in history[1:]] == ["charge", "join", "remove"]
    assert [read_pointer(past.entry).version for past in history] == [0, 1, 2, 3]
    assert history[1].entry.guarantee == SMALL
    assert [past.entry.cost for past in history[2:]] == ["", ""]
    assert [history[1].principal, history[1].note] == ["ana", "first"]
    assert people.history(2, 1) == history[2:3]


@pytest.mark.parametrize(
    ("act", "version"),
    [("charge", 5), ("charge", 3), ("charge", 0), ("charge", -1), ("give back", 4), ("", 4)],
    ids=["skipped", "repeated", "reset", "negative", "unheard of", "empty"],
)
def test_a_forged_step_is_found(dense: PopulationFactory, act: str, version: int) -> None:
    people = moved_on(dense)
    dense.ledger.verify()
    forged(people, dense.ledger, "people", act, Pointer(version, current(dense.ledger, people).name))
    with pytest.raises(LedgerCorrupt, match="people"):
        dense.ledger.verify()


def test_a_step_as_it_should_be_is_not_found(dense: PopulationFactory) -> None:
    """Negative control: what is refused above is the forgery, not the way in which it was written."""
    people = moved_on(dense)
    forged(people, dense.ledger, "people", "charge", Pointer(4, current(dense.ledger, people).name))
    dense.ledger.verify()


def test_a_step_of_an_account_is_found(dense: PopulationFactory) -> None:
    people = moved_on(dense)
    dense.ledger.open_account("account", BASIC)
    forged(people, dense.ledger, "account", "charge", Pointer(1, current(dense.ledger, people).name))
    with pytest.raises(LedgerCorrupt, match="account#1"):
        dense.ledger.verify()


def test_a_charge_of_a_population_as_a_whole_is_found(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved_on(dense)
    monkeypatch.setattr(Opened, "require_own", lambda _: None)
    dense.ledger.spend({"people": SMALL}, key="forged")
    with pytest.raises(LedgerCorrupt, match="people#4"):
        dense.ledger.verify()


def test_a_step_after_the_population_was_closed_is_found(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = moved_on(dense)
    people.close()
    dense.ledger.verify()
    pointer = Pointer(4, current(dense.ledger, people).name)
    with pytest.raises(AccountClosed):
        forged(people, dense.ledger, "people", "charge", pointer)
    assert isinstance(dense.ledger.backend, LocalBackend)
    written = MovePopulation.apply

    def reopened(self: MovePopulation, state: object, changes: object) -> object:
        balance = state.balances["people"]  # type: ignore[attr-defined]
        balance.closed = False
        outcome = written(self, state, changes)  # type: ignore[arg-type]
        balance.closed = True
        return outcome

    monkeypatch.setattr(MovePopulation, "apply", reopened)
    forged(people, dense.ledger, "people", "charge", pointer)
    with pytest.raises(LedgerCorrupt, match="people#5"):
        dense.ledger.verify()


REFUSED: list[Callable[[Ledger], object]] = [
    lambda ledger: ledger.account("people"),
    lambda ledger: ledger.spend({"people": SMALL}),
    lambda ledger: ledger.spend({"account": SMALL, "people": SMALL}),
    lambda ledger: ledger.reserve({"people": SMALL}),
    lambda ledger: ledger.decide({"people": SMALL}),
    lambda ledger: ledger.backend.largest("people", PureDP, 1),
    lambda ledger: ledger.backend.quote("people", [SMALL]),
    lambda ledger: ledger.backend.calibrate("people", calibration_question(laplace, 1, {})),
    lambda ledger: ledger.backend.how_many("people", SMALL),
    lambda ledger: ledger.open_account("below", BASIC, parent="people"),
    lambda ledger: ledger.open_account("after", BASIC, successor_of="people"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_an_account_is_asked_for_a_population_refuses(dense: PopulationFactory, number: int) -> None:
    people = moved_on(dense)
    dense.ledger.open_account("account", BASIC)
    with pytest.raises(UnprovenComposition, match="population"):
        REFUSED[number](dense.ledger)
    assert len(people.history()) == 4
    assert [account.name for account in dense.ledger.accounts()] == ["account"]
    assert dense.ledger.account("account").decide(SMALL).totals.steps == 0
    dense.ledger.verify()


def test_an_account_is_not_opened_as_a_population(dense: PopulationFactory, tmp_path: Path) -> None:
    dense.ledger.open_account("account", BASIC)
    with pytest.raises(LedgerError, match="is an account, not a population"):
        dense.open("account")
    with pytest.raises(AccountExists):
        dense.create(3, name="account")
    people = dense.create(3, compiled=BASIC)
    with pytest.raises(AccountExists):
        dense.ledger.open_account("people", BASIC)
    assert people.policy == BASIC.policy
    assert (tmp_path / "people").is_dir()


def test_a_population_is_reached_through_its_own_store_only(
    dense: PopulationFactory, service: object, tmp_path: Path
) -> None:
    token = service.token()  # type: ignore[attr-defined]
    with odo.connect(service.url, token=token) as client:  # type: ignore[attr-defined]
        with pytest.raises(InvalidArgument, match=r"^ledger must be reached directly"):
            Population.create("far", BASIC, ledger=client, location=tmp_path / "far", ids=3)
        with pytest.raises(InvalidArgument, match=r"^ledger must be reached directly"):
            Population.open("far", ledger=client)
    assert not (tmp_path / "far").exists()
    dense.create(3)


def copied_by_lines(ledger: Ledger, other: Ledger, *, checked: bool) -> None:
    file = io.StringIO()
    checkpoint = ledger.export(file)
    other.import_(io.StringIO(file.getvalue()), checkpoint=checkpoint if checked else None)


def copied_by_file(ledger: Ledger, other: Ledger, *, checked: bool) -> None:
    path = Path(str(ledger.backend.url).removeprefix("sqlite:///")).with_name("backup.db")
    checkpoint = ledger.backup(path)
    other.restore(path, checkpoint=checkpoint if checked else None)


@pytest.mark.parametrize("copy", [copied_by_lines, copied_by_file])
def test_a_copy_of_the_ledger_and_of_the_folder_goes_on_from_there(
    dense: PopulationFactory, tmp_path: Path, copy: Callable[..., None]
) -> None:
    """The ledger first: one step later the folder still has the version that the copy points to."""
    people = moved_on(dense)
    before = dense.state(people)
    folder = tmp_path / "copy"
    folder.mkdir()
    with ledger_in(folder) as other:
        copy(dense.ledger, other, checked=True)
        people.charge(SMALL, key="later")
        shutil.copytree(location_of(people), folder / "people")
        again = PopulationFactory("numpy", other, folder).open(location=folder / "people")
        assert dense.state(again) != before
        assert PopulationFactory("numpy", other, folder).state(again) == before
        assert again.history() == people.history()[:-1]
        assert again.charge(SMALL, key="a").receipt.repeated
        assert took(again.charge(PureDP("0.9"), key="d")) == {1, 2, 3, 4, 5}
        other.verify()
        again.charge(PureDP(0), key="e")
        assert len(versions_in(folder / "people")) == 2


@pytest.mark.parametrize("copy", [copied_by_lines, copied_by_file])
def test_a_copy_that_may_be_old_takes_no_steps(
    dense: PopulationFactory, tmp_path: Path, copy: Callable[..., None]
) -> None:
    people = moved_on(dense)
    (tmp_path / "copy").mkdir()
    with ledger_in(tmp_path / "copy") as other:
        copy(dense.ledger, other, checked=False)
        again = PopulationFactory("numpy", other, tmp_path).open(location=location_of(people))
        with pytest.raises(AccountClosed):
            again.charge(SMALL, key="d")
        other.verify()
    assert took(people.charge(SMALL, key="d")) == {1, 2, 3, 4, 5}


def test_a_policy_is_compiled_where_it_is_not_yet(dense: PopulationFactory, tmp_path: Path) -> None:
    people = Population.create(
        "own", Policy(1, "1e-6", filter="zcdp"), ledger=dense.ledger, location=tmp_path / "own", ids=2
    )
    assert repr(people) == "Population('own', (1, 1e-06)-DP for each person (add-remove))"
    assert took(people.charge(odo.GDP("0.1"), key="a")) == {0, 1}
