"""Notes: what an admitted request changes and would not be seen is said, with the numbers that `largest` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context, Decimal
from fractions import Fraction
from typing import Any, ClassVar

import mpmath
import numpy as np
import pytest

from odograph import GDP, RDP, ZCDP, ApproxDP, Guarantee, Policy, PureDP, compile_policy, parallel
from odograph.core import planning
from odograph.core.filters import Exact, Renyi, SmoothMeter, Zcdp
from odograph.core.filters.smooth import Smooth, effective_reserve
from odograph.core.gate import decide
from odograph.core.guarantees import Mechanism, register, unregister
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.meters import EpsilonMeter, IntrinsicMeter
from odograph.core.planning import MOST_FALLS, AccountState, ask, largest, note_prefix, notes_on, quote, watched
from odograph.core.policy import Compiled

TARGET = (1, 1e-6)
ENDS = "this request has no epsilon, so the plain sum of epsilons no longer counts"
SMALL = RDP((2, 64), ("0.000002", "0.00007"))
DOWN = Context(prec=4, rounding=ROUND_DOWN)


def fresh(policy: Policy, **options: Any) -> AccountState:
    compiled = compile_policy(policy, **options)
    return AccountState("own", compiled, compiled.start)


def plain() -> AccountState:
    return fresh(Policy(*TARGET))


def digits(size: object) -> str:
    """Round a decimal down to four digits."""
    return f"{float(DOWN.create_decimal(Decimal(repr(size)))):g}"


def sizes(path: Sequence[AccountState], after: Sequence[AccountState], kind: type[Guarantee]) -> str:
    """Say what `largest` gave before and gives after."""
    found = [largest(states, kind) for states in (path, after)]
    return " to ".join("0" if one is None else digits(getattr(one, one.size)) for one in found)


def after(path: Sequence[AccountState], cost: Guarantee) -> list[AccountState]:
    return [
        state._replace(totals=decide(state.compiled.meters, state.totals, state.compiled.price(cost)).totals_after)
        for state in path
    ]


def said(state: AccountState, cost: Guarantee) -> tuple[str, ...]:
    decision = ask(state, cost)
    assert decision.admitted
    assert decision.notes == notes_on(state, decision._replace(notes=()))
    assert str(decision).endswith("".join(f"; {note}" for note in decision.notes))
    assert decision.to_dict()["notes"] == [*decision.notes]
    return decision.notes


# What ends.


def check_first_gaussian(first: Guarantee) -> None:
    state = plain()
    assert said(state, PureDP("0.1")) == ()
    (then,) = after([state], first)
    falls = f"the largest single pure request falls from {sizes([state], [then], PureDP)}"
    assert said(state, first) == (f"{ENDS}: {falls}",)
    for second in (first, GDP("0.001"), PureDP("0.01"), parallel([GDP("0.01"), PureDP("0.01")])):
        assert said(then, second) == (), second


@pytest.mark.parametrize("first", [GDP("0.04"), GDP(0), parallel([GDP("0.04"), PureDP("0.01")])], ids=str)
def test_the_first_gaussian_ends_the_plain_sum_and_the_second_ends_nothing(first: Guarantee) -> None:
    check_first_gaussian(first)


def test_the_numbers_are_those_of_the_quickstart() -> None:
    (note,) = said(plain(), GDP("0.04"))
    assert note.endswith("the largest single pure request falls from 1 to 0.5166")


def ends_again(_policy: Any, decision: Any, price: Any) -> list[int]:  # noqa: ANN401  as it is
    """The broken twin: an alternative that ended before ends again."""
    return [i for i, asked in enumerate(price.amounts) if asked is None and decision.meters[i].limit]


def test_a_note_that_is_repeated_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_ended", ends_again)
    with pytest.raises(AssertionError):
        check_first_gaussian(GDP("0.04"))


@pytest.mark.parametrize(
    "shown",
    [
        lambda size: f"{float(size):.4g}",  # to the nearest
        lambda size: f"{float(DOWN.divide(size.numerator, size.denominator)):.3g}",  # three digits
    ],
    ids=["nearest", "three digits"],
)
def test_another_rounding_is_caught(monkeypatch: pytest.MonkeyPatch, shown: Callable[[Fraction], str]) -> None:
    monkeypatch.setattr(planning, "brief_below", shown)
    with pytest.raises(AssertionError):
        check_first_gaussian(GDP("0.03"))


APPROX = ApproxDP("0.01", "1e-9")
SHARED = Policy(*TARGET, delta_steps=5e-7, filter={"gdp": "1/2", "zcdp": "1/2"})
WITHOUT_PURE = Policy(*TARGET, filter=[(Exact(takes=("gaussian",)), "1/2"), ("zcdp", "1/2")])
TWO_ORDERS = Policy(*TARGET, filter=Renyi({20: "1/2", 90: "1/2"}))
SHORT = RDP((2, 30), ("0.0001", "0.002"))


@pytest.mark.parametrize(
    ("policy", "cost", "what", "kind", "falls"),
    [
        (
            Policy(*TARGET, filter={"renyi": "1/2", "zcdp": "1/2"}),
            RDP((2, 10**4), ("0.000002", "0.00007")),
            f"{ENDS}, and no price under the zCDP filter, which no longer counts",
            PureDP,
            "pure request falls from ",
        ),
        (
            Policy(*TARGET, filter={"paper": "1/2", "zcdp": "1/2"}),
            GDP("0.01"),
            f"{ENDS}, and no price under the paper's filter, which no longer counts",
            PureDP,
            "pure request falls from ",
        ),
        (
            Policy(*TARGET, filter=[(Smooth(reserve="pure"), "1/2"), (TWO_ORDERS.filters[0][0], "1/2")]),
            RDP((2, 100), ("0.000002", "0.00007")),
            f"{ENDS}, and no price under the smooth filter, which no longer counts",
            PureDP,
            "pure request falls from ",
        ),
        (
            TWO_ORDERS,
            SHORT,
            f"{ENDS}, and no price under the Rényi filter at order 90, which no longer counts",
            PureDP,
            "pure request falls from ",
        ),
        (
            WITHOUT_PURE,
            PureDP("0.1"),
            "this request has no price under the exact filter, which no longer counts",
            GDP,
            "Gaussian request falls from mu ",
        ),
    ],
    ids=["zcdp", "paper", "smooth", "one order", "exact"],
)
def test_every_alternative_is_named_and_so_is_what_falls(
    policy: Policy, cost: Guarantee, what: str, kind: type[Guarantee], falls: str
) -> None:
    state = fresh(policy, fineness=1)
    (note,) = said(state, cost)
    assert note == f"{what}: the largest single {falls}{sizes([state], after([state], cost), kind)}"


def test_every_order_is_the_whole_filter() -> None:
    meters = compile_policy(TWO_ORDERS).meters
    orders = [i for i, meter in enumerate(meters) if meter.name.startswith("renyi")]
    assert len(orders) == 2
    text = planning._ending(meters, orders, PureDP(1))  # noqa: SLF001
    assert text == "this request has no price under the Rényi filter, which no longer counts"


def test_several_alternatives_of_several_filters_are_listed() -> None:
    state = fresh(Policy(*TARGET, filter={"renyi": "1/2", "zcdp": "1/2"}))
    orders = [meter.name.removeprefix("renyi@") for meter in state.compiled.meters if meter.name.startswith("renyi")]
    (gone,) = [order for order in orders if float(order) > 64]
    (note,) = said(state, SMALL)
    ended = f"no price under the zCDP filter and the Rényi filter at order {gone}, which no longer count"
    assert note.startswith(f"{ENDS}, and {ended}: the largest single pure request falls from 1 to ")


def test_a_kind_of_meter_without_words_is_named() -> None:
    class Other(EpsilonMeter):
        __slots__ = ()
        pricing = "other"

    assert planning._alternatives((Other("own", 1),), [0]) == ["the filter 'own'"]  # noqa: SLF001


def test_where_nothing_that_is_searched_falls_the_end_is_said_alone() -> None:
    # A Gaussian fits better on the zCDP filter than on an exact filter with a thousandth of delta.
    policy = Policy(*TARGET, filter=[(Exact(takes=("gaussian",)), "1/1000"), (Zcdp(), "999/1000")])
    (note,) = said(fresh(policy, fineness=1), PureDP("0.01"))
    assert note == "this request has no price under the exact filter, which no longer counts"


def test_of_a_mechanism_the_steps_are_said() -> None:
    state, run = fresh(TWO_ORDERS), Mechanism("sgd", 5, RDP((2, 30), ("0.00001", "0.0002")))
    path = [state], after([state], run)
    was, now = (planning._largest_size(one, run) for one in path)  # noqa: SLF001
    text = planning._falls(run, was, now)  # noqa: SLF001
    assert text == f"the largest single request of 'sgd' falls from {was} steps to {now}"
    assert [was, now] == [0 if found is None else found.steps for found in (largest(one, run) for one in path)]


@pytest.mark.parametrize(("beside", "notes"), [([], 0), ([("zcdp", "1/2")], 1)], ids=["menu alone", "and zcdp"])
def test_under_a_menu_alone_there_is_no_plain_sum_to_end(beside: list[tuple[str, str]], notes: int) -> None:
    losses = LossDistribution(-1, np.array([0.475, 0.0, 0.525]), 0.0)
    menu = [MenuItem("response", 1, 0.1, (losses, losses))]
    filters: list[tuple[Any, str]] = [(Exact(takes=(), menu=menu), "1/2" if beside else "1"), *beside]
    state = fresh(Policy(*TARGET, filter=filters), fineness=1)
    assert len(said(state, Mechanism("response"))) == notes


def test_an_alternative_without_room_does_not_end() -> None:
    state = plain()
    i = state.compiled.index(EpsilonMeter)
    totals = state.totals._replace(amounts=(0, state.compiled.meters[i].limit, *state.totals.amounts[2:]))  # type: ignore[arg-type]
    assert said(state._replace(totals=totals), GDP("0.01")) == ()


def test_a_refusal_and_a_price_without_a_request_have_no_notes() -> None:
    state = plain()
    assert ask(state, GDP(7)).notes == ()
    assert notes_on(state, ask(state, GDP(7))) == ()
    assert notes_on(state, ask(state, GDP("0.04"))._replace(request=None)) == ()


# Trees.


def test_the_accounts_above_have_notes_of_their_own_with_their_own_numbers() -> None:
    top = fresh(Policy("0.5", 1e-6))._replace(name="top")
    (spent,) = after([top], PureDP("0.05"))
    path, cost = [spent, plain()], GDP("0.04")
    then = after(path, cost)
    decision = ask(path, cost)
    falls = "the largest single pure request falls from "
    assert decision.notes == (
        f"{ENDS}: {falls}{sizes(path, then, PureDP)}",
        f"for 'top': {ENDS}: {falls}{sizes(path[:1], then[:1], PureDP)}",
    )
    assert sizes(path, then, PureDP).startswith("0.45 to ")  # the account above has no more
    assert notes_on(path, decision, named=True)[0].startswith(note_prefix("own"))
    assert ask(then, cost).notes == ()
    # What ended above only is said of the account above.
    (note,) = ask([spent, then[1]], cost).notes
    assert note == decision.notes[1]


def test_what_falls_is_searched_for_the_first_few_accounts_only() -> None:
    path = [plain()._replace(name=f"n{i}") for i in range(MOST_FALLS + 2)]
    notes = ask(path, GDP("0.04")).notes
    assert [": the largest" in note for note in notes] == [True] * MOST_FALLS + [False] * 2
    assert notes[-1] == f"for 'n0': {ENDS}"
    quoted = quote(path, [GDP("0.04"), GDP("0.04")])
    assert [one.notes for one in quoted.decisions] == [notes, ()]
    assert ": the largest" not in notes_on(path, ask(path, GDP("0.04")), 0)[0]


def test_a_quote_says_which_of_the_requests_it_is() -> None:
    state = plain()
    quoted = quote(state, [PureDP("0.1"), GDP("0.04"), GDP("0.03")])
    first, second, third = quoted.decisions
    assert (first.notes, third.notes) == ((), ())
    (then,) = after([state], PureDP("0.1"))
    assert second.notes == said(then, GDP("0.04"))
    assert str(quoted) == f"all 3 admitted; number 2: {second.notes[0]}; the last is {third}"
    assert quoted.to_dict()["decisions"][1]["notes"] == [*second.notes]
    last = quote(state, [PureDP("0.1"), GDP("0.04")])
    assert str(last) == f"all 2 admitted; the last is {last.decisions[1]}"
    assert str(last).endswith(second.notes[0])


# Far more than the intrinsic time.

PURE = compile_policy(Policy(*TARGET, filter=Smooth(reserve="pure")))


def large(times: str) -> str:
    return f"charged {times} times its intrinsic time: it is large for this policy's reserve"


def reserve_of(compiled: Compiled) -> Fraction:
    meter = compiled.meter(SmoothMeter)
    return meter.reserve * meter.quantum


def gone(compiled: Compiled) -> AccountState:
    """Return an account whose plain sum of epsilons has ended."""
    return after([AccountState("own", compiled, compiled.start)], GDP("0.001"))[0]


# The price is at most 1.24 times 2 rho where there is one, up to rho = w.
@pytest.mark.parametrize("part", ["1/9", "1/2", "1"])
def test_a_zcdp_step_that_has_a_price_is_never_charged_half_as_much_again(part: str) -> None:
    cost = ZCDP(Fraction(part) * reserve_of(PURE))
    assert said(gone(PURE), cost) == ()
    (first,) = said(AccountState("", PURE, PURE.start), cost)
    assert first.partition(":")[0] == ENDS


def test_a_request_that_is_cheaper_on_another_alternative_is_not() -> None:
    compiled = compile_policy(Policy(*TARGET, filter=[(Smooth(), "1/2"), (Renyi({20: 1}), "1/2")]), fineness=1)
    order = compiled.meter(SmoothMeter).order
    assert order is not None
    cost = RDP((20, order), ("0.0005", "0.02"))
    told = (large(f"{renyi_times(compiled, Fraction('0.02')):.4g}"),)
    state = gone(compiled)
    assert said(state, cost) == ()
    smooth, renyi = (next(i for i, m in enumerate(compiled.meters) if m.pricing == p) for p in ("smooth", "renyi"))
    assert smooth in watched(compiled, cost, compiled.price(cost))
    # Once the other has ended or is full, the smooth filter is what counts; and not if it is itself over its limit.
    ended = tuple(1 if i == renyi else count for i, count in enumerate(state.totals.unpriced))
    assert said(state._replace(totals=state.totals._replace(unpriced=ended)), cost) == told
    for i, expected in ((renyi, told), (smooth, ())):
        amounts = [*state.totals.amounts]
        amounts[i] = compiled.meters[i].limit or 0
        assert said(state._replace(totals=state.totals._replace(amounts=tuple(amounts))), cost) == expected


def test_a_smooth_filter_that_has_ended_is_not_mentioned() -> None:
    policy = Policy(*TARGET, filter=[(Smooth(reserve="pure"), "1/2"), ("zcdp", "1/2")])
    compiled = compile_policy(policy, fineness=1)
    dear = ZCDP(Fraction(11, 10) * reserve_of(compiled))  # it has no smooth price
    (state,) = after([gone(compiled)], dear)
    assert said(state, ZCDP(Fraction(9, 10) * reserve_of(compiled))) == ()


def renyi_times(compiled: Compiled, divergence: Fraction) -> float:
    """Return the price of a divergence over its intrinsic time, solved with 30 digits."""
    meter = compiled.meter(SmoothMeter)
    assert meter.order is not None
    with mpmath.workdps(30):
        a, w = (
            mpmath.mpf(meter.order.numerator) / meter.order.denominator,
            mpmath.mpf(effective_reserve(meter.quantum, meter.reserve, meter.order)),
        )
        d = mpmath.mpf(divergence.numerator) / divergence.denominator
        ratio = mpmath.expm1((a - 1) * d) / (a * (a - 1))

        def excess(s: mpmath.mpf) -> mpmath.mpf:
            moved = ratio * mpmath.exp(s / 8)
            return 2 * moved + moved**2 / w - s

        return float(mpmath.findroot(excess, 2 * ratio) / (2 * d / a))


def test_curves_are_compared_with_the_zcdp_step_of_their_divergence() -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve="mixed")), fineness=1)
    order, state = compiled.meter(SmoothMeter).order, gone(compiled)
    assert order is not None
    curve = RDP((order,), ("0.02",))
    expected = large(f"{renyi_times(compiled, Fraction('0.02')):.4g}")
    assert said(state, curve) == said(state, Mechanism("sgd", 3, curve)) == (expected,)
    assert said(state, parallel([curve, SMALL, curve])) == (expected,)
    assert said(state, parallel([curve, PureDP("0.01")])) == (expected,)
    assert said(state, SMALL) == ()
    assert said(state, parallel([curve, GDP("0.2")])) == ()  # the Gaussian is dearer, and charged its intrinsic time
    assert said(state, RDP((2, 100), (0, 0))) == ()


def test_of_two_parts_of_a_person_who_is_replaced_both_count() -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve="mixed"), neighbors="replace-one"), fineness=1)
    order, state = compiled.meter(SmoothMeter).order, gone(compiled)
    assert order is not None
    curve = RDP((order,), ("0.015",))
    (one,), (two,) = said(state, curve), said(state, parallel([curve, curve, SMALL]))
    assert one == two
    listed = planning._curve_time(Mechanism("sgd", 1, curve), order, compiled)  # noqa: SLF001
    assert listed is None  # its curve is for persons who are added or removed
    assert planning._curve_time(parallel([Mechanism("sgd", 1, curve), curve]), order, compiled) is None  # noqa: SLF001


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Implying(Guarantee):
    """A kind that is known by two curves."""

    kind: ClassVar[str] = "implying"
    order: str

    def implies(self) -> tuple[Guarantee, ...]:
        return RDP((self.order,), ("0.02",)), RDP((self.order,), ("0.03",))


@pytest.fixture
def implying() -> Iterator[type[Implying]]:
    yield register(Implying)
    unregister("implying")


def test_a_kind_that_implies_others_is_compared_with_the_cheapest(implying: type[Implying]) -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve="mixed")), fineness=1)
    state, order = gone(compiled), str(compiled.meter(SmoothMeter).order)
    (note,) = said(state, implying(order))
    assert (note,) == said(state, RDP((order,), ("0.02",)))


def test_one_unit_of_rounding_is_not_large() -> None:
    compiled = compile_policy(Policy(*TARGET, filter=Smooth(reserve="mixed")), fineness=1)
    i = compiled.index(IntrinsicMeter)
    for cost in (PureDP("1e-9"), PureDP("1e-18"), GDP("1e-9"), ZCDP("1e-18"), PureDP(0), PureDP("0.03")):
        price = compiled.price(cost)
        assert price.amounts[i] is not None
        assert watched(compiled, cost, price) == (() if isinstance(cost, PureDP) else (compiled.index(EpsilonMeter),))
