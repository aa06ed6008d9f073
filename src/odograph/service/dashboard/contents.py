"""What the pages show: read from the ledger for one caller, and masked by the same views as the API's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from msgspec import Struct

from odograph.core.decide import Totals
from odograph.core.guarantees import guarantee_from_dict
from odograph.core.policy import Policy
from odograph.errors import AccountNotFound, BadRequest, LedgerCorrupt
from odograph.ledger.entries import checkpoint_of, shown, totals_from_text
from odograph.ledger.ledger import Ledger
from odograph.service import views
from odograph.service.access import Caller
from odograph.service.answers import AccountForm, AccountRow, EntryForm
from odograph.service.dashboard.markup import NEAR, Answer
from odograph.service.dashboard.planner import KINDS, plan
from odograph.service.dashboard.reasons import reasons
from odograph.service.dashboard.series import Series, series

__all__ = [
    "Counted",
    "Listing",
    "account_page",
    "audit_page",
    "listing",
    "overview",
    "plan_context",
    "pulse",
    "readings",
]

VERBS: Final = ("open", "spend", "reserve", "commit", "void", "refuse", "close")
_PAGE: Final = 50  # entries on a page
_STRIDE: Final = 500  # entries read at a time where they are filtered
_MOST_READ: Final = 20_000  # in one request; the page then offers to look further
_LONGEST: Final = 200  # characters of a filter

Query = Mapping[str, str]


def pulse(ledger: Ledger, caller: Caller) -> str:
    """Return a short text that changes whenever an account that the caller sees does."""
    return _head(_places(ledger, caller))[:16]


def overview(ledger: Ledger, caller: Caller, query: Query) -> Answer:
    """Return the accounts that the caller sees: who is near the limit first, who is closed last."""
    rows = views.rows(ledger, caller)
    near = sorted((row for row in rows if row.spent >= NEAR and not row.closed), key=lambda row: -row.spent)
    groups = {
        "near": near,
        "open": [row for row in rows if row.spent < NEAR and not row.closed],
        "closed": [row for row in rows if row.closed],
    }
    context = {"groups": groups, "count": len(rows), "wanted": query.get("q", "")[:_LONGEST]}
    return Answer("overview.html", "Accounts", groups, context)


class Listing(Struct):
    """A page of an account's entries, the newest first."""

    entries: list[EntryForm]
    older: int | None  # where to go on: pass it as `before`
    read: int  # how many entries were looked at


def listing(ledger: Ledger, caller: Caller, name: str, size: int, query: Query) -> Listing:
    """Return the newest entries before one, as far as they pass the filters."""
    end = size if not query.get("before") else min(_whole("before", query["before"]), size)
    wanted = {field: query.get(field, "").strip()[:_LONGEST].casefold() for field in ("verb", "principal", "text")}
    stride = _STRIDE if any(wanted.values()) else _PAGE
    found: list[EntryForm] = []
    read = 0
    while end > 0 and len(found) < _PAGE and read < _MOST_READ:
        first = max(0, end - stride)
        entries = views.entries_form(ledger, caller, name, first, end - first).entries
        if not entries:
            break
        for entry in reversed(entries):
            if len(found) == _PAGE:
                break
            read, end = read + 1, entry.sequence
            if _passes(entry, wanted):
                found.append(entry)
    return Listing(found, end or None, read)


