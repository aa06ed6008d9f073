"""Limits that come from outside: refused where they are refuted, and marked where nothing here certifies them."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import odograph as odo
from odograph import compile as compilation
from odograph.accountant import document_digest
from odograph.cli.app import app
from odograph.compile import Certification, TableRow, certification, exact_tables
from odograph.core.filters import ExactMeter
from odograph.core.mechanisms import LossDistribution, MenuItem
from odograph.core.policy import Compiled
from odograph.core.theory import kov_delta
from odograph.errors import InvalidPolicy, LedgerCorrupt
from odograph.ledger.commands import _read_compiled

# What a document may claim without being refuted, and what no budget over a menu ever was.
CLAIMED, ABSURD = 30_000, 2_000_000


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begin on a machine that has solved nothing; return how to move to another one."""
    machines = iter(range(100))

    def move() -> None:
        monkeypatch.setenv("ODOGRAPH_CACHE", str(tmp_path / f"machine-{next(machines)}"))
        monkeypatch.setattr(compilation, "_solved_here", {})

    move()
    return move


def response(epsilon: float = 1.0, name: str = "response") -> MenuItem:
    """Randomized response: an epsilon-DP step."""
    up = 1 / (1 + math.exp(-epsilon))
    losses = LossDistribution(-1, np.array([1 - up, 0.0, up]), 0.0)
    return MenuItem(name, 1, epsilon, (losses, losses))


def menu_only(item: MenuItem | None = None) -> odo.Policy:
    return odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=(), menu=[item or response()]))


def claiming(compiled: Compiled, limit: int, **changed: Any) -> Compiled:
    """Return the same document with another limit, and a note that says it is fine."""
    meters = [
        replace(meter, limit=limit, **changed) if isinstance(meter, ExactMeter) else meter
        for meter in compiled.meters
    ]
    return Compiled(compiled.policy, tuple(meters), "budget from the shipped table")


def of_document(compiled: Compiled) -> Compiled:
    return Compiled.from_dict(json.loads(json.dumps(compiled.to_dict())))


def test_what_is_compiled_here_is_certified_here_and_found_again() -> None:
    compiled = odo.compile_policy(menu_only())
    assert certification(compiled) is Certification.SOLVED
    assert certification(of_document(compiled)) is Certification.SOLVED
    account = odo.Accountant(compiled)
    assert "not certified" not in repr(account)
    assert odo.Accountant.from_dict(account.to_dict()).certification is Certification.SOLVED


@pytest.mark.parametrize(
    ("policy", "fineness"),
    [
        (odo.Policy(1000, 1e-6, reserve="pure"), None),  # its usual fineness is beyond those that may be asked for
        (odo.Policy(10, 3e-12, reserve="pure"), 1),  # its tolerance is less than a unit
        (odo.Policy(10, 1e-12, filter=odo.filters.Smooth(takes=("gaussian",), reserve="pure")), 1),
    ],
    ids=["large epsilon", "small delta", "gaussians"],
)
def test_an_extreme_target_is_read_back_and_certified_where_it_was_solved(
    policy: odo.Policy, fineness: int | None
) -> None:
    compiled = odo.compile_policy(policy, fineness=fineness)
    assert Compiled.from_dict(compiled.to_dict()) == compiled
    assert certification(compiled) is Certification.SOLVED


def test_a_budget_is_remembered_where_the_cache_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODOGRAPH_CACHE", "/dev/null/nowhere")
    assert certification(odo.compile_policy(menu_only())) is Certification.SOLVED


def test_a_document_from_another_machine_is_marked_until_it_is_compiled_here(elsewhere: Callable[[], None]) -> None:
    compiled = odo.compile_policy(menu_only())
    elsewhere()
    assert certification(compiled) is Certification.NONE
    assert "not certified here" in certification(compiled).warning
    odo.compile_policy(menu_only())
    assert certification(of_document(compiled)) is Certification.SOLVED
    assert certification(compiled).warning == ""


def test_closed_forms_and_the_table_need_nothing_solved() -> None:
    for rule in ("basic", "zcdp", "gdp", "paper", "renyi"):
        assert certification(odo.compile_policy(odo.Policy(1, 1e-6, filter=rule))) is Certification.CLOSED_FORM
    for policy in (
        odo.Policy(1, 1e-6),
        odo.Policy("1.05", "1.5e-6"),
        odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=("pure",))),
    ):
        assert certification(odo.compile_policy(policy, solve=False)) is Certification.TABLE


