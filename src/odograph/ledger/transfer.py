"""Copies of a ledger: as JSON Lines and as SQLite files, replayed on the way in.

A copy that is older than its original would give spent budget back. So one that is behind its checkpoint is refused,
and one without a checkpoint is taken in with every account closed.
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

from odograph.errors import InvalidGuarantee, LedgerCorrupt, LedgerError, explain
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
from odograph.progress import Progress, paced

__all__ = [
    "Piece",
    "backup",
    "check_checkpoint",
    "check_file",
    "export",
    "lines",
    "opened_backup",
    "pieces",
    "take_in",
]

_FORM: Final = 1
_PART: Final = 4096  # entries stored at a time
_EVERY: Final = 5000  # entries between two reports of progress
_NUMBERS: Final = ("version", "sequence", "time")

# A piece of a copy: an entry, a note, a principal's identity and name, or how it ends: where the original stood.
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
            if progress is not None and not done % _EVERY:
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
    """Read what `export` wrote, or raise `LedgerCorrupt` and name the line."""
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
                f"line {number} cannot be read ({explain(problem)}); nothing was taken in"
            ) from problem
        if piece is not None:
            yield piece
        entries += isinstance(piece, Entry)
        ended = isinstance(piece, Checkpoint)
    if not ended:
        raise LedgerCorrupt(f"the copy was cut off after line {number}; nothing was taken in")


def _begin(form: dict[str, Any]) -> None:
    """Read the first line, which says what this is."""
    if (form["odograph"], form["form"]) != ("ledger", _FORM):
        raise LedgerCorrupt(f"this is not a ledger of form {_FORM}")


def _text_lines(file: IO[str]) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as problem:
        raise LedgerCorrupt("an export is text, and this is not; a backup is read with restore") from problem


def _piece(form: dict[str, Any], entries: int, *, ended: bool) -> Piece:
    if ended:
        raise LedgerCorrupt("the copy had ended before it")
    if "checkpoint" in form:
        if int(form["entries"]) != entries:
            raise LedgerCorrupt(f"{int(form['entries'])} entries were written, and {entries} are here")
        return Checkpoint.from_dict(form["checkpoint"])
    ((kind, fields),) = form.items()
    if any(not isinstance(value, str) for value in fields.values()):
        raise LedgerCorrupt("every field is a text")
    if kind == "principal":
        return _checked(fields["identity"]), _checked(fields["name"])
    numbers = {name: int(fields[name]) for name in _NUMBERS if name in fields}
    if kind not in ("entry", "note"):
        raise LedgerCorrupt(f"{shown(kind)} is not known")
    return Entry(**(fields | numbers)) if kind == "entry" else Note(**(fields | numbers))


def _checked(text: str) -> str:
    try:
        return check_key(text)
    except InvalidGuarantee as problem:
        raise LedgerCorrupt("a principal's name or identity is not one") from problem


def backup(pieces: Iterable[Piece], path: Path, progress: Progress | None = None) -> Checkpoint:
    """Copy a ledger into a new SQLite file, as it is, which says of itself that it is for reading."""
    if os.path.exists(path):  # noqa: PTH110  it says no where Path.exists raises
        raise LedgerError(f"there is a file at {path} already; a backup is a new file")
    return _take_in(SqliteStore(path, backup=True), pieces, None, None, progress).checkpoint


@contextmanager
def opened_backup(path: Path) -> Iterator[Snapshot]:
    """Look at a backup."""
    if not os.path.exists(path):  # noqa: PTH110  it says no where Path.exists raises
        raise LedgerError(f"there is no backup at {path}; nothing was restored")
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
    """Read a copy into an empty ledger; without a checkpoint that shows it is current, every account is closed."""
    check_checkpoint(checkpoint)
    return _take_in(store, pieces, principal if checkpoint is None else None, checkpoint, progress)


def check_checkpoint(checkpoint: object) -> None:
    """Raise unless it is a checkpoint, or none was given."""
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise LedgerError(
            f"checkpoint must be a Checkpoint, as from Checkpoint.from_dict, and {shown(checkpoint)} is not"
        )
    if checkpoint is not None and not checkpoint.accounts:
        raise LedgerError("the checkpoint names no account, so it shows nothing; nothing was done")


def check_file(file: object, verb: str, mode: str) -> None:
    """Raise unless it is an open file, or something that is read or written like one."""
    read = isinstance(file, Iterable) and not isinstance(file, str | bytes)
    if not (hasattr(file, "write") if mode == "w" else read):
        raise LedgerError(
            f"{verb} takes an open file, and {shown(file)} is not one; nothing was done. Use"
            f" with open('f.jsonl', {mode!r}) as file: ledger.{verb}(file)"
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
        """Yield what to store, piece by piece; the last part has the balances that all of it adds up to."""
        part = Changes()
        stood: Checkpoint | None = None
        for piece in pieces:
            if isinstance(piece, Entry):
                self._take(piece, part)
                if len(part.entries) >= _PART:
                    yield part
                    part = Changes()
            elif isinstance(piece, Note):
                if self._noted.pop((piece.account, piece.sequence), None) != note_digest(piece.salt, piece.text):
                    raise LedgerCorrupt(
                        f"the note of {piece.account}#{piece.sequence} is not the one that was written"
                    )
                part.notes.append(piece)
            elif isinstance(piece, Checkpoint):
                stood = piece
            elif piece[0] in self.principals or piece[1] in self.principals.values():
                raise LedgerCorrupt("a principal is named twice in the copy; nothing was taken in")
            else:
                self.principals[piece[0]] = piece[1]
        self._balances = self._auditor.finish()
        if stood is None or stood.head != self._checkpoint().head:
            raise LedgerCorrupt("the copy does not end where its original stood; nothing was taken in")
        part.opened = [*self._balances.values()]
        if self._closed_by is not None:
            self._close_all(part)
        yield part

    def verification(self) -> Verification:
        """Say what was taken in."""
        erased = len(self._seen - {*self.principals})
        return Verification(
            self._checkpoint(),
            self._entries,
            len(self._noted),
            erased,
            uncertified=self._auditor.uncertified(),
            set_back=tuple(self._auditor.set_back),
        )

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint({name: (balance.sequence, balance.seal) for name, balance in self._balances.items()})

    def _take(self, entry: Entry, part: Changes) -> None:
        self._auditor.take(entry)
        part.entries.append(entry)
        if entry.verb not in KEYLESS and entry.called == entry.place:
            used = (key_owner(entry.verb, entry.principal), entry.key)
            if used in part.keys:
                raise _twice(entry)
            part.keys[used] = IdempotencyRecord(entry.account, entry.sequence, entry.verb, entry.request)
        if entry.note:
            self._noted[entry.account, entry.sequence] = entry.note
        self._seen.add(entry.principal)
        self._entries += 1
        if self._progress is not None and not self._entries % _EVERY:
            self._progress(self._entries, 0)

    def _close_all(self, part: Changes) -> None:
        """Close every account in the same transaction: a crash must not leave a copy that can be spent from."""
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


def _twice(entry: Entry) -> LedgerCorrupt:
    return LedgerCorrupt(f"entry {entry.place}: its key {entry.key!r} was used before; nothing was taken in")


def pieces(snapshot: Snapshot) -> Iterator[Piece]:
    """Take a ledger apart: entries, notes, principals, and where it stands."""
    for entry, _ in paced(snapshot.records()):
        yield entry
    yield from snapshot.notes()
    yield from snapshot.principals().items()
    yield Checkpoint({b.head.name: (b.sequence, b.seal) for b in snapshot.balances})
