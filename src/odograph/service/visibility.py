"""What a caller may see of accounts, entries, receipts, decisions and errors. It is decided here and nowhere else.

A caller bound to accounts cannot see that others exist. An account that it may not see is not found, like one that
does not exist; the names of its relatives are left out; a refusal by an account above appears as one by the caller's
own account. Errors become problem+json, with status and code from the error table, and messages that disclose
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from itertools import islice
from typing import Any, Final, TypeAlias

from msgspec import UNSET, Raw, Struct

from odograph.account import account_summary
from odograph.compile import certification
from odograph.core.gate import Decision, Price
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.planning import NOTE_ABOUT, note_prefix
from odograph.core.policy import Policy
from odograph.errors import (
    ERROR_TABLE,
    AccountClosed,
    AccountNotFound,
    BadRequest,
    BudgetExceeded,
    EntryNotFound,
    IdempotencyConflict,
    InvalidArgument,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    LedgerUnreachable,
    OdographError,
    OutcomeUnknown,
    RateLimited,
    ReservationNotFound,
    ServiceUnavailable,
    UnprovenComposition,
    listed_as,
)
from odograph.ledger.backend import Backend, LocalBackend, Opened
from odograph.ledger.entries import Entry, iso_time, legs_from_text, shown, text_of, time_of
from odograph.ledger.ledger import Ledger, LedgerAccount
from odograph.ledger.results import HistoryEntry, Lifetime, Receipt
from odograph.ledger.stores.base import EVERY, Balance
from odograph.population.population import read_rounds
from odograph.service.auth import Caller
from odograph.service.schemas import (
    AccountForm,
    AccountRow,
    DecisionForm,
    EntriesForm,
    EntriesQuery,
    EntryForm,
    EventForm,
    EventsForm,
    EventsQuery,
    LifetimeForm,
    LineForm,
    MeterForm,
    PopulationForm,
    PopulationRow,
    Problem,
    PromiseForm,
    ReadingForm,
    ReadingsForm,
    ReceiptForm,
    ReservationsForm,
    RoundRow,
    RoundsForm,
)

__all__ = [
    "BOUND_MESSAGES",
    "NO_THEOREM",
    "PROBLEM",
    "BadDocument",
    "HttpProblem",
    "NotEmpty",
    "PendingRow",
    "PopulationUnusable",
    "TooFast",
    "account_form",
    "asked_account",
    "decide_for",
    "decision_form",
    "entries_form",
    "entry_form",
    "events_form",
    "filtered_entries_form",
    "is_unusable",
    "lifetime_form",
    "mask_refusal",
    "operator_message",
    "pending_count",
    "pending_rows",
    "population_form",
    "population_rows",
    "problem_of",
    "readings_form",
    "receipt_form",
    "require_visible",
    "reservations_form",
    "reservations_of",
    "rounds_form",
    "row_of",
    "unexpected_problem",
    "visible_account",
    "visible_balances",
    "visible_population",
    "visible_rows",
]

# For a caller bound to some accounts: what the policies above take is not disclosed.
NO_THEOREM: Final = "no theorem covers a guarantee of this kind here; ask the account's owner which kinds it takes"

_FIRST_READ: Final = 50  # entries; later reads take more at once
_MAX_SCANNED: Final = 2000  # entries of which a page is chosen
_MAX_PAGE: Final = 1 << 19  # characters of costs and notes on a page of entries


def require_visible(caller: Caller, names: Iterable[str]) -> None:
    """Raise `AccountNotFound` for the first account that the caller may not see, whether or not it exists."""
    bound = caller.accounts
    if bound is None:
        return
    for name in names:
        if name not in bound:
            raise AccountNotFound(f"no account {shown(name)}")


def visible_account(ledger: Ledger, caller: Caller, name: str) -> LedgerAccount:
    """Return an account that the caller may see, or raise `AccountNotFound`."""
    require_visible(caller, [name])
    try:
        return ledger.account(name)
    except (AccountNotFound, LedgerNotFound):
        # The same message as for an account that may not be seen.
        raise AccountNotFound(f"no account {shown(name)}") from None


def visible_population(ledger: Ledger, caller: Caller, name: str) -> Mapping[str, Any]:
    """Return what the ledger says of a population that the caller may see, or raise `AccountNotFound`."""
    require_visible(caller, [name])
    try:
        about = ledger.backend.opened(name).population
    except (AccountNotFound, LedgerNotFound):
        about = None
    if about is None:
        raise AccountNotFound(f"no population {shown(name)}")
    return about


def visible_rows(ledger: Ledger, caller: Caller, after: str = "", count: int = EVERY) -> list[AccountRow]:
    """Return accounts that the caller may see, in the order of their names: at most `count`, those after a name."""
    balances = visible_balances(ledger, caller)
    chosen = islice((balance for name, balance in balances.items() if name > after), count)
    return [row_of(ledger.backend, caller, balance) for balance in chosen]


def visible_balances(ledger: Ledger, caller: Caller, *, populations: bool = False) -> dict[str, Balance]:
    """Return the balances of the accounts that the caller may see, or of the populations, in order of their names.

    A population's balance counts its rounds: what remains of a population is confidential, and not in the ledger.
    """
    try:
        balances = ledger.backend.balances(None if caller.accounts is None else sorted(caller.accounts))
    except LedgerNotFound:  # no account was opened yet
        return {}
    _local(ledger).learn(balances)
    opened = ledger.backend.opened
    return {name: balances[name] for name in sorted(balances) if populations is (opened(name).population is not None)}


def row_of(backend: Backend, caller: Caller, balance: Balance) -> AccountRow:
    """Return the summary of an account."""
    summary = account_summary(backend.opened(balance.head.name).compiled, balance)
    linked = summary["linked"]
    if linked and caller.accounts is not None:  # only if it sees all the linked accounts
        linked = lifetime_form(backend.lifetime(balance.head.name), caller) is not None
    return _mask_summary(summary, caller, linked=linked)


def account_form(ledger: Ledger, caller: Caller, name: str, *, pending: bool = True) -> AccountForm:
    """Return an account with everything that its page shows; `pending` reservations only if they are wanted."""
    form = visible_account(ledger, caller, name).describe(pending=pending)
    lifetime = form["lifetime"] if form["lifetime"] and _sees_all(caller, form["lifetime"]["accounts"]) else None
    reserved = [one for one in form["pending"] if _sees_all(caller, [line["account"] for line in one["accounts"]])]
    linked = form["account"]["linked"] and (caller.accounts is None or lifetime is not None)
    return AccountForm(
        account=_mask_summary(form["account"], caller, linked=linked),
        policy=form["policy"],
        source=form["source"],
        certification=form["certification"],
        meters={meter: MeterForm(**amounts) for meter, amounts in form["meters"].items()},
        reading=ReadingForm(**form["reading"]),
        largest=form["largest"],
        children=[*filter(caller.sees, form["children"])],
        lifetime=None if lifetime is None else LifetimeForm(**lifetime),
        pending=[_mask_receipt(one, caller) for one in reserved],
        voids=form["voids"],
    )


def population_rows(ledger: Ledger, caller: Caller) -> list[PopulationRow]:
    """Return the populations that the caller may see, in the order of their names."""
    try:
        balances = ledger.backend.balances(None if caller.accounts is None else sorted(caller.accounts))
    except LedgerNotFound:  # no account was opened yet
        return []
    opened = {name: ledger.backend.opened(name) for name in sorted(balances)}
    return [_population_row(one, balances[name]) for name, one in opened.items() if one.population is not None]


def population_form(ledger: Ledger, caller: Caller, name: str) -> PopulationForm:
    """Return a population as the ledger knows it."""
    visible_population(ledger, caller, name)
    opened = ledger.backend.opened(name)
    row = _population_row(opened, ledger.backend.balances([name])[name])
    lifetime = lifetime_form(ledger.backend.lifetime(name), caller)
    return PopulationForm(row, opened.compiled.to_dict(), certification(opened.compiled), lifetime)


def rounds_form(ledger: Ledger, caller: Caller, name: str, first: int, count: int) -> RoundsForm:
    """Return a page of rounds; a negative `first` counts from the end."""
    visible_population(ledger, caller, name)
    size = ledger.backend.balances([name])[name].sequence + 1
    rounds = [RoundRow(**one.to_dict()) for one in read_rounds(ledger.backend, name, first, count)]
    return RoundsForm(name, size, rounds)


def _population_row(opened: Opened, balance: Balance) -> PopulationRow:
    policy, about = opened.compiled.policy, opened.population or {}
    return PopulationRow(
        name=opened.head.name,
        promise=_promise(policy),
        privacy_unit=policy.privacy_unit,
        neighbors=policy.neighbors,
        filter=policy.filter_text,
        engine=str(about.get("engine")),
        unknown=str(about.get("unknown")),
        rounds=balance.sequence - balance.closed,
        time=iso_time(balance.time),
        closed=balance.closed,
    )


def _mask_summary(summary: dict[str, Any], caller: Caller, *, linked: bool) -> AccountRow:
    relatives = {name: summary[name] if caller.sees(summary[name]) else "" for name in ("parent", "successor_of")}
    return AccountRow(**summary | relatives | {"promise": PromiseForm(**summary["promise"]), "linked": linked})


def _mask_receipt(receipt: dict[str, Any], caller: Caller) -> ReceiptForm:
    lifetimes = [LifetimeForm(**one) for one in receipt["lifetimes"] if _sees_all(caller, one["accounts"])]
    lines = [LineForm(**line) for line in receipt["accounts"]]
    return ReceiptForm(**receipt | {"accounts": lines, "lifetimes": lifetimes})


def _sees_all(caller: Caller, names: Iterable[str]) -> bool:
    return all(map(caller.sees, names))


def entries_form(ledger: Ledger, caller: Caller, name: str, first: int, count: int) -> EntriesForm:
    """Return a page of entries; a negative `first` counts from the end."""
    return filtered_entries_form(ledger, caller, name, EntriesQuery(first, count))


def filtered_entries_form(ledger: Ledger, caller: Caller, name: str, span: EntriesQuery) -> EntriesForm:
    """Return a page of the entries that are wanted.

    A page of long entries ends early, and so does one for which many entries were read that are not wanted; then it
    may be empty. `next` is where to continue.
    """
    account = visible_account(ledger, caller, name)
    size = account.size
    first = max(0, size + span.first) if span.first < 0 else span.first
    wanted = _wanted(span)
    page: list[EntryForm] = []
    at, length, stride = first, 0, _FIRST_READ
    while len(page) < span.count and length <= _MAX_PAGE and at < min(size, first + _MAX_SCANNED):
        for past in account.history(at, min(stride, _MAX_SCANNED if span.filters else span.count - len(page))):
            at += 1
            form = entry_form(past, caller)
            if not wanted(past, form):
                continue
            length += len(past.entry.cost) + len(past.note)
            page.append(form)
            if length > _MAX_PAGE or len(page) == span.count:
                break
        stride *= 2
    return EntriesForm(name, size, page, at if at < size else None)


def _wanted(span: EntriesQuery) -> Callable[[HistoryEntry, EntryForm], bool]:
    """Return whether an entry is wanted, judged by what the caller sees of it, which may lack its key."""
    since = _moment_of("since", span.since) if span.since else None
    until = _moment_of("until", span.until) if span.until else None
    text = span.text.casefold()

    def wanted(past: HistoryEntry, form: EntryForm) -> bool:
        return (
            (since is None or past.written >= since)
            and (until is None or past.written < until)
            and span.verb in (UNSET, form.verb)
            and span.principal in ("", form.principal)
            and (text in form.note.casefold() or text in form.key.casefold())
        )

    return wanted


def _moment_of(field: str, text: str) -> int:
    try:
        return time_of(datetime.fromisoformat(text))
    except ValueError:
        raise InvalidArgument(f"{field} must be a time that there is (got {shown(text)})") from None


def events_form(backend: LocalBackend, caller: Caller, query: EventsQuery) -> EventsForm:
    """Return entries of the accounts that the caller may see, or of one of them, that follow a cursor."""
    if query.account:
        visible_account(Ledger(backend), caller, query.account)
    names = [query.account] if query.account else caller.accounts
    found = backend.events(query.after, query.count, names)
    events = [EventForm(**_entry_fields(past, caller), account=past.entry.account) for past in found.entries]
    return EventsForm(events, found.after, found.more)


def readings_form(ledger: Ledger, caller: Caller, name: str, *, compare: bool) -> ReadingsForm:
    """Return the policy's reading, and with `compare` those of other odometers, marked as not covered."""
    account = visible_account(ledger, caller, name)
    own, *others = account.compare() if compare else (account.reading(),)
    beside = [_reading(other) for other in others] if compare else UNSET
    return ReadingsForm(name, _promise(account.policy), _reading(own), beside)


