"""Group commit: many requests, one durable transaction.

Whoever finds nobody writing becomes the writer: it takes what is waiting, carries it out in one transaction on its
own thread, and answers everyone only after the commit. What arrived meanwhile is the next group, and one of those who
wait for it becomes its writer. So a lone caller commits on its own thread, and under load a commit is shared.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Final
from weakref import WeakSet

from odograph.errors import LedgerBusy, OdographError, ServiceUnavailable
from odograph.ledger.requests import Outcome, Request
from odograph.ledger.store import Changes, State, Store

__all__ = ["GROUP", "WAITING", "Writer", "carry_out"]

GROUP: Final = 256  # requests in one transaction: more would not be cheaper each, and all of them wait for the last
WAITING: Final = 4096  # requests that may wait; one client may fill half of the places


class _Ticket:
    """A request that waits: for its outcome, or for its turn to write."""

    __slots__ = ("awake", "leads", "outcome", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outcome: Outcome | None = None
        self.leads = False
        self.awake = threading.Lock()  # held until there is something to wake up for: the cheapest event there is
        self.awake.acquire()


class Writer:
    """The one way into a store. Safe to use from many threads; one process may have one per store."""

    def __init__(self, store: Store, *, group: int = GROUP, waiting: int = WAITING) -> None:
        self._store = store
        self._group = group
        self._waiting = waiting
        self._lock = threading.Lock()
        self._busy = False
        self._count = 0
        self._clients: dict[str, deque[_Ticket]] = {}  # in the order of their turns
        _WRITERS.add(self)

    def submit(self, request: Request) -> Outcome:
        """Carry a request out durably and return its outcome; raise only what kept the store from answering."""
        with self._lock:
            if not self._busy:
                self._busy = True
                mine = None
            else:
                mine = self._enqueue(request)
        if mine is None:
            return self._lead_alone(request)
        try:
            mine.awake.acquire()
        except BaseException:  # an interrupt: a request that nobody has begun is taken back
            self._abandon(mine)
            raise
        if mine.leads:
            self._lead(mine)
        if mine.outcome is None:  # pragma: no cover  set before anyone is woken
            raise AssertionError("a request was answered with nothing")
        return mine.outcome

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._count

    def renew(self) -> None:
        """Forget what waits: this is a forked process, and another thread of its parent may have been writing."""
        self._lock = threading.Lock()
        self._busy = False
        self._count = 0
        self._clients = {}

    def _enqueue(self, request: Request) -> _Ticket:
        client = request.author.principal
        own = self._clients.get(client)
        if self._count >= self._waiting or (own is not None and 2 * len(own) >= self._waiting):
            raise LedgerBusy(
                f"{self._count} requests are waiting to be written, as many as may; nothing was charged. Try again"
            )
        ticket = _Ticket(request)
        if own is None:
            own = self._clients[client] = deque()
        own.append(ticket)
        self._count += 1
        return ticket

    def _next_group(self) -> list[_Ticket]:
        """Take turns: one request of each client, then again, so that nobody waits for a busy one's whole queue."""
        group: list[_Ticket] = []
        clients = self._clients
        while clients and len(group) < self._group:
            client = next(iter(clients))
            own = clients.pop(client)
            group.append(own.popleft())
            if own:
                clients[client] = own  # at the end of the order
        self._count -= len(group)
        return group

    def _lead_alone(self, request: Request) -> Outcome:
        try:
            outcome = carry_out(self._store, [request])[0]
        finally:
            self._hand_over()
        return outcome

    def _lead(self, mine: _Ticket) -> None:
        """Write the next group, one's own request in it: it was the first to wait."""
        with self._lock:
            group = self._next_group()
        outcomes: Sequence[Outcome] = ()
        try:
            outcomes = carry_out(self._store, [ticket.request for ticket in group])
        except OdographError as error:
            outcomes = [copy(error) for _ in group]  # raised in as many threads, each with its own traceback
        finally:
            # Without outcomes the writer itself was interrupted, and what it did or did not do is in the store.
            for ticket, outcome in zip_longest(group, outcomes):
                ticket.outcome = outcome or ServiceUnavailable(
                    f"the thread that was writing was interrupted; ask again with key {ticket.request.author.key!r}"
                )
            self._hand_over()
            for ticket in group:
                if ticket is not mine:
                    ticket.awake.release()

    def _abandon(self, mine: _Ticket) -> None:
        client = mine.request.author.principal
        with self._lock:
            own = self._clients.get(client)
            if own is None or mine not in own:
                return
            own.remove(mine)
            self._count -= 1
            if not own:
                del self._clients[client]
        if mine.leads:
            self._hand_over()

    def _hand_over(self) -> None:
        """Wake the one whose turn is next to write the next group; with nobody waiting, the place is free."""
        with self._lock:
            if not self._clients:
                self._busy = False
                return
            following = next(iter(self._clients.values()))[0]
            following.leads = True
        following.awake.release()


_WRITERS: WeakSet[Writer] = WeakSet()


def _after_fork() -> None:
    for writer in _WRITERS:
        writer.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def carry_out(store: Store, requests: Sequence[Request]) -> list[Outcome]:
    """Carry requests out in their order, in one durable transaction; what one raises is its own outcome."""
    outcomes: list[Outcome] = []

    def work(state: State) -> Changes:
        outcomes.clear()  # a store that lost a race asks again
        changes = Changes()
        for request in requests:
            try:
                outcomes.append(request.step(state, changes))
            except OdographError as error:
                outcomes.append(error)
        return changes

    wants = requests[0].wants if len(requests) == 1 else reduce(or_, [request.wants for request in requests])
    store.write(wants, work)
    return outcomes
