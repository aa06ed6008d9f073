"""Every error of the package has a row in the error table, says what was charged, and survives a worker process."""

from __future__ import annotations

import ast
import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest

import odograph as odo
from odograph import errors
from odograph.client.transport import Refusal
from odograph.errors import ERROR_TABLE, BudgetExceeded, LedgerBusy, OdographError, OutcomeUnknown, listed_as
from odograph.service.visibility import HttpProblem, TooFast

SOURCE = Path(odo.__file__).parent


def defined_errors() -> dict[str, str]:
    """Return the module of every class in the source that is a subclass of OdographError, by the class's name."""
    bases: dict[str, tuple[str, set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(("odograph", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                own = {base.id for base in node.bases if isinstance(base, ast.Name)}
                bases[f"{module}.{node.name}"] = (node.name, own)
    names, before = {"OdographError"}, 0
    while len(names) > before:
        before = len(names)
        names |= {name for name, own in bases.values() if own & names}
    return {where: where.rpartition(".")[0] for where, (name, _) in bases.items() if name in names}


def subclasses(cls: type[OdographError]) -> set[type[OdographError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def error_classes() -> list[type[OdographError]]:
    found = defined_errors()
    for module in found.values():
        importlib.import_module(module)
    classes = {cls for cls in subclasses(OdographError) if cls.__module__.startswith("odograph.")}
    assert {f"{cls.__module__}.{cls.__qualname__}" for cls in classes} == {*found}
    return sorted(classes, key=lambda cls: (cls.__module__, cls.__name__))


# Errors that are not made from a message alone.
DECISION = odo.Accountant(odo.Policy(1, 0, filter="basic")).decide(odo.PureDP(2))
MADE: dict[type[OdographError], OdographError] = {
    BudgetExceeded: BudgetExceeded(DECISION),
    OutcomeUnknown: OutcomeUnknown("this was charged", key="q-1", charged=True),
    HttpProblem: HttpProblem(413, "too long", ((b"connection", b"close"),)),
    TooFast: TooFast(1.5),
    Refusal: Refusal({"message": "refused"}),
}


def same(one: BaseException, other: BaseException) -> bool:
    return (type(one), str(one), one.args, vars(one)) == (type(other), str(other), other.args, vars(other))


def check_carried(error: Exception) -> None:
    """Check that a pickled and a copied error are equal to it."""
    carried = pickle.loads(pickle.dumps(error))  # noqa: S301  made here
    assert same(carried, error)
    assert same(copy.copy(error), error)
    assert getattr(carried, "charged", None) == getattr(error, "charged", None)


CLASSES = error_classes()


def test_the_whole_package_is_walked() -> None:
    names = {cls.__name__ for cls in CLASSES}
    assert {"RowLocked", "Refusal", "HttpProblem", "BadDocument", "_Unreachable"} <= names
    assert len(CLASSES) > len(ERROR_TABLE)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_every_error_has_a_row_and_survives_a_pickle(cls: type[OdographError]) -> None:
    error = MADE.get(cls) or cls("a message")
    nearest = listed_as(error)
    assert nearest is cls or cls.__module__ != errors.__name__
    row = ERROR_TABLE[nearest]
    assert 400 <= row.status < 600
    assert row.exit_code > 0
    error.add_note("a note")
    check_carried(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__qualname__)
def test_only_an_unknown_outcome_may_have_been_charged(cls: type[OdographError]) -> None:
    assert cls.charged is (None if issubclass(cls, OutcomeUnknown) else False)


def test_an_unknown_outcome_names_its_key_and_is_told_apart_from_a_busy_ledger() -> None:
    unknown = OutcomeUnknown("the disk failed", key="q-1")
    assert (str(unknown), unknown.key, unknown.charged) == ("the disk failed (key 'q-1')", "q-1", None)
    assert OutcomeUnknown("the disk failed").key == ""
    assert (ERROR_TABLE[OutcomeUnknown].status, ERROR_TABLE[LedgerBusy].status) == (504, 503)
    assert ERROR_TABLE[OutcomeUnknown].retryable


class Careless(Exception):
    """An error as Python makes them: it is rebuilt from its message alone."""

    def __init__(self, detail: str, key: str) -> None:
        super().__init__(f"{detail} ({key})")
        self.key = key


def test_an_error_that_does_not_survive_is_caught() -> None:
    careless: Any = Careless("lost", "q-1")
    with pytest.raises((AssertionError, TypeError)):
        check_carried(careless)
