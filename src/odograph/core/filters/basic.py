"""Sums that are kept as they are promised: of epsilons (basic composition), of rho, of mu^2; and no limit at all.

The other filters turn a target (epsilon, delta) into a limit of some other sum. Here nothing is converted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final

from odograph.core.conversions import filter_time
from odograph.core.filters.gdp import GdpMeter
from odograph.core.fixed_point import (
    SCALE,
    Number,
    Numeric,
    brief_above,
    exact_of,
    floor_units,
    read,
    text_of,
    tidy,
    units_computed,
)
from odograph.core.guarantees import GDP, RDP, ZCDP, Guarantee, Mechanism
from odograph.core.meters import (
    WITH_EPSILON,
    DriftMeter,
    Filter,
    Meter,
    MomentMeter,
    PureStep,
    Target,
    intrinsic_units,
    read_flag,
    read_order,
)
from odograph.errors import InvalidPolicy

__all__ = ["Basic", "GdpTotal", "RhoMeter", "Total", "Unlimited", "UnlimitedMeter", "ZcdpTotal"]

_LEAST_TOTAL: Final = Fraction(1, 10**6)
_MOST_RHO: Final = 1000
_MOST_MU: Final = 40  # its square is counted, and a total has to stay below the ceiling


class Basic(Filter):
    """Basic composition alone. It is an alternative of every policy with an epsilon, because it costs no delta'."""

    __slots__ = ()
    kind: ClassVar[str] = "basic"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = WITH_EPSILON

    def alternatives(self, target: Target) -> tuple[Meter, ...]:  # noqa: ARG002  as every filter
        """No alternative of its own: the epsilon meter is one of every policy with an epsilon.

        Theorem: basic composition: sum of epsilon and sum of delta.
        Assumes: (epsilon_n, delta_n)-DP steps, predictable.
        """
        return ()

    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target."""
        return filter_time(epsilon, delta)


class Total(Filter):
    """Shared by the filters of a promise that is itself a sum: nothing of delta has to pay for a conversion."""

    __slots__ = ()

    @property
    @abstractmethod
    def promised(self) -> str:
        """What is promised but for delta, in brief: 0.5-zCDP."""

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with the one of this filter, within its total; return the others."""
        rest = Filter.check_stored(self, meters, target)
        # The limit is not computed in floating point, so not even the last digit of it may be larger.
        own, stored = self.alternatives(target)[0].limit, meters[0].limit
        if own is None or stored is None or stored > own:
            raise InvalidPolicy(f"the limit of {meters[0].name!r} must be at most the promised {own} (got {stored})")
        return rest


class RhoMeter(Meter):
    """The sum of rho, in half units: what is added up is intrinsic time, which is twice as much."""

    __slots__ = ()
    pricing: ClassVar[str] = "rho"

    @property
    def scale(self) -> Fraction:
        """Units per 1 of rho."""
        return Fraction(2 * SCALE)

    def price(self, guarantee: Guarantee) -> int | None:
        """Intrinsic time V: twice the zCDP parameter of the step.

        Theorem: intrinsic time of a pure step: epsilon-DP is (epsilon tanh(epsilon/2))-zCDP; mu-GDP is (mu^2/2)-zCDP.
        Assumes: parameters predictable; a step's own delta is counted on the delta meter.
        """
        return intrinsic_units(guarantee)

    def price_pure(self, step: PureStep) -> int:
        """Return the intrinsic time, as `price` does."""
        return units_computed(step.time, step.written)


