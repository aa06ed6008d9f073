"""What owners do and look up on the dashboard: keys, reservations, closing; who spends, entries, principals.

A form that changes something is sent twice: first as typed, which shows in words what will happen, then confirmed.
It is carried out by the API's own handler, under the verb of the API's own route, and only by the handlers in
`_ACTIONS`: none of them charges. A form that ends in a new API key also needs the API key of the signed-in owner, so
a session cookie alone never becomes something that can spend.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from odograph.account import caution_of_delta
from odograph.compile import compile_at_hand
from odograph.core.filters import FILTERS
from odograph.core.filters.smooth import RESERVES
from odograph.core.fixed_point import read
from odograph.core.guarantees import ZCDP, Guarantee, PureDP, guarantee_from_dict
from odograph.core.mechanisms import gaussian, laplace, subsampled_gaussian
from odograph.core.planning import USUAL_TRAINING, outlook, roomiest, usual_requests
from odograph.core.policy import Compiled
from odograph.errors import (
    AccountNotFound,
    BadRequest,
    InvalidArgument,
    NotPermitted,
    OdographError,
    ReservationNotFound,
)
from odograph.ledger.entries import check_name, iso_time, parse_entry_id, price_from_text, shown
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import HistoryEntry, cell_text
from odograph.ledger.stores.base import Balance
from odograph.service import visibility
from odograph.service.auth import (
    ApiKey,
    Caller,
    Role,
    check_key_request,
    digest_of_token,
    looks_like_token,
    new_secret,
)
from odograph.service.dashboard import view_models
from odograph.service.dashboard.pages import HEADERS, Page, PageSession, fragment_response, page_wording
from odograph.service.dashboard.view_models import MAX_INPUT, Query
from odograph.service.endpoint import Call, Route
from odograph.service.key_store import require_existing
from odograph.service.routes import ROUTES, accounts, admin, charges
from odograph.service.schemas import EntriesForm, EntryForm, KeyForm, Problem, ReceiptForm
from odograph.service.state import AppState

__all__ = [
    "ASKED",
    "MAX_PENDING",
    "MAX_READ",
    "MOST_RESOLVED",
    "PAGES",
    "ApiHandler",
    "Bar",
    "Confirmation",
    "Findings",
    "FormFields",
    "Found",
    "Handler",
    "KeyView",
    "Outlook",
    "Pending",
    "Period",
    "PopulationView",
    "Position",
    "Resolved",
    "Share",
    "Show",
    "Spending",
    "confirm_page",
    "csv_row",
    "find_entries",
    "find_pending",
    "keys_page",
    "list_pending",
    "newest_entries",
    "open_page",
    "outlook_of",
    "pending_page",
    "populations_page",
    "principal_page",
    "resolved_page",
    "search_page",
    "spending_of",
    "spending_page",
    "token_page",
]

MAX_READ: Final = 20_000  # entries read in one request, the newest first; the page tells how far that reached
MAX_PENDING: Final = 1000  # reservations read in one request, each in several queries
_PAGE_SIZE: Final = 50  # entries on a page of the search
_FIRST_CHUNK, _LARGEST_CHUNK = 50, 1000  # entries of one account read at a time
MOST_RESOLVED: Final = 40  # reservations in one form, which may have 50 fields
_ROWS_OF_PRINCIPAL: Final = 10  # entries and reservations on the page of a principal
_MOST_ROWS: Final = 20  # of a table of shares; the rest is one row
_DAYS: Final = 30  # of a period, unless another is chosen
_MOST_BARS: Final = 31  # of the chart over time
_CSV_ROWS: Final = 1000  # read and sent at a time

FormFields: TypeAlias = dict[str, str]
ApiHandler: TypeAlias = Callable[[Call], Coroutine[Any, Any, Any]]


class Show(NamedTuple):
    """A page that a handler wants to be shown: the function that makes it, called with the ledger and the caller."""

    view: Callable[..., Page]
    args: tuple[Any, ...] = ()


# Reading the history of many accounts, newest first.


class Position(NamedTuple):
    """A point in the history of all accounts; what follows is older."""

    time: int
    account: str
    sequence: int

    @property
    def order(self) -> tuple[int, str, int]:
        """By which entries are sorted: newest first."""
        return -self.time, self.account, -self.sequence


def newest_entries(
    ledger: Ledger, balances: Mapping[str, Balance], after: Position | None = None
) -> Iterator[tuple[str, HistoryEntry]]:
    """Yield the entries of some accounts with the account's name, newest first, those after a position.

    Every account is read backwards in growing chunks, and only as far as entries are taken.
    """
    queue: list[tuple[tuple[int, str, int], HistoryEntry | None, Iterator[HistoryEntry]]] = []
    for name, balance in balances.items():
        last, time = balance.sequence, balance.time
        if after is not None and time > after.time:
            last, time = _last_until(ledger, name, last, after.time), after.time
        if last >= 0:  # what was written last stands for what is not read yet
            queue.append((Position(time, name, last).order, None, _backwards(ledger, name, last)))
    heapify(queue)
    while queue:
        (_, name, _), past, older = heappop(queue)
        if past is not None and (after is None or Position(past.written, name, past.sequence).order > after.order):
            yield name, past
        following = next(older, None)
        if following is not None:
            order = Position(following.written, name, following.sequence).order
            heappush(queue, (order, following, older))


def _last_until(ledger: Ledger, name: str, last: int, time: int) -> int:
    """Return the sequence of the last entry that was written by a time; -1 if there is none."""

    def written(sequence: int) -> int:
        return ledger.backend.history(name, sequence, 1)[0].written

    return bisect_right(range(last + 1), time, key=written) - 1


def _backwards(ledger: Ledger, name: str, last: int) -> Iterator[HistoryEntry]:
    stride = _FIRST_CHUNK
    while last >= 0:
        first = max(0, last + 1 - stride)
        yield from reversed(ledger.backend.history(name, first, last + 1 - first))
        last, stride = first - 1, min(2 * stride, _LARGEST_CHUNK)


class Period(NamedTuple):
    """A span of days, in UTC: from the first to the last, both included."""

    first: date
    last: date

    @property
    def since(self) -> int:
        """When it begins, in microseconds since 1970."""
        return _microseconds(self.first)

    @property
    def until(self) -> int:
        """When it has ended, in microseconds since 1970."""
        return _microseconds(self.last + timedelta(days=1))


def _microseconds(day: date) -> int:
    return round(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000


def _period(query: Query, days: int | None) -> Period:
    """Return the days of a query: until today, and `days` of them or all, if it does not say."""
    last = _read_day("until", query.get("until", "")) or datetime.now(UTC).date()
    earliest = date(1970, 1, 1) if days is None else last - timedelta(days=days - 1)
    first = _read_day("since", query.get("since", "")) or earliest
    if first > last:
        raise BadRequest(f"since must not be after until (got {first} and {last})")
    return Period(first, last)


def _read_day(field: str, text: str) -> date | None:
    try:
        day = date.fromisoformat(text.strip()) if text.strip() else None
    except ValueError:
        day = date.min
    if day is not None and not 1970 <= day.year <= 9000:
        raise BadRequest(f"{field} must be a date such as 2030-01-31 (got {shown(text)})")
    return day


def _typed(query: Query, *fields: str) -> dict[str, str]:
    return {field: query.get(field, "").strip()[:MAX_INPUT] for field in fields}


def _chosen_balances(ledger: Ledger, caller: Caller, name: str) -> dict[str, Balance]:
    """Return the balances of the accounts that the caller may see, or of the one that was named."""
    if not name:
        return visibility.visible_balances(ledger, caller)
    visibility.visible_account(ledger, caller, name)
    return ledger.backend.balances([name])


# Who spends.


class Share(Struct):
    """What was charged under one name. `part` is in budgets: 0.25 is a quarter of one account's."""

    name: str
    charges: int = 0
    part: float = 0.0
    voided: int = 0
    refused: int = 0


