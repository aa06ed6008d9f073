"""A year of daily reports about events, with a privacy filter for each person.

Every day a noisy number of events is published. One worst-case filter charges everyone every day for the maximum
number of events that is counted per person, and the year's budget is spent after some weeks. Here a person pays only
for the events that they sent: on most days none, and most people stay in all year. The few who send very many drop
out towards its end, so the later reports are a little too low; nothing else is lost. Both make the same promise.

What is protected: one *person*, with all their events of the year. What is public: the noise, and that at most five
events of a person count on one day. OpenDP adds the noise. The stream is synthetic: people differ a hundredfold.

Run it with `python examples/event_stream.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import opendp.prelude as dp
from numpy.typing import NDArray

import odograph as odo

dp.enable_features("contrib")

PEOPLE, DAYS = 5_000, 365
POLICY: Final = odo.Policy(2, "1e-6")
MAX_EVENTS: Final = 5  # events of one person that count on one day
SCALE: Final = 100.0  # of the noise on a day's number

Counts = NDArray[np.int64]


class Year(NamedTuple):
    """The published numbers, and the true ones."""

    published: list[int]
    true: list[int]

    @property
    def error(self) -> float:
        """How far off a day's number is, in the mean."""
        return float(np.mean(np.abs(np.subtract(self.published, self.true))))


def stream(seed: int = 2026) -> Counts:
    """Return how many events each person sent on each day, cut at the most that count."""
    rng = np.random.default_rng(seed)
    rates = rng.lognormal(mean=-3.0, sigma=1.3, size=(PEOPLE, 1))  # events a day
    return np.asarray(np.minimum(rng.poisson(rates, (PEOPLE, DAYS)), MAX_EVENTS).T)


def laplace() -> dp.Measurement:
    """Return OpenDP's noise for a number."""
    return dp.m.make_laplace(dp.atom_domain(T=int), dp.absolute_distance(T=int), scale=SCALE)


def cost_of(events: int) -> float:
    """Return the epsilon of a day on which a person sent so many events, as OpenDP bounds it."""
    return float(laplace().map(events)) if events else 0.0


def with_a_filter_for_each(counts: Counts, folder: Path) -> Year:
    """Publish every day; people who have spent their budget are left out from then on."""
    noise, costs = laplace(), np.array([cost_of(events) for events in range(MAX_EVENTS + 1)])

    @odo.vectorized_price(odo.PureDP)
    def price(day: Counts, _: Sequence[Any]) -> NDArray[np.float64]:
        return costs[day]

    def noisy_number(day: Counts) -> int:
        return int(noise(int(day.sum())))

    with odo.connect("memory://") as ledger:
        people = odo.Population.create("year", POLICY, ledger=ledger, location=folder / "filters", ids=PEOPLE)
        published = [people.run(noisy_number, day, price, key=f"day {i}") for i, day in enumerate(counts)]
    return Year(published, [int(day.sum()) for day in counts])


def with_one_filter(counts: Counts) -> Year:
    """Publish until the budget is spent: every day costs what the most events would."""
    noise, account, cost = laplace(), odo.Accountant(POLICY), odo.PureDP(cost_of(MAX_EVENTS))
    published = []
    for day in counts:
        if not account.decide(cost):
            break
        account.spend(cost)
        published.append(int(noise(int(day.sum()))))
    return Year(published, [int(day.sum()) for day in counts[: len(published)]])


def main() -> None:
    """Publish a year both ways, and print how far each comes."""
    counts = stream()
    together = with_one_filter(counts)
    with tempfile.TemporaryDirectory() as folder:
        alone = with_a_filter_for_each(counts, Path(folder))
    late = Year(alone.published[-30:], alone.true[-30:])
    print(f"{POLICY.promise}; Laplace noise of scale {SCALE:g} on about {np.mean(alone.true):.0f} events a day")
    print(f"one filter for all:  {len(together.published):3} days published, off by {together.error:.0f}")
    print(f"a filter for each:   {len(alone.published):3} days published, off by {alone.error:.0f}")
    print(f"                     in the last month off by {late.error:.0f}")


if __name__ == "__main__":
    main()
