"""Ledgers of more entries than are read, replayed or stored at a time: how long that takes, and who waits for it."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import odograph as odo
from odograph import Checkpoint, Ledger, Policy, PureDP
from odograph.concurrency import pace
from odograph.connection import store_at
from odograph.errors import LedgerCorrupt
from odograph.ledger import audit
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Author, Charge
from odograph.ledger.engine import carry_out
from odograph.ledger.entries import Entry
from odograph.ledger.stores import sqlite
from odograph.ledger.stores.memory import MemoryStore
from odograph.ledger.stores.sqlite import SQL, SqliteStore

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
CHARGES = 5001
SMALL = 20_000 if FULL else 5000
MOST = 2.5  # times as long for twice as many entries: with the logarithms of trees, and some noise
COST = PureDP("0.0001")
LARGE_POLICY = Policy(1000, 0, filter="basic")  # ten million of these


@pytest.fixture(scope="module")
def large() -> Iterator[Ledger]:
    """One account, and so many charges that no two are alike."""
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("a", Policy(1, 0, filter="basic"))
        for number in range(1, CHARGES + 1):
            account.spend(PureDP(f"{number}e-8"), key=f"{number}")
        yield ledger


@pytest.fixture(scope="module")
def text(large: Ledger) -> str:
    file = io.StringIO()
    large.export(file)
    return file.getvalue()


def test_a_long_history_is_replayed_copied_and_told_how_far(large: Ledger, text: str) -> None:
    told: list[tuple[int, int]] = []
    file = io.StringIO()
    assert large.verify(progress=lambda *how_far: told.append(how_far)).entries == CHARGES + 1
    large.export(file, progress=lambda *how_far: told.append(how_far))
    assert file.getvalue() == text
    with odo.connect("memory://", principal="ana") as copy:
        copy.import_(io.StringIO(text), checkpoint=large.checkpoint(), progress=lambda *how_far: told.append(how_far))
        assert copy.account("a").totals == large.account("a").totals
        assert copy.account("a").totals.amounts[1] == sum(range(1, CHARGES + 1)) * 10**7
        assert copy.verify() == large.verify()
        assert copy.account("a").spend(PureDP("1e-8"), key="1").repeated
    assert told == [(5000, CHARGES + 1), (5000, CHARGES + 1), (5000, 0)]


def with_a_key_twice(text: str) -> str:
    """The last charge under the key of the first, with all that is sealed over it made anew."""
    *lines, last, principal, end = text.splitlines()
    fields = json.loads(last)["entry"] | {"key": "1"}
    before = json.loads(lines[-1])["entry"]["seal"]
    numbers = {name: int(fields[name]) for name in ("version", "sequence", "time")}
    fields["seal"] = Entry(**(fields | numbers)).reseal(before)
    end = json.loads(end) | {"checkpoint": Checkpoint({"a": (CHARGES, fields["seal"])}).to_dict()}
    return "\n".join([*lines, json.dumps({"entry": fields}), principal, json.dumps(end)])


def test_a_key_used_again_much_later_is_refused_on_the_way_in(text: str, url: str) -> None:
    with odo.connect(url) as copy:
        with pytest.raises(LedgerCorrupt, match=r"used twice|contradict what is stored"):
            copy.import_(io.StringIO(with_a_key_twice(text)))
        with pytest.raises(odo.OdographError):
            copy.account("a")


# How long it takes.


def filled(entries: int, url: str = "memory://") -> Ledger:
    """Return a ledger with so many charges of one account, and an account without any."""
    store = MemoryStore() if url == "memory://" else store_at(url)
    backend = LocalBackend(store, "ana")
    ledger = Ledger(backend)
    ledger.open_account("large", LARGE_POLICY)
    ledger.open_account("empty", LARGE_POLICY)
    asks, identity = backend.price({"large": COST}), backend.identity()
    for first in range(0, entries, 5000):
        numbers = range(first, min(entries, first + 5000))
        carry_out(store, [Charge(Author(identity, f"{number:x}"), "spend", asks) for number in numbers])
    return ledger


@pytest.fixture(scope="module")
def url_of_many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where there is a file with many charges, for reading."""
    url = f"sqlite:///{tmp_path_factory.mktemp('many')}/ledger.db"
    filled(20_000, url).close()
    return url


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, if there is one: a disk that others use too is faster at one time than at another."""
    memory = Path("/dev/shm")  # noqa: S108  a folder is made in it
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def seconds(work: Callable[[], object]) -> float:
    """Measure processor time: other work on the machine must not count."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def copying(entries: int, folder: Path, *ways: str) -> dict[str, float]:
    """Measure ways to copy a ledger into a file."""
    folder.mkdir()
    with filled(entries) as ledger, (folder / "export").open("w") as export:
        stood = ledger.checkpoint()
        took = {"backup": seconds(lambda: ledger.backup(folder / "backup.db"))}
        ledger.export(export)
    with (folder / "export").open() as export:
        for way in ways:
            with odo.connect(f"sqlite:///{folder}/{way}.db") as copy:
                read = (
                    partial(copy.import_, export) if way == "import" else partial(copy.restore, folder / "backup.db")
                )
                took[way] = seconds(partial(read, checkpoint=stood))
                assert copy.verify().entries == entries + 2
    return took


