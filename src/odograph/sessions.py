"""Sessions and interactions: charge, run, release, around any mechanism. What raises or is interrupted stays charged.

A one-shot mechanism is run in a session; an interactive one (a function that answers queries, a generator, a
library's queryable) is opened by `Account.interact`. Both are charged whole before they see the data.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, suppress
from contextvars import Context, ContextVar, copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from odograph.concurrency import refuse_reentry
from odograph.core.guarantees import ZCDP, ApproxDP, DiscreteGaussian, Guarantee, Interactive, PureDP, one_shot
from odograph.display import badge, card, facts
from odograph.errors import (
    AccountClosed,
    IdempotencyConflict,
    InvalidArgument,
    InvalidGuarantee,
    ReservationResolved,
    UnprovenComposition,
    type_text,
    with_usage,
)
from odograph.integrations import cost_of, guarded, is_interactive, name_of, states_cost
from odograph.ledger.results import BaseReservation, Reservation

if TYPE_CHECKING:
    from odograph.account import Account

__all__ = [
    "Cost",
    "Interaction",
    "Private",
    "Running",
    "Session",
    "begin",
    "check_account",
    "check_first_use",
    "interact",
    "private",
    "running",
    "session",
]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

# A guarantee, or a function from some of the mechanism's settings, by their names, to one.
Cost: TypeAlias = Guarantee | Callable[..., Guarantee]

_LAZY: Final = (Iterator, Awaitable, AsyncIterator)
_HOLDERS: Final = (dict, frozenset, list, set, tuple)
_WITH_COST: Final = "private needs the cost of what it decorates: write @odo.private(cost=odo.PureDP(0.1))"
_PLAIN: Final = (bool, int, float, complex, str, bytes, *_HOLDERS)
_ASYNCHRONOUS: Final = (Awaitable, AsyncIterator)
_INSTEAD: Final = "Return the finished answer, or open it with account.interact(...), which charges all its answers"
# An OpenDP query and a diffprivlib mechanism have what is meant.
_MEANT: Final = {"opendp": ". Pass what its .resolve() returns", "diffprivlib": ". Pass its .randomise"}
_OPEN: ContextVar[tuple[Session, ...]] = ContextVar("odograph_sessions", default=())


class Running:
    """A mechanism that is running now, by its name. An account that is opened meanwhile is part of it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def context(self) -> Context:
        """Return a context to run the mechanism in, which ends with it however it ends."""
        inside = copy_context()
        inside.run(_RUNNING.set, self)
        return inside


_RUNNING: ContextVar[Running | None] = ContextVar("odograph_running", default=None)


def running() -> Running | None:
    """Return the mechanism that is running in this context, if any."""
    return _RUNNING.get()


def _refuse_inside(account: Account, what: str) -> None:
    """Raise inside a running mechanism, unless the account was opened by it: then the account is part of it."""
    outer = _RUNNING.get()
    if outer is not None and getattr(_top(account), "_opened_in", None) is not outer:
        raise UnprovenComposition(
            f"{what} inside {outer.name}: the cost of an inner run would depend on what was never released. Run one"
            " after the other"
        )


class Private(Protocol[_P, _T_co]):
    """A mechanism that knows its cost, made by `@private`."""

    cost: Cost
    mechanism: Callable[..., Any]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T_co:
        """Run in the session that is open."""
        ...


