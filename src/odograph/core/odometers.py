"""Odometers: bounds on the privacy loss so far, valid at all times at once; and the boundaries that they read from.

An odometer is a frozen value: its boundary and tuning are fixed before the first step and never change.

A boundary is a curve that the centered privacy loss ever crosses with probability at most delta. S_n is the privacy
loss of the first n steps less V_n/2, V_n their intrinsic time, by whose theorem the process `exp(c S_n - c^2 V_n/2)`
is a nonnegative supermartingale for every c >= 0. Every boundary B here has `P(there is an n with S_n >= B(V_n)) <=
delta` by Ville's inequality. The tuning of a boundary (the keyword arguments) is fixed before the first step: the
best of several tunings picked afterwards is not a boundary.

`v` is a float or a float64 array, and the result has its shape. Results are padded up, delta lies strictly between 0
and 1, and only log(1/delta) is ever formed, never 1/delta.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar, Final, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from odograph.core.conversions import filter_time
from odograph.core.fixed_point import (
    MOST_PRICED,
    ULP,
    Numeric,
    brief_above,
    down,
    float_below,
    last_holding,
    read,
    up,
)
from odograph.core.meters import DriftMeter, Meter, MomentMeter, distinguish_names
from odograph.display import badge, card, facts, one_line, paragraph
from odograph.errors import InvalidArgument, InvalidPolicy, explain

__all__ = [
    "ODOMETER_NAMES",
    "BestOf",
    "DiscreteMixture",
    "FilterOdometer",
    "Mixture",
    "Odometer",
    "PaperMixture",
    "PaperStitched",
    "Reading",
    "RenyiOdometer",
    "Rogers",
    "Spent",
    "Stitched",
    "best_gamma",
    "best_gamma_one_sided",
    "default_odometer",
    "discrete_mixture",
    "general_odometer",
    "line",
    "mixture",
    "mixture_one_sided",
    "mixture_one_sided_closed",
    "odometer_by_name",
    "odometer_from_dict",
    "odometer_to_dict",
    "rogers",
    "spread_times",
    "standard_odometer",
    "standard_odometers",
    "stitched",
    "stitched_paper",
]

_Array: TypeAlias = NDArray[np.float64]
Values = TypeVar("Values", float, NDArray[np.float64])

_LOG_2: Final = math.log(2.0)
_NEWTON_STEPS: Final = 100  # convergence is quadratic and takes about ten; this ends a cycle of two roundings

_STATEMENT: Final = (
    "For each fixed pair of neighbors, with probability at least 1 - {delta} the realized privacy loss is at "
    "most this at all times at once; it does not make the run ({loss}, {delta})-DP."
)
_SURE_STATEMENT: Final = (
    "For each fixed pair of neighbors the realized privacy loss is at most this, surely and at all times; it does not"
    " make the run {loss}-DP, because with other answers it could have become larger."
)
_NO_STATEMENT: Final = "It allows no claim: with the policy's slack and delta it may fail with any probability."
_EARLIEST: Final = 400.0  # of the default odometer: how much earlier than the filter's stop it is still tight
_EARLY_LINES: Final = 8
_ORDERS_AROUND: Final = (1.0, 2.0, 4.0)  # each is a meter in every entry
_DECADES: Final = (1e-6, 1e2, 22)  # of the odometer without a target: times, and as many lines
_GENERAL_ORDERS: Final = (1.5, 3.0, 8.0, 20.0, 60.0, 200.0)  # each is a meter in every entry
_UNCOVERED: Final = (
    "Informational: not covered by the guarantee. The policy fixed another odometer, and picking the least afterwards"
    " is not safe."
)


@dataclass(frozen=True, slots=True)
class Spent:
    """What an odometer reads: sums over the steps so far; infinite where a step had no price."""

    intrinsic: float
    epsilon: float
    drift: float
    moments: Mapping[Fraction, float]


@dataclass(frozen=True, slots=True, repr=False)
class Reading:
    """One reading: the bound on the loss, the probability that it ever fails, and what it allows to be claimed.

    `summed` is true if the sum of the epsilons was the least bound.
    """

    loss: float
    delta: float
    odometer: Odometer
    covered: bool
    note: str = ""
    summed: bool = False

    @property
    def method(self) -> str:
        """Where the bound comes from: the name of the odometer, or the sum of the epsilons."""
        return "sum of epsilons" if self.summed else type(self.odometer).__name__

    @property
    def loss_text(self) -> str:
        """The bound for people: four significant digits, rounded up."""
        return brief_above(self.loss) if math.isfinite(self.loss) else "inf"

    @property
    def statement(self) -> str:
        """What the reading allows to be claimed, in a sentence."""
        if not self.covered:
            return _UNCOVERED
        if math.isinf(self.loss):
            return self.note
        if self.loss == 0.0:
            return "Nothing was lost so far."
        if self.delta >= 1.0:
            return _NO_STATEMENT
        template = _STATEMENT if self.delta else _SURE_STATEMENT
        sentence = template.format(loss=self.loss_text, delta=brief_above(self.delta))
        return f"{sentence} {self.note}" if self.note else sentence

    def to_dict(self) -> dict[str, Any]:
        """Return the reading in plain types; the loss is None where the odometer has no finite bound."""
        return {
            "loss": self.loss if math.isfinite(self.loss) else None,
            "delta": self.delta,
            "odometer": self.method,
            "covered": self.covered,
            "statement": self.statement,
        }

    def __repr__(self) -> str:
        covered = "covered by the guarantee" if self.covered else "informational"
        return one_line("Reading", f"loss at most {self.loss_text} ({self.method}), {covered}")

    def _repr_html_(self) -> str:
        label = badge("covered by the guarantee", "good") if self.covered else badge("informational")
        named = {"method": self.method, "fails with probability": f"at most {brief_above(self.delta)}"}
        return card(f"Loss at most {self.loss_text}", paragraph(self.statement), facts(named), label=label)

    def __str__(self) -> str:
        return f"loss at most {self.loss_text} ({self.method}). {self.statement}"


def _check_positive(odometer: object, *names: str, above: float = 0.0) -> None:
    """Check that tuning fields are finite numbers above a bound, and store them as floats."""
    for name in names:
        field = f"{type(odometer).__name__}.{name}"
        value = float(read(getattr(odometer, name), field, InvalidArgument))
        if not above < value < math.inf:
            raise InvalidArgument(f"{field} must be above {above:g} (got {getattr(odometer, name)!r})")
        object.__setattr__(odometer, name, value)


def _check_shares(name: str, shares: Sequence[object]) -> None:
    """Check that shares of delta' are positive and sum to at most 1, up to their last digits."""
    exact = [read(share, name, InvalidArgument) for share in shares]
    if not exact or min(exact) == 0 or sum(exact) > 1 + Fraction(1, 10**12):
        raise InvalidArgument(f"{name} must be positive and sum to at most 1 (got {shares!r})")


