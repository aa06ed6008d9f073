"""Lists in pages: every row once, also while others write; links to the next page; entries chosen by a query."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import attacks
import httpx
import pytest
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.backend import LocalBackend
from odograph.ledger.ledger import Ledger
from odograph.service import visibility

SMALL: Final = {"cost": attacks.pure("0.0001")}
ENTRIES: Final = "/v1/accounts/census/entries"


def pages(client: httpx.Client, url: str) -> Iterator[dict[str, Any]]:
    """Follow the links of a list."""
    following: str | None = url
    while following is not None:
        answer = client.get(following)
        assert answer.status_code == 200, answer.text
        yield answer.json()
        link = answer.links.get("next")
        assert (link is None) == (answer.json()["next"] is None)
        following = None if link is None else str(answer.url.join(link["url"]))


def rows(client: httpx.Client, url: str, field: str) -> list[Any]:
    """Return the rows of all pages of a list."""
    return [row for page in pages(client, url) for row in page[field]]


def meanwhile(write: Callable[[int], None], read: Callable[[], list[Any]]) -> list[Any]:
    """Read a list while a thread writes to it."""
    stopped = threading.Event()

    def writing() -> None:
        number = 0
        while not stopped.is_set():
            write(number := number + 1)

    writer = threading.Thread(target=writing)
    writer.start()
    try:
        return read()
    finally:
        stopped.set()
        writer.join()


def test_accounts_are_listed_once_while_others_are_opened(owner: httpx.Client) -> None:
    before = [f"a{number:02}" for number in range(20)]
    for name in before:
        attacks.open_account(owner, name)
    found = meanwhile(
        lambda number: attacks.open_account(owner, f"b{number}"),
        lambda: [row["name"] for row in rows(owner, "/v1/accounts?limit=3", "accounts")],
    )
    assert {*before, "census"} <= {*found}
    assert found == sorted(set(found))


def test_entries_are_listed_once_while_others_are_written(owner: httpx.Client) -> None:
    def spend(number: int) -> None:
        assert attacks.post(owner, "/v1/accounts/census/spends", SMALL, key=f"w-{number}").status_code == 201

    for number in range(20):
        spend(-number)
    found = meanwhile(spend, lambda: rows(owner, f"{ENTRIES}?count=3", "entries"))
    assert len(found) >= 21
    assert [row["sequence"] for row in found] == [*range(len(found))]


def test_reservations_are_listed_once_while_others_are_made_and_resolved(owner: httpx.Client, remote: Ledger) -> None:
    for number in range(10):
        attacks.post(owner, "/v1/accounts/census/reservations", SMALL, key=f"r-{number}")
    kept = {f"census#{number}" for number in range(1, 11)}

    def reserve_and_void(number: int) -> None:
        remote.account("census").reserve(odo.PureDP("0.0001"), key=f"w-{number}").void("a test")

    url = "/v1/accounts/census/reservations?count=3"
    found = meanwhile(reserve_and_void, lambda: [row["id"] for row in rows(owner, url, "reservations")])
    assert kept <= {*found}
    assert len(found) == len({*found})
    assert [one.id for one in remote.account("census").pending] == sorted(kept, key=lambda one: int(one[7:]))


def test_a_reservation_that_charged_an_account_above_twice_is_listed_once(owner: httpx.Client) -> None:
    for name in ("census-a", "census-b"):
        attacks.open_account(owner, name, parent="census")
    costs = {"costs": {"census-a": SMALL["cost"], "census-b": SMALL["cost"]}}
    assert attacks.post(owner, "/v1/reservations", costs, key="r").status_code == 201
    for count in (1, 2, 10):
        found = rows(owner, f"/v1/accounts/census/reservations?count={count}", "reservations")
        assert [row["id"] for row in found] == ["census-a#1"]


def test_keys_are_listed_once_while_others_are_made(service: ServiceThread, owner: httpx.Client) -> None:
    made = [attacks.post(owner, "/v1/keys", {"principal": "p", "role": "owner"}, key=f"k-{n}") for n in range(8)]
    ids = [one.json()["key"]["id"] for one in made]

    def make_another(_: int) -> None:
        service.token("another")

    found = meanwhile(
        make_another,
        lambda: [row["id"] for row in rows(owner, "/v1/keys?count=2", "keys")],
    )
    assert len(found) == len({*found})
    assert [one for one in found if one in ids] == ids[::-1]
    attacks.check_problem(owner.get("/v1/keys?after=000000000000"), 404)


def test_a_page_that_is_numbered_and_not_pointed_to_would_be_caught(owner: httpx.Client) -> None:
    """The control: a client that skips what it has seen by number reads some keys twice while others are made."""
    for number in range(6):
        attacks.post(owner, "/v1/keys", {"principal": "p", "role": "owner"}, key=f"k-{number}")
    first = owner.get("/v1/keys?count=3").json()["keys"]
    attacks.post(owner, "/v1/keys", {"principal": "p", "role": "owner"}, key="k-new")
    second = owner.get("/v1/keys").json()["keys"][3:6]
    assert {key["id"] for key in first} & {key["id"] for key in second}


# Entries chosen by what they are.


@pytest.fixture
def written(service: ServiceThread, owner: httpx.Client) -> list[dict[str, Any]]:
    """The entries of an account with several verbs and two principals."""
    with odo.connect(service.url, token=service.token("bob")) as ledger:
        account = ledger.account("census")
        account.spend(odo.PureDP("0.1"), key="q-1", note="Weekly count")
        account.reserve(odo.PureDP("0.1"), key="q-2", note="monthly").commit()
        with pytest.raises(odo.BudgetExceeded):
            account.spend(odo.PureDP("5"), key="weekly-5")
    attacks.post(owner, "/v1/accounts/census/spends", SMALL, key="q-3")
    return rows(owner, ENTRIES, "entries")


def test_entries_are_chosen(owner: httpx.Client, written: list[dict[str, Any]]) -> None:
    assert len(written) == 6
    for query, expected in (
        ("verb=spend", [1, 5]),
        ("verb=spend&principal=bob", [1]),
        ("principal=olga", [0, 5]),
        ("text=weekly", [1, 4]),
        ("text=Q-2", [2]),
        ("verb=close", []),
        ("first=-2", [4, 5]),
        ("first=2&principal=bob", [2, 3, 4]),
    ):
        for count in (1, 2, 100):
            found = rows(owner, f"{ENTRIES}?{query}&count={count}", "entries")
            assert [row["sequence"] for row in found] == expected


def test_entries_are_chosen_by_time(owner: httpx.Client, written: list[dict[str, Any]]) -> None:
    for one, other in pairwise(written):
        params = {"since": one["time"], "until": other["time"]}
        assert owner.get(ENTRIES, params=params).json()["entries"] == [one]
    for wrong in ("since=yesterday", "since=null", "until=0.5", "verb=null", "verb=", "first=null"):
        attacks.check_problem(owner.get(f"{ENTRIES}?{wrong}"), 400)
    attacks.check_problem(owner.get(f"{ENTRIES}?since=2030-01-01T00:00:00"), 400)
    told = owner.get(f"{ENTRIES}?since=2030-01-01").json()["detail"]
    assert told == "since must be a time with its zone, such as 2030-01-15T09:30:00Z (got '2030-01-01')"
    assert "regex" not in owner.get("/v1/keys?after=x").text
    attacks.check_problem(owner.get(f"{ENTRIES}?since=2030-13-01T00:00:00Z"), 400, 422)
    assert owner.get(f"{ENTRIES}?since=2020-01-01T00:00:00%2B02:00&count=1").links["next"]["url"].count("%2B02") == 1


def test_a_page_reads_a_bounded_number_of_entries_and_says_where_to_continue(
    owner: httpx.Client, written: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "_MAX_SCANNED", 4)
    answer = owner.get(f"{ENTRIES}?text=q-3").json()
    assert (answer["entries"], answer["next"]) == ([], 4)
    assert rows(owner, f"{ENTRIES}?text=q-3", "entries") == written[5:]


def test_a_bound_key_cannot_search_for_what_it_is_not_shown(service: ServiceThread, owner: httpx.Client) -> None:
    """The key of a void is its reservation's id, which may name a hidden account."""
    for name in ("census-a", "other"):
        attacks.open_account(owner, name, parent="census")
    costs = {"costs": {"census-a": SMALL["cost"], "other": SMALL["cost"]}}
    reservation = attacks.post(owner, "/v1/reservations", costs, key="secret-key").json()["id"]
    assert attacks.post(owner, f"/v1/reservations/{reservation.replace('#', '%23')}/commit", {}).status_code == 200
    with attacks.reach(service, service.token("a", "analyst", "other")) as analyst:
        for text in ("secret-key", "census-a"):
            assert rows(analyst, f"/v1/accounts/other/entries?text={text}", "entries") == []
            assert rows(owner, f"/v1/accounts/other/entries?text={text}", "entries") != []


