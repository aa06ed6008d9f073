"""`run` keeps to the conditions that a person's promise rests on: who looks elsewhere is refused, or sees nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from population_helpers import PopulationFactory, compiled_for, location_of, prices_of, took, versions_in

import odograph as odo
from odograph import GDP, Population, Prices, PureDP
from odograph.errors import IdempotencyConflict, InvalidArgument, InvalidGuarantee, OdographError
from odograph.population.engines.numpy import NumpyEngine
from odograph.population.prices import VectorizedPrice

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as PySpark leaves them

BASIC = compiled_for("basic")
COUNTED = 7731  # people, of which nothing may say the number
Array = NDArray[np.float64]


class Watched:
    """A mechanism that keeps what it was called with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, records: Any, **constants: Any) -> float:  # noqa: ANN401  whatever it is handed
        self.seen.append((records, constants))
        return float(len(records))


def half_spent(dense: PopulationFactory) -> Population:
    """Ten people, of whom the even ones have nothing left."""
    people = dense.create(10, compiled=BASIC)
    people.charge(Prices([PureDP(1)], [0] * 5, ids=range(0, 10, 2)), key="before")
    return people


def check_handed(dense: PopulationFactory) -> None:
    """Run a step of which half of the people are left out, and look at what the mechanism got."""
    people, watched = half_spent(dense), Watched()
    records = np.arange(20.0).reshape(10, 2)
    answer = people.run(watched, records, PureDP("0.1"), key="a", constants={"sigma": 3, "bound": 1.5})
    (nothing, constants), (given, others) = watched.seen
    assert constants == others == {"sigma": 3, "bound": 1.5}
    assert nothing.shape == (0, 2)
    assert nothing.dtype == given.dtype
    assert given.tolist() == records[1::2].tolist(), "others are there"
    assert given.base is None  # or whoever has a part could look at the whole
    assert answer == 5


def test_a_mechanism_is_handed_the_records_of_those_who_take_part_and_constants_and_nothing_else(
    dense: PopulationFactory,
) -> None:
    """Condition (a)."""
    check_handed(dense)


def test_an_engine_that_hands_over_everybody_is_caught(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyEngine, "records", lambda *arguments: arguments[-1])
    with pytest.raises(AssertionError, match="others are there"):
        check_handed(dense)


def test_a_mechanism_may_be_anything_that_can_be_called(dense: PopulationFactory) -> None:
    @dataclass
    class Scaled:  # equal ones are equal, so it has no hash
        scale: int

        def __call__(self, records: Array) -> int:
            return self.scale * len(records)

    assert half_spent(dense).run(Scaled(3), np.ones(10), PureDP("0.1"), key="a") == 15


def test_records_that_are_a_list_are_handed_on_as_a_list(dense: PopulationFactory) -> None:
    people, watched = half_spent(dense), Watched()
    people.run(watched, [f"record {one}" for one in range(10)], PureDP("0.1"), key="a")
    assert watched.seen == [([], {}), ([f"record {one}" for one in range(1, 10, 2)], {})]


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_where_people_have_no_order_records_are_a_table_with_their_ids(populations: PopulationFactory) -> None:
    people = populations.create([f"p{one}" for one in range(10)], compiled=BASIC)
    spent = [f"p{one}" for one in range(0, 10, 2)]
    people.charge(Prices([PureDP(1)], [0] * 5, ids=spent), key="before")
    seen: list[list[tuple[str, int]]] = []

    def noted(records: Any, name: str) -> str:  # noqa: ANN401  a relation or a data frame
        found = records.collect() if hasattr(records, "collect") else records.fetchall()
        seen.append(sorted((row[0], row[1]) for row in found))
        return name

    rows = [(f"p{one}", one * 7) for one in range(12)]
    records: Any = pd.DataFrame(rows, columns=["id", "value"])
    if populations.session is not None:
        records = populations.session.createDataFrame(rows, "id string, value bigint")
    assert people.run(noted, records, PureDP("0.1"), key="a", constants={"name": "first"}) == "first"
    assert seen == [[], [(f"p{one}", one * 7) for one in range(1, 10, 2)]]
    prices = Prices([PureDP(1), PureDP("0.5")], [0, 1], ids=["p1", "p3"])
    assert people.run(noted, records, prices, key="b", constants={"name": "second"}) == "second"
    assert seen[-1] == [("p3", 21)]
    with pytest.raises(OdographError):
        people.run(noted, records, lambda record, _: PureDP(record), key="c", constants={"name": "third"})
    assert len(people.history()) == 4


