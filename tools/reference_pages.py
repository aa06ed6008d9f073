"""The generated part of docs/reference/: command line, HTTP API, errors, theorems and examples, as Markdown.

    python tools/reference_pages.py

writes the tables of theorems, errors and commands, and the list of decisions, into their pages, below the handwritten
part: they are read in the repository too. A test compares them with the code. Sphinx appends the rest in every build.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import typer

import odograph
from odograph.cli.app import app
from odograph.cli.options import LedgerOptions
from odograph.errors import ERROR_TABLE, OdographError
from odograph.service.dashboard.view_models import Citation, read_citation
from odograph.service.openapi import FieldDescription, Operation, describe_operations, describe_types
from odograph.service.routes import ROUTES

__all__ = [
    "ALIASES",
    "MARK",
    "PAGES",
    "STORED",
    "cli",
    "decisions",
    "errors",
    "examples",
    "exceptions",
    "http",
    "main",
    "markdown",
    "theorems",
    "to_restructured",
    "with_table",
]

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = Path(odograph.__file__).parent
MARK: Final = "<!-- Written by tools/reference_pages.py: edit the code instead. -->\n"

# Type aliases that signatures show by name instead of expanding them.
ALIASES: Final = ("ArrayLike", "Cost", "Guarantee", "Numeric", "Odometer", "Progress")

_THEOREMS: Final = ROOT / "docs" / "theorems.md"
_CODE: Final = re.compile(r"(`[^`]*`)")
_INDENT: Final = "&nbsp;" * 4
_LEDGER: Final = {field.name for field in fields(LedgerOptions)}
_CHARGED: Final = {False: "no", True: "yes", None: "not known"}
_LABEL: Final = re.compile(r"^(Theorem|Assumes):", re.MULTILINE)


def to_restructured(docstring: str) -> str:
    """Return a docstring as reStructuredText: `Theorem:` and `Assumes:` become fields, other markup is escaped."""
    return _LABEL.sub(r":\1:", _outside_code(docstring, r"([*|_\\])"))


def markdown(text: str) -> str:
    """Escape a sentence for Markdown, including table cells."""
    return _outside_code(re.sub(r"\s+", " ", text), r"([][*|_<>\\#$])")


def _outside_code(text: str, marks: str) -> str:
    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\1", part) for part in parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write a table without its empty columns."""
    kept = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    yield "\n" + _row(heads, kept) + "\n" + _row(["---"] * len(heads), kept)
    yield from (_row(row, kept) for row in rows)
    yield ""


def _row(cells: Sequence[str], kept: Iterable[int]) -> str:
    return f"| {' | '.join(cells[index] for index in kept)} |"


# The command line


def cli() -> Iterator[str]:
    """Write every command with its arguments and options, as in its --help."""
    program: Any = typer.main.get_command(app)  # the type is private to Typer
    context = typer.Context(program, info_name="odograph")
    panels: dict[str, list[str]] = {}
    for name, command in program.commands.items():
        panels.setdefault(command.rich_help_panel, []).extend(_command(f"odograph {name}", command, context))
    yield _help(program.help)
    for title, lines in panels.items():
        yield f"\n## {title}\n"
        yield from lines
    yield "\n## Options of every command with a ledger"
    yield from _parameters([one for one in program.commands["show"].params if one.name in _LEDGER], context)


def _command(path: str, command: Any, context: typer.Context) -> Iterator[str]:  # noqa: ANN401  as in cli
    yield f"\n### {path}\n\n{_help(command.help)}"
    shared = {one.name for one in command.params} >= _LEDGER
    yield from _parameters([one for one in command.params if not (shared and one.name in _LEDGER)], context)
    if shared:
        yield "\nAnd the [options of every command with a ledger](#options-of-every-command-with-a-ledger)."
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", inner, context)


