"""The dashboard in a real browser: what people do with it, by pointer and by keyboard, with a script and without."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing

import pytest
from browser_window import SEEN, Opener, artifacts
from playwright.sync_api import Page, expect
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.ledger import Ledger
from odograph.service.key_store import connect_keys

POLICY = odo.Policy(1, "1e-6")
PLAIN = odo.Policy(1, 0, filter="basic")
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


def test_whoever_signs_out_is_out_wherever_the_cookie_was_copied_to(service: ServiceThread, opened: Opener) -> None:
    token, window = service.token(), opened()
    window.go("/audit")
    page = window.page
    page.get_by_label("API key").fill(token[:-2])
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not valid")
    assert token[:-2] not in page.content()
    window.forgive("401")
    page.get_by_label("API key").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Audit")).to_be_visible()  # where they wanted to go
    assert token not in page.content()
    copied = window.cookies
    thief = opened()
    thief.context.add_cookies(copied)
    thief.go("/")
    expect(thief.page.get_by_role("heading", name="Accounts")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    # The copy is signed out by itself, and stays so with the old cookie put back.
    expect(thief.page.get_by_role("heading", name="Sign in")).to_be_visible()
    thief.forgive("401")
    thief.context.add_cookies(copied)
    thief.go("/")
    expect(thief.page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_an_account_is_opened_by_the_form_and_what_was_typed_survives_a_mistake(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    window = opened()
    page = window.sign_in(service.token())
    page.get_by_role("link", name="Open the first one").click()
    page.get_by_label("Name", exact=True).fill("census 2030")
    page.get_by_label("Epsilon, rho or mu").fill("2")
    page.get_by_role("button", name="Open the account").click()
    expect(page.get_by_role("alert")).to_contain_text("census 2030")
    expect(page.get_by_label("Epsilon, rho or mu")).to_have_value("2")
    window.forgive("42")
    page.get_by_label("Name", exact=True).fill("census-2030")
    page.get_by_label("Filter").select_option("zcdp")
    page.get_by_role("button", name="Open the account").click()
    expect(page.get_by_role("heading", name="census-2030")).to_be_visible()
    account = remote.account("census-2030")
    assert (account.policy.epsilon, account.policy.filter_text) == (2, "zcdp")
    assert account.history(0, 1)[0].principal == "ana"


def test_a_refused_plan_comes_with_an_offer_that_fits_and_planning_spends_nothing(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    account = remote.open_account("census", POLICY)
    account.spend(odo.PureDP("0.2"))
    before = remote.checkpoint()
    page = opened().sign_in(service.token(), "/accounts/census")
    plan = page.locator("#plan")
    page.get_by_label("How many times").fill("4")
    page.get_by_label("Size").fill("0.3")
    expect(plan).to_contain_text("Does not fit")
    expect(plan).to_contain_text("2 such questions fit in a row")
    offer = re.search(r"PureDP\(([\d.]+)\)", plan.locator("li b").inner_text())
    assert offer is not None
    page.get_by_label("Size").fill(offer[1])
    expect(plan).to_contain_text("✓ Fits")
    page.get_by_label("Size").fill(str(float(offer[1]) + 0.001))
    expect(plan).to_contain_text("Does not fit")
    page.get_by_label("Kind of question").select_option("gaussian")
    expect(page.get_by_label("Sensitivity")).to_be_visible()
    page.get_by_label("Size").fill("1")
    noise = re.compile(r"sigma ([\d.]+) or more")
    expect(plan).to_contain_text(noise)
    least = noise.search(plan.inner_text())
    assert least is not None
    page.get_by_label("Size").fill(least[1])
    expect(plan).to_contain_text("✓ Fits")
    page.get_by_label("Size").fill("much")
    expect(plan.locator(".problem")).to_be_visible()
    assert remote.checkpoint() == before
    # What the page calls fitting is what the ledger admits.
    for _ in range(4):
        account.spend(odo.PureDP(offer[1]))
    assert not account.decide(odo.PureDP(offer[1]))


def test_what_is_spent_elsewhere_appears_without_a_reload(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    account = remote.open_account("census", PLAIN)
    remote.open_account("other", PLAIN)
    overview, detail, still = opened(), opened(), opened(java_script_enabled=False)
    token = service.token()
    for window, path in ((overview, "/"), (detail, "/accounts/census"), (still, "/")):
        window.sign_in(token, path)
    for window in (overview, detail):
        window.page.evaluate("window.unchanged = true")
    link = overview.page.get_by_role("link", name="other")
    link.focus()
    expect(detail.page.locator("#chart canvas").first).to_be_visible()
    drawn = sum("/chart" in one for one in detail.asked)
    account.spend(odo.PureDP("0.95"), note=MARKUP, key="elsewhere")
    expect(overview.page.get_by_role("heading", name="Near the limit")).to_be_visible()
    expect(overview.page.get_by_role("img", name="95% of the budget spent")).to_be_visible()
    expect(overview.page.locator("#live-status")).to_contain_text("Updated")
    expect(link).to_be_focused()
    entries = detail.page.locator("#entries-table")
    expect(entries).to_contain_text("elsewhere")
    expect(entries.locator(".note").first).to_have_text(MARKUP)  # as a text, and nothing else
    expect(detail.page.locator("#reading")).to_contain_text("0.95")
    expect(detail.page.locator("#chart-text")).to_contain_text("After 1 step the loss is at most 0.95")
    with pytest.raises(odo.BudgetExceeded):
        account.spend(odo.PureDP("0.5"), key="too-much")
    expect(entries.locator("tbody tr").first).to_contain_text("refuse")
    expect(entries.locator("tbody tr").first).to_contain_text("too-much")
    assert sum("/chart" in one for one in detail.asked) > drawn
    for window in (overview, detail):
        assert window.page.evaluate("window.unchanged") is True
    # A page that runs no script shows what was true when it was asked for.
    expect(still.page.get_by_role("heading", name="Near the limit")).to_be_hidden()
    still.page.reload()
    expect(still.page.get_by_role("heading", name="Near the limit")).to_be_visible()


def test_a_page_says_when_it_cannot_reach_the_service_and_when_it_can_again(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    remote.open_account("census", PLAIN)
    window = opened()
    page = window.sign_in(service.token())
    window.context.set_offline(True)
    expect(page.locator("#live-status")).to_contain_text("No connection")
    window.context.set_offline(False)
    expect(page.locator("#live-status")).to_contain_text("Connected again")
    window.forgive("ERR_INTERNET_DISCONNECTED")


def test_a_page_ends_by_itself_when_its_key_is_revoked(service: ServiceThread, opened: Opener) -> None:
    service.token("olga")  # another owner, so that this one may go
    window = opened()
    page = window.sign_in(service.token())
    with connect_keys(service.settings.url) as keys:
        keys.revoke(keys.keys()[0].id, "olga")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    window.forgive("401")


@pytest.mark.parametrize("script", [True, False])
def test_entries_are_filtered_and_paged_with_and_without_a_script(
    service: ServiceThread, remote: Ledger, opened: Opener, *, script: bool
) -> None:
    account = remote.open_account("census", PLAIN)
    for i in range(60):
        account.spend(odo.PureDP("0.001"), note="odd one" if i % 10 else "", key=f"k{i}")
    page = opened(java_script_enabled=script).sign_in(service.token(), "/accounts/census")
    first = page.locator("#entries-table tbody th")
    expect(first).to_have_count(50)
    seen = first.all_inner_texts()
    while page.get_by_role("link", name="Older").is_visible():
        page.get_by_role("link", name="Older").click()
        expect(first.first).to_have_text(str(int(seen[-1]) - 1))
        seen += first.all_inner_texts()
    assert seen == [str(i) for i in range(60, -1, -1)]
    page.get_by_role("link", name="Newest").click()
    expect(first.first).to_have_text("60")
    page.get_by_label("Note, key or cost contains").fill("odd")
    page.get_by_label("Verb").select_option("spend")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#entries-table .note", has_text="odd one")).to_have_count(50)
    page.get_by_role("link", name="Older").click()
    expect(first).to_have_count(4)
    expect(page.get_by_label("Note, key or cost contains")).to_have_value("odd")
    page.get_by_label("Principal").fill("nobody")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#entries-table")).to_contain_text("No entry matches the search")


def test_everything_else_works_without_a_script_too(service: ServiceThread, remote: Ledger, opened: Opener) -> None:
    remote.open_account("census", POLICY).spend(odo.PureDP("0.2"))
    remote.open_account("clinic", PLAIN)
    window = opened(java_script_enabled=False)
    page = window.sign_in(service.token())
    page.get_by_label("Search").fill("cens")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("link", name="clinic")).to_be_hidden()
    page.get_by_role("link", name="census").click()
    expect(page.get_by_role("img", name="History of the reading, with")).to_be_visible()
    page.get_by_label("Size").fill("0.3")
    page.get_by_label("How many times").fill("4")
    page.get_by_role("button", name="Calculate").click()
    expect(page.locator("#plan")).to_contain_text("Does not fit")
    expect(page.get_by_label("Size")).to_have_value("0.3")
    page.get_by_label("compare other odometers").check()
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", name="Other odometers")).to_be_visible()
    expect(page.locator("#reading tbody th")).to_have_text(["discrete mixture", "filter", "mixture", "stitched"])
    expect(page.locator("#reading")).to_contain_text("not covered by the guarantee")
    page.screenshot(path=artifacts() / "account-without-script.png", full_page=True)
    page.get_by_role("link", name="Audit").click()
    page.get_by_role("button", name="Verify every entry").click()
    expect(page.get_by_role("status").first).to_contain_text("Verified")
    page.get_by_role("link", name="API", exact=True).click()
    page.locator("summary", has_text="/v1/batches").click()
    expect(page.locator("#batch pre")).to_contain_text("curl -X POST $ODOGRAPH_URL/v1/batches")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_chain_that_was_broken_is_shown_broken(service: ServiceThread, remote: Ledger, opened: Opener) -> None:
    account = remote.open_account("census", PLAIN)
    for _ in range(3):
        account.spend(odo.PureDP("0.1"))
    window = opened()
    page = window.sign_in(service.token("ada", "auditor"), "/audit")
    page.get_by_role("button", name="Verify every entry").click()
    verdict = page.locator(".verdict")
    expect(verdict).to_contain_text("✓ Verified")
    with closing(sqlite3.connect(service.settings.url.removeprefix("sqlite:///"), isolation_level=None)) as file:
        for (name,) in file.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            file.execute(f"DROP TRIGGER {name}")
        file.execute("UPDATE entries SET key = 'another' WHERE account = 'census' AND sequence = 2")
    page.get_by_role("button", name="Verify every entry").click()
    expect(verdict).to_contain_text("✕ Verification failed")
    expect(verdict).to_contain_text("census")
    assert window.look("audit-broken") == []


def test_pages_show_what_the_role_and_the_accounts_of_a_key_allow(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    remote.open_account("census", PLAIN)
    remote.open_account("below", PLAIN, parent="census")
    remote.open_account("secret", PLAIN)
    owner, auditor, analyst = opened(), opened(), opened()
    owner.sign_in(service.token())
    expect(owner.page.get_by_role("link", name="Open an account")).to_be_visible()
    auditor.sign_in(service.token("ada", "auditor"))
    expect(auditor.page.get_by_role("link", name="secret")).to_be_visible()
    expect(auditor.page.get_by_role("link", name="Audit")).to_be_visible()
    expect(auditor.page.get_by_role("link", name="Open an account")).to_have_count(0)
    assert auditor.go("/open").status == 403
    auditor.forgive("403")
    analyst.sign_in(service.token("bob", "analyst", "below"))
    expect(analyst.page.get_by_role("main").get_by_role("link")).to_have_text(["below"])
    expect(analyst.page.get_by_role("link", name="Audit")).to_have_count(0)
    analyst.page.get_by_role("link", name="below").click()
    expect(analyst.page.get_by_role("heading", name="below")).to_be_visible()
    assert "census" not in analyst.page.content()
    for path, status in (("/accounts/secret", 404), ("/audit", 403), ("/open", 403)):
        assert analyst.go(path).status == status
        analyst.forgive(str(status))


def tab_to(page: Page, wanted: Callable[[], bool], most: int = 60) -> None:
    """Press Tab until the focus is there; whatever has it on the way can be seen to have it."""
    for _ in range(most):
        page.keyboard.press("Tab")
        assert page.evaluate(SEEN), page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        if wanted():
            return
    pytest.fail("the keyboard does not get there")


def test_the_keyboard_alone_signs_in_reaches_an_account_and_plans(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    remote.open_account("census", POLICY).spend(odo.PureDP("0.2"))
    window = opened()
    window.go("/")
    page, focus = window.page, "document.activeElement"
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(service.token())
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Accounts")).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focus}.className") == "skip"
    page.keyboard.press("Enter")
    tab_to(page, lambda: page.evaluate(f"{focus}.pathname") == "/accounts/census", 5)
    page.screenshot(path=artifacts() / "focus.png")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="census")).to_be_visible()
    tab_to(page, lambda: page.evaluate(f"{focus}.id") == "size")
    page.keyboard.type("0.3")
    tab_to(page, lambda: page.evaluate(f"{focus}.id") == "times", 2)
    page.keyboard.type("4")
    page.keyboard.press("Enter")
    expect(page.locator("#plan")).to_contain_text("Does not fit")
    tab_to(page, lambda: page.evaluate(f"{focus}.textContent") == "Search")
    page.add_style_tag(content="* { outline: 0 !important } *::after { outline: 0 !important }")
    assert not page.evaluate(SEEN)


def test_an_owner_makes_a_key_and_voids_without_a_script(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    account = remote.open_account("census", PLAIN)
    for i in range(3):
        account.reserve(odo.PureDP("0.125"), key=f"job-{i}", note=MARKUP)
    own = service.token()
    window = opened(java_script_enabled=False)
    page = window.sign_in(own, "/keys")
    page.get_by_label("Principal").fill("carl")
    page.get_by_label("Accounts", exact=True).fill("census")
    page.get_by_role("button", name="Make a key…").click()
    expect(page.get_by_role("heading", name="Make an analyst's key")).to_be_visible()
    page.get_by_label("Your own API key").fill(own)
    page.get_by_role("button", name="Make the key").click()
    token = page.get_by_label("Token").input_value()
    assert token not in page.url
    with odo.connect(service.url, token=token) as ledger:
        assert ledger.account("census").decide(odo.PureDP("0.125"))
    page.get_by_role("link", name="Go to the keys").click()
    expect(page.get_by_role("link", name="carl")).to_be_visible()
    window.go("/accounts/census")
    page.get_by_label("census#1", exact=True).check()
    page.get_by_label("census#3", exact=True).check()
    page.get_by_label("Reason, or note").fill("the jobs were cancelled")
    page.get_by_role("button", name="Void…").click()
    expect(page.get_by_role("main")).to_contain_text("states that the mechanism was not run")
    assert len(account.pending) == 3
    page.get_by_role("button", name="Void 2 reservations").click()
    expect(page.get_by_role("heading", name="2 of 2 voided")).to_be_visible()
    assert [one.id for one in account.pending] == ["census#2"]
    window.go("/open")
    page.get_by_label("scale").fill("100")
    page.get_by_role("button", name="Count the questions").click()
    expect(page.locator("#outlook")).to_contain_text("Counts with Laplace noise: scale 100")
    expect(page.get_by_label("scale")).to_have_value("100")
    assert len(remote.accounts()) == 1


def test_the_keyboard_alone_closes_an_account_and_counts_questions_as_they_are_typed(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    account = remote.open_account("census", PLAIN)
    window = opened()
    page, focus = window.sign_in(service.token(), "/accounts/census"), "document.activeElement"
    tab_to(page, lambda: page.evaluate(f"{focus}.textContent") == "Close this account…")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Close census")).to_be_visible()
    tab_to(page, lambda: page.evaluate(f"{focus}.id") == "name")
    page.keyboard.type("census")
    page.keyboard.press("Enter")
    expect(page.locator("#now")).to_contain_text("Closed: no new charges are accepted")
    assert account.history(-1)[0].verb == "close"
    window.go("/open")
    tab_to(page, lambda: page.evaluate(f"{focus}.id") == "ask_laplace")
    page.keyboard.type("100")
    expect(page.locator("#outlook")).to_contain_text("Counts with Laplace noise: scale 100")
    assert not any("csrf" in one for one in window.asked)


@pytest.mark.parametrize("path", ["/pending", "/accounts/census"])
def test_what_was_chosen_and_typed_stays_when_a_page_is_updated(
    service: ServiceThread, remote: Ledger, opened: Opener, path: str
) -> None:
    account = remote.open_account("census", PLAIN)
    for i in range(2):
        account.reserve(odo.PureDP("0.125"), key=f"job-{i}")
    page = opened().sign_in(service.token(), path)
    page.get_by_label("census#2").check()
    reason = page.get_by_label("Reason, or note")
    reason.press_sequentially("the job was canceled")
    reason.press("Home")
    account.reserve(odo.PureDP("0.125"), key="job-2")
    expect(page.get_by_label("census#3")).to_be_visible()
    expect(page.get_by_label("census#2")).to_be_checked()
    expect(page.get_by_label("census#1")).not_to_be_checked()
    expect(reason).to_be_focused()
    reason.press_sequentially("because ")
    expect(reason).to_have_value("because the job was canceled")
    page.get_by_label("census#1").focus()
    account.reserve(odo.PureDP("0.125"), key="job-3")
    expect(page.get_by_label("census#4")).to_be_visible()
    expect(page.get_by_label("census#1")).to_be_focused()
    page.get_by_label("all that are shown").check()
    page.get_by_label("census#3").uncheck()
    page.get_by_role("button", name="Void…").click()
    expect(page.get_by_role("heading", name="Void 3 reservations")).to_be_visible()
