"""Engines: where the filters of a population are kept, and what computes on them. All decide identically."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from odograph.errors import InvalidPolicy
from odograph.population.kernel import Gate
from odograph.population.prices import Priced
from odograph.population.versions import Versions
from odograph.progress import Progress

__all__ = ["UNKNOWN", "Engine", "Site", "engine_named"]

UNKNOWN: Final = ("join", "leave-out")  # what becomes of people in a charge who are not in the population


class Site(NamedTuple):
    """A population, as an engine sees it."""

    versions: Versions
    gate: Gate
    unknown: str


class Engine(Protocol):
    """Writes each version from the one before it. A folder that is handed to it as `after` is empty, and its own."""

    @property
    def in_order(self) -> bool:
        """Whether people have an order, in which records and prices can be passed without ids."""
        ...

    def create(self, site: Site, after: Path, ids: Any) -> None:  # noqa: ANN401  each engine takes its own
        """Write the first version: everybody has spent nothing, and nobody took part."""
        ...

    def digest(self, site: Site, asked: Any) -> str:  # noqa: ANN401  prices, or ids
        """Return a keyed digest of who is asked for what: the same for the same, in any order of the people."""
        ...

    def charge(self, site: Site, before: Path, after: Path, prices: Priced, progress: Progress | None) -> None:
        """Write the version after a charge, and who took part."""
        ...

    def join(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as above
        """Write the version in which people have joined; those who were removed before join as spent."""
        ...

    def remove(self, site: Site, before: Path, after: Path, ids: Any) -> None:  # noqa: ANN401  as above
        """Write the version in which people are gone, and can come back only as spent."""
        ...

    def taking_part(self, site: Site, folder: Path) -> Any:  # noqa: ANN401  as above
        """Return the ids of those who took part in the step that made a version."""
        ...

    def mask(self, site: Site, folder: Path) -> Any:  # noqa: ANN401  as above
        """Return the same as a mask over dense ids; raise `LedgerError` where ids are not dense."""
        ...

    def count(self, site: Site, folder: Path, amounts: Sequence[int]) -> int:
        """Count those who took part and would admit a charge now; the number is private until it has noise."""
        ...

    def accept(self, records: Any) -> Any:  # noqa: ANN401  as above
        """Return records as this engine works on them; raise `InvalidGuarantee`, with their type, if it cannot."""
        ...

    def form(self, records: Any) -> Hashable:  # noqa: ANN401  as above
        """Return what a mechanism can tell of records without any: the container, and the types in it."""
        ...

    def check(self, site: Site, folder: Path, records: Any) -> None:  # noqa: ANN401  as above
        """Raise `InvalidGuarantee` unless these can be the records of the people of a version."""
        ...

    def nobody(self, records: Any) -> Any:  # noqa: ANN401  as above
        """Return no records, of the same shape."""
        ...

    def records(self, site: Site, folder: Path, records: Any) -> Any:  # noqa: ANN401  as above
        """Return the records of those who took part."""
        ...


def engine_named(name: str, session: Any = None, memory_limit: str | None = None) -> Engine:  # noqa: ANN401  of Spark
    """Return an engine: numpy, duckdb, which may have a limit, or spark with its session."""
    if memory_limit is not None and name != "duckdb":
        raise InvalidPolicy(f"memory_limit is for the engine 'duckdb', and {name!r} has none")
    if name == "numpy":
        from odograph.population.dense import Dense  # noqa: PLC0415  each engine is loaded when it is used

        return Dense()
    if name == "duckdb":
        from odograph.population.duck import Duck  # noqa: PLC0415  as above

        return Duck(memory_limit)
    if name == "spark":
        from odograph.population.spark import Spark  # noqa: PLC0415  as above

        return Spark(session)
    raise InvalidPolicy(f"engine must be 'numpy', 'duckdb' or 'spark', and {name!r} is not")
