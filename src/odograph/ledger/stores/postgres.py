"""A ledger in PostgreSQL, for many machines.

A group of requests takes two round trips. The first one begins the transaction, locks the accounts in the order of
their names, and reads; the second one appends, updates and commits. A connection keeps no session state, so this
works behind a pool that shares connections between transactions.

A group waits only briefly for a row that another client holds. It then goes on without the requests that want the
row, and for some time takes that row only if it is free. So a forgotten `SELECT ... FOR UPDATE` holds up the accounts
that it locks and no others.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import errors as pg

from odograph.concurrency import leave_to_parent, refuse_reentry, renew_after_fork
from odograph.errors import (
    InvalidArgument,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    LedgerUnreachable,
    OdographError,
    OutcomeUnknown,
)
from odograph.ledger.entries import Entry
from odograph.ledger.stores.base import (
    OPENING,
    SCHEMA,
    Balance,
    Changes,
    IdempotencyRecord,
    Note,
    Pending,
    Record,
    RowLocked,
    State,
    Wants,
    Work,
    closed_error,
    keep_records,
    migrations,
    queries,
)

__all__ = [
    "Connection",
    "LastingConnection",
    "PostgresSnapshot",
    "PostgresStore",
    "commit",
    "open_connection",
    "translate_errors",
    "url_without_password",
]

Connection = psycopg.Connection[tuple[Any, ...]]

_SQL: Final = {name: text.encode() for name, text in queries("postgres").items()}
_CHUNK: Final = 4096  # rows read at a time from a complete ledger
_LARGEST_JSONB: Final = 1 << 27  # characters in one array; PostgreSQL refuses twice as much
_MAX_ATTEMPTS: Final = 20  # of a transaction that other processes forestall
# Seconds that a group waits for a lock: longer than a queue of groups on a hot account takes.
_LOCK_WAIT: Final = 0.25
_SKIP_TIME: Final = 10 * _LOCK_WAIT  # seconds for which a row that was waited for in vain is only taken if it is free
_IDLE_TIMEOUT: Final = "30s"  # after which the server ends the transaction of a client that has stopped

_SKIP_LOCKED: Final = {name: _SQL[name] + b" SKIP LOCKED" for name in ("lock", "lock_trees")}
_WITHOUT_LOCK: Final = {name: _SQL[name].removesuffix(b"FOR UPDATE") for name in _SKIP_LOCKED}

_NO_TRANSACTION: Final = psycopg.pq.TransactionStatus.IDLE


class PostgresStore:
    """One database, with a writing and a reading connection; a lost one is replaced."""

    def __init__(self, url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> None:
        self.url = url_without_password(url)
        self._conninfo = url
        self.timeout = self._timeout = timeout
        self._accept_fsync_off = accept_fsync_off
        self._closed = False
        self._reset()
        renew_after_fork(self)

    def create(self) -> None:
        """Create the tables if there are none."""
        with self._fresh() as connection:
            self._migrate(connection)

    def write(self, wants: Wants, work: Work) -> None:
        """Decide and store under row locks; again from the start if another process was first."""
        refuse_reentry(self._write_lock)
        with self._write_lock, translate_errors(self.url):
            for _ in range(_MAX_ATTEMPTS):
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
                        self._writer.close()  # an interrupt leaves the connection in an unknown state
                    raise
                finally:
                    self._end()
                return
            raise LedgerBusy(
                f"other processes were first {_MAX_ATTEMPTS} times in a row; nothing was charged. Try again"
            )

    def probe(self) -> None:
        """Lock the version of the schema and commit, which writes to the server's log."""
        refuse_reentry(self._write_lock)
        with self._write_lock, translate_errors(self.url):
            try:
                try:
                    self._probe()
                except psycopg.OperationalError:  # as for a charge, a lost connection is replaced once
                    if self._writer is None or not self._writer.closed:
                        raise
                    self._probe()
            finally:
                self._end()

    def _probe(self) -> None:
        connection = self._writing()
        with connection.transaction():
            connection.execute(_SQL["settings"], (self._brief_wait, _IDLE_TIMEOUT))
            connection.execute(_SQL["probe"])

    def settings(self) -> dict[str, str]:
        """Return the settings of the server and of this database that charges depend on, and the server's clock."""
        with self._fresh() as connection:
            return dict(connection.execute(_SQL["server_settings"]).fetchall())

    def load(self, parts: Iterable[Changes], principals: dict[str, str]) -> None:
        """Store the parts in one transaction."""
        with self._fresh() as connection, connection.transaction():
            self._migrate(connection)
            connection.execute(_SQL["settings"], (self._lock_timeout, "0"))
            connection.execute(_SQL["one_at_a_time"])
            connection.execute(_SQL["defer"])
            connection.execute(_SQL["forget_principals"])  # no entry has their identities; those of the copy follow
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

    def openings(self, accounts: Iterable[str]) -> dict[str, Entry]:
        """Read the first entries of some accounts."""
        return {row[1]: Entry._make(row) for row in self._read("openings", [*accounts])}

    def pending(self, account: str, first: int, count: int) -> list[Entry]:
        """Read some open reservations of an account."""
        return [Entry._make(row) for row in self._read("pending", account, first, count)]

    def pending_count(self, account: str) -> int:
        """Count the open reservations of an account."""
        return int(self._read("pending_count", account)[0][0])

    def pending_counts(self) -> dict[str, int]:
        """Count the open reservations of every account."""
        return dict(self._read("pending_counts"))

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
                connection.execute(_SQL["settings"], (self._lock_timeout, _IDLE_TIMEOUT))
                connection.execute(_SQL["add_principal"], (secrets.token_hex(16), name))
        identity: str = self._read("principal", name)[0][0]
        return identity

    def principals(self) -> dict[str, str]:
        """Read the names, by identity."""
        return dict(self._read("principals"))

    def erase_note(self, account: str, sequence: int) -> bool:
        """Erase a note; PostgreSQL overwrites its text when the table is vacuumed."""
        return self._erase("erase_note", account, sequence)

    def erase_principal(self, name: str) -> bool:
        """Erase a name; PostgreSQL overwrites it when the table is vacuumed."""
        erased = self._erase("erase_principal", name)
        self._erase("mark_erased")  # also those that earlier versions did not mark
        return erased

    @contextmanager
    def snapshot(self) -> Iterator[PostgresSnapshot]:
        """Read the database at one moment, on a connection of its own, while other processes go on writing."""
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
            if self._writer is not None:
                self._writer.close()
            self._reader.close()
            self._reset()

    def after_fork(self) -> None:  # pragma: no cover  in a forked process, which is not measured
        """Start anew: the parent process still uses these connections."""
        leave_to_parent(self._writer, self._reader)
        self._reset()

    def _reset(self) -> None:
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()
        self._writer: Connection | None = None
        self._reader = LastingConnection()
        self._skipped: dict[str, float] = {}  # rows that are only taken if they are free, and until when

    @property
    def _lock_timeout(self) -> str:
        return f"{max(1, int(self._timeout * 1000))}ms"

    @property
    def _brief_wait(self) -> str:
        return f"{max(1, int(min(_LOCK_WAIT, self._timeout) * 1000))}ms"

    def _connect(self) -> Connection:
        if self._closed:
            raise closed_error(self.url)
        return open_connection(self._conninfo, timeout=self._timeout, accept_fsync_off=self._accept_fsync_off)

    def _connect_to_ledger(self) -> Connection:
        connection = self._connect()
        try:
            self._require_ledger(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_ledger(self, connection: Connection) -> None:
        """Raise if there are no tables, and migrate them to the current schema."""
        if connection.execute(_SQL["ledger_there"]).fetchone() != (True,):
            raise LedgerNotFound(f"there is no ledger in {self.url}; opening an account creates one")
        row = connection.execute(_SQL["version"]).fetchone()
        if row is None or row[0] < SCHEMA:
            self._migrate(connection)
        else:
            self._require_known(row[0])

    def _require_known(self, version: int) -> None:
        if version > SCHEMA:
            raise LedgerError(
                f"{self.url} has schema {version}, but this version of Odograph reads {SCHEMA}; upgrade Odograph. The"
                " ledger was not changed"
            )

    def _migrate(self, connection: Connection) -> None:
        """Apply the missing migrations, all or none."""
        with connection.transaction():
            connection.execute(_SQL["settings"], (self._lock_timeout, _IDLE_TIMEOUT))
            connection.execute(_SQL["one_at_a_time"])
            exists = connection.execute(_SQL["ledger_there"]).fetchone() == (True,)
            row = connection.execute(_SQL["version"]).fetchone() if exists else None
            version = row[0] if row else 0
            self._require_known(version)  # again: another program may have upgraded it meanwhile
            missing = migrations("postgres")[version:]
            for script in missing:
                connection.execute(script.encode())
            if missing:
                connection.execute(_SQL["clear_version"])
                connection.execute(_SQL["set_version"], (SCHEMA,))

    @contextmanager
    def _fresh(self) -> Iterator[Connection]:
        """Yield a new connection, for rare or long operations."""
        with translate_errors(self.url):
            connection = self._connect()
            with connection:
                yield connection

    def _read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        refuse_reentry(self._read_lock)
        with self._read_lock, translate_errors(self.url):
            return self._reader.read(self._connect_to_ledger, _SQL[query], arguments)

    def _writing(self) -> Connection:
        if self._writer is None or self._writer.closed:
            self._writer = self._connect_to_ledger()
        return self._writer

    def _begin(self, wants: Wants) -> State:
        """Make the first trip: begin, lock, read. It has no effect yet, so a lost connection is replaced once."""
        try:
            return self._lock(wants)
        except psycopg.OperationalError:
            if self._writer is None or not self._writer.closed:
                raise
            return self._lock(wants)

    def _lock(self, wants: Wants) -> State:
        """Lock and read what is wanted; what others hold for longer than a moment is left out, and named as held."""
        everything = wants.accounts | wants.trees | ({OPENING} if wants.opens else frozenset())
        skipped: frozenset[str] = frozenset()
        if self._skipped:
            now = time.monotonic()
            self._skipped = {name: until for name, until in self._skipped.items() if now < until}
            skipped = everything & self._skipped.keys()
        try:
            state = _lock_and_read(self._writing(), wants, self._brief_wait, skipped)
        except pg.LockNotAvailable:
            self._end()
            state = _lock_and_read(self._writing(), wants, self._brief_wait, everything)
            until = time.monotonic() + _SKIP_TIME
            self._skipped |= dict.fromkeys(state.held | (wants.trees if state.held else frozenset()), until)
        else:
            for name in skipped - state.held - wants.trees:
                del self._skipped[name]
        return state

    def _finish(self, changes: Changes) -> None:
        """Make the second trip: append, update, commit."""
        connection = self._writer
        if connection is None:  # pragma: no cover  the first trip was made on it
            raise LedgerError(f"{self.url} was closed during a transaction; nothing was charged")
        cursor = connection.cursor()
        try:
            with connection.pipeline():
                for query, arguments in _statements(changes):
                    connection.execute(query, arguments)
                cursor.execute(_SQL["commit"])
        except psycopg.Error as problem:
            if _is_refusal(problem):
                raise
            connection.close()
            raise OutcomeUnknown(
                f"the connection to {self.url} was lost during a commit; ask again with the same key to know the"
                " outcome"
            ) from problem
        _require_committed(cursor, self.url)

    def _end(self) -> None:
        """Roll back a transaction that is still open; if that fails, close the connection, which ends it too."""
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


class PostgresSnapshot:
    """A complete ledger, inside one read transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.balances = [Balance.read(row) for row in connection.execute(_SQL["accounts"])]
        self.size, self.keys = connection.execute(_SQL["sizes"]).fetchone() or (0, 0)
        self.pending = {*map(Pending._make, connection.execute(_SQL["all_pending"]))}
        self.voids: dict[str, int] = dict(connection.execute(_SQL["void_counts"]).fetchall())

    def records(self) -> Iterator[Record]:
        """Yield every entry, account by account."""
        with self._connection.cursor("records") as cursor:
            cursor.itersize = _CHUNK
            for row in cursor.execute(_SQL["records"]):
                yield Entry._make(row[:14]), None if row[14] is None else row[14:]

    def notes(self) -> Iterator[Note]:
        """Yield every note that was not erased."""
        return map(Note._make, self._connection.execute(_SQL["all_notes"]))

    def principals(self) -> dict[str, str]:
        """Return the names that were not erased, by identity."""
        return dict(self._connection.execute(_SQL["principals"]).fetchall())


def _lock_and_read(connection: Connection, wants: Wants, wait: str, if_free: frozenset[str]) -> State:
    """Begin, lock and read. Rows `if_free` are taken only if they are free, and last, so they cannot deadlock."""
    lock = "lock_trees" if wants.trees else "lock"
    trees = ([*wants.trees],) if wants.trees else ()
    queries = _SKIP_LOCKED if wants.trees & if_free else _SQL
    with connection.pipeline() as pipeline:
        execute = connection.execute
        execute(_SQL["begin"])
        execute(_SQL["settings"], (wait, _IDLE_TIMEOUT))
        opening = None
        if wants.opens:
            opening = execute(_SQL["one_at_a_time_if_free" if OPENING in if_free else "one_at_a_time"])
        taken = [execute(queries[lock], (*trees, [*(wants.accounts - if_free)]))]
        if wants.accounts & if_free:
            taken.append(execute(_SKIP_LOCKED["lock"], ([*(wants.accounts & if_free)],)))
        existing = execute(_WITHOUT_LOCK[lock], (*trees, [*wants.accounts])) if if_free else None
        blocks = execute(_SQL["blocks"], ([*wants.datasets],)) if wants.datasets else None
        keys = execute(_SQL["keys"], (_rows(wants.keys),))
        now = execute(_SQL["now"])
        pipeline.sync()
        balances = {row[0]: Balance.read(row) for cursor in taken for row in cursor.fetchall()}
        held = frozenset(row[0] for row in existing.fetchall() if row[0] not in balances) if existing else frozenset()
        if opening is not None and opening.fetchone() == (False,):
            held |= {OPENING}
        for row in blocks.fetchall() if blocks else ():
            balances.setdefault(row[0], Balance.read(row))
        records: dict[tuple[str, str], IdempotencyRecord] = {}
        are_erased = keep_records(records, keys.fetchall())
        moment = (now.fetchone() or (0,))[0]
    if are_erased and (unused := wants.keys - records.keys()):
        keep_records(records, connection.execute(_SQL["erased_keys"], (_rows(unused),)).fetchall())
    return State(moment, balances, records, held)


def _statements(changes: Changes) -> Iterator[tuple[bytes, tuple[str, ...]]]:
    """Yield the statements that store changes.

    Rows are passed as JSON: psycopg is much slower with arrays. The server reads it as jsonb, which is parsed once;
    of json it would parse a row again for each of its fields.
    """
    if changes.opened:
        yield _SQL["open_accounts"], (_rows((*b.head, *b.columns, b.origin) for b in changes.opened),)
    moved = _rows((name, *balance.columns) for name, balance in changes.moved.items())
    keys = _rows((*key, used.account, used.sequence) for key, used in changes.keys.items())
    *others, last = _parts(changes.entries)
    for part in others:
        yield _SQL["store"], (part, "[]", "[]")
    yield _SQL["store"], (last, moved, keys)
    if changes.notes:
        yield _SQL["keep_notes"], (_rows(changes.notes),)


def _rows(rows: Iterable[Sequence[object]]) -> str:
    return json.dumps([*rows], separators=(",", ":"))


def _parts(rows: Sequence[Sequence[object]]) -> list[str]:
    """Write rows as JSON, in several parts if one would be too large for the server."""
    text = _rows(rows)
    if len(text) <= _LARGEST_JSONB or len(rows) == 1:
        return [text]
    middle = len(rows) // 2
    return _parts(rows[:middle]) + _parts(rows[middle:])


# Connections and errors, which the service's key store uses too.


def url_without_password(url: str) -> str:
    """Return a URL without its password and options, for messages and pages."""
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise InvalidArgument(f"url must be the URL of a database: {problem}") from problem
    user, _, host = parts.netloc.rpartition("@")
    name = user.partition(":")[0]
    return urlunsplit(parts._replace(netloc=f"{name}@{host}" if name else host, query=""))


def open_connection(url: str, *, timeout: float, accept_fsync_off: bool) -> Connection:
    """Open a connection in autocommit mode; a server that does not sync its disk is refused."""
    shown, seconds = url_without_password(url), max(2, int(timeout))  # libpq takes less than two seconds for no limit
    try:
        connection = psycopg.connect(
            url,
            autocommit=True,
            prepare_threshold=None,  # a prepared statement is session state, which a pool may hand to other clients
            connect_timeout=seconds,
            application_name="odograph",
            tcp_user_timeout=1000 * seconds,
        )
    except psycopg.OperationalError as problem:
        raise LedgerUnreachable(
            f"{shown} cannot be reached ({_one_line(problem)}); check the host, the port, the user and the database,"
            " and try again"
        ) from problem
    except psycopg.Error as problem:
        raise LedgerError(f"{shown} cannot be used as a database ({_one_line(problem)})") from problem
    try:
        unsafe = connection.execute(b"SHOW fsync").fetchone() == ("off",)
    except BaseException:
        connection.close()
        raise
    if unsafe and not accept_fsync_off:
        connection.close()
        raise LedgerError(
            f"{shown} runs with fsync=off: a crash of its machine would lose acknowledged charges. A test may connect"
            " with accept_fsync_off=True"
        )
    return connection


class LastingConnection:
    """A connection for reading: opened at the first query, and replaced once if it was lost since the last one."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    def read(
        self, connect: Callable[[], Connection], query: bytes, arguments: Sequence[object]
    ) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        try:
            return self._execute(connect, query, arguments)
        except psycopg.OperationalError:
            if self._connection is None or not self._connection.closed:
                raise
            return self._execute(connect, query, arguments)  # the server may be back
        except BaseException:
            self.close()  # an exception of a signal handler leaves it in an unknown state
            raise

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        if self._connection is not None:
            self._connection.close()

    def _execute(
        self, connect: Callable[[], Connection], query: bytes, arguments: Sequence[object]
    ) -> list[tuple[Any, ...]]:
        if self._connection is None or self._connection.closed:
            self._connection = connect()
        return self._connection.execute(query, arguments).fetchall()


