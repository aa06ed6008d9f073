"""Who is looking: sessions in a cookie, forms that only the page itself can send, signing in and out.

A cookie is worth nothing outside these pages, and a token nothing inside them but in the sign-in form.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from odograph.errors import BadRequest, NotAuthenticated, NotPermitted
from odograph.service.access import Caller, Session, digest_of_token, looks_like_token, new_secret, same
from odograph.service.dashboard.headers import HEADERS
from odograph.service.dashboard.markup import Answer, answered, wants_json
from odograph.service.keys import KeyStore
from odograph.service.office import Office
from odograph.service.problems import HttpProblem

__all__ = [
    "COOKIE",
    "Visit",
    "check_origin",
    "check_sent",
    "form_of",
    "sign_in",
    "sign_out",
    "signed_out",
    "visit_of",
]

COOKIE: Final = "odograph_session"
_VISITOR: Final = "odograph_visitor"  # ties the sign-in form to the browser that it was sent to
_SECRET: Final = 43  # characters of a cookie's value
_LARGEST: Final = 64 * 1024
_FIELDS: Final = 50
_REFUSED: Final = "That key is not valid here: it is mistyped, revoked or expired. Nothing was changed."


class Visit(NamedTuple):
    """A browser that is signed in."""

    caller: Caller
    csrf: str
    digest: str  # of the session's secret


async def visit_of(office: Office, request: Request) -> Visit | None:
    """Return whose browser it is; None if nobody is signed in, or the key was revoked or has expired.

    It is kept in the request's state, where the page's frame finds it.
    """
    secret = _taken(office, request, COOKIE)
    if len(secret) != _SECRET:
        return None
    visit = await office.look_up(_visit, office.keys, digest_of_token(secret))
    request.state.visit = visit
    return visit


def _visit(keys: KeyStore, digest: str) -> Visit | None:
    found = keys.session(digest)
    if found is None:
        return None
    session, key = found
    if not key.valid_at(keys.now()):
        return None
    return Visit(Caller.of(key), session.csrf, digest)


async def form_of(request: Request) -> dict[str, str]:
    """Read a form, or raise `BadRequest`. Of a field that is there twice the first counts."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HttpProblem(415, f"a form comes as application/x-www-form-urlencoded, not as {kind[:100]!r}")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST:
            # What is left of the body would be taken for the next request.
            closing = ((b"connection", b"close"),)
            raise HttpProblem(413, f"a form has at most {_LARGEST:,} bytes, and this one has more", closing)
    try:
        fields = parse_qs(body.decode("ascii"), keep_blank_values=True, max_num_fields=_FIELDS, errors="strict")
    except ValueError as problem:
        raise BadRequest(f"the form could not be read ({problem}); load the page again") from problem
    return {name: values[0] for name, values in fields.items()}


def check_origin(request: Request) -> None:
    """Raise `NotPermitted` for a form that another site sent."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise NotPermitted("the form came from another site; open this site's own page and send it from there")


def check_sent(form: dict[str, str], expected: str) -> None:
    """Raise `NotPermitted` unless the form holds the secret that the page was given."""
    if not expected or not same(form.get("csrf", ""), expected):
        raise NotPermitted("the form is from an earlier visit, or from elsewhere; load the page again and send it")


def signed_out(request: Request) -> Response:
    """Send the browser to sign in, and back here afterwards; a program is told that nobody is signed in."""
    if wants_json(request) or request.url.path == "/pulse":
        raise NotAuthenticated("nobody is signed in here; open /sign-in with an API key")
    query = f"?{request.url.query}" if request.url.query else ""
    then = quote(request.url.path + query, safe="") if request.method == "GET" else "%2F"
    return RedirectResponse(f"/sign-in?then={then}", 303, HEADERS)


async def sign_in(office: Office, request: Request) -> Response:
    """Show the form; take a token once, and give a cookie for it."""
    if request.method != "POST":
        then = _local(request.query_params.get("then", ""))
        if await visit_of(office, request) is not None and not wants_json(request):
            return RedirectResponse(then, 303, HEADERS)
        return _sign_in_page(office, request, then)
    check_origin(request)
    form = await form_of(request)
    visitor = _taken(office, request, _VISITOR)
    check_sent(form, digest_of_token(visitor) if visitor else "")
    then = _local(form.get("then", ""))
    begun = await office.look_up(_begin, office.keys, form.get("token", "").strip())
    if begun is None:
        return _sign_in_page(office, request, then, _REFUSED)
    secret, session = begun
    answer = RedirectResponse(then, 303, HEADERS)
    _give(office, answer, COOKIE, secret, (session.ends - session.began) // 1_000_000)
    _give(office, answer, _VISITOR, "", 0)
    return answer


def _begin(keys: KeyStore, token: str) -> tuple[str, Session] | None:
    """Begin a session for a token; None for one that opens nothing, whatever the reason."""
    if not looks_like_token(token):
        return None
    key = keys.find(digest_of_token(token))
    if key is None or not key.valid_at(keys.now()):
        return None
    try:
        return keys.begin_session(key.id)
    except NotAuthenticated:  # revoked since
        return None


def _sign_in_page(office: Office, request: Request, then: str, message: str = "") -> Response:
    visitor = _taken(office, request, _VISITOR)
    fresh = visitor if len(visitor) == _SECRET else new_secret()
    twin = {"signed_in": request.state.visit is not None, "message": message}
    context = {"then": then, "message": message, "token": digest_of_token(fresh)}
    answer = answered(request, Answer("sign_in.html", "Sign in", twin, context, 401 if message else 200))
    if fresh != visitor:
        _give(office, answer, _VISITOR, fresh, 3600)
    return answer


async def sign_out(office: Office, request: Request) -> Response:
    """End the session in the store, so that its cookie is worth nothing, wherever it was copied to."""
    check_origin(request)
    visit = await visit_of(office, request)
    if visit is not None:
        check_sent(await form_of(request), visit.csrf)
        await office.look_up(office.keys.end_session, visit.digest)
    answer = RedirectResponse("/sign-in", 303, HEADERS)
    _give(office, answer, COOKIE, "", 0)
    return answer


def _named(office: Office, name: str) -> str:
    """Return a cookie's name: over TLS with a prefix, by which browsers let no other host of the domain set it.

    The prefix needs `Secure`, and not every browser keeps such a cookie of a service on loopback without TLS.
    """
    return f"__Host-{name}" if office.settings.secure_cookies else name


def _taken(office: Office, request: Request, name: str) -> str:
    return request.cookies.get(_named(office, name), "")


def _give(office: Office, answer: Response, name: str, value: str, seconds: int) -> None:
    """Set a cookie for so many seconds; for none of them, take it away."""
    answer.set_cookie(
        _named(office, name),
        value,
        max_age=seconds,
        path="/",
        secure=office.settings.secure_cookies,
        httponly=True,
        samesite="strict",
    )


def _local(path: str) -> str:
    """Return a path of this site, and the overview for anything else."""
    plain = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return quote(path, safe="/?&=%+:@.,;#~!$'()*-_") if plain else "/"