def _help(text: str) -> str:
    """Return the text of --help; a paragraph that begins with the program's name is an example."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(
        f"```console\n$ {part}\n```" if part.startswith("odograph ") else markdown(part) for part in parts
    )


def _parameters(parameters: Sequence[Any], context: typer.Context) -> Iterator[str]:
    if parameters:
        records = [one.get_help_record(context) for one in parameters]
        yield from _table(("takes", "meaning"), [(f"`{name}`", markdown(text)) for name, text in records])


# The service


def http() -> Iterator[str]:
    """Write every operation of the service and every type of its OpenAPI document."""
    for title, found in describe_operations(ROUTES).items():
        yield f"\n## {title}"
        for one in found:
            yield from _operation(one)
    yield "\n## Types"
    for described in describe_types(ROUTES):
        yield f"\n(type-{described.name})=\n### {described.name}\n\n{markdown(described.text)}"
        yield from _field_table(described.fields)


def _operation(one: Operation) -> Iterator[str]:
    yield f"\n### {one.method} `{one.path}`\n\n{markdown(one.summary)}\n\n{markdown(one.details)}\n"
    bound = "; not with a key bound to accounts" if one.whole_ledger else ""
    yield f"Roles: {', '.join(one.roles)}{bound}." if one.roles else "No key required."
    if one.parameters:
        yield from _field_table(one.parameters)
    if one.body_format:
        yield f"\nBody: {_type_link(one.body_type) if one.body_type else f'`{one.body_format}`'}."
        yield from _field_table(one.fields)
    yield "\nResponses:\n"
    yield from (f"- {status}: {_type_link(name)}. {markdown(meaning)}" for status, meaning, name in one.responses)
    yield f"\n```console\n$ {one.example}\n```"


def _field_table(listed: Sequence[FieldDescription]) -> Iterator[str]:
    if listed:
        yield from _table(("name", "type", "limits", "meaning"), [_field(one) for one in listed])


def _pattern_as_code(found: re.Match[str]) -> str:
    """Return a pattern as code in a cell of a table, in which a bar ends the cell also in code."""
    return f"matches `{found[1].replace('|', chr(92) + '|')}`"


def _field(one: FieldDescription) -> tuple[str, str, str, str]:
    where = f" ({one.location})" if one.location else ""
    kind = "".join(_type_link(part.link) if part.link else markdown(part.text) for part in one.type_parts)
    return (
        f"`{one.name}`{where}{'' if one.required else ', optional'}",
        kind,
        markdown(re.sub(r"matches (\^.+\$)(?=;|$)", _pattern_as_code, one.limits)),
        markdown(one.text),
    )


def _type_link(name: str) -> str:
    return f"[{name}](#type-{name})" if name else "text"


# Errors


def errors() -> Iterator[str]:
    """Write the table of errors."""
    rows = [
        (
            f"{_INDENT * (len(_ancestry(error)) - 1)}{_error_link(error)}",
            markdown((error.__doc__ or "").partition("\n")[0]),
            str(row.status),
            str(row.exit_code),
            "yes" if row.retryable else "no",
            _CHARGED[error.charged],
        )
        for error, row in ERROR_TABLE.items()
    ]
    yield from _table(("error", "meaning", "HTTP status", "exit code", "retryable", "charged"), rows)


def exceptions() -> Iterator[str]:
    """Write the description of each error, which the names in the table link to."""
    yield "\n```{eval-rst}"
    yield from (f".. autoexception:: {_public(error)}\n   :show-inheritance:\n" for error in ERROR_TABLE)
    yield "```"


def _ancestry(error: type[OdographError]) -> list[type]:
    return [one for one in error.__mro__ if issubclass(one, OdographError)]


def _public(error: type[OdographError]) -> str:
    module = "odograph" if error.__name__ in odograph.__all__ else "odograph.errors"
    return f"{module}.{error.__name__}"


def _error_link(error: type[OdographError]) -> str:
    return f"[`{error.__name__}`](#{_public(error)})"


# Theorems


def theorems() -> Iterator[str]:
    """Write every function that relies on a theorem, with the theorem and its assumptions."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if found := [*_read_citations(tree)]:
            says = (ast.get_docstring(tree) or "").partition("\n")[0]
            yield f"\n## `{path.relative_to(SOURCE).as_posix()}`\n\n{markdown(says)}\n"
            yield from (
                f"- `{one.title}`: {_linked(one.theorem)}\n  *Assumes:* {markdown(one.assumes)}" for one in found
            )


def _linked(theorem: str) -> str:
    """Link the first heading of theorems.md that a theorem names."""
    text = markdown(theorem)
    names = {
        found.removeprefix("The "): found for found in re.findall(r"^##+ (.+)$", _THEOREMS.read_text(), re.MULTILINE)
    }
    found = [(text.casefold().find(name.casefold()), -len(name), name) for name in names]
    start, length, name = min((one for one in found if one[0] >= 0), default=(-1, 0, ""))
    if start < 0:
        return text
    anchor = re.sub(r"[^\w -]", "", names[name].casefold()).replace(" ", "-")
    end = start - length
    return f"{text[:start]}[{text[start:end]}](../theorems.md#{anchor}){text[end:]}"


def _read_citations(tree: ast.AST, within: str = "") -> Iterator[Citation]:
    """Read the citations of a file without importing it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}{node.name}"
            holder = type(node.name, (), {"__doc__": ast.get_docstring(node) or ""})
            if (citation := read_citation(name, holder)).theorem:
                yield citation
            yield from _read_citations(node, f"{name}.")


# Examples


def examples() -> Iterator[str]:
    """Write the content of examples/README.md, with links to its files."""
    _, _, text = (ROOT / "examples" / "README.md").read_text().partition("\n")
    yield re.sub(r"\]\(([^):]+)\)", r"](../../examples/\1)", text)


# Decisions


def decisions() -> Iterator[str]:
    """Write the list of decisions, with links to their pages."""
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        number, _, title = path.read_text().partition("\n")[0].removeprefix("# ").partition(". ")
        yield f"{number}. [{title}](../decisions/{path.name})"


# Appended to a page in every build.
PAGES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "reference/errors": exceptions,
    "reference/examples": examples,
    "reference/http": http,
}
# Stored below `MARK` in a page.
STORED: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "reference/cli": cli,
    "reference/decisions": decisions,
    "reference/errors": errors,
    "reference/theorems": theorems,
}


def with_table(name: str, text: str) -> str:
    """Return a page with what is generated for it below the mark, and its handwritten part as it is."""
    written, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the page {name} must have the line {MARK!r}: put it below the handwritten part")
    lines = "\n".join(STORED[name]()).split("\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join([f"{written}{mark}", *(line.rstrip() for line in lines), ""]))


def main() -> None:
    """Write the stored tables into their pages."""
    for name in STORED:
        page = ROOT / "docs" / f"{name}.md"
        before = page.read_text()
        if (after := with_table(name, before)) != before:
            page.write_text(after)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