def _whole(field: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise BadRequest(f"{field} must be a whole number, and {shown(text)} is not")
    return int(text)


def _passes(entry: EntryForm, wanted: Mapping[str, str]) -> bool:
    if wanted["verb"] and entry.verb != wanted["verb"]:
        return False
    if wanted["principal"] not in entry.principal.casefold():
        return False
    text = wanted["text"]
    cost = str(guarantee_from_dict(entry.cost)) if text and entry.cost else ""
    return not text or any(text in part.casefold() for part in (entry.note, entry.key, cost))


class Counted(NamedTuple):
    """One meter with a limit, for people."""

    name: str
    spent: float
    left: float
    out: bool  # a step had no price on it: it admits nothing any more
    part: float


def account_page(ledger: Ledger, caller: Caller, name: str, query: Query) -> Answer:
    """Return everything about one account."""
    form = views.account_form(ledger, caller, name)
    own = views.seen(ledger, caller, name)
    row, policy = form.account, own.policy
    compare = bool(query.get("compare"))
    readings = views.readings_form(ledger, caller, name, compare=True) if compare else None
    page = listing(ledger, caller, name, row.sequence + 1, query)
    planned = plan(ledger, caller, name, query) if caller.may("decide") else None
    why = reasons(own.compiled)
    totals = totals_from_text(row.totals)
    context = {
        "form": form,
        "row": row,
        "promise": _promise(row),
        "meters": _meters(form, own.compiled.meters, totals),
        "compare": compare,
        "by": query.get("by", "steps"),
        "others": (readings.compare or []) if readings else [],
        "listing": page,
        "verbs": VERBS,
        "why": why,
        "query": {field: query.get(field, "")[:_LONGEST] for field in ("verb", "principal", "text", "before")},
        "near": row.spent >= NEAR and not row.closed,
        **plan_context(policy, name, planned, query),
    }
    twin = {
        "account": form,
        "promise": _promise(row),
        "readings": readings,
        "plan": planned,
        "why": [reason._asdict() for reason in why],
        "listing": page,
    }
    return Answer("account.html", name, twin, context)


def plan_context(policy: Policy, name: str, planned: object, query: Query) -> dict[str, Any]:
    """Return what the planner's part of the page shows."""
    menu = [(f"menu:{item.name}", f"{item.name}: steps") for item in policy.menu]
    return {
        "plan": planned,
        "plan_account": name,
        "kinds": [*((value, kind.label) for value, kind in KINDS.items()), *menu],
        "asked": {f: query.get(f, "")[:_LONGEST] for f in ("kind", "size", "delta", "sensitivity", "times")},
    }


def readings(ledger: Ledger, caller: Caller, name: str, *, compare: bool) -> Series:
    """Return an account's readings as they went."""
    own = views.seen(ledger, caller, name)
    balance = ledger.books.balances([name])[name]  # totals and sequence of one moment
    return series(own, balance.totals, balance.sequence, compare=compare)


def audit_page(ledger: Ledger, caller: Caller, *, run: bool = False) -> Answer:
    """Return where every account stands and, if it is run, what a whole replay found."""
    caller.require("verify")
    whole = caller.accounts is None
    found: dict[str, Any] | None = None
    if run:
        caller.require_whole("verify")
        try:
            verification = ledger.verify()
            found = {"verified": True, "message": str(verification), "entries": verification.entries}
        except LedgerCorrupt as problem:
            found = {"verified": False, "message": str(problem), "entries": None}
        except AccountNotFound:  # no account was opened yet, so there is no ledger either
            found = {"verified": True, "message": "there is no account yet, and nothing to verify", "entries": 0}
    places = _places(ledger, caller)
    head = _head(places) if whole else None
    twin = {"head": head, "accounts": places, "verification": found}
    paged = {name for name in places if ledger.books.opened(name).population is None}  # a population has no page
    context = {"head": head, "places": places, "paged": paged, "found": found, "whole": whole}
    return Answer("audit.html", "Audit", twin, context)


def _places(ledger: Ledger, caller: Caller) -> dict[str, tuple[int, str]]:
    """Return the last sequence and its seal of every account that the caller sees."""
    try:
        found = ledger.books.balances(None if caller.accounts is None else sorted(caller.accounts))
    except AccountNotFound:  # no account was opened yet, so there is no ledger either
        return {}
    return {name: (balance.sequence, balance.seal) for name, balance in sorted(found.items())}


def _head(places: Mapping[str, tuple[int, str]]) -> str:
    return checkpoint_of((name, *place) for name, place in places.items())


def _promise(row: AccountRow) -> str:
    """Say in one sentence what the account promises."""
    other = f"one {row.unit} replaced" if row.neighbours == "replace-one" else f"one {row.unit} more or less"
    return (
        f"Whatever is asked, in any order and chosen from the answers so far, all answers together are"
        f" ({row.promise.epsilon:g}, {row.promise.delta:g})-differentially private: nobody can tell these data"
        f" from the same with {other} any better than that."
    )


def _meters(form: AccountForm, meters: tuple[Any, ...], totals: Totals) -> list[Counted]:
    """Return the meters that have a limit, without a delta that the policy sets none aside of."""
    found = []
    for meter, unpriced in zip(meters, totals.unpriced, strict=True):
        counted = form.meters.get(meter.name)
        if counted is None or not meter.limit:
            continue
        limit = float(meter.limit / meter.scale)
        part = 1.0 if unpriced else min(1.0, counted.spent / limit) if limit else 1.0
        found.append(Counted(meter.name, counted.spent, counted.left, bool(unpriced), part))
    return found
