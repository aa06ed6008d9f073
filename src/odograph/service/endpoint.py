"""The endpoint of every request under /v1: authenticate, authorize, limit, parse, call the handler, respond, log.

A handler is a function from a `Call` to a response; it raises what the ledger raises. A `Route` declares what a route
requires, and the OpenAPI description is made from the same declaration.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from tempfile import SpooledTemporaryFile
from time import perf_counter
from typing import IO, Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, unquote, urlencode

import msgspec
from starlette.types import Receive, Scope, Send

from odograph.core.guarantees import Parallel, one_shot
from odograph.errors import ERROR_TABLE, BudgetExceeded, NotAuthenticated, OdographError, listed_as
from odograph.ledger.entries import shown
from odograph.service import logs
from odograph.service.auth import Caller, Verb
from odograph.service.schemas import MAX_TERMS, Problem, count_terms, decoder
from odograph.service.state import CLIENT, AppState
from odograph.service.visibility import PROBLEM, HttpProblem, TooFast, unexpected_problem

__all__ = [
    "PARQUET",
    "Call",
    "Endpoint",
    "Headers",
    "Json",
    "Reply",
    "Route",
    "Stream",
    "headers_of",
    "page_reply",
    "request_id_of",
    "send_response",
]

PARQUET: Final = b"application/vnd.apache.parquet"
_JSON: Final = b"application/json"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_UPLOAD_IN_MEMORY: Final = 1 << 20  # bytes; a larger upload goes to a temporary file
_MAX_PARSE_MESSAGE: Final = 200  # characters: it may repeat a name that was sent
_CREATED: Final = 201
_MAX_LINK: Final = 2000  # characters: proxies accept no long headers
_CHUNK_SIZE: Final = 1 << 16  # bytes of a stream
_SAFETY_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
# Request ids are a random prefix and a counter: a random number each time would be a system call each time, during
# which another thread could take the interpreter.
_REQUEST_ID_PREFIX: Final = secrets.token_hex(6)
_REQUEST_NUMBERS: Final = count(1)
_BEARER: Final = "bearer "
_PATTERN: Final = re.compile(r"`str` matching regex '.*'")  # in a message of msgspec
_MOMENTS: Final = ("since", "until")  # parameters of queries that are times
_QUOTED_STRING: Final = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_ESCAPED: Final = re.compile(r'\\(["\\])')
_ENCODER: Final = msgspec.json.Encoder()

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
Json: TypeAlias = dict[str, Any] | msgspec.Struct | msgspec.Raw  # what becomes the JSON of a response


class Call(NamedTuple):
    """A request that was authenticated, authorized and parsed."""

    state: AppState
    caller: Caller
    path: dict[str, str]  # the parameters in the path
    query: Any
    form: Any  # the body
    idempotency_key: str | None
    upload: IO[bytes] | None = None


class Reply(NamedTuple):
    """A response with another status than the route's, or with headers of its own."""

    status: int
    form: Json
    headers: Headers = ()


class Stream(NamedTuple):
    """A response that is sent in chunks."""

    content_type: bytes
    content: IO[bytes]


