"""Everything that reads what others wrote: whatever comes, it is read, or refused by an error of ours."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import attacks
import httpx
import msgspec
import mutations
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from service_server import ServiceThread

import odograph as odo
from odograph.core.guarantees import guarantee_from_dict
from odograph.core.policy import Compiled
from odograph.errors import BudgetExceeded, OdographError
from odograph.service import endpoint, schemas
from odograph.service.auth import Caller, Role
from odograph.service.routes import ROUTES, accounts, admin
from odograph.service.schemas import guarantee_of

COSTS: Final[list[Any]] = [
    {"kind": "pure", "epsilon": "0.05"},
    {"kind": "pure", "epsilon": 0.001, "form": 1},
    {"kind": "approx", "epsilon": 0.1, "delta": "1e-9"},
    {"kind": "prob", "epsilon": 1, "delta": 0},
    {"kind": "zcdp", "rho": "1/3", "delta": 0},
    {"kind": "gdp", "mu": 0.2},
    {"kind": "discrete_gaussian", "sigma": 10},
    {"kind": "discrete_gaussian", "sigma": "1/3", "sensitivity": 2, "dimension": 7, "grid": "0.01", "form": 1},
    {"kind": "rdp", "orders": [2, "4"], "values": [0.1, 0.2], "delta": 0},
    {"kind": "mechanism", "name": "m", "steps": 3, "curve": {"kind": "rdp", "orders": [2], "values": [0.1]}},
    {"kind": "parallel", "parts": [{"kind": "pure", "epsilon": "0.1"}, {"kind": "gdp", "mu": 1}]},
]
POLICIES: Final[list[Any]] = [
    {"epsilon": "1", "delta": "1e-6"},
    {"epsilon": 1, "delta": 1e-6, "filter": "basic", "privacy_unit": "person", "neighbors": "replace-one"},
    {
        "epsilon": 2,
        "delta": "1/1000",
        "filter": [{"kind": "exact", "share": 0.5, "takes": ["pure"]}, ["zcdp", "1/2"]],
        "delta_steps": 0,
    },
    {
        "epsilon": 2,
        "delta": 0.001,
        "filter": [{"kind": "renyi", "orders": [[2, 0.5], [4, 0.5]]}],
        "slack": "0.01",
    },
    odo.Policy(1, 1e-6).to_dict(),
    {"rho": "1/2"},
    {"mu": 1, "delta": 1e-6},
    {"epsilon": "none", "delta": "1e-6", "slack": 0.1},
    odo.Policy(mu=1).to_dict(),
    odo.Policy(None, 1e-6).to_dict(),
    {"epsilon": None, "delta": 1e-6, "filter": [{"kind": "zcdp-total"}]},
    {"epsilon": 1, "delta": 1e-6, "odometer": {"kind": "filter", "epsilon": 1.0}},
    {"epsilon": 1, "delta": 1e-6, "odometer": {"kind": "mixture", "gamma": 1.0}},
]
CHECKPOINT: Final = {"form": 1, "head": "0" * 64, "accounts": {"census": ["3", "0" * 64]}}
BODIES: Final[dict[type, list[Any]]] = {
    schemas.SpendForm: [{"cost": cost, "note": "n"} for cost in COSTS],
    schemas.ReserveForm: [{"cost": cost, "expires": 60} for cost in COSTS],
    schemas.CostAskedForm: [{"cost": cost} for cost in COSTS],
    schemas.SpendAllForm: [{"costs": {"census": cost, "income": COSTS[0]}} for cost in COSTS],
    schemas.ReserveAllForm: [{"costs": {"census": cost}, "expires": 1.5, "note": ""} for cost in COSTS],
    schemas.CostsForm: [{"costs": {"census": cost}} for cost in COSTS],
    schemas.BatchForm: [
        {"spends": [{"key": "k", "costs": {"census": cost}}, {"key": "k", "costs": {}}]} for cost in COSTS
    ],
    schemas.QuoteForm: [{"costs": COSTS}],
    schemas.LargestForm: [{"kind": "pure", "times": 3}, *({"like": cost} for cost in COSTS)],
    schemas.CalibrateForm: [
        {"mechanism": "laplace", "settings": {"sensitivity": "1/3"}, "times": 3},
        {"mechanism": "gaussian", "settings": {"sensitivity": 2.5}},
        {"mechanism": "exponential"},
        {"mechanism": "randomized_response", "settings": {"categories": 3}},
        {"mechanism": "subsampled_gaussian", "settings": {"sampling_rate": 0.01, "steps": 10}},
    ],
    schemas.CommitForm: [{}, {"note": "n"}],
    schemas.VoidForm: [{"reason": "r"}],
    schemas.CloseForm: [{}, {"note": "n"}],
    schemas.RoundForm: [
        {"guarantees": COSTS[:1]},
        {"guarantees": COSTS, "which": [0, 1, 0]},
        {"guarantees": COSTS, "which": [0, 1], "ids": [3, 7], "note": "n"},
        {"guarantees": COSTS, "which": [0], "ids": ["a"]},
    ],
    schemas.PeopleForm: [{"ids": [0, 5]}, {"ids": ["a", "b"], "note": "n"}, {"count": 3}],
    schemas.CountActiveForm: [{"probe": cost, "cost": COSTS[0], "note": "n"} for cost in COSTS],
    schemas.VerifyForm: [{}, {"checkpoint": CHECKPOINT}],
    schemas.MakeKeyForm: [{"principal": "p", "role": "analyst", "accounts": ["census"], "expires": 60}],
    schemas.CreatePopulationForm: [
        *({"name": "new", "policy": policy, "engine": "duckdb", "unknown": "join"} for policy in POLICIES),
        {"name": "new", "compiled": odo.compile_policy(odo.Policy(1, 1e-6, filter="zcdp")).to_dict(), "note": "n"},
    ],
    schemas.RotateKeyForm: [{"overlap": 60}, {}],
    schemas.OpenForm: [
        *({"name": "new", "policy": policy, "parent": "census", "dataset": "d"} for policy in POLICIES),
        {"name": "new", "compiled": odo.compile_policy(odo.Policy(1, 1e-6, filter="zcdp")).to_dict()},
    ],
}
SEER: Final = Caller("ana", Role.OWNER, "0" * 12, None)


def test_an_epsilon_that_is_missing_opens_no_account_without_a_limit() -> None:
    for form in ({"epsilon": None}, {"epsilon": None, "rho": None, "mu": None}, {}):
        with pytest.raises(odo.errors.InvalidPolicy, match="must have one promise"):
            accounts.policy_of(msgspec.convert({"delta": "1e-6"} | form, schemas.PolicyForm))
    said = msgspec.convert({"epsilon": "none", "delta": "1e-6"}, schemas.PolicyForm)
    assert accounts.policy_of(said) == odo.Policy(None, "1e-6")


def check_ours(read: Callable[[], object]) -> None:
    """Assert that reading ends, or is refused by an error of ours."""
    with attacks.refused_by_us():
        read()


def test_what_others_raise_would_be_caught() -> None:
    with pytest.raises(ZeroDivisionError):
        check_ours(lambda: 1 // 0)


def decoded(form: Any, text: bytes) -> Any:  # noqa: ANN401  of that form
    """Read bytes as the door does; None for those that it refuses."""
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, RecursionError, ValueError):  # as the door expects them
        return None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A service for all these tests, and its owner."""
    where: Path = tmp_path_factory.mktemp("parsers")
    url = f"sqlite:///{where}/served.db"
    with ServiceThread(url, population_root=where / "people") as running, attacks.owner_of(running) as owner:
        for name in ("census", "income"):
            attacks.open_account(owner, name)
        for engine in ("numpy", "duckdb"):
            attacks.create_population(owner, engine, engine=engine, ids=range(8))
        yield owner


