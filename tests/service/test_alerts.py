"""Alerts on budgets against a real receiver: one that fails, hangs and comes back, and a service that is killed."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
from page_client import visitor_of
from service_process import Service, wait_until
from service_server import ServiceThread

import odograph as odo
from odograph.errors import InvalidArgument
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores import memory
from odograph.service import monitoring
from odograph.service.dashboard.pages import render_fragment
from odograph.service.monitoring import Alert, Alerts, Leader, Rules, Sender, Webhook, rules_of

SECRET: Final = "0123456789abcdef0123456789abcdef"  # noqa: S105  of a receiver on this machine
POLICY: Final = odo.Policy(1, 0, filter="basic")
HOUR: Final = 3600


class Receiver:
    """A receiver of webhooks that answers with a status, or not at all for as long as `hangs`."""

    def __init__(self) -> None:
        self.status = 200
        self.hangs = threading.Event()
        self.attempts = 0
        self.accepted: list[dict[str, Any]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.attempts += 1
                if receiver.hangs.is_set():
                    time.sleep(1)
                    return
                if receiver.status == 200:
                    receiver.accepted.append(checked(self.headers, body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/token-in-the-path"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def ids(self) -> list[str]:
        return [alert["id"] for alert in self.accepted]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def checked(headers: Any, body: bytes) -> dict[str, Any]:  # noqa: ANN401  as an HTTP server has them
    """Return what was sent, after checking its signature as a receiver does."""
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(SECRET.encode(), signed, "sha256")).decode()
    assert hmac.compare_digest(headers["webhook-signature"], f"v1,{expected}")
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 300
    found: dict[str, Any] = json.loads(body)
    assert found["id"] == headers["webhook-id"]
    return found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def document(folder: Path, receiver: Receiver, **rules: object) -> dict[str, Any]:
    """Return rules that send to the receiver, looking often."""
    (folder / "secret").write_text(SECRET, encoding="ascii")
    return {"interval": 0.05, "webhook": {"url": receiver.url, "secret_file": str(folder / "secret")}} | rules


@contextmanager
def served(folder: Path, receiver: Receiver, url: str = "") -> Iterator[ServiceThread]:
    with ServiceThread(url or f"sqlite:///{folder}/served.db", alerts=document(folder, receiver)) as service:
        yield service


def spend(ledger: Ledger, name: str, epsilon: str) -> None:
    ledger.account(name).spend(odo.PureDP(epsilon))


# What is active.


def active(ledger: Ledger, rules: Rules = Rules(), names: list[str] | None = None) -> list[tuple[str, float | None]]:  # noqa: B008  a constant
    return [(one.account, one.threshold) for one in Alerts(rules).active(ledger, names) if one.kind == "threshold"]


def test_the_highest_threshold_that_is_reached_is_active() -> None:
    with odo.connect("memory://") as ledger:
        assert active(ledger) == []
        for name in ("maps", "tests-1", "unlimited", "quiet"):
            policy = odo.Policy(None, 1e-6) if name == "unlimited" else POLICY
            ledger.open_account(name, policy)
            spend(ledger, name, "0.001")
        expected = {"0.498": [], "0.001": [("maps", 50.0)], "0.3": [("maps", 80.0)], "0.15": [("maps", 95.0)]}
        for epsilon, found in expected.items():
            spend(ledger, "maps", epsilon)
            assert active(ledger) == found
        rules = rules_of({"accounts": {"tests-*": [0.1, 10], "ma*": [], "*": [1]}})
        assert active(ledger, rules) == [("tests-1", 0.1)]
        assert active(ledger, names=["quiet", "nothing"]) == []
        assert active(ledger, names=["maps", "nothing"]) != []
        ledger.account("maps").close()
        assert active(ledger) == []


class Clock:
    """Time that passes when it is told to, for the store and for the alerts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_900_000_000 * 10**9
        monkeypatch.setattr(memory, "time", SimpleNamespace(time_ns=lambda: self.now, monotonic=time.monotonic))

    def __call__(self) -> int:
        return self.now

    def spend(self, account: odo.LedgerAccount, times: int, epsilon: str, *, every: float) -> None:
        for _ in range(times):
            self.now += round(every * HOUR * 10**9)
            account.spend(odo.PureDP(epsilon))


def forecast(ledger: Ledger, clock: Clock) -> Alert | None:
    return next((one for one in Alerts(clock=clock).active(ledger) if one.kind == "pace"), None)


def test_an_account_that_will_be_empty_within_the_horizon_is_told_with_the_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("maps", POLICY)
        clock.spend(account, 20, "0.01", every=10)  # 20% in 200 hours: empty after 33 days more
        assert forecast(ledger, clock) is None
        clock.spend(account, 40, "0.01", every=1)
        found = forecast(ledger, clock)
        assert found is not None
        # In the last 168 hours 13 charges were slow and 40 quick: 53%. The 40% that are left last 127 hours.
        assert (found.charges, found.window_seconds) == (53, 168 * HOUR)
        runs_out = clock.now / 1e9 + 168 * HOUR * 0.40 / 0.53
        assert found.runs_out is not None
        assert abs(datetime.fromisoformat(found.runs_out).timestamp() - runs_out) < 2


