"""dp-accounting: what an event guarantees, and its accountant's interface as a door to an account.

Composition inside one event has parameters that were fixed beforehand, so Rényi and Gaussian composition hold there.

A release of dp-accounting may add events, and fields to events. One that is not listed here is refused by name: what
is not read is not charged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final, Self

from odograph.core.account import Account
from odograph.core.conversions import pure_to_rdp
from odograph.core.guarantees import GDP, RDP, ZCDP, Guarantee, Mechanism, PureDP, exact_of
from odograph.core.orders import ORDERS
from odograph.core.subsampling import subsampled_gaussian
from odograph.core.units import Number, exactly, read, up
from odograph.errors import BudgetExceeded, InvalidGuarantee, UnprovenComposition
from odograph.extras import load

__all__ = ["PrivacyAccountant", "cost_of"]

SETTINGS: Final = ()

dpa = load("dp_accounting")
dpe = load("dp_accounting.dp_event")
RdpAccountant = load("dp_accounting.rdp").RdpAccountant

_RELATIONS: Final = {
    "add-remove": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}
# An event's noise is in units of one record's norm. A replaced record changes a sum by as much as two norms.
_NORMS: Final = {"add-remove": 1, "replace-one": 2}

# Every event that is understood, with every field that it has. Subclasses are other events.
_FIELDS: Final = {
    "ComposedDpEvent": {"events"},
    "DiscreteLaplaceDpEvent": {"noise_parameter", "sensitivity"},
    "GaussianDpEvent": {"noise_multiplier"},
    "LaplaceDpEvent": {"noise_multiplier"},
    "NoOpDpEvent": set[str](),
    "NonPrivateDpEvent": set[str](),
    "PoissonSampledDpEvent": {"event", "sampling_probability"},
    "RandomizedResponseDpEvent": {"noise_parameter", "num_buckets"},
    "RepeatAndSelectDpEvent": {"event", "mean", "shape"},
    "SampledWithoutReplacementDpEvent": {"event", "sample_size", "source_dataset_size"},
    "SelfComposedDpEvent": {"count", "event"},
    "ZCDpEvent": {"rho", "xi"},
}

# Orders of the curves that dp-accounting computes: between integers it interpolates, as a curve does, or sums a
# series that may not end.
_INTEGERS: Final = tuple(order for order in ORDERS if float(order).is_integer())

# dp-accounting's curves are off by a few roundings a run; far more is added, relative and absolute.
_PADDING: Final = 1e-9
_SLACK: Final = 1e-14

_MOST_STEPS: Final = 100_000  # of one `compose`: they are decided together before any is spent


def cost_of(event: Any, *, neighbours: str = "add-remove") -> Guarantee:  # noqa: ANN401  untyped library
    """Return what a `DpEvent` guarantees for neighbours, as one step.

    Gaussians together are a Gaussian, pure events a pure one with the sum of the epsilons (`PrivacyAccountant` spends
    them one by one, for less), runs of one Poisson-sampled Gaussian a mechanism that a menu may list; other events,
    and mixtures, have a Rényi curve.

    Theorem: Gaussian DP composition (Dong, Roth, Su 2022), basic composition, RDP composition; the curves of Laplace
        noise, randomized response, repeated selection and sampling without replacement are dp-accounting's, with the
        noise halved for replaced records, which `RdpAccountant` leaves to its caller.
    Assumes: the event's parameters were fixed before it began. A zCDP event is for the policy's neighbours.
    """
    if neighbours not in _NORMS:
        raise InvalidGuarantee(f"neighbours must be one of {[*_NORMS]}, and {neighbours!r} is not")
    for inner in _inside(event):
        _check_known(inner)
    parts = [*_parts(event, 1)]
    steps = [(_one(part, neighbours), times) for part, times in parts]
    return _together(steps) or _curve(parts, steps, neighbours)


def _check_known(event: Any) -> None:  # noqa: ANN401  untyped library
    """Raise unless the event is of a class, and has the fields, that are understood."""
    if not isinstance(event, dpe.DpEvent):
        raise InvalidGuarantee(f"a {type(event).__name__} is no DpEvent; pass one, such as GaussianDpEvent(1.0)")
    kind = type(event)
    understood = _FIELDS.get(kind.__name__)
    if understood is None or kind is not getattr(dpe, kind.__name__, None):
        raise UnprovenComposition(
            f"{kind.__module__}.{kind.__qualname__} is not among the events that are understood"
            f" ({', '.join(_FIELDS)}); pass cost= if you know what it guarantees"
        )
    fields = {field.name for field in kind.__attrs_attrs__}
    if fields != understood:
        raise UnprovenComposition(
            f"{kind.__name__} has the fields {sorted(fields)} in this version of dp-accounting, and understood are"
            f" {sorted(understood)}; pass cost= if you know what it guarantees"
        )


def _inside(event: Any) -> Iterator[Any]:  # noqa: ANN401  untyped library
    """Yield the event, and then every event in it."""
    yield event
    for inner in [event.event] if hasattr(event, "event") else getattr(event, "events", ()):
        yield from _inside(inner)


def _together(steps: list[tuple[Guarantee, int]]) -> Guarantee | None:
    """Return one guarantee for steps whose parameters were fixed beforehand; None where only a curve has it."""
    pure = [exact_of(cost.epsilon) * times for cost, times in steps if isinstance(cost, PureDP)]
    gaussian = [exact_of(cost.mu) ** 2 * times for cost, times in steps if isinstance(cost, GDP)]
    concentrated = [exact_of(cost.rho) * times for cost, times in steps if isinstance(cost, ZCDP)]
    if len(pure) == len(steps):
        return PureDP(sum(pure, Fraction(0)))
    if len(gaussian) == len(steps):
        return GDP(_root(sum(gaussian, Fraction(0))))
    if len(gaussian) + len(concentrated) == len(steps):
        return ZCDP(sum(gaussian, Fraction(0)) / 2 + sum(concentrated, Fraction(0)))
    first, runs = steps[0][0], sum(times for _, times in steps)
    if isinstance(first, Mechanism) and all(cost == first for cost, _ in steps):
        return Mechanism(first.name, runs, first.curve and _runs(first.curve, runs))
    return _runs(first, runs) if isinstance(first, RDP) and len(steps) == 1 else None


def _runs(curve: RDP, times: int) -> RDP:
    return RDP(curve.orders, tuple(exact_of(value) * times for value in curve.values))


def _parts(event: Any, times: int) -> Iterator[tuple[Any, int]]:  # noqa: ANN401  untyped library
    """Yield what an event is composed of, each with how often it is run."""
    match event:
        case dpe.NoOpDpEvent():
            pass
        case dpe.SelfComposedDpEvent(count=count):
            yield from _parts(event.event, times * _whole(count, "SelfComposedDpEvent.count"))
        case dpe.ComposedDpEvent(events=events):
            for part in events:
                yield from _parts(part, times)
        case dpe.PoissonSampledDpEvent(sampling_probability=1):
            yield from _parts(event.event, times)
        case _:
            yield event, times


def _one(event: Any, neighbours: str) -> Guarantee:  # noqa: ANN401, PLR0911  untyped library; one line per event
    """Return what one run of an uncomposed event guarantees."""
    norms = _NORMS[neighbours]
    match event:
        case dpe.NonPrivateDpEvent():
            raise InvalidGuarantee("a NonPrivateDpEvent has no privacy, at any price")
        case dpe.GaussianDpEvent(noise_multiplier=noise):
            return GDP(norms / _positive(noise, "GaussianDpEvent.noise_multiplier"))
        case dpe.LaplaceDpEvent(noise_multiplier=noise):
            return PureDP(norms / _positive(noise, "LaplaceDpEvent.noise_multiplier"))
        case dpe.DiscreteLaplaceDpEvent(noise_parameter=decay, sensitivity=sensitivity):
            change = norms * _whole(sensitivity, "DiscreteLaplaceDpEvent.sensitivity")
            return PureDP(change * _positive(decay, "DiscreteLaplaceDpEvent.noise_parameter"))
        case dpe.RandomizedResponseDpEvent():
            return _randomized_response(event, neighbours)
        case dpe.ZCDpEvent(rho=rho, xi=xi):
            slope, base = read(rho, "ZCDpEvent.rho"), read(xi, "ZCDpEvent.xi")
            return RDP(ORDERS, tuple(base + slope * exact_of(o) for o in ORDERS)) if base else ZCDP(slope)
        case dpe.PoissonSampledDpEvent():
            return _poisson_sampled(event, neighbours)
    return _library_curve(event, neighbours, _INTEGERS)


def _poisson_sampled(event: Any, neighbours: str) -> Mechanism:  # noqa: ANN401  untyped library
    """Return a subsampled Gaussian: Gaussians on one sample are one Gaussian, whose noise is rounded down."""
    if neighbours != "add-remove":
        raise UnprovenComposition(
            "a PoissonSampledDpEvent is about a record more or less; it needs a policy with neighbours='add-remove',"
            f" not {neighbours!r}"
        )
    precision = Fraction(0)
    for part, times in _parts(event.event, 1):
        if isinstance(part, dpe.NonPrivateDpEvent):
            raise InvalidGuarantee("a NonPrivateDpEvent has no privacy, at any price")
        if not isinstance(part, dpe.GaussianDpEvent):
            raise UnprovenComposition(
                f"no curve is known for a {type(part).__name__} on a Poisson sample, only for Gaussians"
            )
        noise = _positive(part.noise_multiplier, "GaussianDpEvent.noise_multiplier")
        precision += times / noise**2
    if precision == 0:
        raise InvalidGuarantee("a PoissonSampledDpEvent of nothing has no price; leave it out")
    return subsampled_gaussian(event.sampling_probability, 1 / _root(precision))


def _randomized_response(event: Any, neighbours: str) -> PureDP:  # noqa: ANN401  untyped library
    """Return log(1 + k (1 - p) / p): the truth has probability 1 - p + p/k, each other answer p/k."""
    if neighbours != "replace-one":
        raise UnprovenComposition(
            "a RandomizedResponseDpEvent is about a changed answer, not about one more or less; it needs a policy"
            " with neighbours='replace-one'"
        )
    buckets = _whole(event.num_buckets, "RandomizedResponseDpEvent.num_buckets")
    noise = _positive(event.noise_parameter, "RandomizedResponseDpEvent.noise_parameter")
    if noise > 1:
        raise InvalidGuarantee(f"RandomizedResponseDpEvent.noise_parameter must be at most 1, not {float(noise)!r}")
    if buckets == 1:
        return PureDP(0)
    odds = buckets * (1 - noise) / noise
    if odds < 2**60:
        return PureDP(exactly(up(math.log1p(float(odds)), 32)))
    return PureDP(exactly(up(math.log(odds.numerator) - math.log(odds.denominator), 256)))


def _curve(parts: list[tuple[Any, int]], steps: list[tuple[Guarantee, int]], neighbours: str) -> RDP:
    """Return the sum of the Rényi curves of what was fixed beforehand, at the orders that all of them have."""
    curves = [
        (_curve_of(part, cost, neighbours), times) for (part, _), (cost, times) in zip(parts, steps, strict=True)
    ]
    values = {order: [(curve.at(exact_of(order)), times) for curve, times in curves] for order in ORDERS}
    sums = {
        order: sum(value * times for value, times in terms if value is not None)
        for order, terms in values.items()
        if all(value is not None for value, _ in terms)
    }
    return RDP(tuple(sums), tuple(sums.values()))


def _curve_of(part: Any, cost: Guarantee, neighbours: str) -> RDP:  # noqa: ANN401  untyped library
    """Return the Rényi curve of one part; where it is known, of the mechanism and not of its guarantee."""
    match cost:
        case RDP():
            return cost
        case Mechanism(curve=RDP() as curve):
            return curve
        case GDP(mu):
            return RDP(ORDERS, tuple(exact_of(order) * exact_of(mu) ** 2 / 2 for order in ORDERS))
        case ZCDP(rho):
            return RDP(ORDERS, tuple(exact_of(order) * exact_of(rho) for order in ORDERS))
        case PureDP(epsilon) if isinstance(part, dpe.DiscreteLaplaceDpEvent):
            # Both numbers are read as floats: a few roundings more.
            return RDP(ORDERS, tuple(exactly(up(pure_to_rdp(float(epsilon), o), 64)) for o in ORDERS))
    return _library_curve(part, neighbours, ORDERS)


def _library_curve(event: Any, neighbours: str, orders: tuple[float, ...]) -> RDP:  # noqa: ANN401  untyped library
    """Return the Rényi curve that `RdpAccountant` computes, padded."""
    accountant = RdpAccountant(orders=list(orders), neighboring_relation=_RELATIONS[neighbours])
    try:
        accountant.compose(_plain(event, _NORMS[neighbours]))
    except dpa.UnsupportedEventError as problem:
        raise UnprovenComposition(
            f"no curve for neighbours={neighbours!r} is known to dp-accounting: {problem}"
        ) from problem
    except (TypeError, ValueError, ArithmeticError, AssertionError) as problem:
        if isinstance(problem, InvalidGuarantee):
            raise
        raise InvalidGuarantee(f"dp-accounting finds no curve for {event!r}: {problem}") from problem
    curve = zip(orders, map(float, accountant.rdp), strict=True)
    known = [(order, exactly(up(max(v, 0.0) * (1.0 + _PADDING) + _SLACK))) for order, v in curve if math.isfinite(v)]
    if not known:
        raise InvalidGuarantee(f"{event!r} has no finite divergence: no privacy, at any price")
    return RDP(tuple(order for order, _ in known), tuple(value for _, value in known))


def _plain(event: Any, norms: int) -> Any:  # noqa: ANN401, PLR0911  untyped library; one line per event
    """Return the event with its noise per norm that changes, as floats: dp-accounting misreads whole numbers.

    In 0.6 it takes a composition of Gaussians for the first of them alone if that has a whole noise multiplier.
    """
    match event:
        case dpe.NonPrivateDpEvent():
            raise InvalidGuarantee("a NonPrivateDpEvent has no privacy, at any price")
        case dpe.GaussianDpEvent() | dpe.LaplaceDpEvent():
            name = f"{type(event).__name__}.noise_multiplier"
            return type(event)(float(_positive(event.noise_multiplier, name) / norms))
        case dpe.ComposedDpEvent():
            return dpe.ComposedDpEvent([_plain(part, norms) for part in event.events])
        case dpe.SelfComposedDpEvent():
            return dpe.SelfComposedDpEvent(
                _plain(event.event, norms), _whole(event.count, "SelfComposedDpEvent.count")
            )
        case dpe.PoissonSampledDpEvent():
            rate = float(read(event.sampling_probability, "PoissonSampledDpEvent.sampling_probability"))
            return dpe.PoissonSampledDpEvent(rate, _plain(event.event, norms))
        case dpe.SampledWithoutReplacementDpEvent():
            size = _whole(event.source_dataset_size, "SampledWithoutReplacementDpEvent.source_dataset_size")
            sample = _whole(event.sample_size, "SampledWithoutReplacementDpEvent.sample_size")
            return dpe.SampledWithoutReplacementDpEvent(size, sample, _plain(event.event, norms))
        case dpe.RepeatAndSelectDpEvent():
            return dpe.RepeatAndSelectDpEvent(_plain(event.event, norms), event.mean, event.shape)
    return event


def _positive(value: Any, field: str) -> Fraction:  # noqa: ANN401  untyped library
    exact = read(value, field)
    if exact == 0:
        raise InvalidGuarantee(f"{field} must be above 0: without noise there is no privacy, at any price")
    return exact


def _whole(value: Any, field: str) -> int:  # noqa: ANN401  untyped library
    exact = read(value, field)
    if exact.denominator != 1 or exact == 0:
        raise InvalidGuarantee(f"{field} must be a whole number from 1, and {value!r} is not")
    return int(exact)


def _root(square: Fraction) -> Fraction:
    """Return the square root: exactly where it is rational, else rounded up."""
    root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    if root**2 == square:
        return root
    # A value so large has no price, rounded up or not.
    return exactly(up(math.sqrt(square))) if square < 10**300 else Fraction(math.ceil(root) + 1)


class PrivacyAccountant(dpa.PrivacyAccountant):  # type: ignore[misc, name-defined]  # untyped library
    """dp-accounting's accountant over an account: `compose` spends, before it returns and before the mechanism runs.

    What does not fit raises `BudgetExceeded` and charges nothing. `get_epsilon` and `get_delta` give what the policy
    promises for everything there will ever be: what was spent so far is no guarantee, so it is never reported as one.
    So this is no accountant to calibrate noise with, which looks for the noise where the epsilon meets a target.
    """

    def __init__(self, account: Account) -> None:
        super().__init__(_RELATIONS[account.policy.neighbours])
        self._account = account

    def compose(self, event: Any, count: int = 1) -> Self:  # noqa: ANN401  untyped library
        """Spend what `count` runs of the event cost, in steps or as one, whichever is less.

        An event with no theorem under the policy raises `UnsupportedEventError`. If other threads spend at the same
        time, steps that were charged before a refusal stand.
        """
        dpa.DpEventBuilder().compose(event, count)  # raises for what is no event or no count
        problem = self._maybe_compose(event, count, do_compose=True)
        if problem is not None:
            raise dpa.UnsupportedEventError(
                f"Unsupported event: {event}. Error: [{problem.error_message}] caused by subevent"
                f" {problem.invalid_event}."
            )
        self._ledger.compose(event, count)
        return self

    def get_epsilon(self, target_delta: float) -> float:
        """Return the policy's epsilon, if the target is its delta or more."""
        policy = self._account.policy
        self._check(target_delta, policy.delta, "target_delta")
        return _above(policy.epsilon)

    def get_delta(self, target_epsilon: float) -> float:
        """Return the policy's delta, if the target is its epsilon or more."""
        policy = self._account.policy
        self._check(target_epsilon, policy.epsilon, "target_epsilon")
        return _above(policy.delta)

    def _check(self, target: float, promised: Number, field: str) -> None:
        if read(target, field) < exact_of(promised):
            raise UnprovenComposition(
                f"the policy promises nothing at {field}={target!r}: ask at {promised} or more. What was spent so far"
                " is no guarantee"
            )

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:  # noqa: ANN401, FBT001  its signature
        """Return what is unsupported and why, or None; spend if asked to."""
        costs: list[Guarantee] = []
        part = event
        try:
            for part in _inside(event):
                _check_known(part)
            for part, times in _parts(event, max(count, 1)):  # `supports` asks with a count of 0
                cost = _one(part, self._account.policy.neighbours)
                self._account.decide(cost)  # raises where the policy has no theorem for it
                costs += _steps(cost, times)
        except (InvalidGuarantee, UnprovenComposition) as problem:
            return self.CompositionErrorDetails(invalid_event=part, error_message=str(problem))
        if do_compose:
            self._spend(costs)
        return None

    def _spend(self, costs: list[Guarantee]) -> None:
        if len(costs) > 1 and not (quote := self._account.quote(costs)).admitted:
            raise BudgetExceeded(quote.decisions[-1])
        for cost in costs:
            with self._account.spending(cost, note="dp-accounting"):
                pass


def _steps(cost: Guarantee, times: int) -> list[Guarantee]:
    """Return equal steps as what costs least: pure ones apart, others together, where all the meters add up."""
    together = None if times == 1 or isinstance(cost, PureDP) else _together([(cost, times)])
    if together is None and times > _MOST_STEPS:
        raise InvalidGuarantee(f"{times} runs are too many at once: compose at most {_MOST_STEPS} at a time")
    return [cost] * times if together is None else [together]


def _above(value: Number) -> float:
    near = float(value)
    return near if read(near, "") >= exact_of(value) else math.nextafter(near, math.inf)
