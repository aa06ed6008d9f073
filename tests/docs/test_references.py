"""Citations lead somewhere: results of others to references.md, Odograph's own to headings of theorems.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml

import odograph

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = Path(odograph.__file__).parent
REFERENCES: Final = ROOT / "docs" / "references.md"
CITING: Final = [
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
    *SOURCE.rglob("*.py"),
    *(ROOT / "examples").glob("*.py"),
]

_NAME = r"(?:van )?\b[A-ZÉ](?=[a-zé])[\w'’-]+\b"
_NAMES = rf"{_NAME}(?: et al\.|(?:,\s+{_NAME})*,?\s+and\s+{_NAME})?"
_CITATION: Final = re.compile(rf"({_NAMES})\s+\(((?:18|19|20)\d\d[a-z]?)\)")
_ENTRY: Final = re.compile(
    rf"^- \*\*({_NAMES}) \((\d{{4}}[a-z]?)\)\.\*\*\s+(.+?)(?=^- |^#|\Z)", re.MULTILINE | re.DOTALL
)
_NUMBERED: Final = re.compile(r"(?:lemma|theorem) \d+", re.IGNORECASE)
_ERRATUM: Final = re.compile(r"\bE\d{1,2}\b")


class Label(NamedTuple):
    """A name under which something is cited."""

    first: str
    year: str


class Claim(NamedTuple):
    """The paragraph `Theorem:` of a docstring."""

    where: str
    text: str


def surnames(names: str) -> list[str]:
    return [
        part.strip() for part in re.split(r",\s+and\s+|,\s+|\s+and\s+", names.removesuffix(" et al.")) if part.strip()
    ]


def entries(text: str) -> dict[Label, str]:
    """Return what references.md lists: the authors, titles and places by label."""
    return {Label(surnames(names)[0], year): f"{names}|{rest}" for names, year, rest in _ENTRY.findall(text)}


def citations(text: str) -> Iterator[tuple[Label, list[str]]]:
    """Find citations in a text; a line break inside one counts as a space."""
    for names, year in _CITATION.findall(re.sub(r"\s+", " ", text)):
        found = surnames(names)
        yield Label(found[0], year), found


def unresolved(text: str, known: Mapping[Label, str]) -> list[str]:
    """Return citations without an entry, or with names that the entry does not have in this order."""
    wrong = []
    for label, names in citations(text):
        authors = known.get(label, "").partition("|")[2].partition(" *")[0]
        places = [authors.find(name) for name in names]
        if not authors or -1 in places or places != sorted(places):
            wrong.append(f"{', '.join(names)} ({label.year})")
    return wrong


def claims() -> Iterator[Claim]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found = re.search(
                    r"^Theorem: (.*?)(?=^Assumes:|^$|\Z)", ast.get_docstring(node) or "", re.MULTILINE | re.DOTALL
                )
                if found:
                    yield Claim(f"{path.relative_to(SOURCE)}: {node.name}", re.sub(r"\s+", " ", found[1]).strip())


def headings() -> list[str]:
    text = (ROOT / "docs" / "theorems.md").read_text()
    return [found.removeprefix("The ").casefold() for found in re.findall(r"^##+ (.+)$", text, re.MULTILINE)]


def rests_on(text: str, known: list[str]) -> str:
    """What a claim rests on: a heading, a citation, an erratum, another docstring, a calculation, or nothing."""
    plain = text.casefold()
    if named := [heading for heading in known if heading in plain]:
        return max(named, key=len)
    if found := [*citations(text)] or _ERRATUM.findall(text):
        return str(found[0])
    said = re.match(r"as `|none is needed|by calculation: |by its own proof: ", text)
    return said[0] if said else ""


KNOWN: Final = entries(REFERENCES.read_text())


@pytest.mark.parametrize("path", CITING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_citation_is_in_the_references(path: Path) -> None:
    if path != REFERENCES:
        assert unresolved(path.read_text(), KNOWN) == []


def test_every_reference_is_cited() -> None:
    cited = {label for path in CITING if path != REFERENCES for label, _ in citations(path.read_text())}
    assert {*KNOWN} - cited == set()
    assert len(KNOWN) == len(re.findall(r"^- \*\*", REFERENCES.read_text(), re.MULTILINE)) > 40


def test_wrong_citations_are_caught() -> None:
    text = "See Dong, Roth and Su (2022), Canonne,\nKamath and Steinke (2020), Rogers et al. (2016)"
    text += " and van Erven and Harremoës (2014)."
    assert [label for label, _ in citations(text)] == [
        ("Dong", "2022"),
        ("Canonne", "2020"),
        ("Rogers", "2016"),
        ("van Erven", "2014"),
    ]
    assert unresolved(text, KNOWN) == []
    wrong = "Dong, Roth and Su (2021); Dong, Su and Roth (2022); Dwork et al. (2006); Nobody and Noone (1999)"
    assert len(unresolved(wrong, KNOWN)) == 4
    assert unresolved("in November (2026 rows), and Policy (1) of 2016", KNOWN) == []


def test_entries_have_authors_a_title_and_one_number() -> None:
    for label, entry in KNOWN.items():
        names, _, rest = entry.partition("|")
        authors, title = rest.split(" *", 1)
        assert all(name in authors for name in surnames(names)), label
        assert "et al." not in names or len(authors.split(", ")) > 3, label
        assert re.search(r"\*\s", title), label
        numbers = re.findall(
            r"\[arXiv (\d{4}\.\d{4,5})\]\(https://arxiv\.org/abs/([\d.]+)\)", " ".join(entry.split())
        )
        assert "arXiv" not in entry or (len(numbers) == 1 and numbers[0][0] == numbers[0][1]), label


def test_every_theorem_in_the_code_rests_on_something_that_is_there() -> None:
    known, found = headings(), [*claims()]
    assert [claim for claim in found if not rests_on(claim.text, known)] == []
    assert len(found) > 140


def test_a_theorem_that_rests_on_nothing_is_caught() -> None:
    known = headings()
    assert rests_on("combining filters: their shares add up", known) == "combining filters"
    assert rests_on("the reserve theorem: any sequence", known) == "reserve theorem"
    assert not rests_on("Lemma 7: the shares add up", known)
    assert not rests_on("Howard et al. 2020, arXiv 1808.03204.", known)


def numbered(text: str) -> bool:
    """Whether a text has the number of a theorem and not whose it is."""
    return bool(_NUMBERED.search(text)) and not [*citations(text)]


def test_own_theorems_have_names_and_no_numbers() -> None:
    assert [claim for claim in claims() if numbered(claim.text)] == []
    assert not any(_NUMBERED.search(heading) for heading in headings())
    assert numbered("Lemma 3: one limit on the sum of deltas")
    assert not numbered("Howard et al. (2021), Theorem 1; `max(v, start)` is free")


def faults(document: Any) -> list[str]:  # noqa: ANN401  whatever YAML holds
    """Return what a citation file of format 1.2.0 lacks."""
    wrong = [key for key in ("cff-version", "message", "title", "authors") if not document.get(key)]
    wrong += [] if document.get("cff-version") == "1.2.0" else ["cff-version"]
    wrong += [] if document.get("type", "software") in {"software", "dataset"} else ["type"]
    for person in [
        *(document.get("authors") or []),
        *(one for part in document.get("references", []) for one in part.get("authors", [])),
    ]:
        wrong += [] if {"name"} <= {*person} or {"family-names", "given-names"} & {*person} else ["authors"]
    for part in document.get("references", []):
        wrong += [f"references: {key}" for key in ("type", "title", "authors") if not part.get(key)]
    return wrong


def test_the_citation_file_is_valid_and_agrees_with_the_project() -> None:
    document = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert faults(document) == []
    assert f'license = "{document["license"]}"' in project
    assert document["title"] == "Odograph"
    (paper,) = document["references"]
    entry = next(text for label, text in KNOWN.items() if label == ("Whitehouse", "2023"))
    assert all(f"{one['given-names']} {one['family-names']}" in entry for one in paper["authors"])
    assert paper["title"] in " ".join(entry.split())
    assert paper["year"] == 2023
    assert any(number["value"] == "arXiv:2203.05481" for number in paper["identifiers"])
    assert paper["identifiers"][0]["value"].removeprefix("arXiv:") in entry


def test_a_broken_citation_file_is_caught() -> None:
    assert faults({"cff-version": "1.2.0", "message": "x", "title": "x", "authors": [{"name": "x"}]}) == []
    assert faults({"cff-version": 1.2, "message": "x", "title": "x", "authors": [{"email": "x"}]}) == [
        "cff-version",
        "authors",
    ]
    assert "title" in faults({"cff-version": "1.2.0", "message": "x", "authors": [{"name": "x"}], "references": [{}]})
