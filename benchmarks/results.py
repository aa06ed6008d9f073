"""The page of results: all measurements, including every missed target and every failure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from timing import Row, number

__all__ = ["MISSED_BEFORE", "Part", "disagreements", "page", "verdicts"]

_VERDICTS = ("met", "missed", "no target", "failed", "cut", "not measured")
# What the results of 0.1.0 missed: its ratio, what was wanted, and the row that measures the same now.
MISSED_BEFORE = (
    ("Steps admitted", "default over the optimum, (1, 1e-6), epsilon 0.001", 0.242, "at least 0.9"),
    ("Steps admitted", "default over the best filter elsewhere, (1, 1e-6), epsilon 0.001", 0.2784, "at least 1"),
    ("Steps admitted", "default over the optimum, (1, 1e-6), epsilon 0.005", 0.8632, "at least 0.9"),
    ("Steps admitted", "default over the best filter elsewhere, (1, 1e-6), epsilon 0.005", 0.9944, "at least 1"),
    ("Steps admitted", "default over the optimum, (1, 1e-6), epsilon 0.05", 0.8077, "at least 0.9"),
    ("A durable spend", "SQLite, one client, over bare sqlite3", 0.6466, "at least 0.75"),
    ("A durable spend", "SQLite, one client, over bare sqlite3 with its reads", 0.6906, "at least 0.75"),
)
_HEAD = "| what | ratio | least to most | wanted | | beside it |\n|---|---|---|---|---|---|"


class Part(NamedTuple):
    """What one script found."""

    title: str
    about: str  # what is measured, and how
    rows: Sequence[Row]
    tables: Sequence[str] = ()  # lines of tables that the script printed itself
    picture: str = ""  # a link to it


def page(parts: Sequence[Part], machine: Mapping[str, str]) -> str:
    """Return the whole page."""
    lines = ["# Results", ""]
    lines += [
        "Written by `make bench`: everything below was measured in one run, on one machine. What is claimed are the",
        "ratios: both sides ran by turns, and the median over the rounds is given with the least and the largest.",
        "Times and rates beside a ratio are for this machine. A target is met or missed by the median.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "",
        *_summary(parts),
        *_before_and_after(parts),
    ]
    for part in parts:
        lines += ["", f"## {part.title}", "", part.about]
        if part.picture:
            lines += ["", part.picture]
        if part.tables:
            lines += ["", *part.tables]
        if part.rows:
            lines += ["", _HEAD, *map(_line, part.rows)]
    return "\n".join(lines) + "\n"


def verdicts(text: str) -> dict[tuple[str, str], str]:
    """Return the verdict on every row of a page, by the heading and what was measured."""
    found, heading = {}, ""
    for line in text.splitlines():
        heading = line[3:] if line.startswith("## ") else heading
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if heading and len(cells) == 6 and cells[4] in _VERDICTS:
            found[heading, cells[0]] = cells[4]
    return found


def disagreements(first: str, second: str) -> list[str]:
    """Return the rows on which two pages are not on the same side of the target."""
    one, other = verdicts(first), verdicts(second)
    return [
        f"{heading}: {what}: {one.get((heading, what), 'absent')}, then {other.get((heading, what), 'absent')}"
        for heading, what in sorted(one.keys() | other.keys())
        if one.get((heading, what)) != other.get((heading, what))
    ]


def _summary(parts: Sequence[Part]) -> Iterable[str]:
    found = [(part, row) for part in parts for row in part.rows]
    counts = [(word, sum(row.verdict == word for _, row in found)) for word in _VERDICTS]
    yield "Of the ratios: " + ", ".join(f"{count} {word}" for word, count in counts if count) + "."
    for word in ("missed", "failed", "cut", "not measured"):
        some = [f"{part.title}: {row.title}" for part, row in found if row.verdict == word]
        if some:
            yield from ["", f"{word.capitalize()}:", "", *(f"- {one}" for one in some)]


def _before_and_after(parts: Sequence[Part]) -> Iterable[str]:
    """Show what 0.1.0 missed beside what is measured now."""
    now = {(part.title, row.title): row for part in parts for row in part.rows if not row.failed}
    known = [(one, now[one[:2]]) for one in MISSED_BEFORE if one[:2] in now]
    if not known:
        return
    yield from ["", "What the results of 0.1.0 missed, with the default policy of each version:", ""]
    yield from ["| what | wanted of 0.1.0 | 0.1.0 | now | |", "|---|---|---|---|---|"]
    for (heading, what, before, wanted), row in known:
        reached = "reached" if row.median >= float(wanted.rpartition(" ")[2]) else "not reached"
        yield f"| {heading}: {what} | {wanted} | {number(before)} | {number(row.median)} | {reached} |"


def _line(row: Row) -> str:
    if row.failed:
        word, _, reason = row.failed.partition(": ")
        return f"| {_cell(row.title)} | | | | **{word}** | {_cell(reason)} |"
    wanted = f"{row.side} {number(row.target)}" if row.side else ""
    verdict = f"**{row.verdict}**" if row.verdict == "missed" else row.verdict
    spread = f"{number(row.least)} to {number(row.most)}"
    return f"| {_cell(row.title)} | {number(row.median)} | {spread} | {wanted} | {verdict} | {_cell(row.note)} |"


def _cell(text: str) -> str:
    """Return text that a table can hold, without a folder of this machine."""
    return re.sub(rf"{re.escape(str(Path(__file__).parents[1]))}/?", "", text).replace("|", "/")
