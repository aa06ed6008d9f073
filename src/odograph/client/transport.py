"""HTTP for one service and one API key: what is sent, retried and raised, and the transport that does it in threads.

`Caller.call` does no I/O. It is a generator that yields each `Attempt` and `Pause`; the driver sends back the
response or throws in what was raised. `Transport` drives such generators with httpx.Client, and `AsyncTransport`
drives the same ones in an event loop.

Every write carries an idempotency key, or has the same effect when it is repeated, so a retry never charges twice. At
the deadline, the error tells whether something may have been charged: `OutcomeUnknown` after a write that was sent
and not answered; `ServiceUnavailable` where the service could not be reached, or did not answer a read.
"""

from __future__ import annotations

import ipaddress
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import IO, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import quote

import httpx

from odograph.concurrency import leave_to_parent, renew_after_fork
from odograph.errors import (
    ERROR_TABLE,
    InvalidArgument,
    LedgerBusy,
    NotAuthenticated,
    OdographError,
    OutcomeUnknown,
    RateLimited,
    RemoteError,
    ServiceUnavailable,
)
from odograph.ledger.stores.base import closed_error

__all__ = ["CONNECTIONS", "Attempt", "Caller", "Pause", "Pool", "Refusal", "Steps", "Transport", "quoted"]

_ERRORS: Final = {cls.__name__: cls for cls in ERROR_TABLE}
_RETRIED: Final = (429, 502, 503, 504)  # HTTP statuses
_READS: Final = (
    "/calibrate",
    "/decide",
    "/how-many",
    "/largest",
    "/quote",
    "/verify",
)  # the ends of paths where a POST changes nothing
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds between two attempts
_LONG_TIMEOUT: Final = 600.0  # seconds for a long answer: a policy to be solved, a ledger to be replayed
_UNQUOTED: Final = "!#$&'()*+,/:;=?@[]"  # in a header, besides letters and digits
CONNECTIONS: Final = 64  # at the same time
_CHUNK: Final = 1 << 16  # characters written at a time


_T = TypeVar("_T")
_C = TypeVar("_C", httpx.Client, httpx.AsyncClient)


class Attempt(NamedTuple):
    """One request to be sent now; the driver sends back its `httpx.Response`, or throws in what was raised."""

    method: str
    url: str
    headers: dict[str, str]
    params: Mapping[str, Any] | None
    content: bytes | None
    timeout: float  # seconds


class Pause(NamedTuple):
    """Seconds to sleep until the next attempt; the driver sends back None."""

    seconds: float


# What a verb does: attempts and pauses, and its result at the end.
Steps: TypeAlias = Generator[Attempt | Pause, httpx.Response | None, _T]


class Caller:
    """One API key at one service: makes the steps of a request, with its retries until the timeout."""

    def __init__(self, url: str, token: str | None, timeout: float, *, accept_plain_http: bool = False) -> None:
        written = token.strip() if isinstance(token, str) else ""
        if not written or not written.isascii() or not written.isprintable():
            raise NotAuthenticated(
                "token must be an API key of the service: connect(url, token=...). An owner makes one with `odograph"
                " keys make`"
            )
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as problem:
            raise InvalidArgument(f"url must be the address of a service: {problem}") from problem
        if not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
            raise InvalidArgument(f"url must be https://host or https://host:port (got {parsed.host or url!r})")
        if parsed.scheme == "http" and not accept_plain_http and not _is_loopback(parsed.host):
            raise InvalidArgument(
                f"url must begin with https:// for another machine (got http://{parsed.host}): the API key would be"
                " sent in the clear. Pass accept_plain_http=True (--plain-http) if the network is trusted"
            )
        self.url = str(parsed).rstrip("/")
        self._accept_plain_http = accept_plain_http
        self._timeout = timeout
        self._token = written

    def under(self, token: str) -> Caller:
        """Return the caller with another API key."""
        return Caller(self.url, token, self._timeout, accept_plain_http=self._accept_plain_http)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self._token}"}

    def call(  # noqa: PLR0913  the parts of a request
        self,
        method: str,
        path: str,
        form: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        query: Mapping[str, Any] | None = None,
        patient: bool = False,
        parquet: bytes | None = None,
    ) -> Steps[Any]:  # JSON
        """Send a request, with retries, and return the answer, or raise the service's error.

        The body is a form as JSON, or a Parquet file. A `patient` call waits up to ten minutes for its answer. What
        interrupts a write (a canceled task, Ctrl-C) gets a note that says how to learn its outcome.
        """
        headers = self.headers
        if key is not None:
            headers["Idempotency-Key"] = quote(key, safe=_UNQUOTED)
        content = parquet
        if form is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(form, allow_nan=False).encode()
        elif parquet is not None:
            headers["Content-Type"] = "application/vnd.apache.parquet"
        attempt = Attempt(method, path, headers, query, content, _LONG_TIMEOUT if patient else self._timeout)
        try:
            return _read((yield from self._send(attempt)))
        except OutcomeUnknown as error:
            if key is None or error.key:
                raise
            # A message of the service may name the key already.
            raise OutcomeUnknown(
                error.message.removesuffix(f" (key {key!r})"), key=key, charged=error.charged
            ) from error
        except BaseException as problem:
            if not isinstance(problem, Exception | GeneratorExit) and _is_write(attempt):
                problem.add_note(_interrupted(attempt, key))
            raise

    def _send(self, attempt: Attempt) -> Steps[httpx.Response]:
        """Try until there is an answer or the time is over."""
        end = time.monotonic() + self._timeout
        pause, lost = _FIRST_WAIT, False  # whether an attempt may have been carried out without an answer
        while True:
            left = max(0.1, end - time.monotonic(), attempt.timeout - self._timeout)
            after: float | None = None
            try:
                response = yield attempt._replace(timeout=left)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as problem:
                if not lost and (plain := _no_tls_error(self.url, problem)):
                    raise plain from problem
                error: OdographError = _unreachable(self.url, problem)
            except httpx.DecodingError as problem:
                raise _stranger(self.url) from problem
            except httpx.TransportError as problem:
                error, lost = ServiceUnavailable(f"{self.url} did not answer ({_describe(problem)}); try again"), True
            else:
                assert response is not None  # noqa: S101  the driver's promise
                if response.status_code not in _RETRIED:
                    if response.is_error:
                        raise _error(response)
                    return response
                error, after = _error(response), _retry_after(response)
                lost = lost or not isinstance(error, LedgerBusy | RateLimited)
            wait = max(after or 0.0, pause * random.uniform(0.5, 1.0))  # noqa: S311  so that clients do not retry at once
            if time.monotonic() + wait > end:
                raise _outcome_unknown(error, attempt) if lost and _is_write(attempt) else error
            yield Pause(wait)
            pause = min(_LONGEST_WAIT, 2.0 * pause)


class Transport:
    """The requests of one caller. Safe to use from many threads; a forked process makes its own connections."""

    def __init__(self, caller: Caller, pool: Pool[httpx.Client] | None = None) -> None:
        self.caller = caller
        self._pool = pool or Pool(caller.url, httpx.Client)
        self._shared = pool is not None

    def under(self, caller: Caller) -> Transport:
        """Return a transport for another caller over the same connections."""
        return Transport(caller, self._pool)

    def run(self, steps: Steps[_T]) -> _T:
        """Carry out the steps of a verb and return its result."""
        try:
            step = next(steps)
            while True:
                try:
                    done = self._carry_out(step)
                except BaseException as problem:  # noqa: BLE001  the steps raise it again, or another
                    step = steps.throw(problem)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: _T = end.value
            return result

    def _carry_out(self, step: Attempt | Pause) -> httpx.Response | None:
        if isinstance(step, Attempt):
            return self._pool.client.request(**step._asdict())
        time.sleep(step.seconds)
        return None

    def call(self, method: str, path: str, form: Mapping[str, Any] | None = None, **options: Any) -> Any:  # noqa: ANN401  JSON
        """Carry out `Caller.call`."""
        return self.run(self.caller.call(method, path, form, **options))

    def upload(self, path: str, content: Iterator[bytes]) -> Any:  # noqa: ANN401  JSON
        """Send a long body, once: the iterator cannot be read again."""
        try:
            headers = self.caller.headers | {"Content-Type": "application/x-ndjson"}
            response = self._pool.client.request(
                "POST", path, content=content, headers=headers, timeout=_LONG_TIMEOUT
            )
        except httpx.ConnectError as problem:
            raise _no_tls_error(self.caller.url, problem) or _unreachable(self.caller.url, problem) from problem
        except httpx.TransportError as problem:
            raise OutcomeUnknown(
                f"{self.caller.url} did not answer ({_describe(problem)}); list its accounts to know the outcome"
            ) from problem
        if response.is_error:
            raise _error(response)
        return _read(response)

    def download(self, path: str, file: IO[str]) -> None:
        """Write a long answer to a file as it arrives."""
        try:
            headers, client = self.caller.headers, self._pool.client
            with client.stream("GET", path, headers=headers, timeout=_LONG_TIMEOUT) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                for text in response.iter_text(_CHUNK):
                    file.write(text)
        except httpx.TransportError as problem:
            lost = ServiceUnavailable(
                f"the connection to {self.caller.url} was lost ({_describe(problem)}); try again"
            )
            raise _no_tls_error(self.caller.url, problem) or lost from problem

    def close(self) -> None:
        """Close the connections, unless another transport shares them; this one cannot be used any more."""
        if self._shared:
            self._pool = Pool(self.caller.url, httpx.Client)
        client = self._pool.retire()
        if client is not None:
            client.close()


