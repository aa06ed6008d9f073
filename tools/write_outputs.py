"""Write what the examples print into the documents and the notebook: after a change of outputs that is meant.

`tests/docs` compares the two. Examples that need a service, a database or torch are left out: their outputs are
edited by hand, as is the output of the demo in the README.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("examples/*.ipynb")]
)
BY_HAND: Final = {"opacus.md", "postgresql.md", "service.md"}

_EXAMPLE: Final = re.compile(r"(```python\n(.*?)```\s*```text\n)(.*?)(```)", re.DOTALL)


def with_outputs(text: str) -> str:
    """Return a document in which each example is followed by what it prints; one goes on where another stopped."""
    names: dict[str, object] = {}

    def run(example: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(example[2], "document", "exec"), names)  # noqa: S102  the document's example
        return example[1] + printed.getvalue() + example[4]

    return _EXAMPLE.sub(run, text)


def with_results(text: str) -> str:
    """Return a notebook that was run from top to bottom, without the times of the run."""
    notebook = nbformat.reads(text, as_version=4)
    about = notebook.metadata.copy()
    NotebookClient(notebook, timeout=300).execute()
    notebook.metadata = about
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = _joined(cell.outputs)
    return str(nbformat.writes(notebook)) + "\n"


def _joined(outputs: list[Any]) -> list[Any]:
    """Join what was printed in a row: how many messages a kernel sends for it depends on its timing."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream" and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main() -> None:
    """Rewrite the documents named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS)
    for document in parser.parse_args().documents:
        if document.name in BY_HAND:
            continue
        path = document.resolve()
        text = path.read_text()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # an example may write a file
            after = with_results(text) if path.suffix == ".ipynb" else with_outputs(text)
        if after != text:
            path.write_text(after)
            print(os.path.relpath(path, ROOT))


if __name__ == "__main__":
    main()
