"""The feed of events: every entry of every account once and in order, whoever writes and whatever commits first."""

from __future__ import annotations

import threading
import zlib
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import Ledger
from odograph.errors import InvalidArgument
from odograph.ledger import backend, results
from odograph.ledger.entries import parse_entry_id
from odograph.ledger.results import Events, cursor_from_text, cursor_to_text

POLICY: Final = odo.Policy(1, 0, filter="basic")
SMALL: Final = odo.PureDP("0.0001")
WRITERS, SPENDS = 3, 12

Read = Callable[[str], Events]


def open_accounts(ledger: Ledger) -> None:
    for name in ("all", "feb", "jan"):
        ledger.open_account(name, POLICY, parent=None if name == "all" else "all")


def everything(ledger: Ledger, count: int = 1000) -> tuple[list[str], str]:
    """Return the ids of all events, read in pages, and the cursor after them."""
    found: list[str] = []
    after, more = "", True
    while more:
        entries, after, more = ledger.events(after=after, count=count)
        assert len(entries) <= count
        found += [past.entry.id for past in entries]
    return found, after


def check_complete(ledger: Ledger, found: list[str]) -> None:
    """Assert that the events are every entry of every account, once and in its order."""
    histories = {one.name: [past.entry.id for past in one.history()] for one in ledger.accounts()}
    assert Counter(found) == Counter(one for ids in histories.values() for one in ids)
    for ids in histories.values():
        assert [one for one in found if one in ids] == ids


def test_every_entry_comes_once_in_pages_of_any_length(ledger: Ledger) -> None:
    assert ledger.events() == ((), ledger.events().after, False), "of an empty ledger"
    open_accounts(ledger)
    for number in range(4):
        ledger.account("jan").spend(SMALL, key=f"j{number}", note="a note")
        ledger.spend({"jan": SMALL, "feb": SMALL}, key=f"b{number}")
    for count in (1, 2, 7, 1000):
        found, after = everything(ledger, count)
        check_complete(ledger, found)
        assert ledger.events(after=after) == ((), after, False)
    entries, after, _ = ledger.events(after=after)
    ledger.account("feb").reserve(SMALL, key="r").void("not run")
    entries, after, more = ledger.events(after=after)
    assert sorted(past.entry.id for past in entries) == ["all#13", "all#14", "feb#5", "feb#6"]
    assert {past.verb for past in entries} == {"reserve", "void"}
    assert not more


def test_now_leaves_out_what_there_is(ledger: Ledger) -> None:
    open_accounts(ledger)
    none, after, more = ledger.events(after="now")
    assert (none, more) == ((), False)
    ledger.open_account("mar", POLICY)
    ledger.account("jan").spend(SMALL, key="q")
    assert sorted(past.entry.id for past in ledger.events(after=after).entries) == ["all#1", "jan#1", "mar#0"]


def test_a_busy_account_keeps_no_other_waiting(ledger: Ledger) -> None:
    open_accounts(ledger)
    _, after = everything(ledger)
    busy, quiet = ledger.open_account("busy", POLICY), ledger.open_account("quiet", POLICY)
    for number in range(5):
        busy.spend(SMALL, key=f"a{number}")
    quiet.spend(SMALL, key="the one")
    seen: list[str] = []
    for number in range(4):
        busy.spend(SMALL, key=f"b{number}")
        entries, after, _ = ledger.events(after=after, count=2)
        seen += [past.entry.account for past in entries]
    assert seen.count("quiet") == 2


def test_a_cursor_that_is_none_is_refused(ledger: Ledger) -> None:
    open_accounts(ledger)
    for after in (
        "?",
        "abc",
        "now ",
        "é",
        cursor_to_text({"a": 1})[:-3],
        cursor_to_text({"a b": 1}),
    ):
        with pytest.raises(InvalidArgument, match="after must be a cursor"):
            ledger.events(after=after)


