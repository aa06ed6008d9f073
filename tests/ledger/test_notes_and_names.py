"""Hostile names, keys and notes: refused with a clear error, or stored as they are; the same on every store."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial

import pytest

import odograph as odo
from odograph import Ledger, OdographError, Policy, PureDP
from odograph.errors import LedgerCorrupt

TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")
HOSTILE = [
    "",
    " ",
    " a",
    "a ",
    "a b",
    "\t",
    "a\nb",
    "a\rb",
    "a\x00b",
    "\x00",
    "\x1b[31mred",
    "a\x7fb",
    "a\x85b",
    "a\u2028b",
    "a\u202eb",
    "a\ufeffb",
    "\ud800",
    "a\udfffb",
    "\U0001f600",
    "\U0010ffff",
    "é",
    "e\u0301",
    "ß",
    "日本",
    "a#1",
    "#",
    "a/b",
    "../a",
    "/etc/passwd",
    "a\\b",
    "-",
    "--help",
    "-a",
    ".",
    "..",
    "a.b",
    "a:b@c+d_e-f",
    "'; DROP TABLE entries; --",
    '"',
    "a'b",
    "%",
    "%s",
    "{}",
    "$1",
    "?",
    ":name",
    "null",
    "None",
    "true",
    "0",
    "1e9",
    "a" * 100,
    "a" * 101,
    "a" * 200,
    "a" * 201,
    "é" * 100,
    "a" * 10_000,
    "a" * 10_001,
    "a" * 1_000_000,
    "erased",
    "top",
]
WRONG = [None, 0, 1.5, True, b"a", ["a"], ("a",), {"a": 1}, object()]


def told(action: Callable[[], object]) -> str:
    """What came of it: done, or the kind of the error. Other errors than ours are not caught: they are bugs."""
    try:
        action()
    except OdographError as problem:
        return type(problem).__name__
    return "done"


def below(ledger: Ledger, name: str, parent: str) -> None:
    ledger.open_account(name, BASIC, parent=parent)


def block(ledger: Ledger, name: str, dataset: str) -> None:
    ledger.open_account(name, BASIC, dataset=dataset)


def outcomes(ledger: Ledger) -> dict[tuple[str, str], str]:
    """Use every text in every place, and read back what was taken."""
    top = ledger.open_account("top", BASIC)
    found: dict[tuple[str, str], str] = {}
    for i, text in enumerate(HOSTILE):
        before = ledger.checkpoint()
        tries: dict[str, Callable[[str], object]] = {
            "name": lambda it: ledger.open_account(it, BASIC),
            "parent": partial(below, ledger, f"p{i}"),
            "dataset": partial(block, ledger, f"d{i}"),
            "key": lambda it: top.spend(PureDP(0), key=it),
            "note": lambda it: top.spend(PureDP(0), note=it),
            "reason": lambda it: top.reserve(PureDP(0)).void(it),
            "asked": ledger.account,
            "spent on": lambda it: ledger.spend({it: PureDP(0)}),
            "reservation": lambda it: ledger.void(it, "x"),
            "principal": lambda it: ledger.acting_as(it).account("top").spend(PureDP(0)),
            "erased note": ledger.erase_note,
        }
        for place, attempt in tries.items():
            outcome = told(partial(attempt, text))
            found[place, text] = outcome
            if outcome == "done" and place in FAITHFUL:
                assert FAITHFUL[place](ledger, text, i) == text, (place, text)
            if outcome != "done" and place in ("name", "parent", "dataset", "key", "note", "principal"):
                assert ledger.checkpoint() == before, (place, text)
            before = ledger.checkpoint()
    return found


FAITHFUL: dict[str, Callable[[Ledger, str, int], str]] = {
    "name": lambda ledger, it, _: next(one.name for one in ledger.accounts() if one.name == it),
    "dataset": lambda ledger, _, i: ledger.account(f"d{i}").dataset,
    "key": lambda ledger, it, _: ledger.account("top").spend(PureDP(0), key=it).key,
    "note": lambda ledger, _, __: ledger.account("top").history(-1, 1)[0].note,
    "reason": lambda ledger, _, __: ledger.account("top").history(-1, 1)[0].note,
    "principal": lambda ledger, _, __: ledger.account("top").history(-1, 1)[0].principal,
}


def test_hostile_texts_are_refused_or_kept_on_every_store_alike(ledger: Ledger) -> None:
    found = outcomes(ledger)
    checkpoint = ledger.verify().checkpoint
    with odo.connect("memory://", principal="ana") as twin:
        assert {place: told for place, told in outcomes(twin).items() if told != found[place]} == {}
    file = io.StringIO()
    ledger.export(file)
    file.seek(0)
    with odo.connect("memory://") as copy:
        copy.import_(file, checkpoint=checkpoint)
        assert [one.history(0, 10**4) for one in copy.accounts()] == [
            one.history(0, 10**4) for one in ledger.accounts()
        ]
    for place in ("name", "key", "note"):
        assert "done" in {told for (where, _), told in found.items() if where == place}, place
    for text in ("", "\x00", "a\x00b", "a\nb", "\ud800", "a#1", "a/b", "a b", "../a"):
        assert found["name", text] != "done", text
    for text in ("", "a\x00b", "a\nb", "\ud800"):
        assert found["key", text] != "done", text


def test_what_is_no_text_is_refused(ledger: Ledger) -> None:
    top = ledger.open_account("top", BASIC)
    before = ledger.checkpoint()
    for wrong in WRONG:
        attempts: list[Callable[..., object]] = [
            lambda it: ledger.open_account(it, BASIC),
            lambda it: ledger.open_account("a", BASIC, note=it),
            lambda it: top.spend(PureDP(0), note=it),
            ledger.account,
            ledger.commit,
            ledger.erase_note,
            ledger.erase_principal,
        ]
        if wrong is not None:
            attempts += [
                lambda it: top.spend(PureDP(0), key=it),
                lambda it: ledger.acting_as(it).account("top").spend(PureDP(0)),
                lambda it: ledger.open_account("a", BASIC, parent=it),
                lambda it: ledger.open_account("a", BASIC, dataset=it),
                lambda it: ledger.open_account("a", BASIC, successor_of=it),
                lambda it: ledger.open_account("a", BASIC, key=it),
            ]
        for i, attempt in enumerate(attempts):
            try:
                answer = attempt(wrong)
            except (OdographError, TypeError):
                continue
            assert answer is False, (i, wrong)  # nothing of that name was erased
    assert ledger.checkpoint() == before
    ledger.verify()


def test_a_message_does_not_repeat_a_long_text(ledger: Ledger) -> None:
    top = ledger.open_account("top", BASIC)
    long = "a" * 1_000_000
    for action in (ledger.account, ledger.commit, lambda it: top.spend(PureDP(0), key=it)):
        with pytest.raises(OdographError) as caught:
            action(long)
        assert len(str(caught.value)) < 1000


NOWHERE = ["", "x", "memory", "sqlite://", "sqlite:", "mysql://x", "memory://x", "file:///a", 3, None]


@pytest.mark.parametrize("where", NOWHERE)
def test_a_url_of_nothing_is_refused(where: str) -> None:
    with pytest.raises(OdographError):
        odo.connect(where).accounts()


NAMES = ['"ana"', '"z\\u0000e"', '"z\\ud800e"', '""', '"a\\nb"']


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_with_names_that_cannot_be_is_refused(ledger: Ledger, name: str) -> None:
    with odo.connect("memory://", principal="ana") as origin:
        origin.open_account("a", BASIC)
        origin.acting_as("zoe").account("a").spend(TENTH)
        file = io.StringIO()
        checkpoint = origin.export(file)
    text = file.getvalue()
    assert json.dumps("zoe") in text
    with pytest.raises(LedgerCorrupt):
        ledger.import_(io.StringIO(text.replace(json.dumps("zoe"), name)), checkpoint=checkpoint)


@pytest.mark.parametrize("action", ["commit", "reservation", "erase_note", "erase_principal"])
def test_half_a_surrogate_pair_is_no_name(url: str, action: str) -> None:
    with odo.connect(url) as ledger:
        ledger.open_account("a", BASIC)
        with pytest.raises(OdographError):
            getattr(ledger, action)("\ud800#1")


@pytest.mark.parametrize("where", ["postgresql://[bad", "sqlite:///a%00b"])
def test_a_url_that_cannot_be_is_refused(where: str) -> None:
    with pytest.raises(OdographError):
        odo.connect(where).open_account("a", BASIC)
