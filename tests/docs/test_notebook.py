"""The notebook runs from top to bottom in a fresh kernel and says what its stored outputs say."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).parents[2] / "examples" / "filters_and_odometers.ipynb"
_PATH = re.compile(r"/(home|root|tmp|usr|work)/|[A-Z]:\\\\")


def executed(notebook: Any, folder: Path) -> Any:  # noqa: ANN401  untyped library
    fresh = copy.deepcopy(notebook)
    for cell in fresh.cells:
        cell.outputs = []
    NotebookClient(fresh, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return fresh


def texts(notebook: Any) -> list[str]:  # noqa: ANN401  untyped library
    """Return what each cell of code prints or shows as text; pictures and cards may look different elsewhere.

    A cell's outputs are joined: how many messages a kernel sends for what is printed depends on its timing.
    """

    def text(output: Any) -> str:  # noqa: ANN401  untyped library
        return str(output.get("text") or output.get("data", {}).get("text/plain"))

    return ["".join(map(text, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def faults(notebook: Any) -> list[str]:  # noqa: ANN401  untyped library
    """Return what a stored notebook must not hold: cells not run, and the paths and times of a machine."""
    found = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and cell.execution_count is None:
            found.append(f"cell {number} was not run")
        if cell.metadata:
            found.append(f"cell {number} has metadata")
    if _PATH.search("\n".join(texts(notebook))):
        found.append("a path")
    return found


@pytest.fixture(scope="module")
def stored() -> Any:  # noqa: ANN401  untyped library
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_runs_and_says_what_is_stored(stored: Any, tmp_path: Path) -> None:  # noqa: ANN401  untyped library
    assert texts(executed(stored, tmp_path)) == texts(stored)


def test_it_is_stored_with_its_outputs_and_nothing_of_a_machine(stored: Any) -> None:  # noqa: ANN401  untyped library
    assert faults(stored) == []
    shown = [output.data for cell in stored.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in data for data in shown) == 2
    assert sum("text/html" in data for data in shown) == 1


def test_what_it_teaches_is_in_the_outputs(stored: Any) -> None:  # noqa: ANN401  untyped library
    text = "\n".join(texts(stored))
    rates = [float(line.split(" in ")[1].split("%")[0]) for line in text.splitlines() if "was passed" in line]
    # In 20,000 runs a rate of 5% varies by .15%.
    own, least, pointwise = rates
    assert own < 4
    assert 5.6 < least < 8
    assert pointwise > 15
    assert text.count("covered: True") == 1
    assert "read-only copy" in text


def test_an_error_or_another_output_is_caught(stored: Any, tmp_path: Path) -> None:  # noqa: ANN401  untyped library
    broken = copy.deepcopy(stored)
    code = [cell for cell in broken.cells if cell.cell_type == "code"]
    code[0].source, code[1].source = "print('something else')", "1 / 0"
    broken.cells = code[:1]
    assert texts(executed(broken, tmp_path)) != texts(stored)[:1]
    broken.cells = code[:2]
    with pytest.raises(CellExecutionError, match="division by zero"):
        executed(broken, tmp_path)
    code[0].metadata = {"execution": {"iopub.execute_input": "2026-01-01"}}
    code[0].outputs = [nbformat.v4.new_output("stream", text="saved to /home/ana/privacy.db")]
    code[1].execution_count = None
    assert faults(broken) == ["cell 0 has metadata", "cell 1 was not run", "a path"]
