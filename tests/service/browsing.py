"""A real browser for the tests of pages: Chromium, driven by Playwright, that can reach nothing but this machine.

Whatever a page asks for elsewhere, and whatever it complains about in its console, fails the test that looked at it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from service_server import ServiceThread
from windows import PATIENCE, Opener, Window

import odograph as odo
from odograph.ledger.ledger import Ledger

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
SIZES = {"wide": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}


def chromium_path() -> str | None:
    """Where Chromium is, if there is one."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Chromium, for the tests of one module: Playwright's loop must not be there for other modules' tests."""
    path = chromium_path()
    if path is None:
        pytest.skip("there is no Chromium: install Debian's chromium, or set CHROMIUM to where it is")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Browser, service: ServiceThread) -> Iterator[Opener]:
    """Windows as a test asks for them; at its end none of them has asked elsewhere or complained."""
    windows: list[Window] = []

    def open_window(size: str = "wide", **options: Any) -> Window:
        options.setdefault("reduced_motion", "reduce")  # pictures without half of an animation
        windows.append(Window(chromium.new_context(viewport=SIZES[size], **options), service.url))  # type: ignore[arg-type]
        return windows[-1]

    yield open_window
    for window in windows:
        window.context.close()
    assert [one for window in windows for one in window.strangers] == []
    assert [one for window in windows for one in window.complaints] == []


@pytest.fixture
def remote(service: ServiceThread) -> Iterator[Ledger]:
    """The ledger over HTTP, as programs elsewhere use it."""
    with odo.connect(service.url, token=service.token("bot")) as connected:
        yield connected
