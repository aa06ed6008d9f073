"""Metrics in Prometheus' text format, and alerts on budgets.

In metrics accounts are labels; principals never are. The number of series is bounded: routes are templates of paths,
accounts are those of the ledger, and refusals are counted for at most `MAX_ACCOUNT_LABELS` accounts by each worker.

An alert is a threshold that is reached, or an account that runs out at the present pace. Which alerts are active
follows from the ledger and the rules alone; nothing about them is stored. One process of all that serve a ledger
sends them. It sends each once, to a webhook that may fail as long as it likes, and forgets at its end what it has
sent: the next one sends what is active then. So an alert that stays active arrives at least once, and `id`, which is
the same each time, tells the copies of one alert.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import hmac
import math
import os
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from odograph.connection import store_at
from odograph.core.planning import standing, used
from odograph.errors import InvalidArgument, LedgerNotFound, OdographError
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import iso_time, shown
from odograph.ledger.ledger import Ledger, LedgerAccount, states
from odograph.ledger.stores.base import Balance
from odograph.service import logs

__all__ = [
    "CONTENT_TYPE",
    "DEFAULT_THRESHOLDS",
    "MAX_ACCOUNT_LABELS",
    "OTHER_ACCOUNTS",
    "Alert",
    "Alerts",
    "Leader",
    "Metrics",
    "Rules",
    "Sender",
    "Webhook",
    "is_loopback",
    "post",
    "remove_dead_workers",
    "rules_of",
]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FOLD_INTERVAL: Final = 0.05  # seconds
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)
MAX_ACCOUNT_LABELS: Final = 500
OTHER_ACCOUNTS: Final = "(other)"  # cannot be the name of an account
_MIN_COUNT_INTERVAL: Final = 1.0  # seconds between two counts of pending reservations
_COUNT_SHARE: Final = 20  # the next count waits this many times as long as the last one took


class Metrics:
    """The metrics of one process; processes that share PROMETHEUS_MULTIPROC_DIR each render the sum of all."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._spends = Count("odograph_spends", "Charges made.", ["verb"], registry=registry)
        self._refusals = Count("odograph_refusals", "Charges refused: over budget.", registry=registry)
        self._account_refusals = Count(
            "odograph_account_refusals",
            f"Charges refused, by the account that refused; {OTHER_ACCOUNTS} beyond {MAX_ACCOUNT_LABELS} accounts.",
            ["account"],
            registry=registry,
        )
        self._requests = Count("odograph_requests", "Responses sent.", ["route", "status"], registry=registry)
        self._latencies = Histogram(
            "odograph_request_seconds",
            "Duration of a request, from its head to its response.",
            ["route"],
            buckets=_REQUEST_SECONDS,
            registry=registry,
        )
        self._restarts = Count(
            "odograph_writer_restarts",
            "Writer processes that ended or did not start, and were replaced.",
            registry=registry,
        )
        self._commits = Histogram(
            "odograph_commit_seconds", "Duration of a group commit.", buckets=_COMMIT_SECONDS, registry=registry
        )
        self._written = Count("odograph_committed_requests", "Writes in all group commits.", registry=registry)
        self._depth = Gauge(
            "odograph_queue_depth", "Writes in the queue.", registry=registry, multiprocess_mode="livesum"
        )
        self._responses: list[tuple[str, int, float]] = []  # not folded yet
        self._refusing: set[str] = set()  # accounts that have a label
        self._pending = _PendingCounts()
        self._charges: Counter[str] = Counter()

    def count_charge(self, verb: str, count: int = 1) -> None:
        """Count charges that were made."""
        self._charges[verb] += count

    def count_refusal(self, account: str) -> None:
        """Count a charge that an account refused."""
        self._refusals.inc()
        if account not in self._refusing:
            if len(self._refusing) >= MAX_ACCOUNT_LABELS:
                account = OTHER_ACCOUNTS
            else:
                self._refusing.add(account)
        self._account_refusals.labels(account).inc()

    def count_restart(self) -> None:
        """Count a writer process that is replaced."""
        self._restarts.inc()

    def count_commit(self, seconds: float, requests: int) -> None:
        """Count a group commit: its duration, and the number of writes in it."""
        self._commits.observe(seconds)
        self._written.inc(requests)

    def set_queue_depth(self, depth: int) -> None:
        """Set the number of queued writes."""
        self._depth.set(depth)

    def count_response(self, route: str, status: int, seconds: float) -> None:
        """Count a response at the next fold; `route` is the template of its path, so callers cannot invent labels."""
        self._responses.append((route, status, seconds))
        if len(self._responses) == 1:
            try:
                asyncio.get_running_loop().call_later(_FOLD_INTERVAL, self.fold)
            except RuntimeError:  # without an event loop there is no later fold
                self.fold()

    def fold(self) -> None:
        """Add the pending counts to the metrics, together because each is slow; call it on the event loop."""
        responses, self._responses = self._responses, []
        counts = Counter([(route, status) for route, status, _ in responses])
        for (route, status), count in counts.items():
            self._requests.labels(route, str(status)).inc(count)
        # Looking a label up takes as long as observing.
        observe = {route: self._latencies.labels(route).observe for route, _ in counts}
        for route, _, seconds in responses:
            observe[route](seconds)
        charges, self._charges = self._charges, Counter()
        for verb, count in charges.items():
            self._spends.labels(verb).inc(count)

    def render(self, ledger: Ledger) -> bytes:
        """Return the folded metrics and the current budget of every account as text. Reads the ledger and blocks."""
        counts, budgets = self._registry, CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            counts = CollectorRegistry()
            MultiProcessCollector(counts)  # type: ignore[no-untyped-call]
        budgets.register(_Budgets(ledger, self._pending.read(ledger)))
        return generate_latest(counts) + generate_latest(budgets)


