"""The OpenAPI document, made from the table of routes and their schemas, and the reference that is made from it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec

from odograph.service.auth import PERMISSIONS, Role
from odograph.service.endpoint import PARQUET, Route
from odograph.service.schemas import CostForm, HealthForm, Problem

__all__ = [
    "FieldDescription",
    "Operation",
    "TypeDescription",
    "TypePart",
    "describe",
    "describe_operations",
    "describe_types",
]

_Schema: TypeAlias = Mapping[str, Any]

_REF: Final = "#/components/schemas/{name}"
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_ENTRY_ID: Final = {"type": "string", "minLength": 3, "maxLength": 130, "pattern": "^.+#[0-9]+$"}
_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": 200}
_PATH_PARAMETERS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "name": (_NAME, "An account's name."),
    "round": (_TEXT, "The idempotency key of a round."),
    "reservation": (_ENTRY_ID, "A reservation's id, such as census#17."),
    "entry": (_ENTRY_ID, "An entry, such as census#17."),
    "principal": (_TEXT, "A principal's name."),
    "key": ({"type": "string", "pattern": "^[0-9a-f]{12}$"}, "An API key's id."),
}
_IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A string of your own: in quotes as RFC 9651 has it, or without, percent-encoded UTF-8. Repeating"
    " a request with its key charges nothing.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 200,
        "pattern": r'^([!#-~][!-~]*|"([ !#-\[\]-~]|\\["\\])+")$',
    },
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
    components = {name: _without_tuples(form) for name, form in components.items()}
    unions = {_union_of(schemas[types.index(CostForm)]): "Cost"}
    components = {name: _with_named_unions(form, f"{name}Cost", unions) for name, form in components.items()}
    for refs, union in unions.items():
        kinds = [{"$ref": ref} for ref in refs]
        components[union] = {
            "oneOf": kinds,
            "discriminator": {"propertyName": "kind", "mapping": _kinds_of(refs, components)},
        }
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
        content = {"schema": {"type": "string", "format": "binary"}}
        content_type = "application/x-ndjson" if route.handler.__name__ == "export" else "text/plain"
        answers = {"200": {"description": "The document.", "content": {content_type: content}}}
    else:
        answers = {str(route.status): _content("Done.", known[route.response])}
    if route.repeatable:
        answers["200"] = _content(
            "The result of an earlier request with the same idempotency key; this one charged nothing.",
            known[route.response],
        )
    answers["default"] = _content(
        "A problem; `charged` tells what became of the charge.", known[Problem], "application/problem+json"
    )
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
    if route.upload and route.form is not None:
        operation["requestBody"]["content"][PARQUET.decode()] = {"schema": {"type": "string", "format": "binary"}}
    elif route.upload:
        schema = {"type": "string", "format": "binary", "description": "An export: a JSON document on each line."}
        operation["requestBody"] = {"required": True, "content": {"application/x-ndjson": {"schema": schema}}}
    return operation


def _without_tuples(schema: Any) -> Any:  # noqa: ANN401  any part of a schema
    """Return a schema with arrays of one type in place of tuples, which generators of clients do not understand."""
    if isinstance(schema, list):
        return [_without_tuples(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    form = {name: _without_tuples(one) for name, one in schema.items()}
    if "prefixItems" not in form:
        return form | ({"items": {}} if form.get("type") == "array" and "items" not in form else {})
    items = [json.loads(one) for one in dict.fromkeys(map(json.dumps, form.pop("prefixItems")))]
    return form | {"items": items[0] if len(items) == 1 else {"anyOf": items}}


def _union_of(schema: Any) -> tuple[str, ...]:  # noqa: ANN401  any part of a schema
    """Return what a union of kinds refers to; nothing for another schema."""
    if not isinstance(schema, dict) or "discriminator" not in schema:
        return ()
    return tuple(one["$ref"] for one in schema["anyOf"])


def _with_named_unions(schema: Any, name: str, unions: dict[tuple[str, ...], str]) -> Any:  # noqa: ANN401  as above
    """Return a schema with references in place of unions of kinds, which generators understand only by a name."""
    if refs := _union_of(schema):
        described = {"description": schema["description"]} if "description" in schema else {}
        return {"$ref": _REF.format(name=unions.setdefault(refs, name))} | described
    if isinstance(schema, list):
        return [_with_named_unions(one, name, unions) for one in schema]
    if isinstance(schema, dict):
        return {key: _with_named_unions(one, name, unions) for key, one in schema.items()}
    return schema


def _kinds_of(refs: Iterable[str], components: _Schema) -> dict[str, str]:
    """Return the schema of each kind, by the value of its field `kind`."""
    return {components[ref.rpartition("/")[2]]["properties"]["kind"]["enum"][0]: ref for ref in refs}


def _content(text: str, schema: dict[str, Any], content_type: str = "application/json") -> dict[str, Any]:
    return {"description": text, "content": {content_type: {"schema": schema}}}


# The document as a reference for readers: the operations by group, the types, and an example command for each.


_GROUP_TITLES: Final = {
    "accounts": "Accounts",
    "charges": "Charges",
    "populations": "Populations",
    "records": "Records",
    "admin": "Administration",
    "": "Health",
}
_LIMIT_KEYWORDS: Final = (
    ("minLength", "maxLength", "characters"),
    ("minItems", "maxItems", "items"),
    ("minProperties", "maxProperties", "names"),
    ("minimum", "maximum", ""),
)


class TypePart(NamedTuple):
    """A part of a type's name, and the type on this page that it links to, if any."""

    text: str
    link: str = ""