class Bar(Struct):
    """What was charged in some days of the period, the first of which is `day`."""

    day: str
    charges: int = 0
    part: float = 0.0


class Spending(Struct):
    """What was charged in a period, and how much of the history was read to know it."""

    first: str
    last: str
    account: str
    principal: str
    by_principal: list[Share]
    by_purpose: list[Share]
    by_account: list[Share]
    over_time: list[Bar]
    days_per_bar: int
    without_limit: list[str]  # accounts with charges that are no part of anything
    read: int  # entries
    complete_since: str | None  # if not everything was read: the charges since then are complete


class _Account(NamedTuple):
    """How the charges of an account are measured: on the alternative with the most room left."""

    meter: int | None
    limit: int

    @classmethod
    def of(cls, compiled: Compiled, balance: Balance) -> _Account:
        meter = roomiest(compiled, balance.totals)
        limit = None if meter is None else compiled.meters[meter].limit
        return cls(meter if limit else None, limit or 0)

    def part(self, past: HistoryEntry) -> float:
        """Return the part of the account's budget that a charge took; 0 if it has no price there."""
        amount = None if self.meter is None else price_from_text(past.entry.price).amounts[self.meter]
        return 0.0 if amount is None else float(Fraction(amount, self.limit))


class _Sums:
    """Adds up charges by name."""

    def __init__(self) -> None:
        self.rows: dict[str, Share] = {}

    def add(self, name: str, what: str, part: float) -> None:
        row = self.rows.get(name)
        if row is None:
            row = self.rows[name] = Share(name)
        if what == "voided":
            row.voided += 1
        elif what == "refused":
            row.refused += 1
        else:
            row.charges += 1
            row.part += part

    def sorted(self) -> list[Share]:
        """Return the rows, the largest first."""
        return sorted(self.rows.values(), key=lambda row: (-row.part, -row.charges, row.name))


