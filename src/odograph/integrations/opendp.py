"""OpenDP: the guarantee of a measurement, by its own privacy map. `session.run(measurement, data)` charges it first.

No measurement is read as Gaussian DP. OpenDP's Gaussian is a discrete Gaussian on a grid, and at some epsilon a
discrete Gaussian is easier to distinguish than the Gaussian of the same scale. It is read as what it is,
`DiscreteGaussian`, where all of its numbers are known and lead to the rho of its map, and otherwise as that zCDP.
They are known of `make_gaussian`, alone, after transformations or before postprocessing:

- Over integers the noise is on the integers, and the sensitivity is the distance that the transformations lead to.
- Over floats OpenDP rounds the input to multiples of 2^k, adds discrete Gaussian noise there, and rounds the sum to a
  float. Without a k they are the multiples of the smallest float, and the input is one already; with one, rounding
  moves two inputs apart by less than 2^k in each coordinate, which is added to the sensitivity as in OpenDP's map.
- A vector of integers of unknown length changes in at most sensitivity^2 coordinates. One of floats may change in any
  number of them: it stays zCDP, unless its domain has a size.

Compositions, `make_noise`, frames and casts of the measure are not taken apart: they stay what their map says.

What answers queries (compositors, filters, `make_alp_queryable`, lazy frames) costs `Interactive` of what its map
says, and `account.interact(measurement, data)` charges that before the first query. There are two hooks: `queryable`
in place of `odometer(data)`, which is charged query by query, and `context` in place of `dp.Context.compositor`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

from odograph.account import Account
from odograph.core.fixed_point import Numeric, exact_of, exactly, float_above, float_below, read, up
from odograph.core.guarantees import RDP, ZCDP, ApproxDP, DiscreteGaussian, Guarantee, Interactive, PureDP, one_shot
from odograph.core.mechanisms import ORDERS
from odograph.errors import InvalidArgument, InvalidGuarantee, UnprovenComposition, load_extra, type_text
from odograph.sessions import check_account, session

__all__ = ["AccountContext", "Collected", "context", "cost_of", "guarded", "noisy", "noisy_gaussian", "queryable"]

SETTINGS: Final = ("d_in", "delta")

# The distance of neighbors in a dataset metric; a replaced record is one removed and one added.
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
# For these the distance is the sensitivity, which only the caller knows: one number or norm, or three.
_NORMS: Final = {"AbsoluteDistance", "L1Distance", "L2Distance", "LInfDistance"}
_NORM_TRIPLES: Final = {"L01InfDistance", "L02InfDistance"}
_NUMBERS: Final = {"AtomDomain", "ExtrinsicDomain", "MapDomain", "VectorDomain"}
_VALUES: Final = {"AtomDomain", "BitVectorDomain"}  # with DiscreteDistance: one value, replaced or not

# Constructors of measurements whose answer can itself be queried.
_INTERACTIVE: Final = {
    "make_adaptive_composition",
    "make_alp_queryable",
    "make_fully_adaptive_composition",
    "make_privacy_filter",
    "make_private_lazyframe",
    "make_sequential_composition",
}

_LISTS: Final = {"make_basic_composition", "make_composition"}
_QUERYABLES: Final = {"OdometerQueryable", "OnceFrame", "Queryable"}

# Constructors that release values from the threshold on, with the delta of values above it.
_THRESHOLDS: Final = {"make_gaussian_threshold", "make_laplace_threshold", "make_noise_threshold"}

_ROUNDING: Final = 1 + Fraction(1, 10**6)  # far more than OpenDP's rounding of a loss

_BITS: Final = (8, 16, 32, 64, 128, "size")
_INTEGERS: Final = {f"{sign}{bits}" for sign in "iu" for bits in _BITS}
_SMALLEST: Final = {"f32": -149, "f64": -1074}  # the exponent of the smallest positive float: k, where none is given
_GAUSSIANS: Final = {("AtomDomain", "AbsoluteDistance"), ("VectorDomain", "L2Distance")}
_MOST_COORDINATES: Final = 10**12  # that a request to a service may name
_SAME: Final = 1 + Fraction(1, 10**9)  # far more than the rounding of a rho that two ways lead to


def cost_of(
    measurement: Any,  # noqa: ANN401  untyped library
    *,
    neighbors: str = "add-remove",
    d_in: Any = None,  # noqa: ANN401  a number for most metrics, a tuple for some
    delta: Numeric | None = None,
) -> Guarantee:
    """Return the guarantee of an OpenDP measurement for neighbors; its kind follows from the output measure.

    `d_in` is the distance of neighbors in the input metric. Over datasets it is one record by default: pass more
    where a person has several. Over numbers and vectors it is the sensitivity, and must be given. `delta` is where to
    read a privacy profile. OpenDP rounds its floats up, and they are read exactly: Laplace noise of scale 10 costs a
    little more than 0.1.

    Maps that cannot be read as the loss for one record are refused: data of known size under add/remove (no two such
    datasets differ by one record, so OpenDP's map is 0 there), unknown domains and metrics, amplification by
    sampling, thresholds on integers, a cost of zero, and a loss that grows too fast from one record to two.

    A Gaussian is a `DiscreteGaussian`, or zCDP where not all of its numbers are known. A measurement that answers
    queries is `Interactive`. An odometer has no cost before its queries, and is refused: see `queryable`.

    Theorem: by its own proof: the measurement's privacy map, with OpenDP's proof of it; of an interactive one it
        holds against every strategy of asking.
    Assumes: maps written by users are right. Queries to an interactive measurement are checked (`guarded`), because
        it believes their maps.
    """
    _check_construction(measurement)
    distance = _distance(measurement, neighbors, d_in)
    cost = _guarantee(measurement, distance, delta)
    if not any(exact_of(size) for size in _sizes(cost)):
        raise UnprovenComposition(
            f"the measurement must have a cost, but by OpenDP's map it costs nothing for d_in={distance!r}, so the"
            " loss for one record is unknown. An answer that does not depend on the data needs no session"
        )
    if _type_name(measurement.input_metric) in _DATASETS:
        _check_growth(measurement, distance, delta, cost)
    if _INTERACTIVE & _released(measurement):
        return Interactive(cost)
    return _as_noise(measurement, distance, cost) if isinstance(cost, ZCDP) else cost


def _check_construction(measurement: Any) -> None:  # noqa: ANN401  untyped library
    """Raise for what is not a measurement, and for one whose map is known not to hold for one record."""
    opendp = load_extra("opendp.mod")
    if isinstance(measurement, opendp.Odometer):
        raise UnprovenComposition(
            "an OpenDP odometer has no cost before its queries are known. Charge each of them by its own map, with"
            " odograph.integrations.opendp.queryable(account, odometer, data) in place of odometer(data); or limit"
            " all of them with dp.c.make_privacy_filter(odometer, d_in, d_out), which is a measurement"
        )
    if not isinstance(measurement, opendp.Measurement):
        raise InvalidGuarantee(
            f"measurement must be an OpenDP Measurement, including its noise (got {type_text(measurement)})"
        )
    if _INTERACTIVE & (released := _released(measurement)) and _LISTS & released:
        raise UnprovenComposition(
            "a composition of interactive measurements answers with a list of queryables, which have no charge of"
            " their own. Open them one by one, or ask them of a compositor made by dp.c.make_adaptive_composition"
        )
    for made in _records(measurement):
        function, arguments = made.get("__function__"), made.get("__kwargs__", {})
        if function == "make_population_amplification":
            raise UnprovenComposition(
                "population amplification covers one answer from a fresh, secret sample; the costs of two answers"
                " from the same sample do not add up. Charge the measurement inside it, without the amplification"
            )
        if function in _THRESHOLDS and not (_has_floats(arguments["input_domain"]) and arguments["k"] is None):
            raise UnprovenComposition(
                f"OpenDP's {function} releases values equal to the threshold but leaves them out of its delta, which"
                " is then too small for integers (opendp/opendp#2922); its cost is that of the same measurement with"
                " the threshold one lower: pass cost=odo.ApproxDP(*lower.map(d_in)) with trust_cost=True"
            )


def _released(measurement: Any) -> set[Any]:  # noqa: ANN401  untyped library
    """Return the constructors whose answers the measurement releases unchanged."""
    return {made.get("__function__") for made in _records(measurement, released=True)}


def _records(measurement: Any, *, released: bool = False) -> Iterator[dict[str, Any]]:  # noqa: ANN401  untyped library
    """Yield OpenDP's records of the construction of a measurement and of those inside it.

    The record of a domain leads to the measurement that it was taken from, which is not part of this one. With
    `released`, only measurements whose answers are released unchanged: postprocessing a queryable may well give a
    finished answer, and the session checks that.
    """
    opendp = load_extra("opendp.mod")
    made = getattr(measurement, "__opendp_dict__", {})
    if released and made.get("__function__") == "make_chain_pm":
        return
    yield made
    for part in (part for value in made.get("__kwargs__", {}).values() for part in _as_list(value)):
        if isinstance(part, opendp.Measurement | opendp.Odometer):
            yield from _records(part, released=released)


def _has_floats(domain: Any) -> bool:  # noqa: ANN401  untyped library
    """Whether a map's values are floats, which almost never equal a threshold."""
    return str(domain.carrier_type).endswith((", f32>", ", f64>"))


def _as_list(value: object) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _type_name(kind: Any) -> str:  # noqa: ANN401  untyped library
    """Return the name of a domain's or metric's type, without module and parameters."""
    return str(kind.type).partition("<")[0].rpartition("::")[2]


def _distance(measurement: Any, neighbors: str, d_in: Any) -> Any:  # noqa: ANN401  untyped library
    """Return the distance of neighbors in the measurement's own type: rounded up, and at least one neighbor."""
    metric = measurement.input_metric
    name = _type_name(metric)
    one = _neighbor_distance(measurement, name, neighbors)
    if d_in is None:
        if not one or name == "FrameDistance":
            raise InvalidArgument(
                f"d_in must be given: the distance of neighbors in {metric}, such as d_in=1 for a count"
            )
        d_in = one
    if name == "FrameDistance":
        return _bounds(d_in, one)
    if name in _NORM_TRIPLES:
        if (
            not isinstance(d_in, tuple)
            or len(d_in) != 3
            or not all(read(part, "d_in", InvalidArgument) for part in d_in)
        ):
            raise InvalidArgument(f"d_in must be three positive norms in {metric} (got {d_in!r})")
        return d_in
    exact = read(d_in, "d_in", InvalidArgument)
    if exact == 0 or exact < one:
        raise InvalidArgument(f"d_in must be at least one neighbor ({neighbors}) in {metric} (got {d_in!r})")
    return float_above(exact) if str(measurement.input_distance_type).startswith("f") else math.ceil(exact)


def _neighbor_distance(measurement: Any, name: str, neighbors: str) -> int:  # noqa: ANN401  untyped library
    """Return the distance of neighbors; 0 where only the caller knows it. Raise for unknown metrics and domains."""
    if neighbors not in _ADDED:
        raise InvalidGuarantee(f"neighbors must be one of {[*_ADDED]} (got {neighbors!r})")
    metric, domain = measurement.input_metric, _type_name(measurement.input_domain)
    inner = _type_name(metric.inner_metric) if name == "FrameDistance" else name
    if inner in _DATASETS:
        _check_dataset(measurement.input_domain, neighbors)
        one = _DATASETS[inner].get(neighbors)
        if one is None:
            raise UnprovenComposition(
                f"{inner} cannot express that a record is added or removed, as neighbors={neighbors!r} needs;"
                " measure over symmetric_distance(), or make a policy with neighbors='replace-one'"
            )
        return one
    if name == "DiscreteDistance" and domain in _VALUES:
        if neighbors not in _CHANGED:
            raise UnprovenComposition(
                "a measurement over DiscreteDistance, such as randomized response, covers one changed answer; it"
                f" needs a policy with neighbors='replace-one' (got {neighbors!r})"
            )
        return _CHANGED[neighbors]
    if name in _NORMS | _NORM_TRIPLES and domain in _NUMBERS:
        if "monotonic" in str(metric) and neighbors in _CHANGED:
            raise UnprovenComposition(
                f"in {metric} all scores rise or all fall, but a replaced record makes some rise and others fall, and"
                " such neighbors have no distance there. Use linf_distance(T=..., monotonic=False), or make a policy"
                " with neighbors='add-remove'"
            )
        return 0
    raise _unknown_distance(f"{metric} on {measurement.input_domain}")


def _check_dataset(domain: Any, neighbors: str) -> None:  # noqa: ANN401  untyped library
    """Raise if the domain's public sizes exclude datasets that the policy calls neighbors."""
    match _type_name(domain):
        case "VectorDomain":
            size = domain.size
        case "ExtrinsicDomain" if type(domain.descriptor).__name__ == "NPArray2Domain":
            size = domain.descriptor.size
        case "LazyFrameDomain":
            # The whole frame inherits what is public about any grouping of it.
            public = domain.get_margin([]).invariant
            if public is not None:
                raise UnprovenComposition(
                    f"a margin of {domain} has public {public} (invariant={public!r}), so OpenDP's map covers only"
                    " neighbors with equal ones. Remove the invariant, and join or filter by public keys"
                )
            return
        case _:
            raise _unknown_distance(f"datasets of {domain}")
    if size is not None and neighbors == "add-remove":
        raise UnprovenComposition(
            f"in {domain} the number of records is public, so OpenDP's map has no price for one record added or"
            " removed. Make a policy with neighbors='replace-one', or start from a domain without a size and use"
            f" dp.t.then_resize(size={size}, constant=...)"
        )


def _unknown_distance(what: str) -> UnprovenComposition:
    return UnprovenComposition(
        f"the distance of neighbors in {what} is not known here. Measure over a vector_domain and"
        " symmetric_distance(), or pass cost= with trust_cost=True"
    )


def _bounds(d_in: Any, one: int) -> Any:  # noqa: ANN401  untyped library
    """Return the bounds of a frame's distance, each at least one neighbor."""
    bounds = _as_list(d_in)
    given = [getattr(bound, field, 0) for bound in bounds for field in ("per_group", "num_groups")]
    if not bounds or any(value is not None and read(value, "d_in", InvalidArgument) < one for value in given):
        raise InvalidArgument(
            "d_in must be bounds that allow for one neighbor, such as"
            f" d_in=[dp.polars.Bound(by=[], per_group={one})] (got {d_in!r})"
        )
    return bounds


def _check_growth(measurement: Any, distance: int, delta: Numeric | None, cost: Guarantee) -> None:  # noqa: ANN401
    """Raise if the loss at twice the distance is more than group privacy allows, given the loss at the distance.

    All maps known to be wrong for one record fail this: data of known size (zero for one record), amplification by
    sampling (too little).

    Theorem: two steps of epsilon-DP are 2 epsilon-DP, of rho-zCDP 4 rho-zCDP (Bun and Steinke (2016)), and of a
        Rényi curve at most 3 times at half the order (Mironov (2017)). With a fixed delta there is no such theorem; a
        zCDP curve read at one delta grows by at most 4.
    Assumes: the map is right at twice the distance; where it is wrong there too, this check finds nothing.
    """
    try:
        twice = _guarantee(measurement, 2 * distance, delta)
    except InvalidGuarantee as problem:
        if problem.__cause__ is not None:
            return  # the map ends before that distance, as that of a compositor does
        raise _growth_error(measurement, distance) from problem
    if isinstance(cost, RDP) and isinstance(twice, RDP):
        half = {2 * exact_of(order): exact_of(value) for order, value in zip(twice.orders, twice.values, strict=True)}
        ends = 2 * exact_of(twice.orders[-1])
        curve = zip(map(exact_of, cost.orders), map(exact_of, cost.values), strict=True)
        too_fast = any(a > ends or half.get(a, 0) > 3 * value * _ROUNDING for a, value in curve if a >= 4)
    else:
        (size, *rest), (twice_size, *twice_rest) = ([*map(exact_of, _sizes(each))] for each in (cost, twice))
        times = 2 if isinstance(cost, PureDP) else 4
        appears = any(a == 0 < b for a, b in zip(rest, twice_rest, strict=True))  # a delta that is 0 for one record
        too_fast = appears or twice_size > times * size * _ROUNDING
    if too_fast:
        raise _growth_error(measurement, distance)


def _growth_error(measurement: Any, distance: int) -> UnprovenComposition:  # noqa: ANN401  untyped library
    here, there = (measurement.map(d) for d in (distance, 2 * distance))
    return UnprovenComposition(
        f"OpenDP's map gives {here!r} at d_in={distance} and {there!r} at d_in={2 * distance}, which is more than"
        " group privacy allows: the first is not the loss for one record"
    )


def _sizes(cost: Guarantee) -> tuple[Numeric, ...]:
    match cost:
        case RDP():
            return cost.values
        case ApproxDP():
            return cost.epsilon, cost.delta
        case ZCDP():
            return cost.rho, cost.delta
        case PureDP():
            return (cost.epsilon,)
    raise InvalidGuarantee(f"cost must be one that OpenDP has a measure for (got {type_text(cost)})")


def _guarantee(measurement: Any, distance: Any, delta: Numeric | None) -> Guarantee:  # noqa: ANN401  untyped library
    """Return the guarantee by the measurement's map at a distance; an OpenDP error is the cause of the one raised."""
    try:
        loss = measurement.map(distance)
    except (load_extra("opendp.mod").OpenDPException, TypeError, ValueError) as problem:
        raise InvalidGuarantee(f"OpenDP has no cost for d_in={distance!r}: {str(problem).strip()}") from problem
    measure = str(measurement.output_measure.type)
    if measure == "SmoothedMaxDivergence":
        return _profile(loss, delta)
    if delta is not None:
        raise InvalidArgument(
            f"delta is for privacy profiles only (got delta={delta!r} for a measurement in {measure})"
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
    raise UnprovenComposition(
        f"OpenDP's measure {measure} is not covered by any theorem here; pass cost= with trust_cost=True if you know"
        " the cost"
    )


def _as_noise(measurement: Any, distance: Any, cost: ZCDP) -> Guarantee:  # noqa: ANN401  untyped library
    """Return the cost of a Gaussian as that of its noise, if its numbers are known and lead to the rho of its map."""
    made = getattr(measurement, "__opendp_dict__", {})
    while made.get("__function__") in {"make_chain_mt", "make_chain_pm"}:
        parts = made["__kwargs__"]
        if "transformation0" in parts:
            distance = parts["transformation0"].map(distance)
        measurement = parts["measurement1" if "transformation0" in parts else "measurement0"]
        made = getattr(measurement, "__opendp_dict__", {})
    if made.get("__function__") != "make_gaussian" or cost.delta:
        return cost
    noise = _noise(measurement, Fraction(distance), made["__kwargs__"])
    stated = exact_of(cost.rho)
    return noise if noise is not None and stated / _ROUNDING <= noise.mu**2 / 2 <= stated * _SAME else cost


def _noise(
    measurement: Any,  # noqa: ANN401  untyped library
    distance: Fraction,
    settings: Mapping[str, Any],
) -> DiscreteGaussian | None:
    """Return the noise of a measurement that `make_gaussian` made; None where a number of it is not known.

    Theorem: by calculation: rounding two vectors to multiples of 2^k changes each coordinate's difference by less
        than 2^k, and rounding the answer is postprocessing.
    Assumes: the inputs are at most the distance apart; OpenDP samples the discrete Gaussian exactly.
    """
    domain, k = measurement.input_domain, settings["k"]
    names = _type_name(domain), _type_name(measurement.input_metric)
    number = str(domain.carrier_type).removeprefix("Vec<").removesuffix(">")
    size = domain.size if names[0] == "VectorDomain" else 1
    if names not in _GAUSSIANS or size == 0:
        return None
    if number in _INTEGERS and not k:
        grid = Fraction(1)
        size = size or max(1, math.floor(distance**2))
    elif number in _SMALLEST and size is not None:
        k = _SMALLEST[number] if k is None else k
        grid = Fraction(2) ** k
        if k > _SMALLEST[number]:
            distance = exactly(float_above(distance + grid * _root_above(size)))
    else:
        return None
    if size > _MOST_COORDINATES:
        return None
    try:
        return DiscreteGaussian(exactly(float(settings["scale"])), distance, size, grid)
    except InvalidGuarantee:  # numbers too long to be kept, or hardly any noise
        return None


def _root_above(size: int) -> Fraction:
    root = math.isqrt(size)
    return Fraction(root) if root * root == size else exactly(up(math.sqrt(size)))


def _profile(profile: Any, delta: Numeric | None) -> ApproxDP:  # noqa: ANN401  untyped library
    if delta is None:
        raise InvalidArgument("delta must be given, such as delta=1e-9: this measurement has a privacy profile")
    wanted = read(delta, "delta", InvalidArgument)
    level = float_below(wanted)  # a smaller delta costs more
    return ApproxDP(_finite(profile.epsilon(level)), delta)


def _curve(curve: Any) -> RDP:  # noqa: ANN401  untyped library
    values = [(order, float(curve(float(order)))) for order in ORDERS]
    # Many curves end at some order, with infinity; a NaN is not skipped, but refused.
    known = [(order, _finite(value)) for order, value in values if value != math.inf]
    if not known:
        raise InvalidGuarantee("OpenDP's divergence must be finite at some order (got none): there is no privacy")
    return RDP(tuple(order for order, _ in known), tuple(value for _, value in known))


def _finite(value: float) -> Fraction:
    if not math.isfinite(value):
        raise InvalidGuarantee(f"OpenDP's loss must be finite (got {value!r}): otherwise there is no privacy")
    return exactly(value)


def queryable(
    account: Account,
    odometer: Any,  # noqa: ANN401  untyped library
    data: Any,  # noqa: ANN401  whatever the odometer takes
    *,
    d_in: Any = None,  # noqa: ANN401  as in `cost_of`
) -> Any:  # noqa: ANN401  OpenDP's queryable
    """Return the queryable of an OpenDP odometer, of which an account pays: write this in place of `odometer(data)`.

    Each query is charged by its own map, before it runs; `BudgetExceeded` leaves the queryable as it was. A query
    that can be asked further, such as a compositor, is charged whole, and its answer is an `Interaction`. `d_in` is
    the distance of neighbors, as in `cost_of`, for all queries.

    Compositors and filters are measurements: open them with `account.interact(measurement, data)`.

    Theorem: the policy's filter; a query is a mechanism of its own, and an interactive one is charged whole before it
        is asked, beside others (Haney et al. (2023)).
    Assumes: the maps of the queries are right, for the account's neighbors.
    """
    check_account(account, "a queryable")
    if not isinstance(odometer, load_extra("opendp.mod").Odometer):
        raise InvalidArgument(
            f"odometer must be an OpenDP Odometer (got {type_text(odometer)}); open compositors and filters"
            " with account.interact(measurement, data)"
        )
    distance = _distance(odometer, account.policy.neighbors, d_in)  # raises now, and not at the first query
    return _charged_queries(account, odometer(data), distance)


def _charged_queries(account: Account, odometer: Any, distance: Any) -> Any:  # noqa: ANN401  untyped library
    """Return an odometer's queryable of which each query is charged to the account."""
    lock = threading.RLock()

    def ask(query: Any) -> Any:  # noqa: ANN401  untyped library
        cost = cost_of(query, neighbors=account.policy.neighbors, d_in=distance)
        is_frame = "make_private_lazyframe" in _released(query)

        def answer() -> Any:  # noqa: ANN401  untyped library
            with lock:
                found = guarded(odometer(query), lock=lock)
                return Collected(found.collect()) if is_frame else found

        answer.__name__ = _name_of(query)
        if isinstance(cost, Interactive) and not is_frame:
            return account.interact(answer, cost=cost)
        with session(account) as s:
            return s.run(answer, cost=one_shot(cost))

    return guarded(odometer, ask, lock)


class Collected:
    """What a release of a Polars query answers in a context over an account: `collect()` returns the data frame.

    OpenDP's own answer is a plan that is run when it is collected, once. Here it was run when it was charged, so it
    costs what one answer does, and may be collected again.
    """

    def __init__(self, frame: Any) -> None:  # noqa: ANN401  untyped library
        self._frame = frame

    def collect(self) -> Any:  # noqa: ANN401  untyped library
        """Return the data frame."""
        return self._frame


def _name_of(measurement: Any) -> str:  # noqa: ANN401  untyped library
    """Return the constructor of a measurement, for the note of an entry."""
    return str(getattr(measurement, "__opendp_dict__", {}).get("__function__", type(measurement).__name__))


def guarded(answer: Any, ask: Callable[[Any], Any] | None = None, lock: Any = None) -> Any:  # noqa: ANN401
    """Return an answer whose queryables check each query first, then pass it to `ask`, or to OpenDP.

    A compositor believes the map of each query, so those that `cost_of` refuses for their construction are refused
    here: thresholds on integers and amplification by sampling. So are odometers as queries, on which OpenDP 0.16
    ends the process, and the plan behind a `OnceFrame`, which could be collected many times.

    OpenDP's queryables are not made for threads, and share state with those that they spawn: one answers at a time.
    """
    if not any(kind.__name__ in _QUERYABLES for kind in type(answer).__mro__):
        return answer
    opendp = load_extra("opendp.mod")
    lock = lock or threading.RLock()

    # Still of the type that OpenDP's own code looks for.
    class Guarded(type(answer)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__ = answer.__dict__

        def __getattribute__(self, name: str) -> Any:  # noqa: ANN401  untyped library
            if name == "lazy":
                raise UnprovenComposition(
                    "the plan of a frame can be collected many times, and each time is an answer: use collect()"
                )
            return super().__getattribute__(name)

        def __call__(self, query: Any) -> Any:  # noqa: ANN401  untyped library
            if isinstance(query, opendp.Measurement | opendp.Odometer):
                _check_construction(query)
            if ask is not None:
                return ask(query)
            with lock:
                return guarded(answer(query), lock=lock)

        invoke = __call__

    return Guarded()


def context(
    account: Account,
    data: Any,  # noqa: ANN401  whatever the domain has
    privacy_unit: tuple[Any, Any],
    privacy_loss: tuple[Any, Any] | None = None,
    **settings: Any,
) -> Any:  # noqa: ANN401  an `AccountContext`, or OpenDP's `Context`
    """Return an OpenDP context over an account: write this in place of `dp.Context.compositor`.

    Without a `privacy_loss` the account is the budget: each `release()` is charged by its own measurement's map, and
    queries say what they want to spend (`query(epsilon=0.1)`, `query(rho=0.01)`) or what noise they add. See
    `AccountContext`. This is the one to take for new code.

    With a `privacy_loss` the account is charged that loss now, all of it, and OpenDP divides it as its own code says
    (`split_evenly_over`, `split_by_weights`, or query by query). Take it for code that is written that way. A loss
    without end (`dp.loss_of(epsilon=math.inf)`) is an odometer: then each release is charged as it comes.

    `settings` are those of `dp.Context.compositor`: `domain`, `margins`, and how to split a loss.
    """
    check_account(account, "a context")
    _check_unit(privacy_unit, account.policy.neighbors)
    if privacy_loss is None:
        if given := sorted(name for name in settings if name.startswith("split_")):
            raise InvalidArgument(f"{given[0]} divides a privacy_loss, which must be given too (got none)")
        return AccountContext(account, data, privacy_unit, **settings)
    compositor = load_extra("opendp.context").Context.compositor
    made = compositor(data=data, privacy_unit=privacy_unit, privacy_loss=privacy_loss, **settings)
    neighbors, spawned = account.policy.neighbors, made.queryable
    if isinstance(made.accountant, load_extra("opendp.mod").Odometer):
        made.queryable = _charged_queries(account, spawned, _distance(made.accountant, neighbors, made.d_in))
        return made

    def opendp_context() -> Any:  # noqa: ANN401  untyped library
        return spawned  # it has drawn nothing yet: a compositor, or filter, holds the data until it is asked

    cost = cost_of(made.accountant, neighbors=neighbors, d_in=made.d_in)
    made.queryable = guarded(spawned, account.interact(opendp_context, cost=cost))
    return made


def _check_unit(privacy_unit: tuple[Any, Any], neighbors: str) -> None:
    """Raise if the unit counts added or removed records where neighbors replace them: twice as many differ then."""
    metric = str(privacy_unit[0])
    counts_added = any(name in metric for name, known in _DATASETS.items() if known is _ADDED)
    if neighbors == "replace-one" and counts_added:
        raise InvalidArgument(
            "privacy_unit must count changed records where the policy's neighbors are 'replace-one', as in"
            f" dp.unit_of(changes={privacy_unit[1]!r}) (got contributions, in {metric}); or make a policy with"
            " neighbors='add-remove'"
        )


class AccountContext:
    """OpenDP's `Context` with an account in place of its budget; made by `context`.

    `query()` begins a query as OpenDP's own does, on vectors and on Polars frames. `release()` charges the account,
    then runs it; `BudgetExceeded` means that nothing ran. Measures may differ from query to query, where a context of
    OpenDP has one. What is left is the account's: `account.remaining`, `account.largest(...)`.

    Theorem: as `queryable` of an odometer.
    Assumes: `privacy_unit` is what the account's policy protects: all records of one person, by its neighbors.
    """

    def __init__(
        self,
        account: Account,
        data: Any,  # noqa: ANN401  whatever the domain has
        privacy_unit: tuple[Any, Any],
        domain: Any = None,  # noqa: ANN401  untyped library
        margins: Sequence[Any] | None = None,
    ) -> None:
        check_account(account, "a context")
        self.account = account
        self._settings = {"data": data, "privacy_unit": privacy_unit, "domain": domain, "margins": margins}
        # One of OpenDP's contexts for each measure: a context of OpenDP has one.
        self._contexts: dict[str, Any] = {}
        self._space = self._in(load_extra("opendp.measures").max_divergence()).accountant.input_space

    def query(self, **loss: float) -> Any:  # noqa: ANN401  untyped library
        """Begin a query; `epsilon`, `rho` and `delta` are its loss, from which missing noise is found.

        Without a loss the noise has to be given (`.laplace(scale=10.0)`), and the cost follows from it.
        """
        library = load_extra("opendp.context")
        if loss:
            measure, _ = library.loss_of(**loss)
            return self._in(measure).query(**loss)
        if _type_name(self._space[0]) == "LazyFrameDomain":
            raise InvalidArgument("query() of a frame needs a loss, such as query(epsilon=0.1) or query(rho=0.01)")
        _, d_in = self._settings["privacy_unit"]
        return library.Query(chain=self._space, output_measure=None, d_in=d_in, context=self)

    def __call__(self, query: Any) -> Any:  # noqa: ANN401  untyped library
        """Charge the account for a measurement, run it and return its answer."""
        _check_construction(query)
        return self._in(query.output_measure)(query)

    def current_privacy_loss(self) -> dict[str, Any]:
        """Return what OpenDP counts for the queries so far, for each measure; the account's reading is another."""
        losses = {name: made.current_privacy_loss() for name, made in self._contexts.items()}
        return {name: loss for name, loss in losses.items() if loss not in (0, (0, 0))}

    def _in(self, measure: Any) -> Any:  # noqa: ANN401  untyped library
        """Return the context whose odometer takes measurements of a measure, each charged to the account."""
        if str(measure) not in self._contexts:
            made = load_extra("opendp.context").Context.compositor(**self._settings, privacy_loss=(measure, math.inf))
            distance = _distance(made.accountant, self.account.policy.neighbors, made.d_in)
            made.queryable = _charged_queries(self.account, made.queryable, distance)
            self._contexts[str(measure)] = made
        return self._contexts[str(measure)]


def noisy(truths: Sequence[int], sensitivity: int, epsilon: float) -> list[int]:
    """Add OpenDP's Laplace noise: epsilon-DP if a row moves the truths by at most `sensitivity` in all."""
    # A little more noise than necessary, so that OpenDP's own bound, rounded up, is still within the cost.
    mechanism = _on_integers("laplace", "l1_distance", "i32", sensitivity * (1 + 2**-40) / epsilon)
    if mechanism.map(d_in=sensitivity) > epsilon:
        raise InvalidGuarantee(
            f"the cost of the noise must be at most {epsilon!r} (got {mechanism.map(d_in=sensitivity)!r})"
        )
    return [*mechanism([int(truth) for truth in truths])]


def noisy_gaussian(truths: Sequence[int], noise: DiscreteGaussian) -> list[int]:
    """Add OpenDP's Gaussian noise, of that sigma: for this cost if a row moves the truths as the cost says.

    Raise `InvalidGuarantee` if OpenDP's own record of the mechanism says another cost.
    """
    mechanism = _on_integers("gaussian", "l2_distance", "f64", float_above(exact_of(noise.sigma)))
    cost = cost_of(mechanism, d_in=noise.sensitivity)
    if (
        not isinstance(cost, DiscreteGaussian)
        or (cost.dimension, cost.grid) != (noise.dimension, noise.grid)
        or cost.mu > noise.mu
    ):
        raise InvalidGuarantee(f"the cost of the noise must be at most {noise!r} (got {cost!r})")
    return [*mechanism([int(truth) for truth in truths])]


def _on_integers(kind: str, metric: str, distance: str, scale: float) -> Any:  # noqa: ANN401  untyped library
    """Return a measurement that adds noise to a vector of integers."""
    load_extra("opendp.mod").enable_features("contrib")  # its prelude would take a second to import
    domains, metrics, measurements = (load_extra(f"opendp.{name}") for name in ("domains", "metrics", "measurements"))
    space = domains.vector_domain(domains.atom_domain(T=int)), getattr(metrics, metric)(T=distance)
    return getattr(measurements, f"make_{kind}")(*space, scale=scale)
