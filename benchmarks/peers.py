"""The cost of the n-th adaptive spend with its check, for every installed peer and Odograph, on similar costs.

The sequence cycles through 256 different epsilons, as analysts and training loops choose among a few costs. Each tool
spends its own mechanism, named in the table, at these epsilons (Gaussians: noise multiplier 1/epsilon), so the work
is similar but not the same. All tools get prepared objects (guarantees, events, measurements) where they have them;
Odograph has spent each once. A tool is brought to n spends in its cheapest way; then further ones are timed, each
with its check against the budget (of a peer at most n/2 more, of Odograph 10,000). Every round also times an Odograph
account with 100 spends, new in each round, and ratios are over that one. All times are processor times. Anything that
takes longer than a minute is cut. OpenDP and Tumult Core run the mechanism in the same call, so their noise is timed
too; for OpenDP a separate line says how much that is. Opacus merges equal steps that follow each other; here none do:
with one fixed noise multiplier its cost would hardly grow. Odograph has its default policy, with no choice made, and,
as in the results of 0.1.0, the filter `zcdp`.

    python benchmarks/peers.py [--few] [--only NAME] [--images FOLDER]
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import signal
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import odograph as odo
from timing import Row, failure, number, read, row, seconds

ROUNDS = 5
EARLY = 100  # spends of the Odograph account that everything is compared with
WINDOW = 2_000  # timed spends of Odograph in one round
LIMIT = 60  # seconds for one tool at one n
CYCLE = 256  # different costs in the sequence
EPSILON, DELTA = 20.0, 1e-6  # so roomy that nothing is refused
SIZES = (100, 1_000, 10_000)
LATE = (100_000, 1_000_000)  # for Odograph only
OTHER = Path(__file__).parents[1] / ".venv-tumult" / "bin" / "python"  # Tumult pins an older NumPy

Spend = Callable[[int], object]  # spend the cost of that index


class Spender(NamedTuple):
    """A budget that is being spent."""

    spend: Spend  # with the check
    fill: Spend | None = None  # without it, where the tool lets one


class Tool(NamedTuple):
    """How a tool spends adaptively."""

    package: str
    calls: str  # exactly what a spend calls
    make: Callable[[Sequence[float]], Spender]
    steps: str  # what is spent
    adaptive: bool = True  # whether the check is promised to hold when answers choose the costs
    sizes: Sequence[int] = SIZES


class Cut(Exception):
    """It took too long."""


def epsilons() -> list[float]:
    """Return the epsilons of the cycle, small enough for a million spends."""
    draw = random.Random(7)  # noqa: S311  not cryptography
    return [draw.uniform(1e-4, 2e-3) for _ in range(CYCLE)]


def cycling(spend: Callable[[Any], object], things: Sequence[Any]) -> Spend:
    """Spend one thing after the other, again and again."""
    return lambda i: spend(things[i % CYCLE])


def odograph(costs: Sequence[float], chosen: str | None = None, keep: int | None = None) -> Spender:
    """Spend from an accountant with the default policy or a filter, which keeps all entries or the given number."""
    account = odo.Accountant(odo.Policy(EPSILON, DELTA, filter=chosen), keep=keep)
    pool = [odo.PureDP(cost) for cost in costs]
    for cost in pool:  # a cost is priced at its first spend; `accountant.py` times those
        account.spend(cost)
    return Spender(cycling(account.spend, pool))


def plain(costs: Sequence[float]) -> Spender:
    """Add floats up, nothing validated: the floor."""
    total = [0.0, 0.0]

    def spend(epsilon: float) -> None:
        if total[0] + epsilon <= math.inf and total[1] <= DELTA:
            total[0] += epsilon

    return Spender(cycling(spend, costs))


def composing(accountant: Any, events: Sequence[Any]) -> Spender:  # noqa: ANN401  untyped library
    """Compose events with an accountant of dp-accounting, and ask for epsilon."""

    def spend(event: Any) -> bool:  # noqa: ANN401  untyped library
        accountant.compose(event)
        return bool(accountant.get_epsilon(DELTA) <= EPSILON)

    return Spender(cycling(spend, events), cycling(accountant.compose, events))


def dp_accounting_rdp(costs: Sequence[float]) -> Spender:
    """Use the Rényi accountant."""
    import dp_accounting  # noqa: PLC0415  a peer may be missing
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415  as above

    return composing(RdpAccountant(), [dp_accounting.LaplaceDpEvent(1 / cost) for cost in costs])


def dp_accounting_pld(costs: Sequence[float]) -> Spender:
    """Use the accountant of privacy-loss distributions."""
    import dp_accounting  # noqa: PLC0415  a peer may be missing
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415  as above

    return composing(PLDAccountant(), [dp_accounting.LaplaceDpEvent(1 / cost) for cost in costs])


def opendp_measurements(costs: Sequence[float]) -> tuple[Any, Any, list[Any]]:
    """Return OpenDP, its space, and a Laplace measurement for each cost."""
    import opendp.prelude as dp  # noqa: PLC0415  a peer may be missing

    dp.enable_features("contrib")
    domain: Any = dp.atom_domain(T=int)
    metric: Any = dp.absolute_distance(T=int)
    return dp, (domain, metric), [dp.m.make_laplace(domain, metric, scale=1 / cost) for cost in costs]


def opendp_odometer(costs: Sequence[float]) -> Spender:
    """Ask an odometer, and then for its loss."""
    dp, space, measurements = opendp_measurements(costs)
    queryable = dp.c.make_fully_adaptive_composition(*space, dp.max_divergence())(0)

    def spend(measurement: Any) -> bool:  # noqa: ANN401  untyped library
        queryable(measurement)
        return bool(queryable.privacy_loss(1) <= EPSILON)

    return Spender(cycling(spend, measurements), cycling(queryable, measurements))


def opendp_filter(costs: Sequence[float]) -> Spender:
    """Ask a filter of plain sums."""
    dp, space, measurements = opendp_measurements(costs)
    odometer = dp.c.make_fully_adaptive_composition(*space, dp.max_divergence())
    return Spender(cycling(dp.c.make_privacy_filter(odometer, d_in=1, d_out=EPSILON)(0), measurements))


def opendp_zcdp_filter(costs: Sequence[float]) -> Spender:
    """Ask a filter of zCDP."""
    dp, space, measurements = opendp_measurements(costs)
    odometer = dp.c.make_fully_adaptive_composition(*space, dp.zero_concentrated_divergence())
    converted = [dp.c.make_pureDP_to_zCDP(measurement) for measurement in measurements]
    return Spender(cycling(dp.c.make_privacy_filter(odometer, d_in=1, d_out=EPSILON)(0), converted))


def opendp_noise(costs: Sequence[float]) -> Spender:
    """Only run the measurement: what the mechanism itself costs."""
    return Spender(cycling(lambda measurement: measurement(0), opendp_measurements(costs)[2]))


def diffprivlib(costs: Sequence[float]) -> Spender:
    """Spend, which checks first."""
    from diffprivlib import BudgetAccountant  # noqa: PLC0415  a peer may be missing

    accountant = BudgetAccountant(EPSILON, DELTA, slack=DELTA)
    # Its own way to n spends costs n^2, which would end in a cut although the n-th spend itself can be timed.
    history = vars(accountant)["_BudgetAccountant__spent_budget"]
    return Spender(
        cycling(lambda cost: accountant.spend(cost, 0), costs), cycling(lambda cost: history.append((cost, 0)), costs)
    )


def opacus(name: str, costs: Sequence[float]) -> Spender:
    """Take steps of full-batch Gaussians with as much noise, and ask for epsilon."""
    from opacus import accountants  # noqa: PLC0415  a peer may be missing

    accountant = getattr(accountants, name)()

    def take(cost: float) -> None:
        accountant.step(noise_multiplier=1 / cost, sample_rate=1.0)

    def spend(cost: float) -> bool:
        take(cost)
        return bool(accountant.get_epsilon(DELTA) <= EPSILON)

    return Spender(cycling(spend, costs), cycling(take, costs))


def autodp(costs: Sequence[float]) -> Spender:
    """Compose Rényi curves of randomized response, and ask for epsilon."""
    from autodp import rdp_acct, rdp_bank  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415  may be missing

    accountant = rdp_acct.anaRDPacct()
    curves = [partial(rdp_bank.RDP_randresponse, {"p": 1 / (1 + math.exp(-cost))}) for cost in costs]

    def spend(curve: Any) -> bool:  # noqa: ANN401  untyped library
        accountant.compose_mechanism(curve)
        return bool(accountant.get_eps(DELTA) <= EPSILON)

    return Spender(cycling(spend, curves), cycling(accountant.compose_mechanism, curves))


def tumult(costs: Sequence[float]) -> Spender:
    """Measure through a privacy accountant of Tumult Core, which needs no Spark for numbers."""
    from tmlt.core import measures, metrics  # noqa: PLC0415  in an environment of its own
    from tmlt.core.domains.numpy_domains import NumpyIntegerDomain  # noqa: PLC0415  as above
    from tmlt.core.measurements import interactive_measurements, noise_mechanisms  # noqa: PLC0415  as above

    composition = interactive_measurements.SequentialComposition(
        input_domain=NumpyIntegerDomain(),
        input_metric=metrics.AbsoluteDifference(),
        output_measure=measures.PureDP(),
        d_in=1,
        privacy_budget=int(EPSILON),
    )
    accountant = interactive_measurements.PrivacyAccountant.launch(composition, 0)
    return Spender(
        cycling(accountant.measure, [noise_mechanisms.AddGeometricNoise(round(1 / cost)) for cost in costs])
    )


OWN = {
    "Odograph": Tool("odograph", "`account.spend(cost)`", odograph, "epsilon-DP", sizes=(*SIZES, *LATE)),
    "Odograph, totals only": Tool(
        "odograph",
        "`account.spend(cost)`, `keep=0`",
        partial(odograph, keep=0),
        "epsilon-DP",
        sizes=(*SIZES, *LATE),
    ),
    "Odograph, zcdp": Tool(
        "odograph",
        '`account.spend(cost)`, `filter="zcdp"`',
        partial(odograph, chosen="zcdp"),
        "epsilon-DP",
        sizes=(*SIZES, *LATE),
    ),
}
ASK = "`compose(event)`, `get_epsilon(delta)`"
STEP = "`step(...)`, `get_epsilon(delta)`"
PEERS = {
    "plain sums of floats": Tool("odograph", "an addition and a comparison, nothing validated", plain, "floats"),
    "OpenDP filter, pure": Tool("opendp", "`filter_queryable(measurement)`", opendp_filter, "Laplace"),
    "OpenDP filter, zCDP": Tool(
        "opendp", "`filter_queryable(measurement)`, limit rho 20", opendp_zcdp_filter, "Laplace as zCDP"
    ),
    "OpenDP odometer, pure": Tool(
        "opendp", "`queryable(measurement)`, `queryable.privacy_loss(1)`", opendp_odometer, "Laplace"
    ),
    "OpenDP, the mechanism alone": Tool("opendp", "`measurement(data)`, no budget", opendp_noise, "Laplace"),
    "Tumult Core": Tool(
        "tmlt.core", "`PrivacyAccountant.measure(measurement)`", tumult, "geometric, of the nearest whole scale"
    ),
    "diffprivlib": Tool(
        "diffprivlib",
        "`accountant.spend(epsilon, 0)`, which checks; brought to n through its private list of spends",
        diffprivlib,
        "epsilon-DP",
        adaptive=False,
    ),
    "dp-accounting RDP": Tool("dp-accounting", ASK, dp_accounting_rdp, "Laplace", adaptive=False),
    "dp-accounting PLD": Tool("dp-accounting", ASK, dp_accounting_pld, "Laplace", adaptive=False),
    "Opacus RDP": Tool("opacus", STEP, partial(opacus, "RDPAccountant"), "Gaussian, all records", adaptive=False),
    "Opacus PRV": Tool("opacus", STEP, partial(opacus, "PRVAccountant"), "Gaussian, all records", adaptive=False),
    "autodp RDP": Tool(
        "autodp", "`compose_mechanism(curve)`, `get_eps(delta)`", autodp, "randomized response", adaptive=False
    ),
}
FLOORS = ("plain sums of floats", "OpenDP, the mechanism alone")  # no budget, or none that is checked with care


def spend_range(spend: Spend, start: int, count: int) -> None:
    """Spend that often."""
    for i in range(start, start + count):
        spend(i)


def early() -> float:
    """Return the time of a spend from an Odograph account that is 100 spends old."""
    spend = odograph(epsilons()).spend
    spend_range(spend, 0, EARLY)
    return seconds(lambda: spend_range(spend, EARLY, WINDOW)) / WINDOW


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Raise `Cut` when this much processor time is over, wherever the block is then."""
    end = time.process_time() + most

    def look(*_: object) -> None:
        if time.process_time() > end:
            raise Cut(f"not done after {most} s of processor time")

    # A timer of processor time would be simpler, but while one is set, that time is read in steps of milliseconds.
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def timed(tool: Tool, n: int) -> list[tuple[float, float]]:
    """Return the times of the n-th spend, and of an early one of Odograph's beside it, for each round."""
    spender = tool.make(epsilons())
    spend_range(spender.fill or spender.spend, 0, n)
    # What a peer spends while it is timed must not carry it far beyond n; a window of ours must not be too short.
    most = WINDOW if tool.package == "odograph" else n // (2 * ROUNDS)
    count = max(1, min(most, int(0.05 / max(1e-9, seconds(lambda: spender.spend(n))))))
    pairs = [
        (seconds(partial(spend_range, spender.spend, n + 1 + k * count, count)) / count, early())
        for k in range(ROUNDS)
    ]
    if not all(map(all, pairs)):
        raise RuntimeError("the clock is too coarse: something took no time")
    return pairs


