"""The overview of many accounts: filters, orders, pages and the tree; what it costs to make; what it discloses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

import odograph as odo
from odograph.errors import BadRequest
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import Author, Open
from odograph.ledger.ledger import Ledger
from odograph.ledger.stores.base import Changes, Head, State
from odograph.ledger.stores.memory import MemoryStore
from odograph.service.auth import Caller, Role
from odograph.service.dashboard.pages import Page, page_response
from odograph.service.dashboard.view_models import Overview, audit_page, data_version, overview_page

PLAIN = odo.compile_policy(odo.Policy(1, 0, filter="basic"))
OWNER = Caller("ada", Role.OWNER, "0" * 12, None)


def bound(*names: str) -> Caller:
    return Caller("bob", Role.ANALYST, "1" * 12, frozenset(names))


class CountedStore(MemoryStore):
    """A store that counts what is read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:  # noqa: ANN401  whatever the store has
        if name in {"balances", "openings", "entries", "notes", "principals", "pending", "pending_count", "voids"}:
            super().__getattribute__("reads")[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def store() -> CountedStore:
    return CountedStore()


@pytest.fixture
def ledger(store: CountedStore) -> Iterator[Ledger]:
    with Ledger(LocalBackend(store, "ana")) as made:
        yield made


def html_of(page: Page) -> str:
    """Render a page as a signed-in browser gets it."""
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []})
    request.state.browser_session = None
    return bytes(page_response(request, page).body).decode()


def found_by(ledger: Ledger, caller: Caller = OWNER, /, **query: str) -> Overview:
    found: Overview = overview_page(ledger, caller, query).context["found"]
    return found


def names_of(ledger: Ledger, caller: Caller = OWNER, /, **query: str) -> list[str]:
    return [line.row.name for line in found_by(ledger, caller, **query).lines]


def stock(ledger: Ledger) -> None:
    """A tree of three levels beside others, in every state."""
    for name, parent, spent in (
        ("all", "", "0.2"),
        ("north", "all", "0.1"),
        ("north-2", "north", "0.05"),
        ("south", "all", "0.3"),
        ("edge", "", "0.95"),
        ("brim", "", "0.97"),
        ("full", "", "1"),
        ("gone", "", "0.4"),
    ):
        ledger.open_account(name, PLAIN, parent=parent, dataset="visits" if parent else "")
        ledger.account(name).spend(odo.PureDP(spent))
    ledger.account("gone").close()


def test_accounts_are_in_the_order_of_their_states_or_in_a_chosen_one(ledger: Ledger) -> None:
    stock(ledger)
    assert names_of(ledger) == ["brim", "edge", "all", "north", "north-2", "south", "full", "gone"]
    assert names_of(ledger, sort="name") == ["all", "brim", "edge", "full", "gone", "north", "north-2", "south"]
    assert names_of(ledger, sort="spent")[:3] == ["full", "brim", "edge"]
    assert names_of(ledger, sort="steps")[0] == "all"
    assert names_of(ledger, sort="time")[0] == "gone"
    with pytest.raises(BadRequest, match=r"sort must be one of name, spent, steps, time \(got 'x'\)"):
        overview_page(ledger, OWNER, {"sort": "x"})


def test_accounts_are_filtered_by_state_filter_dataset_parent_and_text(ledger: Ledger) -> None:
    stock(ledger)
    ledger.open_account("curves", odo.Policy(1, "1e-6", filter="renyi", privacy_unit="patient"))
    assert names_of(ledger, state="near") == ["brim", "edge"]
    assert names_of(ledger, state="used up") == ["full"]
    assert names_of(ledger, state="closed") == ["gone"]
    assert names_of(ledger, filter="renyi") == ["curves"]
    assert names_of(ledger, dataset="visits") == ["north", "north-2", "south"]
    assert names_of(ledger, parent="all") == ["north", "south"]
    assert names_of(ledger, q="NORTH") == ["north", "north-2"]
    assert names_of(ledger, q="patient") == ["curves"]
    assert names_of(ledger, q="north", parent="all", state="open") == ["north"]
    assert found_by(ledger, q="nothing").matching == 0
    assert found_by(ledger, state="near").counts == {"near": 2, "open": 5, "used up": 1, "closed": 1}


def test_the_tree_shows_what_is_chosen_below_what_is_above_it(ledger: Ledger) -> None:
    stock(ledger)
    lines = found_by(ledger, view="tree", sort="name").lines
    assert [(line.row.name, line.depth) for line in lines][:4] == [
        ("all", 0),
        ("north", 1),
        ("north-2", 2),
        ("south", 1),
    ]
    chosen = found_by(ledger, view="tree", q="north-2").lines
    assert [(line.row.name, line.above) for line in chosen] == [("all", True), ("north", True), ("north-2", False)]
    # Without the account above it, a child is at the top.
    assert [line.depth for line in found_by(ledger, bound("north", "north-2"), view="tree").lines] == [0, 1]


