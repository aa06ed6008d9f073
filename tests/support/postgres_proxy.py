"""A proxy that cuts the connection to a PostgreSQL server at a chosen moment of a transaction.

The proxy passes everything on. When `cut` is set, it looks for the first trip of a transaction or for its COMMIT on
the way to the server, or for the answer to the COMMIT on the way back, and ends the connection there.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

FIRST_TRIP, COMMIT, ANSWER, AFTER = "first trip", "commit", "answer", "after"


class Proxy:
    """Listens on a port of its own; `cut` says where the next commit is cut off, and is empty again once it was."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        user = parts.netloc.rpartition("@")[0]
        self.url = parts._replace(netloc=f"{user}@127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        self.cut = ""

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            _end(end)
        for thread in self._threads:
            thread.join()

    def wait(self) -> None:
        """Wait until the connection was cut."""
        deadline = time.monotonic() + 60
        while self.cut:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for source, target, upward in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._pass_on, args=(source, target), kwargs={"upward": upward})
                self._threads.append(thread)
                thread.start()

    def _found(self, data: bytes, *, upward: bool) -> bool:
        """Return whether the moment has come: a query follows a zero byte, and a completed command precedes one."""
        if self.cut == FIRST_TRIP:
            return upward and b"synchronous_commit" in data
        if self.cut == COMMIT:
            return upward and b"\0COMMIT" in data
        return self.cut in (ANSWER, AFTER) and not upward and b"COMMIT\0" in data

    def _pass_on(self, source: socket.socket, target: socket.socket, *, upward: bool) -> None:
        cut = ""
        with suppress(OSError):  # the other direction may have ended it
            while not cut and (data := source.recv(1 << 20)):
                cut = self.cut if self._found(data, upward=upward) else ""
                if cut in ("", AFTER):
                    target.sendall(data)
        for end in (source, target):
            _end(end)
        if cut:
            self.cut = ""


def _end(end: socket.socket) -> None:
    with suppress(OSError):  # it may have ended already
        end.shutdown(socket.SHUT_RDWR)
    end.close()
