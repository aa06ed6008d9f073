"""Charges: spend, reserve, commit, void, batches. A spend goes from here through the pen to the ledger's writer."""

from __future__ import annotations

import math
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
from odograph.ledger.local import LocalBooks, Settled, settled
from odograph.ledger.receipts import Receipt
from odograph.ledger.requests import Charge, Made
from odograph.service import forms
from odograph.service.access import Caller
from odograph.service.answers import BatchResult, BatchResults, ReceiptForm
from odograph.service.door import Answer, Call
from odograph.service.problems import HttpProblem, TooFast, problem_of
from odograph.service.views import made_form, masked, receipt_form, require_seen

__all__ = ["batch", "commit", "guarantee_of", "reservation", "reserve", "reserve_all", "spend", "spend_all", "void"]

_CREATED: Final = 201
_OK: Final = 200
_QUICK: Final = (PureDP, ApproxDP, ProbDP, ZCDP, GDP)  # to price; a curve or a thousand parts may take a while


_MADE: Final[dict[type, Callable[..., Guarantee]]] = {
    forms.Pure: PureDP,
    forms.Approx: ApproxDP,
    forms.Prob: ProbDP,
    forms.Zcdp: ZCDP,
    forms.Gdp: GDP,
}


class _Asked(NamedTuple):
    """What somebody wants to be charged for."""

    verb: str
    costs: dict[str, Guarantee]
    key: str | None
    note: str
    expires: int | None = None


def guarantee_of(form: forms.CostForm) -> Guarantee:
    """Return the guarantee that a caller wrote."""
    if isinstance(form, forms.Disjoint):
        return Parallel(tuple(guarantee_of(part) for part in form.parts))
    if isinstance(form, forms.Known):
        return Mechanism(form.name, form.steps, None if form.curve is None else _curve(form.curve))
    return _curve(form) if isinstance(form, forms.Rdp) else _simple(form)


# Only what is small is remembered: a thousand curves would fill the memory.
@lru_cache(maxsize=4096)
def _simple(form: forms.Pure | forms.Approx | forms.Prob | forms.Zcdp | forms.Gdp) -> Guarantee:
    """Return the same object for the same numbers: it was priced before."""
    return _MADE[type(form)](*[getattr(form, field) for field in form.__struct_fields__ if field != "form"])


def _curve(form: forms.Rdp) -> RDP:
    return RDP(form.orders, form.values, form.delta)


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
    if wait == math.inf:
        raise HttpProblem(422, f"{len(items)} spends are more than a key may make at once here; send smaller batches")
    if wait:
        raise TooFast(wait)
    books = office.books_of(caller)
    begun: list[Charge | OdographError] = []
    for item in items:
        try:
            asked = _Asked("spend", _costs(item.costs), item.key, item.note)
            begun.append(_at_once(books, caller, asked) or await _priced(call, books, asked))
        except OdographError as error:
            begun.append(error)
    requests = [request for request in begun if isinstance(request, Charge)]
    outcomes = iter(await office.pen.write_all(requests))
    results: list[BatchResult] = []
    for one in begun:
        try:
            if isinstance(one, OdographError):
                raise one
            done = settled(one, next(outcomes))
            form = _quick_receipt(done) or await _receipt(call, books, one, done)
            results.append(BatchResult(_OK if form.repeated else _CREATED, receipt=form))
        except OdographError as error:
            problem = problem_of(error, caller)
            problem.detail = office.discreet(problem.detail)
            results.append(BatchResult(problem.status, problem=problem))
    office.metrics.spent("spend", sum(result.status == _CREATED for result in results))
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
    office, books = call.office, call.office.books_of(call.caller)
    asked = _Asked(verb, costs, call.key, call.form.note, expires)
    request = _at_once(books, call.caller, asked) or await _priced(call, books, asked)
    done = settled(request, await office.pen.write(request))
    form = _quick_receipt(done) or await _receipt(call, books, request, done)
    if form.repeated:
        return Answer(_OK, form)
    office.metrics.spent(verb)
    return Answer(_CREATED, form)


def _at_once(books: LocalBooks, caller: Caller, asked: _Asked) -> Charge | None:
    """Price a charge, if that is quick and needs nothing from the store; else it is for a thread."""
    require_seen(caller, asked.costs)
    for cost in asked.costs.values():
        if not isinstance(cost, _QUICK):
            return None
    return books.request(*asked) if books.at_hand(asked.costs) else None


async def _priced(call: Call, books: LocalBooks, asked: _Asked) -> Charge:
    return await call.office.run(books.request, *asked)


def _quick_receipt(done: Settled) -> ReceiptForm | None:
    """Return the receipt of a charge that was made, if nothing needs to be looked up for it."""
    if not isinstance(done, Made) or done.linked:
        return None
    return made_form(done.own)


async def _receipt(call: Call, books: LocalBooks, request: Charge, done: Settled) -> ReceiptForm:
    """Return the receipt of a charge after looking up its first time or its lifetime; or raise the refusal."""
    office, caller = call.office, call.caller
    try:
        receipt = await office.run(books.charged, request, done)
    except BudgetExceeded as refusal:
        office.metrics.refused()
        costs = {ask.asked[0]: ask.cost for ask in request.asks}
        raise BudgetExceeded(await office.run(masked, books, caller, costs, refusal.decision)) from None
    return receipt_form(receipt, caller)


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
