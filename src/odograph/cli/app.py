"""The commands put together, and how an error leaves the process: one line, and the exit code of its table."""

from __future__ import annotations

import errno
import json
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from odograph.cli.accounts import accounts, close, open_, show
from odograph.cli.budget import budget
from odograph.cli.charges import commit, decide, largest, reserve, spend, void
from odograph.cli.copies import backup, export, import_, restore
from odograph.cli.demo import demo
from odograph.cli.doctor import doctor
from odograph.cli.figures import figures
from odograph.cli.keys import keys_app
from odograph.cli.plot import plot
from odograph.cli.records import checkpoint, erase, history, verify
from odograph.cli.serve import serve
from odograph.errors import ERROR_TABLE, BudgetExceeded, OdographError, listed_as

__all__ = ["app", "exit_code"]

_AS_JSON: Final = "odograph.json"
_USAGE: Final[type[Any]] = typer.BadParameter.__bases__[0]  # what Typer raises for every line that it cannot read
_WRONG_INPUT: Final = 2
# A paragraph is a line: Typer keeps the line breaks that it finds.
_HELP: Final = """Privacy filters and odometers: how far you have gone, and when to stop.

A ledger is kept where --url or ODOGRAPH_URL says; in privacy.db, in the working folder, if neither does. \
Only open, import and restore make one.

With --json a command prints one JSON document. An error is one line on standard error; with --json it is a \
document there, {"error": {"code", "message", "decision"}}, and nothing is on standard output.

Exit codes: 0 done, 1 unexpected, 2 wrong input, 3 refused (decide exits so too), 4 no theorem or no permission, \
5 the state of the ledger, 6 try again.
"""


def exit_code(error: OdographError) -> int:
    """Return the exit code of the nearest class that the error table lists."""
    return ERROR_TABLE[listed_as(error)].exit_code


class _Group(TyperGroup):
    """Commands whose errors are for the reader, not for a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  Typer keeps this type to itself
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  as above
        as_json: bool = ctx.meta[_AS_JSON]
        try:
            return super().invoke(ctx)
        except OdographError as error:
            decision = error.decision.to_dict() if isinstance(error, BudgetExceeded) else None
            code = _told(type(error).__name__, str(error), exit_code(error), as_json=as_json, decision=decision)
            raise typer.Exit(code) from error
        except _USAGE as error:
            command = error.ctx.command_path if getattr(error, "ctx", None) else "odograph"
            message = error.format_message()
            text = f"{message}{'' if message.endswith(('.', '?')) else '.'} See {command} --help"
            raise typer.Exit(_told("Usage", text, _WRONG_INPUT, as_json=as_json)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read the output has seen enough
                raise
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}{error.strerror or error}"
            raise typer.Exit(_told(type(error).__name__, text, _WRONG_INPUT, as_json=as_json)) from error


def _told(name: str, text: str, code: int, *, as_json: bool, decision: dict[str, Any] | None = None) -> int:
    """Print an error on standard error; return the exit code."""
    message = " ".join(text.split())
    form = {"error": {"code": name, "message": message, "decision": decision}}
    typer.echo(json.dumps(form) if as_json else f"odograph: {message}", err=True)
    return code


app = typer.Typer(
    name="odograph",
    cls=_Group,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_PANELS: Final = {
    "Accounts": (open_, show, accounts, close),
    "Charges": (decide, spend, reserve, commit, void, largest),
    "Records": (history, verify, checkpoint, doctor, plot, erase),
    "Copies": (backup, restore, export, import_),
    "Service": (serve,),
    "Without a ledger": (demo, budget, figures),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(command.__name__.rstrip("_"), rich_help_panel=panel)(command)
app.add_typer(keys_app, rich_help_panel="Service")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  the signature of a Typer callback
    if wanted:
        typer.echo(f"odograph {version('odograph')}")
        raise typer.Exit


@app.callback(help=_HELP)
def _root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    pass
