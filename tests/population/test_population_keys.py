"""Idempotency keys of populations."""

from __future__ import annotations

from pathlib import Path

import pytest

import odograph as odo
from odograph.errors import IdempotencyConflict

POLICY = odo.Policy(1, 1e-6, filter="basic")


def test_a_key_that_made_a_population_does_not_make_another_elsewhere(tmp_path: Path) -> None:
    with odo.connect("memory://") as ledger:
        made = odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "one", ids=5, key="k")
        with pytest.raises(IdempotencyConflict, match="'k' has made 'p' before"):
            odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "two", ids=5, key="k")
        assert not (tmp_path / "two").exists()
        assert made.charge(odo.PureDP("0.1"), key="c").mask.all()


def test_the_key_of_a_count_is_no_key_of_a_charge_and_the_other_way_round(tmp_path: Path) -> None:
    """Else the participants of a round that has paid for the count would answer another question."""
    with odo.connect("memory://") as ledger:
        people = odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "people", ids=5)
        cost, probe = odo.PureDP("0.1"), odo.PureDP("0.2")
        people.noisy_active_count(probe, cost, key="count")
        for again in (
            lambda: people.charge(cost, key="count"),
            lambda: people.noisy_active_count(cost, cost, key="count"),
        ):
            with pytest.raises(IdempotencyConflict, match="'count' was used before for another request"):
                again()
        with pytest.raises(IdempotencyConflict, match="which ran or may have run; nothing was charged"):
            people.noisy_active_count(probe, cost, key="count")
        people.charge(cost, key="charge")
        with pytest.raises(IdempotencyConflict, match="'charge' was used before for another request"):
            people.noisy_active_count(probe, cost, key="charge")
        assert len(people.rounds()) == 3
