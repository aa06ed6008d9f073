"""What owners do on the dashboard, and who may: keys, reservations, closing; what is added up, searched, exported."""

from __future__ import annotations

import asyncio
import csv
import html
import io
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_client import PYTHON, Visitor, visitor_of, words_of
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.backend import LocalBackend
from odograph.ledger.epochs import scheduled
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import cell_text
from odograph.population.population import Population
from odograph.service import logs, visibility
from odograph.service.auth import Caller, Role
from odograph.service.dashboard import owner_pages, pages, routes
from odograph.service.key_store import connect_keys
from odograph.service.routes import charges

PLAIN = odo.Policy(1, 0, filter="basic")
OWNER = Caller("ana", Role.OWNER, "0" * 12, None)
MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
NEW_KEY = {"principal": "carl", "role": "analyst", "accounts": "census", "days": "90", "key": "form-1"}
# Every form that changes something, with fields that would make it happen.
FORMS = {
    "/keys": NEW_KEY,
    "/keys/{key}/rotate": {"overlap": "0", "key": "form-2"},
    "/keys/{key}/revoke": {},
    "/pending/resolve": {"verb": "void", "reason": "not run", "id.census#1": "1"},
    "/accounts/census/close": {"name": "census"},
}


def made_keys(service: ServiceThread) -> list[tuple[str, bool]]:
    """Return the principal of every key, and whether it is valid."""
    with connect_keys(service.settings.url) as store:
        return sorted((key.principal, key.valid_at(store.now())) for key in store.keys())  # noqa: SIM118


def id_of(service: ServiceThread, principal: str) -> str:
    """Return the id of a principal's newest key."""
    with connect_keys(service.settings.url) as store:
        return next(key.id for key in store.keys() if key.principal == principal)  # noqa: SIM118


def state_of(service: ServiceThread, remote: Ledger) -> object:
    """Return everything that a form could change."""
    return remote.checkpoint(), made_keys(service)


def problem_on(page: str) -> str:
    """Return the problem that a page tells."""
    found = re.search(r'role="alert"[^>]*>(.*?)</p>', page)
    return words_of(found[1] if found else page)


def field_of(page: str, name: str) -> str:
    """Return the value of a hidden field."""
    found = re.search(rf'name="{re.escape(name)}" value="([^"]*)"', page)
    assert found is not None, name
    return html.unescape(found[1])


@pytest.fixture
def census(remote: Ledger) -> odo.LedgerAccount:
    """An account with a pending reservation, census#1."""
    account = remote.open_account("census", PLAIN)
    account.reserve(odo.PureDP("0.125"), key="job-1", note="the great job")
    return account


# Keys.


def test_a_key_is_made_with_the_owners_own_key_and_its_token_is_shown_once(
    service: ServiceThread, census: odo.LedgerAccount
) -> None:
    own = service.token()
    visitor = visitor_of(service, own)
    form = NEW_KEY | {"csrf": visitor.csrf}
    before = made_keys(service)
    asked = visitor.send("/keys", form)
    assert "may spend and reserve, but not commit or void" in words_of(asked.text)
    assert "It is for census. It expires in 90 days." in words_of(asked.text)
    assert made_keys(service) == before
    made = visitor.send("/keys", form | {"confirmed": "1", "token": own})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    (token,) = re.findall(r"odo_[\w-]{43}", made.text)
    assert own not in made.text
    with odo.connect(service.url, token=token) as ledger:
        assert ledger.account("census").spend(odo.PureDP("0.125")).id == "census#2"
    assert census.history(2, 1)[0].principal == "carl"
    again = visitor.send("/keys", form | {"confirmed": "1", "token": own})
    assert (again.status_code, "already made key" in words_of(again.text)) == (422, True)
    assert made_keys(service) == sorted([*before, ("carl", True)])
    pages = ("/keys", "/keys?format=json", "/principal?name=carl", "/principal?name=carl&format=json")
    for text in (again.text, *(visitor.get(path).text for path in pages)):
        assert token not in text
        assert own not in text


def keys_without_own(service: ServiceThread) -> list[str]:
    """Send the forms that make keys with a cookie alone, or with keys that are no owner's or another's."""
    visitor = visitor_of(service)
    wrong = ["", "x", "odo_" + "A" * 43, service.token("ana", "auditor"), service.token("olga")]
    target = id_of(service, "olga")
    found = []
    for path in ("/keys", f"/keys/{target}/rotate"):
        for i, token in enumerate(wrong):
            fields = {"csrf": visitor.csrf, "confirmed": "1", "token": token}
            answer = visitor.send(path, FORMS.get(path, {"overlap": "0"}) | fields | {"key": f"{path} {i}"})
            found += re.findall(r'value="(odo_[\w-]{43})"', answer.text)
    return found