def test_neither_a_larger_limit_nor_finer_units_nor_a_looser_target_is_covered_by_the_table() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="exact"))
    exact = compiled.meter(ExactMeter)
    assert exact.limit is not None
    assert certification(of_document(claiming(compiled, exact.limit - 5))) is Certification.TABLE
    assert certification(of_document(claiming(compiled, exact.limit + 1))) is Certification.NONE
    finer = claiming(compiled, 2 * exact.limit, quantum=exact.quantum / 2)
    assert certification(of_document(finer)) is Certification.NONE
    stricter = replace(compiled, policy=odo.Policy("0.99", 1e-6, filter="exact", odometer=compiled.policy.odometer))
    assert certification(stricter) is Certification.NONE


def test_a_menu_s_limit_counts_for_the_mechanisms_that_were_analysed_and_no_others() -> None:
    compiled = odo.compile_policy(menu_only(response(0.1)))
    other = odo.compile_policy(menu_only(response(0.5)))
    assert compiled.meter(ExactMeter).charges == other.meter(ExactMeter).charges
    swapped = Compiled(other.policy, compiled.meters, compiled.note)  # the smaller step's limit for the larger step
    assert certification(of_document(swapped)) is Certification.NONE


def test_a_damaged_cache_certifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = odo.compile_policy(menu_only())
    monkeypatch.setattr(compilation, "_solved_here", {})
    (cached,) = compilation.cache_folder().iterdir()
    cached.write_text(json.dumps(json.loads(cached.read_text()) | {"units": CLAIMED}))
    assert certification(claiming(compiled, CLAIMED)) is Certification.NONE


# Every way in.


def check_ways_in(compiled: Compiled, ledger: odo.Ledger) -> None:
    """Assert that a claim is marked in an accountant, its document, an account, a receipt and a verification."""
    account = odo.Accountant(compiled)
    form = account.to_dict()
    copied = {name: value for name, value in form.items() if name != "digest"}
    for one in (account, odo.Accountant.from_dict(copied | {"digest": document_digest(copied)})):
        assert one.certification is Certification.NONE
        assert "limits not certified here" in repr(one)
    opened = ledger.open_account("claim", compiled)
    ledger.open_account("sound", odo.Policy(1, 1e-6))
    assert opened.certification is Certification.NONE
    receipt = ledger.spend({"claim": odo.guarantees.Mechanism("response"), "sound": odo.PureDP("0.1")})
    assert receipt.uncertified == ("claim",)
    assert receipt.to_dict()["uncertified"] == ["claim"]
    assert str(receipt).endswith("; limits not certified here: claim")
    assert ledger.account("sound").spend(odo.PureDP("0.1")).uncertified == ()
    found = ledger.verify()
    assert found.uncertified == ("claim",)
    assert "limits not certified here: claim" in str(found)
    text = io.StringIO()
    ledger.export(text)
    text.seek(0)
    with odo.connect("memory://") as other:
        assert other.import_(text, checkpoint=ledger.checkpoint()).uncertified == ("claim",)


def test_a_claim_that_nothing_here_certifies_is_marked_everywhere(elsewhere: Callable[[], None]) -> None:
    compiled = claiming(odo.compile_policy(menu_only()), CLAIMED)
    elsewhere()
    with odo.connect("memory://") as ledger:
        check_ways_in(of_document(compiled), ledger)


def test_a_check_that_believes_the_document_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = claiming(odo.compile_policy(menu_only()), CLAIMED)
    monkeypatch.setattr(compilation, "_covers", lambda *_: True)
    with odo.connect("memory://") as ledger, pytest.raises(AssertionError):
        check_ways_in(of_document(compiled), ledger)


def test_a_claim_that_is_refuted_is_refused_everywhere() -> None:
    """The document that 0.1.0 took: a promise of (1, 1e-6), and room for 2,000,000 runs of a 1-DP step."""
    honest = odo.Accountant(odo.compile_policy(menu_only()))
    absurd = claiming(honest.compiled, ABSURD)
    with pytest.raises(InvalidPolicy, match="certified for this policy"):
        odo.Accountant(absurd)
    form = honest.to_dict() | {"compiled": absurd.to_dict()}
    del form["digest"]
    with pytest.raises(LedgerCorrupt, match="certified for this policy"):
        odo.Accountant.from_dict(form | {"digest": document_digest(form)})
    with (
        odo.connect("memory://") as ledger,
        pytest.raises(InvalidPolicy, match="certified for this policy"),
    ):
        ledger.open_account("claim", absurd)