@pytest.mark.parametrize(("times", "epsilon", "every"), [(2, "0.3", 24.0), (4, "0.2", 24.0), (9, "0.1", 0.5)])
def test_few_charges_or_a_burst_are_no_pace(
    monkeypatch: pytest.MonkeyPatch, times: int, epsilon: str, every: float
) -> None:
    clock = Clock(monkeypatch)
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("maps", POLICY)
        clock.spend(account, times, epsilon, every=every)
        assert forecast(ledger, clock) is None
        monkeypatch.setattr(monitoring, "_MIN_CHARGES", 1)
        monkeypatch.setattr(monitoring, "_MIN_SPAN", 0)
        assert forecast(ledger, clock) is not None, "the control: two points make an alarm"


def test_voided_charges_and_old_ones_are_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("maps", POLICY)
        clock.spend(account, 9, "0.1", every=10)
        assert forecast(ledger, clock) is not None
        clock.now += 169 * HOUR * 10**9
        assert forecast(ledger, clock) is None
        other = ledger.open_account("other", POLICY)
        for _ in range(9):
            clock.now += 10 * HOUR * 10**9
            other.reserve(odo.PureDP("0.1")).void("not run")
        spend(ledger, "other", "0.001")
        assert forecast(ledger, clock) is None


# Sending.


def test_each_alert_is_sent_once_signed_and_logged(tmp_path: Path, receiver: Receiver) -> None:
    with served(tmp_path, receiver) as service, odo.connect(service.url, token=service.token()) as ledger:
        ledger.open_account("maps", POLICY)
        spend(ledger, "maps", "0.6")
        wait_until(lambda: len(receiver.accepted) == 1)
        spend(ledger, "maps", "0.36")
        wait_until(lambda: len(receiver.accepted) == 2)
        time.sleep(0.3)  # several looks
        assert [alert["threshold"] for alert in receiver.accepted] == [50, 95]
        assert receiver.accepted[1]["message"] == "maps has spent 96% of its budget; the alert is at 95%"
        assert receiver.attempts == 2


