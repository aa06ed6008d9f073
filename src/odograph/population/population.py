"""Population: one privacy filter per person. A person takes part in each round until their own budget is spent.

A promise to each person holds only if a round and its prices look at nothing else than they may. `Population.run`
makes that hard to break: a price is computed from one record and past outputs; the mechanism gets the records of the
participants and public constants, and never the number of people; and it is first called without any records,
because a round must answer even when everyone has dropped out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from odograph.account import check_page
from odograph.compile import compile_policy
from odograph.core.guarantees import Guarantee, PureDP
from odograph.core.policy import Compiled, Policy
from odograph.display import Html, Progress, badge, card, facts, one_line, paragraph, utc
from odograph.errors import (
    AccountClosed,
    AccountExists,
    AccountNotFound,
    EntryNotFound,
    IdempotencyConflict,
    InvalidArgument,
    InvalidGuarantee,
    LedgerBusy,
    LedgerError,
    OdographError,
    OutcomeUnknown,
    type_text,
    with_usage,
)
from odograph.integrations.opendp import noisy
from odograph.ledger.backend import Backend, LocalBackend, Opened
from odograph.ledger.commands import (
    Author,
    MovePopulation,
    Pointer,
    Repeated,
    check_repeated,
    read_pointer,
)
from odograph.ledger.entries import Entry, check_name, iso_time, shown, text_of
from odograph.ledger.epochs import Renewal, RenewalStep, Schedule, current_account, date_in
from odograph.ledger.ledger import Ledger, name_error
from odograph.ledger.results import History, Lifetime
from odograph.ledger.stores.base import Head
from odograph.population.engines import UNKNOWN, Engine, EngineContext, make_engine
from odograph.population.gate import gate_of
from odograph.population.prices import Prices, Pricing, VectorizedPrice, price_table, prices_for
from odograph.population.version_store import ObjectVersions, Versions, open_versions, pin

__all__ = ["Participants", "Population", "Round", "RoundReceipt", "read_rounds"]

_CHUNK_SIZE: Final = 1 << 16  # ids at a time
_MAX_ATTEMPTS: Final = 10  # of an update that other processes forestall

T = TypeVar("T")
# From the version before to the one after.
_WriteVersion = Callable[[Path, Path], None]


class RoundReceipt(NamedTuple):
    """A round that is on disk. It contains nothing about any person."""

    population: str
    version: int
    key: str
    repeated: bool
    entry: Entry

    def __repr__(self) -> str:
        again = ", repeated" if self.repeated else ""
        return one_line("RoundReceipt", f"round {self.version} of {self.population}, key {self.key}{again}")

    def _repr_html_(self) -> str:
        label = badge("charged before, nothing was charged now") if self.repeated else badge("charged", "good")
        return card("Receipt of a round", *self.html_parts(), label=label)

    def html_parts(self) -> tuple[Html, ...]:
        """Return what a notebook shows of it."""
        named = {"population": self.population, "round": self.version, "key": self.key, "entry": self.entry.id}
        return (facts(named | {"time": utc(self.entry.moment)}),)

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt in plain types."""
        form = {name: getattr(self, name) for name in ("population", "version", "key", "repeated")}
        return form | {"time": iso_time(self.entry.time), "seal": self.entry.seal}


class Round(NamedTuple):
    """A round as every reader of the ledger may see it: it contains nothing about any person.

    `act` is create, renew, charge, join, remove, retire or close. `cost` is what everyone was asked for, None for
    individual prices: a list of them would tell which prices occur, and so something about the records.
    """

    version: int
    time: datetime
    act: str
    cost: Guarantee | None
    principal: str
    key: str
    note: str
    seal: str

    def to_dict(self) -> dict[str, Any]:
        """Return the round in plain types."""
        cost = None if self.cost is None else self.cost.to_dict()
        return {**self._asdict(), "time": self.time.isoformat(), "cost": cost}