# Keys for accounts that there are.


def test_a_key_is_made_for_accounts_that_exist(owner: httpx.Client) -> None:
    def make(*names: str) -> httpx.Response:
        form = {"principal": "ana", "role": "analyst", "accounts": names}
        return attacks.post(owner, "/v1/keys", form, key=f"k {' '.join(names)}")

    before = attacks.state(owner)
    for names, advice in ((("censu",), "did you mean 'census'?"), (("census", "zzz"), "open the account first")):
        answer = make(*names)
        attacks.check_problem(answer, 400)
        assert advice in answer.json()["detail"]
    assert attacks.state(owner) == before
    assert make("census").status_code == 201


def test_a_key_is_refused_where_there_is_no_account_yet(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        form = {"principal": "ana", "role": "analyst", "accounts": ["census"]}
        attacks.check_problem(attacks.post(owner, "/v1/keys", form, key="k"), 400)


def test_a_store_that_knows_no_pages_would_be_caught(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: pages that all begin with the first reservation."""
    for number in range(4):
        attacks.post(owner, "/v1/accounts/census/reservations", SMALL, key=f"r-{number}")
    page = LocalBackend.reservations_page
    monkeypatch.setattr(
        LocalBackend,
        "reservations_page",
        lambda self, name, first, count: (page(self, name, 0, count)[0], first + count),
    )
    links = pages(owner, "/v1/accounts/census/reservations?count=2")
    found = [row["id"] for _, one in zip(range(3), links, strict=False) for row in one["reservations"]]
    assert len(found) > len({*found})
