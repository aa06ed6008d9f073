"""Populations that renew: one budget for each person and epoch, none for those who were removed."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from population_helpers import (
    PopulationFactory,
    alive,
    compiled_for,
    current,
    ledger_in,
    location_of,
    read_state,
    took,
    versions_in,
    versions_of,
)

from odograph import Ledger, Policy, Population, Prices, PureDP
from odograph.compile import compile_policy
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    IdempotencyConflict,
    InvalidArgument,
    InvalidPolicy,
    LedgerBusy,
)
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Command
from odograph.ledger.epochs import Renew, Renewal, scheduled
from odograph.population import version_store
from odograph.population.engines import EngineContext
from odograph.population.engines.numpy import NumpyEngine
from odograph.population.gate import SPENT
from odograph.population.version_store import Versions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
MONTHLY = scheduled("monthly", "2026-11-01", "12")
BASIC = compiled_for("basic")  # epsilon 1
MOST = PureDP("0.7")


class Clock:
    """The store's clock: nanoseconds since 1970."""

    def __init__(self, day: str) -> None:
        self.set(day)

    def set(self, day: str) -> None:
        self.now = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 10**9

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock("2026-11-10")
    monkeypatch.setattr(time, "time_ns", found)
    return found


def renewing(populations: PopulationFactory, ids: Any = 4, location: Path | str | None = None) -> Population:  # noqa: ANN401
    """A population that renews each month."""
    return Population.create(
        "visits",
        BASIC,
        ledger=populations.ledger,
        location=location or populations.folder / "visits",
        ids=range(ids) if isinstance(ids, int) else ids,
        engine=populations.engine,
        session=populations.session,
        renew=MONTHLY,
    )


def open_names(ledger: Ledger) -> list[str]:
    return [name for name, balance in ledger.backend.balances().items() if not balance.closed]


# Renewing.


def test_in_a_new_epoch_the_same_people_have_spent_nothing_and_removed_ones_everything(
    populations: PopulationFactory, clock: Clock
) -> None:
    people = renewing(populations)
    assert people.name == "visits@2026-11-01"
    people.charge(Prices([MOST, PureDP("0.2")], [0, 1, 1], ids=[0, 1, 2]), key="a")
    people.remove([2, 3], key="remove")
    people.join([3], key="join again")
    assert people.renew() is people
    clock.set("2026-12-01")
    after = people.renew()
    assert (after.name, open_names(populations.ledger)) == ("visits@2026-12-01", ["visits@2026-12-01"])
    assert after.renew() is after
    state = alive(read_state(current(populations.ledger, after)))
    assert state == {0: (0, 0), 1: (0, 0)}
    after.join([2], key="join again, too")
    assert took(after.charge(MOST, key="b")) == {0, 1}
    with pytest.raises(AccountClosed, match="'visits@2026-11-01' is closed"):
        people.charge(PureDP("0.1"), key="c")
    acts = [one.act for one in (*people.rounds(), *after.rounds())]
    assert acts == ["create", "charge", "remove", "join", "close", "renew", "join", "charge"]
    numbers = [one.version for one in (*people.rounds(), *after.rounds())]
    assert numbers == [0, 1, 2, 3, 3, 4, 5, 6]
    assert populations.ledger.verify().entries == len(acts)


