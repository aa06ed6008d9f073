"""The routes under /v1: what there is, who may, what is sent and what is answered. One table."""

from __future__ import annotations

from typing import Final

from odograph.service import accounts, admin, answers, charges, forms, records
from odograph.service.door import Route

__all__ = ["ROUTES"]

_ONE: Final = "/v1/accounts/{name}"
_HELD: Final = "/v1/reservations/{reservation}"

# The first are asked for most often, and found first.
ROUTES: Final = (
    Route(
        "POST",
        f"{_ONE}/spends",
        charges.spend,
        "spend",
        answers.ReceiptForm,
        form=forms.SpendForm,
        status=201,
        repeated=True,
        keyed=True,
    ),
    Route("POST", "/v1/batches", charges.batch, "spend", answers.BatchResults, form=forms.BatchForm),
    Route(
        "POST",
        f"{_ONE}/reservations",
        charges.reserve,
        "reserve",
        answers.ReceiptForm,
        form=forms.ReserveForm,
        status=201,
        repeated=True,
        keyed=True,
    ),
    Route("POST", f"{_ONE}/decide", accounts.decide, "decide", answers.DecisionForm, form=forms.CostAskedForm),
    Route("GET", f"{_ONE}/balance", accounts.balance, "read", answers.AccountRow),
    Route(
        "POST",
        "/v1/spends",
        charges.spend_all,
        "spend",
        answers.ReceiptForm,
        form=forms.SpendAllForm,
        status=201,
        repeated=True,
        keyed=True,
    ),
    Route(
        "POST",
        "/v1/reservations",
        charges.reserve_all,
        "reserve",
        answers.ReceiptForm,
        form=forms.ReserveAllForm,
        status=201,
        repeated=True,
        keyed=True,
    ),
    Route("GET", _HELD, charges.reservation, "read", answers.ReceiptForm),
    Route("POST", f"{_HELD}/commit", charges.commit, "resolve", answers.ReceiptForm, form=forms.CommitForm),
    Route("POST", f"{_HELD}/void", charges.void, "resolve", answers.ReceiptForm, form=forms.VoidForm),
    Route("POST", "/v1/decide", accounts.decide_all, "decide", answers.DecisionForm, form=forms.CostsForm),
    Route("GET", "/v1/accounts", accounts.list_accounts, "read", answers.AccountsForm, query=accounts.Page),
    Route(
        "POST",
        "/v1/accounts",
        accounts.open_account,
        "open",
        answers.OpenedForm,
        form=forms.OpenForm,
        status=201,
        keyed=True,
    ),
    Route("GET", _ONE, accounts.show, "read", answers.AccountForm),
    Route("GET", f"{_ONE}/terms", accounts.terms, "read", answers.OpenedForm),
    Route("GET", f"{_ONE}/lifetime", accounts.lifetime, "read", answers.LifetimesForm),
    Route("GET", f"{_ONE}/reading", accounts.reading, "read", answers.ReadingsForm, query=accounts.Compare),
    Route("GET", f"{_ONE}/entries", records.entries, "read", answers.EntriesForm, query=records.Span),
    Route("GET", f"{_ONE}/reservations", records.pending, "read", answers.ReservationsForm),
    Route("POST", f"{_ONE}/largest", accounts.largest, "decide", answers.OfferForm, form=forms.LargestForm),
    Route("POST", f"{_ONE}/quote", accounts.quote, "decide", answers.QuotedForm, form=forms.QuoteForm),
    Route("POST", f"{_ONE}/close", accounts.close, "close", answers.ClosedForm, form=forms.CloseForm),
    Route(
        "POST", "/v1/verify", records.verify, "verify", answers.VerificationForm, form=forms.VerifyForm, whole=True
    ),
    Route("GET", "/v1/checkpoint", records.checkpoint, "verify", answers.CheckpointForm, whole=True),
    Route("GET", "/v1/export", records.export, "export", bytes, whole=True),
    Route(
        "POST",
        "/v1/import",
        records.import_,
        "administer",
        answers.VerificationForm,
        upload=True,
    ),
    Route("DELETE", "/v1/notes/{entry}", records.erase_note, "erase", answers.ErasedForm),
    Route("DELETE", "/v1/principals/{principal}", records.erase_principal, "erase", answers.ErasedForm),
    Route("GET", "/v1/keys", admin.list_keys, "administer", answers.KeysForm),
    Route(
        "POST",
        "/v1/keys",
        admin.make_key,
        "administer",
        answers.NewKeyForm,
        form=forms.MakeKeyForm,
        status=201,
        keyed=True,
    ),
    Route("GET", "/v1/keys/{key}", admin.show_key, "administer", answers.KeyForm),
    Route("DELETE", "/v1/keys/{key}", admin.revoke_key, "administer", answers.KeyForm),
    Route("GET", "/v1/me", admin.who, "read", answers.WhoForm),
    Route("GET", "/metrics", admin.metrics, "metrics", bytes, whole=True),
)
