"""What a worker remembers of keys, and when it forgets: a key that is gone opens nothing after a second."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final, TypeAlias

import attacks
import pytest
from service_server import ServiceThread

from odograph.errors import LedgerBusy
from odograph.service.auth import ApiKey, digest_of_token
from odograph.service.key_store import KeyStore, connect_keys
from odograph.service.state import AppState

KEY_LOOKUP_TTL: Final = 1.0  # seconds for which a worker may believe a key without looking again
SLOW: Final = 2.0  # seconds that a look-up may take
AFTER: Final = 0.3  # seconds in which it must not be believed again

Taken: TypeAlias = Callable[[ServiceThread, str, pytest.MonkeyPatch], None]


def revoke(service: ServiceThread, token: str, _: pytest.MonkeyPatch) -> None:
    """Revoke a key, as another process does."""
    with connect_keys(service.settings.url) as keys:
        found = keys.find(digest_of_token(token))
        assert found is not None
        keys.revoke(found.id, "test")


def delete(service: ServiceThread, token: str, _: pytest.MonkeyPatch) -> None:
    """Let a key never have been, as when an earlier copy of the key store is put in place."""
    path = f"{service.settings.url.removeprefix('sqlite:///')}-access"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER keys_remain")
        found = connection.execute("DELETE FROM keys WHERE digest = ?", (digest_of_token(token),))
        assert found.rowcount == 1


def hide(_: ServiceThread, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a key be out of reach, as when the database is away."""
    find, digest = KeyStore.find, digest_of_token(token)

    def reaching(self: KeyStore, asked: str) -> ApiKey | None:
        if asked == digest:
            raise LedgerBusy("the keys cannot be reached")
        return find(self, asked)

    monkeypatch.setattr(KeyStore, "find", reaching)


WAYS: Final[dict[Taken, int]] = {revoke: 401, delete: 401, hide: 503}


def check_forgotten(service: ServiceThread, monkeypatch: pytest.MonkeyPatch, take: Taken) -> None:
    """Assert that a key that is taken away opens nothing after a second and from then on, used all along."""
    token = service.token("rita", "analyst")
    with attacks.reach(service, token) as analyst, attacks.owner_of(service) as owner:
        assert analyst.get("/v1/me").status_code == 200
        take(service, token, monkeypatch)
        end = time.monotonic() + KEY_LOOKUP_TTL
        while time.monotonic() < end:
            assert analyst.get("/v1/me").status_code in {200, WAYS[take]}
        asked = 0
        while time.monotonic() < end + AFTER or asked < 5:  # also where the machine stood still for a while
            assert analyst.get("/v1/me").status_code == WAYS[take]
            asked += 1
        assert owner.get("/v1/me").status_code == 200, "the others keep theirs"


@pytest.mark.parametrize("take", WAYS)
def test_a_key_that_is_revoked_or_gone_or_out_of_reach_opens_nothing_after_a_second(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, take: Taken
) -> None:
    check_forgotten(service, monkeypatch, take)


@pytest.mark.parametrize("take", WAYS)
def test_a_cache_that_keeps_a_key_that_it_no_longer_finds_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, take: Taken
) -> None:
    look_up = AppState._look_up  # noqa: SLF001  what is broken on purpose

    async def keeping(self: AppState, digest: str, begun: float) -> object:
        before = self._known.get(digest)
        try:
            return await look_up(self, digest, begun)
        finally:
            if before is not None:
                self._known[digest] = before._replace(looked_up=time.monotonic())

    monkeypatch.setattr(AppState, "_look_up", keeping)
    with pytest.raises(AssertionError):
        check_forgotten(service, monkeypatch, take)


