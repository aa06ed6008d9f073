from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import odograph as odo
from odograph.compile import compile_policy
from odograph.core.guarantees import PureDP
from odograph.core.odometers import RenyiOdometer
from odograph.core.planning import AccountState, how_many, quote
from odograph.core.policy import Policy
from odograph.core.theory import kov_steps
from odograph.display import gauge
from odograph.errors import InvalidArgument, MissingExtra
from odograph.figures import PANELS, Panel, blank_axes, draw, draw_all, fingerprint

VECTORS = Path(__file__).parents[1] / "golden" / "vectors.json"
PICTURES = Path(__file__).parents[2] / "docs" / "images" / "paper"


@cache
def made(name: str) -> Panel:
    return PANELS[name]()


def value(panel: Panel, start_of_label: str, x: float) -> float:
    curve = next(curve for curve in panel.curves if curve.label.startswith(start_of_label))
    return curve.values[panel.x.index(x)]


def test_every_panel_is_listed_by_its_name_and_has_a_value_for_each_x() -> None:
    assert len(PANELS) == 10
    for name in PANELS:
        panel = made(name)
        assert panel.name == name
        assert panel.x == tuple(sorted(set(panel.x)))
        assert all(len(curve.values) == len(panel.x) for curve in panel.curves)
        assert not any(math.isnan(number) for curve in panel.curves for number in curve.values)


def test_lower_order_terms_follow_their_formulas() -> None:
    panel = made("fig1a-lower-order-terms")
    odds = math.e
    assert value(panel, "the paper's filter", 1.0) == 0.5
    assert value(panel, "advanced composition", 1.0) == pytest.approx((odds - 1) / (odds + 1), rel=1e-14)


def test_odometers_match_the_reference_values() -> None:
    functions = {
        "filter_odometer": "filter",
        "mixture_odometer": "mixture",
        "stitched_odometer_paper": "stitched",
        "rogers_odometer": "Rogers",
    }
    checked = 0
    for vector in json.loads(VECTORS.read_text()):
        if not vector.get("note", "").startswith("figure") or vector["function"] not in functions:
            continue
        panel, x = made("fig1b-odometers"), vector["inputs"]["V"]
        assert value(panel, functions[vector["function"]], x) == pytest.approx(float(vector["value"]), rel=1e-12)
        checked += 1
    assert checked == 24
    assert value(made("fig1b-odometers"), "Rogers", 0.25) == pytest.approx(4.517, abs=5e-4)


def test_the_families_hold_the_curves_of_the_comparison() -> None:
    reference = made("fig1b-odometers")
    assert value(made("fig2a-filter-odometers"), "ε = 8", 0.5) == value(reference, "filter", 0.5)
    assert value(made("fig2b-mixture-odometers"), "γ = 0.01", 1.0) == value(reference, "mixture", 1.0)
    assert value(made("fig2c-stitched-odometers"), "v₀ = 0.005", 0.5) == value(reference, "stitched", 0.5)
    assert math.isinf(value(made("fig2c-stitched-odometers"), "v₀ = 0.5", 0.25))
    assert math.isfinite(value(made("fig2c-stitched-odometers"), "v₀ = 0.5", 0.5))


def test_pointwise_composition_is_below_every_odometer_and_says_that_it_is_none() -> None:
    panel = made("fig3b-pointwise")
    *odometers, floor = panel.curves
    assert floor.warning == "not an odometer"
    assert not any(curve.warning for curve in odometers)
    for curve in odometers:
        assert all(bound >= least for bound, least in zip(curve.values, floor.values, strict=True))
    x = np.asarray(panel.x)
    assert floor.values == pytest.approx(np.sqrt(-2.0 * math.log(1e-6) * x) + x / 2.0, rel=1e-12)
    (mark,) = panel.marks  # where the line touches
    assert mark.y == pytest.approx(math.sqrt(-2.0 * math.log(1e-6) * mark.x) + mark.x / 2.0, rel=1e-12)
    assert mark.y == pytest.approx(np.interp(mark.x, x, odometers[0].values), rel=1e-9)


def test_rogers_jumps_where_its_formula_changes() -> None:
    panel = made("fig3a-new-and-original")
    assert value(panel, "Rogers", math.nextafter(1.0, 2.0)) > 2.0 * value(panel, "Rogers", 1.0)


def test_a_filter_odometer_touches_the_pointwise_bound_at_its_epsilon_and_the_picture_reaches_that_far() -> None:
    panel = made("fig2a-filter-odometers")
    assert [mark.y for mark in panel.marks] == [1.0, 2.0, 4.0, 8.0]
    for mark, curve in zip(panel.marks, panel.curves[:4], strict=True):
        assert math.sqrt(-2.0 * math.log(1e-6) * mark.x) + mark.x / 2.0 == pytest.approx(mark.y, rel=1e-12)
        assert mark.x < panel.x[-1]
        assert mark.y == pytest.approx(np.interp(mark.x, panel.x, curve.values), rel=1e-9)  # the curve is a line
        floor = np.asarray(panel.curves[4].values)
        assert np.all(np.asarray(curve.values) >= floor)


