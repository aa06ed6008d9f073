"""Smooth prices meet reference values of 40 digits, and a value on the wrong side is caught.

The values are of the formulas, computed with mpmath at 60 digits: randomized response under a reserve with its
composite price, steps known by their moments for one order and for zCDP, the limit N - k - 4.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from check import main
from mpmath import mp, mpf

VALUES: Final[list[tuple[str, dict[str, Any], str | None]]] = [
    (
        "smooth_price_pure",
        {"e": 0.0001, "unit": "4.000000000004e-6", "k": 68},
        "0.00000001000006127094383353920993144573491984358",
    ),
    (
        "smooth_price_pure",
        {"e": 0.001, "unit": "4.000000000004e-6", "k": 68},
        "0.000001000613304792225883679491996292123738604",
    ),
    (
        "smooth_price_pure",
        {"e": 0.003, "unit": "4.000000000004e-6", "k": 68},
        "0.000009010542595579531576721272322433227211631",
    ),
    (
        "smooth_price_pure",
        {"e": 0.005, "unit": "4.000000000004e-6", "k": 68},
        "0.00002503109579513855081578226869091449010911",
    ),
    ("smooth_price_pure", {"e": 0.01, "unit": "4.000000000004e-6", "k": 68}, "0.0001000000000001"),
    ("smooth_price_pure", {"e": 0.1, "unit": "4.000000000004e-6", "k": 68}, "0.009992000000009992"),
    ("smooth_price_pure", {"e": 0.02, "unit": "2.5e-5", "k": 11}, "0.0004"),
    ("smooth_price_pure", {"e": 0.0123, "unit": "0.0001", "k": 5}, "0.0001560737482574212001547364519747547968098"),
    ("smooth_price_pure", {"e": 0.3, "unit": "0.0036", "k": 13}, "0.09"),
    ("smooth_price_pure", {"e": 1.25, "unit": "0.04", "k": 40}, "1.4"),
    (
        "smooth_price_zcdp",
        {"rho": 5e-06, "unit": "4.000000000004e-6", "k": 68},
        "0.00001038167938931258085193170602293234570978",
    ),
    ("smooth_price_zcdp", {"rho": 6.8e-05, "unit": "0.000004", "k": 68}, "0.000272"),
    ("smooth_price_zcdp", {"rho": 0.01, "unit": "0.0001", "k": 1000}, "0.025"),
    ("smooth_price_zcdp", {"rho": 0.001, "unit": "0.000004", "k": 68}, None),
    (
        "smooth_price_renyi",
        {"d": 0.0001, "a": "34.4", "unit": "4.000000000004e-6", "k": 109},
        "0.000005843124665644898383051546980582012511489",
    ),
    (
        "smooth_price_renyi",
        {"d": 0.001, "a": "12.5", "unit": "0.0001", "k": 20},
        "0.0001641640200375560278066857250127820571342",
    ),
    (
        "smooth_price_renyi",
        {"d": 2e-07, "a": "2", "unit": "0.000004", "k": 68},
        "0.0000002000367897159955076723652469886074500224",
    ),
    (
        "smooth_price_renyi",
        {"d": 0.02, "a": "5", "unit": "0.01", "k": 10},
        "0.008511360351501186759792009722225185779594",
    ),
    ("smooth_price_renyi", {"d": 0.5, "a": "34.4", "unit": "0.000004", "k": 68}, None),
    ("smooth_limit_units", {"N": 13562, "k": 68}, "13490.0"),
    ("smooth_limit_units", {"N": 2169, "k": 11}, "2154.0"),
    ("smooth_limit_units", {"N": 7, "k": 4}, "0.0"),
]


def checked(folder: Path, rows: list[tuple[str, dict[str, Any], str | None]]) -> int:
    path = folder / "values.json"
    path.write_text(
        json.dumps([dict(zip(("function", "inputs", "value"), row, strict=True)) for row in rows]), "utf-8"
    )
    return main([str(path)])


def test_every_smooth_value_is_met(tmp_path: Path) -> None:
    assert checked(tmp_path, VALUES) == 0


@pytest.mark.parametrize("row", [row for row in VALUES if row[2] != "0.0"], ids=str)
def test_a_smooth_value_that_is_off_is_caught(tmp_path: Path, row: tuple[str, dict[str, Any], str | None]) -> None:
    function, inputs, value = row
    unsafe = "-2e-12" if function == "smooth_limit_units" else "2e-12"
    with mp.workdps(50):
        for shift in (unsafe, "1e-6", "-1e-6"):
            other = "1.0" if value is None else str(mp.nstr(mpf(value) * (1 + mpf(shift)), 40))
            assert checked(tmp_path, [(function, inputs, other)]) == 1
