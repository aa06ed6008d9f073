"""`odograph serve` as a process of its own, on a fixed port: started, killed, ended, started again.

Run as a program, this file is the same service with a defect: over a broken store that the tests must catch, with
writers that cannot start while a file exists, or with short timeouts for writers that do not end.

    service_process.py DEFECT serve ...
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from postgres_server import arguments, free_port, running, status

from odograph.service.key_store import connect_keys

PROCESS_TIMEOUT: Final = 60.0  # seconds until a process that should start or end has failed
DEFECT: Final = "ODOGRAPH_DEFECT"
BLOCK_FILE: Final = "ODOGRAPH_BLOCK_FILE"  # names the file that keeps writers from starting, if "blocked"
PROGRAM: Final = Path(sys.executable).with_name("odograph")


class Service:
    """The service on a ledger; its output and its owner's key are files in the folder."""

    def __init__(self, url: str, folder: Path, *options: str, defect: str = "", **env: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ledger_url = url
        self.owner_key_file = folder / "owner-key"
        self.log = folder / "service.log"
        fixed = ("--owner-key-file", str(self.owner_key_file), "--rate", "0", "--log-level", "warning")
        self._options = (*fixed, *options)
        self._defect = defect
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
        """The process that was started; with several workers, their supervisor."""
        assert self._process is not None
        return self._process.pid

    @property
    def workers(self) -> list[int]:
        """The running worker processes of a supervisor."""
        return [
            pid
            for pid in running()
            if (found := status(pid))[1:2] == [str(self.pid)]
            and found[0] not in "ZX"
            and any(b"spawn_main" in argument for argument in arguments(pid))
        ]

    @property
    def writers(self) -> list[int]:
        """The processes that write for the workers."""
        parents = {str(pid) for pid in (self.pid, *self.workers)}
        return [
            pid
            for pid in running()
            if (found := status(pid))[1:2] and found[1] in parents and found[0] not in "ZX" and _is_writer(pid)
        ]

    @property
    def said(self) -> str:
        """Its output so far, over all its starts."""
        return self.log.read_text() if self.log.exists() else ""

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process and do not wait for it."""
        program = [str(PROGRAM)] if not self._defect else [sys.executable, __file__]
        command = [*program, "serve", "--url", self.ledger_url, "--port", str(self.port), *self._options]
        broken = {DEFECT: self._defect, "PYTHONPATH": os.pathsep.join(sys.path)} if self._defect else {}
        with self.log.open("ab") as log:
            # In a session of its own: signals of this terminal must not reach it.
            self._process = subprocess.Popen(  # noqa: S603  our own code
                command, stdout=log, stderr=log, env=os.environ | broken | self._env, start_new_session=True
            )
        return self._process

    def start(self) -> None:
        """Start the process and wait until it answers that it is ready."""
        process, end = self.launch(), time.monotonic() + PROCESS_TIMEOUT
        while not self.is_ready():
            assert process.poll() is None, f"the service did not start: {self.said[-4000:]}"
            assert time.monotonic() < end, f"the service was not ready in {PROCESS_TIMEOUT} s: {self.said[-4000:]}"
            time.sleep(0.02)

    def is_ready(self) -> bool:
        """Return whether the service answers that it is ready."""
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:  # noqa: S310  our own address
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def end(self, number: signal.Signals = signal.SIGTERM, timeout: float = PROCESS_TIMEOUT) -> int:
        """Send a signal and return the code with which the process ended."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(timeout)

    def kill(self) -> None:
        """Kill every process of the service at once, as a crash does. Does nothing if none runs."""
        if self._process is None:
            return
        doomed = [*self.workers, *self.writers] if self._process.poll() is None else []
        self._process.kill()
        for pid in doomed:  # at once: what a process still did after the first was gone would be no crash
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: all(map(has_ended, doomed)))
        self._process = None

    def token(self, principal: str = "", role: str = "runner", *accounts: str) -> str:
        """Return the first owner's token, or the token of a new key of a principal."""
        if not principal:
            return self.owner_key_file.read_text().strip()
        every: dict[str, Any] = {"every_account": role != "owner" and not accounts}
        with connect_keys(self.ledger_url, timeout=PROCESS_TIMEOUT) as keys:
            return keys.make(principal, role, accounts=accounts, made_by="test", **every)[0]


