"""The SQL of the DuckDB engine: what a step writes, as text. Nothing in it was passed by anybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from odograph.population.engines import Site
from odograph.population.kernel import SPENT

__all__ = ["MARK", "charged", "fits", "keys_of", "select", "totals_of"]

_BLOCK: Final = 64  # bytes of a block of SHA-256
# HMAC-SHA256 of an id; the key comes padded, for the inner hash and for the outer.
MARK: Final = "unhex(sha256($outer::BLOB || unhex(sha256($inner::BLOB || encode({id}::VARCHAR)))))"


def charged(site: Site, source: str, asked: str, amounts: Sequence[int | str]) -> str:
    """Return the query for the totals after a charge, and for who takes part: whoever is asked, and admits it.

    Amounts are numbers, or the names of columns beside the totals.
    """
    took = f"CASE WHEN {asked} THEN {fits(site, amounts)} ELSE FALSE END AS took"
    after = [
        f"CASE WHEN took THEN least({total} + {amount}, {SPENT}) ELSE {total} END AS {total}"
        for total, amount in zip(totals_of(site), amounts, strict=True)
    ]
    return select(["id", *after, "took"], f"({select(['*', took], f'({source})')})")


def fits(site: Site, amounts: Sequence[int | str]) -> str:
    """Return the condition under which somebody admits amounts."""
    within, *alternatives = [
        f"{total} + {amount} <= {limit}"
        for total, amount, limit in zip(totals_of(site), amounts, site.gate.limits, strict=True)
    ]
    return f"{within} AND ({' OR '.join(alternatives)})"


def select(columns: Sequence[str], source: str) -> str:
    """Return a query."""
    return f"SELECT {', '.join(columns)} FROM {source}"  # noqa: S608  see the module


def totals_of(site: Site) -> list[str]:
    """Return the names of the columns that hold totals."""
    return [f"total_{i}" for i in range(len(site.gate.limits))]


def keys_of(site: Site) -> dict[str, bytes]:
    """Return the secret as the two keys of HMAC-SHA256."""
    padded = site.versions.secret().ljust(_BLOCK, b"\0")
    return {"inner": bytes(byte ^ 0x36 for byte in padded), "outer": bytes(byte ^ 0x5C for byte in padded)}
