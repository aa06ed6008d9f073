from __future__ import annotations

from functools import cache

import pytest

import odograph as odo
from odograph import UnprovenComposition
from odograph.core.odometers import RenyiOdometer
from odograph.errors import InvalidGuarantee, InvalidPolicy
from odograph.training import TrainingPlan

RATES, NOISES = (0.01,), (1.0, 1.5)
SETTINGS = [(0.01, 1.0), (0.01, 1.5)]


@cache
def plan(rule: str = "exact") -> TrainingPlan:
    return odo.dpsgd_policy(3, 1e-6, sample_rates=RATES, noise_multipliers=NOISES, filter=rule)


def composed_delta(rate: float, noise: float, steps: int) -> float:
    """What dp-accounting says of a run with these fixed parameters."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: PLC0415  an optional library

    one = pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=2e-4)
    return float(one.self_compose(steps).get_delta_for_epsilon(3))


@pytest.mark.parametrize("rule", ["exact", "renyi"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_alone_gets_the_steps_that_the_plan_says_and_no_more(
    rule: str, setting: tuple[float, float]
) -> None:
    made = plan(rule)
    account = odo.Accountant(made.compiled, keep=0)
    steps, one = made.steps[setting], odo.subsampled_gaussian(*setting)
    for _ in range(steps):
        account.spend(one)
    assert not account.decide(one).admitted
    together = odo.Accountant(made.compiled)
    together.spend(odo.subsampled_gaussian(*setting, steps))
    assert composed_delta(*setting, steps) <= 1e-6
    assert composed_delta(*setting, round(1.5 * steps)) > 1e-6  # the check can fail


def test_the_exact_rule_gets_more_steps_than_the_renyi_rule() -> None:
    assert all(plan().steps[setting] > plan("renyi").steps[setting] for setting in SETTINGS)


@pytest.mark.parametrize("rule", ["exact", "renyi"])
def test_settings_may_change_at_every_step_under_one_budget(rule: str) -> None:
    made = plan(rule)
    account = odo.Accountant(made.compiled)
    taken = dict.fromkeys(SETTINGS, 0)
    for i in range(10_000):
        setting = SETTINGS[i % 2]
        cost = odo.subsampled_gaussian(*setting, 60)
        if not account.decide(cost).admitted:
            break
        account.spend(cost)
        taken[setting] += 60
    used = sum(taken[setting] / made.steps[setting] for setting in SETTINGS)
    assert 0.7 < used <= 1.0
    assert 0 < account.reading().loss < 10


def parts_of_alone(noises: tuple[float, ...], epsilon: float, delta: float) -> list[float]:
    """What each setting of a plan gets, as a part of what a plan for it alone would give it."""

    def steps(*chosen: float) -> dict[tuple[float, float], int]:
        made = odo.dpsgd_policy(epsilon, delta, sample_rates=RATES, noise_multipliers=chosen, filter="renyi")
        return dict(made.steps)

    together = steps(*noises)
    return [together[0.01, noise] / steps(noise)[0.01, noise] for noise in noises]


def test_similar_settings_share_an_order_and_different_ones_do_not() -> None:
    assert min(parts_of_alone((0.8, 1.0, 1.2), 8, 1e-5)) > 0.97  # an order each would cost each a tenth
    different = odo.dpsgd_policy(4, 1e-5, sample_rates=RATES, noise_multipliers=(0.6, 8.0), filter="renyi")
    ((renyi, _),) = different.policy.filters
    assert isinstance(renyi, odo.filters.Renyi)
    assert len(renyi.orders) == 2
    few, many = different.steps.values()
    for order in range(2, 20):  # one order for both is worse for one of them than two are good for the other
        common = odo.compile_policy(odo.Policy(4, 1e-5, filter=odo.filters.Renyi({order: 1})))
        steps = [
            odo.planning.how_many(
                odo.planning.AccountState("", common, common.start), odo.subsampled_gaussian(0.01, noise)
            )
            for noise in (0.6, 8.0)
        ]
        assert steps[0] * steps[1] <= few * many


def test_a_setting_without_any_steps_does_not_decide_the_orders() -> None:
    alone = odo.dpsgd_policy(1, 1e-6, sample_rates=RATES, noise_multipliers=(4.0,), filter="renyi").steps
    made = odo.dpsgd_policy(1, 1e-6, sample_rates=RATES, noise_multipliers=(0.3, 4.0), filter="renyi").steps
    assert made[0.01, 0.3] == 0
    assert made[0.01, 4.0] >= 0.9 * alone[0.01, 4.0]


def test_the_odometer_reads_training_and_is_licensed() -> None:
    assert isinstance(plan().policy.odometer, RenyiOdometer)
    account = odo.Accountant(plan().compiled)
    losses = []
    for _ in range(5):
        account.spend(odo.subsampled_gaussian(0.01, 1.5, 100))
        losses.append(account.reading().loss)
    assert losses == sorted(losses)
    assert account.reading().covered


def test_what_is_not_on_the_menu_is_refused_by_the_exact_rule_and_taken_by_the_renyi_rule() -> None:
    cost = odo.subsampled_gaussian(0.02, 1.0)
    with pytest.raises(UnprovenComposition, match="filter='renyi'"):
        odo.Accountant(plan().compiled).spend(cost)
    assert odo.Accountant(plan("renyi").compiled).decide(cost).admitted


def test_other_questions_are_taken_if_the_plan_says_so() -> None:
    assert odo.Accountant(plan().compiled).decide(odo.PureDP(0.01)).is_unproven
    made = odo.dpsgd_policy(3, 1e-6, sample_rates=RATES, noise_multipliers=[1], takes=("pure",), delta_steps=1e-8)
    account = odo.Accountant(made.compiled)
    account.spend(odo.ApproxDP(0.01, 1e-9))
    account.spend(odo.subsampled_gaussian(0.01, 1))


def test_the_plan_says_how_many_steps_each_setting_gets() -> None:
    text = str(plan())
    for rate, noise in SETTINGS:
        assert f"sampling rate {rate:g}, noise multiplier {noise:g}: {plan().steps[rate, noise]}" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise_multipliers": [0]}, "noise_multiplier must be above 0"),
        ({"noise_multipliers": []}, "need a value each"),
        ({"noise_multipliers": [1, 1.0]}, "none twice"),
        ({"sample_rates": [1.5]}, "sampling_rate must be above 0 and at most 1"),
        ({"filter": "zcdp"}, "'exact' and 'renyi'"),
        ({"delta_steps": 1e-6}, "must be above delta_steps"),
        ({"takes": ("zcdp",)}, "takes must list families"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], message: str) -> None:
    choices: dict[str, object] = {"sample_rates": RATES, "noise_multipliers": NOISES} | wrong
    with pytest.raises((InvalidPolicy, InvalidGuarantee), match=message):
        odo.dpsgd_policy(3, 1e-6, **choices)  # type: ignore[arg-type]
