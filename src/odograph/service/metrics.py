"""Metrics in Prometheus' text format. Accounts are labels; principals never are."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Count
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from odograph.core.planning import standing, used
from odograph.errors import LedgerNotFound
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Balance

__all__ = ["CONTENT_TYPE", "Metrics", "remove_dead_workers"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_FOLD_INTERVAL: Final = 0.05  # seconds
_COMMIT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The metrics of one process; processes that share PROMETHEUS_MULTIPROC_DIR each render the sum of all."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._spends = Count("odograph_spends", "Charges made.", ["verb"], registry=registry)
        self._refusals = Count("odograph_refusals", "Charges refused: over budget.", registry=registry)
        self._requests = Count("odograph_requests", "Responses sent.", ["route", "status"], registry=registry)
        self._commits = Histogram(
            "odograph_commit_seconds", "Duration of a group commit.", buckets=_COMMIT_SECONDS, registry=registry
        )
        self._written = Count("odograph_committed_requests", "Writes in all group commits.", registry=registry)
        self._depth = Gauge(
            "odograph_queue_depth", "Writes in the queue.", registry=registry, multiprocess_mode="livesum"
        )
        self._responses: Counter[tuple[str, int]] = Counter()  # not folded yet
        self._charges: Counter[str] = Counter()

    def count_charge(self, verb: str, count: int = 1) -> None:
        """Count charges that were made."""
        self._charges[verb] += count

    def count_refusal(self) -> None:
        """Count a refused charge."""
        self._refusals.inc()

    def count_commit(self, seconds: float, requests: int) -> None:
        """Count a group commit: its duration, and the number of writes in it."""
        self._commits.observe(seconds)
        self._written.inc(requests)

    def set_queue_depth(self, depth: int) -> None:
        """Set the number of queued writes."""
        self._depth.set(depth)

    def count_response(self, route: str, status: int) -> None:
        """Count a response at the next fold; `route` is the template of its path, so callers cannot invent labels."""
        if not self._responses:
            try:
                asyncio.get_running_loop().call_later(_FOLD_INTERVAL, self.fold)
            except RuntimeError:  # without an event loop there is no later fold
                self._responses[route, status] += 1
                self.fold()
                return
        self._responses[route, status] += 1

    def fold(self) -> None:
        """Add the pending counts to the metrics, together because each is slow; call it on the event loop."""
        responses, self._responses = self._responses, Counter()
        for (route, status), count in responses.items():
            self._requests.labels(route, str(status)).inc(count)
        charges, self._charges = self._charges, Counter()
        for verb, count in charges.items():
            self._spends.labels(verb).inc(count)

    def render(self, ledger: Ledger) -> bytes:
        """Return the folded metrics and the current budget of every account as text. Reads the ledger and blocks."""
        counts, budgets = self._registry, CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            counts = CollectorRegistry()
            MultiProcessCollector(counts)  # type: ignore[no-untyped-call]
        budgets.register(_Budgets(ledger))
        return generate_latest(counts) + generate_latest(budgets)


def remove_dead_workers() -> None:
    """Remove the gauges of workers that crashed from the sum over live workers."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for file in Path(folder).glob("gauge_live*_*.db") if folder else ():
        pid = file.stem.rpartition("_")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            mark_process_dead(int(pid))  # type: ignore[no-untyped-call]


class _Budgets(Collector):
    """What every account has spent and has left, read from the ledger when collected."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[GaugeMetricFamily]:
        ratios = GaugeMetricFamily(
            "odograph_budget_spent_ratio", "The part of an account's budget that is spent.", labels=["account"]
        )
        lefts = GaugeMetricFamily(
            "odograph_budget_left", "What an account has left, by meter.", labels=["account", "meter"]
        )
        for name, balance in self._balances().items():
            opened, totals = self._ledger.backend.opened(name), balance.totals
            if opened.population is not None:  # what remains of a population is confidential
                continue
            compiled = opened.compiled
            ratios.add_metric([name], used(compiled, totals))
            for meter, left in standing(compiled, totals).left.items():
                lefts.add_metric([name, meter], left)
        yield ratios
        yield lefts

    def _balances(self) -> dict[str, Balance]:
        try:
            return self._ledger.backend.balances()
        except LedgerNotFound:  # no account was opened yet, so there is no ledger
            return {}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return nothing: otherwise registration would read the ledger."""
        return iter(())
