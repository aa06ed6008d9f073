"""Interactive mechanisms: charged whole before they see the data, answered until they are closed, never beyond."""

from __future__ import annotations

import contextvars
import copy
import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from random import Random
from types import FrameType
from typing import Any

import pytest
from charge_history import charges

import odograph as odo
from odograph import (
    GDP,
    ZCDP,
    Accountant,
    ApproxDP,
    BudgetExceeded,
    Guarantee,
    IdempotencyConflict,
    Policy,
    PureDP,
    UnprovenComposition,
    private,
    session,
)
from odograph.core.guarantees import Interactive
from odograph.errors import (
    AccountClosed,
    InvalidArgument,
    InvalidGuarantee,
    LedgerBusy,
    ReservationResolved,
)
from odograph.sessions import Interaction

TENTH = PureDP(0.1)
WHOLE = Interactive(TENTH)


def opened(epsilon: float = 1) -> Accountant:
    return Accountant(Policy(epsilon, 0, filter="basic"), name="top")


def spent(account: Accountant) -> Fraction:
    return Fraction(account.totals.amounts[1], 10**15)


def adder(start: int) -> Callable[[int], int]:
    """A mechanism that answers with the sum of what it was asked."""
    total = start

    def add(value: int) -> int:
        nonlocal total
        total += value
        return total

    return add


def sums(start: int) -> Generator[int | None, int, None]:
    """The same as a generator; it ends when it is asked for 0."""
    total, answer = start, None
    while value := (yield answer):
        total += value
        answer = total


class Counter:
    """The same as an object."""

    kind = "counter"

    def __init__(self, start: int) -> None:
        self.total = start
        self._secret = start

    def add(self, value: int) -> int:
        """Return the new total."""
        self.total += value
        return self.total

    @classmethod
    def name(cls) -> str:
        """Return the name of the class."""
        return cls.__name__

    def more(self) -> Callable[[int], int]:
        """Return something that can be asked further."""
        return self.add

    def pieces(self) -> Iterator[int]:
        """Answer piece by piece."""
        yield from range(self.total)

    def fail(self) -> None:
        """Raise."""
        raise ZeroDivisionError


def never(*_: object, **__: object) -> Any:  # noqa: ANN401  nothing
    pytest.fail("the mechanism ran")


# Charge, open, answer.


@pytest.mark.parametrize("mechanism", [adder, sums, functools.partial(adder)])
def test_it_answers_until_it_is_closed(mechanism: Callable[[int], object]) -> None:
    account = opened()
    with account.interact(mechanism, 10, cost=TENTH, note="sums") as q:
        assert [q(1), q(2), q(3)] == [11, 13, 16]
        assert not q.closed
    with pytest.raises(AccountClosed, match="closed"):
        q(1)
    assert repr(q).endswith(", closed>")
    assert spent(account) == Fraction(1, 10)
    assert [(entry.verb, entry.cost, entry.note) for entry in account.history()][1:] == [
        ("reserve", WHOLE, "sums"),
        ("commit", WHOLE, ""),
    ]


def test_the_charge_is_made_before_it_sees_the_data_and_committed_before_it_answers() -> None:
    account = opened()

    def mechanism() -> Callable[[], tuple[Fraction, int]]:
        assert (spent(account), len(account.pending)) == (Fraction(1, 10), 1)
        return lambda: (spent(account), len(account.pending))

    with account.interact(mechanism, cost=TENTH) as q:
        assert len(account.pending) == 1
        assert q() == (Fraction(1, 10), 0)
    assert len(charges(account)) == 1


def test_what_does_not_fit_is_not_opened() -> None:
    account = opened(0.25)
    with account.interact(adder, 0, cost=TENTH), account.interact(adder, 0, cost=TENTH):
        with pytest.raises(BudgetExceeded) as caught:
            account.interact(never, cost=TENTH)
        assert caught.value.decision.largest == Interactive(PureDP(0.05))
        with pytest.raises(UnprovenComposition, match="filter='zcdp'"):
            account.interact(never, cost=odo.ZCDP(0.01))
    assert spent(account) == Fraction(2, 10)


