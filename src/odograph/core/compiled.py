"""A policy compiled to meters: made once per account, priced against, read from, never recompiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from odograph.core.composition import kov_delta
from odograph.core.conversions import intrinsic_to_pure
from odograph.core.decide import Price, Totals
from odograph.core.exact import LEAST_GAUSSIAN, MOST_BLOCKS, Budget
from odograph.core.gaussian import largest_mu
from odograph.core.guarantees import GDP, KINDS, Guarantee, Mechanism, Parallel, exact_of
from odograph.core.meters import CLOCKS, Meter
from odograph.core.odometers import BestOf, Odometer, Reading, Renyi, Spent, standard_odometers
from odograph.core.policy import Policy
from odograph.core.rules import RULES, Target, takers
from odograph.core.units import CEILING, DELTA_SCALE, SCALE, down, exactly, floor_units, up
from odograph.errors import InvalidGuarantee, InvalidPolicy, UnprovenComposition

__all__ = [
    "Compiled",
    "check_compiled",
    "compare",
    "compile_meters",
    "compiled_from_dict",
    "other_odometers",
    "price",
    "reading",
    "too_low",
]

_FORM: Final = 1
_MOST_STEPS: Final = 10**6  # that a refutation composes: its work grows as their square root


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy and its meters. Made once per account and never recompiled; prices and limits are integers."""

    policy: Policy
    meters: tuple[Meter, ...]
    note: str = ""

    @property
    def start(self) -> Totals:
        """The totals of an account that has spent nothing."""
        return Totals.zero(self.meters)

    def to_dict(self) -> dict[str, Any]:
        """Return the versioned form that `compiled_from_dict` reads."""
        meters = [meter.to_dict() for meter in self.meters]
        return {"form": _FORM, "policy": self.policy.to_dict(), "meters": meters, "note": self.note}


def compiled_from_dict(form: Mapping[str, Any]) -> Compiled:
    """Read what `Compiled.to_dict` wrote; a damaged document raises `InvalidPolicy`."""
    if not isinstance(form, Mapping) or form.get("form") != _FORM or not isinstance(form.get("meters"), list):
        raise InvalidPolicy(f"not a compiled policy of form {_FORM}")
    compiled = Compiled(
        Policy.from_dict(form.get("policy") or {}),
        tuple(Meter.from_dict(meter) for meter in form["meters"]),
        str(form.get("note", "")),
    )
    check_compiled(compiled)
    return compiled


def check_compiled(compiled: Compiled) -> None:
    """Raise `InvalidPolicy` unless the meters are those of the policy, and no limit is known to be too large."""
    # The first meters follow from the policy alone; the odometer's too. What is between are the rules' limits.
    if compiled.meters[:3] != _first_meters(compiled.policy):
        raise InvalidPolicy("the delta and epsilon limits of a compiled policy must be those of its policy")
    own = compiled.policy.odometer.meters(latent=compiled.policy.slack is not None)
    rules = compiled.meters[3 : len(compiled.meters) - len(own)]
    if compiled.meters[3 + len(rules) :] != own or any(meter.limit is None for meter in rules):
        raise InvalidPolicy("a compiled policy ends with the meters of its odometer, and only those have no limit")
    _check_limits(compiled.policy, rules)


