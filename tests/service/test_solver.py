"""Exact policies are solved in a bounded process: the service goes on meanwhile, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from odograph import Policy, compile_policy
from odograph.core.filters import Exact
from odograph.core.mechanisms import MenuItem
from odograph.errors import InvalidPolicy, LedgerBusy
from odograph.service import solver as solver_module
from odograph.service.solver import Solver

T = TypeVar("T")

SLOW_POLICY = Policy(0.1, 0.01)  # about 40 seconds
MIDDLE = 1.07, 1e-6  # with Gaussians alone, about a second


def cheap(number: int) -> Policy:
    """A target that is not in the table, and is solved in milliseconds."""
    return Policy(900 + number, 1e-6)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Run a coroutine on the service's event loop; where processes end, Python's own is tried too."""
    factory = None if getattr(request, "param", "uvloop") == "asyncio" else uvloop.new_event_loop

    def run_it(coroutine: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(asyncio.wait_for(coroutine, 60))

    return run_it


on_either_loop = pytest.mark.parametrize("run", ["asyncio", "uvloop"], indirect=True)


@pytest.fixture(autouse=True)
def _nothing_solved_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ODOGRAPH_CACHE", str(tmp_path))


def children() -> set[int]:
    """The solving processes of this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(os.getpid()) and b"odograph.service.solver" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except (OSError, IndexError, ValueError):  # not a process, or gone
            continue
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  another process sets no event
            await asyncio.sleep(0.01)


async def started(solver: Solver) -> int:
    """Wait until a process solves, and return it."""
    await until(lambda: solver.running is not None)
    return solver.running or 0


async def longest_delay(work: Coroutine[Any, Any, object]) -> float:
    """Return the longest time for which the event loop did nothing else while the work was done."""
    task = asyncio.ensure_future(work)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    await task
    return longest


async def in_the_loop(policy: Policy) -> None:
    """A broken twin of `Solver.compile`."""
    compile_policy(policy)


def test_what_is_solved_elsewhere_is_what_would_be_solved_here(run: Callable[..., Any]) -> None:
    for policy in (
        cheap(1),
        Policy(900, 1e-6, filter={"exact": 0.9, "zcdp": 0.1}, slack=0.5, privacy_unit="household"),
    ):
        compiled = run(Solver().compile(policy))
        assert compiled.policy == policy
        assert compiled.note == "budget solved for this policy"
        assert compiled.meters == compile_policy(policy).meters
    assert children() == set()


def test_what_is_at_hand_needs_no_process(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_policy(cheap(2))  # on this machine before
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for policy in (Policy(1, 1e-6), Policy(1.07, 1e-6, filter="zcdp"), Policy(1, 0, filter="basic"), cheap(2)):
        assert run(Solver().compile(policy)) == compile_policy(policy)
    with pytest.raises(LedgerBusy, match="solver process could not be started"):
        run(Solver().compile(cheap(3)))  # control: anything else does


def test_the_event_loop_goes_on_while_a_policy_is_solved(run: Callable[..., Any]) -> None:
    began = time.monotonic()
    pause = run(longest_delay(Solver().compile(Policy(*MIDDLE, filter=Exact(takes=("gaussian",))))))
    assert pause < 0.3 < time.monotonic() - began
    # Control: solving in the loop stops everything else.
    assert run(longest_delay(in_the_loop(Policy(1.08, 1e-6, filter=Exact(takes=("gaussian",)))))) > 0.3


def test_one_policy_is_solved_at_a_time_and_a_few_wait(run: Callable[..., Any]) -> None:
    async def crowd() -> None:
        solver = Solver(max_queued=2)
        tasks = [asyncio.create_task(solver.compile(cheap(number))) for number in (10, 11, 12)]
        await started(solver)
        with pytest.raises(LedgerBusy, match="2 more are queued"):
            await solver.compile(cheap(13))
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(children()))
            await asyncio.sleep(0.02)
        assert most == 1
        assert [task.result().note for task in tasks] == ["budget solved for this policy"] * 3
        await solver.compile(cheap(13))  # there is room again

    run(crowd())


def test_the_same_policy_is_solved_once_for_all_who_ask(run: Callable[..., Any]) -> None:
    async def twice() -> list[str]:
        solver = Solver()
        return [compiled.note for compiled in await asyncio.gather(*[solver.compile(cheap(20)) for _ in range(2)])]

    assert run(twice()) == ["budget solved for this policy", "budget solved on this machine before"]


def test_requests_go_first(run: Callable[..., Any]) -> None:
    async def priority() -> int:
        solver = Solver()
        task = asyncio.create_task(solver.compile(SLOW_POLICY))
        process = await started(solver)
        await until(lambda: os.getpriority(os.PRIO_PROCESS, process) >= 10)
        found = os.getpriority(os.PRIO_PROCESS, process)
        task.cancel()
        await asyncio.wait([task])
        return found

    assert run(priority()) == os.getpriority(os.PRIO_PROCESS, 0) + 10


@on_either_loop
def test_a_solve_that_takes_too_long_is_stopped(run: Callable[..., Any]) -> None:
    with pytest.raises(LedgerBusy, match=r"was not solved in 1\.5 seconds; try again"):
        run(Solver(timeout=1.5).compile(SLOW_POLICY))
    assert children() == set()


def test_a_solve_that_takes_too_much_processor_time_is_stopped(run: Callable[..., Any]) -> None:
    with pytest.raises(InvalidPolicy, match="more than 2 seconds to solve; choose a target of the shipped table"):
        run(Solver(seconds=2).compile(SLOW_POLICY))
    assert children() == set()


def test_a_solve_that_takes_too_much_memory_is_stopped(run: Callable[..., Any]) -> None:
    with pytest.raises(InvalidPolicy, match="more than 64 MiB to solve"):
        run(Solver(memory=64 << 20).compile(SLOW_POLICY))
    assert children() == set()


@on_either_loop
def test_a_killed_process_is_not_the_policys_fault(run: Callable[..., Any]) -> None:
    async def killed() -> None:
        solver = Solver()
        task = asyncio.create_task(solver.compile(SLOW_POLICY))
        os.kill(await started(solver), signal.SIGKILL)
        with pytest.raises(LedgerBusy, match="was stopped; try again"):
            await task
        await solver.compile(cheap(30))  # the next one is solved

    run(killed())


@on_either_loop
def test_nobody_solves_for_one_who_has_gone(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled() -> set[int]:
        solver = Solver()
        task = asyncio.create_task(solver.compile(SLOW_POLICY))
        await started(solver)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert solver.running is None
        return children()

    assert run(cancelled()) == set()

    # Control: a twin that does not end its process is seen to leave it behind.
    left: list[asyncio.subprocess.Process] = []

    async def leave(process: asyncio.subprocess.Process) -> None:
        left.append(process)

    async def seen() -> int:
        found = await cancelled()
        left[0].kill()
        await left[0].wait()
        return len(found)

    monkeypatch.setattr(solver_module, "_kill", leave)
    assert run(seen()) == 1


@on_either_loop
def test_one_who_goes_at_any_moment_leaves_nothing_behind(run: Callable[..., Any]) -> None:
    async def cancelled(after: float) -> None:
        solver = Solver()
        task = asyncio.create_task(solver.compile(SLOW_POLICY))
        await asyncio.sleep(after)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: children() == set())
        await solver.compile(cheap(40))

    for after in (0, 0.001, 0.002, 0.005, 0.01, 0.1):
        run(cancelled(after))


@on_either_loop
def test_the_end_of_the_service_stops_what_runs_and_what_waits(run: Callable[..., Any]) -> None:
    async def shut(after: float) -> None:
        solver = Solver()
        tasks = [asyncio.create_task(solver.compile(policy)) for policy in (SLOW_POLICY, cheap(50))]
        await asyncio.sleep(after)
        began = time.monotonic()
        await solver.close()
        for task in tasks:
            with pytest.raises(LedgerBusy, match=r"was stopped|is shutting down"):
                await task
        assert time.monotonic() - began < 2
        assert children() == set()
        await solver.compile(Policy(1, 1e-6))  # what needs no process is still answered
        await solver.close()

    for after in (0, 0.001, 0.002, 0.005, 0.5):
        run(shut(after))


def test_a_refusal_says_what_the_library_says_and_nothing_of_the_process(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Policy(1, 1e-6, filter=Exact(menu=[MenuItem("training", 1, digest="0" * 64)]))
    with pytest.raises(InvalidPolicy) as here:
        compile_policy(bare)
    with pytest.raises(InvalidPolicy) as there:
        run(Solver().compile(bare))
    assert str(there.value) == str(here.value)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InvalidPolicy, match=r"^the exact budget could not be solved; choose a target"):
        run(Solver().compile(cheap(60)))