class Participants:
    """Who takes part in a round: private, for the code that runs the mechanism only.

    It depends on the data. A repeated key gives the same participants again while the round is one of the last two;
    later, only the receipt.
    """

    def __init__(self, receipt: RoundReceipt, engine: Engine, context: EngineContext, folder: Path) -> None:
        self.receipt = receipt
        self._engine = engine
        self._context = context
        self.folder = folder

    @property
    def ids(self) -> Any:  # noqa: ANN401  what the engine has: an array, a table
        """The ids of the participants."""
        return self._engine.participants(self._context, self._kept_folder())

    @property
    def mask(self) -> Any:  # noqa: ANN401  as above
        """The same as a mask over dense ids."""
        return self._engine.mask(self._context, self._kept_folder())

    def chunks(self) -> Iterator[list[Any]]:
        """Yield the ids as lists of integers or strings, some at a time."""
        ids = self.ids
        if isinstance(ids, np.ndarray):
            yield from (ids[i : i + _CHUNK_SIZE].tolist() for i in range(0, len(ids), _CHUNK_SIZE))
            return
        rows = ids.iter_rows() if hasattr(ids, "iter_rows") else ids.toLocalIterator()  # of DuckDB, of Spark
        while chunk := [row[0] for row in islice(rows, _CHUNK_SIZE)]:
            yield chunk

    def _kept_folder(self) -> Path:
        if not self.folder.is_dir():
            raise LedgerError(
                f"the participants of round {self.receipt.version} of {self.receipt.population!r} are no longer kept:"
                " only those of the last two rounds are"
            )
        return self.folder

    def __repr__(self) -> str:
        return f"Participants(round {self.receipt.version} of {self.receipt.population!r})"

    def _repr_html_(self) -> str:
        return card("Participants", paragraph("Private: they depend on the data."), *self.receipt.html_parts())