class Pool(Generic[_C]):
    """Connections to one service, opened when they are first needed."""

    def __init__(self, url: str, kind: Callable[..., _C]) -> None:
        self._url = url
        self._kind: Callable[..., _C] = kind
        self._client: _C | None = None
        self._closed = False
        self._lock = threading.RLock()  # re-entrant for a signal handler
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start anew: the parent process still uses these connections."""
        leave_to_parent(self._client)
        self._client = None
        self._lock = threading.RLock()

    @property
    def client(self) -> _C:
        """The connections."""
        if self._closed:
            raise closed_error(self._url)
        with self._lock:
            if self._client is None:
                limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=16)
                accept = {"Accept": "application/json"}
                self._client = self._kind(base_url=self._url, headers=accept, limits=limits)
            return self._client

    def retire(self) -> _C | None:
        """Make no more connections, and return the open ones, which the caller closes."""
        self._closed = True
        with self._lock:
            client, self._client = self._client, None
        return client


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine; a name other than localhost may lead anywhere."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def quoted(name: str) -> str:
    """Return a name in the form that a URL's path takes."""
    return quote(name, safe="")


def _read(response: httpx.Response) -> Any:  # noqa: ANN401  JSON
    try:
        form = response.json()
    except ValueError as problem:
        raise _stranger(response.url.host) from problem
    if not isinstance(form, dict) or "x-request-id" not in response.headers:  # as in every answer of a service
        raise _stranger(response.url.host)
    return form


def _stranger(where: str) -> RemoteError:
    return RemoteError(f"{where} answered with something that a service does not answer; is it Odograph?")


def _no_tls_error(url: str, problem: BaseException) -> InvalidArgument | None:
    """Return the error for a service that does not speak TLS, where a retry would not help; otherwise None."""
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.reason != "WRONG_VERSION_NUMBER":
        return None
    plain = url.replace("https://", "http://", 1)
    return InvalidArgument(
        f"url must be that of a service with TLS (got {url}, which does not speak it). Is it {plain}?"
    )


def _unreachable(url: str, problem: Exception) -> ServiceUnavailable:
    if isinstance(problem, httpx.PoolTimeout):
        return ServiceUnavailable(
            f"{url} was not asked, because all {CONNECTIONS} connections were in use; nothing was sent. Try again,"
            " with fewer requests at a time"
        )
    return ServiceUnavailable(f"{url} cannot be reached ({_describe(problem)}); nothing was sent. Try again")


def _error(response: httpx.Response) -> OdographError:
    """Return the error that a service answered; a decision that came with it is in `.form`, not yet read."""
    try:
        form = response.json()
        code, detail = str(form["code"]), str(form["detail"])
    except (KeyError, TypeError, ValueError):
        kind = ServiceUnavailable if response.status_code in _RETRIED else RemoteError
        return kind(f"{response.url.host} answered {response.status_code}; is it Odograph?")
    if isinstance(form.get("decision"), dict):
        return Refusal(form["decision"])
    return _ERRORS.get(code, RemoteError)(detail)


class Refusal(OdographError):
    """A refusal as the service sent it, before its decision is read."""

    def __init__(self, form: dict[str, Any]) -> None:
        super().__init__(str(form.get("message", "refused")))
        self.form = form


def _is_write(attempt: Attempt) -> bool:
    return attempt.method != "GET" and not attempt.url.endswith(_READS)


def _interrupted(attempt: Attempt, key: str | None) -> str:
    """Return the note on what interrupted a write: it may have been carried out."""
    again = "again" if key is None else f"again with key={key!r}"
    return (
        f"odograph: {attempt.method} {attempt.url} was interrupted and may have been carried out; ask {again} to know"
        " the outcome, which charges nothing twice"
    )


def _outcome_unknown(error: OdographError, attempt: Attempt) -> OutcomeUnknown:
    """Return the error for a write that may have been carried out, from that of its last attempt."""
    if isinstance(error, OutcomeUnknown):
        return error
    last = str(error).partition("; try again")[0].partition("; nothing was sent")[0]
    again = "ask again with the same key" if "Idempotency-Key" in attempt.headers else "ask again"
    return OutcomeUnknown(f"{last}; {again} to know the outcome")


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _describe(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
