"""The solver, its adversary and its menu at the edges of what they are asked for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import count, islice, pairwise, repeat

import numpy as np
import pytest
from numpy.typing import NDArray

import odograph as odo
from odograph.core import value_iteration
from odograph.core.conversions import gdp_to_dp_delta, intrinsic_to_pure, largest_mu, largest_rho
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.value_iteration import (
    INWARD,
    OUTWARD,
    Budget,
    Edges,
    Grid,
    Kernel,
    Member,
    Row,
    hockey_stick,
    refuted_intrinsic,
    solve,
    solve_with_values,
    values,
)
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


# The engine against the recursion as it is written: a dictionary of rows, one member and one point after the other.


def looked_up(row: Row, grid: Grid, epsilon: float, edges: Edges, places: NDArray[np.int64]) -> Row:
    """The row at these grid points, of which some are beyond the grid."""
    inside = row[np.clip(places - grid.low, 0, grid.size - 1)]
    if edges is OUTWARD:
        below = 1.0 - (1.0 - row[0]) * np.exp(grid.step * np.minimum(places - grid.low, 0))
        return np.where(places < grid.low, below, inside)  # above the grid: the last value
    below = np.maximum(0.0, 1.0 - np.exp(np.minimum(epsilon + grid.step * places, 1.0)))
    return np.where(places < grid.low, below, np.where(places > grid.high, 0.0, inside))


def as_written(grid: Grid, epsilon: float, members: Sequence[Member], edges: Edges, last: int) -> list[float]:
    """Phi(1, 1) .. Phi(1, last), without batches, rings or padding."""
    places = np.arange(grid.low, grid.high + 1, dtype=np.int64)
    corners = places[::4]
    rows = {0: np.maximum(0.0, 1.0 - np.exp(np.minimum(epsilon + grid.step * places, 1.0)))}
    for n in range(1, last + 1):
        row, between = rows[n - 1].copy(), np.zeros(corners.size)
        for member in members:
            one_by_one = member.kernel.run is not None
            stride = 1 if one_by_one else member.stride
            end = next(end for end in range(n, n + stride) if end % stride == 0)
            if member.charge > end:
                continue
            # The first row that is kept and from which the last row of the block can be reached.
            source = rows[next(back for back in range(end - member.charge, end) if back % stride == 0)]
            at = corners if member.coarse and not one_by_one else places
            total: Row = np.full(at.size, member.kernel.reveal)
            for offset, weight in weights_of(member.kernel):
                total += weight * looked_up(source, grid, epsilon, edges, at + offset)
            if at is corners:
                between = np.maximum(between, total)
            else:
                row = np.maximum(row, total)
        chords = np.interp(np.exp(grid.step * places), np.exp(grid.step * corners), between)
        rows[n] = np.minimum(np.maximum(row, chords), 1.0)
    return [float(rows[n][grid.origin]) for n in range(1, last + 1)]


def weights_of(kernel: Kernel) -> list[tuple[int, float]]:
    return [*kernel.points] if kernel.run is None else [*enumerate(kernel.run[1].tolist(), kernel.run[0])]


Game = tuple[Grid, float, list[Member], Edges]


def drawn(seed: int) -> Game:
    """Draw a grid and members: fine, coarse and strided ones, runs, reveals, reaches far beyond the grid."""
    rng = random.Random(seed)  # noqa: S311  draws, not secrets
    low, quarters = rng.randint(1, 24), rng.randint(7, 10)
    grid = Grid(rng.uniform(0.02, 0.2), -low, 4 * quarters - low)
    edges = INWARD if seed % 4 == 3 else OUTWARD
    many = seed % 25 == 10  # more members of one kind than are worked out at once
    members = []
    for _ in range(70 if many else rng.randint(2, 9)):
        coarse = edges is OUTWARD and not many and rng.random() < 0.6
        stride = rng.choice([1, 2, 4, 8]) if coarse else 1
        charge = stride + rng.choice([0, 0, 1, rng.randint(0, 5), rng.randint(0, 20)])
        reveal = rng.choice([0.0, 0.0, 0.002, 0.03])
        if rng.random() < 0.25 and not many:
            taps = np.array([rng.random() for _ in range(rng.randint(2, 30))])
            kernel = Kernel(run=(rng.randint(-40, 20), taps * (1.0 - reveal) / taps.sum()), reveal=reveal)
        else:
            parts = [rng.random() for _ in range(rng.choice([1, 2, 4, 4, 5]))]
            points = ((rng.randint(-35, 35), (1.0 - reveal) * part / sum(parts)) for part in parts)
            kernel = Kernel(points=tuple(points), reveal=reveal)
        members.append(Member(charge, kernel, coarse, stride))
    return grid, rng.uniform(0.0, 1.0), members, edges


def differ(game: Game, played: Sequence[Member], last: int = 45) -> bool:
    """The checker: whether the engine's values are not those of the game as written, rounded the right way."""
    grid, epsilon, members, edges = game
    pairs = zip(
        islice(values(grid, epsilon, played, edges), last),
        as_written(grid, epsilon, members, edges, last),
        strict=True,
    )
    return not all(0.0 <= edges.sign * (found - wanted) <= 1e-11 * wanted for found, wanted in pairs)


