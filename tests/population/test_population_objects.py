"""Populations in an object store: a version is there whole before the ledger points to it, whatever is killed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from object_server import BUCKET, KEY, SECRET, object_server
from population_helpers import (
    PopulationFactory,
    compiled_for,
    current,
    ledger_in,
    location_of,
    read_state,
    took,
    versions_in,
    versions_of,
)
from race_worker import PRICE
from test_population_crash import Killed, survive

from odograph import Policy, Population, Prices, PureDP, compile_policy
from odograph.errors import InvalidArgument, LedgerCorrupt, LedgerError, OdographError
from odograph.ledger.epochs import scheduled
from odograph.population import version_store
from odograph.population.gate import SPENT
from odograph.population.version_store import ObjectVersions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # as aiohttp leaves them

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
BASIC = compiled_for("basic")
ROOMY = compile_policy(Policy(1000, 0, filter="basic"))
SMALL, LARGE = PureDP("0.1"), PureDP("0.7")
NUMBERS = count()
HERE = Path(__file__).parent
ROUNDS = 40 if FULL else 1
CONTROLS = 40  # rounds until a broken program must have been caught
PROCESS_TIMEOUT = 120.0  # seconds


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of S3 with a bucket."""
    with object_server() as url:
        yield url


@pytest.fixture
def address(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that nothing is at, and a folder for copies of this test alone."""
    assert server
    machine(monkeypatch, tmp_path / "machine")
    return f"s3://{BUCKET}/populations/test {next(NUMBERS)}"


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Act as a machine that has copies in this folder."""
    monkeypatch.setenv("ODOGRAPH_CACHE", str(folder))


def stored(address: str) -> list[str]:
    """The files in the store."""
    root = address.removeprefix("s3://")
    files = fsspec.filesystem("s3", use_listings_cache=False).find(root)
    return sorted(file.removeprefix(root + "/") for file in files)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_a_population_is_charged_on_one_machine_and_the_next(
    populations: PopulationFactory, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = populations.create(4, compiled=BASIC, location=address)
    assert took(people.charge(Prices([LARGE], [0, 0], ids=[1, 3]), key="a")) == {1, 3}
    people.join([4], key="join")
    people.remove([0], key="remove")
    assert people.history()[0].entry.details["population"]["location"] == address
    machine(monkeypatch, tmp_path / "another")
    again = populations.open()
    step = again.charge(LARGE, key="b")
    assert took(step) == {2, 4}
    again.join([0], key="back")
    assert took(again.charge(PureDP(0), key="c")) == {1, 2, 3, 4}, "a person who was removed came back fresh"
    machine(monkeypatch, tmp_path / "third")
    same = populations.open(location=address + "/").charge(PureDP(0), key="c")
    assert same.receipt.repeated
    assert took(same) == {1, 2, 3, 4}
    old = populations.open().charge(Prices([LARGE], [0, 0], ids=[1, 3]), key="a")
    with pytest.raises(LedgerError, match="last two rounds"):
        _ = old.ids
    assert populations.state(again) == dict.fromkeys((1, 2, 3, 4), (0, 7 * 10**14))
    assert {file.partition("/")[0] for file in stored(address)} == versions_of(again) | {"secret"}
    assert len(versions_of(again)) == 2
    populations.ledger.verify()


def test_records_of_those_who_take_part_are_handed_on(dense: PopulationFactory, address: str) -> None:
    people = dense.create(4, compiled=BASIC, location=address)
    people.charge(Prices([PureDP(1)], [0], ids=[2]), key="spent")
    assert people.run(lambda records: float(records.sum()), np.array([1.0, 2, 4, 8]), SMALL, key="a") == 11


def test_a_population_renews_on_another_machine_and_an_epoch_is_retired(
    dense: PopulationFactory, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What machines that charged it before have copied is there until their next round, as the guide says."""
    now = [datetime(2026, 11, 10, tzinfo=UTC)]
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0].timestamp()) * 10**9)
    schedule = scheduled("monthly", "2026-11-01", "12")
    first = Population.create("visits", BASIC, ledger=dense.ledger, location=address, ids=4, renew=schedule)
    first.charge(LARGE, key="a")
    first.remove([3], key="remove")
    now[0] = datetime(2026, 12, 1, tzinfo=UTC)
    machine(monkeypatch, tmp_path / "another")
    people = Population.open(first.name, ledger=dense.ledger).renew()
    assert (people.name, len(versions_of(people))) == ("visits@2026-12-01", 2)
    people.retire("2026-11-01", key="retire")
    states = [read_state(location_of(people) / name) for name in versions_of(people)]
    assert states == [dict.fromkeys(range(3), (0, 0)) | {3: (SPENT, SPENT)}] * 2
    assert took(people.charge(LARGE, key="b")) == {0, 1, 2}
    old = versions_in(location_of(first))
    assert old, "the copies of the machine that renewed nothing"
    machine(monkeypatch, tmp_path / "machine")
    Population.open(people.name, ledger=dense.ledger).join([], key="look")
    assert not old & versions_in(location_of(first))
    dense.ledger.verify()


class KilledThere(Killed):
    """As `Killed`, with every look from a machine that has no copies."""

    def __init__(
        self, populations: PopulationFactory, address: str, patch: pytest.MonkeyPatch, twin: str = ""
    ) -> None:
        super().__init__(populations, twin, address)
        self.patch = patch
        self.machines = count()

    def check(self) -> bool:
        machine(self.patch, self.populations.folder / f"machine {next(self.machines)}")
        return super().check()


@pytest.mark.long
@pytest.mark.parametrize("engine", ["numpy", "duckdb"] if FULL else ["numpy"])
def test_a_charge_that_is_killed_has_happened_or_not(
    populations: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    survive(KilledThere(populations, address, monkeypatch), ROUNDS)


def test_a_pointer_that_is_before_its_files_is_caught(
    dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: files that follow the pointer are missing when the program is killed in between."""
    with pytest.raises((AssertionError, LedgerError), match=r"there is no version|points to nothing"):
        survive(KilledThere(dense, address, monkeypatch, "pointer first"), CONTROLS)


POINTS = (
    "_upload.0",
    "_upload.3",  # the last file
    "finish.after",
    "submit.after",
    "clean.after",
)


def test_killed_at_every_point_the_version_before_or_after_is_there(
    dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is done from the commit on, and not a moment earlier."""
    killed = KilledThere(dense, address, monkeypatch)
    with killed.serving():
        for point in POINTS:
            before = killed.answered
            killed.strike(point)
            assert killed.answered == before + 1, f"nothing was killed at {point}"
            assert killed.check() == (point in ("submit.after", "clean.after")), point


def race(folder: Path, number: int) -> subprocess.Popen[bytes]:
    """Let two processes of a machine of their own charge."""
    support = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
    program = [sys.executable, str(HERE / "race_worker.py"), f"sqlite:///{folder}/ledger.db", "", "2", "2"]
    settings = {"PYTHONPATH": support, "ODOGRAPH_CACHE": str(folder / f"racer {number}")}
    return subprocess.Popen(program, env=os.environ | settings, stdout=subprocess.PIPE)  # noqa: S603  our own code


def test_programs_on_two_machines_lose_no_charge_and_make_none_twice(
    dense: PopulationFactory, address: str, tmp_path: Path
) -> None:
    """They do not see each other's locks: one is first in the ledger, and the other starts again."""
    people = dense.create(300, compiled=ROOMY, location=address)
    # Both machines use the same four keys: a charge is made by one of them, and found by the other.
    racers = [race(tmp_path, number) for number in range(2)]
    for racer in racers:
        out, _ = racer.communicate(timeout=PROCESS_TIMEOUT)
        assert json.loads(out)["processes"] == 2
    assert len(people.history()) == 5
    assert dense.state(people) == dict.fromkeys(range(300), (0, 4))
    people.charge(PRICE, key="clean")
    assert len(versions_of(people)) == 2
    dense.ledger.verify()


def test_two_programs_that_create_at_one_address_do_not_share_it(dense: PopulationFactory, address: str) -> None:
    def create(name: str) -> str:
        try:
            with ledger_in(dense.folder) as ledger:
                PopulationFactory("numpy", ledger, dense.folder).create(3, name=name, location=address)
        except InvalidArgument as refused:
            assert "location must be new" in str(refused)  # noqa: PT017  of either of them
            return ""
        return name

    with ThreadPoolExecutor(4) as pool:
        made = {*pool.map(create, "abcd")} - {""}
    assert len(made) == 1
    people = dense.open(made.pop())
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}
    with pytest.raises(InvalidArgument, match="location must be new"):
        dense.create(3, name="late", location=address)
    with pytest.raises(InvalidArgument, match="within the folder of another population"):
        dense.create(3, name="inner", location=f"{address}/inner")
    assert len([file for file in stored(address) if file == "secret"]) == 1


def replaces_secret(dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Create at an address at the moment another program has; return whether its secret is replaced."""
    store = fsspec.filesystem("s3")
    dense.create(3, location=address)
    before = store.cat_file(f"{address}/secret")
    with monkeypatch.context() as patch, suppress(OdographError):
        patch.setattr(ObjectVersions, "_names", lambda *_: [])  # it has not seen the other one
        dense.create(3, name="other", location=address)
    return bool(store.cat_file(f"{address}/secret") != before)


def test_a_secret_is_never_replaced(dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another secret, people who were removed could come back fresh."""
    assert not replaces_secret(dense, address, monkeypatch)


def test_a_store_that_ignores_the_condition_is_caught(
    dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    store = fsspec.filesystem("s3", use_listings_cache=False)
    pipe = store.pipe_file
    monkeypatch.setattr(store, "pipe_file", lambda path, value, **_: pipe(path, value))
    assert replaces_secret(dense, address, monkeypatch)


def test_left_over_files_vanish_with_the_next_round_and_others_are_left_alone(
    dense: PopulationFactory, address: str
) -> None:
    people = dense.create(5, compiled=BASIC, location=address)
    store = fsspec.filesystem("s3")
    left = {"notes/total-0", "00000000-notes/total-0", "00000009-0123456789abcdef/total-0"}
    for name in {"00000001-0123456789abcdef/total-0", "00000000-fedcba9876543210/total-0"} | left:
        store.pipe_file(f"{address}/{name}", b"half of it")
    copy = location_of(people) / "fetch-0123"
    copy.mkdir()
    os.utime(copy, (0, 0))
    people.charge(SMALL, key="a")
    people.charge(SMALL, key="b")
    there = {file.partition("/")[0] for file in stored(address)}
    kept = {current(dense.ledger, people).name, *(name for name in there if name.startswith("00000001-"))}
    assert there == kept | {name.partition("/")[0] for name in left} | {"secret"}
    assert len(kept) == 2
    assert not copy.exists()


def test_copies_are_their_users_alone_and_may_be_deleted(dense: PopulationFactory, address: str) -> None:
    people = dense.create(3, compiled=BASIC, location=address)
    people.charge(SMALL, key="a")
    copies = location_of(people)
    assert {path.stat().st_mode & 0o77 for path in [copies, *copies.rglob("*")]} == {0}
    assert not [path for path in copies.rglob("*") if path.name == "secret"]
    for path in sorted(copies.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    copies.rmdir()
    assert took(people.charge(LARGE, key="b")) == {0, 1, 2}
    assert dense.state(people) == dict.fromkeys(range(3), (0, 8 * 10**14))


@pytest.mark.parametrize("damage", ["changed", "short", "list", "name", "gone"])
def test_damaged_files_are_refused(
    dense: PopulationFactory, address: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = dense.create(3, compiled=BASIC, location=address)
    people.charge(SMALL, key="a")
    state, store = current(dense.ledger, people).name, fsspec.filesystem("s3")
    total, files = f"{address}/{state}/total-1", f"{address}/{state}/files.json"
    if damage in ("changed", "short"):
        store.pipe_file(total, bytes(24 if damage == "changed" else 8))  # a budget that was given back
    elif damage == "gone":
        store.rm_file(total)
    else:
        listed = b"{}" if damage == "list" else b'{"files": {"../../evil": ""}}'
        store.pipe_file(files, listed)
    machine(monkeypatch, tmp_path / "another")
    with pytest.raises(LedgerError if damage == "gone" else LedgerCorrupt):
        dense.open().charge(SMALL, key="b")
    assert len(people.history()) == 2
    assert not [*tmp_path.rglob("evil")]


def test_no_error_and_no_entry_has_credentials(
    dense: PopulationFactory, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = dense.create(3, compiled=BASIC, location=address)
    people.charge(SMALL, key="a")
    said: list[Any] = [people, people.history()]

    def refuse(call: Any, kind: type[LedgerError | InvalidArgument] = LedgerError) -> None:  # noqa: ANN401
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.charged is False
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        said.append(caught.value)

    def broken(*_: object) -> None:
        raise OSError(f"the key {KEY} with the secret {SECRET} is not known")

    refuse(lambda: dense.create(3, name="other", location="s3://no-such-bucket/people"))
    refuse(lambda: dense.create(3, name="other", location=f"s3://{KEY}:{SECRET}@data/x"), InvalidArgument)
    refuse(lambda: dense.open(location=f"s3://{BUCKET}/typo"))
    with monkeypatch.context() as patch:
        patch.setattr(version_store, "_upload", broken)
        refuse(lambda: people.charge(SMALL, key="b"))
        refuse(lambda: dense.create(3, name="other", location=f"{address} other"))
    assert stored(f"{address} other") == []
    assert not people.charge(SMALL, key="b").receipt.repeated
    export = io.StringIO()
    dense.ledger.export(export)
    files = [path.read_bytes() for path in dense.folder.iterdir() if path.is_file()]
    text = "\n".join([*map(str, said), export.getvalue(), *(file.decode("latin-1") for file in files)])
    assert address in text
    assert "hunter2" not in text.lower()


def test_spark_takes_a_folder(dense: PopulationFactory, address: str) -> None:
    with pytest.raises(InvalidArgument, match="'spark'"):
        Population.create("people", BASIC, ledger=dense.ledger, location=address, engine="spark", session=None)
