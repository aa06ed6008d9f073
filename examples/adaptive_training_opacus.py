"""Who has an affair? Private training with Opacus, with noise and stopping time chosen from private validation.

The table is Redbook's survey of 1974 among married women (it ships with statsmodels): answers that people give only
if their participation stays secret. A logistic regression is trained on it by DP-SGD. From time to time the number of
right predictions among other women is asked for, with noise, and the answer decides: go on as before, go on with less
noise, or stop. A filter charges every step before its noise is drawn, so that (EPSILON, DELTA) holds whatever was
decided.

What is protected: one woman, in the training part or the validation part. Her own coin decided which when she joined.
If she is in one part, the answers from the other do not depend on her, given what was released before. So each part
has its own account with the whole budget, and the promise holds for every woman (parallel composition). If a woman
were in both parts, or if her coin depended on others, it would not hold.

What is public: the questionnaire, hence the bounds of the columns; the sampling rate, the batch size, the learning
rate. The number of women is private. The third part, for testing, is used only for the report at the end, and its
women are not protected in this example.

Run it with `python examples/adaptive_training_opacus.py`; it takes about a minute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import Any, Final

import numpy as np
import opendp.prelude as dp
import statsmodels.api as sm
import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.data_loader import DPDataLoader
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import odograph as odo
from odograph.integrations.opacus import charge_before_step, sampling_rate
from odograph.training import TrainingPlan

dp.enable_features("contrib")

EPSILON, DELTA = 0.5, 1e-6
RATE: Final = 1 / 32  # a multiple of 2^-24: torch samples with exactly this probability
BATCH: Final = 128  # what sums of gradients are divided by: a public guess, not the size of any batch
NOISES: Final = (8.0, 4.0)  # noise multipliers that training may choose from, in this order
FIXED_STEPS: Final = (128, 512)  # without choices: as many steps as were planned, with the noise they need
VALIDATION_COST: Final = odo.PureDP(0.1)  # of one question to the validation part
PHASES: Final = 5  # looks, if training runs to its end: as many as their budget has room for
SEEDS: Final = range(3)

Array = np.ndarray[Any, np.dtype[np.bool_]]
# The answers' ranges in the questionnaire: marriage rating, age, years married, children, religiousness, education,
# her occupation and his.
LOWEST: Final = (1, 17.5, 0.5, 0, 1, 9, 1, 1)
HIGHEST: Final = (5, 42, 23, 5.5, 4, 20, 6, 6)


@dataclass(frozen=True)
class People:
    """Some of the women: what they are like, from -1 to 1, and whether they had an affair."""

    features: torch.Tensor
    labels: torch.Tensor

    def and_also(self, others: People) -> People:
        """Put two parts together."""
        return People(torch.cat([self.features, others.features]), torch.cat([self.labels, others.labels]))

    def right(self, model: torch.nn.Module) -> Array:
        """Say for each woman whether the model predicts her label: private."""
        with torch.no_grad():
            hits: Array = (model(self.features).argmax(dim=1) == self.labels).numpy()
        return hits


@cache
def survey() -> tuple[People, People, People]:
    """Return the parts for training, validation and testing; each woman's own coin says which is hers."""
    table = sm.datasets.fair.load_pandas().data
    low, high = np.array(LOWEST), np.array(HIGHEST)
    scaled = np.clip(2 * (table.drop(columns="affairs").to_numpy() - low) / (high - low) - 1, -1, 1)
    features = torch.tensor(scaled, dtype=torch.float32)
    labels = torch.tensor((table.affairs > 0).to_numpy().astype(np.int64))
    coins = np.random.default_rng(1974).random(len(table))
    parts = (coins < 0.6, (coins >= 0.6) & (coins < 0.8), coins >= 0.8)
    training, validation, testing = (People(features[part], labels[part]) for part in parts)
    return training, validation, testing


@cache
def noisy_count(epsilon: float) -> dp.Measurement:
    """Return OpenDP's count of rows with integer Laplace noise, `epsilon`-DP when one row is added or removed."""
    rows = dp.vector_domain(dp.atom_domain(T=bool)), dp.symmetric_distance()
    counted = rows >> dp.t.then_count()
    # OpenDP rounds losses up: search for the scale whose loss is not above epsilon.
    measurement: dp.Measurement = dp.binary_search_chain(
        lambda scale: counted >> dp.m.then_laplace(scale), d_in=1, d_out=epsilon
    )
    return measurement


