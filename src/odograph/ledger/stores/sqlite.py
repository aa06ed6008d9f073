"""A ledger in one SQLite file, which several processes may use at once."""

from __future__ import annotations

import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from odograph.concurrency import FairFileLock, refuse_reentry, suspend_for_forks
from odograph.errors import LedgerCorrupt, LedgerError, LedgerNotFound, OutcomeUnknown
from odograph.ledger.entries import Entry
from odograph.ledger.stores.base import (
    SCHEMA,
    Balance,
    Changes,
    Note,
    Pending,
    Record,
    State,
    Wants,
    Work,
    closed_error,
    keep_records,
    migrations,
    queries,
)
from odograph.ledger.stores.sqlite_files import (
    NOTHING,
    FileName,
    application_of,
    code_of,
    error_of,
    exclusive,
    lost_log_error,
    make_file,
    open_file,
    refuse_second_name,
    translate_errors,
)

__all__ = ["SQL", "SqliteSnapshot", "SqliteStore", "statements"]

SQL: Final = queries("sqlite")
_VALUES: Final = re.compile(r"VALUES (\((?:[^()]|\([^()]*\))*\))")
_MAX_ROWS: Final = 64  # rows in one statement
_LEDGER: Final = 0x0D06_0001  # the application id of a ledger
_BACKUP: Final = 0x0D06_0003  # that of a backup, which takes no charges: it would be a second budget
_T = TypeVar("_T")
_SETTINGS: Final = ("journal_mode", "synchronous", "foreign_keys")
_CHUNK: Final = 1024  # rows read at a time from a complete ledger
_NO_END: Final = 2**63 - 1
_POLL_INTERVAL: Final = 0.002  # seconds between two attempts to change the journal mode


