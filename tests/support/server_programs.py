"""Programs that the examples of deploy/ are checked with: installed here, or unpacked by `make` and not installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def program(name: str, package: str) -> str:
    """Return the path of a program, or skip the test with what to do."""
    unpacked = Path(sys.prefix) / "servers" / "usr"
    found = shutil.which(name, path=f"{unpacked}/bin:{unpacked}/sbin") or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: `make test` unpacks it from Debian's package {package}")
    return found
