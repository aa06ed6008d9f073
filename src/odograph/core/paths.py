"""Accounts below accounts: a request passes its own limit and every ancestor's, or none of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from odograph.core.compiled import Compiled, price
from odograph.core.decide import Decision, Totals, decide
from odograph.core.guarantees import Guarantee
from odograph.core.offers import G, Quote, largest_that, listed

__all__ = ["Path", "Station", "ask_path", "largest_on_path", "quote_path", "with_offer"]


class Station(NamedTuple):
    """One account on the way, and what it has spent."""

    name: str
    compiled: Compiled
    totals: Totals


# From the account at the top down to the one that asks.
Path: TypeAlias = Sequence[Station]


def ask_path(path: Path, cost: Guarantee) -> Decision:
    """Decide a cost at every station; return one's own decision, or the first refusal with what would fit instead.

    Theorem: sub-budgets: an account that sees every step below it keeps its promise about all of them.
    Assumes: an admitted cost is charged at every station of the path, or at none.
    """
    return _ask(path, cost)[0]


def quote_path(path: Path, costs: Iterable[Guarantee]) -> Quote:
    """Decide several costs in order, all or nothing, spending nothing."""
    own = path[-1].totals
    decisions: list[Decision] = []
    for cost in listed(costs):
        decision, path = _ask(path, cost)
        decisions.append(decision)
        if not decision.admitted:
            return Quote(admitted=False, decisions=tuple(decisions), totals_after=own)
    return Quote(admitted=True, decisions=tuple(decisions), totals_after=path[-1].totals)


def largest_on_path(path: Path, kind: type[G] | G, times: int = 1) -> G | None:
    """Return the largest guarantee of a kind of which `times` equal requests pass every station, or None."""

    def admitted(cost: Guarantee, count: int) -> bool:
        return all(
            decide(station.compiled.meters, station.totals, price(station.compiled, cost).times(count)).admitted
            for station in path
        )

    return largest_that(kind, times, admitted)


def with_offer(path: Path, refusal: Decision, name: str) -> Decision:
    """Return a refusal with the name of the account that refused, and the largest request that all would admit."""
    offer = None if refusal.request is None else largest_on_path(path, refusal.request)
    return refusal._replace(largest=offer, account=name)


def _ask(path: Path, cost: Guarantee) -> tuple[Decision, Path]:
    # All are priced before any is asked: an account with no theorem for the cost says so first.
    decisions = [
        decide(station.compiled.meters, station.totals, asked, cost)
        for station, asked in [(station, price(station.compiled, cost)) for station in path]
    ]
    for station, decision in zip(path, decisions, strict=True):
        if not decision.admitted:
            return with_offer(path, decision, station.name), path
    after = [station._replace(totals=d.totals_after) for station, d in zip(path, decisions, strict=True)]
    return decisions[-1], after
