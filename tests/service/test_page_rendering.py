"""How the dashboard looks in a real browser: sound in every light and size, quick to load, asking nobody else."""

from __future__ import annotations

import json

import pytest
from browser_window import Opener, Window, artifacts, faults
from playwright.sync_api import Browser, Page, expect
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.ledger import Ledger

POLICY = odo.Policy(1, "1e-6")
PLAIN = odo.Policy(1, 0, filter="basic")
PAGES = {
    "overview": "/",
    "tree": "/?view=tree",
    "sorted": "/?sort=spent&q=c",
    "account": "/accounts/census?kind=pure&size=0.3&times=4",
    "compare": "/accounts/census?compare=1&by=time",
    "linked": "/accounts/clinic",
    "above": "/accounts/survey",
    "audit": "/audit",
    "open": "/open",
    "missing": "/accounts/nowhere",
    "docs": "/docs#spend",
    "spending": "/spending",
    "entries": "/entries?text=count",
    "principal": "/principal?name=bot",
    "pending": "/pending",
    "keys": "/keys",
    "populations": "/populations",
    "close": "/accounts/survey/close",
}
WEIGHT, REQUESTS = 300_000, 10  # of the overview, in bytes over the wire and in number

# The numbers and times of a page that are not all on one line.
BROKEN = r"""() => {
    const found = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode;
        for (const one of text.data.matchAll(/(1 - )?\d[\d.]*e[+-]\d+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d/g)) {
            const range = document.createRange();
            range.setStart(text, one.index);
            range.setEnd(text, one.index + one[0].length);
            if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) found.push(one[0]);
        }
    }
    return found;
}"""


def stock(ledger: Ledger) -> None:
    """Accounts of every kind that a page shows: near the limit, below another, linked, closed, pending."""
    ledger.open_account("census", POLICY)
    ledger.open_account("survey", odo.Policy(2, "1e-6", filter="zcdp"), dataset="survey-2030")
    ledger.open_account("survey-north", odo.Policy(1, "1e-7", filter="zcdp"), parent="survey")
    patients = odo.Policy(1, 0, filter="basic", privacy_unit="patient", neighbors="replace-one")
    ledger.open_account("clinic", patients)
    ledger.open_account("clinic-2", patients, successor_of="clinic")
    ledger.open_account("old", PLAIN).close(note="the study ended")
    census = ledger.account("census")
    for i in range(12):
        census.spend(odo.PureDP(f"0.0{i % 4 + 1}"), key=f"week-{i}", note=f"weekly count {i}")
    census.reserve(odo.PureDP("0.02"), expires=3600).void("the job was cancelled")
    census.reserve(odo.PureDP("0.03"), expires=3600, note="a long run")
    with pytest.raises(odo.BudgetExceeded):
        census.spend(odo.PureDP(3), key="too-much")
    ledger.account("survey-north").spend(odo.gaussian(sigma=9))
    ledger.account("clinic").spend(odo.PureDP("0.95"), note="the great table")


@pytest.mark.parametrize(
    ("size", "theme", "names"),
    [
        ("wide", "light", [*PAGES]),
        ("phone", "dark", ["overview", "tree", "account", "above", "open", "spending", "pending", "keys"]),
        ("wide", "dark", ["overview", "tree", "compare"]),
        ("phone", "light", ["overview", "sorted", "account"]),
    ],
)
def test_every_page_is_sound_in_light_and_dark_and_wide_and_narrow(  # noqa: PLR0913, PLR0917  fixtures and cases
    service: ServiceThread, remote: Ledger, opened: Opener, size: str, theme: str, names: list[str]
) -> None:
    stock(remote)
    window = opened(size, color_scheme=theme)
    window.go("/")
    assert window.look(f"sign-in-{theme}-{size}") == []
    window.sign_in(service.token())
    for name in names:
        window.go(PAGES[name])
        if name in {"account", "compare", "linked", "above"}:
            expect(window.page.locator("#chart canvas").first).to_be_visible()
        assert window.look(f"{name}-{theme}-{size}") == [], name
    if "missing" in names:
        window.forgive("404")


def test_a_page_that_is_not_sound_is_caught(chromium: Browser) -> None:
    context = chromium.new_context()
    page = context.new_page()
    page.set_content(
        "<html><body><main><h1>a</h1><h1>b</h1><input name=x><table><tr><th>c</th></tr></table>"
        '<p style="color: #bbb; background: #fff">faint</p><img src="data:,"><svg></svg>'
        '<p style="width: 5000px">wide</p></main></body></html>'
    )
    found = " ".join(faults(page))
    for fault in (
        "more than one H1",
        "no label",
        "no scope",
        "no alt",
        "no name",
        "no footer",
        "no language",
        "wider",
    ):
        assert fault in found, fault
    assert "color-contrast" in found
    context.close()


def broken(page: Page) -> set[str]:
    """Return the numbers of a page that are broken over two lines, at whatever width of a narrow window."""
    found: set[str] = set()
    for width in range(320, 480, 10):
        page.set_viewport_size({"width": width, "height": 844})
        found |= {*page.evaluate(BROKEN)}
    return found


