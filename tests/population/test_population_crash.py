"""Programs killed at any moment of a charge: there is the version before or the one after, and each step once."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from crash_worker import KILLED, PEOPLE, SYNCS, charged, prices_of
from population_helpers import (
    ENGINES,
    PopulationFactory,
    current,
    ledger_in,
    location_of,
    read_state,
    took,
    versions_in,
    versions_of,
)

from odograph import Policy, Population, compile_policy
from odograph.errors import LedgerError, OdographError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
ROUNDS = {"numpy": 100 if FULL else 20, "duckdb": 100 if FULL else 8, "spark": 20 if FULL else 1}
MOMENTS = {"numpy": 0.05, "duckdb": 0.3, "spark": 1.5}  # seconds after the first answer, at most
CONTROLS = 40  # rounds until a broken twin must have been caught
PROCESS_TIMEOUT = 120.0  # seconds
HERE = Path(__file__).parent
ROOMY = compile_policy(Policy(1000, 0, filter="basic"))


class Killed:
    """The program that charges, killed again and again, and what it was answered."""

    def __init__(self, populations: PopulationFactory, twin: str = "", location: Path | str | None = None) -> None:
        self.populations = populations
        self.people = populations.create(PEOPLE, compiled=ROOMY, location=location)
        self.output = populations.folder / "answers"
        self.answered = 0  # steps, from the first on
        self.expected = np.zeros(PEOPLE, dtype=np.int64)
        url = f"sqlite:///{populations.folder}/ledger.db"
        program = str(HERE / "crash_worker.py")
        address = self.people._context.versions.address  # noqa: SLF001  as it is passed on a command line
        self.command = [sys.executable, program, url, address, populations.engine, twin]
        self.server: subprocess.Popen[bytes] | None = None

    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()

    def wait(self, program: subprocess.Popen[bytes], line: str, more_than: int = 0) -> None:
        """Wait until a line of the output begins so, after so many."""
        end = time.monotonic() + PROCESS_TIMEOUT
        while not any(one.startswith(line) for one in self.lines()[more_than:]):
            assert program.poll() is None, self.output.with_suffix(".log").read_text()[-4000:]
            assert time.monotonic() < end, f"no {line!r} in {PROCESS_TIMEOUT} s"
            time.sleep(0.003)

    @contextmanager
    def program(self, first: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the program, in a group of its own, until the block ends."""
        support = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
        with self.output.open("ab") as out, self.output.with_suffix(".log").open("ab") as log:
            started = subprocess.Popen(  # noqa: S603  our own code
                [*self.command, first],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                env=os.environ | {"PYTHONPATH": support},
                start_new_session=True,
            )
        try:
            yield started
        finally:
            os.killpg(started.pid, signal.SIGKILL)
            started.communicate()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Keep a program at hand that charges in processes of its own; Spark's has one process, and starts anew."""
        if self.populations.engine == "spark":
            yield
            return
        with self.program("-") as self.server:
            yield

    def strike(self, point: str = "") -> None:
        """Let the program charge, and kill it at some moment after its first answer, or at a point."""
        first, seen = str(self.answered), 0 if not self.output.exists() else len(self.lines())
        if self.server is None:
            with self.program(first) as alone:
                self.wait(alone, first, seen)
                time.sleep(random.uniform(0, MOMENTS[self.populations.engine]))  # noqa: S311  any moment will do
        else:
            assert self.server.stdin is not None
            self.server.stdin.write(f"{first} {point}\n".encode())
            self.server.stdin.flush()
            self.wait(self.server, "pid", seen)
            (child,) = (int(line.split()[1]) for line in self.lines()[seen:] if line.startswith("pid"))
            if not point:
                self.wait(self.server, first, seen)
                time.sleep(random.uniform(0, MOMENTS[self.populations.engine]))  # noqa: S311  any moment will do
                os.kill(child, signal.SIGKILL)
            self.wait(self.server, "gone", seen)
        for number in [int(line) for line in self.lines()[seen:] if line.isdigit()]:
            assert number == self.answered
            self.expected += charged(number)
            self.answered += 1

    def check(self) -> bool:
        """See that everything is as it should be, and ask again for what was under way; say if it had been done."""
        name = self.people.name
        with ledger_in(self.populations.folder) as ledger:
            ledger.verify()
            people = Population.open(name, ledger=ledger, session=self.populations.session)
            state = totals_in(current(ledger, people))
            after = self.expected + charged(self.answered)
            done = bool(np.array_equal(state, after))
            assert done or np.array_equal(state, self.expected), "the state is of no step, but a mix"
            last = people.charge(prices_of(self.answered - 1), key=f"step {self.answered - 1}")
            assert last.receipt.repeated, "a step that was answered is charged again"
            step = people.charge(prices_of(self.answered), key=f"step {self.answered}")
            assert step.receipt.repeated == done, "a step that was done is charged again"
            assert step.receipt.version == self.answered + 1
            assert took(step) == set(np.flatnonzero(charged(self.answered)).tolist())
            assert np.array_equal(totals_in(current(ledger, people)), after)
            if not done:
                assert versions_of(people) == {last.folder.name, step.folder.name}, "folders are left"
            ledger.verify()
        self.expected = after
        self.answered += 1
        return done


