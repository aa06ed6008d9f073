"""The kernel decides row for row what `decide` decides, and charges what it charges, to the unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from population_helpers import RULES, compiled_for

from odograph import Policy, compile_policy
from odograph.core.fixed_point import CEILING
from odograph.core.gate import Price, Totals, decide
from odograph.core.policy import Compiled
from odograph.errors import InvalidPolicy
from odograph.population.gate import SPENT, Amounts, Column, Gate, Mask, admit, admit_rows, gate_of, would_admit

Columns = list[Column]


class Admit(Protocol):
    """The kernel, or a broken twin of it."""

    def __call__(
        self, gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None
    ) -> Mask: ...


@dataclass
class Case:
    """Some people and what each is asked for."""

    compiled: Compiled
    people: list[Totals]
    prices: list[Price]

    @property
    def gate(self) -> Gate:
        return gate_of(self.compiled)

    def columns(self) -> Columns:
        return columns_of([self.gate.totals(totals) for totals in self.people], len(self.gate.limits))

    def amounts(self) -> Columns:
        return columns_of([self.gate.amounts(price) for price in self.prices], len(self.gate.limits))

    def expected(self, prices: Sequence[Price] | None = None) -> tuple[list[bool], list[list[int]]]:
        """Who is admitted, and everybody's totals after it, by `decide`."""
        asked = self.prices if prices is None else prices
        made = [decide(self.compiled.meters, *pair) for pair in zip(self.people, asked, strict=True)]
        after = [self.gate.totals(decision.totals_after) for decision in made]
        return [decision.admitted for decision in made], lists(columns_of(after, len(self.gate.limits)))

    def most(self) -> list[int]:
        """What nobody can pass by the charge."""
        pairs = zip(self.columns(), self.amounts(), strict=True)
        return [min(SPENT, max([0, *total.tolist()]) + max([0, *asked.tolist()])) for total, asked in pairs]


def columns_of(rows: Sequence[Sequence[int]], count: int) -> Columns:
    return [np.array([row[i] for row in rows], dtype=np.int64) for i in range(count)]


def lists(columns: Sequence[Column]) -> list[list[int]]:
    return [column.tolist() for column in columns]


def roomy() -> Compiled:
    """A policy whose limits are as high as any may be."""
    compiled = compiled_for("zcdp")
    return replace(
        compiled, meters=tuple([m if m.limit is None else replace(m, limit=CEILING) for m in compiled.meters])
    )


def policies() -> st.SearchStrategy[Compiled]:
    return st.sampled_from([*RULES, "roomy"]).map(lambda rule: roomy() if rule == "roomy" else compiled_for(rule))


