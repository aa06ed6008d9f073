"""Why the numbers hold: the theorems behind a policy and what they assume, as the code itself cites them."""

from __future__ import annotations

import inspect
from typing import Final, NamedTuple

from odograph.core.compiled import Compiled, reading
from odograph.core.decide import decide
from odograph.core.rules import RULES

__all__ = ["Reason", "cited", "reasons"]

_LABELS: Final = ("Theorem:", "Assumes:")


class Reason(NamedTuple):
    """One thing that the numbers rest on."""

    title: str
    says: str
    theorem: str
    assumes: str


def reasons(compiled: Compiled) -> tuple[Reason, ...]:
    """Return what stands behind an account's limits and its reading."""
    policy = compiled.policy
    found = []
    for name, share in policy.shares:
        part = "" if len(policy.shares) == 1 else f", with {float(share):g} of the delta that pays for rules"
        found.append(cited(f"The rule: {name}{part}", RULES[name].alternatives))
    if policy.rule != "basic":
        says = "The sum of the epsilons costs no delta, so it is an alternative of every policy."
        found.append(cited("Basic composition, beside it", RULES["basic"].alternatives, says))
    gate = "A request is admitted if its own delta fits and at least one alternative has room for it."
    found.append(cited("How requests are admitted", decide, gate))
    odometer = policy.odometer
    if policy.rule == "basic":
        found.append(cited("The reading", RULES["basic"].alternatives, "The reading is the sum of the epsilons."))
    else:
        says = (inspect.getdoc(type(odometer)) or "").partition("\n")[0]
        source = type(odometer).bound if policy.slack is None else reading
        found.append(cited(f"The odometer: {odometer.kind.replace('-', ' ')}", source, says))
    return tuple(found)


def cited(title: str, function: object, says: str = "") -> Reason:
    """Read a function's citation: the first sentence, and the paragraphs after `Theorem:` and `Assumes:`."""
    lines = (inspect.getdoc(function) or "").splitlines()
    parts: dict[str, list[str]] = {label: [] for label in _LABELS}
    current: list[str] | None = None
    for line in lines:
        label = next((label for label in _LABELS if line.startswith(label)), None)
        if label is not None:
            current = parts[label]
        elif not line.strip():
            current = None
        if current is not None:
            current.append(line.removeprefix(label or "").strip())
    theorem, assumes = (" ".join(parts[label]) for label in _LABELS)
    return Reason(title, says or (lines[0] if lines else ""), theorem, assumes)
