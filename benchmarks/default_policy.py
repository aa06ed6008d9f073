"""What the default policy admits, with no choice made, for steps of every kind and size.

Pure and Gaussian steps are compared with the optimum for costs that are fixed in advance; zCDP steps with the `zcdp`
filter, and subsampled Gaussians with the `renyi` filter, each of which takes nothing else as well. An n-th of the
budget is a step of which n Gaussians of the same intrinsic time would be the optimum. Streams of mixed steps, sizes
log-uniform, are compared with every single filter, of Odograph or of OpenDP, that takes all of the stream. The steps
of a stream are priced as what each library knows of them: elsewhere a pure step is zCDP at epsilon^2/2. No other
library has a filter that takes all of a stream. The Rényi accountant of dp-accounting does, and is shown, though its
promise holds only if all parameters were fixed in advance.

    python benchmarks/default_policy.py [--few]
"""

from __future__ import annotations

import argparse
import math
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import odograph as odo
from odograph.core.conversions import largest_mu, largest_rho
from odograph.core.theory import kov_steps
from timing import failure, row

TARGETS = [
    ("1", "1e-6"),
    ("3", "1e-6"),
    ("0.5", "1e-8"),
    ("8", "1e-6"),
    ("0.7", "1e-5"),
    ("12", "1e-6"),
    ("1", "1/20190"),
]
PARTS = (10_000, 3_000, 1_000, 500, 300, 200, 150, 100, 70, 60, 50, 40, 30, 25, 20)
STREAMS = 20


def steps(policy: odo.Policy, cost: odo.Guarantee) -> int:
    """Return how many equal steps a policy admits."""
    return odo.Accountant(policy).how_many(cost)


def compare(what: str, count: int, other: int, wanted: str) -> None:
    """Print a ratio of two counts."""
    print(row(what, [count / max(1, other)], wanted, f"{count:,} against {other:,} steps"), flush=True)


def pure_steps(epsilon: str, delta: str, parts: Sequence[int]) -> None:
    """Compare pure steps with the optimum; large ones with what whole units of the exact filter admit."""
    target = f"({epsilon}, {delta})"
    for part in parts:
        size = Fraction(epsilon) / part
        most = kov_steps(float(Fraction(epsilon)), float(Fraction(delta)), float(size))
        count = steps(odo.Policy(epsilon, delta), odo.PureDP(size))
        if part >= 50:
            compare(
                f"default, pure steps of epsilon/{part} over the optimum, {target}",
                count,
                most,
                "at least 0.91" if part >= 100 else "at least 0.87",
            )
            continue
        exact = steps(odo.Policy(epsilon, delta, filter="exact"), odo.PureDP(size))
        least = min(exact - 1, exact - math.ceil(0.04 * most))
        compare(
            f"default, pure steps of epsilon/{part} over the optimum, {target}",
            count,
            most,
            f"at least {math.floor(1000 * least / most) / 1000}",
        )
    for part in (part for part in parts if part >= 100):
        size = Fraction(epsilon) / part
        most = kov_steps(float(Fraction(epsilon)), float(Fraction(delta)), float(size))
        count = steps(odo.Policy(epsilon, delta, reserve="pure"), odo.PureDP(size))
        compare(
            f"reserve 'pure', pure steps of epsilon/{part} over the optimum, {target}", count, most, "at least 0.94"
        )


def other_steps(epsilon: str, delta: str) -> None:
    """Compare Gaussians, discrete Gaussians, zCDP steps and subsampled Gaussians."""
    target, exact_epsilon, exact_delta = f"({epsilon}, {delta})", Fraction(epsilon), Fraction(delta)
    policy = odo.Policy(epsilon, delta)
    budget = largest_mu(float(exact_epsilon), float(exact_delta)) ** 2
    for count in (1_000, 100_000):
        mu = math.sqrt(budget / count)
        compare(
            f"default, Gaussians of a {count:,}th of the budget over the optimum, {target}",
            steps(policy, odo.GDP(mu)),
            math.floor(budget / mu**2),
            "at least 0.91",
        )
    for sigma in (7, 20, 100):
        most = math.floor(budget * sigma**2)
        if most >= 20:
            compare(
                f"default, discrete Gaussians of sigma {sigma} over the optimum, {target}",
                steps(policy, odo.mechanisms.discrete_gaussian(sigma)),
                most,
                "at least 0.91",
            )
    rho = largest_rho(float(exact_epsilon), float(exact_delta))
    for count, wanted in (
        (100, "at least 0.9"),
        (300, "at least 1"),
        (1_000, "at least 1.05"),
        (10_000, "at least 1.05"),
    ):
        size = budget / 2 / count
        compare(
            f"default, zCDP steps of a {count:,}th of the budget over filter 'zcdp', {target}",
            steps(policy, odo.ZCDP(size)),
            math.floor(rho / size),
            wanted,
        )
    large = exact_epsilon >= 3 and exact_epsilon != 12
    for noise in (1, 1.5, 2, 3):
        cost = odo.subsampled_gaussian(0.01, noise)
        other = steps(odo.Policy(epsilon, delta, filter="renyi"), cost)
        compare(
            f"default, subsampled Gaussians of noise {noise} over filter 'renyi', {target}",
            steps(policy, cost),
            other,
            "at least 1" if large and noise >= 2 else "",
        )
        is_wanted = large and noise >= (1 if exact_epsilon == 8 else 1.5)
        compare(
            f"reserve 'training', subsampled Gaussians of noise {noise} over filter 'renyi', {target}",
            steps(odo.Policy(epsilon, delta, reserve="training"), cost),
            other,
            "at least 0.97" if is_wanted else "",
        )


