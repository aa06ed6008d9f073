"""What every page needs: templates or JSON, static files, security headers, the browser's session, checked forms.

The session cookie is accepted only by the dashboard, and the dashboard accepts an API key only in its sign-in form.
A trusted proxy, if there is one, may name the principal instead; the API never reads its header, since a browser that
is signed in at the proxy could be tricked into sending a charge.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import re
from collections.abc import Mapping
from datetime import datetime
from fractions import Fraction
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec
from bokeh import __version__ as bokeh_version
from bokeh.util.paths import bokehjs_path
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from odograph.core.fixed_point import brief_above, brief_below
from odograph.core.guarantees import guarantee_from_dict
from odograph.errors import BadRequest, NotAuthenticated, NotPermitted
from odograph.service.auth import (
    BrowserSession,
    Caller,
    digest_of_token,
    equal_in_constant_time,
    looks_like_token,
    new_secret,
)
from odograph.service.key_store import KeyStore
from odograph.service.schemas import Problem
from odograph.service.state import AppState
from odograph.service.visibility import HttpProblem

__all__ = [
    "COOKIE",
    "HEADERS",
    "NEAR_LIMIT",
    "STATIC_FILES",
    "USED_UP",
    "Page",
    "PageSession",
    "StaticFile",
    "check_csrf",
    "check_origin",
    "fragment_response",
    "load_session",
    "load_static_file",
    "page_response",
    "page_wording",
    "problem_page",
    "read_form",
    "redirect_to_sign_in",
    "render_fragment",
    "serve_favicon",
    "serve_static_file",
    "sign_in",
    "sign_out",
    "static_url",
    "wants_json",
]

HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
        " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: with it browsers send `Origin: null` with forms, and the origin of forms is checked.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

USED_UP: Final = 0.9995  # the spent part of a budget from which hardly anything fits
NEAR_LIMIT: Final = 0.9  # the spent part of a budget from which an account is shown as near its limit
_LOW: Final = 0.75  # the spent part from which a gauge changes its color
# The number of digits is bounded: a number longer than a line must be allowed to break.
_TOGETHER: Final = re.compile(r"\b(?:(?:1 - )?\d{1,20}(?:\.\d{1,20})?[eE][+-]\d{1,4}|\d{4}-\d\d-\d\d)\b")

_PROBLEM_TITLES: Final = {
    400: "Invalid request",
    401: "Not signed in",
    403: "Not permitted",
    404: "Not found",
    405: "Method not allowed",
    409: "Not possible now",
    413: "Request too large",
    415: "Unsupported format",
    422: "Invalid value",
    429: "Too many requests",
    500: "Internal error",
    503: "Service busy",
    504: "Outcome unknown",
}


# Pages


class Page(NamedTuple):
    """The data of a page: the context of its template, and the same content for programs."""

    template: str
    title: str
    json_representation: object
    context: Mapping[str, Any]
    status: int = 200


def wants_json(request: Request) -> bool:
    """Return whether the request asks for the JSON representation."""
    return request.query_params.get("format") == "json"


def page_response(request: Request, page: Page, data_version: str = "") -> Response:
    """Return a page as HTML, or as JSON if the request asks for it."""
    if wants_json(request):
        content = msgspec.json.encode(page.json_representation)
        return Response(content, page.status, HEADERS, "application/json")
    session = request.state.browser_session
    shared = {
        "title": page.title,
        "caller": session and session.caller,
        "csrf": session.csrf if session else "",
        "data_version": data_version,
        "path": request.url.path,
        "json_url": "?" + urlencode([*request.query_params.multi_items(), ("format", "json")]),
    }
    text = _ENVIRONMENT.get_template(page.template).render(**shared, **page.context)
    return Response(text, page.status, HEADERS, "text/html; charset=utf-8")


def render_fragment(template: str, context: Mapping[str, Any]) -> Markup:
    """Render a template that is part of a page."""
    return Markup(_ENVIRONMENT.get_template(template).render(**context))  # noqa: S704  escaped by the template


def fragment_response(template: str, context: Mapping[str, Any]) -> Response:
    """Return a part of a page on its own, for the page's script."""
    return Response(render_fragment(template, context), 200, HEADERS, "text/html; charset=utf-8")


