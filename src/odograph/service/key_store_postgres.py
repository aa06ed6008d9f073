"""Keys in the ledger's PostgreSQL database, in a schema of their own. A connection keeps no session state."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors as pg

from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError, OdographError, OutcomeUnknown
from odograph.ledger.stores.postgres_connections import Connection, connected, line_of
from odograph.service.key_store import SCHEMA, RunQuery, queries, schema

__all__ = ["PostgresDatabase"]

_SQL: Final = {name: text.encode() for name, text in queries("postgres").items()}
_T = TypeVar("_T")


class PostgresDatabase:
    """A PostgreSQL database: one lasting connection for reads, reopened when lost, and a new one for each write."""

    def __init__(self, conninfo: str, url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> None:
        self.url = url
        self._conninfo = conninfo
        self._timeout = timeout
        self._accept_fsync_off = accept_fsync_off
        self._reset()

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        if self._pid != os.getpid():  # the parent process still uses this connection
            _PARENT_CONNECTIONS.append(self._reader)  # closing it here would close the parent's
            self._reset()
        with self._lock, self._translate_errors():
            try:
                return self._query(query, arguments)
            except psycopg.OperationalError:
                if self._reader is None or not self._reader.closed:
                    raise
                return self._query(query, arguments)  # the server was away since the last query, and may be back

    def write(self, work: Callable[[RunQuery], _T]) -> _T:
        """Call `work` under a lock of the whole database; the server has synced its changes on return."""
        with self._translate_errors(), self._connect() as connection:  # closing rolls back what was not committed
            connection.execute(_SQL["begin"])
            connection.execute(_SQL["settings"], (f"{max(1, int(self._timeout * 1000))}ms",))
            connection.execute(_SQL["one_at_a_time"])
            if not self._has_tables(connection):
                connection.execute(schema("postgres").encode())
                connection.execute(_SQL["set_version"], (SCHEMA,))
            done = work(lambda query, *arguments: _rows(connection.execute(_SQL[query], arguments)))
            self._commit(connection)
            return done

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        with self._lock:
            if self._reader is not None and self._pid == os.getpid():
                self._reader.close()
            self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._reader: Connection | None = None
        self._created = False  # whether the tables were seen; once created, they stay
        self._pid = os.getpid()  # last: another thread of a forked process may be checking it

    def _query(self, query: str, arguments: tuple[object, ...]) -> list[tuple[Any, ...]]:
        if self._reader is None or self._reader.closed:
            self._reader = self._connect()
        self._created = self._created or self._has_tables(self._reader)
        return _rows(self._reader.execute(_SQL[query], arguments)) if self._created else []

    def _has_tables(self, connection: Connection) -> bool:
        """Return whether the tables exist; raise `LedgerError` if their schema is another version's."""
        if connection.execute(_SQL["there"]).fetchone() != (True,):
            return False
        row = connection.execute(_SQL["version"]).fetchone()
        if row != (SCHEMA,):
            raise LedgerError(
                f"the keys in {self.url} have schema {row[0] if row else 'none'}, but this version of Odograph reads"
                f" {SCHEMA}; upgrade Odograph. They were not changed"
            )
        return True

    def _connect(self) -> Connection:
        return connected(self._conninfo, timeout=self._timeout, accept_fsync_off=self._accept_fsync_off)

    def _commit(self, connection: Connection) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(_SQL["commit"])
        except psycopg.Error as problem:
            if problem.diag.severity_nonlocalized == "ERROR":
                raise  # the server reports that it has not committed
            raise OutcomeUnknown(
                f"the connection to {self.url} was lost during a commit; list the keys to know the outcome"
            ) from problem
        if cursor.statusmessage != "COMMIT":
            raise LedgerError(f"{self.url} did not commit ({cursor.statusmessage}); no key was changed")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise PostgreSQL's errors as errors of Odograph."""
        try:
            yield
        except OdographError:
            raise
        except (pg.LockNotAvailable, pg.QueryCanceled) as problem:
            raise LedgerBusy("another process is changing the keys; nothing was changed. Try again") from problem
        except (pg.DataCorrupted, pg.IndexCorrupted) as problem:
            raise LedgerCorrupt(f"{self.url} is damaged ({line_of(problem)}); no key was changed") from problem
        except psycopg.OperationalError as problem:
            raise LedgerBusy(
                f"the connection to {self.url} was lost ({line_of(problem)}); no key was changed. Try again"
            ) from problem
        except psycopg.Error as problem:
            raise LedgerError(f"{self.url} could not be used ({line_of(problem)}); no key was changed") from problem


_PARENT_CONNECTIONS: list[object] = []


def _rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description else []
