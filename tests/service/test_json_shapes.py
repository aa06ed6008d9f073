"""A thing has one JSON shape: what its `to_dict` returns is what its response schema describes, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import odograph as odo
from odograph.service import schemas
from odograph.service.auth import ApiKey, Caller, Role

POLICY = odo.Policy(1, 1e-6, filter="zcdp")
KEY = ApiKey("0" * 12, "0" * 64, "ana", Role.ANALYST, ("census",), every_account=False, made=1, made_by="olga")


@pytest.fixture(scope="module")
def shapes() -> Iterator[dict[str, tuple[Any, type[msgspec.Struct]]]]:
    forms = schemas
    with odo.connect("memory://", principal="ana") as ledger:
        ledger.open_account("census", POLICY)
        account = ledger.open_account("later", POLICY, successor_of="census")
        calibrated = account.calibrate(odo.laplace, sensitivity="1/3", times=7)
        receipt = account.reserve(odo.PureDP("0.1"), expires=60).receipt
        yield {
            "receipt": (receipt.to_dict(), forms.ReceiptForm),
            "decision": (account.decide(odo.PureDP(5)).to_dict(), forms.DecisionForm),
            "quote": (account.quote([odo.GDP("0.1")]).to_dict(), forms.QuotedForm),
            "calibration": (calibrated.to_dict() if calibrated else None, forms.CalibrationForm),
            "reading": (account.reading().to_dict(), forms.ReadingForm),
            "entry": (account.history()[-1].to_dict(), forms.EntryForm),
            "summary": (account.summary(), forms.AccountRow),
            "account": (account.describe(), forms.AccountForm),
            "lifetime": (account.lifetime.to_dict() if account.lifetime else None, forms.LifetimeForm),
            "verification": (ledger.verify().to_dict(), forms.VerificationForm),
            "checkpoint": (ledger.checkpoint().to_dict(), forms.CheckpointForm),
            "key": (KEY.to_dict(), forms.KeyForm),
            "caller": (Caller.of(KEY).to_dict(), forms.WhoForm),
        }


NAMES = (
    "account",
    "calibration",
    "caller",
    "checkpoint",
    "decision",
    "entry",
    "key",
    "lifetime",
    "quote",
    "reading",
    "receipt",
    "summary",
    "verification",
)


def fits(form: dict[str, Any], schema: type[msgspec.Struct]) -> bool:
    """Whether a form has the fields of a schema, no others, and values of their types."""
    plain = msgspec.json.decode(msgspec.json.encode(form))
    try:
        again = msgspec.json.decode(msgspec.json.encode(plain), type=schema)
    except msgspec.ValidationError:
        return False
    return bool(msgspec.json.decode(msgspec.json.encode(again)) == plain)


@pytest.mark.parametrize("name", NAMES)
def test_what_to_dict_returns_is_what_the_schema_describes(
    shapes: dict[str, tuple[Any, type[msgspec.Struct]]], name: str
) -> None:
    assert set(shapes) == set(NAMES)
    form, schema = shapes[name]
    assert fits(form, schema)
    # Controls: a field more, a field less and a value of another type are seen.
    assert not fits(form | {"more": 1}, schema)
    first = next(iter(form))
    assert not fits({field: value for field, value in form.items() if field != first}, schema)
    assert not fits(form | {first: [None]}, schema)
