"""Idempotency keys of populations."""

from __future__ import annotations

from pathlib import Path

import pytest

import odograph as odo
from odograph.errors import IdempotencyConflict

POLICY = odo.Policy(1, 1e-6, filter="basic")


def test_a_key_that_made_a_population_does_not_make_another_elsewhere(tmp_path: Path) -> None:
    with odo.connect("memory://") as ledger:
        made = odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "one", ids=5, key="k")
        with pytest.raises(IdempotencyConflict, match="'k' has made 'p' before"):
            odo.Population.create("p", POLICY, ledger=ledger, location=tmp_path / "two", ids=5, key="k")
        assert not (tmp_path / "two").exists()
        assert made.charge(odo.PureDP("0.1"), key="c").mask.all()
