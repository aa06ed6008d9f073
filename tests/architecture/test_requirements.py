"""Requirements end where they were tried, and what is installed is within them."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}

# Their numbers are believed, so the next minor version is tried before it is let in.
BELIEVED = {"dp-accounting", "opendp", "diffprivlib", "opacus", "tmlt.analytics"}


def is_bounded(text: str) -> bool:
    """Whether a requirement excludes the next major version, or minor version where numbers are believed."""
    requirement = Requirement(text)
    if requirement.name == "odograph":
        return True  # the extras of this project, which are checked themselves
    ends = [spec for spec in requirement.specifier if spec.operator in {"<", "=="}]
    digits = [spec.version.count(".") for spec in ends]
    return bool(ends) and (requirement.name not in BELIEVED or max(digits) >= 1)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_requirement_has_an_upper_bound(extra: str) -> None:
    assert [text for text in EXTRAS[extra] if not is_bounded(text)] == []


def test_the_check_finds_a_missing_bound() -> None:
    assert not is_bounded("dp-accounting>=0.6")
    assert not is_bounded("dp-accounting>=0.6,<1")
    assert not is_bounded("rich>=13")
    assert is_bounded("rich>=13,<16")


def test_every_library_that_is_believed_is_bounded() -> None:
    assert {Requirement(text).name for texts in EXTRAS.values() for text in texts} >= BELIEVED


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_installed_is_within_the_bounds(extra: str) -> None:
    for requirement in map(Requirement, EXTRAS[extra]):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            continue  # an extra that is not here
        assert requirement.name == "odograph" or installed in requirement.specifier
