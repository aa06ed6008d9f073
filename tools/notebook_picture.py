"""Draw the pictures of docs/how-to/notebook.md: cells of a notebook that end in values, as Chromium shows them.

Set CHROMIUM to the path of the browser if it is not on PATH.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "how-to" / "images"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
WIDTH = 880
# Each picture shows the cells from its name on; what comes before the first is run and not shown.
CELLS = """
import odograph as odo

policy = odo.Policy(epsilon=1, delta=1e-6, privacy_unit="patient")
ledger = odo.connect("sqlite:///notebook.db", principal="ana")
ward = ledger.open_account("ward", policy)
# %% notebook-values
ward.spend(odo.PureDP(0.05), key="how many", note="how many patients")
# %%
ward.decide(odo.PureDP(5))
# %%
ward.spend(odo.gaussian(sigma=25), key="sum of ages", note="sum of ages, over 60")
ward.reading()
# %%
ward.history()
# %% notebook-card
ward
"""


def pictures() -> dict[str, list[str]]:
    """Return the cells of each picture, by its name."""
    found: dict[str, list[str]] = {}
    for part in CELLS.split("# %%")[1:]:
        name, _, code = part.partition("\n")
        if name.strip():
            found[name.strip()] = []
        found[[*found][-1]].append(code.strip())
    return found


def main() -> None:
    """Run the notebook, and draw each picture from the page that Jupyter makes of its cells."""
    shown = pictures()
    cells = [CELLS.partition("# %%")[0].strip(), *(code for codes in shown.values() for code in codes)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    executed = {cell.source: cell for cell in notebook.cells}
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        for name, codes in shown.items():
            part = nbformat.v4.new_notebook(cells=[executed[code] for code in codes])
            content, _ = HTMLExporter(template_name="lab", theme="light").from_notebook_node(part)
            page = browser.new_page(viewport={"width": WIDTH, "height": 100}, device_scale_factor=1.5)
            page.route("**/*", lambda route: route.abort())
            page.set_content(content, wait_until="domcontentloaded")
            page.screenshot(path=IMAGES / f"{name}.png", full_page=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