class Session:
    """An analyst's interaction with one account: each `run` is charged before the mechanism sees the data.

    Mechanisms may overlap in threads, one-shot and interactive ones; they count in the order of their admission. So
    may sessions, also inside each other, on one account or on several of a tree: each run is charged to the account
    of its own session and to those above it, from whatever thread or task it is asked for. A `@private` function
    that is called by itself is charged to the innermost session of its context: a task has the sessions that were
    open when it was made, and a new thread has none.

    What is not proven is refused: a run inside a running mechanism, and a run of a mechanism that answers later (a
    generator, OpenDP's queryables), which `interact` is for. A run in a thread that a mechanism starts looks like an
    overlap and is not recognized: do not do that.
    """

    def __init__(self, account: Account) -> None:
        check_account(account, "a session")
        self.account = account
        self._open = False
        self._interactions = ExitStack()

    async def __aenter__(self) -> NoReturn:
        raise InvalidArgument(
            "a session is opened with `with odograph.session(account) as s:`, also in a coroutine. There, run what"
            " takes long in a thread: await asyncio.to_thread(s.run, mechanism, ...)"
        )

    async def __aexit__(self, *_: object) -> None:
        """Never called: `__aenter__` raises."""

    def __enter__(self) -> Self:
        _refuse_inside(self.account, "a session cannot be opened")
        if self._open:
            raise InvalidArgument("this session is open already: use it, or make another with odograph.session")
        self._open = True
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        _OPEN.set(tuple(other for other in _OPEN.get() if other is not self))
        self._interactions.close()

    def run(
        self,
        mechanism: Callable[..., _T],
        /,
        *args: Any,
        key: str | None = None,
        note: str = "",
        cost: Cost | None = None,
        trust_cost: bool = False,
        **kwargs: Any,
    ) -> _T:
        """Charge the cost, call `mechanism(*args, **kwargs)`, and return its answer.

        `cost` may be left out for a `@private` function, and for a measurement of a library that states its own. A
        cost below what such a measurement states is refused; with `trust_cost=True` it is charged, and the entry's
        note says so. If the mechanism raises, the charge stands, because its noise was drawn from the data; a note on
        the exception says what was charged.

        With a `key` the mechanism is run and charged at most once: a second run under the same key, such as that of a
        notebook which is run again from the top, raises `IdempotencyConflict`. The answer is not stored.

        A mechanism that has a parameter called `key`, `note`, `cost` or `trust_cost` itself is given it beforehand:
        `s.run(functools.partial(mechanism, key="blue"), data, cost=...)`.
        """
        self._check_open()
        name = name_of(mechanism)
        _refuse_inside(self.account, f"{name} was asked to run")
        mechanism, guarantee, trusted = _priced(self.account, mechanism, cost, args, kwargs, trust_cost=trust_cost)
        _refuse_lazy(mechanism, guarantee, name)
        _check_arguments(mechanism, args, kwargs)
        inside = Running(name).context()
        with self.account.spending(guarantee, key=key, note=_label(note or name, trusted)) as charge:
            try:
                answer = inside.run(mechanism, *args, **kwargs)
            except BaseException as problem:
                note = _stays_charged(self.account, charge, guarantee, f"before {name} raised", _again(key))
                problem.add_note(note)
                raise
        if unfinished := _unfinished(answer):
            raise UnprovenComposition(
                f"{name} returned something that answers later ({unfinished}), which a run does not cover; it was"
                f" charged and is not released. {_INSTEAD}"
            )
        return answer

    def interact(
        self,
        mechanism: Any,  # noqa: ANN401  a function, a generator, or a library's queryable
        /,
        *args: Any,
        key: str | None = None,
        note: str = "",
        cost: Cost | None = None,
        trust_cost: bool = False,
        **kwargs: Any,
    ) -> Interaction:
        """Open an interactive mechanism as `Account.interact` does; it is closed with the session at the latest."""
        self._check_open()
        opened = self.account.interact(
            mechanism, *args, key=key, note=note, cost=cost, trust_cost=trust_cost, **kwargs
        )
        self._interactions.callback(opened.close)
        return opened

    def __repr__(self) -> str:
        return f"<Session on {self.account!r}, {'open' if self._open else 'not open'}>"

    def _repr_html_(self) -> str:
        label = badge("open", "good") if self._open else badge("not open")
        account = self.account
        spent = "" if account.policy.is_unlimited else f"{account.spent:.1%} of the budget"
        named = {"account": account.name, "promise": account.policy.promise, "spent": spent}
        return card("Session", facts(named), label=label)

    def _check_open(self) -> None:
        if not self._open:
            raise AccountClosed("this session is not open: use it inside `with odograph.session(account) as s:`")


