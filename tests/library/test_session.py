"""Sessions: charge first, run second, and nothing that no theorem covers."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import inspect
import os
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from itertools import count
from types import FrameType
from typing import Any

import pytest
from charge_history import charges

import odograph as odo
from odograph import Accountant, BudgetExceeded, Guarantee, Policy, PureDP, UnprovenComposition, private, session
from odograph.errors import AccountClosed, InvalidArgument, InvalidGuarantee, type_text

TENTH = PureDP(0.1)
SOURCE = str(sys.modules[odo.Session.__module__].__file__)


def opened(epsilon: float = 1) -> Accountant:
    return Accountant(Policy(epsilon, 0, filter="basic"), name="top")


def spent(account: Accountant) -> Fraction:
    return Fraction(account.totals.amounts[1], 10**15)


def double(value: int) -> int:
    return 2 * value


def never(*_: object, **__: object) -> None:
    pytest.fail("the mechanism ran")


# Reserve, run, commit.


def test_a_run_passes_arguments_on_and_charges() -> None:
    account = opened()
    with session(account) as s:
        assert s.run(lambda *a, **k: (a, k), 1, 2, cost=TENTH, note="one", width=3) == ((1, 2), {"width": 3})
        assert s.run(double, 4, cost=PureDP(0.2)) == 8
    assert spent(account) == Fraction(3, 10)
    assert [entry.cost for entry in charges(account)] == [TENTH, PureDP(0.2)]
    assert charges(account)[0].note == "one"


def test_the_charge_is_made_before_the_mechanism_sees_the_data() -> None:
    account = opened()
    with session(account) as s:
        assert s.run(lambda: spent(account), cost=TENTH) == Fraction(1, 10)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, StopIteration, BudgetExceeded])
def test_the_charge_stands_if_the_mechanism_raises(error: type[BaseException]) -> None:
    account = opened()
    problem = error(account.decide(TENTH)) if error is BudgetExceeded else error()

    def mechanism() -> None:
        raise problem

    with session(account) as s:
        with pytest.raises(error) as caught:
            s.run(mechanism, cost=TENTH)
        assert caught.value is problem
        assert s.run(double, 1, cost=TENTH) == 2  # the session goes on
    assert spent(account) == Fraction(2, 10)


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt, StopIteration])
def test_an_exception_says_what_stays_charged(error: type[BaseException]) -> None:
    def count(rows: list[str]) -> None:
        raise error(len(rows))

    account = opened()
    with session(account) as s:
        s.run(double, 1, cost=TENTH)
        with pytest.raises(error) as caught:
            s.run(count, ["private"], cost=PureDP(0.2))
    (note,) = caught.value.__notes__
    assert "PureDP(0.2) was charged to 'top' (entry top#3) before count raised, and stays charged" in note
    assert "run it again: that is charged again" in note
    assert "private" not in note
    assert spent(account) == Fraction(3, 10)


def test_an_exception_names_the_entry_and_key_of_a_ledger() -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("ward", Policy(1, 0, filter="basic"), key="open")
        with session(account) as s, pytest.raises(ZeroDivisionError) as caught:
            s.run(lambda: 1 / 0, cost=TENTH, note="slip")
        (note,) = caught.value.__notes__
        reserved = next(past for past in account.history() if past.note == "slip")
        assert f"charged to 'ward' (entry {reserved.entry.id}, key {reserved.entry.key}) before" in note
        assert account.pending == ()  # committed: it cannot be taken back


def test_what_is_refused_has_no_note_of_a_charge() -> None:
    account = opened(0.1)
    with session(account) as s:
        for cost, error in ((PureDP(0.2), BudgetExceeded), (odo.ZCDP(0.01), UnprovenComposition)):
            with pytest.raises(error) as caught:
                s.run(never, cost=cost)
            assert not hasattr(caught.value, "__notes__")


def test_a_refused_request_never_runs_the_mechanism() -> None:
    account = opened(0.3)
    with session(account) as s:
        s.run(double, 1, cost=PureDP(0.25))
        with pytest.raises(BudgetExceeded) as caught:
            s.run(never, cost=TENTH)
        assert caught.value.decision.left["epsilon"] == 0.05
        with pytest.raises(UnprovenComposition):
            s.run(never, cost=odo.ZCDP(0.01))
        s.run(double, 1, cost=PureDP(0.05))
    assert spent(account) == Fraction(3, 10)


def run_first(account: Accountant, mechanism: Callable[[], object], cost: Guarantee) -> object:
    """A broken twin: it runs, then charges."""
    answer = mechanism()
    account.spend(cost)
    return answer


def test_a_session_that_runs_first_is_caught() -> None:
    """Negative control: the same two looks, at the order and at a mechanism that raises."""
    account = opened()
    assert run_first(account, lambda: spent(account), TENTH) == 0
    with pytest.raises(ZeroDivisionError):
        run_first(account, lambda: 1 / 0, TENTH)
    assert spent(account) == Fraction(1, 10)


@pytest.mark.parametrize("cost", [0.1, "x", PureDP, [TENTH], object()], ids=lambda cost: type(cost).__name__)
def test_a_cost_that_is_no_guarantee_runs_nothing(cost: Guarantee) -> None:
    account = opened()
    with session(account) as s, pytest.raises((InvalidGuarantee, TypeError)):
        s.run(never, cost=cost)
    assert account.totals.steps == 0


def test_a_mechanism_without_a_cost_runs_nothing_and_the_error_says_what_to_do() -> None:
    account = opened()
    with session(account) as s, pytest.raises(InvalidGuarantee, match="cost="):
        s.run(never)
    assert account.totals.steps == 0


def test_errors_do_not_repeat_the_data() -> None:
    """What is raised before a charge goes to the analyst, and to logs."""
    number = "4111-1111"

    class Record:
        def __repr__(self) -> str:
            return number

    class Answers:
        def __repr__(self) -> str:
            return number

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

    account = opened(0.3)
    bound = functools.partial(never, Record())
    attempts: list[Callable[[odo.Session], object]] = [
        lambda s: s.run(bound),
        lambda s: s.run(bound, cost=PureDP(5)),
        lambda s: s.run(never, Record(), cost=PureDP(5)),
        lambda s: s.run(never, Record(), cost=odo.ZCDP(0.1)),
        lambda s: s.run(never, Record()),
        lambda s: s.run(lambda _: Answers(), Record(), cost=TENTH),
        lambda s: s.run(lambda record: s.run(double, record, cost=TENTH), Record(), cost=TENTH),
        lambda _: private(cost=PureDP(5))(never)(Record()),
    ]
    with session(account) as s:
        for attempt in attempts:
            with pytest.raises(odo.OdographError) as caught:
                attempt(s)
            assert number not in str(caught.value)
    assert number not in str(account.to_dict())


@pytest.mark.parametrize("mechanism", ["len", None, [4111]], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("cost", [TENTH, lambda: TENTH, None], ids=["a guarantee", "a function", "none"])
def test_a_mechanism_that_cannot_be_called_is_not_charged(
    mechanism: Any,  # noqa: ANN401  anything
    cost: Guarantee | Callable[[], Guarantee] | None,
) -> None:
    account = opened()
    says = rf"mechanism must be callable, .* \(got {type_text(mechanism)}\); nothing was charged"
    with session(account) as s:
        with pytest.raises(InvalidGuarantee, match=says) as caught:
            s.run(mechanism, [1], cost=cost)
        with pytest.raises(InvalidGuarantee, match=says):
            s.run(private(TENTH)(mechanism), [1])
    assert "4111" not in str(caught.value)
    assert account.totals.steps == 0


def test_arguments_that_a_mechanism_does_not_take_are_not_charged() -> None:
    account = opened()
    declared = private(TENTH)(double)
    by_setting = private(lambda: TENTH)(double)
    attempts: list[Callable[[odo.Session], object]] = [
        lambda s: s.run(double, cost=TENTH),
        lambda s: s.run(double, 1, "4111", cost=TENTH),
        lambda s: s.run(double, 1, value="4111", cost=TENTH),
        lambda s: s.run(double, 1, times="4111", cost=lambda: TENTH),
        lambda s: s.run(functools.partial(double, 4111), 1, cost=TENTH),
        lambda s: s.run(declared),
        lambda _: declared(1, 2),  # type: ignore[call-arg]
        lambda _: by_setting(),  # type: ignore[call-arg]
    ]
    with session(account) as s:
        for attempt in attempts:
            with pytest.raises(
                InvalidGuarantee, match=r"does not take these arguments \(.*; nothing was charged"
            ) as caught:
                attempt(s)
            assert "4111" not in str(caught.value)
        assert account.totals.steps == 0
        assert s.run(double, 4, cost=TENTH) == 8


def test_a_wrapper_that_adds_an_argument_is_called_with_its_own() -> None:
    def scaled(value: int, scale: int) -> int:
        return value * scale

    @functools.wraps(scaled)
    def by_three(value: int) -> int:
        return scaled(value, 3)

    account = opened()
    with session(account) as s:
        assert s.run(by_three, 2, cost=TENTH) == 6
    assert account.totals.steps == 1


# Open and closed.


@pytest.mark.parametrize(
    "thing", [None, Policy(1, 0, filter="basic"), "census", [4111]], ids=lambda value: type(value).__name__
)
def test_a_session_of_what_is_no_account_is_refused_at_once(thing: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises(odo.errors.InvalidArgument, match=r"needs an account, such as Accountant\(policy\)") as caught:
        session(thing)
    assert str(caught.value).endswith(f"(got {type_text(thing)})")


def test_a_session_runs_only_while_it_is_open() -> None:
    account = opened()
    s = session(account)
    with pytest.raises(AccountClosed):
        s.run(never, cost=TENTH)
    with s:
        s.run(double, 1, cost=TENTH)
    with pytest.raises(AccountClosed):
        s.run(never, cost=TENTH)
    assert spent(account) == Fraction(1, 10)


def test_the_next_session_goes_on_where_the_last_one_ended() -> None:
    account = opened(0.3)
    with session(account) as s:
        s.run(double, 1, cost=TENTH)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), session(account) as s:  # noqa: PT012  a block that fails after a run
            s.run(double, 1, cost=TENTH)
            raise error
    with session(account) as s, pytest.raises(BudgetExceeded):
        s.run(never, cost=TENTH)
    assert spent(account) == Fraction(3, 10)


def test_a_read_only_account_runs_nothing() -> None:
    twin = pickle.loads(pickle.dumps(opened()))  # noqa: S301  our own bytes
    with pytest.raises(AccountClosed), session(twin) as s:
        s.run(never, cost=TENTH)
    twin.resume()
    with session(twin) as s:
        s.run(double, 1, cost=TENTH)


def test_a_sub_budget_s_session_charges_its_ancestors() -> None:
    account = opened(0.15)
    child = Accountant(Policy(1, 0, filter="basic"), name="ana", parent=account)
    with session(child) as s:
        s.run(double, 1, cost=TENTH)
        with pytest.raises(BudgetExceeded) as caught:
            s.run(never, cost=TENTH)
    assert caught.value.decision.account == "top"
    assert spent(account) == spent(child) == Fraction(1, 10)


# Nothing that no theorem covers.


def tree() -> dict[str, Accountant]:
    top = opened()
    ana = Accountant(top.policy, name="ana", parent=top)
    ben = Accountant(top.policy, name="ben", parent=top)
    return {"top": top, "ana": ana, "ben": ben, "eve": Accountant(top.policy, name="eve", parent=ana)}


@pytest.mark.parametrize("outer", ["top", "ana", "eve"])
@pytest.mark.parametrize("inner", ["top", "ana", "ben", "eve"])
def test_sessions_of_one_tree_may_be_open_inside_each_other(outer: str, inner: str) -> None:
    """Each run is charged where its own session is, and above; the innermost pays for what is marked private."""
    accounts, marked = tree(), private(cost=PureDP(0.2))(double)
    with session(accounts[outer]) as s:
        with session(accounts[inner]) as t:
            assert s.run(double, 1, cost=TENTH) == t.run(double, 1, cost=TENTH) == 2
            marked(1)
        assert s.run(double, 1, cost=TENTH) == 2  # the outer one is still open
        with pytest.raises(AccountClosed):
            t.run(never, cost=TENTH)
    above = {"top": {"top"}, "ana": {"top", "ana"}, "ben": {"top", "ben"}, "eve": {"top", "ana", "eve"}}
    for name, account in accounts.items():
        expected = Fraction(2, 10) * (name in above[outer]) + Fraction(3, 10) * (name in above[inner])
        assert spent(account) == expected


def test_an_open_session_is_not_opened_again() -> None:
    with session(opened()) as s, pytest.raises(InvalidArgument, match="open already"):
        s.__enter__()


def test_a_session_of_another_account_may_be_open_too() -> None:
    one, other = opened(), opened()
    with session(one) as s, session(other) as t:
        s.run(double, 1, cost=TENTH)
        t.run(double, 1, cost=PureDP(0.2))
    assert (spent(one), spent(other)) == (Fraction(1, 10), Fraction(2, 10))


def nested(s: odo.Session, account: Accountant) -> dict[str, Callable[[], object]]:
    """Ways for a mechanism to run another one."""
    inner = private(cost=TENTH)(never)

    def in_a_copied_context() -> object:
        with ThreadPoolExecutor(1) as pool:
            context = contextvars.copy_context()
            return pool.submit(context.run, functools.partial(s.run, never, cost=TENTH)).result()

    def in_a_session() -> None:
        with session(account) as t:
            t.run(never, cost=TENTH)

    return {
        "run": lambda: s.run(never, cost=TENTH),
        "private": lambda: inner(1),
        "run private": lambda: s.run(inner),
        "session": in_a_session,
        "copied context": in_a_copied_context,
    }


@pytest.mark.parametrize("way", ["run", "private", "run private", "session", "copied context"])
def test_a_run_inside_a_running_mechanism_is_not_proven(way: str) -> None:
    account = opened()
    with session(account) as s:
        with pytest.raises(UnprovenComposition):
            s.run(nested(s, account)[way], cost=TENTH)
        assert spent(account) == Fraction(1, 10)  # the outer charge stands, the inner one was never made
        s.run(double, 1, cost=TENTH)


def pieces() -> Iterator[int]:
    yield pytest.fail("the mechanism ran")


async def later() -> int:
    return pytest.fail("the mechanism ran")


async def later_pieces() -> AsyncIterator[int]:
    yield pytest.fail("the mechanism ran")


INTERACTIVE: dict[str, Callable[[], object]] = {
    "generator function": pieces,
    "coroutine function": later,
    "async generator function": later_pieces,
    "partial of a generator function": functools.partial(pieces),
    "generator": lambda: pieces(),  # noqa: PLW0108  its kind cannot be seen before it is called
    "coroutine": lambda: later(),  # noqa: PLW0108  as above
    "async generator": lambda: later_pieces(),  # noqa: PLW0108  as above
    "list iterator": lambda: iter([1]),
    "map": lambda: map(double, [1]),
    "zip": lambda: zip([1], [2], strict=True),
    "enumerate": lambda: enumerate([1]),
    "generator in a list": lambda: [pieces()],
    "iterator in a tuple": lambda: (1, iter([1])),
    "iterator in a dict": lambda: {"a": iter([1])},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", INTERACTIVE)
def test_a_mechanism_that_answers_later_is_not_proven(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    account = opened()
    with session(account) as s:
        with pytest.raises(UnprovenComposition) as caught:
            s.run(INTERACTIVE[kind], cost=TENTH)
        # What is seen before the call costs nothing, what is seen in the answer was charged; the message says which.
        assert ("nothing was charged" in str(caught.value)) == (account.totals.steps == 0)
        del caught
        gc.collect()
        s.run(double, 1, cost=TENTH)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("answer", [[1, 2], (1,), {"a": 1}, "text", b"x", range(3), {1}, None, 0.5, {"a": [1, (2,)]}])
def test_a_finished_answer_is_returned_as_it_is(answer: object) -> None:
    with session(opened()) as s:
        assert s.run(lambda: answer, cost=TENTH) is answer


def test_array_answers_are_finished() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    with session(opened()) as s:
        for answer in (numpy.zeros((2, 2)), numpy.float64(1), pandas.Series([1]), pandas.DataFrame({"a": [1]})):
            assert s.run({0: answer}.get, 0, cost=TENTH) is answer


# Threads.


def test_one_shot_mechanisms_may_overlap_in_threads_and_count_in_the_order_of_admission() -> None:
    account = opened()
    together = threading.Barrier(4, timeout=20)

    def mechanism(i: int) -> int:
        together.wait()  # passes only if four run at once
        return i

    with session(account) as s, ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(s.run, mechanism, i, cost=PureDP(0.01 * (i + 1)), note=str(i)) for i in range(4)]
        assert [job.result() for job in jobs] == [0, 1, 2, 3]
    assert spent(account) == Fraction(10, 100)
    assert sorted(entry.note for entry in charges(account)) == ["0", "1", "2", "3"]


def test_threads_of_a_session_never_pass_the_limit_and_run_only_what_was_charged() -> None:
    account = opened(0.5)
    ran: list[int] = []
    with session(account) as s, ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(s.run, ran.append, i, cost=PureDP(0.01)) for i in range(80)]
        refused = sum(isinstance(job.exception(), BudgetExceeded) for job in jobs)
    assert len(ran) == account.totals.steps == 50
    assert refused == 30


def test_mechanisms_overlap_in_tasks_too() -> None:
    account = opened()
    together = threading.Barrier(2, timeout=20)

    async def both() -> list[int]:
        with session(account) as s:
            runs = [asyncio.to_thread(s.run, lambda: together.wait() >= 0 and 7, cost=TENTH) for _ in range(2)]
            return [int(answer) for answer in await asyncio.gather(*runs)]

    assert asyncio.run(both()) == [7, 7]
    assert spent(account) == Fraction(2, 10)


@private(cost=TENTH)
def one_tenth() -> int:
    return 1


class OneForAll:
    """Open sessions as a global variable would keep them: for all threads and tasks together."""

    def __init__(self) -> None:
        self.value: tuple[odo.Session, ...] = ()

    def get(self) -> tuple[odo.Session, ...]:
        return self.value

    def set(self, value: tuple[odo.Session, ...]) -> None:
        self.value = value


async def interleave(accounts: list[Accountant]) -> None:
    """Open a session per task, all at the same time, and call a private function in each."""
    together = asyncio.Barrier(len(accounts))

    async def task(account: Accountant) -> None:
        with session(account):
            await together.wait()
            one_tenth()
            await asyncio.to_thread(one_tenth)  # it keeps the context
            await asyncio.create_task(asyncio.to_thread(one_tenth))
            await together.wait()

    await asyncio.gather(*map(task, accounts))


def overlap(accounts: list[Accountant]) -> None:
    """Open a session per thread, all at the same time, and call a private function in each."""
    together = threading.Barrier(len(accounts), timeout=20)

    def thread(account: Accountant) -> None:
        with session(account):
            together.wait()
            for _ in range(3):
                one_tenth()
            together.wait()

    with ThreadPoolExecutor(len(accounts)) as pool:
        list(pool.map(thread, accounts))


@pytest.mark.parametrize("at_once", [lambda accounts: asyncio.run(interleave(accounts)), overlap])
def test_each_task_and_each_thread_has_its_own_open_session(
    at_once: Callable[[list[Accountant]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [opened() for _ in range(3)]
    at_once(accounts)
    assert [spent(account) for account in accounts] == [Fraction(3, 10)] * 3
    # Negative control: one variable for all charges the last account that was opened for all of them.
    monkeypatch.setattr(sys.modules[odo.Session.__module__], "_OPEN", OneForAll())
    mixed = [opened() for _ in range(3)]
    at_once(mixed)
    assert sorted(spent(account) for account in mixed) == [0, 0, Fraction(9, 10)]


def test_a_task_has_the_sessions_that_were_open_when_it_was_made() -> None:
    outer, inner = opened(), opened()

    async def nested() -> None:
        release = asyncio.Event()

        async def later() -> int:
            await release.wait()
            return one_tenth()

        with session(outer):
            with session(inner):
                early = asyncio.create_task(asyncio.to_thread(one_tenth))
                late = asyncio.create_task(later())
                assert await early == 1
            release.set()
            with pytest.raises(AccountClosed, match="not open"):  # its session is over, and the outer one is not its
                await late
            one_tenth()

    asyncio.run(nested())
    assert (spent(outer), spent(inner)) == (Fraction(1, 10), Fraction(1, 10))


def test_a_new_thread_begins_without_a_session_and_says_what_to_use() -> None:
    account = opened()

    async def in_executors() -> None:
        loop = asyncio.get_running_loop()
        with session(account) as s, ThreadPoolExecutor(1) as pool:
            for attempt in (loop.run_in_executor(None, one_tenth), loop.run_in_executor(pool, one_tenth)):
                with pytest.raises(UnprovenComposition, match=r"A new thread begins without one: use s\.run"):
                    await attempt
            assert account.totals.steps == 0
            assert await loop.run_in_executor(pool, s.run, one_tenth) == 1
            inside = contextvars.copy_context()
            assert await loop.run_in_executor(pool, inside.run, one_tenth) == 1

    asyncio.run(in_executors())
    assert spent(account) == Fraction(2, 10)


def test_a_session_is_not_opened_with_async_with() -> None:
    async def attempt() -> None:
        with pytest.raises(InvalidArgument, match=r"also in a coroutine.*await asyncio\.to_thread\(s\.run"):
            async with session(opened()):
                pytest.fail("it was opened")

    asyncio.run(attempt())


# Declared costs.


@private(cost=TENTH)
def noisy_count(data: list[int]) -> int:
    """Count, with noise."""
    return len(data)


@private(cost=lambda *, epsilon: PureDP(epsilon))
def noisy_sum(data: list[int], *, epsilon: float) -> float:
    return sum(data) + 0 * epsilon


def test_calling_a_private_mechanism_charges_the_open_session_once() -> None:
    account = opened()
    with session(account) as s:
        assert noisy_count([1, 2]) == 2
        assert s.run(noisy_count, [1]) == 1
        assert spent(account) == Fraction(2, 10)
        assert noisy_sum([1, 2], epsilon=0.3) == 3
        assert s.run(noisy_sum, [1], epsilon=0.25) == 1
    assert spent(account) == Fraction(75, 100)
    assert [entry.cost for entry in charges(account)] == [TENTH, TENTH, PureDP(0.3), PureDP(0.25)]


def test_a_private_mechanism_keeps_its_name() -> None:
    assert getattr(noisy_count, "__name__", None) == "noisy_count"
    assert noisy_count.__doc__ == "Count, with noise."
    assert list(inspect.signature(noisy_count).parameters) == ["data"]


def test_private_without_a_cost_is_an_error() -> None:
    decorate: Callable[[Any], Any] = private
    with pytest.raises(InvalidGuarantee, match=r"write @odo.private\(cost=odo.PureDP\(0.1\)\) \(got the function"):

        @decorate
        def count(rows: list[int]) -> int:
            return len(rows)

    with pytest.raises(InvalidGuarantee, match=r"got the function mean"):

        class Reports:
            @decorate
            @functools.cache  # noqa: B019  never called
            def mean(self) -> float:
                return 0.5

    with pytest.raises(InvalidGuarantee, match=r"got a list in place of a mechanism"):
        decorate(len)([1])  # a decorated function that does not tell where it is from


def test_a_named_function_may_be_a_cost() -> None:
    def by_setting(epsilon: float) -> PureDP:
        return PureDP(epsilon)

    def count(rows: list[int], *, epsilon: float) -> int:
        return len(rows) if epsilon else 0

    account = opened()
    with session(account):
        assert private(by_setting)(count)([1, 2], epsilon=0.1) == 2
        assert private(cost=functools.cache(by_setting))(count)([1], epsilon=0.2) == 1
    assert [entry.cost for entry in charges(account)] == [TENTH, PureDP(0.2)]


def test_a_cost_may_be_typed_before_it_is_used() -> None:
    """In Python's own shell every statement is from the same file and begins at line 1."""
    shell = {"private": private, "PureDP": PureDP}
    exec("def by_setting(epsilon):\n    return PureDP(epsilon)", shell)  # noqa: S102
    exec("@private(by_setting)\ndef count(rows, *, epsilon):\n    return len(rows)", shell)  # noqa: S102
    with pytest.raises(InvalidGuarantee, match=r"got the function mean"):
        exec("@private\ndef mean(rows):\n    return 0", shell)  # noqa: S102


