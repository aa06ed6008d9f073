"""Several processes on one population wait for each other, and are right whether they do or not."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from population_helpers import PopulationFactory, ledger_in, location_of, read_state, versions_in
from race_worker import PRICE

from odograph import Policy, Population, compile_policy
from odograph.ledger.commands import Command, MovePopulation, Result
from odograph.ledger.engine import LedgerEngine
from odograph.ledger.stores.base import Changes, State
from odograph.population import version_store
from odograph.population.version_store import LOCK_FILES, Versions, hold_lease

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
PROCESSES = 5
CHARGES = 15 if FULL else 6  # of each process
PEOPLE = 1_000_000 if FULL else 300_000
ROOMY = compile_policy(Policy(1000, 0, filter="basic"))
HERE = Path(__file__).parent
PROCESS_TIMEOUT = 120.0  # seconds
# Processes that wait take no longer than one that does the same alone, but for what a busy machine makes of it.
SLOWER = 1.6


def race(folder: Path, twin: str, processes: int, charges: int, people: int = PEOPLE) -> dict[str, Any]:
    """Let processes charge one population, and look at what everybody has spent after it."""
    with ledger_in(folder) as ledger:
        population = PopulationFactory("numpy", ledger, folder).create(people, compiled=ROOMY)
        state = location_of(population)
    support = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
    done = subprocess.run(  # noqa: S603  our own code
        [
            sys.executable,
            str(HERE / "race_worker.py"),
            f"sqlite:///{folder}/ledger.db",
            twin,
            f"{processes}",
            f"{charges}",
        ],
        env=os.environ | {"PYTHONPATH": support},
        capture_output=True,
        check=True,
        timeout=PROCESS_TIMEOUT,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["processes"] == processes, done.stderr.decode()[-3000:]
    with ledger_in(folder) as ledger:
        again = Population.open("people", ledger=ledger)
        found["steps"] = len(again.history()) - 1
        found["spent"] = {totals[1] for totals in read_state(max(state.glob("0*"))).values()}
        ledger.verify()
    assert len(versions_in(state)) == 2
    return found


def check_right(found: dict[str, Any], charges: int) -> None:
    """Each charge is there once: nobody has spent more, or less."""
    assert found["steps"] == charges
    assert found["spent"] == {charges}, "charges are lost, or there twice"


def check_nothing_wasted(found: dict[str, Any], charges: int) -> None:
    """No process is refused, and none writes a version that is thrown away."""
    assert found["busy"] == 0
    assert found["begun"] == charges, "versions were written in vain"


@pytest.mark.long
def test_five_processes_wait_for_each_other_and_are_no_slower_than_one(tmp_path: Path) -> None:
    charges = PROCESSES * CHARGES
    found = {}
    for name, processes in (("one", 1), ("five", PROCESSES)):
        (tmp_path / name).mkdir()
        found[name] = race(tmp_path / name, "", processes, charges // processes)
        check_right(found[name], charges)
        check_nothing_wasted(found[name], charges)
    assert found["five"]["seconds"] < SLOWER * found["one"]["seconds"] + 1


@pytest.mark.parametrize("twin", ["no lease", "no patience"])
def test_a_lease_that_is_ignored_or_runs_out_loses_no_charge_and_charges_none_twice(
    tmp_path: Path, twin: str
) -> None:
    """Also the negative control of the test above: there is much that is written in vain."""
    charges = PROCESSES * CHARGES
    found = race(tmp_path, twin, PROCESSES, CHARGES, people=30_000)
    check_right(found, charges)
    with pytest.raises(AssertionError, match=r"in vain|assert \d+ == 0"):
        check_nothing_wasted(found, charges)


@contextmanager
def holding(location: Path) -> Iterator[int]:
    """A process that has the lease, and does nothing with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            with hold_lease(location):
                os.write(writing, b"h")
                time.sleep(PROCESS_TIMEOUT)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"h"
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_lease_ends_with_its_process(dense: PopulationFactory) -> None:
    people = dense.create(3, compiled=ROOMY)
    with holding(location_of(people)) as child:
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()
        assert not people.charge(PRICE, key="a").receipt.repeated
        assert 0.2 <= time.monotonic() - began < PROCESS_TIMEOUT / 2


