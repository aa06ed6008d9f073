"""dp-accounting: what an event guarantees, an accountant with its interface that spends from an account, a baseline.

Composition inside one event has parameters that were fixed beforehand, so Rényi and Gaussian composition hold there.

A release of dp-accounting may add events, and fields to events. Events and fields that are not listed here are
refused by name: a field that is not read would not be charged for.

`heterogeneous_epsilon` is the baseline: dp-accounting's convolutions have no certified error, so no decision uses it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Final, Self

import numpy as np

from odograph.account import Account
from odograph.core.conversions import pure_to_rdp
from odograph.core.fixed_point import Number, exact_of, exactly, read, up, written_above
from odograph.core.guarantees import GDP, RDP, ZCDP, Guarantee, Mechanism, PureDP
from odograph.core.mechanisms import ORDERS, subsampled_gaussian
from odograph.core.policy import Policy
from odograph.errors import (
    BudgetExceeded,
    InvalidArgument,
    InvalidGuarantee,
    UnprovenComposition,
    load_extra,
    type_text,
)

__all__ = ["PrivacyAccountant", "cost_of", "heterogeneous_epsilon"]

SETTINGS: Final = ()

dpa = load_extra("dp_accounting")
dpe = load_extra("dp_accounting.dp_event")
RdpAccountant = load_extra("dp_accounting.rdp").RdpAccountant

_RELATIONS: Final = {
    "add-remove": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
}
# An event's noise is relative to one record's norm. A replaced record changes a sum by as much as two norms.
_NORMS: Final = {"add-remove": 1, "replace-one": 2}

# Every supported event, with all its fields. Subclasses are different events.
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

# dp-accounting's curves are off by a few roundings per run; far more is added, relative and absolute.
_RELATIVE_PADDING: Final = 1e-9
_ABSOLUTE_PADDING: Final = 1e-14

_MAX_STEPS: Final = 100_000  # of one `compose`, all of which are decided before the first is spent

_CELLS_PER_EPSILON: Final = 64  # grid cells in the smallest epsilon: keeps the added variance below .1%
_CELLS_IN_SUM: Final = (2**15, 2**20)  # grid cells in the sum of the epsilons: at least, and at most


def cost_of(event: Any, *, neighbors: str = "add-remove") -> Guarantee:  # noqa: ANN401  untyped library
    """Return what a `DpEvent` guarantees for the policy's neighbors, as one step.

    Gaussians together are a Gaussian, pure events a pure one with the sum of the epsilons (`PrivacyAccountant` spends
    them one by one, for less), runs of one Poisson-sampled Gaussian a mechanism that a menu may list; other events,
    and mixtures, have a Rényi curve.

    Theorem: Gaussian DP composition (Dong, Roth and Su (2022)), basic composition, RDP composition; the curves of
        Laplace noise, randomized response, repeated selection (Papernot and Steinke (2022)) and sampling without
        replacement are dp-accounting's, with the noise halved for replaced records, which `RdpAccountant` leaves to
        its caller.
    Assumes: the event's parameters were fixed before it began. A zCDP event is for the policy's neighbors.
    """
    if neighbors not in _NORMS:
        raise InvalidArgument(f"neighbors must be one of {[*_NORMS]} (got {neighbors!r})")
    for inner in _walk_events(event):
        _check_known(inner)
    parts = [*_parts(event, 1)]
    steps = [(_cost_of_one_run(part, neighbors), times) for part, times in parts]
    return _compose_fixed(steps) or _curve(parts, steps, neighbors)


def _check_known(event: Any) -> None:  # noqa: ANN401  untyped library
    """Raise unless the class of the event, and all its fields, are supported."""
    if not isinstance(event, dpe.DpEvent):
        raise InvalidGuarantee(f"event must be a DpEvent, such as GaussianDpEvent(1.0) (got {type_text(event)})")
    kind = type(event)
    understood = _FIELDS.get(kind.__name__)
    if understood is None or kind is not getattr(dpe, kind.__name__, None):
        raise UnprovenComposition(
            f"event must be one of {', '.join(_FIELDS)} (got {kind.__module__}.{kind.__qualname__}); pass cost= if"
            " you know what it guarantees"
        )
    fields = {field.name for field in kind.__attrs_attrs__}
    if fields != understood:
        raise UnprovenComposition(
            f"{kind.__name__} must have the fields {sorted(understood)} (got {sorted(fields)} in this version of"
            " dp-accounting); pass cost= if you know what it guarantees"
        )


def _walk_events(event: Any) -> Iterator[Any]:  # noqa: ANN401  untyped library
    """Yield the event and every event inside it."""
    yield event
    for inner in [event.event] if hasattr(event, "event") else getattr(event, "events", ()):
        yield from _walk_events(inner)


def _compose_fixed(steps: list[tuple[Guarantee, int]]) -> Guarantee | None:
    """Return one guarantee for steps whose parameters were fixed beforehand; None where only a curve covers them."""
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
        return Mechanism(first.name, runs, first.curve and _repeat_curve(first.curve, runs))
    return _repeat_curve(first, runs) if isinstance(first, RDP) and len(steps) == 1 else None


def _repeat_curve(curve: RDP, times: int) -> RDP:
    return RDP(curve.orders, tuple(exact_of(value) * times for value in curve.values))


def _parts(event: Any, times: int) -> Iterator[tuple[Any, int]]:  # noqa: ANN401  untyped library
    """Yield the parts of an event, each with its number of runs."""
    match event:
        case dpe.NoOpDpEvent():
            pass
        case dpe.SelfComposedDpEvent(count=count):
            yield from _parts(event.event, times * _positive_integer(count, "SelfComposedDpEvent.count"))
        case dpe.ComposedDpEvent(events=events):
            for part in events:
                yield from _parts(part, times)
        case dpe.PoissonSampledDpEvent(sampling_probability=1):
            yield from _parts(event.event, times)
        case _:
            yield event, times


def _cost_of_one_run(event: Any, neighbors: str) -> Guarantee:  # noqa: ANN401, PLR0911  untyped library; one line per event
    """Return the guarantee of one run of an uncomposed event."""
    norms = _NORMS[neighbors]
    match event:
        case dpe.NonPrivateDpEvent():
            raise InvalidGuarantee("event must be private (got a NonPrivateDpEvent)")
        case dpe.GaussianDpEvent(noise_multiplier=noise):
            return GDP(norms / _positive(noise, "GaussianDpEvent.noise_multiplier"))
        case dpe.LaplaceDpEvent(noise_multiplier=noise):
            return PureDP(norms / _positive(noise, "LaplaceDpEvent.noise_multiplier"))
        case dpe.DiscreteLaplaceDpEvent(noise_parameter=decay, sensitivity=sensitivity):
            change = norms * _positive_integer(sensitivity, "DiscreteLaplaceDpEvent.sensitivity")
            return PureDP(change * _positive(decay, "DiscreteLaplaceDpEvent.noise_parameter"))
        case dpe.RandomizedResponseDpEvent():
            return _randomized_response(event, neighbors)
        case dpe.ZCDpEvent(rho=rho, xi=xi):
            slope, base = read(rho, "ZCDpEvent.rho"), read(xi, "ZCDpEvent.xi")
            return RDP(ORDERS, tuple(base + slope * exact_of(o) for o in ORDERS)) if base else ZCDP(slope)
        case dpe.PoissonSampledDpEvent():
            return _poisson_sampled(event, neighbors)
    return _library_curve(event, neighbors, _INTEGERS)


def _poisson_sampled(event: Any, neighbors: str) -> Mechanism:  # noqa: ANN401  untyped library
    """Return a subsampled Gaussian: Gaussians on one sample are one Gaussian, whose noise is rounded down."""
    if neighbors != "add-remove":
        raise UnprovenComposition(
            "a PoissonSampledDpEvent covers one record added or removed; it needs a policy with"
            f" neighbors='add-remove' (got {neighbors!r})"
        )
    precision = Fraction(0)
    for part, times in _parts(event.event, 1):
        if isinstance(part, dpe.NonPrivateDpEvent):
            raise InvalidGuarantee("event must be private (got a NonPrivateDpEvent)")
        if not isinstance(part, dpe.GaussianDpEvent):
            raise UnprovenComposition(
                f"a PoissonSampledDpEvent must contain Gaussian events (got {type_text(part)}, for which no"
                " curve is known)"
            )
        noise = _positive(part.noise_multiplier, "GaussianDpEvent.noise_multiplier")
        precision += times / noise**2
    if precision == 0:
        raise InvalidGuarantee("PoissonSampledDpEvent.event must not be empty; leave it out")
    return subsampled_gaussian(event.sampling_probability, 1 / _root(precision))


def _randomized_response(event: Any, neighbors: str) -> PureDP:  # noqa: ANN401  untyped library
    """Return log(1 + k (1 - p) / p): the truth has probability 1 - p + p/k, each other answer p/k."""
    if neighbors != "replace-one":
        raise UnprovenComposition(
            "a RandomizedResponseDpEvent covers one changed answer; it needs a policy with neighbors='replace-one'"
            f" (got {neighbors!r})"
        )
    buckets = _positive_integer(event.num_buckets, "RandomizedResponseDpEvent.num_buckets")
    noise = _positive(event.noise_parameter, "RandomizedResponseDpEvent.noise_parameter")
    if noise > 1:
        raise InvalidGuarantee(f"RandomizedResponseDpEvent.noise_parameter must be at most 1 (got {float(noise)!r})")
    if buckets == 1:
        return PureDP(0)
    odds = buckets * (1 - noise) / noise
    if odds < 2**60:
        return PureDP(exactly(up(math.log1p(float(odds)), 32)))
    return PureDP(exactly(up(math.log(odds.numerator) - math.log(odds.denominator), 256)))


def _curve(parts: list[tuple[Any, int]], steps: list[tuple[Guarantee, int]], neighbors: str) -> RDP:
    """Return the sum of the Rényi curves of parts that were fixed beforehand, at the orders common to all."""
    curves = [
        (_curve_of(part, cost, neighbors), times) for (part, _), (cost, times) in zip(parts, steps, strict=True)
    ]
    values = {order: [(curve.at(exact_of(order)), times) for curve, times in curves] for order in ORDERS}
    sums = {
        order: sum(value * times for value, times in terms if value is not None)
        for order, terms in values.items()
        if all(value is not None for value, _ in terms)
    }
    return RDP(tuple(sums), tuple(sums.values()))


def _curve_of(part: Any, cost: Guarantee, neighbors: str) -> RDP:  # noqa: ANN401  untyped library
    """Return the Rényi curve of one part: of the mechanism where it is known, else of its guarantee."""
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
            # Both numbers are read as floats, which adds a few roundings.
            return RDP(ORDERS, tuple(exactly(up(pure_to_rdp(float(epsilon), o), 64)) for o in ORDERS))
    return _library_curve(part, neighbors, ORDERS)


def _library_curve(event: Any, neighbors: str, orders: tuple[float, ...]) -> RDP:  # noqa: ANN401  untyped library
    """Return the Rényi curve that `RdpAccountant` computes, padded."""
    accountant = RdpAccountant(orders=list(orders), neighboring_relation=_RELATIONS[neighbors])
    try:
        accountant.compose(_with_float_noise(event, _NORMS[neighbors]))
    except dpa.UnsupportedEventError as problem:
        raise UnprovenComposition(f"dp-accounting has no curve for neighbors={neighbors!r}: {problem}") from problem
    except (TypeError, ValueError, ArithmeticError, AssertionError) as problem:
        if isinstance(problem, InvalidArgument):
            raise
        raise InvalidGuarantee(f"event must have a curve in dp-accounting (got {event!r}: {problem})") from problem
    curve = zip(orders, map(float, accountant.rdp), strict=True)
    known = [
        (order, exactly(up(max(v, 0.0) * (1.0 + _RELATIVE_PADDING) + _ABSOLUTE_PADDING)))
        for order, v in curve
        if math.isfinite(v)
    ]
    if not known:
        raise InvalidGuarantee(f"event must have a finite divergence (got {event!r}): otherwise there is no privacy")
    return RDP(tuple(order for order, _ in known), tuple(value for _, value in known))


def _with_float_noise(event: Any, norms: int) -> Any:  # noqa: ANN401, PLR0911  untyped library; one line per event
    """Return the event with its noise relative to the change of the sum, as floats: dp-accounting misreads integers.

    Version 0.6 takes a composition of Gaussians for its first part alone if that has an integer noise multiplier.
    """
    match event:
        case dpe.NonPrivateDpEvent():
            raise InvalidGuarantee("event must be private (got a NonPrivateDpEvent)")
        case dpe.GaussianDpEvent() | dpe.LaplaceDpEvent():
            name = f"{type(event).__name__}.noise_multiplier"
            return type(event)(float(_positive(event.noise_multiplier, name) / norms))
        case dpe.ComposedDpEvent():
            return dpe.ComposedDpEvent([_with_float_noise(part, norms) for part in event.events])
        case dpe.SelfComposedDpEvent():
            return dpe.SelfComposedDpEvent(
                _with_float_noise(event.event, norms), _positive_integer(event.count, "SelfComposedDpEvent.count")
            )
        case dpe.PoissonSampledDpEvent():
            rate = float(read(event.sampling_probability, "PoissonSampledDpEvent.sampling_probability"))
            return dpe.PoissonSampledDpEvent(rate, _with_float_noise(event.event, norms))
        case dpe.SampledWithoutReplacementDpEvent():
            size = _positive_integer(
                event.source_dataset_size, "SampledWithoutReplacementDpEvent.source_dataset_size"
            )
            sample = _positive_integer(event.sample_size, "SampledWithoutReplacementDpEvent.sample_size")
            return dpe.SampledWithoutReplacementDpEvent(size, sample, _with_float_noise(event.event, norms))
        case dpe.RepeatAndSelectDpEvent():
            return dpe.RepeatAndSelectDpEvent(_with_float_noise(event.event, norms), event.mean, event.shape)
    return event


def _positive(value: Any, field: str) -> Fraction:  # noqa: ANN401  untyped library
    exact = read(value, field)
    if exact == 0:
        raise InvalidGuarantee(f"{field} must be positive (got 0): without noise there is no privacy")
    return exact


def _positive_integer(value: Any, field: str) -> int:  # noqa: ANN401  untyped library
    exact = read(value, field)
    if exact.denominator != 1 or exact == 0:
        raise InvalidGuarantee(f"{field} must be a positive integer (got {value!r})")
    return int(exact)


def _root(square: Fraction) -> Fraction:
    """Return the square root: exact where it is rational, else rounded up."""
    root = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    if root**2 == square:
        return root
    # A value this large has no price, rounded up or not.
    return exactly(up(math.sqrt(square))) if square < 10**300 else Fraction(math.ceil(root) + 1)


class PrivacyAccountant(dpa.PrivacyAccountant):  # type: ignore[misc, name-defined]  # untyped library
    """dp-accounting's accountant over an account: `compose` spends, before it returns and before the mechanism runs.

    A refusal raises `BudgetExceeded` and charges nothing. `get_epsilon` and `get_delta` return the policy's promise
    for all spending, past and future: the amount spent so far is not a guarantee, and is never reported as one. So
    this accountant cannot calibrate noise, which searches for the noise at which epsilon meets a target.
    """

    def __init__(self, account: Account) -> None:
        super().__init__(_RELATIONS[account.policy.neighbors])
        self._account = account

    def compose(self, event: Any, count: int = 1) -> Self:  # noqa: ANN401  untyped library
        """Spend the cost of `count` runs of the event, in steps or as one, whichever is less.

        An event without a theorem under the policy raises `UnsupportedEventError`. If other threads spend at the same
        time, steps that were charged before a refusal stand.
        """
        dpa.DpEventBuilder().compose(event, count)  # raises for a wrong event or count
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
        return written_above(exact_of(_promised_epsilon(policy)))

    def get_delta(self, target_epsilon: float) -> float:
        """Return the policy's delta, if the target is its epsilon or more."""
        policy = self._account.policy
        self._check(target_epsilon, _promised_epsilon(policy), "target_epsilon")
        return written_above(exact_of(policy.delta))

    def _check(self, target: float, promised: Number, field: str) -> None:
        if read(target, field, InvalidArgument) < exact_of(promised):
            raise UnprovenComposition(
                f"{field} must be at least {promised} (got {target!r}): the policy promises nothing below that, and"
                " the amount spent so far is not a guarantee"
            )

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:  # noqa: ANN401, FBT001  its signature
        """Return the unsupported event and the reason, or None; spend if `do_compose`."""
        costs: list[Guarantee] = []
        part = event
        try:
            for part in _walk_events(event):
                _check_known(part)
            for part, times in _parts(event, max(count, 1)):  # `supports` asks with a count of 0
                cost = _cost_of_one_run(part, self._account.policy.neighbors)
                self._account.compiled.price(cost)  # raises where the policy has no theorem for it
                costs += _steps(cost, times)
        except (InvalidArgument, UnprovenComposition) as problem:
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


