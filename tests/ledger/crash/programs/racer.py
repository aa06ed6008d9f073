"""A program that spends from several threads, together with others like it, every key in two processes.

    racer.py URL DEFECT NUMBER PROCESSES THREADS COUNT

It prints a line when it is ready, begins after a line of input, and prints its answers: key, receipt, whether it was
the first, and when; a refusal has no receipt.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator

from broken_stores import ledger_at
from workload import COST

from odograph.errors import BudgetExceeded
from odograph.ledger.ledger import Ledger

ACCOUNT = "narrow"


def keys(number: int, processes: int, thread: int, threads: int, count: int) -> Iterator[str]:
    """The thread's own keys, and in turn with them those of a thread of the next process."""
    for i in range(count):
        yield f"{number}-{thread}-{i}"
        yield f"{(number + 1) % processes}-{(thread + 1) % threads}-{i}"


def race(ledger: Ledger, mine: Iterator[str], answers: list[tuple[str, str, bool, int]]) -> None:
    """Ask under each key."""
    account = ledger.account(ACCOUNT)
    for key in mine:
        try:
            receipt = account.spend(COST, key=key)
        except BudgetExceeded:
            answers.append((key, "", False, time.monotonic_ns()))
        else:
            answers.append((key, receipt.id, not receipt.repeated, time.monotonic_ns()))


def main(url: str, defect: str, *numbers: int) -> None:
    """Run the threads."""
    number, processes, threads, count = numbers
    ledger = ledger_at(url, defect)
    ledger.account(ACCOUNT)  # connected before it begins
    answers: list[tuple[str, str, bool, int]] = []
    workers = [
        threading.Thread(target=race, args=(ledger, keys(number, processes, thread, threads, count), answers))
        for thread in range(threads)
    ]
    print("ready", flush=True)  # noqa: T201  the other side waits for it
    sys.stdin.readline()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps(answers))  # noqa: T201  as above
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
