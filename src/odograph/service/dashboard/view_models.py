"""What each page shows: overview, account with its planner, audit, and the form that opens an account.

Everything is read from the ledger on behalf of one caller, through the same visibility rules as the API. Nothing in
this file can charge an account.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from msgspec import UNSET, Raw, Struct
from msgspec.json import encode
from msgspec.structs import asdict

from odograph.core.filters import FILTERS, Basic
from odograph.core.filters.smooth import RESERVES
from odograph.core.fixed_point import read
from odograph.core.gate import Totals, decide
from odograph.core.guarantees import (
    GDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    PureDP,
    guarantee_from_dict,
)
from odograph.core.mechanisms import gaussian, laplace
from odograph.core.odometers import ODOMETER_NAMES
from odograph.core.planning import used
from odograph.core.policy import Compiled, Policy
from odograph.errors import (
    AccountClosed,
    BadRequest,
    InvalidArgument,
    LedgerCorrupt,
    LedgerNotFound,
    UnprovenComposition,
)
from odograph.ledger.entries import check_name, checkpoint_of, shown, totals_from_text
from odograph.ledger.ledger import Ledger, LedgerAccount
from odograph.ledger.stores.base import Balance
from odograph.service import visibility
from odograph.service.auth import Caller, new_secret
from odograph.service.dashboard.charts import MAX_ENTRIES, odometer_label, reading_at_limit
from odograph.service.dashboard.pages import NEAR_LIMIT, USED_UP, Page, page_wording, render_fragment
from odograph.service.monitoring import Alerts
from odograph.service.openapi import describe, describe_operations, describe_types
from odograph.service.routes import ROUTES
from odograph.service.schemas import AccountForm, AccountRow, EntryForm, Problem
from odograph.service.visibility import problem_of

__all__ = [
    "MAX_INPUT",
    "VERBS",
    "Citation",
    "EntryListing",
    "MeterView",
    "Overview",
    "OverviewLine",
    "PendingListing",
    "Plan",
    "account_page",
    "age_of",
    "api_reference_page",
    "audit_page",
    "citations_for",
    "data_version",
    "list_entries",
    "list_pending",
    "make_plan",
    "matches_entry",
    "open_account_arguments",
    "open_account_page",
    "overview_page",
    "plan_context",
    "policy_from_form",
    "read_citation",
    "read_integer",
]

VERBS: Final = ("open", "spend", "reserve", "commit", "void", "refuse", "close")
_PAGE_SIZE: Final = 50  # entries on a page
_PENDING_SIZE: Final = 25  # pending reservations on a page
_CHUNK_SIZE: Final = 500  # entries read at a time while searching
_MAX_READ: Final = 20_000  # entries read in one request; the page then links to the rest
MAX_INPUT: Final = 200  # characters of a field of a form that are used

Query = Mapping[str, str]


def data_version(ledger: Ledger, caller: Caller, name: str = "") -> str:
    """Return a short string that changes whenever an account that the caller sees changes.

    For the page of one account, `name`: whenever something changes that this page shows.
    """
    balances = _visible_balances(ledger, caller)
    last = {one: (balance.sequence, balance.seal) for one, balance in balances.items()}
    if name:
        # Of its children and linked accounts the page shows the names.
        named = [
            one
            for one, balance in balances.items()
            if name in balances and (balance.head.parent == name or balance.head.successor_of)
        ]
        last = dict.fromkeys(named, (0, "")) | {one: last[one] for one in _path(name, balances)}
    return _checkpoint(last)[:16]


def _path(name: str, balances: Mapping[str, Balance]) -> list[str]:
    """Return an account and those above it that were read: what they have left bounds what it takes."""
    path = []
    while name in balances:
        path.append(name)
        name = balances[name].head.parent
    return path


def _visible_balances(ledger: Ledger, caller: Caller) -> dict[str, Balance]:
    try:
        return ledger.backend.balances(None if caller.accounts is None else sorted(caller.accounts))
    except LedgerNotFound:  # there is no ledger before the first account
        return {}


def _last_entries(ledger: Ledger, caller: Caller) -> dict[str, tuple[int, str]]:
    """Return the sequence number and the seal of the last entry of every account that the caller sees."""
    balances = _visible_balances(ledger, caller)
    return {name: (balance.sequence, balance.seal) for name, balance in sorted(balances.items())}


def _checkpoint(last_entries: Mapping[str, tuple[int, str]]) -> str:
    return checkpoint_of((name, *last) for name, last in last_entries.items())


# The overview


_STATES: Final = {"near": "Near the limit", "open": "Within budget", "used up": "Used up", "closed": "Closed"}
_ON_PAGE: Final = 50  # accounts on a page
_ORDERS: Final[dict[str, tuple[str, Callable[[AccountRow], Any]]]] = {
    "": ("by state", lambda row: ([*_STATES].index(_state(row)), -row.spent if _state(row) == "near" else 0)),
    "name": ("by name", lambda row: row.name),
    "spent": ("most spent first", lambda row: -row.spent),
    "steps": ("most steps first", lambda row: -row.steps),
    "time": ("last changed first", lambda row: -datetime.fromisoformat(row.time).timestamp()),
}
_CHOICES: Final = ("state", "filter", "dataset", "parent")  # fields of which a row must have the chosen value


class OverviewLine(NamedTuple):
    """An account on a page of the overview."""

    row: AccountRow
    state: str
    depth: int = 0  # how many accounts of the tree are above it
    above: bool = False  # whether it is shown only because an account below it is


class Overview(Struct):
    """A page of the accounts that a caller sees and has chosen."""

    counts: dict[str, int]  # of all that it sees, by state
    matching: int  # how many were chosen
    page: int
    pages: int
    lines: list[OverviewLine]


def overview_page(ledger: Ledger, caller: Caller, query: Query) -> Page:
    """Return a page of the accounts that the caller sees, filtered and sorted, as a list or as a tree."""
    rows = visibility.visible_rows(ledger, caller)
    asked = {field: query.get(field, "").strip()[:MAX_INPUT] for field in ("q", *_CHOICES, "sort", "view", "page")}
    if asked["sort"] not in _ORDERS:
        raise BadRequest(f"sort must be one of {', '.join(filter(None, _ORDERS))} (got {shown(asked['sort'])})")
    rows.sort(key=_ORDERS[asked["sort"]][1])  # they were in the order of their names
    chosen = [row for row in rows if _is_chosen(row, asked)]
    is_tree = asked["view"] == "tree"
    lines = _tree(rows, chosen) if is_tree else [OverviewLine(row, _state(row)) for row in chosen]
    pages = max(1, -(-len(lines) // _ON_PAGE))
    page = min(pages, max(1, read_integer("page", asked["page"] or "1")))
    first = (page - 1) * _ON_PAGE
    part = lines[first : first + _ON_PAGE]
    if is_tree and part:
        part = [line._replace(above=True) for line in _lines_above(lines, first)] + part
    counts = {state: sum(_state(row) == state for row in rows) for state in _STATES}
    found = Overview(counts, len(chosen), page, pages, part)

    def link(**changed: object) -> str:
        kept = asked | {"page": ""} | {field: str(value) for field, value in changed.items()}
        return "/?" + urlencode({field: value for field, value in kept.items() if value})

    context = {
        "found": found,
        "asked": asked,
        "link": link,
        "states": _STATES,
        "orders": {name: label for name, (label, _) in _ORDERS.items()},
        "filters": [(name, name) for name in sorted({row.filter for row in rows})],
        "has_datasets": any(row.dataset for row in rows),
        "has_parents": any(row.parent for row in rows),
        "total": len(rows),
    }
    form = {**asdict(found), "lines": [line._asdict() for line in part]}
    return Page("overview.html", "Accounts", form, context)


def _is_chosen(row: AccountRow, asked: Mapping[str, str]) -> bool:
    text = asked["q"].casefold()
    words = f"{row.name} {row.dataset} {row.filter} {row.privacy_unit}".casefold()
    values = {"state": _state(row), "filter": row.filter, "dataset": row.dataset, "parent": row.parent}
    return text in words and all(asked[field] in ("", values[field]) for field in _CHOICES)


def _tree(rows: Sequence[AccountRow], chosen: Sequence[AccountRow]) -> list[OverviewLine]:
    """Return the chosen accounts below those above them, which are marked if they were not chosen themselves."""
    by_name = {row.name: row for row in rows}
    wanted = {row.name for row in chosen}
    kept = set(wanted)
    for row in chosen:
        while row.parent in by_name and row.parent not in kept:
            row = by_name[row.parent]  # noqa: PLW2901  up to the top
            kept.add(row.name)
    below: dict[str, list[AccountRow]] = {}
    for row in rows:
        if row.name in kept:
            below.setdefault(row.parent if row.parent in by_name else "", []).append(row)
    lines, left = [], [(row, 0) for row in reversed(below.get("", []))]
    while left:
        row, depth = left.pop()
        lines.append(OverviewLine(row, _state(row), depth, row.name not in wanted))
        left += [(child, depth + 1) for child in reversed(below.get(row.name, []))]
    return lines


def _lines_above(lines: Sequence[OverviewLine], first: int) -> list[OverviewLine]:
    """Return the lines above the first one of a page, from the top down: the page before shows them."""
    found: list[OverviewLine] = []
    depth = lines[first].depth
    for line in reversed(lines[:first]):
        if line.depth < depth:
            found.append(line)
            depth = line.depth
    return found[::-1]


def _state(row: AccountRow) -> str:
    return "closed" if row.closed else _room(row)


def _room(row: AccountRow) -> str:
    """Return whether a budget is used up, near its limit, or open to more."""
    return "used up" if row.spent >= USED_UP else "near" if row.spent >= NEAR_LIMIT else "open"


# One account


class MeterView(NamedTuple):
    """A meter that has a limit, as numbers to show."""

    name: str
    spent: float
    left: float
    out: bool  # a step had no price on this meter, so it admits nothing more
    part: float  # of the limit that is spent


def account_page(ledger: Ledger, caller: Caller, name: str, query: Query, alerts: Alerts | None = None) -> Page:
    """Return everything about one account."""
    form = visibility.account_form(ledger, caller, name, pending=False)
    account = visibility.visible_account(ledger, caller, name)
    row = form.account
    compare = bool(query.get("compare"))
    readings = visibility.readings_form(ledger, caller, name, compare=True) if compare else None
    others = account.compare()[1:] if compare else ()
    listing = list_entries(ledger, caller, name, row.sequence + 1, query)
    pending = list_pending(ledger, caller, name, query)
    plan = make_plan(ledger, caller, name, query) if caller.may("decide") else None
    citations = citations_for(account.compiled)
    active = [] if alerts is None else alerts.active(ledger, [name])
    context = {
        "alerts": active,
        "form": form,
        "row": row,
        "promise": _promise_text(row),
        "meters": _meter_views(form, account.compiled.meters, totals_from_text(row.totals)),
        "compare": compare,
        "by": query.get("by", "steps"),
        "others": [(odometer_label(other.odometer), other.loss) for other in others],
        "limit_reading": reading_at_limit(account.compiled),
        "listing": listing,
        "pending": pending,
        "verbs": VERBS,
        "citations": citations,
        "query": {
            field: query.get(field, "")[:MAX_INPUT] for field in ("verb", "principal", "text", "before", "pending")
        },
        "room": _room(row),
        "max_entries": MAX_ENTRIES,
        **plan_context(account.policy, name, plan, query),
    }
    representation = {
        "account": form,
        "promise": _promise_text(row),
        "readings": readings,
        "plan": plan,
        "citations": [citation._asdict() for citation in citations],
        "listing": listing,
        "pending": pending,
        "alerts": active,
    }
    return Page("account.html", name, representation, context)


def _promise_text(row: AccountRow) -> str:
    """Return the account's promise in words."""
    change = (
        f"replacing one {row.privacy_unit}"
        if row.neighbors == "replace-one"
        else f"adding or removing one {row.privacy_unit}"
    )
    freedom = "Questions may be asked in any order and may depend on previous answers."
    epsilon, rho, mu = row.promise.epsilon, row.promise.rho, row.promise.mu
    if epsilon is not None:
        private = f"differentially private with epsilon {epsilon:g} and delta {row.promise.delta:g}"
    elif rho is not UNSET:
        private = f"zero-concentrated differentially private with rho {rho:g} and delta {row.promise.delta:g}"
    elif mu is not UNSET:
        private = f"Gaussian differentially private with mu {mu:g} and delta {row.promise.delta:g}"
    else:
        return f"No limit is fixed: the loss is only read, with respect to {change}. {freedom}"
    return f"All answers together are {private}, with respect to {change}. {freedom}"


