"""The command line. Typer and Rich are imported in this package only."""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["main"]

_REQUIRED = ("click", "rich", "typer")


def main() -> None:
    """Run the command line: the entry point `odograph`."""
    try:
        app = import_module("odograph.cli.app").app
    except ModuleNotFoundError as problem:
        if (problem.name or "").split(".")[0] not in _REQUIRED:
            raise
        sys.stderr.write(
            "odograph: the command line is not installed: pip install 'odograph[cli]', or 'odograph[demo]'\n"
        )
        sys.exit(2)
    app()
