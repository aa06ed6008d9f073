"""The SQL of the key store, in files: per dialect a schema and named queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from odograph.ledger import sql

__all__ = ["SCHEMA", "Run", "queries", "schema"]

SCHEMA: Final = 1  # the version that this code reads and writes

# Execute a query by its name, with its arguments, and return its rows.
Run: TypeAlias = Callable[..., list[tuple[Any, ...]]]


def queries(dialect: str) -> dict[str, str]:
    """Return the queries of a dialect, by name."""
    return sql.queries(dialect, __package__)


def schema(dialect: str) -> str:
    """Return the script that makes the tables."""
    return sql.schema(dialect, __package__)
