"""Everything Odograph raises, as one tree and one table; and imports of optional dependencies.

OdographError              `.charged` says what became of the charge that was asked for
├── InvalidArgument        an argument is not usable (the field and the value are named)
│   ├── InvalidGuarantee   ... and it is a guarantee, or something that must be one
│   └── InvalidPolicy      ... and it is a policy that contradicts itself or asks for the impossible
├── UnprovenComposition    no theorem covers the request under this policy (the filter that would is named)
├── BudgetExceeded         the request does not fit; `.decision` says what would
├── MissingExtra           an optional dependency is not installed (the install line is printed)
├── OutcomeUnknown         the connection or disk was lost during the commit; ask again with the same key
├── LedgerError
│   ├── LedgerNotFound
│   ├── AccountNotFound
│   ├── AccountExists
│   ├── AccountClosed
│   ├── EntryNotFound
│   ├── ReservationNotFound
│   ├── ReservationResolved
│   ├── IdempotencyConflict
│   ├── LedgerBusy
│   │   └── LedgerUnreachable
│   └── LedgerCorrupt
└── RemoteError
    ├── BadRequest
    ├── KeyNotFound
    ├── NotAuthenticated
    ├── NotPermitted
    ├── RateLimited
    └── ServiceUnavailable
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    from odograph.core.gate import Decision

__all__ = [
    "ERROR_TABLE",
    "AccountClosed",
    "AccountExists",
    "AccountNotFound",
    "BadRequest",
    "BudgetExceeded",
    "EntryNotFound",
    "ErrorRow",
    "IdempotencyConflict",
    "InvalidArgument",
    "InvalidGuarantee",
    "InvalidPolicy",
    "KeyNotFound",
    "LargeDeltaWarning",
    "LedgerBusy",
    "LedgerCorrupt",
    "LedgerError",
    "LedgerNotFound",
    "LedgerUnreachable",
    "MissingExtra",
    "NotAuthenticated",
    "NotPermitted",
    "OdographError",
    "OutcomeUnknown",
    "RateLimited",
    "RemoteError",
    "ReservationNotFound",
    "ReservationResolved",
    "ServiceUnavailable",
    "UnprovenComposition",
    "did_you_mean",
    "explain",
    "listed_as",
    "load_extra",
    "type_text",
    "with_usage",
    "with_usages",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


class OdographError(Exception):
    """The base of every error that Odograph raises on purpose.

    `charged` says what became of the charge that was asked for: False, nothing was charged; True, it is charged;
    None, that is not known. It is False for everything but `OutcomeUnknown`, and for calls that charge nothing.
    """

    charged: bool | None = False

    def __reduce__(self) -> tuple[Any, ...]:
        # Worker processes send errors back as pickles. Python's default would call `__init__` with the message alone.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[OdographError], args: tuple[Any, ...], fields: dict[str, Any]) -> OdographError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(fields)
    return error


class InvalidArgument(OdographError, ValueError):
    """An argument is not usable: out of range, of another type, or in contradiction to another."""


class InvalidGuarantee(InvalidArgument):
    """A guarantee, or the cost of a mechanism, is not usable."""


class InvalidPolicy(InvalidArgument):
    """A policy contradicts itself or promises what nothing can keep."""


class UnprovenComposition(OdographError):
    """No theorem covers this request under this policy."""


class BudgetExceeded(OdographError):
    """The request does not fit what is left; the account stays usable."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision))
        self.decision = decision


class MissingExtra(OdographError, ImportError):
    """An optional dependency is not installed."""


class OutcomeUnknown(OdographError):
    """The disk, the database or the connection was lost during the commit, so it may or may not have happened.

    The same request with the same `key` tells which, and charges nothing twice. `charged` is None, or True where the
    charge is known to be written and only its receipt could not be read.
    """

    charged: bool | None = None

    def __init__(self, message: str, *, key: str = "", charged: bool | None = None) -> None:
        super().__init__(f"{message} (key {key!r})" if key else message)
        self.message = message
        self.key = key
        self.charged = charged


