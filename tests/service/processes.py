"""`odograph serve` as a process of its own, on a port that stays the same: started, killed, ended, started again.

Run as a program, this file is the same service over a store that is broken in the way that is named: what the tests
must catch.

    processes.py TWIN serve ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from postgres_server import arguments, free_port, running, status

from odograph.service.keys import connect_keys

PATIENCE: Final = 60.0  # seconds until a process that should start or end has failed
TWIN: Final = "ODOGRAPH_TWIN"
PROGRAM: Final = Path(sys.executable).with_name("odograph")


class Service:
    """The service on a ledger; its output goes to a file of the folder, and its owner's key beside it."""

    def __init__(self, url: str, folder: Path, *options: str, twin: str = "", **env: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ledger_url = url
        self.owner_key_file = folder / "owner-key"
        self.log = folder / "service.log"
        fixed = ("--owner-key-file", str(self.owner_key_file), "--rate", "0", "--log-level", "warning")
        self._options = (*fixed, *options)
        self._twin = twin
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process that was started; with several workers, the one that watches them."""
        assert self._process is not None
        return self._process.pid

    @property
    def workers(self) -> list[int]:
        """The worker processes of one that watches them, as long as they run."""
        return [
            pid
            for pid in running()
            if (found := status(pid))[1:2] == [str(self.pid)]
            and found[0] not in "ZX"
            and any(b"spawn_main" in argument for argument in arguments(pid))
        ]

    @property
    def scribes(self) -> list[int]:
        """The processes that write for the workers."""
        parents = {str(pid) for pid in (self.pid, *self.workers)}
        return [
            pid
            for pid in running()
            if (found := status(pid))[1:2] and found[1] in parents and found[0] not in "ZX" and _is_scribe(pid)
        ]

    @property
    def said(self) -> str:
        """What it has written so far, over all its starts."""
        return self.log.read_text() if self.log.exists() else ""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process and do not wait for it."""
        program = [str(PROGRAM)] if not self._twin else [sys.executable, __file__]
        command = [*program, "serve", "--url", self.ledger_url, "--port", str(self.port), *self._options]
        crash = Path(__file__).parents[1] / "crash"
        broken = {TWIN: self._twin, "PYTHONPATH": os.pathsep.join([*sys.path, str(crash)])} if self._twin else {}
        with self.log.open("ab") as log:
            # In a session of its own: what ends it is not this one's business.
            self._process = subprocess.Popen(  # noqa: S603  our own code
                command, stdout=log, stderr=log, env=os.environ | broken | self._env, start_new_session=True
            )
        return self._process

    def start(self) -> None:
        """Start the process and wait until it answers that it is ready."""
        process, end = self.launch(), time.monotonic() + PATIENCE
        while not self.is_ready():
            assert process.poll() is None, f"the service did not start: {self.said[-4000:]}"
            assert time.monotonic() < end, f"the service was not ready in {PATIENCE} s: {self.said[-4000:]}"
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Say whether the service answers that it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:  # noqa: S310  our own address
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def end(self, number: signal.Signals = signal.SIGTERM, patience: float = PATIENCE) -> int:
        """Send a signal and return the code with which the process ended."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(patience)

    def kill(self) -> None:
        """End every process of the service at once, as a crash does; nothing if there is none."""
        if self._process is None:
            return
        doomed = [*self.workers, *self.scribes] if self._process.poll() is None else []
        self._process.kill()
        self._process.wait()
        for pid in doomed:
            end_process(pid)
        self._process = None

    def token(self, principal: str = "", role: str = "runner", *accounts: str) -> str:
        """Return the first owner's token, or make a key for somebody else."""
        if not principal:
            return self.owner_key_file.read_text().strip()
        every: dict[str, Any] = {"every_account": role != "owner" and not accounts}
        with connect_keys(self.ledger_url, timeout=PATIENCE) as keys:
            return keys.make(principal, role, accounts=accounts, made_by="test", **every)[0]


def _is_scribe(pid: int) -> bool:
    """Say whether a process is a scribe, by its program's last argument: the number of a file."""
    told = [one for one in arguments(pid) if one]
    return bool(told) and told[-1].isdigit() and any(b"scribe" in one or b"processes" in one for one in told)


def end_process(pid: int) -> None:
    """Kill a process, if it is still there, and wait until it is gone or waits to be collected."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    end = time.monotonic() + PATIENCE
    while (status(pid) or "Z")[0] not in "ZX":
        assert time.monotonic() < end
        time.sleep(0.002)


def break_store(twin: str) -> None:
    """Let the service of this process stand on a broken store."""
    from twins import AnswersEarly, DecidesOutside  # noqa: PLC0415  found by the program alone

    from odograph.connect import store_at  # noqa: PLC0415  as above
    from odograph.service import office, pen, scribe  # noqa: PLC0415  as above

    broken = {"early": AnswersEarly, "outside": DecidesOutside}[twin]
    for user in (office, scribe):
        user.store_at = lambda *args, **kwargs: broken(store_at(*args, **kwargs))  # type: ignore[attr-defined]
    pen.PROGRAM = (sys.executable, __file__)  # type: ignore[misc]


if TWIN in os.environ:  # worker processes read this file too, under another name
    break_store(os.environ[TWIN])

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from odograph.cli import main
    else:  # a scribe is told the number of its file
        from odograph.service.scribe import main

    main()