@pytest.mark.parametrize("failing", ["500", "hangs", "404"])
def test_a_receiver_that_fails_gets_it_later_and_no_spend_waits(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(monitoring, "_TIMEOUT", 0.2)
    monkeypatch.setattr(monitoring, "_LONGEST_BACKOFF", 0.1)
    receiver.status = int(failing) if failing.isdecimal() else 200
    if failing == "hangs":
        receiver.hangs.set()
    with served(tmp_path, receiver) as service, odo.connect(service.url, token=service.token()) as ledger:
        ledger.open_account("maps", POLICY)
        spend(ledger, "maps", "0.9")
        wait_until(lambda: receiver.attempts >= 3)
        assert receiver.accepted == []
        spend(ledger, "maps", "0.01")
        receiver.hangs.clear()
        receiver.status = 200
        wait_until(lambda: len(receiver.accepted) == 1)
        time.sleep(0.3)
        assert [alert["threshold"] for alert in receiver.accepted] == [80]


def test_an_answer_without_an_end_is_a_failure_like_others() -> None:
    """Otherwise it is tried again in every look without a pause, with a traceback in the log each time."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * (1 << 18))
        await writer.drain()
        writer.close()

    async def attempt() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            webhook = Webhook(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", SECRET.encode())
            await sender._send(webhook, [Alert("1", "threshold", "maps", "maps has spent 80%", 0.8)])  # noqa: SLF001

    leader = Leader("sqlite:///none.db", timeout=1.0, accept_fsync_off=True)
    sender = Sender(Alerts(), lambda: pytest.fail("it is not read"), leader, asyncio.to_thread)
    asyncio.run(attempt())
    assert (sender._failures, sender._sent) == (1, set())  # noqa: SLF001


def test_a_sender_that_does_not_wait_for_the_answer_would_be_caught(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what is counted as sent before it is accepted is lost."""
    sent = Sender._send  # noqa: SLF001  what is broken on purpose

    async def careless(self: Sender, webhook: Webhook, found: list[Alert]) -> None:
        await sent(self, webhook, found)
        self._sent |= {alert.id for alert in found}

    monkeypatch.setattr(Sender, "_send", careless)
    monkeypatch.setattr(monitoring, "_LONGEST_BACKOFF", 0.1)
    receiver.status = 500
    with served(tmp_path, receiver) as service, odo.connect(service.url, token=service.token()) as ledger:
        ledger.open_account("maps", POLICY)
        spend(ledger, "maps", "0.9")
        wait_until(lambda: receiver.attempts == 1)
        receiver.status = 200
        time.sleep(0.5)
        assert receiver.accepted == []


def test_a_service_that_is_killed_before_it_was_answered_sends_again(tmp_path: Path, receiver: Receiver) -> None:
    rules = document(tmp_path, receiver)
    rules["webhook"]["secret_file"] = "secret"  # noqa: S105  a file, beside this one
    (tmp_path / "alerts.yaml").write_text(json.dumps(rules), encoding="utf-8")
    receiver.status = 500
    url = f"sqlite:///{tmp_path}/killed.db"
    with Service(url, tmp_path, "--alerts", str(tmp_path / "alerts.yaml")) as service:
        token = service.owner_key_file.read_text(encoding="ascii").strip()
        with odo.connect(service.url, token=token) as ledger:
            ledger.open_account("maps", POLICY)
            spend(ledger, "maps", "0.9")
        wait_until(lambda: receiver.attempts > 0)
        service.kill()
        receiver.status = 200
        service.start()
        wait_until(lambda: len(receiver.accepted) == 1)
        service.kill()
        service.start()
        wait_until(lambda: len(receiver.accepted) == 2)
        assert len({*receiver.ids}) == 1, "a receiver can tell that it is the same"
        log = service.log.read_text(encoding="utf-8")
    assert '"event":"alert"' in log
    for hidden in (SECRET, "token-in-the-path"):
        assert hidden not in log


def sending(url: str, folder: Path, receiver: Receiver, seconds: float) -> Counter[str]:
    """Run two services on one ledger; return how often each alert came."""
    with (
        served(folder, receiver, url) as service,
        served(folder, receiver, url),
        odo.connect(service.url, token=service.token()) as ledger,
    ):
        ledger.open_account("maps", POLICY)
        spend(ledger, "maps", "0.9")
        wait_until(lambda: receiver.attempts > 0)
        time.sleep(seconds)
    return Counter(receiver.ids)


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_one_of_several_processes_sends(
    tmp_path: Path, receiver: Receiver, request: pytest.FixtureRequest, store: str
) -> None:
    url = f"sqlite:///{tmp_path}/two.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    assert [*sending(url, tmp_path, receiver, 0.3).values()] == [1]


def test_several_that_all_send_would_be_caught(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Leader, "hold", lambda _: True)
    assert [*sending(f"sqlite:///{tmp_path}/two.db", tmp_path, receiver, 0.5).values()] == [2]


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_another_process_takes_over(tmp_path: Path, request: pytest.FixtureRequest, store: str) -> None:
    url = f"sqlite:///{tmp_path}/two.db" if store == "sqlite" else request.getfixturevalue("postgres_url")
    first, second = (Leader(url, timeout=5, accept_fsync_off=True) for _ in range(2))
    assert [first.hold(), second.hold(), first.hold(), second.hold()] == [True, False, True, False]
    first.release()
    assert [second.hold(), first.hold()] == [True, False]
    second.release()


# The rules.


def test_wrong_rules_are_refused_with_their_field(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET, encoding="ascii")
    (tmp_path / "short").write_text("short", encoding="ascii")
    hook = {"url": "https://example.org/hook", "secret_file": str(tmp_path / "secret")}
    assert rules_of({"webhook": hook}).webhook is not None
    for form, field in (
        ({"thresholds": [0]}, "thresholds"),
        ({"thresholds": [101]}, "thresholds"),
        ({"threshold": [50]}, "threshold"),
        ({"accounts": {"a": 50}}, "accounts"),
        ({"pace": {"window_days": 0}}, "window_days"),
        ({"pace": {"horizon_days": 1e-12}}, "horizon_days"),
        ({"interval": 0}, "interval"),
        ({"form": 2}, "form"),
        ({"webhook": {"url": "https://example.org"}}, "secret_file"),
        ({"webhook": hook | {"url": "http://example.org/token"}}, "https://"),
        ({"webhook": hook | {"url": "https://user@example.org"}}, "url"),
        ({"webhook": hook | {"url": "https://example.org/\r\nX: 1"}}, "url"),
        ({"webhook": hook | {"url": "ftp://example.org"}}, "url"),
        ({"webhook": hook | {"url": "https://[x"}}, "url"),
        ({"webhook": hook | {"secret_file": str(tmp_path / "none")}}, "secret_file"),
        ({"webhook": hook | {"secret_file": str(tmp_path / "short")}}, "at least 24 bytes"),
    ):
        with pytest.raises(InvalidArgument, match=field) as caught:
            rules_of(form)
        assert "token" not in str(caught.value)
    assert rules_of({"webhook": hook | {"url": "http://example.org", "allow_plain_http": True}}).webhook
    assert "hook" not in repr(rules_of({"webhook": hook}).webhook).replace("Webhook", "")


def test_an_accounts_page_shows_its_alerts(service: ServiceThread) -> None:
    with odo.connect(service.settings.url) as ledger:
        for name in ("maps", "other"):
            ledger.open_account(name, POLICY)
        spend(ledger, "maps", "0.9")
        (found,) = Alerts().active(ledger, ["maps"])
    visitor = visitor_of(service, service.token())
    assert "maps has spent 90% of its budget; the alert is at 80%" in visitor.get("/accounts/maps").text
    assert visitor.get("/accounts/maps", format="json").json()["alerts"][0]["threshold"] == 80
    assert "of its budget;" not in visitor.get("/accounts/other").text
    hostile = msgspec.structs.replace(found, message="<script>")
    assert "<script>" not in render_fragment("alerts.html", {"alerts": [hostile]})
    assert not render_fragment("alerts.html", {"alerts": []}).strip()