def an_amount(limit: int | None, rng: Random) -> int:
    """So many units: few, around a limit and its half, around the ceiling, any."""
    middle = limit or 10**15
    kind = rng.randrange(7)
    if kind in (1, 2, 3):
        return max(0, (middle, middle // 2, CEILING)[kind - 1] + rng.randint(-2, 2))
    return rng.randint(0, (3, 0, 0, 0, middle, CEILING, middle // 10 + 1)[kind])


def totals_for(compiled: Compiled, rng: Random) -> Totals:
    amounts = [min(CEILING, an_amount(meter.limit, rng)) for meter in compiled.meters]
    unpriced = [rng.choice([0, 0, 0, 0, 0, 0, 1, 7]) for _ in compiled.meters]
    return Totals(tuple(amounts), tuple(unpriced), rng.randint(0, 9))


def price_for(compiled: Compiled, rng: Random) -> Price:
    """What a request can cost: nothing, no price, more than can ever be counted."""

    def one(limit: int | None) -> int | None:
        kind = rng.randrange(8)
        return None if kind == 0 else 0 if kind < 3 else 2**70 if kind == 3 else an_amount(limit, rng)

    return Price(tuple([one(meter.limit) for meter in compiled.meters]))


def randoms() -> st.SearchStrategy[Random]:
    return st.integers(0, 2**64).map(Random)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    compiled, rng, count = draw(policies()), draw(randoms()), draw(st.integers(0, 30))
    people = [totals_for(compiled, rng) for _ in range(count)]
    return Case(compiled, people, [price_for(compiled, rng) for _ in range(count)])


def check_each(kernel: Admit, case: Case, most: Sequence[int] | None = None) -> None:
    """Ask everybody for a price of their own."""
    totals, amounts = case.columns(), case.amounts()
    before = lists(amounts)
    mask = kernel(case.gate, totals, amounts, most)
    admitted, after = case.expected()
    assert mask.tolist() == admitted
    assert lists(totals) == after
    assert lists(amounts) == before


def check_same(kernel: Admit, case: Case, price: Price) -> None:
    """Ask everybody for one price."""
    totals = case.columns()
    mask = kernel(case.gate, totals, case.gate.amounts(price))
    admitted, after = case.expected([price] * len(case.people))
    assert mask.tolist() == admitted
    assert lists(totals) == after


@settings(max_examples=500)
@given(cases())
def test_a_price_for_each_person_is_decided_row_for_row_as_one_account_decides_it(case: Case) -> None:
    check_each(admit, case)
    check_each(admit, case, case.most())


@given(cases(), randoms())
def test_one_price_for_everybody_is_decided_row_for_row(some: Case, rng: Random) -> None:
    price = price_for(some.compiled, rng)
    case = Case(some.compiled, some.people, [price] * len(some.people))
    check_same(admit, case, price)
    totals = case.columns()
    assert admit(case.gate, totals, case.gate.amounts(price), case.most()).tolist() == case.expected()[0]
    assert lists(totals) == case.expected()[1]


@given(cases(), randoms())
def test_amounts_may_be_the_same_on_some_meters_and_differ_on_others(case: Case, rng: Random) -> None:
    if not case.people:
        return
    amounts: list[int | Column] = list(case.amounts())
    prices = list(case.prices)
    for column in rng.sample(range(len(amounts)), rng.randint(0, len(amounts))):
        place, first = case.gate.meters[column], prices[0]
        amounts[column] = case.gate.amounts(first)[column]
        prices = [Price((*one.amounts[:place], first.amounts[place], *one.amounts[place + 1 :])) for one in prices]
    totals = case.columns()
    mask = admit(case.gate, totals, amounts)
    assert (mask.tolist(), lists(totals)) == case.expected(prices)


@given(cases(), randoms())
def test_a_sparse_charge_is_decided_row_for_row_and_leaves_the_others_as_they_are(case: Case, rng: Random) -> None:
    rows = rng.sample(range(len(case.people)), rng.randint(0, len(case.people)))
    some = Case(case.compiled, [case.people[row] for row in rows], [case.prices[row] for row in rows])
    admitted, after = some.expected()
    for most in (None, case.most()):
        totals, untouched = case.columns(), case.columns()
        mask = admit_rows(case.gate, totals, np.array(rows, dtype=np.int64), some.amounts(), most)
        assert mask.tolist() == admitted
        assert [[column[row] for row in rows] for column in lists(totals)] == after
        for column, old in zip(totals, untouched, strict=True):
            others = [row for row in range(len(case.people)) if row not in rows]
            assert column[others].tolist() == old[others].tolist()


@given(cases(), randoms())
def test_who_would_admit_a_price_is_found_and_nobody_is_charged(case: Case, rng: Random) -> None:
    price = price_for(case.compiled, rng)
    totals = case.columns()
    mask = would_admit(case.gate, totals, case.gate.amounts(price))
    assert mask.tolist() == case.expected([price] * len(case.people))[0]
    assert lists(totals) == lists(case.columns())


@given(cases(), st.lists(st.integers(0, 11), max_size=4))
def test_charges_one_after_the_other_are_those_of_accounts(case: Case, turns: list[int]) -> None:
    """Totals that the kernel left behind decide as an account's do, however many steps had no price."""
    people, totals = list(case.people), case.columns()
    for turn in turns:
        prices = [*case.prices[turn:], *case.prices[:turn]]
        amounts = Case(case.compiled, people, prices).amounts()
        mask = admit(case.gate, totals, amounts)
        made = [decide(case.compiled.meters, *pair) for pair in zip(people, prices, strict=True)]
        assert mask.tolist() == [decision.admitted for decision in made]
        people = [decision.totals_after for decision in made]
        assert lists(totals) == lists(Case(case.compiled, people, prices).columns())


@pytest.mark.parametrize("processors", [None, 1, 2, 64])  # None: the system does not say
@pytest.mark.parametrize("count", [999, 1000, 1001, 1999, 2000, 3001, 10_000])
def test_people_at_the_borders_of_a_chunk_are_decided_as_all_others(
    count: int, processors: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People of a few dozen kinds are asked for a few prices: what becomes of each kind is decided once."""
    monkeypatch.setattr("odograph.population.gate._CHUNK", 1000)
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    rng, compiled = Random(count), compiled_for("renyi")  # noqa: S311  kinds of people, no secrets
    gate = gate_of(compiled)
    kinds = [compiled.start, *(totals_for(compiled, rng) for _ in range(60))]
    prices = [Price((0,) * len(compiled.meters)), *(price_for(compiled, rng) for _ in range(20))]
    made = [[decide(compiled.meters, kind, price) for price in prices] for kind in kinds]
    admitted = np.array([[one.admitted for one in row] for row in made])
    after = np.array([[gate.totals(one.totals_after) for one in row] for row in made])
    before, amounts = (
        np.array(rows) for rows in ([gate.totals(one) for one in kinds], [gate.amounts(one) for one in prices])
    )
    numbers = np.random.default_rng(count)
    own, asked = numbers.integers(0, len(kinds), count), numbers.integers(0, len(prices), count)
    rows, uniform = numbers.permutation(count), [int(amount) for amount in amounts[0]]
    for which in (asked, np.zeros_like(asked)):
        expected = admitted[own, which]
        assert 0 < expected.sum() < count
        each: Amounts = uniform if which is not asked else [*amounts[which].T.copy()]
        totals: Columns = [*before[own].T.copy()]
        assert np.array_equal(admit(gate, totals, each), expected)
        assert np.array_equal(np.array(totals).T, after[own, which])
        some: Columns = [*before[own].T.copy()]
        assert np.array_equal(admit_rows(gate, some, rows, [*amounts[which[rows]].T.copy()]), expected[rows])
        assert np.array_equal(np.array(some).T, after[own, which])
    assert np.array_equal(would_admit(gate, [*before[own].T.copy()], uniform), admitted[own, 0])


def test_nobody_is_admitted_from_nobody() -> None:
    gate = gate_of(compiled_for("zcdp"))
    nobody: Columns = [np.zeros(0, dtype=np.int64) for _ in gate.limits]
    assert admit(gate, nobody, [1] * len(gate.limits)).tolist() == []
    assert would_admit(gate, nobody, [1] * len(gate.limits)).tolist() == []
    assert admit_rows(gate, nobody, np.zeros(0, dtype=np.int64), nobody).tolist() == []


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("wrong", ["totals", "amounts", "most"])
def test_a_charge_that_does_not_speak_of_every_meter_is_an_error_and_charges_nobody(wrong: str, more: int) -> None:
    gate = gate_of(compiled_for("renyi"))
    sizes = {"totals": len(gate.limits), "amounts": len(gate.limits), "most": len(gate.limits)}
    sizes[wrong] += more
    totals, amounts = [np.zeros(3, dtype=np.int64) for _ in range(sizes["totals"])], [1] * sizes["amounts"]
    with pytest.raises(ValueError, match="zip"):
        admit(gate, totals, amounts, [SPENT] * sizes["most"])
    if wrong != "most":
        with pytest.raises(ValueError, match="zip"):
            would_admit(gate, totals, amounts)
    assert not np.any(totals)


def test_what_a_total_without_a_price_is_written_as_never_changes() -> None:
    assert SPENT == 2**61 + 1  # it is in the files of populations


def test_replacing_people_is_no_policy_of_a_population() -> None:
    with pytest.raises(InvalidPolicy, match="neighbors='add-remove'"):
        gate_of(compile_policy(Policy(1, "1e-6", filter="zcdp", neighbors="replace-one")))


def test_the_delta_meter_comes_first_and_meters_without_a_limit_do_not_decide() -> None:
    for rule in RULES:
        compiled = compiled_for(rule)
        gate = gate_of(compiled)
        assert compiled.meters[gate.meters[0]].counts_delta
        assert [compiled.meters[place].limit for place in gate.meters] == [*gate.limits]
        assert sum(meter.limit is not None for meter in compiled.meters) == len(gate.meters)


# Broken kernels, each of which the same check catches.


def forgets_somebody(
    gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None
) -> Mask:
    before = [column.copy() for column in totals]
    mask = admit(gate, totals, amounts, most)
    for column, old in zip(totals, before, strict=True):
        column[-1:] = old[-1:]
    return mask


def is_strict(gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None) -> Mask:
    """Compares with < where <= is right."""
    return admit(gate._replace(limits=tuple(limit - 1 for limit in gate.limits)), totals, amounts, most)


def ignores_delta(gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None) -> Mask:
    return admit(gate._replace(limits=(2 * SPENT, *gate.limits[1:])), totals, amounts, most)


def wraps(gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None) -> Mask:
    """Counts in few bits: what passes them begins again."""
    mask = admit(gate, totals, amounts, most)
    for column in totals:
        np.remainder(column, CEILING + 1, out=column)
    return mask


def passes_the_ceiling(
    gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None
) -> Mask:
    """Leaves a total past the ceiling where it is, as if everybody were known to stay below it."""
    del most
    return admit(gate, totals, amounts, (0,) * len(gate.limits))


BROKEN = [forgets_somebody, is_strict, ignores_delta, wraps, passes_the_ceiling]


@pytest.mark.parametrize("kernel", BROKEN)
def test_a_broken_kernel_is_caught(kernel: Admit) -> None:
    @settings(max_examples=1000, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(cases())
    def judged(case: Case) -> None:
        check_each(kernel, case)

    with pytest.raises(AssertionError):
        judged()


@pytest.mark.parametrize("kernel", BROKEN)
def test_a_broken_kernel_is_caught_by_one_price_too(kernel: Admit) -> None:
    @settings(max_examples=1000, database=None, phases=[Phase.generate], report_multiple_bugs=False)
    @given(cases(), randoms())
    def judged(case: Case, rng: Random) -> None:
        check_same(kernel, case, price_for(case.compiled, rng))

    with pytest.raises(AssertionError):
        judged()


def test_the_delta_meter_comes_first_wherever_a_policy_has_it() -> None:
    compiled = compiled_for("zcdp")
    moved = replace(compiled, meters=compiled.meters[::-1])
    gate = gate_of(moved)
    assert [moved.meters[i].counts_delta for i in gate.meters] == [True, *[False] * (len(gate.meters) - 1)]
    assert [moved.meters[i].limit for i in gate.meters] == [*gate.limits]