def seconds_believed_during_a_slow_lookup(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> float:
    """Revoke a key while its look-ups take long and many ask; return for how many seconds it opened something."""
    token, find = service.token("rita", "analyst"), KeyStore.find
    revoked, latest, digest = time.monotonic(), [0.0], digest_of_token(token)

    def slowly(self: KeyStore, asked: str) -> ApiKey | None:
        if asked == digest:
            time.sleep(SLOW)
        return find(self, asked)

    def ask() -> None:
        with attacks.reach(service, token) as analyst:
            while time.monotonic() < revoked + SLOW + KEY_LOOKUP_TTL:
                if analyst.get("/v1/me").status_code == 200:
                    latest.append(time.monotonic() - revoked)
                time.sleep(0.01)

    with attacks.reach(service, token) as analyst:
        assert analyst.get("/v1/me").status_code == 200
    revoke(service, token, monkeypatch)
    monkeypatch.setattr(KeyStore, "find", slowly)
    revoked = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(latest)


def test_a_revoked_key_opens_nothing_after_a_second_also_while_looking_it_up_takes_long(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seconds_believed_during_a_slow_lookup(service, monkeypatch) <= KEY_LOOKUP_TTL


def test_a_cache_that_believes_a_key_anew_while_it_looks_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = AppState._look_up  # noqa: SLF001  what is broken on purpose

    async def believing(self: AppState, digest: str, begun: float) -> object:
        before = self._known.get(digest)
        if before is not None:
            self._known[digest] = before._replace(looked_up=time.monotonic())
        return await look_up(self, digest, begun)

    monkeypatch.setattr(AppState, "_look_up", believing)
    assert seconds_believed_during_a_slow_lookup(service, monkeypatch) > KEY_LOOKUP_TTL


def lookups_of_concurrent_requests(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let many ask at once with a key that nobody knows yet; return how often it was looked up."""
    token, find, looked = service.token("rita", "analyst"), KeyStore.find, list[float]()
    digest, together = digest_of_token(token), threading.Barrier(8)

    def slowly(self: KeyStore, asked: str) -> ApiKey | None:
        if asked == digest:
            looked.append(time.monotonic())
            time.sleep(KEY_LOOKUP_TTL / 2)
        return find(self, asked)

    def ask() -> None:
        with attacks.reach(service, token) as analyst:
            together.wait()
            assert analyst.get("/v1/me").status_code == 200

    monkeypatch.setattr(KeyStore, "find", slowly)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(looked)


def test_those_who_ask_at_once_share_one_look(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        lookups_of_concurrent_requests(service, monkeypatch) <= 2
    )  # a second one, if the machine stood still in between


def test_a_lookup_for_each_request_would_be_caught(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    look = AppState._look  # noqa: SLF001  what is broken on purpose

    def alone(self: AppState, digest: str) -> object:
        self._looking.pop(digest, None)
        return look(self, digest)

    monkeypatch.setattr(AppState, "_look", alone)
    assert lookups_of_concurrent_requests(service, monkeypatch) > 2


def admitted_by_an_old_look(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Revoke a key right after a slow look has read it; say whether it opens something for who asks much later."""
    token, find, read = service.token("rita", "analyst"), KeyStore.find, threading.Event()
    digest = digest_of_token(token)

    def slowly(self: KeyStore, asked: str) -> ApiKey | None:
        found = find(self, asked)
        if asked == digest:
            read.set()
            time.sleep(SLOW)
        return found

    def ask() -> int:
        with attacks.reach(service, token) as analyst:
            return analyst.get("/v1/me").status_code

    monkeypatch.setattr(KeyStore, "find", slowly)
    first = threading.Thread(target=ask)
    first.start()
    assert read.wait(10)
    monkeypatch.setattr(KeyStore, "find", find)
    revoke(service, token, monkeypatch)
    time.sleep(1.2 * KEY_LOOKUP_TTL)
    status = ask()
    first.join()
    return status == 200


def test_a_look_that_began_more_than_a_second_ago_is_shared_with_nobody(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not admitted_by_an_old_look(service, monkeypatch)


def test_a_cache_that_shares_a_lookup_however_old_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = AppState._look  # noqa: SLF001  what is broken on purpose
    monkeypatch.setattr(AppState, "_look", lambda self, digest: self._looking.get(digest) or look(self, digest))
    assert admitted_by_an_old_look(service, monkeypatch)