class _TimeOdometer(ABC):
    """Shared by the odometers that read intrinsic time: U = B(V) + V/2 + drift, or the sum of epsilons."""

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return the meters that the odometer needs beside intrinsic time and epsilon."""
        return (DriftMeter("drift", None, latent),)

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
class FilterOdometer(_TimeOdometer):
    """The straight line that is tightest where the paper's filter for `epsilon` would stop."""

    kind: ClassVar[str] = "filter"
    epsilon: float

    def __post_init__(self) -> None:
        _check_positive(self, "epsilon")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return line(v, delta, at=filter_time(self.epsilon, delta))


@dataclass(frozen=True, slots=True)
class Mixture(_TimeOdometer):
    """The one-sided normal mixture, tightest around a time set by `gamma`."""

    kind: ClassVar[str] = "mixture"
    gamma: float

    def __post_init__(self) -> None:
        _check_positive(self, "gamma")

    @classmethod
    def at(cls, v: Numeric, delta: Numeric) -> Self:
        """Return the mixture that is tightest at intrinsic time `v`, if it holds with probability 1 - `delta`.

        Any gamma is valid, so another `delta` costs tightness only. Both are fixed before the first step.
        """
        time, level = read(v, "v", InvalidArgument), read(delta, "delta", InvalidArgument)
        if not (0 < time <= MOST_PRICED and 0 < level < 1):
            raise InvalidArgument(
                f"v must be above 0 and at most {MOST_PRICED:,}, and delta above 0 and below 1 (got {v!r} and"
                f" {delta!r}), as in Mixture.at(0.05, 1e-6)"
            )
        return cls(best_gamma_one_sided(float(time), float_below(level)))

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return mixture_one_sided(v, delta, gamma=self.gamma)


