"""How a ledger's objects reach its store: accounts read once, requests priced and submitted, receipts made.

`Ledger`, `LedgerAccount` and `Reservation` are what people hold; behind them is one `Books` per principal.
"""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from odograph.core.compiled import Compiled, price
from odograph.core.decide import Decision, decide
from odograph.core.guarantees import KINDS, Guarantee, exact_of
from odograph.core.paths import Place, with_offer
from odograph.errors import (
    AccountNotFound,
    BudgetExceeded,
    InvalidGuarantee,
    LedgerCorrupt,
    LedgerError,
    OdographError,
    ReservationNotFound,
    ReservationResolved,
    ServiceUnavailable,
)
from odograph.ledger.entries import (
    Entry,
    Leg,
    check_key,
    check_name,
    check_note,
    legs_from_text,
    place_of,
    price_to_text,
    shown,
    text_of,
)
from odograph.ledger.openings import opening_of
from odograph.ledger.receipts import Lifetime, Line, Receipt
from odograph.ledger.requests import Ask, Author, Charge, Made, Refused, Repeated, Request, Resolve, Stop
from odograph.ledger.store import Balance, Changes, Head, Hit, State, Store, Wants
from odograph.ledger.writer import Writer

__all__ = ["Books", "Opened", "user"]

_REMEMBERED: Final = 1024  # priced requests per account


