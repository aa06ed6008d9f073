"""The cost of a spend with its check, compared with plain sums of floats, and the memory of an entry.

The sequence cycles through 256 different epsilons, as analysts and training loops choose among a few costs. *Ready*
means that the accountant was given each guarantee before, and has its price. *New* is a sequence without repeated
epsilons. The policy is the default one, with no choice made, or the filter `zcdp`, as in the results of 0.1.0. Prints
ratios with their spread over rounds; `peers.py` has other libraries, and the growth with n.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tracemalloc
from collections.abc import Callable, Sequence

import odograph as odo
from timing import number, row, seconds

ROUNDS = 7
CYCLE = 256  # different requests in the sequence
DELTA = 1e-6

Spend = Callable[[int], object]  # spend the request of that index


def sizes(count: int) -> list[float]:
    """Return `count` different epsilons, small enough for all of them to be admitted."""
    draw = random.Random(7)  # noqa: S311  not cryptography
    return [draw.uniform(1e-7, 2e-6) for _ in range(count)]


def roomy(chosen: str | None = None, keep: int | None = None) -> odo.Accountant:
    """Return an accountant that a million of these requests do not exhaust, with the default policy or a filter."""
    return odo.Accountant(odo.Policy(20, DELTA, filter=chosen), keep=keep)


def ready(epsilons: Sequence[float], chosen: str | None = None) -> Spend:
    """Spend the same guarantees again and again: each was priced at its first spend."""
    account = roomy(chosen)
    pool = [odo.PureDP(epsilon) for epsilon in epsilons[:CYCLE]]
    for cost in pool:
        account.spend(cost)
    return lambda i: account.spend(pool[i % CYCLE])


def new(epsilons: Sequence[float], chosen: str | None = None) -> Spend:
    """Spend a guarantee that was never spent before, every time."""
    account = roomy(chosen)
    pool = [odo.PureDP(epsilon) for epsilon in epsilons]
    return lambda i: account.spend(pool[i])


def floor(epsilons: Sequence[float]) -> Spend:
    """Add floats up in plain Python, nothing validated."""
    total = [0.0, 0.0]

    def spend(i: int) -> bool:
        epsilon = epsilons[i]
        if total[0] + epsilon <= 20.0 and total[1] <= DELTA:
            total[0] += epsilon
        return True

    return spend


def window(spend: Spend, start: int, count: int) -> float:
    """Return the processor time per spend of the next window."""

    def spends() -> None:
        for i in range(start, start + count):
            spend(i)

    return seconds(spends) / count


def beside_sums(count: int) -> None:
    """Time ready and new spends and plain sums in turn, round after round."""
    epsilons = sizes(ROUNDS * count)
    made = {
        "ready": ready(epsilons),
        "new": new(epsilons),
        "zcdp, ready": ready(epsilons, "zcdp"),
        "zcdp, new": new(epsilons, "zcdp"),
        "floor": floor(epsilons),
    }
    rounds = [{name: window(spend, k * count, count) for name, spend in made.items()} for k in range(ROUNDS)]
    for name in (name for name in made if name != "floor"):
        micro = 1e6 * statistics.median(one[name] for one in rounds)
        ratios = [one[name] / one["floor"] for one in rounds]
        print(row(f"a spend, {name}, over plain sums", ratios, note=f"{number(micro)} microseconds each"))


def kept(work: Callable[[int], object], count: int) -> float:
    """Return the bytes that one call leaves behind."""
    tracemalloc.start()
    for i in range(count):
        work(i)
    left = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    return left


def memory(count: int) -> None:
    """Print what an entry keeps in memory, over a tuple of two floats in a list."""
    epsilons = sizes(count)
    pairs: list[tuple[float, float]] = []
    floor_bytes = kept(lambda i: pairs.append((2 * epsilons[i], 0.0)), count)
    for name, keep, pool in (
        ("guarantee and price shared", None, [odo.PureDP(e) for e in epsilons[:CYCLE]]),
        ("guarantee and price of its own", None, [odo.PureDP(e) for e in epsilons]),
        ("totals only", 0, [odo.PureDP(e) for e in epsilons[:CYCLE]]),
    ):
        account = roomy(keep=keep)
        for cost in pool[:CYCLE]:
            account.spend(cost)
        one = kept(lambda i, a=account, p=pool: a.spend(p[i % len(p)]), count)  # type: ignore[misc]
        note = f"{number(one)} bytes against {number(floor_bytes)}"
        print(row(f"bytes of an entry, {name}, over a tuple in a list", [one / floor_bytes], note=note))


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="a hundredth of the work, to see that it runs")
    few = parser.parse_args().few
    print(f"Python {platform.python_version()}, {platform.machine()}")
    beside_sums(100 if few else 5_000)
    memory(1_000 if few else 50_000)


if __name__ == "__main__":
    main()
