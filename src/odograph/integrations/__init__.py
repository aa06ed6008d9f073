"""Other libraries' things to guarantees, and one hook into each; a library is imported only in its own file."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import MethodType
from typing import Any, Final

from odograph.core.guarantees import Guarantee
from odograph.errors import InvalidGuarantee

__all__ = ["cost_of", "is_interactive", "name_of", "states_cost"]

# The library in which a thing's type is defined, and the file here that knows it.
_KNOWN: Final = {
    "diffprivlib": "odograph.integrations.diffprivlib",
    "dp_accounting": "odograph.integrations.dp_events",
    "opacus": "odograph.integrations.opacus",
    "opendp": "odograph.integrations.opendp",
    "tmlt": "odograph.integrations.tumult",
}
# The methods that run a thing once, and so cost what it costs.
_RUNS: Final = {"diffprivlib": {"randomise"}, "opendp": {"__call__", "invoke"}, "tmlt": {"__call__"}}


def cost_of(thing: object, *, neighbours: str = "add-remove", settings: dict[str, Any] | None = None) -> Guarantee:
    """Return what another library's measurement, event or budget guarantees.

    `settings` holds what the library's own `cost_of` takes beside the thing (OpenDP: `d_in`, `delta`); what was used
    is removed from it.
    """
    if not states_cost(thing):
        raise InvalidGuarantee(
            f"{name_of(thing)} does not say what it costs; pass cost=, such as cost=PureDP(0.1), or declare it with"
            " @private"
        )
    thing = _inner(thing)
    known = import_module(_KNOWN[_library(thing)])
    names = [name for name in known.SETTINGS if settings and name in settings]
    given = {name: settings.pop(name) for name in names} if settings else {}
    guarantee: Guarantee = known.cost_of(thing, neighbours=neighbours, **given)
    return guarantee


def states_cost(thing: object) -> bool:
    """Whether the thing is of a library that is asked what its things cost, or a way to call one of these."""
    return bool(_library(_inner(thing)))


def _inner(thing: object) -> object:
    """Return what is called in the end: by a partial, and by a bound method that runs its object."""
    if isinstance(thing, partial):
        return _inner(thing.func)
    if isinstance(thing, MethodType) and thing.__name__ in _RUNS.get(_library(thing.__self__), ()):
        return thing.__self__
    return thing


def _library(thing: object) -> str:
    """Return the known library in which the thing's type, or one that it inherits from, is defined; else nothing."""
    modules = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    return next((module for module in modules if module in _KNOWN), "")


def name_of(thing: object) -> str:
    """Return a name for a message: never a repr, which may show the data that a partial or a bound method holds."""
    return str(getattr(thing, "__name__", type(thing).__name__))


def is_interactive(answer: object) -> bool:
    """Whether an answer goes on answering from the data, as the queryables and sessions of other libraries do."""
    kind = type(answer)
    named = "Queryable" in kind.__name__ or kind.__name__ in {"OnceFrame", "Session"}
    return named and kind.__module__.partition(".")[0] in {"opendp", "tmlt"}
