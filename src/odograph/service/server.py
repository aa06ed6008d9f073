"""The service as an ASGI application, and the server that runs it.

The application has the API, the dashboard, the public routes, and the connections that it accepts. Serving makes the
first owner's key, then runs uvicorn in this process or in several.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from odograph.connection import store_at
from odograph.errors import LedgerBusy, LedgerError
from odograph.service import logs, openapi
from odograph.service.auth import new_token
from odograph.service.dashboard import routes
from odograph.service.endpoint import Endpoint, Headers, request_id_of, send_response
from odograph.service.key_store import KeyStore, connect_keys
from odograph.service.monitoring import remove_dead_workers
from odograph.service.routes import ROUTES, admin
from odograph.service.settings import Settings, tune_garbage_collector
from odograph.service.state import AppState
from odograph.service.visibility import PROBLEM, HttpProblem, problem_of
from odograph.service.writer import Start, start_process

__all__ = [
    "App",
    "Connection",
    "Connections",
    "HttpProtocol",
    "JoiningTransport",
    "PathMethods",
    "RouteTable",
    "owner_key_file",
    "serve",
    "wait_for_ledger",
    "worker",
    "write_first_key",
]

_SHUTDOWN_TIMEOUT: Final = 30  # seconds in which accepted requests are finished
_OTHER_FILES: Final = 256  # that a worker may have open in addition to its connections
_SWITCH_INTERVAL: Final = 0.0005  # seconds for which a computing thread may keep the interpreter from the event loop
_LOG_INTERVAL: Final = 3.0  # seconds between two log lines while the ledger cannot be reached
_RETRY_INTERVAL: Final = 0.5  # seconds between two attempts to reach it
_OTHER_PROCESS_TIMEOUT: Final = 2.0  # seconds in which a process that has made the key file stores the key
_MAX_HEAD: Final = 1 << 16  # bytes
_MIN_BODY_RATE: Final = 1 << 16  # bytes a second: a long body has that much more time
_PLAIN_TEXT: Final = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"


def serve(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until a signal stops it; `say` prints what the operator should know."""
    settings.check()
    logs.configure(settings.log_level)
    wait_for_ledger(settings)
    made = write_first_key(settings)
    if made is not None:
        say(f"wrote the first owner's API key to {made}; keep it, or use it to make others and revoke it")
    scheme = "https" if settings.tls_cert is not None else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"serving on {scheme}://{host}:{settings.port}; stop with Ctrl-C")
    options: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "loop": "uvloop",
        "http": HttpProtocol,
        "interface": "asgi3",
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "date_header": False,
        "timeout_graceful_shutdown": _SHUTDOWN_TIMEOUT,
        "limit_concurrency": settings.connections + 1,  # includes requests whose callers have disconnected
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
    _raise_file_limit(settings.connections + _OTHER_FILES)
    # Uvicorn finishes accepted requests and raises the signal again, which must end the process with code 0. Not in
    # `_make_app`: in a worker that runs after uvicorn has installed its own handler.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if settings.workers == 1:
        uvicorn.run(_make_app(settings), **options)
        return
    os.environ.update(settings.environment)
    with tempfile.TemporaryDirectory(prefix="odograph-metrics-") as counts:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counts
        uvicorn.run("odograph.service.server:worker", factory=True, workers=settings.workers, **options)


def worker() -> App:
    """Return the application of one of several workers, with the settings that `serve` put into the environment."""
    remove_dead_workers()
    return _make_app(Settings.from_environment())


def _make_app(settings: Settings) -> App:
    logs.configure(settings.log_level)
    tune_garbage_collector()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    return App(settings)


