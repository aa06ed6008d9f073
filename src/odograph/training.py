"""Private training whose noise, clipping and batch size are chosen as it goes: one policy for all the choices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from typing import Final, Never

from odograph.compile import compile_policy
from odograph.core.conversions import largest_rdp
from odograph.core.filters import Exact, Renyi
from odograph.core.fixed_point import Numeric, read
from odograph.core.guarantees import RDP, Mechanism, exact_of
from odograph.core.mechanisms import sampling_settings, subsampled_gaussian, subsampled_gaussian_menu
from odograph.core.odometers import RenyiOdometer
from odograph.core.planning import AccountState, how_many
from odograph.core.policy import Compiled, Policy, refuse_old_words
from odograph.display import card, facts, one_line, table
from odograph.errors import InvalidPolicy, with_usage

__all__ = ["Setting", "TrainingPlan", "dpsgd_policy"]

Setting = tuple[float, float]  # sampling rate, noise multiplier

# Parts of the budget at which the odometer is to be tight: training looks at it early, and at the end.
_LOOKS: Final = (1 / 64, 1 / 16, 1 / 4, 1.0)
_NONE: Final = 0.01  # steps: as good as none
_MOST_ORDERS: Final = 8  # of a plan: each costs the others a share of delta'


@dataclass(frozen=True, slots=True, repr=False)
class TrainingPlan:
    """A compiled policy for training, and how many steps each setting would get if it were the only one used."""

    compiled: Compiled
    steps: Mapping[Setting, int]

    @property
    def policy(self) -> Policy:
        """The policy, for an `Accountant` or a ledger."""
        return self.compiled.policy

    def __repr__(self) -> str:
        count = len(self.steps)
        return one_line("TrainingPlan", f"{self.policy.target} by filter {self.policy.filter_text}, {count} settings")

    def _repr_html_(self) -> str:
        rows = [(f"{rate:g}", f"{noise:g}", f"{steps:,}") for (rate, noise), steps in self.steps.items()]
        head = ("sampling rate", "noise multiplier", "steps if used alone")
        named = {"promise": self.policy.promise, "filter": self.policy.filter_text}
        return card("Training plan", facts(named), table(head, rows, numbers=head))

    def __str__(self) -> str:
        policy = self.policy
        lines = [f"{policy.target} by filter {policy.filter_text!r}, steps if one setting is used alone:"]
        for (rate, noise), steps in self.steps.items():
            lines.append(f"  sampling rate {rate:g}, noise multiplier {noise:g}: {steps}")
        return "\n".join(lines)


@with_usage("a plan is made like dpsgd_policy(3, 1e-6, sample_rates=[0.01], noise_multipliers=[1.1])")
def dpsgd_policy(  # noqa: PLR0913  a policy is the list of its choices
    epsilon: Numeric,
    delta: Numeric,
    *,
    sample_rates: Sequence[Numeric],
    noise_multipliers: Sequence[Numeric],
    filter: str = "exact",  # noqa: A002  as of a policy
    takes: Sequence[str] = (),
    delta_steps: Numeric = 0,
    privacy_unit: str = "person",
    **old: Never,
) -> TrainingPlan:
    """Plan DP-SGD with any of the sampling rates and any of the noise multipliers at every step.

    With `filter="exact"` the settings are a menu, solved together: nothing but them is taken, unless `takes` lists
    families for other questions, such as private validation (`takes=("pure",)`), which costs about a tenth of the
    steps. With `filter="renyi"` any subsampled Gaussian is taken; the orders are those that suit the settings. Charge
    each step, before it runs, with `subsampled_gaussian(rate, noise)`; clipping norms may change freely, because
    noise is a multiple of them.

    Theorem: the exact filter over a menu, or the Rényi filter at fixed orders; Rényi odometer.
    Assumes: Poisson sampling, per-example clipping, add/remove neighbors; each setting of a step is chosen from
        what was released before it.
    """
    refuse_old_words("dpsgd_policy", old)
    settings = _settings(sample_rates, noise_multipliers)
    aside = read(delta_steps, "delta_steps", InvalidPolicy)
    level = read(delta, "delta", InvalidPolicy) - aside
    if filter not in {Exact.kind, Renyi.kind}:
        raise InvalidPolicy(f"subsampled Gaussians are taken by the filters 'exact' and 'renyi' (got {filter!r})")
    if level <= 0:
        raise InvalidPolicy(f"delta ({delta!r}) must be above delta_steps ({delta_steps!r})")
    target = (float(read(epsilon, "epsilon", InvalidPolicy)), float(level))
    single = {setting: subsampled_gaussian(*setting) for setting in settings}
    curves = [_curve(single[setting]) for setting in settings]
    odometer = _odometer([(curve, max(_steps(curve, target).values())) for curve in curves], target)
    if filter == Renyi.kind:
        orders = _orders(curves, target)
        policy = Policy(
            epsilon,
            delta,
            delta_steps=delta_steps,
            filter=Renyi({order: Fraction(1, len(orders)) for order in orders}),
            odometer=odometer,
            privacy_unit=privacy_unit,
        )
    else:
        policy = Policy(
            epsilon,
            delta,
            delta_steps=delta_steps,
            filter=Exact(takes=takes, menu=subsampled_gaussian_menu(epsilon, level, settings)),
            odometer=odometer,
            privacy_unit=privacy_unit,
        )
    compiled = compile_policy(policy)
    start = AccountState("", compiled, compiled.start)
    return TrainingPlan(compiled, {setting: how_many(start, single[setting]) for setting in settings})


def _settings(rates: Sequence[Numeric], noises: Sequence[Numeric]) -> list[Setting]:
    for field, given in (("sample_rates", rates), ("noise_multipliers", noises)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidPolicy(f"{field} must be a list, such as [{given}] (got {given!r})")
    settings = [sampling_settings(rate, noise) for rate, noise in product(rates, noises)]
    if not settings or len(set(settings)) < len(settings):
        raise InvalidPolicy(
            f"sample_rates ({rates!r}) and noise_multipliers ({noises!r}) need a value each, and none twice"
        )
    return settings


def _curve(step: Mechanism) -> RDP:
    if step.curve is None:
        raise InvalidPolicy(f"{step} has no Rényi curve")
    return step.curve


def _steps(curve: RDP, target: tuple[float, float]) -> dict[Fraction, float]:
    """Return how many steps of the curve the filter at each order alone admits; in parts, if it is less than one."""
    return {
        exact_of(order): max(0.0, largest_rdp(float(order), *target)) / float(value)
        for order, value in zip(curve.orders, curve.values, strict=True)
    }


def _orders(curves: Sequence[RDP], target: tuple[float, float]) -> list[Fraction]:
    """Return orders, for equal shares of delta', at which the curves together get the most steps, as a product.

    An order for each curve costs each a part of delta', and one order for all may suit none: curves with similar best
    orders share one.
    """
    alone = [_steps(curve, target) for curve in curves]
    by_order = sorted(range(len(curves)), key=lambda i: max(alone[i], key=lambda order: alone[i][order]))
    choices = []
    for count in range(1, min(len(curves), _MOST_ORDERS) + 1):
        steps = [_steps(curve, (target[0], target[1] / count)) for curve in curves]
        borders = [len(curves) * k // count for k in range(count + 1)]
        orders = [_common_order([steps[i] for i in by_order[a:b]]) for a, b in pairwise(borders)]
        choices.append((sum(_log(max(own.get(order, 0.0) for order in orders)) for own in steps), orders))
    return sorted(set(max(choices)[1]))


def _common_order(steps: Sequence[Mapping[Fraction, float]]) -> Fraction:
    """Return the order at which several curves get the most steps, as a product."""
    return max(steps[0], key=lambda order: sum(_log(own.get(order, 0.0)) for own in steps))


def _log(steps: float) -> float:
    """Return the logarithm of a number of steps, bounded below: a setting that fits nowhere does not decide."""
    return math.log(max(steps, _NONE))


def _odometer(curves: Sequence[tuple[RDP, float]], target: tuple[float, float]) -> RenyiOdometer:
    """Return a Rényi odometer over the orders that read best when parts of the budget are spent."""
    ell = -math.log(target[1])
    orders = set()
    for curve, steps in curves:
        for part in _LOOKS:
            losses = [
                (part * steps * float(value) + ell / (float(order) - 1.0), float(order))
                for order, value in zip(curve.orders, curve.values, strict=True)
            ]
            orders.add(min(losses)[1])
    return RenyiOdometer(tuple(sorted(orders)), (1.0 / len(orders),) * len(orders))
