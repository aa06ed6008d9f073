"""The key store keeps what it said, on every store: durable, revocable, one at a time, and no token in it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from postgres_server import PostgresServer
from syscalls import SYNCS, build_shim, synced_before, traced
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.service import keys_app
from odograph.errors import (
    BadRequest,
    IdempotencyConflict,
    InvalidArgument,
    KeyNotFound,
    LedgerBusy,
    LedgerCorrupt,
    LedgerError,
    NotAuthenticated,
    NotPermitted,
    OdographError,
)
from odograph.ledger.stores.sqlite import statements
from odograph.service import key_store as keys_module
from odograph.service.auth import ApiKey, Caller, Role, digest_of_token, looks_like_token, new_token
from odograph.service.key_store import KeyStore, RunQuery, connect_keys, queries, schema

HOSTILE = ["Robert'); DROP TABLE keys;--", "%s ? :name {0}", "\U0001f600" * 200, "x" * 200]
NO_TEXT = ["", "a\nb", "ana\u202ebo", "a\0b", "\ud800", "x" * 201, "x" * 10**6]


@pytest.fixture
def store(url: str) -> Iterator[KeyStore]:
    with connect_keys(url) as found:
        yield found


def first_owner(store: KeyStore) -> str | None:
    token = new_token()
    return token if store.first_owner(token) else None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite key store with one key in it."""
    with connect_keys(f"sqlite:///{tmp_path}/ledger.db") as store:
        first_owner(store)
    return tmp_path / "ledger.db-access"


@pytest.fixture(params=["sqlite", "postgres"])
def key_store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where several processes can reach a new key store."""
    found: str = f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else found


def caller_with(store: KeyStore, token: str) -> Caller | None:
    """What a service does with a token."""
    key = store.find(digest_of_token(token))
    return Caller.of(key) if key is not None and key.valid_at(store.now()) else None


def signed_in(store: KeyStore, secret: str) -> bool:
    """Say whether a session is still there, whatever its key is worth."""
    return store.session(digest_of_token(secret)) is not None


def pass_time(store: KeyStore, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the store's clock forward."""
    now = store.now
    monkeypatch.setattr(store, "now", lambda: now() + int(seconds * 1e6))


def listed(store: KeyStore) -> list[ApiKey]:
    return store.keys()


def owner(store: KeyStore) -> tuple[str, ApiKey]:
    return store.make("olga", Role.OWNER, made_by="test")


# Keys


def test_a_key_is_found_by_its_token_and_says_what_it_is_for(store: KeyStore) -> None:
    before = store.now()
    token, key = store.make("ana", "analyst", accounts=["jan", "feb", "jan"], expires=60, made_by="olga")
    assert looks_like_token(token)
    assert store.find(digest_of_token(token)) == key == store.key(key.id)
    assert (key.principal, key.role, key.accounts, key.every_account) == ("ana", Role.ANALYST, ("feb", "jan"), False)
    assert before <= key.made <= store.now()
    assert key.expires == key.made + 60_000_000
    assert (key.made_by, key.revoked, key.revoked_by) == ("olga", None, "")
    assert caller_with(store, token) == Caller("ana", Role.ANALYST, key.id, frozenset({"jan", "feb"}), key.expires)


def test_what_is_not_a_known_token_is_nobody(store: KeyStore) -> None:
    token, key = owner(store)
    for text in ("", token[:-1], f"{token}\n", key.id, key.digest, "\ud800", "x" * 10**6):
        assert caller_with(store, text) is None
        assert store.find(text) is None or text == key.digest
    for text in ("", "0" * 12, key.id.upper(), f"{key.id}\n", "\ud800", "' OR 1=1", "x" * 10**6):
        with pytest.raises(KeyNotFound, match="no key") as told:
            store.key(text)
        assert len(str(told.value)) < 300
        with pytest.raises(KeyNotFound):
            store.revoke(text, "bo")
        with pytest.raises(KeyNotFound):
            store.begin_session(text)


