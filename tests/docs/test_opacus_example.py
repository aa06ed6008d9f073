"""The example of adaptive training: what it charges, and, in full, what it reports."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("torch", reason="torch is not installed: see `make test`")
pytest.importorskip("opacus", reason="torch is not installed: see `make test`")

import torch
from charge_history import charges

import adaptive_training_opacus as example
import odograph as odo
from odograph.integrations.opacus import charge_before_step
from odograph.training import TrainingPlan

FULL = os.environ.get("ODOGRAPH_FULL") == "1"


def plan(epsilon: float) -> TrainingPlan:
    """A plan that needs no solving."""
    return odo.dpsgd_policy(
        epsilon,
        1e-6,
        sample_rates=[example.RATE],
        noise_multipliers=example.NOISES,
        filter="renyi",
        privacy_unit="woman",
    )


def test_each_step_and_each_look_is_charged_to_its_own_part() -> None:
    outcome = example.adaptive(0, plan(0.3))
    training, validation = outcome.accounts
    assert training.totals.steps == outcome.steps > 20
    assert {str(entry.cost) for entry in charges(training)} <= {
        str(odo.subsampled_gaussian(example.RATE, noise)) for noise in example.NOISES
    }
    assert [entry.cost for entry in charges(validation)] == [example.VALIDATION_COST] * len(outcome.story)
    assert training.policy.delta == validation.policy.delta == example.DELTA
    assert 0 < training.reading().loss < 1
    assert outcome.accuracy > 0.6  # to say 'no' of everybody is 67% right


def test_training_ends_when_the_filter_refuses() -> None:
    training = example.Training(example.survey()[0], 4.0, seed=1)
    account = odo.Accountant(plan(0.2).compiled)
    record = charge_before_step(training.optimizer, account, training.loader, batch_size=example.BATCH)
    assert example.run(training, 2)
    assert not example.run(training, 10_000)
    assert account.totals.steps == len(record) > 2
    assert not account.decide(odo.subsampled_gaussian(example.RATE, 4.0)).admitted


def test_everybody_is_in_one_part_and_within_the_public_bounds() -> None:
    parts = example.survey()
    assert sum(len(part.labels) for part in parts) == 6366
    assert all(len(part.labels) > 1000 and float(part.features.abs().max()) == 1 for part in parts)


def test_every_look_is_within_the_budget_of_its_part() -> None:
    looks = odo.Accountant(example.validation_policy()).quote([example.VALIDATION_COST] * example.PHASES)
    assert looks.admitted


def test_a_look_costs_no_more_than_it_is_charged() -> None:
    loss: float = example.noisy_count(0.1).map(1)  # untyped library
    assert 0.099 < loss <= 0.1


def test_sums_are_divided_by_a_public_number() -> None:
    people, others, _ = example.survey()
    one, both = example.Training(people, 8.0, 0), example.Training(people.and_also(others), 8.0, 0)
    assert one.optimizer.expected_batch_size == both.optimizer.expected_batch_size == example.BATCH
    assert not torch.equal(people.features[:1], others.features[:1])


@pytest.mark.long
@pytest.mark.skipif(not FULL, reason="the full comparison: ODOGRAPH_FULL=1 (make test-all)")
def test_the_report_compares_with_fixed_plans(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    shown = capsys.readouterr().out
    rates = [float(rate) for rate in re.findall(r"([\d.]+)% right \(\+-", shown)]
    assert len(rates) == 1 + len(example.FIXED_STEPS)
    assert min(rates) > 68
    assert max(rates) - rates[0] < 4  # adaptivity costs little, whichever way it falls
    assert "against the best of the fixed plans" in shown
