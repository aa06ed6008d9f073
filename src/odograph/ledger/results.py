"""What an account returns: receipts, reservations, its history; and what a ledger's audit returns."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, NoReturn, SupportsIndex, overload

from odograph.core.fixed_point import brief_above, written_above
from odograph.core.gate import Decision, Price
from odograph.core.guarantees import Guarantee, exact_of, one_shot
from odograph.core.policy import Policy
from odograph.display import badge, card, facts, one_line, paragraph, table, utc
from odograph.errors import (
    InvalidArgument,
    LedgerCorrupt,
    LedgerError,
    ReservationNotFound,
    explain,
    load_extra,
    type_text,
    with_usage,
)
from odograph.ledger.entries import (
    Entry,
    checkpoint_of,
    iso_time,
    legs_from_text,
    moment,
    parse_entry_id,
    price_from_text,
    shown,
    text_of,
)
from odograph.ledger.stores.base import Head

__all__ = [
    "COLUMNS",
    "NOW",
    "BaseReservation",
    "Checkpoint",
    "Events",
    "History",
    "HistoryEntry",
    "Lifetime",
    "Line",
    "Receipt",
    "Reservation",
    "Stated",
    "Verification",
    "cell_text",
    "cursor_from_text",
    "cursor_to_text",
    "history_entry",
    "linked",
    "together",
    "write_csv",
]


_MAX_NAMED: Final = 12  # accounts of a lifetime promise in a message


class Lifetime(NamedTuple):
    """What linked accounts promise together: the sum, because each of them is a fresh budget.

    `epsilon` is None where one of them promises none, but rho, mu or nothing: such promises have no such sum.
    """

    accounts: tuple[str, ...]
    epsilon: Fraction | None
    delta: Fraction
    schedule: str = ""  # what the schedule that opens them promises, if there is one

    def to_dict(self) -> dict[str, Any]:
        """Return the promise in plain types, its numbers exact, as text."""
        epsilon = None if self.epsilon is None else str(self.epsilon)
        form = {"accounts": [*self.accounts], "epsilon": epsilon, "delta": str(self.delta)}
        return {**form, "schedule": self.schedule}

    def __repr__(self) -> str:
        return one_line("Lifetime", str(self))

    def _repr_html_(self) -> str:
        return card("Lifetime promise", paragraph(self))

    def __str__(self) -> str:
        count, names = len(self.accounts), ", ".join(self.accounts)
        if count > _MAX_NAMED:
            names = f"{self.accounts[0]}, ..., {self.accounts[-1]} ({count:,} accounts)"
        text = f"({brief_above(self.epsilon or 0)}, {brief_above(self.delta)})-DP over {names}"
        if self.epsilon is None:
            text = f"not one (epsilon, delta): see what each promises of {names}"
        return f"{text}; by the schedule {self.schedule}" if self.schedule else text


def linked(heads: Sequence[Head], name: str) -> list[str]:
    """Return the names of an account and of all that are linked to it, before and after, in order."""
    beside: dict[str, list[str]] = {}
    for head in heads:
        if head.successor_of:
            beside.setdefault(head.name, []).append(head.successor_of)
            beside.setdefault(head.successor_of, []).append(head.name)
    names, found = [name], {name}
    for one in names:
        new = [other for other in beside.get(one, ()) if other not in found]
        names += new
        found.update(new)
    return sorted(names)


def together(policies: Mapping[str, Policy]) -> Lifetime:
    """Return the sum of some accounts' promises.

    Theorem: basic composition: filters with promises (e_i, d_i) together promise (sum e_i, sum d_i).
    Assumes: the accounts' policies, and how many there are, were not chosen by looking at the answers; if they
        were, the sum is a running total and not a promise made beforehand.
    """
    epsilons = [policy.epsilon for policy in policies.values()]
    known = [exact_of(epsilon) for epsilon in epsilons if epsilon is not None]
    epsilon = sum(known, Fraction(0)) if len(known) == len(epsilons) else None
    delta = sum((exact_of(policy.delta) for policy in policies.values()), Fraction(0))
    return Lifetime(tuple(policies), epsilon, delta)


_FORM = 1
_RANDOM_KEY: Final = re.compile("[0-9a-f]{32}")  # an idempotency key that was generated


class Line(NamedTuple):
    """One account's part of a receipt."""

    account: str
    sequence: int
    cost: Guarantee
    seal: str  # empty in memory