SLOW: Final = (
    schemas.CreatePopulationForm,
    schemas.OpenForm,
)  # a policy that somebody makes up may take minutes to solve: it is read by itself below
READ: Final = [route for route in ROUTES if route.form is not None and route.form not in SLOW]


def test_every_form_has_documents_to_begin_with() -> None:
    assert {route.form for route in ROUTES if route.form is not None} == {*BODIES}
    for form, documents in BODIES.items():
        for document in documents:
            wrong = form is schemas.BatchForm  # one of its spends names no account
            assert (decoded(form, mutations.written(document)) is None) == wrong


@given(data=st.data())
def test_no_body_makes_the_service_fail(served: httpx.Client, data: st.DataObject) -> None:
    route = data.draw(st.sampled_from(READ))
    assert route.form is not None
    body = data.draw(mutations.texts(BODIES[route.form]))
    names = ["numpy", "duckdb"] if "/populations/" in route.path else ["census", "income"]
    path = attacks.path_of(route, name=data.draw(st.sampled_from([*names, "nothing"])))
    answer = served.request(route.method, path, content=body, headers=attacks.JSON | {"Idempotency-Key": "q-1"})
    if answer.status_code >= 400:
        attacks.check_problem(answer)


@given(text=mutations.texts(COSTS))
def test_every_guarantee_that_is_read_is_one_or_is_refused(text: bytes) -> None:
    form = decoded(schemas.CostForm, text)
    if form is None:
        return
    cost = None
    with attacks.refused_by_us():
        cost = guarantee_of(form)
    if cost is not None:
        again = decoded(schemas.CostForm, mutations.written(cost.to_dict()))
        assert guarantee_of(again) == cost == guarantee_from_dict(cost.to_dict())


