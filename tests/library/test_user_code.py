"""The code that a data scientist writes, as it is meant to be written."""

from __future__ import annotations

import opendp.prelude as dp
import pytest
from charge_history import charges

import odograph as odo


def test_an_analyst_spends_asks_and_reads() -> None:
    policy = odo.Policy(epsilon=1.0, delta=1e-6)
    acc = odo.Accountant(policy)
    acc.spend(odo.PureDP(0.05))
    acc.spend(odo.gaussian(sigma=25, sensitivity=1))
    refusal = acc.decide(odo.PureDP(0.9))
    assert not refusal
    assert set(refusal.spent) == set(refusal.asked) == set(refusal.left)
    assert refusal.largest is not None
    assert acc.decide(refusal.largest)
    size = acc.largest(odo.PureDP, times=10)
    assert size is not None
    assert acc.quote([size] * 10)
    assert not acc.quote([size] * 11)
    assert acc.reading().covered
    own, *others = acc.compare()
    assert own.covered
    assert others
    assert not any(reading.covered for reading in others)
    assert acc.totals.steps == 2


@pytest.mark.parametrize(("people", "second"), [(500, 0.2), (5000, 0.05)])
def test_the_cost_of_a_step_is_chosen_from_what_was_seen(people: int, second: float) -> None:
    dp.enable_features("contrib")
    acc = odo.Accountant(odo.Policy(epsilon=1.0, delta=1e-6))
    data = [1] * people

    def noisy_count(rows: list[int], scale: float) -> int:
        space = dp.atom_domain(T=int), dp.absolute_distance(T=int)
        return int(dp.m.make_laplace(*space, scale=scale)(len(rows)))

    with odo.session(acc) as s:
        rough = s.run(noisy_count, data, scale=50.0, cost=odo.PureDP(0.02))
        cost = odo.PureDP(0.2 if rough < 1500 else 0.05)  # 20 noise scales from either number of people
        s.run(noisy_count, data, scale=1 / float(cost.epsilon), cost=cost)
    assert [entry.cost for entry in charges(acc)] == [odo.PureDP(0.02), odo.PureDP(second)]
    assert [entry.note for entry in charges(acc)] == ["noisy_count", "noisy_count"]
