"""The HTTP transport of one service and one key: retries within a deadline, errors as the service raised them.

Every write carries an idempotency key or is the same when it is done twice, so trying again is safe: a lost answer is
never charged twice. If the time is over, the error says whether something may have been charged.
"""

from __future__ import annotations

import ipaddress
import json
import os
import random
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final
from urllib.parse import quote
from weakref import WeakSet

import httpx

from odograph.errors import (
    ERROR_TABLE,
    LedgerBusy,
    LedgerError,
    NotAuthenticated,
    OdographError,
    RateLimited,
    RemoteError,
    ServiceUnavailable,
)
from odograph.ledger.stores.base import closed

__all__ = ["Refusal", "Transport", "quoted"]

_ERRORS: Final = {cls.__name__: cls for cls in ERROR_TABLE}
_AGAIN: Final = (429, 502, 503, 504)
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0  # seconds between two tries
_PATIENCE: Final = 600.0  # seconds for what may take long: a policy to be solved, a ledger to be replayed
_PLAIN: Final = "!#$&'()*+,/:;=?@[]"  # beside letters and digits, as they are in a header
_CHUNK: Final = 1 << 16


class Transport:
    """The way to a service. Safe to use from many threads; a forked process has its own connections."""

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
            raise NotAuthenticated("a service needs an API key: connect(url, token=...), as its owner gave it to you")
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as problem:
            raise LedgerError(f"this is no address of a service: {problem}") from problem
        if not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
            raise LedgerError(
                f"{parsed.host or url!r} is not how a service is written: use https://host or https://host:port"
            )
        if parsed.scheme == "http" and not accept_plain_http and not _is_loopback(parsed.host):
            raise LedgerError(
                f"http://{parsed.host} is another machine, and the API key would travel in the clear; nothing was"
                f" sent. Use https://{parsed.host}, or pass accept_plain_http=True (--plain-http) if the way is safe"
            )
        self.url = str(parsed).rstrip("/")
        self._accept_plain_http = accept_plain_http
        self._timeout = timeout
        self._token = written
        self._pool = pool or _Pool(self.url)
        self._shared = pool is not None

    def under(self, token: str) -> Transport:
        """Return the same way under another key, over the same connections."""
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
    ) -> Any:  # noqa: ANN401  JSON
        """Send a request, again if need be, and return what was answered; or raise the service's error."""
        headers = self._headers()
        if key is not None:
            headers["Idempotency-Key"] = quote(key, safe=_PLAIN)
        parts: dict[str, Any] = {"method": method, "url": path, "headers": headers, "params": query}
        if form is not None:
            parts["content"] = json.dumps(form, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        try:
            return _read(self._insist(parts, _PATIENCE if patient else self._timeout))
        except ServiceUnavailable as error:
            if key is None or repr(key) in str(error):
                raise
            raise ServiceUnavailable(f"{error} (key {key!r})") from error

    def upload(self, path: str, content: Iterator[bytes]) -> Any:  # noqa: ANN401  JSON
        """Send a long body once: what is read in cannot be read in again."""
        try:
            headers = self._headers() | {"Content-Type": "application/x-ndjson"}
            response = self._pool.client.request("POST", path, content=content, headers=headers, timeout=_PATIENCE)
        except httpx.ConnectError as problem:
            busy = LedgerBusy(f"{self.url} cannot be reached; nothing was taken in")
            raise _without_tls(self.url, problem) or busy from problem
        except httpx.TransportError as problem:
            raise ServiceUnavailable(
                f"{self.url} did not answer ({type(problem).__name__}); look whether the copy is there"
            ) from problem
        if response.is_error:
            raise _error(response)
        return _read(response)

    def download(self, path: str, file: IO[str]) -> None:
        """Write a long answer to a file as it comes."""
        try:
            headers, client = self._headers(), self._pool.client
            with client.stream("GET", path, headers=headers, timeout=_PATIENCE) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                for text in response.iter_text(_CHUNK):
                    file.write(text)
        except httpx.TransportError as problem:
            busy = LedgerBusy(f"{self.url} was lost ({type(problem).__name__}); nothing was changed")
            raise _without_tls(self.url, problem) or busy from problem

    def close(self) -> None:
        """Close the connections; if they are another's, this way only."""
        if self._shared:
            self._pool = _Pool(self.url)
        self._pool.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _insist(self, parts: Mapping[str, Any], patience: float) -> httpx.Response:
        """Try until there is an answer or the time is over; what may have been carried out is told apart."""
        end = time.monotonic() + self._timeout
        pause, lost = _FIRST_WAIT, False
        while True:
            left = max(0.1, end - time.monotonic(), patience - self._timeout)
            after: float | None = None
            try:
                response = self._pool.client.request(**parts, timeout=left)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as problem:
                if not lost and (plain := _without_tls(self.url, problem)):
                    raise plain from problem
                error: OdographError = LedgerBusy(f"{self.url} cannot be reached ({_kind(problem)})")
            except httpx.DecodingError as problem:
                raise _stranger(self.url) from problem
            except httpx.TransportError as problem:
                error, lost = ServiceUnavailable(f"{self.url} did not answer ({_kind(problem)})"), True
            else:
                if response.status_code not in _AGAIN:
                    if response.is_error:
                        raise _error(response)
                    return response
                error, after = _error(response), _after(response)
                lost = lost or not isinstance(error, LedgerBusy | RateLimited)
            wait = max(after or 0.0, pause * random.uniform(0.5, 1.0))  # noqa: S311  so that not all come at once
            if time.monotonic() + wait > end:
                raise _final(error, lost=lost)
            time.sleep(wait)
            pause = min(_LONGEST_WAIT, 2.0 * pause)


class _Pool:
    """Connections to one service; made again in a forked process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pid = os.getpid()
        self._client: httpx.Client | None = None
        self._closed = False
        self.renew()
        _POOLS.add(self)

    def renew(self) -> None:
        """Make a new lock: in a forked process nobody may be left to release the old one."""
        self._lock = threading.RLock()  # a signal handler may come in between

    @property
    def client(self) -> httpx.Client:
        """The connections, made when they are first needed."""
        if self._closed:
            raise closed(self._url)
        with self._lock:
            if self._client is None or self._pid != os.getpid():
                _LEFT_ALONE.append(self._client)  # after a fork the parent still speaks through these
                self._pid = os.getpid()
                limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
                accept = {"Accept": "application/json"}
                self._client = httpx.Client(base_url=self._url, headers=accept, limits=limits)
            return self._client

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()
            self._client = None


_LEFT_ALONE: list[object] = []
_POOLS: WeakSet[_Pool] = WeakSet()


def _after_fork() -> None:
    for pool in _POOLS:
        pool.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _is_loopback(host: str) -> bool:
    """Say whether a host is this machine; a name other than localhost may lead anywhere."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def quoted(name: str) -> str:
    """Write a name into a path."""
    return quote(name, safe="")


def _read(response: httpx.Response) -> Any:  # noqa: ANN401  JSON
    try:
        form = response.json()
    except ValueError as problem:
        raise _stranger(response.url.host) from problem
    if not isinstance(form, dict) or "x-request-id" not in response.headers:  # which every answer of a service has
        raise _stranger(response.url.host)
    return form


def _stranger(where: str) -> RemoteError:
    return RemoteError(f"{where} answered with something that is no answer of a service; is it Odograph?")


def _without_tls(url: str, problem: BaseException) -> LedgerError | None:
    """Return what to say if the other side answered without TLS: trying again would not help."""
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.reason != "WRONG_VERSION_NUMBER":
        return None
    plain = url.replace("https://", "http://", 1)
    return LedgerError(f"{url} does not speak TLS; nothing was sent. Is it {plain}?")


def _error(response: httpx.Response) -> OdographError:
    """Return the error that a service told; a decision that came with it is `.form`, to be read by the caller."""
    try:
        form = response.json()
        code, detail = str(form["code"]), str(form["detail"])
    except (KeyError, TypeError, ValueError):
        kind = ServiceUnavailable if response.status_code in _AGAIN else RemoteError
        return kind(f"{response.url.host} answered {response.status_code}; is it Odograph?")
    if isinstance(form.get("decision"), dict):
        return Refusal(form["decision"])
    return _ERRORS.get(code, RemoteError)(detail)


class Refusal(OdographError):
    """A refusal as it came, before the decision was read."""

    def __init__(self, form: dict[str, Any]) -> None:
        super().__init__(str(form.get("message", "refused")))
        self.form = form


def _final(error: OdographError, *, lost: bool) -> OdographError:
    if not lost:
        return type(error)(f"{error}; nothing was charged. Try again") if "nothing was" not in str(error) else error
    return ServiceUnavailable(f"{error}; ask again with the same key to know the outcome")


def _after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() and len(text) < 6 else None


def _kind(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