def _meter_views(form: AccountForm, meters: tuple[Any, ...], totals: Totals) -> list[MeterView]:
    """Return the meters that have a limit above zero."""
    views = []
    for meter, unpriced in zip(meters, totals.unpriced, strict=True):
        counted = form.meters.get(meter.name)
        if counted is None or not meter.limit:
            continue
        limit = float(meter.limit / meter.scale)
        part = 1.0 if unpriced else min(1.0, counted.spent / limit) if limit else 1.0
        views.append(MeterView(meter.name, counted.spent, counted.left, bool(unpriced), part))
    return views


class EntryListing(Struct):
    """A page of an account's entries, newest first."""

    entries: list[EntryForm]
    older: int | None  # where the next page begins: pass it as `before`
    read: int  # how many entries were examined
    asked: dict[int, str]  # by sequence: the account below this one that was asked, where it was not this one


def list_entries(ledger: Ledger, caller: Caller, name: str, size: int, query: Query) -> EntryListing:
    """Return the newest entries, or the newest before the entry `before`, that match the query."""
    end = size if not query.get("before") else min(read_integer("before", query["before"]), size)
    wanted = {field: query.get(field, "").strip()[:MAX_INPUT].casefold() for field in ("verb", "principal", "text")}
    stride = _CHUNK_SIZE if any(wanted.values()) else _PAGE_SIZE
    found: list[EntryForm] = []
    read_count = 0
    while end > 0 and len(found) < _PAGE_SIZE and read_count < _MAX_READ:
        first = max(0, end - stride)
        entries = visibility.entries_form(ledger, caller, name, first, end - first).entries
        if not entries:
            break
        for entry in reversed(entries):
            if len(found) == _PAGE_SIZE:
                break
            read_count, end = read_count + 1, entry.sequence
            if matches_entry(entry, wanted):
                found.append(entry)
    asked = {entry.sequence: below for entry in found if (below := visibility.asked_account(entry, name))}
    return EntryListing(found, end or None, read_count, asked)


