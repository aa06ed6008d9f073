"""A ledger behind a service, with its verbs to be awaited: `odograph.aconnect("https://...", token=...)`.

What is sent, how it is retried and how answers are read is in `backend.py` and `transport.py`, once for both clients.
Here the steps of each verb are carried out in an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

import httpx

from odograph.account import USAGES, check_page, microseconds, warn_of_large_delta
from odograph.client.backend import Operations
from odograph.client.transport import CONNECTIONS, Attempt, Caller, Pause, Pool, Steps
from odograph.compile import Certification, certification
from odograph.core.fixed_point import Numeric
from odograph.core.gate import Decision, Totals
from odograph.core.guarantees import Guarantee
from odograph.core.odometers import Reading
from odograph.core.planning import Calibration, G, Kind, Quote, calibration_question, used
from odograph.core.policy import Compiled, Policy
from odograph.errors import (
    AccountNotFound,
    EntryNotFound,
    InvalidArgument,
    LedgerError,
    ReservationNotFound,
    with_usages,
)
from odograph.ledger.backend import Opened
from odograph.ledger.entries import check_name
from odograph.ledger.epochs import current_account
from odograph.ledger.ledger import LEDGER_USAGES, balance_in, head_for, name_error, page_of
from odograph.ledger.results import (
    BaseReservation,
    Checkpoint,
    Events,
    History,
    Lifetime,
    Receipt,
    Verification,
)
from odograph.ledger.stores.base import Balance
from odograph.sessions import check_first_use

__all__ = ["AsyncAccount", "AsyncLedger", "AsyncReservation", "AsyncTransport"]

_T = TypeVar("_T")


class _LoopPool(Pool[httpx.AsyncClient]):
    """Connections that belong to one event loop, as those of httpx.AsyncClient do."""

    def __init__(self, url: str) -> None:
        super().__init__(url, httpx.AsyncClient)
        self._loop: asyncio.AbstractEventLoop | None = None
        # httpx queues too, but looks at its whole queue at every request: a thousand tasks would be a third as fast.
        self._free = asyncio.Semaphore(CONNECTIONS)

    @property
    def client(self) -> httpx.AsyncClient:
        """The connections of the event loop that is running."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise InvalidArgument(
                "an async ledger must be used in one event loop (got a second one); call odograph.aconnect again in"
                " this one"
            )
        return super().client

    async def request(self, attempt: Attempt) -> httpx.Response:
        """Send a request when one of the connections is free."""
        client = self.client
        try:
            async with asyncio.timeout(attempt.timeout):
                await self._free.acquire()
        except TimeoutError as problem:
            raise httpx.PoolTimeout("") from problem
        try:
            return await client.request(**attempt._asdict())
        finally:
            self._free.release()


class AsyncTransport:
    """Carries the steps of verbs out in an event loop, for one caller."""

    def __init__(self, caller: Caller, pool: _LoopPool | None = None) -> None:
        self.caller = caller
        self._pool = pool or _LoopPool(caller.url)
        self._shared = pool is not None

    def under(self, caller: Caller) -> AsyncTransport:
        """Return a transport for another caller over the same connections."""
        return AsyncTransport(caller, self._pool)

    async def run(self, steps: Steps[_T]) -> _T:
        """Carry out the steps of a verb and return its result."""
        try:
            step = next(steps)
            while True:
                try:
                    done = await self._carry_out(step)
                except BaseException as problem:  # noqa: BLE001  the steps raise it again, or another
                    step = steps.throw(problem)
                else:
                    step = steps.send(done)
        except StopIteration as end:
            result: _T = end.value
            return result

    async def _carry_out(self, step: Attempt | Pause) -> httpx.Response | None:
        if isinstance(step, Attempt):
            return await self._pool.request(step)
        await asyncio.sleep(step.seconds)
        return None

    async def close(self) -> None:
        """Close the connections, unless another transport shares them; this one cannot be used any more."""
        if self._shared:
            self._pool = _LoopPool(self.caller.url)
        client = self._pool.retire()
        if client is not None:
            await client.aclose()


class AsyncReservation(BaseReservation):
    """A `Reservation` whose `commit` and `void` are awaited."""

    def __init__(self, ledger: AsyncLedger, receipt: Receipt) -> None:
        super().__init__(receipt)
        self._ledger = ledger

    async def commit(self, *, note: str = "") -> Receipt:
        """Confirm the charge: the mechanism was run, or may have been. Works after it expired, and again."""
        return await self._ledger.commit(self.id, note=note)

    async def void(self, reason: str) -> Receipt:
        """Take the charge back: the mechanism was not run. Not after it was committed or has expired."""
        receipt = await self._ledger.void(self.id, reason)
        self.voided = True
        return receipt


