"""A new kind of guarantee is one registered class: library, ledger, command line, service and client all take it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import odograph as odo
from odograph.core.guarantees import (
    REGISTRY,
    SIZED,
    ZCDP,
    ApproxDP,
    Guarantee,
    Parallel,
    PureDP,
    register,
    unregister,
)
from odograph.errors import InvalidGuarantee

SUPPORT = Path(__file__).parents[1] / "support"
POLICY = odo.Policy(1, 1e-6, filter="zcdp")

# Registered first, as a kind of the library would be; then everything is imported and run.
EVERYWHERE = """
import json, sys
from bounded_range import BoundedRange
import odograph as odo
from typer.testing import CliRunner
from odograph.cli.app import app
from service_server import ServiceThread

url = "sqlite:///" + sys.argv[1]
found = {}
with odo.connect(url) as ledger:
    account = ledger.open_account("census", odo.Policy(1, 1e-6, filter="zcdp"))
    account.spend(BoundedRange("0.1"), key="library")
    found["largest"] = account.largest(BoundedRange).to_dict()
for arguments in (["census", "--bounded-range", "0.1"], ["--cost", "census=bounded_range:0.1"]):
    done = CliRunner().invoke(app, ["spend", *arguments, "--url", url, "--json"])
    assert done.exit_code == 0, done.output
    found["printed"] = json.loads(done.stdout)["accounts"][0]["cost"]
with ServiceThread(url) as service, odo.connect(service.url, token=service.token()) as remote:
    account = remote.account("census")
    receipt = account.spend(BoundedRange("0.1"), key="http")
    found["receipt"] = receipt.lines[0].cost.to_dict()
    found["offered"] = account.largest(BoundedRange).to_dict()
    found["quoted"] = account.quote([odo.parallel([BoundedRange("0.1"), BoundedRange("0.1")])]).admitted
    try:
        account.spend(BoundedRange(50))
    except odo.BudgetExceeded as refusal:
        found["counter_offer"] = refusal.decision.largest.to_dict()
with odo.connect(url) as ledger:
    account = ledger.account("census")
    found["stored"] = [past.entry.guarantee.to_dict() for past in account.history() if past.entry.cost]
    found["steps"] = account.totals.steps
    ledger.verify()
from odograph.service.openapi import describe
from odograph.service.routes import ROUTES
found["schema"] = describe(ROUTES)["components"]["schemas"]["BoundedRange"]
found["help"] = CliRunner().invoke(app, ["spend", "--help"], env={"COLUMNS": "200"}).stdout
print(json.dumps(found))
"""


def test_a_kind_that_is_only_registered_is_spent_everywhere(tmp_path: Path) -> None:
    folders = [str(SUPPORT), str(SUPPORT.parent / "support")]
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{EVERYWHERE}", f"{tmp_path}/ledger.db"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cost = {"form": 1, "kind": "bounded_range", "eta": "0.1"}
    assert found["printed"] == found["receipt"] == cost
    assert found["stored"] == [*[cost] * 4, cost | {"eta": "50.0"}]  # the last is the refusal
    assert found["steps"] == 4
    assert found["quoted"]
    assert found["schema"]["required"] == ["kind", "eta"]
    assert "--bounded-range" in found["help"]
    for offer in ("largest", "offered", "counter_offer"):
        assert 0 < float(found[offer]["eta"]) < 50


@pytest.fixture
def bounded_range(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Guarantee]]:
    monkeypatch.syspath_prepend(str(SUPPORT))
    from bounded_range import BoundedRange  # noqa: PLC0415  registered by the import

    register(BoundedRange)  # again, if another test has removed it
    yield BoundedRange
    unregister("bounded_range")


def test_each_meter_charges_the_cheapest_of_what_is_implied(bounded_range: type[Guarantee]) -> None:
    compiled = odo.compile_policy(POLICY)
    found = compiled.price(bounded_range("0.4")).amounts  # type: ignore[call-arg]
    pure, zcdp = (compiled.price(one).amounts for one in (PureDP("0.4"), ZCDP("0.02")))
    assert found == tuple(
        min((one for one in both if one is not None), default=None) for both in zip(pure, zcdp, strict=True)
    )
    assert found not in (pure, zcdp)  # each is the cheaper one somewhere


def test_only_what_could_be_read_back_is_priced(bounded_range: type[Guarantee]) -> None:
    cost = bounded_range("0.1")  # type: ignore[call-arg]
    odo.Accountant(POLICY).spend(cost)
    unregister("bounded_range")
    try:
        assert "bounded_range" not in REGISTRY | SIZED
        with pytest.raises(InvalidGuarantee, match="must be of a registered kind"):
            odo.Accountant(POLICY).spend(cost)
    finally:
        register(bounded_range)


@pytest.mark.parametrize("other", [ApproxDP("0.1", "1e-9"), Parallel((ApproxDP("0.1", "1e-9"),))])
def test_several_implied_guarantees_with_a_delta_are_refused(
    bounded_range: type[Guarantee], monkeypatch: pytest.MonkeyPatch, other: Guarantee
) -> None:
    # Else the smaller epsilon would be charged with the delta of the larger one, which is 0.
    monkeypatch.setattr(bounded_range, "implies", lambda _: (PureDP(5), other))
    with pytest.raises(InvalidGuarantee, match="without delta"):
        odo.Accountant(POLICY).spend(bounded_range("0.1"))  # type: ignore[call-arg]


def test_the_delta_of_what_is_implied_is_charged(
    bounded_range: type[Guarantee], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guarantee itself has none: its own price, which no filter has a theorem for, must not count."""
    implied = ApproxDP("0.1", "1e-9")
    monkeypatch.setattr(bounded_range, "implies", lambda _: (implied,))
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="smooth", delta_steps="1e-7"), fineness=1)
    cost = bounded_range("0.1")  # type: ignore[call-arg]
    assert compiled.price(cost) == compiled.price(implied)
    assert compiled.price(cost).amounts[0] == 10**9
    # Negative control: the delta meter itself reads none.
    assert compiled.meters[0].price(cost) == 0


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(InvalidGuarantee, match="'pure'"):
        register(type("Other", (Guarantee,), {"kind": "pure"}))
    with pytest.raises(InvalidGuarantee, match="identifier"):
        register(type("Other", (Guarantee,), {"kind": "a kind"}))