class PendingListing(Struct):
    """A page of an account's pending reservations, oldest first."""

    count: int  # of all of them
    oldest: str | None  # for how long the oldest has been pending
    rows: list[visibility.PendingRow]
    ages: list[str]  # for how long each has been pending
    expired: list[bool]  # whether each can no longer be voided
    next: int | None  # where the next page begins: pass it as `pending`


def list_pending(ledger: Ledger, caller: Caller, name: str, query: Query) -> PendingListing:
    """Return the oldest pending reservations, or those from the entry `pending` on."""
    first = read_integer("pending", query.get("pending") or "0")
    rows = visibility.pending_rows(ledger, caller, name, first, _PENDING_SIZE + 1)
    following = rows[_PENDING_SIZE].sequence if len(rows) > _PENDING_SIZE else None
    rows, now = rows[:_PENDING_SIZE], datetime.now(UTC)
    oldest = visibility.pending_rows(ledger, caller, name, 0, 1) if first else rows[:1]
    return PendingListing(
        visibility.pending_count(ledger, caller, name),
        age_of(oldest[0].time, now) if oldest else None,
        rows,
        [age_of(row.time, now) for row in rows],
        [row.expires is not None and datetime.fromisoformat(row.expires) < now for row in rows],
        following,
    )


def age_of(time: str, now: datetime) -> str:
    """Return how long ago something was, in its largest unit."""
    seconds = max(0, int((now - datetime.fromisoformat(time)).total_seconds()))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:,} {unit}"
    return f"{seconds} s"


