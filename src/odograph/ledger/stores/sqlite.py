"""A ledger in one SQLite file: nothing to start, several processes at once."""

from __future__ import annotations

import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from odograph.errors import AccountNotFound, LedgerCorrupt, LedgerError, ServiceUnavailable
from odograph.ledger.entries import Entry
from odograph.ledger.reentry import refuse_reentry
from odograph.ledger.stores.base import Balance, Changes, Note, Record, Wants, Work, closed
from odograph.ledger.stores.fair_file_lock import FairFileLock
from odograph.ledger.stores.sql import SCHEMA, migrations, statements
from odograph.ledger.stores.sqlite_errors import code_of, translated, translating
from odograph.ledger.stores.sqlite_files import (
    NOTHING,
    application_of,
    file_at,
    identity,
    keep_from_forks,
    make_file,
    open_file,
    refuse_second_name,
)
from odograph.ledger.stores.sqlite_guard import alone, lost
from odograph.ledger.stores.sqlite_rows import SQL, many, read_state, store_changes

__all__ = ["SqliteSnapshot", "SqliteStore"]

_LEDGER: Final = 0x0D06_0001  # how a file says that it is a ledger
_BACKUP: Final = 0x0D06_0003  # or a backup of one: a second file that spends would be a second budget
_T = TypeVar("_T")
_CHUNK: Final = 1024  # rows at a time, in a walk over everything
_NO_END: Final = 2**63 - 1
_PAUSE: Final = 0.002  # seconds between two tries


