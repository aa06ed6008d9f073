"""Charges: spend, reserve, commit, void, batches. A charge goes from here through the pen to the scribe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeAlias, cast

from msgspec import Raw, Struct

from odograph.core.gate import Decision
from odograph.errors import (
    BudgetExceeded,
    LedgerBusy,
    LedgerError,
    OdographError,
    OutcomeUnknown,
    ReservationNotFound,
)
from odograph.ledger.account import microseconds
from odograph.ledger.commands import Author, Charge, Made, Outcome, Refused, Settled, settled
from odograph.ledger.local_backend import LocalBackend
from odograph.ledger.results import Receipt
from odograph.ledger.stores.base import RowLocked
from odograph.service.endpoint import Call, Reply
from odograph.service.problems import HttpProblem, TooFast
from odograph.service.request_schemas import QUICK, CostForm, costs_of
from odograph.service.response_schemas import BatchResult, ReceiptForm
from odograph.service.visibility import mask_refusal, receipt_form, require_visible
from odograph.service.writer_protocol import Answer as Packet
from odograph.service.writer_protocol import Order, Packed, outcome_in, packed

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


async def spend(call: Call) -> Reply:
    """Charge one account durably. Charge first, then run the mechanism."""
    return await _charge(call, "spend", {call.path["name"]: call.form.cost})


async def reserve(call: Call) -> Reply:
    """Charge one account now; commit when the mechanism has run, or void if it was not run."""
    return await _charge(call, "reserve", {call.path["name"]: call.form.cost}, microseconds(call.form.expires))


async def spend_all(call: Call) -> Reply:
    """Charge several accounts, all or nothing."""
    return await _charge(call, "spend", call.form.costs)


async def reserve_all(call: Call) -> Reply:
    """Charge several accounts now, all or nothing; commit or void later."""
    return await _charge(call, "reserve", call.form.costs, microseconds(call.form.expires))


async def batch(call: Call) -> _Results:
    """Charge many independent spends, each under its own key; every one has an answer of its own, in order."""
    state, caller, items = call.state, call.caller, call.form.spends
    wait = state.limit.take(caller.api_key_id, len(items) - 1)  # the first was taken at the door
    if wait == math.inf:
        raise HttpProblem(422, f"{len(items)} spends are more than a key may make at once here; send smaller batches")
    if wait:
        raise TooFast(wait)
    backend = state.backend_of(caller)
    orders: list[Order | OdographError] = []
    for item in items:
        try:
            require_visible(caller, item.costs)
            orders.append(Order(await _author(call, backend, item.key, item.note), "spend", item.costs, None))
        except OdographError as error:
            orders.append(error)
    written = iter(await _write(call, backend, [order for order in orders if isinstance(order, Order)]))
    results: list[BatchResult | _Written] = []
    offers = _MOST_OFFERS
    for order in orders:
        answer: Answered = next(written) if isinstance(order, Order) else order
        if isinstance(answer, bytes):
            results.append(_Written(_CREATED, Raw(answer)))
            continue
        result = await state.compute(_result, call, backend, order, answer, search=offers > 0)
        offers -= result.status == _CONFLICT
        results.append(result)
    state.metrics.count_charge("spend", sum(result.status == _CREATED for result in results))
    return _Results(results)


def _result(
    call: Call, backend: LocalBackend, order: Order | OdographError, answer: Answered, *, search: bool
) -> BatchResult:
    """Say what became of one spend of a batch that was not simply made."""
    try:
        if isinstance(order, OdographError):
            raise order
        form = _receipt_of(call, backend, order, settled(order.author, _outcome(answer)), search=search)
        return BatchResult(_OK if form.repeated else _CREATED, receipt=form)
    except OdographError as error:
        problem = call.state.problem(error, call.caller)
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


async def _charge(call: Call, verb: str, costs: Mapping[str, CostForm], expires: int | None = None) -> Reply:
    state, caller = call.state, call.caller
    require_visible(caller, costs)
    backend = state.backend_of(caller)
    order = Order(await _author(call, backend, call.idempotency_key, call.form.note), verb, costs, expires)
    if (form := _form(order)) is None:
        answer: Answered = await _submit(call, backend, order)
    else:
        (answer,) = await state.writer.write((form,))
    if isinstance(answer, bytes):
        state.metrics.count_charge(verb)
        return Reply(_CREATED, Raw(answer))
    receipt = await _receipt(call, backend, order, settled(order.author, _outcome(answer)))
    if receipt.repeated:
        return Reply(_OK, receipt)
    state.metrics.count_charge(verb)
    return Reply(_CREATED, receipt)


async def _author(call: Call, backend: LocalBackend, key: str | None, note: str) -> Author:
    """Say who asks; the first time that takes a look into the store."""
    return backend.author(key, note) if backend.identified else await call.state.run(backend.author, key, note)


async def _write(call: Call, backend: LocalBackend, orders: list[Order]) -> list[Answered]:
    """Carry orders out: through the scribe, all that is quick to price; in threads of the worker, the rest."""
    forms = [_form(order) for order in orders]
    written = iter(await call.state.writer.write([form for form in forms if form is not None]))
    return [
        await _submit(call, backend, order) if form is None else next(written)
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


async def _submit(call: Call, backend: LocalBackend, order: Order) -> Outcome:
    """Carry one order out in threads; if too much waits for one, that is its outcome, and no other order's."""
    try:
        request = await call.state.compute(_request, backend, order)
        return await call.state.run(_submitted, backend, request)
    except OdographError as error:
        return error


