"""The service as an ASGI application: the API, the dashboard, the public routes, and the connections it accepts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from odograph.service import logs, openapi
from odograph.service.dashboard import routes
from odograph.service.endpoint import Endpoint, Headers, request_id_of, send_response
from odograph.service.problems import PROBLEM, HttpProblem, problem_of
from odograph.service.routes import ROUTES, admin
from odograph.service.settings import Settings
from odograph.service.state import AppState
from odograph.service.writer_client import Start, start_process

__all__ = ["App", "Connection", "Connections", "PathMethods", "RouteTable"]

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