class SqliteStore:
    """One file, a writing and a reading connection, and a fair lock among processes."""

    _writer_name: FileName  # the file's, made with each of the two connections
    _reader_name: FileName

    def __init__(self, path: Path, *, timeout: float = 10.0, backup: bool = False) -> None:
        self._kind = _BACKUP if backup else _LEDGER  # of a new file; an existing one has its own
        self.url = f"sqlite:///{path}"
        self._path = path.absolute()  # the working directory may change
        self._name = str(self._path)
        self.timeout = self._timeout = timeout
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._file_lock: FairFileLock | None = None
        self._closed = False
        self._file = NOTHING
        # The log and its index, as the writing connection opened them.
        self._logs: list[tuple[FileName, tuple[int, int, int]]] = []
        suspend_for_forks(self)

    def create(self) -> None:
        """Create the file, with the current schema, if there is none."""
        if not self._exists():
            self._make(lambda _: None)

    def write(self, wants: Wants, work: Work) -> None:
        """Decide and store under SQLite's write lock."""

        def transaction(connection: sqlite3.Connection) -> None:
            changes = work(_read_state(connection, wants))
            if changes.entries:
                self._refuse_backup()
                _store_changes(connection, changes)
                _commit(connection)

        self._transact(transaction)

    def probe(self) -> None:
        """Write the version of the schema again, under SQLite's write lock, and sync it."""

        def transaction(connection: sqlite3.Connection) -> None:
            self._refuse_backup()
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            _commit(connection)

        self._transact(transaction)

    def settings(self) -> dict[str, str]:
        """Return the journal mode of the file, and how commits on it are synced."""
        with self._reading() as connection:
            values = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _SETTINGS}
        return {name: str(value).lower() for name, value in values.items()}

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one transaction."""

        def transaction(connection: sqlite3.Connection) -> None:
            with _without_foreign_keys(connection):
                if connection.execute(SQL["accounts"]).fetchone() is not None:
                    raise LedgerError(f"{self.url} is not empty: a copy can only be read into a new ledger")
                connection.execute(
                    SQL["forget_principals"]
                )  # no entry has their identities; those of the copy follow
                for part in parts:
                    _store_changes(connection, part)
                connection.execute(SQL["fill_pending"])
                connection.execute(SQL["fill_voids"])
                connection.executemany(SQL["add_principal"], principals.items())
                connection.execute(SQL["mark_erased"])
                broken = connection.execute("PRAGMA foreign_key_check").fetchone()
                if broken is not None:  # pragma: no cover  the replay finds it first
                    raise LedgerCorrupt("the copy contradicts itself; nothing was imported")
                _commit(connection)

        if self._exists():
            self._transact(transaction)
        elif not self._make(transaction):
            raise LedgerError(
                f"another process has just created {self.url}: a copy can only be read into a new ledger"
            )

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment."""
        with self._reading() as connection:
            if names is None:
                rows = connection.execute(SQL["accounts"]).fetchall()
            else:
                rows = _execute_many(connection, "some_accounts", [(name,) for name in names])
        return {row[0]: Balance.read(row) for row in rows}

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some entries of an account."""
        with self._reading() as connection:
            return [Entry(*row) for row in connection.execute(SQL["entries"], (account, first, count))]

    def openings(self, accounts: Iterable[str]) -> dict[str, Entry]:
        """Read the first entries of some accounts."""
        with self._reading() as connection:
            rows = _execute_many(connection, "openings", [(account,) for account in accounts])
        return {row[1]: Entry._make(row) for row in rows}

    def pending(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some open reservations of an account."""
        with self._reading() as connection:
            return [Entry(*row) for row in connection.execute(SQL["pending"], (account, first, count))]

    def pending_count(self, account: str) -> int:
        """Count the open reservations of an account."""
        with self._reading() as connection:
            return int(connection.execute(SQL["pending_count"], (account,)).fetchone()[0])

    def pending_counts(self) -> dict[str, int]:
        """Count the open reservations of every account."""
        with self._reading() as connection:
            return dict(connection.execute(SQL["pending_counts"]).fetchall())

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
                raise LedgerCorrupt(f"{self.url} is damaged: a principal that was just stored is not found")
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
        """Read the file at one moment, on a connection of its own, while other processes go on writing."""
        with translate_errors(self._name):
            connection = self._connect()
            try:
                self._require_same(FileName(self._name))
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
        if self._file_lock is not None:
            self._file_lock.close()
        self._writer = self._reader = None
        self._file_lock = None

    def forking(self) -> Generator[None]:
        """Close SQLite before a fork: its record of the locks it holds would be wrong in the child."""
        with self._write_lock, self._read_lock:
            self._disconnect()
            yield

    def _exists(self) -> bool:
        if self._closed:
            raise closed_error(self.url)
        try:
            return self._path.exists()
        except (OSError, ValueError) as problem:
            raise LedgerError(f"{self.url} cannot be reached ({problem})") from problem

    def _make(self, fill: Callable[[sqlite3.Connection], None]) -> bool:
        """Create the file complete or not at all, and never over another; return whether this call created it."""

        def fill_new(path: Path) -> None:
            # On two connections: the one that migrates still applies the checks of the first schema.
            with translate_errors(self._name):
                with closing(open_file(path, self._timeout)) as connection:
                    self._migrate(connection)
                with closing(open_file(path, self._timeout)) as connection:
                    connection.execute("BEGIN IMMEDIATE")
                    fill(connection)

        try:
            return make_file(self._path, fill_new)
        except OSError as problem:
            raise LedgerError(f"no ledger can be created at {self._path}: {problem.strerror}") from problem

    def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Call the work in a write transaction, under the fair lock; what it does not commit is rolled back."""
        refuse_reentry(self._write_lock)
        with self._write_lock:
            try:
                if self._writer is None or self._file_lock is None:
                    connection = self._connect_writer()
                    self._writer, self._file_lock = connection, FairFileLock(self._path.resolve(), self._timeout)
                connection = self._writer
                with self._file_lock:
                    self._require_same(self._writer_name)
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
                raise error_of(problem, self._name) from problem
            except OSError as problem:
                raise LedgerError(f"{self.url} cannot be written ({problem})") from problem
            except BaseException:
                if self._file_lock is not None:  # an interrupt may have come just before it was released
                    self._file_lock.release()
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        refuse_reentry(self._read_lock)
        with self._read_lock, translate_errors(self._name):
            if self._reader is None:
                reader = self._connect()
                self._reader_name = FileName(self._name)
                self._reader = reader
                self._reader.execute("PRAGMA query_only = ON")
            connection = self._reader
            self._require_same(self._reader_name)
            try:
                connection.execute("BEGIN")
                yield connection
            finally:
                if connection.in_transaction:  # pragma: no branch  SQLite may have rolled back by itself
                    connection.execute("ROLLBACK")

    def _refuse_backup(self) -> None:
        if self._kind == _BACKUP:
            raise LedgerError(
                f"{self.url} is a backup, and read-only. Restore it into a new ledger, with a checkpoint that was"
                " taken when the original stopped, and use that one"
            )

    def _require_same(self, name: FileName) -> None:
        """Raise if the file was moved, so that changes would be lost, or was given a second name."""
        found = name.look_up()
        if found == self._file:
            return
        if found[1:] != self._file[1:]:
            raise LedgerError(f"{self.url} was moved or replaced while in use. If that was intended, connect again")
        if self._kind == _LEDGER:
            refuse_second_name(self._path)

    def _require_log(self, *, written: bool = False) -> None:
        """Raise if the log or its index was replaced since the writing connection opened it."""
        for name, opened in self._logs:
            if name.look_up()[1:] == opened:
                continue
            if not written:
                raise lost_log_error(name.path)
            raise OutcomeUnknown(
                f"{name.path} was deleted or replaced during a commit. Close every program that uses the ledger and"
                " connect again; then ask again with the same key to know the outcome"
            )

    def _connect_writer(self) -> sqlite3.Connection:
        connection = self._connect()
        self._writer_name = FileName(self._name)
        names = [FileName(f"{self._path.resolve()}-{name}") for name in ("wal", "shm")]
        self._logs = [(name, name.look_up()[1:]) for name in names]
        return connection

    def _connect(self) -> sqlite3.Connection:
        """Open the existing file for durable commits, and migrate it to the current schema."""
        if not self._exists():
            raise LedgerNotFound(f"there is no ledger at {self._path}; opening an account creates one")
        if application_of(self._path) in (_LEDGER, None):
            refuse_second_name(self._path)  # before SQLite reads a log that may be the wrong one
        with exclusive(self._timeout):
            connection = self._connect_guarded()
        if self._file == NOTHING:  # and never again: what is cached about accounts belongs to this file
            self._file = (1, *FileName(self._name).look_up()[1:])
        return connection

    def _connect_guarded(self) -> sqlite3.Connection:
        # Changing the journal mode, and rolling back what a killed program left, must come before the locks that
        # guard the log. Another connection does both; while that one is open, they cannot become necessary again.
        with closing(open_file(self._path, self._timeout)) as first:
            if not self._is_current(first):
                self._migrate(first)
            return open_file(self._path, self._timeout, guarded=True)

    def _is_current(self, connection: sqlite3.Connection) -> bool:
        """Return whether the file needs no migration; raise if it cannot be migrated."""
        kind = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if kind not in (_LEDGER, _BACKUP):
            empty = "" if self._path.stat().st_size else " (the file is empty)"
            raise LedgerError(f"{self._path} is not a ledger of Odograph{empty}; it was not changed")
        self._kind = kind
        self._require_known(version)
        # Other tools may have copied the file without its journal mode.
        mode: str = connection.execute("PRAGMA journal_mode").fetchone()[0]
        return bool(version == SCHEMA) and mode == "wal"

    def _require_known(self, version: int) -> None:
        if version > SCHEMA:
            raise LedgerError(
                f"{self._path} has schema {version}, but this version of Odograph reads {SCHEMA}; upgrade Odograph."
                " The file was not changed"
            )

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Apply the missing migrations, all or none."""
        self._set_journal_mode(connection)
        connection.execute("BEGIN IMMEDIATE")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        self._require_known(version)  # again: another program may have upgraded the file meanwhile
        for script in migrations("sqlite")[version:]:
            for statement in statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {self._kind}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _set_journal_mode(self, connection: sqlite3.Connection) -> None:
        """Set the journal mode. SQLite itself does not wait here for another program that reads, so this does."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as problem:
                if code_of(problem) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_INTERVAL)
            else:
                return

    def _erase(self, query: str, arguments: tuple[object, ...]) -> bool:
        def transaction(connection: sqlite3.Connection) -> bool:
            erased = connection.execute(SQL[query], arguments).rowcount > 0
            if query == "erase_principal":
                connection.execute(SQL["mark_erased"])  # also those that earlier versions did not mark
            _commit(connection)
            # The text is overwritten in the file (secure_delete); this removes it from the write-ahead log too.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return erased

        return self._transact(transaction)


class SqliteSnapshot:
    """A complete ledger at one moment, read in short transactions.

    During a long transaction SQLite could not write its log back, and the log would grow with every charge. So only
    the last entry of every account is read in one transaction: earlier entries never change, and can be read later.
    If the number of entries contradicts the accounts, or a note has no entry, all rows are read in one transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        # Some queries read only the indexes of these tables, so reading rows would not show a damaged index.
        for table in ("accounts", "principals", "pending", "voids"):
            if connection.execute(f"PRAGMA integrity_check({table})").fetchone() != ("ok",):
                raise LedgerCorrupt(f"the ledger's file is damaged: the table {table} contradicts its index")
        self.balances = [Balance.read(row) for row in connection.execute(SQL["accounts"])]
        self.size, self.keys = connection.execute(SQL["sizes"]).fetchone()
        self.pending = {*map(Pending._make, connection.execute(SQL["all_pending"]))}
        self.voids: dict[str, int] = dict(connection.execute(SQL["void_counts"]).fetchall())
        self._last = {balance.head.name: balance.sequence for balance in self.balances}
        self._others = -1  # the last sequence of accounts that were opened later
        complete = self.size == len(self._last) + sum(self._last.values())
        if complete and connection.execute(SQL["stray_note"]).fetchone() is None:
            connection.execute("ROLLBACK")
        else:
            self._others = _NO_END
            names = connection.execute(SQL["accounts_of_entries"]).fetchall()
            self._last = dict.fromkeys(sorted({*self._last, *(row[0] for row in names)}, key=str), _NO_END)

    def records(self) -> Iterator[Record]:
        """Yield every entry, account by account."""
        for name, last in self._last.items():
            first = 0
            while first <= last:
                rows = self._connection.execute(SQL["records"], (name, first, last, _CHUNK)).fetchall()
                at_end = len(rows) < _CHUNK
                for row in rows:
                    yield Entry._make(row[:14]), None if row[14] is None else row[14:]
                if at_end:
                    break
                first = rows[-1][2] + 1

    def notes(self) -> Iterator[Note]:
        """Yield every note that was not erased."""
        after = ("", -1)
        while rows := self._connection.execute(SQL["all_notes"], (*after, _CHUNK)).fetchall():
            for note in map(Note._make, rows):
                if note.sequence <= self._last.get(note.account, self._others):
                    yield note
            after = rows[-1][:2]

    def principals(self) -> dict[str, str]:
        """Return the names that were not erased, by identity."""
        return dict(self._connection.execute(SQL["principals"]).fetchall())


