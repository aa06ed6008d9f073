"""What is taken from dp-accounting: Rényi curves and privacy-loss distributions of subsampled Gaussians.

One step's distribution is taken as its "connect the dots" discretisation, which dominates the true one; blocks
are then composed and certified by this package. Its own convolutions serve estimates and baselines only.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from odograph.core.conversions import largest_rdp
from odograph.core.exact import blocks_alone
from odograph.core.gaussian import largest_mu
from odograph.core.guarantees import RDP, Mechanism
from odograph.core.menu import LossDistribution, MenuItem
from odograph.core.units import Numeric, read, up
from odograph.errors import InvalidGuarantee, InvalidPolicy, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["heterogeneous_epsilon", "subsampled_gaussian", "subsampled_gaussian_menu"]

# Orders of the curves: dense where targets from 0.1 to 20 have their best order.
_ORDERS: Final = (1.25, 1.5, 1.75, *range(2, 17), *range(18, 33, 2), *range(36, 65, 4), 80, 96, 128, 256, 512, 1024)
_BLOCKS: Final = range(400, 1101)  # how many blocks an item should get alone: enough to be adaptive, few to solve
_STEP_PARTS: Final = 16  # grid cells in one step's share of the loss's deviation: costs .1% of the steps

_CELLS_PER_STEP: Final = 64  # grid cells in the smallest epsilon: keeps the added variance below .1%
_CELLS: Final = (2**15, 2**20)  # grid cells in the sum of the epsilons: at least, and at most


def heterogeneous_epsilon(epsilons: Iterable[float], delta: float) -> float:
    """Return the optimal epsilon at `delta` of pure steps with different epsilons, to about .1%.

    Theorem: optimal heterogeneous composition (Murtagh and Vadhan 2016), as a convolution of the privacy loss
        distributions of randomized response.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance: a baseline, never a stop rule.
    """
    distributions = _load("dp_accounting.pld.privacy_loss_distribution")
    masses = _load("dp_accounting.pld.pld_pmf")
    groups = Counter(float(read(epsilon, "epsilons")) for epsilon in epsilons)
    del groups[0.0]  # such a step reveals nothing
    level = float(read(delta, "delta"))
    if not 0 < level < 1:
        raise InvalidGuarantee(f"delta must lie strictly between 0 and 1, and {delta!r} does not")
    if not groups:
        return 0.0
    total = math.fsum(groups.elements())
    fewest, most = _CELLS
    cell = max(min(min(groups) / _CELLS_PER_STEP, total / fewest), total / most)
    composed: Any = None
    for epsilon, count in groups.items():
        group = distributions.PrivacyLossDistribution(_randomized_response(masses, epsilon, cell)).self_compose(count)
        composed = group if composed is None else composed.compose(group)
    return float(composed.get_epsilon_for_delta(level))


def subsampled_gaussian(sampling_rate: Numeric, noise_multiplier: Numeric, steps: int = 1) -> Mechanism:
    """Return `steps` runs of a Poisson-subsampled Gaussian: priced by its name on a menu, or by its Rényi curve.

    Theorem: Mironov, Talwar, Zhang 2019 (the curve; it bounds both directions), and RDP composition.
    Assumes: Poisson sampling at `sampling_rate`, noise of `noise_multiplier` times the clipping norm, add/remove.
    """
    rate, noise = _settings(sampling_rate, noise_multiplier)
    accounting = _load("dp_accounting")
    accountant = _load("dp_accounting.rdp").RdpAccountant(orders=list(_ORDERS))
    accountant.compose(accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(noise)), 1)
    curve = zip(_ORDERS, accountant._rdp, strict=True)  # noqa: SLF001  there is no public accessor
    # The library's series is right to about 1e-10; an order where it overflows is left out.
    known = [(order, up(float(value) * (1.0 + 1e-9) * steps)) for order, value in curve if math.isfinite(value)]
    return Mechanism(_name(rate, noise), steps, RDP(tuple(o for o, _ in known), tuple(v for _, v in known)))


def subsampled_gaussian_menu(
    epsilon: Numeric, delta: Numeric, settings: Iterable[tuple[Numeric, Numeric]]
) -> tuple[MenuItem, ...]:
    """Return menu items for the given (sampling rate, noise multiplier) settings, in blocks of balanced size.

    Each item alone would get between 400 and 1100 blocks at the target, about as many as every other.

    Theorem: the connect-the-dots distribution dominates the true one (Doroshenko et al. 2022).
    Assumes: Poisson sampling, add/remove neighbours; the settings are fixed when the policy is made.
    """
    target = (read(epsilon, "epsilon", InvalidPolicy), read(delta, "delta", InvalidPolicy))
    checked = [_settings(rate, noise) for rate, noise in settings]
    steps = []
    for rate, noise in checked:
        rough = _rough_steps(rate, noise, float(target[0]), float(target[1]))
        item = _item(rate, noise, rough, max(1, rough // _BLOCKS.start), target)
        steps.append(max(1, blocks_alone(*target, item)) * item.block)
    count = min(_BLOCKS, key=lambda count: _unevenness(count, steps))
    return tuple(
        _item(rate, noise, alone, max(1, round(alone / count)), target)
        for (rate, noise), alone in zip(checked, steps, strict=True)
    )


def _item(rate: float, noise: float, alone: int, block: int, target: tuple[Fraction, Fraction]) -> MenuItem:
    """Make an item of which about `alone` steps fit the target; that sizes its grid, not its validity."""
    cell = largest_mu(float(target[0]), float(target[1])) / math.sqrt(alone) / _STEP_PARTS
    distributions = _load("dp_accounting.pld.privacy_loss_distribution")
    pair = distributions.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=cell, use_connect_dots=True
    )
    directions = tuple(_losses(pmf).composed(block) for pmf in (pair._pmf_remove, pair._pmf_add))  # noqa: SLF001
    return MenuItem(_name(rate, noise), block, cell, directions)


def _rough_steps(rate: float, noise: float, epsilon: float, delta: float) -> int:
    """Estimate how many steps of one setting alone fit the target, by its Rényi curve."""
    curve = subsampled_gaussian(rate, noise).curve
    if curve is None:
        return 1
    pairs = [(float(order), float(value)) for order, value in zip(curve.orders, curve.values, strict=True)]
    return max(1, int(max(largest_rdp(order, epsilon, delta) / value for order, value in pairs if value > 0.0)))


def _settings(sampling_rate: Numeric, noise_multiplier: Numeric) -> tuple[float, float]:
    rate = read(sampling_rate, "sampling_rate")
    noise = read(noise_multiplier, "noise_multiplier")
    if not 0 < rate <= 1:
        raise InvalidGuarantee(f"sampling_rate must be above 0 and at most 1, and {sampling_rate!r} is not")
    if noise == 0:
        raise InvalidGuarantee("noise_multiplier must be above 0: without noise there is no privacy, at any price")
    return float(rate), float(noise)


def _name(rate: float, noise: float) -> str:
    return f"subsampled_gaussian(sampling_rate={rate!r}, noise_multiplier={noise!r})"


def _losses(pmf: Any) -> LossDistribution:  # noqa: ANN401  untyped library
    dense = pmf.to_dense_pmf()
    masses = np.maximum(np.asarray(dense._probs, dtype=np.float64), 0.0)  # noqa: SLF001  no public accessor
    return LossDistribution(int(dense._lower_loss), masses, float(dense._infinity_mass))  # noqa: SLF001


def _unevenness(count: int, steps: list[int]) -> float:
    """How unlike the items' numbers of blocks are, if each gets about `count`."""
    blocks = [alone / max(1, round(alone / count)) for alone in steps]
    return max(blocks) / min(blocks)


def _randomized_response(masses: Any, epsilon: float, cell: float) -> Any:  # noqa: ANN401 - untyped library
    """Return the loss distribution of randomized response on a grid, from above.

    The library's own constructor rounds both losses up by as much as a cell, which adds up over the steps.
    Connecting the dots of the divergence curve at the grid points around each loss keeps the mean, and adds a
    variance of at most epsilon * cell.
    """
    floor = math.floor(epsilon / cell)
    grid = np.unique([-floor - 1, -floor, floor, floor + 1])
    losses = grid * cell
    between = -np.expm1(np.minimum(losses - epsilon, 0.0)) / (1 + math.exp(-epsilon))
    divergences = np.where(losses <= -epsilon, -np.expm1(losses), between)
    return masses.create_pmf_pessimistic_connect_dots(cell, grid, divergences)


def _load(module: str) -> Any:  # noqa: ANN401 - untyped library
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra("dp-accounting is not installed: pip install 'odograph[accounting]'") from error
