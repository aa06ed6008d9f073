"""The page about the paper: every row of its tables names code and tests that exist, and every erratum has a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "the-paper.md"
ERRATA = ROOT / "docs" / "errata.md"

_HEAD = "| item | what it says | status | code | test |"
_LINK = re.compile(r"\[`([\w.]+)`\]\(([^)]+\.py)\)")
_WITHOUT_TEST = ("not used", "see ")  # statuses of rows that have nothing to test
# What the source of the paper has, in its order: an item that is left out would not be noticed by reading.
_NUMBERED = [
    *(f"Definition {n}" for n in range(1, 8)),
    *(f"Theorem {n}" for n in range(1, 9)),
    *(f"Lemma {n}" for n in range(1, 13)),
    *(f"Condition {n}" for n in (1, 2)),
    *(f"Figure {n}" for n in ("1a", "1b", "2a", "2b", "2c", "3a", "3b")),
    "Informal Theorem 1",
]


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables of items."""
    found = []
    inside = False
    for line in text.splitlines():
        inside = line.startswith("|") and (inside or line == _HEAD)
        if inside and line != _HEAD and not line.startswith("|---"):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def definitions(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the names that a module defines, those in its classes after the class and a dot."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from definitions(child, f"{prefix}{child.name}.")


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(definitions(ast.parse(path.read_text())))


def broken(cell: str) -> list[str]:
    """Return the links of a cell to a file that is not there, or that does not define the name."""
    return [
        f"{target}: {name}"
        for name, target in _LINK.findall(cell)
        if not (path := (PAGE.parent / target).resolve()).is_file() or name not in names_in(path)
    ]


def incomplete(row: list[str]) -> bool:
    """Whether a row has another number of cells, or no code or test although there is something to test."""
    if len(row) != 5:
        return True
    status, code, test = row[2:]
    if not _LINK.search(test):
        return not status.startswith(_WITHOUT_TEST)
    return not _LINK.search(code) or any("/tests/" not in target for _, target in _LINK.findall(test))


def test_every_row_names_code_and_tests_that_exist() -> None:
    found = rows(PAGE.read_text())
    assert len(found) > 80
    assert [row[0] for row in found if incomplete(row)] == []
    assert [problem for row in found for cell in row[3:] for problem in broken(cell)] == []


def test_every_numbered_item_of_the_paper_has_a_row() -> None:
    items = [row[0] for row in rows(PAGE.read_text())]
    missing = [name for name in _NUMBERED if not any(re.match(rf"{name}\b", item) for item in items)]
    assert missing == []


def test_what_is_missing_is_found() -> None:
    cell = "[`line`](../src/odograph/core/odometers.py), [`Mixture.of`](../src/odograph/core/odometers.py)"
    assert broken(cell) == ["../src/odograph/core/odometers.py: Mixture.of"]
    assert broken("[`x`](../src/odograph/core/gone.py)") == ["../src/odograph/core/gone.py: x"]
    code, test = "[`line`](../src/odograph/core/odometers.py)", "[`test_x`](../tests/core/test_paper.py)"
    table = f"{_HEAD}\n|---|---|---|---|---|\n| a | b | used | {code} | - |\n\n| no | row |\n"
    assert rows(table) == [["a", "b", "used", code, "-"]]
    assert incomplete(rows(table)[0])
    assert not incomplete(["a", "b", "not used: why", "-", "-"])
    assert incomplete(["a", "b", "used", "-", test])
    assert incomplete(["a", "b", "used", code, code])
    assert not incomplete(["a", "b", "used", code, test])
    assert broken(test) == ["../tests/core/test_paper.py: test_x"]


def errata(text: str) -> set[int]:
    """Return the numbers in the headings of a page."""
    return {int(n) for line in text.splitlines() if line.startswith("## E") for n in re.findall(r"\bE(\d+)", line)}


def with_a_test(names: frozenset[str]) -> set[int]:
    """Return the numbers of the errata that have a test of their own."""
    return {int(found[1]) for name in names if (found := re.match(r"test_e(\d+)_", name))}


def test_every_erratum_has_a_test() -> None:
    numbers = errata(ERRATA.read_text())
    assert numbers == set(range(1, 17))
    assert with_a_test(names_in(ROOT / "tests" / "core" / "test_errata.py")) == numbers
    assert with_a_test(frozenset({"test_e3_x", "test_of_e4"})) == {3}
