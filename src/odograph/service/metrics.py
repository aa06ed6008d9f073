"""Metrics in Prometheus' text format. Accounts are labels; principals never are.

The number of series is bounded: routes are templates of paths, accounts are those of the ledger, and refusals are
counted for at most `MAX_ACCOUNT_LABELS` accounts by each worker.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from odograph.core.planning import standing, used
from odograph.errors import LedgerNotFound
from odograph.ledger.backend import LocalBackend
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Balance

__all__ = ["CONTENT_TYPE", "MAX_ACCOUNT_LABELS", "OTHER_ACCOUNTS", "Metrics", "remove_dead_workers"]

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
        for (route, status), count in Counter((route, status) for route, status, _ in responses).items():
            self._requests.labels(route, str(status)).inc(count)
        for route, _, seconds in responses:
            self._latencies.labels(route).observe(seconds)
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
