"""Names made of words that only this project would understand.

    python tests/architecture/private_words.py

prints them; a test sees that there are none.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("src", "tests", "docs")

# The field has its own word for each of these: endpoint, writer, protocol, queue, lock, session, version ...
NOUNS: Final = frozenset({"scribe", "pen", "office", "door", "book", "station", "ticket", "twin", "pulse"})
WORDS: Final = NOUNS | {"frame", "wire", "turn", "waiting", "hit", "stop", "place", "site", "visit", "beat"}
# A constant made of these alone does not say what is counted, or in which unit.
MOODS: Final = frozenset({"few", "fresh", "glance", "grace", "huge", "long", "often", "patience", "pause", "soon"})


def words_of(name: str) -> set[str]:
    """Split a name in snake or camel case; a plural counts as its singular."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {word for part in map(str.lower, parts) for word in (part, part.removesuffix("s"))}


def is_private(name: str, kind: str) -> bool:
    """Whether a name of a file, class, function, test, constant or glossary row uses a private word."""
    words = words_of(name)
    if kind == "constant" and words and {word.removesuffix("s") for word in words} <= MOODS:
        return True
    return bool(words & (NOUNS if kind == "test" else WORDS))


def defined(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of everything that a module defines by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ("test" if node.name.startswith("test_") else "function"), node.name
        if isinstance(node, ast.Module | ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                names = [one.id for one in targets if isinstance(one, ast.Name)]
                # What a class has in small letters are its fields.
                yield from (("constant", name) for name in names if isinstance(node, ast.Module) or name.isupper())


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield the words that a glossary explains."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| word |"):
            yield "glossary row", line.split("|")[1].strip()


def names_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the name of everything that has a name in a file, and the file's own."""
    yield "test" if path.stem.startswith("test_") else "file", path.stem
    if path.suffix == ".py":
        yield from defined(ast.parse(path.read_text("utf-8")))
    elif path.name == "glossary.md":
        yield from rows(path.read_text("utf-8"))


def private_names(root: Path) -> list[str]:
    """Return every private name in a tree, a line each; records of decisions keep the words of their time."""
    found = set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.is_file() and "__pycache__" not in name and not name.startswith("docs/decisions/"):
                found |= {f"{name}: {kind} {one}" for kind, one in names_in(path) if is_private(one, kind)}
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in private_names(ROOT))