@settings(max_examples=20, deadline=None)
@given(
    parents=st.lists(st.integers(0, 30), min_size=1, max_size=140),
    text=st.sampled_from(["", "1", "a7", "zz"]),
    view=st.sampled_from(["", "tree"]),
    sort=st.sampled_from(["", "name", "spent"]),
)
def test_the_pages_together_show_every_chosen_account_once(
    parents: list[int], text: str, view: str, sort: str
) -> None:
    with odo.connect("memory://") as ledger:
        for i, above in enumerate(parents):
            ledger.open_account(f"a{i}", PLAIN, parent=f"a{above}" if above < i else "")
        wanted = {name for name in (f"a{i}" for i in range(len(parents))) if text in f"{name}  basic person"}
        query = {"q": text, "view": view, "sort": sort}
        found = [found_by(ledger, **query, page=str(i + 1)) for i in range(found_by(ledger, **query).pages)]
        shown = [line.row.name for page in found for line in page.lines if not line.above]
        assert sorted(shown) == sorted(wanted)
        assert all(page.matching == len(wanted) for page in found)
        for page in found:
            assert sum(not line.above for line in page.lines) <= 50
            on_page = {line.row.name: i for i, line in enumerate(page.lines)}
            for i, line in enumerate(page.lines) if view else ():
                assert on_page.get(line.row.parent, -1) < i, "every account is below the one above it, on its page"
                assert (line.row.parent in on_page) is (line.depth > 0)
        assert found_by(ledger, **query, page="999").page == len(found)


def many(count: int) -> Changes:
    """Open accounts below each other, forty at a time, without looking at all the others for each."""
    changes = Changes()
    for i in range(count):
        name, parent = f"region-{i:04}", f"region-{i // 40 * 40:04}" if i % 40 else ""
        above = {one.head.name: one for one in changes.opened[i - i % 40 :][:1]}
        command = Open(
            Author("0" * 32, name), Head(name, parent, "", f"survey-{i % 7}", "person", "add-remove"), PLAIN
        )
        command.apply(State(1, above, {}), changes)
    return changes


def test_the_overview_of_two_thousand_accounts_is_small_and_is_made_of_one_read(
    ledger: Ledger, store: CountedStore
) -> None:
    store.load([many(2000)], {"0" * 32: "ana"})
    overview_page(ledger, OWNER, {})
    assert store.reads == {"balances": 1, "openings": 1}  # the policies, which never change, at once
    for query in ({}, {"view": "tree"}, {"sort": "time", "page": "40"}, {"q": "region-19"}):
        store.reads.clear()
        text = html_of(overview_page(ledger, OWNER, query))
        assert store.reads == {"balances": 1}, query
        assert len(text.encode()) < 100_000, query
        assert 40 <= text.count('href="/accounts/') <= 60
    whole = overview_page(ledger, OWNER, {})
    # All of them in one page, as it was, are caught.
    everything = [line for i in range(1, 41) for line in found_by(ledger, page=str(i)).lines]
    whole.context["found"].lines = everything
    assert len(html_of(whole).encode()) > 800_000


def test_the_audit_of_two_thousand_accounts_is_in_pages_and_its_checkpoint_of_all(
    ledger: Ledger, store: CountedStore
) -> None:
    store.load([many(2000)], {"0" * 32: "ana"})
    seen: list[str] = []
    for page in range(1, 21):
        found = audit_page(ledger, OWNER, {"page": str(page)})
        text = html_of(found)
        assert len(text.encode()) < 50_000
        assert found.context["checkpoint"] == ledger.checkpoint().head
        assert ('rel="next"' in text) == (page < 20)
        seen += re.findall(r'href="/accounts/([^"]+)"', text)
    assert seen == sorted(account.name for account in ledger.accounts())
    form = audit_page(ledger, OWNER, {}).json_representation
    assert isinstance(form, dict)
    assert len(form["accounts"]) == 2000  # programs get all of them


def test_a_key_that_is_bound_sees_nothing_of_other_accounts_whatever_it_asks_for(ledger: Ledger) -> None:
    stock(ledger)
    caller = bound("north", "edge")
    ways: list[Mapping[str, str]] = [
        {},
        {"view": "tree"},
        {"parent": "all"},
        {"q": "all"},
        {"sort": "time", "page": "9"},
    ]
    for query in ways:
        page = overview_page(ledger, caller, query)
        shown = {line.row.name for line in page.context["found"].lines}
        assert shown <= {"north", "edge"}
        assert not any(name in str(page.json_representation) for name in ("'all'", "south", "brim"))
    assert names_of(ledger, caller, parent="all") == []
    assert found_by(ledger, caller).counts == {"near": 1, "open": 1, "used up": 0, "closed": 0}


# The version of what one account's page shows.


CHANGES: dict[str, Callable[[Ledger], object]] = {
    "itself": lambda ledger: ledger.account("north").spend(odo.PureDP("0.01")),
    "a child": lambda ledger: ledger.account("north-2").spend(odo.PureDP("0.01")),
    "the account above": lambda ledger: ledger.account("south").spend(odo.PureDP("0.01")),
    "a new child": lambda ledger: ledger.open_account("north-3", PLAIN, parent="north", dataset="visits"),
    "a successor": lambda ledger: ledger.open_account("later", PLAIN, successor_of="north", dataset="visits"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_version_of_an_account_changes_with_all_that_its_page_shows(ledger: Ledger, what: str) -> None:
    stock(ledger)
    before = data_version(ledger, OWNER, "north")
    CHANGES[what](ledger)
    assert data_version(ledger, OWNER, "north") != before


def test_the_version_of_an_account_does_not_change_with_others_or_tell_of_hidden_ones(ledger: Ledger) -> None:
    stock(ledger)
    before = data_version(ledger, OWNER, "north"), data_version(ledger, OWNER)
    ledger.account("edge").spend(odo.PureDP("0.01"))
    assert data_version(ledger, OWNER, "north") == before[0]
    assert data_version(ledger, OWNER) != before[1]
    # Whether a hidden account is the one above, or exists, makes no difference.
    caller = bound("north", "edge")
    assert data_version(ledger, caller, "all") == data_version(ledger, caller, "nowhere")