def stream(seed: int, epsilon: float) -> list[odo.Guarantee]:
    """Return mixed steps of random sizes: Laplace, Gaussian, exponential, zCDP and subsampled Gaussian."""
    chance = random.Random(seed)  # noqa: S311  a workload, not a secret
    found: list[odo.Guarantee] = []
    for _ in range(20_000):
        size = epsilon * math.exp(chance.uniform(math.log(1 / 3000), math.log(1 / 60)))
        kind = chance.choice(("laplace", "gaussian", "exponential", "zcdp", "subsampled"))
        if kind == "subsampled":
            found.append(odo.subsampled_gaussian(0.01, chance.choice((3.0, 4.0, 6.0))))
        elif kind == "zcdp":
            found.append(odo.ZCDP(float(f"{size * size / 2:.3g}")))
        elif kind == "gaussian":
            found.append(odo.mechanisms.discrete_gaussian(float(f"{1 / size:.4g}")))
        else:
            found.append(odo.PureDP(float(f"{size:.3g}")))
    return found


def admitted(policy: odo.Policy, costs: Sequence[odo.Guarantee]) -> int:
    """Return how many steps of a stream a policy admits before its first refusal."""
    account = odo.Accountant(policy)
    for count, cost in enumerate(costs):
        if not account.decide(cost).admitted:
            return count
        account.spend(cost)
    return len(costs)


def composed(costs: Sequence[odo.Guarantee], epsilon: float, delta: float) -> int:
    """Return how many steps of a stream fit by the Rényi accountant of dp-accounting."""
    import dp_accounting  # noqa: PLC0415  a peer may be missing
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415

    accountant = RdpAccountant()
    for count, cost in enumerate(costs):
        if isinstance(cost, odo.guarantees.Mechanism):
            rate, noise = map(float, re.findall(r"=([0-9.]+)", cost.name))
            event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
        else:
            rho = cost.rho if isinstance(cost, odo.ZCDP) else getattr(cost, cost.size) ** 2 / 2
            event = dp_accounting.ZCDpEvent(float(rho))
        accountant.compose(event)
        if accountant.get_epsilon(delta) > epsilon:
            return count
    return len(costs)


def streams(count: int) -> None:
    """Compare streams with every filter, and every accountant elsewhere, that takes all of a stream."""
    epsilon, delta = 1.0, 1e-6
    costs = [stream(seed, epsilon) for seed in range(count)]
    ours = [admitted(odo.Policy(epsilon, delta), one) for one in costs]
    # zCDP filters, OpenDP's too, take no curves.
    others: dict[str, Callable[[Sequence[odo.Guarantee]], int]] = {
        "filter 'renyi'": lambda one: admitted(odo.Policy(epsilon, delta, filter="renyi"), one),
        "dp-accounting RDP †": lambda one: composed(one, epsilon, delta),
    }
    for name, admits in others.items():
        what = f"default, {count} mixed streams over {name}"
        try:
            theirs = [admits(one) for one in costs]
        except ImportError:
            print(failure(what, "not installed", "not measured"))
            continue
        ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
        print(row(what, ratios, "at least 1.04", f"{sum(ours):,} against {sum(theirs):,} steps in all"))


def main() -> None:
    """Count everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="little work, to see that it runs")
    few = parser.parse_args().few
    for epsilon, delta in TARGETS[:1] if few else TARGETS:
        pure_steps(epsilon, delta, (1_000, 50, 20) if few else PARTS)
        other_steps(epsilon, delta)
    streams(1 if few else STREAMS)


if __name__ == "__main__":
    main()
