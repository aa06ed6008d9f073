"""Charges: spend, reserve, commit, void, batches. A spend goes from here through the pen to the ledger's writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from odograph.core.guarantees import (
    GDP,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    Parallel,
    ProbDP,
    PureDP,
)
from odograph.errors import BudgetExceeded, OdographError, ReservationNotFound
from odograph.ledger.account import microseconds
from odograph.ledger.local import settled
from odograph.ledger.receipts import Receipt
from odograph.ledger.requests import Charge, Made, Outcome
from odograph.service import forms
from odograph.service.answers import BatchResult, BatchResults, ReceiptForm
from odograph.service.door import Answer, Call
from odograph.service.problems import TooFast, problem_of
from odograph.service.views import masked, receipt_form, require_seen

__all__ = ["batch", "commit", "guarantee_of", "reservation", "reserve", "reserve_all", "spend", "spend_all", "void"]

_CREATED: Final = 201
_OK: Final = 200
_QUICK: Final = (PureDP, ApproxDP, ProbDP, ZCDP, GDP)  # to price; a curve or a thousand parts may take a while


_MADE: Final[dict[type[forms.CostForm], Callable[..., Guarantee]]] = {
    forms.Pure: PureDP,
    forms.Approx: ApproxDP,
    forms.Prob: ProbDP,
    forms.Zcdp: ZCDP,
    forms.Gdp: GDP,
    forms.Rdp: RDP,
    forms.Known: Mechanism,
    forms.Disjoint: Parallel,
}


class _Asked(NamedTuple):
    """What somebody wants to be charged for."""

    verb: str
    costs: dict[str, Guarantee]
    key: str | None
    note: str
    expires: int | None = None


@lru_cache(maxsize=4096)
def guarantee_of(form: forms.CostForm) -> Guarantee:
    """Return the guarantee that a caller wrote; the same object for the same text, which was priced before."""
    values = [getattr(form, field) for field in form.__struct_fields__ if field != "form"]
    if isinstance(form, forms.Known):
        values[-1] = None if form.curve is None else guarantee_of(form.curve)
    if isinstance(form, forms.Disjoint):
        values = [tuple(guarantee_of(part) for part in form.parts)]
    return _MADE[type(form)](*values)


async def spend(call: Call) -> Answer:
    """Charge one account durably. Charge first, then run the mechanism."""
    return await _charge(call, "spend", {call.path["name"]: guarantee_of(call.form.cost)})


async def reserve(call: Call) -> Answer:
    """Charge one account now; commit when the mechanism has run, or void if it was not run."""
    costs = {call.path["name"]: guarantee_of(call.form.cost)}
    return await _charge(call, "reserve", costs, microseconds(call.form.expires))


async def spend_all(call: Call) -> Answer:
    """Charge several accounts, all or nothing."""
    return await _charge(call, "spend", _costs(call.form.costs))


async def reserve_all(call: Call) -> Answer:
    """Charge several accounts now, all or nothing; commit or void later."""
    return await _charge(call, "reserve", _costs(call.form.costs), microseconds(call.form.expires))


async def batch(call: Call) -> BatchResults:
    """Charge many independent spends, each under its own key; every one has an answer of its own, in order."""
    office, caller, items = call.office, call.caller, call.form.spends
    wait = office.limit.take(caller.key, len(items) - 1)  # the first was taken at the door
    if wait:
        raise TooFast(wait)
    begun: list[Charge | OdographError] = []
    for item in items:
        try:
            begun.append(await _request(call, _Asked("spend", _costs(item.costs), item.key, item.note)))
        except OdographError as error:
            begun.append(error)
    requests = [request for request in begun if isinstance(request, Charge)]
    outcomes = iter(await office.pen.write_all(requests))
    results: list[BatchResult] = []
    for one in begun:
        try:
            if isinstance(one, OdographError):
                raise one
            form = await _receipt(call, one, next(outcomes))
            results.append(BatchResult(_OK if form.repeated else _CREATED, receipt=form))
        except OdographError as error:
            problem = problem_of(error, caller)
            problem.detail = office.discreet(problem.detail)
            results.append(BatchResult(problem.status, problem=problem))
    return BatchResults(results)


async def reservation(call: Call) -> ReceiptForm:
    """Show a reservation by its id, such as census#17 (written census%2317 in a path)."""
    receipt = await _reserved(call)
    return receipt_form(receipt, call.caller)


async def commit(call: Call) -> ReceiptForm:
    """Say that a reservation's mechanism was run, or may have been; works after it expired, and again."""
    return await _resolve(call, "commit", call.form.note)


async def void(call: Call) -> ReceiptForm:
    """Take a reservation back: its mechanism was not run. Not after it was committed or has expired."""
    return await _resolve(call, "void", call.form.reason)


async def _charge(call: Call, verb: str, costs: dict[str, Guarantee], expires: int | None = None) -> Answer:
    request = await _request(call, _Asked(verb, costs, call.key, call.form.note, expires))
    form = await _receipt(call, request, await call.office.pen.write(request))
    return Answer(_OK if form.repeated else _CREATED, form)


async def _request(call: Call, asked: _Asked) -> Charge:
    """Price a charge: at once if that is quick, else in a thread."""
    require_seen(call.caller, asked.costs)
    books = call.office.books_of(call.caller)
    if books.at_hand(asked.costs) and all(isinstance(cost, _QUICK) for cost in asked.costs.values()):
        return books.request(*asked)
    return await call.office.run(books.request, *asked)


async def _receipt(call: Call, request: Charge, outcome: Outcome) -> ReceiptForm:
    """Return the receipt of a charge, or raise what became of it; count it."""
    office, caller, done = call.office, call.caller, settled(request, outcome)
    books = office.books_of(caller)
    quick = isinstance(done, Made) and not done.linked
    try:
        # Anything else looks something up: the first receipt, linked accounts, what would fit instead.
        receipt = books.charged(request, done) if quick else await office.run(books.charged, request, done)
    except BudgetExceeded as refusal:
        office.metrics.refused()
        costs = {ask.asked[0]: ask.cost for ask in request.asks}
        raise BudgetExceeded(await office.run(masked, books, caller, costs, refusal.decision)) from None
    if not receipt.repeated:
        office.metrics.spent(request.verb)
    return receipt_form(receipt, caller, request.asks)


async def _reserved(call: Call) -> Receipt:
    """Return a reservation of which the caller may see every account."""
    books, name = call.office.books_of(call.caller), call.path["reservation"]
    receipt = await call.office.run(books.reservation, name)
    if not all(call.caller.sees(line.account) for line in receipt.lines):
        raise ReservationNotFound(f"there is no reservation {name!r}")
    return receipt


async def _resolve(call: Call, verb: str, note: str) -> ReceiptForm:
    await _reserved(call)
    books = call.office.books_of(call.caller)
    receipt = await call.office.run(books.resolve, verb, call.path["reservation"], note)
    return receipt_form(receipt, call.caller)


def _costs(costs: Mapping[str, forms.CostForm]) -> dict[str, Guarantee]:
    return {name: guarantee_of(form) for name, form in costs.items()}
