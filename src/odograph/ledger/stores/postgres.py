"""A ledger in PostgreSQL, for many machines. A group takes two round trips, and no state is left in the connection.

The first trip begins, locks the accounts in the order of their names, and reads; the second appends, updates and
commits. All of it works behind a pool that shares connections between transactions.

A row that another client holds for longer than a moment is not waited for: the group goes on without the requests
that want it, and for a while the row is only taken if it is free. So a forgotten `SELECT ... FOR UPDATE` holds up the
accounts that it locks and no others.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import errors as pg

from odograph.errors import AccountNotFound, LedgerBusy, LedgerCorrupt, LedgerError, OdographError, ServiceUnavailable
from odograph.ledger.entries import Entry
from odograph.ledger.reentry import refuse_reentry
from odograph.ledger.stores.base import (
    OPENING,
    Balance,
    Changes,
    IdempotencyRecord,
    Note,
    Record,
    RowLocked,
    State,
    Wants,
    Work,
    closed,
)
from odograph.ledger.stores.postgres_connections import Connection, connected, line_of, shown_url
from odograph.ledger.stores.sql import SCHEMA, migrations, queries

__all__ = ["PostgresSnapshot", "PostgresStore"]

_SQL: Final = {name: text.encode() for name, text in queries("postgres").items()}
_CHUNK: Final = 4096  # rows at a time, in a walk over everything
_RACES: Final = 20  # how often a transaction is tried again after another process was first
_PATIENCE: Final = 0.25  # seconds that a group waits for a lock: longer than a queue of groups on a hot account takes
_WARY: Final = 10 * _PATIENCE  # seconds in which a row that was waited for in vain is not waited for again
_IDLE: Final = "30s"  # a client that stops in the middle of a transaction must not hold the others up for ever

_FREE: Final = {name: _SQL[name] + b" SKIP LOCKED" for name in ("lock", "lock_trees")}
_THERE: Final = {name: _SQL[name].removesuffix(b"FOR UPDATE") for name in _FREE}

_NO_TRANSACTION: Final = psycopg.pq.TransactionStatus.IDLE


class PostgresStore:
    """One database, one writing and one reading connection; both are made again when they are lost."""

    def __init__(self, url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> None:
        self.url = shown_url(url)
        self._conninfo = url
        self.timeout = self._timeout = timeout
        self._accept_fsync_off = accept_fsync_off
        self._closed = False
        self._renew()

    def create(self) -> None:
        """Make the tables if there are none."""
        with self._fresh() as connection:
            self._migrate(connection)

    def write(self, wants: Wants, work: Work) -> None:
        """Decide and store under row locks; again from the start when another process was first."""
        self._leave_fork()
        refuse_reentry(self._write_lock)
        with self._write_lock, self._translated():
            for _ in range(_RACES):
                try:
                    changes = work(self._begin(wants))
                    if changes.entries:
                        self._finish(changes)
                except (pg.UniqueViolation, pg.DeadlockDetected, pg.SerializationFailure):
                    continue
                except pg.LockNotAvailable as problem:  # a table, or a key
                    raise RowLocked("another client locks the ledger; nothing was charged. Try again") from problem
                except BaseException as error:
                    if self._writer is not None and not isinstance(error, Exception):
                        self._writer.close()  # an interrupt leaves the connection anywhere in its conversation
                    raise
                finally:
                    self._end()
                return
            raise LedgerBusy(f"other processes were first {_RACES} times in a row; nothing was charged. Try again")

    def probe(self) -> None:
        """Lock the schema's number and commit, which writes to the server's log; briefly, as charges wait for it."""
        self._leave_fork()
        refuse_reentry(self._write_lock)
        with self._write_lock, self._translated():
            try:
                try:
                    self._probe()
                except psycopg.OperationalError:  # as for a charge, a lost connection is made again, once
                    if self._writer is None or not self._writer.closed:
                        raise
                    self._probe()
            finally:
                self._end()

    def _probe(self) -> None:
        connection = self._writing()
        with connection.transaction():
            connection.execute(_SQL["settings"], (self._brief_wait, _IDLE))
            connection.execute(_SQL["probe"])

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one transaction."""
        with self._fresh() as connection, connection.transaction():
            self._migrate(connection)
            connection.execute(_SQL["settings"], (self._lock_timeout, "0"))
            connection.execute(_SQL["one_at_a_time"])
            connection.execute(_SQL["defer"])
            connection.execute(_SQL["forget_principals"])  # no entry has their identities; the copy's have
            if connection.execute(_SQL["accounts"]).fetchone() is not None:
                raise LedgerError(f"{self.url} is not empty: a copy can only be read into a new ledger")
            for part in parts:
                for query, arguments in _statements(part):
                    connection.execute(query, arguments)
            for identity, name in principals.items():
                connection.execute(_SQL["add_principal"], (identity, name))
            connection.execute(_SQL["mark_erased"])

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment."""
        rows = self._read("accounts") if names is None else self._read("some_accounts", [*names])
        return {row[0]: Balance.read(row) for row in rows}

    def entries(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some entries of an account."""
        return [Entry._make(row) for row in self._read("entries", account, first, count)]

    def pending(self, account: str) -> list[Entry]:
        """Read the reservations of an account that nobody has resolved."""
        return [Entry._make(row) for row in self._read("pending", account)]

    def voids(self, account: str) -> int:
        """Count the reservations of an account that were voided."""
        return int(self._read("voids", account)[0][0])

    def notes(self, account: str, first: int, count: int) -> dict[int, Note]:
        """Read the notes of some entries."""
        notes = map(Note._make, self._read("notes", account, first, first + count))
        return {note.sequence: note for note in notes}

    def principal(self, name: str) -> str:
        """Return the identity of a principal."""
        if not self._read("principal", name):
            with self._fresh() as connection, connection.transaction():
                connection.execute(_SQL["settings"], (self._lock_timeout, _IDLE))
                connection.execute(_SQL["add_principal"], (secrets.token_hex(16), name))
        identity: str = self._read("principal", name)[0][0]
        return identity

    def principals(self) -> dict[str, str]:
        """Read the names, by identity."""
        return dict(self._read("principals"))

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note; PostgreSQL overwrites the place when it is vacuumed."""
        return self._erase("erase_note", account, sequence)

    def erase_principal(self, name: str) -> bool:
        """Erase a name; PostgreSQL overwrites the place when it is vacuumed."""
        erased = self._erase("erase_principal", name)
        self._erase("mark_erased")  # earlier versions left no mark
        return erased

    @contextmanager
    def snapshot(self) -> Iterator[PostgresSnapshot]:
        """Look at the database as it is now, on a connection of its own, while others go on writing."""
        with self._fresh() as connection:
            self._require_ledger(connection)
            connection.execute(_SQL["snapshot"])
            yield PostgresSnapshot(connection)

    def close(self) -> None:
        """Close the connections."""
        refuse_reentry(self._write_lock)
        refuse_reentry(self._read_lock)
        with self._write_lock, self._read_lock:
            self._closed = True
            for connection in filter(None, (self._writer, self._reader)):
                if self._pid == os.getpid():  # pragma: no branch  else in a forked process, which is not measured
                    connection.close()
            self._renew()

    def _renew(self) -> None:
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._stuck: dict[str, float] = {}  # what was waited for in vain, and until when it is not waited for again
        self._pid = os.getpid()  # last: another thread of a forked process may be waiting for it

    def _leave_fork(self) -> None:
        """Start anew in a forked process: the parent still speaks through these connections."""
        if self._pid != os.getpid():  # pragma: no cover  in a forked process, which is not measured
            _LEFT_ALONE.append((self._writer, self._reader))
            self._renew()

    @property
    def _lock_timeout(self) -> str:
        return f"{max(1, int(self._timeout * 1000))}ms"

    @property
    def _brief_wait(self) -> str:
        return f"{max(1, int(min(_PATIENCE, self._timeout) * 1000))}ms"

    def _connect(self) -> Connection:
        if self._closed:
            raise closed(self.url)
        return connected(self._conninfo, timeout=self._timeout, accept_fsync_off=self._accept_fsync_off)

    def _connected(self) -> Connection:
        connection = self._connect()
        try:
            self._require_ledger(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_ledger(self, connection: Connection) -> None:
        """See that the tables are there, and bring them to the current schema."""
        if connection.execute(_SQL["ledger_there"]).fetchone() != (True,):
            raise AccountNotFound(f"there is no ledger in {self.url}; opening an account makes one")
        row = connection.execute(_SQL["version"]).fetchone()
        if row is None or row[0] < SCHEMA:
            self._migrate(connection)
        elif row[0] > SCHEMA:
            raise LedgerError(
                f"{self.url} has schema {row[0]}, and this version of Odograph knows {SCHEMA}: upgrade Odograph. The"
                " ledger was left as it is"
            )

    def _migrate(self, connection: Connection) -> None:
        """Apply the migrations that the database lacks, together or not at all."""
        with connection.transaction():
            connection.execute(_SQL["settings"], (self._lock_timeout, _IDLE))
            connection.execute(_SQL["one_at_a_time"])
            there = connection.execute(_SQL["ledger_there"]).fetchone() == (True,)
            row = connection.execute(_SQL["version"]).fetchone() if there else None
            missing = migrations("postgres")[row[0] if row else 0 :]
            for script in missing:
                connection.execute(script.encode())
            if missing:
                connection.execute(_SQL["clear_version"])
                connection.execute(_SQL["set_version"], (SCHEMA,))

    @contextmanager
    def _fresh(self) -> Iterator[Connection]:
        """Use a connection once: for what is rare, or takes long."""
        with self._translated():
            connection = self._connect()
            with connection:
                yield connection

    def _read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        self._leave_fork()
        refuse_reentry(self._read_lock)
        with self._read_lock, self._translated():
            try:
                return self._reading().execute(_SQL[query], arguments).fetchall()
            except psycopg.OperationalError:
                if self._reader is None or not self._reader.closed:
                    raise
                # The server went away since the last time, and may be back.
                return self._reading().execute(_SQL[query], arguments).fetchall()
            except BaseException:
                if self._reader is not None:
                    self._reader.close()  # what a signal handler raises leaves it anywhere in its conversation
                raise

    def _reading(self) -> Connection:
        if self._reader is None or self._reader.closed:
            self._reader = self._connected()
        return self._reader

    def _writing(self) -> Connection:
        if self._writer is None or self._writer.closed:
            self._writer = self._connected()
        return self._writer

    def _begin(self, wants: Wants) -> State:
        """Take the first trip: begin, lock, read. It has no effect yet, so a lost connection is made again, once."""
        try:
            return self._lock(wants)
        except psycopg.OperationalError:
            if self._writer is None or not self._writer.closed:
                raise
            return self._lock(wants)

    def _lock(self, wants: Wants) -> State:
        """Lock what is wanted and read it; without what others hold for longer than a moment, which is then named."""
        everything = wants.accounts | wants.trees | ({OPENING} if wants.opens else frozenset())
        stuck: frozenset[str] = frozenset()
        if self._stuck:
            begun = time.monotonic()
            self._stuck = {name: until for name, until in self._stuck.items() if begun < until}
            stuck = everything & self._stuck.keys()
        try:
            state = _locked(self._writing(), wants, self._brief_wait, stuck)
        except pg.LockNotAvailable:
            self._end()
            state = _locked(self._writing(), wants, self._brief_wait, everything)
            until = time.monotonic() + _WARY
            self._stuck |= dict.fromkeys(state.held | (wants.trees if state.held else frozenset()), until)
        else:
            for name in stuck - state.held - wants.trees:
                del self._stuck[name]
        return state

    def _finish(self, changes: Changes) -> None:
        """Take the second trip: append, update, commit."""
        connection = self._writer
        if connection is None:  # pragma: no cover  the first trip was made on it
            raise LedgerError(f"{self.url} was closed in the middle of a transaction; nothing was charged")
        cursor = connection.cursor()
        try:
            with connection.pipeline():
                for query, arguments in _statements(changes):
                    connection.execute(query, arguments)
                cursor.execute(_SQL["commit"])
        except psycopg.Error as problem:
            if problem.diag.severity_nonlocalized == "ERROR":
                raise  # the server says so itself, and has not committed
            connection.close()
            raise ServiceUnavailable(
                f"{self.url} was lost in the middle of a commit; ask again with the same key to know the outcome"
            ) from problem
        if cursor.statusmessage != "COMMIT":  # pragma: no cover  an aborted transaction raises before
            raise LedgerError(f"{self.url} did not commit ({cursor.statusmessage}); nothing was charged")

    def _end(self) -> None:
        """Leave no transaction open; a connection that cannot end its own is closed, which ends it."""
        connection = self._writer
        if connection is None or connection.closed or connection.info.transaction_status == _NO_TRANSACTION:
            return
        try:
            connection.execute(b"ROLLBACK")
        except psycopg.Error:
            connection.close()

    def _erase(self, query: str, *arguments: object) -> bool:
        with self._fresh() as connection:
            self._require_ledger(connection)
            return connection.execute(_SQL[query], arguments).rowcount > 0

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Say what PostgreSQL's errors mean for the caller."""
        try:
            yield
        except OdographError:
            raise
        except (pg.LockNotAvailable, pg.QueryCanceled) as problem:
            raise LedgerBusy("another process holds the account; nothing was charged. Try again") from problem
        except pg.DiskFull as problem:
            raise LedgerBusy(
                f"the disk of {self.url} is full ({line_of(problem)}); nothing was charged. Make room and try again"
            ) from problem
        except (pg.ReadOnlySqlTransaction, pg.InsufficientPrivilege) as problem:
            raise LedgerError(f"{self.url} cannot be written ({line_of(problem)}); nothing was charged") from problem
        except pg.UniqueViolation as problem:
            raise LedgerCorrupt(f"what was to be stored contradicts what is ({line_of(problem)})") from problem
        except (pg.DataCorrupted, pg.IndexCorrupted) as problem:
            raise LedgerCorrupt(f"{self.url} is damaged ({line_of(problem)}); nothing was charged") from problem
        except psycopg.OperationalError as problem:
            raise LedgerBusy(f"{self.url} was lost ({line_of(problem)}); nothing was charged. Try again") from problem
        except psycopg.Error as problem:
            raise LedgerError(f"{self.url} could not be used ({line_of(problem)}); nothing was charged") from problem


