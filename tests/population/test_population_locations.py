"""Where a population may be: in a folder that every engine reaches. Anything else is refused, and makes nothing."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from population_helpers import PopulationFactory, compiled_for, location_of, took

from odograph import Population, PureDP
from odograph.errors import InvalidArgument
from odograph.population import version_store
from odograph.population.version_store import parse_location

BASIC = compiled_for("basic")
SMALL = PureDP("0.1")
SCHEMES = ("s3a", "s3", "hdfs", "file", "gs", "abfss", "wasbs", "dbfs", "viewfs", "https", "C")
ADDRESSES = [
    *(f"{scheme}://key:hunter2@bucket/people" for scheme in SCHEMES),
    "file:/tmp/people",
    "file://",
    "file:///tmp/people?key=hunter2",
    "s3://bucket",  # a folder of its own is needed
    "s3://bucket/",
    "s3://bucket/people?key=hunter2",
    "s3://bucket/people#hunter2",
    "s3://bucket/../people",
    "s3://bucket/a//b",
    "s3://bucket/people*",
    "s3://bucket/pe[o]ple",
    "S3://bucket/people",
    Path("s3://bucket/people"),  # which is s3:/bucket/people
    Path("s3a://bucket/people"),  # which is s3a:/bucket/people
]


@pytest.fixture
def elsewhere(dense: PopulationFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PopulationFactory:
    """Populations, in a working folder that is empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return dense


def check_refused(populations: PopulationFactory, location: Any, engine: str = "numpy") -> str:  # noqa: ANN401  anything
    """A location is refused, nothing is made, and the name is free after it."""
    with pytest.raises(InvalidArgument, match="location must be the path of a folder") as caught:
        Population.create("people", BASIC, ledger=populations.ledger, location=location, ids=3, engine=engine)
    assert [*Path().iterdir()] == [], "a folder was made in the working folder"
    said = str(caught.value)
    assert "hunter2" not in said
    return said


@pytest.mark.parametrize("location", ADDRESSES, ids=str)
def test_an_address_that_no_engine_reaches_is_refused_and_no_folder_is_made(
    elsewhere: PopulationFactory, location: str | Path
) -> None:
    assert f"begins with '{str(location).partition(':')[0]}:'" in check_refused(elsewhere, location)
    assert "begins with" in check_refused(elsewhere, location, "duckdb")
    people = elsewhere.create(3, location=Path("here"))
    with pytest.raises(InvalidArgument, match="location must be the path of a folder"):
        Population.open("people", ledger=elsewhere.ledger, location=location)
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("", "''"),
        ("~", "'~'"),
        ("~/people", "'~/people'"),
        ("~ana/people", "'~ana/people'"),
        ("a\0b", r"'a\x00b'"),
        ("caf\udce9", r"'caf\udce9'"),
        (b"people", "a bytes"),
        (None, "None"),
        (3, "an int"),
    ],
)
def test_what_is_not_the_path_of_a_folder_is_refused(
    elsewhere: PopulationFactory,
    location: Any,  # noqa: ANN401  anything
    said: str,
) -> None:
    assert f"(got {said})" in check_refused(elsewhere, location)
    elsewhere.create(3, location=Path("here"))
    if location is not None:
        with pytest.raises(InvalidArgument, match="location must be the path of a folder"):
            Population.open("people", ledger=elsewhere.ledger, location=location)


def test_without_a_look_at_the_scheme_a_folder_is_made_in_the_working_folder(
    elsewhere: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(version_store, "parse_location", Path)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_refused(elsewhere, "s3a://bucket/people")
    assert Path("s3a:").is_dir()


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30) | st.from_regex(r"[a-zA-Z0-9+.\-]{1,8}:/{0,3}[a-z/]{0,9}", fullmatch=True))
def test_a_location_is_an_absolute_path_or_refused(text: str) -> None:
    try:
        found = parse_location(text)
    except InvalidArgument:
        return
    assert found.is_absolute()
    if text.lower().startswith("file:///"):
        assert found == Path(text[len("file://") :])
        return
    assert found == Path(os.path.join(os.getcwd(), text))  # noqa: PTH109, PTH118  by other means
    with suppress(ValueError):  # what is not even an address
        address = urlsplit(text)
        assert not (address.scheme and address.netloc)


