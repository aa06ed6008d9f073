"""A policy compiled to meters: it prices guarantees and reads odometers. Made once per account, never recompiled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final, TypeVar

from odograph.core.filters import Exact, meter_from_dict, takers
from odograph.core.fixed_point import CEILING, DELTA_SCALE, SCALE, exact_of, floor_units, up
from odograph.core.gate import Price, Totals
from odograph.core.guarantees import REGISTRY, Guarantee, Mechanism, Parallel
from odograph.core.meters import DeltaMeter, DriftMeter, EpsilonMeter, IntrinsicMeter, Meter, MomentMeter
from odograph.core.odometers import BestOf, Odometer, Reading, RenyiOdometer, Spent, standard_odometers
from odograph.core.policy import Policy
from odograph.core.value_iteration import Budget
from odograph.errors import InvalidGuarantee, InvalidPolicy, UnprovenComposition

__all__ = ["Compiled", "check_compiled", "compile_meters", "other_odometers", "too_low"]

_M = TypeVar("_M", bound=Meter)

_FORM: Final = 2
_FORMS: Final = (1, _FORM)  # 1: of 0.1.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A policy and its meters. Made once per account, never recompiled; prices and limits are integers."""

    policy: Policy
    meters: tuple[Meter, ...]
    note: str = ""

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
        if isinstance(guarantee, Parallel):
            return self._price_parallel(guarantee)
        if not isinstance(guarantee, Guarantee):
            raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got {guarantee!r})")
        if implied := guarantee.implies():
            return self._price_implied(guarantee, implied)
        policy = self.policy
        for one, _ in policy.filters:
            if one.accepts(guarantee, policy.neighbors):
                break
        else:
            raise UnprovenComposition(_advice(policy, guarantee))
        if isinstance(guarantee, Mechanism) and policy.neighbors != "add-remove":
            guarantee = replace(guarantee, curve=None)  # the menu's item is for these neighbors, the curve is not
        return Price(tuple([meter.price(guarantee) for meter in self.meters]))

    def _price_implied(self, guarantee: Guarantee, implied: Sequence[Guarantee]) -> Price:
        """Price a guarantee by those that follow from it: on each meter the cheapest.

        Theorem: every implied guarantee bounds the step, so each meter may charge by any of them.
        Assumes: a single one is implied, or all are without delta: else one meter could charge by a guarantee whose
            delta the delta meter does not count.
        """
        if REGISTRY.get(guarantee.kind) is not type(guarantee):
            raise InvalidGuarantee(
                f"cost must be of a registered kind (got {guarantee}): decorate its class with register"
            )
        prices: list[Price] = []
        for one in implied:
            try:
                prices.append(self.price(one))
            except UnprovenComposition:
                if one is implied[-1] and not prices:
                    raise
        delta = self.index(DeltaMeter)
        if len(prices) > 1 and any(found.amounts[delta] != 0 for found in prices):
            raise InvalidGuarantee(f"several implied guarantees must all be without delta (got those of {guarantee})")
        columns = zip(*[found.amounts for found in prices], strict=True)
        return Price(
            tuple([min((amount for amount in column if amount is not None), default=None) for column in columns])
        )

    def _price_parallel(self, guarantee: Parallel) -> Price:
        """Price mechanisms that run on disjoint parts of the data.

        Theorem: parallel composition: neighbors differ in one part (a person added or removed) or at most two (a
            person replaced), so the step is no worse than the dearest part, or the dearest two, on every meter.
        Assumes: the parts are disjoint and fixed by each record alone; for replaced persons each part's guarantee
            also covers a person who joins or leaves the part.
        """
        affected = 1 if self.policy.neighbors == "add-remove" else 2
        # A histogram has thousands of equal parts: price each object once, and count it as often as it can matter.
        counts = Counter(map(id, guarantee.parts))
        rows: list[tuple[int | None, ...]] = []
        for key, part in {id(part): part for part in guarantee.parts}.items():
            rows += [self.price(part).amounts] * min(affected, counts[key])
        columns = zip(*rows, strict=True)
        return Price(tuple(_dearest(column, affected) for column in columns))

    def reading(self, totals: Totals, odometer: Odometer | None = None) -> Reading:
        """Read the policy's odometer, or another one, which the guarantee does not cover.

        Theorem: odometers; with a slack t, Theorem 6: P(exists n: L > U + t) <= delta / (1 - e^-t).
        Assumes: the odometer, its tuning and the slack were fixed before the first step: the policy's alone is.
        """
        policy = self.policy
        chosen = odometer or policy.odometer
        spent = _spent(self.meters, totals)
        if self._exceeds_delta_steps(totals):
            loss = math.inf
        elif policy.is_basic:
            # Nothing of delta is left for a boundary; the sum of the epsilons needs none of it.
            loss = spent.epsilon if math.isfinite(spent.drift) else math.inf
        else:
            loss = chosen.bound(spent, float(policy.delta_filter))
        delta = float(policy.delta)
        summed = 0.0 < loss == spent.epsilon < math.inf
        if policy.slack is not None:
            loss, delta = up(loss + policy.slack), up(delta / -math.expm1(-policy.slack))
        note = self._note(totals, chosen, loss)
        return Reading(loss, delta, chosen, covered=chosen == policy.odometer, note=note, summed=summed)

    def compare(self, totals: Totals) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        readings = [self.reading(totals, other) for other in other_odometers(self.policy)]
        return self.reading(totals), *(other for other in readings if math.isfinite(other.loss))

    def _note(self, totals: Totals, odometer: Odometer, loss: float) -> str:
        policy = self.policy
        if loss <= policy.epsilon:
            return ""
        if math.isfinite(loss):
            return "It may exceed the promise, because it states more: a bound on the loss itself, at every moment."
        if self._exceeds_delta_steps(totals):
            return "No finite reading: the sum of the steps' own deltas is above the policy's delta_steps."
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
    common = _common_meters(policy)
    if compiled.meters[: len(common)] != common:
        raise InvalidPolicy("the delta and epsilon limits of a compiled policy must be those of its policy")
    rest: Sequence[Meter] = compiled.meters[len(common) :]
    for one, target in policy.targets():
        rest = one.check_stored(rest, target)
    if rest != policy.odometer.meters(latent=policy.slack is not None):
        raise InvalidPolicy(
            "the last meters of a compiled policy must be those of its odometer (got"
            f" {[meter.name for meter in rest]})"
        )


