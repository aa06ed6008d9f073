from __future__ import annotations

import sys

import pytest

from odograph.errors import MissingExtra, load_extra

LIBRARIES = [
    "diffprivlib",
    "dp_accounting",
    "matplotlib",
    "opacus",
    "opendp",
    "pandas",
    "psycopg",
    "pyarrow",
    "statsmodels",
    "tmlt",
    "torch",
]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named_with_what_installs_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=r"pip install 'odograph\[\w+\]'"):
        load_extra(library)


def test_what_is_installed_is_imported() -> None:
    assert load_extra("matplotlib.ticker").__name__ == "matplotlib.ticker"
