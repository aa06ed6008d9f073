"""Figures: `figures` draws the figures of the paper and the documentation, `plot` an account's odometer reading."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from odograph.cli.options import AsJson, LedgerOptions, account_names, print_result, with_options
from odograph.errors import InvalidPolicy
from odograph.figures import blank_axes
from odograph.figures.paper import PANELS, draw_all
from odograph.ledger.account import LedgerAccount
from odograph.ledger.timeline import states

__all__ = ["chart", "figures", "plot", "save_picture"]

_HEIGHT, _MARGIN = 12, 10  # of the chart in the terminal: lines, and columns for labels
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "   ....##"
_FILE_TYPES: Final = (".png", ".svg", ".pdf")


def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help=f"Names of figures: {', '.join(PANELS)}. By default all."),
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("figures"),
    json: AsJson = False,
) -> None:
    """Draw the figures of the paper and the documentation, each as PNG, SVG and CSV."""
    files = [str(file) for file in draw_all(out, names or None)]
    print_result({"files": files}, "\n".join(files), as_json=json)


@with_options
def plot(
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    options: LedgerOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture to this file: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Plot an account's odometer reading after each step, beside its promise: in the terminal, or to a file."""
    if out is not None and out.suffix not in _FILE_TYPES:
        raise InvalidPolicy(f"--out must end in {', '.join(_FILE_TYPES)} (got {str(out)!r})")
    with options.ledger() as ledger:
        own = ledger.account(account)
        if out is not None:
            save_picture(own, out)
            print_result({"account": account, "file": str(out)}, f"wrote {out}", as_json=options.json)
            return
        balance = ledger.backend.balances([account])[account]  # one read: totals and sequence belong together
        _, *steps = states(own, balance.totals, balance.sequence)  # the first is the state at its opening
        losses = [own.compiled.reading(state.totals).loss for state in steps]
        now = str(own.compiled.reading(balance.totals))
    epsilon = float(own.policy.epsilon)
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    form = {"account": account, "promise": epsilon, "losses": finite}
    console = Console()
    lines = [
        f"{account}: upper bound of the loss after each of {len(losses)} steps",
        *chart(losses, epsilon, console.width - _MARGIN - 1, plain=not console.encoding.startswith("utf")),
        now,
    ]
    print_result(form, "\n".join(lines) if losses else f"{account} has spent nothing yet", as_json=options.json)


def save_picture(account: LedgerAccount, path: Path) -> None:
    """Write an account's plot as a picture."""
    account.plot(ax=blank_axes()).figure.savefig(path)


def chart(losses: Sequence[float], promise: float, width: int, *, plain: bool = False) -> list[str]:
    """Return a bar chart as lines of text: one column per step, or per group of steps if there are too many.

    The promise is a dashed line. A loss without a bound fills its column.
    """
    columns = min(max(width, 1), len(losses))
    shown = [losses[-(-(i + 1) * len(losses) // columns) - 1] for i in range(columns)]
    wide = max(1, min(6, width // max(1, columns)))
    top = max([promise, *(loss for loss in shown if math.isfinite(loss))]) * 1.05
    line = math.ceil(promise / top * _HEIGHT) - 1
    marks = _PLAIN if plain else _EIGHTHS
    lines = []
    for row in reversed(range(_HEIGHT)):
        label = f"{promise:.4g}" if row == line else f"{top:.3g}" if row == _HEIGHT - 1 else "0" if row == 0 else ""
        cells = ""
        for loss in shown:
            filled = round(8 * min(1.0, max(0.0, loss / top * _HEIGHT - row)))
            mark = marks[filled]
            cells += ("-" if mark == " " and row == line else mark) * wide
        lines.append(f"{label:>{_MARGIN - 2}} |{cells}".rstrip() + (" promise" if row == line else ""))
    return lines
