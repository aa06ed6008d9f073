from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import odograph as odo
from odograph import RDP, Decision, Policy, Price, PureDP, Totals, compile_policy, decide, decide_many, price
from odograph.core.meters import Meter
from odograph.core.units import CEILING
from odograph.errors import InvalidPolicy

Many = Callable[[tuple[Meter, ...], Totals, NDArray[np.int64]], tuple[int, Totals]]

METERS = (
    Meter("delta", "delta", 10**6),
    Meter("epsilon", "epsilon", 10**15),
    Meter("intrinsic", "intrinsic", None),
    Meter("exact", "exact", CEILING),
    Meter("zcdp", "intrinsic", CEILING - 1000),
)


# What a decision says.

SAID = (
    Meter("delta", "delta", 2 * 10**12),
    Meter("epsilon", "epsilon", 10**15),
    Meter("intrinsic", "intrinsic", None),
    Meter("paper", "paper", 5 * 10**14),
)
HALF_SPENT = Totals((10**12, 5 * 10**14, 7, 2 * 10**14), (0,) * 4, 3)


def said(asked: tuple[int | None, ...], totals: Totals = HALF_SPENT, **changes: Any) -> Decision:
    return decide(SAID, totals, Price(asked), PureDP("0.25"))._replace(**changes)


def test_an_admission_says_what_is_left_on_the_meters_that_still_count() -> None:
    decision = said((0, 25 * 10**13, 1, 10**14))
    assert str(decision) == "admitted: PureDP(0.25); left: epsilon 0.25, paper 0.2"
    assert str(decision._replace(request=None)) == "admitted: the request; left: epsilon 0.25, paper 0.2"
    assert str(said((0, None, 1, 10**14))) == "admitted: PureDP(0.25); left: paper 0.2"
    assert decision.spent == {"delta": 1e-6, "epsilon": 0.5, "paper": 0.2}
    assert decision.asked == {"delta": 0.0, "epsilon": 0.25, "paper": 0.1}
    assert decision.left == {"delta": 1e-6, "epsilon": 0.25, "paper": 0.2}
    missing = said((0, None, 1, 10**14))
    assert missing.asked == {"delta": 0.0, "epsilon": None, "paper": 0.1}
    assert missing.left == {"delta": 1e-6, "epsilon": 0.0, "paper": 0.2}


TOO_MUCH = (0, 6 * 10**14, 1, 4 * 10**14)
BOTH = "epsilon 1.1 of 1, paper 0.6 of 0.5"
NO_MORE = "no request of this kind fits any more"
REFUSALS: list[tuple[Decision, str]] = [
    (said(TOO_MUCH), f"refused: PureDP(0.25) needs {BOTH}; {NO_MORE}"),
    (said(TOO_MUCH, request=None), f"refused: the request needs {BOTH}; {NO_MORE}"),
    (
        said(TOO_MUCH, account="us", largest=PureDP("0.1")),
        f"refused by 'us': PureDP(0.25) needs {BOTH}; the largest request of this kind still admitted is PureDP(0.1)",
    ),
    (
        said(TOO_MUCH, request=RDP((2,), (1,))),
        f"refused: {RDP((2,), (1,))} needs {BOTH}; a curve has no one size to offer another of",
    ),
    (said((0, None, 1, 4 * 10**14)), f"refused: PureDP(0.25) needs paper 0.6 of 0.5; {NO_MORE}"),
    (said((0, None, 1, None)), f"refused: PureDP(0.25) needs more than is left; {NO_MORE}"),
    (
        said(TOO_MUCH, HALF_SPENT._replace(unpriced=(0, 1, 0, 0))),
        f"refused: PureDP(0.25) needs paper 0.6 of 0.5; {NO_MORE}",
    ),
    # What fits its meter is not named: here epsilon, to the last unit.
    (
        said((10**12 + 1, 5 * 10**14, 1, 4 * 10**14)),
        f"refused: PureDP(0.25) needs delta 2e-06 of 2e-06 (over by 1e-18), paper 0.6 of 0.5; {NO_MORE}",
    ),
    (
        decide((Meter("delta", "delta", 0), *SAID[1:]), Totals.zero(SAID), Price((10**9, 1, 1, 1))),
        f"refused: the request needs delta 1e-09, and the policy sets none aside (delta_steps is 0); {NO_MORE}",
    ),
    (
        decide((SAID[0], replace(SAID[1], limit=0)), Totals.zero(SAID[:2]), Price((0, 10**15))),
        f"refused: the request needs epsilon 1 of 0; {NO_MORE}",
    ),
    (
        decide((replace(SAID[0], limit=1), SAID[1]), Totals.zero(SAID[:2]), Price((10**18, 1))),
        f"refused: the request needs delta 1 of 1e-18; {NO_MORE}",
    ),
]


