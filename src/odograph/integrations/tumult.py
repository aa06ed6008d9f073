"""Tumult: its privacy budgets as guarantees, and Tumult sessions charged to an account, whole or query by query.

Tumult and guarantees both keep exact numbers: `PureDPBudget(0.1)` is the float, a little more than one tenth.
`account.interact(session)` charges what is left of the session's budget at once, and Tumult divides it among queries.
`evaluate` charges each query by itself: give the Tumult session an infinite budget then, or a finite one as a second
limit; the account decides either way.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Final

from odograph.account import Account
from odograph.core.fixed_point import Numeric, exactly, read
from odograph.core.guarantees import ZCDP, ApproxDP, Guarantee, Interactive, PureDP, exact_of
from odograph.errors import InvalidArgument, InvalidGuarantee, UnprovenComposition, load_extra

__all__ = ["cost_of", "evaluate", "largest_budget"]

SETTINGS: Final = ("d_in",)

# The distance of neighbors in a metric over tables; a replaced row is one removed and one added.
_TABLES: Final = {
    "SymmetricDifference": {"add-remove": 1, "replace-one": 2},
    "HammingDistance": {"replace-one": 1},
}


def cost_of(
    thing: Any,  # noqa: ANN401  untyped library
    *,
    neighbors: str = "add-remove",
    d_in: Numeric | None = None,
) -> Guarantee:
    """Return the guarantee of a Tumult budget or session, or of a measurement of Tumult Core, for neighbors.

    A budget refers to its session's protected change, which adds or removes rows. A session is interactive: it costs
    what is left of its budget. For a measurement, `d_in` is the distance of neighbors in its input metric: by default
    one row of a table; for numbers it must be given.

    Theorem: by its own proof: the budget's definition; a measurement's privacy function, with Tumult's proof of it,
        for interactive ones against every strategy of asking.
    Assumes: the session's protected change is the policy's privacy unit.
    """
    analytics, core = load_extra("tmlt.analytics"), load_extra("tmlt.core.measurements.base")
    if isinstance(thing, analytics.Session):
        return Interactive(cost_of(thing.remaining_privacy_budget, neighbors=neighbors))
    if isinstance(thing, analytics.PrivacyBudget):
        if neighbors != "add-remove":
            raise UnprovenComposition(
                "Tumult's protected changes add or remove rows; they need a policy with neighbors='add-remove' (got"
                f" {neighbors!r})"
            )
        return _guarantee(type(thing).__name__.removesuffix("Budget"), thing.value)
    if isinstance(thing, core.Measurement):
        guarantee = _guarantee(type(thing.output_measure).__name__, _loss(thing, neighbors, d_in))
        return Interactive(guarantee) if thing.is_interactive else guarantee
    raise InvalidGuarantee(
        f"the cost of a Tumult {type(thing).__name__} is unknown; pass the privacy budget of a query"
    )


def evaluate(
    account: Account,
    session: Any,  # noqa: ANN401  untyped library
    query: Any,  # noqa: ANN401  untyped library
    budget: Any,  # noqa: ANN401  untyped library
) -> Any:  # noqa: ANN401  a Spark data frame
    """Charge the query's budget to the account, then return `session.evaluate(query, budget)`.

    A refusal raises `BudgetExceeded` before the session gets the query. If Tumult raises, the charge stands.
    """
    with account.spending(cost_of(budget, neighbors=account.policy.neighbors), note=f"Tumult {budget}"):
        return session.evaluate(query, budget)


def largest_budget(account: Account, kind: Any, times: int = 1) -> Any:  # noqa: ANN401  untyped library
    """Return the largest Tumult budget of which `times` equal queries fit the account, or None.

    `kind` is `PureDPBudget` or `RhoZCDPBudget`, or an `ApproxDPBudget` whose delta is kept.
    """
    example = kind(1) if isinstance(kind, type) and kind.__name__ != "ApproxDPBudget" else kind
    if isinstance(example, type):
        raise InvalidArgument(
            "kind must be an ApproxDPBudget with the delta of each query, such as ApproxDPBudget(1, 1e-9) (got the"
            " class)"
        )
    offer = account.largest(cost_of(example, neighbors=account.policy.neighbors), times)
    match offer:
        case PureDP(epsilon):
            return type(example)(_exact_number(epsilon))
        case ZCDP(rho):
            return type(example)(_exact_number(rho))
        case ApproxDP(epsilon):
            return type(example)(_exact_number(epsilon), example.value[1])
    return None


def _guarantee(measure: str, value: Any) -> Guarantee:  # noqa: ANN401  untyped library
    match measure:
        case "PureDP":
            return PureDP(_exact(value))
        case "ApproxDP":
            return ApproxDP(*map(_exact, value))
        case "RhoZCDP":
            return ZCDP(_exact(value))
    raise UnprovenComposition(
        f"Tumult's {measure} is not covered by any theorem here; pass cost= if you know the cost"
    )


def _loss(measurement: Any, neighbors: str, d_in: Numeric | None) -> Any:  # noqa: ANN401  untyped library
    metric = type(measurement.input_metric).__name__
    one = _TABLES.get(metric, {neighbors: 0}).get(neighbors)
    if one is None:
        raise UnprovenComposition(f"{metric} does not cover neighbors={neighbors!r}")
    if d_in is None and not one:
        raise InvalidArgument(f"d_in must be given: the distance of neighbors in {measurement.input_metric}")
    distance = Fraction(one) if d_in is None else read(d_in, "d_in", InvalidArgument)
    if distance == 0 or distance < one:
        raise InvalidArgument(f"d_in must be at least one neighbor ({neighbors}) in {metric} (got {d_in!r})")
    return measurement.privacy_function(_exact_number(distance))


def _exact(number: Any) -> Fraction:  # noqa: ANN401  untyped library
    """Return an exact number of Tumult's as a fraction: exact if it is rational, else rounded up."""
    number = load_extra("tmlt.core.utils.exact_number").ExactNumber(number)
    if not number.is_finite:
        raise InvalidGuarantee(f"a Tumult budget must be finite (got {number}): otherwise there is no privacy")
    if number.expr.is_Rational:
        return Fraction(int(number.expr.p), int(number.expr.q))
    return exactly(float(number.to_float(round_up=True)))


def _exact_number(value: Numeric) -> Any:  # noqa: ANN401  untyped library
    exact = exact_of(value)
    number = load_extra("tmlt.core.utils.exact_number").ExactNumber
    return number(exact.numerator) / number(exact.denominator)
