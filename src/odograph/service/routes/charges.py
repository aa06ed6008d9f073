"""Charges: spend, reserve, commit, void, batches. A charge is sent from here to the engine in the writer process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeAlias

from msgspec import Raw

from odograph.account import microseconds
from odograph.errors import BudgetExceeded, OdographError, ReservationNotFound
from odograph.ledger.backend import LocalBackend, with_counter_offer
from odograph.ledger.commands import Author, Charge, Made, Refused
from odograph.ledger.engine import result_of
from odograph.ledger.entries import iso_time
from odograph.ledger.results import Receipt
from odograph.service.endpoint import Call, Reply
from odograph.service.schemas import BatchResult, BatchResults, CostForm, LineForm, ReceiptForm, costs_of
from odograph.service.visibility import HttpProblem, TooFast, mask_refusal, receipt_form, require_visible
from odograph.service.writer import (
    NOTED,
    REFUSED,
    Answer,
    Charged,
    ChargeRequest,
    Message,
    Pickled,
    decode_outcome,
    encode_command,
    encode_quick_charge,
)

__all__ = ["batch", "commit", "reservation", "reserve", "reserve_all", "spend", "spend_all", "void"]

_CREATED: Final = 201
_OK: Final = 200
_CONFLICT: Final = 409
_MAX_OFFERS: Final = 8  # refusals and notes of one batch for which it is searched what fits

# What the writer process answered, or an error.
Answered: TypeAlias = Answer | OdographError


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


async def batch(call: Call) -> BatchResults:
    """Charge many independent spends, each with its own key; each has a result of its own, in order."""
    state, caller, items = call.state, call.caller, call.form.spends
    wait = state.limit.take(caller.api_key_id, len(items) - 1)  # the endpoint took the first
    if wait == math.inf:
        raise HttpProblem(422, f"{len(items)} spends are more than a key may make at once here; send smaller batches")
    if wait:
        raise TooFast(wait)
    backend = state.backend_of(caller)
    requests: list[ChargeRequest | OdographError] = []
    messages: list[Message] = []
    client = ""
    for item in items:
        try:
            require_visible(caller, item.costs)
            request = ChargeRequest(await _author(call, backend, item.key, item.note), "spend", item.costs, None)
            messages.append(encode_quick_charge(request) or await _encode_slow_charge(call, backend, request))
            requests.append(request)
            client = request.author.principal
        except OdographError as error:
            requests.append(error)
    answers = iter(await state.writer.write(client, messages))
    results: list[BatchResult] = []
    offers = _MAX_OFFERS
    for one in requests:
        answer: Answered = next(answers) if isinstance(one, ChargeRequest) else one
        if isinstance(one, ChargeRequest) and isinstance(answer, Charged):
            results.append(BatchResult(_CREATED, _new_receipt(one, answer)))
            continue
        result = await state.compute(_result, call, backend, one, answer, search=offers > 0)
        offers -= result.status == _CONFLICT or (result.receipt is not None and bool(result.receipt.notes))
        results.append(result)
    state.metrics.count_charge("spend", sum(result.status == _CREATED for result in results))
    return BatchResults(results)


def _result(
    call: Call, backend: LocalBackend, request: ChargeRequest | OdographError, answer: Answered, *, search: bool
) -> BatchResult:
    """Return the result of one spend of a batch whose receipt is not encoded already."""
    try:
        if isinstance(request, OdographError):
            raise request
        form = _receipt(call, backend, request, answer, search=search)
        return BatchResult(_OK if form.repeated else _CREATED, receipt=form)
    except OdographError as error:
        problem = call.state.problem(error, call.caller)
        return BatchResult(problem.status, problem=problem)


async def reservation(call: Call) -> ReceiptForm:
    """Show a reservation by its id, such as census#17 (written census%2317 in a path)."""
    receipt = await _read_reservation(call)
    return receipt_form(receipt, call.caller)


async def commit(call: Call) -> ReceiptForm:
    """State that a reservation's mechanism was run, or may have been; works after it expired, and again."""
    return await _resolve(call, "commit", call.form.note)


async def void(call: Call) -> ReceiptForm:
    """Take a reservation back: its mechanism was not run. Not after it was committed or has expired."""
    return await _resolve(call, "void", call.form.reason)


