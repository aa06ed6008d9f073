"""The gate for a population: one filter per person, decided on arrays, a chunk at a time.

A person's totals are the same integers as everywhere. An account counts beside a total how often a step had no price
on it, and once it had none the meter decides nothing any more; here such a total is `SPENT`, one more than any limit
may be, and adding to it leaves it there. So a meter is one number, and to admit is to add and to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from odograph.core.compiled import Compiled
from odograph.core.decide import Price, Totals
from odograph.core.units import CEILING
from odograph.errors import InvalidPolicy

__all__ = ["SPENT", "Amounts", "Column", "Gate", "Mask", "admit", "admit_some", "admitting", "gate_of"]

SPENT: Final = CEILING + 1
_CHUNK: Final = 1 << 16  # people at a time: what is read once is still in the processor's cache when it is written

Column = NDArray[np.int64]
Mask = NDArray[np.bool_]
# What each column is charged: one number for everybody, or one for each person.
Amounts = Sequence[int | Column]


class Gate(NamedTuple):
    """What of a compiled policy decides about one person: the meters that have a limit, the delta meter first."""

    meters: tuple[int, ...]  # their places among the policy's meters
    limits: tuple[int, ...]

    def start(self) -> tuple[int, ...]:
        """Return the totals of somebody who has spent nothing."""
        return (0,) * len(self.meters)

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
    known: below the ceiling it need not be looked for.
    """
    count = len(totals[0])
    mask = np.empty(count, dtype=np.bool_)
    work = _Work(min(count, _CHUNK))
    for first in range(0, count, _CHUNK):
        part = slice(first, min(first + _CHUNK, count))
        columns = [column[part] for column in totals]
        asked = [amount if isinstance(amount, int) else amount[part] for amount in amounts]
        _admit_chunk(gate, columns, asked, mask[part], work, most)
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
    numbers, also = totals[0], np.empty(len(totals[0]), dtype=np.bool_)
    mask = np.zeros_like(also)
    within, *alternatives = zip(totals, amounts, gate.limits, strict=True)
    for column, amount, limit in alternatives:
        _fits(column, amount, limit, numbers, also)
        np.logical_or(mask, also, out=mask)
    _fits(*within, numbers, also)
    return np.logical_and(mask, also, out=mask)


class _Work:
    """Room for what is found on the way, made once."""

    def __init__(self, size: int) -> None:
        self.also = np.empty(size, dtype=np.bool_)
        self.numbers = np.empty(size, dtype=np.int64)
        self.pattern = np.empty(size, dtype=np.int64)


def _admit_chunk(  # noqa: PLR0913, PLR0917  a chunk, and room to work in
    gate: Gate, columns: Sequence[Column], amounts: Amounts, mask: Mask, work: _Work, most: Sequence[int] | None
) -> None:
    count = len(mask)
    also, numbers, pattern = work.also[:count], work.numbers[:count], work.pattern[:count]
    within, *alternatives = zip(columns, amounts, gate.limits, strict=True)
    _fits(*alternatives[0], numbers, mask)  # basic composition is always one
    for column, amount, limit in alternatives[1:]:
        _fits(column, amount, limit, numbers, also)
        np.logical_or(mask, also, out=mask)
    _fits(*within, numbers, also)
    np.logical_and(mask, also, out=mask)
    admitted = np.count_nonzero(mask)
    if not admitted:
        return
    everybody = admitted == count
    if not everybody:  # all bits for those who are charged, none for the others
        np.copyto(pattern, mask)
        np.negative(pattern, out=pattern)
    tops = [SPENT] * len(columns) if most is None else most
    for column, amount, top in zip(columns, amounts, tops, strict=True):
        if isinstance(amount, int) and amount == 0:
            continue
        if everybody:
            np.add(column, amount, out=column)
        else:
            np.bitwise_and(pattern, amount, out=numbers)
            np.add(column, numbers, out=column)
        if top > CEILING:
            np.minimum(column, SPENT, out=column)


def _fits(column: Column, amount: int | Column, limit: int, numbers: Column, out: Mask) -> None:
    """Find where column + amount <= limit; neither side can pass 64 bits."""
    if isinstance(amount, int):
        np.less_equal(column, limit - amount, out=out)
        return
    np.add(column, amount, out=numbers)
    np.less_equal(numbers, limit, out=out)
