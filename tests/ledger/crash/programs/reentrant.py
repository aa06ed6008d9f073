"""A program whose signal handlers and finalizers use the ledger in the middle of what their own thread does with it.

    reentrant.py URL DEFECT TIMEOUT inside     in the middle of a transaction, with every verb
    reentrant.py URL DEFECT TIMEOUT anywhere   at any moment, while other threads spend and read too

It prints what came of each request as a line of JSON: the key, and "done" or the name of the error; at the end, under
"charged", which keys were. If it is blocked for TIMEOUT seconds, it prints where, and fails.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from broken_stores import backend_at
from racer import ACCOUNT
from workload import COST, policy

from odograph.errors import LedgerBusy, OdographError
from odograph.ledger.commands import Charge
from odograph.ledger.ledger import Ledger

SIGNALS: Final = 1000 if os.environ.get("ODOGRAPH_FULL") == "1" else 60  # that come anywhere
SPENDS: Final = (
    100  # of another thread between two of them: a handler that verifies must not meet a ledger without end
)
VERBS: Final[dict[str, Callable[[Ledger, str], object]]] = {
    "spend": lambda one, key: one.account(ACCOUNT).spend(COST, key=key),
    "other": lambda one, key: one.acting_as("other").account(ACCOUNT).spend(COST, key=key),
    "reserve": lambda one, key: one.account(ACCOUNT).reserve(COST, key=key),
    "open": lambda one, key: one.open_account(key, policy(1)),
    "totals": lambda one, _: one.account(ACCOUNT).totals,
    "history": lambda one, _: one.account(ACCOUNT).history(),
    "verify": lambda one, _: one.verify(),
    "export": lambda one, _: one.export(io.StringIO()),
    "close": lambda one, _: one.close(),
}


def say(key: str, what: str) -> None:
    """Print a line, in one call."""
    sys.stdout.write(json.dumps([key, what]) + "\n")


def outcome(key: str, ask: Callable[[], object]) -> None:
    """Print the outcome of a request."""
    try:
        ask()
    except OdographError as error:
        say(key, type(error).__name__)
    else:
        say(key, "done")


class Dropped:
    """Calls something when it is collected."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.itself = self

    def __del__(self) -> None:
        self.call()


def inside(ledger: Ledger) -> None:
    """Interrupt after the totals were read, before anything is written."""
    pending: list[Callable[[], object]] = []
    write = Charge._write  # noqa: SLF001  where it is interrupted

    def interrupted(*args: Any) -> Any:  # noqa: ANN401  as the method has them
        if pending:
            pending.pop()()
        return write(*args)

    Charge._write = interrupted  # type: ignore[method-assign, assignment]  # noqa: SLF001
    for how in ("signal", "finalizer", "uncaught"):
        for verb, ask in VERBS.items():
            key = f"{how}-{verb}"

            def handle(*_: Any, key: str = key, ask: Callable[[Ledger, str], object] = ask) -> None:
                outcome(f"inner-{key}", lambda: ask(ledger, f"inner-{key}"))

            def raise_(*_: Any, key: str = key, ask: Callable[[Ledger, str], object] = ask) -> None:
                say(f"inner-{key}", "LedgerBusy")
                ask(ledger, f"inner-{key}")
                say(f"inner-{key}", "done")

            def collect(handle: Callable[[], object] = handle) -> None:
                Dropped(handle)
                gc.collect()

            signal.signal(signal.SIGUSR1, raise_ if how == "uncaught" else handle)
            pending.append(collect if how == "finalizer" else lambda: signal.raise_signal(signal.SIGUSR1))
            outcome(f"outer-{key}", lambda key=key: ledger.spend({ACCOUNT: COST}, key=f"outer-{key}"))  # type: ignore[misc]


def anywhere(ledger: Ledger) -> None:
    """Interrupt at random moments."""
    came: list[str] = []
    over = threading.Event()

    def handle(*_: Any) -> None:
        with suppress(LedgerBusy):
            VERBS[random.choice(["totals", "history", "verify"])](ledger, "")  # noqa: S311  any will do
        outcome(f"inner-{len(came)}", lambda: ledger.spend({ACCOUNT: COST}, key=f"inner-{len(came)}"))
        came.append("")

    def spend(keys: Iterator[str]) -> None:
        for key in keys:
            outcome(key, lambda key=key: ledger.spend({ACCOUNT: COST}, key=key))  # type: ignore[misc]
            ledger.account(ACCOUNT).history(0, 20)

    def thread_keys() -> Iterator[str]:
        left = SPENDS
        while not over.is_set():
            if left + SPENDS * len(came) > 0:
                left -= 1
                yield f"thread-{random.getrandbits(64)}"
            else:
                time.sleep(0.001)

    def main_keys() -> Iterator[str]:
        while len(came) < SIGNALS:
            if signal.getitimer(signal.ITIMER_REAL) == (0, 0):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.004))  # noqa: S311  any moment will do
            yield f"main-{random.getrandbits(64)}"

    signal.signal(signal.SIGALRM, handle)
    thread = threading.Thread(target=spend, args=(thread_keys(),))
    thread.start()
    try:
        spend(main_keys())
    finally:
        over.set()
        thread.join()


def main(url: str, defect: str, timeout: str, where: str) -> None:
    """Be interrupted, and spend once more when it is over."""
    faulthandler.dump_traceback_later(float(timeout), exit=True)
    backend = backend_at(url, defect)
    with Ledger(backend) as ledger:
        ledger.open_account(ACCOUNT, policy(10**6))
        {"inside": inside, "anywhere": anywhere}[where](ledger)
        ledger.spend({ACCOUNT: COST}, key="last")
        ledger.verify()
        found = ledger.account(ACCOUNT).history(0, 10**6)
        say("charged", " ".join(past.entry.key for past in found if past.entry.guarantee is not None))


if __name__ == "__main__":
    main(*sys.argv[1:])
