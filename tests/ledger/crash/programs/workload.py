"""What the spending programs charge, and what must hold afterwards in any case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import odograph as odo
from odograph.ledger.ledger import Ledger

COST = odo.PureDP(0.001)
PER_EPSILON = 1000  # how many of them make one
RIGHT = 60  # how many the right account of a round admits
NAMES = ("left", "right")


def policy(requests: int) -> odo.Policy:
    """A policy that admits so many requests."""
    return odo.Policy(requests / PER_EPSILON, 1e-6, filter="basic")


def open_round(ledger: Ledger, prefix: str) -> None:
    """Open the accounts of a round below one that all rounds share; the right one soon runs out."""
    ledger.open_account("all", policy(10**6), key="all")  # the first round opens it, the others find it
    ledger.open_account(f"{prefix}-left", policy(10**6), parent="all")
    ledger.open_account(f"{prefix}-right", policy(RIGHT), parent="all")


def costs_of(key: str) -> dict[str, odo.PureDP]:
    """What is asked under a key `round-thread-number`: of the left account, the right one, or both."""
    prefix, _, number = key.split("-")
    chosen = (NAMES[:1], NAMES[1:], NAMES)[int(number) % 3]
    return {f"{prefix}-{name}": COST for name in chosen}


def charges(ledger: Ledger) -> dict[str, Counter[str]]:
    """Count the charges under each key, by account."""
    found: dict[str, Counter[str]] = {}
    for account in ledger.accounts():
        for past in account.history(0, 10**6):
            if past.entry.verb == "spend":
                found.setdefault(past.entry.key, Counter())[account.name] += 1
    return found


def answers(text: str) -> dict[str, str]:
    """Read what a spending program printed: acknowledged keys and their receipts; a torn last line does not count."""
    whole = text[: text.rfind("\n") + 1]
    return dict(line.split() for line in whole.splitlines())


def check(ledger: Ledger, acknowledged: Mapping[str, str]) -> None:
    """Every acknowledged key is charged, none twice, in all its accounts or none; limits hold; the chain verifies."""
    ledger.verify()
    found = charges(ledger)
    lost = acknowledged.keys() - found.keys()
    assert not lost, f"{len(lost)} acknowledged charges are gone: {sorted(lost)[:3]}"
    totals: Counter[str] = Counter()
    for key, charged in found.items():
        costs = costs_of(key)
        assert charged == Counter({**dict.fromkeys(costs, 1), "all": len(costs)}), key
        totals += charged
    for account in ledger.accounts():
        assert account.totals.steps == totals[account.name]
        assert account.policy.epsilon is not None
        assert totals[account.name] <= account.policy.epsilon * PER_EPSILON


def ask_again(ledger: Ledger, acknowledged: Mapping[str, str]) -> None:
    """The same keys again give the same receipts, and charge nothing."""
    before = ledger.checkpoint()
    for key, receipt in acknowledged.items():
        again = ledger.spend(costs_of(key), key=key)
        assert again.repeated
        assert again.id == receipt
    assert ledger.checkpoint() == before
