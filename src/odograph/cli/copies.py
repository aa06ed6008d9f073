"""Copies: backup, restore, export, import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from odograph.cli.options import At, CheckpointFile, checkpoint_from, new_file, progress, say, with_options
from odograph.cli.records import verification_to_dict
from odograph.errors import InvalidPolicy, LedgerError
from odograph.ledger.receipts import Checkpoint, Verification

__all__ = ["backup", "export", "import_", "restore"]


@with_options
def backup(path: Annotated[Path, typer.Argument(metavar="FILE", help="A new SQLite file.")], *, at: At) -> None:
    """Copy the whole ledger, as it is now, into a new SQLite file."""
    with at.ledger() as ledger, progress("copying", quiet=at.json) as report:
        stood = ledger.backup(path, progress=report)
    _copied(path, stood, at)


@with_options
def restore(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What backup wrote.")],
    *,
    at: At,
    checkpoint: CheckpointFile = None,
) -> None:
    """Read a backup into a new ledger. Without a checkpoint every account is closed.

    An old backup would give spent budget back. A checkpoint kept elsewhere shows that it is current.
    """
    kept = checkpoint_from(checkpoint)
    if not path.is_file():  # before a new ledger is made for it
        raise LedgerError(f"there is no backup at {path}")
    with at.ledger() as ledger, progress("restoring", quiet=at.json) as report:
        found = ledger.restore(path, checkpoint=kept, progress=report)
        _taken_in(path, found, ledger.url, kept, at)


@with_options
def export(
    *,
    at: At,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A new file; printed if left out.")] = None,
) -> None:
    """Write the whole ledger as JSON Lines, integers as text."""
    if out is None:
        if at.json:
            raise InvalidPolicy("export prints JSON Lines, not one document: with --json, say where by --out FILE")
        with at.ledger() as ledger:
            ledger.export(sys.stdout)
        return
    with at.ledger() as ledger, progress("exporting", quiet=at.json) as report, new_file(out) as file:
        stood = ledger.export(file, progress=report)
    _copied(out, stood, at)


@with_options
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What export wrote.")],
    *,
    at: At,
    checkpoint: CheckpointFile = None,
) -> None:
    """Read an export into a new ledger, replaying all of it. Without a checkpoint every account is closed."""
    kept = checkpoint_from(checkpoint)
    with path.open(encoding="utf-8") as file, at.ledger() as ledger, progress("importing", quiet=at.json) as report:
        found = ledger.import_(file, checkpoint=kept, progress=report)
        _taken_in(path, found, ledger.url, kept, at)


def _copied(path: Path, stood: Checkpoint, at: At) -> None:
    accounts = len(stood.accounts)
    text = f"wrote {path}: {accounts} account{'s' * (accounts != 1)}, head {stood.head}"
    say({"file": str(path), "checkpoint": stood.to_dict()}, text, as_json=at.json)


def _taken_in(path: Path, found: Verification, url: str, kept: Checkpoint | None, at: At) -> None:
    closed = kept is None
    why = (
        "every account is closed, because without a checkpoint an old copy would give spent budget back"
        if closed
        else "it is not behind its checkpoint, so its accounts are as they were"
    )
    form = verification_to_dict(found) | {"file": str(path), "url": url, "closed": closed}
    say(form, f"read {path} into {url}\n{found}\n{why}", as_json=at.json)
