"""The page of results hides nothing: a missed target is said to be missed, and a failure to have failed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from results import MISSED_BEFORE, Part, disagreements, page, verdicts
from run import HERE, SCRIPTS, about, output, part, tables
from timing import Row, failure, number, ratio, read, row

ROWS = [
    row("faster than a copy", [1.9, 1.5, 1.7], "at most 2", "3 ms against 2"),
    row("as many as the floor", [0.6, 0.7, 0.65], "at least 0.75"),
    row("for information", [12345.6]),
    failure("a library, spend 100", "it is not here", "not measured"),
    failure("a library, spend 1,000", "not done after 60 s", "cut"),
    failure("PostgreSQL", "no server | and no port"),
]
EXPECTED = ["met", "missed", "no target", "not measured", "cut", "failed"]

Writer = Callable[[Sequence[Part], dict[str, str]], str]


def honest(write: Writer) -> bool:
    """Whether a page shows what its rows say, in the table and before all tables."""
    text = write([Part("One", "What is measured.", ROWS)], {"date": "today"})
    said = [verdicts(text).get(("One", one.title)) for one in ROWS]
    before = text.partition("## One")[0]
    return said == EXPECTED and all(one.title in before for one in ROWS if one.verdict not in {"met", "no target"})


def test_a_page_marks_what_was_missed_and_what_failed() -> None:
    assert [one.verdict for one in ROWS] == EXPECTED
    assert honest(page)


def test_a_page_that_hides_something_is_caught() -> None:
    def only_good(parts: Sequence[Part], machine: dict[str, str]) -> str:
        kept = [one._replace(rows=[r for r in one.rows if r.verdict in {"met", "no target"}]) for one in parts]
        return page(kept, machine)

    def flattering(parts: Sequence[Part], machine: dict[str, str]) -> str:
        return page(parts, machine).replace("**missed**", "met")

    def quiet(parts: Sequence[Part], machine: dict[str, str]) -> str:
        text = page(parts, machine)
        return text[text.index("## One") :]

    assert not any(honest(write) for write in (only_good, flattering, quiet))


def test_what_an_earlier_release_missed_is_shown_beside_what_is_measured_now() -> None:
    heading, what, before, wanted = MISSED_BEFORE[0]
    for ratio_now, said in ((0.95, "reached"), (0.85, "not reached")):
        text = page([Part(heading, "What is measured.", [row(what, [ratio_now], "at least 0.8")])], {})
        assert f"| {heading}: {what} | {wanted} | {number(before)} | {number(ratio_now)} | {said} |" in text
    assert "0.1.0" not in page([Part("Other", "What is measured.", ROWS)], {})
    committed = verdicts((HERE / "RESULTS.md").read_text())
    assert all(one[:2] in committed for one in MISSED_BEFORE)


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.title)
def test_what_is_printed_is_read_back(one: Row) -> None:
    found = read(str(one))
    assert found is not None
    assert (found.title, found.verdict, found.note) == (one.title, one.verdict, one.note)
    assert number(found.median) == number(one.median)


def test_a_line_without_a_side_is_judged_by_the_side_of_its_script() -> None:
    line = (
        f"{'one price, 1,000 people, over a copy':68}{ratio([(3.0, 1.0), (2.5, 1.0)])}, wanted 2; 1.0 ms against 0.5"
    )
    assert [read(line, side) and read(line, side).verdict for side in ("at most", "at least")] == ["missed", "met"]  # type: ignore[union-attr]
    assert read("verified: 3 entries of 1 account follow from each other and add up") is None
    assert read("| exact | 542 (96.4%) | 21 (80.8%) |") is None


def test_pages_agree_or_the_difference_is_named() -> None:
    def text(*rows: Row) -> str:
        return page([Part("One", "What is measured.", rows)], {})

    slow, fast = row("a", [2.5], "at most 2"), row("a", [1.5], "at most 2")
    other = row("b", [1.0], "at least 1")
    assert disagreements(text(fast, other), text(fast._replace(median=1.9), other)) == []
    assert disagreements(text(fast, other), text(slow, other)) == ["One: a: met, then missed"]
    assert disagreements(text(fast, other), text(fast)) == ["One: b: met, then absent"]
    assert disagreements(text(fast), text(failure("a", "it broke"))) == ["One: a: met, then failed"]


def test_a_script_that_fails_is_a_row_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = SCRIPTS[-1]._replace(name="broken")
    monkeypatch.setattr("run.HERE", tmp_path)
    printed = str(row("before", [1.0], "at most 2"))
    for code, expected in (
        (f"print({printed!r}); raise SystemExit('no server')", [("before", "met", ""), ("failed", "no server")]),
        ("print('nothing to see')", [("failed", "it printed no ratio")]),
        (f"print({printed!r})", [("before", "met", "")]),
    ):
        (tmp_path / "broken.py").write_text(f'"""About it.\n\nMore.\n\n    a command\n"""\n{code}\n')
        found = part(script, tmp_path, tmp_path, few=False)
        assert found.about == "About it.\n\nMore."
        seen = [
            tuple(one.failed.split(": ", 1)) if one.failed else (one.title, one.verdict, "") for one in found.rows
        ]
        assert seen == expected


def test_tables_are_kept_apart() -> None:
    lines = ["| a |", "|---|", "| 1 |", "", "text", "| b |", "|---|", "the end"]
    assert tables(lines) == ["| a |", "|---|", "| 1 |", "", "| b |", "|---|"]


def test_every_benchmark_is_there_and_says_what_it_measures() -> None:
    assert all(about(HERE / f"{script.name}.py") for script in SCRIPTS)
    assert output([sys.executable, "-c", "print(1)"]) == (["1"], "")
