"""Static files: the dashboard's own, and Bokeh's script from the installed package. Addresses hold a version."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from bokeh import __version__ as bokeh_version
from bokeh.util.paths import bokehjs_path
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from odograph.service.dashboard.headers import HEADERS

__all__ = ["FILES", "Asset", "address_of", "asset", "favicon", "static"]

_KINDS: Final = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
_BOKEH: Final = "bokeh.min.js"
FILES: Final = ("favicon.svg", "live.js", "style.css", _BOKEH)


class Asset(NamedTuple):
    """A file as it is sent."""

    version: str
    kind: str
    content: bytes
    packed: bytes  # by gzip


@cache
def asset(name: str) -> Asset | None:
    """Return a file by its name, or None if there is no such file to be sent."""
    if name not in FILES:
        return None
    if name == _BOKEH:
        content = (bokehjs_path() / "js" / _BOKEH).read_bytes()
        version = bokeh_version
    else:
        content = files(__package__).joinpath("static", name).read_bytes()
        version = hashlib.sha256(content).hexdigest()[:12]
    return Asset(version, _KINDS[name.rpartition(".")[2]], content, gzip.compress(content, 6, mtime=0))


def address_of(name: str) -> str:
    """Return where a file is; the address changes with its content, so that browsers may keep it."""
    found = asset(name)
    if found is None:
        raise LookupError(f"there is no static file {name!r}; there are {', '.join(FILES)}")
    return f"/static/{found.version}/{name}"


async def static(request: Request) -> Response:
    """Send a file; there is nothing secret in it."""
    found = asset(request.path_params["name"])
    if found is None or request.path_params["version"] != found.version:
        return PlainTextResponse("There is no such file.\n", 404, HEADERS)
    return _sent(request, found, "public, max-age=31536000, immutable")


async def favicon(request: Request) -> Response:
    """Send the icon to browsers that look for it where it used to be."""
    found = asset("favicon.svg")
    return Response(status_code=404) if found is None else _sent(request, found, "public, max-age=86400")


def _sent(request: Request, found: Asset, keep: str) -> Response:
    headers = HEADERS | {"Cache-Control": keep, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.packed, headers=headers | {"Content-Encoding": "gzip"}, media_type=found.kind)
    return Response(found.content, headers=headers, media_type=found.kind)
