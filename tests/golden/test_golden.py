"""The reference values are met, and the checker that says so can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from check import main
from mpmath import mp, mpf

if TYPE_CHECKING:
    from collections.abc import Callable

VECTORS: Final = Path(__file__).with_name("vectors.json")


def _shifted(relative: str) -> Callable[[Any], str]:
    def shift(value: Any) -> str:  # noqa: ANN401
        with mp.workdps(50):
            return str(mp.nstr(mpf(value) * (1 + mpf(relative)), 40))

    return shift


def _altered(folder: Path, function: str, change: Callable[[Any], Any]) -> str:
    rows = json.loads(VECTORS.read_text(encoding="utf-8"))
    row = next(row for row in rows if row["function"] == function)
    row["value"] = change(row["value"])
    path = folder / "altered.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


def test_every_reference_value_is_met() -> None:
    assert main([str(VECTORS)]) == 0


@pytest.mark.parametrize("relative", ["1e-9", "-1e-9"])
@pytest.mark.parametrize("function", ["ystar", "mixture_odometer", "gdp_delta", "kov_optimal_eps"])
def test_a_value_off_by_one_in_a_billion_is_caught(tmp_path: Path, function: str, relative: str) -> None:
    assert main([_altered(tmp_path, function, _shifted(relative))]) == 1


@pytest.mark.parametrize(
    ("function", "relative"),
    [("zcdp_to_dp_eps_standard", "1e-13"), ("rr_renyi", "1e-13"), ("ystar", "-1e-13")],
)
def test_a_value_on_the_unsafe_side_is_caught(tmp_path: Path, function: str, relative: str) -> None:
    assert main([_altered(tmp_path, function, _shifted(relative))]) == 1
    # The same shift towards the safe side is within the tolerance.
    assert main([_altered(tmp_path, function, _shifted(str(-float(relative))))]) == 0


def test_a_wrong_decision_is_caught(tmp_path: Path) -> None:
    assert main([_altered(tmp_path, "dp_filter_accepts", lambda value: not value)]) == 1


def test_a_missing_infinity_is_caught(tmp_path: Path) -> None:
    assert main([_altered(tmp_path, "stitched_odometer_paper", lambda _: "inf")]) == 1


def test_an_unknown_function_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "unknown.json"
    path.write_text(json.dumps([{"function": "no_such", "inputs": {}, "value": "1"}]), encoding="utf-8")
    assert main([str(path)]) == 1