class FieldDescription(NamedTuple):
    """A field of a request or response, or a parameter."""

    name: str
    type_parts: tuple[TypePart, ...]
    required: bool
    limits: str
    text: str
    location: str = ""  # of a parameter: path, query or header


class TypeDescription(NamedTuple):
    """A type of the API."""

    name: str
    text: str
    fields: tuple[FieldDescription, ...]


class Operation(NamedTuple):
    """One operation of the API."""

    id: str
    method: str
    path: str
    summary: str
    details: str
    roles: tuple[str, ...]  # empty if no key is needed
    parameters: tuple[FieldDescription, ...]
    body_format: str  # the body's media type; empty if there is no body
    body_type: str  # the name of the body's type, if it has one
    fields: tuple[FieldDescription, ...]
    responses: tuple[tuple[str, str, str], ...]  # status, meaning, type
    example: str
    whole_ledger: bool = False  # whether a key bound to accounts is refused


def describe_operations(routes: Iterable[Route]) -> dict[str, list[Operation]]:
    """Return the operations of the routes by the title of their group."""
    routes = [*routes]
    document = describe(routes)
    whole_ledger = {(route.method.lower(), route.path) for route in routes if route.needs_every_account}
    groups: dict[str, list[Operation]] = {title: [] for title in _GROUP_TITLES.values()}
    for path, methods in sorted(document["paths"].items()):
        for method, form in methods.items():
            tag = form.get("tags", [""])[0]
            operation = _describe_operation(method, path, form, document["components"]["schemas"])
            operation = operation._replace(whole_ledger=(method, path) in whole_ledger)
            groups.setdefault(_GROUP_TITLES.get(tag, tag), []).append(operation)
    return groups


def describe_types(routes: Iterable[Route]) -> list[TypeDescription]:
    """Return the types of requests and responses by name."""
    routes = [*routes]
    queries = {route.query.__name__ for route in routes if route.query is not None}  # shown as parameters
    schemas = describe(routes)["components"]["schemas"]
    shown = [(name, form) for name, form in sorted(schemas.items()) if name not in queries]
    return [TypeDescription(name, form.get("description", ""), _describe_fields(form)) for name, form in shown]


def _describe_operation(method: str, path: str, form: _Schema, schemas: _Schema) -> Operation:
    summary, _, details = form["summary"].partition("\n\n")
    body = [*form.get("requestBody", {"content": {}})["content"].items()]
    body_type = _referenced_type(body[0][1].get("schema", {})) if body else ""
    return Operation(
        id=form["operationId"],
        method=method.upper(),
        path=path,
        summary=summary,
        details=details,
        roles=tuple(role for role in Role if role in PERMISSIONS[form["x-role"]]) if "x-role" in form else (),
        parameters=tuple(_describe_parameter(parameter) for parameter in form.get("parameters", ())),
        body_format=body[0][0] if body else "",
        body_type=body_type,
        fields=_describe_fields(schemas[body_type]) if body_type else (),
        responses=tuple(_describe_responses(form["responses"])),
        example=_curl_command(method.upper(), path, form, schemas),
    )


def _describe_responses(responses: _Schema) -> Iterable[tuple[str, str, str]]:
    for status, response in responses.items():
        types = [_referenced_type(content.get("schema", {})) for content in response["content"].values()]
        yield "4xx, 5xx" if status == "default" else status, response["description"], types[0]


def _describe_fields(form: _Schema) -> tuple[FieldDescription, ...]:
    required = form.get("required", ())
    return tuple(
        FieldDescription(
            name, _type_parts(schema), name in required, _describe_limits(schema), schema.get("description", "")
        )
        for name, schema in form.get("properties", {}).items()
    )


def _describe_parameter(form: _Schema) -> FieldDescription:
    schema, required = form["schema"], form.get("required", False)
    text = form.get("description", "")
    return FieldDescription(form["name"], _type_parts(schema), required, _describe_limits(schema), text, form["in"])


def _type_parts(schema: _Schema) -> tuple[TypePart, ...]:
    """Return a type in words, with links to the types on this page."""
    if name := _referenced_type(schema):
        return (TypePart(name, name),)
    if "oneOf" in schema:
        return _join_types(" or ", schema["oneOf"])
    if "enum" in schema:
        return (TypePart(" or ".join(json.dumps(value) for value in schema["enum"])),)
    if "anyOf" in schema:
        return _join_types(" or ", schema["anyOf"])
    for inner, word in (("items", "list of "), ("additionalProperties", "by name: ")):
        if schema.get(inner):
            return (TypePart(word), *_type_parts(schema[inner]))
    return (TypePart(schema.get("type", "any")),)


