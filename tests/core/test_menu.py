from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import mpmath
import numpy as np
import pytest

import odograph as odo
from odograph import Policy, UnprovenComposition, compile_policy
from odograph.core.conversions import largest_mu
from odograph.core.filters import Exact, ExactMeter
from odograph.core.guarantees import Mechanism
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.planning import AccountState, largest
from odograph.core.policy import Compiled


@pytest.fixture(scope="module", autouse=True)
def _digits() -> Iterator[None]:
    with mpmath.workdps(60):
        yield


# The sampling rate, the noise multipliers, the steps that plain composition of each admits alone.
RATE = 0.01
OPTIMA = {1.0: (2060, 0.95), 1.5: (7220, 0.93), 2.5: (23906, 0.90)}


@cache
def menu() -> tuple[MenuItem, ...]:
    return odo.mechanisms.subsampled_gaussian_menu(3, 1e-6, [(RATE, noise) for noise in OPTIMA])


@cache
def over_the_menu() -> Compiled:
    return compile_policy(Policy(3, 1e-6, filter=Exact(takes=(), menu=menu())))


def admitted(compiled: Compiled, name: str) -> int:
    offer = largest(AccountState("", compiled, compiled.start), Mechanism(name))
    return offer.steps if isinstance(offer, Mechanism) else 0


@pytest.mark.parametrize("index", range(3))
def test_an_adaptive_menu_reaches_nearly_the_fixed_parameter_optimum(index: int) -> None:
    optimum, share = list(OPTIMA.values())[index]
    steps = admitted(over_the_menu(), menu()[index].name)
    assert share * optimum <= steps <= optimum


def composed_delta(noise: float, steps: int) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld  # noqa: PLC0415  an optional library

    one = pld.from_gaussian_mechanism(noise, sampling_prob=RATE, value_discretization_interval=2e-4)
    return float(one.self_compose(steps).get_delta_for_epsilon(3))


def test_the_optimum_is_that_of_an_independent_accountant() -> None:
    """The checker of the menu's budget: what is admitted composes to at most delta, a few percent more does not."""
    steps = admitted(over_the_menu(), menu()[0].name)
    assert composed_delta(1.0, steps) <= 1e-6
    assert composed_delta(1.0, 2060) <= 1.0002e-6
    assert composed_delta(1.0, round(1.06 * steps)) > 1e-6  # negative control: the limit raised by 6%


