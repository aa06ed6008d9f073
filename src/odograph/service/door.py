"""The one way in: every request under /v1 is authenticated, permitted, limited, read, carried out, answered here.

A handler is a function from a `Call` to an answer; it raises what the ledger raises. What a route needs is said in
its `Route`, so that nothing is forgotten, and the description of the API is made from the same.
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
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.types import Receive, Scope, Send

from odograph.core.guarantees import Parallel
from odograph.errors import ERROR_TABLE, BudgetExceeded, NotAuthenticated, OdographError, listed_as
from odograph.service import logs
from odograph.service.access import Caller, Verb
from odograph.service.answers import Problem
from odograph.service.forms import MOST_TERMS, decoder, terms_of
from odograph.service.office import Office
from odograph.service.problems import PROBLEM, HttpProblem, TooFast, unexpected
from odograph.service.threads import CLIENT

__all__ = ["Answer", "Call", "Endpoint", "File", "Route", "headers_of", "reply", "request_id_of"]

_JSON: Final = b"application/json"
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_IN_MEMORY: Final = 1 << 20  # of an upload, before it goes to a temporary file
_TOLD: Final = 200  # characters of what was wrong: it may repeat a name that was sent
_CREATED: Final = 201
_CHUNK: Final = 1 << 16
_SAFE: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
# A random number for every request would be a system call for every request, and another thread would have its turn.
_PROCESS: Final = secrets.token_hex(6)
_NUMBERS: Final = count(1)
_BEARER: Final = "bearer "
_ENCODER: Final = msgspec.json.Encoder()

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class Call(NamedTuple):
    """A request that has passed the door."""

    office: Office
    caller: Caller
    path: dict[str, str]
    query: Any
    form: Any
    key: str | None  # the idempotency key
    file: IO[bytes] | None = None  # an upload


class Answer(NamedTuple):
    """An answer with a status of its own."""

    status: int
    form: msgspec.Struct | msgspec.Raw


class File(NamedTuple):
    """An answer that is sent piece by piece."""

    content_type: bytes
    content: IO[bytes]


Handler: TypeAlias = Callable[[Call], Awaitable[msgspec.Struct | Answer | File]]


@dataclass(frozen=True, slots=True)
class Route:
    """A verb of the API, and everything that it needs."""

    method: str
    path: str
    handler: Handler
    verb: Verb
    answer: type
    form: type | None = None
    query: type[msgspec.Struct] | None = None
    status: int = 200
    repeated: bool = False  # whether the same key again is answered with 200
    keyed: bool = False  # whether an Idempotency-Key must come with it
    whole: bool = False  # whether a key bound to accounts is refused
    upload: bool = False


class Endpoint:
    """One route, as the server calls it."""

    def __init__(self, office: Office, route: Route) -> None:
        self._office = office
        self._route = route
        self._read: Callable[[bytes], Any] | None = None
        if route.form is not None:
            self._read = decoder(route.form)
        self._largest = office.settings.largest_import if route.upload else office.settings.largest_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: whatever happens, there is one answer, one line in the log, and no exception's text."""
        started = perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_of(headers)
        caller: Caller | None = None
        extra: Headers = ()
        code = ""
        answer: msgspec.Struct | msgspec.Raw | Answer | File
        status, content_type = self._route.status, _JSON
        try:
            caller = await self._admitted(scope, headers)
            call = await self._call(scope, receive, headers, caller)
            answer = await self._route.handler(call)
            if isinstance(answer, Answer):
                status, answer = answer
        except OdographError as error:
            answer = problem = await self._problem(error, caller, request_id)
            status, content_type, extra, code = problem.status, PROBLEM, headers_of(error), problem.code
        except Exception as error:  # noqa: BLE001  whatever it is, its text must not leave
            logs.failure(error, request_id=request_id)
            answer, status, content_type = unexpected(request_id), 500, PROBLEM
        if isinstance(answer, File):
            await self._send_file(send, answer, request_id)
        else:
            receipt = status == _CREATED and self._route.repeated
            await reply(send, status, content_type, _ENCODER.encode(answer), request_id, extra, plain=receipt)
        took = perf_counter() - started
        name = scope["path_params"].get("name", "")
        self._office.metrics.answered(self._route.path, status)
        logs.request_line(
            request_id=request_id,
            method=self._route.method,
            route=self._route.path,
            status=status,
            milliseconds=1e3 * took,
            account=name if caller is not None and caller.sees(name) else "",
            principal="" if caller is None else caller.principal,
            key="" if caller is None else caller.key,
            error=code,
        )

    async def _problem(self, error: OdographError, caller: Caller | None, request_id: str) -> Problem:
        """Return an error as it is told; a refusal of thousands of parts is written in a thread."""
        if isinstance(error, BudgetExceeded) and isinstance(error.decision.request, Parallel):
            return await self._office.compute(self._office.problem, error, caller, request_id)
        return self._office.problem(error, caller, request_id)

    async def _admitted(self, scope: Scope, headers: dict[bytes, bytes]) -> Caller:
        value = headers.get(b"authorization", b"").decode("latin-1")
        if len(headers) < len(scope["headers"]):
            _refuse_twice(scope, b"authorization", b"idempotency-key", b"content-length", b"content-type")
        if value[: len(_BEARER)].lower() != _BEARER:
            raise NotAuthenticated("send an API key, as in: Authorization: Bearer odo_...")
        office, route = self._office, self._route
        caller = await office.admit(value[len(_BEARER) :].strip())
        wait = office.limit.take(caller.key)
        if wait:
            raise TooFast(wait)
        caller.require(route.verb)
        if route.whole:
            caller.require_whole(route.verb)
        CLIENT.set(caller.principal)
        return caller

    async def _call(self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], caller: Caller) -> Call:
        route = self._route
        key = _key(headers.get(b"idempotency-key")) if route.keyed else None
        query = None if route.query is None and not scope["query_string"] else _query(route, scope["query_string"])
        path = scope["path_params"]
        if route.upload:
            file = await self._upload(receive, headers)
            return Call(self._office, caller, path, query, None, key, file)
        if self._read is None:
            return Call(self._office, caller, path, query, None, key)
        body = await self._body(receive, headers)
        if body and not headers.get(b"content-type", b"").lower().startswith(_JSON):
            raise HttpProblem(415, "send JSON, with Content-Type: application/json")
        try:
            form = self._read(body or b"{}")
        except (msgspec.MsgspecError, RecursionError, ValueError) as problem:
            status = 422 if isinstance(problem, msgspec.ValidationError) else 400
            raise HttpProblem(status, f"the body cannot be read: {_told(problem)}; nothing was changed") from None
        if len(body) > MOST_TERMS and (terms := terms_of(form)) > MOST_TERMS:
            raise HttpProblem(
                422,
                f"one request may ask for at most {MOST_TERMS} guarantees and points of curves (got {terms}); nothing"
                " was changed. Send several requests",
            )
        return Call(self._office, caller, path, query, form, key)

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        self._check_length(headers)
        message = await receive()
        body: bytes = message.get("body", b"")
        more = message.get("more_body") or message["type"] == "http.disconnect"
        while more and len(body) <= self._largest:
            part, more = await _part(receive)
            body += part
        if len(body) > self._largest:
            raise self._too_large()
        return body

    async def _upload(self, receive: Receive, headers: dict[bytes, bytes]) -> IO[bytes]:
        self._check_length(headers)
        file = SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  the handler reads it, and then it is gone
        more, size = True, 0
        while more:
            part, more = await _part(receive)
            size += len(part)
            if size > self._largest:
                raise self._too_large()
            await self._office.run(file.write, part)
        file.seek(0)
        return file

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if len(length) > 18 or not length.isdigit() or int(length) > self._largest:
            raise self._too_large()

    def _too_large(self) -> HttpProblem:
        # What is left of the body would be taken for the next request.
        return HttpProblem(413, f"the body is larger than {self._largest} bytes", ((b"connection", b"close"),))

    async def _send_file(self, send: Send, answer: File, request_id: str) -> None:
        run, file = self._office.run, answer.content
        headers = [(b"content-type", answer.content_type), (b"x-request-id", request_id.encode()), *_SAFE]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while chunk := await run(file.read, _CHUNK):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            file.close()
        await send({"type": "http.response.body", "body": b""})


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Return a part of a body, and whether more comes; a caller who went away in the middle has asked for nothing."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise HttpProblem(400, "the body was cut off; nothing was changed")
    return message.get("body", b""), bool(message.get("more_body"))


