"""A notebook whose cells end in every value, as its reader sees it: in Chromium, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import nbformat
import pytest
from browser_window import artifacts, launch_chromium
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Page

CELLS = """
import odograph as odo

policy = odo.Policy(epsilon=1, delta=1e-6, privacy_unit="patient")
policy
# %%
ledger = odo.connect("sqlite:///notebook.db", principal="ana")
ward = ledger.open_account("ward", policy)
west = ledger.open_account("ward-west", policy, parent=ward)
west.spend(odo.PureDP(0.05), key="q-17", note="how many")
# %%
west.spend(odo.PureDP(0.05), key="q-17", note="how many")
# %%
held = ward.reserve(odo.gaussian(sigma=25), expires=3600, key="sum-of-ages", note="=SUM(A1) <b>by hand</b>")
held
# %%
ward.decide(odo.PureDP(0.1))
# %%
ward.decide(odo.PureDP(5))
# %%
ward.quote([odo.PureDP(0.1), odo.GDP(0.05), odo.PureDP(4)])
# %%
ward.reading()
# %%
ward.compare()[1]
# %%
ward.calibrate(odo.laplace, sensitivity=3, times=20)
# %%
for i in range(40):
    ward.spend(odo.PureDP(0.001), note=f"note {i} " + "with many words " * (20 * (i == 39)) + "x" * 200 * (i == 38))
ward.history()
# %%
ward.history(-1)[0]
# %%
ledger.verify()
# %%
ledger.checkpoint()
# %%
held.commit()
# %%
odo.session(ward)
# %%
ward.interact(lambda: len, cost=odo.PureDP(0.01))
# %%
ledger.open_account("ward-2", policy, successor_of=ward).lifetime
# %%
people = odo.Population.create("telemetry", policy, ledger=ledger, location="people", ids=100)
participants = people.charge(odo.PureDP(0.1), key="monday")
people
# %%
participants
# %%
participants.receipt
# %%
odo.dpsgd_policy(3, 1e-6, sample_rates=[0.01], noise_multipliers=[1, 2.5], filter="renyi")
# %%
odo.compile_policy(odo.Policy(rho=0.5))
# %%
ward
# %%
ledger
"""
WIDE, NARROW = 1000, 560  # pixels
THEMES = ("light", "dark")
HTML = ".jp-RenderedHTMLCommon[data-mime-type='text/html']"

# The values that are wider than the window, a line each.
LAYOUT = f"""() => [...document.querySelectorAll("{HTML} > div")]
    .filter((shown) => shown.scrollWidth > shown.clientWidth).map((shown) => shown.innerText.slice(0, 60))"""
# The texts of values that are hard to read, a line each, as axe-core measures their contrast.
CONTRAST = f"""async () => {{
    const found = await axe.run("{HTML}", {{ runOnly: ["color-contrast"], resultTypes: ["violations"] }});
    return found.violations.flatMap((one) => one.nodes.map((node) => node.html.slice(0, 99)));
}}"""


def executed(folder: Path, cells: str) -> Any:  # noqa: ANN401  untyped library
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells.split("# %%")]
    )
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401  untyped library
    return executed(tmp_path_factory.mktemp("values"), CELLS)


@pytest.fixture(scope="module")
def chromium(notebook: Any) -> Iterator[Browser]:  # noqa: ANN401, ARG001  its event loop ends before Playwright's begins
    with launch_chromium() as browser:
        yield browser


def shown_in(browser: Browser, notebook: Any, theme: str) -> Page:  # noqa: ANN401  untyped library
    """Open the page that Jupyter makes of a notebook; what it would fetch from elsewhere is refused."""
    content, _ = HTMLExporter(template_name="lab", theme=theme).from_notebook_node(notebook)
    page = browser.new_page(viewport={"width": WIDE, "height": 900})
    page.route("**/*", lambda route: route.abort())
    page.set_content(content, wait_until="domcontentloaded")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))
    return page


def test_every_cell_ends_in_html_and_in_one_line(notebook: Any) -> None:  # noqa: ANN401  untyped library
    assert len(notebook.cells) == CELLS.count("# %%") + 1
    for cell in notebook.cells:
        (output,) = cell.outputs
        assert "<div" in output.data["text/html"], cell.source
        assert "\n" not in output.data["text/plain"], cell.source
        most = 240 if output.data["text/plain"].startswith("<Policy") else 120  # what its reserve gives
        assert len(output.data["text/plain"]) <= most, cell.source


@pytest.mark.parametrize("theme", THEMES)
def test_the_page_is_readable_and_no_wider_than_the_window(
    chromium: Browser,
    notebook: Any,  # noqa: ANN401  untyped library
    theme: str,
) -> None:
    page = shown_in(chromium, notebook, theme)
    page.screenshot(path=artifacts() / f"notebook-{theme}.png", full_page=True)
    assert page.evaluate(LAYOUT) == page.evaluate(CONTRAST) == []
    assert page.locator(HTML).get_by_text("=SUM(A1) <b>by hand</b>").count() == 1  # in the history, as text
    page.set_viewport_size({"width": NARROW, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()


@pytest.mark.parametrize(
    ("style", "theme", "fault"),
    [("width:3000px", "light", "text"), ("color:#333", "dark", "color:#333"), ("color:#ccc", "light", "color:#ccc")],
)
def test_what_is_too_wide_or_hard_to_read_is_found(chromium: Browser, style: str, theme: str, fault: str) -> None:
    """Negative control: a cell with a fixed width, or a color for the other theme."""
    output = nbformat.v4.new_output("display_data", {"text/html": f'<div><div style="{style}">text</div></div>'})
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("value", outputs=[output])])
    page = shown_in(chromium, broken, theme)
    assert any(fault in one for one in [*page.evaluate(LAYOUT), *page.evaluate(CONTRAST)])
    page.close()