def problem_page(request: Request, problem: Problem) -> Response:
    """Return an error as a page."""
    title = _PROBLEM_TITLES.get(problem.status, problem.title)
    return page_response(request, Page("problem.html", title, problem, {"problem": problem}, problem.status))


# Messages are written for programs too, and name arguments and calls of the library. A page has fields instead.
_WORDING: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^(?:[A-Z]\w*\.|[a-z_]+\()(\w+)\)? must\b", r"\1 must"),
        (r" or '0\.1' \(got", " (got"),
        (r"one of [\[(]([^\])]*)[\])]", lambda found: f"one of {found[1].replace(chr(39), '')}"),
        (r"use ledger\.account\(('[^']*')\)", "open its page"),
        (
            r"Use ledger\.account\('[^']*'\), or another name and key",
            "Its page shows it; another one needs another name",
        ),
        (r"It is charged by Population\.open\(.*?\)\.charge\(\.\.\.\)", "A program charges it, where its files are"),
        (r"; pass filter='(\w+)'", r"; choose the filter \1"),
        (r"; or pass epsilon", "; or promise an epsilon"),
        (r"; pass the curve", "; it needs the curve"),
        (r"one with takes=\('([\w-]+)',\) would", r"one whose filter takes \1 would"),
        (r"under filter '(\w[\w-]*)'", r"under the filter \1"),
        (r"filter='(\w+)'", r"the filter \1"),
        (r"successor_of='([^']*)'", r"successor of '\1'"),
        (r"\bPolicy\((\w+)=\.\.\.\)", r"a policy that promises \1"),
        (r", as in Policy\(None, [^,]*, slack=([\d.]+)\)", r", such as \1, which the policy has to state"),
        (r",? (?:such as|in|as in) Policy\([^)]*\),?", ""),
        (r": the order is Policy\(epsilon, delta\)", ""),
        (r"\bdelta_steps\b", "the delta reserved for steps"),
        (r"\bprivacy_unit\b", "the privacy unit"),
        (r"\bsampling_rate\b", "sample rate"),
        (r"\bnoise_multiplier\b", "noise multiplier"),
        (r"\bfilter must be left out where", "filter must be default where"),
        (r"\bodometer must be left out where", "odometer must be default where"),
        (r"; or pass every_account", "; or choose every account"),
        (r"pass either accounts or every_account \(got both\)", "name accounts or choose every account (got both)"),
        (r"; `odograph keys list` shows all keys", "; the page of keys shows all"),
        (r"\bsuccessor_of\b", "successor of"),
    )
)


def page_wording(message: str) -> str:
    """Return the message of an error without the words of a program: argument names, calls, lists in brackets."""
    for pattern, words in _WORDING:
        message = pattern.sub(words, message)
    return message


# Static files: the dashboard's own, and the BokehJS of the installed package.


_MEDIA_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_BOKEH: Final = "bokeh.min.js"
STATIC_FILES: Final = ("favicon.svg", "live.js", "owners.js", "style.css", _BOKEH)


class StaticFile(NamedTuple):
    """A static file, plain and compressed."""

    version: str
    media_type: str
    content: bytes
    gzipped: bytes


@cache
def load_static_file(name: str) -> StaticFile | None:
    """Return a static file by its name, or None if there is no such file."""
    if name not in STATIC_FILES:
        return None
    if name == _BOKEH:
        content = (bokehjs_path() / "js" / _BOKEH).read_bytes()
        version = bokeh_version
    else:
        content = files(__package__).joinpath("static", name).read_bytes()
        version = hashlib.sha256(content).hexdigest()[:12]
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    return StaticFile(version, media_type, content, gzip.compress(content, 6, mtime=0))