_LEFT_ALONE: list[object] = []


class PostgresSnapshot:
    """A whole ledger, inside one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.balances = [Balance.read(row) for row in connection.execute(_SQL["accounts"])]
        self.size, self.keys = connection.execute(_SQL["sizes"]).fetchone() or (0, 0)

    def records(self) -> Iterator[Record]:
        """Every entry, account by account."""
        with self._connection.cursor("records") as cursor:
            cursor.itersize = _CHUNK
            for row in cursor.execute(_SQL["records"]):
                yield Entry._make(row[:14]), None if row[14] is None else row[14:]

    def notes(self) -> Iterator[Note]:
        """Every note that was not erased."""
        return map(Note._make, self._connection.execute(_SQL["all_notes"]))

    def principals(self) -> dict[str, str]:
        """The names that were not erased, by identity."""
        return dict(self._connection.execute(_SQL["principals"]).fetchall())


def _locked(connection: Connection, wants: Wants, wait: str, warily: frozenset[str]) -> State:
    """Begin, lock and read. What is taken `warily` is only taken if it is free, and last: it cannot deadlock."""
    lock = "lock_trees" if wants.trees else "lock"
    trees = ([*wants.trees],) if wants.trees else ()
    queries = _FREE if wants.trees & warily else _SQL
    with connection.pipeline() as pipeline:
        execute = connection.execute
        execute(_SQL["begin"])
        execute(_SQL["settings"], (wait, _IDLE))
        opening = None
        if wants.opens:
            opening = execute(_SQL["one_at_a_time_if_free" if OPENING in warily else "one_at_a_time"])
        taken = [execute(queries[lock], (*trees, [*(wants.accounts - warily)]))]
        if wants.accounts & warily:
            taken.append(execute(_FREE["lock"], ([*(wants.accounts & warily)],)))
        there = execute(_THERE[lock], (*trees, [*wants.accounts])) if warily else None
        blocks = execute(_SQL["blocks"], ([*wants.datasets],)) if wants.datasets else None
        keys = execute(_SQL["keys"], _rows(wants.keys))
        now = execute(_SQL["now"])
        pipeline.sync()
        balances = {row[0]: Balance.read(row) for cursor in taken for row in cursor.fetchall()}
        held = frozenset(row[0] for row in there.fetchall() if row[0] not in balances) if there else frozenset()
        if opening is not None and opening.fetchone() == (False,):
            held |= {OPENING}
        for row in blocks.fetchall() if blocks else ():
            balances.setdefault(row[0], Balance.read(row))
        hits = {(row[0], row[1]): IdempotencyRecord._make(row[2:]) for row in keys.fetchall()}
        moment = (now.fetchone() or (0,))[0]
    return State(moment, balances, hits, held)


def _statements(changes: Changes) -> Iterator[tuple[bytes, tuple[str]]]:
    """Return what to execute. Rows go as one JSON text: writing arrays takes psycopg as long as all the rest."""
    if changes.opened:
        yield _SQL["open_accounts"], _rows((*b.head, *b.moved, b.origin) for b in changes.opened)
    if changes.entries:
        yield _SQL["append_entries"], _rows(changes.entries)
    if changes.moved:
        yield _SQL["move_accounts"], _rows((name, *balance.moved) for name, balance in changes.moved.items())
    if changes.keys:
        yield _SQL["remember_keys"], _rows((*key, hit.account, hit.sequence) for key, hit in changes.keys.items())
    if changes.notes:
        yield _SQL["keep_notes"], _rows(changes.notes)


def _rows(rows: Iterable[Sequence[object]]) -> tuple[str]:
    return (json.dumps([*rows], separators=(",", ":")),)
