"""Nothing says who is there, what anybody has spent, or how many they are: everything that comes out is searched."""

from __future__ import annotations

import io
import logging
import re
import resource
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import httpx
import numpy as np
import pytest
from population_helpers import PopulationFactory, compiled_for, current, location_of
from service_server import ServiceThread

from odograph import Population, Prices, PureDP
from odograph.errors import OdographError
from odograph.service.routes import ROUTES

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

COUNT = 100_019  # of people; never to be seen
MARK = "zqx-7c31"  # in the name of everybody who has one
BASIC = compiled_for("basic")
# What two people are asked for, one step after the other, and what they have spent then.
FIRST, SECOND = PureDP("0.3000000001234567"), PureDP("0.4311773098765433")
NUMBERS = (300000000123456, 300000000123457, 431177309876543, 431177309876544, 731177310000000)


def needles() -> list[bytes]:
    """What nobody may find: the names, the numbers as people and as machines write them."""
    words = [MARK, str(COUNT), f"{COUNT:,}", str(COUNT - 1), "0.3000000001234567", "0.4311773098765433"]
    words += [str(number) for number in NUMBERS]
    bits = [number.to_bytes(8, order) for number in (*NUMBERS, COUNT) for order in ("little", "big")]
    return [*(word.encode() for word in words), *bits, MARK.encode("utf-16-le")]


def leaks(*texts: object) -> list[bytes]:
    """The checker: which secrets are in what came out."""
    found = b"\n".join(text if isinstance(text, bytes) else str(text).encode() for text in texts)
    return [needle for needle in needles() if is_in(needle, found)]


def is_in(needle: bytes, found: bytes) -> bool:
    """Whether a secret is there; a number is not if its digits are in the middle of a digest, or of a time."""
    if needle.isdigit() and len(needle) <= len(str(COUNT)):
        return re.search(rb"(?<![0-9a-f.])%b(?![0-9a-f])" % needle, found) is not None
    return needle in found


class Marked:
    """A population whose people, totals and number are recognisable, after two steps."""

    def __init__(self, populations: PopulationFactory) -> None:
        self.populations = populations
        self.dense = populations.engine == "numpy"
        names = np.char.add(f"{MARK}-", np.arange(COUNT).astype(str)) if not self.dense else None
        self.ids: Any = np.arange(COUNT) if names is None else names
        self.people = populations.create(self.ids, compiled=BASIC)
        self.said: list[object] = [self.people]
        for key, guarantee in (("first", FIRST), ("second", SECOND)):
            prices = Prices([PureDP(0), guarantee], [1, 1, 0], ids=self.ids[[17, 5, 900]])
            self.said += self.answers(prices, key)

    def answers(self, prices: Prices, key: str) -> Iterator[object]:
        """Charge, twice with one key, and give everything that is said."""
        step = self.people.charge(prices, key=key, note="a note", progress=lambda *told: self.said.append(told))
        yield from (prices, repr(step), str(step), step.receipt, step.receipt.entry, step.receipt.entry.details)
        yield from (self.people.charge(prices, key=key).receipt, self.people.history(), repr(self.people))

    def caught(self, call: Callable[[], object]) -> str:
        """What an error says, with everything behind it."""
        with pytest.raises(OdographError) as problem:
            call()
        return told(problem.value)


def told(problem: BaseException) -> str:
    """What an error says, with everything behind it, but for the lines of code."""
    chain = "".join(traceback.format_exception(problem))
    return re.sub(r'\n    .*|\n  File "[^\n]*', "", chain) + repr(problem) + str(vars(problem))


@pytest.fixture
def marked(populations: PopulationFactory, caplog: pytest.LogCaptureFixture) -> Marked:
    """A population on every engine, with everything logged that is ever logged."""
    caplog.set_level(logging.DEBUG)
    return Marked(populations)


