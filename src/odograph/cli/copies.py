"""Copies: backup, restore, export, import."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
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
    with _removing(), at.ledger() as ledger, progress("copying", quiet=at.json) as report:
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
    with _removing(), at.ledger() as ledger, progress("restoring", quiet=at.json) as report:
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
        with at.ledger() as ledger, progress("exporting", quiet=sys.stdout.isatty()) as report:
            ledger.export(sys.stdout, progress=report)
        return
    with _removing(), at.ledger() as ledger, progress("exporting", quiet=at.json) as report, new_file(out) as file:
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
    with (
        path.open(encoding="utf-8") as file,
        _removing(),
        at.ledger() as ledger,
        progress("importing", quiet=at.json) as report,
    ):
        found = ledger.import_(file, checkpoint=kept, progress=report)
        _taken_in(path, found, ledger.url, kept, at)


@contextmanager
def _removing() -> Iterator[None]:
    """Let a signal that ends the process end the block first, as an interrupt does: what it began is removed."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the signature of a handler
        raise SystemExit(128 + number)

    known = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])] if known else []
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