@dataclass(frozen=True, slots=True)
class ZcdpTotal(Total):
    """Sum of rho within a promised rho: `Policy(rho=0.5)`."""

    kind: ClassVar[str] = "zcdp-total"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, ZCDP, GDP)
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"rho": str}

    rho: Numeric

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", _read_total(self.rho, "Policy.rho", _MOST_RHO))

    def alternatives(self, target: Target) -> tuple[Meter, ...]:  # noqa: ARG002  as every filter
        """Sum of rho within what is promised. The plain sum of epsilons is no alternative: it bounds no divergence.

        Theorem: totals of rho and of mu (Whitehouse et al. (2023)): steps that are delta_n-approximately rho_n-zCDP,
            with sum rho_n <= rho and sum delta_n <= delta, are together delta-approximately rho-zCDP.
        Assumes: rho_n and delta_n predictable.
        """
        return (RhoMeter("rho", floor_units(2 * exact_of(self.rho), SCALE)),)

    @property
    def promised(self) -> str:
        """What is promised but for delta, in brief: 0.5-zCDP."""
        return f"{brief_above(exact_of(self.rho))}-zCDP"

    def reach(self, epsilon: float, delta: float) -> float:  # noqa: ARG002  as every filter
        """Return how much intrinsic time is admitted."""
        return 2.0 * float(self.rho)

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the total."""
        return {"kind": self.kind, "rho": text_of(_stored(self.rho))}


@dataclass(frozen=True, slots=True)
class GdpTotal(Total):
    """Sum of mu^2 within a promised mu^2: `Policy(mu=1)`."""

    kind: ClassVar[str] = "gdp-total"
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, GDP)
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"mu": str}

    mu: Numeric

    def __post_init__(self) -> None:
        object.__setattr__(self, "mu", _read_total(self.mu, "Policy.mu", _MOST_MU))

    def alternatives(self, target: Target) -> tuple[Meter, ...]:  # noqa: ARG002  as every filter
        """Sum of mu^2 within what is promised, with no reserve: it would pay for a divergence at one epsilon only.

        Theorem: totals of rho and of mu (Smith and Thakurta (2022); Koskela, Tobaben and Honkela (2023)): mu_n-GDP
            steps with sum mu_n^2 <= mu^2 are together mu-GDP. An epsilon-DP step is mu-GDP with mu = 2
            Phi^-1(e^epsilon/(1 + e^epsilon)). Steps with deltas, sum delta_n <= delta, make it delta-approximate: the
            run is a mixture that with probability 1 - delta is mu-GDP, and so has a trade-off of at least (1 - delta)
            G_mu(alpha/(1 - delta)).
        Assumes: mu_n, epsilon_n and delta_n predictable. zCDP, a Rényi curve or discrete Gaussian noise imply no mu.
        """
        return (GdpMeter("mu^2", floor_units(exact_of(self.mu) ** 2, SCALE)),)

    @property
    def promised(self) -> str:
        """What is promised but for delta, in brief: 1-GDP."""
        return f"{brief_above(exact_of(self.mu))}-GDP"

    def reach(self, epsilon: float, delta: float) -> float:  # noqa: ARG002  as every filter
        """Return how much intrinsic time is admitted."""
        return float(self.mu) ** 2

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the total."""
        return {"kind": self.kind, "mu": text_of(_stored(self.mu))}


def _read_total(value: object, field: str, most: int) -> Number:
    exact = read(value, field, InvalidPolicy)
    if not _LEAST_TOTAL <= exact <= most:
        raise InvalidPolicy(f"{field} must be from {float(_LEAST_TOTAL):g} to {most} (got {value!r})")
    return tidy(exact)


def _stored(value: Numeric) -> Number:
    return value  # type: ignore[return-value]  # the type that it has after validation


def _read_order(value: object) -> Fraction | None:
    return None if value is None else read_order(value)


@dataclass(frozen=True, slots=True)
class UnlimitedMeter(Meter):
    """Whether every step so far can be read by one part of the odometer: nothing is counted, so nothing runs out.

    Without an `order` the part reads intrinsic time, else Rényi divergences at orders from this one on; a curve that
    is known at a larger order is known at this one. It is `latent` under a slack.
    """

    pricing: ClassVar[str] = "unlimited"
    counted: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"order": _read_order, "latent": read_flag}

    order: Fraction | None = None
    latent: bool = False

    @property
    def has_sound_options(self) -> bool:
        """Whether the order, if there is one, is one of a Rényi divergence."""
        return self.order is None or self.order > 1

    def price(self, guarantee: Guarantee) -> int | None:
        """Nothing, if the part of the odometer reads the step; None if it would read infinity from then on.

        Theorem: odometers; (a - 1) D_a is convex in a, so a curve that is known at an order has a chord below it.
        Assumes: as the part of the odometer. A step's own delta is counted on the delta meter.
        """
        if self.order is not None:
            known = MomentMeter("", None, self.order, self.latent).price(guarantee) is not None
        else:
            drift = DriftMeter("", None, self.latent).price(guarantee)
            known = intrinsic_units(guarantee) is not None and drift is not None
        return 0 if known else None


class Unlimited(Filter):
    """No limit on the loss: an account that is only read. `Policy(None, 1e-6)`."""

    __slots__ = ()
    kind: ClassVar[str] = "unlimited"
    has_limit: ClassVar[bool] = False
    guarantees: ClassVar[tuple[type[Guarantee], ...]] = (*WITH_EPSILON, ZCDP, GDP, RDP, Mechanism)

    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Every step that leaves the odometer a reading: one alternative for intrinsic time, one for Rényi curves.

        Theorem: none is needed, nothing is promised but readings: best of several boundaries, where a part that
            cannot read a step reads infinity from then on and the others stay valid.
        Assumes: the odometer was fixed before the first step.
        """
        readers = target.readers
        orders = [meter.order for meter in readers if isinstance(meter, MomentMeter)]
        latent = any(meter.latent for meter in readers if isinstance(meter, DriftMeter | MomentMeter))
        found: list[Meter] = []
        if any(isinstance(meter, DriftMeter) for meter in readers):
            found.append(UnlimitedMeter("intrinsic time", 0, None, latent))
        if orders:
            found.append(UnlimitedMeter("Rényi curves", 0, min(orders), latent))
        return tuple(found)

    def reach(self, epsilon: float, delta: float) -> float:  # noqa: ARG002  as every filter
        """Return the intrinsic time at which a loss of 1 is read, to tune odometers by that are asked for by name."""
        return filter_time(1.0, delta)

    def takes_curves(self, neighbors: str) -> bool:  # noqa: ARG002  as every filter
        """Return whether steps may come that have a Rényi curve and no intrinsic time."""
        return True
