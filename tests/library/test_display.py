"""What a notebook shows of every value: a short line, and HTML in which no text is markup."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import odograph as odo
from odograph import Accountant, Ledger, Policy, Population, PureDP, display
from odograph.display import Html, badge, card, clipped, facts, gauge, join, meters, one_line, paragraph, table

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;</td></table>'
TAGS = {"b", "circle", "div", "g", "path", "span", "svg", "table", "td", "text", "th", "tr"}


class Found(HTMLParser):
    """The tags, the attributes and the text of a piece of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def faults(shown: str) -> list[str]:
    """What HTML in a notebook must not have: scripts, resources, events, style sheets, tags that are left open."""
    try:
        found = Found(shown)
    except (AssertionError, IndexError):
        return ["tags that do not match"]
    wrong = [*(found.tags - TAGS), *(name for name in found.attributes if name.startswith("on"))]
    wrong += sorted(found.attributes & {"href", "src", "id", "class"})
    wrong += ["url" for _ in re.finditer(r"url\(|javascript:|@import", shown)]
    return wrong + ["left open"] * bool(found.open)


class Values:
    """One of every value that a cell can end in, made from texts."""

    def __init__(self, ledger: Ledger, folder: Path, text: str) -> None:
        self.ledger, self.folder, self.text = ledger, folder, text

    def __iter__(self) -> Iterator[Any]:
        ledger, text, note = self.ledger, self.text, f"{self.text}\u202e\n"
        policy = Policy(1, 1e-6)
        account = ledger.open_account("census", policy, note=note)
        below = ledger.open_account("below", policy, parent=account)
        yield from (policy, account.compiled, Policy(rho=1), Policy(None, 1e-6, slack=0.1), account)
        yield below.spend(PureDP(0.05), key=text, note=note)
        yield below.spend(PureDP(0.05), key=text, note=note)
        held = account.reserve(odo.gaussian(sigma=25), expires=timedelta(hours=1), note=note)
        yield from (held, held.void(note), held, account.reserve(PureDP(0)))
        yield from (account.decide(PureDP(0.1)), account.decide(PureDP(5)), account.decide(odo.ApproxDP(0.1, 1e-3)))
        yield account.quote([PureDP(0.1), PureDP(5)])
        yield from (account.quote([PureDP(0.01)] * 30), account.quote([]), account.reading(), account.compare()[1])
        yield from (account.calibrate(odo.laplace), account.history(), account.history(1, 1), account.history(99))
        yield from (*account.history(), ledger.verify(), ledger.checkpoint(), ledger)
        account.close(note=note)
        yield from (account, odo.session(account), ledger.account("below").parent)
        successor = ledger.open_account("next", policy, successor_of=account)
        yield from (successor.lifetime, successor.spend(PureDP(0.1)))
        with odo.session(successor) as session, successor.interact(lambda: len, cost=PureDP(0.1)) as interaction:
            yield from (session, interaction)
        yield interaction
        people = Population.create("people", policy, ledger=ledger, location=self.folder / "people", ids=3)
        taking_part = people.charge(PureDP(0.1), key=f"{text} again")
        yield from (people, taking_part, taking_part.receipt, people.charge(PureDP(0.1), key=f"{text} again").receipt)
        people.close()
        yield from (people, ledger)
        yield odo.dpsgd_policy(3, 1e-6, sample_rates=[0.01], noise_multipliers=[1, 2.5], filter="renyi")
        memory = Accountant(Policy(1, 1e-6, privacy_unit=text), name=text)
        yield from (memory, memory.policy, memory.spend(PureDP(0.1), key=text, note=note), memory.decide(PureDP(7)))
        yield from (memory.history(), memory.reserve(PureDP(0.1), note=note), odo.session(memory), memory)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The line and the HTML of every value, made from hostile texts where they may be."""
    folder = tmp_path_factory.mktemp("values")
    with odo.connect(f"sqlite:///{folder}/values.db", principal='<b onclick="x">') as ledger:
        return [(repr(value), value._repr_html_()) for value in Values(ledger, folder, HOSTILE)]


def test_every_value_has_html_without_markup_from_outside(values: list[tuple[str, str]]) -> None:
    assert len(values) > 50
    for line, shown in values:
        assert faults(shown) == [], line
    texts = " ".join(Found(shown).text for _, shown in values)
    assert texts.count("<script>alert(1)</script>") > 10  # as text
    assert "\u202e" not in texts


@pytest.mark.parametrize(
    "broken",
    [
        lambda parts: Html("".join(map(str, parts))),  # nothing is escaped
        lambda parts: Html("".join(str(part).replace("<script>", "") for part in parts)),  # one word is removed
    ],
)
def test_html_that_is_not_escaped_is_caught(
    broken: Callable[[Iterable[object]], Html], monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Accountant(Policy(1, 1e-6))
    account.spend(PureDP(0.1), note=HOSTILE)
    assert faults(account._repr_html_()) == []
    monkeypatch.setattr(display, "join", broken)
    assert faults(account._repr_html_()) != []


# With a promise, or what a reserve gives.
LONGER = ("<Accountant", "<Policy", "<Session on <Accountant")


def test_every_value_is_one_short_line(values: list[tuple[str, str]]) -> None:
    for line, _ in values:
        assert len(line) <= 120 or line.startswith(LONGER), line
        assert line.isprintable(), line


@given(st.text(), st.text(min_size=1))
def test_no_text_is_markup(text: str, name: str) -> None:
    parts = (paragraph(text), facts({name: text}), table((name, "number"), [(text, 1)] * 30, numbers=("number",)))
    shown = card(text, *parts, label=badge(text), side=gauge(0.5))
    assert faults(shown) == []
    assert Found(join([text])).text == text


@given(st.text(max_size=500))
def test_a_line_is_short_and_has_no_control_characters(text: str) -> None:
    line = one_line("Kind", text)
    assert len(line) <= 120
    assert line.isprintable()
    assert line.startswith("<Kind ")


def test_a_line_is_cut_between_words() -> None:
    assert one_line("Kind", "word " * 50).endswith(" word...>")
    assert len(one_line("Kind", "x" * 500)) == 120
    assert clipped("x" * 200) == "x" * 157 + "..."


def test_of_a_long_table_the_ends_are_shown_and_the_rest_counted() -> None:
    asked: list[int] = []

    def cells(row: int) -> tuple[int]:
        asked.append(row)
        return (row,)

    shown = Found(table(("n",), range(1000), cells=cells)).text
    assert asked == [*range(5), *range(985, 1000)]
    assert "... 980 more ..." in shown
    assert "more" not in table(("n",), range(20), cells=cells)


def test_meters_leave_out_what_nothing_was_set_aside_for() -> None:
    nothing = {"spent": 0.0, "left": 0.0, "counts": True}
    ended = {"spent": 0.05, "left": 0.0, "counts": False}
    shown = meters({"delta": nothing, "epsilon": ended, "smooth": {"spent": 0.3, "left": 0.7, "counts": True}})
    assert "delta" not in shown
    assert "no longer counts" in shown
    assert "delta" in meters({"delta": nothing}, {"delta": 1e-9})
    assert "no price" in meters({"epsilon": ended}, {"epsilon": None})


def test_a_policy_says_what_it_takes_and_what_each_reserve_gives() -> None:
    shown = Found(Policy(1, 1e-6, reserve="pure")._repr_html_()).text
    assert "pure (chosen)" in shown
    assert "also training with little noise" in shown
    assert "has no theorem for" not in shown
    assert "RDP, Mechanism with its curve" in Found(Policy(1, 1e-6, filter="paper")._repr_html_()).text
    assert "0.1" in Found(Policy(1, 1e-6, slack=0.1)._repr_html_()).text


def test_a_reading_is_shown_with_what_it_allows_to_be_claimed() -> None:
    account = Accountant(Policy(1, 1e-6))
    account.spend(odo.gaussian(sigma=25))
    reading, *others = account.compare()
    assert "covered by the guarantee" in reading._repr_html_()
    assert reading.statement in Found(reading._repr_html_()).text
    assert all("not covered by the guarantee" in other._repr_html_() for other in others)


def test_what_is_shown_is_rounded_to_the_safe_side() -> None:
    account = Accountant(Policy(1, 1e-6))
    account.spend(PureDP("0.123451"))
    texts = [Found(value._repr_html_()).text for value in (account, account.decide(PureDP("0.100001")))]
    for text in texts:
        assert "0.1235" in text
        assert "0.8765" in text or "0.7765" in text
        assert not re.search(r"\d\.\d{7}", text)


def test_a_ledger_shows_its_first_accounts_and_counts_the_rest() -> None:
    with odo.connect("memory://") as ledger:
        assert "no accounts yet" in ledger._repr_html_()
        for number in range(23):
            ledger.open_account(f"day-{number:02}", Policy(1, 0, filter="basic"))
        shown = Found(ledger._repr_html_()).text
    assert "day-19" in shown
    assert "day-20" not in shown
    assert "and 3 more" in shown