Handler: TypeAlias = Callable[[Call], Awaitable[Json | Reply | Stream]]


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the API: its handler, the schemas of what it reads and returns, and what it requires."""

    method: str
    path: str
    handler: Handler
    verb: Verb
    response: type
    form: type | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    repeatable: bool = False  # whether the same idempotency key again gives the first receipt, with 200
    needs_idempotency_key: bool = False
    needs_every_account: bool = False  # whether a key bound to some accounts is refused
    upload: bool = False  # whether it takes a long body; with a form too, that is a Parquet file instead of JSON


def page_reply(call: Call, form: Json, **following: str | int | None) -> Reply:
    """Return a page, with the next one as a link of RFC 8288, unless it is the last or the address is very long."""
    ((name, value),) = following.items()
    if value is None:
        return Reply(200, form)
    known = {field: getattr(call.query, field) for field in call.query.__struct_fields__}
    known = {field: one for field, one in known.items() if one not in (msgspec.UNSET, "")} | {name: value}
    link = f'<?{urlencode(known)}>; rel="next"'  # relative to the request, whatever path a proxy gives it
    return Reply(200, form, ((b"link", link.encode()),) if len(link) <= _MAX_LINK else ())


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, state: AppState, route: Route) -> None:
        self._state = state
        self._route = route
        self._read: Callable[[bytes], Any] | None = None
        if route.form is not None:
            self._read = decoder(route.form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one response and log one line, whatever happens; the text of an unexpected error is not sent."""
        started = perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_of(headers)
        caller: Caller | None = None
        extra: Headers = ()
        code = ""
        response: Json | Reply | Stream
        status, content_type = self._route.status, _JSON
        try:
            caller = await self._authenticate(scope, headers)
            call = await self._read_call(scope, receive, headers, caller)
            response = await self._route.handler(call)
            if isinstance(response, Reply):
                status, response, extra = response
        except OdographError as error:
            response = problem = await self._problem(error, caller, request_id)
            status, content_type, extra, code = problem.status, PROBLEM, headers_of(error), problem.code
        except Exception as error:  # noqa: BLE001  its text must not be sent
            logs.failure(error, request_id=request_id)
            response, status, content_type = unexpected_problem(request_id), 500, PROBLEM
        receipt = status == _CREATED and self._route.repeatable
        if caller is not None:
            extra = (*extra, *self._state.limit.headers(caller.api_key_id, policy=not receipt))
        if isinstance(response, Stream):
            await self._send_stream(send, response, request_id, extra)
        else:
            content = _ENCODER.encode(response)
            await send_response(send, status, content_type, content, request_id, extra, bare=receipt)
        took = perf_counter() - started
        name = scope["path_params"].get("name", "")
        self._state.metrics.count_response(self._route.path, status, took)
        logs.request_line(
            request_id=request_id,
            method=scope["method"],  # GET or HEAD for a route that reads
            route=self._route.path,
            status=status,
            milliseconds=1e3 * took,
            account=name if caller is not None and caller.sees(name) else "",
            principal="" if caller is None else caller.principal,
            api_key_id="" if caller is None else caller.api_key_id,
            error=code,
        )

    async def _problem(self, error: OdographError, caller: Caller | None, request_id: str) -> Problem:
        """Return the problem for an error; a refusal of thousands of parts is formatted in a thread."""
        asked = error.decision.request if isinstance(error, BudgetExceeded) else None
        if asked is not None and isinstance(one_shot(asked), Parallel):
            return await self._state.compute(self._state.problem, error, caller, request_id)
        return self._state.problem(error, caller, request_id)

    async def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        value = headers.get(b"authorization", b"").decode("latin-1")
        if len(headers) < len(scope["headers"]):
            _refuse_repeated_headers(scope, b"authorization", b"idempotency-key", b"content-length", b"content-type")
        if value[: len(_BEARER)].lower() != _BEARER:
            raise NotAuthenticated("send an API key, as in: Authorization: Bearer odo_...")
        state, route = self._state, self._route
        caller = await state.admit(value[len(_BEARER) :].strip())
        wait = state.limit.take(caller.api_key_id)
        if wait:
            raise TooFast(wait, state.limit.headers(caller.api_key_id))
        caller.require(route.verb)
        if route.needs_every_account:
            caller.require_every_account(route.verb)
        CLIENT.set(caller.principal)
        return caller

    async def _read_call(self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], caller: Caller) -> Call:
        route = self._route
        key = _read_idempotency_key(headers.get(b"idempotency-key")) if route.needs_idempotency_key else None
        given = scope["query_string"]
        query = None if route.query is None and not given else _read_query(route, given)
        path = scope["path_params"]
        if route.upload and (route.form is None or _media_type(headers) == PARQUET):
            upload = await self._read_upload(receive, headers)
            return Call(self._state, caller, path, query, None, key, upload)
        if self._read is None:
            return Call(self._state, caller, path, query, None, key)
        body = await self._read_body(receive, headers)
        if body and not _media_type(headers).startswith(_JSON):
            also = f", or Parquet, with {PARQUET.decode()}" if route.upload else ""
            raise HttpProblem(415, f"send JSON, with Content-Type: application/json{also}")
        try:
            form = self._read(body or b"{}")
        except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
            status = 422 if isinstance(problem, msgspec.ValidationError) else 400
            raise HttpProblem(
                status,
                f"the body cannot be read: {_explain(problem)}; nothing was changed."
                " /docs shows the body of a request",
            ) from None
        if len(body) > MAX_TERMS and (terms := count_terms(form)) > MAX_TERMS:
            raise HttpProblem(
                422,
                f"a request may hold at most {MAX_TERMS} guarantees and points of curves (got {terms}); nothing was"
                " changed. Send several requests",
            )
        return Call(self._state, caller, path, query, form, key)

    async def _read_body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        limit = self._state.settings.largest_body
        _check_length(headers, limit)
        message = await receive()
        body: bytes = message.get("body", b"")
        more = message.get("more_body") or message["type"] == "http.disconnect"
        while more and len(body) <= limit:
            part, more = await _receive_part(receive)
            body += part
        if len(body) > limit:
            raise _too_large(limit)
        return body

    async def _read_upload(self, receive: Receive, headers: dict[bytes, bytes]) -> IO[bytes]:
        limit = self._state.settings.largest_import
        _check_length(headers, limit)
        file = SpooledTemporaryFile(_UPLOAD_IN_MEMORY)  # noqa: SIM115  the handler closes it
        more, size = True, 0
        while more:
            part, more = await _receive_part(receive)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            await self._state.run(file.write, part)
        file.seek(0)
        return file

    async def _send_stream(self, send: Send, response: Stream, request_id: str, extra: Headers) -> None:
        run, file = self._state.run, response.content
        headers = [
            (b"content-type", response.content_type),
            (b"x-request-id", request_id.encode()),
            *_SAFETY_HEADERS,
            *extra,
        ]
        try:
            chunk = await run(file.read, _CHUNK_SIZE)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await run(file.read, _CHUNK_SIZE)
        finally:
            file.close()
        await send({"type": "http.response.body", "body": b""})


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    """Return the type of a body, without its parameters."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


def _check_length(headers: dict[bytes, bytes], limit: int) -> None:
    length = headers.get(b"content-length", b"0")
    if len(length) > 18 or not length.isdigit() or int(length) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> HttpProblem:
    # The rest of the body would be parsed as the next request, so the connection is closed.
    return HttpProblem(413, f"the body is larger than {limit} bytes", ((b"connection", b"close"),))


async def _receive_part(receive: Receive) -> tuple[bytes, bool]:
    """Return a part of a body and whether more follows; raise if the caller disconnected before its end."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise HttpProblem(400, "the body was cut off; nothing was changed")
    return message.get("body", b""), bool(message.get("more_body"))