class Training:
    """A logistic regression that Opacus trains: clipped gradients, Poisson batches, Gaussian noise."""

    def __init__(self, people: People, noise: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(len(LOWEST), 2)
        with warnings.catch_warnings():
            # For a release, install torchcsprng and use secure_mode=True: this generator is made for speed.
            warnings.filterwarnings("ignore", message="Secure RNG turned off")
            engine = PrivacyEngine()
        loader = DPDataLoader(TensorDataset(people.features, people.labels), sample_rate=RATE)
        self.private, self.optimizer, self.loader = engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.5),
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=1.0,
        )
        self.optimizer.expected_batch_size = BATCH  # Opacus took it from the number of women
        self.batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def step(self) -> None:
        """Take one step; the optimizer draws the noise, and charges for it if it was told to."""
        features, labels = next(self.batches)
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            torch.autograd.backward(cross_entropy(self.private(features), labels))
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@dataclass(frozen=True)
class Outcome:
    """What a training came to."""

    model: torch.nn.Module
    steps: int
    story: tuple[str, ...] = ()
    accounts: tuple[odo.Accountant, ...] = ()  # of the women for training, and of those for validation

    @property
    def accuracy(self) -> float:
        """The part of right predictions among the women of the part for testing, for the report."""
        return float(survey()[2].right(self.model).mean())


@cache
def training_plan(rule: str = "exact") -> TrainingPlan:
    """Return the policy of the part for training: steps with any of the noises, in any order."""
    return odo.dpsgd_policy(
        EPSILON, DELTA, sample_rates=[RATE], noise_multipliers=NOISES, filter=rule, privacy_unit="woman"
    )


@cache
def validation_policy() -> odo.Policy:
    """Return the policy of the part for validation: noisy counts, of any epsilon."""
    return odo.Policy(EPSILON, DELTA, privacy_unit="woman")


def adaptive(seed: int, plan: TrainingPlan) -> Outcome:
    """Train with noise, and for as long, as private validation suggests."""
    people, others, _ = survey()
    training = Training(people, NOISES[0], seed)
    accounts = (
        odo.Accountant(plan.compiled, name="training"),
        odo.Accountant(validation_policy(), name="validation"),
    )
    record = charge_before_step(training.optimizer, accounts[0], training.loader, batch_size=BATCH)
    rate = sampling_rate(training.loader)
    noises, story, best = list(NOISES), [], (-np.inf, training.weights())
    with odo.session(accounts[1]) as asking:
        for _ in range(PHASES):
            noise = training.optimizer.noise_multiplier = noises[0]
            over = not run(training, plan.steps[rate, noise] // PHASES)
            hits = others.right(training.model)
            count = asking.run(noisy_count(float(VALIDATION_COST.epsilon)), hits[hits], cost=VALIDATION_COST)
            story.append(f"{len(record)} steps, the last with noise {noise:g}: about {count} right")
            # Better by less than one scale of the noise in the count is not better.
            better = count > best[0] + 1 / float(VALIDATION_COST.epsilon)
            best = max(best, (count, training.weights()), key=lambda known: known[0])
            if over or (not better and len(noises) == 1):
                break
            if not better:
                noises.pop(0)
    training.model.load_state_dict(best[1])
    return Outcome(training.model, len(record), tuple(story), accounts)


def run(training: Training, steps: int) -> bool:
    """Take some steps; say whether all of them were admitted."""
    try:
        for _ in range(steps):
            training.step()
    except odo.BudgetExceeded:
        return False
    return True


@cache
def noise_for(steps: int) -> float:
    """Return the noise multiplier with which so many steps, planned beforehand, are (EPSILON, DELTA)-DP."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")  # of a first guess of its own
        noise: float = get_noise_multiplier(
            target_epsilon=EPSILON, target_delta=DELTA, sample_rate=RATE, steps=steps, accountant="prv"
        )
    return noise


def fixed(seed: int, steps: int) -> Outcome:
    """Train with a fixed plan: nothing is chosen on the way, so no validation part is needed."""
    people, others, _ = survey()
    training = Training(people.and_also(others), noise_for(steps), seed)
    run(training, steps)
    return Outcome(training.model, steps)


def report(name: str, outcomes: list[Outcome]) -> float:
    """Print one line of the report; return the mean accuracy."""
    rates = [outcome.accuracy for outcome in outcomes]
    steps = mean(outcome.steps for outcome in outcomes)
    print(f"  {name:33} {mean(rates):.1%} right (+- {stdev(rates):.1%} by seed), {steps:.0f} steps")
    return mean(rates)


def main() -> None:
    """Train both ways, several times, and say which came out better."""
    plan = training_plan()
    print(plan)
    chosen = [adaptive(seed, plan) for seed in SEEDS]
    print("\nOne training with choices:")
    print(*(f"  {line}" for line in chosen[0].story), sep="\n")
    for account in chosen[0].accounts:
        print(f"  {account}\n    {account.reading()}")
    nobody = 1 - survey()[2].labels.float().mean().item()
    print(f"\n({EPSILON}, {DELTA})-DP, {len(chosen)} trainings each; to say 'no' of everybody is {nobody:.1%} right:")
    ours = report("noise and end chosen on the way", chosen)
    plans = [report(f"fixed: noise {noise_for(n):.2f}", [fixed(seed, n) for seed in SEEDS]) for n in FIXED_STEPS]
    print(
        f"Choosing on the way came out {ours - max(plans):+.1%} against the best of the fixed plans, and"
        f" {ours - min(plans):+.1%} against the worst.\nWhich is the best, nobody can know beforehand: to compare"
        " plans costs privacy too."
    )


if __name__ == "__main__":
    main()