class Population:
    """One filter per person, stored in files; the ledger says which files are current. It never refuses a round.

    `create` makes a population, `open` opens an existing one. Its policy is a promise to each person.
    """

    @with_usage("a population is made by Population.create(...), and opened again by Population.open(...)")
    def __init__(self, backend: LocalBackend, name: str, engine: Engine, versions: Versions) -> None:
        opened = backend.opened(name)
        self.name = name
        self._backend = backend
        self._opened = opened
        self._engine = engine
        self._context = EngineContext(versions, gate_of(opened.compiled), str(_population_record(opened)["unknown"]))
        #: The answers so far; prices may depend on them.
        self.outputs: list[Any] = []
        # Mechanisms that answered without records, by their identity and the types that they were called with.
        self._probed: dict[Hashable, Callable[..., Any]] = {}

    @classmethod
    @with_usage("it is made like Population.create('telemetry', policy, ledger=ledger, location='people', ids=1000)")
    def create(  # noqa: PLR0913  the choices that are made once
        cls,
        name: str,
        policy: Policy | Compiled,
        *,
        ledger: Ledger,
        location: str | os.PathLike[str],
        ids: Any = 0,  # noqa: ANN401  a count, an array, what the engine reads
        engine: str = "numpy",
        unknown: str = "leave-out",
        session: Any = None,  # noqa: ANN401  of Spark
        memory_limit: str | None = None,  # of DuckDB
        renew: Schedule | None = None,
        key: str | None = None,
        note: str = "",
    ) -> Population:
        """Make a population of people who have spent nothing.

        `unknown` decides what happens to people in a charge who are not in it: `join` adds them, `leave-out` skips
        them. With a schedule, `renew=scheduled("monthly", "2026-11-01", times=12)`, it is the population of the
        current epoch, such as visits@2026-11-01, and `renew()` opens the next one.
        """
        if unknown not in UNKNOWN:
            raise InvalidArgument(f"unknown must be 'join' or 'leave-out' (got {unknown!r})")
        backend = _local_backend(ledger)
        compiled = compile_policy(policy) if isinstance(policy, Policy) else policy
        gate = gate_of(compiled)
        head = Head(check_name(name), "", "", "", compiled.policy.privacy_unit, compiled.policy.neighbors)
        renewal = None if renew is None else Renewal(name, renew)
        step = None if renewal is None else _first_step(backend, renewal)
        name = name if step is None else step.opens
        versions = open_versions(location)
        _check_reach(engine, versions)
        chosen = make_engine(engine, session, memory_limit)
        versions.create()
        folder = versions.begin(0)
        about = {"engine": engine, "location": versions.address, "state": folder.name, "unknown": unknown}
        try:
            chosen.create(EngineContext(versions, gate, unknown), folder, ids)
            versions.finish(folder)
        except BaseException:
            versions.undo(folder)
            raise
        try:
            if renewal is None or step is None:
                backend.open(head, compiled, key, note, about)
            else:
                backend.open_epoch(renewal, step, compiled, about, key=key, note=note)
        except OutcomeUnknown:
            raise  # the ledger may point to it
        except OdographError:
            versions.undo(folder)
            raise
        if _population_record(backend.opened(name))["state"] != folder.name:
            versions.undo(folder)
            raise IdempotencyConflict(
                f"key {key!r} has made {name!r} before; open it with Population.open({name!r}, ledger=...)"
            )
        return cls(backend, name, chosen, versions)

    @classmethod
    @with_usage("it is opened like Population.open('telemetry', ledger=ledger)")
    def open(
        cls,
        name: str,
        *,
        ledger: Ledger,
        location: str | os.PathLike[str] | None = None,
        session: Any = None,  # noqa: ANN401  of Spark
        memory_limit: str | None = None,  # of DuckDB
    ) -> Population:
        """Open an existing population; pass its location if its files were moved."""
        backend = _local_backend(ledger)
        try:
            about = _population_record(backend.opened(name))
        except AccountNotFound as problem:
            raise name_error(problem, [name], backend.balances()) from None
        versions = open_versions(str(about["location"]) if location is None else location)
        _check_reach(str(about["engine"]), versions)
        found = cls(backend, name, make_engine(str(about["engine"]), session, memory_limit), versions)
        if location is not None:
            with suppress(AccountClosed):  # it takes no new rounds, and still answers old keys
                found._current_folder()
        versions.restrict()
        return found

    @classmethod
    def current(
        cls,
        name: str,
        *,
        ledger: Ledger,
        location: str | os.PathLike[str] | None = None,
        session: Any = None,  # noqa: ANN401  of Spark
        memory_limit: str | None = None,  # of DuckDB
    ) -> Population:
        """Open the newest population of a schedule: `current("visits", ...)` may be visits@2026-11-01.

        It raises `AccountClosed` if that one is closed. `renew()` opens the one of the next epoch.
        """
        closed = {one: balance.closed for one, balance in _local_backend(ledger).balances().items()}
        newest = current_account(name, closed)
        return cls.open(newest, ledger=ledger, location=location, session=session, memory_limit=memory_limit)

    @property
    def policy(self) -> Policy:
        """The promise to each person; of a population that renews, in one epoch."""
        return self._opened.compiled.policy

    @property
    def lifetime(self) -> Lifetime | None:
        """What the epochs of its schedule promise together to each person; None if it does not renew."""
        return self._backend.lifetime(self.name)

    @property
    def ordered(self) -> bool:
        """Whether people have an order, in which prices and records can be passed without ids."""
        return self._engine.ordered

    def charge(
        self, prices: Prices | Guarantee, *, key: str, note: str = "", progress: Progress | None = None
    ) -> Participants:
        """Charge each person whose filter admits it, durably, and return the participants. A key charges once."""
        return self._charge(prices, key, note, progress)

    def _charge(  # noqa: PLR0913, PLR0917  the parts of a charge
        self,
        prices: Prices | Guarantee,
        key: str,
        note: str,
        progress: Progress | None = None,
        use: ExitStack | None = None,
        question: str = "",
    ) -> Participants:
        """Charge; with `use`, the new version is also kept until that stack is closed.

        `question` is what the charge pays for, if that is asked here: its key is then none of another charge.
        """
        asked = price_table(self._opened.compiled, self._context.gate, prices)
        cost = "" if isinstance(prices, Prices) else text_of(prices.to_dict())

        def work(before: Path, after: Path) -> None:
            if use is not None:
                use.enter_context(pin(after))
            self._engine.charge(self._context, before, after, asked, progress)

        return self._update("charge", cost, asked, work, self._backend.author(key, note), question=question)

    def join(self, ids: Any, *, key: str, note: str = "") -> RoundReceipt:  # noqa: ANN401  as in `create`
        """Add people who have spent nothing; people who were removed before join as spent."""

        def work(before: Path, after: Path) -> None:
            self._engine.join(self._context, before, after, ids)

        return self._update("join", "", ids, work, self._backend.author(key, note)).receipt

    def remove(self, ids: Any, *, key: str, note: str = "") -> RoundReceipt:  # noqa: ANN401  as in `create`
        """Remove people and forget what they spent; a mark of each remains, so that they can only join as spent."""

        def work(before: Path, after: Path) -> None:
            self._engine.remove(self._context, before, after, ids)

        return self._update("remove", "", ids, work, self._backend.author(key, note)).receipt

    def renew(self, *, note: str = "") -> Population:
        """Return the population of the current epoch; if it has none yet, open it and close this one.

        The people are the same, those who were removed excepted, and have spent nothing in the new epoch. Renewing
        depends on the store's clock and on nothing else; repeating it changes nothing.

        Theorem: basic composition: filters with promises (e_i, d_i) together promise (sum e_i, sum d_i), and each
            epoch has an individual filter for each person.
        Assumes: schedule and policy were fixed before the first answer, no epoch has two populations, and when one is
            opened does not depend on the data.
        """
        renewal = self._require_renewal()
        for _ in range(_MAX_ATTEMPTS):
            with self._context.versions.lease():
                step = self._backend.next_step(renewal)
                self._backend.require_same(renewal, self.policy, "", step.previous)
                if step.opens and not self._try_renew(renewal, step, note):
                    continue
            for name in step.closes:
                self._backend.close(name, "its epoch is over")
            found = step.opens or step.previous
            return self if found == self.name else self._of_epoch(found)
        raise LedgerBusy(f"{renewal.account!r} could not be renewed: other processes updated it first; renew again")

    def retire(self, epoch: str, *, key: str, note: str = "") -> RoundReceipt:
        """Forget what people spent, and who took part, in an epoch that is over: no file here has it afterwards.

        It is a round of this population that charges no one, and its entry names the epoch, such as 2026-11-01.
        Everything of the epochs before that one is forgotten, too. The marks of removed people stay.

        Theorem: linked accounts, a retired epoch: what a filter promised is about the rounds that it admitted; if it
            admits no more of them, no answer depends on its totals, and they can be forgotten.
        Assumes: the epoch's population is closed, so that it takes no rounds, as no other of its name ever does, and
            this is its only copy.
        """
        renewal = self._require_renewal()
        name = f"{renewal.account}@{epoch}"
        balances = self._backend.balances([name])
        if date_in(epoch) is None or name not in balances or self._backend.opened(name).population is None:
            raise InvalidArgument(f"epoch must be the first day of one that has a population (got {shown(epoch)})")
        if not balances[name].closed or name >= self.name:
            raise InvalidArgument(
                f"epoch must be over and closed before {self.name!r}, by `renew` (got {epoch}): people would have"
                " their whole budget again"
            )

        def work(before: Path, after: Path) -> None:
            self._engine.join(self._context, before, after, [])

        made = self._update("retire", "", [], work, self._backend.author(key, note), epoch).receipt
        versions, first = self._context.versions, read_pointer(self._backend.entry(self.name, 0)).version
        versions.clean(first - 1, ())
        if any(version < first for version in versions.kept()):
            raise LedgerBusy(f"a round of {name!r} still uses its files, so they were kept; retire it again later")
        return made

    def run(  # noqa: PLR0913  a round, and what it is made of
        self,
        mechanism: Callable[..., T],
        records: Any,  # noqa: ANN401  one for each person, in the order of the ids, or a table with an id
        prices: Guarantee | Pricing | VectorizedPrice | Prices,
        *,
        key: str,
        note: str = "",
        constants: Mapping[str, Any] | None = None,
    ) -> T:
        """Charge, then run the mechanism on the records of the participants; its answer is added to `outputs`.

        `prices` is a guarantee for everyone, or a function of one record and the past outputs (many records at once
        with `vectorized_price`). The mechanism is called with the records of the participants, and with the constants
        by name. It is first called without any records, once for every type of records and constants, and must
        answer. A pandas Series is passed on as an array. A key that was used before is refused: its round ran, or may
        have, and another run would be another answer.
        """
        known = {**(constants or {})}
        records = self._engine.accept(records)
        types = frozenset((name, type(value)) for name, value in known.items())
        trial = (id(mechanism), self._engine.form(records), types)
        if trial not in self._probed:
            mechanism(self._engine.empty(records), **known)
            self._probed[trial] = mechanism
        self.check(records)
        if not isinstance(prices, (Prices, Guarantee)) and not self._engine.ordered:
            raise InvalidGuarantee(
                "prices can be a function only where people have an order, as with the engine 'numpy'; pass Prices"
                " with a table"
            )
        asked = prices if isinstance(prices, Prices) else prices_for(prices, records, tuple(self.outputs))
        with ExitStack() as use:
            active = self._charge(asked, key, note, use=use)
            if active.receipt.repeated:
                raise _key_used_error(key, active)
            try:
                answer = mechanism(self._engine.records(self._context, active.folder, records), **known)
            except BaseException as problem:
                problem.add_note(
                    f"Round {active.receipt.version} of {self.name!r} stays charged under key {key!r}: the mechanism"
                    " may have drawn its answer. Another run needs another key, and is charged."
                )
                raise
        self.outputs.append(answer)
        return answer

    def check(self, records: Any) -> None:  # noqa: ANN401  as in `run`
        """Raise `InvalidArgument` unless these can be its people's records: one for each, if people are ordered."""
        self._engine.check(self._context, self._current_folder(), records)

    def noisy_active_count(self, probe: Guarantee, cost: PureDP, *, key: str, note: str = "") -> int:
        """Return a noisy count of the people who could take part in a round of `probe`; it is a round of its own.

        Each person whose filter admits it is charged `cost`, and counted if they would admit `probe` after that.

        Theorem: Dwork et al. (2006a): a count that one person changes by at most one, with Laplace noise of scale
            1/epsilon, is epsilon-DP.
        Assumes: a person's totals depend on their own record and past outputs alone.
        """
        amounts = self._context.gate.amounts(self._opened.compiled.price(probe))
        if not isinstance(cost, PureDP) or not cost.epsilon:
            raise InvalidGuarantee(f"cost must be PureDP with a positive epsilon (got {cost!r})")
        epsilon = float(cost.epsilon)
        noisy([0], 1, epsilon)  # raises for a cost that OpenDP cannot honor, before anyone is charged
        with ExitStack() as use:
            active = self._charge(cost, key, note, use=use, question=f"count {text_of(probe.to_dict())}")
            if active.receipt.repeated:
                raise _key_used_error(key, active)
            (answer,) = noisy([self._engine.count(self._context, active.folder, amounts)], 1, epsilon)
        self.outputs.append(answer)
        return answer

    def history(self, first: int = 0, count: int = 1000) -> History:
        """Return a page of its ledger entries: rounds and their keys, nothing about any person."""
        return History(self._backend.history(self.name, first, count))

    def rounds(self, first: int = 0, count: int = 1000) -> tuple[Round, ...]:
        """Return a page of its rounds, for an auditor: acts and keys, nothing about any person."""
        return tuple(read_rounds(self._backend, self.name, first, count))

    def participants(self, key: str) -> Participants:
        """Return who took part in a round that this principal charged under a key, if they are still kept."""
        author = self._backend.author(key)
        record = self._backend.find_key(author.principal, author.key)
        if record is not None and record.account == self.name and record.verb == "step":
            entry = self._backend.entry(self.name, record.sequence)
            if entry.details["act"] == "charge":
                return self._participants(entry, again=True)
        raise EntryNotFound(f"{self._backend.principal!r} charged no round of {self.name!r} under the key {key!r}")

    def close(self, *, note: str = "") -> None:
        """Close the population permanently: it takes no new rounds."""
        self._backend.close(self.name, note)

    def _update(  # noqa: PLR0913, PLR0917  the parts of an update
        self,
        act: str,
        cost: str,
        asked: Any,  # noqa: ANN401  prices, or ids
        work: _WriteVersion,
        author: Author,
        retired: str = "",
        question: str = "",
    ) -> Participants:
        parts = [act, self._engine.digest(self._context, asked), *filter(None, [question])]
        if self._opened.renewal is not None:  # the epochs of a schedule share a secret, and a round is of one of them
            parts += [self.name, retired]
        request = self._context.versions.digest(*map(str.encode, parts))
        made = self._find_update(author, request)
        if made is not None:
            return made
        for _ in range(_MAX_ATTEMPTS):
            with self._context.versions.lease() as waited:
                # Another process may have asked with the same key meanwhile.
                made = self._find_update(author, request) if waited else None
                made = made or self._try_update(self._last_entry(), act, cost, request, work, author, retired)
            if made is not None:
                return made
        raise LedgerBusy(
            f"other processes updated the population first {_MAX_ATTEMPTS} times in a row; nothing was charged. Try"
            " again"
        )

    def _find_update(self, author: Author, request: str) -> Participants | None:
        """Return the result of the update that was made under a key, if there is one."""
        record = self._backend.find_key(author.principal, author.key)
        return None if record is None else self._repeat(check_repeated(record, author, request).record.sequence)

    def _try_update(  # noqa: PLR0913, PLR0917  the parts of an update
        self,
        last: Entry,
        act: str,
        cost: str,
        request: str,
        work: _WriteVersion,
        author: Author,
        retired: str,
    ) -> Participants | None:
        """Write the next version and make it current; None if another process was first."""
        versions, before = self._context.versions, read_pointer(last)
        folder = self._write_version(before, work, lambda: self._last_entry() != last)
        if folder is None:
            return None
        step = MovePopulation(
            author,
            self.name,
            self._opened.origin,
            last.sequence,
            request,
            cost,
            act,
            Pointer(before.version + 1, folder.name),
            retired,
        )
        try:
            outcome = self._backend.engine.submit(step)
        except OutcomeUnknown:
            raise  # the ledger may point to it
        except OdographError:
            versions.discard(folder)
            if self._last_entry() != last:
                return None
            raise
        if isinstance(outcome, Repeated):  # by another process, a moment ago
            versions.discard(folder)
            return self._repeat(outcome.record.sequence)
        versions.clean(before.version + 1, {before.state, folder.name})
        return self._participants(self._backend.entry(self.name, last.sequence + 1), again=False)

    def _write_version(self, before: Pointer, work: _WriteVersion, has_moved: Callable[[], bool]) -> Path | None:
        """Write the version after another and return its folder; None if another process was first."""
        versions = self._context.versions
        folder = versions.begin(before.version + 1)
        try:
            work(self._folder(before), folder)
            versions.finish(folder)
        except BaseException as problem:
            versions.discard(folder)
            # Another process may have written the next version, and removed the one that this began from.
            if isinstance(problem, OSError | LedgerError) and has_moved():
                return None
            if isinstance(problem, OSError) and not isinstance(problem, OdographError):
                raise LedgerError(
                    f"the next version of {self.name!r} could not be written in {versions.address}:"
                    f" {problem.strerror}; nothing was charged"
                ) from problem
            raise
        return folder

    def _try_renew(self, renewal: Renewal, step: RenewalStep, note: str) -> bool:
        """Open the population of an epoch with the people of the previous one; False if another process was first."""
        versions, name = self._context.versions, step.previous

        def sequence() -> int:
            return self._backend.balances([name])[name].sequence

        read = sequence()
        last = self._backend.entry(name, read)
        before = read_pointer(self._backend.entry(name, read - 1) if last.verb == "close" else last)
        folder = self._write_version(before, partial(self._engine.renew, self._context), lambda: sequence() != read)
        if folder is None:
            return False
        form = {"state": folder.name, "version": before.version + 1, "location": versions.address}
        about = {**_population_record(self._opened), **form}
        try:
            repeated = self._backend.open_epoch(renewal, step, self._opened.compiled, about, note=note, read=read)
        except OutcomeUnknown:
            raise  # the ledger may point to it
        except OdographError as problem:
            versions.discard(folder)
            if isinstance(problem, AccountExists | LedgerBusy):
                return False
            raise
        if repeated:  # by another process, a moment ago
            versions.discard(folder)
        else:
            versions.clean(before.version + 1, {before.state, folder.name})
        return True

    def _require_renewal(self) -> Renewal:
        if self._opened.renewal is None:
            raise InvalidArgument(
                f"{self.name!r} does not renew: a schedule is passed when a population is created, as renew="
            )
        return self._opened.renewal

    def _of_epoch(self, name: str) -> Population:
        """Return the population of another epoch of the same schedule, whose files are in the same place."""
        found = Population(self._backend, name, self._engine, self._context.versions)
        found._probed = self._probed
        found.outputs = self.outputs  # prices may depend on them in every epoch
        return found

    def _last_entry(self) -> Entry:
        """Return the entry that points to the current version."""
        balance = self._backend.balances([self.name])[self.name]
        if balance.closed:
            raise AccountClosed(f"{self.name!r} is closed and takes no new rounds")
        return self._backend.entry(self.name, balance.sequence)

    def _current_folder(self) -> Path:
        """Return the folder of the current version; raises what `_folder` raises."""
        last = self._last_entry()
        try:
            return self._folder(read_pointer(last))
        except LedgerError:
            # Another process may have written the next version, and removed this one.
            if self._last_entry() == last:
                raise
        return self._current_folder()

    def _folder(self, pointer: Pointer) -> Path:
        """Return the folder of a version, or raise if it does not exist."""
        versions = self._context.versions
        folder = versions.folder(pointer.state)
        if not folder.is_dir():
            raise LedgerError(
                f"there is no version {pointer.version} of {self.name!r} in {versions.address}: pass the location"
                " where it was created, or where its files were moved to"
            )
        return folder

    def _repeat(self, sequence: int) -> Participants:
        return self._participants(self._backend.entry(self.name, sequence), again=True)

    def _participants(self, entry: Entry, *, again: bool) -> Participants:
        pointer = read_pointer(entry)
        receipt = RoundReceipt(self.name, pointer.version, entry.key, again, entry)
        return Participants(receipt, self._engine, self._context, self._context.versions.folder(pointer.state))

    def __repr__(self) -> str:
        renewal = self._opened.renewal
        more = "" if renewal is None else f"; by its schedule {renewal.schedule.promise_text(self.policy)}"
        return f"Population({self.name!r}, {self.policy.promise}{more})"

    def _repr_html_(self) -> str:
        balance, about = self._backend.balances([self.name])[self.name], _population_record(self._opened)
        named = {
            "promise to each": self.policy.promise,
            "entries": f"{balance.sequence + 1:,}",
            "engine": about["engine"],
            "people who are not in it": about["unknown"],
        }
        if self.lifetime is not None:
            named["lifetime promise"] = self.lifetime
        return card(self.name, facts(named), label=badge("closed") if balance.closed else badge("population"))