# One is made at every spend, hence a tuple with names: a frozen dataclass takes four times as long.
class Receipt(NamedTuple):
    """Proof of a charge. It pays for one run of the mechanism, regardless of how often it is shown.

    `repeated` means that the same key was used before: this is the first receipt again, and nothing was charged now.
    `uncertified` names the accounts whose limits the installation that wrote it has not certified.
    `decision` is the decision that admitted the charge: the totals after it and what is left. It is None on a receipt
    that is read back later, on one that a service returns, and on those of commits and voids.
    `notes` say what the charge changes for later requests: an alternative that ends, a charge far above the intrinsic
    time. They are on the first receipt of a spend or reservation only: one that is read back later or `repeated` has
    none, because they are not stored. `principal` is who charged: empty in memory, and where a service confirms what
    its caller has just asked for.
    """

    verb: str
    key: str  # empty in memory if none was given
    written: int  # microseconds since 1970, by the store's clock
    lines: tuple[Line, ...]
    voidable_until: int | None  # the same, for a reservation that expires
    lifetimes: tuple[Lifetime, ...]
    repeated: bool
    uncertified: tuple[str, ...] = ()
    decision: Decision | None = None
    notes: tuple[str, ...] = ()
    principal: str = ""

    @property
    def id(self) -> str:
        """The id of the charge: `account#sequence` of the first account."""
        return f"{self.lines[0].account}#{self.lines[0].sequence}"

    @property
    def time(self) -> datetime:
        """When it was written, by the store's clock."""
        return moment(self.written)

    @property
    def expires(self) -> datetime | None:
        """Until when a reservation can be voided; None if it does not expire, or if this is not a reservation."""
        return None if self.voidable_until is None else moment(self.voidable_until)

    def __eq__(self, other: object) -> bool:
        # The first receipt again is equal to the first, though a successor may have been opened since.
        return isinstance(other, Receipt) and self[:5] == other[:5]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:5])

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt in plain types."""
        return {
            "id": self.id,
            "verb": self.verb,
            "key": self.key,
            "time": iso_time(self.written),
            "accounts": [
                {"account": line.account, "sequence": line.sequence, "cost": line.cost.to_dict(), "seal": line.seal}
                for line in self.lines
            ],
            "expires": None if self.voidable_until is None else iso_time(self.voidable_until),
            "lifetimes": [lifetime.to_dict() for lifetime in self.lifetimes],
            "repeated": self.repeated,
            "uncertified": [*self.uncertified],
            "notes": [*self.notes],
            "principal": self.principal,
        }

    def __repr__(self) -> str:
        return one_line("Receipt", str(self))

    def _repr_html_(self) -> str:
        title = f"{self.done} before, nothing was charged now" if self.repeated else self.done
        named = {
            "by": self.principal,
            "key": self.key,
            "time": utc(self.time),
            "can be voided until": utc(self.expires),
            "then": "" if self.decision is None else self.decision.left_text,
            "lifetime promise": "; ".join(map(str, self.lifetimes)),
            "limits not certified here": ", ".join(self.uncertified),
            "note": "; ".join(self.notes),
        }
        rows = [(line.account, line.sequence, line.cost.brief()) for line in self.lines]
        lines = table(("account", "entry", "cost"), rows, numbers=("entry",))
        return card("Receipt", lines, facts(named), label=badge(title, "plain" if self.repeated else "good"))

    @property
    def costs(self) -> str:
        """The costs for people, each with its account."""
        return ", ".join(f"{line.cost.brief()}{f' of {line.account}' if line.account else ''}" for line in self.lines)

    @property
    def done(self) -> str:
        """What was done: spent, reserved, committed, voided."""
        return {"spend": "spent", "reserve": "reserved", "commit": "committed", "void": "voided"}[self.verb]

    def __str__(self) -> str:
        again = " before, nothing was charged now" if self.repeated else ""
        key = f", key {self.key}" if self.key else ""
        promise = "".join(f"; lifetime promise {lifetime}" for lifetime in self.lifetimes)
        unsure = f"; limits not certified here: {', '.join(self.uncertified)}" if self.uncertified else ""
        return "; ".join([f"{self.done}{again}: {self.costs}; entry {self.id}{key}{promise}{unsure}", *self.notes])


class BaseReservation:
    """What every reservation shows of itself; those of an `AsyncLedger` are committed and voided with `await`."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self.voided = False  # through this object

    @property
    def repeated(self) -> bool:
        """Whether its key was used before: what it pays for was begun then, and must not be begun again."""
        return self.receipt.repeated

    @property
    def expires(self) -> datetime | None:
        """Until when it can be voided; None if it does not expire."""
        return self.receipt.expires

    @property
    def id(self) -> str:
        """The id by which any process may resolve a ledger's reservation: `ledger.commit(id)`."""
        return self.receipt.id

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a reservation is not sent to another process: there, use odograph.connect(...).reservation({self.id!r})"
        )

    def _repr_html_(self) -> str:
        receipt = self.receipt
        named = {
            "id": self.id,
            "cost": receipt.costs,
            "by": receipt.principal,
            "key": receipt.key,
            "made": utc(receipt.time),
            "can be voided until": utc(self.expires) or "it is committed",
        }
        label = badge("voided") if self.voided else badge("repeated" if self.repeated else "charged", "good")
        return card("Reservation", facts(named), label=label)

    def __repr__(self) -> str:
        receipt = self.receipt
        who = f" by {receipt.principal}" if receipt.principal else ""
        until = "" if self.expires is None else f", voidable until {utc(self.expires)}"
        again = "repeated, " if self.repeated else ""
        made = f"{receipt.time:%Y-%m-%d %H:%M}"
        return one_line(type(self).__name__, f"{self.id}: {again}{receipt.costs}{who}, made {made}{until}")