def test_a_cursor_that_unpacks_to_millions_of_lines_ends_at_the_first_repeated_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request of 20,000 characters would otherwise take seconds and hundreds of megabytes."""
    read: list[str] = []

    def count_and_parse(text: str) -> tuple[str, int]:
        read.append(text)
        return parse_entry_id(text)

    monkeypatch.setattr(results, "parse_entry_id", count_and_parse)
    packed = zlib.compress(b"a 1\n" * (1 << 22), 9)
    for lines in (packed, zlib.compress(b"b 1\na 1")):
        with pytest.raises(InvalidArgument, match="after must be a cursor"):
            cursor_from_text(urlsafe_b64encode(lines).decode())
    assert len(packed) < 20_000
    assert len(read) == 4


def test_a_cursor_ahead_of_the_ledger_is_refused(ledger: Ledger) -> None:
    """The ledger was restored from an older copy: going on from there would skip what is written next."""
    open_accounts(ledger)
    for positions in ({"jan": 2}, {"other": 1}):
        with pytest.raises(InvalidArgument, match="ahead of this ledger"):
            ledger.events(after=cursor_to_text(positions))


@given(st.dictionaries(st.from_regex(r"\A\w[\w.:@+-]{0,99}\Z"), st.integers(0, 10**17)))
def test_cursors_are_read_as_they_were_written(positions: dict[str, int]) -> None:
    assert cursor_from_text(cursor_to_text(positions)) == positions


def test_a_cursor_grows_by_a_few_characters_an_account() -> None:
    positions = {f"visits-2030-{number:04}": number * 37 % 1000 for number in range(1000)}
    assert len(cursor_to_text(positions)) < 12 * len(positions)


def test_long_entries_end_a_page_early(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_MAX_EVENTS_LENGTH", 100)
    open_accounts(ledger)
    for number in range(3):
        ledger.account("jan").spend(SMALL, key=f"{number}", note="x" * 90)
    assert len(ledger.events().entries) < 9
    check_complete(ledger, everything(ledger)[0])


# PostgreSQL: transactions commit in another order than they begin.


def followed(ledger: Ledger, url: str, read: Read) -> list[str]:
    """Follow the feed while several connections write; return the ids that came."""
    for number in range(WRITERS):
        ledger.open_account(f"w{number}", POLICY)
    writers = []

    def write(number: int) -> None:
        with odo.connect(url, principal=f"p{number}", accept_fsync_off=True) as own:
            for spend in range(SPENDS):
                own.account(f"w{number}").spend(SMALL, key=f"{spend}")

    for number in range(WRITERS):
        writers.append(threading.Thread(target=write, args=(number,)))
        writers[-1].start()
    found, after, alive = [], "", True
    while alive:
        alive = any(writer.is_alive() for writer in writers)
        while True:
            entries, after, more = read(after)
            found += [past.entry.id for past in entries]
            if not more:
                break
    return found


def test_nothing_is_skipped_while_several_connections_write(postgres_url: str) -> None:
    with odo.connect(postgres_url, principal="ana", accept_fsync_off=True) as ledger:
        found = followed(ledger, postgres_url, lambda after: ledger.events(after=after, count=5))
        assert len(found) == WRITERS * (SPENDS + 1)
        check_complete(ledger, found)


def test_an_entry_that_is_numbered_early_and_commits_late_is_not_skipped(postgres_url: str) -> None:
    """And the control: a cursor at the largest number or time that was seen skips it."""
    with odo.connect(postgres_url, principal="ana", accept_fsync_off=True) as ledger:
        for name in ("fast", "slow"):
            ledger.open_account(name, POLICY)
        after = ledger.events(after="now").after
        store = ledger.backend.store  # type: ignore[attr-defined]
        stamped, committed = threading.Event(), threading.Event()
        finish = store._finish  # noqa: SLF001  between an entry's time and its commit

        def late(changes: Any) -> None:  # noqa: ANN401  what the store stores
            stamped.set()
            assert committed.wait(20)
            finish(changes)

        store._finish = late  # noqa: SLF001  as above
        slow = threading.Thread(target=ledger.account("slow").spend, args=(SMALL,))
        slow.start()
        assert stamped.wait(20)
        with odo.connect(postgres_url, principal="bob", accept_fsync_off=True) as other:
            other.account("fast").spend(SMALL)
        with odo.connect(postgres_url, principal="eve", accept_fsync_off=True) as reader:
            early, following, _ = reader.events(after=after)
            latest = max(past.written for past in early)  # the cursor of the control
            committed.set()
            slow.join()
            late_entries = reader.events(after=following).entries
            assert [past.entry.id for past in (*early, *late_entries)] == ["fast#1", "slow#1"]
            by_time = [past for one in reader.accounts() for past in one.history() if past.written > latest]
            assert [past.entry.id for past in by_time] == [], "by its time the late entry would be skipped"


def test_times_within_an_account_do_not_go_back_in_the_feed(ledger: Ledger) -> None:
    open_accounts(ledger)
    for number in range(3):
        ledger.spend({"jan": SMALL, "feb": SMALL}, key=f"b{number}")
    entries = ledger.events().entries
    assert all(one.written <= other.written for one, other in pairwise(entries))