def test_a_mechanism_is_tried_on_nobody_before_anybody_is_charged(dense: PopulationFactory) -> None:
    """Condition (d): a step that could not answer would tell that everybody has dropped out."""
    people = dense.create(4, compiled=BASIC)
    for broken in (lambda records: 1 / len(records), lambda records: records[0]):
        with pytest.raises((ZeroDivisionError, IndexError)):
            people.run(broken, np.ones(4), PureDP("0.1"), key="a")
    assert len(people.history()) == 1
    assert people.outputs == []
    assert dense.state(people) == dict.fromkeys(range(4), (0, 0))


def test_a_step_runs_and_answers_with_nobody_left(dense: PopulationFactory) -> None:
    """Condition (d)."""
    people, watched = dense.create(4, compiled=BASIC), Watched()
    people.charge(PureDP(1), key="all")
    assert people.run(watched, np.ones(4), PureDP("0.1"), key="a") == 0
    nobody, empty = dense.create(0, name="nobody", compiled=BASIC), np.ones((0, 3))
    assert nobody.run(watched, empty, PureDP("0.1"), key="b") == 0
    assert nobody.run(watched, empty, lambda record, _: PureDP(record[0]), key="c") == 0
    assert nobody.run(watched, empty, odo.vectorized_price(PureDP)(lambda records, _: records[:, 0]), key="d") == 0


def test_a_price_is_found_from_one_record_and_the_past_outputs(dense: PopulationFactory) -> None:
    """Condition (b)."""
    people, calls = dense.create(3, compiled=BASIC), list[tuple[Any, ...]]()

    def pricing(record: float, outputs: Sequence[Any]) -> PureDP:
        calls.append((record, tuple(outputs)))
        return PureDP(round(record * (1 + sum(outputs)), 3))

    for key in "ab":
        people.run(lambda records: len(records) / 10, [0.0, 0.1, 0.5], pricing, key=key)
    assert calls == [(one, seen) for seen in ((), (0.3,)) for one in (0.0, 0.1, 0.5)]
    assert dense.state(people) == {0: (0, 0), 1: (0, 23 * 10**13), 2: (0, 5 * 10**14)}
    assert people.outputs == [0.3, 0.2]


def test_a_price_function_cannot_change_what_was_answered(dense: PopulationFactory) -> None:
    people = dense.create(1, compiled=BASIC)

    def meddling(record: float, outputs: Any) -> PureDP:  # noqa: ANN401  a sequence, which it would change
        del record
        if outputs:
            outputs[0] = "forged"
        return PureDP(0)

    people.run(lambda _: "true", [0.0], meddling, key="a")
    with pytest.raises(TypeError):
        people.run(lambda _: "true", [0.0], meddling, key="b")
    assert people.outputs == ["true"]


def shares_of_all(records: Array, outputs: Sequence[Any]) -> Any:  # noqa: ANN401  an array
    del outputs
    return records / records.sum()


def above_the_mean(records: Array, outputs: Sequence[Any]) -> Array:
    del outputs
    return np.where(records >= records.mean(), 0.5, 0.01)


def by_count(records: Array, outputs: Sequence[Any]) -> Array:
    del outputs
    return np.full(len(records), 1 / len(records))