class Reservation(BaseReservation):
    """A charge that is yet to be committed, or voided if the mechanism was not run."""

    def __init__(self, resolve: Callable[[str, str, str], Receipt], receipt: Receipt) -> None:
        super().__init__(receipt)
        self._resolve = resolve  # called with the verb, the reservation's id and the note

    def commit(self, *, note: str = "") -> Receipt:
        """Confirm the charge: the mechanism was run, or may have been. Works after it expired, and again."""
        return self._resolve("commit", self.id, note)

    @with_usage("it takes why nothing was run, such as void('the query failed before it ran')")
    def void(self, reason: str) -> Receipt:
        """Take the charge back: the mechanism was not run. Not after it was committed or has expired."""
        receipt = self._resolve("void", self.id, reason)
        self.voided = True
        return receipt


class Stated(NamedTuple):
    """What an entry of an account in memory charges, and the account that was asked."""

    cost: Guarantee | None
    price: Price | None
    account: str


class HistoryEntry(NamedTuple):
    """One entry of an account's history: what was done, at what cost, and on whose request.

    `key` is the caller's; for a commit or void it is the reservation's id. An erased name or note reads `erased`.
    """

    sequence: int  # 0 is the opening
    written: int  # microseconds since 1970, by the store's clock
    verb: str  # open, spend, reserve, commit, void, close; a ledger also records what it refused: refuse
    key: str
    note: str
    voidable_until: int | None = None  # microseconds since 1970
    principal: str = ""  # the name of who asked; empty in memory
    seal: str = ""  # empty in memory
    sealed: Entry | None = None  # the entry as a ledger stores it, from which the rest is read; None in memory
    stated: Stated | None = None  # the rest, in memory

    @property
    def cost(self) -> Guarantee | None:
        """The guarantee that was asked for; None for an opening or closing."""
        return self.entry.guarantee if self.stated is None else self.stated.cost

    @property
    def price(self) -> Price | None:
        """The units charged on each meter of this account; None for an opening or closing."""
        if self.stated is not None:
            return self.stated.price
        return price_from_text(self.entry.price) if self.entry.price else None

    @property
    def account(self) -> str:
        """The name of the account that was asked: this one, or one below it."""
        if self.stated is not None:
            return self.stated.account
        entry = self.entry
        own = (entry.account, entry.sequence)
        return next((leg.own[0] for leg in legs_from_text(entry.legs) if own in leg.entries), entry.account)

    @property
    def time(self) -> datetime:
        """When it was written, by the store's clock."""
        return moment(self.written)

    @property
    def expires(self) -> datetime | None:
        """Until when a reservation can be voided; None if it does not expire, or if this is not a reservation."""
        return None if self.voidable_until is None else moment(self.voidable_until)

    @property
    def key_text(self) -> str:
        """The key for people: one that was generated is shortened."""
        return f"{self.key[:6]}..." if _RANDOM_KEY.fullmatch(self.key) else self.key

    @property
    def entry(self) -> Entry:
        """The entry as a ledger stores and seals it; an account in memory raises `LedgerError`."""
        if self.sealed is None:
            raise LedgerError("an account in memory has no sealed entries; an account of a ledger has")
        return self.sealed

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in plain types; `sealed` has the exact strings under its seal."""
        sealed = self.sealed
        if sealed is not None:
            cost, price = json.loads(sealed.cost) if sealed.cost else None, sealed.price
        else:
            cost = None if self.cost is None else self.cost.to_dict()
            price = "" if self.price is None else self.price.to_text()
        return {
            "sequence": self.sequence,
            "time": iso_time(self.written),
            "verb": self.verb,
            "cost": cost,
            "price": price,
            "principal": self.principal,
            "key": self.key,
            "note": self.note,
            "expires": None if self.voidable_until is None else iso_time(self.voidable_until),
            "seal": self.seal,
            "sealed": None if sealed is None else {field: str(value) for field, value in sealed._asdict().items()},
        }

    def __repr__(self) -> str:
        cost = "" if self.cost is None else f" {self.cost.brief()}"
        note = f", note {self.note!r}" if self.note else ""
        return one_line("HistoryEntry", f"{self.sequence}: {self.verb}{cost}, {utc(self.time)}{note}")

    def _repr_html_(self) -> str:
        named = {
            "account": self.account,
            "cost": "" if self.cost is None else self.cost.brief(),
            "by": self.principal,
            "key": self.key,
            "note": self.note,
            "time": utc(self.time),
            "could be voided until": utc(self.expires),
            "seal": self.seal,
        }
        return card(
            f"Entry {self.sequence}",
            facts(named),
            label=badge(self.verb, "bad" if self.verb == "refuse" else "plain"),
        )


_ADMITTED: Final = {"spend": True, "reserve": True, "refuse": False}


class _Column(NamedTuple):
    """A column of a history as a table."""

    kind: str  # of its values: integer, time, text, number or truth
    value: Callable[[HistoryEntry, Guarantee | None], Any]  # of an entry and its cost, which takes long to read


def _size(name: str) -> _Column:
    """Return the column of a number that guarantees may have: rounded up to a float, None where it is not defined."""

    def value(_entry: HistoryEntry, cost: Guarantee | None) -> float | None:
        found = None if cost is None else getattr(one_shot(cost), name, None)
        return None if found is None else written_above(exact_of(found))

    return _Column("number", value)


#: The columns of a history as a table, in their order.
COLUMNS: Final[Mapping[str, _Column]] = {
    "sequence": _Column("integer", lambda entry, _: entry.sequence),
    "time": _Column("time", lambda entry, _: entry.written),
    "verb": _Column("text", lambda entry, _: entry.verb),
    "account": _Column("text", lambda entry, _: entry.account),
    "principal": _Column("text", lambda entry, _: entry.principal),
    "key": _Column("text", lambda entry, _: entry.key),
    "note": _Column("text", lambda entry, _: entry.note),
    "admitted": _Column("truth", lambda entry, _: _ADMITTED.get(entry.verb)),
    "kind": _Column("text", lambda _, cost: "" if cost is None else cost.kind),
    "epsilon": _size("epsilon"),
    "rho": _size("rho"),
    "mu": _size("mu"),
    "delta": _size("delta"),
    "cost": _Column("text", lambda _, cost: "" if cost is None else text_of(cost.to_dict())),
    "price": _Column("text", lambda entry, _: "" if entry.price is None else entry.price.to_text()),
    "expires": _Column("time", lambda entry, _: entry.voidable_until),
    "seal": _Column("text", lambda entry, _: entry.seal),
}


def _values(entry: HistoryEntry) -> list[Any]:
    cost = entry.cost
    return [column.value(entry, cost) for column in COLUMNS.values()]


# Spreadsheets take a text for a formula that begins with one of these, also after spaces or in full-width characters.
# One that begins with the apostrophe that makes it text again gets another: removing one restores every text.
_FORMULA: Final = re.compile(r"\s*[=+\-@]|[\t\r\n']")


def cell_text(text: str) -> str:
    """Return a text for a table, with an apostrophe before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if _FORMULA.match(unicodedata.normalize("NFKC", text)) else text