def test_an_expired_key_opens_nothing_and_stays_listed(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    token, key = store.make("ana", "runner", every_account=True, expires=60, made_by="olga")
    _, lasting = owner(store)
    assert caller_with(store, token) is not None
    pass_time(store, 60, monkeypatch)
    assert caller_with(store, token) is None
    assert [found.id for found in listed(store)] == [lasting.id, key.id]
    with pytest.raises(NotAuthenticated, match="expired"):
        store.begin_session(key.id)


def test_rotation_keeps_the_principal(store: KeyStore) -> None:
    old, first = store.make("ana", "analyst", accounts=["jan"], made_by="olga")
    new, second = store.make("ana", "analyst", accounts=["jan"], made_by="olga")
    gone = store.revoke(first.id, "olga")
    assert caller_with(store, old) is None
    found = caller_with(store, new)
    assert found is not None
    assert (found.principal, found.api_key_id) == ("ana", second.id)
    assert first.principal == second.principal == gone.principal
    assert (gone.revoked_by, store.find(first.digest)) == ("olga", gone)


def test_a_revoked_key_stays_as_it_was_revoked(store: KeyStore) -> None:
    _, key = store.make("ana", "auditor", every_account=True, made_by="olga")
    gone = store.revoke(key.id, "olga")
    assert gone.revoked is not None
    assert gone.revoked >= gone.made
    assert store.revoke(key.id, "mallory") == gone == store.key(key.id)


def test_every_key_ever_made_is_listed_the_newest_first(store: KeyStore) -> None:
    made = [store.make(f"p{i}", "analyst", accounts=["jan"], made_by="olga")[1].id for i in range(5)]
    store.revoke(made[2], "olga")
    assert [key.id for key in listed(store)] == made[::-1]


def test_a_request_makes_one_key_and_its_token_is_not_shown_twice(store: KeyStore) -> None:
    _, key = store.make("ana", "analyst", accounts=["jan"], made_by="olga", request="r-1")
    with pytest.raises(IdempotencyConflict, match=key.id):
        store.make("ana", "analyst", accounts=["jan"], made_by="olga", request="r-1")
    store.make("ana", "analyst", accounts=["jan"], made_by="omar", request="r-1")
    for _ in range(2):
        store.make("ana", "analyst", accounts=["jan"], made_by="olga")
    assert len(store.keys()) == 4


@pytest.mark.parametrize("name", HOSTILE)
def test_any_printable_name_is_kept_as_it_is(store: KeyStore, name: str) -> None:
    token, key = store.make(name, "owner", made_by=name, request=name)
    found = store.find(digest_of_token(token))
    assert found == key
    assert found.principal == found.made_by == name
    assert len(store.keys()) == 1


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_name_is_refused_and_nothing_is_made(store: KeyStore, name: str) -> None:
    requests: list[dict[str, Any]] = [
        {"principal": name},
        {"made_by": name},
        {"role": name},
        {"role": "analyst", "accounts": [name]},
        {"role": "analyst", "accounts": name},
        {"expires": name},
        *([{"request": name}] if name else ()),
    ]
    for request in requests:
        with pytest.raises((BadRequest, InvalidArgument)) as told:
            store.make(**{"principal": "ana", "role": "owner", "made_by": "olga"} | request)
        assert len(str(told.value)) < 500
    assert store.keys() == []


def test_before_the_first_key_nothing_is_found_and_nothing_is_made(url: str, tmp_path: Path, store: KeyStore) -> None:
    assert store.keys() == []
    assert store.find("0" * 64) is None
    assert store.session("0" * 64) is None
    store.end_session("0" * 64)
    for asked in (store.key, lambda key: store.revoke(key, "bo"), store.begin_session):
        with pytest.raises(KeyNotFound):
            asked("0" * 12)
    assert [*tmp_path.iterdir()] == []
    if url.startswith("postgresql"):
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT to_regnamespace('odograph_access')").fetchone() == (None,)


# No token is kept


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("careless", [False, True])
def test_no_token_or_cookie_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, careless: bool
) -> None:
    if careless:  # the broken one keeps the secret itself
        monkeypatch.setattr(keys_module, "digest_of_token", lambda token: token)
    with connect_keys(f"sqlite:///{tmp_path}/ledger.db") as store:
        first = first_owner(store)
        token, key = owner(store)
        secret, _ = store.begin_session(key.id)
        store.keys()  # the log is there as long as somebody reads
        found = bytes_of(tmp_path)
    assert first is not None
    kept = [text.encode() in content for text in (first, token, secret) for content in (found, bytes_of(tmp_path))]
    assert any(kept) == all(kept) == careless
    assert key.digest.encode() in found  # the search finds what is there


@pytest.mark.parametrize("careless", [False, True])
def test_no_token_or_cookie_is_in_the_database(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch, *, careless: bool
) -> None:
    if careless:
        monkeypatch.setattr(keys_module, "digest_of_token", lambda token: token)
    with connect_keys(postgres_url) as store:
        token, key = owner(store)
        secret, _ = store.begin_session(key.id)
    command = [str(postgres.bin("pg_dump")), "--no-owner", postgres_url]
    dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  our own server
    assert key.digest in dump
    assert (token in dump) == (secret in dump) == careless


