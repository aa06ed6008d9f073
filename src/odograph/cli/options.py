"""What the commands share: where the ledger is, who asks, how the answer is printed, progress on long work."""

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

from odograph.connect import connect
from odograph.errors import LedgerError
from odograph.ledger.ledger import Ledger
from odograph.ledger.receipts import Checkpoint

__all__ = [
    "DEFAULT_URL",
    "AsJson",
    "At",
    "CheckpointFile",
    "Key",
    "Note",
    "account_names",
    "checkpoint_from",
    "new_file",
    "progress",
    "say",
    "with_options",
]

DEFAULT_URL: Final = "sqlite:///privacy.db"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Key = Annotated[str | None, typer.Option(help="The same key and request again charges nothing more.")]
Note = Annotated[str, typer.Option(help="A text kept beside the entry; it can be erased.", show_default=False)]
CheckpointFile = Annotated[
    str | None, typer.Option("--checkpoint", metavar="FILE", help="What `odograph checkpoint` wrote before.")
]


@dataclass(frozen=True, slots=True)
class At:
    """Where the ledger is, who asks, and how the answer is printed."""

    url: Annotated[
        str,
        typer.Option(
            envvar="ODOGRAPH_URL",
            help="Where the ledger is: sqlite:///FILE, sqlite:////FOLDER/FILE, postgresql://USER@HOST/DATABASE, or"
            " a service at https://HOST.",
        ),
    ] = DEFAULT_URL
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="ODOGRAPH_TOKEN_FILE",
            metavar="FILE",
            help="A file with the API key of a service; or put the key into ODOGRAPH_TOKEN.",
        ),
    ] = None
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            envvar="ODOGRAPH_PLAIN_HTTP",
            help="Send the API key in the clear, to a service at http://HOST on another machine.",
        ),
    ] = False
    principal: Annotated[
        str | None,
        typer.Option(envvar="ODOGRAPH_PRINCIPAL", help="Who asks; the user of the operating system if left out."),
    ] = None
    json: AsJson = False

    def ledger(self) -> Ledger:
        """Return the ledger; only opening an account, import and restore make one."""
        if self.url.startswith("memory:"):
            raise LedgerError(f"a ledger in memory would end with this command; use one such as {DEFAULT_URL}")
        if not self.url.startswith(("http://", "https://")):
            return connect(self.url, principal=self.principal)
        token = os.environ.get("ODOGRAPH_TOKEN") if self.token_file is None else self.token_file.read_text().strip()
        return connect(self.url, token=token, principal=self.principal, accept_plain_http=self.plain_http)


def say(form: Mapping[str, Any], text: RenderableType, *, as_json: bool) -> None:
    """Print the answer: one JSON document, or what people read."""
    if as_json:
        typer.echo(json.dumps(form, allow_nan=False))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        # Names, keys and notes are printed as they are, whatever brackets they have.
        Console(highlight=False, markup=False, emoji=False).print(text)


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how far a long work is: on standard error, and only where somebody looks."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, rows: bar.update(task, completed=done, total=rows or None, visible=True)


@contextmanager
def new_file(path: Path) -> Iterator[IO[str]]:
    """Make a file, as private as the ledger and never over another; what fails in the middle leaves none behind."""
    try:
        opened = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8")
    except OSError:
        raise
    except BaseException:  # an interrupt, after the file was made
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


def checkpoint_from(file: str | None) -> Checkpoint | None:
    """Read a checkpoint from a file; None if there is no file to read."""
    if file is None:
        return None
    with open(file, encoding="utf-8") as text:  # noqa: PTH123  so that the message names the file as it was typed
        try:
            return Checkpoint.from_dict(json.load(text))
        except ValueError as problem:
            raise LedgerError(
                f"{file} is not a checkpoint ({problem}); `odograph checkpoint` writes one"
            ) from problem


def account_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of an account; whatever is wrong, a shell is told nothing."""
    try:
        with connect(ctx.params.get("url") or DEFAULT_URL) as ledger:
            return [name for name in ledger.checkpoint().accounts if name.startswith(incomplete)]
    except Exception:  # noqa: BLE001  an error would be printed into the line that somebody is typing
        return []


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of every bundle that it takes: a dataclass with an option for each field."""
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