class History(tuple[HistoryEntry, ...]):
    """A part of an account's history: a tuple of its entries, oldest first, that can be written as a table.

    The columns are those of `odograph.ledger.results.COLUMNS`.
    """

    __slots__ = ()

    @overload
    def __getitem__(self, index: SupportsIndex) -> HistoryEntry: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    def __getitem__(self, index: SupportsIndex | slice) -> HistoryEntry | History:
        found = super().__getitem__(index)
        return History(found) if isinstance(index, slice) else found  # type: ignore[arg-type, return-value]

    def to_pandas(self) -> Any:  # noqa: ANN401  a data frame; pandas is optional
        """Return a pandas data frame: times in UTC, a missing number as NaN."""
        pandas = load_extra("pandas")
        types = {"integer": "int64", "time": "Int64", "text": "object", "number": "float64", "truth": "boolean"}
        frame = {}
        for name, (kind, values) in self._columns().items():
            series = pandas.Series(values, dtype=types[kind])
            is_time = kind == "time"
            frame[name] = series.astype("datetime64[us]").dt.tz_localize("UTC") if is_time else series
        return pandas.DataFrame(frame)

    def to_arrow(self) -> Any:  # noqa: ANN401  a table; pyarrow is optional
        """Return a PyArrow table: times in UTC, what is missing as null."""
        arrow = load_extra("pyarrow")
        types = {
            "integer": arrow.int64(),
            "time": arrow.timestamp("us", tz="UTC"),
            "text": arrow.string(),
            "number": arrow.float64(),
            "truth": arrow.bool_(),
        }
        columns = self._columns().items()
        return arrow.table({name: arrow.array(values, types[kind]) for name, (kind, values) in columns})

    def _columns(self) -> dict[str, tuple[str, list[Any]]]:
        """Return the kind and the values of each column."""
        rows = [_values(entry) for entry in self]
        return {name: (column.kind, [row[i] for row in rows]) for i, (name, column) in enumerate(COLUMNS.items())}

    @with_usage("it takes a path, such as to_csv('history.csv'), or a file that is open for text")
    def to_csv(self, file: str | PathLike[str] | IO[str]) -> None:
        """Write CSV with a header to a path, replacing what is there, or to a file that is open for text.

        A text that a spreadsheet would take for a formula gets an apostrophe before it.
        """
        if isinstance(file, str | PathLike):
            with Path(file).open("w", encoding="utf-8", errors="backslashreplace", newline="") as opened:
                write_csv([self], opened)
            return
        try:
            file.write("")
        except (AttributeError, TypeError) as problem:
            raise InvalidArgument(
                f"file must be a path, or a file that is open for text (got {type_text(file)})"
            ) from problem
        write_csv([self], file)

    def __repr__(self) -> str:
        if not self:
            return "<History no entries>"
        steps = f"{len(self)} entr{'ies' if len(self) != 1 else 'y'}"
        return one_line("History", f"{steps}, {self[0].sequence} to {self[-1].sequence}, last {self[-1].verb}")

    def _repr_html_(self) -> str:
        head = ("entry", "time (UTC)", "verb", "cost", "by", "key", "note")
        return card("History", table(head, self, numbers=("entry",), cells=_cells_for_people))


