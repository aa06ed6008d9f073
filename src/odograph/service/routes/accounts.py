"""Accounts: open, list, show, close; what fits; readings, entries, reservations. Nothing here spends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from types import EllipsisType
from typing import Any, Final, TypeVar

from msgspec import Struct, UnsetType

from odograph.core.filters import FILTERS, TOTALS, Filter
from odograph.core.fixed_point import Numeric
from odograph.core.guarantees import SIZED
from odograph.core.mechanisms import NOISES
from odograph.core.odometers import odometer_from_dict
from odograph.core.planning import calibration_question
from odograph.core.policy import Compiled, Policy
from odograph.errors import InvalidPolicy
from odograph.ledger.entries import check_name
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import NOW
from odograph.service import schemas
from odograph.service.auth import Caller
from odograph.service.endpoint import Call, Json, Reply, page_reply
from odograph.service.schemas import (
    AccountForm,
    AccountRow,
    AccountsForm,
    CalibratedForm,
    CalibrationForm,
    ClosedForm,
    DecisionForm,
    HowManyForm,
    LifetimesForm,
    OfferForm,
    OpenedForm,
    PopulationRow,
    ReadingsForm,
    costs_of,
    guarantee_of,
)
from odograph.service.visibility import (
    account_form,
    decide_for,
    decision_form,
    events_form,
    filtered_entries_form,
    lifetime_form,
    mask_refusal,
    readings_form,
    reservations_form,
    row_of,
    visible_account,
    visible_rows,
)

__all__ = [
    "Compare",
    "balance",
    "calibrate",
    "close",
    "compile_form",
    "decide",
    "decide_all",
    "entries",
    "events",
    "how_many",
    "largest",
    "lifetime",
    "list_accounts",
    "open_account",
    "page_of",
    "pending",
    "policy_of",
    "quote",
    "reading",
    "show",
    "terms",
]


_Row = TypeVar("_Row", AccountRow, PopulationRow)


_EVENTS_INTERVAL: Final = 0.5  # seconds between two looks for new events


class Compare(Struct, forbid_unknown_fields=True):
    """Whether to read other odometers too; they are informational, not covered by the guarantee."""

    compare: bool = False


def _filters_of(given: str | list[tuple[str, Any] | schemas.FilterForm] | None) -> Any:  # noqa: ANN401  as a policy takes it
    """Return a filter by name, or filters with their options and their shares of delta; None for the default."""
    if given is None or isinstance(given, str):
        return given
    return [(_filter_of(one), one.share) if isinstance(one, schemas.FilterForm) else one for one in given]


def _filter_of(form: schemas.FilterForm) -> str | Filter:
    """Return a filter with the options that were given."""
    given = {name: getattr(form, name) for name in ("takes", "reserve", "orders", "rho", "mu")}
    options = {name: value for name, value in given.items() if value is not None and (name != "orders" or value)}
    cls = (FILTERS | TOTALS).get(form.kind)
    if cls is None or (not options and form.kind in FILTERS):
        return form.kind
    if set(options) - set(cls.options) or (form.kind in TOTALS and set(options) != set(cls.options)):
        raise InvalidPolicy(f"the filter {form.kind!r} has the options {[*cls.options]} (got {sorted(options)})")
    return cls(**options)


def _epsilon_of(form: schemas.PolicyForm) -> Numeric | EllipsisType | None:
    """Return the epsilon of a request: none if it says so, or is a stored policy without one."""
    if form.epsilon == "none":
        return None
    # A null alone is a setting that is missing, and must not open an account without a limit.
    if isinstance(form.epsilon, UnsetType) or (form.epsilon is None and form.filter is None):
        return ...
    return form.epsilon


def policy_of(form: schemas.PolicyForm) -> Policy:
    """Return the policy of a request, with the defaults of the library."""
    odometer = odometer_from_dict(form.odometer) if isinstance(form.odometer, dict) else form.odometer
    return Policy(
        _epsilon_of(form),
        form.delta,
        rho=form.rho,
        mu=form.mu,
        delta_steps=form.delta_steps,
        filter=_filters_of(form.filter),
        reserve=form.reserve,
        odometer=odometer,
        slack=form.slack,
        privacy_unit=form.privacy_unit,
        neighbors=form.neighbors,
    )


async def compile_form(call: Call, form: schemas.OpenForm | schemas.CreatePopulationForm) -> Compiled:
    """Return the compiled policy of a request to open something."""
    check_name(form.name)
    if (form.policy is None) == (form.compiled is None):
        raise InvalidPolicy("send either policy or compiled")
    if form.policy is not None:
        return await call.state.solver.compile(policy_of(form.policy))
    return await call.state.compute(Compiled.from_dict, form.compiled or {})


async def open_account(call: Call) -> OpenedForm:
    """Open an account with a policy, which never changes."""
    form: schemas.OpenForm = call.form
    compiled = await compile_form(call, form)
    ledger = call.state.ledger_of(call.caller)
    await call.state.run(
        ledger.open_account,
        form.name,
        compiled,
        parent=form.parent,
        successor_of=form.successor_of,
        dataset=form.dataset,
        key=call.idempotency_key,
        note=form.note,
    )
    return await call.state.run(_terms, ledger, call.caller, form.name)


def page_of(rows: Sequence[_Row], query: schemas.AccountsQuery) -> tuple[list[_Row], str | None]:
    """Return a page of rows that are in the order of their names, and after which name the next page begins."""
    after = [row for row in rows if row.name > query.after]
    page = after[: query.limit]
    return page, page[-1].name if len(page) < len(after) else None


async def list_accounts(call: Call) -> Reply:
    """List the accounts that the key may see, by name."""
    query: schemas.AccountsQuery = call.query
    ledger = call.state.ledger_of(call.caller)
    found = await call.state.compute(visible_rows, ledger, call.caller, query.after, query.limit + 1)
    page, following = page_of(found, query)
    return page_reply(call, AccountsForm(page, following), after=following)


async def show(call: Call) -> AccountForm:
    """Show an account: its promise, what is spent and left, its reading, what fits next, pending reservations."""
    return await call.state.compute(account_form, call.state.ledger_of(call.caller), call.caller, call.path["name"])


async def balance(call: Call) -> AccountRow:
    """Show the summary of an account; cheap to poll."""
    return await call.state.run(_balance, call.state.ledger_of(call.caller), call.caller, call.path["name"])


async def terms(call: Call) -> OpenedForm:
    """Show the compiled policy that an account was opened with. It never changes."""
    return await call.state.run(_terms, call.state.ledger_of(call.caller), call.caller, call.path["name"])


async def lifetime(call: Call) -> LifetimesForm:
    """Show what an account and those linked to it as successors promise together."""
    account = await call.state.run(visible_account, call.state.ledger_of(call.caller), call.caller, call.path["name"])
    return LifetimesForm(account.name, lifetime_form(await call.state.run(lambda: account.lifetime), call.caller))


async def close(call: Call) -> ClosedForm:
    """Close an account and all below it, permanently; reservations can still be resolved."""
    account = await call.state.run(visible_account, call.state.ledger_of(call.caller), call.caller, call.path["name"])
    await call.state.run(account.close, note=call.form.note)
    return ClosedForm(account.name, closed=True)


async def decide(call: Call) -> DecisionForm:
    """Decide whether a cost would be admitted, and what would fit instead; spend nothing."""
    return await call.state.compute(_decide, call, {call.path["name"]: call.form.cost})


async def decide_all(call: Call) -> DecisionForm:
    """Decide whether several accounts would admit their costs together; spend nothing."""
    return await call.state.compute(_decide, call, call.form.costs)


async def largest(call: Call) -> OfferForm:
    """Find the largest cost of a kind of which `times` equal ones would be admitted."""
    form: schemas.LargestForm = call.form
    if (form.kind is None) == (form.like is None):
        raise InvalidPolicy("send either kind or like")
    return await call.state.compute(_largest, call.state.ledger_of(call.caller), call.caller, call.path["name"], form)


async def calibrate(call: Call) -> CalibratedForm:
    """Find the least noise of a mechanism with which `times` equal requests would be admitted."""
    ledger, form = call.state.ledger_of(call.caller), call.form
    return await call.state.compute(_calibrate, ledger, call.caller, call.path["name"], form)


async def how_many(call: Call) -> HowManyForm:
    """Count how many requests of this cost would be admitted in a row; spend nothing."""
    ledger, cost = call.state.ledger_of(call.caller), call.form.cost
    return await call.state.compute(_how_many, ledger, call.caller, call.path["name"], cost)


async def quote(call: Call) -> Json:
    """Decide several costs in order, all or nothing, spending nothing."""
    ledger, costs = call.state.ledger_of(call.caller), call.form.costs
    return await call.state.compute(_quote, ledger, call.caller, call.path["name"], costs)


async def reading(call: Call) -> ReadingsForm:
    """Read the policy's odometer; with `compare` also others, which are not covered by the guarantee."""
    ledger, compare = call.state.ledger_of(call.caller), call.query.compare
    return await call.state.run(readings_form, ledger, call.caller, call.path["name"], compare=compare)


