"""HTTP as uvicorn speaks it, with an end to everything that a stranger can begin: heads, bodies, connections."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Connections", "Http"]

_LONGEST_HEAD: Final = 1 << 16  # bytes
_SLOWEST: Final = 1 << 16  # bytes of a body in a second: a long one has as many seconds more
_PLAIN: Final = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"


class Connections:
    """The connections of one worker: how many there may be, of one address too, and which of them may be closed.

    Those may that have sent no complete head: new ones, slow ones, and those between two requests. If there are too
    many connections the one that has waited longest of them is closed, and the new one is refused if there is none.
    """

    def __init__(self, most: int, most_of_address: int, timeout: float) -> None:
        self.timeout = timeout  # seconds in which a request must have arrived
        self._most = most
        self._most_of_address = most_of_address  # 0 for any number
        self._addresses: Counter[str] = Counter()
        self._count = 0
        self._waiting: dict[Http, None] = {}  # in the order in which they began to wait

    def admit(self, connection: Http) -> bool:
        """Count a new connection, and say whether there is room for it."""
        address = connection.address
        own = 0 < self._most_of_address <= self._addresses[address]
        if own or self._count >= self._most:
            oldest = next((one for one in self._waiting if not own or one.address == address), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.drop()
        self._addresses[address] += 1
        self._count += 1
        self._waiting[connection] = None
        return True

    def wait(self, connection: Http) -> None:
        """Hear that a connection waits for its next request."""
        if connection.admitted:
            self._waiting[connection] = None

    def begin(self, connection: Http) -> None:
        """Hear that the head of a request is complete."""
        self._waiting.pop(connection, None)

    def leave(self, connection: Http) -> None:
        """Forget a connection that is closed."""
        if not connection.admitted:
            return
        connection.admitted = False
        self._waiting.pop(connection, None)
        self._count -= 1
        self._addresses[connection.address] -= 1
        if not self._addresses[connection.address]:
            del self._addresses[connection.address]


class Http(HttpToolsProtocol):
    """Ends a connection whose request does not arrive in time, or whose head is too long: nobody has shown a key."""

    admitted = False
    address = ""
    _head = 0  # bytes of a head that is not complete
    _body = 0  # bytes of a body
    _in_head = _in_body = False
    _since = 0.0  # when the head or body began
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let a connection in, or tell it that there are too many."""
        self._limits: Connections = self.app.connections
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.admitted = self._limits.admit(self)
        if self.admitted:
            self._watch()
        else:
            self.connections.discard(self)  # uvicorn counts them too, and refuses requests of others then
            self._refuse(b"503 Service Unavailable", b"There are too many connections.", b"retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._limits.leave(self)
        self._unwatch()
        super().connection_lost(exc)

    def drop(self) -> None:
        """End the connection at once: another needs its place."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read what came, and end the connection if the head is too long."""
        if not self.admitted:
            return
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._in_body and (self._in_head or not self._answering()):  # also before the first byte of a head
            self._head += len(data)
            if self._head > _LONGEST_HEAD:
                self.send_400_response("The head of the request is too long.")
                return
        elif not self._in_body:
            self._unwatch()
            return
        if self._deadline is None:
            self._watch()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """End a head and begin a body."""
        self._in_head, self._in_body, self._head, self._body = False, True, 0, 0
        self._limits.begin(self)
        self._unwatch()  # the body has its own time
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count what comes of a body."""
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if not self.pipeline:
            self._limits.wait(self)

    def _watch(self) -> None:
        """Begin to wait for a head or body."""
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(self._limits.timeout, self._look)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look(self) -> None:
        """End the connection, unless a long body comes at a fair speed, or it is the service that is slow."""
        self._deadline = None
        if self.transport.is_closing():
            return
        left = self._since + self._limits.timeout + self._body / _SLOWEST - self.loop.time()
        if self.flow.read_paused or (self._in_head and self._answering()):
            left = self._limits.timeout
        if left > 0:
            self._deadline = self.loop.call_later(left, self._look)
            return
        if self._in_body and not self._answering():  # it was answered before it was read
            self.transport.close()
            return
        if self._answering():
            self.cycle.disconnected = True  # whoever waits for the body is told that it was cut off
            self.cycle.message_event.set()
        self._refuse(b"408 Request Timeout", b"The request did not arrive in time.")

    def _refuse(self, status: bytes, text: bytes, headers: bytes = b"") -> None:
        size = b"content-length: %d\r\n" % len(text)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + headers + size + _PLAIN + b"\r\n" + text)
        self.transport.close()
