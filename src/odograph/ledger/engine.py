"""Group commit: many requests, one durable transaction.

Whoever finds nobody writing becomes the writer: it takes what is waiting, carries it out in one transaction on its
own thread, and answers everyone only after the commit. What arrived meanwhile is the next group, and one of those who
wait for it becomes its writer. So a lone caller commits on its own thread, and under load a commit is shared.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, TypeAlias
from weakref import WeakSet

from odograph.errors import LedgerBusy, OdographError, OutcomeUnknown
from odograph.ledger.commands import Outcome, Request
from odograph.ledger.fair_queue import GROUP, FairQueue
from odograph.ledger.reentry import is_reentry, reentered
from odograph.ledger.stores.base import OPENING, Changes, RowLocked, State, Store, Wants, together

__all__ = ["FIRST_PAUSE", "LONGEST_PAUSE", "Writer", "carry_out"]

_PLACES: Final = 4096  # for requests that wait
_GLANCE: Final = 0.5  # seconds until one who waits looks for itself: whoever was to wake it may have been interrupted

FIRST_PAUSE: Final = 0.002  # seconds until a request is tried again whose account another client holds; doubled,
LONGEST_PAUSE: Final = 0.1  # up to this; and so much for each that waits so: many of them must not fill the queue

# Told of every transaction: how long it took, and how many requests were in it.
Watch: TypeAlias = Callable[[float, int], None]


class _Ticket:
    """A request that waits: for its outcome, or for its turn to write."""

    __slots__ = ("awake", "outcome", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outcome: Outcome | None = None
        self.awake = threading.Lock()  # held until there is something to wake up for: the cheapest event there is
        self.awake.acquire()


class _Inside(threading.local):
    """Of each thread: a lock that it holds while it waits or writes. No other thread asks for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Writer:
    """The one way into a store. Safe to use from many threads; one process may have one per store."""

    _leader: _Ticket | None
    _writing: list[_Ticket]  # the leader's group

    def __init__(
        self,
        store: Store,
        *,
        group: int = GROUP,
        places: int = _PLACES,
        watch: Watch | None = None,
        patient: bool = True,
    ) -> None:
        self._store = store
        self._patient = patient
        self._group = group
        self._places = places
        self._watch = watch
        self.renew()
        _WRITERS.add(self)

    def submit(self, request: Request) -> Outcome:
        """Carry a request out durably and return its outcome; raise `LedgerBusy` if too many wait, and interrupts.

        One whose account another client holds waits here, outside the queue, so that no other request waits with it;
        if the writer is not `patient`, its outcome is `RowLocked` at once.
        """
        inside = self._inside.lock
        if inside.locked():  # by this thread: it would wait for itself
            raise reentered()
        with inside:
            begun = time.monotonic()
            outcome = self._submit(request)
            if self._patient and isinstance(outcome, RowLocked):
                return self._try_again(request, outcome, begun)
            return outcome

    def _try_again(self, request: Request, outcome: Outcome, begun: float) -> Outcome:
        deadline = begun + self._store.timeout
        pause = FIRST_PAUSE
        self._held_up.add(threading.get_ident())
        try:
            while isinstance(outcome, RowLocked):
                left = deadline - time.monotonic()
                if left <= 0:
                    return LedgerBusy(str(outcome))
                time.sleep(min(left, max(pause, FIRST_PAUSE * len(self._held_up))))
                pause = min(2 * pause, LONGEST_PAUSE)
                outcome = self._submit(request)
        finally:
            self._held_up.discard(threading.get_ident())
        return outcome

    def _submit(self, request: Request) -> Outcome:
        mine = _Ticket(request)
        try:
            with self._lock:
                if self._leader is None:
                    self._leader, self._writing = mine, [mine]
                else:
                    self._queue.add(mine.request.author.principal, mine)
            while mine.outcome is None:
                if self._leader is mine:
                    self._lead()
                    self._leave(mine)
                else:
                    mine.awake.acquire(timeout=_GLANCE)
        except BaseException:  # an interrupt, at any moment: what this thread had to do for others is done
            self._leave(mine)
            raise
        return mine.outcome

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def renew(self) -> None:
        """Forget what waits: this is a new writer, or one in a forked process, where nobody else is left."""
        self._lock = threading.Lock()
        self._inside = _Inside()
        self._leader = None
        self._writing = []
        self._queue: FairQueue[_Ticket] = FairQueue(self._places)
        self._held_up: set[int] = set()  # threads whose request waits for what another client holds

    def _lead(self) -> None:
        """Write a group: one's own request if nobody else was there, else all that wait, one's own first."""
        if not self._writing:
            with self._lock:
                self._queue.take(self._writing, self._group)
        group = self._writing
        outcomes: Sequence[Outcome]
        begun = time.perf_counter()
        try:
            outcomes = carry_out(self._store, [ticket.request for ticket in group])
        except OdographError as error:
            if is_reentry(error):  # raised by a handler, at any moment: it says nothing of this group
                raise
            outcomes = [copy(error) for _ in group]  # raised in as many threads, each with its own traceback
        for ticket, outcome in zip(group, outcomes, strict=True):
            ticket.outcome = outcome
        if self._watch is not None:
            self._watch(time.perf_counter() - begun, len(group))

    def _leave(self, mine: _Ticket) -> None:
        """Take back a request that nobody has begun; a leader answers its group and lets the next one lead."""
        with self._lock:
            if self._leader is not mine:
                self._queue.remove(mine.request.author.principal, mine)
                return
            group, self._writing = self._writing, []
            # Without an outcome the writer itself was interrupted, and what it did or did not do is in the store.
            for ticket in group:
                ticket.outcome = ticket.outcome or OutcomeUnknown(
                    "the thread that was writing was interrupted; ask again with the same key to know the outcome"
                )
            for ticket in {mine, *group[-1:]}:  # the last one still waits, if the interrupt came while it was taken
                self._queue.remove(ticket.request.author.principal, ticket)
            following = self._leader = self._queue.first()
        if following is not None:
            following.awake.release()
        for ticket in group:
            if ticket is not mine:
                ticket.awake.release()