def test_a_process_that_holds_the_lease_and_was_stopped_is_not_waited_for_without_end(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = dense.create(3, compiled=ROOMY)
    monkeypatch.setattr(version_store, "LEASE_TIMEOUT", 0.2)
    with holding(location_of(people)) as child:
        os.kill(child, signal.SIGSTOP)
        assert not people.charge(PRICE, key="a").receipt.repeated
        assert people.charge(PRICE, key="a").receipt.repeated
        assert dense.state(people) == dict.fromkeys(range(3), (0, 1))


def test_patience_is_for_one_step_and_not_for_all_that_are_in_front(dense: PopulationFactory) -> None:
    """Eight threads hold it for a while each: the last waits for longer than its patience, and still has its turn."""
    people, order, within, alone = dense.create(3, compiled=ROOMY), list[int](), list[int](), list[bool]()

    def hold(number: int) -> None:
        with hold_lease(location_of(people), timeout=1.5):
            within.append(number)
            time.sleep(0.25)
            order.append(number)
            alone.append([*order] == [*within])

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(order) == [*range(8)]
    assert all(alone)


def test_who_has_just_made_a_step_does_not_overtake_those_who_wait(dense: PopulationFactory) -> None:
    people, turns, end = dense.create(3, compiled=ROOMY), list[int](), time.monotonic() + 1

    def again(number: int) -> None:
        while time.monotonic() < end:
            with hold_lease(location_of(people)):
                turns.append(number)
                time.sleep(0.01)

    threads = [threading.Thread(target=again, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    overtaken = sum(one == other for one, other in pairwise(turns))
    assert overtaken < len(turns) / 10
    assert set(turns) == {*range(4)}


def check_nested(dense: PopulationFactory) -> None:
    """Charge from what a step is told how far it has come by, and from a signal handler: the one within is first."""
    people, keys = dense.create(70_000, compiled=ROOMY), iter(["within", "in a handler"])
    link = dense.folder / "link"
    link.symlink_to(location_of(people))
    other = dense.open(location=link)

    def charge(*_: object) -> None:
        other.charge(PRICE, key=next(keys))

    def once(work: Callable[[], None]) -> Callable[[int, int], None]:
        left = [work]
        return lambda *_: left.pop()() if left else None

    people.charge(PRICE, key="around", progress=once(charge))
    before = signal.signal(signal.SIGUSR1, charge)
    try:
        people.charge(PRICE, key="signalled", progress=once(lambda: os.kill(os.getpid(), signal.SIGUSR1)))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [past.entry.key for past in people.history()[1:]] == ["within", "around", "in a handler", "signalled"]
    assert dense.state(people)[69_999] == (0, 4), "charges are lost, or there twice"


def test_a_charge_from_within_a_charge_does_not_wait_for_itself(dense: PopulationFactory) -> None:
    began = time.monotonic()
    check_nested(dense)
    assert time.monotonic() - began < version_store.LEASE_TIMEOUT / 10


def check_late(dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the lease has written its version, and another one, without it, is first in the ledger."""
    people, submit = dense.create(3, compiled=ROOMY), LedgerEngine.submit
    within = [lambda: people.charge(PRICE, key="within")]

    def late(engine: LedgerEngine, command: Command) -> Result:
        if within:
            within.pop()()
        return submit(engine, command)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerEngine, "submit", late)
        people.charge(PRICE, key="around")
    assert [past.entry.key for past in people.history()[1:]] == ["within", "around"]
    assert dense.state(people).get(2) == (0, 2), "charges are lost, or there twice"


def test_a_step_without_the_lease_makes_the_other_one_try_again(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_late(dense, monkeypatch)


def test_a_ledger_that_takes_a_step_from_whichever_version_is_caught(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: it is the comparison in the ledger on which all rests, and a charge that is lost is found."""
    written = MovePopulation.apply

    def any_version(step: MovePopulation, state: State, changes: Changes) -> Result:
        balance = state.balances[step.name]
        pointer = step.pointer._replace(version=balance.totals.steps + 1)
        return written(step._replace(before=balance.sequence, pointer=pointer), state, changes)

    monkeypatch.setattr(MovePopulation, "apply", any_version)
    with pytest.raises(AssertionError, match="charges are lost"):
        check_late(dense, monkeypatch)


def test_where_files_have_no_locks_everything_goes_on(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = dense.create(3, compiled=ROOMY)

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(version_store, "fcntl", SimpleNamespace(**vars(fcntl) | {"flock": unsupported}))
        people.charge(PRICE, key="a")
    with monkeypatch.context() as patch:
        patch.setattr(version_store, "fcntl", None)
        people.charge(PRICE, key="b")
    for name in LOCK_FILES:  # nor are links followed
        (location_of(people) / name).unlink()
        (location_of(people) / name).symlink_to("/dev/full")
    people.charge(PRICE, key="c")
    assert dense.state(people) == dict.fromkeys(range(3), (0, 3))


def test_a_key_that_was_asked_for_while_another_process_waited_is_not_worked_on_twice(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    people, begun, begin = dense.create(3, compiled=ROOMY), list[int](), Versions.begin

    def counted(versions: Versions, version: int) -> Path:
        begun.append(version)
        time.sleep(0.1)
        return begin(versions, version)

    monkeypatch.setattr(Versions, "begin", counted)
    threads = [threading.Thread(target=people.charge, args=(PRICE,), kwargs={"key": "a"}) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) < 3  # one may have looked a moment before the first was done
    assert dense.state(people) == dict.fromkeys(range(3), (0, 1))


def charge_across(dense: PopulationFactory) -> float:
    """Charge two populations, each from within a charge of the other, and return how long that takes."""
    first, second = (dense.create(70_000, compiled=ROOMY, name=name) for name in ("first", "second"))
    both = threading.Barrier(2)

    def charge(outer: Population, inner: Population) -> None:
        left = [0]

        def within(*_: object) -> None:
            if left:
                left.pop()
                both.wait(20)  # until each has its own lease
                inner.charge(PRICE, key=f"within {outer.name}")

        outer.charge(PRICE, key=f"around {outer.name}", progress=within)

    pairs = ((first, second), (second, first))
    threads = [threading.Thread(target=charge, args=pair, daemon=True) for pair in pairs]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "each waits for the other"
    for population, other in pairs:
        keys = [past.entry.key for past in population.history()[1:]]
        assert sorted(keys) == [f"around {population.name}", f"within {other.name}"]
    return time.monotonic() - began


def test_charges_of_two_populations_within_each_other_do_not_wait_for_each_other(dense: PopulationFactory) -> None:
    assert charge_across(dense) < 20


def test_a_lease_that_is_waited_for_with_another_one_in_hand_is_caught(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_store, "LEASE_TIMEOUT", 4.0)
    monkeypatch.setattr(version_store, "NESTED_LEASE_TIMEOUT", version_store.LEASE_TIMEOUT)
    assert charge_across(dense) >= version_store.LEASE_TIMEOUT