async def reply(  # noqa: PLR0913, PLR0917  the parts of an answer
    send: Send,
    status: int,
    content_type: bytes,
    content: bytes,
    request_id: str,
    extra: Headers = (),
    *,
    plain: bool = False,
) -> None:
    """Send one answer; a plain one is without the headers for caches and browsers."""
    # The server looks at every header, and a receipt, which holds no secret and which no cache keeps, must be quick.
    headers = [
        (b"content-type", content_type),
        (b"content-length", b"%d" % len(content)),
        (b"x-request-id", request_id.encode()),
        *(() if plain else _SAFE),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """Return the caller's request id if it is a plain one, else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{_PROCESS}-{next(_NUMBERS):x}"


def headers_of(error: OdographError) -> Headers:
    """Return the headers that go with an error."""
    if isinstance(error, HttpProblem):
        return error.headers
    if isinstance(error, NotAuthenticated):
        return ((b"www-authenticate", b"Bearer"),)
    if isinstance(error, TooFast):
        return ((b"retry-after", b"%d" % max(1, math.ceil(error.seconds))),)
    if ERROR_TABLE[listed_as(error)].retryable:
        return ((b"retry-after", b"1"),)
    return ()


def _refuse_twice(scope: Scope, *names: bytes) -> None:
    """Refuse a header that comes twice: two readers could take different ones of them for true."""
    for name in names:
        if sum(one == name for one, _ in scope["headers"]) > 1:
            raise HttpProblem(400, f"the header {name.decode()} came more than once")


def _key(value: bytes | None) -> str:
    """Read an idempotency key: any text, percent-encoded where it is not plain."""
    if not value:
        raise HttpProblem(
            400, "Idempotency-Key is missing: a header with a text of your own, such as q-17, makes a retry safe"
        )
    try:
        text = value.decode("ascii")
        return unquote(text, errors="strict") if "%" in text else text
    except ValueError:
        raise HttpProblem(400, "Idempotency-Key must be ASCII, with UTF-8 percent-encoded in it") from None


def _query(route: Route, text: bytes) -> Any:  # noqa: ANN401  of the route's own type
    pairs = parse_qsl(text.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    known = () if route.query is None else route.query.__struct_fields__
    if len(given) < len(pairs) or not given.keys() <= {*known}:
        names = ", ".join(known) or "no parameters"
        raise HttpProblem(400, f"the query has something twice, or something unknown; this route takes {names}")
    if route.query is None:
        return None
    try:
        return msgspec.convert(given, route.query, strict=False)
    except msgspec.ValidationError as problem:
        raise HttpProblem(400, f"the query cannot be read: {_told(problem)}") from None


def _told(problem: Exception) -> str:
    """Say what msgspec found, and where; of other errors nothing."""
    return str(problem)[:_TOLD] if isinstance(problem, msgspec.MsgspecError) else "it is not JSON that can be read"
