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
from odograph.integrations import diffprivlib

if TYPE_CHECKING:
    from service_server import ServiceThread

BASIC = odo.Policy(1, 0, filter="basic")

# What is written; and of the sentence: the field or call, the value that it got, the next step. `a` is an Accountant,
# `s` a session on it, and `c` the account 'census' of a ledger `l`. Key 'used' was used for 0.1, and key 'voided' for
# a reservation that was voided.
A_POLICY = "Policy(1, 1e-6)"
A_COST = "PureDP(0.1)"
MADE = "Accountant(Policy(epsilon=1, delta=1e-6)"
SPENT = "spend(PureDP(epsilon=0.1), key='q-1'"
URL = "did you mean 'sqlite:///privacy.db'?"
SLIPS: list[tuple[str, str, str, str]] = [
    # What the package has.
    ("odo.Acountant(BASIC)", "attribute", "'Acountant'", "did you mean 'Accountant'?"),
    ("odo.BudgetAccountant(1, 1e-6)", "attribute", "'BudgetAccountant'", "did you mean 'Accountant'?"),
    ("odo.policy(1, 1e-6)", "attribute", "'policy'", "did you mean 'Policy'?"),
    ("odo.Laplace(1)", "attribute", "'Laplace'", "did you mean 'laplace'?"),
    # What an account is made of.
    ("odo.Accountant(1.0, 1e-6)", "an accountant takes a policy", "3 were given", MADE),
    ("odo.Accountant(epsilon=1)", "an accountant takes a policy", "'epsilon'", MADE),
    ("odo.Accountant(BASIC, 'census')", "an accountant takes a policy", "3 were given", "name='census'"),
    ("odo.Accountant()", "'policy'", "missing", MADE),
    ("odo.Accountant(1.0)", "policy", "got 1.0", A_POLICY),
    ("odo.Accountant(odo.Policy)", "policy", "class", A_POLICY),
    ("odo.Accountant(BASIC, name='west', parent='census')", "parent must be", "'census'", "Accountant"),
    ("odo.Accountant(BASIC, parent='census')", "parent must be", "'census'", "Accountant"),
    ("diffprivlib.BudgetAccountant(1, 1e-6)", "BudgetAccountant takes an account", "3 were given", MADE),
    ("odo.compile_policy(1)", "policy must be", "got 1", A_POLICY),
    ("odo.Policy(epsilon='1')", "Policy.delta must be given", "None", "such as 1e-6"),
    ("odo.Policy('one', 1e-6)", "Policy.epsilon", "'one'", "such as 0.1"),
    ("odo.Policy(-1, 1e-6)", "Policy.epsilon", "-1", "must not be negative"),
    ("odo.Policy(0, 1e-6)", "Policy.epsilon", "0.0", "from 1e-9 to 1000"),
    ("odo.Policy(float('nan'), 1e-6)", "Policy.epsilon", "nan", "such as 0.1"),
    ("odo.Policy(1, '1%')", "Policy.delta", "'1%'", "such as 0.1"),
    ("odo.Policy(1e-6, 1)", "Policy.delta", "got 1.0", "Policy(epsilon, delta)"),
    ("odo.Policy(eps=1, delta=1e-6)", "Policy()", "'eps'", "did you mean 'epsilon'?"),
    ("odo.Policy(1, 1e-6, reserv='pure')", "Policy()", "'reserv'", "did you mean 'reserve'?"),
    ("odo.Policy(1, 1e-6, 'zcdp')", "Policy", "4 were given", "filter='zcdp'"),
    ("odo.Policy(1, 1e-6, filter='exakt')", "filter", "'exakt'", "must be one of"),
    ("odo.Policy(1, 1e-6, filter=odo.filters.Exact)", "filter", "class", "exact"),
    ("odo.Policy(1, 1e-6, odometer='mixtur')", "odometer", "'mixtur'", "mixture"),
    ("odo.Policy(1, 1e-6, neighbors='replace_one')", "neighbors", "'replace_one'", "'replace-one'"),
    ("odo.Policy(1, 1e-6, reserve='pur')", "reserve", "'pur'", "pure"),
    ("odo.Policy(1, 1e-6, rho=0.5)", "Policy must have one promise", "epsilon and rho", "rho="),
    ("odo.Policy(1, 1e-6, privacy_unit=3)", "privacy_unit", "got 3", "such as 'person'"),
    ("odo.dpsgd_policy(3, 1e-6, sample_rates=0.01, noise_multipliers=[1])", "sample_rates", "got 0.01", "[0.01]"),
    ("odo.dpsgd_policy(3, 1e-6)", "'sample_rates'", "missing", "sample_rates=[0.01]"),
    # What a cost is.
    ("a.spend(0.1)", "cost", "got 0.1", A_COST),
    ("a.spend('0.1')", "cost", "'0.1'", A_COST),
    ("a.spend(None)", "cost", "None", A_COST),
    ("a.spend(epsilon=0.1)", "a spend takes", "'epsilon'", SPENT),
    ("c.spend(epsilon=0.1)", "a spend takes", "'epsilon'", SPENT),
    ("a.spend({'epsilon': 0.1})", "cost", "{'epsilon': 0.1}", A_COST),
    ("a.spend([odo.PureDP(0.1)])", "cost", "[PureDP(0.1)]", "such as PureDP(0.1)"),
    ("a.spend(odo.PureDP)", "cost", "class", A_COST),
    ("a.spend(odo.PureDP(0.1), 'q-1')", "a spend takes", "3 were given", "key='q-1'"),
    ("a.spend(odo.PureDP(0.1), keys='q-1')", "a spend takes", "'keys'", "key='q-1'"),
    ("a.spend(odo.PureDP(0.1), key=17)", "key", "an int", "string of 1 to 200"),
    ("a.spend(odo.PureDP(0.1), note=5)", "note", "got 5", "must be a string"),
    ("odo.PureDP(epsilon='a')", "PureDP.epsilon", "'a'", "'0.1'"),
    ("odo.PureDP('10%')", "PureDP.epsilon", "'10%'", "'0.1'"),
    ("odo.PureDP('0,1')", "PureDP.epsilon", "'0,1'", "'0.1'"),
    ("odo.PureDP(True)", "PureDP.epsilon", "True", "such as 0.1"),
    ("odo.PureDP(np.array([0.1]))", "PureDP.epsilon", "array", "such as 0.1"),
    ("odo.PureDP(0.1, 1e-6)", "PureDP", "3 were given", "PureDP(epsilon)"),
    ("odo.PureDP(eps=0.1)", "PureDP", "'eps'", "PureDP(epsilon)"),
    ("odo.ApproxDP(0.1)", "ApproxDP", "'delta'", "ApproxDP(epsilon, delta)"),
    ("odo.ApproxDP(1e-6, 1)", "ApproxDP.delta", "got 1.0", "ApproxDP(epsilon, delta)"),
    ("odo.guarantees.guarantee_from_dict({'form': 1, 'kind': 'pur'})", "kind", "'pur'", "did you mean 'pure'?"),
    ("odo.laplace(epsilon=1)", "laplace()", "'epsilon'", "laplace(scale=10, sensitivity=1)"),
    ("odo.laplace(0)", "laplace(scale)", "got 0", "above 0"),
    ("odo.gaussian(epsilon=1, delta=1e-6)", "gaussian()", "'epsilon'", "gaussian(sigma=25, sensitivity=1)"),
    ("odo.subsampled_gaussian(sigma=1, rate=0.1)", "subsampled_gaussian()", "'sigma'", "sampling_rate=0.01"),
    ("odo.parallel(odo.PureDP(0.1), odo.PureDP(0.1))", "parallel()", "2 were given", "parallel([PureDP(0.1)"),
    ("odo.randomized_response(1)", "randomized_response(truth)", "got 1", "below 1"),
    # What an account is asked.
    ("a.decide(epsilon=0.1)", "a decision takes", "'epsilon'", "decide(PureDP(epsilon=0.1))"),
    ("a.how_many(0.1)", "cost", "got 0.1", A_COST),
    ("a.largest('pure')", "kind", "'pure'", "PureDP"),
    ("a.largest()", "'kind'", "missing", "largest(PureDP)"),
    ("a.largest(odo.PureDP, times=1.5)", "times", "got 1.5", "integer from 1"),
    ("a.calibrate('laplace')", "mechanism", "'laplace'", "odograph.mechanisms"),
    ("a.calibrate(odo.laplace, 3)", "settings", "3 were given", "calibrate(laplace, sensitivity=3"),
    ("a.calibrate(odo.laplace, sensitivty=3)", "settings", "'sensitivty'", "sensitivity"),
    ("a.quote(odo.PureDP(0.1))", "costs", "got PureDP(0.1)", "use decide"),
    ("a.quote(odo.PureDP(0.1), odo.PureDP(0.1))", "quote()", "3 were given", "quote([PureDP(0.1), GDP(0.05)])"),
    ("a.history('all')", "first", "'all'", "integer"),
    ("a.reserve(odo.PureDP(0.1), expires='1h')", "expires", "'1h'", "seconds"),
    ("a.reserve(odo.PureDP(0.1), 3600)", "reserve()", "3 were given", "expires=3600"),
    ("a.spending(epsilon=0.1)", "spending()", "'epsilon'", "with account.spending(PureDP(epsilon=0.1)"),
    ("l.reservation('census#2').void()", "void()", "'reason'", "void('the query failed before it ran')"),
    ("c.close('done')", "close()", "2 were given", "close(note="),
    # Where a ledger is, and what is in it.
    ("odo.connect('privacy.db')", "url", "'privacy.db'", URL),
    ("odo.connect('/data/privacy.db')", "url", "'/data/privacy.db'", "did you mean 'sqlite:////data/privacy.db'?"),
    ("odo.connect('sqlite://privacy.db')", "url", "'sqlite://privacy.db'", URL),
    ("odo.connect('localhost:8300')", "url", "'localhost:8300'", "did you mean 'http://localhost:8300'?"),
    ("odo.connect('http://localhost:8300')", "token", "an API key", "odograph keys make"),
    ("odo.connect('sqlite:///x.db', user='ana')", "connect()", "'user'", "principal='ana'"),
    ("odo.connect('sqlite:///x.db', timeout='10')", "timeout", "'10'", "must be seconds"),
    ("unreachable.accounts()", "cannot be reached", "ana@127.0.0.1:1/d", "check the host"),
    ("odo.aconnect('sqlite:///x.db')", "url", "'sqlite:///x.db'", "asyncio.to_thread"),
    ("odo.aconnect('http://localhost:8300', principal='ana')", "aconnect()", "'principal'", "token=..."),
    ("l.account('censu')", "account", "'censu'", "did you mean 'census'?"),
    ("l.account(3)", "name", "got 3", "letters, digits"),
    ("l.accounts('census')", "accounts()", "2 were given", "ledger.account('census')"),
    ("l.open_account('tax')", "'policy'", "missing", "open_account('census', Policy(1, 1e-6)"),
    ("l.open_account('tax', epsilon=1, delta=1e-6)", "open_account()", "'epsilon'", "open_account('census', Policy"),
    ("l.open_account(BASIC, 'tax')", "name", "<Policy", "letters, digits"),
    ("l.open_account('tax 2030', BASIC)", "name", "'tax 2030'", "letters, digits"),
    ("l.open_account('tax', BASIC, parent='Census')", "account", "'Census'", "did you mean 'census'?"),
    ("l.open_account('tax', BASIC, successor_of='censsus')", "account", "'censsus'", "did you mean 'census'?"),
    ("l.open_account('tax', 1.0)", "policy", "got 1.0", A_POLICY),
    ("l.open_account('census', BASIC)", "account", "'census'", "ledger.account('census')"),
    ("l.spend(c, odo.PureDP(0.1))", "by name", "3 were given", "ledger.account('census').spend(PureDP(0.1))"),
    ("l.spend({'censu': odo.PureDP(0.1)})", "account", "'censu'", "did you mean 'census'?"),
    ("l.spend(odo.PureDP(0.1))", "costs", "got PureDP(0.1)", "{'jan': PureDP(0.1)}"),
    ("l.reservation('census-1')", "entry id", "'census-1'", "census#17"),
    ("l.reservation('census#1')", "reservation", "'census#1'", "the verb of that entry is 'spend'"),
    ("l.verify('census')", "verify()", "2 were given", "verify(checkpoint=checkpoint)"),
    ("c.spend(odo.PureDP(0.2), key='used')", "All accounts of a principal", "'used'", "another key"),
    ("c.reserve(odo.PureDP(0.1), key='voided')", "census#2", "'voided'", "a run needs another key"),
    # Sessions.
    ("odo.session(BASIC)", "a session needs an account", "a Policy", "Accountant(policy)"),
    ("odo.session(odo.Accountant)", "a session needs an account", "the class Accountant", "Accountant(policy)"),
    ("odo.session()", "'account'", "missing", "with session(account) as s"),
    ("s.run(lambda: 1)", "cost", "<lambda>", "cost=PureDP(0.1)"),
    ("s.run(lambda: 1, cost=0.1)", "cost", "a float", A_COST),
    ("s.run(lambda: 1, cost=odo.PureDP)", "cost", "the class PureDP", A_COST),
    ("s.run(odo.PureDP(0.1))", "mechanism", "a PureDP", "such as a function"),
    ("s.run(lambda x: x, cost=odo.PureDP(0.1))", "<lambda>", "'x'", "missing a required argument"),
    ("odo.private(0.1)", "private needs the cost", "0.1", "@odo.private(cost=odo.PureDP(0.1))"),
    # Populations.
    ("odo.Population('people')", "Population", "missing", "Population.create(...)"),
    ("odo.Population.create('people', BASIC)", "'ledger'", "missing", "ledger=ledger, location='people'"),
    ("odo.Population.create('people', BASIC, ledger=l, location=place, ids=3.5)", "ids", "3.5", "a count"),
    ("odo.Population.create('people', BASIC, ledger=l, location=place, ids=-1)", "ids", "-1", "a count"),
    ("odo.Population.open('censu', ledger=l)", "account", "'censu'", "did you mean 'census'?"),
]
COMMANDS: list[tuple[str, str, str, str]] = [
    ("shwo", "command", "'shwo'", "Did you mean 'show'?"),
    ("show censu", "account", "'censu'", "did you mean 'census'?"),
    ("spend censu --pure 0.1", "account", "'censu'", "did you mean 'census'? Nothing was charged"),
    ("spend census 0.1", "cost", "exactly one", "--pure 0.1"),
    ("spend census", "cost", "exactly one", "--pure 0.1"),
    ("spend --pure 0.1", "account", "at least one", "census-2030 --pure 0.05"),
    ("spend census --pure abc", "PureDP.epsilon", "'abc'", "such as 0.1"),
    ("spend census --pure 10%", "PureDP.epsilon", "'10%'", "such as 0.1"),
    ("spend census --pure=-1", "PureDP.epsilon", "-1", "must not be negative"),
    ("spend census --pur 0.1", "option", "--pur", "--pure"),
    ("spend census --pure 0.1 --key", "'--key'", "requires an argument", "--help"),
    ("open tax --epsilon 1", "Policy.delta must be given", "None", "such as 1e-6"),
    ("open tax --epsilon 1 --delta 1e-6 --filter exakt", "filter", "'exakt'", "must be one of"),
    ("open tax --epsilon 1 --delta 1e-6 --parent censu", "account", "'censu'", "did you mean 'census'?"),
    ("open census --epsilon 1 --delta 1e-6", "account", "'census'", "odograph show census"),
    ("commit census#0", "reservation", "'census#0'", "the verb of that entry is 'open'"),
    ("history censu", "account", "'censu'", "did you mean 'census'?"),
]
PURE = {"kind": "pure", "epsilon": 0.1}
BODY = "/docs shows the body of a request"
REQUESTS: list[tuple[Any, str, str, str]] = [
    ({"costs": PURE}, "field", "`costs`", BODY),
    ({"cost": 0.1}, "$.cost", "`float`", BODY),
    ({"cost": None}, "$.cost", "`null`", BODY),
    ({"cost": "0.1"}, "$.cost", "`str`", BODY),
    ([PURE], "body", "`array`", BODY),
    ({}, "field `cost`", "missing", BODY),
    ({"cost": {"kind": "pur", "epsilon": 0.1}}, "$.cost.kind", "'pur'", BODY),
    ({"cost": {"kind": "pure", "eps": 0.1}}, "$.cost", "`eps`", BODY),
    ({"cost": {"kind": "pure", "epsilon": True}}, "$.cost.epsilon", "`bool`", BODY),
    ({"cost": PURE, "note": 5}, "$.note", "`int`", BODY),
    ({"cost": {"kind": "pure", "epsilon": "a tenth"}}, "PureDP.epsilon", "'a tenth'", "such as 0.1"),
    ({"cost": {"kind": "pure", "epsilon": -0.1}}, "PureDP.epsilon", "-0.1", "must not be negative"),
]