@contextmanager
def _without_foreign_keys(connection: sqlite3.Connection) -> Iterator[None]:
    """Begin the transaction again with foreign keys off; the block must check them before it commits.

    Accounts are inserted after their entries. While a referenced row is missing, SQLite searches the referring tables
    at every insertion, and `keys` has no index for that: loading a copy would take quadratic time.
    """
    connection.execute("ROLLBACK")  # inside a transaction the setting has no effect
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
        # A part that reached the disk before it failed may be found there after a restart.
        raise OutcomeUnknown(
            f"the disk failed during a commit ({problem}); ask again with the same key to know the outcome"
        ) from problem


# Rows: what a group of requests reads and stores, in few statements.


def _read_state(connection: sqlite3.Connection, wants: Wants) -> State:
    """Read what a group of requests wants, inside its transaction."""
    rows = _execute_many(connection, "some_accounts", [*zip(wants.accounts, strict=True)])
    if wants.opens:
        for query, names in ("tree", wants.trees), ("block", wants.datasets):
            rows += [row for name in names for row in connection.execute(SQL[query], (name,))]
    state = State(time.time_ns() // 1000, {}, {})
    for row in rows:
        state.balances[row[0]] = Balance.read(row)
    if keep_records(state.keys, _execute_many(connection, "keys", [*wants.keys])):
        unused = [*(wants.keys - state.keys.keys())]
        keep_records(state.keys, _execute_many(connection, "erased_keys", unused))
    return state


def _store_changes(connection: sqlite3.Connection, changes: Changes) -> None:
    """Store what a group of requests changed, inside its transaction."""
    if changes.opened:
        _execute_many(connection, "open_accounts", [(*b.head, *b.columns, b.origin) for b in changes.opened])
    _execute_many(connection, "append_entries", changes.entries)
    for name, balance in changes.moved.items():
        connection.execute(SQL["move_account"], (*balance.columns, name))
    _execute_many(
        connection, "remember_keys", [(*key, used.account, used.sequence) for key, used in changes.keys.items()]
    )
    if changes.notes:
        _execute_many(connection, "keep_notes", changes.notes)


def _execute_many(connection: sqlite3.Connection, query: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Execute a query for many rows, in few statements.

    During each statement other threads may take the interpreter lock, and the writing thread then waits for it. With
    a statement per row a group would take as long as its requests one by one.
    """
    if len(rows) == 1:
        return connection.execute(SQL[query], rows[0]).fetchall()
    found: list[tuple[Any, ...]] = []
    done = 0
    while done < len(rows):
        size = min(_MAX_ROWS, 1 << (len(rows) - done).bit_length() - 1)  # few distinct statements, all cached
        values = [*chain.from_iterable(rows[done : done + size])]
        found += connection.execute(_repeat_values(query, size), values).fetchall()
        done += size
    return found


@cache
def _repeat_values(query: str, size: int) -> str:
    return _VALUES.sub(lambda found: f"VALUES {', '.join([found[1]] * size)}", SQL[query])


def statements(script: str) -> Iterator[str]:
    """Split a script for SQLite; `executescript` of the sqlite3 module would commit the open transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
