"""Population: one privacy filter per person. Whoever has spent their budget is left out; nobody else is."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from odograph.budgets import compile_policy
from odograph.core.compiled import Compiled, price
from odograph.core.guarantees import KINDS, Guarantee, PureDP
from odograph.core.policy import Policy
from odograph.errors import (
    AccountClosed,
    IdempotencyConflict,
    InvalidGuarantee,
    InvalidPolicy,
    LedgerBusy,
    LedgerError,
    OdographError,
    ServiceUnavailable,
)
from odograph.integrations.opendp import noisy
from odograph.ledger.books import Opened
from odograph.ledger.entries import Entry, check_name, shown, text_of
from odograph.ledger.ledger import Ledger
from odograph.ledger.local import LocalBooks
from odograph.ledger.receipts import Past
from odograph.ledger.requests import Author, Repeated, repeated
from odograph.ledger.steps import Pointer, Step, pointer_of
from odograph.ledger.store import Head
from odograph.population.engines import UNKNOWN, Engine, Site, engine_named
from odograph.population.kernel import gate_of
from odograph.population.lease import pinned
from odograph.population.prices import Prices, priced
from odograph.population.running import Pricing, RowWise, prices_for
from odograph.population.versions import Versions, parse_location
from odograph.progress import Progress

__all__ = ["Population", "StepReceipt", "TakingPart"]

_RACES: Final = 10  # times that another process may be first

T = TypeVar("T")
# From the version before to the one after.
_Work = Callable[[Path, Path], None]


class StepReceipt(NamedTuple):
    """A step that is on the disk. It says nothing about anybody."""

    population: str
    version: int
    key: str
    repeated: bool
    entry: Entry


class TakingPart:
    """Who takes part in a step: for whoever runs the mechanism, and for nobody else.

    It depends on the data. A repeated key gives the same again while the step is one of the last two, later the
    receipt alone.
    """

    def __init__(self, receipt: StepReceipt, engine: Engine, site: Site, folder: Path) -> None:
        self.receipt = receipt
        self._engine = engine
        self._site = site
        self.folder = folder

    @property
    def ids(self) -> Any:  # noqa: ANN401  what the engine has: an array, a table
        """The ids of those who take part."""
        return self._engine.taking_part(self._site, self._kept())

    @property
    def mask(self) -> Any:  # noqa: ANN401  as above
        """The same as a mask over dense ids."""
        return self._engine.mask(self._site, self._kept())

    def _kept(self) -> Path:
        if not self.folder.is_dir():
            raise LedgerError(
                f"who took part in step {self.receipt.version} of {self.receipt.population!r} is no longer kept: that"
                " is so for the last two steps only"
            )
        return self.folder

    def __repr__(self) -> str:
        return f"TakingPart(step {self.receipt.version} of {self.receipt.population!r})"


class Population:
    """One filter per person, in files; the ledger says which files are current. It never refuses a step.

    `create` makes one, `open` comes back to it. What it promises is promised to each person, by a policy as anywhere.
    """

    def __init__(self, books: LocalBooks, name: str, engine: Engine, versions: Versions) -> None:
        opened = books.opened(name)
        self.name = name
        self._books = books
        self._opened = opened
        self._engine = engine
        self._site = Site(versions, gate_of(opened.compiled), str(_about(opened)["unknown"]))
        #: What was answered so far; prices may depend on it.
        self.outputs: list[Any] = []
        # Mechanisms that answered for nobody, by their identity and the types that they were called with.
        self._tried: dict[Hashable, Callable[..., Any]] = {}

    @classmethod
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
        key: str | None = None,
        note: str = "",
    ) -> Population:
        """Make a population of people who have spent nothing.

        `unknown` says what becomes of people in a charge who are not in it: they `join`, or not (`leave-out`).
        """
        if unknown not in UNKNOWN:
            raise InvalidPolicy(f"unknown must be 'join' or 'leave-out', and {unknown!r} is not")
        books = _local(ledger)
        compiled = compile_policy(policy) if isinstance(policy, Policy) else policy
        gate, chosen = gate_of(compiled), engine_named(engine, session, memory_limit)
        head = Head(check_name(name), "", "", "", compiled.policy.unit, compiled.policy.neighbours)
        versions = Versions(parse_location(location))
        versions.create()
        folder = versions.begin(0)
        about = {"engine": engine, "location": str(versions.location), "state": folder.name, "unknown": unknown}
        try:
            chosen.create(Site(versions, gate, unknown), folder, ids)
            versions.finish(folder)
        except BaseException:
            versions.undo(folder)
            raise
        try:
            books.open(head, compiled, key, note, about)
        except ServiceUnavailable:
            raise  # nobody knows whether the ledger points to it
        except OdographError:
            versions.undo(folder)
            raise
        if _about(books.opened(name))["state"] != folder.name:
            versions.undo(folder)
            raise IdempotencyConflict(
                f"key {key!r} has made {name!r} before; come back to it with Population.open({name!r}, ledger=...)"
            )
        return cls(books, name, chosen, versions)

    @classmethod
    def open(
        cls,
        name: str,
        *,
        ledger: Ledger,
        location: str | os.PathLike[str] | None = None,
        session: Any = None,  # noqa: ANN401  of Spark
        memory_limit: str | None = None,  # of DuckDB
    ) -> Population:
        """Come back to a population; pass its location if its files were moved."""
        books = _local(ledger)
        about = _about(books.opened(name))
        versions = Versions(Path(str(about["location"])) if location is None else parse_location(location))
        found = cls(books, name, engine_named(str(about["engine"]), session, memory_limit), versions)
        if location is not None:
            with suppress(AccountClosed):  # it takes no steps, and still answers old keys
                found._current()
        versions.restrict()
        return found

    @property
    def policy(self) -> Policy:
        """What is promised to each person."""
        return self._opened.compiled.policy

    def charge(
        self, prices: Prices | Guarantee, *, key: str, note: str = "", progress: Progress | None = None
    ) -> TakingPart:
        """Charge everybody whose filter admits it, durably, and say who takes part. The same key charges once."""
        return self._charge(prices, key, note, progress)

    def _charge(
        self,
        prices: Prices | Guarantee,
        key: str,
        note: str,
        progress: Progress | None = None,
        use: ExitStack | None = None,
    ) -> TakingPart:
        """Charge; what is in use is kept until it is no longer, and otherwise as the last two steps are."""
        asked = priced(self._opened.compiled, self._site.gate, prices)
        cost = "" if isinstance(prices, Prices) else text_of(prices.to_dict())

        def work(before: Path, after: Path) -> None:
            if use is not None:
                use.enter_context(pinned(after))
            self._engine.charge(self._site, before, after, asked, progress)

        return self._step("charge", cost, asked, work, self._books.author(key, note))

    def join(self, ids: Any, *, key: str, note: str = "") -> None:  # noqa: ANN401  as in `create`
        """Let people join who have spent nothing; who was removed before joins as spent."""

        def work(before: Path, after: Path) -> None:
            self._engine.join(self._site, before, after, ids)

        self._step("join", "", ids, work, self._books.author(key, note))

    def remove(self, ids: Any, *, key: str, note: str = "") -> None:  # noqa: ANN401  as in `create`
        """Remove people. What they spent is forgotten, that they were here is not: they can only join as spent."""

        def work(before: Path, after: Path) -> None:
            self._engine.remove(self._site, before, after, ids)

        self._step("remove", "", ids, work, self._books.author(key, note))

    def run(  # noqa: PLR0913  a step, and what it is made of
        self,
        mechanism: Callable[..., T],
        records: Any,  # noqa: ANN401  one for each person, in the order of the ids, or a table with an id
        prices: Guarantee | Pricing | RowWise | Prices,
        *,
        key: str,
        note: str = "",
        constants: Mapping[str, Any] | None = None,
    ) -> T:
        """Charge, then run the mechanism on the records of those who take part; its answer is one of `outputs`.

        `prices` is a guarantee for everybody, or a function of one record and the past outputs (`rowwise`: many at
        once). The mechanism is called with the records of those who take part, and with the constants by name; it is
        called with no records first, and must answer: once for every type of records and constants. A pandas Series
        is handed on as an array. A key that was used before is refused: its step ran, or may have, and a second run
        is a second answer.
        """
        known = {**(constants or {})}
        records = self._engine.accept(records)
        types = frozenset((name, type(value)) for name, value in known.items())
        trial = (id(mechanism), self._engine.form(records), types)
        if trial not in self._tried:
            mechanism(self._engine.nobody(records), **known)
            self._tried[trial] = mechanism
        self._engine.check(self._site, self._current(), records)
        if not isinstance(prices, (Prices, *KINDS)) and not self._engine.in_order:
            raise InvalidGuarantee(
                "prices by a function need people in an order, as the numpy engine has them: pass Prices with a table"
            )
        asked = prices if isinstance(prices, Prices) else prices_for(prices, records, tuple(self.outputs))
        with ExitStack() as use:
            step = self._charge(asked, key, note, use=use)
            if step.receipt.repeated:
                raise _used(key, step)
            try:
                answer = mechanism(self._engine.records(self._site, step.folder, records), **known)
            except BaseException as problem:
                problem.add_note(
                    f"Step {step.receipt.version} of {self.name!r} stays charged under key {key!r}: the mechanism may"
                    " have drawn its answer. Another run needs another key, and is charged."
                )
                raise
        self.outputs.append(answer)
        return answer

    def count_able(self, probe: Guarantee, cost: PureDP, *, key: str, note: str = "") -> int:
        """Say about how many people could take part in a step of `probe`: a noisy count, and a step of its own.

        Everybody who admits it is charged `cost`, and counted if they would admit `probe` after that.

        Theorem: a count that one person changes by at most one, with Laplace noise of scale 1/epsilon, is epsilon-DP.
        Assumes: a person's totals depend on their own record and past outputs alone.
        """
        amounts = self._site.gate.amounts(price(self._opened.compiled, probe))
        if not isinstance(cost, PureDP) or not cost.epsilon:
            raise InvalidGuarantee(f"cost must be PureDP of more than 0, and {cost!r} is not; nothing was charged")
        epsilon = float(cost.epsilon)
        noisy([0], 1, epsilon)  # what is wrong with the cost is found before anybody is charged
        with ExitStack() as use:
            step = self._charge(cost, key, note, use=use)
            if step.receipt.repeated:
                raise _used(key, step)
            (answer,) = noisy([self._engine.count(self._site, step.folder, amounts)], 1, epsilon)
        self.outputs.append(answer)
        return answer

    def history(self, first: int = 0, count: int = 1000) -> Sequence[Past]:
        """Return a page of the ledger's entries about it: steps and their keys, and nothing about anybody."""
        return self._books.history(self.name, first, count)

    def close(self, *, note: str = "") -> None:
        """Take no new steps any more, for ever."""
        self._books.close(self.name, note)

    def _step(self, act: str, cost: str, asked: Any, work: _Work, author: Author) -> TakingPart:  # noqa: ANN401
        request = self._site.versions.digest(act.encode(), self._engine.digest(self._site, asked).encode())
        made = self._found(author, request)
        if made is not None:
            return made
        for _ in range(_RACES):
            with self._site.versions.lease() as waited:
                # Another process may have asked with the same key meanwhile.
                made = self._found(author, request) if waited else None
                made = made or self._try(self._last(), act, cost, request, work, author)
            if made is not None:
                return made
        raise LedgerBusy(f"other processes were first {_RACES} times in a row; nothing was charged. Try again")

    def _found(self, author: Author, request: str) -> TakingPart | None:
        """Return the step that was made under a key, if there is one."""
        hit = self._books.found(author.principal, author.key)
        return None if hit is None else self._again(repeated(hit, author, request).hit.sequence)

    def _try(  # noqa: PLR0913, PLR0917  the parts of a step
        self, last: Entry, act: str, cost: str, request: str, work: _Work, author: Author
    ) -> TakingPart | None:
        """Write the next version and point to it; None if another process was first."""
        versions, before = self._site.versions, pointer_of(last)
        folder = versions.begin(before.version + 1)
        try:
            work(self._folder(before), folder)
            versions.finish(folder)
        except BaseException as problem:
            versions.discard(folder)
            # Another process may have moved on, and cleaned up behind itself.
            if isinstance(problem, OSError | LedgerError) and self._last() != last:
                return None
            if isinstance(problem, OSError) and not isinstance(problem, OdographError):
                raise LedgerError(
                    f"the next version of {self.name!r} could not be written in {versions.location}:"
                    f" {problem.strerror}; nothing was charged"
                ) from problem
            raise
        step = Step(
            author,
            self.name,
            self._opened.origin,
            last.sequence,
            request,
            cost,
            act,
            Pointer(before.version + 1, folder.name),
        )
        try:
            outcome = self._books.submit(step)
        except ServiceUnavailable:
            raise  # nobody knows whether the ledger points to it
        except OdographError:
            versions.discard(folder)
            if self._last() != last:
                return None
            raise
        if isinstance(outcome, Repeated):  # by another process, a moment ago
            versions.discard(folder)
            return self._again(outcome.hit.sequence)
        versions.clean(before.version + 1, {before.state, folder.name})
        return self._told(self._books.entry(self.name, last.sequence + 1), again=False)

    def _last(self) -> Entry:
        """Return the entry that points to the current version."""
        balance = self._books.balances([self.name])[self.name]
        if balance.closed:
            raise AccountClosed(f"{self.name!r} is closed and takes no new steps; nothing was charged")
        return self._books.entry(self.name, balance.sequence)

    def _current(self) -> Path:
        """Return the folder of the current version, or raise what `_folder` raises."""
        last = self._last()
        try:
            return self._folder(pointer_of(last))
        except LedgerError:
            # Another process may have moved on, and cleaned up behind itself.
            if self._last() == last:
                raise
        return self._current()

    def _folder(self, pointer: Pointer) -> Path:
        """Return the folder of a version, if it is there."""
        folder = self._site.versions.folder(pointer.state)
        if not folder.is_dir():
            raise LedgerError(
                f"there is no version {pointer.version} of {self.name!r} in {folder.parent}: pass the location that"
                " it was made with, or the one that its files were moved to; nothing was charged"
            )
        return folder

    def _again(self, sequence: int) -> TakingPart:
        return self._told(self._books.entry(self.name, sequence), again=True)

    def _told(self, entry: Entry, *, again: bool) -> TakingPart:
        pointer = pointer_of(entry)
        receipt = StepReceipt(self.name, pointer.version, entry.key, again, entry)
        return TakingPart(receipt, self._engine, self._site, self._site.versions.folder(pointer.state))

    def __repr__(self) -> str:
        return f"Population({self.name!r}, {self.policy.promise})"


def _used(key: str, step: TakingPart) -> IdempotencyConflict:
    return IdempotencyConflict(
        f"key {key!r} was used before, so what it paid for ran, or may have (step {step.receipt.version}); nothing"
        " was charged. Another run needs another key, and is charged"
    )


def _about(opened: Opened) -> Mapping[str, Any]:
    if opened.population is None:
        name = opened.head.name
        raise LedgerError(f"{name!r} is an account, not a population: use ledger.account({name!r})")
    return opened.population


def _local(ledger: object) -> LocalBooks:
    if not isinstance(ledger, Ledger):
        # Another address may have a password in it.
        file = isinstance(ledger, str) and ledger.startswith("sqlite:")
        what = shown(ledger) if file else f"a {type(ledger).__name__}"
        raise InvalidPolicy(f"ledger must be a Ledger, as from odograph.connect(...), and {what} is not")
    books = ledger.books
    if not isinstance(books, LocalBooks):
        raise LedgerError(
            f"a population's ledger must be reached directly, as in sqlite:///privacy.db, and {books.url} is not"
        )
    return books
