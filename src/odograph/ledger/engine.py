"""LedgerEngine: the one way into a store. Every writing verb is a command that is submitted here.

Commands are committed in groups, each group one durable transaction. A thread that finds no group being written leads
one: it takes what is queued, carries it out on its own thread, and hands out the outcomes only after the commit. What
arrived meanwhile is the next group, and one of the threads that wait for it becomes its leader. So a lone caller
commits on its own thread, and under load a commit is shared.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, Generic, TypeAlias, TypeVar

from odograph.concurrency import is_reentry, reentry_error, renew_after_fork
from odograph.errors import LedgerBusy, OdographError, OutcomeUnknown
from odograph.ledger.commands import Command, Outcome, Result
from odograph.ledger.stores.base import OPENING, Changes, RowLocked, State, Store, Wants, together

__all__ = [
    "FIRST_RETRY_DELAY",
    "GROUP_SIZE",
    "LONGEST_RETRY_DELAY",
    "FairQueue",
    "LedgerEngine",
    "carry_out",
    "result_of",
]

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


_CAPACITY: Final = 4096  # commands that may be queued
_POLL_INTERVAL: Final = (
    0.5  # seconds until a thread checks for itself: the one that was to wake it may be interrupted
)

# A command whose account another client of the database holds is tried again after the first delay, which doubles up
# to the longest; with many such commands each waits longer, so that they do not fill the queue.
FIRST_RETRY_DELAY: Final = 0.002  # seconds
LONGEST_RETRY_DELAY: Final = 0.1  # seconds

# Called after every transaction with its seconds and the number of commands in it.
Observer: TypeAlias = Callable[[float, int], None]


class _Pending:
    """A command without an outcome, and the lock that its thread sleeps on while the command is queued."""

    __slots__ = ("awake", "command", "outcome")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.outcome: Outcome | None = None

    def prepare_to_wait(self) -> None:
        """Make the lock, before other threads can find the command: the cheapest event there is."""
        self.awake = threading.Lock()  # held until there is a reason to wake up
        self.awake.acquire()


class _ThreadState(threading.local):
    """A lock per thread, held while the thread has a command here; no other thread takes it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class LedgerEngine:
    """Carries commands out on a store. Safe to use from many threads; a process needs one per store."""

    _leader: _Pending | None
    _group: list[_Pending]  # that the leader writes

    def __init__(
        self,
        store: Store,
        *,
        group_size: int = GROUP_SIZE,
        capacity: int = _CAPACITY,
        observer: Observer | None = None,
    ) -> None:
        self.store = store
        self._group_size = group_size
        self._capacity = capacity
        self._observer = observer
        self.after_fork()
        renew_after_fork(self)

    def submit(self, command: Command) -> Result:
        """Carry a command out durably and return its result, or raise its error.

        Raises `LedgerBusy` if too many are queued, and `OutcomeUnknown`, with the key, if the store was lost during
        the commit. A command whose account another client holds waits outside the queue, so that no other waits with
        it, up to the store's timeout.
        """
        running = self._running.lock
        if running.locked():  # by this thread, which would wait for itself
            raise reentry_error()
        with running:
            deadline = time.monotonic() + self.store.timeout
            outcome = self._submit(command)
            if isinstance(outcome, RowLocked):
                outcome = self._retry(command, outcome, deadline)
        if isinstance(outcome, OdographError):
            return result_of(outcome, command.author.key)
        return outcome

    def _retry(self, command: Command, outcome: Outcome, deadline: float) -> Outcome:
        delay = FIRST_RETRY_DELAY
        self._retrying.add(threading.get_ident())
        try:
            while isinstance(outcome, RowLocked):
                left = deadline - time.monotonic()
                if left <= 0:
                    return LedgerBusy(str(outcome))
                time.sleep(min(left, max(delay, FIRST_RETRY_DELAY * len(self._retrying))))
                delay = min(2 * delay, LONGEST_RETRY_DELAY)
                outcome = self._submit(command)
        finally:
            self._retrying.discard(threading.get_ident())
        return outcome

    def _submit(self, command: Command) -> Outcome:
        mine = _Pending(command)
        try:
            with self._lock:
                if self._leader is None:
                    self._leader, self._group = mine, [mine]
                else:
                    mine.prepare_to_wait()
                    self._queue.add(command.author.principal, mine)
            while mine.outcome is None:
                if self._leader is mine:
                    self._lead()
                    self._leave(mine)
                else:
                    mine.awake.acquire(timeout=_POLL_INTERVAL)
        except BaseException:  # an interrupt, at any moment: what this thread had to do for others is done
            self._leave(mine, interrupted=True)
            raise
        return mine.outcome

    @property
    def queued(self) -> int:
        """How many commands are queued."""
        return len(self._queue)

    def after_fork(self) -> None:
        """Start with an empty queue: the engine is new, or in a forked process, where no other thread is left."""
        self._lock = threading.Lock()
        self._running = _ThreadState()
        self._leader = None
        self._group = []
        self._queue: FairQueue[_Pending] = FairQueue(self._capacity)
        self._retrying: set[int] = set()  # threads whose command waits for an account that another client holds

    def _lead(self) -> None:
        """Write a group: one's own command if the queue was empty, else all that is queued, one's own first."""
        if not self._group:
            with self._lock:
                self._queue.take(self._group, self._group_size)
        group = self._group
        outcomes: Sequence[Outcome]
        started = time.perf_counter()
        try:
            outcomes = carry_out(self.store, [pending.command for pending in group])
        except OdographError as error:
            if is_reentry(error):  # raised by a handler, at any moment: it says nothing of this group
                raise
            outcomes = [copy(error) for _ in group]  # raised in as many threads, each with its own traceback
        for pending, outcome in zip(group, outcomes, strict=True):
            pending.outcome = outcome
        if self._observer is not None:
            self._observer(time.perf_counter() - started, len(group))

    def _leave(self, mine: _Pending, *, interrupted: bool = False) -> None:
        """Withdraw a command that was not begun; a leader hands out the outcomes and wakes the next leader."""
        with self._lock:
            if self._leader is not mine:
                self._queue.remove(mine.command.author.principal, mine)
                return
            group, self._group = self._group, []
            # Without an outcome the leader was interrupted, and what it did or did not do is in the store.
            for pending in group:
                pending.outcome = pending.outcome or OutcomeUnknown(
                    "the thread that was writing was interrupted; ask again with the same key to know the outcome"
                )
            queue = self._queue
            if interrupted:
                for pending in {mine, *group[-1:]}:  # the last one is still queued, if the interrupt came in `take`
                    queue.remove(pending.command.author.principal, pending)
            following = self._leader = queue.first() if queue.clients else None
        if following is not None:
            following.awake.release()
        for pending in group:
            if pending is not mine:
                pending.awake.release()