def read_integer(field: str, text: str) -> int:
    """Return an integer of a query; raise `BadRequest` if it is none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise BadRequest(f"{field} must be an integer (got {shown(text)})")
    return int(text)


def matches_entry(entry: EntryForm, wanted: Mapping[str, str]) -> bool:
    """Return whether an entry has the wanted verb, principal and text; an empty string is any."""
    if wanted["verb"] and entry.verb != wanted["verb"]:
        return False
    if wanted["principal"] not in entry.principal.casefold():
        return False
    text = wanted["text"]
    cost = str(guarantee_from_dict(entry.cost)) if text and entry.cost else ""
    return not text or any(text in part.casefold() for part in (entry.note, entry.key, cost))


# Citations: the theorems behind an account's numbers, read from the docstrings of the code that uses them.


class Citation(NamedTuple):
    """A theorem that the numbers rely on, and its assumptions."""

    title: str
    summary: str
    theorem: str
    assumes: str


_LABELS: Final = ("Theorem:", "Assumes:")


def citations_for(compiled: Compiled) -> tuple[Citation, ...]:
    """Return the theorems behind an account's limits and its reading."""
    policy = compiled.policy
    citations = []
    for one, share in policy.filters:
        part = "" if len(policy.filters) == 1 else f", with {float(share):g} of the delta for filters"
        citations.append(read_citation(f"The filter: {one.kind}{part}", type(one).alternatives))
    if policy.epsilon is not None and not policy.is_basic:
        summary = "The sum of the epsilons costs no delta, so it is an alternative in every policy with an epsilon."
        citations.append(read_citation("Basic composition", Basic.alternatives, summary))
    gate = "A request is admitted if its own delta fits and at least one alternative has room for it."
    citations.append(read_citation("How requests are admitted", decide, gate))
    odometer = policy.odometer
    if not policy.delta_odometer:
        summary = "The reading is the sum of the epsilons."
        citations.append(read_citation("The reading", Basic.alternatives, summary))
    else:
        summary = (inspect.getdoc(type(odometer)) or "").partition("\n")[0]
        source = type(odometer).bound if policy.slack is None else Compiled.reading
        citations.append(read_citation(f"The odometer: {odometer_label(odometer)}", source, summary))
    return tuple(citations)


