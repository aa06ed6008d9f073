"""The OpenAPI description, made from the table of routes and their request and response schemas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final

import msgspec

from odograph.service.endpoint import Route
from odograph.service.request_schemas import CostForm
from odograph.service.response_schemas import HealthForm, Problem

__all__ = ["describe"]

_REF: Final = "#/components/schemas/{name}"
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_ENTRY_ID: Final = {"type": "string", "minLength": 3, "maxLength": 130, "pattern": "^.+#[0-9]+$"}
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": 200}
_PATH_PARAMETERS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "name": (_NAME, "An account's name."),
    "reservation": (_ENTRY_ID, "A reservation's id, such as census#17."),
    "entry": (_ENTRY_ID, "An entry, such as census#17."),
    "principal": (_TEXT, "A principal's name."),
    "key": ({"type": "string", "pattern": "^[0-9a-f]{12}$"}, "An API key's id."),
}
_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A string of your own, percent-encoded UTF-8. Repeating a request with its key charges nothing.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
}
_DESCRIPTION: Final = (
    "Privacy budgets for fully adaptive analysis. Charge first, then run the mechanism: a receipt means that the"
    " charge is durable. A refusal states what is spent, what is left and what would fit; it changes nothing."
)


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    listed = [*routes]
    types: list[Any] = [Problem, HealthForm, CostForm]
    types += [
        one for route in listed for one in (route.response, route.form, route.query) if one not in (None, bytes)
    ]
    types = [*dict.fromkeys(types)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known, components)
    for path, what in (("/healthz", "Whether the process responds."), ("/readyz", "Whether charges can be made.")):
        answers = {"200": _content("Yes.", known[HealthForm]), "503": _content("No.", known[HealthForm])}
        paths[path] = {"get": {"summary": what, "operationId": path[1:], "security": [], "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Odograph", "version": version("odograph"), "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "An API key."}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route, known: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    for name in re.findall(r"{(\w+)}", route.path):
        schema, text = _PATH_PARAMETERS[name]
        parameters.append({"name": name, "in": "path", "required": True, "description": text, "schema": schema})
    if route.query is not None:
        fields = components[route.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    if route.needs_idempotency_key:
        parameters.append(_IDEMPOTENCY_KEY)
    if route.response is bytes:
        answers = {"200": {"description": "The document.", "content": {"text/plain": {}, "application/x-ndjson": {}}}}
    else:
        answers = {str(route.status): _content("Done.", known[route.response])}
    if route.repeatable:
        answers["200"] = _content(
            "Repeats an earlier request with the same idempotency key; nothing was charged now.",
            known[route.response],
        )
    answers["default"] = _content("A problem.", known[Problem], "application/problem+json")
    operation: dict[str, Any] = {
        "summary": inspect.getdoc(route.handler) or "",
        "operationId": route.handler.__name__.rstrip("_"),
        "tags": [route.handler.__module__.rpartition(".")[2]],
        "x-role": route.verb,
        "parameters": parameters,
        "responses": answers,
    }
    if route.form is not None:
        needed = bool(components[route.form.__name__].get("required"))
        content = {"application/json": {"schema": known[route.form]}}
        operation["requestBody"] = {"required": needed, "content": content}
    if route.upload:
        operation["requestBody"] = {"required": True, "content": {"application/x-ndjson": {}}}
    return operation


def _content(text: str, schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {content_type: {"schema": schema}}}
