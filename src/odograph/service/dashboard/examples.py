"""Examples of requests, made from the OpenAPI document: each can be sent as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

__all__ = ["curl", "name_of", "sample"]

Schema = Mapping[str, Any]

# What is said where many things could be, by the field's name, or by its type and name.
_SAID: Final[dict[str, object]] = {
    "LargestForm.kind": "pure",
    "PolicyForm.epsilon": "1",
    "accounts": ["census"],
    "delta": "1e-6",
    "entry": "census#17",
    "key": "q-17",
    "name": "census",
    "note": "weekly count",
    "principal": "ana",
    "reason": "the job was cancelled before it ran",
    "reservation": "census#17",
    "times": 10,
}
_KEY_ID: Final = "0123456789ab"
# Fields that need not be sent, and that an example is not to be without.
_ALSO: Final = {
    "LargestForm": ("kind", "times"),
    "MakeKeyForm": ("accounts",),
    "OpenForm": ("policy",),
    "SpendForm": ("note",),
}


def name_of(schema: Schema) -> str:
    """Return the name of the type that a schema refers to, if it does."""
    return str(schema.get("$ref", "")).rpartition("/")[2]


def curl(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    """Return the command that asks for an operation."""
    headers = ["Authorization: Bearer $ODOGRAPH_TOKEN"] if "x-role" in operation else []
    for one in operation.get("parameters", ()):
        if one["in"] == "path":
            said = _KEY_ID if one["name"] == "key" else str(_SAID[one["name"]])
            path = path.replace(f"{{{one['name']}}}", quote(said, safe=""))
        elif one["in"] == "header":
            headers.append(f"{one['name']}: {_SAID['key']}")
    body = []
    for kind, content in operation.get("requestBody", {"content": {}})["content"].items():
        headers.append(f"Content-Type: {kind}")
        sent = json.dumps(sample(content["schema"], schemas)) if content else ""
        body.append(f"  -d '{sent}'" if sent else "  --data-binary @export.jsonl")
    verb = "" if method == "GET" else f"-X {method} "
    return " \\\n".join([f"curl {verb}$ODOGRAPH_URL{path}", *(f'  -H "{header}"' for header in headers), *body])


def sample(schema: Schema, schemas: Schema, place: str = "") -> object:
    """Return a value that the schema takes: what must be there, and little else."""
    said = _SAID.get(place) or _SAID.get(place.rpartition(".")[2])
    if said is not None:
        return said
    if name := name_of(schema):
        form = schemas[name]
        shown = {*form.get("required", ()), *_ALSO.get(name, ())}
        fields = form["properties"].items()
        return {field: sample(inner, schemas, f"{name}.{field}") for field, inner in fields if field in shown}
    for values in ("enum", "examples"):
        if values in schema:
            return schema[values][0]
    if "anyOf" in schema:
        return sample(schema["anyOf"][0], schemas, place)
    if schema["type"] == "array":
        return [sample(schema["items"], schemas)]
    return {str(_SAID["name"]): sample(schema["additionalProperties"], schemas)}
