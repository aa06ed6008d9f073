"""The written form of entries: texts read back as they were, seals that change with any field, checkpoint hashes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from odograph import Checkpoint, OdographError
from odograph.core.gate import Price, Totals
from odograph.errors import LedgerCorrupt, ReservationNotFound
from odograph.ledger import entries as entries_module
from odograph.ledger.entries import (
    START,
    Entry,
    Leg,
    check_key,
    check_name,
    check_note,
    checkpoint_of,
    digest_of,
    key_owner,
    legs_from_text,
    moment,
    note_digest,
    parse_entry_id,
    price_from_text,
    price_to_text,
    sealed,
    text_of,
    totals_from_text,
    totals_to_text,
)


def legs_to_text(some: Iterable[Leg]) -> str:
    """What an entry says of its legs: `jan#5/all#17 feb#3/all#18`."""
    return " ".join("/".join(f"{name}#{sequence}" for name, sequence in leg.entries) for leg in some)


amounts = st.integers(0, 2**61)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,20}", fullmatch=True)
entry_ids = st.tuples(names, st.integers(0, 10**12))
legs = st.lists(
    st.lists(entry_ids, min_size=1, max_size=4).map(lambda some: Leg(tuple(some))), min_size=1, max_size=4
)
# No field holds a line break: names, keys and documents cannot.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20)
entries = st.builds(
    Entry,
    version=st.integers(1, 9),
    account=names,
    sequence=st.integers(0, 10**9),
    time=st.integers(0, 2**52),
    principal=texts,
    verb=st.sampled_from(["open", "spend", "reserve", "commit", "void", "refuse", "close"]),
    legs=legs.map(legs_to_text),
    cost=texts,
    price=texts,
    key=texts,
    request=texts,
    note=texts,
    detail=texts,
    seal=st.just(START),
)


def totals_of(width: int) -> st.SearchStrategy[Totals]:
    row = st.lists(amounts, min_size=width, max_size=width).map(tuple)
    return st.builds(Totals, row, row, st.integers(0, 2**61))


@given(st.lists(st.none() | amounts, min_size=1, max_size=8).map(lambda some: Price(tuple(some))))
def test_prices_read_back(price: Price) -> None:
    text = price_to_text(price)
    assert price_from_text(text) == price
    assert "\n" not in text


@given(st.integers(1, 8).flatmap(totals_of))
def test_totals_read_back(totals: Totals) -> None:
    text = totals.to_text()
    spent, unpriced = (" ".join(map(str, row)) for row in (totals.amounts, totals.unpriced))
    assert text == f"{totals.steps};{spent};{unpriced}"
    assert totals_from_text(text) == totals


def read_what_was_written(some: list[Totals]) -> None:
    """The last texts that were written are not read a second time: each is still what it says, and no other is."""
    texts = [totals_to_text(totals) for totals in some]
    assert texts == [totals.to_text() for totals in some]
    assert [totals_from_text(text) for text in texts] == some
    assert [totals_from_text(f"{totals.steps + 1};{totals.to_text().partition(';')[2]}") for totals in some] == [
        totals._replace(steps=totals.steps + 1) for totals in some
    ]


@given(st.lists(st.integers(1, 3).flatmap(totals_of), max_size=10))
def test_totals_that_were_just_written_read_back(some: list[Totals]) -> None:
    read_what_was_written(some)


def test_many_totals_that_were_just_written_read_back_and_are_not_all_kept() -> None:
    read_what_was_written([Totals((i, 2 * i), (0, 0), i) for i in range(1000)])
    assert len(entries_module._WRITTEN) <= entries_module._MAX_WRITTEN  # noqa: SLF001  its size is the promise


@pytest.mark.parametrize("totals", [Totals((-1,), (0,), 1), Totals((1.5,), (0,), 1), Totals((True,), (0,), 1)])  # type: ignore[arg-type]
def test_totals_that_cannot_be_read_are_not_remembered(totals: Totals) -> None:
    text = totals_to_text(totals)
    with pytest.raises(ValueError, match="is not how totals are written"):
        totals_from_text(text)


def test_a_reader_that_returns_the_last_totals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Last(dict[str, Totals]):
        def get(self, _: object, default: object = None) -> Any:  # noqa: ANN401  as a dict's
            return next(reversed(self.values()), default)

    monkeypatch.setattr(entries_module, "_WRITTEN", Last())
    with pytest.raises(AssertionError):
        read_what_was_written([Totals((1,), (0,), 1), Totals((2,), (0,), 2)])


@given(legs)
def test_legs_read_back(some: list[Leg]) -> None:
    text = legs_to_text(some)
    assert legs_from_text(text) == tuple(some)
    assert [leg.own for leg in some] == [leg.entries[0] for leg in legs_from_text(text)]


@given(entry_ids)
def test_entry_ids_read_back(entry: tuple[str, int]) -> None:
    assert parse_entry_id(f"{entry[0]}#{entry[1]}") == entry


READERS: dict[str, tuple[Callable[[str], object], Callable[..., str]]] = {
    "price": (price_from_text, price_to_text),
    "totals": (totals_from_text, totals_to_text),
    "legs": (legs_from_text, legs_to_text),
}
written = st.text("0123456789 ;-#/ab.x+_\t٣", max_size=14)


@pytest.mark.parametrize("kind", READERS)
@given(text=written)
@example(text="")
@example(text=" ")
@example(text="-1")
@example(text="1 -1")
@example(text="+1")
@example(text="01")
@example(text="1_0")
@example(text="٣")
@example(text="a#1")
@example(text="a#01")
@example(text="a#-1")
@example(text="a#1 ")
@example(text="0;0;0")
@example(text="0;0 0;0")
@example(text="-1;0;0")
@example(text="+1;0;0")
@example(text="1;01;0")
def test_what_is_read_has_one_form_or_is_refused(kind: str, text: str) -> None:
    """Two texts for one value would be two seals for one entry."""
    read, write = READERS[kind]
    try:
        value = read(text)
    except (ValueError, OdographError):
        return
    assert write(value) == text


@given(st.text(max_size=10))
def test_what_is_no_place_is_refused(text: str) -> None:
    try:
        name, sequence = parse_entry_id(text)
    except ReservationNotFound:
        return
    assert f"{name}#{sequence}" == text


@given(entries, st.data())
def test_the_seal_changes_with_any_field(entry: Entry, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from([name for name in Entry._fields if name != "seal"]))
    other = data.draw(entries)
    changed = Entry(**{**entry._asdict(), field: getattr(other, field)})
    assume(changed != entry)
    assert changed.reseal(START) != entry.reseal(START)
    assert entry.reseal(START) == entry._replace(seal="x").reseal(START)
    assert entry.reseal("f" * 64) != entry.reseal(START)


@given(entries, entries)
def test_different_entries_have_different_seals(one: Entry, other: Entry) -> None:
    """Also when a text moves from one field to the next: fields are apart."""
    assume(one != other)
    assert one.reseal(START) != other.reseal(START)
    moved = one._replace(cost=one.cost + one.price, price="")
    assert (moved.reseal(START) == one.reseal(START)) == (moved == one)


def test_a_seal_over_fields_run_together_is_caught() -> None:
    """Negative control: without something between the fields two entries share a seal."""
    one = ("ab", "c", *"0123456789x")
    other = ("a", "bc", *"0123456789x")
    assert hashlib.sha256("".join(one).encode()).digest() == hashlib.sha256("".join(other).encode()).digest()
    assert sealed(START, one) != sealed(START, other)


@given(entries)
def test_a_seal_is_plain_sha256(entry: Entry) -> None:
    text = "\n".join([START, *(str(value) for value in entry[:-1])])
    assert entry.reseal(START) == sealed(START, entry[:-1]) == hashlib.sha256(text.encode()).hexdigest()


Heads = dict[str, tuple[int, str]]
seals = st.binary(min_size=32, max_size=32).map(bytes.hex)
heads = st.dictionaries(names, st.tuples(st.integers(0, 10**9), seals), max_size=5)


@given(heads)
def test_a_checkpoint_hash_is_one_of_all_accounts_in_any_order(some: Heads) -> None:
    rows = [(name, *place) for name, place in some.items()]
    assert checkpoint_of(rows) == checkpoint_of(reversed(rows)) == Checkpoint(some).head
    again = Checkpoint.from_dict(json.loads(json.dumps(Checkpoint(some).to_dict())))
    assert (dict(again.accounts), again.head) == (some, Checkpoint(some).head)


@given(heads, heads)
def test_checkpoints_of_different_ledgers_differ(one: Heads, other: Heads) -> None:
    assert (Checkpoint(one).head == Checkpoint(other).head) == (one == other)


@given(heads, st.data())
def test_a_changed_checkpoint_document_is_refused(some: Heads, data: st.DataObject) -> None:
    assume(some)
    form = Checkpoint(some).to_dict()
    name = data.draw(st.sampled_from(sorted(some)))
    way = data.draw(st.sampled_from(["gone", "further", "rewritten", "renamed"]))
    sequence, seal = form["accounts"].pop(name)
    if way == "further":
        form["accounts"][name] = [str(int(sequence) + 1), seal]
    elif way == "rewritten":
        form["accounts"][name] = [sequence, seal[::-1] + "0"]
    elif way == "renamed":
        form["accounts"][name + "0"] = [sequence, seal]
    with pytest.raises(LedgerCorrupt):
        Checkpoint.from_dict(form)


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=9)


@given(st.dictionaries(st.text(max_size=5), plain, max_size=5))
def test_a_document_has_one_text_without_line_breaks(form: dict[str, object]) -> None:
    text = text_of(form)
    assert json.loads(text) == form
    assert text_of(dict(reversed(form.items()))) == text
    assert "\n" not in text


Request = tuple[str, tuple[tuple[str, str], ...]]
requests = st.tuples(texts, st.lists(st.tuples(names, texts), max_size=3).map(tuple))


@given(requests, requests)
def test_requests_have_digests_of_their_own(one: Request, other: Request) -> None:
    assert (digest_of(*one) == digest_of(*other)) == (one == other)


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_note_s_digest_needs_its_salt(text: str, other: str) -> None:
    with suppress(UnicodeEncodeError):
        assert note_digest("0" * 32, text) != note_digest("1" * 32, text)
        assert (note_digest("0" * 32, text) == note_digest("0" * 32, other)) == (text == other)


@given(st.text())
def test_texts_that_are_taken_can_be_written(text: str) -> None:
    """What passes the checks is one line where it must be, and bytes can hold it."""
    for check in (check_name, check_key, check_note):
        try:
            taken = check(text)
        except OdographError:
            continue
        assert taken == text
        assert taken.encode().decode() == text
        assert "\0" not in text
        if check is not check_note:
            assert len(text.splitlines()) == 1
    with suppress(OdographError):
        assert parse_entry_id(f"{check_name(text)}#7") == (text, 7)
        assert legs_from_text(f"{text}#7/{text}#8") == (Leg(((text, 7), (text, 8))),)


def test_a_resolution_is_anybody_s_and_a_charge_is_one_s_own() -> None:
    assert {key_owner(verb, who) for verb in ("commit", "void") for who in ("ana", "ben")} == {""}
    assert {key_owner(verb, "ana") for verb in ("spend", "reserve", "open")} == {"ana"}


@given(st.integers(0, 2**52))
def test_time_is_whole_microseconds(time: int) -> None:
    assert Fraction(moment(time).microsecond, 10**6) == Fraction(time, 10**6) % 1
    assert moment(time + 1) > moment(time)