def read_citation(title: str, function: object, summary: str = "") -> Citation:
    """Read a docstring's first line and its paragraphs `Theorem:` and `Assumes:`."""
    lines = (inspect.getdoc(function) or "").splitlines()
    parts: dict[str, list[str]] = {label: [] for label in _LABELS}
    current: list[str] | None = None
    for line in lines:
        label = next((label for label in _LABELS if line.startswith(label)), None)
        if label is not None:
            current = parts[label]
        elif not line.strip():
            current = None
        if current is not None:
            current.append(line.removeprefix(label or "").strip())
    theorem, assumes = (" ".join(parts[label]) for label in _LABELS)
    return Citation(title, summary or (lines[0] if lines else ""), theorem, assumes)


# The planner: what questions would cost, and how many fit.


_MAX_TIMES: Final = 10**9
_MENU_PREFIX: Final = "menu:"


class _QuestionKind(NamedTuple):
    """A kind of question: its label, the name of its size, and the function that makes its cost."""

    label: str
    size: str
    make: Callable[..., Guarantee]
    second: str = ""  # the name of a second number, if there is one
    default: str = ""  # of the second number


_QUESTION_KINDS: Final = {
    "pure": _QuestionKind("pure DP: epsilon", "epsilon", PureDP),
    "approx": _QuestionKind("approximate DP: epsilon, delta", "epsilon", ApproxDP, "delta", "0"),
    "zcdp": _QuestionKind("zCDP: rho", "rho", ZCDP, "delta", "0"),
    "gdp": _QuestionKind("Gaussian DP: mu", "mu", GDP),
    "gaussian": _QuestionKind("Gaussian noise: sigma", "sigma", gaussian, "sensitivity", "1"),
    "laplace": _QuestionKind("Laplace noise: scale", "scale", laplace, "sensitivity", "1"),
}


class _Question(NamedTuple):
    """A cost and how many times it is to be spent; for noise also the mechanism and the sensitivity."""

    cost: Guarantee
    times: int
    mechanism: Callable[..., Guarantee] | None = None
    sensitivity: str = ""


class Plan(Struct):
    """The planner's result. If the question is not valid, `problem` tells why and the other fields are empty."""

    account: str
    cost: dict[str, Any] | None = None
    times: int = 1
    admitted: bool = False  # whether all of them fit
    fits: int = 0  # how many of them fit in a row
    largest: dict[str, Any] | None = None  # the largest cost of this kind that fits so many times
    noise: str = ""  # the same as the least noise, if the question was about noise
    spent_after: float | None = None  # the part of this account's budget that is spent after all of them
    message: str = ""
    notes: tuple[str, ...] = ()  # what the first of them changes for later requests
    problem: str = ""


def plan_context(policy: Policy, name: str, plan: Plan | None, query: Query) -> dict[str, Any]:
    """Return the template context of the planner."""
    menu = [(f"{_MENU_PREFIX}{item.name}", f"{item.name}: steps") for item in policy.menu]
    return {
        "plan": plan,
        "plan_account": name,
        "kinds": [*((value, kind.label) for value, kind in _QUESTION_KINDS.items()), *menu],
        "asked": {f: query.get(f, "")[:MAX_INPUT] for f in ("kind", "size", "delta", "sensitivity", "times")},
    }


