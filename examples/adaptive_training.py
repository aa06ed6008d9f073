"""Adaptive private training: clipping, noise and the time to stop are chosen from private answers.

A logistic regression predicts whether a person saw a doctor in a year of the RAND Health Insurance Experiment. DP-SGD
trains it in short legs. After each, a private question asks whether the model got better; if it did not, the leg is
dropped and the next setting is tried. Legs and questions are charged to one account before they run. The result is
compared with settings that are fixed beforehand, at the same (epsilon, delta).

The data are public, and the constants below were tuned on them: on private data they would be guesses.

What is protected: one person-year, a row of the table (see drill_down.py). What is public: the bounds of the features
below, and that there are about 16,000 training rows. The test rows are for comparison only and are not protected.

OpenDP adds the noise, at a millisecond for ten numbers, because the last digits of NumPy's floats leak. OpenDP draws
on a grid of 2^-1074, and the accounting is that of continuous Gaussians: that difference is not counted, nor is the
rounding of the sums to which noise is added. NumPy draws the batches from a seed, so that runs can be compared; a
real release must draw them from a secret source.

Run it with `python examples/adaptive_training.py`. It takes about a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import opendp.prelude as dp
import statsmodels.api as sm

import odograph as odo
from odograph.training import TrainingPlan

dp.enable_features("contrib")

EPSILON, DELTA, UNIT = 1, 1e-6, "person-year"
RATE: Final = 0.05  # each row is in a batch with this probability, independently of the others
ROWS: Final = 16_000  # for averages: a public number, not the true one
STEP_LENGTH: Final = 1.0  # for gradients in units of the clipping norm
BOUNDS: Final = {
    "lncoins": 4.7,
    "idp": 1,
    "lpi": 7.2,
    "fmde": 8.3,
    "physlm": 1,
    "disea": 30,
    "hlthg": 1,
    "hlthf": 1,
    "hlthp": 1,
}
LEG: Final = {8.0: 60, 4.0: 15}  # steps in a leg, by noise multiplier: both cost about the same
ASKING: Final = 0.03  # the epsilon of the question whether a leg was any good
LARGEST_GAIN: Final = 1.0  # what the loss of one row may count for, at most
LEAST_GAIN: Final = 0.001  # of the mean loss: a leg with less is dropped

Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


class Setting(NamedTuple):
    """What a leg is run with."""

    noise: float  # in clipping norms
    clip: float


# Tried in this order, each for as long as it helps: a larger clip bends the gradients less, and brings more noise.
LADDER: Final = (Setting(8.0, 0.5), Setting(8.0, 1.0), Setting(8.0, 2.0), Setting(8.0, 4.0), Setting(4.0, 2.0))
FIXED: Final = tuple(Setting(8.0, clip) for clip in (0.5, 1.0, 2.0, 4.0))


@dataclass(frozen=True)
class Data:
    """Features and labels, a row per person-year."""

    features: Vector
    labels: Vector

    @classmethod
    def load(cls) -> Data:
        """Read the table that ships with statsmodels; scale each feature by its public bound."""
        raw = sm.datasets.randhie.load_pandas().data
        columns = [np.clip(raw[name] / bound, 0.0, 1.0) for name, bound in BOUNDS.items()]
        return cls(np.column_stack([*columns, np.ones(len(raw))]), (raw.mdvis > 0).to_numpy(float))

    def split(self, seed: int) -> tuple[Data, Data]:
        """Return training rows, four in five, and test rows: each row goes by a coin of its own."""
        train = np.random.default_rng(seed).random(len(self.labels)) < 0.8
        return Data(self.features[train], self.labels[train]), Data(self.features[~train], self.labels[~train])

    def losses(self, weights: Vector) -> Vector:
        """Return the logistic loss of every row."""
        scores = self.features @ weights
        return np.logaddexp(0.0, scores) - self.labels * scores


def leg(data: Data, weights: Vector, setting: Setting, steps: int, rng: np.random.Generator) -> Vector:
    """Take steps of DP-SGD: a Poisson sample, the gradient of each of its rows clipped, noise on their sum."""
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    with_noise = dp.m.make_gaussian(*space, scale=setting.noise * setting.clip)
    for _ in range(steps):
        batch = rng.random(len(data.labels)) < RATE
        features, labels = data.features[batch], data.labels[batch]
        gradients = (1.0 / (1.0 + np.exp(-features @ weights)) - labels)[:, None] * features
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        gradients *= setting.clip / np.maximum(norms, setting.clip)
        total = np.array(with_noise(gradients.sum(axis=0).tolist()))
        weights = weights - STEP_LENGTH / setting.clip * total / (RATE * ROWS)
    return weights


def gain(data: Data, before: Vector, after: Vector) -> float:
    """Ask by how much the mean loss went down, each row's part of it bounded, with OpenDP's Laplace noise."""
    change = 1000 * (data.losses(before) - data.losses(after))  # whole thousandths add up exactly
    most = round(1000 * LARGEST_GAIN)
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    summed = space >> dp.t.then_clamp((-most, most)) >> dp.t.then_sum()
    measurement = dp.binary_search_chain(lambda scale: summed >> dp.m.then_laplace(scale), d_in=1, d_out=ASKING)
    return float(measurement(change.astype(np.int32))) / 1000 / ROWS


@dataclass
class Run:
    """A trained model, its account, and the settings of the legs with the gain that was answered for each."""

    weights: Vector
    account: odo.Accountant
    legs: list[tuple[Setting, float]]


def train_adaptively(plan: TrainingPlan, data: Data, seed: int) -> Run:
    """Train leg by leg; noisy gains say which leg is kept, when the setting changes, and when to stop."""
    run = Run(np.zeros(data.features.shape[1]), odo.Accountant(plan.compiled, name="adaptive"), [])
    rng = np.random.default_rng(seed)
    with odo.session(run.account) as s:
        for setting in LADDER:
            steps = LEG[setting.noise]
            costs = odo.subsampled_gaussian(RATE, setting.noise, steps), odo.PureDP(ASKING)
            while run.account.quote(costs).admitted:  # a leg is of no use without the question after it
                weights = s.run(leg, data, run.weights, setting, steps, rng, cost=costs[0])
                answer = s.run(gain, data, run.weights, weights, cost=costs[1])
                run.legs.append((setting, answer))
                if answer < LEAST_GAIN:
                    break
                run.weights = weights
    return run


def train_fixed(plan: TrainingPlan, data: Data, setting: Setting, seed: int) -> Run:
    """Train with one setting for as many steps as the plan admits of it alone."""
    account = odo.Accountant(plan.compiled, name=f"clip {setting.clip:g}")
    rng, steps = np.random.default_rng(seed), plan.steps[RATE, setting.noise]
    with odo.session(account) as s:
        cost = odo.subsampled_gaussian(RATE, setting.noise, steps)
        weights = s.run(leg, data, np.zeros(data.features.shape[1]), setting, steps, rng, cost=cost)
    return Run(weights, account, [])


@cache
def plans() -> tuple[TrainingPlan, TrainingPlan]:
    """Return the plan for adaptive training, and one for a fixed setting, which need not pay for the choice."""
    noises = sorted(LEG)
    adaptive = odo.dpsgd_policy(
        EPSILON, DELTA, sample_rates=[RATE], noise_multipliers=noises, takes=("pure",), privacy_unit=UNIT
    )
    fixed = odo.dpsgd_policy(
        EPSILON, DELTA, sample_rates=[RATE], noise_multipliers=[FIXED[0].noise], privacy_unit=UNIT
    )
    return adaptive, fixed


def compare(data: Data, seeds: int) -> tuple[Run, dict[str, Vector]]:
    """Train every way on the same splits; return the last adaptive run, and the test losses by name and seed."""
    adaptive, fixed = plans()  # solved once: seconds
    losses: dict[str, list[float]] = {}
    for seed in range(seeds):
        train, test = data.split(seed)
        last = train_adaptively(adaptive, train, seed)
        for run in [last, *(train_fixed(fixed, train, setting, seed) for setting in FIXED)]:
            losses.setdefault(run.account.name, []).append(float(test.losses(run.weights).mean()))
    return last, {name: np.array(values) for name, values in losses.items()}


def main(seeds: int = 5) -> None:
    """Compare, and report."""
    run, losses = compare(Data.load(), seeds)
    print(f"the last adaptive run, at ({EPSILON}, {DELTA:g})-DP:")
    for setting, answer in run.legs:
        fate = "kept" if answer >= LEAST_GAIN else "dropped"
        steps = LEG[setting.noise]
        print(f"  noise {setting.noise:g}, clip {setting.clip:<3g} {steps} steps, gain {answer:7.4f}: {fate}")
    print(f"{run.account}\nodometer: {run.account.reading()}\n\nloss on {seeds} test sets, mean and deviation:")
    for name, values in losses.items():
        paired = values - losses["adaptive"]  # on the same rows
        deviations = [part.std(ddof=1) for part in (values, paired)]
        print(f"  {name:8} {values.mean():.4f} ({deviations[0]:.4f})", end="")
        print("" if name == "adaptive" else f", above adaptive by {paired.mean():7.4f} ({deviations[1]:.4f})")


if __name__ == "__main__":
    main()