def _raise_file_limit(count: int) -> None:
    """Raise the limit of open files of this process and its workers, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def wait_for_ledger(settings: Settings) -> None:
    """Wait until the ledger can be reached, with a line in the log every few seconds.

    After `start_timeout` seconds the error is raised.
    """
    begun = time.monotonic()
    logged = -math.inf
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
            if now - logged >= _LOG_INTERVAL:
                left = settings.start_timeout - (now - begun)
                logs.state("warning", "waiting", f"{busy}. Waiting up to {left:.0f} seconds more")
                logged = now
            time.sleep(_RETRY_INTERVAL)
        else:
            return


def write_first_key(settings: Settings) -> Path | None:
    """Make an owner's key unless a key was ever made; write it to a file that only this user can read."""
    path = owner_key_file(settings)
    with connect_keys(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off) as keys:
        if keys.keys():
            return None
        # The file first: otherwise the only key could be one that was never written down.
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as problem:
            if isinstance(problem, FileExistsError) and _another_process_makes_it(keys):
                return None
            raise LedgerError(
                f"the first owner's key cannot be written to {path} ({problem.strerror}); move that file, or pass"
                " --owner-key-file"
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


def _another_process_makes_it(keys: KeyStore) -> bool:
    """Wait for a process that started at the same time and has made the file; return whether it stored a key."""
    end = time.monotonic() + _OTHER_PROCESS_TIMEOUT
    while not keys.keys():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def owner_key_file(settings: Settings) -> Path:
    """Return the file for the first owner's key: beside a SQLite ledger, else in the working directory."""
    if settings.owner_key_file is not None:
        return settings.owner_key_file
    url = store_at(settings.url).url  # with the resolved path; this does not connect
    if url.startswith("sqlite:///"):
        return Path(f"{url.removeprefix('sqlite:///')}-owner-key")
    return Path("odograph-owner-key")


_INFORMATION: Final = b"HTTP/1.1 1"  # 100 Continue: the client sends its body when it has this


class JoiningTransport(asyncio.Transport):
    """A connection that sends the head of a response together with the first part of its body.

    Uvicorn writes them one after the other, and uvloop sends every write at once: a second system call and a second
    packet for each response. Here a head waits for the next write, or until its response or the connection ends.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head: bytes | bytearray | memoryview = b""  # that waits
        self._in_response = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data with the head that waits; the first write of a response is its head."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(b"".join((head, data)))
        elif self._in_response or data[: len(_INFORMATION)] == _INFORMATION:
            self._transport.write(data)
        else:
            self._head, self._in_response = data, True

    def end_response(self) -> None:
        """Send the head that waits, if the response had no body; the next write begins another response."""
        self._in_response = False
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self.end_response()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._head = b""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed, or closes when everything is sent."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ANN401  of the connection's own types
        """Return what is known of the connection, such as its addresses."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Receive nothing until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive again."""
        self._transport.resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol with limits on clients that have shown no key: slow requests, long heads."""

    admitted = False
    address = ""
    _head = 0  # bytes of an incomplete head
    _body = 0  # bytes of a body
    _in_head = _in_body = False
    _since = 0.0  # when the head or body began
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit a connection, or refuse it if there are too many."""
        self._limits: Connections = self.app.connections
        self._joining = JoiningTransport(transport)
        super().connection_made(self._joining)
        self.address = self.client[0] if self.client else ""
        self.admitted = self._limits.admit(self)
        if self.admitted:
            self._start_deadline()
        else:
            self.connections.discard(self)  # uvicorn counts them too, and would refuse others
            self._refuse(b"503 Service Unavailable", b"Too many connections.", b"retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._limits.leave(self)
        self._cancel_deadline()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, in favor of another."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head that is too long."""
        if not self.admitted:
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_body and (self._in_head or not self._responding()):  # also before the first byte of one
            self._head += len(data)
            if self._head > _MAX_HEAD:
                self.send_400_response("The head of the request is too long.")
                return
        elif not self._in_body:
            self._cancel_deadline()
            return
        if self._deadline is None:
            self._start_deadline()

    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """End a head and begin a body."""
        self._in_head, self._in_body, self._head, self._body = False, True, 0, 0
        self._limits.begin_request(self)
        self._cancel_deadline()  # the body has a deadline of its own
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body."""
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle until the next request."""
        self._joining.end_response()
        super().on_response_complete()
        if not self.pipeline:
            self._limits.await_request(self)

    def _start_deadline(self) -> None:
        """Start the time in which a head or body must arrive."""
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(self._limits.timeout, self._check_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _check_deadline(self) -> None:
        """Close the connection, unless a long body arrives fast enough or the service itself is the slow one."""
        self._deadline = None
        if self.transport.is_closing():
            return
        left = self._since + self._limits.timeout + self._body / _MIN_BODY_RATE - self.loop.time()
        if self.flow.read_paused or (self._in_head and self._responding()):
            left = self._limits.timeout
        if left > 0:
            self._deadline = self.loop.call_later(left, self._check_deadline)
            return
        if self._in_body and not self._responding():  # the response was sent before the body was read
            self.transport.close()
            return
        if self._responding():
            self.cycle.disconnected = True  # the endpoint that awaits the body sees it cut off
            self.cycle.message_event.set()
        self._refuse(b"408 Request Timeout", b"The request did not arrive in time.")

    def _refuse(self, status: bytes, text: bytes, headers: bytes = b"") -> None:
        size = b"content-length: %d\r\n" % len(text)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + headers + size + _PLAIN_TEXT + b"\r\n" + text)
        self.transport.close()


_MAX_CACHED_PATHS: Final = 1024
# Percent-encoded letters, digits, unreserved characters and slashes: a second spelling of the same path.
_NEEDLESS_ENCODING: Final = re.compile(rb"%(?:3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|2[DEFdef]|5[Ff]|7[Ee])")


class App:
    """The ASGI application. The state that requests share is made when the server starts it."""

    def __init__(self, settings: Settings, start: Start = start_process) -> None:
        self._settings = settings
        self._start = start  # of writer processes
        self.connections = Connections(
            settings.connections, settings.connections_per_address, settings.receive_timeout
        )
        self._table: RouteTable | None = None
        self._router = Router()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Respond to a request, or start and stop with the server."""
        if scope["type"] == "lifespan":
            return self._run_lifespan(receive, send)
        methods = None if self._table is None else self._table.find(scope)
        if methods is None and _NEEDLESS_ENCODING.search(scope["raw_path"]):  # the router sees the decoded path
            return _NotFound()(scope, receive, send)
        return (methods or self._router)(scope, receive, send)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            state = AppState(self._settings, self._start)
            self._table = RouteTable(state)
            self._router = Router(routes.routes(state), redirect_slashes=False, default=_NotFound())
        except Exception as error:  # noqa: BLE001  the server reports that it could not start
            logs.failure(error)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await state.close()
        await send({"type": "lifespan.shutdown.complete"})


class Connection(Protocol):
    """What `Connections` needs of a connection."""

    admitted: bool
    address: str

    def drop(self) -> None:
        """Close the connection at once."""


class Connections:
    """The connections of one worker: at most `limit`, of which at most `limit_per_address` of one client (0: any).

    A connection is idle while it has sent no complete head: it is new, slow, or between two requests. When a limit is
    reached, the connection that has been idle longest is closed for the new one; if none is idle, the new one is
    refused.
    """

    def __init__(self, limit: int, limit_per_address: int, timeout: float) -> None:
        self.timeout = timeout  # seconds in which a request must have arrived
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._addresses: Counter[str] = Counter()
        self._count = 0
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle

    def admit(self, connection: Connection) -> bool:
        """Count a new connection; return whether it is admitted."""
        address = connection.address
        own = 0 < self._limit_per_address <= self._addresses[address]
        if own or self._count >= self._limit:
            oldest = next((one for one in self._idle if not own or one.address == address), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.drop()
        self._addresses[address] += 1
        self._count += 1
        self._idle[connection] = None
        return True

    def await_request(self, connection: Connection) -> None:
        """Record that a connection is idle until its next request."""
        if connection.admitted:
            self._idle[connection] = None

    def begin_request(self, connection: Connection) -> None:
        """Record that the head of a request is complete."""
        self._idle.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        if not connection.admitted:
            return
        connection.admitted = False
        self._idle.pop(connection, None)
        self._count -= 1
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]


class PathMethods:
    """The handlers of one path, by method. HEAD is answered as GET, whose body the server leaves out."""

    def __init__(self, methods: dict[str, ASGIApp]) -> None:
        self._methods = methods | ({"HEAD": methods["GET"]} if "GET" in methods else {})

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the handler of the method; respond to OPTIONS with the methods, and to any other with 405."""
        method = scope["method"]
        found = self._methods.get(method)
        if found is not None:
            return found(scope, receive, send)
        allow = ", ".join(sorted({*self._methods, "OPTIONS"}))
        headers = ((b"allow", allow.encode()),)
        if method == "OPTIONS":
            return send_response(send, 204, None, b"", request_id_of(dict(scope["headers"])), headers)
        return _send_problem(scope, send, 405, f"this path takes {allow}", headers)


class RouteTable:
    """The paths of the API.

    Starlette's router matches the decoded path, so a name with an encoded slash would be two parts and each path
    would have many spellings. It also tries one regular expression per route, 2 to 8 microseconds a request; a path
    that was seen before is found here in 0.4.
    """

    def __init__(self, state: AppState) -> None:
        paths: dict[str, dict[str, ASGIApp]] = {path: {"GET": app} for path, app in _public_routes(state).items()}
        for route in ROUTES:
            paths.setdefault(route.path, {})[route.method] = Endpoint(state, route)
        self._cached: dict[bytes, tuple[PathMethods, dict[str, str]]] = {}
        self._by_shape: dict[tuple[object, ...], list[tuple[list[str], PathMethods]]] = {}
        for path, methods in paths.items():
            parts = path.split("/")
            shape = self._by_shape.setdefault(_shape(parts), [])
            shape.append((parts, PathMethods(methods)))

    def find(self, scope: Scope) -> PathMethods | None:
        """Return the handlers of a path, and put its parameters into the scope."""
        path: bytes = scope["raw_path"]  # not decoded: a part may hold an encoded slash
        known = self._cached.get(path)
        if known is not None:
            methods, scope["path_params"] = known
            return methods
        given = path.decode("latin-1").split("/")
        for parts, methods in self._by_shape.get(_shape(given), ()):
            named: dict[str, str] = {}
            for part, value in zip(parts, given, strict=True):
                if part[:1] == "{" and value:
                    named[part[1:-1]] = unquote(value)  # only parameters may be encoded: a path has one spelling
                elif part != value:
                    break
            else:
                if len(self._cached) >= _MAX_CACHED_PATHS:
                    self._cached.clear()
                self._cached[path] = methods, named
                scope["path_params"] = named
                return methods
        return None


def _shape(parts: list[str]) -> tuple[object, ...]:
    """Return what tells most templates apart: the number of parts and the first two, which are never parameters."""
    return len(parts), *parts[1:3]


class _NotFound:
    """Responds to a path that does not exist: with a page to a browser, else with a problem."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if not scope["path"].startswith("/v1/") and "text/html" in request.headers.get("accept", ""):
            await routes.not_found(request)(scope, receive, send)
            return
        await _send_problem(scope, send, 404, "no such path; /docs lists the paths of the API")


async def _send_problem(scope: Scope, send: Send, status: int, detail: str, headers: Headers = ()) -> None:
    request_id = request_id_of(dict(scope["headers"]))
    problem = problem_of(HttpProblem(status, detail), None, request_id)
    await send_response(send, status, PROBLEM, msgspec.json.encode(problem), request_id, headers)


def _public_routes(state: AppState) -> dict[str, ASGIApp]:
    """Return the routes that need no key; they disclose nothing about the ledger."""
    description = msgspec.json.encode(openapi.describe(ROUTES))

    async def health(scope: Scope, _: Receive, send: Send) -> None:
        await _send_json(scope, send, 200, msgspec.json.encode(admin.health()))

    async def ready(scope: Scope, _: Receive, send: Send) -> None:
        form = await admin.ready(state)
        await _send_json(scope, send, 200 if form.status == "ok" else 503, msgspec.json.encode(form))

    async def describe(scope: Scope, _: Receive, send: Send) -> None:
        await _send_json(scope, send, 200, description)

    return {"/healthz": health, "/readyz": ready, "/v1/openapi.json": describe}


async def _send_json(scope: Scope, send: Send, status: int, content: bytes) -> None:
    await send_response(send, status, b"application/json", content, request_id_of(dict(scope["headers"])))
