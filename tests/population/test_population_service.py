"""Populations over HTTP: charged once, whatever is killed; who takes part is for a runner, and rounds are for all."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import attacks
import duckdb
import httpx
import numpy as np
import psycopg
import pytest
from population_helpers import read_state
from service_process import Service
from service_server import ServiceThread

import odograph as odo
from odograph import Population, Prices, PureDP
from odograph.client.population import RemotePopulation
from odograph.errors import EntryNotFound, IdempotencyConflict, InvalidArgument, NotPermitted, OdographError
from odograph.ledger.backend import LocalBackend
from odograph.ledger.entries import moment
from odograph.ledger.epochs import Renewal, scheduled
from odograph.population.engines.duckdb import UploadedTable, write_upload
from odograph.population.version_store import hold_lease
from odograph.service import auth
from odograph.service.auth import PERMISSIONS, Role
from odograph.service.routes import populations
from odograph.service.state import AppState
from odograph.service.writer import WriterClient

FULL = os.environ.get("ODOGRAPH_FULL") == "1"
BASIC: Final = odo.Policy(1, 0, filter="basic")
PARQUET: Final = {"Content-Type": "application/vnd.apache.parquet"}
PEOPLE: Final = 3000


@pytest.fixture(params=["numpy", "duckdb"])
def engine(request: pytest.FixtureRequest) -> str:
    """Every engine that a service runs."""
    return str(request.param)


@pytest.fixture
def people(service: ServiceThread, engine: str) -> Iterator[RemotePopulation]:
    """A population of ten people, as its runner reaches it."""
    with odo.connect(service.url, token=service.token("olga")) as owner:
        owner.create_population("people", BASIC, engine=engine, key="create").join(range(10), key="join")
    with odo.connect(service.url, token=service.token("rob", "runner", "people")) as runner:
        yield runner.population("people")


def location_of(service: ServiceThread) -> Path:
    """Return the folder of the only population of a service."""
    assert service.settings.population_root is not None
    (found,) = service.settings.population_root.iterdir()
    return found


def totals_in(service: ServiceThread) -> dict[Any, tuple[int, ...]]:
    """Return what everyone has spent in the last version."""
    folders = [one for one in location_of(service).iterdir() if one.is_dir()]
    return read_state(max(folders, key=lambda one: one.name))


def test_a_round_charges_who_admits_it_once_as_in_a_program(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path, engine: str
) -> None:
    """The same rounds over HTTP and in a program give the same participants and the same totals, to the unit."""
    with odo.connect(f"sqlite:///{tmp_path}/twin.db") as ledger:
        local = ledger.create_population("people", BASIC, engine=engine, location=tmp_path / "local")
        local.join(range(10), key="join")
        asked: list[Prices | PureDP] = [
            PureDP("0.25"),
            Prices([PureDP("0.5"), PureDP("0.8")], [0, 1, 0], ids=[7, 2, 3]),
            Prices([PureDP("0.3")], np.zeros(10, dtype=int), ids=range(10)),
            PureDP("0.25"),
        ]
        for number, prices in enumerate(asked):
            own, remote = (one.charge(prices, key=f"q-{number}") for one in (local, people))
            assert not remote.receipt.repeated
            assert people.charge(prices, key=f"q-{number}").receipt.repeated
            ids = [one for chunk in own.chunks() for one in chunk]
            assert sorted(ids) == sorted(remote.ids.tolist()) == sorted(people.participants(f"q-{number}").ids)
            assert (remote.receipt.version, remote.receipt.key) == (number + 2, f"q-{number}")
        rounds = [one._replace(principal="", seal="", time=None) for one in people.rounds()[2:]]  # type: ignore[arg-type]
        assert rounds == [one._replace(principal="", seal="", time=None) for one in local.rounds()[2:]]
        assert [one.cost for one in people.rounds()] == [None, None, asked[0], None, None, asked[3]]
        state = read_state(max((tmp_path / "local").glob("0*"), key=lambda one: one.name))
        assert totals_in(service) == state


def test_a_key_of_another_round_is_refused(people: RemotePopulation) -> None:
    people.charge(PureDP("0.1"), key="q")
    for prices in (PureDP("0.2"), Prices([PureDP("0.1")], [0], ids=[1])):
        with pytest.raises(IdempotencyConflict):
            people.charge(prices, key="q")


def test_many_people_are_sent_as_parquet_and_charged_as_those_in_json(
    people: RemotePopulation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prices = Prices([PureDP("0.5"), PureDP("0.6")], [1, 0, 1], ids=[4, 2, 9])
    first = people.charge(prices, key="json", note="in JSON")
    monkeypatch.setattr("odograph.client.population._MAX_IN_JSON", 0)
    assert people.charge(prices, key="json", note="in JSON").receipt.repeated, "the same request in another form"
    assert first.ids.tolist() == [4, 2, 9] or sorted(first.ids.tolist()) == [2, 4, 9]
    assert people.charge(prices, key="parquet", note="it's Parquet").ids.tolist() == [2]  # the others had 0.6
    assert people.rounds()[-1].note == "it's Parquet"
    people.join([11, 10], key="more")
    people.remove([2], key="less")
    assert sorted(people.charge(PureDP("0.9"), key="big").ids.tolist()) == [0, 1, 3, 5, 6, 7, 8, 10, 11]
    if not people.ordered:  # a file that is there already
        write_upload({"id": [10, 99], "which": [0, 0]}, {}, tmp_path / "asked.parquet")
        active = people.charge(Prices([PureDP("0.05")], table=str(tmp_path / "asked.parquet")), key="file")
        assert active.ids.tolist() == [10]


def test_strings_are_ids_of_the_engine_that_takes_them(service: ServiceThread) -> None:
    with odo.connect(service.url, token=service.token("olga")) as owner:
        people = owner.create_population("names", BASIC, engine="duckdb", unknown="join")
        people.join(["ana", "bo'; --"], key="join")
        with pytest.raises(InvalidArgument, match="ids must be all integers, or all strings"):
            people._update("joins", {}, {"id": np.array([1, "a"], dtype=object)}, "mixed", "")  # noqa: SLF001  as sent
    with odo.connect(service.url, token=service.token("rob", "runner")) as runner:
        active = runner.population("names").charge(Prices([PureDP("0.1")], [0, 0], ids=["ana", "ca\n"]), key="q")
        assert sorted(active.ids) == ["ana", "ca\n"]


def test_run_and_the_noisy_count_work_as_in_a_program(people: RemotePopulation) -> None:
    if not people.ordered:
        with pytest.raises(InvalidArgument, match="run needs people in an order"):
            people.run(len, [0] * 10, PureDP("0.1"), key="q")
        return
    called: list[int] = []

    def total(records: Any, scale: int) -> float:  # noqa: ANN401  an array, or a list
        called.append(len(records))
        return float(sum(records)) * scale

    with pytest.raises(InvalidArgument, match="records must have exactly one row per id"):
        people.run(total, [1.0] * 9, PureDP("0.1"), key="q", constants={"scale": 2})
    assert people.run(total, [1.0] * 10, PureDP("0.1"), key="q", constants={"scale": 2}) == 20.0

    def price(record: float, outputs: Any) -> PureDP:  # noqa: ANN401  of any kind
        return PureDP("0.95") if record > 4 and outputs else PureDP("0.1")

    assert people.run(total, np.arange(10.0), price, key="r", constants={"scale": 1}) == 0 + 1 + 2 + 3 + 4
    assert called == [0, 10, 0, 5]
    with pytest.raises(IdempotencyConflict, match="ran or may have run"):
        people.run(total, np.arange(10.0), price, key="r", constants={"scale": 1})
    found = people.noisy_active_count(PureDP("0.1"), PureDP("0.5"), key="count")
    assert -100 < found < 120
    assert len(people.outputs) == 3


def test_a_round_that_was_charged_is_answered_by_its_key_though_people_have_joined_since(
    service: ServiceThread,
) -> None:
    with attacks.owner_of(service) as owner:
        attacks.create_population(owner, "people", ids=range(10))
        path, form = "/v1/populations/people/rounds", {"guarantees": [attacks.pure("0.1")], "records": 10}
        assert attacks.post(owner, path, form, key="q").status_code == 201
        attacks.post(owner, "/v1/populations/people/joins", {"ids": [10]}, key="more")
        assert attacks.post(owner, path, form, key="q").json()["repeated"]
        attacks.check_problem(attacks.post(owner, path, form, key="r"), 422)


def test_who_takes_part_is_for_the_runner_that_charged_the_round(
    service: ServiceThread, people: RemotePopulation
) -> None:
    people.charge(PureDP("0.1"), key="a/b é")
    assert len(people.participants("a/b é").ids) == 10
    for role in Role:
        other = odo.connect(service.url, token=service.token("eve", role)).population("people")
        with pytest.raises(EntryNotFound if role is Role.RUNNER else NotPermitted):
            _ = other.participants("a/b é").ids
        other._transport.close()  # noqa: SLF001  its ledger is not kept
    with pytest.raises(EntryNotFound):
        people.participants("join")
    path = "/v1/populations/people/rounds/join/participants"
    with attacks.reach(service, service.token("olga", "runner")) as olga:  # the one who joined them
        attacks.check_problem(olga.get(path), 404)
    people.charge(PureDP("0.1"), key="c")
    people.charge(PureDP("0.1"), key="d")
    with attacks.reach(service, service.token("rob", "runner")) as rob:
        attacks.check_problem(rob.get("/v1/populations/people/rounds/a%2Fb%20%C3%A9/participants"), 410)
        assert rob.get("/v1/populations/people/rounds/c/participants").status_code == 200


SECRET_IDS: Final = [7_310_001, 7_310_002, 7_310_003]


def check_says_nothing(service: ServiceThread, token: str) -> None:
    """Assert that nothing that this key may read has an id, how many there are, or individual prices."""
    with attacks.reach(service, token) as client:
        answers = [
            client.get(f"/v1/{path}")
            for path in (
                "populations",
                "populations/people",
                "populations/people/rounds",
                "populations/people/rounds?first=-2",
                "populations/people/rounds/tuesday/participants",
                "accounts",
                "accounts/people",
                "accounts/people/entries",
                "export",
            )
        ]
    assert [one.status_code for one in answers[:4]] == [200] * 4
    told = "".join(one.text for one in answers)
    assert "0.0731" not in told
    assert not any(str(one) in told for one in SECRET_IDS), "an id is told"
    assert "31337" not in told


def test_an_auditor_reads_rounds_and_nothing_about_anyone(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odo.connect(service.url, token=service.token("olga")) as owner:
        people = owner.create_population("people", BASIC, engine="duckdb")
        people.join(SECRET_IDS, key="monday")
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        form = {"guarantees": [attacks.pure("0.0731"), attacks.pure("0.1")], "which": [0, 1, 0], "ids": SECRET_IDS}
        made = attacks.post(runner, "/v1/populations/people/rounds", form | {"note": "weekly"}, key="tuesday")
        assert made.status_code == 201
        token = service.token("rob", "auditor")  # even if a runner has the same name
        check_says_nothing(service, token)
        with attacks.reach(service, token) as auditor:
            found = auditor.get("/v1/populations/people/rounds").json()
            assert [(one["act"], one["key"], one["note"], one["cost"]) for one in found["rounds"]] == [
                ("create", found["rounds"][0]["key"], "", None),
                ("join", "monday", "", None),
                ("charge", "tuesday", "weekly", None),
            ]
            for verb in ("rounds", "joins", "removals", "counts", "close"):
                attacks.check_problem(attacks.post(auditor, f"/v1/populations/people/{verb}", {}, key="q"), 403)
    # Control: with the permission, the same check finds the ids.
    monkeypatch.setitem(PERMISSIONS, "see-participants", frozenset(auth.Role))
    with pytest.raises(AssertionError, match="an id is told"):
        check_says_nothing(service, token)


def test_a_key_bound_to_accounts_cannot_tell_a_population_from_none(service: ServiceThread) -> None:
    with attacks.owner_of(service) as owner:
        for name in ("people", "others"):
            attacks.create_population(owner, name, ids=range(3))
        attacks.open_account(owner, "census")
    with attacks.reach(service, service.token("rob", "runner", "people", "census")) as runner:
        listed = runner.get("/v1/populations").json()["populations"]
        assert [one["name"] for one in listed] == ["people"]
        for path in ("", "/rounds", "/rounds/q/participants"):
            one, other, account = (
                runner.get(f"/v1/populations/{name}{path}") for name in ("others", "none", "census")
            )
            assert attacks.same_words(one) == attacks.same_words(other) == attacks.same_words(account)
        for verb in ("rounds", "joins", "removals", "counts"):
            bodies: dict[str, Any] = {
                "rounds": {"guarantees": [attacks.pure("0.1")]},
                "counts": {"probe": attacks.pure("0.1"), "cost": attacks.pure("0.1")},
            }
            sent = bodies.get(verb, {"count": 3})
            answers = [
                attacks.post(runner, f"/v1/populations/{name}/{verb}", sent, key=verb)
                for name in ("others", "none", "census")
            ]
            assert [one.status_code for one in answers] == [404] * 3
            assert len({str(attacks.same_words(one)) for one in answers}) == 1


# Names, ledgers and files that lie.


NAMES: Final = ("a..b", "a:b", "a@+-.", "é" * 100, "x" * 100, "CON", "a.parquet")


def test_a_name_is_never_a_path(service: ServiceThread, tmp_path: Path) -> None:
    root = service.settings.population_root
    assert root is not None
    with odo.connect(service.url, token=service.token("olga")) as owner:
        for number, name in enumerate(NAMES, 1):
            owner.create_population(name, BASIC).join(range(3), key=f"join {number}")
            folders = [*root.iterdir()]
            assert len(folders) == number
            assert all(populations._FOLDER.fullmatch(one.name) for one in folders)  # noqa: SLF001  what may be one
            with pytest.raises(InvalidArgument, match="name must be"):
                owner.create_population(f"../{name}", BASIC)
    assert {one.name.partition(".")[0] for one in tmp_path.iterdir()} == {"populations", "served"}


@pytest.mark.parametrize("lie", ["location", "state"])
def test_a_ledger_that_was_imported_leads_nowhere_outside_the_root(
    service: ServiceThread, tmp_path: Path, lie: str
) -> None:
    """The ledger of an attacker: its population is a folder elsewhere, or its version is a path."""
    elsewhere = tmp_path / "elsewhere"
    with odo.connect("memory://", principal="eve") as ledger:
        if lie == "location":
            Population.create("people", BASIC, ledger=ledger, location=elsewhere, ids=3)
        else:
            people = Population.create("people", BASIC, ledger=ledger, location=elsewhere, ids=3)
            (version,) = elsewhere.glob("0*")
            backend = ledger.backend
            about = dict(backend.opened("people").population or {}) | {"state": str(version)}
            other = people._opened.compiled  # noqa: SLF001  as it was compiled
            backend.open(people._opened.head._replace(name="liar"), other, None, "", about)  # type: ignore[call-arg]  # noqa: SLF001  as above
        export = io.StringIO()
        checkpoint = ledger.export(export)
    name = "people" if lie == "location" else "liar"
    before = {one: one.stat().st_mtime_ns for one in elsewhere.rglob("*")}
    with attacks.owner_of(service) as owner:
        kept = json.dumps({"against": checkpoint.to_dict()}) + "\n"
        imported = owner.post("/v1/import", content=(kept + export.getvalue()).encode())
        assert imported.status_code == 200, imported.text
        assert owner.get(f"/v1/populations/{name}").status_code == 200
        for verb, form in (("rounds", {"guarantees": [attacks.pure("0.1")]}), ("removals", {"ids": [1]})):
            answer = attacks.post(owner, f"/v1/populations/{name}/{verb}", form, key=verb)
            assert answer.status_code == 500
            assert str(tmp_path) not in answer.text
        assert owner.get("/readyz").status_code == 200, "the ledger is not the problem"
    assert {one: one.stat().st_mtime_ns for one in elsewhere.rglob("*")} == before


def test_a_service_that_goes_where_the_ledger_says_would_be_caught(
    service: ServiceThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populations, "_folder_of", lambda about: about["location"])
    with pytest.raises(AssertionError, match="201 == 500"):
        test_a_ledger_that_was_imported_leads_nowhere_outside_the_root(service, tmp_path, "location")


def file_of(tmp_path: Path, columns: dict[str, Any], **metadata: str) -> bytes:
    path = tmp_path / "sent.parquet"
    path.unlink(missing_ok=True)
    write_upload(columns, metadata, path)
    return path.read_bytes()


def test_a_file_that_is_wrong_is_refused_and_changes_nothing(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path
) -> None:
    good = json.dumps([attacks.pure("0.1")])
    which = {"which": np.zeros(10, dtype=int)}
    files = [
        b"",
        b"PAR1" * 100,
        file_of(tmp_path, {"id": [1], "which": [0]})[:-10],
        file_of(tmp_path, {"id": [1]}, guarantees=good),
        file_of(tmp_path, {"other": [1]}, guarantees=good),
        file_of(tmp_path, {"id": [1, 1], "which": [0, 0]}, guarantees=good),
        file_of(tmp_path, {"id": [1], "which": [1]}, guarantees=good),
        file_of(tmp_path, {"id": [1], "which": [-1]}, guarantees=good),
        file_of(tmp_path, {"id": [1.5], "which": [0]}, guarantees=good),
        file_of(tmp_path, {"id": ["a"], "which": [0]}, guarantees=good),
        file_of(tmp_path, {"id": [1], "which": [0]}),
        file_of(tmp_path, {"id": [1], "which": [0]}, guarantees="[]"),
        file_of(tmp_path, {"id": [1], "which": [0]}, guarantees="[{}]"),
        file_of(tmp_path, {"id": [1], "which": [0]}, guarantees="[" * 10_000),
        file_of(tmp_path, {"id": [1], "which": [0]}, guarantees=" " * (1 << 24) + good),
        file_of(tmp_path, {"id": [1], "which": [0]}, guarantees=json.dumps([attacks.pure("0.1")] * 70_000)),
        file_of(tmp_path, which if people.ordered else {"id": [1]}, guarantees='[{"kind":"pure","epsilon":-1}]'),
    ]
    before, rounds = totals_in(service), people.rounds()
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        for number, content in enumerate(files):
            for verb in ("rounds", "joins") if number < 3 else ("rounds",):
                headers = PARQUET | {"Idempotency-Key": f"file {number}".replace(" ", "-")}
                answer = runner.post(f"/v1/populations/people/{verb}", content=content, headers=headers)
                assert answer.status_code in {400, 409, 422}, (number, answer.text)
                attacks.check_problem(answer)
        other = runner.post(
            "/v1/populations/people/rounds",
            content=b"x",
            headers={"Idempotency-Key": "q", "Content-Type": "text/csv"},
        )
        attacks.check_problem(other, 415)
    assert (totals_in(service), people.rounds()) == (before, rounds)


def test_a_file_whose_content_cannot_be_read_is_a_bad_request(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path
) -> None:
    """Not a problem with the population's own files, which an operator would have to look at."""
    guarantees = json.dumps([attacks.pure("0.1")] * 2)
    good = file_of(tmp_path, {"id": np.arange(10), "which": np.full(10, 7)}, guarantees=guarantees)
    footer, seven, one = good.index(b"duckdb_schema"), (7).to_bytes(8, "little"), (1).to_bytes(8, "little")
    files = {
        "damaged pages": good[:4] + b"\xff" * 60 + good[64:],
        "a name that is no text": good.replace(b"which", b"whi\xffh"),
        "statistics that hide what is wrong": good[:footer] + good[footer:].replace(seven, one),
    }
    assert len({good, *files.values()}) == 4
    before, rounds = totals_in(service), people.rounds()
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        for name, content in files.items():
            headers = PARQUET | {"Idempotency-Key": name.replace(" ", "-")}
            answer = runner.post("/v1/populations/people/rounds", content=content, headers=headers)
            assert answer.status_code == 422, (name, answer.text)
            attacks.check_problem(answer)
    assert (totals_in(service), people.rounds()) == (before, rounds)


