"""Keys in a SQLite file beside the ledger's, and keys in memory."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError, ServiceUnavailable
from odograph.ledger.sql import statements
from odograph.ledger.sqlite_errors import code_of
from odograph.ledger.sqlite_files import NO_FILE, identity, keep_from_forks, make_file, open_file
from odograph.service.sql import SCHEMA, Run, queries, schema

__all__ = ["MemoryDatabase", "SqliteDatabase"]

_APPLICATION: Final = 0x0D06_0002  # how the file says what it is
_SQL: Final = queries("sqlite")
_T = TypeVar("_T")


class MemoryDatabase:
    """The same tables in memory, for tests and embedding: nothing is kept when the process ends."""

    def __init__(self) -> None:
        self.url = "memory://"
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        _make_tables(self._connection)

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        self._require_own()
        with self._lock:
            return self._connection.execute(_SQL[query], arguments).fetchall()

    def write(self, work: Callable[[Run], _T]) -> _T:
        """Call the work under the lock; undo what it did if it raises."""
        self._require_own()
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                done = work(_runner(self._connection))
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            return done

    def close(self) -> None:
        """Nothing has to be let go: the keys are here and nowhere else."""

    def __del__(self) -> None:
        self._connection.close()

    def _require_own(self) -> None:
        if self._pid != os.getpid():
            raise LedgerError("these keys in memory are a copy in a forked process, where no key can be revoked")


class SqliteDatabase:
    """One file beside the ledger's: a connection kept for reading, and one for each of the few writes."""

    def __init__(self, ledger: Path, *, timeout: float = 10.0) -> None:
        try:
            # A ledger has one key store, by whatever link it is reached: what is revoked must be revoked there too.
            own = ledger.resolve()
        except (OSError, RuntimeError) as problem:
            raise LedgerError(f"{ledger} is no place for a ledger: {problem}") from problem
        self._path = own.with_name(f"{own.name}-access")
        self.url = f"sqlite:///{self._path}"
        self._timeout = timeout
        self._read_lock = threading.RLock()
        self._write_lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._file = NO_FILE
        keep_from_forks(self)

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        with self._read_lock, self._translating():
            if self._reader is None:
                if self._file == NO_FILE and not self._path.exists():
                    return []
                self._reader = self._connect()
                self._reader.execute("PRAGMA query_only = ON")
            self._require_same()
            return self._reader.execute(_SQL[query], arguments).fetchall()

    def write(self, work: Callable[[Run], _T]) -> _T:
        """Call the work under SQLite's write lock; what it did is synced to the disk on return."""
        with self._write_lock, self._translating():
            if self._file == NO_FILE and not self._path.exists():
                self._make()
            with closing(self._connect()) as connection:  # closed, it undoes what was not committed
                connection.execute("BEGIN IMMEDIATE")
                done = work(_runner(connection))
                connection.execute("COMMIT")
            return done

    def close(self) -> None:
        """Close the connection; it is made again when it is needed."""
        with self._read_lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    def forking(self) -> Generator[None]:
        """Let nothing of SQLite into a forked process: what it remembers of its locks would be wrong there."""
        with self._write_lock, self._read_lock:
            self.close()
            yield

    def _make(self) -> None:
        """Make the file, unless another process is first."""

        def whole(path: Path) -> None:
            with closing(open_file(path, self._timeout)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                _make_tables(connection)

        make_file(self._path, whole)

    def _connect(self) -> sqlite3.Connection:
        connection = open_file(self._path, self._timeout)
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """See that the file is what it should be, and the one that was used before."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION:
            raise LedgerError(f"{self._path} does not hold keys of Odograph; it was left as it is")
        if version != SCHEMA:
            raise LedgerError(
                f"{self._path} has schema {version}, and this version of Odograph knows {SCHEMA}: upgrade Odograph."
                " The file was left as it is"
            )
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL")  # a copy made by other tools may have lost it
        if self._file == NO_FILE:
            self._file = identity(str(self._path))  # for good
        self._require_same()

    def _require_same(self) -> None:
        """Fail closed: a key that is revoked in the file that is there now would still be valid in the old one."""
        if identity(str(self._path)) != self._file:
            raise LedgerError(f"{self._path} was moved or replaced while in use. If it was meant, connect again")

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Say what SQLite's errors mean for the caller."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as problem:
            code = code_of(problem) if isinstance(problem, sqlite3.Error) else sqlite3.SQLITE_CORRUPT
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LedgerBusy(f"another program holds {self._path}; no key was changed. Try again") from problem
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise LedgerCorrupt(f"{self._path} is damaged ({problem}); restore it, or move it away") from problem
            if code == sqlite3.SQLITE_IOERR:  # what reached the disk before it failed may be found there later
                raise ServiceUnavailable(
                    f"the disk failed ({problem}); list the keys to know the outcome"
                ) from problem
            raise LedgerError(f"{self._path} could not be used ({problem}); no key was changed") from problem
        except OSError as problem:
            raise LedgerError(f"no keys can be kept at {self._path}: {problem.strerror}") from problem


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements(schema("sqlite")):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("COMMIT")


def _runner(connection: sqlite3.Connection) -> Run:
    return lambda query, *arguments: connection.execute(_SQL[query], arguments).fetchall()
