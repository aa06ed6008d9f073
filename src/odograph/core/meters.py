"""Meters and filters: the sums that a policy keeps, and what a guarantee costs on each.

A meter prices a guarantee by one theorem. A price is an integer number of units, rounded up once, or None where the
theorem has no finite price (a Gaussian has no epsilon). A filter compiles its share of delta' to the limits of one or
more meters, its alternatives; `odograph.core.filters` has them all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from odograph.core.conversions import (
    LARGEST_HALF,
    gdp_to_rdp,
    probdp_drift,
    pure_to_intrinsic,
    pure_to_rdp,
    response_divergence,
    zcdp_to_rdp,
)
from odograph.core.fixed_point import (
    CEILING,
    DELTA_SCALE,
    MOST_PRICED,
    PADDED,
    SCALE,
    Number,
    ceil_sure,
    ceil_written,
    exact_of,
    padded_scale,
    read,
    text_of,
    tidy,
    units_computed,
    units_squared,
    units_written,
    up,
)
from odograph.core.guarantees import (
    GDP,
    RDP,
    ZCDP,
    ApproxDP,
    Guarantee,
    Mechanism,
    ProbDP,
    PureDP,
    delta_of,
    number_of,
)
from odograph.errors import InvalidPolicy

if TYPE_CHECKING:
    from odograph.core.value_iteration import Budget

__all__ = [
    "WITH_EPSILON",
    "DeltaMeter",
    "DriftMeter",
    "EpsilonMeter",
    "Filter",
    "IntrinsicMeter",
    "Meter",
    "MomentMeter",
    "OrderMeter",
    "PureStep",
    "Target",
    "distinguish_names",
    "intrinsic_units",
    "read_flag",
    "read_order",
]

WITH_EPSILON: Final = (PureDP, ApproxDP, ProbDP)  # the guarantees that have an epsilon

_COARSE: Final = SCALE // 10**11  # units: ten times the largest tolerance of a policy
_CURVE_UNITS: Final = padded_scale(24.0, 64.0)  # as `pure_to_rdp` pads, and then the order
_GENEROUS: Final = 1 + Fraction(1, 10**12)  # the last digits of a float decide nothing


class PureStep:
    """What several meters need of a step with an epsilon, computed once for all of them; a delta is left aside.

    The epsilon is at most `MOST_PRICED`: beyond it no epsilon has a price.
    """

    __slots__ = ("bias", "epsilon", "guarantee", "half", "time", "written")

    def __init__(self, guarantee: PureDP | ApproxDP | ProbDP) -> None:
        self.guarantee = guarantee
        self.written: Number = guarantee.epsilon  # type: ignore[assignment]  # as it is after validation
        self.epsilon = epsilon = float(guarantee.epsilon)
        self.half = half = 0.5 * epsilon
        self.bias = math.tanh(half)  # how far randomized response prefers the truth
        self.time = pure_to_intrinsic(epsilon)


@dataclass(frozen=True, slots=True)
class Meter(ABC):
    """One sum over the steps: its name, and its limit in units; None if only an odometer reads it."""

    pricing: ClassVar[str]  # its name in documents
    counts_delta: ClassVar[bool] = False  # true for the one meter whose limit every request must keep
    counted: ClassVar[bool] = True  # false if it has no amounts, and only tells whether each step had a price
    has_limit: ClassVar[bool | None] = True  # None if that depends on the policy
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # further fields, and how each is read

    name: str
    limit: int | None

    def __init_subclass__(cls) -> None:
        # Else a subclass with a higher price would charge pure steps by the lower one of its base.
        inherits = "price_pure" not in vars(cls) and cls.price_pure is not Meter.price_pure
        if "price" in vars(cls) and inherits:
            raise TypeError(f"{cls.__name__} must have a price_pure of its own, because it has a price of its own")

    @abstractmethod
    def price(self, guarantee: Guarantee) -> int | None:
        """Return the units that a guarantee costs here, rounded up; None where it has no price."""

    def price_pure(self, step: PureStep) -> int | None:
        """Return the price of an epsilon-DP step, which is that of `price`, from what the step has computed.

        Theorem: as `price`.
        Assumes: as `price`.
        """
        return self.price(step.guarantee)

    def _price_epsilon(self, guarantee: PureDP | ApproxDP | ProbDP) -> int | None:
        """Return the price of an epsilon by `price_pure`; None where it is too large to have one."""
        return self.price_pure(PureStep(guarantee)) if number_of(guarantee.epsilon) <= MOST_PRICED else None

    def price_interactive(self, guarantee: Guarantee) -> int | None:
        """Return what an interactive mechanism with the guarantee costs, all of it when it starts.

        Theorem: interactive mechanisms (Haney et al. (2023)): for one pair of neighbors an interactive mechanism with
            an (epsilon, delta) or f-DP guarantee is an interactive postprocessing of one pair of distributions, drawn
            when it starts; so a price by that pair holds. Sums of Rényi divergences at a fixed order hold for
            interactive mechanisms too, and so do sums of zCDP parameters, which are such a sum at every order.
        Assumes: the guarantee holds against every strategy of asking. A Rényi or zCDP guarantee has no delta, and is
            priced by its divergences: it need not have one dominating pair. A meter that prices it otherwise says
            None here.
        """
        return self.price(guarantee)

    @property
    def scale(self) -> Fraction:
        """Units per 1 of what the meter counts, for displaying totals."""
        return Fraction(SCALE)

    def left(self, total: int) -> Fraction:
        """Return what a total leaves of the limit, for displaying it; at least 0."""
        return max(Fraction(0), ((self.limit or 0) - total) / self.scale)

    @property
    def has_sound_options(self) -> bool:
        """Whether a policy can compile to these options: a stored document may be damaged."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form; numbers are strings, because JSON numbers lose digits."""
        limit = None if self.limit is None else str(self.limit)
        options = {name: _plain(getattr(self, name)) for name in self.options}
        return {"name": self.name, "pricing": self.pricing, "limit": limit, **options}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; anything else raises."""
        if set(form) - {"name", "pricing", "limit", *cls.options}:
            raise ValueError(f"a {cls.pricing} meter must have the options {[*cls.options]} (got {sorted(form)})")
        limit = None if form["limit"] is None else _digits(form["limit"])
        options = {name: parse(form[name]) for name, parse in cls.options.items() if name in form}
        meter = cls(str(form["name"]), limit, **options)
        if (limit is None) is cls.has_limit or (limit or 0) > CEILING or not meter.has_sound_options:
            raise ValueError(f"no policy compiles to {meter!r}")
        return meter


def _digits(text: object) -> int:
    """Read an integer that was written as a string."""
    if not isinstance(text, str) or not text.isdigit():
        raise ValueError(f"limit must be a string of digits (got {text!r})")
    return int(text)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Fraction) else value


def read_flag(value: object) -> bool:
    """Read an option that is true or false."""
    return value is True


def read_order(value: object) -> Fraction:
    """Read the order of a Rényi divergence."""
    return read(value, "order", InvalidPolicy)


class DeltaMeter(Meter):
    """The sum of the steps' own deltas: the limit that every request must keep."""

    __slots__ = ()
    pricing: ClassVar[str] = "delta"
    counts_delta: ClassVar[bool] = True

    @property
    def scale(self) -> Fraction:
        """Units per 1 of delta."""
        return Fraction(DELTA_SCALE)

    def price(self, guarantee: Guarantee) -> int | None:
        """Return the guarantee's own delta."""
        delta = delta_of(guarantee)
        return units_written(delta, DELTA_SCALE) if delta else 0

    def price_pure(self, step: PureStep) -> int:  # noqa: ARG002  as every meter
        """Return 0: an epsilon-DP step has no delta of its own."""
        return 0