def totals_in(folder: Path) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """What everybody has spent, in the order of their ids."""
    state = read_state(folder)
    assert state.keys() == {*range(PEOPLE)}, "the ledger points to nothing"
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.array([state[one][1] for one in range(PEOPLE)])
    return found


def survive(killed: Killed, rounds: int) -> None:
    with killed.serving():
        for _ in range(rounds):
            killed.strike()
            killed.check()
    killed.people.charge(prices_of(killed.answered), key=f"step {killed.answered}")
    assert len(versions_of(killed.people)) == 2, "folders are left"


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_a_charge_that_is_killed_has_happened_or_not_and_is_answered_by_its_key(
    populations: PopulationFactory,
) -> None:
    survive(Killed(populations), ROUNDS[populations.engine])


@pytest.mark.parametrize(
    ("twin", "says"),
    [("in place", "a mix|charged again"), ("late", "points to nothing"), ("forgets", "charged again")],
)
def test_an_engine_or_a_population_that_is_not_atomic_is_caught(
    dense: PopulationFactory, twin: str, says: str
) -> None:
    with pytest.raises((AssertionError, OSError), match=says):
        survive(Killed(dense, twin), CONTROLS)


MEMORY = Path("/dev/shm")  # noqa: S108  another file system, in memory


@pytest.mark.skipif(not os.access(MEMORY, os.W_OK), reason="there is no second file system")
def test_a_charge_on_another_file_system_than_the_ledger_has_happened_or_not(dense: PopulationFactory) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as other:
        survive(Killed(dense, location=Path(other) / "people"), 5)


POINTS = [*KILLED, *(f"sync.{number}" for number in range(SYNCS + 2))]


def test_killed_at_every_point_of_a_charge_the_version_before_or_after_is_there(dense: PopulationFactory) -> None:
    """The step is done from the commit on, and not a moment earlier."""
    killed = Killed(dense)
    with killed.serving():
        for point in POINTS:
            before = killed.answered
            killed.strike(point)
            assert killed.answered == before + 1, f"nobody was killed at {point}"
            assert killed.check() == (point in ("submit.after", "clean.before")), point


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_left_over_folders_vanish_with_the_next_step_and_others_are_left_alone(
    populations: PopulationFactory,
) -> None:
    people = populations.create(5)
    location = location_of(people)
    for name in ("00000001-0123456789abcdef", "00000000-fedcba9876543210"):
        (location / name).mkdir()
        (location / name / "total-0").write_bytes(b"half of it")
    left = {"notes", "00000000-notes", "00000009-0123456789abcdef"}  # the last is of a process that is ahead
    for name in left:
        (location / name).mkdir()
    people.charge(prices_of(0), key="a")
    assert versions_in(location) - left == {current(populations.ledger, people).name, *old_versions(people, location)}
    assert left <= versions_in(location)


def old_versions(people: Population, location: Path) -> set[str]:
    state = people.history(0, 1)[0].entry.details["population"]["state"]
    assert (location / state).is_dir()
    return {state}


def test_a_step_that_fails_leaves_everything_as_it_was(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a ledger that is not reached: the step can be asked for again."""
    people = dense.create(5)
    people.charge(prices_of(0), key="a")
    before = versions_in(location_of(people)), dense.state(people)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((people._context.versions, "finish"), (people._engine, "_write")):  # noqa: SLF001  inside
        with monkeypatch.context() as patch:
            patch.setattr(type(owner), name, full)
            with pytest.raises((OSError, OdographError)):
                people.charge(prices_of(0), key="b")
        assert (versions_in(location_of(people)), dense.state(people)) == before
    assert not people.charge(prices_of(0), key="b").receipt.repeated
    dense.ledger.verify()


def test_a_disk_that_is_almost_full_leaves_no_half_of_a_version(dense: PopulationFactory) -> None:
    """It takes the beginning of the last write, and says nothing: half of the totals would be current."""
    people = dense.create(100_000, compiled=ROOMY)
    people.charge(prices_of(0), key="a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (799_999, 700_000, 400_000):  # of 800,000 bytes of totals; the ledger needs less
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            with pytest.raises(LedgerError, match="nothing was charged"):
                people.charge(prices_of(0), key="b")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not people.charge(prices_of(0), key="b").receipt.repeated
    assert dense.state(people)[99_999] == (0, 2)