def commit(connection: Connection, url: str, advice: str) -> None:
    """Commit; raise `OutcomeUnknown` with the advice if the connection is lost meanwhile."""
    cursor = connection.cursor()
    try:
        cursor.execute(_SQL["commit"])
    except psycopg.Error as problem:
        if _is_refusal(problem):
            raise
        raise OutcomeUnknown(f"the connection to {url} was lost during a commit; {advice}") from problem
    _require_committed(cursor, url)


def _is_refusal(problem: psycopg.Error) -> bool:
    """Return whether the server itself reports the error, and therefore has not committed."""
    return problem.diag.severity_nonlocalized == "ERROR"


def _require_committed(cursor: psycopg.Cursor[tuple[Any, ...]], url: str) -> None:
    if cursor.statusmessage != "COMMIT":  # pragma: no cover  an aborted transaction raises before
        raise LedgerError(f"{url} did not commit ({cursor.statusmessage}); nothing was changed")


@contextmanager
def translate_errors(url: str, unchanged: str = "nothing was charged") -> Iterator[None]:
    """Raise PostgreSQL's errors as errors of Odograph."""
    try:
        yield
    except OdographError:
        raise
    except (pg.LockNotAvailable, pg.QueryCanceled) as problem:
        raise LedgerBusy(f"another process holds a lock in {url}; {unchanged}. Try again") from problem
    except pg.DiskFull as problem:
        raise LedgerBusy(
            f"the disk of {url} is full ({_one_line(problem)}); {unchanged}. Make room and try again"
        ) from problem
    except (pg.ReadOnlySqlTransaction, pg.InsufficientPrivilege) as problem:
        raise LedgerError(f"{url} cannot be written ({_one_line(problem)})") from problem
    except pg.UniqueViolation as problem:
        raise LedgerCorrupt(f"the changes contradict what is stored ({_one_line(problem)})") from problem
    except (pg.DataCorrupted, pg.IndexCorrupted) as problem:
        raise LedgerCorrupt(f"{url} is damaged ({_one_line(problem)})") from problem
    except psycopg.OperationalError as problem:
        raise LedgerBusy(
            f"the connection to {url} was lost ({_one_line(problem)}); {unchanged}. Try again"
        ) from problem
    except psycopg.Error as problem:
        raise LedgerError(f"{url} could not be used ({_one_line(problem)})") from problem


def _one_line(problem: psycopg.Error) -> str:
    return " ".join(str(problem).split()) or type(problem).__name__
