"""The key store: API keys and browser sessions, stored durably beside the ledger and never in it.

A copy or backup of the ledger must not carry credentials: a ledger in `privacy.db` has its keys in
`privacy.db-access`, and a ledger in PostgreSQL has them in a schema of their own. Keys are revoked but never deleted,
so that the store records who had which access, and when.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeAlias, TypeVar

from odograph.concurrency import leave_to_parent, renew_after_fork, suspend_for_forks
from odograph.connection import connect
from odograph.errors import (
    BadRequest,
    IdempotencyConflict,
    InvalidArgument,
    KeyNotFound,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    NotAuthenticated,
    NotPermitted,
    OutcomeUnknown,
    load_extra,
)
from odograph.ledger.entries import check_key, shown
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores import base
from odograph.ledger.stores.base import EVERY
from odograph.ledger.stores.sqlite import statements
from odograph.ledger.stores.sqlite_files import NO_FILE, code_of, identity, make_file, open_file
from odograph.service.auth import (
    ApiKey,
    BrowserSession,
    Role,
    check_key_request,
    check_seconds,
    digest_of_token,
    equal_in_constant_time,
    looks_like_digest,
    looks_like_key_id,
    new_key_id,
    new_secret,
    new_token,
)

__all__ = [
    "SCHEMA",
    "Database",
    "KeyStore",
    "MemoryDatabase",
    "PostgresDatabase",
    "RunQuery",
    "SqliteDatabase",
    "connect_keys",
    "migration",
    "queries",
    "require_existing",
    "schema",
]

SCHEMA: Final = 2  # the version of the tables that this code reads and writes
_APPLICATION_ID: Final = 0x0D06_0002  # in the header of the SQLite file
_SQLITE_URL: Final = "sqlite:///"
_PACKAGE: Final = "odograph.service"  # its folder sql/ has, per dialect, a schema and named queries
_ADVICE: Final = "list the keys to know the outcome"  # where a commit may or may not have happened
_UNCHANGED: Final = "no key was changed"
_FIRST_OWNER: Final = "owner"  # the principal of the first key
_T = TypeVar("_T")

# Executes a query by its name, with its arguments, and returns its rows.
RunQuery: TypeAlias = Callable[..., list[tuple[Any, ...]]]


def queries(dialect: str) -> dict[str, str]:
    """Return the queries of a dialect, by name."""
    return base.queries(dialect, _PACKAGE)


def schema(dialect: str) -> str:
    """Return the script that makes the tables."""
    return base.schema(dialect, _PACKAGE)


def migration(dialect: str) -> str:
    """Return the script that makes the tables of schema 1, of release 0.1, those of the current schema."""
    return files(_PACKAGE).joinpath("sql", dialect, "retirement.sql").read_text(encoding="utf-8")


_SQL: Final = queries("sqlite")


class Database(Protocol):
    """Where keys are stored. Queries are named as in the .sql files. Safe to use from many threads."""

    url: str  # without a password, for messages

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query; none before the first write has created the tables."""
        ...

    def write(self, work: Callable[[RunQuery], _T]) -> _T:
        """Call `work` in a transaction, one at a time across all processes; its changes are durable on return.

        If `work` raises, nothing is stored.
        """
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...