def growth(folder: Path, *ways: str) -> dict[str, float]:
    """Return how many times as long twice as many entries take."""
    copying(100, folder / "first", *ways)  # what is done once in a process must not count
    tries = [
        [copying(size, folder / f"{size}-{number}", *ways) for size in (SMALL, 2 * SMALL)] for number in range(3)
    ]  # the least of each: a cache that another program has emptied must not count
    small, large = ({name: min(one[name] for one in each) for name in each[0]} for each in zip(*tries, strict=True))
    return {name: large[name] / small[name] for name in small}


def test_twice_as_many_entries_are_copied_in_about_twice_the_time(tmp_path: Path) -> None:
    found = growth(tmp_path, "restore", "import")
    assert max(found.values()) <= MOST, found


def test_a_copy_whose_keys_are_looked_for_without_an_index_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def deferred(connection: sqlite3.Connection) -> Iterator[None]:
        connection.execute("PRAGMA defer_foreign_keys = ON")
        yield

    monkeypatch.setattr(sqlite, "_without_foreign_keys", deferred)
    assert growth(tmp_path)["backup"] > MOST


@pytest.mark.skipif(not FULL, reason="a million entries, some minutes: ODOGRAPH_FULL=1 (make test-all)")
def test_a_million_entries_are_copied_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    took = copying(10**6, tmp_path / "copies", "restore", "import")
    with odo.connect(f"sqlite:///{tmp_path}/copies/import.db", principal="ana") as ledger:
        replay = seconds(ledger.verify)
        times = shown_in(ledger, "large") / shown_in(ledger, "empty")
    with capsys.disabled():
        sys.stdout.write(f"10^6 entries: {took}, verify {replay:.1f}, shown in {times:.2f} of an empty one's time\n")
    assert max(took.values()) < 300  # about a minute on a quiet machine
    assert times <= 5


def test_keys_must_lead_to_entries_again_after_a_copy_was_read_in(tmp_path: Path) -> None:
    with filled(1) as ledger:
        ledger.backup(tmp_path / "backup.db")
    store = SqliteStore(tmp_path / "ledger.db")
    store.create()  # so that the copy is read in over the connection that writes
    with Ledger(LocalBackend(store, "ana")) as target:
        target.restore(tmp_path / "backup.db")

        def stray(connection: sqlite3.Connection) -> None:
            connection.execute(SQL["remember_keys"], ("", "key", "nowhere", 7))
            connection.execute("COMMIT")

        with pytest.raises(odo.OdographError, match="FOREIGN KEY"):
            store._transact(stray)  # noqa: SLF001  what no verb does


@pytest.mark.parametrize(("way", "name"), [("backup", "SIGINT"), ("backup", "SIGTERM"), ("export", "SIGHUP")])
def test_a_copy_that_is_stopped_leaves_no_file_behind(url_of_many: str, tmp_path: Path, name: str, way: str) -> None:
    url, folder = url_of_many, tmp_path / "copies"
    folder.mkdir()
    file = str(folder / "copy")
    command = ["backup", file] if way == "backup" else ["export", "--out", file]
    # A shell's background job, and what it starts, ignores SIGINT.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from odograph.cli import main; main()"
    )
    program = [sys.executable, "-c", code, *command, "--url", url]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as copy:  # noqa: S603  our own code
        deadline = time.monotonic() + 60
        while not [*folder.iterdir()]:
            assert copy.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)
        copy.send_signal(signal.Signals[name])
        copy.communicate(timeout=60)
        assert copy.returncode not in (0, None)
    assert [*folder.iterdir()] == []