@pytest.mark.parametrize("scheme", ["file", "FILE"])
def test_an_address_of_a_file_is_its_path(elsewhere: PopulationFactory, tmp_path: Path, scheme: str) -> None:
    people = elsewhere.create(3, location=f"{scheme}://{tmp_path}/with%20blank/people")
    assert location_of(people) == tmp_path / "with blank" / "people"
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}
    again = elsewhere.open(location=f"{scheme}://{tmp_path}/with%20blank/people/")
    assert took(again.charge(SMALL, key="b")) == {0, 1, 2}


def test_paths_that_look_odd_are_paths(elsewhere: PopulationFactory) -> None:
    """A colon within a name, a slash at the end, a way up, a link, blanks, other letters, a ~ that is a name."""
    Path("link").symlink_to("real")
    Path("real").mkdir()
    names = [
        "people:2024/first",
        "slash/",
        "a/../b",
        "link/inside",
        " x y ",
        "menschen-ä",
        "./~",
        "a%20b",
        "=1",
        "-r",
    ]
    for number, name in enumerate(names):
        if ".." in name:
            Path("a").mkdir()
        people = Population.create(f"p{number}", BASIC, ledger=elsewhere.ledger, location=name, ids=3)
        assert Path(name).is_dir(), name
        assert stat.S_IMODE(Path(name).stat().st_mode) == 0o700
        assert took(people.charge(SMALL, key=f"{number}")) == {0, 1, 2}


def test_a_relative_path_is_where_it_was_when_the_population_was_made(
    elsewhere: PopulationFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    people = elsewhere.create(3, location=Path("here"))
    monkeypatch.chdir(tmp_path)
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}
    assert took(elsewhere.open().charge(SMALL, key="b")) == {0, 1, 2}
    assert location_of(people) == tmp_path / "work" / "here"


def used_locations(folder: Path) -> dict[str, Callable[[], Path]]:
    """Folders in which no population can be made."""

    def file() -> Path:
        (folder / "file").write_text("")
        (folder / "file").chmod(0o644)
        return folder / "file"

    def full() -> Path:
        (folder / "full").mkdir()
        (folder / "full").chmod(0o755)
        (folder / "full" / "notes").write_text("")
        return folder / "full"

    def dangling() -> Path:
        (folder / "dangling").symlink_to(folder / "nowhere")
        return folder / "dangling"

    def looped() -> Path:
        (folder / "loop").symlink_to(folder / "loop")
        return folder / "loop"

    return {
        "a file": file,
        "within a file": lambda: file() / "people",
        "full": full,
        "dangling": dangling,
        "a loop": looped,
        "long": lambda: folder / ("x" * 300),
    }


@pytest.mark.parametrize("place", used_locations(Path()))
def test_a_place_that_is_taken_or_cannot_be_is_refused_and_left_as_it_is(
    dense: PopulationFactory, tmp_path: Path, place: str
) -> None:
    location = used_locations(tmp_path)[place]()
    before = [(path, path.lstat().st_mode) for path in sorted(tmp_path.rglob("*")) if "ledger" not in path.name]
    with pytest.raises(InvalidArgument, match="new folder"):
        dense.create(3, location=location)
    after = [(path, path.lstat().st_mode) for path in sorted(tmp_path.rglob("*")) if "ledger" not in path.name]
    assert after == before
    dense.create(3, location=tmp_path / "elsewhere")


def test_two_populations_are_never_in_one_place_by_whichever_name(dense: PopulationFactory, tmp_path: Path) -> None:
    people = dense.create(3, compiled=BASIC, location=tmp_path / "one")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for name in ("one", "link", "one/", "one/../one", "one/."):
        with pytest.raises(InvalidArgument, match="which holds a population"):
            Population.create("other", BASIC, ledger=dense.ledger, location=f"{tmp_path}/{name}", ids=3)
    for name in ("one/inner", "link/inner", f"one/{people.history()[0].entry.details['population']['state']}/inner"):
        with pytest.raises(InvalidArgument, match="within the folder of another population"):
            Population.create("other", BASIC, ledger=dense.ledger, location=f"{tmp_path}/{name}", ids=3)
    with pytest.raises(InvalidArgument, match="new folder"):
        Population.create("other", BASIC, ledger=dense.ledger, location=tmp_path, ids=3)
    assert took(people.charge(SMALL, key="a")) == {0, 1, 2}
