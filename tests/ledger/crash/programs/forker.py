"""A program that shares one connected ledger with its forked children.

    forker.py URL DEFECT BUSY TIMEOUT

BUSY threads of its own spend meanwhile. With the defect `shares` the store takes no notice of forks. It ends with the
number of children that failed, or were not done after TIMEOUT seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback

from broken_stores import backend_at
from racer import ACCOUNT
from workload import COST

from odograph.ledger.ledger import Ledger

CHILDREN = 4
THREADS = 4  # in each child
COUNT = 10  # charges of each thread


def spend(ledger: Ledger, start: str, failed: list[str]) -> None:
    """Spend under one key after the other."""
    try:
        for number in range(COUNT):
            ledger.spend({ACCOUNT: COST}, key=f"{start}-{number}")
    except BaseException:  # noqa: BLE001  it is reported, and counted
        failed.append(traceback.format_exc())


def begin(ledger: Ledger, start: str, threads: int, failed: list[str]) -> list[threading.Thread]:
    """Spend from several threads that begin at once."""
    workers = [
        threading.Thread(target=spend, args=(ledger, f"{start}-{thread}", failed)) for thread in range(threads)
    ]
    for worker in workers:
        worker.start()
    return workers


def end(workers: list[threading.Thread], failed: list[str]) -> int:
    """Wait for the threads, and count those that failed."""
    for worker in workers:
        worker.join()
    sys.stderr.write("".join(failed))
    return len(failed)


def main(url: str, defect: str, busy: int, timeout: int) -> int:
    """Fork, perhaps while threads of this process write; all use the ledger that was connected before."""
    sys.setswitchinterval(1e-5)  # threads change places at more moments
    signal.alarm(4 * timeout)  # a defect may leave this process waiting
    backend = backend_at(url)
    ledger = Ledger(backend)
    ledger.spend({ACCOUNT: COST}, key="parent-first")
    if defect == "shares":
        store = backend.store
        for name in {"forking", "after_fork"} & {*dir(store)}:
            setattr(store, name, lambda: (None for _ in range(1)))  # a generator that holds nothing
    failed: list[str] = []
    workers = begin(ledger, "parent", busy, failed)
    pids = []
    for child in range(CHILDREN):
        pid = os.fork()
        if not pid:
            signal.alarm(timeout)
            failed.clear()
            os._exit(end(begin(ledger, f"child{child}", THREADS, failed), failed))
        pids.append(pid)
    lost = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    lost += end(workers, failed)
    ledger.close()
    return lost


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
