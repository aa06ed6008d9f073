"""How much work one request may ask for: it is bounded on every route, and others are answered meanwhile."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attacks
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_client import visitor_of
from service_process import Service
from service_server import ServiceThread

import odograph as odo
from odograph.core import planning as offers
from odograph.core.gate import Totals, decide
from odograph.core.guarantees import GDP, MOST_DIFFERENT, MOST_POINTS, Guarantee, Mechanism, Parallel, PureDP
from odograph.core.mechanisms import NOISES
from odograph.core.planning import largest_that
from odograph.ledger.ledger import Ledger
from odograph.service.endpoint import Route
from odograph.service.routes import ROUTES
from odograph.service.schemas import MAX_IN_BATCH, MAX_QUOTED, MAX_TERMS

Form = dict[str, Any]
RENYI: Final = {"epsilon": "1", "delta": "1e-6", "filter": "renyi"}
HOSTILE: Final = 8  # requests at a time
PARTS: Final = 10_000
MOST_PRICED: Final = 100 * 2 * MOST_DIFFERENT  # parts in one search, however many the request has


def priced_for(kind: Guarantee) -> int:
    """Return how many guarantees and points of curves are priced in the search for an offer."""
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="renyi"))
    totals, work = Totals.zero(compiled.meters), 0

    def admitted(cost: Guarantee, count: int) -> bool:
        nonlocal work
        if isinstance(cost, Mechanism) and cost.curve is not None:
            work += len(cost.curve.orders)
        else:
            work += len(cost.parts) if isinstance(cost, Parallel) else 1
        return decide(compiled.meters, totals, compiled.price(cost).times(count)).admitted

    largest_that(kind, 1, admitted)
    return work


@given(st.integers(1, 40), st.sampled_from([PureDP, GDP]), st.sampled_from([1, 2, 500]))
def test_the_search_for_an_offer_prices_no_more_for_more_parts(
    different: int, kind: Callable[[float], Guarantee], copies: int
) -> None:
    parts = [kind(2 + i) for i in range(different)] * copies
    assert priced_for(Parallel(tuple(parts))) <= MOST_PRICED


def test_a_search_that_prices_every_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = offers._parallel_maker  # noqa: SLF001  the control is made of it
    monkeypatch.setattr(offers, "_parallel_maker", lambda kind, **_: scaled(kind, whole=True))
    assert priced_for(Parallel((PureDP(2),) * 500)) > MOST_PRICED


def test_the_search_for_an_offer_is_bounded_for_curves_and_steps() -> None:
    for orders in (MOST_POINTS, 5 * MOST_POINTS):
        curve = odo.RDP(tuple(range(2, 2 + orders)), (1,) * orders)
        assert priced_for(Mechanism("m", 10**12, curve)) <= 100 * MOST_POINTS


@given(st.lists(st.sampled_from([PureDP(2), PureDP(3), GDP(4), GDP("1/3")]), min_size=1, max_size=12))
def test_an_offer_keeps_its_parts_in_their_places_and_is_admitted(parts: list[Guarantee]) -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, neighbors="replace-one"))
    offer = odo.planning.largest(
        odo.planning.AccountState("", compiled, Totals.zero(compiled.meters)), Parallel(tuple(parts))
    )
    assert isinstance(offer, Parallel)
    assert [part.kind for part in offer.parts] == [part.kind for part in parts]
    assert offers.ask(offers.AccountState("", compiled, Totals.zero(compiled.meters)), offer).admitted


def test_a_refusal_without_an_offer_says_why() -> None:
    account = odo.Accountant(odo.Policy(1, 1e-6, filter="renyi"))
    many = [PureDP(2 + i) for i in range(MOST_DIFFERENT + 1)]
    orders = tuple(range(2, 4 + MOST_POINTS))
    curve = odo.RDP(orders, (100,) * len(orders))
    for request, why in (
        (odo.parallel(many), f"more than {MOST_DIFFERENT} different parts a smaller request is not searched for"),
        (odo.parallel([PureDP(2), curve]), "curves or mechanisms have no single size"),
        (Mechanism("m", 7, curve), f"more than {MOST_POINTS} orders a smaller request is not searched for"),
    ):
        decision = account.decide(request)
        assert not decision.admitted
        assert why in str(decision)
    assert len(str(odo.parallel(many))) < 300


# The most expensive request that each route accepts, as far as anybody has found out. A new route needs a line here.


def pure(i: int) -> Form:
    return attacks.pure(f"{2 + i / 100_000}")


def parallel(different: int, parts: int = PARTS) -> Form:
    return {"kind": "parallel", "parts": [pure(i % different) for i in range(parts)]}


def curve(value: str) -> Form:
    orders = [f"{2 + i}.{'7' * 100}" for i in range(1000)]
    return {"kind": "rdp", "orders": orders, "values": [value] * 1000}


PEOPLE: Final = 50_000  # as many as a body of JSON holds
COSTS: Final = (parallel(MOST_DIFFERENT), parallel(MAX_TERMS), curve("9/7"), curve("0"))


# The mechanism that takes longest to price, at rates at which it was not priced before; and long numbers.
CALIBRATIONS: Final[list[Form]] = [
    *({"mechanism": "subsampled_gaussian", "settings": {"sampling_rate": rate}} for rate in ("0.5", "1e-6", "1e-99")),
    {"mechanism": "subsampled_gaussian", "settings": {"sampling_rate": "0.01"}, "times": 10**9},
    {"mechanism": "laplace", "settings": {"sensitivity": f"1.{'7' * 70}"}, "times": 10**9},
]


def bodies(route: Route) -> list[Form]:  # noqa: PLR0911  a line for each
    """Return the forms to send to a route; one empty form where it takes none."""
    path = route.path.rpartition("/")[2]
    if route.path.endswith("}/spends") or route.path.endswith("}/reservations") or path in ("decide", "how-many"):
        several = path == "decide" and "{name}" not in route.path
        return [{"costs": {"r": cost}} if several else {"cost": cost} for cost in COSTS]
    if path in ("spends", "reservations"):
        return [
            {"costs": {f"r{i}": cost for i in range(10)} | {"r": COSTS[0]}} for cost in (pure(1), parallel(100, 100))
        ]
    if path == "batches":
        refused = [{"key": f"k{i}", "costs": {"r": pure(i)}} for i in range(MAX_IN_BATCH)]
        long = [{"key": f"l{i}", "costs": {"r": parallel(16, 100)}} for i in range(MAX_TERMS // 16)]
        return [{"spends": refused}, {"spends": long}]
    if path == "quote":
        small = [attacks.pure(f"0.000{i:03}1") for i in range(MAX_QUOTED)]
        return [{"costs": small}, {"costs": [curve("0"), parallel(900)]}]
    if path == "largest":
        known: Form = {"kind": "mechanism", "name": "m", "steps": 10**12, "curve": curve("1")}
        short = {field: known["curve"][field][:MOST_POINTS] for field in ("orders", "values")}
        return [{"like": like} for like in (*COSTS, known, known | {"curve": known["curve"] | short})]
    if path == "calibrate":
        return CALIBRATIONS
    if route.path == "/v1/accounts":
        many = {"kind": "renyi", "orders": [[2 + i, "0.01"] for i in range(100)]}
        return [{"name": "q", "policy": {"epsilon": "1", "delta": "1e-6", "filter": [many]}}]
    if path == "keys":
        return [{"principal": "ana", "role": "analyst", "accounts": ["r"]}]
    if path in ("commit", "close", "void"):
        return [{"reason" if path == "void" else "note": "x" * 10_000}]
    return [{}]


def bodies_for_people(route: Route) -> list[Form]:
    """Return the forms to send to a route of populations."""
    everyone = [*range(PEOPLE)]
    different = [attacks.pure(f"0.00{i:04}7") for i in range(MAX_TERMS)]
    mixed: Form = {"guarantees": different, "which": [i % MAX_TERMS for i in everyone], "ids": everyone}
    slow = [curve("0"), parallel(900)]
    found: dict[str, list[Form]] = {
        "populations": [{"name": "others", "policy": {"epsilon": "1", "delta": "1e-6"}, "engine": "duckdb"}],
        "rounds": [mixed, {"guarantees": slow, "which": [0] * PEOPLE, "ids": everyone}],
        "counts": [{"probe": curve("0"), "cost": attacks.pure("0.01")}],
        "joins": [{"ids": everyone}],
        "removals": [{"ids": everyone}],
    }
    return found.get(route.path.rpartition("/")[2], [{}])


def costing(send: Callable[[], httpx.Response]) -> tuple[float, int]:
    """Return the processor's seconds of an answer, of the service and of whoever asks, and its status."""
    gc.disable()  # a collection would walk all that earlier tests have left
    try:
        begun = time.process_time()
        status = send().status_code
        return time.process_time() - begun, status
    finally:
        gc.enable()


