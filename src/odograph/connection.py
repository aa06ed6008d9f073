"""connect and aconnect: a ledger by its URL, with the same verbs wherever it is stored."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from odograph.errors import InvalidArgument, load_extra, with_usage
from odograph.ledger.backend import Backend, LocalBackend
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Store
from odograph.ledger.stores.memory import MemoryStore
from odograph.ledger.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from odograph.client.asynchronous import AsyncLedger

__all__ = ["aconnect", "connect", "store_at"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<rest>.*)", re.ASCII)
_IN_MEMORY: Final = re.compile("/*(file:)?:memory:")  # as SQLite writes it
_MAX_TIMEOUT: Final = 3600  # seconds
_KNOWN: Final = (
    "memory://, sqlite:///file.db, sqlite:////folder/file.db, postgresql://user@host/database or https://service"
)


@with_usage("a ledger is reached like connect('sqlite:///privacy.db', principal='ana') or connect(url, token=...)")
def connect(  # noqa: PLR0913  each says how to connect
    url: str,
    *,
    token: str | None = None,
    principal: str | None = None,
    timeout: float = 10.0,
    accept_fsync_off: bool = False,
    accept_plain_http: bool = False,
) -> Ledger:
    """Return the ledger at a URL. The connection is made at its first use, the ledger with its first account.

    `principal` is the name under which entries are written, by default that of the operating system's user. A service
    knows it by the `token`, an API key. `timeout` is how many seconds to wait for another process before
    `LedgerBusy`, or for a service before `ServiceUnavailable` (nothing was sent) or `OutcomeUnknown` (the request was
    sent).

    A PostgreSQL server that does not sync its disk may lose charges and is refused; tests may pass
    `accept_fsync_off`. A service at http:// on another machine is refused, because the token would be sent in the
    clear; on a trusted network, pass `accept_plain_http`.
    """
    _check_timeout(timeout)
    if _is_service(url):
        if principal is not None:
            raise InvalidArgument("principal must be left out for a service, which knows it by the token")
        client = _client("backend")
        caller = client.Caller(url, token, timeout, accept_plain_http=accept_plain_http)
        backend: Backend = client.RemoteBackend(client.Transport(caller))
        return Ledger(backend, suggest_names=True)
    if token is not None:
        raise InvalidArgument("token must be left out: it is for a service, such as https://budgets.example.org")
    store = store_at(url, timeout=timeout, accept_fsync_off=accept_fsync_off)
    return Ledger(LocalBackend(store, principal), suggest_names=True)


@with_usage("a service is reached like aconnect('https://budgets.example.org', token=...), which knows the principal")
def aconnect(
    url: str, *, token: str | None = None, timeout: float = 10.0, accept_plain_http: bool = False
) -> AsyncLedger:
    """Return the ledger behind a service, its verbs to be awaited; open it with `async with`.

    The arguments, retries and errors are those of `connect`. Only a service can be awaited: a local ledger commits on
    the thread of its caller, so in a coroutine use `await asyncio.to_thread(account.spend, cost)`.
    """
    _check_timeout(timeout)
    if not _is_service(url):
        raise InvalidArgument(
            f"url must be that of a service for aconnect, such as https://budgets.example.org (got {url!r}). For a"
            " local ledger use connect, and in a coroutine `await asyncio.to_thread(account.spend, cost)`"
        )
    client = _client("asynchronous")
    caller = client.Caller(url, token, timeout, accept_plain_http=accept_plain_http)
    ledger: AsyncLedger = client.AsyncLedger(client.AsyncTransport(caller))
    return ledger


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_TIMEOUT:
        raise InvalidArgument(f"timeout must be seconds, above 0 and at most {_MAX_TIMEOUT} (got {timeout!r})")


def _is_service(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("http://", "https://"))


def _client(module: str) -> Any:  # noqa: ANN401  a module that needs an extra
    load_extra("httpx")
    return import_module(f"odograph.client.{module}")


def store_at(url: str, *, timeout: float = 10.0, accept_fsync_off: bool = False) -> Store:
    """Return the store at a URL; it connects at its first use."""
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    scheme, rest = (found["scheme"], found["rest"]) if found else ("", "")
    if scheme == "memory" and not rest:
        return MemoryStore()
    if scheme == "sqlite" and _IN_MEMORY.match(unquote(rest)):
        raise InvalidArgument(f"url must be memory:// for a ledger in memory (got {url!r}, a file of that name)")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and "\0" not in unquote(rest):
        return SqliteStore(Path(unquote(rest[1:])), timeout=timeout)
    if scheme in ("postgresql", "postgres"):
        load_extra("psycopg")
        postgres = import_module("odograph.ledger.stores.postgres")
        store: Store = postgres.PostgresStore(url, timeout=timeout, accept_fsync_off=accept_fsync_off)
        return store
    raise InvalidArgument(f"url must be {_KNOWN} (got {url!r}){_meant(url)}")


def _meant(url: object) -> str:
    """Return the end of a message about a URL that is none: the one that was probably meant."""
    if not isinstance(url, str) or "\0" in url:
        return ""
    file = re.fullmatch(r"(sqlite:/?/?)?(?P<path>/?[^:?#/][^:?#]*\.(db|sqlite3?))", url)
    host = re.fullmatch(r"(?P<host>[A-Za-z0-9.-]+:\d+)/?", url)
    meant = f"sqlite:///{file['path']}" if file else f"http://{host['host']}" if host else ""
    return f"; did you mean {meant!r}?" if meant else ""
