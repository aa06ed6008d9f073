"""Policy: what is promised and how it is kept, every choice fixed before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from odograph.core.exact import FAMILIES
from odograph.core.guarantees import exact_of
from odograph.core.menu import MenuItem
from odograph.core.odometers import (
    Filter,
    Odometer,
    default_odometer,
    odometer_from_dict,
    odometer_to_dict,
    standard_odometer,
)
from odograph.core.rules import RULES
from odograph.core.units import Number, Numeric, read, text_of, tidy
from odograph.errors import InvalidPolicy, told

__all__ = ["Need", "Policy"]

_FORM: Final = 1
_LEAST_EPSILON: Final = Fraction(1, 10**9)
_LEAST_DELTA: Final = Fraction(1, 10**300)  # floats must hold it, and shares of it
_MOST_LEVEL: Final = 1.0 - 2.0**-53  # a delta just below 1 must not become 1
_NEIGHBOURS: Final = ("add-remove", "replace-one")


@dataclass(frozen=True, slots=True, init=False)
class Policy:
    """The promise (epsilon, delta)-DP for the whole interaction, and every choice that keeps it.

    `delta_steps` (delta'') is set aside for the steps' own deltas; the rest (delta') pays for the rule. `rule`
    is a name, or shares of delta' by name. `takes` and `menu` say what the exact rule takes; `orders` are those
    of the Rényi rule with their shares, if the standard ones (best for Gaussians) are not wanted. `odometer` is
    the one whose readings are licensed; with a `slack` (t of Theorem 6) it also reads (epsilon, delta)-DP steps.
    """

    epsilon: Number
    delta: Number
    delta_steps: Number
    rule: str | tuple[tuple[str, Number], ...]
    takes: tuple[str, ...]
    menu: tuple[MenuItem, ...]
    orders: tuple[tuple[Number, Number], ...]
    odometer: Odometer
    slack: float | None
    unit: str
    neighbours: str

    def __init__(  # noqa: PLR0913  a policy is the list of its choices
        self,
        epsilon: Numeric,
        delta: Numeric,
        *,
        delta_steps: Numeric | None = None,
        rule: str | Mapping[str, Numeric] | Sequence[tuple[str, Numeric]] = "exact",
        takes: Sequence[str] = FAMILIES,
        menu: Sequence[MenuItem] = (),
        orders: Mapping[Any, Numeric] | Sequence[tuple[Numeric, Numeric]] = (),
        odometer: Odometer | None = None,
        slack: Numeric | None = None,
        unit: str = "person",
        neighbours: str = "add-remove",
    ) -> None:
        exact_epsilon = read(epsilon, "Policy.epsilon", InvalidPolicy)
        exact_delta = read(delta, "Policy.delta", InvalidPolicy)
        shares = _shares(rule)
        basic = shares[0][0] == "basic"
        # Under basic composition alone nothing has to pay for concentration: the steps have the whole delta.
        aside = read(
            (delta if basic else 0) if delta_steps is None else delta_steps,
            "Policy.delta_steps",
            InvalidPolicy,
        )
        if not _LEAST_EPSILON <= exact_epsilon <= 1000:
            raise InvalidPolicy(f"Policy.epsilon must be from 1e-9 to 1000, and {epsilon!r} is not")
        if exact_delta >= 1:
            raise InvalidPolicy(f"Policy.delta must be below 1, and {delta!r} is not")
        _check_split(exact_delta, aside, basic=basic)
        _check_choices(takes, menu, unit, neighbours)
        if odometer is None:
            curves = _takes_curves(shares, menu, neighbours)
            odometer = _default_odometer(float(exact_epsilon), exact_delta - aside, shares, curves=curves)
        if not isinstance(odometer, Odometer):
            raise InvalidPolicy(f"odometer must be one of odograph.core.odometers, and {odometer!r} is not")
        wait = None if slack is None else float(read(slack, "Policy.slack", InvalidPolicy))
        if wait == 0.0:
            raise InvalidPolicy("Policy.slack must be above 0")
        values = {
            "epsilon": tidy(exact_epsilon),
            "delta": tidy(exact_delta),
            "delta_steps": tidy(aside),
            "rule": shares[0][0] if len(shares) == 1 else tuple((name, tidy(share)) for name, share in shares),
            "takes": tuple(sorted(set(takes))),
            "menu": tuple(menu),
            "orders": tuple((tidy(order), tidy(share)) for order, share in _orders(orders)),
            "odometer": odometer,
            "slack": wait,
            "unit": unit,
            "neighbours": neighbours,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def shares(self) -> tuple[tuple[str, Fraction], ...]:
        """The rules and their shares of delta'."""
        return _kept_shares(self.rule)

    @property
    def order_shares(self) -> list[tuple[Fraction, Fraction]]:
        """The Rényi orders and their shares of that rule's delta'; none for the standard ones."""
        return _orders(self.orders)

    @property
    def delta_rule(self) -> Fraction:
        """delta': what pays for the rules, and for the odometer's boundary."""
        return exact_of(self.delta) - exact_of(self.delta_steps)

    @property
    def target(self) -> str:
        """What is promised, in brief: (1, 1e-06)-DP."""
        return f"({float(self.epsilon):g}, {float(self.delta):g})-DP"  # a fraction has no such form in Python 3.11

    @property
    def promise(self) -> str:
        """What is promised, and to whom: (1, 1e-06)-DP for each person (add-remove)."""
        return f"{self.target} for each {self.unit} ({self.neighbours})"

    @property
    def rule_text(self) -> str:
        """The name of the rule, or the rules with their shares: exact 0.9, zcdp 0.1."""
        if isinstance(self.rule, str):
            return self.rule
        return ", ".join(f"{name} {float(share):g}" for name, share in self.rule)

    def with_first_default(self) -> Policy | None:
        """Return the policy that 0.1.0 made of the same arguments; None where the odometer is not the default one.

        The default odometer was another then, and asking for the same account again must find it.
        """
        shares, basic = self.shares, self.rule == "basic"
        curves = _takes_curves(shares, self.menu, self.neighbours)
        if self.odometer != _default_odometer(float(self.epsilon), self.delta_rule, shares, curves=curves):
            return None
        first = standard_odometer(float(self.epsilon), 1e-6 if basic else float(self.delta_rule))
        return Policy.from_dict(self.to_dict() | {"odometer": odometer_to_dict(first)})

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `Policy.from_dict` reads."""
        rule = self.rule if isinstance(self.rule, str) else [[name, text_of(share)] for name, share in self.rule]
        menu = [item.to_dict() for item in self.menu]
        numbers = {n: str(exact_of(getattr(self, n))) for n in ("epsilon", "delta", "delta_steps")}
        return {
            "form": _FORM,
            **numbers,
            "rule": rule,
            "takes": [*self.takes],
            "menu": menu,
            "orders": [[text_of(order), text_of(share)] for order, share in self.orders],
            "odometer": odometer_to_dict(self.odometer),
            "slack": self.slack,
            "unit": self.unit,
            "neighbours": self.neighbours,
        }

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Policy:
        """Read what `to_dict` wrote; anything else raises `InvalidPolicy`."""
        fields = {*cls.__match_args__, "form"}
        if not isinstance(form, Mapping) or form.get("form") != _FORM or set(form) != fields:
            raise InvalidPolicy(f"not a policy of form {_FORM} with the fields {sorted(fields)}: {form!r:.120}")
        values = {name: value for name, value in form.items() if name != "form"}
        try:
            values["menu"] = tuple(MenuItem(**item) for item in form["menu"])
            values["odometer"] = odometer_from_dict(form["odometer"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as problem:
            raise InvalidPolicy(f"not a policy: {form!r:.120} ({told(problem)})") from problem


def _takes_curves(shares: Sequence[tuple[str, Fraction]], menu: Sequence[MenuItem], neighbours: str) -> bool:
    """Say whether steps may come that have a Rényi curve and no intrinsic time."""
    return any(name == "renyi" for name, _ in shares) or (bool(menu) and neighbours == "add-remove")


def _default_odometer(
    epsilon: float, delta: Fraction, shares: Sequence[tuple[str, Fraction]], *, curves: bool
) -> Odometer:
    """Return the odometer of a policy that names none: tuned where its rules stop, before anything is compiled."""
    names = {name for name, _ in shares}
    if names <= {"basic", "paper"}:
        # The paper's filter stops where its own line meets epsilon. Under basic composition the reading is the sum of
        # the epsilons, whatever the tuning.
        return Filter(epsilon)
    reach = max(RULES[name].reach(epsilon, _as_level(delta * share)) for name, share in shares)
    return default_odometer(reach, _as_level(delta), curves=curves)


def _as_level(delta: Fraction) -> float:
    return min(float(delta), _MOST_LEVEL)


def _check_split(delta: Fraction, aside: Fraction, *, basic: bool) -> None:
    if not basic and delta == 0:
        raise InvalidPolicy("with delta = 0 only basic composition keeps the promise; pass rule='basic'")
    if basic and aside != delta:
        raise InvalidPolicy("under rule='basic' delta_steps is the whole delta; leave it out")
    if not basic and delta - aside < _LEAST_DELTA:
        raise InvalidPolicy(f"delta_steps ({float(aside)!r}) must leave some of delta ({float(delta)!r}) to the rule")


def _check_choices(takes: Sequence[str], menu: Sequence[MenuItem], unit: str, neighbours: str) -> None:
    if isinstance(takes, str) or set(takes) - set(FAMILIES):
        raise InvalidPolicy(f"takes lists families of {FAMILIES}, not {takes!r}")
    if not all(isinstance(item, MenuItem) for item in menu):
        raise InvalidPolicy(f"menu lists menu items, not {menu!r}")
    if len({item.name for item in menu}) < len(menu):
        names = sorted(item.name for item in menu)
        raise InvalidPolicy(f"menu items need a name each of their own, and they are called {', '.join(names)}")
    if not isinstance(unit, str) or not unit:
        raise InvalidPolicy(f"unit must name what is protected, such as 'person', not {unit!r}")
    if neighbours not in _NEIGHBOURS:
        raise InvalidPolicy(f"neighbours must be one of {_NEIGHBOURS}, not {neighbours!r}")
    if any(item.neighbours != neighbours for item in menu):
        raise InvalidPolicy(f"the menu's mechanisms were analysed for other neighbours than {neighbours!r}")


def _orders(orders: object) -> list[tuple[Fraction, Fraction]]:
    """Return the Rényi orders and their shares of the rule's delta', checked."""
    pairs = [
        (read(order, "Policy.orders", InvalidPolicy), read(share, f"Policy.orders[{order!r}]", InvalidPolicy))
        for order, share in _pairs("orders", orders)
    ]
    if any(order <= 1 or share == 0 for order, share in pairs) or sum(share for _, share in pairs) > 1:
        raise InvalidPolicy(f"orders must be above 1, with positive shares of at most 1 in all, not {orders!r}")
    return sorted(pairs)


def _shares(rule: object) -> list[tuple[str, Fraction]]:
    """Return the rules by name with their shares of delta', checked."""
    named = _pairs("rule", {rule: 1} if isinstance(rule, str) else rule)
    if not named:
        raise InvalidPolicy(f"rule must be a name of {sorted(RULES)}, or shares by name, not {rule!r}")
    if unknown := [name for name, _ in named if name not in RULES]:
        raise InvalidPolicy(f"there is no rule {unknown[0]!r}; there are {', '.join(sorted(RULES))}")
    shares = [(str(name), read(share, f"Policy.rule[{name!r}]", InvalidPolicy)) for name, share in named]
    if any(share == 0 for _, share in shares) or sum(share for _, share in shares) != 1:
        raise InvalidPolicy(f"the shares of delta' must be positive and sum to 1, and {rule!r} do not")
    if len(shares) > 1 and any(name == "basic" for name, _ in shares):
        raise InvalidPolicy("basic composition is an alternative of every policy already; leave it out")
    return sorted(shares)