def static_url(name: str) -> str:
    """Return the URL of a static file. It contains the file's version, so browsers may cache it indefinitely."""
    file = load_static_file(name)
    if file is None:
        raise LookupError(f"unknown static file {name!r}; available: {', '.join(STATIC_FILES)}")
    return f"/static/{file.version}/{name}"


async def serve_static_file(request: Request) -> Response:
    """Send a static file, to any client."""
    file = load_static_file(request.path_params["name"])
    if file is None or request.path_params["version"] != file.version:
        return PlainTextResponse("There is no such file.\n", 404, HEADERS)
    return _file_response(request, file, "public, max-age=31536000, immutable")


async def serve_favicon(request: Request) -> Response:
    """Send the icon at its conventional path."""
    file = load_static_file("favicon.svg")
    return Response(status_code=404) if file is None else _file_response(request, file, "public, max-age=86400")


def _file_response(request: Request, file: StaticFile, cache_control: str) -> Response:
    headers = HEADERS | {"Cache-Control": cache_control, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.gzipped, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)


# Filters of the templates


def _format_percent(part: float) -> str:
    """Format a part of a budget; only exactly 0 and 1 are shown as 0% and 100%."""
    if 0.0 < part < 0.001:
        return "<0.1%"
    return f"{min(part, 0.999):.1%}" if 0.999 < part < 1.0 else f"{part:.1%}".replace(".0%", "%")


def _keep_together(text: object) -> Markup:
    """Keep numbers such as 1e-06 and 1 - 1e-06, and dates, on one line: browsers would break them at the hyphen."""
    return Markup(_TOGETHER.sub(r'<span class="nobreak">\g<0></span>', str(escape(text))))  # noqa: S704  escaped


def _format_number(value: float | None) -> Markup:
    return _keep_together("none" if value is None else "unbounded" if math.isinf(value) else f"{value:.4g}")


def _format_cost(form: Mapping[str, Any] | msgspec.Raw | None, *, offered: bool = False) -> Markup:
    """Format the JSON form of a guarantee: a cost, or an offer."""
    if not form:
        return Markup()
    plain = msgspec.json.decode(form) if isinstance(form, msgspec.Raw) else form
    return _keep_together(guarantee_from_dict(plain).brief(offered=offered))


def _format_exact(text: str) -> Markup:
    """Format an exact fraction as a decimal number."""
    return _keep_together(f"{float(Fraction(text)):.12g}")


def _format_time(text: str) -> str:
    """Format an ISO time to the second."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


def _split_words(name: str) -> str:
    """Turn the name of an odometer's class into words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _level(part: float) -> str:
    """Return the CSS class of a gauge."""
    return "near" if part >= NEAR_LIMIT else "low" if part >= _LOW else "room"


def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("odograph.service.dashboard"),
        auto_reload=False,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "above": lambda value: _keep_together(brief_above(value)),
        "below": lambda value: _keep_together(brief_below(value)),
        "cost": _format_cost,
        "offer": partial(_format_cost, offered=True),
        "exact": _format_exact,
        "level": _level,
        "nobreak": _keep_together,
        "number": _format_number,
        "path": lambda name: quote(name, safe=""),
        "percent": _format_percent,
        "time": _format_time,
        "words": _split_words,
    }
    environment.globals |= {"static_url": static_url}
    return environment


_ENVIRONMENT: Final = _make_environment()


COOKIE: Final = "odograph_session"
_SIGN_IN_COOKIE: Final = "odograph_sign_in"  # ties the sign-in form to the browser that loaded it
_SIGN_IN_COOKIE_AGE: Final = 3600  # seconds
_SECRET_LENGTH: Final = 43  # characters of a cookie's value
_MAX_FORM_SIZE: Final = 64 * 1024  # bytes
_MAX_FORM_FIELDS: Final = 50
_INVALID_KEY: Final = "This key is not valid: it is mistyped, revoked or expired."
_NO_KEY: Final = "You have no access here yet, or no longer: ask an owner to make an API key for this name."


