"""Group commit: many requests, one durable transaction.

Whoever finds nobody writing becomes the writer: it takes what is waiting, carries it out in one transaction on its
own thread, and answers everyone only after the commit. What arrived meanwhile is the next group, and one of those who
wait for it becomes its writer. So a lone caller commits on its own thread, and under load a commit is shared.

Who cannot wait, such as an event loop, posts a request instead and is called back; a thread of the writer's leads for
all of those.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, TypeAlias
from weakref import WeakSet

from odograph.errors import LedgerBusy, OdographError, ServiceUnavailable
from odograph.ledger.requests import Outcome, Request
from odograph.ledger.store import Changes, State, Store, together

__all__ = ["GROUP", "WAITING", "Writer", "carry_out"]

GROUP: Final = 256  # requests in one transaction: more would not be cheaper each, and all of them wait for the last
WAITING: Final = 16384  # requests that may wait; one client may fill half of the places
_GLANCE: Final = 0.5  # seconds until one who waits looks for itself: whoever was to wake it may have been interrupted


# Told of every transaction: how long it took, and how many requests were in it.
Watch: TypeAlias = Callable[[float, int], None]


# Called with the outcomes of what was posted.
Done: TypeAlias = Callable[[Sequence[Outcome]], None]


class _Ticket:
    """Requests of one client that wait: for their outcomes, or for their turn to write."""

    __slots__ = ("awake", "done", "outcomes", "requests")

    def __init__(
        self, requests: Sequence[Request], awake: threading.Lock | threading.Semaphore, done: Done | None
    ) -> None:
        self.requests = requests
        self.outcomes: Sequence[Outcome] = ()
        self.awake = awake  # released when there is something to wake up for
        self.done = done  # of one who does not wait


class Writer:
    """The one way into a store. Safe to use from many threads; one process may have one per store."""

    _leader: _Ticket | None
    _writing: list[_Ticket]  # the leader's group
    _clients: dict[str, deque[_Ticket]]  # in the order of their turns
    _thread: threading.Thread | None  # that leads for those who do not wait

    def __init__(
        self, store: Store, *, group: int = GROUP, waiting: int = WAITING, watch: Watch | None = None
    ) -> None:
        self._store = store
        self._group = group
        self._waiting = waiting
        self._watch = watch
        self.renew()
        _WRITERS.add(self)

    def submit(self, request: Request) -> Outcome:
        """Carry a request out durably and return its outcome; raise only what interrupts the caller."""
        awake = threading.Lock()  # held until there is something to wake up for: the cheapest event there is
        awake.acquire()
        mine = _Ticket((request,), awake, None)
        try:
            with self._lock:
                if self._leader is None:
                    self._leader, self._writing = mine, [mine]
                else:
                    self._enqueue(mine)
            while not mine.outcomes:
                if self._leader is mine:
                    self._lead()
                    self._leave(mine)
                else:
                    mine.awake.acquire(timeout=_GLANCE)
        except BaseException:  # an interrupt, at any moment: what this thread had to do for others is done
            self._leave(mine)
            raise
        return mine.outcomes[0]

    def post(self, requests: Sequence[Request], done: Done) -> None:
        """Carry requests of one principal out durably on the writer's own thread, and call `done` there.

        They are in one transaction, so they should not be many; raise `LedgerBusy` if they cannot wait.
        """
        mine = _Ticket(requests, self._called, done)
        with self._lock:
            if self._thread is None:  # also while somebody leads who will hand over to this one
                self._thread = threading.Thread(target=self._lead_for_others, name="odograph-writer", daemon=True)
                self._thread.start()
            if self._leader is not None:
                self._enqueue(mine)
                return
            self._leader, self._writing = mine, [mine]
        mine.awake.release()

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._count

    def renew(self) -> None:
        """Forget what waits: this is a new writer, or one in a forked process, where nobody else is left."""
        self._lock = threading.Lock()
        self._leader = None
        self._writing = []
        self._clients = {}
        self._count = 0
        self._called = threading.Semaphore(0)  # released when a posted request is the one to lead
        self._thread = None

    def _enqueue(self, ticket: _Ticket) -> None:
        client, size = ticket.requests[0].author.principal, len(ticket.requests)
        own = self._clients.get(client)
        waiting = 0 if own is None else size * len(own)  # of a client whose tickets are alike
        if self._count >= self._waiting or 2 * waiting >= self._waiting:
            raise LedgerBusy(
                f"{self._count} requests are waiting to be written, as many as may; nothing was charged. Try again"
            )
        if own is None:
            own = self._clients[client] = deque()
        own.append(ticket)
        self._count += size

    def _take_group(self) -> None:
        """Take turns: one request of each client, then again, so that nobody waits for a busy one's whole queue."""
        clients = self._clients
        room = self._group - sum(len(ticket.requests) for ticket in self._writing)
        while clients and room > 0:
            client, own = next(iter(clients.items()))
            if own:
                size = len(own[0].requests)
                self._writing.append(own[0])  # before it is out of the queue: an interrupt may not lose it
                own.popleft()
                self._count -= size
                room -= size
            del clients[client]
            if own:
                clients[client] = own  # at the end of the order

    def _lead_for_others(self) -> None:
        """Lead whenever the one to lead was posted and has no thread of its own."""
        while True:
            self._called.acquire()
            while (leader := self._leader) is not None and leader.done is not None:
                self._lead()
                self._leave(leader)

    def _lead(self) -> None:
        """Write a group: one's own request if nobody else was there, else all that wait, one's own first."""
        if not self._writing or self._writing[0].done is not None:  # the writer's thread takes a while to wake up
            with self._lock:
                self._take_group()
        group = self._writing
        outcomes: Sequence[Outcome]
        begun = time.perf_counter()
        try:
            outcomes = carry_out(self._store, [request for ticket in group for request in ticket.requests])
        except OdographError as error:
            # Raised in as many threads, each with its own traceback.
            outcomes = [copy(error) for ticket in group for _ in ticket.requests]
        first = 0
        for ticket in group:
            after = first + len(ticket.requests)
            ticket.outcomes = outcomes[first:after]
            first = after
        if self._watch is not None:
            self._watch(time.perf_counter() - begun, len(outcomes))

    def _leave(self, mine: _Ticket) -> None:
        """Take back a request that nobody has begun; a leader answers its group and lets the next one lead."""
        with self._lock:
            if self._leader is not mine:
                self._take_back(mine)
                return
            if mine.done is None and mine.outcomes and not self._clients and len(self._writing) == 1:
                self._leader, self._writing = None, []  # a lone caller, and nobody has come meanwhile
                return
            group, self._writing = self._writing, []
            for ticket in group:
                ticket.outcomes = ticket.outcomes or [_interrupted() for _ in ticket.requests]
            self._take_back(mine)
            following = next((own[0] for own in self._clients.values() if own), None)
            self._leader = following
        if following is not None:
            following.awake.release()
        for ticket in group:
            if ticket.done is not None:
                ticket.done(ticket.outcomes)
            elif ticket is not mine:
                ticket.awake.release()

    def _take_back(self, mine: _Ticket) -> None:
        client = mine.requests[0].author.principal
        own = self._clients.get(client)
        if own is not None and mine in own:
            own.remove(mine)
            self._count -= len(mine.requests)
            if not own:
                del self._clients[client]


def _interrupted() -> ServiceUnavailable:
    """Without an outcome the writer itself was interrupted, and what it did or did not do is in the store."""
    return ServiceUnavailable(
        "the thread that was writing was interrupted; ask again with the same key to know the outcome"
    )


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

    wants = requests[0].wants if len(requests) == 1 else together([request.wants for request in requests])
    store.write(wants, work)
    return outcomes
