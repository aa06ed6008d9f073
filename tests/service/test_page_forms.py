"""Cookies and forms of the dashboard: whose they are, when they end, and what is not taken for one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser_window import FLAGS, chromium_path
from page_client import Visitor, csrf_of, thief_of, visitor_of, words_of
from playwright.sync_api import sync_playwright
from service_server import ServiceThread

from odograph import GDP, Policy
from odograph.ledger.ledger import Ledger
from odograph.service.dashboard import pages, routes
from odograph.service.dashboard.pages import COOKIE
from odograph.service.key_store import connect_keys

MARKUP = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
TYPED = {
    "name": "made",
    "epsilon": "1",
    "delta": "0",
    "filter": "basic",
    "privacy_unit": "person",
    "neighbors": "add-remove",
}


# Who is inside: cookies, sessions, keys.


def test_the_cookie_is_for_this_site_and_no_script_alone(service: ServiceThread, tmp_path: Path) -> None:
    given = Visitor(service).sign_in(service.token()).headers["set-cookie"].lower()
    assert all(part in given for part in ("httponly", "samesite=strict", "path=/"))
    assert "domain" not in given
    assert "secure" not in given  # it would not come back over the loopback's plain HTTP
    with ServiceThread(f"sqlite:///{tmp_path}/behind.db", plain_http=True) as behind_tls:
        page = Visitor(behind_tls).get("/sign-in")
        assert "secure" in page.headers["set-cookie"].lower()


def test_a_cookie_is_worth_nothing_once_its_session_has_ended(service: ServiceThread) -> None:
    visitor = visitor_of(service)
    thief = thief_of(service, visitor.cookie)
    assert thief.is_inside()
    assert visitor.send("/sign-out", {"csrf": visitor.csrf}).status_code == 303
    assert not thief.is_inside()
    assert thief.get("/data-version").status_code == 401
    for forged in ("", "x", "x" * 43, visitor.cookie[:-1], "%" * 43, visitor.cookie.swapcase()):
        assert not thief_of(service, forged).is_inside(), forged


def test_signing_in_never_takes_over_a_cookie_that_was_there(service: ServiceThread) -> None:
    visitor = thief_of(service, "x" * 43)
    visitor.sign_in(service.token())
    fresh = [one.value for one in visitor.http.cookies.jar if one.name == COOKIE and one.value != "x" * 43]
    assert len(fresh) == 1
    assert thief_of(service, str(fresh[0])).is_inside()
    assert not thief_of(service, "x" * 43).is_inside()


def test_a_key_that_is_revoked_or_expires_ends_its_sessions(service: ServiceThread) -> None:
    service.token("olga")  # another owner, so that the others may go
    lasting, revoked = visitor_of(service), visitor_of(service, service.token("rose"))
    short = visitor_of(service, service.token("ed", "auditor", expires=4.0))
    assert lasting.is_inside()
    assert revoked.is_inside()
    assert short.is_inside()
    with connect_keys(service.settings.url) as keys:
        (rose,) = [key.id for key in keys.keys() if key.principal == "rose"]  # noqa: SIM118  a method, of no dictionary
        keys.revoke(rose, "olga")
    assert not revoked.is_inside()
    end = time.monotonic() + 10
    while short.is_inside() and time.monotonic() < end:
        time.sleep(0.1)
    assert not short.is_inside()
    assert lasting.is_inside()


def test_a_key_that_opens_nothing_is_told_in_one_way(service: ServiceThread) -> None:
    service.token("olga")
    gone = service.token("rose")
    with connect_keys(service.settings.url) as keys:
        keys.revoke(keys.keys()[0].id, "olga")
    tried = (gone, gone[:-1], "odo_" + "A" * 43, "", "x", "é", MARKUP)
    answers = [Visitor(service).sign_in(token) for token in tried]
    assert {answer.status_code for answer in answers} == {401}
    assert len({words_of(answer.text) for answer in answers}) == 1
    assert all(COOKIE not in answer.headers.get("set-cookie", "") for answer in answers)
    assert all(token not in answer.text for token, answer in zip(tried, answers, strict=True) if len(token) > 1)


# Forms.


def taken_forged(service: ServiceThread) -> list[str]:
    """Send forms without the secret of their session; return which were taken."""
    visitor, other = visitor_of(service), visitor_of(service)
    wrong: list[dict[str, str]] = [{}, {"csrf": ""}, {"csrf": "x"}, {"csrf": other.csrf}, {"csrf": visitor.csrf[:-1]}]
    found = []
    for path in ("/open", "/audit", "/sign-out"):
        answers = [visitor.send(path, TYPED | csrf) for csrf in wrong]
        answers.append(
            visitor.http.post(path, params={"csrf": visitor.csrf}, data=TYPED)
        )  # not by the address either
        found += [path for answer in answers if answer.status_code != 403]
    return found


def test_a_form_needs_the_secret_of_its_own_session(service: ServiceThread, remote: Ledger) -> None:
    assert taken_forged(service) == []
    assert remote.accounts() == ()
    visitor = visitor_of(service)
    assert visitor.send("/open", TYPED | {"csrf": visitor.csrf}).headers["location"] == "/accounts/made"
    assert [account.name for account in remote.accounts()] == ["made"]


def test_pages_that_take_any_form_would_be_caught(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "check_csrf", lambda *_: None)
    assert {"/open", "/audit"} <= {*taken_forged(service)}


def test_the_sign_in_form_is_tied_to_the_browser_that_it_was_sent_to(service: ServiceThread) -> None:
    token, victim, stranger = service.token(), Visitor(service), Visitor(service)
    foreign = csrf_of(stranger.get("/sign-in").text)
    for csrf in ("", "x", foreign):
        assert victim.sign_in(token, csrf=csrf).status_code == 403
    assert not victim.is_inside()
    assert Visitor(service).send("/sign-in", {"csrf": foreign, "token": token}).status_code == 403
    assert victim.sign_in(token).status_code == 303
    assert victim.is_inside()


def taken_from_elsewhere(service: ServiceThread) -> list[str]:
    """Send good forms as other sites would; return from which they were taken."""
    visitor, host = visitor_of(service), service.url.removeprefix("http://")
    form, found = {"csrf": visitor.csrf}, []
    for origin in ("http://evil.test", "null", "", f"http://{host}.evil.test", f"http://evil.test/{host}", host):
        stranger = Visitor(service)
        first = {"csrf": csrf_of(stranger.get("/sign-in").text), "token": service.token()}
        answers = [visitor.send("/audit", form, Origin=origin), stranger.send("/sign-in", first, Origin=origin)]
        found += [origin for answer in answers if answer.status_code != 403]
    return found


def test_a_form_from_another_site_is_refused_and_one_from_here_is_taken(service: ServiceThread) -> None:
    assert taken_from_elsewhere(service) == []
    visitor = visitor_of(service)
    form = {"csrf": visitor.csrf}
    assert visitor.send("/sign-out", form, Origin="http://evil.test").status_code == 403
    assert visitor.send("/audit", form, Origin=service.url).status_code == 200
    assert visitor.send("/audit", form).status_code == 200
    assert visitor.is_inside()


def test_pages_that_take_forms_from_everywhere_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "check_origin", lambda _: None)
    monkeypatch.setattr(pages, "check_origin", lambda _: None)
    assert taken_from_elsewhere(service).count("null") == 2


def test_a_form_that_is_too_large_or_none_at_all_is_refused(service: ServiceThread, remote: Ledger) -> None:
    visitor = visitor_of(service)
    csrf = visitor.csrf

    def sent(content: bytes, kind: str = "application/x-www-form-urlencoded") -> int:
        return visitor.http.post("/open", content=content, headers={"Content-Type": kind}).status_code

    assert sent(b"csrf=" + csrf.encode() + b"&note=" + b"x" * 65_536) == 413
    assert sent(json.dumps({"csrf": csrf}).encode(), "application/json") == 415
    assert sent(b"--x\r\n\r\n", "multipart/form-data; boundary=x") == 415
    assert sent(f"csrf={csrf}".encode(), "text/plain") == 415
    assert sent(f"csrf={csrf}&{'&'.join('a=1' for _ in range(60))}".encode()) == 400
    assert sent(f"csrf={csrf}&name=%ff".encode()) == 400
    assert sent(f"csrf={csrf}&name=\xff".encode("latin-1")) == 400
    assert sent(f"csrf=x&csrf={csrf}".encode()) == 403
    assert sent(f"csrf={csrf}".encode()) == 422  # read, and then found to be no account
    assert remote.accounts() == ()


ELSEWHERE = (
    *("https://evil.test/", "//evil.test/", "/\\evil.test", "\\\\evil.test", "/\t/evil.test", "javascript:alert(1)"),
    *("///evil.test", "/%0d%0aX: y", "/\r\nSet-Cookie: a=b", "", "evil", "@evil.test", "/\x00", "http:evil.test"),
)


def strays(service: ServiceThread) -> list[str]:
    """Sign in with addresses elsewhere to go to; return where that would lead away from the service."""
    token, found = service.token(), []
    for then in ELSEWHERE:
        visitor = Visitor(service)
        answer = visitor.sign_in(token, then)
        assert answer.status_code == 303
        where = answer.headers["location"]
        assert "x" not in answer.headers
        assert str(visitor.http.cookies.get("a")) == "None"
        if not where.startswith("/") or where.startswith(("//", "/\\")):
            found.append(where)
    return found


def test_signing_in_leads_to_no_other_site(service: ServiceThread) -> None:
    assert strays(service) == []
    answer = Visitor(service).sign_in(service.token(), "/accounts/census?verb=spend#entries")
    assert answer.headers["location"] == "/accounts/census?verb=spend#entries"


def test_a_sign_in_that_led_anywhere_would_be_caught(service: ServiceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_local_path", lambda path: path if path.startswith("https:") else "/")
    assert "https://evil.test/" in strays(service)


@pytest.fixture
def tls_in_front(tmp_path: Path) -> Iterator[ServiceThread]:
    with ServiceThread(f"sqlite:///{tmp_path}/ledger.db", plain_http=True) as running:
        yield running


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


# Promises other than (epsilon, delta).


@pytest.mark.parametrize("promise", ["rho", "mu", "no limit"])
def test_another_promise_is_opened_and_shown(service: ServiceThread, remote: Ledger, promise: str) -> None:
    visitor = visitor_of(service)
    form = TYPED | {"promise": promise, "epsilon": "1", "delta": "1e-6", "filter": "default", "reserve": "mixed"}
    sent = visitor.send("/open", form | {"csrf": visitor.csrf})
    assert sent.headers["location"] == "/accounts/made"
    account = remote.account("made")
    wanted = {"rho": Policy(rho=1, delta=1e-6), "mu": Policy(mu=1, delta=1e-6), "no limit": Policy(None, 1e-6)}
    assert account.policy == wanted[promise]
    account.spend(GDP(0.25))
    page = words_of(visitor.get("/accounts/made", compare="1", kind="gaussian", size="4", times="3").text)
    in_words = {"rho": "zero-concentrated", "mu": "Gaussian differentially private", "no limit": "No limit is fixed"}
    assert in_words[promise] in page
    assert ("no limit" in page) == (promise == "no limit")
    assert "✓ Fits: 3 × GDP(0.25)" in page.replace("\u2060", "").replace("\xa0", " ")
    assert ("Afterwards" in page) == (promise != "no limit")
    assert "the promise is" not in page
    overview = words_of(visitor.get("/").text)
    assert account.policy.target in overview.replace("\u2060", "").replace("\u2011", "-").replace("\xa0", " ")
    for query in ({}, {"by": "time"}, {"format": "svg"}, {"format": "json"}):
        chart = visitor.get("/accounts/made/chart", **query)
        assert chart.status_code == 200
        assert "promise: epsilon" not in chart.text


def test_a_promise_that_is_not_offered_is_refused(service: ServiceThread, remote: Ledger) -> None:
    visitor = visitor_of(service)
    sent = visitor.send("/open", TYPED | {"promise": "sigma", "csrf": visitor.csrf})
    assert sent.status_code == 400
    assert "promise must be one of" in words_of(sent.text)
    assert remote.accounts() == ()
