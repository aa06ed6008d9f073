from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import odograph as odo
from odograph import Policy, Price, PureDP, Totals, compile_policy, decide, decide_many, price
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


@settings(max_examples=400)
@given(batches())
def test_many_decide_as_one_after_the_other(batch: tuple[Totals, NDArray[np.int64]]) -> None:
    totals, prices = batch
    assert decide_many(METERS, totals, prices) == in_turn(METERS, totals, prices)


@given(batches(NEAR))
@example(CLOSE)
def test_many_decide_as_one_after_the_other_just_under_the_ceiling(batch: tuple[Totals, NDArray[np.int64]]) -> None:
    totals, prices = batch
    assert decide_many(METERS, totals, prices) == in_turn(METERS, totals, prices)


def test_chunks_leave_no_seam() -> None:
    rng = np.random.default_rng(3)
    count = 100_000
    prices = rng.integers(0, 3, size=(len(METERS), count), dtype=np.int64)
    prices[0] = 0
    prices[1, 70_000] = -1
    prices[3, 40_000] = CEILING
    for limit in (10**15, 32_768, 32_767, 65_536, 99_999):
        meters = (*METERS[:4], Meter("zcdp", "intrinsic", limit))
        assert decide_many(meters, Totals.zero(meters), prices) == in_turn(meters, Totals.zero(meters), prices)


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
