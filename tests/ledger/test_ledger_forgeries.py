"""Forged histories with every seal and balance made anew: what contradicts itself is named without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_forgery import BASIC, Rows, forge, read, tamper, verified

import odograph as odo
from odograph import ZCDP, Checkpoint, Policy, PureDP
from odograph.errors import LedgerCorrupt
from odograph.ledger.entries import START, digest_of, price_to_text, text_of, totals_to_text


def raised_limit(rows: Rows) -> None:
    first = rows["lone"][0]
    rows["lone"][0] = first._replace(detail=first.detail.replace("1000000000000000", "9000000000000000"))


def dearer(rows: Rows) -> None:
    """A consistent history in which more was spent than the limit."""
    for i in range(1, 5):
        entry = rows["lone"][i]
        rows["lone"][i] = entry._replace(price=entry.price.replace("200000000000000", "300000000000000"))


def cheaper(rows: Rows) -> None:
    entry = rows["lone"][2]
    rows["lone"][2] = entry._replace(price=entry.price.replace("200000000000000", "199999999999000"))


def earlier(rows: Rows) -> None:
    rows["lone"][3] = rows["lone"][3]._replace(time=rows["lone"][2].time - 1)


def closed_before(rows: Rows) -> None:
    rows["lone"][3] = rows["lone"][3]._replace(verb="close", cost="", price="", key="")


def expired_before(rows: Rows) -> None:
    """The reservation of ana had expired when it was voided."""
    for name, i in (("ana", 3), ("top", 4)):
        assert rows[name][i].verb == "reserve"
        rows[name][i] = rows[name][i]._replace(detail=text_of({"expires": str(rows["ana"][3].time)}))


def voided_twice(rows: Rows) -> None:
    void = rows["ana"][4]
    assert void.verb == "void"
    for name in ("ana", "top"):
        last, legs = rows[name][-1], f"ana#{len(rows['ana'])}/top#{len(rows['top'])}"
        price = next(one.price for one in rows[name] if one.verb == "void")
        new = void._replace(account=name, sequence=last.sequence + 1, time=rows["top"][-1].time, price=price)
        rows[name].append(new._replace(legs=legs if name == "ana" else rows["ana"][-1].legs))


def other_cost(rows: Rows) -> None:
    """Another guarantee was asked for than the request's digest says, in all of its accounts alike."""
    for name in ("ana", "top"):
        rows[name][1] = rows[name][1]._replace(cost=text_of(PureDP("0.05").to_dict()))


def other_unit(rows: Rows) -> None:
    first = rows["lone"][0]
    rows["lone"][0] = first._replace(detail=text_of({**first.details, "privacy_unit": "household"}))


def opened_twice(rows: Rows) -> None:
    rows["lone"][3] = rows["lone"][3]._replace(verb="open")


def expires_never(rows: Rows) -> None:
    """The reservation of ana says that it expires, and not when."""
    for name, i in (("ana", 3), ("top", 4)):
        rows[name][i] = rows[name][i]._replace(detail=text_of({"expires": "soon"}))


FORGERIES: dict[str, tuple[Callable[[Rows], None], str]] = {
    "a limit raised": (raised_limit, "lone#0"),
    "more spent than the limit": (dearer, "lone#4"),
    "a price too low": (cheaper, "lone#2"),
    "time that goes back": (earlier, "lone#3"),
    "a charge after closing": (closed_before, "lone#4"),
    "a void after expiry": (expired_before, "ana#4"),
    "a second void": (voided_twice, "ana#7"),
    "another cost than the request's": (other_cost, "#1"),
    "another unit than the policy's": (other_unit, "lone#0"),
    "a second opening": (opened_twice, "lone#3: 'open' is not possible here"),
    "no time to expire at": (expires_never, "#[34]: 'soon' is not a time"),
}