def _cells_for_people(entry: HistoryEntry) -> tuple[object, ...]:
    cost, time = "" if entry.cost is None else entry.cost.brief(), f"{entry.time:%Y-%m-%d %H:%M:%S}"
    return entry.sequence, time, entry.verb, cost, entry.principal, entry.key_text, entry.note


def write_csv(pages: Iterable[Iterable[HistoryEntry]], file: IO[str]) -> None:
    """Write a history as CSV, page by page: only one page is in memory at a time."""
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for page in pages:
        writer.writerows(_cells(entry) for entry in page)


def _cells(entry: HistoryEntry) -> Iterator[object]:
    """Yield the cells of an entry: numbers as they are, times in ISO form, texts that no spreadsheet evaluates."""
    for column, value in zip(COLUMNS.values(), _values(entry), strict=True):
        if value is None:
            yield ""
        elif column.kind == "time":
            yield iso_time(value)
        elif column.kind == "truth":
            yield "true" if value else "false"
        else:
            yield cell_text(value) if column.kind == "text" else value


def history_entry(entry: Entry, principal: str, note: str) -> HistoryEntry:
    """Return a ledger's entry for its history, with the principal's name and the note, which are stored beside it."""
    until = entry.expires if entry.verb == "reserve" else None
    return HistoryEntry(
        entry.sequence, entry.time, entry.verb, entry.key, note, until, principal, entry.seal, sealed=entry
    )


