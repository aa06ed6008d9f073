"""Policy: the promise of an account and every choice that keeps it, fixed before the first step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import EllipsisType
from typing import Any, Final, Never, TypeAlias, TypeVar

from odograph.core.conversions import zcdp_to_dp_epsilon
from odograph.core.filters import (
    FILTERS,
    TOTALS,
    Basic,
    Exact,
    Filter,
    GdpTotal,
    Paper,
    Renyi,
    Smooth,
    Target,
    Total,
    Unlimited,
    UnlimitedMeter,
    ZcdpTotal,
    filter_from_dict,
    meter_from_dict,
    takers,
)
from odograph.core.filters.exact import Need
from odograph.core.filters.renyi import best_order
from odograph.core.filters.smooth import RESERVES
from odograph.core.fixed_point import (
    CEILING,
    DELTA_SCALE,
    MOST_PRICED,
    SCALE,
    Number,
    Numeric,
    brief_above,
    brief_below,
    decimal_above,
    exact_of,
    exactly,
    float_above,
    float_below,
    floor_units,
    level,
    read,
    text_of,
    tidy,
    up,
)
from odograph.core.gate import Price, Totals
from odograph.core.guarantees import (
    GDP,
    RDP,
    REGISTRY,
    SIZED,
    ZCDP,
    ApproxDP,
    DiscreteGaussian,
    Guarantee,
    Interactive,
    Mechanism,
    Parallel,
    PureDP,
    delta_of,
    number_of,
    one_shot,
)
from odograph.core.mechanisms import MenuItem
from odograph.core.meters import DeltaMeter, DriftMeter, EpsilonMeter, IntrinsicMeter, Meter, MomentMeter, PureStep
from odograph.core.odometers import (
    BestOf,
    FilterOdometer,
    Odometer,
    Reading,
    RenyiOdometer,
    Spent,
    default_odometer,
    general_odometer,
    odometer_by_name,
    odometer_from_dict,
    odometer_to_dict,
    standard_odometer,
    standard_odometers,
)
from odograph.core.value_iteration import Budget
from odograph.display import Html, card, facts, one_line, table
from odograph.errors import InvalidGuarantee, InvalidPolicy, UnprovenComposition, did_you_mean, explain, with_usage

__all__ = [
    "Compiled",
    "Need",
    "Policy",
    "Shares",
    "check_compiled",
    "compile_meters",
    "other_odometers",
    "refuse_old_words",
    "too_low",
]

# What `filter=` takes: a name, a filter with its options, or several of these with their shares of delta'.
Shares: TypeAlias = (
    str | Filter | Mapping[str, Numeric] | Mapping[Filter, Numeric] | Sequence[tuple[str | Filter, Numeric]]
)

_FORM: Final = 2  # of a policy, and of a compiled one
_FORMS: Final = (1, _FORM)  # 1: of 0.1.0
_M = TypeVar("_M", bound=Meter)
_LEAST_EPSILON: Final = Fraction(1, 10**9)
_LEAST_DELTA: Final = Fraction(1, 10**300)  # floats must hold it, and shares of it
_OFFER_DIGITS: Final = 6  # significant digits of an epsilon in advice
_NEIGHBORS: Final = ("add-remove", "replace-one")
_TOLERANCE: Final = Fraction(1, 10**12)  # at most: enough for a thousand parts

# Of the default policy: what of delta is for the steps' own deltas, and what of the rest for steps that are too large
# for the reserve.
_STEPS_SHARE: Final = Fraction(1, 100)
_LARGE_SHARE: Final = Fraction(1, 100)

_REMEMBERED: Final = 4096  # prices of pure steps that a compiled policy keeps

# The present names of the arguments of 0.1.0.
_NEW_WORDS: Final = {
    "rule": "filter=",
    "unit": "privacy_unit=",
    "neighbours": "neighbors=",
    "takes": "filter=filters.Exact(takes=...)",
    "menu": "filter=filters.Exact(menu=...)",
    "orders": "filter=filters.Renyi(orders=...)",
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Policy:
    """The promise (epsilon, delta)-DP for the whole interaction, and every choice that keeps it.

    Another promise takes the place of epsilon. `Policy(rho=0.5)` promises 0.5-zCDP, and `Policy(mu=1)` 1-GDP; with a
    `delta`, delta-approximate zCDP or GDP, all of it for the steps' own deltas. `Policy(None, 1e-6)` promises nothing
    but readings: every step is admitted that its odometer reads, and with probability at least 1 - delta the loss is
    at most the reading at all times.

    By default every kind of guarantee is taken, in any mix: by the smooth filter with the `reserve` named "mixed"
    ("pure" leaves more to pure and Gaussian steps, "training" to subsampled Gaussians with little noise), and beside
    it, for steps that are large, by a Rényi filter with a hundredth of delta'. `filter` chooses others: a name
    ("zcdp"), a filter with options (`filters.Smooth(menu=items)`, `filters.Renyi(orders=...)`), or shares of delta'
    ({"smooth": 0.9, "zcdp": 0.1}). `delta_steps` (delta'') is set aside for the steps' own deltas, by default a
    hundredth of delta, or nothing if `filter` was chosen; the rest (delta') pays for the filters.

    `odometer` is the one whose readings the guarantee covers: one of `odograph.odometers`, or the name of one that is
    tuned to the target ("filter", "mixture", "stitched", "lines"). With a `slack`, which readings add,
    it also reads (epsilon, delta)-DP steps. `privacy_unit` names whom the promise protects, and `neighbors` what
    differs between two neighboring datasets: "add-remove" or "replace-one".
    """

    epsilon: Number | None  # None under another promise
    delta: Number
    delta_steps: Number
    filters: tuple[tuple[Filter, Fraction], ...]  # with their shares of delta', in the order of their names
    odometer: Odometer
    slack: float | None
    privacy_unit: str
    neighbors: str

    @with_usage("a policy is made like Policy(epsilon=1, delta=1e-6) or Policy(1, 1e-6, filter='zcdp')")
    def __init__(  # noqa: PLR0913  a policy is the list of its choices
        self,
        epsilon: Numeric | EllipsisType | None = ...,  # None is a choice: no limit
        delta: Numeric | None = None,
        *,
        rho: Numeric | None = None,
        mu: Numeric | None = None,
        delta_steps: Numeric | None = None,
        filter: Shares | None = None,  # noqa: A002  the word of the field
        reserve: str | None = None,
        odometer: Odometer | str | None = None,
        slack: Numeric | None = None,
        privacy_unit: str = "person",
        neighbors: str = "add-remove",
        **old: Never,
    ) -> None:
        refuse_old_words("Policy", old)
        promise = _promise_of(epsilon, rho, mu)
        exact_epsilon = promise if isinstance(promise, Fraction) else None
        if delta is None and not isinstance(promise, Total):
            raise InvalidPolicy("Policy.delta must be given, such as 1e-6 in Policy(1, 1e-6) (got None)")
        exact_delta = read(0 if delta is None else delta, "Policy.delta", InvalidPolicy)
        _check_arguments(exact_epsilon, exact_delta, filter, reserve)
        chosen = _chosen_filters(promise, filter)
        aside = (
            _default_delta_steps(exact_delta, chosen)
            if delta_steps is None
            else read(delta_steps, "Policy.delta_steps", InvalidPolicy)
        )
        _check_split(exact_delta, aside, chosen)
        filters = chosen or _default_filters(exact_epsilon or Fraction(0), exact_delta - aside, reserve or "mixed")
        if not isinstance(privacy_unit, str) or not privacy_unit:
            raise InvalidPolicy(f"privacy_unit must name what is protected, such as 'person' (got {privacy_unit!r})")
        if neighbors not in _NEIGHBORS:
            raise InvalidPolicy(f"neighbors must be one of {_NEIGHBORS} (got {neighbors!r})")
        for one, _ in filters:
            one.check_neighbors(neighbors)
        tuned_to = _odometer_target(exact_epsilon, exact_delta, aside, filters)
        if odometer is None:
            odometer = _default_odometer(tuned_to, filters, neighbors)
        elif isinstance(odometer, str):
            odometer = odometer_by_name(odometer, tuned_to[0], level(tuned_to[1]))
        if not isinstance(odometer, Odometer):
            raise InvalidPolicy(f"odometer must be one of odograph.odometers, or a name (got {odometer!r})")
        exact_slack = None if slack is None else float(read(slack, "Policy.slack", InvalidPolicy))
        if exact_slack == 0.0:
            raise InvalidPolicy(f"Policy.slack must be above 0 (got {slack!r})")
        values = {
            "epsilon": None if exact_epsilon is None else tidy(exact_epsilon),
            "delta": tidy(exact_delta),
            "delta_steps": tidy(aside),
            "filters": filters,
            "odometer": odometer,
            "slack": exact_slack,
            "privacy_unit": privacy_unit,
            "neighbors": neighbors,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def delta_filter(self) -> Fraction:
        """delta': what pays for the filters, and for the odometer's boundary."""
        return exact_of(self.delta) - exact_of(self.delta_steps)

    @property
    def delta_odometer(self) -> Fraction:
        """The level of the odometer's boundary: delta'.

        A promise of rho or mu leaves no delta', so there it is delta once more: a reading is no part of the promise,
        and fails with at most twice its delta. Where it is 0 the reading is the sum of the epsilons.
        """
        return self.delta_filter if self.total is None else exact_of(self.delta)

    @property
    def delta_reading(self) -> float:
        """The probability with which the reading ever fails.

        Theorem: readings with a slack: the level of the boundary and the steps' deltas, over 1 - e^-t for a slack t.
        Assumes: as the odometer.
        """
        delta = float(self.delta_odometer + exact_of(self.delta_steps))
        return delta if self.slack is None else up(delta / -math.expm1(-self.slack))

    @property
    def total(self) -> Total | None:
        """The filter of a promise of rho or mu; None under another promise."""
        one = self.filters[0][0]
        return one if isinstance(one, Total) else None

    @property
    def rho(self) -> Number | None:
        """The promised rho; None under another promise."""
        one = self.filters[0][0]
        return tidy(exact_of(one.rho)) if isinstance(one, ZcdpTotal) else None

    @property
    def mu(self) -> Number | None:
        """The promised mu; None under another promise."""
        one = self.filters[0][0]
        return tidy(exact_of(one.mu)) if isinstance(one, GdpTotal) else None

    @property
    def is_unlimited(self) -> bool:
        """Whether no budget is fixed, and the loss is only read."""
        return not self.filters[0][0].has_limit

    @property
    def is_basic(self) -> bool:
        """Whether basic composition alone keeps the promise."""
        return isinstance(self.filters[0][0], Basic)

    @property
    def guarantee(self) -> Guarantee | None:
        """What the whole run is promised to be; None without a limit, and for a mu that holds but for a delta."""
        total = self.total
        if isinstance(total, ZcdpTotal):
            return ZCDP(total.rho, self.delta)
        if isinstance(total, GdpTotal):
            return None if self.delta else GDP(total.mu)
        if self.epsilon is None:
            return None
        return ApproxDP(self.epsilon, self.delta) if self.delta else PureDP(self.epsilon)

    @property
    def menu(self) -> tuple[MenuItem, ...]:
        """The menu of the exact filter; empty without one."""
        return next((one.menu for one, _ in self.filters if isinstance(one, Exact)), ())

    @property
    def target(self) -> str:
        """What is promised, in brief: (1, 1e-06)-DP, 0.5-zCDP, 1e-06-approximate 1-GDP, no limit."""
        delta = brief_above(self.delta)
        if self.epsilon is not None:
            return f"({brief_above(self.epsilon)}, {delta})-DP"
        if self.total is not None:
            return f"{delta}-approximate {self.total.promised}" if self.delta else self.total.promised
        return "no limit"

    @property
    def promise(self) -> str:
        """What is promised, and to whom: (1, 1e-06)-DP for each person (add-remove)."""
        whom = f"for each {self.privacy_unit} ({self.neighbors})"
        if self.is_unlimited:
            level = brief_above(exact_of(self.delta_reading))
            return f"{self.target}; readings hold with probability at least 1 - {level} {whom}"
        return f"{self.target} {whom}"

    def promise_to_dict(self) -> dict[str, Any]:
        """Return the promise in plain types: epsilon (None under another promise), delta and text; rho or mu."""
        epsilon = None if self.epsilon is None else float(self.epsilon)
        other = {"rho": self.rho, "mu": self.mu}
        named = {name: float(value) for name, value in other.items() if value is not None}
        return {"epsilon": epsilon, "delta": float(self.delta), "text": self.promise, **named}

    @property
    def filter_text(self) -> str:
        """The name of the filter, or the filters with their shares: exact 0.9, zcdp 0.1."""
        if len(self.filters) == 1:
            return self.filters[0][0].kind
        return ", ".join(f"{one.kind} {float(share):g}" for one, share in self.filters)

    def __repr__(self) -> str:
        chosen = [one.reserve for one, _ in self.filters if isinstance(one, Smooth)]
        reserve = "".join(f", reserve {name!r}: {RESERVES[name].gives}" for name in chosen)
        return f"<Policy {self.promise}, filter {self.filter_text}{reserve}>"

    def _repr_html_(self) -> str:
        return card("Policy", *self.html_parts())

    def html_parts(self) -> tuple[Html, ...]:
        """Return what a notebook shows of it: the promise, what it takes, and what each reserve would give."""
        taken, refused = self._kinds()
        odometer = self.odometer
        parts = [part for _, part in odometer.parts] if isinstance(odometer, BestOf) else [odometer]
        named = {
            "promise": self.promise,
            "filter": self.filter_text,
            "takes": ", ".join(taken),
            "has no theorem for": ", ".join(refused),
            "for the steps' deltas": brief_below(self.delta_steps) if self.delta else "",
            "odometer": " and ".join(type(part).__name__ for part in parts),
            "slack": "" if self.slack is None else brief_above(self.slack),
            "menu": ", ".join(item.name for item in self.menu),
        }
        smooth = next((one for one, _ in self.filters if isinstance(one, Smooth)), None)
        if smooth is None:
            return (facts(named),)
        rows = [(f"{name} (chosen)" if name == smooth.reserve else name, one.gives) for name, one in RESERVES.items()]
        return facts(named), table(("reserve", "gives"), rows)

    def _kinds(self) -> tuple[list[str], list[str]]:
        """Return the names of the kinds of guarantee that a filter has a theorem for, and of those that none has."""
        curve = RDP((2,), (1,))
        samples = [kind.with_size(1) for kind in SIZED.values()] + [curve, Mechanism("any", 1, curve)]
        found: tuple[list[str], list[str]] = [], []
        for sample in samples:
            is_taken = any(
                one.accepts(guarantee, self.neighbors)
                for one, _ in self.filters
                for guarantee in (sample, *sample.implies())
            )
            name = type(sample).__name__
            found[not is_taken].append(f"{name} with its curve" if isinstance(sample, Mechanism) else name)
        return found

    @property
    def tolerance(self) -> Fraction:
        """What the plain sum of the epsilons may exceed epsilon by, so that k equal parts of epsilon fit.

        A price is rounded up to units, so that three thirds would exceed the whole by two of them.

        Theorem: a loss of at most epsilon + t is (epsilon, 1 - e^-t)-DP, and 1 - e^-t <= t: so basic composition up
            to epsilon + t is an alternative with a share t of delta' (combining filters), and the others the rest.
        Assumes: as basic composition. Alone it has no delta' to pay with, and no tolerance.
        """
        if self.is_basic or self.epsilon is None:
            return Fraction(0)
        # In units, because the limit of the sum is: what an account is certified for follows from its meters.
        return Fraction(floor_units(min(_TOLERANCE, self.delta_filter / 10**4), SCALE), SCALE)

    def targets(
        self, budget: Budget | None = None, tolerance: Fraction | None = None
    ) -> Iterator[tuple[Filter, Target]]:
        """Yield the filters, each with the target that it has to keep; `budget` is that of the exact filter.

        `tolerance` is that of an account, if it has another one: in 0.1.0 there was none.
        """
        delta = self.delta_filter - (self.tolerance if tolerance is None else tolerance)
        readers = self.odometer.meters(latent=self.slack is not None) if self.is_unlimited else ()
        for one, share in self.filters:
            yield one, Target(exact_of(self.epsilon or 0), delta * share, budget, readers)

    @property
    def need(self) -> Need | None:
        """The budget that has to be certified before the policy can be compiled; None without an exact filter."""
        return _need(self.targets())

    def with_first_default(self) -> Policy | None:
        """Return the policy that 0.1.0 made of the same arguments; None where it cannot have been left to default.

        The default filter and odometer were different then, and a repeated request to open the account must still
        match.
        """
        if self.epsilon is None:
            return None
        default = _default_odometer((float(self.epsilon), self.delta_filter), self.filters, self.neighbors)
        if self.odometer != default:
            return None
        form = self.to_dict()
        delta = self.delta_filter
        if self.filters == _default_filters(exact_of(self.epsilon), delta, "mixed"):
            form |= {"filter": [Exact().to_dict() | {"share": "1"}]}
            if exact_of(self.delta_steps) == _default_delta_steps(exact_of(self.delta), None):
                delta = exact_of(self.delta)
                form |= {"delta_steps": "0"}
        first = standard_odometer(float(self.epsilon), 1e-6 if self.is_basic else float(delta))
        return Policy.from_dict(form | {"odometer": odometer_to_dict(first)})

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `Policy.from_dict` reads."""
        return {
            "form": _FORM,
            **self._numbers(),
            "filter": [one.to_dict() | {"share": text_of(tidy(share))} for one, share in self.filters],
            "odometer": odometer_to_dict(self.odometer),
            "slack": self.slack,
            "privacy_unit": self.privacy_unit,
            "neighbors": self.neighbors,
        }

    def to_form_1(self) -> dict[str, Any]:
        """Return the form that 0.1.0 wrote, to compare with requests that it recorded under idempotency keys."""
        single = len(self.filters) == 1
        exact = next((one for one, _ in self.filters if isinstance(one, Exact)), Exact())
        renyi = next((one for one, _ in self.filters if isinstance(one, Renyi)), Renyi())
        menu = [item.to_dict() for item in exact.menu]
        known = not isinstance(exact, Smooth) and self.epsilon is not None
        unknown = {} if known else {"filter": self.to_dict()["filter"]}
        return unknown | {
            "form": 1,
            **self._numbers(),
            "rule": self.filter_text if single else [[one.kind, text_of(tidy(share))] for one, share in self.filters],
            "takes": [*exact.takes],
            "menu": [_rename_keys(item, {"neighbors": "neighbours"}) for item in menu],
            "orders": renyi.to_dict()["orders"],
            "odometer": odometer_to_dict(self.odometer),
            "slack": self.slack,
            "unit": self.privacy_unit,
            "neighbours": self.neighbors,
        }

    def _numbers(self) -> dict[str, str | None]:
        values = {"epsilon": self.epsilon, "delta": self.delta, "delta_steps": self.delta_steps}
        return {name: None if value is None else str(exact_of(value)) for name, value in values.items()}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Policy:
        """Read what `to_dict` wrote, now or in 0.1.0; anything else raises `InvalidPolicy`."""
        try:
            return cls(**_arguments(form))
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise InvalidPolicy(f"a policy could not be read from {form!r:.120}: {explain(problem)}") from problem


def _arguments(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a stored policy; raise if it is not one."""
    values = {**(_from_form_1(form) if form["form"] == 1 else form)}
    if values.pop("form") != _FORM or set(values) != _FIELDS:
        raise ValueError(f"a policy of form {_FORM} must have the fields {sorted(_FIELDS)} (got {sorted(values)})")
    values["filter"] = [
        (filter_from_dict({name: value for name, value in one.items() if name != "share"}), one["share"])
        for one in values["filter"]
    ]
    values["odometer"] = odometer_from_dict(values["odometer"])
    return values


_FIELDS: Final = {
    "epsilon",
    "delta",
    "delta_steps",
    "filter",
    "odometer",
    "slack",
    "privacy_unit",
    "neighbors",
}
_FIELDS_1: Final = {*_FIELDS, "form", "rule", "takes", "menu", "orders", "unit", "neighbours"} - {
    "filter",
    "privacy_unit",
    "neighbors",
}


_ARGUMENTS: Final = ("epsilon", "delta", "rho", "mu", "filter", "reserve", "odometer", "privacy_unit", "neighbors")


def refuse_old_words(caller: str, given: Mapping[str, object]) -> None:
    """Raise `InvalidPolicy` for arguments that 0.1.0 had and that are called otherwise now."""
    for name in given:
        if name in _NEW_WORDS:
            raise InvalidPolicy(f"{caller} has no argument {name!r} anymore: pass {_NEW_WORDS[name]} instead")
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{did_you_mean(name, _ARGUMENTS)}")


def _rename_keys(form: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    return {words.get(name, name): value for name, value in form.items()}


def _from_form_1(form: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy of 0.1.0 in the present form: the options of filters were beside the rule."""
    if set(form) != _FIELDS_1:
        raise ValueError(f"a policy of form 1 must have the fields {sorted(_FIELDS_1)} (got {sorted(form)})")
    rule, takes, orders = form["rule"], form["takes"], form["orders"]
    menu = [_rename_keys(item, {"neighbours": "neighbors"}) for item in form["menu"]]
    Exact(takes=takes, menu=[MenuItem(**item) for item in menu])  # checked, also where no filter uses them
    Renyi(orders)
    options = {"exact": {"takes": takes, "menu": menu}, "renyi": {"orders": orders}}
    pairs = [(rule, "1")] if isinstance(rule, str) else rule
    if not isinstance(pairs, list):
        raise TypeError(f"rule must be a name or a list of names and shares (got {pairs!r:.80})")
    values = {name: form[name] for name in form if name not in {"rule", "takes", "menu", "orders"}}
    return _rename_keys(values, {"unit": "privacy_unit", "neighbours": "neighbors"}) | {
        "form": _FORM,
        "filter": [{"kind": kind, "share": share, **options.get(kind, {})} for kind, share in pairs],
    }


def _odometer_target(
    epsilon: Fraction | None, delta: Fraction, aside: Fraction, filters: Sequence[tuple[Filter, Fraction]]
) -> tuple[float, Fraction]:
    """Return the target that odometers are tuned to: that of the policy, or what is read where its filter stops.

    Theorem: none is needed for the tuning, any is valid.
    Assumes: it follows from the policy's arguments alone.
    """
    if epsilon is not None:
        return float(epsilon), delta - aside
    one = filters[0][0]
    # Without a delta the reading is the sum of the epsilons, whatever the tuning.
    own = (delta if isinstance(one, Total) else delta - aside) or Fraction(1, 10**6)
    time = one.reach(0.0, level(own))
    return math.sqrt(2.0 * -math.log(level(own)) * time) + time / 2.0, own


def _default_odometer(
    target: tuple[float, Fraction], filters: Sequence[tuple[Filter, Fraction]], neighbors: str
) -> Odometer:
    """Return the odometer of a policy that names none, tuned to where its filters stop; nothing is compiled."""
    epsilon, delta = target
    if isinstance(filters[0][0], Unlimited):
        return general_odometer()
    if all(isinstance(one, Basic | Paper) for one, _ in filters):
        # The paper's filter stops where its own line meets epsilon. Under basic composition the reading is the sum of
        # the epsilons, whatever the tuning.
        return FilterOdometer(epsilon)
    reach = max(one.reach(epsilon, level(delta * share)) for one, share in filters)
    return default_odometer(reach, level(delta), curves=any(one.takes_curves(neighbors) for one, _ in filters))


def _promise_of(epsilon: object, rho: Numeric | None, mu: Numeric | None) -> Fraction | Filter:
    """Return the epsilon of a policy's promise, or the filter of another promise."""
    given = {"epsilon": epsilon is not ..., "rho": rho is not None, "mu": mu is not None}
    if sum(given.values()) != 1:
        named = " and ".join(name for name, is_given in given.items() if is_given) or "none of them"
        raise InvalidPolicy(
            "Policy must have one promise: epsilon and delta as in Policy(1, 1e-6), rho=, mu=, or None for no limit,"
            f" as in Policy(None, 1e-6) (got {named})"
        )
    if rho is not None:
        return ZcdpTotal(rho)
    if mu is not None:
        return GdpTotal(mu)
    return Unlimited() if epsilon is None else read(epsilon, "Policy.epsilon", InvalidPolicy)


def _chosen_filters(promise: Fraction | Filter, given: object) -> tuple[tuple[Filter, Fraction], ...] | None:
    """Return the filters that a promise fixes, or that were chosen to keep an epsilon; None for the default ones."""
    chosen = None if given is None else _shares_of(given)
    fixed = chosen is not None and any(type(one) in TOTALS.values() for one, _ in chosen)
    if isinstance(promise, Fraction):
        if fixed:
            raise InvalidPolicy(f"filter must be one of {', '.join(FILTERS)} to keep an epsilon (got {given!r})")
        return chosen
    # A stored policy has its total in the filter, and epsilon None.
    if chosen is None or (fixed and isinstance(promise, Unlimited)):
        return chosen or ((promise, Fraction(1)),)
    raise InvalidPolicy(f"filter must be left out where no epsilon is promised (got {given!r}); or pass epsilon")


def _check_arguments(epsilon: Fraction | None, delta: Fraction, filters: object, reserve: object) -> None:
    if epsilon is None and reserve is not None:
        raise InvalidPolicy(f"reserve must be left out where no epsilon is promised (got {reserve!r})")
    if epsilon is not None and not _LEAST_EPSILON <= epsilon <= 1000:
        raise InvalidPolicy(f"Policy.epsilon must be from 1e-9 to 1000 (got {tidy(epsilon)!r})")
    if delta >= 1:
        raise InvalidPolicy(
            f"Policy.delta must be below 1 (got {tidy(delta)!r}): the order is Policy(epsilon, delta)"
        )
    if filters is not None and reserve is not None:
        raise InvalidPolicy(
            f"reserve must be left out where filter is given (got {reserve!r}): pass"
            f" filter=filters.Smooth(reserve={reserve!r})"
        )


def _default_delta_steps(delta: Fraction, filters: Sequence[tuple[Filter, Fraction]] | None) -> Fraction:
    """Return what is set aside for the steps' own deltas where a policy does not say."""
    if filters is None or isinstance(filters[0][0], Unlimited):
        return delta * _STEPS_SHARE
    # Where a sum is promised as it is, nothing has to pay for concentration: the steps have the whole delta.
    return delta if isinstance(filters[0][0], Basic | Total) else Fraction(0)


def _default_filters(epsilon: Fraction, delta: Fraction, reserve: str) -> tuple[tuple[Filter, Fraction], ...]:
    """Return the filters of a policy that names none: smooth, and one Rényi order for what has no price there."""
    best = best_order(float_below(epsilon), float_below(delta * _LARGE_SHARE))
    order = f"{best:.6g}"  # any order is valid, and a short one can be read
    return (Renyi({order: 1}), _LARGE_SHARE), (Smooth(reserve=reserve), 1 - _LARGE_SHARE)


def _need(targets: Iterable[tuple[Filter, Target]]) -> Need | None:
    return next((one.need(target) for one, target in targets if isinstance(one, Exact)), None)


def _check_split(delta: Fraction, aside: Fraction, filters: Sequence[tuple[Filter, Fraction]] | None) -> None:
    one = None if filters is None else filters[0][0]
    if isinstance(one, Total) and aside != delta:
        raise InvalidPolicy(
            f"delta_steps must be the whole delta where rho or mu is promised (got {float(aside)!r} of"
            f" {float(delta)!r})"
        )
    if isinstance(one, Total):
        return
    if isinstance(one, Unlimited) and delta == 0:
        raise InvalidPolicy("Policy.delta must be positive without a limit (got 0): readings need it, such as 1e-6")
    basic = isinstance(one, Basic)
    if not basic and delta == 0:
        raise InvalidPolicy("delta must be positive, except under basic composition (got 0); pass filter='basic'")
    if basic and aside != delta:
        raise InvalidPolicy(
            f"delta_steps must be the whole delta under filter='basic' (got {float(aside)!r} of {float(delta)!r})"
        )
    if not basic and delta - aside < _LEAST_DELTA:
        raise InvalidPolicy(
            f"delta_steps must leave some of delta, {float(delta)!r}, to the filter (got {float(aside)!r})"
        )


def _shares_of(given: object) -> tuple[tuple[Filter, Fraction], ...]:
    """Return the filters with their shares of delta', checked, in the order of their names."""
    pairs = _pairs([(given, 1)] if isinstance(given, str | Filter) else given)
    filters = [(_filter_of(one), share) for one, share in pairs]
    kinds = [one.kind for one, _ in filters]
    if len(set(kinds)) < len(kinds):
        raise InvalidPolicy(f"filter must have at most one filter of each kind (got {given!r})")
    shares = [(one, read(share, f"Policy.filter[{one.kind!r}]", InvalidPolicy)) for one, share in filters]
    if any(share == 0 for _, share in shares) or sum(share for _, share in shares) != 1:
        raise InvalidPolicy(f"the shares of delta' in filter must be positive and sum to 1 (got {given!r})")
    if len(shares) > 1 and any(type(one) in TOTALS.values() for one, _ in shares):
        raise InvalidPolicy(f"filter must not combine {' or '.join(TOTALS)} with others (got {given!r})")
    if len(shares) > 1 and any(isinstance(one, Basic) for one, _ in shares):
        raise InvalidPolicy(
            "filter must not combine basic with others: every policy has it as an alternative; leave it out"
        )
    return tuple(sorted(shares, key=lambda pair: pair[0].kind))


def _filter_of(given: object) -> Filter:
    if isinstance(given, Filter):
        return given
    if given not in FILTERS:
        raise InvalidPolicy(f"filter must be one of {', '.join(FILTERS)} (got {given!r})")
    return FILTERS[str(given)]()


def _pairs(given: object) -> list[tuple[Any, Any]]:
    """Return a mapping, or a sequence of pairs, as pairs."""
    items = [*given.items()] if isinstance(given, Mapping) else given
    if not isinstance(items, list | tuple) or not items or not all(_is_pair(item) for item in items):
        raise InvalidPolicy(
            f"filter must be a name of {sorted(FILTERS)}, a filter, or shares such as"
            f" {{'exact': 0.9, 'zcdp': 0.1}} (got {given!r})"
        )
    return [(first, second) for first, second in items]


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2


@dataclass(frozen=True, slots=True, repr=False)
class Compiled:
    """A policy and its meters. Made once per account, never recompiled; prices and limits are integers."""

    policy: Policy
    meters: tuple[Meter, ...]
    note: str = ""
    known: dict[float, Price] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Of each meter: to look the methods up at each price takes a twentieth of its time.
    pure_prices: tuple[Callable[[PureStep], int | None], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pure_prices", tuple([meter.price_pure for meter in self.meters]))

    def __reduce__(self) -> tuple[type[Compiled], tuple[Policy, tuple[Meter, ...], str]]:
        return Compiled, (self.policy, self.meters, self.note)  # without the prices: charges are sent with it

    def __repr__(self) -> str:
        return one_line("Compiled", f"{self.policy.promise}, filter {self.policy.filter_text}")

    def _repr_html_(self) -> str:
        limits = [(meter.name, brief_below(meter.left(0))) for meter in self.meters if meter.limit and meter.counted]
        table_of_limits = table(("meter", "limit"), limits, numbers=("limit",))
        return card("Compiled policy", *self.policy.html_parts(), table_of_limits)

    @property
    def tolerance(self) -> Fraction:
        """What the plain sum of the epsilons may exceed epsilon by: that of the policy, or none, as in 0.1.0."""
        common = _common_meters(self.policy, Fraction(0))
        return Fraction(0) if self.meters[: len(common)] == common else self.policy.tolerance

    @property
    def need(self) -> Need | None:
        """The budget that its limit has to be certified for; None without an exact filter."""
        return _need(self.policy.targets(tolerance=self.tolerance))

    @property
    def start(self) -> Totals:
        """The totals of an account that has spent nothing."""
        return Totals.zero(self.meters)

    def index(self, kind: type[Meter]) -> int:
        """Return the index of the meter of a class; prices and totals have the same order."""
        return next(i for i, meter in enumerate(self.meters) if isinstance(meter, kind))

    def meter(self, kind: type[_M]) -> _M:
        """Return the meter of a class, or raise `LookupError`."""
        found = next((meter for meter in self.meters if isinstance(meter, kind)), None)
        if found is None:
            raise LookupError(f"this policy has no {kind.__name__}")
        return found

    def price(self, guarantee: Guarantee) -> Price:
        """Price a guarantee on every meter, or raise `UnprovenComposition` and name a filter that would take it."""
        # Pure steps are the most common, and of few sizes, so their prices are kept. Only those of floats: a
        # dictionary takes Fraction(0.1), a binary number, for 0.1, which is one tenth.
        epsilon = guarantee.epsilon if type(guarantee) is PureDP else None
        if type(epsilon) is not float:
            return self._price(guarantee)
        price = self.known.get(epsilon)
        if price is None:
            if len(self.known) >= _REMEMBERED:
                self.known.clear()
            price = self.known[epsilon] = self._price_itself(guarantee)
        return price

    def _price(self, guarantee: Guarantee, *, interactive: bool = False) -> Price:
        """Price a guarantee; with `interactive` as `Interactive(guarantee)`: against every strategy of asking."""
        if isinstance(guarantee, Interactive):
            return self._price(guarantee.cost, interactive=True)
        if isinstance(guarantee, Parallel):
            return self._price_parallel(guarantee, interactive=interactive)
        if not isinstance(guarantee, Guarantee):
            raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got {guarantee!r})")
        if interactive:
            _refuse_approximate_moments(guarantee)  # also of a registered subclass, whatever it implies
        if implied := guarantee.implies():
            return self._price_implied(guarantee, implied, interactive=interactive)
        return self._price_itself(guarantee, interactive=interactive)

    def _price_itself(self, guarantee: Guarantee, *, interactive: bool = False) -> Price:
        """Price a guarantee that has no parts and implies no others, if a filter has a theorem for it."""
        policy = self.policy
        if not self._accepts(guarantee, interactive=interactive):
            raise UnprovenComposition(_advice(policy, Interactive(guarantee) if interactive else guarantee))
        if isinstance(guarantee, Mechanism) and policy.neighbors != "add-remove":
            guarantee = replace(guarantee, curve=None)  # the menu's item is for these neighbors, the curve is not
        price = self._price_directly(guarantee, interactive=interactive)
        if policy.is_unlimited and not self._is_read(price):
            raise UnprovenComposition(_unread(policy, guarantee))
        return price

    def _accepts(self, guarantee: Guarantee, *, interactive: bool) -> bool:
        """Return whether a filter of the policy has a theorem for the guarantee."""
        neighbors = self.policy.neighbors
        for one, _ in self.policy.filters:
            if one.accepts_interactive(guarantee, neighbors) if interactive else one.accepts(guarantee, neighbors):
                return True
        return False

    def _price_directly(self, guarantee: Guarantee, *, interactive: bool) -> Price:
        if interactive:
            return Price(tuple([meter.price_interactive(guarantee) for meter in self.meters]))
        if type(guarantee) is PureDP and number_of(guarantee.epsilon) <= MOST_PRICED:
            step = PureStep(guarantee)
            return Price(tuple([price(step) for price in self.pure_prices]))
        return Price(tuple([meter.price(guarantee) for meter in self.meters]))

    def _is_read(self, price: Price) -> bool:
        """Return whether some part of the odometer reads a step of this price, of a policy without a limit."""
        return any(
            amount is not None
            for meter, amount in zip(self.meters, price.amounts, strict=True)
            if isinstance(meter, UnlimitedMeter)
        )

    def _price_implied(self, guarantee: Guarantee, implied: Sequence[Guarantee], *, interactive: bool) -> Price:
        """Price a guarantee by what follows from it, and by itself if a filter takes it: on each meter the cheapest.

        Theorem: by calculation: the guarantee itself and every implied one bound the step, so each meter may charge
            by any of them.
        Assumes: a single one is charged by, or all are without delta: else one meter could charge by a guarantee
            whose delta the delta meter does not count.
        """
        if REGISTRY.get(guarantee.kind) is not type(guarantee):
            raise InvalidGuarantee(
                f"cost must be of a registered kind (got {guarantee}): decorate its class with register"
            )
        prices: list[Price] = []
        # A kind that no filter names has no price of its own: its meters would read a delta of 0 from it.
        accepted = self._accepts(guarantee, interactive=interactive)
        if accepted:
            prices.append(self._price_directly(guarantee, interactive=interactive))
        for one in implied:
            try:
                prices.append(self._price(one, interactive=interactive))
            except UnprovenComposition as problem:
                if accepted and not delta_of(one):  # it has no alternative of its own, but odometers read it
                    prices.append(self._price_directly(one, interactive=interactive))
                elif one is implied[-1] and not prices:
                    if self.policy.total is not None:
                        raise UnprovenComposition(_advice(self.policy, guarantee)) from problem
                    raise
        delta = self.index(DeltaMeter)
        if len(prices) > 1 and any(found.amounts[delta] != 0 for found in prices):
            raise InvalidGuarantee(f"several implied guarantees must all be without delta (got those of {guarantee})")
        columns = zip(*[found.amounts for found in prices], strict=True)
        return Price(
            tuple([min((amount for amount in column if amount is not None), default=None) for column in columns])
        )

    def _price_parallel(self, guarantee: Parallel, *, interactive: bool) -> Price:
        """Price mechanisms that run on disjoint parts of the data.

        Theorem: parallel composition: neighbors differ in one part (a person added or removed) or at most two (a
            person replaced), so the step is no worse than the dearest part, or the dearest two, on every meter.
            Interactive parts are asked in any order: two that differ are two concurrent mechanisms.
        Assumes: the parts are disjoint and fixed by each record alone; for replaced persons each part's guarantee
            also covers a person who joins or leaves the part.
        """
        affected = 1 if self.policy.neighbors == "add-remove" else 2
        # A histogram has thousands of equal parts: price each object once, and count it as often as it can matter.
        counts = Counter(map(id, guarantee.parts))
        rows: list[tuple[int | None, ...]] = []
        for key, part in {id(part): part for part in guarantee.parts}.items():
            rows += [self._price(part, interactive=interactive).amounts] * min(affected, counts[key])
        columns = zip(*rows, strict=True)
        return Price(tuple(_dearest(column, affected) for column in columns))

    def reading(self, totals: Totals, odometer: Odometer | None = None) -> Reading:
        """Read the policy's odometer, or another one, which the guarantee does not cover.

        Theorem: odometers; readings with a slack t: P(exists n: L > U + t) <= delta / (1 - e^-t).
        Assumes: the odometer, its tuning and the slack were fixed before the first step: the policy's alone is.
        """
        policy = self.policy
        chosen = odometer or policy.odometer
        spent = _spent(self.meters, totals)
        if self._exceeds_delta_steps(totals):
            loss = math.inf
        elif not policy.delta_odometer:
            # Nothing of delta is left for a boundary; the sum of the epsilons needs none of it.
            loss = spent.epsilon if math.isfinite(spent.drift) else math.inf
        else:
            loss = chosen.bound(spent, float(policy.delta_odometer))
        summed = 0.0 < loss == spent.epsilon < math.inf
        if policy.slack is not None:
            loss = up(loss + policy.slack)
        note = self._note(totals, chosen, loss)
        return Reading(
            loss, policy.delta_reading, chosen, covered=chosen == policy.odometer, note=note, summed=summed
        )

    def compare(self, totals: Totals) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        readings = [self.reading(totals, other) for other in other_odometers(self.policy)]
        return self.reading(totals), *(other for other in readings if math.isfinite(other.loss))

    def _note(self, totals: Totals, odometer: Odometer, loss: float) -> str:
        policy = self.policy
        if math.isfinite(loss):
            if policy.epsilon is None or loss <= policy.epsilon:
                return ""
            return "It may exceed the promise, because it states more: a bound on the loss itself, at every moment."
        if self._exceeds_delta_steps(totals):
            return "No finite reading: the sum of the steps' own deltas is above the policy's delta_steps."
        if policy.is_unlimited and odometer == policy.odometer:
            return f"No finite reading: the sums are above what is counted, {CEILING / SCALE:.0f}."
        if policy.total is not None and not policy.delta_odometer:
            return (
                "No finite reading: without a delta in the policy it is the sum of the epsilons, and a step had none."
            )
        parts = [part for _, part in odometer.parts] if isinstance(odometer, BestOf) else [odometer]
        untimed = totals.unpriced[self.index(IntrinsicMeter)] > 0
        cures = []
        if untimed and not any(isinstance(part, RenyiOdometer) for part in parts):
            cures.append("a Rényi odometer fixed in the policy")
        if policy.slack is None and totals.amounts[self.index(DeltaMeter)]:
            cures.append("a slack fixed in the policy")
        cure = " and ".join(cures) or "steps that come with their Rényi curve, at an order of its own"
        return f"No finite reading: a step had no bound that this odometer can read; it needs {cure}."

    def _exceeds_delta_steps(self, totals: Totals) -> bool:
        """Return whether the steps' deltas exceed delta'', as in totals that no gate admitted."""
        i = self.index(DeltaMeter)
        return totals.amounts[i] > (self.meters[i].limit or 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `Compiled.from_dict` reads."""
        meters = [meter.to_dict() for meter in self.meters]
        return {"form": _FORM, "policy": self.policy.to_dict(), "meters": meters, "note": self.note}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Compiled:
        """Read what `to_dict` wrote, now or in 0.1.0; a damaged document raises `InvalidPolicy`."""
        version = form.get("form") if isinstance(form, Mapping) else None
        if version not in _FORMS or not isinstance(form.get("meters"), list):
            raise InvalidPolicy(f"a compiled policy must be a document of form {_FORM} or 1 (got {form!r:.120})")
        compiled = cls(
            Policy.from_dict(form.get("policy") or {}),
            tuple(meter_from_dict(meter, version) for meter in form["meters"]),
            str(form.get("note", "")),
        )
        check_compiled(compiled)
        return compiled


def check_compiled(compiled: Compiled) -> None:
    """Raise `InvalidPolicy` unless the meters are those of the policy, and no limit is known to be too large."""
    policy = compiled.policy
    common = _common_meters(policy, compiled.tolerance)
    if compiled.meters[: len(common)] != common:
        raise InvalidPolicy("the delta and epsilon limits of a compiled policy must be those of its policy")
    rest: Sequence[Meter] = compiled.meters[len(common) :]
    for one, target in policy.targets(tolerance=compiled.tolerance):
        rest = one.check_stored(rest, target)
    if rest != policy.odometer.meters(latent=policy.slack is not None):
        raise InvalidPolicy(
            "the last meters of a compiled policy must be those of its odometer (got"
            f" {[meter.name for meter in rest]})"
        )


def compile_meters(policy: Policy, budget: Budget | None = None, note: str = "") -> Compiled:
    """Compile a policy to its meters; the exact filter needs the certified budget for `policy.need`.

    Theorem: combining filters: one limit on the sum of deltas, tested first, and any one alternative, each at its
        share.
    Assumes: nothing about the target, the split or the filters changes after the first step.
    """
    meters = [*_common_meters(policy, policy.tolerance)]
    for one, target in policy.targets(budget):
        meters += one.alternatives(target)
    meters += policy.odometer.meters(latent=policy.slack is not None)
    return Compiled(policy, tuple(meters), note)


def _common_meters(policy: Policy, tolerance: Fraction) -> tuple[Meter, ...]:
    """The meters of every policy: delta, epsilon (basic composition), and intrinsic time for the odometer."""
    return (
        DeltaMeter("delta", floor_units(exact_of(policy.delta_steps), DELTA_SCALE)),
        EpsilonMeter("epsilon", _epsilon_limit(policy, tolerance)),
        IntrinsicMeter("intrinsic", None),
    )


def _epsilon_limit(policy: Policy, tolerance: Fraction) -> int | None:
    """Return the limit of the plain sum; None where no epsilon is promised, because it implies no other promise."""
    if policy.epsilon is None:
        return None
    return min(CEILING, floor_units(exact_of(policy.epsilon) + tolerance, SCALE))


def too_low(stored: Price, now: Price) -> bool:
    """Return whether a stored price is lower than the present one, by more than the last digits of a float.

    A price is never recomputed, only checked: a later version may price lower by its last digits, not higher.
    """
    return any(
        kept is not None and (asked is None or kept < asked - asked // 10**12)
        for kept, asked in zip(stored.amounts, now.amounts, strict=True)
    )


def _dearest(amounts: Sequence[int | None], count: int) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(sorted(known)[-count:]) if len(known) == len(amounts) else None


def _refuse_approximate_moments(guarantee: Guarantee) -> None:
    """Raise for an interactive mechanism whose Rényi or zCDP guarantee holds but for an event of probability delta.

    Concurrent composition is proven for (epsilon, delta)-DP, f-DP and Rényi DP (Haney et al. (2023)), not for these.
    """
    delta = exact_of(delta_of(guarantee))
    if not delta or not isinstance(guarantee, ZCDP | RDP | Mechanism):
        return
    instead = "ApproxDP(epsilon, delta)" if not isinstance(guarantee, ZCDP) else _as_approximate(guarantee)
    raise UnprovenComposition(
        f"no theorem covers {Interactive(guarantee).brief()}: approximate zCDP and approximate Rényi guarantees"
        f" (here with delta {float(delta):g}) of interactive mechanisms are not known to compose. Charge the"
        f" (epsilon, delta)-DP that follows from it instead: Interactive({instead})"
    )


def _as_approximate(guarantee: ZCDP) -> ApproxDP | str:
    """Return an (epsilon, delta)-DP guarantee that follows from an approximate zCDP one, with twice its delta.

    Theorem: but for an event of probability delta_n the step is rho-zCDP, so (epsilon, delta')-DP there (Canonne,
        Kamath and Steinke (2020), Proposition 12); the two add up to (epsilon, delta' + delta_n)-DP.
    Assumes: as the guarantee.
    """
    delta = exact_of(guarantee.delta)
    epsilon = zcdp_to_dp_epsilon(float_above(exact_of(guarantee.rho)), float_below(delta))
    if 2 * delta >= 1 or not 0 < epsilon < math.inf:
        return "ApproxDP(epsilon, delta)"
    return ApproxDP(decimal_above(exactly(epsilon), _OFFER_DIGITS), 2 * delta)


def _advice(policy: Policy, asked: Guarantee) -> str:
    names = " and ".join(repr(one.kind) for one, _ in policy.filters)
    head, guarantee = f"no theorem covers {asked.brief()} under filter {names}", one_shot(asked)
    if isinstance(guarantee, Mechanism):
        listed = ", ".join(repr(item.name) for item in policy.menu) or "nothing"
        head += f": the policy's menu lists {listed}, and is fixed when the policy is made"
        if not guarantee.curve:
            return head
    exact = next((one for one, _ in policy.filters if isinstance(one, Exact)), None)
    family = None if exact is None or not exact.menu else exact.family_of(guarantee)
    if exact is not None and family is not None:
        return (
            f"{head}: beside its menu the policy takes {[*exact.takes]}; one with takes=({family!r},) would take it"
        )
    if policy.epsilon is None:
        sizes = " or ".join(name for one, _ in policy.filters for name in one.options)
        zcdp = isinstance(guarantee, ZCDP | DiscreteGaussian)
        line = "Policy(rho=...)" if zcdp else "a policy with an epsilon, such as Policy(1, 1e-6),"
        return f"{head}: no {sizes} follows from it; {line} would take it"
    others = [name for name in takers(guarantee) if name != "exact"] or ["exact"]
    target = "" if policy.delta else " and delta > 0"
    return f"{head}; a policy with filter={others[-1]!r}{target} would take it"


def _unread(policy: Policy, guarantee: Guarantee) -> str:
    """Say why a policy without a limit does not take a step, and what would."""
    head = f"the policy's odometer has no reading for {guarantee.brief()}"
    if isinstance(guarantee, Mechanism) and guarantee.curve is None:
        return f"{head} without its Rényi curve; pass the curve"
    if delta_of(guarantee) and policy.slack is None:
        return f"{head}: its delta needs a slack, as in Policy(None, {float(policy.delta):g}, slack=0.1)"
    if isinstance(guarantee, RDP | Mechanism):
        return f"{head}: it needs a Rényi part with an order that the curve has, such as the default odometer's"
    return f"{head}: it has no finite price, or is of a kind that needs another part, such as the default odometer's"


def other_odometers(policy: Policy) -> tuple[Odometer, ...]:
    """Return the odometers to compare with the policy's own.

    Under basic composition there are none: the reading is the sum of the epsilons, whatever the odometer.
    """
    if not policy.delta_odometer:
        return ()
    epsilon = None if policy.epsilon is None else exact_of(policy.epsilon)
    target = _odometer_target(epsilon, exact_of(policy.delta), exact_of(policy.delta_steps), policy.filters)
    standard = standard_odometers(target[0], float(target[1]))
    return tuple(odometer for odometer in standard if odometer != policy.odometer)


def _spent(meters: Sequence[Meter], totals: Totals) -> Spent:
    moments: dict[Fraction, float] = {}
    intrinsic = epsilon = 0.0
    drift = math.inf  # a policy whose odometer counts none has no finite sum of epsilons either
    for meter, total, skipped in zip(meters, totals.amounts, totals.unpriced, strict=True):
        value = math.inf if skipped else up(total / SCALE)
        if isinstance(meter, MomentMeter):
            moments[meter.order] = value
        elif isinstance(meter, IntrinsicMeter):
            intrinsic = value
        elif isinstance(meter, EpsilonMeter):
            epsilon = value
        elif isinstance(meter, DriftMeter):
            drift = value
    return Spent(intrinsic, epsilon, drift, moments)
