"""Solve the shipped table of exact budgets at fine resolution, and write it as a module.

Each target takes about a minute. What is solved is kept in build/table.jsonl, so a run that is cut goes on
where it stopped; `--write` turns what is there into src/odograph/core/exact_table.py.
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
MODULE = ROOT / "src" / "odograph" / "core" / "table.py"

COMMON = ["1", "0.5", "2", "3", "0.1", "0.2", "4", "5", "8", "10", "20"]
FURTHER = ["1.5", "0.3", "6", "0.25", "0.75", "15"]
DELTAS = ["1e-6", "1e-5", "1e-9", "1e-12", "1e-8", "1e-10", "1e-7", "1e-11"]

HEAD = '''"""Certified budgets of the exact rule for common targets, at fine resolution.

Written by tools/build_table.py. Each row: epsilon, delta, the units N; the unit follows from epsilon
(`exact.family_quantum` at `FINENESS`). For pure and Gaussian steps of any size together.
"""

from __future__ import annotations

from typing import Final

__all__ = ["FINENESS", "ROWS", "SOLVER"]

SOLVER: Final = {version}
FINENESS: Final = {fineness}

ROWS: Final[tuple[tuple[str, str, int], ...]] = (
'''


def solved() -> dict[tuple[str, str], int]:
    """Return what the state file holds for this solver."""
    if not STATE.exists():
        return {}
    rows = [json.loads(line) for line in STATE.read_text().splitlines()]
    return {(r["epsilon"], r["delta"]): r["units"] for r in rows if (r["version"], r["fineness"]) == (VERSION, FINE)}


def one(target: tuple[str, str]) -> tuple[tuple[str, str], int]:
    """Solve one target."""
    epsilon, delta = target
    return target, solve(Fraction(epsilon), Fraction(delta), fineness=FINE).units


def main() -> None:
    """Solve what is missing, then write the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="only write the module from what is solved")
    options = parser.parse_args()
    done = solved()
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
    rows = sorted(solved().items(), key=lambda item: (Fraction(item[0][0]), Fraction(item[0][1])))
    lines = [f'    ("{epsilon}", "{delta}", {units}),\n' for (epsilon, delta), units in rows]
    MODULE.write_text(HEAD.format(version=VERSION, fineness=FINE) + "".join(lines) + ")\n")


if __name__ == "__main__":
    main()
