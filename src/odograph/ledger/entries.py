"""Entries, each sealed over the one before it, and the text forms of their fields. Pure.

An entry is fourteen short strings. Its seal is the SHA-256 of the seal before it and of the other thirteen, one per
line, so a chain can be checked with any tool that knows SHA-256; no field holds a line break. A *leg* is what one
account was asked for, with the accounts above it: `jan#5/all#17` says that entry 5 of `jan` and entry 17 of its
parent `all` are the same charge. Every entry of a request names all the legs of the request; the first id, `jan#5`,
is the id of the request, and so of a reservation.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final, NamedTuple

from odograph.core.gate import Price, Totals
from odograph.core.guarantees import Guarantee, guarantee_from_dict
from odograph.errors import InvalidArgument, LedgerCorrupt, ReservationNotFound, explain, type_text

__all__ = [
    "AHEAD",
    "CHARGES",
    "KEYLESS",
    "RESOLUTIONS",
    "START",
    "VERSION",
    "Entry",
    "Leg",
    "check_key",
    "check_name",
    "check_note",
    "checkpoint_of",
    "digest_of",
    "iso_time",
    "key_owner",
    "legs_from_text",
    "moment",
    "note_digest",
    "parse_entry_id",
    "price_from_text",
    "price_to_text",
    "sealed",
    "shown",
    "stamp",
    "text_of",
    "time_of",
    "totals_from_text",
    "totals_to_text",
]

VERSION: Final = 1
AHEAD: Final = 3_600_000_000  # microseconds that an entry's time may be ahead of the clock: an hour
START: Final = "0" * 64  # the seal before an account's first entry
CHARGES: Final = ("spend", "reserve")
RESOLUTIONS: Final = ("commit", "void")
KEYLESS: Final = ("refuse", "close")  # they use no key up

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NAME: Final = re.compile(r"\w[\w.:@+-]{0,99}")
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")  # no database keeps these in a text
# Numbers have one written form. No account has more entries than 18 digits count, and the stores hold as many.
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_AMOUNTS: Final = re.compile(r"(?:-|0|[1-9][0-9]*)(?: (?:-|0|[1-9][0-9]*))*")
_TOTALS: Final = re.compile(r"(?:0|[1-9][0-9]*)(?:;(?:0|[1-9][0-9]*)(?: (?:0|[1-9][0-9]*))*){2}")
_LONGEST_KEY: Final = 200
_LONGEST_NOTE: Final = 10_000
_SHOWN: Final = 120  # characters of a wrong value


class Entry(NamedTuple):
    """One line of an account's history: it was sealed when it was written, and never changes."""

    version: int
    account: str
    sequence: int  # 0, 1, 2, ... in this account
    time: int  # microseconds since 1970, UTC, by the store's clock; see `stamp`
    principal: str  # a random identity; the name is kept beside the ledger, where it can be erased
    verb: str  # open, spend, reserve, commit, void, refuse, close; step, of a population
    legs: str  # every account and sequence that the request wrote to
    cost: str  # the guarantee, as text; empty where nothing is asked for
    price: str  # whole units on each meter of this account, - where there is none
    key: str  # the caller's, or a random one; for a commit or void the reservation
    request: str  # the digest of verb, accounts and guarantees: the same key must come with the same
    note: str  # the digest of a salt and the note's text, both kept beside the ledger; empty without a note
    detail: str  # JSON, for the verbs that need more
    seal: str

    @property
    def guarantee(self) -> Guarantee | None:
        """What was asked for; None for an entry that asks for nothing."""
        try:
            return guarantee_from_dict(json.loads(self.cost)) if self.cost else None
        except ValueError as problem:
            raise LedgerCorrupt(f"entry {self.id}: its guarantee cannot be read ({explain(problem)})") from problem

    @property
    def details(self) -> dict[str, Any]:
        """What the verb needs beyond the other fields."""
        try:
            form = {**json.loads(self.detail)} if self.detail else {}
        except (TypeError, ValueError) as problem:
            raise LedgerCorrupt(f"entry {self.id}: its detail cannot be read ({explain(problem)})") from problem
        return form

    @property
    def expires(self) -> int | None:
        """Until when a reservation can be voided, by the store's clock; None if it does not expire."""
        until = self.details.get("expires") if self.detail else None
        if until is not None and not (isinstance(until, str) and until.isdecimal()):
            raise LedgerCorrupt(f"entry {self.id}: {until!r} is not a time of expiry")
        return None if until is None else int(until)

    @property
    def moment(self) -> datetime:
        """When it was written, by the store's clock."""
        return moment(self.time)

    @property
    def id(self) -> str:
        """`account#sequence`, by which other entries refer to this one."""
        return f"{self.account}#{self.sequence}"

    @property
    def request_id(self) -> str:
        """The id of the whole request in every account that it wrote to: that of the first entry of its first leg."""
        return self.legs.partition(" ")[0].partition("/")[0]

    def reseal(self, before: str) -> str:
        """Return the seal that this entry must have after the seal before it."""
        return sealed(before, self)


def sealed(before: str, fields: Sequence[object]) -> str:
    """Return the seal over the one before and the first thirteen fields of an entry."""
    v, a, n, t, p, verb, legs, cost, price, key, request, note, detail = fields[:13]
    text = f"{before}\n{v}\n{a}\n{n}\n{t}\n{p}\n{verb}\n{legs}\n{cost}\n{price}\n{key}\n{request}\n{note}\n{detail}"
    return hashlib.sha256(text.encode()).hexdigest()


class Leg(NamedTuple):
    """What one account was asked for: its own entry, and those of the accounts above it."""

    entries: tuple[tuple[str, int], ...]  # account and sequence

    @property
    def own(self) -> tuple[str, int]:
        """The account that was asked, and its entry."""
        return self.entries[0]