def test_without_a_session_a_private_mechanism_does_not_run() -> None:
    mechanism = private(cost=TENTH)(never)
    with pytest.raises(odo.OdographError, match="session"):
        mechanism([1])
    with session(opened()):
        pass
    with pytest.raises(odo.OdographError, match="session"):
        mechanism([1])


def test_of_two_open_sessions_the_inner_one_pays() -> None:
    one, other = opened(), opened()
    with session(one):
        with session(other):
            noisy_count([1])
        noisy_count([1])
        noisy_count([1])
    assert (spent(one), spent(other)) == (Fraction(2, 10), Fraction(1, 10))


def test_a_cost_that_cannot_be_told_runs_nothing() -> None:
    account = opened()
    mechanism = private(cost=lambda *, epsilon: PureDP(epsilon))(never)
    wrong: list[Callable[[], object]] = [
        lambda: mechanism([1]),
        lambda: mechanism([1], epsilom=0.1),
        lambda: mechanism([1], epsilon=float("nan")),
        lambda: mechanism([1], epsilon=-1),
        private(cost=lambda: 0.1)(never),  # type: ignore[arg-type, return-value]
        private(cost=lambda: None)(never),  # type: ignore[arg-type, return-value]
        lambda: private(cost=lambda *, sigma: odo.gaussian(sigma))(never)([1], sigma=0),
    ]
    with session(account):
        for attempt in wrong:
            with pytest.raises((TypeError, odo.OdographError)):
                attempt()
    assert account.totals.steps == 0
    with pytest.raises(InvalidGuarantee):
        private(cost=0.1)(never)  # type: ignore[arg-type]