async def _charge(call: Call, verb: str, costs: Mapping[str, CostForm], expires: int | None = None) -> Reply:
    state, caller = call.state, call.caller
    require_visible(caller, costs)
    backend = state.backend_of(caller)
    request = ChargeRequest(await _author(call, backend, call.idempotency_key, call.form.note), verb, costs, expires)
    message = encode_quick_charge(request) or await _encode_slow_charge(call, backend, request)
    (answer,) = await state.writer.write(request.author.principal, (message,))
    if isinstance(answer, Charged):
        state.metrics.count_charge(verb)
        return Reply(_CREATED, _new_receipt(request, answer))
    # A refusal and a note are searched for what fits; everything else may need a read.
    is_searched = isinstance(answer, Pickled) and answer.follow_up in {NOTED, REFUSED}
    receipt = await (state.compute if is_searched else state.run)(_receipt, call, backend, request, answer)
    if receipt.repeated:
        return Reply(_OK, receipt)
    state.metrics.count_charge(verb)
    return Reply(_CREATED, receipt)


async def _author(call: Call, backend: LocalBackend, key: str | None, note: str) -> Author:
    """Return the author of a charge; the first time that reads the store."""
    return backend.author(key, note) if backend.identified else await call.state.run(backend.author, key, note)


async def _encode_slow_charge(call: Call, backend: LocalBackend, request: ChargeRequest) -> Message:
    """Price a charge in a thread, where it keeps no other command from being written, and encode it."""
    return await call.state.compute(lambda: encode_command(_price(backend, request)))


def _price(backend: LocalBackend, request: ChargeRequest) -> Charge:
    return Charge(request.author, request.verb, backend.price(costs_of(request.costs)), request.expires)


def _new_receipt(request: ChargeRequest, charged: Charged) -> ReceiptForm:
    """Return the receipt of a charge that was just written, whose costs are JSON already."""
    account, sequence, *_ = charged.entries[0]
    expires = charged.expires
    return ReceiptForm(
        id=f"{account}#{sequence}",
        verb=request.verb,
        key=request.author.key,
        time=iso_time(charged.time),
        accounts=[LineForm(account, sequence, Raw(cost), seal) for account, sequence, cost, seal in charged.entries],
        expires=None if expires is None else iso_time(expires),
        lifetimes=[],
        repeated=False,
        uncertified=charged.uncertified,
    )


def _receipt(
    call: Call, backend: LocalBackend, request: ChargeRequest, answer: Answered, *, search: bool = True
) -> ReceiptForm:
    """Return the receipt of a charge, or raise its error; without `search` neither says what would fit."""
    if not isinstance(answer, Pickled | OdographError):  # pragma: no cover  its receipt is made without a read
        raise TypeError(f"there is a receipt, and no outcome (got {answer!r})")
    outcome = decode_outcome(answer) if isinstance(answer, Pickled) else answer
    result = result_of(outcome, request.author.key)
    if not isinstance(result, Refused):
        noted = isinstance(result, Made) and result.before is not None
        asks = _price(backend, request).asks if noted else ()
        receipt = backend.receipt(result, request.verb, request.author.key, asks, search=search)
        # The principal is the caller; the writer process, which encodes most receipts, does not know the name.
        return receipt_form(receipt._replace(principal=""), call.caller)
    decision = result.decision._replace(searched=False)
    if search:
        decision = with_counter_offer(_price(backend, request).asks, result)
    call.state.metrics.count_refusal(result.decision.account)
    raise BudgetExceeded(mask_refusal(backend, call.caller, costs_of(request.costs), decision))


async def _read_reservation(call: Call) -> Receipt:
    """Return a reservation of which the caller may see every account."""
    backend, name = call.state.backend_of(call.caller), call.path["reservation"]
    receipt = await call.state.run(backend.reservation, name)
    if not all(call.caller.sees(line.account) for line in receipt.lines):
        raise ReservationNotFound(f"there is no reservation {name!r}")
    return receipt


async def _resolve(call: Call, verb: str, note: str) -> ReceiptForm:
    await _read_reservation(call)
    backend = call.state.backend_of(call.caller)
    receipt = await call.state.run(backend.resolve, verb, call.path["reservation"], note)
    return receipt_form(receipt, call.caller)