def test_the_lifetime_promise_is_printed(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    promise = "at most (12, 1.2e-05)-DP, 12 times (1, 1e-06)-DP, monthly from 2026-11-01 to 2027-11-01"
    clock.set("2026-12-01")
    people = people.renew()
    assert str(people.lifetime) == (
        f"(2, 2e-06)-DP over visits@2026-11-01, visits@2026-12-01; by the schedule {promise}"
    )
    assert promise in repr(people)
    assert promise in people._repr_html_()
    assert dense.create(name="other").lifetime is None


def test_a_key_of_the_epoch_before_is_no_answer_in_this_one(dense: PopulationFactory, clock: Clock) -> None:
    """The epochs share a secret, so equal rounds would have equal digests but for the epoch's name."""
    people = renewing(dense)
    people.charge(MOST, key="daily job")
    clock.set("2026-12-01")
    after = people.renew()
    with pytest.raises(IdempotencyConflict, match="used before for another request"):
        after.charge(MOST, key="daily job")
    again = people.charge(MOST, key="daily job")
    assert (again.receipt.repeated, again.receipt.population) == (True, people.name)


def test_the_current_population_is_the_newest_one(dense: PopulationFactory, clock: Clock) -> None:
    people, ledger = renewing(dense), dense.ledger
    assert Population.current("visits", ledger=ledger).name == people.name
    with pytest.raises(AccountExists, match="there is 'visits@2026-11-01' already"):
        renewing(dense, location=dense.folder / "another")
    clock.set("2026-12-01")
    with pytest.raises(AccountExists, match="there is 'visits@2026-11-01' already"):
        renewing(dense, location=dense.folder / "another")
    assert not (dense.folder / "another").exists()
    people.close()
    with pytest.raises(AccountClosed):
        Population.current("visits", ledger=ledger)
    assert people.renew().name == "visits@2026-12-01"
    clock.set("2027-11-01")
    assert people.renew().name == "visits@2026-12-01"
    assert open_names(ledger) == []
    with pytest.raises(AccountNotFound):
        Population.current("other", ledger=ledger)
    with pytest.raises(InvalidArgument, match="'plain' does not renew"):
        dense.create(name="plain").renew()


def test_a_schedule_without_an_epoch_now_is_refused_and_leaves_nothing(
    dense: PopulationFactory, clock: Clock
) -> None:
    clock.set("2026-10-31")
    with pytest.raises(InvalidArgument, match="renew must be a schedule with an epoch now"):
        renewing(dense)
    assert not (dense.folder / "visits").exists()


def test_budgets_and_populations_do_not_renew_each_other_nor_with_another_promise(
    dense: PopulationFactory, clock: Clock
) -> None:
    renewing(dense)
    own = cast("LocalBackend", dense.ledger.backend)
    clock.set("2026-12-01")
    with pytest.raises(AccountExists, match="'visits@2026-11-01' is a population"):
        own.renew(Renewal("visits", MONTHLY), BASIC, parent="", dataset="", note="")
    account = Renewal("census", MONTHLY)
    own.renew(account, BASIC, parent="", dataset="", note="")
    clock.set("2027-01-01")
    larger = compile_policy(Policy(10, "1e-6", filter="basic"))
    with pytest.raises(InvalidPolicy, match="policy must be that of 'census@2026-12-01'"):
        own.renew(account, larger, parent="", dataset="", note="")
    daily = Renewal("census", scheduled("daily", "2026-11-01"))
    with pytest.raises(InvalidPolicy, match="schedule must be that of 'census@2026-12-01'"):
        own.renew(daily, BASIC, parent="", dataset="", note="")
    assert open_names(dense.ledger) == ["census@2026-12-01", "visits@2026-11-01"]


def test_an_account_under_the_name_of_an_epoch_is_no_population(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    dense.ledger.open_account("visits@2026-12-01", Policy(1, "1e-6", filter="basic"))
    clock.set("2026-12-10")
    with pytest.raises(InvalidPolicy, match="schedule must be that of 'visits@2026-12-01', an account by itself"):
        people.renew()
    with pytest.raises(InvalidArgument, match="epoch must be the first day of one that has a population"):
        people.retire("2026-12-01", key="retire")
    assert open_names(dense.ledger) == ["visits@2026-11-01", "visits@2026-12-01"]


# Each person is charged at most the budget of each epoch, whatever happens in whatever order.


def check_history(people: Population, clock: Clock, acts: list[tuple[str, int]]) -> None:
    """Assert that no one takes part beyond their budget of an epoch, and no one again who was removed.

    What is counted is the list of participants, by the name of the population that charged them: nothing of the
    engine, its files or the ledger.
    """
    spent: dict[tuple[str, int], Fraction] = defaultdict(Fraction)
    removed: set[int] = set()
    for number, (act, value) in enumerate(acts):
        person, key = value % 4, f"{number}"
        if act == "clock":  # forward, and back
            clock.now += int(timedelta(days=25 * (value - 2)).total_seconds()) * 10**9
            people = people.renew()
            continue
        with suppress(AccountClosed):  # after the last epoch
            if act == "charge":
                for one in took(people.charge(PureDP("0.4"), key=key)):
                    spent[people.name, one] += Fraction("0.4")
                    assert spent[people.name, one] <= 1, "more than the budget of an epoch"
                    assert one not in removed, "a fresh budget"
            elif act == "retire":
                with suppress(InvalidArgument):  # of the current epoch, or one that has no population
                    people.retire(people.name.removeprefix("visits@") if value % 2 else "2026-11-01", key=key)
            else:
                {"join": people.join, "remove": people.remove}[act]([person], key=key)
                removed |= {person} if act == "remove" else set()


ACTS = st.lists(
    st.tuples(st.sampled_from(["charge", "charge", "clock", "join", "remove", "retire"]), st.integers(0, 7)),
    max_size=12,
)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
@settings(max_examples=150 if FULL else 6, deadline=None)
@given(acts=ACTS)
def test_no_history_charges_a_person_beyond_the_budget_of_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, engine: str, acts: list[tuple[str, int]]
) -> None:
    folder, clock = tmp_path_factory.mktemp("people"), Clock("2026-11-10")
    with pytest.MonkeyPatch.context() as patch, ledger_in(folder) as ledger:
        patch.setattr(time, "time_ns", clock)
        check_history(renewing(PopulationFactory(engine, ledger, folder)), clock, acts)
        ledger.verify()
    shutil.rmtree(folder)


def test_retiring_the_current_epoch_would_be_caught(
    dense: PopulationFactory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts = [("charge", 0), ("charge", 0), ("retire", 1), ("charge", 0), ("charge", 0)]
    people = renewing(dense)

    def retire(self: Population, epoch: str, *, key: str) -> None:
        """Forget what people spent, whatever epoch it is in."""
        work = partial(self._engine.renew, self._context)
        self._update("join", "", [], work, self._backend.author(key), epoch)

    monkeypatch.setattr(Population, "retire", retire)
    with pytest.raises(AssertionError, match="more than the budget of an epoch"):
        check_history(people, clock, acts)


class ForgetfulEngine(NumpyEngine):
    """Lets those who were removed begin again in a new epoch."""

    def renew(self, context: EngineContext, before: Path, after: Path) -> None:
        super().renew(context, before, after)
        for path in after.glob("total-*"):
            path.write_bytes(bytes(path.stat().st_size))


def test_an_engine_that_renews_those_who_were_removed_would_be_caught(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    people._engine = ForgetfulEngine()  # noqa: SLF001  the broken one
    with pytest.raises(AssertionError, match="a fresh budget"):
        check_history(people, clock, [("remove", 1), ("clock", 4), ("charge", 0)])


# Several programs, and programs that end in the middle.


def interrupt(people: Population, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another program act when this one has read everything and is about to open the next epoch."""
    engine = people._backend.engine  # noqa: SLF001  only tests look there
    submit = engine.submit

    def submit_after(command: Command) -> object:
        if isinstance(command, Renew):
            monkeypatch.setattr(engine, "submit", submit)
            act()
        return submit(command)

    monkeypatch.setattr(engine, "submit", submit_after)


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs on several machines do not see each other's locks."""
    monkeypatch.setattr(version_store, "_acquire", lambda *_: False)


@pytest.mark.usefixtures("unlocked")
def test_who_is_removed_while_an_epoch_is_opened_is_not_in_it(
    dense: PopulationFactory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    people, another = renewing(dense), Population.open("visits@2026-11-01", ledger=dense.ledger)
    clock.set("2026-12-01")
    interrupt(people, monkeypatch, lambda: another.remove([1], key="request 17"))
    after = people.renew()
    assert took(after.charge(MOST, key="a")) == {0, 2, 3}
    assert len(versions_of(after)) == 2
    dense.ledger.verify()


@pytest.mark.usefixtures("unlocked")
def test_opening_an_epoch_whatever_happened_meanwhile_would_be_caught(
    dense: PopulationFactory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    people, another = renewing(dense), Population.open("visits@2026-11-01", ledger=dense.ledger)
    clock.set("2026-12-01")
    interrupt(people, monkeypatch, lambda: another.remove([1], key="request 17"))
    monkeypatch.setattr(Renew, "read", None)  # Control: what was read is not compared
    monkeypatch.setattr(Versions, "clean", lambda *_: None)  # or the other program removes the files of the epoch
    assert 1 in took(people.renew().charge(MOST, key="a"))


@pytest.mark.usefixtures("unlocked")
def test_of_two_programs_one_opens_the_epoch_and_both_charge_in_it(
    dense: PopulationFactory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = renewing(dense)
    for principal, day in (("ana", "2026-12-01"), ("ben", "2027-01-01")):  # with the same key, and with another
        another = Population.open(people.name, ledger=dense.ledger.acting_as(principal))
        clock.set(day)
        interrupt(people, monkeypatch, another.renew)
        people = after = people.renew()
        assert open_names(dense.ledger) == [after.name]
        assert took(after.charge(MOST, key=day)) == {0, 1, 2, 3}
        assert took(another.renew().charge(MOST, key=f"{day} again")) == set()
        assert len(versions_of(after)) == 2
    dense.ledger.verify()


def test_a_program_that_ends_in_the_middle_leaves_the_epoch_before(
    dense: PopulationFactory, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = renewing(dense)
    people.charge(PureDP(1), key="a")
    clock.set("2026-12-01")

    def end() -> None:
        raise KeyboardInterrupt

    interrupt(people, monkeypatch, end)
    with pytest.raises(KeyboardInterrupt):
        people.renew()
    assert open_names(dense.ledger) == [people.name]
    assert took(people.charge(MOST, key="b")) == set()
    after = people.renew()
    assert took(after.charge(MOST, key="c")) == {0, 1, 2, 3}
    assert len(versions_of(after)) == 2  # nothing is left of the attempt


# Retiring an epoch.


def totals_left(people: Population) -> set[int]:
    """The totals in all files that there are, of whatever version."""
    location = location_of(people)
    states = [read_state(location / name) for name in versions_in(location)]
    return {total for state in states for totals in state.values() for total in totals} - {0, SPENT}


def test_a_retired_epoch_is_forgotten_and_its_promise_stands(populations: PopulationFactory, clock: Clock) -> None:
    people = renewing(populations)
    people.charge(MOST, key="a")
    people.remove([3], key="remove")
    people.charge(PureDP("0.2"), key="b")
    clock.set("2026-12-01")
    after = people.renew()
    assert totals_left(after), "the version before is there until the next round"
    receipt = after.retire("2026-11-01", key="retire", note="as agreed")
    assert totals_left(after) == set()
    assert after.retire("2026-11-01", key="retire")._replace(repeated=False) == receipt
    last = after.rounds()[-1]
    assert (last.act, last.key, last.note, last.cost) == ("retire", "retire", "as agreed", None)
    assert after.history()[-1].entry.details["retired"] == "2026-11-01"
    with pytest.raises(AccountClosed):
        people.charge(PureDP("0.1"), key="c")
    assert str(after.lifetime).startswith("(2, 2e-06)-DP over visits@2026-11-01, visits@2026-12-01")
    after.join([3], key="join again")
    assert took(after.charge(MOST, key="d")) == {0, 1, 2}
    populations.ledger.verify()


def test_only_an_epoch_that_is_over_and_has_a_population_is_retired(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    for epoch in ("2026-11-01", "2026-12-01", "2026-11", "", "yesterday"):
        with pytest.raises(InvalidArgument, match=r"^epoch must be .* \(got "):
            people.retire(epoch, key="retire")
    clock.set("2026-12-01")
    people.renew()
    with pytest.raises(InvalidArgument, match="epoch must be over and closed before 'visits@2026-11-01'"):
        people.retire("2026-11-01", key="retire")
    assert totals_left(people) == set()
    assert dense.ledger.verify().entries == 3


def test_an_epoch_that_a_round_still_uses_is_retired_after_it(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    seen = []

    def slow(records: list[int]) -> int:
        if records:
            clock.set("2026-12-01")
            with pytest.raises(LedgerBusy, match="still uses its files"):
                people.renew().retire("2026-11-01", key="retire")
            seen.append(totals_left(people))
        return len(records)

    assert people.run(slow, [5, 6, 7, 8], MOST, key="a") == 4
    assert seen[0]
    after = people.renew()
    assert after.retire("2026-11-01", key="retire").repeated
    assert totals_left(after) == set()


def test_a_step_that_retires_is_verified(dense: PopulationFactory, clock: Clock) -> None:
    people = renewing(dense)
    clock.set("2026-12-01")
    after = people.renew()
    after.retire("2026-11-01", key="retire")
    entry = after.history()[-1].entry
    assert entry.details["act"] == "retire"
    assert dense.ledger.verify().entries == 4
