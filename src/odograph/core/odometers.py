"""Odometers: bounds on the privacy loss so far, valid at all times at once.

An odometer is a frozen value: its boundary and tuning are fixed before the first step and never change.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np

from odograph.core import boundaries
from odograph.core.meters import Meter
from odograph.core.orders import named_apart
from odograph.core.roots import last_holding
from odograph.core.units import read, up
from odograph.errors import InvalidPolicy, told

__all__ = [
    "BestOf",
    "DiscreteMixture",
    "Filter",
    "Mixture",
    "Odometer",
    "PaperMixture",
    "PaperStitched",
    "Reading",
    "Renyi",
    "Rogers",
    "Spent",
    "Stitched",
    "default_odometer",
    "odometer_from_dict",
    "odometer_to_dict",
    "standard_odometer",
    "standard_odometers",
]

_LICENCE: Final = (
    "For each fixed pair of neighbours, with probability at least 1 - {delta:.3g} the realised privacy loss is at "
    "most this at all times at once; it does not make the run ({loss:.3g}, {delta:.3g})-DP."
)
_EARLIEST: Final = 400.0  # of the default odometer: how much earlier than the filter's stop it is still tight
_EARLY_LINES: Final = 8
_ORDERS_AROUND: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
_LOOKING: Final = "For looking only: the policy fixed another odometer, and picking the least afterwards is not safe."


@dataclass(frozen=True, slots=True)
class Spent:
    """What an odometer reads: sums over the steps so far, in plain numbers; infinite where one had no price."""

    intrinsic: float
    epsilon: float
    drift: float
    moments: Mapping[Fraction, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading: the bound on the loss, the probability that it ever fails, and what may be said of it.

    `summed` says that the bound is the plain sum of the epsilons, which was the least.
    """

    loss: float
    delta: float
    odometer: Odometer
    licensed: bool
    note: str = ""
    summed: bool = False

    @property
    def method(self) -> str:
        """Where the bound comes from: the name of the odometer, or the sum of the epsilons."""
        return "sum of epsilons" if self.summed else type(self.odometer).__name__

    @property
    def licence(self) -> str:
        """What the reading allows to be claimed, in a sentence."""
        if not self.licensed:
            return _LOOKING
        if math.isinf(self.loss):
            return self.note
        if self.loss == 0.0:
            return "Nothing was lost so far."
        sentence = _LICENCE.format(loss=self.loss, delta=self.delta)
        return f"{sentence} {self.note}" if self.note else sentence

    def __str__(self) -> str:
        return f"loss at most {self.loss:.4g} ({self.method}). {self.licence}"


def _positive(odometer: object, *names: str, above: float = 0.0) -> None:
    """Check that tuning fields are finite numbers above a bound, and keep them as floats."""
    for name in names:
        field = f"{type(odometer).__name__}.{name}"
        value = float(read(getattr(odometer, name), field, InvalidPolicy))
        if not above < value < math.inf:
            raise InvalidPolicy(f"{field} must be above {above:g}, and {getattr(odometer, name)!r} is not")
        object.__setattr__(odometer, name, value)


def _check_shares(name: str, shares: Sequence[object]) -> None:
    """Check that shares of delta' are positive and sum to at most 1, up to their last digits."""
    exact = [read(share, name, InvalidPolicy) for share in shares]
    if not exact or min(exact) == 0 or sum(exact) > 1 + Fraction(1, 10**12):
        raise InvalidPolicy(f"{name} must be positive and sum to at most 1, and {shares!r} do not")


class _Clocked(ABC):
    """Shared by the odometers that read intrinsic time: U = B(V) + V/2 + drift, or the sum of epsilons."""

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return the meters that the odometer needs beside intrinsic time and epsilon."""
        return (Meter("drift", "drift", None, latent=latent),)

    @abstractmethod
    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""

    def bound(self, spent: Spent, delta: float) -> float:
        """Return the bound on the loss.

        Theorem: odometers: P(exists n: L > B(V) + V/2 + drift) <= delta' + delta''; the loss is also at most the
            sum of the epsilons unless some pDP step passes its own, which delta'' has paid for.
        Assumes: pure, zCDP, Gaussian or two-sided pDP steps, their deltas within delta''; the tuning fixed before
            the first step. A step known only to be (epsilon, delta)-DP makes the drift infinite, and the sum of the
            epsilons is then no bound either (erratum E15).
        """
        if math.isinf(spent.intrinsic) or math.isinf(spent.drift):
            return math.inf
        return min(up(self.boundary(spent.intrinsic, delta) + spent.intrinsic / 2.0 + spent.drift), spent.epsilon)


@dataclass(frozen=True, slots=True)
class Filter(_Clocked):
    """The straight line that is tightest where the paper's filter for `epsilon` would stop."""

    kind: ClassVar[str] = "filter"
    epsilon: float

    def __post_init__(self) -> None:
        _positive(self, "epsilon")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return boundaries.line(v, delta, at=boundaries.filter_time(self.epsilon, delta))