async def entries(call: Call) -> Reply:
    """Show a page of an account's entries: charges, refusals, reservations and their outcomes.

    At most 2000 entries are read for one page. If few of them are wanted, the page is short or empty: continue with
    `next` until it is null.
    """
    ledger, span = call.state.ledger_of(call.caller), call.query
    form = await call.state.compute(filtered_entries_form, ledger, call.caller, call.path["name"], span)
    return page_reply(call, form, first=form.next)


async def pending(call: Call) -> Reply:
    """Show a page of the pending reservations of an account."""
    backend, query = call.state.backend_of(call.caller), call.query
    name = call.path["name"]
    form = await call.state.run(reservations_form, backend, call.caller, name, query.first, query.count)
    return page_reply(call, form, first=form.next)


async def events(call: Call) -> Reply:
    """Show what was written in all accounts that the key may see, after a cursor: a feed for an audit system.

    Begin without a cursor and continue with the `after` of each response. Every entry comes once, and the entries of
    an account in their order. With `wait`, a response without events is sent after that time.
    """
    state, query = call.state, call.query
    backend = state.backend_of(call.caller)
    form = await state.compute(events_form, backend, call.caller, query)
    with state.long_poll(query.wait) as end:
        while not form.events and query.after != NOW and (left := end - monotonic()) > 0:
            await asyncio.sleep(min(left, _EVENTS_INTERVAL))
            form = await state.compute(events_form, backend, call.caller, query)
    return page_reply(call, form, after=form.after if form.more else None)


