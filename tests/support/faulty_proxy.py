"""A proxy between a client and a service that loses, delays, cuts or replaces answers."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, TypeAlias

GARBAGE: Final = b"<html><h1>Bad Gateway</h1>"

# A fault of one request: it gets a function that forwards the request, and returns what the client receives.
Fault: TypeAlias = Callable[[Callable[[], bytes]], bytes]


class Proxy:
    """Forwards requests to a service; each fault applies to one request, and after the last one none fails."""

    def __init__(self, port: int) -> None:
        self.faults: list[Fault] = []
        self.keys: list[str] = []  # of the requests that came by
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        for thread in self._threads:
            thread.join()

    def up(self) -> None:
        """Take connections."""
        if self._listener.fileno() < 0:
            self._listener = socket.create_server(("127.0.0.1", self._port))
        self._threads.append(threading.Thread(target=self._accept, args=(self._listener,)))
        self._threads[-1].start()

    def down(self) -> None:
        """Refuse connections."""
        with suppress(OSError):  # it may be down already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # it was closed
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        """Carry one request to the service and an answer back; then the connection is over."""
        with client, suppress(OSError):  # the client may have given up
            head, _, body = _until(client, b"", b"\r\n\r\n").partition(b"\r\n\r\n")
            size = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
            while len(body) < (int(size[1]) if size else 0):
                body += client.recv(1 << 16)
            if found := re.search(rb"(?i)\r\nidempotency-key: (\S+)", head):
                self.keys.append(found[1].decode())

            def forward() -> bytes:
                with socket.create_connection(self._server) as server:
                    kept = re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head)
                    server.sendall(kept + b"\r\nConnection: close\r\n\r\n" + body)
                    return _until(server, b"", None)

            client.sendall(self.faults.pop(0)(forward) if self.faults else forward())


def _until(source: socket.socket, data: bytes, end: bytes | None) -> bytes:
    while end is None or end not in data:
        part = source.recv(1 << 16)
        if not part:
            break
        data += part
    return data


def lost(forward: Callable[[], bytes]) -> bytes:
    """The request was carried out, and its answer is lost."""
    forward()
    return b""


def unsent(_: Callable[[], bytes]) -> bytes:
    """The request never arrived."""
    return b""


def cut(size: int) -> Fault:
    """The request was carried out, and only the first bytes of the answer arrive."""
    return lambda forward: forward()[:size]


def slow(seconds: float) -> Fault:
    """The request was carried out, and the answer comes late."""

    def wait(forward: Callable[[], bytes]) -> bytes:
        answer = forward()
        time.sleep(seconds)
        return answer

    return wait


def says(status: int, content: bytes = GARBAGE, headers: str = "", *, carried_out: bool = False) -> Fault:
    """A server in between answers; the request was carried out or never arrived."""

    def answer(forward: Callable[[], bytes]) -> bytes:
        if carried_out:
            forward()
        return f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content

    return answer
