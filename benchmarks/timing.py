"""Shared by the benchmarks: processor time, ratios with their spread, and the line that reports one.

The line is read by people and by `run.py`: there is one way to report a ratio.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Row", "failure", "number", "ratio", "read", "row", "seconds"]

_NUMBER = r"[\d.,]+(?:e[+-]\d+)?"
_LINE = re.compile(
    rf"(?P<title>\S.*?)\s+(?P<median>{_NUMBER}) \((?P<least>{_NUMBER}) to (?P<most>{_NUMBER})\)"
    rf"(?:, wanted (?P<side>at least |at most )?(?P<target>{_NUMBER}))?(?:; (?P<note>.*))?"
)
_FAILED = re.compile(r"(?P<title>\S.*?)\s+(?P<why>(?:failed|cut|not measured): .*)")


class Row(NamedTuple):
    """One ratio: its median over the rounds, the least and the largest, and what was wanted of it."""

    title: str
    median: float = 0.0
    least: float = 0.0
    most: float = 0.0
    side: str = ""  # "at least" or "at most", or nothing where no target is set
    target: float = 0.0
    note: str = ""
    failed: str = ""  # why there is no ratio, after a word for it: failed, cut, not measured

    @property
    def verdict(self) -> str:
        """Say whether the target is met: by the median, as it is printed."""
        if self.failed:
            return self.failed.partition(":")[0]
        if not self.side:
            return "no target"
        met = self.median >= self.target if self.side == "at least" else self.median <= self.target
        return "met" if met else "missed"

    def __str__(self) -> str:
        if self.failed:
            return f"{self.title:68} {self.failed}"
        wanted = f", wanted {self.side} {number(self.target)}" if self.side else ""
        note = f"; {self.note}" if self.note else ""
        spread = f"{number(self.median):>8} ({number(self.least)} to {number(self.most)})"
        return f"{self.title:68} {spread}{wanted}{note}"


def row(title: str, ratios: Sequence[float], wanted: str = "", note: str = "") -> Row:
    """Return the row of these ratios; `wanted` is as in "at most 2", or nothing."""
    side, _, target = wanted.rpartition(" ")
    least, most = min(ratios), max(ratios)
    return Row(title, statistics.median(ratios), least, most, side, float(target or 0), note)


def failure(title: str, reason: object, word: str = "failed") -> Row:
    """Return the row of something that could not be measured; the reason is kept to one line."""
    return Row(title, failed=f"{word}: {' '.join(str(reason).split())[:200] or 'no reason given'}")


def read(line: str, side: str = "") -> Row | None:
    """Return the row that a line reports, or None; `side` is that of a target whose line does not say it."""
    if found := _FAILED.fullmatch(line.strip()):
        return Row(found["title"], failed=found["why"])
    if not (found := _LINE.fullmatch(line.strip())):
        return None
    median, least, most, target = (
        float((found[name] or "0").replace(",", "")) for name in ("median", "least", "most", "target")
    )
    said = (found["side"] or side).strip() if found["target"] else ""
    return Row(found["title"], median, least, most, said, target, found["note"] or "")


def number(value: float) -> str:
    """Return four digits of a number, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the median of a/b over the rounds, with the least and the largest."""
    ratios = sorted(a / b for a, b in pairs)
    return f"{number(statistics.median(ratios)):>8} ({number(ratios[0])} to {number(ratios[-1])})"


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start