def test_a_file_with_more_people_than_fit_is_refused_before_it_is_read(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populations, "MAX_PEOPLE", 1)
    monkeypatch.setattr(populations, "_MAX_ROWS", 1)
    monkeypatch.setattr(UploadedTable, "columns", lambda *_: pytest.fail("it is read"))
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        content = file_of(tmp_path, {"id": [1, 2]})
        headers = PARQUET | {"Idempotency-Key": "q"}
        answer = runner.post(f"/v1/populations/{people.name}/joins", content=content, headers=headers)
    attacks.check_problem(answer, 422)
    assert "at most 1 rows" in answer.json()["detail"]


def test_a_file_that_understates_its_rows_is_refused_before_it_is_read(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count for the whole file is not what is read: a few kilobytes could otherwise fill the memory."""
    content = file_of(tmp_path, {"id": np.arange(PEOPLE)})
    count = bytes([0x16, 2 * PEOPLE & 0x7F | 0x80, 2 * PEOPLE >> 7])  # field 3 of Thrift, an i64 as a varint
    at = content.index(count, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    forged = content[:at] + bytes([0x16, 0x84, 0x00]) + content[at + len(count) :]  # two rows
    monkeypatch.setattr(populations, "MAX_PEOPLE", 100)
    monkeypatch.setattr(populations, "_MAX_ROWS", 100)
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        for number, sent in enumerate((content, forged)):
            headers = PARQUET | {"Idempotency-Key": f"q-{number}"}
            answer = runner.post(f"/v1/populations/{people.name}/joins", content=sent, headers=headers)
            attacks.check_problem(answer, 422)
            assert f"(got {PEOPLE:,})" in answer.json()["detail"]


def test_a_small_file_that_stands_for_much_is_refused_before_it_is_written_again(
    service: ServiceThread, tmp_path: Path
) -> None:
    """Rounds wait for each other: a file of a kilobyte could otherwise keep all of them waiting for weeks."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    with odo.connect(service.url, token=service.token("olga")) as owner:
        owner.create_population("people", BASIC, engine="duckdb", key="create").join(["a"], key="join")
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 200_000, pa.int32()), pa.array(["x" * 1_000_000]))
    columns = {
        "200 GB of ids": {"id": long},
        "an id that is a list": {"id": pa.array([[0] * 10_000])},
        "an index that is a list": {"id": ["a"], "which": pa.array([[0] * 10_000])},
        "a column that no one asked for": {"id": ["a"], "which": [0], "more": pa.array([[0] * 10_000])},
    }
    answers = {}
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        for name, table in columns.items():
            guarantees = json.dumps([attacks.pure("0.1")])
            pq.write_table(
                pa.table(table).replace_schema_metadata({"guarantees": guarantees}),
                path := tmp_path / "sent.parquet",
                compression="zstd",
            )
            assert path.stat().st_size < 5000
            headers = PARQUET | {"Idempotency-Key": name.replace(" ", "-")}
            answers[name] = runner.post("/v1/populations/people/rounds", content=path.read_bytes(), headers=headers)
    *refused, admitted = answers.values()
    for answer in refused:
        attacks.check_problem(answer, 422)
    assert "at most 68,719,476,736 bytes in all (got 200,000,000,000)" in refused[0].text
    assert admitted.status_code == 201
    (copy := tmp_path / "copy.parquet").touch()
    UploadedTable.open(str(path)).rewrite(str(copy), "1GB")
    assert duckdb.read_parquet(str(copy)).columns == ["id", "which"]