class EpsilonMeter(Meter):
    """The sum of the epsilons: basic composition, an alternative of every policy that promises an epsilon."""

    __slots__ = ()
    pricing: ClassVar[str] = "epsilon"
    has_limit: ClassVar[bool | None] = None

    def price(self, guarantee: Guarantee) -> int | None:
        """Sum of epsilon.

        Theorem: basic composition; with reveals set aside the loss is at most the sum of the epsilons, surely.
        Assumes: every step is (epsilon_n, delta_n)-DP, epsilon_n predictable.
        """
        return units_written(number_of(guarantee.epsilon)) if isinstance(guarantee, WITH_EPSILON) else None

    def price_pure(self, step: PureStep) -> int:
        """Return the epsilon, as `price` does."""
        return ceil_written(step.written, SCALE)

    def left(self, total: int) -> Fraction:
        """Return what a total leaves of the limit, without the policy's tolerance, which is not there to be spent."""
        rest = (self.limit or 0) - total
        return max(Fraction(0), Fraction(rest - rest % _COARSE, SCALE))


class IntrinsicMeter(Meter):
    """Intrinsic time, counted for odometers."""

    __slots__ = ()
    pricing: ClassVar[str] = "intrinsic"
    has_limit: ClassVar[bool | None] = False

    def price(self, guarantee: Guarantee) -> int | None:
        """Intrinsic time V: twice the zCDP parameter of the step.

        Theorem: intrinsic time of a pure step: epsilon-DP is (epsilon tanh(epsilon/2))-zCDP; mu-GDP is (mu^2/2)-zCDP.
        Assumes: parameters predictable; a step's own delta is counted on the delta meter.
        """
        return intrinsic_units(guarantee)

    def price_pure(self, step: PureStep) -> int:
        """Return the intrinsic time, as `price` does."""
        return units_computed(step.time, step.written)


