"""What a caller may see: accounts, entries, decisions as answers, with everything left out that is not theirs.

A caller bound to accounts cannot see that others exist. An account that it may not see is not found, as one that does
not exist; names of relatives are left out; a refusal by an account above is told as one by the caller's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import UNSET, Raw

from odograph.core.compiled import price, reading
from odograph.core.decide import Decision
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.offers import offers_of, standing, used
from odograph.core.policy import Policy
from odograph.errors import AccountNotFound
from odograph.ledger.account import LedgerAccount
from odograph.ledger.books import Books
from odograph.ledger.entries import Entry, legs_from_text, moment, price_to_text, shown, text_of, totals_to_text
from odograph.ledger.ledger import Ledger
from odograph.ledger.lifetimes import Lifetime
from odograph.ledger.receipts import Past, Receipt
from odograph.ledger.store import Balance
from odograph.service.access import Caller
from odograph.service.answers import (
    AccountForm,
    AccountRow,
    DecisionForm,
    EntriesForm,
    EntryForm,
    LifetimeForm,
    LineForm,
    MeterForm,
    PromiseForm,
    ReadingForm,
    ReadingsForm,
    ReceiptForm,
)

__all__ = [
    "account_form",
    "decide_for",
    "decision_form",
    "entries_form",
    "lifetime_form",
    "made_form",
    "masked",
    "pending_of",
    "readings_form",
    "receipt_form",
    "require_seen",
    "row_of",
    "rows",
    "seen",
]

_FEW: Final = 50  # entries read at once, at first
_LONGEST_PAGE: Final = 1 << 19  # characters of costs and notes on a page of entries


def require_seen(caller: Caller, names: Iterable[str]) -> None:
    """Raise `AccountNotFound` for the first account that the caller may not see, whether there is one or not."""
    for name in names:
        if not caller.sees(name):
            raise AccountNotFound(f"there is no account {shown(name)} here; nothing was charged")


def seen(ledger: Ledger, caller: Caller, name: str) -> LedgerAccount:
    """Return an account that the caller may see, or raise `AccountNotFound`."""
    require_seen(caller, [name])
    try:
        return ledger.account(name)
    except AccountNotFound:
        # In the same words as for one that may not be seen.
        raise AccountNotFound(f"there is no account {shown(name)} here; nothing was charged") from None


def rows(ledger: Ledger, caller: Caller) -> list[AccountRow]:
    """Return the accounts that the caller may see, in the order of their names."""
    try:
        balances = ledger.books.balances(None if caller.accounts is None else sorted(caller.accounts))
    except AccountNotFound:  # no account was opened yet, so there is no ledger either
        return []
    # What is left of a population is nobody's to see.
    own = [name for name in sorted(balances) if ledger.books.opened(name).population is None]
    return [row_of(ledger.books, caller, balances[name]) for name in own]


def row_of(books: Books, caller: Caller, balance: Balance) -> AccountRow:
    """Return an account in brief."""
    head, compiled = balance.head, books.opened(balance.head.name).compiled
    policy = compiled.policy
    linked = balance.linked
    if linked and caller.accounts is not None:  # to one who sees all of them
        linked = lifetime_form(books.lifetime(head.name), caller) is not None
    return AccountRow(
        name=head.name,
        parent=head.parent if caller.sees(head.parent) else "",
        successor_of=head.successor_of if caller.sees(head.successor_of) else "",
        dataset=head.dataset,
        unit=head.unit,
        neighbours=head.neighbours,
        promise=_promise(policy),
        rule=policy.rule_text,
        spent=used(compiled, balance.totals),
        steps=balance.totals.steps,
        sequence=balance.sequence,
        seal=balance.seal,
        time=_iso(balance.time),
        totals=totals_to_text(balance.totals),
        closed=balance.closed,
        linked=linked,
        origin=balance.origin,
    )


def account_form(ledger: Ledger, caller: Caller, name: str) -> AccountForm:
    """Return an account with everything that its page shows."""
    account, books = seen(ledger, caller, name), ledger.books
    balance = books.balances([name])[name]
    compiled, totals = account.compiled, balance.totals
    now = standing(compiled, totals)
    return AccountForm(
        account=row_of(books, caller, balance),
        policy=account.policy.to_dict(),
        source=compiled.note,
        certification=account.certification,
        meters={meter: MeterForm(spent, now.left[meter]) for meter, spent in now.spent.items()},
        reading=_reading(reading(compiled, totals)),  # of the moment of the row
        largest=[] if balance.closed else [offer.to_dict() for offer in offers_of(account)],
        children=[child.name for child in account.children if caller.sees(child.name)],
        lifetime=lifetime_form(account.lifetime, caller),
        pending=pending_of(ledger, caller, name),
        voids=account.voids,
    )


def entries_form(ledger: Ledger, caller: Caller, name: str, first: int, count: int) -> EntriesForm:
    """Return a page of entries; a negative `first` counts from the end.

    A page ends early where its entries are long, after one of them at least: go on with the next sequence.
    """
    account = seen(ledger, caller, name)
    size = account.size
    first = max(0, size + first) if first < 0 else first
    page: list[EntryForm] = []
    length, stride = 0, _FEW
    while len(page) < count and length <= _LONGEST_PAGE:
        pasts = account.history(first + len(page), min(stride, count - len(page)))
        if not pasts:
            break
        for past in pasts:
            length += len(past.entry.cost) + len(past.note)
            page.append(_entry(past, caller))
            if length > _LONGEST_PAGE:
                break
        stride *= 2
    return EntriesForm(name, size, page)


def readings_form(ledger: Ledger, caller: Caller, name: str, *, compare: bool) -> ReadingsForm:
    """Return the policy's reading; others beside it only for a comparison, marked as not licensed."""
    account = seen(ledger, caller, name)
    own, *others = account.compare() if compare else (account.reading(),)
    beside = [_reading(other) for other in others] if compare else UNSET
    return ReadingsForm(name, _promise(account.policy), _reading(own), beside)