@pytest.mark.parametrize("pricing", [shares_of_all, above_the_mean, by_count])
def test_a_price_that_depends_on_other_records_is_refused_before_anybody_is_charged(
    dense: PopulationFactory,
    pricing: Any,  # noqa: ANN401  any of these
) -> None:
    """Condition (b); one that looks at its own record only is not refused.

    Of the 50, at least 25 have another price alone, so that they are among any 32 that are tried.
    """
    people, watched = dense.create(50, compiled=BASIC), Watched()
    records = np.linspace(0.1, 0.5, 50)
    with pytest.raises(InvalidGuarantee, match="depends on other people's records") as caught:
        people.run(watched, records, odo.vectorized_price(PureDP)(pricing), key="a")
    assert "50" not in str(caught.value)
    assert len(people.history()) == 1
    assert people.run(watched, records, odo.vectorized_price(PureDP)(lambda own, _: own / 2), key="a") == 50


def test_without_pricing_a_few_again_such_a_price_is_not_seen(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: it is that which refuses, and nothing else."""
    monkeypatch.setattr("odograph.population.prices._SAMPLE_SIZE", 0)
    people = dense.create(50, compiled=BASIC)
    pricing = odo.vectorized_price(PureDP)(shares_of_all)
    assert people.run(Watched(), np.linspace(0.1, 0.5, 50), pricing, key="a") == 50


def test_what_vectorized_price_marks_prices_many_at_once_and_equals_one_after_the_other(
    dense: PopulationFactory,
) -> None:
    rng = np.random.default_rng(4)
    records = rng.random((200, 3))
    compiled = compiled_for("zcdp")
    one, many = (dense.create(200, name=name, compiled=compiled) for name in ("one", "many"))

    @odo.vectorized_price(GDP)
    def length(records: Array, outputs: Sequence[Any]) -> Any:  # noqa: ANN401  an array
        return np.linalg.norm(records, axis=1) / (5 + len(outputs))

    assert isinstance(length, VectorizedPrice)
    for number in range(3):

        def single(record: Array, outputs: Sequence[Any]) -> GDP:
            return Prices.of(GDP, [np.linalg.norm(record) / (5 + len(outputs))]).guarantees[0]  # type: ignore[return-value]

        first = one.run(Watched(), records, single, key=f"one {number}")
        assert many.run(Watched(), records, length, key=f"many {number}") == first
    assert dense.state(one) == dense.state(many)


@pytest.mark.parametrize("sizes", [lambda own, _: own[:-1], lambda own, _: own[:, None], lambda _, __: 0.1])
def test_sizes_must_be_one_for_each_record(dense: PopulationFactory, sizes: Any) -> None:  # noqa: ANN401  a wrong function
    people = dense.create(5, compiled=BASIC)
    with pytest.raises(InvalidGuarantee, match="one size for each record"):
        people.run(Watched(), np.ones(5), odo.vectorized_price(PureDP)(sizes), key="a")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_price_that_is_not_finite_is_refused_as_such_before_anybody_is_charged(
    dense: PopulationFactory, wrong: float
) -> None:
    people, records = dense.create(5, compiled=BASIC), np.array([0.1, 0.2, wrong, 0.3, 0.4])
    with pytest.raises(InvalidGuarantee, match=f"prices must be finite \\(got {wrong}\\)"):
        people.run(Watched(), records, odo.vectorized_price(PureDP)(lambda own, _: own), key="a")
    assert len(people.history()) == 1


@pytest.mark.parametrize(("price", "said"), [(lambda own, _: own / 10, "a float"), (lambda *_: [7731], "a list")])
def test_a_plain_function_that_returns_no_guarantee_is_told_about_vectorized_price(
    dense: PopulationFactory,
    price: Any,  # noqa: ANN401  a wrong function
    said: str,
) -> None:
    people = dense.create(3, compiled=BASIC)
    with pytest.raises(InvalidGuarantee, match=r"prices must be .*@odograph.vectorized_price\(PureDP\)") as caught:
        people.run(Watched(), [0.25, 0.5, 0.75], price, key="a")
    assert str(caught.value).endswith(f"returned {said}")
    assert "7731" not in str(caught.value)
    assert len(people.history()) == 1


@pytest.mark.parametrize(("wrong", "said"), [(shares_of_all, "a function"), (0.7731, "a float")])
def test_what_is_no_price_is_refused_by_its_type(dense: PopulationFactory, wrong: Any, said: str) -> None:  # noqa: ANN401
    people = dense.create(3, compiled=BASIC)
    with pytest.raises(InvalidGuarantee, match=rf"prices must be .* \(got {said}\)$") as caught:
        people.charge(wrong, key="a")
    assert caught.value.charged is False
    assert len(people.history()) == 1


def test_a_key_that_was_used_before_is_refused_and_runs_nothing(dense: PopulationFactory) -> None:
    people, watched = dense.create(3, compiled=BASIC), Watched()
    people.run(watched, np.ones(3), PureDP("0.1"), key="a")
    called = len(watched.seen)
    for again in (people, dense.open()):
        with pytest.raises(IdempotencyConflict, match="used before"):
            again.run(watched, np.ones(3), PureDP("0.1"), key="a")
    people.charge(PureDP("0.2"), key="b")
    with pytest.raises(IdempotencyConflict, match="used before"):
        people.run(watched, np.ones(3), PureDP("0.2"), key="b")
    with pytest.raises(IdempotencyConflict):
        people.noisy_active_count(PureDP("0.1"), PureDP("0.1"), key="a")
    assert [records.shape for records, _ in watched.seen[called:]] in ([], [(0,)])  # tried on nobody, at most
    assert people.outputs == [3]
    assert dense.state(people) == dict.fromkeys(range(3), (0, 3 * 10**14))


def test_records_that_are_not_one_for_each_person_are_refused_before_anybody_is_charged(
    dense: PopulationFactory,
) -> None:
    people = dense.create(5, compiled=BASIC)
    for records in (np.ones(4), np.ones(6), [1.0] * 4):
        for prices in (PureDP("0.1"), lambda _, __: PureDP("0.1")):
            with pytest.raises(InvalidArgument) as caught:
                people.run(Watched(), records, prices, key="a")
            assert "got more, or fewer" in str(caught.value)
            assert not set("456") & set(str(caught.value))
    assert dense.state(people) == dict.fromkeys(range(5), (0, 0)), "a step was charged that could not run"


def test_outputs_are_passed_on_by_the_handle_that_made_them(dense: PopulationFactory) -> None:
    people = dense.create(2, compiled=BASIC)
    answers = [
        people.run(lambda _, value: value, [1, 2], PureDP(0), key=f"{i}", constants={"value": i}) for i in "ab"
    ]
    assert answers == people.outputs == ["a", "b"]


def test_a_mechanism_is_called_with_no_more_than_it_takes() -> None:
    """`run` hands over records and named constants: the signature has no room for a number of people."""
    parameters = inspect.signature(Population.run).parameters
    assert [*parameters] == ["self", "mechanism", "records", "prices", "key", "note", "constants"]


def test_how_many_are_able_is_about_right_and_is_charged(populations: PopulationFactory) -> None:
    people = populations.create(400, compiled=BASIC)
    spent = {one: PureDP("0.6") for one in range(150)} | {one: PureDP(1) for one in range(150, 200)}
    people.charge(prices_of(spent), key="before")
    found = people.noisy_active_count(PureDP("0.35"), PureDP("0.25"), key="how many")
    # 150 could pay for one of them but not for both, and 50 for none.
    assert abs(found - 200) < 4 * 40  # scale 4, so farther away once in e^40 times
    assert isinstance(found, int)
    assert people.outputs == [found]
    state = populations.state(people)
    assert [state[one][1] for one in (0, 150, 200)] == [85 * 10**13, 10**15, 25 * 10**13]
    with pytest.raises(IdempotencyConflict, match="used before"):
        people.noisy_active_count(PureDP("0.35"), PureDP("0.25"), key="how many")
    assert took(people.charge(PureDP("0.75"), key="after")) == {*range(200, 400)}


def test_a_count_has_the_noise_that_it_is_charged_for(dense: PopulationFactory) -> None:
    """Laplace noise of scale 2: how far away it is on average, and it is not always the same."""
    people = dense.create(1000, compiled=BASIC)
    away = [people.noisy_active_count(PureDP(0), PureDP("0.5"), key=f"{i}") for i in range(2)]
    fresh = [dense.create(1000, name=f"p{i}", compiled=BASIC) for i in range(40)]
    away += [one.noisy_active_count(PureDP("0.1"), PureDP("0.5"), key=f"of {one.name}") for one in fresh]
    differences = [abs(one - 1000) for one in away]
    assert 0.8 < np.mean(differences) < 4.5
    assert len(set(away)) > 3
    assert (
        people.noisy_active_count(PureDP(0), PureDP("0.5"), key="spent") < 100
    )  # nobody could pay for being counted


def test_a_count_that_costs_nothing_or_cannot_be_priced_is_refused_before_anybody_is_charged(
    dense: PopulationFactory,
) -> None:
    people = dense.create(3, compiled=BASIC)
    for cost in (PureDP(0), GDP(1)):
        with pytest.raises(OdographError):
            people.noisy_active_count(PureDP("0.1"), cost, key="a")  # type: ignore[arg-type]
    assert len(people.history()) == 1


def mean_of(records: Any) -> float:  # noqa: ANN401  an array, as it needs
    """A mechanism that an array answers, and a list does not."""
    return float(records.sum() / max(1, records.size))


def test_a_series_reaches_prices_and_mechanism_as_an_array(dense: PopulationFactory) -> None:
    """Also for a mechanism that was tried with an array before, and under the first key."""
    people, watched = half_spent(dense), Watched()
    people.run(watched, np.arange(10.0), PureDP("0.01"), key="array")
    series = pd.Series(np.arange(1.0, 11) / 100)
    assert people.run(mean_of, np.arange(10.0), PureDP("0.01"), key="a") == 5
    assert people.run(mean_of, series, PureDP("0.01"), key="b") == pytest.approx(0.06)
    assert people.run(watched, series, odo.vectorized_price(PureDP)(lambda own, _: own / 10), key="c") == 5
    assert people.run(watched, series, lambda own, _: PureDP(round(float(own) / 10, 6)), key="d") == 5
    for given, _ in watched.seen:
        assert type(given) is np.ndarray
        assert given.dtype == np.float64
    words = pd.Series([f"record {one}" for one in range(10)], dtype="string")
    people.run(watched, words, PureDP("0.01"), key="e")
    assert watched.seen[-1][0].tolist() == [f"record {one}" for one in range(1, 10, 2)]


def test_a_series_whose_labels_are_not_the_order_of_ids_is_refused(dense: PopulationFactory) -> None:
    """Sorted, or read with other labels, a record would be taken for another person's."""
    people = half_spent(dense)
    series = pd.Series(np.arange(10.0))
    for wrong in (series[::-1], series.set_axis(range(1, 11)), series.set_axis(list("abcdefghij"))):
        with pytest.raises(InvalidArgument, match=r"to_numpy\(\)") as caught:
            people.run(mean_of, wrong, PureDP("0.01"), key="a")
        assert caught.value.charged is False
        assert people.run(mean_of, wrong.to_numpy(), PureDP(0), key=f"of {wrong.index[0]}") >= 0
    shuffled = series.sample(10, random_state=1)
    people.run(mean_of, shuffled.sort_index(), PureDP("0.01"), key="a")


class Unread:
    """A container of which nothing is known: it has a length and items."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> float:
        return ([7731.0] * 10)[place]


CONTAINERS: dict[str, Any] = {
    "Unread": Unread(),
    "dict": dict.fromkeys(range(10), 7731.0),
    "set": {7731.0 + one for one in range(10)},
    "bytes": b"7731773177",
    "generator": (7731.0 for _ in range(10)),
    "NoneType": None,
    "float": 7731.0,
    "ndarray": np.array(7731.0),
    "Index": pd.Index(np.full(10, 7731.0)),
}


def check_refused(dense: PopulationFactory, name: str) -> None:
    people, watched = dense.create(10, compiled=BASIC), Watched()
    people.run(watched, np.ones(10), PureDP("0.1"), key="a")  # it was tried on nobody, with another type
    with pytest.raises(InvalidArgument) as caught:
        people.run(watched, CONTAINERS[name], PureDP("0.1"), key="b")
    said = str(caught.value)
    assert re.search(rf"got (an? )?{name.removesuffix('Type')}\b", said)
    assert caught.value.charged is False
    assert "7731" not in said
    assert "10" not in said
    assert len(people.history()) == 2, "a step was charged that could not run"
    assert people.run(watched, np.ones(10), PureDP("0.1"), key="b") == 10, "the key is burnt"


@pytest.mark.parametrize("name", CONTAINERS)
def test_records_in_a_container_that_is_not_understood_are_refused_by_its_name(
    dense: PopulationFactory, name: str
) -> None:
    check_refused(dense, name)


def test_an_engine_that_takes_whatever_has_a_length_is_caught(
    dense: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: it hands over keys, and not records."""
    monkeypatch.setattr(NumpyEngine, "accept", lambda _, records: [*records])
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_refused(dense, "dict")


def columns_of(records: Any) -> int:  # noqa: ANN401  an array, or a list
    return int(records.shape[1])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.ones((4, 2)), [[1.0, 1.0]] * 4),
        (np.ones((4, 2)), np.ones(4)),
        (np.ones((4, 2)), pd.Series([1.0] * 4)),
        (np.ones((4, 2)), ((1.0, 1.0),) * 4),
    ],
    ids=["a list", "another shape", "a series", "a tuple"],
)
def test_a_mechanism_is_tried_on_nobody_again_for_each_type_of_records(
    dense: PopulationFactory,
    first: Any,  # noqa: ANN401  records
    second: Any,  # noqa: ANN401  records
) -> None:
    people = dense.create(4, compiled=BASIC)
    assert people.run(columns_of, first, PureDP("0.1"), key="a") == 2
    with pytest.raises((AttributeError, IndexError)):
        people.run(columns_of, second, PureDP("0.1"), key="b")
    assert len(people.history()) == 2, "a step was charged that could not run"
    assert people.run(columns_of, first, PureDP("0.1"), key="b") == 2


