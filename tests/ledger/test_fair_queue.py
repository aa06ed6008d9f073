"""The queue of those who wait to be written, against plain lists: fair, bounded, and nobody is lost or doubled."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odograph.errors import LedgerBusy
from odograph.ledger.engine import GROUP_SIZE, FairQueue

Queue: TypeAlias = FairQueue[int]
# What is done to a queue: a client comes, so many are taken, or the client's one at this place waits no more.
Act: TypeAlias = tuple[str, str, int]

CLIENTS = ("ana", "ben", "cleo", "dan")


class Witness:
    """Who waits, as plain lists in the order of arrival, and who was taken since when: it believes nothing else."""

    def __init__(self, queue: Queue, places: int) -> None:
        self.queue = queue
        self.places = places
        self.waiting: dict[str, list[int]] = {}
        self.owner: dict[int, str] = {}
        # Of each client that waits, who had a turn since it came or was taken last.
        self.passed: dict[str, set[str]] = {}

    def add(self, client: str) -> None:
        """Let one more come; it is turned away exactly if all places are taken, or half of them by this client."""
        one = len(self.owner)
        self.owner[one] = client
        own = self.waiting.get(client, [])
        if len(self) >= self.places or (own and 2 * len(own) >= self.places):
            with pytest.raises(LedgerBusy, match=f": {len(self)} requests are queued"):
                self.queue.add(client, one)
        else:
            self.queue.add(client, one)
            self.waiting.setdefault(client, []).append(one)
            self.passed.setdefault(client, set())

    def take(self, count: int) -> None:
        """Take some: as many as there are, each the first of its client, and the first of all is the one foretold."""
        group = [-1]  # what is there already counts
        first = self.queue.first()
        assert (first is None) == (not self.waiting)
        expected = min(count, len(self))
        self.queue.take(group, 1 + count)
        taken = group[1:]
        assert group[0] == -1
        assert len(taken) == expected, f"{len(taken)} were taken instead of {expected}"
        assert not taken or taken[0] == first
        for one in taken:
            self._was_taken(self.owner[one], one)

    def _was_taken(self, client: str, one: int) -> None:
        own = self.waiting.get(client, [])
        assert own[:1] == [one], f"{client}'s {one} came before its time: {own} wait"
        own.pop(0)
        for other, passed in self.passed.items():
            if other != client:
                assert client not in passed, f"{client} had two turns while {other} had none"
                passed.add(client)
        self.passed[client] = set()
        self._forget_if_gone(client)

    def remove(self, client: str, place: int) -> None:
        """Let one wait no more; one that does not wait, or not for this client, changes nothing."""
        own = self.waiting.get(client, [])
        one = own[place] if place < len(own) else -1 - place
        for other in CLIENTS:
            if other != client:
                self.queue.remove(other, one)
        assert len(self.queue) == len(self)
        self.queue.remove(client, one)
        if place < len(own):
            own.remove(one)
            self._forget_if_gone(client)

    def _forget_if_gone(self, client: str) -> None:
        if not self.waiting.get(client):
            self.waiting.pop(client, None)
            self.passed.pop(client, None)

    def __len__(self) -> int:
        return sum(map(len, self.waiting.values()))

    def watch(self, acts: list[Act]) -> None:
        """Do all of it, looking after each, and empty the queue at the end: whoever waited was there, once."""
        for verb, client, number in acts:
            if verb == "add":
                self.add(client)
            elif verb == "take":
                self.take(number)
            else:
                self.remove(client, number)
            assert len(self.queue) == len(self), f"{len(self.queue)} wait instead of {len(self)}"
            assert bool(self.queue) == bool(self.waiting)
        self.take(len(self))
        assert (len(self.queue), len(self), bool(self.queue), self.queue.first()) == (0, 0, False, None)


ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "add", "take", "remove"]), st.sampled_from(CLIENTS), st.integers(0, 5)),
    max_size=80,
)


@given(ACTS, st.integers(0, 12) | st.just(1000))
def test_turns_are_fair_places_are_bounded_and_nobody_is_lost_or_doubled(acts: list[Act], places: int) -> None:
    Witness(FairQueue(places), places).watch(acts)


class WholeQueue(Queue):
    """Takes all of one client before the next one has a turn."""

    def take(self, group: list[int], most: int = GROUP_SIZE) -> None:
        while self.clients and len(group) < most:
            client = next(iter(self.clients))
            group.append(self.clients[client][0])
            self.remove(client, group[-1])


class OneFillsIt(Queue):
    """Lets one client take every place."""

    def add(self, client: str, one: int) -> None:
        places, self._capacity = self._capacity, 2 * self._capacity if len(self) < self._capacity else 0
        try:
            super().add(client, one)
        finally:
            self._capacity = places


class KeepsWhatItGave(Queue):
    """Gives the last one of a client twice."""

    def take(self, group: list[int], most: int = GROUP_SIZE) -> None:
        super().take(group, most)
        if not self and len(group) > 1:
            super().add("ana", group[-1])


class ForgetsTheRest(Queue):
    """Lets all of a client go when one does."""

    def remove(self, client: str, one: int) -> None:
        if one in self.clients.get(client, ()):
            self.count -= len(self.clients.pop(client))


ADDED: list[Act] = [("add", client, 0) for client in ("ana", "ana", "ana", "ben", "cleo", "ben")]


@pytest.mark.parametrize(
    ("twin", "places", "acts", "says"),
    [
        (WholeQueue, 100, [*ADDED, ("take", "", 3)], "two turns while"),
        (OneFillsIt, 4, ADDED, "DID NOT RAISE"),
        (KeepsWhatItGave, 100, [*ADDED, ("take", "", 6)], "1 wait instead of 0"),
        (ForgetsTheRest, 100, [*ADDED, ("remove", "ana", 1)], "3 wait instead of 5"),
    ],
)
def test_queues_that_are_unfair_unbounded_or_lose_somebody_are_caught(
    twin: type[Queue], places: int, acts: list[Act], says: str
) -> None:
    Witness(FairQueue(places), places).watch(acts)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
        Witness(twin(places), places).watch(acts)


def test_a_group_is_filled_up_to_what_one_transaction_holds_unless_another_number_is_said() -> None:
    queue: Queue = FairQueue(10 * GROUP_SIZE)
    for one in range(2 * GROUP_SIZE):
        queue.add("ana", one)
    group: list[int] = []
    queue.take(group)
    assert group == [*range(GROUP_SIZE)]
    queue.take(group)  # it is full already
    assert (len(group), len(queue)) == (GROUP_SIZE, GROUP_SIZE)


@pytest.mark.parametrize(("capacity", "most"), [(1, 1), (2, 1), (6, 3), (7, 4), (100, 50)])
def test_one_client_fills_half_of_the_queue_and_others_the_rest(capacity: int, most: int) -> None:
    queue: FairQueue[int] = FairQueue(capacity)
    for number in range(most):
        queue.add("ana", number)
    with pytest.raises(LedgerBusy):
        queue.add("ana", most)
    for number in range(capacity - most):
        queue.add(f"other-{number}", number)
    with pytest.raises(LedgerBusy):
        queue.add("ben", 0)
    assert len(queue) == capacity