@given(text=mutations.texts(POLICIES))
def test_every_policy_that_is_read_is_one_or_is_refused(text: bytes) -> None:
    form = decoded(schemas.PolicyForm, text)
    if form is not None:
        check_ours(lambda: accounts.policy_of(form))


@given(text=mutations.texts([one["compiled"] for one in BODIES[schemas.OpenForm] if "compiled" in one]))
def test_every_compiled_policy_that_is_read_is_one_or_is_refused(text: bytes) -> None:
    form = decoded(dict[str, Any], text)
    if form is not None:
        check_ours(lambda: Compiled.from_dict(form))


@given(text=mutations.texts([CHECKPOINT]))
def test_every_checkpoint_that_is_read_is_one_or_is_refused(text: bytes) -> None:
    form = decoded(dict[str, Any], text)
    if form is not None:
        check_ours(lambda: odo.Checkpoint.from_dict(form))


ASKED: Final = [route for route in ROUTES if route.query is not None]


@given(
    route=st.sampled_from(ASKED),
    text=st.binary(max_size=60)
    | st.lists(
        st.tuples(st.sampled_from(["first", "count", "after", "limit", "compare", "x"]), st.text() | st.integers())
    )
    .map(lambda pairs: urlencode(pairs, errors="replace"))
    .map(str.encode),
)
@example(route=ASKED[0], text=b"limit=" + b"9" * 5000)
@example(route=ASKED[0], text=b"after=%ed%a0%80&limit=1")
def test_every_query_is_read_or_refused(route: endpoint.Route, text: bytes) -> None:
    check_ours(lambda: endpoint._read_query(route, text))  # noqa: SLF001  a parser
    check_ours(lambda: endpoint._read_query(ROUTES[0], text))  # noqa: SLF001  one that takes none


@given(
    value=st.none() | st.binary(max_size=300) | st.text(max_size=300).map(lambda text: urlencode({"": text}).encode())
)
def test_every_idempotency_key_is_read_or_refused(value: bytes | None) -> None:
    check_ours(lambda: endpoint._read_idempotency_key(value))  # noqa: SLF001  a parser


@given(given_id=st.binary(max_size=100))
def test_a_request_id_is_plain_whatever_was_sent(given_id: bytes) -> None:
    found = endpoint.request_id_of({b"x-request-id": given_id})
    assert found.isascii()
    assert found.isprintable()
    assert 0 < len(found) <= 64


def copied() -> bytes:
    """Return an export with everything in it."""
    with odo.connect("memory://", principal="ana") as ledger:
        filled(ledger)
        file = io.StringIO()
        kept = ledger.export(file)
    return mutations.written({"against": kept.to_dict()}) + b"\n" + file.getvalue().encode()


def filled(ledger: odo.Ledger) -> None:
    policy = odo.Policy(1, 1e-6, filter="basic")
    ledger.open_account("all", policy)
    account = ledger.open_account("census", policy, parent="all", note="opened")
    ledger.open_account("after", policy, successor_of="census")
    account.spend(odo.PureDP("0.1"), key="q-1", note="a note")
    held = account.reserve(odo.ApproxDP("1/3", "1e-7"), key="q-2", expires=600)
    held.void("not run")
    ledger.reserve({"census": odo.PureDP(0.1), "after": odo.PureDP(0.1)}, key="q-3").commit()
    with pytest.raises(BudgetExceeded):
        account.spend(odo.PureDP(5))


COPY: Final = copied()
LINES: Final = [json.loads(line) for line in COPY.splitlines()]


def taken_in(content: bytes) -> odo.Checkpoint | None:
    """Read a copy into an empty ledger; None if it is refused, and then nothing is there."""
    with odo.connect("memory://", principal="ana") as ledger:
        try:
            return admin._read_export(ledger, io.BytesIO(content)).checkpoint  # noqa: SLF001  a parser
        except OdographError:
            assert ledger.accounts() == ()
            return None


