"""Replay: every entry must follow from the ones before it, and every stored balance from the entries.

No clock is needed and nothing is trusted but the entries. A price is added as it was stored, and priced again only to
see that it was not too low. Totals only grow between two voids, so a run of charges fits if its end fits: the gate is
asked there, and once per entry only to name the first that does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from odograph.compile import Certification, certification
from odograph.core.compiled import Compiled, too_low
from odograph.core.fixed_point import CEILING
from odograph.core.gate import Price, Totals, decide
from odograph.errors import LedgerCorrupt, OdographError, explain
from odograph.ledger.commands import POPULATION_ACTS, read_opening, read_pointer, read_population
from odograph.ledger.entries import (
    AHEAD,
    CHARGES,
    KEYLESS,
    RESOLUTIONS,
    START,
    VERSION,
    Entry,
    digest_of,
    legs_from_text,
    note_digest,
    price_from_text,
)
from odograph.ledger.results import Checkpoint, Verification
from odograph.ledger.stores.base import Balance, Head, Snapshot
from odograph.progress import Progress, paced

__all__ = ["Auditor", "audit"]

_SEQUENCE: Final = re.compile(r"#\d+")
_LATEST: Final = 253_402_300_799_999_999  # the last microsecond of the year 9999
_EVERY: Final = 5000  # entries between two reports of progress, and in the longest run


@dataclass(slots=True)
class _Request:
    """A request that wrote to several accounts: which places are still to be seen, and what all must agree on."""

    places: set[tuple[str, int]]
    common: tuple[str, ...]
    costs: dict[tuple[str, int], str]


@dataclass(slots=True)
class _Same:
    """Charges that are written alike: checked once, and counted since the gate was last asked."""

    price: Price
    count: int = 0


@dataclass(slots=True)
class _Account:
    """One account, as its entries so far tell."""

    head: Head
    compiled: Compiled
    balance: Balance
    known: dict[tuple[str, ...], _Same] = field(default_factory=dict)  # by the texts that were checked
    since: list[Entry] = field(default_factory=list)  # charges since the gate was last asked
    reserved: dict[str, list[Entry]] = field(default_factory=dict)  # and neither committed nor voided
    version: int | None = None  # of a population


class Auditor:
    """Takes entries in, account by account in their order, and stops at the first that does not follow."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._accounts: dict[str, _Account] = {}
        self._requests: dict[str, _Request] = {}
        self._paths: dict[tuple[str, ...], str] = {}  # as legs name them, with an entry that does
        self._checkpoint = {} if checkpoint is None else dict(checkpoint.accounts)
        self._current: _Account | None = None
        self.set_back: list[str] = []  # entries with an earlier time than the one before them

    def take(self, entry: Entry) -> bool:
        """Take the next entry in, or raise `LedgerCorrupt` and name it; say whether its request wrote no other."""
        own = self._current
        if own is None or own.head.name != entry.account:
            own = self._begin(entry)
        balance = own.balance
        _check_follows(entry, balance)
        self._note_time(entry, balance)
        verb = entry.verb
        alone = entry.legs == entry.place
        if verb in CHARGES:
            self._charge(own, entry, alone=alone)
        elif verb == "step":
            _step(own, entry)
        elif verb in RESOLUTIONS:
            self._resolve(own, entry)
        elif verb == "close" and not balance.closed:
            balance.closed = True
        elif verb != "refuse" and not (verb == "open" and entry.sequence == 0):
            raise _bad(entry, f"{verb!r} cannot stand here")
        if not alone:
            self._legs(entry)
        balance.sequence, balance.seal, balance.time = entry.sequence, entry.seal, entry.time
        if not entry.sequence:
            balance.origin = entry.seal
        if self._checkpoint:
            self._compare(entry)
        return alone

    def _note_time(self, entry: Entry, before: Balance) -> None:
        if entry.time < before.time:
            self.set_back.append(entry.place)

    def finish(self) -> dict[str, Balance]:
        """Return every balance as the entries tell it, once they agree with each other and with the checkpoint."""
        self._end_account()
        for request in self._requests.values():
            name, sequence = min(request.places)
            raise LedgerCorrupt(f"entry {name}#{sequence} is missing: others say that they were written with it")
        blocks: dict[str, str] = {}
        for own in self._accounts.values():
            block = blocks.setdefault(own.head.dataset, own.head.name) if own.head.dataset else ""
            self._check_relatives(own.head, block)
            if own.head.successor_of:
                own.balance.linked = self._accounts[own.head.successor_of].balance.linked = True
        for path, place in self._paths.items():
            if path != self._path(path[0]):
                raise LedgerCorrupt(f"entry {place} charged {' / '.join(path)}, which is not how the accounts stand")
        for name, (sequence, _) in self._checkpoint.items():
            raise LedgerCorrupt(
                f"the ledger is behind its checkpoint: entry {name}#{sequence} is missing; it was cut off or restored"
            )
        return {name: own.balance for name, own in self._accounts.items()}

    def uncertified(self) -> tuple[str, ...]:
        """Return the accounts whose limits this installation has not certified, in the order of their names."""
        known: dict[Compiled, bool] = {}  # accounts by the thousand have one policy
        for own in self._accounts.values():
            if own.compiled not in known:
                known[own.compiled] = certification(own.compiled) is not Certification.NONE
        return tuple(sorted(name for name, own in self._accounts.items() if not known[own.compiled]))

    def _begin(self, entry: Entry) -> _Account:
        self._end_account()
        if entry.account in self._accounts or entry.verb != "open":
            raise _bad(entry, "an account begins with one open entry")
        head, compiled = read_opening(entry)
        policy = compiled.policy
        if (head.name, head.privacy_unit, head.neighbors) != (entry.account, policy.privacy_unit, policy.neighbors):
            raise _bad(entry, "it opens another account, or for another privacy unit or neighbors than its policy's")
        own = _Account(head, compiled, Balance(head, -1, START, 0, compiled.start, closed=False))
        own.version = None if read_population(entry) is None else 0
        self._accounts[head.name] = self._current = own
        return own

    def _end_account(self) -> None:
        if self._current is not None:
            _settle(self._current)
            self._current = None

    def _charge(self, own: _Account, entry: Entry, *, alone: bool) -> None:
        if own.balance.closed:
            raise _bad(entry, "the account was closed before it")
        if own.version is not None:
            raise _bad(entry, "a population takes no charges of its own")
        written = (entry.verb, entry.cost, entry.price, entry.request if alone else "")
        same = own.known.get(written)
        if same is None:
            same = own.known[written] = _Same(_checked_price(own.compiled, entry))
            if alone:
                self._check_alone(entry)
        same.count += 1
        own.since.append(entry)
        if len(own.since) >= _EVERY:
            _settle(own)
        if entry.verb == "reserve":
            own.reserved.setdefault(entry.called, []).append(entry)

    def _resolve(self, own: _Account, entry: Entry) -> None:
        _settle(own)
        reserved = own.reserved.get(entry.key, [])
        asked = (_shape(entry.legs), entry.cost, entry.price)
        match = next((one for one in reserved if (_shape(one.legs), one.cost, one.price) == asked), None)
        if match is None:
            raise _bad(entry, f"there is no such open reservation {entry.key} before it")
        reserved.remove(match)
        if not reserved:
            del own.reserved[entry.key]
        if entry.verb == "void":
            if match.expires is not None and entry.time > match.expires:
                raise _bad(entry, "the reservation had expired, and could no longer be voided")
            own.balance.totals = own.balance.totals.without(price_from_text(entry.price))

    def _legs(self, entry: Entry) -> None:
        """Check that a request's other entries are there and agree, and that it asked for what its digest says."""
        try:
            legs = legs_from_text(entry.legs)
        except (OdographError, ValueError) as problem:
            raise _bad(entry, f"its legs cannot be read: {entry.legs!r}") from problem
        common = (entry.verb, entry.request, str(entry.time), entry.principal, entry.key, entry.detail)
        request = self._requests.get(entry.legs)
        if request is None:
            request = _Request({place for leg in legs for place in leg.places}, common, {})
            self._requests[entry.legs] = request
            for leg in legs:
                self._walk(entry, tuple(name for name, _ in leg.places))
        here = (entry.account, entry.sequence)
        if here not in request.places or request.common != common:
            raise _bad(entry, "it does not agree with the entries that it says it was written with")
        request.places.remove(here)
        request.costs[here] = entry.cost
        if not request.places:
            del self._requests[entry.legs]
            if any(request.costs[place] != request.costs[leg.own] for leg in legs for place in leg.places):
                raise _bad(entry, "the accounts of one leg were charged for different costs")
            asked = tuple((leg.own[0], request.costs[leg.own]) for leg in legs)
            if entry.verb in CHARGES and entry.request != digest_of(entry.verb, asked):
                raise _bad(entry, "its digest is not that of its request")

    def _check_alone(self, entry: Entry) -> None:
        """Check that a charge of one account asked for what its digest says."""
        if entry.request != digest_of(entry.verb, ((entry.account, entry.cost),)):
            raise _bad(entry, "its digest is not that of its request")
        self._walk(entry, (entry.account,))

    def _walk(self, entry: Entry, path: tuple[str, ...]) -> None:
        """Remember which way a charge went; a refusal is written only to the accounts that were asked."""
        if entry.verb in CHARGES or entry.verb in RESOLUTIONS:
            self._paths.setdefault(path, entry.place)

    def _path(self, name: str) -> tuple[str, ...]:
        path: list[str] = []
        while name and name not in path:
            path.append(name)
            name = self._accounts[name].head.parent
        return tuple(path)

    def _check_relatives(self, head: Head, block: str) -> None:
        for name in filter(None, (head.parent, head.successor_of, block)):
            other = self._accounts.get(name)
            if other is None:
                raise LedgerCorrupt(f"account {name!r} is missing: {head.name!r} was opened as its relative")
            if (head.privacy_unit, head.neighbors) != (other.head.privacy_unit, other.head.neighbors):
                raise LedgerCorrupt(f"account {head.name!r} protects another privacy unit or neighbors than {name!r}")

    def _compare(self, entry: Entry) -> None:
        kept = self._checkpoint.get(entry.account)
        if kept is not None and kept[0] == entry.sequence:
            if kept[1] != entry.seal:
                raise _bad(entry, "it is not the entry that the checkpoint knows: the history was rewritten")
            del self._checkpoint[entry.account]


