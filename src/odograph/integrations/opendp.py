"""OpenDP: what a measurement guarantees, by its own privacy map. `session.run(measurement, data)` charges that first.

No measurement is read as Gaussian DP. OpenDP's Gaussian is a discrete Gaussian on a fine grid, and at some epsilon a
discrete Gaussian is easier to tell apart than the Gaussian of the same scale; what is proven for it is zCDP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

from odograph.core.guarantees import RDP, ZCDP, ApproxDP, Guarantee, PureDP
from odograph.core.units import Numeric, exactly, read
from odograph.errors import InvalidGuarantee, UnprovenComposition
from odograph.extras import load
from odograph.integrations.dp_accounting import ORDERS

__all__ = ["cost_of", "noisy"]

SETTINGS: Final = ("d_in", "delta")

# How far apart neighbours are in a dataset metric; a replaced record is one removed and one added.
_ADDED: Final = {"add-remove": 1, "replace-one": 2}
_CHANGED: Final = {"replace-one": 1}
_DATASETS: Final = {
    "SymmetricDistance": _ADDED,
    "InsertDeleteDistance": _ADDED,
    "SymmetricIdDistance": _ADDED,
    "ChangeOneDistance": _CHANGED,
    "HammingDistance": _CHANGED,
    "ChangeOneIdDistance": _CHANGED,
}

# Their measurements return something that answers later.
_INTERACTIVE: Final = {
    "make_adaptive_composition",
    "make_alp_queryable",
    "make_fully_adaptive_composition",
    "make_privacy_filter",
    "make_private_lazyframe",
    "make_sequential_composition",
}


def cost_of(
    measurement: Any,  # noqa: ANN401  untyped library
    *,
    neighbours: str = "add-remove",
    d_in: Any = None,  # noqa: ANN401  a number for most metrics, a tuple for some
    delta: Numeric | None = None,
) -> Guarantee:
    """Return what an OpenDP measurement guarantees for neighbours, of the kind that its output measure is.

    `d_in` is how far apart neighbours are in its input metric. Over datasets that is one record, if not given: pass
    more where a person has several. Over numbers and vectors it is the sensitivity, and must be given. `delta` is
    where to read a privacy profile. OpenDP rounds its floats up, and they are read as the binary numbers they are:
    Laplace noise of scale 10 costs a little more than 0.1.

    Theorem: the measurement's privacy map, with OpenDP's proof of it.
    Assumes: maps written by users are right; the measurement answers once, and gives nothing that answers later.
    """
    opendp = load("opendp.mod")
    if isinstance(measurement, opendp.Odometer) or _is_interactive(measurement):
        raise UnprovenComposition(
            "this OpenDP measurement answers many queries or later (a compositor, filter, odometer, queryable or lazy"
            " frame), and that is not covered; nothing was charged. Run its queries one by one as measurements"
        )
    if not isinstance(measurement, opendp.Measurement):
        raise InvalidGuarantee(
            f"an OpenDP {type(measurement).__name__} does not say what it costs; pass a Measurement, with its noise"
        )
    distance = _distance(measurement, neighbours, d_in)
    try:
        loss = measurement.map(distance)
    except (opendp.OpenDPException, TypeError) as problem:
        raise InvalidGuarantee(f"OpenDP has no cost for d_in={distance!r}: {str(problem).strip()}") from problem
    return _guarantee(str(measurement.output_measure.type), loss, delta)


def _is_interactive(measurement: Any) -> bool:  # noqa: ANN401  untyped library
    """Whether the measurement was built to return a queryable, as far as OpenDP's record of its making says."""
    made = getattr(measurement, "__opendp_dict__", {})
    # What is made of a queryable afterwards may well be a finished answer; the session looks at it.
    if made.get("__function__") == "make_chain_pm":
        return False
    parts = (part for value in made.get("__kwargs__", {}).values() for part in _listed(value))
    return made.get("__function__") in _INTERACTIVE or any(_is_interactive(part) for part in parts)


