"""Integrations: the guarantees of other libraries' objects, and a hook into each library.

Each library is imported only in its own file.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Final

from odograph.core.guarantees import Guarantee
from odograph.errors import InvalidGuarantee

__all__ = ["cost_of", "guarded", "is_interactive", "name_of", "states_cost"]

# Each library, and the module that knows its types.
_KNOWN: Final = {
    "diffprivlib": "odograph.integrations.diffprivlib",
    "dp_accounting": "odograph.integrations.dp_accounting",
    "opacus": "odograph.integrations.opacus",
    "opendp": "odograph.integrations.opendp",
    "tmlt": "odograph.integrations.tumult",
}
# The methods that run an object once, and so cost what it costs.
_RUNS: Final = {"diffprivlib": {"randomise"}, "opendp": {"__call__", "invoke"}, "tmlt": {"__call__"}}


def cost_of(thing: object, *, neighbors: str = "add-remove", settings: dict[str, Any] | None = None) -> Guarantee:
    """Return the guarantee of another library's measurement, event or budget.

    `settings` are further arguments of that library's own `cost_of` (OpenDP: `d_in`, `delta`); those that were used
    are removed from it.
    """
    if not states_cost(thing):
        raise InvalidGuarantee(
            f"the cost of {name_of(thing)} is unknown; pass cost=, such as cost=PureDP(0.1), or declare it with"
            " @private"
        )
    thing = _inner(thing)
    known = import_module(_KNOWN[_library(thing)])
    names = [name for name in known.SETTINGS if settings and name in settings]
    given = {name: settings.pop(name) for name in names} if settings else {}
    guarantee: Guarantee = known.cost_of(thing, neighbors=neighbors, **given)
    return guarantee


def states_cost(thing: object) -> bool:
    """Whether the cost of an object is known from its library, also if it is wrapped in a partial or bound method."""
    return bool(_library(_inner(thing)))


def _inner(thing: object) -> object:
    """Return the object that a partial, or a bound method that runs it, calls in the end."""
    if isinstance(thing, partial):
        return _inner(thing.func)
    if isinstance(thing, MethodType) and thing.__name__ in _RUNS.get(_library(thing.__self__), ()):
        return thing.__self__
    return thing


def _library(thing: object) -> str:
    """Return the known library that defines the object's type or one of its bases; an empty string if none does."""
    modules = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    return next((module for module in modules if module in _KNOWN), "")


def name_of(thing: object) -> str:
    """Return a name for messages: never a repr, which may show data that a partial or a bound method holds."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def is_interactive(answer: object) -> bool:
    """Whether an answer can itself be queried further, as the queryables and sessions of other libraries can."""
    return any(
        ("Queryable" in kind.__name__ or kind.__name__ in {"OnceFrame", "Session"})
        and kind.__module__.partition(".")[0] in {"opendp", "tmlt"}
        for kind in type(answer).__mro__
    )


def guarded(answer: Any) -> Any:  # noqa: ANN401  any answer
    """Return an answer of a library whose queries have to be checked with that check; any other as it is."""
    if is_interactive(answer) and _library(answer) == "opendp":
        return import_module(_KNOWN["opendp"]).guarded(answer)
    return answer
