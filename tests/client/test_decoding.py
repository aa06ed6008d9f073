"""What the service writes the client reads back equal, and what is no answer of a service is an error of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import attacks
import msgspec
import mutations
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

import odograph as odo
from odograph.account import account_summary
from odograph.client import backend as decoding
from odograph.core.meters import Meter
from odograph.errors import BudgetExceeded
from odograph.service import visibility
from odograph.service.auth import Caller, Role
from odograph.service.dashboard import pages, view_models

SEER: Final = Caller("ana", Role.OWNER, "0" * 12, None)
BOUND: Final = Caller("ana", Role.ANALYST, "0" * 12, frozenset({"census"}))
NUMBERS: Final = (
    st.fractions(0, 1, max_denominator=1000) | st.floats(0, 1) | st.sampled_from(["0.05", "1/3", "1e-12", "2"])
)
GUARANTEES: Final = (
    NUMBERS.map(odo.PureDP)
    | NUMBERS.map(odo.GDP)
    | NUMBERS.map(odo.ZCDP)
    | st.builds(odo.ApproxDP, NUMBERS, st.sampled_from(["0", "1e-9", "1e-300"]))
    | st.builds(lambda value: odo.RDP((2, "5/2"), (value, value)), NUMBERS)
    | st.builds(lambda one, other: odo.guarantees.Parallel((odo.PureDP(one), odo.GDP(other))), NUMBERS, NUMBERS)
)


def sent(form: object) -> Any:  # noqa: ANN401  JSON
    """Return what arrives when this is sent."""
    return json.loads(msgspec.json.encode(form))


@pytest.fixture
def ledger() -> Iterator[odo.Ledger]:
    with odo.connect("memory://", principal="ana") as made:
        yield made


def opened(ledger: odo.Ledger) -> Callable[[str], tuple[Meter, ...]]:
    """Open a small tree, and return how its meters are found."""
    policy = odo.Policy(1, 1e-6, filter="renyi", delta_steps=1e-7)
    ledger.open_account("all", policy)
    ledger.open_account("census", policy, parent="all", note="a note")
    ledger.open_account("after", policy, successor_of="census")
    return lambda name: ledger.account(name).compiled.meters


def check_read_back(costs: list[odo.Guarantee]) -> None:
    """Assert that everything that became of these costs is read back as it was."""
    with odo.connect("memory://", principal="ana") as ledger:
        meters, backend = opened(ledger), ledger.backend
        account = ledger.account("census")
        for number, cost in enumerate(costs):
            decision = account.decide(cost)
            assert decoding.decision_of(sent(visibility.decision_form(decision)), meters, "census") == decision
            try:
                if number % 2:
                    receipt = account.reserve(cost, expires=60).receipt
                else:
                    receipt = ledger.spend({"census": cost, "after": cost}, note="ñ \U0001f600")
            except BudgetExceeded as refusal:
                refused = refusal.decision
            else:
                assert decoding.receipt_of(sent(visibility.receipt_form(receipt, SEER))) == receipt
                continue
            assert decoding.decision_of(sent(visibility.decision_form(refused)), meters) == refused
        quoted = account.quote(costs)
        assert decoding.quote_of(sent(quoted.to_dict()), meters, "census") == quoted
        for name, balance in backend.balances().items():
            assert decoding.balance_of(sent(visibility.row_of(backend, SEER, balance))) == balance
            page = sent(visibility.entries_form(ledger, SEER, name, 0, 1000))["entries"]
            assert [decoding.history_entry_of(name, one) for one in page] == backend.history(name, 0, 1000)
        assert decoding.lifetime_of(sent(visibility.lifetime_form(account.lifetime, SEER))) == account.lifetime
        verified = ledger.verify()
        assert decoding.verification_of(sent(verified.to_dict())) == verified


@given(costs=st.lists(GUARANTEES, max_size=6))
def test_whatever_the_service_writes_the_client_reads_back_equal(costs: list[odo.Guarantee]) -> None:
    check_read_back(costs)


def test_an_answer_that_loses_something_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = account_summary
    monkeypatch.setattr(visibility, "account_summary", lambda *of: summary(*of) | {"totals": "0;0 0 0;0 0 0"})
    with pytest.raises((AssertionError, ValueError)):
        check_read_back([odo.PureDP(0.1)])


def answers() -> list[tuple[Callable[..., object], Any]]:
    """Return every reader of the client, with an answer that it reads."""
    with odo.connect("memory://", principal="ana") as ledger:
        meters = opened(ledger)
        account, backend = ledger.account("census"), ledger.backend
        receipt = account.reserve(odo.PureDP(0.1), expires=60).receipt
        return [
            (decoding.receipt_of, sent(visibility.receipt_form(receipt, SEER))),
            (decoding.balance_of, sent(visibility.row_of(backend, SEER, backend.balances(["census"])["census"]))),
            (
                lambda form: decoding.history_entry_of("census", form),
                sent(visibility.entries_form(ledger, SEER, "census", 0, 9))["entries"][0],
            ),
            (
                lambda form: decoding.history_entry_of("census", form),
                sent(visibility.entries_form(ledger, BOUND, "census", 0, 9))["entries"][0],
            ),
            (decoding.lifetime_of, sent(visibility.lifetime_form(account.lifetime, SEER))),
            (
                lambda form: decoding.decision_of(form, lambda _: meters("census"), "census"),
                sent(visibility.decision_form(account.decide(odo.PureDP(5)))),
            ),
            (decoding.verification_of, sent(ledger.verify().to_dict())),
        ]


ANSWERS: Final = answers()


@given(data=st.data())
def test_what_is_no_answer_of_a_service_is_an_error_of_ours(data: st.DataObject) -> None:
    read, form = data.draw(st.sampled_from(ANSWERS))
    changed = data.draw(mutations.mutated([form]))
    with attacks.refused_by_us():
        read(changed)


def request_of(body: bytes, kind: bytes = b"application/x-www-form-urlencoded") -> Request:
    """Return a form as a browser sends it."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/sign-in",
        "headers": [(b"content-type", kind)],
        "query_string": b"",
    }
    return Request(scope, receive)