def test_a_declared_cost_cannot_be_talked_down() -> None:
    account = opened()
    with session(account) as s:
        try:
            s.run(noisy_count, [1], cost=PureDP(0.001))
        except odo.OdographError:
            assert account.totals.steps == 0
        else:
            assert spent(account) >= Fraction(1, 10)


def test_a_cost_is_told_what_the_mechanism_runs_with_however_it_was_passed() -> None:
    """A cost that has a default of its own must not be charged for a setting that was passed by position."""

    @private(cost=lambda epsilon=0.01: PureDP(epsilon))
    def mechanism(data: list[int], epsilon: float = 0.3) -> float:  # noqa: ARG001  only its cost matters
        return epsilon

    calls: list[Callable[[], float]] = [
        lambda: mechanism([1]),
        lambda: mechanism([1], 0.5),
        lambda: mechanism([1], epsilon=0.5),
        lambda: mechanism(data=[1], epsilon=0.5),
    ]
    for call in calls:
        account = opened()
        with session(account):
            answer = call()
        assert spent(account) == Fraction(repr(answer))


def test_a_cost_is_told_settings_that_the_mechanism_takes_by_any_name() -> None:
    @private(cost=lambda *, epsilon: PureDP(epsilon))
    def mechanism(data: list[int], **settings: float) -> float:
        return len(data) * settings["epsilon"]

    account = opened()
    with session(account):
        assert mechanism([1], epsilon=0.5) == 0.5
    assert spent(account) == Fraction(1, 2)


