"""The public names: few, sorted, loaded when they are used, each in the reference with an example that runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import odograph

ROOT = Path(__file__).parents[2]
PAGES = [path.read_text() for path in sorted((ROOT / "docs/reference/api").glob("*.md"))]
MOST = 45

_EXAMPLE = re.compile(r"```python\n(.*?)```\s*```text\n", re.DOTALL)  # tests/docs runs these
_DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|py:\w+):: (?:odograph\.)?(\w+)$", re.MULTILINE)


def attributes(code: str) -> set[str]:
    """The names of the package that an example uses."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "odo"}


def undocumented(pages: list[str], names: list[str]) -> list[str]:
    """The names without a description or without an example."""
    described = {name for page in pages for name in _DIRECTIVE.findall(page)}
    shown = {name for page in pages for code in _EXAMPLE.findall(page) for name in attributes(code)}
    return sorted({*names} - (described & shown))


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has loaded after some code."""
    ask = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)  # noqa: S603
    return {*done.stdout.split()}


def test_the_names_are_few_and_sorted() -> None:
    names = odograph.__all__
    # As ruff sorts them: constants, then classes, then functions and modules.
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert len({*names}) == len(names) <= MOST


def test_every_name_is_there_and_is_where_the_package_says() -> None:
    for name in odograph.__all__:
        found = getattr(odograph, name)
        if isinstance(found, ModuleType):
            assert found.__name__.rpartition(".")[2] == name
        else:
            assert found.__module__ == odograph._DEFINED_IN[name]  # noqa: SLF001  the package's own table
    assert {*odograph.__all__} <= {*dir(odograph)}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", odograph.__version__)
    with pytest.raises(AttributeError, match="module 'odograph' has no attribute 'Acountant'"):
        odograph.Acountant  # noqa: B018  the access is what raises


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "src/odograph/__init__.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    modules = {alias.name: node.module for node in imported for alias in node.names} | {"import_module": None}
    del modules["import_module"]
    assert {*modules} == {*odograph.__all__}
    for name, module in odograph._DEFINED_IN.items():  # noqa: SLF001  the package's own table
        assert modules[name] == module
    for name, module in odograph._MODULES.items():  # noqa: SLF001  the package's own table
        assert f"{modules[name]}.{name}" == module


def test_every_name_is_in_the_reference_with_an_example() -> None:
    assert undocumented(PAGES, odograph.__all__) == []


@pytest.mark.parametrize(
    "page",
    [
        "```python\nodo.connect()\n```\n\n```text\n```\n",
        ".. autofunction:: connect\n",
        ".. autofunction:: connect\n\n```python\nodo.connect()\n```\n",
        ".. autofunction:: connect\n\n```python\nconnect()\n```\n\n```text\n```\n",
    ],
)
def test_a_name_without_description_or_example_is_found(page: str) -> None:
    assert undocumented([page], ["connect"]) == ["connect"]


def test_importing_the_package_loads_nothing_that_is_not_used() -> None:
    alone, account = loaded_by("import odograph"), loaded_by("import odograph; odograph.Accountant")
    assert {name for name in alone if name.startswith("odograph.")} == set()
    assert not {"numpy", "scipy", "sqlite3"} & alone
    assert "numpy" in account  # so the check above would see it
    assert not {"scipy", "sqlite3", "odograph.population", "odograph.ledger.stores.sqlite"} & account


@pytest.mark.parametrize("name", ["session", "connect"])
def test_a_submodule_never_takes_the_place_of_a_function(name: str) -> None:
    """A module `odograph.session` would replace the function `odograph.session` when something imports it."""
    assert not (ROOT / f"src/odograph/{name}.py").exists()
    assert {path.stem for path in (ROOT / "src/odograph").glob("*.py")} & {*odograph.__all__} == {"errors"}
