"""Populations on every engine, an oracle that decides for one person after the other, and a look into the files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import numpy as np
from spark_cluster import session

import odograph as odo
from odograph import Guarantee, Ledger, Policy, Population, Prices, compile_policy
from odograph.core.filters import Renyi
from odograph.core.gate import Totals, decide
from odograph.core.policy import Compiled
from odograph.ledger.backend import LocalBackend
from odograph.ledger.commands import read_pointer
from odograph.population.gate import SPENT, gate_of
from odograph.population.population import Participants
from odograph.population.version_store import ObjectVersions

ENGINES = ("numpy", "duckdb", "spark")
RULES = ("basic", "zcdp", "renyi", "exact", "shares")

Id: TypeAlias = int | str
Asked: TypeAlias = Guarantee | Mapping[Any, Guarantee]  # of everybody, or of some people
State: TypeAlias = dict[Any, tuple[int, ...]]


@cache
def compiled_for(rule: str) -> Compiled:
    """A policy under each rule, with some delta for the steps; exact budgets are in the shipped table."""
    if rule == "basic":
        return compile_policy(Policy(1, "1e-6", filter="basic"))
    if rule == "renyi":
        orders = {2: "1/4", 8: "1/4", "33/2": "1/4", 64: "1/4"}
        return compile_policy(Policy(1, "2e-6", delta_steps="1e-6", filter=Renyi(orders)))
    if rule == "shares":
        return compile_policy(Policy(1, "2e-6", filter={"exact": "1/2", "zcdp": "1/2"}))
    return compile_policy(Policy(1, "2e-6", delta_steps="1e-6", filter=rule))


@dataclass
class Oracle:
    """A filter per person, kept as an account's totals and decided by `decide`, one person after the other."""

    compiled: Compiled
    unknown: str = "leave-out"
    totals: dict[Id, Totals] = field(default_factory=dict)
    removed: set[Id] = field(default_factory=set)

    def join(self, ids: Iterable[Id]) -> None:
        """Let people in: fresh, or as spent."""
        for one in ids:
            start = self.compiled.start
            spent = start._replace(unpriced=(1,) * len(start.unpriced))
            self.totals.setdefault(one, spent if one in self.removed else start)

    def remove(self, ids: Iterable[Id]) -> None:
        """Take people out; they are remembered."""
        for one in ids:
            if self.totals.pop(one, None) is not None:
                self.removed.add(one)

    def charge(self, asked: Asked) -> set[Id]:
        """Charge, and say who takes part."""
        if not isinstance(asked, Mapping):
            asked = dict.fromkeys(self.totals, asked)
        if self.unknown == "join":
            self.join(asked)
        prices = {guarantee: self.compiled.price(guarantee) for guarantee in {*asked.values()}}
        took: set[Id] = set()
        for one, guarantee in asked.items():
            if one in self.totals:
                decision = decide(self.compiled.meters, self.totals[one], prices[guarantee])
                self.totals[one] = decision.totals_after
                if decision.admitted:
                    took.add(one)
        return took

    def state(self) -> State:
        """The totals on the meters that decide, of those who are not spent on all of them."""
        gate = gate_of(self.compiled)
        return alive({one: gate.totals(totals) for one, totals in self.totals.items()})


def alive(state: State) -> State:
    """Leave out who is spent on every meter: an engine keeps whoever was removed in its own way."""
    return {one: totals for one, totals in state.items() if set(totals) != {SPENT}}


def prices_of(asked: Asked) -> Guarantee | Prices:
    """What an oracle is asked for, as prices."""
    if not isinstance(asked, Mapping):
        return asked
    places: dict[Guarantee, int] = {}
    which = [places.setdefault(guarantee, len(places)) for guarantee in asked.values()]
    return Prices([*places] or [odo.PureDP(0)], which, ids=np.array([*asked]))


def took(step: Participants) -> set[Any]:
    """The ids of those who take part, from any engine."""
    ids = step.ids
    if isinstance(ids, np.ndarray):
        return set(ids.tolist())
    rows = ids.collect() if hasattr(ids, "collect") else ids.fetchall()
    found = [row[0] for row in rows]
    assert len(found) == len(set(found))
    return set(found)


