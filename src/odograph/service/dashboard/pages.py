"""The dashboard's pages: sign-in, overview, account with its planner, audit, opening an account, API.

Pages are asked for by GET and change nothing. What changes something is a form, and it is checked who sent it. No
page can spend: a cookie opens accounts at most, and only an owner's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from odograph.errors import NotPermitted, OdographError
from odograph.ledger.ledger import Ledger
from odograph.service import logs, views
from odograph.service.access import Caller
from odograph.service.answers import Problem
from odograph.service.dashboard import contents
from odograph.service.dashboard.assets import FILES, asset, favicon, static
from odograph.service.dashboard.charts import chart, picture
from odograph.service.dashboard.headers import HEADERS
from odograph.service.dashboard.markup import Answer, answered, fragment, problem_page, wants_json
from odograph.service.dashboard.opening import choices, open_page, policy_of
from odograph.service.dashboard.planner import PlanForm, plan
from odograph.service.dashboard.reference import reference_page
from odograph.service.dashboard.visits import (
    Visit,
    check_origin,
    check_sent,
    form_of,
    sign_in,
    sign_out,
    signed_out,
    visit_of,
)
from odograph.service.door import headers_of, request_id_of
from odograph.service.office import Office
from odograph.service.problems import HttpProblem, TooFast, problem_of, unexpected
from odograph.service.threads import CLIENT

__all__ = ["missing", "routes"]

Form: TypeAlias = dict[str, str]  # empty unless a form was sent
Work: TypeAlias = Callable[[Office, Request], Awaitable[Response]]
Handler: TypeAlias = Callable[[Office, Request, Visit, Form], Awaitable[Response]]


def routes(office: Office) -> list[Route]:
    """Return the dashboard's routes, static files included."""
    for name in FILES:
        asset(name)  # read and packed now, and not while somebody waits
    reference_page()  # as above

    def served(path: str, work: Work, *methods: str) -> Route:
        return _Route(path, partial(_served, path, work, office), methods=[*methods] or ["GET"])

    def page(path: str, handler: Handler, *methods: str) -> Route:
        return served(path, partial(_visited, handler), *methods)

    return [
        page("/", _overview),
        page("/accounts/{name}", _account),
        page("/accounts/{name}/chart", _chart),
        page("/accounts/{name}/plan", _plan),
        page("/audit", _audit, "GET", "POST"),
        page("/open", _open, "GET", "POST"),
        page("/pulse", _pulse),
        served("/docs", _docs),
        served("/sign-in", sign_in, "GET", "POST"),
        served("/sign-out", sign_out, "POST"),
        _Route("/static/{version}/{name}", static),
        _Route("/favicon.ico", favicon),
    ]


class _Route(Route):
    """A route that refuses a method that it does not take as pages refuse everything else."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        takes = self.methods or ()
        if scope["method"] in takes:
            await super().handle(scope, receive, send)
            return
        allow = ", ".join(sorted(takes))
        await _refused(Request(scope), HttpProblem(405, f"this address takes {allow}"), Allow=allow)(
            scope, receive, send
        )


def missing(request: Request) -> Response:
    """Return the page that says that there is no page."""
    return _refused(request, HttpProblem(404, "there is no page at this address"))


def _refused(request: Request, problem: HttpProblem, **headers: str) -> Response:
    """Return a refusal to whoever it is."""
    request.state.visit = None
    response = problem_page(request, problem_of(problem, None))
    response.headers.update(headers)
    return response


async def _served(route: str, work: Work, office: Office, request: Request) -> Response:
    """Answer a request: whatever happens, there is one answer, one line in the log, and no exception's text."""
    started = perf_counter()
    request_id = request_id_of(dict(request.headers.raw))
    request.state.visit = None
    try:
        response = await work(office, request)
    except OdographError as error:
        response = problem_page(request, _problem(office, request, error, request_id))
        response.raw_headers.extend(headers_of(error))
    except Exception as error:  # noqa: BLE001  whatever it is, its text must not leave
        logs.failure(error, request_id=request_id)
        response = problem_page(request, unexpected(request_id))
    response.headers["X-Request-ID"] = request_id
    visit: Visit | None = request.state.visit
    took = perf_counter() - started
    office.metrics.answered(route, response.status_code)
    if route == "/pulse" and response.status_code == 200:
        return response  # every open page asks every second or two: a line for each would bury the others
    name = request.path_params.get("name", "")
    logs.request_line(
        request_id=request_id,
        method=request.method,
        route=route,
        status=response.status_code,
        milliseconds=1e3 * took,
        account=name if visit is not None and visit.caller.sees(name) else "",
        principal="" if visit is None else visit.caller.principal,
        key="" if visit is None else visit.caller.key,
    )
    return response


