"""Windows of a real browser that record requests, console messages and accessibility faults of a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response, expect, sync_playwright

PAGE_TIMEOUT = 20_000  # milliseconds until something that must appear has appeared, on a busy machine

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)

# The violations that axe-core finds, a line each: standard rules and best practices.
AXE = """async () => {
    const found = await axe.run({ resultTypes: ["violations"] });
    const where = (one) => one.nodes.map((node) => node.html.slice(0, 99));
    return found.violations.map((one) => `${one.id}: ${one.help}: ${where(one)}`);
}"""

# Checks of every page that axe-core does not make, a line each.
FAULTS = """() => {
    const all = (selector) => [...document.querySelectorAll(selector)];
    const named = (one) => one.getAttribute("aria-label") || one.getAttribute("aria-labelledby");
    const html = (one) => one.outerHTML.slice(0, 100);
    const found = [];
    for (const one of all("input:not([type=hidden]), select, textarea"))
        if (!one.labels.length && !named(one)) found.push(`no label: ${html(one)}`);
    for (const one of all("h1, header, main, footer"))
        if (all(one.tagName).length !== 1) found.push(`more than one ${one.tagName}`);
    for (const tag of ["h1", "header", "main", "footer"]) if (!all(tag).length) found.push(`no ${tag}`);
    for (const one of all("img")) if (!one.hasAttribute("alt")) found.push(`no alt: ${html(one)}`);
    for (const one of all("svg:not([aria-hidden])").filter((one) => !one.closest("[role=img]:not(svg)")))
        if (one.getAttribute("role") !== "img" || !named(one)) found.push(`no name: ${html(one)}`);
    for (const one of all("th")) if (!one.scope) found.push(`no scope: ${html(one)}`);
    for (const one of all("[id]")) if (all(`[id="${one.id}"]`).length > 1) found.push(`twice the id ${one.id}`);
    if (!document.documentElement.lang) found.push("no language");
    if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
    return found;
}"""

# Whether the focused element has a visible outline, on itself or on what is drawn over it.
SEEN = """() => {
    const drawn = (style) => style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
    const one = document.activeElement;
    return drawn(getComputedStyle(one)) || drawn(getComputedStyle(one, "::after"));
}"""


def artifacts() -> Path:
    """Return the folder of screenshots."""
    folder = Path(os.environ.get("ODOGRAPH_ARTIFACTS") or Path(__file__).parents[2] / "test-artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def chromium_path() -> str | None:
    """Return the path of Chromium, if it is installed."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launch_chromium() -> Iterator[Browser]:
    """Start Chromium, and skip the test if it is not installed."""
    path = chromium_path()
    if path is None:
        pytest.skip("there is no Chromium: install Debian's chromium, or set CHROMIUM to where it is")
    expect.set_options(timeout=PAGE_TIMEOUT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


class Window:
    """A browser context with one page, and everything that the page requested or wrote to its console."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PAGE_TIMEOUT)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)

    @property
    def strangers(self) -> list[str]:
        """The requests to other hosts."""
        return [one for one in self.asked if urlsplit(one).scheme != "data" and not one.startswith(f"{self.url}/")]

    @property
    def cookies(self) -> list[Any]:
        """The cookies, to be put into another browser."""
        return [*self.context.cookies()]

    def go(self, path: str) -> Response:
        """Open a page of the service."""
        answer = self.page.goto(self.url + path)
        assert answer is not None
        return answer

    def sign_in(self, token: str, path: str = "/") -> Page:
        """Sign in by the form."""
        self.go(path)
        self.page.get_by_label("API key").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("button", name="Sign out")).to_be_visible()
        return self.page

    def look(self, name: str) -> list[str]:
        """Save a screenshot of the whole page, and return its faults."""
        self.page.screenshot(path=artifacts() / f"{name}.png", full_page=True)
        return faults(self.page)

    def forgive(self, text: str) -> None:
        """Remove console messages that the test itself has caused; there must be some."""
        kept = [one for one in self.complaints if text not in one]
        assert len(kept) < len(self.complaints), self.complaints
        self.complaints[:] = kept


def faults(page: Page) -> list[str]:
    """Return the faults of a page: those of axe-core, and of the checks above."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    found: list[str] = page.evaluate(AXE) + page.evaluate(FAULTS)
    return found


Opener: TypeAlias = Callable[..., Window]