def test_a_copy_with_a_refuted_claim_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    with monkeypatch.context() as careless, odo.connect("memory://") as ledger:
        careless.setattr("odograph.core.filters.exact.is_refuted", lambda *_: False)
        ledger.open_account("claim", claiming(odo.compile_policy(menu_only()), ABSURD))
        ledger.export(text)
    _read_compiled.cache_clear()  # another process has not read it
    text.seek(0)
    with (
        odo.connect("memory://") as other,
        pytest.raises(LedgerCorrupt, match="certified for this policy"),
    ):
        other.import_(text)


def test_show_and_verify_say_which_limits_are_not_certified_here(
    elsewhere: Callable[[], None], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    with odo.connect(url) as ledger:
        ledger.open_account("mine", odo.compile_policy(menu_only()))
        ledger.open_account("theirs", claiming(odo.compile_policy(menu_only()), CLAIMED))

    def said(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "--url", url], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "not certified here" not in said("show", "mine")
    assert "limits not certified here" in said("show", "theirs")
    assert json.loads(said("show", "theirs", "--json"))["certification"] == "not certified here"
    assert "limits not certified here: theirs\n" in said("verify")
    elsewhere()  # the same ledger on another machine, which solves what it can certify
    assert json.loads(said("verify", "--json"))["uncertified"] == ["mine", "theirs"]
    odo.compile_policy(menu_only())
    assert json.loads(said("verify", "--json"))["uncertified"] == ["theirs"]


# What is refused is wrong, and what is certified is not refused.


@pytest.mark.parametrize("row", exact_tables()[0].rows[1::18], ids=lambda row: f"{row.epsilon}-{float(row.delta):g}")
@pytest.mark.parametrize("takes", [("gaussian", "pure"), ("pure",), ("gaussian",)])
def test_every_certified_budget_is_read_and_one_a_tenth_larger_is_refuted(
    row: TableRow, takes: tuple[str, ...]
) -> None:
    units, delta = row.units, row.delta * (1 + Fraction(1, 1000))
    exact = odo.filters.Exact(takes=takes)
    compiled = odo.compile_policy(odo.Policy(row.epsilon, delta, filter=exact), solve=False)
    assert of_document(compiled)
    with pytest.raises(InvalidPolicy, match="certified for this policy"):
        of_document(claiming(compiled, units + units // 10))


def test_a_refuted_limit_really_admits_too_much() -> None:
    # At (1, 1e-6) in the table's units: 1.04 times the limit in steps of one unit, by optimal composition.
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=("pure",))), solve=False)
    exact = compiled.meter(ExactMeter)
    steps = (exact.limit or 0) * 104 // 100
    epsilon = math.sqrt(float(exact.quantum)) * (1 + 1e-9)
    assert 2 * epsilon * math.tanh(epsilon / 2) <= float(exact.quantum) * (1 + 1e-8)
    assert kov_delta(steps, epsilon, 0.0, 1.0) > 1e-6
    with pytest.raises(InvalidPolicy, match="certified for this policy"):
        of_document(claiming(compiled, steps))


def test_an_enormous_claim_in_tiny_units_is_answered_at_once() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter=odo.filters.Exact(takes=("pure",))), solve=False)
    claim = claiming(compiled, 2**61, quantum=Fraction(1, 2**66))
    assert certification(of_document(claim)) is Certification.NONE


def test_a_budget_of_a_stricter_target_takes_what_the_policy_takes_and_can_be_read_back() -> None:
    compiled = odo.compile_policy(odo.Policy(1.1, 1e-6, filter=odo.filters.Exact(takes=("pure",))), solve=False)
    assert Compiled.from_dict(compiled.to_dict()) == compiled
    assert pickle.loads(pickle.dumps(odo.Accountant(compiled))).compiled == compiled  # noqa: S301  our own
    with odo.connect("memory://") as ledger:
        ledger.open_account("x", compiled)
        assert [account.name for account in ledger.accounts()] == ["x"]
        ledger.verify()


def test_a_compiled_policy_that_could_not_be_read_back_is_not_written() -> None:
    compiled = odo.compile_policy(odo.Policy(1, 1e-6, filter="basic"))
    more = tuple(
        meter if meter.limit is None else replace(meter, limit=100 * meter.limit) for meter in compiled.meters
    )
    with odo.connect("memory://") as ledger:
        with pytest.raises(InvalidPolicy):
            ledger.open_account("x", replace(compiled, meters=more))
        ledger.open_account("y", odo.Policy(1, 1e-6, filter="basic"))
        assert [account.name for account in ledger.accounts()] == ["y"]
        ledger.verify()
