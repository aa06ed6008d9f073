"""The SQL of the key store, in files: per dialect a schema and named queries."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeAlias

__all__ = ["SCHEMA", "Run", "queries", "schema"]

SCHEMA: Final = 1  # the version that this code reads and writes

# Execute a query by its name, with its arguments, and return its rows.
Run: TypeAlias = Callable[..., list[tuple[Any, ...]]]

_NAMED: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def queries(dialect: str) -> dict[str, str]:
    """Return the queries of a dialect, by name."""
    parts = _NAMED.split(_text(dialect, "queries.sql"))[1:]
    return {name: text.strip().removesuffix(";") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def schema(dialect: str) -> str:
    """Return the script that makes the tables."""
    return _text(dialect, "schema.sql")


def _text(*path: str) -> str:
    return files(__package__).joinpath(*path).read_text(encoding="utf-8")
