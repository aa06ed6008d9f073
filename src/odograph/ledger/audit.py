"""Replay: every entry must follow from the ones before it, and every stored balance from the entries.

The replay needs no clock and trusts only the entries. It adds prices as they were stored, and computes them again
only to check that none is too low. Totals only grow between two voids, so a run of charges fits if its last total
fits: the gate decides once per run, and once per entry only to name the first entry that does not fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from odograph.compile import Certification, certification
from odograph.concurrency import pace
from odograph.core.fixed_point import CEILING
from odograph.core.gate import Price, Totals, decide
from odograph.core.policy import Compiled, too_low
from odograph.display import Progress
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
from odograph.ledger.epochs import read_renewal
from odograph.ledger.results import Checkpoint, Verification
from odograph.ledger.stores.base import Balance, Head, Pending, Snapshot

__all__ = ["Auditor", "audit"]

_SEQUENCE: Final = re.compile(r"#\d+")
_LATEST: Final = 253_402_300_799_999_999  # the last microsecond of the year 9999
_MAX_RUN: Final = 5000  # entries between two reports of progress, and charges between two decisions of the gate


@dataclass(slots=True)
class _Request:
    """A request that wrote several entries: which are still missing, and the fields in which all must agree."""

    missing: set[tuple[str, int]]
    common: tuple[str, ...]
    costs: dict[tuple[str, int], str]


@dataclass(slots=True)
class _EqualCharges:
    """Charges with equal fields: checked once, and counted since the last decision of the gate."""

    price: Price
    count: int = 0


@dataclass(slots=True)
class _Account:
    """One account, as it follows from its entries so far."""

    head: Head
    compiled: Compiled
    balance: Balance
    known: dict[tuple[str, ...], _EqualCharges] = field(default_factory=dict)  # by the fields that were checked
    since: list[Entry] = field(default_factory=list)  # charges since the last decision of the gate
    reserved: dict[str, list[Entry]] = field(default_factory=dict)  # neither committed nor voided, by entry id
    version: int | None = None  # of a population


class Auditor:
    """Replays entries, account by account and by sequence, up to the first that does not follow."""

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._accounts: dict[str, _Account] = {}
        self._requests: dict[str, _Request] = {}
        self._paths: dict[tuple[str, ...], str] = {}  # that charges went, each with the id of an entry
        self._checkpoint = {} if checkpoint is None else dict(checkpoint.accounts)
        self._current: _Account | None = None
        self.voids: Counter[str] = Counter()  # entries that voided a reservation, by account
        self.set_back: list[str] = []  # entries with an earlier time than the one before them

    def take(self, entry: Entry) -> bool:
        """Replay the next entry, or raise `LedgerCorrupt` with its id; return whether its request wrote no other."""
        own = self._current
        if own is None or own.head.name != entry.account:
            own = self._begin(entry)
        balance = own.balance
        _check_follows(entry, balance)
        self._note_time(entry, balance)
        verb = entry.verb
        alone = entry.legs == entry.id
        if verb in CHARGES:
            self._charge(own, entry, alone=alone)
        elif verb == "step":
            _step(own, entry)
        elif verb in RESOLUTIONS:
            self._resolve(own, entry)
        elif verb == "close" and not balance.closed:
            balance.closed = True
        elif verb != "refuse" and not (verb == "open" and entry.sequence == 0):
            raise _bad(entry, f"{verb!r} is not possible here")
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
            self.set_back.append(entry.id)

    def finish(self) -> dict[str, Balance]:
        """Return the balances; raise if entries contradict each other or the checkpoint."""
        self._end_account()
        for request in self._requests.values():
            name, sequence = min(request.missing)
            raise LedgerCorrupt(f"entry {name}#{sequence} is missing: other entries name it as part of their request")
        blocks: dict[str, str] = {}
        for own in self._accounts.values():
            block = blocks.setdefault(own.head.dataset, own.head.name) if own.head.dataset else ""
            self._check_relatives(own.head, block)
            if own.head.successor_of:
                own.balance.linked = self._accounts[own.head.successor_of].balance.linked = True
        for path, place in self._paths.items():
            if path != self._path(path[0]):
                raise LedgerCorrupt(f"entry {place} charged {' / '.join(path)}, which is not the path of its account")
        for name, (sequence, _) in self._checkpoint.items():
            raise LedgerCorrupt(
                f"the ledger is behind its checkpoint: entry {name}#{sequence} is missing. It was truncated, or"
                " restored from an older copy"
            )
        return {name: own.balance for name, own in self._accounts.items()}

    def pending(self) -> set[Pending]:
        """Return the reservations that are neither committed nor voided."""
        return {
            Pending(name, reservation, entries[0].sequence)
            for name, own in self._accounts.items()
            for reservation, entries in own.reserved.items()
        }

    def uncertified_accounts(self) -> tuple[str, ...]:
        """Return the names of the accounts whose limits this installation has not certified, sorted."""
        known: dict[Compiled, bool] = {}  # thousands of accounts may have one policy
        for own in self._accounts.values():
            if own.compiled not in known:
                known[own.compiled] = certification(own.compiled) is not Certification.NONE
        return tuple(sorted(name for name, own in self._accounts.items() if not known[own.compiled]))

    def _begin(self, entry: Entry) -> _Account:
        self._end_account()
        if entry.account in self._accounts or entry.verb != "open":
            raise _bad(entry, "an account must begin with one open entry")
        head, compiled = read_opening(entry)
        policy = compiled.policy
        if (head.name, head.privacy_unit, head.neighbors) != (entry.account, policy.privacy_unit, policy.neighbors):
            raise _bad(entry, "it opens another account, or has another privacy unit or neighbors than its policy")
        renews = read_renewal(entry) is not None
        own = _Account(head, compiled, Balance(head, -1, START, 0, compiled.start, closed=False, linked=renews))
        own.version = None if read_population(entry) is None else read_pointer(entry).version
        self._accounts[head.name] = self._current = own
        return own

    def _end_account(self) -> None:
        if self._current is not None:
            _decide_run(self._current)
            self._current = None

    def _charge(self, own: _Account, entry: Entry, *, alone: bool) -> None:
        if own.balance.closed:
            raise _bad(entry, "the account was already closed")
        if own.version is not None:
            raise _bad(entry, "a population takes no charges of its own")
        written = (entry.verb, entry.cost, entry.price, entry.request if alone else "")
        same = own.known.get(written)
        if same is None:
            same = own.known[written] = _EqualCharges(_read_price(own.compiled, entry))
            if alone:
                self._check_alone(entry)
        same.count += 1
        own.since.append(entry)
        if len(own.since) >= _MAX_RUN:
            _decide_run(own)
        if entry.verb == "reserve":
            own.reserved.setdefault(entry.request_id, []).append(entry)

    def _resolve(self, own: _Account, entry: Entry) -> None:
        _decide_run(own)
        reserved = own.reserved.get(entry.key, [])
        asked = (_shape(entry.legs), entry.cost, entry.price)
        match = next((one for one in reserved if (_shape(one.legs), one.cost, one.price) == asked), None)
        if match is None:
            raise _bad(entry, f"reservation {entry.key} does not exist, or was resolved before")
        reserved.remove(match)
        if not reserved:
            del own.reserved[entry.key]
        if entry.verb == "void":
            self.voids[entry.account] += 1
            if match.expires is not None and entry.time > match.expires:
                raise _bad(entry, "the reservation had expired and could not be voided")
            own.balance.totals = own.balance.totals.without(price_from_text(entry.price))

    def _legs(self, entry: Entry) -> None:
        """Check that the other entries of a request exist and agree, and that its digest is right."""
        try:
            legs = legs_from_text(entry.legs)
        except (OdographError, ValueError) as problem:
            raise _bad(entry, f"its legs cannot be read: {entry.legs!r}") from problem
        common = (entry.verb, entry.request, str(entry.time), entry.principal, entry.key, entry.detail)
        request = self._requests.get(entry.legs)
        if request is None:
            request = _Request({place for leg in legs for place in leg.entries}, common, {})
            self._requests[entry.legs] = request
            for leg in legs:
                self._note_path(entry, tuple(name for name, _ in leg.entries))
        here = (entry.account, entry.sequence)
        if here not in request.missing or request.common != common:
            raise _bad(entry, "it contradicts the other entries of its request")
        request.missing.remove(here)
        request.costs[here] = entry.cost
        if not request.missing:
            del self._requests[entry.legs]
            if any(request.costs[place] != request.costs[leg.own] for leg in legs for place in leg.entries):
                raise _bad(entry, "the accounts of one leg were charged different costs")
            asked = tuple((leg.own[0], request.costs[leg.own]) for leg in legs)
            if entry.verb in CHARGES and entry.request != digest_of(entry.verb, asked):
                raise _bad(entry, "its digest is not that of its request")

    def _check_alone(self, entry: Entry) -> None:
        """Check the digest of a charge to one account."""
        if entry.request != digest_of(entry.verb, ((entry.account, entry.cost),)):
            raise _bad(entry, "its digest is not that of its request")
        self._note_path(entry, (entry.account,))

    def _note_path(self, entry: Entry, path: tuple[str, ...]) -> None:
        """Record the path of a charge; a refusal is written only to the accounts that were named."""
        if entry.verb in CHARGES or entry.verb in RESOLUTIONS:
            self._paths.setdefault(path, entry.id)

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
                raise LedgerCorrupt(f"account {name!r} is missing, but {head.name!r} was opened as its relative")
            if (head.privacy_unit, head.neighbors) != (other.head.privacy_unit, other.head.neighbors):
                raise LedgerCorrupt(f"account {head.name!r} has another privacy unit or neighbors than {name!r}")

    def _compare(self, entry: Entry) -> None:
        kept = self._checkpoint.get(entry.account)
        if kept is not None and kept[0] == entry.sequence:
            if kept[1] != entry.seal:
                raise _bad(entry, "it is not the entry of the checkpoint: the history was rewritten")
            del self._checkpoint[entry.account]


def _check_follows(entry: Entry, before: Balance) -> None:
    if entry.sequence != before.sequence + 1:
        raise _bad(entry, f"entry {before.sequence + 1} is missing before it")
    if entry.version != VERSION:
        raise _bad(entry, f"it has version {entry.version}, but this version of Odograph reads {VERSION}")
    if entry.reseal(before.seal) != entry.seal:
        raise _bad(entry, "its seal does not follow from its content and the entry before it")
    if before.time - AHEAD <= entry.time < before.time or not 0 <= entry.time <= _LATEST:
        raise _bad(entry, "its time is out of range, or before that of the previous entry by an hour or less")


def _step(own: _Account, entry: Entry) -> None:
    """Advance a population by one version."""
    if own.version is None or own.balance.closed:
        raise _bad(entry, "only a population that is not closed takes steps")
    own.version += 1
    if read_pointer(entry).version != own.version or entry.details.get("act") not in POPULATION_ACTS or entry.price:
        raise _bad(entry, f"it is not a valid step {own.version} of a population")
    own.balance.totals = own.balance.totals._replace(steps=own.version)


def _decide_run(own: _Account) -> None:
    """Check that all charges since the last decision fit, and add them to the totals."""
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
        after = _decide_each(own)
    own.balance.totals = after
    own.since.clear()
    if len(own.known) > _MAX_RUN:
        own.known.clear()  # so that memory is bounded where all charges differ


def _decide_each(own: _Account) -> Totals:
    totals = own.balance.totals
    for entry in own.since:
        decision = decide(own.compiled.meters, totals, price_from_text(entry.price))
        if not decision.admitted:
            raise _bad(entry, "it exceeds the limit of its account")
        totals = decision.totals_after
    return totals


def _read_price(compiled: Compiled, entry: Entry) -> Price:
    """Return the price of an entry, unless it is below the guarantee's by more than the last digits of a float."""
    try:
        stored, guarantee = price_from_text(entry.price), entry.guarantee
        if guarantee is None:
            raise _bad(entry, "it has no guarantee")
        if too_low(stored, compiled.price(guarantee)):
            raise _bad(entry, f"its price is too low for {guarantee}")
    except LedgerCorrupt:
        raise
    except (OdographError, LookupError, TypeError, ValueError) as problem:
        raise _bad(entry, f"its guarantee or price cannot be read ({explain(problem)})") from problem
    return stored


