"""`odograph plot`: an account's reading as it went, in the terminal or as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from odograph.cli.options import At, account_names, say, with_options
from odograph.core.compiled import reading
from odograph.errors import InvalidPolicy
from odograph.figures import blank_axes
from odograph.ledger.account import LedgerAccount
from odograph.ledger.states import states

__all__ = ["chart", "plot", "save_picture"]

_HEIGHT, _MARGIN = 12, 10
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "   ....##"
_ENDINGS: Final = (".png", ".svg", ".pdf")


@with_options
def plot(
    account: Annotated[str, typer.Argument(help="The account's name.", autocompletion=account_names)],
    *,
    at: At,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture to write: .png, .svg or .pdf.")] = None,
) -> None:
    """Draw an account's reading as it went, with the promise: in the terminal, or into a file."""
    if out is not None and out.suffix not in _ENDINGS:
        raise InvalidPolicy(f"a picture ends in {', '.join(_ENDINGS)}, and {str(out)!r} does not")
    with at.ledger() as ledger:
        own = ledger.account(account)
        if out is not None:
            save_picture(own, out)
            say({"account": account, "file": str(out)}, f"wrote {out}", as_json=at.json)
            return
        balance = ledger.books.balances([account])[account]  # totals and sequence of one moment
        _, *stood = states(own, balance.totals, balance.sequence)  # the first is where it was opened
        losses = [reading(own.compiled, state.totals).loss for state in stood]
        now = str(reading(own.compiled, balance.totals))
    epsilon = float(own.policy.epsilon)
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    form = {"account": account, "promise": epsilon, "losses": finite}
    console = Console()
    lines = [
        f"{account}: loss at most, after each of {len(losses)} steps",
        *chart(losses, epsilon, console.width - _MARGIN - 1, plain=not console.encoding.startswith("utf")),
        now,
    ]
    say(form, "\n".join(lines) if losses else f"{account} has spent nothing yet", as_json=at.json)


def save_picture(account: LedgerAccount, path: Path) -> None:
    """Write an account's plot as a picture."""
    account.plot(ax=blank_axes()).figure.savefig(path)


def chart(losses: Sequence[float], promise: float, width: int, *, plain: bool = False) -> list[str]:
    """Return a chart of bars, as lines of text: a column per step or, if there are too many, for the last of some.

    The promise is a dotted line. A loss without a bound fills its column.
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
