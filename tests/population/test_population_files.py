"""The files of a population are its owner's alone, from the moment they are made, whatever the umask is."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest
from population_helpers import PopulationFactory, compiled_for, current, ledger_in, location_of, small_session

from odograph import Population, Prices, PureDP
from odograph.errors import LedgerError
from odograph.population.version_store import Versions

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

BASIC = compiled_for("basic")
SMALL = PureDP("0.1")
STRANGER = 65534  # a user who owns nothing
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# Run as another user: which of the paths on its input it can list or read.
LOOK = """
import json, os, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
seen = []
for path in json.load(sys.stdin):
    try:
        os.close(os.open(path, os.O_RDONLY))
        seen.append(path)
    except PermissionError:
        pass
print(json.dumps(seen))
"""


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session whose processes would let everybody read and write what they make."""
    folder = tmp_path_factory.mktemp("spark")
    with umask(0), small_session(folder) as running:
        yield running


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody can enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def reachable(request: pytest.FixtureRequest, engine: str, open_folder: Path) -> Iterator[PopulationFactory]:
    """Populations on every engine, in a folder that everybody can enter."""
    running = request.getfixturevalue("spark") if engine == "spark" else None
    with ledger_in(open_folder) as ledger:
        yield PopulationFactory(engine, ledger, open_folder, running)


def paths_in(location: Path) -> list[Path]:
    return [location, *sorted(location.rglob("*"))]


def loose(location: Path) -> list[str]:
    """The checker: what is there that its group or others may do anything with."""
    found = []
    for path in paths_in(location):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode != (0o700 if path.is_dir() else 0o600):
            found.append(f"{path.relative_to(location)} {mode:o}")
    return found


def seen_by_a_stranger(paths: list[Path]) -> list[str]:
    """What another user can list or read."""
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-I", "-S", "-c", LOOK, str(STRANGER)],
        input=json.dumps([str(path) for path in paths]),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def steps(people: Population, session: Any) -> None:  # noqa: ANN401  of Spark
    """Make every kind of step."""
    people.charge(SMALL, key="everybody")
    people.charge(Prices([SMALL, PureDP("0.2")], [0, 1], ids=[1, 2]), key="some")
    people.remove([3], key="remove")
    people.join([3, 11], key="join")
    if session is None and not people._engine.ordered:  # noqa: SLF001  DuckDB copies a relation into a file
        people.join(duckdb.sql("SELECT 12 AS id"), key="relation")
    people.charge(PureDP(0), key="free")  # whose files are links to those before


