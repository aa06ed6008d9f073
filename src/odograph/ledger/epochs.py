"""Budgets that renew: the epochs of a schedule, the account of each, and what they promise together.

Each epoch, a day, a week or a month, has an account of its own, linked to the one before it as its successor. The
epochs follow from the schedule alone. Which of them is current follows from the store's clock, which is compared
inside the transaction that opens the account. Pure.
"""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from itertools import count
from typing import Any, Final, NamedTuple

from odograph.core.fixed_point import brief_above, exact_of
from odograph.core.policy import Policy
from odograph.errors import AccountClosed, AccountNotFound, InvalidArgument, LedgerBusy, LedgerCorrupt
from odograph.ledger.commands import Author, Close, Open, Result
from odograph.ledger.entries import Entry, check_name, moment, shown, time_of
from odograph.ledger.stores.base import Changes, State, Wants, together

__all__ = [
    "EVERY",
    "Epoch",
    "Renew",
    "Renewal",
    "RenewalStep",
    "Schedule",
    "accounts_of",
    "current_account",
    "date_in",
    "next_step",
    "read_renewal",
    "scheduled",
]

EVERY: Final = ("daily", "weekly", "monthly")
_MOST_A_YEAR: Final = {"daily": 366, "weekly": 53, "monthly": 12}  # epochs that begin in one calendar year
_MAX_TIMES: Final = 10_000
_LAST_YEAR: Final = 9000  # so that no date is beyond what a date can be


class Epoch(NamedTuple):
    """The days from `first` up to `end`, which is the first day after it; in UTC."""

    number: int  # from 0 on
    first: date
    end: date

    @property
    def start_time(self) -> int:
        """When it begins, in microseconds since 1970."""
        return _midnight(self.first)

    @property
    def end_time(self) -> int:
        """When it is over, in microseconds since 1970."""
        return _midnight(self.end)