@pytest.mark.parametrize(("decision", "text"), REFUSALS, ids=range(len(REFUSALS)))
def test_a_refusal_says_what_is_short_and_what_would_fit(decision: Decision, text: str) -> None:
    assert str(decision) == text
    assert decision.left == {
        meter.name: pytest.approx((meter.limit - total) / meter.scale) if not skipped else 0.0
        for meter, total, skipped in zip(
            decision.meters, decision.totals.amounts, decision.totals.unpriced, strict=True
        )
        if meter.limit is not None
    }


def test_what_is_left_is_never_less_than_nothing() -> None:
    assert said(TOO_MUCH, Totals((10**12, 2 * 10**15, 7, 0), (0,) * 4)).left["epsilon"] == 0.0


def test_a_decision_is_written_in_plain_types() -> None:
    bare, offered = said(TOO_MUCH, request=None), said(TOO_MUCH, largest=PureDP("0.125"))
    form = offered.to_dict()
    assert (bare.to_dict()["request"], bare.to_dict()["largest"]) == (None, None)
    assert (form["request"], form["largest"]) == (PureDP("0.25").to_dict(), PureDP("0.125").to_dict())
    assert (form["admitted"], form["account"], form["message"]) == (False, "", str(offered))
    assert (form["spent"], form["asked"], form["left"]) == (offered.spent, offered.asked, offered.left)


def test_a_price_or_totals_of_another_policy_are_an_error() -> None:
    """Of a longer or a shorter one; nothing is left out in silence."""
    totals, zero = Totals.zero(METERS), Price((0,) * len(METERS))
    many = np.zeros((len(METERS), 1), dtype=np.int64)
    for other in (Totals.zero(METERS[:-1]), Totals.zero((*METERS, METERS[-1]))):
        with pytest.raises(ValueError, match="zip"):
            decide(METERS, other, zero)
        with pytest.raises(ValueError, match="zip"):
            decide_many(METERS, other, many)
        with pytest.raises(ValueError, match="zip"):
            other.without(zero)
        with pytest.raises(ValueError, match="zip"):
            totals._replace(amounts=other.amounts).without(zero)
        with pytest.raises(ValueError, match="zip"):
            totals._replace(unpriced=other.unpriced).without(zero)
    with pytest.raises(ValueError, match="zip"):
        decide(METERS, totals, Price((0,)))


def test_a_price_may_be_zero_or_missing_but_not_negative() -> None:
    assert Price((0, None, 3)).times(4) == Price((0, None, 12))
    with pytest.raises(InvalidPolicy, match="never negative"):
        Price((0, None, -1))


def test_nothing_asked_changes_nothing() -> None:
    totals = Totals.zero(METERS)
    assert decide_many(METERS, totals, np.zeros((len(METERS), 0), dtype=np.int64)) == (0, totals)


@pytest.mark.parametrize(
    "prices",
    [np.zeros((2, 3), dtype=np.int64), np.zeros((len(METERS), 3)), np.zeros(len(METERS), dtype=np.int64)],
    ids=["rows", "floats", "flat"],
)
def test_an_array_of_the_wrong_form_is_refused(prices: NDArray[np.int64]) -> None:
    with pytest.raises(InvalidPolicy, match="int64 array"):
        decide_many(METERS, Totals.zero(METERS), prices)


# Many at once.


def in_turn(meters: tuple[Meter, ...], totals: Totals, prices: NDArray[np.int64]) -> tuple[int, Totals]:
    """The definition: `decide` on each column until one is refused."""
    for done, column in enumerate(prices.T.tolist()):
        decision = decide(meters, totals, Price(tuple(None if asked == -1 else asked for asked in column)))
        if not decision.admitted:
            return done, totals
        totals = decision.totals_after
    return prices.shape[1], totals