@pytest.mark.parametrize("seed", range(60))
def test_the_engine_plays_the_recursion_as_it_is_written(seed: int) -> None:
    game = drawn(seed)
    assert not differ(game, game[2])


CHANGES: dict[str, Callable[[Member], Member]] = {
    "a charge of one more": lambda m: replace(m, charge=m.charge + 1),
    "a charge of one less": lambda m: replace(m, charge=max(m.stride, m.charge - 1)),
    "no reveal": lambda m: replace(m, kernel=replace(m.kernel, reveal=0.0)),
    "every row": lambda m: replace(m, stride=1),
    "half as many rows": lambda m: replace(m, stride=2 * m.stride, charge=max(m.charge, 2 * m.stride)),
    "every point": lambda m: replace(m, coarse=False),
    "the next point": lambda m: replace(m, kernel=moved(m.kernel)),
}


def moved(kernel: Kernel) -> Kernel:
    run = None if kernel.run is None else (kernel.run[0] + 1, kernel.run[1])
    return replace(kernel, points=tuple((offset + 1, weight) for offset, weight in kernel.points), run=run)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_engine_that_plays_another_game_is_caught(change: Callable[[Member], Member]) -> None:
    """Negative controls: one mistake each, in all members."""
    games = [drawn(seed) for seed in range(20) if seed != 10]
    assert any(differ(game, [change(member) for member in game[2]]) for game in games)


def exactly_played(grid: Grid, members: Sequence[Member], start: Row, units: int) -> list[Fraction]:
    """The value of the game in exact numbers, without the grid's edges: no sum of weights is rounded."""

    @cache
    def best(place: int, left: int) -> Fraction:
        found = Fraction(float(start[place - grid.low]))
        for member in members:
            for n in range(member.charge, left + 1):
                parts = [Fraction(w) * best(place + o, n - member.charge) for o, w in member.kernel.points]
                found = max(found, sum(parts, Fraction(member.kernel.reveal)))
        return found

    return [best(0, n) for n in range(1, units + 1)]


def rounded_wrongly(edges: Edges) -> int:
    """The checker: how many values of small games are on the wrong side of the exact ones."""
    wrong, epsilon, units = 0, 0.3, 8
    for seed in range(12):
        rng = random.Random(seed)  # noqa: S311  draws, not secrets
        members = []
        for charge in (1, 2, 3):
            parts = [rng.random() for _ in range(4)]
            points = tuple((rng.randint(-3, 3), part / sum(parts)) for part in parts)
            members.append(Member(charge, Kernel(points=points)))
        grid = Grid(0.05, -40, 40)
        exact = exactly_played(grid, members, hockey_stick(grid, epsilon, edges.sign), units)
        found = islice(values(grid, epsilon, members, edges), units)
        wrong += sum((Fraction(v) - e) * int(edges.sign) < 0 for v, e in zip(found, exact, strict=True))
    return wrong