def decide_for(ledger: Ledger, caller: Caller, costs: Mapping[str, Guarantee]) -> Decision:
    """Decide the costs of several accounts together, masked for the caller."""
    require_visible(caller, costs)
    return mask_refusal(ledger.backend, caller, costs, ledger.decide(costs))


def mask_refusal(backend: Backend, caller: Caller, costs: Mapping[str, Guarantee], decision: Decision) -> Decision:
    """Return the decision for the caller: a refusal by an account above appears as one by the caller's own."""
    if decision.admitted:
        return decision._replace(notes=_visible_notes(decision.notes, caller)) if decision.notes else decision
    if caller.sees(decision.account):
        return decision
    name, cost = next(
        (name, cost)
        for name, cost in sorted(costs.items())
        if decision.account in backend.opened(name).names and cost == decision.request
    )
    compiled, totals = backend.opened(name).compiled, backend.balances([name])[name].totals
    unproven = decision.is_unproven
    return Decision(
        admitted=False,
        meters=compiled.meters,
        totals=totals,
        totals_after=totals,
        price=Price((None,) * len(compiled.meters)) if unproven else compiled.price(cost),
        request=cost,
        largest=decision.largest,
        account=name,
        searched=decision.searched,
        notes=(NO_THEOREM,) if unproven else (),
    )