def measured(name: str, most: int) -> Iterator[Row]:
    """Yield a tool's row for every n, until one fails or is cut."""
    tool = (OWN | PEERS)[name]
    wanted = "at most 1.5" if name in OWN else "" if name in FLOORS else "at least 1"
    for n in (size for size in tool.sizes if size <= most):
        title = f"{name}, spend {n:,}"
        try:
            with limited(LIMIT):
                pairs = timed(tool, n)
        except ImportError as error:
            yield failure(title, f"{tool.package} is not installed ({error})", "not measured")
            return
        except Cut as cut:
            yield failure(title, cut, "cut")
            return
        except Exception as error:  # noqa: BLE001  a peer's failure is a result, not the end of the run
            yield failure(title, f"{type(error).__name__}: {error}")
            return
        cost, base = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
        note = f"{number(cost)} microseconds against {number(base)}"
        yield row(title, [a / b for a, b in pairs], wanted, note)


def elsewhere(name: str, flags: Sequence[str]) -> Iterator[Row]:
    """Measure a tool in the environment that it needs, beside Odograph in the same one."""
    if not OTHER.exists():
        yield failure(f"{name}, spend {SIZES[0]:,}", "there is no environment for it", "not measured")
        return
    command = [str(OTHER), __file__, "--only", name, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  this file
    rows = [found for line in done.stdout.splitlines() if (found := read(line))]
    yield from rows
    if done.returncode or not rows:
        yield failure(name, (done.stderr.strip().splitlines() or ["it said nothing"])[-1])


def installed(package: str) -> str:
    """Return the version of a package, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    """Measure all tools, and draw the picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="a hundred spends, to see that it runs")
    parser.add_argument("--only", choices=[*OWN, *PEERS])
    parser.add_argument("--images", type=Path, help="draw growth-with-n.png into this folder")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    packages = sorted({tool.package for tool in PEERS.values()})
    print(f"Python {platform.python_version()}, " + ", ".join(f"{p} {v}" for p in packages if (v := installed(p))))
    print("\n| tool | what a spend with its check calls | steps | a stop that answers may steer |\n|---|---|---|---|")
    for name, tool in (OWN | PEERS).items():
        promised = "" if name in FLOORS else "promised" if tool.adaptive else "not promised"
        print(f"| {name} | {tool.calls} | {tool.steps} | {promised} |")
    print()
    flags = ["--few"] if chosen.few else []
    rows = []
    for name in [chosen.only] if chosen.only else [*OWN, *PEERS]:
        there = name == "Tumult Core" and not chosen.only
        for one in elsewhere(name, flags) if there else measured(name, 100 if chosen.few else LATE[-1]):
            print(one, flush=True)
            rows.append(one)
    if chosen.images:
        from pictures import growth  # noqa: PLC0415  Matplotlib, only where it is drawn

        growth(rows, chosen.images / "growth-with-n.png")


if __name__ == "__main__":
    main()