class PageSession(NamedTuple):
    """The session of a signed-in browser."""

    caller: Caller
    csrf: str
    digest: str  # of the cookie's secret


async def load_session(state: AppState, request: Request) -> PageSession | None:
    """Return the session of a request's cookie; None without a valid cookie or if the key is no longer valid.

    A session of another principal than the one a trusted proxy names is not returned. It is also kept in the
    request's state, for the header of the page.
    """
    named = _named_by_proxy(state, request)
    secret = _read_cookie(state, request, COOKIE)
    if len(secret) != _SECRET_LENGTH:
        return None
    session = await state.look_up(_find_session, state.keys, digest_of_token(secret))
    if session is not None and named is not None and session.caller.principal != named:
        session = None
    if session is not None:
        state.key_uses[session.caller.api_key_id] = state.keys.now()
    request.state.browser_session = session
    return session


def _named_by_proxy(state: AppState, request: Request) -> str | None:
    """Return the principal that a trusted proxy names; raise if its header cannot be believed."""
    if state.proxy is None:
        return None
    address = None if request.client is None else request.client.host
    return state.proxy.principal(address, request.headers.raw)


def _find_session(keys: KeyStore, digest: str) -> PageSession | None:
    found = keys.session(digest)
    if found is None:
        return None
    session, key = found
    if not key.valid_at(keys.now()):
        return None
    return PageSession(Caller.of(key), session.csrf, digest)


async def read_form(request: Request) -> dict[str, str]:
    """Read the fields of a form, or raise `BadRequest`. Of a repeated field, the first value counts."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        raise HttpProblem(415, f"a form must be application/x-www-form-urlencoded (got {media_type[:100]!r})")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM_SIZE:
            # The rest of the body must not be read as the next request.
            closing = ((b"connection", b"close"),)
            raise HttpProblem(413, f"a form must have at most {_MAX_FORM_SIZE:,} bytes", closing)
    try:
        fields = parse_qs(
            body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FORM_FIELDS, errors="strict"
        )
    except ValueError as problem:
        raise BadRequest(f"the form could not be read ({problem}); reload the page") from problem
    return {name: values[0] for name, values in fields.items()}


def check_origin(request: Request) -> None:
    """Raise `NotPermitted` if the form was sent by a page of another origin."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise NotPermitted("the form was sent from another origin; open the page of this service and send it there")


def check_csrf(form: dict[str, str], expected: str) -> None:
    """Raise `NotPermitted` unless the form contains the secret of its page."""
    if not expected or not equal_in_constant_time(form.get("csrf", ""), expected):
        raise NotPermitted("the form belongs to another or an earlier session; reload the page and send it again")


def redirect_to_sign_in(request: Request) -> Response:
    """Redirect a browser to the sign-in page, which leads back here; raise `NotAuthenticated` for a program."""
    if wants_json(request) or request.url.path == "/data-version":
        raise NotAuthenticated("not signed in; open /sign-in and enter an API key")
    query = f"?{request.url.query}" if request.url.query else ""
    then = quote(request.url.path + query, safe="") if request.method == "GET" else "%2F"
    return RedirectResponse(f"/sign-in?then={then}", 303, HEADERS)


