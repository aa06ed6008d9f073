"""A program whose threads all open a ledger of an earlier version at once: those that its lines name, one by one.

It answers each with a line: "done", or the errors.
"""

from __future__ import annotations

import sys
import threading

import odograph as odo
from odograph.errors import OdographError
from odograph.ledger.ledger import Ledger


def upgrade(path: str) -> set[str]:
    """Read the ledger in six threads, by three objects; return what was in the way."""
    failed: set[str] = set()
    ledgers = [odo.connect(f"sqlite:///{path}", principal="tester", timeout=2) for _ in range(3)]

    def use(ledger: Ledger, *, whole: bool) -> None:
        try:
            ledger.verify() if whole else ledger.checkpoint()
        except OdographError as error:
            failed.add(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=use, args=(ledger,), kwargs={"whole": whole})
        for ledger in ledgers
        for whole in (False, True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ledger in ledgers:
        ledger.close()
    return failed


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{' '.join(sorted(upgrade(line.strip()))) or 'done'}\n")
        sys.stdout.flush()
