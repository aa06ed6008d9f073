"""The dashboard in a real browser: what people do with it, by pointer and by keyboard, in every light and size."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from service_server import ServiceThread
from windows import Opener

import odograph as odo
from odograph.ledger.ledger import Ledger

pytest_plugins = ("browsing",)


def stock(ledger: Ledger) -> None:
    """Accounts of every kind that a page shows: near the limit, below another, linked, closed, pending."""
    ledger.open_account("census", odo.Policy(1, "1e-6"))
    ledger.open_account("survey", odo.Policy(2, "1e-6", rule="zcdp"), dataset="survey-2030")
    ledger.open_account("survey-north", odo.Policy(1, "1e-7", rule="zcdp"), parent="survey")
    patients = odo.Policy(1, 0, rule="basic", unit="patient", neighbours="replace-one")
    ledger.open_account("clinic", patients)
    ledger.open_account("clinic-2", patients, successor_of="clinic")
    ledger.open_account("old", odo.Policy(1, 0, rule="basic")).close(note="the study ended")
    census = ledger.account("census")
    for i in range(12):
        census.spend(odo.PureDP(f"0.0{i % 4 + 1}"), key=f"week-{i}", note=f"weekly count {i}")
    census.reserve(odo.PureDP("0.02"), expires=3600).void("the job was cancelled")
    census.reserve(odo.PureDP("0.03"), expires=3600, note="a long run")
    with pytest.raises(odo.BudgetExceeded):
        census.spend(odo.PureDP(3), key="too-much")
    ledger.account("survey-north").spend(odo.gaussian(sigma=9))
    ledger.account("clinic").spend(odo.PureDP("0.95"), note="the great table")


PAGES = {
    "overview": "/",
    "account": "/accounts/census?kind=pure&size=0.3&times=4",
    "compare": "/accounts/census?compare=1&by=time",
    "linked": "/accounts/clinic",
    "above": "/accounts/survey",
    "audit": "/audit",
    "open": "/open",
    "missing": "/accounts/nowhere",
    "docs": "/docs",
}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["wide", "phone"])
def test_every_page_is_sound_in_light_and_dark_and_wide_and_narrow(
    service: ServiceThread, remote: Ledger, opened: Opener, size: str, theme: str
) -> None:
    stock(remote)
    window = opened(size, color_scheme=theme)
    window.go("/")
    assert window.look(f"sign-in-{theme}-{size}") == []
    window.sign_in(service.token())
    for name, path in PAGES.items():
        window.go(path)
        if path.startswith("/accounts/") and name != "missing":
            expect(window.page.locator("#chart canvas").first).to_be_visible()
        assert window.look(f"{name}-{theme}-{size}") == [], name
    window.forgive("404")
