"""A program that is interrupted, as from the keyboard, while it spends.

interrupted.py FILE waiting              while it waits for another thread that writes
interrupted.py FILE locked               while another program holds the file
interrupted.py FILE anywhere THREADS N   N times, at any moment, while so many other threads spend too
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from typing import cast

from broken_stores import ledger_at
from workload import COST

from odograph.errors import LedgerBusy, OutcomeUnknown
from odograph.ledger.ledger import Ledger
from odograph.ledger.local_backend import LocalBackend


def interrupt_when(ready: threading.Event) -> None:
    """Interrupt the main thread, a moment after the event."""
    ready.wait()
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def queued(ledger: Ledger, path: str) -> None:
    """The main thread is the first of three that wait for one that cannot write."""
    writer = cast("LocalBackend", ledger.backend).writer
    threads = [
        threading.Thread(target=ledger.spend, args=({"a": COST},), kwargs={"key": str(number)}) for number in range(3)
    ]
    everyone_waits = threading.Event()

    def fill() -> None:
        for number in (1, 2):
            while writer.waiting < number:
                time.sleep(0.001)
            threads[number].start()
        while writer.waiting < 3:
            time.sleep(0.001)
        everyone_waits.set()

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        threads[0].start()
        time.sleep(0.2)
        threading.Thread(target=fill).start()
        threading.Thread(target=interrupt_when, args=(everyone_waits,)).start()
        try:
            ledger.spend({"a": COST}, key="interrupted")
        except KeyboardInterrupt:
            print(f"interrupted, {writer.waiting} still wait")  # noqa: T201  what the test reads
    for thread in threads:
        thread.join()


def locked(ledger: Ledger, path: str) -> None:
    """The signal comes while SQLite waits, so Python hears of it when the transaction has just begun."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        now = threading.Event()
        now.set()
        threading.Thread(target=interrupt_when, args=(now,)).start()
        threading.Timer(0.5, lambda: other.execute("ROLLBACK")).start()
        try:
            ledger.spend({"a": COST}, key="interrupted")
        except KeyboardInterrupt:
            print("interrupted", flush=True)  # noqa: T201  as above
    with closing(sqlite3.connect(path, isolation_level=None, timeout=5)) as other:
        other.execute("BEGIN IMMEDIATE")
        print("nobody holds it", flush=True)  # noqa: T201  as above


def anywhere(ledger: Ledger, threads: int, interrupts: int) -> None:
    """Spend until it is interrupted often enough; a thread that stays blocked is reported by the alarm."""
    done = threading.Event()

    def spend(start: str, limit: int) -> None:
        for number in range(limit):
            if done.is_set():
                return
            try:
                ledger.spend({"a": COST}, key=f"{start}-{number}")
            except (LedgerBusy, OutcomeUnknown):  # the writer of its group was interrupted, or the one before it
                continue
            os.write(1, f"{start}-{number}\n".encode())

    others = [threading.Thread(target=spend, args=(f"thread{thread}", 10**9)) for thread in range(threads)]
    for other in others:
        other.start()
    for number in range(interrupts):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.004))  # noqa: S311  any moment will do
            spend(f"main{number}", 10**9)
        except KeyboardInterrupt:
            continue
    done.set()
    for other in others:
        other.join()


def main(url: str, how: str, *numbers: int) -> None:
    """Spend once more when it is over."""
    faulthandler.dump_traceback_later(40, exit=True)  # if it is blocked, it prints where
    for number in (signal.SIGALRM, signal.SIGINT):  # a program in the background may have been told to ignore it
        signal.signal(number, signal.default_int_handler)
    ledger = ledger_at(url)
    ledger.spend({"a": COST}, key="first")
    if how == "anywhere":
        anywhere(ledger, *numbers)
    else:
        {"waiting": queued, "locked": locked}[how](ledger, url.removeprefix("sqlite:///"))
    ledger.spend({"a": COST}, key="last")
    ledger.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