def _visible_notes(notes: Sequence[str], caller: Caller) -> tuple[str, ...]:
    """Return the notes that are about the account that asked, or name one that the caller may see.

    What falls for the account that asked is what `largest` tells of it, before and after.
    """
    if caller.accounts is None:
        return tuple(notes)
    seen = tuple(map(note_prefix, caller.accounts))
    return tuple(note for note in notes if note.startswith(seen) or not note.startswith(NOTE_ABOUT))


def decision_form(decision: Decision) -> DecisionForm:
    """Return a decision as its response."""
    return DecisionForm(**decision.to_dict())


def receipt_form(receipt: Receipt, caller: Caller) -> ReceiptForm:
    """Return a receipt, with the lifetimes of which the caller may see every account.

    The shape of `Receipt.to_dict`, with costs that are encoded already: every repeated charge comes through here.
    """
    lines = [
        LineForm(account, sequence, Raw(text_of(cost.to_dict()).encode()), seal)
        for account, sequence, cost, seal in receipt.lines
    ]
    lifetimes = [form for one in receipt.lifetimes if (form := lifetime_form(one, caller)) is not None]
    return ReceiptForm(
        id=receipt.id,
        verb=receipt.verb,
        key=receipt.key,
        time=iso_time(receipt.written),
        accounts=lines,
        expires=None if receipt.voidable_until is None else iso_time(receipt.voidable_until),
        lifetimes=lifetimes,
        repeated=receipt.repeated,
        uncertified=[*receipt.uncertified],
        notes=[*_visible_notes(receipt.notes, caller)],
        principal=receipt.principal,
    )


