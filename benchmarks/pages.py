"""How fast the dashboard opens: 2,000 accounts, an account of 10^6 entries, and one of 10^6 reservations.

    python benchmarks/pages.py [--few] [--only sqlite postgres]

The ledger is made once for each database, by the same store that a copy is read into, and served by `odograph serve`.
Chromium opens every page twice on its own: the first time after the service has started, and again. The lines say how
many bytes came over the wire, when the page was drawn, and when its last request was answered (the chart).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, sync_playwright

import odograph as odo
from odograph.connection import store_at
from odograph.core.gate import decide
from odograph.ledger.commands import Author, Open
from odograph.ledger.entries import digest_of, price_to_text, text_of
from odograph.ledger.stores.base import Balance, Changes, Head, IdempotencyRecord, State
from odograph.service.key_store import connect_keys

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("tools", "tests/support")]
from browser_window import FLAGS, Window, chromium_path  # noqa: E402  after the path to it
from postgres_server import PostgresServer  # noqa: E402

from dashboard_picture import run_service  # noqa: E402

ACCOUNTS, ENTRIES = 2_000, 1_000_000
PART = 4096  # entries stored at a time
START = 1_772_442_000_000_000  # microseconds since 1970
ROOMY = odo.compile_policy(odo.Policy(1_000, "1e-6", filter="zcdp"))
USUAL = odo.compile_policy(odo.Policy(1, "1e-6"))
COST = odo.PureDP("0.000001")
IDENTITY = "0" * 32
PENDING = 1000  # of the reservations, one in so many is still pending


class Opening(NamedTuple):
    """What it took to open a page."""

    size: int  # bytes over the wire
    drawn: float  # seconds until the page and its style sheet were there
    done: float  # seconds until the last request was answered


class Writer:
    """Makes the entries of an account as its commands would, without a transaction for each."""

    def __init__(self, name: str, compiled: odo.Compiled = ROOMY, parent: str = "", dataset: str = "") -> None:
        policy = compiled.policy
        head = Head(name, parent, "", dataset, policy.privacy_unit, policy.neighbors)
        self.changes, state = Changes(), State(START, {}, {})
        above = Head(parent, "", "", "", policy.privacy_unit, policy.neighbors)
        if parent:
            state.balances[parent] = Balance(above, 0, "", START, compiled.start, closed=False)
        Open(Author(IDENTITY, f"open-{name}"), head, compiled).apply(state, self.changes)
        self.balance = state.balances[name]
        self.changes.opened.clear()  # the balance is stored last, with the final totals
        self._meters, self._price, self._cost = compiled.meters, compiled.price(COST), text_of(COST.to_dict())

    def write(self, verb: str, key: str, owner: str = IDENTITY) -> int:
        """Append an entry and return its sequence."""
        balance = self.balance
        sequence = balance.sequence + 1
        asked = (balance.head.name, self._cost if verb in ("spend", "reserve") else "")
        request = digest_of(verb, (asked if asked[1] else (key, ""),))
        self.changes.entries.append(
            balance.append(
                time=START + sequence * 1_000_000,
                principal=IDENTITY,
                verb=verb,
                legs=f"{balance.head.name}#{sequence}",
                request=request,
                cost=self._cost,
                price=price_to_text(self._price),
                key=key,
            )
        )
        self.changes.keys[owner, key] = IdempotencyRecord(balance.head.name, sequence, verb, request)
        if verb in ("spend", "reserve"):
            balance.totals = decide(self._meters, balance.totals, self._price).totals_after
        elif verb == "void":
            balance.totals = balance.totals.without(self._price)
        return sequence

    def part(self, *, last: bool = False) -> Changes:
        """Return what was written since the last part."""
        part, self.changes = self.changes, Changes()
        if last:
            part.opened.append(self.balance)
        return part


def spends(name: str, count: int) -> Iterator[Changes]:
    """An account with so many spends."""
    writer = Writer(name)
    for i in range(count):
        writer.write("spend", f"{name}-{i}")
        if i % PART == 0:
            yield writer.part()
    yield writer.part(last=True)


def reservations(name: str, count: int) -> Iterator[Changes]:
    """An account with so many reservations: half committed, half voided, and a few pending."""
    writer = Writer(name)
    for i in range(count):
        sequence = writer.write("reserve", f"{name}-{i}")
        if i % PENDING:
            writer.write("commit" if i % 2 else "void", f"{name}#{sequence}", "")
        if i % PART == 0:
            yield writer.part()
    yield writer.part(last=True)


def many(count: int) -> Iterator[Changes]:
    """Accounts under parents, forty each, some of them used up or near their limit."""
    for i in range(count):
        parent = f"region-{i // 40 * 40:04}"
        writer = Writer(f"region-{i:04}", USUAL, "" if i % 40 == 0 else parent, f"survey-{i % 7}")
        for j in range(3):
            writer.write("spend", f"{i}-{j}")
        yield writer.part(last=True)


def stock(url: str, accounts: int, entries: int) -> float:
    """Store the ledger at a URL; return how long that took."""
    begun = time.perf_counter()
    store = store_at(url, accept_fsync_off=True)

    def parts() -> Iterator[Changes]:
        yield from many(accounts)
        yield from spends("spends", entries)
        yield from reservations("reservations", entries)

    store.load(parts(), {IDENTITY: "ana"})
    store.close()
    return time.perf_counter() - begun


def open_page(browser: Browser, address: str, cookies: list[Any], path: str) -> Opening:
    """Open a page in a new browser context, with a cold cache."""
    window = Window(browser.new_context(viewport={"width": 1280, "height": 900}), address)
    window.context.add_cookies(cookies)
    wire = window.context.new_cdp_session(window.page)
    sizes: list[float] = []
    wire.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    wire.send("Network.enable")
    begun = time.perf_counter()
    window.page.goto(address + path, wait_until="load", timeout=120_000)
    drawn: float = window.page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    if "/accounts/" in path:
        window.page.locator("#chart canvas").first.wait_for(timeout=120_000)
    done = time.perf_counter() - begun
    window.context.close()
    return Opening(round(sum(sizes)), drawn / 1000, done)


def measure(name: str, url: str, accounts: int, entries: int) -> None:
    """Print a line for every page."""
    took = stock(url, accounts, entries)
    print(f"{name}: made in {took:.0f} s", flush=True)
    with connect_keys(url, accept_fsync_off=True) as keys:
        token, _ = keys.make("ana", "owner", made_by="ana")
    with run_service(url) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=[*FLAGS])
        window = Window(browser.new_context(), address)
        window.sign_in(token, "/sign-in?then=/docs")  # so that the first page is opened with nothing read
        cookies = window.cookies
        window.context.close()
        for path in ("/", "/?view=tree", "/?q=region-19", "/accounts/spends", "/accounts/reservations"):
            for often in ("first", "again"):
                found = open_page(browser, address, cookies, path)
                print(
                    f"{name:8} {path:24} {often}: {found.size / 1000:7.0f} KB,"
                    f" drawn {found.drawn:.2f} s, done {found.done:.2f} s",
                    flush=True,
                )
        browser.close()


def main() -> None:
    """Measure on both databases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true", help="a hundredth of the entries")
    parser.add_argument("--only", nargs="+", choices=["sqlite", "postgres"], default=["sqlite", "postgres"])
    arguments = parser.parse_args()
    entries = ENTRIES // 100 if arguments.few else ENTRIES
    if "sqlite" in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            measure("SQLite", f"sqlite:///{folder}/ledger.db", ACCOUNTS, entries)
    if "postgres" in arguments.only:
        with PostgresServer() as server:
            measure("PostgreSQL", server.url, ACCOUNTS, entries)


if __name__ == "__main__":
    main()
