"""Those who wait to be written, client by client: everybody has a turn, and nobody can fill the queue alone."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

from odograph.errors import LedgerBusy

__all__ = ["GROUP", "Waiting"]

GROUP: Final = 512  # requests in one transaction: more are hardly cheaper each, and all of them wait for the last

T = TypeVar("T")


class Waiting(Generic[T]):
    """A queue of at most `places`, of which one client may fill half. Whoever shares it between threads locks it."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._count = 0
        self._clients: dict[str, deque[T]] = {}  # in the order of their turns

    def __len__(self) -> int:
        """Return how many wait."""
        return self._count

    def __bool__(self) -> bool:
        """Say whether anybody waits; not by the count, as an interrupt may come between the two."""
        return bool(self._clients)

    def add(self, client: str, one: T) -> None:
        """Let one more wait, or raise `LedgerBusy`."""
        own = self._clients.get(client)
        if self._count >= self._places or (own is not None and 2 * len(own) >= self._places):
            raise LedgerBusy(
                f"{self._count} requests are waiting to be written, as many as may; nothing was charged. Try again"
            )
        if own is None:
            own = self._clients[client] = deque()
        own.append(one)
        self._count += 1

    def take(self, group: list[T], most: int = GROUP) -> None:
        """Fill a group by turns: one of each client, and again, so that nobody waits for a busy one's whole queue."""
        clients = self._clients
        while clients and len(group) < most:
            client, own = next(iter(clients.items()))
            if own:
                group.append(own[0])  # before it is out of the queue: an interrupt may not lose it
                own.popleft()
                self._count -= 1
            del clients[client]
            if own:
                clients[client] = own  # at the end of the order

    def remove(self, client: str, one: T) -> None:
        """Let one wait no more, if it does; count afresh, as an interrupt may come between a queue and the count."""
        own = self._clients.get(client)
        if own is not None and one in own:
            own.remove(one)
            if not own:
                del self._clients[client]
        self._count = sum(map(len, self._clients.values()))

    def first(self) -> T | None:
        """Return the one whose turn is next."""
        return next((own[0] for own in self._clients.values() if own), None)