def _check_limits(policy: Policy, stored: Sequence[Meter]) -> None:
    """Raise unless the stored alternatives are the policy's, with limits no larger than the rules would set.

    Limits are not recompiled: a stored one may be smaller, from an earlier version of a rule.
    """
    claimed = [meter for meter in stored if meter.clock == "exact"]
    shares = [share for name, share in policy.shares if name == "exact"]
    if len(claimed) != len(shares):
        raise InvalidPolicy("a compiled policy has one meter for its exact rule, and only then")
    for meter, share in zip(claimed, shares, strict=True):
        listed = [(item.name, item.block) for item in policy.menu]
        own = meter.takes == policy.takes and [(name, block) for name, block, _ in meter.charges] == listed
        if not own or _refuted(exact_of(policy.epsilon), policy.delta_rule * share, meter):
            raise InvalidPolicy(
                f"not a budget that was certified for this policy (got {meter.limit} units of"
                f" {float(meter.unit or 0):.4g} for {[*meter.takes, *(name for name, *_ in meter.charges)]}); compile"
                " the policy here with compile_policy"
            )
    others = [meter for meter in stored if meter.clock != "exact"]
    expected = [m for name, share in policy.shares if name != "exact" for m in _alternatives(policy, name, share)]
    if [replace(m, limit=0) for m in others] != [replace(m, limit=0) for m in expected]:
        raise InvalidPolicy("the alternatives of a compiled policy must be those of its rules")
    for meter, rule in zip(others, expected, strict=True):
        if (meter.limit or 0) > (rule.limit or 0) * (1 + Fraction(1, 10**12)) + 1:
            raise InvalidPolicy(f"the limit of {meter.name!r} is larger than its rule allows")


