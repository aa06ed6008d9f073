"""What the service counts: right, summed over workers, and about accounts only."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from service_process import Service, end_process, wait_until
from service_server import ServiceThread

import odograph as odo
from odograph.core.planning import used
from odograph.ledger.backend import LocalBackend
from odograph.service import monitoring as module
from odograph.service.monitoring import MAX_ACCOUNT_LABELS, OTHER_ACCOUNTS, Metrics

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

LABELS = {"account", "meter", "verb", "route", "status", "le"}


def samples(text: bytes) -> Samples:
    """Read the text format, as Prometheus does."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def other_labels(text: bytes) -> set[str]:
    """The checker: labels that are about something else than accounts and requests."""
    return {label for _, labels in samples(text) for label, _ in labels} - LABELS


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[odo.Ledger]:
    with odo.connect(f"sqlite:///{tmp_path}/ledger.db") as found:
        yield found


def test_what_happened_is_counted(ledger: odo.Ledger) -> None:
    metrics = Metrics()
    for verb in ("spend", "spend", "reserve"):
        metrics.count_charge(verb)
    metrics.count_refusal("census")
    metrics.count_commit(0.003, 3)
    metrics.count_commit(0.2, 1)
    metrics.set_queue_depth(7)
    metrics.set_queue_depth(5)
    metrics.count_response("/v1/accounts/{name}/spends", 200, 0.004)
    metrics.count_response("/v1/accounts/{name}/spends", 409, 3.0)
    metrics.count_response("/v1/accounts/{name}/spends", 200, 0.004)
    found = samples(metrics.render(ledger))
    route = ("route", "/v1/accounts/{name}/spends")
    assert found["odograph_spends_total", (("verb", "spend"),)] == 2
    assert found["odograph_spends_total", (("verb", "reserve"),)] == 1
    assert found["odograph_refusals_total", ()] == 1
    assert found["odograph_account_refusals_total", (("account", "census"),)] == 1
    assert found["odograph_request_seconds_count", (route,)] == 3
    assert found["odograph_request_seconds_sum", (route,)] == pytest.approx(3.008)
    assert found["odograph_request_seconds_bucket", (("le", "0.005"), route)] == 2
    assert found["odograph_writer_restarts_total", ()] == 0
    assert found["odograph_requests_total", (route, ("status", "200"))] == 2
    assert found["odograph_requests_total", (route, ("status", "409"))] == 1
    assert found["odograph_commit_seconds_count", ()] == 2
    assert found["odograph_commit_seconds_sum", ()] == pytest.approx(0.203)
    assert found["odograph_committed_requests_total", ()] == 4
    assert found["odograph_queue_depth", ()] == 5


def test_two_services_in_one_process_count_apart(ledger: odo.Ledger) -> None:
    one, other = Metrics(), Metrics()
    one.count_refusal("census")
    assert samples(one.render(ledger))["odograph_refusals_total", ()] == 1
    assert samples(other.render(ledger))["odograph_refusals_total", ()] == 0


def test_budgets_are_read_when_they_are_asked_for(ledger: odo.Ledger) -> None:
    metrics = Metrics()
    assert not any("budget" in name for name, _ in samples(metrics.render(ledger)))
    for opened in ("census", "émigrés", "2030.q1:west@a+b-c"):
        ledger.open_account(opened, odo.Policy(1, 1e-6))
    ledger.account("census").spend(odo.PureDP("0.25"))
    for account in ledger.accounts():
        found = samples(metrics.render(ledger))
        name = ("account", account.name)
        ratio = used(account.compiled, account.totals)
        assert found["odograph_budget_spent_ratio", (name,)] == pytest.approx(ratio)
        left = {
            labels[1][1]: value for (what, labels), value in found.items() if what.endswith("left") and name in labels
        }
        assert left == pytest.approx(account.decide(odo.PureDP(0)).left)
    before = found["odograph_budget_left", (("account", "census"), ("meter", "epsilon"))]
    assert before == pytest.approx(0.75, abs=2e-12)
    ledger.account("census").spend(odo.PureDP("0.5"))
    after = samples(metrics.render(ledger))["odograph_budget_left", (("account", "census"), ("meter", "epsilon"))]
    assert after == pytest.approx(0.25, abs=2e-12)


def test_a_meter_that_has_no_price_left_shows_nothing_left(ledger: odo.Ledger) -> None:
    ledger.open_account("census", odo.Policy(1, 1e-6)).spend(odo.gaussian(sigma=50, sensitivity=1))
    found = samples(Metrics().render(ledger))
    assert found["odograph_budget_left", (("account", "census"), ("meter", "epsilon"))] == 0
    assert found["odograph_budget_left", (("account", "census"), ("meter", "smooth"))] > 0
    assert 0 < found["odograph_budget_spent_ratio", (("account", "census"),)] < 1


def test_labels_are_of_accounts_and_requests_and_never_of_people(ledger: odo.Ledger) -> None:
    ledger.acting_as("alice").open_account("census", odo.Policy(1, 1e-6), note="for bob").spend(odo.PureDP(0.1))
    metrics = Metrics()
    metrics.count_response("/v1/accounts", 200, 0.01)
    text = metrics.render(ledger)
    assert other_labels(text) == set()
    assert b"alice" not in text
    assert b"bob" not in text
    # Control: a balance per person is caught.
    registry = CollectorRegistry()
    Gauge("odograph_person_left", "Wrong.", ["person"], registry=registry).labels("bob").set(1)
    assert other_labels(text + generate_latest(registry)) == {"person"}


def refusals(text: bytes) -> dict[str, float]:
    return {labels[0][1]: value for (name, labels), value in samples(text).items() if "account_refusals" in name}


