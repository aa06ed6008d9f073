"""The dashboard's routes: sign-in, overview, account with its planner, audit, opening an account, API reference.

A GET changes nothing. A form that changes something is a POST with a checked origin and CSRF token. No page can
charge an account. With an owner's session a page can open and close accounts, commit and void reservations and
revoke keys (a runner's can commit and void), as the API would for that key. Making a key needs an owner's key in the
form, so a session cookie alone never becomes something that can spend.
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
from odograph.service import logs, visibility
from odograph.service.auth import Caller
from odograph.service.dashboard import owner_pages, view_models
from odograph.service.dashboard.charts import account_history, bokeh_chart, svg_chart
from odograph.service.dashboard.pages import (
    HEADERS,
    STATIC_FILES,
    Page,
    PageSession,
    check_csrf,
    check_origin,
    fragment_response,
    load_session,
    load_static_file,
    page_response,
    page_wording,
    problem_page,
    read_form,
    redirect_to_sign_in,
    serve_favicon,
    serve_static_file,
    sign_in,
    sign_out,
    wants_json,
)
from odograph.service.endpoint import headers_of, request_id_of
from odograph.service.schemas import Problem
from odograph.service.state import CLIENT, AppState
from odograph.service.visibility import HttpProblem, TooFast, problem_of, unexpected_problem

__all__ = ["not_found", "routes"]

FormFields: TypeAlias = dict[str, str]  # empty unless the request is a POST
Respond: TypeAlias = Callable[[AppState, Request], Awaitable[Response]]
PageHandler: TypeAlias = Callable[[AppState, Request, PageSession, FormFields], Awaitable[Response]]


def routes(state: AppState) -> list[Route]:
    """Return the dashboard's routes, including static files."""
    for name in STATIC_FILES:
        load_static_file(name)  # read and compressed now, not during the first request
    view_models.api_reference_page()

    def public(path: str, respond: Respond, *methods: str) -> Route:
        return _PageRoute(path, partial(_respond, path, respond, state), methods=[*methods] or ["GET"])

    def page(path: str, handler: PageHandler, *methods: str) -> Route:
        return public(path, partial(_with_session, handler), *methods)

    return [
        page("/", _overview),
        page("/accounts/{name}", _account),
        page("/accounts/{name}/chart", _chart),
        page("/accounts/{name}/plan", _plan),
        page("/audit", _audit, "GET", "POST"),
        page("/open", _open_account, "GET", "POST"),
        *(page(path, partial(_show, handler), *methods) for path, handler, methods in owner_pages.PAGES),
        page("/data-version", _data_version),
        public("/docs", _api_reference),
        public("/sign-in", sign_in, "GET", "POST"),
        public("/sign-out", sign_out, "POST"),
        _PageRoute("/static/{version}/{name}", serve_static_file),
        _PageRoute("/favicon.ico", serve_favicon),
    ]


class _PageRoute(Route):
    """A route that answers a wrong method with a page, like every other problem."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = self.methods or ()
        if scope["method"] in allowed:
            await super().handle(scope, receive, send)
            return
        allow = ", ".join(sorted(allowed))
        problem = HttpProblem(405, f"this address accepts {allow} only")
        await _public_problem(Request(scope), problem, Allow=allow)(scope, receive, send)


def not_found(request: Request) -> Response:
    """Return the page for an address without a page."""
    return _public_problem(request, HttpProblem(404, "there is no page at this address"))


def _public_problem(request: Request, problem: HttpProblem, **headers: str) -> Response:
    """Return a problem as a page without looking up the session."""
    request.state.browser_session = None
    response = problem_page(request, problem_of(problem, None))
    response.headers.update(headers)
    return response


async def _respond(route: str, respond: Respond, state: AppState, request: Request) -> Response:
    """Answer a request and log it; no text of an unexpected exception reaches the client."""
    started = perf_counter()
    request_id = request_id_of(dict(request.headers.raw))
    request.state.browser_session = None
    try:
        response = await respond(state, request)
    except OdographError as error:
        response = problem_page(request, _problem(state, request, error, request_id))
        response.raw_headers.extend(headers_of(error))
    except Exception as error:  # noqa: BLE001  the text of no exception may reach the client
        logs.failure(error, request_id=request_id)
        response = problem_page(request, unexpected_problem(request_id))
    response.headers["X-Request-ID"] = request_id
    session: PageSession | None = request.state.browser_session
    took = perf_counter() - started
    state.metrics.count_response(route, response.status_code, took)
    if route == "/data-version" and response.status_code == 200:
        return response  # not logged: every open page asks every second or two
    name = request.path_params.get("name", "")
    logs.request_line(
        request_id=request_id,
        method=request.method,
        route=route,
        status=response.status_code,
        milliseconds=1e3 * took,
        account=name if session is not None and session.caller.sees(name) else "",
        principal="" if session is None else session.caller.principal,
        api_key_id="" if session is None else session.caller.api_key_id,
    )
    return response


def _problem(state: AppState, request: Request, error: OdographError, request_id: str = "") -> Problem:
    """Return an error as the signed-in caller may see it."""
    session: PageSession | None = request.state.browser_session
    problem = state.problem(error, None if session is None else session.caller, request_id)
    problem.detail = page_wording(problem.detail)
    return problem


async def _with_session(handler: PageHandler, state: AppState, request: Request) -> Response:
    """Call a page's handler with the browser's session, after checking the rate limit and, for a POST, the form."""
    session = await load_session(state, request)
    if session is None:
        return redirect_to_sign_in(request)
    wait = state.limit.take(session.caller.api_key_id)
    if wait:
        raise TooFast(wait)
    CLIENT.set(session.caller.principal)
    form: FormFields = {}
    if request.method == "POST":
        check_origin(request)
        form = await read_form(request)
        check_csrf(form, session.csrf)
    return await handler(state, request, session, form)


async def _render_in_thread(
    state: AppState, request: Request, session: PageSession, view: Callable[..., Page], *args: Any
) -> Response:
    """Compute and render a page outside the event loop."""
    return await state.compute(_render, request, state.ledger_of(session.caller), session.caller, view, args)


def _render(
    request: Request, ledger: Ledger, caller: Caller, view: Callable[..., Page], args: tuple[Any, ...]
) -> Response:
    caller.require("read")
    account = args[0] if view is view_models.account_page else ""
    version = view_models.data_version(ledger, caller, account)  # before the data, so that no change is missed
    return page_response(request, view(ledger, caller, *args), version)


async def _show(
    handler: owner_pages.Handler, state: AppState, request: Request, session: PageSession, form: FormFields
) -> Response:
    """Call a handler of an owner's page, and render the page that it wants to be shown."""
    shown = await handler(state, request, session, form)
    if isinstance(shown, Response):
        return shown
    return await _render_in_thread(state, request, session, shown.view, *shown.args)


