"""Solve the shipped table of exact budgets at fine resolution, and write it as JSON.

Each target takes about a minute. Solved targets are kept in build/table.jsonl, so an interrupted run continues
where it stopped; `--write` only writes them to src/odograph/exact_table.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path

from odograph.core.value_iteration import FINE, VERSION, solve

ROOT = Path(__file__).resolve().parents[1]
STATE = ROOT / "build" / "table.jsonl"
TABLE = ROOT / "src" / "odograph" / "exact_table.json"

COMMON = ["1", "0.5", "2", "3", "0.1", "0.2", "4", "5", "8", "10", "20"]
FURTHER = ["1.5", "0.3", "6", "0.25", "0.75", "15"]
DELTAS = ["1e-6", "1e-5", "1e-9", "1e-12", "1e-8", "1e-10", "1e-7", "1e-11"]


def read_solved() -> dict[tuple[str, str], int]:
    """Return the units of the targets that this version of the solver has solved."""
    if not STATE.exists():
        return {}
    rows = [json.loads(line) for line in STATE.read_text().splitlines()]
    return {(r["epsilon"], r["delta"]): r["units"] for r in rows if (r["version"], r["fineness"]) == (VERSION, FINE)}


def one(target: tuple[str, str]) -> tuple[tuple[str, str], int]:
    """Solve one target."""
    epsilon, delta = target
    return target, solve(Fraction(epsilon), Fraction(delta), fineness=FINE).units


def main() -> None:
    """Solve the missing targets, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="only write the table from the solved targets")
    options = parser.parse_args()
    done = read_solved()
    targets = [(e, d) for names in (COMMON, FURTHER) for d in DELTAS for e in names if (e, d) not in done]
    if not options.write:
        STATE.parent.mkdir(exist_ok=True)
        with ProcessPoolExecutor(options.jobs) as pool:
            for (epsilon, delta), units in pool.map(one, targets):
                row = {
                    "epsilon": epsilon,
                    "delta": delta,
                    "units": units,
                    "version": VERSION,
                    "fineness": FINE,
                }
                with STATE.open("a") as state:
                    state.write(json.dumps(row) + "\n")
                print(f"({epsilon}, {delta}): {units} units", flush=True)
    rows = sorted(read_solved().items(), key=lambda item: (Fraction(item[0][0]), Fraction(item[0][1])))
    lines = ",\n".join(f"    {json.dumps([*target, units])}" for target, units in rows)
    TABLE.write_text(f'{{\n  "solver": {VERSION},\n  "fineness": {FINE},\n  "rows": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
