"""Those who wait to be written, client by client: everybody has a turn, and nobody can fill the queue alone."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

from odograph.errors import LedgerBusy

__all__ = ["GROUP", "FairQueue"]

GROUP: Final = 512  # requests in one transaction: more are hardly cheaper each, and all of them wait for the last

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of at most `places`, of which one client may fill half. Whoever shares it between threads locks it.

    An interrupt after any call in it loses nobody: at worst somebody is both in a group and in the queue, and the
    count is wrong by one, until `remove` is called.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._count = 0
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()  # in the order of their turns, and none is empty

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
            self._clients[client] = deque([one])
        else:
            own.append(one)
        self._count += 1

    def take(self, group: list[T], most: int = GROUP) -> None:
        """Fill a group by turns: one of each client, and again, so that nobody waits for a busy one's whole queue."""
        clients = self._clients
        while clients and len(group) < most:
            client, own = next(iter(clients.items()))
            group.append(own[0])  # before it is out of the queue: an interrupt may not lose it
            if len(own) == 1:
                del clients[client]
            else:
                own.popleft()
                clients.move_to_end(client)
            self._count -= 1

    def remove(self, client: str, one: T) -> None:
        """Let one wait no more, if it does, and count afresh."""
        own = self._clients.get(client)
        if own is not None and one in own:
            if len(own) == 1:
                del self._clients[client]
            else:
                own.remove(one)
        self._count = sum(map(len, self._clients.values()))

    def first(self) -> T | None:
        """Return the one whose turn is next."""
        return next((own[0] for own in self._clients.values()), None)
