"""Private gradient descent in which each record pays for its own gradient, on the RAND Health Insurance Experiment.

Who has seen a doctor this year? A logistic regression is fitted by noisy gradients. Under one worst-case filter every
step is charged as if each record had the longest gradient that clipping allows, and training ends for all at once.
Here each record has a filter of its own: it pays for the length of its own gradient, and drops out when its budget is
spent. Gradients are shorter than the bound, so training takes several times as many steps under the same promise.

What is protected: one *person-year*, a row of the table. What is public: the columns and their ranges, the clipping,
the noise, and the constant that sums of gradients are divided by, which is not the number of rows. OpenDP adds the
noise. The losses at the end are computed without noise: they illustrate the example, and are not for release.

Run it with `python examples/individual_descent.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import opendp.prelude as dp
import statsmodels.api as sm
from numpy.typing import NDArray

import odograph as odo

dp.enable_features("contrib")

POLICY: Final = odo.Policy(1, "1e-6", filter="zcdp", privacy_unit="person-year")
CLIP: Final = 3.0  # the longest gradient of one record: attributes between 0 and 1 have none longer than 2.9
STEPS: Final = 10  # admitted by the worst-case filter
MAX_STEPS: Final = 100  # with individual filters
COUNT_INTERVAL: Final = 5  # steps between two noisy counts of the records that could go on
COUNT_COST: Final = odo.PureDP("0.01")  # of each noisy count
MIN_ACTIVE: Final = 0.95  # training stops when fewer of the records can go on than this part of the first count
LONG_GRADIENT: Final = 1.5  # the length of a long gradient
RATE: Final = 4.0
DIVISOR: Final = 20_000  # a public constant: gradients are divided by it
RANGES: Final = {"lncoins": 4.7, "idp": 1.0, "lpi": 7.2, "fmde": 8.3, "physlm": 1.0, "disea": 60.0, "hlthp": 1.0}

Array = NDArray[np.float64]


def load() -> Array:
    """Return a row per person-year: its attributes between 0 and 1, a one, and whether there was a visit."""
    raw = sm.datasets.randhie.load_pandas().data
    columns = [np.clip(raw[name].to_numpy(np.float64) / most, 0, 1) for name, most in RANGES.items()]
    return np.column_stack([*columns, np.ones(len(raw)), raw.mdvis.to_numpy() > 0]).astype(np.float64)


def gradients(records: Array, model: Array) -> Array:
    """Return each record's gradient of the logistic loss, clipped."""
    features, labels = records[:, :-1], records[:, -1]
    found = (1 / (1 + np.exp(-features @ model)) - labels)[:, None] * features
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found * np.minimum(1, CLIP / np.maximum(lengths, 1e-12)))


def loss(records: Array, model: Array) -> float:
    """Return the mean logistic loss, without noise."""
    margins = (2 * records[:, -1] - 1) * (records[:, :-1] @ model)
    return float(np.logaddexp(0, -margins).mean())


def noise_for(steps: int) -> float:
    """Return the noise with which so many steps fit if every gradient is as long as clipping allows."""
    largest = odo.Accountant(POLICY).largest(odo.ZCDP, times=steps)
    if largest is None:
        raise ValueError(f"{steps} steps do not fit")
    return CLIP / float(np.sqrt(2 * float(largest.rho))) * (1 + 1e-9)


def gaussian(scale: float) -> dp.Measurement:
    """Return OpenDP's noise for a sum of gradients."""
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale=scale)


def rho_of(lengths: Array, scale: float) -> Array:
    """Return what gradients of these lengths cost: OpenDP's noise adds a little for its grid, and so does this."""
    return np.asarray((lengths / scale) ** 2 / 2 * (1 + 1e-6) + 1e-15)


def descend(records: Array, folder: Path, scale: float, steps: int) -> list[Array]:
    """Train with a filter for each record, until a noisy count says that people drop out; return all models.

    Those who drop out first have the longest gradients: a model that went on without them would forget them.
    """
    noise, models = gaussian(scale), [np.zeros(records.shape[1] - 1)]
    ahead = odo.ZCDP(
        2 * COUNT_INTERVAL * float(rho_of(np.array([LONG_GRADIENT]), scale)[0])
    )  # a while longer, at a long gradient

    @odo.vectorized_price(odo.ZCDP)
    def price(rows: Array, _: Sequence[Any]) -> Array:
        # The model is made of past outputs, so this depends on one record and past outputs.
        return rho_of(np.linalg.norm(gradients(rows, models[-1]), axis=1), scale)

    def noisy_gradient(rows: Array, model: Array) -> Array:
        return np.array(noise([*gradients(rows, model).sum(axis=0)]))

    with odo.connect("memory://") as ledger:
        people = odo.Population.create(
            "person-years", POLICY, ledger=ledger, location=folder / "filters", ids=len(records)
        )
        able: list[int] = []
        for number in range(steps):
            if number % COUNT_INTERVAL == 0:
                able.append(people.noisy_active_count(ahead, COUNT_COST, key=f"count {number}"))
                if able[-1] < MIN_ACTIVE * able[0]:
                    break
            step = people.run(noisy_gradient, records, price, key=f"step {number}", constants={"model": models[-1]})
            models.append(models[-1] - RATE / DIVISOR * step)
    return models


def descend_together(records: Array, scale: float) -> list[Array]:
    """Train with one filter for all: every step costs what the longest gradient would."""
    noise, models, account = gaussian(scale), [np.zeros(records.shape[1] - 1)], odo.Accountant(POLICY)
    cost = odo.ZCDP(float(rho_of(np.array([CLIP]), scale)[0]))
    while account.decide(cost):
        account.spend(cost)
        step = np.array(noise([*gradients(records, models[-1]).sum(axis=0)]))
        models.append(models[-1] - RATE / DIVISOR * step)
    return models


def main() -> None:
    """Train both ways and print the losses."""
    records = load()
    scale = noise_for(STEPS) * (1 + 1e-5)
    together = descend_together(records, scale)
    with tempfile.TemporaryDirectory() as folder:
        alone = descend(records, Path(folder), scale, MAX_STEPS)
    print(f"{POLICY.promise}; noise {scale:.1f} on sums of gradients of length at most {CLIP:g}")
    print(f"one filter for all:   {len(together) - 1:4} steps, loss {loss(records, together[-1]):.4f}")
    print(f"a filter for each:    {len(alone) - 1:4} steps, loss {loss(records, alone[-1]):.4f}")


if __name__ == "__main__":
    main()