class LedgerError(OdographError):
    """The base of errors about durable accounts."""


class LedgerNotFound(LedgerError):
    """There is no ledger at this place, or it holds no accounts yet."""


class AccountNotFound(LedgerError):
    """There is no account of that name that the caller may see."""


class AccountExists(LedgerError):
    """An account of that name exists; a new policy needs a new account."""


class AccountClosed(LedgerError):
    """The account takes no new charges."""


class EntryNotFound(LedgerError):
    """There is no entry of that id."""


class ReservationNotFound(LedgerError):
    """There is no reservation of that identity."""


class ReservationResolved(LedgerError):
    """The reservation was committed or voided already."""


class IdempotencyConflict(LedgerError):
    """The key was used before, for a different request."""


class LedgerBusy(LedgerError):
    """The store could not be reached in time; try again."""


class LedgerUnreachable(LedgerBusy):
    """The database server cannot be reached, or refuses the connection; nothing was sent to it."""


class LedgerCorrupt(LedgerError):
    """An entry does not follow from the ones before it."""


class RemoteError(OdographError):
    """The base of errors about a remote service."""


class BadRequest(RemoteError):
    """The service could not read the request."""


class KeyNotFound(RemoteError):
    """There is no API key of that identity."""


class NotAuthenticated(RemoteError):
    """The key is missing, unknown, revoked or expired."""


class NotPermitted(RemoteError):
    """The key is known and may not do this."""


class RateLimited(RemoteError):
    """The key was used too often in a short time; try again later."""


class ServiceUnavailable(RemoteError):
    """The service could not be reached, so the request was not sent; try again."""


class LargeDeltaWarning(UserWarning):
    """The delta of a policy is so large that the promise may mean nothing: it is about one person in 1/delta."""


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return the end of a message about a name that is not known: the nearest one that is, or nothing."""
    known = {one.casefold(): one for one in names}
    near = get_close_matches(name.casefold(), known, n=1) if isinstance(name, str) else []
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def with_usage(usage: str) -> Callable[[_F], _F]:
    """Add to Python's TypeError about arguments that do not fit a function how it is called."""

    def decorate(function: _F) -> _F:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the function
            try:
                return function(*args, **kwargs)
            except TypeError as problem:
                if _takes(function, args, kwargs):  # it was raised inside the function
                    raise
                raise TypeError(f"{problem}: {usage}") from None

        return cast("_F", call)

    return decorate


def _takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def with_usages(usages: Mapping[str, str]) -> Callable[[type[_T]], type[_T]]:
    """Do so for the methods that a class defines itself, by their names."""

    def decorate(cls: type[_T]) -> type[_T]:
        for name in usages.keys() & vars(cls).keys():
            setattr(cls, name, with_usage(usages[name])(vars(cls)[name]))
        return cls

    return decorate


def type_text(value: object) -> str:
    """Return what a value is, for a message that does not show it: an int, the class PureDP, None."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].casefold() in 'aeio' else 'a'} {name}"


def explain(problem: Exception) -> str:
    """Return what is wrong with a document that could not be read, without the text of errors of other libraries."""
    return str(problem) if isinstance(problem, OdographError) else "a field is missing or of the wrong type"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one error leaves the process: over HTTP, from the command line, to a retrying caller."""

    status: int
    exit_code: int
    retryable: bool


