"""Records: history, verify, checkpoint, erase."""

from __future__ import annotations

import json
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.table import Table

from odograph.cli.options import (
    At,
    CheckpointFile,
    account_names,
    checkpoint_from,
    progress,
    say,
    with_options,
)
from odograph.errors import LedgerError
from odograph.ledger.doctor import examine_clock
from odograph.ledger.receipts import Verification

__all__ = ["checkpoint", "erase", "history", "verification_to_dict", "verify"]

_RANDOM: Final = re.compile("[0-9a-f]{32}")  # a key that nobody chose, and of which the beginning says enough


class _Erasable(StrEnum):
    """What can be erased."""

    NOTE = "note"
    PRINCIPAL = "principal"


@with_options
def history(
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    at: At,
    first: Annotated[
        int | None,
        typer.Option(help="The first entry to show; negative counts from the end. The last ones if left out."),
    ] = None,
    count: Annotated[int, typer.Option(help="How many entries to show at most.")] = 20,
) -> None:
    """Show an account's entries, page by page: charges, refusals, reservations and what became of them."""
    with at.ledger() as ledger:
        own = ledger.account(account)
        size = own.size
        page = own.history(-count if first is None and count > 0 else first or 0, count)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("entry", "time (UTC)", "verb", "cost", "by", "key", "note"):
        table.add_column(name, no_wrap=name in ("entry", "time (UTC)", "verb", "key"))
    for entry, principal, note in page:
        key = f"{entry.key[:6]}..." if _RANDOM.fullmatch(entry.key) else entry.key
        cost = "" if entry.guarantee is None else str(entry.guarantee)
        # A note is anybody's text: what would move a terminal's cursor is left out.
        plain = "".join(letter if letter.isprintable() else " " for letter in note)
        table.add_row(
            str(entry.sequence), f"{entry.moment:%Y-%m-%d %H:%M:%S}", entry.verb, cost, principal, key, plain
        )
    begin = page[0].entry.sequence if page else size
    if page and len(page) < size:
        table.caption = f"entries {begin} to {begin + len(page) - 1} of {size}; --first and --count show others"
        table.caption_justify = "left"
    form = {"account": account, "size": size, "entries": [past.to_dict() for past in page]}
    say(form, table if page else f"no entries from {first} on: {account} has {size}", as_json=at.json)


@with_options
def verify(*, at: At, checkpoint: CheckpointFile = None) -> None:
    """Replay every entry of every account; name the first that does not follow."""
    kept = checkpoint_from(checkpoint)
    with at.ledger() as ledger, progress("verifying", quiet=at.json) as report:
        found = ledger.verify(checkpoint=kept, progress=report)
        clock = examine_clock(ledger.books.balances().values(), time.time_ns() // 1000)
    since = "" if kept is None else ", and nothing was removed or rewritten since the checkpoint"
    ahead = f"\n{clock.found}: {clock.advice}" if clock.advice else ""
    form = verification_to_dict(found) | {"clock": clock.to_dict()}
    say(form, f"{found}{since}{ahead}\nhead {found.checkpoint.head}", as_json=at.json)


@with_options
def checkpoint(
    *,
    at: At,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it here instead; keep it elsewhere.")
    ] = None,
) -> None:
    """Say where every account stands, to be kept elsewhere: verify then sees what was removed or rewritten."""
    with at.ledger() as ledger:
        form = ledger.checkpoint().to_dict()
    if out is None:
        say(form, json.dumps(form, indent=1), as_json=at.json)
        return
    out.write_text(json.dumps(form, indent=1) + "\n", encoding="utf-8")
    accounts = len(form["accounts"])
    text = f"wrote {out}: {accounts} account{'s' * (accounts != 1)}, head {form['head']}"
    say(form, text, as_json=at.json)


@with_options
def erase(
    what: Annotated[_Erasable, typer.Argument(help="What to erase.")],
    name: Annotated[str, typer.Argument(help="The note's entry, such as census-2030#17, or the principal's name.")],
    *,
    at: At,
) -> None:
    """Erase a note, or a principal's name, for ever. The entries stay, and still verify."""
    with at.ledger() as ledger:
        erased = ledger.erase_note(name) if what is _Erasable.NOTE else ledger.erase_principal(name)
        if not erased:
            raise LedgerError(f"there is no {what} {name!r} in {ledger.url}, or it was erased before")
    say({"erased": what, "name": name}, f"erased the {what} {name}", as_json=at.json)


def verification_to_dict(found: Verification) -> dict[str, object]:
    """Return what a replay found, in plain types."""
    return {
        "verified": True,
        "entries": found.entries,
        "accounts": len(found.checkpoint.accounts),
        "notes_erased": found.notes_erased,
        "principals_erased": found.principals_erased,
        "set_back": [*found.set_back],
        "checkpoint": found.checkpoint.to_dict(),
        "uncertified": [*found.uncertified],
    }