@dataclass(frozen=True, slots=True)
class Mixture(_Clocked):
    """The one-sided normal mixture, tightest around a time set by `gamma`."""

    kind: ClassVar[str] = "mixture"
    gamma: float

    def __post_init__(self) -> None:
        _positive(self, "gamma")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return boundaries.mixture_one_sided(v, delta, gamma=self.gamma)


@dataclass(frozen=True, slots=True)
class PaperMixture(_Clocked):
    """The two-sided normal mixture as the paper prints it (E11: true, and loose)."""

    kind: ClassVar[str] = "mixture-paper"
    gamma: float

    def __post_init__(self) -> None:
        _positive(self, "gamma")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return boundaries.mixture(v, delta, gamma=self.gamma)


@dataclass(frozen=True, slots=True)
class Stitched(_Clocked):
    """The stitched boundary with exact constants, finite from the start (E12, E13)."""

    kind: ClassVar[str] = "stitched"
    start: float
    eta: float = 2.0
    s: float = 1.4

    def __post_init__(self) -> None:
        _positive(self, "start")
        _positive(self, "eta", "s", above=1.0)

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return boundaries.stitched(v, delta, start=self.start, eta=self.eta, s=self.s)


@dataclass(frozen=True, slots=True)
class PaperStitched(_Clocked):
    """The stitched boundary with the paper's constants, infinite before `start`."""

    kind: ClassVar[str] = "stitched-paper"
    start: float

    def __post_init__(self) -> None:
        _positive(self, "start")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return boundaries.stitched_paper(v, delta, start=self.start)


@dataclass(frozen=True, slots=True)
class DiscreteMixture(_Clocked):
    """A mixture of lines, tightest at `points` geometric times from `low` to `high`."""

    kind: ClassVar[str] = "discrete-mixture"
    low: float
    high: float
    points: int = 16

    def __post_init__(self) -> None:
        _positive(self, "low", "high")
        if (
            self.low > self.high
            or isinstance(self.points, bool)
            or not isinstance(self.points, int)
            or self.points < 1
        ):
            raise InvalidPolicy(
                f"DiscreteMixture needs low <= high and a whole number of points from 1, not {self!r}"
            )

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        times, weights = boundaries.spread_times(self.low, self.high, self.points)
        return boundaries.discrete_mixture(v, delta, times=times, weights=weights)


@dataclass(frozen=True, slots=True)
class Rogers(_Clocked):
    """Rogers et al. 2016, corrected (E6): a baseline; `people` is a public constant, never the data's size."""

    kind: ClassVar[str] = "rogers"
    people: float

    def __post_init__(self) -> None:
        _positive(self, "people")
        if self.people < 2.0:
            raise InvalidPolicy(f"Rogers.people must be a public number from 2, and {self.people!r} is not")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        # The theorem is for delta' up to 1/e.
        return boundaries.rogers(v, delta, people=self.people) if delta <= math.exp(-1.0) else math.inf


