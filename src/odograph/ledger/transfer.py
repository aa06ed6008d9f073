"""Copies of a ledger, as JSON Lines and as SQLite files. A copy is replayed while it is imported.

A copy that is older than its original would give spent budget back. So a copy that is behind its checkpoint is
refused, and a copy without a checkpoint is imported with every account closed.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from odograph.concurrency import pace
from odograph.display import Progress
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerNotFound, explain
from odograph.ledger.audit import Auditor
from odograph.ledger.entries import (
    KEYLESS,
    Entry,
    check_key,
    digest_of,
    key_owner,
    note_digest,
    shown,
    stamp,
    text_of,
)
from odograph.ledger.results import Checkpoint, Verification
from odograph.ledger.stores.base import Balance, Changes, IdempotencyRecord, Note, Snapshot, Store
from odograph.ledger.stores.sqlite import SqliteStore

__all__ = [
    "Piece",
    "backup",
    "check_checkpoint",
    "check_file",
    "export",
    "lines",
    "open_backup",
    "pieces",
    "take_in",
]

_FORM: Final = 1  # the version of the format
_PART_SIZE: Final = 4096  # entries stored at a time
_REPORT_INTERVAL: Final = 5000  # entries between two reports of progress
_NUMBERS: Final = ("version", "sequence", "time")

# A piece of a copy: an entry, a note, a principal's identity and name, or at the end the checkpoint of the original.
Piece = Entry | Note | tuple[str, str] | Checkpoint


def export(snapshot: Snapshot, file: IO[str], progress: Progress | None = None) -> Checkpoint:
    """Write a ledger as JSON Lines."""
    file.write(text_of({"odograph": "ledger", "form": _FORM}) + "\n")
    checkpoint = Checkpoint({})
    done = 0
    for piece in pieces(snapshot):
        if isinstance(piece, Entry):
            form = {name: str(value) for name, value in piece._asdict().items()}
            file.write(text_of({"entry": form}) + "\n")
            done += 1
            if progress is not None and not done % _REPORT_INTERVAL:
                progress(done, snapshot.size)
        elif isinstance(piece, Note):
            file.write(text_of({"note": piece._asdict() | {"sequence": str(piece.sequence)}}) + "\n")
        elif isinstance(piece, Checkpoint):
            checkpoint = piece
            file.write(text_of({"checkpoint": piece.to_dict(), "entries": str(done)}) + "\n")
        else:
            file.write(text_of({"principal": {"identity": piece[0], "name": piece[1]}}) + "\n")
    return checkpoint


def lines(file: IO[str]) -> Iterator[Piece]:
    """Yield the pieces of an export, or raise `LedgerCorrupt` with the number of the line."""
    number, entries, ended = 0, 0, False
    for number, line in enumerate(_text_lines(file), 1):
        try:
            form = json.loads(line)
            piece: Piece | None = None
            if number == 1:
                _begin(form)
            else:
                piece = _piece(form, entries, ended=ended)
        except (LedgerCorrupt, AttributeError, LookupError, RecursionError, TypeError, ValueError) as problem:
            raise LedgerCorrupt(
                f"line {number} cannot be read ({explain(problem)}); nothing was imported"
            ) from problem
        if piece is not None:
            yield piece
        entries += isinstance(piece, Entry)
        ended = isinstance(piece, Checkpoint)
    if not ended:
        raise LedgerCorrupt(f"the copy was truncated after line {number}; nothing was imported")


def _begin(form: dict[str, Any]) -> None:
    """Check the first line, which names the format."""
    if (form["odograph"], form["form"]) != ("ledger", _FORM):
        raise LedgerCorrupt(f"it must name a ledger of form {_FORM}")


def _text_lines(file: IO[str]) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as problem:
        raise LedgerCorrupt("an export must be UTF-8; a backup is read with restore") from problem


def _piece(form: dict[str, Any], entries: int, *, ended: bool) -> Piece:
    if ended:
        raise LedgerCorrupt("it comes after the end of the copy")
    if "checkpoint" in form:
        if int(form["entries"]) != entries:
            raise LedgerCorrupt(f"{int(form['entries'])} entries were written, but {entries} were found")
        return Checkpoint.from_dict(form["checkpoint"])
    ((kind, fields),) = form.items()
    if any(not isinstance(value, str) for value in fields.values()):
        raise LedgerCorrupt("every field must be a string")
    if kind == "principal":
        return _check_principal(fields["identity"]), _check_principal(fields["name"])
    numbers = {name: int(fields[name]) for name in _NUMBERS if name in fields}
    if kind not in ("entry", "note"):
        raise LedgerCorrupt(f"{shown(kind)} is not a known kind of line")
    return Entry(**(fields | numbers)) if kind == "entry" else Note(**(fields | numbers))


def _check_principal(text: str) -> str:
    try:
        return check_key(text)
    except InvalidArgument as problem:
        raise LedgerCorrupt("the name or identity of a principal is not valid") from problem


def backup(pieces: Iterable[Piece], path: Path, progress: Progress | None = None) -> Checkpoint:
    """Copy a ledger into a new SQLite file, which is marked as read-only."""
    if os.path.exists(path):  # noqa: PTH110  it returns False where Path.exists raises
        raise InvalidArgument(f"path must be a new file (got {path}, which exists)")
    return _take_in(SqliteStore(path, backup=True), pieces, None, None, progress).checkpoint


@contextmanager
def open_backup(path: Path) -> Iterator[Snapshot]:
    """Yield the content of a backup."""
    if not os.path.exists(path):  # noqa: PTH110  it returns False where Path.exists raises
        raise LedgerNotFound(f"there is no backup at {path}")
    source = SqliteStore(path)
    try:
        with source.snapshot() as snapshot:
            yield snapshot
    finally:
        source.close()


def take_in(
    store: Store,
    pieces: Iterable[Piece],
    principal: str,
    checkpoint: Checkpoint | None,
    progress: Progress | None = None,
) -> Verification:
    """Import a copy into an empty ledger; close every account unless a checkpoint shows that it is current."""
    check_checkpoint(checkpoint)
    return _take_in(store, pieces, principal if checkpoint is None else None, checkpoint, progress)


def check_checkpoint(checkpoint: object) -> None:
    """Raise `InvalidArgument` unless it is a checkpoint or None."""
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise InvalidArgument(
            f"checkpoint must be a Checkpoint, as from Checkpoint.from_dict (got {shown(checkpoint)})"
        )
    if checkpoint is not None and not checkpoint.accounts:
        raise InvalidArgument("checkpoint must name at least one account (got none)")


def check_file(file: object, verb: str, mode: str) -> None:
    """Raise `InvalidArgument` unless it can be read or written like an open file."""
    read = isinstance(file, Iterable) and not isinstance(file, str | bytes)
    if not (hasattr(file, "write") if mode == "w" else read):
        raise InvalidArgument(
            f"file must be an open file (got {shown(file)}): with open('f.jsonl', {mode!r}) as file:"
            f" ledger.{verb}(file)"
        )


def _take_in(
    store: Store,
    pieces: Iterable[Piece],
    closed_by: str | None,
    checkpoint: Checkpoint | None,
    progress: Progress | None,
) -> Verification:
    taken = _Intake(closed_by, checkpoint, progress)
    store.load(taken.parts(pieces), taken.principals)
    return taken.verification()


class _Intake:
    """Replays a copy while it is stored."""

    def __init__(self, closed_by: str | None, checkpoint: Checkpoint | None, progress: Progress | None) -> None:
        self.principals: dict[str, str] = {}
        self._auditor = Auditor(checkpoint)
        self._closed_by = closed_by
        self._progress = progress
        self._entries = 0
        self._noted: dict[tuple[str, int], str] = {}
        self._seen: set[str] = set()
        self._balances: dict[str, Balance] = {}

    def parts(self, pieces: Iterable[Piece]) -> Iterator[Changes]:
        """Yield the changes to store; the last part has the balances that follow from all entries."""
        part = Changes()
        original: Checkpoint | None = None
        for piece in pieces:
            if isinstance(piece, Entry):
                self._take(piece, part)
                if len(part.entries) >= _PART_SIZE:
                    yield part
                    part = Changes()
            elif isinstance(piece, Note):
                if self._noted.pop((piece.account, piece.sequence), None) != note_digest(piece.salt, piece.text):
                    raise LedgerCorrupt(f"the note of {piece.account}#{piece.sequence} does not match its digest")
                part.notes.append(piece)
            elif isinstance(piece, Checkpoint):
                original = piece
            elif piece[0] in self.principals or piece[1] in self.principals.values():
                raise LedgerCorrupt("a principal is named twice in the copy; nothing was imported")
            else:
                self.principals[piece[0]] = piece[1]
        self._balances = self._auditor.finish()
        if original is None or original.head != self._checkpoint().head:
            raise LedgerCorrupt("the copy does not match its own checkpoint; nothing was imported")
        part.opened = [*self._balances.values()]
        if self._closed_by is not None:
            self._close_all(part)
        yield part

    def verification(self) -> Verification:
        """Return what was imported."""
        erased = len(self._seen - {*self.principals})
        return Verification(
            self._checkpoint(),
            self._entries,
            len(self._noted),
            erased,
            uncertified=self._auditor.uncertified_accounts(),
            set_back=tuple(self._auditor.set_back),
        )

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint({name: (balance.sequence, balance.seal) for name, balance in self._balances.items()})

    def _take(self, entry: Entry, part: Changes) -> None:
        self._auditor.take(entry)
        part.entries.append(entry)
        if entry.verb not in KEYLESS and entry.request_id == entry.id:
            used = (key_owner(entry.verb, entry.principal), entry.key)
            if used in part.keys:
                raise LedgerCorrupt(f"entry {entry.id}: its key {entry.key!r} was used before; nothing was imported")
            part.keys[used] = IdempotencyRecord(entry.account, entry.sequence, entry.verb, entry.request)
        if entry.note:
            self._noted[entry.account, entry.sequence] = entry.note
        self._seen.add(entry.principal)
        self._entries += 1
        if self._progress is not None and not self._entries % _REPORT_INTERVAL:
            self._progress(self._entries, 0)

    def _close_all(self, part: Changes) -> None:
        """Close every account in the same transaction: a crash must not leave a copy that takes charges."""
        identity = next((one for one, name in self.principals.items() if name == self._closed_by), "")
        if not identity:
            identity = secrets.token_hex(16)
            self.principals[identity] = str(self._closed_by)
        now = time.time_ns() // 1000
        for name, balance in self._balances.items():
            if not balance.closed:
                entry = balance.append(
                    time=stamp(now, [balance.time]),
                    principal=identity,
                    verb="close",
                    legs=f"{name}#{balance.sequence + 1}",
                    request=digest_of("close", ((name, ""),)),
                    detail=text_of({"copy": "without a checkpoint"}),
                )
                part.entries.append(entry)
                balance.closed = True
                self._entries += 1


def pieces(snapshot: Snapshot) -> Iterator[Piece]:
    """Yield the pieces of a ledger: entries, notes, principals, and its checkpoint."""
    for entry, _ in pace(snapshot.records()):
        yield entry
    yield from snapshot.notes()
    yield from snapshot.principals().items()
    yield Checkpoint({b.head.name: (b.sequence, b.seal) for b in snapshot.balances})