def intrinsic_units(guarantee: Guarantee) -> int | None:
    """Return the intrinsic time of a guarantee in units, rounded up; None where it has none.

    Theorem: intrinsic time of a pure step: epsilon-DP is (epsilon tanh(epsilon/2))-zCDP; mu-GDP is (mu^2/2)-zCDP.
    Assumes: parameters predictable; a step's own delta is counted on the delta meter.
    """
    if isinstance(guarantee, WITH_EPSILON):
        epsilon = number_of(guarantee.epsilon)
        return units_computed(pure_to_intrinsic(float(epsilon)), epsilon) if epsilon <= MOST_PRICED else None
    if isinstance(guarantee, ZCDP):
        return units_written(2 * exact_of(guarantee.rho))
    if isinstance(guarantee, GDP):
        return units_squared(number_of(guarantee.mu))
    return None


@dataclass(frozen=True, slots=True)
class DriftMeter(Meter):
    """What the deltas of probabilistic guarantees add to the loss that an odometer reads.

    It is `latent` under a slack, which reads the steps without their deltas.
    """

    pricing: ClassVar[str] = "drift"
    has_limit: ClassVar[bool | None] = False
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"latent": read_flag}

    latent: bool = False

    def price(self, guarantee: Guarantee) -> int | None:
        """What a probabilistic guarantee's delta adds to the loss that an odometer reads.

        Theorem: each (epsilon, delta)-pDP step adds at most delta epsilon / sinh(epsilon) (erratum E4).
        Assumes: two-sided pDP. A step known only to be (epsilon, delta)-DP has no such bound (erratum E15): it
            needs a slack fixed beforehand.
        """
        if delta_of(guarantee) == 0 or self.latent:
            return 0
        if isinstance(guarantee, ProbDP):
            epsilon, delta = number_of(guarantee.epsilon), number_of(guarantee.delta)
            drift = probdp_drift(float(epsilon), float(delta)) if epsilon <= MOST_PRICED else None
            return None if drift is None else units_computed(drift, delta)
        return None

    def price_pure(self, step: PureStep) -> int:  # noqa: ARG002  as every meter
        """Return 0: an epsilon-DP step has no delta of its own."""
        return 0


@dataclass(frozen=True, slots=True)
class OrderMeter(Meter):
    """Shared by the meters that sum Rényi divergences at one order."""

    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"order": read_order}

    order: Fraction
    near: float = field(default=0.0, init=False, repr=False, compare=False)  # the order: every price needs it

    def __post_init__(self) -> None:
        object.__setattr__(self, "near", float(self.order))

    def left(self, total: int) -> Fraction:
        """Return what a total leaves of the limit, for displaying it; at least 0."""
        return max(Fraction(0), ((self.limit or 0) - total) / self.scale)

    @property
    def has_sound_options(self) -> bool:
        """Whether the order is one of a Rényi divergence."""
        return self.order > 1

    def divergence(self, guarantee: Guarantee) -> int | None:
        """Return the Rényi divergence of a guarantee in units, rounded up; None where it is not known.

        Theorem: intrinsic time of a pure step, the definition of zCDP, the divergence of two Gaussians, the chord of
            a curve.
        Assumes: divergences valid in both directions; a step's own delta is counted elsewhere.
        """
        curve: Callable[[float, float], float]
        if isinstance(guarantee, WITH_EPSILON):
            return self._price_epsilon(guarantee)
        if isinstance(guarantee, ZCDP):
            source, curve = number_of(guarantee.rho), zcdp_to_rdp
        elif isinstance(guarantee, GDP):
            source, curve = number_of(guarantee.mu), gdp_to_rdp
        else:
            return self._of_curve(guarantee)
        return self._units(curve, source) if source <= MOST_PRICED else None

    def _units(self, curve: Callable[[float, float], float], source: Number) -> int:
        # The order is a rational read as a float: a few more units of padding cover that.
        return units_computed(up(curve(float(source), self.near), 64), source)

    def price_pure(self, step: PureStep) -> int:
        """Return the divergence of randomized response, as `divergence` does."""
        t = self.near - 1.0
        h = t * step.half
        if 0.0 < h <= LARGEST_HALF:
            sure = ceil_sure(response_divergence(h, step.bias, t) * _CURVE_UNITS, PADDED)
            if sure is not None:
                return sure
        return self._units(pure_to_rdp, step.written)

    def _of_curve(self, guarantee: Guarantee) -> int | None:
        curve = guarantee.curve if isinstance(guarantee, Mechanism) else guarantee
        found = curve.at(self.order) if isinstance(curve, RDP) else None
        return None if found is None else units_written(found)