@with_usages(USAGES)
class AsyncAccount:
    """One account behind a service, with the members of `Account`; those that ask the service are awaited.

    What never changes is an attribute: `name`, `policy`, `compiled`, `certification`, `dataset`, `parent`. All else
    is a method to be awaited, also what `Account` has as a property: `await account.totals()`. A task that is
    canceled in the middle of a charge may have charged: the same request with the same key tells. Sessions and
    interactive mechanisms run in threads, on an account of `odograph.connect`.
    """

    def __init__(self, ledger: AsyncLedger, opened: Opened) -> None:
        self._ledger = ledger
        self._opened = opened
        self._operations = ledger.operations
        self._run = ledger.transport.run

    @property
    def name(self) -> str:
        """The name, unique in its ledger."""
        return self._opened.head.name

    @property
    def compiled(self) -> Compiled:
        """The policy's meters and limits, as they were compiled when the account was opened."""
        return self._opened.compiled

    @property
    def policy(self) -> Policy:
        """The policy, fixed when the account was opened."""
        return self.compiled.policy

    @property
    def certification(self) -> Certification:
        """How this installation knows that the limits keep the promise, or that it does not."""
        return certification(self.compiled)

    @property
    def dataset(self) -> str:
        """The dataset of which this account is a block; empty if it is not one."""
        return self._opened.head.dataset

    @property
    def parent(self) -> AsyncAccount | None:
        """The account above this one, which is charged with it."""
        path = self._opened.path
        return AsyncAccount(self._ledger, path[-2]) if len(path) > 1 else None

    async def children(self) -> Mapping[str, AsyncAccount]:
        """Return the accounts directly below this one, by name."""
        balances = await self._run(self._operations.balances())
        below = [name for name, balance in balances.items() if balance.head.parent == self.name]
        return MappingProxyType({name: await self._ledger.account(name) for name in below})

    async def totals(self) -> Totals:
        """Return what was spent, in integer units."""
        return (await self._balance()).totals

    async def spent(self) -> float:
        """Return the part of the budget that is spent, from 0 to 1; 0 without a limit."""
        return used(self.compiled, await self.totals())

    async def remaining(self) -> float:
        """Return the part of the budget that is left, from 0 to 1; 1 without a limit."""
        return 1.0 - await self.spent()

    async def closed(self) -> bool:
        """Return whether it takes no new charges."""
        return (await self._balance()).closed

    async def size(self) -> int:
        """Return how many entries were written, the opening included."""
        return (await self._balance()).sequence + 1

    async def lifetime(self) -> Lifetime | None:
        """Return what this account and those linked to it promise together; None if there are none."""
        return await self._run(self._operations.lifetime(self.name))

    async def pending(self) -> tuple[AsyncReservation, ...]:
        """Return the reservations charged here that were neither committed nor voided."""
        receipts = await self._run(self._operations.pending(self.name))
        return tuple(AsyncReservation(self._ledger, receipt) for receipt in receipts)

    async def voids(self) -> int:
        """Return how many reservations charged here were voided."""
        return await self._run(self._operations.voids(self.name))

    async def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """Charge the cost here and to every account above, durably, or raise `BudgetExceeded` and charge none.

        The same key with the same cost returns the first receipt, `repeated`, and charges nothing more: it pays for
        one run. A refusal leaves the key free.
        """
        return await self._ledger.spend({self.name: cost}, key=key, note=note)

    async def reserve(
        self,
        cost: Guarantee,
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> AsyncReservation:
        """Charge now, and commit or void later; once it has expired (`expires` from now) it cannot be voided.

        A key that was used before gives the same reservation, `repeated`, also once it was committed.
        """
        return await self._ledger.reserve({self.name: cost}, key=key, expires=expires, note=note)

    @asynccontextmanager
    async def spending(
        self, cost: Guarantee, *, key: str | None = None, note: str = ""
    ) -> AsyncIterator[AsyncReservation]:
        """Reserve, run the block, commit; what raises inside is committed too, because its noise was drawn.

        So is a block whose task is canceled; if the commit is canceled too, the reservation stays and counts in
        full. The rest is as with `Account.spending`.
        """
        charge = self.reserve if await self._run(self._operations.resolves()) else self._spend_for_block
        reservation = await charge(cost, key=key, note=note)
        check_first_use(reservation, key)
        try:
            yield reservation
        finally:
            if reservation.receipt.verb == "reserve" and not reservation.voided:
                await reservation.commit()

    async def _spend_for_block(self, cost: Guarantee, *, key: str | None, note: str) -> AsyncReservation:
        return AsyncReservation(self._ledger, await self.spend(cost, key=key, note=note))

    async def decide(self, cost: Guarantee) -> Decision:
        """Return whether the cost would be admitted, what is left, and what would fit instead; spend nothing."""
        return await self._ledger.decide({self.name: cost})

    async def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        return await self._run(self._operations.quote(self.name, costs))

    async def largest(self, kind: Kind[G], times: int = 1) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None.

        The kind is a class, a guarantee whose other fields are kept, or a mechanism such as `odograph.gaussian`.
        """
        return await self._run(self._operations.largest(self.name, kind, times))

    async def calibrate(
        self, mechanism: Callable[..., Guarantee], /, *, times: int = 1, **settings: Numeric
    ) -> Calibration | None:
        """Return the least noise with which `times` equal requests of a mechanism are admitted, or None."""
        question = calibration_question(mechanism, times, settings)
        return await self._run(self._operations.calibrate(self.name, question))

    async def how_many(self, cost: Guarantee) -> int:
        """Return how many requests of this cost are admitted in a row, at most 10^12; of a closed account, 0."""
        return await self._run(self._operations.how_many(self.name, cost))

    async def reading(self) -> Reading:
        """Read the policy's odometer: valid at all times at once, and the only one that the guarantee covers."""
        return self.compiled.reading(await self.totals())

    async def compare(self) -> tuple[Reading, ...]:
        """Return the policy's reading, and the finite ones of other odometers, which the guarantee does not cover."""
        return self.compiled.compare(await self.totals())

    async def history(self, first: int = 0, count: int | None = None) -> History:
        """Return entries from a sequence on, at most `count`; a negative `first` counts from the end."""
        check_page(first, count)
        first, count = page_of(await self.size(), first, count)
        return History(await self._run(self._operations.history(self.name, first, count)))

    async def close(self, *, note: str = "") -> None:
        """Take no new charges from now on, here and below; reservations can still be resolved."""
        await self._run(self._operations.close(self.name, note))

    async def describe(self, *, pending: bool = True) -> dict[str, Any]:
        """Return the account in plain types, with what is spent and left, its reading and what fits next."""
        form = await self._run(self._operations.describe(self.name))
        return form if pending else form | {"pending": []}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AsyncAccount):
            return NotImplemented
        mine, theirs = (self._ledger.url, self._opened.origin), (other._ledger.url, other._opened.origin)
        return (self.name, mine) == (other.name, theirs)

    def __hash__(self) -> int:
        return hash((self._ledger.url, self.name))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"an account of a ledger is not sent to another process: there, use odograph.aconnect(...) and"
            f" account({self.name!r})"
        )

    def __repr__(self) -> str:
        return f"<AsyncAccount {self.name!r} of {self._ledger.url}>"

    async def _balance(self) -> Balance:
        balances = await self._run(self._operations.balances([self.name]))
        return balance_in(balances, self._opened, self._ledger.url)