def _join_types(separator: str, schemas: Iterable[_Schema]) -> tuple[TypePart, ...]:
    parts = [part for schema in schemas if schema for part in (TypePart(separator), *_type_parts(schema))]
    return tuple(parts[1:])


def _describe_limits(schema: _Schema) -> str:
    """Return the values that a schema accepts, and its default."""
    limits = [text for one in schema.get("anyOf", ()) if (text := _describe_limits(one))]
    for least, most, noun in _LIMIT_KEYWORDS:
        to = "to" if least in schema else "up to"
        bounds = [f"{word} {schema[key]:,}" for word, key in (("from", least), (to, most)) if key in schema]
        limits += [" ".join([*bounds, *([noun] if noun else [])])] if bounds else []
    limits += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    limits += [f"matches {schema['pattern']}"] if "pattern" in schema else []
    limits += [f"default {json.dumps(schema['default'])}"] if "default" in schema else []
    return "; ".join(limits)


# Examples: commands that can be run as they are.


# Values of fields that accept many, by the field's name, or by its type and name.
_EXAMPLE_VALUES: Final[dict[str, object]] = {
    "CreatePopulationForm.name": "telemetry",
    "PeopleForm.ids": [0, 1, 2],
    "CalibrateForm.mechanism": "laplace",
    "CalibrateForm.settings": {"sensitivity": "3"},
    "LargestForm.kind": "pure",
    "PolicyForm.epsilon": "1",
    "accounts": ["census"],
    "delta": "1e-6",
    "entry": "census#17",
    "key": "q-17",
    "name": "census",
    "note": "weekly count",
    "principal": "ana",
    "reason": "the job was canceled before it ran",
    "reservation": "census#17",
    "round": "monday",
    "times": 10,
}
_EXAMPLE_KEY_ID: Final = "0123456789ab"
# Optional fields that the examples include.
_EXAMPLE_OPTIONAL_FIELDS: Final = {
    "CalibrateForm": ("settings", "times"),
    "CreatePopulationForm": ("policy",),
    "LargestForm": ("kind", "times"),
    "MakeKeyForm": ("accounts",),
    "OpenForm": ("policy",),
    "PeopleForm": ("ids",),
    "PolicyForm": ("epsilon", "delta"),
    "SpendForm": ("note",),
}


def _referenced_type(schema: _Schema) -> str:
    """Return the name of the type that a schema refers to, or an empty string."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _curl_command(method: str, path: str, operation: _Schema, schemas: _Schema) -> str:
    """Return an example command for an operation."""
    headers = ["Authorization: Bearer $ODOGRAPH_TOKEN"] if "x-role" in operation else []
    for parameter in operation.get("parameters", ()):
        name = parameter["name"]
        if parameter["in"] == "path":
            value = _EXAMPLE_KEY_ID if name == "key" else str(_EXAMPLE_VALUES[name])
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        elif parameter["in"] == "header":
            headers.append(f"{name}: {_EXAMPLE_VALUES['key']}")
    body = []
    for media_type, content in operation.get("requestBody", {"content": {}})["content"].items():
        headers.append(f"Content-Type: {media_type}")
        sent = json.dumps(_example_value(content["schema"], schemas)) if media_type == "application/json" else ""
        body.append(f"  -d '{sent}'" if sent else "  --data-binary @export.jsonl")
    option = "" if method == "GET" else f"-X {method} "
    return " \\\n".join([f"curl {option}$ODOGRAPH_URL{path}", *(f'  -H "{header}"' for header in headers), *body])


def _example_value(schema: _Schema, schemas: _Schema, field: str = "") -> object:
    """Return a value that a schema accepts, with its required fields and few others."""
    value = _EXAMPLE_VALUES.get(field) or _EXAMPLE_VALUES.get(field.rpartition(".")[2])
    if value is not None:
        return value
    if name := _referenced_type(schema):
        form = schemas[name]
        included = {*form.get("required", ()), *_EXAMPLE_OPTIONAL_FIELDS.get(name, ())}
        fields = form.get("properties", {}).items()
        if fields:
            return {key: _example_value(inner, schemas, f"{name}.{key}") for key, inner in fields if key in included}
        schema = form  # a union of kinds
    for values in ("enum", "examples"):
        if values in schema:
            return schema[values][0]
    for choices in ("anyOf", "oneOf"):
        if choices in schema:
            return _example_value(schema[choices][0], schemas, field)
    if schema["type"] == "array":
        return [_example_value(schema["items"], schemas)]
    return {str(_EXAMPLE_VALUES["name"]): _example_value(schema["additionalProperties"], schemas)}