class Events(NamedTuple):
    """Entries of many accounts that follow a cursor, and the cursor that follows them.

    An account's entries come in their order and without a gap; those of different accounts roughly by time.
    """

    entries: tuple[HistoryEntry, ...]
    after: str
    more: bool  # whether there were more entries already


NOW: Final = "now"  # in place of a cursor: after everything that there is
_MAX_CURSOR: Final = 1 << 24  # characters of an unpacked cursor


def cursor_to_text(positions: Mapping[str, int]) -> str:
    """Return a cursor: for each account, how many of its entries were read.

    One position for the whole ledger could not be sound: entries of different accounts are committed in another order
    than they are numbered or timed, so a later one can appear behind a position that was passed. The entries of one
    account are committed in the order of their sequence.
    """
    lines = "\n".join(f"{name} {count}" for name, count in sorted(positions.items()))
    return urlsafe_b64encode(zlib.compress(lines.encode(), 9)).decode().rstrip("=")


def cursor_from_text(text: str) -> dict[str, int]:
    """Read what `cursor_to_text` wrote, or raise `InvalidArgument`; an empty text is before everything."""
    try:
        packed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        unpacking = zlib.decompressobj()
        lines = unpacking.decompress(packed, _MAX_CURSOR) if text else b""
        if not text or unpacking.eof:
            return _positions_of(lines)
    except (ReservationNotFound, ValueError, zlib.error):
        pass
    raise InvalidArgument(
        f"after must be a cursor that was returned with earlier events, or {NOW!r} (got {shown(text)}); leave it out"
        " to begin with the first entry"
    )


