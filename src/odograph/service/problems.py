"""Errors as problem+json responses: status and code from the error table, and messages that disclose nothing."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, TypeAlias

from odograph.errors import (
    ERROR_TABLE,
    AccountClosed,
    AccountNotFound,
    BadRequest,
    BudgetExceeded,
    EntryNotFound,
    IdempotencyConflict,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    OdographError,
    OutcomeUnknown,
    RateLimited,
    ReservationNotFound,
    ServiceUnavailable,
    UnprovenComposition,
    listed_as,
)
from odograph.service.auth import Caller
from odograph.service.schemas import Problem
from odograph.service.visibility import NO_THEOREM, decision_form

__all__ = [
    "BOUND_MESSAGES",
    "PROBLEM",
    "BadDocument",
    "HttpProblem",
    "NotEmpty",
    "PopulationUnusable",
    "TooFast",
    "is_unusable",
    "operator_message",
    "problem_of",
    "unexpected_problem",
]

PROBLEM: Final = b"application/problem+json"
_MAX_DETAIL: Final = 2000  # characters
# For a caller bound to some accounts: the original messages could name another account or disclose its policy.
BOUND_MESSAGES: Final[dict[type[OdographError], str]] = {
    LedgerNotFound: "no such account, or this key has no access to it",
    AccountNotFound: "no such account, or this key has no access to it",
    EntryNotFound: "no such entry, or this key has no access to its account",
    ReservationNotFound: "no such reservation, or this key has no access to its accounts",
    AccountClosed: "one of the accounts is closed and takes no new charges",
    IdempotencyConflict: (
        "the idempotency key was used before for another request, perhaps of another account: all accounts of a"
        " principal share its keys; use another key"
    ),
    LedgerCorrupt: "the ledger is damaged; report it to its owner",
    UnprovenComposition: NO_THEOREM,
}
# Used for every caller: what does not exist and what the caller may not see must be indistinguishable.
_FOR_EVERY_CALLER: Final = (LedgerNotFound, AccountNotFound, EntryNotFound, ReservationNotFound)
# The original messages are for the operator: they may quote a database, a disk or a file.
LEDGER_MESSAGES: Final[dict[type[OdographError], str]] = {
    LedgerBusy: "the ledger is busy, or cannot be reached or written at the moment; try again",
    OutcomeUnknown: "the ledger did not respond; ask again with the same key to know the outcome",
    ServiceUnavailable: "the ledger cannot be reached; try again",
    LedgerError: "the ledger cannot be used; the service's log has the reason",
}
_UNEXPECTED_DETAIL: Final = "an unexpected error occurred in the service; its log has details under the request id"


class HttpProblem(BadRequest):
    """A request refused with an HTTP status of its own, and perhaps headers."""

    def __init__(self, status: int, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class BadDocument(LedgerCorrupt):
    """An uploaded checkpoint or export is invalid; the ledger of this service is not affected."""

    status = 422


class NotEmpty(LedgerError):
    """An export can only be imported into an empty ledger."""

    status = 409


class PopulationUnusable(LedgerError):
    """The files of a population cannot be used; the ledger and all accounts are not affected."""

    status = 500


class TooFast(RateLimited):
    """An API key exceeded its rate limit; `seconds` is when to try again."""

    def __init__(self, seconds: float, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(f"this API key exceeded its rate limit; try again in {seconds:.3g} seconds")
        self.seconds = seconds
        self.headers = headers


_OwnStatus: TypeAlias = HttpProblem | BadDocument | NotEmpty | PopulationUnusable


def problem_of(error: OdographError, caller: Caller | None, request_id: str = "") -> Problem:
    """Return the problem that this caller may see for an error."""
    listed = listed_as(error)
    row = ERROR_TABLE[listed]
    status = error.status if isinstance(error, _OwnStatus) else row.status
    decision = decision_form(error.decision) if isinstance(error, BudgetExceeded) else None
    bound = caller is not None and caller.accounts is not None
    general = [
        text for cls, text in BOUND_MESSAGES.items() if isinstance(error, cls) and (bound or cls in _FOR_EVERY_CALLER)
    ]
    if general:
        detail = general[0]
    elif is_unusable(error):
        repeat = f" (key {error.key!r})" if isinstance(error, OutcomeUnknown) and error.key else ""
        detail = LEDGER_MESSAGES[listed] + repeat
    else:
        detail = str(error)[:_MAX_DETAIL]
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=listed.__name__,
        detail=detail,
        charged=error.charged,
        retryable=row.retryable,
        request_id=request_id,
        decision=decision,
    )


def is_unusable(error: OdographError) -> bool:
    """Return whether an error concerns the ledger as a whole rather than the request."""
    return listed_as(error) in LEDGER_MESSAGES and not isinstance(error, _OwnStatus)


def operator_message(error: OdographError) -> str:
    """Return the message of an error for the service's log, which never has an idempotency key."""
    return error.message if isinstance(error, OutcomeUnknown) else str(error)


def unexpected_problem(request_id: str) -> Problem:
    """Return the problem for an unexpected exception, without details."""
    return Problem(
        title="Internal Server Error",
        status=500,
        code="OdographError",
        detail=_UNEXPECTED_DETAIL,
        charged=None,  # it may have happened after the commit
        request_id=request_id,
    )
