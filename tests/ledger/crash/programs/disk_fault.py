"""A program that spends before, during and after a fault of its disk, and prints what came of each as a line of JSON.

    disk_fault.py FILE VARIABLE=VALUE

The variable is one of the system-call shim's. What comes of a charge is [key, "made" or "repeated"], or [key, name of
the error, message]; a charge that failed during the fault is asked for again when the fault is gone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator

from broken_stores import ledger_at
from workload import COST, policy

from odograph.errors import OdographError
from odograph.ledger.ledger import Ledger


def outcome(key: str, charge: Callable[[], bool]) -> list[str]:
    """Return the outcome of a charge."""
    try:
        return [key, "repeated" if charge() else "made"]
    except OdographError as error:
        return [key, type(error).__name__, str(error)]


def spend(ledger: Ledger, keys: Iterator[str]) -> list[list[str]]:
    """Spend under each key."""
    return [outcome(key, lambda key=key: ledger.account("a").spend(COST, key=key).repeated) for key in keys]  # type: ignore[misc]


def main(path: str, setting: str) -> None:
    """Spend, with the fault in the middle."""
    variable, _, value = setting.partition("=")
    ledger = ledger_at(f"sqlite:///{path}")
    ledger.open_account("a", policy(1000))
    lines = spend(ledger, (f"before-{i}" for i in range(3)))
    os.environ[variable] = value
    during = spend(ledger, (f"during-{i}" for i in range(3)))
    del os.environ[variable]
    failed = [line[0] for line in during if len(line) == 3]
    lines += during + spend(ledger, iter(failed)) + spend(ledger, (f"after-{i}" for i in range(3)))
    sys.stdout.write(json.dumps(lines))
    sys.stdout.flush()
    os._exit(0)  # without a clean end: what was acknowledged must be there all the same


if __name__ == "__main__":
    main(*sys.argv[1:])
