"""Draw docs/images/dashboard.png and account.png: the dashboard of a small ledger, as Chromium shows it.

The accounts are created in a temporary file and served by `odograph serve`. Set CHROMIUM to the path of the browser
if it is not on PATH.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from unittest.mock import patch

from playwright.sync_api import Browser, FloatRect, ViewportSize, expect, sync_playwright

import odograph as odo
from odograph.service.key_store import connect_keys

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PROGRAM = Path(sys.executable).with_name("odograph")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
START_TIMEOUT = 30.0  # seconds until the service is ready
SIZE: ViewportSize = {"width": 1200, "height": 800}
MARGIN = 15  # pixels below the last element


class Calendar:
    """A clock for the ledger that is advanced by hand: entries of the same second would show no history."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 2, 9, tzinfo=UTC)
        self._chance = random.Random(1)  # noqa: S311  a seeded picture, the same each time

    def time_ns(self) -> int:
        """Return the time, as `time.time_ns` does."""
        return round(self.now.timestamp() * 1e9)

    def pass_days(self, days: float) -> None:
        """Advance by about this many days."""
        self.now += timedelta(days=days * self._chance.uniform(0.6, 1.4), seconds=self._chance.uniform(0, 900))


def fill(ledger: odo.Ledger, calendar: Calendar) -> None:
    """Open the accounts of a fictional statistics office and spend from them for some months."""
    person = odo.Policy(1, "1e-6")
    ledger.open_account("census-2020", odo.Policy(1, 0, filter="basic", privacy_unit="household"))
    for table in ("persons", "households", "blocks"):
        ledger.account("census-2020").spend(odo.PureDP("0.25"), key=table, note=f"the published table of {table}")
    ledger.account("census-2020").close(note="superseded")
    calendar.pass_days(6)
    ledger.open_account("census-2030", person, note="test counts before the census")
    ledger.open_account("ads-2025", odo.Policy(2, "1e-6", filter="zcdp", privacy_unit="user"))
    ledger.open_account("telemetry", odo.Policy(3, "1e-6", privacy_unit="device"))
    ledger.open_account("telemetry-crashes", odo.Policy(2, "1e-7", privacy_unit="device"), parent="telemetry")
    ledger.open_account("telemetry-battery", odo.Policy(1, "1e-7", privacy_unit="device"), parent="telemetry")
    ledger.open_account("payroll", odo.Policy("0.5", "1e-7"))
    for week in range(1, 19):
        for day in range(1, 7):
            key = f"count-{week}-{day}"
            ledger.account("census-2030").spend(odo.PureDP("0.01"), key=key, note="daily count of forms")
            calendar.pass_days(1)
        spend_in_week(ledger, week)
        calendar.pass_days(1)
    ledger.open_account(
        "ads-2026", odo.Policy(2, "1e-6", filter="zcdp", privacy_unit="user"), successor_of="ads-2025"
    )
    ledger.acting_as("mila").account("ads-2026").spend(odo.gaussian(sigma=13), key="reach-19", note="reach by region")
    finish(ledger, calendar)


def spend_in_week(ledger: odo.Ledger, week: int) -> None:
    """Spend what is spent in a week, as different principals."""
    jon, mila = ledger.acting_as("jon"), ledger.acting_as("mila")
    if week % 3 == 0:
        jon.account("census-2030").spend(odo.PureDP("0.02"), key=f"ages-{week}", note="ages, as the counts had moved")
    jon.account("telemetry-crashes").spend(odo.gaussian(sigma=14), key=f"crashes-{week}", note="crashes by version")
    if week % 2:
        mila.account("telemetry-battery").spend(odo.PureDP("0.02"), key=f"battery-{week}", note="hours of a charge")
    mila.account("ads-2025").spend(odo.gaussian(sigma=13), key=f"reach-{week}", note="reach by region")
    if week <= 8:
        jon.account("payroll").spend(odo.PureDP("0.06"), key=f"median-{week}", note="median pay by grade")


def finish(ledger: odo.Ledger, calendar: Calendar) -> None:
    """Add a voided reservation, a pending one, and a refusal."""
    jon = ledger.acting_as("jon").account("census-2030")
    jon.reserve(odo.PureDP("0.05"), key="map-1", note="a map", expires=3600).void("the file was late")
    calendar.pass_days(0.1)
    with suppress(odo.BudgetExceeded):
        jon.spend(odo.PureDP("1.2"), key="map-2", note="the same map, finer")
    calendar.pass_days(0.1)
    jon.reserve(odo.PureDP("0.05"), key="map-3", note="the map, as coarse as it fits", expires=7 * 86_400)


@contextmanager
def run_service(url: str) -> Iterator[str]:
    """Serve a ledger on a free port and yield the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PROGRAM), "serve", "--url", url, "--port", str(port), "--rate", "0", "--log-level", "warning"]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command) as process:  # noqa: S603  our own program
        try:
            wait_for(f"{address}/readyz", process)
            yield address
        finally:
            process.terminate()


def wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the service is ready."""
    end = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < end:
        with suppress(urllib.error.URLError), urllib.request.urlopen(address):  # noqa: S310  on this machine
            return
        time.sleep(0.1)
    raise RuntimeError(f"the service was not ready at {address} within {START_TIMEOUT:g} seconds")


def draw(browser: Browser, address: str, token: str, theme: Literal["light", "dark"], name: str) -> None:
    """Sign in and take a screenshot: of one account down to its planner, or of the overview if `name` is empty."""
    context = browser.new_context(viewport=SIZE, color_scheme=theme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(address)
    page.get_by_label("API key").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    if name:
        page.goto(f"{address}/accounts/{name}?kind=pure&size=0.05&times=6")
        expect(page.locator("#chart canvas").first).to_be_visible()
    page.wait_for_load_state("networkidle")
    last = page.locator("#planner" if name else "#accounts").bounding_box()
    if last is None:
        raise RuntimeError(f"no content found at {page.url}")
    height = last["y"] + last["height"] + MARGIN
    clip: FloatRect = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
    page.screenshot(path=IMAGES / ("account.png" if name else "dashboard.png"), full_page=True, clip=clip)
    context.close()


def main() -> None:
    """Create the ledger, serve it and draw both pictures."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium not found: install it, or set CHROMIUM to its path")
    with TemporaryDirectory() as folder:
        url, calendar = f"sqlite:///{folder}/privacy.db", Calendar()
        with patch("time.time_ns", calendar.time_ns), odo.connect(url, principal="ana") as ledger:
            fill(ledger, calendar)
        with connect_keys(url) as keys:
            token, _ = keys.make("ana", "owner", made_by="ana")
        with run_service(url) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS])
            draw(browser, address, token, "light", "")
            draw(browser, address, token, "dark", "census-2030")
            browser.close()


if __name__ == "__main__":
    main()