def spending_of(ledger: Ledger, caller: Caller, query: Query, most: int = MAX_READ) -> Spending:
    """Add up what was charged in a period to the accounts that the caller sees, by account, principal and purpose.

    A charge that was voided, whenever that was, is not among the charges. Of several accounts each charge counts
    once: at the account that was asked. Of one account everything counts that it was charged, also from below.
    """
    period, typed = _period(query, _DAYS), _typed(query, "account", "principal")
    balances = _chosen_balances(ledger, caller, typed["account"])
    measures = {name: _Account.of(ledger.backend.opened(name).compiled, one) for name, one in balances.items()}
    principals, purposes, by_account = _Sums(), _Sums(), _Sums()
    width = -(-((period.last - period.first).days + 1) // _MOST_BARS)
    count = -(-((period.last - period.first).days + 1) // width)
    bars = [Bar(str(period.first + timedelta(days=width * i))) for i in range(count)]
    voided: set[str] = set()
    examined, complete_since = 0, None
    recent = {name: one for name, one in balances.items() if one.time >= period.since}
    for name, past in newest_entries(ledger, recent):
        if past.written < period.since:
            break
        if examined == most:
            complete_since = iso_time(past.written)
            break
        examined += 1
        if past.verb == "void":
            voided.add(past.key)  # it comes after what it takes back, so it is met first
        what = _kind_of(past, voided)
        if not what or past.written >= period.until:
            continue
        if typed["principal"] and past.principal != typed["principal"]:
            continue
        part = measures[name].part(past) if what == "charged" else 0.0
        by_account.add(name, what, part)
        asked = past.account
        if not typed["account"] and asked != name:
            continue  # counted at the account that was asked
        principals.add(past.principal, what, part)
        purposes.add(_purpose(past, caller, name, asked), what, part)
        if what == "charged":
            bar = bars[(past.written - period.since) // (width * 86_400_000_000)]
            bar.charges, bar.part = bar.charges + 1, bar.part + part
    rows = by_account.sorted()
    return Spending(
        first=str(period.first),
        last=str(period.last),
        account=typed["account"],
        principal=typed["principal"],
        by_principal=principals.sorted(),
        by_purpose=purposes.sorted(),
        by_account=rows,
        over_time=bars,
        days_per_bar=width,
        without_limit=[row.name for row in rows if row.charges and measures[row.name].meter is None],
        read=examined,
        complete_since=complete_since,
    )


def _kind_of(past: HistoryEntry, voided: set[str]) -> str:
    if past.verb == "refuse":
        return "refused"
    if past.verb not in {"spend", "reserve"}:
        return ""
    return "voided" if past.entry.request_id in voided else "charged"


def _purpose(past: HistoryEntry, caller: Caller, name: str, asked: str) -> str:
    """Return what a charge was for: its note, or that it came from an account below, where the note is."""
    if asked != name:
        return f"(charged to {asked})" if caller.sees(asked) else "(charged to an account below)"
    return past.note or "(no note)"


def _first_rows(rows: list[Share]) -> list[Share]:
    """Return the first rows of a table, and the sum of the others as the last."""
    if len(rows) <= _MOST_ROWS + 1:
        return rows
    rest = Share(f"({len(rows) - _MOST_ROWS:,} more)")
    for row in rows[_MOST_ROWS:]:
        rest.charges += row.charges
        rest.part += row.part
        rest.voided += row.voided
        rest.refused += row.refused
    return [*rows[:_MOST_ROWS], rest]


def _spending_context(ledger: Ledger, caller: Caller, spending: Spending) -> dict[str, Any]:
    today = datetime.now(UTC).date()
    return {
        "spending": spending,
        "tables": {
            "principal": _first_rows(spending.by_principal),
            "purpose": _first_rows(spending.by_purpose),
            "account": _first_rows(spending.by_account),
        },
        "top": max((bar.part for bar in spending.over_time), default=0.0),
        "presets": [(days, str(today - timedelta(days=days - 1))) for days in (7, 30, 90, 365)],
        "names": [*visibility.visible_balances(ledger, caller)],
        "today": str(today),
    }


def spending_page(ledger: Ledger, caller: Caller, query: Query) -> Page:
    """Return who charged how much, for what and when."""
    spending = spending_of(ledger, caller, query)
    return Page("spending.html", "Spending", spending, _spending_context(ledger, caller, spending))


# Entries of all accounts, and what concerns one principal.


class Found(Struct):
    """An entry that was searched for."""

    account: str
    entry: EntryForm


class Findings(Struct):
    """A page of entries of several accounts, newest first."""

    entries: list[Found]
    older: str  # where the next page begins: pass it as `after`; empty at the end
    read: int  # how many entries were examined


def find_entries(ledger: Ledger, caller: Caller, query: Query, most: int = MAX_READ) -> Findings:
    """Return the newest entries of the accounts that the caller sees that match the query."""
    period = _period(query, None)
    typed = _typed(query, "account", "principal", "verb", "text", "after")
    wanted = {field: typed[field].casefold() for field in ("verb", "principal", "text")}
    after = _read_position(typed["after"]) if typed["after"] else Position(period.until - 1, "", 1 << 62)
    found, examined, older = list[Found](), 0, ""
    for name, past in newest_entries(ledger, _chosen_balances(ledger, caller, typed["account"]), after):
        if past.written < period.since:
            break
        if examined == most or len(found) == _PAGE_SIZE:
            older = f"{after.time}-{after.sequence}-{after.account}"
            break
        examined, after = examined + 1, Position(past.written, name, past.sequence)
        if wanted["verb"] not in {"", past.verb}:
            continue
        entry = visibility.entry_form(past, caller)  # what it hides is not searched either
        if view_models.matches_entry(entry, wanted):
            found.append(Found(name, entry))
    return Findings(found, older, examined)


def _read_position(text: str) -> Position:
    time, _, rest = text.partition("-")
    sequence, _, name = rest.partition("-")
    if not all(part.isascii() and part.isdecimal() and len(part) <= 18 for part in (time, sequence)):
        raise BadRequest(f"after must be the end of an earlier page (got {shown(text)}); begin the search again")
    return Position(int(time), check_name(name, "after"), int(sequence))


def search_page(ledger: Ledger, caller: Caller, query: Query) -> Page:
    """Return the entries that match a query, of all accounts that the caller sees."""
    findings = find_entries(ledger, caller, query)
    asked = _typed(query, "text", "principal", "verb", "account", "since", "until", "after")
    kept = {field: value for field, value in asked.items() if value and field != "after"}
    context = {
        "findings": findings,
        "asked": asked,
        "verbs": view_models.VERBS,
        "names": [*visibility.visible_balances(ledger, caller)],
        "newest": "?" + urlencode(kept),
        "older": "?" + urlencode(kept | {"after": findings.older}),
    }
    return Page("search.html", "Entries", findings, context)


def principal_page(ledger: Ledger, caller: Caller, query: Query, keys: list[KeyView] | None) -> Page:
    """Return what one principal charged, what is pending of it, and its keys if they were passed."""
    name = query.get("name", "").strip()
    if not name:
        raise BadRequest("name must be a principal, such as /principal?name=ana")
    spending = spending_of(ledger, caller, {**query, "principal": name})
    listed, more = list_pending(ledger, caller)
    pending = [one for one in listed if one.principal == name]
    findings = find_entries(ledger, caller, {"principal": name}, 2000)
    last = [one for one in findings.entries if one.entry.principal == name][:_ROWS_OF_PRINCIPAL]
    own = None if keys is None else [one for one in keys if one.key.principal == name]
    context = _spending_context(ledger, caller, spending)
    shown = {"pending": pending[:_ROWS_OF_PRINCIPAL], "count": len(pending), "more": more}
    context |= {"name": name, "last": last, "keys": own, **shown}
    representation = {"principal": name, "spending": spending, "pending": pending, "last": last, "keys": own}
    return Page("principal.html", name, representation, context)


class PopulationView(Struct):
    """What the ledger holds of a population. None of it is about a person."""

    name: str
    promise: str
    privacy_unit: str
    filter: str
    rounds: int
    last: str
    closed: bool
    schedule: str  # what all epochs promise together, if it renews


def populations_page(ledger: Ledger, caller: Caller) -> Page:
    """Return the populations, without any number of a person: what remains to each is in no ledger."""
    rows = []
    for name, balance in visibility.visible_balances(ledger, caller, populations=True).items():
        opened = ledger.backend.opened(name)
        policy, renewal = opened.compiled.policy, opened.renewal
        rows.append(
            PopulationView(
                name,
                policy.target,
                policy.privacy_unit,
                policy.filter_text,
                balance.sequence - balance.closed,
                iso_time(balance.time),
                balance.closed,
                "" if renewal is None else renewal.schedule.promise_text(policy),
            )
        )
    return Page("populations.html", "Populations", rows, {"rows": rows})


# Actions: what a form asks for is done by the handler of the API.


_ACTIONS: Final[dict[ApiHandler, Route]] = {
    route.handler: route
    for route in ROUTES
    if route.handler
    in {charges.commit, charges.void, accounts.close, admin.make_key, admin.rotate_key, admin.revoke_key}
}


async def _perform(
    state: AppState,
    caller: Caller,
    handler: ApiHandler,
    path: dict[str, str],
    fields: Mapping[str, object],
) -> Any:  # noqa: ANN401  what the API's handler returns
    """Carry out an action of the API for a caller whose role allows it there; `key` is the idempotency key."""
    route = _ACTIONS[handler]
    caller.require(route.verb)
    body = {field: value for field, value in fields.items() if field != "key"}
    try:
        form = None if route.form is None else msgspec.convert(body, route.form)
    except msgspec.ValidationError as problem:
        raise BadRequest(f"the form cannot be read: {str(problem)[:MAX_INPUT]}; nothing was changed") from None
    key = str(fields["key"]) if fields.get("key") else None
    if route.needs_idempotency_key and key is None:
        raise BadRequest("the form has no idempotency key; reload the page and send it again")
    return await handler(Call(state, caller, path, None, form, key))


class Confirmation(NamedTuple):
    """What a form will do, in words, and what is sent to have it done."""

    title: str
    lines: tuple[str, ...]
    button: str
    action: str
    fields: Mapping[str, str]  # of the form that was sent, to be sent again
    back: str
    asks: str = ""  # what is typed to confirm: "token", "name" or "reason", or nothing
    overlaps: Mapping[str, str] = {}  # for which the old key stays valid, in seconds, with their labels
    overlap: str = ""  # the chosen one
    message: str = ""
    status: int = 200


def confirm_page(_ledger: Ledger, _caller: Caller, confirmation: Confirmation) -> Page:
    """Return the page that says what will happen, and asks for a confirmation."""
    representation = {"title": confirmation.title, "lines": confirmation.lines, "message": confirmation.message}
    context = {"confirmation": confirmation}
    return Page("confirm.html", confirmation.title, representation, context, confirmation.status)


def _confirm(confirmation: Confirmation, problem: Problem | OdographError | None = None) -> Show:
    if problem is not None:
        message = page_wording(problem.detail if isinstance(problem, Problem) else str(problem))
        status = problem.status if isinstance(problem, Problem) else 422
        confirmation = confirmation._replace(message=message, status=status)
    return Show(confirm_page, (confirmation,))


async def _require_own_key(state: AppState, caller: Caller, token: str) -> None:
    """Raise `NotPermitted` unless the token is a valid owner's key of the caller.

    So an owner's cookie, or a script on a page, cannot make a key with which to spend.
    """
    token = token.strip()
    key = await state.look_up(state.keys.find, digest_of_token(token)) if looks_like_token(token) else None
    known = key is not None and key.valid_at(state.keys.now())
    if key is None or not known or key.principal != caller.principal or key.role is not Role.OWNER:
        raise NotPermitted(
            "a new key is made only with your own API key, and this is not a valid owner's key of yours; nothing was"
            " made"
        )


# Keys.


class KeyView(Struct):
    """An API key as the page of keys shows it."""

    key: KeyForm
    valid: bool
    last_use: str | None  # by this worker since it started


_NEW_KEY: Final = {"principal": "", "role": "analyst", "accounts": "", "every_account": "", "days": "90"}


def _key_views(state: AppState) -> list[KeyView]:
    now, uses = state.keys.now(), state.key_uses
    return [
        KeyView(KeyForm(**key.to_dict()), key.valid_at(now), iso_time(uses[key.id]) if key.id in uses else None)
        for key in state.keys.keys()  # noqa: SIM118  a method of the store
    ]


def keys_page(
    ledger: Ledger, caller: Caller, state: AppState, typed: FormFields | None = None, problem: Problem | None = None
) -> Page:
    """Return the API keys, and the form that makes one."""
    views = _key_views(state)
    context = {
        "valid": [one for one in views if one.valid],
        "ended": [one for one in views if not one.valid],
        "typed": _NEW_KEY | {field: (typed or {}).get(field, "") for field in _NEW_KEY if typed is not None},
        "roles": [*Role],
        "names": [*visibility.visible_balances(ledger, caller)],
        "request_key": (typed or {}).get("key") or new_secret(),
        "message": "" if problem is None else page_wording(problem.detail),
        "started": iso_time(state.started),
    }
    return Page("keys.html", "Keys", {"keys": views}, context, 200 if problem is None else problem.status)


def token_page(_ledger: Ledger, _caller: Caller, token: str, key: Mapping[str, Any]) -> Page:
    """Return the page that shows a new token, once."""
    return Page("token.html", "A new API key", {"token": token, "key": key}, {"token": token, "key": key}, 201)


async def _keys(state: AppState, _request: Request, session: PageSession, form: FormFields) -> Show:
    session.caller.require("administer")
    if not form:
        return Show(keys_page, (state,))
    try:
        fields = _key_fields(form)
        role, names, every = check_key_request(
            fields["principal"], fields["role"], fields["accounts"], fields["every_account"], fields.get("expires")
        )
        await state.run(require_existing, state.ledger_of(session.caller), names)
    except (BadRequest, InvalidArgument) as error:
        return Show(keys_page, (state, form, state.problem(error, session.caller)))
    whose = "every account, also those opened later" if every else ", ".join(names)
    ends = f"It expires in {form['days'].strip()} days." if "expires" in fields else "It does not expire."
    does = {
        Role.OWNER: "do everything: open and close accounts, make and revoke keys, spend, erase",
        Role.ANALYST: "spend and reserve, but not commit or void",
        Role.RUNNER: "spend, reserve, commit and void",
        Role.AUDITOR: "read, verify and export, but not spend",
    }[role]
    article = "a" if role is Role.RUNNER else "an"
    confirmation = Confirmation(
        f"Make {article} {role}'s key",
        (f"A new API key for {form['principal'].strip()} may {does}.", f"It is for {whose}.", ends),
        "Make the key",
        "/keys",
        {field: form.get(field, "") for field in (*_NEW_KEY, "key")},
        "/keys",
        "token",
    )
    return await _new_key(state, session.caller, confirmation, form, lambda: (admin.make_key, {}, fields))


def _key_fields(form: FormFields) -> dict[str, Any]:
    """Return the fields of the API's form from those of the page's."""
    days = form.get("days", "").strip()
    if days and not (days.isascii() and days.isdecimal() and 1 <= int(days[:9]) <= 10_000 and len(days) <= 5):
        raise BadRequest(
            f"days must be an integer from 1 to 10,000, or empty for a key that lasts (got {shown(days)})"
        )
    fields = {
        "principal": form.get("principal", "").strip(),
        "role": form.get("role", ""),
        "accounts": form.get("accounts", "").replace(",", " ").split(),
        "every_account": bool(form.get("every_account")),
        "key": form.get("key", ""),
    }
    return fields | ({"expires": float(86_400 * int(days))} if days else {})


async def _new_key(
    state: AppState,
    caller: Caller,
    confirmation: Confirmation,
    form: FormFields,
    action: Callable[[], tuple[ApiHandler, dict[str, str], Mapping[str, object]]],
) -> Show:
    """Ask for the confirmation of a form that ends in a new key, or carry it out and show the token."""
    if not form.get("confirmed"):
        return _confirm(confirmation)
    try:
        await _require_own_key(state, caller, form.get("token", ""))
        handler, path, fields = action()
        made = await _perform(state, caller, handler, path, fields)
    except OdographError as error:
        return _confirm(confirmation, state.problem(error, caller))
    return Show(token_page, (made["token"], made["key"]))


_OVERLAPS: Final = {"86400": "in a day", "3600": "in an hour", "604800": "in a week", "0": "at once"}


async def _rotate_key(state: AppState, request: Request, session: PageSession, form: FormFields) -> Show:
    session.caller.require("administer")
    key = await _find_key(state, request)
    overlap = form.get("overlap", "86400")
    if overlap not in _OVERLAPS:
        raise BadRequest(f"overlap must be one of {', '.join(_OVERLAPS)} seconds (got {shown(overlap)})")
    confirmation = Confirmation(
        f"Rotate the key {key.id}",
        (
            f"A new key for {key.principal}, with the same role ({key.role}) and the same accounts, takes its place.",
            "The old key stays valid for a while: give the new one to its programs in this time.",
        ),
        "Rotate the key",
        f"/keys/{key.id}/rotate",
        {"key": form.get("key", "")},
        "/keys",
        "token",
        overlaps=_OVERLAPS,
        overlap=overlap,
    )
    fields = {"overlap": float(overlap), "key": form.get("key", "")}
    return await _new_key(
        state, session.caller, confirmation, form, lambda: (admin.rotate_key, {"key": key.id}, fields)
    )


async def _revoke_key(state: AppState, request: Request, session: PageSession, form: FormFields) -> Show | Response:
    session.caller.require("administer")
    key = await _find_key(state, request)
    lines = [
        f"The key {key.id} of {key.principal} ({key.role}) stops working within a second, for good.",
        "Browsers that signed in with it are signed out. What it was used for stays in the ledger.",
    ]
    if key.id == session.caller.api_key_id:
        lines.append("It is the key that you are signed in with: you will be signed out.")
    confirmation = Confirmation(
        f"Revoke the key {key.id}", tuple(lines), "Revoke the key", f"/keys/{key.id}/revoke", {}, "/keys"
    )
    if not form.get("confirmed"):
        return _confirm(confirmation)
    try:
        await _perform(state, session.caller, admin.revoke_key, {"key": key.id}, {})
    except OdographError as error:
        return _confirm(confirmation, state.problem(error, session.caller))
    return _redirect("/keys")


async def _find_key(state: AppState, request: Request) -> ApiKey:
    return await state.run(state.keys.key, request.path_params["key"])


def _redirect(path: str) -> Response:
    """Redirect to a page of this service after a form, so that a reload does not send it again."""
    return RedirectResponse(path, 303, HEADERS)


# Reservations.


class Pending(Struct):
    """A reservation that is neither committed nor voided."""

    id: str
    principal: str
    note: str
    receipt: ReceiptForm
    waits: str  # how long it has been pending
    expired: bool  # it can only be committed


def list_pending(
    ledger: Ledger, caller: Caller, name: str = "", most: int = MAX_PENDING
) -> tuple[list[Pending], bool]:
    """Return pending reservations of which the caller sees every account, those that expire first at the top.

    About `most` are read, of each account the oldest; the second value is whether there may be more.
    """
    found: dict[str, Pending] = {}
    left = most
    for account in _chosen_balances(ledger, caller, name):
        form = visibility.reservations_of(ledger, caller, account, 0, max(1, left))
        left = 0 if form.next is not None else left - len(form.reservations)
        for receipt in form.reservations:
            if receipt.id not in found:  # else it charged this account, or one below it, too
                found[receipt.id] = _pending_of(ledger, receipt)
        if left <= 0:
            break
    return sorted(found.values(), key=lambda one: (one.receipt.expires or "~", one.receipt.time, one.id)), left <= 0


def find_pending(ledger: Ledger, caller: Caller, ids: Iterable[str]) -> list[Pending]:
    """Return those of some reservations that are pending and that the caller may see."""
    found = []
    for one in ids:
        try:
            account, sequence = parse_entry_id(one)
            form = visibility.reservations_of(ledger, caller, account, sequence, 1)
        except (AccountNotFound, ReservationNotFound):
            continue
        found += [_pending_of(ledger, receipt) for receipt in form.reservations if receipt.id == one]
    return found


def _pending_of(ledger: Ledger, receipt: ReceiptForm) -> Pending:
    own = receipt.accounts[0]
    (past,) = ledger.backend.history(own.account, own.sequence, 1)
    now = datetime.now(UTC)
    expired = receipt.expires is not None and datetime.fromisoformat(receipt.expires) <= now
    return Pending(receipt.id, past.principal, past.note, receipt, view_models.age_of(receipt.time, now), expired)


def pending_page(ledger: Ledger, caller: Caller, query: Query) -> Page:
    """Return a page of the pending reservations of every account, or of one, with the form that resolves them."""
    typed = _typed(query, "account", "principal", "page")
    listed, more = list_pending(ledger, caller, typed["account"])
    principals = sorted({one.principal for one in listed})
    pending = [one for one in listed if typed["principal"] in ("", one.principal)]
    pages = max(1, -(-len(pending) // MOST_RESOLVED))
    page = min(pages, max(1, view_models.read_integer("page", typed["page"] or "1")))
    first = (page - 1) * MOST_RESOLVED
    kept = {field: typed[field] for field in ("account", "principal") if typed[field]}
    context = {
        "pending": pending[first : first + MOST_RESOLVED],
        "first": first + 1,
        "count": len(pending),
        "more": more,
        "asked": typed,
        "names": [*visibility.visible_balances(ledger, caller)],
        "principals": principals,
        "previous": "?" + urlencode(kept | {"page": page - 1}) if page > 1 else "",
        "following": "?" + urlencode(kept | {"page": page + 1}) if page < pages else "",
    }
    return Page("pending.html", "Pending reservations", {"pending": pending, "more": more}, context)


class Resolved(Struct):
    """What became of a reservation."""

    id: str
    done: bool
    message: str


def resolved_page(_ledger: Ledger, _caller: Caller, verb: str, results: list[Resolved]) -> Page:
    """Return what became of the reservations of a form."""
    context = {"verb": verb, "results": results}
    return Page("resolved.html", "Reservations resolved", {"verb": verb, "results": results}, context)


async def _pending(_state: AppState, request: Request, session: PageSession, _form: FormFields) -> Show:
    session.caller.require("read")
    return Show(pending_page, (request.query_params,))


async def _resolve(state: AppState, _request: Request, session: PageSession, form: FormFields) -> Show:
    caller, verb = session.caller, form.get("verb", "")
    caller.require("resolve")
    if verb not in {"commit", "void"}:
        raise BadRequest(f"verb must be commit or void (got {shown(verb)})")
    ids = [field.removeprefix("id.") for field in form if field.startswith("id.")]
    reason = form.get("reason", "").strip()
    if not ids:
        raise BadRequest("choose at least one reservation; nothing was changed")
    unexplained = verb == "void" and not reason
    if unexplained or not form.get("confirmed"):
        chosen = await state.compute(find_pending, state.ledger_of(caller), caller, ids)
        problem = BadRequest("give the reason why the mechanism was not run; nothing was changed")
        told = state.problem(problem, caller) if unexplained and form.get("confirmed") else None
        return _confirm(_resolution(verb, chosen, form), told)
    handler = charges.commit if verb == "commit" else charges.void
    fields = {"note": reason} if verb == "commit" else {"reason": reason}
    results = []
    for one in ids:
        try:
            await _perform(state, caller, handler, {"reservation": one}, fields)
            results.append(Resolved(one, done=True, message="committed" if verb == "commit" else "voided"))
        except OdographError as error:
            results.append(Resolved(one, done=False, message=page_wording(state.problem(error, caller).detail)))
    return Show(resolved_page, (verb, results))


def _resolution(verb: str, chosen: list[Pending], form: FormFields) -> Confirmation:
    """Return what resolving these reservations means."""
    if not chosen:
        raise BadRequest("none of these reservations is pending any more; nothing was changed")
    meaning = (
        "Committing states that the mechanism was run, or may have been. The charges stay, for good."
        if verb == "commit"
        else "Voiding states that the mechanism was not run, and that no part of its answer was seen. The"
        " charges are taken back. If it was run after all, the promise of these accounts no longer holds."
    )
    reason = form.get("reason", "").strip()
    lines = [meaning, *([f"The reason: {reason}"] if reason else [])]
    for one in chosen:
        expired = ". It has expired: it cannot be voided any more" if one.expired and verb == "void" else ""
        since = f"{one.receipt.time[:19].replace('T', ' ')} UTC"
        lines.append(f"{one.id}: {_charged(one.receipt)}, reserved by {one.principal} on {since}{expired}")
    fields = {"verb": verb, **{f"id.{one.id}": "1" for one in chosen}}
    asks = "reason" if verb == "void" and not reason else ""
    if not asks:
        fields["reason"] = reason
    count = len(chosen)
    title = f"{verb.capitalize()} {count} reservation{'s' * (count != 1)}"
    return Confirmation(title, tuple(lines), title, "/pending/resolve", fields, "/pending", asks)


def _charged(receipt: ReceiptForm) -> str:
    costs = [
        msgspec.json.decode(line.cost) if isinstance(line.cost, msgspec.Raw) else line.cost
        for line in receipt.accounts
    ]
    return ", ".join(
        f"{guarantee_from_dict(cost).brief()} of {line.account}"
        for cost, line in zip(costs, receipt.accounts, strict=True)
    )


# Closing an account, and its entries as CSV.


async def _close(state: AppState, request: Request, session: PageSession, form: FormFields) -> Show | Response:
    caller, name = session.caller, request.path_params["name"]
    caller.require("close")
    page = f"/accounts/{quote(name, safe='')}"
    confirmation = await state.compute(_closing, state.ledger_of(caller), caller, name, page)
    if not form:
        return _confirm(confirmation)
    if form.get("name", "").strip() != name:
        problem = BadRequest(f"type the account's name, {name}, to close it (got {shown(form.get('name', ''))})")
        return _confirm(confirmation, problem)
    await _perform(state, caller, accounts.close, {"name": name}, {"note": form.get("note", "").strip()})
    return _redirect(page)


def _closing(ledger: Ledger, caller: Caller, name: str, page: str) -> Confirmation:
    form = visibility.account_form(ledger, caller, name, pending=False)
    pending = visibility.pending_count(ledger, caller, name)
    lines = [f"{name} takes no charges any more, for good. What was charged stays, and so do its entries."]
    if form.children:
        lines.append(f"The accounts below it are closed too: {', '.join(form.children)}.")
    if pending:
        lines.append(f"Its pending reservations ({pending:,}) can still be committed or voided.")
    if form.account.closed:
        lines = [f"{name} is closed already."]
    return Confirmation(f"Close {name}", tuple(lines), "Close the account", f"{page}/close", {}, page, "name")


_COLUMNS: Final = ("sequence", "time", "verb", "cost", "principal", "key", "note", "expires", "seal")


def csv_row(entry: EntryForm) -> list[str]:
    """Return an entry as the cells of a table; none of them is a formula in a spreadsheet."""
    cost = "" if entry.cost is None else str(guarantee_from_dict(entry.cost))
    cells = (entry.verb, cost, entry.principal, entry.key, entry.note, entry.expires or "", entry.seal)
    return [str(entry.sequence), entry.time, *map(cell_text, cells)]


async def _entries_csv(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    caller, name = session.caller, request.path_params["name"]
    caller.require("read")
    ledger = state.ledger_of(caller)

    def read_rows(first: int, count: int) -> Awaitable[EntriesForm]:
        return state.compute(visibility.entries_form, ledger, caller, name, first, count)

    page = await read_rows(0, _CSV_ROWS)  # now, so that a problem is told before the first row

    async def lines() -> AsyncIterator[bytes]:
        yield _csv_text([[*_COLUMNS]])
        entries, left = page.entries, page.size  # entries that are written meanwhile are left out
        while entries:
            yield _csv_text([csv_row(entry) for entry in entries])
            left -= len(entries)
            entries = (await read_rows(entries[-1].sequence + 1, min(_CSV_ROWS, left))).entries if left > 0 else []

    disposition = f"attachment; filename*=UTF-8''{quote(f'{name}-entries.csv')}"
    return StreamingResponse(lines(), 200, HEADERS | {"Content-Disposition": disposition}, "text/csv; charset=utf-8")


def _csv_text(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    # Quoted, or a program that separates cells at semicolons would begin one in the middle of a text.
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue().encode()


# What a new account would admit, by what it is made for.


class _Asked(NamedTuple):
    """A kind of question that the form asks about: its fields with their labels, and what it costs."""

    label: str
    fields: tuple[tuple[str, str, str], ...]  # name, label, example
    cost: Callable[..., Guarantee]


ASKED: Final = (
    _Asked("Counts with Laplace noise", (("ask_laplace", "scale", "100"),), laplace),
    _Asked("Gaussian noise, as of OpenDP", (("ask_gaussian", "sigma, for sensitivity 1", "50"),), gaussian),
    _Asked(
        "Steps of private training",
        (("ask_rate", "sample rate", "0.01"), ("ask_noise", "noise multiplier", "1.1")),
        subsampled_gaussian,
    ),
    _Asked("Pure DP", (("ask_pure", "epsilon", "0.01"),), PureDP),
    _Asked("Zero-concentrated DP", (("ask_zcdp", "rho", "0.0002"),), ZCDP),
)


class Outlook(Struct):
    """How many questions of each kind a new account would admit, by its reserve or filter."""

    choices: list[str]
    rows: list[tuple[str, list[int], int]]  # what is asked, how many of it are admitted, and the most of them
    gives: dict[str, str]  # what a reserve is for
    unsolved: list[str]  # choices that are computed when the account is opened
    caution: str = ""  # what is wrong with the promise, though it can be made
    problem: str = ""


def outlook_of(typed: Mapping[str, str]) -> Outlook:
    """Count the questions of a form that each choice of reserve or filter would admit; nothing is solved for it."""
    gives = {name: choice.gives for name, choice in RESERVES.items()}
    try:
        costs = _asked_costs(typed)
        compiled, unsolved = _choices(typed)
        counts = outlook(compiled, costs.values())
        caution = caution_of_delta(read(typed.get("delta", "").strip(), "delta"))
    except OdographError as error:
        return Outlook([], [], gives, [], problem=page_wording(str(error)))
    rows = [(label, [*counts[cost].values()], max(counts[cost].values(), default=0)) for label, cost in costs.items()]
    return Outlook([*compiled], rows, gives, unsolved, caution)


_TRAINING: Final = ASKED[2]


def _label_of(kind: _Asked, values: Iterable[str]) -> str:
    sizes = ", ".join(f"{label} {value}" for (_, label, _), value in zip(kind.fields, values, strict=True))
    return f"{kind.label}: {sizes}"


def _asked_costs(typed: Mapping[str, str]) -> dict[str, Guarantee]:
    """Return what each question of the form costs, by its label; without any, questions of the usual sizes."""
    costs: dict[str, Guarantee] = {}
    for kind in ASKED:
        values = [typed.get(name, "").strip()[:MAX_INPUT] for name, _, _ in kind.fields]
        if any(values) and not all(values):
            raise BadRequest(f"{kind.label}: give {' and '.join(label for _, label, _ in kind.fields)}")
        if any(values):
            costs[_label_of(kind, values)] = kind.cost(*values)
    if not costs:
        whole = typed.get("epsilon", "").strip() if typed.get("promise", "epsilon") == "epsilon" else "1"
        *plain, training = usual_requests(read(whole, "epsilon"))
        costs = {str(cost): cost for cost in plain} | {_label_of(_TRAINING, USUAL_TRAINING): training}
    return costs


def _choices(typed: Mapping[str, str]) -> tuple[dict[str, Compiled], list[str]]:
    """Return the policies to choose from that are known without solving, and the names of the others."""
    named = {**typed, "name": "new"}
    promise = typed.get("promise", "epsilon")
    options = {"this promise": {"filter": "default"}}
    if promise == "epsilon":
        options = {name: {"filter": "default", "reserve": name} for name in RESERVES}
        options |= {name: {"filter": name} for name in sorted(FILTERS) if name != "smooth"}
    elif promise == "no limit":
        raise BadRequest("an account without a limit admits every question that its odometer reads")
    found, unsolved, problem = dict[str, Compiled](), list[str](), None
    for name, option in options.items():
        try:
            compiled = compile_at_hand(view_models.policy_from_form(named | option))
        except OdographError as error:  # such as a filter that needs a delta
            problem = problem or error
            continue
        if compiled is None:
            unsolved.append(name)
        else:
            found[name] = compiled
    if problem is not None and not found and not unsolved:
        raise problem
    return found, unsolved


def open_page(
    ledger: Ledger, caller: Caller, typed: Mapping[str, str] | None = None, problem: Problem | None = None
) -> Page:
    """Return the form that opens an account, with what each choice would admit."""
    page = view_models.open_account_page(ledger, caller, typed, problem)
    fields = page.context["typed"]
    asked = {name: (typed or {}).get(name, "")[:MAX_INPUT] for kind in ASKED for name, _, _ in kind.fields}
    found = outlook_of({**fields, **asked})
    form = page.json_representation
    representation = {**(form if isinstance(form, dict) else {}), "outlook": found}
    context = {**page.context, "questions": ASKED, "asked": asked, "outlook": found}
    return page._replace(json_representation=representation, context=context)


async def _outlook(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    session.caller.require("open")
    found = await state.compute(outlook_of, request.query_params)
    return fragment_response("outlook.html", {"outlook": found})


# Pages that only read.


async def _spending(_state: AppState, request: Request, _session: PageSession, _form: FormFields) -> Show:
    return Show(spending_page, (request.query_params,))


async def _search(_state: AppState, request: Request, _session: PageSession, _form: FormFields) -> Show:
    return Show(search_page, (request.query_params,))


async def _principal(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Show:
    keys = await state.run(_key_views, state) if session.caller.may("administer") else None
    return Show(principal_page, (request.query_params, keys))


async def _populations(_state: AppState, _request: Request, _session: PageSession, _form: FormFields) -> Show:
    return Show(populations_page)


Handler: TypeAlias = Callable[[AppState, Request, PageSession, FormFields], Awaitable[Show | Response]]

# The path of each page, its handler and its methods.
PAGES: Final[tuple[tuple[str, Handler, tuple[str, ...]], ...]] = (
    ("/spending", _spending, ("GET",)),
    ("/entries", _search, ("GET",)),
    ("/principal", _principal, ("GET",)),
    ("/populations", _populations, ("GET",)),
    ("/pending", _pending, ("GET",)),
    ("/pending/resolve", _resolve, ("POST",)),
    ("/keys", _keys, ("GET", "POST")),
    ("/keys/{key}/rotate", _rotate_key, ("POST",)),
    ("/keys/{key}/revoke", _revoke_key, ("POST",)),
    ("/accounts/{name}/close", _close, ("GET", "POST")),
    ("/accounts/{name}/entries.csv", _entries_csv, ("GET",)),
    ("/open/outlook", _outlook, ("GET",)),
)
