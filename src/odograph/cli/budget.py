"""`odograph budget`: the certified budget of the exact rule for a target, and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from odograph.budgets import certified
from odograph.cli.options import AsJson, progress, say
from odograph.core.adversary import refuted_intrinsic
from odograph.core.boundaries import filter_time
from odograph.core.exact import COARSE, FAMILIES, FINE
from odograph.core.policy import Need, Policy
from odograph.errors import InvalidPolicy

if TYPE_CHECKING:
    from odograph.core.exact import Budget

__all__ = ["budget"]

_LATTICE = 200  # steps of the adversary's lattice in epsilon


def budget(  # noqa: PLR0913  each is one option
    epsilon: Annotated[str, typer.Option(help="The target's epsilon, read exactly.")],
    delta: Annotated[str, typer.Option(help="The target's delta, all of it for the rule.")],
    *,
    fine: Annotated[bool, typer.Option("--fine", help="Solve at the table's resolution: a minute or two.")] = False,
    pure_only: Annotated[bool, typer.Option("--pure-only", help="For steps without Gaussians among them.")] = False,
    adversary: Annotated[bool, typer.Option("--adversary", help="Also say what an actual analyst refutes.")] = False,
    json: AsJson = False,
) -> None:
    """Print the certified budget of the exact rule for a target, solving for it if need be."""
    policy = Policy(epsilon, delta, takes=("pure",) if pure_only else FAMILIES)
    need = Need.of(policy)
    if need is None:  # pragma: no cover  the policy's rule is the exact one
        raise InvalidPolicy("the policy has no exact rule")
    with progress("solving", quiet=json) as report:
        found, source = certified(need, fineness=FINE if fine else COARSE, progress=report)
    paper = filter_time(float(need.epsilon), float(need.delta))
    rows = [
        ("target", f"{policy.target}, for {' and '.join(found.takes)} steps of any size"),
        ("unit", f"{float(found.unit):.12g} of intrinsic time"),
        ("units", str(found.units)),
        ("unit x units", f"{found.intrinsic:.6g} (for comparing; the budget is the pair)"),
        ("the paper's y*", f"{paper:.6g}"),
        ("ratio", f"{found.intrinsic / paper:.4g} times the paper's"),
        ("source", source),
    ]
    form = {
        "epsilon": float(need.epsilon),
        "delta": float(need.delta),
        "takes": [*found.takes],
        "unit": str(found.unit),
        "units": found.units,
        "intrinsic": found.intrinsic,
        "paper": paper,
        "source": source,
    }
    if adversary:
        refuted = float(refuted_intrinsic(need.epsilon, need.delta, float(need.epsilon) / _LATTICE))
        form["refuted"] = refuted
        rows.append(("refuted", _refuted(refuted, found)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    say(form, table, as_json=json)


def _refuted(refuted: float, found: Budget) -> str:
    gap = refuted / found.intrinsic - 1
    return f"{refuted:.6g} by an analyst with steps of multiples of epsilon/{_LATTICE}: {gap:.2%} above"