def _listed(value: object) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _distance(measurement: Any, neighbours: str, d_in: Any) -> Any:  # noqa: ANN401  untyped library
    """Return the distance of neighbours as the measurement's own type: rounded up, and at least one neighbour."""
    metric = measurement.input_metric
    name = str(metric.type).partition("<")[0]
    inner = str(metric.inner_metric.type) if name == "FrameDistance" else name
    if neighbours not in _ADDED:
        raise InvalidGuarantee(f"neighbours must be one of {[*_ADDED]}, and {neighbours!r} is not")
    one = _DATASETS.get(inner, {neighbours: 0}).get(neighbours)
    if one is None:
        raise UnprovenComposition(
            f"{inner} cannot say that a record is added or removed, and the policy's neighbours are {neighbours!r};"
            " measure over symmetric_distance(), or make a policy with neighbours='replace-one'"
        )
    if d_in is None:
        if name not in _DATASETS:
            raise InvalidGuarantee(
                f"d_in must be given: how far neighbours are apart in {metric}, such as d_in=1 for a count"
            )
        d_in = one
    if isinstance(d_in, list | tuple):
        return d_in  # OpenDP checks these itself
    exact = read(d_in, "d_in")
    if exact == 0 or exact < one:
        raise InvalidGuarantee(f"d_in={d_in!r} is less than one neighbour ({neighbours}) in {metric}")
    return _above(exact) if str(measurement.input_distance_type).startswith("f") else math.ceil(exact)


def _above(exact: Fraction) -> float:
    """Return the least float that is no smaller."""
    near = float(exact)
    return near if exactly(near) >= exact else math.nextafter(near, math.inf)


def _guarantee(measure: str, loss: Any, delta: Numeric | None) -> Guarantee:  # noqa: ANN401  untyped library
    if measure == "SmoothedMaxDivergence":
        return _profile(loss, delta)
    if delta is not None:
        raise InvalidGuarantee(
            f"delta={delta!r} is for privacy profiles; a measurement in {measure} has none to choose"
        )
    match measure:
        case "MaxDivergence":
            return PureDP(_finite(loss))
        case "ZeroConcentratedDivergence":
            return ZCDP(_finite(loss))
        case "Approximate<MaxDivergence>" | "FixedSmoothedMaxDivergence":
            return ApproxDP(*map(_finite, loss))
        case "Approximate<ZeroConcentratedDivergence>":
            return ZCDP(*map(_finite, loss))
        case "RenyiDivergence":
            return _curve(loss)
    raise UnprovenComposition(f"no theorem here covers OpenDP's measure {measure}; pass cost= if you know one")


def _profile(profile: Any, delta: Numeric | None) -> ApproxDP:  # noqa: ANN401  untyped library
    if delta is None:
        raise InvalidGuarantee(
            "delta must be given, such as delta=1e-9: this measurement has a whole privacy profile"
        )
    wanted = read(delta, "delta")
    near = float(wanted)
    level = near if exactly(near) <= wanted else math.nextafter(near, 0.0)  # a smaller delta costs more
    return ApproxDP(_finite(profile.epsilon(level)), delta)


def _curve(curve: Any) -> RDP:  # noqa: ANN401  untyped library
    values = [(order, float(curve(float(order)))) for order in ORDERS]
    # Many curves end at some order; a NaN says nothing, so nothing is left out for it.
    known = [(order, _finite(value)) for order, value in values if value != math.inf]
    if not known:
        raise InvalidGuarantee("OpenDP gives an infinite divergence at every order: no privacy, at any price")
    return RDP(tuple(order for order, _ in known), tuple(value for _, value in known))


def _finite(value: float) -> Fraction:
    if not math.isfinite(value):
        raise InvalidGuarantee(
            f"OpenDP gives a loss of {value!r}: without a finite one there is no privacy, at any price"
        )
    return exactly(value)


def noisy(truths: Sequence[int], sensitivity: int, epsilon: float) -> list[int]:
    """Add OpenDP's Laplace noise: epsilon-DP if a row moves the truths by at most `sensitivity` in all."""
    load("opendp.mod").enable_features("contrib")  # its prelude would take a second to import
    domains, metrics, measurements = (load(f"opendp.{name}") for name in ("domains", "metrics", "measurements"))
    space = domains.vector_domain(domains.atom_domain(T=int)), metrics.l1_distance(T=int)
    # A little more noise than need be, so that OpenDP's own bound, rounded up, is still within the cost.
    mechanism = measurements.make_laplace(*space, scale=sensitivity * (1 + 2**-40) / epsilon)
    if mechanism.map(d_in=sensitivity) > epsilon:
        raise InvalidGuarantee(f"the mechanism costs {mechanism.map(d_in=sensitivity)!r}, more than {epsilon!r}")
    return [*mechanism([int(truth) for truth in truths])]