def _shape(legs: str) -> str:
    """Return the accounts of the legs, without the sequences."""
    return _SEQUENCE.sub("", legs)


def _bad(entry: Entry, why: str) -> LedgerCorrupt:
    return LedgerCorrupt(f"entry {entry.id}: {why}")


def audit(snapshot: Snapshot, checkpoint: Checkpoint | None = None, progress: Progress | None = None) -> Verification:
    """Replay a complete ledger and compare it with the balances, keys and notes, or raise `LedgerCorrupt`."""
    auditor = Auditor(checkpoint)
    used = done = 0
    noted: dict[tuple[str, int], str] = {}
    principals: set[str] = set()
    for entry, points_to in pace(snapshot.records()):
        alone = auditor.take(entry)
        if entry.verb not in KEYLESS:
            used += (alone and points_to == (entry.account, entry.sequence)) or _check_key(entry, points_to)
        if entry.note:
            noted[entry.account, entry.sequence] = entry.note
        principals.add(entry.principal)
        done += 1
        if progress is not None and not done % _MAX_RUN:
            progress(done, snapshot.size)
    balances = auditor.finish()
    _compare_balances(snapshot.balances, balances)
    _compare_pending({*snapshot.pending}, auditor.pending())
    if snapshot.voids != auditor.voids:
        raise LedgerCorrupt(
            f"{sum(snapshot.voids.values())} voids are counted, but there are {auditor.voids.total()}"
        )
    if used != snapshot.keys:
        raise LedgerCorrupt(f"{snapshot.keys} keys are stored, but the entries used {used}")
    for note in snapshot.notes():
        if noted.pop((note.account, note.sequence), None) != note_digest(note.salt, note.text):
            raise LedgerCorrupt(f"the note of entry {note.account}#{note.sequence} does not match its digest")
    heads = {name: (balance.sequence, balance.seal) for name, balance in balances.items()}
    erased = len(principals - {*snapshot.principals()})
    return Verification(
        Checkpoint(heads),
        done,
        len(noted),
        erased,
        uncertified=auditor.uncertified_accounts(),
        set_back=tuple(auditor.set_back),
    )