@pytest.mark.parametrize(("change", "named"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_that_contradicts_itself_is_named_without_a_checkpoint(
    file: Path, change: Callable[[Rows], None], named: str
) -> None:
    rows = read(file)
    change(rows)
    forge(file, rows)
    with pytest.raises(LedgerCorrupt, match=named):
        verified(file)


def test_a_parent_charged_less_than_its_child_is_seen_without_a_checkpoint(file: Path) -> None:
    rows = read(file)
    with odo.connect(f"sqlite:///{file}") as ledger:
        compiled = ledger.account("top").compiled
    less = PureDP("0.0001")
    charge = rows["top"][1]
    rows["top"][1] = charge._replace(cost=text_of(less.to_dict()), price=price_to_text(compiled.price(less)))
    assert charge.legs == "ana#1/top#1"
    forge(file, rows)
    with pytest.raises(LedgerCorrupt, match=r"ana#1|top#1"):
        verified(file)


def test_a_charge_that_skips_the_account_above_is_seen(file: Path) -> None:
    rows = read(file)
    rows["ana"][-1] = rows["ana"][-1]._replace(legs=rows["ana"][-1].id)
    assert rows["top"].pop().legs.startswith("ana#6")
    forge(file, rows)
    with pytest.raises(LedgerCorrupt, match="ana#6"):
        verified(file)


def test_a_gap_in_the_numbers_is_seen(file: Path) -> None:
    rows = read(file)
    rows["lone"][2:] = [one._replace(sequence=i, legs=f"lone#{i}") for i, one in enumerate(rows["lone"][2:], start=3)]
    forge(file, rows)
    tamper(file, "UPDATE keys SET sequence = sequence + 1 WHERE account = 'lone' AND sequence >= 2")
    with pytest.raises(LedgerCorrupt, match="lone#3"):
        verified(file)


def test_a_reservation_voided_above_alone_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        ledger.open_account("top", BASIC)
        ledger.open_account("ana", BASIC, parent="top").reserve(PureDP("0.5"))
    rows = read(file)
    held = rows["top"][1]
    request = digest_of("void", (("ana#1", ""),))
    rows["top"].append(held._replace(sequence=2, verb="void", legs="top#2", key="ana#1", request=request))
    forge(file, rows)
    tamper(file, "INSERT INTO keys VALUES ('', 'ana#1', 'top', 2)")
    with pytest.raises(LedgerCorrupt, match="top#2"):
        verified(file)


def test_an_account_below_none_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        ledger.open_account("top", BASIC)
        ledger.open_account("ana", BASIC, parent="top")
    rows = read(file)
    del rows["top"]
    forge(file, rows)
    tamper(file, "DELETE FROM accounts WHERE name = 'top'", "DELETE FROM keys WHERE account = 'top'")
    with pytest.raises(LedgerCorrupt, match=r"top|ana"):
        verified(file)


@pytest.mark.parametrize("relation", ["parent", "successor_of"])
def test_relatives_of_another_unit_are_seen(tmp_path: Path, relation: str) -> None:
    file = tmp_path / "ledger.db"
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        ledger.open_account("top", BASIC)
        ledger.open_account("ana", Policy(1, 0, filter="basic", privacy_unit="household"))
    rows = read(file)
    first = rows["ana"][0]
    rows["ana"][0] = first._replace(detail=text_of({**first.details, relation: "top"}))
    forge(file, rows)
    tamper(file, f"UPDATE accounts SET {relation} = 'top' WHERE name = 'ana'")  # noqa: S608  our own names
    with pytest.raises(LedgerCorrupt, match="ana"):
        verified(file)


def test_a_price_past_the_ceiling_is_replayed_as_the_gate_charged_it(tmp_path: Path) -> None:
    """Written in full where the gate leaves it out, it adds up to the same; and it is not lower than it was."""
    file = tmp_path / "ledger.db"
    policy = Policy(100, "1e-6", filter=[("zcdp", 0.5), (odo.filters.Renyi({10**6: 1}), 0.5)])
    with odo.connect(f"sqlite:///{file}", principal="ana") as ledger:
        account = ledger.open_account("a", policy)
        for _ in range(3):
            account.spend(ZCDP("0.001"))  # 10^18 units at that order, and the ceiling is at 2.3 * 10^18
        totals = account.totals
    rows = read(file)
    full, capped = rows["a"][1].price, rows["a"][3].price
    assert [n for n, (one, other) in enumerate(zip(full.split(), capped.split(), strict=True)) if one != other] == [3]
    rows["a"][3] = rows["a"][3]._replace(price=full)
    forge(file, rows)
    tamper(file, ("UPDATE accounts SET totals = ?", (totals_to_text(totals),)))
    verified(file)
    assert totals.unpriced[3] == 1


def test_a_chain_check_alone_is_caught(file: Path, checkpoint: Checkpoint) -> None:
    """Negative control: a verification that only follows the seals misses what the real one sees."""
    rows = read(file)
    cheaper(rows)
    rows["top"][1] = rows["top"][1]._replace(cost=str(ZCDP(0)))
    forge(file, rows)
    for chain in read(file).values():
        seal = START
        for entry in chain:
            seal = entry.reseal(seal)
            assert seal == entry.seal
    with pytest.raises(LedgerCorrupt):
        verified(file)
    assert checkpoint.accounts.keys() == rows.keys()