def test_a_copy_of_the_ledger_carries_no_key(key_store_url: str, tmp_path: Path) -> None:
    with connect_keys(key_store_url) as store, odo.connect(key_store_url) as ledger:
        _, key = owner(store)
        ledger.open_account("jan", odo.Policy(1, 1e-6, filter="zcdp"))
        ledger.backup(tmp_path / "copy.db")
        with (tmp_path / "copy.jsonl").open("w") as file:
            ledger.export(file)
    for copy in (tmp_path / "copy.db", tmp_path / "copy.jsonl"):
        assert b"jan" in copy.read_bytes()
        assert key.digest.encode() not in copy.read_bytes()
        assert key.id.encode() not in copy.read_bytes()


def test_the_files_are_for_their_owner_only(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with connect_keys(f"sqlite:///{tmp_path}/ledger.db") as store:
            first_owner(store)
            store.keys()
            first_owner(store)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        (tmp_path / "other").touch()
        assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o666  # the mask would have let it be
    finally:
        os.umask(mask)
    assert modes == dict.fromkeys(("ledger.db-access", "ledger.db-access-shm", "ledger.db-access-wal"), 0o600)


# Owners


def test_the_first_owner_is_made_once(store: KeyStore) -> None:
    token = first_owner(store)
    assert token is not None
    found = caller_with(store, token)
    assert found is not None
    assert (found.principal, found.role, found.accounts) == ("owner", Role.OWNER, None)
    assert first_owner(store) is None
    owner(store)
    store.revoke(found.api_key_id, "olga")
    assert first_owner(store) is None  # revoked, it was still made


RACE = """
import sys
from odograph.service import key_store as keys
from odograph.service.auth import new_token
store = keys.connect_keys(sys.argv[1])
if sys.argv[2] == "hasty":  # the broken one has looked before it locks, and does not look again
    store._database.read = lambda *_: []
    store._database.write = lambda work, write=store._database.write: write(
        lambda run: work(lambda query, *rest: [] if query == "any_key" else run(query, *rest))
    )
token = new_token()
print("ready", flush=True)
sys.stdin.readline()
print(token if store.first_owner(token) else None)
"""


def race(url: str, defect: str, processes: int = 4) -> list[str]:
    command = [sys.executable, "-c", RACE, url, defect]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own code
        for _ in range(processes)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return [token for racer in racers if (token := racer.communicate()[0].strip()) != "None"]


def judge_race(url: str, tokens: list[str]) -> None:
    with connect_keys(url) as store:
        assert [key.digest for key in listed(store)] == [digest_of_token(token) for token in tokens]
    (token,) = tokens
    assert looks_like_token(token)


def test_of_several_processes_one_makes_the_first_owner(key_store_url: str) -> None:
    judge_race(key_store_url, race(key_store_url, ""))


def test_a_database_that_repeats_its_reads_has_one_first_owner_too(postgres_url: str) -> None:
    name = urlsplit(postgres_url).path[1:]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'".encode())
    judge_race(postgres_url, race(postgres_url, ""))


def test_a_hasty_first_owner_is_caught(key_store_url: str) -> None:
    tokens = race(key_store_url, "hasty", 2)
    assert len(tokens) == 2
    with pytest.raises(AssertionError):
        judge_race(key_store_url, tokens[:1])


def test_the_last_valid_owner_cannot_be_revoked(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = owner(store)
    store.make("ana", "runner", every_account=True, made_by="olga")
    _, passing = store.make("omar", "owner", expires=60, made_by="olga")
    _, revoked = owner(store)
    store.revoke(revoked.id, "olga")
    pass_time(store, 60, monkeypatch)
    with pytest.raises(NotPermitted, match="make another first"):  # one is no owner, one expired, one is revoked
        store.revoke(first.id, "olga")
    assert store.key(first.id) == first
    assert store.revoke(passing.id, "olga").revoked is not None  # which no longer counts
    owner(store)
    assert store.revoke(first.id, "olga").revoked is not None


def revoked_together(stores: list[KeyStore], broken: bool) -> int:  # noqa: FBT001  which one it is
    """Let two owners revoke each other at the same moment; give how many valid ones are left."""
    keys = [owner(stores[0])[1] for _ in stores]
    barrier = threading.Barrier(len(stores))

    def revoke(store: KeyStore, key: ApiKey) -> None:
        def careless(run: RunQuery) -> None:
            run("revoke", store.now(), "bo", key.id)

        barrier.wait()
        try:
            if broken:  # the broken one does not look for others
                store._database.write(careless)  # noqa: SLF001  as above
            else:
                store.revoke(key.id, "bo")
        except NotPermitted:
            pass

    threads = [threading.Thread(target=revoke, args=pair) for pair in zip(stores, keys, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(key.valid_at(stores[0].now()) for key in listed(stores[0]))


@pytest.mark.parametrize("broken", [False, True])
def test_owners_who_revoke_each_other_leave_one(url: str, store: KeyStore, *, broken: bool) -> None:
    stores = [store, store if url == "memory://" else connect_keys(url)]
    assert revoked_together(stores, broken) == (0 if broken else 1)
    for found in stores:
        found.close()


# Sessions


def test_a_session_is_found_by_its_secret_until_it_is_ended(store: KeyStore) -> None:
    _, key = owner(store)
    secret, session = store.begin_session(key.id)
    assert store.session(digest_of_token(secret)) == (session, key)
    assert session.ends == session.began + 8 * 3600 * 1_000_000
    assert len({secret, session.csrf, key.id}) == 3
    assert min(len(secret), len(session.csrf)) == 43
    assert store.session(digest_of_token(session.csrf)) is None
    other, _ = store.begin_session(key.id)
    store.end_session(session.digest)
    assert not signed_in(store, secret)
    assert signed_in(store, other)
    for text in ("", secret, "\ud800", "' OR 1=1 --", "x" * 10**6):
        assert store.session(text) is None
        store.end_session(text)
    assert signed_in(store, other)


def test_a_session_ends_at_its_time_and_never_after_its_key(store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, key = store.make("ana", "auditor", every_account=True, expires=3600, made_by="olga")
    brief, session = store.begin_session(key.id, lasts=60)
    _, long = store.begin_session(key.id)
    assert (session.ends - session.began, long.ends) == (60_000_000, key.expires)
    assert signed_in(store, brief)
    pass_time(store, 60, monkeypatch)
    assert not signed_in(store, brief)
    for lasts in (0, -1, float("nan"), float("inf"), 10**400):
        with pytest.raises(BadRequest, match="lasts"):
            store.begin_session(key.id, lasts=lasts)


@pytest.mark.parametrize("broken", [False, True])
def test_sessions_end_with_their_key(store: KeyStore, *, broken: bool) -> None:
    _, key = owner(store)
    _, other = owner(store)
    own, others = store.begin_session(key.id)[0], store.begin_session(other.id)[0]
    if broken:  # the broken one forgets the sessions
        store._database.write(lambda run: run("revoke", store.now(), "bo", key.id))  # noqa: SLF001  as above
    else:
        store.revoke(key.id, "bo")
    assert signed_in(store, own) == broken
    assert signed_in(store, others)
    with pytest.raises(NotAuthenticated, match="revoked"):
        store.begin_session(key.id)
    if broken:  # and whoever asks the key is not taken in
        found = store.session(digest_of_token(own))
        assert found is not None
        assert not found[1].valid_at(store.now())


def test_sessions_past_their_time_are_deleted_when_others_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect_keys(f"sqlite:///{tmp_path}/ledger.db") as store:
        _, key = owner(store)
        for _ in range(3):
            store.begin_session(key.id, lasts=60)
        pass_time(store, 60, monkeypatch)
        store.begin_session(key.id)
    with closing(sqlite3.connect(tmp_path / "ledger.db-access")) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (1,)


# Durable


KILLED = """
import os, signal, sys
from odograph.service.auth import new_token
from odograph.service.key_store import connect_keys
def die(made):
    os.write(1, made[0].encode())
    os.kill(os.getpid(), signal.SIGKILL)
store = connect_keys(sys.argv[1])
store.first_owner(new_token())
if sys.argv[2] == "early":  # the broken one answers before it commits
    store._database.write = lambda work, write=store._database.write: write(lambda run: die(work(run)))
die(store.make("ana", "analyst", accounts=["jan"], made_by="olga"))
"""


@pytest.mark.parametrize("defect", ["", "early"])
def test_a_key_outlives_the_process_that_made_it(key_store_url: str, defect: str) -> None:
    command = [sys.executable, "-c", KILLED, key_store_url, defect]
    killed = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own code
    assert killed.returncode == -9, killed.stderr
    with connect_keys(key_store_url) as store:
        assert (caller_with(store, killed.stdout) is not None) == (defect == "")
        assert len(store.keys()) == 2 - (defect != "")
        owner(store)  # and the store goes on


SYNCED = """
import os, sys
from odograph.service import key_store as keys_sqlite
from odograph.service.auth import new_token
from odograph.service.key_store import connect_keys
if sys.argv[2] == "OFF":
    os.fsync = lambda _: None
if sys.argv[2]:
    keys_sqlite.open_file = lambda path, timeout, opened=keys_sqlite.open_file: (
        connection := opened(path, timeout), connection.execute(f"PRAGMA synchronous = {sys.argv[2]}"))[0]
store = connect_keys(sys.argv[1])
token = new_token()
store.first_owner(token)
os.write(1, token.encode())
store.keys()  # as long as somebody reads, closing the connection that writes syncs nothing
os.write(2, b"asked")
os.write(1, store.make("ana", "owner", made_by="olga")[0].encode())
"""


@pytest.mark.parametrize("defect", ["", "NORMAL", "OFF"])
def test_a_key_is_synced_before_it_is_answered(tmp_path: Path, defect: str) -> None:
    shim = build_shim(tmp_path)
    command = [sys.executable, "-c", SYNCED, f"sqlite:///{tmp_path}/ledger.db", defect]
    done, calls = traced(command, shim, tmp_path / "calls.log")
    assert done.stderr == "asked"
    first, second = (call for call in calls if call.fd == 1)
    (asked,) = (call for call in calls if call.fd == 2)
    synced = [call.path for call in calls if call.name in SYNCS and not call.error and call.ended <= first.began]
    assert (str(tmp_path) in synced) == (defect != "OFF")  # the name of the new file
    since = [call for call in calls if call.began > asked.ended]
    assert synced_before(since, "*/ledger.db-access-wal", second) == (defect == "")


FORK = """
import os, sys
from odograph.service.key_store import connect_keys
from odograph.service.auth import digest_of_token
store = connect_keys(sys.argv[1])
token, key = store.make("ana", "owner", made_by="olga")
assert store.find(key.digest) == key
child = os.fork()
if child == 0 and sys.platform == "linux":
    files = [os.path.realpath(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd")]
    assert not [file for file in files if "-access" in file], files
mine, _ = store.make("child" if child == 0 else "parent", "owner", made_by="olga")
for _ in range(20):
    assert store.find(digest_of_token(mine)) is not None and store.find(key.digest) == key
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert sorted(key.principal for key in store.keys()) == ["ana", "child", "parent"]
"""


def test_a_forked_process_makes_its_own_connections(key_store_url: str) -> None:
    subprocess.run([sys.executable, "-c", FORK, key_store_url], check=True, timeout=60)  # noqa: S603  our own code


def test_keys_in_memory_are_no_use_in_a_forked_process() -> None:
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", FORK, "memory://"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "cannot be used in a forked process" in done.stderr


# What is stored stays


CHANGES = [
    "DELETE FROM keys",
    "UPDATE keys SET role = 'owner'",
    "UPDATE keys SET digest = id",
    "UPDATE keys SET expires = NULL",
    "UPDATE keys SET revoked = NULL",
    "UPDATE keys SET revoked_by = 'mallory'",
    "UPDATE keys SET retires = NULL",
    "UPDATE keys SET retires = retires + 1",
]


def test_a_key_is_never_deleted_or_changed(key_store_url: str) -> None:
    with connect_keys(key_store_url) as store:
        owner(store)
        _, key = store.make("ana", "analyst", accounts=["jan"], expires=60, made_by="olga")
        store.rotate(key.id, overlap=60, made_by="olga")
        store.revoke(key.id, "olga")
        before = store.keys()
        if key_store_url.startswith("sqlite"):
            with closing(sqlite3.connect(f"{key_store_url.removeprefix('sqlite:///')}-access")) as connection:
                for change in CHANGES:
                    with pytest.raises(sqlite3.IntegrityError):
                        connection.execute(change)
        else:
            for change in [*CHANGES, "TRUNCATE keys CASCADE"]:
                with psycopg.connect(key_store_url, options="-c search_path=odograph_access") as connection:
                    with pytest.raises(psycopg.errors.RaiseException):
                        connection.execute(change.encode())
                    connection.rollback()
        assert store.keys() == before


def test_the_dialects_have_the_same_columns_and_every_query_is_used() -> None:
    def columns(dialect: str) -> list[list[str]]:
        tables = [part.partition(");")[0] for part in schema(dialect).split("CREATE TABLE ")[1:]]
        lines = [[line.split()[0] for line in table.splitlines() if line.startswith("    ")] for table in tables]
        return [names for names in lines if names]

    folder = Path(keys_module.__file__).parent
    assert columns("sqlite") == columns("postgres")
    assert [len(names) for names in columns("sqlite")] == [14, 5]
    assert len([*statements(schema("sqlite"))]) == 8
    code = (folder / "key_store.py").read_text()
    for dialect in ("sqlite", "postgres"):
        assert [name for name in queries(dialect) if f'"{name}"' not in code] == []


# Rotation


def test_a_rotated_key_opens_the_same_until_the_overlap_ends(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, old = store.make("ana", "runner", accounts=["jan"], expires=1000, made_by="olga")
    secret, _ = store.begin_session(old.id)
    fresh, key = store.rotate(old.id, overlap=60, made_by="olga", request="r-1")
    caller, other = caller_with(store, token), caller_with(store, fresh)
    assert caller is not None
    assert other == replace(caller, api_key_id=key.id, expires=key.expires)
    assert key.expires == key.made + 1_000_000_000
    assert caller.expires is not None
    assert caller.expires - key.made <= 60_000_000
    pass_time(store, 60, monkeypatch)
    assert caller_with(store, token) is None
    found = store.session(digest_of_token(secret))
    assert found is None or not found[1].valid_at(store.now())
    assert caller_with(store, fresh) is not None


def test_an_overlap_never_lengthens_the_life_of_a_key(store: KeyStore) -> None:
    _, old = store.make("ana", "runner", accounts=["jan"], expires=60, made_by="olga")
    store.rotate(old.id, overlap=10_000, made_by="olga")
    assert store.key(old.id).expires == old.expires


def test_without_an_overlap_the_old_key_and_its_sessions_end(store: KeyStore) -> None:
    token, old = owner(store)
    secret, _ = store.begin_session(old.id)
    fresh, key = store.rotate(old.id, made_by="olga")  # also of the only owner: there is another one now
    assert caller_with(store, token) is None
    assert not signed_in(store, secret)
    assert caller_with(store, fresh) is not None
    assert store.key(old.id).revoked_by == "olga"
    with pytest.raises(NotPermitted, match="last valid owner"):
        store.revoke(key.id, "olga")


def test_a_retired_key_can_still_be_revoked_at_once_and_is_no_owner_that_lasts(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, old = owner(store)
    _, key = store.rotate(old.id, overlap=3600, made_by="olga")
    with pytest.raises(NotPermitted, match="last valid owner"):  # in an hour no owner would be left
        store.revoke(key.id, "olga")
    pass_time(store, 3600, monkeypatch)
    with pytest.raises(NotPermitted, match="last valid owner"):
        store.revoke(key.id, "olga")
    monkeypatch.undo()
    store.revoke(old.id, "olga")
    assert caller_with(store, token) is None


def test_a_key_is_rotated_once_and_a_request_makes_one_key(store: KeyStore) -> None:
    _, old = owner(store)
    store.rotate(old.id, overlap=60, made_by="olga", request="r-1")
    before = store.keys()
    with pytest.raises(IdempotencyConflict, match="already made key"):
        store.rotate(old.id, overlap=60, made_by="olga", request="r-1")
    with pytest.raises(NotPermitted, match="rotated before"):
        store.rotate(old.id, overlap=60, made_by="olga", request="r-2")
    gone = store.make("ana", "analyst", accounts=["jan"], made_by="olga")[1]
    store.revoke(gone.id, "olga")
    with pytest.raises(NotPermitted, match="make a new key"):
        store.rotate(gone.id, made_by="olga")
    for overlap in (-1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(BadRequest, match="overlap"):
            store.rotate(old.id, overlap=overlap, made_by="olga")  # type: ignore[arg-type]
    assert store.keys()[1:] == before


def test_the_keys_of_release_0_1_can_be_rotated(key_store_url: str) -> None:
    with connect_keys(key_store_url) as store:
        token, old = owner(store)
    if key_store_url.startswith("sqlite"):
        with closing(sqlite3.connect(f"{key_store_url.removeprefix('sqlite:///')}-access")) as connection:
            connection.execute("DROP TRIGGER keys_stay_retired")
            connection.execute("ALTER TABLE keys DROP COLUMN retires")
            connection.execute("PRAGMA user_version = 1")
    else:
        with psycopg.connect(key_store_url, options="-c search_path=odograph_access") as connection:
            connection.execute("DROP TRIGGER keys_stay_retired ON keys")
            connection.execute("ALTER TABLE keys DROP COLUMN retires")
            connection.execute("UPDATE schema_version SET version = 1")
    with connect_keys(key_store_url) as store, connect_keys(key_store_url) as other:
        assert caller_with(store, token) is not None
        assert other.rotate(old.id, overlap=60, made_by="olga")[1].principal == "olga"
        assert len(store.keys()) == 2
        with pytest.raises(NotPermitted, match="rotated before"):
            store.rotate(old.id, made_by="olga")


# What can go wrong with the place


@pytest.mark.parametrize("url", ["https://odograph.example", "ftp://x", "sqlite://", "", "privacy.db"])
def test_only_a_ledger_of_ones_own_has_keys(url: str) -> None:
    with pytest.raises(OdographError):
        connect_keys(url)


def test_a_link_to_a_ledger_leads_to_the_same_keys(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("ledger.db")
    with (
        connect_keys(f"sqlite:///{tmp_path}/ledger.db") as one,
        connect_keys(f"sqlite:///{tmp_path}/link.db") as other,
    ):
        token, key = owner(one)
        owner(other)
        assert caller_with(other, token) is not None
        one.revoke(key.id, "olga")
        assert caller_with(other, token) is None


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_taken_away_opens_nothing(file: Path, *, replaced: bool) -> None:
    with connect_keys(f"sqlite:///{file.parent}/ledger.db") as store:
        (key,) = store.keys()
        assert store.find(key.digest) == key
        if replaced:
            Path(shutil.copy(file, f"{file}-copy")).replace(file)
        else:
            file.unlink()
        for use in (lambda: store.find(key.digest), lambda: owner(store)):
            with pytest.raises(LedgerError, match=r"moved or replaced|unable to open"):
                use()


def test_what_is_left_over_of_other_keys_is_not_taken_over(tmp_path: Path) -> None:
    left = tmp_path / "ledger.db-access-wal"
    left.touch()
    with connect_keys(f"sqlite:///{tmp_path}/ledger.db") as store, pytest.raises(LedgerError, match="left over"):
        first_owner(store)
    assert [*tmp_path.iterdir()] == [left]


def test_a_file_of_another_kind_or_schema_is_left_as_it_is(file: Path) -> None:
    with connect_keys(f"sqlite:///{file.parent}/ledger.db") as store:
        for pragma, message in (("user_version = 3", "upgrade"), ("application_id = 1", "is not a key store")):
            with closing(sqlite3.connect(file)) as connection:
                connection.execute(f"PRAGMA {pragma}")
            before = file.read_bytes()
            for use in (store.keys, lambda: first_owner(store), lambda: owner(store)):
                with pytest.raises(LedgerError, match=message):
                    use()
            assert file.read_bytes() == before
        file.write_bytes(b"not a database at all" * 1000)
        with pytest.raises(LedgerCorrupt, match="damaged"):
            store.keys()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such.db", tmp_path / ("x" * 300)):
        with (
            connect_keys(f"sqlite:///{path}") as store,
            pytest.raises(LedgerError, match=r"keys cannot be stored at"),
        ):
            first_owner(store)


def test_keys_are_read_while_another_process_writes_and_a_writer_does_not_wait_for_ever(key_store_url: str) -> None:
    with connect_keys(key_store_url, timeout=0.2) as store:
        token, _ = owner(store)
        if key_store_url.startswith("sqlite"):
            holder: Any = sqlite3.connect(f"{key_store_url.removeprefix('sqlite:///')}-access", isolation_level=None)
            holder.execute("BEGIN IMMEDIATE")
        else:
            holder = psycopg.connect(key_store_url)
            holder.execute("SELECT pg_advisory_xact_lock(7310046181402)")
        with closing(holder):
            assert caller_with(store, token) is not None
            with pytest.raises(LedgerBusy, match="Try again"):
                owner(store)
        assert len(store.keys()) == 1
        owner(store)


def test_a_connection_that_was_lost_is_made_again(postgres_url: str) -> None:
    with connect_keys(postgres_url) as store, psycopg.connect(postgres_url, autocommit=True) as other:
        token, _ = owner(store)
        assert caller_with(store, token) is not None
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert caller_with(store, token) is not None


def test_a_database_of_another_schema_is_left_as_it_is_and_a_password_is_not_shown(postgres_url: str) -> None:
    with connect_keys(postgres_url) as store:
        owner(store)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("UPDATE odograph_access.schema_version SET version = 3")
    with connect_keys(postgres_url) as store:
        assert urlsplit(postgres_url).password not in store.url.split(":")
        for use in (store.keys, lambda: owner(store)):
            with pytest.raises(LedgerError, match="upgrade") as told:
                use()
            assert str(urlsplit(postgres_url).password) not in str(told.value)
    with connect_keys("postgresql://ana:hidden@127.0.0.1:1/x") as store, pytest.raises(LedgerBusy) as told:
        store.keys()
    assert "hidden" not in str(told.value)


def test_a_server_that_does_not_sync_is_refused() -> None:
    with PostgresServer(options={"fsync": "off"}) as server:
        with connect_keys(server.url) as store, pytest.raises(LedgerError, match="fsync=off"):
            first_owner(store)
        with connect_keys(server.url, accept_fsync_off=True) as store:
            assert first_owner(store)


# The command line


@pytest.fixture
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ODOGRAPH_URL", raising=False)
    monkeypatch.setenv("COLUMNS", "300")


def told(*arguments: str) -> str:
    return CliRunner().invoke(keys_app, arguments, catch_exceptions=False).stdout


@pytest.mark.usefixtures("_own_folder")
def test_the_command_line_makes_lists_and_revokes(tmp_path: Path) -> None:
    assert "there are no keys" in told("list")
    assert [*tmp_path.iterdir()] == []
    token = told("make", "olga", "--role", "owner").removesuffix("\n")
    assert looks_like_token(token)
    with odo.connect("sqlite:///privacy.db") as ledger:
        for name in ("jan", "feb"):
            ledger.open_account(name, odo.Policy(1, 0, filter="basic"))
    with pytest.raises(BadRequest, match="did you mean 'jan'"):
        told("make", "ana", "--role", "analyst", "--account", "jann")
    made = json.loads(
        told("make", "ana", "--role", "analyst", "--account", "jan", "--account", "feb", "--expires", "60", "--json")
    )
    assert looks_like_token(made["token"])
    assert (made["key"]["accounts"], made["key"]["role"]) == (["feb", "jan"], "analyst")
    with connect_keys("sqlite:///privacy.db") as store:
        assert caller_with(store, token) is not None
        assert caller_with(store, made["token"]) is not None
    told("make", "[bold]ben", "--role", "auditor", "--every-account")
    assert "is revoked since" in told("revoke", made["key"]["id"])
    listed = json.loads(told("list", "--json"))["keys"]
    assert [(key["principal"], key["valid"]) for key in listed] == [
        ("[bold]ben", True),
        ("ana", False),
        ("olga", True),
    ]
    table = told("list")
    assert "[bold]ben" in table
    assert "feb jan" in table
    assert token not in table
    assert made["token"] not in table


@pytest.mark.usefixtures("_own_folder")
def test_the_command_line_rotates(tmp_path: Path) -> None:
    with odo.connect("sqlite:///privacy.db") as ledger:
        ledger.open_account("jan", odo.Policy(1, 0, filter="basic"))
    made = json.loads(told("make", "ana", "--role", "runner", "--account", "jan", "--json"))
    fresh = told("rotate", made["key"]["id"], "--overlap", "3600").removesuffix("\n")
    (new, old) = json.loads(told("list", "--json"))["keys"]
    assert (new["principal"], new["accounts"], new["role"]) == ("ana", ["jan"], "runner")
    assert (old["valid"], old["revoked"], old["expires"] is None) == (True, None, False)
    told("rotate", new["id"], "--out", "token")
    with connect_keys("sqlite:///privacy.db") as store:
        assert caller_with(store, made["token"]) is not None
        assert caller_with(store, fresh) is None
        assert caller_with(store, (tmp_path / "token").read_text().strip()) is not None


@pytest.mark.usefixtures("_own_folder")
def test_a_token_goes_to_a_new_private_file(tmp_path: Path) -> None:
    out = tmp_path / "token"
    told_json = told("make", "olga", "--role", "owner", "--out", "token", "--json")
    token = out.read_text().removesuffix("\n")
    assert looks_like_token(token)
    assert token not in told_json
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        told("make", "omar", "--role", "owner", "--out", "token")
    assert out.read_text() == f"{token}\n"
    with pytest.raises(BadRequest, match="at least one account"):
        told("make", "ana", "--role", "analyst", "--out", "other")
    assert not (tmp_path / "other").exists()
    with connect_keys("sqlite:///privacy.db") as store:
        assert [key.principal for key in listed(store)] == ["olga"]


@pytest.mark.usefixtures("_own_folder")
def test_the_command_line_refuses_what_the_store_does() -> None:
    told("make", "olga", "--role", "owner")
    (key,) = json.loads(told("list", "--json"))["keys"]
    with pytest.raises(NotPermitted, match="make another first"):
        told("revoke", key["id"])
    with pytest.raises(KeyNotFound):
        told("revoke", "0" * 12)
    with pytest.raises(InvalidArgument, match="must not be in memory"):
        told("list", "--url", "memory://")
    result = CliRunner().invoke(keys_app, ["make", "ana", "--role", "root"])
    assert result.exit_code == 2
