"""Errors as they leave the service: problem+json, with the code from the error table, and nothing not meant."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from odograph.errors import (
    ERROR_TABLE,
    AccountClosed,
    AccountNotFound,
    BadRequest,
    BudgetExceeded,
    IdempotencyConflict,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    OdographError,
    RateLimited,
    ReservationNotFound,
    ServiceUnavailable,
    UnprovenComposition,
    listed_as,
)
from odograph.service.access import Caller
from odograph.service.answers import Problem
from odograph.service.views import decision_form

__all__ = [
    "GENERAL",
    "PROBLEM",
    "BadDocument",
    "HttpProblem",
    "NotEmpty",
    "TooFast",
    "is_unusable",
    "key_in",
    "problem_of",
    "unexpected",
]

PROBLEM: Final = b"application/problem+json"
_LONGEST: Final = 2000  # characters of a detail
# To one bound to accounts these messages could name another account, or tell its policy.
GENERAL: Final[dict[type[OdographError], str]] = {
    AccountNotFound: "there is no such account here, or this key does not open it; nothing was changed",
    ReservationNotFound: "there is no such reservation here, or this key does not open its accounts; nothing changed",
    AccountClosed: "an account that was asked is closed and takes no new charges; nothing was charged",
    IdempotencyConflict: "the key was used before for another request; nothing was charged. Use another key",
    LedgerCorrupt: "the ledger is damaged; nothing was charged. Tell its owner",
    UnprovenComposition: "no theorem covers a request of this kind here; nothing was charged. Ask the account's owner"
    " which kinds it takes",
}
# One that is not there and one that the caller may not see are told alike, to everybody.
_ALIKE: Final = (AccountNotFound, ReservationNotFound)
# Their messages are for the operator: they may hold what a database, a disk or a file said.
UNUSABLE: Final[dict[type[OdographError], str]] = {
    LedgerBusy: "the ledger is busy, or cannot be reached or written at the moment; nothing was charged. Try again",
    ServiceUnavailable: "the ledger did not answer; ask again with the same key to know the outcome",
    LedgerError: "the ledger cannot be used; nothing was charged. The service's log has the reason",
}
_UNSAID: Final = "something went wrong in the service; nothing more is said here, the log has the request id"


class HttpProblem(BadRequest):
    """A request that HTTP itself has a word for: its own status, and headers that go with it."""

    def __init__(self, status: int, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class BadDocument(LedgerCorrupt):
    """A checkpoint or a copy that somebody sent is none; the ledger here is not meant."""

    status = 422


class NotEmpty(LedgerError):
    """A copy can only be read into a new ledger."""

    status = 409


class TooFast(RateLimited):
    """A key that was used too often, and when to try again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"this key was used too often; nothing was changed. Try again in {seconds:.3g} seconds")
        self.seconds = seconds


def problem_of(error: OdographError, caller: Caller | None, request_id: str = "") -> Problem:
    """Return an error as it is told to this caller."""
    listed = listed_as(error)
    row = ERROR_TABLE[listed]
    status = error.status if isinstance(error, HttpProblem | BadDocument | NotEmpty) else row.status
    decision = decision_form(error.decision) if isinstance(error, BudgetExceeded) else None
    bound = caller is not None and caller.accounts is not None
    general = [text for cls, text in GENERAL.items() if isinstance(error, cls) and (bound or cls in _ALIKE)]
    if not general and is_unusable(error):
        general = [UNUSABLE[listed] + key_in(error)]
    detail = general[0] if general else str(error)[:_LONGEST]
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=listed.__name__,
        detail=detail,
        retryable=row.retryable,
        request_id=request_id,
        decision=decision,
    )


def is_unusable(error: OdographError) -> bool:
    """Say whether an error is about the ledger as a whole, and not about what was asked for."""
    return listed_as(error) in UNUSABLE and not isinstance(error, HttpProblem | BadDocument | NotEmpty)


def key_in(error: OdographError) -> str:
    """Return the end of a message that names the idempotency key to ask again with; "" if it names none."""
    _, named, key = str(error).rpartition(" (key ")
    return named + key if key.endswith(")") else ""


def unexpected(request_id: str) -> Problem:
    """Return what is said of an error that nobody expected: nothing."""
    return Problem(
        title="Internal Server Error", status=500, code="OdographError", detail=_UNSAID, request_id=request_id
    )