def read_rounds(backend: Backend, name: str, first: int, count: int) -> Iterator[Round]:
    """Yield a page of the rounds of a population from the ledger alone: its files are not read.

    A negative `first` counts from the end.
    """
    check_page(first, count)
    if first < 0:
        first = max(0, backend.balances([name])[name].sequence + 1 + first)
    first_version = int(_population_record(backend.opened(name)).get("version", 0))
    for past in backend.history(name, first, count):
        entry = past.entry
        closes, opens = entry.verb == "close", entry.verb == "open"
        version = first_version + entry.sequence - 1 if closes else read_pointer(entry).version
        renews = opens and bool(entry.details["successor_of"])
        act = "close" if closes else "renew" if renews else "create" if opens else str(entry.details["act"])
        yield Round(version, past.time, act, entry.guarantee, past.principal, past.key, past.note, past.seal)


def _first_step(backend: LocalBackend, renewal: Renewal) -> RenewalStep:
    """Return what opens the population of the current epoch, as the first of its schedule."""
    backend.store.create()
    step = backend.next_step(renewal)
    if step.previous:
        raise AccountExists(
            f"there is {step.previous!r} already: use Population.current({renewal.account!r}, ledger=...), and"
            " `renew()` for the next epoch"
        )
    if not step.opens:
        raise InvalidArgument(
            f"renew must be a schedule with an epoch now, by the store's clock (got {renewal.schedule})"
        )
    return step