def _problem(office: Office, request: Request, error: OdographError, request_id: str = "") -> Problem:
    """Return an error as it is told to whoever is signed in."""
    visit: Visit | None = request.state.visit
    return office.problem(error, None if visit is None else visit.caller, request_id)


async def _visited(handler: Handler, office: Office, request: Request) -> Response:
    """Let a signed-in browser through to a page, not too often, and check where a form came from."""
    visit = await visit_of(office, request)
    if visit is None:
        return signed_out(request)
    wait = office.limit.take(visit.caller.key)
    if wait:
        raise TooFast(wait)
    CLIENT.set(visit.caller.principal)
    form: Form = {}
    if request.method == "POST":
        check_origin(request)
        form = await form_of(request)
        check_sent(form, visit.csrf)
    return await handler(office, request, visit, form)


async def _shown(office: Office, request: Request, visit: Visit, work: Callable[..., Answer], *args: Any) -> Response:
    """Make an answer and its page where it may take a while."""
    return await office.compute(_made, request, office.ledger_of(visit.caller), visit.caller, work, args)


def _made(
    request: Request, ledger: Ledger, caller: Caller, work: Callable[..., Answer], args: tuple[Any, ...]
) -> Response:
    caller.require("read")
    beat = contents.pulse(ledger, caller)  # first, so that no change is missed
    return answered(request, work(ledger, caller, *args), beat)


async def _overview(office: Office, request: Request, visit: Visit, _form: Form) -> Response:
    return await _shown(office, request, visit, contents.overview, request.query_params)


async def _account(office: Office, request: Request, visit: Visit, _form: Form) -> Response:
    name = request.path_params["name"]
    return await _shown(office, request, visit, contents.account_page, name, request.query_params)


async def _chart(office: Office, request: Request, visit: Visit, _form: Form) -> Response:
    """Send the readings as they went: as Bokeh's document, as a plain picture, or as numbers."""
    query = request.query_params
    by_time, compare = query.get("by") == "time", bool(query.get("compare"))
    name, shape = request.path_params["name"], query.get("format")

    def draw(ledger: Ledger) -> tuple[str, bytes]:
        visit.caller.require("read")
        found = contents.readings(ledger, visit.caller, name, compare=compare)
        if shape == "svg":
            return "image/svg+xml", picture(found, by_time=by_time).encode()
        if shape == "json":
            form = found._asdict() | {"lines": [line._asdict() for line in found.lines]}
        else:
            form = chart(found, by_time=by_time, dark=query.get("theme") == "dark")
        return "application/json", msgspec.json.encode(form)

    kind, content = await office.compute(draw, office.ledger_of(visit.caller))
    return Response(content, 200, HEADERS, kind)


async def _plan(office: Office, request: Request, visit: Visit, _form: Form) -> Response:
    """Answer the planner alone, for the script that asks as people type."""
    name, query, caller = request.path_params["name"], request.query_params, visit.caller

    def ask(ledger: Ledger) -> tuple[PlanForm | None, dict[str, Any]]:
        planned = plan(ledger, caller, name, query)
        return planned, contents.plan_context(views.seen(ledger, caller, name).policy, name, planned, query)

    planned, context = await office.compute(ask, office.ledger_of(caller))
    if wants_json(request):
        return Response(msgspec.json.encode(planned), 200, HEADERS, "application/json")
    return fragment("plan.html", context)


async def _audit(office: Office, request: Request, visit: Visit, _form: Form) -> Response:
    if request.method != "POST":
        return await _shown(office, request, visit, contents.audit_page)
    ledger, work = office.ledger_of(visit.caller), partial(contents.audit_page, run=True)
    with office.auditing():
        return await office.audit(_made, request, ledger, visit.caller, work, ())


async def _open(office: Office, request: Request, visit: Visit, form: Form) -> Response:
    visit.caller.require("open")
    if request.method != "POST":
        return await _shown(office, request, visit, open_page)
    ledger = office.ledger_of(visit.caller)
    try:
        compiled = await office.solver.compile(policy_of(form))
        opened = choices(form)
        await office.run(ledger.open_account, policy=compiled, **opened)
    except NotPermitted:
        raise
    except OdographError as problem:
        return await _shown(office, request, visit, open_page, form, _problem(office, request, problem))
    return RedirectResponse(f"/accounts/{quote(opened['name'])}", 303, HEADERS)


async def _pulse(office: Office, _request: Request, visit: Visit, _form: Form) -> Response:
    beat = await office.run(contents.pulse, office.ledger_of(visit.caller), visit.caller)
    return PlainTextResponse(beat, headers=HEADERS)


async def _docs(office: Office, request: Request) -> Response:
    """Show the API's reference to everybody: it holds no data."""
    await visit_of(office, request)  # for the page's frame
    return answered(request, reference_page())
