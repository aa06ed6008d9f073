"""The rules of the layout, as tests. Each checker is also run on a sample that breaks its rule."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest

import odograph
from odograph import errors
from odograph.core.filters import FILTERS, METERS, TOTALS
from odograph.core.meters import DeltaMeter, MomentMeter

SOURCE = Path(odograph.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A module may import from its own layer and from the layers below it.
LAYERS = {
    "concurrency": 1,
    "errors": 1,
    "core": 1,
    "compile": 2,
    "display": 1,
    "figures": 2,
    "training": 3,
    "account": 4,
    "accountant": 4,
    "ledger": 4,
    "client": 5,
    "integrations": 4,
    "population": 5,
    "sessions": 4,
    "connection": 6,
    "service": 7,
    "cli": 8,
}

# Where a heavy dependency may be imported, by path prefix.
HEAVY: dict[str, str | tuple[str, ...]] = {
    "bokeh": "service/dashboard/",
    "diffprivlib": "integrations/diffprivlib.py",
    "dp_accounting": "integrations/dp_accounting.py",
    "duckdb": "population/engines/duckdb.py",
    "fsspec": "population/version_store.py",
    "httpx": ("client/", "connection.py"),
    "jinja2": "service/dashboard/",
    "matplotlib": "figures.py",
    "msgspec": "service/",
    "opacus": "integrations/opacus.py",
    "opendp": "integrations/opendp.py",
    "pandas": "ledger/results.py",
    "prometheus_client": "service/monitoring.py",
    "psycopg": ("connection.py", "ledger/stores/postgres.py", "service/key_store.py"),
    "pyarrow": ("ledger/results.py", "population/input_tables.py"),
    "pyspark": "population/engines/spark",
    "rich": "cli/",
    "s3fs": "population/version_store.py",
    "starlette": ("cli/service.py", "service/"),
    "statsmodels": "cli/demo.py",
    "tmlt": "integrations/tumult.py",
    "torch": "integrations/opacus.py",
    "typer": "cli/",
    "uvicorn": "service/server.py",
    "yaml": "cli/accounts.py",
}

# Input and output, the clock, randomness, logging: none of it in core.
IMPURE = {"datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "subprocess", "time", "uuid"}

THEOREMS = ["conversions", "mechanisms", "odometers", "theory"]
# Functions there that prove nothing: they read, write and name.
PLAIN = {
    "odometer_from_dict",
    "odometer_to_dict",
    "sampling_settings",
    "standard_odometer",
    "standard_odometers",
    "subsampled_gaussian_name",
}


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module imported, also by `import_module("...")` and the project's own loaders."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name):
            first = node.args[0]
            if node.func.id in {"load", "import_module", "__import__"} and isinstance(first, ast.Constant):
                yield str(first.value)


def layer(module: str) -> int:
    parts = module.split(".")
    return LAYERS[parts[1]] if len(parts) > 1 and parts[1] in LAYERS else -1


def upward(path: str, source: str) -> list[str]:
    """Imports that go from a lower layer to a higher one."""
    own = LAYERS[path.split("/", maxsplit=1)[0].removesuffix(".py")]
    return [m for m in imports(ast.parse(source)) if m.startswith("odograph.") and layer(m) > own]


def misplaced(path: str, source: str) -> list[str]:
    """Heavy imports outside their own file."""
    found = {m.split(".")[0] for m in imports(ast.parse(source))}
    return sorted(lib for lib in found if lib in HEAVY and not path.startswith(HEAVY[lib]))


def impurities(source: str) -> list[str]:
    """What core must not touch."""
    tree = ast.parse(source)
    bad = [m for m in imports(tree) if m.split(".")[0] in IMPURE or m.startswith("numpy.random")]
    calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
    bad += [f.id for f in calls if isinstance(f, ast.Name) and f.id in {"open", "print", "input"}]
    bad += ["random" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "random"]
    return bad


def unexported(source: str) -> set[str]:
    """Public definitions that `__all__` lacks, and names in it that are not there."""
    tree = ast.parse(source)
    exported: set[str] = set()
    defined: set[str] = set()
    imported: set[str] = set()
    alternatives = [one for node in tree.body if isinstance(node, ast.If) for one in (*node.body, *node.orelse)]
    for node in (*tree.body, *alternatives):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            imported |= {(alias.asname or alias.name) for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.id for t in targets if isinstance(t, ast.Name)}
            if "__all__" in names and node.value is not None:
                exported = set(ast.literal_eval(node.value))
            else:
                imported |= names
    public = {name for name in defined if not name.startswith("_")}
    return (public - exported) | (exported - defined - imported)


def uncited(documentation: str | None) -> bool:
    words = {line.split(maxsplit=1)[0] for line in (documentation or "").splitlines() if line.strip()}
    return not {"Theorem:", "Assumes:"} <= words


@pytest.mark.parametrize("path", [f for f in FILES if f != SOURCE / "__init__.py"], ids=name_of)
def test_imports_go_downward_and_heavy_ones_stay_in_their_file(path: Path) -> None:
    source = path.read_text()
    assert upward(name_of(path), source) == []
    assert misplaced(name_of(path), source) == []


@pytest.mark.parametrize("path", sorted((SOURCE / "core").rglob("*.py")), ids=name_of)
def test_core_is_pure(path: Path) -> None:
    source = path.read_text()
    assert impurities(source) == []
    outside = {m.split(".")[0] for m in imports(ast.parse(source))} - {"odograph", "numpy", "scipy"}
    assert outside <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_all_is_complete(path: Path) -> None:
    assert unexported(path.read_text()) == set()


def test_every_theorem_is_cited_with_its_assumption() -> None:
    functions: list[Callable[..., object]] = [
        f for name in THEOREMS for f in _public_functions(f"odograph.core.{name}")
    ]
    functions += [one.alternatives for one in (FILTERS | TOTALS).values()]
    functions += [kind.price for kind in METERS.values() if kind not in {DeltaMeter, MomentMeter}]
    missing = [repr(f) for f in functions if uncited(inspect.getdoc(f))]
    assert missing == []
    assert len(functions) > 50


def _public_functions(module: str) -> list[FunctionType]:
    loaded = importlib.import_module(module)
    found = (getattr(loaded, name) for name in loaded.__all__)
    return [item for item in found if inspect.isfunction(item) and item.__name__ not in PLAIN]


def test_error_table_is_complete_and_drawn() -> None:
    def tree(cls: type[errors.OdographError]) -> set[type[errors.OdographError]]:
        return {cls}.union(*(tree(sub) for sub in cls.__subclasses__()))

    known = {cls for cls in tree(errors.OdographError) if cls.__module__ == errors.__name__}
    assert set(errors.ERROR_TABLE) == known
    assert all(cls.__name__ in (errors.__doc__ or "") for cls in known)
    assert all(row.exit_code > 0 and 400 <= row.status < 600 for row in errors.ERROR_TABLE.values())


def test_importing_the_library_loads_nothing_heavy() -> None:
    code = f"import sys, odograph; print(*[m for m in {sorted(HEAVY)!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == ""


def test_the_checkers_catch_what_they_look_for() -> None:
    assert upward("core/fixed_point.py", "from odograph.compile import find_budget") == [
        "odograph.compile",
        "odograph.compile.find_budget",
    ]
    assert misplaced("core/fixed_point.py", "import matplotlib.pyplot") == ["matplotlib"]
    assert misplaced("compile.py", "load('dp_accounting.rdp')") == ["dp_accounting"]
    assert impurities("import time\nopen('x')\nrng = np.random.default_rng()") == ["time", "open", "random"]
    assert unexported("__all__ = ['a']\ndef b(): ...") == {"a", "b"}
    assert uncited("Return x.\n\nTheorem: y.")
