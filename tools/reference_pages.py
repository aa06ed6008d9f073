"""The pages of the reference that are made from the code: what Sphinx adds to pages of docs/reference/.

They are made anew in every build and kept nowhere, so they cannot be out of date. Each page in the tree says by hand
what it is about; below that comes what is made here, in Markdown.
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
from odograph.cli.options import At
from odograph.errors import ERROR_TABLE, OdographError
from odograph.service.api import ROUTES
from odograph.service.dashboard.reasons import Reason, cited
from odograph.service.dashboard.reference import Field, Operation, operations, shapes

__all__ = ["ALIASES", "PAGES", "cli", "errors", "examples", "http", "markdown", "restructured", "theorems"]

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = Path(odograph.__file__).parent

# Names of types that stand in signatures as they are written, not spelled out.
ALIASES: Final = ("ArrayLike", "Cost", "Guarantee", "Numeric", "Odometer", "Progress")

_CODE: Final = re.compile(r"(`[^`]*`)")
_INDENT: Final = "&nbsp;" * 4
_LEDGER: Final = {field.name for field in fields(At)}
_LABEL: Final = re.compile(r"^(Theorem|Assumes):", re.MULTILINE)


def restructured(docstring: str) -> str:
    """Return a docstring as reStructuredText: `Theorem:` and `Assumes:` are fields, and no mark is markup."""
    return _LABEL.sub(r":\1:", _outside_code(docstring, r"([*|_\\])"))


def markdown(text: str) -> str:
    """Return a sentence as Markdown that reads just so, also in a cell of a table."""
    return _outside_code(re.sub(r"\s+", " ", text), r"([][*|_<>\\#$])")


def _outside_code(text: str, marks: str) -> str:
    parts = _CODE.split(text)
    return "".join(part if part.startswith("`") else re.sub(marks, r"\\\1", part) for part in parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Write a table, without the columns in which nothing stands."""
    kept = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    yield "\n" + _row(heads, kept) + "\n" + _row(["---"] * len(heads), kept)
    yield from (_row(row, kept) for row in rows)
    yield ""


def _row(cells: Sequence[str], kept: Iterable[int]) -> str:
    return f"| {' | '.join(cells[place] for place in kept)} |"


# The command line


def cli() -> Iterator[str]:
    """Write every command with its arguments and options, as its own --help has them."""
    program: Any = typer.main.get_command(app)  # Typer keeps this type to itself
    context = typer.Context(program, info_name="odograph")
    panels: dict[str, list[str]] = {}
    for name, command in program.commands.items():
        panels.setdefault(command.rich_help_panel, []).extend(_command(f"odograph {name}", command, context))
    yield _help(program.help)
    for title, lines in panels.items():
        yield f"\n## {title}\n"
        yield from lines
    yield "\n(ledger-options)=\n## Options of every command with a ledger"
    yield from _parameters([one for one in program.commands["show"].params if one.name in _LEDGER], context)


def _command(path: str, command: Any, context: typer.Context) -> Iterator[str]:  # noqa: ANN401  as in cli
    yield f"\n### {path}\n\n{_help(command.help)}"
    shared = {one.name for one in command.params} >= _LEDGER
    yield from _parameters([one for one in command.params if not (shared and one.name in _LEDGER)], context)
    if shared:
        yield "\nAnd the [options of every command with a ledger](#ledger-options)."
    for name, inner in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", inner, context)


def _help(text: str) -> str:
    """Return the text of --help: an example in it is a line of its own that begins with the program's name."""
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
    """Write every path of the service, and every type that is sent or answered, from its OpenAPI document."""
    for title, listed in operations(ROUTES).items():
        yield f"\n## {title}"
        for one in listed:
            yield from _operation(one)
    yield "\n## Types"
    for shape in shapes(ROUTES):
        yield f"\n(type-{shape.name})=\n### {shape.name}\n\n{markdown(shape.text)}"
        yield from _listed(shape.fields)


