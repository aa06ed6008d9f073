"""Run the service: the first owner's key, then uvicorn, in this process or in several."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvicorn

from odograph.connect import store_at
from odograph.errors import LedgerBusy, LedgerError
from odograph.service import logs
from odograph.service.access import new_token
from odograph.service.app import App
from odograph.service.collector import look_seldom
from odograph.service.keys import KeyStore, connect_keys
from odograph.service.metrics import forget_the_dead
from odograph.service.protocol import Http
from odograph.service.settings import Settings

__all__ = ["owner_key_file", "serve", "wait_for_ledger", "worker", "write_first_key"]

_PATIENCE: Final = 30  # seconds in which what was accepted is finished
_OTHER_FILES: Final = 256  # that a worker may have open beside its connections
_SWITCH: Final = 0.0005  # seconds for which a thread that computes keeps the interpreter from the event loop
_SAY_EVERY: Final = 3.0  # seconds between two lines about a ledger that is waited for
_PAUSE: Final = 0.5  # seconds between two tries to reach it
_A_MOMENT: Final = 2.0  # seconds in which a process that has made the file makes its key


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it; `say` is told what a person should know."""
    settings.check()
    logs.configure(settings.log_level)
    wait_for_ledger(settings)
    made = write_first_key(settings)
    if made is not None:
        say(f"wrote the first owner's API key to {made}; keep it, or make others with it and revoke it")
    scheme = "https" if settings.tls_cert is not None else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"serving on {scheme}://{host}:{settings.port}; stop with Ctrl-C")
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "loop": "uvloop",
        "http": Http,
        "interface": "asgi3",
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "date_header": False,
        "timeout_graceful_shutdown": _PATIENCE,
        "limit_concurrency": settings.connections + 1,  # also of requests whose callers have gone
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
    _allow_files(settings.connections + _OTHER_FILES)
    # Uvicorn finishes what was accepted and raises the signal again, which would end the process by it. Not in
    # `_app`: workers call that when uvicorn's own handler is in place already.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if settings.workers == 1:
        uvicorn.run(_app(settings), **options)
        return
    os.environ.update(settings.environment)
    with tempfile.TemporaryDirectory(prefix="odograph-metrics-") as counts:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
        uvicorn.run("odograph.service.server:worker", factory=True, workers=settings.workers, **options)


def worker() -> App:
    """Return the application of one of several workers, with the settings that `serve` left for them."""
    forget_the_dead()
    return _app(Settings.from_environment())


def _app(settings: Settings) -> App:
    logs.configure(settings.log_level)
    look_seldom()
    sys.setswitchinterval(_SWITCH)
    return App(settings)


def _allow_files(count: int) -> None:
    """Raise how many files this process and its workers may have open, as far as they may themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def wait_for_ledger(settings: Settings) -> None:
    """Wait until the ledger can be reached, and write into the log that it cannot, every few seconds.

    After `start_timeout` seconds what it was is raised.
    """
    begun = time.monotonic()
    said = -math.inf
    while True:
        try:
            with connect_keys(
                settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off
            ) as keys:
                keys.keys()
        except LedgerBusy as busy:
            now = time.monotonic()
            if now - begun >= settings.start_timeout:
                raise
            if now - said >= _SAY_EVERY:
                left = settings.start_timeout - (now - begun)
                logs.state("warning", "waiting", f"{busy}. It is waited for, {left:.0f} seconds more")
                said = now
            time.sleep(_PAUSE)
        else:
            return


def write_first_key(settings: Settings) -> Path | None:
    """Make an owner's key if no key was ever made, and write it to a file that only its user can read."""
    path = owner_key_file(settings)
    with connect_keys(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off) as keys:
        if keys.keys():
            return None
        # The file first: a key that nobody could read would be the only one there is.
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as problem:
            if isinstance(problem, FileExistsError) and _made_by_another(keys):
                return None
            raise LedgerError(
                f"the first owner's key cannot be written to {path} ({problem.strerror}); move that file away, or"
                " pass --owner-key-file"
            ) from problem
        token = new_token()
        with os.fdopen(file, "w", encoding="ascii") as text:
            text.write(token + "\n")
            text.flush()
            os.fsync(text.fileno())
        if not keys.first_owner(token):  # another process was first
            path.unlink()
            return None
    return path


def _made_by_another(keys: KeyStore) -> bool:
    """Say whether a process that started at the same moment makes the first key: its file is there already."""
    end = time.monotonic() + _A_MOMENT
    while not keys.keys():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def owner_key_file(settings: Settings) -> Path:
    """Return where the first owner's key goes: beside an SQLite file, else into the working folder."""
    if settings.owner_key_file is not None:
        return settings.owner_key_file
    url = store_at(settings.url).url  # with the path as it is on the disk; nothing is reached yet
    if url.startswith("sqlite:///"):
        return Path(f"{url.removeprefix('sqlite:///')}-owner-key")
    return Path("odograph-owner-key")