def most_expensive(service: ServiceThread) -> dict[str, float]:
    """Return the cost of the most expensive request to each route, in cheap requests."""
    found: dict[str, float] = {}
    with attacks.owner_of(service) as owner, attacks.reach(service, service.token("olga", "runner")) as runner:
        for name in ("r", *(f"r{i}" for i in range(10))):
            attacks.open_account(owner, name, RENYI)
        for i in range(8):  # what is read is long
            answer = attacks.post(owner, "/v1/accounts/r/spends", {"cost": COSTS[i % 2]}, key=f"long {i}")
            assert answer.status_code == 409, answer.text[:500]
        held = attacks.post(owner, "/v1/accounts/r/reservations", {"cost": attacks.pure("0.001")}, key="held").json()
        attacks.create_population(owner, "people", ids=range(PEOPLE), policy=RENYI)
        names = {"name": "r", "reservation": held["id"].replace("#", "%23")}
        cheap = statistics.median(costing(lambda: owner.get("/v1/accounts/r0/balance"))[0] for _ in range(20))
        for route in sorted(ROUTES, key=lambda route: (route.method == "DELETE", route.path)):
            people = "nothing" if route.path.endswith("/close") else "people"  # it is still charged
            of = names | {"name": people, "round": "mixed"} if "/populations/" in route.path else names
            client = runner if route.verb == "see-participants" else owner
            path = attacks.path_of(route, **of) + ("?count=1000" if route.path.endswith("entries") else "")
            forms = bodies_for_people(route) if "/populations" in route.path else bodies(route)
            for i, form in enumerate(forms):
                content = None if route.form is None else form
                key = "mixed" if route.path.endswith("/rounds") and not i else f"{route.path.encode().hex()}{i}"
                headers = {"Idempotency-Key": key}
                cost, status = costing(
                    lambda: client.request(route.method, path, headers=headers, json=content)  # noqa: B023  at once
                )
                assert (
                    status not in (400, 401, 403, 405, 413, 415, 422) or route.upload or route.method == "DELETE"
                ), f"{route.path} does not accept what was made for it: {status}"
                found[route.path] = max(cost / cheap, found.get(route.path, 0.0))
    return found


