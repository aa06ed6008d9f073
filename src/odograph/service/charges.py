"""Charges: spend, reserve, commit, void, batches. A charge goes from here through the pen to the scribe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeAlias, cast

from msgspec import Raw, Struct

from odograph.core.decide import Decision
from odograph.errors import (
    BudgetExceeded,
    LedgerBusy,
    LedgerError,
    OdographError,
    ReservationNotFound,
    ServiceUnavailable,
)
from odograph.ledger.account import microseconds
from odograph.ledger.local import LocalBooks
from odograph.ledger.receipts import Receipt
from odograph.ledger.requests import Author, Charge, Made, Outcome, Refused, Settled, settled
from odograph.ledger.store import RowLocked
from odograph.service.answers import BatchResult, ReceiptForm
from odograph.service.door import Answer, Call
from odograph.service.forms import CostForm
from odograph.service.frames import Answer as Packet
from odograph.service.frames import Order, Packed, outcome_in, packed
from odograph.service.guarantees import QUICK, costs_of
from odograph.service.problems import HttpProblem, TooFast
from odograph.service.views import masked, receipt_form, require_seen

__all__ = ["batch", "commit", "reservation", "reserve", "reserve_all", "spend", "spend_all", "void"]

_CREATED: Final = 201
_OK: Final = 200
_CONFLICT: Final = 409
_MOST_OFFERS: Final = 8  # refusals of one batch for which a smaller request is searched
_FEW: Final = 8  # accounts: a frame of orders for a hundred each would keep everybody waiting for seconds

# A receipt as it is sent, an outcome as the scribe packed it, or an outcome.
Answered: TypeAlias = Packet | Outcome


class _Written(Struct):
    """A `BatchResult` whose receipt is written already."""

    status: int
    receipt: Raw


class _Results(Struct):
    """What is sent as `BatchResults`."""

    results: list[BatchResult | _Written]


async def spend(call: Call) -> Answer:
    """Charge one account durably. Charge first, then run the mechanism."""
    return await _charge(call, "spend", {call.path["name"]: call.form.cost})


async def reserve(call: Call) -> Answer:
    """Charge one account now; commit when the mechanism has run, or void if it was not run."""
    return await _charge(call, "reserve", {call.path["name"]: call.form.cost}, microseconds(call.form.expires))


async def spend_all(call: Call) -> Answer:
    """Charge several accounts, all or nothing."""
    return await _charge(call, "spend", call.form.costs)


async def reserve_all(call: Call) -> Answer:
    """Charge several accounts now, all or nothing; commit or void later."""
    return await _charge(call, "reserve", call.form.costs, microseconds(call.form.expires))


async def batch(call: Call) -> _Results:
    """Charge many independent spends, each under its own key; every one has an answer of its own, in order."""
    office, caller, items = call.office, call.caller, call.form.spends
    wait = office.limit.take(caller.key, len(items) - 1)  # the first was taken at the door
    if wait == math.inf:
        raise HttpProblem(422, f"{len(items)} spends are more than a key may make at once here; send smaller batches")
    if wait:
        raise TooFast(wait)
    books = office.books_of(caller)
    orders: list[Order | OdographError] = []
    for item in items:
        try:
            require_seen(caller, item.costs)
            orders.append(Order(await _author(call, books, item.key, item.note), "spend", item.costs, None))
        except OdographError as error:
            orders.append(error)
    written = iter(await _write(call, books, [order for order in orders if isinstance(order, Order)]))
    results: list[BatchResult | _Written] = []
    offers = _MOST_OFFERS
    for order in orders:
        answer: Answered = next(written) if isinstance(order, Order) else order
        if isinstance(answer, bytes):
            results.append(_Written(_CREATED, Raw(answer)))
            continue
        result = await office.compute(_result, call, books, order, answer, search=offers > 0)
        offers -= result.status == _CONFLICT
        results.append(result)
    office.metrics.spent("spend", sum(result.status == _CREATED for result in results))
    return _Results(results)


def _result(
    call: Call, books: LocalBooks, order: Order | OdographError, answer: Answered, *, search: bool
) -> BatchResult:
    """Say what became of one spend of a batch that was not simply made."""
    try:
        if isinstance(order, OdographError):
            raise order
        form = _receipt_of(call, books, order, settled(order.author, _outcome(answer)), search=search)
        return BatchResult(_OK if form.repeated else _CREATED, receipt=form)
    except OdographError as error:
        problem = call.office.problem(error, call.caller)
        return BatchResult(problem.status, problem=problem)


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


async def _charge(call: Call, verb: str, costs: Mapping[str, CostForm], expires: int | None = None) -> Answer:
    office, caller = call.office, call.caller
    require_seen(caller, costs)
    books = office.books_of(caller)
    order = Order(await _author(call, books, call.key, call.form.note), verb, costs, expires)
    if (form := _form(order)) is None:
        answer: Answered = await _submit(call, books, order)
    else:
        (answer,) = await office.pen.write((form,))
    if isinstance(answer, bytes):
        office.metrics.spent(verb)
        return Answer(_CREATED, Raw(answer))
    receipt = await _receipt(call, books, order, settled(order.author, _outcome(answer)))
    if receipt.repeated:
        return Answer(_OK, receipt)
    office.metrics.spent(verb)
    return Answer(_CREATED, receipt)


async def _author(call: Call, books: LocalBooks, key: str | None, note: str) -> Author:
    """Say who asks; the first time that takes a look into the store."""
    return books.author(key, note) if books.identified else await call.office.run(books.author, key, note)


async def _write(call: Call, books: LocalBooks, orders: list[Order]) -> list[Answered]:
    """Carry orders out: through the scribe, all that is quick to price; in threads of the worker, the rest."""
    forms = [_form(order) for order in orders]
    written = iter(await call.office.pen.write([form for form in forms if form is not None]))
    return [
        await _submit(call, books, order) if form is None else next(written)
        for order, form in zip(orders, forms, strict=True)
    ]


def _form(order: Order) -> Packed | None:
    """Return an order as the scribe reads it, if that can be and it is quick: others would wait for it."""
    if len(order.costs) > _FEW:
        return None
    for cost in order.costs.values():
        if not isinstance(cost, QUICK):
            return None
    return packed(order)


async def _submit(call: Call, books: LocalBooks, order: Order) -> Outcome:
    """Carry one order out in threads; if too much waits for one, that is its outcome, and no other order's."""
    try:
        request = await call.office.compute(_request, books, order)
        return await call.office.run(_submitted, books, request)
    except OdographError as error:
        return error