async def _overview(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    return await _render_in_thread(state, request, session, view_models.overview_page, request.query_params)


async def _account(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    name = request.path_params["name"]
    args = name, request.query_params, state.alerts
    return await _render_in_thread(state, request, session, view_models.account_page, *args)


async def _chart(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    """Send the history of readings as a Bokeh document, as an SVG or as numbers."""
    query = request.query_params
    by_time, compare = query.get("by") == "time", bool(query.get("compare"))
    name, chosen_format = request.path_params["name"], query.get("format")

    def draw(ledger: Ledger) -> tuple[str, bytes]:
        session.caller.require("read")
        history = account_history(ledger, session.caller, name, compare=compare)
        if chosen_format == "svg":
            return "image/svg+xml", svg_chart(history, by_time=by_time).encode()
        if chosen_format == "json":
            form = history._asdict() | {"lines": [line._asdict() for line in history.lines]}
        else:
            form = bokeh_chart(history, by_time=by_time, dark=query.get("theme") == "dark")
        return "application/json", msgspec.json.encode(form)

    media_type, content = await state.compute(draw, state.ledger_of(session.caller))
    return Response(content, 200, HEADERS, media_type)


async def _plan(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    """Send the planner's result on its own, for the script that asks while the user types."""
    name, query, caller = request.path_params["name"], request.query_params, session.caller

    def evaluate(ledger: Ledger) -> tuple[view_models.Plan | None, dict[str, Any]]:
        plan = view_models.make_plan(ledger, caller, name, query)
        return plan, view_models.plan_context(
            visibility.visible_account(ledger, caller, name).policy, name, plan, query
        )

    plan, context = await state.compute(evaluate, state.ledger_of(caller))
    if wants_json(request):
        return Response(msgspec.json.encode(plan), 200, HEADERS, "application/json")
    return fragment_response("plan.html", context)


async def _audit(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    if request.method != "POST":
        return await _render_in_thread(state, request, session, view_models.audit_page, request.query_params)
    ledger, view = state.ledger_of(session.caller), partial(view_models.audit_page, run=True)
    with state.auditing():
        return await state.audit(_render, request, ledger, session.caller, view, (request.query_params,))


async def _open_account(state: AppState, request: Request, session: PageSession, form: FormFields) -> Response:
    session.caller.require("open")
    if request.method != "POST":
        return await _render_in_thread(state, request, session, owner_pages.open_page)
    if form.get("compare"):
        return await _render_in_thread(state, request, session, owner_pages.open_page, form)
    ledger = state.ledger_of(session.caller)
    try:
        compiled = await state.solver.compile(view_models.policy_from_form(form))
        arguments = view_models.open_account_arguments(form)
        await state.run(ledger.open_account, policy=compiled, **arguments)
    except NotPermitted:
        raise
    except OdographError as error:
        problem = _problem(state, request, error)
        return await _render_in_thread(state, request, session, owner_pages.open_page, form, problem)
    return RedirectResponse(f"/accounts/{quote(arguments['name'])}", 303, HEADERS)


async def _data_version(state: AppState, request: Request, session: PageSession, _form: FormFields) -> Response:
    """Send the version of what the page of one account shows, or of everything that the caller sees."""
    ledger, account = state.ledger_of(session.caller), request.query_params.get("account", "")
    version = await state.run(view_models.data_version, ledger, session.caller, account)
    return PlainTextResponse(version, headers=HEADERS)


async def _api_reference(state: AppState, request: Request) -> Response:
    """Show the API reference, to any client: it contains no data."""
    await load_session(state, request)  # for the header of the page
    return page_response(request, view_models.api_reference_page())
