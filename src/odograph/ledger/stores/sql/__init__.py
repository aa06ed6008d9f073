"""The SQL in files: a schema, its migrations and named queries for each dialect."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Final

__all__ = ["SCHEMA", "migrations", "queries", "schema", "statements"]

SCHEMA: Final = 2  # the version that this code reads and writes, and the number of migrations

_NAMED: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def queries(dialect: str, package: str = __package__) -> dict[str, str]:
    """Return the queries of a dialect by name: the ledger's, or those of a package with the same layout."""
    parts = _NAMED.split(_text(package, dialect, "queries.sql"))[1:]
    return {name: text.strip().removesuffix(";") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def migrations(dialect: str) -> list[str]:
    """Return the scripts that create the current schema, in order."""
    return [_text(__package__, dialect, "migrations", f"{number:04}.sql") for number in range(1, SCHEMA + 1)]


def schema(dialect: str, package: str = __package__) -> str:
    """Return the current schema as one script; a test shows that the migrations lead to the same one."""
    return _text(package, dialect, "schema.sql")


def statements(script: str) -> Iterator[str]:
    """Split a script for SQLite; `executescript` of the sqlite3 module would commit the open transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _text(package: str, *path: str) -> str:
    return files(package).joinpath(*path).read_text(encoding="utf-8")
