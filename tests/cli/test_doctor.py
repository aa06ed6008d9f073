"""`odograph doctor`: each problem that an operator may have is provoked and named; all else is in order."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
import pytest
from postgres_server import PostgresServer
from service_process import PROGRAM, held
from service_server import ServiceThread
from typer.testing import CliRunner

import odograph as odo
from odograph.cli import options, records
from odograph.cli.app import app

YEAR = 365 * 86400 * 10**9
STRANGER = 65534  # a user who owns nothing
MOUNTS = """22 1 0:21 / / rw - ext4 /dev/root rw
30 22 0:40 / {folder} rw,relatime shared:7 - {kind} server:/export rw
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A ledger with one charge."""
    url = f"sqlite:///{tmp_path}/a folder/ledger.db"
    (tmp_path / "a folder").mkdir()
    with odo.connect(url, principal="ana") as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic")).spend(odo.PureDP("0.1"))
        yield url


def run(command: str, url: str, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [command, "--url", url, *more])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert not result.stderr
    return result.exit_code, result.stdout


def test_a_ledger_in_order_has_nothing_to_be_done(url: str) -> None:
    code, text = run("doctor", url)
    assert code == 0
    assert f"\nledger: {url}, entries: 2, accounts: 1\nschema: " in text
    assert "\nclock: the last entry is of 20" in text
    code, text = run("doctor", url, "--json")
    assert code == 0
    findings = json.loads(text)["findings"]
    assert [one["what"] for one in findings] == [
        *("versions", "file system", "space", "permissions", "locks", "log"),
        *("ledger", "schema", "settings", "writing", "clock"),
    ]
    assert {one["advice"] for one in findings} == {None}
    assert not [*Path(url.removeprefix("sqlite:///")).parent.glob(".odograph*")]  # what it tried is gone


def problems(url: str) -> dict[str, dict[str, str]]:
    """Return the findings that need attention, by what they are about."""
    code, text = run("doctor", url, "--json")
    found = {one["what"]: one for one in json.loads(text)["findings"] if one["advice"]}
    assert code == (5 if found else 0)
    return found


def file_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def test_a_folder_or_ledger_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = problems(f"sqlite:///{tmp_path}/nowhere/ledger.db")
    assert "create it, or correct --url" in found["folder"]["advice"]
    assert "opening an account creates one" in found["ledger"]["found"]
    # Before the first account, the folder can be checked already.
    assert problems(f"sqlite:///{tmp_path}/ledger.db").keys() == {"ledger"}
    assert not [*tmp_path.iterdir()]


def test_a_schema_of_a_later_release_is_named_and_the_file_is_checked_all_the_same(url: str) -> None:
    with closing(sqlite3.connect(file_of(url))) as connection:
        connection.execute("PRAGMA user_version = 9")
    found = problems(url)
    assert found.keys() == {"ledger"}
    assert "schema 9" in found["ledger"]["found"]
    assert "upgrade Odograph" in found["ledger"]["found"]
    assert "locks: a second process waits" in run("doctor", url)[1]


def test_a_user_who_may_not_write_there_is_told_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to run as another user")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # other users can reach it
        Path(folder).chmod(0o755)
        url = f"sqlite:///{folder}/ledger.db"
        with odo.connect(url) as ledger:
            ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
        assert problems(url) == {}  # and everything that is needed was loaded
        code, text = as_stranger(url)
    assert code == 5
    found = {one["what"]: one for one in json.loads(text)["findings"] if one["advice"]}
    assert f"this user cannot write {folder}" in found["permissions"]["found"]
    assert "let this user write there" in found["locks"]["advice"]
    assert found.keys() & {"writing", "ledger"}


def as_stranger(url: str) -> tuple[int, str]:
    """Run doctor as another user of the operating system."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:  # with what is loaded: the other user need not be able to read this Python
        code = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            code, text = run("doctor", url, "--json")
            os.write(writer, text.encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, encoding="utf-8") as output:  # noqa: PTH123  a descriptor
        text = output.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def test_files_that_every_user_can_write_or_read_are_named(url: str) -> None:
    file, key = file_of(url), file_of(f"{url}-owner-key")
    file.chmod(0o666)
    found = problems(url)["permissions"]
    assert (found["found"], found["advice"]) == (f"every user can write {file}", f"chmod o-w '{file}'")
    subprocess.run(found["advice"], shell=True, check=True)  # noqa: S602  the advice works as it is
    key.write_text("odo_...")
    key.chmod(0o644)
    found = problems(url)["permissions"]
    assert found["found"] == f"other users can read {key}"
    subprocess.run(found["advice"], shell=True, check=True)  # noqa: S602  as above
    assert problems(url) == {}
    file.parent.chmod(0o777)
    assert "every user can write" in problems(url)["permissions"]["found"]
    file.parent.chmod(0o1777)  # as /tmp: nobody can replace what others own
    assert problems(url) == {}


