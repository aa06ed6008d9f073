"""Privacy filters and odometers for fully adaptive analysis.

Names are loaded when they are first used, so that `import odograph` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from odograph import errors
    from odograph.account import Account
    from odograph.accountant import Accountant
    from odograph.compile import compile_policy
    from odograph.connection import aconnect, connect
    from odograph.core import filters, gate, guarantees, mechanisms, odometers, planning
    from odograph.core.gate import Decision
    from odograph.core.guarantees import GDP, RDP, ZCDP, ApproxDP, Guarantee, ProbDP, PureDP
    from odograph.core.mechanisms import (
        exponential,
        gaussian,
        laplace,
        parallel,
        randomized_response,
        subsampled_gaussian,
    )
    from odograph.core.policy import Policy
    from odograph.display import progress_bar
    from odograph.errors import BudgetExceeded, IdempotencyConflict, OdographError, UnprovenComposition
    from odograph.integrations import cost_of
    from odograph.ledger.ledger import Ledger, LedgerAccount
    from odograph.ledger.results import Checkpoint, Receipt, Reservation
    from odograph.population.population import Population
    from odograph.population.prices import Prices, vectorized_price
    from odograph.sessions import Session, private, session
    from odograph.training import dpsgd_policy

    __version__: str

__all__ = [
    "GDP",
    "RDP",
    "ZCDP",
    "Account",
    "Accountant",
    "ApproxDP",
    "BudgetExceeded",
    "Checkpoint",
    "Decision",
    "Guarantee",
    "IdempotencyConflict",
    "Ledger",
    "LedgerAccount",
    "OdographError",
    "Policy",
    "Population",
    "Prices",
    "ProbDP",
    "PureDP",
    "Receipt",
    "Reservation",
    "Session",
    "UnprovenComposition",
    "aconnect",
    "compile_policy",
    "connect",
    "cost_of",
    "dpsgd_policy",
    "errors",
    "exponential",
    "filters",
    "gate",
    "gaussian",
    "guarantees",
    "laplace",
    "mechanisms",
    "odometers",
    "parallel",
    "planning",
    "private",
    "progress_bar",
    "randomized_response",
    "session",
    "subsampled_gaussian",
    "vectorized_price",
]

_MODULES = {
    "errors": "odograph.errors",
    "filters": "odograph.core.filters",
    "gate": "odograph.core.gate",
    "guarantees": "odograph.core.guarantees",
    "mechanisms": "odograph.core.mechanisms",
    "odometers": "odograph.core.odometers",
    "planning": "odograph.core.planning",
}
_DEFINED_IN = {
    "GDP": "odograph.core.guarantees",
    "RDP": "odograph.core.guarantees",
    "ZCDP": "odograph.core.guarantees",
    "Account": "odograph.account",
    "Accountant": "odograph.accountant",
    "ApproxDP": "odograph.core.guarantees",
    "BudgetExceeded": "odograph.errors",
    "Checkpoint": "odograph.ledger.results",
    "Decision": "odograph.core.gate",
    "Guarantee": "odograph.core.guarantees",
    "IdempotencyConflict": "odograph.errors",
    "Ledger": "odograph.ledger.ledger",
    "LedgerAccount": "odograph.ledger.ledger",
    "OdographError": "odograph.errors",
    "Policy": "odograph.core.policy",
    "Population": "odograph.population.population",
    "Prices": "odograph.population.prices",
    "ProbDP": "odograph.core.guarantees",
    "PureDP": "odograph.core.guarantees",
    "Receipt": "odograph.ledger.results",
    "Reservation": "odograph.ledger.results",
    "Session": "odograph.sessions",
    "UnprovenComposition": "odograph.errors",
    "aconnect": "odograph.connection",
    "compile_policy": "odograph.compile",
    "connect": "odograph.connection",
    "cost_of": "odograph.integrations",
    "dpsgd_policy": "odograph.training",
    "exponential": "odograph.core.mechanisms",
    "gaussian": "odograph.core.mechanisms",
    "laplace": "odograph.core.mechanisms",
    "parallel": "odograph.core.mechanisms",
    "private": "odograph.sessions",
    "progress_bar": "odograph.display",
    "randomized_response": "odograph.core.mechanisms",
    "session": "odograph.sessions",
    "subsampled_gaussian": "odograph.core.mechanisms",
    "vectorized_price": "odograph.population.prices",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  any of the names above
    """Load a name, or the version, when it is first used."""
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _DEFINED_IN:
        value = getattr(import_module(_DEFINED_IN[name]), name)
    elif name == "__version__":
        value = import_module("importlib.metadata").version("odograph")
    else:
        near = import_module("odograph.errors").did_you_mean(name, __all__)
        raise AttributeError(f"module 'odograph' has no attribute {name!r}{near}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
