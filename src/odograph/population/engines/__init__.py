"""Engines: how the filters of a population are stored and computed on. All engines make identical decisions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from odograph.display import Progress
from odograph.errors import InvalidArgument
from odograph.population.gate import Gate
from odograph.population.prices import PriceTable
from odograph.population.version_store import Versions

__all__ = ["UNKNOWN", "Engine", "EngineContext", "make_engine"]

UNKNOWN: Final = ("join", "leave-out")  # what happens to people in a charge who are not in the population


class EngineContext(NamedTuple):
    """What an engine knows about a population."""

    versions: Versions
    gate: Gate
    unknown: str


class Engine(Protocol):
    """Writes each version from the one before it. The folder passed as `after` is empty, and the engine's to fill."""

    @property
    def ordered(self) -> bool:
        """Whether people have an order, in which records and prices can be passed without ids."""
        ...

    def create(self, context: EngineContext, after: Path, ids: Any) -> None:  # noqa: ANN401  each engine takes its own
        """Write the first version: all totals are zero, and there are no participants."""
        ...

    def digest(self, context: EngineContext, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of prices or ids, which does not depend on the order of the people."""
        ...

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        """Write the version after a charge, with its participants."""
        ...

    def join(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as above
        """Write the version in which people have joined; people who were removed before join as spent."""
        ...

    def remove(self, context: EngineContext, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as above
        """Write the version in which people are gone; they can come back only as spent."""
        ...

    def renew(self, context: EngineContext, before: Path, after: Path) -> None:
        """Write the version in which a new epoch begins: the same people have spent nothing; removed ones, all."""
        ...

    def participants(self, context: EngineContext, folder: Path) -> Any:  # noqa: ANN401  as above
        """Return the ids of the participants of the round that made a version."""
        ...

    def mask(self, context: EngineContext, folder: Path) -> Any:  # noqa: ANN401  as above
        """Return the same as a mask over dense ids; raise `LedgerError` where ids are not dense."""
        ...

    def count(self, context: EngineContext, folder: Path, amounts: Sequence[int]) -> int:
        """Count the participants who would admit a further charge; the count is private until noise is added."""
        ...

    def accept(self, records: Any) -> Any:  # noqa: ANN401  as above
        """Return records in the form that this engine uses, or raise `InvalidArgument` with their type."""
        ...

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  as above
        """Return what a mechanism can tell about records without any rows: the container and its column types."""
        ...

    def check(self, context: EngineContext, folder: Path, records: Any) -> None:  # noqa: ANN401  as above
        """Raise `InvalidArgument` unless these can be the records of the people of a version."""
        ...

    def empty(self, records: Any) -> Any:  # noqa: ANN401  as above
        """Return records of the same form, without any rows."""
        ...

    def records(self, context: EngineContext, folder: Path, records: Any) -> Any:  # noqa: ANN401  as above
        """Return the records of the participants."""
        ...


def make_engine(name: str, session: Any = None, memory_limit: str | None = None) -> Engine:  # noqa: ANN401  of Spark
    """Return an engine by name: numpy, duckdb (which takes a memory limit) or spark (which needs its session)."""
    if memory_limit is not None and name != "duckdb":
        raise InvalidArgument(f"memory_limit must be left out for any engine but 'duckdb' (got engine {name!r})")
    if name == "numpy":
        from odograph.population.engines.numpy import NumpyEngine  # noqa: PLC0415  each engine is loaded when used

        return NumpyEngine()
    if name == "duckdb":
        from odograph.population.engines.duckdb import DuckDBEngine  # noqa: PLC0415  as above

        return DuckDBEngine(memory_limit)
    if name == "spark":
        from odograph.population.engines.spark import SparkEngine  # noqa: PLC0415  as above

        return SparkEngine(session)
    raise InvalidArgument(f"engine must be 'numpy', 'duckdb' or 'spark' (got {name!r})")
