"""Charts and other numbers of the pages: they show what the ledger says, and showing it spends nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import odograph as odo
from odograph.core.filters import FILTERS
from odograph.core.gate import decide
from odograph.core.planning import AccountState, how_many
from odograph.ledger.entries import CHARGES, price_from_text
from odograph.ledger.ledger import Ledger, LedgerAccount, states
from odograph.service.auth import Caller, Role
from odograph.service.dashboard.charts import (
    MAX_POINTS,
    ReadingHistory,
    bokeh_chart,
    reading_at_limit,
    reading_history,
    svg_chart,
)
from odograph.service.dashboard.view_models import (
    citations_for,
    data_version,
    list_entries,
    make_plan,
    read_citation,
)

POLICY = odo.Policy(1, "1e-6")
OWNER = Caller("ada", Role.OWNER, "0" * 12, None)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with odo.connect("memory://") as made:
        yield made


def drawn(account: LedgerAccount, *, compare: bool = False) -> ReadingHistory:
    return reading_history(account, account.totals, account.size - 1, compare=compare)


@pytest.mark.parametrize(("steps", "axis"), [(0, "Range1d"), (1, "DataRange1d")])
def test_before_the_first_step_the_axis_is_from_0_to_1_and_then_as_long_as_the_history(
    ledger: Ledger, steps: int, axis: str
) -> None:
    account = ledger.open_account("census", POLICY)
    for _ in range(steps):
        account.spend(odo.PureDP("0.1"))
    item = bokeh_chart(drawn(account), by_time=False, dark=False)
    assert item["doc"]["roots"][0]["attributes"]["x_range"]["name"] == axis


def replayed(account: LedgerAccount, *, leave_out_voided: bool = True) -> list[float]:
    """The readings by the long way: every charge that stands put to the gate again, from the first on."""
    entries = [past.entry for past in account.history(0, account.size)]
    voided = {entry.key for entry in entries if entry.verb == "void"} if leave_out_voided else set()
    totals, losses = account.compiled.start, [0.0]
    for entry in entries:
        if entry.verb in CHARGES and entry.request_id not in voided:
            totals = decide(account.compiled.meters, totals, price_from_text(entry.price)).totals_after
            losses.append(account.compiled.reading(totals).loss)
    return losses


def work(account: LedgerAccount, steps: Sequence[str]) -> None:
    """Spend, reserve, commit and void as a word says."""
    held = []
    for step in steps:
        if step == "spend":
            account.spend(odo.PureDP("0.01"))
        elif step == "reserve":
            held.append(account.reserve(odo.PureDP("0.02")))
        elif held:
            reservation = held.pop(0)
            reservation.commit() if step == "commit" else reservation.void("not run")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["spend", "reserve", "commit", "void"]), max_size=30))
def test_the_series_walked_back_is_the_replay_from_the_first_entry(steps: list[str]) -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", POLICY)
        work(account, steps)
        found = drawn(account)
        assert list(found.lines[0].losses) == replayed(account)
        assert found.steps == tuple(range(account.totals.steps + 1))
        assert list(found.times) == sorted(found.times)


def test_a_series_that_keeps_voided_charges_is_caught(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    work(account, ["spend", "reserve", "void", "spend"])
    losses = list(drawn(account).lines[0].losses)
    assert losses == replayed(account)
    assert losses != replayed(account, leave_out_voided=False)


def test_the_series_ends_at_the_reading(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    assert drawn(account).lines[0].losses == (0.0,)
    work(account, ["spend"] * 5)
    assert drawn(account).lines[0].losses[-1] == account.reading().loss


def test_an_account_above_shows_the_charges_of_those_below(ledger: Ledger) -> None:
    above = ledger.open_account("all", POLICY)
    ledger.open_account("jan", POLICY, parent="all")
    ledger.open_account("feb", POLICY, parent="all")
    ledger.spend({"jan": odo.PureDP("0.1"), "feb": odo.PureDP("0.2")})
    held = ledger.reserve({"jan": odo.PureDP("0.1"), "feb": odo.PureDP("0.05")})
    assert len(drawn(above).steps) == 5
    held.void("not run")
    assert drawn(above).steps == (0, 1, 2)
    assert list(drawn(above).lines[0].losses) == replayed(above)


def test_a_long_history_is_cut_and_thinned_and_keeps_its_ends(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    cost = odo.PureDP("0.0001")
    for _ in range(MAX_POINTS + 50):
        account.spend(cost)
    totals, last = account.totals, account.size - 1
    whole = states(account, totals, last)
    assert states(account, totals, last, most=30) == whole[-30:]
    found = drawn(account)
    assert len(found.steps) == MAX_POINTS
    assert (found.steps[0], found.steps[-1]) == (0, MAX_POINTS + 50)
    assert found.left_out == 0
    assert set(found.steps) <= {state.totals.steps for state in whole}


def test_the_walk_does_not_see_what_was_spent_after_it_began(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    work(account, ["spend", "reserve", "spend"])
    totals, last = account.totals, account.size - 1
    before = reading_history(account, totals, last, compare=False)
    work(account, ["spend"])
    account.pending[0].void("not run")
    assert reading_history(account, totals, last, compare=False) == before
    assert drawn(account) != before


def test_other_odometers_come_only_when_asked_for_and_are_never_covered(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    work(account, ["spend"] * 3)
    assert [line.covered for line in drawn(account).lines] == [True]
    compared = drawn(account, compare=True).lines
    assert [line.covered for line in compared] == [True, False, False, False, False]
    assert all(line.name.endswith("(informational)") for line in compared[1:])
    assert [line.losses[-1] for line in compared] == [one.loss for one in account.compare()]
    basic = ledger.open_account("b", odo.Policy(1, 0, filter="basic"))
    assert [line.name for line in drawn(basic, compare=True).lines] == ["sum of epsilons (policy's odometer)"]


def test_a_step_without_a_finite_reading_leaves_a_gap(ledger: Ledger) -> None:
    account = ledger.open_account("a", odo.Policy(1, "1e-6", delta_steps="1e-7"))
    account.spend(odo.PureDP("0.1"))
    account.spend(odo.ApproxDP("0.1", "1e-9"))
    assert math.isinf(account.reading().loss)
    found = drawn(account, compare=True)
    assert found.lines[0].losses[-1] is None
    assert found.lines[0].losses[1] is not None
    assert len(found.lines) == 1
    json.dumps(bokeh_chart(found, by_time=True, dark=True), allow_nan=False)
    points(svg_chart(found, by_time=False))


def parts(form: object, kind: str) -> list[dict[str, Any]]:
    """Every model of a kind in a document of Bokeh's."""
    if isinstance(form, dict):
        own = [form] if form.get("name") == kind and form.get("type") == "object" else []
        return own + [part for value in form.values() for part in parts(value, kind)]
    return [part for value in form for part in parts(value, kind)] if isinstance(form, list) else []


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("dark", [False, True])
def test_the_chart_is_plain_json_with_the_promise_and_no_script(ledger: Ledger, *, by_time: bool, dark: bool) -> None:
    account = ledger.open_account("a", POLICY)
    work(account, ["spend", "reserve", "spend"])
    document = json.loads(
        json.dumps(bokeh_chart(drawn(account, compare=True), by_time=by_time, dark=dark), allow_nan=False)
    )
    limit = reading_at_limit(account.compiled)
    assert limit is not None
    levels = [span["attributes"]["location"] for span in parts(document, "Span")]
    assert levels == [1.0, limit.usual]
    (band,) = parts(document, "BoxAnnotation")
    assert (band["attributes"]["bottom"], band["attributes"]["top"]) == (1.0, limit.usual)
    texts = [label["attributes"]["text"] for label in parts(document, "Label")]
    assert texts == ["promise: epsilon 1", f"usual once used up: {limit.usual:.3g}"]
    assert parts(document, "NoOverlap"), "labels of an axis that overlap on a phone are left out"
    assert len(parts(document, "LegendItem")) == 5
    assert bool(parts(document, "DatetimeAxis")) is by_time
    # A page runs no script but its own: what would need one must not be in the document.
    assert not parts(document, "CustomJS")
    assert parts({"type": "object", "name": "CustomJS", "id": "p1"}, "CustomJS")


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}polyline")  # noqa: S314  made here
    pairs = [[point.split(",") for point in line.attrib["points"].split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


@pytest.mark.parametrize("by_time", [False, True])
def test_the_plain_picture_has_a_line_for_each_odometer_inside_its_frame(ledger: Ledger, *, by_time: bool) -> None:
    account = ledger.open_account("a", POLICY)
    assert points(svg_chart(drawn(account), by_time=by_time)) == [[(0.0, 300.0)]]
    work(account, ["spend"] * 20)
    lines = points(svg_chart(drawn(account, compare=True), by_time=by_time))
    assert len(lines) == 5
    assert all(0 <= x <= 720 and 0 <= y <= 300 for line in lines for x, y in line)
    heights = [y for _, y in lines[-1]]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("rule", sorted(FILTERS))
def test_every_filter_cites_its_theorem_and_assumptions(rule: str) -> None:
    policy = odo.Policy(1, 0 if rule == "basic" else "1e-6", filter=rule)
    found = citations_for(odo.compile_policy(policy))
    assert found[0].title == f"The filter: {rule}"
    assert all(citation.summary and citation.theorem and citation.assumes for citation in found)
    silent = read_citation("x", lambda: None)
    assert (silent.theorem, silent.assumes) == ("", "")


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from(["0.01", "0.05", "0.3", "2"]),
    times=st.integers(1, 40),
    kind=st.sampled_from(["pure", "gdp"]),
    below=st.booleans(),
)
def test_what_the_planner_says_fits_is_what_the_ledger_admits_and_asking_spends_nothing(
    size: str, times: int, kind: str, *, below: bool
) -> None:
    with odo.connect("memory://") as ledger:
        ledger.open_account("top", odo.Policy("0.5", "1e-6", filter="zcdp"))
        account = ledger.open_account("a", odo.Policy(1, "1e-6", filter="zcdp"), parent="top" if below else "")
        account.spend(odo.PureDP("0.1"))
        before = ledger.checkpoint()
        found = make_plan(ledger, OWNER, "a", {"kind": kind, "size": size, "times": str(times)})
        assert found is not None
        assert ledger.checkpoint() == before
        assert found.admitted is (found.fits >= times)
        assert found.spent_after is None or found.spent_after > 0
        cost = odo.PureDP(size) if kind == "pure" else odo.GDP(size)
        admitted = 0
        while account.decide(cost) and admitted < 200:
            account.spend(cost)
            admitted += 1
        assert min(found.fits, 200) == admitted


def test_a_planner_that_forgets_the_account_above_or_spends_is_caught(ledger: Ledger) -> None:
    ledger.open_account("top", odo.Policy("0.5", "1e-6", filter="zcdp"))
    account = ledger.open_account("a", odo.Policy(1, "1e-6", filter="zcdp"), parent="top")
    cost, before = odo.PureDP("0.3"), ledger.checkpoint()
    found = make_plan(ledger, OWNER, "a", {"size": "0.3", "times": "1"})
    assert found is not None
    assert found.fits < how_many(AccountState("", account.compiled, account.totals), cost)
    account.spend(cost)
    assert ledger.checkpoint() != before


def test_the_planner_makes_a_counter_offer_in_the_terms_of_the_question(ledger: Ledger) -> None:
    account = ledger.open_account("a", odo.Policy(1, "1e-6"))
    found = make_plan(ledger, OWNER, "a", {"kind": "gaussian", "size": "1", "sensitivity": "2", "times": "10"})
    assert found is not None
    assert not found.admitted
    name, least = found.noise.split()
    assert name == "sigma"
    again = make_plan(ledger, OWNER, "a", {"kind": "gaussian", "size": least, "sensitivity": "2", "times": "10"})
    less = make_plan(
        ledger, OWNER, "a", {"kind": "gaussian", "size": str(float(least) * 0.99), "sensitivity": "2", "times": "10"}
    )
    assert again is not None
    assert less is not None
    assert again.admitted
    assert not less.admitted
    assert account.size == 1


@pytest.mark.parametrize(
    "query",
    [
        {"size": "much"},
        {"size": "-1"},
        {"size": "0.1", "times": "0"},
        {"size": "0.1", "times": "1.5"},
        {"size": "0.1", "kind": "magic"},
        {"size": "0.1", "kind": "menu:x"},
        {"size": "1", "kind": "menu:x"},
        {"size": "0", "kind": "laplace"},
        {"size": "1e-3", "kind": "approx", "delta": "2"},
    ],
)
def test_a_question_that_makes_no_sense_is_answered_with_what_is_wrong(ledger: Ledger, query: dict[str, str]) -> None:
    ledger.open_account("a", POLICY)
    found = make_plan(ledger, OWNER, "a", query)
    assert found is not None
    assert found.problem
    assert not found.admitted
    assert make_plan(ledger, OWNER, "a", {"size": " "}) is None


def test_a_plan_says_what_the_first_question_ends(ledger: Ledger) -> None:
    ledger.open_account("top", odo.Policy(1, 1e-6))
    account = ledger.open_account("a", odo.Policy(1, 1e-6), parent=ledger.account("top"))
    bound = Caller("bob", Role.ANALYST, "1" * 12, frozenset({"a"}))
    query = {"kind": "gaussian", "size": "25"}
    found, own = make_plan(ledger, OWNER, "a", query), make_plan(ledger, bound, "a", query)
    assert found is not None
    assert own is not None
    decision = account.decide(odo.GDP("0.04"))
    assert found.notes == decision.notes
    assert own.notes == decision.notes[:1]
    assert own.notes[0].endswith("the largest single pure request falls from 1 to 0.5166")
    nothing = make_plan(ledger, OWNER, "a", {"kind": "pure", "size": "0.1"})
    assert nothing is not None
    assert nothing.notes == ()


def test_a_closed_account_has_no_room_for_plans_and_the_name_of_another_is_not_told(ledger: Ledger) -> None:
    ledger.open_account("secret", POLICY)
    ledger.open_account("a", POLICY, parent="secret")
    ledger.account("secret").close()
    bound = Caller("bob", Role.ANALYST, "1" * 12, frozenset({"a"}))
    told = make_plan(ledger, bound, "a", {"size": "0.1"})
    assert told is not None
    assert "closed" in told.problem
    assert "secret" not in told.problem
    with pytest.raises(odo.errors.AccountNotFound):
        make_plan(ledger, bound, "secret", {"size": "0.1"})


def test_entries_are_listed_newest_first_filtered_and_paged_to_the_end(ledger: Ledger) -> None:
    account = ledger.open_account("a", POLICY)
    for i in range(130):
        account.spend(odo.PureDP("0.0001"), note="odd one" if i % 2 else "")
    seen: list[int] = []
    before: int | None = account.size
    while before:
        page = list_entries(ledger, OWNER, "a", account.size, {"text": "ODD", "verb": "spend", "before": str(before)})
        seen += [entry.sequence for entry in page.entries]
        before = page.older
    assert seen == [i + 1 for i in reversed(range(130)) if i % 2]
    plain = list_entries(ledger, OWNER, "a", account.size, {})
    assert [entry.sequence for entry in plain.entries] == [*range(130, 80, -1)]
    assert plain.read == 50
    assert not list_entries(ledger, OWNER, "a", account.size, {"principal": "nobody"}).entries


def test_the_data_version_changes_with_every_account_that_is_seen_and_with_no_other(ledger: Ledger) -> None:
    bound = Caller("bob", Role.ANALYST, "1" * 12, frozenset({"a"}))
    empty = data_version(ledger, OWNER)
    ledger.open_account("a", POLICY)
    ledger.open_account("b", POLICY)
    whole, own = data_version(ledger, OWNER), data_version(ledger, bound)
    assert len({empty, whole, own}) == 3
    ledger.account("b").spend(odo.PureDP("0.1"))
    assert data_version(ledger, bound) == own
    assert data_version(ledger, OWNER) != whole
    ledger.account("a").close()
    assert data_version(ledger, bound) != own
