"""What SQLite's errors mean for the caller."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError

__all__ = ["code_of", "translated", "translating"]


def translated(problem: sqlite3.Error | UnicodeDecodeError, place: str) -> LedgerError:
    """Say what an error of SQLite means for the caller; where the file is, if it may be the wrong place."""
    if isinstance(problem, UnicodeDecodeError):
        return _damaged("a message of SQLite's that is no text")
    if code_of(problem) in _UNWRITABLE:
        return LedgerError(
            f"{place} cannot be written ({problem}); nothing was charged. A ledger is a file that you may write, not"
            " a folder"
        )
    return _TRANSLATIONS.get(code_of(problem), _unexpected)(problem)


@contextmanager
def translating(place: str) -> Iterator[None]:
    """Translate what is raised inside."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as problem:
        raise translated(problem, place) from problem


def code_of(problem: sqlite3.Error) -> int:
    """Return SQLite's code for an error, without what extends it."""
    return getattr(problem, "sqlite_errorcode", 0) & 0xFF


def _busy(_: sqlite3.Error) -> LedgerError:
    return LedgerBusy("another program holds the ledger's file; nothing was charged. Try again")


def _full(_: sqlite3.Error) -> LedgerError:
    return LedgerBusy("the disk is full; nothing was charged. Make room and try again")


def _damaged(problem: sqlite3.Error | str) -> LedgerError:
    return LedgerCorrupt(
        f"the ledger's file is damaged ({problem}); nothing was charged. Restore a backup, with the latest checkpoint"
        " that you kept"
    )


def _contradicts(problem: sqlite3.Error) -> LedgerError:
    return LedgerCorrupt(f"what was to be stored contradicts what is ({problem}); nothing was stored")


def _unexpected(problem: sqlite3.Error) -> LedgerError:
    return LedgerError(f"the ledger's file could not be used ({problem}); nothing was charged")


_UNWRITABLE: Final = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM)
_TRANSLATIONS: Final[dict[int, Callable[[sqlite3.Error], LedgerError]]] = {
    sqlite3.SQLITE_BUSY: _busy,
    sqlite3.SQLITE_LOCKED: _busy,
    sqlite3.SQLITE_FULL: _full,
    sqlite3.SQLITE_CORRUPT: _damaged,
    sqlite3.SQLITE_NOTADB: _damaged,
    sqlite3.SQLITE_CONSTRAINT: _contradicts,
}