class _Charge:
    """What the handles of one interactive mechanism share: its charge, and the lock under which it answers."""

    def __init__(
        self, account: Account, reservation: Reservation, cost: Guarantee, name: str, *, trusted: bool
    ) -> None:
        self.account = account
        self.reservation = reservation
        self.cost = cost
        self.name = name  # of the mechanism
        self.trusted = trusted  # whether the cost is not compared with what an opened account promises
        self.lock = threading.RLock()
        self.process = os.getpid()
        self.stands = reservation.receipt.verb != "reserve"  # a principal that may not commit spends at once
        self._running = Running(name)

    def settle(self) -> None:
        """Commit, once: from then on the charge cannot be taken back, so that answers may be computed."""
        if not self.stands:
            self.reservation.commit()
            self.stands = True

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  any answer
        """Run a part of the mechanism."""
        return self._running.context().run(function, *args)


class Interaction:
    """An open interactive mechanism, which answers queries until it is closed; `Account.interact` makes one.

    Call it, or the methods of what it holds: `q(x)`, `q.evaluate(x)`. Everything that it answers is paid for by the
    one charge that was made before the mechanism saw the data. That charge is committed before the first answer is
    computed: if that fails, because the reservation was voided elsewhere, nothing is answered. An answer that can be
    asked further is an interaction under the same charge, and closes with this one.

    Several may be open at the same time, and be asked in any order and from any thread, beside runs of sessions; one
    answers one query at a time. It stays in its process: it can be neither pickled nor copied, nor used after a fork.
    """

    def __init__(self, charge: _Charge, mechanism: object, parent: Interaction | None = None) -> None:
        self._charge = charge
        self._mechanism: Any = mechanism
        self._parent = parent
        self._closed = False

    @property
    def charge(self) -> Reservation:
        """The charge that pays for the mechanism."""
        return self._charge.reservation

    @property
    def closed(self) -> bool:
        """Whether it answers no more queries."""
        return self._closed or (self._parent is not None and self._parent.closed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the mechanism answers
        """Ask: call the mechanism, or send a generator one query; without a query, take its next answer."""
        self._check_usable()
        mechanism = self._mechanism
        if isinstance(mechanism, Iterator):
            if kwargs or len(args) > isinstance(mechanism, Generator):
                raise InvalidArgument(
                    f"{self._charge.name} takes one query at a time (got {len(args) + len(kwargs)})"
                )
            return self._ask(lambda: self._next(*args))
        if not callable(mechanism):
            raise InvalidArgument(f"{self._charge.name} answers through its methods, not by being called")
        return self._ask(lambda: mechanism(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the mechanism has
        if name.startswith("_"):
            raise AttributeError(f"an interaction has no attribute {name!r}")
        self._check_usable()
        mechanism = self._mechanism
        found = inspect.getattr_static(mechanism, name, None)
        # What Python shows of a partial or a generator (its arguments, its frame) is the data, and no answer.
        is_shown = isinstance(mechanism, functools.partial | Generator) and not callable(found)
        if is_shown or (found is None and not hasattr(type(mechanism), "__getattr__")):
            raise AttributeError(f"{self._charge.name} has no attribute {name!r}")
        if not callable(found):
            return self._ask(lambda: getattr(mechanism, name))  # it may be computed from the data

        def ask(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the mechanism answers
            return self._ask(lambda: getattr(mechanism, name)(*args, **kwargs))

        return ask

    def close(self) -> None:
        """Answer no more queries. The charge stands, also if nothing was asked: see `void`."""
        charge = self._charge
        if self._closed or charge.process != os.getpid():
            self._closed = True
            return
        refuse_reentry(charge.lock)
        with charge.lock:
            self._closed = True
            self._mechanism = None
            if self._parent is None:
                with suppress(ReservationResolved):  # it was voided elsewhere, and nothing was answered
                    charge.settle()

    def void(self, reason: str) -> None:
        """Take the charge back and close; only if nothing was asked, and opening the mechanism revealed nothing."""
        charge = self._charge
        self._check_usable()
        refuse_reentry(charge.lock)
        with charge.lock:
            if charge.stands:
                raise ReservationResolved(
                    f"{charge.name} was asked, or its charge was committed at once, so {charge.cost.brief()} stays"
                    " charged"
                )
            charge.reservation.void(reason)
            charge.stands = self._closed = True
            self._mechanism = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an interaction cannot be pickled or copied: a copy would answer twice for one charge")

    def __repr__(self) -> str:
        charge = self._charge
        return (
            f"<Interaction {charge.name}: {charge.cost.brief()}, {charge.reservation.id}{', closed' * self.closed}>"
        )

    def _repr_html_(self) -> str:
        charge = self._charge
        named = {"cost": charge.cost.brief(), "charge": charge.reservation.id}
        label = badge("closed") if self.closed else badge("open", "good")
        return card(f"Interaction with {charge.name}", facts(named), label=label)

    def _ask(self, query: Callable[[], Any]) -> Any:  # noqa: ANN401  whatever the mechanism answers
        """Commit the charge, compute an answer, and return it."""
        charge = self._charge
        _refuse_inside(charge.account, f"{charge.name} was asked")
        refuse_reentry(charge.lock)
        with charge.lock:
            self._check_usable()
            charge.settle()
            try:
                return self._release(charge.compute(query))
            except BaseException as problem:
                when, then = f"when {charge.name} was opened", "Until it is closed it can be asked again"
                problem.add_note(_stays_charged(charge.account, charge.reservation, charge.cost, when, then))
                raise

    def _check_usable(self) -> None:
        if self._charge.process != os.getpid():
            raise UnprovenComposition(
                f"{self._charge.name} was opened in another process: a fork of it would answer twice for one charge."
                " Open one here"
            )
        if self.closed:
            raise AccountClosed(f"the interaction with {self._charge.name} is closed: it answers no more queries")

    def _next(self, *query: Any) -> Any:  # noqa: ANN401  whatever the mechanism answers
        """Send a generator a query, or take the next answer of an iterator."""
        asked = self._mechanism
        try:
            if not query:
                return next(asked)
            if inspect.getgeneratorstate(asked) == inspect.GEN_CREATED and next(asked) is not None:
                raise UnprovenComposition(
                    f"{self._charge.name} answered before it was asked, and that answer is not released: a generator"
                    " that is sent queries begins with `query = yield`"
                )
            return asked.send(*query)
        except StopIteration:
            self._closed = True
            raise AccountClosed(f"{self._charge.name} has ended: it answers no more queries") from None

    def _release(self, answer: object) -> object:
        """Return an answer; one that can be asked further, as an interaction under the same charge."""
        charge = self._charge
        if answer is self._mechanism:  # a method that returns its object, so that calls can be chained
            return self
        if _can_be_asked(answer):
            return Interaction(charge, _started(charge, lambda: answer, (), {}), self)
        if unfinished := _unfinished(answer, askable=True):
            raise UnprovenComposition(
                f"{charge.name} answered with something that answers later ({unfinished}); it is not released. Return"
                " the finished answer, or one thing that can be asked"
            )
        return answer


def interact(  # noqa: PLR0913  the arguments of `Account.interact`
    account: Account,
    mechanism: Any,  # noqa: ANN401  as above
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cost: Cost | None,
    key: str | None,
    note: str,
    trust_cost: bool,
) -> Interaction:
    """Charge the whole cost, then open the mechanism: what `Account.interact` does on every account.

    Theorem: interactive mechanisms (Haney et al. (2023)): any filter, or odometer, for one-shot mechanisms is one for
        interactive mechanisms that are asked concurrently, if each is charged whole when it starts.
    Assumes: the cost holds against every strategy of asking; it depends on what was released only.
    """
    name = name_of(mechanism)
    _refuse_inside(account, f"{name} was asked to start")
    mechanism, guarantee, trusted = _priced(
        account, mechanism, cost, args, kwargs, trust_cost=trust_cost, interactive=True
    )
    _refuse_not_interactive(mechanism, guarantee, name)
    start = (lambda: mechanism) if _answers_itself(mechanism) else mechanism
    _check_arguments(start, args, kwargs)
    reservation = begin(account, guarantee, key, _label(note or name, trusted))
    charge = _Charge(account, reservation, guarantee, name, trusted=trust_cost)
    try:
        return Interaction(charge, _started(charge, start, args, kwargs))
    except BaseException as problem:
        problem.add_note(_stays_charged(account, charge.reservation, guarantee, f"before {name} raised", _again(key)))
        charge.settle()
        raise


def _started(charge: _Charge, start: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Start a mechanism and return what answers its queries: an account answers through a session."""
    made = charge.compute(lambda: start(*args, **kwargs))
    if _is_account(made):
        opened = charge.compute(Session(made).__enter__)  # raises if others can see it
        if not charge.trusted:
            _check_promise(charge.account, made, charge.cost)
        return opened
    if made is None or isinstance(made, (*_PLAIN, *_ASYNCHRONOUS)):
        _unfinished(made)  # closes a coroutine
        raise UnprovenComposition(
            f"{charge.name} returned something that answers no queries ({type_text(made)}); it was charged and"
            " is not released. Return a function, a generator or an object with methods, or use run for a one-shot"
            " answer"
        )
    return guarded(made)


def _check_promise(account: Account, inner: Account, cost: Guarantee) -> None:
    """Raise unless an account that was opened as a mechanism promises no more than was charged for it."""
    promised = inner.policy.guarantee
    if promised is None or not _covers(account, cost, Interactive(promised)):
        least = "an account with a limit" if promised is None else f"cost={promised!r} or more"
        raise InvalidGuarantee(
            f"cost must cover what the account that was opened promises, {inner.policy.target} (got {cost}); it was"
            f" charged, and the account is not released. Pass {least}, or trust_cost=True if you know better"
        )


def _refuse_not_interactive(mechanism: object, guarantee: Guarantee, name: str) -> None:
    """Raise for what is known to be no interactive mechanism, or not a fresh one, before it is charged."""
    if inspect.iscoroutinefunction(mechanism) or inspect.isasyncgenfunction(mechanism):
        raise UnprovenComposition(f"{name} is asynchronous, which is not covered; nothing was charged")
    if not isinstance(guarantee, Interactive):  # as its library states
        raise InvalidGuarantee(f"{name} answers once; nothing was charged. Run it in a session instead")
    if isinstance(mechanism, Generator) and inspect.getgeneratorstate(mechanism) != inspect.GEN_CREATED:
        raise UnprovenComposition(f"{name} was asked before it was charged; nothing was charged. Pass a new one")


def _answers_itself(mechanism: object) -> bool:
    """Whether a mechanism is open already, so that there is nothing to call first."""
    return isinstance(mechanism, Generator) or is_interactive(mechanism)


def _can_be_asked(answer: object) -> bool:
    """Whether an answer is recognized as one that can be asked further."""
    known = isinstance(answer, Iterator | Session | Interaction | functools.partial)
    return known or inspect.isroutine(answer) or is_interactive(answer) or _is_account(answer)


def begin(account: Account, cost: Guarantee, key: str | None, note: str) -> Reservation:
    """Charge for something that is about to run; a key that was used before is refused."""
    reservation = account._begin(cost, key, note)  # noqa: SLF001  of every account
    check_first_use(reservation, key)
    return reservation


def check_first_use(reservation: BaseReservation, key: str | None) -> None:
    """Raise if the key of a charge was used before: it pays for one run."""
    if reservation.repeated:
        raise IdempotencyConflict(
            f"key {key!r} was used before ({reservation.id}): what it paid for was run, or may have been, and the"
            " answer is not stored. Another key runs it again and charges it again"
        )


def _priced(  # noqa: PLR0913  a run is the list of its arguments
    account: Account,
    mechanism: Callable[..., _T],
    cost: Cost | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    trust_cost: bool,
    interactive: bool = False,
) -> tuple[Callable[..., _T], Guarantee, str]:
    """Return what to call, what it costs, and what the entry says of a cost that was trusted.

    Takes a library's own settings out of `kwargs`.
    """
    if isinstance(mechanism, _Marked):
        if cost is not None:
            raise InvalidGuarantee(f"{name_of(mechanism)} declares its own cost; leave cost= out")
        cost, mechanism = mechanism.cost, mechanism.mechanism
    if not (interactive and _answers_itself(mechanism)) and not callable(mechanism):
        raise _not_callable(mechanism)
    if not isinstance(trust_cost, bool) or (trust_cost and cost is None):
        raise InvalidArgument(f"trust_cost must be True or False, and True only with cost= (got {trust_cost!r})")
    if cost is None:
        own = cost_of(mechanism, neighbors=account.policy.neighbors, settings=kwargs)
        return mechanism, own, ""
    cost = _evaluated(cost, mechanism, args, kwargs)
    if interactive:
        cost = Interactive(one_shot(cost))
    doubt = _doubt(account, mechanism, cost, kwargs) if states_cost(mechanism) else None
    if doubt is None:
        return mechanism, cost, ""
    if not trust_cost:
        raise type(doubt)(
            f"{doubt}; nothing was charged. Leave cost= out to charge what the measurement states. To charge"
            f" {cost} all the same, pass trust_cost=True, and the entry will say so"
        )
    return mechanism, cost, f"trust_cost=True: {doubt}"


def _evaluated(cost: Cost, mechanism: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Guarantee:
    """Return a cost that may be a function of the mechanism's settings."""
    if not isinstance(cost, Guarantee | type) and callable(cost):
        cost = cost(**_settings(mechanism, cost, args, kwargs))
    if not isinstance(cost, Guarantee):
        raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got {type_text(cost)})")
    return cost


def _doubt(
    account: Account, mechanism: object, given: Guarantee, kwargs: dict[str, Any]
) -> InvalidArgument | UnprovenComposition | None:
    """Return why a given cost may be too low for a measurement that states its own; None if it is not."""
    try:
        own = cost_of(mechanism, neighbors=account.policy.neighbors, settings=kwargs)
    except (InvalidArgument, UnprovenComposition) as problem:
        return type(problem)(f"cost={given} cannot be compared with what the measurement states ({problem})")
    # A cost that is written as the float which the library gives is read as a decimal, which may be half a
    # rounding below that float.
    if given == own or any(_covers(account, given, least) for least in (own, _as_written(own))):
        return None
    return InvalidGuarantee(f"cost={given} is less, on some meter, than what the measurement states, {own}")


def _label(note: str, trusted: str) -> str:
    return f"{note}; {trusted:.1000}" if trusted else note


def _stays_charged(account: Account, charge: Reservation, guarantee: Guarantee, when: str, then: str) -> str:
    """Return what stays charged when a mechanism raises, under which entry, and how to go on."""
    receipt = charge.receipt
    to = f" to {account.name!r}" if account.name else ""
    under = f", key {receipt.key}" if receipt.key else ""
    return (
        f"odograph: {guarantee.brief()} was charged{to} (entry {receipt.id}{under}) {when}, and stays charged,"
        f" because noise may have been drawn from the data. {then}"
    )


def _again(key: str | None) -> str:
    another = "" if key is None else " under another key"
    return f"Correct the mechanism and run it again{another}: that is charged again"


def check_account(account: object, who: str) -> None:
    """Raise unless it can be charged: otherwise only the first mechanism would show that it cannot."""
    if inspect.iscoroutinefunction(inspect.unwrap(getattr(type(account), "spend", lambda: None))):
        raise InvalidArgument(
            f"{who} needs an account of odograph.connect (got an async account). In a coroutine run it in a thread:"
            " await asyncio.to_thread(s.run, mechanism, ...)"
        )
    if not _is_account(account):
        raise InvalidArgument(
            f"{who} needs an account, such as Accountant(policy) or ledger.account(name) (got {type_text(account)})"
        )


def _is_account(thing: object) -> bool:
    return callable(getattr(type(thing), "spending", None))


@with_usage("a session is opened on an account: `with session(account) as s:`")
def session(account: Account) -> Session:
    """Return a session on an account, for `with odograph.session(account) as s:`."""
    return Session(account)


def private(cost: Cost) -> Callable[[Callable[_P, _T]], Private[_P, _T]]:
    """Declare what a mechanism costs; calling it then charges the session that is open, before it runs.

    `cost` may be a function of some of the mechanism's settings, by their names (`lambda epsilon: PureDP(epsilon)`).
    Settings are the arguments that are keyword-only or have a default; others are data, which a cost must not see.
    """
    if _is_being_defined(cost):
        raise InvalidGuarantee(f"{_WITH_COST} (got the function {name_of(cost)} in place of a cost)")
    if isinstance(cost, type) or not (isinstance(cost, Guarantee) or callable(cost)):
        raise InvalidGuarantee(f"{_WITH_COST} (got {cost!r} in place of a cost)")

    def mark(mechanism: Callable[_P, _T]) -> Private[_P, _T]:
        if callable(cost) and not callable(mechanism):  # decorated without a cost, where that could not be seen
            raise InvalidGuarantee(f"{_WITH_COST} (got {type_text(mechanism)} in place of a mechanism)")
        return _Marked(mechanism, cost)

    return mark


def _is_being_defined(function: object) -> bool:
    """Whether the caller of `private` decorates this function at the moment, and not one with this as its cost."""
    wrapped = inspect.unwrap(function) if callable(function) else function
    code, caller = getattr(wrapped, "__code__", None), inspect.currentframe()
    for _ in range(2):
        caller = caller and caller.f_back
    if code is None or caller is None or code.co_name == "<lambda>" or code.co_filename != caller.f_code.co_filename:
        return False
    # A decorator's line is after the first of its function and before the last, and the function has no name yet. A
    # cost was defined elsewhere; typed into Python, each statement has the same file and begins at line 1.
    last = max(line or 0 for _, _, line in code.co_lines())
    named = any(names.get(code.co_name) is function for names in (caller.f_locals, caller.f_globals))
    return bool(code.co_firstlineno <= caller.f_lineno <= last) and not named


class _Marked:
    """A mechanism and its cost."""

    def __init__(self, mechanism: Callable[..., Any], cost: Cost) -> None:
        if not isinstance(cost, Guarantee) and not callable(cost):
            raise InvalidGuarantee(f"private(cost=...) takes a guarantee or a function to one, not {cost!r}")
        functools.update_wrapper(self, mechanism)
        self.mechanism = mechanism
        self.cost = cost

    def __get__(self, instance: object, owner: type | None = None) -> _Marked:
        # A function is bound to an instance when it is looked up there; so is a mechanism that is a method.
        return self if instance is None else _Marked(self.mechanism.__get__(instance, owner), self.cost)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the mechanism answers
        opened = _OPEN.get()
        if not opened:
            raise UnprovenComposition(
                f"no session is open here, so nothing would pay for {self.mechanism.__name__}: call it inside"
                " `with odograph.session(account) as s:`. A new thread begins without one: use s.run(...) there, or"
                " asyncio.to_thread, which keeps it"
            )
        return opened[-1].run(self, *args, **kwargs)


def _settings(
    mechanism: Callable[..., Any], cost: Callable[..., Guarantee], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the mechanism's settings that the cost asks for by name, however they were passed, defaults too."""
    try:
        signature = inspect.signature(mechanism)
    except (TypeError, ValueError) as problem:
        raise InvalidGuarantee(
            f"{name_of(mechanism)} does not tell its arguments, so its cost must be a guarantee"
        ) from problem
    bound = _bound(signature, mechanism, args, kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= bound.arguments[name]
        elif parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.default is not inspect.Parameter.empty:
            given[name] = bound.arguments[name]
    asked = inspect.signature(cost).parameters
    if missing := [name for name in asked if name not in given]:
        raise InvalidGuarantee(
            f"the cost of {name_of(mechanism)} asks for {missing[0]!r}, which is not a setting of it: settings are"
            " keyword-only or have a default, so that a cost cannot look at the data"
        )
    return {name: given[name] for name in asked}


def _check_arguments(mechanism: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if the mechanism cannot take its arguments; one that does not tell what it takes is believed."""
    try:
        # Its own arguments: a wrapper may add some to those of what it wraps.
        signature = inspect.signature(mechanism, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    _bound(signature, mechanism, args, kwargs)


def _bound(
    signature: inspect.Signature, mechanism: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise InvalidGuarantee(
            f"{name_of(mechanism)} does not take these arguments ({problem}); nothing was charged"
        ) from problem


def _unfinished(answer: object, *, askable: bool = False) -> str:
    """Return the kind of the first thing in an answer that would go on answering; empty if there is none.

    With `askable`, functions too: those of a mechanism that is open.
    """
    if isinstance(answer, _LAZY) or is_interactive(answer) or (askable and _can_be_asked(answer)):
        if isinstance(answer, Coroutine):
            answer.close()  # or Python would warn that it was never awaited
        return type(answer).__name__
    if not isinstance(answer, _HOLDERS):
        return ""
    parts = [*answer.values()] if isinstance(answer, dict) else [*answer]
    # One of each type is enough to look at, but for types that hold others: a million numbers have one type.
    some = {type(part): part for part in parts if not isinstance(part, _HOLDERS)}
    some_or_held = [*some.values(), *(part for part in parts if isinstance(part, _HOLDERS))]
    return next(filter(None, (_unfinished(part, askable=askable) for part in some_or_held)), "")


def _covers(account: Account | None, given: Guarantee, own: Guarantee) -> bool:
    """Whether a cost charges at least as much as another on every meter, here and above.

    A meter on which the other has no price is one that the given cost must have none on either.
    """
    while account is not None:
        asked = account.compiled.price(given).amounts
        try:
            proven = account.compiled.price(own).amounts
        except UnprovenComposition:
            return False
        if any(a is not None and (b is None or a < b) for a, b in zip(asked, proven, strict=True)):
            return False
        account = account.parent
    return True


def _as_written(cost: Guarantee) -> Guarantee:
    """Return a cost with its numbers as the floats that people copy, which are then read as decimals."""
    if isinstance(cost, Interactive):
        return Interactive(_as_written(cost.cost))
    if isinstance(cost, DiscreteGaussian):
        (cost,) = cost.implies()  # what a map prints of such noise is its rho
    if isinstance(cost, PureDP | ApproxDP | ZCDP):
        return type(cost)(*(float(getattr(cost, name)) for name in cost.__match_args__))
    return cost


def _not_callable(mechanism: object) -> InvalidGuarantee:
    kind = type(mechanism)
    return InvalidGuarantee(
        f"mechanism must be callable, such as a function (got {type_text(mechanism)}); nothing was charged"
        + _MEANT.get(kind.__module__.partition(".")[0], "")
    )


def _top(account: Account) -> Account:
    while (above := account.parent) is not None:
        account = above
    return account


def _refuse_lazy(mechanism: Callable[..., Any], guarantee: Guarantee, name: str) -> None:
    lazy = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if isinstance(guarantee, Interactive) or any(check(mechanism) for check in lazy):
        raise UnprovenComposition(
            f"{name} answers piece by piece or later (a generator, a coroutine, an interactive measurement), which a"
            f" run does not cover; nothing was charged. {_INSTEAD}"
        )