def test_a_mechanism_is_tried_on_nobody_again_for_other_constants_and_not_for_the_same(
    dense: PopulationFactory,
) -> None:
    people = dense.create(4, compiled=BASIC)
    calls: list[int] = []

    def scaled(records: Array, scale: float) -> float:
        calls.append(len(records))
        return float(records.sum()) * scale / 1

    for key, scale in (("a", 2.0), ("b", 3.0)):
        people.run(scaled, np.ones(4), PureDP("0.1"), key=key, constants={"scale": scale})
    assert calls == [0, 4, 4]
    for wrong in ({}, {"scale": None}, {"scale": 2.0, "bound": 1}):
        with pytest.raises(TypeError):
            people.run(scaled, np.ones(4), PureDP("0.1"), key="c", constants=wrong)
    assert len(people.history()) == 3
    people.run(scaled, np.ones(4), PureDP("0.1"), key="c", constants={"scale": 2.0})


@pytest.mark.parametrize("engine", ["duckdb", "spark"])
def test_tables_are_tried_again_for_other_columns_and_what_is_no_table_is_refused_by_its_name(
    populations: PopulationFactory,
) -> None:
    people = populations.create(4, compiled=BASIC)

    def table(**columns: Any) -> Any:  # noqa: ANN401  a data frame of pandas or Spark
        frame = pd.DataFrame({"id": range(4), **columns})
        if populations.session is None:
            return frame
        names = [*frame.columns]
        return populations.session.createDataFrame([tuple(row) for row in frame.to_numpy().tolist()], names)

    def total(records: Any) -> int:  # noqa: ANN401  a relation or a data frame
        if hasattr(records, "collect"):
            return len(records.select("value").collect())
        return len(records.project("value").fetchall())

    assert people.run(total, table(value=range(4)), PureDP("0.1"), key="a") == 4
    with pytest.raises(Exception, match="value") as caught:
        people.run(total, table(other=range(4)), PureDP("0.1"), key="b")
    assert not isinstance(caught.value, AssertionError)
    for name, wrong in (("Series", pd.Series([7731] * 4)), ("Unread", Unread()), ("set", {7731}), ("float", 0.7731)):
        with pytest.raises(InvalidArgument, match=rf"records must be .*\(got an? {name}\)") as refused:
            people.run(total, wrong, PureDP("0.1"), key="b")
        assert "7731" not in str(refused.value)
    assert len(people.history()) == 2
    assert people.run(total, table(value=range(4)), PureDP("0.1"), key="b") == 4


