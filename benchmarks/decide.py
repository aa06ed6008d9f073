"""The cost of a price and of a decision, each compared with its lower bound.

Prints ratios with their spread over rounds, in which the machine's own speed cancels.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable

import numpy as np

import odograph as odo
from odograph.core.policy import Compiled
from timing import number, row, seconds

ROUNDS = 7


def compare(name: str, ours: Callable[[], object], floor: Callable[[], object], count: int) -> None:
    """Run both in turn and print the ratio of their times, with its spread."""
    pairs = [(seconds(ours), seconds(floor)) for _ in range(ROUNDS)]
    micro = statistics.median(a for a, _ in pairs) / count * 1e6
    print(row(f"{name}, over the floor", [a / b for a, b in pairs], note=f"{number(micro)} microseconds each"))


def running_sums(count: int, limit: float) -> float:
    """The floor of a decision: two running sums and a comparison in plain Python, nothing validated."""
    epsilon = delta = 0.0
    for _ in range(count):
        if epsilon + 0.001 <= limit and delta <= 1e-6:
            epsilon += 0.001
    return epsilon


def one_by_one(count: int) -> None:
    """Price and decide `count` requests under each filter, beside running sums in plain Python."""
    request = odo.PureDP(0.001)
    others = [odo.PureDP(float(f"{0.001 * (1 + i / count):.9g}")) for i in range(count)]
    for name in ("default", "basic", "zcdp", "exact", "renyi"):
        chosen = None if name == "default" else name
        compiled = odo.compile_policy(odo.Policy(20, 1e-6, filter=chosen))
        cost = compiled.price(request)

        def decide(compiled: Compiled = compiled, cost: odo.gate.Price = cost) -> None:
            totals = compiled.start
            for _ in range(count):
                totals = odo.gate.decide(compiled.meters, totals, cost).totals_after

        def price(compiled: Compiled = compiled) -> None:
            for _ in range(count):
                compiled.price(request)

        compare(f"decide, {name} ({len(compiled.meters)} meters)", decide, lambda: running_sums(count, 20.0), count)

        def price_new(compiled: Compiled = compiled) -> None:
            compiled.known.clear()
            for other in others:
                compiled.price(other)

        compare(f"price, {name} ({len(compiled.meters)} meters)", price, lambda: running_sums(count, 20.0), count)
        compare(f"price of new sizes, {name}", price_new, lambda: running_sums(count, 20.0), count)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="a hundredth of the work, to see that it runs")
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    one_by_one(100 if options.few else 10_000)


if __name__ == "__main__":
    main()