EDGES = [0, 1, 2, 100, 511, 512, 2**60, 2**60 + 1, CEILING - 1, CEILING, CEILING + 1, 2**62, 2**63 - 1]
AMOUNTS = st.one_of(st.sampled_from([-1, *EDGES]), st.integers(0, 10**15), st.integers(0, 50))
TOTALS = st.one_of(st.sampled_from([e for e in EDGES if e <= 2**60 + 1]), st.integers(0, CEILING - 2000))
NEAR = st.integers(CEILING - 2000, CEILING)


@st.composite
def batches(draw: st.DrawFn, start: st.SearchStrategy[int] = TOTALS) -> tuple[Totals, NDArray[np.int64]]:
    count = draw(st.integers(0, 12))
    rows = [draw(st.lists(st.integers(0, 10**6), min_size=count, max_size=count))]
    rows += [draw(st.lists(AMOUNTS, min_size=count, max_size=count)) for _ in METERS[1:]]
    amounts = (draw(st.integers(0, 10**6)), *(draw(st.one_of(st.just(0), start)) for _ in METERS[1:]))
    unpriced = (0, *(draw(st.sampled_from([0, 0, 0, 2])) for _ in METERS[1:]))
    prices = np.array(rows, dtype=np.int64).reshape(len(METERS), count)
    return Totals(amounts, unpriced, draw(st.integers(0, 5))), prices


# Just under the ceiling a float64 cannot tell one total from the next.
CLOSE = (Totals((0, 0, CEILING - 1, 0, 0), (0,) * 5), np.array([[0], [1], [100], [1], [1]], dtype=np.int64))


@settings(max_examples=150)
@given(batches())
def test_many_decide_as_one_after_the_other(batch: tuple[Totals, NDArray[np.int64]]) -> None:
    totals, prices = batch
    assert decide_many(METERS, totals, prices) == in_turn(METERS, totals, prices)


@given(batches(NEAR))
@example(CLOSE)
def test_many_decide_as_one_after_the_other_just_under_the_ceiling(batch: tuple[Totals, NDArray[np.int64]]) -> None:
    totals, prices = batch
    assert decide_many(METERS, totals, prices) == in_turn(METERS, totals, prices)


@st.composite
def tight(draw: st.DrawFn) -> tuple[tuple[Meter, ...], Totals, NDArray[np.int64]]:
    """Meters whose limits are met exactly again and again: a few units, from nothing or just under the ceiling."""
    floors = [0, *(draw(st.sampled_from([0, CEILING - 6])) for _ in range(3))]
    clocks = ["delta", *(draw(st.sampled_from(["epsilon", "exact", "intrinsic"])) for _ in range(3))]
    limits = [draw(st.integers(0, 6)), *(draw(st.one_of(st.none(), st.integers(0, 6))) for _ in range(3))]
    meters = tuple(
        Meter(clock, clock, None if limit is None else floor + limit)
        for clock, limit, floor in zip(clocks, limits, floors, strict=True)
    )[: draw(st.integers(1, 4))]
    amounts = tuple(floor + draw(st.integers(0, 6)) for floor in floors[: len(meters)])
    unpriced = tuple(draw(st.sampled_from([0, 0, 0, 1])) for _ in meters)
    count = draw(st.integers(1, 6))
    asked = st.sampled_from([0, 0, 1, 1, 2, 3, -1, CEILING])
    rows = [[draw(asked) for _ in range(count)] for _ in meters]
    return meters, Totals(amounts, unpriced), np.array(rows, dtype=np.int64)


@settings(max_examples=200)
@given(tight())
@example(
    (METERS, Totals.zero(METERS), np.array([[0, 0], [0, 0], [2**60, 2**60 + 1], [0, 0], [0, 0]], dtype=np.int64))
)
def test_many_decide_as_one_after_the_other_where_limits_are_met_exactly(
    drawn: tuple[tuple[Meter, ...], Totals, NDArray[np.int64]],
) -> None:
    meters, totals, prices = drawn
    assert decide_many(meters, totals, prices) == in_turn(meters, totals, prices)