def test_a_mechanism_that_raises_says_what_stays_charged_and_how_to_go_on(dense: PopulationFactory) -> None:
    people = dense.create(COUNTED, compiled=BASIC)
    with pytest.raises(ZeroDivisionError) as caught:
        people.run(lambda records: 1 / (len(records) - COUNTED), np.ones(COUNTED), PureDP("0.1"), key="monday")
    (note,) = caught.value.__notes__
    assert note.startswith("Round 1 of 'people' stays charged under key 'monday'")
    assert "another key" in note
    assert str(COUNTED) not in note
    assert len(people.history()) == 2
    assert people.outputs == []


def check_kept(populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let others make steps after a charge, before its mechanism is handed the records, and again while it runs."""
    people, other, keys = populations.create(4, compiled=BASIC), populations.open(), iter("abcdefghijkl")
    engine = type(people._engine)  # noqa: SLF001  where the records come from
    handed, counted = engine.records, engine.count

    def steps() -> None:
        for _ in range(3):
            other.charge(PureDP("0.01"), key=next(keys))

    def late_records(*asked: Any) -> Any:  # noqa: ANN401  as `records`
        steps()
        return handed(*asked)

    def late_count(*asked: Any) -> int:
        steps()
        return counted(*asked)

    def size(records: Any) -> int:  # noqa: ANN401  an array or a relation
        if not isinstance(records, np.ndarray):
            steps()
            return len(records.fetchall())
        return len(records)

    monkeypatch.setattr(engine, "records", late_records)
    monkeypatch.setattr(engine, "count", late_count)
    records = np.ones(4) if populations.engine == "numpy" else pd.DataFrame({"id": range(4)})
    assert people.run(size, records, PureDP("0.1"), key="run") == 4
    assert isinstance(people.noisy_active_count(PureDP("0.1"), PureDP("0.1"), key="count"), int)
    other.charge(PureDP("0.01"), key="after")
    assert len(versions_in(location_of(people))) == 2, "a version is kept after the mechanism has run"


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_who_takes_part_is_kept_while_a_mechanism_runs_however_many_steps_others_make(
    populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the answer would be lost, and its step stay charged."""
    check_kept(populations, monkeypatch)


@pytest.mark.parametrize("engine", ["numpy", "duckdb"])
def test_a_version_that_is_removed_while_a_mechanism_runs_is_caught(
    populations: PopulationFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr("odograph.population.version_store.is_pinned", lambda _: False)
    with pytest.raises((OSError, OdographError)):
        check_kept(populations, monkeypatch)