def make_plan(ledger: Ledger, caller: Caller, name: str, query: Query) -> Plan | None:
    """Evaluate the planner's form, or return None if it is empty."""
    size = query.get("size", "").strip()
    if not size:
        return None
    caller.require("decide")
    account = visibility.visible_account(ledger, caller, name)
    try:
        return _evaluate(ledger, caller, account, _read_question(query, size))
    except (AccountClosed, BadRequest, InvalidArgument, UnprovenComposition) as problem:
        return Plan(name, problem=page_wording(problem_of(problem, caller).detail))


def _read_question(query: Query, size: str) -> _Question:
    """Read the planner's form; decimal numbers are read exactly."""
    times, chosen = _read_times(query.get("times", "")), query.get("kind", "pure")
    if chosen.startswith(_MENU_PREFIX):
        if not (size.isascii() and size.isdecimal() and len(size) <= 12):
            raise BadRequest(f"size must be an integer, the number of steps of the mechanism (got {shown(size)})")
        return _Question(Mechanism(chosen.removeprefix(_MENU_PREFIX), int(size)), times)
    kind = _QUESTION_KINDS.get(chosen)
    if kind is None:
        raise BadRequest(f"kind must be one of {', '.join(_QUESTION_KINDS)} (got {shown(chosen)})")
    if not kind.second:
        return _Question(kind.make(size), times)
    second = query.get(kind.second, "").strip() or kind.default
    noise = (kind.make, second) if kind.second == "sensitivity" else ()
    return _Question(kind.make(size, second), times, *noise)


def _read_times(text: str) -> int:
    text = text.strip() or "1"
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= _MAX_TIMES):
        raise BadRequest(f"times must be an integer from 1 to {_MAX_TIMES:,} (got {shown(text)})")
    return int(text)


def _evaluate(ledger: Ledger, caller: Caller, account: LedgerAccount, question: _Question) -> Plan:
    cost, times = question.cost, question.times
    decision = visibility.decide_for(ledger, caller, {account.name: cost})
    unlimited = _is_unlimited(account)
    fits, offer = account.how_many(cost), None if unlimited else account.largest(cost, times)
    spent = None
    if fits >= times and not account.policy.is_unlimited:
        # One decision on the price of all of them gives the totals afterwards.
        after = decide(account.compiled.meters, account.totals, account.compiled.price(cost).times(times))
        spent = used(account.compiled, after.totals_after)
    return Plan(
        account.name,
        cost.to_dict(),
        times,
        fits >= times,
        fits,
        None if offer is None else offer.to_dict(),
        "" if unlimited else _least_noise(account, question),
        spent,
        page_wording(str(decision)),
        decision.notes,
    )


def _is_unlimited(account: LedgerAccount) -> bool:
    """Return whether neither the account nor one above it has a limit."""
    one: LedgerAccount | None = account
    while one is not None and one.policy.is_unlimited:
        one = one.parent
    return one is None


def _least_noise(account: LedgerAccount, question: _Question) -> str:
    """Return the least noise that fits, if the question was about noise."""
    if question.mechanism is None or not read(question.sensitivity, "sensitivity"):
        return ""
    found = account.calibrate(question.mechanism, times=question.times, sensitivity=question.sensitivity)
    return "" if found is None else f"{found.parameter} {found.value:g}"


# The audit


_LAST_ENTRIES: Final = 100  # on a page of the audit