@pytest.mark.parametrize("edges", [OUTWARD, INWARD], ids=["outward", "inward"])
def test_no_sum_is_rounded_the_wrong_way(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounded_wrongly(edges) == 0
    monkeypatch.setattr(value_iteration, "ULP", 0.0)  # negative control: nothing is added for rounding
    assert rounded_wrongly(edges) > 0


# What a budget is certified for.


def certified_for(
    monkeypatch: pytest.MonkeyPatch, epsilon: str, delta: str, *, reserve: bool
) -> tuple[Grid, list[Member], Budget, list[float]]:
    """The members that a budget is solved with, and what becomes of it if they never lose anything."""
    seen: list[tuple[Grid, list[Member]]] = []

    def never(grid: Grid, _epsilon: float, members: Sequence[Member], _edges: Edges) -> Iterator[float]:
        seen.append((grid, [*members]))
        return repeat(0.0)

    target = Fraction(epsilon), Fraction(delta)
    monkeypatch.setattr(value_iteration, "values", never)
    if reserve:
        found, (rows,) = solve_with_values(*target, beyond=1.5)
    else:
        found, rows = solve(*target), []
    return *seen[0], found, rows


def put(kernel: Kernel, step: float, strike: float) -> float:
    """E(1 - Z/t)^+ under a kernel."""
    parts = ((weight, offset * step - strike) for offset, weight in weights_of(kernel))
    return kernel.reveal + math.fsum(weight * max(0.0, -math.expm1(min(log, 1.0))) for weight, log in parts)


def uncovered(grid: Grid, members: Sequence[Member], budget: Budget, *, gaussians: Sequence[int]) -> list[str]:
    """The checker: the pure steps of whole units, and the Gaussians, that no affordable member is as strong as."""
    missing: list[str] = []
    strikes = (-0.9, -0.3, 0.0, 0.4, 0.9)
    points = sorted((m for m in members if m.kernel.run is None), key=lambda m: m.charge)
    for charge in {*range(1, 400, 7), *range(400, budget.units + 1, 61), budget.units}:
        e = intrinsic_to_pure(float(charge * budget.quantum))
        strongest = next(m for m in reversed(points) if m.charge <= charge)
        for strike in strikes:
            logs = ((1 / (1 + math.exp(s)), s - strike * e) for s in (-e, e))
            true = sum(weight * max(0.0, -math.expm1(min(log, 1.0))) for weight, log in logs)
            if put(strongest.kernel, grid.step, strike * e) < true * (1 - 1e-12):
                missing.append(f"{charge} units")
                break
    for charge in gaussians:
        variance = float(charge * budget.quantum)
        kernel = next((m.kernel for m in members if m.kernel.run is not None and m.charge == charge), None)
        for sd in (-30.0, -9.0, -4.0, -1.0, 0.0, 2.0, 9.0):
            mu = math.sqrt(variance)
            lost = gdp_to_dp_delta(mu, abs(sd) * mu)
            true = lost if sd < 0 else 1 - math.exp(-sd * mu) * (1 - lost)
            if kernel is None or put(kernel, grid.step, sd * mu) < true * (1 - 1e-12):
                missing.append(f"Gaussian of {charge}")
                break
    return missing


GAUSSIANS = [4, 5, 6, 7]  # any integer from 4 on is a sum of these
COVERED: list[tuple[str, str]] = [("1", "1e-6"), ("0.1", "0.01"), ("200", "1e-3"), ("3", "1e-12")]


@pytest.mark.parametrize(("epsilon", "delta"), COVERED)
@pytest.mark.parametrize("reserve", [False, True], ids=["exact", "reserve"])
def test_every_charge_up_to_the_budget_is_one_that_was_solved_for(
    monkeypatch: pytest.MonkeyPatch, epsilon: str, delta: str, *, reserve: bool
) -> None:
    grid, members, budget, rows = certified_for(monkeypatch, epsilon, delta, reserve=reserve)
    assert uncovered(grid, members, budget, gaussians=GAUSSIANS) == []
    assert sorted(m.charge for m in members if m.kernel.run is not None) == GAUSSIANS
    # Charges beyond the longest that is covered are not certified, though nothing was lost up to there.
    assert set(rows[budget.units + 1 :]) == ({1.0} if reserve else set())


def test_charges_that_were_not_solved_for_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: steps that are a band too small, no tail, and a Gaussian that is missing."""
    grid, members, budget, _ = certified_for(monkeypatch, "1", "1e-6", reserve=False)
    points = [m for m in members if m.kernel.run is None]
    runs = [m for m in members if m.kernel.run is not None]
    smaller = [replace(more, kernel=less.kernel) for less, more in pairwise(points)]
    assert len(uncovered(grid, points[:1] + smaller + runs, budget, gaussians=())) > 50
    cut = [replace(m, kernel=replace(m.kernel, reveal=0.0)) for m in runs]
    assert len(uncovered(grid, points + cut, budget, gaussians=GAUSSIANS)) == 4
    missing = [f"Gaussian of {m}" for m in (5, 6, 7)]
    assert uncovered(grid, points + runs[:1], budget, gaussians=GAUSSIANS) == missing


def of_gaussians_alone() -> tuple[Budget, list[float]]:
    budget, (rows,) = solve_with_values(
        Fraction(200), Fraction(1, 10**6), takes=("gaussian",), fineness=2, beyond=1.2
    )
    return budget, rows


def too_low(rows: Sequence[float], quantum: Fraction) -> list[int]:
    """The rows, of 4 units and more, that one Gaussian of so many units exceeds."""
    return [n for n in range(4, len(rows)) if rows[n] < gdp_to_dp_delta(math.sqrt(n * quantum), 200.0)]


def test_every_row_from_the_least_gaussian_on_holds_for_a_gaussian_that_uses_it_up() -> None:
    """A reserve is a Gaussian of any number of units from 4 on, and so is what is left for charges."""
    budget, rows = of_gaussians_alone()
    assert too_low(rows, budget.quantum) == []
    assert budget.intrinsic <= largest_mu(200.0, 1e-6) ** 2


def test_a_solver_of_the_least_gaussian_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = value_iteration.values

    def least(grid: Grid, epsilon: float, members: Sequence[Member], edges: Edges) -> Iterator[float]:
        return kept(grid, epsilon, [m for m in members if m.charge == 4], edges)

    monkeypatch.setattr(value_iteration, "values", least)
    budget, rows = of_gaussians_alone()
    assert {n % 4 for n in too_low(rows, budget.quantum)} == {1, 2, 3}
    assert budget.intrinsic > largest_mu(200.0, 1e-6) ** 2


@pytest.mark.parametrize("order", [(25, 40), (40, 25)])
def test_of_two_directions_the_smaller_budget_counts(monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]) -> None:
    lasts = [30, *order]  # of the families alone, then of each direction of the menu

    def lose_after(*_: object) -> Iterator[float]:
        last = lasts.pop(0)
        return (float(n > last) for n in count(1))

    monkeypatch.setattr(value_iteration, "values", lose_after)
    monkeypatch.setattr(value_iteration, "blocks_alone", lambda *_: 5)
    losses = LossDistribution(-1, np.array([0.5, 0.0, 0.5]), 0.0)
    menu = [MenuItem("a", 1, 0.1, (losses, losses), oriented=True)]
    budget, rows = solve_with_values(Fraction(20), Fraction(1, 10**6), menu=menu, fineness=1, beyond=1.0)
    assert budget.units == min(order)
    assert [len(row) - 1 for row in rows] == [*order]


@pytest.mark.parametrize("strong", [0, 63, 64, 65, 127, 128, 129])
def test_no_member_of_many_is_missed(strong: int) -> None:
    """All others stay where they are, so the value first grows at the charge of the one that reveals."""
    members = [
        Member(m + 1, Kernel(points=((0, 0.75 if m == strong else 1.0),), reveal=0.25 * (m == strong)))
        for m in range(130)
    ]
    found = [0.0, *islice(values(Grid(0.1, -20, 20), 0.5, members, OUTWARD), 130)]
    assert found[: strong + 2] == [*[0.0] * (strong + 1), pytest.approx(0.25)]
