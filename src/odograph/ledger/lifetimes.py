"""Linked accounts: a new policy for the same data is a new account, and the promises add up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from odograph.core.guarantees import exact_of
from odograph.core.policy import Policy
from odograph.ledger.stores.base import Head

__all__ = ["Lifetime", "linked", "together"]


class Lifetime(NamedTuple):
    """What linked accounts promise together: the sum, because each of them is a fresh budget."""

    accounts: tuple[str, ...]
    epsilon: Fraction
    delta: Fraction

    def to_dict(self) -> dict[str, Any]:
        """Return the promise in plain types, its numbers exact, as text."""
        return {"accounts": [*self.accounts], "epsilon": str(self.epsilon), "delta": str(self.delta)}

    def __str__(self) -> str:
        return f"({float(self.epsilon):.12g}, {float(self.delta):.12g})-DP over {', '.join(self.accounts)}"


def linked(heads: Sequence[Head], name: str) -> list[str]:
    """Return the names of an account and of all that are linked to it, before and after, in order."""
    names = [name]
    for one in names:
        pairs = [(head.name, head.successor_of) for head in heads if one in (head.name, head.successor_of)]
        names += [other for pair in pairs for other in pair if other and other not in names]
    return sorted(names)


def together(policies: Mapping[str, Policy]) -> Lifetime:
    """Return the sum of some accounts' promises.

    Theorem: basic composition: filters with promises (e_i, d_i) together promise (sum e_i, sum d_i).
    Assumes: the accounts' policies, and how many there are, were not chosen by looking at the answers; if they
        were, the sum is a running total and not a promise made beforehand.
    """
    epsilon = sum(exact_of(policy.epsilon) for policy in policies.values())
    delta = sum(exact_of(policy.delta) for policy in policies.values())
    return Lifetime(tuple(policies), exact_of(epsilon), exact_of(delta))