def test_a_copy_that_nobody_changed_is_taken_in() -> None:
    assert taken_in(COPY) is not None


@given(content=mutations.garbled(COPY) | st.binary(max_size=100))
def test_every_garbled_copy_is_taken_in_or_refused_and_never_half(content: bytes) -> None:
    found = taken_in(content)
    assert (
        found is None or not content.startswith(b'{"against"') or found.accounts.keys() == {"all", "census", "after"}
    )


@given(data=st.data())
def test_every_changed_copy_is_taken_in_or_refused_and_never_half(data: st.DataObject) -> None:
    lines = [*LINES]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = data.draw(mutations.mutated([lines[at]]))
    taken_in(b"\n".join(map(mutations.written, lines)))


def test_the_least_noise_and_the_count_are_what_the_library_says(served: httpx.Client) -> None:
    own = odo.Accountant(odo.Policy(1, 1e-6))
    attacks.open_account(served, "survey", {"epsilon": "1", "delta": "1e-6"})
    path, before = "/v1/accounts/survey", attacks.state(served)
    asked: list[tuple[Any, dict[str, Any]]] = [
        (odo.laplace, {"sensitivity": 3}),
        (odo.laplace, {"sensitivity": "1/3"}),
        (odo.gaussian, {"sensitivity": "0.10000000000000000000001"}),
        (odo.randomized_response, {"categories": 3}),
        (odo.exponential, {}),
    ]
    for mechanism, settings in asked:
        form = {"mechanism": mechanism.__name__, "settings": settings, "times": 20}
        answer = attacks.post(served, f"{path}/calibrate", form)
        found = own.calibrate(mechanism, times=20, **settings)
        assert found is not None
        assert (answer.status_code, answer.json()) == (200, {"account": "survey", "calibration": found.to_dict()})
        counted = attacks.post(served, f"{path}/how-many", {"cost": found.guarantee.to_dict()})
        assert counted.json() == {"account": "survey", "how_many": own.how_many(found.guarantee)}
    # A JSON number that no float is, is read exactly too.
    body = b'{"mechanism": "gaussian", "times": 20, "settings": {"sensitivity": 0.10000000000000000000001}}'
    exact = served.post(f"{path}/calibrate", content=body, headers=attacks.JSON).json()["calibration"]
    assert Fraction(exact["settings"]["sensitivity"]) == Fraction("0.10000000000000000000001")
    assert attacks.state(served) == before
    policy = {"epsilon": 1, "delta": 0, "filter": "basic"}
    attacks.post(served, "/v1/accounts", {"name": "full", "policy": policy}, key="open full").raise_for_status()
    spend = {"cost": odo.PureDP(1).to_dict()}
    attacks.post(served, "/v1/accounts/full/spends", spend, key="all of it").raise_for_status()
    none = attacks.post(served, "/v1/accounts/full/calibrate", {"mechanism": "laplace"}).json()
    assert none == {"account": "full", "calibration": None}


@pytest.mark.parametrize(
    ("form", "detail"),
    [
        ({"mechanism": "parallel"}, "Invalid enum value"),
        ({"mechanism": "laplace", "times": 0}, "times"),
        ({"mechanism": "laplace", "scale": 3}, "scale"),
        ({"mechanism": "laplace", "settings": {"scale": 3}}, "scale must not be given (got 3)"),
        ({"mechanism": "laplace", "settings": {"times": 3}}, "laplace has the settings sensitivity (got 'times')"),
        ({"mechanism": "laplace", "settings": {"mechanism": 3}}, "laplace has the settings sensitivity"),
        ({"mechanism": "laplace", "settings": {"sensitivity": 0}}, "must be from 1e-100 to 1e100 (got 0)"),
        ({"mechanism": "laplace", "settings": {"sensitivity": "-1"}}, "must not be negative (got '-1')"),
        ({"mechanism": "subsampled_gaussian"}, "subsampled_gaussian needs sampling_rate"),
        ({"mechanism": "subsampled_gaussian", "settings": {"sampling_rate": 2}}, "sampling_rate must be above 0"),
    ],
)
def test_a_wrong_calibration_is_refused_by_name(served: httpx.Client, form: dict[str, Any], detail: str) -> None:
    before = attacks.state(served)
    answer = attacks.post(served, "/v1/accounts/income/calibrate", form)
    attacks.check_problem(answer, 422)
    assert detail in answer.json()["detail"]
    assert attacks.state(served) == before
