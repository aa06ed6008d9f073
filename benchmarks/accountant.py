"""The cost of the n-th adaptive spend with its check, beside the peers, on the same heterogeneous requests.

The sequence cycles through 256 different epsilons, as analysts and training loops choose among some costs. *Ready*
means that: the accountant was given each guarantee before, and has its price. The peers are given the same sequence,
as ready objects of their own (events, measurements). *New* is a sequence in which no epsilon comes twice. Prints
ratios with their spread over rounds.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import dp_accounting
import opendp.prelude as dp
from dp_accounting.rdp import RdpAccountant

import odograph as odo
from timing import ratio, seconds

ROUNDS = 5
WINDOW = 100  # spends of a peer that are timed at each n
CYCLE = 256  # different requests in the sequence
MANY = 5_000  # spends of ours: the windows then last about as long, and no one's caches are colder
DELTA = 1e-6

Spend = Callable[[int], object]  # spend the request of that index


def sizes(count: int) -> list[float]:
    """Return as many different epsilons, small enough for a million of them."""
    draw = random.Random(7)  # noqa: S311  not cryptography
    return [draw.uniform(1e-7, 2e-6) for _ in range(count)]


def roomy(keep: int | None = None) -> odo.Accountant:
    """Return an accountant that a million of these requests do not exhaust."""
    return odo.Accountant(odo.Policy(20, DELTA, rule="zcdp"), keep=keep)


def ready(epsilons: Sequence[float]) -> Spend:
    """Spend the same guarantees again and again: each was priced at its first spend."""
    account = roomy()
    pool = [odo.PureDP(epsilon) for epsilon in epsilons[:CYCLE]]
    for cost in pool:
        account.spend(cost)
    return lambda i: account.spend(pool[i % CYCLE])


def new(epsilons: Sequence[float]) -> Spend:
    """Spend a guarantee that was never spent before, every time."""
    account = roomy()
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


def rdp(epsilons: Sequence[float]) -> Spend:
    """Compose a Laplace event with dp-accounting's RDP accountant, and ask for epsilon."""
    accountant = RdpAccountant()
    events = [dp_accounting.LaplaceDpEvent(1.0 / epsilon) for epsilon in epsilons[:CYCLE]]

    def spend(i: int) -> bool:
        accountant.compose(events[i % CYCLE])
        return bool(accountant.get_epsilon(DELTA) <= 20.0)

    return spend


def opendp_filter(epsilons: Sequence[float]) -> Spend:
    """Pass a Laplace measurement through OpenDP's privacy filter."""
    domain: Any = dp.atom_domain(T=int)
    metric: Any = dp.absolute_distance(T=int)
    odometer = dp.c.make_fully_adaptive_composition(domain, metric, dp.max_divergence())
    queryable = dp.c.make_privacy_filter(odometer, d_in=1, d_out=20.0)(0)
    measurements = [dp.m.make_laplace(domain, metric, scale=1.0 / epsilon) for epsilon in epsilons[:CYCLE]]
    return lambda i: queryable(measurements[i % CYCLE])


def window(spend: Spend, start: int, count: int) -> float:
    """Return the processor time per spend of the next window."""

    def spends() -> None:
        for i in range(start, start + count):
            spend(i)

    return seconds(spends) / count


def beside_peers(most: int) -> None:
    """Time the n-th spend of everyone in turn, round after round."""
    own: dict[str, Callable[[Sequence[float]], Spend]] = {"ready": ready, "new": new, "floor": floor}
    peers: dict[str, Callable[[Sequence[float]], Spend]] = {"dp-accounting RDP": rdp, "OpenDP filter": opendp_filter}
    windows = dict.fromkeys(own, MANY) | dict.fromkeys(peers, WINDOW)
    for n in (size for size in (100, 1_000, 3_000) if size <= most):
        made = {name: make(sizes(n + ROUNDS * windows[name])) for name, make in (own | peers).items()}
        for spend in made.values():
            for i in range(n):
                spend(i)
        rounds = [
            {name: window(spend, n + k * windows[name], windows[name]) for name, spend in made.items()}
            for k in range(ROUNDS)
        ]
        print(f"\nspend number {n}, microseconds of processor time:")
        for name in made:
            print(f"  {name:<28} {statistics.median(r[name] for r in rounds) * 1e6:10.2f}")
        for name in peers:
            for kind in ("ready", "new"):
                print(f"  {name + ' / ' + kind:<28} {ratio([(r[name], r[kind]) for r in rounds])}")
        print(f"  {'ready / floor':<28} {ratio([(r['ready'], r['floor']) for r in rounds])}")


def growth(most: int) -> None:
    """Show that the cost of a spend does not grow with n, and what an entry keeps in memory."""
    epsilons = sizes(64)  # all priced by spend number 100
    span = 20 * WINDOW
    for keep in (None, 0):
        account = roomy(keep)
        pool = [odo.PureDP(epsilon) for epsilon in epsilons]

        def many(count: int, account: odo.Accountant = account, pool: list[odo.PureDP] = pool) -> None:
            for i in range(count):
                account.spend(pool[i & 63])

        # An early account is made and timed beside the late one, so that both meet the same machine.
        late: dict[int, list[tuple[float, float]]] = {}
        for n in (size for size in (10_000, 100_000, 1_000_000) if size <= most):
            many(n - account.totals.steps)
            pairs = []
            for _ in range(ROUNDS):
                early = roomy(keep)
                many(100, early)
                pairs.append((seconds(partial(many, span)), seconds(partial(many, span, early))))
            late[n] = pairs
        print(
            f"\ncost of spend number n over that of number 100, {'all entries' if keep is None else 'totals only'}:"
        )
        for n, pairs in late.items():
            print(f"  n = {n:<10} {ratio(pairs)}")


def memory(count: int) -> None:
    """Measure the bytes that an entry keeps, by what is new in it."""
    epsilons = sizes(count)
    for name, keep, pool in (
        ("guarantee and price shared", None, [odo.PureDP(e) for e in epsilons[:256]]),
        ("guarantee and price of its own", None, [odo.PureDP(e) for e in epsilons]),
        ("totals only", 0, [odo.PureDP(e) for e in epsilons[:256]]),
    ):
        account = roomy(keep)
        for cost in pool[:256]:
            account.spend(cost)
        tracemalloc.start()
        for i in range(count):
            account.spend(pool[i % len(pool)])
        print(f"  {name:<32} {tracemalloc.get_traced_memory()[0] / count:7.1f} bytes an entry")
        tracemalloc.stop()


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="a hundredth of the work, to see that it runs")
    few = parser.parse_args().few
    warnings.simplefilter("ignore")
    dp.enable_features("contrib")
    libraries = ", ".join(f"{name} {version(name)}" for name in ("dp-accounting", "opendp"))
    print(f"Python {platform.python_version()}, {libraries}, {platform.machine()}")
    beside_peers(100 if few else 3_000)
    growth(10_000 if few else 1_000_000)
    print("\nmemory:")
    memory(1_000 if few else 50_000)


if __name__ == "__main__":
    main()
