"""Slips of newcomers: each is met with a sentence (the field, the value, the next step), and changes nothing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

import odograph as odo
from odograph.cli.app import app
from odograph.errors import IdempotencyConflict, LargeDeltaWarning, OdographError

if TYPE_CHECKING:
    from service_server import ServiceThread

BASIC = odo.Policy(1, 0, filter="basic")

# What is written, and what the sentence must have. `a` is an Accountant, `s` a session on it, and `c` the account
# 'census' of a ledger `l`. Key 'used' was used for 0.1, and key 'voided' for a reservation that was voided.
SLIPS: list[tuple[str, tuple[str, ...]]] = [
    # What an account is made of.
    ("odo.Accountant(1.0, 1e-6)", ("3 were given", "takes a policy", "Accountant(Policy(epsilon=1, delta=1e-6)")),
    ("odo.Accountant(epsilon=1)", ("'epsilon'", "Accountant(Policy(epsilon=1, delta=1e-6)")),
    ("odo.Accountant(1.0)", ("policy", "Policy(1, 1e-6)", "got 1.0")),
    ("odo.Accountant(odo.Policy)", ("policy", "Policy(1, 1e-6)", "class")),
    ("odo.compile_policy(1)", ("policy must be", "Policy(1, 1e-6)", "got 1")),
    ("odo.Policy(epsilon='1')", ("Policy.delta must be given", "1e-6")),
    ("odo.Policy('one', 1e-6)", ("Policy.epsilon", "'0.1'", "'one'")),
    ("odo.Policy(-1, 1e-6)", ("Policy.epsilon must not be negative", "-1")),
    ("odo.Policy(float('nan'), 1e-6)", ("Policy.epsilon", "nan", "such as 0.1")),
    ("odo.Policy(1, '1%')", ("Policy.delta", "'1%'", "such as 0.1")),
    ("odo.Policy(1e-6, 1)", ("Policy.delta must be below 1", "got 1.0", "Policy(epsilon, delta)")),
    ("odo.Policy(eps=1, delta=1e-6)", ("'eps'", "did you mean 'epsilon'?")),
    ("odo.Policy(1, 1e-6, reserv='pure')", ("'reserv'", "did you mean 'reserve'?")),
    ("odo.Policy(1, 1e-6, 'zcdp')", ("4 were given", "filter='zcdp'")),
    ("odo.Policy(1, 1e-6, filter='exakt')", ("filter must be one of", "exact", "'exakt'")),
    ("odo.Policy(1, 1e-6, filter=odo.filters.Exact)", ("filter must be", "exact", "class")),
    ("odo.Policy(1, 1e-6, odometer='mixtur')", ("odometer", "mixture", "'mixtur'")),
    ("odo.Policy(1, 1e-6, neighbors='replace_one')", ("neighbors", "'replace-one'", "'replace_one'")),
    ("odo.Policy(1, 1e-6, reserve='pur')", ("reserve", "pure", "'pur'")),
    ("odo.dpsgd_policy(3, 1e-6, sample_rates=0.01, noise_multipliers=[1])", ("sample_rates", "[0.01]", "got 0.01")),
    # What a cost is.
    ("a.spend(0.1)", ("cost", "PureDP(0.1)", "got 0.1")),
    ("a.spend('0.1')", ("cost", "PureDP(0.1)", "'0.1'")),
    ("a.spend(epsilon=0.1)", ("'epsilon'", "spend(PureDP(epsilon=0.1)")),
    ("c.spend(epsilon=0.1)", ("'epsilon'", "spend(PureDP(epsilon=0.1)")),
    ("a.spend({'epsilon': 0.1})", ("cost", "PureDP(0.1)", "{'epsilon': 0.1}")),
    ("a.spend(odo.PureDP)", ("cost", "PureDP(0.1)", "class")),
    ("a.spend(odo.PureDP(0.1), 'q-1')", ("3 were given", "key='q-1'")),
    ("a.spend(odo.PureDP(0.1), keys='q-1')", ("'keys'", "key='q-1'")),
    ("a.spend(odo.PureDP(0.1), key=17)", ("key", "string", "int")),
    ("odo.PureDP(epsilon='a')", ("PureDP.epsilon", "'0.1'", "'a'")),
    ("odo.PureDP('10%')", ("PureDP.epsilon", "'0.1'", "'10%'")),
    ("odo.PureDP(True)", ("PureDP.epsilon", "such as 0.1", "True")),
    ("odo.PureDP(np.array([0.1]))", ("PureDP.epsilon", "such as 0.1", "array")),
    ("odo.PureDP(0.1, 1e-6)", ("3 were given", "PureDP(epsilon)")),
    ("odo.PureDP(eps=0.1)", ("'eps'", "PureDP(epsilon)")),
    ("odo.ApproxDP(1e-6, 1)", ("ApproxDP.delta must be below 1", "got 1.0", "ApproxDP(epsilon, delta)")),
    ("odo.guarantees.guarantee_from_dict({'form': 1, 'kind': 'pur'})", ("kind", "'pur'", "did you mean 'pure'?")),
    ("a.largest('pure')", ("kind", "PureDP", "'pure'")),
    ("a.calibrate('laplace')", ("mechanism", "laplace", "odograph.mechanisms")),
    ("a.quote(odo.PureDP(0.1))", ("costs", "[PureDP(0.1)]", "use decide")),
    ("a.reserve(odo.PureDP(0.1), expires='1h')", ("expires", "seconds", "'1h'")),
    # Where a ledger is, and what is in it.
    ("odo.connect('privacy.db')", ("url", "'privacy.db'", "did you mean 'sqlite:///privacy.db'?")),
    ("odo.connect('/data/privacy.db')", ("url", "did you mean 'sqlite:////data/privacy.db'?")),
    ("odo.connect('sqlite://privacy.db')", ("url", "did you mean 'sqlite:///privacy.db'?")),
    ("odo.connect('localhost:8300')", ("url", "did you mean 'http://localhost:8300'?")),
    ("odo.connect('http://localhost:8300')", ("token", "connect(url, token=...)", "odograph keys make")),
    ("odo.connect('sqlite:///x.db', user='ana')", ("'user'", "principal='ana'")),
    ("odo.connect('postgresql://ana@127.0.0.1:1/d', timeout=0.1).accounts()", ("cannot be reached", "try again")),
    ("odo.aconnect('sqlite:///x.db')", ("url", "'sqlite:///x.db'", "asyncio.to_thread")),
    ("l.account('censu')", ("'censu'", "did you mean 'census'?")),
    ("l.open_account('tax', BASIC, parent='Census')", ("'Census'",)),
    ("l.open_account('tax', 1.0)", ("policy", "Policy(1, 1e-6)", "got 1.0")),
    ("l.open_account('census', BASIC)", ("'census'", "ledger.account('census')", "successor_of")),
    ("l.spend(c, odo.PureDP(0.1))", ("3 were given", "spend({'census': PureDP(0.1)}")),
    ("l.reservation('census-1')", ("'census-1'", "census#17")),
    ("c.spend(odo.PureDP(0.2), key='used')", ("'used'", "census#1", "All accounts of a principal", "another key")),
    ("c.reserve(odo.PureDP(0.1), key='voided')", ("'voided'", "census#2", "a run needs another key")),
    # Sessions.
    ("odo.session(BASIC)", ("a session needs an account", "Accountant(policy)", "a Policy")),
    ("odo.session(odo.Accountant)", ("a session needs an account", "Accountant(policy)", "the class Accountant")),
    ("s.run(lambda: 1)", ("cost", "cost=PureDP(0.1)", "<lambda>")),
    ("s.run(lambda: 1, cost=0.1)", ("cost", "PureDP(0.1)", "float")),
    ("s.run(lambda x: x, cost=odo.PureDP(0.1))", ("'x'", "nothing was charged")),
]
COMMANDS: list[tuple[str, tuple[str, ...]]] = [
    ("shwo", ("'shwo'", "Did you mean 'show'?")),
    ("show censu", ("'censu'", "did you mean 'census'?")),
    ("spend census 0.1", ("exactly one cost", "--pure 0.1", "Nothing was charged")),
    ("spend census --pure abc", ("PureDP.epsilon", "'abc'", "Nothing was charged")),
    ("spend census --pure 10%", ("PureDP.epsilon", "'10%'", "Nothing was charged")),
    ("spend census --pur 0.1", ("--pur", "--pure")),
    ("open tax --epsilon 1", ("Policy.delta must be given", "1e-6")),
    ("open tax --epsilon 1 --delta 1e-6 --filter exakt", ("filter", "exact", "'exakt'")),
]
REQUESTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"costs": {"kind": "pure", "epsilon": 0.1}}, ("costs",)),
    ({"cost": 0.1}, ("cost",)),
    ({"cost": {"kind": "pur", "epsilon": 0.1}}, ("pur",)),
    ({"cost": {"kind": "pure", "eps": 0.1}}, ("eps",)),
    ({"cost": {"kind": "pure", "epsilon": "a tenth"}}, ("epsilon", "a tenth")),
    ({"cost": {"kind": "pure", "epsilon": -0.1}}, ("epsilon", "-0.1")),
    ({"cost": {"kind": "pure", "epsilon": True}}, ("epsilon",)),
]


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """What the slips of the library are made with."""
    a = odo.Accountant(BASIC)
    with odo.connect("memory://", principal="ana") as ledger, odo.session(a) as s:
        c = ledger.open_account("census", BASIC)
        c.spend(odo.PureDP(0.1), key="used")
        c.reserve(odo.PureDP(0.1), key="voided").void("not run")
        yield {"odo": odo, "np": np, "BASIC": BASIC, "a": a, "s": s, "l": ledger, "c": c}


def missing(sentence: str, parts: tuple[str, ...]) -> list[str]:
    """The parts that a sentence lacks; what Python says alone has none of ours."""
    return [part for part in parts if part not in sentence]


def met_with(code: str, names: dict[str, Any]) -> str:
    """The message of the error that a slip is met with: one of ours, or a TypeError."""
    with pytest.raises((OdographError, TypeError)) as caught:
        eval(code, names)  # noqa: S307  the table's code
    return str(caught.value)


def test_there_are_sixty_slips_and_more() -> None:
    assert len(SLIPS) + len(COMMANDS) + len(REQUESTS) >= 60
    assert len(COMMANDS) + len(REQUESTS) >= 12


@pytest.mark.parametrize(("code", "parts"), SLIPS, ids=[code for code, _ in SLIPS])
def test_a_slip_is_met_with_a_sentence_and_changes_nothing(
    code: str, parts: tuple[str, ...], names: dict[str, Any]
) -> None:
    accounts = (names["a"], names["c"])
    before = [(account.totals, account.history()) for account in accounts]
    assert missing(met_with(code, names), parts) == []
    assert [(account.totals, account.history()) for account in accounts] == before
    assert [account.name for account in names["l"].accounts()] == ["census"]


def test_a_message_of_python_alone_is_not_enough(names: dict[str, Any]) -> None:
    """Negative control: without the sentence the slip is found wanting, and an error from inside is left alone."""
    (parts,) = (parts for code, parts in SLIPS if code == "a.spend(epsilon=0.1)")
    plain = names | {"spend": odo.Accountant.spend.__wrapped__}  # type: ignore[attr-defined]
    assert missing(met_with("spend(a, epsilon=0.1)", plain), parts) == ["spend(PureDP(epsilon=0.1)"]

    @odo.errors.with_usage("call it without")
    def fails_inside() -> None:
        raise TypeError("from inside")

    with pytest.raises(TypeError, match=r"^from inside$"):
        fails_inside()


@pytest.mark.parametrize(("command", "parts"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_slip_on_the_command_line(
    command: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/privacy.db"
    monkeypatch.setenv("ODOGRAPH_URL", url)
    with odo.connect(url) as ledger:
        census = ledger.open_account("census", BASIC)
        done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300"})
        assert done.exit_code in {2, 5}
        assert missing(done.stderr, parts) == []
        assert (census.size, len(ledger.accounts())) == (1, 1)


def test_slips_over_http(service: ServiceThread) -> None:
    headers = {"Authorization": f"Bearer {service.token('ana')}", "Idempotency-Key": "q"}
    with odo.connect(service.url, token=service.token("ana")) as ledger:
        census = ledger.open_account("census", BASIC)
        for form, parts in REQUESTS:
            response = httpx.post(f"{service.url}/v1/accounts/census/spends", json=form, headers=headers)
            assert response.status_code in {400, 422}, form
            problem = response.json()
            assert missing(problem["detail"], parts) == [], (form, problem["detail"])
            assert (problem["charged"], problem["code"] in dir(odo.errors)) == (False, True)
        assert census.size == 1
        with pytest.raises(OdographError, match=r"did you mean 'census'\?"):
            ledger.account("cenus")


def test_a_name_that_a_key_may_not_see_is_not_suggested(service: ServiceThread) -> None:
    with odo.connect(service.url, token=service.token("owner")) as ledger:
        for name in ("census-2030", "census-2031"):
            ledger.open_account(name, BASIC)
    bound = service.token("ben", "analyst", "census-2031")
    with odo.connect(service.url, token=bound) as ledger:
        with pytest.raises(OdographError) as caught:
            ledger.account("census-2030")
        assert str(caught.value).endswith("; did you mean 'census-2031'?")
        response = httpx.get(
            f"{service.url}/v1/accounts/census-203/terms", headers={"Authorization": f"Bearer {bound}"}
        )
        assert "census-203" not in response.json()["detail"]


@pytest.mark.parametrize(
    ("number", "exact"),
    [
        (1, 1),
        (" 0.5 ", Fraction(1, 2)),
        ("1/3", Fraction(1, 3)),
        (Fraction(1, 3), Fraction(1, 3)),
        (Decimal("0.1"), Fraction(1, 10)),
        (np.float64(0.1), Fraction(1, 10)),
        (np.float32(0.5), Fraction(1, 2)),
        (np.int64(1), 1),
    ],
)
def test_numbers_of_many_kinds_are_taken_exactly(number: Any, exact: Fraction) -> None:  # noqa: ANN401  of any kind
    assert odo.guarantees.exact_of(odo.PureDP(number).epsilon) == exact


def test_a_large_delta_is_a_warning_that_can_be_silenced() -> None:
    with pytest.warns(LargeDeltaWarning, match=r"^delta is 0\.5: .* such as 1e-6$") as caught:
        odo.Accountant(odo.Policy(1, 0.5, filter="zcdp"))
    (warning,) = caught
    assert warning.filename == __file__  # it names the line of the caller
    with odo.connect("memory://", principal="ana") as ledger:
        with pytest.warns(LargeDeltaWarning) as caught:
            ledger.open_account("census", odo.Policy(1, 0.5, filter="zcdp"))
        assert [one.filename for one in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odo.Accountant(odo.Policy(1, 1e-3, filter="zcdp"))  # negative control
        warnings.simplefilter("ignore", LargeDeltaWarning)
        odo.Accountant(odo.Policy(1, 0.5, filter="zcdp"))


def test_a_large_delta_is_warned_of_once_for_each_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            odo.Accountant(odo.Policy(1, 0.5, filter="zcdp"))
    assert len(caught) == 1


def test_a_key_that_was_used_for_another_account_names_that_account() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        census, tax = (ledger.open_account(name, BASIC) for name in ("census", "tax"))
        census.spend(odo.PureDP(0.1), key="job-7")
        with pytest.raises(
            IdempotencyConflict, match=r"spend, census#1\)\. All accounts of a principal share its keys"
        ):
            tax.spend(odo.PureDP(0.1), key="job-7")
        assert json.loads(json.dumps(tax.describe()))["account"]["steps"] == 0
