"""An account as a card for a notebook: plain HTML and SVG, no script, no style sheet, nothing fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final

from odograph.core.compiled import Compiled, reading
from odograph.core.decide import Totals
from odograph.core.guarantees import Guarantee
from odograph.core.offers import standing, used

__all__ = ["account_card", "gauge"]

_ROOM, _LITTLE, _NONE = "#009E73", "#E69F00", "#D55E00"  # told apart with any colour vision
_SMALL: Final = "padding:1px 12px 1px 0;text-align:left;border:0;background:none;font-variant-numeric:tabular-nums"


def gauge(part: float) -> str:
    """Return a half circle that is filled as far as the budget is spent."""
    angle = math.pi * (1.0 - min(max(part, 0.0), 1.0))
    x, y = 60.0 + 50.0 * math.cos(angle), 60.0 - 50.0 * math.sin(angle)
    hue = _ROOM if part < 0.75 else _LITTLE if part < 0.95 else _NONE
    arc = f'<path d="M 10 60 A 50 50 0 0 1 {x:.2f} {y:.2f}" stroke="{hue}"/>' if part > 0.0 else ""
    return (
        f'<svg width="120" height="78" viewBox="0 0 120 78" role="img" aria-label="{part:.1%} of the budget spent">'
        '<g fill="none" stroke-width="12"><path d="M 10 60 A 50 50 0 0 1 110 60" stroke="#8888" opacity=".35"/>'
        f'{arc}</g><text x="60" y="56" text-anchor="middle" font-size="19" fill="currentColor">{part:.0%}</text>'
        '<text x="60" y="74" text-anchor="middle" font-size="11" fill="currentColor">spent</text></svg>'
    )


def account_card(
    name: str, compiled: Compiled, totals: Totals, largest: Guarantee | None, last: Sequence[tuple[str, str]]
) -> str:
    """Return the card: the promise, a gauge, spent and left on every meter, reading, last spends (latest first)."""
    policy = compiled.policy
    title = html.escape(name) if name else "Accountant"
    promise = f"{policy.target} for each {html.escape(policy.unit)}"
    offer = f"; the largest like the last that fits: {html.escape(str(largest))}" if largest else ""
    rows = "".join(
        f'<tr><td style="{_SMALL}">{html.escape(cost)}</td><td style="{_SMALL}">{html.escape(note)}</td></tr>'
        for cost, note in last
    )
    spends = f'<table style="{_SMALL}"><tr><th style="{_SMALL}">last spends</th></tr>{rows}</table>' if last else ""
    return (
        '<div style="display:flex;gap:24px;align-items:flex-start;flex-wrap:wrap">'
        f"<div>{gauge(used(compiled, totals))}</div>"
        f"<div><b>{title}</b>: {promise}<br>{totals.steps} steps{offer}"
        f'<table style="{_SMALL}">{_meters(compiled, totals)}</table>'
        f'<div style="max-width:36em">{html.escape(str(reading(compiled, totals)))}</div></div>{spends}</div>'
    )


def _meters(compiled: Compiled, totals: Totals) -> str:
    now = standing(compiled, totals)
    head = "".join(f'<th style="{_SMALL}">{word}</th>' for word in ("meter", "spent", "left"))
    rows = [f"<tr>{head}</tr>"]
    for meter, unpriced in zip(compiled.meters, totals.unpriced, strict=True):
        if meter.limit is None or (meter.clock == "delta" and not meter.limit):
            continue
        # An alternative with a step that has no price on it can admit nothing any more; the others go on.
        left = "out: a step has no price here" if unpriced else f"{now.left[meter.name]:.6g}"
        cells = (meter.name, f"{now.spent[meter.name]:.6g}", left)
        rows.append("<tr>" + "".join(f'<td style="{_SMALL}">{html.escape(cell)}</td>' for cell in cells) + "</tr>")
    return "".join(rows)
