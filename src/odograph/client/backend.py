"""The verbs of a ledger behind a service: what each asks and how its answer is read, as steps that do no I/O.

Invalid arguments are refused before anything is sent, as by a local ledger. `RemoteBackend`, which `Ledger` and
`LedgerAccount` stand on, carries the steps out in threads; `AsyncLedger` and `AsyncAccount` do in an event loop.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import update_wrapper, wraps
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from odograph.client.transport import Caller, Refusal, Steps, Transport, quoted
from odograph.compile import compile_policy
from odograph.core.fixed_point import read
from odograph.core.gate import Decision
from odograph.core.guarantees import SIZED, Guarantee, guarantee_from_dict
from odograph.core.meters import Meter
from odograph.core.planning import (
    Calibration,
    CalibrationQuestion,
    G,
    Kind,
    Quote,
    iterable_costs,
    kind_of,
    largest_that,
)
from odograph.core.policy import Compiled, Policy
from odograph.display import Progress
from odograph.errors import (
    AccountNotFound,
    BudgetExceeded,
    InvalidArgument,
    InvalidGuarantee,
    LedgerCorrupt,
    LedgerNotFound,
    OdographError,
    RemoteError,
)
from odograph.ledger import transfer
from odograph.ledger.backend import Opened, check_costs, check_reason
from odograph.ledger.entries import (
    VERSION,
    Entry,
    check_key,
    check_name,
    check_note,
    parse_entry_id,
    price_from_text,
    text_of,
    totals_from_text,
)
from odograph.ledger.epochs import Schedule
from odograph.ledger.results import (
    Checkpoint,
    Events,
    HistoryEntry,
    Lifetime,
    Line,
    Receipt,
    Verification,
    history_entry,
)
from odograph.ledger.stores.base import Balance, Head

if TYPE_CHECKING:
    from odograph.client.population import RemotePopulation
    from odograph.ledger.ledger import Ledger

__all__ = [
    "Operations",
    "RemoteBackend",
    "balance_of",
    "decision_of",
    "history_entry_of",
    "lifetime_of",
    "maybe_of",
    "part_of",
    "quote_of",
    "receipt_of",
    "understood",
    "verification_of",
]

_PAGE: Final = 1000
_RESOLVERS: Final = ("owner", "runner")
_ACTING_KEY_LIFETIME: Final = 3600  # seconds

Form = Mapping[str, Any]
Meters = Callable[[str], tuple[Meter, ...]]  # of an account, by its name


class Operations:
    """The verbs of a ledger behind a service for one API key, each as steps that a transport carries out."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._call = caller.call
        self._who: dict[str, Any] = {}
        self._known: dict[str, Opened] = {}

    def principal(self) -> Steps[str]:
        """Return the principal of the API key, who writes."""
        return part_of((yield from self._me()), "principal", str)

    def resolves(self) -> Steps[bool]:
        """Return whether the key may commit and void."""
        return part_of((yield from self._me()), "role", str) in _RESOLVERS

    def version(self) -> Steps[str]:
        """Return the version of Odograph that the service runs."""
        return part_of((yield from self._call("GET", "/healthz")), "version", str)

    def acting_as(self, principal: str) -> Steps[Caller]:
        """Act as another principal, under a new key that expires in an hour; only an owner may."""
        form = {"principal": check_key(principal, "principal"), "role": "owner", "expires": _ACTING_KEY_LIFETIME}
        made = yield from self._call("POST", "/v1/keys", form, key=secrets.token_hex(16))
        return self.caller.under(part_of(made, "token", str))

    def open(self, head: Head, policy: Policy | Compiled, key: str | None, note: str) -> Steps[None]:
        """Open an account. The service solves for the policy; one with a menu is compiled here, with its items."""
        form: dict[str, Any] = {
            "name": head.name,
            "parent": head.parent,
            "successor_of": head.successor_of,
            "dataset": head.dataset,
            "note": check_note(note),
        }
        if isinstance(policy, Policy) and policy.menu:
            policy = compile_policy(policy)
        kind = "policy" if isinstance(policy, Policy) else "compiled"
        yield from self._call("POST", "/v1/accounts", form | {kind: policy.to_dict()}, key=_key(key), patient=True)

    def opened(self, name: str) -> Steps[Opened]:
        """Return what an account was opened with."""
        known = self._known.get(name)
        if known is None:
            form = yield from self._call("GET", f"{_path(name)}/terms")
            balance = balance_of(part_of(form, "account", dict))
            compiled = understood(Compiled.from_dict)(part_of(form, "compiled", dict))
            above = (yield from self.opened(balance.head.parent)).path if balance.head.parent else ()
            known = self._known[name] = Opened(balance.head, compiled, balance.origin, above)
        return known

    def close(self, name: str, note: str) -> Steps[None]:
        """Close an account and everything below it."""
        yield from self._call("POST", f"{_path(name)}/close", {"note": check_note(note)})

    def balances(self, names: Iterable[str] | None = None) -> Steps[dict[str, Balance]]:
        """Read balances: of the named accounts that there are, or of all that the key may see."""
        found = yield from self._rows() if names is None else self._named(names)
        return {balance.head.name: balance for balance in map(balance_of, found)}

    def charge(
        self,
        verb: str,
        costs: Mapping[str, Guarantee],
        key: str | None,
        note: str,
        expires: int | None = None,
    ) -> Steps[Receipt]:
        """Charge all or nothing; a lost response is requested again under the same key."""
        asked, what = _costs(costs), f"{verb}s" if verb == "spend" else "reservations"
        form: dict[str, Any] = {"note": check_note(note)}
        if expires is not None:
            form["expires"] = expires / 1e6
        if len(asked) == 1:
            ((name, cost),) = asked.items()
            path, form["cost"] = f"{_path(name)}/{what}", cost
        else:
            path, form["costs"] = f"/v1/{what}", asked
        try:
            receipt = receipt_of((yield from self._call("POST", path, form, key=_key(key))))
        except Refusal as refusal:
            refused = refusal.form
        else:
            if self._who and not receipt.principal:
                receipt = receipt._replace(principal=part_of(self._who, "principal", str))
            # A key that was made here was never used before: an answer that was asked for again is the first.
            return receipt._replace(repeated=False) if key is None else receipt
        raise BudgetExceeded(decision_of(refused, (yield from self._meters([refused]))))

    def resolve(self, verb: str, reservation: str, note: str) -> Steps[Receipt]:
        """Commit or void a reservation."""
        check_reason(verb, note)
        form = {"reason" if verb == "void" else "note": check_note(note)}
        return receipt_of((yield from self._call("POST", f"{_held(reservation)}/{verb}", form)))

    def reservation(self, reservation: str) -> Steps[Receipt]:
        """Return the receipt of a reservation."""
        return receipt_of((yield from self._call("GET", _held(reservation))))

    def pending(self, name: str) -> Steps[list[Receipt]]:
        """Return the unresolved reservations of an account."""
        found: list[Receipt] = []
        query: dict[str, int] | None = None  # which a service of version 0.1 would refuse
        while True:
            form = yield from self._call("GET", f"{_path(name)}/reservations", query=query)
            found += map(receipt_of, part_of(form, "reservations", list))
            if form.get("next") is None:
                return found
            query = {"first": part_of(form, "next", int)}

    def voids(self, name: str) -> Steps[int]:
        """Count the reservations charged to an account that were voided."""
        return part_of((yield from self._call("GET", _path(name))), "voids", int)

    def decide(self, costs: Mapping[str, Guarantee]) -> Steps[Decision]:
        """Return whether the accounts would admit their costs together."""
        asked = _costs(costs)
        found = yield from self._call("POST", "/v1/decide", {"costs": asked})
        last = [*asked][-1]  # an admission is the last account's, in the order of their names
        return decision_of(found, (yield from self._meters([found], last)), last)

    def quote(self, name: str, costs: Iterable[Guarantee]) -> Steps[Quote]:
        """Decide several costs in order, all or nothing."""
        form = {"costs": [_cost(cost) for cost in iterable_costs(costs)]}
        found = yield from self._call("POST", f"{_path(name)}/quote", form)
        return quote_of(found, (yield from self._meters(part_of(found, "decisions", list), name)), name)

    def largest(self, name: str, kind: Kind[G], times: int) -> Steps[G | None]:
        """Return the largest guarantee of a kind of which `times` equal requests are admitted, or None."""
        largest_that(kind, times, lambda *_: False)  # raises if the question is invalid
        form: dict[str, Any] = {"times": times}
        kind = kind_of(kind)
        if not isinstance(kind, type):
            form["like"] = kind.to_dict()
        elif kind.kind in SIZED:
            form["kind"] = kind.kind
        else:
            return None
        found = maybe_of((yield from self._call("POST", f"{_path(name)}/largest", form)), "largest", dict)
        return cast("G | None", None if found is None else understood(guarantee_from_dict)(found))

    def calibrate(self, name: str, question: CalibrationQuestion) -> Steps[Calibration | None]:
        """Return the least noise with which the requests of a question are all admitted, or None."""
        settings = dict(question.settings)
        form = {"mechanism": question.noise.name, "settings": settings, "times": question.times}
        found = maybe_of((yield from self._call("POST", f"{_path(name)}/calibrate", form)), "calibration", dict)
        return None if found is None else understood(question.answer)(part_of(found, "value", float))

    def how_many(self, name: str, cost: Guarantee) -> Steps[int]:
        """Return how many requests of this cost are admitted in a row."""
        form = {"cost": _cost(cost)}
        return part_of((yield from self._call("POST", f"{_path(name)}/how-many", form)), "how_many", int)

    def describe(self, name: str) -> Steps[dict[str, Any]]:
        """Return an account in plain types, as `Account.describe` does."""
        found: dict[str, Any] = yield from self._call("GET", _path(name))
        return found

    def lifetime(self, name: str) -> Steps[Lifetime | None]:
        """Return what an account and those linked to it promise together."""
        return lifetime_of(maybe_of((yield from self._call("GET", f"{_path(name)}/lifetime")), "lifetime", dict))

    def history(self, name: str, first: int, count: int) -> Steps[list[HistoryEntry]]:
        """Return a page of entries."""
        found: list[HistoryEntry] = []
        while len(found) < count:
            query = {"first": first + len(found), "count": min(_PAGE, count - len(found))}
            page = part_of((yield from self._call("GET", f"{_path(name)}/entries", query=query)), "entries", list)
            found += [history_entry_of(name, form) for form in page]
            if not page:
                break
        return found

    def events(self, after: str, count: int) -> Steps[Events]:
        """Return a page of the entries of all accounts that the key may see."""
        form = yield from self._call("GET", "/v1/events", query={"after": after, "count": min(_PAGE, count)})
        entries = [history_entry_of(one["account"], one) for one in part_of(form, "events", list)]
        return Events(tuple(entries), part_of(form, "after", str), part_of(form, "more", bool))

    def verify(self, checkpoint: Checkpoint | None, progress: Progress | None) -> Steps[Verification]:
        """Have the service replay everything."""
        transfer.check_checkpoint(checkpoint)
        form = {"checkpoint": None if checkpoint is None else checkpoint.to_dict()}
        found = verification_of((yield from self._call("POST", "/v1/verify", form, patient=True)))
        if progress is not None:
            progress(found.entries, found.entries)
        return found

    def checkpoint(self) -> Steps[Checkpoint]:
        """Return the last seal of every account."""
        return understood(Checkpoint.from_dict)((yield from self._call("GET", "/v1/checkpoint")))

    def erase_note(self, entry: str) -> Steps[bool]:
        """Erase the note of an entry."""
        name, sequence = parse_entry_id(entry)
        return part_of((yield from self._call("DELETE", f"/v1/notes/{quoted(f'{name}#{sequence}')}")), "erased", bool)

    def erase_principal(self, name: str) -> Steps[bool]:
        """Erase a principal's name."""
        path = f"/v1/principals/{quoted(check_key(name, 'principal'))}"
        return part_of((yield from self._call("DELETE", path)), "erased", bool)

    def forget(self) -> None:
        """Read again what accounts were opened with: a copy was read in."""
        self._known.clear()

    def _me(self) -> Steps[dict[str, Any]]:
        if not self._who:
            self._who = yield from self._call("GET", "/v1/me")
        return self._who

    def _meters(self, decisions: Sequence[Form], asked: str = "") -> Steps[Meters]:
        """Find the meters of the accounts that decided, or of `asked` where a decision names none."""
        found: dict[str, tuple[Meter, ...]] = {}
        for name in sorted({maybe_of(form, "account", str) or asked for form in decisions}):
            with suppress(AccountNotFound, InvalidArgument, LedgerNotFound):  # then the decision cannot be read
                found[name] = (yield from self.opened(name)).compiled.meters
        return found.__getitem__

    def _rows(self) -> Steps[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = yield from self._call("GET", "/v1/accounts", query={"after": after, "limit": _PAGE})
            rows += part_of(page, "accounts", list)
            after = maybe_of(page, "next", str)
        return rows

    def _named(self, names: Iterable[str]) -> Steps[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        for name in names:
            with suppress(AccountNotFound, LedgerNotFound):
                rows.append((yield from self._call("GET", f"{_path(name)}/balance")))
        return rows


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _carried_out(
    verb: Callable[Concatenate[Operations, _P], Steps[_T]],
) -> Callable[Concatenate[RemoteBackend, _P], _T]:
    """Return a verb of `Operations` as a method that carries its steps out."""

    def method(self: RemoteBackend, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.transport.run(verb(self.operations, *args, **kwargs))

    update_wrapper(method, verb)
    return method


class RemoteBackend:
    """The backend of `Ledger` and `LedgerAccount` for a ledger behind a service, reached with one API key."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.operations = Operations(transport.caller)

    @property
    def url(self) -> str:
        """Where the service is."""
        return self.transport.caller.url

    @property
    def principal(self) -> str:
        """The principal of the API key, who writes."""
        return self.transport.run(self.operations.principal())

    @property
    def resolves(self) -> bool:
        """Whether the key may commit and void."""
        return self.transport.run(self.operations.resolves())

    @property
    def version(self) -> str:
        """The version of Odograph that the service runs."""
        return self.transport.run(self.operations.version())

    def acting_as(self, principal: str) -> RemoteBackend:
        """Act as another principal, under a new key that expires in an hour; only an owner may."""
        caller = self.transport.run(self.operations.acting_as(principal))
        return RemoteBackend(self.transport.under(caller))

    open = _carried_out(Operations.open)
    opened = _carried_out(Operations.opened)
    close = _carried_out(Operations.close)
    balances = _carried_out(Operations.balances)
    charge = _carried_out(Operations.charge)
    resolve = _carried_out(Operations.resolve)
    reservation = _carried_out(Operations.reservation)
    pending = _carried_out(Operations.pending)
    voids = _carried_out(Operations.voids)
    decide = _carried_out(Operations.decide)
    quote = _carried_out(Operations.quote)
    largest = _carried_out(Operations.largest)
    calibrate = _carried_out(Operations.calibrate)
    how_many = _carried_out(Operations.how_many)
    lifetime = _carried_out(Operations.lifetime)
    history = _carried_out(Operations.history)
    events = _carried_out(Operations.events)
    verify = _carried_out(Operations.verify)
    checkpoint = _carried_out(Operations.checkpoint)
    erase_note = _carried_out(Operations.erase_note)
    erase_principal = _carried_out(Operations.erase_principal)

    def leave(self) -> None:
        """Close the connections."""
        self.transport.close()

    def export(self, file: IO[str], progress: Progress | None) -> Checkpoint:
        """Write the whole ledger as JSON Lines, if all of it arrived."""
        with TemporaryFile("w+", encoding="utf-8", newline="") as copy:
            self.transport.download("/v1/export", copy)
            copy.seek(0)
            ended: Checkpoint | None = None
            for number, piece in enumerate(transfer.lines(copy)):
                ended = piece if isinstance(piece, Checkpoint) else None
                if progress is not None and not number % _PAGE:
                    progress(number, 0)
            copy.seek(0)
            for line in copy:
                file.write(line)
        if ended is None:  # pragma: no cover  `lines` has raised before
            raise LedgerCorrupt("the export is incomplete")
        return ended

    def import_(self, file: IO[str], checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Send a copy to be read in; the service replays all of it."""
        transfer.check_checkpoint(checkpoint)

        def content() -> Iterator[bytes]:
            if checkpoint is not None:
                yield text_of({"against": checkpoint.to_dict()}).encode() + b"\n"
            for number, line in enumerate(file):
                if progress is not None and not number % _PAGE:
                    progress(number, 0)
                yield line.encode("utf-8", "surrogatepass")

        try:
            found = verification_of(self.transport.upload("/v1/import", content()))
        except UnicodeDecodeError as problem:
            raise LedgerCorrupt("an export is a text file in UTF-8; a backup is read with restore") from problem
        self.operations.forget()
        return found

    def backup(self, path: Path, progress: Progress | None) -> Checkpoint:
        """Copy the whole ledger into a new SQLite file here."""
        with TemporaryFile("w+", encoding="utf-8", newline="") as copy:
            self.transport.download("/v1/export", copy)
            copy.seek(0)
            return transfer.backup(transfer.lines(copy), path, progress)

    def restore(self, path: Path, checkpoint: Checkpoint | None, progress: Progress | None) -> Verification:
        """Send a backup that is here to be read in."""
        transfer.check_checkpoint(checkpoint)
        with transfer.open_backup(path) as snapshot, TemporaryFile("w+", encoding="utf-8", newline="") as copy:
            transfer.export(snapshot, copy)
            copy.seek(0)
            return self.import_(copy, checkpoint, progress)

    def population(self, ledger: Ledger, name: str, location: str | os.PathLike[str] | None) -> RemotePopulation:  # noqa: ARG002  of a local ledger
        """Return a population that the service keeps."""
        from odograph.client.population import RemotePopulation  # noqa: PLC0415  loaded when used

        _refuse_location(location)
        return RemotePopulation(self.transport, name)

    def create_population(  # noqa: PLR0913  the choices that are made once
        self,
        ledger: Ledger,
        name: str,
        policy: Policy | Compiled,
        *,
        location: str | os.PathLike[str] | None,
        key: str | None,
        note: str,
        renew: Schedule | None = None,
        **choices: str,
    ) -> RemotePopulation:
        """Have the service create a population, in a folder of its own."""
        _refuse_location(location)
        if renew is not None:
            raise InvalidArgument(
                f"renew must be left out for a service (got {renew}): a population renews where its database and"
                " files are; create it there, with its folder below the service's --population-root"
            )
        if isinstance(policy, Policy) and policy.menu:
            policy = compile_policy(policy)
        kind = "policy" if isinstance(policy, Policy) else "compiled"
        form = {"name": check_name(name), kind: policy.to_dict(), "note": check_note(note), **choices}
        self.transport.call("POST", "/v1/populations", form, key=_key(key), patient=True)
        return self.population(ledger, name, None)


def _path(name: str) -> str:
    return f"/v1/accounts/{quoted(check_name(name, 'account'))}"


def _refuse_location(location: object) -> None:
    if location is not None:
        raise InvalidArgument(
            f"location must be left out for a service, which has folders of its own (got {location})"
        )


def _held(reservation: str) -> str:
    name, sequence = parse_entry_id(reservation)
    return f"/v1/reservations/{quoted(f'{name}#{sequence}')}"


def _key(key: str | None) -> str:
    return secrets.token_hex(16) if key is None else check_key(key)


def _cost(cost: object) -> dict[str, Any]:
    if not isinstance(cost, Guarantee):
        raise InvalidGuarantee(f"cost must be a guarantee, such as PureDP(0.1) (got {cost!r})")
    return cost.to_dict()


def _costs(costs: Mapping[str, Guarantee]) -> dict[str, dict[str, Any]]:
    check_costs(costs)
    return {check_name(name, "account"): _cost(costs[name]) for name in sorted(costs)}


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_NUMBERS: Final = ("version", "sequence", "time")


def understood(read: Callable[_P, _T]) -> Callable[_P, _T]:
    """Raise `RemoteError` where a response cannot be read."""

    @wraps(read)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return read(*args, **kwargs)
        except RemoteError:
            raise
        except (OdographError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            raise RemoteError("the response is not one of this version of Odograph; is it Odograph?") from problem

    return checked


@understood
def part_of(form: Form, name: str, kind: type[_T]) -> _T:
    """Return a field of a response, if it is there and of its type."""
    part = form[name]
    if not isinstance(part, kind):
        raise TypeError(name)
    return part


@understood
def maybe_of(form: Form, name: str, kind: type[_T]) -> _T | None:
    """Return a field of a response that may be null."""
    return None if form[name] is None else part_of(form, name, kind)


@understood
def balance_of(row: Form) -> Balance:
    """Read an account in brief."""
    head = Head(
        row["name"], row["parent"], row["successor_of"], row["dataset"], row["privacy_unit"], row["neighbors"]
    )
    return Balance(
        head,
        row["sequence"],
        row["seal"],
        _time(row["time"]),
        totals_from_text(row["totals"]),
        row["closed"],
        row["linked"],
        row["origin"],
    )


@understood
def receipt_of(form: Form) -> Receipt:
    """Read a receipt."""
    lines = tuple(
        Line(line["account"], line["sequence"], guarantee_from_dict(line["cost"]), line["seal"])
        for line in form["accounts"]
    )
    lifetimes = tuple(filter(None, map(lifetime_of, form["lifetimes"])))
    expires = None if form["expires"] is None else _time(form["expires"])
    unsure = tuple(form.get("uncertified", ()))  # a service of version 0.1 does not send it
    time, again = _time(form["time"]), form["repeated"]
    notes = tuple(form.get("notes", ()))
    who = str(form.get("principal", ""))  # nor this
    return Receipt(
        form["verb"], form["key"], time, lines, expires, lifetimes, again, unsure, notes=notes, principal=who
    )


@understood
def lifetime_of(form: Form | None) -> Lifetime | None:
    """Read what linked accounts promise together."""
    if form is None:
        return None
    epsilon = None if form["epsilon"] is None else read(form["epsilon"], "epsilon")
    return Lifetime(tuple(form["accounts"]), epsilon, read(form["delta"], "delta"), str(form.get("schedule", "")))


@understood
def decision_of(form: Form, meters: Meters, asked: str = "") -> Decision:
    """Read a decision; `meters` finds those of the account that decided: `asked`, if it names none."""
    return Decision(
        admitted=form["admitted"],
        meters=meters(form["account"] or asked),
        totals=totals_from_text(form["totals"]),
        totals_after=totals_from_text(form["totals_after"]),
        price=price_from_text(form["price"]),
        request=None if form["request"] is None else guarantee_from_dict(form["request"]),
        largest=None if form["largest"] is None else guarantee_from_dict(form["largest"]),
        account=form["account"],
        notes=tuple(form.get("notes", ())),  # a service of version 0.1 does not send them
    )


@understood
def quote_of(form: Form, meters: Meters, asked: str) -> Quote:
    """Read the answer to a batch."""
    decisions = tuple(decision_of(one, meters, asked) for one in form["decisions"])
    return Quote(form["admitted"], decisions, totals_from_text(form["totals_after"]))


@understood
def history_entry_of(account: str, form: Form) -> HistoryEntry:
    """Read an entry; one that names accounts that the caller may not see comes without them."""
    if form["sealed"] is not None:
        fields = form["sealed"] | {name: int(form["sealed"][name]) for name in _NUMBERS}
        return history_entry(Entry(**fields), form["principal"], form["note"])
    expires = {} if form["expires"] is None else {"expires": str(_time(form["expires"]))}
    entry = Entry(
        version=VERSION,
        account=account,
        sequence=form["sequence"],
        time=_time(form["time"]),
        principal="",
        verb=form["verb"],
        legs=f"{account}#{form['sequence']}",
        cost="" if form["cost"] is None else text_of(form["cost"]),
        price=form["price"],
        key=form["key"],
        request="",
        note="",
        detail=json.dumps(expires) if expires else "",
        seal=form["seal"],
    )
    return history_entry(entry, form["principal"], form["note"])


@understood
def verification_of(form: Form) -> Verification:
    """Read what a replay found."""
    checkpoint = Checkpoint.from_dict(form["checkpoint"])
    return Verification(
        checkpoint,
        form["entries"],
        form["notes_erased"],
        form["principals_erased"],
        uncertified=tuple(form.get("uncertified", ())),  # a service of version 0.1 sends neither
        set_back=tuple(form.get("set_back", ())),
    )


def _time(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // _MICROSECOND
