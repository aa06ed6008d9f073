"""RemotePopulation: a population behind a service, with the verbs of `Population`.

Prices leave this process as JSON, or as a Parquet file where they are many. Records never leave it: `run` asks the
service who takes part, and picks their records here.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from odograph.client.backend import lifetime_of, maybe_of, part_of, understood
from odograph.client.transport import Transport, quoted
from odograph.core.guarantees import Guarantee, PureDP, guarantee_from_dict
from odograph.core.policy import Compiled, Policy
from odograph.errors import EntryNotFound, IdempotencyConflict, InvalidArgument, InvalidGuarantee, type_text
from odograph.ledger.entries import check_key, check_name, check_note
from odograph.population.engines.numpy import NumpyEngine
from odograph.population.population import Round
from odograph.population.prices import Prices, Pricing, VectorizedPrice, prices_for

__all__ = ["RemoteParticipants", "RemotePopulation", "RemoteRoundReceipt"]

T = TypeVar("T")
_MAX_IN_JSON: Final = 10_000  # people in one request; more are sent as Parquet
_JSON_NAMES: Final = {"id": "ids", "which": "which"}  # of the columns
_PAGE: Final = 1000
_Columns: TypeAlias = Mapping[str, Any] | Path  # arrays by name, or a Parquet file


class RemoteRoundReceipt(NamedTuple):
    """A round that is on the service's disk. It contains nothing about any person."""

    population: str
    version: int
    key: str
    repeated: bool
    time: str
    seal: str

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt in plain types."""
        return self._asdict()


class RemoteParticipants:
    """Who takes part in a round: private, for the code that runs the mechanism only. Needs a runner's key."""

    def __init__(self, receipt: RemoteRoundReceipt, transport: Transport) -> None:
        self.receipt = receipt
        self._transport = transport

    @property
    def ids(self) -> Any:  # noqa: ANN401  an array of integers, or a list of strings
        """The ids of the participants, as long as the service keeps them: for the last two rounds."""
        path = f"{_path(self.receipt.population)}/rounds/{quoted(self.receipt.key)}/participants"
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
            self._transport.download(path, file)
            file.seek(0)
            found = understood(lambda: [json.loads(line) for line in file])()
        return found if found and isinstance(found[0], str) else np.array(found, dtype=np.int64)

    def chunks(self) -> Iterator[list[Any]]:
        """Yield the ids as lists of integers or strings: all of them at once."""
        ids = self.ids
        yield ids if isinstance(ids, list) else ids.tolist()

    def __repr__(self) -> str:
        return f"RemoteParticipants(round {self.receipt.version} of {self.receipt.population!r})"