@dataclass(frozen=True, slots=True)
class PaperMixture(_TimeOdometer):
    """The two-sided normal mixture as the paper prints it (E11: true, and loose)."""

    kind: ClassVar[str] = "mixture-paper"
    gamma: float

    def __post_init__(self) -> None:
        _check_positive(self, "gamma")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return mixture(v, delta, gamma=self.gamma)


@dataclass(frozen=True, slots=True)
class Stitched(_TimeOdometer):
    """The stitched boundary with exact constants, finite from the start (E12, E13)."""

    kind: ClassVar[str] = "stitched"
    start: float
    eta: float = 2.0
    s: float = 1.4

    def __post_init__(self) -> None:
        _check_positive(self, "start")
        _check_positive(self, "eta", "s", above=1.0)

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return stitched(v, delta, start=self.start, eta=self.eta, s=self.s)


@dataclass(frozen=True, slots=True)
class PaperStitched(_TimeOdometer):
    """The stitched boundary with the paper's constants, infinite before `start`."""

    kind: ClassVar[str] = "stitched-paper"
    start: float

    def __post_init__(self) -> None:
        _check_positive(self, "start")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        return stitched_paper(v, delta, start=self.start)


@dataclass(frozen=True, slots=True)
class DiscreteMixture(_TimeOdometer):
    """A mixture of lines, tightest at `points` geometric times from `low` to `high`."""

    kind: ClassVar[str] = "discrete-mixture"
    low: float
    high: float
    points: int = 16

    def __post_init__(self) -> None:
        _check_positive(self, "low", "high")
        if (
            self.low > self.high
            or isinstance(self.points, bool)
            or not isinstance(self.points, int)
            or self.points < 1
        ):
            raise InvalidArgument(
                f"DiscreteMixture must have low <= high, and points must be an integer from 1 (got {self!r})"
            )

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        times, weights = spread_times(self.low, self.high, self.points)
        return discrete_mixture(v, delta, times=times, weights=weights)


@dataclass(frozen=True, slots=True)
class Rogers(_TimeOdometer):
    """Rogers et al. (2016), corrected (E6): a baseline; `people` is a public constant, never the data's size."""

    kind: ClassVar[str] = "rogers"
    people: float

    def __post_init__(self) -> None:
        _check_positive(self, "people")
        if self.people < 2.0:
            raise InvalidArgument(f"Rogers.people must be a public number, at least 2 (got {self.people!r})")

    def boundary(self, v: float, delta: float) -> float:
        """Return B(v) at level `delta`."""
        # The theorem is for delta' up to 1/e.
        return rogers(v, delta, people=self.people) if delta <= math.exp(-1.0) else math.inf