class KeyStore:
    """API keys and browser sessions. Made by `connect_keys`; safe to use from many threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def url(self) -> str:
        """Where the keys are stored, without a password."""
        return self._database.url

    def now(self) -> int:
        """Return the time in microseconds, UTC, by the clock of this machine for every store."""
        return time.time_ns() // 1000

    def make(  # noqa: PLR0913  each describes the key
        self,
        principal: str,
        role: Role | str,
        *,
        accounts: Iterable[str] = (),
        every_account: bool = False,
        expires: float | None = None,
        made_by: str,
        request: str = "",
    ) -> tuple[str, ApiKey]:
        """Make a key that expires after `expires` seconds, or never; return its token, only this once, and the key.

        The same `made_by` and `request` again raise `IdempotencyConflict` with the id of the key that was made: if
        its token was lost in transit, revoke that key and make another.
        """
        known, names, every = check_key_request(principal, role, accounts, every_account, expires)
        check_key(made_by, "made_by")
        if request:
            check_key(request, "request")

        def work(run: RunQuery) -> tuple[str, ApiKey]:
            _refuse_repeated(run, made_by, request)
            token, now = new_token(), self.now()
            until = None if expires is None else now + _microseconds(expires)
            key = ApiKey(new_key_id(), digest_of_token(token), principal, known, names, every, now, made_by, until)
            run("add_key", *_row_of(key), request)
            return token, key

        return self._database.write(work)

    def first_owner(self, token: str) -> bool:
        """Make this token the first owner's key unless a key was ever made; return whether it was made."""
        if self._database.read("any_key"):
            return False

        def work(run: RunQuery) -> bool:
            if run("any_key"):
                return False
            now = self.now()
            key = ApiKey(
                new_key_id(),
                digest_of_token(token),
                _FIRST_OWNER,
                Role.OWNER,
                (),
                every_account=True,
                made=now,
                made_by=_FIRST_OWNER,
            )
            run("add_key", *_row_of(key), "")
            return True

        return self._database.write(work)

    def find(self, digest: str) -> ApiKey | None:
        """Return the key of a token's digest, even if it is revoked or expired: check `valid_at(now)`."""
        if not looks_like_digest(digest):
            return None
        for row in self._database.read("key_of_digest", digest):
            key = _key_from_row(row)
            if equal_in_constant_time(key.digest, digest):
                return key
        return None

    def key(self, key_id: str) -> ApiKey:
        """Return a key by its id, or raise `KeyNotFound`."""
        return _one_key(key_id, self._database.read)

    def keys(self, after: str = "", count: int = EVERY) -> list[ApiKey]:
        """Return the keys that were ever made, the newest first: at most `count`, those made before key `after`."""
        if after:
            self.key(after)  # raises if there is none
        return [_key_from_row(row) for row in self._database.read("keys", after, count)]

    def revoke(self, key_id: str, by: str) -> ApiKey:
        """Revoke a key permanently, end its browser sessions and return it; a revoked key is returned unchanged.

        The last valid owner key cannot be revoked: no further key could be made.
        """
        check_key(by, "by")
        self.key(key_id)  # an unknown key must not create the store

        def work(run: RunQuery) -> ApiKey:
            key, now = _one_key(key_id, run), self.now()
            if key.revoked is not None:
                return key
            if key.role is Role.OWNER and key.valid_at(now) and not run("other_owners", key_id, now):
                raise NotPermitted(f"{key_id} is the last valid owner key; make another first, then revoke it")
            run("revoke", now, by, key_id)
            run("end_sessions_of_key", key_id)
            return _one_key(key_id, run)

        return self._database.write(work)

    def rotate(self, key_id: str, *, overlap: float = 0.0, made_by: str, request: str = "") -> tuple[str, ApiKey]:
        """Make another key for the same principal, role and accounts; the old one stays valid for `overlap` seconds.

        Without an overlap the old key is revoked. If it was made for a limited time, the new one lasts as long. A key
        is rotated once. Returns and raises otherwise as `make` does.
        """
        check_key(made_by, "made_by")
        if overlap != 0:
            check_seconds(overlap, "overlap")
        if request:
            check_key(request, "request")
        self.key(key_id)  # an unknown key must not create the store

        def work(run: RunQuery) -> tuple[str, ApiKey]:
            old, now = _one_key(key_id, run), self.now()
            _refuse_repeated(run, made_by, request)
            if run("retired", key_id):
                raise NotPermitted(f"key {key_id} was rotated before; rotate the key that took its place")
            if not old.valid_at(now):
                raise NotPermitted(f"key {key_id} is revoked or expired; make a new key")
            token = new_token()
            until = None if old.expires is None else now + old.expires - old.made
            digest = digest_of_token(token)
            key = replace(old, id=new_key_id(), digest=digest, made=now, made_by=made_by, expires=until)
            run("add_key", *_row_of(key), request)
            run("retire", now + round(overlap * 1_000_000), key_id)
            if not overlap:
                run("revoke", now, made_by, key_id)
                run("end_sessions_of_key", key_id)
            return token, key

        return self._database.write(work)

    def begin_session(self, key_id: str, *, lasts: float = 8 * 3600) -> tuple[str, BrowserSession]:
        """Begin a session for a valid key; return the secret for the cookie, only this once, and the session.

        It lasts `lasts` seconds, but never longer than its key.
        """
        check_seconds(lasts, "lasts")
        self.key(key_id)  # as above

        def work(run: RunQuery) -> tuple[str, BrowserSession]:
            key, now = _one_key(key_id, run), self.now()
            if not key.valid_at(now):
                raise NotAuthenticated(f"key {key_id} is revoked or expired; sign in with another key")
            secret, ends = new_secret(), now + _microseconds(lasts)
            if key.expires is not None:
                ends = min(ends, key.expires)
            session = BrowserSession(digest_of_token(secret), key_id, new_secret(), now, ends)
            run("end_old_sessions", now)
            run("add_session", session.digest, session.api_key_id, session.csrf, session.began, session.ends)
            return secret, session

        return self._database.write(work)

    def session(self, digest: str) -> tuple[BrowserSession, ApiKey] | None:
        """Return a session by its secret's digest, with its key; None if it has ended. Check the key's `valid_at`."""
        if not looks_like_digest(digest):
            return None
        for row in self._database.read("session", digest):
            session = BrowserSession(*row[:5])
            if equal_in_constant_time(session.digest, digest) and self.now() < session.ends:
                return session, _key_from_row(row[5:])
        return None

    def end_session(self, digest: str) -> None:
        """End a session, if there is one."""
        if self.session(digest) is not None:
            self._database.write(lambda run: run("end_session", digest))

    def close(self) -> None:
        """Close files and connections; they are opened again when needed."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_existing(ledger: Ledger, names: Iterable[str]) -> None:
    """Raise for the first name that no account has, with the most similar one that has: for who sees all of them."""
    try:
        there = ledger.backend.balances()
    except LedgerNotFound:  # no account was opened yet
        there = {}
    for name in names:
        if name not in there:
            near = get_close_matches(name, there, 1)
            advice = f"did you mean {near[0]!r}?" if near else "open the account first"
            raise BadRequest(f"accounts must exist when a key is made for them (got {shown(name)}); {advice}")


def connect_keys(url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> KeyStore:
    """Return the key store of the ledger at a URL; only making the first key creates its file or tables.

    `timeout` is how many seconds to wait for another process before `LedgerBusy`. As for the ledger itself, a
    PostgreSQL server that does not sync its disk is refused unless a test passes `accept_fsync_off`.
    """
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        raise InvalidArgument(
            "url must be a ledger, not a service: pass the URL of the ledger it serves, or use its HTTP API"
        )
    with connect(url, timeout=timeout) as ledger:  # parses the URL without connecting
        where = ledger.url
    if where == "memory://":
        return KeyStore(MemoryDatabase())
    if where.startswith(_SQLITE_URL):
        return KeyStore(SqliteDatabase(Path(where.removeprefix(_SQLITE_URL)), timeout=timeout))
    return KeyStore(PostgresDatabase(url, where, timeout=timeout, accept_fsync_off=accept_fsync_off))


def _refuse_repeated(run: RunQuery, made_by: str, request: str) -> None:
    """Raise if a request has made a key before."""
    if found := run("key_of_request", made_by, request):
        raise IdempotencyConflict(
            f"this request already made key {found[0][0]}, and a token is shown only once; if it was lost,"
            " revoke that key and make another with a new idempotency key"
        )


def _one_key(key_id: str, run: RunQuery) -> ApiKey:
    for row in run("key", key_id) if looks_like_key_id(key_id) else ():
        return _key_from_row(row)
    raise KeyNotFound(f"no key {shown(key_id)}; `odograph keys list` shows all keys")


def _row_of(key: ApiKey) -> tuple[object, ...]:
    return (
        key.id,
        key.digest,
        key.principal,
        str(key.role),
        " ".join(key.accounts),  # names have no spaces
        key.every_account,
        key.made,
        key.made_by,
        key.expires,
        key.revoked,
        key.revoked_by,
    )


def _key_from_row(row: Sequence[Any]) -> ApiKey:
    key_id, digest, principal, role, accounts, every_account, *rest = row
    if role not in tuple(Role):
        raise LedgerCorrupt(f"stored key {key_id} has an unknown role, {shown(role)}")
    return ApiKey(key_id, digest, principal, Role(role), tuple(accounts.split()), bool(every_account), *rest)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000_000))


class MemoryDatabase:
    """The same tables in memory, for tests and embedding; they end with the process."""

    def __init__(self) -> None:
        self.url = "memory://"
        self._forked = False
        self._lock = threading.RLock()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        _create_tables(self._connection)
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Refuse all later calls in the forked process."""
        self._forked = True

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        self._require_own()
        with self._lock:
            return self._connection.execute(_SQL[query], arguments).fetchall()

    def write(self, work: Callable[[RunQuery], _T]) -> _T:
        """Call `work` under the lock; undo its changes if it raises."""
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
        """Do nothing: the keys exist only here."""

    def __del__(self) -> None:
        self._connection.close()

    def _require_own(self) -> None:
        if self._forked:
            raise LedgerError("keys in memory cannot be used in a forked process: a copy would not see revocations")


