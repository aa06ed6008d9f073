"""How an answer leaves: as a page, or as its JSON twin, with the headers that keep browsers out of trouble."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import datetime
from fractions import Fraction
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import Response

from odograph.core.guarantees import guarantee_from_dict
from odograph.service.answers import Problem
from odograph.service.dashboard.assets import address_of
from odograph.service.dashboard.headers import HEADERS
from odograph.service.dashboard.series import MOST_ENTRIES

__all__ = ["NEAR", "Answer", "answered", "fragment", "part", "problem_page", "wants_json"]

NEAR: Final = 0.9  # the part of a budget from which an account is near its limit
_LOW: Final = 0.75
# Not of any length: a number that is longer than a line must break.
_EXPONENT: Final = re.compile(r"\b(?:1 - )?\d{1,20}(?:\.\d{1,20})?[eE][+-]\d{1,4}\b")

_TITLES: Final = {
    400: "That could not be read",
    401: "Not signed in",
    403: "Not permitted",
    404: "Not found",
    405: "Not here",
    409: "That cannot be done now",
    413: "Too large",
    415: "That could not be read",
    422: "That cannot be promised",
    429: "Too often",
    500: "Something went wrong",
    503: "Busy",
}


class Answer(NamedTuple):
    """What a page shows, and its JSON twin."""

    template: str
    title: str
    twin: object
    context: Mapping[str, Any]
    status: int = 200


def wants_json(request: Request) -> bool:
    """Say whether the twin is asked for."""
    return request.query_params.get("format") == "json"


def answered(request: Request, answer: Answer, pulse: str = "") -> Response:
    """Return the page, or its twin where that is asked for."""
    if wants_json(request):
        return Response(msgspec.json.encode(answer.twin), answer.status, HEADERS, "application/json")
    visit = request.state.visit
    shared = {
        "title": answer.title,
        "caller": visit and visit.caller,
        "csrf": visit.csrf if visit else "",
        "pulse": pulse,
        "path": request.url.path,
        "twin": "?" + urlencode([*request.query_params.multi_items(), ("format", "json")]),
    }
    text = _ENVIRONMENT.get_template(answer.template).render(**shared, **answer.context)
    return Response(text, answer.status, HEADERS, "text/html; charset=utf-8")


def part(template: str, context: Mapping[str, Any]) -> Markup:
    """Return a part of a page, to be put in its place."""
    return Markup(_ENVIRONMENT.get_template(template).render(**context))  # noqa: S704  escaped by the template


def fragment(template: str, context: Mapping[str, Any]) -> Response:
    """Return a part of a page alone, for the script."""
    return Response(part(template, context), 200, HEADERS, "text/html; charset=utf-8")


def problem_page(request: Request, problem: Problem) -> Response:
    """Return what went wrong, as a page."""
    title = _TITLES.get(problem.status, problem.title)
    return answered(request, Answer("problem.html", title, problem, {"problem": problem}, problem.status))


def _percent(part: float) -> str:
    """Write a part of a budget: never 0 % of something, never 100 % of not quite all."""
    if 0.0 < part < 0.001:
        return "<0.1%"
    return f"{min(part, 0.999):.1%}" if 0.999 < part < 1.0 else f"{part:.1%}".replace(".0%", "%")


def _unbroken(text: object) -> Markup:
    """Keep numbers such as 1e-06 and 1 - 1e-06 on one line: browsers break them at a hyphen."""
    return Markup(_EXPONENT.sub(r'<span class="unbroken">\g<0></span>', str(escape(text))))  # noqa: S704  escaped


def _number(value: float | None) -> Markup:
    return _unbroken("none" if value is None else "unbounded" if math.isinf(value) else f"{value:.6g}")


def _cost(form: Mapping[str, Any] | msgspec.Raw | None) -> Markup:
    """Write a guarantee's stored form as people write it."""
    if not form:
        return Markup()
    plain = msgspec.json.decode(form) if isinstance(form, msgspec.Raw) else form
    return _unbroken(guarantee_from_dict(plain))


def _exact(text: str) -> Markup:
    """Write an exact number for people."""
    return _unbroken(f"{float(Fraction(text)):.12g}")


def _moment(text: str) -> str:
    """Write an ISO time to the second."""
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S}"


def _words(name: str) -> str:
    """Write the name of an odometer's class as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


def _level(part: float) -> str:
    return "near" if part >= NEAR else "low" if part >= _LOW else "room"


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("odograph.service.dashboard"),
        auto_reload=False,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {
        "cost": _cost,
        "exact": _exact,
        "level": _level,
        "moment": _moment,
        "number": _number,
        "path": lambda name: quote(name, safe=""),
        "percent": _percent,
        "unbroken": _unbroken,
        "words": _words,
    }
    made.globals |= {"asset": address_of, "most_entries": MOST_ENTRIES}
    return made


_ENVIRONMENT: Final = _environment()