def compile_meters(policy: Policy, budget: Budget | None = None, note: str = "") -> Compiled:
    """Compile a policy to its meters; the exact filter needs the certified budget for `policy.need`.

    Theorem: Lemma 3: one limit on the sum of deltas, tested first, and any one alternative, each at its share.
    Assumes: nothing about the target, the split or the filters changes after the first step.
    """
    meters = [*_common_meters(policy)]
    for one, target in policy.targets(budget):
        meters += one.alternatives(target)
    meters += policy.odometer.meters(latent=policy.slack is not None)
    return Compiled(policy, tuple(meters), note)


def _common_meters(policy: Policy) -> tuple[Meter, ...]:
    """The meters of every policy: delta, epsilon (basic composition), and intrinsic time for the odometer."""
    return (
        DeltaMeter("delta", floor_units(exact_of(policy.delta_steps), DELTA_SCALE)),
        EpsilonMeter("epsilon", min(CEILING, floor_units(exact_of(policy.epsilon), SCALE))),
        IntrinsicMeter("intrinsic", None),
    )


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


def _advice(policy: Policy, guarantee: Guarantee) -> str:
    names = " and ".join(repr(one.kind) for one, _ in policy.filters)
    head = f"no theorem covers {guarantee} under filter {names}"
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
    others = [name for name in takers(guarantee) if name != "exact"] or ["exact"]
    target = "" if policy.delta else " and delta > 0"
    return f"{head}; a policy with filter={others[-1]!r}{target} would take it"


def other_odometers(policy: Policy) -> tuple[Odometer, ...]:
    """Return the odometers to compare with the policy's own.

    Under basic composition there are none: the reading is the sum of the epsilons, whatever the odometer.
    """
    if policy.is_basic:
        return ()
    standard = standard_odometers(float(policy.epsilon), float(policy.delta_filter))
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
