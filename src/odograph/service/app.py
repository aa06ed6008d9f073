"""The application, as a server calls it: the API, the dashboard, and what is open to everybody."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from typing import Final
from urllib.parse import unquote

import msgspec
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from odograph.service import admin, logs, openapi
from odograph.service.api import ROUTES
from odograph.service.dashboard import pages
from odograph.service.door import Endpoint, Headers, reply, request_id_of
from odograph.service.office import Office
from odograph.service.pen import Start, start_process
from odograph.service.problems import PROBLEM, HttpProblem, problem_of
from odograph.service.protocol import Connections
from odograph.service.settings import Settings

__all__ = ["App"]

_REMEMBERED: Final = 1024  # paths
# Letters, digits and signs that nobody has to encode, and slashes, which would be other parts: a second spelling.
_NEEDLESS: Final = re.compile(rb"%(?:3[0-9]|[46][1-9A-Fa-f]|[57][0-9Aa]|2[DEFdef]|5[Ff]|7[Ee])")


class App:
    """The service as an ASGI application. What it shares is made when the server starts it."""

    def __init__(self, settings: Settings, start: Start = start_process) -> None:
        self._settings = settings
        self._start = start  # of scribes
        self.connections = Connections(
            settings.connections, settings.connections_per_address, settings.receive_timeout
        )
        self._table: _Table | None = None
        self._router = Router()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request, or start and end with the server."""
        if scope["type"] == "lifespan":
            return self._live(receive, send)
        resource = None if self._table is None else self._table.find(scope)
        if resource is None and _NEEDLESS.search(scope["raw_path"]):  # the router reads a path decoded
            return _Nowhere()(scope, receive, send)
        return (resource or self._router)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            office = Office(self._settings, self._start)
            self._table = _Table(office)
            self._router = Router(pages.routes(office), redirect_slashes=False, default=_Nowhere())
        except Exception as error:  # noqa: BLE001  the server says that it could not start
            logs.failure(error)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}"})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await office.close()
        await send({"type": "lifespan.shutdown.complete"})


class _Resource:
    """A path and its methods."""

    def __init__(self, methods: dict[str, ASGIApp]) -> None:
        self._methods = methods

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        found = self._methods.get(scope["method"])
        if found is not None:
            return found(scope, receive, send)
        allow = ", ".join(sorted(self._methods))
        return _refuse(scope, send, 405, f"this path takes {allow}", ((b"allow", allow.encode()),))


class _Table:
    """The paths of the API by their parts: found in a look, however many there are."""

    def __init__(self, office: Office) -> None:
        paths: dict[str, dict[str, ASGIApp]] = {path: {"GET": app} for path, app in _public(office).items()}
        for route in ROUTES:
            paths.setdefault(route.path, {})[route.method] = Endpoint(office, route)
        self._found: dict[bytes, tuple[_Resource, dict[str, str]]] = {}
        self._by_shape: dict[tuple[object, ...], list[tuple[list[str], _Resource]]] = {}
        for path, methods in paths.items():
            parts = path.split("/")
            shape = self._by_shape.setdefault(_shape(parts), [])
            shape.append((parts, _Resource(methods)))

    def find(self, scope: Scope) -> _Resource | None:
        """Return what is at a path, and put its parameters into the scope."""
        path: bytes = scope["raw_path"]  # as it came: a part may hold an encoded slash
        known = self._found.get(path)
        if known is not None:
            resource, scope["path_params"] = known
            return resource
        given = path.decode("latin-1").split("/")
        for parts, resource in self._by_shape.get(_shape(given), ()):
            named: dict[str, str] = {}
            for part, value in zip(parts, given, strict=True):
                if part[:1] == "{" and value:
                    named[part[1:-1]] = unquote(value)  # a name alone may be encoded, so a path has one spelling
                elif part != value:
                    break
            else:
                if len(self._found) >= _REMEMBERED:
                    self._found.clear()
                self._found[path] = resource, named
                scope["path_params"] = named
                return resource
        return None


def _shape(parts: list[str]) -> tuple[object, ...]:
    """Return what tells most templates apart: how many parts, and the first ones, which are no parameters."""
    return len(parts), *parts[1:3]


class _Nowhere:
    """What answers where nothing is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if not scope["path"].startswith("/v1/") and "text/html" in request.headers.get("accept", ""):
            await pages.missing(request)(scope, receive, send)
            return
        await _refuse(scope, send, 404, "there is nothing at this path; /docs says what there is")


async def _refuse(scope: Scope, send: Send, status: int, detail: str, headers: Headers = ()) -> None:
    request_id = request_id_of(dict(scope["headers"]))
    problem = problem_of(HttpProblem(status, detail), None, request_id)
    await reply(send, status, PROBLEM, msgspec.json.encode(problem), request_id, headers)


def _public(office: Office) -> dict[str, ASGIApp]:
    """Return what is open to everybody; it tells nothing about the ledger."""
    described = msgspec.json.encode(openapi.describe(ROUTES))

    async def health(scope: Scope, _: Receive, send: Send) -> None:
        await _say(scope, send, 200, msgspec.json.encode(admin.health()))

    async def ready(scope: Scope, _: Receive, send: Send) -> None:
        form = await admin.ready(office)
        await _say(scope, send, 200 if form.status == "ok" else 503, msgspec.json.encode(form))

    async def description(scope: Scope, _: Receive, send: Send) -> None:
        await _say(scope, send, 200, described)

    return {"/healthz": health, "/readyz": ready, "/v1/openapi.json": description}


async def _say(scope: Scope, send: Send, status: int, content: bytes) -> None:
    await reply(send, status, b"application/json", content, request_id_of(dict(scope["headers"])))
