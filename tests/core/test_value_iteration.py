"""The solver, its adversary and its menu at the edges of what they are asked for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

import odograph as odo
from odograph.core.conversions import largest_mu, largest_rho
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.value_iteration import refuted_intrinsic, solve
from odograph.errors import InvalidArgument, InvalidPolicy

TARGET = Fraction(1), Fraction(1, 1000)


def test_where_one_large_step_is_enough_the_adversary_is_at_least_as_good_and_no_proof_is_refuted() -> None:
    epsilon, step = 20, 1.0
    refuted = float(refuted_intrinsic(Fraction(epsilon), Fraction(1, 2), step))
    # One step of 21 has divergence (e^21 - e^20)/(1 + e^21), above 1/2; what is proven for zCDP stands.
    assert 2 * largest_rho(float(epsilon), 0.5) <= refuted <= 2 * 21 * math.tanh(10.5) + 1e-9


def test_a_budget_is_certified_for_known_families_and_for_something() -> None:
    with pytest.raises(InvalidPolicy, match="takes must list families"):
        solve(*TARGET, takes=("pure", "zcdp"))
    with pytest.raises(InvalidPolicy, match="must take a family"):
        solve(*TARGET, takes=())
    with pytest.raises(InvalidPolicy, match="must take a family"):
        odo.compile_policy(odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=())))


def test_gaussians_alone_get_what_the_gdp_filter_gives_them_or_a_little_less() -> None:
    target = Fraction(1), Fraction(1, 5)
    alone = solve(*target, takes=("gaussian",), fineness=1).intrinsic
    most = largest_mu(*map(float, target)) ** 2
    assert 0.97 * most <= alone <= most


@pytest.mark.parametrize("masses", [[], [[0.5], [0.5]], [0.5, -0.5, 1.0], [math.nan, 1.0]], ids=repr)
def test_masses_that_are_no_distribution_are_refused(masses: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="finite nonnegative numbers"):
        LossDistribution(0, np.array(masses), 0.0)


@pytest.mark.parametrize(("mass", "infinite"), [(0.9, 0.0), (1.0, 0.1), (1.0, -0.1), (1.0, math.nan), (0.0, 1.1)])
def test_masses_that_do_not_sum_to_one_are_refused(mass: float, infinite: float) -> None:
    with pytest.raises(InvalidArgument, match="must sum to 1"):
        LossDistribution(0, np.array([mass]), infinite)


def test_runs_that_always_reveal_reveal_however_many_there_are() -> None:
    losses = LossDistribution(0, np.array([0.0]), 1.0)
    assert losses.compose(3).infinite == 1.0


def test_no_runs_have_no_distribution() -> None:
    with pytest.raises(InvalidArgument, match="an integer from 1"):
        LossDistribution(0, np.array([1.0]), 0.0).compose(0)


def item(name: str, mass: float = 0.5, step: float = 0.1) -> MenuItem:
    losses = LossDistribution(-1, np.array([mass, 0.0, 1 - mass]), 0.0)
    return MenuItem(name, 1, step, (losses, losses))


def test_menu_items_are_the_same_if_all_that_was_analysed_is() -> None:
    first, again = item("a"), item("a")
    assert first == again
    assert len({first, again}) == 1
    for other in (item("b"), item("a", 0.4), item("a", step=0.2), "a"):
        assert first != other
    assert repr(first) == f"<MenuItem a in blocks of 1, {first.digest[:8]}>"


@pytest.mark.parametrize(("ways", "step"), [(1, 0.1), (3, 0.1), (2, 0.0), (2, -0.1), (2, math.inf), (2, math.nan)])
def test_a_menu_item_has_two_directions_on_a_positive_step(ways: int, step: float) -> None:
    losses = LossDistribution(0, np.array([1.0]), 0.0)
    with pytest.raises(InvalidArgument, match="two distributions, on a positive step"):
        MenuItem("a", 1, step, (losses,) * ways)


def test_menu_items_have_different_names() -> None:
    with pytest.raises(InvalidPolicy, match=r"different names \(got a, a\)"):
        odo.Policy(1, 1e-6, filter=odo.filters.Exact(menu=[item("a", 0.4), item("a")]))


def test_where_a_first_guess_is_far_too_high_a_block_is_a_single_step() -> None:
    assert odo.mechanisms.subsampled_gaussian_menu(8, 1e-6, [(1.8e-5, 0.25)])[0].block == 1
