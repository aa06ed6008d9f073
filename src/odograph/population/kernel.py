"""The gate for a population: one filter per person, decided on arrays, a chunk at a time.

A person's totals are the same integers as everywhere. An account counts beside a total how often a step had no price
on it, and once it had none the meter decides nothing any more; here such a total is `SPENT`, one more than any limit
may be, and adding to it leaves it there. So a meter is one number, and to admit is to add and to compare.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from odograph.core.compiled import Compiled
from odograph.core.decide import Price, Totals
from odograph.core.units import CEILING
from odograph.errors import InvalidPolicy

__all__ = ["SPENT", "Amounts", "Column", "Gate", "Mask", "admit", "admit_some", "admitting", "gate_of"]

SPENT: Final = CEILING + 1
_CHUNK: Final = 1 << 18  # people at a time: what is read once is still in the processor's cache when it is written
_THREADS: Final = 4  # at most: a few of them are as fast as the memory

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]
# What each column is charged: one number for everybody, or one for each person.
Amounts = Sequence[int | Column]
_Meter = tuple[Column, int | Column, int]  # totals, what they are charged, and the limit


class Gate(NamedTuple):
    """What of a compiled policy decides about one person: the meters that have a limit, the delta meter first."""

    meters: tuple[int, ...]  # their places among the policy's meters
    limits: tuple[int, ...]

    def amounts(self, price: Price) -> tuple[int, ...]:
        """Return what a price adds to each column; `SPENT` where it has no price."""
        found = [price.amounts[place] for place in self.meters]
        return tuple([SPENT if amount is None else min(amount, SPENT) for amount in found])

    def totals(self, totals: Totals) -> tuple[int, ...]:
        """Return an account's totals as a person's: what was ever unpriced decides nothing any more."""
        return tuple([SPENT if totals.unpriced[place] else totals.amounts[place] for place in self.meters])


def gate_of(compiled: Compiled) -> Gate:
    """Return what of a policy decides about one person.

    Theorem: individual filters (Feldman and Zrnic): leaving out of each step whoever's own filter would refuse it
        keeps every person's promise, because a rule's proof speaks of one pair of neighbours at a time.
    Assumes: a step sees past outputs, public constants, coins and the records of those who take part; a price is a
        function of one's own record and past outputs, and bounds what one's record changes among any others; the
        step always answers; neighbours are add/remove.
    """
    if compiled.policy.neighbours != "add-remove":
        raise InvalidPolicy(
            f"a population needs neighbours='add-remove', not {compiled.policy.neighbours!r}: replacing a person"
            " changes what two people are charged for"
        )
    limited = [(place, meter.limit) for place, meter in enumerate(compiled.meters) if meter.limit is not None]
    return Gate(tuple([place for place, _ in limited]), tuple([limit for _, limit in limited]))


def admit(gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None) -> Mask:
    """Charge everybody who admits it, in place, and return who that is: row for row what `decide` decides.

    `totals` has one array per meter of the gate. `most` is what nobody can pass on each by this charge, where that is
    known: a limit or ceiling above it need not be looked for. Many people are shared among threads.
    """
    count = len(totals[0])
    mask = np.empty(count, dtype=np.bool_)
    charge = _Charge.of(gate, totals, amounts, (SPENT,) * len(totals) if most is None else most)
    threads = min(_THREADS, os.cpu_count() or 1, count // _CHUNK)
    if threads <= 1:
        charge.carry_out(range(count), mask)
        return mask
    borders = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(charge.carry_out, map(range, borders, borders[1:]), repeat(mask)))
    return mask


def admit_some(
    gate: Gate,
    totals: Sequence[Column],
    rows: NDArray[np.int64],
    amounts: Amounts,
    most: Sequence[int] | None = None,
) -> Mask:
    """Charge the people at some rows, each named once, in place; return who of them admits it."""
    own = [column[rows] for column in totals]
    mask = admit(gate, own, amounts, most)
    for column, after in zip(totals, own, strict=True):
        column[rows] = after
    return mask


def admitting(gate: Gate, totals: Sequence[Column], amounts: Sequence[int]) -> Mask:
    """Return who would admit a charge of one price, and charge nobody."""
    meters = zip(totals, amounts, gate.limits, strict=True)
    within, *alternatives = [column <= limit - amount for column, amount, limit in meters]
    return np.logical_and(within, np.logical_or.reduce(alternatives))


class _Charge(NamedTuple):
    """A charge for many people: the meters on which somebody may be refused, and those that are charged."""

    either: tuple[_Meter, ...]  # alternatives, one of which must hold; none if one always does
    within: tuple[_Meter, ...]  # the delta meter; none if it always holds
    charged: tuple[tuple[Column, int | Column, bool], ...]  # and whether the ceiling may be passed

    @classmethod
    def of(cls, gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int]) -> _Charge:
        known = [*zip(totals, amounts, gate.limits, most, strict=True)]
        meters = [(column, amount, limit) for column, amount, limit, _ in known]
        holds = [top <= limit for _, _, limit, top in known]
        charged = [
            (column, amount, top > CEILING)
            for column, amount, _, top in known
            if not (isinstance(amount, int) and amount == 0)
        ]
        return cls(() if any(holds[1:]) else tuple(meters[1:]), () if holds[0] else (meters[0],), tuple(charged))

    def carry_out(self, people: range, mask: Mask) -> None:
        """Charge some people, a chunk at a time, and say in the mask who admitted it."""
        size = min(len(people), _CHUNK)
        also_, numbers_, pattern_ = np.empty(size, np.bool_), np.empty(size, np.int64), np.empty(size, np.int64)
        for first in range(people.start, people.stop, _CHUNK):
            part = slice(first, min(first + _CHUNK, people.stop))
            own = mask[part]
            count = len(own)
            also, numbers, pattern = also_[:count], numbers_[:count], pattern_[:count]
            own.fill(not self.either)
            for column, amount, limit in self.either:
                _fits(column[part], _of(amount, part), limit, numbers, also)
                np.logical_or(own, also, out=own)
            for column, amount, limit in self.within:
                _fits(column[part], _of(amount, part), limit, numbers, also)
                np.logical_and(own, also, out=own)
            admitted = np.count_nonzero(own)
            if not admitted:
                continue
            everybody = admitted == count
            if not everybody:  # all bits for those who are charged, none for the others
                np.copyto(pattern, own)
                np.negative(pattern, out=pattern)
            for column, amount, may_pass in self.charged:
                totals, extra = column[part], _of(amount, part)
                if not everybody:
                    extra = np.bitwise_and(pattern, extra, out=numbers)
                np.add(totals, extra, out=totals)
                if may_pass:
                    np.minimum(totals, SPENT, out=totals)


def _of(amount: int | Column, part: slice) -> int | Column:
    return amount if isinstance(amount, int) else amount[part]


def _fits(column: Column, amount: int | Column, limit: int, numbers: Column, out: Mask) -> None:
    """Find where column + amount <= limit; neither side can pass 64 bits."""
    if isinstance(amount, int):
        np.less_equal(column, limit - amount, out=out)
        return
    np.add(column, amount, out=numbers)
    np.less_equal(numbers, limit, out=out)
