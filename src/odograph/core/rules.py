"""Rules: each compiles its share of delta' into the limits of one or more alternatives.

Basic composition (the epsilon meter) is an alternative of every policy, because it costs no delta'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from odograph.core.boundaries import filter_time
from odograph.core.conversions import largest_rdp, largest_rho
from odograph.core.exact import Budget
from odograph.core.gaussian import largest_mu
from odograph.core.guarantees import GDP, RDP, ZCDP, ApproxDP, Guarantee, Mechanism, ProbDP, PureDP
from odograph.core.meters import Meter
from odograph.core.orders import named_apart
from odograph.core.roots import last_holding
from odograph.core.units import CEILING, SCALE, down, exactly, floor_units
from odograph.errors import InvalidPolicy

__all__ = ["RULES", "Rule", "Target", "takers"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a rule compiles: an epsilon and its share of delta'.

    For the exact rule also a certified budget; for the Rényi rule, if chosen, orders and their shares.
    """

    epsilon: Fraction
    delta: Fraction
    budget: Budget | None = None
    orders: tuple[tuple[Fraction, Fraction], ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A filter: the guarantees it has a theorem for, and the alternatives it compiles a target to.

    `reach` says about how much intrinsic time it admits for a target, to tune an odometer by.
    """

    takes: tuple[type[Guarantee], ...]
    alternatives: Callable[[Target], tuple[Meter, ...]]
    reach: Callable[[float, float], float]


def _limit(value: float) -> int:
    """Round a budget down to whole units."""
    return min(CEILING, floor_units(exactly(value), SCALE))


def _below(value: Fraction) -> float:
    """Return the largest float that is at most the value: for a target, which may be understated."""
    near = float(value)
    return near if exactly(near) <= value else math.nextafter(near, 0.0)


def _basic(_target: Target) -> tuple[Meter, ...]:
    """No alternative of its own: the epsilon meter is one of every policy.

    Theorem: basic composition: sum of epsilon and sum of delta.
    Assumes: (epsilon_n, delta_n)-DP steps, predictable.
    """
    return ()


def _paper(target: Target) -> tuple[Meter, ...]:
    """The paper's filter, sum of epsilon^2 within y*.

    Theorem: Whitehouse et al., (epsilon, delta)-DP filter, with y* and the delta split corrected (E1, E7).
    Assumes: (epsilon_n, delta_n)-DP steps, predictable.
    """
    return (Meter("paper", "paper", _limit(filter_time(_below(target.epsilon), _below(target.delta)))),)


def _zcdp(target: Target) -> tuple[Meter, ...]:
    """Intrinsic time within 2 rho*, by the optimal conversion.

    Theorem: approximate-zCDP filter (Whitehouse et al.), then Canonne, Kamath, Steinke 2020, Proposition 12.
    Assumes: each step approximately rho_n-zCDP, predictable. Proves (epsilon, delta)-DP, not P(L > epsilon).
    """
    rho = largest_rho(_below(target.epsilon), _below(target.delta))
    return (Meter("zcdp", "intrinsic", _limit(2.0 * rho)),)


def _gdp(target: Target) -> tuple[Meter, ...]:
    """Sum of mu^2 within mu*^2.

    Theorem: GDP filter (Smith and Thakurta; Koskela et al.).
    Assumes: Gaussian steps, or pure steps by their GDP value; mu_n predictable.
    """
    mu = largest_mu(_below(target.epsilon), _below(target.delta))
    return (Meter("gdp", "gdp", _limit(down(mu * mu))),)


# Around the order a* that is best for zCDP steps; a* itself gets most of delta'.
_SPREAD: Final = ("1/4", "1/2", "2/3", "2", "4", "16", "64", "256")
_BEST_SHARE: Final = Fraction(4, 5)


def _renyi(target: Target) -> tuple[Meter, ...]:
    """One alternative per order, each with its own share of delta'.

    Theorem: approximate-RDP filter at each order, and Lemma 3: their shares of delta' add up.
    Assumes: orders and shares fixed before the first step; "some order fits" without shares is not safe.
    """
    meters = []
    for order, share in sorted(target.orders or _standard_orders(target), key=lambda pair: pair[0]):
        limit = largest_rdp(float(order), _below(target.epsilon), _below(target.delta * share))
        if limit > 0.0:  # else the order is broken from the start, and would never admit anything
            meters.append(Meter(f"renyi@{float(order):g}", "renyi", _limit(limit), order=order))
    return named_apart(meters)


def _standard_orders(target: Target) -> list[tuple[Fraction, Fraction]]:
    epsilon, delta = _below(target.epsilon), _below(target.delta)
    best = Fraction(round(_best_order(epsilon, delta), 6))  # any order is valid; a short one can be read
    others = [1 + (best - 1) * Fraction(factor) for factor in _SPREAD]
    # An order that even all of delta' cannot pay for would waste its share.
    others = [Fraction(round(float(o), 6)) for o in others if largest_rdp(float(o), epsilon, delta) > 0.0]
    return [(best, _BEST_SHARE), *((order, (1 - _BEST_SHARE) / len(others)) for order in others)]


def _best_order(epsilon: float, delta: float) -> float:
    """The order at which rho*-zCDP meets the target: the root of (2a-1) rho = epsilon - log(1-1/a)."""
    rho = largest_rho(epsilon, delta)

    def below(excess: float) -> bool:
        return (1.0 + 2.0 * excess) * rho <= epsilon + math.log1p(1.0 / excess)

    return 1.0 + last_holding(below, 1e-6, 1e12, 1e-6)


def _exact(target: Target) -> tuple[Meter, ...]:
    """Whole units within the certified value-function budget.

    Theorem: the exact filter and its menu form.
    Assumes: steps of the families, or on the menu, that the budget was certified with.
    """
    budget = target.budget
    if budget is None or budget.epsilon > target.epsilon or budget.delta > target.delta:
        raise InvalidPolicy("the exact rule needs a budget certified for this target or a stricter one")
    limit = min(CEILING, budget.units)
    meter = Meter("exact", "exact", limit, unit=budget.unit, takes=budget.takes, charges=budget.charges)
    return (meter,)


_DP: Final = (PureDP, ApproxDP, ProbDP)


def _gaussian_reach(epsilon: float, delta: float) -> float:
    # The certified budgets of the exact rule are 94 to 99% of it, and are not known before a policy is compiled.
    return largest_mu(epsilon, delta) ** 2


def _zcdp_reach(epsilon: float, delta: float) -> float:
    return 2.0 * largest_rho(epsilon, delta)


RULES: Final[dict[str, Rule]] = {
    "basic": Rule(_DP, _basic, filter_time),
    "exact": Rule((*_DP, GDP, Mechanism), _exact, _gaussian_reach),
    "gdp": Rule((PureDP, GDP), _gdp, _gaussian_reach),
    "paper": Rule(_DP, _paper, filter_time),
    "renyi": Rule((*_DP, ZCDP, GDP, RDP, Mechanism), _renyi, _zcdp_reach),
    "zcdp": Rule((*_DP, ZCDP, GDP), _zcdp, _zcdp_reach),
}


def takers(guarantee: Guarantee) -> list[str]:
    """Return the names of the rules that have a theorem for the guarantee."""
    return [name for name, rule in RULES.items() if isinstance(guarantee, rule.takes)]