class RemotePopulation:
    """One filter per person, kept by a service. `Ledger.population` returns it for a ledger behind a service."""

    def __init__(self, transport: Transport, name: str) -> None:
        form = transport.call("GET", _path(name))
        self.name = name
        self._transport = transport
        self._compiled = understood(Compiled.from_dict)(part_of(form, "compiled", dict))
        #: What the epochs of its schedule promise together to each person, as of now; None if it does not renew.
        self.lifetime = lifetime_of(maybe_of(form, "lifetime", dict)) if "lifetime" in form else None
        self._ordered = part_of(part_of(form, "population", dict), "engine", str) == "numpy"
        self._engine = NumpyEngine()
        #: The answers so far; prices may depend on them.
        self.outputs: list[Any] = []
        # Mechanisms that answered without records, by their identity and the types that they were called with.
        self._probed: dict[Hashable, Callable[..., Any]] = {}

    @property
    def policy(self) -> Policy:
        """The promise to each person."""
        return self._compiled.policy

    @property
    def ordered(self) -> bool:
        """Whether people have an order, in which prices and records can be passed without ids."""
        return self._ordered

    def charge(self, prices: Prices | Guarantee, *, key: str, note: str = "") -> RemoteParticipants:
        """Charge each person whose filter admits it, durably, and return the participants. A key charges once."""
        if isinstance(prices, Guarantee):
            return self._charge_everyone(prices, {}, key, note)
        if not isinstance(prices, Prices):
            raise InvalidGuarantee(f"prices must be a guarantee or Prices (got {type_text(prices)})")
        columns: _Columns = {"which": prices.which}
        if prices.table is not None:
            columns = _path_of(prices.table)
        elif prices.ids is not None:
            columns = {"id": prices.ids, "which": prices.which}
        form: dict[str, Any] = {"guarantees": [one.to_dict() for one in prices.guarantees]}
        return RemoteParticipants(self._update("rounds", form, columns, key, note), self._transport)

    def _charge_everyone(
        self, guarantee: Guarantee, more: Mapping[str, Any], key: str, note: str
    ) -> RemoteParticipants:
        form = {"guarantees": [guarantee.to_dict()], **more}
        return RemoteParticipants(self._update("rounds", form, {}, key, note), self._transport)

    def join(self, ids: Any, *, key: str, note: str = "") -> RemoteRoundReceipt:  # noqa: ANN401  a list, an array, a path
        """Add people who have spent nothing; people who were removed before join as spent."""
        return self._update("joins", {}, _people(ids), key, note)

    def remove(self, ids: Any, *, key: str, note: str = "") -> RemoteRoundReceipt:  # noqa: ANN401  as in `join`
        """Remove people and forget what they spent; a mark of each remains, so that they can only join as spent."""
        return self._update("removals", {}, _people(ids), key, note)

    def run(  # noqa: PLR0913  a round, and what it is made of
        self,
        mechanism: Callable[..., T],
        records: Any,  # noqa: ANN401  one for each person, in the order of the ids
        prices: Guarantee | Pricing | VectorizedPrice | Prices,
        *,
        key: str,
        note: str = "",
        constants: Mapping[str, Any] | None = None,
    ) -> T:
        """Charge, then run the mechanism here on the records of the participants, as `Population.run` does.

        For populations of the engine numpy: one record for each person, in the order of the ids.
        """
        if not self._ordered:
            raise InvalidArgument(
                "run needs people in an order, as with the engine 'numpy': call charge, and join the ids of the"
                " participants with your table"
            )
        known, engine = {**(constants or {})}, self._engine
        records = engine.accept(records)
        trial = (id(mechanism), engine.form(records), frozenset((name, type(one)) for name, one in known.items()))
        if trial not in self._probed:
            mechanism(engine.empty(records), **known)
            self._probed[trial] = mechanism
        asked = prices if isinstance(prices, Prices) else prices_for(prices, records, tuple(self.outputs))
        if isinstance(asked, Guarantee):
            active = self._charge_everyone(asked, {"records": len(records)}, key, note)
        else:
            active = self.charge(asked, key=key, note=note)
        if active.receipt.repeated:
            raise IdempotencyConflict(
                f"key {key!r} was used before, for round {active.receipt.version}, which ran or may have run; nothing"
                " was charged. Another run needs another key, and is charged"
            )
        ids = active.ids
        answer = mechanism(records[ids] if isinstance(records, np.ndarray) else [records[i] for i in ids], **known)
        self.outputs.append(answer)
        return answer

    def noisy_active_count(self, probe: Guarantee, cost: PureDP, *, key: str, note: str = "") -> int:
        """Return a noisy count of the people who could take part in a round of `probe`; it is a round of its own."""
        form = {"probe": probe.to_dict(), "cost": cost.to_dict(), "note": check_note(note)}
        path = f"{_path(self.name)}/counts"
        answer = part_of(self._transport.call("POST", path, form, key=check_key(key), patient=True), "count", int)
        self.outputs.append(answer)
        return answer

    def rounds(self, first: int = 0, count: int = 1000) -> tuple[Round, ...]:
        """Return a page of its rounds, for an auditor: acts and keys, nothing about any person."""
        found: list[Round] = []
        while len(found) < count:
            query = {"first": first + len(found), "count": min(_PAGE, count - len(found))}
            page = part_of(self._transport.call("GET", f"{_path(self.name)}/rounds", query=query), "rounds", list)
            found += map(_round_of, page)
            if not page or first < 0:
                break
        return tuple(found)

    def participants(self, key: str) -> RemoteParticipants:
        """Return who took part in a round that this principal charged under a key, if they are still kept."""
        for one in reversed(self.rounds(-_PAGE, _PAGE)):
            if (one.act, one.key) == ("charge", check_key(key)):
                receipt = RemoteRoundReceipt(self.name, one.version, key, True, one.time.isoformat(), one.seal)  # noqa: FBT003
                return RemoteParticipants(receipt, self._transport)
        raise EntryNotFound(f"no round of {self.name!r} was charged under the key {key!r}")

    def close(self, *, note: str = "") -> None:
        """Close the population permanently: it takes no new rounds."""
        self._transport.call("POST", f"{_path(self.name)}/close", {"note": check_note(note)})

    def _update(self, verb: str, form: dict[str, Any], columns: _Columns, key: str, note: str) -> RemoteRoundReceipt:
        """Send an update as JSON, or as Parquet where people are many."""
        path, key = f"{_path(self.name)}/{verb}", check_key(key)
        if not isinstance(columns, Path) and all(len(column) <= _MAX_IN_JSON for column in columns.values()):
            lists = {_JSON_NAMES[name]: np.asarray(column).tolist() for name, column in columns.items()}
            sent = form | lists | {"note": check_note(note)}
            return _receipt_of(self._transport.call("POST", path, sent, key=key, patient=True))
        metadata = {name: json.dumps(value) for name, value in form.items()} | {"note": check_note(note)}
        parquet = _parquet_of(columns, metadata)
        return _receipt_of(self._transport.call("POST", path, key=key, patient=True, parquet=parquet))

    def __repr__(self) -> str:
        more = "" if self.lifetime is None else f"; lifetime promise {self.lifetime}"
        return f"RemotePopulation({self.name!r}, {self.policy.promise}{more})"


def _path(name: str) -> str:
    return f"/v1/populations/{quoted(check_name(name, 'population'))}"


def _people(ids: Any) -> _Columns:  # noqa: ANN401  a list, an array, a path
    """Return ids as a column, or as the file that has it."""
    return _path_of(ids) if isinstance(ids, str | Path) else {"id": np.asarray(ids)}


def _path_of(table: object) -> Path:
    """Return the path of a Parquet file: no other table can be sent."""
    if not isinstance(table, str | Path):
        raise InvalidArgument(f"a table must be the path of a Parquet file for a service (got {type_text(table)})")
    return Path(table)


def _parquet_of(columns: _Columns, metadata: Mapping[str, str]) -> bytes:
    """Return columns and metadata as a Parquet file."""
    from odograph.population.engines.duckdb import write_upload  # noqa: PLC0415  loaded when many people are sent

    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        path = Path(folder) / "sent.parquet"
        write_upload(columns, metadata, path)
        return path.read_bytes()


@understood
def _receipt_of(form: Mapping[str, Any]) -> RemoteRoundReceipt:
    return RemoteRoundReceipt(**form)


@understood
def _round_of(form: Mapping[str, Any]) -> Round:
    cost = None if form["cost"] is None else guarantee_from_dict(form["cost"])
    return Round(**{**form, "time": datetime.fromisoformat(form["time"]), "cost": cost})