def test_a_mixture_is_the_lowest_at_the_time_that_is_marked() -> None:
    ell = math.log(1e6)
    for mark, gamma in zip(made("fig2b-mixture-odometers").marks, (0.001, 0.01, 0.1, 1.0), strict=True):

        def reading(tuning: float, v: float = mark.x) -> float:
            return math.sqrt((v + tuning) * (2 * ell + math.log1p(v / tuning))) + v / 2

        assert mark.y == pytest.approx(reading(gamma), rel=1e-12)
        assert reading(gamma) < min(reading(0.99 * gamma), reading(1.01 * gamma))


def test_the_lowest_odometer_changes_at_the_marks_of_figure_3a() -> None:
    ell, n = math.log(1e6), 1e6

    def original(v: float) -> float:
        if 1 / n**2 <= v <= 1:
            return math.sqrt(2 * v * (math.log(110 * math.e) + 2 * (math.log(math.log(n)) + ell))) + v / 2
        spread = (1 / n**2 + v) * (1 + math.log1p(n * n * v) / 2)
        return math.sqrt(2 * spread * (math.log(4 * math.log2(n)) + ell)) + v / 2

    def line(v: float) -> float:
        tangent = (16 / (math.sqrt(2 * ell) + math.sqrt(2 * ell + 16))) ** 2
        return math.sqrt(2 * tangent * ell) / 2 + (math.sqrt(2 * ell / tangent) + 1) * v / 2

    def mixture(v: float) -> float:
        return math.sqrt(2 * (ell + math.log((v + 0.01) / 0.01) / 2) * (v + 0.01)) + v / 2

    def stitched(v: float) -> float:
        if v < 0.005:
            return math.inf
        return 1.7 * math.sqrt(v * (math.log(math.log(2 * v / 0.005)) + 0.72 * (math.log(5.2) + ell))) + v / 2

    marks = made("fig3a-rates").marks
    assert [mark.text for mark in marks] == ["0.005", "0.0496", "0.808", "4.54", "1,721"]
    order = [original, stitched, mixture, line, mixture, stitched]
    ends = [1e-11, *(mark.x for mark in marks), 1e12]
    for lowest, start, end in zip(order, ends, ends[1:], strict=False):
        for v in np.geomspace(start * 1.000001, end * 0.999999, 50).tolist():
            assert min((original, line, mixture, stitched), key=lambda bound: bound(v)) is lowest


def test_the_committed_pictures_are_of_the_present_numbers() -> None:
    names = [name for name in PANELS if name.startswith("fig")]
    assert sorted(path.stem for path in PICTURES.iterdir()) == sorted(names)
    for name in names:
        picture = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert f"<dc:description>{fingerprint(made(name))}</dc:description>" in picture, "run `make figures`"
        assert len(picture) < 80_000


def test_other_numbers_or_words_have_another_fingerprint() -> None:
    panel = made("fig3b-pointwise")
    curve = panel.curves[0]
    others = [
        replace(panel, title="Another"),
        replace(panel, marks=()),
        replace(
            panel, curves=(replace(curve, values=(curve.values[0] * 1.0001, *curve.values[1:])), *panel.curves[1:])
        ),
    ]
    assert len({fingerprint(other) for other in (panel, *others)}) == 4
    last_digit = replace(curve, values=tuple(math.nextafter(value, math.inf) for value in curve.values))
    assert fingerprint(replace(panel, curves=(last_digit, *panel.curves[1:]))) == fingerprint(panel)


def test_steps_at_one_size() -> None:
    counts = {curve.hue: curve.values[0] for curve in made("steps-admitted").curves}
    assert counts == {"basic": 100, "paper": 349, "renyi": 479, "zcdp": 487, "exact": 544, "optimum": 562}


def test_no_rule_beats_the_optimum_and_none_is_below_basic_composition() -> None:
    panel = made("steps-by-size")
    basic = panel.curves[0]
    assert (panel.x[0], panel.x[-1]) == (0.001, 0.5)
    assert basic.hue == "basic"
    assert value(panel, "exact", 0.01) == pytest.approx(544 / 562)
    for curve in panel.curves:
        assert all(low <= share <= 1.0 for share, low in zip(curve.values, basic.values, strict=True))