def audit_page(ledger: Ledger, caller: Caller, query: Query, *, run: bool = False) -> Page:
    """Return a page of the last entries of the accounts and, with `run`, the result of verifying the ledger."""
    caller.require("verify")
    whole_ledger = caller.accounts is None
    verification: dict[str, Any] | None = None
    if run:
        caller.require_every_account("verify")
        try:
            verified = ledger.verify()
            verification = {"verified": True, "message": str(verified), "entries": verified.entries}
        except LedgerCorrupt as problem:
            verification = {"verified": False, "message": str(problem), "entries": None}
        except LedgerNotFound:  # there is no ledger before the first account
            verification = {"verified": True, "message": "the ledger has no accounts yet", "entries": 0}
    last_entries = _last_entries(ledger, caller)
    checkpoint = _checkpoint(last_entries) if whole_ledger else None
    representation = {"checkpoint": checkpoint, "accounts": last_entries, "verification": verification}
    pages = max(1, -(-len(last_entries) // _LAST_ENTRIES))
    page = min(pages, max(1, read_integer("page", query.get("page") or "1")))
    shown_entries = dict([*last_entries.items()][(page - 1) * _LAST_ENTRIES : page * _LAST_ENTRIES])
    # The account of a population has no page.
    linked = {name for name in shown_entries if ledger.backend.opened(name).population is None}
    context = {
        "checkpoint": checkpoint,
        "last_entries": shown_entries,
        "linked": linked,
        "page": page,
        "pages": pages,
        "verification": verification,
        "whole_ledger": whole_ledger,
    }
    return Page("audit.html", "Audit", representation, context)


# Opening an account


_PROMISES: Final = ("epsilon", "rho", "mu", "no limit")
_DEFAULT_FIELDS: Final = {
    "name": "",
    "promise": "epsilon",
    "epsilon": "1",
    "delta": "1e-6",
    "filter": "default",
    "reserve": "mixed",
    "odometer": "default",
    "slack": "",
    "delta_steps": "",
    "privacy_unit": "person",
    "neighbors": "add-remove",
    "parent": "",
    "successor_of": "",
    "dataset": "",
    "note": "",
}


def open_account_page(
    ledger: Ledger, caller: Caller, typed: Mapping[str, str] | None = None, problem: Problem | None = None
) -> Page:
    """Return the form that opens an account, with the values typed before and the problem with them."""
    caller.require("open")
    fields = _DEFAULT_FIELDS if typed is None else {field: typed.get(field, "") for field in _DEFAULT_FIELDS}
    names = [row.name for row in visibility.visible_rows(ledger, caller)]
    status, message = (200, "") if problem is None else (problem.status, problem.detail)
    key = (typed or {}).get("key") or new_secret()
    choices = {
        "promises": [*_PROMISES],
        "filters": ["default", *sorted(FILTERS)],
        "reserves": [*RESERVES],
        "odometers": ["default", *ODOMETER_NAMES],
    }
    context = choices | {"typed": fields, "message": message, "names": names, "key": key}
    representation = choices | {"fields": fields, "message": message}
    return Page("open.html", "Open an account", representation, context, status)


def policy_from_form(typed: Mapping[str, str]) -> Policy:
    """Return the policy of a sent form, with numbers read exactly; raise if it or the account's name is invalid."""
    check_name(typed.get("name", "").strip())
    promise = typed.get("promise", "epsilon")
    if promise not in _PROMISES:
        raise BadRequest(f"promise must be one of {', '.join(_PROMISES)} (got {shown(promise)})")
    chosen = None if typed.get("filter", "default") == "default" else typed["filter"]
    # The number is in one field, whatever it promises; what an account is made for is a question of an epsilon.
    promised = {"epsilon": None} if promise == "no limit" else {promise: typed.get("epsilon", "").strip()}
    return Policy(
        delta=typed.get("delta", "").strip(),
        delta_steps=typed.get("delta_steps", "").strip() or None,
        filter=chosen,
        reserve=(typed.get("reserve") or None) if chosen is None and promise == "epsilon" else None,
        odometer=None if typed.get("odometer", "default") == "default" else typed["odometer"],
        slack=typed.get("slack", "").strip() or None,
        privacy_unit=typed.get("privacy_unit", "").strip(),
        neighbors=typed.get("neighbors", ""),
        **promised,
    )


def open_account_arguments(typed: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of `Ledger.open_account` in a sent form, except the policy."""
    texts = {field: typed.get(field, "").strip() for field in ("parent", "successor_of", "dataset", "note")}
    # Each form has its own idempotency key: sent twice, it opens one account.
    return {"name": typed.get("name", "").strip(), "key": typed.get("key") or None, **texts}


# The API reference


@cache
def api_reference_page() -> Page:
    """Return the page; its JSON representation is the OpenAPI document. It contains no data and is made once."""
    document = describe(ROUTES)
    context = {"about": document["info"], "groups": describe_operations(ROUTES), "types": describe_types(ROUTES)}
    content = render_fragment("api_operations.html", context)
    return Page("api_reference.html", "API", Raw(encode(document)), {"content": content})