@dataclass(frozen=True, slots=True)
class RenyiOdometer:
    """Readings from Rényi curves, hence for subsampled Gaussians: a weighted mixture over fixed orders."""

    kind: ClassVar[str] = "renyi"
    orders: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        orders = tuple(float(read(order, "RenyiOdometer.orders", InvalidArgument)) for order in self.orders)
        if len(orders) != len(self.weights) or any(not 1.0 < order < math.inf for order in orders):
            raise InvalidArgument(
                f"RenyiOdometer.orders must be above 1, with one weight each (got {self.orders!r}, {self.weights!r})"
            )
        _check_shares("RenyiOdometer.weights", self.weights)
        object.__setattr__(self, "orders", orders)
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return one meter per order."""
        orders = [Fraction(repr(order)) for order in self.orders]
        return distinguish_names(MomentMeter(f"moment@{float(order):g}", None, order, latent) for order in orders)

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
            raise InvalidArgument(f"BestOf.parts must be pairs of a share and an odometer (got {self.parts!r})")
        _check_shares("shares of BestOf.parts", [share for share, _ in self.parts])

    def meters(self, *, latent: bool) -> tuple[Meter, ...]:
        """Return the meters of all parts, each once."""
        return distinguish_names(dict.fromkeys(m for _, part in self.parts for m in part.meters(latent=latent)))

    def bound(self, spent: Spent, delta: float) -> float:
        """Return the least of the parts' bounds.

        Theorem: best of several boundaries: the levels of the parts add up.
        Assumes: parts and shares fixed before the first step; shares sum to at most 1.
        """
        return min(part.bound(spent, share * delta) for share, part in self.parts)


Odometer: TypeAlias = (
    BestOf
    | DiscreteMixture
    | FilterOdometer
    | Mixture
    | PaperMixture
    | PaperStitched
    | RenyiOdometer
    | Rogers
    | Stitched
)

_KINDS: Final[dict[str, Callable[..., Odometer]]] = {
    cls.kind: cls
    for cls in (
        DiscreteMixture,
        FilterOdometer,
        Mixture,
        PaperMixture,
        PaperStitched,
        RenyiOdometer,
        Rogers,
        Stitched,
    )
}


def odometer_to_dict(odometer: Odometer) -> dict[str, Any]:
    """Return the stored form of an odometer."""
    if isinstance(odometer, BestOf):
        return {
            "kind": "best-of",
            "parts": [[share, odometer_to_dict(part)] for share, part in odometer.parts],
        }
    values = {name: [*v] if isinstance(v, tuple) else v for name, v in asdict(odometer).items()}
    return {"kind": odometer.kind, **values}


def odometer_from_dict(form: Mapping[str, Any]) -> Odometer:
    """Read what `odometer_to_dict` wrote; anything else raises `InvalidPolicy`."""
    try:
        if form["kind"] == "best-of":
            return BestOf(tuple((float(share), odometer_from_dict(part)) for share, part in form["parts"]))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in form.items() if k != "kind"}
        return _KINDS[form["kind"]](**values)
    except (KeyError, TypeError, ValueError) as problem:
        raise InvalidPolicy(f"an odometer could not be read from {form!r:.120}: {explain(problem):.120}") from problem


def default_odometer(time: float, delta: float, *, curves: bool = False) -> BestOf:
    """Return the default odometer: tightest where a filter that admits `time` stops, and nearly as tight before.

    Half of delta' pays for the line that is tightest at `time`, half for 8 lines from time/400 to time/2. With
    `curves`, for policies that take steps with a Rényi curve and no intrinsic time, each has two fifths, and the rest
    pays for a Rényi odometer at orders around the one that is best at `time`.

    Theorem: best of several boundaries; none is needed for the tuning, any is valid.
    Assumes: time > 0 and delta were fixed before the first step.
    """
    share = 0.4 if curves else 0.5
    # The filter whose line is tightest at `time` stops where that line is this loss.
    stop = math.sqrt(2.0 * -math.log(share * delta) * time) + time / 2.0
    parts: list[tuple[float, Odometer]] = [
        (share, FilterOdometer(stop)),
        (share, DiscreteMixture(time / _EARLIEST, time / 2.0, _EARLY_LINES)),
    ]
    if curves:
        rest = 0.2
        best = math.sqrt(2.0 * -math.log(rest * delta) / time)  # its order less 1, for Gaussians
        orders = sorted({max(1.001, float(f"{1.0 + best * factor:.6g}")) for factor in _ORDERS_AROUND})
        parts.append((rest, RenyiOdometer(tuple(orders), (1.0 / len(orders),) * len(orders))))
    return BestOf(tuple(parts))


def general_odometer() -> BestOf:
    """Return the odometer of a policy without a limit: nearly as tight at any loss from 0.005 to 100 at delta 1e-6.

    Four fifths of delta' pay for lines over eight decades of time, the rest for Rényi curves, at a few orders that
    are best for losses from 0.1 to 20.

    Theorem: best of several boundaries; none is needed for the tuning, any is valid.
    Assumes: nothing: it depends on nothing.
    """
    return BestOf(
        (
            (0.8, DiscreteMixture(*_DECADES)),
            (0.2, RenyiOdometer(_GENERAL_ORDERS, (1.0 / len(_GENERAL_ORDERS),) * len(_GENERAL_ORDERS))),
        )
    )


def standard_odometer(epsilon: float, delta: float) -> DiscreteMixture:
    """Return a general-purpose odometer: 16 lines over six decades of time, up to 8 times where a filter stops."""
    high = 8.0 * filter_time(epsilon, delta)
    return DiscreteMixture(high * 1e-6, high)


ODOMETER_NAMES: Final = ("lines", "filter", "mixture", "stitched")  # of `standard_odometers`


def odometer_by_name(name: str, epsilon: float, delta: float) -> Odometer:
    """Return the standard odometer of a name, tuned to a target; raise `InvalidPolicy` if there is none.

    Theorem: none is needed for the tuning, any is valid.
    Assumes: the target was fixed before the first step.
    """
    if name not in ODOMETER_NAMES:
        raise InvalidPolicy(f"odometer must be one of {', '.join(ODOMETER_NAMES)} (got {name!r})")
    if not delta:
        raise InvalidPolicy(
            f"odometer must be left out where no delta is left for its readings (got {name!r}): the"
            " reading is then the sum of the epsilons"
        )
    return standard_odometers(epsilon, delta)[ODOMETER_NAMES.index(name)]


def standard_odometers(epsilon: float, delta: float) -> tuple[Odometer, ...]:
    """Return one odometer of each kind that reads intrinsic time, tuned for where a filter for the target stops."""
    time = filter_time(epsilon, delta)
    return (
        standard_odometer(epsilon, delta),
        FilterOdometer(epsilon),
        Mixture(best_gamma_one_sided(time, delta)),
        Stitched(time),
    )


# Boundaries.


def line(v: Values, delta: float, *, at: float) -> Values:
    """Return the straight boundary that is tightest at intrinsic time `at`.

    Theorem: boundaries: Ville's inequality for c = sqrt(2 log(1/delta)/at), Howard et al. (2020).
    Assumes: at > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    half = math.sqrt(0.5 * ell) * math.sqrt(at)
    return _pad(half + half / at * x, v, ell)