@pytest.mark.parametrize("rule", ["basic", "paper", "zcdp", "renyi", "exact"])
def test_bisection_counts_what_the_gate_admits_one_by_one(rule: str) -> None:
    compiled = compile_policy(Policy(1, "1e-6", filter=rule))
    step = PureDP("0.037")
    count = how_many(AccountState("", compiled, compiled.start), step)
    assert quote(AccountState("", compiled, compiled.start), [step] * count).admitted
    assert not quote(AccountState("", compiled, compiled.start), [step] * (count + 1)).admitted
    assert count <= kov_steps(1.0, 1e-6, 0.037)


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_is_a_picture_twice_and_a_table_with_the_same_numbers(tmp_path: Path, name: str) -> None:
    panel = made(name)
    png, svg, table = draw(panel, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in svg.read_text()
    with table.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    columns = list(zip(*[[float(cell) for cell in row] for row in rows], strict=True))
    assert head[0] == panel.x_label
    assert len(head) == 1 + len(panel.curves)
    assert columns == [panel.x, *(curve.values for curve in panel.curves)]


def test_the_same_numbers_give_the_same_files(tmp_path: Path) -> None:
    names = ["fig3b-pointwise", "steps-admitted"]
    first, second = (draw_all(tmp_path / part, names) for part in ("first", "second"))
    assert [file.name for file in first] == [f"{name}.{end}" for name in names for end in ("png", "svg", "csv")]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_what_is_no_odometer_is_labelled_in_picture_and_table(tmp_path: Path) -> None:
    _, picture, table = draw(made("fig3b-pointwise"), tmp_path)
    svg = picture.read_text()
    assert "not an odometer" in svg  # matplotlib leaves the text of a label beside its outlines
    assert "stroke-dasharray" in svg
    assert "(not an odometer)" in table.read_text(encoding="utf-8")


def test_an_unknown_figure_is_named_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"steps-admitted.*'fig9'"):
        draw_all(tmp_path, ["steps-admitted", "fig9"])
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_pictures_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"odograph\[figures\]"):
        draw_all(tmp_path)


def test_the_numbers_need_no_matplotlib() -> None:
    code = "import sys, odograph.figures; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603  our own code


def points(line: Line2D) -> tuple[list[float], list[float]]:
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


@pytest.fixture
def axes() -> Iterator[Axes]:
    ax = Figure().subplots()
    yield ax
    ax.clear()


def test_the_plot_of_an_account_ends_at_its_reading_under_the_promise(axes: Axes) -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    account.spend(odo.GDP(0.04))
    for _ in range(300):
        account.spend(odo.PureDP(0.01))
    account.plot(axes)
    curves = {str(line.get_label()): line for line in axes.get_lines()}
    times, losses = points(curves.pop("best of (policy's odometer)"))
    assert times[-1] == pytest.approx(account.totals.amounts[2] / 1e15)
    assert losses[-1] == pytest.approx(account.reading().loss)
    assert len(times) <= 202
    promise = [line for line in curves.values() if points(line)[1] == [1.0, 1.0]]
    assert len(promise) == 1
    others = [label for label in curves if not label.startswith("_")]
    assert others
    assert all(label.endswith("(informational)") for label in others)


def test_a_plot_of_what_has_no_intrinsic_time_counts_steps(axes: Axes) -> None:
    account = odo.Accountant(
        odo.Policy(3, 1e-6, filter="renyi", odometer=RenyiOdometer((4.0, 8.0), (0.5, 0.5))), keep=2
    )
    for _ in range(5):
        account.spend(odo.RDP((4, 8), (0.01, 0.03)))
    account.plot(axes)
    assert axes.get_xlabel() == "steps"
    labels = [str(line.get_label()) for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    assert labels == ["renyi (policy's odometer)"]
    assert points(axes.get_lines()[0])[0] == [3.0, 4.0, 5.0]  # two entries were kept


def test_the_plot_of_an_account_of_a_ledger_leaves_out_the_charge_that_was_voided_and_no_other_like_it(
    axes: Axes,
) -> None:
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("a", odo.Policy(1, 0, filter="basic"))
        account.reserve(odo.PureDP(0.1))
        account.spend(odo.PureDP(0.3))
        account.reserve(odo.PureDP(0.1)).void("not run")
        account.plot(axes)
    own = next(line for line in axes.get_lines() if line.get_label() == "sum of epsilons (policy's odometer)")
    assert points(own)[1] == pytest.approx([0.0, 0.1, 0.4])


@pytest.mark.parametrize("part", [0.0, 0.25, 1.0, 1.5])
def test_the_gauge_ends_where_the_budget_does(part: float) -> None:
    picture = gauge(part)
    assert f'aria-label="{part:.1%} of the budget spent"' in picture
    ends = {0.0: None, 0.25: "24.64 24.64", 1.0: "110.00 60.00", 1.5: "110.00 60.00"}[part]
    assert (f"A 50 50 0 0 1 {ends}" in picture) == (ends is not None)


def test_a_card_says_when_an_alternative_is_out() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6))
    assert "no longer counts" not in account._repr_html_()
    account.spend(odo.GDP(0.04))
    assert "no longer counts" in account._repr_html_()


@pytest.mark.parametrize(
    "policy", [Policy(rho=1), Policy(mu=1, delta=1e-6), Policy(None, 1e-6)], ids=["rho", "mu", "no limit"]
)
def test_an_account_without_an_epsilon_is_drawn_without_its_line(policy: Policy) -> None:
    account = odo.Accountant(policy)
    for _ in range(3):
        account.spend(PureDP(0.1))
    axes = account.plot(ax=blank_axes())
    assert not axes.texts
    assert all(line.get_linestyle() != "--" for line in axes.get_lines())
    assert ("of the budget spent" in account._repr_html_()) == (not policy.is_unlimited)
