"""Open interactive mechanisms, ask some of them, and wait to be killed with all of them open.

Arguments: the URL of a ledger with the account "census", and how many to open. It prints a line when all are open.
"""

from __future__ import annotations

import sys
import time

import odograph as odo


def main() -> None:
    """Open, ask every second one, and wait."""
    with odo.connect(sys.argv[1], principal="ana") as ledger:
        account = ledger.account("census")
        handles = [
            account.interact(lambda: lambda query: query, cost=odo.PureDP("0.1"), key=f"key-{i}")
            for i in range(int(sys.argv[2]))
        ]
        for handle in handles[::2]:
            handle(1)
        print("open", flush=True)  # noqa: T201  the test waits for it
        time.sleep(600)


main()