async def send_response(  # noqa: PLR0913, PLR0917  the parts of a response
    send: Send,
    status: int,
    content_type: bytes | None,
    content: bytes,
    request_id: str,
    extra: Headers = (),
    *,
    bare: bool = False,
) -> None:
    """Send a response, without content if it has no content type; a bare one omits what caches and browsers read."""
    # Uvicorn processes each header. A receipt must be quick, holds no secret, and no cache keeps a 201.
    described = (
        () if content_type is None else ((b"content-type", content_type), (b"content-length", b"%d" % len(content)))
    )
    headers = [
        *described,
        (b"x-request-id", request_id.encode()),
        *(() if bare else _SAFETY_HEADERS),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """Return the caller's request id if it is well-formed, else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{_REQUEST_ID_PREFIX}-{next(_REQUEST_NUMBERS):x}"


def headers_of(error: OdographError) -> Headers:
    """Return the headers of the response to an error."""
    if isinstance(error, HttpProblem):
        return error.headers
    if isinstance(error, NotAuthenticated):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, TooFast):
        return ((b"retry-after", b"%d" % max(1, math.ceil(error.seconds))), *error.headers)
    if ERROR_TABLE[listed_as(error)].retryable:
        return ((b"retry-after", b"1"),)
    return ()


def _refuse_repeated_headers(scope: Scope, *names: bytes) -> None:
    """Refuse a header that occurs twice: a proxy and this service could each read a different one."""
    for name in names:
        if sum(one == name for one, _ in scope["headers"]) > 1:
            raise HttpProblem(400, f"the header {name.decode()} occurs more than once; send it once")


def _read_idempotency_key(value: bytes | None) -> str:
    """Read an idempotency key: a quoted string of RFC 9651, or the key itself, percent-encoded where it is not ASCII.

    The quoted form is that of draft-ietf-httpapi-idempotency-key-header; nothing in it is percent-encoded.
    """
    if not value:
        raise HttpProblem(
            400, "Idempotency-Key is missing: send a header with a string of your own, such as q-17, to retry safely"
        )
    try:
        text = value.decode("ascii")
        if text.startswith('"'):
            return _read_quoted_string(text)
        return unquote(text, errors="strict") if "%" in text else text
    except ValueError:
        raise HttpProblem(400, "Idempotency-Key must be ASCII; percent-encode other characters as UTF-8") from None


def _read_quoted_string(text: str) -> str:
    r"""Read a string of RFC 9651: printable ASCII in quotes, with a backslash before each quote and backslash."""
    found = _QUOTED_STRING.fullmatch(text)
    if found is None:
        raise HttpProblem(
            400,
            'Idempotency-Key begins with a quote, but is not a string such as "q-17": end it with a quote, and write'
            ' \\" and \\\\ for a quote and a backslash in it',
        )
    return _ESCAPED.sub(r"\1", found[1])


def _read_query(route: Route, text: bytes) -> Any:  # noqa: ANN401  of the route's own type
    pairs = parse_qsl(text.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    known = () if route.query is None else route.query.__struct_fields__
    if len(given) < len(pairs) or not given.keys() <= {*known}:
        names = ", ".join(known) or "no parameters"
        raise HttpProblem(400, f"the query repeats a parameter or has an unknown one; this route takes {names}")
    if route.query is None:
        return None
    try:
        return msgspec.convert(given, route.query, strict=False)
    except msgspec.ValidationError as problem:
        field = str(problem).rpartition("`$.")[2].rstrip("`")
        if field in _MOMENTS:
            told = f"{field} must be a time with its zone, such as 2030-01-15T09:30:00Z (got {shown(given[field])})"
            raise HttpProblem(400, told) from None
        raise HttpProblem(400, f"the query cannot be read: {_explain(problem)}") from None


def _explain(problem: Exception) -> str:
    """Return what msgspec found and where; for other errors only that the JSON is invalid."""
    if not isinstance(problem, msgspec.MsgspecError):
        return "it is not valid JSON"
    return _PATTERN.sub("a string of another form", str(problem))[:_MAX_PARSE_MESSAGE]