@settings(max_examples=200)
@given(tight())
def test_an_admission_is_charged_once_on_each_meter_and_can_be_taken_back(
    drawn: tuple[tuple[Meter, ...], Totals, NDArray[np.int64]],
) -> None:
    meters, totals, prices = drawn
    column = [None if asked == -1 else asked for asked in prices[:, 0].tolist()]
    decision = decide(meters, totals, Price(tuple(column)))
    charged = tuple(
        None if asked is None or total + asked > CEILING else asked
        for asked, total in zip(column, totals.amounts, strict=True)
    )
    holds = [
        asked is not None and not skipped and meter.limit is not None and total + asked <= meter.limit
        for meter, asked, total, skipped in zip(meters, charged, totals.amounts, totals.unpriced, strict=True)
    ]
    assert decision.admitted == bool(decision) == (holds[0] and any(holds[1:]))
    assert decision.price == Price(charged)
    after = Totals(
        tuple(total + (asked or 0) for total, asked in zip(totals.amounts, charged, strict=True)),
        tuple(count + (asked is None) for count, asked in zip(totals.unpriced, charged, strict=True)),
        totals.steps + 1,
    )
    assert decision.totals_after == (after if decision.admitted else totals)
    assert after.without(decision.price) == totals


@pytest.mark.parametrize("limit", [10, 32_767, 32_768, 32_769, 65_535, 65_536, 65_537, 99_999, 10**6])
def test_chunks_leave_no_seam(limit: int) -> None:
    """A meter that counts requests; one that breaks early, at the ceiling, and one that breaks on the way."""
    prices = np.random.default_rng(3).integers(1, 3, size=(len(METERS), 100_000), dtype=np.int64)
    prices[0], prices[4] = 0, 1
    prices[3, 100] = CEILING
    prices[1, 40_000] = -1
    admitted = min(max(limit, 40_000), 100_000)
    counted = prices[:, :admitted].copy()
    counted[3, 100] = 0
    counted[1, 40_000:40_001] = 0
    expected = Totals(tuple(counted.sum(axis=1).tolist()), (0, int(admitted > 40_000), 0, 1, 0), admitted)
    meters = (*METERS[:4], Meter("zcdp", "intrinsic", limit))
    assert decide_many(meters, Totals.zero(meters), prices) == (admitted, expected)


def repeated(amounts: Sequence[int | None], count: int) -> NDArray[np.int64]:
    """The same price `count` times, without the memory of so many columns."""
    column = np.array([[-1 if amount is None else amount] for amount in amounts], dtype=np.int64)
    return np.broadcast_to(column, (len(amounts), count))


def plain_sums(meters: tuple[Meter, ...], totals: Totals, prices: NDArray[np.int64]) -> tuple[int, Totals]:
    """A broken twin: running sums in int64, which wrap."""
    holds = np.zeros(prices.shape[1], dtype=np.bool_)
    for meter, row in zip(meters, prices, strict=True):
        if meter.limit is not None and meter.clock != "delta":
            holds |= np.cumsum(row) <= meter.limit
    return int(np.count_nonzero(holds)), totals


def first_refusal(many: Many, epsilon: str, rule: str = "basic") -> int:
    """How many of ten million equal requests are admitted at (1000, 1e-6)."""
    compiled = compile_policy(Policy(1000, 1e-6, rule=rule))
    prices = repeated(price(compiled, PureDP(epsilon)).amounts, 10**7)
    return many(compiled.meters, compiled.start, prices)[0]


@pytest.mark.parametrize(("epsilon", "admitted"), [("0.001", 10**6), ("100", 10), ("999.999999999999999", 1)])
def test_ten_million_requests_stop_at_the_right_one(epsilon: str, admitted: int) -> None:
    assert first_refusal(decide_many, epsilon) == admitted


def test_sums_that_wrap_are_caught() -> None:
    """Negative control: with plain int64 sums requests of 100-DP are admitted again once the sum is negative."""
    assert first_refusal(plain_sums, "100") != 10


def test_many_small_requests_under_the_papers_rule() -> None:
    compiled = compile_policy(Policy(1, 1e-6, rule="paper"))
    prices = repeated(price(compiled, PureDP("0.001")).amounts, 10**6)
    admitted, totals = decide_many(compiled.meters, compiled.start, prices)
    assert admitted == 34937  # floor(y* / 1e-6)
    assert totals.steps == admitted
    assert totals.amounts[1] == admitted * 10**12
    assert not odo.decide(compiled.meters, totals, price(compiled, PureDP("0.001"))).admitted