def mixture(v: Values, delta: float, *, gamma: float) -> Values:
    """Return the two-sided normal-mixture boundary, as the paper prints it.

    Theorem: boundaries: it lies above the one-sided mixture; two-sided Robbins (1970), Howard et al. (2021).
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    return _pad(np.sqrt((x + gamma) * (2.0 * ell + np.log1p(x / gamma))), v, ell)


def mixture_one_sided(v: Values, delta: float, *, gamma: float) -> Values:
    """Return the one-sided normal-mixture boundary: the mixture runs over c >= 0 only, which is enough here.

    Theorem: boundaries: `z sqrt(v+gamma)` with z^2/2 + log Phi(z) = log(sqrt(1+v/gamma)/(2 delta)); half-normal
        mixture.
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    from scipy import special  # noqa: PLC0415  loaded where it is used

    goal = 0.5 * np.log1p(x / gamma) + ell
    # z^2/2 + log(2 Phi(z)) is convex and increasing, and the closed form lies above its root: Newton's
    # iterates come down to the root from above and never pass it. 2 Phi(z) - 1 = erf(z/sqrt 2) is `excess`.
    z = np.sqrt(2.0 * _log_mean_one_exp(goal))
    for _ in range(_NEWTON_STEPS):
        excess = special.erf(z * math.sqrt(0.5))
        slope = z + math.sqrt(2.0 / math.pi) * np.exp(-0.5 * z * z) / (1.0 + excess)
        step = (0.5 * z * z + np.log1p(excess) - goal) / slope
        z = z - step
        if np.all(np.abs(step) <= 2.0 * ULP * z):
            break
    return _pad(z * np.sqrt(x + gamma), v, ell)


