"""Documents run as tests: code prints what they say it prints, links point at files that exist."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tomllib
from pathlib import Path

import pytest
from service_server import ServiceThread

from odograph.errors import AccountExists

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])

_CODE = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.DOTALL)
_BLOCK = re.compile(r"```python\n(.*?)```(\s*```text\n)?", re.DOTALL)
_LINK = re.compile(r"\]\(([^)#]+)")


def broken_links(document: Path, text: str) -> list[str]:
    targets = [target for target in _LINK.findall(text) if "://" not in target]
    return [target for target in targets if not (document.parent / target).exists()]


def printed(code: str, names: dict[str, object] | None = None) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "document", "exec"), {} if names is None else names)  # noqa: S102  the document's example
    return out.getvalue()


def unchecked(text: str) -> list[str]:
    """Return the code that is not followed by what it prints: nothing would run it."""
    return [code for code, rest in _BLOCK.findall(text) if not rest]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_all_code_is_followed_by_what_it_prints(document: Path) -> None:
    assert unchecked(document.read_text()) == []


def test_code_that_nothing_would_run_is_found() -> None:
    assert unchecked("```python\n1\n```\n\nand\n\n```text\n1\n```\n") == ["1\n"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_examples_print_what_the_document_says(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write a file
    if document.name == "service.md":
        service: ServiceThread = request.getfixturevalue("service")
        monkeypatch.setenv("ODOGRAPH_URL", service.url)
        monkeypatch.setenv("ODOGRAPH_TOKEN", service.token("owner"))
        monkeypatch.setenv("RUNNER_TOKEN", service.token("pipeline", "runner"))
    if document.name == "postgresql.md":
        monkeypatch.setenv("ODOGRAPH_URL", request.getfixturevalue("postgres_url"))
    if document.name == "opacus.md":
        pytest.importorskip("opacus", reason="torch is not installed: see `make test`")
    names: dict[str, object] = {}  # an example goes on where the one before it stopped
    for code, expected in _CODE.findall(document.read_text()):
        assert printed(code, names) == expected


def ran_again(text: str) -> tuple[list[str], list[str]]:
    """Return what the examples of a document print in an empty folder, and in the same folder by another process."""
    runs = []
    for _ in range(2):
        names: dict[str, object] = {}
        runs.append([printed(code, names) for code, _ in _CODE.findall(text)])
    return runs[0], runs[1]


def test_the_readme_can_be_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = ran_again((ROOT / "README.md").read_text())
    charged, again = "\nspent: ", "\nspent before, nothing was charged now: "
    assert [f"\n{text}".replace(charged, again) for text in first] == [f"\n{text}" for text in second]
    assert first != second  # it does charge something


def test_the_quickstart_can_be_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = ran_again((ROOT / "docs" / "quickstart.md").read_text())
    assert first[:-1] == second[:-1]
    assert "15.0% spent in 2 steps" in first[-1]
    assert "25.0% spent in 3 steps" in second[-1]  # what has no key is charged each time


@pytest.mark.parametrize(
    ("change", "error"),
    [((', key="open")', ")"), AccountExists), ((', key="q-17"', ""), AssertionError)],
    ids=["opened without a key", "charged without a key"],
)
def test_a_readme_that_cannot_be_run_twice_is_caught(
    change: tuple[str, str], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (ROOT / "README.md").read_text().replace(*change)
    copy = tmp_path / "README.md"
    copy.write_text(broken)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(error):
        test_the_readme_can_be_run_twice(tmp_path, monkeypatch)


def test_the_readme_has_an_example() -> None:
    assert _CODE.search((ROOT / "README.md").read_text())
    assert printed("print(1)") != "2\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_at_files(document: Path) -> None:
    assert broken_links(document, document.read_text()) == []


def test_a_broken_link_is_caught() -> None:
    assert broken_links(ROOT / "README.md", "[x](docs/nowhere.md)") == ["docs/nowhere.md"]


def test_every_make_target_that_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"`?make ([a-z-]+)`", path.read_text())}
    assert named <= targets


def test_the_glossary_is_short_and_alphabetical() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert rows[0] == "term"
    assert len(rows[1:]) <= 30
    assert rows[1:] == sorted(rows[1:])


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    minor = version.rpartition(".")[0]
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
    assert f"This is version {version}." in (ROOT / "README.md").read_text()
    assert f"this is version {minor}." in (ROOT / "docs" / "comparison.md").read_text()
    assert (ROOT / "docs" / "how-to" / f"upgrade-to-{minor}.md").exists()
