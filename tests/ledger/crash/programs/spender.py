"""A program that spends with known keys from several threads until it is killed, or so many times.

    spender.py URL DEFECT ROUND THREADS COUNT

It writes each acknowledged key to its output, in one call. What could not be answered is asked again, with its key.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from broken_stores import ledger_at
from workload import costs_of

from odograph.errors import ERROR_TABLE, BudgetExceeded, LedgerError, OutcomeUnknown
from odograph.ledger.ledger import Ledger

ASKED, ANSWERED = 100, 200  # descriptors of the first thread


def ask(ledger: Ledger, key: str) -> str:
    """Spend under a key, again and again until there is an answer; give the receipt, or nothing if it was refused."""
    while True:
        try:
            return ledger.spend(costs_of(key), key=key).id
        except BudgetExceeded:
            return ""
        except (LedgerError, OutcomeUnknown) as error:
            if not ERROR_TABLE[type(error)].retryable:
                raise
            time.sleep(0.01)


def spend(ledger: Ledger, prefix: str, thread: int, count: int) -> None:
    """Spend under one key after the other; say on standard error what is asked, on standard output what is answered.

    Each thread has copies of these descriptors, with numbers of its own: a log of system calls tells them apart.
    """
    asked, answered = os.dup2(2, ASKED + thread), os.dup2(1, ANSWERED + thread)
    for number in range(count):
        key = f"{prefix}-{thread}-{number}"
        os.write(asked, f"{key}\n".encode())
        if receipt := ask(ledger, key):
            os.write(answered, f"{key} {receipt}\n".encode())


def main(url: str, defect: str, prefix: str, threads: str, count: str) -> None:
    """Run the threads."""
    ledger = ledger_at(url, defect)
    workers = [
        threading.Thread(target=spend, args=(ledger, prefix, thread, int(count))) for thread in range(int(threads))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    ledger.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
