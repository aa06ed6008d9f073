"""Solve the shipped table of exact budgets, and write it as JSON.

Each target takes two or three seconds. There are two rows for each: what the smooth filter of a default policy needs,
with the reserves that have an order, and what the exact filter alone needs. Solved targets are kept in
build/table.jsonl, so an interrupted run continues where it stopped; `--write` only writes them to
src/odograph/exact_table.json. The tables of earlier releases stay in that file as they are.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from odograph.core.filters.smooth import RESERVES, set_aside
from odograph.core.fixed_point import text_of, tidy
from odograph.core.policy import Need, Policy
from odograph.core.value_iteration import VERSION, Budget, solve, solve_with_values

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "build" / "table.jsonl"
TABLE = ROOT / "src" / "odograph" / "exact_table.json"

EPSILONS = ["0.1", "0.2", "0.25", "0.3", "0.5", "0.75", "1", "1.5", "2", "3", "4", "5", "6", "8", "10", "15", "20"]
DELTAS = ["1e-12", "1e-11", "1e-10", "1e-9", "1e-8", "1e-7", "1e-6", "1e-5"]
WITH_ORDER = [name for name, choice in RESERVES.items() if choice.has_order]

Row = list[Any]  # epsilon, delta, fineness, units; for each reserve its name, units, order, and what it leaves


def needs() -> list[Need]:
    """Return what has to be solved, in the order of the table."""
    policies = [
        policy
        for epsilon in EPSILONS
        for delta in DELTAS
        for policy in (Policy(epsilon, delta), Policy(epsilon, delta, filter="exact"))
    ]
    return [need for policy in policies if (need := policy.need) is not None]


def solved() -> dict[tuple[str, str], Row]:
    """Return the rows that this version of the solver has solved, for the present reserves, by target."""
    if not STATE.exists():
        return {}
    lines = [json.loads(line) for line in STATE.read_text().splitlines()]
    return {target(line["row"]): line["row"] for line in lines if line["settings"] == settings()}


def settings() -> str:
    """Return what a row depends on beside its target."""
    return repr((VERSION, sorted((name, choice[1:]) for name, choice in RESERVES.items())))


def target(row: Row) -> tuple[str, str]:
    """Return the epsilon and the delta of a row."""
    return row[0], row[1]


def solve_row(need: Need) -> Row:
    """Solve one row."""
    if not need.reserve:
        return row_of(solve(need.epsilon, need.delta, takes=need.takes))
    beyond = max(RESERVES[name].rows(need.delta) for name in WITH_ORDER)
    budget, values = solve_with_values(need.epsilon, need.delta, takes=need.takes, beyond=beyond)
    reserves = [(name, set_aside(budget, name, values).reserve) for name in WITH_ORDER]
    return row_of(budget) + [[name, one.units, str(one.order), one.left] for name, one in reserves if one is not None]


def row_of(budget: Budget) -> Row:
    """Return a budget as a row without reserves."""
    return [text_of(tidy(budget.epsilon)), text_of(tidy(budget.delta)), budget.fineness, budget.units]


def main() -> None:
    """Solve the missing targets, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="only write the table from the solved targets")
    options = parser.parse_args()
    if not options.write:
        known = solved()
        missing = [n for n in needs() if (text_of(tidy(n.epsilon)), text_of(tidy(n.delta))) not in known]
        STATE.parent.mkdir(exist_ok=True)
        with ProcessPoolExecutor(options.jobs) as pool:
            for row in pool.map(solve_row, missing):
                with STATE.open("a") as state:
                    state.write(json.dumps({"settings": settings(), "row": row}) + "\n")
                print(row, flush=True)
    earlier = [table for table in json.loads(TABLE.read_text())["tables"] if table["solver"] != VERSION]
    tables = [{"solver": VERSION, "rows": [*solved().values()]}, *earlier]
    TABLE.write_text('{\n  "tables": [\n' + ",\n".join(map(text, tables)) + "\n  ]\n}\n")


def text(table: dict[str, Any]) -> str:
    """Return a table as JSON, a row on each line."""
    rows = ",\n".join(f"        {json.dumps(row)}" for row in table["rows"])
    return f'    {{\n      "solver": {table["solver"]},\n      "rows": [\n{rows}\n      ]\n    }}'


if __name__ == "__main__":
    main()