class Schedule(NamedTuple):
    """How often a budget renews, from which day on, and how long: `times`, or `until` a day, or without an end."""

    every: str
    first: date
    times: int | None = None
    until: date | None = None

    @property
    def length(self) -> int | None:
        """How many epochs there are; None without an end."""
        return self.times if self.until is None else self._number(self.until - timedelta(1)) + 1

    @property
    def end(self) -> date | None:
        """The first day after the last epoch; None without an end."""
        return self.until if self.times is None else self._first_day(self.times)

    def epoch_at(self, time: int) -> Epoch | None:
        """Return the epoch of a moment, in microseconds since 1970; None before the first and after the last."""
        day = moment(time).date()
        return None if day < self.first or self.is_over(time) else self._epoch(self._number(day))

    def is_over(self, time: int) -> bool:
        """Whether the last epoch has ended."""
        return self.end is not None and moment(time).date() >= self.end

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs in order."""
        return map(self._epoch, count() if self.length is None else range(self.length))

    def _epoch(self, number: int) -> Epoch:
        following = self._first_day(number + 1)
        return Epoch(number, self._first_day(number), following if self.until is None else min(following, self.until))

    def _number(self, day: date) -> int:
        """Return the number of the epoch that has a day, which is not before the first."""
        if self.every != "monthly":
            return (day - self.first).days // (7 if self.every == "weekly" else 1)
        months = (day.year - self.first.year) * 12 + day.month - self.first.month
        return months - (self._first_day(months) > day)

    def _first_day(self, number: int) -> date:
        """Return the first day of an epoch; a month without the day of `first` begins one on its last day."""
        if self.every != "monthly":
            return self.first + timedelta(number * (7 if self.every == "weekly" else 1))
        year, month = divmod(self.first.year * 12 + self.first.month - 1 + number, 12)
        return date(year, month + 1, min(self.first.day, monthrange(year, month + 1)[1]))

    def promise_text(self, policy: Policy) -> str:
        """Return what all epochs promise together, for people; without an end, what those of a year promise.

        Theorem: basic composition: filters with promises (e_i, d_i) together promise (sum e_i, sum d_i).
        Assumes: the schedule and the policy were fixed before the first answer, and no epoch has two accounts.
        """
        several = _MOST_A_YEAR[self.every] if self.length is None else self.length
        epsilon, delta = self.promise(policy)
        each = f"{several} times {policy.target}"
        total = each if epsilon is None else f"({brief_above(epsilon)}, {brief_above(delta)})-DP, {each}"
        if self.length is None:
            return (
                "no bound in total, because it renews without an end; the epochs that begin in one calendar year"
                f" promise at most {total}"
            )
        return f"at most {total}, {self.every} from {self.first} to {self.end}"

    def promise(self, policy: Policy) -> tuple[Fraction | None, Fraction]:
        """Return the exact sum of the promises of all epochs; without an end, of those of a calendar year.

        Its epsilon is None where the policy promises none.
        """
        several = _MOST_A_YEAR[self.every] if self.length is None else self.length
        epsilon = None if policy.epsilon is None else several * exact_of(policy.epsilon)
        return epsilon, several * exact_of(policy.delta)

    def __str__(self) -> str:
        end = "" if self.until is None else f" until {self.until}"
        return f"{self.every} from {self.first}{end if self.times is None else f', {self.times} times'}"


def scheduled(every: object, first: object, times: object = None, until: object = None) -> Schedule:
    """Return a schedule whose fields are given as text, as a file has them, or raise `InvalidArgument`."""
    if every not in EVERY:
        raise InvalidArgument(f"renew must be one of {', '.join(EVERY)} (got {shown(every)})")
    if times is not None and until is not None:
        raise InvalidArgument(f"times ({shown(times)}) and until ({shown(until)}) exclude each other: give one")
    begin, end = _date(first, "from"), None if until is None else _date(until, "until")
    if end is not None and end <= begin:
        raise InvalidArgument(f"until must be after from, {begin} (got {end})")
    if times is None:
        return Schedule(str(every), begin, None, end)
    text = str(times)
    if not (
        text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_TIMES)) and 0 < int(text) <= _MAX_TIMES
    ):
        raise InvalidArgument(f"times must be an integer from 1 to {_MAX_TIMES} (got {shown(times)})")
    return Schedule(str(every), begin, int(text))


def _date(value: object, field: str) -> date:
    day = date_in(value)
    if day is None or day.year > _LAST_YEAR:
        raise InvalidArgument(f"{field} must be a date such as 2026-11-01 (got {shown(value)})")
    return day


def date_in(value: object) -> date | None:
    """Return the date that a text is, written as 2026-11-01; None if it is not one."""
    try:
        day = date.fromisoformat(str(value))
    except ValueError:
        return None
    return day if day.isoformat() == value else None  # not 20261101 and not 2026-W44-7


class Renewal(NamedTuple):
    """A budget that renews: the name from which its accounts are named, and its schedule."""

    account: str
    schedule: Schedule

    def name_of(self, epoch: Epoch) -> str:
        """Return the name of an epoch's account, such as census@2026-11-01."""
        return check_name(f"{self.account}@{epoch.first}")

    def key_of(self, epoch: Epoch) -> str:
        """Return the idempotency key under which an epoch's account is opened."""
        return f"renew {self.account} {self.schedule}: {epoch.first}"

    def to_dict(self) -> dict[str, str]:
        """Return the fields, as text, that `read_renewal` finds in an account's first entry."""
        every, first, times, until = self.schedule
        fields = {"account": self.account, "renew": every, "from": first, "times": times, "until": until}
        return {name: str(value) for name, value in fields.items() if value is not None}


def read_renewal(entry: Entry) -> Renewal | None:
    """Return the schedule by which an account was opened, from its first entry; None if it was opened by itself."""
    form: Mapping[str, Any] | None = entry.details.get("renewal")
    if form is None:
        return None
    try:
        schedule = scheduled(form["renew"], form["from"], form.get("times"), form.get("until"))
        return Renewal(check_name(form["account"]), schedule)
    except (AttributeError, InvalidArgument, LookupError, TypeError) as problem:
        raise LedgerCorrupt(f"entry {entry.id}: its schedule cannot be read") from problem