@dataclass(frozen=True, slots=True)
class MomentMeter(OrderMeter):
    """Rényi divergences at one order, for an odometer; a step with its own delta needs a slack (`latent`)."""

    pricing: ClassVar[str] = "moment"
    has_limit: ClassVar[bool | None] = False
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {"order": read_order, "latent": read_flag}

    latent: bool = False

    def price(self, guarantee: Guarantee) -> int | None:
        """Return the divergence at the order; None for a step with its own delta, unless a slack covers it."""
        return self.divergence(guarantee) if delta_of(guarantee) == 0 or self.latent else None

    price_pure = OrderMeter.price_pure  # without a delta of its own


def distinguish_names(meters: Iterable[Meter]) -> tuple[Meter, ...]:
    """Return the meters; those that share a name are renamed by their full order instead of six digits of it."""
    found = tuple(meters)
    # Names are stored with an account, so an order that six digits tell apart keeps its short name.
    count = Counter(meter.name for meter in set(found))
    return tuple(
        replace(meter, name=f"{meter.pricing}@{text_of(tidy(meter.order))}")
        if count[meter.name] > 1 and isinstance(meter, OrderMeter)
        else meter
        for meter in found
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What a filter compiles: an epsilon, its share of delta', and the certified budget that the exact one needs.

    `epsilon` is 0 where none is promised. `readers` are the odometer's meters, for the filter without a limit.
    """

    epsilon: Fraction
    delta: Fraction
    budget: Budget | None = None
    readers: tuple[Meter, ...] = ()


@dataclass(frozen=True, slots=True)
class Filter(ABC):
    """A stopping rule with a theorem: the guarantees it takes, and the alternatives that it compiles a target to."""

    kind: ClassVar[str]  # its name
    guarantees: ClassVar[tuple[type[Guarantee], ...]]  # the kinds that it has a theorem for
    has_limit: ClassVar[bool] = True  # false if nothing is promised but readings
    options: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}  # its fields, and how each is read from a document

    @abstractmethod
    def alternatives(self, target: Target) -> tuple[Meter, ...]:
        """Return the meters whose limits keep the target, each with its share of the target's delta."""

    @abstractmethod
    def reach(self, epsilon: float, delta: float) -> float:
        """Return about how much intrinsic time is admitted for a target, to tune an odometer by."""

    def accepts(self, guarantee: Guarantee, neighbors: str) -> bool:  # noqa: ARG002  some ask for them
        """Return whether a theorem covers the guarantee under this filter."""
        return isinstance(guarantee, self.guarantees)

    def accepts_interactive(self, guarantee: Guarantee, neighbors: str) -> bool:
        """Return whether a theorem covers interactive mechanisms with the guarantee (`Meter.price_interactive`)."""
        return self.accepts(guarantee, neighbors)

    def takes_curves(self, neighbors: str) -> bool:  # noqa: ARG002  some ask for them
        """Return whether steps may come that have a Rényi curve and no intrinsic time."""
        return False

    def check_neighbors(self, neighbors: str) -> None:  # noqa: B027  few filters have such an option
        """Raise `InvalidPolicy` if an option was made for other neighbors."""

    def check_stored(self, meters: Sequence[Meter], target: Target) -> Sequence[Meter]:
        """Check that stored meters begin with this filter's alternatives, and return those after them.

        Limits are not recompiled: a stored one may be smaller, from an earlier version of the filter.
        """
        own = self.alternatives(target)
        stored, others = meters[: len(own)], meters[len(own) :]
        if [replace(meter, limit=0) for meter in stored] != [replace(meter, limit=0) for meter in own]:
            raise InvalidPolicy(
                f"the alternatives of a compiled policy must be those of its filter {self.kind!r} (got"
                f" {[meter.name for meter in stored]})"
            )
        for meter, computed in zip(stored, own, strict=True):
            if meter.limit is None or meter.limit > (computed.limit or 0) * _GENEROUS + 1:
                raise InvalidPolicy(
                    f"the limit of {meter.name!r} must be at most what its filter allows, {computed.limit} (got"
                    f" {meter.limit})"
                )
        return others

    def to_dict(self) -> dict[str, Any]:
        """Return the stored form: the kind and the options."""
        return {"kind": self.kind}