class SqliteDatabase:
    """A SQLite file beside the ledger's: one lasting connection for reads and a new one for each write."""

    def __init__(self, ledger: Path, *, timeout: float = 10.0) -> None:
        try:
            # One key store per ledger, through whichever link it is reached: a revocation must hold everywhere.
            own = ledger.resolve()
        except (OSError, RuntimeError) as problem:
            raise LedgerError(f"no ledger can be at {ledger}: {problem}") from problem
        self._path = own.with_name(f"{own.name}-access")
        self.url = f"sqlite:///{self._path}"
        self._timeout = timeout
        self._read_lock = threading.RLock()
        self._write_lock = threading.RLock()
        self._reader: sqlite3.Connection | None = None
        self._file = NO_FILE
        suspend_for_forks(self)

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        with self._read_lock, self._translate_errors():
            if self._reader is None:
                if self._file == NO_FILE and not self._path.exists():
                    return []
                self._reader = self._connect()
                self._reader.execute("PRAGMA query_only = ON")
            self._require_same()
            return self._reader.execute(_SQL[query], arguments).fetchall()

    def write(self, work: Callable[[RunQuery], _T]) -> _T:
        """Call `work` under SQLite's write lock; its changes are synced to disk on return."""
        with self._write_lock, self._translate_errors():
            if self._file == NO_FILE and not self._path.exists():
                self._create()
            with closing(self._connect()) as connection:  # closing rolls back what was not committed
                connection.execute("BEGIN IMMEDIATE")
                done = work(_runner(connection))
                connection.execute("COMMIT")
            return done

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        with self._read_lock:
            if self._reader is not None:
                self._reader.close()
            self._reader = None

    def forking(self) -> Generator[None]:
        """Close SQLite before a fork: its record of the locks it holds would be wrong in the child."""
        with self._write_lock, self._read_lock:
            self.close()
            yield

    def _create(self) -> None:
        """Create the file, unless another process does so first."""

        def fill(path: Path) -> None:
            with closing(open_file(path, self._timeout)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                _create_tables(connection)

        make_file(self._path, fill)

    def _connect(self) -> sqlite3.Connection:
        connection = open_file(self._path, self._timeout)
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """Check that the file holds keys, in this schema, and is the file that was used before."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application != _APPLICATION_ID:
            raise LedgerError(f"{self._path} is not a key store of Odograph; it was not changed")
        if version == 1:
            _migrate(connection)
        elif version != SCHEMA:
            raise LedgerError(
                f"{self._path} has schema {version}, but this version of Odograph reads {SCHEMA}; upgrade Odograph."
                " The file was not changed"
            )
        if connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            connection.execute("PRAGMA journal_mode = WAL")  # other tools may have copied the file without it
        if self._file == NO_FILE:
            self._file = identity(str(self._path))  # permanently
        self._require_same()

    def _require_same(self) -> None:
        """Raise if the file was replaced: keys revoked in the new file would still be valid in the old one."""
        if identity(str(self._path)) != self._file:
            raise LedgerError(f"{self._path} was moved or replaced while in use. If that was intended, connect again")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise SQLite's errors as errors of Odograph."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as problem:
            code = code_of(problem) if isinstance(problem, sqlite3.Error) else sqlite3.SQLITE_CORRUPT
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LedgerBusy(f"another program has locked {self._path}; {_UNCHANGED}. Try again") from problem
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise LedgerCorrupt(f"{self._path} is damaged ({problem}); restore it, or move it away") from problem
            if code == sqlite3.SQLITE_IOERR:  # the changes may have reached the disk
                raise OutcomeUnknown(f"the disk failed ({problem}); {_ADVICE}") from problem
            raise LedgerError(f"{self._path} could not be used ({problem}); {_UNCHANGED}") from problem
        except OSError as problem:
            raise LedgerError(f"keys cannot be stored at {self._path}: {problem.strerror}") from problem


class PostgresDatabase:
    """Tables in a schema of their own in the ledger's database: a lasting connection for reads, a new one per write.

    A connection keeps no session state.
    """

    _created: bool  # whether the tables were seen; once created, they stay

    def __init__(self, conninfo: str, url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> None:
        load_extra("psycopg")
        from odograph.ledger.stores import postgres  # noqa: PLC0415  it imports psycopg, which is optional

        self.url = url
        self._lock_timeout = f"{max(1, int(timeout * 1000))}ms"
        self._sql = {name: text.encode() for name, text in queries("postgres").items()}
        self._connect = partial(
            postgres.open_connection, conninfo, timeout=timeout, accept_fsync_off=accept_fsync_off
        )
        self._new_reader = postgres.LastingConnection
        self._translate_errors = partial(postgres.translate_errors, url, _UNCHANGED)
        self._commit = postgres.commit
        self._reset()
        renew_after_fork(self)

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query."""
        with self._lock, self._translate_errors():
            if not self._created:
                if self._versions(self._read) == [1]:
                    self.write(lambda _: None)  # which migrates
                self._created = self._has_tables(self._read)
            return self._read(query, *arguments) if self._created else []

    def write(self, work: Callable[[RunQuery], _T]) -> _T:
        """Call `work` under a lock of the whole database; the server has synced its changes on return."""
        with self._translate_errors(), self._connect() as connection:  # closing rolls back what was not committed

            def run(query: str, *arguments: object) -> list[tuple[Any, ...]]:
                cursor = connection.execute(self._sql[query], arguments)
                return cursor.fetchall() if cursor.description else []

            run("begin")
            run("settings", self._lock_timeout)
            run("one_at_a_time")
            if self._versions(run) == [1]:
                connection.execute(migration("postgres").encode())
                run("raise_version", SCHEMA)
            if not self._has_tables(run):
                connection.execute(schema("postgres").encode())
                run("set_version", SCHEMA)
            done = work(run)
            self._commit(connection, self.url, _ADVICE)
            return done

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        with self._lock:
            self._reader.close()
            self._reset()

    def after_fork(self) -> None:
        """Start anew: the parent process still uses this connection."""
        leave_to_parent(self._reader)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._reader = self._new_reader()
        self._created = False

    def _read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._reader.read(self._connect, self._sql[query], arguments)

    @staticmethod
    def _versions(run: RunQuery) -> list[int] | None:
        """Return the schema's version, which is one; None if there are no tables."""
        return [version for (version,) in run("version")] if run("there") == [(True,)] else None

    def _has_tables(self, run: RunQuery) -> bool:
        """Return whether the tables exist; raise `LedgerError` if their schema is another version's."""
        found = self._versions(run)
        if found is None:
            return False
        if found != [SCHEMA]:
            raise LedgerError(
                f"the keys in {self.url} have schema {found[0] if found else 'none'}, but this version of Odograph"
                f" reads {SCHEMA}; upgrade Odograph. They were not changed"
            )
        return True


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements(schema("sqlite")):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("COMMIT")


def _migrate(connection: sqlite3.Connection) -> None:
    """Make the tables of schema 1 those of the current one, unless another process has done so meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("PRAGMA user_version").fetchone() == (1,):
        for statement in statements(migration("sqlite")):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.execute("COMMIT")


def _runner(connection: sqlite3.Connection) -> RunQuery:
    return lambda query, *arguments: connection.execute(_SQL[query], arguments).fetchall()
