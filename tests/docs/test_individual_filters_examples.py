"""The examples of populations: everybody's filter decides as an account of their own would, and lasts for longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import event_stream
import individual_descent
import odograph as odo

Masks = list[NDArray[np.bool_]]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Masks:
    """Who took part in each step that a population was charged for."""
    found: Masks = []
    charge = odo.Population._charge  # noqa: SLF001  of every step, also of a run

    def watched(self: odo.Population, *asked: Any, **choices: Any) -> object:
        step = charge(self, *asked, **choices)
        found.append(step.mask)
        return step

    monkeypatch.setattr(odo.Population, "_charge", watched)
    return found


def spent(account: odo.Accountant, cost: odo.Guarantee) -> bool:
    """Charge an account if it admits the cost; say whether it did."""
    admitted = bool(account.decide(cost))
    if admitted:
        account.spend(cost)
    return admitted


def days_of(person: NDArray[np.int64]) -> list[bool]:
    """Ask an account of their own, day by day; sizes are rounded up as prices are."""
    account, taken = odo.Accountant(event_stream.POLICY), []
    for events in person:
        size = event_stream.cost_of(int(events))
        (cost,) = odo.Prices.of(odo.PureDP, [size]).guarantees
        taken.append(spent(account, cost))
    return taken


def test_a_year_of_reports_is_published_and_everybodys_filter_decides_as_an_account_of_their_own(
    tmp_path: Path, masks: Masks
) -> None:
    counts = event_stream.stream()
    year = event_stream.with_a_filter_for_each(counts, tmp_path)
    assert len(year.published) == len(counts) == 365
    assert len(event_stream.with_one_filter(counts).published) < 100
    took = np.array(masks)
    totals = counts.sum(axis=0)
    watched = [*np.argsort(totals)[-5:], *np.argsort(totals)[:2], 17, 1000]
    for person in watched:
        assert took[:, person].tolist() == days_of(counts[:, person])
    assert not took[:, watched[0]].all()  # who sends very many drops out
    assert took[:, totals <= np.median(totals)].all()  # half of the people never do


def test_opendp_bounds_no_length_of_a_gradient_by_more_than_is_paid_for_it() -> None:
    scale = individual_descent.noise_for(individual_descent.STEPS)
    noise = individual_descent.gaussian(scale)
    lengths = np.concatenate([[0.0], np.geomspace(1e-6, individual_descent.CLIP, 200)])
    prices = individual_descent.rho_of(lengths, scale)
    bounds = np.array([noise.map(float(length)) for length in lengths])
    assert (bounds <= prices).all()
    assert (prices <= bounds * (1 + 1e-5) + 1e-14).all()
    assert not (bounds <= 0.99 * prices).all()  # a price that is a little too low is seen


def test_descent_with_a_filter_for_each_goes_on_for_longer_and_comes_further(tmp_path: Path, masks: Masks) -> None:
    records = individual_descent.load()
    scale = individual_descent.noise_for(individual_descent.STEPS) * (1 + 1e-5)
    together = individual_descent.descend_together(records, scale)
    alone = individual_descent.descend(records, tmp_path, scale, individual_descent.MAX_STEPS)
    assert len(together) == individual_descent.STEPS + 1
    assert len(alone) > 3 * individual_descent.STEPS
    losses = [individual_descent.loss(records, models[-1]) for models in (together, alone)]
    assert losses[1] < losses[0]
    # The steps alternate with counts: only the steps have prices of one's own.
    took = iter(masks)
    longest = int(np.argmax(np.linalg.norm(individual_descent.gradients(records, alone[-1]), axis=1)))
    account = odo.Accountant(individual_descent.POLICY)
    for number, model in enumerate(alone[:-1]):
        if number % individual_descent.COUNT_INTERVAL == 0:
            assert bool(next(took)[longest]) == spent(account, individual_descent.COUNT_COST)
        length = np.linalg.norm(individual_descent.gradients(records[longest : longest + 1], model), axis=1)
        (cost,) = odo.Prices.of(odo.ZCDP, individual_descent.rho_of(length, scale)).guarantees
        assert bool(next(took)[longest]) == spent(account, cost)
