"""The sparse vector keeps its promise, is charged once for hundreds of questions, and finds what is there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from charge_history import charges

import odograph as odo
import sparse_vector
from odograph.cli.demo import Rows
from odograph.core.guarantees import Interactive
from sparse_vector import FINDS, LIMIT, Noise


@pytest.fixture(scope="module")
def table() -> Rows:
    return Rows.load()


def scale_of(noise: object) -> float:
    return 1 / float(noise.map(1))  # type: ignore[attr-defined]


def chance(answers: Sequence[bool], counts: Sequence[int], noise: Noise, *, factor: float = 1) -> float:
    """The exact probability of the answers about some counts, with the noise on counts made smaller by a factor."""
    limits = np.arange(-400, 401)
    on_limit, on_count = (math.exp(-1 / scale) for scale in (scale_of(noise.limit), scale_of(noise.count) / factor))
    found = on_limit ** np.abs(limits) * (1 - on_limit) / (1 + on_limit)
    for answer, count in zip(answers, counts, strict=True):
        needed = limits - count  # the noise on a count that is a yes, from here on; the limit is 0 without noise
        tail = np.where(needed > 0, on_count ** np.abs(needed), 1 + on_count - on_count ** (1 + np.abs(needed)))
        reached = tail / (1 + on_count)
        found = found * (reached if answer else 1 - reached)
    return float(found.sum())


def leak(noise: Noise, finds: int, factor: float = 1) -> float:
    """The largest loss over all answers to five questions, about counts that differ by one everywhere."""
    worst = 0.0
    for answers in itertools.product((False, True), repeat=5):
        stop = [i for i, yes in enumerate(itertools.accumulate(answers)) if yes == finds]
        said = answers[: stop[0] + 1] if stop else answers
        for moved in itertools.product((0, 1), repeat=len(said)):
            p, q = (chance(said, counts, noise, factor=factor) for counts in ([0] * len(said), moved))
            worst = max(worst, abs(math.log(p / q)))
    return worst


@pytest.mark.parametrize("finds", [1, 2])
def test_no_answers_leak_more_than_is_charged(finds: int) -> None:
    noise = Noise.of(1.0, finds)
    charged = float(noise.cost(finds).epsilon)
    assert charged == pytest.approx(1.0)
    assert 0.4 < leak(noise, finds) <= charged
    assert leak(noise, finds, factor=4) > charged  # the negative control: too little noise on the counts


def test_hundreds_of_questions_are_one_charge(table: Rows) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6, privacy_unit="person-year"))
    found, asked = sparse_vector.find(account, table)
    assert asked > 400
    assert len(found) == FINDS
    first, *others = (entry.cost for entry in charges(account))
    assert first == Interactive(Noise.of(sparse_vector.SPARSE).cost())
    assert len(others) == FINDS
    assert all(isinstance(cost, odo.PureDP) and float(cost.epsilon) < 0.051 for cost in others)


def test_the_groups_that_it_finds_are_there(table: Rows) -> None:
    """Noise cannot be seeded: of 30 groups a few may be far from the limit, but not half of them."""
    near = 0
    for _ in range(10):
        found, _ = sparse_vector.find(odo.Accountant(odo.Policy(1, 1e-6)), table)
        near += sum(sparse_vector.matching(table, group) > LIMIT / 2 for group, _ in found)
    assert near > 15


def test_it_ends_with_its_last_yes(table: Rows) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    noise = Noise.of(0.5)
    with account.interact(sparse_vector.sparse_vector, table, noise, cost=noise.cost()) as reaches:
        answers: list[bool] = []
        while sum(answers) < FINDS:
            answers.append(reaches({}))  # 1,156 rows: nearly always a yes
        with pytest.raises(odo.errors.AccountClosed, match="has ended"):
            reaches({})
    assert len(charges(account)) == 1