def test_runs_of_all_items_share_one_budget() -> None:
    compiled, totals = over_the_menu(), over_the_menu().start
    for index, item in enumerate(menu()):
        left = largest(AccountState("", compiled, totals), Mechanism(item.name))
        assert isinstance(left, Mechanism)
        part = Mechanism(item.name, max(1, left.steps // (3 - index)))
        decision = odo.planning.ask(odo.planning.AccountState("", compiled, totals), part)
        assert decision.admitted
        totals = decision.totals_after
    assert not any(
        odo.planning.ask(odo.planning.AccountState("", compiled, totals), Mechanism(i.name, 3 * i.block)).admitted
        for i in menu()
    )


def test_a_run_is_charged_its_part_of_a_block() -> None:
    item = menu()[2]
    assert item.block > 1
    one, block = (over_the_menu().price(Mechanism(item.name, steps)).amounts[3] for steps in (1, item.block))
    more = over_the_menu().price(Mechanism(item.name, item.block + 1)).amounts[3]
    assert one is not None
    assert block == item.block * one
    assert more == block + one


def test_blocks_that_are_begun_are_within_the_certified_budget() -> None:
    """Whatever runs of several items are admitted, the blocks that they begin are ones that were certified."""
    meter = over_the_menu().meter(ExactMeter)
    certified = meter.certified_units
    rng = random.Random(7)  # noqa: S311  draws, not secrets
    for _ in range(200):
        runs, left = dict.fromkeys([name for name, *_ in meter.charges], 0), meter.limit or 0
        while True:
            name = rng.choice([*runs])
            price = meter.price(Mechanism(name)) or 0
            if price > left:
                break
            count = min(left // price, rng.randrange(1, 200))
            runs[name] += count
            left -= count * price
        begun = sum(-(-runs[name] // block) * units for name, block, units in meter.charges)
        assert begun <= certified
    assert begun_at_most(meter) <= certified
    # Negative control: the whole budget as a limit, with nothing taken off for blocks that are begun.
    assert begun_at_most(replace(meter, limit=certified * meter.parts)) > certified


def begun_at_most(meter: ExactMeter) -> int:
    """The units of the blocks that are begun by an analyst who begins one of each item first."""
    left = (meter.limit or 0) - sum(meter.price(Mechanism(name)) or 0 for name, *_ in meter.charges)
    name, block, units = meter.charges[0]
    runs = left // (meter.price(Mechanism(name)) or 1)
    return sum(units for *_, units in meter.charges[1:]) + -(-(runs + 1) // block) * units


def test_a_meter_of_0_1_0_charges_whole_blocks() -> None:
    item = menu()[2]
    old = replace(over_the_menu().meter(ExactMeter), parts=1)
    one, block, more = (old.price(Mechanism(item.name, runs)) for runs in (1, item.block, item.block + 1))
    assert one == block
    assert more == 2 * (block or 0)


@pytest.mark.parametrize("request_", [odo.PureDP(0.1), odo.GDP(0.1), Mechanism("another"), odo.ZCDP(0.01)], ids=repr)
def test_what_is_not_on_the_menu_is_unproven(request_: odo.Guarantee) -> None:
    with pytest.raises(UnprovenComposition):
        over_the_menu().price(request_)


def test_the_message_lists_the_menu() -> None:
    with pytest.raises(UnprovenComposition) as caught:
        over_the_menu().price(Mechanism("another"))
    assert all(item.name in str(caught.value) for item in menu())


def test_a_menu_of_plain_gaussians_agrees_with_the_gdp_filter_from_below() -> None:
    items = odo.mechanisms.subsampled_gaussian_menu(1, 1e-6, [(1, 100)])
    steps = admitted(compile_policy(Policy(1, 1e-6, filter=Exact(takes=(), menu=items))), items[0].name)
    most = int(largest_mu(1.0, 1e-6) ** 2 * 100**2)
    assert 0.985 * most <= steps <= most


def test_a_stored_menu_prices_but_does_not_certify() -> None:
    again = Compiled.from_dict(over_the_menu().to_dict())
    name = menu()[1].name
    assert again.price(Mechanism(name, 99)) == over_the_menu().price(Mechanism(name, 99))
    with pytest.raises(odo.errors.InvalidPolicy, match="build them again"):
        compile_policy(Policy(3, 1e-7, filter=Exact(takes=(), menu=again.policy.menu)))


def true_divergences(noise: float, epsilon: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """The hockey-stick divergences of one subsampled Gaussian at epsilon, both orders, in closed form."""
    q, s, scale = mpmath.mpf(RATE), mpmath.mpf(noise), mpmath.exp(mpmath.mpf(epsilon))

    def between(density_ratio: mpmath.mpf) -> mpmath.mpf:
        return s**2 * mpmath.log(density_ratio) + mpmath.mpf(1) / 2

    remove = mpmath.mpf(1) - scale
    if (scale - 1 + q) > 0:
        cut = between((scale - 1 + q) / q)
        tail0, tail1 = mpmath.ncdf(-cut / s), mpmath.ncdf((1 - cut) / s)
        remove = (1 - q) * tail0 + q * tail1 - scale * tail0
    add = mpmath.mpf(0)
    if (1 / scale - 1 + q) > 0:
        cut = between((1 / scale - 1 + q) / q)
        head0, head1 = mpmath.ncdf(cut / s), mpmath.ncdf((cut - 1) / s)
        add = head0 - scale * ((1 - q) * head0 + q * head1)
    return remove, add


def divergence(losses: LossDistribution, step: float, place: int) -> float:
    """E[max(0, 1 - e^(t - L))] of a discrete distribution at the grid point t = place * step."""
    above = np.arange(max(place + 1, losses.lowest), losses.lowest + losses.masses.size)
    gain = -np.expm1(step * (place - above.astype(np.float64)))
    return float(losses.masses[above - losses.lowest] @ gain) + losses.infinite


def shortfall(directions: tuple[LossDistribution, ...], step: float, noise: float) -> float:
    """How far a discretised distribution falls below the true one at grid points, relatively."""
    worst = 0.0
    for place in [*range(-20, 60, 3), *range(60, 600, 40)]:
        for losses, true in zip(directions, true_divergences(noise, place * step), strict=True):
            if true > mpmath.mpf("1e-18"):
                worst = max(worst, float(1 - mpmath.mpf(divergence(losses, step, place)) / true))
    return worst


@pytest.mark.parametrize("noise", [1.0, 2.5])
def test_a_menu_item_dominates_the_mechanism_it_stands_for(noise: float) -> None:
    from odograph.core.mechanisms import subsampled_gaussian_losses  # noqa: PLC0415

    step = 0.004
    assert shortfall(subsampled_gaussian_losses(RATE, noise, step), step, noise) <= 1e-12


def test_a_distribution_that_drops_its_tail_is_caught() -> None:
    """Negative control: the same distribution without its last few masses."""
    from odograph.core.mechanisms import subsampled_gaussian_losses  # noqa: PLC0415

    step = 0.004
    remove, add = subsampled_gaussian_losses(RATE, 1.0, step)
    cut = LossDistribution(remove.lowest, remove.masses[:200] / remove.masses[:200].sum(), 0.0)
    assert shortfall((cut, add), step, 1.0) > 1e-6


def test_mass_that_is_missing_counts_as_infinite_loss() -> None:
    """A distribution whose masses sum to a little less than 1 must not be taken as if nothing were missing."""
    masses = np.array([0.5, 0.5 - 9e-7])
    try:
        losses = LossDistribution(0, masses, 0.0)
    except odo.errors.InvalidPolicy:
        return
    assert losses.infinite >= 9e-7