def mixture_one_sided_closed(v: Values, delta: float, *, gamma: float) -> Values:
    """Return a closed form slightly above the one-sided mixture boundary (4e-8 relative at delta = 1e-6).

    Theorem: boundaries: Phi(-z) <= e^(-z^2/2)/2 puts `sqrt(2 log(K + 1/2))` above z, K = sqrt(1+v/gamma)/(2 delta).
    Assumes: gamma > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    goal = 0.5 * np.log1p(x / gamma) + ell
    return _pad(np.sqrt(2.0 * (x + gamma) * _log_mean_one_exp(goal)), v, ell)


def stitched_paper(v: Values, delta: float, *, start: float) -> Values:
    """Return the stitched boundary with the paper's rounded constants, infinite before `start`.

    Theorem: boundaries: Howard et al. (2021), Theorem 1 with eta = 2, s = 1.4, constants rounded up.
    Assumes: start > 0 was fixed before the first step.
    """
    x, ell = _read(v, delta)
    late = np.maximum(x, start)
    rate = np.log(_LOG_2 + np.log(late / start)) + 0.72 * (math.log(5.2) + ell)
    return _pad(np.where(x < start, math.inf, 1.7 * np.sqrt(late * rate)), v, ell)


def stitched(v: Values, delta: float, *, start: float, eta: float = 2.0, s: float = 1.4) -> Values:
    """Return the stitched boundary with exact constants, constant before `start`: log log growth.

    Theorem: boundaries: Howard et al. (2021), Theorem 1; `max(v, start)` is free because B is increasing.
    Assumes: start > 0, eta > 1 and s > 1 were fixed before the first step.
    """
    x, ell = _read(v, delta)
    from scipy import special  # noqa: PLC0415  loaded where it is used

    late = np.maximum(x, start)
    # s log log(eta w) - s log log(eta) written as one logarithm, so that every term is nonnegative.
    epochs = s * np.log1p(np.log(late / start) / math.log(eta))
    rate = epochs + math.log1p(float(special.zetac(s))) + ell
    return _pad((eta**0.25 + eta**-0.25) * np.sqrt(0.5 * late * rate), v, ell, 32.0)


def discrete_mixture(v: Values, delta: float, *, times: tuple[float, ...], weights: tuple[float, ...]) -> Values:
    """Return the boundary of a weighted mixture of lines, each tightest at one of `times`.

    Theorem: boundaries: Ville's inequality for sum_k w_k exp(c_k S - c_k^2 V/2), c_k = sqrt(2 log(1/delta)/v_k).
    Assumes: times > 0 and weights > 0 with sum at most 1 were fixed before the first step.
    """
    x, ell = _read(v, delta)
    c = np.sqrt(2.0 * ell) / np.sqrt(np.asarray(times, dtype=np.float64))
    loss = 0.5 * c * c * x[..., np.newaxis] - np.log(np.asarray(weights, dtype=np.float64))
    # Each term alone reaches 1/delta at its own line, so the lowest line is above the root; the log of the
    # sum is convex and increasing in s, and Newton's iterates come down to the root from above.
    at = np.min((ell + loss) / c, axis=-1)
    for _ in range(_NEWTON_STEPS):
        exponents = c * at[..., np.newaxis] - loss
        peak = np.max(exponents, axis=-1)
        terms = np.exp(exponents - peak[..., np.newaxis])
        total = np.sum(terms, axis=-1)
        step = (peak + np.log(total) - ell) * total / np.sum(c * terms, axis=-1)
        at = at - step
        if np.all(np.abs(step) <= 2.0 * ULP * at):
            break
    return _pad(at, v, ell, 32.0)


def rogers(v: Values, delta: float, *, people: float) -> Values:
    """Return the odometer of Rogers et al. (2016) as a boundary, with its second branch corrected (E6).

    Theorem: Rogers et al. (2016), Theorem 6.5, with `log(4 log2(n)/delta)`.
    Assumes: people >= 2 is a public constant, and delta <= 1/e.
    """
    x, ell = _read(v, delta)
    floor = 1.0 / (people * people)
    log_n = math.log(people)
    inner = x * (1.0 + math.log(110.0) + 2.0 * (math.log(log_n) + ell))
    spread = (floor + x) * (1.0 + 0.5 * np.log1p(x / floor))
    outer = spread * (math.log(4.0 * log_n / _LOG_2) + ell)
    return _pad(np.sqrt(2.0 * np.where((floor <= x) & (x <= 1.0), inner, outer)), v, ell)


def best_gamma(v: float, delta: float) -> float:
    """Return the gamma that makes the two-sided `mixture` smallest at intrinsic time `v`.

    Theorem: by calculation: v/(x-1), x the root above 1 of x = 1 + 2 log(1/delta) + log x; any gamma is valid.
    Assumes: v > 0 is a target named beforehand, not the intrinsic time that was reached.
    """
    return _gamma(v, -math.log(delta))


def best_gamma_one_sided(v: float, delta: float) -> float:
    """Return a gamma that makes `mixture_one_sided` nearly smallest at intrinsic time `v`.

    Theorem: by calculation: the two-sided optimum with (1 + 1/delta)/2, as in the closed form, for 1/delta; any is
        valid.
    Assumes: v > 0 is a target named beforehand, not the intrinsic time that was reached.
    """
    return _gamma(v, float(_log_mean_one_exp(np.asarray(-math.log(delta)))))


def spread_times(low: float, high: float, points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return geometric times from `low` to `high` and equal weights, for `discrete_mixture`.

    Theorem: none is needed: any times are valid with weights that sum to at most 1.
    Assumes: 0 < low <= high and points >= 1 were fixed before the first step.
    """
    times = np.geomspace(low, high, points) if points > 1 else np.asarray([math.sqrt(low) * math.sqrt(high)])
    return tuple(times.tolist()), (down(1.0 / points, 1.0),) * points