def reservations_form(backend: LocalBackend, caller: Caller, name: str, first: int, count: int) -> ReservationsForm:
    """Return a page of an account's pending reservations, those of which the caller may see every account."""
    visible_account(Ledger(backend), caller, name)
    receipts, after = backend.reservations_page(name, first, count)
    seen = [one for one in receipts if _sees_all(caller, [account for account, *_ in one.lines])]
    return ReservationsForm(name, [receipt_form(receipt, caller) for receipt in seen], after)


def reservations_of(ledger: Ledger, caller: Caller, name: str, first: int, count: int) -> ReservationsForm:
    """Return the same of a ledger that is here."""
    return reservations_form(_local(ledger), caller, name, first, count)


class PendingRow(Struct):
    """A pending reservation, as one of the accounts that it charged shows it."""

    sequence: int  # of its first entry in the account
    id: str  # empty if it charged an account that the caller may not see
    children: list[str]  # the accounts below this one that were asked, if the caller may see all of them
    principal: str
    time: str
    costs: list[dict[str, Any]]  # of each of its entries in the account
    expires: str | None
    note: str


def pending_rows(ledger: Ledger, caller: Caller, name: str, first: int, count: int) -> list[PendingRow]:
    """Return pending reservations of an account, oldest first, from a sequence on."""
    visible_account(ledger, caller, name)
    return [_pending_row(ledger, caller, past) for past in _local(ledger).pending_page(name, first, count)]