def _balance(ledger: Ledger, caller: Caller, name: str) -> AccountRow:
    visible_account(ledger, caller, name)
    return row_of(ledger.backend, caller, ledger.backend.balances([name])[name])


def _terms(ledger: Ledger, caller: Caller, name: str) -> OpenedForm:
    return OpenedForm(_balance(ledger, caller, name), ledger.account(name).compiled.to_dict())


def _decide(call: Call, costs: Mapping[str, schemas.CostForm]) -> DecisionForm:
    return decision_form(decide_for(call.state.ledger_of(call.caller), call.caller, costs_of(costs)))


def _largest(ledger: Ledger, caller: Caller, name: str, form: schemas.LargestForm) -> OfferForm:
    like = SIZED[str(form.kind)] if form.like is None else guarantee_of(form.like)
    found = visible_account(ledger, caller, name).largest(like, form.times)
    return OfferForm(name, form.times, None if found is None else found.to_dict())


def _calibrate(ledger: Ledger, caller: Caller, name: str, form: schemas.CalibrateForm) -> CalibratedForm:
    visible_account(ledger, caller, name)
    question = calibration_question(NOISES[form.mechanism].mechanism, form.times, form.settings)
    found = ledger.backend.calibrate(name, question)
    return CalibratedForm(name, None if found is None else CalibrationForm(**found.to_dict()))


def _how_many(ledger: Ledger, caller: Caller, name: str, cost: schemas.CostForm) -> HowManyForm:
    return HowManyForm(name, visible_account(ledger, caller, name).how_many(guarantee_of(cost)))


def _quote(ledger: Ledger, caller: Caller, name: str, asked: list[schemas.CostForm]) -> Json:
    costs = [guarantee_of(form) for form in asked]
    quoted = visible_account(ledger, caller, name).quote(costs)
    decisions = [
        mask_refusal(ledger.backend, caller, {name: cost}, decision)
        for cost, decision in zip(costs, quoted.decisions, strict=False)
    ]
    return replace(quoted, decisions=tuple(decisions)).to_dict()
