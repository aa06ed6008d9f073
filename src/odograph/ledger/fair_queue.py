"""A bounded queue that serves clients round-robin; one client may use at most half of it."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, Generic, TypeVar

from odograph.errors import LedgerBusy

__all__ = ["GROUP_SIZE", "FairQueue"]

GROUP_SIZE: Final = 512  # commands in one transaction: more are hardly cheaper each, and all wait for the last

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue of at most `capacity` items. It has no lock of its own.

    An interrupt after any call in it loses no item: at worst one is both in a group and in the queue, and the count
    is wrong by one, until `remove` is called.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.count = 0
        self.clients: OrderedDict[str, deque[T]] = (
            OrderedDict()
        )  # in the order in which they are served; none is empty

    def __len__(self) -> int:
        """Return how many items are queued."""
        return self.count

    def add(self, client: str, item: T) -> None:
        """Queue an item of a client, or raise `LedgerBusy`."""
        own = self.clients.get(client)
        if self.count >= self._capacity or (own is not None and 2 * len(own) >= self._capacity):
            raise LedgerBusy(f"the queue is full: {self.count} requests are queued to be written. Try again")
        if own is None:
            self.clients[client] = deque([item])
        else:
            own.append(item)
        self.count += 1

    def take(self, group: list[T], most: int = GROUP_SIZE) -> None:
        """Fill a group round-robin: one item of each client, then another, so that no client waits for a busy one."""
        clients = self.clients
        while clients and len(group) < most:
            client, own = next(iter(clients.items()))
            group.append(own[0])  # before it is out of the queue: an interrupt must not lose it
            if len(own) == 1:
                del clients[client]
            else:
                own.popleft()
                clients.move_to_end(client)
            self.count -= 1

    def remove(self, client: str, item: T) -> None:
        """Remove an item, if it is queued, and count afresh."""
        own = self.clients.get(client)
        if own is not None and item in own:
            if len(own) == 1:
                del self.clients[client]
            else:
                own.remove(item)
        self.count = sum(map(len, self.clients.values()))

    def first(self) -> T | None:
        """Return the item that is served next."""
        return next((own[0] for own in self.clients.values()), None)
