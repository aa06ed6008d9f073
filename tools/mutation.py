"""Mutation testing of the modules that must not be wrong: each change must make some test fail.

A mutant is a module with one comparison, operator, constant, condition or statement changed. The tests of the module
run against each, in a copy of the tree. A mutant that passes them is a survivor: either a test is missing, or the
change makes no difference, and `mutation_survivors.toml` explains why.

It is not mutmut or cosmic-ray because of that list: a reason belongs to one mutant by what it changes, not to a line
or a number, so it outlives edits around it and is reported when it is no longer needed; and mutmut since version 3
leaves out code outside of functions.

    python tools/mutation.py [MODULE ...] [--jobs 2] [--only NUMBER ...]
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/odograph")
SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
SLOWDOWN_LIMIT = 5  # times the duration of the tests without a mutant: a slower mutant is caught
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["hypothesis", "mpmath", "numpy", "psycopg", "pytest", "scipy.optimize", "starlette"])
# The tests of a module, the quickest first.
TESTS = {
    "core/gate.py": ("tests/core/test_decisions.py",),
    "core/fixed_point.py": (
        "tests/core/test_fixed_point.py",
        "tests/core/test_prices.py",
        "tests/core/test_conversions.py",
        "tests/core/test_decisions.py",
        "tests/golden/test_golden.py",
    ),
    "core/filters/renyi.py": ("tests/core/test_policy.py",),
    "core/filters/zcdp.py": ("tests/core/test_policy.py", "tests/core/test_prices.py"),
    "core/filters/gdp.py": (
        "tests/core/test_gdp_filter.py",
        "tests/core/test_policy.py",
        "tests/core/test_prices.py",
    ),
    "core/filters/paper.py": ("tests/core/test_policy.py", "tests/core/test_prices.py"),
    "ledger/engine.py": (
        "tests/ledger/test_engine.py",
        "tests/ledger/test_fair_queue.py",
        "tests/ledger/crash/test_group_commit.py",
    ),
    "population/gate.py": ("tests/population/test_population_gate.py",),
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
    """A change: where, what it is called, also after lines have moved, and the module after it."""

    module: str
    line: int
    called: str
    source: str


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Make every change of a module, one at a time."""
    count = len([*_changes(ast.parse(source))])
    names: Counter[str] = Counter()
    for number in range(count):
        tree = ast.parse(source)
        change = [*_changes(tree)][number]
        before = ast.unparse(change.node)
        change.make()
        after = ast.unparse(change.node)
        if after == before:  # it is changed in what holds it
            after = "(nothing)" if isinstance(change.node, ast.stmt) else f"not ({before})"
        called = f"{module}, {change.within}: {before} -> {after}"
        names[called] += 1
        called += f" (number {names[called]})" if names[called] > 1 else ""
        yield Mutant(module, change.node.lineno, called, ast.unparse(ast.fix_missing_locations(tree)))


class _Change(NamedTuple):
    node: ast.expr | ast.stmt  # what is shown
    owner: Any  # what is changed: this, in its field or its place
    field: str | int
    value: object
    within: str = "the module"

    def make(self) -> None:
        if isinstance(self.field, int):
            self.owner[self.field] = self.value
        else:
            setattr(self.owner, self.field, self.value)


