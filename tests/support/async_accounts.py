"""The async client as an `Account`: every member runs on an event loop in another thread, and is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

from odograph import Account, Decision, Guarantee, Receipt, Reservation
from odograph.client.asynchronous import AsyncAccount, AsyncReservation
from odograph.core.gate import Totals
from odograph.core.planning import Calibration, G, Kind, Quote
from odograph.core.policy import Compiled
from odograph.ledger.results import BaseReservation, History, Lifetime
from odograph.ledger.stores.base import Balance

_T = TypeVar("_T")


class LoopThread:
    """An event loop in a thread; calling it with a coroutine returns what that returns."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __call__(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class WaitedReservation(Reservation):
    """An `AsyncReservation` that is committed and voided at once."""

    def __init__(self, run: LoopThread, held: AsyncReservation) -> None:
        BaseReservation.__init__(self, held.receipt)
        self._run = run
        self._held = held

    def commit(self, *, note: str = "") -> Receipt:
        """Confirm the charge."""
        return self._run(self._held.commit(note=note))

    def void(self, reason: str) -> Receipt:
        """Take the charge back."""
        receipt = self._run(self._held.void(reason))
        self.voided = self._held.voided
        return receipt

    def __repr__(self) -> str:
        return repr(self._held).replace("Async", "")


class WaitedAccount(Account):
    """An `AsyncAccount` whose members are waited for."""

    def __init__(self, run: LoopThread, account: AsyncAccount) -> None:
        self.run = run
        self.awaited = account

    @property
    def name(self) -> str:
        """As of every account."""
        return self.awaited.name

    @property
    def compiled(self) -> Compiled:
        """As of every account."""
        return self.awaited.compiled

    @property
    def dataset(self) -> str:
        """As of every account."""
        return self.awaited.dataset

    @property
    def parent(self) -> WaitedAccount | None:
        """As of every account."""
        above = self.awaited.parent
        return None if above is None else WaitedAccount(self.run, above)

    @property
    def children(self) -> Mapping[str, WaitedAccount]:
        """As of every account."""
        below = self.run(self.awaited.children())
        return MappingProxyType({name: WaitedAccount(self.run, one) for name, one in below.items()})

    @property
    def totals(self) -> Totals:
        """As of every account."""
        return self.run(self.awaited.totals())

    @property
    def spent(self) -> float:
        """As of every account."""
        return self.run(self.awaited.spent())

    @property
    def remaining(self) -> float:
        """As of every account."""
        return self.run(self.awaited.remaining())

    @property
    def closed(self) -> bool:
        """As of every account."""
        return self.run(self.awaited.closed())

    @property
    def size(self) -> int:
        """As of every account."""
        return self.run(self.awaited.size())

    @property
    def lifetime(self) -> Lifetime | None:
        """As of every account."""
        return self.run(self.awaited.lifetime())

    @property
    def pending(self) -> tuple[Reservation, ...]:
        """As of every account."""
        return tuple(WaitedReservation(self.run, one) for one in self.run(self.awaited.pending()))

    @property
    def voids(self) -> int:
        """As of every account."""
        return self.run(self.awaited.voids())

    def spend(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Receipt:
        """As of every account."""
        return self.run(self.awaited.spend(cost, key=key, note=note))

    def reserve(
        self,
        cost: Guarantee,
        *,
        key: str | None = None,
        expires: timedelta | float | None = None,
        note: str = "",
    ) -> Reservation:
        """As of every account."""
        held = self.run(self.awaited.reserve(cost, key=key, expires=expires, note=note))
        return WaitedReservation(self.run, held)

    def spending(self, cost: Guarantee, *, key: str | None = None, note: str = "") -> Any:  # noqa: ANN401  a block
        """As of every account."""
        return _Block(self.run, self.awaited, cost, key=key, note=note)

    def decide(self, cost: Guarantee) -> Decision:
        """As of every account."""
        return self.run(self.awaited.decide(cost))

    def quote(self, costs: Iterable[Guarantee]) -> Quote:
        """As of every account."""
        return self.run(self.awaited.quote(costs))

    def largest(self, kind: Kind[G], times: int = 1) -> G | None:
        """As of every account."""
        return self.run(self.awaited.largest(kind, times))

    def calibrate(
        self, mechanism: Callable[..., Guarantee], /, *, times: int = 1, **settings: Any
    ) -> Calibration | None:
        """As of every account."""
        return self.run(self.awaited.calibrate(mechanism, times=times, **settings))

    def how_many(self, cost: Guarantee) -> int:
        """As of every account."""
        return self.run(self.awaited.how_many(cost))

    def reading(self) -> Any:  # noqa: ANN401  a reading
        """As of every account."""
        return self.run(self.awaited.reading())

    def compare(self) -> Any:  # noqa: ANN401  readings
        """As of every account."""
        return self.run(self.awaited.compare())

    def describe(self, *, pending: bool = True) -> dict[str, Any]:
        """As of every account."""
        return self.run(self.awaited.describe(pending=pending))

    def history(self, first: int = 0, count: int | None = None) -> History:
        """As of every account."""
        return self.run(self.awaited.history(first, count))

    def close(self, *, note: str = "") -> None:
        """As of every account."""
        self.run(self.awaited.close(note=note))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WaitedAccount) and self.awaited == other.awaited

    def __hash__(self) -> int:
        return hash(self.awaited)

    def __repr__(self) -> str:
        # An async account cannot ask for its totals here; `Account` promises that one without a limit says so.
        return f"{self.awaited!r}, no limit" if self.policy.is_unlimited else repr(self.awaited)

    def _balance(self) -> Balance:
        return self.run(self.awaited._balance())  # noqa: SLF001  for the summary, which an Account makes of it

    def _totals_over_time(self) -> Sequence[Totals]:
        raise NotImplementedError("an async account draws no plots")


class _Block:
    """A block of `AsyncAccount.spending`, entered and left from this thread."""

    def __init__(self, run: LoopThread, account: AsyncAccount, cost: Guarantee, **options: Any) -> None:
        self._run = run
        self._block = account.spending(cost, **options)

    def __enter__(self) -> WaitedReservation:
        return WaitedReservation(self._run, self._run(self._block.__aenter__()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._block.__aexit__(kind, error, trace))