def test_a_generator_may_answer_unasked_and_ends() -> None:
    account = opened()
    with account.interact(lambda: iter([1, 2]), cost=TENTH) as q:
        with pytest.raises(InvalidArgument, match="one query"):
            q(1)
        assert [q(), q()] == [1, 2]
        with pytest.raises(AccountClosed, match="has ended"):
            q()
    with account.interact(sums(1), cost=TENTH) as q:
        assert q(1) == 2
        with pytest.raises(InvalidArgument, match="one query"):
            q(1, 2)
        with pytest.raises(AccountClosed, match="has ended"):
            q(0)
        assert q.closed
    with (
        account.interact(Counter(3).pieces, cost=TENTH) as q,
        pytest.raises(UnprovenComposition, match="query = yield"),
    ):
        q("asked")


def test_an_object_is_asked_through_its_methods() -> None:
    account = opened()
    with account.interact(Counter, 5, cost=TENTH) as q:
        add = q.add
        with pytest.raises(AttributeError):
            q.subtract  # noqa: B018  it is looked up
        with pytest.raises(AttributeError):
            q._secret  # noqa: B018, SLF001
        with pytest.raises(InvalidArgument, match="through its methods"):
            q(1)
        assert [one.id for one in account.pending] == [q.charge.id]  # nothing was asked yet
        assert (add(1), q.add(value=2), q.total, q.kind, q.name()) == (6, 8, 8, "counter", "Counter")
        assert not account.pending
    ways: list[Callable[[], object]] = [lambda: add(1), lambda: q.total, lambda: q.add]
    for ask in ways:
        with pytest.raises(AccountClosed):
            ask()


def test_a_method_that_returns_its_object_does_not_release_it() -> None:
    class Chained(Counter):
        def again(self) -> Chained:
            return self

    account = opened()
    with account.interact(Chained, 5, cost=TENTH) as q:
        chained = q.again().again()
        assert chained is q
        assert chained.add(1) == 6
    with pytest.raises(AccountClosed):
        chained.add(1)


def test_what_python_shows_of_a_partial_or_a_generator_is_no_answer() -> None:
    account = opened()
    with account.interact(lambda: functools.partial(pow, 3), cost=TENTH) as q:
        for name in ("args", "func", "keywords"):
            assert not hasattr(q, name)
        assert account.pending  # nothing was asked
        assert q(2) == 9
    with account.interact(Counter(3).pieces, cost=TENTH) as q:
        for name in ("gi_frame", "gi_code", "gi_yieldfrom"):
            assert not hasattr(q, name)
        assert q() == 0


def test_an_answer_that_can_be_asked_is_under_the_same_charge() -> None:
    account = opened()
    with account.interact(Counter, 2, cost=TENTH) as q:
        more, pieces = q.more(), q.pieces()
        assert isinstance(more, Interaction)
        assert (more(1), pieces(), pieces(), q.total) == (3, 0, 1, 3)
        with q.more() as inner:
            assert inner(1) == 4
        with pytest.raises(AccountClosed):
            inner(1)
        assert more(1) == 5  # its own end is not the end of others
    for ask in (lambda: more(1), pieces):
        with pytest.raises(AccountClosed):
            ask()
    assert spent(account) == Fraction(1, 10)


@pytest.mark.parametrize("answer", [[iter([1])], {"a": (1, iter([1]))}], ids=["list", "dict"])
def test_an_answer_that_hides_something_unfinished_is_not_released(answer: object) -> None:
    with (
        opened().interact(lambda: lambda: answer, cost=TENTH) as q,
        pytest.raises(UnprovenComposition, match="later"),
    ):
        q()


@pytest.mark.parametrize("made", [None, 3, 0.5, "text", b"", [1], {}, (adder,)], ids=lambda made: type(made).__name__)
def test_what_answers_no_queries_is_charged_and_not_released(made: object) -> None:
    account = opened()
    with pytest.raises(UnprovenComposition, match="answers no queries"):
        account.interact(lambda: made, cost=TENTH)
    assert (spent(account), account.pending) == (Fraction(1, 10), ())


