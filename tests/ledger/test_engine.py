"""The engine alone: accounts that another client holds, outcomes that are not known, and the order of a group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

import odograph as odo
from odograph import Ledger, Policy, PureDP
from odograph.errors import AccountNotFound, LedgerBusy, OutcomeUnknown
from odograph.ledger import engine as engine_module
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Charge, Close, Command, Made, Open, Repeated
from odograph.ledger.engine import (
    FIRST_RETRY_DELAY,
    GROUP_SIZE,
    LONGEST_RETRY_DELAY,
    LedgerEngine,
    carry_out,
    result_of,
)
from odograph.ledger.entries import Entry
from odograph.ledger.stores.base import OPENING, Changes, Head, RowLocked, State, Store, Wants, Work
from odograph.ledger.stores.memory import MemoryStore

POLICY = Policy(1, 0, filter="basic")
COST = PureDP("0.01")


class HeldStore:
    """A store some of whose accounts another client holds, for a number of transactions that want them."""

    def __init__(self, timeout: float = 5.0) -> None:
        self._store = MemoryStore()
        self.timeout = timeout
        self.held: frozenset[str] = frozenset()
        self.left = 0
        self.wanted: list[Wants] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        return getattr(self._store, name)

    def write(self, wants: Wants, work: Work) -> None:
        self.wanted.append(wants)
        if self.error is not None:
            raise self.error
        held, self.left = self.held if self.left else frozenset[str](), max(0, self.left - 1)

        def holding(state: State) -> Changes:
            return work(replace(state, held=held))

        self._store.write(wants, holding)


class Desk:
    """A ledger over such a store, with two accounts."""

    def __init__(self, timeout: float = 5.0) -> None:
        self.store = HeldStore(timeout)
        self.engine = LedgerEngine(cast("Store", self.store))
        self.backend = LocalBackend(cast("Store", self.store), "ana", self.engine)
        self.ledger = Ledger(self.backend)
        for name in ("a", "b"):
            self.ledger.open_account(name, POLICY)
        self.store.wanted.clear()

    def charge(self, name: str, key: str) -> Charge:
        return Charge(self.backend.author(key), "spend", self.backend.price({name: COST}))

    def hold(self, *names: str, times: int) -> None:
        self.store.held, self.store.left = frozenset(names), times


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the engine slept; it does not really sleep, and its clock goes on by that."""
    found: list[float] = []
    started = time.monotonic()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return started + sum(found)

        @staticmethod
        def sleep(seconds: float) -> None:
            found.append(seconds)

        perf_counter = staticmethod(time.perf_counter)

    monkeypatch.setattr(engine_module, "time", Clock)
    return found


def test_a_held_account_is_tried_again_after_growing_delays(sleeps: list[float]) -> None:
    desk = Desk()
    desk.hold("a", times=9)
    assert isinstance(desk.engine.submit(desk.charge("a", "k")), Made)
    assert sleeps == [min(FIRST_RETRY_DELAY * 2**i, LONGEST_RETRY_DELAY) for i in range(9)]
    assert len(desk.store.wanted) == 10
    assert desk.ledger.account("a").totals.steps == 1


def test_a_held_account_is_busy_after_the_timeout_and_nothing_is_charged(sleeps: list[float]) -> None:
    desk = Desk(timeout=1.0)
    desk.hold("a", times=10**6)
    with pytest.raises(LedgerBusy, match="holds 'a'; try again") as caught:
        desk.engine.submit(desk.charge("a", "k"))
    assert type(caught.value) is LedgerBusy  # which is not to be tried again at once, as a RowLocked is
    assert sum(sleeps) == pytest.approx(1.0)
    desk.hold(times=0)
    assert desk.ledger.account("a").totals.steps == 0


def test_a_free_account_is_charged_at_once(sleeps: list[float]) -> None:
    desk = Desk()
    desk.hold("a", times=10**6)
    assert isinstance(desk.engine.submit(desk.charge("b", "k")), Made)
    assert not sleeps


def test_many_that_wait_for_a_held_account_wait_longer_each(sleeps: list[float]) -> None:
    desk = Desk()
    desk.engine._retrying |= set(range(1000, 1009))  # noqa: SLF001  nine other threads
    desk.hold("a", times=1)
    desk.engine.submit(desk.charge("a", "k"))
    assert sleeps == [pytest.approx(10 * FIRST_RETRY_DELAY)]
    assert len(desk.engine._retrying) == 9  # noqa: SLF001  this thread no longer waits


def opening(desk: Desk) -> Open:
    return Open(desk.backend.author("o"), Head("c", "", "", "", "person", "add-remove"), odo.compile_policy(POLICY))