def test_a_disk_that_is_nearly_full_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MIN_FREE", 2**70)
    assert "make room" in problems(url)["space"]["advice"]


NO_LOCKS = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>
static int call(int fd, int command, void *argument)
{
    if (command == F_SETLK || command == F_SETLKW) return 0; /* granted, and forgotten */
    return syscall(SYS_fcntl, fd, command, argument);
}
#define BODY { va_list a; va_start(a, command); return call(fd, command, va_arg(a, void *)); }
int fcntl(int fd, int command, ...) BODY
int fcntl64(int fd, int command, ...) BODY
"""


def test_a_file_system_whose_locks_keep_nobody_out_is_named(url: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and Linux, to take the locks away")
    source, library = tmp_path / "locks.c", tmp_path / "locks.so"
    source.write_text(NO_LOCKS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)  # noqa: S603  our own
    for preload, expected in (("", 0), (str(library), 5)):
        done = subprocess.run(  # noqa: S603  our own
            [PROGRAM, "doctor", "--url", url],
            env=os.environ | {"LD_PRELOAD": preload},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected, done.stdout + done.stderr
        assert ("a lock of one process does not keep another one out" in done.stdout) == (expected == 5)


def test_another_program_that_keeps_the_ledger_locked_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "connect", partial(odo.connect, timeout=0.2))
    with held(url):
        assert "charges fail now for the same reason" in problems(url)["writing"]["advice"]
    assert problems(url) == {}


def test_a_journal_that_another_program_has_changed_is_changed_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    with closing(sqlite3.connect(file_of(url))) as connection:
        assert connection.execute("PRAGMA journal_mode = delete").fetchone() == ("delete",)
    assert problems(url) == {}
    with closing(sqlite3.connect(file_of(url))) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_settings_that_were_not_changed_back_are_named() -> None:
    """No real file has them: every connection of Odograph sets them."""
    (found,) = records._examine_sqlite({"journal_mode": "delete", "synchronous": "1"})  # noqa: SLF001  as it says
    assert found.found == "journal mode delete, synchronous normal"
    assert "find and stop it" in found.advice


def test_a_postgresql_that_is_in_order_has_nothing_to_be_done(postgres_url: str) -> None:
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    code, text = run("doctor", postgres_url)
    assert code == 0
    for line in (
        "server: PostgreSQL 1",
        "settings: fsync = on",
        "clocks: the server's is 0.",
        "writing: a write was",
    ):
        assert f"\n{line}" in text
    assert "settings: synchronous_commit = on; Odograph sets it to on in its own transactions" in text


def test_settings_of_postgresql_that_lose_charges_or_slow_them_down_are_named() -> None:
    wrong = {
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "off",
        "default_transaction_isolation": "serializable",
    }
    with PostgresServer(options=wrong) as server:
        with odo.connect(server.url, accept_fsync_off=True) as ledger:
            ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
        code, text = run("doctor", server.url)
        server.kill()
    assert code == 5
    assert "fsync = off\n  set fsync = on in postgresql.conf and reload" in text
    assert "full_page_writes = off\n  set full_page_writes = on" in text
    assert "default_transaction_isolation = serializable\n  ALTER DATABASE" in text
    assert "synchronous_commit = off; Odograph sets it to on in its own transactions\n" in text  # no advice
    assert "\nwriting: a write was synced" in text


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ("ALTER DATABASE {name} SET default_transaction_read_only = on", "settings", "no charge can be stored"),
        ("UPDATE odograph.schema_version SET version = 9", "ledger", "nothing more can be checked"),
    ],
)
def test_a_database_that_takes_no_charges_is_named(postgres_url: str, change: str, what: str, says: str) -> None:
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(change.format(name=postgres_url.rpartition("/")[2]).encode())
    assert says in problems(postgres_url)[what]["advice"]


def test_a_server_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "connect", partial(odo.connect, timeout=2))
    assert "cannot be reached" in problems("postgresql://nobody@127.0.0.1:9/none")["ledger"]["found"]


@pytest.mark.parametrize("hours", [-2, 2])
def test_clocks_that_differ_are_named(postgres_url: str, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    with odo.connect(postgres_url) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + hours * 3600 * 10**9)
    found = problems(postgres_url)["clocks"]
    assert f"s {'behind' if hours > 0 else 'ahead of'} this machine's" in found["found"]
    assert "by NTP" in found["advice"]


def test_a_service_of_another_release_is_named(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODOGRAPH_TOKEN", service.token())
    monkeypatch.setattr(records, "version", lambda _: "9.1.0")
    assert "upgrade the service and its clients together" in problems(service.url)["service"]["advice"]


def test_a_ledger_behind_a_service_is_looked_at_too(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    token = service.token("ana")
    with odo.connect(service.url, token=token) as ledger:
        ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    monkeypatch.setenv("ODOGRAPH_TOKEN", token)
    code, text = run("doctor", service.url)
    assert code == 0
    assert [line.partition(":")[0] for line in text.splitlines()] == ["versions", "ledger", "service", "clock"]


def test_a_clock_that_was_ahead_is_named_until_later_entries_have_the_right_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    with odo.connect(url, principal="ana") as ledger, monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now + 73 * YEAR)
        year = ledger.account("census").spend(odo.PureDP("0.1")).time.year
        assert year > 2090
    code, text = run("doctor", url)
    assert code == 5
    assert f"the last entries of census ({year}-" in text
    assert "Set the clock; later entries will have its time" in text
    code, text = run("verify", url)
    assert code == 0
    assert f"the last entries of census ({year}-" in text
    assert json.loads(run("verify", url, "--json")[1])["clock"]["advice"]
    with odo.connect(url, principal="ana") as ledger:
        ledger.account("census").spend(odo.PureDP("0.1"))
    code, text = run("doctor", url)
    assert code == 0
    assert "; it was set back before census#3" in text
    code, text = run("verify", url)
    assert code == 0
    assert "the clock was set back before census#3: times before or after it are wrong" in text
    assert json.loads(run("verify", url, "--json")[1])["set_back"] == ["census#3"]


@pytest.mark.parametrize(("kind", "expected"), [("nfs4", 5), ("xfs", 0)])
def test_a_network_file_system_is_named(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: int
) -> None:
    mounts = tmp_path / "mounts"
    folder = str(tmp_path / "a folder").replace(" ", "\\040")
    mounts.write_text(MOUNTS.format(folder=folder, kind=kind), encoding="utf-8")
    monkeypatch.setattr(records, "_MOUNT_INFO", mounts)
    code, text = run("doctor", url)
    assert code == expected
    assert f"file system: {kind}" in text
    assert ("must not be used over a network" in text) == (expected == 5)


def test_a_system_that_does_not_say_what_is_mounted_is_no_fault(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOUNT_INFO", tmp_path / "nothing")
    code, text = run("doctor", url)
    assert code == 0
    assert "file system: unknown" in text


def test_a_log_that_is_kept_from_being_written_back_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_WAL_SIZE_WARNING", 0)
    code, text = run("doctor", url)
    assert code == 5
    assert "a program keeps reading" in text


def test_many_accounts_ahead_are_counted() -> None:
    with odo.connect("memory://") as ledger:
        for number in range(5):
            ledger.open_account(f"a{number}", odo.Policy(1, 0, filter="basic"))
        found = records.examine_clock(ledger.backend.balances().values(), 0)
    assert "and 2 more are later than the present time, 1970-01-01 00:00:00 UTC" in found.found
    assert records.examine_clock([], 0) == ("clock", "there are no entries", "")