def _check_follows(entry: Entry, before: Balance) -> None:
    if entry.sequence != before.sequence + 1:
        raise _bad(entry, f"entry {before.sequence + 1} is missing before it")
    if entry.version != VERSION:
        raise _bad(entry, f"its version is {entry.version}, and this version of Odograph knows {VERSION}")
    if entry.reseal(before.seal) != entry.seal:
        raise _bad(entry, "its seal does not follow from its content and the entry before it")
    if before.time - AHEAD <= entry.time < before.time or not 0 <= entry.time <= _LATEST:
        raise _bad(entry, "it is earlier than the entry before it by an hour or less, or no date")


def _step(own: _Account, entry: Entry) -> None:
    """Move a population on by one version."""
    if own.version is None or own.balance.closed:
        raise _bad(entry, "only a population that is not closed makes steps")
    own.version += 1
    if read_pointer(entry).version != own.version or entry.details.get("act") not in POPULATION_ACTS or entry.price:
        raise _bad(entry, f"it is not how step {own.version} of a population is written")
    own.balance.totals = own.balance.totals._replace(steps=own.version)


def _settle(own: _Account) -> None:
    """Ask the gate whether the charges since it was last asked all fit, and move the totals on."""
    if not own.since:
        return
    totals = own.balance.totals
    amounts, unpriced, steps = [*totals.amounts], [*totals.unpriced], totals.steps
    for same in own.known.values():
        steps += same.count
        for i, amount in enumerate(same.price.amounts):
            if amount is None:
                unpriced[i] += same.count
            else:
                amounts[i] += amount * same.count
        same.count = 0
    after = Totals(tuple(amounts), tuple(unpriced), steps)
    free = Price((0,) * len(amounts))
    if max(amounts) > CEILING or not decide(own.compiled.meters, after, free).admitted:
        after = _one_by_one(own)
    own.balance.totals = after
    own.since.clear()
    if len(own.known) > _EVERY:
        own.known.clear()  # a ledger whose every charge is different is checked in bounded memory


