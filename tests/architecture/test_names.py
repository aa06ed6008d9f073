"""Names that a stranger understands: no private words, few files."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_words import ROOT, private_names

MOST_FILES = 108


def test_no_name_uses_a_private_word() -> None:
    assert private_names(ROOT) == []


@pytest.mark.parametrize(
    ("path", "content", "found"),
    [
        ("src/a/scribes.py", "", "file scribes"),
        ("src/a.py", "class FrontDoor: ...", "class FrontDoor"),
        ("src/a.py", "class A:\n    async def next_turn(self): ...", "function next_turn"),
        ("src/a.py", "def f():\n    def wire(): ...", "function wire"),
        ("src/a.py", "_WIRE_SIZE: int = 3", "constant _WIRE_SIZE"),
        ("tests/a.py", "_PATIENCE = 60", "constant _PATIENCE"),
        ("tests/test_a.py", "def test_a_twin_is_caught(): ...", "test test_a_twin_is_caught"),
        ("docs/glossary.md", "| word | meaning |\n|---|---|\n| turn | whose it is |", "glossary row turn"),
    ],
)
def test_a_planted_word_is_found(tmp_path: Path, path: str, content: str, found: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert private_names(tmp_path) == [f"{path}: {found}"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("src/placeholders.py", "def returned(): ...\nhow_many = 1\nclass Hitherto:\n    visits: int"),
        ("tests/test_a.py", "def test_the_loop_stops_in_place(): ...\nLONG_NUMBER = 1"),
        ("docs/decisions/0012-one-door.md", ""),
    ],
)
def test_other_words_are_not_found(tmp_path: Path, path: str, content: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert private_names(tmp_path) == []


def test_there_are_few_files() -> None:
    assert len([*(ROOT / "src").rglob("*.py")]) <= MOST_FILES
