"""Mutation testing of what must not be wrong: change one thing at a time, and see some test go red.

A mutant is a module with one comparison, operator, constant, condition or statement changed. The tests that speak of
the module run against each, in a copy of the tree. A mutant that they let pass is a survivor: a test is missing, or
the change makes no difference, and then `mutation_survivors.toml` says why.

    python tools/mutation.py [MODULE ...] [--jobs 2] [--only NUMBER]
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/odograph")
SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
TIMEOUT = 300  # seconds: a mutant that does not end is caught
# The tests that speak of a module, the quickest first.
TESTS = {
    "core/decide.py": (
        "tests/unit/test_decide_many.py",
        "tests/property/test_gate.py",
        "tests/unit/test_accountant.py",
    ),
    "core/units.py": ("tests/unit/test_units.py", "tests/unit/test_guarantees.py", "tests/property/test_prices.py"),
    "core/rules.py": ("tests/unit/test_policy.py", "tests/property/test_prices.py", "tests/unit/test_accountant.py"),
    "ledger/writer.py": ("tests/crash/test_queue.py", "tests/crash/test_durability.py"),
    "population/kernel.py": ("tests/population/test_kernel.py", "tests/population/test_dense.py"),
}
_SILENT = {"annotation", "returns", "decorator_list"}
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutant(NamedTuple):
    """A change: where, what, and the module after it."""

    module: str
    line: int
    before: str
    after: str
    source: str

    @property
    def called(self) -> str:
        """What it is called, also after lines have moved."""
        return f"{self.module}: {self.before} -> {self.after}"


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Make every change of a module, one at a time."""
    count = len([*_changes(ast.parse(source))])
    for number in range(count):
        tree = ast.parse(source)
        node, parent, change = [*_changes(tree)][number]
        before = ast.unparse(parent)
        change()
        after = "(nothing)" if isinstance(node, ast.stmt) else ast.unparse(parent)
        after = f"not ({before})" if after == before else after  # a condition, turned round in what holds it
        ast.fix_missing_locations(tree)
        yield Mutant(module, getattr(node, "lineno", getattr(parent, "lineno", 0)), before, after, ast.unparse(tree))


class _Change(NamedTuple):
    node: ast.AST
    parent: ast.AST  # what is shown
    fields: tuple[tuple[object, str, object], ...]

    def __call__(self) -> None:
        for owner, name, value in self.fields:
            if isinstance(owner, list):
                owner[int(name)] = value
            else:
                setattr(owner, name, value)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, _Change]]:
    """Walk a tree, and leave out what says nothing when it runs: annotations, docstrings, messages of errors."""
    for change in _of(node):
        yield change.node, change.parent, change
    for name, value in ast.iter_fields(node):
        if name in _SILENT or isinstance(node, ast.Raise):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(value, list) and isinstance(child, ast.Expr | ast.AugAssign | ast.Continue | ast.Break):
                yield child, child, _Change(child, child, ((value, str(i), ast.Pass()),))
            yield from _changes(child)


def _of(node: ast.AST) -> Iterator[_Change]:
    """Make the changes of one node."""
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                yield _Change(node, node, ((node.ops, str(i), _SWAPS[type(operator)]()),))
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in _SWAPS:
            yield _Change(node, node, ((node, "op", _SWAPS[type(node.op)]()),))
        case ast.UnaryOp(op=ast.USub()):
            yield _Change(node, node, ((node, "op", ast.UAdd()),))
        case ast.UnaryOp(op=ast.Not()):
            yield _Change(node, node, ((node, "operand", _not(node.operand)),))
        case ast.Constant(value=bool() | int() as value):
            yield _Change(node, node, ((node, "value", not value if isinstance(value, bool) else value + 1),))
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Compare | ast.BoolOp):
            yield _Change(node.test, node.test, ((node, "test", _not(node.test)),))


def _not(node: ast.expr) -> ast.UnaryOp:
    return ast.UnaryOp(ast.Not(), node)


def survives(mutant: Mutant, tree: Path) -> bool:
    """Run the tests of a module against a mutant of it; say whether all of them pass."""
    path = tree / PACKAGE / mutant.module
    original = path.read_text()
    path.write_text(mutant.source)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS[mutant.module]]
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return False
    finally:
        path.write_text(original)
    return done.returncode == 0


def main() -> None:
    """Print the survivors that nobody has explained, and end with an error if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[*TESTS], help=f"of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="one mutant of the first module")
    chosen = parser.parse_args()
    explained = set(tomllib.loads(SURVIVORS.read_text())) if SURVIVORS.exists() else set()
    made = [one for name in chosen.modules for one in mutants(name, (ROOT / PACKAGE / name).read_text())]
    made = made if chosen.only is None else [made[chosen.only]]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(chosen.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(chosen.jobs):
            tree = Path(name) / str(job)
            for part in ("src", "tests", "examples"):
                shutil.copytree(ROOT / part, tree / part)
            shutil.copy(ROOT / "pyproject.toml", tree)
            trees.put(tree)

        def tried(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                return survives(mutant, tree)
            finally:
                trees.put(tree)

        left = []
        for number, (mutant, alive) in enumerate(zip(made, pool.map(tried, made), strict=True)):
            word = "explained" if mutant.called in explained else "SURVIVED" if alive else "caught"
            print(f"{number:4} {word:9} line {mutant.line}: {mutant.called}", flush=True)
            left += [mutant] if word == "SURVIVED" and alive else []
    print(f"{len(made)} mutants, {len(left)} survived that nobody explains")
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