def decide_for(ledger: Ledger, caller: Caller, costs: Mapping[str, Guarantee]) -> Decision:
    """Say whether the accounts would admit their costs together, as far as the caller may know why not."""
    require_seen(caller, costs)
    return masked(ledger.books, caller, costs, ledger.decide(costs))


def masked(books: Books, caller: Caller, costs: Mapping[str, Guarantee], decision: Decision) -> Decision:
    """Return a decision that the caller may see: a refusal by an account above is one by the caller's own."""
    if decision.admitted or caller.sees(decision.account):
        return decision
    name, cost = next(
        (name, cost)
        for name, cost in sorted(costs.items())
        if decision.account in books.opened(name).names and cost == decision.request
    )
    compiled, totals = books.opened(name).compiled, books.balances([name])[name].totals
    asked = price(compiled, cost)
    return Decision(
        admitted=False,
        meters=compiled.meters,
        totals=totals,
        totals_after=totals,
        price=asked,
        request=cost,
        largest=decision.largest,
        account=name,
        searched=decision.searched,
    )


def decision_form(decision: Decision) -> DecisionForm:
    """Return a decision in plain types; totals and price as the ledger writes them."""
    return DecisionForm(
        **decision.to_dict(),
        totals=totals_to_text(decision.totals),
        totals_after=totals_to_text(decision.totals_after),
        price=price_to_text(decision.price),
    )


def made_form(own: Sequence[Entry], uncertified: Sequence[str]) -> ReceiptForm:
    """Return the receipt of a charge from the entries just written: the costs are in them as they are sent."""
    first = own[0]
    lines = [LineForm(one.account, one.sequence, Raw(one.cost.encode()), one.seal) for one in own]
    until = first.expires if first.detail else None  # every charge comes by here, and few have a detail
    expires = None if until is None else _iso(until)
    time, unsure = _iso(first.time), [*uncertified]
    return ReceiptForm(
        first.place, first.verb, first.key, time, lines, expires, [], repeated=False, uncertified=unsure
    )


def receipt_form(receipt: Receipt, caller: Caller) -> ReceiptForm:
    """Return a receipt in plain types, with the lifetimes that the caller may see whole."""
    lines = [
        LineForm(account, sequence, Raw(text_of(cost.to_dict()).encode()), seal)
        for account, sequence, cost, seal in receipt.lines
    ]
    lifetimes = [form for one in receipt.lifetimes if (form := lifetime_form(one, caller)) is not None]
    return ReceiptForm(
        id=receipt.id,
        verb=receipt.verb,
        key=receipt.key,
        time=_iso(receipt.written),
        accounts=lines,
        expires=None if receipt.voidable_until is None else _iso(receipt.voidable_until),
        lifetimes=lifetimes,
        repeated=receipt.repeated,
        uncertified=[*receipt.uncertified],
    )


def pending_of(ledger: Ledger, caller: Caller, name: str) -> list[ReceiptForm]:
    """Return the reservations of an account that nobody has resolved, if the caller may see all of their accounts."""
    receipts = [reservation.receipt for reservation in seen(ledger, caller, name).pending]
    return [
        receipt_form(receipt, caller)
        for receipt in receipts
        if all(caller.sees(account) for account, *_ in receipt.lines)
    ]


def lifetime_form(lifetime: Lifetime | None, caller: Caller) -> LifetimeForm | None:
    """Return what linked accounts promise together, if the caller may see all of them."""
    if lifetime is None or not all(map(caller.sees, lifetime.accounts)):
        return None
    return LifetimeForm(**lifetime.to_dict())


def _promise(policy: Policy) -> PromiseForm:
    return PromiseForm(float(policy.epsilon), float(policy.delta), policy.promise)


def _reading(reading: Reading) -> ReadingForm:
    loss = reading.loss if math.isfinite(reading.loss) else None
    return ReadingForm(loss, reading.delta, reading.method, reading.licensed, reading.licence)


def _entry(past: Past, caller: Caller) -> EntryForm:
    entry, principal, note = past
    whole = caller.accounts is None or all(map(caller.sees, _names(entry)))
    guarantee = entry.guarantee
    cost: dict[str, Any] | None = None if guarantee is None else guarantee.to_dict()
    # The key of a commit or void is its reservation's name, and that may be another account's.
    return EntryForm(
        sequence=entry.sequence,
        time=_iso(entry.time),
        verb=entry.verb,
        cost=cost,
        price=entry.price,
        principal=principal,
        key=entry.key if whole else "",
        note=note,
        expires=None if entry.expires is None else _iso(entry.expires),
        seal=entry.seal,
        sealed={field: str(value) for field, value in entry._asdict().items()} if whole else None,
    )


def _names(entry: Entry) -> set[str]:
    """Every account that an entry names."""
    details = entry.details
    named = {str(details.get(field) or "") for field in ("parent", "successor_of", "refused_by")} - {""}
    return named | {name for leg in legs_from_text(entry.legs) for name, _ in leg.places}


@lru_cache(maxsize=64)  # the charges of a group have one time
def _iso(time: int) -> str:
    """Return a time of the store as a date in UTC."""
    return f"{moment(time):%Y-%m-%dT%H:%M:%S.%f+00:00}"