def check_private(populations: PopulationFactory, mask: int, monkeypatch: pytest.MonkeyPatch) -> Population:
    """Make every kind of step under a umask, and look at every file before a version is finished, and at the end."""
    finish, looked = Versions.finish, [0]

    def look(versions: Versions, folder: Path) -> None:
        looked[0] += 1
        assert loose(versions.location) == [], "others may read a file that is being written"
        finish(versions, folder)

    monkeypatch.setattr(Versions, "finish", look)
    with umask(mask):
        people = populations.create(10, compiled=BASIC)
        steps(people, populations.session)
    assert looked[0] >= 6
    assert loose(location_of(people)) == []
    return people


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_files_are_their_owners_alone_under_a_strict_umask_too(
    populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_private(populations, 0o077, monkeypatch)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_a_file_that_is_made_by_the_umask_is_found(
    populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    begin = Versions.begin

    def noted(versions: Versions, version: int) -> Path:
        folder = begin(versions, version)
        (folder / "notes").write_text("")
        return folder

    monkeypatch.setattr(Versions, "begin", noted)
    with pytest.raises(AssertionError, match="others may read"):
        check_private(populations, 0, monkeypatch)


@pytest.mark.parametrize("engine", ["duckdb"])
def test_what_duckdb_spills_lies_in_a_folder_that_is_its_owners_alone(
    populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from odograph.population.engines.duckdb import DuckDBEngine  # noqa: PLC0415  only here

    people, spills = populations.create(10, compiled=BASIC), list[int]()
    connected = DuckDBEngine._connect  # noqa: SLF001  where DuckDB is told

    def noted(own: DuckDBEngine, spill: Path | str) -> object:
        if spill:
            spills.append(stat.S_IMODE(Path(spill).stat().st_mode))
        return connected(own, spill)

    monkeypatch.setattr(DuckDBEngine, "_connect", noted)
    with umask(0):
        people.charge(Prices([SMALL], [0], ids=[1]), key="a")
    assert spills
    assert set(spills) == {0o700}


def loosen(location: Path) -> None:
    """As they were made by a release that left it to the umask."""
    for path in paths_in(location):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_files_are_their_owners_alone_under_any_umask_and_another_user_sees_nothing(
    reachable: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor after a population is opened whose files everybody could read before."""
    people = check_private(reachable, 0, monkeypatch)
    paths, beside = paths_in(location_of(people)), reachable.folder / "beside"
    assert len(paths) > 6
    if os.geteuid() == 0:
        beside.write_text("for everybody")
        beside.chmod(0o644)
        assert seen_by_a_stranger([*paths, beside]) == [str(beside)]
        # Each is closed by itself, not only by the folder that it is in.
        location_of(people).chmod(0o755)
        assert seen_by_a_stranger(paths) == [str(location_of(people))]
    loosen(location_of(people))
    if os.geteuid() == 0:
        assert seen_by_a_stranger(paths) == [str(path) for path in paths]  # negative control
    reachable.open()
    assert loose(location_of(people)) == []
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    assert seen_by_a_stranger(paths) == []


def test_files_of_a_population_that_is_closed_or_was_moved_are_closed_to_others_too(dense: PopulationFactory) -> None:
    people = dense.create(3, compiled=BASIC)
    people.charge(SMALL, key="a")
    moved = location_of(people).rename(dense.folder / "moved")
    loosen(moved)
    dense.open(location=moved)
    assert loose(moved) == []
    people.close()
    loosen(moved)
    dense.open(location=moved)
    assert loose(moved) == []


def test_what_is_not_the_populations_keeps_its_mode(dense: PopulationFactory) -> None:
    people, outside = dense.create(3, compiled=BASIC), dense.folder / "outside"
    people.charge(SMALL, key="a")
    location = location_of(people)
    (location / "notes").mkdir()
    (location / "notes" / "file").write_text("")
    outside.write_text("")
    loosen(location)
    outside.chmod(0o644)
    (current(dense.ledger, people) / "link").symlink_to(outside)
    dense.open()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (outside, location, location / "notes")}
    assert modes == {outside: 0o644, location: 0o755, location / "notes": 0o755}
    closed = [path for path in paths_in(location) if path.name == "secret" or path.name.startswith("total")]
    assert len(closed) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in closed} == {0o600}


def test_a_symlinked_folder_is_closed_to_others_where_it_is(dense: PopulationFactory) -> None:
    real, link = dense.folder / "real", dense.folder / "link"
    real.mkdir()
    real.chmod(0o755)
    link.symlink_to(real)
    people = dense.create(3, compiled=BASIC, location=link)
    assert location_of(people) == link
    assert loose(real) == []
    loosen(real)
    dense.open()
    assert loose(real) == []


def in_a_child(work: Callable[[], None]) -> str:
    """Do something as another user, and say which error of ours it ended with."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = "nothing"
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            work()
        except LedgerError as problem:
            said = str(problem)
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        return told.read()


@as_root
def test_files_that_cannot_be_closed_to_others_are_refused(open_folder: Path) -> None:
    with ledger_in(open_folder) as ledger:
        location = location_of(PopulationFactory("numpy", ledger, open_folder).create(3, compiled=BASIC))
        loosen(location)
        said = in_a_child(Versions(location).restrict)
        assert "other users may be able to read" in said
        assert f"chmod -R go= {location}" in said
        Versions(location).restrict()
        assert in_a_child(Versions(location).restrict) == "nothing"  # others see nothing, and need not be refused