def wrong(marked: Marked) -> dict[str, Callable[[], object]]:
    """What can be asked for wrongly."""
    people, ids = marked.people, marked.ids
    other: Any = [MARK] if marked.dense else [COUNT]
    twice = ids[[3, 17, 3]]
    calls: dict[str, Callable[[], object]] = {
        "named twice": lambda: people.charge(Prices([FIRST], [0, 0, 0], ids=twice), key="a"),
        "others' ids": lambda: people.charge(Prices([FIRST], [0], ids=other), key="a"),
        "others join": lambda: people.join(other, key="a"),
        "others leave": lambda: people.remove(other, key="a"),
        "used before": lambda: people.charge(Prices([FIRST], [0], ids=ids[:1]), key="first"),
        "joined before": lambda: people.join(ids[:2], key="first"),
        "no ids": lambda: people.charge(Prices([FIRST], np.zeros(COUNT - 1, dtype=np.int64)), key="a"),
        "no such price": lambda: people.charge(Prices([FIRST], np.ones(COUNT), ids=ids), key="a"),
        "too few ids": lambda: people.charge(Prices([FIRST], [0], ids=ids), key="a"),
        "records": lambda: people.run(len, np.zeros(COUNT - 1), FIRST, key="b"),
        "no location": lambda: Population.open("people", ledger=marked.populations.ledger, location="nowhere").charge(
            FIRST, key="a"
        ),
    }
    if not marked.dense:
        calls["a table"] = lambda: people.charge(Prices([FIRST], table={"id": ids, "whom": ids}), key="a")
        calls["half a table"] = lambda: people.charge(Prices([FIRST], table={"id": ids}), key="a")
        calls["no file"] = lambda: people.join(f"/nowhere/{COUNT}".replace(str(COUNT), "x"), key="a")
    return calls


