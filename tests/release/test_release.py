"""What is released is built, installed into an empty environment without this checkout, and run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
FULL = os.environ.get("ODOGRAPH_FULL") == "1"
# What a program of its own may inherit: where packages come from, and nothing of this environment.
_OURS = ("PYTHON", "PYTEST", "COV_", "COVERAGE", "VIRTUAL_ENV", "ODOGRAPH")

pytestmark = pytest.mark.skipif(
    not FULL, reason="builds and installs the release, a few minutes: ODOGRAPH_FULL=1 (make test-all)"
)


def run(*command: str | Path, folder: Path) -> str:
    """Run a program in a folder, and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    done = subprocess.run(  # noqa: S603  programs of this test
        [str(part) for part in command],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> Path:
    """Make an empty environment, and return its programs."""
    run(sys.executable, "-m", "venv", folder, folder=ROOT)
    return folder / "bin"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    programs = environment(tmp_path_factory.mktemp("tools") / "venv")
    run(programs / "pip", "install", "--quiet", "build", "uv", folder=ROOT)
    return programs


@pytest.fixture(scope="module")
def released(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distribution, and the wheel from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(tools / "python", "-m", "build", "--outdir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def ran(output: str) -> None:
    """Check what the demo said at its end."""
    assert re.search(r"\d+ questions,\s+\d+ charges,\s+none\s+lost", output), output
    assert re.search(r"verified: \d+ entries", output), output


def test_the_wheel_holds_the_package_and_nothing_else(released: dict[str, Path]) -> None:
    with zipfile.ZipFile(released["wheel"]) as archive:
        names = archive.namelist()
    tracked = run("git", "ls-files", "src/odograph", folder=ROOT).split()
    inside = {name for name in names if not name.startswith(f"odograph-{VERSION}.dist-info/")}
    assert inside == {name.removeprefix("src/") for name in tracked}


def test_the_source_distribution_holds_what_git_tracks(released: dict[str, Path]) -> None:
    with tarfile.open(released["sdist"]) as archive:
        names = archive.getnames()
    tracked = run("git", "ls-files", folder=ROOT).split("\n")[:-1]
    inside = {name.removeprefix(f"odograph-{VERSION}/") for name in names}
    assert {name for name in tracked if not name.startswith(".ci/")} | {"PKG-INFO"} == inside


@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_what_is_released_installs_into_an_empty_environment_and_runs_the_demo(
    form: str, released: dict[str, Path], tmp_path: Path
) -> None:
    programs = environment(tmp_path / "venv")
    run(programs / "pip", "install", "--quiet", f"{released[form]}[demo]", folder=tmp_path)
    assert run(programs / "odograph", "--version", folder=tmp_path) == f"odograph {VERSION}\n"
    ran(run(programs / "odograph", "demo", folder=tmp_path))


def test_uvx_runs_the_demo_from_the_wheel(tools: Path, released: dict[str, Path], tmp_path: Path) -> None:
    wheel = f"odograph[demo] @ {released['wheel'].as_uri()}"
    ran(run(tools / "uvx", "--python", sys.executable, "--from", wheel, "odograph", "demo", folder=tmp_path))


def test_without_extras_the_library_works_and_the_command_line_says_what_is_missing(
    released: dict[str, Path], tmp_path: Path
) -> None:
    programs = environment(tmp_path / "venv")
    run(programs / "pip", "install", "--quiet", released["wheel"], folder=tmp_path)
    code = "import odograph as odo; print(odo.Accountant(odo.Policy(1, 1e-6)).spend(odo.PureDP(0.1)).id)"
    assert run(programs / "python", "-c", code, folder=tmp_path) == "#1\n"
    done = subprocess.run([programs / "odograph", "demo"], capture_output=True, text=True, check=False)  # noqa: S603  ours
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'odograph[cli]', or 'odograph[demo]'" in done.stderr
