"""Browser sessions: signing in and out, the session cookie, and CSRF protection of forms.

The session cookie is accepted only by the dashboard, and the dashboard accepts an API key only in its sign-in form.
A trusted proxy, if there is one, may name the principal instead; the API never reads its header, since a browser that
is signed in at the proxy could be tricked into sending a charge.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from odograph.errors import BadRequest, NotAuthenticated, NotPermitted
from odograph.service.auth import (
    BrowserSession,
    Caller,
    digest_of_token,
    equal_in_constant_time,
    looks_like_token,
    new_secret,
)
from odograph.service.dashboard.templating import HEADERS, Page, page_response, wants_json
from odograph.service.key_store import KeyStore
from odograph.service.problems import HttpProblem
from odograph.service.state import AppState

__all__ = [
    "COOKIE",
    "PageSession",
    "check_csrf",
    "check_origin",
    "load_session",
    "read_form",
    "redirect_to_sign_in",
    "sign_in",
    "sign_out",
]

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
