"""What an account can do, whoever keeps it: in memory, in a file, behind a service."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from odograph.core.compiled import Compiled
from odograph.core.gate import Decision
from odograph.core.guarantees import GDP, ZCDP, Guarantee, PureDP
from odograph.core.planning import G, Quote
from odograph.core.policy import Policy
from odograph.errors import InvalidPolicy, UnprovenComposition

__all__ = ["Account", "check_account", "offers_of"]


class Account(Protocol):
    """The part of an account that sessions and integrations rely on."""

    @property
    def policy(self) -> Policy:
        """The policy, fixed when the account was opened."""
        ...

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, compiled once."""
        ...

    def decide(self, cost: Guarantee) -> Decision:
        """Say whether the cost would be admitted; spend nothing."""
        ...

    def largest(self, kind: type[G] | G, times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        ...

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        ...

    def spending(self, cost: Guarantee, *, note: str = "") -> AbstractContextManager[object]:
        """Charge at entry, before anything inside runs; the charge stands however the block ends."""
        ...


def check_account(account: object, who: str) -> None:
    """Raise unless it can be charged: a policy, or nothing, would be found out only by the first mechanism."""
    if not callable(getattr(account, "spending", None)):
        raise InvalidPolicy(
            f"{who} needs an account, such as Accountant(policy) or ledger.account(name), and a"
            f" {type(account).__name__} is not one"
        )


def offers_of(account: Account) -> list[Guarantee]:
    """Return the largest next request of each kind that the policy takes, of pure, Gaussian and zCDP ones."""
    found: list[Guarantee] = []
    for kind in (PureDP, GDP, ZCDP):
        try:
            offer = account.largest(kind)
        except UnprovenComposition:
            continue
        if offer is not None:
            found.append(offer)
    return found
