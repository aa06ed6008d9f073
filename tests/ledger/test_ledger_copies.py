"""Checkpoints and copies: backup and restore, export and import; a copy never gives budget back."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import odograph as odo
from odograph import BudgetExceeded, Checkpoint, IdempotencyConflict, Ledger, OdographError, Policy, PureDP
from odograph.errors import (
    AccountClosed,
    InvalidArgument,
    LedgerCorrupt,
    LedgerError,
    LedgerNotFound,
    ReservationResolved,
)
from odograph.ledger.entries import Entry
from odograph.ledger.results import Verification

TENTH = PureDP(0.1)
BASIC = Policy(1, 0, filter="basic")
Bring = Callable[[Ledger, Checkpoint | None], Verification]


@pytest.fixture
def busy(ledger: Ledger) -> Ledger:
    ledger.open_account("top", BASIC, note="cap")
    ledger.open_account("jan", BASIC, parent="top", dataset="rivers")
    ledger.open_account("feb", BASIC, parent="top", dataset="rivers")
    ledger.open_account("next", Policy(2, "1e-6"), successor_of="top")
    ledger.account("jan").spend(TENTH, key="q", note="é ☃ \\ \"'\n;--")
    ledger.spend({"jan": TENTH, "feb": PureDP("0.2")}, key="r")
    ledger.account("jan").reserve(TENTH, key="held")
    ledger.account("jan").reserve(TENTH).void("not run")
    ledger.acting_as("zoe").account("next").spend(TENTH, key="q")
    with pytest.raises(BudgetExceeded):
        ledger.account("feb").spend(PureDP(7), key="too much")
    return ledger


def exported(ledger: Ledger) -> str:
    file = io.StringIO()
    ledger.export(file)
    return file.getvalue()


def imported(ledger: Ledger, text: str, checkpoint: Checkpoint | None = None) -> Verification:
    return ledger.import_(io.StringIO(text), checkpoint=checkpoint)


@pytest.fixture(params=["backup", "export"])
def bring(request: pytest.FixtureRequest, busy: Ledger, tmp_path: Path) -> Bring:
    """Both ways to bring the busy ledger, as it was, into another."""
    if request.param == "export":
        text = exported(busy)
        return lambda target, checkpoint: imported(target, text, checkpoint)
    busy.backup(tmp_path / "backup.db")
    return lambda target, checkpoint: target.restore(tmp_path / "backup.db", checkpoint=checkpoint)


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[list[Ledger]]:
    """Empty ledgers, one in memory and one in a file."""
    with odo.connect("memory://", principal="ops") as memory, odo.connect(f"sqlite:///{tmp_path}/t.db") as file:
        yield [memory, file.acting_as("ops")]


# Checkpoints.


def test_a_checkpoint_is_where_every_account_stands(busy: Ledger) -> None:
    checkpoint = busy.checkpoint()
    assert {name: place for name, (place, _) in checkpoint.accounts.items()} == {
        one.name: one.size - 1 for one in busy.accounts()
    }
    again = Checkpoint.from_dict(json.loads(json.dumps(checkpoint.to_dict())))
    assert (again, again.head) == (checkpoint, checkpoint.head)
    assert busy.verify(checkpoint=again).checkpoint == checkpoint
    busy.account("jan").spend(TENTH)
    busy.open_account("new", BASIC)
    later = busy.checkpoint()
    assert later.head != checkpoint.head
    busy.verify(checkpoint=checkpoint)  # more is no contradiction
    busy.verify(checkpoint=later)


def test_a_checkpoint_document_checks_itself(busy: Ledger) -> None:
    assert str(busy.checkpoint()) == busy.checkpoint().head
    form = busy.checkpoint().to_dict()
    damages: list[Callable[[dict[str, object]], object]] = [
        lambda one: one.update(head="0" * 64),
        lambda one: one["accounts"].update(jan=["1", "0" * 64]),  # type: ignore[attr-defined]
        lambda one: one["accounts"].pop("jan"),  # type: ignore[attr-defined]
        lambda one: one["accounts"].update(jan="1"),  # type: ignore[attr-defined]
        lambda one: one.update(accounts=[]),
        lambda one: one.update(form=99),
        lambda one: one.pop("head"),
        lambda one: one.clear(),
    ]
    for damage in damages:
        broken = json.loads(json.dumps(form))
        damage(broken)
        with pytest.raises(LedgerCorrupt):
            Checkpoint.from_dict(broken)
    with pytest.raises(LedgerCorrupt):
        Checkpoint.from_dict([])  # type: ignore[arg-type]


def test_a_ledger_that_is_behind_its_checkpoint_is_found(busy: Ledger) -> None:
    now = dict(busy.checkpoint().accounts)
    sequence, seal = now["jan"]
    ahead = [
        {**now, "jan": (sequence + 1, seal)},  # truncated
        {**now, "gone": (3, seal)},  # removed
        {**now, "jan": (sequence, "0" * 64)},  # rewritten
        {**now, "jan": (1, "0" * 64)},  # rewritten long ago
    ]
    for accounts in ahead:
        with pytest.raises(LedgerCorrupt, match=r"jan|gone"):
            busy.verify(checkpoint=Checkpoint(accounts))


# Copies.


def picture(ledger: Ledger) -> object:
    """All that a ledger tells about its accounts."""
    return [
        (one.name, one.totals, one.compiled, one.lifetime, [held.id for held in one.pending], one.history())
        for one in ledger.accounts()
    ]


def written(ledger: Ledger) -> list[tuple[Entry, str]]:
    """Every entry with its note, but for those that close: a copy without a checkpoint adds them."""
    pages = [past for one in ledger.accounts() for past in one.history()]
    return [(past.entry, past.note) for past in pages if past.entry.verb != "close"]


def test_a_copy_with_its_checkpoint_goes_on_where_the_ledger_was(
    busy: Ledger, bring: Bring, targets: list[Ledger]
) -> None:
    for target in targets:
        found = bring(target, busy.checkpoint())
        assert found.checkpoint == busy.checkpoint() == target.checkpoint() == target.verify().checkpoint
        assert picture(target) == picture(busy)
        assert not any(one.closed for one in target.accounts())
        ana = target.acting_as("ana")
        assert ana.account("jan").spend(TENTH, key="q").repeated  # keys came along
        assert ana.account("jan").reserve(TENTH, key="held").receipt.repeated
        with pytest.raises(IdempotencyConflict):
            ana.account("jan").spend(PureDP("0.3"), key="q")
        held = target.account("jan").pending[0]
        held.commit()
        with pytest.raises(ReservationResolved):
            held.void("x")
        target.account("feb").spend(TENTH, key="too much")
        target.verify(checkpoint=busy.checkpoint())


def test_a_copy_without_a_checkpoint_closes_every_account(busy: Ledger, bring: Bring, targets: list[Ledger]) -> None:
    for target in targets:
        bring(target, None)
        assert all(one.closed for one in target.accounts())
        assert [one.totals for one in target.accounts()] == [one.totals for one in busy.accounts()]
        assert written(target) == written(busy)
        for one in target.accounts():
            with pytest.raises(AccountClosed):
                one.spend(PureDP(0))
        target.account("jan").pending[0].commit()
        target.verify(checkpoint=busy.checkpoint())  # closing is written after what was there
        for one in target.accounts():
            assert "close" in [past.entry.verb for past in one.history()]


def test_a_copy_that_is_behind_its_checkpoint_is_refused(busy: Ledger, bring: Bring, targets: list[Ledger]) -> None:
    busy.account("jan").spend(TENTH)
    for target in targets:
        with pytest.raises(LedgerCorrupt, match=r"jan|top"):
            bring(target, busy.checkpoint())
        nothing_in(target)


def test_a_copy_that_lacks_an_account_of_its_checkpoint_is_refused(
    busy: Ledger, bring: Bring, targets: list[Ledger]
) -> None:
    busy.open_account("later", BASIC)
    for target in targets:
        with pytest.raises(LedgerCorrupt, match="later"):
            bring(target, busy.checkpoint())
        nothing_in(target)


def test_a_copy_that_is_ahead_of_an_old_checkpoint(busy: Ledger, targets: list[Ledger]) -> None:
    """Newer than the checkpoint is not behind it: the copy is taken in open."""
    old = busy.checkpoint()
    busy.account("jan").spend(TENTH)
    for target in targets:
        imported(target, exported(busy), old)
        assert picture(target) == picture(busy)


def nothing_in(ledger: Ledger) -> None:
    """Nothing was taken in: there are no accounts, or there is still no ledger."""
    try:
        assert ledger.accounts() == ()
    except LedgerNotFound:
        return


def test_only_an_empty_ledger_takes_a_copy(busy: Ledger, bring: Bring, targets: list[Ledger]) -> None:
    for target in targets:
        target.open_account("mine", BASIC)
        before = target.checkpoint()
        with pytest.raises(LedgerError):
            bring(target, busy.checkpoint())
        assert target.checkpoint() == before
        target.verify()


def test_a_ledger_takes_its_own_copy_on_every_store(ledger: Ledger, tmp_path: Path) -> None:
    """Here the empty ledger is the one on every store, and the copy comes from memory."""
    with odo.connect("memory://", principal="ana") as origin:
        origin.open_account("a", BASIC).spend(TENTH, key="q", note="n")
        origin.backup(tmp_path / "b.db")
        checkpoint = origin.checkpoint()
        with pytest.raises(LedgerCorrupt):
            imported(ledger, exported(origin)[:-40], checkpoint)
        nothing_in(ledger)
        ledger.restore(tmp_path / "b.db", checkpoint=checkpoint)
        assert picture(ledger) == picture(origin)
        assert ledger.account("a").spend(TENTH, key="q").repeated
        assert exported(ledger) == exported(origin)


def test_a_backup_is_a_ledger_and_overwrites_nothing(busy: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    checkpoint = busy.backup(file)
    assert checkpoint == busy.checkpoint()
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_bytes()
    with pytest.raises(odo.OdographError):
        busy.backup(file)
    assert file.read_bytes() == content
    with odo.connect(f"sqlite:///{file}") as copy:
        copy.verify(checkpoint=checkpoint)
    note = tmp_path / "notes.txt"
    note.write_text("mine")
    with pytest.raises(odo.OdographError):
        busy.backup(note)
    assert note.read_text() == "mine"
    with pytest.raises(odo.OdographError):
        busy.backup(tmp_path / "no folder" / "b.db")


@pytest.mark.parametrize("principal", ["zoe", "a stranger"])
def test_a_backup_is_read_and_never_spends(busy: Ledger, tmp_path: Path, principal: str) -> None:
    file = tmp_path / "backup.db"
    checkpoint = busy.backup(file)
    with odo.connect(f"sqlite:///{file}", principal=principal) as copy:
        before, jan = exported(copy), copy.account("jan")
        assert jan.decide(TENTH)
        assert jan.history()[1].note
        writes: list[Callable[[], object]] = [
            lambda: jan.spend(TENTH),
            lambda: jan.reserve(TENTH),
            jan.pending[0].commit,
            jan.close,
            lambda: copy.open_account("new", BASIC),
        ]
        for write in writes:
            with pytest.raises(odo.errors.LedgerError, match="is a backup, and read-only"):
                write()
        assert copy.verify(checkpoint=checkpoint).checkpoint == checkpoint
        assert exported(copy) == before
        assert copy.erase_note("jan#1")  # a text that must go is taken out of backups too
    twin = tmp_path / "twin.db"  # the negative control: a file that was copied says of itself what the original says
    with odo.connect(f"sqlite:///{tmp_path}/restored.db") as restored:
        restored.restore(file, checkpoint=checkpoint)
    twin.write_bytes((tmp_path / "restored.db").read_bytes())
    with odo.connect(f"sqlite:///{twin}") as copied:
        copied.account("jan").spend(TENTH)


@pytest.mark.parametrize("content", [None, b"", b"not a database", b"SQLite format 3\0" + b"\0" * 1000])
def test_what_is_no_backup_is_refused(ledger: Ledger, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "backup.db"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(odo.OdographError):
        ledger.restore(file)
    assert file.exists() == (content is not None)
    nothing_in(ledger)


def test_erased_texts_stay_erased_in_a_copy(busy: Ledger, targets: list[Ledger]) -> None:
    busy.erase_note("jan#1")
    busy.erase_principal("zoe")
    text = exported(busy)
    assert "☃" not in text
    assert "zoe" not in text
    for target in targets:
        found = imported(target, text, busy.checkpoint())
        assert (found.notes_erased, found.principals_erased) == (1, 1)
        assert target.account("jan").history(1, 1)[0].note == "erased"


# What an export looks like, and damage to it.


def integers(form: object) -> Iterator[object]:
    if isinstance(form, dict | list):
        for value in form.values() if isinstance(form, dict) else form:
            yield from integers(value)
    elif isinstance(form, int | float) and not isinstance(form, bool):
        yield form


def test_an_export_is_json_lines_with_integers_as_texts(busy: Ledger) -> None:
    lines = [json.loads(line) for line in exported(busy).splitlines()]
    entries = [line["entry"] for line in lines if "entry" in line]
    assert len(entries) == sum(one.size for one in busy.accounts())
    assert list(integers(entries)) == []
    assert {type(value) for entry in entries for value in entry.values()} == {str}
    # Only the number of the format itself is a number: no reader can round an amount.
    assert set(integers(lines)) <= {1}
    assert exported(busy) == exported(busy)


def damaged(text: str, dice: random.Random) -> tuple[str, str]:
    """One character changed, removed, said twice, or moved."""
    i = dice.randrange(len(text) - 1)
    new = dice.choice('0123456789abcfxz"\\ {}[],:#-/.\n' if dice.random() < 0.7 else "01\u00e9\0")
    ways = {
        "changed": text[:i] + new + text[i + 1 :],
        "removed": text[:i] + text[i + 1 :],
        "inserted": text[:i] + new + text[i:],
        "turned": text[:i] + text[i + 1] + text[i] + text[i + 2 :],
    }
    way = dice.choice(list(ways))
    return f"{way} at {i}: {text[max(0, i - 30) : i + 10]!r}", ways[way]


@pytest.mark.parametrize("seed", range(4))
def test_every_damage_of_one_character_is_refused_or_harmless(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311  to draw damages
    with odo.connect("memory://", principal="ana") as origin:
        origin.open_account("a", BASIC, note="cap")
        origin.open_account("b", BASIC, parent="a")
        origin.account("b").spend(TENTH, key="q", note="why")
        origin.account("b").reserve(TENTH, key="r").void("no")
        text, checkpoint, before = exported(origin), origin.checkpoint(), written(origin)
    refused, harmless, trusted = 0, 0, 0
    for _ in range(1000):
        what, broken = damaged(text, dice)
        with odo.connect("memory://") as target:
            try:
                imported(target, broken, dice.choice([checkpoint, None]))
            except LedgerCorrupt:
                nothing_in(target)
                refused += 1
                trusted += is_json(broken)
                continue
            harmless += 1
            target.verify(checkpoint=checkpoint)
            assert written(target) == before, what
    assert refused > 5 * harmless
    assert trusted > 100  # negative control: a reader that asks for valid JSON alone takes these


def is_json(text: str) -> bool:
    try:
        [json.loads(line) for line in text.splitlines()]
    except ValueError:
        return False
    return True


def test_lines_removed_moved_or_said_twice_are_refused(busy: Ledger) -> None:
    lines = exported(busy).splitlines(keepends=True)
    sides = [i for i, line in enumerate(lines) if line.startswith(('{"note"', '{"principal"'))]
    for i in range(len(lines)):
        taken("".join(lines[:i]), None)  # cut
        taken("".join(lines[: i + 1] + lines[i:]), busy if i in sides else None)  # said twice
        # A note or a name that is not there is one that was erased: nothing else may be missing.
        taken("".join(lines[:i] + lines[i + 1 :]), busy if i in sides else None)
        turned = [*lines[:i], *lines[i + 1 : i + 2], lines[i], *lines[i + 2 :]]
        taken("".join(turned), busy if i in sides or i + 1 in sides or turned == lines else None)


def test_a_field_that_is_no_text_is_refused(busy: Ledger) -> None:
    text = exported(busy)
    line = text.splitlines()[1]
    assert json.loads(line)["entry"]["sequence"] == "0"
    taken(text.replace(line, line.replace('"sequence":"0"', '"sequence":0')), None)


def test_a_copy_that_ends_elsewhere_than_it_says_is_refused(busy: Ledger) -> None:
    """All that is there is in order, and the last line is of another copy: nothing of both is taken in."""
    text = exported(busy)
    busy.account("next").spend(TENTH)
    *_, last = exported(busy).splitlines()
    *lines, first = text.splitlines()
    assert json.loads(last)["checkpoint"] != json.loads(first)["checkpoint"]
    other = json.loads(first) | {"checkpoint": json.loads(last)["checkpoint"]}
    with odo.connect("memory://") as target:
        with pytest.raises(LedgerCorrupt, match="does not match its own checkpoint"):
            imported(target, "\n".join([*lines, json.dumps(other)]))
        nothing_in(target)


@pytest.mark.parametrize("checkpoint", ["a hash", {"form": 1}, 5], ids=repr)
def test_what_is_no_checkpoint_is_refused(busy: Ledger, checkpoint: Any) -> None:  # noqa: ANN401  anything
    with pytest.raises(InvalidArgument, match=r"^checkpoint must be a Checkpoint"):
        busy.verify(checkpoint=checkpoint)


@pytest.mark.parametrize("file", ["f.jsonl", b"f.jsonl", Path("f.jsonl"), None], ids=repr)
def test_a_name_of_a_file_is_no_open_file(targets: list[Ledger], file: Any) -> None:  # noqa: ANN401  anything
    for target in targets:
        with pytest.raises(
            InvalidArgument, match=r"^file must be an open file \(got .*'w'\) as file: ledger.export\(file\)$"
        ):
            target.export(file)
        with pytest.raises(
            InvalidArgument, match=r"^file must be an open file \(got .*'r'\) as file: ledger.import_\(file\)$"
        ):
            target.import_(file)
        nothing_in(target)


def taken(text: str, origin: Ledger | None) -> None:
    """The text is refused; or, if it may say the same as its origin, it is taken in as the same entries."""
    with odo.connect("memory://") as target:
        try:
            imported(target, text)
        except LedgerCorrupt:
            nothing_in(target)
            return
        assert origin is not None
        target.verify(checkpoint=origin.checkpoint())


def test_a_file_that_was_replaced_is_neither_verified_nor_copied(tmp_path: Path) -> None:
    with odo.connect(f"sqlite:///{tmp_path}/a.db") as ledger, odo.connect(f"sqlite:///{tmp_path}/b.db") as other:
        ledger.open_account("a", BASIC)
        other.open_account("b", BASIC)
        other.backup(tmp_path / "c.db")
        (tmp_path / "c.db").replace(tmp_path / "a.db")
        for work in (ledger.verify, lambda: ledger.backup(tmp_path / "d.db"), lambda: ledger.export(io.StringIO())):
            with pytest.raises(LedgerError, match="was moved or replaced"):
                work()


def test_a_checkpoint_of_nothing_shows_nothing(url: str) -> None:
    file = io.StringIO()
    with odo.connect("memory://") as origin:
        origin.open_account("a", BASIC)
        origin.export(file)
    with odo.connect(url) as ledger, pytest.raises(InvalidArgument, match="must name at least one account"):
        ledger.import_(io.StringIO(file.getvalue()), checkpoint=Checkpoint({}))


def test_a_copy_brings_its_principals_along(url: str) -> None:
    file = io.StringIO()
    with odo.connect("memory://", principal="ana") as origin:
        origin.open_account("a", BASIC).spend(PureDP(0.1), key="k")
        checkpoint = origin.export(file)
    with odo.connect(url, principal="ana") as ledger:
        with pytest.raises(OdographError):
            ledger.open_account("b", BASIC, parent="typo")
        ledger.import_(io.StringIO(file.getvalue()), checkpoint=checkpoint)
        assert ledger.account("a").spend(PureDP(0.1), key="k").repeated
        assert ledger.verify().principals_erased == 0


def resealed(lines: list[str], change: dict[int, dict[str, object]]) -> str:
    """An export of one account with some fields of its entries changed and every seal made anew."""
    seal, out, forms = "0" * 64, [], [json.loads(line) for line in lines]
    for form in forms:
        if "entry" in form:
            fields = form["entry"]
            fields |= change.get(int(fields["sequence"]), {})
            numbers = {name: int(fields[name]) for name in ("version", "sequence", "time")}
            seal = Entry(**(fields | numbers)).reseal(seal)
            fields["seal"] = seal
            last = (fields["account"], int(fields["sequence"]), seal)
        if "checkpoint" in form:
            form["checkpoint"] = Checkpoint({last[0]: last[1:]}).to_dict()
        out.append(json.dumps(form))
    return "\n".join(out) + "\n"


@pytest.mark.parametrize(
    "change",
    [
        {2: {"key": "first"}},
        {2: {"time": "9" * 18}},
        {2: {"time": "9" * 30}},
    ],
    ids=["a key twice", "after the year 9999", "a time that no store holds"],
)
def test_a_forged_copy_is_refused_on_the_way_in(url: str, change: dict[int, dict[str, object]]) -> None:
    file = io.StringIO()
    with odo.connect("memory://") as origin:
        account = origin.open_account("a", BASIC)
        account.spend(PureDP(0.1), key="first")
        account.spend(PureDP(0.1), key="second")
        origin.export(file)
    lines = file.getvalue().splitlines()
    with odo.connect(url) as ledger, pytest.raises(LedgerCorrupt):
        ledger.import_(io.StringIO(resealed(lines, change)))
    with odo.connect("memory://") as ledger:
        assert ledger.import_(io.StringIO(resealed(lines, {}))).entries == 4  # negative control: only resealed


def test_a_backup_is_not_read_as_an_export(tmp_path: Path) -> None:
    with odo.connect("memory://") as origin:
        origin.open_account("a", BASIC)
        origin.backup(tmp_path / "b.db")
    with (
        odo.connect("memory://") as ledger,
        (tmp_path / "b.db").open() as file,
        pytest.raises(LedgerCorrupt, match=r"restore|cannot be read"),
    ):
        ledger.import_(file)
    with odo.connect("memory://") as ledger, pytest.raises(LedgerCorrupt):
        ledger.import_(io.StringIO("[" * 100_000))
