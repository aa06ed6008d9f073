"""How many equal steps fit into (epsilon, delta): every filter of Odograph and every peer, over the exact optimum.

The optimum needs everything fixed in advance: for epsilon-DP steps it is the composition theorem of Kairouz, Oh and
Viswanath, for Gaussians their exact curve. Filters are asked again and again until they refuse; static accountants
are asked for the largest number of steps whose epsilon fits. Nothing here is timed, and two runs print the same.

A dagger marks a promise that holds only if all parameters, and the number of steps, were fixed in advance. For
Gaussians without subsampling it is milder: such an accountant stops at a total of mu^2, which is a filter, though the
tool does not say so. An asterisk marks a count computed from a filter's sums, because asking would take hours.

The best filter of Odograph and the best filter elsewhere are picked for each case, with hindsight; in practice a
filter is chosen before. So the default policy, with no choice made, is also compared with the best filter elsewhere.
The distributions of dp-accounting get a grid of a twentieth of a step.

    python benchmarks/tightness.py [--only NAME] [--images FOLDER]
"""

from __future__ import annotations

import argparse
import math
import subprocess
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from scipy.special import log_ndtr

import odograph as odo
from odograph.core.theory import kov_steps
from peers import OTHER
from timing import failure, row

ASKED = 3_000  # a filter is asked no more often than this
MISSING = "not installed"


class Case(NamedTuple):
    """A promise, and the size of a step: its epsilon, or the mu of a Gaussian."""

    epsilon: float
    delta: float
    step: float
    gaussian: bool = False

    def __str__(self) -> str:
        kind = "mu" if self.gaussian else "epsilon"
        return f"({self.epsilon:g}, {self.delta:g}), {kind} {self.step:g}".replace("e-0", "e-")


class Count(NamedTuple):
    """Steps that are admitted."""

    steps: int
    computed: bool = False  # from the sums of a filter that was not asked so often

    def __str__(self) -> str:
        return f"{self.steps:,}{'*' if self.computed else ''}"


Steps = Callable[[Case], Count | int]

PURE = [Case(1, 1e-6, step) for step in (0.001, 0.005, 0.01, 0.05, 0.1, 0.5)]
PURE += [Case(0.5, 1e-8, 0.005), Case(3, 1e-6, 0.03), Case(8, 1e-6, 0.1)]
GAUSSIAN = [Case(1, 1e-6, step, gaussian=True) for step in (0.01, 0.05)]
GAUSSIAN += [
    Case(0.5, 1e-8, 0.005, gaussian=True),
    Case(3, 1e-6, 0.03, gaussian=True),
    Case(8, 1e-6, 0.1, gaussian=True),
]


def most(fits: Callable[[int], bool]) -> int:
    """Return the largest number of steps that fits."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache
def optimum(case: Case) -> int:
    """Return the largest number of steps, if everything is fixed in advance."""
    if not case.gaussian:
        return kov_steps(case.epsilon, case.delta, case.step)

    def fits(steps: int) -> bool:
        mu = case.step * math.sqrt(steps)
        above, below = (log_ndtr(-case.epsilon / mu + sign * mu / 2) for sign in (1, -1))
        return bool(math.exp(above) - math.exp(case.epsilon + below) <= case.delta)

    return most(fits)


def asking(ask: Callable[[], object], refused: type[Exception], word: str) -> int:
    """Ask until the answer is a refusal, which has this word in it, and return how often it was not."""
    for count in range(ASKED + 1):
        try:
            ask()
        except refused as refusal:
            if word not in str(refusal):
                raise
            return count
    raise RuntimeError(f"it did not refuse in {ASKED} steps")


def own(name: str, case: Case) -> int:
    """Ask the default policy, or one of Odograph's filters."""
    chosen = None if name == "default" else name
    compiled = odo.compile_policy(odo.Policy(case.epsilon, case.delta, filter=chosen))
    cost = odo.GDP(case.step) if case.gaussian else odo.PureDP(case.step)
    return odo.planning.how_many(odo.planning.AccountState("", compiled, compiled.start), cost) or 0


def opendp(measure: str, case: Case) -> Count:
    """Ask OpenDP's filter; for zCDP its limit is the largest rho that OpenDP converts into the promise."""
    import opendp.prelude as dp  # noqa: PLC0415  a peer may be missing

    dp.enable_features("contrib")
    domain: Any = dp.atom_domain(T=int)
    metric: Any = dp.absolute_distance(T=int)
    step = (dp.m.make_gaussian if case.gaussian else dp.m.make_laplace)(domain, metric, scale=1 / case.step)
    odometer: Any = dp.c.make_fully_adaptive_composition(domain, metric, getattr(dp, measure)())
    limit = case.epsilon
    if measure == "zero_concentrated_divergence":
        step = step if case.gaussian else dp.c.make_pureDP_to_zCDP(step)
        low, limit = 0.0, case.epsilon
        while limit - low > 1e-12 * limit:
            middle = (low + limit) / 2
            promised: Any = dp.c.make_zCDP_to_approxDP(dp.c.make_privacy_filter(odometer, d_in=1, d_out=middle))
            low, limit = (middle, limit) if promised.map(1).epsilon(case.delta) <= case.epsilon else (low, middle)
        limit = low
    queryable: Any = dp.c.make_privacy_filter(odometer, d_in=1, d_out=limit)(0)
    expected = int(limit / step.map(1))
    if expected > ASKED:
        return Count(expected, computed=True)
    return Count(asking(lambda: queryable(step), dp.OpenDPException, "exhausted"))


