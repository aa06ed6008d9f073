"""The description of the API, made from the table of routes and from what they read and write."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, Final

import msgspec

from odograph.service.answers import HealthForm, Problem
from odograph.service.door import Route
from odograph.service.forms import CostForm

__all__ = ["describe"]

_REF: Final = "#/components/schemas/{name}"
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_PLACE: Final = {"type": "string", "minLength": 3, "maxLength": 130, "pattern": "^.+#[0-9]+$"}
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": 200}
_PATHS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "name": (_NAME, "An account's name."),
    "reservation": (_PLACE, "A reservation's id, such as census#17."),
    "entry": (_PLACE, "An entry, such as census#17."),
    "principal": (_TEXT, "A principal's name."),
    "key": ({"type": "string", "pattern": "^[0-9a-f]{12}$"}, "An API key's id."),
}
_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A text of your own, percent-encoded UTF-8. The same key and request again charges nothing more.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"},
}
_ABOUT: Final = (
    "Privacy budgets for fully adaptive analysis. Charge first, run second: an answer means that the charge is"
    " durable. A refusal says what was spent, what is left and what would fit; it changes nothing."
)


def describe(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    listed = [*routes]
    types: list[Any] = [Problem, HealthForm, CostForm]
    types += [one for route in listed for one in (route.answer, route.form, route.query) if one not in (None, bytes)]
    types = [*dict.fromkeys(types)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    known = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known, components)
    for path, what in (("/healthz", "Say that the process answers."), ("/readyz", "Say whether it can work.")):
        answers = {"200": _content("Yes.", known[HealthForm]), "503": _content("No.", known[HealthForm])}
        paths[path] = {"get": {"summary": what, "operationId": path[1:], "security": [], "responses": answers}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Odograph", "version": version("odograph"), "description": _ABOUT},
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
        schema, text = _PATHS[name]
        parameters.append({"name": name, "in": "path", "required": True, "description": text, "schema": schema})
    if route.query is not None:
        fields = components[route.query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    if route.keyed:
        parameters.append(_KEY)
    if route.answer is bytes:
        answers = {"200": {"description": "The text.", "content": {"text/plain": {}, "application/x-ndjson": {}}}}
    else:
        answers = {str(route.status): _content("Done.", known[route.answer])}
    if route.repeated:
        answers["200"] = _content("Done before under the same key; nothing was charged now.", known[route.answer])
    answers["default"] = _content("What went wrong.", known[Problem], "application/problem+json")
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
