"""What a caller may see of accounts, entries, receipts and decisions. It is decided here and nowhere else.

A caller bound to accounts cannot see that others exist. An account that it may not see is not found, like one that
does not exist; the names of its relatives are left out; a refusal by an account above appears as one by the caller's
own account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final

from msgspec import UNSET, Raw

from odograph.account import account_summary
from odograph.core.gate import Decision, Price
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.planning import NOTE_ABOUT, note_prefix
from odograph.core.policy import Policy
from odograph.errors import AccountNotFound, InvalidArgument, LedgerNotFound
from odograph.ledger.backend import Backend, LocalBackend
from odograph.ledger.commands import Ask
from odograph.ledger.entries import Entry, iso_time, legs_from_text, shown, text_of, time_of
from odograph.ledger.ledger import Ledger, LedgerAccount
from odograph.ledger.results import HistoryEntry, Lifetime, Receipt
from odograph.ledger.stores.base import EVERY, Balance
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
    PromiseForm,
    ReadingForm,
    ReadingsForm,
    ReceiptForm,
    ReservationsForm,
)

__all__ = [
    "NO_THEOREM",
    "account_form",
    "decide_for",
    "decision_form",
    "entries_form",
    "events_form",
    "filtered_entries_form",
    "lifetime_form",
    "mask_refusal",
    "new_receipt_form",
    "readings_form",
    "receipt_form",
    "require_visible",
    "reservations_form",
    "row_of",
    "visible_account",
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


def visible_rows(ledger: Ledger, caller: Caller, after: str = "", count: int = EVERY) -> list[AccountRow]:
    """Return accounts that the caller may see, in the order of their names: at most `count`, those after a name."""
    try:
        balances = ledger.backend.balances(None if caller.accounts is None else sorted(caller.accounts))
    except LedgerNotFound:  # no account was opened yet
        return []
    # What remains of a population is confidential.
    own = (name for name in sorted(balances) if name > after and ledger.backend.opened(name).population is None)
    return [row_of(ledger.backend, caller, balances[name]) for name in islice(own, count)]


def row_of(backend: Backend, caller: Caller, balance: Balance) -> AccountRow:
    """Return the summary of an account."""
    summary = account_summary(backend.opened(balance.head.name).compiled, balance)
    linked = summary["linked"]
    if linked and caller.accounts is not None:  # only if it sees all the linked accounts
        linked = lifetime_form(backend.lifetime(balance.head.name), caller) is not None
    return _mask_summary(summary, caller, linked=linked)


def account_form(ledger: Ledger, caller: Caller, name: str) -> AccountForm:
    """Return an account with everything that its page shows."""
    form = visible_account(ledger, caller, name).describe()
    lifetime = form["lifetime"] if form["lifetime"] and _sees_all(caller, form["lifetime"]["accounts"]) else None
    pending = [one for one in form["pending"] if _sees_all(caller, [line["account"] for line in one["accounts"]])]
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
        pending=[_mask_receipt(one, caller) for one in pending],
        voids=form["voids"],
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
            form = _entry(past, caller)
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


def new_receipt_form(own: Sequence[Entry], asks: Sequence[Ask]) -> ReceiptForm:
    """Return the receipt of a charge from the entries just written, which hold the costs as JSON already."""
    first = own[0]
    lines = [LineForm(one.account, one.sequence, Raw(one.cost.encode()), one.seal) for one in own]
    until = first.expires if first.detail else None  # this runs for every charge, and few have a detail
    return ReceiptForm(
        id=f"{first.account}#{first.sequence}",
        verb=first.verb,
        key=first.key,
        time=iso_time(first.time),
        accounts=lines,
        expires=None if until is None else iso_time(until),
        lifetimes=[],
        repeated=False,
        uncertified=[ask.asked[0] for ask in asks if not ask.certified],
    )


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
    )


def reservations_form(backend: LocalBackend, caller: Caller, name: str, first: int, count: int) -> ReservationsForm:
    """Return a page of an account's pending reservations, those of which the caller may see every account."""
    visible_account(Ledger(backend), caller, name)
    receipts, after = backend.pending_page(name, first, count)
    seen = [one for one in receipts if _sees_all(caller, [account for account, *_ in one.lines])]
    return ReservationsForm(name, [receipt_form(receipt, caller) for receipt in seen], after)


def lifetime_form(lifetime: Lifetime | None, caller: Caller) -> LifetimeForm | None:
    """Return the promise of linked accounts together, if the caller may see all of them."""
    if lifetime is None or not _sees_all(caller, lifetime.accounts):
        return None
    return LifetimeForm(**lifetime.to_dict())


def _promise(policy: Policy) -> PromiseForm:
    return PromiseForm(**policy.promise_to_dict())


def _reading(reading: Reading) -> ReadingForm:
    return ReadingForm(**reading.to_dict())


def _entry(past: HistoryEntry, caller: Caller) -> EntryForm:
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