def tumult(case: Case) -> int:
    """Ask Tumult Core, in its own environment: exact sums."""
    from tmlt.core import measures, metrics  # noqa: PLC0415  in an environment of its own
    from tmlt.core.domains.numpy_domains import NumpyIntegerDomain  # noqa: PLC0415  as above
    from tmlt.core.measurements import interactive_measurements, noise_mechanisms  # noqa: PLC0415  as above
    from tmlt.core.utils.exact_number import ExactNumber  # noqa: PLC0415  as above

    def exact(value: float) -> Any:  # noqa: ANN401  untyped library
        return ExactNumber(repr(value)) if value % 1 else ExactNumber(int(value))

    composition = interactive_measurements.SequentialComposition(
        input_domain=NumpyIntegerDomain(),
        input_metric=metrics.AbsoluteDifference(),
        output_measure=measures.PureDP(),
        d_in=1,
        privacy_budget=exact(case.epsilon),
    )
    accountant = interactive_measurements.PrivacyAccountant.launch(composition, 0)
    step = noise_mechanisms.AddGeometricNoise(1 / exact(case.step))
    return asking(lambda: accountant.measure(step), measures.InsufficientBudgetError, "")


def diffprivlib(case: Case) -> int:
    """Ask diffprivlib, with all of delta as slack."""
    from diffprivlib import BudgetAccountant  # noqa: PLC0415  a peer may be missing

    def fits(steps: int) -> bool:
        epsilon, delta = BudgetAccountant(slack=case.delta).total(spent_budget=[(case.step, 0)] * steps)
        return bool(epsilon <= case.epsilon and delta <= case.delta)

    return most(fits)


def rdp(case: Case) -> int:
    """Ask dp-accounting's Rényi accountant; any epsilon-DP step is at most randomized response."""
    import dp_accounting  # noqa: PLC0415  a peer may be missing
    from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415  as above

    relation = dp_accounting.NeighboringRelation
    event: Any = dp_accounting.GaussianDpEvent(1 / case.step)
    if not case.gaussian:
        event = dp_accounting.RandomizedResponseDpEvent(2 / (1 + math.exp(case.step)), 2)

    def fits(steps: int) -> bool:
        accountant = RdpAccountant(
            neighboring_relation=relation.ADD_OR_REMOVE_ONE if case.gaussian else relation.REPLACE_ONE
        )
        return bool(accountant.compose(event, steps).get_epsilon(case.delta) <= case.epsilon)

    return most(fits)


def pld(case: Case) -> int:
    """Ask dp-accounting's privacy-loss distributions, on a grid of a twentieth of a step.

    Not its accountant: in 0.6.0 that composes a randomized response once, however large the count.
    """
    from dp_accounting.pld import common, privacy_loss_distribution  # noqa: PLC0415  a peer may be missing

    grid = case.step / 20

    def fits(steps: int) -> bool:
        if case.gaussian:
            scale = 1 / (case.step * math.sqrt(steps))
            found = privacy_loss_distribution.from_gaussian_mechanism(scale, value_discretization_interval=grid)
        else:
            one = common.DifferentialPrivacyParameters(case.step, 0)
            found = privacy_loss_distribution.from_privacy_parameters(one, value_discretization_interval=grid)
            found = found.self_compose(steps)
        return bool(found.get_epsilon_for_delta(case.delta) <= case.epsilon)

    return most(fits)


def opacus(name: str, case: Case) -> int:
    """Ask one of Opacus's accountants."""
    from opacus import accountants  # noqa: PLC0415  a peer may be missing

    def fits(steps: int) -> bool:
        accountant = getattr(accountants, name)()
        accountant.history.append((1 / case.step, 1.0, steps))  # as that many equal calls of `step` leave it
        return bool(accountant.get_epsilon(case.delta) <= case.epsilon)

    return most(fits)


def autodp(case: Case) -> int:
    """Ask autodp's composition: of Rényi curves, or exactly for Gaussians."""
    from autodp import mechanism_zoo, transformer_zoo  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

    if case.gaussian:
        step, compose = mechanism_zoo.ExactGaussianMechanism(1 / case.step), transformer_zoo.ComposeGaussian()
    else:
        step, compose = mechanism_zoo.PureDP_Mechanism(case.step), transformer_zoo.Composition()
    return most(lambda steps: bool(compose([step], [steps]).get_approxDP(case.delta) <= case.epsilon))


