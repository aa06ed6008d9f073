"""Hypothesis strategies that damage valid JSON documents: their values, or their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Final

from hypothesis import strategies as st

NASTY: Final[tuple[Any, ...]] = (
    *(
        "",
        " ",
        "\0",
        "\ud800",
        "1e999",
        "1e-9999",
        "-1",
        "NaN",
        "inf",
        "1/0",
        "0/1",
        "9" * 500,
        "9" * 5000,
        "1/3",
        "+1",
    ),
    *(
        "basic",
        "exact",
        "census",
        "census#1",
        "a#-1",
        "kind",
        "__class__",
        "../x",
        "%00",
        "１",
        "\u202e",
        "é",
        "x" * 300,
    ),
    *(0, -1, 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 1e308, 1e-320, -0.0, 0.1, float("nan"), float("inf")),
    *(None, True, False, [], {}, [[]], [None], {"": None}, {"kind": "pure"}, {"kind": "best-of", "parts": [[1, {}]]}),
)
JUNK: Final = st.sampled_from(NASTY).map(deepcopy) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def _slots(document: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401  JSON
    """Yield every slot of a document: its container, and its key or index."""
    keys: list[Any] = [*document] if isinstance(document, dict) else [*range(len(document))]
    for key in keys:
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _slots(document[key])


@st.composite
def mutated(draw: st.DrawFn, documents: Sequence[Any]) -> Any:  # noqa: ANN401  JSON
    """Draw a document that differs from a valid one in up to three slots."""
    document = {"document": deepcopy(draw(st.sampled_from(documents)))}
    for _ in range(draw(st.integers(0, 3))):
        slots = [*_slots(document)]
        holder, key = slots[draw(st.integers(0, len(slots) - 1))]
        how = draw(st.sampled_from(["replace", "remove", "add", "rename", "wrap"]))
        if how == "replace" or holder is document:
            holder[key] = draw(JUNK)
        elif how == "remove":
            del holder[key]
        elif how == "wrap":
            holder[key] = [holder[key]]
        elif isinstance(holder, list):
            holder.insert(key, draw(JUNK))
        elif how == "add":
            holder[draw(st.text(max_size=8))] = draw(JUNK)
        else:
            holder[draw(st.sampled_from([*holder, "kind", "form"]))] = holder.pop(key)
    return document["document"]


@st.composite
def garbled(draw: st.DrawFn, text: bytes) -> bytes:
    """Draw a byte string with some bytes removed, inserted, or repeated."""
    found = bytearray(text)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(found)))
        upto = min(len(found), at + draw(st.integers(0, 12)))
        how = draw(st.sampled_from(["put in", "leave out", "repeat", "cut"]))
        if how == "put in":
            found[at:at] = draw(st.binary(max_size=6))
        elif how == "leave out":
            del found[at:upto]
        elif how == "repeat":
            found[at:at] = found[at:upto]
        else:
            del found[at:]
    return bytes(found)


def written(document: Any) -> bytes:  # noqa: ANN401  JSON
    """Encode a document as Python's json does by default: with NaN, and surrogates escaped."""
    return json.dumps(document).encode()


def texts(documents: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a request: mutated documents, garbled valid ones, or anything."""
    right = st.sampled_from([written(one) for one in documents])
    return mutated(documents).map(written) | right.flatmap(garbled) | st.binary(max_size=60)