def _one_by_one(own: _Account) -> Totals:
    totals = own.balance.totals
    for entry in own.since:
        decision = decide(own.compiled.meters, totals, price_from_text(entry.price))
        if not decision.admitted:
            raise _bad(entry, "it passes the limit of its account")
        totals = decision.totals_after
    return totals


def _checked_price(compiled: Compiled, entry: Entry) -> Price:
    """Read a price, and see that it is not lower than the guarantee's by more than the last digits of a float."""
    try:
        stored, guarantee = price_from_text(entry.price), entry.guarantee
        if guarantee is None:
            raise _bad(entry, "it charges for nothing")
        if too_low(stored, compiled.price(guarantee)):
            raise _bad(entry, f"{guarantee} is written with a lower price than it has")
    except LedgerCorrupt:
        raise
    except (OdographError, LookupError, TypeError, ValueError) as problem:
        raise _bad(entry, f"its guarantee or price cannot be read ({explain(problem)})") from problem
    return stored


def _shape(legs: str) -> str:
    """Return which accounts the legs pass, without the sequences."""
    return _SEQUENCE.sub("", legs)


def _bad(entry: Entry, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(f"entry {entry.place}: {why}")


def audit(snapshot: Snapshot, checkpoint: Checkpoint | None = None, progress: Progress | None = None) -> Verification:
    """Replay a whole ledger and compare it with what is stored beside the entries, or raise `LedgerCorrupt`."""
    auditor = Auditor(checkpoint)
    used = done = 0
    noted: dict[tuple[str, int], str] = {}
    principals: set[str] = set()
    for entry, points_to in paced(snapshot.records()):
        alone = auditor.take(entry)
        if entry.verb not in KEYLESS:
            used += (alone and points_to == (entry.account, entry.sequence)) or _check_key(entry, points_to)
        if entry.note:
            noted[entry.account, entry.sequence] = entry.note
        principals.add(entry.principal)
        done += 1
        if progress is not None and not done % _EVERY:
            progress(done, snapshot.size)
    balances = auditor.finish()
    _compare_balances(snapshot.balances, balances)
    if used != snapshot.keys:
        raise LedgerCorrupt(f"{snapshot.keys} keys are stored, and the entries used {used}")
    for note in snapshot.notes():
        if noted.pop((note.account, note.sequence), None) != note_digest(note.salt, note.text):
            raise LedgerCorrupt(f"the note of entry {note.account}#{note.sequence} is not the one that was written")
    heads = {name: (balance.sequence, balance.seal) for name, balance in balances.items()}
    erased = len(principals - {*snapshot.principals()})
    return Verification(
        Checkpoint(heads),
        done,
        len(noted),
        erased,
        uncertified=auditor.uncertified(),
        set_back=tuple(auditor.set_back),
    )


def _check_key(entry: Entry, points_to: tuple[str, int] | None) -> int:
    """Check that the key of an entry leads to the request that used it; count each request once."""
    own = points_to == (entry.account, entry.sequence)
    if points_to is None or (entry.place if own else f"{points_to[0]}#{points_to[1]}") != entry.called:
        raise _bad(entry, f"its key {entry.key!r} does not lead to it")
    return own


def _compare_balances(stored: Iterable[Balance], replayed: dict[str, Balance]) -> None:
    missing = {*replayed}
    for balance in stored:
        name = balance.head.name
        if name not in missing:
            raise LedgerCorrupt(f"account {name!r} has no entries")
        missing.remove(name)
        if balance != replayed[name]:
            raise LedgerCorrupt(
                f"the stored balance of {name!r} is not what its {replayed[name].sequence + 1} entries add up to"
            )
    for name in missing:
        raise LedgerCorrupt(f"account {name!r} has entries and is not stored")
