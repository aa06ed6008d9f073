"""The page of threats: every row names what shows it, and that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "threats.md"

_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("|---", "| threat |"))]


def unshown(text: str) -> list[str]:
    """Return the rows that name neither a test nor a decision."""
    return [row for row in rows(text) if not _TEST.search(row) and "../decisions/" not in row]


def missing(text: str) -> list[str]:
    """Return the tests that are named and do not exist."""
    return [
        f"{file}::{name}"
        for file, name in _TEST.findall(text)
        if not (path := ROOT / "tests" / file).is_file()
        or name
        not in {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    ]


def test_every_threat_names_a_test_that_exists() -> None:
    text = PAGE.read_text()
    assert len(rows(text)) > 40
    assert unshown(text) == []
    assert missing(text) == []


def test_a_row_without_a_test_and_a_test_that_does_not_exist_are_found() -> None:
    row = "| a threat | nothing | `docs/test_threats.py::test_of_nothing`, `docs/test_gone.py::test_x` |"
    assert missing(row) == ["docs/test_threats.py::test_of_nothing", "docs/test_gone.py::test_x"]
    assert unshown("| threat | what happens | test |\n|---|---|---|\n| a | b | c |") == ["| a | b | c |"]