def test_refusals_have_a_bounded_number_of_labels_and_none_is_lost(ledger: odo.Ledger) -> None:
    metrics, count = Metrics(), MAX_ACCOUNT_LABELS + 20
    for number in range(count):
        for _ in range(3):
            metrics.count_refusal(f"a{number}")
    found = refusals(metrics.render(ledger))
    assert len(found) == MAX_ACCOUNT_LABELS + 1
    assert found["a0"] == 3
    assert found[OTHER_ACCOUNTS] == 3 * 20
    assert sum(found.values()) == 3 * count
    with pytest.raises(odo.errors.InvalidArgument):  # no account can be mistaken for the others
        ledger.open_account(OTHER_ACCOUNTS, odo.Policy(1, 1e-6))


def pending(text: bytes) -> dict[str, float]:
    return {labels[0][1]: value for (name, labels), value in samples(text).items() if "pending" in name}


def test_pending_reservations_are_counted_by_account_on_every_store(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_COUNT_INTERVAL", 0.0)
    monkeypatch.setattr(module, "_COUNT_SHARE", 0.0)
    metrics = Metrics()
    with odo.connect(url) as ledger:
        assert pending(metrics.render(ledger)) == {}
        for name in ("top", "low", "none"):
            ledger.open_account(name, odo.Policy(1, 0, filter="basic"), parent="top" if name == "low" else None)
        held = [ledger.account("low").reserve(odo.PureDP("0.01")) for _ in range(3)]
        ledger.reserve({"low": odo.PureDP("0.01"), "top": odo.PureDP("0.01")})
        expected = {name: len(ledger.account(name).pending) for name in ("top", "low", "none")}
        assert pending(metrics.render(ledger)) == expected
        assert expected["low"] == 4
        held[0].commit()
        held[1].void("not run")
        expected = {name: len(ledger.account(name).pending) for name in ("top", "low", "none")}
        assert pending(metrics.render(ledger)) == expected
        assert expected["low"] == 2


def test_counting_reservations_takes_a_small_part_of_the_time(
    ledger: odo.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
    now, counted = [0.0], [0]
    assert isinstance(ledger.backend, LocalBackend)

    def count() -> dict[str, int]:
        now[0] += 2.0  # as long as there are a million reservations
        counted[0] += 1
        return {"census": counted[0]}

    monkeypatch.setattr(ledger.backend.store, "pending_counts", count)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    metrics = Metrics()
    for _ in range(1000):
        assert pending(metrics.render(ledger))["census"] == counted[0]
        now[0] += 1.0
    assert 2.0 * counted[0] <= 0.06 * now[0]
    assert counted[0] > 10


def test_a_writer_that_ended_is_counted(tmp_path: Path) -> None:
    with Service(f"sqlite:///{tmp_path}/ledger.db", tmp_path) as running:
        headers = {"Authorization": f"Bearer {running.token()}"}

        def restarts() -> float:
            text = httpx.get(f"{running.url}/metrics", headers=headers).content
            return samples(text)["odograph_writer_restarts_total", ()]

        assert restarts() == 0
        (writer,) = running.writers
        end_process(writer)
        wait_until(lambda: restarts() == 1)
        wait_until(running.is_ready)
        assert restarts() == 1


WORKER = """
import sys
import odograph as odo
from odograph.service.monitoring import Metrics
metrics = Metrics()
for _ in range(int(sys.argv[1])):
    metrics.count_charge("spend")
    metrics.count_response("/v1/accounts", 200, 0.01)
metrics.set_queue_depth(int(sys.argv[1]))
sys.stdout.buffer.write(metrics.render(odo.connect("memory://")))
print("# end", flush=True)
sys.stdin.read()
"""


def test_each_worker_renders_the_sum_of_all(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    rendered = []
    workers = []
    for count in ("3", "4"):
        worker = subprocess.Popen(  # noqa: S603  our own
            [sys.executable, "-c", WORKER, count], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert worker.stdout is not None
        rendered.append(samples(b"".join(takewhile(lambda line: line != b"# end\n", worker.stdout))))
        workers.append(worker)
    for worker in workers:
        worker.communicate()
    assert [found["odograph_spends_total", (("verb", "spend"),)] for found in rendered] == [3, 7]
    assert rendered[1]["odograph_requests_total", (("route", "/v1/accounts"), ("status", "200"))] == 7
    assert rendered[1]["odograph_queue_depth", ()] == 7
    assert rendered[1]["odograph_request_seconds_count", (("route", "/v1/accounts"),)] == 7
    # Control: without a folder to share, a process knows of itself alone.
    alone = subprocess.run(  # noqa: S603
        [sys.executable, "-c", WORKER, "4"], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    assert samples(alone.stdout)["odograph_spends_total", (("verb", "spend"),)] == 4


def test_what_was_gathered_is_counted_in_the_event_loop_alone_and_before_it_is_shown(
    service: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, threads = Metrics.fold, set[str]()

    def watched(self: Metrics) -> None:
        threads.add(threading.current_thread().name)
        fold(self)

    monkeypatch.setattr(Metrics, "fold", watched)
    with odo.connect(service.url, token=service.token("ana")) as ledger:
        for number in range(1, 4):
            ledger.account("census").spend(odo.PureDP("0.01"), key=f"q-{number}")
            found = re.search(r'odograph_spends_total\{verb="spend"\} (\d+)', owner.get("/metrics").text)
            assert found is not None
            assert int(found[1]) == number
    assert len(threads) == 1
    assert not any(name.startswith("odograph") for name in threads), "a thread of the pool"