def _midnight(day: date) -> int:
    return time_of(datetime(day.year, day.month, day.day, tzinfo=UTC))


def accounts_of(name: str, names: Iterable[str]) -> list[str]:
    """Return those of some accounts that are named as epochs of a name, oldest first: their dates sort as text."""
    epochs = (one for one in names if one.startswith(f"{name}@"))
    return sorted(one for one in epochs if date_in(one.removeprefix(f"{name}@")) is not None)


def current_account(name: str, closed: Mapping[str, bool]) -> str:
    """Return the newest epoch's account of a name; raise if there is none, or if it is closed.

    An older account is never current, also where it is open: its epoch is over. `closed` says of every account
    whether it is closed.
    """
    found = accounts_of(check_name(name), closed)
    if not found:
        raise AccountNotFound(
            f"{name!r} has no account of an epoch, such as '{name}@2026-11-01': `odograph renew` opens them by the"
            " schedule of a file"
        )
    if closed[found[-1]]:
        raise AccountClosed(
            f"{found[-1]!r} is the newest account of {name!r} and is closed; `odograph renew` opens the next one in"
            " the next epoch, if there is one"
        )
    return found[-1]


class RenewalStep(NamedTuple):
    """What is to be done now: an account to open after the previous one, or accounts whose epochs are over."""

    epoch: Epoch | None  # of now; None before the schedule begins and after it ends
    previous: str  # the newest account that exists; empty if there is none
    opens: str  # empty if the epoch has its account, or will not get one
    closes: tuple[str, ...]


def next_step(renewal: Renewal, closed: Mapping[str, bool], now: int) -> RenewalStep:
    """Return what renewing does at a time of the store's clock, given which accounts there are, closed or not.

    Only an epoch later than the newest account is opened. A missed epoch, or one to which the clock
    was set back, gets no account any more.
    """
    epoch, found = renewal.schedule.epoch_at(now), accounts_of(renewal.account, closed)
    newest = found[-1] if found else ""
    name = "" if epoch is None else renewal.name_of(epoch)
    opens = name if name > newest else ""
    kept = "" if renewal.schedule.is_over(now) or opens else newest
    return RenewalStep(epoch, newest, opens, tuple(one for one in found if one != kept and not closed[one]))


class Renew(NamedTuple):
    """Open the account of an epoch and close the previous one, together, if the store's clock is in the epoch.

    The clock is read inside the transaction, so a program that was held up does not open an epoch that is over, and
    of two programs that saw the same previous account open, the second finds it closed and does nothing.
    """

    open: Open
    epoch: Epoch
    closes: str  # the previous account, if it was open; empty otherwise
    read: int | None = None  # the sequence of the previous population's entry from which its people were taken

    @property
    def author(self) -> Author:
        """The principal, with the key of the epoch."""
        return self.open.author

    @property
    def wants(self) -> Wants:
        """What opening wants, and the previous account with everything below it."""
        return together([self.open.wants, Wants(trees=frozenset(filter(None, [self.closes])), opens=True)])

    def apply(self, state: State, changes: Changes) -> Result:
        """Open and close, or raise `LedgerBusy` if the state is no longer the one for which this was asked."""
        author = self.author
        if (author.principal, author.key) not in state.keys:
            if not self.epoch.start_time <= state.now < self.epoch.end_time:
                raise LedgerBusy(f"the epoch of {self.open.head.name!r} is not the current one; renew again")
            if self.closes and self.closes in state.balances and state.balances[self.closes].closed:
                raise LedgerBusy(f"{self.closes!r} was renewed or closed meanwhile; renew again")
            previous = state.balances.get(self.open.head.successor_of)
            if self.read is not None and (previous is None or previous.sequence != self.read):
                raise LedgerBusy(f"a round of {self.open.head.successor_of!r} was made meanwhile; renew again")
        made = self.open.apply(state, changes)
        if self.closes:  # it is there: opening its successor has looked
            Close(Author(author.principal, ""), self.closes).apply(state, changes)
        return made