def test_a_cost_cannot_look_at_the_data() -> None:
    def mechanism(data: float, epsilon: float, *, scale: float = 1.0) -> float:
        return data * epsilon * scale

    account = opened()
    with session(account) as s:
        for cost in (lambda data: PureDP(2 * data), lambda epsilon: PureDP(2 * epsilon)):
            with pytest.raises(InvalidGuarantee, match="not a setting of it"):
                s.run(mechanism, 0.3, 0.2, cost=cost)
        s.run(mechanism, 0.3, 0.2, scale=0.05, cost=lambda scale: PureDP(2 * scale))
    assert spent(account) == Fraction(1, 10)


def test_a_mechanism_that_tells_no_arguments_needs_a_guarantee() -> None:
    account = opened()
    with session(account) as s:
        with pytest.raises(InvalidGuarantee, match="must be a guarantee"):
            s.run(max, 1, 2, cost=lambda: TENTH)
        assert s.run(max, 1, 2, cost=TENTH) == 2


def test_an_interrupt_in_a_mechanism_leaves_the_session_usable() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    account = opened()
    with session(account) as s:
        with pytest.raises(KeyboardInterrupt):
            s.run(interrupted, cost=TENTH)
        s.run(double, 1, cost=TENTH)
    assert spent(account) == Fraction(2, 10)