@pytest.mark.filterwarnings("error")
def test_what_is_asynchronous_is_refused() -> None:
    async def later() -> int:
        return 1

    async def pieces() -> Any:  # noqa: ANN401  an async generator
        yield 1

    account = opened()
    for mechanism in (later, pieces):
        with pytest.raises(UnprovenComposition, match="asynchronous"):
            account.interact(mechanism, cost=TENTH)
    assert spent(account) == 0
    for mechanism in (later, pieces):
        with pytest.raises(UnprovenComposition, match="answers no queries"):
            account.interact(lambda mechanism=mechanism: mechanism(), cost=TENTH)
    assert spent(account) == Fraction(2, 10)


def test_a_generator_that_was_asked_before_is_refused() -> None:
    account, started = opened(), sums(1)
    next(started)
    with pytest.raises(UnprovenComposition, match="asked before"):
        account.interact(started, cost=TENTH)
    with pytest.raises(InvalidGuarantee, match="does not take"):
        account.interact(sums(1), 1, cost=TENTH)
    assert spent(account) == 0


# Costs.


def noisy_adder(start: int, *, epsilon: float = 0.2) -> Callable[[int], int]:
    assert epsilon
    return adder(start)


def test_costs_are_declared_given_or_computed_from_settings() -> None:
    account = opened()
    marked = private(cost=lambda epsilon: PureDP(epsilon))(noisy_adder)  # noqa: PLW0108  by the setting's name
    with account.interact(marked, 1) as q, account.interact(marked, 1, epsilon=0.3) as r:
        assert q(1) == r(1) == 2
    with account.interact(adder, 1, cost=WHOLE):
        pass
    assert [entry.cost for entry in charges(account)] == [
        Interactive(PureDP(0.2)),
        Interactive(PureDP(0.3)),
        WHOLE,
    ]
    for mechanism, cost, error in (
        (adder, None, InvalidGuarantee),
        (adder, 0.1, InvalidGuarantee),
        (marked, TENTH, InvalidGuarantee),
        (3, TENTH, InvalidGuarantee),
    ):
        with pytest.raises(error):
            account.interact(mechanism, 1, cost=cost)  # type: ignore[arg-type]
    assert spent(account) == Fraction(6, 10)


def test_a_run_points_to_interact() -> None:
    account = opened()
    with session(account) as s:
        for mechanism, cost in ((sums, TENTH), (double_iterator, TENTH), (adder, WHOLE)):
            with pytest.raises(UnprovenComposition, match=r"open it with account\.interact"):
                s.run(mechanism, 1, cost=cost)


def double_iterator(value: int) -> Iterator[int]:
    return iter([value, value])


# What raises, is voided, or is begun twice.


def test_a_mechanism_that_raises_when_opened_stays_charged() -> None:
    account = opened()
    with pytest.raises(ZeroDivisionError) as caught:
        account.interact(lambda: 1 / 0, cost=TENTH, key="k")
    (note,) = caught.value.__notes__
    assert "Interactive(PureDP(0.1)) was charged to 'top' (entry top#1, key k) before <lambda> raised" in note
    assert "under another key" in note
    assert (spent(account), account.pending) == (Fraction(1, 10), ())


def test_a_query_that_raises_leaves_the_charge_and_the_mechanism() -> None:
    account = opened()
    with account.interact(Counter, 1, cost=TENTH) as q:
        with pytest.raises(ZeroDivisionError) as caught:
            q.fail()
        (note,) = caught.value.__notes__
        assert "was charged to 'top' (entry top#1" in note
        assert "when Counter was opened, and stays charged" in note
        assert q.add(1) == 2
    assert (spent(account), account.pending) == (Fraction(1, 10), ())


def test_closing_commits_also_if_nothing_was_asked() -> None:
    account = opened()
    with pytest.raises(KeyError), account.interact(adder, 1, cost=TENTH):
        raise KeyError
    assert (spent(account), account.pending, account.voids) == (Fraction(1, 10), (), 0)


