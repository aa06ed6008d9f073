"""The headers of every answer of the dashboard: they keep browsers out of trouble."""

from __future__ import annotations

from typing import Final

__all__ = ["HEADERS"]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers would then send `Origin: null` with forms, and forms check their origin.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
