"""connect: a ledger by its URL. The same verbs wherever it is kept."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from odograph.errors import LedgerError
from odograph.extras import load
from odograph.ledger.backend import Backend, LocalBackend
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Store
from odograph.ledger.stores.memory import MemoryStore
from odograph.ledger.stores.sqlite import SqliteStore

__all__ = ["connect", "store_at"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<rest>.*)", re.ASCII)
_IN_MEMORY: Final = re.compile("/*(file:)?:memory:")  # as SQLite itself has it
_LONGEST_WAIT: Final = 3600
_KNOWN: Final = (
    "memory://, sqlite:///file.db, sqlite:////folder/file.db, postgresql://user@host/database or https://service"
)


def connect(  # noqa: PLR0913  each is one sentence about the way there
    url: str,
    *,
    token: str | None = None,
    principal: str | None = None,
    timeout: float = 10.0,
    accept_fsync_off: bool = False,
    accept_plain_http: bool = False,
) -> Ledger:
    """Return the ledger at a URL; it is reached when it is first used, and made when its first account is opened.

    `principal` is who writes: the operating system's user, if it is left out. A service knows who writes by the
    `token`, an API key. `timeout` is how many seconds to wait for another process before `LedgerBusy`, or for a
    service before `ServiceUnavailable`. A PostgreSQL server that does not sync its disk loses what it acknowledged,
    and is refused; tests may pass `accept_fsync_off`. The token would go in the clear to a service at http:// on
    another machine, which is refused without `accept_plain_http`.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_WAIT:
        raise LedgerError(f"timeout must be seconds, above 0 and at most {_LONGEST_WAIT}, and {timeout!r} is not")
    if isinstance(url, str) and url.startswith(("http://", "https://")):
        if principal is not None:
            raise LedgerError("a service knows who writes by the token; leave principal out")
        load("httpx")
        client = import_module("odograph.client")
        backend: Backend = client.RemoteBackend(
            client.Transport(url, token, timeout, accept_plain_http=accept_plain_http)
        )
        return Ledger(backend)
    if token is not None:
        raise LedgerError("a token is for a service, such as https://budgets.example.org; leave it out here")
    return Ledger(LocalBackend(store_at(url, timeout=timeout, accept_fsync_off=accept_fsync_off), principal))


def store_at(url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> Store:
    """Return the store at a URL; it is reached when it is first used."""
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    scheme, rest = (found["scheme"], found["rest"]) if found else ("", "")
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme == "sqlite" and _IN_MEMORY.match(unquote(rest)):
        raise LedgerError(f"{url!r} would be a file of that name; use memory:// for a ledger in memory")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and "\0" not in unquote(rest):
        return SqliteStore(Path(unquote(rest[1:])), timeout=timeout)
    if scheme in ("postgresql", "postgres"):
        load("psycopg")
        postgres = import_module("odograph.ledger.stores.postgres")
        store: Store = postgres.PostgresStore(url, timeout=timeout, accept_fsync_off=accept_fsync_off)
        return store
    raise LedgerError(f"{url!r} is not where a ledger can be: use {_KNOWN}")