_WRITERS: WeakSet[Writer] = WeakSet()


def _after_fork() -> None:  # pragma: no cover  in a forked process, which is not measured
    for writer in _WRITERS:
        writer.renew()


if hasattr(os, "register_at_fork"):  # pragma: no branch  Windows has no fork
    os.register_at_fork(after_in_child=_after_fork)


def carry_out(store: Store, requests: Sequence[Request]) -> list[Outcome]:
    """Carry requests out in their order, in one durable transaction; what one raises is its own outcome.

    A request whose account another client holds is left out; its outcome is `RowLocked`.
    """
    outcomes: list[Outcome] = []

    def work(state: State) -> Changes:
        outcomes.clear()  # a store that lost a race asks again
        changes = Changes()
        for request in requests:
            try:
                if state.held:
                    _require_free(request.wants, state.held)
                outcomes.append(request.step(state, changes))
            except OdographError as error:
                if is_reentry(error):  # raised by a handler, perhaps in the middle of a step
                    raise
                outcomes.append(error)
        return changes

    wants = requests[0].wants if len(requests) == 1 else together([request.wants for request in requests])
    store.write(wants, work)
    return outcomes


def _require_free(wants: Wants, held: frozenset[str]) -> None:
    """Raise if a request wants what another client holds; of a tree it is not known which accounts are in it."""
    if wants.trees or not held.isdisjoint(wants.accounts) or (wants.opens and OPENING in held):
        names = ", ".join(map(repr, sorted(held & wants.accounts))) or "the accounts"
        raise RowLocked(f"another client of the database holds {names}; nothing was charged. Try again")
