"""Every constructor of measurements in the installed OpenDP: what its guarantee is read as, or why it is refused.

What is expected is worked out here from the arguments, by closed forms, and compared with the map and with `cost_of`.
Whether the numbers are enough for one record is the subject of `test_opendp_leaks.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest
from scipy.stats import beta

import odograph as odo
from odograph.core.guarantees import DiscreteGaussian, Interactive, exact_of, one_shot
from odograph.integrations.opendp import cost_of

dp = pytest.importorskip("opendp.prelude")
dp.enable_features("contrib", "honest-but-curious")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

PURE, RHO = dp.max_divergence(), dp.zero_concentrated_divergence()
PAIR = dp.approximate(PURE)
ROWS: Final = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
NUMBER: Final = dp.atom_domain(T=int), dp.absolute_distance(T=int)
REAL: Final = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)
SCORES: Final = dp.vector_domain(dp.atom_domain(T=int)), dp.linf_distance(T=int)
COUNTS: Final = (
    dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T=int)),
    dp.l01inf_distance(dp.absolute_distance(T=int)),
)
REALS: Final = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T=float, nan=False))
REAL_COUNTS: Final = REALS, dp.l01inf_distance(dp.absolute_distance(T=float))
REAL_COUNTS_2: Final = REALS, dp.l02inf_distance(dp.absolute_distance(T=float))
BITS: Final = dp.bitvector_domain(max_weight=2), dp.discrete_distance()

COUNT: Final = ROWS >> dp.t.then_count() >> dp.m.then_laplace(scale=4.0)
GAUSSIAN: Final = ROWS >> dp.t.then_count() >> dp.m.then_gaussian(scale=2.0)
SCORED: Final = dp.m.make_user_measurement(
    *ROWS, PURE, lambda data: (float(len(data)), "all"), lambda d: 0.25 * d, TO="(f64, ExtrinsicObject)"
)
ODOMETER: Final = dp.c.make_fully_adaptive_composition(*ROWS, PURE)


class Made(NamedTuple):
    """Arguments of a constructor, and what they must cost; a text is what a refusal says."""

    cost: odo.Guarantee | str
    space: tuple[Any, Any] | None = None
    arguments: Mapping[str, Any] = MappingProxyType({})
    d_in: Any = None
    neighbors: str = "add-remove"
    delta: float | None = None


def below(value: float) -> float:
    return math.exp(-value) / 2


MEASUREMENTS: Final = {
    "make_alp_queryable": Made(
        Interactive(odo.PureDP(2)), COUNTS, {"scale": 2.0, "total_limit": 24, "value_limit": 24}, (1, 1, 1)
    ),
    "make_canonical_noise": Made(odo.ApproxDP(1, "1/1024"), REAL, {"d_in": 1.0, "d_out": (1.0, 2.0**-10)}, 1.0),
    "make_gaussian": Made(odo.mechanisms.discrete_gaussian(4, 3), NUMBER, {"scale": 4.0}, 3),
    "make_gaussian_threshold": Made(
        odo.ZCDP("0.5", 2.866515719235352e-07), REAL_COUNTS_2, {"scale": 1.0, "threshold": 6.0}, (1, 1.0, 1.0)
    ),
    "make_geometric": Made(odo.PureDP(0.5), NUMBER, {"scale": 4.0}, 2),
    "make_laplace": Made(odo.PureDP(0.5), NUMBER, {"scale": 4.0}, 2),
    "make_laplace_threshold": Made(
        odo.ApproxDP(1, below(5)), REAL_COUNTS, {"scale": 1.0, "threshold": 6.0}, (1, 1.0, 1.0)
    ),
    "make_noise": Made(odo.ZCDP("1/8"), NUMBER, {"output_measure": RHO, "scale": 4.0}, 2),
    "make_noise_threshold": Made(
        odo.ApproxDP(1, below(5)),
        REAL_COUNTS,
        {"output_measure": PAIR, "scale": 1.0, "threshold": 6.0},
        (1, 1.0, 1.0),
    ),
    "make_noisy_max": Made(odo.PureDP(0.5), SCORES, {"output_measure": PURE, "scale": 4.0}, 1),
    "make_noisy_top_k": Made(odo.PureDP(1), SCORES, {"output_measure": PURE, "k": 2, "scale": 4.0}, 1),
    # A record moves the score of a candidate for the median by 1, the doubled distance of two ranks.
    "make_private_quantile": Made(
        odo.PureDP(0.25), ROWS, {"output_measure": PURE, "candidates": [1, 5, 9], "alpha": 0.5, "scale": 4.0}
    ),
    "make_randomized_response": Made(
        odo.PureDP(math.log(2)), None, {"categories": ["a", "b", "c"], "prob": 0.5}, neighbors="replace-one"
    ),
    "make_randomized_response_bitvec": Made(odo.PureDP(4 * math.log(3)), BITS, {"f": 0.5}, neighbors="replace-one"),
    "make_randomized_response_bool": Made(odo.PureDP(math.log(3)), None, {"prob": 0.75}, neighbors="replace-one"),
    "make_report_noisy_max_gumbel": Made(odo.PureDP(0.5), SCORES, {"scale": 4.0}, 1),
    "make_user_measurement": Made(
        odo.PureDP(0.125),
        ROWS,
        {"output_measure": PURE, "function": len, "privacy_map": lambda d: 0.125 * d},
    ),
}

RHO_OF_QUARTER: Final = odo.ZCDP("1/32")  # epsilon^2 / 2
# The epsilon is between the Gaussian's own curve and the textbook's bound: `test_fixed_deltas_are_approximate`.
PROFILE: Final = dp.c.make_zCDP_to_approxDP(GAUSSIAN)
AT_A_MILLIONTH: Final = odo.ApproxDP(Fraction(PROFILE.map(1).epsilon(1e-6)), 1e-6)
COMBINATORS: Final = {
    "make_adaptive_composition": Made(
        Interactive(odo.PureDP(0.75)), ROWS, {"output_measure": PURE, "d_in": 1, "d_mids": [0.5, 0.25]}
    ),
    "make_approximate": Made(odo.ApproxDP(0.25, 0), None, {"measurement": COUNT}),
    "make_basic_composition": Made(odo.PureDP(0.5), None, {"measurements": [COUNT, COUNT]}),
    "make_chain_mt": Made(
        odo.PureDP(0.25),
        None,
        {"measurement1": dp.m.make_laplace(*NUMBER, scale=4.0), "transformation0": dp.t.make_count(*ROWS)},
    ),
    "make_chain_pm": Made(
        odo.PureDP(0.25), None, {"postprocess1": dp.new_function(abs, TO=int), "measurement0": COUNT}
    ),
    "make_composition": Made(odo.PureDP(0.5), None, {"measurements": [COUNT, COUNT]}),
    "make_fix_delta": Made(AT_A_MILLIONTH, None, {"measurement": PROFILE, "delta": 1e-6}),
    "make_fixed_approxDP_to_approxDP": Made(
        odo.ApproxDP(0.25, "1e-6"), None, {"measurement": dp.c.make_approximate(COUNT)}, delta=1e-6
    ),
    "make_fully_adaptive_composition": Made("has no cost before its queries", ROWS, {"output_measure": PURE}),
    "make_population_amplification": Made(
        "fresh, secret sample",
        None,
        {
            "measurement": (dp.vector_domain(dp.atom_domain(T=int), size=3), ROWS[1])
            >> dp.t.then_clamp((0, 10))
            >> dp.t.then_sum()
            >> dp.m.then_laplace(scale=4.0),
            "population_size": 100,
        },
        neighbors="replace-one",
    ),
    "make_privacy_filter": Made(
        Interactive(odo.PureDP(0.75)), None, {"odometer": ODOMETER, "d_in": 1, "d_out": 0.75}
    ),
    "make_pureDP_to_zCDP": Made(RHO_OF_QUARTER, None, {"measurement": COUNT}),
    "make_select_private_candidate": Made(
        odo.PureDP(0.5), None, {"measurement": SCORED, "stop_probability": 0.5, "threshold": 3.0}
    ),
    "make_sequential_composition": Made(
        Interactive(odo.ZCDP(0.75)), ROWS, {"output_measure": RHO, "d_in": 1, "d_mids": [0.5, 0.25]}
    ),
    "make_zCDP_to_approxDP": Made(AT_A_MILLIONTH, None, {"measurement": GAUSSIAN}, delta=1e-6),
}
# Frames need Polars: see `test_opendp_interactive.py`. Transformations are no measurements.
ELSEWHERE: Final = {"make_chain_tt", "make_private_expr", "make_private_lazyframe"}
ALL: Final = MEASUREMENTS | COMBINATORS


def constructors(prefix: str) -> dict[str, Callable[..., Any]]:
    return {
        name: maker
        for module in (dp.m, dp.c)
        for name, maker in vars(module).items()
        if name.startswith(prefix) and maker.__module__ == module.__name__
    }


def ways(name: str) -> Iterator[Any]:
    """Every way in which the constructor is called: with its space, and chained behind it."""
    made = ALL[name]
    yield constructors("make_")[name](*(made.space or ()), **made.arguments)
    then = constructors("then_").get(name.replace("make_", "then_"))
    if then is not None:
        yield made.space >> then(**made.arguments)


def read(made: Made, measurement: Any) -> odo.Guarantee:  # noqa: ANN401  untyped library
    return cost_of(measurement, neighbors=made.neighbors, d_in=made.d_in, delta=made.delta)


def test_every_constructor_is_decided() -> None:
    """One that a new release brings fails here until it is known what its measurements cost."""
    assert constructors("make_").keys() == ALL.keys() | ELSEWHERE
    assert {name.replace("then_", "make_") for name in constructors("then_")} <= ALL.keys() | ELSEWHERE


def numbers(cost: odo.Guarantee) -> list[Fraction]:
    inside = one_shot(cost)
    return [exact_of(getattr(inside, field)) for field in inside.__match_args__]


def same(found: odo.Guarantee, expected: odo.Guarantee) -> bool:
    """Of the same kinds, and of numbers that are those expected or, by rounding, a little higher."""
    if type(found) is not type(expected) or type(one_shot(found)) is not type(one_shot(expected)):
        return False
    return all(
        b * (1 - Fraction(1, 10**14)) <= a <= b * (1 + Fraction(1, 10**6))
        for a, b in zip(numbers(found), numbers(expected), strict=True)
    )


@pytest.mark.parametrize("name", [*ALL])
def test_a_constructor_costs_what_its_arguments_say(name: str) -> None:
    made = ALL[name]
    for measurement in ways(name):
        if isinstance(made.cost, str):
            with pytest.raises(odo.UnprovenComposition, match=made.cost):
                read(made, measurement)
        else:
            assert same(read(made, measurement), made.cost), read(made, measurement)


WRONG_READINGS: Final[dict[str, Callable[[odo.Guarantee], odo.Guarantee | None]]] = {
    "half the distance": lambda cost: rescaled(cost, Fraction(1, 2)),
    "one query of the many": one_shot,
    "without its delta": lambda cost: odo.PureDP(cost.epsilon) if isinstance(cost, odo.ApproxDP) else None,
    "a Gaussian for its discrete noise": lambda cost: (
        odo.gaussian(sigma=4, sensitivity=3) if isinstance(cost, DiscreteGaussian) else None
    ),
    "rho for epsilon": lambda cost: odo.PureDP(cost.rho) if isinstance(cost, odo.ZCDP) else None,
}


def rescaled(cost: odo.Guarantee, factor: Fraction) -> odo.Guarantee | None:
    inside = one_shot(cost)
    if not isinstance(inside, odo.PureDP | odo.ApproxDP | odo.ZCDP):
        return None
    size, *rest = numbers(cost)
    smaller = type(inside)(size * factor, *rest)
    return Interactive(smaller) if isinstance(cost, Interactive) else smaller


@pytest.mark.parametrize("reading", WRONG_READINGS)
def test_a_wrong_reading_is_caught(reading: str) -> None:
    """The negative control: readings that would charge less, for every constructor that they apply to."""
    caught = 0
    for name, made in ALL.items():
        if isinstance(made.cost, str):
            continue
        found = read(made, next(ways(name)))
        wrong = WRONG_READINGS[reading](found)
        if wrong is not None and wrong != found:
            assert not same(wrong, made.cost), (name, wrong)
            caught += 1
    assert caught > 0


# Interactive measurements leak no more than their cost, whatever the map says.


def least_epsilon(here: Counter[Any], there: Counter[Any]) -> float:
    """A lower bound on epsilon from answers about either dataset; wrong once in a million times."""
    level, best = 1e-6 / (4 * len(here | there)), 0.0
    for a, b in ((here, there), (there, here)):
        for outcome in a:
            least = beta.ppf(level, a[outcome], a.total() - a[outcome] + 1)
            most = beta.ppf(1 - level, b[outcome] + 1, b.total() - b[outcome]) if b[outcome] < b.total() else 1.0
            best = max(best, math.log(least / most))
    return best


def test_a_projection_leaks_no_more_than_it_costs() -> None:
    made = MEASUREMENTS["make_alp_queryable"]
    measurement = next(ways("make_alp_queryable"))

    def asked(data: dict[str, int]) -> tuple[float, ...]:
        answer = measurement(data)
        return tuple(answer(key) for key in ("a", "b"))

    here, there = (Counter(asked(data) for _ in range(3000)) for data in ({"a": 8}, {"a": 8, "b": 8}))
    eight = cost_of(measurement, d_in=(1, 8, 8))
    assert isinstance(eight, Interactive)
    assert least_epsilon(here, there) <= numbers(eight)[0]
    # Negative control: the same answers tell more than the cost of one record moved by one.
    assert least_epsilon(here, there) > numbers(read(made, measurement))[0] / 2