def test_no_route_accepts_a_request_that_costs_more_than_a_thousand_cheap_ones(service: ServiceThread) -> None:
    costs = most_expensive(service)
    assert costs.keys() == {route.path for route in ROUTES}
    assert max(costs.values()) < 1000, sorted(costs.items(), key=lambda one: -one[1])[:5]


def test_a_service_that_takes_any_number_of_different_parts_is_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "MOST_DIFFERENT", PARTS)
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "r", RENYI)
        cheap = statistics.median(costing(lambda: owner.get("/v1/accounts/r/balance"))[0] for _ in range(20))
        form = {"cost": parallel(1000, 1000)}
        cost, status = costing(lambda: attacks.post(owner, "/v1/accounts/r/decide", form))
    assert (status, cost > 1000 * cheap) == (200, True)


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/accounts/r/decide", {"cost": parallel(MAX_TERMS + 1)}),
        ("/v1/decide", {"costs": {"r": curve("1"), "r0": curve("1"), "r1": pure(1)}}),
        ("/v1/accounts/r/quote", {"costs": [curve("1"), curve("1"), pure(1)]}),
        ("/v1/accounts/r/spends", {"cost": parallel(MAX_TERMS + 1)}),
        ("/v1/accounts/r/reservations", {"cost": parallel(MAX_TERMS + 1)}),
        ("/v1/spends", {"costs": {f"r{i}": parallel(500, 500) for i in range(5)}}),
        ("/v1/reservations", {"costs": {f"r{i}": parallel(500, 500) for i in range(5)}}),
        ("/v1/batches", {"spends": [{"key": f"k{i}", "costs": {"r": parallel(21, 21)}} for i in range(100)]}),
        ("/v1/accounts/r/largest", {"like": parallel(MAX_TERMS + 1)}),
        ("/v1/accounts/r/how-many", {"cost": parallel(MAX_TERMS + 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_than_may_be_priced_in_one_request_is_refused_with_the_number(
    service: ServiceThread, path: str, form: Form
) -> None:
    with attacks.owner_of(service) as owner:
        answer = attacks.post(owner, path, form, key="k")
    attacks.check_problem(answer, 422)
    assert f"at most {MAX_TERMS} guarantees and points of curves (got " in answer.json()["detail"]


def test_a_long_page_of_entries_ends_early_and_a_client_reads_on(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "r")
        for i in range(7):
            attacks.post(owner, "/v1/accounts/r/spends", {"cost": parallel(1)}, key=f"k{i}")
        page = owner.get("/v1/accounts/r/entries?count=1000").json()
        assert page["size"] == 8
        assert 1 <= len(page["entries"]) < 8
        with odo.connect(service.url, token=service.token("ana", "auditor")) as ledger:
            found = ledger.account("r").history(0, 1000)
    assert [past.entry.sequence for past in found] == [*range(8)]


def test_of_a_batch_the_first_refusals_have_offers_and_the_others_say_that_none_was_searched(
    service: ServiceThread,
) -> None:
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, "r")
        items = [{"key": f"k{i}", "costs": {"r": pure(i)}} for i in range(12)]
        results = attacks.post(owner, "/v1/batches", {"spends": items}).json()["results"]
    decisions = [result["problem"]["decision"] for result in results]
    assert [decision["largest"] is not None for decision in decisions] == [True] * 8 + [False] * 4
    assert "A smaller request was not searched for" in decisions[-1]["message"]


def test_of_a_batch_the_first_notes_say_what_falls_and_the_others_what_ends(service: ServiceThread) -> None:
    gaussian = {"kind": "gdp", "mu": "0.04"}
    with attacks.owner_of(service) as owner:
        for i in range(12):
            attacks.open_account(owner, f"r{i}", {"epsilon": "1", "delta": "1e-6"})
        items = [{"key": f"k{i}", "costs": {f"r{i}": gaussian}} for i in range(12)]
        results = attacks.post(owner, "/v1/batches", {"spends": items}).json()["results"]
    notes = [note for result in results for note in result["receipt"]["notes"]]
    assert ["falls from 1 to 0.5166" in note for note in notes] == [True] * 8 + [False] * 4
    assert all("the plain sum of epsilons no longer counts" in note for note in notes)


def test_the_search_for_the_least_noise_prices_few_requests() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="renyi"))
    for noise in NOISES.values():
        settings = {name: "0.01" for name, needed in noise.settings.items() if needed}
        for times in (1, 1000, 10**9, 10**30):
            prices = 0

            def admitted(cost: Guarantee, times: int = times) -> bool:
                nonlocal prices
                prices += 1
                price = compiled.price(cost).times(times)
                return decide(compiled.meters, Totals.zero(compiled.meters), price).admitted

            offers.calibrate_that(offers.calibration_question(noise.mechanism, times, settings), admitted)
            assert 10 <= prices <= 40


