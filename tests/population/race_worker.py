"""A program in which several processes charge one population at the same moment.

    race_worker.py URL TWIN PROCESSES CHARGES

Each process opens the population on its own, waits until all have, and charges; a charge that ends in `LedgerBusy` is
asked for again with its key. The program writes JSON: how long it took, how often a charge ended so, and how many
versions were written. TWIN is empty, or says what is broken: there is "no lease", or "no patience" with it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import odograph as odo
from odograph import Population, PureDP
from odograph.errors import LedgerBusy
from odograph.population import version_store
from odograph.population.version_store import Versions

PRICE = PureDP("1e-15")  # one unit


def no_lease(_: Versions) -> AbstractContextManager[bool]:
    """Wait for no other process."""
    return nullcontext(enter_result=False)


def break_by(twin: str) -> None:
    """Break what is named."""
    if twin == "no lease":
        Versions.lease = no_lease  # type: ignore[assignment, method-assign]
    if twin == "no patience":
        version_store.LEASE_TIMEOUT = 0.0  # type: ignore[misc]


def charge(url: str, number: int, charges: int, start: int, answers: int) -> None:
    """Charge as one of several processes, and write what became of it."""
    begun, busy, begin = 0, 0, Versions.begin

    def counted(versions: Versions, version: int) -> Path:
        nonlocal begun
        begun += 1
        return begin(versions, version)

    Versions.begin = counted  # type: ignore[assignment, method-assign]
    people = Population.open("people", ledger=odo.connect(url, principal="ana"))
    os.write(answers, b"r")
    os.read(start, 1)
    for one in range(charges):
        while True:
            try:
                people.charge(PRICE, key=f"{number}-{one}")
                break
            except LedgerBusy:
                busy += 1
    os.write(answers, json.dumps([busy, begun]).encode() + b"\n")


def race(url: str, processes: int, charges: int) -> dict[str, float]:
    """Start the processes, let them go at once, and add up what they did."""
    (waiting, start), (found, answers) = os.pipe(), os.pipe()
    children = []
    for number in range(processes):
        child = os.fork()
        if not child:
            try:
                charge(url, number, charges, waiting, answers)
            finally:
                os._exit(0)
        children.append(child)
    os.close(answers)
    ready = 0
    while ready < processes:
        ready += len(os.read(found, 1))
    began = time.perf_counter()
    os.write(start, b"g" * processes)
    for child in children:
        os.waitpid(child, 0)
    seconds = time.perf_counter() - began
    with os.fdopen(found) as lines:
        done = [json.loads(line) for line in lines]
    busy, begun = (sum(column) for column in zip(*done, strict=True))
    return {"seconds": seconds, "processes": len(done), "busy": busy, "begun": begun}


def main(url: str, twin: str, processes: str, charges: str) -> None:
    """Race, with everything as it should be or broken."""
    break_by(twin)
    sys.stdout.write(json.dumps(race(url, int(processes), int(charges))))


if __name__ == "__main__":
    main(*sys.argv[1:])