@pytest.fixture
def names(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the slips of the library are made with."""
    a = odo.Accountant(BASIC)
    with odo.connect("memory://", principal="ana") as ledger, odo.session(a) as s:
        c = ledger.open_account("census", BASIC)
        c.spend(odo.PureDP(0.1), key="used")
        c.reserve(odo.PureDP(0.1), key="voided").void("not run")
        yield {
            "odo": odo,
            "np": np,
            "diffprivlib": diffprivlib,
            "place": tmp_path / "people",
            "BASIC": BASIC,
            "a": a,
            "s": s,
            "l": ledger,
            "c": c,
            "unreachable": odo.connect("postgresql://ana@127.0.0.1:1/d", timeout=0.1),
        }


def missing(sentence: str, parts: tuple[str, ...]) -> list[str]:
    """The parts that a sentence lacks; what Python says alone has none of ours."""
    return [part for part in parts if part not in sentence]


def met_with(code: str, names: dict[str, Any]) -> str:
    """The message of the error that a slip is met with: one of ours, or Python's with our words."""
    with pytest.raises((OdographError, TypeError, AttributeError)) as caught:
        eval(code, names)  # noqa: S307  the table's code
    return str(caught.value)


def test_there_are_sixty_slips_and_more_and_each_is_another() -> None:
    assert len({code for code, *_ in SLIPS}) == len(SLIPS) >= 100
    assert len(COMMANDS) + len(REQUESTS) >= 12


@pytest.mark.parametrize(("code", "field", "value", "step"), SLIPS, ids=[code for code, *_ in SLIPS])
def test_a_slip_is_met_with_a_sentence_and_changes_nothing(
    code: str, field: str, value: str, step: str, names: dict[str, Any]
) -> None:
    accounts = (names["a"], names["c"])
    before = [(account.totals, account.history()) for account in accounts]
    sentence = met_with(code, names)
    assert missing(sentence, (field, value, step)) == [], sentence
    assert "\n" not in sentence
    assert not names["place"].exists()
    assert [(account.totals, account.history()) for account in accounts] == before
    assert [account.name for account in names["l"].accounts()] == ["census"]


def test_a_message_of_python_alone_is_not_enough(names: dict[str, Any]) -> None:
    """Negative control: without the sentence the slip is found wanting, and an error from inside is left alone."""
    (parts,) = (parts for code, *parts in SLIPS if code == "a.spend(epsilon=0.1)")
    plain = names | {"spend": odo.Accountant.spend.__wrapped__}  # type: ignore[attr-defined]
    assert missing(met_with("spend(a, epsilon=0.1)", plain), tuple(parts)) == ["a spend takes", SPENT]

    @odo.errors.with_usage("call it without")
    def fails_inside() -> None:
        raise TypeError("from inside")

    with pytest.raises(TypeError, match=r"^from inside$"):
        fails_inside()


@pytest.mark.parametrize(("command", "field", "value", "step"), COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_a_slip_on_the_command_line(  # noqa: PLR0913, PLR0917  the columns of the table
    command: str, field: str, value: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/privacy.db"
    monkeypatch.setenv("ODOGRAPH_URL", url)
    with odo.connect(url) as ledger:
        census = ledger.open_account("census", BASIC)
        done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300"})
        assert done.exit_code in {2, 5}
        assert missing(done.stderr, (field, value, step)) == [], done.stderr
        assert (census.size, len(ledger.accounts())) == (1, 1)


def test_slips_over_http(service: ServiceThread) -> None:
    headers = {"Authorization": f"Bearer {service.token('ana')}", "Idempotency-Key": "q"}
    with odo.connect(service.url, token=service.token("ana")) as ledger:
        census = ledger.open_account("census", BASIC)
        for form, *parts in REQUESTS:
            response = httpx.post(f"{service.url}/v1/accounts/census/spends", json=form, headers=headers)
            assert response.status_code in {400, 422}, form
            problem = response.json()
            assert missing(problem["detail"], tuple(parts)) == [], (form, problem["detail"])
            assert (problem["charged"], problem["code"] in dir(odo.errors)) == (False, True)
        assert census.size == 1
        with pytest.raises(OdographError, match=r"\(got 'cenus'\); did you mean 'census'\?"):
            ledger.account("cenus")
        with pytest.raises(OdographError, match=r"\(got 'cenus'\); did you mean 'census'\?"):
            ledger.open_account("tax", BASIC, parent="cenus")


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


def test_a_host_that_cannot_be_reached_is_not_called_busy() -> None:
    with (
        odo.connect("postgresql://ana@127.0.0.1:1/d", timeout=0.1) as ledger,
        pytest.raises(odo.errors.LedgerBusy) as caught,  # so that what tries again goes on doing so
    ):
        ledger.accounts()
    assert type(caught.value) is odo.errors.LedgerUnreachable
    assert "busy" not in str(caught.value).casefold()


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


def test_the_command_line_warns_of_a_large_delta_too(tmp_path: Path) -> None:
    for delta, warned in (("0.5", True), ("1e-6", False)):
        command = f"open tax-{delta} --epsilon 1 --delta {delta} --filter zcdp --url sqlite:///{tmp_path}/privacy.db"
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0
        assert ("odograph: warning: delta is 0.5: with that probability" in done.stderr) == warned
