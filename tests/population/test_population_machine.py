"""Random populations and charges: every engine decides, and counts to the unit, as one account per person does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from population_helpers import RULES, Asked, Oracle, PopulationFactory, compiled_for, prices_of, took

import odograph as odo
from odograph import GDP, ZCDP, ApproxDP, Guarantee, PureDP
from odograph.display import Progress
from odograph.errors import IdempotencyConflict
from odograph.population.engines import EngineContext
from odograph.population.engines.numpy import NumpyEngine
from odograph.population.prices import PriceTable

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

SEEDS = SystemRandom()


def a_guarantee(rule_name: str, rng: Random) -> Guarantee:
    """Something that the rule takes: free, small, large, or more than anybody has."""
    size = rng.choice(["0", "1e-15", "0.05", "0.3", "0.5", "1", "1.5", f"{rng.random():.12f}"])
    kinds: list[Guarantee] = [PureDP(size), PureDP(size)]
    if rule_name != "shares":
        kinds.append(ApproxDP(size, rng.choice(["1e-7", "5e-7", "1e-6", "2e-6"])))
    if rule_name in ("zcdp", "renyi", "shares"):
        kinds.append(ZCDP(rng.choice(["0", "0.001", "0.01", "0.4"])))
    if rule_name in ("zcdp", "renyi", "exact", "shares"):
        kinds.append(GDP(rng.choice(["0", "0.05", "0.2", "1"])))
    return rng.choice(kinds)


class Twice:
    """A population and its oracle, moved on together."""

    def __init__(
        self, populations: PopulationFactory, rule_name: str, unknown: str, ids: list[Any], name: str = "people"
    ) -> None:
        compiled = compiled_for(rule_name)
        self.rule = rule_name
        self.populations = populations
        self.people = populations.create(ids, compiled=compiled, unknown=unknown, name=name)
        self.oracle = Oracle(compiled, unknown)
        self.oracle.join(ids)
        self.keys = (f"{name}-{number}" for number in count())
        self.members = ids

    def charge(self, asked: Asked) -> None:
        step = self.people.charge(prices_of(asked), key=next(self.keys))
        assert took(step) == self.oracle.charge(asked), "others take part"

    def charge_some(self, chosen: list[Any], rng: Random) -> None:
        menu = [a_guarantee(self.rule, rng) for _ in range(4)]
        self.charge({one: rng.choice(menu) for one in chosen})

    def move(self, rng: Random, news: Iterator[Any]) -> None:
        """Do anything."""
        kind = rng.randrange(10)
        some = rng.sample(self.members, rng.randint(0, len(self.members)))
        if kind < 2:
            self.charge(a_guarantee(self.rule, rng))
        elif kind < 7:
            newcomers = [next(news)] if rng.random() < 0.3 and self.oracle.unknown == "join" else []
            self.members += newcomers
            self.charge_some(some + newcomers, rng)
        elif kind == 7:
            newcomers = [next(news) for _ in range(rng.randint(0, 3))]
            self.members += newcomers
            self.people.join(np.array(some[:3] + newcomers), key=next(self.keys))
            self.oracle.join(some[:3] + newcomers)
        else:
            self.people.remove(np.array(some[:2]), key=next(self.keys))
            self.oracle.remove(some[:2])

    def check(self) -> None:
        assert self.populations.state(self.people) == self.oracle.state(), "totals differ"


def moved_about(
    populations: PopulationFactory, seed: int, steps: int, rule_name: str, *, strings: bool = False
) -> None:
    """Make a population, and move it on at random."""
    rng = Random(seed)  # noqa: S311  any moves will do
    names = (f"{one} ' \N{SNOWMAN} {one * 7}" if strings else one for one in count())
    first = [next(names) for _ in range(rng.randint(1, 40))]
    twice = Twice(populations, rule_name, rng.choice(["join", "leave-out"]), first, f"{rule_name}-{seed}")
    for _ in range(steps):
        twice.move(rng, names)
        twice.check()


@pytest.mark.parametrize("rule_name", RULES)
def test_every_engine_decides_and_counts_as_one_account_per_person(
    populations: PopulationFactory, rule_name: str
) -> None:
    """What all engines are equal to, they are equal in among each other."""
    seeds, steps = {"numpy": (3, 20), "duckdb": (1, 8), "spark": (1, 3)}[populations.engine]
    for _ in range(seeds):
        moved_about(populations, SEEDS.randrange(10**9), steps, rule_name)
    populations.ledger.verify()


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_people_may_be_called_anything_where_ids_are_stored(populations: PopulationFactory) -> None:
    moved_about(
        populations, SEEDS.randrange(10**9), 10 if populations.engine == "duckdb" else 4, "zcdp", strings=True
    )


def test_people_beyond_one_block_are_decided_as_all_others(dense: PopulationFactory) -> None:
    rng = Random(7)  # noqa: S311  any prices will do
    twice = Twice(dense, "zcdp", "join", [*range(65_530)])
    menu = [a_guarantee("zcdp", rng) for _ in range(5)]
    twice.charge({one: menu[one % 5] for one in range(65_530)})
    twice.charge({one: menu[one % 4] for one in range(65_500, 65_540)})
    twice.oracle.join(range(131_073))
    twice.people.join([131_072], key="join")
    twice.oracle.remove([65_535, 65_536, 131_072])
    twice.people.remove([131_072, 65_536, 65_535], key="remove")
    twice.charge(menu[0])
    twice.charge({one: menu[one % 3] for one in range(0, 131_073, 7)})
    twice.check()


class Machine(RuleBasedStateMachine):
    """A population of the NumPy engine beside plain Python: keys are used again, handles are opened again."""

    kernel: ClassVar[type[NumpyEngine]] = NumpyEngine

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.populations = PopulationFactory("numpy", self.stack.enter_context(odo.connect("memory://")), folder)
        self.used: dict[str, tuple[Asked, set[Any]]] = {}

    @initialize(
        rule_name=st.sampled_from(RULES), unknown=st.sampled_from(["join", "leave-out"]), size=st.integers(0, 9)
    )
    def start(self, rule_name: str, unknown: str, size: int) -> None:
        self.twice = Twice(self.populations, rule_name, unknown, [*range(size)])
        self.use(self.kernel())

    def use(self, kernel: NumpyEngine) -> None:
        self.twice.people._engine = kernel  # noqa: SLF001  a broken one, in a control

    @rule(seed=st.integers(0, 2**32), ids=st.lists(st.integers(0, 12), unique=True))
    def charge(self, seed: int, ids: list[int]) -> None:
        rng, oracle = Random(seed), self.twice.oracle  # noqa: S311  any prices will do
        if oracle.unknown == "join":  # these engines' people have no gaps
            ids = [*range(max(ids, default=-1) + 1)]
        asked: Asked = {one: a_guarantee(self.twice.rule, rng) for one in ids}
        if seed % 4 == 0:
            asked = a_guarantee(self.twice.rule, rng)
        key = f"key {len(self.used)}"
        found = took(self.twice.people.charge(prices_of(asked), key=key))
        assert found == oracle.charge(asked)
        self.used[key] = asked, found

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        if not self.used:
            return
        key = data.draw(st.sampled_from([*self.used]))
        asked, found = self.used[key]
        step = self.twice.people.charge(prices_of(asked), key=key)
        assert step.receipt.repeated
        if step.folder.exists():
            assert took(step) == found
        with pytest.raises(IdempotencyConflict):
            self.twice.people.charge(PureDP("0.123"), key=key)

    @rule(size=st.integers(0, 14))
    def join(self, size: int) -> None:
        self.twice.people.join(range(size), key=f"join {len(self.twice.people.history())}")
        self.twice.oracle.join(range(size))

    @rule(ids=st.lists(st.integers(0, 12), max_size=3))
    def remove(self, ids: list[int]) -> None:
        self.twice.people.remove(ids, key=f"remove {len(self.twice.people.history())}")
        self.twice.oracle.remove(ids)

    @rule()
    def open(self) -> None:
        self.twice.people = self.populations.open()
        self.use(self.kernel())

    @invariant()
    def counts_as_accounts_do(self) -> None:
        if hasattr(self, "twice"):
            self.twice.check()

    def teardown(self) -> None:
        self.stack.close()


SMALL_RUN = settings(max_examples=15, stateful_step_count=15, deadline=None)


def test_whatever_happens_to_a_population_each_person_is_charged_as_an_account_is() -> None:
    run_state_machine_as_test(Machine, settings=SMALL_RUN)


CONTROL = settings(SMALL_RUN, max_examples=200, database=None, phases=[Phase.generate], report_multiple_bugs=False)


class Forgetful(NumpyEngine):
    """Forgets what the last person of those who took part was charged."""

    def charge(
        self, context: EngineContext, before: Path, after: Path, prices: PriceTable, progress: Progress | None
    ) -> None:
        super().charge(context, before, after, prices, progress)
        last = self.participants(context, after)[-1:]
        for number in range(len(context.gate.limits)):
            old, new = (folder / f"total-{number}" for folder in (before, after))
            totals = np.fromfile(new, dtype=np.int64)
            kept = np.fromfile(old, dtype=np.int64)
            totals[last[last < len(kept)]] = kept[last[last < len(kept)]]
            new.unlink()
            totals.tofile(new)


def test_an_engine_that_forgets_one_persons_charge_is_caught() -> None:
    class Broken(Machine):
        kernel = Forgetful

    with pytest.raises(AssertionError, match="totals differ"):
        run_state_machine_as_test(Broken, settings=CONTROL)