def _positions_of(lines: bytes) -> dict[str, int]:
    """Read lines one by one; names rise, so what repeats, and is therefore short while it is packed, ends at once."""
    positions: dict[str, int] = {}
    last = ""
    for line in BytesIO(lines):
        name, count = parse_entry_id(line.decode().rstrip("\n").replace(" ", "#"))
        if name <= last:
            raise ValueError(name)
        positions[name], last = count, name
    return positions


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint:
    """The last entry of every account: kept elsewhere, it shows whether something was removed or rewritten since.

    `head` is one hash over all of it: enough to keep on paper, and to check this document by.
    """

    accounts: Mapping[str, tuple[int, str]]  # the last sequence and its seal, by name

    @property
    def head(self) -> str:
        """One hash over every account's name, sequence and seal."""
        return checkpoint_of((name, *last) for name, last in self.accounts.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `from_dict` reads."""
        accounts = {name: [str(sequence), seal] for name, (sequence, seal) in sorted(self.accounts.items())}
        return {"form": _FORM, "head": self.head, "accounts": accounts}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Checkpoint:
        """Read what `to_dict` wrote; anything else raises `LedgerCorrupt`."""
        try:
            if form["form"] != _FORM:
                raise LedgerCorrupt(f"not a checkpoint of form {_FORM}")
            found = cls({str(name): (int(number), str(seal)) for name, (number, seal) in form["accounts"].items()})
            intact = found.head == form["head"]
        except (AttributeError, LookupError, TypeError, ValueError) as problem:
            raise LedgerCorrupt(f"not a checkpoint of form {_FORM}: {explain(problem)}") from problem
        if not intact:
            raise LedgerCorrupt("the checkpoint's own hash does not fit its content: it was damaged or changed")
        return found

    def __repr__(self) -> str:
        count = len(self.accounts)
        return one_line("Checkpoint", f"of {count} account{'s' * (count != 1)}, head {self.head}")

    def _repr_html_(self) -> str:
        rows = [(name, sequence, seal) for name, (sequence, seal) in sorted(self.accounts.items())]
        last = table(("account", "last entry", "seal"), rows, numbers=("last entry",))
        return card("Checkpoint", facts({"head": self.head}), last)

    def __str__(self) -> str:
        return self.head


@dataclass(frozen=True, slots=True, repr=False)
class Verification:
    """The result of a complete replay without errors.

    `uncertified` names the accounts whose limits this installation has not certified: their entries follow from each
    other, but it is not known here whether the limits keep the promise.
    """

    checkpoint: Checkpoint
    entries: int
    notes_erased: int
    principals_erased: int
    uncertified: tuple[str, ...] = ()  # accounts whose limits nothing in this installation certifies
    set_back: tuple[str, ...] = ()  # entries whose time is over an hour before that of the entry before them

    def to_dict(self) -> dict[str, Any]:
        """Return the result in plain types."""
        return {
            "verified": True,
            "entries": self.entries,
            "accounts": len(self.checkpoint.accounts),
            "notes_erased": self.notes_erased,
            "principals_erased": self.principals_erased,
            "set_back": [*self.set_back],
            "checkpoint": self.checkpoint.to_dict(),
            "uncertified": [*self.uncertified],
        }

    def __repr__(self) -> str:
        return one_line("Verification", str(self))

    def _repr_html_(self) -> str:
        named = {
            "entries": f"{self.entries:,}",
            "accounts": f"{len(self.checkpoint.accounts):,}",
            "notes erased": self.notes_erased or "",
            "principal names erased": self.principals_erased or "",
            "limits not certified here": ", ".join(self.uncertified),
            "the clock was set back before": ", ".join(self.set_back),
            "head": self.checkpoint.head,
        }
        return card("Verification", facts(named), label=badge("verified", "good"))

    def __str__(self) -> str:
        erased = [
            f"{count} {what}{'s' * (count != 1)} erased"
            for count, what in ((self.notes_erased, "note"), (self.principals_erased, "principal name"))
            if count
        ]
        accounts = len(self.checkpoint.accounts)
        counts = (
            f"{self.entries} entr{'ies' if self.entries != 1 else 'y'} of {accounts} account{'s' * (accounts != 1)}"
        )
        found = [f"verified: {counts} follow from each other and add up", *erased]
        if self.uncertified:
            found.append(f"limits not certified here: {', '.join(self.uncertified)}")
        if self.set_back:
            found.append(
                f"the clock was set back before {self.set_back[0]}"
                + (f" and {len(self.set_back) - 1} more" if len(self.set_back) > 1 else "")
                + ": times before or after it are wrong"
            )
        return ", ".join(found)
