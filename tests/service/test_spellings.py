"""One path, one cookie, one answer: what an attacker could use as a second spelling, or to tell keys apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import attacks
import httpx
import pytest
from browsing import FLAGS, chromium_path
from playwright.sync_api import sync_playwright
from service_server import ServiceThread

from odograph.service.access import new_token
from odograph.service.api import ROUTES
from odograph.service.dashboard.visits import COOKIE
from odograph.service.office import Office

PAGES = (
    "/",
    "/audit",
    "/open",
    "/docs",
    "/sign-in",
    "/pulse",
    "/accounts/a",
    "/accounts/a/plan",
    "/healthz",
    "/readyz",
)


@pytest.fixture
def tls_in_front(tmp_path: Path) -> Iterator[ServiceThread]:
    with ServiceThread(f"sqlite:///{tmp_path}/ledger.db", plain_http=True) as running:
        yield running


def spellings(path: str) -> Iterator[str]:
    """Encode the first letter of a part, or a slash that does not follow a name: there it would belong to it."""
    for i in range(1, len(path)):
        before, sign = path[i - 1], path[i]
        if (before == "/" and sign.isalnum()) or (sign == "/" and before != "}"):
            yield f"{path[:i]}%{ord(sign):02X}{path[i + 1 :]}"


@pytest.mark.parametrize("path", sorted({route.path for route in ROUTES}))
def test_an_encoded_path_is_no_other_way_to_a_route(service: ServiceThread, path: str) -> None:
    methods = {route.method for route in ROUTES if route.path == path}
    with attacks.owner_of(service) as owner:
        for spelling in spellings(path):
            names = {"name": "a", "reservation": "a%230", "entry": "a%230", "principal": "p", "key": "0" * 12}
            for method in methods:
                answer = owner.request(method, spelling.format(**names))
                assert answer.status_code == 404, (method, spelling)
                assert "there is nothing at this path" in answer.json()["detail"]


def test_an_encoded_path_is_no_other_way_to_a_page(service: ServiceThread) -> None:
    with attacks.reach(service, None) as client:
        for path in PAGES:
            assert client.get(path).status_code in {200, 303, 401}
            for spelling in spellings(path):
                assert client.get(spelling).status_code == 404, spelling


@pytest.mark.parametrize("name", ["a", "census-2030", "a.b_c", "Zensus"])
def test_names_are_still_read_decoded(service: ServiceThread, name: str) -> None:
    with attacks.owner_of(service) as owner:
        attacks.open_account(owner, name)
        for spelling in (quote(name, safe=""), "".join(f"%{ord(sign):02x}" for sign in name)):
            assert owner.get(f"/v1/accounts/{spelling}/balance").json()["name"] == name


def set_cookies(service: ServiceThread) -> list[str]:
    """Sign in, as a browser without scripts, and return every cookie that was set."""
    with httpx.Client(base_url=service.url) as browser:
        page = browser.get("/sign-in")
        cookie = page.headers["set-cookie"]
        token = page.text.partition('name="csrf" value="')[2].partition('"')[0]
        answer = browser.post(
            "/sign-in",
            data={"csrf": token, "token": service.token(), "then": "/"},
            headers={"Origin": service.url, "Cookie": cookie.partition(";")[0]},
        )
        assert answer.status_code == 303, answer.text
        return [cookie, *answer.headers.get_list("set-cookie")]


def test_over_tls_every_cookie_is_bound_to_this_host(tls_in_front: ServiceThread) -> None:
    for cookie in set_cookies(tls_in_front):
        fields = [field.strip().lower() for field in cookie.split(";")]
        assert cookie.startswith("__Host-odograph_")
        assert {"secure", "httponly", "path=/", "samesite=strict"} <= {*fields}
        assert not any(field.startswith("domain") for field in fields)


def test_over_tls_a_cookie_without_the_prefix_is_worth_nothing(tls_in_front: ServiceThread) -> None:
    (secret,) = [one for one in set_cookies(tls_in_front) if "session=" in one and "session=;" not in one]
    value = secret.partition("=")[2].partition(";")[0]
    with httpx.Client(base_url=tls_in_front.url) as browser:
        assert browser.get("/", headers={"Cookie": f"__Host-{COOKIE}={value}"}).status_code == 200
        assert browser.get("/", headers={"Cookie": f"{COOKIE}={value}"}).status_code == 303


def test_chromium_keeps_the_bound_cookie_and_signs_in_with_it(tls_in_front: ServiceThread) -> None:
    path = chromium_path()
    if path is None:
        pytest.skip("there is no Chromium: install Debian's chromium, or set CHROMIUM to where it is")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        page = browser.new_page()
        page.goto(f"{tls_in_front.url}/sign-in")
        page.fill("input[name=token]", tls_in_front.token())
        page.click("form[action='/sign-in'] button")
        page.wait_for_url(f"{tls_in_front.url}/")
        kept = [cookie for cookie in page.context.cookies() if cookie["name"] == f"__Host-{COOKIE}"]
        assert [cookie["secure"] for cookie in kept] == [True]
        browser.close()


def work_of(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch, token: str
) -> tuple[tuple[object, ...], list[str]]:
    """Ask twice in a row with a token, and return the words of the answers and what was looked up for them."""
    looked: list[str] = []
    find = Office._find  # noqa: SLF001  what takes the time

    def recorded(self: Office, digest: str) -> object:
        looked.append("look")
        return find(self, digest)

    with monkeypatch.context() as patch, attacks.reach(service, token) as client:
        patch.setattr(Office, "_find", recorded)
        words = [attacks.same_words(client.get("/v1/me")) for _ in range(4)]
    assert all(word == words[0] for word in words)
    return words[0], looked


def test_unknown_and_revoked_keys_take_the_same_path(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with attacks.owner_of(service) as owner:
        made = attacks.post(
            owner, "/v1/keys", {"principal": "ana", "role": "auditor", "every_account": True}, key="k"
        )
        revoked = made.json()["token"]
        assert owner.delete(f"/v1/keys/{made.json()['key']['id']}").status_code == 200
        expired = service.token("bo", "auditor", expires=0.001)
        found = [work_of(service, monkeypatch, token) for token in (new_token(), revoked, expired)]
    assert found[0][0][0] == 401
    assert all(one == found[0] for one in found), found
    assert len(found[0][1]) == 4  # every time: what is not valid is not remembered


def test_unknown_and_revoked_keys_take_the_same_time(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        made = attacks.post(
            owner, "/v1/keys", {"principal": "ana", "role": "auditor", "every_account": True}, key="k"
        )
        owner.delete(f"/v1/keys/{made.json()['key']['id']}")
        times: dict[str, list[float]] = {new_token(): [], made.json()["token"]: []}
        for _ in range(150):
            for token, taken in times.items():  # in turn, so that what slows one slows the other
                begun = time.perf_counter()
                assert owner.get("/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code == 401
                taken.append(time.perf_counter() - begun)
    unknown, revoked = (statistics.median(taken) for taken in times.values())
    assert 0.6 < unknown / revoked < 1.7
