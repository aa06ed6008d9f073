"""The key store: API keys and browser sessions, durable, beside the ledger and never in it.

A copy or backup of the ledger must not carry credentials, so a ledger in `privacy.db` has its keys in
`privacy.db-access`, and one in PostgreSQL in a schema of their own. Keys are revoked and never deleted: who had which
access when is a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from odograph.connect import connect
from odograph.errors import (
    IdempotencyConflict,
    KeyNotFound,
    LedgerCorrupt,
    LedgerError,
    NotAuthenticated,
    NotPermitted,
)
from odograph.ledger.entries import check_key, shown
from odograph.service.access import (
    ApiKey,
    Role,
    Session,
    check_key_request,
    check_seconds,
    digest_of_token,
    looks_like_digest,
    looks_like_key_id,
    new_key_id,
    new_secret,
    new_token,
    same,
)
from odograph.service.keys_sqlite import MemoryDatabase, SqliteDatabase
from odograph.service.sql import Run

__all__ = ["Database", "KeyStore", "connect_keys"]

_SQLITE: Final = "sqlite:///"
_FIRST: Final = "owner"  # the principal of the first key
_T = TypeVar("_T")


class Database(Protocol):
    """Where keys are kept. Queries go by their names in the .sql files. Safe to use from many threads."""

    url: str  # without a password: what messages may show

    def read(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Return the rows of one query; none before the first write has made the tables."""
        ...

    def write(self, work: Callable[[Run], _T]) -> _T:
        """Call the work in a transaction, one at a time among all processes; what it did is durable on return.

        If the work raises, nothing is stored.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class KeyStore:
    """API keys and sessions. Made by `connect_keys`; safe to use from many threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def url(self) -> str:
        """Where the keys are, without a password."""
        return self._database.url

    def now(self) -> int:
        """Return the time in microseconds, UTC: by the clock of this machine, on every store."""
        return time.time_ns() // 1000

    def make(  # noqa: PLR0913  each is one sentence about the key
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
        """Make a key that expires after so many seconds, or never; return its token, this once, and the key.

        The same `made_by` and `request` again raise `IdempotencyConflict` with the identity of the key that was made:
        if its token was lost on the way, revoke it and make another.
        """
        known, names, every = check_key_request(principal, role, accounts, every_account, expires)
        check_key(made_by, "made_by")
        if request:
            check_key(request, "request")

        def work(run: Run) -> tuple[str, ApiKey]:
            if found := run("key_of_request", made_by, request):
                raise IdempotencyConflict(
                    f"this request has made the key {found[0][0]}, and a token is shown once; if it was lost, revoke"
                    " that key and make another under a new request"
                )
            token, now = new_token(), self.now()
            until = None if expires is None else now + _microseconds(expires)
            key = ApiKey(new_key_id(), digest_of_token(token), principal, known, names, every, now, made_by, until)
            run("add_key", *_row(key), request)
            return token, key

        return self._database.write(work)

    def first_owner(self, token: str) -> bool:
        """Make this token the first owner's key if no key was ever made, and say whether it was."""
        if self._database.read("any_key"):
            return False

        def work(run: Run) -> bool:
            if run("any_key"):
                return False
            now = self.now()
            key = ApiKey(
                new_key_id(),
                digest_of_token(token),
                _FIRST,
                Role.OWNER,
                (),
                every_account=True,
                made=now,
                made_by=_FIRST,
            )
            run("add_key", *_row(key), "")
            return True

        return self._database.write(work)

    def find(self, digest: str) -> ApiKey | None:
        """Return the key of a token's digest, also one that is revoked or expired: ask it `valid_at(now)`."""
        if not looks_like_digest(digest):
            return None
        for row in self._database.read("key_of_digest", digest):
            key = _key(row)
            if same(key.digest, digest):
                return key
        return None

    def key(self, key_id: str) -> ApiKey:
        """Return the key of an identity, or raise `KeyNotFound`."""
        return _only(key_id, self._database.read)

    def keys(self) -> list[ApiKey]:
        """Return every key that was ever made, the newest first."""
        return [_key(row) for row in self._database.read("keys")]

    def revoke(self, key_id: str, by: str) -> ApiKey:
        """Revoke a key for good, end its sessions and return it; once revoked it stays as it is.

        The last valid key of an owner cannot be revoked: nobody could make another.
        """
        check_key(by, "by")
        self.key(key_id)  # a key that is not there must not make the store

        def work(run: Run) -> ApiKey:
            key, now = _only(key_id, run), self.now()
            if key.revoked is not None:
                return key
            if key.role is Role.OWNER and key.valid_at(now) and not run("other_owners", key_id, now):
                raise NotPermitted(f"{key_id} is the last valid key of an owner: make another first, then revoke it")
            run("revoke", now, by, key_id)
            run("end_sessions_of_key", key_id)
            return _only(key_id, run)

        return self._database.write(work)

    def begin_session(self, key_id: str, *, lasts: float = 8 * 3600) -> tuple[str, Session]:
        """Begin a session for a valid key; return the secret for the cookie, this once, and the session.

        It lasts so many seconds, and never longer than its key.
        """
        check_seconds(lasts, "lasts")
        self.key(key_id)  # as above

        def work(run: Run) -> tuple[str, Session]:
            key, now = _only(key_id, run), self.now()
            if not key.valid_at(now):
                raise NotAuthenticated(f"the key {key_id} is revoked or expired; sign in with another")
            secret, ends = new_secret(), now + _microseconds(lasts)
            if key.expires is not None:
                ends = min(ends, key.expires)
            session = Session(digest_of_token(secret), key_id, new_secret(), now, ends)
            run("end_old_sessions", now)
            run("add_session", session.digest, session.key, session.csrf, session.began, session.ends)
            return secret, session

        return self._database.write(work)

    def session(self, digest: str) -> tuple[Session, ApiKey] | None:
        """Return a session by its secret's digest, with its key; None when it has ended. Ask the key `valid_at`."""
        if not looks_like_digest(digest):
            return None
        for row in self._database.read("session", digest):
            session = Session(*row[:5])
            if same(session.digest, digest) and self.now() < session.ends:
                return session, _key(row[5:])
        return None

    def end_session(self, digest: str) -> None:
        """End a session; nothing happens if there is none."""
        if self.session(digest) is not None:
            self._database.write(lambda run: run("end_session", digest))

    def close(self) -> None:
        """Let go of files and connections; they are made again when they are needed."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect_keys(url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> KeyStore:
    """Return the key store of the ledger at a URL; the first key makes its file or tables, and nothing else does.

    `timeout` is how many seconds to wait for another process before `LedgerBusy`. Like the ledger itself, it refuses
    a PostgreSQL server that does not sync its disk, unless a test says `accept_fsync_off`.
    """
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        raise LedgerError("a service keeps its keys itself: name the ledger that it serves, or ask it over HTTP")
    with connect(url, timeout=timeout) as ledger:  # which reads the address, and reaches nothing yet
        where = ledger.url
    if where == "memory://":
        return KeyStore(MemoryDatabase())
    if where.startswith(_SQLITE):
        return KeyStore(SqliteDatabase(Path(where.removeprefix(_SQLITE)), timeout=timeout))
    postgres = import_module("odograph.service.keys_postgres")
    return KeyStore(postgres.PostgresDatabase(url, where, timeout=timeout, accept_fsync_off=accept_fsync_off))


def _only(key_id: str, run: Run) -> ApiKey:
    for row in run("key", key_id) if looks_like_key_id(key_id) else ():
        return _key(row)
    raise KeyNotFound(f"there is no key {shown(key_id)}; `odograph keys list` shows those that there are")


def _row(key: ApiKey) -> tuple[object, ...]:
    return (
        key.id,
        key.digest,
        key.principal,
        str(key.role),
        " ".join(key.accounts),  # no name has a space
        key.every_account,
        key.made,
        key.made_by,
        key.expires,
        key.revoked,
        key.revoked_by,
    )


def _key(row: Sequence[Any]) -> ApiKey:
    key_id, digest, principal, role, accounts, every_account, *rest = row
    if role not in tuple(Role):
        raise LedgerCorrupt(f"the stored key {key_id} has the role {shown(role)}, and there is no such role")
    return ApiKey(key_id, digest, principal, Role(role), tuple(accounts.split()), bool(every_account), *rest)


def _microseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000_000))
