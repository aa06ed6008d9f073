"""A history as a table: every text comes back, no spreadsheet evaluates one, numbers are rounded up."""

from __future__ import annotations

import csv
import io
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import GDP, RDP, Accountant, ApproxDP, BudgetExceeded, Policy, PureDP
from odograph.core.guarantees import DiscreteGaussian, Mechanism, Parallel
from odograph.errors import InvalidArgument, MissingExtra
from odograph.ledger import results
from odograph.ledger.results import COLUMNS, History

DOCUMENT = Path(__file__).parents[2] / "docs" / "ledger.md"
EMPTY = History()
# What spreadsheets begin a formula with, after what they skip; in some languages also the wide forms.
FORMULAS = "=+-@\uff1d\uff0b\uff0d\uff20"
NOTES = st.builds(
    "{}{}{}".format, st.sampled_from(["", " ", "\t", "\n", "'"]), st.sampled_from(["", *FORMULAS]), st.text()
)


def written(history: History) -> list[dict[str, str]]:
    """The rows of the CSV, as a program reads them."""
    file = io.StringIO(newline="")
    history.to_csv(file)
    return [*csv.DictReader(io.StringIO(file.getvalue(), newline=""))]


def check_note(note: str) -> None:
    account = Accountant(Policy(1, 0, filter="basic"))
    account.spend(PureDP(0), note=note)
    cell = written(account.history())[1]["note"]
    assert not cell.startswith(("\t", "\r", "\n"))
    assert not cell.lstrip().startswith(tuple(FORMULAS))
    assert cell.removeprefix("'") == note


@given(NOTES)
def test_a_note_comes_back_and_is_no_formula(note: str) -> None:
    check_note(note)


@pytest.mark.parametrize(
    ("pattern", "note"),
    [
        ("(?!)", '=HYPERLINK("http://x";A1)'),  # nothing is marked
        ("[=+@]", "-2+3"),  # a sign is forgotten
        (r"[=+\-@]", " =1+1"),  # spaces are not skipped
        (r"\s*[=+\-@]", "'a"),  # the mark itself is not marked
    ],
)
def test_a_text_that_is_not_marked_is_caught(pattern: str, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_note(note)
    monkeypatch.setattr(results, "_FORMULA", re.compile(pattern))
    with pytest.raises(AssertionError):
        check_note(note)


def test_every_text_is_quoted_so_that_no_separator_begins_a_cell() -> None:
    account = Accountant(Policy(1, 0, filter="basic"))
    account.spend(PureDP(0.1), key='a;=1+1,"b"', note="x\n=1+1")
    file = io.StringIO()
    account.history(1).to_csv(file)
    assert '"a;=1+1,""b"""' in file.getvalue()
    assert '"x\n=1+1"' in file.getvalue()
    assert ",0.1," in file.getvalue()


@given(st.fractions(min_value=Fraction(1, 10**9), max_value=1))
def test_a_size_is_rounded_up(size: Fraction) -> None:
    account = Accountant(Policy(1, 0, filter="basic"))
    account.spend(PureDP(size))
    (row,) = account.history(1).to_arrow().to_pylist()
    assert size <= Fraction(repr(row["epsilon"])) <= size * (1 + Fraction(1, 10**15))


def test_what_a_kind_does_not_have_is_missing() -> None:
    account = Accountant(Policy(1, 1e-6))
    curve = RDP((2, 60), ("0.0001", "0.004"), "1e-12")
    for cost in (curve, Mechanism("sgd", 3, curve), Parallel((PureDP("0.01"), GDP("0.01"))), DiscreteGaussian(100)):
        account.spend(cost)
    rows = account.history(1).to_arrow().to_pylist()
    assert [row["kind"] for row in rows] == ["rdp", "mechanism", "parallel", "discrete_gaussian"]
    assert [row["delta"] for row in rows] == [1e-12, None, None, None]
    assert [row["mu"] for row in rows] == [None, None, None, 0.01]
    assert {row["epsilon"] for row in rows} == {None}


def test_a_ledger_has_its_refusals_seals_and_principals_in_the_table() -> None:
    with odo.connect("memory://", principal="ana") as ledger:
        account = ledger.open_account("a", Policy(1, 1e-6))
        account.spend(ApproxDP(0.1, 1e-9), note="visits")
        with pytest.raises(BudgetExceeded):
            account.spend(PureDP(7))
        account.close()
        history = account.history()
        rows = history.to_arrow().to_pylist()
        assert [(row["verb"], row["admitted"]) for row in rows] == [
            ("open", None),
            ("spend", True),
            ("refuse", False),
            ("close", None),
        ]
        assert [row["seal"] for row in rows] == [entry.seal for entry in history]
        assert {row["principal"] for row in rows} == {"ana"}
        assert rows[1]["price"] == history[1].entry.price
        assert [row["admitted"] for row in written(history)] == ["", "true", "false", ""]


def test_an_empty_history_has_the_columns_and_their_types() -> None:
    full = Accountant(Policy(1, 1e-6)).history()
    assert written(EMPTY) == []
    assert EMPTY.to_arrow().schema == full.to_arrow().schema
    assert (EMPTY.to_pandas().dtypes == full.to_pandas().dtypes).all()
    assert [*EMPTY.to_pandas().columns] == [*COLUMNS]


def test_csv_goes_to_a_path_or_a_file_that_is_open_for_text(tmp_path: Path) -> None:
    account = Accountant(Policy(1, 1e-6), name="é")
    account.spend(PureDP(0.1), note="\udce9 café")
    for path in (tmp_path / "a.csv", str(tmp_path / "b.csv")):
        account.history().to_csv(path)
        account.history().to_csv(path)  # a notebook is run again
        with Path(path).open(encoding="utf-8", newline="") as file:
            assert [row["note"] for row in csv.DictReader(file)] == ["", "\\udce9 café"]
    for wrong in (io.BytesIO(), None, 3):
        with pytest.raises(InvalidArgument, match="file must be a path, or a file that is open for text"):
            account.history().to_csv(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("library", "method"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_a_missing_library_is_named(library: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=r"pip install 'odograph\[tables\]'"):
        getattr(EMPTY, method)()


def test_every_column_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in COLUMNS if f"| `{name}` |" not in text] == []