def test_it_may_be_voided_while_nothing_was_asked() -> None:
    account = opened()
    with account.interact(adder, 1, cost=TENTH) as q:
        q.void("the table was empty")
        for ask in (lambda: q(1), lambda: q.void("again")):
            with pytest.raises(AccountClosed):
                ask()
    assert (spent(account), account.voids) == (Fraction(0), 1)
    with account.interact(adder, 1, cost=TENTH) as q:
        q(1)
        with pytest.raises(ReservationResolved, match="stays charged"):
            q.void("too late")
        assert q(1) == 3
    assert spent(account) == Fraction(1, 10)


def test_one_that_was_voided_elsewhere_answers_nothing() -> None:
    account = opened()
    with account.interact(lambda: never, cost=TENTH) as q:
        (pending,) = account.pending
        pending.void("someone else was sure that it did not run")
        for _ in range(2):
            with pytest.raises(ReservationResolved):
                q(1)
    assert spent(account) == 0


class ChargesAtClose(Accountant):
    """A broken twin: it charges when the interaction ends."""

    @contextmanager
    def interact(self, mechanism: Callable[..., Any], /, *args: Any, cost: Any = None, **_: Any) -> Iterator[Any]:  # type: ignore[override]  # noqa: ANN401
        """Answer first."""
        yield mechanism(*args)
        self.spend(Interactive(cost))


def test_an_account_that_charges_at_close_is_caught() -> None:
    """Negative control: the look at the totals before and between the answers."""
    account = ChargesAtClose(Policy(1, 0, filter="basic"))
    with account.interact(lambda: lambda: spent(account), cost=TENTH) as q:
        assert q() == 0
    assert spent(account) == Fraction(1, 10)


def test_a_key_is_for_one_interaction() -> None:
    account = opened()
    with account.interact(adder, 1, cost=TENTH, key="k") as q:
        with pytest.raises(IdempotencyConflict, match="was used before"):
            account.interact(never, 1, cost=TENTH, key="k")
        assert q(1) == 2
    with pytest.raises(IdempotencyConflict):
        account.interact(never, 1, cost=TENTH, key="k")
    assert spent(account) == Fraction(1, 10)


# Concurrency.


def test_many_are_asked_in_turns_from_threads_beside_runs() -> None:
    """The total is the sum of what was opened and run, and every mechanism saw its queries one at a time."""
    account = Accountant(Policy(1000, 0, filter="basic"), name="top")
    with session(account) as s:
        handles = [s.interact(adder, 0, cost=TENTH) for _ in range(8)]

        def work(seed: int) -> int:
            random, sent = Random(seed), 0  # noqa: S311  not a secret
            for _ in range(200):
                handle = random.choice(handles)
                handle(1)
                sent += 1
                if random.random() < 0.1:
                    s.run(lambda: 1, cost=TENTH)
                    with account.interact(sums, 0, cost=TENTH) as q:
                        assert (q(1), q(1)) == (1, 2)
            return sent

        with ThreadPoolExecutor(4) as pool:
            asked = sum(pool.map(work, range(4)))
        assert sum(handle(0) for handle in handles) == asked == 800
    assert all(handle.closed for handle in handles)  # with their session
    steps = len(charges(account))
    assert spent(account) == Fraction(steps, 10)
    assert account.pending == ()


def test_one_query_at_a_time() -> None:
    inside, answer = threading.Event(), threading.Event()
    order: list[str] = []

    def mechanism() -> Callable[[str], None]:
        def ask(name: str) -> None:
            order.append(f"begin {name}")
            inside.set()
            answer.wait(5)
            order.append(f"end {name}")

        return ask

    with opened().interact(mechanism, cost=TENTH) as q, ThreadPoolExecutor(2) as pool:
        first = pool.submit(q, "first")
        inside.wait(5)
        second = pool.submit(q, "second")
        answer.set()
        first.result(5)
        second.result(5)
    assert order == ["begin first", "end first", "begin second", "end second"]