def test_a_cookie_alone_makes_no_key(
    service: ServiceThread, census: odo.LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert census
    assert keys_without_own(service) == []
    assert "carl" not in dict(made_keys(service))

    async def trust(*_: object) -> None: ...

    monkeypatch.setattr(owner_pages, "_require_own_key", trust)  # control
    assert len(keys_without_own(service)) >= 2


def test_a_rotated_key_ends_when_it_was_chosen_and_a_revoked_one_now(service: ServiceThread) -> None:
    own = service.token()
    visitor = visitor_of(service, own)
    old = service.token("bot", "runner")
    path = f"/keys/{id_of(service, 'bot')}"
    form = {"csrf": visitor.csrf, "key": "r-1"}
    asked = visitor.send(f"{path}/rotate", form)
    assert "with the same role (runner)" in words_of(asked.text)
    sent = form | {"confirmed": "1", "overlap": "3600", "token": own}
    (fresh,) = re.findall(r"odo_[\w-]{43}", visitor.send(f"{path}/rotate", sent).text)
    for token in (old, fresh):
        assert httpx.get(f"{service.url}/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    refused = visitor.send(f"{path}/rotate", sent | {"key": "r-2"})
    assert (refused.status_code, "was rotated before" in words_of(refused.text)) == (403, True)
    assert visitor.send(f"{path}/revoke", form).status_code == 200
    assert dict(made_keys(service))["bot"]
    done = visitor.send(f"{path}/revoke", form | {"confirmed": "1"})
    assert (done.status_code, done.headers["location"]) == (303, "/keys")
    answers = [httpx.get(f"{service.url}/v1/me", headers={"Authorization": f"Bearer {one}"}) for one in (old, fresh)]
    assert [answer.status_code for answer in answers if answer.status_code == 401] == [401]
    assert visitor.send(f"{path}/rotate", sent | {"overlap": "-1"}).status_code == 400
    assert visitor.send(f"/keys/{'0' * 12}/revoke", form).status_code == 404


def test_the_last_owner_is_not_revoked_and_a_mistyped_key_keeps_what_was_typed(service: ServiceThread) -> None:
    visitor = visitor_of(service)
    own = {"csrf": visitor.csrf, "confirmed": "1"}
    answer = visitor.send(f"/keys/{id_of(service, 'ana')}/revoke", own)
    assert (answer.status_code, "last valid owner key" in words_of(answer.text)) == (403, True)
    for wrong in ({"role": "king"}, {"days": "-1"}, {"days": "1e9"}, {"accounts": "a b/c"}, {"principal": ""}):
        answer = visitor.send("/keys", NEW_KEY | wrong | own)
        assert answer.status_code in {400, 422}, wrong
        assert 'role="alert"' in answer.text
    assert field_of(visitor.send("/keys", NEW_KEY | {"role": "king"} | own).text, "principal") == "carl"
    assert made_keys(service) == [("ana", True)]
    assert visitor.send("/keys", {"csrf": visitor.csrf}).status_code == 422


@pytest.mark.usefixtures("census")
def test_an_account_that_does_not_exist_is_told_before_the_own_key_is_asked_for(service: ServiceThread) -> None:
    visitor = visitor_of(service)
    asked = visitor.send("/keys", NEW_KEY | {"csrf": visitor.csrf, "accounts": "censsus"})
    assert (asked.status_code, field_of(asked.text, "accounts")) == (400, "censsus")
    assert problem_on(asked.text).endswith("(got 'censsus'); did you mean 'census'?")
    assert "Your own API key" not in asked.text


def test_the_page_of_keys_says_when_they_were_used_as_far_as_is_known(service: ServiceThread) -> None:
    visitor, token = visitor_of(service), service.token("bot", "auditor")
    views = {one["key"]["principal"]: one for one in visitor.get("/keys", format="json").json()["keys"]}
    assert views["bot"]["last_use"] is None
    httpx.get(f"{service.url}/v1/me", headers={"Authorization": f"Bearer {token}"})
    views = {one["key"]["principal"]: one for one in visitor.get("/keys", format="json").json()["keys"]}
    assert views["bot"]["last_use"] >= views["bot"]["key"]["made"]
    assert "digest" not in visitor.get("/keys", format="json").text


@pytest.mark.usefixtures("census")
def test_no_token_is_in_the_log(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.BytesIO()
    monkeypatch.setattr("odograph.service.logs._Output.file", log)
    monkeypatch.setattr("odograph.service.logs._Output.level", logging.DEBUG)
    own = service.token()
    visitor = visitor_of(service, own)
    form = NEW_KEY | {"csrf": visitor.csrf, "confirmed": "1", "token": own}
    (token,) = re.findall(r"odo_[\w-]{43}", visitor.send("/keys", form).text)
    visitor.send("/keys", form)
    visitor.send("/keys", form | {"token": token, "key": "another"})
    logs.flush()
    lines = log.getvalue().decode()
    assert lines.count('"/keys"') == 3
    for secret in (own, token, form["csrf"], visitor.cookie):
        assert secret not in lines


# Who may.


def taken(service: ServiceThread, visitor: Visitor, changed: dict[str, str], **headers: str) -> list[str]:
    """Send every form, confirmed, with changed fields; return those that were not refused with 403."""
    found = []
    for path, fields in FORMS.items():
        form = fields | {"confirmed": "1", "token": service.token()} | changed
        where = path.format(key=id_of(service, "zoe"))
        if visitor.send(where, form, **headers).status_code != 403:
            found.append(path)
    return found


def test_forms_need_the_secret_of_their_session_and_come_from_here(
    service: ServiceThread, remote: Ledger, census: odo.LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert census
    service.token("zoe", "auditor")
    visitor, other = visitor_of(service), visitor_of(service)
    before = remote.checkpoint()
    for csrf in ("", "x", other.csrf):
        assert taken(service, visitor, {"csrf": csrf}) == []
    for origin in ("http://evil.test", "null"):
        assert taken(service, visitor, {"csrf": visitor.csrf}, Origin=origin) == []
    assert remote.checkpoint() == before
    assert dict(made_keys(service))["zoe"]
    monkeypatch.setattr(routes, "check_csrf", lambda *_: None)  # control
    assert {"/keys", "/pending/resolve", "/accounts/census/close"} <= {*taken(service, visitor, {"csrf": "x"})}


def test_only_owners_change_keys_and_accounts_and_runners_resolve(
    service: ServiceThread, remote: Ledger, census: odo.LedgerAccount
) -> None:
    service.token("zoe", "auditor")
    for role in ("analyst", "auditor", "runner"):
        visitor = visitor_of(service, service.token(f"the-{role}", role))
        before = state_of(service, remote)
        allowed = taken(service, visitor, {"csrf": visitor.csrf})
        assert allowed == (["/pending/resolve"] if role == "runner" else []), role
        assert visitor.get("/keys").status_code == 403
        assert visitor.get("/accounts/census/close").status_code == 403
        assert ("Close this account" in visitor.get("/accounts/census").text) is False
        if role != "runner":
            assert state_of(service, remote)[0] == before[0]  # type: ignore[index]
    assert census.pending == ()
    assert dict(made_keys(service))["zoe"]
    assert Visitor(service).get("/spending").headers["location"] == "/sign-in?then=%2Fspending"


def test_a_form_leads_back_to_this_service_only(service: ServiceThread, remote: Ledger) -> None:
    remote.open_account("a:b@evil.test", PLAIN)
    visitor = visitor_of(service)
    sent = visitor.send("/accounts/a:b@evil.test/close", {"csrf": visitor.csrf, "name": "a:b@evil.test"})
    assert (sent.status_code, sent.headers["location"]) == (303, "/accounts/a%3Ab%40evil.test")


@pytest.mark.usefixtures("census")
def test_no_form_of_owners_advises_in_python_or_at_a_command_line(service: ServiceThread) -> None:
    own = service.token()
    visitor = visitor_of(service, own)
    confirmed = {"csrf": visitor.csrf, "confirmed": "1", "token": own}
    said = [
        problem_on(visitor.send("/keys", NEW_KEY | {"csrf": visitor.csrf} | wrong).text)
        for wrong in ({"accounts": ""}, {"every_account": "1"}, {"role": "owner"}, {"role": "?"}, {"principal": ""})
    ]
    said.append(problem_on(visitor.send("/keys", NEW_KEY | confirmed | {"accounts": "nowhere"}).text))
    assert said[-1].endswith("(got 'nowhere'); open the account first")
    said.append(words_of(visitor.send("/keys/nothing/revoke", confirmed).text))
    said.append(problem_on(visitor.send("/accounts/census/close", {"csrf": visitor.csrf, "name": "?"}).text))
    assert "accounts must name at least one account for an analyst's key; or choose every account" in said
    assert [
        one for one in said if not one or PYTHON.search(one) or "every_account" in one or "`odograph" in one
    ] == []


# Reservations, and closing.


def test_several_reservations_are_resolved_once_they_are_confirmed(
    service: ServiceThread, remote: Ledger, census: odo.LedgerAccount
) -> None:
    for i in range(2, 5):
        census.reserve(odo.PureDP("0.125"), key=f"job-{i}")
    expired = census.reserve(odo.PureDP("0.125"), key="short", expires=0.000001)
    visitor = visitor_of(service)
    form = {"csrf": visitor.csrf, "verb": "void", "reason": "cancelled", "id.census#1": "1", "id.census#2": "1"}
    before = remote.checkpoint()
    words = words_of(visitor.send("/pending/resolve", form).text)
    assert "states that the mechanism was not run" in words
    assert "census#2: PureDP(0.125) of census, reserved by bot" in words
    for wrong in ({"reason": " "}, {"verb": "spend"}):
        assert visitor.send("/pending/resolve", form | {"confirmed": "1"} | wrong).status_code == 400
    assert visitor.send("/pending/resolve", {"csrf": visitor.csrf, "verb": "commit"}).status_code == 400
    assert remote.checkpoint() == before
    form |= {"confirmed": "1", f"id.{expired.id}": "1", "id.census#99": "1", "id.nothing": "1"}
    done = visitor.send("/pending/resolve?format=json", form).json()["results"]
    assert [one["done"] for one in done] == [True, True, False, False, False]
    assert census.totals.steps == 3
    size = census.size
    again = visitor.send("/pending/resolve?format=json", form).json()["results"]  # sent twice, done once
    assert [one["done"] for one in again] == [True, True, False, False, False]
    assert census.size == size
    form |= {"verb": "commit", "id.census#3": "1"}
    done = visitor.send("/pending/resolve?format=json", form).json()["results"]
    assert [one["done"] for one in done if one["id"] in {"census#1", "census#3", expired.id}] == [False, True, True]
    assert [one.id for one in census.pending] == ["census#4"]
    assert [entry.note for entry in census.history() if entry.verb == "void"] == ["cancelled", "cancelled"]
    assert {entry.principal for entry in census.history() if entry.verb == "void"} == {"ana"}
    assert remote.verify()


def test_a_void_without_a_reason_is_asked_for_it_and_keeps_what_was_chosen(
    service: ServiceThread, census: odo.LedgerAccount
) -> None:
    visitor = visitor_of(service)
    form = {"csrf": visitor.csrf, "verb": "void", "reason": "", "id.census#1": "1"}
    for confirmed, status in (({}, 200), ({"confirmed": "1"}, 400)):
        asked = visitor.send("/pending/resolve", form | confirmed)
        assert asked.status_code == status
        assert field_of(asked.text, "id.census#1") == "1"
        assert "Why it was not run" in words_of(asked.text)
        assert len(census.pending) == 1
    assert "give the reason" in problem_on(asked.text)
    visitor.send("/pending/resolve", form | {"confirmed": "1", "reason": "canceled"})
    assert census.history(-1)[0].note == "canceled"


@pytest.mark.usefixtures("census")
def test_pending_reservations_are_paged_and_chosen_by_principal(service: ServiceThread, remote: Ledger) -> None:
    most = owner_pages.MOST_RESOLVED
    many = remote.open_account("many", odo.Policy(100, 0, filter="basic"))
    for i in range(2 * most):
        many.reserve(odo.PureDP("0.01"), key=f"page-{i}")
    with odo.connect(service.url, token=service.token("eva")) as eva:
        eva.account("census").reserve(odo.PureDP("0.01"), key="own")
    visitor = visitor_of(service)
    path, seen, sizes = "/pending", list[str](), list[int]()
    while path:
        page = visitor.get(path).text
        shown = re.findall(r'name="id\.([^"]+)"', page)
        assert f"{len(seen) + 1} to {len(seen) + len(shown)} of {2 * most + 2}" in words_of(page)
        seen += shown
        sizes.append(len(shown))
        following = re.search(r'rel="next" href="([^"]+)"', page)
        path = f"/pending{html.unescape(following[1])}" if following else ""
    assert sizes == [most, most, 2]
    assert sorted(seen) == sorted(["census#1", "census#2", *(f"many#{i + 1}" for i in range(2 * most))])
    own = visitor.get("/pending", principal="eva").text
    assert re.findall(r'name="id\.([^"]+)"', own) == ["census#2"]
    assert "0 s" in words_of(own) or "1 s" in words_of(own)  # how long it waits
    words = words_of(visitor.get("/principal", name="bot").text)
    assert f"10 of {2 * most + 1} are shown" in words
    assert visitor.get("/pending", page="x").status_code == 400


def test_reservations_that_were_resolved_meanwhile_are_no_fault_of_the_ledger(
    service: ServiceThread, census: odo.LedgerAccount, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    monkeypatch.setattr(logs, "state", lambda _level, event, _text: states.append(event))
    visitor = visitor_of(service)
    (reserved,) = census.pending
    reserved.commit()
    form = {"csrf": visitor.csrf, "verb": "commit", f"id.{reserved.id}": "1"}
    answer = visitor.send("/pending/resolve", form)
    assert (answer.status_code, "is pending any more" in answer.text) == (400, True)
    assert states == []  # such as that the ledger cannot be used


def test_a_page_reads_so_many_reservations_and_a_form_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who may reserve could otherwise make these pages read without bound."""
    read: list[str] = []
    reserved = LocalBackend.reserved

    def count_and_read(backend: LocalBackend, name: str) -> object:
        read.append(name)
        return reserved(backend, name)

    monkeypatch.setattr(LocalBackend, "reserved", count_and_read)
    owner, bound = (Caller("ana", Role.OWNER, "", names) for names in (None, frozenset({"other"})))
    with odo.connect("memory://") as ledger:
        account = ledger.open_account("census", PLAIN)
        ids = [account.reserve(odo.PureDP("0.01")).id for _ in range(7)]
        read.clear()
        found, more = owner_pages.list_pending(ledger, owner, most=3)
        assert ([one.id for one in found], more, read) == (ids[:3], True, ids[:3])
        found, more = owner_pages.list_pending(ledger, owner)
        assert ([one.id for one in found], more) == (ids, False)
        read.clear()
        asked = [ids[6], "census#0", "census#99", "nothing#1", "?"]
        assert [one.id for one in owner_pages.find_pending(ledger, owner, asked)] == [ids[6]]
        assert len(read) <= 2
        assert owner_pages.find_pending(ledger, bound, asked) == []


def test_an_account_is_closed_when_its_name_was_typed(service: ServiceThread, census: odo.LedgerAccount) -> None:
    visitor = visitor_of(service)
    page = words_of(visitor.get("/accounts/census/close").text)
    assert "census takes no charges any more, for good" in page
    assert "Its pending reservations (1) can still be committed or voided" in page
    for typed in ("", "Census", "census2", "clinic"):
        answer = visitor.send("/accounts/census/close", {"csrf": visitor.csrf, "name": typed})
        assert (answer.status_code, "type the account" in words_of(answer.text)) == (422, True)
    assert census.decide(odo.PureDP("0.125")).admitted
    form = {"csrf": visitor.csrf, "name": "census", "note": "it ended"}
    for _ in range(2):
        assert visitor.send("/accounts/census/close", form).status_code == 303
    assert [entry.note for entry in census.history() if entry.verb == "close"] == ["it ended"]
    assert visitor.get("/accounts/nowhere/close").status_code == 404


def test_an_account_with_room_below_one_without_says_why_nothing_fits(service: ServiceThread, remote: Ledger) -> None:
    remote.open_account("above", PLAIN)
    below = remote.open_account("below", PLAIN, parent="above")
    visitor = visitor_of(service)
    assert "No further question fits" not in words_of(visitor.get("/accounts/below").text)
    remote.account("above").spend(odo.PureDP(1))
    why = (
        "No further question fits: it would be charged to the accounts above this one too, and there is no room left."
    )
    assert why in words_of(visitor.get("/accounts/below").text)
    assert "No further question fits." in words_of(visitor.get("/accounts/above").text)
    bound = visitor_of(service, service.token("bob", "analyst", below.name))  # and does not know of the one above
    assert "No further question fits." in words_of(bound.get("/accounts/below").text)


# What no page may do or show.


def test_everything_that_a_form_can_do_is_listed_and_none_of_it_charges(service: ServiceThread) -> None:
    verbs = {route.verb for route in owner_pages._ACTIONS.values()}  # noqa: SLF001  what is checked
    assert verbs == {"resolve", "close", "administer"}
    assert service.token()

    async def attempt() -> None:
        await owner_pages._perform(None, OWNER, charges.spend, {"name": "census"}, {})  # type: ignore[arg-type]  # noqa: SLF001

    with pytest.raises(KeyError):
        asyncio.run(attempt())


def leaks(service: ServiceThread) -> list[str]:
    """Put markup where a text can be; return the pages on which it is markup still."""
    own = service.token(MARKUP)
    visitor, found = visitor_of(service, own), []
    paths = ["/spending", "/entries", "/pending", "/keys", "/populations", "/accounts/census/close", "/open/outlook"]
    answers = [visitor.get(path) for path in paths]
    answers += [visitor.get("/principal", name=MARKUP), visitor.get("/open/outlook", ask_pure=MARKUP)]
    answers += [
        visitor.get(path, **{field: MARKUP})
        for path in ("/spending", "/entries", "/pending")
        for field in ("account", "since", "text", "principal", "verb", "after")
    ]
    answers += [
        visitor.send(path.format(key=id_of(service, MARKUP)), {"csrf": visitor.csrf} | changed)
        for path, fields in FORMS.items()
        for changed in (fields, dict.fromkeys(fields, MARKUP), {**fields, "principal": MARKUP, "reason": MARKUP})
    ]
    for answer in answers:
        assert answer.status_code < 500, answer.request.url
        if answer.headers.get("content-type", "").startswith("text/html") and any(
            part in answer.text for part in ("<script>", "<img src=x", "\"'>")
        ):
            found.append(answer.request.url.path)
    return found


def test_what_people_typed_is_never_markup_on_the_pages_of_owners(
    service: ServiceThread, remote: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odo.connect(service.url, token=service.token(MARKUP)) as ledger:
        account = ledger.open_account("census", PLAIN)
        account.reserve(odo.PureDP("0.125"), key=MARKUP, note=MARKUP)
        account.spend(odo.PureDP("0.125"), key="k", note=MARKUP)
    assert leaks(service) == []
    assert remote.account("census").history(1, 1)[0].note == MARKUP
    environment = pages._ENVIRONMENT  # noqa: SLF001  what is broken on purpose
    monkeypatch.setattr(environment, "autoescape", False)
    environment.cache = {}
    try:
        assert {"/spending", "/entries", "/pending", "/keys", "/principal"} <= {*leaks(service)}  # control
    finally:
        environment.cache = {}


def hidden_names(visitor: Visitor) -> list[str]:
    """Return the pages on which a key that is bound to `seen` finds something of what is beside it."""
    paths = ["/spending", "/spending?account=seen", "/entries", "/entries?text=hidden", "/pending", "/populations"]
    paths += [
        "/principal?name=bot",
        "/principal?name=stranger",
        "/accounts/seen/entries.csv",
        "/pending?account=seen",
    ]
    found = []
    for path in paths:
        for form in ("", f"{'&' if '?' in path else '?'}format=json"):
            answer = visitor.get(path + form)
            if answer.status_code != 200 or re.search("hidden-(parent|child|beside|people|note|key)", answer.text):
                found.append(path)
    for path in ("/spending?account=", "/entries?account=", "/pending?account="):
        told = [visitor.get(f"{path}{name}") for name in ("hidden-beside", "hidden-nowhere")]
        assert {answer.status_code for answer in told} == {404}
    assert visitor.get("/accounts/hidden-beside/entries.csv").status_code == 404
    return found


def test_a_key_sees_nothing_of_accounts_that_it_is_not_bound_to(
    service: ServiceThread, remote: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.open_account("hidden-parent", PLAIN)
    seen = remote.open_account("seen", PLAIN, parent="hidden-parent")
    below = remote.open_account("hidden-child", PLAIN, parent="seen")
    remote.open_account("hidden-beside", PLAIN)
    with odo.connect(service.url, token=service.token("stranger")) as ledger:
        ledger.account("hidden-beside").spend(odo.PureDP("0.01"), note="hidden-note", key="hidden-key")
    seen.spend(odo.PureDP("0.125"), note="weekly")
    below.spend(odo.PureDP("0.125"), note="hidden-note")
    below.reserve(odo.PureDP("0.125"), note="hidden-note")
    both = {"seen": odo.PureDP("0.01"), "hidden-beside": odo.PureDP("0.01")}
    remote.reserve(both).void("cancelled")
    remote.reserve(both)
    with odo.connect(service.settings.url) as ledger:
        Population.create("hidden-people", PLAIN, ledger=ledger, location=tmp_path / "people", ids=3)
    visitor = visitor_of(service, service.token("bob", "runner", "seen"))
    assert hidden_names(visitor) == []
    form = {"csrf": visitor.csrf, "verb": "void", "reason": "x", "confirmed": "1", "id.hidden-child#2": "1"}
    told = visitor.send("/pending/resolve?format=json", form | {"id.hidden-nowhere#2": "1"}).json()["results"]
    assert [one["done"] for one in told] == [False, False]
    assert told[0]["message"] == told[1]["message"]
    assert len(below.pending) == 1
    whole = visibility.visible_balances
    monkeypatch.setattr(visibility, "visible_balances", lambda ledger, _, **more: whole(ledger, OWNER, **more))
    assert {"/spending", "/entries", "/populations"} <= {*hidden_names(visitor)}  # control


def test_a_population_that_renews_is_shown_with_the_promise_of_its_schedule(
    service: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    assert owner.get("/v1/me").status_code == 200
    with odo.connect(service.settings.url) as ledger:
        schedule = scheduled("monthly", "2026-01-01", "1200")
        Population.create("visits", PLAIN, ledger=ledger, location=tmp_path / "visits", renew=schedule)
    assert f"by the schedule {schedule.promise_text(PLAIN)}" in visitor_of(service).get("/populations").text


def test_a_population_is_shown_without_any_number_of_a_person(
    service: ServiceThread, owner: httpx.Client, tmp_path: Path
) -> None:
    assert owner.get("/v1/me").status_code == 200
    with odo.connect(service.settings.url) as ledger:
        people = Population.create("people", PLAIN, ledger=ledger, location=tmp_path / "people", ids=3)
        people.charge(odo.Prices([odo.PureDP("0.37")], [0, 0, 0]), key="personal-key", note="personal-note")
        people.remove([1], key="zora asked to be forgotten")
    (row,) = visitor_of(service).get("/populations", format="json").json()
    assert {*row} == {"name", "promise", "privacy_unit", "filter", "rounds", "last", "closed", "schedule"}
    assert (row["name"], row["rounds"], row["schedule"]) == ("people", 2, "")
    page = visitor_of(service).get("/populations").text
    for secret in ("0.37", "personal", "zora", "forgotten", str(tmp_path)):
        assert secret not in page


# Sums.


@settings(max_examples=12)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["spend", "void", "commit", "keep"]), st.integers(1, 9), st.integers(0, 2)),
        max_size=12,
    ),
    kind=st.sampled_from(["basic", "default", "zcdp"]),
)
def test_the_parts_of_an_account_add_up_to_what_its_page_says(steps: list[Any], kind: str) -> None:
    policy = PLAIN if kind == "basic" else odo.Policy(1, 1e-6, filter=None if kind == "default" else kind)
    with odo.connect("memory://", principal="p0") as ledger:
        ledger.open_account("census", policy)
        voids, charged = 0, dict.fromkeys(["p0", "p1", "p2"], 0)
        for verb, size, person in steps:
            mine = ledger.acting_as(f"p{person}").account("census")
            cost = odo.PureDP(f"0.0{size}")
            if not mine.decide(cost).admitted:
                continue
            charged[f"p{person}"] += verb != "void"
            voids += verb == "void"
            if verb == "spend":
                mine.spend(cost, note="x" if size > 4 else "")
                continue
            held = mine.reserve(cost)
            if verb != "keep":
                _ = held.void("not run") if verb == "void" else held.commit()
        found = owner_pages.spending_of(ledger, OWNER, {})
        spent = visibility.account_form(ledger, OWNER, "census").account.spent
    for rows in (found.by_principal, found.by_purpose, found.by_account, found.over_time):
        assert sum(row.part for row in rows) == pytest.approx(spent, abs=1e-9)
    assert {row.name: row.charges for row in found.by_principal if row.charges} == {
        name: count for name, count in charged.items() if count
    }
    assert sum(row.voided for row in found.by_principal) == voids
    assert found.complete_since is None


def test_a_void_that_is_not_met_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        owner_pages, "_kind_of", lambda past, _: "charged" if past.verb in {"spend", "reserve"} else ""
    )
    with pytest.raises(AssertionError):
        test_the_parts_of_an_account_add_up_to_what_its_page_says.hypothesis.inner_test(  # type: ignore[attr-defined]
            [("void", 5, 0)], "basic"
        )


def test_a_charge_counts_once_and_one_that_is_not_in_the_period_not_at_all() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        ledger.open_account("all", PLAIN)
        child = ledger.open_account("north", PLAIN, parent="all")
        child.spend(odo.PureDP("0.25"), note="map")
        ledger.account("all").spend(odo.PureDP("0.5"), note="sum")
        found = owner_pages.spending_of(ledger, OWNER, {})
        assert [(row.name, row.part, row.charges) for row in found.by_principal] == [("ana", 0.75, 2)]
        assert {row.name: row.part for row in found.by_account} == {"all": 0.75, "north": 0.25}
        assert {row.name: row.part for row in found.by_purpose} == {"map": 0.25, "sum": 0.5}
        one = owner_pages.spending_of(ledger, OWNER, {"account": "all"})
        assert {row.name: row.part for row in one.by_purpose} == {"(charged to north)": 0.25, "sum": 0.5}
        past = owner_pages.spending_of(ledger, OWNER, {"since": "2001-01-01", "until": "2001-03-01"})
        assert (past.by_account, [bar.charges for bar in past.over_time]) == ([], [0] * 30)
        assert (past.over_time[0].day, past.days_per_bar) == ("2001-01-01", 2)
        for wrong in ({"since": "x"}, {"since": "2030-02-30"}, {"since": "2002-01-01", "until": "2001-01-01"}):
            with pytest.raises(odo.errors.BadRequest, match="since must"):
                owner_pages.spending_of(ledger, OWNER, wrong)


def test_a_long_history_is_read_as_far_as_is_said() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        for name in ("a", "b"):
            account = ledger.open_account(name, odo.Policy(100, 0, filter="basic"))
            for _ in range(80):
                account.spend(odo.PureDP("0.01"))
        found = owner_pages.spending_of(ledger, OWNER, {}, most=100)
        assert (found.read, found.complete_since is None) == (100, False)
        assert sum(row.charges for row in found.by_account) in {99, 100}  # an opening may be among them
        last = ledger.account("a").history(-1)[0]
        assert str(found.complete_since) <= last.time.isoformat(timespec="microseconds")


# The search.


@settings(max_examples=10)
@given(counts=st.lists(st.integers(0, 130), min_size=1, max_size=4), most=st.integers(1, 90))
def test_every_entry_is_found_once_newest_first_over_all_pages(counts: list[int], most: int) -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        for i in range(max(counts)):
            for j, count in enumerate(counts):
                if i == 0:
                    ledger.open_account(f"a{j}", odo.Policy(100, 0, filter="basic"))
                if i < count:
                    ledger.account(f"a{j}").spend(odo.PureDP("0.01"), note="odd" if i % 2 else "even")
        for text in ("", "odd"):
            wanted = {
                (account.name, entry.sequence)
                for account in ledger.accounts()
                for entry in account.history()
                if text in entry.note
            }
            seen: list[owner_pages.Found] = []
            after, pages = "", 0
            while pages == 0 or after:
                page = owner_pages.find_entries(ledger, OWNER, {"text": text, "after": after}, most)
                assert len(page.entries) <= 50
                assert page.read <= most
                seen, after, pages = seen + page.entries, page.older, pages + 1
            assert [(one.account, one.entry.sequence) for one in seen].count(("a0", 0)) == (
                text == "" and max(counts) > 0
            )
            assert len(seen) == len(wanted)
            assert {(one.account, one.entry.sequence) for one in seen} == wanted
            times = [one.entry.time for one in seen]
            assert times == sorted(times, reverse=True)


@pytest.mark.usefixtures("census")
def test_entries_are_searched_by_text_principal_verb_account_and_time(service: ServiceThread, remote: Ledger) -> None:
    remote.open_account("clinic", PLAIN).spend(odo.PureDP("0.25"), note="Weekly count", key="w-1")
    visitor = visitor_of(service)

    def found(**query: str) -> list[str]:
        entries = visitor.get("/entries", format="json", **query).json()["entries"]
        return [f"{one['account']}#{one['entry']['sequence']}" for one in entries]

    assert found() == ["clinic#1", "clinic#0", "census#1", "census#0"]
    assert found(text="weekly") == found(text="w-1") == found(text="PureDP(0.25") == ["clinic#1"]
    assert found(verb="reserve") == ["census#1"]
    assert found(account="census", principal="BO") == ["census#1", "census#0"]
    assert found(principal="ana") == found(until="2001-01-01") == found(since="2999-01-01", until="3000-01-01") == []
    assert visitor.get("/entries", after="x").status_code == 400
    assert visitor.get("/entries", after="1-1-").status_code == 422
    page = words_of(visitor.get("/entries", text="weekly").text)
    assert "1 shown, of 4 examined" in page
    person = visitor.get("/principal", name="bot", format="json").json()
    assert [one["id"] for one in person["pending"]] == ["census#1"]
    assert [row["name"] for row in person["spending"]["by_account"]] == ["clinic", "census"]
    assert [one["key"]["role"] for one in person["keys"]] == ["owner"]
    auditor = visitor_of(service, service.token("ada", "auditor"))
    assert auditor.get("/principal", name="bot", format="json").json()["keys"] is None
    assert visitor.get("/principal").status_code == 400


# CSV.


FORMULAS = st.sampled_from(["=", "+", "-", "@", "\t", "\r", "\n", " =", "＝", "﹢", "＠"])


@settings(max_examples=60)
@given(start=FORMULAS, rest=st.text(max_size=9))
def test_no_cell_of_a_spreadsheet_is_computed(start: str, rest: str) -> None:
    assert cell_text(start + rest) == f"'{start}{rest}"
    assert cell_text(f"a{start}{rest}") == f"a{start}{rest}"


def test_entries_are_exported_as_a_table(service: ServiceThread, remote: Ledger) -> None:
    account = remote.open_account("zählung", odo.Policy(100, 0, filter="basic"))
    notes = ["plain", "=HYPERLINK(1)", 'a "quoted", text\nin lines', "-1", "é", MARKUP]
    for note in notes:
        account.spend(odo.PureDP("0.01"), note=note)
    with pytest.raises(odo.BudgetExceeded):
        account.spend(odo.PureDP("101"))
    answer = visitor_of(service).get("/accounts/zählung/entries.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''z%C3%A4hlung-entries.csv"
    assert answer.headers["cache-control"] == "no-store"
    rows = [*csv.DictReader(io.StringIO(answer.text, newline=""))]
    assert [row["sequence"] for row in rows] == [str(i) for i in range(8)]
    assert [row["note"].removeprefix("'") for row in rows[1:7]] == notes
    assert [row["note"][:1] == "'" for row in rows[1:7]] == [False, True, False, True, False, False]
    assert [row["verb"] for row in rows] == ["open", *["spend"] * 6, "refuse"]
    assert (rows[1]["cost"], rows[1]["principal"]) == ("PureDP(0.01)", "bot")
    assert rows[7]["seal"] == account.history(-1)[0].seal
    assert visitor_of(service).get("/accounts/nowhere/entries.csv").status_code == 404


def test_a_long_history_is_exported_whole(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_pages, "_CSV_ROWS", 7)
    with odo.connect(service.url, token=service.token("bot")) as ledger:
        account = ledger.open_account("long", odo.Policy(100, 0, filter="basic"))
        for _ in range(27):
            account.spend(odo.PureDP("0.01"))
    lines = visitor_of(service).get("/accounts/long/entries.csv").text.splitlines()
    assert [line.partition(",")[0].strip('"') for line in lines] == ["sequence", *map(str, range(28))]


def test_no_separator_in_a_text_begins_a_cell(service: ServiceThread, remote: Ledger) -> None:
    account = remote.open_account("census", odo.Policy(1, 0, filter="basic"))
    account.spend(odo.PureDP("0.01"), key="a;=1+1", note="x;=1+1\t@SUM(A1)")
    lines = visitor_of(service).get("/accounts/census/entries.csv").text.splitlines()
    assert '"a;=1+1","x;=1+1\t@SUM(A1)"' in lines[2]


# What a new account would admit.


def test_the_form_counts_what_each_choice_admits_and_opens_nothing(service: ServiceThread, remote: Ledger) -> None:
    visitor = visitor_of(service)
    asked = {"ask_laplace": "100", "ask_rate": "0.01", "ask_noise": "1.1", "ask_pure": "0.05"}
    form = {"epsilon": "1", "delta": "1e-6", "promise": "epsilon", "filter": "default", "odometer": "default"}
    form |= {"privacy_unit": "person", "neighbors": "add-remove"}
    found = owner_pages.outlook_of(form | asked)
    assert found.problem == ""
    assert {"mixed", "pure", "training", "basic", "zcdp"} <= {*found.choices}
    costs = [odo.laplace(100), odo.subsampled_gaussian("0.01", "1.1"), odo.PureDP("0.05")]
    for name in ("mixed", "training"):
        account = odo.Accountant(odo.Policy(1, 1e-6, reserve=name))
        column = found.choices.index(name)
        assert [counts[column] for _, counts, _ in found.rows] == [account.how_many(cost) for cost in costs]
    fragment = words_of(visitor.get("/open/outlook", **form, **asked).text)
    assert "Counts with Laplace noise: scale 100" in fragment
    sent = visitor.send("/open", form | asked | {"name": "", "compare": "1", "csrf": visitor.csrf})
    assert "Counts with Laplace noise: scale 100" in words_of(sent.text)
    assert field_of(sent.text, "ask_laplace") == "100"
    assert remote.accounts() == ()
    wrong: list[dict[str, str]] = [
        {"ask_pure": "much"},
        {"ask_laplace": "0"},
        {"ask_zcdp": "1e-400"},
        {"epsilon": "-1"},
    ]
    wrong += [{"ask_rate": "0.01"}, {"ask_rate": "2", "ask_noise": "1"}, {"promise": "sigma"}]
    wrong += [{"promise": "rho", "epsilon": "x"}]
    problems = [owner_pages.outlook_of(form | one).problem for one in wrong]
    assert [one for one in problems if not one or PYTHON.search(one)] == []
    assert "sample rate must be above 0 and at most 1 (got '2')" in problems
    assert owner_pages.outlook_of(form).caution == ""
    large = words_of(visitor.get("/open/outlook", **form | {"delta": "0.5"}).text)
    assert "delta is 0.5: with that probability the promise says nothing" in large
    usual = [label for label, _, _ in owner_pages.outlook_of(form).rows]
    assert [label for label in usual if PYTHON.search(label)] == []
    assert usual[-1] == "Steps of private training: sample rate 0.01, noise multiplier 2"
    assert owner_pages.outlook_of(form | {"promise": "rho"}).choices == ["this promise"]
    assert "odometer" in owner_pages.outlook_of(form | {"promise": "no limit"}).problem
    assert visitor_of(service, service.token("ada", "auditor")).get("/open/outlook").status_code == 403
