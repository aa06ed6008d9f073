"""HTTP as uvicorn speaks it, with an end to the head of a request."""

from __future__ import annotations

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Http"]

_LONGEST_HEAD: Final = 1 << 16  # bytes


class Http(HttpToolsProtocol):
    """Refuses a head that does not end: it would be kept, and read again and again, without anybody having a key."""

    _head = 0

    def data_received(self, data: bytes) -> None:
        """Read what came, and end the connection if the head is too long."""
        super().data_received(data)
        if self.cycle is not None and self.cycle.scope is self.scope:  # the head is complete
            self._head = 0
            return
        self._head += len(data)
        if self._head > _LONGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")
