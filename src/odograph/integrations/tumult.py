"""Tumult: its privacy budgets as guarantees, and queries of a Tumult session charged to an account before they run.

Tumult keeps exact numbers, and so does a guarantee: `PureDPBudget(0.1)` is the float, a little more than one tenth.
Give the Tumult session an infinite budget, or one of its own as a second limit; the account decides either way.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

from odograph.core.account import Account
from odograph.core.guarantees import ZCDP, ApproxDP, Guarantee, PureDP, exact_of
from odograph.core.units import Numeric, exactly, read
from odograph.errors import InvalidGuarantee, UnprovenComposition
from odograph.extras import load

__all__ = ["cost_of", "evaluate", "largest_budget"]

SETTINGS: Final = ("d_in",)

# How far apart neighbours are in a metric over tables; a replaced row is one removed and one added.
_TABLES: Final = {
    "SymmetricDifference": {"add-remove": 1, "replace-one": 2},
    "HammingDistance": {"replace-one": 1},
}


def cost_of(
    thing: Any,  # noqa: ANN401  untyped library
    *,
    neighbours: str = "add-remove",
    d_in: Numeric | None = None,
) -> Guarantee:
    """Return what a Tumult budget, or a measurement of Tumult Core, guarantees for neighbours.

    A budget is about its session's protected change, which adds or removes rows. For a measurement `d_in` is how far
    apart neighbours are in its input metric: one row of a table if not given, and to be given for numbers.

    Theorem: the budget's own definition; a measurement's privacy function, with Tumult's proof of it.
    Assumes: the session's protected change is the policy's unit of privacy.
    """
    budgets, core = load("tmlt.analytics"), load("tmlt.core.measurements.base")
    if isinstance(thing, budgets.PrivacyBudget):
        if neighbours != "add-remove":
            raise UnprovenComposition(
                f"Tumult's protected changes add or remove rows, and the policy's neighbours are {neighbours!r}"
            )
        return _guarantee(type(thing).__name__.removesuffix("Budget"), thing.value)
    if isinstance(thing, core.Measurement):
        if thing.is_interactive:
            raise UnprovenComposition(
                f"{type(thing).__name__} answers many queries, and interactive measurements are not covered; nothing"
                " was charged. Charge its queries one by one"
            )
        return _guarantee(type(thing.output_measure).__name__, _loss(thing, neighbours, d_in))
    raise InvalidGuarantee(
        f"a Tumult {type(thing).__name__} does not say what it costs; pass the privacy budget of a query"
    )


def evaluate(
    account: Account,
    session: Any,  # noqa: ANN401  untyped library
    query: Any,  # noqa: ANN401  untyped library
    budget: Any,  # noqa: ANN401  untyped library
) -> Any:  # noqa: ANN401  a Spark data frame
    """Charge the query's budget to the account, then return `session.evaluate(query, budget)`.

    A refusal raises `BudgetExceeded`, and the session sees no query. If Tumult raises, the charge stands.
    """
    with account.spending(cost_of(budget, neighbours=account.policy.neighbours), note=f"Tumult {budget}"):
        return session.evaluate(query, budget)


def largest_budget(account: Account, kind: Any, times: int = 1) -> Any:  # noqa: ANN401  untyped library
    """Return the largest Tumult budget of which `times` equal queries fit the account, or None.

    `kind` is `PureDPBudget` or `RhoZCDPBudget`, or an `ApproxDPBudget` whose delta is kept.
    """
    example = kind(1) if isinstance(kind, type) and kind.__name__ != "ApproxDPBudget" else kind
    if isinstance(example, type):
        raise InvalidGuarantee("pass an ApproxDPBudget whose delta each query is to have, such as (1, 1e-9)")
    offer = account.largest(cost_of(example, neighbours=account.policy.neighbours), times)
    match offer:
        case PureDP(epsilon):
            return type(example)(_number(epsilon))
        case ZCDP(rho):
            return type(example)(_number(rho))
        case ApproxDP(epsilon):
            return type(example)(_number(epsilon), example.value[1])
    return None


def _guarantee(measure: str, value: Any) -> Guarantee:  # noqa: ANN401  untyped library
    match measure:
        case "PureDP":
            return PureDP(_exact(value))
        case "ApproxDP":
            return ApproxDP(*map(_exact, value))
        case "RhoZCDP":
            return ZCDP(_exact(value))
    raise UnprovenComposition(f"no theorem here covers Tumult's {measure}; pass cost= if you know one")


def _loss(measurement: Any, neighbours: str, d_in: Numeric | None) -> Any:  # noqa: ANN401  untyped library
    metric = type(measurement.input_metric).__name__
    one = _TABLES.get(metric, {neighbours: 0}).get(neighbours)
    if one is None:
        raise UnprovenComposition(f"{metric} says nothing about neighbours={neighbours!r}")
    if d_in is None and not one:
        raise InvalidGuarantee(f"d_in must be given: how far neighbours are apart in {measurement.input_metric}")
    distance = Fraction(one) if d_in is None else read(d_in, "d_in")
    if distance == 0 or distance < one:
        raise InvalidGuarantee(f"d_in={d_in!r} is less than one neighbour ({neighbours}) in {metric}")
    return measurement.privacy_function(_number(distance))


def _exact(number: Any) -> Fraction:  # noqa: ANN401  untyped library
    """Return an exact number of Tumult's: as it is if rational, else rounded up."""
    number = load("tmlt.core.utils.exact_number").ExactNumber(number)
    if not number.is_finite:
        raise InvalidGuarantee(f"an infinite Tumult budget ({number}) has no price: no privacy, at any price")
    if number.expr.is_Rational:
        return Fraction(int(number.expr.p), int(number.expr.q))
    return exactly(float(number.to_float(round_up=True)))


def _number(value: Numeric) -> Any:  # noqa: ANN401  untyped library
    exact = exact_of(value)
    number = load("tmlt.core.utils.exact_number").ExactNumber
    return number(exact.numerator) / number(exact.denominator)