def _promised_epsilon(policy: Policy) -> Number:
    if policy.epsilon is None:
        raise UnprovenComposition(f"the policy must promise an epsilon (got {policy.target}); use reading()")
    return policy.epsilon


def _steps(cost: Guarantee, times: int) -> list[Guarantee]:
    """Return equal steps in their cheapest form: pure ones one by one, others composed where all meters add up."""
    together = None if times == 1 or isinstance(cost, PureDP) else _compose_fixed([(cost, times)])
    if together is None and times > _MAX_STEPS:
        raise InvalidArgument(f"count must be at most {_MAX_STEPS} runs at a time (got {times})")
    return [cost] * times if together is None else [together]


def heterogeneous_epsilon(epsilons: Iterable[float], delta: float) -> float:
    """Return the optimal epsilon at `delta` of pure steps with different epsilons, to about .1%.

    Theorem: optimal heterogeneous composition (Murtagh and Vadhan (2016)), as a convolution of the privacy loss
        distributions of randomized response.
    Assumes: step n is epsilons[n]-DP, and the epsilons were fixed in advance: a baseline, never a filter.
    """
    distributions = load_extra("dp_accounting.pld.privacy_loss_distribution")
    masses = load_extra("dp_accounting.pld.pld_pmf")
    groups = Counter(float(read(epsilon, "epsilons")) for epsilon in epsilons)
    del groups[0.0]  # such a step reveals nothing
    level = float(read(delta, "delta"))
    if not 0 < level < 1:
        raise InvalidGuarantee(f"delta must be above 0 and below 1 (got {delta!r})")
    if not groups:
        return 0.0
    total = math.fsum(groups.elements())
    fewest, most = _CELLS_IN_SUM
    cell = max(min(min(groups) / _CELLS_PER_EPSILON, total / fewest), total / most)
    composed: Any = None
    for epsilon, count in groups.items():
        group = distributions.PrivacyLossDistribution(
            _randomized_response_losses(masses, epsilon, cell)
        ).self_compose(count)
        composed = group if composed is None else composed.compose(group)
    return float(composed.get_epsilon_for_delta(level))


def _randomized_response_losses(masses: Any, epsilon: float, cell: float) -> Any:  # noqa: ANN401 - untyped library
    """Return an upper bound of the loss distribution of randomized response on a grid.

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