def current(ledger: Ledger, population: Population) -> Path:
    """The folder that the ledger points to."""
    assert isinstance(ledger.backend, LocalBackend)
    sequence = ledger.backend.balances([population.name])[population.name].sequence
    entries = [ledger.backend.entry(population.name, number) for number in range(sequence, -1, -1)]
    pointer = read_pointer(next(entry for entry in entries if entry.verb in ("open", "step")))
    return population._context.versions.folder(pointer.state)  # noqa: SLF001  as below


def location_of(population: Population) -> Path:
    """Where its files are."""
    return population._context.versions.location  # noqa: SLF001  only tests look there


def versions_in(location: Path) -> set[str]:
    """The folders of versions that are there."""
    return {folder.name for folder in location.iterdir() if folder.is_dir()}


def versions_of(population: Population) -> set[str]:
    """The folders of versions that are there, or in the store that copies of them are from."""
    versions = population._context.versions  # noqa: SLF001  as above
    if not isinstance(versions, ObjectVersions):
        return versions_in(versions.location)
    with versions._reach() as store:  # noqa: SLF001  as above
        return {name for name in versions._names(store) if "-" in name}  # noqa: SLF001  as above


def read_state(folder: Path) -> State:
    """Everybody's totals in a version, whichever engine wrote it."""
    if (folder / "total-0").exists():
        people = json.loads((folder / "state.json").read_text())["people"]
        columns = [np.fromfile(path, dtype=np.int64) for path in sorted(folder.glob("total-*"))]
        assert all(len(column) == people for column in columns), "a version is half written"
        return {one: tuple(totals) for one, totals in enumerate(np.array(columns).T.tolist())}
    found: State = {}
    for path in sorted(folder.rglob("*.parquet")):
        with duckdb.connect() as connection:
            rows = connection.read_parquet(str(path), hive_partitioning=False)
            if "took" in rows.columns:
                totals = sorted((name for name in rows.columns if name.startswith("total")), key=_number)
                for one, *amounts in rows.project(", ".join(["id", *totals])).fetchall():
                    assert one not in found, "somebody is there twice"
                    found[one] = tuple(amounts)
    return found


def _number(name: str) -> int:
    return int("".join(filter(str.isdigit, name)))


@dataclass
class PopulationFactory:
    """Makes populations on one engine, in a ledger and a folder of their own."""

    engine: str
    ledger: Ledger
    folder: Path
    session: Any = None

    def create(
        self,
        ids: Any = 10,  # noqa: ANN401  what the engine takes
        *,
        name: str = "people",
        compiled: Compiled | None = None,
        unknown: str = "leave-out",
        location: Path | str | None = None,
    ) -> Population:
        """Make one; a count is the numbers from 0."""
        return Population.create(
            name,
            compiled or compiled_for("zcdp"),
            ledger=self.ledger,
            location=location or self.folder / name,
            ids=range(ids) if isinstance(ids, int) else ids,
            engine=self.engine,
            unknown=unknown,
            session=self.session,
        )

    def open(
        self, name: str = "people", ledger: Ledger | None = None, location: Path | str | None = None
    ) -> Population:
        """Come back to one."""
        return Population.open(name, ledger=ledger or self.ledger, location=location, session=self.session)

    def state(self, population: Population) -> State:
        """The totals of those who are not spent on all meters."""
        return alive(read_state(current(self.ledger, population)))


def ledger_in(folder: Path) -> Ledger:
    """A ledger in a file."""
    return odo.connect(f"sqlite:///{folder}/ledger.db", principal="ana")


@contextmanager
def small_session(folder: Path) -> Iterator[Any]:
    """Run a Spark session for a few small steps: what is compiled in haste is done sooner."""
    options = f"-Dlog4j2.configurationFile=file:{folder}/log4j2.properties -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings: dict[str, Any] = {"spark_sql_shuffle_partitions": 2, "spark_driver_extraJavaOptions": options}
    with session("local[2]", folder, **settings) as running:
        yield running
