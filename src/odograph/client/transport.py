"""The HTTP transport for one service and one API key: retries until a deadline, and raises the service's errors.

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
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final
from urllib.parse import quote

import httpx

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
from odograph.reentrancy import leave_to_parent, renew_after_fork

__all__ = ["Refusal", "Transport", "quoted"]

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
_CHUNK: Final = 1 << 16  # characters written at a time


class Transport:
    """A client of one service. Safe to use from many threads; a forked process makes its own connections."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float,
        pool: _Pool | None = None,
        *,
        accept_plain_http: bool = False,
    ) -> None:
        written = token.strip() if isinstance(token, str) else ""
        if not written or not written.isascii() or not written.isprintable():
            raise NotAuthenticated("token must be an API key of the service: connect(url, token=...)")
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
        self._pool = pool or _Pool(self.url)
        self._shared = pool is not None

    def under(self, token: str) -> Transport:
        """Return a transport with another API key over the same connections."""
        return Transport(self.url, token, self._timeout, self._pool, accept_plain_http=self._accept_plain_http)

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
    ) -> Any:  # noqa: ANN401  JSON
        """Send a request, with retries, and return the answer, or raise the service's error.

        The body is a form as JSON, or a Parquet file. A `patient` call waits up to ten minutes for its answer.
        """
        headers = self._headers()
        if key is not None:
            headers["Idempotency-Key"] = quote(key, safe=_UNQUOTED)
        parts: dict[str, Any] = {"method": method, "url": path, "headers": headers, "params": query}
        if form is not None:
            parts["content"] = json.dumps(form, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        elif parquet is not None:
            parts["content"] = parquet
            headers["Content-Type"] = "application/vnd.apache.parquet"
        try:
            return _read(self._send(parts, _LONG_TIMEOUT if patient else self._timeout))
        except OutcomeUnknown as error:
            if key is None or error.key:
                raise
            # A message of the service may name the key already.
            raise OutcomeUnknown(
                error.message.removesuffix(f" (key {key!r})"), key=key, charged=error.charged
            ) from error

    def upload(self, path: str, content: Iterator[bytes]) -> Any:  # noqa: ANN401  JSON
        """Send a long body, once: the iterator cannot be read again."""
        try:
            headers = self._headers() | {"Content-Type": "application/x-ndjson"}
            response = self._pool.client.request(
                "POST", path, content=content, headers=headers, timeout=_LONG_TIMEOUT
            )
        except httpx.ConnectError as problem:
            raise _no_tls_error(self.url, problem) or _unreachable(self.url, problem) from problem
        except httpx.TransportError as problem:
            raise OutcomeUnknown(
                f"{self.url} did not answer ({_describe(problem)}); list its accounts to know the outcome"
            ) from problem
        if response.is_error:
            raise _error(response)
        return _read(response)

    def download(self, path: str, file: IO[str]) -> None:
        """Write a long answer to a file as it arrives."""
        try:
            headers, client = self._headers(), self._pool.client
            with client.stream("GET", path, headers=headers, timeout=_LONG_TIMEOUT) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                for text in response.iter_text(_CHUNK):
                    file.write(text)
        except httpx.TransportError as problem:
            lost = ServiceUnavailable(f"the connection to {self.url} was lost ({_describe(problem)}); try again")
            raise _no_tls_error(self.url, problem) or lost from problem

    def close(self) -> None:
        """Close the connections, unless another transport shares them; this one cannot be used any more."""
        if self._shared:
            self._pool = _Pool(self.url)
        self._pool.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _send(self, parts: Mapping[str, Any], answer_timeout: float) -> httpx.Response:
        """Try until there is an answer or the time is over."""
        end = time.monotonic() + self._timeout
        pause, lost = _FIRST_WAIT, False  # whether an attempt may have been carried out without an answer
        while True:
            left = max(0.1, end - time.monotonic(), answer_timeout - self._timeout)
            after: float | None = None
            try:
                response = self._pool.client.request(**parts, timeout=left)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as problem:
                if not lost and (plain := _no_tls_error(self.url, problem)):
                    raise plain from problem
                error: OdographError = _unreachable(self.url, problem)
            except httpx.DecodingError as problem:
                raise _stranger(self.url) from problem
            except httpx.TransportError as problem:
                error, lost = ServiceUnavailable(f"{self.url} did not answer ({_describe(problem)}); try again"), True
            else:
                if response.status_code not in _RETRIED:
                    if response.is_error:
                        raise _error(response)
                    return response
                error, after = _error(response), _retry_after(response)
                lost = lost or not isinstance(error, LedgerBusy | RateLimited)
            wait = max(after or 0.0, pause * random.uniform(0.5, 1.0))  # noqa: S311  so that clients do not retry at once
            if time.monotonic() + wait > end:
                raise _outcome_unknown(error, parts) if lost and _is_write(parts) else error
            time.sleep(wait)
            pause = min(_LONGEST_WAIT, 2.0 * pause)


class _Pool:
    """Connections to one service, opened when they are first needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.Client | None = None
        self._closed = False
        self._lock = threading.RLock()  # re-entrant for a signal handler
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Start anew: the parent process still uses these connections."""
        leave_to_parent(self._client)
        self._client = None
        self._lock = threading.RLock()

    @property
    def client(self) -> httpx.Client:
        """The connections."""
        if self._closed:
            raise closed_error(self._url)
        with self._lock:
            if self._client is None:
                limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
                accept = {"Accept": "application/json"}
                self._client = httpx.Client(base_url=self._url, headers=accept, limits=limits)
            return self._client

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None


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


def _is_write(parts: Mapping[str, Any]) -> bool:
    return parts["method"] != "GET" and not parts["url"].endswith(_READS)


def _outcome_unknown(error: OdographError, parts: Mapping[str, Any]) -> OutcomeUnknown:
    """Return the error for a write that may have been carried out, from that of its last attempt."""
    if isinstance(error, OutcomeUnknown):
        return error
    last = str(error).removesuffix("; try again").removesuffix("; nothing was sent. Try again")
    again = "ask again with the same key" if "Idempotency-Key" in parts["headers"] else "ask again"
    return OutcomeUnknown(f"{last}; {again} to know the outcome")


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _describe(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
