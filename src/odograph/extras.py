"""Optional dependencies: imported where they are needed; a missing one is named with the line that installs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from odograph.errors import MissingExtra

__all__ = ["load"]

_TRAINING: Final = "Opacus is not installed: install torch, then pip install 'odograph[training]'"
_MISSING: Final = {
    "diffprivlib": "diffprivlib is not installed: pip install 'odograph[diffprivlib]'",
    "dp_accounting": "dp-accounting is not installed: pip install 'odograph[accounting]'",
    "duckdb": "this engine needs DuckDB: pip install 'odograph[population]'",
    "fsspec": "a population in an object store needs fsspec: pip install 'odograph[objects]'",
    "httpx": "a ledger behind a service needs httpx: pip install 'odograph[client]'",
    "matplotlib": "figures need matplotlib: pip install 'odograph[figures]'",
    "opacus": _TRAINING,
    "opendp": "OpenDP is not installed: pip install 'odograph[mechanisms]'",
    "pandas": "a history as a data frame needs pandas: pip install 'odograph[tables]'",
    "psycopg": "a ledger in PostgreSQL needs psycopg: pip install 'odograph[postgres]'",
    "pyarrow": "Arrow tables and Parquet files need PyArrow: pip install 'odograph[tables]'",
    "pyspark": "this engine needs Spark, and Java: pip install 'odograph[population]'",
    "s3fs": "a population at an s3:// address needs s3fs: pip install 'odograph[objects]'",
    "starlette": "the service needs further packages: pip install 'odograph[service]'",
    "statsmodels": "the demo needs statsmodels for its data: pip install 'odograph[demo]'",
    "tmlt": "Tumult is not installed: pip install 'odograph[tumult]', in a separate environment (it needs NumPy 1)",
    "torch": _TRAINING,
    "yaml": "a file in YAML needs PyYAML: pip install 'odograph[cli]'; JSON is read without it",
}


def load(module: str) -> Any:  # noqa: ANN401  these libraries are untyped
    """Return a module of an optional dependency, or raise `MissingExtra` with the line that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as problem:
        raise MissingExtra(_MISSING[module.partition(".")[0]]) from problem