class SqliteStore:
    """One file, one writing and one reading connection, and a turn among processes."""

    def __init__(self, path: Path, *, timeout: float = 10.0, backup: bool = False) -> None:
        self._kind = _BACKUP if backup else _LEDGER  # of a file that is made; of one that is there, what it says
        self.url = f"sqlite:///{path}"
        self._path = path.absolute()  # the working folder may change
        self._name = str(self._path)
        self.timeout = self._timeout = timeout
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._turn: FairFileLock | None = None
        self._closed = False
        self._file = NOTHING
        self._logs: dict[str, tuple[int, int]] = {}  # the log that the writing connection has and its index, by name
        keep_from_forks(self)

    def create(self) -> None:
        """Make the file, with the current schema, if there is none."""
        if not self._there():
            self._make(lambda _: None)

    def write(self, wants: Wants, work: Work) -> None:
        """Decide and store under SQLite's write lock."""

        def transaction(connection: sqlite3.Connection) -> None:
            changes = work(read_state(connection, wants))
            if changes.entries:
                self._refuse_backup()
                store_changes(connection, changes)
                _commit(connection)

        self._transact(transaction)

    def probe(self) -> None:
        """Write the schema's number again, under SQLite's write lock, and sync it."""

        def transaction(connection: sqlite3.Connection) -> None:
            self._refuse_backup()
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            _commit(connection)

        self._transact(transaction)

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one transaction."""

        def transaction(connection: sqlite3.Connection) -> None:
            with _without_foreign_keys(connection):
                if connection.execute(SQL["accounts"]).fetchone() is not None:
                    raise LedgerError(f"{self.url} is not empty: a copy can only be read into a new ledger")
                connection.execute(SQL["forget_principals"])  # no entry has their identities; the copy's have
                for part in parts:
                    store_changes(connection, part)
                connection.executemany(SQL["add_principal"], principals.items())
                connection.execute(SQL["mark_erased"])
                broken = connection.execute("PRAGMA foreign_key_check").fetchone()
                if broken is not None:  # pragma: no cover  the replay finds it first
                    raise LedgerCorrupt("the copy contradicts itself; nothing was taken in")
                _commit(connection)

        if self._there():
            self._transact(transaction)
        elif not self._make(transaction):
            raise LedgerError(f"another process has just made {self.url}: a copy can only be read into a new ledger")

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment."""
        with self._reading() as connection:
            if names is None:
                rows = connection.execute(SQL["accounts"]).fetchall()
            else:
                rows = many(connection, "some_accounts", [(name,) for name in names])
        return {row[0]: Balance.read(row) for row in rows}

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some entries of an account."""
        with self._reading() as connection:
            return [Entry(*row) for row in connection.execute(SQL["entries"], (account, first, count))]

    def pending(self, account: str) -> list[Entry]:
        """Read the reservations of an account that nobody has resolved."""
        with self._reading() as connection:
            return [Entry(*row) for row in connection.execute(SQL["pending"], (account,))]

    def voids(self, account: str) -> int:
        """Count the reservations of an account that were voided."""
        with self._reading() as connection:
            return int(connection.execute(SQL["voids"], (account,)).fetchone()[0])

    def notes(self, account: str, first: int, count: int) -> dict[int, Note]:
        """Read the notes of some entries."""
        with self._reading() as connection:
            rows = connection.execute(SQL["notes"], (account, first, first + count)).fetchall()
        return {note.sequence: note for note in map(Note._make, rows)}

    def principal(self, name: str) -> str:
        """Return the identity of a principal."""

        def transaction(connection: sqlite3.Connection) -> str:
            self._refuse_backup()
            connection.execute(SQL["add_principal"], (secrets.token_hex(16), name))
            found = connection.execute(SQL["principal"], (name,)).fetchone()
            if found is None:
                raise LedgerCorrupt(
                    f"{self.url} is damaged: a principal was stored and is not found; nothing was charged"
                )
            _commit(connection)
            return str(found[0])

        with self._reading() as connection:
            known = connection.execute(SQL["principal"], (name,)).fetchone()
        return self._transact(transaction) if known is None else known[0]

    def principals(self) -> dict[str, str]:
        """Read the names, by identity."""
        with self._reading() as connection:
            return dict(connection.execute(SQL["principals"]).fetchall())

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note."""
        return self._erase("erase_note", (account, sequence))

    def erase_principal(self, name: str) -> bool:
        """Erase a name."""
        return self._erase("erase_principal", (name,))

    @contextmanager
    def snapshot(self) -> Iterator[SqliteSnapshot]:
        """Look at the file as it is now, on a connection of its own, while others go on writing."""
        with translating(self._name):
            connection = self._connect()
            try:
                self._require_same()
                connection.execute("BEGIN")
                yield SqliteSnapshot(connection)
            finally:
                connection.close()

    def close(self) -> None:
        """Close the connections."""
        refuse_reentry(self._write_lock)
        refuse_reentry(self._read_lock)
        with self._write_lock, self._read_lock:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        for connection in filter(None, (self._writer, self._reader)):
            connection.close()
        if self._turn is not None:
            self._turn.close()
        self._writer = self._reader = None
        self._turn = None

    def forking(self) -> Generator[None]:
        """Let nothing of SQLite into a forked process: what it remembers of its locks would be wrong there."""
        with self._write_lock, self._read_lock:
            self._disconnect()
            yield

    def _there(self) -> bool:
        if self._closed:
            raise closed(self.url)
        try:
            return self._path.exists()
        except (OSError, ValueError) as problem:
            raise LedgerError(f"{self.url} cannot be reached ({problem}); nothing was charged") from problem

    def _make(self, fill: Callable[[sqlite3.Connection], None]) -> bool:
        """Make the file complete or not at all, and never in place of another; say whether it is this one."""

        def whole(path: Path) -> None:
            # On two connections: the one that migrates has still the checks of the first schema in mind.
            with translating(self._name):
                with closing(open_file(path, self._timeout)) as connection:
                    self._migrate(connection)
                with closing(open_file(path, self._timeout)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    fill(connection)

        try:
            return make_file(self._path, whole)
        except OSError as problem:
            raise LedgerError(f"no ledger can be made at {self._path}: {problem.strerror}") from problem

    def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call the work in a write transaction, in turn with other processes; what it does not commit is undone."""
        refuse_reentry(self._write_lock)
        with self._write_lock:
            try:
                if self._writer is None or self._turn is None:
                    self._writer, self._turn = (
                        self._connect_writer(),
                        FairFileLock(self._path.resolve(), self._timeout),
                    )
                connection = self._writer
                with self._turn:
                    self._require_same()
                    self._require_log()
                    try:
                        connection.execute("BEGIN IMMEDIATE")
                        done = work(connection)
                    finally:
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                    self._require_log(written=True)
                    return done
            except (sqlite3.Error, UnicodeDecodeError) as problem:
                raise translated(problem, self._name) from problem
            except OSError as problem:
                raise LedgerError(f"{self.url} cannot be written ({problem}); nothing was charged") from problem
            except BaseException:
                if self._turn is not None:  # an interrupt may have come just before it was given back
                    self._turn.give_back()
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        refuse_reentry(self._read_lock)
        with self._read_lock, translating(self._name):
            if self._reader is None:
                self._reader = self._connect()
                self._reader.execute("PRAGMA query_only = ON")
            connection = self._reader
            self._require_same()
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:  # pragma: no branch  SQLite may have rolled back by itself
                    connection.execute("ROLLBACK")

    def _refuse_backup(self) -> None:
        if self._kind == _BACKUP:
            raise LedgerError(
                f"{self.url} is a backup, for reading; nothing was written. Restore it into a new ledger, with a"
                " checkpoint that was taken when the original stopped, and use that one"
            )

    def _require_same(self) -> None:
        """Raise if the file is elsewhere, where what is written would be lost, or has got a second name."""
        found = file_at(self._name)
        if found == self._file:
            return
        if found[:2] != self._file[:2]:
            raise LedgerError(
                f"{self.url} was moved or replaced while in use; nothing was charged. If it was meant, connect again"
            )
        if self._kind == _LEDGER:
            refuse_second_name(self._path)

    def _require_log(self, *, written: bool = False) -> None:
        """Raise if the log or its index is not the one that the writing connection has."""
        for name, opened in self._logs.items():
            if identity(name) == opened:
                continue
            if not written:
                raise lost(name)
            raise ServiceUnavailable(
                f"{name} was deleted or replaced while in use, in the middle of a commit. Close every program that"
                " uses the ledger, and connect again; then ask again with the same key to know the outcome"
            )

    def _connect_writer(self) -> sqlite3.Connection:
        connection = self._connect()
        names = (f"{self._path.resolve()}-{name}" for name in ("wal", "shm"))
        self._logs = {name: identity(name) for name in names}
        return connection

    def _connect(self) -> sqlite3.Connection:
        """Open the file that is there, bring it to the current schema, and see to it that commits are durable."""
        if not self._there():
            raise AccountNotFound(f"there is no ledger at {self._path}; opening an account makes one")
        if application_of(self._path) in (_LEDGER, None):
            refuse_second_name(self._path)  # before SQLite looks at a log that may be the wrong one
        with alone(self._timeout):
            connection = self._connect_alone()
        if self._file == NOTHING:
            self._file = (
                *file_at(self._name)[:2],
                1,
            )  # for good: what is remembered of the accounts is about this file
        return connection

    def _connect_alone(self) -> sqlite3.Connection:
        # What changes the journal mode, or undoes what a killed program left, needs the file without the locks that
        # guard the log. So that is seen to first, by another connection: while it is open, it stays done.
        with closing(open_file(self._path, self._timeout)) as first:
            if not self._is_current(first):
                self._migrate(first)
            return open_file(self._path, self._timeout, guarded=True)

    def _is_current(self, connection: sqlite3.Connection) -> bool:
        """Say whether the file is as this version of Odograph makes it; raise if it cannot be brought to that."""
        kind = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if kind not in (_LEDGER, _BACKUP):
            empty = "" if self._path.stat().st_size else ": it is empty, and a ledger never is"
            raise LedgerError(f"{self._path} is not a ledger of Odograph{empty}; it was left as it is")
        self._kind = kind
        if version > SCHEMA:
            raise LedgerError(
                f"{self._path} has schema {version}, and this version of Odograph knows {SCHEMA}: upgrade Odograph."
                " The file was left as it is"
            )
        # A copy made by other tools may have lost its journal mode.
        mode: str = connection.execute("PRAGMA journal_mode").fetchone()[0]
        return bool(version == SCHEMA) and mode == "wal"

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Apply the migrations that the file lacks, together or not at all."""
        self._set_journal_mode(connection)
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for script in migrations("sqlite")[version:]:
            for statement in statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {self._kind}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _set_journal_mode(self, connection: sqlite3.Connection) -> None:
        """Wait for the file as long as for a lock: SQLite itself does not wait here if another program reads."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as problem:
                if code_of(problem) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
            else:
                return

    def _erase(self, query: str, arguments: tuple[object, ...]) -> bool:
        def transaction(connection: sqlite3.Connection) -> bool:
            erased = connection.execute(SQL[query], arguments).rowcount > 0
            if query == "erase_principal":
                connection.execute(SQL["mark_erased"])  # earlier versions left no mark
            _commit(connection)
            # The text is overwritten in the file (secure_delete); this takes it out of the write-ahead log too.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return erased

        return self._transact(transaction)


class SqliteSnapshot:
    """A whole ledger at one moment, read in short transactions.

    A long one would keep SQLite from writing its log back, which grows with every charge until then. Where every
    account stands is read in one transaction; what was written before that never changes, so it can be read later. If
    the entries are not as many as the accounts say, or a note has none, all that there is is read in one transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Their indexes answer some questions without the table, so a damaged one would not be seen by reading rows.
        for table in ("accounts", "principals"):
            if connection.execute(f"PRAGMA integrity_check({table})").fetchone() != ("ok",):
                raise LedgerCorrupt(f"the ledger's file is damaged: the table {table} contradicts its index")
        self.balances = [Balance.read(row) for row in connection.execute(SQL["accounts"])]
        self.size, self.keys = connection.execute(SQL["sizes"]).fetchone()
        self._last = {balance.head.name: balance.sequence for balance in self.balances}
        self._others = -1  # the last sequence of accounts that were opened later
        whole = self.size == len(self._last) + sum(self._last.values())
        if whole and connection.execute(SQL["stray_note"]).fetchone() is None:
            connection.execute("ROLLBACK")
        else:
            self._others = _NO_END
            names = connection.execute(SQL["accounts_of_entries"]).fetchall()
            self._last = dict.fromkeys(sorted({*self._last, *(row[0] for row in names)}, key=str), _NO_END)

    def records(self) -> Iterator[Record]:
        """Every entry, account by account."""
        for name, last in self._last.items():
            first = 0
            while first <= last:
                rows = self._connection.execute(SQL["records"], (name, first, last, _CHUNK)).fetchall()
                whole = len(rows) < _CHUNK
                self._check_index(name, first, last if whole else rows[-1][2], rows)
                for row in rows:
                    yield Entry._make(row[:14]), None if row[14] is None else row[14:]
                if whole:
                    break
                first = rows[-1][2] + 1

    def _check_index(self, name: str, first: int, last: int, rows: Sequence[tuple[Any, ...]]) -> None:
        indexed = self._connection.execute(SQL["indexed_reservations"], (name, first, last)).fetchall()
        if [sequence for (sequence,) in indexed] != [row[2] for row in rows if row[5] == "reserve"]:
            raise LedgerCorrupt(f"the ledger's file is damaged: the index of {name!r}'s reservations is wrong")

    def notes(self) -> Iterator[Note]:
        """Every note that was not erased."""
        after = ("", -1)
        while rows := self._connection.execute(SQL["all_notes"], (*after, _CHUNK)).fetchall():
            for note in map(Note._make, rows):
                if note.sequence <= self._last.get(note.account, self._others):
                    yield note
            after = rows[-1][:2]

    def principals(self) -> dict[str, str]:
        """The names that were not erased, by identity."""
        return dict(self._connection.execute(SQL["principals"]).fetchall())


@contextmanager
def _without_foreign_keys(connection: sqlite3.Connection) -> Iterator[None]:
    """Begin the transaction again without foreign keys, for the length of the block, which checks them at its end.

    Accounts come after their entries. While a row that others refer to is missing, SQLite searches the referring
    tables at every insertion, and `keys` has no index for that: a copy would take quadratic time.
    """
    connection.execute("ROLLBACK")  # within a transaction the setting has no effect
    connection.execute("PRAGMA foreign_keys = OFF")
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("PRAGMA foreign_keys = ON")


def _commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.OperationalError as problem:  # pragma: no cover  a disk fails in a test, which is not measured
        if code_of(problem) != sqlite3.SQLITE_IOERR:
            raise
        # What reached the disk before it failed may be found there after a restart.
        raise ServiceUnavailable(
            f"the disk failed in the middle of a commit ({problem}); ask again with the same key to know the outcome"
        ) from problem
