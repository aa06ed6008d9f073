"""A key bound to accounts cannot see that others exist: every byte of every answer is searched for their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import attacks
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_server import ServiceThread

import odograph as odo
from odograph import account as account_module
from odograph.errors import AccountClosed, AccountNotFound
from odograph.service import schemas, visibility
from odograph.service.auth import Caller, Role, digest_of_token
from odograph.service.endpoint import Route
from odograph.service.key_store import connect_keys
from odograph.service.routes import ROUTES, accounts, charges

ZCDP: Final = {"epsilon": "1", "delta": "1e-6", "filter": "zcdp"}
SMALL, LARGE = attacks.pure("0.001"), attacks.pure("7")
GAUSSIAN: Final = {"kind": "gdp", "mu": "0.01"}
COSTS: Final = (SMALL, LARGE, GAUSSIAN)
NUMBERS: Final = count()


class Grove(NamedTuple):
    """Accounts of which a caller may see some."""

    seen: list[str]
    hidden: list[str]
    absent: list[str]  # as many names that nobody has opened, as long as the hidden ones


class Ask(NamedTuple):
    """A request that can be made about one account or another."""

    route: Route
    cost: dict[str, Any]
    beside: str  # an account that is asked together with the one in question


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceThread]:
    """A service for all these tests: each has accounts of its own."""
    where: Path = tmp_path_factory.mktemp("grown")
    with ServiceThread(f"sqlite:///{where}/served.db") as running:
        yield running


@pytest.fixture(scope="module")
def owner(grown: ServiceThread) -> Iterator[httpx.Client]:
    with attacks.owner_of(grown) as client:
        yield client


def fresh(word: str) -> str:
    """Return a name that is nowhere else, and part of no other."""
    return f"{word}.{next(NUMBERS):04}.{word[::-1]}"


def body_of(ask: Ask, name: str) -> Any:  # noqa: ANN401  JSON
    """Return what is sent to ask for something of this account."""
    together = {name: ask.cost} | ({ask.beside: SMALL} if ask.beside else {})
    items = [{"key": fresh("key"), "costs": together}, {"key": fresh("key"), "costs": {name: SMALL}}]
    bodies: dict[type, Any] = {
        schemas.SpendForm: {"cost": ask.cost},
        schemas.ReserveForm: {"cost": ask.cost},
        schemas.CostAskedForm: {"cost": ask.cost},
        schemas.SpendAllForm: {"costs": together},
        schemas.ReserveAllForm: {"costs": together},
        schemas.CostsForm: {"costs": together},
        schemas.BatchForm: {"spends": items},
        schemas.QuoteForm: {"costs": [ask.cost, SMALL, ask.cost]},
        schemas.LargestForm: {"like": ask.cost, "times": 3},
        schemas.CalibrateForm: {"mechanism": "laplace", "times": 3},
        schemas.VoidForm: {"reason": "it was not run"},
        schemas.MakeKeyForm: {"principal": "ana", "role": "analyst", "accounts": [name]},
        schemas.OpenForm: {"name": name, "policy": attacks.POLICY},
    }
    return None if ask.route.form is None else bodies.get(ask.route.form, {})


def send(client: httpx.Client, ask: Ask, name: str, sequence: int = 1) -> httpx.Response:
    """Make the request about this account."""
    place = f"{name}%23{sequence}"
    path = attacks.path_of(ask.route, name=name, reservation=place, entry=place)
    key = fresh("key") if ask.route.needs_idempotency_key else ""
    if ask.route.upload or ask.route.form is None:
        return client.request(ask.route.method, path)
    return attacks.post(client, path, body_of(ask, name), key=key)


def search(answer: httpx.Response, hidden: Sequence[str]) -> None:
    """Assert that no answer, in its head or body, holds a name of an account that the caller may not see."""
    text = f"{answer.status_code} {[*answer.headers.items()]} {answer.content.decode('utf-8', 'replace')}"
    found = [name for name in hidden if name in text]
    assert not found, f"{answer.request.method} {answer.request.url} told {found}: {text[:1500]}"
    assert answer.status_code < 500, f"{answer.request.method} {answer.request.url}: {text[:1500]}"


def check_unseen(client: httpx.Client, grove: Grove, asks: Sequence[Ask], sequences: Sequence[int]) -> None:
    """Assert that the caller finds no name of what is hidden, and that hidden and absent are answered alike."""
    for ask in asks:
        tried = sequences if "{reservation}" in ask.route.path else sequences[:1]
        for sequence in tried:
            for name in grove.seen:
                search(send(client, ask, name, sequence), grove.hidden)
            for hidden, absent in zip(grove.hidden, grove.absent, strict=True):
                one, other = (send(client, ask, name, sequence) for name in (hidden, absent))
                search(one, grove.hidden)
                words = repr(told(one)), repr(told(other)).replace(absent, hidden)
                assert words[0] == words[1], f"{ask.route.path} tells one that is hidden from one that is not there"


def told(answer: httpx.Response) -> object:
    """Return what an answer tells: of a file that is sent piece by piece, that it is one."""
    return attacks.same_words(answer) if "json" in answer.headers["content-type"] else answer.status_code


def check_pages(service: ServiceThread, token: str, grove: Grove) -> None:
    """Assert the same of the pages that people look at, and of their JSON twins."""
    with connect_keys(service.settings.url) as keys:
        key = keys.find(digest_of_token(token))
        assert key is not None
        secret, _ = keys.begin_session(key.id)
    with attacks.reach(service, None) as browser:
        browser.headers["Cookie"] = f"odograph_session={secret}"
        for accept in ("text/html", "application/json"):
            paths = ["/", "/audit", "/open", "/data-version", "/spending", "/entries", "/pending", "/populations"]
            paths.append("/principal?name=olga")
            for name in grove.seen:
                paths += [
                    f"/accounts/{name}{more}"
                    for more in ("", "/chart", "/plan?kind=pure&epsilon=7", "?compare=1", "/entries.csv")
                ]
            for path in paths:
                search(browser.get(path, headers={"Accept": accept}), grove.hidden)
            assert browser.get("/", headers={"Accept": accept}).status_code == 200, "the cookie is a good one"
            for hidden, absent in zip(grove.hidden, grove.absent, strict=True):
                answers = [browser.get(f"/accounts/{name}", headers={"Accept": accept}) for name in (hidden, absent)]
                assert {answer.status_code for answer in answers} == {404}


def every_ask(beside: str) -> list[Ask]:
    """Return every route, with costs that fit, that do not, and that not every policy takes; alone and together."""
    found = []
    for route in ROUTES:
        several = route.form in {
            schemas.SpendAllForm,
            schemas.ReserveAllForm,
            schemas.CostsForm,
            schemas.BatchForm,
        }
        costs = COSTS if route.form is not None else COSTS[:1]
        found += [Ask(route, cost, other) for cost in costs for other in (("", beside) if several else ("",))]
    return found


def plant(owner: httpx.Client, own_policy: dict[str, str] = attacks.POLICY) -> Grove:
    """Grow a tree in which everything happened that could tell of a relative."""
    top, own, sibling, below, after, cut, leaf = (
        fresh(word) for word in ("top", "own", "sibling", "below", "after", "cut", "leaf")
    )
    attacks.open_account(owner, top)
    attacks.open_account(owner, own, own_policy, parent=top)
    attacks.open_account(owner, sibling, parent=top)
    attacks.open_account(owner, below, parent=own)
    attacks.open_account(owner, after, successor_of=own)
    attacks.open_account(owner, cut)
    attacks.open_account(owner, leaf, parent=cut)
    spends = [
        {own: SMALL, sibling: SMALL},
        {own: SMALL},
        {below: SMALL},
        {sibling: attacks.pure("0.9")},
        {after: SMALL},
    ]
    spends += [
        {own: attacks.pure("0.5")},
        {own: SMALL, sibling: LARGE},
        {leaf: SMALL, own: SMALL},
    ]  # two of them refused
    for costs in spends:
        assert attacks.post(owner, "/v1/spends", {"costs": costs}, key=fresh("key")).status_code in {201, 409}
    held = []
    for costs in [{own: SMALL, sibling: SMALL}] * 3 + [{own: SMALL}] * 3 + [{below: SMALL, own: SMALL}]:
        made = attacks.post(owner, "/v1/reservations", {"costs": costs}, key=fresh("key"))
        assert made.status_code == 201
        held.append(made.json()["id"].replace("#", "%23"))
    for one, verb in ((0, "commit"), (1, "void"), (3, "commit"), (4, "void")):
        form = {"reason": "not run"} if verb == "void" else {"note": "run"}
        assert attacks.post(owner, f"/v1/reservations/{held[one]}/{verb}", form).status_code == 200
    assert attacks.post(owner, f"/v1/accounts/{cut}/close", {}).status_code == 200
    hidden = [top, sibling, below, after, cut]
    return Grove([own, leaf], hidden, [fresh(name.partition(".")[0]) for name in hidden])


@pytest.mark.parametrize(("role", "policy"), [("analyst", attacks.POLICY), ("runner", ZCDP), ("auditor", ZCDP)])
def test_no_answer_names_an_account_that_the_key_is_not_bound_to(
    grown: ServiceThread, owner: httpx.Client, role: str, policy: dict[str, str]
) -> None:
    grove = plant(owner, policy)
    token = grown.token("ana", role, *grove.seen)
    with attacks.reach(grown, token) as client:
        check_unseen(client, grove, every_ask(grove.seen[0]), range(20))
    check_pages(grown, token, grove)


def test_a_key_that_was_used_for_an_account_that_cannot_be_seen_does_not_name_it(
    grown: ServiceThread, owner: httpx.Client
) -> None:
    grove = plant(owner)
    principal, used = fresh("principal"), fresh("key")
    with attacks.reach(grown, grown.token(principal, "analyst", grove.hidden[3])) as before:
        form = {"cost": SMALL}
        assert attacks.post(before, f"/v1/accounts/{grove.hidden[3]}/spends", form, key=used).status_code == 201
    with attacks.reach(grown, grown.token(principal, "analyst", grove.seen[0])) as now:
        answer = attacks.post(now, f"/v1/accounts/{grove.seen[0]}/spends", {"cost": SMALL}, key=used)
        attacks.check_problem(answer, 422)
        search(answer, grove.hidden)
        item = {"key": used, "costs": {grove.seen[0]: SMALL}}
        search(attacks.post(now, "/v1/batches", {"spends": [item]}), grove.hidden)


def test_a_policy_above_that_takes_less_is_not_told_by_its_rule(grown: ServiceThread, owner: httpx.Client) -> None:
    grove = plant(owner, ZCDP)
    with attacks.reach(grown, grown.token("ana", "analyst", *grove.seen)) as client:
        for verb in ("spends", "decide"):
            answer = attacks.post(
                client, f"/v1/accounts/{grove.seen[0]}/{verb}", {"cost": GAUSSIAN}, key=fresh("key")
            )
            if verb == "spends":
                attacks.check_problem(answer, 422)
            else:
                assert (answer.json()["account"], answer.json()["admitted"]) == (grove.seen[0], False)
                assert "no theorem covers a guarantee of this kind here" in answer.json()["message"]
            assert "basic" not in answer.text, answer.text


ENDS: Final = "this request has no epsilon, so the plain sum of epsilons no longer counts"


def notes_told(client: httpx.Client, name: str) -> list[list[str]]:
    """Return the notes on a first Gaussian: of a decision, of a quote and, each voided after it, of three charges."""
    path, cost = f"/v1/accounts/{name}", {"cost": GAUSSIAN}
    found = [attacks.post(client, f"{path}/decide", cost).json()["notes"]]
    found.append(attacks.post(client, "/v1/decide", {"costs": {name: GAUSSIAN}}).json()["notes"])
    found.append(attacks.post(client, f"{path}/quote", {"costs": [GAUSSIAN]}).json()["decisions"][0]["notes"])
    made = attacks.post(client, f"{path}/reservations", cost, key=fresh("key")).json()
    held = made["id"].replace("#", "%23")
    assert attacks.post(client, f"/v1/reservations/{held}/void", {"reason": "not run"}).status_code == 200
    found.append(made["notes"])
    item = {"key": fresh("key"), "costs": {name: GAUSSIAN}}
    found.append(attacks.post(client, "/v1/batches", {"spends": [item]}).json()["results"][0]["receipt"]["notes"])
    assert attacks.post(client, f"{path}/spends", cost, key=fresh("key")).json()["notes"] == []
    return found


def check_notes(grown: ServiceThread, owner: httpx.Client) -> None:
    """Assert that a bound key is told what ends in its own account, and nothing of the one above."""
    policy = {"epsilon": "1", "delta": "1e-6"}
    model = odo.Accountant(odo.Policy(1, 1e-6))
    model.spend(odo.GDP("0.01"))
    left = str(model.largest(odo.PureDP)).removeprefix("PureDP(")[:6]  # four digits, rounded down
    for bound in (True, False):
        top, own = fresh("top"), fresh("own")
        attacks.open_account(owner, top, policy)
        attacks.open_account(owner, own, policy, parent=top)
        sees = [own] if bound else [own, top]
        with attacks.reach(grown, grown.token("ana", "runner", *sees)) as client:
            told_of = notes_told(client, own)
        falls = f"{ENDS}: the largest single pure request falls from 1 to {left}"
        expected = [falls] if bound else [falls, f"for {top!r}: {falls}"]
        assert all(notes == expected for notes in told_of), f"it tells {told_of}"


def test_notes_tell_nothing_of_an_account_above_that_the_key_is_not_bound_to(
    grown: ServiceThread, owner: httpx.Client
) -> None:
    check_notes(grown, owner)


def test_notes_that_tell_of_an_account_above_would_be_caught(
    grown: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "_visible_notes", lambda notes, _: tuple(notes))
    with pytest.raises(AssertionError, match="it tells"):
        check_notes(grown, owner)


def test_a_key_bound_to_a_name_that_is_not_there_yet_sees_nothing_until_it_is(
    grown: ServiceThread, owner: httpx.Client
) -> None:
    name = fresh("later")
    with attacks.reach(grown, grown.token("ana", "analyst", name)) as client:
        attacks.check_problem(client.get(f"/v1/accounts/{name}"), 404)
        assert client.get("/v1/accounts").json()["accounts"] == []
        attacks.open_account(owner, name)
        assert [row["name"] for row in client.get("/v1/accounts").json()["accounts"]] == [name]


@pytest.mark.parametrize("broken", ["sees", "mask_refusal", "closed", "missing"])
def test_a_service_that_shows_too_much_would_be_caught(
    grown: ServiceThread, owner: httpx.Client, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    grove = plant(owner)
    if broken == "sees":
        monkeypatch.setattr(Caller, "sees", lambda *_: True)
    if broken == "mask_refusal":
        for module in (charges, accounts, visibility):
            monkeypatch.setattr(module, "mask_refusal", lambda _backend, _caller, _costs, decision: decision)
    if broken == "closed":
        monkeypatch.delitem(visibility.BOUND_MESSAGES, AccountClosed)
    if broken == "missing":
        monkeypatch.delitem(visibility.BOUND_MESSAGES, AccountNotFound)
    with (
        attacks.reach(grown, grown.token("ana", "analyst", *grove.seen)) as client,
        pytest.raises(AssertionError, match=r"told|tells"),
    ):
        check_unseen(client, grove, every_ask(grove.seen[0]), range(20))


Drawn: TypeAlias = tuple[list[tuple[int, int]], list[bool], list[bool], list[list[int]]]


@st.composite
def groves(draw: st.DrawFn) -> Drawn:
    """Draw relatives of each account among those before it, who is seen, who is closed, and what happened."""
    size = draw(st.integers(2, 6))
    relatives = [(draw(st.integers(-1, i - 1)), draw(st.integers(-1, i - 1))) for i in range(size)]
    seen = [
        *draw(st.permutations([True, False, *draw(st.lists(st.booleans(), min_size=size - 2, max_size=size - 2))]))
    ]
    closed = draw(st.lists(st.sampled_from([False, False, True]), min_size=size, max_size=size))
    events = draw(st.lists(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True), max_size=6))
    return relatives, seen, closed, events


@settings(max_examples=15)
@given(drawn=groves(), picks=st.lists(st.integers(0, 10**6), min_size=20, max_size=20), verb=st.integers(0, 3))
def test_no_answer_of_any_tree_names_an_account_that_the_key_is_not_bound_to(
    grown: ServiceThread, owner: httpx.Client, drawn: Drawn, picks: list[int], verb: int
) -> None:
    relatives, seen, closed, events = drawn
    names = [fresh("seen" if one else "veiled") for one in seen]
    for name, (parent, before) in zip(names, relatives, strict=True):
        links = {"parent": names[parent] if parent >= 0 else "", "successor_of": names[before] if before >= 0 else ""}
        made = attacks.post(
            owner, "/v1/accounts", {"name": name, "policy": attacks.POLICY, **links}, key=fresh("key")
        )
        if made.status_code != 201:  # two links that contradict each other: then without them
            attacks.open_account(owner, name)
    for number, event in enumerate(events):
        costs = {names[one]: LARGE if (number + verb) % 4 == 0 else SMALL for one in event}
        made = attacks.post(
            owner, "/v1/reservations" if number % 2 else "/v1/spends", {"costs": costs}, key=fresh("key")
        )
        if made.status_code == 201 and number % 3 == 1:
            place = made.json()["id"].replace("#", "%23")
            attacks.post(owner, f"/v1/reservations/{place}/void", {"reason": "not run"})
    for name, shut in zip(names, closed, strict=True):
        if shut:
            assert attacks.post(owner, f"/v1/accounts/{name}/close", {}).status_code in {200, 409}
    own = [name for name, one in zip(names, seen, strict=True) if one]
    hidden = [name for name, one in zip(names, seen, strict=True) if not one]
    grove = Grove(own, hidden, [fresh("veiled") for _ in hidden])
    possible = every_ask(own[-1])
    asks = [possible[pick % len(possible)] for pick in picks]
    with attacks.reach(grown, grown.token("ana", "runner", *own)) as client:
        check_unseen(client, grove, asks, range(3))


def test_an_account_s_page_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("census", odo.Policy(1, 0, filter="basic"))
        account.spend(odo.PureDP("0.25"))
        summary_of = account_module.account_summary

        def meanwhile(*args: Any) -> dict[str, Any]:
            summary = summary_of(*args)
            account.spend(odo.PureDP("0.5"))
            return summary

        monkeypatch.setattr(account_module, "account_summary", meanwhile)
        form = visibility.account_form(ledger, Caller("ana", Role.OWNER, "k", None), "census")
        assert account.reading().loss == pytest.approx(0.75)
    assert form.account.spent == form.meters["epsilon"].spent == 0.25
    assert form.reading.loss == pytest.approx(0.25)