def test_nothing_is_asked_or_opened_inside_a_running_mechanism() -> None:
    account = opened()
    with account.interact(adder, 0, cost=TENTH) as q, session(account) as s:
        ways: list[Callable[[], object]] = [
            lambda: q(1),
            lambda: account.interact(never, cost=TENTH),
            lambda: s.interact(never, cost=TENTH),
            lambda: s.run(never, cost=TENTH),
        ]
        for way in ways:
            with pytest.raises(UnprovenComposition, match="never released"):
                s.run(way, cost=PureDP(0.01))
            with account.interact(lambda way=way: way, cost=PureDP(0.01)) as r, pytest.raises(UnprovenComposition):
                r()
            with pytest.raises(UnprovenComposition):
                account.interact(way, cost=PureDP(0.01))
        assert q(0) == 0
    assert spent(account) == Fraction(1, 10) + Fraction(12, 100)


def test_a_signal_handler_does_not_ask_in_the_middle_of_an_answer() -> None:
    found: list[BaseException] = []
    with opened().interact(lambda: lambda: signal.raise_signal(signal.SIGUSR1), cost=TENTH) as q:
        context = contextvars.copy_context()

        def handler(_: int, __: FrameType | None) -> None:
            try:
                context.run(q)
            except BaseException as problem:  # noqa: BLE001  looked at below
                found.append(problem)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            q()
        finally:
            signal.signal(signal.SIGUSR1, before)
    (problem,) = found
    assert isinstance(problem, LedgerBusy)


# A handle stays where it is.


def test_it_is_neither_pickled_nor_copied() -> None:
    with opened().interact(adder, 0, cost=TENTH) as q:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="answer twice"):
                way(q)
        assert "adder: Interactive(PureDP(0.1)), top#1" in repr(q)


def test_a_forked_process_cannot_ask() -> None:
    account = opened()
    with account.interact(adder, 0, cost=TENTH) as q:
        child = os.fork()
        if not child:  # pragma: no cover  in a forked process, which is not measured
            code = 1
            try:
                q(1)
            except UnprovenComposition:
                q.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert q(1) == 1
    assert spent(account) == Fraction(1, 10)


def test_a_session_closes_what_it_opened() -> None:
    account = opened()
    with session(account) as s:
        q = s.interact(adder, 0, cost=TENTH)
        assert q(1) == 1
    with pytest.raises(AccountClosed):
        q(1)
    with pytest.raises(AccountClosed):
        s.interact(never, cost=TENTH)


# Accounts as mechanisms.


def test_an_account_of_its_own_is_an_interactive_mechanism() -> None:
    """It is charged whole when it opens, and keeps its promise by its own filter."""
    account = Accountant(Policy(1, 1e-6, delta_steps=1e-7), name="top")
    inner = Policy("0.5", "1e-8")
    with account.interact(Accountant, inner, cost=ApproxDP("0.5", "1e-8"), note="for ana") as ana:
        before = account.totals
        assert ana.run(adder, 1, cost=PureDP(0.2), key="a")
        with ana.interact(adder, 1, cost=PureDP(0.2)) as q:
            assert q(1) == 2
        with pytest.raises(BudgetExceeded):
            ana.run(never, cost=PureDP(0.2))
        assert account.totals == before
    with pytest.raises(AccountClosed):
        ana.run(never, cost=PureDP(0.01))
    assert [entry.cost for entry in charges(account)] == [Interactive(ApproxDP("0.5", "1e-8"))]


class Analyst:
    """A mechanism that keeps an account of its own."""

    def __init__(self, account: Accountant | None = None) -> None:
        self.account = account or Accountant(Policy("0.3", 0, filter="basic"))

    def count(self) -> int:
        """Run something on the account."""
        with session(self.account) as s:
            return s.run(lambda: 7, cost=TENTH)