@given(
    body=st.binary(max_size=200)
    | st.sampled_from([b"token=odo_x&csrf=%zz&then=%2F%2Fevil", b"a=1&" * 60, b"csrf=%ff"])
)
def test_every_form_of_a_page_is_read_or_refused(body: bytes) -> None:
    with attacks.refused_by_us():
        found = asyncio.run(pages.read_form(request_of(body)))
        assert all(isinstance(value, str) for value in found.values())


TYPED: Final = (
    st.text(max_size=30)
    | st.sampled_from([str(one) for one in mutations.NASTY])
    | st.sampled_from(["1", "0.001", "basic", "zcdp", "new", "gaussian", "pure", "menu:m", "person", "add-remove"])
)


@given(typed=st.fixed_dictionaries({}, optional=dict.fromkeys(view_models._DEFAULT_FIELDS, TYPED)))  # noqa: SLF001  the fields
def test_whatever_is_typed_into_a_form_is_a_policy_or_is_refused(typed: dict[str, str]) -> None:
    with attacks.refused_by_us():
        view_models.policy_from_form(typed)


@given(
    query=st.fixed_dictionaries(
        {"size": TYPED}, optional=dict.fromkeys(("kind", "times", "delta", "sensitivity"), TYPED)
    )
)
def test_whatever_is_asked_of_the_planner_has_an_answer_and_spends_nothing(query: dict[str, str]) -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        opened(ledger)
        before = ledger.checkpoint()
        with attacks.refused_by_us():
            msgspec.json.encode(view_models.make_plan(ledger, SEER, "census", query))
        assert ledger.checkpoint() == before


@given(
    path=st.text(max_size=60)
    | st.sampled_from(["//evil", "/\\evil", "https://evil", "/\tevil", "/%2F/evil", "\\\\evil", "/a//b"])
)
def test_after_signing_in_nobody_is_sent_to_another_site(path: str) -> None:
    found = pages._local_path(path)  # noqa: SLF001  a parser
    split = urlsplit(found)
    assert (split.scheme, split.netloc) == ("", "")
    assert found.startswith("/")
    assert not found.startswith(("//", "/\\"))
    assert found.isascii()
    assert found.isprintable()
