"""Write a ledger of the current schema into tests/fixtures, with everything in it that later versions must read.

Run once per released schema, and never again: the file is kept as that version wrote it.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import odograph as odo
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import MovePopulation, Pointer
from odograph.ledger.entries import text_of
from odograph.ledger.stores.base import SCHEMA, Head

FOLDER = Path(__file__).parents[1] / "tests" / "fixtures"


def fill(ledger: odo.Ledger) -> None:
    """Use every verb, every rule and every kind of guarantee."""
    policy = odo.Policy(3, "1e-6", delta_steps="1e-7", filter="zcdp")
    ledger.open_account("everyone", policy, note="the cap of all")
    for name in ("jan", "feb"):
        ledger.open_account(name, policy, parent="everyone", dataset="visits")
    ledger.open_account("exact", odo.Policy(1, "1e-6"))
    ledger.open_account("curves", odo.Policy(3, "1e-6", filter="renyi"), successor_of="exact")
    ledger.open_account("sums", odo.Policy(1, 0, filter="basic"))
    costs: list[odo.Guarantee] = [odo.PureDP("0.1"), odo.ApproxDP(0.1, "1e-9"), odo.ProbDP(0.1, "1e-9")]
    costs += [odo.ZCDP("1/300"), odo.GDP(0.05), odo.parallel({"north": odo.PureDP(0.1), "south": odo.PureDP(0.2)})]
    for i, cost in enumerate(costs):
        ledger.account("jan").spend(cost, key=f"q-{i}", note=f"question {i}")
    ledger.account("curves").spend(odo.RDP((2, 4, 8), (0.01, 0.02, 0.05)), key="a curve")
    ledger.spend({"jan": odo.PureDP(0.05), "feb": odo.PureDP("0.06")}, key="both")
    ledger.account("exact").spend(odo.gaussian(sigma=25))
    with suppress(odo.BudgetExceeded):
        ledger.account("sums").spend(odo.PureDP(2), key="too much")
    ledger.account("feb").reserve(odo.PureDP(0.01), key="voided").void("the data were late")
    ledger.account("feb").reserve(odo.PureDP(0.01), key="committed", expires=3600).commit()
    ledger.account("feb").reserve(odo.PureDP(0.01), key="pending", expires=3600)
    ledger.acting_as("gone").account("sums").spend(odo.PureDP(0.1), note="forgotten")
    ledger.erase_principal("gone")
    ledger.erase_note("sums#2")
    ledger.account("sums").close(note="done")
    take_a_step(ledger)


def take_a_step(ledger: odo.Ledger) -> None:
    """Write what a population writes, whose files would be elsewhere."""
    backend = ledger.backend
    if not isinstance(backend, LocalBackend):
        raise TypeError("the ledger must be here")
    policy = odo.Policy(1, "1e-6", filter="zcdp")
    about = {"engine": "numpy", "location": "people", "state": "00000000-first", "unknown": "join"}
    backend.open(Head("telemetry", "", "", "", policy.privacy_unit, policy.neighbors), policy, "made", "", about)
    origin, cost = backend.opened("telemetry").origin, text_of(odo.PureDP("0.1").to_dict())
    pointer = Pointer(1, "00000001-second")
    backend.engine.submit(
        MovePopulation(backend.author("monday"), "telemetry", origin, 0, "0" * 64, cost, "charge", pointer)
    )


def main() -> None:
    """Write the file, its export and its checkpoint."""
    path = FOLDER / f"ledger-schema-{SCHEMA}.db"
    with TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        with odo.connect(f"sqlite:///{made}", principal="fixture") as ledger:
            fill(ledger)
            with path.with_suffix(".jsonl").open("w") as file:
                checkpoint = ledger.export(file)
        with closing(sqlite3.connect(made)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
        shutil.copy(made, path)
    path.with_suffix(".checkpoint.json").write_text(json.dumps(checkpoint.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