def test_a_mechanism_may_use_an_account_that_it_opened_itself() -> None:
    account = opened()
    with account.interact(Analyst, cost=PureDP(0.3)) as q:
        assert [q.count() for _ in range(3)] == [7, 7, 7]
        with pytest.raises(BudgetExceeded):
            q.count()
    assert spent(account) == Fraction(3, 10)
    # One of somebody else would publish, in its entries, what was never released.
    with account.interact(Analyst, opened(), cost=PureDP(0.3)) as q, pytest.raises(UnprovenComposition):
        q.count()
    with (
        account.interact(
            Analyst, Accountant(Policy(1, 0, filter="basic"), name="ana", parent=account), cost=TENTH
        ) as q,
        pytest.raises(UnprovenComposition),
    ):
        q.count()
    shared = opened()
    with pytest.raises(UnprovenComposition):
        account.interact(lambda: shared, cost=TENTH)


def test_a_reading_counts_it_from_its_charge_on() -> None:
    account = Accountant(Policy(1, 1e-6))
    with account.interact(adder, 0, cost=PureDP(0.25)) as q:
        loss = account.reading().loss
        assert loss == pytest.approx(0.25)
        q(1)
        assert account.reading().loss == loss
    assert account.reading().loss == loss


@pytest.mark.parametrize(
    ("inner", "cost", "fits"),
    [
        (Policy(1, "1e-8", filter="zcdp"), ApproxDP("1", "1e-8"), True),
        (Policy(1, "1e-8", filter="zcdp"), ApproxDP("2", "2e-8"), True),
        (Policy(1, "1e-8", filter="zcdp"), PureDP("1"), False),
        (Policy(1, "1e-8", filter="zcdp"), ApproxDP("0.9", "1e-8"), False),
        (Policy(1, 0, filter="basic"), PureDP(1), True),
        (Policy(1, 0, filter="basic"), PureDP("0.5"), False),
        (Policy(rho="0.01"), ZCDP("0.01"), True),
        (Policy(rho="0.01"), ZCDP("0.009"), False),
        (Policy(mu="0.1"), GDP("0.1"), True),
        (Policy(mu="0.1"), GDP("0.09"), False),
        (Policy(None, 1e-6), PureDP(1), False),
    ],
    ids=str,
)
def test_an_account_as_a_mechanism_promises_no_more_than_is_charged(
    inner: Policy,
    cost: Guarantee,
    fits: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    account = Accountant(Policy(5, 1e-6, filter={"zcdp": 1}, delta_steps=1e-7))
    if fits:
        with account.interact(Accountant, inner, cost=cost) as opened:
            assert opened.run(lambda: 42, cost=PureDP("0.001")) == 42
        return
    with pytest.raises(InvalidGuarantee, match="cost must cover what the account that was opened promises"):
        account.interact(Accountant, inner, cost=cost)
    assert account.totals.steps == 1  # charged, and not released
    with account.interact(Accountant, inner, cost=cost, trust_cost=True) as opened:
        assert opened.run(lambda: 42, cost=PureDP("0.001")) == 42


def test_an_account_that_an_answer_brings_promises_no_more_either() -> None:
    account = Accountant(Policy(1, 1e-6, filter="zcdp"))
    with account.interact(lambda: Accountant, cost=PureDP("0.1")) as q:
        assert q(Policy("0.1", 0, filter="basic")).run(lambda: 42, cost=PureDP("0.1")) == 42
        with pytest.raises(InvalidGuarantee, match="cost must cover what the account"):
            q(Policy(None, 1e-6))


class Telling:
    """A mechanism that answers with what it is asked by."""

    def ask(self) -> int:
        return 1

    def listed(self) -> object:
        return [self.ask]

    def named(self) -> object:
        return {"ask": {"again": self.ask}}


@pytest.mark.parametrize("way", ["listed", "named"])
def test_what_answers_is_not_released_inside_an_answer(way: str) -> None:
    account = Accountant(Policy(1, 1e-6, filter="zcdp"))
    with account.interact(Telling, cost=PureDP(0.1)) as q:
        assert q.ask() == 1
        with pytest.raises(UnprovenComposition, match="answers later"):
            getattr(q, way)()