# Who waits for it.


def shown_in(ledger: Ledger, name: str) -> float:
    """Measure what is read to show an account; the shortest of some times."""

    def show() -> None:
        account = ledger.account(name)
        assert (*account.pending, account.voids) == (0,)
        assert str(account)
        assert account.history(-20, 20)

    times = []
    for _ in range(20):
        begun = time.perf_counter()
        show()
        times.append(time.perf_counter() - begun)
    return min(times)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_an_account_with_a_long_history_is_shown_as_fast_as_an_empty_one(
    request: pytest.FixtureRequest, url_of_many: str, store: str
) -> None:
    url = url_of_many
    if store == "postgres":
        url = request.getfixturevalue("postgres_url")
        filled(20_000, url).close()
    with odo.connect(url, principal="ana") as ledger:
        assert shown_in(ledger, "large") <= 5 * shown_in(ledger, "empty")


def test_a_history_that_is_read_from_its_start_is_caught(url_of_many: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SQL, "voids", "SELECT count(*) FROM entries WHERE account = ? AND verb = 'void'")
    with odo.connect(url_of_many, principal="ana") as ledger:
        assert shown_in(ledger, "large") > 5 * shown_in(ledger, "empty")


def log_while(reading: Callable[[SqliteStore], AbstractContextManager[object]], folder: Path) -> int:
    """Return how long SQLite's log is after many charges beside one who is in the middle of reading everything."""
    path = folder / "ledger.db"
    url = f"sqlite:///{path}"
    filled(5000, url).close()
    reader = SqliteStore(path)
    with odo.connect(url, principal="ana") as ledger, reading(reader):
        for number in range(1000):
            ledger.spend({"empty": COST}, key=f"beside-{number}", note="long" * 2500)
        size = path.with_name(f"{path.name}-wal").stat().st_size
    reader.close()
    return size


@contextmanager
def replaying(store: SqliteStore) -> Iterator[None]:
    """Be in the middle of a replay."""
    with store.snapshot() as snapshot:
        records = snapshot.records()
        next(records)
        yield
        assert 1 + sum(1 for _ in records) == snapshot.size == 5002


@contextmanager
def in_one_transaction(store: SqliteStore) -> Iterator[None]:
    """Be in the middle of a replay that reads everything in one transaction."""
    with store.snapshot() as snapshot:
        snapshot._connection.execute("BEGIN")  # noqa: SLF001  the twin breaks it
        next(snapshot.records())
        yield


def test_a_replay_does_not_keep_the_log_from_being_written_back(quick: Path, tmp_path: Path) -> None:
    most = 1.2 * 4000 * 4096  # the pages at which it is written back
    assert log_while(replaying, quick) < most
    assert log_while(in_one_transaction, tmp_path) > most


def share_beside_a_replay(url: str) -> float:
    """Return which part of its rate one keeps who spends while another thread replays the ledger."""

    def rate(busy: Callable[[], bool]) -> float:
        begun, done = time.perf_counter(), 0
        while busy():
            ledger.spend({"empty": COST})
            done += 1
        return done / (time.perf_counter() - begun)

    with odo.connect(url, principal="ana") as ledger:
        ledger.spend({"empty": COST})
        end = time.perf_counter() + 0.4
        quiet = rate(lambda: time.perf_counter() < end)
        thread = threading.Thread(target=ledger.verify)
        thread.start()
        beside = rate(thread.is_alive)
        thread.join()
    return beside / quiet


def test_charges_keep_their_rate_beside_a_replay(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpaced(items: Iterable[Any]) -> Iterable[Any]:
        return items

    url = f"sqlite:///{quick}/ledger.db"
    filled(10_000, url).close()
    assert any(share_beside_a_replay(url) >= 0.5 for _ in range(4))  # other work on the machine slows some of them
    monkeypatch.setattr(audit, "pace", unpaced)
    assert any(share_beside_a_replay(url) < 0.5 for _ in range(4))


def test_a_replay_that_was_held_up_does_not_rest_for_longer() -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        items = pace(range(2))
        next(items)
        time.sleep(1.5)  # as whoever writes to a pipe that is not read
        begun = time.perf_counter()
        assert next(items) == 1
        assert time.perf_counter() - begun < 1.5
    finally:
        over.set()
        thread.join()
