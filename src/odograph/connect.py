"""connect: a ledger by its URL. The same verbs wherever it is kept."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from odograph.errors import LedgerError
from odograph.extras import load
from odograph.ledger.ledger import Ledger
from odograph.ledger.memory import MemoryStore
from odograph.ledger.sqlite import SqliteStore

__all__ = ["connect"]

_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<rest>.*)", re.ASCII)
_LONGEST_WAIT: Final = 3600
_KNOWN: Final = "memory://, sqlite:///file.db, sqlite:////folder/file.db or postgresql://user@host/database"


def connect(
    url: str, *, principal: str | None = None, timeout: float = 10.0, accept_fsync_off: bool = False
) -> Ledger:
    """Return the ledger at a URL; it is reached when it is first used, and made when its first account is opened.

    `principal` is who writes: the operating system's user, if it is left out. `timeout` is how many seconds to wait
    for another process before `LedgerBusy`. A PostgreSQL server that does not sync its disk loses what it
    acknowledged, and is refused; tests may pass `accept_fsync_off`.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= _LONGEST_WAIT:
        raise LedgerError(f"timeout must be seconds, above 0 and at most {_LONGEST_WAIT}, and {timeout!r} is not")
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    scheme, rest = (found["scheme"], found["rest"]) if found else ("", "")
    if scheme == "memory" and not rest:
        return Ledger(MemoryStore(), principal=principal)
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1 and "\0" not in unquote(rest):
        return Ledger(SqliteStore(Path(unquote(rest[1:])), timeout=timeout), principal=principal)
    if scheme in ("postgresql", "postgres"):
        load("psycopg")
        postgres = import_module("odograph.ledger.postgres")
        store = postgres.PostgresStore(url, timeout=timeout, accept_fsync_off=accept_fsync_off)
        return Ledger(store, principal=principal)
    raise LedgerError(f"{url!r} is not where a ledger can be: use {_KNOWN}")
