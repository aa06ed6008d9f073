"""The queue of group commit: when it is full, when one who waits is interrupted, when the thread that writes dies."""

from __future__ import annotations

import dis
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, cast

import pytest
from broken_stores import PRINCIPAL, StoreWrapper, ledger_at
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import COST, PER_EPSILON, charges, policy

from odograph import PureDP, compile_policy
from odograph.errors import LedgerBusy
from odograph.ledger import engine
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Charge, Made
from odograph.ledger.engine import FairQueue, LedgerEngine, carry_out
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Changes, State, Store, Wants, Work
from odograph.ledger.stores.memory import MemoryStore
from odograph.ledger.stores.sqlite import SqliteStore

PROGRAMS = Path(__file__).parent / "programs"
FULL = os.environ.get("ODOGRAPH_FULL") == "1"
THREAD_TIMEOUT = 20.0  # seconds until a thread that should go on has failed
Trace: TypeAlias = Callable[[FrameType, str, Any], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with one account."""
    path = tmp_path / "ledger.db"
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.open_account("a", policy(10**6), key="a")
    return path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Let nobody write while the block runs."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


class Asking:
    """Charges from threads of their own, and what came of each."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of the processor
        self._threads: list[threading.Thread] = []

    def ask(self, ledger: Ledger, key: str, trace: Trace | None = None) -> None:
        thread = threading.Thread(target=self._ask, args=(ledger, key, trace), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, ledger: Ledger, key: str, trace: Trace | None) -> None:
        if trace is not None:
            sys.settrace(trace)
        began = time.thread_time()
        try:
            ledger.spend({"a": COST}, key=key)
        except BaseException as error:  # noqa: BLE001  it is the outcome
            self.outcomes[key] = type(error).__name__
        else:
            self.outcomes[key] = "charged"
        self.seconds[key] = time.thread_time() - began

    @property
    def unanswered(self) -> int:
        return len(self._threads) - len(self.outcomes)

    def end(self) -> dict[str, str]:
        """Wait for all of them; whoever is blocked for ever has no outcome."""
        for thread in self._threads:
            thread.join(THREAD_TIMEOUT)
        return self.outcomes


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + THREAD_TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gated(StoreWrapper):
    """A store that writes only while its gate is open."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def write(self, wants: Wants, work: Work) -> None:
        self.reached.set()
        assert self.gate.wait(THREAD_TIMEOUT)
        self.store.write(wants, work)


class Desk:
    """A ledger whose writer can be held while others come."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.store = Gated(store)
        self.engine = LedgerEngine(cast("Store", self.store), **options)
        self.ledger = Ledger(LocalBackend(cast("Store", self.store), PRINCIPAL, self.engine))
        self.ledger.open_account("a", policy(10**6), key="a")
        self.ledger.spend({"a": COST}, key="first")

    @contextmanager
    def busy(self, asking: Asking, key: str = "writes") -> Iterator[None]:
        """Let one write while the block runs, and be done only after it."""
        self.store.gate.clear()
        self.store.reached.clear()
        asking.ask(self.ledger, key)
        assert self.store.reached.wait(THREAD_TIMEOUT)
        try:
            yield
        finally:
            self.store.gate.set()

    def ask(self, asking: Asking, *keys: str, trace: Trace | None = None) -> None:
        """Let some wait, one after the other, for the one that writes; or be answered, as one may be interrupted."""
        for key in keys:
            asking.ask(self.ledger, key, trace)
            wait_until(lambda: self.engine.queued == asking.unanswered - 1)


@pytest.mark.parametrize("waiting", [0, 1, 2, 5])
def test_those_who_wait_sleep_share_transactions_and_are_woken(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "odograph.ledger.engine._POLL_INTERVAL", 10 * THREAD_TIMEOUT
    )  # whoever is not woken sleeps too long
    watched: list[tuple[float, int]] = []
    desk = Desk(MemoryStore(), group_size=3, observer=lambda *told: watched.append(told))
    watched.clear()
    asking, keys = Asking(), [f"{number}" for number in range(waiting)]
    began = time.perf_counter()
    with desk.busy(asking):
        desk.ask(asking, *keys)
        time.sleep(0.15)
    outcomes = asking.end()
    elapsed = time.perf_counter() - began
    assert outcomes == dict.fromkeys(["writes", *keys], "charged")
    assert [size for _, size in watched] == [1, *[3] * (waiting // 3), *[waiting % 3] * (waiting % 3 > 0)]
    assert 0.15 < watched[0][0] < elapsed
    assert all(0 < seconds < elapsed for seconds, _ in watched)
    assert max(asking.seconds.values()) < 0.1  # to wait takes no processor
    assert desk.engine.queued == 0


TEN = compile_policy(policy(10))
COSTS: st.SearchStrategy[dict[str, int]] = st.dictionaries(
    st.sampled_from(["top", "left", "right", "other", "closed"]), st.integers(1, 4), min_size=1, max_size=3
)


class AsksAgain(StoreWrapper):
    """A store that always loses the first race."""

    def write(self, wants: Wants, work: Work) -> None:
        def twice(state: State) -> Changes:
            work(deepcopy(state))
            return work(state)

        self.store.write(wants, twice)


@settings(max_examples=25)
@given(st.lists(st.tuples(COSTS, st.integers(0, 5)), min_size=1, max_size=8))
def test_a_group_is_decided_as_its_requests_are_one_at_a_time(asked: list[tuple[dict[str, int], int]]) -> None:
    alone: list[object] = []
    together: list[object] = []
    for found, size in ((alone, 1), (together, len(asked))):
        store = cast("Store", AsksAgain(MemoryStore()))
        backend = LocalBackend(store, PRINCIPAL)
        ledger = Ledger(backend)
        for name, parent in {"top": "", "left": "top", "right": "top", "other": "", "closed": ""}.items():
            ledger.open_account(name, TEN, parent=parent)
        requests = []
        for costs, key in asked:
            asks = backend.price({name: PureDP(units / PER_EPSILON) for name, units in costs.items()})
            requests.append(Charge(backend.author(f"{key}"), "spend", asks))
        ledger.account("closed").close()
        for first in range(0, len(requests), size):
            for outcome in carry_out(store, requests[first : first + size]):
                found.append(
                    [entry.request_id for entry in outcome.own] if isinstance(outcome, Made) else type(outcome)
                )
        found += [account.totals for account in ledger.accounts()]
        assert len(found) == len(requests) + 5
        ledger.verify()
    assert alone == together


def after_call(number: int, act: Callable[[], None]) -> Trace:
    """Trace a thread: act after a call that it makes in the queue's code, or a jump back, by its number.

    There, and nowhere else, Python hears of signals and lets other threads run.
    """
    moments = count()
    last: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, _: object) -> Trace | None:
        code = frame.f_code
        if code.co_filename != engine.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            before, last[frame] = last.get(frame, ""), dis.opname[code.co_code[frame.f_lasti]]
            if before.startswith(("CALL", "JUMP_BACKWARD")) and next(moments) == number:
                sys.settrace(None)
                act()
        return trace

    return trace


def queued(desk: Desk, mine: str, trace: Trace, before: int, after: int) -> dict[str, str]:
    """Let so many wait before and after one that is traced; without any it is alone."""
    asking, others = Asking(), [f"{mine}-{number}" for number in range(before + after)]
    if not others:
        asking.ask(desk.ledger, mine, trace)
        return asking.end()
    with desk.busy(asking, f"{mine}-writes"):
        desk.ask(asking, *others[:before])
        desk.ask(asking, mine, trace=trace)
        desk.ask(asking, *others[before:])
    return asking.end()


@pytest.mark.parametrize(
    ("before", "after", "late"),
    [(0, 0, False), (0, 1, False), (0, 1, True), (0, 2, False), (1, 0, False), (1, 2, False)],
)
def test_a_thread_that_is_interrupted_or_late_at_any_moment_blocks_nobody_and_loses_nothing(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    monkeypatch.setattr("odograph.ledger.engine._POLL_INTERVAL", 0.005)
    disturb_at_every_moment(before, after, late=late)


def disturb_at_every_moment(before: int, after: int, *, late: bool) -> None:
    """Queue up again and again, and interrupt or delay a thread after each of its calls in turn."""
    desk, acted = Desk(MemoryStore(), group_size=2), threading.Event()

    def act() -> None:
        acted.set()
        if not late:
            raise KeyboardInterrupt
        time.sleep(0.004)

    for moment in count():
        acted.clear()
        mine = f"{moment}"
        outcomes = queued(desk, mine, after_call(moment, act), before, after)
        assert len(outcomes) == (before + after + 2 if before or after else 1), moment  # nobody is blocked
        assert desk.engine.queued == 0, moment
        charged = charges(desk.ledger)
        assert all(key in charged for key, outcome in outcomes.items() if outcome == "charged"), moment
        again = Asking()
        for key in outcomes:
            again.ask(desk.ledger, key)
        assert {*again.end().values()} == {"charged"}, moment
        assert outcomes.pop(mine) == ("KeyboardInterrupt" if acted.is_set() and not late else "charged"), moment
        assert {*outcomes.values()} <= ({"charged"} if late else {"charged", "OutcomeUnknown"}), moment
        if not acted.is_set():
            break
    assert moment > 5
    desk.ledger.verify()
    assert all(found == {"a": 1} for found in charges(desk.ledger).values())


class Counting(FairQueue[Any]):
    """Takes one off the count instead of counting afresh."""

    def remove(self, client: str, one: object) -> None:
        counted, waits = self.count, one in self.clients.get(client, ())
        super().remove(client, one)
        self.count = counted - waits


def test_a_queue_that_an_interrupt_leaves_miscounted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odograph.ledger.engine._POLL_INTERVAL", 0.005)
    monkeypatch.setattr("odograph.ledger.engine.FairQueue", Counting)
    monkeypatch.setattr(sys.modules[__name__], "THREAD_TIMEOUT", 1.0)
    with pytest.raises((AssertionError, ValueError)):
        disturb_at_every_moment(0, 1, late=False)


@pytest.mark.parametrize(("waiting", "full"), [(4, True), (100, False)])
def test_a_full_queue_is_busy_and_one_client_cannot_fill_it(path: Path, waiting: int, *, full: bool) -> None:
    store = SqliteStore(path)
    engine_ = LedgerEngine(store, capacity=waiting)
    one = Ledger(LocalBackend(store, PRINCIPAL, engine_))
    other, third = one.acting_as("another"), one.acting_as("a third")
    for ledger in (one, other, third):
        ledger.spend({"a": COST})  # connected, and known by name
    asking = Asking()
    with held(path):
        asking.ask(one, "writes")
        time.sleep(0.1)  # it is inside the transaction, or about to be
        for number, ledger in enumerate([one, one, other, other]):
            asking.ask(ledger, f"waits-{number}")
            wait_until(lambda number=number: engine_.queued == number + 1)  # type: ignore[misc]
            if number == 1:
                asking.ask(one, "half is enough")
                wait_until(lambda: "half is enough" in asking.outcomes or not full)
                if not full:
                    wait_until(lambda: engine_.queued == 3)
                    break
        if full:
            for ledger in (one, other, third):
                with pytest.raises(LedgerBusy, match=r"4 requests are queued.*Try again"):
                    ledger.spend({"a": COST}, key="too many")
    outcomes = asking.end()
    busy = {key for key, outcome in outcomes.items() if outcome == "LedgerBusy"}
    assert busy == ({"half is enough"} if full else set())
    assert {*outcomes.values()} == ({"charged", "LedgerBusy"} if full else {"charged"})
    one.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_nobody_who_wrote_in_the_first(path: Path) -> None:
    desk, asking = Desk(SqliteStore(path)), Asking()
    with desk.busy(asking):
        desk.ask(asking, "waits")
        child = os.fork()
        if not child:
            signal.alarm(10)  # should it be blocked
            desk.store.gate.set()
            charged = Asking()
            charged.ask(desk.ledger, "child")
            os._exit(0 if charged.end() == {"child": "charged"} else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert asking.end() == {"writes": "charged", "waits": "charged"}
    assert charges(desk.ledger) == {key: {"a": 1} for key in ("first", "child", "writes", "waits")}
    desk.ledger.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interrupted program."""
    command = [sys.executable, str(PROGRAMS / "interrupted.py"), *arguments]
    # Who measures coverage holds a lock of its own, and may be interrupted in it.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return subprocess.run(  # noqa: S603  our own code
        command, env=plain, capture_output=True, text=True, timeout=200, check=False
    )


def test_an_interrupted_waiter_takes_its_request_back_and_blocks_nobody(path: Path) -> None:
    done = run(f"sqlite:///{path}", "waiting")
    assert (done.stdout, done.stderr) == ("interrupted, 2 still wait\n", "")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert charges(ledger).keys() == {"first", "0", "1", "2", "last"}


def test_an_interrupt_while_another_program_holds_the_file_leaves_nothing_held(path: Path) -> None:
    done = run(f"sqlite:///{path}", "locked")
    assert (done.stdout, done.stderr) == ("interrupted\nnobody holds it\n", "")
    with ledger_at(f"sqlite:///{path}") as ledger:
        ledger.verify()
        assert charges(ledger).keys() >= {"first", "last"}


@pytest.mark.parametrize("threads", ["0", "3"])
def test_interrupts_at_any_moment_leave_the_ledger_usable(path: Path, threads: str) -> None:
    # Not for PostgreSQL: psycopg itself may wait for ever when it is interrupted in the middle of a pipeline.
    url = f"sqlite:///{path}"
    done = run(url, "anywhere", threads, "2000" if FULL else "300")
    assert done.returncode == 0, done.stderr[-3000:]
    acknowledged = {*done.stdout.split()}
    with ledger_at(url) as ledger:
        ledger.verify()
        found = charges(ledger)
        assert acknowledged <= found.keys()
        assert all(count.total() == 1 for count in found.values())


class Dies(StoreWrapper):
    """A store in which the thread that writes is ended, once, before or after the transaction."""

    def __init__(self, store: Store, *, after: bool) -> None:
        super().__init__(store)
        self.armed = False
        self._after = after

    def write(self, wants: Wants, work: Work) -> None:
        if not self.armed:
            return self.store.write(wants, work)
        self.armed = False
        time.sleep(0.1)
        if self._after:
            self.store.write(wants, work)
        raise SystemExit


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_writer_that_dies_blocks_nobody_and_its_outcome_can_be_asked_for(
    path: Path, *, after: bool, alone: bool
) -> None:
    store = Dies(SqliteStore(path), after=after)
    engine_ = LedgerEngine(cast("Store", store))
    ledger = Ledger(LocalBackend(cast("Store", store), PRINCIPAL, engine_))
    ledger.spend({"a": COST}, key="first")
    asking = Asking()
    if alone:
        store.armed = True
        asking.ask(ledger, "0")
        wait_until(lambda: not store.armed)
    else:
        with held(path):
            asking.ask(ledger, "writes")
            time.sleep(0.1)  # it is inside the transaction, or about to be
            time.sleep(0.05)
            store.armed = True
            for number in range(4):
                asking.ask(ledger, f"{number}")
            wait_until(lambda: engine_.queued == 4)
    if alone:
        for number in range(1, 4):
            asking.ask(ledger, f"{number}")
    outcomes = asking.end()
    dead = [key for key, outcome in outcomes.items() if outcome == "SystemExit"]
    assert len(dead) == 1
    told = {key for key, outcome in outcomes.items() if outcome == "OutcomeUnknown"}
    assert len(told) == (0 if alone else 3)
    assert len(outcomes) == (4 if alone else 5)  # nobody is blocked
    for key in {*dead, *told}:
        assert ledger.spend({"a": COST}, key=key).repeated == after
    ledger.verify()
    assert {"first", "0", "1", "2", "3"} <= charges(ledger).keys()
    ledger.close()
