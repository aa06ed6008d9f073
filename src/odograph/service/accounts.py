"""Accounts: open, list, show, close; decide, largest, quote; readings. What is asked here spends nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from odograph.core.compiled import Compiled, compiled_from_dict
from odograph.core.guarantees import SIZED
from odograph.core.odometers import odometer_from_dict
from odograph.core.policy import Policy
from odograph.errors import InvalidPolicy
from odograph.ledger.entries import check_name, totals_to_text
from odograph.ledger.ledger import Ledger
from odograph.service import forms
from odograph.service.access import Caller
from odograph.service.answers import (
    AccountForm,
    AccountRow,
    AccountsForm,
    ClosedForm,
    DecisionForm,
    LifetimesForm,
    OfferForm,
    OpenedForm,
    QuotedForm,
    ReadingsForm,
)
from odograph.service.door import Call
from odograph.service.guarantees import costs_of, guarantee_of
from odograph.service.views import (
    account_form,
    decide_for,
    decision_form,
    lifetime_form,
    masked,
    readings_form,
    row_of,
    rows,
    seen,
)

__all__ = [
    "Compare",
    "Page",
    "balance",
    "close",
    "decide",
    "decide_all",
    "largest",
    "lifetime",
    "list_accounts",
    "open_account",
    "policy_of",
    "quote",
    "reading",
    "show",
    "terms",
]


class Page(Struct, forbid_unknown_fields=True):
    """Which accounts to list: those after a name, so many at most."""

    after: Annotated[str, Meta(max_length=100)] = ""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class Compare(Struct, forbid_unknown_fields=True):
    """Whether other odometers are read too, for looking only."""

    compare: bool = False


def policy_of(form: forms.PolicyForm) -> Policy:
    """Return the policy that a caller wrote; what was left out is chosen as the library does."""
    chosen: dict[str, Any] = {}
    if form.takes is not None:
        chosen["takes"] = form.takes
    if form.odometer is not None:
        chosen["odometer"] = odometer_from_dict(form.odometer)
    return Policy(
        form.epsilon,
        form.delta,
        delta_steps=form.delta_steps,
        rule=form.rule,
        orders=form.orders,
        slack=form.slack,
        unit=form.unit,
        neighbours=form.neighbours,
        **chosen,
    )


async def open_account(call: Call) -> OpenedForm:
    """Open an account: a promise, and the rule that keeps it. Neither ever changes."""
    form: forms.OpenForm = call.form
    check_name(form.name)
    if (form.policy is None) == (form.compiled is None):
        raise InvalidPolicy("an account is opened with a policy or with a compiled one: send one of them")
    compiled: Compiled
    if form.policy is not None:
        compiled = await call.office.solver.compile(policy_of(form.policy))
    else:
        compiled = await call.office.compute(compiled_from_dict, form.compiled or {})
    ledger = call.office.ledger_of(call.caller)
    await call.office.run(
        ledger.open_account,
        form.name,
        compiled,
        parent=form.parent,
        successor_of=form.successor_of,
        dataset=form.dataset,
        key=call.key,
        note=form.note,
    )
    return await call.office.run(_terms, ledger, call.caller, form.name)


async def list_accounts(call: Call) -> AccountsForm:
    """List the accounts that the key may see, in the order of their names."""
    found = await call.office.compute(rows, call.office.ledger_of(call.caller), call.caller)
    after: list[AccountRow] = [row for row in found if row.name > call.query.after]
    page = after[: call.query.limit]
    return AccountsForm(page, page[-1].name if len(page) < len(after) else None)


async def show(call: Call) -> AccountForm:
    """Show an account: its promise, what is spent and left, its reading, what fits next, what is pending."""
    return await call.office.compute(account_form, call.office.ledger_of(call.caller), call.caller, call.path["name"])


async def balance(call: Call) -> AccountRow:
    """Show an account in brief: cheap to ask for again and again."""
    return await call.office.run(_balance, call.office.ledger_of(call.caller), call.caller, call.path["name"])


async def terms(call: Call) -> OpenedForm:
    """Show what an account was opened with: its policy, compiled once. It never changes."""
    return await call.office.run(_terms, call.office.ledger_of(call.caller), call.caller, call.path["name"])


async def lifetime(call: Call) -> LifetimesForm:
    """Show what an account and those linked to it as successors promise together."""
    account = await call.office.run(seen, call.office.ledger_of(call.caller), call.caller, call.path["name"])
    return LifetimesForm(account.name, lifetime_form(await call.office.run(lambda: account.lifetime), call.caller))


async def close(call: Call) -> ClosedForm:
    """Take no new charges any more, here and below, for ever; reservations can still be resolved."""
    account = await call.office.run(seen, call.office.ledger_of(call.caller), call.caller, call.path["name"])
    await call.office.run(account.close, note=call.form.note)
    return ClosedForm(account.name, closed=True)


async def decide(call: Call) -> DecisionForm:
    """Say whether a cost would be admitted, and what would fit instead; spend nothing."""
    return await call.office.compute(_decide, call, {call.path["name"]: call.form.cost})


async def decide_all(call: Call) -> DecisionForm:
    """Say whether several accounts would admit their costs together; spend nothing."""
    return await call.office.compute(_decide, call, call.form.costs)


async def largest(call: Call) -> OfferForm:
    """Give the largest request of a kind of which so many equal ones would be admitted."""
    form: forms.LargestForm = call.form
    if (form.kind is None) == (form.like is None):
        raise InvalidPolicy("say of which kind, or like which guarantee: send one of them")
    return await call.office.compute(
        _largest, call.office.ledger_of(call.caller), call.caller, call.path["name"], form
    )


async def quote(call: Call) -> QuotedForm:
    """Decide several costs in order, all or nothing, spending nothing."""
    ledger, costs = call.office.ledger_of(call.caller), call.form.costs
    return await call.office.compute(_quote, ledger, call.caller, call.path["name"], costs)


async def reading(call: Call) -> ReadingsForm:
    """Read the policy's odometer; with `compare` others beside it, which are not licensed."""
    ledger, compare = call.office.ledger_of(call.caller), call.query.compare
    return await call.office.run(readings_form, ledger, call.caller, call.path["name"], compare=compare)


def _balance(ledger: Ledger, caller: Caller, name: str) -> AccountRow:
    seen(ledger, caller, name)
    return row_of(ledger.books, caller, ledger.books.balances([name])[name])


def _terms(ledger: Ledger, caller: Caller, name: str) -> OpenedForm:
    return OpenedForm(_balance(ledger, caller, name), ledger.account(name).compiled.to_dict())


def _decide(call: Call, costs: Mapping[str, forms.CostForm]) -> DecisionForm:
    return decision_form(decide_for(call.office.ledger_of(call.caller), call.caller, costs_of(costs)))


def _largest(ledger: Ledger, caller: Caller, name: str, form: forms.LargestForm) -> OfferForm:
    like = SIZED[str(form.kind)] if form.like is None else guarantee_of(form.like)
    found = seen(ledger, caller, name).largest(like, form.times)
    return OfferForm(name, form.times, None if found is None else found.to_dict())


def _quote(ledger: Ledger, caller: Caller, name: str, asked: list[forms.CostForm]) -> QuotedForm:
    costs = [guarantee_of(form) for form in asked]
    quoted = seen(ledger, caller, name).quote(costs)
    decisions = [
        masked(ledger.books, caller, {name: cost}, decision)
        for cost, decision in zip(costs, quoted.decisions, strict=False)
    ]
    return QuotedForm(quoted.admitted, list(map(decision_form, decisions)), totals_to_text(quoted.totals_after))
