"""What people see as they work: the HTML of values that end a notebook's cell, and the progress of long operations.

A part is plain HTML and SVG with inline styles: no script, no style sheet, nothing from elsewhere. So it stays
readable in a saved notebook, light or dark. Every string is escaped unless it is `Html`, which only the functions
here make.
"""

from __future__ import annotations

import html
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Self, TypeAlias, TypeVar

from odograph.core.fixed_point import brief_above, brief_below

__all__ = [
    "Html",
    "Progress",
    "SlowNotice",
    "badge",
    "card",
    "clipped",
    "facts",
    "gauge",
    "join",
    "meters",
    "one_line",
    "paragraph",
    "progress_bar",
    "table",
    "utc",
]

_Row = TypeVar("_Row", bound=Any)

_LONGEST: Final = 120  # characters of a `repr`
_LONGEST_CELL: Final = 160  # characters of a text in a table
_SHORT: Final = 36  # characters of a text that is kept on one line
_ROWS: Final = 20  # of a table; more are counted
_FIRST_ROWS: Final = 5  # of them from the beginning
# Colors with a contrast of 4.5 to white text, and gauges that are distinguishable with any color vision.
_BADGES: Final = {"good": "#00704f", "bad": "#b34700", "plain": "#5f6670"}
_ENOUGH, _LOW, _OUT = "#009E73", "#E69F00", "#D55E00"
_NUMERAL: Final = re.compile(r"(?:1 - )?\b[\d.]+e-\d+")
_RULE: Final = "1px solid rgba(128,128,128,.35)"
_CELL: Final = (
    "padding:2px 14px 2px 0;text-align:left;vertical-align:top;border:0;background:none;overflow-wrap:anywhere;"
    "font-variant-numeric:tabular-nums"
)
_NUMBER: Final = _CELL.replace("text-align:left", "text-align:right;white-space:nowrap")
_TABLE: Final = "margin:4px 0 2px;border-collapse:collapse;table-layout:auto;border:0;font-size:inherit"


class Html(str):
    """Markup; every other string is text, and is escaped."""

    __slots__ = ()