def test_a_column_of_another_name_is_not_overlooked(
    service: ServiceThread, people: RemotePopulation, tmp_path: Path
) -> None:
    """Without ids, prices belong to people in id order: those of a column ID must not be read so."""
    content = file_of(
        tmp_path,
        {"ID": np.arange(10)[::-1].copy(), "which": np.array([0] * 9 + [1])},
        guarantees=json.dumps([attacks.pure("0.1"), attacks.pure("0.9")]),
    )
    before = totals_in(service)
    with attacks.reach(service, service.token("rob", "runner")) as runner:
        headers = PARQUET | {"Idempotency-Key": "q"}
        answer = runner.post(f"/v1/populations/{people.name}/rounds", content=content, headers=headers)
    if people.ordered:
        attacks.check_problem(answer, 422)
        assert "in lower case" in answer.json()["detail"]
        assert totals_in(service) == before
    else:  # names of columns in any case, as in SQL
        small, large = totals_in(service)[9], totals_in(service)[0]
        assert small < large


def test_ids_that_no_engine_takes_are_refused(people: RemotePopulation) -> None:
    before = people.rounds()
    wrong: list[list[Any]] = [[2**63], [-(2**63) - 1], [2**300], [1, "a"], ["a"], [""], ["\0"]]
    for number, ids in enumerate(wrong):
        for verb, form in (("joins", {}), ("rounds", {"guarantees": [attacks.pure("0.1")], "which": [0] * len(ids)})):
            with pytest.raises(InvalidArgument, match="ids must"):
                people._transport.call(  # noqa: SLF001  as it may be sent
                    "POST", f"/v1/populations/people/{verb}", {"ids": ids, **form}, key=f"{verb} {number}"
                )
    assert people.rounds() == before


