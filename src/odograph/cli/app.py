"""The application: its commands, and how errors are reported: one line, and the exit code of the error table."""

from __future__ import annotations

import errno
import json
from importlib.metadata import version
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from odograph.cli.accounts import (
    accounts,
    apply,
    calibrate,
    close,
    commit,
    decide,
    declare,
    how_many,
    largest,
    open_,
    renew,
    reserve,
    show,
    spend,
    void,
)
from odograph.cli.demo import demo
from odograph.cli.records import (
    backup,
    budget,
    checkpoint,
    doctor,
    erase,
    events,
    export,
    figures,
    history,
    import_,
    plan,
    plot,
    restore,
    verify,
)
from odograph.cli.service import keys_app, population_app, serve
from odograph.errors import ERROR_TABLE, BudgetExceeded, OdographError, listed_as

__all__ = ["app", "exit_code"]

_AS_JSON: Final = "odograph.json"  # a key of the context's meta
_USAGE_ERROR: Final[type[Any]] = typer.BadParameter.__bases__[0]  # the base of Typer's usage errors
_USAGE_EXIT_CODE: Final = 2
# Each paragraph is one line: Typer keeps line breaks.
_HELP: Final = """Privacy filters and odometers: how much privacy budget is spent, and when to stop.

The ledger is at --url or ODOGRAPH_URL; by default it is privacy.db in the working directory. \
Only open, apply, renew, import and restore create a ledger.

With --json a command prints one JSON document. An error is one line on standard error; with --json it is a \
document there, {"error": {"code", "message", "charged", "decision"}}, and standard output is empty. "charged" is \
false if nothing was charged, true if the charge was made, and null if that is not known.

Exit codes: 0 done, 1 unexpected, 2 wrong input, 3 refused (also by decide), 4 no theorem or no permission, \
5 the state of the ledger, 6 try again.
"""


_CHARGING: Final = frozenset({"spend", "reserve"})
_CHARGED: Final = {
    False: "Nothing was charged",
    True: "The charge was made",
    None: "It may have been charged: the same command with the same --key tells, and charges nothing twice",
}


def exit_code(error: OdographError) -> int:
    """Return the exit code of the nearest class that the error table lists."""
    return ERROR_TABLE[listed_as(error)].exit_code


class _Group(TyperGroup):
    """Commands whose errors are printed as one line, without a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  Typer keeps this type to itself
        ctx.meta[_AS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  as above
        as_json: bool = ctx.meta[_AS_JSON]
        try:
            return super().invoke(ctx)
        except OdographError as error:
            message = str(error)
            if ctx.invoked_subcommand in _CHARGING:
                message = f"{message}{'' if message.endswith(('.', '?')) else '.'} {_CHARGED[error.charged]}"
            decision = error.decision.to_dict() if isinstance(error, BudgetExceeded) else None
            _print_error(type(error).__name__, message, as_json, charged=error.charged, decision=decision)
            raise typer.Exit(exit_code(error)) from error
        except _USAGE_ERROR as error:
            command = error.ctx.command_path if getattr(error, "ctx", None) else "odograph"
            message = error.format_message()
            text = f"{message}{'' if message.endswith(('.', '?')) else '.'} See {command} --help"
            _print_error("Usage", text, as_json, charged=False)
            raise typer.Exit(_USAGE_EXIT_CODE) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of the output has closed it
                raise
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}{error.strerror or error}"
            # Printing the receipt may have failed, after the charge.
            charged = None if ctx.invoked_subcommand in _CHARGING else False
            _print_error(type(error).__name__, text, as_json, charged=charged)
            raise typer.Exit(_USAGE_EXIT_CODE) from error


def _print_error(
    name: str,
    text: str,
    as_json: bool,  # noqa: FBT001  as the option
    *,
    charged: bool | None,
    decision: dict[str, Any] | None = None,
) -> None:
    """Print an error on standard error: one line, or a JSON document."""
    message = " ".join(text.split())
    form = {"error": {"code": name, "message": message, "charged": charged, "decision": decision}}
    typer.echo(json.dumps(form) if as_json else f"odograph: {message}", err=True)


app = typer.Typer(
    name="odograph",
    cls=_Group,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_PANELS: Final = {
    "Accounts": (open_, show, accounts, close, apply, renew, declare),
    "Charges": (decide, spend, reserve, commit, void, largest, calibrate, how_many),
    "Records": (history, events, verify, checkpoint, doctor, plot, erase),
    "Copies": (backup, restore, export, import_),
    "Service": (serve,),
    "Without a ledger": (demo, plan, budget, figures),
}
for panel, commands in _PANELS.items():
    for command in commands:
        app.command(command.__name__.rstrip("_").replace("_", "-"), rich_help_panel=panel)(command)
app.add_typer(keys_app, rich_help_panel="Service")
app.add_typer(population_app, rich_help_panel="Accounts")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  the signature of a Typer callback
    if wanted:
        typer.echo(f"odograph {version('odograph')}")
        raise typer.Exit


@app.callback(help=_HELP)
def _root(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass
