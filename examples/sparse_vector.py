"""Where are the people who see a doctor very often? Hundreds of questions for one charge, by the sparse vector.

The RAND Health Insurance Experiment again (see `drill_down.py`): in which groups did at least 200 person-years have
ten visits or more? The analyst asks about every combination of attributes, the narrowest first, and leaves out what
earlier answers settle. Nearly all answers are "no", and the sparse vector technique charges for three "yes" only:
it is an interactive mechanism, opened by `account.interact` and charged whole before the first question.

Each "yes" is followed up at once by an ordinary question of the same account, while the sparse vector is still open.

What is protected is one *person-year*, as in `drill_down.py`. All noise is OpenDP's.

Run it with `python examples/sparse_vector.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from fractions import Fraction
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import opendp.prelude as dp

import odograph as odo
from odograph.cli.demo import ATTRIBUTES, Rows

dp.enable_features("contrib")

EPSILON, DELTA, UNIT = 1, 1e-6, "person-year"
OFTEN, LIMIT = 10, 200  # visits; person-years
FINDS = 3
SPARSE, FOLLOW_UP = 0.5, 0.05  # epsilons

Group = dict[str, str]
NUMBER = dp.atom_domain(T=int), dp.absolute_distance(T=int)


def matching(data: Rows, group: Group) -> int:
    """Count the rows of a group with many visits; a row added or removed moves it by at most 1. It is private."""
    conditions = [data.attributes[name] == value for name, value in group.items()]
    return int(np.logical_and.reduce([data.visits >= OFTEN, *conditions]).sum())


class Noise(NamedTuple):
    """The noise of a sparse vector: on the limit, once, and on every count."""

    limit: dp.Measurement
    count: dp.Measurement

    @classmethod
    def of(cls, epsilon: float, finds: int = FINDS) -> Noise:
        """Divide epsilon between the two in the proportion that Lyu, Su and Li (2017) found best."""
        share = 1 / (1 + (2 * finds) ** (2 / 3))
        scales = 1 / (share * epsilon), 2 * finds / ((1 - share) * epsilon)
        return cls(*(dp.m.make_laplace(*NUMBER, scale=scale) for scale in scales))

    def cost(self, finds: int = FINDS) -> odo.PureDP:
        """Return the cost of all answers, up to the last "yes", from OpenDP's maps of the noise.

        Theorem: Lyu, Su and Li 2017, for their Algorithm 1: counts that move by 1 are compared with one noisy limit,
            and only a "yes" pays for its count. Shifting the limit by 1, and the noise of each "yes" by 2, turns the
            answers about one dataset into those about a neighbor; noise on integers is shifted by integers.
        Assumes: it stops after the last "yes", and never shows a noisy count.
        """
        return odo.PureDP(Fraction(self.limit.map(1)) + finds * Fraction(self.count.map(2)))


def sparse_vector(data: Rows, noise: Noise, finds: int = FINDS) -> Generator[bool | None, Group]:
    """Answer whether groups reach the limit, until `finds` of them do: Algorithm 1 of Lyu, Su and Li (2017)."""
    limit = noise.limit(LIMIT)
    answer = None
    while finds:
        group = yield answer
        answer = bool(noise.count(matching(data, group)) >= limit)
        finds -= answer
    yield answer


def groups() -> Iterator[Group]:
    """Yield every combination of attributes and values, those with the most conditions first."""
    for size in range(len(ATTRIBUTES), 0, -1):
        for names in combinations(ATTRIBUTES, size):
            for values in product(*(ATTRIBUTES[name] for name in names)):
                yield dict(zip(names, values, strict=True))


def find(account: odo.Account, data: Rows) -> tuple[list[tuple[Group, int]], int]:
    """Return the groups that were found, with noisy counts, and how many questions were asked for them."""
    noise, follow_up = Noise.of(SPARSE), dp.m.make_laplace(*NUMBER, scale=1 / FOLLOW_UP)
    found: list[tuple[Group, int]] = []
    asked = 0
    with account.interact(sparse_vector, data, noise, cost=noise.cost()) as reaches, odo.session(account) as s:
        for group in groups():
            if any(group.items() <= narrower.items() for narrower, _ in found):
                continue  # it contains a group that reaches the limit
            asked += 1
            if reaches(group):
                found.append((group, s.run(follow_up, matching(data, group), d_in=1)))
            if len(found) == FINDS:
                break
    return found, asked


def main() -> None:
    """Search, and say what it cost, beside what as many noisy counts would have."""
    account = odo.Accountant(odo.Policy(EPSILON, DELTA, privacy_unit=UNIT))
    found, asked = find(account, Rows.load())
    for group, count in found:
        print(f"{', '.join(f'{name}: {value}' for name, value in group.items())}: about {count}")
    print(f"{asked} questions, of which {len(found)} were answered yes:")
    for entry in account.history():
        if entry.verb in {"spend", "reserve"}:
            print(f"  {entry.note}: {entry.cost}")
    fresh = odo.Accountant(odo.Policy(EPSILON, DELTA, privacy_unit=UNIT))
    each = fresh.largest(odo.PureDP, times=asked)
    if each is not None:
        print(
            f"As {asked} noisy counts for the whole budget, each would have had noise of scale"
            f" {1 / float(each.epsilon):.0f}; here it is {2 * FINDS / SPARSE * (1 + (2 * FINDS) ** (-2 / 3)):.0f},"
            f" and {account.remaining:.0%} of the budget is left."
        )


if __name__ == "__main__":
    main()
