"""No event of dp-accounting is charged less than it costs, and none that is not understood is charged at all.

What an event costs is found from two explicit output distributions, on a grid: their Rényi divergences, and the
largest logarithm of their ratio.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import norm

import odograph as odo
from odograph.core.guarantees import exact_of

dpa = pytest.importorskip("dp_accounting")
import attr  # noqa: E402  comes with dp-accounting
from dp_accounting import dp_event as dpe  # noqa: E402  after the skip
from dp_accounting import rdp  # noqa: E402  after the skip

from odograph.integrations import dp_accounting as dp_events  # noqa: E402  after the skip
from odograph.integrations.dp_accounting import PrivacyAccountant, cost_of  # noqa: E402  after the skip

FULL = os.environ.get("ODOGRAPH_FULL") == "1"

Floats = NDArray[np.float64]
Pair = tuple[Floats, Floats, Floats]  # logarithms: two densities, and the weights of the grid

NORMS = {"add-remove": 1.0, "replace-one": 2.0}
ORDERS = (Fraction(2), Fraction(5, 2), Fraction(4))

# Those that have no price here, and why.
REFUSED = {
    "MixtureOfGaussiansDpEvent",  # RdpAccountant has no curve
    "SampledWithReplacementDpEvent",  # nor here
    "SingleEpochTreeAggregationDpEvent",  # is for REPLACE_SPECIAL, which no policy promises
    "TruncatedSubsampledGaussianDpEvent",  # RdpAccountant has no curve
    "UnsupportedDpEvent",
}


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    sub: type[Any]
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def unclassified() -> set[str]:
    """The events of the installed dp-accounting that are neither understood, with these fields, nor refused."""
    return {
        kind.__name__
        for kind in subclasses(dpe.DpEvent)
        if kind.__module__.startswith("dp_accounting.")
        and not kind.__module__.endswith("_test")  # the library's own tests make one up
        and getattr(sys.modules[kind.__module__], kind.__name__)
        is kind  # attrs leaves the class without slots behind
        and kind.__name__ not in REFUSED
        and dp_events._FIELDS.get(kind.__name__) != {field.name for field in attr.fields(kind)}  # noqa: SLF001
    }


def test_every_event_of_the_installed_version_is_classified(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unclassified() == set()
    monkeypatch.delitem(dp_events._FIELDS, "ZCDpEvent")  # noqa: SLF001  what a release that adds it looks like
    assert unclassified() == {"ZCDpEvent"}


# Two neighbours' output distributions.


def gaussians(shift: float, noise: float) -> Pair:
    return mixtures([(1.0, 0.0)], [(1.0, shift)], noise)


def mixtures(first: list[tuple[float, float]], second: list[tuple[float, float]], noise: float) -> Pair:
    """Mixtures of Gaussians, given as weights and means."""
    reach = 8 * max(abs(mean) for _, mean in first + second) + 12 * noise
    x = np.linspace(-reach, reach, 20_001)

    def log_density(parts: list[tuple[float, float]]) -> Floats:
        return np.asarray(logsumexp([np.log(w) + norm.logpdf(x, mean, noise) for w, mean in parts if w], axis=0))

    return log_density(first), log_density(second), np.full(x.size, math.log(x[1] - x[0]))


def laplaces(shift: float, scale: float) -> Pair:
    """Exactly: the outer parts have one ratio each, and are taken whole."""
    x = np.linspace(0, shift, 4001)
    middle = (x[1:] + x[:-1]) / 2
    log_half = math.log(0.5)
    p = np.concatenate([[log_half], log_half - math.log(scale) - middle / scale, [log_half - shift / scale]])
    q = np.concatenate(
        [[log_half - shift / scale], log_half - math.log(scale) - (shift - middle) / scale, [log_half]]
    )
    return p, q, np.concatenate([[0.0], np.full(middle.size, math.log(x[1])), [0.0]])


def counts(shift: int, decay: float) -> Pair:
    reach = math.ceil(60 / decay) + shift
    x = np.arange(-reach, reach + 1)
    level = math.log(math.tanh(decay / 2))
    return level - decay * np.abs(x), level - decay * np.abs(x - shift), np.zeros(x.size)


def answers(noise: float, buckets: int) -> Pair:
    p = np.full(buckets, noise / buckets)
    q = p.copy()
    p[0] += 1 - noise
    q[1] += 1 - noise
    return np.log(p), np.log(q), np.zeros(buckets)


def best_of(shift: float, noise: float, mean: float, shape: float) -> Pair:
    """The largest of a random number of Gaussians; of none, with probability exp(-mean), nothing is seen."""
    reach = 6 * shift + 12 * noise
    x = np.linspace(-reach, reach, 20_001)

    def log_density(centre: float) -> Floats:
        below = norm.cdf(x, centre, noise)
        if shape == 1:
            drawn = -math.log(mean) - 2 * np.log1p(-(1 - 1 / mean) * below)
        else:
            drawn = math.log(mean) + mean * (below - 1)
        return np.asarray(drawn + norm.logpdf(x, centre, noise))

    none = [-mean] if math.isinf(shape) else []
    p, q = (np.concatenate([log_density(centre), none]) for centre in (0.0, shift))
    return p, q, np.concatenate([np.full(x.size, math.log(x[1] - x[0])), [0.0 for _ in none]])


def pair(event: Any, neighbors: str) -> Pair:  # noqa: ANN401, PLR0911  untyped library; one line per event
    norms = NORMS[neighbors]
    match type(event).__name__:
        case "GaussianDpEvent":
            return gaussians(norms, event.noise_multiplier)
        case "LaplaceDpEvent":
            return laplaces(norms, event.noise_multiplier)
        case "DiscreteLaplaceDpEvent":
            return counts(int(norms) * event.sensitivity, event.noise_parameter)
        case "RandomizedResponseDpEvent":
            return answers(event.noise_parameter, event.num_buckets)
        case "ZCDpEvent":
            return gaussians(math.sqrt(2 * event.rho), 1.0)
        case "PoissonSampledDpEvent":
            rate, inner = event.sampling_probability, event.event
            runs = inner.count if isinstance(inner, dpe.SelfComposedDpEvent) else 1
            noise = (inner.event if runs > 1 else inner).noise_multiplier / math.sqrt(runs)
            return mixtures([(1.0, 0.0)], [(1 - rate, 0.0), (rate, 1.0)], noise)
        case "SampledWithoutReplacementDpEvent":
            rate = event.sample_size / event.source_dataset_size
            parts = [(1 - rate, 0.0), (rate, 1.0)]
            return mixtures(parts, [(weight, -mean) for weight, mean in parts], event.event.noise_multiplier)
        case "RepeatAndSelectDpEvent":
            return best_of(norms, event.event.noise_multiplier, event.mean, event.shape)
    raise AssertionError(event)


def divergence(of: Pair, order: float) -> float:
    """The larger direction, at an order that may be infinite.

    The moment less 1 is the mean of g(x) = x^order - 1 - order (x - 1), x the ratio of the densities. No term is
    negative, so a divergence of 1e-9 has as many digits as one of 1; the logarithm of a moment near 1 has half of
    them.
    """
    p, q, weights = of
    if math.isinf(order):
        return float(np.max(np.abs(p - q)))
    excess = [float(logsumexp(log_bregman(a - b, order) + b + weights)) for a, b in ((p, q), (q, p))]
    return float(np.logaddexp(0.0, max(excess))) / (order - 1)


def log_bregman(log_x: Floats, order: float) -> Floats:
    """The logarithm of x^order - 1 - order (x - 1), for orders up to 4."""
    y = np.expm1(np.clip(log_x, -1, 1))
    series = order * (order - 1) / 2 * y * y * (1 + (order - 2) * y / 3)  # 1e-8 of it is left out
    near = np.where(np.abs(y) < 1e-4, series, np.expm1(order * np.clip(log_x, -1, 1)) - order * y)
    terms = np.stack([order * log_x, np.full_like(log_x, math.log(order - 1)), math.log(order) + log_x])
    far = logsumexp(terms, axis=0, b=[[1.0], [1.0], [-1.0]])
    with np.errstate(divide="ignore"):  # where the densities are equal
        return np.asarray(np.where(np.abs(log_x) < 1, np.log(near), far))


def truth(event: Any, neighbors: str, order: float) -> float:  # noqa: ANN401  untyped library
    """What independent runs of everything in an event add up to."""
    if isinstance(event, dpe.NoOpDpEvent):
        return 0.0
    if isinstance(event, dpe.ComposedDpEvent):
        return sum(truth(part, neighbors, order) for part in event.events)
    if isinstance(event, dpe.SelfComposedDpEvent):
        return float(event.count) * truth(event.event, neighbors, order)
    return divergence(pair(event, neighbors), order)


def enough(event: Any, neighbors: str, cost: odo.Guarantee) -> bool:  # noqa: ANN401  untyped library
    """Whether a cost is at least what an event costs."""
    match cost:
        case odo.PureDP(epsilon):
            bounds = {math.inf: float(epsilon)}
        case odo.GDP(mu):
            bounds = {float(order): float(order * exact_of(mu) ** 2 / 2) for order in ORDERS}
        case odo.ZCDP(rho):
            bounds = {float(order): float(order * exact_of(rho)) for order in ORDERS}
        case odo.RDP() | odo.guarantees.Mechanism():
            curve = cost.curve if isinstance(cost, odo.guarantees.Mechanism) else cost
            assert curve is not None
            bounds = {float(order): float(curve.at(order) or math.inf) for order in ORDERS}
        case _:
            raise AssertionError(cost)
    return all(truth(event, neighbors, order) <= bound * (1 + 1e-6) + 1e-9 for order, bound in bounds.items())


noises = st.floats(0.4, 20)
means = st.floats(1, 20)


def leaves(neighbors: str) -> st.SearchStrategy[Any]:
    common = [
        st.just(dpe.NoOpDpEvent()),
        st.builds(dpe.GaussianDpEvent, noises),
        st.builds(dpe.LaplaceDpEvent, noises),
        st.builds(dpe.DiscreteLaplaceDpEvent, st.floats(0.05, 2), st.integers(1, 3)),
        st.builds(dpe.ZCDpEvent, st.floats(0.001, 2), st.sampled_from([0.0, 0.5])),
        st.builds(
            dpe.RepeatAndSelectDpEvent,
            st.builds(dpe.GaussianDpEvent, st.floats(0.8, 20)),
            means,
            st.sampled_from([1.0, math.inf]),
        ),
    ]
    gaussian = st.builds(dpe.GaussianDpEvent, noises)
    if neighbors == "add-remove":
        inner = gaussian | st.builds(dpe.SelfComposedDpEvent, gaussian, st.integers(2, 9))
        return st.one_of(*common, st.builds(dpe.PoissonSampledDpEvent, st.floats(0.001, 1), inner))
    return st.one_of(
        *common,
        st.builds(dpe.RandomizedResponseDpEvent, st.floats(0.01, 1), st.integers(2, 5)),
        st.builds(dpe.SampledWithoutReplacementDpEvent, st.just(100), st.integers(1, 99), gaussian),
    )


def events(neighbors: str) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves(neighbors),
        lambda inner: (
            st.builds(dpe.ComposedDpEvent, st.lists(inner, max_size=3))
            | st.builds(dpe.SelfComposedDpEvent, inner, st.integers(1, 1000))
        ),
        max_leaves=4,
    )


@pytest.mark.parametrize("neighbors", NORMS)
@settings(max_examples=200 if FULL else 25, deadline=None)
@given(data=st.data())
def test_nothing_is_charged_less_than_it_costs(neighbors: str, data: st.DataObject) -> None:
    event = data.draw(events(neighbors))
    assert enough(event, neighbors, cost_of(event, neighbors=neighbors))


def log_of_moment(of: Pair, order: float) -> float:
    """The broken version: the logarithm of a moment near 1."""
    p, q, weights = of
    return max(float(logsumexp(order * a + (1 - order) * b + weights)) / (order - 1) for a, b in ((p, q), (q, p)))


def test_small_divergences_keep_their_digits() -> None:
    """A sampled Gaussian at an integer order has a closed form (Mironov, Talwar, Zhang 2019)."""

    def worst(measure: Callable[[Pair, float], float]) -> float:
        errors = []
        for rate, noise, order in [(0.001, 17.8, 2), (0.001, 20.0, 4), (0.3, 5.0, 4), (0.5, 0.4, 2), (0.9, 0.14, 4)]:
            exact = math.fsum(
                math.comb(order, k) * rate**k * (1 - rate) ** (order - k) * math.expm1(k * (k - 1) / (2 * noise**2))
                for k in range(2, order + 1)
            )
            found = measure(mixtures([(1.0, 0.0)], [(1 - rate, 0.0), (rate, 1.0)], noise), order)
            errors.append(abs(found / (math.log1p(exact) / (order - 1)) - 1))
        return max(errors)

    assert worst(divergence) < 1e-9
    assert worst(log_of_moment) > 1e-6  # more than `enough` allows for


GAUSS = dpe.GaussianDpEvent(4.0)


@pytest.mark.parametrize(
    ("event", "neighbors", "cheaper"),
    [
        (GAUSS, "replace-one", odo.GDP(0.25)),  # for an added record
        (dpe.LaplaceDpEvent(2.0), "replace-one", odo.PureDP(0.5)),
        (dpe.SelfComposedDpEvent(GAUSS, 100), "add-remove", odo.GDP(0.25)),  # once
        (dpe.ComposedDpEvent([GAUSS, GAUSS]), "add-remove", odo.GDP(0.35)),
        (dpe.DiscreteLaplaceDpEvent(0.5, 2), "add-remove", odo.PureDP(0.5)),  # for a sensitivity of 1
        (dpe.RandomizedResponseDpEvent(0.5, 4), "replace-one", odo.PureDP(1.5)),  # it is log(5)
        (dpe.ZCDpEvent(0.1), "add-remove", odo.ZCDP(0.099)),
        (dpe.PoissonSampledDpEvent(0.5, GAUSS), "add-remove", odo.subsampled_gaussian(0.49, 4)),
        (dpe.SampledWithoutReplacementDpEvent(10, 9, GAUSS), "replace-one", odo.GDP(0.25)),
        (dpe.RepeatAndSelectDpEvent(GAUSS, 10.0, 1.0), "add-remove", odo.GDP(0.25)),
    ],
)
def test_the_check_finds_what_is_too_cheap(event: Any, neighbors: str, cheaper: odo.Guarantee) -> None:  # noqa: ANN401
    assert enough(event, neighbors, cost_of(event, neighbors=neighbors))
    assert not enough(event, neighbors, cheaper)


# A release that is not known yet: its events as twins, and its accountant.


@attr.s(frozen=True, slots=True, auto_attribs=True)
class EpsilonDeltaDpEvent(dpe.DpEvent):  # type: ignore[misc]  # untyped library
    epsilon: float
    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class DiscreteGaussianDpEvent(dpe.DpEvent):  # type: ignore[misc]  # untyped library
    sigma: float
    sensitivity: float = 1.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ExponentialMechanismDpEvent(dpe.DpEvent):  # type: ignore[misc]  # untyped library
    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class GaussianDpEvent(dpe.DpEvent):  # type: ignore[misc]  # untyped library
    """The one that is known, with a field more."""

    noise_multiplier: float
    sensitivity: float = 1.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SelfComposedDpEvent(dpe.DpEvent):  # type: ignore[misc]  # untyped library
    """The one that is known, with a field more that a count would need."""

    event: Any
    count: int
    groups: int = 1


class Louder(dpe.GaussianDpEvent):  # type: ignore[misc]  # untyped library
    """A subclass, which may mean anything."""


NEW = (EpsilonDeltaDpEvent, DiscreteGaussianDpEvent, ExponentialMechanismDpEvent)


class NextRdpAccountant(rdp.RdpAccountant):  # type: ignore[misc]  # untyped library
    """Takes the new events; it has a delta beside its curve."""

    _delta = 0.0

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:  # noqa: ANN401, FBT001  its signature
        match event:
            case EpsilonDeltaDpEvent(epsilon=epsilon, delta=delta):
                self._delta += count * delta
            case ExponentialMechanismDpEvent(epsilon=epsilon):
                pass
            case DiscreteGaussianDpEvent(sigma=sigma, sensitivity=sensitivity):
                self._rdp += count * self._orders * sensitivity**2 / (2 * sigma**2)
                return None
            case _:
                return super()._maybe_compose(event, count, do_compose)
        self._rdp += count * np.minimum(epsilon, self._orders * epsilon**2 / 2)
        return None


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (*NEW, GaussianDpEvent, SelfComposedDpEvent):
        monkeypatch.setattr(dpe, kind.__name__, kind, raising=False)
    monkeypatch.setattr(dp_events, "RdpAccountant", NextRdpAccountant)


LAPLACE = dpe.LaplaceDpEvent(8.0)
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda event: event,
    "composed": lambda event: dpe.ComposedDpEvent([LAPLACE, event]),
    "sampled": lambda event: dpe.PoissonSampledDpEvent(0.1, event),
    "selected": lambda event: dpe.RepeatAndSelectDpEvent(event, 4.0, 1.0),
}


@pytest.mark.usefixtures("next_release")
@pytest.mark.parametrize("neighbors", NORMS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "event",
    [
        EpsilonDeltaDpEvent(0.01, 0.5),
        DiscreteGaussianDpEvent(10.0),
        ExponentialMechanismDpEvent(0.1),
        GaussianDpEvent(10.0, 5.0),
        SelfComposedDpEvent(LAPLACE, 10, 10),
        Louder(10.0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_unknown_release_are_refused_by_name(event: Any, wrapper: str, neighbors: str) -> None:  # noqa: ANN401
    whole = WRAPPERS[wrapper](event)
    with pytest.raises(odo.UnprovenComposition, match=type(event).__name__):
        cost_of(whole, neighbors=neighbors)
    account = odo.Accountant(odo.Policy(1, 1e-6, filter="renyi", neighbors=neighbors))
    accountant = PrivacyAccountant(account)
    assert not accountant.supports(whole)
    with pytest.raises(dpa.UnsupportedEventError, match=type(event).__name__):
        accountant.compose(whole, 200)
    assert account.totals == account.compiled.start