def pending_count(ledger: Ledger, caller: Caller, name: str) -> int:
    """Return how many reservations of an account are pending."""
    visible_account(ledger, caller, name)
    return _local(ledger).pending_count(name)


def _local(ledger: Ledger) -> LocalBackend:
    if not isinstance(ledger.backend, LocalBackend):
        raise TypeError("pages are made where the ledger is")
    return ledger.backend


def _pending_row(ledger: Ledger, caller: Caller, past: HistoryEntry) -> PendingRow:
    entry = past.entry
    legs = [leg for leg in legs_from_text(entry.legs) if entry.account in dict(leg.entries)]
    own = [dict(leg.entries)[entry.account] for leg in legs]
    others = ledger.backend.history(entry.account, min(own), max(own) - min(own) + 1) if len(own) > 1 else [past]
    is_seen = _sees_all(caller, _names(entry))
    return PendingRow(
        sequence=past.sequence,
        id=entry.request_id if is_seen else "",
        children=[leg.own[0] for leg in legs if leg.own[0] != entry.account] if is_seen else [],
        principal=past.principal,
        time=iso_time(past.written),
        costs=[one.cost.to_dict() for one in others if one.cost is not None],
        expires=None if past.voidable_until is None else iso_time(past.voidable_until),
        note=past.note,
    )


def asked_account(entry: EntryForm, name: str) -> str:
    """Return the account below `name` that was asked, if the caller may see it; empty if it was `name` itself."""
    if entry.sealed is None or entry.sequence == 0:
        return ""
    legs = legs_from_text(entry.sealed["legs"])
    asked = next((leg.own[0] for leg in legs if (name, entry.sequence) in leg.entries), name)
    return "" if asked == name else asked


def lifetime_form(lifetime: Lifetime | None, caller: Caller) -> LifetimeForm | None:
    """Return the promise of linked accounts together, if the caller may see all of them."""
    if lifetime is None or not _sees_all(caller, lifetime.accounts):
        return None
    return LifetimeForm(**lifetime.to_dict())


def _promise(policy: Policy) -> PromiseForm:
    return PromiseForm(**policy.promise_to_dict())


def _reading(reading: Reading) -> ReadingForm:
    return ReadingForm(**reading.to_dict())


def entry_form(past: HistoryEntry, caller: Caller) -> EntryForm:
    """Return an entry, without what names an account that the caller may not see."""
    return EntryForm(**_entry_fields(past, caller))


def _entry_fields(past: HistoryEntry, caller: Caller) -> dict[str, Any]:
    form = past.to_dict()
    if caller.accounts is not None and not _sees_all(caller, _names(past.entry)):
        # The key of a commit or void is its reservation's id, which may be that of another account.
        form |= {"key": "", "sealed": None}
    return form


def _names(entry: Entry) -> set[str]:
    """Return every account that an entry names."""
    details = entry.details
    named = {str(details.get(field) or "") for field in ("parent", "successor_of", "refused_by")} - {""}
    return named | {name for leg in legs_from_text(entry.legs) for name, _ in leg.entries}


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
    LedgerUnreachable: "the ledger cannot be reached at the moment; try again",
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
