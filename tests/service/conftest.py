"""Fixtures: an owner's HTTP client, the ledger over HTTP, and a browser that can reach nothing but this machine.

A page that requests anything elsewhere, or writes to its console, fails the test that opened it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attacks
import httpx
import pytest
from browser_window import Opener, Window, launch_chromium
from playwright.sync_api import Browser
from service_server import ServiceThread

import odograph as odo
from odograph.ledger.ledger import Ledger

SIZES = {"wide": {"width": 1280, "height": 900}, "phone": {"width": 360, "height": 780}}


@pytest.fixture
def owner(service: ServiceThread) -> Iterator[httpx.Client]:
    """An HTTP client with the owner's key; there is an account `census`."""
    with attacks.owner_of(service) as client:
        attacks.open_account(client, "census")
        yield client


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Chromium, for the tests of one module: Playwright's event loop must not run in those of others."""
    with launch_chromium() as browser:
        yield browser


@pytest.fixture
def opened(chromium: Browser, service: ServiceThread) -> Iterator[Opener]:
    """Return a function that opens windows; at the end none has requested anything elsewhere or logged a problem."""
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
    """The ledger over HTTP."""
    with odo.connect(service.url, token=service.token("bot")) as connected:
        yield connected