def _changes(node: ast.AST, within: str = "the module") -> Iterator[_Change]:
    """Walk a tree, and leave out what says nothing when it runs: annotations, docstrings, messages of errors."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        within = node.name if within == "the module" else f"{within}.{node.name}"
    for change in _of(node):
        yield change._replace(within=within)
    for name, value in ast.iter_fields(node):
        if name in _SILENT or isinstance(node, ast.Raise):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring
            if isinstance(value, list) and isinstance(child, ast.Expr | ast.AugAssign | ast.Continue | ast.Break):
                yield _Change(child, value, i, ast.Pass(), within)
            yield from _changes(child, within)


def _of(node: ast.AST) -> Iterator[_Change]:
    """Make the changes of one node."""
    match node:
        case ast.Compare():
            for i, operator in enumerate(node.ops):
                yield _Change(node, node.ops, i, _SWAPS[type(operator)]())
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in _SWAPS:
            yield _Change(node, node, "op", _SWAPS[type(node.op)]())
        case ast.UnaryOp(op=ast.USub()):
            yield _Change(node, node, "op", ast.UAdd())
        case ast.UnaryOp(op=ast.Not()):
            yield _Change(node, node, "operand", _not(node.operand))
        case ast.Constant(value=bool() | int() as value):
            yield _Change(node, node, "value", not value if isinstance(value, bool) else value + 1)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(
            node.test, ast.Compare | ast.BoolOp | ast.UnaryOp
        ):
            yield _Change(node.test, node, "test", _not(node.test))


def _not(node: ast.expr) -> ast.UnaryOp:
    return ast.UnaryOp(ast.Not(), node)


def passes(tree: Path, module: str, most: float | None = None) -> bool:
    """Run the tests of a module in a copy of the tree; say whether all of them pass, in at most so many seconds.

    Without `most` the module is as it should be, and its bytecode may be kept.
    """
    process = _FORKS.Process(target=_run, args=(tree, TESTS[module]), kwargs={"unchanged": most is None})
    process.start()
    process.join(most)
    process.kill()
    process.join()
    return process.exitcode == 0


def _run(tree: Path, tests: tuple[str, ...], *, unchanged: bool) -> None:
    """Be the process that runs the tests, and end as they do."""
    os.chdir(tree)
    # With CI the drawn examples are the same each time: whether a mutant survives is not a matter of luck.
    os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"}
    sys.path.insert(0, str(tree / "src"))
    sys.dont_write_bytecode = not unchanged  # a mutant's might pass for the next one's, within a second
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def survives(mutant: Mutant, tree: Path, most: float) -> bool:
    """Return whether all tests of a module pass against a mutant of it."""
    path = tree / PACKAGE / mutant.module
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        return passes(tree, mutant.module, most)
    finally:
        path.write_text(original)


def main() -> None:
    """Print the survivors that have no explanation, and end with an error if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[*TESTS], help=f"of {', '.join(TESTS)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, nargs="*", help="these mutants of the first module")
    chosen = parser.parse_args()
    reasons = tomllib.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    made = [one for name in chosen.modules for one in mutants(name, (ROOT / PACKAGE / name).read_text())]
    known = {one.called for one in made}
    unasked = set(TESTS) - set(chosen.modules)
    idle = [name for name in reasons if name not in known and name.split(",")[0] not in unasked]
    numbers = range(len(made)) if chosen.only is None else chosen.only
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(chosen.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(chosen.jobs):
            tree = Path(name) / str(job)
            for part in ("src", "tests", "examples"):
                shutil.copytree(ROOT / part, tree / part)
            shutil.copy(ROOT / "pyproject.toml", tree)
            trees.put(tree)
        most = {}
        for module in chosen.modules:
            began = monotonic()
            if not passes(tree, module):
                sys.exit(f"the tests of {module} fail before anything is changed")
            most[module] = SLOWDOWN_LIMIT * (monotonic() - began)

        def try_mutant(number: int) -> bool:
            tree = trees.get()
            try:
                return survives(made[number], tree, most[made[number].module])
            finally:
                trees.put(tree)

        left = 0
        for number, alive in zip(numbers, pool.map(try_mutant, numbers), strict=True):
            called = made[number].called
            word = "caught" if not alive else "explained" if called in reasons else "SURVIVED"
            idle += [called] if called in reasons and not alive else []
            left += word == "SURVIVED"
            print(f"{number:4} {word:9} line {made[number].line}: {called}", flush=True)
    for name in idle:
        print(f"a reason that is not needed, because the mutant is caught or does not exist: {name}")
    print(f"{len(numbers)} mutants, {left} survived without an explanation, {len(idle)} reasons are not needed")
    sys.exit(1 if left or idle else 0)


if __name__ == "__main__":
    main()