def test_without_a_root_rounds_are_read_and_nothing_else(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/served.db"
    with odo.connect(url) as ledger:
        Population.create("people", BASIC, ledger=ledger, location=tmp_path / "people", ids=3)
    with ServiceThread(url) as service, attacks.owner_of(service) as owner:
        assert len(owner.get("/v1/populations/people/rounds").json()["rounds"]) == 1
        form = {"guarantees": [attacks.pure("0.1")]}
        answer = attacks.post(owner, "/v1/populations/people/rounds", form, key="q")
        attacks.check_problem(answer, 409)
        assert "--population-root" in answer.json()["detail"]


def test_a_population_that_a_program_made_below_the_root_is_charged_by_both(service: ServiceThread) -> None:
    assert service.settings.population_root is not None
    with odo.connect(service.settings.url, principal="ana") as ledger:
        made = Population.create(
            "people", BASIC, ledger=ledger, location=service.settings.population_root / "a", ids=4
        )
        with odo.connect(service.url, token=service.token("rob", "runner")) as remote:
            people = remote.population("people")
            people.charge(PureDP("0.6"), key="over HTTP")
            assert made.charge(PureDP("0.6"), key="here").ids.tolist() == []
            assert people.charge(PureDP("0.4"), key="again").ids.tolist() == [0, 1, 2, 3]
        ledger.verify()


def test_creating_again_under_the_same_key_is_the_same_population(service: ServiceThread) -> None:
    form = {"name": "people", "policy": attacks.POLICY, "engine": "numpy"}
    with attacks.owner_of(service) as owner:
        statuses = [attacks.post(owner, "/v1/populations", form, key="c").status_code for _ in range(2)]
        assert statuses == [201, 200]
        assert len([*location_of(service).parent.iterdir()]) == 1
        for changed in ({"engine": "duckdb"}, {"unknown": "join"}, {"policy": attacks.POLICY | {"epsilon": "2"}}):
            attacks.check_problem(attacks.post(owner, "/v1/populations", form | changed, key="c"), 422)
        attacks.check_problem(attacks.post(owner, "/v1/populations", form, key="another"), 409)
        assert len([*location_of(service).parent.iterdir()]) == 1, "a population that was not created left a folder"


# A round does not keep spends waiting.


class Held(NamedTuple):
    """Rounds that wait for the lease of a population."""

    statuses: list[int]
    threads: list[threading.Thread]


def hold(service: ServiceThread, token: str, count: int) -> Held:
    """Start rounds that wait, in threads."""
    statuses: list[int] = []

    def charge(number: int) -> None:
        with attacks.reach(service, token) as runner:
            form = {"guarantees": [attacks.pure("0.001")]}
            answer = attacks.post(runner, "/v1/populations/people/rounds", form, key=f"held {number}")
            statuses.append(answer.status_code)

    threads = [threading.Thread(target=charge, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return Held(statuses, threads)


def check_spends_go_on(service: ServiceThread) -> None:
    """Assert that accounts are charged and read while rounds wait, and that the rounds are made in the end."""
    with attacks.owner_of(service) as owner:
        attacks.create_population(owner, "people", ids=range(10))
        attacks.open_account(owner, "census")
        with hold_lease(location_of(service)):
            held = hold(service, service.token("rob", "runner"), 6)
            try:
                time.sleep(0.3)  # until they have arrived; if they have not, this tests less
                assert held.statuses == []
                owner.timeout = httpx.Timeout(2.0)  # a hang
                for number in range(5):
                    answer = attacks.post(
                        owner, "/v1/accounts/census/spends", {"cost": attacks.pure("0.01")}, key=f"q{number}"
                    )
                    assert answer.status_code == 201
                    assert owner.get("/v1/accounts/census/balance").status_code == 200
                assert held.statuses == [], "the rounds did not wait"
            except httpx.TimeoutException:
                pytest.fail("a spend waits for a round")
            finally:
                owner.timeout = httpx.Timeout(60.0)
        for thread in held.threads:
            thread.join(60)
        assert held.statuses == [201] * 6


def test_a_round_that_takes_long_keeps_no_spend_waiting(service: ServiceThread) -> None:
    check_spends_go_on(service)


def test_rounds_in_the_threads_of_accounts_would_be_caught(
    service: ServiceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AppState, "run_population", AppState.run)
    with pytest.raises(pytest.fail.Exception, match="a spend waits for a round"):
        check_spends_go_on(service)


def status_of_a_round_under_a_row_lock(url: str, root: Path) -> int:
    """Charge while another client of the database holds the population's row for a moment."""
    with ServiceThread(url, population_root=root) as service, attacks.owner_of(service) as owner:
        attacks.create_population(owner, "people", ids=range(10))
        with psycopg.connect(url) as other:
            other.execute("SELECT * FROM odograph.accounts WHERE name = 'people' FOR UPDATE")
            release = threading.Timer(0.5, other.rollback)
            release.start()
            form = {"guarantees": [attacks.pure("0.1")]}
            status = attacks.post(owner, "/v1/populations/people/rounds", form, key="q").status_code
            release.join()
        assert owner.post("/v1/verify", json={}).json()["verified"]
    return status


def test_a_round_waits_for_another_client_of_the_database(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of_a_round_under_a_row_lock(postgres_url, tmp_path) == 201
    # Control: without the wait, what was computed is thrown away.
    monkeypatch.setattr(WriterClient, "submit_with_retries", WriterClient.submit)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA odograph CASCADE")
    assert status_of_a_round_under_a_row_lock(postgres_url, tmp_path) == 503


# A service that is killed in the middle of a round.


class Killed:
    """A service whose process dies at a point of its next round, and is started again."""

    def __init__(self, folder: Path, defect: str) -> None:
        self.url, self.root = f"sqlite:///{folder}/ledger.db", folder / "root"
        self.service = Service(self.url, folder, "--population-root", str(self.root), defect=defect)
        self.folder = folder

    def totals(self) -> set[tuple[int, ...]]:
        """Return the distinct totals in the version that the ledger points to: of everyone the same."""
        with odo.connect(self.url) as ledger:
            (location,) = self.root.iterdir()
            people = Population.open("people", ledger=ledger, location=location)
            ledger.verify()
            return {*read_state(people._current_folder()).values()}  # noqa: SLF001  what the ledger points to

    def round(self, key: str) -> dict[str, Any]:
        with odo.connect(self.service.url, token=self.service.token("rob", "runner"), timeout=0.5) as runner:
            return dict(runner.population("people").charge(PureDP("0.001"), key=key).receipt.to_dict())


def check_killed(folder: Path, defect: str, *, charged: bool) -> None:
    """Assert that a round during which the service is killed was charged to everyone, or to no one, and once."""
    killed = Killed(folder, defect)
    with killed.service:
        with odo.connect(killed.service.url, token=killed.service.token()) as owner:
            owner.create_population("people", BASIC, key="c").join(range(PEOPLE), key="join")
        killed.round("first")
        (before,) = killed.totals()
        with pytest.raises(OdographError):
            killed.round("killed")  # the key tells the defect when to strike
    found = killed.totals()
    assert len(found) == 1, "half of the people are charged"
    again = Killed(folder, "")
    with again.service:
        receipt = again.round("killed")
        assert receipt["repeated"] == charged
        assert receipt["version"] == 3
        assert again.round("killed")["repeated"]
    (after,) = again.totals()
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, before[1]], "it is charged once"


@pytest.mark.parametrize("moment", ["before the commit", *(["after the commit"] if FULL else [])])
def test_a_service_killed_in_a_round_has_charged_everyone_or_no_one(tmp_path: Path, moment: str) -> None:
    check_killed(tmp_path, f"dies {moment}", charged=moment == "after the commit")


def test_a_service_that_charges_in_place_would_be_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="half of the people are charged"):
        check_killed(tmp_path, "dies in place", charged=False)


def test_populations_that_renew_are_charged_through_the_service_with_their_lifetime_promise(
    service: ServiceThread, engine: str
) -> None:
    """They are created and renewed beside the service, below its root; their rounds are made through it."""
    root = service.settings.population_root
    assert root is not None
    with odo.connect(service.settings.url) as ledger:
        today = cast("LocalBackend", ledger.backend).now()
        first = moment(today).date() - timedelta(1)
        local = Population.create(
            "visits",
            BASIC,
            ledger=ledger,
            location=root / "visits",
            ids=range(3),
            engine=engine,
            renew=scheduled("daily", str(first), "30"),
        )
        with odo.connect(service.url, token=service.token("rob", "runner", local.name)) as runner:
            people = runner.population(local.name)
            assert sorted(people.charge(PureDP("0.7"), key="a").ids) == [0, 1, 2]
            assert people.lifetime == local.lifetime
            assert f"at most (30, 0)-DP, 30 times (1, 0)-DP, daily from {first}" in repr(people)
            assert runner.population(local.name).rounds()[-1].version == 1


def test_receipts_of_a_service_have_the_promise_of_the_schedule(service: ServiceThread) -> None:
    with odo.connect(service.settings.url) as ledger:
        own = cast("LocalBackend", ledger.backend)
        renewal = Renewal("census", scheduled("monthly", str(moment(own.now()).date()), "12"))
        own.renew(renewal, odo.compile_policy(BASIC), parent="", dataset="", note="")
        with odo.connect(service.url, token=service.token("eve", "analyst")) as analyst:
            (lifetime,) = analyst.current("census").spend(PureDP("0.1")).lifetimes
            assert lifetime == ledger.current("census").lifetime
            assert "by the schedule at most (12, 0)-DP" in str(lifetime)
