"""The tables of theorems, errors and commands in the repository are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import reference_pages

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", reference_pages.STORED)
def test_a_stored_table_is_current(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert reference_pages.with_table(name, text) == text, "run: python tools/reference_pages.py"


def test_a_table_that_is_out_of_date_or_has_no_page_is_caught() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    for stale in (
        text.replace("| 409 |", "| 410 |", 1),
        text + "more\n",
        text.partition(reference_pages.MARK)[0] + reference_pages.MARK,
    ):
        assert stale != text
        assert reference_pages.with_table("reference/errors", stale) == text
    with pytest.raises(ValueError, match="reference/errors must have the line"):
        reference_pages.with_table("reference/errors", "# Errors\n")


def test_theorems_lead_to_their_headings() -> None:
    text = (DOCS / "reference" / "theorems.md").read_text()
    linked = set(re.findall(r"theorems\.md#([^)]+)\)", text))
    assert {"combining-filters", "the-reserve-theorem", "rényi-odometer", "readings-with-a-slack"} <= linked
    headings = re.findall(r"^#+ (.+)$", (DOCS / "theorems.md").read_text(), re.MULTILINE)
    assert linked <= {re.sub(r"[^\w -]", "", heading.casefold()).replace(" ", "-") for heading in headings}


def test_nothing_of_this_machine_is_stored() -> None:
    for name in reference_pages.STORED:
        assert not re.search(r"/(root|home|tmp|Users|work)/", (DOCS / f"{name}.md").read_text())
