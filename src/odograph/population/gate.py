"""The gate for a population: one filter per person, decided on arrays, a chunk at a time.

A person's totals are the same integers as an account's. An account also counts, for each total, the steps that had no
price on that meter; after the first one the meter no longer decides. Here such a total is `SPENT`, one more than any
limit can be, and it stays there. So a meter is a single number, and admitting is an addition and a comparison.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from odograph.core.fixed_point import CEILING
from odograph.core.gate import Price, Totals
from odograph.core.policy import Compiled
from odograph.errors import InvalidPolicy

__all__ = ["SPENT", "Amounts", "Column", "Gate", "Mask", "admit", "admit_rows", "gate_of", "would_admit"]

SPENT: Final = CEILING + 1
_CHUNK: Final = 1 << 18  # people at a time: what is read is still in the processor's cache when it is written
_THREADS: Final = 4  # at most: a few threads saturate the memory bandwidth

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]
# The amount added to each column: one number for everyone, or one for each person.
Amounts = Sequence[int | Column]
_Meter = tuple[Column, int | Column, int]  # totals, the amounts added to them, and the limit


class Gate(NamedTuple):
    """The part of a compiled policy that decides for one person: the meters with a limit, the delta meter first."""

    meters: tuple[int, ...]  # their indices among the policy's meters
    limits: tuple[int, ...]

    def amounts(self, price: Price) -> tuple[int, ...]:
        """Return the amount that a price adds to each column; `SPENT` where it has none."""
        found = [price.amounts[i] for i in self.meters]
        return tuple([SPENT if amount is None else min(amount, SPENT) for amount in found])

    def totals(self, totals: Totals) -> tuple[int, ...]:
        """Return an account's totals in the form kept for a person: `SPENT` where a step had no price."""
        return tuple([SPENT if totals.unpriced[i] else totals.amounts[i] for i in self.meters])


def gate_of(compiled: Compiled) -> Gate:
    """Return the part of a policy that decides for one person.

    Theorem: individual filters (Feldman and Zrnic (2021)): leaving out of each round the people whose own filter
        would refuse it keeps every person's promise, because a filter's proof speaks of one pair of neighbors at a
        time.
    Assumes: a round sees past outputs, public constants, coins and the records of its participants; a price is a
        function of one's own record and past outputs, and bounds what one's record changes among any others; the
        round always answers; neighbors are add/remove.
    """
    if compiled.policy.neighbors != "add-remove":
        raise InvalidPolicy(
            f"a population needs neighbors='add-remove' (got {compiled.policy.neighbors!r}): replacing a person"
            " changes what two people are charged for"
        )
    if compiled.policy.is_unlimited:
        raise InvalidPolicy("a population needs a limit (got 'no limit'): personal balances are not read")
    limited = [(i, meter.limit) for i, meter in enumerate(compiled.meters) if meter.limit is not None]
    limited.sort(key=lambda pair: not compiled.meters[pair[0]].counts_delta)  # the delta meter, then the alternatives
    return Gate(tuple([i for i, _ in limited]), tuple([limit for _, limit in limited]))


def admit(gate: Gate, totals: Sequence[Column], amounts: Amounts, most: Sequence[int] | None = None) -> Mask:
    """Charge each person whose filter admits it, in place, and return the mask of who did: as `decide`, row by row.

    `totals` has one array per meter of the gate. `most` is an upper bound on the totals of each meter after this
    charge, if one is known: a limit or ceiling above it need not be checked. Large populations are split among
    threads.
    """
    count = len(totals[0])
    mask = np.empty(count, dtype=np.bool_)
    charge = _Charge.of(gate, totals, amounts, (SPENT,) * len(totals) if most is None else most)
    threads = min(_THREADS, os.cpu_count() or 1, count // _CHUNK)
    if threads <= 1:
        charge.apply(range(count), mask)
        return mask
    borders = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(charge.apply, map(range, borders, borders[1:]), repeat(mask)))
    return mask


def admit_rows(
    gate: Gate,
    totals: Sequence[Column],
    rows: NDArray[np.int64],
    amounts: Amounts,
    most: Sequence[int] | None = None,
) -> Mask:
    """Charge the people at some rows, each named once, in place; return the mask of who of them admitted it."""
    own = [column[rows] for column in totals]
    mask = admit(gate, own, amounts, most)
    for column, after in zip(totals, own, strict=True):
        column[rows] = after
    return mask


def would_admit(gate: Gate, totals: Sequence[Column], amounts: Sequence[int]) -> Mask:
    """Return the mask of who would admit a charge of one price, without charging."""
    meters = zip(totals, amounts, gate.limits, strict=True)
    within, *alternatives = [column <= limit - amount for column, amount, limit in meters]
    return np.logical_and(within, np.logical_or.reduce(alternatives))


class _Charge(NamedTuple):
    """A charge for many people: the meters on which a person may be refused, and those to which amounts are added."""

    either: tuple[_Meter, ...]  # alternatives, one of which must hold; empty if one always does
    within: tuple[_Meter, ...]  # the delta meter; empty if it always holds
    charged: tuple[tuple[Column, int | Column, bool], ...]  # and whether a total may pass the ceiling

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

    def apply(self, people: range, mask: Mask) -> None:
        """Charge some people, a chunk at a time, and write into the mask who admitted it."""
        size = min(len(people), _CHUNK)
        also_, numbers_, pattern_ = np.empty(size, np.bool_), np.empty(size, np.int64), np.empty(size, np.int64)
        for first in range(people.start, people.stop, _CHUNK):
            part = slice(first, min(first + _CHUNK, people.stop))
            own = mask[part]
            count = len(own)
            also, numbers, pattern = also_[:count], numbers_[:count], pattern_[:count]
            own.fill(not self.either)
            for column, amount, limit in self.either:
                _fits(column[part], _part_of(amount, part), limit, numbers, also)
                np.logical_or(own, also, out=own)
            for column, amount, limit in self.within:
                _fits(column[part], _part_of(amount, part), limit, numbers, also)
                np.logical_and(own, also, out=own)
            admitted = np.count_nonzero(own)
            if not admitted:
                continue
            everybody = admitted == count
            if not everybody:  # all bits set for the people who are charged, none for the others
                np.copyto(pattern, own)
                np.negative(pattern, out=pattern)
            for column, amount, may_pass in self.charged:
                totals, extra = column[part], _part_of(amount, part)
                if not everybody:
                    extra = np.bitwise_and(pattern, extra, out=numbers)
                np.add(totals, extra, out=totals)
                if may_pass:
                    np.minimum(totals, SPENT, out=totals)


def _part_of(amount: int | Column, part: slice) -> int | Column:
    return amount if isinstance(amount, int) else amount[part]


def _fits(column: Column, amount: int | Column, limit: int, numbers: Column, out: Mask) -> None:
    """Write into `out` where column + amount <= limit; neither side can overflow 64 bits."""
    if isinstance(amount, int):
        np.less_equal(column, limit - amount, out=out)
        return
    np.add(column, amount, out=numbers)
    np.less_equal(numbers, limit, out=out)