@dataclass(frozen=True, slots=True)
class Renyi:
    """Readings from Rényi curves, hence for subsampled Gaussians: a weighted mixture over fixed orders."""

    kind: ClassVar[str] = "renyi"
    orders: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        orders = tuple(float(read(order, "Renyi.orders", InvalidPolicy)) for order in self.orders)
        if len(orders) != len(self.weights) or any(not 1.0 < order < math.inf for order in orders):
            raise InvalidPolicy(f"Renyi needs orders above 1 and as many weights, not {self.orders!r}")
        _check_shares("Renyi.weights", self.weights)
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return one meter per order."""
        orders = [Fraction(repr(order)) for order in self.orders]
        return named_apart(
            Meter(f"moment@{float(order):g}", "moment", None, order=order, latent=latent) for order in orders
        )

    def bound(self, spent: Spent, delta: float) -> float:
        """Return the l that solves `sum_j w_j exp((a_j - 1)(l - R(a_j))) = 1/delta`, from above.

        Theorem: Rényi odometer (Ville): each term is a nonnegative supermartingale, and so is their mixture.
        Assumes: orders and weights fixed before the first step; curves valid in both directions; delta_n = 0.
        """
        excess = np.array(self.orders) - 1.0
        running = np.array([spent.moments.get(Fraction(repr(order)), math.inf) for order in self.orders])
        known = np.isfinite(running)
        if not known.any():
            return math.inf
        excess, running = excess[known], running[known]
        log_weights = np.log(np.array(self.weights)[known])
        target = -math.log(delta)

        def reached(loss: float) -> bool:
            terms = log_weights + excess * (loss - running)
            top = float(terms.max())
            return top + math.log(float(np.exp(terms - top).sum())) >= target

        # One term alone reaches the target here, so the mixture does too.
        high = float((running + (target - log_weights) / excess).min()) + 1e-9
        low = min(0.0, float(running.min()) - 1.0)
        loss = last_holding(reached, high, low)
        # The mixture is flat within its own rounding: one part in 10^12 covers it.
        return min(max(0.0, loss) * (1.0 + 1e-12) + 1e-15, spent.epsilon)


@dataclass(frozen=True, slots=True)
class BestOf:
    """The least of several odometers, each at its own share of delta'."""

    kind: ClassVar[str] = "best-of"
    parts: tuple[tuple[float, Odometer], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(part, Odometer) for _, part in self.parts):
            raise InvalidPolicy(f"BestOf takes pairs of a share and an odometer, not {self.parts!r}")
        _check_shares("BestOf shares", [share for share, _ in self.parts])

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return the meters of all parts, each once."""
        return named_apart(dict.fromkeys(m for _, part in self.parts for m in part.meters(latent=latent)))

    def bound(self, spent: Spent, delta: float) -> float:
        """Return the least of the parts' bounds.

        Theorem: best of several boundaries: the levels of the parts add up.
        Assumes: parts and shares fixed before the first step; shares sum to at most 1.
        """
        return min(part.bound(spent, share * delta) for share, part in self.parts)


Odometer: TypeAlias = (
    BestOf | DiscreteMixture | Filter | Mixture | PaperMixture | PaperStitched | Renyi | Rogers | Stitched
)

_KINDS: Final[dict[str, Callable[..., Odometer]]] = {
    cls.kind: cls for cls in (DiscreteMixture, Filter, Mixture, PaperMixture, PaperStitched, Renyi, Rogers, Stitched)
}


def odometer_to_dict(odometer: Odometer) -> dict[str, Any]:
    """Return the stored form of an odometer."""
    if isinstance(odometer, BestOf):
        return {
            "kind": "best-of",
            "parts": [[share, odometer_to_dict(part)] for share, part in odometer.parts],
        }
    return {"kind": odometer.kind, **asdict(odometer)}


def odometer_from_dict(form: Mapping[str, Any]) -> Odometer:
    """Read what `odometer_to_dict` wrote."""
    try:
        if form["kind"] == "best-of":
            return BestOf(tuple((float(share), odometer_from_dict(part)) for share, part in form["parts"]))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in form.items() if k != "kind"}
        return _KINDS[form["kind"]](**values)
    except (KeyError, TypeError, ValueError) as problem:
        raise InvalidPolicy(f"not an odometer: {form!r:.120} ({told(problem):.120})") from problem


def default_odometer(time: float, delta: float, *, curves: bool = False) -> BestOf:
    """Return the default: it reads least where a filter stops that admits `time`, and little more before.

    Half of delta' pays for the line that is tightest at `time`, half for 8 lines from time/400 to time/2. With
    `curves`, for policies that take steps with a Rényi curve and no intrinsic time, these share one half, and the
    other pays for a Rényi odometer at orders around the one that is best at `time`.

    Theorem: best of several boundaries; none is needed for the tuning, any is valid.
    Assumes: time > 0 and delta were fixed before the first step.
    """
    share = 0.25 if curves else 0.5
    # The filter whose line is tightest at `time` stops where that line is this loss.
    stop = math.sqrt(2.0 * -math.log(share * delta) * time) + time / 2.0
    parts: list[tuple[float, Odometer]] = [
        (share, Filter(stop)),
        (share, DiscreteMixture(time / _EARLIEST, time / 2.0, _EARLY_LINES)),
    ]
    if curves:
        best = math.sqrt(2.0 * -math.log(0.5 * delta) / time)  # its order less 1, for Gaussians
        orders = sorted({2.0, *(max(1.001, float(f"{1.0 + best * factor:.6g}")) for factor in _ORDERS_AROUND)})
        parts.append((0.5, Renyi(tuple(orders), (1.0 / len(orders),) * len(orders))))
    return BestOf(tuple(parts))


def standard_odometer(epsilon: float, delta: float) -> DiscreteMixture:
    """Return a general-purpose one: 16 lines over six decades of time, up to 8 times where a filter stops."""
    high = 8.0 * boundaries.filter_time(epsilon, delta)
    return DiscreteMixture(high * 1e-6, high)


def standard_odometers(epsilon: float, delta: float) -> tuple[Odometer, ...]:
    """Return one of each kind that reads intrinsic time, tuned for where a filter for the target would stop."""
    time = boundaries.filter_time(epsilon, delta)
    return (
        standard_odometer(epsilon, delta),
        Filter(epsilon),
        Mixture(boundaries.best_gamma_one_sided(time, delta)),
        Stitched(boundaries.best_start(time)),
    )