def join(parts: Iterable[object]) -> Html:
    """Return parts after each other; what is not markup is escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part)) for part in parts))


def _tag(name: str, style: str, *parts: object, attributes: str = "") -> Html:
    return Html(f'<{name}{attributes} style="{style}">{join(parts)}</{name}>')


def card(title: str, *parts: Html, label: Html | None = None, side: Html | None = None) -> Html:
    """Return a value as HTML: a title with a label, its parts below each other, and what stands beside them."""
    head = _tag(
        "div", "margin-bottom:2px", _tag("b", "margin-right:8px;overflow-wrap:anywhere", clipped(title)), label or ""
    )
    body = _tag("div", "flex:1 1 24em;min-width:0", head, *parts)
    outer = "display:flex;gap:24px;align-items:flex-start;flex-wrap:wrap;line-height:1.45;overflow-x:auto"
    return _tag("div", outer, side or "", body)


def badge(text: str, mood: str = "plain") -> Html:
    """Return a short word on a color, such as admitted: `good`, `bad` or `plain`."""
    look = (
        "display:inline-block;max-width:100%;overflow-wrap:anywhere;border-radius:9px;padding:1px 9px;font-size:92%"
    )
    return _tag("span", f"{look};color:#fff;background:{_BADGES[mood]}", clipped(text))


def paragraph(text: object) -> Html:
    """Return a sentence, at the width of a column of text; browsers would break 1 - 1e-06 at its hyphens."""
    whole = _NUMERAL.sub(r'<span style="white-space:nowrap">\g<0></span>', join([text]))
    return _tag("div", "max-width:46em;margin:3px 0;overflow-wrap:anywhere", Html(whole))


def facts(rows: Mapping[str, object]) -> Html:
    """Return names and values, a row each; a value that is an empty string or None is left out."""
    lines = [
        _tag(
            "tr",
            "background:none",
            _tag("th", f"{_CELL};font-weight:600;white-space:nowrap", name, attributes=' scope="row"'),
            _tag("td", _CELL, clipped(value)),
        )
        for name, value in rows.items()
        if value is not None and value != ""
    ]
    return _tag("table", _TABLE, *lines)


def table(
    head: Sequence[str],
    rows: Sequence[_Row],
    *,
    numbers: Sequence[str] = (),
    cells: Callable[[_Row], Iterable[object]] = iter,
) -> Html:
    """Return a table; of a long one the first and last rows, and how many are left out. `numbers` align right.

    `cells` returns the cells of a row. It is called for the rows that are shown.
    """
    styles = [_NUMBER if name in numbers else _CELL for name in head]
    names = [
        _tag("th", f"{style};font-weight:600;border-bottom:{_RULE}", name, attributes=' scope="col"')
        for name, style in zip(head, styles, strict=True)
    ]
    left_out = max(0, len(rows) - _ROWS)
    first = rows[:_FIRST_ROWS] if left_out else rows
    last = rows[_FIRST_ROWS + left_out :] if left_out else ()
    gap = _tag("td", f"{_CELL};opacity:.75", f"... {left_out:,} more ...", attributes=f' colspan="{len(head)}"')
    lines = [_line(map(_cell, cells(row), styles)) for row in first]
    lines += [_line([gap])] if left_out else []
    lines += [_line(map(_cell, cells(row), styles)) for row in last]
    return _tag("table", _TABLE, _line(names), *lines)


def _line(cells: Iterable[Html]) -> Html:
    return _tag("tr", "background:none", *cells)


def _cell(value: object, style: str) -> Html:
    """Return a cell: a short text stays on one line, so that the column of long ones gets the room."""
    shown = clipped(value)
    is_short = isinstance(shown, Html) or len(str(shown)) <= _SHORT
    return _tag("td", f"{style};{'white-space:nowrap' if is_short else 'min-width:12em'}", shown)


def meters(standing: Mapping[str, Mapping[str, Any]], asked: Mapping[str, float | None] | None = None) -> Html:
    """Return what is spent and left on each meter, as `Decision.standing` has it, and what a request asks."""
    rows = []
    for name, now in standing.items():
        if not (now["spent"] or now["left"] or (asked and asked[name])) and now["counts"]:
            continue  # nothing was set aside here, and nothing is asked
        # After a step without a price on this meter, the meter admits nothing more; the other alternatives may.
        left = brief_below(now["left"]) if now["counts"] else "no longer counts"
        needs = () if asked is None else ("no price" if (part := asked[name]) is None else brief_above(part),)
        rows.append((name, brief_above(now["spent"]), *needs, left))
    head = ("meter", "spent", *(() if asked is None else ("asked",)), "left")
    return table(head, rows, numbers=head[1:])


def gauge(part: float) -> Html:
    """Return an SVG half circle, filled in proportion to the part of the budget that is spent."""
    angle = math.pi * (1.0 - min(max(part, 0.0), 1.0))
    x, y = 60.0 + 50.0 * math.cos(angle), 60.0 - 50.0 * math.sin(angle)
    color = _ENOUGH if part < 0.75 else _LOW if part < 0.95 else _OUT
    arc = f'<path d="M 10 60 A 50 50 0 0 1 {x:.2f} {y:.2f}" stroke="{color}"/>' if part > 0.0 else ""
    return Html(
        f'<svg width="120" height="78" viewBox="0 0 120 78" role="img" aria-label="{part:.1%} of the budget spent">'
        '<g fill="none" stroke-width="12"><path d="M 10 60 A 50 50 0 0 1 110 60" stroke="#8888" opacity=".35"/>'
        f'{arc}</g><text x="60" y="56" text-anchor="middle" font-size="19" fill="currentColor">{part:.0%}</text>'
        '<text x="60" y="74" text-anchor="middle" font-size="11" fill="currentColor">spent</text></svg>'
    )


def clipped(value: object) -> object:
    """Return a text for a cell: characters that control a terminal or a line become spaces, and the end is cut."""
    if isinstance(value, Html):
        return value
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."


def one_line(kind: str, text: str) -> str:
    """Return a value as `<Kind text>` on one line; a long text is cut between two words."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    most = _LONGEST - len(kind) - 3
    if len(plain) > most:
        plain = f"{plain[: most - 3].rpartition(' ')[0] or plain[: most - 3]}..."
    return f"<{kind} {plain}>"


def utc(moment: datetime | None) -> str:
    """Return a time to the second; "" where there is none."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


# Called with how much is done and the expected total (0 if unknown), in rows or entries; for people, in percent.
Progress: TypeAlias = Callable[[int, int], None]

_BAR_WIDTH: Final = 40  # characters
_NOTICE_AFTER: Final = 1.0  # seconds


def progress_bar(done: int, expected: int) -> None:
    """Draw a progress bar on standard error: pass it as `progress=progress_bar`."""
    part = min(done, expected) / max(1, expected)
    filled = int(_BAR_WIDTH * part)
    sys.stderr.write(f"\r[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {part:4.0%} ")
    sys.stderr.flush()


class SlowNotice:
    """Report progress after a second of work: by a bar in a terminal or notebook, by one line in a script.

    Use it as a context manager: leaving it ends the bar's line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = time.monotonic()
        self._shown = False

    def __call__(self, done: int, expected: int) -> None:
        """Report how much is done."""
        if time.monotonic() - self._begun < _NOTICE_AFTER:
            return
        if _is_interactive():
            progress_bar(done, expected)
        elif not self._shown:
            sys.stderr.write(f"odograph: {self._what}\n")
            sys.stderr.flush()
        self._shown = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and _is_interactive():
            sys.stderr.write("\n")
            sys.stderr.flush()


def _is_interactive() -> bool:
    """Return whether standard error is a terminal, or the output of a notebook's cell."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