def legs_from_text(text: str) -> tuple[Leg, ...]:
    """Read the legs of an entry, or raise `ValueError`."""
    return tuple(Leg(tuple(map(parse_entry_id, leg.split("/")))) for leg in text.split(" "))


def parse_entry_id(text: str) -> tuple[str, int]:
    """Read `account#sequence`, or raise `ReservationNotFound`."""
    name, _, sequence = str(text).rpartition("#")
    if not _NAME.fullmatch(name) or not _NUMBER.fullmatch(sequence):
        raise ReservationNotFound(f"an entry id must be account#sequence, such as census#17 (got {shown(text)})")
    return name, int(sequence)


def price_to_text(price: Price) -> str:
    """Return the written form of a price: `12 0 - 7`."""
    return price.to_text()


def price_from_text(text: str) -> Price:
    """Read what `price_to_text` wrote, or raise `ValueError`."""
    if not _AMOUNTS.fullmatch(text):
        raise ValueError(f"{text!r} is not how a price is written")
    return Price(tuple([None if amount == "-" else int(amount) for amount in text.split(" ")]))


_TOTALS_CHARACTERS: Final = "0123456789 ;"
_MAX_WRITTEN: Final = 64
_WRITTEN: Final[dict[str, Totals]] = {}  # the last totals that were written and can be read, by their text


def totals_to_text(totals: Totals) -> str:
    """Return the written form of totals: steps, amounts, unpriced."""
    text = totals.to_text()
    if not text.strip(_TOTALS_CHARACTERS):  # else reading it raises
        if len(_WRITTEN) >= _MAX_WRITTEN:
            _WRITTEN.clear()
        _WRITTEN[text] = totals
    return text


def totals_from_text(text: str) -> Totals:
    """Read what `totals_to_text` wrote, or raise `ValueError`.

    The next charge of an account reads what the last one wrote, so the last texts are not taken apart again.
    """
    written = _WRITTEN.get(text)
    if written is not None:
        return written
    if not _TOTALS.fullmatch(text):
        raise ValueError(f"{text!r} is not how totals are written")
    steps, amounts, unpriced = text.split(";")
    # Every charge reads totals, and a named tuple's own constructor takes twice as long as the tuple's.
    return tuple.__new__(Totals, (tuple(map(int, amounts.split(" "))), _counts_from_text(unpriced), int(steps)))


@lru_cache(maxsize=1024)  # nearly always zeros
def _counts_from_text(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(" ")))


def text_of(form: Mapping[str, Any]) -> str:
    """Return the one way to write a document: sorted fields, no spaces, no line breaks."""
    return json.dumps(form, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=1024)
def digest_of(verb: str, legs: tuple[tuple[str, str], ...]) -> str:
    """Return the digest of a request: its verb, and each account with the text of what is asked of it."""
    return hashlib.sha256("\n".join([verb, *(f"{account} {text}" for account, text in legs)]).encode()).hexdigest()


def note_digest(salt: str, text: str) -> str:
    """Return the digest of a note. Without the salt, which is erased with the text, it cannot be guessed from."""
    return hashlib.sha256(f"{salt}\n{text}".encode()).hexdigest()


def checkpoint_of(heads: Iterable[tuple[str, int, str]]) -> str:
    """Return one hash over every account's name, last sequence and last seal."""
    lines = [f"{name} {sequence} {seal}" for name, sequence, seal in sorted(heads)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def key_owner(verb: str, principal: str) -> str:
    """Return the owner of a key: a reservation is resolved once, by any principal, so it has none."""
    return "" if verb in RESOLUTIONS else principal


def stamp(now: int, before: Iterable[int]) -> int:
    """Return the time of the next entries of accounts whose last entries have the times `before`.

    It is the clock's, or the last entry's where that is later by up to an hour, so that time does not go back when a
    clock is corrected. An entry that is further ahead was written by a clock that was wrong, and does not hold up the
    time of all later ones: those go back by more than an hour, and `verify` says so.
    """
    time = now
    for last in sorted(before):
        if time < last <= time + AHEAD:
            time = last
    return time


def time_of(moment: datetime) -> int:
    """Return a date as a time of the store."""
    return (moment - _EPOCH) // _MICROSECOND


def moment(time: int) -> datetime:
    """Return a time of the store as a date in UTC."""
    seconds, micros = divmod(time, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)


@lru_cache(maxsize=64)  # the charges of one commit have one time
def iso_time(time: int) -> str:
    """Return a time of the store as ISO 8601 in UTC, always with microseconds."""
    return f"{moment(time):%Y-%m-%dT%H:%M:%S.%f+00:00}"


def shown(value: object) -> str:
    """Write a value into a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_name(name: object, field: str = "name") -> str:
    """Return an account's name if it can be one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or unicodedata.normalize("NFC", name) != name:
        raise InvalidArgument(
            f"{field} must be 1 to 100 letters, digits and any of . _ : @ + -, starting with a letter or digit"
            f" (got {shown(name)})"
        )
    return name


def check_key(key: object, field: str = "key") -> str:
    """Return a key if it can be one: a string on one line."""
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        got = shown(key) if isinstance(key, str) else type_text(key)
        raise InvalidArgument(f"{field} must be a string of 1 to {_LONGEST_KEY} printable characters (got {got})")
    return key


def check_note(note: object) -> str:
    """Return a note if it can be one."""
    if not isinstance(note, str) or len(note) > _LONGEST_NOTE or _UNSTORABLE.search(note):
        got = f"{len(note):,} characters" if isinstance(note, str) else type_text(note)
        raise InvalidArgument(
            f"note must be a string of at most {_LONGEST_NOTE:,} characters, without NUL and lone surrogates"
            f" (got {got})"
        )
    return note