@lru_cache(maxsize=1024)
def _refuted(epsilon: Fraction, delta: Fraction, meter: Meter) -> bool:
    """Say whether steps that an exact meter would admit are known to pass the target.

    That none is found certifies nothing: `odograph.budgets.certification` says what does.

    Theorem: a Gaussian that uses up the limit is mu-GDP with mu^2 = unit * limit; equal pure steps that use it up
        have the divergence of optimal composition (Kairouz, Oh and Viswanath 2015).
    Assumes: the steps are charged as by `solve`; what a menu's mechanisms lose is not known from a document.
    """
    limit, unit = meter.limit or 0, meter.unit or Fraction(0)
    # Charges are rounded so that an item gets at most three times the blocks that it gets alone.
    if any(limit // charge > 4 * MOST_BLOCKS for _, _, charge in meter.charges):
        return True
    if not meter.takes:
        return False
    generous = 1 + Fraction(1, 10**9)  # the last digits of a float decide nothing
    most = exactly(largest_mu(float(epsilon), min(float(delta), 1.0 - 2.0**-53))) ** 2 * generous
    if unit * limit > (most if "gaussian" in meter.takes and limit >= LEAST_GAUSSIAN else 2 * most):
        return True
    sizes = [1 << bit for bit in range(limit.bit_length())] if "pure" in meter.takes else []
    return any(
        Fraction(kov_delta(limit // size, _pure_step(size * unit), 0.0, epsilon)) > delta * generous
        for size in sizes
        if limit // size <= _MOST_STEPS
    )


def _pure_step(time: Fraction) -> float:
    """Return an epsilon whose step is charged at most this intrinsic time."""
    return down(intrinsic_to_pure(down(float(time))), 64)


def compile_meters(policy: Policy, budget: Budget | None = None, note: str = "") -> Compiled:
    """Compile a policy to its meters; the exact rule needs the certified budget of `Need.of(policy)`.

    Theorem: Lemma 3: one limit on the sum of deltas, tested first, and any one alternative, each at its share.
    Assumes: nothing about the target, the split or the rules changes after the first step.
    """
    meters = [*_first_meters(policy)]
    for name, share in policy.shares:
        meters += _alternatives(policy, name, share, budget)
    meters += policy.odometer.meters(latent=policy.slack is not None)
    return Compiled(policy, tuple(meters), note)


def _alternatives(policy: Policy, rule: str, share: Fraction, budget: Budget | None = None) -> tuple[Meter, ...]:
    orders = tuple(policy.order_shares)
    return RULES[rule].alternatives(Target(exact_of(policy.epsilon), policy.delta_rule * share, budget, orders))


def _first_meters(policy: Policy) -> tuple[Meter, ...]:
    """The meters of every policy: delta, epsilon (basic composition), and intrinsic time for the odometer."""
    return (
        Meter("delta", "delta", floor_units(exact_of(policy.delta_steps), DELTA_SCALE)),
        Meter("epsilon", "epsilon", min(CEILING, floor_units(exact_of(policy.epsilon), SCALE))),
        Meter("intrinsic", "intrinsic", None),
    )


def price(compiled: Compiled, guarantee: Guarantee) -> Price:
    """Price a guarantee on every meter, or raise `UnprovenComposition` and name a rule that would take it."""
    if isinstance(guarantee, Parallel):
        return _parallel(compiled, guarantee)
    if not isinstance(guarantee, KINDS):
        raise InvalidGuarantee(f"{guarantee!r} is not a guarantee; pass one such as PureDP(0.1)")
    policy = compiled.policy
    for name, _ in policy.shares:
        if _taken(policy, name, guarantee):
            break
    else:
        raise UnprovenComposition(_advice(policy, guarantee))
    if isinstance(guarantee, Mechanism) and policy.neighbours != "add-remove":
        guarantee = replace(guarantee, curve=None)  # what the menu lists is for these neighbours, the curve is not
    return Price(tuple([CLOCKS[meter.clock](meter, guarantee) for meter in compiled.meters]))


def too_low(stored: Price, now: Price) -> bool:
    """Say whether a stored price is lower than what is asked now, by more than the last digits of a float.

    A price is never recomputed, only checked: a later version may price lower by its last digits, not higher.
    """
    return any(
        kept is not None and (asked is None or kept < asked - asked // 10**12)
        for kept, asked in zip(stored.amounts, now.amounts, strict=True)
    )


def _parallel(compiled: Compiled, guarantee: Parallel) -> Price:
    """Price mechanisms that run on disjoint parts of the data.

    Theorem: parallel composition: neighbours differ in one part (a person added or removed) or at most two (a
        person replaced), so the step is no worse than the dearest part, or the dearest two, on every meter.
    Assumes: the parts are disjoint and fixed by each record alone; for replaced persons each part's guarantee also
        covers a person who joins or leaves the part.
    """
    affected = 1 if compiled.policy.neighbours == "add-remove" else 2
    # A histogram has thousands of equal parts: the same object is priced once, and counts as often as it can matter.
    counts = Counter(map(id, guarantee.parts))
    rows: list[tuple[int | None, ...]] = []
    for key, part in {id(part): part for part in guarantee.parts}.items():
        rows += [price(compiled, part).amounts] * min(affected, counts[key])
    columns = zip(*rows, strict=True)
    return Price(tuple(_dearest(column, affected) for column in columns))


def _dearest(amounts: Sequence[int | None], count: int) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(sorted(known)[-count:]) if len(known) == len(amounts) else None


def _taken(policy: Policy, rule: str, guarantee: Guarantee) -> bool:
    if not isinstance(guarantee, RULES[rule].takes):
        return False
    if isinstance(guarantee, Mechanism):
        listed = rule == "exact" and any(item.name == guarantee.name for item in policy.menu)
        # A curve does not say which neighbours it is for; the known ones are for adding or removing a person.
        curve = rule == "renyi" and guarantee.curve is not None and policy.neighbours == "add-remove"
        return listed or curve
    family = "gaussian" if isinstance(guarantee, GDP) else "pure"
    return rule != "exact" or family in policy.takes


def _advice(policy: Policy, guarantee: Guarantee) -> str:
    names = " and ".join(repr(name) for name, _ in policy.shares)
    head = f"no theorem covers {guarantee} under rule {names}"
    listed = ", ".join(repr(item.name) for item in policy.menu) or "nothing"
    if isinstance(guarantee, Mechanism):
        if any(item.name == guarantee.name for item in policy.menu):
            return f"{head}: the policy's menu lists it, and only rule='exact', or a share of it, reads a menu"
        head += f": the policy's menu lists {listed}, and is fixed when the policy is made"
        if not guarantee.curve:
            return head
    if policy.menu and isinstance(guarantee, RULES["exact"].takes) and not isinstance(guarantee, Mechanism):
        family = "gaussian" if isinstance(guarantee, GDP) else "pure"
        return (
            f"{head}: beside its menu the policy takes {[*policy.takes]}; one with takes=({family!r},) would take it"
        )
    others = [name for name in takers(guarantee) if name != "exact"] or ["exact"]
    target = "" if policy.delta else " and delta > 0"
    return f"{head}; a policy with rule={others[-1]!r}{target} would take it"


def reading(compiled: Compiled, totals: Totals, odometer: Odometer | None = None) -> Reading:
    """Read the policy's odometer, or another one for looking only.

    Theorem: odometers; with a slack t, Theorem 6: P(exists n: L > U + t) <= delta / (1 - e^-t).
    Assumes: the odometer, its tuning and the slack were fixed before the first step: the policy's alone is.
    """
    policy = compiled.policy
    chosen = odometer or policy.odometer
    spent = _spent(compiled.meters, totals)
    if _deltas_passed(compiled, totals):
        loss = math.inf
    elif policy.rule == "basic":
        # Nothing of delta is left for a boundary; the sum of the epsilons needs none of it.
        loss = spent.epsilon if math.isfinite(spent.drift) else math.inf
    else:
        loss = chosen.bound(spent, float(policy.delta_rule))
    delta = float(policy.delta)
    summed = 0.0 < loss == spent.epsilon < math.inf
    if policy.slack is not None:
        loss, delta = up(loss + policy.slack), up(delta / -math.expm1(-policy.slack))
    note = _note(compiled, totals, chosen, loss)
    return Reading(loss, delta, chosen, licensed=chosen == policy.odometer, note=note, summed=summed)


def compare(compiled: Compiled, totals: Totals) -> tuple[Reading, ...]:
    """Return the policy's reading, and the finite ones of other odometers beside it, for looking only."""
    readings = [reading(compiled, totals, other) for other in other_odometers(compiled.policy)]
    return reading(compiled, totals), *(other for other in readings if math.isfinite(other.loss))


def other_odometers(policy: Policy) -> tuple[Odometer, ...]:
    """Return the odometers to look at beside the policy's own.

    Under basic composition there are none: the reading is the sum of the epsilons, whatever the odometer.
    """
    if policy.rule == "basic":
        return ()
    standard = standard_odometers(float(policy.epsilon), float(policy.delta_rule))
    return tuple(odometer for odometer in standard if odometer != policy.odometer)


def _note(compiled: Compiled, totals: Totals, odometer: Odometer, loss: float) -> str:
    policy = compiled.policy
    if loss <= policy.epsilon:
        return ""
    if math.isfinite(loss):
        return "It may pass the promise, because it says more: a bound on the loss itself, at every moment."
    if _deltas_passed(compiled, totals):
        return "No finite reading: the sum of the steps' own deltas is above the policy's delta_steps."
    parts = [part for _, part in odometer.parts] if isinstance(odometer, BestOf) else [odometer]
    untimed = totals.unpriced[2] > 0  # intrinsic time is the third meter of every policy
    cures = []
    if untimed and not any(isinstance(part, Renyi) for part in parts):
        cures.append("a Rényi odometer fixed in the policy")
    if policy.slack is None and totals.amounts[0]:
        cures.append("a slack fixed in the policy")
    cure = " and ".join(cures) or "steps that come with their Rényi curve, at an order of its own"
    return f"No finite reading: a step had no bound that this odometer can read; it needs {cure}."


def _deltas_passed(compiled: Compiled, totals: Totals) -> bool:
    """Say whether the steps' deltas are more than delta'' pays for: totals that no gate admitted."""
    return totals.amounts[0] > (compiled.meters[0].limit or 0)


def _spent(meters: Sequence[Meter], totals: Totals) -> Spent:
    moments: dict[Fraction, float] = {}
    sums = {"intrinsic": 0.0, "epsilon": 0.0, "drift": float("inf")}
    for meter, total, skipped in zip(meters, totals.amounts, totals.unpriced, strict=True):
        value = float("inf") if skipped else up(total / SCALE)
        if meter.clock == "moment" and meter.order is not None:
            moments[meter.order] = value
        elif meter.name in sums:
            sums[meter.name] = value
    return Spent(sums["intrinsic"], sums["epsilon"], sums["drift"], moments)