def raw_request(service: Service, token: str, path: str, form: Form) -> bytes:
    body = json.dumps(form).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def flooded(service: Service, token: str) -> Iterator[None]:
    """Have eight of the most expensive requests asked again and again, by another process."""
    asked: list[tuple[str, Form]] = [
        ("/v1/accounts/r/decide", {"cost": parallel(MAX_TERMS, MAX_TERMS)}),
        ("/v1/accounts/r/decide", {"cost": parallel(MOST_DIFFERENT)}),
        ("/v1/accounts/r/largest", {"like": parallel(MOST_DIFFERENT, 100)}),
        ("/v1/accounts/r/quote", {"costs": [attacks.pure(f"0.000{i:03}1") for i in range(MAX_QUOTED)]}),
    ]
    requests = [raw_request(service, token, path, form) for path, form in asked * (HOSTILE // len(asked))]
    program = [sys.executable, str(Path(__file__).with_name("request_flood.py")), str(service.port)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:  # noqa: S603  our own
        assert flood.stdin is not None
        assert flood.stdout is not None
        for request in requests:
            flood.stdin.write(f"{len(request)}\n".encode() + request)
        flood.stdin.write(b"0\n")
        flood.stdin.flush()
        assert flood.stdout.readline().split() == [b"200"]
        yield
        flood.stdin.close()


def slowdown(folder: Path, *, defect: str = "", tries: int = 4, spends: int = 40) -> float:
    """Return how many times as long a spend takes next to hostile requests: medians, and the best of some tries."""
    with Service(f"sqlite:///{folder}/ledger.db", folder, defect=defect) as service:
        token = service.token()
        with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            attacks.open_account(client, "r", RENYI)
            attacks.open_account(client, "v")
            number = iter(range(10**6))

            def spend() -> float:
                begun = time.perf_counter()
                answer = attacks.post(
                    client, "/v1/accounts/v/spends", {"cost": attacks.pure("0.00001")}, key=f"k{next(number)}"
                )
                assert answer.status_code == 201, answer.text
                return time.perf_counter() - begun

            ratios: list[float] = []
            while len(ratios) < tries and min(ratios, default=100.0) > 10.0:
                quiet = statistics.median(spend() for _ in range(spends))
                with flooded(service, service.token("eve", "analyst")):
                    ratios.append(statistics.median(spend() for _ in range(spends)) / quiet)
        return min(ratios)


def test_a_spend_next_to_eight_hostile_requests_is_answered_within_ten_times_its_quiet_latency(
    tmp_path: Path,
) -> None:
    assert slowdown(tmp_path) <= 10


def test_a_service_whose_threads_all_compute_is_caught(tmp_path: Path) -> None:
    assert slowdown(tmp_path, defect="crowded", tries=1, spends=5) > 10


def test_one_replay_at_a_time_whether_by_the_page_or_by_the_api(
    service: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, verify = threading.Event(), threading.Event(), Ledger.verify

    def slowly(self: Ledger, **options: Any) -> object:
        begun.set()
        go_on.wait(5)
        return verify(self, **options)

    def ask(way: Callable[[], int], heard: list[int]) -> None:
        heard.append(way())

    visitor = visitor_of(service)
    csrf = visitor.csrf
    ways: dict[str, Callable[[], int]] = {
        "page": lambda: visitor.send("/audit", {"csrf": csrf}).status_code,
        "api": lambda: attacks.post(owner, "/v1/verify", {}).status_code,
    }
    monkeypatch.setattr(Ledger, "verify", slowly)
    for first in ways.values():
        begun.clear()
        go_on.clear()
        answers: list[int] = []
        thread = threading.Thread(target=ask, args=(first, answers))
        thread.start()
        assert begun.wait(5)
        # Over other connections than the first uses.
        with attacks.owner_of(service) as other:
            refused = attacks.post(other, "/v1/verify", {})
        assert (refused.status_code, refused.json()["code"]) == (503, "LedgerBusy")
        assert visitor_of(service).send("/audit", {"csrf": csrf}).status_code == 403, "another visit's form"
        second = visitor_of(service)
        assert second.send("/audit", {"csrf": second.csrf}).status_code == 503
        go_on.set()
        thread.join()
        assert answers == [200]
        # Control: the next one has its turn.
        assert [way() for way in ways.values()] == [200, 200]