def test_no_number_is_broken_over_two_lines_on_a_narrow_page(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    stock(remote)
    for i in range(4):  # at different places of their lines
        remote.account("census").spend(odo.PureDP("1e-6"), note=f"{'x' * 3 * i} at most 1e-06 of it")
    window = opened("phone")
    page = window.sign_in(service.token())
    asked = "/accounts/census?kind=approx&size=0.1&delta=1e-9&compare=1"
    caught: set[str] = set()
    for path in ("/", asked, "/accounts/clinic", "/open", "/accounts/survey?kind=zcdp&size=1e-7&times=3", "/docs"):
        window.go(path)
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert broken(page) == set(), path
        page.add_style_tag(content=".nobreak, time { white-space: normal !important }")
        caught |= broken(page)
    assert {"1e-06", "1e-6"} <= caught, "pages that break their numbers must be caught"


def ground(page: Page) -> tuple[bytes, bytes, bytes]:
    """Return how a page without its script looks beside the chart, in a corner of the chart, and at its text."""
    chart = page.locator("img.chart")
    expect(chart).to_be_visible()
    page.wait_for_load_state("networkidle")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    top, height = round(box["y"] + 0.04 * box["height"]), round(0.07 * box["height"])  # above the promise's line
    places = (box["x"] - 14, box["x"] + box["width"] - 30, box["x"] + 12 / 736 * box["width"])
    beside, corner, text = (
        page.screenshot(clip={"x": round(left), "y": top, "width": 8, "height": height}) for left in places
    )
    return beside, corner, text


@pytest.mark.parametrize("size", ["wide", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_of_a_page_without_script_lies_on_the_card_and_can_be_read(
    service: ServiceThread, remote: Ledger, opened: Opener, size: str, theme: str
) -> None:
    stock(remote)
    window = opened(size, color_scheme=theme, java_script_enabled=False)
    page = window.sign_in(service.token(), "/accounts/census")
    beside, corner, text = ground(page)
    page.screenshot(path=artifacts() / f"static-{theme}-{size}.png")
    assert corner == beside
    assert text != beside
    white = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 736 316"><path fill="#fff" d="M0 0h736v316H0z"/></svg>'
    )
    page.route("**/chart?*", lambda route: route.fulfill(content_type="image/svg+xml", body=white))
    page.reload()
    beside, corner, text = ground(page)
    assert (corner == beside) is (theme == "light"), "a chart on white must be caught in the dark"
    assert text == corner


def test_a_page_that_asks_elsewhere_or_complains_is_caught(chromium: Browser, service: ServiceThread) -> None:
    def window() -> Window:
        return Window(chromium.new_context(), service.url)

    quiet = window()
    quiet.go("/docs")
    assert quiet.strangers == []
    assert quiet.complaints == []
    quiet.page.evaluate("fetch('http://127.0.0.1:1/').catch(() => {})")
    assert any("Content Security Policy" in one for one in quiet.complaints)
    scripted = window()
    scripted.go("/docs")
    scripted.page.evaluate("document.body.innerHTML = '<img src=x onerror=alert(1)>'")
    scripted.page.wait_for_timeout(100)
    assert any("Content Security Policy" in one for one in scripted.complaints)
    stranger = window()
    stranger.page.set_content('<img src="http://127.0.0.1:1/x.png">')
    assert stranger.strangers == ["http://127.0.0.1:1/x.png"]
    for one in (quiet, scripted, stranger):
        one.context.close()


def weigh(window: Window, path: str) -> tuple[int, int, float]:
    """Load a page that was never loaded; say how many bytes came over the wire, in how many requests, how fast."""
    wire = window.context.new_cdp_session(window.page)
    sizes: list[float] = []
    wire.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    wire.send("Network.enable")
    window.go(path)
    window.page.wait_for_load_state("networkidle")
    took: float = window.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    return round(sum(sizes)), len(sizes), took


def test_the_overview_of_two_hundred_accounts_is_light_and_a_page_with_a_chart_is_not(
    service: ServiceThread, remote: Ledger, opened: Opener
) -> None:
    compiled = odo.compile_policy(POLICY)
    for i in range(200):
        remote.open_account(f"region-{i:03}", compiled, dataset=f"block-{i % 7}")
    for i in range(0, 200, 5):
        remote.account(f"region-{i:03}").spend(odo.PureDP(f"{0.005 * i:.3f}") if i else odo.PureDP("0.999"))
    first = opened()
    first.sign_in(service.token())
    cookies = first.cookies
    overview, account = opened(), opened()
    for window in (overview, account):
        window.context.add_cookies(cookies)
    size, requests, took = weigh(overview, "/")
    report = {"accounts": 200, "bytes": size, "requests": requests, "milliseconds": round(took)}
    (artifacts() / "overview-200.json").write_text(json.dumps(report), encoding="utf-8")
    expect(overview.page.locator(".cards li")).to_have_count(50)
    overview.page.screenshot(path=artifacts() / "overview-200.png")
    assert 0 < size < WEIGHT
    assert 0 < requests <= REQUESTS
    heavy, *_ = weigh(account, "/accounts/region-005")
    assert heavy > WEIGHT
    expect(overview.page.get_by_text("Page 1 of 4")).to_be_visible()
    overview.page.get_by_role("link", name="Next").click()
    expect(overview.page.get_by_text("Page 2 of 4")).to_be_visible()
    overview.page.get_by_label("Search").fill("block-3")
    expect(overview.page.locator(".cards li")).to_have_count(len(range(3, 200, 7)))
    assert overview.page.evaluate("location.search") == "?q=block-3"