class Opened:
    """What an account was opened with. It never changes, so it is read once."""

    __slots__ = ("_asks", "compiled", "head", "origin", "path")

    def __init__(self, head: Head, compiled: Compiled, origin: str, above: tuple[Opened, ...]) -> None:
        self.head = head
        self.origin = origin
        self.compiled = compiled
        self.path: tuple[Opened, ...] = (*above, self)  # from the account at the top down to this one
        self._asks: dict[int, Ask] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names on the path."""
        return tuple(one.head.name for one in self.path)

    def ask(self, cost: Guarantee) -> Ask:
        """Price a guarantee on the whole path; remembered for the same object, as pricing is most of the work."""
        known = self._asks.get(id(cost))
        if known is not None and known.cost is cost:
            return known
        if not isinstance(cost, KINDS):
            raise InvalidGuarantee(f"{cost!r} is not a guarantee; pass one such as PureDP(0.1). Nothing was charged")
        stops = []
        for one in self.path:
            asked = price(one.compiled, cost)
            stops.append(Stop(one.head.name, one.compiled, asked, price_to_text(asked), one.origin))
        made = Ask((self.head.name, text_of(cost.to_dict())), cost, tuple(stops))
        if len(self._asks) >= _REMEMBERED:
            self._asks.clear()
        self._asks[id(cost)] = made  # holding the object keeps its identity from being used again
        return made

    def places(self, balances: Mapping[str, Balance]) -> list[Place]:
        """Return the path with what was read of it, if it is still the path that was opened."""
        for one in self.path:
            balance = balances.get(one.head.name)
            if balance is None or balance.origin != one.origin:
                raise LedgerError(f"{one.head.name!r} is no longer the account that was opened; connect again")
        return [Place(one.head.name, one.compiled, balances[one.head.name].totals) for one in self.path]


class Books:
    """The way of one principal into a store."""

    def __init__(self, store: Store, writer: Writer, principal: str) -> None:
        self.store = store
        self.writer = writer
        self.principal = check_key(principal, "principal")
        self._identity = ""
        self._known: dict[str, Opened] = {}

    def opened(self, name: str) -> Opened:
        """Return what an account was opened with, or raise `AccountNotFound`."""
        known = self._known.get(name)
        if known is None:
            check_name(name)
            found = self.store.entries(name, 0, 1)
            if not found:
                raise AccountNotFound(f"there is no account {name!r} in {self.store.url}; nothing was charged")
            head, compiled = opening_of(found[0])
            above = self.opened(head.parent).path if head.parent else ()
            known = self._known[name] = Opened(head, compiled, found[0].seal, above)
        return known

    def author(self, key: str | None = None, note: str = "") -> Author:
        """Say who writes; a request without a key gets a random one, so that a lost answer can be asked for again."""
        key = secrets.token_hex(16) if key is None else check_key(key)
        identity = self._identity or self.identity()
        return Author(identity, key) if note == "" else Author(identity, key, check_note(note), secrets.token_hex(16))

    def identity(self) -> str:
        """Return the random identity that entries carry for this principal."""
        if not self._identity:
            self._identity = self.store.principal(self.principal)
        return self._identity

    def forget(self) -> None:
        """Look the identity up again: the name was erased."""
        self._identity = ""

    def charge(self, verb: str, asks: tuple[Ask, ...], author: Author, expires: int | None = None) -> Receipt:
        """Charge all or nothing and return the receipt, or raise `BudgetExceeded` with what would fit."""
        outcome = self.submit(Charge(author, verb, asks, expires))
        if isinstance(outcome, Refused):
            raise BudgetExceeded(self.offer(asks, outcome))
        if verb == "reserve" and isinstance(outcome, Repeated):
            self._refuse_voided(author.key, f"{outcome.hit.account}#{outcome.hit.sequence}")
        return self.receipt(outcome, asks)

    def _refuse_voided(self, key: str, reservation: str) -> None:
        """Raise if the reservation that a key was used for was voided: it pays for nothing any more."""
        found: dict[tuple[str, str], Hit] = {}

        def look(state: State) -> Changes:
            found.update(state.keys)
            return Changes()

        self.store.write(Wants(keys=frozenset([("", reservation)])), look)
        if any(hit.verb == "void" for hit in found.values()):
            raise ReservationResolved(
                f"key {key!r} was used for reservation {reservation}, which was voided, so nothing is charged for it;"
                " a run needs another key"
            )

    def resolve(self, verb: str, reservation: str, note: str) -> Receipt:
        """Commit or void a reservation."""
        if verb == "void" and (not isinstance(note, str) or not note.strip()):
            raise InvalidGuarantee(
                "void needs a reason: it says that the mechanism was not run, and somebody will ask; nothing changed"
            )
        reserved, legs = self.reserved(reservation)
        author = self.author(reservation, note)
        outcome = self.submit(Resolve(author, verb, reserved, legs))
        if isinstance(outcome, Refused):  # pragma: no cover  a resolution asks for nothing
            raise LedgerCorrupt("a resolution was refused")
        return self.receipt(outcome)

    def submit(self, request: Request) -> Made | Repeated | Refused:
        """Carry a request out durably."""
        try:
            outcome = self.writer.submit(request)
        except ServiceUnavailable as error:
            raise ServiceUnavailable(f"{error} (key {request.author.key!r})") from error
        if isinstance(outcome, ServiceUnavailable):
            raise ServiceUnavailable(f"{outcome} (key {request.author.key!r})") from outcome
        if isinstance(outcome, OdographError):
            raise outcome
        return outcome

    def asks(self, costs: Mapping[str, Guarantee]) -> tuple[Ask, ...]:
        """Price what is asked of each account."""
        if not isinstance(costs, Mapping) or not costs:
            raise InvalidGuarantee(
                f"costs must name at least one account, as in {{'jan': PureDP(0.1)}}, and {costs!r} does not"
            )
        for name in costs:
            if name not in self._known:
                check_name(name, "account")
        # In the order of the names, so that the same request is the same however it was written.
        return tuple([self.opened(name).ask(costs[name]) for name in sorted(costs)])

    def offer(self, asks: tuple[Ask, ...], refused: Refused) -> Decision:
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
        path = [Place(stop.name, stop.compiled, totals[stop.name]) for stop in asks[refused.leg].stops]
        return with_offer(path, decision, decision.account)

    def receipt(self, outcome: Made | Repeated, asks: Sequence[Ask] = ()) -> Receipt:
        """Make a receipt: the same one from the entries just written and from those of the first time.

        `asks` are what was asked for, if that is known and need not be read from the entries.
        """
        again = isinstance(outcome, Repeated)
        if isinstance(outcome, Made):
            own, linked = outcome
        else:
            legs = legs_from_text(self.entry(outcome.hit.account, outcome.hit.sequence).legs)
            own = tuple([self.entry(*leg.own) for leg in legs])
            balances = self.store.balances([entry.account for entry in own])
            linked = tuple(name for name, balance in balances.items() if balance.linked)
        lines: list[Line] = []
        for i, entry in enumerate(own):
            cost = asks[i].cost if asks else _guarantee_of(entry)
            lines.append(Line(entry.account, entry.sequence, cost, entry.seal))
        first = own[0]
        lifetimes = self._lifetimes(linked) if linked else ()
        return Receipt(first.verb, first.key, first.time, tuple(lines), first.expires, lifetimes, again)

    def entry(self, account: str, sequence: int) -> Entry:
        """Read one entry that must be there."""
        found = self.store.entries(account, sequence, 1)
        if not found or found[0].sequence != sequence:
            raise LedgerCorrupt(f"entry {account}#{sequence} is missing")
        return found[0]

    def reserved(self, reservation: str) -> tuple[tuple[Entry, ...], tuple[Leg, ...]]:
        """Read every entry of a reservation, in the order in which they were written, and its legs."""
        name, sequence = place_of(reservation)
        found = self.store.entries(name, sequence, 1)
        if not found or found[0].verb != "reserve" or found[0].called != reservation:
            raise ReservationNotFound(f"there is no reservation {shown(reservation)} in {self.store.url}")
        legs = legs_from_text(found[0].legs)
        places = [place for leg in legs for place in reversed(leg.places)]
        return tuple(self.entry(*place) for place in places), legs

    def lifetime(self, name: str) -> Lifetime | None:
        """Return what an account and those linked to it, before and after, promise together; None if it is alone."""
        heads = [balance.head for balance in self.store.balances().values()]
        names = [name]
        for one in names:
            pairs = [(head.name, head.successor_of) for head in heads if one in (head.name, head.successor_of)]
            names += [other for pair in pairs for other in pair if other and other not in names]
        return self.together(sorted(names)) if len(names) > 1 else None

    def _lifetimes(self, names: Iterable[str]) -> tuple[Lifetime, ...]:
        found = [self.lifetime(name) for name in names]
        return tuple(dict.fromkeys(lifetime for lifetime in found if lifetime is not None))

    def together(self, names: list[str]) -> Lifetime:
        """Return the sum of some accounts' promises.

        Theorem: basic composition: filters with promises (e_i, d_i) together promise (sum e_i, sum d_i).
        Assumes: the accounts' policies, and how many there are, were not chosen by looking at the answers; if they
            were, the sum is a running total and not a promise made beforehand.
        """
        policies = [self.opened(name).compiled.policy for name in names]
        epsilon = sum(exact_of(policy.epsilon) for policy in policies)
        delta = sum(exact_of(policy.delta) for policy in policies)
        return Lifetime(tuple(names), exact_of(epsilon), exact_of(delta))


def _guarantee_of(entry: Entry) -> Guarantee:
    guarantee = entry.guarantee
    if guarantee is None:
        raise LedgerCorrupt(f"entry {entry.place} charges for nothing")
    return guarantee


def user() -> str:
    """Return the name of the operating system's user, for a ledger that was not told who writes."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return f"uid-{os.getuid()}"