# Exit codes: 2 wrong input, 3 refused, 4 no theorem or no permission, 5 state of the ledger, 6 try again.
ERROR_TABLE: dict[type[OdographError], ErrorRow] = {
    OdographError: ErrorRow(status=500, exit_code=1, retryable=False),
    InvalidArgument: ErrorRow(status=422, exit_code=2, retryable=False),
    InvalidGuarantee: ErrorRow(status=422, exit_code=2, retryable=False),
    InvalidPolicy: ErrorRow(status=422, exit_code=2, retryable=False),
    UnprovenComposition: ErrorRow(status=422, exit_code=4, retryable=False),
    BudgetExceeded: ErrorRow(status=409, exit_code=3, retryable=False),
    MissingExtra: ErrorRow(status=501, exit_code=2, retryable=False),
    OutcomeUnknown: ErrorRow(status=504, exit_code=6, retryable=True),
    LedgerError: ErrorRow(status=500, exit_code=5, retryable=False),
    LedgerNotFound: ErrorRow(status=404, exit_code=5, retryable=False),
    AccountNotFound: ErrorRow(status=404, exit_code=5, retryable=False),
    AccountExists: ErrorRow(status=409, exit_code=5, retryable=False),
    AccountClosed: ErrorRow(status=409, exit_code=5, retryable=False),
    EntryNotFound: ErrorRow(status=404, exit_code=5, retryable=False),
    ReservationNotFound: ErrorRow(status=404, exit_code=5, retryable=False),
    ReservationResolved: ErrorRow(status=409, exit_code=5, retryable=False),
    IdempotencyConflict: ErrorRow(status=422, exit_code=5, retryable=False),
    LedgerBusy: ErrorRow(status=503, exit_code=6, retryable=True),
    LedgerUnreachable: ErrorRow(status=503, exit_code=6, retryable=True),
    LedgerCorrupt: ErrorRow(status=500, exit_code=5, retryable=False),
    RemoteError: ErrorRow(status=502, exit_code=6, retryable=False),
    BadRequest: ErrorRow(status=400, exit_code=2, retryable=False),
    KeyNotFound: ErrorRow(status=404, exit_code=5, retryable=False),
    NotAuthenticated: ErrorRow(status=401, exit_code=4, retryable=False),
    NotPermitted: ErrorRow(status=403, exit_code=4, retryable=False),
    RateLimited: ErrorRow(status=429, exit_code=6, retryable=True),
    ServiceUnavailable: ErrorRow(status=503, exit_code=6, retryable=True),
}


def listed_as(error: OdographError) -> type[OdographError]:
    """Return the nearest class of an error that the error table lists."""
    return next(cls for cls in type(error).__mro__ if cls in ERROR_TABLE)


_TRAINING: Final = "Opacus is not installed: install torch, then pip install 'odograph[training]'"
_MISSING: Final = {
    "diffprivlib": "diffprivlib is not installed: pip install 'odograph[diffprivlib]'",
    "dp_accounting": "dp-accounting is not installed: pip install 'odograph[accounting]'",
    "duckdb": "this engine needs DuckDB: pip install 'odograph[population]'",
    "fsspec": "a population in an object store needs fsspec: pip install 'odograph[objects]'",
    "httpx": "a ledger behind a service needs httpx: pip install 'odograph[client]'",
    "matplotlib": "figures need matplotlib: pip install 'odograph[figures]'",
    "opacus": _TRAINING,
    "opendp": "OpenDP is not installed: pip install 'odograph[mechanisms]'",
    "pandas": "a history as a data frame needs pandas: pip install 'odograph[tables]'",
    "psycopg": "a ledger in PostgreSQL needs psycopg: pip install 'odograph[postgres]'",
    "pyarrow": "Arrow tables and Parquet files need PyArrow: pip install 'odograph[tables]'",
    "pyspark": "this engine needs Spark, and Java: pip install 'odograph[population]'",
    "s3fs": "a population at an s3:// address needs s3fs: pip install 'odograph[objects]'",
    "starlette": "the service needs further packages: pip install 'odograph[service]'",
    "statsmodels": "the demo needs statsmodels for its data: pip install 'odograph[demo]'",
    "tmlt": "Tumult is not installed: pip install 'odograph[tumult]', in a separate environment (it needs NumPy 1)",
    "torch": _TRAINING,
    "yaml": "a file in YAML needs PyYAML: pip install 'odograph[cli]'; JSON is read without it",
}


def load_extra(module: str) -> Any:  # noqa: ANN401  these libraries are untyped
    """Return a module of an optional dependency, or raise `MissingExtra` with the line that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as problem:
        raise MissingExtra(_MISSING[module.partition(".")[0]]) from problem
