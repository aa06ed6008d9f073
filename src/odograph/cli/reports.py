"""Reports: `plot` an account's odometer reading, draw the `figures` of the paper, print a certified `budget`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from odograph.cli.options import AsJson, LedgerOptions, account_names, print_result, progress, with_options
from odograph.compile import find_budget
from odograph.core.conversions import filter_time
from odograph.core.filters import Exact
from odograph.core.policy import Policy
from odograph.core.value_iteration import COARSE, FAMILIES, FINE, Budget, refuted_intrinsic
from odograph.errors import InvalidArgument, InvalidPolicy
from odograph.figures import PANELS, blank_axes, draw_all
from odograph.ledger.account import LedgerAccount
from odograph.ledger.timeline import states

__all__ = ["budget", "chart", "figures", "plot", "save_picture"]

_HEIGHT, _MARGIN = 12, 10  # of the chart in the terminal: lines, and columns for labels
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_PLAIN: Final = "   ....##"
_LATTICE: Final = 200  # spacings of the adversary's lattice in epsilon
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
        raise InvalidArgument(f"--out must end in {', '.join(_FILE_TYPES)} (got {str(out)!r})")
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


def budget(  # noqa: PLR0913  each is one option
    epsilon: Annotated[str, typer.Option(help="Epsilon of the target, read exactly as typed.")],
    delta: Annotated[str, typer.Option(help="Delta of the target, all of it for the filter.")],
    *,
    fine: Annotated[
        bool, typer.Option("--fine", help="Solve at the resolution of the shipped table: a minute or two.")
    ] = False,
    pure_only: Annotated[
        bool, typer.Option("--pure-only", help="For pure DP steps only, without Gaussian ones.")
    ] = False,
    adversary: Annotated[
        bool, typer.Option("--adversary", help="Also print a budget that an explicit adversary refutes.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Print the certified budget of the exact filter for a target, solving for it if necessary."""
    policy = Policy(epsilon, delta, filter=Exact(takes=("pure",) if pure_only else FAMILIES))
    need = policy.need
    if need is None:  # pragma: no cover  the policy's filter is the exact one
        raise InvalidPolicy("the policy has no exact filter")
    with progress("solving", quiet=json) as report:
        found, source = find_budget(need, fineness=FINE if fine else COARSE, progress=report)
    paper = filter_time(float(need.epsilon), float(need.delta))
    rows = [
        ("target", f"{policy.target}, for {' and '.join(found.takes)} steps of any size"),
        ("quantum", f"{float(found.quantum):.12g} of intrinsic time"),
        ("units", str(found.units)),
        ("quantum x units", f"{found.intrinsic:.6g} (for comparison; the budget is the pair)"),
        ("the paper's y*", f"{paper:.6g}"),
        ("ratio", f"{found.intrinsic / paper:.4g} times the paper's"),
        ("source", source),
    ]
    form = {
        "epsilon": float(need.epsilon),
        "delta": float(need.delta),
        "takes": [*found.takes],
        "quantum": str(found.quantum),
        "units": found.units,
        "intrinsic": found.intrinsic,
        "paper": paper,
        "source": source,
    }
    if adversary:
        refuted = float(refuted_intrinsic(need.epsilon, need.delta, float(need.epsilon) / _LATTICE))
        form["refuted"] = refuted
        rows.append(("refuted", _refuted_text(refuted, found)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    print_result(form, table, as_json=json)


def _refuted_text(refuted: float, found: Budget) -> str:
    gap = refuted / found.intrinsic - 1
    return f"{refuted:.6g} by an analyst with steps of multiples of epsilon/{_LATTICE}: {gap:.2%} above"
