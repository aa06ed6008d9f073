"""The reference of the API, as a page: the OpenAPI document for people, and the document itself as its twin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from odograph.service.access import MAY, Role
from odograph.service.api import ROUTES
from odograph.service.dashboard.examples import curl, name_of
from odograph.service.dashboard.markup import Answer, part
from odograph.service.door import Route
from odograph.service.openapi import describe

__all__ = ["Field", "Operation", "Piece", "Shape", "operations", "reference_page", "shapes"]

_GROUPS: Final = {
    "accounts": "Accounts",
    "charges": "Charges",
    "records": "Records",
    "admin": "Administration",
    "": "Health",
}
_PAIRS: Final = (
    ("minLength", "maxLength", "characters"),
    ("minItems", "maxItems", "items"),
    ("minProperties", "maxProperties", "names"),
    ("minimum", "maximum", ""),
)


class Piece(NamedTuple):
    """A part of a type's name, and the type on this page that it is, if any."""

    text: str
    ref: str = ""


class Field(NamedTuple):
    """Something that is sent or answered."""

    name: str
    kind: tuple[Piece, ...]
    required: bool
    limits: str
    text: str
    place: str = ""  # of a parameter: path, query or header


class Shape(NamedTuple):
    """A type of the API."""

    name: str
    text: str
    fields: tuple[Field, ...]


class Operation(NamedTuple):
    """One verb of the API."""

    id: str
    method: str
    path: str
    summary: str
    more: str
    who: tuple[str, ...]  # the roles; none where no key is needed
    parameters: tuple[Field, ...]
    kind: str  # how the body is written; empty if there is none
    body: str  # its type, if it has one
    fields: tuple[Field, ...]
    answers: tuple[tuple[str, str, str], ...]  # status, what it means, type
    example: str
    whole: bool = False  # whether a key bound to accounts is refused


def operations(routes: Iterable[Route]) -> dict[str, list[Operation]]:
    """Return what the routes do, grouped as people look for it."""
    listed = [*routes]
    document = describe(listed)
    whole = {(route.method.lower(), route.path) for route in listed if route.whole}
    found: dict[str, list[Operation]] = {title: [] for title in _GROUPS.values()}
    for path, methods in sorted(document["paths"].items()):
        for method, form in methods.items():
            tag = form.get("tags", [""])[0]
            made = _operation(method, path, form, document["components"]["schemas"])
            found.setdefault(_GROUPS.get(tag, tag), []).append(made._replace(whole=(method, path) in whole))
    return found


def shapes(routes: Iterable[Route]) -> list[Shape]:
    """Return the types that are sent or answered, by name."""
    listed = [*routes]
    queries = {route.query.__name__ for route in listed if route.query is not None}  # shown as parameters
    schemas = describe(listed)["components"]["schemas"]
    named = [(name, form) for name, form in sorted(schemas.items()) if name not in queries]
    return [Shape(name, form.get("description", ""), _fields(form)) for name, form in named]


@cache
def reference_page() -> Answer:
    """Return the page; its twin is the document. Made once: it holds no data, and anybody may ask for it."""
    document = describe(ROUTES)
    context = {"about": document["info"], "groups": operations(ROUTES), "shapes": shapes(ROUTES)}
    twin = msgspec.Raw(msgspec.json.encode(document))
    return Answer("reference.html", "API", twin, {"content": part("operations.html", context)})


def _operation(method: str, path: str, form: Mapping[str, Any], schemas: Mapping[str, Any]) -> Operation:
    summary, _, more = form["summary"].partition("\n\n")
    body = [*form.get("requestBody", {"content": {}})["content"].items()]
    sent = name_of(body[0][1].get("schema", {})) if body else ""
    return Operation(
        id=form["operationId"],
        method=method.upper(),
        path=path,
        summary=summary,
        more=more,
        who=tuple(role for role in Role if role in MAY[form["x-role"]]) if "x-role" in form else (),
        parameters=tuple(_parameter(one) for one in form.get("parameters", ())),
        kind=body[0][0] if body else "",
        body=sent,
        fields=_fields(schemas[sent]) if sent else (),
        answers=tuple(_answers(form["responses"])),
        example=curl(method.upper(), path, form, schemas),
    )


def _answers(responses: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for status, answer in responses.items():
        kinds = [name_of(content.get("schema", {})) for content in answer["content"].values()]
        yield "4xx, 5xx" if status == "default" else status, answer["description"], kinds[0]


def _fields(form: Mapping[str, Any]) -> tuple[Field, ...]:
    required = form.get("required", ())
    return tuple(
        Field(name, _kind(schema), name in required, _limits(schema), schema.get("description", ""))
        for name, schema in form.get("properties", {}).items()
    )


def _parameter(form: Mapping[str, Any]) -> Field:
    schema = form["schema"]
    text = form.get("description", "")
    return Field(form["name"], _kind(schema), form.get("required", False), _limits(schema), text, form["in"])


def _kind(schema: Mapping[str, Any]) -> tuple[Piece, ...]:
    """Write a type in words, with links to the types of this page."""
    if name := name_of(schema):
        return (Piece(name, name),)
    if "enum" in schema:
        return (Piece(" or ".join(json.dumps(value) for value in schema["enum"])),)
    if "anyOf" in schema:
        return _joined(" or ", schema["anyOf"])
    if "prefixItems" in schema:
        return (Piece("["), *_joined(", ", schema["prefixItems"]), Piece("]"))
    for inner, word in (("items", "list of "), ("additionalProperties", "by name: ")):
        if schema.get(inner):
            return (Piece(word), *_kind(schema[inner]))
    return (Piece(schema.get("type", "anything")),)


def _joined(word: str, schemas: Iterable[Mapping[str, Any]]) -> tuple[Piece, ...]:
    pieces = [piece for schema in schemas if schema for piece in (Piece(word), *_kind(schema))]
    return tuple(pieces[1:])


def _limits(schema: Mapping[str, Any]) -> str:
    """Say which values are taken, and what is taken if none is sent."""
    found = [text for one in schema.get("anyOf", ()) if (text := _limits(one))]
    for least, most, unit in _PAIRS:
        bounds = [f"{word} {schema[key]:,}" for word, key in (("from", least), ("to", most)) if key in schema]
        found += [" ".join([*bounds, *([unit] if unit else [])])] if bounds else []
    found += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    found += [f"as {schema['pattern']}"] if "pattern" in schema else []
    found += [f"{json.dumps(schema['default'])} if left out"] if "default" in schema else []
    return "; ".join(found)
