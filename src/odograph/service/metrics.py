"""Metrics: what the service counts, in Prometheus' text format. Accounts have labels; people never do."""

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

from odograph.core.offers import standing, used
from odograph.errors import AccountNotFound
from odograph.ledger.ledger import Ledger
from odograph.ledger.store import Balance

__all__ = ["CONTENT_TYPE", "Metrics", "forget_the_dead"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SOON: Final = 0.05  # seconds
_TIMES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The counts of one process; where several share PROMETHEUS_MULTIPROC_DIR, each renders the sum over all."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._spends = Count("odograph_spends", "Charges made.", ["verb"], registry=registry)
        self._refusals = Count("odograph_refusals", "Charges refused: over budget.", registry=registry)
        self._requests = Count("odograph_requests", "Requests answered.", ["route", "status"], registry=registry)
        self._commits = Histogram(
            "odograph_commit_seconds", "One durable group of writes.", buckets=_TIMES, registry=registry
        )
        self._written = Count("odograph_committed_requests", "Writes in all groups.", registry=registry)
        self._depth = Gauge(
            "odograph_queue_depth", "Writes that wait.", registry=registry, multiprocess_mode="livesum"
        )
        self._answers: Counter[tuple[str, int]] = Counter()  # that were not counted yet
        self._charges: Counter[str] = Counter()

    def spent(self, verb: str, count: int = 1) -> None:
        """Count charges that were made, when they are answered."""
        self._charges[verb] += count

    def refused(self) -> None:
        """Count a charge that did not fit."""
        self._refusals.inc()

    def committed(self, seconds: float, requests: int) -> None:
        """Count a group of writes: how long it took until it was durable, and how many they were."""
        self._commits.observe(seconds)
        self._written.inc(requests)

    def queued(self, depth: int) -> None:
        """Say how many writes wait."""
        self._depth.set(depth)

    def answered(self, route: str, status: int) -> None:
        """Count an answer, soon; `route` is the template, so that nobody can make up labels."""
        if not self._answers:
            try:
                asyncio.get_running_loop().call_later(_SOON, self.fold)
            except RuntimeError:  # nobody would come back to it
                self._answers[route, status] += 1
                self.fold()
                return
        self._answers[route, status] += 1

    def fold(self) -> None:
        """Count what was gathered: one by one that would take longer than finding the route. For the event loop."""
        answers, self._answers = self._answers, Counter()
        for (route, status), count in answers.items():
            self._requests.labels(route, str(status)).inc(count)
        charges, self._charges = self._charges, Counter()
        for verb, count in charges.items():
            self._spends.labels(verb).inc(count)

    def render(self, ledger: Ledger) -> bytes:
        """Return what was folded as text, with every account's budget as it is now. Reads the ledger, and waits."""
        counts, budgets = self._registry, CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            counts = CollectorRegistry()
            MultiProcessCollector(counts)  # type: ignore[no-untyped-call]
        budgets.register(_Budgets(ledger))
        return generate_latest(counts) + generate_latest(budgets)


def forget_the_dead() -> None:
    """Take workers that ended without a word out of what is summed over those that live."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    for file in Path(folder).glob("gauge_live*_*.db") if folder else ():
        pid = file.stem.rpartition("_")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            mark_process_dead(int(pid))  # type: ignore[no-untyped-call]


class _Budgets(Collector):
    """What every account has spent and has left, read when it is asked for."""

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
            opened, totals = self._ledger.books.opened(name), balance.totals
            if opened.population is not None:  # what is left of it is nobody's to see
                continue
            compiled = opened.compiled
            ratios.add_metric([name], used(compiled, totals))
            for meter, left in standing(compiled, totals).left.items():
                lefts.add_metric([name, meter], left)
        yield ratios
        yield lefts

    def _balances(self) -> dict[str, Balance]:
        try:
            return self._ledger.books.balances()
        except AccountNotFound:  # no account was opened yet, so there is no file
            return {}

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Say nothing beforehand: registering would read the ledger once more."""
        return iter(())
