"""How often a key may ask, and how the service may be run at all."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_client import visitor_of
from service_server import ServiceThread

from odograph.errors import InvalidArgument
from odograph.service.auth import RateLimit
from odograph.service.settings import VARIABLE, Settings

SECOND = 1_000_000_000


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 5 * SECOND

    def __call__(self) -> int:
        return self.now


class Hoarding(RateLimit):
    """A broken twin: what was not used is kept for later without end."""

    def take(self, key: str, count: int = 1) -> float:
        wait = super().take(key, count)
        if wait == 0.0 and count == 1:
            self._full_at[key] -= 3 * self._token // 2
        return wait


def admitted(limit: RateLimit, clock: Clock, asked: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ask at the given distances in time, and return when how many were admitted."""
    taken = []
    for later, count in asked:
        clock.now += later
        if limit.take("key", count) == 0.0:
            taken.append((clock.now, count))
    return taken


def is_within(taken: list[tuple[int, int]], rate: float, burst: float) -> bool:
    """The checker: whether no window has more than its burst and what the rate fills in."""
    return all(
        sum(count for _, count in taken[i:j])
        <= Fraction(burst) + Fraction(rate) * Fraction(taken[j - 1][0] - taken[i][0], SECOND)
        for i in range(len(taken))
        for j in range(i + 1, len(taken) + 1)
    )


ASKED = st.lists(st.tuples(st.integers(0, 3 * SECOND), st.integers(1, 5)), max_size=40)


@given(ASKED, st.floats(0.01, 1000), st.floats(1, 20))
def test_no_window_admits_more_than_the_burst_and_what_the_rate_fills_in(
    asked: list[tuple[int, int]], rate: float, burst: float
) -> None:
    clock = Clock()
    limit = RateLimit(rate, burst, clock=clock)
    assert is_within(admitted(limit, clock, asked), rate, burst)


