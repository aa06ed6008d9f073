"""A real service for tests: uvicorn in a thread of this process, on a free port of the loopback interface."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial
from types import TracebackType
from typing import Self

import uvicorn

from odograph.connection import store_at
from odograph.service.key_store import connect_keys
from odograph.service.server import App, HttpProtocol
from odograph.service.settings import Settings
from odograph.service.writer import Wait, serve_worker


async def start_thread(settings: Settings, its_end: socket.socket) -> Wait:
    """Start the writer in a thread of this process, which is faster to start than a process."""
    store = store_at(settings.url, timeout=settings.timeout, accept_fsync_off=settings.accept_fsync_off)
    thread = threading.Thread(target=serve_worker, args=(its_end.dup(), store), daemon=True)
    thread.start()
    return partial(asyncio.to_thread, thread.join)


class ServiceThread:
    """The service in a thread of this process, reached over its socket."""

    def __init__(self, url: str, **settings: object) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        port = self._socket.getsockname()[1]
        chosen: dict[str, object] = {"rate": 0.0, "accept_fsync_off": True, "log_level": "critical"} | settings
        self.settings = Settings(url=url, port=port, **chosen)  # type: ignore[arg-type]
        self.url = f"http://127.0.0.1:{port}"
        config = uvicorn.Config(
            App(self.settings, start_thread),
            loop="uvloop",
            http=HttpProtocol,
            interface="asgi3",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def token(self, principal: str = "ana", role: str = "owner", *accounts: str, **options: object) -> str:
        """Create an API key and return its token."""
        options.setdefault("every_account", role != "owner" and not accounts)
        with connect_keys(self.settings.url, accept_fsync_off=True) as keys:
            return keys.make(principal, role, accounts=accounts, made_by="test", **options)[0]  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._thread.start()
        end = time.monotonic() + 20
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError("the service did not start")
            time.sleep(0.002)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=30)
        self._socket.close()