def _operation(one: Operation) -> Iterator[str]:
    yield f"\n### {one.method} `{one.path}`\n\n{markdown(one.summary)}\n\n{markdown(one.more)}\n"
    bound = "; not with a key that is bound to accounts" if one.whole else ""
    yield f"Who may: {', '.join(one.who)}{bound}." if one.who else "Who may: anybody, without a key."
    if one.parameters:
        yield from _listed(one.parameters)
    if one.kind:
        yield f"\nBody: {_typed(one.body) if one.body else f'`{one.kind}`'}."
        yield from _listed(one.fields)
    yield "\nAnswers:\n"
    yield from (f"- {status}: {_typed(name)}. {markdown(meaning)}" for status, meaning, name in one.answers)
    yield f"\n```console\n$ {one.example}\n```"


def _listed(listed: Sequence[Field]) -> Iterator[str]:
    if listed:
        yield from _table(("name", "type", "limits", "meaning"), [_field(one) for one in listed])


def _field(one: Field) -> tuple[str, str, str, str]:
    where = f" ({one.place})" if one.place else ""
    kind = "".join(_typed(piece.ref) if piece.ref else markdown(piece.text) for piece in one.kind)
    return (
        f"`{one.name}`{where}{'' if one.required else ', optional'}",
        kind,
        markdown(re.sub(r"as (\^\S+\$)", r"as `\1`", one.limits)),  # a pattern is code
        markdown(one.text),
    )


def _typed(name: str) -> str:
    return f"[{name}](#type-{name})" if name else "text"


# Errors


def errors() -> Iterator[str]:
    """Write the table of errors, and what each of them means."""
    rows = [
        (
            f"{_INDENT * (len(_ancestry(error)) - 1)}{_linked(error)}",
            str(row.status),
            str(row.exit_code),
            "yes" if row.retryable else "",
        )
        for error, row in ERROR_TABLE.items()
    ]
    yield from _table(("error", "HTTP status", "exit code", "try again"), rows)
    yield "\n```{eval-rst}"
    yield from (f".. autoexception:: {_public(error)}\n   :show-inheritance:\n" for error in ERROR_TABLE)
    yield "```"


def _ancestry(error: type[OdographError]) -> list[type]:
    return [one for one in error.__mro__ if issubclass(one, OdographError)]


def _public(error: type[OdographError]) -> str:
    place = "odograph" if error.__name__ in odograph.__all__ else "odograph.errors"
    return f"{place}.{error.__name__}"


def _linked(error: type[OdographError]) -> str:
    return f"[`{error.__name__}`](#{_public(error)})"


# Theorems


def theorems() -> Iterator[str]:
    """Write every function that rests on a theorem, with the theorem and what it assumes."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if found := [*_cited(tree)]:
            says = (ast.get_docstring(tree) or "").partition("\n")[0]
            yield f"\n## `{path.relative_to(SOURCE).as_posix()}`\n\n{markdown(says)}\n"
            for one in found:
                yield f"`{one.title}`\n: {markdown(one.theorem)}\n\n  *Assumes:* {markdown(one.assumes)}\n"


def _cited(tree: ast.AST, within: str = "") -> Iterator[Reason]:
    """Read the citations in a file, without importing what it may need."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}{node.name}"
            holder = type(node.name, (), {"__doc__": ast.get_docstring(node) or ""})
            if (reason := cited(name, holder)).theorem:
                yield reason
            yield from _cited(node, f"{name}.")


# Examples


def examples() -> Iterator[str]:
    """Write what examples/README.md says, with its files to download."""
    _, _, text = (ROOT / "examples" / "README.md").read_text().partition("\n")
    yield re.sub(r"\]\(([^):]+)\)", r"](../../examples/\1)", text)


PAGES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "reference/cli": cli,
    "reference/errors": errors,
    "reference/examples": examples,
    "reference/http": http,
    "reference/theorems": theorems,
}