def _is_writer(pid: int) -> bool:
    """Return whether a process is a writer, by its program's last argument: the number of a file."""
    told = [one for one in arguments(pid) if one]
    return (
        bool(told)
        and told[-1].isdigit()
        and any(b"odograph.service.writer" in one or b"service_process" in one for one in told)
    )


@contextmanager
def held(url: str) -> Iterator[None]:
    """Lock a ledger in a SQLite file, so that every write waits."""
    lock = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        lock.rollback()
        lock.close()


def wait_until(is_so: Callable[[], bool], *, timeout: float = PROCESS_TIMEOUT) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def end_process(pid: int) -> None:
    """Kill a process, if it still runs, and wait until it is gone or a zombie."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    return (status(pid) or "Z")[0] in "ZX"


def break_service(defect: str) -> None:
    """Give the service of this process, and its writers, a defect; writers are started by this file."""
    from odograph.connection import store_at  # noqa: PLC0415  for the program alone
    from odograph.service import server, state, writer  # noqa: PLC0415  as above

    writer.PROGRAM = (sys.executable, __file__)  # type: ignore[misc]
    if defect == "blocked":
        return
    if defect == "impatient":
        writer._SHUTDOWN_TIMEOUT = 1.0  # type: ignore[misc]  # noqa: SLF001  not to be set otherwise
        return
    if defect == "prompt":  # a second and a half for a charge, and for a writer to end
        writer._ANSWER_MARGIN, writer._SHUTDOWN_TIMEOUT = -8.5, 1.5  # type: ignore[misc]  # noqa: SLF001  as above
        return
    if defect == "crowded":  # as many threads compute as there are requests
        state._READERS = 8  # type: ignore[misc]  # noqa: SLF001  as above
        for work in ("compute", "look_up"):
            setattr(state.AppState, work, state.AppState.run)
        server._SWITCH_INTERVAL = 0.005  # type: ignore[misc]  # noqa: SLF001  as above
        return
    if defect.startswith("dies "):
        from odograph.population.population import Population  # noqa: PLC0415  as above

        charge = Population.charge

        def charge_and_die(self: Population, prices: Any, *, key: str, **more: Any) -> Any:  # noqa: ANN401  as it is
            if key == "killed":
                die_in_round(defect)
            return charge(self, prices, key=key, **more)

        Population.charge = charge_and_die  # type: ignore[method-assign]
        return
    from broken_stores import AnswersEarly, DecidesOutside  # noqa: PLC0415  found by the program alone

    broken = {"early": AnswersEarly, "outside": DecidesOutside}[defect]
    for user in (state, writer):
        user.store_at = lambda *args, **kwargs: broken(store_at(*args, **kwargs))  # type: ignore[attr-defined]


def die_in_round(defect: str) -> None:
    """Let this process be killed at a point of the round that begins now."""
    from odograph.population.engines.numpy import NumpyEngine  # noqa: PLC0415  for the program alone
    from odograph.population.version_store import Versions  # noqa: PLC0415  as above
    from odograph.service.writer import WriterClient  # noqa: PLC0415  as above

    if defect == "dies in place":  # half of the totals are written over those of the version before

        def overwrite(_self: object, _context: object, before: Path, *_: object) -> None:
            totals = bytearray((before / "total-1").read_bytes())
            totals[: len(totals) // 2] = b"\1" * (len(totals) // 2)
            (before / "total-1").write_bytes(totals)
            os.kill(os.getpid(), signal.SIGKILL)

        NumpyEngine.charge = overwrite  # type: ignore[assignment]
        return
    owner, name = (
        (Versions, "finish") if defect == "dies before the commit" else (WriterClient, "submit_with_retries")
    )
    work = getattr(owner, name)

    def work_and_die(*given: object) -> None:
        work(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, work_and_die)


if DEFECT in os.environ:  # worker processes read this file too, under another name
    break_service(os.environ[DEFECT])

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from odograph.cli import main
    elif Path(os.environ.get(BLOCK_FILE, "/nowhere")).exists():
        sys.exit(1)
    else:  # a writer gets the number of its file
        from odograph.service.writer import main

    main()