def _submitted(books: LocalBooks, request: Charge) -> Outcome:
    """Carry a priced order out, here; waits for it. Raises `RowLocked`, to be called again."""
    outcome = books.writer.submit(request)
    if isinstance(outcome, RowLocked):
        raise outcome
    return outcome


def _request(books: LocalBooks, order: Order) -> Charge:
    return Charge(order.author, order.verb, books.asks(costs_of(order.costs)), order.expires)


def _outcome(answer: Answered) -> Outcome:
    """Return an outcome; one that came from the scribe is unpacked."""
    if isinstance(answer, bytes):  # pragma: no cover  a receipt, which was sent on as it is
        raise LedgerError("a receipt was taken for an outcome")
    # Outcomes are tuples too, but with names.
    return outcome_in(cast("tuple[bytes, bool]", answer)) if type(answer) is tuple else cast("Outcome", answer)


async def _receipt(call: Call, books: LocalBooks, order: Order, done: Settled) -> ReceiptForm:
    """Return the receipt of a charge after looking up its first time or its lifetime; or raise what became of it."""
    run = call.office.compute if isinstance(done, Refused) else call.office.run
    return await run(_receipt_of, call, books, order, done)


def _receipt_of(call: Call, books: LocalBooks, order: Order, done: Settled, *, search: bool = True) -> ReceiptForm:
    """As above, here; without `search` a refusal comes without an offer."""
    if isinstance(done, Refused) and not search:
        raise _refusal(call, books, order, done.decision._replace(searched=False))
    try:
        return receipt_form(books.charged(_request(books, order), done), call.caller)
    except LedgerBusy as busy:
        if isinstance(done, Made):  # whatever the message says of what was asked last
            raise ServiceUnavailable(
                "this was charged, and its receipt could not be read; ask again with the same key to have it"
                f" (key {order.author.key!r})"
            ) from busy
        raise
    except BudgetExceeded as refusal:
        raise _refusal(call, books, order, refusal.decision) from None


def _refusal(call: Call, books: LocalBooks, order: Order, decision: Decision) -> BudgetExceeded:
    call.office.metrics.refused()
    return BudgetExceeded(masked(books, call.caller, costs_of(order.costs), decision))


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
