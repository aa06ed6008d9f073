"""The table of routes: handlers, verbs, and the schemas of what they read and return."""

from __future__ import annotations

from typing import Final

from odograph.service import request_schemas, response_schemas
from odograph.service.endpoint import Route
from odograph.service.routes import accounts, admin, charges

__all__ = ["ROUTES"]

_ACCOUNT: Final = "/v1/accounts/{name}"
_RESERVATION: Final = "/v1/reservations/{reservation}"

ROUTES: Final = (
    Route(
        "POST",
        f"{_ACCOUNT}/spends",
        charges.spend,
        "spend",
        response_schemas.ReceiptForm,
        form=request_schemas.SpendForm,
        status=201,
        repeatable=True,
        needs_idempotency_key=True,
    ),
    Route(
        "POST", "/v1/batches", charges.batch, "spend", response_schemas.BatchResults, form=request_schemas.BatchForm
    ),
    Route(
        "POST",
        f"{_ACCOUNT}/reservations",
        charges.reserve,
        "reserve",
        response_schemas.ReceiptForm,
        form=request_schemas.ReserveForm,
        status=201,
        repeatable=True,
        needs_idempotency_key=True,
    ),
    Route(
        "POST",
        f"{_ACCOUNT}/decide",
        accounts.decide,
        "decide",
        response_schemas.DecisionForm,
        form=request_schemas.CostAskedForm,
    ),
    Route("GET", f"{_ACCOUNT}/balance", accounts.balance, "read", response_schemas.AccountRow),
    Route(
        "POST",
        "/v1/spends",
        charges.spend_all,
        "spend",
        response_schemas.ReceiptForm,
        form=request_schemas.SpendAllForm,
        status=201,
        repeatable=True,
        needs_idempotency_key=True,
    ),
    Route(
        "POST",
        "/v1/reservations",
        charges.reserve_all,
        "reserve",
        response_schemas.ReceiptForm,
        form=request_schemas.ReserveAllForm,
        status=201,
        repeatable=True,
        needs_idempotency_key=True,
    ),
    Route("GET", _RESERVATION, charges.reservation, "read", response_schemas.ReceiptForm),
    Route(
        "POST",
        f"{_RESERVATION}/commit",
        charges.commit,
        "resolve",
        response_schemas.ReceiptForm,
        form=request_schemas.CommitForm,
    ),
    Route(
        "POST",
        f"{_RESERVATION}/void",
        charges.void,
        "resolve",
        response_schemas.ReceiptForm,
        form=request_schemas.VoidForm,
    ),
    Route(
        "POST",
        "/v1/decide",
        accounts.decide_all,
        "decide",
        response_schemas.DecisionForm,
        form=request_schemas.CostsForm,
    ),
    Route("GET", "/v1/accounts", accounts.list_accounts, "read", response_schemas.AccountsForm, query=accounts.Page),
    Route(
        "POST",
        "/v1/accounts",
        accounts.open_account,
        "open",
        response_schemas.OpenedForm,
        form=request_schemas.OpenForm,
        status=201,
        needs_idempotency_key=True,
    ),
    Route("GET", _ACCOUNT, accounts.show, "read", response_schemas.AccountForm),
    Route("GET", f"{_ACCOUNT}/terms", accounts.terms, "read", response_schemas.OpenedForm),
    Route("GET", f"{_ACCOUNT}/lifetime", accounts.lifetime, "read", response_schemas.LifetimesForm),
    Route(
        "GET", f"{_ACCOUNT}/reading", accounts.reading, "read", response_schemas.ReadingsForm, query=accounts.Compare
    ),
    Route("GET", f"{_ACCOUNT}/entries", accounts.entries, "read", response_schemas.EntriesForm, query=accounts.Span),
    Route("GET", f"{_ACCOUNT}/reservations", accounts.pending, "read", response_schemas.ReservationsForm),
    Route(
        "POST",
        f"{_ACCOUNT}/largest",
        accounts.largest,
        "decide",
        response_schemas.OfferForm,
        form=request_schemas.LargestForm,
    ),
    Route(
        "POST",
        f"{_ACCOUNT}/quote",
        accounts.quote,
        "decide",
        response_schemas.QuotedForm,
        form=request_schemas.QuoteForm,
    ),
    Route(
        "POST",
        f"{_ACCOUNT}/close",
        accounts.close,
        "close",
        response_schemas.ClosedForm,
        form=request_schemas.CloseForm,
    ),
    Route(
        "POST",
        "/v1/verify",
        admin.verify,
        "verify",
        response_schemas.VerificationForm,
        form=request_schemas.VerifyForm,
        needs_every_account=True,
    ),
    Route(
        "GET",
        "/v1/checkpoint",
        admin.checkpoint,
        "verify",
        response_schemas.CheckpointForm,
        needs_every_account=True,
    ),
    Route("GET", "/v1/export", admin.export, "export", bytes, needs_every_account=True),
    Route(
        "POST",
        "/v1/import",
        admin.import_,
        "administer",
        response_schemas.VerificationForm,
        upload=True,
    ),
    Route("DELETE", "/v1/notes/{entry}", admin.erase_note, "erase", response_schemas.ErasedForm),
    Route("DELETE", "/v1/principals/{principal}", admin.erase_principal, "erase", response_schemas.ErasedForm),
    Route("GET", "/v1/keys", admin.list_keys, "administer", response_schemas.KeysForm),
    Route(
        "POST",
        "/v1/keys",
        admin.make_key,
        "administer",
        response_schemas.NewKeyForm,
        form=request_schemas.MakeKeyForm,
        status=201,
        needs_idempotency_key=True,
    ),
    Route("GET", "/v1/keys/{key}", admin.show_key, "administer", response_schemas.KeyForm),
    Route("DELETE", "/v1/keys/{key}", admin.revoke_key, "administer", response_schemas.KeyForm),
    Route("GET", "/v1/me", admin.who, "read", response_schemas.WhoForm),
    Route("GET", "/metrics", admin.metrics, "metrics", bytes, needs_every_account=True),
)
