"""Backend: what `Ledger`, `LedgerAccount` and `Reservation` stand on, whether the ledger is here or behind a service.

Behind those three is one `Backend` per principal: `LocalBackend` over a store, or `RemoteBackend` over HTTP. So the
verbs are the same wherever a ledger is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from odograph.compile import Certification, certification
from odograph.core.compiled import Compiled
from odograph.core.gate import Decision, decide
from odograph.core.guarantees import Guarantee
from odograph.core.planning import AccountState, G, Quote, with_offer
from odograph.core.policy import Policy
from odograph.errors import InvalidGuarantee, LedgerError, UnprovenComposition
from odograph.ledger.commands import Ask, Refused, Stop
from odograph.ledger.entries import price_to_text, text_of
from odograph.ledger.lifetimes import Lifetime
from odograph.ledger.results import Checkpoint, HistoryEntry, Receipt, Verification
from odograph.ledger.stores.base import Balance, Head
from odograph.progress import Progress

__all__ = ["Backend", "Opened", "check_costs", "offered"]

_REMEMBERED: Final = 1024  # priced requests per account
_LONG: Final = 16384  # characters of a guarantee that is not remembered: a thousand of those would fill the memory


class Opened:
    """What an account was opened with. It never changes, so it is read once."""

    __slots__ = ("_asks", "_certified", "compiled", "head", "origin", "path", "population")

    def __init__(
        self,
        head: Head,
        compiled: Compiled,
        origin: str,
        above: tuple[Opened, ...],
        population: Mapping[str, Any] | None = None,
    ) -> None:
        self.head = head
        self.origin = origin
        self.compiled = compiled
        self.path: tuple[Opened, ...] = (*above, self)  # from the account at the top down to this one
        self.population = population  # where the filters of its people are, if it is one
        self._asks: dict[int, Ask] = {}
        self._certified: bool | None = None

    @property
    def certified(self) -> bool:
        """Whether this installation knew, when it was first asked, that the limits keep the promise."""
        if self._certified is None:
            self._certified = certification(self.compiled) is not Certification.NONE
        return self._certified

    @property
    def names(self) -> tuple[str, ...]:
        """The names on the path."""
        return tuple(one.head.name for one in self.path)

    def ask(self, cost: Guarantee) -> Ask:
        """Price a guarantee on the whole path; remembered for the same object, as pricing is most of the work."""
        known = self._asks.get(id(cost))
        if known is not None and known.cost is cost:
            return known
        if not isinstance(cost, Guarantee):
            raise InvalidGuarantee(f"{cost!r} is not a guarantee; pass one such as PureDP(0.1). Nothing was charged")
        self.require_own()
        stops = []
        for one in self.path:
            asked = one.compiled.price(cost)
            stops.append(Stop(one.head.name, one.compiled, asked, price_to_text(asked), one.origin))
        text = text_of(cost.to_dict())
        made = Ask((self.head.name, text), cost, tuple(stops), frozenset(self.names))
        if len(text) > _LONG:
            return made
        if len(self._asks) >= _REMEMBERED:
            self._asks.clear()
        self._asks[id(cost)] = made  # holding the object keeps its identity from being used again
        return made

    def require_own(self) -> None:
        """Raise unless the account is charged as a whole: in a population everybody has a filter of their own."""
        if self.population is not None:
            raise UnprovenComposition(
                f"{self.head.name!r} is a population: everybody in it has a filter of their own, and what is left is"
                f" nobody's to see. It is charged by Population.open({self.head.name!r}, ...).charge(...)"
            )

    def stations(self, balances: Mapping[str, Balance]) -> list[AccountState]:
        """Return the path with what was read of it, if it is still the path that was opened."""
        self.require_own()
        for one in self.path:
            balance = balances.get(one.head.name)
            if balance is None or balance.origin != one.origin:
                raise LedgerError(f"{one.head.name!r} is no longer the account that was opened; connect again")
        return [AccountState(one.head.name, one.compiled, balances[one.head.name].totals) for one in self.path]


def check_costs(costs: object) -> None:
    """Raise unless it says what is asked of at least one account."""
    if not isinstance(costs, Mapping) or not costs:
        raise InvalidGuarantee(
            f"costs must name at least one account, as in {{'jan': PureDP(0.1)}}, and {costs!r} does not"
        )


class Backend(Protocol):
    """The way of one principal into a ledger. Names, keys and notes are checked here, before anything is written."""

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        ...

    @property
    def principal(self) -> str:
        """Who writes."""
        ...

    @property
    def resolves(self) -> bool:
        """Whether this principal may commit and void."""
        ...

    def acting_as(self, principal: str) -> Backend:
        """Return the backend of another principal, over the same connection."""
        ...

    def open(self, head: Head, policy: Policy | Compiled, key: str | None, note: str) -> None:
        """Open an account, solving for its policy if need be."""
        ...

    def opened(self, name: str) -> Opened:
        """Return what an account was opened with, or raise `AccountNotFound`."""
        ...

    def close(self, name: str, note: str) -> None:
        """Close an account and everything below it."""
        ...

    def balances(self, names: Iterable[str] | None = None) -> dict[str, Balance]:
        """Read balances at one moment: of the named accounts that there are, or of all."""
        ...

    def charge(
        self,
        verb: str,
        costs: Mapping[str, Guarantee],
        key: str | None,
        note: str,
        expires: int | None = None,
    ) -> Receipt:
        """Spend or reserve, all or nothing; `expires` is in microseconds from now."""
        ...

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void a reservation."""
        ...

    def reservation(self, reservation: str) -> Receipt:
        """Return the receipt of a reservation, or raise `ReservationNotFound`."""
        ...

    def pending(self, name: str) -> Sequence[Receipt]:
        """Return the reservations of an account that nobody has resolved."""
        ...

    def voids(self, name: str) -> int:
        """Count the reservations charged to an account that were voided."""
        ...

    def decide(self, costs: Mapping[str, Guarantee]) -> Decision:
        """Say whether the accounts would admit their costs together; spend nothing."""
        ...

    def quote(self, name: str, costs: Iterable[Guarantee]) -> Quote:
        """Decide several costs in order, all or nothing, spending nothing."""
        ...

    def largest(self, name: str, kind: type[G] | G, times: int) -> G | None:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        ...

    def lifetime(self, name: str) -> Lifetime | None:
        """Return what an account and those linked to it promise together; None if it is alone."""
        ...

    def history(self, name: str, first: int, count: int) -> Sequence[HistoryEntry]:
        """Return a page of entries, from a sequence on."""
        ...

    def verify(self, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Replay everything."""
        ...

    def checkpoint(self) -> Checkpoint:
        """Say where every account stands."""
        ...

    def export(self, file: IO[str], progress: Progress | None) -> Checkpoint:
        """Write the whole ledger as JSON Lines."""
        ...

    def import_(self, file: IO[str], checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read what `export` wrote into this ledger, which must be empty."""
        ...

    def backup(self, path: Path, progress: Progress | None) -> Checkpoint:
        """Copy the whole ledger into a new SQLite file."""
        ...

    def restore(self, path: Path, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Read a backup into this ledger, which must be empty."""
        ...

    def erase_note(self, entry: str) -> bool:
        """Erase the note of an entry; say whether there was one."""
        ...

    def erase_principal(self, name: str) -> bool:
        """Erase a principal's name; say whether there was one."""
        ...

    def leave(self) -> None:
        """Let go of files and connections."""
        ...


def offered(asks: tuple[Ask, ...], refused: Refused) -> Decision:
    """Return a refusal with the largest request that would fit there, if the others stay as they are."""
    decision = refused.decision
    totals = dict(refused.totals)
    for i, ask in enumerate(asks):
        if i == refused.leg:
            continue
        for name, compiled, asked, *_ in ask.stops:
            other = decide(compiled.meters, totals[name], asked)
            if not other.admitted:
                return decision  # no offer for one account makes the whole request fit
            totals[name] = other.totals_after
    path = [AccountState(stop.name, stop.compiled, totals[stop.name]) for stop in asks[refused.leg].stops]
    return with_offer(path, decision, decision.account)