@lru_cache(maxsize=256)
def _kept_shares(rule: str | tuple[tuple[str, Number], ...]) -> tuple[tuple[str, Fraction], ...]:
    """Return the shares of a rule that was checked before: every price asks for them."""
    return tuple(_shares(rule))


def _pairs(field: str, value: object) -> list[tuple[Any, Any]]:
    """Return a mapping, or a sequence of pairs, as pairs with different firsts."""
    items = [*value.items()] if isinstance(value, Mapping) else value
    if isinstance(items, str) or not isinstance(items, Sequence) or not all(_is_pair(item) for item in items):
        raise InvalidPolicy(f"{field} must be a name or shares, such as {{'exact': 0.9, 'zcdp': 0.1}}, not {value!r}")
    if len({str(first) for first, _ in items}) < len(items):
        raise InvalidPolicy(f"{field} names something twice: {value!r}")
    return [(first, second) for first, second in items]


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2


@dataclass(frozen=True, slots=True)
class Need:
    """The budget that a policy's exact rule needs: a target, and what the rule is to take."""

    epsilon: Fraction
    delta: Fraction
    takes: tuple[str, ...]
    menu: tuple[MenuItem, ...]

    @classmethod
    def of(cls, policy: Policy) -> Need | None:
        """Return what the policy needs, or None if it has no exact rule."""
        share = dict(policy.shares).get("exact")
        if share is None:
            return None
        return cls(exact_of(policy.epsilon), policy.delta_rule * share, policy.takes, policy.menu)
