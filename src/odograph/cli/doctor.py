"""Doctor: what about a ledger's place and clock needs attention."""

from __future__ import annotations

import time

import typer

from odograph.cli.options import At, say, with_options
from odograph.ledger.doctor import examine

__all__ = ["doctor"]

_STATE_OF_THE_LEDGER = 5


@with_options
def doctor(*, at: At) -> None:
    """Look at where the ledger is and at its clock; exit with 5 if something needs attention."""
    with at.ledger() as ledger:
        findings = examine(ledger, time.time_ns() // 1000)
    text = "\n".join(f"{one.what}: {one.found}" + (f"\n  {one.advice}" if one.advice else "") for one in findings)
    say({"findings": [one.to_dict() for one in findings]}, text, as_json=at.json)
    if any(one.advice for one in findings):
        raise typer.Exit(_STATE_OF_THE_LEDGER)