def test_a_method_can_be_private() -> None:
    class Survey:
        data = (1, 2, 3)

        @private(cost=TENTH)
        def count(self, at_least: int = 0) -> int:
            return sum(value >= at_least for value in self.data)

    account = opened()
    survey = Survey()
    with session(account) as s:
        assert survey.count() == 3  # type: ignore[call-arg]  # that it is bound is not in its type
        assert survey.count(at_least=2) == 2  # type: ignore[call-arg]  # as above
        assert s.run(survey.count, 3) == 1
    assert spent(account) == Fraction(3, 10)


@pytest.mark.parametrize("kind", ["generator function", "coroutine function", "async generator function"])
def test_a_private_mechanism_that_answers_later_is_not_proven(kind: str) -> None:
    account = opened()
    with session(account), pytest.raises(UnprovenComposition):
        private(cost=TENTH)(INTERACTIVE[kind])()


# Interrupts.


class _Interrupted(KeyboardInterrupt):
    pass


def test_an_interrupt_at_any_line_runs_nothing_that_was_not_charged() -> None:
    for at in count(1):
        account = opened()
        ran: list[int] = []
        lines = count(1)
        # In a context of its own, as a thread has: what is left of an interrupted run stays there.
        contextvars.copy_context().run(interrupted_run, account, ran, lines, at)
        assert account.totals.steps >= len(ran)
        with session(account) as s:
            s.run(double, 1, cost=TENTH)
        if next(lines) <= at:
            assert at > 5
            assert ran == [1]
            return


def interrupted_run(account: Accountant, ran: list[int], lines: Iterator[int], at: int) -> None:
    def trace(frame: FrameType, event: str, _: object) -> object:
        if event == "line" and next(lines) == at:
            raise _Interrupted
        return trace if frame.f_code.co_filename == SOURCE else None

    before = sys.gettrace()
    with suppress(_Interrupted), session(account) as s:
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            s.run(ran.append, 1, cost=TENTH)
        finally:
            sys.settrace(before)


def test_a_session_in_a_forked_process_runs_nothing() -> None:
    account = opened()
    with session(account) as s:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                s.run(lambda: os._exit(2), cost=TENTH)
            except AccountClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        s.run(double, 1, cost=TENTH)
    assert spent(account) == Fraction(1, 10)