@with_usages(LEDGER_USAGES)
class AsyncLedger:
    """The accounts behind a service, with the verbs of `Ledger` to be awaited; made by `odograph.aconnect`.

    It belongs to the event loop in which it is first used; any number of tasks may use it, at 64 connections. Whole
    copies of a ledger (`export`, `import_`, `backup`, `restore`) are made with `odograph.connect`.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self.transport = transport  # for code that builds on a ledger
        self.operations = Operations(transport.caller)
        self._run = transport.run

    @property
    def url(self) -> str:
        """Where the service is."""
        return self.transport.caller.url

    async def principal(self) -> str:
        """Return the principal of the API key, who writes."""
        return await self._run(self.operations.principal())

    async def acting_as(self, principal: str) -> AsyncLedger:
        """Return the same ledger for another principal, sharing the connections; only an owner may."""
        caller = await self._run(self.operations.acting_as(principal))
        return AsyncLedger(self.transport.under(caller))

    async def open_account(  # noqa: PLR0913  each is one sentence about the account
        self,
        name: str,
        policy: Policy | Compiled,
        *,
        parent: AsyncAccount | str | None = None,
        successor_of: AsyncAccount | str | None = None,
        dataset: str = "",
        key: str | None = None,
        note: str = "",
    ) -> AsyncAccount:
        """Open an account, as `Ledger.open_account` does."""
        above, before = await self._name_of(parent, "parent"), await self._name_of(successor_of, "successor_of")
        head = head_for(name, policy, above, before, dataset)
        warn_of_large_delta(policy, above=2)  # a coroutine runs after its wrapper has returned
        async with self._suggesting((above, before)):
            await self._run(self.operations.open(head, policy, key, note))
        return await self.account(name)

    async def _name_of(self, account: AsyncAccount | str | None, field: str) -> str:
        """Return the name of a relative that was given as an account of this ledger or by its name."""
        if isinstance(account, AsyncAccount):
            if await self.account(account.name) != account:
                raise LedgerError(f"{field} must be an account of {self.url} (got one of another ledger)")
            return account.name
        return "" if account is None or account == "" else check_name(account, field)

    @asynccontextmanager
    async def _suggesting(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Complete an error about an account that is not there by the name that was probably meant."""
        try:
            yield
        except AccountNotFound as problem:
            raise name_error(problem, names, await self._run(self.operations.balances())) from None

    async def account(self, name: str) -> AsyncAccount:
        """Return an account that was opened before."""
        async with self._suggesting([name]):
            return AsyncAccount(self, await self._run(self.operations.opened(name)))

    async def current(self, name: str) -> AsyncAccount:
        """Return the newest account of a budget that renews, as `Ledger.current` does."""
        balances = await self._run(self.operations.balances())
        return await self.account(current_account(name, {one: found.closed for one, found in balances.items()}))

    async def accounts(self) -> tuple[AsyncAccount, ...]:
        """Return all accounts that the key may see, in the order of their names."""
        return tuple([await self.account(name) for name in await self._run(self.operations.balances())])

    async def spend(self, costs: Mapping[str, Guarantee], *, key: str | None = None, note: str = "") -> Receipt:
        """Charge several accounts, all or nothing; refused, it says which ran out and what would fit."""
        async with self._suggesting(costs):
            return await self._run(self.operations.charge("spend", costs, key, note))

    async def reserve(
        self,
        costs: Mapping[str, Guarantee],
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> AsyncReservation:
        """Charge now, and commit or void later; once it has expired (`expires` from now) it cannot be voided."""
        steps = self.operations.charge("reserve", costs, key, note, microseconds(expires))
        async with self._suggesting(costs):
            return AsyncReservation(self, await self._run(steps))

    async def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Return whether several accounts would admit their costs together; spend nothing."""
        async with self._suggesting(costs):
            return await self._run(self.operations.decide(costs))

    async def commit(self, reservation: str, *, note: str = "") -> Receipt:
        """Confirm a reservation: its mechanism was run, or may have been. Works after it expired, and again."""
        return await self._run(self.operations.resolve("commit", reservation, note))

    async def void(self, reservation: str, reason: str) -> Receipt:
        """Take a reservation back: the mechanism was not run. Not after it was committed or has expired."""
        return await self._run(self.operations.resolve("void", reservation, reason))

    async def reservation(self, reservation: str) -> AsyncReservation:
        """Return a reservation by its id, such as `census#17`: to resolve it in another process."""
        return AsyncReservation(self, await self._run(self.operations.reservation(reservation)))

    async def events(self, *, after: str = "", count: int = 1000) -> Events:
        """Return entries of all accounts that follow a cursor, and the next cursor, as `Ledger.events` does."""
        check_page(0, count)
        return await self._run(self.operations.events(after, count))

    async def verify(self, *, checkpoint: Checkpoint | None = None) -> Verification:
        """Replay every entry of every account, or raise `LedgerCorrupt` and name the first bad one."""
        return await self._run(self.operations.verify(checkpoint, None))

    async def checkpoint(self) -> Checkpoint:
        """Return the last seal of every account: kept elsewhere, it lets `verify` detect removals and rewrites."""
        return await self._run(self.operations.checkpoint())

    async def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry, such as `census#17`; its digest stays. Return whether there was one."""
        try:
            return await self._run(self.operations.erase_note(entry))
        except ReservationNotFound as problem:
            raise EntryNotFound(str(problem)) from problem

    async def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; entries keep the random identity. Return whether there was one."""
        return await self._run(self.operations.erase_principal(name))

    async def close(self) -> None:
        """Close the connections; the accounts stay open. Every later call raises `LedgerError`."""
        await self.transport.close()

    def __await__(self) -> Generator[Any, None, Self]:
        """Return the ledger: `await odograph.aconnect(...)` is the same as without `await`."""
        yield from ()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __enter__(self) -> NoReturn:
        raise InvalidArgument("an async ledger is opened with `async with odograph.aconnect(...) as ledger:`")

    def __exit__(self, *_: object) -> None:
        """Never called: `__enter__` raises."""

    def __repr__(self) -> str:
        return f"<AsyncLedger {self.url}>"