def remove_dead_workers() -> None:
    """Remove the gauges of workers that crashed from the sum over live workers."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for file in Path(folder).glob("gauge_live*_*.db") if folder else ():
        pid = file.stem.rpartition("_")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            mark_process_dead(int(pid))  # type: ignore[no-untyped-call]


class _PendingCounts:
    """The pending reservations of every account. Counting takes at most a twentieth of the time."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._next = 0.0

    def read(self, ledger: Ledger) -> dict[str, int]:
        """Return the counts, of a while ago if there are so many reservations that counting takes long."""
        begun = time.monotonic()
        if begun >= self._next and isinstance(ledger.backend, LocalBackend):
            try:
                self._counts = ledger.backend.store.pending_counts()
            except LedgerNotFound:  # no account was opened yet
                self._counts = {}
            now = time.monotonic()
            self._next = now + max(_MIN_COUNT_INTERVAL, _COUNT_SHARE * (now - begun))
        return self._counts


class _Budgets(Collector):
    """What every account has spent, has left and has reserved, read from the ledger when collected."""

    def __init__(self, ledger: Ledger, pending: Mapping[str, int]) -> None:
        self._ledger = ledger
        self._pending = pending

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ratios = GaugeMetricFamily(
            "odograph_budget_spent_ratio", "The part of an account's budget that is spent.", labels=["account"]
        )
        lefts = GaugeMetricFamily(
            "odograph_budget_left", "What an account has left, by meter.", labels=["account", "meter"]
        )
        reserved = GaugeMetricFamily(
            "odograph_pending_reservations", "Reservations neither committed nor voided.", labels=["account"]
        )
        for name, balance in self._balances().items():
            opened, totals = self._ledger.backend.opened(name), balance.totals
            if opened.population is not None:  # what remains of a population is confidential
                continue
            compiled = opened.compiled
            ratios.add_metric([name], used(compiled, totals))
            reserved.add_metric([name], self._pending.get(name, 0))
            for meter, left in standing(compiled, totals).left.items():
                lefts.add_metric([name, meter], left)
        yield ratios
        yield lefts
        yield reserved

    def _balances(self) -> dict[str, Balance]:
        try:
            return self._ledger.backend.balances()
        except LedgerNotFound:  # no account was opened yet, so there is no ledger
            return {}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return nothing: otherwise registration would read the ledger."""
        return iter(())


DEFAULT_THRESHOLDS: Final = (50.0, 80.0, 95.0)  # percent
_DAY: Final = 86_400
_MICROSECONDS: Final = 1_000_000  # in a second
_MIN_CHARGES: Final = 5  # in the window, of which a pace is computed
_MIN_SPAN: Final = 0.1  # of the window, between the first of these charges and the last
_MAX_READ: Final = 10_000  # entries of an account that are read for its pace
_PACE_TTL: Final = 600.0  # seconds after which a pace is computed again for an account without new entries
_TIMEOUT: Final = 10.0  # seconds for one delivery, from the connection to the status of the answer
_LONGEST_BACKOFF: Final = 300.0  # seconds between two attempts while the webhook fails
_SHORTEST_SECRET: Final = 24  # bytes
_ADVISORY_LOCK: Final = 0x0D06_A1E7  # of PostgreSQL, in the ledger's database
_SQLITE: Final = "sqlite:///"
_URL: Final = re.compile("[!-~]+")

Percent: TypeAlias = Annotated[float, Meta(gt=0, le=100)]
Thresholds: TypeAlias = Annotated[list[Percent], Meta(max_length=20)]


class _PaceForm(Struct, forbid_unknown_fields=True):
    window_days: Annotated[float, Meta(ge=0.01, le=366)] = 7
    horizon_days: Annotated[float, Meta(ge=0.01, le=3660)] = 7


class _WebhookForm(Struct, forbid_unknown_fields=True):
    url: str
    secret_file: str
    allow_plain_http: bool = False


class _RulesForm(Struct, forbid_unknown_fields=True):
    form: Literal[1] = 1
    thresholds: Thresholds = msgspec.field(default_factory=lambda: [*DEFAULT_THRESHOLDS])
    accounts: dict[str, Thresholds] = {}
    pace: _PaceForm = msgspec.field(default_factory=_PaceForm)
    interval: Annotated[float, Meta(ge=0.05, le=3600)] = 10
    webhook: _WebhookForm | None = None


class Webhook(NamedTuple):
    """Where alerts are sent. Neither the address, which may hold a token, nor the secret is ever logged."""

    url: str
    secret: bytes

    @property
    def host(self) -> str:
        """The host, for messages."""
        return urlsplit(self.url).hostname or ""

    def __repr__(self) -> str:
        return f"<Webhook at {self.host}>"


class Rules(NamedTuple):
    """When there is an alert: thresholds in percent of the budget, and how soon an account may run out."""

    thresholds: tuple[float, ...] = DEFAULT_THRESHOLDS
    accounts: tuple[tuple[str, tuple[float, ...]], ...] = ()  # patterns, of which the first that fits counts
    window: float = 7.0 * _DAY  # seconds
    horizon: float = 7.0 * _DAY  # seconds
    interval: float = 10.0  # seconds between two looks at the ledger
    webhook: Webhook | None = None

    def thresholds_of(self, name: str) -> tuple[float, ...]:
        """Return the thresholds of an account."""
        return next((found for pattern, found in self.accounts if fnmatchcase(name, pattern)), self.thresholds)


def rules_of(form: Mapping[str, Any]) -> Rules:
    """Return the rules of a document, as `odograph serve --alerts` reads it, or raise `InvalidArgument`."""
    try:
        given = msgspec.convert(form, _RulesForm)
    except msgspec.ValidationError as problem:
        raise InvalidArgument(f"alerts cannot be read: {problem}") from problem
    webhook = None if given.webhook is None else _webhook_of(given.webhook)
    accounts = tuple((pattern, tuple(sorted(found))) for pattern, found in given.accounts.items())
    window, horizon = _DAY * given.pace.window_days, _DAY * given.pace.horizon_days
    return Rules(tuple(sorted(given.thresholds)), accounts, window, horizon, given.interval, webhook)


def _webhook_of(form: _WebhookForm) -> Webhook:
    try:
        parts = urlsplit(form.url)
        host, _ = parts.hostname, parts.port  # both may raise
    except ValueError:
        host = None
    if not _URL.fullmatch(form.url) or not host or parts.scheme not in ("http", "https") or "@" in parts.netloc:
        raise InvalidArgument("webhook.url must be https://HOST/PATH, without a user (the address is not shown here)")
    if parts.scheme == "http" and not is_loopback(host) and not form.allow_plain_http:
        raise InvalidArgument(
            f"webhook.url must begin with https:// for another machine (got http://{host}): names of accounts would"
            " be sent in the clear. Set webhook.allow_plain_http: true if the network is trusted"
        )
    try:
        text = Path(form.secret_file).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as problem:
        raise InvalidArgument(f"webhook.secret_file must be a text file (got {form.secret_file!r})") from problem
    try:
        secret = base64.b64decode(text[6:], validate=True) if text.startswith("whsec_") else text.encode()
    except ValueError:
        secret = b""
    if len(secret) < _SHORTEST_SECRET:
        raise InvalidArgument(
            f"webhook.secret_file must hold a secret of at least {_SHORTEST_SECRET} bytes (got {len(secret)}); make"
            " one with: openssl rand -hex 32"
        )
    return Webhook(form.url, secret)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine; any other name may lead anywhere."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class Alert(Struct, frozen=True):
    """An alert that is active now: what is sent, and shown on the page."""

    id: str  # the same for the same alert of the same account, however often it is sent
    kind: Literal["threshold", "pace"]
    account: str
    message: str
    spent: float  # the part of the budget, from 0 to 1
    threshold: float | None = None  # percent: the highest that is reached
    runs_out: str | None = None  # when the budget is spent at the present pace
    charges: int | None = None  # of which the pace was computed
    window_seconds: float | None = None  # over which


class _Pace(NamedTuple):
    """How fast an account spends: a part of its budget for each second."""

    rate: float
    charges: int
    window: float


class Alerts:
    """The alerts of a ledger by some rules. Safe to use from many threads."""

    def __init__(self, rules: Rules = Rules(), clock: Callable[[], int] = time.time_ns) -> None:  # noqa: B008  a constant
        self.rules = rules
        self._clock = clock
        self._paces: dict[str, tuple[float, str, _Pace | None]] = {}  # computed when, after which entry

    def active(self, ledger: Ledger, names: Sequence[str] | None = None) -> list[Alert]:
        """Return the active alerts of the named accounts, or of all, by name; reads the ledger."""
        try:
            balances = ledger.backend.balances(names)
        except LedgerNotFound:  # no account was opened yet
            return []
        found: list[Alert] = []
        for name, balance in sorted(balances.items()):
            # What remains of a population is confidential.
            if not balance.closed and ledger.backend.opened(name).population is None:
                found += self._of(ledger.account(name), balance)
        return found

    def _of(self, account: LedgerAccount, balance: Balance) -> list[Alert]:
        spent = used(account.compiled, balance.totals)
        if not spent:
            return []
        name, found = account.name, []
        reached = [threshold for threshold in self.rules.thresholds_of(name) if 100 * spent >= threshold]
        if reached:
            message = f"{name} has spent {math.floor(100 * spent)}% of its budget; the alert is at {reached[-1]:g}%"
            identity = _identity(balance, f"{reached[-1]:g}")
            found.append(Alert(identity, "threshold", name, message, spent, threshold=reached[-1]))
        if spent < 1 and self.rules.thresholds_of(name) and (alert := self._forecast(account, balance, spent)):
            found.append(alert)
        return found

    def _forecast(self, account: LedgerAccount, balance: Balance, spent: float) -> Alert | None:
        """Return the alert on an account that is spent within the horizon at its present pace."""
        now = self._clock() // 1000
        pace = self._pace(account, balance, now)
        if pace is None or pace.rate * self.rules.horizon < 1 - spent:
            return None
        runs_out = iso_time(now + round((1 - spent) / pace.rate) * _MICROSECONDS)
        message = (
            f"{account.name} has spent {math.floor(100 * spent)}% of its budget, and runs out on {runs_out[:10]} at"
            f" the pace of its last {pace.charges} charges in {_duration(pace.window)}"
        )
        # Once in each horizon, counted from 1970.
        identity = _identity(balance, f"pace {now // round(self.rules.horizon * _MICROSECONDS)}")
        return Alert(
            identity,
            "pace",
            account.name,
            message,
            spent,
            runs_out=runs_out,
            charges=pace.charges,
            window_seconds=round(pace.window, 3),
        )

    def _pace(self, account: LedgerAccount, balance: Balance, now: int) -> _Pace | None:
        """Return the pace, computed anew for an account with new entries, but not in every look."""
        moment = now / _MICROSECONDS
        known = self._paces.get(account.name)
        if known is not None:
            age = moment - known[0]
            if age < (_PACE_TTL if known[1] == balance.seal else min(60.0, self.rules.window / 100)):
                return known[2]
        start = now - round(self.rules.window * _MICROSECONDS)
        pace = None if balance.time <= start else self._compute_pace(account, balance, start, now)
        self._paces[account.name] = moment, balance.seal, pace
        return pace

    def _compute_pace(self, account: LedgerAccount, balance: Balance, start: int, now: int) -> _Pace | None:
        """Return what was spent in the window for each second of it.

        The window begins `window` seconds ago, or where the account was opened, or at the first of the entries that
        are read. There is no pace with fewer than five charges, or if all came within a tenth of the window: two
        points are no pace, and neither is a burst.
        """
        found = states(account, balance.totals, balance.sequence, _MAX_READ)
        inside = [state for state in found if state.time > start]
        if len(inside) < _MIN_CHARGES:
            return None
        before = found[-len(inside) - 1] if len(inside) < len(found) else inside[0]
        charges = [state for state in inside if state is not before and state.totals.steps]
        if len(charges) < _MIN_CHARGES:
            return None
        if charges[-1].time - charges[0].time < _MIN_SPAN * self.rules.window * _MICROSECONDS:
            return None
        window = (now - max(start, before.time)) / _MICROSECONDS
        compiled = account.compiled
        spent = used(compiled, balance.totals) - used(compiled, before.totals)
        return _Pace(spent / window, len(charges), window) if spent > 0 and window > 0 else None


def _identity(balance: Balance, what: str) -> str:
    return hashlib.sha256(f"{balance.origin} {what}".encode()).hexdigest()[:32]


def _duration(seconds: float) -> str:
    return f"{seconds / _DAY:.1f} days" if seconds >= _DAY else f"{seconds / 3600:.1f} hours"


# Sending.


class Leader:
    """Elects one process of all that serve a ledger: a file lock beside a SQLite file, a lock in PostgreSQL.

    The lock in PostgreSQL belongs to a transaction that stays open and reads nothing, and not to a session: a pool
    could hand that to another client, with the lock. A process that ends, however it does, releases its lock.
    """

    def __init__(self, url: str, *, timeout: float, accept_fsync_off: bool) -> None:
        self._url = url
        self._timeout = timeout
        self._accept_fsync_off = accept_fsync_off
        self._file = -1
        self._connection: Any = None

    def hold(self) -> bool:
        """Return whether this process is the one, after trying to become it; blocks."""
        return self._lock_file() if self._url.startswith(_SQLITE) else self._lock_database()

    def release(self) -> None:
        """Let another process be the one."""
        if self._file >= 0:
            os.close(self._file)
        if self._connection is not None:
            self._connection.close()
        self._file, self._connection = -1, None

    def _lock_file(self) -> bool:
        if self._file >= 0:
            return True
        path = store_at(self._url).url.removeprefix(_SQLITE)  # resolved; this does not connect
        try:
            file = os.open(f"{path}-alerts", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return False
        self._file = file
        return True

    def _lock_database(self) -> bool:
        postgres = import_module("odograph.ledger.stores.postgres")
        with postgres.translate_errors(postgres.url_without_password(self._url), "no alert was sent"):
            if self._connection is not None:
                try:
                    self._connection.execute(b"SELECT 1")
                except postgres.psycopg.Error:
                    self.release()
                else:
                    return True
            connection = postgres.open_connection(
                self._url, timeout=self._timeout, accept_fsync_off=self._accept_fsync_off
            )
            connection.execute(b"BEGIN")
            connection.execute(b"SET LOCAL idle_in_transaction_session_timeout = 0")
            if connection.execute(b"SELECT pg_try_advisory_xact_lock(%s)", (_ADVISORY_LOCK,)).fetchone() != (True,):
                connection.close()
                return False
        self._connection = connection
        return True


class Sender:
    """Looks for alerts now and then; logs new ones and sends them to the webhook. It keeps no spend from anything."""

    def __init__(self, alerts: Alerts, ledger: Callable[[], Ledger], leader: Leader, run: Callable[..., Any]) -> None:
        self._alerts = alerts
        self._ledger = ledger
        self._leader = leader
        self._run = run  # calls a function in a thread
        self._logged: set[str] = set()
        self._sent: set[str] = set()
        self._failures = 0
        self._next_attempt = 0.0

    async def run(self) -> None:
        """Send alerts until this is canceled."""
        failing = False
        while True:
            try:
                await self._look()
                failing = False
            except OdographError as error:
                if not failing:
                    logs.state("warning", "alerts", f"the ledger cannot be read for alerts ({type(error).__name__})")
                failing = True
            except Exception as error:  # noqa: BLE001  the next look may succeed
                logs.failure(error)
            pause = self._next_attempt - time.monotonic() if self._failures else self._alerts.rules.interval
            await asyncio.sleep(min(max(pause, 0.01), self._alerts.rules.interval))

    async def _look(self) -> None:
        if not await self._run(self._leader.hold):
            self._logged.clear()  # another process logs and sends
            self._sent.clear()
            return
        active: list[Alert] = await self._run(lambda: self._alerts.active(self._ledger()))
        for alert in active:
            if alert.id not in self._logged:
                logs.state("warning", "alert", alert.message)
                self._logged.add(alert.id)
        webhook = self._alerts.rules.webhook
        if webhook is not None and time.monotonic() >= self._next_attempt:
            await self._send(webhook, [alert for alert in active if alert.id not in self._sent])

    async def _send(self, webhook: Webhook, alerts: Sequence[Alert]) -> None:
        """Send each alert once more, until one is not answered; what fails is sent again later."""
        problem = ""
        for alert in alerts:
            try:
                async with asyncio.timeout(_TIMEOUT):
                    status = await post(webhook, alert)
            except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                problem = f"did not answer ({type(error).__name__})"
                break
            if 200 <= status < 300:
                self._sent.add(alert.id)
            else:
                problem = f"answered {status}"
        if problem:
            self._failures += 1
            backoff = min(_LONGEST_BACKOFF, 2.0 ** min(self._failures - 1, 20))
            self._next_attempt = time.monotonic() + backoff * random.uniform(0.5, 1.0)  # noqa: S311  no secret
            if self._failures == 1:
                logs.state("warning", "webhook", f"{webhook.host} {problem}; alerts are sent again until it accepts")
        elif self._failures:
            self._failures, self._next_attempt = 0, 0.0
            if alerts:
                logs.state("warning", "webhook", f"{webhook.host} accepts alerts again")


async def post(webhook: Webhook, alert: Alert) -> int:
    """Send an alert, signed as https://www.standardwebhooks.com has it, and return the status of the answer.

    No redirect is followed, and of the answer only the first line is read.
    """
    parts = urlsplit(webhook.url)
    body, moment = msgspec.json.encode(alert), int(time.time())
    signature = base64.b64encode(hmac.digest(webhook.secret, f"{alert.id}.{moment}.".encode() + body, "sha256"))
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\nUser-Agent: odograph\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"webhook-id: {alert.id}\r\nwebhook-timestamp: {moment}\r\nwebhook-signature: v1,{signature.decode()}\r\n\r\n"
    )
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (80 if secure is None else 443)
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    try:
        writer.write(head.encode("ascii") + body)
        await writer.drain()
        line = (await reader.readuntil(b"\n")).split()
        if len(line) < 2 or not line[0].startswith(b"HTTP/1."):
            raise ValueError(shown(line))
        return int(line[1])
    finally:
        writer.transport.abort()