HELD: list[tuple[str, Callable[[Desk], Command], tuple[str, ...], bool]] = [
    ("a charge of it", lambda desk: desk.charge("a", "k"), ("a",), True),
    ("a charge of another", lambda desk: desk.charge("b", "k"), ("a",), False),
    ("a charge while accounts are opened", lambda desk: desk.charge("b", "k"), (OPENING,), False),
    ("an opening while others open", opening, (OPENING,), True),
    ("an opening beside it", opening, ("a",), False),
    ("a closing of any tree", lambda desk: Close(desk.backend.author(), "b"), ("a",), True),
]


@pytest.mark.parametrize(("command", "held", "waits"), [row[1:] for row in HELD], ids=[row[0] for row in HELD])
def test_a_command_waits_for_what_it_wants_and_for_nothing_else(
    command: Callable[[Desk], Command], held: tuple[str, ...], *, waits: bool
) -> None:
    desk = Desk()
    desk.hold(*held, times=1)
    (outcome,) = carry_out(cast("Store", desk.store), [command(desk)])
    assert isinstance(outcome, RowLocked) == waits
    if waits and OPENING not in held and isinstance(command(desk), Charge):
        assert str(outcome) == "another client of the database holds 'a'; try again"
    elif waits:
        assert str(outcome) == "another client of the database holds the accounts; try again"


def test_a_group_goes_on_without_the_command_whose_account_is_held() -> None:
    desk = Desk()
    desk.hold("a", times=1)
    commands = [desk.charge("a", "k"), desk.charge("b", "l")]
    first, second = carry_out(cast("Store", desk.store), commands)
    assert isinstance(first, RowLocked)
    assert isinstance(second, Made)
    assert desk.store.wanted[-1].accounts == {"a", "b"}  # what the whole group wants was asked for at once


def test_one_command_wants_what_it_wants_itself() -> None:
    desk = Desk()
    command = desk.charge("a", "k")
    carry_out(cast("Store", desk.store), [command])
    assert desk.store.wanted[-1] == command.wants


def test_an_unknown_outcome_names_the_key_and_keeps_what_is_known() -> None:
    for charged in (None, True):
        with pytest.raises(OutcomeUnknown, match=r"lost \(key 'k'\)") as caught:
            result_of(OutcomeUnknown("lost", charged=charged), "k")
        assert (caught.value.key, caught.value.charged) == ("k", charged)
    known = OutcomeUnknown("lost", key="first")
    with pytest.raises(OutcomeUnknown) as caught:
        result_of(known, "k")
    assert caught.value is known


def test_an_error_is_raised_as_it_is_and_a_result_returned() -> None:
    error = AccountNotFound("there is no account 'a'")
    with pytest.raises(AccountNotFound) as caught:
        result_of(error, "k")
    assert caught.value is error
    desk = Desk()
    command = desk.charge("a", "k")
    assert isinstance(desk.engine.submit(command), Made)
    assert isinstance(desk.engine.submit(command), Repeated)


def test_an_error_of_the_store_is_raised_in_every_thread_of_its_group_as_an_object_of_its_own() -> None:
    desk = Desk()
    desk.store.error = LedgerBusy("the disk is full")
    errors: list[BaseException] = []

    def submit(key: str) -> None:
        try:
            desk.engine.submit(desk.charge("a", key))
        except LedgerBusy as error:
            errors.append(error)

    threads = [threading.Thread(target=submit, args=(f"{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [str(error) for error in errors] == ["the disk is full"] * 8
    assert len({id(error) for error in errors}) == 8


def test_a_group_has_at_most_so_many_commands() -> None:
    assert GROUP_SIZE == 512
    desk = Desk()
    made = carry_out(cast("Store", desk.store), [desk.charge("a", f"{number}") for number in range(3)])
    entries = [cast("Made", one).own[0] for one in made]
    assert all(isinstance(entry, Entry) for entry in entries)
    assert [entry.key for entry in entries] == ["0", "1", "2"]  # in the order in which they came


def test_a_thread_that_waits_for_a_group_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_POLL_INTERVAL", 0.05)
    desk = Desk()
    writing, go = threading.Event(), threading.Event()
    write = desk.store.write
    used: list[float] = []

    def slow(wants: Wants, work: Work) -> None:
        writing.set()
        go.wait(30)
        write(wants, work)

    def submit(key: str) -> None:
        desk.engine.submit(desk.charge("a", key))
        used.append(time.thread_time())  # of this thread, since it began

    desk.backend.author()  # the identity is known
    monkeypatch.setattr(desk.store, "write", slow)
    leader = threading.Thread(target=submit, args=("first",))
    leader.start()
    assert writing.wait(30)
    other = threading.Thread(target=submit, args=("second",))
    other.start()
    time.sleep(0.5)
    go.set()
    for thread in (leader, other):
        thread.join(30)
    assert max(used) < 0.05, used  # a loop without a pause uses as much of the half second as it can get