def carry_out(store: Store, commands: Sequence[Command]) -> list[Outcome]:
    """Carry commands out in their order, in one durable transaction; what one raises is its own outcome.

    A command whose account another client holds is left out; its outcome is `RowLocked`.
    """
    outcomes: list[Outcome] = []

    def apply_all(state: State) -> Changes:
        outcomes.clear()  # a store that lost a race asks again
        changes = Changes()
        for command in commands:
            try:
                if state.held:
                    _require_free(command.wants, state.held)
                outcomes.append(command.apply(state, changes))
            except OdographError as error:
                if is_reentry(error):  # raised by a handler, perhaps in the middle of a command
                    raise
                outcomes.append(error)
        return changes

    wants = commands[0].wants if len(commands) == 1 else together([command.wants for command in commands])
    store.write(wants, apply_all)
    return outcomes


def result_of(outcome: Outcome, key: str) -> Result:
    """Return the result of a command, or raise its error; an unknown outcome names the key to ask again with."""
    if isinstance(outcome, OutcomeUnknown) and not outcome.key:
        raise OutcomeUnknown(outcome.message, key=key, charged=outcome.charged) from outcome
    if isinstance(outcome, OdographError):
        raise outcome
    return outcome


def _require_free(wants: Wants, held: frozenset[str]) -> None:
    """Raise if a command wants what another client holds; of a tree it is not known which accounts are in it."""
    if wants.trees or not held.isdisjoint(wants.accounts) or (wants.opens and OPENING in held):
        names = ", ".join(map(repr, sorted(held & wants.accounts))) or "the accounts"
        raise RowLocked(f"another client of the database holds {names}; try again")