async def sign_in(state: AppState, request: Request) -> Response:
    """Show the sign-in form, or exchange the API key of a sent form for a session cookie.

    The principal that a trusted proxy names needs no API key in the form, and can use no other one.
    """
    named = _named_by_proxy(state, request)
    if request.method != "POST":
        then = _local_path(request.query_params.get("then", ""))
        if await load_session(state, request) is not None and not wants_json(request):
            return RedirectResponse(then, 303, HEADERS)
        return _sign_in_page(state, request, then)
    check_origin(request)
    form = await read_form(request)
    secret = _read_cookie(state, request, _SIGN_IN_COOKIE)
    check_csrf(form, digest_of_token(secret) if secret else "")
    then = _local_path(form.get("then", ""))
    if named is None:
        begun = await state.look_up(_begin_session, state.keys, form.get("token", "").strip())
    else:
        begun = await state.look_up(_begin_session_of, state.keys, named)
    if begun is None:
        return _sign_in_page(state, request, then, _INVALID_KEY if named is None else _NO_KEY)
    secret, session = begun
    response = RedirectResponse(then, 303, HEADERS)
    _set_cookie(state, response, COOKIE, secret, (session.ends - session.began) // 1_000_000)
    _set_cookie(state, response, _SIGN_IN_COOKIE, "", 0)
    return response


def _begin_session(keys: KeyStore, token: str) -> tuple[str, BrowserSession] | None:
    """Begin a session for an API key; return None if the key is not valid, for whatever reason."""
    if not looks_like_token(token):
        return None
    key = keys.find(digest_of_token(token))
    if key is None or not key.valid_at(keys.now()):
        return None
    try:
        return keys.begin_session(key.id)
    except NotAuthenticated:  # revoked in the meantime
        return None


def _begin_session_of(keys: KeyStore, principal: str) -> tuple[str, BrowserSession] | None:
    """Begin a session for the newest valid key of a principal; return None if there is none."""
    made, now = keys.keys(), keys.now()
    for key in made:  # newest first
        if key.principal == principal and key.valid_at(now):
            try:
                return keys.begin_session(key.id)
            except NotAuthenticated:  # revoked in the meantime
                continue
    return None


def _sign_in_page(state: AppState, request: Request, then: str, message: str = "") -> Response:
    current = _read_cookie(state, request, _SIGN_IN_COOKIE)
    secret = current if len(current) == _SECRET_LENGTH else new_secret()
    representation = {"signed_in": request.state.browser_session is not None, "message": message}
    named = _named_by_proxy(state, request)
    context = {"then": then, "message": message, "form_csrf": digest_of_token(secret), "named": named}
    page = Page("sign_in.html", "Sign in", representation, context, 401 if message else 200)
    response = page_response(request, page)
    if secret != current:
        _set_cookie(state, response, _SIGN_IN_COOKIE, secret, _SIGN_IN_COOKIE_AGE)
    return response


async def sign_out(state: AppState, request: Request) -> Response:
    """End the session in the store, so that copies of its cookie become invalid too."""
    check_origin(request)
    session = await load_session(state, request)
    if session is not None:
        check_csrf(await read_form(request), session.csrf)
        await state.look_up(state.keys.end_session, session.digest)
    response = RedirectResponse("/sign-in", 303, HEADERS)
    _set_cookie(state, response, COOKIE, "", 0)
    return response


def _cookie_name(state: AppState, name: str) -> str:
    """Return a cookie's name: behind TLS with the `__Host-` prefix, so that no other host of the domain can set it.

    The prefix requires `Secure`, and not every browser keeps such a cookie for a loopback service without TLS.
    """
    return f"__Host-{name}" if state.settings.secure_cookies else name


def _read_cookie(state: AppState, request: Request, name: str) -> str:
    return request.cookies.get(_cookie_name(state, name), "")


def _set_cookie(state: AppState, response: Response, name: str, value: str, max_age: int) -> None:
    """Set a cookie for `max_age` seconds; 0 deletes it."""
    response.set_cookie(
        _cookie_name(state, name),
        value,
        max_age=max_age,
        path="/",
        secure=state.settings.secure_cookies,
        httponly=True,
        samesite="strict",
    )


def _local_path(path: str) -> str:
    """Return the path if it stays on this service, otherwise that of the overview."""
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return quote(path, safe="/?&=%+:@.,;#~!$'()*-_") if plain else "/"
