"""Options and output that the commands share: the ledger, the principal, JSON or text, progress."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from odograph.connection import connect
from odograph.errors import LedgerError
from odograph.ledger.ledger import Ledger
from odograph.ledger.results import Checkpoint

__all__ = [
    "DEFAULT_URL",
    "AsJson",
    "CheckpointFile",
    "Key",
    "LedgerOptions",
    "Note",
    "account_names",
    "new_file",
    "print_result",
    "progress",
    "read_checkpoint",
    "with_options",
]

DEFAULT_URL: Final = "sqlite:///privacy.db"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Key = Annotated[
    str | None, typer.Option(help="Idempotency key: repeating a request with the same key charges nothing more.")
]
Note = Annotated[str, typer.Option(help="Free text stored with the entry; it can be erased.", show_default=False)]
CheckpointFile = Annotated[
    str | None, typer.Option("--checkpoint", metavar="FILE", help="A file written by `odograph checkpoint`.")
]


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """The ledger, the principal, and the form of the output."""

    url: Annotated[
        str,
        typer.Option(
            envvar="ODOGRAPH_URL",
            help="URL of the ledger: sqlite:///FILE, sqlite:////FOLDER/FILE, postgresql://USER@HOST/DATABASE, or a"
            " service at https://HOST.",
        ),
    ] = DEFAULT_URL
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="ODOGRAPH_TOKEN_FILE",
            metavar="FILE",
            help="File with the API key for a service; alternatively, set ODOGRAPH_TOKEN to the key.",
        ),
    ] = None
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            envvar="ODOGRAPH_PLAIN_HTTP",
            help="Allow sending the API key unencrypted to a service at http://HOST on another machine.",
        ),
    ] = False
    principal: Annotated[
        str | None,
        typer.Option(
            envvar="ODOGRAPH_PRINCIPAL", help="Who makes the request; by default the user of the operating system."
        ),
    ] = None
    json: AsJson = False

    def ledger(self) -> Ledger:
        """Return the ledger; only `open`, `import` and `restore` create one."""
        if self.url.startswith("memory:"):
            raise LedgerError(
                f"url must not be in memory (got {self.url}): that ledger would end with this command. Use a URL such"
                f" as {DEFAULT_URL}"
            )
        if not self.url.startswith(("http://", "https://")):
            return connect(self.url, principal=self.principal)
        token = os.environ.get("ODOGRAPH_TOKEN") if self.token_file is None else self.token_file.read_text().strip()
        return connect(self.url, token=token, principal=self.principal, accept_plain_http=self.plain_http)


def print_result(form: Mapping[str, Any], text: RenderableType, *, as_json: bool) -> None:
    """Print the result: one JSON document, or text."""
    if as_json:
        typer.echo(json.dumps(form, allow_nan=False))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        # Names, keys and notes are printed literally, even if they look like markup.
        Console(highlight=False, markup=False, emoji=False).print(text)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, rows: bar.update(task, completed=done, total=rows or None, visible=True)


@contextmanager
def new_file(path: Path) -> Iterator[IO[str]]:
    """Make a new file that only its owner can read, and remove it if writing it fails."""
    try:
        opened = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8")
    except OSError:
        raise
    except BaseException:  # interrupted after the file was made
        path.unlink(missing_ok=True)
        raise
    with opened as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def read_checkpoint(file: str | None) -> Checkpoint | None:
    """Read a checkpoint from a file; None if no file is given."""
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:  # noqa: PTH123  so that errors name the file as it was typed
        try:
            return Checkpoint.from_dict(json.load(text))
        except ValueError as problem:
            raise LedgerError(
                f"{file} is not a checkpoint ({problem}); `odograph checkpoint` writes one"
            ) from problem


def account_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return completions of an account name; none if anything is wrong."""
    try:
        with connect(ctx.params.get("url") or DEFAULT_URL) as ledger:
            return [name for name in ledger.checkpoint().accounts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  an error would be printed into the command that is being typed
        return []


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Expand each dataclass parameter of a command into one option per field."""
    own = get_type_hints(command, include_extras=True)
    bundles = {name: hint for name, hint in own.items() if is_dataclass(hint) and isinstance(hint, type)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in bundles:
            parameters.append(parameter.replace(annotation=own[name]))
    for bundle in bundles.values():
        hints = get_type_hints(bundle, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(bundle)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, bundle in bundles.items():
            given[name] = bundle(**{field.name: given.pop(field.name) for field in fields(bundle)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