OWN: dict[str, Steps] = {
    f"Odograph, {name}": partial(own, name) for name in ("default", "exact", "zcdp", "renyi", "gdp", "paper", "basic")
}
FILTERS: dict[str, Steps] = {
    "OpenDP filter, zCDP": partial(opendp, "zero_concentrated_divergence"),
    "OpenDP filter, pure": partial(opendp, "max_divergence"),
    "Tumult Core": tumult,
}
STATIC: dict[str, Steps] = {
    "dp-accounting PLD": pld,
    "dp-accounting RDP": rdp,
    "autodp": autodp,
    "Opacus PRV": partial(opacus, "PRVAccountant"),
    "Opacus RDP": partial(opacus, "RDPAccountant"),
    "diffprivlib, slack": diffprivlib,
}
TOOLS = OWN | FILTERS | STATIC
NO_GAUSSIANS = {"Odograph, paper", "Odograph, basic", "OpenDP filter, pure", "Tumult Core", "diffprivlib, slack"}
ONLY_GAUSSIANS = {"Opacus PRV", "Opacus RDP"}


def elsewhere(name: str) -> dict[Case, Count | str]:
    """Count in the environment of a tool."""
    if not OTHER.exists():
        return dict.fromkeys(PURE, MISSING)
    command = [str(OTHER), __file__, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  this file
    if done.returncode:
        return dict.fromkeys(PURE, (done.stderr.strip().splitlines() or ["failed"])[-1])
    return {case: Count(int(line)) for case, line in zip(PURE, done.stdout.split(), strict=True)}


def counted(name: str, cases: list[Case]) -> dict[Case, Count | str]:
    """Return what a tool admits in each case, or why that is not known."""
    found: dict[Case, Count | str] = {}
    for case in cases:
        try:
            steps = TOOLS[name](case)
            found[case] = Count(steps) if isinstance(steps, int) else steps
        except ImportError:
            found[case] = MISSING
        except Exception as error:  # noqa: BLE001  a peer's failure is a result, not the end of the run
            found[case] = f"{type(error).__name__}: {error}"
    return found


def table(cases: list[Case]) -> dict[str, dict[Case, Count | str]]:
    """Count for every tool that takes such steps, and print the shares of the optimum as a table."""
    gaussian = cases[0].gaussian
    skipped = NO_GAUSSIANS if gaussian else ONLY_GAUSSIANS
    print(f"\n| {'Gaussian' if gaussian else 'pure'} steps | " + " | ".join(map(str, cases)) + " |")
    print("|---" * (len(cases) + 1) + "|")
    print("| the optimum | " + " | ".join(f"{optimum(case):,}" for case in cases) + " |")
    found = {}
    for name in (name for name in TOOLS if name not in skipped):
        counts = found[name] = elsewhere(name) if name == "Tumult Core" else counted(name, cases)
        cells = [
            f"{count} ({count.steps / optimum(case):.1%})" if isinstance(count, Count) else "failed"
            for case, count in counts.items()
        ]
        print(f"| {name}{' †' if name in STATIC else ''} | " + " | ".join(cells) + " |", flush=True)
    print()
    for name, counts in found.items():
        for reason in {count for count in counts.values() if isinstance(count, str)}:
            print(failure(f"{name}, steps admitted", reason, "not measured" if reason == MISSING else "failed"))
    return found


def targets(found: dict[str, dict[Case, Count | str]], cases: list[Case]) -> None:
    """Print the ratios of which something is wanted."""

    def best(names: dict[str, Steps], case: Case) -> int:
        counts = [found[name][case] for name in names if name in found]
        return max((count.steps for count in counts if isinstance(count, Count)), default=0)

    for case in cases:
        default = best({"Odograph, default": OWN["Odograph, default"]}, case)
        ours, theirs = best(OWN, case), best(FILTERS, case)
        for what, steps, other, wanted in (
            ("default over the optimum", default, optimum(case), "" if _is_large(case) else "at least 0.91"),
            ("default over the best filter elsewhere", default, theirs, "at least 1"),
            ("best filter over the best filter elsewhere", ours, theirs, "at least 1"),
        ):
            title, note = f"{what}, {case}", f"{steps:,} against {other:,} steps"
            print(
                row(title, [steps / other], wanted, note) if other else failure(title, "no filter elsewhere counted")
            )


def _is_large(case: Case) -> bool:
    """Whether steps are so large that whole ones decide; `default_policy.py` has what is wanted there."""
    return case.step > case.epsilon / 100


def main() -> None:
    """Count everything, and perhaps draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*TOOLS], help="print only the counts of this tool, for pure steps")
    parser.add_argument("--images", type=Path, help="draw tightness.png into this folder")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.only:
        for case in PURE:
            print(TOOLS[chosen.only](case))
        return
    pure, gaussian = table(PURE), table(GAUSSIAN)
    targets(pure, PURE)
    targets(gaussian, GAUSSIAN)
    if chosen.images:
        from pictures import tightness  # noqa: PLC0415  Matplotlib, only where it is drawn

        shares = {
            "pure steps": {name: _shares(counts) for name, counts in pure.items()},
            "Gaussian steps": {name: _shares(counts) for name, counts in gaussian.items()},
        }
        tightness(shares, set(STATIC), chosen.images / "tightness.png")


def _shares(counts: dict[Case, Count | str]) -> list[float]:
    return [count.steps / optimum(case) for case, count in counts.items() if isinstance(count, Count)]


if __name__ == "__main__":
    main()
