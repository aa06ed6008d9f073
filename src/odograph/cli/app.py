"""The commands put together, and how an error leaves the process: one line, and the exit code of its table."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from odograph.cli.budget import budget
from odograph.cli.demo import demo
from odograph.cli.figures import figures
from odograph.errors import ERROR_TABLE, OdographError

__all__ = ["app", "exit_code"]


def exit_code(error: OdographError) -> int:
    """Return the exit code of the nearest class that the error table lists."""
    return next(ERROR_TABLE[cls].exit_code for cls in type(error).__mro__ if cls in ERROR_TABLE)


class _Group(TyperGroup):
    """Commands whose Odograph errors are for the reader, not for a traceback."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  Typer keeps this type to itself
        try:
            return super().invoke(ctx)
        except OdographError as error:
            typer.echo(f"odograph: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(exit_code(error)) from error


app = typer.Typer(
    name="odograph",
    cls=_Group,
    help="Privacy filters and odometers: how far you have gone, and when to stop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, figures, budget):
    app.command()(command)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  the signature of a Typer callback
    if wanted:
        typer.echo(f"odograph {version('odograph')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Privacy filters and odometers: how far you have gone, and when to stop."""
