"""A browser without a window: cookies and forms over HTTP, sent as pages send them, or forged."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import httpx
from service_server import ServiceThread

from odograph.service.dashboard.pages import COOKIE

# What advises to write Python in a message, which pages do not say.
PYTHON = re.compile(
    r"\b[a-z_]+=|odograph\.|\bodo\.|\bPolicy\b|\bledger\.|\bNone\b|\bpass\b|\(\.\.\.\)|\b[a-z_]+\(|\[['\"]|\('|_steps\b"
)


class _Words(HTMLParser):
    """The visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        if tag not in {"a", "b", "code", "small", "span"}:
            self.found.append(" ")

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def words_of(page: str) -> str:
    """Return the visible text of a page, with single spaces."""
    words = _Words()
    words.feed(page)
    return " ".join("".join(words.found).split())


def csrf_of(page: str) -> str:
    """Return the CSRF token of a page's form."""
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None, page
    return html.unescape(found[1])


class Visitor:
    """An HTTP client with cookies."""

    def __init__(self, service: ServiceThread) -> None:
        # Every answer's connection is closed at once, so that there is nothing to be tidied up.
        self.http = httpx.Client(base_url=service.url, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))

    def sign_in(self, token: str, then: str = "/", **changed: str) -> httpx.Response:
        """Send the sign-in form, with changed fields if any are given."""
        csrf = csrf_of(self.http.get("/sign-in").text)
        return self.send("/sign-in", {"csrf": csrf, "token": token, "then": then} | changed)

    def send(self, path: str, form: dict[str, str], **headers: str) -> httpx.Response:
        """Send a form."""
        return self.http.post(path, data=form, headers=headers)

    def get(self, path: str, **query: str) -> httpx.Response:
        """Ask for a page."""
        return self.http.get(path, params=query or None)

    @property
    def csrf(self) -> str:
        """The session's CSRF token, as its pages hold it."""
        return csrf_of(self.http.get("/").text)

    @property
    def cookie(self) -> str:
        """The session's cookie."""
        return str(self.http.cookies.get(COOKIE))

    def is_inside(self) -> bool:
        """Return whether the client is signed in."""
        return self.http.get("/").status_code == 200


def visitor_of(service: ServiceThread, token: str | None = None) -> Visitor:
    """Return a client that is signed in."""
    visitor = Visitor(service)
    answer = visitor.sign_in(token or service.token())
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    return visitor


def thief_of(service: ServiceThread, cookie: str) -> Visitor:
    """Return a client that has nothing but a copied cookie."""
    thief = Visitor(service)
    thief.http.cookies.set(COOKIE, cookie, domain="127.0.0.1")
    return thief
