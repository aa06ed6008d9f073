"""Sessions: charge, run, release, around any mechanism. What raises or is interrupted stays charged."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, Final, ParamSpec, Protocol, Self, TypeAlias, TypeVar

from odograph.account import Account, check_account
from odograph.core.guarantees import ZCDP, ApproxDP, DiscreteGaussian, Guarantee, PureDP
from odograph.errors import AccountClosed, InvalidArgument, InvalidGuarantee, UnprovenComposition
from odograph.integrations import cost_of, is_interactive, name_of, states_cost
from odograph.ledger.results import Reservation

__all__ = ["Cost", "Private", "Session", "private", "session"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)

# A guarantee, or a function from some of the mechanism's settings, by their names, to one.
Cost: TypeAlias = Guarantee | Callable[..., Guarantee]

_LAZY: Final = (Iterator, Awaitable, AsyncIterator)
_HOLDERS: Final = (dict, frozenset, list, set, tuple)
_WITH_COST: Final = "private needs the cost of what it decorates: write @odo.private(cost=odo.PureDP(0.1))"
# An OpenDP query and a diffprivlib mechanism have what is meant.
_MEANT: Final = {"opendp": ". Pass what its .resolve() returns", "diffprivlib": ". Pass its .randomise"}
_OPEN: ContextVar[tuple[Session, ...]] = ContextVar("odograph_sessions", default=())
_RUNNING: ContextVar[str] = ContextVar("odograph_running", default="")


class Private(Protocol[_P, _T_co]):
    """A mechanism that knows its cost, made by `@private`."""

    cost: Cost
    mechanism: Callable[..., Any]

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T_co:
        """Run in the session that is open."""
        ...


class Session:
    """An analyst's interaction with one account: each `run` is charged before the mechanism sees the data.

    One-shot mechanisms may overlap in threads; they count in the order of their admission. What is not proven is
    refused: a session inside a session of the same account, a run inside a running mechanism, and mechanisms that
    answer later (generators, coroutines, OpenDP's queryables), because their answers depend on when they are asked.
    A run in a thread that a mechanism starts looks like an overlap and is not recognized: do not do that.
    """

    def __init__(self, account: Account) -> None:
        check_account(account, "a session")
        self.account = account
        self._open = False

    def __enter__(self) -> Self:
        if _RUNNING.get():
            raise UnprovenComposition(f"a session cannot be opened inside the mechanism {_RUNNING.get()}")
        if any(_top(other.account) == _top(self.account) for other in _OPEN.get()):
            raise UnprovenComposition(
                "a session on this account is open already, and nested sessions are not proven: use the open one"
            )
        self._open = True
        _OPEN.set((*_OPEN.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        _OPEN.set(tuple(other for other in _OPEN.get() if other is not self))

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
        if not self._open:
            raise AccountClosed("this session is not open: use it inside `with odograph.session(account) as s:`")
        name = name_of(mechanism)
        if _RUNNING.get():
            raise UnprovenComposition(
                f"{name} was asked to run inside {_RUNNING.get()}: the cost of an inner run would depend on what was"
                " never released. Run one after the other"
            )
        mechanism, guarantee, trusted = self._priced(mechanism, cost, args, kwargs, trust_cost=trust_cost)
        _refuse_lazy(mechanism, name)
        _check_arguments(mechanism, args, kwargs)
        # In a context of its own, which ends with the mechanism however it ends.
        inside = copy_context()
        inside.run(_RUNNING.set, name)
        label = note or name
        label = f"{label}; {trusted:.1000}" if trusted else label
        with self.account.spending(guarantee, key=key, note=label) as charge:
            try:
                answer = inside.run(mechanism, *args, **kwargs)
            except BaseException as problem:
                problem.add_note(self._charged(charge, guarantee, name, key))
                raise
        if unfinished := _unfinished(answer):
            raise UnprovenComposition(
                f"{name} returned something that answers later ({unfinished}), and that is not covered; it"
                " was charged and is not released. Return the finished answer"
            )
        return answer

    def _priced(
        self,
        mechanism: Callable[..., _T],
        cost: Cost | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        trust_cost: bool,
    ) -> tuple[Callable[..., _T], Guarantee, str]:
        """Return what to call, what it costs, and what the entry says of a cost that was trusted.

        Takes a library's own settings out of `kwargs`.
        """
        if isinstance(mechanism, _Marked):
            if cost is not None:
                raise InvalidGuarantee(f"{name_of(mechanism)} declares its own cost; leave cost= out")
            cost, mechanism = mechanism.cost, mechanism.mechanism
        if not callable(mechanism):
            raise _not_callable(mechanism)
        if not isinstance(trust_cost, bool) or (trust_cost and cost is None):
            raise InvalidArgument(f"trust_cost must be True or False, and True only with cost= (got {trust_cost!r})")
        if cost is None:
            own = cost_of(mechanism, neighbors=self.account.policy.neighbors, settings=kwargs)
            return mechanism, own, ""
        if not isinstance(cost, Guarantee) and callable(cost):
            cost = cost(**_settings(mechanism, cost, args, kwargs))
        if not isinstance(cost, Guarantee):
            raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got a {name_of(cost)})")
        doubt = self._doubt(mechanism, cost, kwargs) if states_cost(mechanism) else None
        if doubt is None:
            return mechanism, cost, ""
        if not trust_cost:
            raise type(doubt)(
                f"{doubt}; nothing was charged. Leave cost= out to charge what the measurement states. To charge"
                f" {cost} all the same, pass trust_cost=True, and the entry will say so"
            )
        return mechanism, cost, f"trust_cost=True: {doubt}"

    def _doubt(
        self, mechanism: object, given: Guarantee, kwargs: dict[str, Any]
    ) -> InvalidArgument | UnprovenComposition | None:
        """Return why a given cost may be too low for a measurement that states its own; None if it is not."""
        try:
            own = cost_of(mechanism, neighbors=self.account.policy.neighbors, settings=kwargs)
        except (InvalidArgument, UnprovenComposition) as problem:
            return type(problem)(f"cost={given} cannot be compared with what the measurement states ({problem})")
        # A cost that is written as the float which the library gives is read as a decimal, which may be half a
        # rounding below that float.
        if given == own or any(_covers(self.account, given, least) for least in (own, _as_written(own))):
            return None
        return InvalidGuarantee(f"cost={given} is less, on some meter, than what the measurement states, {own}")

    def _charged(self, charge: Reservation, guarantee: Guarantee, name: str, key: str | None) -> str:
        """Return what stays charged when a mechanism raises, under which entry, and how to go on."""
        receipt, account = charge.receipt, self.account.name
        to = f" to {account!r}" if account else ""
        under = f", key {receipt.key}" if receipt.key else ""
        return (
            f"odograph: {guarantee} was charged{to} (entry {receipt.id}{under}) before {name} raised, and stays"
            " charged, because noise may have been drawn from the data. Correct the mechanism and run it again"
            f"{'' if key is None else ' under another key'}: that is charged again"
        )


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

    def mark(mechanism: Callable[_P, _T]) -> Private[_P, _T]:
        if callable(cost) and not callable(mechanism):  # decorated without a cost, where that could not be seen
            raise InvalidGuarantee(f"{_WITH_COST} (got a {type(mechanism).__name__} in place of a mechanism)")
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
                f"no session is open, so nothing would pay for {self.mechanism.__name__}: call it inside"
                " `with odograph.session(account):`"
            )
        return opened[-1].run(self, *args, **kwargs)


def _settings(
    mechanism: Callable[..., Any], cost: Callable[..., Guarantee], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the mechanism's settings that the cost asks for by name, however they were passed, defaults too."""
    try:
        signature = inspect.signature(mechanism)
    except ValueError as problem:
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


def _unfinished(answer: object) -> str:
    """Return the kind of the first thing in an answer that would go on answering; empty if there is none."""
    if isinstance(answer, _LAZY) or is_interactive(answer):
        if isinstance(answer, Coroutine):
            answer.close()  # or Python would warn that it was never awaited
        return type(answer).__name__
    if not isinstance(answer, _HOLDERS):
        return ""
    parts = [*answer.values()] if isinstance(answer, dict) else [*answer]
    # One of each type is enough to look at, but for types that hold others: a million numbers have one type.
    some = {type(part): part for part in parts if not isinstance(part, _HOLDERS)}
    some_or_held = [*some.values(), *(part for part in parts if isinstance(part, _HOLDERS))]
    return next(filter(None, map(_unfinished, some_or_held)), "")


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
    if isinstance(cost, DiscreteGaussian):
        (cost,) = cost.implies()  # what a map prints of such noise is its rho
    if isinstance(cost, PureDP | ApproxDP | ZCDP):
        return type(cost)(*(float(getattr(cost, name)) for name in cost.__match_args__))
    return cost


def _not_callable(mechanism: object) -> InvalidGuarantee:
    kind = type(mechanism)
    return InvalidGuarantee(
        f"mechanism must be callable, such as a function (got a {kind.__name__}); nothing was charged"
        + _MEANT.get(kind.__module__.partition(".")[0], "")
    )


def _top(account: Account) -> Account:
    while (above := account.parent) is not None:
        account = above
    return account


def _refuse_lazy(mechanism: Callable[..., Any], name: str) -> None:
    lazy = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(check(mechanism) for check in lazy):
        raise UnprovenComposition(
            f"{name} answers piece by piece or later (a generator or coroutine), and interactive mechanisms are not"
            " covered; nothing was charged. Return the finished answer"
        )