def _read(v: float | _Array, delta: float) -> tuple[_Array, float]:
    return np.asarray(v, dtype=np.float64), -math.log(delta)


def _match_shape(value: _Array, like: Values) -> Values:
    return value if isinstance(like, np.ndarray) else float(value)


def _pad(value: _Array, like: Values, ell: float, ulps: float = 16.0) -> Values:
    # Near delta = 1 the half unit in which delta was read is 1/ell units of log(1/delta).
    return _match_shape(np.nextafter(value * (1.0 + (ulps + 1.0 / ell) * ULP), math.inf), like)


def _log_mean_one_exp(x: _Array) -> _Array:
    """Return log((1 + e^x)/2) for x >= 0, accurate near 0 and without overflow."""
    small = np.log1p(0.5 * np.expm1(np.minimum(x, 1.0)))
    return np.where(x < 1.0, small, np.logaddexp(0.0, x) - _LOG_2)


def _gamma(v: float, ell: float) -> float:
    # y - log(1+y) = 2 ell with y = x - 1: convex and increasing, started above its root.
    y = 2.0 * ell + 2.0 * math.sqrt(ell)
    for _ in range(_NEWTON_STEPS):
        step = (y - math.log1p(y) - 2.0 * ell) * (1.0 + y) / y
        y -= step
        if abs(step) <= 2.0 * ULP * y:
            break
    return v / y