def _submitted(backend: LocalBackend, request: Charge) -> Outcome:
    """Carry a priced order out, here; waits for it. Raises `RowLocked`, to be called again."""
    outcome = backend.writer.submit(request)
    if isinstance(outcome, RowLocked):
        raise outcome
    return outcome


def _request(backend: LocalBackend, order: Order) -> Charge:
    return Charge(order.author, order.verb, backend.asks(costs_of(order.costs)), order.expires)


def _outcome(answer: Answered) -> Outcome:
    """Return an outcome; one that came from the scribe is unpacked."""
    if isinstance(answer, bytes):  # pragma: no cover  a receipt, which was sent on as it is
        raise LedgerError("a receipt was taken for an outcome")
    # Outcomes are tuples too, but with names.
    return outcome_in(cast("tuple[bytes, bool]", answer)) if type(answer) is tuple else cast("Outcome", answer)


async def _receipt(call: Call, backend: LocalBackend, order: Order, done: Settled) -> ReceiptForm:
    """Return the receipt of a charge after looking up its first time or its lifetime; or raise what became of it."""
    run = call.state.compute if isinstance(done, Refused) else call.state.run
    return await run(_receipt_of, call, backend, order, done)


def _receipt_of(
    call: Call, backend: LocalBackend, order: Order, done: Settled, *, search: bool = True
) -> ReceiptForm:
    """As above, here; without `search` a refusal comes without an offer."""
    if isinstance(done, Refused) and not search:
        raise _refusal(call, backend, order, done.decision._replace(searched=False))
    try:
        return receipt_form(backend.charged(_request(backend, order), done), call.caller)
    except LedgerBusy as busy:
        if isinstance(done, Made):  # whatever the message says of what was asked last
            raise OutcomeUnknown(
                "this was charged, but its receipt could not be read; ask again with the same key to get it",
                key=order.author.key,
                charged=True,
            ) from busy
        raise
    except BudgetExceeded as refusal:
        raise _refusal(call, backend, order, refusal.decision) from None


def _refusal(call: Call, backend: LocalBackend, order: Order, decision: Decision) -> BudgetExceeded:
    call.state.metrics.count_refusal()
    return BudgetExceeded(mask_refusal(backend, call.caller, costs_of(order.costs), decision))


async def _reserved(call: Call) -> Receipt:
    """Return a reservation of which the caller may see every account."""
    backend, name = call.state.backend_of(call.caller), call.path["reservation"]
    receipt = await call.state.run(backend.reservation, name)
    if not all(call.caller.sees(line.account) for line in receipt.lines):
        raise ReservationNotFound(f"there is no reservation {name!r}")
    return receipt


async def _resolve(call: Call, verb: str, note: str) -> ReceiptForm:
    await _reserved(call)
    backend = call.state.backend_of(call.caller)
    receipt = await call.state.run(backend.resolve, verb, call.path["reservation"], note)
    return receipt_form(receipt, call.caller)
