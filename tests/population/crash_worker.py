"""A program that charges a population, one step after the other, until it is killed.

    crash_worker.py URL LOCATION ENGINE TWIN FIRST

It charges the steps from FIRST on, and writes the number of each that was answered. If FIRST is -, it reads what to
do from its input instead, a line at a time, and does it in a process of its own, which is there sooner: FIRST, or
FIRST and the point at which that process dies in its second step. It writes `pid` and the process, and `gone` when
that has ended.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from population_helpers import small_session

import odograph as odo
from odograph import Guarantee, Population, Prices, PureDP
from odograph.display import Progress
from odograph.ledger.engine import LedgerEngine
from odograph.population import population as module
from odograph.population import version_store
from odograph.population.engines import EngineContext
from odograph.population.engines.duckdb import DuckDBEngine
from odograph.population.engines.numpy import NumpyEngine
from odograph.population.prices import PriceTable
from odograph.population.version_store import ObjectVersions, Versions

PEOPLE = 3000
KILLED = (
    "charge.before",
    "charge.after",
    "finish.before",
    "finish.after",
    "submit.before",
    "submit.after",
    "clean.before",
)
SYNCS = 4  # files of a version of the NumPy engine, and folders


def prices_of(number: int) -> Guarantee | Prices:
    """What is asked for in a step: of everybody the same, or of some people one of two prices."""
    one, two = PureDP(f"{number + 1}e-15"), PureDP(f"{number + 2}e-15")
    if number % 2 == 0:
        return one
    some = np.arange(number % 3, PEOPLE, 3)
    return Prices([one, two], some % 2, ids=some)


def charged(number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What everybody pays for that, in units."""
    everybody = np.arange(PEOPLE)
    if number % 2 == 0:
        return np.full(PEOPLE, number + 1)
    return np.where(everybody % 3 == number % 3, number + 1 + everybody % 2, 0)


class OverwritingEngine(NumpyEngine):
    """Writes over the version before, too."""

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        super().charge(context, before, after, prices, progress)
        totals = np.fromfile(after / "total-1", dtype=np.int64).tobytes()
        with (before / "total-1").open("r+b", 0) as file:
            for part in range(0, len(totals), 1000):
                file.write(totals[part : part + 1000])
                time.sleep(0.001)


class LateChargeEngine(NumpyEngine):
    """Writes its files a moment after it said so: the ledger points to nothing until then."""

    writing: threading.Thread | None = None

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        if self.writing is not None:
            self.writing.join()
        work = super().charge

        def later() -> None:
            time.sleep(0.02)
            work(context, before, after, prices, progress)

        self.writing = threading.Thread(target=later)
        self.writing.start()


class PointerFirst(ObjectVersions):
    """Lets the ledger point to a version, and uploads it after that."""

    def finish(self, folder: Path) -> None:
        self._unsent = folder

    def clean(self, version: int, kept: Collection[str]) -> None:
        time.sleep(0.02)
        super().finish(self._unsent)
        super().clean(version, kept)


class Forgets(Population):
    """Charges under another key than it was told."""

    def charge(
        self, prices: Prices | Guarantee, *, key: str, note: str = "", progress: Progress | None = None
    ) -> module.Participants:
        return super().charge(prices, key=f"{key} {secrets.token_hex(4)}", note=note, progress=progress)


def opened(url: str, location: str, twin: str, session: Any = None) -> Population:  # noqa: ANN401  of Spark
    """Open the population, whole or broken in the way that is named."""
    kind = Forgets if twin == "forgets" else Population
    people = kind.open("people", ledger=odo.connect(url, principal="ana"), location=location, session=session)
    if twin in ("in place", "late"):
        people._engine = OverwritingEngine() if twin == "in place" else LateChargeEngine()  # noqa: SLF001  the broken ones
    if twin == "pointer first":
        people._context = people._context._replace(versions=PointerFirst(location))  # noqa: SLF001  as above
    return people


def die(*_: object, **__: object) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def around(owner: Any, name: str, when: str) -> None:  # noqa: ANN401  a class or a module
    """Let a function kill the process before or after it has done its work."""
    work: Callable[..., object] = getattr(owner, name)

    def killed(*arguments: object, **named: object) -> object:
        if when == "before":
            die()
        found = work(*arguments, **named)
        die()
        return found

    setattr(owner, name, killed)


def arm(point: str) -> None:
    """Let the process die at a point of the next step."""
    name, _, when = point.partition(".")
    if name in ("sync", "_upload"):
        left, work = [int(when)], getattr(version_store, name)

        def counted(*arguments: object) -> None:
            if not left[0]:
                die()
            left[0] -= 1
            work(*arguments)

        setattr(version_store, name, counted)
    else:
        kept: type[Versions] = ObjectVersions if os.environ.get("FSSPEC_S3_ENDPOINT_URL") else Versions
        owners = {"charge": NumpyEngine, "finish": kept, "submit": LedgerEngine, "clean": kept}
        around(owners[name], name, when)


def charge(people: Population, first: int, point: str = "") -> None:
    """Charge until killed."""
    number = first
    while True:
        people.charge(prices_of(number), key=f"step {number}")
        os.write(1, f"{number}\n".encode())
        number += 1
        if point:
            arm(point)


def serve(url: str, location: str, twin: str) -> None:
    """Do what the lines say, each in a process of its own."""
    for line in sys.stdin:
        first, _, point = line.strip().partition(" ")
        child = os.fork()
        if not child:
            charge(opened(url, location, twin), int(first), point)
        os.write(1, f"pid {child}\n".encode())
        os.waitpid(child, 0)
        os.write(1, b"gone\n")


def main(url: str, location: str, engine: str, twin: str, first: str) -> None:
    """Charge, or wait to be told."""
    if first == "-":
        DuckDBEngine()  # what is loaded now need not be loaded by every process
        serve(url, location, twin)
    with ExitStack() as stack:
        session = None
        if engine == "spark":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            session = stack.enter_context(small_session(folder))
        charge(opened(url, location, twin, session), int(first))


if __name__ == "__main__":
    main(*sys.argv[1:])
