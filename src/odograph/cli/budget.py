"""`odograph budget`: the certified budget of the exact rule for a target, and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from odograph.budgets import certified
from odograph.core.adversary import refuted_intrinsic
from odograph.core.boundaries import filter_time
from odograph.core.exact import COARSE, FAMILIES, FINE
from odograph.core.policy import Need, Policy
from odograph.errors import InvalidPolicy

if TYPE_CHECKING:
    from odograph.core.exact import Budget

__all__ = ["budget"]

_LATTICE = 200  # steps of the adversary's lattice in epsilon


def budget(
    epsilon: Annotated[str, typer.Option(help="The target's epsilon, read exactly.")],
    delta: Annotated[str, typer.Option(help="The target's delta, all of it for the rule.")],
    *,
    fine: Annotated[bool, typer.Option("--fine", help="Solve at the table's resolution: a minute or two.")] = False,
    pure_only: Annotated[bool, typer.Option("--pure-only", help="For steps without Gaussians among them.")] = False,
    adversary: Annotated[bool, typer.Option("--adversary", help="Also say what an actual analyst refutes.")] = False,
) -> None:
    """Print the certified budget of the exact rule for a target, solving for it if need be."""
    policy = Policy(epsilon, delta, takes=("pure",) if pure_only else FAMILIES)
    need = Need.of(policy)
    if need is None:  # pragma: no cover  the policy's rule is the exact one
        raise InvalidPolicy("the policy has no exact rule")
    found, source = _certified(need, FINE if fine else COARSE)
    paper = filter_time(float(need.epsilon), float(need.delta))
    rows = [
        ("target", f"({policy.epsilon:g}, {policy.delta:g})-DP, for {' and '.join(found.takes)} steps of any size"),
        ("unit", f"{float(found.unit):.12g} of intrinsic time"),
        ("units", str(found.units)),
        ("unit x units", f"{found.intrinsic:.6g} (for comparing; the budget is the pair)"),
        ("the paper's y*", f"{paper:.6g}"),
        ("ratio", f"{found.intrinsic / paper:.4g} times the paper's"),
        ("source", source),
    ]
    if adversary:
        rows.append(("refuted", _refuted(need, found)))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[bold]{name}[/]", value)
    Console().print(table)


def _certified(need: Need, fineness: int) -> tuple[Budget, str]:
    """Return the budget and its source; what has to be solved shows its progress on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("solving", total=None, visible=False)
        return certified(
            need,
            fineness=fineness,
            progress=lambda done, rows: bar.update(task, completed=done, total=rows, visible=True),
        )


def _refuted(need: Need, found: Budget) -> str:
    refuted = float(refuted_intrinsic(need.epsilon, need.delta, float(need.epsilon) / _LATTICE))
    gap = refuted / found.intrinsic - 1
    return f"{refuted:.6g} by an analyst with steps of multiples of epsilon/{_LATTICE}: {gap:.2%} above"
