"""The planner: what questions would cost and how many fit. It asks the gate, and can spend nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, NamedTuple

from msgspec import Struct

from odograph.core.compiled import price
from odograph.core.decide import decide
from odograph.core.guarantees import GDP, ZCDP, ApproxDP, Guarantee, Mechanism, PureDP, exact_of
from odograph.core.mechanisms import gaussian, laplace
from odograph.core.offers import how_many, used
from odograph.core.units import read
from odograph.errors import AccountClosed, BadRequest, InvalidGuarantee, UnprovenComposition
from odograph.ledger.account import LedgerAccount
from odograph.ledger.entries import shown
from odograph.ledger.ledger import Ledger
from odograph.service import views
from odograph.service.access import Caller
from odograph.service.problems import problem_of

__all__ = ["KINDS", "Kind", "PlanForm", "plan"]

_MOST_TIMES: Final = 10**9
_DIGITS: Final = 6  # of a counter-offer in terms of noise
_MENU: Final = "menu:"


class Kind(NamedTuple):
    """A kind of question: what people call it, what its size is, and how its cost is made from the numbers."""

    label: str
    size: str
    make: Callable[..., Guarantee]
    also: str = ""  # the name of a second number
    usual: str = ""  # what the second number is if it is left out


KINDS: Final = {
    "pure": Kind("pure DP: epsilon", "epsilon", PureDP),
    "approx": Kind("approximate DP: epsilon, delta", "epsilon", ApproxDP, "delta", "0"),
    "zcdp": Kind("zCDP: rho", "rho", ZCDP, "delta", "0"),
    "gdp": Kind("Gaussian DP: mu", "mu", GDP),
    "gaussian": Kind("Gaussian noise: sigma", "sigma", gaussian, "sensitivity", "1"),
    "laplace": Kind("Laplace noise: scale", "scale", laplace, "sensitivity", "1"),
}


class _Question(NamedTuple):
    """What was asked about: a cost, how often, and for noise the name of its size and the sensitivity."""

    cost: Guarantee
    times: int
    noise: str = ""
    sensitivity: str = ""


class PlanForm(Struct):
    """The planner's answer. Where the question makes no sense here, `problem` says why and the rest is empty."""

    account: str
    cost: dict[str, Any] | None = None
    times: int = 1
    admitted: bool = False  # whether all of them fit
    fits: int = 0  # how many in a row would
    largest: dict[str, Any] | None = None  # the largest of which that many fit
    noise: str = ""  # the same in the terms of the question: the least noise
    spent_after: float | None = None  # the part of this account's budget, if all of them are asked
    message: str = ""
    problem: str = ""


def plan(ledger: Ledger, caller: Caller, name: str, query: Mapping[str, str]) -> PlanForm | None:
    """Answer the planner's form, or return None if nothing was asked."""
    size = query.get("size", "").strip()
    if not size:
        return None
    caller.require("decide")
    account = views.seen(ledger, caller, name)
    try:
        return _answer(ledger, caller, account, _question(query, size))
    except (AccountClosed, BadRequest, InvalidGuarantee, UnprovenComposition) as problem:
        return PlanForm(name, problem=problem_of(problem, caller).detail)


def _times(text: str) -> int:
    text = text.strip() or "1"
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= _MOST_TIMES):
        raise BadRequest(f"times must be a whole number from 1 to {_MOST_TIMES:,}, and {shown(text)} is not")
    return int(text)


def _question(query: Mapping[str, str], size: str) -> _Question:
    """Read what is asked about; numbers are read exactly as they are typed."""
    times, chosen = _times(query.get("times", "")), query.get("kind", "pure")
    if chosen.startswith(_MENU):
        if not (size.isascii() and size.isdecimal() and len(size) <= 12):
            raise BadRequest(f"size must be a whole number of steps of the mechanism, and {shown(size)} is not")
        return _Question(Mechanism(chosen.removeprefix(_MENU), int(size)), times)
    kind = KINDS.get(chosen)
    if kind is None:
        raise BadRequest(f"kind must be one of {', '.join(KINDS)}, and {shown(chosen)} is not")
    if not kind.also:
        return _Question(kind.make(size), times)
    also = query.get(kind.also, "").strip() or kind.usual
    noise = (kind.size, also) if kind.also == "sensitivity" else ("", "")
    return _Question(kind.make(size, also), times, *noise)


def _answer(ledger: Ledger, caller: Caller, account: LedgerAccount, question: _Question) -> PlanForm:
    cost, times = question.cost, question.times
    decision = views.decide_for(ledger, caller, {account.name: cost})
    fits = min(how_many(one.compiled, one.totals, cost) for one in _path(account)) if decision.admitted else 0
    offer = account.largest(cost, times)
    spent = None
    if fits >= times:
        # The price of all of them, put to the gate at once, to be told the totals after it.
        after = decide(account.compiled.meters, account.totals, price(account.compiled, cost).times(times))
        spent = used(account.compiled, after.totals_after)
    return PlanForm(
        account.name,
        cost.to_dict(),
        times,
        fits >= times,
        fits,
        None if offer is None else offer.to_dict(),
        _noise(question, offer),
        spent,
        str(decision),
    )


def _path(account: LedgerAccount) -> list[LedgerAccount]:
    """Return the account and those above it: each of them is charged, so each must have room."""
    path = [account]
    while (above := path[-1].parent) is not None:
        path.append(above)
    return path


def _noise(question: _Question, offer: Guarantee | None) -> str:
    """Say an offer as the least noise that fits, where the question was about noise; rounded up."""
    strength = offer.mu if isinstance(offer, GDP) else offer.epsilon if isinstance(offer, PureDP) else 0
    if not question.noise or not strength:
        return ""
    least = read(question.sensitivity, "sensitivity") / exact_of(strength)
    if not least:
        return ""
    step = Fraction(10) ** (math.floor(math.log10(least)) + 1 - _DIGITS)
    return f"{question.noise} {float(math.ceil(least / step) * step):.{_DIGITS}g}"
