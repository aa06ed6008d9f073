"""What the gate decides, and what a decision says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from odograph import RDP, Accountant, Decision, Guarantee, Policy, PureDP, compile_policy
from odograph.core.filters import ExactMeter, PaperMeter, ZcdpMeter
from odograph.core.fixed_point import CEILING
from odograph.core.gate import Price, Totals, decide
from odograph.core.guarantees import MOST_DIFFERENT, MOST_POINTS, Mechanism, Parallel
from odograph.core.meters import DeltaMeter, EpsilonMeter, IntrinsicMeter, Meter
from odograph.core.planning import AccountState, how_many
from odograph.core.policy import Compiled
from odograph.core.value_iteration import FAMILIES
from odograph.display import badge
from odograph.errors import InvalidArgument

METERS = (
    DeltaMeter("delta", 10**6),
    EpsilonMeter("epsilon", 10**15),
    IntrinsicMeter("intrinsic", None),
    ExactMeter("exact", CEILING, Fraction(1), FAMILIES),
    ZcdpMeter("zcdp", CEILING - 1000),
)


# What a decision says.

SAID = (
    DeltaMeter("delta", 2 * 10**12),
    EpsilonMeter("epsilon", 10**15),
    IntrinsicMeter("intrinsic", None),
    PaperMeter("paper", 5 * 10**14),
)
HALF_SPENT = Totals((10**12, 5 * 10**14, 7, 2 * 10**14), (0,) * 4, 3)


def said(asked: tuple[int | None, ...], totals: Totals = HALF_SPENT, **changes: Any) -> Decision:
    return decide(SAID, totals, Price(asked), PureDP("0.25"))._replace(**changes)


def test_an_admission_says_what_is_left_on_the_meters_that_still_count() -> None:
    decision = said((0, 25 * 10**13, 1, 10**14))
    assert str(decision) == "admitted: PureDP(0.25); 40% of the budget is left"
    assert str(decision._replace(request=None)) == "admitted: the request; 40% of the budget is left"
    assert str(said((0, None, 1, 10**14))) == "admitted: PureDP(0.25); 40% of the budget is left"
    assert str(said((0, 5 * 10**14, 1, 10**15))) == "admitted: PureDP(0.25); none of the budget is left"
    assert decision.part_left == pytest.approx(0.4)
    assert decision.spent == {"delta": 1e-6, "epsilon": 0.5, "paper": 0.2}
    assert decision.asked == {"delta": 0.0, "epsilon": 0.25, "paper": 0.1}
    assert decision.left == {"delta": 1e-6, "epsilon": 0.25, "paper": 0.2}
    missing = said((0, None, 1, 10**14))
    assert missing.asked == {"delta": 0.0, "epsilon": None, "paper": 0.1}
    assert missing.left == {"delta": 1e-6, "epsilon": 0.0, "paper": 0.2}


TOO_MUCH = (0, 6 * 10**14, 1, 4 * 10**14)
PAPER = "60% of the budget is left; PureDP(0.25) needs 80%"
BOTH = PAPER  # which has more room than epsilon
NEARER = (  # epsilon, where the paper's filter is far away
    "60% of the budget is left (50% by the meter that comes nearest); PureDP(0.25) needs 60%"
)
NEVER = "No request of this kind fits"
NO_MORE = f"{NEVER} any more"
NO_SIZE = "A curve has no single size, so no smaller one is offered"
ALL_SPENT = "none of the budget is left"
REFUSALS: list[tuple[Decision, str]] = [
    (said(TOO_MUCH), f"refused: {BOTH}. {NO_MORE}"),
    (said(TOO_MUCH, request=None), f"refused: {BOTH.replace('PureDP(0.25)', 'the request')}. {NO_MORE}"),
    (
        said(TOO_MUCH, account="us", largest=PureDP("0.123456")),
        f"refused by 'us': {BOTH}. The largest that fits is PureDP(0.1234)",
    ),
    (said(TOO_MUCH, searched=False), f"refused: {BOTH}. A smaller request was not searched for"),
    (
        said(TOO_MUCH, request=RDP((2,), (1,))),
        f"refused: {BOTH.replace('PureDP(0.25)', str(RDP((2,), (1,))))}. {NO_SIZE}",
    ),
    (said((0, 6 * 10**14, 1, 10**15)), f"refused: {NEARER}. {NO_MORE}"),
    (said((0, None, 1, 4 * 10**14)), f"refused: {PAPER}. {NO_MORE}"),
    (said((0, None, 1, None)), f"refused: PureDP(0.25) has no price on what still counts of the policy. {NO_MORE}"),
    (said(TOO_MUCH, HALF_SPENT._replace(unpriced=(0, 1, 0, 0))), f"refused: {PAPER}. {NO_MORE}"),
    (said(TOO_MUCH, HALF_SPENT._replace(unpriced=(0, 1, 0, 1))), f"refused: {ALL_SPENT}. {NO_MORE}"),
    (
        said(TOO_MUCH, HALF_SPENT._replace(amounts=(0, 10**15, 7, 5 * 10**14))),
        f"refused: {ALL_SPENT}; PureDP(0.25) needs 60%. {NO_MORE}",
    ),
    # An alternative that is used up says nothing of what fits, as long as another is not.
    (said(TOO_MUCH, HALF_SPENT._replace(amounts=(0, 10**15, 7, 2 * 10**14))), f"refused: {PAPER}. {NO_MORE}"),
    # What fits is not named: here epsilon, to the last unit.
    (
        said((10**12 + 1, 5 * 10**14, 1, 4 * 10**14)),
        f"refused: PureDP(0.25) needs a delta of 1.001e-06, and 1e-06 is left for steps (delta_steps). {NO_MORE}",
    ),
    (
        decide((DeltaMeter("delta", 0), *SAID[1:]), Totals.zero(SAID), Price((10**9, 1, 1, 1))),
        (
            "refused: the request needs a delta of 1e-09, and the policy sets none aside for steps (delta_steps is"
            f" 0). {NEVER}"
        ),
    ),
    (
        decide((SAID[0], replace(SAID[1], limit=0)), Totals.zero(SAID[:2]), Price((0, 10**15))),
        f"refused: {ALL_SPENT}. {NEVER}",
    ),
    (
        decide((replace(SAID[0], limit=1), SAID[1]), Totals.zero(SAID[:2]), Price((10**18, 1))),
        f"refused: the request needs a delta of 1, and 1e-18 is left for steps (delta_steps). {NEVER}",
    ),
    (
        decide((replace(SAID[0], limit=1), SAID[1]), Totals.zero(SAID[:2]), Price((10**18, 10**18))),
        (
            "refused: the request needs a delta of 1, and 1e-18 is left for steps (delta_steps); 100% of the budget"
            f" is left; the request needs 100,000%. {NEVER}"
        ),
    ),
]


def test_a_decision_explains_itself_by_its_meters() -> None:
    refused = said((0, 6 * 10**14, 1, None), HALF_SPENT._replace(unpriced=(0, 0, 0, 1)))
    assert refused.explain().splitlines() == [
        str(refused),
        "  delta    1e-06 of 2e-06 spent, 0 asked, 1e-06 left",
        "  epsilon  0.5 of 1 spent, 0.6 asked, 0.1 too much",
        "  paper    no longer counts: an earlier step has no price here",
    ]
    admitted = said((0, 5 * 10**14, 1, None))
    assert admitted.explain().splitlines()[2:] == [
        "  epsilon  0.5 of 1 spent, 0.5 asked, 0 left",
        "  paper    0.2 of 0.5 spent; this request has no price here, so it no longer counts",
    ]


@given(st.fractions(0, 1, max_denominator=10**30), st.fractions(0, 1, max_denominator=10**30))
def test_what_is_left_is_shown_as_less_than_what_a_refused_request_needs(spent: Fraction, more: Fraction) -> None:
    limit = 10**15
    total = int(spent * limit)
    asked = limit - total + 1 + int(more * limit)
    text = str(decide(SAID[:2], Totals((0, total), (0, 0)), Price((0, asked))))
    if total < limit:
        if "less than 0.01%" in text:
            assert limit - total < limit / 10_000
            assert ("needs more" in text) == (asked < limit / 10_000)
            return
        left, needs = (float(part.replace(",", "")) for part in re.findall(r"([0-9.,]+)%", text))
        assert left < needs
        assert left <= 100 * (limit - total) / limit <= 1.2 * left
        assert needs / 1.2 <= 100 * asked / limit <= needs * (1 + 1e-12)


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
    for other in (Totals.zero(METERS[:-1]), Totals.zero((*METERS, METERS[-1]))):
        with pytest.raises(ValueError, match="zip"):
            decide(METERS, other, zero)
        with pytest.raises(ValueError, match="zip"):
            other.without(zero)
        with pytest.raises(ValueError, match="zip"):
            totals._replace(amounts=other.amounts).without(zero)
        with pytest.raises(ValueError, match="zip"):
            totals._replace(unpriced=other.unpriced).without(zero)
    with pytest.raises(ValueError, match="zip"):
        decide(METERS, totals, Price((0,)))


def test_a_total_may_reach_the_ceiling_and_not_pass_it() -> None:
    meters = (DeltaMeter("delta", 10), EpsilonMeter("epsilon", CEILING))
    totals = Totals((0, CEILING - 1), (0, 0))
    reached, passed = (decide(meters, totals, Price((0, asked))) for asked in (1, 2))
    assert (reached.admitted, reached.totals_after.amounts, reached.price) == (True, (0, CEILING), Price((0, 1)))
    assert (passed.admitted, passed.totals_after, passed.price) == (False, totals, Price((0, None)))


def test_prices_and_totals_are_written_as_they_are_stored() -> None:
    assert Price((12, 0, None, 7)).to_text() == "12 0 - 7"
    assert Totals((1, 2), (0, 3), 4).to_text() == "4;1 2;0 3"


def test_an_admission_needs_no_search() -> None:
    assert said((0, 1, 1, 1)).searched


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Mechanism("m", 1, RDP((*range(2, 2 + MOST_POINTS),), (1,) * MOST_POINTS)), NO_MORE),
        (
            Mechanism("m", 1, RDP((*range(2, 3 + MOST_POINTS),), (1,) * (MOST_POINTS + 1))),
            "With a curve of more than",
        ),
        (Parallel(tuple(PureDP(1 + i) for i in range(MOST_DIFFERENT))), NO_MORE),
        (Parallel(tuple(PureDP(1 + i) for i in range(MOST_DIFFERENT + 1))), "With more than 16 different parts"),
        (Parallel((PureDP(1), Mechanism("m"))), "Parts that are curves or mechanisms have no single size"),
        (Parallel((PureDP(1), RDP((2,), (1,)))), "Parts that are curves or mechanisms have no single size"),
    ],
    ids=range(6),
)
def test_a_refusal_without_an_offer_says_why(request_: Guarantee, reason: str) -> None:
    refusal = decide(SAID, HALF_SPENT, Price((0, 10**16, 1, 10**16)), request_)
    assert f". {reason}" in str(refusal)


def test_a_price_may_be_zero_or_missing_but_not_negative() -> None:
    assert Price((0, None, 3)).times(4) == Price((0, None, 12))
    with pytest.raises(InvalidArgument, match="must not be negative"):
        Price((0, None, -1))


@st.composite
def tight(draw: st.DrawFn) -> tuple[tuple[Meter, ...], Totals, NDArray[np.int64]]:
    """Meters whose limits are met exactly again and again: a few units, from nothing or just under the ceiling."""
    floors = [0, *(draw(st.sampled_from([0, CEILING - 6])) for _ in range(3))]
    kinds: list[Callable[..., Meter]] = [
        DeltaMeter,
        *(draw(st.sampled_from([EpsilonMeter, PaperMeter, ZcdpMeter])) for _ in range(3)),
    ]
    limits = [draw(st.integers(0, 6)), *(draw(st.one_of(st.none(), st.integers(0, 6))) for _ in range(3))]
    meters = tuple(
        kind("a meter", None if limit is None else floor + limit)
        for kind, limit, floor in zip(kinds, limits, floors, strict=True)
    )[: draw(st.integers(1, 4))]
    amounts = tuple(floor + draw(st.integers(0, 6)) for floor in floors[: len(meters)])
    unpriced = tuple(draw(st.sampled_from([0, 0, 0, 1])) for _ in meters)
    count = draw(st.integers(1, 6))
    asked = st.sampled_from([0, 0, 1, 1, 2, 3, -1, CEILING])
    rows = [[draw(asked) for _ in range(count)] for _ in meters]
    return meters, Totals(amounts, unpriced), np.array(rows, dtype=np.int64)


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


def repeated(amounts: Sequence[int | None], count: int) -> NDArray[np.int64]:
    """The same price `count` times, without the memory of so many columns."""
    column = np.array([[-1 if amount is None else amount] for amount in amounts], dtype=np.int64)
    return np.broadcast_to(column, (len(amounts), count))


def plain_sums(compiled: Compiled, cost: PureDP) -> int:
    """Count how many of ten million equal requests a broken twin admits: running sums in int64, which wrap."""
    holds = np.zeros(10**7, dtype=np.bool_)
    for meter, row in zip(compiled.meters, repeated(compiled.price(cost).amounts, 10**7), strict=True):
        if meter.limit is not None and not meter.counts_delta:
            holds |= np.cumsum(row) <= meter.limit
    return int(np.count_nonzero(holds))


@pytest.mark.parametrize(("epsilon", "admitted"), [("0.001", 10**6), ("100", 10), ("999.999999999999999", 1)])
def test_equal_requests_stop_at_the_right_one(epsilon: str, admitted: int) -> None:
    compiled = compile_policy(Policy(1000, 1e-6, filter="basic"))
    assert how_many(AccountState("", compiled, compiled.start), PureDP(epsilon)) == admitted


def test_sums_that_wrap_are_caught() -> None:
    """Negative control: with plain int64 sums requests of 100-DP are admitted again once the sum is negative."""
    assert plain_sums(compile_policy(Policy(1000, 1e-6, filter="basic")), PureDP("100")) != 10


def test_many_small_requests_under_the_papers_filter() -> None:
    compiled = compile_policy(Policy(1, 1e-6, filter="paper"))
    price = compiled.price(PureDP("0.001"))
    totals = compiled.start
    for _ in range(34937):  # floor(y* / 1e-6)
        decision = decide(compiled.meters, totals, price)
        assert decision.admitted
        totals = decision.totals_after
    assert totals.steps == 34937
    assert totals.amounts[compiled.index(EpsilonMeter)] == 34937 * 10**12
    assert not decide(compiled.meters, totals, price).admitted


@given(st.integers(0, 10**15), st.integers(0, 1000))
def test_what_is_left_of_an_epsilon_does_not_show_the_tolerance(spent: int, tolerance: int) -> None:
    epsilon = Fraction(spent // 10**11, 10**4)  # a total that people type
    meters = (DeltaMeter("delta", 10), EpsilonMeter("epsilon", 10**15 + tolerance))
    left = standing_left(meters, int(epsilon * 10**15))
    assert left == float(1 - epsilon)
    assert standing_left(meters, spent) <= (10**15 - spent + tolerance) / 1e15


def standing_left(meters: tuple[Meter, ...], spent: int) -> float:
    return decide(meters, Totals((0, spent), (0, 0)), Price((0, 0))).left["epsilon"]


def test_what_is_left_is_shown_without_the_tolerance_in_every_form() -> None:
    account = Accountant(Policy(1, 1e-6))
    account.spend(PureDP(0.25))
    assert account.describe()["meters"]["epsilon"]["left"] == 0.75
    assert "epsilon        0.25 of 1 spent, 0 asked, 0.75 left" in account.decide(PureDP(0)).explain()


def test_a_decision_is_marked_by_its_outcome() -> None:
    account = Accountant(Policy(1, 0, filter="basic"), name="census")
    fits, refused = (account.decide(PureDP(size)) for size in (1, 2))
    assert fits._repr_html_().count(badge("admitted", "good")) == 1
    assert refused._repr_html_().count(badge("refused by 'census'", "bad")) == 1
    assert (fits.left_text, refused.left_text) == ("none of the budget is left", "100% of the budget is left")
    assert "1 asked, 0 left" in fits.explain()
    assert "2 asked, 1 too much" in refused.explain()
    assert Accountant(Policy(None, 1e-6)).decide(PureDP(1)).left_text == "no limit"


# What a decision says at its edges.


def parts_spent(*totals: int, asked: tuple[int | None, ...], **changes: Any) -> Decision:
    """Decide on meters of 10^8 units each: epsilon, and a filter if there is a second total."""
    meters = (DeltaMeter("delta", 10), *SAID[1:4:2])[: len(totals) + 1]
    limited = tuple(replace(meter, limit=10**8) if i else meter for i, meter in enumerate(meters))
    return decide(limited, Totals((0, *totals), (0,) * len(limited), 1), Price((0, *asked)))._replace(**changes)


@pytest.mark.parametrize(
    ("left", "asked", "text"),
    [
        (10_000, 10**7, "0.01% of the budget is left; the request needs 10%"),
        (9_999, 10**7, "less than 0.01% of the budget is left; the request needs 10%"),
        (15_000, 10**7, "0.015% of the budget is left; the request needs 10%"),
        (12_345_678, 98_765_432, "12% of the budget is left; the request needs 99%"),
        (9_999, 10_000, "less than 0.01% of the budget is left; the request needs 0.01%"),
        (9_000, 9_999, "less than 0.01% of the budget is left; the request needs more"),
        (1, 10**8, "less than 0.01% of the budget is left; the request needs 100%"),
    ],
)
def test_the_last_crumbs_of_a_budget_have_no_digits(left: int, asked: int, text: str) -> None:
    assert str(parts_spent(10**8 - left, asked=(asked,))) == f"refused: {text}. {NO_MORE}"


def test_a_little_less_than_a_ten_thousandth_is_a_crumb() -> None:
    left = 99_995 * 10**6  # of 10^15
    decision = decide(SAID[:2], Totals((0, 10**15 - left), (0, 0)), Price((0, 10**15)))
    assert str(decision).startswith("refused: less than 0.01% of the budget is left")


@pytest.mark.parametrize(
    ("spent", "asked", "text"),
    [
        # The filter has 80% left and needs 3 times that; epsilon has 50% left and needs 1.2 times that: much nearer.
        (
            (50, 20),
            (60, 240),
            "80% of the budget is left (50% by the meter that comes nearest); the request needs 60%",
        ),
        # Twice as near, to the unit, is not much nearer; and a unit more is.
        ((50, 20), (60, 192), "80% of the budget is left; the request needs 200%"),
        (
            (50, 20),
            (60, 193),
            "80% of the budget is left (50% by the meter that comes nearest); the request needs 60%",
        ),
        # Epsilon is nearer by what it has left, not by what it needs.
        ((10, 0), (180, 170), "100% of the budget is left; the request needs 170%"),
    ],
)
def test_a_refusal_is_told_by_another_meter_only_if_it_comes_much_nearer(
    spent: tuple[int, ...], asked: tuple[int, ...], text: str
) -> None:
    decision = parts_spent(*[10**6 * part for part in spent], asked=tuple(10**6 * part for part in asked))
    assert str(decision) == f"refused: {text}. {NO_MORE}"


def test_what_counts_no_longer_is_nothing_left() -> None:
    none_count = said(TOO_MUCH, HALF_SPENT._replace(unpriced=(0, 1, 0, 1)))
    assert none_count.part_left == 0
    assert none_count.left_text == ALL_SPENT
    assert [part["counts"] for part in none_count.standing().values()] == [True, False, False]
    passed = said(TOO_MUCH, Totals((10**12, 2 * 10**15, 7, 10**15), (0,) * 4, 3))  # as a damaged ledger may say
    assert passed.part_left == 0
    assert passed.left_text == ALL_SPENT


def test_a_limit_of_nothing_is_explained() -> None:
    decision = decide((DeltaMeter("delta", 0), SAID[1]), Totals.zero(SAID[:2]), Price((0, 1)))
    assert "  delta    0 of 0 spent, 0 asked, 0 left" in decision.explain().splitlines()


def test_only_a_request_without_a_price_anywhere_is_unproven() -> None:
    nowhere, somewhere = said((None,) * 4), said((None, None, None, 10**18))
    assert nowhere.is_unproven
    assert not somewhere.is_unproven
    assert not said((0, 1, 1, 1)).is_unproven
    assert str(nowhere._replace(notes=("no theorem covers it", "but another"))) == (
        "refused: no theorem covers it; but another"
    )
    assert str(said(TOO_MUCH, notes=("a note",))) == f"refused: {BOTH}. {NO_MORE}"


def test_a_delta_that_is_left_to_the_unit_is_not_what_is_short() -> None:
    assert str(said((10**12, *TOO_MUCH[1:]))) == f"refused: {BOTH}. {NO_MORE}"


def test_one_step_before_is_enough_for_no_more() -> None:
    assert str(said(TOO_MUCH, HALF_SPENT._replace(steps=1))).endswith("any more")
    assert not str(said(TOO_MUCH, HALF_SPENT._replace(steps=0))).endswith("any more")


def test_a_refusal_without_any_limit_names_the_odometer_or_the_delta() -> None:
    def alone(asked: int | None) -> str:
        return str(decide(SAID[:1], Totals((0,), (0,), 1), Price((asked,))))

    assert alone(1) == f"refused: no part of the odometer reads the request and every step before it. {NO_MORE}"
    assert alone(10**18) == (
        f"refused: the request needs a delta of 1, and 2e-06 is left for steps (delta_steps). {NO_MORE}"
    )