def test_what_a_population_says_says_nothing_about_anybody(
    marked: Marked, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    said = [marked.caught(call) for call in wrong(marked).values()]
    printed = capfd.readouterr()
    assert not leaks(*marked.said, *said)
    assert not leaks(caplog.text, printed.out, printed.err)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_a_full_disk_says_nothing_about_anybody_and_changes_nothing(
    marked: Marked, caplog: pytest.LogCaptureFixture
) -> None:
    before = current(marked.populations.ledger, marked.people)
    prices = Prices([FIRST], [0], ids=marked.ids[5:6])
    with full_disk(65_536):
        said = [marked.caught(lambda: marked.people.charge(prices, key="a"))]
        said += [marked.caught(lambda: marked.people.remove(marked.ids[5:6], key="b"))]
    assert not leaks(*said, caplog.text)
    assert current(marked.populations.ledger, marked.people) == before
    assert not marked.people.charge(prices, key="a").receipt.repeated


def test_damaged_files_are_refused_in_words_that_say_nothing_of_what_is_in_them(
    marked: Marked, caplog: pytest.LogCaptureFixture
) -> None:
    prices = Prices([FIRST], [0], ids=marked.ids[5:6])
    said: list[str] = []
    keys = count()
    for path in files_of(current(marked.populations.ledger, marked.people)):
        for damage in (lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda _: MARK.encode() * 9):
            damaged = current(marked.populations.ledger, marked.people) / path
            if not damaged.exists():  # named for its version
                continue
            whole = damaged.read_bytes()
            damaged.unlink()  # it may be a link to the version before
            damaged.write_bytes(damage(whole))
            try:
                marked.people.charge(prices, key=f"damaged {next(keys)}")
            except OdographError as problem:
                said.append(told(problem))
            finally:
                if damaged.exists():
                    damaged.write_bytes(whole)
    assert said
    assert not leaks(*said, caplog.text)


def files_of(folder: Path) -> list[Path]:
    """The files of a version, but for sums that a file system keeps beside them."""
    return sorted(one.relative_to(folder) for one in folder.rglob("*") if one.is_file() and one.name[0] != ".")


def test_the_ledger_and_its_copies_say_nothing_about_anybody(marked: Marked) -> None:
    marked.people.join(marked.ids[:3], key="join")
    marked.people.remove(marked.ids[4:6], key="remove")
    export, folder = io.StringIO(), marked.populations.folder
    marked.populations.ledger.export(export)
    marked.populations.ledger.backup(folder / "backup.db")
    files = [path.read_bytes() for path in folder.iterdir() if path.is_file()]
    assert len(files) >= 2
    assert not leaks(export.getvalue(), *files)


@pytest.mark.parametrize("engine", ["duckdb"])
def test_a_service_over_the_ledger_shows_nothing_about_anybody(marked: Marked) -> None:
    """Every address that can be read: the API, the metrics and the pages."""
    url = f"sqlite:///{marked.populations.folder}/ledger.db"
    with ServiceThread(url) as service, httpx.Client(base_url=service.url, timeout=30) as client:
        key = {"Authorization": f"Bearer {service.token('olga')}"}
        paths = [route.path for route in ROUTES if route.method == "GET"]
        assert "/metrics" in paths
        asked = [path.format(name="people", reservation="people#1", key="1", round="charge") for path in paths]
        answers = [client.get(path, headers=key) for path in asked]
        assert {answer.status_code for answer in answers} >= {200}
        form = client.get("/sign-in").text
        csrf = re.search(r'name="csrf" value="([^"]+)"', form)
        assert csrf is not None
        sign_in = {"csrf": csrf[1], "token": service.token("olga"), "then": "/"}
        assert client.post("/sign-in", data=sign_in).status_code == 303
        pages = (
            "/",
            "/accounts/people",
            "/accounts/people/chart",
            "/accounts/people/plan",
            "/audit",
            "/open",
            "/data-version",
        )
        answers += [client.get(path) for path in pages]
        assert not leaks(*[answer.content for answer in answers])
        # Nor what is left of a population as a whole: it has no balance to show.
        for path, answer in zip([*asked, *pages], answers, strict=True):
            if path.startswith(("/v1/accounts/people", "/accounts/people")) and not path.endswith("/entries"):
                assert answer.status_code in (400, 404, 409, 422), path
        assert all("odograph_budget" not in line or "people" not in line for line in answers_of(answers, "/metrics"))


def answers_of(answers: list[httpx.Response], path: str) -> list[str]:
    (found,) = (answer.text for answer in answers if answer.url.path == path)
    return found.splitlines()


def rows_in(location: Path) -> str:
    """Everything that is in the files of a population, as it is and as it is read."""
    texts = []
    for path in sorted(path for path in location.rglob("*") if path.is_file()):
        texts.append(path.read_bytes().decode("latin-1"))
        if path.suffix == ".parquet":
            with duckdb.connect() as connection:
                texts += map(str, connection.read_parquet(str(path), hive_partitioning=False).fetchall())
    return "\n".join(texts)


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_a_person_who_was_removed_is_in_no_file(populations: PopulationFactory) -> None:
    ids = [f"{MARK}-{one}-end" for one in range(50)]
    people = populations.create(ids, compiled=BASIC)
    people.charge(FIRST, key="a")
    people.remove([ids[7], f"{MARK}-stranger-end"], key="remove")
    people.charge(PureDP(0), key="b")
    people.charge(PureDP(0), key="c")
    found = rows_in(location_of(people))
    assert ids[8] in found  # negative control: who is there is found
    assert ids[7] not in found
    assert "stranger" not in found
    people.join([ids[7]], key="join")
    assert ids[7] in rows_in(location_of(people))


def test_tombstones_differ_from_population_to_population(populations: PopulationFactory) -> None:
    """They are keyed: a list of all names there are does not tell who was removed."""
    if populations.engine == "numpy":
        return
    marks = []
    for name in ("one", "two"):
        people = populations.create([f"{MARK}-1", f"{MARK}-2"], name=name, compiled=BASIC)
        people.remove([f"{MARK}-1"], key=f"remove from {name}")
        folder = current(populations.ledger, people)
        with duckdb.connect() as connection:
            tables = [connection.read_parquet(str(path)) for path in folder.rglob("*.parquet")]
            marks.append({str(row) for table in tables if "took" not in table.columns for row in table.fetchall()})
    assert all(len(found) == 1 for found in marks)
    assert not marks[0] & marks[1]


def test_a_request_is_not_told_from_its_digest(populations: PopulationFactory) -> None:
    """Two populations asked for the same have digests that say nothing of that."""
    digests = []
    for name in ("one", "two"):
        people = populations.create(3, name=name, compiled=BASIC)
        step = people.charge(Prices([FIRST], [0], ids=[1]), key=f"of {name}")
        digests.append(step.receipt.entry.request)
    assert digests[0] != digests[1]


def test_a_leak_is_found(dense: PopulationFactory) -> None:
    """Negative control: each secret is found in what would say it."""
    people = dense.create(3, compiled=BASIC)
    assert not leaks(people, people.history())
    assert not leaks(f"a seal 3f{COUNT}ab, seconds 1763526633.{COUNT}5")
    said: list[object] = [
        f"which must have {COUNT} entries",
        f"{COUNT:,} people",
        KeyError(f"{MARK}-17"),
        f"a total of {NUMBERS[-1]} is over",
        np.array([NUMBERS[-1]]).tobytes(),
        np.array([COUNT]).astype(">i8").tobytes(),
        FIRST,
    ]
    for one in said:
        assert leaks("nothing", one), one