def _check_key(entry: Entry, points_to: tuple[str, int] | None) -> int:
    """Check that the key of an entry is stored with its request; return 1 for the entry that it is stored with."""
    own = points_to == (entry.account, entry.sequence)
    if points_to is None or (entry.id if own else f"{points_to[0]}#{points_to[1]}") != entry.request_id:
        raise _bad(entry, f"its key {entry.key!r} is stored with another request, or not at all")
    return own


def _compare_pending(stored: set[Pending], replayed: set[Pending]) -> None:
    for one in sorted(stored ^ replayed)[:1]:
        is_listed = "is listed as pending and is not" if one in stored else "is pending and is not listed"
        raise LedgerCorrupt(f"reservation {one.reservation} {is_listed}, in account {one.account!r}")


def _compare_balances(stored: Iterable[Balance], replayed: dict[str, Balance]) -> None:
    missing = {*replayed}
    for balance in stored:
        name = balance.head.name
        if name not in missing:
            raise LedgerCorrupt(f"account {name!r} has no entries")
        missing.remove(name)
        if balance != replayed[name]:
            raise LedgerCorrupt(
                f"the stored balance of {name!r} is not the sum of its {replayed[name].sequence + 1} entries"
            )
    for name in missing:
        raise LedgerCorrupt(f"account {name!r} has entries but no stored balance")
