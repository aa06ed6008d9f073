"""Keys in the ledger's PostgreSQL database, in a schema of their own. No state is left in a connection."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import errors as pg

from odograph.errors import LedgerBusy, LedgerCorrupt, LedgerError, OdographError, ServiceUnavailable
from odograph.ledger.postgres_connections import Connection, connected, line_of
from odograph.service.sql import SCHEMA, Run, queries, schema

__all__ = ["PostgresDatabase"]

_SQL: Final = {name: text.encode() for name, text in queries("postgres").items()}
_T = TypeVar("_T")


class PostgresDatabase:
    """One database: a connection kept for reading, made again when it is lost, and one for each of the few writes."""

    def __init__(self, conninfo: str, url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> None:
        self.url = url
        self._conninfo = conninfo
        self._timeout = timeout
        self._accept_fsync_off = accept_fsync_off
        self._renew()

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        if self._pid != os.getpid():  # the parent still speaks through this connection
            _LEFT_ALONE.append(self._reader)
            self._renew()
        with self._lock, self._translated():
            try:
                return self._query(query, arguments)
            except psycopg.OperationalError:
                if self._reader is None or not self._reader.closed:
                    raise
                return self._query(query, arguments)  # the server went away since the last time, and may be back

    def write(self, work: Callable[[Run], _T]) -> _T:
        """Call the work under a lock of the whole database; what it did is synced by the server on return."""
        with self._translated(), self._connect() as connection:  # closed, it undoes what was not committed
            connection.execute(_SQL["begin"])
            connection.execute(_SQL["settings"], (f"{max(1, int(self._timeout * 1000))}ms",))
            connection.execute(_SQL["one_at_a_time"])
            if not self._there(connection):
                connection.execute(schema("postgres").encode())
                connection.execute(_SQL["set_version"], (SCHEMA,))
            done = work(lambda query, *arguments: _rows(connection.execute(_SQL[query], arguments)))
            self._commit(connection)
            return done

    def close(self) -> None:
        """Close the connection; it is made again when it is needed."""
        with self._lock:
            if self._reader is not None and self._pid == os.getpid():
                self._reader.close()
            self._renew()

    def _renew(self) -> None:
        self._lock = threading.RLock()
        self._reader: Connection | None = None
        self._made = False  # whether the tables were there when last looked for; once there, they stay
        self._pid = os.getpid()  # last: another thread of a forked process may be waiting for it

    def _query(self, query: str, arguments: tuple[object, ...]) -> list[tuple[Any, ...]]:
        if self._reader is None or self._reader.closed:
            self._reader = self._connect()
        self._made = self._made or self._there(self._reader)
        return _rows(self._reader.execute(_SQL[query], arguments)) if self._made else []

    def _there(self, connection: Connection) -> bool:
        """Say whether the tables are there, and see that this version knows them."""
        if connection.execute(_SQL["there"]).fetchone() != (True,):
            return False
        row = connection.execute(_SQL["version"]).fetchone()
        if row != (SCHEMA,):
            raise LedgerError(
                f"the keys in {self.url} have schema {row[0] if row else 'none'}, and this version of Odograph knows"
                f" {SCHEMA}: upgrade Odograph. They were left as they are"
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
                raise  # the server says so itself, and has not committed
            raise ServiceUnavailable(
                f"{self.url} was lost in the middle of a commit; list the keys to know the outcome"
            ) from problem
        if cursor.statusmessage != "COMMIT":
            raise LedgerError(f"{self.url} did not commit ({cursor.statusmessage}); no key was changed")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Say what PostgreSQL's errors mean for the caller."""
        try:
            yield
        except OdographError:
            raise
        except (pg.LockNotAvailable, pg.QueryCanceled) as problem:
            raise LedgerBusy("another process is changing the keys; nothing was changed. Try again") from problem
        except (pg.DataCorrupted, pg.IndexCorrupted) as problem:
            raise LedgerCorrupt(f"{self.url} is damaged ({line_of(problem)}); no key was changed") from problem
        except psycopg.OperationalError as problem:
            raise LedgerBusy(f"{self.url} was lost ({line_of(problem)}); no key was changed. Try again") from problem
        except psycopg.Error as problem:
            raise LedgerError(f"{self.url} could not be used ({line_of(problem)}); no key was changed") from problem


_LEFT_ALONE: list[object] = []


def _rows(cursor: psycopg.Cursor[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return cursor.fetchall() if cursor.description else []
