"""Record the writes and syncs of a process in order, or make them fail: the Python side of syscalls.c."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_suffix(".c")
WRITES = {"write", "pwrite", "writev", "pwritev"}
SYNCS = {"fsync", "fdatasync"}


class Call(NamedTuple):
    """One call of a traced process. `began` and `ended` are on one clock for all threads and processes."""

    pid: int
    name: str
    fd: int
    size: int
    result: int
    error: int
    began: int
    ended: int
    path: str


def build_shim(folder: Path) -> Path:
    """Compile the shim into the folder, or skip the test with the reason."""
    if sys.platform != "linux":
        pytest.skip("the system-call shim needs Linux: it reads /proc and is loaded by LD_PRELOAD")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the system-call shim needs a C compiler: no cc or gcc on the path")
    shim = folder / "syscalls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, SOURCE], check=True)  # noqa: S603  our own code
    shim.chmod(0o755)  # a server may run as another user
    return shim


def preload(
    shim: Path, *, log: Path | None = None, full: tuple[int, str] | None = None, eio: tuple[int, str] | None = None
) -> dict[str, str]:
    """Return the environment variables that load the shim into a process and into what it starts.

    `full` is (bytes, pattern): after so many bytes written to matching paths a process finds its disk full.
    `eio` is (n, pattern): the n-th sync of a matching path fails. Bytes and syncs are counted per process.
    A process may change SHIM_FULL and SHIM_EIO while it runs: "0:*" is a disk that is full now; unset is room again.
    """
    variables = {"LD_PRELOAD": str(shim)}
    if log is not None:
        variables["SHIM_LOG"] = str(log.absolute())
    if full is not None:
        variables["SHIM_FULL"] = "{}:{}".format(*full)
    if eio is not None:
        variables["SHIM_EIO"] = "{}:{}".format(*eio)
    return variables


def read_calls(log: Path) -> list[Call]:
    """Read a log: the calls in the order in which they began."""
    calls = []
    for line in log.read_text("utf-8", "surrogateescape").splitlines():
        pid, name, *numbers, path = line.split(" ", 8)
        fd, size, result, error, began, ended = map(int, numbers)
        calls.append(Call(int(pid), name, fd, size, result, error, began, ended, path))
    return sorted(calls, key=lambda call: call.began)


def traced(
    args: Sequence[str | Path], shim: Path, log: Path, *, env: Mapping[str, str] | None = None
) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Run a program under the shim, and return the completed process and its calls."""
    variables = {**os.environ, **preload(shim, log=log), **(env or {})}
    done = subprocess.run(args, env=variables, capture_output=True, text=True, check=False)  # noqa: S603  our own code
    return done, read_calls(log)


def synced_before(calls: Iterable[Call], file: str, answer: Call) -> bool:
    """Return whether the last write to `file` (a pattern) before the answer was durable when the answer began.

    That is: a sync of the same path began after the write had ended, succeeded, and ended before the answer began.
    With no write before the answer the result is False: what was answered was not even written.
    An earlier write hides a later missing one, so give the calls from the request on.
    """
    earlier = [call for call in calls if fnmatchcase(call.path, file) and call.began < answer.began]
    writes = [call for call in earlier if call.name in WRITES]
    if not writes:
        return False
    last = max(writes, key=lambda call: call.ended)
    return any(
        call.name in SYNCS
        and call.path == last.path
        and call.error == 0
        and last.ended <= call.began
        and call.ended <= answer.began
        for call in earlier
    )