def test_a_bucket_that_gives_tokens_away_is_caught() -> None:
    clock = Clock()
    asked = [(SECOND // 100, 1)] * 40
    assert not is_within(admitted(Hoarding(1, 5, clock=clock), clock, asked), 1, 5)
    clock = Clock()
    assert is_within(admitted(RateLimit(1, 5, clock=clock), clock, asked), 1, 5)


@given(ASKED, st.floats(0.01, 1000), st.integers(5, 20))
def test_the_wait_that_is_named_is_enough_and_no_less_would_be(
    asked: list[tuple[int, int]], rate: float, burst: float
) -> None:
    clock = Clock()
    limit = RateLimit(rate, burst, clock=clock)
    admitted(limit, clock, asked)
    wait = limit.take("key", 5)
    if wait > 0.0:
        clock.now += round(wait * SECOND) - 1
        assert limit.take("key", 5) > 0.0
        clock.now += 1
        assert limit.take("key", 5) == 0.0


def test_one_key_does_not_use_up_what_another_has() -> None:
    clock = Clock()
    limit = RateLimit(1, 3, clock=clock)
    assert [limit.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    assert limit.take("b") == 0.0


def test_the_burst_is_twice_the_rate_unless_it_is_said_and_at_least_one() -> None:
    clock = Clock()
    limit = RateLimit(2, clock=clock)
    assert [limit.take("a") for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 0.5]
    slow = RateLimit(0.1, clock=clock)
    assert [slow.take("a"), slow.take("a")] == [0.0, 10.0]


def test_a_rate_of_zero_is_no_limit() -> None:
    limit = RateLimit(0, clock=Clock())
    assert {limit.take("a", 10**6) for _ in range(1000)} == {0.0}


def test_more_than_a_bucket_holds_is_never_there() -> None:
    assert RateLimit(1, 5, clock=Clock()).take("a", 6) == math.inf


def test_full_buckets_are_forgotten_and_others_are_not() -> None:
    clock = Clock()
    limit = RateLimit(1000, 2000, clock=clock)
    for i in range(50_000):
        clock.now += SECOND // 1000
        limit.take(f"key {i}")
    assert len(limit) <= 1025
    busy = RateLimit(1000, 2000, clock=Clock())
    for i in range(5000):
        busy.take(f"key {i}")
    assert len(busy) == 5000  # control: none of these is full yet, so none may be forgotten


@pytest.mark.parametrize(
    ("rate", "burst"), [(-1, None), (math.nan, None), (math.inf, None), (1e10, None), (1, 0.5), (1, math.nan)]
)
def test_a_limit_that_is_no_number_of_requests_is_refused(rate: float, burst: float | None) -> None:
    with pytest.raises(InvalidArgument, match="must be"):
        RateLimit(rate, burst)


FILE = "sqlite:///privacy.db"
SERVER = "postgresql://user:hunter2@db/ledger"
PEM = Path("a.pem")


@pytest.mark.parametrize(
    "settings",
    [
        Settings(FILE),
        Settings(SERVER, workers=4),
        Settings(FILE, host="localhost", rate=0),
        Settings(FILE, host="127.8.9.1"),
        Settings(FILE, host="::1", port=0),
        Settings(FILE, host="0.0.0.0", plain_http=True),  # noqa: S104  what is tested
        Settings(FILE, host="privacy.example.org", tls_cert=PEM, tls_key=PEM),
    ],
)
def test_settings_that_are_safe_are_taken(settings: Settings) -> None:
    settings.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("memory://"), "must be a durable ledger"),
        (Settings("https://privacy.example.org"), "got another service"),
        (Settings("privacy.db"), "sqlite:///privacy.db"),
        (
            Settings(FILE, workers=2),
            "workers must be 1 for a SQLite ledger",
        ),
        (Settings(FILE, host="0.0.0.0"), "--plain-http, or pass --tls-cert"),  # noqa: S104
        (Settings(FILE, host="::"), "sent unencrypted"),
        (Settings(FILE, host=""), "sent unencrypted"),
        (Settings(FILE, host="127.0.0.1.example.org"), "sent unencrypted"),
        (Settings(FILE, host="localhost.example.org"), "sent unencrypted"),
        (Settings(FILE, tls_cert=PEM), "both a certificate and its key"),
        (Settings(FILE, tls_key=PEM, host="::"), "both a certificate and its key"),
        (Settings(FILE, port=70_000), "port must be from 0"),
        (Settings(SERVER, workers=0), "workers must be from 1"),
        (Settings(FILE, timeout=math.nan), "timeout must be"),
        (Settings(FILE, rate=-1), "rate must be"),
        (Settings(FILE, log_level="loud"), "log_level must be one of"),
    ],
)
def test_settings_that_are_not_safe_are_refused(settings: Settings, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        settings.check()


def test_worker_processes_read_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    for settings in (
        Settings(SERVER, workers=3, burst=7.0, owner_key_file=Path("owner.key"), accept_fsync_off=True),
        Settings(FILE, host="::", tls_cert=PEM, tls_key=PEM),
    ):
        os.environ.update(settings.environment)
        assert Settings.from_environment() == settings


@pytest.mark.parametrize("text", [None, "", "{}", "[]", "7"])
def test_an_environment_without_settings_says_how_to_start(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidArgument, match="odograph serve"):
        Settings.from_environment()


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(Settings(SERVER))
    with pytest.raises(InvalidArgument) as caught:
        Settings(SERVER.replace("postgresql", "mysql")).check()
    assert "hunter2" not in str(caught.value)


def test_cookies_are_for_tls_only_where_there_is_tls() -> None:
    assert not Settings(FILE).secure_cookies
    assert Settings(FILE, plain_http=True).secure_cookies
    assert Settings(FILE, tls_cert=PEM, tls_key=PEM).secure_cookies


def test_a_page_that_is_asked_for_too_often_says_when_to_try_again(tmp_path: Path) -> None:
    with ServiceThread(f"sqlite:///{tmp_path}/served.db", rate=0.1, burst=3.0) as service:
        visitor = visitor_of(service)
        answers = [visitor.get("/audit") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert "retry-after" not in answers[0].headers
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 10