def _key_used_error(key: str, active: Participants) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"key {key!r} was used before, for round {active.receipt.version}, which ran or may have run; nothing was"
        " charged. Another run needs another key, and is charged"
    )


def _check_reach(engine: str, versions: Versions) -> None:
    if engine == "spark" and isinstance(versions, ObjectVersions):
        raise InvalidArgument(
            f"location must be the path of a folder for engine 'spark', which all machines of the session see (got"
            f" {versions.address}); engines 'numpy' and 'duckdb' take an address in an object store"
        )


def _population_record(opened: Opened) -> Mapping[str, Any]:
    if opened.population is None:
        name = opened.head.name
        raise LedgerError(f"{name!r} is an account, not a population: use ledger.account({name!r})")
    return opened.population


def _local_backend(ledger: object) -> LocalBackend:
    if not isinstance(ledger, Ledger):
        # Other addresses are not shown: they may contain a password.
        file = isinstance(ledger, str) and ledger.startswith("sqlite:")
        what = shown(ledger) if file else type_text(ledger)
        raise InvalidArgument(f"ledger must be a Ledger, such as odograph.connect(...) returns (got {what})")
    backend = ledger.backend
    if not isinstance(backend, LocalBackend):
        raise InvalidArgument(
            f"ledger must be reached directly, such as sqlite:///privacy.db, for Population (got {backend.url});"
            " for a service, use ledger.population(name)"
        )
    return backend
